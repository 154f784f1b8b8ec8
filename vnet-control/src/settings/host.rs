//! Keys of tables that occur once in a file: `[host]`, `[control]`, `[dispatch]`, `[bridge]`, `[identity]`; and `[[network]]`.

use std::net::SocketAddr;
use std::path::PathBuf;

use vnet::dispatch::isolation::PRIORITY_MAX;
use vnet::dispatch::recruit::Recruiting;
use vnet::dispatch::yielding::Strategy;
use vnet::frame::{BATCH_MAX, NetworkId};
use vnet::link::sealed::identity::IdentityFiles;
use vnet::link::{PORTS_MAX, ZeroCopy};

use super::key::{Applies, Declaration, Field, field};
use super::kinds::{Kind, address, file, flag, list, name, network, number, numbers, socket, word};
use crate::desired::*;
use crate::table::{KeyTable, Notes, Reader};

const THREADS_MAX: u32 = 64;
const CPU_MAX: u32 = 8_191;
const US_MAX: u32 = 1_000_000;
const AGEING_MAX_S: u32 = 1_000_000;
const OUTLIVE_MAX_S: u32 = 3600;
const REKEY_MIN_S: u32 = 2;
const REKEY_MAX_S: u32 = 86_400;
/// Maximum number of rendezvous pairs of a host: each pair occupies a UDP port.
const MEETINGS_MAX: u32 = 256;

/// `[host]`
pub static HOST: Declaration<HostSpec> = Declaration {
    title: "[host]",
    applies: Applies::Reload,
    selector: None,
    default: HostSpec::default,
    fields: &[field!("name", name(), |host: HostSpec| host.name, "this host's name in the overlay")
        .needed("\"h1\"")
        .note("names are 1 to 64 letters, digits, `.`, `_`, `-`; beside an `[identity]` a change takes a restart")],
};

pub(super) fn read_host(table: KeyTable, notes: &mut Notes) -> Item<HostSpec> {
    read(&HOST, table, notes, |_, _| ())
}

/// `[control]`
pub static CONTROL: Declaration<ControlSpec> = Declaration {
    title: "[control]",
    applies: Applies::Restart,
    selector: None,
    default: ControlSpec::default,
    fields: &[
        field!(
            "socket",
            socket(),
            |control: ControlSpec| control.socket,
            "Unix socket of the API, for root and vnetd's user"
        ),
        field!(
            "http",
            address(),
            |control: ControlSpec| control.access.http,
            "address of the API, metrics and events over TCP: changes need the token, reading does not"
        )
        .absent("off")
        .note("beyond loopback only with `tls_cert`"),
        field!(
            "console",
            address(),
            |control: ControlSpec| control.access.console,
            "address of the control language over TCP; every client that can connect may change everything"
        )
        .absent("off")
        .note("beyond loopback only with `tls_client_ca`"),
        field!(
            "token_file",
            file(),
            |control: ControlSpec| control.access.token_file,
            "file with the token for changes by http: 32 to 1024 characters, mode 600"
        )
        .absent("no changes by TCP"),
        Field {
            read: |reader, key, control: &mut ControlSpec| {
                let cert = (file().read)(reader, key);
                cert.map(|cert| control.access.tls.get_or_insert_default().cert = cert).is_some()
            },
            show: |control: &ControlSpec| written(&control.access.tls.as_ref()?.cert),
            ..file_field("tls_cert", "PEM file of this host's certificate, with which http uses TLS")
        }
        .absent("clear text"),
        Field {
            read: |reader, key, control: &mut ControlSpec| {
                let file = (file().read)(reader, key);
                file.map(|file| control.access.tls.get_or_insert_default().key = file).is_some()
            },
            show: |control: &ControlSpec| written(&control.access.tls.as_ref()?.key),
            ..file_field("tls_key", "PEM file of that certificate's private key")
        },
        field!(
            "tls_client_ca",
            file(),
            |control: ControlSpec| control.access.tls_client_ca,
            "PEM file of an authority: console uses TLS and accepts only clients with a certificate signed by it"
        ),
    ],
};

