//! `vnet keys`: sealed links accept the certificates that it issues, and refuse those that it revokes.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;
use tempfile::TempDir;
use vnet::link::sealed::identity::{CertificateInfo, Identity, IdentityFiles};

fn keys(folder: &Path, words: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vnet"));
    command.args(["--json", "keys", words[0], "--dir"]).arg(folder).args(&words[1..]);
    command.output().unwrap()
}

/// The JSON output of a command that must succeed.
fn output_of(folder: &Path, words: &[&str]) -> Value {
    let output = keys(folder, words);
    assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// The one-line error of a command that must fail.
fn refused(folder: &Path, words: &[&str]) -> String {
    let output = keys(folder, words);
    assert_eq!(output.status.code(), Some(1), "{words:?}");
    let line = String::from_utf8(output.stderr).unwrap();
    assert_eq!(line.lines().count(), 1, "{line}");
    line
}

fn files(folder: &Path, name: &str) -> IdentityFiles {
    let at = |file: &str| folder.join(file);
    let (certificate, key) = (at(&format!("{name}.pem")), at(&format!("{name}.key")));
    IdentityFiles { ca: at("ca.pem"), certificate, key, crl: Some(at("crl.pem")) }
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o777
}

fn authority() -> (TempDir, std::path::PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("keys");
    output_of(&path, &["init"]);
    (folder, path)
}

#[test]
fn issued_certificates_are_accepted() {
    let (_folder, path) = authority();
    output_of(&path, &["issue", "h1"]);
    let limits = ["issue", "h2", "--networks", "2,1", "--macs", "52:54:00:00:00:01"];
    let issued = output_of(&path, &limits);
    let identity = Identity::load(&files(&path, "h1"), "h1").unwrap();
    let other = Identity::load(&files(&path, "h2"), "h2").unwrap();
    assert_eq!(issued["serial"].as_str(), Some(other.info().serial.as_str()));
    assert!(Identity::load(&files(&path, "h1"), "h2").is_err(), "a certificate for another name");
    let claims = &other.info().claims;
    assert_eq!(claims.networks.as_ref().unwrap().iter().map(|id| id.get()).collect::<Vec<_>>(), [1, 2]);
    assert!(claims.macs.is_some() && identity.info().claims.macs.is_none());
    for secret in ["ca.key", "h1.key", "h2.key"] {
        assert_eq!(mode(&path.join(secret)), 0o600, "{secret}");
    }
    for public in ["ca.pem", "crl.pem", "h1.pem"] {
        assert_eq!(mode(&path.join(public)), 0o644, "{public}");
    }
    let left = fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    assert!(left.into_iter().all(|name| !name.ends_with(".new")), "a temporary file is left");
}

#[test]
fn revoked_certificates_are_refused_and_renewed_ones_accepted() {
    let (_folder, path) = authority();
    let first = output_of(&path, &["issue", "h1"])["serial"].clone();
    let second = output_of(&path, &["issue", "h1"])["serial"].clone();
    assert_ne!(first, second);
    let revoked = output_of(&path, &["revoke", "h1"])["revoked"].as_array().unwrap().clone();
    assert!(revoked.len() == 2 && revoked.contains(&first) && revoked.contains(&second), "{revoked:?}");
    let error = Identity::load(&files(&path, "h1"), "h1").map(drop).unwrap_err().to_string();
    assert!(error.contains("revoked"), "{error}");
    assert!(refused(&path, &["revoke", "h1"]).contains("'h1' has no certificate to revoke"));
    assert!(refused(&path, &["revoke", "h9"]).contains("'h9' has no certificate to revoke"));
    let third = output_of(&path, &["issue", "h1"])["serial"].clone();
    assert!(Identity::load(&files(&path, "h1"), "h1").is_ok());
    output_of(&path, &["issue", "h2"]);
    output_of(&path, &["revoke", "h2"]);
    let shown = output_of(&path, &["show"]);
    let states: Vec<_> = shown["certificates"]
        .as_array()
        .unwrap()
        .iter()
        .map(|row| (row["serial"].clone(), row["state"].clone()))
        .collect();
    assert_eq!(states.len(), 4);
    for (serial, state) in states {
        assert_eq!(state, if serial == third { "valid" } else { "revoked" });
    }
    assert_eq!(shown["ca"]["state"], "valid");
    let text =
        Command::new(env!("CARGO_BIN_EXE_vnet")).args(["keys", "show", "--dir"]).arg(&path).output().unwrap();
    assert!(String::from_utf8(text.stdout).unwrap().lines().count() == 6);
}

#[test]
fn mistakes_are_one_line_and_change_nothing() {
    let (folder, path) = authority();
    let before = fs::read(path.join("ca.pem")).unwrap();
    assert!(refused(&path, &["init"]).contains("already exists"));
    for name in ["no name", "ca", "crl", "../h1", "-"] {
        let name = refused(&path, &["issue", "--", name]);
        assert!(name.contains("cannot be"), "{name}");
    }
    assert!(refused(&folder.path().join("elsewhere"), &["issue", "h1"]).contains("vnet keys init"));
    assert!(refused(&folder.path().join("elsewhere"), &["show"]).contains("ca.pem"));
    assert_eq!(fs::read(path.join("ca.pem")).unwrap(), before);
    assert_eq!(keys(&path, &["issue", "h1", "--days", "0"]).status.code(), Some(2), "wrong usage");
    assert_eq!(keys(&path, &["issue", "h1", "--macs", "nonsense"]).status.code(), Some(2), "wrong usage");
}

#[test]
fn certificates_are_valid_for_the_days_given() {
    let (_folder, path) = authority();
    output_of(&path, &["issue", "h1", "--days", "10"]);
    let info = CertificateInfo::load(&path.join("h1.pem")).unwrap();
    let days = (info.valid.1 - info.valid.0) as f64 / 86_400.0;
    assert!((10.0..10.1).contains(&days), "{days}");
}

/// The suggested `[identity]` table has absolute paths and can be pasted into the configuration.
#[test]
fn the_suggested_configuration_is_valid() {
    let folder = tempfile::tempdir().unwrap();
    let run = |words: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_vnet"));
        let output = command.current_dir(folder.path()).arg("keys").args(words).output().unwrap();
        assert!(output.status.success(), "{words:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    run(&["init", "--dir", "keys"]);
    let text = run(&["issue", "h1", "--dir", "keys"]);
    let identity = &text[text.find("[identity]").unwrap()..];
    let configuration = format!("[host]\nname = \"h1\"\n{identity}");
    let files =
        vnet_control::config::parse("suggested", &configuration).unwrap().desired.identity.unwrap().spec;
    assert!(Identity::load(&files, "h1").is_ok());
}
