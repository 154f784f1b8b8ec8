//! The overlay's last known state on disk: a host that restarts while the store is unreachable continues with it.
//!
//! One JSON file of mode 0600 per host name, replaced atomically. Unsigned records are trusted as they are, so a file that other
//! users could have written is ignored; signed records are verified like those of the store. The file belongs to one store: with
//! other endpoints it is ignored, too.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use vnet_control::desired::OverlaySpec;

/// Maximum length of the file in bytes: 131 072 signed stations of about 450 bytes, and 4 096 hosts with certificates.
const FILE_MAX: u64 = 96 << 20;
/// Age at which the state is ignored, in seconds: addresses may have other owners by then.
const AGE_MAX_S: u64 = 7 * 86_400;
/// Format of the file.
const VERSION: u32 = 1;
/// Default folder, if neither the configuration nor the service manager names one.
const FOLDER: &str = "/var/lib/vnet";

/// The host and store to which a file belongs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Owner {
    version: u32,
    host: String,
    etcd: Vec<String>,
    sealed: bool,
}

/// A file's contents.
#[derive(Serialize, Deserialize)]
struct State {
    #[serde(flatten)]
    owner: Owner,
    /// Time of the write, in seconds since 1970.
    saved: u64,
    /// Keys and values, as in the store.
    records: Vec<(String, String)>,
}

/// The file of a host's last known state.
#[derive(Clone, Debug)]
pub struct LastKnown {
    file: PathBuf,
    owner: Owner,
}

fn now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

impl LastKnown {
    /// The file of a host, in the configured folder, `$STATE_DIRECTORY` (set by systemd), or the default folder.
    pub fn new(spec: &OverlaySpec, host: &str) -> LastKnown {
        // systemd separates several folders by colons.
        let by_service = std::env::var("STATE_DIRECTORY").ok();
        let by_service =
            by_service.iter().flat_map(|folders| folders.split(':')).find(|folder| !folder.is_empty());
        let folder = spec.state.clone().unwrap_or_else(|| by_service.unwrap_or(FOLDER).into());
        let (version, host) = (VERSION, host.to_string());
        let file = folder.join(format!("overlay-{host}.json"));
        LastKnown { file, owner: Owner { version, host, etcd: spec.etcd.clone(), sealed: spec.sealed } }
    }

    /// The saved records; none if there is no file or it is ignored, which is logged with the reason.
    pub fn read(&self) -> Vec<(String, String)> {
        match self.try_read() {
            Ok(records) => records,
            Err(error) if error.kind() == io::ErrorKind::NotFound => vec![],
            Err(error) => {
                let file = self.file.display();
                tracing::warn!("overlay: the last known state in {file} is ignored: {error}");
                vec![]
            }
        }
    }

    fn try_read(&self) -> io::Result<Vec<(String, String)>> {
        let file = OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW).open(&self.file)?;
        let about = file.metadata()?;
        let ours = [0, rustix::process::geteuid().as_raw()].contains(&about.uid());
        if !about.is_file() || !ours || about.mode() & 0o022 != 0 {
            return Err(io::Error::other(
                "others may write it; its owner must be vnetd's user, its mode 600",
            ));
        }
        let mut text = vec![];
        if file.take(FILE_MAX + 1).read_to_end(&mut text)? as u64 > FILE_MAX {
            return Err(io::Error::other(format!("it has more than {FILE_MAX} bytes")));
        }
        let State { owner, saved, records } = serde_json::from_slice(&text)?;
        if owner != self.owner {
            return Err(io::Error::other("it is of another store, host name or version"));
        }
        if now_s().saturating_sub(saved) > AGE_MAX_S {
            return Err(io::Error::other(format!("it is older than {} days", AGE_MAX_S / 86_400)));
        }
        Ok(records)
    }

    /// Replaces the file. Records beyond the file's limit are left out, stations before hosts.
    pub fn write(&self, mut records: Vec<(String, String)>) -> io::Result<()> {
        // JSON escapes quotes, so a value can take up to twice its length.
        let mut left = FILE_MAX - 4096;
        let fits = |(key, value): &&(String, String)| {
            left = left.saturating_sub((key.len() + 2 * value.len() + 8) as u64);
            left > 0
        };
        let fitting = records.iter().take_while(fits).count();
        records.truncate(fitting);
        let state = State { owner: self.owner.clone(), saved: now_s(), records };
        let folder = self.file.parent().unwrap_or(Path::new("/"));
        std::fs::create_dir_all(folder)?;
        let new = self.file.with_extension("new");
        let mut file = create(&new)?;
        file.write_all(&serde_json::to_vec(&state)?)?;
        // Sync before the rename, so that a crash leaves either the old file or the new one.
        file.sync_data()?;
        std::fs::rename(&new, &self.file)
    }

    /// The file's path.
    pub fn path(&self) -> &Path {
        &self.file
    }
}

