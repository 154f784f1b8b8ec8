//! Checks of a running vnetd: its limits, dispatcher threads, interfaces and links.

use std::collections::BTreeMap;
use std::time::Duration;

use vnet_control::api::{GUARDED, Interface, LIMITED, Link, Overlay, SEALED_LINKS_ONLY, Status};

use super::finding::{Daemon, Finding, Level};
use super::host::{Host, cpus};
use super::machine::process;
use crate::show::{CERTIFICATE_SOON_S, ends};

/// File descriptors of one vhost-user queue pair (two kicks, two calls, two errors), and of the daemon itself.
const FILES_OF_QUEUE: u64 = 6;
const FILES_BASE: u64 = 256;
/// How long threads are observed.
const WATCH: Duration = Duration::from_millis(200);
/// Involuntary context switches per second of a dispatcher from which the doctor warns.
const PREEMPTIONS_PER_S: f64 = 50.0;
/// Overhead of a native datagram over a frame's payload in bytes: IP, UDP, native header, offload metadata, Ethernet
/// header.
const NATIVE_BYTES: u32 = 20 + 8 + 16 + 12 + 14;
/// Overhead of encapsulation `vnet` in bytes.
const BARE_BYTES: u32 = 20 + 8 + 14;
/// Overhead of VXLAN in bytes.
const VXLAN_BYTES: u32 = BARE_BYTES + 8;

/// Age in seconds after which an alarm of the overlay is no longer reported.
const ALARM_AGE_S: u64 = 3600;

/// All checks that need a running vnetd.
pub fn examine(host: &Host, daemon: &Daemon) -> Vec<Finding> {
    let mut findings = vec![files(host, daemon), locked_memory(host, daemon)];
    findings.extend(dispatchers(host, daemon));
    findings.push(interfaces(&daemon.interfaces));
    findings.push(guests(&daemon.interfaces));
    findings.push(kernel_path(daemon));
    findings.push(addresses(&daemon.status));
    findings.push(links(&daemon.links));
    findings.push(strangers(&daemon.status));
    findings.push(certificates(daemon));
    findings.push(path_mtus(&daemon.interfaces, &daemon.links));
    findings.extend(daemon.overlay.as_ref().map(overlay));
    findings
}

fn limit(host: &Host, daemon: &Daemon, name: &str) -> Option<u64> {
    let limits = host.field(&format!("{}/limits", process(Some(daemon))), name)?;
    match limits.split_whitespace().next()? {
        "unlimited" => Some(u64::MAX),
        number => number.parse().ok(),
    }
}

fn in_words(limit: u64) -> String {
    if limit == u64::MAX { "unlimited".into() } else { limit.to_string() }
}

fn files(host: &Host, daemon: &Daemon) -> Finding {
    const WHY: &str = "each queue takes file descriptors; without them a guest cannot attach";
    let Some(limit) = limit(host, daemon, "Max open files") else {
        return Finding::ok("files", WHY, "limit unknown");
    };
    let queues: u64 =
        daemon.interfaces.iter().filter_map(|interface| interface.settings.number("queues")).sum();
    let needed = FILES_BASE + FILES_OF_QUEUE * queues;
    let what = format!("vnetd may open {} files and needs up to {needed}", in_words(limit));
    if limit >= needed {
        return Finding::ok("files", WHY, what);
    }
    let todo = format!("LimitNOFILE={} in vnetd's service", (2 * needed).max(65_536));
    Finding::bad("files", Level::Problem, WHY, what, todo)
}

fn locked_memory(host: &Host, daemon: &Daemon) -> Finding {
    const WHY: &str = "locked pages stay in memory; a swapped-out guest stalls its dispatcher";
    let limit = limit(host, daemon, "Max locked memory").map_or("unknown".into(), in_words);
    let swap = host.field("proc/meminfo", "SwapTotal").unwrap_or_default();
    let no_swap = swap.is_empty() || swap.starts_with("0 ");
    let what = format!("limit {limit}, {}", if no_swap { "no swap".into() } else { format!("swap {swap}") });
    if no_swap {
        return Finding::ok("memlock", WHY, what);
    }
    let todo = "give guests locked memory (QEMU: -overcommit mem-lock=on), or lower vm.swappiness";
    Finding::bad("memlock", Level::Warn, WHY, what, todo)
}

