//! Checks of the machine: devices, kernel limits, processors, memory.

use vnet::link::kernel_offloads;

use super::finding::{Daemon, Finding, Level};
use super::host::{Host, chosen, cpus};

/// Socket buffer size that the bridge requests, in bytes (`vnet/src/link/socket/buffers.rs`).
const SOCKET_BUFFER: u64 = 8 << 20;
/// Capability bits (capabilities(7)).
const CAP_NET_ADMIN: u32 = 12;

/// All checks that need no running vnetd; if there is one, they use its number of dispatchers and its privileges.
pub fn examine(host: &Host, daemon: Option<&Daemon>) -> Vec<Finding> {
    let mut findings = vec![tun(host), kvm(host), udp_offloads()];
    findings.extend(socket_buffers(host, daemon));
    findings.push(cores(host, daemon));
    findings.push(halt_polling(host, daemon));
    findings.push(isolation(host));
    findings.push(governor(host));
    findings.push(clock_source(host));
    findings.push(timer(host, daemon));
    findings.push(huge_pages(host));
    findings.push(transparent_huge_pages(host));
    findings.push(asynchronous_io(host));
    findings.push(syn_cookies(host));
    findings.push(udp_losses(host, daemon));
    findings.push(virtualization(host));
    findings
}

fn tun(host: &Host) -> Finding {
    const WHY: &str = "containers and the host itself attach through TAP devices";
    let path = host.path("dev/net/tun");
    if !path.exists() {
        let todo = "modprobe tun; in a container, pass in the device /dev/net/tun";
        return Finding::bad("tun", Level::Problem, WHY, "/dev/net/tun is missing", todo);
    }
    match std::fs::OpenOptions::new().read(true).write(true).open(path) {
        Ok(_) => Finding::ok("tun", WHY, "/dev/net/tun can be opened"),
        Err(error) => {
            let todo = "run vnetd as root or with CAP_NET_ADMIN, and permit it to open the device";
            let what = format!("/dev/net/tun cannot be opened: {error}");
            Finding::bad("tun", Level::Warn, WHY, what, todo)
        }
    }
}

fn kvm(host: &Host) -> Finding {
    const WHY: &str = "without it virtual machines are emulated, ten to fifty times slower";
    let flags = host.field("proc/cpuinfo", "flags").unwrap_or_default();
    let capable = flags.split(' ').any(|flag| matches!(flag, "vmx" | "svm"));
    match (host.has("dev/kvm"), capable) {
        (true, true) => Finding::ok("kvm", WHY, "/dev/kvm is available, and the processor supports it"),
        (true, false) => {
            let what = "/dev/kvm exists, but the processor has neither vmx nor svm";
            let todo =
                "enable nested virtualization on the outer host, or use containers, or QEMU with -accel tcg";
            Finding::bad("kvm", Level::Warn, WHY, what, todo)
        }
        (false, _) => {
            let todo = "modprobe kvm_intel or kvm_amd; enable virtualization in the firmware";
            Finding::bad("kvm", Level::Warn, WHY, "/dev/kvm is missing", todo)
        }
    }
}

fn udp_offloads() -> Finding {
    const WHY: &str = "with them one system call moves a super-frame of 64 KB instead of one datagram";
    match kernel_offloads() {
        (true, true) => Finding::ok("udp-offload", WHY, "the kernel has UDP_SEGMENT and UDP_GRO"),
        (segment, gro) => {
            let missing = [(segment, "UDP_SEGMENT"), (gro, "UDP_GRO")];
            let missing: Vec<_> = missing.iter().filter(|(has, _)| !has).map(|(_, name)| *name).collect();
            let what = format!("the kernel does not have {}", missing.join(" and "));
            let todo = "use Linux 5.0 or later";
            Finding::bad("udp-offload", Level::Problem, WHY, what, todo)
        }
    }
}

/// The process to check: vnetd if it runs, else this process.
pub fn process(daemon: Option<&Daemon>) -> String {
    daemon.map_or("proc/self".into(), |daemon| format!("proc/{}", daemon.status.pid))
}

