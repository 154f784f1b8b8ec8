//! The device: all queue pairs with their locks, shared by dispatchers and the control thread.
//!
//! Each vring has its own mutex. A dispatcher holds it for one burst, uncontended unless the front end is changing the vring; the
//! control thread holds it while it changes the vring. So no message takes effect while frames are in flight, and the reply to
//! GET_VRING_BASE leaves none in flight.
//!
//! Lock order: a thread that holds a transmit vring may lock receive vrings (of this or other interfaces) one at a time; a thread
//! that holds a receive vring locks nothing else. The control thread holds one lock at a time.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use rustix::event::{EventfdFlags, eventfd};

use super::admission::Admission;
use super::event::Signals;
use super::options::VhostUserOptions;
use super::vring::{Common, Running, Shared, Vring};
use crate::frame::{DropSink, NetworkId, PortId, Room, Selection};
use crate::interface::interrupts::{Coalescing, EndDecision, InterruptSettings};
use crate::interface::virtqueue::net::{Format, Giver, Owner};
use crate::interface::virtqueue::window::Loans;
use crate::interface::{Coalesce, Land, State};
use crate::stats::{DropReason, PortStats};
use crate::wire::ethernet::Mac;
use crate::wire::offload::Offload;

/// Reason shown in states and logs: the front end truncated a file that it shares.
pub(super) const POISONED: &str = "the file behind the guest's memory or its dirty log was truncated";
/// Reason: the front end shares no memory.
const NO_MEMORY: &str =
    "the VM shares no memory with vnetd: start QEMU with -object memory-backend-memfd,share=on";
/// Reason: a migration has begun, and the front end has not shared the bitmap of dirty pages.
const NO_LOG: &str = "the front end asked for a log of dirty pages (LOG_ALL) and shares none (SET_LOG_BASE)";
/// Reason: the guest's memory is not the memory that the front end shares.
const PRIVATE_MEMORY: &str = "the guest kicks, but its rings are empty here, as if its memory were private: start QEMU with \
                              -object memory-backend-memfd,share=on";
/// Note: pages of the guest's frames are missing again and again; see `faults.rs`.
pub(super) const FAULTY_NOTE: &str = "the guest's frames take many page faults, so a thread reads their pages first, and the guest sends \
                                      more slowly: give the VM huge pages, and its memory no changes";
/// Note: see `event.rs`.
const SLOW_NOTE: &str = "an eventfd of the front end takes long to signal, so a thread does it: the guest's interrupts and its frames \
                         come later";
/// Number of kicks on a blank ring that prove an active driver: QEMU itself kicks once.
const BLANK_KICKS: u64 = 2;
/// How long a change of a queue waits for the kernel to release held chains (zero copy).
const RELEASE_WITHIN: Duration = Duration::from_secs(1);
/// Length of a RARP announcement in bytes: the minimum length of an Ethernet frame.
pub(super) const RARP_LEN: usize = 60;

/// A guest's transmit vring.
pub(super) struct Transmit {
    pub(super) vring: Vring,
    /// A frame made by vnetd that enters the core next; see [`Device::announce`].
    pub(super) announcement: Option<Box<[u8; RARP_LEN]>>,
}

/// A guest's receive vring.
pub(super) struct Receive {
    pub(super) vring: Vring,
    giver: Giver,
    /// Decides when to notify the guest.
    coalescing: Coalescing,
}

/// One queue pair.
pub(super) struct Pair {
    /// Locked from a fill of the pair's source until the burst is dropped; see `source.rs`.
    pub(super) transmit: Arc<Mutex<Transmit>>,
    receive: Mutex<Receive>,
    /// An eventfd that wakes the dispatcher after the control thread has changed the pair.
    pub(super) bell: OwnedFd,
    /// True if the receive vring was up after the control thread's last change.
    receives: AtomicBool,
    /// True while the control thread waits for a lock of the pair. A busy dispatcher releases the lock only for an instant, so it
    /// skips the pair during that time.
    pub(super) changing: AtomicBool,
    /// True while the interface's own thread reads the pages of waiting frames; see `faults.rs`.
    pub(super) read_ahead: AtomicBool,
    /// Time until which it has to, before the dispatcher takes them; 0: it need not.
    pub(super) faulty_until_ms: AtomicU64,
}