/// A dispatcher's thread.
struct Thread {
    name: String,
    allowed: Vec<usize>,
    preempted: u64,
}

fn threads(host: &Host, daemon: &Daemon) -> Vec<Thread> {
    let process = process(Some(daemon));
    let tasks = host.names(&format!("{process}/task"));
    let thread = |task: &String| {
        let status = host.text(&format!("{process}/task/{task}/status"))?;
        let field = |key| super::host::field(&status, key);
        let name = field("Name").filter(|name| name.starts_with("dispatch-"))?;
        let preempted = field("nonvoluntary_ctxt_switches")?.parse().ok()?;
        Some(Thread { name, allowed: cpus(&field("Cpus_allowed_list")?), preempted })
    };
    let mut threads: Vec<_> = tasks.iter().filter_map(thread).collect();
    threads.sort_by(|a, b| a.name.cmp(&b.name));
    threads
}

fn dispatchers(host: &Host, daemon: &Daemon) -> Vec<Finding> {
    const PINNING: &str = "a dispatcher that moves between CPUs loses its caches; two on one CPU take turns";
    const COMPANY: &str = "other work on a dispatcher's CPU delays every frame of its interfaces";
    let before = threads(host, daemon);
    if before.is_empty() {
        return vec![Finding::ok("pinning", PINNING, "cannot see the dispatchers' threads")];
    }
    std::thread::sleep(WATCH);
    let after = threads(host, daemon);
    let mut by_cpu: BTreeMap<usize, Vec<&str>> = BTreeMap::new();
    for thread in before.iter().filter(|thread| thread.allowed.len() == 1) {
        by_cpu.entry(thread.allowed[0]).or_default().push(&thread.name);
    }
    let pinning = if let Some((cpu, names)) = by_cpu.iter().find(|(_, names)| names.len() > 1) {
        let what = format!("{} are pinned to the same CPU {cpu}", names.join(" and "));
        let todo = "give [dispatch] cpus as many different CPUs as there are threads";
        Finding::bad("pinning", Level::Problem, PINNING, what, todo)
    } else if by_cpu.is_empty() {
        Finding::ok("pinning", PINNING, "not pinned ([dispatch] cpus); fine unless latency is critical")
    } else {
        let pins = by_cpu.iter().map(|(cpu, names)| format!("{} to CPU {cpu}", names[0]));
        Finding::ok("pinning", PINNING, pins.collect::<Vec<_>>().join(", "))
    };
    let mut worst = ("", 0.0);
    for thread in &after {
        let earlier = before.iter().find(|earlier| earlier.name == thread.name);
        let times = thread.preempted.saturating_sub(earlier.map_or(thread.preempted, |t| t.preempted));
        let rate = times as f64 / WATCH.as_secs_f64();
        if rate > worst.1 {
            worst = (&thread.name, rate);
        }
    }
    let company = match worst {
        (name, rate) if rate > PREEMPTIONS_PER_S => {
            let what = format!("{name} is preempted {rate:.0} times per second");
            let todo = "pin dispatchers ([dispatch] cpus) and keep other work away: isolcpus=, cpusets, IRQ affinity";
            Finding::bad("company", Level::Warn, COMPANY, what, todo)
        }
        _ => Finding::ok("company", COMPANY, "dispatchers are not being preempted"),
    };
    vec![pinning, company]
}

