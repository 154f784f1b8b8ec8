//! Sources of frames: a guest's queue, a socket of the bridge, or a connection of a stream link.
//!
//! ```text
//!   for source in sources {
//!       let burst = source.receive(batch, drops);     fills the batch; the memory stays the burst's
//!       decide(&burst); deliver(&burst);
//!   }                                                 the burst is dropped: chains and buffers go back
//! ```
//!
//! A dispatcher owns its sources; no other thread reads from them. [`receive`] turns one fill of a source into a [`Burst`]:
//! frames that borrow the memory of a guest or a receive buffer until the burst is dropped. So a frame is decided and delivered
//! from the memory it arrived in, and a source needs no callback to know when it may reuse that memory.
//!
//! Soundness: a burst takes the [`Batch`] out of its [`BatchSlot`] and puts it back empty. A caller that forgets a burst
//! (`std::mem::forget`) leaks the batch with it, so that no frame can be reached after its source is dropped.

use std::ops::Deref;

use crate::frame::{Batch, DropSink};
use crate::poll::Waker;

/// Result of one fill of a source.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Taken {
    /// Number of units taken from the source, refused ones included: chains, packets, datagrams or messages. 0 when nothing was
    /// waiting.
    pub units: usize,
    /// True when the last look at the source found nothing more waiting.
    pub drained: bool,
    /// Frames that the source received straight into their guest's buffers (cut-through forwarding), and which are therefore not
    /// in the batch.
    pub in_place: InPlace,
}

/// Frames that a source received straight into the destination guest's buffers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InPlace {
    /// Number of frames.
    pub frames: u64,
    /// Sum of their lengths in bytes.
    pub bytes: u64,
    /// The guest's queue that received the last of them.
    pub queue: usize,
}

/// A source of frames, served by one dispatcher.
pub trait Source: Send {
    /// Adds frames to the empty `batch` until it is full, its budget is spent or nothing is waiting. Counts frames as received, and reports refused
    /// ones to `drops`. `now_ms` is the dispatchers' clock, which does not run backwards.
    ///
    /// # Safety
    /// The frames' memory stays readable, and unchanged except by the guest that owns it, only until
    /// [`give_back`](Source::give_back) is called or the source is dropped: the caller clears the batch before either.
    unsafe fn fill(&mut self, batch: &mut Batch, drops: &mut DropSink, now_ms: u64) -> Taken;

    /// Tells the source that the frames of the last fill are forwarded and the batch is cleared: it may reuse their memory.
    fn give_back(&mut self) {}

    /// Registers `waker`: new frames wake the dispatcher from now on.
    fn watch(&mut self, waker: Waker);

    /// Ends [`watch`](Source::watch).
    fn unwatch(&mut self);

    /// Requests a wake-up for the next frame. Returns false when frames are or may be waiting already; the dispatcher must not
    /// sleep then.
    fn rest(&mut self) -> bool;

    /// Ends [`rest`](Source::rest): the dispatcher is awake and polls, so it needs no wake-ups.
    fn resume(&mut self) {}

    /// True when polling the source is cheap enough for every turn (memory, not a system call).
    fn polls(&self) -> bool {
        false
    }

    /// True while the source has taken a part of a frame, or frames of a burst that it has not passed on.
    fn is_unfinished(&self) -> bool {
        false
    }

    /// True while the kernel still reads memory of the guest (see [`Hold`](crate::frame::Hold)).
    fn is_held(&self) -> bool {
        false
    }

    /// Returns frames to the guest whose memory was held (see [`Hold`](crate::frame::Hold)) and has been released since.
    fn reclaim(&mut self) {}

    /// Expires state that has become too old, such as incomplete frames. Called every 20 ms while frames flow.
    fn tick(&mut self, _now_ms: u64) {}
}

/// Keeps a dispatcher's batch between two bursts.
pub struct BatchSlot {
    batch: Option<Box<Batch>>,
    limit: usize,
    budget: u64,
}

impl BatchSlot {
    /// A slot with an empty batch for at most `limit` frames.
    pub fn new(limit: usize) -> BatchSlot {
        BatchSlot { batch: Some(Box::new(Batch::of(limit))), limit, budget: u64::MAX }
    }

    /// Bounds the cost of each burst from now on, see [`Batch::set_budget`].
    #[inline]
    pub fn set_budget(&mut self, budget: u64) {
        self.budget = budget;
    }

    /// Takes the empty batch. Creates a new one if the last burst was forgotten.
    #[inline]
    fn take(&mut self) -> Box<Batch> {
        let mut batch = self.batch.take().unwrap_or_else(|| Box::new(Batch::of(self.limit)));
        batch.set_budget(self.budget);
        batch
    }
}

