//! Signatures with the private keys of hosts' certificates, for records that do not travel over TLS.
//!
//! The kind of key implies the scheme, so no message names it: Ed25519, ECDSA with the hash of its curve's size, RSA-PSS with
//! SHA-256 (RFC 8446, section 4.2.3). A signed message must begin with its own context string, because TLS signs with the same
//! keys; what TLS signs begins with 64 spaces (section 4.4.3).

use std::fmt;

use rustls::SignatureScheme;
use rustls::pki_types::{CertificateDer, SignatureVerificationAlgorithm, UnixTime};
use webpki::EndEntityCert;
use webpki::aws_lc_rs as algorithm;

use crate::link::sealed::identity::{CertificateInfo, Identity, is_for, unix_now};

/// Signature schemes, one per kind of key.
const SCHEMES: [SignatureScheme; 5] = [
    SignatureScheme::ED25519,
    SignatureScheme::ECDSA_NISTP256_SHA256,
    SignatureScheme::ECDSA_NISTP384_SHA384,
    SignatureScheme::ECDSA_NISTP521_SHA512,
    SignatureScheme::RSA_PSS_SHA256,
];

/// Verification algorithms for [`SCHEMES`]. At most one fits a given key; the others refuse the key before any computation.
fn algorithms() -> [&'static dyn SignatureVerificationAlgorithm; 5] {
    [
        algorithm::ED25519,
        algorithm::ECDSA_P256_SHA256,
        algorithm::ECDSA_P384_SHA384,
        algorithm::ECDSA_P521_SHA512,
        algorithm::RSA_PSS_2048_8192_SHA256_LEGACY_KEY,
    ]
}

impl Identity {
    /// This host's signature of `message`. The error is one line.
    pub fn sign(&self, message: &[u8]) -> Result<Vec<u8>, String> {
        let signer =
            self.signing_key().choose_scheme(&SCHEMES).ok_or("its key is of a kind that cannot sign")?;
        signer.sign(message).map_err(|error| error.to_string())
    }
}

/// A host with a verified certificate.
pub struct Signatory {
    name: Box<str>,
    chain: Vec<CertificateDer<'static>>,
    info: CertificateInfo,
}

impl fmt::Debug for Signatory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Signatory").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Signatory {
    /// This host as a signatory.
    pub fn own(identity: &Identity) -> Signatory {
        Signatory {
            name: identity.name().into(),
            chain: identity.chain().to_vec(),
            info: identity.info().clone(),
        }
    }

    /// The host `name` as a signatory, if `identity` currently accepts `chain` for that name and the key has signed `message`.
    /// The error is one line.
    pub fn believed(
        identity: &Identity,
        chain: Vec<CertificateDer<'static>>,
        name: &str,
        message: &[u8],
        signature: &[u8],
    ) -> Result<Signatory, String> {
        // Cheap checks first, because any host that can write to the store triggers this.
        if !is_for(&chain, name) {
            return Err("the certificate is for another name".into());
        }
        if !is_signed(&chain[0], message, signature) {
            return Err("the signature is wrong".into());
        }
        let info = identity.verify(&chain, name)?;
        Ok(Signatory { name: name.into(), chain, info })
    }

    /// The host's certificate, then intermediate ones.
    pub fn chain(&self) -> &[CertificateDer<'static>] {
        &self.chain
    }

    /// Contents of the host's certificate.
    pub fn info(&self) -> &CertificateInfo {
        &self.info
    }

    /// True when the host's key has signed `message`.
    pub fn has_signed(&self, message: &[u8], signature: &[u8]) -> bool {
        is_signed(&self.chain[0], message, signature)
    }

    /// True while the host's certificate is valid by the clock.
    pub fn is_in_time(&self) -> bool {
        let (first, last) = self.info.valid;
        (first..=last).contains(&unix_now())
    }

    /// For tests: makes the certificate expire now.
    #[cfg(any(test, feature = "test-util"))]
    pub fn end_now(&mut self) {
        self.info.valid.1 = unix_now() - 1;
    }

    /// Reason why `identity` refuses the certificate regardless of the clock: it is revoked, or its authority is no longer
    /// trusted.
    pub fn refused(&self, identity: &Identity) -> Option<String> {
        let (first, last) = self.info.valid;
        let seconds = unix_now().clamp(first.max(0), last.max(0)).unsigned_abs();
        let then = UnixTime::since_unix_epoch(std::time::Duration::from_secs(seconds));
        identity.verify_at(&self.chain, &self.name, then).err()
    }
}

