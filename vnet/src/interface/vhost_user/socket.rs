//! The Unix socket: listening where no live process does, and connecting without waiting.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, Mode, OFlags, flock, open};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};

use super::VhostUserError;

/// A listening socket whose file goes with it.
pub(super) struct Listener {
    socket: UnixListener,
    path: PathBuf,
    /// Device and inode of the socket file, by which it is known to be ours still.
    identity: Option<(u64, u64)>,
}

impl Listener {
    /// Listens at `path`. A socket file that nobody answers on is replaced, a live one is not.
    pub(super) fn bind(path: &Path) -> Result<Listener, VhostUserError> {
        let failed = |source: io::Error| VhostUserError::Bind { path: path.to_owned(), source };
        if SocketAddrUnix::new(path).is_err() {
            return Err(VhostUserError::PathTooLong(path.to_owned()));
        }
        let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        // Locked, so that of two daemons that both find a stale file only one replaces it. Released when it is dropped.
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let folder = open(folder, flags, Mode::empty()).map_err(|e| failed(e.into()))?;
        flock(&folder, FlockOperation::LockExclusive).map_err(|e| failed(e.into()))?;

        match std::fs::symlink_metadata(path) {
            Ok(meta) if !meta.file_type().is_socket() => {
                return Err(VhostUserError::NotASocket(path.to_owned()));
            }
            Ok(_) => match connect(path).map_err(|e| e.kind()) {
                Err(io::ErrorKind::ConnectionRefused) => {
                    tracing::info!(path = %path.display(), "stale socket file replaced");
                    std::fs::remove_file(path).map_err(failed)?;
                }
                Err(io::ErrorKind::PermissionDenied) => {
                    return Err(failed(io::ErrorKind::PermissionDenied.into()));
                }
                // Answered, or too busy to answer: somebody lives there.
                _ => return Err(VhostUserError::InUse(path.to_owned())),
            },
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(failed(error)),
        }
        let socket = UnixListener::bind(path).map_err(failed)?;
        let identity = identity(path);
        // Accepting must not wait for a front end that has left again.
        socket.set_nonblocking(true).map_err(failed)?;
        Ok(Listener { socket, path: path.to_owned(), identity })
    }

    /// The next front end, without waiting.
    pub(super) fn accept(&self) -> io::Result<UnixStream> {
        let (stream, _) = self.socket.accept()?;
        stream.set_nonblocking(false)?;
        Ok(stream)
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if self.identity.is_some() && identity(&self.path) == self.identity {
            // One that cannot be removed is found stale by the next one to listen there.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    std::fs::symlink_metadata(path).ok().map(|meta| (meta.dev(), meta.ino()))
}

/// Connects to `path` without waiting, and returns a stream that waits.
///
/// # Errors
/// `ConnectionRefused` when nobody listens; `WouldBlock` when somebody does, but has a full queue.
pub(super) fn connect(path: &Path) -> io::Result<UnixStream> {
    let address = SocketAddrUnix::new(path)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket: OwnedFd = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    match rustix::net::connect(&socket, &address) {
        Ok(()) => {}
        Err(Errno::AGAIN) => return Err(io::ErrorKind::WouldBlock.into()),
        Err(error) => return Err(error.into()),
    }
    let stream = UnixStream::from(socket);
    stream.set_nonblocking(false)?;
    Ok(stream)
}
