//! Accepting clients: of the control socket, of the API by TCP and of the console, each bounded in number and in patience.
//!
//! A client holds one place from the moment it is accepted until it is gone; who finds no place free is closed at once. A peer
//! that does not take its answers, or is no longer there, is given up by the kernel (`TCP_USER_TIMEOUT`); one that does not send
//! what it began by the protocol's own limits. So ten thousand clients cost as much as the places there are.

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

/// Clients of the control socket at a time.
const UNIX_CLIENTS: usize = 256;
/// Clients of the API by TCP at a time: a few scrapers, a dashboard, some scripts.
const HTTP_CLIENTS: usize = 64;
/// How long a request's headers may take, and how long a connection may wait for the next request.
const HEADER_TIME: Duration = Duration::from_secs(10);
/// How long a TLS handshake may take.
const HANDSHAKE_TIME: Duration = Duration::from_secs(5);
/// How long sent data may stay without an acknowledgement, or the peer's window closed.
const STALL_TIME: Duration = Duration::from_secs(30);
/// Largest head of a request in bytes.
const HEAD_MAX: usize = 16 << 10;

/// How many clients there may be, and how many were turned away.
pub struct Places {
    free: Arc<Semaphore>,
    refused: AtomicU64,
}

impl Places {
    pub fn new(count: usize) -> Places {
        Places { free: Arc::new(Semaphore::new(count)), refused: AtomicU64::new(0) }
    }

    /// A place until it is dropped; who finds none is counted, and told of in the log at powers of two.
    pub fn take(&self, what: &str) -> Option<OwnedSemaphorePermit> {
        let place = self.free.clone().try_acquire_owned().ok();
        if place.is_none() {
            let refused = self.refused.fetch_add(1, Relaxed) + 1;
            if refused.is_power_of_two() {
                tracing::warn!(
                    refused,
                    "more clients of the {what} than are served at a time; the newest are closed"
                );
            }
        }
        place
    }
}

/// Serves the control socket for ever.
pub async fn unix(listener: UnixListener, router: Router) {
    let places = Places::new(UNIX_CLIENTS);
    loop {
        match listener.accept().await {
            Ok((stream, _)) => match stream.peer_cred() {
                Ok(peer) if may_control(&peer) => {
                    let caller = Caller::Unix { uid: peer.uid(), pid: peer.pid() };
                    let Some(place) = places.take("control socket") else { continue };
                    tokio::spawn(requests(stream, router.clone(), caller, place));
                }
                Ok(peer) => tracing::warn!("refused a control connection of user {}", peer.uid()),
                Err(error) => tracing::warn!("refused a control connection of nobody known: {error}"),
            },
            Err(error) => cannot_accept("control socket", &error).await,
        }
    }
}

fn may_control(peer: &UCred) -> bool {
    peer.uid() == 0 || peer.uid() == rustix::process::geteuid().as_raw()
}

/// Serves the API by TCP for ever.
pub async fn http(listener: TcpListener, tls: Option<TlsAcceptor>, router: Router) {
    let places = Places::new(HTTP_CLIENTS);
    loop {
        match listener.accept().await {
            Ok((stream, peer)) => {
                let Some(place) = places.take("API") else { continue };
                let (tls, router) = (tls.clone(), router.clone());
                tokio::spawn(async move {
                    match secure(stream, peer, tls).await {
                        Some(Stream::Clear(stream)) => {
                            requests(stream, router, Caller::Tcp(peer), place).await
                        }
                        Some(Stream::Tls(stream)) => requests(stream, router, Caller::Tcp(peer), place).await,
                        None => {}
                    }
                });
            }
            Err(error) => cannot_accept("API", &error).await,
        }
    }
}

/// A client's connection.
pub enum Stream {
    /// In clear text.
    Clear(TcpStream),
    /// Under TLS.
    Tls(Box<TlsStream<TcpStream>>),
}

/// Makes an accepted connection give up a peer that stalls, and shakes hands when TLS is spoken.
pub async fn secure(stream: TcpStream, peer: SocketAddr, tls: Option<TlsAcceptor>) -> Option<Stream> {
    let guard = || -> io::Result<()> {
        stream.set_nodelay(true)?;
        rustix::net::sockopt::set_socket_keepalive(&stream, true)?;
        rustix::net::sockopt::set_tcp_keepidle(&stream, STALL_TIME)?;
        Ok(rustix::net::sockopt::set_tcp_user_timeout(&stream, STALL_TIME.as_millis() as u32)?)
    };
    if let Err(error) = guard() {
        tracing::debug!(%peer, %error, "a client is gone already");
        return None;
    }
    let Some(tls) = tls else { return Some(Stream::Clear(stream)) };
    match tokio::time::timeout(HANDSHAKE_TIME, tls.accept(stream)).await {
        Ok(Ok(stream)) => Some(Stream::Tls(Box::new(stream))),
        Ok(Err(error)) => {
            tracing::debug!(%peer, %error, "no TLS handshake");
            None
        }
        Err(_) => {
            tracing::debug!(%peer, "no TLS handshake in time");
            None
        }
    }
}

/// Answers one connection's requests; the place is free again afterwards.
async fn requests(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    router: Router,
    caller: Caller,
    _place: OwnedSemaphorePermit,
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

/// Out of file descriptors, usually: wait until some are free again.
pub async fn cannot_accept(what: &str, error: &io::Error) {
    tracing::warn!("cannot accept a client of the {what}: {error}");
    tokio::time::sleep(Duration::from_millis(100)).await;
}
