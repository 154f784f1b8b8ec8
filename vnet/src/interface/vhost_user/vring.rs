//! One vring: what the front end has said of it so far, and the ring while it runs.
//!
//! A vring is *started* by SET_VRING_KICK and stopped by GET_VRING_BASE; it is *enabled* by SET_VRING_ENABLE, or by nobody's
//! negotiating protocol features (vhost-user, "Ring states"). Frames flow while it is both. Front ends send the messages in
//! different orders, some while the ring runs (memory hotplug, migration), so every message only records what it says and
//! [`Vring::update`] then makes the ring anew, at the position where the old one stood.

use std::fs::File;
use std::os::fd::AsFd;
use std::sync::Arc;

use super::event::{Event, drain};
use super::features;
use super::quiet::LogLimit;
use crate::interface::virtqueue::dirty::DirtyLog;
use crate::interface::virtqueue::memory::GuestMemory;
use crate::interface::virtqueue::net::{Format, Taken};
use crate::interface::virtqueue::{Ring, RingConfig};
use crate::poll::Waker;

/// Where the three parts of a ring lie, in the front end's address space (SET_VRING_ADDR).
#[derive(Clone, Copy, Debug)]
pub(super) struct Addresses {
    pub(super) descriptors: u64,
    pub(super) available: u64,
    pub(super) used: u64,
    /// The used ring's guest physical address, when its pages are to be logged.
    pub(super) used_log: Option<u64>,
}

/// What the whole device has in common: set by SET_FEATURES, SET_MEM_TABLE, SET_LOG_BASE.
#[derive(Clone, Debug, Default)]
pub(super) struct Common {
    pub(super) features: u64,
    pub(super) memory: Option<Arc<GuestMemory>>,
    pub(super) log: Option<Arc<DirtyLog>>,
}

/// How the guest tells us of new chains.
#[derive(Debug)]
enum Kick {
    /// By an eventfd.
    Event(File),
    /// Not at all: it expects us to look (no file descriptor came with SET_VRING_KICK).
    Poll,
}

/// The ring in use, and how frames look in it.
#[derive(Debug)]
pub(super) struct Running {
    pub(super) ring: Ring,
    pub(super) format: Format,
    /// Chains of a transmit ring that were not given back yet.
    pub(super) taken: Taken,
}

/// One direction of one queue.
#[derive(Default)]
pub(super) struct Vring {
    /// The guest's transmit ring: its notifications wake the dispatcher.
    transmit: bool,
    common: Common,
    size: Option<u32>,
    addresses: Option<Addresses>,
    base: u16,
    /// Present while the ring is started.
    kick: Option<Kick>,
    call: Option<Event>,
    /// Chains were completed while there was nobody to tell.
    missed: bool,
    error: Option<Event>,
    enabled: bool,
    running: Option<Running>,
    /// Set when guest or front end broke the running ring; stays until the ring is stopped.
    broken: Option<String>,
    /// Set while what the front end said cannot make a ring.
    misfit: Option<String>,
    waker: Option<Waker>,
    /// The dispatcher may be asleep and waits for a kick.
    armed: bool,
    /// Kicks counted since the ring was started.
    kicks: u64,
    /// Why the dispatcher is not woken by kicks, when it cannot be.
    unwatched: Option<String>,
    /// For what guests can make us log.
    limit: LogLimit,
}

impl Vring {
    pub(super) fn new(transmit: bool) -> Vring {
        Vring { transmit, ..Vring::default() }
    }

    /// The ring, when frames may flow.
    #[inline]
    pub(super) fn running(&mut self) -> Option<&mut Running> {
        if self.enabled { self.running.as_mut() } else { None }
    }

    /// True when frames may flow.
    pub(super) fn is_up(&self) -> bool {
        self.enabled && self.running.is_some()
    }

    /// Why the vring is disabled, when the guest broke it.
    pub(super) fn broken(&self) -> Option<&str> {
        self.broken.as_deref().or(self.misfit.as_deref())
    }

    /// Why the dispatcher may sleep through the guest's frames.
    pub(super) fn unwatched(&self) -> Option<&str> {
        self.unwatched.as_deref()
    }

    /// True when the front end has said all of the ring and shared no memory in which it could be.
    pub(super) fn lacks_memory(&self) -> bool {
        self.kick.is_some() && self.size.is_some() && self.addresses.is_some() && self.common.memory.is_none()
    }

