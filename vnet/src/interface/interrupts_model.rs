//! No frame is left with a guest that does not know of it: optimistic interrupts against a guest, in every order.
//!
//! Twice: with the real ring and the real decisions, where device and guest take turns in every order of their steps and the
//! traffic stops wherever it may; and with loom, which adds what processors may do to the order of memory accesses.

use std::time::{Duration, Instant};

use super::*;
use crate::interface::virtqueue::mock::{GUEST_BASE, MockMemory, MockRing};
use crate::interface::virtqueue::split::needs_event;
use crate::interface::virtqueue::{AVAIL_NO_INTERRUPT, DESC_WRITE, Ring};

const SIZE: u16 = 8;
/// What the density is judged to be: the bounds that make it so.
const COLD: (u64, u64) = (u64::MAX, u64::MAX);
const RIGHT: (u64, u64) = (0, u64::MAX);
const HOT: (u64, u64) = (0, 0);
/// How many bytes a frame has here.
const FRAME: u64 = 60;

/// A guest's driver as Linux's virtio_net with NAPI, one memory access or so a step.
struct Guest {
    ring: MockRing,
    event_idx: bool,
    at: At,
    interrupts: u32,
    taken: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    /// Notifications are on; an interrupt wakes it.
    Asleep,
    /// In the handler: notifications are turned off next.
    Interrupted,
    /// Takes what there is.
    Polling,
    /// Nothing left: notifications are turned on next.
    Finishing,
    /// They are on: looks once more.
    Looking,
}

impl Guest {
    fn step(&mut self, memory: &MockMemory) {
        let off = |guest: &Guest| match guest.event_idx {
            // virtqueue_disable_cb_split() of Linux: an index that will not come soon.
            true => guest.ring.set_used_event(memory, guest.ring.used_idx.wrapping_add(0x8000)),
            false => guest.ring.set_avail_flags(memory, AVAIL_NO_INTERRUPT),
        };
        self.at = match self.at {
            At::Asleep if self.interrupts > 0 => {
                self.interrupts = 0;
                At::Interrupted
            }
            At::Asleep => At::Asleep,
            At::Interrupted => {
                off(self);
                At::Polling
            }
            At::Polling => match self.ring.collect(memory) {
                Some(_) => {
                    self.taken += 1;
                    At::Polling
                }
                None => At::Finishing,
            },
            At::Finishing => {
                match self.event_idx {
                    true => self.ring.set_used_event(memory, self.ring.used_idx),
                    false => self.ring.set_avail_flags(memory, 0),
                }
                At::Looking
            }
            At::Looking => match self.ring.collect(memory) {
                Some(_) => {
                    self.taken += 1;
                    off(self);
                    At::Polling
                }
                None => At::Asleep,
            },
        };
    }

    /// Lets it run until only an interrupt could wake it.
    fn run(&mut self, memory: &MockMemory) {
        while self.at != At::Asleep || self.interrupts > 0 {
            self.step(memory);
        }
    }
}

/// The device's side: what `Device` and the dispatcher's `Pending` do, one step at a time.
struct Sender<'a> {
    ring: Ring,
    coalescing: Coalescing,
    stats: &'a InterruptStats,
    clock: Instant,
    next: Next,
    given: usize,
    checks: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    Early,
    Give,
    EndOrMore,
    Check,
}

impl Sender<'_> {
    /// Takes the next step. `more`: another batch comes before the end of coalescing.
    fn step(&mut self, guest: &mut Guest, more: bool) {
        self.clock += Duration::from_micros(1);
        self.next = match self.next {
            Next::Early => {
                if self.ring.caught_up() {
                    self.ring.settle();
                    self.coalescing.caught_up();
                }
                let waits = self.ring.would_wait();
                guest.interrupts += u32::from(self.coalescing.before(FRAME, waits, self.clock, self.stats));
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
                self.next = Next::Early;
                return self.step(guest, false);
            }
            Next::EndOrMore => match self.coalescing.end(self.ring.waits(), self.clock, self.stats) {
                Verdict::Withhold => {
                    self.checks = true;
                    Next::Check
                }
                verdict => {
                    self.ring.settle();
                    guest.interrupts += u32::from(verdict == Verdict::Inject);
                    Next::Early
                }
            },
            Next::Check => {
                let waits = self.ring.waits();
                self.ring.settle();
                guest.interrupts += u32::from(self.coalescing.check(waits, self.stats));
                self.checks = false;
                Next::Early
            }
        };
    }

    /// The traffic stops here: only what is owed is still done.
    fn finish(&mut self, guest: &mut Guest) {
        if self.next == Next::Give {
            // Announced, and then dropped on the way: nothing is given.
            self.next = Next::EndOrMore;
        }
        while self.next != Next::Early {
            self.step(guest, false);
        }
        assert!(!self.checks);
    }
}

/// All announced, or only what comes behind another frame.
fn optimistic(density: (u64, u64), all: bool) -> InterruptSettings {
    InterruptSettings {
        interrupts: Interrupts::Optimistic,
        density_low: density.0,
        density_high: density.1,
        early_bytes: if all { 0 } else { 2 * FRAME },
    }
}