fn interfaces(interfaces: &[Interface]) -> Finding {
    const WHY: &str = "frames to an interface that is not up are dropped";
    let broken = |interface: &&Interface| interface.state == "broken";
    if let Some(interface) = interfaces.iter().find(broken) {
        let reason = interface.reason.as_deref().unwrap_or("no reason given");
        let what = format!("interface {} is broken: {reason}", interface.name);
        let todo = "restart its guest's driver; see vnetd's log";
        return Finding::bad("interfaces", Level::Problem, WHY, what, todo);
    }
    let up = interfaces.iter().filter(|interface| interface.state == "up").count();
    let what = format!("{up} of {} up", interfaces.len());
    let Some(down) = interfaces.iter().find(|interface| interface.state != "up") else {
        return Finding::ok("interfaces", WHY, what);
    };
    let reason = down.reason.as_deref().unwrap_or("no reason given");
    let what = format!("{what}; interface {} is down: {reason}", down.name);
    let todo = "start the guests; 'vnet interface list' shows what each waits for";
    Finding::bad("interfaces", Level::Warn, WHY, what, todo)
}

/// Notes of interfaces: misconfigurations that lose frames although the interface may be up.
fn guests(interfaces: &[Interface]) -> Finding {
    const WHY: &str = "a guest whose settings do not match its interface's loses frames";
    let noted: Vec<_> = interfaces.iter().filter(|interface| !interface.notes.is_empty()).collect();
    let Some(first) = noted.first() else {
        return Finding::ok("guests", WHY, "no interface has a note");
    };
    let what = format!("interface {}: {}", first.name, first.notes.join("; "));
    let todo = match noted.len() {
        1 => "mend what the note says".into(),
        n => format!("mend what the note says; 'vnet interface list' shows those of {n} interfaces"),
    };
    Finding::bad("guests", Level::Warn, WHY, what, todo)
}

/// Interfaces of containers and of existing devices have the kernel's own path, which outlives vnetd.
fn kernel_path(daemon: &Daemon) -> Finding {
    const WHY: &str = "frames that pass vnetd wait for a dispatcher; the kernel forwards known flows between containers at once";
    let chosen = |interface: &Interface| matches!(interface.path_reason.as_deref(), Some(LIMITED | GUARDED));
    let missing = |interface: &&Interface| {
        interface.may_have_kernel_path()
            && interface.state == "up"
            && interface.path != "kernel"
            && !chosen(interface)
    };
    if let Some(interface) = daemon.interfaces.iter().find(missing) {
        let reason = interface.path_reason.as_deref().unwrap_or("no reason given");
        let what = format!("not for interface {}: {reason}", interface.name);
        let todo = "see 'Which path an interface has' in docs/containers.md";
        return Finding::bad("kernel-path", Level::Warn, WHY, what, todo);
    }
    if let Some(why) = daemon.status.kernel.as_ref().and_then(|kernel| kernel.pin_error.as_ref()) {
        let what = format!("the next vnetd cannot adopt its flows: {why}");
        let todo =
            "mount a BPF file system outside of vnetd's mount namespace, and name it by [dispatch] bpffs";
        return Finding::bad("kernel-path", Level::Warn, WHY, what, todo);
    }
    let with = daemon.interfaces.iter().filter(|interface| interface.path == "kernel").count();
    let mut what = format!("{with} of {} interfaces", daemon.interfaces.len());
    let summary = daemon.status.kernel.as_ref();
    // Reported without a warning: the user has chosen this kind, or a setting that excludes the path.
    what.extend(
        summary.and_then(|kernel| kernel.interface_reason.as_ref()).map(|why| format!("; not from {why}")),
    );
    if let Some(why) = summary.and_then(|kernel| kernel.link_reason.as_ref()) {
        what += &format!("; not to other hosts: {why}");
        // Sealing is a choice.
        if why != SEALED_LINKS_ONLY {
            let todo = "see 'The wire: between hosts' in docs/containers.md";
            return Finding::bad("kernel-path", Level::Warn, WHY, what, todo);
        }
    }
    Finding::ok("kernel-path", WHY, what)
}

