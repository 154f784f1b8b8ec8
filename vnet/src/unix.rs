//! Unix sockets that listen on a path. `bind` replaces a stale socket file, never a live one.
//!
//! A socket file outlives a killed process. A connection attempt shows whether a process still listens on it. Check and
//! replacement hold a lock, so that two daemons that start together cannot both find the file stale. The lock is a separate file
//! beside the socket that only the daemon's user can read. A lock on the directory would not do: any user who can read the
//! directory could take it and keep vnetd from starting.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::sys::socket::{getsockopt, sockopt};
use parking_lot::Mutex;
use rustix::fs::{AtFlags, FileType, FlockOperation, Mode, OFlags, chownat, fchmod, flock, fstat, open};
use rustix::io::Errno;
use rustix::net::{AddressFamily, Shutdown, SocketAddrUnix, SocketFlags, SocketType, socket_with};
use rustix::process::{Gid, Uid};

use crate::inherit::Inheritance;

/// How long `bind` waits for the lock.
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
    /// Another process did not release the lock in time.
    #[error("'{0}' is locked by another program that opens this socket; stop that or choose another path")]
    Locked(PathBuf),
    /// The lock file belongs to another user, or other users can read it.
    #[error(
        "lock file '{0}' belongs to another user or is readable by others; remove it or choose another path"
    )]
    ForeignLock(PathBuf),
    /// The owner or group of the socket file cannot be set.
    #[error("cannot give socket '{path}' its owner and group: {error}; run vnetd with CAP_CHOWN")]
    Owner {
        /// Path of the socket.
        path: PathBuf,
        /// The kernel's error.
        error: io::Error,
    },
    /// The socket's directory does not exist.
    #[error(
        "cannot listen on socket '{path}': directory '{folder}' is not there; make it: mkdir -p {folder}"
    )]
    NoFolder {
        /// Path of the socket.
        path: PathBuf,
        /// The missing directory.
        folder: PathBuf,
    },
    /// A system call failed.
    #[error("cannot listen on socket '{path}': {error}; choose another path or run vnetd as root")]
    System {
        /// Path of the socket.
        path: PathBuf,
        /// The kernel's error.
        error: io::Error,
    },
}

/// Users that may connect to a listening socket: owner, group and permissions of its file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SocketAccess {
    /// Owner; `None`: this process's user.
    pub owner: Option<u32>,
    /// Group; `None`: this process's group, or the folder's.
    pub group: Option<u32>,
    /// Permissions, independent of the umask; `None`: the listener's default less the umask.
    pub mode: Option<u32>,
}

/// The process at the other end of a connection, as of the time when it connected (`SO_PEERCRED`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Process id; absent when the process is in another process id namespace.
    pub pid: Option<i32>,
    /// User id.
    pub uid: u32,
    /// Group id.
    pub gid: u32,
}

impl Peer {
    /// The process at the other end of `stream`.
    pub fn of(stream: &UnixStream) -> io::Result<Peer> {
        let peer = getsockopt(stream, sockopt::PeerCredentials)?;
        Ok(Peer { pid: Some(peer.pid()).filter(|pid| *pid > 0), uid: peer.uid(), gid: peer.gid() })
    }
}

impl std::fmt::Display for Peer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if let Some(pid) = self.pid {
            write!(f, "process {pid} ")?;
        }
        write!(f, "of user {} group {}", self.uid, self.gid)
    }
}

/// A listening socket. Removes its file when closed or dropped.
#[derive(Debug)]
pub struct Listener {
    socket: UnixListener,
    path: PathBuf,
    /// Device and inode of the socket file, so that the listener removes only its own file; `None` once it is removed.
    identity: Mutex<Option<(u64, u64)>>,
    /// Where the socket comes from, if a running vnetd has handed it over.
    inheritance: Option<Arc<Inheritance>>,
}

impl Listener {
    /// Listens at `path`. The file gets permissions `mode`, less the umask. `accept` does not block.
    pub fn bind(path: &Path, mode: u32) -> Result<Listener, ListenError> {
        Listener::bind_for(path, mode, SocketAccess::default())
    }

