//! The credential files of control and of the overlay's store client: token, certificates and keys.
//!
//! vnetd reads them at start; a check uses the same functions.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::sign::CertifiedKey;
use rustls::{RootCertStore, ServerConfig};

use crate::desired::TlsFiles;

/// Token length in bytes: at least 128 bits as hexadecimal digits.
const TOKEN_BYTES: std::ops::RangeInclusive<usize> = 32..=1024;

/// Error reading a token.
#[derive(Debug, thiserror::Error)]
pub enum TokenError {
    /// The file does not exist, or this process may not read it.
    #[error("cannot read [control] token_file '{file}': {error}")]
    Read {
        /// The file.
        file: String,
        /// The error from reading it.
        error: io::Error,
    },
    /// Users other than the owner can read the file.
    #[error("[control] token_file '{0}' can be read by others; run 'chmod 600 {0}'")]
    Readable(String),
    /// The file does not contain a token.
    #[error(
        "[control] token_file '{0}' holds no token: one line of {min} to {max} printable characters; make one with \
         'openssl rand -hex 32'",
        min = TOKEN_BYTES.start(),
        max = TOKEN_BYTES.end()
    )]
    Content(String),
}

/// Reads a token from a file that no other user can read.
pub fn read_token(file: &Path) -> Result<Vec<u8>, TokenError> {
    let name = || file.display().to_string();
    let read = |error| TokenError::Read { file: name(), error };
    let meta = std::fs::metadata(file).map_err(read)?;
    if meta.mode() & 0o077 != 0 {
        return Err(TokenError::Readable(name()));
    }
    if meta.len() > 4096 {
        return Err(TokenError::Content(name()));
    }
    let text = std::fs::read(file).map_err(read)?;
    let token = text.trim_ascii();
    if !TOKEN_BYTES.contains(&token.len()) || !token.iter().all(u8::is_ascii_graphic) {
        return Err(TokenError::Content(name()));
    }
    Ok(token.to_vec())
}

/// Error loading certificates. `key` is the setting that names the file, as in `[control] tls_cert`.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// The file cannot be read or parsed.
    #[error("{key} '{file}' cannot be used: {error}")]
    Pem {
        /// The setting.
        key: &'static str,
        /// The file.
        file: String,
        /// The error from reading it.
        error: pem::Error,
    },
    /// The file contains no certificate.
    #[error("{key} '{file}' holds no certificate; it must be PEM")]
    Empty {
        /// The setting.
        key: &'static str,
        /// The file.
        file: String,
    },
    /// The private key does not match the certificate, or its type is unsupported.
    #[error("{0} cannot be used together: {1}")]
    Pair(&'static str, rustls::Error),
    /// The authority's certificate cannot be used to verify others.
    #[error("{key} '{file}' cannot be used: {error}")]
    Authority {
        /// The setting.
        key: &'static str,
        /// The file.
        file: String,
        /// The verifier's error.
        error: String,
    },
}

fn certificates(key: &'static str, file: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let name = || file.display().to_string();
    let pem = |error| TlsError::Pem { key, file: name(), error };
    let certificates: Vec<_> =
        CertificateDer::pem_file_iter(file).map_err(pem)?.collect::<Result<_, _>>().map_err(pem)?;
    if certificates.is_empty() { Err(TlsError::Empty { key, file: name() }) } else { Ok(certificates) }
}

fn private_key(key: &'static str, file: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
    let pem = |error| TlsError::Pem { key, file: file.display().to_string(), error };
    PrivateKeyDer::from_pem_file(file).map_err(pem)
}

/// The authorities' certificates in a file.
fn authorities(key: &'static str, file: &Path) -> Result<RootCertStore, TlsError> {
    let bad = |error: rustls::Error| TlsError::Authority {
        key,
        file: file.display().to_string(),
        error: error.to_string(),
    };
    let mut roots = RootCertStore::empty();
    for certificate in certificates(key, file)? {
        roots.add(certificate).map_err(bad)?;
    }
    Ok(roots)
}

/// The TLS configuration of `[control]`; with `ca`, clients need a certificate signed by an authority in that file.
pub fn server_config(files: &TlsFiles, ca: Option<&Path>) -> Result<ServerConfig, TlsError> {
    const PAIR: &str = "[control] tls_cert and tls_key";
    let chain = certificates("[control] tls_cert", &files.cert)?;
    let key = private_key("[control] tls_key", &files.key)?;
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let builder = ServerConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .map_err(|error| TlsError::Pair(PAIR, error))?;
    let builder = match ca {
        None => builder.with_no_client_auth(),
        Some(file) => {
            let roots = Arc::new(authorities("[control] tls_client_ca", file)?);
            let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider).build();
            builder.with_client_cert_verifier(verifier.map_err(|error| TlsError::Authority {
                key: "[control] tls_client_ca",
                file: file.display().to_string(),
                error: error.to_string(),
            })?)
        }
    };
    builder.with_single_cert(chain, key).map_err(|error| TlsError::Pair(PAIR, error))
}

/// Checks the files of `[overlay]`: the authority of the store's certificate, and this host's certificate with its key.
pub(crate) fn check_store(ca: Option<&Path>, identity: Option<(&Path, &Path)>) -> Result<(), TlsError> {
    if let Some(ca) = ca {
        authorities("[overlay] ca", ca)?;
    }
    if let Some((cert, key)) = identity {
        let (chain, key) = (certificates("[overlay] cert", cert)?, private_key("[overlay] key", key)?);
        let provider = rustls::crypto::aws_lc_rs::default_provider();
        CertifiedKey::from_der(chain, key, &provider)
            .map_err(|error| TlsError::Pair("[overlay] cert and key", error))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_token_is_long_and_private() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("token");
        let load = |text: &str, mode| {
            std::fs::write(&file, text).unwrap();
            std::fs::set_permissions(&file, Permissions::from_mode(mode)).unwrap();
            read_token(&file).map_err(|error| error.to_string())
        };
        let good = "0123456789abcdef0123456789abcdef";
        assert_eq!(load(&format!("{good}\n"), 0o600).unwrap(), good.as_bytes());
        for (text, mode, words) in [
            (good, 0o640, "chmod 600"),
            ("short", 0o600, "holds no token"),
            ("", 0o600, "holds no token"),
            ("0123456789abcdef 0123456789abcdef", 0o600, "holds no token"),
            (&"x".repeat(5000), 0o600, "holds no token"),
        ] {
            let error = load(text, mode).err().unwrap();
            assert!(error.contains(words) && error.lines().count() == 1, "{error}");
        }
        assert!(read_token(&folder.path().join("none")).err().unwrap().to_string().contains("cannot read"));
    }
}
