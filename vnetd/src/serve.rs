//! Accepts clients of the control socket, of the API over TCP and of the console. The number of clients and their idle time are
//! limited.
//!
//! A client holds a slot from accept to close; while all slots are taken, new connections are closed at once. The kernel drops a
//! peer that has disappeared or does not read its answers (`TCP_USER_TIMEOUT`); the protocols' own timeouts disconnect a peer
//! that stops in the middle of a request. Ten thousand clients therefore cost no more than the number of slots.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use axum::{Extension, Router};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::unix::UCred;
use tokio::net::{TcpListener, TcpStream, UnixListener};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use crate::gate::Caller;

/// Maximum number of concurrent clients of the control socket.
const UNIX_CLIENTS: usize = 256;
/// Maximum number of concurrent clients of the API over TCP: a few scrapers, a dashboard, some scripts.
const HTTP_CLIENTS: usize = 64;
/// Timeout for a request's headers, and for the next request on an idle connection.
const HEADER_TIME: Duration = Duration::from_secs(10);
/// Timeout of a TLS handshake.
const HANDSHAKE_TIME: Duration = Duration::from_secs(5);
/// How long sent data may stay unacknowledged, or the peer's receive window closed.
const STALL_TIME: Duration = Duration::from_secs(30);
/// Maximum length of a request's head in bytes.
const HEAD_MAX: usize = 16 << 10;

/// Limit of concurrent clients, with a counter of refused ones.
pub struct Slots {
    free: Arc<Semaphore>,
    refused: AtomicU64,
}

impl Slots {
    pub fn new(count: usize) -> Slots {
        Slots { free: Arc::new(Semaphore::new(count)), refused: AtomicU64::new(0) }
    }

    /// Takes a slot, which is released when the permit is dropped. Refusals are counted, and logged at each power of two.
    pub fn take(&self, what: &str) -> Option<OwnedSemaphorePermit> {
        let slot = self.free.clone().try_acquire_owned().ok();
        if slot.is_none() {
            let refused = self.refused.fetch_add(1, Relaxed) + 1;
            if refused.is_power_of_two() {
                tracing::warn!(
                    refused,
                    "too many clients of the {what} at a time; new connections are closed"
                );
            }
        }
        slot
    }
}

/// Accept loop of the control socket.
pub async fn unix(listener: UnixListener, router: Router) {
    let slots = Slots::new(UNIX_CLIENTS);
    loop {
        match listener.accept().await {
            Ok((stream, _)) => match stream.peer_cred() {
                Ok(peer) if may_control(&peer) => {
                    let caller = Caller::Unix { uid: peer.uid(), pid: peer.pid() };
                    let Some(slot) = slots.take("control socket") else { continue };
                    tokio::spawn(requests(stream, router.clone(), caller, slot));
                }
                Ok(peer) => tracing::warn!("refused a control connection of user {}", peer.uid()),
                Err(error) => {
                    tracing::warn!("refused a control connection without peer credentials: {error}")
                }
            },
            Err(error) => cannot_accept("control socket", &error).await,
        }
    }
}

fn may_control(peer: &UCred) -> bool {
    peer.uid() == 0 || peer.uid() == rustix::process::geteuid().as_raw()
}

/// Minimum interval between two accepts on a TCP listener (accept rate limit): a connect flood must not take processors from dispatchers.
const ACCEPT_PAUSE: Duration = Duration::from_millis(1);

/// Accepts a connection.
pub async fn accept(listener: &TcpListener) -> io::Result<(TcpStream, SocketAddr)> {
    tokio::time::sleep(ACCEPT_PAUSE).await;
    listener.accept().await
}

/// Accept loop of the API over TCP.
pub async fn http(listener: TcpListener, tls: Option<TlsAcceptor>, router: Router) {
    let slots = Slots::new(HTTP_CLIENTS);
    loop {
        match accept(&listener).await {
            Ok((stream, peer)) => {
                let Some(slot) = slots.take("API") else { continue };
                let (tls, router) = (tls.clone(), router.clone());
                tokio::spawn(async move {
                    match secure(stream, peer, tls).await {
                        Some(Stream::Clear(stream)) => {
                            requests(stream, router, Caller::Tcp(peer), slot).await
                        }
                        Some(Stream::Tls(stream)) => requests(stream, router, Caller::Tcp(peer), slot).await,
                        None => {}
                    }
                });
            }
            Err(error) => cannot_accept("API", &error).await,
        }
    }
}

/// A client's connection, in clear text or under TLS.
pub enum Stream {
    Clear(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

/// Sets the timeouts for a stalled peer on an accepted connection, and performs the TLS handshake if `tls` is set.
pub async fn secure(stream: TcpStream, peer: SocketAddr, tls: Option<TlsAcceptor>) -> Option<Stream> {
    let guard = || -> io::Result<()> {
        stream.set_nodelay(true)?;
        rustix::net::sockopt::set_socket_keepalive(&stream, true)?;
        rustix::net::sockopt::set_tcp_keepidle(&stream, STALL_TIME)?;
        Ok(rustix::net::sockopt::set_tcp_user_timeout(&stream, STALL_TIME.as_millis() as u32)?)
    };
    if let Err(error) = guard() {
        tracing::debug!(%peer, %error, "the client closed the connection before it was set up");
        return None;
    }
    let Some(tls) = tls else { return Some(Stream::Clear(stream)) };
    match tokio::time::timeout(HANDSHAKE_TIME, tls.accept(stream)).await {
        Ok(Ok(stream)) => Some(Stream::Tls(Box::new(stream))),
        Ok(Err(error)) => {
            tracing::debug!(%peer, %error, "TLS handshake failed");
            None
        }
        Err(_) => {
            tracing::debug!(%peer, "TLS handshake timed out");
            None
        }
    }
}

/// Serves one connection's requests; the slot is released at the end.
async fn requests(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    router: Router,
    caller: Caller,
    _slot: OwnedSemaphorePermit,
) {
    let service = TowerToHyperService::new(router.layer(Extension(caller)));
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIME)
        .max_buf_size(HEAD_MAX)
        .serve_connection(TokioIo::new(stream), service)
        .await;
    if let Err(error) = served {
        tracing::debug!(?caller, %error, "a control connection ended");
    }
}

/// Logs a failed accept and waits before the next one: usually vnetd is out of file descriptors.
pub async fn cannot_accept(what: &str, error: &io::Error) {
    tracing::warn!("cannot accept a client of the {what}: {error}");
    tokio::time::sleep(Duration::from_millis(100)).await;
}