    /// Like [`Listener::bind`], with the file's owner, group and permissions taken from `access`.
    pub fn bind_for(path: &Path, mode: u32, access: SocketAccess) -> Result<Listener, ListenError> {
        let failed = |error: io::Error| ListenError::System { path: path.to_owned(), error };
        let address = SocketAddrUnix::new(path).map_err(|_| ListenError::PathTooLong(path.to_owned()))?;
        let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        if !folder.exists() {
            return Err(ListenError::NoFolder { path: path.to_owned(), folder: folder.to_owned() });
        }
        let _lock = Lock::take(path)?;
        make_way(path)?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let result = || -> Result<OwnedFd, Errno> {
            let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
            // `bind` gives the file the permissions of the socket, so the file never has wider ones.
            fchmod(&socket, Mode::from_raw_mode(access.mode.unwrap_or(mode)))?;
            rustix::net::bind(&socket, &address)?;
            Ok(socket)
        };
        let socket = result().map_err(|e| failed(e.into()))?;
        let identity = Mutex::new(identity(path));
        let listener = Listener { socket: socket.into(), path: path.to_owned(), identity, inheritance: None };
        // No client can connect before this returns: the socket does not listen yet.
        listener.admit(access)?;
        rustix::net::listen(&listener.socket, BACKLOG).map_err(|e| failed(e.into()))?;
        Ok(listener)
    }

    /// The listening socket of a running vnetd. It stays open, and its file stays, until `inheritance` is settled.
    pub fn inherit(path: &Path, socket: OwnedFd, inheritance: Arc<Inheritance>) -> Listener {
        let identity = Mutex::new(identity(path));
        let inheritance = Some(inheritance);
        Listener { socket: socket.into(), path: path.to_owned(), identity, inheritance }
    }

    /// Sets permissions, owner and group of the socket file.
    fn admit(&self, access: SocketAccess) -> Result<(), ListenError> {
        if access == SocketAccess::default() {
            return Ok(());
        }
        let failed = |error: io::Error| ListenError::System { path: self.path.clone(), error };
        // Opens a handle of the file itself: a user with write access to the folder could replace the path in the meantime.
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = open(&self.path, flags, Mode::empty()).map_err(|e| failed(e.into()))?;
        let kind = fstat(&file).map(|stat| FileType::from_raw_mode(stat.st_mode));
        if kind.map_err(|e| failed(e.into()))? != FileType::Socket {
            return Err(ListenError::NotASocket(self.path.clone()));
        }
        // Permissions before ownership: after a change of owner the process may lack the privilege to change the permissions.
        if let Some(mode) = access.mode {
            let handle = format!("/proc/self/fd/{}", file.as_raw_fd());
            std::fs::set_permissions(handle, std::fs::Permissions::from_mode(mode)).map_err(failed)?;
        }
        let (owner, group) = (access.owner.map(Uid::from_raw), access.group.map(Gid::from_raw));
        chownat(&file, "", owner, group, AtFlags::EMPTY_PATH)
            .map_err(|error| ListenError::Owner { path: self.path.clone(), error: error.into() })
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

    /// Refuses further connections and removes the file, even while others hold references to this listener.
    pub fn close(&self) {
        if self.inheritance.as_ref().is_some_and(|inheritance| !inheritance.is_settled()) {
            return;
        }
        // Fails only if the socket is already shut down.
        let _ = rustix::net::shutdown(&self.socket, Shutdown::Both);
        // Removes only this listener's file: another process may have replaced it.
        let ours = self.identity.lock().take();
        if ours.is_some() && identity(&self.path) == ours {
            // If removal fails, the next listener treats the file as stale.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.close();
    }
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    std::fs::symlink_metadata(path).ok().map(|meta| (meta.dev(), meta.ino()))
}

/// Lock on a socket's path, held while the socket file is checked and replaced. Dropping it removes the lock file.
#[derive(Debug)]
struct Lock {
    /// Closing this descriptor releases the lock.
    _file: OwnedFd,
    path: PathBuf,
}

impl Lock {
    /// Locks the path of `socket`.
    fn take(socket: &Path) -> Result<Lock, ListenError> {
        let failed = |error: Errno| ListenError::System { path: socket.to_owned(), error: error.into() };
        let mut path = socket.as_os_str().to_owned();
        path.push(".lock");
        let path = PathBuf::from(path);
        let deadline = Instant::now() + LOCK_TIME_MAX;
        loop {
            // Neither follows a symbolic link nor blocks on a pipe that another user placed at this path.
            let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
            let file = open(&path, flags, Mode::RUSR | Mode::WUSR).map_err(failed)?;
            let stat = fstat(&file).map_err(failed)?;
            let kind = FileType::from_raw_mode(stat.st_mode);
            let ours = stat.st_uid == rustix::process::geteuid().as_raw() && stat.st_mode & 0o077 == 0;
            if kind != FileType::RegularFile || !ours {
                return Err(ListenError::ForeignLock(path));
            }
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                // The last holder may have removed this file; in that case a successor locks a new file.
                Ok(()) if identity(&path) == Some((stat.st_dev, stat.st_ino)) => {
                    return Ok(Lock { _file: file, path });
                }
                Ok(()) => {}
                Err(Errno::WOULDBLOCK) if Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(10));
                }
                Err(Errno::WOULDBLOCK) => return Err(ListenError::Locked(path)),
                Err(error) => return Err(failed(error)),
            }
        }
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // Removed while locked: a process that waits for this lock notices the removal and creates a new file. If the removal
        // fails, a later holder locks this file again.
        let _ = std::fs::remove_file(&self.path);
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
        // The connection succeeded, or the backlog is full: the socket is live.
        _ => Err(ListenError::InUse(path.to_owned())),
    }
}

