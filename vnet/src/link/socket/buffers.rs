//! Sizes of socket buffers, by the speed of the path.
//!
//! The receive buffer holds what arrives while a dispatcher is kept from its core, the send buffer what the device has not sent yet.
//! Both hold [`HELD_MS`] of the fastest path: less loses frames in an ordinary scheduling pause, more only adds delay. The path's
//! speed is that of the device its route leads over, an upper bound of whatever lies behind; round trips do not matter, because
//! nothing is held for retransmission here.

/// Milliseconds of a path's full speed that a buffer holds: three time slices of other threads, as the kernel's scheduler
/// gives them by default (about 3 ms).
const HELD_MS: usize = 10;
/// Bytes that a buffer holds at least: the frames of 64 KB that a guest can have ready at once, many times.
const BYTES_MIN: usize = 4 << 20;
/// Bytes that a buffer holds at most, reached at 54 Gbit/s.
const BYTES_MAX: usize = 64 << 20;
/// The speed of devices that do not tell theirs, in Mbit/s.
pub(in crate::link) const ASSUMED_MBPS: u32 = 10_000;

/// Bytes of a socket buffer for a path of `mbps` Mbit/s. The kernel doubles it for its own bookkeeping (socket(7)).
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
        assert_eq!(buffer_bytes(10_000), 12_500_000);
        assert_eq!(buffer_bytes(25_000), 31_250_000);
        assert_eq!(buffer_bytes(u32::MAX), BYTES_MAX);
    }
}
