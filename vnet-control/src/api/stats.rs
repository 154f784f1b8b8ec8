//! Counters in answers: ports, dispatchers, and the balance of all frames.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};
use vnet::dispatch::dispatcher_stats::DispatcherStats;
use vnet::stats::{DiscardReason, DropReason, InterruptStats, PortStats};

/// Counters of optimistic interrupts; names as in [`InterruptStats`].
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct InterruptCounters {
    /// Early interrupts.
    pub early: u64,
    /// Part of `early` sent when data arrived, before it was received.
    pub early_at_arrival: u64,
    /// Part of `early_at_arrival` after which no frame came for the guest.
    pub early_mispredicted: u64,
    /// Early interrupts suppressed because the guest had notifications off.
    pub early_discarded: u64,
    /// Early interrupts that a guest handled before its frames arrived, so that it had to be notified again.
    pub early_premature: u64,
    /// Notifications injected at or after the end of coalescing.
    pub coalesced_injected: u64,
    /// Notifications withheld at the end of coalescing because of the receive density.
    pub coalesced_withheld: u64,
}

impl From<&InterruptStats> for InterruptCounters {
    fn from(stats: &InterruptStats) -> InterruptCounters {
        InterruptCounters {
            early: stats.early.get(),
            early_at_arrival: stats.early_at_arrival.get(),
            early_mispredicted: stats.early_mispredicted.get(),
            early_discarded: stats.early_discarded.get(),
            early_premature: stats.early_premature.get(),
            coalesced_injected: stats.coalesced_injected.get(),
            coalesced_withheld: stats.coalesced_withheld.get(),
        }
    }
}

impl InterruptCounters {
    fn add(&mut self, other: &InterruptCounters) {
        self.early += other.early;
        self.early_at_arrival += other.early_at_arrival;
        self.early_mispredicted += other.early_mispredicted;
        self.early_discarded += other.early_discarded;
        self.early_premature += other.early_premature;
        self.coalesced_injected += other.coalesced_injected;
        self.coalesced_withheld += other.coalesced_withheld;
    }
}

/// `GET /v1/stats`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Stats {
    /// Counters of each interface and link, then of `bridge` (datagrams that match no link) and `removed` (sum of all removed
    /// ports).
    pub ports: Vec<Port>,
    /// Counters of each dispatcher, by number.
    #[serde(default)]
    pub dispatchers: Vec<Dispatcher>,
    /// The balance of all frames.
    pub balance: Balance,
}

/// Counters of one dispatcher; names as in [`DispatcherStats`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Dispatcher {
    /// Number of the dispatcher, from 0.
    pub id: usize,
    /// Frames taken from interfaces and links.
    pub frames: u64,
    /// Loop iterations with work.
    pub busy_turns: u64,
    /// Nanoseconds spent in busy turns.
    pub busy_ns: u64,
    /// Number of the thread that runs the dispatcher now, as in its name `dispatch-N`. Older daemons omit this field.
    #[serde(default)]
    pub thread: usize,
}

impl Dispatcher {
    /// The counters of dispatcher `id`, which `thread` runs.
    pub fn new(id: usize, stats: &DispatcherStats, thread: usize) -> Dispatcher {
        let (frames, busy_turns) = (stats.frames(), stats.busy_turns());
        Dispatcher { id, frames, busy_turns, busy_ns: stats.busy_ns(), thread }
    }
}

/// One port's counters.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Port {
    /// `interface`, `link`, `bridge` or `removed`.
    pub kind: String,
    /// Name of the interface or link.
    pub name: String,
    /// Counters of the port.
    #[serde(flatten)]
    pub counters: Counters,
}

/// Counters of a port since it was added; names as in [`PortStats`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Counters {
    /// Frames that entered the core at this port.
    pub in_frames: u64,
    /// Bytes that entered the core at this port.
    pub in_bytes: u64,
    /// Frames delivered to this port.
    pub out_frames: u64,
    /// Bytes delivered to this port.
    pub out_bytes: u64,
    /// Additional copies of frames with several destinations.
    pub copies: u64,
    /// Neighbour requests (ARP, ND) from this port that this host answered; the request counts in `in_frames`, the answer in
    /// `out_frames`.
    #[serde(default)]
    pub answers: u64,
    /// Notifications sent to the guest.
    pub notifications: u64,
    /// Notifications received from the guest.
    pub kicks: u64,
    /// Counters of optimistic interrupts.
    #[serde(flatten)]
    pub interrupts: InterruptCounters,
    /// Messages sent with zero copy from guests' memory.
    #[serde(default)]
    pub zero_copy_sent: u64,
    /// Zero-copy messages that the kernel copied nevertheless.
    #[serde(default)]
    pub zero_copy_copied: u64,
    /// Messages eligible for zero copy that were sent by copy.
    #[serde(default)]
    pub zero_copy_fallen_back: u64,
    /// Frames received in place, directly into a guest's buffers.
    #[serde(default)]
    pub direct_in_place: u64,
    /// Messages received in place whose layout was guessed wrong, so they were copied out.
    #[serde(default)]
    pub direct_copied_out: u64,
    /// Direct ports that the other host announced and this host refused.
    #[serde(default)]
    pub direct_refused: u64,
    /// Conversations to translate that the other host offered and this host refused.
    #[serde(default)]
    pub translations_refused: u64,
    /// Datagrams received.
    pub in_datagrams: u64,
    /// Datagrams sent.
    pub out_datagrams: u64,
    /// Frames dropped, per reason.
    pub drops: BTreeMap<String, u64>,
    /// Datagrams discarded, per reason.
    pub discards: BTreeMap<String, u64>,
}