fn has_capability(host: &Host, process: &str, bit: u32) -> bool {
    let set = host.field(&format!("{process}/status"), "CapEff");
    set.and_then(|set| u64::from_str_radix(&set, 16).ok()).is_some_and(|set| set >> bit & 1 != 0)
}

fn socket_buffers(host: &Host, daemon: Option<&Daemon>) -> Vec<Finding> {
    const WHY: &str = "bursts that overflow the bridge's socket buffer are lost";
    let privileged = has_capability(host, &process(daemon), CAP_NET_ADMIN);
    let check = |(check, limit): (&'static str, &str)| {
        let bytes = host.number(&format!("proc/sys/net/core/{limit}"))?;
        if bytes >= SOCKET_BUFFER || privileged {
            let exempt = if bytes < SOCKET_BUFFER { "; CAP_NET_ADMIN overrides it" } else { "" };
            return Some(Finding::ok(check, WHY, format!("net.core.{limit} is {bytes}{exempt}")));
        }
        let what = format!("net.core.{limit} is {bytes}, and vnetd lacks CAP_NET_ADMIN to override it");
        let todo = format!("sysctl -w net.core.{limit}={SOCKET_BUFFER}, or give vnetd CAP_NET_ADMIN");
        Some(Finding::bad(check, Level::Warn, WHY, what, todo))
    };
    [("rmem", "rmem_max"), ("wmem", "wmem_max")].into_iter().filter_map(check).collect()
}

fn cores(host: &Host, daemon: Option<&Daemon>) -> Finding {
    const WHY: &str = "a polling dispatcher takes a core that guests and the network stack need too";
    let online = online(host);
    let threads = daemon.map_or(1, |daemon| daemon.status.dispatchers);
    let what = format!(
        "{online} CPU{}, {threads} dispatcher{}",
        if online == 1 { "" } else { "s" },
        if threads == 1 { "" } else { "s" }
    );
    if threads < online {
        return Finding::ok("cores", WHY, what);
    }
    let todo = "lower [dispatch] threads, or use yield = \"adaptive\" or \"block\"";
    Finding::bad("cores", Level::Warn, WHY, what, todo)
}

/// KVM's halt polling, the halt handler of VNET/P (section 4.8).
fn halt_polling(host: &Host, daemon: Option<&Daemon>) -> Finding {
    const WHY: &str = "KVM polls this long before a halted guest gives its processor back: frames wake the guest sooner, but \
                       dispatchers and other guests wait where processors are short";
    const PATH: &str = "sys/module/kvm/parameters/halt_poll_ns";
    /// KVM's default on x86.
    const DEFAULT_NS: u32 = 200_000;
    let Some(ns) = host.number(PATH) else {
        return Finding::ok("halt-polling", WHY, "KVM is not loaded");
    };
    // A guest has at least one virtual CPU.
    let guests = daemon.map_or(0, |daemon| {
        let is_guest = |kind: &str| kind == "vhost-user";
        daemon.interfaces.iter().filter(|interface| is_guest(&interface.settings.text("kind"))).count()
    });
    let threads = daemon.map_or(0, |daemon| daemon.status.dispatchers);
    let short = guests > 0 && threads + guests > online(host);
    let what = format!("halt_poll_ns is {ns}");
    let (what, value) = match (ns, short) {
        (0, false) => (what, DEFAULT_NS),
        (1.., true) => {
            (format!("{what}, with {threads} dispatchers and {guests} guests on {} CPUs", online(host)), 0)
        }
        _ => return Finding::ok("halt-polling", WHY, what),
    };
    Finding::bad("halt-polling", Level::Warn, WHY, what, format!("echo {value} > /{PATH}"))
}

/// Number of processors.
fn online(host: &Host) -> usize {
    cpus(&host.text("sys/devices/system/cpu/online").unwrap_or_default()).len().max(1)
}

fn isolation(host: &Host) -> Finding {
    const WHY: &str = "nothing else runs on an isolated CPU, so nothing delays a dispatcher pinned there";
    let list = |path: &str| host.text(path).filter(|text| !text.is_empty() && text != "(null)");
    match list("sys/devices/system/cpu/isolated") {
        Some(isolated) => {
            let ticks = list("sys/devices/system/cpu/nohz_full")
                .map_or(", with timer ticks".into(), |cpus| format!(", without ticks: {cpus}"));
            Finding::ok("isolation", WHY, format!("isolated CPUs: {isolated}{ticks}"))
        }
        None => {
            Finding::ok("isolation", WHY, "no CPU is isolated (isolcpus=); fine unless latency is critical")
        }
    }
}