/// A file of a pair (certificate and key): the declaration overrides how the key is read, shown and saved.
const fn file_field<S>(name: &'static str, help: &'static str) -> Field<S> {
    Field {
        key: super::key::Key::new(name, file().takes, help),
        read: |_, _, _| false,
        show: |_| None,
        save: None,
    }
}

fn written(path: &PathBuf) -> Option<serde_json::Value> {
    super::kinds::Show::show(path).filter(|_| !path.as_os_str().is_empty())
}

pub(super) fn read_control(table: KeyTable, notes: &mut Notes) -> Item<ControlSpec> {
    read(&CONTROL, table, notes, judge_access)
}

/// Control without TLS is limited to loopback: for other addresses the API needs TLS, and the console TLS client certificates.
fn judge_access(reader: &mut Reader<'_>, control: &mut ControlSpec) {
    let Access { http, console, tls, tls_client_ca, .. } = &mut control.access;
    if let Some(TlsFiles { cert, key }) = tls
        && (cert.as_os_str().is_empty() || key.as_os_str().is_empty())
    {
        let place = reader.place_of(if key.as_os_str().is_empty() { "tls_cert" } else { "tls_key" });
        reader.problem(&place, "tls_cert and tls_key belong together; name both files, or neither");
        *tls = None;
    }
    if let Some(address) = http.filter(|http| !http.ip().is_loopback() && tls.is_none()) {
        let text = format!(
            "http {address} can be reached from other hosts in clear text; write 127.0.0.1:{}, or name \
             tls_cert and tls_key",
            address.port()
        );
        reader.problem(&reader.place_of("http"), text);
    }
    if tls_client_ca.is_some() && tls.is_none() {
        let place = reader.place();
        reader.problem(&place, "tls_client_ca needs TLS; name tls_cert and tls_key, too");
    }
    let place = reader.place_of("console");
    if let Some(address) = console.filter(|console| !console.ip().is_loopback() && tls_client_ca.is_none()) {
        let text = format!(
            "console {address} is open to everyone on other hosts; write 127.0.0.1:{}, or name tls_cert, \
             tls_key and tls_client_ca",
            address.port()
        );
        reader.problem(&place, text);
    }
}

