//! Model check: with optimistic interrupts the guest is notified of every frame, in any interleaving.
//!
//! Two models. The first runs the real ring and the real decisions against a guest in every interleaving of their steps, with the
//! traffic stopping at any step. The second runs the protocol in loom, which adds the reordering of memory accesses by
//! processors.

use std::time::{Duration, Instant};

use super::*;
use crate::interface::virtqueue::mock::{GUEST_BASE, MockMemory, MockRing};
use crate::interface::virtqueue::split::needs_event;
use crate::interface::virtqueue::{AVAIL_NO_INTERRUPT, DESC_WRITE, Ring};

const SIZE: u16 = 8;
/// Thresholds (`density_low`, `density_high`) that make every receive density too cold, in between, or too hot.
const COLD: (u64, u64) = (u64::MAX, u64::MAX);
const RIGHT: (u64, u64) = (0, u64::MAX);
const HOT: (u64, u64) = (0, 0);
/// Bytes per frame.
const FRAME: u64 = 60;

/// A driver that behaves like Linux's virtio_net with NAPI, about one memory access per step.
struct Guest {
    ring: MockRing,
    event_idx: bool,
    state: DriverState,
    interrupts: u32,
    taken: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DriverState {
    /// Notifications on; an interrupt wakes the driver.
    Asleep,
    /// In the interrupt handler; its next step turns notifications off.
    Interrupted,
    /// Consumes used entries.
    Polling,
    /// The ring is empty; the next step turns notifications on.
    Finishing,
    /// Notifications are on; the next step checks the ring once more.
    Rechecking,
}

impl Guest {
    fn step(&mut self, memory: &MockMemory) {
        let off = |guest: &Guest| match guest.event_idx {
            // As in Linux's virtqueue_disable_cb_split(): an index far away.
            true => guest.ring.set_used_event(memory, guest.ring.used_idx.wrapping_add(0x8000)),
            false => guest.ring.set_avail_flags(memory, AVAIL_NO_INTERRUPT),
        };
        self.state = match self.state {
            DriverState::Asleep if self.interrupts > 0 => {
                self.interrupts = 0;
                DriverState::Interrupted
            }
            DriverState::Asleep => DriverState::Asleep,
            DriverState::Interrupted => {
                off(self);
                DriverState::Polling
            }
            DriverState::Polling => match self.ring.collect(memory) {
                Some(_) => {
                    self.taken += 1;
                    DriverState::Polling
                }
                None => DriverState::Finishing,
            },
            DriverState::Finishing => {
                match self.event_idx {
                    true => self.ring.set_used_event(memory, self.ring.used_idx),
                    false => self.ring.set_avail_flags(memory, 0),
                }
                DriverState::Rechecking
            }
            DriverState::Rechecking => match self.ring.collect(memory) {
                Some(_) => {
                    self.taken += 1;
                    off(self);
                    DriverState::Polling
                }
                None => DriverState::Asleep,
            },
        };
    }

    /// Runs the driver until only an interrupt can wake it.
    fn run(&mut self, memory: &MockMemory) {
        while self.state != DriverState::Asleep || self.interrupts > 0 {
            self.step(memory);
        }
    }
}

/// The device side: the steps of `Device` and of the dispatcher's pending checks.
struct DeviceSide<'a> {
    ring: Ring,
    coalescing: Coalescing,
    stats: &'a InterruptStats,
    clock: Instant,
    /// Data is announced when it arrives, not only when it is routed.
    arrivals: bool,
    next: Next,
    given: usize,
    checks: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    /// Data has arrived: announces the frame before it is received.
    Arrival,
    /// The frame is routed: announces it before the copy if it has not been announced.
    Early,
    Give,
    EndOrMore,
    Check,
}

