//! Packets in parts: DATA packets that are larger than a datagram. The node seals such a packet as a whole and sends it in several datagrams
//! (`seal/parts.rs`), which takes less time than a sealed packet for each of them. If one datagram is lost, the packet is lost: its bytes are cut
//! again into packets of one datagram, and a NOOP takes its number. On a lossy path the engine sends no packets in parts.

use std::net::SocketAddr;

use super::super::channel::{Channel, Parts, What};
use super::super::wire::{Body, DATA_HEADER, Header};
use super::Engine;

/// Maximum number of parts of a packet.
pub(crate) const PARTS_MAX: usize = 16;
/// Maximum size in bytes of all parts of a packet together, without the header of each: an L1 cache holds the packet twice.
pub(crate) const PARTED_MAX: usize = 16 << 10;
/// Sealing adds a header and a tag to a packet. Each part has the header, only the last one the tag (16 bytes), so the others hold more
/// of the packet.
pub(crate) const PART_MORE: usize = 16;
/// A path is lossy if one packet in parts of `LOSSY_ONE_IN` was lost, and at least `LOSSY_MIN`: it loses about one datagram of 200.
const LOSSY_ONE_IN: u32 = 16;
const LOSSY_MIN: u32 = 16;
/// Number of packets over which losses are counted; older ones count half.
const SAMPLE: u32 = 4096;
/// How long the channel sends no packets in parts after that.
const AVOIDED_NS: u64 = 60_000_000_000;

impl Engine {
    /// Whether the node can send packets in parts to peers at this address.
    pub fn set_parts(&mut self, address: SocketAddr, is_possible: bool) {
        self.sizes_of(address).has_parts = is_possible;
        let channel = self.addresses.get(&address).copied().and_then(|number| self.channels.get_mut(number));
        if let Some(channel) = channel {
            channel.parts.is_possible = is_possible;
        }
    }
}

impl Channel {
    /// Maximum size of a DATA packet that takes no stream.
    #[inline]
    pub(super) fn data_max(&self, now: u64) -> usize {
        let Parts { is_possible, is_taken, avoided_until, .. } = self.parts;
        if is_possible && is_taken && now >= avoided_until { self.parted_max() } else { self.datagram }
    }

    /// Maximum size of a packet in parts, or that of a datagram if it is not smaller.
    fn parted_max(&self) -> usize {
        let part = self.datagram + PART_MORE;
        let parts = (PARTED_MAX / part).min(PARTS_MAX);
        self.datagram.max((parts * part).saturating_sub(PART_MORE))
    }

    /// Counts a new packet of `bytes` bytes if it is sent in parts. Returns `Departure::parts_of`.
    #[inline]
    pub(super) fn parts_of(&mut self, bytes: usize, by_stream: bool) -> usize {
        if by_stream || bytes <= self.datagram {
            return 0;
        }
        self.parts.sent += 1;
        if self.parts.sent >= SAMPLE {
            (self.parts.sent, self.parts.lost) = (self.parts.sent / 2, self.parts.lost / 2);
        }
        self.datagram
    }

    /// Cuts bytes again for datagrams that were lost in the packet `number`, if it is larger than a datagram now: one in parts, or of shared
    /// memory that has ended, or of a path whose datagrams were larger. Returns what is sent under the packet's number.
    pub(super) fn cut_smaller(&mut self, now: u64, number: u64, what: What) -> What {
        let What::Data { serve, offset, len } = what else { return what };
        if DATA_HEADER + len as usize <= self.datagram {
            return what;
        }
        self.lost_in_parts(now);
        let instead = What::Control(Body::Noop, 0);
        self.window.replace(number, instead, Header::len(&Body::Noop, false));
        self.serve_again(serve, offset, len);
        instead
    }

    /// Counts a lost packet in parts, unless the peer may just be busy.
    fn lost_in_parts(&mut self, now: u64) {
        if self.parts.sent == 0 || now < self.parts.avoided_until || self.window.is_timed_out() {
            return;
        }
        let parts = &mut self.parts;
        parts.lost += 1;
        if parts.lost >= LOSSY_MIN && parts.lost * LOSSY_ONE_IN > parts.sent {
            (parts.sent, parts.lost, parts.avoided_until) = (0, 0, now + AVOIDED_NS);
        }
    }

    /// Queues bytes again, in front of the lane.
    pub(super) fn serve_again(&mut self, serve: u32, offset: u32, len: u32) {
        let Some(own) = self.serves.get_mut(serve) else { return };
        if own.again.is_empty() {
            self.serving.push_front(own.endpoint, serve);
        }
        own.again.push((offset, len));
    }

    /// Whether a packet of `bytes` has room for an arrival map, too.
    #[inline]
    pub(super) fn has_map_room(&self, bytes: usize, map: usize) -> bool {
        let most = if bytes > self.datagram { self.parted_max() } else { self.datagram };
        bytes + map <= most
    }
}
