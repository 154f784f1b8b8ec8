//! Encodes frames as native datagrams, gathered for one `sendmmsg`.

use std::sync::Arc;

use super::reassembly::FRAGMENTS_MAX;
use super::zero_copy_backoff::Trial;
use crate::frame::{Batch, FRAME_MAX, Frame, SEGMENTS_MAX, Segment};
use crate::link::sealed::aead::{SealingKey, TAG_LEN};
use crate::link::sending::Sending;
use crate::link::socket::name::Name;
use crate::link::socket::send_batch::Gather;
use crate::link::socket::udp::Socket;
use crate::wire::native::{ENTRY_LEN, HEADER_LEN, Header, Kind};
use crate::wire::offload::WIRE_LEN;

/// Maximum length of a frame that is bundled, in bytes. Bundles are copied; for longer frames a separate datagram costs no more.
const BUNDLE_FRAME_MAX: usize = 1024;
/// Maximum size of a bundle in bytes, even if the path allows more.
const BUNDLE_MAX: usize = 16 << 10;

/// The socket and destination of datagrams.
pub(super) struct Route<'a> {
    /// The socket's index in the sender.
    pub(super) exit: usize,
    pub(super) socket: &'a Socket,
    pub(super) name: &'a Name,
    /// Tracks whether zero copy pays off on this path.
    pub(super) trial: &'a Arc<Trial>,
}

/// Encoding parameters.
#[derive(Clone, Copy)]
pub(super) struct Encoding<'a> {
    /// Encryption key of a sealed link; `None` in clear text.
    pub(super) key: Option<&'a SealingKey>,
    /// Maximum payload in bytes.
    pub(super) size: usize,
    /// True to stop at the first datagram that exceeds the path MTU.
    pub(super) may_stop: bool,
}

impl Encoding<'_> {
    /// True when the next item fits whatever it is: a bundle, or any frame in fragments.
    #[inline]
    pub(super) fn has_room(&self, gather: &Gather) -> bool {
        // Each fragment boundary may split one more of the frame's segments.
        let slices = 2 * FRAGMENTS_MAX + SEGMENTS_MAX;
        let frame = if self.key.is_some() { FRAME_MAX + WIRE_LEN } else { 0 };
        let copies = FRAGMENTS_MAX * (HEADER_LEN + TAG_LEN) + BUNDLE_MAX.max(frame);
        gather.has_room(FRAGMENTS_MAX, slices, copies)
    }

    /// Number of leading frames of `which` that fit into one datagram; 1: the first frame is sent alone.
    #[inline]
    pub(super) fn bundled(&self, batch: &Batch, which: &[u16]) -> usize {
        bundled(batch, which, self.size)
    }

    /// Encodes several frames as one datagram.
    pub(super) fn put_bundle(&self, out: &mut Sending<'_>, which: &[u16]) {
        let header = header(out.frame(which[0]), self.key, out.link.take_numbers(1));
        let header = Header { kind: Kind::Bundle, ..header };
        out.gather.copy(&header.to_bytes());
        for &index in which {
            let frame = out.frame(index);
            let metadata = if header.offload { WIRE_LEN } else { 0 };
            out.gather.copy(&((frame.len() + metadata) as u16).to_be_bytes());
            if header.offload {
                out.gather.copy(&frame.offload.to_wire());
            }
            out.gather.copy_frame(out.batch, frame);
        }
        if let Some(key) = self.key {
            out.gather.encrypt(TAG_LEN, |datagram| key.seal(datagram));
        }
        let message = out.gather.end_datagram(true);
        for &index in which {
            out.gather.record(index, out.frame(index).len(), message, message);
        }
    }

    /// Encodes one frame as one datagram or as fragments.
    pub(super) fn put_frame(&self, out: &mut Sending<'_>, index: u16) {
        let frame = out.frame(index);
        let mut header = header(frame, self.key, 0);
        let metadata = if header.offload { WIRE_LEN } else { 0 };
        let count = (frame.len() + metadata).div_ceil(self.size);
        header.number = out.link.take_numbers(count as u64);
        let mut cursor = Cursor { segments: out.batch.segments(frame), offset: 0 };
        let (mut first, mut last) = (usize::MAX, 0);
        for k in 0..count {
            header.index = k as u16;
            header.last = k + 1 == count;
            out.gather.copy(&header.to_bytes());
            if header.offload {
                out.gather.copy(&frame.offload.to_wire());
            }
            let len = self.size - if header.offload { WIRE_LEN } else { 0 };
            match self.key {
                None => cursor.take(len, |slice| out.gather.slice(slice)),
                Some(key) => {
                    cursor.take(len, |slice| out.gather.copy_slice(slice));
                    out.gather.encrypt(TAG_LEN, |datagram| key.seal(datagram));
                }
            }
            last = out.gather.end_datagram(true);
            first = first.min(last);
            header.number += 1;
            header.offload = false;
        }
        out.gather.record(index, frame.len(), first, last);
    }
}

/// Number of leading frames of `which` that fit into one datagram; 1: the first frame is sent alone.
#[inline]
fn bundled(batch: &Batch, which: &[u16], size: usize) -> usize {
    let first = batch.frame(usize::from(which[0]));
    let kind = |frame: &Frame| (frame.network, frame.hops, frame.offload.is_none());
    let overhead = ENTRY_LEN + if first.offload.is_none() { 0 } else { WIRE_LEN };
    let mut left = size.min(BUNDLE_MAX);
    let fits = |index: &&u16| {
        let frame = batch.frame(usize::from(**index));
        let entry = overhead + frame.len();
        let fits = frame.len() <= BUNDLE_FRAME_MAX && entry <= left && kind(frame) == kind(first);
        left = left.saturating_sub(entry);
        fits
    };
    which.iter().take_while(fits).count().max(1)
}

/// The header of a datagram that holds the whole `frame` and will be encrypted with `key`.
#[inline]
pub(in crate::link) fn header(frame: &Frame, key: Option<&SealingKey>, number: u64) -> Header {
    Header {
        kind: Kind::Frame,
        last: true,
        offload: !frame.offload.is_none(),
        sealed: key.is_some(),
        hops: frame.hops,
        epoch: key.map_or(0, SealingKey::epoch),
        index: 0,
        network: frame.network.get(),
        queue: 0,
        number,
    }
}

/// A position in a frame's segments.
pub(super) struct Cursor<'a> {
    pub(super) segments: &'a [Segment],
    pub(super) offset: usize,
}

impl Cursor<'_> {
    /// Calls `with` for each slice of the next `len` bytes, or of the remaining bytes if there are fewer.
    #[inline]
    pub(super) fn take(&mut self, mut len: usize, mut with: impl FnMut(Segment)) {
        while let [segment, rest @ ..] = self.segments
            && len > 0
        {
            let slice = segment.slice(self.offset, len);
            len -= slice.len();
            self.offset += slice.len();
            with(slice);
            if self.offset == segment.len() {
                self.segments = rest;
                self.offset = 0;
            }
        }
    }
}
