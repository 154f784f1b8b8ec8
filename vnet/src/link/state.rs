//! The state of a link, and the selection of its changes for the log.

/// The state of a link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LinkState {
    /// A datagram has arrived from the other host, the kernel has a route to it, and it has not gone silent since it first
    /// answered. For a sealed link: the peer is heard under the current keys.
    Up,
    /// The link works, but badly or not for long; holds the reason.
    Degraded(String),
    /// No datagram has ever arrived from the other host, the host has gone silent, or a sealed link has no keys; holds the
    /// reason. Frames are still sent where possible.
    Down(String),
    /// No route to the remote; holds the kernel's error.
    Unreachable(String),
}

/// Maximum number of lines at once.
const LINES_MAX: u64 = 4;
/// Interval in ms between further lines.
const LINE_MS: u64 = 10_000;
/// How long a new link may take to come up before the log reports it as down, in ms.
const PATIENCE_MS: u64 = 3000;

/// Decides which changes of a link's state are logged: a link that flaps writes [`LINES_MAX`] lines, then one every [`LINE_MS`].
/// The last line always shows the current state, at most [`LINE_MS`] late.
#[derive(Debug, Default)]
pub(in crate::link) struct StateLog {
    /// Time at which the first state was seen.
    first_ms: Option<u64>,
    /// The state in the last line, and the state seen last.
    told: Option<Kind>,
    seen: Option<Kind>,
    /// Number of changes since the last line.
    changes: u64,
    /// Time at which the token bucket of lines is full again.
    full_ms: u64,
}

/// A state without its constantly changing numbers: two states of one kind are not a change.
type Kind = (u8, String);

fn kind(state: &LinkState) -> Kind {
    match state {
        LinkState::Up => (0, String::new()),
        LinkState::Degraded(_) => (1, String::new()),
        // The same reason with a longer silence is no change.
        LinkState::Down(why) => (2, why.split(" for ").next().unwrap_or_default().into()),
        LinkState::Unreachable(why) => (3, why.clone()),
    }
}

impl StateLog {
    /// Records the current state. Returns `Some` when it must be logged now, with the number of changes since the last line.
    pub(in crate::link) fn news(&mut self, state: &LinkState, now_ms: u64) -> Option<u64> {
        let now = kind(state);
        let age_ms = now_ms.saturating_sub(*self.first_ms.get_or_insert(now_ms));
        if self.seen.as_ref() != Some(&now) {
            self.changes += 1;
            self.seen = Some(now.clone());
        }
        let starting = self.told.is_none() && now.0 > 1 && age_ms < PATIENCE_MS;
        let has_line = self.full_ms.saturating_sub(now_ms) <= (LINES_MAX - 1) * LINE_MS;
        if starting || !has_line || self.told.as_ref() == Some(&now) {
            return None;
        }
        self.full_ms = self.full_ms.max(now_ms) + LINE_MS;
        self.told = Some(now);
        Some(std::mem::take(&mut self.changes))
    }
}

/// Logs the state of the link `name`; `what` is appended to an `up`. `changes` is the result of [`StateLog::news`].
pub(in crate::link) fn log(name: &str, state: &LinkState, what: &str, changes: u64) {
    let often =
        if changes > 1 { format!(" (changed {changes} times since the last line)") } else { String::new() };
    match state {
        LinkState::Up => tracing::info!("link {name}: up{what}{often}"),
        LinkState::Degraded(why) => tracing::warn!("link {name}: degraded: {why}{often}"),
        LinkState::Down(why) | LinkState::Unreachable(why) => {
            tracing::warn!("link {name}: down: {why}{often}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn down(why: &str) -> LinkState {
        LinkState::Down(why.into())
    }

    #[test]
    fn a_flapping_link_writes_few_lines_and_the_last_one_is_true() {
        let (mut log, mut lines) = (StateLog::default(), vec![]);
        // Half a second up, half a second down, for a minute, then up.
        for ms in (0..90_000).step_by(100) {
            let up = ms >= 60_000 || ms / 500 % 2 == 0;
            let state = if up { LinkState::Up } else { down("nothing came for 0.8 s") };
            if let Some(changes) = log.news(&state, ms) {
                lines.push((ms, up, changes));
            }
        }
        assert_eq!(lines[..4], [(0, true, 1), (500, false, 1), (1000, true, 1), (1500, false, 1)]);
        assert!(lines.len() <= 11, "{lines:?}");
        let (_, up, _) = lines.last().unwrap();
        assert!(up, "{lines:?}");
        let changes: u64 = lines.iter().map(|(_, _, changes)| changes).sum();
        assert!(changes > 90, "{lines:?}");
    }

    #[test]
    fn a_longer_silence_is_no_news_and_a_new_link_has_time() {
        let mut log = StateLog::default();
        assert_eq!(log.news(&down("nothing came yet"), 0), None);
        assert_eq!(log.news(&down("nothing came yet"), 2999), None);
        assert_eq!(log.news(&down("nothing came yet"), 3000), Some(1));
        assert_eq!(log.news(&LinkState::Up, 4000), Some(1));
        assert_eq!(log.news(&down("nothing came for 0.8 s"), 5000), Some(1));
        assert_eq!(log.news(&down("nothing came for 0.9 s"), 5100), None);
        assert_eq!(log.news(&LinkState::Unreachable("Network is unreachable".into()), 5200), Some(1));
    }
}
