//! The device: every queue pair with its locks. The dispatcher's side and the front end's side meet here.
//!
//! Each vring has a mutex of its own. A dispatcher holds it for one burst, in which it is uncontended unless the front end
//! is changing something; the control thread holds it to change that vring. So no message takes effect under a frame in
//! flight, and GET_VRING_BASE answers with nothing in flight.
//!
//! Lock order: a transmit vring may be held while receive vrings (of other interfaces or this one) are taken one by one;
//! nothing is taken under a receive vring. The control thread holds one at a time.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use rustix::event::{EventfdFlags, eventfd};

use super::VhostUserOptions;
use super::event::Signals;
use super::vring::{Common, Running, Vring};
use crate::frame::{DropSink, NetworkId, PortId, Room, Selection};
use crate::interface::interrupts::{Coalescing, InterruptSettings, Verdict};
use crate::interface::virtqueue::net::{Format, Giver, Owner};
use crate::interface::{Coalesce, Land, State};
use crate::stats::{DropReason, PortStats};
use crate::wire::ethernet::Mac;
use crate::wire::offload::Offload;

/// What a broken memory file is called in states and logs.
pub(super) const POISONED: &str = "the file behind the guest's memory was truncated";
/// What a machine is called that shares no memory.
const NO_MEMORY: &str =
    "the VM shares no memory with vnetd: start QEMU with -object memory-backend-memfd,share=on";
/// What a machine is called whose memory is not what its front end shares.
const PRIVATE_MEMORY: &str = "the guest kicks, but its rings are empty here, as if its memory were private: start QEMU with \
                              -object memory-backend-memfd,share=on";
/// Kicks on an empty ring that are too many for a driver that has sent nothing: QEMU makes one itself.
const BLANK_KICKS: u64 = 2;
/// How long a change of a queue waits for the kernel to have sent what it reads from the guest's memory.
const RELEASE_WITHIN: Duration = Duration::from_secs(1);
/// Bytes of a RARP announcement: the shortest Ethernet frame.
pub(super) const RARP_LEN: usize = 60;

/// A guest's transmit vring and what taking frames from it needs.
pub(super) struct Transmit {
    pub(super) vring: Vring,
    /// A frame of our own that goes into the core next: see [`Device::announce`].
    pub(super) announcement: Option<Box<[u8; RARP_LEN]>>,
}

/// A guest's receive vring and what filling it needs.
pub(super) struct Receive {
    pub(super) vring: Vring,
    giver: Giver,
    /// When the guest is notified.
    coalescing: Coalescing,
}

/// One queue pair.
pub(super) struct Pair {
    /// Locked from a fill of its source until the burst is dropped, see `source.rs`.
    pub(super) transmit: Arc<Mutex<Transmit>>,
    receive: Mutex<Receive>,
    /// Wakes the dispatcher when the control thread has changed something.
    pub(super) bell: OwnedFd,
    /// The receive vring is up, as the control thread left it.
    receives: AtomicBool,
    /// The control thread wants a lock. A busy dispatcher, which gives it up for an instant only, stands back.
    pub(super) changing: AtomicBool,
}