fn governor(host: &Host) -> Finding {
    const WHY: &str = "a processor that clocks down between bursts adds tens of microseconds to each";
    let mut governors: Vec<String> = host
        .names("sys/devices/system/cpu")
        .iter()
        .filter_map(|cpu| host.text(&format!("sys/devices/system/cpu/{cpu}/cpufreq/scaling_governor")))
        .collect();
    governors.sort();
    governors.dedup();
    match governors.iter().find(|governor| *governor != "performance") {
        None if governors.is_empty() => Finding::ok("governor", WHY, "no frequency scaling"),
        None => Finding::ok("governor", WHY, "performance"),
        Some(other) => {
            let todo = "cpupower frequency-set -g performance";
            Finding::bad("governor", Level::Warn, WHY, format!("'{other}' on some CPUs"), todo)
        }
    }
}

fn clock_source(host: &Host) -> Finding {
    const WHY: &str =
        "dispatchers read the clock constantly; a clock that needs a system call or device access is slow";
    let path = "sys/devices/system/clocksource/clocksource0";
    let Some(clock) = host.text(&format!("{path}/current_clocksource")) else {
        return Finding::ok("clock", WHY, "unknown");
    };
    match clock.as_str() {
        "tsc" | "kvm-clock" | "arch_sys_counter" | "hyperv_clocksource_tsc_page" => {
            Finding::ok("clock", WHY, clock)
        }
        _ => {
            let others = host.text(&format!("{path}/available_clocksource")).unwrap_or_default();
            let todo = if others.split(' ').any(|other| other == "tsc") {
                format!(
                    "echo tsc > /{path}/current_clocksource, and see dmesg for why the kernel rejected it"
                )
            } else {
                format!("only available: {others}; configure a better one in the hypervisor")
            };
            Finding::bad("clock", Level::Warn, WHY, clock, todo)
        }
    }
}

fn timer(host: &Host, daemon: Option<&Daemon>) -> Finding {
    const WHY: &str = "the timer slack, 50 us by default, prolongs each sleep of a dispatcher (sleep_us)";
    let slack_ns = host.number(&format!("{}/timerslack_ns", process(daemon)));
    let release = host.text("proc/sys/kernel/osrelease").unwrap_or_default();
    let hz = host
        .text(&format!("boot/config-{release}"))
        .and_then(|config| config.lines().find_map(|line| line.strip_prefix("CONFIG_HZ=").map(String::from)));
    let hz = hz.map(|hz| format!(", {hz} ticks per second")).unwrap_or_default();
    match slack_ns {
        Some(slack) if slack > 50_000 => {
            let what = format!("timer slack {} us{hz}", slack / 1000);
            let todo = "remove TimerSlackNSec= from vnetd's service, or set it to 50us";
            Finding::bad("timer", Level::Warn, WHY, what, todo)
        }
        Some(slack) => Finding::ok("timer", WHY, format!("timer slack {} us{hz}", slack / 1000)),
        None => Finding::ok("timer", WHY, format!("timer slack unknown{hz}")),
    }
}

fn huge_pages(host: &Host) -> Finding {
    const WHY: &str = "copies into guests' memory have fewer TLB misses with huge pages";
    let field = |key| host.field("proc/meminfo", key).unwrap_or_default();
    let (total, free) = (field("HugePages_Total"), field("HugePages_Free"));
    match total.parse::<u64>() {
        Ok(0) | Err(_) => Finding::ok(
            "huge-pages",
            WHY,
            "none reserved; to use them, set vm.nr_hugepages and memory-backend-memfd,hugetlb=on",
        ),
        Ok(total) => Finding::ok("huge-pages", WHY, format!("{free} of {total} free")),
    }
}