impl DeviceSide<'_> {
    /// Announces a frame.
    fn announce(&mut self, guest: &mut Guest) {
        if self.ring.caught_up() {
            self.ring.settle();
            self.coalescing.reacted();
        }
        let waits = self.ring.would_wait();
        guest.interrupts += u32::from(self.coalescing.before(FRAME, waits, self.clock, self.stats));
    }

    /// Takes the next step. `more`: at an arrival, the data turns out to be for somebody else; after a frame, another batch follows
    /// before the end of coalescing; before a check, the dispatcher first looks whether the guest has reacted.
    fn step(&mut self, guest: &mut Guest, more: bool) {
        self.clock += Duration::from_micros(1);
        self.next = match self.next {
            Next::Arrival => {
                self.announce(guest);
                if more { Next::EndOrMore } else { Next::Early }
            }
            Next::Early => {
                self.announce(guest);
                Next::Give
            }
            Next::Give => {
                let head = self.ring.next().unwrap().expect("a buffer");
                self.ring.complete(head.index, 60);
                self.ring.show();
                self.coalescing.gave(FRAME);
                self.given += 1;
                Next::EndOrMore
            }
            Next::EndOrMore if more => {
                self.next = if self.arrivals { Next::Arrival } else { Next::Early };
                return self.step(guest, false);
            }
            Next::EndOrMore => match self.coalescing.end(self.ring.waits(), self.clock, self.stats) {
                EndDecision::Withhold(_) => {
                    self.checks = true;
                    Next::Check
                }
                decision => {
                    self.ring.settle();
                    guest.interrupts += u32::from(decision == EndDecision::Inject);
                    self.first()
                }
            },
            Next::Check if more => {
                if self.ring.waits() {
                    return;
                }
                self.ring.settle();
                self.coalescing.reacted();
                self.checks = false;
                self.first()
            }
            Next::Check => {
                let waits = self.ring.waits();
                self.ring.settle();
                let exact = self.ring.has_event_index();
                guest.interrupts += u32::from(self.coalescing.check(waits, exact, self.stats));
                self.checks = false;
                self.first()
            }
        };
    }

    /// The step with which a frame begins.
    fn first(&self) -> Next {
        if self.arrivals { Next::Arrival } else { Next::Early }
    }

    /// Takes only the steps that are still pending, because the traffic has stopped.
    fn finish(&mut self, guest: &mut Guest) {
        if matches!(self.next, Next::Early | Next::Give) {
            // The frame was announced by an early interrupt, then dropped before delivery.
            self.next = Next::EndOrMore;
        }
        while self.next != self.first() {
            self.step(guest, false);
        }
        assert!(!self.checks);
    }
}

/// Early interrupts for all frames, or only from the second frame on.
fn optimistic(density: (u64, u64), all: bool) -> InterruptSettings {
    InterruptSettings {
        interrupts: Interrupts::Optimistic,
        density_low: density.0,
        density_high: density.1,
        early_bytes: if all { 0 } else { 2 * FRAME },
    }
}

/// Number of steps in one interleaving.
const STEPS: u32 = 13;

/// One interleaving.
#[derive(Debug)]
struct Interleaving {
    event_idx: bool,
    settings: InterruptSettings,
    /// Data is announced when it arrives.
    arrivals: bool,
    /// Bit i: the device takes step i if set, else the guest.
    order: u32,
    /// Bit i: in step i the device takes the rarer way, see [`DeviceSide::step`].
    more: u32,
    /// The guest runs until it sleeps, before the device takes its last steps.
    guest_first: bool,
}

fn run(memory: &MockMemory, case: &Interleaving) {
    let Interleaving { event_idx, settings, arrivals, order, more, guest_first } = *case;
    let stats = InterruptStats::default();
    let mut mock = MockRing::new(memory, GUEST_BASE, SIZE, 0);
    mock.set_used_event(memory, 0);
    mock.set_avail_flags(memory, 0);
    for i in 0..u64::from(SIZE) {
        mock.add(memory, &[(GUEST_BASE + 0x1000 + 64 * i, 64, DESC_WRITE)]).unwrap();
    }
    mock.publish(memory);
    let mut ring = Ring::new(memory.map(), &mock.config(event_idx, false), None).unwrap();
    // The first publication always notifies: complete it before the test.
    let head = ring.next().unwrap().unwrap();
    ring.complete(head.index, 1);
    assert!(ring.publish());
    let mut guest = Guest { ring: mock, event_idx, state: DriverState::Asleep, interrupts: 1, taken: 0 };
    guest.run(memory);
    let coalescing = Coalescing::new(settings);
    let (clock, stats) = (Instant::now(), &stats);
    let next = if arrivals { Next::Arrival } else { Next::Early };
    let mut device = DeviceSide { ring, coalescing, stats, clock, arrivals, next, given: 1, checks: false };
    for step in 0..STEPS {
        if order >> step & 1 == 0 {
            guest.step(memory);
        } else if device.given < usize::from(SIZE) {
            device.step(&mut guest, more >> step & 1 == 1);
        }
    }
    if guest_first {
        guest.run(memory);
    }
    device.finish(&mut guest);
    guest.run(memory);
    assert_eq!(guest.taken, device.given, "{case:?}");
    let stats = device.stats;
    assert!(stats.early_premature.get() <= stats.early.get());
}

