//! Checks what a configuration names outside of itself: that its files exist, can be read, and have valid contents, and that the CPUs
//! of dispatchers exist.
//!
//! Unlike all other checks these depend on the host, so they run on request only: `vnet check`, `vnetd --check`.

use std::fs::File;
use std::io::ErrorKind;
use std::path::Path;

use vnet::dispatch::isolation::check_cpu;
use vnet::link::sealed::identity::Identity;

use crate::credentials::{check_store, read_token, server_config};
use crate::desired::Desired;
use crate::table::{Notes, Place, Problem};

/// Reads every file that `desired` names, and tries its CPUs. A file that this user may not read is only a warning, because vnetd may read it.
pub(crate) fn check(desired: &Desired, notes: &mut Notes) {
    for cpu in &desired.dispatch.spec.cpus {
        if let Err(error) = check_cpu(*cpu) {
            notes.problems.push(Problem::new(&desired.dispatch.place, error.to_string()));
        }
    }
    if let Some(item) = &desired.identity {
        let files = &item.spec;
        let named = [
            ("[identity] ca", Some(&*files.ca)),
            ("[identity] certificate", Some(&files.certificate)),
            ("[identity] key", Some(&files.key)),
            ("[identity] crl", files.crl.as_deref()),
        ];
        let name = &desired.host.spec.name;
        look(notes, &item.place, &named, || Identity::load(files, name).map(drop).map_err(|e| e.to_string()));
    }
    let (place, access) = (&desired.control.place, &desired.control.spec.access);
    if let Some(file) = access.token_file.as_deref() {
        let named = [("[control] token_file", Some(file))];
        look(notes, place, &named, || read_token(file).map(drop).map_err(|error| error.to_string()));
    }
    if let Some(files) = &access.tls {
        let ca = access.tls_client_ca.as_deref();
        let named = [
            ("[control] tls_cert", Some(&*files.cert)),
            ("[control] tls_key", Some(&files.key)),
            ("[control] tls_client_ca", ca),
        ];
        look(notes, place, &named, || server_config(files, ca).map(drop).map_err(|error| error.to_string()));
    }
    if let Some(item) = &desired.overlay {
        let ca = item.spec.ca.as_deref();
        let identity = item.spec.identity.as_ref().map(|(cert, key)| (cert.as_path(), key.as_path()));
        let named = [
            ("[overlay] ca", ca),
            ("[overlay] cert", identity.map(|(cert, _)| cert)),
            ("[overlay] key", identity.map(|(_, key)| key)),
        ];
        look(notes, &item.place, &named, || check_store(ca, identity).map_err(|error| error.to_string()));
    }
}

