//! Data of `vnet top`: rates, from the difference of two counter readings.

use std::collections::HashMap;
use std::time::Duration;

use clap::{Args, ValueEnum};
use serde::Serialize;
use vnet_control::api::{Counters, Stats};

/// The command's arguments.
#[derive(Args)]
pub struct Top {
    /// Seconds between two readings of the counters
    #[arg(short, long, value_name = "SECONDS", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=3600))]
    pub interval: u32,
    /// Print one table with the rates of one interval, then exit
    #[arg(long)]
    pub once: bool,
    /// Column to sort by
    #[arg(long, value_enum, default_value_t = Sort::Bits)]
    pub sort: Sort,
}

/// The column to sort by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Sort {
    /// Bits per second, both directions.
    Bits,
    /// Frames per second, both directions.
    Frames,
    /// Frames dropped per second, then in total.
    Drops,
    /// Kind and name.
    Name,
}

impl Sort {
    /// The next column.
    pub fn next(self) -> Sort {
        let all = Sort::value_variants();
        all[(self as usize + 1) % all.len()]
    }

    /// The name that `--sort` accepts.
    pub fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().into())
    }
}

/// Rates of one port.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// `interface`, `link`, `bridge` or `removed`.
    pub kind: String,
    /// Name of the port.
    pub name: String,
    /// Frames per second into the core.
    pub in_frames_per_s: f64,
    /// Bits per second into the core.
    pub in_bits_per_s: f64,
    /// Frames per second out of the core.
    pub out_frames_per_s: f64,
    /// Bits per second out of the core.
    pub out_bits_per_s: f64,
    /// Frames dropped per second.
    pub drops_per_s: f64,
    /// Frames dropped since the port was added.
    pub drops: u64,
    /// Datagrams discarded per second.
    pub discards_per_s: f64,
    /// The most frequent drop or discard reason in the interval.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The most frequent drop reason since the port was added.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason_total: Option<String>,
}

impl Row {
    fn new(kind: &str, name: &str, before: &Counters, now: &Counters, seconds: f64) -> Row {
        let rate = |of: fn(&Counters) -> u64| of(now).saturating_sub(of(before)) as f64 / seconds;
        let lost = now.drops.iter().map(|(reason, n)| (reason, n, before.drops.get(reason)));
        let discarded = now.discards.iter().map(|(reason, n)| (reason, n, before.discards.get(reason)));
        let since = |(reason, n, before): (_, &u64, Option<&u64>)| {
            (n.saturating_sub(before.copied().unwrap_or(0)), reason)
        };
        let reason = most_frequent(lost.chain(discarded).map(since));
        let reason_total = most_frequent(now.drops.iter().map(|(reason, n)| (*n, reason)));
        Row {
            kind: kind.into(),
            name: name.into(),
            in_frames_per_s: rate(|c| c.in_frames),
            in_bits_per_s: rate(|c| c.in_bytes) * 8.0,
            out_frames_per_s: rate(|c| c.out_frames),
            out_bits_per_s: rate(|c| c.out_bytes) * 8.0,
            drops_per_s: rate(Counters::drops_total),
            drops: now.drops_total(),
            discards_per_s: rate(Counters::discards_total),
            reason,
            reason_total,
        }
    }

    /// The reason shown beside the drops: that of the interval, else in parentheses the most frequent one of all previous drops.
    pub fn shown_reason(&self) -> String {
        let before = || self.reason_total.as_ref().map(|reason| format!("({reason})"));
        self.reason.clone().or_else(before).unwrap_or_default()
    }

    /// True if frames or datagrams were lost in the interval.
    pub fn is_losing(&self) -> bool {
        self.drops_per_s > 0.0 || self.discards_per_s > 0.0
    }

    fn bits(&self) -> f64 {
        self.in_bits_per_s + self.out_bits_per_s
    }

    fn frames(&self) -> f64 {
        self.in_frames_per_s + self.out_frames_per_s
    }
}

fn most_frequent<'a>(counts: impl Iterator<Item = (u64, &'a String)>) -> Option<String> {
    counts.filter(|(n, _)| *n > 0).max_by_key(|(n, _)| *n).map(|(_, reason)| reason.clone())
}

/// Rates of all interfaces and links, and of the bridge and removed ports if they lose frames.
///
/// A port that is new, or was removed and added again, counts from zero.
pub fn rows(before: &Stats, now: &Stats, time: Duration) -> Vec<Row> {
    let seconds = time.as_secs_f64().max(1e-3);
    let known: HashMap<_, _> =
        before.ports.iter().map(|port| ((&port.kind, &port.name), &port.counters)).collect();
    let nothing = Counters::default();
    let row = |port: &vnet_control::api::Port| {
        let before = known.get(&(&port.kind, &port.name)).copied();
        // Counters only grow: a smaller value means that the port was replaced.
        let same = |c: &&Counters| c.in_frames <= port.counters.in_frames;
        let before = before.filter(same).unwrap_or(&nothing);
        Row::new(&port.kind, &port.name, before, &port.counters, seconds)
    };
    let shown = |row: &Row| matches!(row.kind.as_str(), "interface" | "link") || row.is_losing();
    now.ports.iter().map(row).filter(shown).collect()
}

