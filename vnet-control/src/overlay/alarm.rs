//! Alarms about the store and records that others write there. Each kind is counted, reported by the API, and logged at most once
//! per [`LOG_MS`], so that a writer to the store cannot flood the log.

use std::collections::BTreeMap;

use crate::api;

/// Log rate limit per kind of alarm, in milliseconds.
const LOG_MS: u64 = 10_000;

/// Kinds of alarms. The doc comment of each is its help text.
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    strum::EnumMessage,
    strum::IntoStaticStr,
    strum::VariantArray,
)]
#[strum(serialize_all = "snake_case")]
pub enum Alarm {
    /// A key or value that is not a record of this version.
    Garbage,
    /// Another writer changed a record of this host; it was repaired.
    Forged,
    /// Guests of two hosts use the same MAC address, or a forged record claims an address for another host.
    Duplicate,
    /// A record that its writer's certificate does not authorize.
    Untrusted,
    /// A replay of a record that its writer has since replaced.
    Replayed,
    /// A claim whose sequence number is not the next one.
    Sequence,
    /// Several hosts claim the same station in turn.
    Frozen,
    /// A claim in the name of an unknown host.
    UnknownHost,
    /// Two hosts at the same address, or one host at several.
    Address,
    /// Another host has this host's name.
    Name,
    /// More hosts or stations than the limit.
    Limit,
    /// The store lost records without a withdrawal.
    Vanished,
    /// The store refuses writes: its disk is full, or this host lacks permission.
    Write,
    /// The computed links or stations cannot be applied.
    Apply,
}

impl Alarm {
    /// All kinds.
    pub const ALL: &'static [Alarm] = <Alarm as strum::VariantArray>::VARIANTS;

    /// The kind's stable name in metrics and the API.
    pub fn name(self) -> &'static str {
        self.into()
    }

    /// The kind's help text, one sentence.
    pub fn help(self) -> &'static str {
        strum::EnumMessage::get_documentation(&self).unwrap_or_default()
    }
}

/// The alarms raised on this host, by kind.
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
