//! Frames over a stream link's connections. The dispatchers call this; no thread of the link's own touches a frame.

use std::io;

use super::connection::{Connection, Inbox};
use crate::frame::{Batch, NetworkId, Segment};
use crate::link::Link;
use crate::link::native::encode;
use crate::link::sealed::identity::Claims;
use crate::stats::{DiscardReason, DropReason};
use crate::wire::ethernet;
use crate::wire::native::{HOPS_MAX, Header};
use crate::wire::offload::Offload;
use crate::wire::stream::{self, Content, LengthError, Prefix};

impl Link {
    /// Sends what waits in `slot`, then takes what has arrived and has `run` take its frames to completion. `batch` is empty on
    /// entry and on return. Returns the number of messages.
    pub fn stream_receive(&self, slot: usize, batch: &mut Batch, run: &mut dyn FnMut(&Batch)) -> usize {
        let Some(stream) = self.stream() else { return 0 };
        let slot = &stream.slots[slot];
        let mut inbox = slot.inbox.lock();
        if !stream.fill(slot, &mut inbox) {
            return 0;
        }
        let result = self.run_messages(&mut inbox, batch, run);
        match result {
            Ok(messages) => messages,
            Err(error) => {
                // A length that makes no sense leaves no way to find the next message.
                self.stats.discard(DiscardReason::BadHeader, 1);
                stream.close(&mut slot.connection.lock(), format!("the other end sent {error}"));
                0
            }
        }
    }

    fn run_messages(
        &self,
        inbox: &mut Inbox,
        batch: &mut Batch,
        run: &mut dyn FnMut(&Batch),
    ) -> Result<usize, LengthError> {
        let (mut at, mut messages) = (0, 0);
        let mut bytes = 0;
        let mut flush = |batch: &mut Batch, bytes: &mut u64| {
            self.stats.in_frames.add(batch.len() as u64);
            self.stats.in_bytes.add(std::mem::take(bytes));
            if !batch.is_empty() {
                run(batch);
                batch.clear();
            }
        };
        let result = loop {
            let (message, len) = match stream::next(&inbox.bytes()[at..]) {
                Ok(Some(found)) => found,
                Ok(None) => break Ok(messages),
                Err(error) => break Err(error),
            };
            at += len;
            messages += 1;
            match message {
                Content::Frame(header, offload, frame) => {
                    if batch.is_full() {
                        flush(batch, &mut bytes);
                    }
                    bytes += self.enter(inbox.claims.as_deref(), batch, &header, offload, frame);
                }
                Content::Keepalive => {}
                Content::Bad => self.stats.discard(DiscardReason::BadHeader, 1),
            }
        };
        flush(batch, &mut bytes);
        self.stats.in_datagrams.add(messages as u64);
        inbox.consume(at);
        result
    }

    /// Adds one frame to the batch. Returns its bytes, or 0 when it is refused.
    fn enter(
        &self,
        claims: Option<&Claims>,
        batch: &mut Batch,
        header: &Header,
        offload: Offload,
        frame: &[u8],
    ) -> u64 {
        let len = frame.len() as u64;
        let allowed = |network: &NetworkId| {
            self.carries(*network) && claims.is_none_or(|claims| claims.allows_network(*network))
        };
        let Some(network) = NetworkId::new(header.network).filter(allowed) else {
            self.stats.refuse(DropReason::WrongNetwork, len);
            return 0;
        };
        if let Some((_, src)) = ethernet::addresses(frame)
            && !(self.allows_source(src) && claims.is_none_or(|claims| claims.allows_source(src)))
        {
            self.stats.refuse(DropReason::BadSource, len);
            return 0;
        }
        let mut builder = batch.begin();
        // SAFETY: the frame lies in the inbox, which the caller keeps locked and unchanged until it has cleared the batch.
        unsafe { builder.push_stable(Segment::new(frame.as_ptr(), frame.len())) };
        match builder.finish(self.port, network, offload, header.hops + 1) {
            Ok(()) => len,
            Err(error) => {
                self.stats.refuse(error.into(), len);
                0
            }
        }
    }

    /// Sends the frames `which` on the dialed connection, or on the accepted one while there is no other. Counts each frame as
    /// out or dropped.
    pub fn stream_send(&self, batch: &Batch, which: &[u16]) {
        let Some(stream) = self.stream() else { return };
        for slot in &stream.slots {
            let mut current = slot.connection.lock();
            if let Some(connection) = &mut *current {
                if let Err(error) = self.put_frames(connection, batch, which) {
                    stream.close(&mut current, format!("the connection ended: {error}"));
                }
                return;
            }
        }
        self.stats.drop_frames(DropReason::NotReady, which.len() as u64);
    }

    fn put_frames(&self, connection: &mut Connection, batch: &Batch, which: &[u16]) -> io::Result<()> {
        let (mut frames, mut bytes) = (0, 0);
        let mut result = Ok(());
        for &index in which {
            let frame = batch.frame(usize::from(index));
            if frame.hops > HOPS_MAX {
                self.stats.drop_frames(DropReason::HopLimit, 1);
                continue;
            }
            let header = encode::header(frame, None, self.take_numbers(1));
            let prefix = Prefix::new(&header, &frame.offload, frame.len());
            result = result.and_then(|()| connection.make_room(prefix.bytes().len() + frame.len()));
            if result.is_err() {
                self.stats.drop_frames(DropReason::SendFailed, 1);
            } else if connection.put(prefix.bytes(), frame.len(), |to| _ = batch.copy_to(frame, to)) {
                frames += 1;
                bytes += frame.len() as u64;
            } else {
                self.stats.drop_frames(DropReason::NoBuffer, 1);
            }
        }
        self.stats.delivered(frames, bytes);
        self.stats.out_datagrams.add(frames);
        result.and_then(|()| connection.flush())
    }
}