/// Sorts rows: largest first, names ascending; `reverse` inverts the order.
pub fn sort(rows: &mut [Row], by: Sort, reverse: bool) {
    rows.sort_by(|a, b| {
        let name = (&a.kind, &a.name).cmp(&(&b.kind, &b.name));
        let order = match by {
            Sort::Bits => b.bits().total_cmp(&a.bits()),
            Sort::Frames => b.frames().total_cmp(&a.frames()),
            Sort::Drops => b.drops_per_s.total_cmp(&a.drops_per_s).then(b.drops.cmp(&a.drops)),
            Sort::Name => name,
        };
        let order = if reverse { order.reverse() } else { order };
        order.then(name)
    });
}

/// A number in at most six characters: 0, 999, 1.23k, 45.6M.
pub fn short(value: f64) -> String {
    let mut value = value;
    for unit in ["", "k", "M", "G", "T"] {
        // Rounding may carry into the next unit.
        if value < 999.5 {
            return match (unit, value) {
                ("", v) if v == 0.0 || v >= 9.95 => format!("{v:.0}"),
                (_, v) if v >= 99.95 => format!("{v:.0}{unit}"),
                (_, v) if v >= 9.995 => format!("{v:.1}{unit}"),
                ("", v) => format!("{v:.1}"),
                (_, v) => format!("{v:.2}{unit}"),
            };
        }
        value /= 1000.0;
    }
    format!("{value:.0}P")
}

#[cfg(test)]
mod tests {
    use super::*;
    use vnet::stats::{DropReason, PortStats};
    use vnet_control::api::{Balance, Port};

    fn port(kind: &str, name: &str, frames: u64, bytes: u64, drops: u64) -> Port {
        let stats = PortStats::default();
        stats.in_frames.add(frames);
        stats.in_bytes.add(bytes);
        stats.drop_frames(DropReason::NoBuffer, drops);
        Port { kind: kind.into(), name: name.into(), counters: (&stats).into() }
    }

    fn stats(ports: Vec<Port>) -> Stats {
        let balance = Balance::of(ports.iter().map(|port| &port.counters));
        Stats { ports, dispatchers: vec![], balance }
    }

    #[test]
    fn rates_are_differences_over_time() {
        let before = stats(vec![port("interface", "a", 100, 1000, 5), port("interface", "new", 90, 90, 0)]);
        let now = stats(vec![
            port("interface", "a", 300, 3500, 9),
            port("interface", "new", 10, 100, 0),
            port("bridge", "bridge", 0, 0, 0),
            port("removed", "removed", 0, 0, 2),
        ]);
        let rows = rows(&before, &now, Duration::from_secs(2));
        let a = &rows[0];
        assert_eq!((a.in_frames_per_s, a.in_bits_per_s, a.drops_per_s, a.drops), (100.0, 10_000.0, 2.0, 9));
        assert_eq!(a.reason.as_deref(), Some("no_buffer"));
        assert_eq!((rows[1].in_frames_per_s, &rows[1].reason), (5.0, &None), "was replaced");
        assert_eq!(a.shown_reason(), "no_buffer");
        // Without new drops the column shows the reason of previous ones.
        let later = super::rows(&now, &now, Duration::from_secs(1));
        assert_eq!((&later[0].reason, later[0].drops, &*later[0].shown_reason()), (&None, 9, "(no_buffer)"));
        assert_eq!(later[1].shown_reason(), "");
        let kinds: Vec<_> = rows.iter().map(|row| row.kind.as_str()).collect();
        assert_eq!(kinds, ["interface", "interface", "removed"], "others only if they lose frames");
    }

    #[test]
    fn rows_are_sorted_by_the_chosen_column() {
        let now = stats(vec![
            port("link", "h2", 30, 10, 1),
            port("interface", "b", 20, 300, 0),
            port("interface", "a", 10, 200, 7),
        ]);
        let mut rows = rows(&stats(vec![]), &now, Duration::from_secs(1));
        let mut names = |by, reverse| {
            sort(&mut rows, by, reverse);
            rows.iter().map(|row| row.name.as_str()).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(names(Sort::Bits, false), "b a h2");
        assert_eq!(names(Sort::Bits, true), "h2 a b");
        assert_eq!(names(Sort::Frames, false), "h2 b a");
        assert_eq!(names(Sort::Drops, false), "a h2 b");
        assert_eq!(names(Sort::Name, false), "a b h2");
    }

    #[test]
    fn numbers_are_short() {
        for (value, want) in [
            (0.0, "0"),
            (0.5, "0.5"),
            (9.96, "10"),
            (999.4, "999"),
            (999.6, "1.00k"),
            (12_345.0, "12.3k"),
            (123_456.0, "123k"),
            (999_960.0, "1.00M"),
            (14_600_000_000.0, "14.6G"),
        ] {
            assert_eq!(short(value), want, "{value}");
        }
    }
}
