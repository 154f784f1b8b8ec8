//! One vring: the configuration received from the front end so far, and the ring while it runs.
//!
//! SET_VRING_KICK *starts* a vring and GET_VRING_BASE stops it. SET_VRING_ENABLE *enables* it; without protocol features it is
//! always enabled (vhost-user, "Ring states"). Frames flow while it is started and enabled. Front ends send the messages in
//! different orders, some while the ring runs (memory hotplug, migration). So each message only records its values, and
//! [`Vring::update`] then rebuilds the ring at the old one's position.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use super::event::{Event, KickEvent};
use super::features;
use crate::inherit::VringState;
use crate::interface::virtqueue::dirty::DirtyLog;
use crate::interface::virtqueue::memory::GuestMemory;
use crate::interface::virtqueue::net::{Format, TakenChains};
use crate::interface::virtqueue::{Ring, RingConfig};
use crate::log_limit::LogLimit;
use crate::poll::Waker;

/// Addresses of the three parts of a ring in the front end's address space (SET_VRING_ADDR).
#[derive(Clone, Copy, Debug)]
pub(super) struct Addresses {
    pub(super) descriptors: u64,
    pub(super) available: u64,
    pub(super) used: u64,
    /// Guest physical address of the used ring if writes to the ring are logged as dirty pages.
    pub(super) used_log: Option<u64>,
}

/// State common to all vrings of a device: SET_FEATURES, SET_MEM_TABLE, SET_LOG_BASE.
#[derive(Clone, Debug, Default)]
pub(super) struct Common {
    pub(super) features: u64,
    pub(super) memory: Option<Arc<GuestMemory>>,
    /// LOG_SHMFD was negotiated: the front end can share a log.
    pub(super) shares_log: bool,
    pub(super) log: Option<Arc<DirtyLog>>,
}

impl Common {
    /// True if every write to guest memory must be logged.
    pub(super) fn logs(&self) -> bool {
        self.shares_log && self.features & features::LOG_ALL != 0
    }
}

/// How the guest notifies vnetd of new chains (SET_VRING_KICK).
#[derive(Clone, Debug)]
enum Kick {
    /// The guest signals an eventfd.
    Event(KickEvent),
    /// The guest does not notify (the message had no file descriptor), so the ring must be polled.
    Poll,
}

/// What a vring shares with the front end. Releasing the last owner may take long: unmapping a large guest takes seconds, and so
/// does closing an eventfd with many waiters.
pub(super) struct Shared {
    _common: Common,
    _kick: Option<Kick>,
    _events: [Option<Event>; 2],
}

/// A running ring.
#[derive(Debug)]
pub(super) struct Running {
    pub(super) ring: Ring,
    pub(super) format: Format,
    /// Chains of a transmit ring not yet returned to the driver.
    pub(super) taken: TakenChains,
    /// Number of waiting chains of a transmit ring whose pages were read; see `faults.rs`.
    pub(super) pages_read: usize,
}

/// One direction of one queue.
#[derive(Default)]
pub(super) struct Vring {
    /// True for a transmit ring, whose kicks wake the dispatcher.
    transmit: bool,
    common: Common,
    size: Option<u32>,
    addresses: Option<Addresses>,
    base: u16,
    /// `Some` while the ring is started.
    kick: Option<Kick>,
    /// Notifies the guest (SET_VRING_CALL).
    call: Option<Event>,
    /// True if the guest wanted a notification while `call` was absent.
    missed: bool,
    /// Reports a broken ring to the front end (SET_VRING_ERR).
    error: Option<Event>,
    enabled: bool,
    running: Option<Running>,
    /// How the guest or front end broke the running ring; kept until the ring is stopped.
    broken: Option<String>,
    /// The reason why the front end's configuration does not make a valid ring.
    invalid: Option<String>,
    waker: Option<Waker>,
    /// True if the dispatcher may be asleep, waiting for a kick.
    armed: bool,
    /// True while the kick is not in the dispatcher's epoll set, because the interface's eventfds are slow; see `looks.rs`.
    ignores_kicks: bool,
    /// Number of kicks counted since the ring was started.
    kicks: u64,
    /// The reason why kicks cannot wake the dispatcher.
    unwatched: Option<String>,
    /// Rate limit of log lines that guests can trigger.
    log_limit: LogLimit,
}

