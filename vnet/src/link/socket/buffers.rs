//! Socket buffer sizing by the speed of the path.
//!
//! The receive buffer holds datagrams that arrive while a dispatcher is descheduled, the send buffer those that the device has
//! not sent yet. Both hold [`HELD_MS`] of the fastest path: less loses frames in an ordinary scheduling pause, more only adds
//! delay. The path's speed is that of its route's device, an upper bound for the rest of the path. Round trips do not matter,
//! because nothing is kept for retransmission.

use crate::wire::ip::{BURST_DATAGRAMS, DATAGRAM_MAX};

/// Milliseconds of a path's full speed that a buffer holds: three default time slices of the kernel's scheduler (about 3 ms
/// each).
const HELD_MS: usize = 10;
/// Minimum buffer size in bytes: a burst of the largest datagrams, as the queues of interfaces hold it. The kernel's doubling makes
/// room for headers.
const BYTES_MIN: usize = (BURST_DATAGRAMS * DATAGRAM_MAX).next_power_of_two();
/// Maximum buffer size in bytes, reached at 54 Gbit/s.
const BYTES_MAX: usize = 64 << 20;
/// Assumed speed in Mbit/s of devices that report none.
pub(in crate::link) const ASSUMED_MBPS: u32 = 10_000;

/// Socket buffer size in bytes for a path of `mbps` Mbit/s. The kernel doubles it for its bookkeeping (socket(7)).
pub(in crate::link) fn buffer_bytes(mbps: u32) -> usize {
    let bytes_per_ms = mbps as usize * (1_000_000 / 8 / 1000);
    (bytes_per_ms * HELD_MS).clamp(BYTES_MIN, BYTES_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_hold_some_milliseconds() {
        assert_eq!(buffer_bytes(10), BYTES_MIN);
        assert_eq!(BYTES_MIN, 4 << 20);
        assert_eq!(buffer_bytes(10_000), 12_500_000);
        assert_eq!(buffer_bytes(25_000), 31_250_000);
        assert_eq!(buffer_bytes(u32::MAX), BYTES_MAX);
    }
}
