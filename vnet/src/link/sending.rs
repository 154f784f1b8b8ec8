//! One call of a sender: frames, their link, and the gather buffer for their datagrams.

use super::common::Common;
use super::socket::name::Name;
use super::socket::send_batch::{Exit, Gather};
use super::socket::udp::Socket;
use crate::frame::{Batch, DropSink, Frame};
use crate::stats::DropReason;

/// Frames of one batch, leaving on one link.
pub(in crate::link) struct Sending<'a> {
    pub(in crate::link) link: &'a Common,
    pub(in crate::link) batch: &'a Batch,
    pub(in crate::link) gather: &'a mut Gather,
    pub(in crate::link) drops: &'a mut DropSink,
}

/// A datagram exceeded the path MTU: the caller must encode again from this frame on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::link) struct TooBig {
    pub(in crate::link) frame: u16,
}

impl<'a> Sending<'a> {
    #[inline]
    pub(in crate::link) fn frame(&self, index: u16) -> &'a Frame {
        self.batch.frame(usize::from(index))
    }

    /// Sends the gathered datagrams and reports the result to the path room. Stops early only with `may_stop`.
    pub(in crate::link) fn flush(
        &mut self,
        socket: &Socket,
        to: &Name,
        may_stop: bool,
    ) -> Result<(), TooBig> {
        let exit = Exit { socket, to, stats: &self.link.stats };
        let flushed = self.gather.flush(&exit, self.drops, may_stop);
        if flushed.too_big || flushed.no_segmentation {
            self.link.path.learn(&flushed);
        }
        flushed.stopped_at.map_or(Ok(()), |frame| Err(TooBig { frame }))
    }

    /// Counts one frame of the batch as dropped.
    pub(in crate::link) fn dropped(&mut self, reason: DropReason, frame: u16) {
        self.drops.dropped(&self.link.stats, reason, frame, 1);
    }

    /// Counts the frames `which` of the batch as dropped.
    pub(in crate::link) fn dropped_all(&mut self, reason: DropReason, which: &[u16]) {
        self.drops.dropped_all(&self.link.stats, reason, which);
    }
}
