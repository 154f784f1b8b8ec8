//! Lengths of the kernel's queues of a TAP, derived from bursts of the largest datagrams.
//!
//! Every queue on a frame's way holds [`BURST_DATAGRAMS`]; those of links are socket buffers, in bytes (`link/socket/buffers.rs`).

use crate::wire::ip::{BURST_DATAGRAMS, DATAGRAM_MAX};

/// Minimum queue length in frames: the kernel's default.
const QUEUE_LEN_MIN: usize = 1_000;
/// Maximum queue length in frames, reached by MTUs below 600: 512 MiB if a guest sends only frames of maximum size.
pub(super) const QUEUE_LEN_MAX: usize = 8_192;
/// Headers of a fragment in bytes: IPv6 (40) and its fragment header (8), more than IPv4's 20.
const FRAGMENT_HEADERS: usize = 48;

/// Length of a queue in frames, for frames of `mtu` bytes.
pub(super) fn queue_len(mtu: usize) -> usize {
    // Every fragment but the last carries a multiple of 8 bytes (RFC 791, RFC 8200).
    let payload = (mtu.saturating_sub(FRAGMENT_HEADERS) / 8 * 8).max(8);
    (BURST_DATAGRAMS * DATAGRAM_MAX.div_ceil(payload)).clamp(QUEUE_LEN_MIN, QUEUE_LEN_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queues_hold_bursts_of_the_largest_datagrams() {
        for (mtu, expected) in [
            (68, QUEUE_LEN_MAX),
            (1280, 64 * 54),
            (1500, 64 * 46),
            (9000, QUEUE_LEN_MIN),
            (65_535, QUEUE_LEN_MIN),
        ] {
            assert_eq!(queue_len(mtu), expected, "MTU {mtu}");
        }
    }
}