fn is_signed(leaf: &CertificateDer<'_>, message: &[u8], signature: &[u8]) -> bool {
    let Ok(certificate) = EndEntityCert::try_from(leaf) else { return false };
    algorithms().into_iter().any(|one| certificate.verify_signature(one, message, signature).is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::sealed::pki::{Flaw, Pki};

    #[test]
    fn a_signature_is_of_one_host_and_one_message() {
        let folder = tempfile::tempdir().unwrap();
        let pki = Pki::new(folder.path());
        let (one, other) = (pki.identity("h1"), pki.identity("h2"));
        let chain = || one.chain().to_vec();
        let signature = one.sign(b"message").unwrap();
        let believed = |chain, name, message: &[u8]| {
            Signatory::believed(&other, chain, name, message, &signature).map_err(|why| why.to_string())
        };
        let signatory = believed(chain(), "h1", b"message").unwrap();
        assert!(signatory.has_signed(b"message", &signature) && signatory.is_in_time());
        assert!(!signatory.has_signed(b"massage", &signature) && !signatory.has_signed(b"message", b""));
        assert!(!Signatory::own(&other).has_signed(b"message", &signature));
        assert!(believed(chain(), "h2", b"message").unwrap_err().contains("another name"));
        assert!(believed(other.chain().to_vec(), "h2", b"message").unwrap_err().contains("signature"));
        assert!(believed(vec![], "h1", b"message").is_err());
        let elsewhere = tempfile::tempdir().unwrap();
        let foreign = Pki::new(elsewhere.path()).identity("h1");
        let signature = foreign.sign(b"message").unwrap();
        let why =
            Signatory::believed(&one, foreign.chain().to_vec(), "h1", b"message", &signature).unwrap_err();
        assert!(why.contains("not trusted"), "{why}");
    }

    #[test]
    fn every_kind_of_key_signs() {
        let folder = tempfile::tempdir().unwrap();
        let pki = Pki::new(folder.path());
        for algorithm in [
            &rcgen::PKCS_ED25519,
            &rcgen::PKCS_ECDSA_P256_SHA256,
            &rcgen::PKCS_ECDSA_P384_SHA384,
            &rcgen::PKCS_ECDSA_P521_SHA512,
            &rcgen::PKCS_RSA_SHA256,
        ] {
            let files = pki.issue_of("h1", 1, Flaw::None, &[], algorithm);
            let identity = Identity::load(&files, "h1").unwrap();
            let signature = identity.sign(b"message").unwrap();
            assert!(Signatory::own(&identity).has_signed(b"message", &signature), "{algorithm:?}");
        }
    }

    #[test]
    fn revocation_refuses_a_host_and_the_clock_does_not() {
        let folder = tempfile::tempdir().unwrap();
        let pki = Pki::new(folder.path());
        let (one, other) = (pki.identity("h1"), pki.issue("h2", 2, Flaw::None, &[]));
        let mut signatory = Signatory::own(&one);
        let judge = || Identity::load(&other, "h2").unwrap();
        assert_eq!(signatory.refused(&judge()), None);
        pki.revoke(&[1]);
        assert!(signatory.refused(&judge()).unwrap().contains("revoked"));
        pki.revoke(&[]);
        signatory.end_now();
        assert!(!signatory.is_in_time());
        assert_eq!(signatory.refused(&judge()), None);
    }
}