/// A vhost-user interface without its socket.
pub(super) struct Device {
    pub(super) options: VhostUserOptions,
    pub(super) port: PortId,
    pub(super) network: NetworkId,
    pub(super) stats: Arc<PortStats>,
    /// Notifies guests.
    pub(super) signals: Arc<Signals>,
    pub(super) pairs: Vec<Pair>,
    /// True from the end of a live migration, when the front end stops the rings while writes are logged, until a ring starts.
    pub(super) departed: AtomicBool,
    /// Number of pairs, counted from the first, whose receive vrings are all up.
    active: AtomicUsize,
    /// True if notifications are deferred to the end of coalescing; changed only under the receive vrings' locks.
    coalesces: AtomicBool,
    /// Admits and refuses front ends.
    pub(super) admission: Admission,
    /// Held while a message of the front end is handled.
    pub(super) turn: Mutex<()>,
    /// Where the front end maps its memory privately, for the interface's note; `None` if it does not.
    private_memory: Mutex<Option<String>>,
    /// Pages that the guest has lent to engines of this process.
    pub(super) loans: Loans,
    /// The reason why no frame can flow.
    status: Mutex<String>,
}

impl Device {
    pub(super) fn new(
        options: VhostUserOptions,
        port: PortId,
        network: NetworkId,
        stats: Arc<PortStats>,
    ) -> std::io::Result<Device> {
        let mut pairs = vec![];
        for _ in 0..options.queues {
            let transmit = Transmit { vring: Vring::new(true), announcement: None };
            let receive = Receive {
                vring: Vring::new(false),
                giver: Giver::default(),
                coalescing: Coalescing::default(),
            };
            let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
            pairs.push(Pair {
                transmit: Arc::new(Mutex::new(transmit)),
                receive: Mutex::new(receive),
                bell,
                receives: AtomicBool::new(false),
                changing: AtomicBool::new(false),
                read_ahead: AtomicBool::new(false),
                faulty_until_ms: AtomicU64::new(0),
            });
        }
        let status = Mutex::new("waiting for QEMU (a vhost-user front end)".to_owned());
        let admission = Admission::new(options.peer);
        Ok(Device {
            options,
            port,
            network,
            stats,
            signals: Signals::new()?,
            pairs,
            departed: AtomicBool::new(false),
            active: AtomicUsize::new(0),
            coalesces: AtomicBool::new(false),
            admission,
            turn: Mutex::new(()),
            private_memory: Mutex::new(None),
            loans: Loans::default(),
            status,
        })
    }