fn transparent_huge_pages(host: &Host) -> Finding {
    const WHY: &str = "guests' memory is shared memory; only shmem_enabled gives it transparent huge pages";
    let path = "sys/kernel/mm/transparent_hugepage/shmem_enabled";
    let text = host.text(path).unwrap_or_default();
    match chosen(&text) {
        Some(mode @ ("never" | "deny")) => {
            let todo = format!("echo advise > /{path}, or reserve huge pages for guests (hugetlb=on)");
            Finding::bad("thp", Level::Warn, WHY, format!("shared memory: {mode}"), todo)
        }
        Some(mode) => Finding::ok("thp", WHY, format!("shared memory: {mode}")),
        None => Finding::ok("thp", WHY, "not supported by this kernel"),
    }
}

fn asynchronous_io(host: &Host) -> Finding {
    const WHY: &str = "each queue of a vhost-user interface notifies its guest through its own AIO context";
    /// Upper bound on the requests that the kernel reserves for one context: more than vnetd passes to io_setup(2).
    const LEFT_MIN: u64 = 4096;
    let number = |name| host.number(&format!("proc/sys/fs/{name}"));
    let (Some(used), Some(max)) = (number("aio-nr"), number("aio-max-nr")) else {
        let todo = "use a kernel with CONFIG_AIO";
        return Finding::bad("aio", Level::Problem, WHY, "this kernel has no AIO", todo);
    };
    let what = format!("{used} of {max} requests reserved");
    if max.saturating_sub(used) >= LEFT_MIN {
        return Finding::ok("aio", WHY, what);
    }
    let todo = format!("sysctl -w fs.aio-max-nr={}", max.saturating_mul(4));
    Finding::bad("aio", Level::Problem, WHY, what, todo)
}

fn syn_cookies(host: &Host) -> Finding {
    const WHY: &str =
        "without them anybody can fill the queues of sealed links' and streams' ports from forged addresses";
    match host.number("proc/sys/net/ipv4/tcp_syncookies") {
        Some(0) => {
            let todo = "sysctl -w net.ipv4.tcp_syncookies=1";
            Finding::bad("syn-cookies", Level::Warn, WHY, "switched off", todo)
        }
        Some(_) => Finding::ok("syn-cookies", WHY, "under load, TCP keeps no state for forged addresses"),
        None => Finding::ok("syn-cookies", WHY, "unknown"),
    }
}

fn udp_losses(host: &Host, daemon: Option<&Daemon>) -> Finding {
    const WHY: &str = "the kernel dropped these datagrams, including those of links, on full socket buffers";
    let path = format!("{}/net/snmp", process(daemon));
    let Some((received, sent)) = host.text(&path).as_deref().and_then(udp_buffer_errors) else {
        return Finding::ok("udp-losses", WHY, "unknown");
    };
    let what = format!(
        "{received} received and {sent} sent datagrams dropped on full buffers since this network namespace started"
    );
    if received + sent == 0 {
        return Finding::ok("udp-losses", WHY, what);
    }
    let todo =
        "if it grows: more dispatchers, larger socket buffers, no other work on the dispatchers' cores";
    Finding::bad("udp-losses", Level::Warn, WHY, what, todo)
}

/// `RcvbufErrors` and `SndbufErrors` of UDP in /proc/net/snmp, where a line of names precedes a line of numbers.
pub fn udp_buffer_errors(snmp: &str) -> Option<(u64, u64)> {
    let mut lines = snmp.lines().filter_map(|line| line.strip_prefix("Udp: "));
    let (names, values) = (lines.next()?, lines.next()?);
    let value = |name: &str| {
        let column = names.split(' ').position(|found| found == name)?;
        values.split(' ').nth(column)?.parse().ok()
    };
    Some((value("RcvbufErrors")?, value("SndbufErrors")?))
}

fn virtualization(host: &Host) -> Finding {
    const WHY: &str =
        "in a virtual machine, VM exits and the load of other machines add to every measurement";
    let flags = host.field("proc/cpuinfo", "flags").unwrap_or_default();
    let maker =
        host.text("sys/class/dmi/id/sys_vendor").map(|maker| format!(" ({maker})")).unwrap_or_default();
    let what = if flags.split(' ').any(|flag| flag == "hypervisor") {
        format!("this is a virtual machine{maker}")
    } else {
        format!("this is a physical machine{maker}")
    };
    Finding::ok("machine", WHY, what)
}
