//! The TCP listeners of control, `[control] http` and `console`, with their token and certificates.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use tokio::net::{TcpListener, TcpSocket};
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use vnet::inherit::Inheritance;
use vnet::listen::until_free;
use vnet_control::credentials::{TlsError, TokenError};
use vnet_control::desired::Access;

use crate::gate::Token;
use crate::handlers::{self, App};
use crate::take_over::{CONSOLE, HTTP};
use crate::{console, serve, tls};

#[derive(Debug, thiserror::Error)]
pub enum RemoteError {
    #[error(transparent)]
    Token(#[from] TokenError),
    #[error(transparent)]
    Tls(#[from] TlsError),
    #[error("[control] {key} cannot listen at {address}: {error}; choose another address or port")]
    Listen { key: &'static str, address: SocketAddr, error: io::Error },
}

/// Listen backlog, the usual value of `net.core.somaxconn`. With a shorter one, SYNs of a burst of clients are dropped, and each
/// client waits a second for its retransmission.
const BACKLOG: u32 = 4096;

/// A bound listener that does not accept clients yet.
struct Bound {
    listener: TcpListener,
    address: SocketAddr,
    tls: Option<TlsAcceptor>,
}

/// All TCP listeners.
pub struct Remote {
    /// Token required for changes over the API.
    pub token: Option<Arc<Token>>,
    http: Option<Bound>,
    console: Option<Bound>,
}

impl Remote {
    /// Reads the token and certificates, and binds the addresses, or takes the listeners that a running vnetd hands over.
    pub fn open(access: &Access, inheritance: Option<&Inheritance>) -> Result<Remote, RemoteError> {
        let token = access.token_file.as_deref().map(Token::load).transpose()?.map(Arc::new);
        let mut remote = Remote { token, http: None, console: None };
        if let Some(address) = access.http {
            let tls = access.tls.as_ref().map(tls::any_client).transpose()?;
            remote.http = Some(Bound::open(("http", HTTP), address, tls, inheritance)?);
        }
        if let Some(address) = access.console {
            let tls = match (&access.tls, &access.tls_client_ca) {
                (Some(files), Some(ca)) => Some(tls::authenticated_clients(files, ca)?),
                _ => None,
            };
            remote.console = Some(Bound::open(("console", CONSOLE), address, tls, inheritance)?);
        }
        Ok(remote)
    }

    /// Duplicates of the listeners by name, for the next vnetd.
    pub fn descriptors(&self) -> io::Result<Vec<(String, OwnedFd)>> {
        let bound = [(HTTP, &self.http), (CONSOLE, &self.console)].into_iter();
        let bound = bound.filter_map(|(name, bound)| Some((name, bound.as_ref()?)));
        bound.map(|(name, bound)| Ok((name.into(), bound.listener.as_fd().try_clone_to_owned()?))).collect()
    }

    /// Spawns the accept loops.
    pub fn serve(self, app: App, servers: &mut JoinSet<()>) {
        if let Some(Bound { listener, tls, .. }) = self.console {
            servers.spawn(console::serve(listener, tls, app.shared.clone()));
        }
        if let Some(Bound { listener, tls, .. }) = self.http {
            servers.spawn(serve::http(listener, tls, handlers::router(app)));
        }
    }
}

impl Bound {
    /// `key` is the setting, `name` the listener's name if a running vnetd hands it over.
    fn open(
        (key, name): (&'static str, &str),
        address: SocketAddr,
        tls: Option<TlsAcceptor>,
        inheritance: Option<&Inheritance>,
    ) -> Result<Bound, RemoteError> {
        let listen = |error| RemoteError::Listen { key, address, error };
        let bind = || -> io::Result<TcpListener> {
            let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
            socket.set_reuseaddr(true)?;
            socket.bind(address)?;
            socket.listen(BACKLOG)
        };
        let handed = inheritance.and_then(|inheritance| inheritance.take_one(name));
        let listener = match handed {
            Some(listener) => TcpListener::from_std(listener.into()),
            None => until_free(bind),
        };
        let listener = listener.map_err(listen)?;
        let address = listener.local_addr().map_err(listen)?;
        Ok(Bound { listener, address, tls })
    }
}

impl fmt::Display for Remote {
    /// The open listeners for the ready line: `, http at ADDRESS, console at ADDRESS`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (what, bound) in [("http", &self.http), ("console", &self.console)] {
            if let Some(Bound { address, tls, .. }) = bound {
                write!(f, ", {what} at {address}{}", if tls.is_some() { " (TLS)" } else { "" })?;
            }
        }
        Ok(())
    }
}
