//! How fast helper and daemon pass on datagrams between applications of its machine, of which one has the engine in its process and the other one that
//! of the daemon.
//!
//! The kernel of the machine delivers them by the loopback device, to the socket that reserves the attachment's address. The helper puts each into
//! a control frame, and the daemon hands it to the engine as if it had come from the network; the other direction likewise. A network could
//! not carry them: no bridge returns a frame to where it came from.

use std::time::{Duration, Instant};

/// The daemon takes 20 000 control frames of a guest in a second. Datagrams have three quarters of them, so that bells and signs of life go on. The
/// daemon sends no more than that, either, because each costs its thread a frame, however short it is.
const INTERVAL: Duration = Duration::from_micros(66);
/// What may be sent at once: half of the frames that may wait at the daemon, or in the helper's socket.
const BURST: Duration = Duration::from_micros(66 * 128);

/// Bounds the rate of datagrams (the generic cell rate algorithm of ITU-T I.371).
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Pace {
    /// When the datagrams until now would have been sent at the bound's even rate.
    even_until: Option<Instant>,
}

impl Pace {
    /// Counts a datagram, unless it has to wait. Returns whether it was counted.
    pub(super) fn takes(&mut self, now: Instant) -> bool {
        let may = self.full_until(now).is_none();
        if may {
            self.even_until = Some(self.even_until.map_or(now, |at| at.max(now)) + INTERVAL);
        }
        may
    }

    /// When the next datagram may be sent, if not now.
    pub(super) fn full_until(&self, now: Instant) -> Option<Instant> {
        self.even_until.filter(|at| *at > now + BURST).map(|at| at - BURST)
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
