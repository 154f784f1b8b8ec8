//! Configuration of a vhost-user interface, and the errors of starting one.

use std::io;
use std::path::PathBuf;

use crate::frame::MTU_MAX;
use crate::unix::{ListenError, Peer, SocketAccess};
use crate::wire::ethernet::Mac;

/// Maximum number of queue pairs of one interface: vhost-user messages with file descriptors number vrings with eight bits.
pub const QUEUES_MAX: usize = 128;
/// Minimum MTU of an interface in bytes (RFC 791).
pub const MTU_MIN: usize = 68;

/// Configuration of a vhost-user interface.
#[derive(Clone, Debug)]
pub struct VhostUserOptions {
    /// Name of the interface, for logs and messages.
    pub name: String,
    /// Path of the Unix socket.
    pub socket: PathBuf,
    /// True: listen on the socket. False: connect to it, and reconnect whenever the front end disconnects.
    pub server: bool,
    /// MAC address in the guest's configuration space, for front ends that read it.
    pub mac: Option<Mac>,
    /// Maximum payload of a frame to the guest, in bytes; `MTU_MIN` to [`MTU_MAX`].
    pub mtu: usize,
    /// Number of queue pairs, 1 to [`QUEUES_MAX`].
    pub queues: usize,
    /// Server: owner, group and permissions of the socket file.
    pub access: SocketAccess,
    /// Processes that may be front ends.
    pub peer: AllowedPeer,
    /// Upper bound on the memory that the front end may share, in bytes; `None`: the size of this host's memory.
    pub memory_max: Option<u64>,
}

/// Condition on the credentials that a front end's process had when it connected. Without any field, all processes are admitted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AllowedPeer {
    /// User id that the process must have.
    pub uid: Option<u32>,
    /// Group id that the process must have.
    pub gid: Option<u32>,
}

impl AllowedPeer {
    /// True if the process `peer` may be a front end.
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

    /// Upper bound on the memory that the front end may share, in bytes.
    pub(super) fn memory_max(&self) -> u64 {
        self.memory_max.unwrap_or_else(host_memory)
    }
}

/// Size of this host's memory in bytes. No VM needs more, and the kernel charges pages that vnetd touches first to vnetd.
fn host_memory() -> u64 {
    // SAFETY: sysconf takes a number and accesses no memory of this process.
    let [pages, page] = [libc::_SC_PHYS_PAGES, libc::_SC_PAGESIZE].map(|name| unsafe { libc::sysconf(name) });
    let bytes = u64::try_from(pages).ok().zip(u64::try_from(page).ok()).map(|(pages, page)| pages * page);
    bytes.unwrap_or(u64::MAX)
}

/// Error when starting a vhost-user interface.
#[derive(Debug, thiserror::Error)]
pub enum VhostUserError {
    /// Cannot listen on the socket.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// `queues` is out of range.
    #[error("{0} queues; an interface has 1 to {QUEUES_MAX}")]
    Queues(usize),
    /// `mtu` is out of range.
    #[error("MTU {0} is not between {MTU_MIN} and {MTU_MAX}")]
    Mtu(usize),
    /// The system is out of threads, file descriptors or AIO contexts.
    #[error("cannot start interface {name}: {source}")]
    Thread {
        /// Name of the interface.
        name: String,
        /// The system's error.
        source: io::Error,
    },
}

impl VhostUserError {
    /// The reason for the state "down" if the missing part may still appear; `None` if only another configuration helps.
    pub fn waits_for(&self) -> Option<String> {
        match self {
            VhostUserError::Listen(ListenError::NoFolder { folder, .. }) => {
                Some(format!("waiting for directory '{0}'; make it: mkdir -p {0}", folder.display()))
            }
            _ => None,
        }
    }
}
