//! Frames sent by a guest: the dispatcher's side of a transmit vring.
//!
//! A fill locks the vring until its burst is dropped. So no message of the front end takes effect while frames in guest memory
//! are being forwarded: no memory is unmapped and no ring stopped. The lock is uncontended unless the front end is changing the
//! vring.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use parking_lot::{ArcMutexGuard, RawMutex};

use super::faults::{FaultWatch, May};
use super::looks::Look;
use super::queue_pairs::{Device, POISONED, Pair, RARP_LEN, Transmit};
use crate::frame::{Batch, DropSink, Segment};
use crate::interface::virtqueue::net::take;
use crate::poll::Waker;
use crate::source::{Source, Taken};
use crate::stats::DropReason;
use crate::wire::offload::Offload;

/// One transmit vring as a source.
pub(super) struct GuestSource {
    device: Arc<Device>,
    queue: usize,
    /// The locked vring, from a fill until its burst is dropped.
    locked: Option<ArcMutexGuard<RawMutex, Transmit>>,
    /// How the vring broke in the last fill.
    broke: Option<String>,
    /// The announcement in the last fill, see [`Device::announce`].
    announcement: Option<Box<[u8; RARP_LEN]>>,
    faults: FaultWatch,
    /// Polls the queue while kicks are not watched.
    look: Arc<Look>,
}

impl GuestSource {
    /// Creates the source of `queue`, which must be less than the device's number of queue pairs.
    pub(super) fn new(device: Arc<Device>, queue: usize) -> GuestSource {
        let faults = FaultWatch::new(device.clone(), queue);
        let look = Look::new(device.clone(), queue);
        GuestSource { device, queue, locked: None, broke: None, announcement: None, faults, look }
    }

    fn pair(&self) -> &Pair {
        &self.device.pairs[self.queue]
    }

    #[cold]
    fn announce(&mut self, frame: Box<[u8; RARP_LEN]>, batch: &mut Batch) -> Taken {
        let device = &*self.device;
        let mut builder = batch.begin();
        // SAFETY: the frame stays in `announcement`, unchanged, until `give_back`, and the batch is cleared before that call.
        unsafe { builder.push_stable(Segment::new(frame.as_ptr(), RARP_LEN)) };
        match builder.finish(device.port, device.network, Offload::default(), 0) {
            Ok(()) => {
                device.stats.in_frames.add(1);
                device.stats.in_bytes.add(RARP_LEN as u64);
            }
            Err(error) => tracing::warn!(%error, "announcement refused"),
        }
        self.announcement = Some(frame);
        Taken { units: 1, ..Taken::default() }
    }

    fn set_waker(&mut self, waker: Option<Waker>) {
        let pair = self.pair();
        let mut transmit = pair.transmit.lock();
        if let Some(old) = transmit.vring.waker() {
            old.forget(pair.bell.as_fd());
        }
        let watched = waker.as_ref().map_or(Ok(()), |waker| waker.watch(&pair.bell));
        transmit.vring.set_waker(waker);
        if let Err(error) = watched {
            transmit.vring.set_unwatched(format!("cannot watch the control thread's bell: {error}"));
        }
        pair.ring();
    }
}

impl Source for GuestSource {
    // SAFETY: segments point into guest memory that the batch's owner keeps mapped; their chains go back only in `give_back`.
    unsafe fn fill(&mut self, batch: &mut Batch, drops: &mut DropSink, _now_ms: u64) -> Taken {
        let nothing = Taken { drained: true, ..Taken::default() };
        if self.pair().is_skipped() {
            return nothing;
        }
        let mut locked = self.pair().transmit.lock_arc();
        let Transmit { vring, announcement } = &mut *locked;
        if let Some(frame) = announcement.take() {
            return self.announce(frame, batch);
        }
        let Some(running) = vring.running() else { return nothing };
        let may = self.faults.may(running);
        match may {
            May::TakeAll => {}
            // The first frame spends it.
            May::TakeOne => batch.set_budget(1),
            May::TakeNone => return nothing,
            May::Wait => {
                drop(locked);
                self.faults.read_ahead();
                return nothing;
            }
        }
        let owner = self.device.owner(running.format);
        let result = self
            .faults
            .begin(may, batch, |batch| take(&mut running.ring, &mut running.taken, &owner, batch, drops));
        running.pages_read = running.pages_read.saturating_sub(*result.as_ref().unwrap_or(&0));
        let poisoned = running.ring.is_poisoned();
        if poisoned {
            // The file behind the memory was truncated, so frames may have turned into zeros. Drop the whole burst.
            for frame in batch.frames() {
                let bytes = frame.len() as u64;
                drops.withdrawn(&self.device.stats, self.device.port, DropReason::BadChain, bytes);
            }
            batch.clear();
        }
        self.locked = Some(locked);
        let units = match result {
            Ok(units) => units,
            Err(error) => {
                self.broke = Some(error.to_string());
                0
            }
        };
        if poisoned {
            self.broke = Some(POISONED.to_owned());
        }
        Taken { units, drained: units < batch.limit() && !batch.is_spent(), ..Taken::default() }
    }

    fn give_back(&mut self) {
        self.announcement = None;
        self.faults.end();
        let Some(mut locked) = self.locked.take() else { return };
        let vring = &mut locked.vring;
        if let Some(running) = vring.running()
            && running.taken.give_back(&mut running.ring)
            && vring.notify()
        {
            self.device.stats.notifications.add(1);
        }
        if let Some(reason) = self.broke.take() {
            vring.break_with(reason);
        }
    }

    fn watch(&mut self, waker: Waker) {
        self.set_waker(Some(waker));
    }

    fn unwatch(&mut self) {
        self.set_waker(None);
    }

    fn rest(&mut self) -> bool {
        let pair = self.pair();
        if pair.is_skipped() {
            return true;
        }
        let mut transmit = pair.transmit.lock();
        match transmit.vring.rest_unwatched() {
            Some(false) => false,
            Some(true) if self.look.later() => true,
            _ => transmit.vring.arm(),
        }
    }

    fn resume(&mut self) {
        if !self.pair().is_skipped() {
            let kicks = self.pair().transmit.lock().vring.disarm();
            self.device.stats.kicks.add(kicks);
        }
    }

    fn polls(&self) -> bool {
        true
    }

    fn is_held(&self) -> bool {
        self.pair().transmit.lock().vring.is_held()
    }

    fn reclaim(&mut self) {
        let pair = self.pair();
        if !pair.changing.load(Ordering::Relaxed) {
            let (_, notified) = pair.transmit.lock().vring.reclaim();
            self.device.stats.notifications.add(u64::from(notified));
        }
    }
}