    pub(super) fn owner(&self, format: Format) -> Owner<'_> {
        let (port, network, mtu) = (self.port, self.network, self.options.mtu);
        Owner { port, network, mtu, stats: &self.stats, format }
    }

    /// Number of vrings: two per pair.
    pub(super) fn vrings(&self) -> usize {
        2 * self.pairs.len()
    }

    /// Runs `change` on vring `index` (even: guest receives, odd: guest transmits) and wakes its dispatcher. `None` if the vring
    /// does not exist.
    ///
    /// A transmit vring is changed after the kernel has released its held chains, or after [`RELEASE_WITHIN`].
    pub(super) fn change<R>(&self, index: usize, change: impl FnOnce(&mut Vring) -> R) -> Option<R> {
        let pair = self.pairs.get(index / 2)?;
        pair.changing.store(true, Ordering::Relaxed);
        let (result, _unlocked_before_it_drops) = if index.is_multiple_of(2) {
            self.change_receive(pair, change)
        } else {
            let mut transmit = self.drain(pair, Instant::now() + RELEASE_WITHIN);
            let shared = transmit.vring.shared();
            (change(&mut transmit.vring), shared)
        };
        pair.changing.store(false, Ordering::Relaxed);
        pair.ring();
        Some(result)
    }

    /// Looks at vring `index`. `None` if it does not exist.
    pub(super) fn look<R>(&self, index: usize, look: impl FnOnce(&Vring) -> R) -> Option<R> {
        let pair = self.pairs.get(index / 2)?;
        if index.is_multiple_of(2) {
            Some(look(&pair.receive.lock().vring))
        } else {
            Some(look(&pair.transmit.lock().vring))
        }
    }

    /// Also returns what the vring shared before, for the caller to drop: the vring is unlocked by then.
    fn change_receive<R>(&self, pair: &Pair, change: impl FnOnce(&mut Vring) -> R) -> (R, Shared) {
        let mut receive = pair.receive.lock();
        let shared = receive.vring.shared();
        let result = change(&mut receive.vring);
        pair.receives.store(receive.vring.is_up(), Ordering::Relaxed);
        let up = self.pairs.iter().take_while(|pair| pair.receives.load(Ordering::Relaxed));
        self.active.store(up.count(), Ordering::Relaxed);
        (result, shared)
    }

    /// Waits until the kernel no longer reads the pair's transmit chains, or until `end`, because the guest may reuse returned
    /// chains. Dispatchers can lock the vring during the wait, but take no new frames from it.
    ///
    /// A chain that is not released in time is not returned when the ring stops: the next back end of the ring takes it again, so
    /// its frame may be sent twice. The kernel keeps the pages even if vnetd unmaps them.
    fn drain<'a>(&self, pair: &'a Pair, end: Instant) -> MutexGuard<'a, Transmit> {
        loop {
            let mut transmit = pair.transmit.lock();
            let (held, notified) = transmit.vring.reclaim();
            self.stats.notifications.add(u64::from(notified));
            if !held {
                return transmit;
            }
            if Instant::now() >= end {
                tracing::warn!("the kernel still sends from a guest's memory while its queue changes");
                return transmit;
            }
            drop(transmit);
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    /// Takes all pairs from the dispatchers, and returns the chains that the kernel has released. True if it still holds one.
    pub(super) fn reclaim_all(&self) -> bool {
        let mut any_held = false;
        for pair in &self.pairs {
            pair.changing.store(true, Ordering::Relaxed);
            let (held, notified) = pair.transmit.lock().vring.reclaim();
            self.stats.notifications.add(u64::from(notified));
            any_held |= held;
        }
        any_held
    }

    /// Drains all pairs before the interface stops. vnetd does not write to the rings afterwards.
    pub(super) fn drain_all(&self) {
        let end = Instant::now() + RELEASE_WITHIN;
        for pair in &self.pairs {
            pair.changing.store(true, Ordering::Relaxed);
            drop(self.drain(pair, end));
        }
    }

    /// Resets all vrings after the front end has disconnected. The rings no longer belong to vnetd: held chains are not returned,
    /// because the front end may have returned them already.
    pub(super) fn reset_all(&self) {
        for pair in &self.pairs {
            pair.changing.store(true, Ordering::Relaxed);
            let received = self.change_receive(pair, Vring::reset);
            let mut transmit = pair.transmit.lock();
            let transmitted = transmit.vring.shared();
            transmit.vring.reset();
            drop(transmit);
            pair.changing.store(false, Ordering::Relaxed);
            pair.ring();
            drop((received, transmitted));
        }
        self.loans.follow(None, false, None);
        self.set_private_memory(None);
    }

    /// Runs `change` on every vring.
    pub(super) fn change_all(&self, mut change: impl FnMut(&mut Vring)) {
        for index in 0..self.vrings() {
            self.change(index, &mut change);
        }
    }

    /// True if nobody holds the lock of a vring.
    #[cfg(test)]
    pub(super) fn is_unlocked(&self) -> bool {
        self.pairs.iter().all(|pair| pair.transmit.try_lock().is_some() && pair.receive.try_lock().is_some())
    }

    /// Applies the state common to all vrings.
    pub(super) fn set_common(&self, common: &Common) {
        self.change_all(|vring| vring.set_common(common));
        self.loans.follow(common.memory.as_ref(), common.logs(), common.log.as_ref());
    }

    /// Injects a RARP request from `mac` into the core, so that bridges learn the new location of a migrated guest.
    pub(super) fn announce(&self, mac: Mac) {
        let pair = &self.pairs[0];
        pair.transmit.lock().announcement = Some(Box::new(rarp(mac)));
        pair.ring();
    }

    /// Number of pairs, counted from the first, on which the guest's driver receives; at least 1.
    #[inline]
    pub(super) fn active_pairs(&self) -> usize {
        self.active.load(Ordering::Relaxed).max(1)
    }

    /// Up if frames can flow, else the reason why they cannot.
    pub(super) fn state(&self) -> State {
        let (mut up, mut missing) = (false, None);
        for pair in &self.pairs {
            // Locks one vring at a time, see the lock order above.
            let receive = Health::of(&pair.receive.lock().vring, "receive");
            let transmit = {
                let vring = &mut pair.transmit.lock().vring;
                let mut health = Health::of(vring, "transmit");
                if health.blank && receive.blank {
                    health.blank = vring.count_kicks() >= BLANK_KICKS;
                    pair.ring();
                } else {
                    health.blank = false;
                }
                health
            };
            if let Some(reason) = receive.broken.or(transmit.broken) {
                return State::Broken(reason);
            }
            up |= receive.up || transmit.up;
            let private = transmit.blank.then(|| PRIVATE_MEMORY.to_owned());
            missing = missing.or(receive.missing).or(transmit.missing).or(private);
        }
        match missing {
            Some(reason) => State::Down(reason),
            None if up => State::Up,
            None => State::Down(self.status.lock().clone()),
        }
    }

    pub(super) fn set_status(&self, status: String) {
        *self.status.lock() = status;
    }

    /// Records that the front end maps its memory privately; `None`: it does not.
    pub(super) fn set_private_memory(&self, note: Option<String>) {
        *self.private_memory.lock() = note;
    }

    /// Likely mistakes in the VM's configuration, and what slows the VM.
    pub(super) fn notes(&self) -> Vec<String> {
        let faulty = self.pairs.iter().any(Pair::is_faulty).then(|| FAULTY_NOTE.to_owned());
        let slow = self.signals.are_slow().then(|| SLOW_NOTE.to_owned());
        let private = self.private_memory.lock().clone();
        [private, self.admission.note(), faulty, slow].into_iter().flatten().collect()
    }

    /// Locks the receive vring for frames to `queue`, or the first receive vring if the guest does not use that queue.
    fn receiving(&self, queue: usize) -> MutexGuard<'_, Receive> {
        let wanted = queue % self.pairs.len();
        let guard = self.pairs[wanted].receive.lock();
        if wanted == 0 || guard.vring.is_up() {
            return guard;
        }
        drop(guard);
        self.pairs[0].receive.lock()
    }

    pub(super) fn deliver(&self, queue: usize, frames: Selection<'_>, drops: &mut DropSink) {
        if frames.which.is_empty() {
            return;
        }
        let mut guard = self.receiving(queue);
        let Receive { vring, giver, coalescing } = &mut *guard;
        let mut bytes = 0;
        if coalescing.is_on() {
            bytes = frames.frames().map(|(_, frame)| frame.len() as u64).sum();
            self.inject_early(vring, coalescing, bytes);
        }
        let Some(running) = vring.running() else {
            return drops.dropped_all(&self.stats, DropReason::NotReady, frames.which);
        };
        let ring = &mut running.ring;
        let result = giver.give(ring, &self.owner(running.format), frames, drops);
        let poisoned = ring.is_poisoned();
        if coalescing.is_on() {
            coalescing.gave(bytes);
            ring.show();
        } else if ring.publish() && vring.notify() {
            self.stats.notifications.add(1);
        }
        // Done after the notification, so as not to delay it.
        if let Some(Running { ring, .. }) = vring.running() {
            ring.read_ahead(frames.which.len());
        }
        if poisoned {
            vring.break_with(POISONED.to_owned());
        } else if let Err(error) = result {
            vring.break_with(error.to_string());
        }
    }

    /// Notifies an idle guest of `bytes` bytes that are about to be delivered, or have only arrived. Returns true if it was.
    fn inject_early(&self, vring: &mut Vring, coalescing: &mut Coalescing, bytes: u64) -> bool {
        let Some(running) = vring.running() else { return false };
        if running.ring.caught_up() {
            running.ring.settle();
            coalescing.reacted();
        }
        let waits = running.ring.would_wait();
        let notifies =
            coalescing.before(bytes, waits, Instant::now(), &self.stats.interrupts) && vring.notify();
        self.stats.notifications.add(u64::from(notifies));
        notifies
    }

    /// Calls `then` for the receive vrings that frames for `queue` may have gone to: that queue's vring, and the first one.
    fn delivered_to(&self, queue: usize, mut then: impl FnMut(&mut Receive)) {
        let wanted = queue % self.pairs.len();
        then(&mut self.pairs[wanted].receive.lock());
        if wanted != 0 {
            then(&mut self.pairs[0].receive.lock());
        }
    }
}

