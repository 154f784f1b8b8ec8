use super::*;
use crate::link::sealed::pki::{Flaw, Pki};

fn load(pki: &Pki, flaw: Flaw, claims: &[&str]) -> Result<Identity, IdentityError> {
    Identity::load(&pki.issue("h1", 1, flaw, claims), "h1")
}

#[test]
fn a_certificate_names_its_host_and_its_limits() {
    let folder = tempfile::tempdir().unwrap();
    let pki = Pki::new(folder.path());
    let claims = ["vnet:network=7", "vnet:network=2", "vnet:mac=52:54:00:00:00:01", "https://example.org"];
    let identity = load(&pki, Flaw::None, &claims).unwrap();
    let info = identity.info();
    assert_eq!(info.names, ["h1"]);
    let network = |id| NetworkId::new(id).unwrap();
    assert_eq!(info.claims.networks, Some(vec![network(2), network(7)]));
    assert!(info.claims.allows_network(network(7)) && !info.claims.allows_network(network(1)));
    assert!(info.claims.allows_source("52:54:00:00:00:01".parse().unwrap()));
    assert!(!info.claims.allows_source("52:54:00:00:00:02".parse().unwrap()));
    assert_eq!((info.serial.as_str(), info.fingerprint.len()), ("01", 64));
    assert!(load(&pki, Flaw::None, &[]).unwrap().info().claims == Claims::default());
    for bad in ["vnet:network=16777216", "vnet:network=", "vnet:mac=1", "vnet:else=1", "vnet:"] {
        let error = load(&pki, Flaw::None, &[bad]).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains(bad), "{error}");
    }
}

#[test]
fn a_certificate_that_others_would_refuse_is_refused_at_home() {
    let folder = tempfile::tempdir().unwrap();
    let pki = Pki::new(folder.path());
    let refused = |flaw, name| {
        let files = pki.issue("h1", 1, flaw, &[]);
        Identity::load(&files, name).map(|_| ()).unwrap_err().to_string()
    };
    for (flaw, name, why) in [
        (Flaw::Expired, "h1", "has expired"),
        (Flaw::Early, "h1", "not valid yet"),
        (Flaw::ServerOnly, "h1", "not for both ends"),
        (Flaw::None, "h2", "for h1, not for h2"),
        (Flaw::None, "-", "cannot be a name"),
    ] {
        let error = refused(flaw, name);
        assert!(error.contains(why) && error.contains("h1.pem") && error.lines().count() == 1, "{error}");
    }
    pki.revoke(&[1]);
    assert!(refused(Flaw::None, "h1").contains("revoked"));
    pki.revoke(&[2]);
    assert!(load(&pki, Flaw::None, &[]).is_ok());
}

#[test]
fn errors_name_the_bad_file() {
    let folder = tempfile::tempdir().unwrap();
    let pki = Pki::new(folder.path());
    let good = pki.issue("h1", 1, Flaw::None, &[]);
    let other = pki.issue("h2", 2, Flaw::None, &[]);
    let junk = folder.path().join("junk");
    fs::write(&junk, "nothing\n").unwrap();
    fs::set_permissions(&junk, fs::Permissions::from_mode(0o600)).unwrap();
    let missing = folder.path().join("missing");
    for (files, what) in [
        (IdentityFiles { ca: missing.clone(), ..good.clone() }, "missing"),
        (IdentityFiles { ca: junk.clone(), ..good.clone() }, "junk"),
        (IdentityFiles { certificate: junk.clone(), ..good.clone() }, "junk"),
        (IdentityFiles { key: junk.clone(), ..good.clone() }, "junk"),
        (IdentityFiles { key: missing, ..good.clone() }, "missing"),
        (IdentityFiles { crl: Some(junk), ..good.clone() }, "junk"),
        (IdentityFiles { key: other.key.clone(), ..good.clone() }, "h2.key"),
    ] {
        let error = Identity::load(&files, "h1").map(|_| ()).unwrap_err().to_string();
        assert!(error.contains(what) && error.lines().count() == 1, "{error}");
    }
    fs::set_permissions(&good.certificate, fs::Permissions::from_mode(0o644)).unwrap();
    let swapped =
        IdentityFiles { certificate: good.key.clone(), key: good.certificate.clone(), ..good.clone() };
    let error = Identity::load(&swapped, "h1").map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("holds no") && !error.contains("everybody"), "{error}");
    let public = IdentityFiles { key: good.certificate.clone(), ..good.clone() };
    let error = Identity::load(&public, "h1").map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("h1.pem' holds no private key"), "{error}");
    fs::set_permissions(&good.key, fs::Permissions::from_mode(0o644)).unwrap();
    let error = Identity::load(&good, "h1").map(|_| ()).unwrap_err();
    assert!(matches!(error, IdentityError::Exposed(_)), "{error}");
}

#[test]
fn verification_checks_authority_name_and_time() {
    let (folder, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let pki = Pki::new(folder.path());
    let identity = load(&pki, Flaw::None, &[]).unwrap();
    let chain = |pki: &Pki, flaw| certificates(&pki.issue("h2", 2, flaw, &[]).certificate).unwrap();
    let good = chain(&pki, Flaw::None);
    assert_eq!(identity.verify(&good, "H2").unwrap().names, ["h2"], "names have no case");
    assert!(identity.verify(&good, "h3").unwrap_err().contains("for h2, not for h3"));
    assert!(is_for(&good, "h2") && !is_for(&good, "h3") && !is_for(&[], "h2"));
    assert!(identity.verify(&chain(&pki, Flaw::Expired), "h2").unwrap_err().contains("expired"));
    let foreign = chain(&Pki::new(elsewhere.path()), Flaw::None);
    assert!(identity.verify(&foreign, "h2").unwrap_err().contains("not trusted"));
    assert!(identity.verify(&[], "h2").is_err());
}

#[test]
fn replaced_files_are_read_again_and_bad_ones_ignored() {
    let folder = tempfile::tempdir().unwrap();
    let pki = Pki::new(folder.path());
    let store = pki.store("h1", 1);
    assert!(!store.refresh().unwrap(), "nothing changed");
    pki.issue("h1", 2, Flaw::None, &[]);
    assert!(store.refresh().unwrap());
    assert_eq!(store.current().info().serial, "02");
    pki.issue("h1", 3, Flaw::Expired, &[]);
    assert!(store.refresh().is_err());
    assert!(!store.refresh().unwrap(), "told once");
    assert_eq!(store.current().info().serial, "02");
}
