//! TLS server side for TCP clients: rustls with the certificates of `[control]`.

use std::path::Path;
use std::sync::Arc;

use tokio_rustls::TlsAcceptor;
use vnet_control::credentials::{TlsError, server_config};
use vnet_control::desired::TlsFiles;

/// TLS without client certificates.
pub fn any_client(files: &TlsFiles) -> Result<TlsAcceptor, TlsError> {
    Ok(TlsAcceptor::from(Arc::new(server_config(files, None)?)))
}

/// TLS that requires a client certificate signed by an authority in `ca`.
pub fn authenticated_clients(files: &TlsFiles, ca: &Path) -> Result<TlsAcceptor, TlsError> {
    Ok(TlsAcceptor::from(Arc::new(server_config(files, Some(ca))?)))
}
