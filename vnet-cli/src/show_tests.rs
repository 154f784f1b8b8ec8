//! Tests of the tables.

use super::*;
use vnet::stats::PortStats;

fn port(kind: &str, name: &str, stats: &PortStats) -> Port {
    Port { kind: kind.into(), name: name.into(), counters: stats.into() }
}

#[test]
fn stats_show_every_reason_and_the_balance() {
    let (vm, link) = (PortStats::default(), PortStats::default());
    vm.in_frames.add(5);
    vm.copies.add(1);
    vm.drop_frames(DropReason::NoRoute, 2);
    link.delivered(3, 300);
    link.drop_frames(DropReason::SendFailed, 1);
    link.discard(DiscardReason::BadVersion, 7);
    let ports = vec![port("interface", "vm1", &vm), port("link", "h2", &link)];
    let balance = Balance::of(ports.iter().map(|port| &port.counters));
    let text = stats(&Stats { ports, dispatchers: vec![Dispatcher::default()], balance });
    for reason in DropReason::ALL.iter().map(|r| r.name()).chain(DiscardReason::ALL.iter().map(|r| r.name()))
    {
        assert_eq!(text.lines().filter(|line| line.split(' ').next() == Some(reason)).count(), 1, "{reason}");
    }
    for want in ["no_route 2 interface vm1 2", "bad_version 7 link h2 7"] {
        let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(text.lines().any(|line| words(line) == want), "{text}");
    }
    assert!(text.ends_with("\nin 5 + copies 1 = out 3 + drops 3\n"), "{text}");
}

#[test]
fn limits_of_an_interface_are_shown() {
    let mut settings = serde_json::json!({
        "name": "c3", "kind": "veth", "state": "up", "network": 1, "storm_limit": 5, "path": "vnetd",
        "path_reason": LIMITED, "weight": 25, "rate_limit": 1000, "frame_limit": 0,
    });
    let shown =
        |settings: &serde_json::Value| interfaces(&vec![serde_json::from_value(settings.clone()).unwrap()]);
    let text = shown(&settings);
    let note =
        "no kernel path from it: it has a rate limit; storm limit 5/s; weight 25; rate limit 1000 Mbit/s\n";
    assert!(text.ends_with(note), "{text}");
    (settings["weight"], settings["rate_limit"]) = (100.into(), 0.into());
    (settings["path"], settings["path_reason"]) = ("kernel".into(), serde_json::Value::Null);
    let text = shown(&settings);
    assert!(text.ends_with("known flows pass in the kernel; storm limit 5/s\n"), "{text}");
}

#[test]
fn columns_are_aligned() {
    let mut table = TextTable::new(&["NAME", "N"], &[1]);
    table.row(["a".into(), "100".into()]);
    table.row(["long-name".into(), "5".into()]);
    assert_eq!(table.print(), "NAME         N\na          100\nlong-name    5\n");
}

#[test]
fn rates_are_short() {
    let cases = [
        (0, "0 bit/s"),
        (9_999, "9999 bit/s"),
        (10_500, "10 kbit/s"),
        (25_000_000, "25 Mbit/s"),
        (u64::MAX, "18446744073 Gbit/s"),
    ];
    for (rate, want) in cases {
        assert_eq!(bits(rate), want);
    }
}

#[test]
fn durations_are_short() {
    let cases = [(59, "59 s"), (61, "1 min 1 s"), (3_700, "1 h 1 min"), (90_000, "1 d 1 h")];
    for (seconds, want) in cases {
        assert_eq!(duration(seconds), want);
    }
}

