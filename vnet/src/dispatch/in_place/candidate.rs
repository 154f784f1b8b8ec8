//! Guesses the layout in datagrams of a frame whose first message was peeked. Performs no I/O.

use std::sync::Arc;

use super::port::{PEEK_LEN, Peeked, UnderlayPort};
use crate::frame::{FRAME_MAX, HEAD_MAX, NetworkId};
use crate::link::native::reassembly::FRAGMENTS_MAX;
use crate::link::socket::message::Report;
use crate::link::{Encapsulation, Link, Peers};
use crate::wire::ethernet::{self, Mac};
use crate::wire::ip;
use crate::wire::native::{HEADER_LEN, Header, Kind, metadata};
use crate::wire::offload::Offload;

/// Minimum frame length in bytes for receiving in place: below it, the two extra system calls cost more than the copy.
pub(super) const LEN_MIN: usize = 4096;

/// A frame that starts in the next message, with its guessed layout.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate {
    /// Network of the frame.
    pub(super) network: NetworkId,
    /// Destination address.
    pub(super) dst: Mac,
    /// Source address.
    pub(super) src: Mac,
    /// Length in bytes.
    pub(super) len: usize,
    /// Outstanding offloads, checked against the length.
    pub(super) offload: Offload,
    head: [u8; HEAD_MAX],
    header: Header,
    /// Bytes of metadata in front of the frame.
    pub(super) metadata: usize,
    /// Payload of each datagram but the last.
    size: usize,
    /// Number of datagrams.
    pub(super) count: usize,
    /// The frame's first message, as peeked.
    pub(super) first: Report,
}

impl Candidate {
    /// The frame's first bytes, in a private copy that no guest can change.
    pub(super) fn head(&self) -> &[u8] {
        &self.head
    }

    /// Payload of datagram `k`.
    pub(super) fn payload(&self, k: usize) -> usize {
        (self.len + self.metadata - k * self.size).min(self.size)
    }

    /// The header expected on datagram `k`.
    pub(super) fn header(&self, k: usize) -> [u8; HEADER_LEN] {
        let first = k == 0;
        let (index, number) = (k as u16, self.header.number.wrapping_add(k as u64));
        let (last, offload) = (k + 1 == self.count, self.header.offload && first);
        Header { last, offload, index, number, ..self.header }.to_bytes()
    }

    /// Peeks at the next message. `None` unless it continues the frame with datagram `k`.
    pub(super) fn following(&self, direct: &UnderlayPort, k: usize) -> Option<Report> {
        let Peeked { source, len, segment, head } = direct.peek()?;
        (head[..HEADER_LEN] == self.header(k)).then_some(Report { source, len, segment, truncated: false })
    }

    /// Number of datagrams that carry the frame.
    pub(super) fn datagrams(&self) -> usize {
        self.count
    }

    /// Number of datagrams, from `k` on, in a message of `len` bytes; `None` if the message does not fit this frame.
    pub(super) fn part(&self, k: usize, len: usize, segment: usize) -> Option<usize> {
        let whole = HEADER_LEN + self.size;
        let count = len.div_ceil(whole);
        let short = if k + count == self.count { self.size - self.payload(self.count - 1) } else { 0 };
        let fits = k + count <= self.count && len + short == count * whole;
        // All datagrams of the message but the last are as long as the segment.
        let alike = if count == 1 { segment >= len } else { segment == whole };
        (fits && alike).then_some(count)
    }
}

impl Peeked {
    /// The link of the peeked message and the frame that starts in it. `None` when the frame must not be received in place.
    pub(super) fn candidate<'a>(&self, peers: &'a Peers) -> Option<(&'a Arc<Link>, Candidate)> {
        let link = peers.link(self.source.address()?)?;
        if link.options().kind.encapsulation() != Encapsulation::Native || link.needs_seal() {
            return None;
        }
        let (header, payload) = Header::parse(self.head.get(..self.len.min(PEEK_LEN))?).ok()?;
        if header.kind != Kind::Frame || header.index != 0 || header.sealed {
            return None;
        }
        let (offload, frame) = metadata(payload, header.offload)?;
        let head: [u8; HEAD_MAX] = *frame.first_chunk()?;
        let metadata = payload.len() - frame.len();
        let (len, size) = if header.last {
            let payload = self.len.checked_sub(HEADER_LEN)?;
            (payload - metadata, payload)
        } else {
            // The routing decision needs the whole head, which must lie in the first datagram.
            let whole = |size: &usize| *size >= metadata + HEAD_MAX;
            (guessed_len(&head)?, self.segment.checked_sub(HEADER_LEN).filter(whole)?)
        };
        if !(LEN_MIN..=FRAME_MAX).contains(&len) {
            return None;
        }
        let count = (len + metadata).div_ceil(size);
        let (dst, src) = ethernet::addresses(&head)?;
        let network = NetworkId::new(header.network).filter(|network| link.carries(*network))?;
        let offload = offload.checked(len).ok()?;
        let first = Report { source: self.source, len: self.len, segment: self.segment, truncated: false };
        let candidate =
            Candidate { network, dst, src, len, offload, head, header, metadata, size, count, first };
        let possible = link.allows_source(src) && (count == 1) == header.last && count <= FRAGMENTS_MAX;
        candidate.part(0, self.len, self.segment).filter(|_| possible)?;
        Some((link, candidate))
    }
}

/// The length of an untagged frame according to its IP header. Only a guess: the peer wrote the header.
fn guessed_len(head: &[u8; HEAD_MAX]) -> Option<usize> {
    let (offset, ip) = ip::in_frame(head)?;
    (offset == ethernet::HEADER_LEN).then_some(offset + ip.total_len)
}
