//! Page faults of a guest's frames, kept from dispatchers.
//!
//! A dispatcher that reads a page for the first time takes a page fault, a few microseconds. That happens to each page of a guest once. But
//! a front end can make vnetd lose the pages again and again: it replaces the memory, or punches holes into the file behind it. Frames in 250
//! pieces, each in a page of its own, then take a millisecond each, and everybody else on the dispatcher waits.
//!
//! So a dispatcher times each burst of a guest. After one that took too long, it counts the page faults of the next ones, for [`SUSPECTED`].
//! If a burst has many, or a few that take long (of huge pages, or from swap), the queue is *faulty* for [`FAULTY`]: a thread of its
//! interface ([`SlowWork`]) reads a byte of each page of the waiting frames, and then the dispatcher takes them, one in a turn. The thread
//! rests as the interface's allowance says.
//!
//! ```text
//!             a burst took long             page faults
//!   ordinary ------------------> suspected -------------> faulty
//!       ^                            |                       |
//!       +--------- after 1 s --------+----- few for 10 s ----+
//! ```
//!
//! Frames *to* a guest are copied into its pages by whoever sends them; these page faults are not treated.
//!
//! [`SlowWork`]: super::slow_work::SlowWork

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::queue_pairs::{Device, FAULTY_NOTE, Pair};
use super::slow_work::Slow;
use super::usage::{Faults, now_ms};
use super::vring::Running;
use crate::frame::Batch;
use crate::interface::virtqueue::Buffer;
use crate::interface::virtqueue::net::look_ahead;

/// How long a queue stays faulty after the last time that it had many page faults.
const FAULTY: Duration = Duration::from_secs(10);
/// How long a queue is suspected.
const SUSPECTED: Duration = Duration::from_secs(1);
/// A burst takes no longer than this, and a nanosecond for each 4 bytes of its cost: more than copying takes. Page faults take no longer.
const LONG: Duration = Duration::from_micros(200);
/// More page faults in a burst are many.
const MANY: u64 = 64;
/// The same for a frame that was read ahead: more page faults mean that the front end evicts pages on purpose.
const MANY_AGAIN: u64 = 32;
/// Penalty for such a frame, charged as processor time: the interface's threads rest for a second.
const FINE: Duration = Duration::from_millis(150);
/// Read-ahead is charged at its processor time divided by this, so it may take 5 % of a processor.
const READ_AHEAD_DISCOUNT: u32 = 5;
/// Most chains whose pages are read at a time: their descriptors are read with the queue locked.
const AHEAD: usize = 16;
/// Base page size in bytes.
const PAGE: usize = 4096;

/// Watches the page faults of a transmit queue, for its dispatcher.
pub(super) struct FaultWatch {
    reader: Arc<Reader>,
    /// Until then, after a burst that took long.
    suspected_until: Option<Instant>,
    /// Pages vanished between read-ahead and the frame's copy: the front end evicts them on purpose.
    lost_again: bool,
    /// Start of the burst, and how long it may take.
    burst: Option<(Instant, Duration)>,
}

/// Reads pages of waiting frames.
struct Reader {
    device: Arc<Device>,
    queue: usize,
}

/// What a dispatcher may take from a queue in a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum May {
    /// A burst.
    TakeAll,
    /// One frame, already read ahead.
    TakeOne,
    /// Nothing: no frame waits.
    TakeNone,
    /// Nothing before the pages of the waiting frames are read.
    Wait,
}

impl FaultWatch {
    pub(super) fn new(device: Arc<Device>, queue: usize) -> FaultWatch {
        let reader = Reader { device, queue };
        // If the queue had another dispatcher before, its reader may be gone before it has read.
        reader.pair().read_ahead.store(false, Release);
        FaultWatch { reader: Arc::new(reader), suspected_until: None, lost_again: false, burst: None }
    }

    /// What the dispatcher may take now.
    #[inline]
    pub(super) fn may(&mut self, running: &mut Running) -> May {
        if !self.reader.pair().is_faulty() {
            return May::TakeAll;
        }
        if std::mem::take(&mut self.lost_again) {
            running.pages_read = 0;
        }
        match running.ring.ensure(1) {
            Ok(0) => May::TakeNone,
            Ok(_) if running.pages_read == 0 => May::Wait,
            // A broken ring is taken from, to find it broken.
            Ok(_) | Err(_) => May::TakeOne,
        }
    }

    /// Has the pages of the waiting frames read. Until then, [`Pair::is_read`] is true. Call it without the queue's lock.
    #[cold]
    pub(super) fn read_ahead(&self) {
        let pair = self.reader.pair();
        pair.read_ahead.store(true, Relaxed);
        let own: Arc<dyn Slow> = self.reader.clone();
        let later: Weak<dyn Slow> = Arc::downgrade(&own);
        if !self.reader.device.signals.slow.later(later) {
            // Without a thread, the dispatcher has the page faults.
            pair.faulty_until_ms.store(0, Relaxed);
            pair.read_ahead.store(false, Release);
        }
    }

