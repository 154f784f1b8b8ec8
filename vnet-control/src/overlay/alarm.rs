//! Alarms: what is wrong with the store or with what others write there. Each kind is counted, shown, and logged at most
//! once in [`LOG_MS`], so that nobody can fill a disk by way of the store.

use std::collections::BTreeMap;

use super::super::api;

/// Milliseconds between two lines of the log about one kind of alarm.
const LOG_MS: u64 = 10_000;

/// What can be wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Alarm {
    /// A key or value that is no record of this version.
    Garbage,
    /// A record of this host was written by somebody else.
    Forged,
    /// A record that its writer's certificate does not vouch for.
    Untrusted,
    /// A record that its writer has replaced since, written again.
    Replayed,
    /// A claim whose sequence number is not newer, or newer beyond belief.
    Sequence,
    /// A station that several hosts claim again and again.
    Frozen,
    /// A claim in the name of a host that is not there.
    UnknownHost,
    /// Two hosts at one address, or one at several.
    Address,
    /// Another host uses this one's name.
    Name,
    /// More hosts or stations than a host keeps.
    Limit,
    /// The store has lost records that nobody withdrew.
    Vanished,
    /// The store takes nothing: its disk is full, or this host may not write.
    Write,
    /// What was computed could not be carried out.
    Apply,
}

impl Alarm {
    /// All of them.
    pub const ALL: [Alarm; 13] = [
        Alarm::Garbage,
        Alarm::Forged,
        Alarm::Untrusted,
        Alarm::Replayed,
        Alarm::Sequence,
        Alarm::Frozen,
        Alarm::UnknownHost,
        Alarm::Address,
        Alarm::Name,
        Alarm::Limit,
        Alarm::Vanished,
        Alarm::Write,
        Alarm::Apply,
    ];

    /// Its stable name.
    pub fn name(self) -> &'static str {
        self.words().0
    }

    /// What is wrong, for people.
    pub fn help(self) -> &'static str {
        self.words().1
    }

    fn words(self) -> (&'static str, &'static str) {
        match self {
            Alarm::Garbage => ("garbage", "a key or value that is no record of this version"),
            Alarm::Forged => {
                ("forged", "a record of this host was written by somebody else; it was put right")
            }
            Alarm::Untrusted => ("untrusted", "a record that its writer's certificate does not vouch for"),
            Alarm::Replayed => {
                ("replayed", "a record that its writer has replaced since was written again by somebody else")
            }
            Alarm::Sequence => ("sequence", "a claim whose sequence number is not among the next ones"),
            Alarm::Frozen => ("frozen", "several hosts claim one object again and again"),
            Alarm::UnknownHost => ("unknown_host", "a claim in the name of a host that is not there"),
            Alarm::Address => ("address", "two hosts at one address, or one at several"),
            Alarm::Name => ("name", "another host uses this one's name"),
            Alarm::Limit => ("limit", "more hosts or stations than are kept"),
            Alarm::Vanished => ("vanished", "the store has lost records that nobody withdrew"),
            Alarm::Write => (
                "write",
                "the store takes nothing: its disk is full, or this host may not write, or not that",
            ),
            Alarm::Apply => ("apply", "what was computed could not be carried out"),
        }
    }
}

/// The alarms of a host, by kind.
#[derive(Debug, Default)]
pub(super) struct Alarms(BTreeMap<Alarm, Raised>);

#[derive(Debug)]
struct Raised {
    count: u64,
    text: String,
    last_ms: u64,
    logged_ms: u64,
}

impl Alarms {
    pub fn raise(&mut self, alarm: Alarm, now_ms: u64, text: String) {
        let name = alarm.name();
        let new = || Raised { count: 0, text: String::new(), last_ms: now_ms, logged_ms: 0 };
        let raised = self.0.entry(alarm).or_insert_with(new);
        if raised.count == 0 || now_ms >= raised.logged_ms + LOG_MS {
            tracing::warn!(alarm = name, count = raised.count + 1, "overlay: {text}");
            raised.logged_ms = now_ms;
        }
        raised.count += 1;
        (raised.text, raised.last_ms) = (text, now_ms);
    }

    pub fn total(&self) -> u64 {
        self.0.values().map(|raised| raised.count).sum()
    }

    pub fn show(&self, now_ms: u64) -> Vec<api::Alarm> {
        let show = |(alarm, raised): (&Alarm, &Raised)| api::Alarm {
            name: alarm.name().into(),
            count: raised.count,
            text: raised.text.clone(),
            age_s: now_ms.saturating_sub(raised.last_ms) / 1000,
        };
        self.0.iter().map(show).collect()
    }
}
