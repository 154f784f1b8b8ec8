//! Formats answers as aligned tables for people.

use std::collections::BTreeMap;

use vnet::dispatch::share::{LEARNING_PER_S, WEIGHT_MAX};
use vnet::stats::{DiscardReason, DropReason};
use vnet_control::api::*;

/// A table with a header line and aligned columns.
pub struct TextTable {
    rows: Vec<Vec<String>>,
    right: &'static [usize],
}

impl TextTable {
    /// A table with this header line; columns listed in `right` are right-aligned.
    pub fn new(heading: &[&str], right: &'static [usize]) -> TextTable {
        TextTable { rows: vec![heading.iter().map(ToString::to_string).collect()], right }
    }

    fn row<const N: usize>(&mut self, cells: [String; N]) {
        self.push(cells.into());
    }

    /// Adds a row.
    pub fn push(&mut self, cells: Vec<String>) {
        self.rows.push(cells);
    }

    /// Formats the table.
    pub fn print(&self) -> String {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let mut widths = vec![0; columns];
        for row in &self.rows {
            for (width, cell) in widths.iter_mut().zip(row) {
                *width = cell.chars().count().max(*width);
            }
        }
        let mut text = String::new();
        for row in &self.rows {
            let mut line = String::new();
            for (column, cell) in row.iter().enumerate() {
                let pad = " ".repeat(widths[column] - cell.chars().count());
                let (before, after) = if self.right.contains(&column) { (&*pad, "") } else { ("", &*pad) };
                line += &format!("{before}{cell}{after}  ");
            }
            text += line.trim_end();
            text.push('\n');
        }
        text
    }
}

fn or_dash<T: ToString>(value: &Option<T>) -> String {
    value.as_ref().map_or("-".into(), ToString::to_string)
}

/// `vnet status`
pub fn status(status: &Status) -> String {
    let mut table = TextTable::new(&[], &[]);
    table.rows.clear();
    let mut row = |what: &str, value: String| table.row([what.into(), value]);
    row("host", status.host.clone());
    row("vnetd", format!("{}, process {}, up {}", status.version, status.pid, duration(status.uptime_s)));
    let more =
        if status.ports > 1 { format!(" and the next {} ports", status.ports - 1) } else { String::new() };
    row("bridge", format!("{}{more} (UDP)", status.bridge));
    row("dispatchers", format!("{}{}, yield {}", status.dispatchers, status.threads, status.yield_strategy));
    row("interfaces", format!("{} of {} up", status.interfaces_up, status.interfaces));
    row("links", status.links.to_string());
    row("routes", status.routes.to_string());
    row("networks", format!("{}, {} addresses learned", status.networks, status.learned));
    if let Some(overlay) = &status.overlay {
        let OverlaySummary { state, since_s, hosts, stations, alarms } = overlay;
        let what = format!("{hosts} hosts, {stations} stations, {alarms} alarms");
        row("overlay", format!("store {state} for {}, {what}", duration(*since_s)));
    }
    if let Some(summary) = &status.kernel {
        row("kernel path", kernel_path(summary, status.interfaces));
    }
    row("frames", status.balance.to_string());
    table.print()
}

/// The row `kernel path` of `vnet status`: how many of `all` interfaces have it, its flows, why an interface or the links lack it.
fn kernel_path(summary: &KernelSummary, all: usize) -> String {
    let KernelSummary { interfaces, flows, refused, translated, pin_error, interface_reason, link_reason } =
        summary;
    let mut text = format!("{interfaces} of {all} interfaces");
    if *interfaces > 0 || *flows > 0 {
        text += &format!(", {flows} flows");
        if *refused > 0 {
            text += &format!(", {refused} refused");
        }
        match pin_error {
            None => text += ", which the next vnetd adopts",
            Some(why) => text += &format!(", which the next vnetd cannot adopt: {why}"),
        }
        if *translated > 0 {
            text += &format!("; {translated} connections to other hosts without a tunnel");
        }
        text.extend(link_reason.iter().map(|why| format!("; not to other hosts: {why}")));
    }
    text.extend(interface_reason.iter().map(|why| format!("; not from {why}")));
    text
}