/// Creates a file that only vnetd's user can read, without following a symbolic link planted there.
fn create(path: &Path) -> io::Result<File> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn spec(folder: &Path) -> OverlaySpec {
        OverlaySpec {
            etcd: vec!["http://10.0.0.1:2379".into()],
            state: Some(folder.into()),
            ..OverlaySpec::default()
        }
    }

    fn records() -> Vec<(String, String)> {
        vec![("/vnet/v1/1/hosts/h2".into(), r#"{"address":"10.0.0.2:9000","instance":5}"#.into())]
    }

    #[test]
    fn what_was_written_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let kept = LastKnown::new(&spec(&folder.path().join("made")), "h1");
        assert_eq!(kept.read(), [], "no file yet");
        kept.write(vec![]).unwrap();
        kept.write(records()).unwrap();
        assert_eq!(kept.read(), records());
        assert_eq!(kept.path().metadata().unwrap().mode() & 0o777, 0o600);
        let files = std::fs::read_dir(kept.path().parent().unwrap()).unwrap().count();
        assert_eq!(files, 1, "no temporary file is left");
    }

    #[test]
    fn what_may_be_wrong_is_ignored() {
        let folder = tempfile::tempdir().unwrap();
        let kept = LastKnown::new(&spec(folder.path()), "h1");
        kept.write(records()).unwrap();
        let good = std::fs::read(kept.path()).unwrap();
        let why = || kept.try_read().unwrap_err().to_string();
        for cut in [0, 1, good.len() / 2, good.len() - 1] {
            std::fs::write(kept.path(), &good[..cut]).unwrap();
            assert!(kept.read().is_empty(), "{cut} bytes: {}", why());
        }
        let text = String::from_utf8(good.clone()).unwrap();
        let saved = format!("\"saved\":{}", now_s());
        let old = text.replace(&saved, &format!("\"saved\":{}", now_s() - AGE_MAX_S - 5));
        std::fs::write(kept.path(), old).unwrap();
        assert!(why().contains("older than 7 days"), "{}", why());
        std::fs::write(kept.path(), text.replace("10.0.0.1:2379", "10.0.0.9:2379")).unwrap();
        assert!(why().contains("another store"), "{}", why());
        std::fs::write(kept.path(), &good).unwrap();
        assert_eq!(kept.read(), records());
        std::fs::set_permissions(kept.path(), std::fs::Permissions::from_mode(0o622)).unwrap();
        assert!(why().contains("others may write it"), "{}", why());
        // A symbolic link is not followed.
        let elsewhere = folder.path().join("elsewhere");
        std::fs::rename(kept.path(), &elsewhere).unwrap();
        std::os::unix::fs::symlink(&elsewhere, kept.path()).unwrap();
        assert!(kept.read().is_empty());
        kept.write(records()).unwrap();
        assert_eq!(kept.read(), records(), "the link is replaced");
        File::options().write(true).open(kept.path()).unwrap().set_len(FILE_MAX + 1).unwrap();
        assert!(why().contains("more than"), "{}", why());
    }

    #[test]
    fn the_file_is_bounded() {
        let folder = tempfile::tempdir().unwrap();
        let kept = LastKnown::new(&spec(folder.path()), "h1");
        let record = ("k".repeat(40), "v".repeat(8 << 20));
        kept.write(vec![record; 9]).unwrap();
        assert!(kept.path().metadata().unwrap().len() <= FILE_MAX);
        assert_eq!(kept.read().len(), 5, "half of them, since a value's quotes may double it");
    }
}