    /// True when no driver has ever touched the ring, as far as we can see.
    pub(super) fn is_blank(&self) -> bool {
        self.running.as_ref().is_some_and(|running| running.ring.is_blank())
    }

    /// Kicks counted so far, those that wait included. The dispatcher must be woken afterwards: its wake-up may be lost.
    pub(super) fn count_kicks(&mut self) -> u64 {
        if let Some(Kick::Event(kick)) = &self.kick {
            self.kicks = self.kicks.saturating_add(drain(kick));
        }
        self.kicks
    }

    /// Tells the guest that chains were completed. Returns true when it could be told.
    #[inline]
    pub(super) fn notify(&mut self) -> bool {
        self.missed = self.call.is_none();
        self.call.as_ref().is_some_and(Event::signal)
    }

    /// Tells the guest of what it was shown if it waits for that. Returns true when it was told.
    pub(super) fn settle(&mut self) -> bool {
        let Some(Running { ring, .. }) = &mut self.running else { return false };
        let waits = ring.waits();
        ring.settle();
        waits && self.notify()
    }

    /// Gives back what is held no longer. Returns whether something still is, and whether the guest was notified.
    pub(super) fn reclaim(&mut self) -> (bool, bool) {
        let Some(Running { ring, taken, .. }) = &mut self.running else { return (false, false) };
        if !taken.is_held() {
            return (false, false);
        }
        let wants = taken.reclaim(ring);
        let held = taken.is_held();
        (held, wants && self.notify())
    }

    /// Disables the vring until the guest or front end resets it.
    #[cold]
    pub(super) fn break_with(&mut self, reason: String) {
        if let Some(unsaid) = self.limit.pass() {
            tracing::warn!(%reason, unsaid, "queue disabled until the guest resets it");
        }
        self.halt();
        self.broken = Some(reason);
        if let Some(error) = &self.error {
            error.signal();
        }
    }

    /// Takes the ring out of use and remembers where it stood. The guest hears of all it was shown: nobody could tell it later.
    fn halt(&mut self) {
        self.settle();
        if let Some(running) = self.running.take() {
            // Chains that are still held are not given back: whoever goes on with the ring takes them again.
            self.base = running.ring.completed();
        }
    }

    /// GET_VRING_BASE: stops the ring and returns the next available index.
    pub(super) fn stop(&mut self) -> u16 {
        self.halt();
        self.set_kick_source(None);
        self.broken = None;
        self.misfit = None;
        self.base
    }

    /// Back to the state before the first message; the waker and its bell stay.
    pub(super) fn reset(&mut self) {
        self.stop();
        *self = Vring {
            transmit: self.transmit,
            waker: self.waker.take(),
            armed: self.armed,
            unwatched: self.unwatched.take(),
            limit: std::mem::take(&mut self.limit),
            ..Vring::default()
        };
    }

    /// RESET_DEVICE: as [`Vring::reset`], but memory, features and the way to the guest stay.
    pub(super) fn reset_device(&mut self) {
        let (common, call, error) = (std::mem::take(&mut self.common), self.call.take(), self.error.take());
        self.reset();
        (self.common, self.call, self.error) = (common, call, error);
    }

    pub(super) fn set_common(&mut self, common: &Common) {
        self.common = common.clone();
        self.update();
    }

    pub(super) fn set_size(&mut self, size: u32) {
        self.size = Some(size);
        self.update();
    }

    pub(super) fn set_addresses(&mut self, addresses: Addresses) {
        self.addresses = Some(addresses);
        self.update();
    }

    pub(super) fn set_base(&mut self, base: u16) {
        self.settle();
        self.running = None;
        self.base = base;
        self.update();
    }

    pub(super) fn set_enabled(&mut self, enabled: bool) {
        self.settle();
        self.enabled = enabled;
    }

    /// SET_VRING_CALL; `None` when the guest polls.
    pub(super) fn set_call(&mut self, call: Option<Event>) {
        self.call = call;
        if self.missed {
            self.notify();
        }
    }

    /// SET_VRING_ERR.
    pub(super) fn set_error(&mut self, error: Option<Event>) {
        self.error = error;
    }