/// `vnet overlay`: the store, then the hosts, then alarms.
pub fn overlay(overlay: &Overlay) -> String {
    let mut table = TextTable::new(&[], &[]);
    table.rows.clear();
    let mut row = |what: &str, value: String| table.row([what.into(), value]);
    let (state, since) = (&overlay.state, duration(overlay.since_s));
    row("store", format!("{state} for {since}, revision {}", overlay.revision));
    row("etcd", overlay.etcd.join(" "));
    row("topology", overlay.topology.clone());
    row("address", or_dash(&overlay.address));
    row("published", format!("{} of this host's stations", overlay.published));
    row("stations", format!("{}, {} frozen", overlay.stations, overlay.frozen));
    let mut text = table.print();
    let mut hosts = TextTable::new(&["HOST", "ADDRESS", "NETWORKS", "NOTE"], &[]);
    for host in &overlay.hosts {
        let networks: Vec<_> = host.networks.iter().map(ToString::to_string).collect();
        let silent = host.silent_s.map(|s| format!("not in the store for {}", duration(s)));
        let notes: Vec<_> = host.behind_nat.then(|| "behind NAT".into()).into_iter().chain(silent).collect();
        hosts.row([host.name.clone(), host.address.clone(), networks.join(" "), notes.join("; ")]);
    }
    text += &format!("\n{}", hosts.print());
    if !overlay.alarms.is_empty() {
        let mut alarms = TextTable::new(&["ALARM", "COUNT", "LAST", "WHAT"], &[1]);
        for alarm in &overlay.alarms {
            let last = format!("{} ago", duration(alarm.age_s));
            alarms.row([alarm.name.clone(), alarm.count.to_string(), last, alarm.text.clone()]);
        }
        text += &format!("\n{}", alarms.print());
    }
    text
}

fn duration(seconds: u64) -> String {
    let (days, hours, minutes) = (seconds / 86_400, seconds / 3_600 % 24, seconds / 60 % 60);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds} s"),
        (0, 0, _) => format!("{minutes} min {} s", seconds % 60),
        (0, _, _) => format!("{hours} h {minutes} min"),
        _ => format!("{days} d {hours} h"),
    }
}

/// A rate in bit/s with a unit prefix.
fn bits(bits_per_s: u64) -> String {
    match bits_per_s {
        0..10_000 => format!("{bits_per_s} bit/s"),
        10_000..10_000_000 => format!("{} kbit/s", bits_per_s / 1_000),
        10_000_000..10_000_000_000 => format!("{} Mbit/s", bits_per_s / 1_000_000),
        _ => format!("{} Gbit/s", bits_per_s / 1_000_000_000),
    }
}

/// `vnet interface list`
pub fn interfaces(interfaces: &Vec<Interface>) -> String {
    let heading = [
        "NAME",
        "KIND",
        "STATE",
        "NETWORK",
        "MAC",
        "MTU",
        "QUEUES",
        "MODE",
        "RATE",
        "SWITCHES",
        "INTERRUPTS",
        "AT",
        "NOTE",
    ];
    let mut table = TextTable::new(&heading, &[3, 5, 6, 8, 9]);
    for i in interfaces {
        let text = |key: &str| i.settings.text(key);
        let at = match (&*text("socket"), text("device"), &*text("netns")) {
            ("", device, "") => device,
            ("", device, netns) => format!("{device} in {netns}"),
            (socket, ..) if !i.settings.flag("server") => format!("to {socket}"),
            (socket, ..) => socket.into(),
        };
        let mut notes: Vec<_> = i.reason.iter().chain(&i.notes).cloned().collect();
        let by_kernel = i.path == "kernel";
        notes.extend(by_kernel.then(|| "known flows pass in the kernel".to_string()));
        notes.extend((text("pair") == "netkit").then(|| "netkit".to_string()));
        let where_not = match i.path_reason.as_deref() {
            _ if by_kernel => "not to other hosts",
            Some(LIMITED | GUARDED) => "no kernel path from it",
            _ => "no kernel path",
        };
        notes.extend(i.path_reason.iter().map(|why| format!("{where_not}: {why}")));
        notes.push(format!("storm limit {}/s", text("storm_limit")));
        notes.extend(shares(i));
        notes.extend(i.settings.flag("port_security").then(|| "port security".to_string()));
        notes.extend(i.settings.flag("address_security").then(|| "address security".to_string()));
        let addresses = text("addresses");
        notes.extend(i.direct_note());
        notes.extend((!addresses.is_empty()).then(|| format!("addresses {addresses}")));
        table.row([
            i.name.clone(),
            text("kind"),
            i.state.clone(),
            text("network"),
            i.settings.text_or("mac", "-"),
            text("mtu"),
            text("queues"),
            mode(i),
            format!("{}/s", i.driving.rate),
            i.driving.switches.to_string(),
            interrupts(i),
            at,
            notes.join("; "),
        ]);
    }
    table.print()
}