/// `[dispatch]`
pub static DISPATCH: Declaration<DispatchSpec> = Declaration {
    title: "[dispatch]",
    applies: Applies::Restart,
    selector: None,
    default: DispatchSpec::default,
    fields: &[
        field!(
            "threads",
            number::<usize>(1, THREADS_MAX),
            |dispatch: DispatchSpec| dispatch.threads,
            "number of dispatchers, which move frames, and of the threads that run them under full load"
        )
        .note("see [Several processors](#several-processors)"),
        field!(
            "threads_min",
            number::<usize>(1, THREADS_MAX),
            |dispatch: DispatchSpec| dispatch.recruiting.threads_min,
            "number of threads that always run; the others are recruited when the load is high and released when it is low"
        )
        .applies(Applies::Reload)
        .absent("as threads")
        .note("see [Threads by load](#threads-by-load)"),
        field!(
            "load_high",
            number::<u32>(1, 100),
            |dispatch: DispatchSpec| dispatch.recruiting.load_high,
            "share of its time that a thread has work for 0.2 s before another one is recruited"
        )
        .unit("%")
        .applies(Applies::Reload),
        field!(
            "load_low",
            number::<u32>(0, 99),
            |dispatch: DispatchSpec| dispatch.recruiting.load_low,
            "share of its time that one thread would have work for two, for 2 s before one of them is released; less than load_high"
        )
        .unit("%")
        .applies(Applies::Reload),
        field!(
            "spare_cpu",
            number::<u32>(0, 100),
            |dispatch: DispatchSpec| dispatch.recruiting.spare_cpu,
            "idle time of processors, in percent of one, without which no thread is recruited"
        )
        .unit("%")
        .applies(Applies::Reload),
        field!(
            "cpus",
            numbers::<usize>(0, CPU_MAX),
            |dispatch: DispatchSpec| dispatch.cpus,
            "CPUs of the dispatchers, one each"
        )
        .absent("the kernel chooses"),
        field!(
            "yield",
            word::<Strategy>(),
            |dispatch: DispatchSpec| dispatch.yield_strategy,
            "what an idle dispatcher does"
        ),
        field!(
            "sleep_us",
            number::<u32>(1, US_MAX),
            |dispatch: DispatchSpec| dispatch.sleep_us,
            "timed: how long to sleep (T_sleep of VNET/P)"
        )
        .unit("us"),
        field!(
            "nowork_us",
            number::<u32>(0, US_MAX),
            |dispatch: DispatchSpec| dispatch.nowork_us,
            "adaptive: T_nowork of VNET/P, how long to look for work before sleeping; ten times as long when requests \
             arrive at such intervals"
        )
        .unit("us"),
        field!(
            "burst",
            number::<usize>(1, BATCH_MAX as u32),
            |dispatch: DispatchSpec| dispatch.burst,
            "frames taken from an interface, and messages from a socket, at a time; fewer shorten the wait of others \
             and cost more each"
        ),
        field!(
            "priority",
            number::<u32>(1, PRIORITY_MAX),
            |dispatch: DispatchSpec| dispatch.isolation.priority,
            "real-time priority of the dispatchers (SCHED_FIFO); strategies that spin also need cpus"
        )
        .absent("an ordinary thread"),
        field!(
            "lock_memory",
            flag(),
            |dispatch: DispatchSpec| dispatch.isolation.lock_memory,
            "vnetd's memory is never paged out"
        ),
        field!(
            "busy_poll_us",
            number::<u32>(0, US_MAX),
            |dispatch: DispatchSpec| dispatch.isolation.busy_poll_us,
            "how long the kernel polls the network device itself (SO_BUSY_POLL, epoll); 0: not at all"
        )
        .unit("us"),
        field!(
            "busy_poll_budget",
            number::<u32>(1, 64),
            |dispatch: DispatchSpec| dispatch.isolation.busy_poll_budget,
            "most packets the kernel takes from the device in one busy poll (SO_BUSY_POLL_BUDGET); more for small frames \
             at high rates"
        )
        .absent("8, the kernel's own"),
        field!(
            "kernel_path",
            word::<KernelPath>(),
            |dispatch: DispatchSpec| dispatch.kernel_path,
            "the kernel forwards known flows between interfaces of kinds veth and local by itself (auto: where it can), or vnetd all \
             frames (off)"
        )
        .note("see [containers.md](containers.md)"),
        field!(
            "translate",
            word::<KernelPath>(),
            |dispatch: DispatchSpec| dispatch.translate,
            "packets of established TCP connections and UDP flows go between hosts without a tunnel's headers, to port 9790 (auto: \
             where both hosts agree and such packets arrive), or all have them (off)"
        )
        .note("see [containers.md](containers.md#packets-without-a-tunnel)"),
        field!(
            "outlive_s",
            number::<u32>(0, OUTLIVE_MAX_S),
            |dispatch: DispatchSpec| dispatch.outlive_s,
            "how long the kernel forwards established flows after vnetd has died; at least 2"
        )
        .unit("s")
        .note("see [containers.md](containers.md#when-vnetd-dies)"),
        field!(
            "bpffs",
            file(),
            |dispatch: DispatchSpec| dispatch.bpffs,
            "BPF file system in which programs and flows are pinned; mounted if there is none"
        ),
    ],
};

pub(super) fn read_dispatch(table: KeyTable, notes: &mut Notes) -> Item<DispatchSpec> {
    read(&DISPATCH, table, notes, |reader, dispatch| {
        let DispatchSpec { threads, cpus, yield_strategy, isolation, recruiting, .. } = dispatch;
        let Recruiting { threads_min, load_high, load_low, .. } = *recruiting;
        if let Some(min) = threads_min.filter(|min| min > threads) {
            let text = format!("threads_min {min} is more than threads = {threads}; write 1 to {threads}");
            reader.problem(&reader.place_of("threads_min"), text);
        }
        if load_low >= load_high {
            let text = format!(
                "load_low {load_low} must be less than load_high = {load_high}, or threads come and go at one load"
            );
            reader.problem(&reader.place_of("load_low"), text);
        }
        if !cpus.is_empty() && cpus.len() != *threads {
            let text =
                format!("cpus lists {} for {threads} threads; list one per thread, or none", cpus.len());
            reader.problem(&reader.place_of("cpus"), text);
        }
        let spins = matches!(yield_strategy, Strategy::Immediate | Strategy::Adaptive);
        if isolation.priority.is_some() && spins && cpus.is_empty() {
            let text = "with priority, a dispatcher that spins starves its processor; give it one with \
                        cpus, or yield = \"block\"";
            reader.problem(&reader.place_of("priority"), text);
        }
    })
}