impl From<&PortStats> for Counters {
    fn from(stats: &PortStats) -> Counters {
        Counters {
            in_frames: stats.in_frames.get(),
            in_bytes: stats.in_bytes.get(),
            out_frames: stats.out_frames.get(),
            out_bytes: stats.out_bytes.get(),
            copies: stats.copies.get(),
            answers: stats.answers.get(),
            notifications: stats.notifications.get(),
            kicks: stats.kicks.get(),
            interrupts: (&stats.interrupts).into(),
            zero_copy_sent: stats.zero_copy.sent.get(),
            zero_copy_copied: stats.zero_copy.copied.get(),
            zero_copy_fallen_back: stats.zero_copy.fallen_back.get(),
            direct_in_place: stats.direct_in_place.get(),
            direct_copied_out: stats.direct_copied_out.get(),
            direct_refused: stats.direct_refused.get(),
            translations_refused: stats.translations_refused.get(),
            in_datagrams: stats.in_datagrams.get(),
            out_datagrams: stats.out_datagrams.get(),
            drops: DropReason::ALL.iter().map(|r| (r.name().into(), stats.drops(*r))).collect(),
            discards: DiscardReason::ALL.iter().map(|r| (r.name().into(), stats.discards(*r))).collect(),
        }
    }
}

impl Counters {
    /// Frames dropped for any reason.
    pub fn drops_total(&self) -> u64 {
        self.drops.values().sum()
    }

    /// Datagrams discarded for any reason.
    pub fn discards_total(&self) -> u64 {
        self.discards.values().sum()
    }

    /// Adds another port's counters.
    pub fn add(&mut self, other: &Counters) {
        self.in_frames += other.in_frames;
        self.in_bytes += other.in_bytes;
        self.out_frames += other.out_frames;
        self.out_bytes += other.out_bytes;
        self.copies += other.copies;
        self.answers += other.answers;
        self.notifications += other.notifications;
        self.kicks += other.kicks;
        self.interrupts.add(&other.interrupts);
        self.zero_copy_sent += other.zero_copy_sent;
        self.zero_copy_copied += other.zero_copy_copied;
        self.zero_copy_fallen_back += other.zero_copy_fallen_back;
        self.direct_in_place += other.direct_in_place;
        self.direct_copied_out += other.direct_copied_out;
        self.direct_refused += other.direct_refused;
        self.translations_refused += other.translations_refused;
        self.in_datagrams += other.in_datagrams;
        self.out_datagrams += other.out_datagrams;
        for (reasons, others) in [(&mut self.drops, &other.drops), (&mut self.discards, &other.discards)] {
            for (reason, count) in others {
                *reasons.entry(reason.clone()).or_default() += count;
            }
        }
    }
}

/// The balance of all frames: in + copies = out + drops, except for frames in flight while the counters are read.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Balance {
    /// Frames that entered the core.
    #[serde(rename = "in")]
    pub entered: u64,
    /// Additional copies of frames with several destinations.
    pub copies: u64,
    /// Frames delivered.
    pub out: u64,
    /// Frames dropped.
    pub drops: u64,
}

impl Balance {
    /// The balance of the given ports.
    pub fn of<'a>(ports: impl IntoIterator<Item = &'a Counters>) -> Balance {
        ports.into_iter().fold(Balance::default(), |sum, port| Balance {
            entered: sum.entered + port.in_frames,
            copies: sum.copies + port.copies,
            out: sum.out + port.out_frames,
            drops: sum.drops + port.drops_total(),
        })
    }
}

impl fmt::Display for Balance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Balance { entered, copies, out, drops } = self;
        let (left, right) = (entered + copies, out + drops);
        let sign = if left == right { "=" } else { "≠" };
        write!(f, "in {entered} + copies {copies} {sign} out {out} + drops {drops}")?;
        if left == right { Ok(()) } else { write!(f, " ({} on their way)", left.abs_diff(right)) }
    }
}
