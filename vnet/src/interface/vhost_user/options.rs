//! Configuration of a vhost-user interface, and why one cannot be started.

use std::io;
use std::path::PathBuf;

use crate::frame::MTU_MAX;
use crate::unix::{ListenError, Peer, SocketAccess};
use crate::wire::ethernet::Mac;

/// Most queue pairs of one interface: vhost-user messages with file descriptors number vrings with eight bits.
pub const QUEUES_MAX: usize = 128;
/// Smallest MTU of an interface (RFC 791).
pub const MTU_MIN: usize = 68;

/// Configuration of a vhost-user interface.
#[derive(Clone, Debug)]
pub struct VhostUserOptions {
    /// The interface's name, for logs and messages.
    pub name: String,
    /// Path of the Unix socket.
    pub socket: PathBuf,
    /// True: listen on the socket. False: connect to it, and reconnect whenever the front end disconnects.
    pub server: bool,
    /// MAC address in the guest's configuration space, for front ends that ask for it.
    pub mac: Option<Mac>,
    /// Largest payload of a frame to the guest, in bytes; `MTU_MIN` to [`MTU_MAX`].
    pub mtu: usize,
    /// Queue pairs, 1 to [`QUEUES_MAX`].
    pub queues: usize,
    /// Server: owner, group and permissions of the socket file.
    pub access: SocketAccess,
    /// The front ends that are served.
    pub peer: AllowedPeer,
    /// Most bytes of memory that the front end may share; this host's memory when absent.
    pub memory_max: Option<u64>,
}

/// The processes that may be front ends, by their credentials when they connected; any when nothing is given.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AllowedPeer {
    /// The only user.
    pub uid: Option<u32>,
    /// The only group.
    pub gid: Option<u32>,
}

impl AllowedPeer {
    /// True if `peer` may be served.
    pub(super) fn admits(&self, peer: &Peer) -> bool {
        self.uid.is_none_or(|uid| uid == peer.uid) && self.gid.is_none_or(|gid| gid == peer.gid)
    }
}

impl VhostUserOptions {
    /// # Errors
    /// [`VhostUserError::Queues`] or [`VhostUserError::Mtu`].
    pub(super) fn check(&self) -> Result<(), VhostUserError> {
        if self.queues == 0 || self.queues > QUEUES_MAX {
            return Err(VhostUserError::Queues(self.queues));
        }
        if !(MTU_MIN..=MTU_MAX).contains(&self.mtu) {
            return Err(VhostUserError::Mtu(self.mtu));
        }
        Ok(())
    }

    /// Most bytes of memory that the front end may share.
    pub(super) fn memory_max(&self) -> u64 {
        self.memory_max.unwrap_or_else(host_memory)
    }
}

/// Bytes of this host's memory. No VM needs more, and pages that we are the first to touch are charged to us.
fn host_memory() -> u64 {
    // SAFETY: sysconf reads two numbers of the system.
    let [pages, page] = [libc::_SC_PHYS_PAGES, libc::_SC_PAGESIZE].map(|name| unsafe { libc::sysconf(name) });
    let bytes = u64::try_from(pages).ok().zip(u64::try_from(page).ok()).map(|(pages, page)| pages * page);
    bytes.unwrap_or(u64::MAX)
}

/// Why a vhost-user interface could not be started.
#[derive(Debug, thiserror::Error)]
pub enum VhostUserError {
    /// Cannot listen on the socket.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// `queues` out of range.
    #[error("{0} queues; an interface has 1 to {QUEUES_MAX}")]
    Queues(usize),
    /// `mtu` out of range.
    #[error("MTU {0} is not between {MTU_MIN} and {MTU_MAX}")]
    Mtu(usize),
    /// Out of threads, file descriptors or AIO contexts.
    #[error("cannot start interface {name}: {source}")]
    Thread {
        /// The interface.
        name: String,
        /// The system's error.
        source: io::Error,
    },
}

impl VhostUserError {
    /// Why the interface is down, if what it lacks may still come; `None`: only another configuration helps.
    pub fn waits_for(&self) -> Option<String> {
        match self {
            VhostUserError::Listen(ListenError::NoFolder { folder, .. }) => {
                Some(format!("waiting for directory '{0}'; make it: mkdir -p {0}", folder.display()))
            }
            _ => None,
        }
    }
}
