//! Tests of the doctor on hosts simulated by files: each fault is found, and a healthy host has no findings.

use super::*;
use std::fs;
use std::path::Path;
use vnet_control::api::{KernelSummary, SEALED_LINKS_ONLY};

/// A healthy host's files.
const HEALTHY: &[(&str, &str)] = &[
    ("dev/net/tun", ""),
    ("dev/kvm", ""),
    ("proc/cpuinfo", "processor\t: 0\nflags\t\t: fpu vmx sse\n"),
    ("proc/self/status", "Name:\tvnet\nCapEff:\t0000000000000000\n"),
    ("proc/self/timerslack_ns", "50000\n"),
    ("proc/self/net/snmp", "Udp: InDatagrams RcvbufErrors SndbufErrors\nUdp: 5 0 0\n"),
    ("proc/sys/kernel/osrelease", "6.1\n"),
    ("boot/config-6.1", "CONFIG_HZ_250=y\nCONFIG_HZ=250\n"),
    ("proc/sys/net/core/rmem_max", "8388608\n"),
    ("proc/sys/net/core/wmem_max", "8388608\n"),
    ("proc/sys/fs/aio-nr", "0\n"),
    ("proc/sys/fs/aio-max-nr", "65536\n"),
    ("proc/sys/net/ipv4/tcp_syncookies", "1\n"),
    ("proc/meminfo", "SwapTotal:             0 kB\nHugePages_Total:       8\nHugePages_Free:        4\n"),
    ("sys/devices/system/cpu/online", "0-3\n"),
    ("sys/module/kvm/parameters/halt_poll_ns", "200000\n"),
    ("sys/devices/system/cpu/isolated", "3\n"),
    ("sys/devices/system/cpu/nohz_full", "3\n"),
    ("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "performance\n"),
    ("sys/devices/system/clocksource/clocksource0/current_clocksource", "tsc\n"),
    ("sys/kernel/mm/transparent_hugepage/shmem_enabled", "always [advise] never deny force\n"),
    // A vnetd with process id 42.
    ("proc/42/status", "Name:\tvnetd\nCapEff:\t0000000000001000\n"),
    (
        "proc/42/limits",
        "Max open files            65536  65536  files\nMax locked memory  unlimited  unlimited  bytes\n",
    ),
    ("proc/42/net/snmp", "Udp: RcvbufErrors SndbufErrors\nUdp: 0 0\n"),
    ("proc/42/task/43/status", "Name:\tdispatch-0\nCpus_allowed_list:\t3\nnonvoluntary_ctxt_switches:\t7\n"),
    ("proc/42/task/44/status", "Name:\tdispatch-1\nCpus_allowed_list:\t2\nnonvoluntary_ctxt_switches:\t7\n"),
    ("proc/42/task/45/status", "Name:\ttokio-rt\nCpus_allowed_list:\t0-3\nnonvoluntary_ctxt_switches:\t7\n"),
];

/// A host with these files except for `changes`; `None` removes a file.
fn host(changes: &[(&str, Option<&str>)]) -> (tempfile::TempDir, Host) {
    let dir = tempfile::tempdir().unwrap();
    let mut files: Vec<(&str, Option<&str>)> =
        HEALTHY.iter().map(|(path, text)| (*path, Some(*text))).collect();
    files.retain(|(path, _)| changes.iter().all(|(changed, _)| changed != path));
    files.extend(changes);
    for (path, text) in files {
        if let Some(text) = text {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
    }
    let host = Host::at(dir.path());
    (dir, host)
}

fn daemon() -> Daemon {
    let interface = serde_json::json!({
        "name": "c1", "kind": "tap", "state": "up", "network": 1, "mtu": 1400, "queues": 2,
        "storm_limit": 1, "port_security": false,
    });
    let link = serde_json::json!({
        "name": "h2", "remote": "10.0.0.2:9000", "encapsulation": "native", "state": "up", "mtu": 1500, "heard_s": 1,
    });
    let status = serde_json::json!({
        "version": "1", "host": "h1", "pid": 42, "uptime_s": 1, "bridge": "[::]:9000", "dispatchers": 2,
        "yield": "adaptive", "interfaces": 1, "interfaces_up": 1, "links": 1, "routes": 0, "networks": 1,
        "learned": 0, "balance": { "in": 0, "copies": 0, "out": 0, "drops": 0 },
    });
    let overlay = serde_json::json!({
        "state": "connected", "since_s": 9, "etcd": ["http://10.0.0.1:2379"], "revision": 5, "topology": "mesh",
        "published": 1, "stations": 2, "frozen": 0, "hosts": [], "alarms_total": 1,
        "alarms": [{ "name": "vanished", "count": 1, "text": "the store lost 3 of 6 records", "age_s": 90_000 }],
    });
    Daemon {
        status: serde_json::from_value(status).unwrap(),
        interfaces: vec![serde_json::from_value(interface).unwrap()],
        links: vec![serde_json::from_value(link).unwrap()],
        overlay: Some(serde_json::from_value(overlay).unwrap()),
    }
}

fn level(findings: &[Finding], check: &str) -> Level {
    let found: Vec<_> = findings.iter().filter(|finding| finding.check == check).collect();
    assert_eq!(found.len(), 1, "{check} is checked once: {findings:#?}");
    found[0].level
}

#[test]
fn a_healthy_host_has_no_findings() {
    let (_dir, host) = host(&[]);
    for daemon in [None, Some(daemon())] {
        let findings = examine(&host, daemon.as_ref());
        let bad: Vec<_> = findings.iter().filter(|finding| finding.level != Level::Ok).collect();
        assert!(bad.is_empty(), "{bad:#?}");
        let text = text(&findings, daemon.as_ref());
        assert!(text.ends_with(&format!("{} ok, 0 to improve, 0 not working\n", findings.len())), "{text}");
    }
}

#[test]
fn each_fault_of_a_machine_is_found() {
    use Level::{Problem, Warn};
    let cpu = "sys/devices/system/cpu";
    let clock = "sys/devices/system/clocksource/clocksource0/current_clocksource";
    let governor = format!("{cpu}/cpu0/cpufreq/scaling_governor");
    for (path, text, check, want) in [
        ("dev/net/tun", None, "tun", Problem),
        ("dev/kvm", None, "kvm", Warn),
        ("proc/cpuinfo", Some("flags : fpu hypervisor"), "kvm", Warn),
        ("proc/sys/net/core/rmem_max", Some("212992"), "rmem", Warn),
        ("proc/sys/net/core/wmem_max", Some("212992"), "wmem", Warn),
        (&format!("{cpu}/online"), Some("0"), "cores", Warn),
        ("sys/module/kvm/parameters/halt_poll_ns", Some("0\n"), "halt-polling", Warn),
        (&governor, Some("powersave"), "governor", Warn),
        (clock, Some("hpet"), "clock", Warn),
        ("proc/self/timerslack_ns", Some("1000000"), "timer", Warn),
        ("sys/kernel/mm/transparent_hugepage/shmem_enabled", Some("always [never]"), "thp", Warn),
        ("proc/sys/fs/aio-nr", Some("65000"), "aio", Problem),
        ("proc/sys/net/ipv4/tcp_syncookies", Some("0"), "syn-cookies", Warn),
        ("proc/self/net/snmp", Some("Udp: SndbufErrors RcvbufErrors\nUdp: 0 9"), "udp-losses", Warn),
    ] {
        let (_dir, host) = host(&[(path, text)]);
        let findings = examine(&host, None);
        assert_eq!(level(&findings, check), want, "{path}: {findings:#?}");
        let others: Vec<_> =
            findings.iter().filter(|found| found.check != check && found.level != Level::Ok).collect();
        assert!(others.is_empty(), "{path}: {others:#?}");
        let found = findings.iter().find(|finding| finding.check == check).unwrap();
        assert!(found.todo.is_some(), "a finding comes with a fix");
    }
}

#[test]
fn halting_guests_poll_only_where_processors_are_spare() {
    let guest = serde_json::json!({
        "name": "vm1", "kind": "vhost-user", "state": "up", "network": 1, "mtu": 1500, "queues": 1,
        "storm_limit": 1, "port_security": false,
    });
    let mut daemon = daemon();
    daemon.interfaces.push(serde_json::from_value(guest).unwrap());
    // Two dispatchers and a guest.
    for (cpus, ns, want, value) in [
        ("0-2", Some("200000"), Level::Ok, None),
        ("0-1", Some("200000"), Level::Warn, Some("echo 0 >")),
        ("0-1", Some("0"), Level::Ok, None),
        ("0-2", Some("0"), Level::Warn, Some("echo 200000 >")),
        ("0-1", None, Level::Ok, None),
    ] {
        let (_dir, host) = host(&[
            ("sys/devices/system/cpu/online", Some(cpus)),
            ("sys/module/kvm/parameters/halt_poll_ns", ns),
        ]);
        let findings = examine(&host, Some(&daemon));
        assert_eq!(level(&findings, "halt-polling"), want, "{cpus} {ns:?}");
        let found = findings.iter().find(|finding| finding.check == "halt-polling").unwrap();
        let fits = |todo: &str| value.is_some_and(|value| todo.starts_with(value));
        assert_eq!(found.todo.as_deref().is_some_and(fits), value.is_some(), "{found:?}");
    }
}

#[test]
fn socket_buffer_limits_do_not_apply_to_cap_net_admin() {
    let (_dir, host) = host(&[("proc/sys/net/core/rmem_max", Some("212992"))]);
    assert_eq!(level(&examine(&host, Some(&daemon())), "rmem"), Level::Ok);
}

const SUMMARY: KernelSummary = KernelSummary {
    interfaces: 1,
    flows: 0,
    refused: 0,
    translated: 0,
    pin_error: None,
    interface_reason: None,
    link_reason: None,
};

#[test]
fn the_doctor_says_why_an_interface_lacks_the_kernels_path() {
    let (_dir, host) = host(&[]);
    let said = |daemon: &Daemon| {
        let findings = examine(&host, Some(daemon));
        let found = findings.into_iter().find(|finding| finding.check == "kernel-path").unwrap();
        (found.level, found.what)
    };
    let why = "the kernel takes no programs: Operation not permitted";
    let mut without = daemon();
    without.interfaces[0].settings.set("kind", Some("veth"));
    without.interfaces[0].path_reason = Some(why.into());
    let name = without.interfaces[0].name.clone();
    assert_eq!(said(&without), (Level::Warn, format!("not for interface {name}: {why}")));
    let mut virtual_machine = daemon();
    let reason = format!("interface {name}: only kinds veth and local have it, this is kind vhost-user");
    let kernel = KernelSummary { interfaces: 0, interface_reason: Some(reason.clone()), ..SUMMARY };
    virtual_machine.status.kernel = Some(kernel);
    let of = virtual_machine.interfaces.len();
    assert_eq!(said(&virtual_machine), (Level::Ok, format!("0 of {of} interfaces; not from {reason}")));
}

#[test]
fn each_fault_of_a_daemon_is_found() {
    let limits = "Max open files  64  64  files\n";
    let (_dir, faulty) = host(&[
        ("proc/42/limits", Some(limits)),
        ("proc/meminfo", Some("SwapTotal:  9 kB\n")),
        (
            "proc/42/task/44/status",
            Some("Name:\tdispatch-1\nCpus_allowed_list:\t3\nnonvoluntary_ctxt_switches:\t7\n"),
        ),
    ]);
    let findings = examine(&faulty, Some(&daemon()));
    assert_eq!(level(&findings, "files"), Level::Problem);
    assert_eq!(level(&findings, "memlock"), Level::Warn);
    assert_eq!(level(&findings, "pinning"), Level::Problem);

    let (_dir, host) = host(&[]);
    let change = |change: fn(&mut Daemon), check: &str| {
        let mut daemon = daemon();
        change(&mut daemon);
        level(&examine(&host, Some(&daemon)), check)
    };
    assert_eq!(change(|d| d.interfaces[0].state = "down".into(), "interfaces"), Level::Warn);
    assert_eq!(change(|d| d.interfaces[0].state = "broken".into(), "interfaces"), Level::Problem);
    assert_eq!(change(|d| d.interfaces[0].notes.push("its MTU is too large".into()), "guests"), Level::Warn);
    let veth = |d: &mut Daemon| {
        d.interfaces[0].settings.set("kind", Some("veth"));
        d.interfaces[0].path_reason = Some("kernel_path is off".into());
    };
    assert_eq!(change(veth, "kernel-path"), Level::Warn);
    let lan = |d: &mut Daemon| d.interfaces[0].settings.set("kind", Some("local"));
    assert_eq!(change(lan, "kernel-path"), Level::Warn);
    let pin_error = |d: &mut Daemon| {
        let pin_error = Some("cannot mount a bpffs".into());
        d.status.kernel = Some(KernelSummary { pin_error, ..SUMMARY });
    };
    assert_eq!(change(pin_error, "kernel-path"), Level::Warn);
    let blocked = |d: &mut Daemon| {
        let link_reason = Some("link peer: the other host does not receive UDP port 9789".into());
        d.status.kernel = Some(KernelSummary { link_reason, ..SUMMARY });
    };
    assert_eq!(change(blocked, "kernel-path"), Level::Warn);
    let sealed = |d: &mut Daemon| {
        let link_reason = Some(SEALED_LINKS_ONLY.into());
        d.status.kernel = Some(KernelSummary { link_reason, ..SUMMARY });
    };
    assert_eq!(change(sealed, "kernel-path"), Level::Ok);
    assert_eq!(change(|d| d.links[0].state = "unreachable".into(), "links"), Level::Problem);
    assert_eq!(change(|d| d.links[0].heard_s = None, "links"), Level::Warn);
    let unheard = |d: &mut Daemon| (d.links[0].state, d.links[0].heard_s) = ("down".into(), None);
    assert_eq!(change(unheard, "links"), Level::Problem);
    let foreign = |d: &mut Daemon| {
        (d.links[0].state, d.links[0].heard_s) = ("down".into(), None);
        d.links[0].settings.set("encapsulation", Some("vxlan"));
    };
    assert_eq!(change(foreign, "links"), Level::Warn);
    for (reason, sealed, want) in [
        ("nothing came for 1.1 s", false, Some("no firewall blocks UDP between")),
        ("12.0 % of probes are lost", false, Some("no firewall blocks UDP between")),
        ("connection refused; is vnetd with a sealed link running there?", true, Some("UDP and TCP")),
        ("Network is unreachable (os error 101)", false, Some("see 'ip route get 10.0.0.2'")),
        ("the peer asks for sealing: write sealed = true here as well, or remove it there", false, None),
    ] {
        let mut daemon = daemon();
        let link = &mut daemon.links[0];
        (link.state, link.reason) = ("down".into(), Some(reason.into()));
        link.settings.set("sealed", Some(sealed));
        let findings = examine(&host, Some(&daemon));
        let found = findings.iter().find(|finding| finding.check == "links").unwrap();
        assert_eq!(found.level, Level::Problem);
        match want {
            Some(want) => assert!(found.todo.as_ref().unwrap().contains(want), "{found:?}"),
            None => assert_eq!(found.todo, None),
        }
    }
    const DAY_S: u64 = 86_400;
    assert_eq!(change(|d| d.status.certificate_s = Some(400 * DAY_S), "certificates"), Level::Ok);
    assert_eq!(change(|d| d.status.certificate_s = Some(29 * DAY_S), "certificates"), Level::Warn);
    assert_eq!(change(|d| d.status.certificate_s = Some(0), "certificates"), Level::Problem);
    assert_eq!(change(|d| d.links[0].certificate_s = Some(DAY_S), "certificates"), Level::Warn);
    assert_eq!(change(|d| d.interfaces[0].settings.set("mtu", Some(9000)), "path-mtu"), Level::Ok);
    let bare = |d: &mut Daemon| {
        d.interfaces[0].settings.set("mtu", Some(1500));
        d.links[0].settings.set("encapsulation", Some("vnet"));
    };
    assert_eq!(change(bare, "path-mtu"), Level::Warn);
    assert_eq!(change(|d| d.status.dispatchers = 4, "cores"), Level::Warn);
    assert_eq!(change(|d| d.overlay.as_mut().unwrap().alarms[0].age_s = 5, "overlay"), Level::Warn);
    assert_eq!(change(|d| d.overlay.as_mut().unwrap().state = "away".into(), "overlay"), Level::Problem);
    assert_eq!(change(|_| {}, "overlay"), Level::Ok);
    let twice = |d: &mut Daemon| {
        let twice = serde_json::json!([
            { "network": 1, "mac": "52:54:00:00:00:01", "at": "interface c1", "also": "link h2", "age_s": 3 },
        ]);
        d.status.duplicate_addresses = serde_json::from_value(twice).unwrap();
    };
    assert_eq!(change(twice, "addresses"), Level::Problem);
    let stranger = |d: &mut Daemon| {
        let sender = serde_json::json!({ "address": "10.0.0.7:9000", "datagrams": 21, "age_s": 3 });
        d.status.unknown_sender = serde_json::from_value(sender).unwrap();
    };
    assert_eq!(change(stranger, "strangers"), Level::Warn);
    let mut daemon = daemon();
    [twice, stranger].iter().for_each(|change| change(&mut daemon));
    let text = text(&examine(&host, Some(&daemon)), Some(&daemon));
    for told in
        ["use 52:54:00:00:00:01: one at interface c1, one at link h2", "10.0.0.7:9000 sends to this host"]
    {
        assert!(text.contains(told), "{text}");
    }
}

#[test]
fn a_problem_comes_with_reason_and_fix() {
    let (_dir, host) = host(&[("dev/net/tun", None)]);
    let text = text(&examine(&host, None), None);
    assert!(text.starts_with("no vnetd answers"), "{text}");
    assert!(text.contains("PROBLEM  tun           /dev/net/tun is missing\n         why: "), "{text}");
    assert!(text.contains("\n         do:  modprobe tun"), "{text}");
}

#[test]
fn the_checks_run_on_this_machine() {
    let findings = examine(&Host::at(Path::new("/")), None);
    assert!(findings.len() > 10 && findings.iter().all(|finding| !finding.what.is_empty()));
}