#[test]
fn no_frame_is_left_wherever_the_traffic_stops() {
    let memory = MockMemory::new(0x4000);
    let densities = [COLD, RIGHT, HOT];
    let cases = (0..8).map(|bits| (bits & 1 != 0, bits & 2 != 0, bits & 4 != 0));
    for (event_idx, all, arrivals) in cases {
        for settings in densities.map(|density| optimistic(density, all)) {
            for order in 0..1 << STEPS {
                // The rarer way: never, always, or sometimes.
                let more = [0, u32::MAX, 0x0f0f][order as usize % 3];
                let guest_first = order % 2 == 0;
                run(&memory, &Interleaving { event_idx, settings, arrivals, order, more, guest_first });
            }
        }
    }
}

/// The same protocol with loom's atomics and vnet's real decisions.
mod weak_memory {
    use super::*;
    use crate::alone;
    use loom::sync::atomic::{AtomicU16, Ordering, fence};
    use loom::sync::{Condvar, Mutex};

    /// The ring's indices and the guest's interrupt line.
    struct RingModel {
        used: AtomicU16,
        used_event: AtomicU16,
        call: Mutex<bool>,
        called: Condvar,
    }

    impl RingModel {
        fn call(&self) {
            *self.call.lock().unwrap() = true;
            self.called.notify_one();
        }

        /// Models `Ring::waits`.
        fn waits(&self, settled: u16) -> bool {
            fence(Ordering::SeqCst);
            let used = self.used.load(Ordering::Relaxed);
            needs_event(self.used_event.load(Ordering::Relaxed), used, settled)
        }
    }

    /// Delivers two frames, each with or without an early interrupt, before its receive or before its copy, and covers every
    /// decision.
    fn deliver_two(density: (u64, u64), all: bool, arrivals: bool) {
        const FRAMES: u16 = 2;
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(move || {
            let ring = loom::sync::Arc::new(RingModel {
                used: AtomicU16::new(0),
                used_event: AtomicU16::new(0),
                call: Mutex::new(false),
                called: Condvar::new(),
            });
            let guest = loom::thread::spawn({
                let ring = ring.clone();
                move || {
                    let mut taken = 0;
                    while taken < FRAMES {
                        // The guest sleeps until called, consumes all frames, turns notifications on, and checks the ring again.
                        let mut call = ring.call.lock().unwrap();
                        while !std::mem::take(&mut *call) {
                            call = ring.called.wait(call).unwrap();
                        }
                        drop(call);
                        loop {
                            taken = ring.used.load(Ordering::Acquire);
                            ring.used_event.store(taken, Ordering::Relaxed);
                            fence(Ordering::SeqCst);
                            if ring.used.load(Ordering::Acquire) == taken {
                                break;
                            }
                        }
                    }
                }
            });
            let stats = InterruptStats::default();
            let (mut coalescing, mut settled) = (Coalescing::new(optimistic(density, all)), 0);
            let now = Instant::now();
            let announce = |coalescing: &mut Coalescing, shown: u16| {
                let waits = ring.used_event.load(Ordering::Relaxed) == shown;
                if coalescing.before(FRAME, waits, now, &stats) {
                    ring.call();
                }
            };
            for n in 1..=FRAMES {
                if arrivals {
                    announce(&mut coalescing, n - 1);
                }
                announce(&mut coalescing, n - 1);
                ring.used.store(n, Ordering::Release);
                coalescing.gave(FRAME);
                match coalescing.end(ring.waits(settled), now + Duration::from_micros(1), &stats) {
                    // Only the last frame must be checked: delivering the second may replace the first one's check.
                    EndDecision::Withhold(_) if n < FRAMES => continue,
                    EndDecision::Withhold(_) => {
                        // The check is dropped once the guest has reacted.
                        if ring.waits(settled) && coalescing.check(ring.waits(settled), true, &stats) {
                            ring.call();
                        }
                    }
                    EndDecision::Inject => ring.call(),
                    EndDecision::Settled => {}
                }
                settled = n;
            }
            guest.join().unwrap();
        });
    }

    #[test]
    fn no_notification_is_lost_in_any_order() {
        alone("interface::interrupts::model::weak_memory::no_notification_is_lost_in_any_order", || {
            [COLD, RIGHT, HOT].into_iter().for_each(|density| {
                for (all, arrivals) in [(true, true), (true, false), (false, false)] {
                    deliver_two(density, all, arrivals);
                }
            });
        });
    }
}
