//! What the doctor asks of a running vnetd: its limits, its dispatchers' threads, its interfaces and links.

use std::collections::BTreeMap;
use std::time::Duration;

use vnet_control::api::{Interface, Link};

use super::host::{Host, cpus};
use super::machine::process;
use super::{Daemon, Finding, Level};

/// Descriptors of one queue pair of a vhost-user interface: two kicks, two calls, two errors; and what a daemon has anyway.
const FILES_OF_QUEUE: u64 = 6;
const FILES_BASE: u64 = 256;
/// How long threads are watched.
const WATCH: Duration = Duration::from_millis(200);
/// Times a second that a dispatcher may be pushed off its CPU before that is worth a word.
const PREEMPTIONS_PER_S: f64 = 50.0;
/// Bytes that a native datagram adds to a frame's payload: IP, UDP, native header, offload metadata, Ethernet header.
const NATIVE_BYTES: u32 = 20 + 8 + 16 + 12 + 14;
/// The same for a bare frame.
const BARE_BYTES: u32 = 20 + 8 + 14;
/// The same for a VXLAN datagram.
const VXLAN_BYTES: u32 = BARE_BYTES + 8;

/// All checks that need a daemon.
pub fn examine(host: &Host, daemon: &Daemon) -> Vec<Finding> {
    let mut findings = vec![files(host, daemon), locked_memory(host, daemon)];
    findings.extend(dispatchers(host, daemon));
    findings.push(interfaces(&daemon.interfaces));
    findings.push(links(&daemon.links));
    findings.push(path_mtus(&daemon.interfaces, &daemon.links));
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
    const WHY: &str = "each queue takes file descriptors; without one a guest cannot attach";
    let Some(limit) = limit(host, daemon, "Max open files") else {
        return Finding::ok("files", WHY, "limit not known");
    };
    let queues: u64 = daemon.interfaces.iter().map(|interface| u64::from(interface.queues)).sum();
    let needed = FILES_BASE + FILES_OF_QUEUE * queues;
    let what = format!("vnetd may open {} files, and needs up to {needed}", in_words(limit));
    if limit >= needed {
        return Finding::ok("files", WHY, what);
    }
    let todo = format!("LimitNOFILE={} in vnetd's service", (2 * needed).max(65_536));
    Finding::bad("files", Level::Problem, WHY, what, todo)
}

fn locked_memory(host: &Host, daemon: &Daemon) -> Finding {
    const WHY: &str = "pages that are locked stay in memory; a swapped-out guest stalls its dispatcher";
    let limit = limit(host, daemon, "Max locked memory").map_or("not known".into(), in_words);
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
    const COMPANY: &str = "what else runs on a dispatcher's CPU delays every frame of its interfaces";
    let before = threads(host, daemon);
    if before.is_empty() {
        return vec![Finding::ok("pinning", PINNING, "the dispatchers' threads cannot be seen from here")];
    }
    std::thread::sleep(WATCH);
    let after = threads(host, daemon);
    let mut by_cpu: BTreeMap<usize, Vec<&str>> = BTreeMap::new();
    for thread in before.iter().filter(|thread| thread.allowed.len() == 1) {
        by_cpu.entry(thread.allowed[0]).or_default().push(&thread.name);
    }
    let pinning = if let Some((cpu, names)) = by_cpu.iter().find(|(_, names)| names.len() > 1) {
        let what = format!("{} are pinned to CPU {cpu} together", names.join(" and "));
        let todo = "give [dispatch] cpus as many different CPUs as there are threads";
        Finding::bad("pinning", Level::Problem, PINNING, what, todo)
    } else if by_cpu.is_empty() {
        Finding::ok("pinning", PINNING, "not pinned ([dispatch] cpus); good unless latency is all")
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
            let what = format!("{name} is pushed off its CPU {rate:.0} times a second");
            let todo =
                "pin dispatchers ([dispatch] cpus) and keep others away: isolcpus=, cpusets, IRQ affinity";
            Finding::bad("company", Level::Warn, COMPANY, what, todo)
        }
        _ => Finding::ok("company", COMPANY, "dispatchers are not pushed off their CPUs at the moment"),
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
    if up == interfaces.len() {
        return Finding::ok("interfaces", WHY, what);
    }
    let todo = "start the guests; 'vnet interface list' says what each waits for";
    Finding::bad("interfaces", Level::Warn, WHY, what, todo)
}

fn links(links: &[Link]) -> Finding {
    const WHY: &str = "guests behind a host that cannot be reached are gone for those here";
    if let Some(link) = links.iter().find(|link| link.state != "up") {
        let reason = link.reason.as_deref().unwrap_or("no reason given");
        let what = format!("link {} to {}: {}: {reason}", link.name, link.remote, link.state);
        return Finding::bad("links", Level::Problem, WHY, what, "see 'ip route get' for its address");
    }
    let silent: Vec<_> = links.iter().filter(|link| link.heard_s.is_none()).collect();
    if let Some(link) = silent.first() {
        let what =
            format!("nothing ever came from {} of {} links, as {}", silent.len(), links.len(), link.name);
        let todo =
            format!("see that vnetd runs at {}, and that no firewall stops UDP between you", link.remote);
        return Finding::bad("links", Level::Warn, WHY, what, todo);
    }
    Finding::ok("links", WHY, format!("{} up and heard", links.len()))
}

fn path_mtus(interfaces: &[Interface], links: &[Link]) -> Finding {
    const WHY: &str = "larger frames cross in pieces, of which each must arrive";
    let Some(largest) = interfaces.iter().map(|interface| interface.mtu).max() else {
        return Finding::ok("path-mtu", WHY, "no interfaces");
    };
    // TCP cuts a stream by itself.
    let overhead = |link: &Link| match link.encapsulation.as_str() {
        "native" => Some(NATIVE_BYTES),
        "vnet" => Some(BARE_BYTES),
        "vxlan" => Some(VXLAN_BYTES),
        _ => None,
    };
    let is_cut = |link: &&Link| overhead(link).is_some_and(|bytes| largest + bytes > u32::from(link.mtu));
    let cut: Vec<&Link> = links.iter().filter(is_cut).collect();
    let Some(link) = cut.iter().find(|link| link.encapsulation != "native").or(cut.first()) else {
        return Finding::ok(
            "path-mtu",
            WHY,
            format!("interfaces' MTU of up to {largest} fits every link's path"),
        );
    };
    let what =
        format!("a frame of MTU {largest} does not fit the path of link {} ({} bytes)", link.name, link.mtu);
    if link.encapsulation == "vnet" {
        let mtu = u32::from(link.mtu).saturating_sub(BARE_BYTES);
        let todo =
            format!("set the guests' MTU to {mtu}: encapsulation vnet leaves the cutting to IP fragments");
        return Finding::bad("path-mtu", Level::Warn, WHY, what, todo);
    }
    // Nothing is wrong: super-frames make most of that good.
    let rest = "; vnet cuts and joins it. A larger MTU of the underlay would save that";
    Finding::ok("path-mtu", WHY, what + rest)
}
