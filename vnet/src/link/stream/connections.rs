//! The connections of a stream link: one that this host dialed, and one that it accepted.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::connection::{Connection, Inbox, SILENCE};
use super::options::StreamOptions;
use crate::link::LinkState;
use crate::link::sealed::identity::{Identity, IdentityStore};
use crate::poll::{Poller, Waker};
use crate::wire::native::{Header, Kind};
use crate::wire::offload::Offload;
use crate::wire::stream::Prefix;

/// Slot of the connection that this host dialed.
pub const DIALED: usize = 0;
/// Slot of the connection that this host accepted.
pub const ACCEPTED: usize = 1;
/// Maximum number of connections of a stream link.
pub const CONNECTIONS: usize = 2;
/// Time without sending after which a side sends a keepalive.
pub const KEEPALIVE: Duration = Duration::from_secs(2);

/// A stream link's connections and their status.
#[derive(Debug)]
pub(in crate::link) struct Stream {
    pub(super) options: StreamOptions,
    /// Host name in the other host's certificate; `None` in clear text.
    pub(super) peer: Option<String>,
    identity: OnceLock<Arc<IdentityStore>>,
    pub(super) slots: [Slot; CONNECTIONS],
    status: Mutex<Status>,
    /// Wakes the thread that dials.
    dialer: OnceLock<Poller>,
    stopping: AtomicBool,
}

/// Place for one connection, served by one dispatcher.
#[derive(Debug, Default)]
pub(super) struct Slot {
    pub(super) connection: Mutex<Option<Connection>>,
    waker: Mutex<Option<Waker>>,
    /// True if the last read emptied the socket, so the next bytes wake the dispatcher.
    drained: AtomicBool,
}

/// Status for `vnet link list`.
#[derive(Debug, Default)]
struct Status {
    /// The reason why there is no connection.
    reason: String,
    heard: Option<Instant>,
}

impl Slot {
    /// Records that bytes may be waiting in the socket: the source must read before it may rest.
    pub(super) fn mark_undrained(&self) {
        self.drained.store(false, Relaxed);
    }
}

impl Stream {
    pub(in crate::link) fn new(options: StreamOptions, peer: Option<String>) -> Stream {
        let reason = if options.connect { "not connected yet" } else { "nobody has connected yet" };
        Stream {
            options,
            peer,
            identity: OnceLock::new(),
            slots: Default::default(),
            status: Mutex::new(Status { reason: reason.into(), heard: None }),
            dialer: OnceLock::new(),
            stopping: AtomicBool::new(false),
        }
    }

    /// Uses `identity` for TLS. Only the first call has an effect.
    pub(super) fn set_identity(&self, identity: Arc<IdentityStore>) {
        let _ = self.identity.set(identity);
    }

    pub(super) fn identity(&self) -> Option<Arc<Identity>> {
        self.identity.get().map(|store| store.current())
    }

    /// Wakes `dialer` when a connection ends. Only the first call has an effect.
    pub(super) fn set_dialer(&self, dialer: &Poller) {
        let _ = self.dialer.set(dialer.clone());
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.stopping.load(Relaxed)
    }

    pub(super) fn is_connected(&self, slot: usize) -> bool {
        self.slots[slot].connection.lock().is_some()
    }

    pub(in crate::link) fn state(&self) -> LinkState {
        if (0..CONNECTIONS).any(|slot| self.is_connected(slot)) {
            LinkState::Up
        } else {
            LinkState::Unreachable(self.status.lock().reason.clone())
        }
    }

    pub(super) fn heard_s(&self) -> Option<u64> {
        self.status.lock().heard.map(|heard| heard.elapsed().as_secs())
    }

    /// Records the reason why there is no connection.
    pub(super) fn failed(&self, reason: String) {
        self.status.lock().reason = reason;
    }

    /// Closes all connections for good.
    pub(super) fn stop(&self) {
        self.stopping.store(true, Relaxed);
        for slot in &self.slots {
            self.close(&mut slot.connection.lock(), "removed".into());
        }
    }

    /// Closes the connection in `current` and triggers a new dial.
    pub(super) fn close(&self, current: &mut Option<Connection>, reason: String) {
        *current = None;
        self.failed(reason);
        self.dialer.get().inspect(|dialer| dialer.ring());
    }

