//! A limit for the log lines that a guest or front end can bring about: the first of a second is written, the others are
//! counted and told of with the next one.

use std::time::{Duration, Instant};

/// Shortest time between two lines.
const INTERVAL: Duration = Duration::from_secs(1);

/// One source of log lines.
#[derive(Debug, Default)]
pub(super) struct LogLimit {
    last: Option<Instant>,
    unsaid: u64,
}

impl LogLimit {
    /// How many lines were not written since the last one, when this one may be; `None` when it may not.
    pub(super) fn pass(&mut self) -> Option<u64> {
        self.pass_at(Instant::now())
    }

    fn pass_at(&mut self, now: Instant) -> Option<u64> {
        if self.last.is_some_and(|last| now.duration_since(last) < INTERVAL) {
            self.unsaid += 1;
            return None;
        }
        self.last = Some(now);
        Some(std::mem::take(&mut self.unsaid))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_a_second_and_the_others_counted() {
        let (mut limit, start) = (LogLimit::default(), Instant::now());
        let passed = [0, 1, 999, 1000, 1500, 2500].map(|ms| limit.pass_at(start + Duration::from_millis(ms)));
        assert_eq!(passed, [Some(0), None, None, Some(2), None, Some(1)]);
    }
}
