//! A certificate authority for tests: issues good and bad certificates into a directory.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyIdMethod, KeyPair, KeyUsagePurpose, RevokedCertParams, SanType, SerialNumber,
    SignatureAlgorithm, date_time_ymd,
};

use crate::link::sealed::identity::{Identity, IdentityFiles, IdentityStore};

/// Defect of a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flaw {
    /// No defect.
    None,
    /// The certificate expired years ago.
    Expired,
    /// The certificate becomes valid in the far future.
    Early,
    /// The certificate is valid for servers only.
    ServerOnly,
}

/// An authority with a directory for its files.
pub struct Pki {
    folder: PathBuf,
    issuer: Issuer<'static, KeyPair>,
}

/// Message of a panic when the test authority itself fails.
const MADE: &str = "the test authority works";

impl Pki {
    /// A new authority that writes to `folder`.
    pub fn new(folder: &Path) -> Pki {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let key = KeyPair::generate().expect(MADE);
        let certificate = params.self_signed(&key).expect(MADE);
        fs::write(folder.join("ca.pem"), certificate.pem()).expect(MADE);
        let pki = Pki { folder: folder.into(), issuer: Issuer::new(params, key) };
        pki.revoke(&[]);
        pki
    }

    /// Paths of the files of the host `name`.
    pub fn files(&self, name: &str) -> IdentityFiles {
        let at = |file: String| self.folder.join(file);
        IdentityFiles {
            ca: at("ca.pem".into()),
            certificate: at(format!("{name}.pem")),
            key: at(format!("{name}.key")),
            crl: Some(at("crl.pem".into())),
        }
    }

    /// Issues a certificate with the serial number `serial` to the host `name`, limited to `claims` (URIs).
    pub fn issue(&self, name: &str, serial: u8, flaw: Flaw, claims: &[&str]) -> IdentityFiles {
        self.issue_of(name, serial, flaw, claims, &rcgen::PKCS_ECDSA_P256_SHA256)
    }

    /// Like [`Pki::issue`], with a key of another kind.
    pub fn issue_of(
        &self,
        name: &str,
        serial: u8,
        flaw: Flaw,
        claims: &[&str],
        algorithm: &'static SignatureAlgorithm,
    ) -> IdentityFiles {
        let mut params = CertificateParams::new(vec![name.to_string()]).expect(MADE);
        params.serial_number = Some(SerialNumber::from_slice(&[serial]));
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        if flaw != Flaw::ServerOnly {
            params.extended_key_usages.push(ExtendedKeyUsagePurpose::ClientAuth);
        }
        match flaw {
            Flaw::Expired => params.not_after = date_time_ymd(2001, 1, 1),
            Flaw::Early => params.not_before = date_time_ymd(4000, 1, 1),
            Flaw::None | Flaw::ServerOnly => {}
        }
        let uri = |claim: &&str| SanType::URI((*claim).try_into().expect(MADE));
        params.subject_alt_names.extend(claims.iter().map(uri));
        let key = KeyPair::generate_for(algorithm).expect(MADE);
        let certificate = params.signed_by(&key, &self.issuer).expect(MADE);
        let files = self.files(name);
        fs::write(&files.certificate, certificate.pem()).expect(MADE);
        // Written to a scratch file, then renamed: no process reads half a key, or one that other users can read.
        let scratch = files.key.with_extension("new");
        fs::write(&scratch, key.serialize_pem()).expect(MADE);
        fs::set_permissions(&scratch, fs::Permissions::from_mode(0o600)).expect(MADE);
        fs::rename(scratch, &files.key).expect(MADE);
        files
    }

    /// The identity of the host `name`, with the serial number 1 and no limits.
    pub fn identity(&self, name: &str) -> Identity {
        Identity::load(&self.issue(name, 1, Flaw::None, &[]), name).expect(MADE)
    }

    /// Like [`Pki::identity`], in an [`IdentityStore`].
    pub fn store(&self, name: &str, serial: u8) -> IdentityStore {
        IdentityStore::open(self.issue(name, serial, Flaw::None, &[]), name).expect(MADE)
    }

    /// Revokes exactly the certificates with these serial numbers.
    pub fn revoke(&self, serials: &[u8]) {
        let revoked = |serial: &u8| RevokedCertParams {
            serial_number: SerialNumber::from_slice(&[*serial]),
            revocation_time: date_time_ymd(2020, 1, 1),
            reason_code: None,
            invalidity_date: None,
        };
        let list = CertificateRevocationListParams {
            this_update: date_time_ymd(2020, 1, 1),
            next_update: date_time_ymd(4000, 1, 1),
            crl_number: SerialNumber::from_slice(&[1]),
            issuing_distribution_point: None,
            revoked_certs: serials.iter().map(revoked).collect(),
            key_identifier_method: KeyIdMethod::Sha256,
        };
        let pem = list.signed_by(&self.issuer).and_then(|list| list.pem()).expect(MADE);
        fs::write(self.folder.join("crl.pem"), pem).expect(MADE);
    }
}