    /// Installs a connection in its slot, in place of the previous one.
    pub(super) fn install(&self, slot: usize, connection: Connection) {
        let slot = &self.slots[slot];
        let mut current = slot.connection.lock();
        // `stop` sets this before it locks the slot, so that no connection outlives the link.
        if self.is_stopping() {
            return;
        }
        slot.drained.store(false, Relaxed);
        if let Some(waker) = &*slot.waker.lock()
            && let Err(error) = waker.watch_both(&connection)
        {
            return self.failed(format!("cannot watch the connection: {error}"));
        }
        *current = Some(connection);
        drop(current);
        self.status.lock().heard = Some(Instant::now());
    }

    /// Registers `waker` to wake the dispatcher that serves `slot`.
    pub(super) fn attach(&self, slot: usize, waker: Waker) {
        let slot = &self.slots[slot];
        let mut current = slot.connection.lock();
        slot.drained.store(false, Relaxed);
        if let Some(connection) = &*current
            && let Err(error) = waker.watch_both(connection)
        {
            self.close(&mut current, format!("cannot watch the connection: {error}"));
        }
        *slot.waker.lock() = Some(waker);
    }

    /// Removes the waker of `slot`.
    pub(super) fn detach(&self, slot: usize) {
        let slot = &self.slots[slot];
        let current = slot.connection.lock();
        if let (Some(waker), Some(connection)) = (slot.waker.lock().take(), &*current) {
            waker.forget(connection);
        }
    }

    pub(super) fn is_drained(&self, slot: usize) -> bool {
        self.slots[slot].drained.load(Relaxed)
    }

    /// Sends pending bytes of `slot`, then reads into `inbox`. Returns true when bytes arrived. The connection is locked only in
    /// this function, not while frames are processed, because they may leave on the same connection.
    pub(super) fn fill(&self, slot: &Slot, inbox: &mut Inbox) -> bool {
        let mut current = slot.connection.lock();
        let Some(connection) = &mut *current else {
            slot.drained.store(true, Relaxed);
            return false;
        };
        match connection.flush().and_then(|()| connection.read(inbox)) {
            Ok(read) => {
                slot.drained.store(read.emptied, Relaxed);
                read.bytes > 0
            }
            Err(error) => {
                self.close(&mut current, format!("the connection ended: {error}"));
                false
            }
        }
    }

    /// Keeps each connection alive, or closes it; called about once a second. With `verify` it also checks certificates; `number`
    /// returns the next datagram number.
    pub(super) fn look_after(&self, verify: bool, number: impl Fn() -> u64) {
        for slot in &self.slots {
            let mut current = slot.connection.lock();
            let Some(connection) = &mut *current else { continue };
            if let Err(reason) = self.keep_alive(connection, verify, &number) {
                self.close(&mut current, reason);
            }
        }
    }

    fn keep_alive(
        &self,
        connection: &mut Connection,
        verify: bool,
        number: &impl Fn() -> u64,
    ) -> Result<(), String> {
        if verify {
            self.verify(connection)?;
        }
        let (heard, sent) = (connection.heard(), connection.sent());
        if heard.elapsed() >= SILENCE {
            return Err(format!("nothing was heard for {} s", SILENCE.as_secs()));
        }
        {
            let mut status = self.status.lock();
            status.heard = status.heard.max(Some(heard));
        }
        if sent.elapsed() >= KEEPALIVE {
            connection.put(Prefix::new(&keepalive(number()), &Offload::default(), 0).bytes(), 0, |_| ());
            connection.flush().map_err(|error| format!("the connection ended: {error}"))?;
        }
        Ok(())
    }

    /// Checks the peer's certificate against the clock and the current revocation lists.
    fn verify(&self, connection: &Connection) -> Result<(), String> {
        match (connection.chain(), &self.peer, self.identity()) {
            (Some(chain), Some(peer), Some(identity)) => identity.verify(chain, peer).map(drop),
            _ => Ok(()),
        }
    }
}

/// Header of a keepalive.
pub(super) fn keepalive(number: u64) -> Header {
    Header::whole(Kind::Keepalive, 0, number)
}
