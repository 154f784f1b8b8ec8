//! The relay inside a virtual machine: datagrams between an application with the process engine and one with the daemon's engine.
//!
//! ```text
//!   process engine <-- UDP, loopback device --> helper <-- DATAGRAM frames --> daemon <-- UDP in Ethernet frames --> daemon's engine
//! ```
//!
//! The helper's socket is bound to the attachment's address, so the kernel delivers datagrams to it by the loopback device. No bridge could forward
//! them: it never returns a frame to the port that it came from. Here is the rate limit; `helper.rs` and `host.rs` relay.

use std::time::{Duration, Instant};

/// Interval of relayed datagrams at the rate limit: 15 000 in a second, in each direction. vnetd drops more than 20 000 control frames of a guest in a
/// second; the rest is for bells and keep-alives. The engine's thread spends a frame on each datagram, however short it is.
const INTERVAL: Duration = Duration::from_micros(66);
/// Burst: 128 datagrams, half of vnetd's queue of control frames.
const BURST: Duration = Duration::from_micros(66 * 128);

/// Rate limit of datagrams: the generic cell rate algorithm (ITU-T I.371).
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Pace {
    /// Theoretical arrival time of the next datagram.
    arrival: Option<Instant>,
}

impl Pace {
    /// Takes a datagram, unless it exceeds the rate limit. Returns whether it was taken.
    pub(super) fn takes(&mut self, now: Instant) -> bool {
        let may = self.full_until(now).is_none();
        if may {
            self.arrival = Some(self.arrival.map_or(now, |at| at.max(now)) + INTERVAL);
        }
        may
    }

    /// When the next datagram conforms to the rate limit, if not now.
    pub(super) fn full_until(&self, now: Instant) -> Option<Instant> {
        self.arrival.filter(|at| *at > now + BURST).map(|at| at - BURST)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_then_an_even_rate() {
        let (mut pace, start) = (Pace::default(), Instant::now());
        let sent = |pace: &mut Pace, at| (0..1000).filter(|_| pace.takes(start + at)).count();
        assert_eq!(sent(&mut pace, Duration::ZERO), 129);
        assert_eq!(pace.full_until(start), Some(start + INTERVAL));
        let later =
            (1..=10_000).map(|time| sent(&mut pace, Duration::from_micros(100) * time)).sum::<usize>();
        assert!((15_000..15_300).contains(&later), "{later}");
        assert_eq!(sent(&mut pace, Duration::from_secs(9)), 129, "what was not used is not kept");
    }
}
