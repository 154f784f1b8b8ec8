//! Loom model: no wake-up is lost in any interleaving of a guest and its dispatcher.
//!
//! The dispatcher's side is the real [`Served`] with its real mode. The ring is modelled in loom's atomics with the same
//! accesses, orderings and fences as `Ring::prime`, `Ring::arm` and a virtio driver. A lost wake-up leaves the dispatcher asleep
//! forever, which loom reports as a deadlock.

use std::time::{Duration, Instant};

use loom::sync::atomic::{AtomicBool, AtomicU16, Ordering, fence};
use loom::sync::{Condvar, Mutex};

use super::mode::{Drive, Mode, ModeSettings};
use super::served::Served;
use crate::alone;
use crate::frame::{Batch, DropSink};
use crate::interface::virtqueue::split::needs_event;
use crate::poll::Waker;
use crate::source::{BatchSlot, Source, Taken, receive};

/// The shared words of a transmit ring, and the kick that wakes the dispatcher.
struct SharedRing {
    event_idx: bool,
    available: AtomicU16,
    available_event: AtomicU16,
    no_notify: AtomicBool,
    /// The eventfd: set by a write, cleared by a read.
    kick: Mutex<bool>,
    kicked: Condvar,
}

impl SharedRing {
    /// A driver makes its `n`th frame available (virtio 1.2 section 2.7.13).
    fn send(&self, n: u16) {
        self.available.store(n, Ordering::Release);
        fence(Ordering::SeqCst);
        let wanted = if self.event_idx {
            needs_event(self.available_event.load(Ordering::Relaxed), n, n - 1)
        } else {
            !self.no_notify.load(Ordering::Relaxed)
        };
        if wanted {
            *self.kick.lock().unwrap() = true;
            self.kicked.notify_one();
        }
    }

    /// The dispatcher sleeps until it is kicked.
    fn sleep(&self) {
        let mut kick = self.kick.lock().unwrap();
        while !std::mem::take(&mut *kick) {
            kick = self.kicked.wait(kick).unwrap();
        }
    }
}

/// The device's side of the ring.
struct Model {
    shared: loom::sync::Arc<SharedRing>,
    next: u16,
}

impl Source for Model {
    // SAFETY: adds no frame, so nothing must stay readable.
    unsafe fn fill(&mut self, _: &mut Batch, _: &mut DropSink, _: u64) -> Taken {
        let units = self.shared.available.load(Ordering::Acquire).wrapping_sub(self.next);
        self.next = self.next.wrapping_add(units);
        Taken { units: units.into(), ..Taken::default() }
    }

    fn watch(&mut self, _: Waker) {}
    fn unwatch(&mut self) {}

    fn rest(&mut self) -> bool {
        if self.shared.event_idx {
            self.shared.available_event.store(self.next, Ordering::Relaxed);
        } else {
            self.shared.no_notify.store(false, Ordering::Relaxed);
        }
        fence(Ordering::SeqCst);
        let armed = self.shared.available.load(Ordering::Acquire) == self.next;
        if !armed {
            self.resume();
        }
        armed
    }

    fn resume(&mut self) {
        if !self.shared.event_idx {
            self.shared.no_notify.store(true, Ordering::Relaxed);
        }
    }

    fn polls(&self) -> bool {
        true
    }
}

/// A guest sends `frames` frames one by one; its dispatcher takes them in `mode` and sleeps whenever it may.
fn meet(mode: Mode, event_idx: bool, frames: u16) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(move || {
        let shared = loom::sync::Arc::new(SharedRing {
            event_idx,
            available: AtomicU16::new(0),
            available_event: AtomicU16::new(0),
            no_notify: AtomicBool::new(false),
            kick: Mutex::new(false),
            kicked: Condvar::new(),
        });
        let guest = loom::thread::spawn({
            let shared = shared.clone();
            move || (1..=frames).for_each(|n| shared.send(n))
        });
        // Each poll ends a window; one frame is above alpha_u, none is below alpha_l: the mode switches as often as possible.
        let settings = ModeSettings { mode, rate_low: 1, rate_high: 1, window_us: 1 };
        let drive = Drive::new(settings, 1);
        let mut now = Instant::now();
        let model = Box::new(Model { shared: shared.clone(), next: 0 });
        let mut served = Served::new(0, model, (drive, 0), now);
        let (mut slot, mut drops) = (BatchSlot::new(1), DropSink::new());
        let mut taken = 0;
        while taken < usize::from(frames) {
            now += Duration::from_micros(1);
            if served.ready {
                let count = receive(&mut *served.source, &mut slot, &mut drops, 0).taken.units;
                served.looked(count, now);
                taken += count;
                if count > 0 {
                    continue;
                }
            }
            // No frame was found: the steps of `Dispatcher::idle` before it blocks, and of `Dispatcher::wait` afterwards.
            if served.rest() {
                shared.sleep();
                served.wake();
            }
            served.resume();
        }
        guest.join().unwrap();
    });
}

#[test]
fn no_wake_up_is_lost_in_any_order() {
    alone("dispatch::served_model::no_wake_up_is_lost_in_any_order", || {
        for mode in [Mode::GuestDriven, Mode::VmmDriven, Mode::Adaptive] {
            for event_idx in [true, false] {
                meet(mode, event_idx, 2);
            }
        }
    });
}

/// Verifies the model itself: without `arm`'s second check of the ring, a wake-up is lost.
#[test]
fn the_model_finds_a_wake_up_that_is_lost() {
    let careless = || {
        let shared = loom::sync::Arc::new(SharedRing {
            event_idx: true,
            available: AtomicU16::new(0),
            // As if the ring had been armed at another index before.
            available_event: AtomicU16::new(u16::MAX),
            no_notify: AtomicBool::new(false),
            kick: Mutex::new(false),
            kicked: Condvar::new(),
        });
        let guest = loom::thread::spawn({
            let shared = shared.clone();
            move || shared.send(1)
        });
        if shared.available.load(Ordering::Acquire) == 0 {
            shared.available_event.store(0, Ordering::Relaxed);
            shared.sleep();
        }
        guest.join().unwrap();
    };
    alone("dispatch::served_model::the_model_finds_a_wake_up_that_is_lost", || {
        let panic = std::panic::catch_unwind(|| loom::model(careless)).unwrap_err();
        let said = panic.downcast::<String>().map(|text| *text).unwrap_or_default();
        assert!(said.contains("deadlock"), "{said}");
    });
}