/// A vhost-user interface without its socket.
pub(super) struct Device {
    pub(super) options: VhostUserOptions,
    pub(super) port: PortId,
    pub(super) network: NetworkId,
    pub(super) stats: Arc<PortStats>,
    /// By which guests are notified.
    pub(super) signals: Arc<Signals>,
    pub(super) pairs: Vec<Pair>,
    /// Pairs, from the first one on, whose receive vrings are up.
    active: AtomicUsize,
    /// Guests are notified at the end of coalescing; changed only under the locks of the receive vrings.
    coalesces: AtomicBool,
    /// What is missing while no frame can flow.
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
            });
        }
        let status = Mutex::new("waiting for a front end".to_owned());
        Ok(Device {
            options,
            port,
            network,
            stats,
            signals: Signals::new()?,
            pairs,
            active: AtomicUsize::new(0),
            coalesces: AtomicBool::new(false),
            status,
        })
    }

    pub(super) fn owner(&self, format: Format) -> Owner<'_> {
        let (port, network, mtu) = (self.port, self.network, self.options.mtu);
        Owner { port, network, mtu, stats: &self.stats, format }
    }

    /// Vrings: two a pair.
    pub(super) fn vrings(&self) -> usize {
        2 * self.pairs.len()
    }

    /// Runs `change` on vring `index` (even: guest receives, odd: guest transmits) and wakes its dispatcher. `None` when
    /// there is no such vring.
    ///
    /// A transmit vring is changed when the network reads none of its chains any more, as far as can be waited for.
    pub(super) fn change<R>(&self, index: usize, change: impl FnOnce(&mut Vring) -> R) -> Option<R> {
        let pair = self.pairs.get(index / 2)?;
        pair.changing.store(true, Ordering::Relaxed);
        let result = if index.is_multiple_of(2) {
            self.change_receive(pair, change)
        } else {
            change(&mut self.drain(pair).vring)
        };
        pair.changing.store(false, Ordering::Relaxed);
        pair.ring();
        Some(result)
    }

    fn change_receive<R>(&self, pair: &Pair, change: impl FnOnce(&mut Vring) -> R) -> R {
        let mut receive = pair.receive.lock();
        let result = change(&mut receive.vring);
        pair.receives.store(receive.vring.is_up(), Ordering::Relaxed);
        let up = self.pairs.iter().take_while(|pair| pair.receives.load(Ordering::Relaxed));
        self.active.store(up.count(), Ordering::Relaxed);
        result
    }

    /// Waits until the kernel reads none of the pair's transmit chains any more: what the guest gets back it may use anew.
    /// A dispatcher can reach the vring's lock meanwhile, and takes nothing more from it.
    ///
    /// A chain whose time does not come stays unused when the ring stops: whoever goes on with the ring takes it again, so
    /// that its frame may be sent twice. The kernel keeps the pages, whatever is unmapped.
    fn drain<'a>(&self, pair: &'a Pair) -> MutexGuard<'a, Transmit> {
        let end = Instant::now() + RELEASE_WITHIN;
        loop {
            let mut transmit = pair.transmit.lock();
            let (held, notified) = transmit.vring.reclaim();
            self.stats.notifications.add(u64::from(notified));
            if !held {
                return transmit;
            }
            if Instant::now() >= end {
                tracing::warn!("the network still sends from a guest's memory while its queue changes");
                return transmit;
            }
            drop(transmit);
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    /// Drains all pairs, which no dispatcher serves any more. Nothing is written to the rings behind this.
    pub(super) fn drain_all(&self) {
        for pair in &self.pairs {
            pair.changing.store(true, Ordering::Relaxed);
            drop(self.drain(pair));
        }
    }

    /// Forgets all that the front end said, which is gone. The rings are somebody else's already: what is held is not given
    /// back, for it may have been.
    pub(super) fn reset_all(&self) {
        for pair in &self.pairs {
            pair.changing.store(true, Ordering::Relaxed);
            self.change_receive(pair, Vring::reset);
            pair.transmit.lock().vring.reset();
            pair.changing.store(false, Ordering::Relaxed);
            pair.ring();
        }
    }

    /// Runs `change` on every vring.
    pub(super) fn change_all(&self, mut change: impl FnMut(&mut Vring)) {
        for index in 0..self.vrings() {
            self.change(index, &mut change);
        }
    }

    /// Puts what all vrings share in effect.
    pub(super) fn set_common(&self, common: &Common) {
        self.change_all(|vring| vring.set_common(common));
    }

    /// Has the core see a RARP request from `mac`, so that bridges on the way learn where a migrated guest is now.
    pub(super) fn announce(&self, mac: Mac) {
        let pair = &self.pairs[0];
        pair.transmit.lock().announcement = Some(Box::new(rarp(mac)));
        pair.ring();
    }

    /// Pairs, from the first one on, on which the guest receives; at least 1. Changes with what the guest's driver uses.
    #[inline]
    pub(super) fn active_pairs(&self) -> usize {
        self.active.load(Ordering::Relaxed).max(1)
    }

    /// Why no frame can flow, or that one can.
    pub(super) fn state(&self) -> State {
        let (mut up, mut missing) = (false, None);
        for pair in &self.pairs {
            // One lock at a time: see the lock order above.
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

    /// The receive vring that frames for `queue` go to: a guest may use fewer queues than it could; the first one is always
    /// among them.
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
        let poisoned = ring.memory().is_poisoned();
        if coalescing.is_on() {
            coalescing.gave(bytes);
            ring.show();
        } else if ring.publish() && vring.notify() {
            self.stats.notifications.add(1);
        }
        // Once the guest knows; it waits for nothing of this.
        if let Some(Running { ring, .. }) = vring.running() {
            ring.read_ahead(frames.which.len());
        }
        if poisoned {
            vring.break_with(POISONED.to_owned());
        } else if let Err(error) = result {
            vring.break_with(error.to_string());
        }
    }

    /// Notifies a guest that has nothing to do of frames of so many bytes that are about to be moved.
    fn inject_early(&self, vring: &mut Vring, coalescing: &mut Coalescing, bytes: u64) {
        let Some(running) = vring.running() else { return };
        if running.ring.caught_up() {
            running.ring.settle();
            coalescing.caught_up();
        }
        let waits = running.ring.would_wait();
        if coalescing.before(bytes, waits, Instant::now(), &self.stats.interrupts) && vring.notify() {
            self.stats.notifications.add(1);
        }
    }

    /// The receive vrings that frames for `queue` may have gone to: its own, and the first one while that was down.
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
            // Whoever delivers from now on sees this; what was delivered before is settled here.
            self.coalesces.store(receive.coalescing.is_on(), Ordering::Relaxed);
            self.stats.notifications.add(u64::from(receive.vring.settle()));
        }
    }

    #[inline]
    fn coalesces(&self) -> bool {
        self.coalesces.load(Ordering::Relaxed)
    }

    fn end_of_coalescing(&self, queue: usize) -> bool {
        let mut withheld = false;
        self.delivered_to(queue, |Receive { vring, coalescing, .. }| {
            let Some(running) = vring.running() else { return };
            match coalescing.end(running.ring.waits(), Instant::now(), &self.stats.interrupts) {
                Verdict::Withhold => withheld = true,
                Verdict::Settled => running.ring.settle(),
                Verdict::Inject => {
                    running.ring.settle();
                    self.stats.notifications.add(u64::from(vring.notify()));
                }
            }
        });
        withheld
    }

    fn check(&self, queue: usize) {
        self.delivered_to(queue, |Receive { vring, coalescing, .. }| {
            let Some(running) = vring.running() else { return };
            let waits = running.ring.waits();
            running.ring.settle();
            if coalescing.check(waits, &self.stats.interrupts) {
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
        let poisoned = ring.memory().is_poisoned();
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

/// What can be said of one vring.
struct Health {
    up: bool,
    broken: Option<String>,
    /// What is missing for frames to flow.
    missing: Option<String>,
    /// It runs and no driver has touched it.
    blank: bool,
}

impl Health {
    fn of(vring: &Vring, name: &str) -> Health {
        let no_memory = vring.lacks_memory().then(|| NO_MEMORY.to_owned());
        Health {
            up: vring.is_up(),
            broken: vring.broken().map(|reason| format!("the guest's {name} queue: {reason}")),
            missing: no_memory.or_else(|| vring.unwatched().map(str::to_owned)),
            blank: vring.is_blank(),
        }
    }
}

impl Pair {
    pub(super) fn ring(&self) {
        // Fails only when the counter is full, and then the bell is ringing already.
        let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
    }
}

/// A RARP request (RFC 903) by which `mac` asks for its own address: nobody answers, everybody learns.
fn rarp(mac: Mac) -> [u8; RARP_LEN] {
    let mut frame = [0; RARP_LEN];
    frame[..6].copy_from_slice(&Mac::BROADCAST.0);
    frame[6..12].copy_from_slice(&mac.0);
    // EtherType RARP; hardware Ethernet, protocol IPv4, lengths 6 and 4, operation 3 (request reverse).
    frame[12..22].copy_from_slice(&[0x80, 0x35, 0, 1, 8, 0, 6, 4, 0, 3]);
    frame[22..28].copy_from_slice(&mac.0);
    frame[32..38].copy_from_slice(&mac.0);
    frame
}