/// Opens each file of `named`; once all could be opened, `load` reads and verifies them together.
fn look(
    notes: &mut Notes,
    place: &Place,
    named: &[(&str, Option<&Path>)],
    load: impl FnOnce() -> Result<(), String>,
) {
    let mut all = true;
    for (key, path) in named.iter().filter_map(|(key, path)| Some((key, (*path)?))) {
        let path_name = path.display();
        // Check the file type before opening: opening a FIFO blocks until it has a writer.
        let opened = match std::fs::metadata(path) {
            Ok(meta) if !meta.is_file() => Err(ErrorKind::InvalidInput.into()),
            Ok(_) => File::open(path).map(drop),
            Err(error) => Err(error),
        };
        let Err(error) = opened else { continue };
        all = false;
        match error.kind() {
            ErrorKind::PermissionDenied => {
                let text = format!("{key} '{path_name}' was not checked: this user may not read it");
                notes.warnings.push(Problem::new(place, text));
            }
            ErrorKind::InvalidInput => {
                notes.problems.push(Problem::new(place, format!("{key} '{path_name}' is not a file")));
            }
            _ => {
                let text = format!(
                    "cannot read {key} '{path_name}': {error}; put the file there, or correct the path"
                );
                notes.problems.push(Problem::new(place, text));
            }
        }
    }
    if all && let Err(text) = load() {
        notes.problems.push(Problem::new(place, text));
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use vnet::link::sealed::pki::{Flaw, Pki};

    use crate::config::{Configuration, check_files, parse};

    fn check(text: &str) -> Result<Configuration, String> {
        check_files(parse("f", text).unwrap()).map_err(|error| error.to_string())
    }

    fn identity(folder: &Path) -> String {
        let path = |file: &str| folder.join(file).display().to_string();
        let [ca, certificate, key, crl] = ["ca.pem", "h1.pem", "h1.key", "crl.pem"].map(path);
        format!(
            "[host]\nname = \"h1\"\n[identity]\nca = \"{ca}\"\ncertificate = \"{certificate}\"\nkey = \"{key}\"\n\
             crl = \"{crl}\"\n"
        )
    }

    #[test]
    fn an_identity_has_to_be_there_and_valid() {
        let folder = tempfile::tempdir().unwrap();
        let pki = Pki::new(folder.path());
        let files = pki.issue("h1", 1, Flaw::None, &[]);
        let text = identity(folder.path());
        assert!(check(&text).unwrap().warnings.is_empty());
        std::fs::rename(&files.key, folder.path().join("aside")).unwrap();
        let told = check(&text).unwrap_err();
        let want = format!("f:3: cannot read [identity] key '{}': No such file", files.key.display());
        assert!(told.starts_with(&want) && told.lines().count() == 1, "{told}");
        std::fs::create_dir(&files.key).unwrap();
        assert!(check(&text).unwrap_err().ends_with("h1.key' is not a file"));
        std::fs::remove_dir(&files.key).unwrap();
        std::fs::write(&files.key, "nonsense").unwrap();
        assert!(check(&text).unwrap_err().contains("h1.key"));
        pki.issue("h1", 2, Flaw::Expired, &[]);
        let told = check(&text).unwrap_err();
        assert!(told.contains("h1.pem' cannot be used") && told.lines().count() == 1, "{told}");
    }

    #[test]
    fn the_cpus_of_dispatchers_have_to_be_there() {
        let text = |cpu: usize| format!("[host]\nname = \"h1\"\n[dispatch]\ncpus = [{cpu}]\n");
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let allowed = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap();
        let first = allowed.trim().split(['-', ',']).next().unwrap();
        check(&text(first.parse().unwrap())).unwrap();
        let told = check(&text(1000)).unwrap_err();
        assert!(told.starts_with("f:3: cannot pin a dispatcher to CPU 1000"), "{told}");
    }

    #[test]
    fn the_files_of_control_and_the_store_have_to_be_right() {
        let folder = tempfile::tempdir().unwrap();
        let pki = Pki::new(folder.path());
        pki.issue("h1", 1, Flaw::None, &[]);
        pki.issue("h2", 2, Flaw::None, &[]);
        let dir = folder.path().display();
        let control = |key: &str| {
            format!(
                "[host]\nname = \"h1\"\n[control]\ntls_cert = \"{dir}/h1.pem\"\ntls_key = \"{dir}/{key}.key\"\n\
                 tls_client_ca = \"{dir}/ca.pem\"\n"
            )
        };
        check(&control("h1")).unwrap();
        assert!(
            check(&control("h2"))
                .unwrap_err()
                .contains("[control] tls_cert and tls_key cannot be used together")
        );
        assert!(check(&control("h3")).unwrap_err().contains("cannot read [control] tls_key"));
        let store = |key: &str, ca: &str| {
            format!(
                "[host]\nname = \"h1\"\n[overlay]\netcd = [\"https://127.0.0.1:1\"]\ntrusted = true\nca = \"{dir}/{ca}\"\n\
                 cert = \"{dir}/h1.pem\"\nkey = \"{dir}/{key}.key\"\n"
            )
        };
        check(&store("h1", "ca.pem")).unwrap();
        assert!(
            check(&store("h2", "ca.pem"))
                .unwrap_err()
                .contains("[overlay] cert and key cannot be used together")
        );
        assert!(check(&store("h1", "h1.key")).unwrap_err().contains("[overlay] ca"));
        let token = format!("[host]\nname = \"h1\"\n[control]\ntoken_file = \"{dir}/ca.pem\"\n");
        assert!(check(&token).unwrap_err().starts_with("f:3: [control] token_file"));
    }
}
