//! Who may speak to the control socket.

use std::io;
use std::os::unix::net::UnixListener;
use std::time::Duration;

use axum::serve::Listener;
use tokio::net::unix::{SocketAddr, UCred};

/// Accepts connections of root and of the process's own user, and closes all others.
pub struct Guarded(tokio::net::UnixListener);

impl Guarded {
    /// Accepts what comes to `listener`, which does not wait.
    pub fn new(listener: UnixListener) -> io::Result<Guarded> {
        Ok(Guarded(tokio::net::UnixListener::from_std(listener)?))
    }
}

impl Listener for Guarded {
    type Io = tokio::net::UnixStream;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        loop {
            match self.0.accept().await {
                Ok((stream, address)) => match stream.peer_cred() {
                    Ok(peer) if may_control(&peer) => return (stream, address),
                    Ok(peer) => tracing::warn!("refused a control connection of user {}", peer.uid()),
                    Err(error) => tracing::warn!("refused a control connection of nobody known: {error}"),
                },
                Err(error) => {
                    // Out of file descriptors, usually: wait until some are free again.
                    tracing::warn!("cannot accept a control connection: {error}");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
        }
    }

    fn local_addr(&self) -> io::Result<Self::Addr> {
        self.0.local_addr()
    }
}

fn may_control(peer: &UCred) -> bool {
    peer.uid() == 0 || peer.uid() == rustix::process::geteuid().as_raw()
}
