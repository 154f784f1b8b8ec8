//! This host's identity: certificate, private key, trusted authorities and revocation lists, and TLS configurations from them.
//!
//! An [`Identity`] is an immutable snapshot of the files, checked as a whole. An [`IdentityStore`] holds the latest valid
//! snapshot and reads the files again when they change; each handshake uses the current identity. So certificates are renewed by
//! replacing files, and established sessions stay up.
//!
//! A DNS name among the certificate's subject alternative names is the host's name. URIs in the same extension may limit what the
//! host may send: `vnet:network=5` and `vnet:mac=52:54:00:00:00:01`, any number of each; a kind that is absent is not limited. A
//! URI that begins with `vnet:` and cannot be parsed makes the certificate unusable.
//!
//! TLS is always 1.3 with AES-256-GCM and certificates on both sides. Key exchange prefers the hybrid X25519MLKEM768, so that
//! quantum computers cannot decrypt recorded handshakes later. No session resumption, no early data.

use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use arc_swap::ArcSwap;
use aws_lc_rs::digest;
use parking_lot::Mutex;
use rustls::client::danger::ServerCertVerifier;
use rustls::client::{Resumption, WebPkiServerVerifier, verify_server_name};
use rustls::crypto::{CryptoProvider, aws_lc_rs as provider};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{NoServerSessionStorage, ParsedCertificate, WebPkiClientVerifier};
use rustls::sign::SigningKey;
use rustls::{AlertDescription, CertificateError, ClientConfig, RootCertStore, ServerConfig, version};
use x509_parser::certificate::X509Certificate;
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::FromDer;
use x509_parser::revocation_list::{CertificateRevocationList, RevokedCertificate};

use crate::frame::NetworkId;
use crate::wire::ethernet::Mac;

pub mod tls;

/// Maximum size of a file in bytes: large enough for the revocation list of a large authority.
const FILE_MAX: u64 = 16 << 20;
/// Maximum number of limits of one kind in a certificate.
const CLAIMS_MAX: usize = 4096;

/// Paths of an identity's files, all PEM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IdentityFiles {
    /// Certificates of the trusted authorities, one or more.
    pub ca: PathBuf,
    /// This host's certificate, then intermediate ones.
    pub certificate: PathBuf,
    /// Private key of this host's certificate: PKCS #8, PKCS #1 or SEC 1.
    pub key: PathBuf,
    /// Revocation lists, one or more. Certificates of an authority without a list are not checked for revocation.
    pub crl: Option<PathBuf>,
}

/// Inode, length and modification time of a file.
type Stamp = (u64, u64, i64, i64);

impl IdentityFiles {
    fn paths(&self) -> impl Iterator<Item = &Path> {
        [&self.ca, &self.certificate, &self.key].into_iter().chain(&self.crl).map(PathBuf::as_path)
    }

    /// Changes when any file is replaced or written to.
    fn stamp(&self) -> Vec<Option<Stamp>> {
        let stamp = |path: &Path| {
            fs::metadata(path).ok().map(|meta| (meta.ino(), meta.len(), meta.mtime(), meta.mtime_nsec()))
        };
        self.paths().map(stamp).collect()
    }
}

/// Error when loading an identity.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// A file is missing, or this process may not read it.
    #[error("cannot read '{0}': {1}; see [identity] in the configuration and 'vnet keys --help'")]
    Read(PathBuf, #[source] io::Error),
    /// The PEM file contains no object of the required kind.
    #[error("'{0}' holds no {1} in PEM; give the right file in [identity]")]
    Empty(PathBuf, &'static str),
    /// The file cannot be parsed.
    #[error("'{0}': {1}; give the right file in [identity]")]
    Bad(PathBuf, String),
    /// Every user can read the private key.
    #[error(
        "everybody can read the private key '{0}'; run 'chmod 600' on it, or have a new one issued if others could"
    )]
    Exposed(PathBuf),
    /// Other hosts would refuse this host's certificate.
    #[error("this host's certificate '{0}' cannot be used: {1}")]
    Unusable(PathBuf, String),
}

/// The networks and source addresses that a host's certificate allows it to use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Claims {
    /// Networks, sorted; `None` for all.
    pub networks: Option<Vec<NetworkId>>,
    /// Source addresses of the host's frames, sorted; `None` for all.
    pub macs: Option<Vec<Mac>>,
}

