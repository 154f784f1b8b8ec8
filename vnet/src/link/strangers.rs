//! Log lines about datagrams from addresses that no link has; control shows the last one.

use std::net::SocketAddr;

use crate::stats::PortStats;

/// Minimum interval between two lines, in ms.
const INTERVAL_MS: u64 = 1000;
/// Minimum interval between two lines about the same address, in ms.
const REPEAT_MS: u64 = 60_000;

/// State of one receiver's log lines about unknown sources. Any host can send to its port, so the lines are rate-limited.
#[derive(Debug, Default)]
pub(in crate::link) struct Strangers {
    last: Option<(SocketAddr, u64)>,
    /// Number of datagrams since the last line.
    datagrams: u64,
}

impl Strangers {
    /// Records `datagrams` datagrams from `source`, which no link has, in the bridge's counters.
    #[cold]
    pub(in crate::link) fn note(
        &mut self,
        source: SocketAddr,
        datagrams: u64,
        now_ms: u64,
        bridge: &PortStats,
    ) {
        if bridge.last_stranger.is_silent() {
            return;
        }
        if let Some(datagrams) = self.line(source, datagrams, now_ms) {
            bridge.last_stranger.note(source);
            let what = match datagrams {
                1 => "a datagram from an address that no link has (unknown_source):".into(),
                n => format!("{n} datagrams from addresses that no link has (unknown_source), the last from"),
            };
            tracing::warn!(
                "{what} {source}: if that is a host of the overlay, write its address and port as the remote of a [[link]]"
            );
        }
    }

    /// Returns `Some` when a line is due, with the number of datagrams since the last line.
    fn line(&mut self, source: SocketAddr, datagrams: u64, now_ms: u64) -> Option<u64> {
        self.datagrams += datagrams;
        let rest_ms = |(last, _)| if last == source { REPEAT_MS } else { INTERVAL_MS };
        if self.last.is_some_and(|last| now_ms.saturating_sub(last.1) < rest_ms(last)) {
            return None;
        }
        self.last = Some((source, now_ms));
        Some(std::mem::take(&mut self.datagrams))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stranger_is_named_once_a_minute_and_another_one_after_a_second() {
        let mut strangers = Strangers::default();
        let [a, b] = ["10.0.0.7:9000", "10.0.0.8:9000"].map(|text| text.parse::<SocketAddr>().unwrap());
        assert_eq!(strangers.line(a, 3, 0), Some(3));
        assert_eq!(strangers.line(b, 1, 999), None);
        assert_eq!(strangers.line(a, 5, 1000), None);
        assert_eq!(strangers.line(b, 1, 1000), Some(7));
        assert_eq!(strangers.line(b, 1, 60_999), None);
        assert_eq!(strangers.line(b, 1, 61_000), Some(2));
    }
}