/// Frames from one source, together with the borrow of the memory they lie in. Dereferences to the batch.
pub struct Burst<'a> {
    source: &'a mut dyn Source,
    slot: &'a mut BatchSlot,
    /// `None` only after `drop` took the batch out.
    batch: Option<Box<Batch>>,
    /// Result of the source's fill.
    pub taken: Taken,
}

/// Receives up to one batch of frames from `source`.
#[inline]
pub fn receive<'a>(
    source: &'a mut dyn Source,
    slot: &'a mut BatchSlot,
    drops: &mut DropSink,
    now_ms: u64,
) -> Burst<'a> {
    let mut batch = slot.take();
    // SAFETY: the burst owns the batch and borrows the source. Only `Burst::drop` releases either, and it clears the batch before
    // it calls `give_back`. A forgotten burst leaks the batch, which is unreachable afterwards.
    let taken = unsafe { source.fill(&mut batch, drops, now_ms) };
    Burst { source, slot, batch: Some(batch), taken }
}

impl Deref for Burst<'_> {
    type Target = Batch;

    #[inline]
    fn deref(&self) -> &Batch {
        match &self.batch {
            Some(batch) => batch,
            None => unreachable!("only `drop` takes the batch"),
        }
    }
}

impl Drop for Burst<'_> {
    #[inline]
    fn drop(&mut self) {
        if let Some(mut batch) = self.batch.take() {
            batch.clear();
            self.slot.batch = Some(batch);
        }
        self.source.give_back();
    }
}

/// Receives until the source is drained and hands each batch to `each`. Returns the units taken.
#[cfg(any(test, feature = "test-util"))]
pub fn drain(source: &mut dyn Source, now_ms: u64, each: &mut dyn FnMut(&Batch)) -> usize {
    let (mut slot, mut drops) = (BatchSlot::new(crate::frame::BATCH_MAX), DropSink::new());
    let mut units = 0;
    loop {
        let burst = receive(source, &mut slot, &mut drops, now_ms);
        if !burst.is_empty() {
            each(&burst);
        }
        units += burst.taken.units;
        if burst.taken.drained || burst.taken.units == 0 {
            return units;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::{NetworkId, Origin, PortId, Segment};
    use crate::wire::offload::Offload;

    /// A source that fills in one frame from its own memory, and overwrites that memory when it gets the frame back.
    #[derive(Default)]
    struct Once {
        memory: Vec<u8>,
        given: bool,
        back: usize,
    }

    impl Source for Once {
        // SAFETY: frames lie in `memory`, which only `give_back` overwrites.
        unsafe fn fill(&mut self, batch: &mut Batch, _drops: &mut DropSink, _now_ms: u64) -> Taken {
            if std::mem::replace(&mut self.given, true) {
                return Taken { drained: true, ..Taken::default() };
            }
            self.memory = vec![7; 200];
            let mut builder = batch.begin();
            // SAFETY: nothing writes to the memory before `give_back`.
            unsafe { builder.push_stable(Segment::new(self.memory.as_ptr(), self.memory.len())) };
            let Origin { port, network } = Origin { port: PortId(1), network: NetworkId::DEFAULT };
            builder.finish(port, network, Offload::default(), 0).unwrap();
            Taken { units: 1, ..Taken::default() }
        }

        fn give_back(&mut self) {
            self.memory.fill(0);
            self.back += 1;
        }

        fn watch(&mut self, _waker: Waker) {}
        fn unwatch(&mut self) {}
        fn rest(&mut self) -> bool {
            true
        }
    }

    #[test]
    fn a_burst_gives_back_when_it_is_dropped() {
        let (mut source, mut slot, mut drops) = (Once::default(), BatchSlot::new(8), DropSink::new());
        let burst = receive(&mut source, &mut slot, &mut drops, 1);
        assert_eq!((burst.taken.units, burst.len(), burst.head(burst.frame(0))[0]), (1, 1, 7));
        drop(burst);
        assert_eq!(source.back, 1);
        let burst = receive(&mut source, &mut slot, &mut drops, 1);
        assert!(burst.is_empty() && burst.taken.drained);
    }

    #[test]
    fn a_forgotten_burst_takes_its_batch_along() {
        let (mut slot, mut drops) = (BatchSlot::new(8), DropSink::new());
        let mut source = Once::default();
        std::mem::forget(receive(&mut source, &mut slot, &mut drops, 1));
        drop(source);
        let mut source = Once { given: true, ..Once::default() };
        assert!(receive(&mut source, &mut slot, &mut drops, 1).is_empty(), "a new batch");
    }
}
