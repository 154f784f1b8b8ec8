//! Roaming: a sealed native link follows its peer to another address.
//!
//! Keepalives, five a second, carry a tag in their header, which both hosts derive from the session's keys (session.rs). A
//! datagram from an unknown source that has the size and header of a keepalive is looked up by that tag and opened with the one
//! key that belongs to the tag. So a datagram of an unknown host costs two hash lookups, and one with a known tag a decryption of
//! 24 bytes: never a search among links, and less than the same datagram costs from a known address.
//!
//! An opened keepalive moves the link when its number is the highest that its key has opened: a delayed keepalive moves nothing,
//! and a replayed one is not opened at all. The receiver only notes the address ([`RemoteAddress::note`]); the
//! [keeper](super::keeper) moves the link at its next check and renews the [`SourceTable`](super::source_table::SourceTable), by
//! which receivers match datagrams from the new address. Dispatchers load one pointer.

use std::net::SocketAddr;
use std::sync::Arc;

use arc_swap::ArcSwapOption;
use parking_lot::Mutex;

use crate::link::socket::name::{ANYWHERE, Name, Target, addresses};
use crate::link::socket::udp::Socket;

/// The addresses of a host's ports, in the kernel's form.
#[derive(Debug)]
struct Names {
    /// Address of the first port.
    remote: SocketAddr,
    /// One target per port.
    list: Vec<Target>,
}

impl Names {
    fn new(remote: SocketAddr, ports: u16) -> Names {
        let count = if remote == ANYWHERE { 0 } else { ports };
        Names { remote, list: addresses(remote, count).map(Target::new).collect() }
    }
}

/// Address of a link's peer: the configured address, or the address at which a sealed link's peer was last heard.
#[derive(Debug)]
pub(in crate::link) struct RemoteAddress {
    ports: u16,
    configured: Names,
    /// The current address if it is not the configured one; for links that follow their peer.
    learned: Option<ArcSwapOption<Names>>,
    /// Address at which the peer was heard, for the keeper.
    noted: Mutex<Option<SocketAddr>>,
    /// The configured address, if it has changed since the link was created.
    declared: Mutex<Option<SocketAddr>>,
}

impl RemoteAddress {
    /// The configured address: the first of `ports` ports is at `remote`. `follows`: the peer can prove a new address.
    pub(in crate::link) fn new(remote: SocketAddr, ports: u16, follows: bool) -> RemoteAddress {
        RemoteAddress {
            ports,
            configured: Names::new(remote, ports),
            learned: follows.then(ArcSwapOption::empty),
            noted: Mutex::default(),
            declared: Mutex::default(),
        }
    }

    /// Sets another configured address, and moves there. Returns false if the peer cannot prove its address.
    pub(in crate::link) fn declare(&self, remote: SocketAddr) -> bool {
        let follows = self.follows();
        if follows {
            *self.declared.lock() = (remote != self.configured.remote).then_some(remote);
            self.forget();
        }
        follows
    }

    /// True if the peer can prove a new address.
    pub(super) fn follows(&self) -> bool {
        self.learned.is_some()
    }

    #[inline]
    fn with<R>(&self, look: impl FnOnce(&Names) -> R) -> R {
        match self.learned.as_ref().map(ArcSwapOption::load).as_deref() {
            Some(Some(names)) => look(names),
            _ => look(&self.configured),
        }
    }

    /// Address of the other host's first port; `None` while it is unknown.
    #[inline]
    pub(in crate::link) fn remote(&self) -> Option<SocketAddr> {
        Some(self.with(|names| names.remote)).filter(|remote| *remote != ANYWHERE)
    }

    /// Number of the other host's ports; 0 while its address is unknown.
    #[inline]
    pub(in crate::link) fn ports(&self) -> usize {
        self.with(|names| names.list.len())
    }

    /// Address of the other host's port number `port`, in the form for `socket`; `None` when the socket cannot reach it.
    #[inline]
    pub(in crate::link) fn name(&self, port: usize, socket: &Socket) -> Option<Name> {
        self.with(|names| socket.form_of(names.list.get(port)?).copied())
    }

    /// Records the source address of an opened keepalive.
    #[cold]
    pub(in crate::link) fn note(&self, remote: SocketAddr) {
        *self.noted.lock() = Some(remote);
    }

    /// Moves to the recorded address. Returns it when it differs from the previous one.
    pub(in crate::link) fn follow(&self) -> Option<SocketAddr> {
        let learned = self.learned.as_ref()?;
        let remote = self.noted.lock().take().filter(|remote| self.remote() != Some(*remote))?;
        let names = (remote != self.configured.remote).then(|| Arc::new(Names::new(remote, self.ports)));
        learned.store(names);
        Some(remote)
    }

    /// Moves to `remote`.
    pub(in crate::link) fn move_to(&self, remote: SocketAddr) {
        if let Some(learned) = &self.learned {
            learned.store(Some(Arc::new(Names::new(remote, self.ports))));
        }
    }

    /// Returns to the configured address. Returns true when the peer had another address.
    pub(in crate::link) fn forget(&self) -> bool {
        let (Some(learned), before) = (&self.learned, self.remote()) else { return false };
        let declared = *self.declared.lock();
        learned.store(declared.map(|remote| Arc::new(Names::new(remote, self.ports))));
        self.remote() != before
    }

    pub(super) fn learned(&self) -> impl Iterator<Item = SocketAddr> {
        let names = self.learned.as_ref().and_then(ArcSwapOption::load_full);
        let (remote, count) = names.map_or((ANYWHERE, 0), |names| (names.remote, self.ports));
        addresses(remote, count)
    }
}
