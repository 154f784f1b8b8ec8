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
    /// Its stable name.
    pub fn name(self) -> &'static str {
        match self {
            Alarm::Garbage => "garbage",
            Alarm::Forged => "forged",
            Alarm::Sequence => "sequence",
            Alarm::Frozen => "frozen",
            Alarm::UnknownHost => "unknown_host",
            Alarm::Address => "address",
            Alarm::Name => "name",
            Alarm::Limit => "limit",
            Alarm::Vanished => "vanished",
            Alarm::Write => "write",
            Alarm::Apply => "apply",
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
