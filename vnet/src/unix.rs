//! Listening on Unix sockets by path: a stale one is replaced, a live one never.
//!
//! A socket file outlives a process that was killed. Whether somebody still listens is found out by connecting; the look and
//! the replacement are done under a lock on the directory, so that of two daemons that start at once only one finds it
//! stale.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, Mode, OFlags, fchmod, flock, open};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};

/// How long another daemon's look at the same directory is waited for.
const LOCK_TIME_MAX: Duration = Duration::from_secs(2);
/// Connections that wait to be accepted.
const BACKLOG: i32 = 128;

/// Why there is no listening socket.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// Somebody answered there.
    #[error("socket '{0}' is in use by a running process (it answered); stop that or choose another path")]
    InUse(PathBuf),
    /// The path is something else's.
    #[error("'{0}' is there and not a socket; remove it or choose another path")]
    NotASocket(PathBuf),
    /// Unix socket addresses are short.
    #[error("socket path '{0}' is longer than 107 bytes; choose a shorter one")]
    PathTooLong(PathBuf),
    /// The directory stays locked.
    #[error("the directory of socket '{0}' is locked by another program; choose another path")]
    Locked(PathBuf),
    /// The system refused.
    #[error("cannot listen on socket '{path}': {error}; choose another path or run vnetd as root")]
    System {
        /// The socket.
        path: PathBuf,
        /// What the kernel said.
        error: io::Error,
    },
}

/// A listening socket whose file goes with it.
#[derive(Debug)]
pub struct Listener {
    socket: UnixListener,
    path: PathBuf,
    /// Device and inode of the socket's file, by which it is known to be ours still.
    identity: Option<(u64, u64)>,
}

impl Listener {
    /// Listens at `path`, whose file gets the permissions `mode` less the process's mask. The listener does
    /// not wait in `accept`.
    pub fn bind(path: &Path, mode: u32) -> Result<Listener, ListenError> {
        let failed = |error: io::Error| ListenError::System { path: path.to_owned(), error };
        let address = SocketAddrUnix::new(path).map_err(|_| ListenError::PathTooLong(path.to_owned()))?;
        let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let _lock = lock(folder).map_err(failed)?.ok_or_else(|| ListenError::Locked(path.to_owned()))?;
        make_way(path)?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let result = || -> Result<OwnedFd, Errno> {
            let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
            // The file made by `bind` takes the socket's own permissions: no moment in which it has others.
            fchmod(&socket, Mode::from_raw_mode(mode))?;
            rustix::net::bind(&socket, &address)?;
            rustix::net::listen(&socket, BACKLOG)?;
            Ok(socket)
        };
        let socket = result().map_err(|e| failed(e.into()))?;
        Ok(Listener { socket: socket.into(), path: path.to_owned(), identity: identity(path) })
    }

    /// The next connection, without waiting for one.
    pub fn accept(&self) -> io::Result<UnixStream> {
        let (stream, _) = self.socket.accept()?;
        stream.set_nonblocking(false)?;
        Ok(stream)
    }

    /// A second handle of the listening socket.
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
        // Only if it is still ours: somebody may have removed it and made their own.
        if self.identity.is_some() && identity(&self.path) == self.identity {
            // One that cannot be removed is found stale by the next one to listen there.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    std::fs::symlink_metadata(path).ok().map(|meta| (meta.dev(), meta.ino()))
}

/// Locks a directory until the result is dropped; `None` when somebody else keeps it locked.
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

/// Removes a socket that nobody listens on.
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
        // Answered, or too busy to answer: somebody lives there.
        _ => Err(ListenError::InUse(path.to_owned())),
    }
}

/// Connects to `path` without waiting, and returns a stream that waits.
///
/// # Errors
/// `ConnectionRefused` when nobody listens; `WouldBlock` when somebody does, but has a full queue.
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
    fn somebody_elses_new_socket_is_left_alone() {
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
    fn a_locked_directory_is_an_error_not_a_wait_for_ever() {
        let folder = tempfile::tempdir().unwrap();
        let _held = lock(folder.path()).unwrap().unwrap();
        assert!(matches!(Listener::bind(&folder.path().join("s"), 0o600), Err(ListenError::Locked(_))));
    }
}
