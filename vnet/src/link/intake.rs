//! Turns received bytes into frames of a batch: access checks and counters, shared by all kinds of links.

use std::sync::Arc;

use super::Link;
use super::sealed::identity::Claims;
use crate::frame::{Batch, DropSink, NetworkId, Segment};
use crate::stats::DropReason;
use crate::wire::ethernet::{self, Mac};
use crate::wire::native::Header;
use crate::wire::offload::Offload;

/// One fill of a link's source.
///
/// The passed bytes lie in the source's memory and stay unchanged until the batch is cleared (contract of
/// [`Source::fill`](crate::source::Source::fill)).
pub(in crate::link) struct Intake<'a> {
    pub(in crate::link) batch: &'a mut Batch,
    pub(in crate::link) drops: &'a mut DropSink,
    /// Time on the dispatchers' clock.
    pub(in crate::link) now_ms: u64,
    /// Limits from the certificate of the current message's sender; `None`: no certificate.
    pub(in crate::link) claims: Option<Arc<Claims>>,
    /// Number of frames added but not counted yet, all from one link.
    frames: u64,
    bytes: u64,
}

impl<'a> Intake<'a> {
    pub(in crate::link) fn new(batch: &'a mut Batch, drops: &'a mut DropSink, now_ms: u64) -> Intake<'a> {
        Intake { batch, drops, now_ms, claims: None, frames: 0, bytes: 0 }
    }

    /// True when the other host may send frames of `network`.
    #[inline]
    fn allows_network(&self, link: &Link, network: NetworkId) -> bool {
        link.carries(network) && self.claims.as_ref().is_none_or(|claims| claims.allows_network(network))
    }

    /// True when the other host may send frames with the source `mac`.
    #[inline]
    fn allows_source(&self, link: &Link, mac: Mac) -> bool {
        link.allows_source(mac) && self.claims.as_ref().is_none_or(|claims| claims.allows_source(mac))
    }

    /// Counts the frames added for `link`.
    pub(in crate::link) fn count(&mut self, link: &Link) {
        link.stats.in_frames.add(std::mem::take(&mut self.frames));
        link.stats.in_bytes.add(std::mem::take(&mut self.bytes));
    }

    #[cold]
    pub(in crate::link) fn refuse(&mut self, link: &Link, reason: DropReason, bytes: usize) {
        self.drops.refused(&link.stats, link.port, reason, bytes as u64);
    }

    /// Adds a contiguous frame with a native header, from a datagram or a stream.
    #[inline]
    pub(in crate::link) fn native(&mut self, link: &Link, header: &Header, offload: Offload, frame: &[u8]) {
        match NetworkId::new(header.network) {
            Some(network) => self.frame(link, network, offload, header.hops + 1, frame),
            None => self.refuse(link, DropReason::WrongNetwork, frame.len()),
        }
    }

    /// Adds a contiguous frame.
    #[inline]
    pub(in crate::link) fn frame(
        &mut self,
        link: &Link,
        network: NetworkId,
        offload: Offload,
        hops: u8,
        frame: &[u8],
    ) {
        self.pieces(link, network, (offload, hops), std::iter::once(frame));
    }

    /// Adds a frame that consists of several pieces.
    #[inline]
    pub(in crate::link) fn pieces<'b>(
        &mut self,
        link: &Link,
        network: NetworkId,
        (offload, hops): (Offload, u8),
        pieces: impl Iterator<Item = &'b [u8]> + Clone,
    ) {
        let len = || pieces.clone().map(<[u8]>::len).sum::<usize>();
        if !self.allows_network(link, network) {
            return self.refuse(link, DropReason::WrongNetwork, len());
        }
        if (link.macs.is_some() || self.claims.is_some())
            && let Some(source) = source(pieces.clone())
            && !self.allows_source(link, source)
        {
            return self.refuse(link, DropReason::BadSource, len());
        }
        let mut builder = self.batch.begin();
        for piece in pieces.clone() {
            // SAFETY: the piece lies in memory of the source, unchanged until the batch is cleared; see the comment on the type.
            unsafe { builder.push_stable(Segment::new(piece.as_ptr(), piece.len())) };
        }
        let bytes = builder.len();
        match builder.finish(link.port, network, offload, hops) {
            Ok(()) => {
                self.frames += 1;
                self.bytes += bytes as u64;
            }
            Err(error) => self.refuse(link, error.into(), bytes),
        }
    }
}

/// The source address of the frame in `pieces`; `None` when the frame is too short.
fn source<'b>(pieces: impl Iterator<Item = &'b [u8]>) -> Option<Mac> {
    let mut head = [0; ethernet::HEADER_LEN];
    let mut at = 0;
    for piece in pieces {
        let part = piece.len().min(head.len() - at);
        head[at..at + part].copy_from_slice(&piece[..part]);
        at += part;
        if at == head.len() {
            break;
        }
    }
    ethernet::addresses(&head[..at]).map(|(_, source)| source)
}