impl Vring {
    pub(super) fn new(transmit: bool) -> Vring {
        Vring { transmit, ..Vring::default() }
    }

    /// What the vring shares with the front end now. A change is made between this call and unlocking; the result is dropped after
    /// that, so that no dispatcher waits until something is released.
    pub(super) fn shared(&self) -> Shared {
        let _events = [self.call.clone(), self.error.clone()];
        Shared { _common: self.common.clone(), _kick: self.kick.clone(), _events }
    }

    /// The running ring; `None` if frames may not flow.
    #[inline]
    pub(super) fn running(&mut self) -> Option<&mut Running> {
        if self.enabled { self.running.as_mut() } else { None }
    }

    /// True if frames may flow.
    pub(super) fn is_up(&self) -> bool {
        self.enabled && self.running.is_some()
    }

    /// How the guest or front end broke the vring, which is disabled therefore.
    pub(super) fn broken(&self) -> Option<&str> {
        self.broken.as_deref().or(self.invalid.as_deref())
    }

    /// The reason why the dispatcher may miss the guest's kicks while it sleeps.
    pub(super) fn unwatched(&self) -> Option<&str> {
        self.unwatched.as_deref()
    }

    /// True if the front end has configured and started the ring but shared no memory.
    pub(super) fn lacks_memory(&self) -> bool {
        self.kick.is_some() && self.size.is_some() && self.addresses.is_some() && self.common.memory.is_none()
    }

    /// True if the front end wants writes logged and has not shared the log yet.
    pub(super) fn lacks_log(&self) -> bool {
        self.common.logs() && self.common.log.is_none()
    }

    /// True if no driver seems to have used the ring.
    pub(super) fn is_blank(&self) -> bool {
        self.running.as_ref().is_some_and(|running| running.ring.is_blank())
    }

    /// Number of kicks since the ring was started, including pending ones. The caller must wake the dispatcher, because this call
    /// consumes its wake-up.
    pub(super) fn count_kicks(&mut self) -> u64 {
        if let Some(Kick::Event(kick)) = &self.kick {
            self.kicks = self.kicks.saturating_add(kick.drain());
        }
        self.kicks
    }

    /// Notifies the guest of used chains. Returns true if the notification was sent.
    #[inline]
    pub(super) fn notify(&mut self) -> bool {
        self.missed = self.call.is_none();
        self.call.as_ref().is_some_and(Event::signal)
    }

    /// Notifies the guest of used entries for which it waits. Returns true if the notification was sent.
    pub(super) fn settle(&mut self) -> bool {
        let Some(Running { ring, .. }) = &mut self.running else { return false };
        let waits = ring.waits();
        ring.settle();
        waits && self.notify()
    }

    /// True while the kernel still reads chains.
    pub(super) fn is_held(&self) -> bool {
        self.running.as_ref().is_some_and(|running| running.taken.is_held())
    }

    /// What another vnetd needs of the vring; adds its eventfds to `files`.
    pub(super) fn hand_over(&self, files: &mut Vec<(&'static str, OwnedFd)>) -> io::Result<VringState> {
        let mut pass = |kind, file: BorrowedFd<'_>| -> io::Result<bool> {
            files.push((kind, file.try_clone_to_owned()?));
            Ok(true)
        };
        let kick = match &self.kick {
            Some(Kick::Event(kick)) => Some(pass("kick", kick.as_fd())?),
            Some(Kick::Poll) => Some(false),
            None => None,
        };
        let call = self.call.as_ref().map_or(Ok(false), |call| pass("call", call.as_fd()))?;
        let error = self.error.as_ref().map_or(Ok(false), |error| pass("error", error.as_fd()))?;
        Ok(VringState {
            size: self.size,
            addresses: self.addresses.map(|at| [at.descriptors, at.available, at.used]),
            used_log: self.addresses.and_then(|at| at.used_log),
            base: self.running.as_ref().map_or(self.base, |running| running.ring.completed()),
            enabled: self.enabled,
            kick,
            call,
            error,
        })
    }

