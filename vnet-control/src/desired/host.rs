//! Settings of the host itself: tables that occur once in a file, and networks.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;

use vnet::dispatch::isolation::Isolation;
use vnet::dispatch::recruit::Recruiting;
use vnet::dispatch::yielding::Strategy;
use vnet::frame::{BATCH_MAX, NetworkId};
use vnet::link::ZeroCopy;
use vnet::route::AGEING_S;

use super::limits::{BRIDGE_PORT, CONTROL_SOCKET};
use crate::table::quote;

/// `[host]`
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostSpec {
    /// Name of the host in the overlay.
    pub name: String,
}

/// `[control]`: how the daemon is controlled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControlSpec {
    /// Unix socket of the HTTP/JSON API.
    pub socket: PathBuf,
    /// Access over TCP.
    pub access: Access,
}

impl Default for ControlSpec {
    fn default() -> ControlSpec {
        ControlSpec { socket: CONTROL_SOCKET.into(), access: Access::default() }
    }
}

/// TCP listeners of control, and how clients authenticate.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Access {
    /// Address of the API, metrics and events.
    pub http: Option<SocketAddr>,
    /// Address of the console, which takes the control language.
    pub console: Option<SocketAddr>,
    /// File with the bearer token that requests for changes need.
    pub token_file: Option<PathBuf>,
    /// TLS certificate and key of this host.
    pub tls: Option<TlsFiles>,
    /// PEM file of the authority that signs console clients' certificates; if set, the console uses mutual TLS.
    pub tls_client_ca: Option<PathBuf>,
}

/// PEM files of a TLS server.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TlsFiles {
    /// The certificate, then its chain.
    pub cert: PathBuf,
    /// Private key of the certificate.
    pub key: PathBuf,
}

/// `[dispatch]`: the dispatcher threads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DispatchSpec {
    /// Number of dispatchers.
    pub threads: usize,
    /// `threads_min`, `load_high`, `load_low`, `spare_cpu`.
    pub recruiting: Recruiting,
    /// CPU of each dispatcher; empty: the kernel's scheduler chooses.
    pub cpus: Vec<usize>,
    /// Yield strategy of idle dispatchers.
    pub yield_strategy: Strategy,
    /// T_sleep of VNET/P's timed yield, in microseconds.
    pub sleep_us: u32,
    /// T_nowork of VNET/P's adaptive yield, in microseconds.
    pub nowork_us: u32,
    /// Maximum number of frames taken from an interface, or messages from a socket, at a time.
    pub burst: usize,
    /// `priority`, `lock_memory`, `busy_poll_us`, `busy_poll_budget`.
    pub isolation: Isolation,
    /// The kernel's own path, for all interfaces.
    pub kernel_path: KernelPath,
    /// Packets that need no tunnel on the kernel's own path between hosts.
    pub translate: KernelPath,
    /// How long the kernel forwards established flows after vnetd has died, in seconds.
    pub outlive_s: u32,
    /// BPF file system in which programs and maps are pinned.
    pub bpffs: PathBuf,
}

/// Whether the kernel forwards known flows of containers without vnetd.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, strum::Display, strum::EnumString, strum::VariantNames,
)]
#[strum(serialize_all = "kebab-case")]
pub enum KernelPath {
    /// Use the kernel's path where it is available.
    #[default]
    Auto,
    /// Never use it: vnetd forwards every frame.
    Off,
}

/// Default of `outlive_s`: time for several attempts to start vnetd again.
const OUTLIVE_S: u32 = 30;
/// Where systemd mounts the BPF file system.
const BPFFS: &str = "/sys/fs/bpf";

impl Default for DispatchSpec {
    fn default() -> DispatchSpec {
        DispatchSpec {
            threads: 1,
            recruiting: Recruiting::default(),
            cpus: vec![],
            yield_strategy: Strategy::Adaptive,
            sleep_us: 50,
            nowork_us: 200,
            burst: BATCH_MAX,
            isolation: Isolation::default(),
            kernel_path: KernelPath::default(),
            translate: KernelPath::default(),
            outlive_s: OUTLIVE_S,
            bpffs: BPFFS.into(),
        }
    }
}

/// Default time between two rekeyings of a sealed link, in seconds.
pub const REKEY_S: u32 = 3600;

/// A prefix of IP addresses, as in 10.0.0.0/8.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prefix(pub ipnet::IpNet);

impl Prefix {
    /// True when the prefix contains `address`. IPv4-mapped IPv6 addresses count as IPv4.
    pub fn contains(&self, address: IpAddr) -> bool {
        self.0.contains(&address.to_canonical())
    }
}