#[test]
fn the_status_says_why_interfaces_lack_the_kernels_path() {
    let shown = |kernel: serde_json::Value| {
        let status_json = serde_json::json!({
            "version": "1", "host": "h1", "pid": 1, "uptime_s": 1, "bridge": "[::]:9000", "dispatchers": 1, "yield": "block",
            "interfaces_up": 2, "interfaces": 2, "links": 0, "routes": 0, "networks": 1, "learned": 0, "kernel": kernel,
            "balance": {"in": 0, "copies": 0, "out": 0, "drops": 0},
        });
        let text = status(&serde_json::from_value(status_json).unwrap());
        text.lines().find_map(|line| line.strip_prefix("kernel path")).unwrap_or_default().trim().to_string()
    };
    let why = "interface c1: the kernel takes no programs: Operation not permitted; it needs CAP_BPF";
    let none = serde_json::json!({"interfaces": 0, "flows": 0, "refused": 0, "interface_reason": why});
    assert_eq!(shown(none), format!("0 of 2 interfaces; not from {why}"));
    let some = serde_json::json!({
        "interfaces": 1, "flows": 5, "refused": 3, "interface_reason": "interface c1: it has a rate limit",
        "link_reason": "sealed links only",
    });
    assert_eq!(
        shown(some),
        "1 of 2 interfaces, 5 flows, 3 refused, which the next vnetd adopts; not to other hosts: sealed links only; \
         not from interface c1: it has a rate limit"
    );
    let bare = serde_json::json!({"interfaces": 2, "flows": 4, "refused": 0, "translated": 3});
    assert_eq!(
        shown(bare),
        "2 of 2 interfaces, 4 flows, which the next vnetd adopts; 3 connections to other hosts without a tunnel"
    );
    let pins = serde_json::json!({"interfaces": 2, "flows": 0, "refused": 0, "pin_error": "no bpffs"});
    assert_eq!(shown(pins), "2 of 2 interfaces, 0 flows, which the next vnetd cannot adopt: no bpffs");
    assert_eq!(shown(serde_json::Value::Null), "", "no interfaces");
}

/// The list says of every interface which path it has, or why not the kernel's, whatever its kind.
#[test]
fn every_interface_has_a_path_in_one_line() {
    let shown = |kind: &str, path: &str, why: Option<&str>| {
        let interface = serde_json::json!({
            "name": "i", "kind": kind, "state": "up", "network": 1, "storm_limit": 5, "path": path, "path_reason": why,
        });
        let text = interfaces(&vec![serde_json::from_value(interface).unwrap()]);
        assert_eq!(text.lines().count(), 2, "{text}");
        text.trim_end().trim_end_matches("; storm limit 5/s").rsplit_once("  ").unwrap().1.trim().to_string()
    };
    let kind = "only kinds veth and local have it, this is kind tap";
    let programs = "the kernel takes no programs: Operation not permitted";
    for (kind, path, why, want) in [
        ("tap", "vnetd", Some(kind), format!("no kernel path: {kind}")),
        ("vhost-user", "vnetd", Some(kind), format!("no kernel path: {kind}")),
        ("local", "vnetd", Some(programs), format!("no kernel path: {programs}")),
        ("veth", "vnetd", Some(GUARDED), format!("no kernel path from it: {GUARDED}")),
        (
            "veth",
            "kernel",
            Some(SEALED_LINKS_ONLY),
            format!("known flows pass in the kernel; not to other hosts: {SEALED_LINKS_ONLY}"),
        ),
        ("local", "kernel", None, "known flows pass in the kernel".into()),
    ] {
        assert_eq!(shown(kind, path, why), want);
    }
}

#[test]
fn flows_are_listed_with_what_they_carried_and_their_end() {
    let flow = |n: u64, kernel_ms: u64| {
        serde_json::json!({
            "network": 7, "src": "02:00:00:00:00:01", "dst": "02:00:00:00:00:02", "from": "interface c1", "to": "link h2",
            "frames": n, "bytes": 1000 * n, "kernel_ms": kernel_ms,
        })
    };
    let mut sealed = flow(9, 700);
    sealed["sealed"] = "10.0.0.1:7000 > 10.0.0.2:7000".into();
    let list = serde_json::json!([flow(2048, 1500), flow(3, 0), sealed]);
    let text = flows(&serde_json::from_value(list).unwrap());
    let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
    let lines: Vec<_> = text.lines().map(words).collect();
    assert_eq!(
        lines,
        [
            "NETWORK SOURCE DESTINATION FROM TO FRAMES BYTES ENDS SEALED DATAGRAMS",
            "7 02:00:00:00:00:01 02:00:00:00:00:02 interface c1 link h2 2048 2048000 in 1500 ms -",
            "7 02:00:00:00:00:01 02:00:00:00:00:02 interface c1 link h2 3 3000 ended -",
            "7 02:00:00:00:00:01 02:00:00:00:00:02 interface c1 link h2 9 9000 in 700 ms 10.0.0.1:7000 > 10.0.0.2:7000",
        ]
    );
}