/// Connects to `path` without blocking. The returned stream blocks.
///
/// # Errors
/// `ConnectionRefused` when no process listens; `WouldBlock` when the listener's backlog is full.
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
    fn a_missing_directory_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let below = folder.path().join("below");
        let error = Listener::bind(&below.join("s"), 0o600).unwrap_err().to_string();
        assert!(error.ends_with(&format!("mkdir -p {}", below.display())), "{error}");
    }

    #[test]
    fn a_lock_that_is_held_is_an_error_after_a_timeout() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let held = Lock::take(&path).unwrap();
        assert!(matches!(Listener::bind(&path, 0o600), Err(ListenError::Locked(_))));
        drop(held);
        drop(Listener::bind(&path, 0o600).unwrap());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "no lock file stays");
    }

    /// A lock on the folder, which every user that can read the folder can take, does not stop `bind`.
    #[test]
    fn a_lock_on_the_folder_does_not_keep_us_from_listening() {
        let folder = tempfile::tempdir().unwrap();
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let held = open(folder.path(), flags, Mode::empty()).unwrap();
        flock(&held, FlockOperation::LockExclusive).unwrap();
        let began = Instant::now();
        let _listener = Listener::bind(&folder.path().join("s"), 0o600).unwrap();
        assert!(began.elapsed() < LOCK_TIME_MAX);
    }

    #[test]
    fn a_lock_file_of_somebody_else_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let (path, lock) = (folder.path().join("s"), folder.path().join("s.lock"));
        std::fs::write(&lock, "").unwrap();
        std::fs::set_permissions(&lock, std::fs::Permissions::from_mode(0o644)).unwrap();
        let error = Listener::bind(&path, 0o600).unwrap_err();
        assert!(error.to_string().contains("s.lock' belongs to another user"), "{error}");
        std::fs::remove_file(&lock).unwrap();
        std::os::unix::fs::symlink(folder.path().join("elsewhere"), &lock).unwrap();
        assert!(matches!(Listener::bind(&path, 0o600), Err(ListenError::System { .. })));
        assert!(!folder.path().join("elsewhere").exists());
    }

    /// When several processes start at once, exactly one gets the socket, and no lock file remains.
    #[test]
    fn one_of_many_gets_the_socket() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let bind = || Listener::bind(&path, 0o600).ok();
        let got: Vec<_> = std::thread::scope(|scope| {
            let all: Vec<_> = (0..8).map(|_| scope.spawn(bind)).collect();
            all.into_iter().filter_map(|one| one.join().unwrap()).collect()
        });
        assert_eq!(got.len(), 1);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn permissions_and_group_are_as_asked_whatever_the_umask() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let gid = rustix::process::getegid().as_raw();
        let access = SocketAccess { owner: None, group: Some(gid), mode: Some(0o660) };
        let _listener = Listener::bind_for(&path, 0o666, access).unwrap();
        let meta = std::fs::metadata(&path).unwrap();
        assert_eq!((meta.permissions().mode() & 0o777, meta.gid()), (0o660, gid));
        let stream = connect(&path).unwrap();
        let peer = Peer::of(&stream).unwrap();
        assert_eq!((peer.pid, peer.gid), (Some(std::process::id() as i32), gid));
    }

    #[test]
    fn a_closed_listener_leaves_its_successor_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let first = Listener::bind(&path, 0o600).unwrap();
        first.close();
        assert!(!path.exists());
        let _second = Listener::bind(&path, 0o600).unwrap();
        drop(first);
        assert!(connect(&path).is_ok());
    }
}