/// Contents of a certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertificateInfo {
    /// DNS names of the host that TLS accepts: no wildcards.
    pub names: Vec<String>,
    /// Networks and addresses that the host may use.
    pub claims: Claims,
    /// First and last second of its validity, Unix time.
    pub valid: (i64, i64),
    /// Serial number, hexadecimal.
    pub serial: String,
    /// SHA-256 of the whole certificate, hexadecimal.
    pub fingerprint: String,
}

impl CertificateInfo {
    /// Parses a certificate. The error is one line.
    pub fn read(der: &[u8]) -> Result<CertificateInfo, String> {
        let (rest, certificate) =
            X509Certificate::from_der(der).map_err(|error| format!("not a certificate: {error}"))?;
        if !rest.is_empty() {
            return Err("bytes follow the certificate".into());
        }
        // TLS has its own parser: a certificate on which the two parsers disagree is for no host.
        let leaf = CertificateDer::from(der);
        let parsed = ParsedCertificate::try_from(&leaf)
            .map_err(|error| format!("not a certificate for TLS: {error}"))?;
        let alternative = certificate.subject_alternative_name().map_err(|error| error.to_string())?;
        let (mut names, mut claims) = (vec![], Claims::default());
        for name in alternative.iter().flat_map(|extension| &extension.value.general_names) {
            match name {
                GeneralName::DNSName(name) if names_host(&parsed, name) => names.push((*name).to_string()),
                GeneralName::URI(uri) => claims.add(uri)?,
                _ => {}
            }
        }
        claims.networks.iter_mut().for_each(|networks| networks.sort());
        claims.macs.iter_mut().for_each(|macs| macs.sort());
        let validity = certificate.validity();
        Ok(CertificateInfo {
            names,
            claims,
            valid: (validity.not_before.timestamp(), validity.not_after.timestamp()),
            serial: hex(certificate.raw_serial()),
            fingerprint: hex(digest::digest(&digest::SHA256, der).as_ref()),
        })
    }

    /// Bytes of the serial number.
    pub fn serial_bytes(&self) -> Vec<u8> {
        let digit =
            |at: usize| self.serial.get(at..at + 2).and_then(|pair| u8::from_str_radix(pair, 16).ok());
        (0..self.serial.len()).step_by(2).filter_map(digit).collect()
    }

    /// Reads the first certificate of a PEM file.
    pub fn load(path: &Path) -> Result<CertificateInfo, IdentityError> {
        let chain = certificates(path)?;
        CertificateInfo::read(&chain[0]).map_err(|why| IdentityError::Bad(path.into(), why))
    }
}

impl Claims {
    fn add(&mut self, uri: &str) -> Result<(), String> {
        let Some(claim) = uri.strip_prefix("vnet:") else { return Ok(()) };
        let bad = || format!("'{uri}' is a limit that this version does not know");
        let count = match claim.split_once('=') {
            Some(("network", id)) => {
                let id = id.parse().ok().and_then(NetworkId::new).ok_or_else(bad)?;
                let networks = self.networks.get_or_insert_default();
                networks.push(id);
                networks.len()
            }
            Some(("mac", mac)) => {
                let macs = self.macs.get_or_insert_default();
                macs.push(mac.parse().map_err(|_| bad())?);
                macs.len()
            }
            _ => return Err(bad()),
        };
        if count > CLAIMS_MAX { Err(format!("more than {CLAIMS_MAX} limits of a kind")) } else { Ok(()) }
    }

    /// True when the host may send frames of `network`.
    #[inline]
    pub fn allows_network(&self, network: NetworkId) -> bool {
        self.networks.as_ref().is_none_or(|networks| networks.binary_search(&network).is_ok())
    }

    /// True when the host may send a frame with the source `mac`.
    #[inline]
    pub fn allows_source(&self, mac: Mac) -> bool {
        self.macs.as_ref().is_none_or(|macs| macs.binary_search(&mac).is_ok())
    }
}

/// A certificate that a revocation list names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Revoked {
    /// Serial number of the certificate.
    pub serial: Vec<u8>,
    /// Time of revocation, Unix time in seconds.
    pub at: i64,
}

