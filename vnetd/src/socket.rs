//! The control socket: a stale one is replaced, one that a running vnetd listens on never.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use axum::serve::Listener;
use rustix::fs::{FlockOperation, Mode, flock};
use tokio::net::unix::{SocketAddr, UCred};

/// Why the control socket could not be taken.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// Somebody answered there.
    #[error(
        "control socket '{0}' is in use by a running vnetd (it answered); stop that one or change [control] socket"
    )]
    InUse(PathBuf),
    /// The path is something else's.
    #[error("control socket '{0}' is there and not a socket; remove it or change [control] socket")]
    NotASocket(PathBuf),
    /// The system refused.
    #[error(
        "control socket '{path}' cannot be {step}: {error}; change [control] socket or run vnetd as root"
    )]
    System {
        /// The socket.
        path: PathBuf,
        /// What was being done.
        step: &'static str,
        /// What the kernel said.
        error: io::Error,
    },
}

/// A listening control socket; its file goes with it.
pub struct ControlSocket {
    path: PathBuf,
    listener: UnixListener,
    /// Device and inode of the socket's file, to know it again.
    file: (u64, u64),
}

impl ControlSocket {
    /// Listens at `path`; only root and the process's own user may connect.
    ///
    /// Changes the process's file creation mask for a moment: to be called before there are other threads.
    pub fn bind(path: &Path) -> Result<ControlSocket, SocketError> {
        let failed = |step| move |error| SocketError::System { path: path.into(), step, error };
        let directory = path.parent().unwrap_or(Path::new("/"));
        fs::create_dir_all(directory).map_err(failed("made room for"))?;
        // Two daemons that start at once must not both find a stale socket and one remove the other's new one.
        let lock = File::open(directory).map_err(failed("made"))?;
        flock(&lock, FlockOperation::LockExclusive).map_err(|e| failed("locked")(e.into()))?;
        make_way(path)?;
        let mask = rustix::process::umask(Mode::from_raw_mode(0o177));
        let bound = UnixListener::bind(path);
        rustix::process::umask(mask);
        let listener = bound.map_err(failed("made"))?;
        let file = identity(path).map_err(failed("made"))?;
        Ok(ControlSocket { path: path.into(), listener, file })
    }

    /// What connections are accepted from.
    pub fn listener(&self) -> io::Result<Guarded> {
        let listener = self.listener.try_clone()?;
        listener.set_nonblocking(true)?;
        Ok(Guarded(tokio::net::UnixListener::from_std(listener)?))
    }
}

impl Drop for ControlSocket {
    fn drop(&mut self) {
        // Only if it is still ours: somebody may have removed it and made their own.
        if identity(&self.path).is_ok_and(|file| file == self.file) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn identity(path: &Path) -> io::Result<(u64, u64)> {
    fs::symlink_metadata(path).map(|meta| (meta.dev(), meta.ino()))
}

/// Removes a socket that nobody listens on.
fn make_way(path: &Path) -> Result<(), SocketError> {
    let failed = |step| move |error| SocketError::System { path: path.into(), step, error };
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(failed("looked at")(error)),
        Ok(meta) if !meta.file_type().is_socket() => return Err(SocketError::NotASocket(path.into())),
        Ok(_) => {}
    }
    match UnixStream::connect(path) {
        Ok(_) => Err(SocketError::InUse(path.into())),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            tracing::info!("replacing stale control socket '{}'", path.display());
            fs::remove_file(path).map_err(failed("replaced"))
        }
        Err(error) => Err(failed("tried")(error)),
    }
}

/// Accepts connections of root and of the process's own user, and closes all others.
pub struct Guarded(tokio::net::UnixListener);

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
