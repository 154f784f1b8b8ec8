//! Control by TCP: what `[control] http` and `console` open, with their token and their certificates.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use tokio::net::{TcpListener, TcpSocket};
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use vnet_control::access::Access;

use crate::api::{self, App};
use crate::gate::{Token, TokenError};
use crate::tls::{self, TlsError};
use crate::{console, serve};

/// Why control by TCP cannot be offered.
#[derive(Debug, thiserror::Error)]
pub enum RemoteError {
    #[error(transparent)]
    Token(#[from] TokenError),
    #[error(transparent)]
    Tls(#[from] TlsError),
    #[error("[control] {key} cannot listen at {address}: {error}; choose another address or port")]
    Listen { key: &'static str, address: SocketAddr, error: io::Error },
}

/// Connections that the kernel keeps until they are accepted (its usual limit, `net.core.somaxconn`): with fewer, a burst of
/// clients makes everybody wait a second for the kernel to try again.
const BACKLOG: u32 = 4096;

/// A listener that is open but not served yet.
struct Door {
    listener: TcpListener,
    address: SocketAddr,
    tls: Option<TlsAcceptor>,
}

/// Everything that listens by TCP.
pub struct Remote {
    /// What changes by the API must show.
    pub token: Option<Arc<Token>>,
    http: Option<Door>,
    console: Option<Door>,
}

impl Remote {
    /// Reads the files and binds the addresses.
    pub fn open(access: &Access) -> Result<Remote, RemoteError> {
        let token = access.token_file.as_deref().map(Token::load).transpose()?.map(Arc::new);
        let mut remote = Remote { token, http: None, console: None };
        if let Some(address) = access.http {
            let tls = access.tls.as_ref().map(tls::open_to_all).transpose()?;
            remote.http = Some(Door::open("http", address, tls)?);
        }
        if let Some(address) = access.console {
            let tls = match (&access.tls, &access.tls_client_ca) {
                (Some(files), Some(ca)) => Some(tls::for_clients_of(files, ca)?),
                _ => None,
            };
            remote.console = Some(Door::open("console", address, tls)?);
        }
        Ok(remote)
    }

    /// Serves what is open.
    pub fn serve(self, app: App, servers: &mut JoinSet<()>) {
        if let Some(Door { listener, tls, .. }) = self.console {
            servers.spawn(console::serve(listener, tls, app.shared.clone()));
        }
        if let Some(Door { listener, tls, .. }) = self.http {
            servers.spawn(serve::http(listener, tls, api::router(app)));
        }
    }
}

impl Door {
    fn open(key: &'static str, address: SocketAddr, tls: Option<TlsAcceptor>) -> Result<Door, RemoteError> {
        let listen = |error| RemoteError::Listen { key, address, error };
        let bind = || -> io::Result<TcpListener> {
            let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
            socket.set_reuseaddr(true)?;
            socket.bind(address)?;
            socket.listen(BACKLOG)
        };
        let listener = bind().map_err(listen)?;
        let address = listener.local_addr().map_err(listen)?;
        Ok(Door { listener, address, tls })
    }
}

impl fmt::Display for Remote {
    /// What is open, for the ready line: `, http at ADDRESS, console at ADDRESS`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (what, door) in [("http", &self.http), ("console", &self.console)] {
            if let Some(Door { address, tls, .. }) = door {
                write!(f, ", {what} at {address}{}", if tls.is_some() { " (TLS)" } else { "" })?;
            }
        }
        Ok(())
    }
}