impl Revoked {
    /// The serial number in the form of [`CertificateInfo::serial`].
    pub fn serial_hex(&self) -> String {
        hex(&self.serial)
    }
}

/// The entries of the first revocation list in a PEM file. The list's signature is not verified.
pub fn revoked(path: &Path) -> Result<Vec<Revoked>, IdentityError> {
    let lists: Vec<CertificateRevocationListDer<'static>> = all(path, "revocation list")?;
    let (_, list) = CertificateRevocationList::from_der(&lists[0])
        .map_err(|error| IdentityError::Bad(path.into(), format!("not a revocation list: {error}")))?;
    let entries = list.iter_revoked_certificates();
    let entry = |entry: &RevokedCertificate<'_>| Revoked {
        serial: entry.raw_serial().to_vec(),
        at: entry.revocation_date.timestamp(),
    };
    Ok(entries.map(entry).collect())
}

/// An immutable, checked snapshot of the files.
pub struct Identity {
    name: String,
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
    signing: Arc<dyn SigningKey>,
    info: CertificateInfo,
    servers: Arc<WebPkiServerVerifier>,
    clients: Arc<dyn ClientCertVerifier>,
    path: PathBuf,
}

impl Identity {
    /// Reads the files and checks that other hosts would currently accept this host as `name`.
    pub fn load(files: &IdentityFiles, name: &str) -> Result<Identity, IdentityError> {
        let bad =
            |path: &Path, error: &dyn std::fmt::Display| IdentityError::Bad(path.into(), error.to_string());
        let mut roots = RootCertStore::empty();
        for certificate in certificates(&files.ca)? {
            roots.add(certificate).map_err(|error| bad(&files.ca, &error))?;
        }
        let crls: Vec<CertificateRevocationListDer<'static>> = match &files.crl {
            Some(path) => all(path, "revocation list")?,
            None => vec![],
        };
        let crl_path = files.crl.as_ref().unwrap_or(&files.ca);
        let (roots, provider) = (Arc::new(roots), Arc::new(crypto()));
        let servers = WebPkiServerVerifier::builder_with_provider(roots.clone(), provider.clone())
            .with_crls(crls.clone())
            .only_check_end_entity_revocation()
            .allow_unknown_revocation_status()
            .build()
            .map_err(|error| bad(crl_path, &error))?;
        let clients = WebPkiClientVerifier::builder_with_provider(roots, provider)
            .with_crls(crls)
            .only_check_end_entity_revocation()
            .allow_unknown_revocation_status()
            .build()
            .map_err(|error| bad(crl_path, &error))?;
        let chain = certificates(&files.certificate)?;
        let info = CertificateInfo::read(&chain[0]).map_err(|why| bad(&files.certificate, &why))?;
        let (path, key) = (files.certificate.clone(), private_key(&files.key)?);
        let signing = provider::sign::any_supported_type(&key).map_err(|error| bad(&files.key, &error))?;
        let identity = Identity { name: name.into(), chain, key, signing, info, servers, clients, path };
        let unusable = |why| IdentityError::Unusable(files.certificate.clone(), why);
        identity.verify(&identity.chain, name).map_err(unusable)?;
        // This also checks that the key belongs to the certificate.
        identity.client(&[]).map_err(|error| bad(&files.key, &error))?;
        Ok(identity)
    }

    /// The host name for which the identity was loaded.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// This host's certificate, then intermediate ones.
    pub fn chain(&self) -> &[CertificateDer<'static>] {
        &self.chain
    }

    /// The private key of this host's certificate, for signatures.
    pub(in crate::link) fn signing_key(&self) -> &dyn SigningKey {
        &*self.signing
    }

    /// Contents of this host's certificate.
    pub fn info(&self) -> &CertificateInfo {
        &self.info
    }

    /// The file of this host's certificate.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// TLS configuration of the connecting side, for one of the protocols `alpn` (RFC 7301).
    pub fn client(&self, alpn: &[&[u8]]) -> Result<ClientConfig, rustls::Error> {
        let mut config = ClientConfig::builder_with_provider(Arc::new(crypto()))
            .with_protocol_versions(&[&version::TLS13])?
            .dangerous() // The verifier is webpki's, with revocation lists.
            .with_custom_certificate_verifier(self.servers.clone())
            .with_client_auth_cert(self.chain.clone(), self.key.clone_key())?;
        config.alpn_protocols = alpn.iter().map(|name| name.to_vec()).collect();
        config.resumption = Resumption::disabled();
        Ok(config)
    }

    /// TLS configuration of the accepting side. It requires a certificate of a trusted authority; the caller checks the
    /// certificate's name after the handshake with [`Identity::verify`].
    pub fn server(&self, alpn: &[&[u8]]) -> Result<ServerConfig, rustls::Error> {
        let mut config = ServerConfig::builder_with_provider(Arc::new(crypto()))
            .with_protocol_versions(&[&version::TLS13])?
            .with_client_cert_verifier(self.clients.clone())
            .with_single_cert(self.chain.clone(), self.key.clone_key())?;
        config.alpn_protocols = alpn.iter().map(|name| name.to_vec()).collect();
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(config)
    }

    /// Checks that `chain` is currently valid for the host `name`, as client and as server. The error is one line.
    pub fn verify(&self, chain: &[CertificateDer<'_>], name: &str) -> Result<CertificateInfo, String> {
        self.verify_at(chain, name, UnixTime::now())
    }

    /// Like [`Identity::verify`], at the time `now`.
    pub fn verify_at(
        &self,
        chain: &[CertificateDer<'_>],
        name: &str,
        now: UnixTime,
    ) -> Result<CertificateInfo, String> {
        let (leaf, between) = chain.split_first().ok_or("no certificate")?;
        let server = server_name(name)?;
        self.clients.verify_client_cert(leaf, between, now).map_err(|error| explain(&error))?;
        self.servers.verify_server_cert(leaf, between, &server, &[], now).map_err(|error| explain(&error))?;
        CertificateInfo::read(leaf)
    }
}

/// A host name in the form in which TLS verifies it.
pub fn server_name(name: &str) -> Result<ServerName<'static>, String> {
    ServerName::try_from(name.to_string()).map_err(|_| {
        format!("'{name}' cannot be a name in a certificate (letters, digits, '-', '_' and '.')")
    })
}