fn links(links: &[Link]) -> Finding {
    const WHY: &str = "guests behind an unreachable host cannot be reached from here";
    // A foreign peer does not answer probes, so silence may just mean that it has nothing to send.
    let is_quiet = |link: &Link| {
        link.heard_s.is_none() && matches!(&*link.settings.text("encapsulation"), "vnet" | "vxlan")
    };
    if let Some(link) = links.iter().find(|link| link.state != "up" && !is_quiet(link)) {
        let reason = link.reason.as_deref().unwrap_or("no reason given");
        let what =
            format!("link {} to {}: {}: {reason}", link.name, link.settings.text("remote"), link.state);
        return Finding { todo: remedy(link), ..Finding::bad("links", Level::Problem, WHY, what, "") };
    }
    let silent: Vec<_> = links.iter().filter(|link| link.heard_s.is_none()).collect();
    if let Some(link) = silent.first() {
        let what = format!(
            "{} of {} links never received anything, such as {}",
            silent.len(),
            links.len(),
            link.name
        );
        return Finding::bad("links", Level::Warn, WHY, what, reach(link));
    }
    Finding::ok("links", WHY, format!("{} up and receiving", links.len()))
}

/// How to let datagrams and connections of a link arrive.
fn reach(link: &Link) -> String {
    let protocols = match (&*link.settings.text("encapsulation"), link.settings.flag("sealed")) {
        ("stream", _) => "TCP",
        // Handshakes use TCP.
        (_, true) => "UDP and TCP",
        (_, false) => "UDP",
    };
    let remote = link.settings.text("remote");
    let remote = if remote.is_empty() { &link.name } else { &remote };
    format!("check that vnetd runs at {remote} and that no firewall blocks {protocols} between the hosts")
}

/// What to do about a link that is not up; `None` if the reason for its state contains that.
fn remedy(link: &Link) -> Option<String> {
    // The kernel's errors about routes, and reasons that advise by themselves; all others are of a peer that is not reached.
    const NO_ROUTE: [&str; 3] = ["unreachable", "No route to host", "Cannot assign requested address"];
    const ADVISED: [&str; 6] = ["write ", "name the other", "give each", "certificate", "remove ", "wrong"];
    let reason = link.reason.as_deref().unwrap_or_default();
    let has = |words: &[&str]| words.iter().any(|word| reason.contains(word));
    if has(&NO_ROUTE) {
        let remote = link.settings.text("remote");
        let address = remote.rsplit_once(':').map_or(&*remote, |(address, _)| address);
        return Some(format!("see 'ip route get {}'", address.trim_matches(['[', ']'])));
    }
    (!has(&ADVISED)).then(|| reach(link))
}

fn addresses(status: &Status) -> Finding {
    const WHY: &str = "of two stations with one MAC address only one is reached, now this one, now that one";
    let Some(last) = status.duplicate_addresses.last() else {
        return Finding::ok("addresses", WHY, "no MAC address is used twice");
    };
    let what = format!(
        "two stations of network {} use {}: one at {}, one at {} ({} such addresses)",
        last.network.get(),
        last.mac,
        last.at,
        last.also,
        status.duplicate_addresses.len()
    );
    Finding::bad("addresses", Level::Problem, WHY, what, "give one of the two stations another MAC address")
}

fn strangers(status: &Status) -> Finding {
    const WHY: &str = "datagrams are taken only from the remotes of links; all others are discarded";
    let Some(last) = &status.unknown_sender else {
        return Finding::ok("strangers", WHY, "every datagram came from a link's remote");
    };
    let what = format!("{} sends to this host, but no link has that address", last.address);
    let todo = "if it is a host of the overlay, write its address and port as the remote of a [[link]]; otherwise limit the \
                bridge's port to the overlay's hosts in the firewall";
    Finding::bad("strangers", Level::Warn, WHY, what, todo)
}

