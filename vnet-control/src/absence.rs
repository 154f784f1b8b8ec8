//! An interface that cannot be opened, and the backoff between attempts to open it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use vnet::interface::stand_in::Absent;

/// Backoff between attempts to open an absent interface: the first delay. Each failure doubles it, up to [`RETRY_LAST`].
const RETRY_FIRST: Duration = Duration::from_millis(50);
const RETRY_LAST: Duration = Duration::from_secs(10);
/// Minimum time between two attempts that events trigger.
const STIRRED_EVERY: Duration = Duration::from_millis(500);

/// Maximum number of quick attempts after an event: for a second.
const QUICK_MAX: u32 = 20;

/// When to try again to open an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Again {
    /// What is missing is being made, and no event shows when it is finished.
    Soon,
    /// With backoff.
    Later,
    /// Only when the configuration is applied again.
    Never,
}

/// The retry state of an interface that cannot be opened.
pub(super) struct Absence {
    stand_in: Arc<Absent>,
    attempts: u32,
    /// Number of attempts left that follow each other after [`RETRY_FIRST`].
    quick: u32,
    /// Time of the last attempt triggered by an event.
    stirred_at: Option<Instant>,
    /// Time of the next attempt; `None`: no retries until the configuration is applied again.
    pub next: Option<Instant>,
}

impl Absence {
    /// `retried`: attempts are repeated with backoff, not only when the configuration is applied again.
    pub fn new(stand_in: Arc<Absent>, retried: bool) -> Absence {
        Absence {
            stand_in,
            attempts: 0,
            quick: QUICK_MAX,
            stirred_at: None,
            next: retried.then(|| Instant::now() + RETRY_FIRST),
        }
    }

    /// Records that another attempt failed for `reason`, and schedules the next one.
    pub fn failed(&mut self, reason: String, again: Again) {
        self.stand_in.set_reason(reason);
        if again == Again::Soon && self.quick > 0 {
            self.quick -= 1;
            return self.wait(RETRY_FIRST);
        }
        self.attempts += 1;
        if again == Again::Never {
            self.next = None;
        }
        self.wait(RETRY_FIRST.saturating_mul(1 << self.attempts.min(16)).min(RETRY_LAST));
    }

    /// Schedules an early attempt: an event shows that the missing device, namespace or folder may exist now.
    pub fn stirred(&mut self) {
        let now = Instant::now();
        // An attempt itself causes events, and a foreign namespace's owner can cause any number: rate limit early attempts; the
        // backoff continues independently.
        let at = self.stirred_at.map_or(now, |last| now.max(last + STIRRED_EVERY));
        if self.next.is_some_and(|next| at < next) {
            self.quick = QUICK_MAX;
            self.stirred_at = Some(at);
            self.next = Some(at);
        }
    }

    fn wait(&mut self, time: Duration) {
        self.next = self.next.map(|_| Instant::now() + time);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_being_made_is_tried_again_at_once_but_not_for_ever() {
        let mut absence = Absence::new(Arc::new(Absent::new(String::new(), Arc::default())), true);
        let wait = |absence: &Absence| absence.next.unwrap().saturating_duration_since(Instant::now());
        // The namespace has been absent for long.
        (0..10).for_each(|_| absence.failed("absent".into(), Again::Later));
        assert!(wait(&absence) > Duration::from_secs(5));
        absence.stirred();
        for _ in 0..QUICK_MAX {
            absence.failed("being made".into(), Again::Soon);
            assert!(wait(&absence) <= RETRY_FIRST);
        }
        absence.failed("being made".into(), Again::Soon);
        assert!(wait(&absence) > Duration::from_secs(5), "it is another file");
        absence.failed("gone".into(), Again::Never);
        assert!(absence.next.is_none());
    }
}