/// Reason for refusing a certificate for this host's own name.
pub(in crate::link) fn two_of_one_name(name: &str) -> String {
    format!("both hosts are called {name}: give one of them another [host] name, with a certificate for it")
}

/// True when `chain` is for the host `name`. Signatures are not verified.
pub fn is_for(chain: &[CertificateDer<'_>], name: &str) -> bool {
    let parsed = chain.first().and_then(|leaf| ParsedCertificate::try_from(leaf).ok());
    parsed.is_some_and(|parsed| names_host(&parsed, name))
}

/// True when TLS would accept the certificate for `name`.
fn names_host(certificate: &ParsedCertificate<'_>, name: &str) -> bool {
    server_name(name).is_ok_and(|name| verify_server_name(certificate, &name).is_ok())
}

/// Holds the latest valid identity.
pub struct IdentityStore {
    files: IdentityFiles,
    name: String,
    current: ArcSwap<Identity>,
    /// Stamp of the files when they were last read, valid or not.
    read: Mutex<Vec<Option<Stamp>>>,
}

impl std::fmt::Debug for IdentityStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("IdentityStore").field("name", &self.name).finish_non_exhaustive()
    }
}

impl IdentityStore {
    /// Reads the files for the host `name`.
    pub fn open(files: IdentityFiles, name: &str) -> Result<IdentityStore, IdentityError> {
        let read = Mutex::new(files.stamp());
        let current = ArcSwap::from_pointee(Identity::load(&files, name)?);
        Ok(IdentityStore { files, name: name.into(), current, read })
    }

    /// The current identity.
    pub fn current(&self) -> Arc<Identity> {
        self.current.load_full()
    }

    /// Reads the files again if any has changed since. Returns true when there is a new identity. On an error, which is returned
    /// once per change, the old identity stays.
    pub fn refresh(&self) -> Result<bool, IdentityError> {
        let stamp = self.files.stamp();
        let mut read = self.read.lock();
        if *read == stamp {
            return Ok(false);
        }
        *read = stamp;
        self.current.store(Arc::new(Identity::load(&self.files, &self.name)?));
        Ok(true)
    }
}