/// `[bridge]`
pub static BRIDGE: Declaration<BridgeSpec> = Declaration {
    title: "[bridge]",
    applies: Applies::Restart,
    selector: None,
    default: BridgeSpec::default,
    fields: &[
        field!(
            "listen",
            address(),
            |bridge: BridgeSpec| bridge.listen,
            "address at which links arrive: UDP, and TCP for handshakes of sealed links; [::] accepts IPv4, too"
        ),
        field!(
            "ports",
            number::<u16>(1, PORTS_MAX as u32),
            |bridge: BridgeSpec| bridge.ports,
            "number of UDP ports, consecutive from that of listen, all open in the firewall; 1, or at least one per dispatcher"
        ),
        field!(
            "vxlan_listen",
            address(),
            |bridge: BridgeSpec| bridge.vxlan_listen,
            "address at which VXLAN links arrive (UDP); VXLAN links need it"
        )
        .absent("nowhere")
        .note("usual: `[::]:4789`"),
        field!(
            "stream_listen",
            address(),
            |bridge: BridgeSpec| bridge.stream_listen,
            "address at which stream links arrive (TCP); links with connect = false need it"
        )
        .absent("nowhere")
        .note("usual: `[::]:9002`"),
        field!(
            "zero_copy",
            word::<ZeroCopy>(),
            |bridge: BridgeSpec| bridge.zero_copy,
            "send large frames of virtual machines from guest memory without a copy; auto: where that is faster"
        )
        .note("see [tuning.md](tuning.md#sending-without-a-copy-zero_copy)"),
        field!(
            "trusted",
            Kind::new(super::key::Takes::Texts("PREFIX"), |reader, key| list::<Prefix>(reader, key, "10.0.0.0/8")),
            |bridge: BridgeSpec| bridge.trusted,
            "networks over which links may carry clear text, as in [\"10.0.0.0/8\"]"
        )
        .absent("none")
        .applies(Applies::Reload),
        field!(
            "rekey_s",
            number::<u32>(REKEY_MIN_S, REKEY_MAX_S),
            |bridge: BridgeSpec| bridge.rekey_s,
            "interval at which sealed links get new keys"
        )
        .unit("s"),
        field!(
            "meetings",
            number::<u16>(0, MEETINGS_MAX),
            |bridge: BridgeSpec| bridge.meetings,
            "rendezvous: most pairs of hosts behind NAT that this host connects; each takes a UDP port after those of \
             listen, open in the firewall"
        )
        .note("see [below](#hosts-that-cannot-reach-each-other)"),
    ],
};

pub(super) fn read_bridge(table: KeyTable, notes: &mut Notes) -> Item<BridgeSpec> {
    read(&BRIDGE, table, notes, |reader, bridge| {
        let BridgeSpec { listen, ports, meetings, .. } = *bridge;
        judge_ports(reader, ports, Some(listen));
        if meetings > 0 && listen.port().checked_add(ports - 1 + meetings).is_none() {
            let text = format!(
                "{meetings} UDP ports for meetings, after those of the bridge, end beyond 65535; listen on a lower one"
            );
            reader.problem(&reader.place_of("meetings"), text);
        }
    })
}

/// Checks that `ports` consecutive ports from that of `first` on do not exceed 65535.
pub(super) fn judge_ports(reader: &mut Reader<'_>, ports: u16, first: Option<SocketAddr>) {
    if let Some(first) = first
        && first.port().checked_add(ports - 1).is_none()
    {
        let text = format!("{ports} ports from {} on end beyond 65535; begin with a lower one", first.port());
        reader.problem(&reader.place_of("ports"), text);
    }
}

