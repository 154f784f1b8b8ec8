//! Unix sockets that listen by path: replaces a stale socket file, never a live one.
//!
//! A socket file outlives a killed process. A connection attempt tells whether anybody still listens. Check and replacement
//! hold a lock on the directory, so that two daemons that start together cannot both find the file stale.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, Mode, OFlags, fchmod, flock, open};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};

/// Longest wait for the lock on the directory.
const LOCK_TIME_MAX: Duration = Duration::from_secs(2);
/// Pending connections (listen backlog).
const BACKLOG: i32 = 128;

/// Error when listening on a path.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// A running process accepts connections there.
    #[error("socket '{0}' is in use by a running process (it answered); stop that or choose another path")]
    InUse(PathBuf),
    /// The path is not a socket.
    #[error("'{0}' exists and is not a socket; remove it or choose another path")]
    NotASocket(PathBuf),
    /// The path exceeds the length of a Unix socket address.
    #[error("socket path '{0}' is longer than 107 bytes; choose a shorter one")]
    PathTooLong(PathBuf),
    /// The lock on the directory was not released in time.
    #[error("the directory of socket '{0}' is locked by another program; choose another path")]
    Locked(PathBuf),
    /// A system call failed.
    #[error("cannot listen on socket '{path}': {error}; choose another path or run vnetd as root")]
    System {
        /// The socket.
        path: PathBuf,
        /// The kernel's error.
        error: io::Error,
    },
}

/// A listening socket. Removes its file when dropped.
#[derive(Debug)]
pub struct Listener {
    socket: UnixListener,
    path: PathBuf,
    /// Device and inode of the socket file, to remove only our own.
    identity: Option<(u64, u64)>,
}

impl Listener {
    /// Listens at `path`. The file gets permissions `mode`, less the umask. `accept` does not block.
    pub fn bind(path: &Path, mode: u32) -> Result<Listener, ListenError> {
        let failed = |error: io::Error| ListenError::System { path: path.to_owned(), error };
        let address = SocketAddrUnix::new(path).map_err(|_| ListenError::PathTooLong(path.to_owned()))?;
        let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let _lock = lock(folder).map_err(failed)?.ok_or_else(|| ListenError::Locked(path.to_owned()))?;
        make_way(path)?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let result = || -> Result<OwnedFd, Errno> {
            let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
            // `bind` gives the file the socket's permissions, so it never has wider ones.
            fchmod(&socket, Mode::from_raw_mode(mode))?;
            rustix::net::bind(&socket, &address)?;
            rustix::net::listen(&socket, BACKLOG)?;
            Ok(socket)
        };
        let socket = result().map_err(|e| failed(e.into()))?;
        Ok(Listener { socket: socket.into(), path: path.to_owned(), identity: identity(path) })
    }

    /// Accepts a pending connection, or fails with `WouldBlock`.
    pub fn accept(&self) -> io::Result<UnixStream> {
        let (stream, _) = self.socket.accept()?;
        stream.set_nonblocking(false)?;
        Ok(stream)
    }

    /// A duplicate of the listening socket.
    pub fn try_clone(&self) -> io::Result<UnixListener> {
        self.socket.try_clone()
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // Only our own file: another process may have replaced it.
        if self.identity.is_some() && identity(&self.path) == self.identity {
            // If removal fails, the next listener finds the file stale.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    std::fs::symlink_metadata(path).ok().map(|meta| (meta.dev(), meta.ino()))
}

/// Locks a directory until the result is dropped; `None` when another process keeps it locked.
fn lock(folder: &Path) -> io::Result<Option<OwnedFd>> {
    let folder = open(folder, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let deadline = Instant::now() + LOCK_TIME_MAX;
    loop {
        match flock(&folder, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(Some(folder)),
            Err(Errno::WOULDBLOCK) if Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(10));
            }
            Err(Errno::WOULDBLOCK) => return Ok(None),
            Err(error) => return Err(error.into()),
        }
    }
}

/// Removes a stale socket file.
fn make_way(path: &Path) -> Result<(), ListenError> {
    let failed = |error: io::Error| ListenError::System { path: path.to_owned(), error };
    match std::fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(failed(error)),
        Ok(meta) if !meta.file_type().is_socket() => {
            return Err(ListenError::NotASocket(path.to_owned()));
        }
        Ok(_) => {}
    }
    match connect(path).map_err(|error| error.kind()) {
        Err(io::ErrorKind::ConnectionRefused) => {
            tracing::info!(path = %path.display(), "stale socket file replaced");
            std::fs::remove_file(path).map_err(failed)
        }
        Err(io::ErrorKind::PermissionDenied) => Err(failed(io::ErrorKind::PermissionDenied.into())),
        // Connected, or its backlog is full: the socket is live.
        _ => Err(ListenError::InUse(path.to_owned())),
    }
}

/// Connects to `path` without blocking. The returned stream blocks.
///
/// # Errors
/// `ConnectionRefused` when nobody listens; `WouldBlock` when the listener's backlog is full.
pub fn connect(path: &Path) -> io::Result<UnixStream> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_live_socket_is_never_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let _first = Listener::bind(&path, 0o600).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(matches!(Listener::bind(&path, 0o600), Err(ListenError::InUse(_))));
        assert!(connect(&path).is_ok());
    }

    #[test]
    fn a_stale_file_is_replaced_and_another_file_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists());
        let listener = Listener::bind(&path, 0o600).unwrap();
        assert!(connect(&path).is_ok());
        drop(listener);
        assert!(!path.exists());
        std::fs::write(&path, "precious").unwrap();
        assert!(matches!(Listener::bind(&path, 0o600), Err(ListenError::NotASocket(_))));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
    }

    #[test]
    fn another_process_s_socket_is_not_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let ours = Listener::bind(&path, 0o600).unwrap();
        std::fs::remove_file(&path).unwrap();
        let theirs = UnixListener::bind(&path).unwrap();
        drop(ours);
        assert!(path.exists());
        drop(theirs);
    }

    #[test]
    fn a_locked_directory_is_an_error_after_a_timeout() {
        let folder = tempfile::tempdir().unwrap();
        let _held = lock(folder.path()).unwrap().unwrap();
        assert!(matches!(Listener::bind(&folder.path().join("s"), 0o600), Err(ListenError::Locked(_))));
    }
}