    /// Goes on at the used index in the guest's memory, which another vnetd may have moved.
    pub(super) fn restart(&mut self) {
        self.update();
    }

    /// Returns released chains to the driver. Returns whether chains are still held, and whether the guest was notified.
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
        if let Some(suppressed) = self.log_limit.allow() {
            tracing::warn!(%reason, suppressed, "queue disabled until the guest resets it");
        }
        self.halt();
        self.broken = Some(reason);
        if let Some(error) = &self.error {
            error.signal();
        }
    }

    /// Ends the running ring and records its position. Sends pending notifications first, because afterwards there is no ring to
    /// check.
    fn halt(&mut self) {
        self.settle();
        if let Some(running) = self.running.take() {
            // Chains still held are not returned: the next back end of the ring takes them again.
            self.base = running.ring.completed();
        }
    }

    /// GET_VRING_BASE: stops the ring and returns the next available index.
    pub(super) fn stop(&mut self) -> u16 {
        self.halt();
        self.set_kick_source(None);
        self.broken = None;
        self.invalid = None;
        self.base
    }

    /// Returns to the initial state, before the first message; keeps the dispatcher's waker.
    pub(super) fn reset(&mut self) {
        self.stop();
        *self = Vring {
            transmit: self.transmit,
            waker: self.waker.take(),
            armed: self.armed,
            unwatched: self.unwatched.take(),
            log_limit: std::mem::take(&mut self.log_limit),
            ..Vring::default()
        };
    }

    /// RESET_DEVICE: like [`Vring::reset`], but keeps memory, features, and the call and error eventfds.
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

    /// SET_VRING_CALL; `None` if the guest polls.
    pub(super) fn set_call(&mut self, call: Option<Event>) {
        let old = std::mem::replace(&mut self.call, call);
        if self.missed || old.is_some_and(|old| old.waits()) {
            self.notify();
        }
    }

    /// SET_VRING_ERR.
    pub(super) fn set_error(&mut self, error: Option<Event>) {
        self.error = error;
    }

    /// SET_VRING_KICK: starts the ring; `None` if the guest does not notify.
    pub(super) fn set_kick(&mut self, kick: Option<KickEvent>) {
        self.set_kick_source(Some(kick.map_or(Kick::Poll, Kick::Event)));
        self.update();
    }

    fn set_kick_source(&mut self, kick: Option<Kick>) {
        // The front end holds the same open file, so closing vnetd's descriptor would leave the file in the epoll set: remove it
        // first.
        if let (Some(waker), Some(Kick::Event(old))) = (&self.waker, &self.kick) {
            waker.forget(old);
        }
        self.kick = kick;
        self.kicks = 0;
        self.watch_kick();
    }

    fn watch_kick(&mut self) {
        self.ignores_kicks = false;
        self.unwatched = None;
        let (true, Some(waker), Some(Kick::Event(kick))) = (self.transmit, &self.waker, &self.kick) else {
            return;
        };
        if kick.is_slow() {
            self.ignores_kicks = true;
        } else if let Err(error) = waker.watch(kick) {
            self.set_unwatched(format!("cannot watch the guest's notifications: {error}"));
        }
    }

    /// Records and logs that kicks cannot wake the dispatcher.
    pub(super) fn set_unwatched(&mut self, reason: String) {
        tracing::warn!(%reason, "frames may be delayed");
        self.unwatched = Some(reason);
    }

    /// Replaces the dispatcher's waker.
    pub(super) fn set_waker(&mut self, waker: Option<Waker>) {
        if let (Some(old), Some(Kick::Event(kick))) = (&self.waker, &self.kick) {
            old.forget(kick);
        }
        self.waker = waker;
        self.watch_kick();
    }

    pub(super) fn waker(&self) -> Option<&Waker> {
        self.waker.as_ref()
    }

    /// Rebuilds the ring from the current configuration if it is started and complete.
    fn update(&mut self) {
        self.halt();
        self.invalid = None;
        if self.broken.is_some() || self.kick.is_none() {
            return;
        }
        let (Some(memory), Some(size), Some(addresses)) = (&self.common.memory, self.size, self.addresses)
        else {
            return;
        };
        if self.lacks_log() {
            // A front end that restarts a device during a migration starts the rings first. Nothing may be written unlogged.
            return;
        }
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
        let log = self.common.log.clone().filter(|_| self.common.logs());
        match Ring::new(memory.clone(), &config, log) {
            Ok(mut ring) => {
                if self.transmit {
                    // A previous back end may have suppressed notifications, and the dispatcher may be asleep. If frames are
                    // waiting already, the caller that changed the ring wakes the dispatcher.
                    ring.arm();
                } else {
                    ring.disarm();
                }
                self.running = Some(Running {
                    ring,
                    format: features::format(self.common.features),
                    taken: TakenChains::default(),
                    pages_read: 0,
                });
            }
            Err(error) => {
                if let Some(suppressed) = self.log_limit.allow() {
                    tracing::warn!(%error, suppressed, "the front end's queue configuration is invalid");
                }
                self.invalid = Some(error.to_string());
            }
        }
    }

    /// If kicks are slow, stops watching them, and returns whether the dispatcher may sleep until a [`Look`] wakes it: no chain waits.
    ///
    /// [`Look`]: super::looks::Look
    #[cold]
    pub(super) fn rest_unwatched(&mut self) -> Option<bool> {
        let Some(Kick::Event(kick)) = &self.kick else { return None };
        if !kick.is_slow() {
            return None;
        }
        if !std::mem::replace(&mut self.ignores_kicks, true)
            && let Some(waker) = &self.waker
        {
            waker.forget(kick);
        }
        // Also awake if the ring is broken: the next fill reports that.
        Some(self.running().is_none_or(|running| matches!(running.ring.ensure(1), Ok(0))))
    }

    /// See [`Interface::arm`](crate::interface::Interface::arm).
    pub(super) fn arm(&mut self) -> bool {
        if self.ignores_kicks {
            self.watch_kick();
        }
        self.armed = true;
        let polled = matches!(self.kick, Some(Kick::Poll));
        self.running().is_none_or(|running| !polled && running.ring.arm())
    }

    /// Tells the ring that the dispatcher is awake. Returns the number of kicks since the ring was armed.
    pub(super) fn disarm(&mut self) -> u64 {
        if let Some(running) = self.running() {
            running.ring.disarm();
        }
        match (std::mem::take(&mut self.armed), &self.kick) {
            (true, Some(Kick::Event(kick))) => {
                let count = kick.drain();
                // Saturates, because a front end may write any count.
                self.kicks = self.kicks.saturating_add(count);
                count
            }
            _ => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::event::Signals;
    use super::*;
    use crate::poll::Poller;

    #[test]
    fn reports_a_kick_that_cannot_be_watched() {
        let mut vring = Vring::new(true);
        vring.set_waker(Some(Poller::new().unwrap().waker(1)));
        // Regular files cannot be polled.
        let file = rustix::fs::memfd_create("kick", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        vring.set_kick(Some(KickEvent::new(file.into(), Signals::new().unwrap())));
        assert!(vring.unwatched().is_some_and(|reason| reason.contains("cannot watch")));
        vring.set_kick(None);
        assert_eq!(vring.unwatched(), None);
    }
}