fn overlay(overlay: &Overlay) -> Finding {
    const WHY: &str = "through the store hosts and guests find each other";
    let lately = overlay.alarms.iter().filter(|alarm| alarm.age_s < ALARM_AGE_S);
    if let Some(alarm) = lately.min_by_key(|alarm| alarm.age_s) {
        let what = format!(
            "{} alarms; the latest, {} {} s ago: {}",
            overlay.alarms_total, alarm.name, alarm.age_s, alarm.text
        );
        let todo = "'vnet overlay' lists the latest of each kind; docs/overlay.md says what they mean";
        return Finding::bad("overlay", Level::Warn, WHY, what, todo);
    }
    let what = format!("store {}, {} other hosts", overlay.state, overlay.hosts.len());
    if overlay.state != "connected" {
        let todo = format!("check etcd at {}, and that this host may reach it", overlay.etcd.join(" "));
        return Finding::bad("overlay", Level::Problem, WHY, what, todo);
    }
    Finding::ok("overlay", WHY, what)
}

fn certificates(daemon: &Daemon) -> Finding {
    const WHY: &str = "a sealed link gets no new keys once the certificate of either host has ended";
    let own = daemon.status.certificate_s.map(|left_s| (daemon.status.host.clone(), left_s));
    let peer = |link: &Link| Some((link.settings.text("peer"), link.certificate_s?));
    let all = own.into_iter().chain(daemon.links.iter().filter_map(peer));
    let Some((host, left_s)) = all.min_by_key(|(_, left_s)| *left_s) else {
        return Finding::ok("certificates", WHY, "none in use");
    };
    let what = format!("the certificate of {host} {}", ends(left_s));
    if left_s >= CERTIFICATE_SOON_S {
        return Finding::ok("certificates", WHY, format!("{what}, the others later"));
    }
    let level = if left_s == 0 { Level::Problem } else { Level::Warn };
    let todo = format!(
        "issue a new one ('vnet keys issue {host}') and replace the files on {host}: vnetd reads them again"
    );
    Finding::bad("certificates", level, WHY, what, todo)
}

fn path_mtus(interfaces: &[Interface], links: &[Link]) -> Finding {
    const WHY: &str = "larger frames are fragmented, and every fragment must arrive";
    let Some(largest) = interfaces.iter().filter_map(|interface| interface.settings.number("mtu")).max()
    else {
        return Finding::ok("path-mtu", WHY, "no interfaces");
    };
    // TCP segments a stream itself, so its MTU does not matter here.
    let mtu = |link: &Link| link.settings.number("mtu").unwrap_or(0);
    let overhead = |link: &Link| match &*link.settings.text("encapsulation") {
        "native" => Some(NATIVE_BYTES),
        "vnet" => Some(BARE_BYTES),
        "vxlan" => Some(VXLAN_BYTES),
        _ => None,
    };
    let is_cut = |link: &&Link| overhead(link).is_some_and(|bytes| largest + u64::from(bytes) > mtu(link));
    let cut: Vec<&Link> = links.iter().filter(is_cut).collect();
    let Some(link) = cut.iter().find(|link| link.settings.text("encapsulation") != "native").or(cut.first())
    else {
        return Finding::ok(
            "path-mtu",
            WHY,
            format!("interface MTUs of up to {largest} fit every link's path"),
        );
    };
    let what =
        format!("a frame of MTU {largest} exceeds the path MTU of link {} ({} bytes)", link.name, mtu(link));
    if link.settings.text("encapsulation") == "vnet" {
        let mtu = mtu(link).saturating_sub(BARE_BYTES.into());
        let todo = format!("set the guests' MTU to {mtu}: encapsulation vnet relies on IP fragmentation");
        return Finding::bad("path-mtu", Level::Warn, WHY, what, todo);
    }
    // Not a warning: super-frames make up for most of the cost.
    let rest = "; vnet fragments and reassembles it. A larger underlay MTU would avoid that";
    Finding::ok("path-mtu", WHY, what + rest)
}
