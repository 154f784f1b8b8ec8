//! TLS server side for TCP clients: rustls with the certificates of `[control]`.

use std::io;
use std::path::Path;
use std::sync::Arc;

use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::pki_types::pem::{self, PemObject};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::{self, RootCertStore, ServerConfig};
use vnet_control::desired::TlsFiles;

#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("[control] {key} '{file}' cannot be used: {error}")]
    Pem { key: &'static str, file: String, error: pem::Error },
    #[error("[control] {key} '{file}' holds no certificate; it must be PEM")]
    Empty { key: &'static str, file: String },
    #[error("[control] tls_cert and tls_key cannot be used together: {0}")]
    Pair(rustls::Error),
    #[error("[control] tls_client_ca '{file}' cannot be used: {error}")]
    Authority { file: String, error: io::Error },
}

/// TLS without client certificates.
pub fn any_client(files: &TlsFiles) -> Result<TlsAcceptor, TlsError> {
    acceptor(files, None)
}

/// TLS that requires a client certificate signed by an authority in `ca`.
pub fn authenticated_clients(files: &TlsFiles, ca: &Path) -> Result<TlsAcceptor, TlsError> {
    acceptor(files, Some(ca))
}

fn certificates(key: &'static str, file: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let name = || file.display().to_string();
    let pem = |error| TlsError::Pem { key, file: name(), error };
    let certificates: Vec<_> =
        CertificateDer::pem_file_iter(file).map_err(pem)?.collect::<Result<_, _>>().map_err(pem)?;
    if certificates.is_empty() { Err(TlsError::Empty { key, file: name() }) } else { Ok(certificates) }
}

fn acceptor(files: &TlsFiles, ca: Option<&Path>) -> Result<TlsAcceptor, TlsError> {
    let chain = certificates("tls_cert", &files.cert)?;
    let key = PrivateKeyDer::from_pem_file(&files.key).map_err(|error| TlsError::Pem {
        key: "tls_key",
        file: files.key.display().to_string(),
        error,
    })?;
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let builder = ServerConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .map_err(TlsError::Pair)?;
    let builder = match ca {
        None => builder.with_no_client_auth(),
        Some(file) => {
            let authority = |error| TlsError::Authority {
                file: file.display().to_string(),
                error: io::Error::other(error),
            };
            let mut roots = RootCertStore::empty();
            for certificate in certificates("tls_client_ca", file)? {
                roots.add(certificate).map_err(|error| authority(error.to_string()))?;
            }
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
            builder.with_client_cert_verifier(verifier.build().map_err(|error| authority(error.to_string()))?)
        }
    };
    let config = builder.with_single_cert(chain, key).map_err(TlsError::Pair)?;
    Ok(TlsAcceptor::from(Arc::new(config)))
}