    /// SET_VRING_KICK: starts the ring; `None` when the guest will not notify.
    pub(super) fn set_kick(&mut self, kick: Option<File>) {
        self.set_kick_source(Some(kick.map_or(Kick::Poll, Kick::Event)));
        self.update();
    }

    fn set_kick_source(&mut self, kick: Option<Kick>) {
        // The front end holds the same open file, so closing ours would leave it in the epoll set: take it out first.
        if let (Some(waker), Some(Kick::Event(old))) = (&self.waker, &self.kick) {
            waker.forget(old.as_fd());
        }
        self.kick = kick;
        self.kicks = 0;
        self.watch_kick();
    }

    fn watch_kick(&mut self) {
        self.unwatched = None;
        if let (true, Some(waker), Some(Kick::Event(kick))) = (self.transmit, &self.waker, &self.kick)
            && let Err(error) = waker.watch(kick)
        {
            self.set_unwatched(format!("cannot watch the guest's notifications: {error}"));
        }
    }

    /// Remembers that the dispatcher cannot be woken, and says so.
    pub(super) fn set_unwatched(&mut self, reason: String) {
        tracing::warn!(%reason, "frames may be late");
        self.unwatched = Some(reason);
    }

    /// The dispatcher's waker, replacing the one before.
    pub(super) fn set_waker(&mut self, waker: Option<Waker>) {
        if let (Some(old), Some(Kick::Event(kick))) = (&self.waker, &self.kick) {
            old.forget(kick.as_fd());
        }
        self.waker = waker;
        self.watch_kick();
    }

    pub(super) fn waker(&self) -> Option<&Waker> {
        self.waker.as_ref()
    }

    /// Makes the ring anew from what is known now, if it is started and complete.
    fn update(&mut self) {
        self.halt();
        self.misfit = None;
        if self.broken.is_some() || self.kick.is_none() {
            return;
        }
        let (Some(memory), Some(size), Some(addresses)) = (&self.common.memory, self.size, self.addresses)
        else {
            return;
        };
        let has = |bits| self.common.features & bits == bits;
        let config = RingConfig {
            size,
            descriptors: addresses.descriptors,
            available: addresses.available,
            used: addresses.used,
            used_log: addresses.used_log,
            base: self.base,
            event_idx: has(features::EVENT_IDX),
            indirect: has(features::INDIRECT_DESC),
        };
        let log = self.common.log.clone().filter(|_| has(features::LOG_ALL));
        match Ring::new(memory.clone(), &config, log) {
            Ok(mut ring) => {
                if self.transmit {
                    // A back end before us may have left notifications off, and the dispatcher may be asleep. When
                    // frames wait already, it is woken by whoever changes the ring.
                    ring.arm();
                } else {
                    ring.disarm();
                }
                self.running = Some(Running {
                    ring,
                    format: features::format(self.common.features),
                    taken: Taken::default(),
                });
            }
            Err(error) => {
                if let Some(unsaid) = self.limit.pass() {
                    tracing::warn!(%error, unsaid, "the front end's queue cannot be used");
                }
                self.misfit = Some(error.to_string());
            }
        }
    }

    /// See [`Interface::arm`](crate::interface::Interface::arm).
    pub(super) fn arm(&mut self) -> bool {
        self.armed = true;
        let polled = matches!(self.kick, Some(Kick::Poll));
        self.running().is_none_or(|running| !polled && running.ring.arm())
    }

    /// The dispatcher is awake. Returns how often the guest has notified since it was armed.
    pub(super) fn disarm(&mut self) -> u64 {
        if let Some(running) = self.running() {
            running.ring.disarm();
        }
        match (std::mem::take(&mut self.armed), &self.kick) {
            (true, Some(Kick::Event(kick))) => {
                let count = drain(kick);
                // A front end may add what it likes.
                self.kicks = self.kicks.saturating_add(count);
                count
            }
            _ => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::poll::Poller;

    #[test]
    fn a_kick_that_cannot_be_watched_is_told() {
        let mut vring = Vring::new(true);
        vring.set_waker(Some(Poller::new().unwrap().waker(1)));
        // Regular files cannot be polled.
        let file = rustix::fs::memfd_create("kick", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        vring.set_kick(Some(File::from(file)));
        assert!(vring.unwatched().is_some_and(|reason| reason.contains("cannot watch")));
        vring.set_kick(None);
        assert_eq!(vring.unwatched(), None);
    }
}
