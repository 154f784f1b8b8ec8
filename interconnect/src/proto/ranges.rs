//! Set of byte ranges: which bytes of a pull have arrived. Bytes of a stream that closes may arrive twice, so counting is not enough.

use super::window::WINDOW;

/// Maximum number of ranges. A gap is a packet in flight, so an honest peer makes fewer than one per packet of its window.
const RANGES_MAX: usize = 2 * WINDOW;

/// More gaps than packets in flight: a violation of the protocol.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct TooMany;

#[derive(Default)]
pub(super) struct Ranges {
    /// Begin and end, in order; neighbours do not touch.
    ranges: Vec<(u64, u64)>,
    bytes: u64,
}

impl Ranges {
    /// Number of bytes that have arrived.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Adds the bytes from `from` to `to`. Returns the number of those that are new.
    pub(super) fn add(&mut self, from: u64, to: u64) -> Result<u64, TooMany> {
        if from >= to {
            return Ok(0);
        }
        // Fast path: in order.
        if let Some(last) = self.ranges.last_mut().filter(|last| last.1 == from) {
            last.1 = to;
            self.bytes += to - from;
            return Ok(to - from);
        }
        // Ranges that overlap or touch the new one.
        let first = self.ranges.partition_point(|range| range.1 < from);
        let after = first + self.ranges[first..].partition_point(|range| range.0 <= to);
        if first == after {
            if self.ranges.len() >= RANGES_MAX {
                return Err(TooMany);
            }
            self.ranges.insert(first, (from, to));
            self.bytes += to - from;
            return Ok(to - from);
        }
        let known: u64 = self.ranges[first..after].iter().map(|range| range.1 - range.0).sum();
        let joined = (from.min(self.ranges[first].0), to.max(self.ranges[after - 1].1));
        self.ranges[first] = joined;
        self.ranges.drain(first + 1..after);
        let new = joined.1 - joined.0 - known;
        self.bytes += new;
        Ok(new)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::mix;
    use super::*;

    #[test]
    fn bytes_count_once_in_whatever_order_they_arrive() {
        const LEN: u64 = 300;
        let mut random = 1;
        for _ in 0..2_000 {
            let (mut ranges, mut has) = (Ranges::default(), [false; LEN as usize]);
            for _ in 0..40 {
                let from = mix(&mut random) % LEN;
                let to = from + mix(&mut random) % (LEN - from + 1) / (1 + mix(&mut random) % 8);
                let new = (from..to).filter(|at| !std::mem::replace(&mut has[*at as usize], true)).count();
                assert_eq!(ranges.add(from, to), Ok(new as u64), "{from} to {to}");
                assert_eq!(ranges.bytes(), has.iter().filter(|has| **has).count() as u64);
                assert!(ranges.ranges.windows(2).all(|two| two[0].1 < two[1].0), "{:?}", ranges.ranges);
            }
        }
    }

    #[test]
    fn gaps_are_bounded() {
        let mut ranges = Ranges::default();
        (0..RANGES_MAX as u64).for_each(|at| assert_eq!(ranges.add(2 * at, 2 * at + 1), Ok(1)));
        assert_eq!(ranges.add(1 << 40, (1 << 40) + 1), Err(TooMany));
        assert_eq!(ranges.add(1, 2), Ok(1), "this one fills a gap");
        assert_eq!(ranges.add(1 << 40, (1 << 40) + 1), Ok(1));
    }
}
