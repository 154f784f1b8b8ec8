//! Receives frames: one connection of a stream link as a [`Source`].
//!
//! The dispatcher that serves the slot reads all available bytes into the source's inbox, and forwards the frames from there
//! without copying. The rest of the inbox is moved to its start only when all complete messages are processed.

use std::sync::Arc;

use super::connection::Inbox;
use super::connections::Stream;
use crate::frame::{Batch, DropSink};
use crate::link::Link;
use crate::link::intake::Intake;
use crate::poll::Waker;
use crate::source::{Source, Taken};
use crate::stats::DiscardReason;
use crate::wire::stream::{self, Content};

/// One connection slot of a stream link.
struct StreamSource {
    link: Arc<Link>,
    slot: usize,
    inbox: Inbox,
    /// Number of processed bytes of the inbox; the rest is left for the next fill if `more`.
    at: usize,
    more: bool,
}

impl Link {
    /// The source of the connection in `slot`; `None` if the link is not a stream.
    pub fn stream_source(self: &Arc<Link>, slot: usize) -> Option<Box<dyn Source>> {
        self.stream()?;
        let inbox = Inbox::default();
        Some(Box::new(StreamSource { link: self.clone(), slot, inbox, at: 0, more: false }))
    }
}

impl StreamSource {
    /// Adds the frames of the inbox from `at` on, until the batch is full. Returns the number of messages.
    fn work(&mut self, stream: &Stream, intake: &mut Intake<'_>) -> usize {
        let link = &*self.link;
        let (mut messages, mut broken) = (0, None);
        intake.claims = self.inbox.claims.clone();
        self.more = false;
        loop {
            if intake.batch.is_full() {
                self.more = true;
                // Events that arrive before the inbox is processed trigger no read, so the next read must check the socket.
                stream.slots[self.slot].mark_undrained();
                break;
            }
            let (message, len) = match stream::next(&self.inbox.bytes()[self.at..]) {
                Ok(Some(found)) => found,
                Ok(None) => break,
                Err(error) => {
                    broken = Some(error);
                    break;
                }
            };
            self.at += len;
            messages += 1;
            match message {
                Content::Frame(header, offload, frame) => intake.native(link, &header, offload, frame),
                Content::Keepalive => {}
                Content::Bad => link.stats.discard(DiscardReason::BadHeader, 1),
            }
        }
        intake.count(link);
        link.stats.in_datagrams.add(messages as u64);
        if let Some(error) = broken {
            // With an impossible length, the start of the next message cannot be found.
            link.stats.discard(DiscardReason::BadHeader, 1);
            let mut current = stream.slots[self.slot].connection.lock();
            // The bytes may belong to an earlier connection than the current one.
            if current.as_ref().is_some_and(|connection| connection.filled(&self.inbox)) {
                stream.close(&mut current, format!("the other end sent {error}"));
            }
        }
        messages
    }
}

impl Source for StreamSource {
    fn is_unfinished(&self) -> bool {
        self.more
    }

    // SAFETY: frames lie in `inbox`, from which only `give_back` consumes bytes.
    unsafe fn fill(&mut self, batch: &mut Batch, drops: &mut DropSink, now_ms: u64) -> Taken {
        let nothing = Taken { drained: true, ..Taken::default() };
        let link = self.link.clone();
        let Some(stream) = link.stream() else { return nothing };
        if !self.more && !stream.fill(&stream.slots[self.slot], &mut self.inbox) {
            return nothing;
        }
        let units = self.work(stream, &mut Intake::new(batch, drops, now_ms));
        Taken { units, drained: !self.more, ..Taken::default() }
    }

    fn give_back(&mut self) {
        if !self.more {
            self.inbox.consume(std::mem::take(&mut self.at));
        }
    }

    fn watch(&mut self, waker: Waker) {
        if let Some(stream) = self.link.stream() {
            stream.attach(self.slot, waker);
        }
    }

    fn unwatch(&mut self) {
        if let Some(stream) = self.link.stream() {
            stream.detach(self.slot);
        }
    }

    /// Connections are always watched edge-triggered; only an empty read guarantees an edge for the next bytes.
    fn rest(&mut self) -> bool {
        !self.more && self.link.stream().is_none_or(|stream| stream.is_drained(self.slot))
    }
}