/// `[identity]`
pub static IDENTITY: Declaration<IdentityFiles> = Declaration {
    title: "[identity]",
    applies: Applies::Restart,
    selector: None,
    default: || IdentityFiles {
        ca: PathBuf::new(),
        certificate: PathBuf::new(),
        key: PathBuf::new(),
        crl: None,
    },
    fields: &[
        field!("ca", file(), |identity: IdentityFiles| identity.ca, "PEM file: the trusted authorities")
            .needed("\"/etc/vnet/keys/ca.pem\"")
            .note("for sealed links; files may be replaced at any time"),
        field!(
            "certificate",
            file(),
            |identity: IdentityFiles| identity.certificate,
            "PEM file: this host's certificate for its name"
        )
        .needed("\"/etc/vnet/keys/h1.pem\""),
        field!("key", file(), |identity: IdentityFiles| identity.key, "PEM file: its private key")
            .needed("\"/etc/vnet/keys/h1.key\""),
        field!("crl", file(), |identity: IdentityFiles| identity.crl, "PEM file: revoked certificates")
            .absent("none"),
    ],
};

pub(super) fn read_identity(table: KeyTable, notes: &mut Notes) -> Option<Item<IdentityFiles>> {
    let before = notes.problems.len();
    let item = read(&IDENTITY, table, notes, |_, _| ());
    (notes.problems.len() == before).then_some(item)
}

/// `[[network]]`
pub static NETWORK: Declaration<NetworkSpec> = Declaration {
    title: "[[network]]",
    applies: Applies::Reload,
    selector: None,
    default: || NetworkSpec::new(NetworkId::DEFAULT),
    fields: &[
        field!(
            "id",
            network(),
            |own: NetworkSpec| own.id,
            "number of the network; every network except 1 must be declared"
        )
        .needed("1")
        .phrase(""),
        field!(
            "learning",
            flag(),
            |own: NetworkSpec| own.learning,
            "learn addresses, and flood frames to unknown ones; false: only routes decide"
        )
        .phrase(" learning")
        .phrase_off(" no learning")
        .always(),
        field!(
            "ageing_s",
            number::<u32>(0, AGEING_MAX_S),
            |own: NetworkSpec| own.ageing_s,
            "ageing time: how long a learned address is kept without a frame from it; 0: learn nothing, always flood"
        )
        .unit("s")
        .phrase("ageing {} s")
        .always(),
        field!("relay", flag(), |own: NetworkSpec| own.relay, "this host forwards frames between links")
            .note("see [below](#relay-hosts)")
            .phrase("relayed"),
        field!(
            "daemon_engine",
            flag(),
            |own: NetworkSpec| own.daemon_engine,
            "applications in containers and virtual machines may have vnetd run the interconnect's engine for them"
        )
        .note("see [the interconnect](interconnect.md#the-daemons-engine)")
        .phrase("daemon engine"),
        field!(
            "prefer_daemon_engine",
            flag(),
            |own: NetworkSpec| own.prefer_daemon_engine,
            "where `daemon_engine` is true, applications in containers that can use it take it without asking for it"
        )
        .note("see [the interconnect](interconnect.md#the-daemons-engine)")
        .phrase("preferred"),
    ],
};

pub(super) fn read_network(table: KeyTable, notes: &mut Notes) -> Option<Item<NetworkSpec>> {
    let before = notes.problems.len();
    let item = read(&NETWORK, table, notes, |reader, network| {
        if network.prefer_daemon_engine && !network.daemon_engine {
            let text = "prefer_daemon_engine needs daemon_engine = true, which allows the engine";
            reader.problem(&reader.place_of("prefer_daemon_engine"), text);
        }
    });
    (notes.problems.len() == before).then_some(item)
}

impl std::fmt::Display for NetworkSpec {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(NETWORK.phrases(self).trim_start())
    }
}

/// Reads a table; `judge` checks the constraints between its keys.
pub(super) fn read<S>(
    declaration: &'static Declaration<S>,
    table: KeyTable,
    notes: &mut Notes,
    judge: impl FnOnce(&mut Reader<'_>, &mut S),
) -> Item<S> {
    let mut reader = Reader::new(declaration.title, table, notes);
    let (place, mut spec) = (reader.place(), (declaration.default)());
    declaration.read(&mut reader, &mut spec);
    judge(&mut reader, &mut spec);
    reader.finish();
    Item { place, spec }
}