impl Coalesce for Device {
    fn set_interrupts(&self, settings: InterruptSettings) {
        for pair in &self.pairs {
            let mut receive = pair.receive.lock();
            receive.coalescing = Coalescing::new(settings);
            // Later deliveries use the new settings; pending notifications of earlier ones are settled here.
            self.coalesces.store(receive.coalescing.is_on(), Ordering::Relaxed);
            self.stats.notifications.add(u64::from(receive.vring.settle()));
        }
    }

    #[inline]
    fn coalesces(&self) -> bool {
        self.coalesces.load(Ordering::Relaxed)
    }

    fn announce(&self, queue: usize, bytes: u64) -> bool {
        let mut guard = self.receiving(queue);
        let Receive { vring, coalescing, .. } = &mut *guard;
        let notified = coalescing.is_on() && self.inject_early(vring, coalescing, bytes);
        self.stats.interrupts.early_at_arrival.add(u64::from(notified));
        notified
    }

    fn end_of_coalescing(&self, queue: usize) -> Option<Duration> {
        let mut withheld = None;
        self.delivered_to(queue, |Receive { vring, coalescing, .. }| {
            let Some(running) = vring.running() else { return };
            match coalescing.end(running.ring.waits(), Instant::now(), &self.stats.interrupts) {
                EndDecision::Withhold(time) => withheld = Some(time),
                EndDecision::Settled => running.ring.settle(),
                EndDecision::Inject => {
                    running.ring.settle();
                    self.stats.notifications.add(u64::from(vring.notify()));
                }
            }
        });
        withheld
    }