/// The interface's share of a dispatcher, where it is not the default.
fn shares(i: &Interface) -> impl Iterator<Item = String> {
    let limits = [
        ("weight", u64::from(WEIGHT_MAX), "weight", ""),
        ("rate_limit", 0, "rate limit", " Mbit/s"),
        ("frame_limit", 0, "frame limit", "/s"),
        ("learning_limit", u64::from(LEARNING_PER_S), "learning limit", "/s"),
    ];
    let shown = limits.map(|(key, default, name, unit)| {
        i.settings.number(key).filter(|is| *is != default).map(|is| format!("{name} {is}{unit}"))
    });
    shown.into_iter().flatten()
}

/// The configured mode; for `adaptive` also the current one, as in `adaptive, now vmm`.
fn mode(i: &Interface) -> String {
    match i.settings.text("mode") {
        mode if mode == "adaptive" => format!("adaptive, now {}", i.driving.driven_by),
        fixed => fixed,
    }
}

/// Interrupt mode and notifications per frame; `-` for a TAP, whose notifications the kernel controls.
fn interrupts(i: &Interface) -> String {
    if i.settings.text("socket").is_empty() {
        return "-".into();
    }
    let thousandths = i.driving.notifications_per_1000_frames;
    format!("{}, {}.{:03} per frame", i.settings.text("interrupts"), thousandths / 1000, thousandths % 1000)
}

/// Remaining lifetime below which a certificate's expiry is mentioned, in seconds.
pub const CERTIFICATE_SOON_S: u64 = 30 * 86_400;

/// Why a link is not up, whether the kernel forwards known flows, and a note if its peer's certificate expires soon.
fn link_note(link: &Link) -> String {
    let soon = link.certificate_s.filter(|left_s| *left_s < CERTIFICATE_SOON_S);
    let soon = soon.map(|left_s| format!("certificate of {} {}", link.settings.text("peer"), ends(left_s)));
    let by_kernel = (link.path == "kernel").then(|| "known flows pass in the kernel".to_string());
    let by_vnetd = link.path_reason.as_ref().map(|why| format!("no kernel path: {why}"));
    let tunnel = link.tunnel_reason.as_ref().map(|why| format!("by a tunnel: {why}"));
    let notes = [link.reason.clone(), by_kernel, tunnel, by_vnetd, link.direct_note(), soon];
    notes.into_iter().flatten().collect::<Vec<_>>().join("; ")
}

/// The remaining lifetime of a certificate as text.
pub fn ends(left_s: u64) -> String {
    match left_s {
        0 => "has ended".into(),
        left_s => format!("ends in {} days", left_s / 86_400),
    }
}

/// `vnet link list`
pub fn links(links: &Vec<Link>) -> String {
    let heading = [
        "NAME",
        "REMOTE",
        "PORTS",
        "ENCAPSULATION",
        "NETWORKS",
        "STATE",
        "MTU",
        "HEARD",
        "RTT",
        "LOSS",
        "IN",
        "OUT",
        "SEALED",
        "NOTE",
    ];
    let mut table = TextTable::new(&heading, &[2, 6]);
    for link in links {
        let text = |key: &str| link.settings.text(key);
        table.row([
            link.name.clone(),
            text("remote"),
            text("ports"),
            text("encapsulation"),
            link.settings.text_or("networks", "all"),
            link.state.clone(),
            text("mtu"),
            link.heard_s.map_or("never".into(), |seconds| format!("{} ago", duration(seconds))),
            link.rtt_us.map_or("-".into(), |rtt| format!("{}.{:03} ms", rtt / 1000, rtt % 1000)),
            link.loss_permille.map_or("-".into(), |loss| format!("{}.{} %", loss / 10, loss % 10)),
            bits(link.traffic.in_bits_per_s),
            bits(link.traffic.out_bits_per_s),
            match (&*text("peer"), link.keys_s) {
                ("", _) => "no".into(),
                (peer, Some(keys_s)) => format!("with {peer}, keys {} old", duration(keys_s)),
                (peer, None) if text("encapsulation") == "stream" => format!("with {peer}, TLS"),
                (peer, None) => format!("with {peer}, no keys"),
            },
            link_note(link),
        ]);
    }
    table.print()
}