    /// Begins a burst: takes frames by `take` into `batch`, and counts page faults if the queue is suspected or faulty.
    #[inline]
    pub(super) fn begin<R>(&mut self, may: May, batch: &mut Batch, take: impl FnOnce(&mut Batch) -> R) -> R {
        let start = Instant::now();
        let is_ordinary = may == May::TakeAll && self.suspected_until.is_none_or(|until| start >= until);
        let result = if is_ordinary { take(batch) } else { self.count(may, batch, take) };
        let most = LONG + Duration::from_nanos(batch.cost() / 4);
        self.burst = (!batch.is_empty()).then_some((start, most));
        result
    }

    /// Ends the burst.
    #[inline]
    pub(super) fn end(&mut self) {
        if let Some((start, most)) = self.burst.take()
            && let now = Instant::now()
            && now - start > most
        {
            self.suspected_until = Some(now + SUSPECTED);
        }
    }

    #[cold]
    fn count<R>(&mut self, may: May, batch: &mut Batch, take: impl FnOnce(&mut Batch) -> R) -> R {
        let before = Faults::now();
        let result = take(batch);
        for segment in batch.frames().iter().flat_map(|frame| batch.segments(frame)) {
            // SAFETY: the memory of a batch's segments stays readable until the batch is cleared.
            unsafe { read_pages(segment.as_ptr(), segment.len()) };
        }
        let (count, time) = before.since();
        let is_long = count > 0 && time > LONG;
        if may != May::TakeAll && (is_long || count > MANY_AGAIN) {
            self.lost_again = true;
            self.reader.device.signals.slow.allowance.charge(FINE);
        }
        if is_long || count > MANY {
            self.reader.found_faulty();
        }
        result
    }
}

impl Reader {
    fn pair(&self) -> &Pair {
        &self.device.pairs[self.queue]
    }

    /// Marks the queue as faulty for [`FAULTY`]; logs the transition.
    #[cold]
    fn found_faulty(&self) {
        if !self.pair().is_faulty() {
            let (interface, queue) = (&self.device.options.name, self.queue);
            tracing::warn!(%interface, queue, "{FAULTY_NOTE}");
        }
        self.pair().faulty_until_ms.store(now_ms() + FAULTY.as_millis() as u64, Relaxed);
    }
}

impl Slow for Reader {
    /// Page faults hold no lock that dispatchers wait for, unlike unmapping; and an ordinary guest whose memory is new waits for them.
    fn charge(&self, taken: Duration) -> Duration {
        taken / READ_AHEAD_DISCOUNT
    }

    fn carry_out(&self) {
        let pair = self.pair();
        let mut buffers: Vec<Buffer> = vec![];
        let before = Faults::now();
        let looked = pair.transmit.lock().vring.running().map(|running| {
            let count = look_ahead(&mut running.ring, AHEAD, &mut buffers);
            (count, running.ring.memory().clone())
        });
        if let Some((count, memory)) = looked {
            for buffer in buffers {
                // SAFETY: `memory` keeps the buffers mapped until after the loop.
                unsafe { read_pages(buffer.ptr, buffer.len) };
            }
            if let Some(running) = pair.transmit.lock().vring.running()
                && Arc::ptr_eq(running.ring.memory(), &memory)
            {
                running.pages_read = count;
            }
        }
        let (count, time) = before.since();
        if count > MANY || count > 0 && time > LONG {
            self.found_faulty();
        }
        pair.read_ahead.store(false, Release);
        pair.ring();
    }
}

impl Pair {
    /// True while the interface's thread reads the pages of waiting frames.
    #[inline]
    pub(super) fn is_read(&self) -> bool {
        self.read_ahead.load(Acquire)
    }

    /// True while frames are read ahead by the interface's own thread before the dispatcher takes them.
    #[inline]
    pub(super) fn is_faulty(&self) -> bool {
        let until_ms = self.faulty_until_ms.load(Relaxed);
        until_ms != 0 && now_ms() < until_ms
    }
}

/// Reads a byte of each page.
///
/// # Safety
/// The memory is readable.
unsafe fn read_pages(start: *const u8, len: usize) {
    let mut at = 0;
    while at < len {
        let byte = start.wrapping_add(at);
        // SAFETY: `at` < `len`, so the byte is readable, which the caller guarantees. The guest may write it at the same time; the read is
        // volatile, and its result is not used.
        unsafe { byte.read_volatile() };
        at += PAGE - byte.addr() % PAGE;
    }
}
