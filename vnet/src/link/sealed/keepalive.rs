//! Keepalives of sealed links: 24 bytes, sealed like any datagram, five a second.
//!
//! ```text
//! 0-7    sender's clock in microseconds
//! 8-15   the receiver's clock as last received; 0: none received
//! 16-19  microseconds since it was received
//! 20     flags: 0x01 requests a rekey, 0x02 hears the receiver directly, not through a relay
//! 21-23  0
//! ```

use std::time::Instant;

use parking_lot::Mutex;

use crate::link::path::probe_health::clock_us;

/// Length in bytes of a keepalive behind its header.
pub(in crate::link) const KEEPALIVE_LEN: usize = 24;
const ASKS_REKEY: u8 = 0x01;
const HEARS_DIRECTLY: u8 = 0x02;

/// The body of a keepalive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::link) struct Keepalive {
    /// The sender's clock at the time of sending.
    pub(in crate::link) sent_us: u64,
    /// The receiver's clock as last received; 0: none received.
    echo_us: u64,
    /// Time in microseconds since it was received.
    held_us: u32,
    /// Requests that the receiver start a handshake.
    pub(in crate::link) asks_rekey: bool,
    /// True if the receiver's keepalives reach the sender without a relay.
    pub(in crate::link) hears_directly: bool,
}

impl Keepalive {
    pub(in crate::link) fn to_bytes(self) -> [u8; KEEPALIVE_LEN] {
        let mut bytes = [0; KEEPALIVE_LEN];
        bytes[..8].copy_from_slice(&self.sent_us.to_be_bytes());
        bytes[8..16].copy_from_slice(&self.echo_us.to_be_bytes());
        bytes[16..20].copy_from_slice(&self.held_us.to_be_bytes());
        let flag = |set: bool, flag: u8| if set { flag } else { 0 };
        bytes[20] = flag(self.asks_rekey, ASKS_REKEY) | flag(self.hears_directly, HEARS_DIRECTLY);
        bytes
    }

    /// Parses a body; bytes after the first 24 are ignored. `None` when it is shorter.
    pub(in crate::link) fn parse(body: &[u8]) -> Option<Keepalive> {
        let body = body.first_chunk::<KEEPALIVE_LEN>()?;
        let clock = |at: usize| u64::from_be_bytes(body[at..at + 8].try_into().expect("8 bytes"));
        Some(Keepalive {
            sent_us: clock(0),
            echo_us: clock(8),
            held_us: u32::from_be_bytes(body[16..20].try_into().expect("4 bytes")),
            asks_rekey: body[20] & ASKS_REKEY != 0,
            hears_directly: body[20] & HEARS_DIRECTLY != 0,
        })
    }
}

/// Measures the round trip with keepalives that echo each other's clock.
#[derive(Debug, Default)]
pub(in crate::link) struct Clock {
    /// The peer's clock as last received, and the time of arrival.
    last: Mutex<Option<(u64, Instant)>>,
}

impl Clock {
    /// Builds the next keepalive.
    pub(in crate::link) fn keepalive(&self, asks_rekey: bool, hears_directly: bool) -> Keepalive {
        let (echo_us, held_us) = self.last.lock().map_or((0, 0), |(clock, at)| {
            (clock, u32::try_from(at.elapsed().as_micros()).unwrap_or(u32::MAX))
        });
        Keepalive { sent_us: clock_us(), echo_us, held_us, asks_rekey, hears_directly }
    }

    /// Processes the clock of a keepalive that arrived. Returns the round trip in microseconds, at least 1, if the keepalive
    /// echoes this host's clock.
    pub(in crate::link) fn round_trip_us(&self, keepalive: &Keepalive) -> Option<u32> {
        *self.last.lock() = Some((keepalive.sent_us, Instant::now()));
        // After a restart of this host, the echo is of its former clock.
        if keepalive.echo_us == 0 || keepalive.held_us == u32::MAX {
            return None;
        }
        let passed = clock_us().checked_sub(keepalive.echo_us)?;
        let rtt = passed.checked_sub(u64::from(keepalive.held_us))?;
        u32::try_from(rtt).ok().map(|rtt| rtt.max(1))
    }
}