impl fmt::Display for Prefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for Prefix {
    type Err = String;

    fn from_str(text: &str) -> Result<Prefix, String> {
        let prefix = text.parse::<ipnet::IpNet>().ok();
        let canonical = prefix.filter(|prefix| prefix.addr().to_canonical() == prefix.addr());
        let bad = || format!("{} is not a network; write one as 10.0.0.0/8 or fd00::/8", quote(text));
        canonical.map(Prefix).ok_or_else(bad)
    }
}

/// `[bridge]`: sockets at which links arrive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BridgeSpec {
    /// Address at which links (UDP) and handshakes of sealed links (TCP) arrive.
    pub listen: SocketAddr,
    /// Number of UDP ports, consecutive from that of `listen`.
    pub ports: u16,
    /// Address at which VXLAN links arrive (UDP); none if absent.
    pub vxlan_listen: Option<SocketAddr>,
    /// Address at which stream links arrive (TCP); none if absent.
    pub stream_listen: Option<SocketAddr>,
    /// When frames in guest memory are sent with zero copy.
    pub zero_copy: ZeroCopy,
    /// Networks over which links may carry clear text.
    pub trusted: Vec<Prefix>,
    /// Seconds after which sealed links get new keys.
    pub rekey_s: u32,
    /// Maximum number of pairs of hosts that use this host for rendezvous and relay at the same time.
    pub meetings: u16,
}

impl BridgeSpec {
    /// First UDP port for rendezvous if the bridge listens at `bridge`: the port after the bridge's own ports.
    pub fn meet_at(&self, bridge: SocketAddr) -> SocketAddr {
        let port = if self.listen.port() == 0 { 0 } else { bridge.port().saturating_add(self.ports) };
        SocketAddr::new(bridge.ip(), port)
    }
}

impl Default for BridgeSpec {
    fn default() -> BridgeSpec {
        let listen = (Ipv6Addr::UNSPECIFIED, BRIDGE_PORT).into();
        BridgeSpec {
            listen,
            ports: 1,
            vxlan_listen: None,
            stream_listen: None,
            zero_copy: ZeroCopy::Auto,
            trusted: vec![],
            rekey_s: REKEY_S,
            meetings: 0,
        }
    }
}

/// One network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetworkSpec {
    /// Number of the network.
    pub id: NetworkId,
    /// Learn addresses and flood frames to unknown destinations; if false, only rules decide.
    pub learning: bool,
    /// Ageing time of learned addresses in seconds.
    pub ageing_s: u32,
    /// This host relays frames between links (no split horizon).
    pub relay: bool,
    /// Applications may have vnetd run the interconnect's engine for them.
    pub daemon_engine: bool,
    /// Where they may, applications in containers take that engine by themselves.
    pub prefer_daemon_engine: bool,
}

impl NetworkSpec {
    /// Network `id` with default settings.
    pub fn new(id: NetworkId) -> NetworkSpec {
        NetworkSpec {
            id,
            learning: true,
            ageing_s: AGEING_S,
            relay: false,
            daemon_engine: false,
            prefer_daemon_engine: false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefixes_contain_their_addresses() {
        let contains = |prefix: &str, address: &str| {
            prefix.parse::<Prefix>().unwrap().contains(address.parse().unwrap())
        };
        for (prefix, address, want) in [
            ("10.0.0.0/8", "10.255.0.1", true),
            ("10.0.0.0/8", "11.0.0.1", false),
            ("10.0.0.0/8", "::ffff:10.1.2.3", true),
            ("192.0.2.7/32", "192.0.2.7", true),
            ("192.0.2.7/32", "192.0.2.6", false),
            ("0.0.0.0/0", "203.0.113.1", true),
            ("0.0.0.0/0", "fd00::1", false),
            ("fd00::/8", "fdff::1", true),
            ("fd00::/8", "fe80::1", false),
            ("::/0", "fe80::1", true),
            ("::/0", "10.0.0.1", false),
        ] {
            assert_eq!(contains(prefix, address), want, "{address} in {prefix}");
        }
        for bad in
            ["10.0.0.0", "10.0.0.0/33", "10.0.0.0/-1", "fd00::/129", "::ffff:10.0.0.0/104", "x/8", "", "/"]
        {
            assert!(bad.parse::<Prefix>().is_err(), "{bad}");
        }
        assert_eq!("10.0.0.0/8".parse::<Prefix>().unwrap().to_string(), "10.0.0.0/8");
    }
}