/// Describes a failed handshake in one line, for the logs of both sides.
pub fn explain(error: &rustls::Error) -> String {
    use rustls::Error as E;
    let alert = |what: &str| format!("the other host refused our certificate: {what}");
    match error {
        E::InvalidCertificate(why) => match why {
            CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
                "the certificate has expired; issue a new one, or set the clock".into()
            }
            CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
                "the certificate is not valid yet; set the clock".into()
            }
            CertificateError::Revoked => "the certificate has been revoked".into(),
            CertificateError::UnknownIssuer | CertificateError::BadSignature => {
                "the certificate is of an authority that is not trusted here; compare the 'ca' files".into()
            }
            CertificateError::NotValidForNameContext { expected, presented } => {
                // Each name is formatted as `DnsName("h1")`.
                let names: Vec<_> =
                    presented.iter().filter_map(|name| name.split('"').nth(1)).take(3).collect();
                let (names, expected) = (names.join(", "), expected.to_str());
                format!(
                    "the certificate is for {names}, not for {expected}; compare [host] name and the link's peer"
                )
            }
            CertificateError::NotValidForName => {
                "the certificate is for another name; compare [host] name and the link's peer".into()
            }
            CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. } => {
                "the certificate is not for both ends of TLS; issue one for server and client authentication"
                    .into()
            }
            other => format!("the certificate cannot be used: {other}"),
        },
        E::NoCertificatesPresented => "the other host shows no certificate".into(),
        E::AlertReceived(description) => match description {
            AlertDescription::CertificateExpired => alert("expired, or a clock is wrong"),
            AlertDescription::CertificateRevoked => alert("revoked"),
            AlertDescription::UnknownCA => {
                alert("of an authority that it does not trust; compare the 'ca' files")
            }
            AlertDescription::BadCertificate | AlertDescription::CertificateUnknown => {
                alert("for another name or purpose, or broken; compare [host] name and the link's peer there")
            }
            AlertDescription::NoApplicationProtocol => "the other host speaks another protocol there".into(),
            other => format!("the other host broke off: {other:?}"),
        },
        E::InvalidMessage(_) | E::InappropriateMessage { .. } | E::InappropriateHandshakeMessage { .. } => {
            "what answers there does not speak TLS 1.3".into()
        }
        other => other.to_string(),
    }
}

/// Cipher suite and key exchange of all TLS connections.
fn crypto() -> CryptoProvider {
    CryptoProvider {
        cipher_suites: vec![provider::cipher_suite::TLS13_AES_256_GCM_SHA384],
        kx_groups: vec![
            provider::kx_group::X25519MLKEM768,
            provider::kx_group::X25519,
            provider::kx_group::SECP256R1,
        ],
        ..provider::default_provider()
    }
}

fn read(path: &Path) -> Result<Vec<u8>, IdentityError> {
    let failed = |error| IdentityError::Read(path.into(), error);
    let len = fs::metadata(path).map_err(failed)?.len();
    if len > FILE_MAX {
        return Err(IdentityError::Bad(path.into(), format!("larger than {FILE_MAX} bytes")));
    }
    fs::read(path).map_err(failed)
}

/// All objects of a kind in a PEM file; at least one is required.
fn all<T: PemObject>(path: &Path, what: &'static str) -> Result<Vec<T>, IdentityError> {
    let bytes = read(path)?;
    let found: Result<Vec<T>, _> = T::pem_slice_iter(&bytes).collect();
    match found {
        Ok(found) if found.is_empty() => Err(IdentityError::Empty(path.into(), what)),
        Ok(found) => Ok(found),
        Err(error) => Err(IdentityError::Bad(path.into(), format!("not PEM: {error}"))),
    }
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, IdentityError> {
    all(path, "certificate")
}

fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, IdentityError> {
    // A certificate named as the key may be public.
    let key = PrivateKeyDer::from_pem_slice(&read(path)?)
        .map_err(|_| IdentityError::Empty(path.into(), "private key"))?;
    let meta = fs::metadata(path).map_err(|error| IdentityError::Read(path.into(), error))?;
    if meta.permissions().mode() & 0o007 != 0 {
        return Err(IdentityError::Exposed(path.into()));
    }
    Ok(key)
}

/// Bytes in hexadecimal.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Seconds since 1970, by the wall clock.
pub fn unix_now() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs() as i64)
}

#[cfg(test)]
mod tests;
