//! A bound for what happens in a second.

use std::time::{Duration, Instant};

const SECOND: Duration = Duration::from_secs(1);

/// Counts what happens in a second. The next one begins with the first event after its end.
#[derive(Clone, Copy, Debug, Default)]
pub struct PerSecond {
    since: Option<Instant>,
    count: u32,
}

impl PerSecond {
    /// Counts an event, unless there were `most` of them in this second. Returns whether it was counted.
    pub fn takes(&mut self, now: Instant, most: u32) -> bool {
        let is_left = self.full_until(now, most).is_none();
        if is_left {
            let is_same = self.since.is_some_and(|since| now.saturating_duration_since(since) < SECOND);
            (self.since, self.count) = if is_same { (self.since, self.count + 1) } else { (Some(now), 1) };
        }
        is_left
    }

    /// When the next event is taken, if there were `most` of them in this second.
    pub fn full_until(&self, now: Instant, most: u32) -> Option<Instant> {
        self.since.map(|since| since + SECOND).filter(|end| now < *end && self.count >= most)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_takes_so_many_and_the_next_one_as_many() {
        let (mut bound, start) = (PerSecond::default(), Instant::now());
        let at = |ms| start + Duration::from_millis(ms);
        assert_eq!((0..10).filter(|ms| bound.takes(at(*ms), 3)).count(), 3);
        assert_eq!(bound.full_until(at(500), 3), Some(at(1000)));
        assert_eq!(bound.full_until(at(500), 4), None);
        assert!(!bound.takes(at(999), 3));
        assert_eq!((1000..1010).filter(|ms| bound.takes(at(*ms), 3)).count(), 3);
        assert_eq!(bound.full_until(at(1999), 3), Some(at(2000)));
    }
}
