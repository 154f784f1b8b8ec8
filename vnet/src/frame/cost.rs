//! The cost model of deficit round robin: what a frame costs its dispatcher, in bytes copied.
//!
//! A *piece* is one contiguous run of a frame's memory: a descriptor of its chain.

use super::BATCH_MAX;
use crate::wire::offload::Offload;
use crate::wire::segment::CUTS_MAX;

/// Cost of each segment (GSO) that a receiver without offloads gets.
const SEGMENT: u64 = 1 << 10;
/// Least cost of a piece, which may lie in a page of its own.
const PIECE: u64 = 2 << 10;
/// Descriptors that a driver needs for any frame. Linux uses 19 at most: virtio-net header, linear part, `MAX_SKB_FRAGS` (17) fragments.
const PIECES_NEEDED: usize = 20;
/// And one more for each so many bytes: drivers with small fixed buffers (DPDK mbufs, 2 KiB).
const PIECE_LEN: usize = 1 << 10;
/// Least payload of a segment that a driver needs. Every host accepts TCP segments of 536 bytes (RFC 9293, section 3.7.1), of which options
/// take 40; TCP makes shorter ones only for a peer that asks for them.
const SEGMENT_LEN: usize = 400;
/// Segments that any super-frame may have, however short: `UDP_MAX_SEGMENTS` of Linux.
const SEGMENTS_MIN: usize = 128;
/// Descriptors that each further segment counts as: one limit is for both, and a segment takes more time.
const SEGMENT_PIECES: usize = 20;

/// Cost of the smallest frame, and of a refused one.
pub const COST_MIN: u64 = 16 << 10;
/// Largest quantum of a source: a full batch of minimum-cost frames.
pub const COST_MAX: u64 = BATCH_MAX as u64 * COST_MIN;

/// Cost of a frame: its length or its pieces, and its segments. Every frame costs at least [`COST_MIN`], so a batch is bounded in frames,
/// too.
#[inline]
pub(super) fn of(len: usize, pieces: usize, offload: &Offload) -> u64 {
    let bytes = (len as u64).max(PIECE * pieces as u64);
    (bytes + SEGMENT * segments(len, offload) as u64).max(COST_MIN)
}

/// Cost of a refused chain of `pieces` descriptors.
#[inline]
pub(super) fn of_refused(pieces: usize) -> u64 {
    COST_MIN + PIECE * pieces as u64
}

/// Descriptors of a frame, and segments in units of descriptors, beyond those that a driver needs.
#[inline]
pub(super) fn excess(len: usize, pieces: usize, offload: &Offload) -> usize {
    // A frame of more segments is refused, which takes no more time.
    let cut = segments(len, offload).min(CUTS_MAX);
    excess_pieces(len, pieces) + SEGMENT_PIECES * cut.saturating_sub(SEGMENTS_MIN.max(1 + len / SEGMENT_LEN))
}

/// Descriptors beyond those that a driver needs for `len` bytes.
#[inline]
pub(super) fn excess_pieces(len: usize, pieces: usize) -> usize {
    pieces.saturating_sub(PIECES_NEEDED + len / PIECE_LEN)
}

fn segments(len: usize, offload: &Offload) -> usize {
    if offload.gso_size == 0 { 1 } else { len.div_ceil(usize::from(offload.gso_size)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_drivers_send_is_no_excess() {
        assert_eq!(excess_pieces(60, 2), 0);
        assert_eq!(excess_pieces(65_550, 19), 0, "Linux: header, head, 17 fragments");
        assert_eq!(excess_pieces(65_550, 66), 0, "a super-frame in buffers of 1 KiB");
        assert_eq!(excess_pieces(60, 254), 234);
        assert_eq!(excess_pieces(0, usize::MAX), usize::MAX - 20);
        let cut = |len, gso_size| excess(len, 1, &Offload { gso_size, ..Offload::default() });
        assert_eq!(excess(65_550, 1, &Offload::default()), 0);
        // 500: path MTU 552, with time stamps.
        for gso_size in [400, 500, 524, 536, 1_220, 1_448, 8_948, u16::MAX] {
            assert_eq!(cut(65_550, gso_size), 0, "{gso_size}");
            assert_eq!(cut(100, gso_size), 0, "{gso_size}");
        }
        assert_eq!(cut(128 * 100, 100), 0, "datagrams of any size");
        assert_eq!(cut(65_550, 48), 20 * (1_366 - 164));
        assert_eq!(cut(65_550, 1), 20 * (1_366 - 164), "refused");
    }

    #[test]
    fn a_frame_costs_its_bytes_its_pieces_and_its_segments() {
        let whole = Offload::default();
        assert_eq!(of(60, 1, &whole), COST_MIN);
        assert_eq!(of(60, 254, &whole), (254 << 11) + (1 << 10));
        assert_eq!(of(64 << 10, 17, &whole), 65 << 10);
        assert_eq!(of(48_000, 1, &Offload { gso_size: 48, ..whole }), 48_000 + (1_000 << 10));
        assert_eq!(of_refused(254), COST_MIN + (254 << 11));
    }
}
