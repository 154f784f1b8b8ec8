//! Rate limiter for log lines that guests, front ends or peers can trigger: at most one line per second and source. The next line
//! reports how many were suppressed.

use std::time::{Duration, Instant};

/// Minimum time between two lines.
const INTERVAL: Duration = Duration::from_secs(1);

/// The rate limiter of one source of log lines.
#[derive(Debug, Default)]
pub struct LogLimit {
    last: Option<Instant>,
    suppressed: u64,
}

impl LogLimit {
    /// Returns the number of lines suppressed since the last one if a line may be logged now, else `None`.
    pub fn allow(&mut self) -> Option<u64> {
        self.allow_at(Instant::now())
    }

    fn allow_at(&mut self, now: Instant) -> Option<u64> {
        if self.last.is_some_and(|last| now.duration_since(last) < INTERVAL) {
            self.suppressed += 1;
            return None;
        }
        self.last = Some(now);
        Some(std::mem::take(&mut self.suppressed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn allows_one_line_per_second_and_counts_the_suppressed() {
        let (mut limit, start) = (LogLimit::default(), Instant::now());
        let allowed =
            [0, 1, 999, 1000, 1500, 2500].map(|ms| limit.allow_at(start + Duration::from_millis(ms)));
        assert_eq!(allowed, [Some(0), None, None, Some(2), None, Some(1)]);
    }
}
