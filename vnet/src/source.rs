//! Sources: what frames come from. A guest's queue, a socket of the bridge, a connection of a stream link.
//!
//! ```text
//!   for source in sources {
//!       let burst = source.receive(batch, drops);     fills the batch; the memory stays the burst's
//!       decide(&burst); deliver(&burst);
//!   }                                                 the burst is dropped: chains and buffers go back
//! ```
//!
//! A dispatcher owns its sources, and nobody else reads from them. [`receive`] turns one fill of a source into a [`Burst`]: frames
//! whose memory belongs to somebody else (a guest, a receive buffer) until the burst is dropped. So a frame is decided and
//! delivered while it lies where it arrived, and a source needs no callback to know when it may reuse that memory.
//!
//! Soundness: a burst takes the [`Batch`] out of its [`BatchSlot`] and puts it back empty. Whoever forgets a burst
//! (`std::mem::forget`) loses the batch with it, so that no frame can be reached after its source is gone.

use std::ops::Deref;

use crate::frame::{Batch, DropSink};
use crate::poll::Waker;

/// What one fill of a source took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Taken {
    /// Units taken, refused ones included: chains, packets, datagrams or messages. 0 when nothing was waiting.
    pub units: usize,
    /// Nothing more was waiting when the source was looked at last.
    pub drained: bool,
    /// Frames that are in their guest's buffers already and so not in the batch (cut-through forwarding).
    pub in_place: InPlace,
}

/// Frames that a source received where they were to end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InPlace {
    /// Frames.
    pub frames: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// Something that frames come from, served by one dispatcher.
pub trait Source: Send {
    /// Adds frames to `batch`, which is empty, until it is full or nothing is waiting. Counts them as in, and reports refused
    /// ones to `drops`. `now_ms` is the dispatchers' clock, which does not run backwards.
    ///
    /// # Safety
    /// The frames' memory stays readable and unchanged (but by the guest it belongs to) only until
    /// [`give_back`](Source::give_back) is called or the source is dropped: the caller clears the batch before either.
    unsafe fn fill(&mut self, batch: &mut Batch, drops: &mut DropSink, now_ms: u64) -> Taken;

    /// The frames of the last fill are forwarded, and the batch is cleared: their memory may be reused.
    fn give_back(&mut self) {}

    /// Has `waker` wake the dispatcher for new frames, from now on.
    fn watch(&mut self, waker: Waker);

    /// Ends [`watch`](Source::watch).
    fn unwatch(&mut self);

    /// Asks to be woken for the next frame. False when frames are waiting already, or may be: do not sleep then.
    fn rest(&mut self) -> bool;

    /// The dispatcher is awake and looks by itself: wake-ups are not needed.
    fn resume(&mut self) {}

    /// True when a look is cheap enough for every turn (memory, not a system call).
    fn polls(&self) -> bool {
        false
    }

    /// Gives frames back to the guest whose memory was held (see [`Hold`](crate::frame::Hold)), and no longer is.
    fn reclaim(&mut self) {}

    /// Ends what has taken too long, such as incomplete frames. Called every 20 ms while frames flow.
    fn tick(&mut self, _now_ms: u64) {}
}

/// Where a dispatcher keeps its batch between two bursts.
pub struct BatchSlot {
    batch: Option<Box<Batch>>,
    limit: usize,
}

impl BatchSlot {
    /// A slot with an empty batch for at most `limit` frames.
    pub fn new(limit: usize) -> BatchSlot {
        BatchSlot { batch: Some(Box::new(Batch::of(limit))), limit }
    }

    /// The empty batch. Made anew if the last burst was forgotten.
    #[inline]
    fn take(&mut self) -> Box<Batch> {
        self.batch.take().unwrap_or_else(|| Box::new(Batch::of(self.limit)))
    }
}

/// Frames from one source, with the memory they lie in. Dereferences to the batch.
pub struct Burst<'a> {
    source: &'a mut dyn Source,
    slot: &'a mut BatchSlot,
    /// Taken out only by `drop`.
    batch: Option<Box<Batch>>,
    /// What the source was asked for.
    pub taken: Taken,
}

/// Receives up to a batch of frames from `source`.
#[inline]
pub fn receive<'a>(
    source: &'a mut dyn Source,
    slot: &'a mut BatchSlot,
    drops: &mut DropSink,
    now_ms: u64,
) -> Burst<'a> {
    let mut batch = slot.take();
    // SAFETY: the burst owns the batch and borrows the source. Only `Burst::drop` lets go of either, and it clears the batch
    // before it calls `give_back`. A burst that is forgotten leaks the batch, which nobody can read afterwards.
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

    /// Gives one frame out of memory of its own, and writes to it when it gets it back.
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
            // SAFETY: the memory is written to in `give_back` first.
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
