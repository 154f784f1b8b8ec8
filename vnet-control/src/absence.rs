//! An interface that cannot be opened, and the backoff until it is tried again.

use std::sync::Arc;
use std::time::{Duration, Instant};

use vnet::interface::stand_in::Absent;

/// Backoff: time until an interface that cannot be opened is tried again, doubled after each attempt up to the last.
const RETRY_FIRST: Duration = Duration::from_millis(50);
const RETRY_LAST: Duration = Duration::from_secs(10);
/// Shortest time between two attempts that events ask for.
const STIRRED_EVERY: Duration = Duration::from_millis(500);

/// An interface that cannot be opened.
pub(super) struct Absence {
    stand_in: Arc<Absent>,
    attempts: u32,
    /// Time of the last attempt that an event asked for.
    stirred_at: Option<Instant>,
    /// When to try again; `None`: only when the configuration is applied again.
    pub next: Option<Instant>,
}

impl Absence {
    /// `retried`: not only when the configuration is applied again.
    pub fn new(stand_in: Arc<Absent>, retried: bool) -> Absence {
        Absence {
            stand_in,
            attempts: 0,
            stirred_at: None,
            next: retried.then(|| Instant::now() + RETRY_FIRST),
        }
    }

    /// Another attempt has failed for `reason`.
    pub fn failed(&mut self, reason: String) {
        self.stand_in.set_reason(reason);
        self.attempts += 1;
        self.wait(RETRY_FIRST.saturating_mul(1 << self.attempts.min(16)).min(RETRY_LAST));
    }

    /// Something happened that the interface may have waited for.
    pub fn stirred(&mut self) {
        let now = Instant::now();
        // An attempt causes events itself, and so may the owner of another namespace: the backoff goes on beside this.
        let at = self.stirred_at.map_or(now, |last| now.max(last + STIRRED_EVERY));
        if self.next.is_some_and(|next| at < next) {
            self.stirred_at = Some(at);
            self.next = Some(at);
        }
    }

    fn wait(&mut self, time: Duration) {
        self.next = self.next.map(|_| Instant::now() + time);
    }
}
