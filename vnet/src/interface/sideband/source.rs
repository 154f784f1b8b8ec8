//! The source of a queue with a sideband: takes control frames out of the guest's frames, and adds those in the guest's name.

use std::sync::Arc;

use super::channel::{GROUP, Sideband};
use super::mailbox::Message;
use crate::frame::{Batch, DropSink, Segment};
use crate::poll::Waker;
use crate::source::{Source, Taken};

pub(super) struct SidebandSource {
    sideband: Arc<Sideband>,
    inner: Box<dyn Source>,
    /// Whether it also sends the frames in the guest's name.
    sends: bool,
    /// Messages of the last fill, if that was the program's and not the guest's.
    sent: Vec<Message>,
    /// The last fill was the program's.
    was_program: bool,
    waker: Option<Waker>,
}

impl SidebandSource {
    pub(super) fn new(sideband: Arc<Sideband>, inner: Box<dyn Source>, sends: bool) -> SidebandSource {
        SidebandSource { sideband, inner, sends, sent: vec![], was_program: false, waker: None }
    }

    fn has_messages(&self) -> bool {
        self.sends && !self.sideband.outbox.is_empty()
    }

    /// Adds frames in the guest's name.
    fn add_messages(&mut self, batch: &mut Batch, drops: &mut DropSink) -> Taken {
        let sideband = &*self.sideband;
        let mut units = 0;
        while !batch.is_full() && !batch.is_spent() {
            let Some(message) = sideband.outbox.take() else { break };
            units += 1;
            let (origin, len) = (sideband.origin, message.bytes.len() as u64);
            let mut builder = batch.begin();
            // SAFETY: the bytes stay in `sent`, whose messages keep their heap memory when the vector grows, unchanged until `give_back`; the
            // batch is cleared before that call.
            unsafe { builder.push_stable(Segment::new(message.bytes.as_ptr(), message.bytes.len())) };
            match builder.finish(origin.port, origin.network, message.offload, 0) {
                Ok(()) => {
                    sideband.stats.in_frames.add(1);
                    sideband.stats.in_bytes.add(len);
                }
                Err(error) => drops.refused(&sideband.stats, origin.port, error.into(), len),
            }
            self.sent.push(message);
        }
        Taken { units, ..Taken::default() }
    }
}

impl Source for SidebandSource {
    // SAFETY: frames of the guest are the inner source's, whose `fill` has the same contract; the program's lie in `sent` until `give_back`.
    unsafe fn fill(&mut self, batch: &mut Batch, drops: &mut DropSink, now_ms: u64) -> Taken {
        // Guest and program take turns while both have frames.
        self.was_program = !self.was_program && self.has_messages();
        if self.was_program {
            return self.add_messages(batch, drops);
        }
        // SAFETY: the caller's promise is passed on.
        let mut taken = unsafe { self.inner.fill(batch, drops, now_ms) };
        if batch.frames().iter().any(|frame| frame.dst == GROUP) {
            self.sideband.take_up(batch, drops);
        }
        taken.drained &= !self.has_messages();
        taken
    }

    fn give_back(&mut self) {
        if self.was_program {
            self.sent.clear();
        } else {
            self.inner.give_back();
        }
    }

    fn watch(&mut self, waker: Waker) {
        if self.sends {
            if let Err(error) = waker.watch(self.sideband.outbox.as_fd()) {
                tracing::error!(%error, "cannot watch the frames that vnetd sends for a guest");
            }
            self.waker = Some(waker.clone());
        }
        self.inner.watch(waker);
    }

    fn unwatch(&mut self) {
        if let Some(waker) = self.waker.take() {
            waker.forget(self.sideband.outbox.as_fd());
        }
        self.inner.unwatch();
    }

    fn rest(&mut self) -> bool {
        // A message that comes after this look rings the bell, which is watched.
        self.inner.rest() && !self.has_messages()
    }

    fn resume(&mut self) {
        self.inner.resume();
    }

    fn is_unfinished(&self) -> bool {
        self.inner.is_unfinished()
    }

    fn is_held(&self) -> bool {
        self.inner.is_held()
    }

    fn polls(&self) -> bool {
        self.inner.polls()
    }

    fn reclaim(&mut self) {
        self.inner.reclaim();
    }

    fn tick(&mut self, now_ms: u64) {
        self.inner.tick(now_ms);
    }
}
