//! `vnet mpi-env`: the environment in which an MPI library uses the interconnect, through the libfabric provider `vnet`.

use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use serde_json::{Value, json};

use crate::output::{Failure, print};

/// The file that libfabric looks for.
const PROVIDER: &str = "libvnet-fi.so";

/// Which library, and where the provider is.
#[derive(Args)]
pub struct MpiEnv {
    /// The MPI library
    #[arg(value_enum, default_value_t = Library::OpenMpi)]
    library: Library,

    /// Folder of libvnet-fi.so [default: that of this program, or ../lib/libfabric from there]
    #[arg(long, value_name = "FOLDER")]
    provider_path: Option<PathBuf>,
}

#[derive(Clone, Copy, ValueEnum)]
enum Library {
    /// Open MPI 4 and later
    OpenMpi,
    /// MPICH, built for ch4:ofi
    Mpich,
    /// Intel MPI
    IntelMpi,
}

pub fn run(wanted: &MpiEnv, json: bool) -> Result<(), Failure> {
    let folder = match folder(wanted.provider_path.as_deref()) {
        Ok(folder) => folder,
        Err(error) => {
            if !json {
                // The status of a command substitution is lost: eval "$(vnet mpi-env)" && mpirun must end here.
                print("false\n")?;
            }
            return Err(error);
        }
    };
    let variables = variables(wanted.library, &folder);
    if json {
        let object: serde_json::Map<String, Value> =
            variables.into_iter().map(|(name, value)| (name.into(), json!(value))).collect();
        return print(&format!("{}\n", Value::Object(object)));
    }
    let lines = variables.into_iter().map(|(name, value)| format!("export {name}={}\n", quoted(&value)));
    print(&lines.collect::<String>())
}

/// The folder with the provider.
fn folder(wanted: Option<&Path>) -> Result<String, Failure> {
    let own = std::env::current_exe().ok().and_then(|program| program.parent().map(Path::to_owned));
    let folders = match wanted {
        Some(folder) => vec![folder.to_owned()],
        None => own.into_iter().flat_map(|own| [own.clone(), own.join("../lib/libfabric")]).collect(),
    };
    let found = folders.iter().find(|folder| folder.join(PROVIDER).exists());
    let absolute = found.and_then(|folder| folder.canonicalize().ok());
    absolute.and_then(|folder| folder.to_str().map(str::to_owned)).ok_or_else(|| {
        let looked: Vec<String> = folders.iter().map(|folder| folder.display().to_string()).collect();
        let text = format!(
            "no {PROVIDER} in {}: run 'make build', or name its folder by --provider-path",
            looked.join(" or ")
        );
        Failure::Lines(vec![text])
    })
}

fn variables(library: Library, folder: &str) -> Vec<(&'static str, String)> {
    let mut variables = vec![("FI_PROVIDER", "vnet".to_owned()), ("FI_PROVIDER_PATH", folder.to_owned())];
    let more: &[(&'static str, &str)] = match library {
        Library::OpenMpi => &[
            ("OMPI_MCA_pml", "cm"),
            ("OMPI_MCA_mtl", "ofi"),
            // Transports that would open devices of their own at start.
            ("OMPI_MCA_btl", "^uct,openib"),
            ("OMPI_MCA_osc", "^ucx"),
        ],
        Library::Mpich => &[("MPIR_CVAR_CH4_NETMOD", "ofi"), ("MPIR_CVAR_OFI_USE_PROVIDER", "vnet")],
        Library::IntelMpi => &[
            ("I_MPI_FABRICS", "ofi"),
            ("I_MPI_OFI_PROVIDER", "vnet"),
            // Its own libfabric looks for providers in its own folder only.
            ("I_MPI_OFI_LIBRARY_INTERNAL", "0"),
        ],
    };
    variables.extend(more.iter().map(|(name, value)| (*name, (*value).to_owned())));
    if matches!(library, Library::OpenMpi) {
        // mpirun passes its own variables to other hosts by itself, and these because it is told to.
        let passed = format!("FI_PROVIDER=vnet;FI_PROVIDER_PATH={folder}");
        variables.push(("OMPI_MCA_mca_base_env_list", passed));
    }
    variables
}

/// A word that a shell takes as it is.
fn quoted(word: &str) -> String {
    let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "/._-".contains(letter);
    if word.chars().all(is_plain) { word.into() } else { format!("'{}'", word.replace('\'', "'\\''")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_library_is_told_to_use_the_provider() {
        for library in [Library::OpenMpi, Library::Mpich, Library::IntelMpi] {
            let variables = variables(library, "/opt/vnet");
            assert_eq!(
                variables[..2],
                [("FI_PROVIDER", "vnet".into()), ("FI_PROVIDER_PATH", "/opt/vnet".into())]
            );
            assert!(variables.len() > 3);
        }
    }

    #[test]
    fn words_are_quoted_for_the_shell() {
        assert_eq!(quoted("/opt/vnet-1.0"), "/opt/vnet-1.0");
        assert_eq!(quoted("^uct,openib"), "'^uct,openib'");
        assert_eq!(quoted("it's"), "'it'\\''s'");
    }

    #[test]
    fn a_folder_without_the_provider_is_named() {
        let Err(Failure::Lines(lines)) = folder(Some(Path::new("/proc"))) else { panic!("found") };
        assert!(lines[0].contains("/proc") && lines[0].contains("--provider-path"), "{lines:?}");
    }
}