    fn has_reacted(&self, queue: usize) -> bool {
        let mut reacted = true;
        self.delivered_to(queue, |Receive { vring, coalescing, .. }| {
            let Some(running) = vring.running() else { return };
            if running.ring.waits() {
                reacted = false;
            } else {
                running.ring.settle();
                coalescing.reacted();
            }
        });
        reacted
    }

    fn check(&self, queue: usize) {
        self.delivered_to(queue, |Receive { vring, coalescing, .. }| {
            let Some(running) = vring.running() else { return };
            let (waits, exact) = (running.ring.waits(), running.ring.has_event_index());
            running.ring.settle();
            if coalescing.check(waits, exact, &self.stats.interrupts) {
                self.stats.notifications.add(u64::from(vring.notify()));
            }
        });
    }
}

impl Land for Device {
    fn land(
        &self,
        queue: usize,
        offload: &Offload,
        len: usize,
        fill: &mut dyn FnMut(&[Room]) -> bool,
    ) -> bool {
        let mut guard = self.receiving(queue);
        let Receive { vring, giver, coalescing } = &mut *guard;
        if coalescing.is_on() {
            self.inject_early(vring, coalescing, len as u64);
        }
        let Some(Running { ring, format, .. }) = vring.running() else { return false };
        let result = giver.land(ring, &self.owner(*format), (offload, len), fill);
        let poisoned = ring.is_poisoned();
        if coalescing.is_on() {
            coalescing.gave(if result == Ok(true) { len as u64 } else { 0 });
            ring.show();
        } else if ring.publish() && vring.notify() {
            self.stats.notifications.add(1);
        }
        if poisoned {
            vring.break_with(POISONED.to_owned());
        } else if let Err(error) = &result {
            vring.break_with(error.to_string());
        }
        result == Ok(true)
    }
}

/// State of one vring.
struct Health {
    up: bool,
    broken: Option<String>,
    /// The reason why frames cannot flow.
    missing: Option<String>,
    /// True if the vring is running but no driver has used it so far.
    blank: bool,
}

impl Health {
    fn of(vring: &Vring, name: &str) -> Health {
        let no_memory = vring.lacks_memory().then_some(NO_MEMORY);
        let lacks = no_memory.or_else(|| vring.lacks_log().then_some(NO_LOG));
        Health {
            up: vring.is_up(),
            broken: vring.broken().map(|reason| format!("the guest's {name} queue: {reason}")),
            missing: lacks.or_else(|| vring.unwatched()).map(str::to_owned),
            blank: vring.is_blank(),
        }
    }
}

impl Pair {
    /// True while the control thread changes the pair or the interface's own thread reads its pages. They may hold the lock, so the
    /// dispatcher skips the pair; they ring it afterwards.
    #[inline]
    pub(super) fn is_skipped(&self) -> bool {
        self.changing.load(Ordering::Relaxed) || self.is_read()
    }

    pub(super) fn ring(&self) {
        // Fails only if the counter is full; in that case the eventfd is already readable.
        let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
    }
}

/// A RARP request (RFC 903) in which `mac` asks for its own address: bridges learn from it, and no station answers.
fn rarp(mac: Mac) -> [u8; RARP_LEN] {
    let mut frame = [0; RARP_LEN];
    frame[..6].copy_from_slice(&Mac::BROADCAST.0);
    frame[6..12].copy_from_slice(&mac.0);
    // EtherType RARP; hardware type Ethernet, protocol IPv4, lengths 6 and 4, operation 3 (request reverse).
    frame[12..22].copy_from_slice(&[0x80, 0x35, 0, 1, 8, 0, 6, 4, 0, 3]);
    frame[22..28].copy_from_slice(&mac.0);
    frame[32..38].copy_from_slice(&mac.0);
    frame
}