/// `vnet route list`
pub fn routes(routes: &Vec<Route>) -> String {
    let mut table = TextTable::new(&["INDEX", "NETWORK", "SRC", "DST", "FROM", "TO"], &[0, 1]);
    for route in routes {
        let [network, src, dst, from, to] =
            ["network", "src", "dst", "from", "to"].map(|key| route.settings.text(key));
        table.row([route.index.to_string(), network, src, dst, from, to]);
    }
    table.print()
}

/// `vnet network list`
pub fn networks(networks: &Vec<Network>) -> String {
    let mut table = TextTable::new(&["ID", "LEARNING", "AGEING", "RELAY", "INTERFACES"], &[0, 4]);
    for network in networks {
        let yes = |key: &str| if network.settings.flag(key) { "yes" } else { "no" }.to_string();
        let ageing = format!("{} s", network.settings.text("ageing_s"));
        let interfaces = network.interfaces.to_string();
        table.row([network.settings.text("id"), yes("learning"), ageing, yes("relay"), interfaces]);
    }
    table.print()
}

/// `vnet addresses`
pub fn addresses(addresses: &Vec<Learned>) -> String {
    let mut table = TextTable::new(&["NETWORK", "ADDRESS", "AT", "HELD", "HEARD"], &[0]);
    let mut sorted = vec![];
    sorted.extend(addresses);
    sorted.sort_by_key(|entry| (entry.network, entry.mac));
    for entry in sorted {
        let heard = match entry.held.as_str() {
            "configured" => "-".into(),
            _ => format!("{} ago", duration(entry.age_s.into())),
        };
        let Learned { network, mac, at, held, .. } = entry;
        table.row([network.to_string(), mac.to_string(), at.clone(), held.clone(), heard]);
    }
    table.print()
}

/// `vnet flows`
pub fn flows(flows: &Vec<KernelFlow>) -> String {
    let mut table = TextTable::new(
        &["NETWORK", "SOURCE", "DESTINATION", "FROM", "TO", "FRAMES", "BYTES", "ENDS", "SEALED DATAGRAMS"],
        &[0, 5, 6],
    );
    for KernelFlow { network, src, dst, from, to, frames, bytes, kernel_ms, sealed } in flows {
        let ends = if *kernel_ms == 0 { "ended".into() } else { format!("in {kernel_ms} ms") };
        let (frames, bytes) = (frames.to_string(), bytes.to_string());
        table.row([
            network.to_string(),
            src.to_string(),
            dst.to_string(),
            from.clone(),
            to.clone(),
            frames,
            bytes,
            ends,
            sealed.clone().unwrap_or_else(|| "-".into()),
        ]);
    }
    table.print()
}

/// `vnet stats`: ports, then every drop and discard reason with its ports, then dispatchers, then the balance.
pub fn stats(stats: &Stats) -> String {
    let heading = [
        "PORT",
        "IN FRAMES",
        "IN BYTES",
        "OUT FRAMES",
        "OUT BYTES",
        "COPIES",
        "ANSWERS",
        "DROPS",
        "IN DATAGRAMS",
        "OUT DATAGRAMS",
        "DISCARDS",
        "NOTIFICATIONS",
        "KICKS",
    ];
    let mut table = TextTable::new(&heading, &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]);
    for port in &stats.ports {
        let c = &port.counters;
        table.row([
            port_name(port),
            c.in_frames.to_string(),
            c.in_bytes.to_string(),
            c.out_frames.to_string(),
            c.out_bytes.to_string(),
            c.copies.to_string(),
            c.answers.to_string(),
            c.drops_total().to_string(),
            c.in_datagrams.to_string(),
            c.out_datagrams.to_string(),
            c.discards_total().to_string(),
            c.notifications.to_string(),
            c.kicks.to_string(),
        ]);
    }
    let drops = DropReason::ALL.iter().map(|reason| reason.name());
    let discards = DiscardReason::ALL.iter().map(|reason| reason.name());
    let mut dispatchers =
        TextTable::new(&["DISPATCHER", "FRAMES", "BUSY TURNS", "BUSY MS", "THREAD"], &[1, 2, 3, 4]);
    for d in &stats.dispatchers {
        let busy_ms = (d.busy_ns / 1_000_000).to_string();
        let (id, thread) = (d.id.to_string(), d.thread.to_string());
        dispatchers.row([id, d.frames.to_string(), d.busy_turns.to_string(), busy_ms, thread]);
    }
    format!(
        "{}\n{}\n{}\n{}\n{}\n",
        table.print(),
        reasons("FRAMES DROPPED", drops, stats, |counters| &counters.drops),
        reasons("DATAGRAMS DISCARDED", discards, stats, |counters| &counters.discards),
        dispatchers.print(),
        stats.balance
    )
}