/// One order: bit i of `order` says whose step i is; `more` says where batches follow each other without an end between.
fn run(memory: &MockMemory, event_idx: bool, settings: InterruptSettings, order: u32, more: u32, last: bool) {
    const STEPS: u32 = 13;
    let stats = InterruptStats::default();
    let mut mock = MockRing::new(memory, GUEST_BASE, SIZE, 0);
    mock.set_used_event(memory, 0);
    mock.set_avail_flags(memory, 0);
    for i in 0..u64::from(SIZE) {
        mock.add(memory, &[(GUEST_BASE + 0x1000 + 64 * i, 64, DESC_WRITE)]).unwrap();
    }
    mock.publish(memory);
    let mut ring = Ring::new(memory.map(), &mock.config(event_idx, false), None).unwrap();
    // The first notification, which is always made, is not what this is about.
    let head = ring.next().unwrap().unwrap();
    ring.complete(head.index, 1);
    assert!(ring.publish());
    let mut guest = Guest { ring: mock, event_idx, at: At::Asleep, interrupts: 1, taken: 0 };
    guest.run(memory);
    let coalescing = Coalescing::new(settings);
    let (clock, stats) = (Instant::now(), &stats);
    let mut sender = Sender { ring, coalescing, stats, clock, next: Next::Early, given: 1, checks: false };
    for step in 0..STEPS {
        if order >> step & 1 == 0 {
            guest.step(memory);
        } else if sender.given < usize::from(SIZE) {
            sender.step(&mut guest, more >> step & 1 == 1);
        }
    }
    if last {
        guest.run(memory);
    }
    sender.finish(&mut guest);
    guest.run(memory);
    assert_eq!(
        guest.taken, sender.given,
        "event_idx {event_idx}, {settings:?}, order {order:#b}, more {more:#b}"
    );
    let stats = sender.stats;
    assert!(stats.early_premature.get() <= stats.early.get());
}

#[test]
fn no_frame_waits_wherever_the_traffic_stops() {
    let memory = MockMemory::new(0x4000);
    let densities = [COLD, RIGHT, HOT];
    for (event_idx, all) in [(true, true), (true, false), (false, true), (false, false)] {
        for settings in densities.map(|density| optimistic(density, all)) {
            for order in 0..1 << 13 {
                // Batches that follow each other: nowhere, everywhere, now and then.
                let more = [0, u32::MAX, 0x0f0f][order as usize % 3];
                run(&memory, event_idx, settings, order, more, order % 2 == 0);
            }
        }
    }
}

/// Loom's half: the same protocol in loom's atomics, with the real decisions.
mod weak_memory {
    use super::*;
    use crate::alone;
    use loom::sync::atomic::{AtomicU16, Ordering, fence};
    use loom::sync::{Condvar, Mutex};

    struct Shared {
        used: AtomicU16,
        used_event: AtomicU16,
        call: Mutex<bool>,
        called: Condvar,
    }

    impl Shared {
        fn call(&self) {
            *self.call.lock().unwrap() = true;
            self.called.notify_one();
        }

        /// `Ring::waits`
        fn waits(&self, settled: u16) -> bool {
            fence(Ordering::SeqCst);
            let used = self.used.load(Ordering::Relaxed);
            needs_event(self.used_event.load(Ordering::Relaxed), used, settled)
        }
    }

    /// Two frames, each announced early or not, given, and judged; every verdict.
    fn meet(density: (u64, u64), all: bool) {
        const FRAMES: u16 = 2;
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(move || {
            let shared = loom::sync::Arc::new(Shared {
                used: AtomicU16::new(0),
                used_event: AtomicU16::new(0),
                call: Mutex::new(false),
                called: Condvar::new(),
            });
            let guest = loom::thread::spawn({
                let shared = shared.clone();
                move || {
                    let mut taken = 0;
                    while taken < FRAMES {
                        // Asleep until called, then everything there is, then armed, then another look.
                        let mut call = shared.call.lock().unwrap();
                        while !std::mem::take(&mut *call) {
                            call = shared.called.wait(call).unwrap();
                        }
                        drop(call);
                        loop {
                            taken = shared.used.load(Ordering::Acquire);
                            shared.used_event.store(taken, Ordering::Relaxed);
                            fence(Ordering::SeqCst);
                            if shared.used.load(Ordering::Acquire) == taken {
                                break;
                            }
                        }
                    }
                }
            });
            let stats = InterruptStats::default();
            let (mut coalescing, mut settled) = (Coalescing::new(optimistic(density, all)), 0);
            let now = Instant::now();
            for n in 1..=FRAMES {
                let waits = shared.used_event.load(Ordering::Relaxed) == n - 1;
                if coalescing.before(FRAME, waits, now, &stats) {
                    shared.call();
                }
                shared.used.store(n, Ordering::Release);
                coalescing.gave(FRAME);
                match coalescing.end(shared.waits(settled), now + Duration::from_micros(1), &stats) {
                    // The last of them has to be checked, the first may be overtaken by the second.
                    Verdict::Withhold if n < FRAMES => continue,
                    Verdict::Withhold => {
                        if coalescing.check(shared.waits(settled), &stats) {
                            shared.call();
                        }
                    }
                    Verdict::Inject => shared.call(),
                    Verdict::Settled => {}
                }
                settled = n;
            }
            guest.join().unwrap();
        });
    }

    #[test]
    fn no_notification_is_lost_in_any_order() {
        alone("interface::interrupts::model::weak_memory::no_notification_is_lost_in_any_order", || {
            [COLD, RIGHT, HOT]
                .into_iter()
                .for_each(|density| [true, false].into_iter().for_each(|all| meet(density, all)));
        });
    }
}