/// One row per reason: known reasons in the order of the counters, then unknown ones from another version of vnetd.
fn reasons<'a>(
    heading: &str,
    known: impl Iterator<Item = &'a str>,
    stats: &'a Stats,
    counts: impl Fn(&'a Counters) -> &'a BTreeMap<String, u64>,
) -> String {
    let mut names: Vec<&str> = known.collect();
    for name in stats.ports.iter().flat_map(|port| counts(&port.counters).keys()) {
        if !names.contains(&name.as_str()) {
            names.push(name);
        }
    }
    let mut table = TextTable::new(&[heading, "TOTAL", "AT"], &[1]);
    for name in names {
        let at = |port: &'a Port| (port, counts(&port.counters).get(name).copied().unwrap_or(0));
        let ports: Vec<_> = stats.ports.iter().map(at).filter(|(_, count)| *count > 0).collect();
        let total: u64 = ports.iter().map(|(_, count)| count).sum();
        let at: Vec<_> = ports.iter().map(|(port, count)| format!("{} {count}", port_name(port))).collect();
        table.row([name.into(), total.to_string(), at.join(", ")]);
    }
    table.print()
}

fn port_name(port: &Port) -> String {
    if port.kind == port.name { port.kind.clone() } else { format!("{} {}", port.kind, port.name) }
}

/// `vnet trace`: the decision, then each copy.
pub fn trace(trace: &Trace) -> String {
    let Trace { network, src, dst, from, why, to, drop, cached_by, kernel_ms, copies, .. } = trace;
    let outcome = match drop {
        Some(reason) => format!("dropped ({reason})"),
        None => format!("to {}", to.join(" and to ")),
    };
    let mut text = format!("{src} -> {dst} in network {network}, from {from}: {outcome}, because {why}\n");
    if !cached_by.is_empty() {
        let dispatchers: Vec<_> = cached_by.iter().map(ToString::to_string).collect();
        text += &format!("  from the cache of dispatcher {}\n", dispatchers.join(" and "));
    }
    if let Some(ms) = kernel_ms {
        text += &format!(
            "  by the kernel itself, whose verdict holds for {ms} ms more and is renewed while it is used\n"
        );
    }
    for copy in copies {
        let remote = copy.remote.as_ref().map(|remote| format!(" at {remote}")).unwrap_or_default();
        text += &format!("  copy to {}{remote}: {}, MTU {}\n", copy.to, copy.state, copy.mtu);
        next_hop(&mut text, copy.next.as_deref(), copy.silent.as_deref(), 2);
    }
    text
}

/// The answer of the host behind a link.
fn next_hop(text: &mut String, hop: Option<&Hop>, silent: Option<&str>, depth: usize) {
    let indent = "  ".repeat(depth);
    if let Some(silent) = silent {
        *text += &format!("{indent}no answer from the other host: {silent}\n");
    }
    let Some(Hop { host, from, why, copies, drop, more }) = hop else { return };
    let outcome = match drop {
        Some(reason) => format!("dropped ({reason})"),
        None => {
            let to: Vec<_> = copies.iter().map(|copy| copy.to.as_str()).collect();
            let more = if *more > 0 { format!(" and {more} more") } else { String::new() };
            format!("to {}{more}", to.join(" and to "))
        }
    };
    *text += &format!("{indent}host {host}, from {from}: {outcome}, because {why}\n");
    for copy in copies {
        if let Some(state) = &copy.state {
            *text += &format!("{indent}  {} is {state}\n", copy.to);
        }
        next_hop(text, copy.next.as_deref(), copy.silent.as_deref(), depth + 1);
    }
}

/// `vnet apply`
pub fn applied(applied: &Applied) -> String {
    let mut text: String = applied.changes.iter().map(|change| format!("{change}\n")).collect();
    text += &match (applied.changes.len(), applied.dry_run) {
        (0, _) => "nothing to change\n".into(),
        (1, true) => "1 change would be made\n".into(),
        (1, false) => "1 change made\n".into(),
        (n, true) => format!("{n} changes would be made\n"),
        (n, false) => format!("{n} changes made\n"),
    };
    text
}

#[cfg(test)]
#[path = "show_tests.rs"]
mod tests;
