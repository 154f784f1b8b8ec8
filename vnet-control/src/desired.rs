//! What a host should be: the settings it starts with, and its networks, interfaces, links and routes.
//!
//! These are plain values that have passed all checks of their own; `config` reads them, `check` looks at them together,
//! `plan` compares two of them, and the engine makes them real. Each remembers where it was written, so that whatever
//! goes wrong later can still be told with its line; two that differ only in that are equal.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;

use super::access::Access;
use super::driving::Driving;
use super::overlay::spec::OverlaySpec;
use super::security::{LinkSecurity, Prefix, REKEY_S};
use super::table::Place;
use super::tunnel;
use vnet::dispatch::isolation::Isolation;
use vnet::dispatch::yielding::Strategy;
use vnet::frame::{BATCH_MAX, NetworkId};
use vnet::interface::tap::Netns;
use vnet::link::sealed::identity::IdentityFiles;
use vnet::link::{Encapsulation, Tunnel, ZeroCopy};
use vnet::route::{AGEING_S, Qualifier, STORM_FRAMES_PER_S};
use vnet::wire::ethernet::Mac;

/// Most interfaces of a host (DESIGN.md section 10).
pub const INTERFACES_MAX: usize = 1_024;
/// Most links of a host.
pub const LINKS_MAX: usize = 4_096;
/// Most routes of a host.
pub const ROUTES_MAX: usize = 1_048_576;
/// Smallest interface MTU in bytes (RFC 791: what every IPv4 host can take).
pub const MTU_MIN: u32 = 68;
/// An interface's MTU unless it says otherwise, in bytes.
pub const MTU_DEFAULT: u32 = 1_500;
/// Smallest path MTU of a link in bytes (RFC 791: what every IPv4 path can take, reassembled).
pub const LINK_MTU_MIN: u32 = 576;
/// Most queues of a TAP (the kernel's limit).
pub const TAP_QUEUES_MAX: u32 = 256;
/// Most IP addresses of an interface's guest.
pub const ADDRESSES_MAX: usize = 16;
/// Longest path of a Unix socket, in bytes (`sockaddr_un` less the closing zero).
pub const SOCKET_PATH_MAX: usize = 107;
/// The control socket unless the file says otherwise.
pub const CONTROL_SOCKET: &str = "/run/vnet/vnet.sock";
/// UDP port of links (VNET/P's).
pub const BRIDGE_PORT: u16 = 9_000;

/// A value and where it was written.
#[derive(Clone, Debug)]
pub struct Item<T> {
    /// Where.
    pub place: Place,
    /// What.
    pub spec: T,
}

impl<T: PartialEq> PartialEq for Item<T> {
    fn eq(&self, other: &Item<T>) -> bool {
        self.spec == other.spec
    }
}

/// Everything a host should be.
#[derive(Clone, Debug, PartialEq)]
pub struct Desired {
    /// `[host]`.
    pub host: Item<HostSpec>,
    /// `[control]`; fixed while vnetd runs.
    pub control: Item<ControlSpec>,
    /// `[dispatch]`; fixed while vnetd runs.
    pub dispatch: Item<DispatchSpec>,
    /// `[bridge]`; fixed while vnetd runs.
    pub bridge: Item<BridgeSpec>,
    /// `[overlay]`, where there is one; fixed while vnetd runs.
    pub overlay: Option<Item<OverlaySpec>>,
    /// `[identity]`; fixed while vnetd runs. The files' contents are not.
    pub identity: Option<Item<IdentityFiles>>,
    /// Networks with settings of their own; [`NetworkId::DEFAULT`] is there even when it is not listed.
    pub networks: Vec<Item<NetworkSpec>>,
    /// Interfaces, in the order of the file.
    pub interfaces: Vec<Item<InterfaceSpec>>,
    /// Links, in the order of the file.
    pub links: Vec<Item<LinkSpec>>,
    /// Rules, in the order of the file.
    pub routes: Vec<Item<RouteSpec>>,
}

/// Who this host is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostSpec {
    /// Its name in the overlay.
    pub name: String,
}

/// How the daemon is controlled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControlSpec {
    /// Unix socket of the HTTP/JSON API.
    pub socket: PathBuf,
    /// What is offered by TCP.
    pub access: Access,
}

impl Default for ControlSpec {
    fn default() -> ControlSpec {
        ControlSpec { socket: CONTROL_SOCKET.into(), access: Access::default() }
    }
}

/// The dispatchers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DispatchSpec {
    /// Number of dispatchers.
    pub threads: usize,
    /// Processor of each dispatcher; empty: the kernel chooses.
    pub cpus: Vec<usize>,
    /// What a dispatcher does when there is nothing to do.
    pub yield_strategy: Strategy,
    /// T_sleep of VNET/P's timed yield, in microseconds.
    pub sleep_us: u32,
    /// T_nowork of VNET/P's adaptive yield, in microseconds.
    pub nowork_us: u32,
    /// Frames taken at a time.
    pub burst: usize,
    /// `priority`, `lock_memory`, `busy_poll_us`: how they are kept from being disturbed.
    pub isolation: Isolation,
}

impl Default for DispatchSpec {
    fn default() -> DispatchSpec {
        DispatchSpec {
            threads: 1,
            cpus: vec![],
            yield_strategy: Strategy::Adaptive,
            sleep_us: 50,
            nowork_us: 200,
            burst: BATCH_MAX,
            isolation: Isolation::default(),
        }
    }
}

/// The links' side of this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BridgeSpec {
    /// Where links arrive (UDP), and handshakes of sealed ones (TCP).
    pub listen: SocketAddr,
    /// Ports that links arrive at, from that of `listen` on.
    pub ports: u16,
    /// Where VXLAN links arrive (UDP); nowhere when absent.
    pub vxlan_listen: Option<SocketAddr>,
    /// Where stream links arrive (TCP); nowhere when absent.
    pub stream_listen: Option<SocketAddr>,
    /// Whether guests' memory is sent without copying it.
    pub zero_copy: ZeroCopy,
    /// Networks in which clear text may travel.
    pub trusted: Vec<Prefix>,
    /// Seconds after which sealed links get new keys.
    pub rekey_s: u32,
    /// Pairs of other hosts that may meet by this one.
    pub meetings: u16,
}

impl BridgeSpec {
    /// Where pairs meet (UDP), from that port on, when the bridge listens on `bridge`: behind the ports of the bridge.
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
    /// Its number.
    pub id: NetworkId,
    /// Whether addresses are learned and unknown ones flooded; else only rules decide.
    pub learning: bool,
    /// Seconds after which a learned address that was not seen again is forgotten.
    pub ageing_s: u32,
    /// Whether this host relays frames from link to link.
    pub relay: bool,
}

impl NetworkSpec {
    /// Network `id` as it is when nothing is said about it.
    pub fn new(id: NetworkId) -> NetworkSpec {
        NetworkSpec { id, learning: true, ageing_s: AGEING_S, relay: false }
    }
}

/// One interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InterfaceSpec {
    /// Its name on this host.
    pub name: String,
    /// What it is attached by.
    pub attachment: Attachment,
    /// The network it stands in.
    pub network: NetworkId,
    /// The guest's address; learned when absent.
    pub mac: Option<Mac>,
    /// The guest's IP addresses: other hosts of the overlay answer questions for them.
    pub addresses: Vec<IpAddr>,
    /// Largest payload of a frame, in bytes.
    pub mtu: u32,
    /// Queue pairs.
    pub queues: u32,
    /// Most flooded frames it may send a second.
    pub storm_limit: u32,
    /// Whether frames from it must carry its own address as their source.
    pub port_security: bool,
    /// Who drives it, and how its guest is notified.
    pub driving: Driving,
}

/// What an interface is attached by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Attachment {
    /// A virtual machine's virtio-net device, by vhost-user.
    VhostUser {
        /// Unix socket between the front end and vnetd.
        socket: PathBuf,
        /// True: vnetd listens; false: vnetd connects.
        server: bool,
        /// An underlay port of its own.
        direct: Option<DirectSpec>,
    },
    /// A TAP device, for containers and hosts.
    Tap {
        /// The device's name.
        device: String,
        /// Where the device lives; beside vnetd when absent.
        netns: Option<Netns>,
    },
    /// A device on the user's own LAN.
    Local {
        /// The device's name.
        device: String,
        /// Where the device lives; beside vnetd when absent.
        netns: Option<Netns>,
        /// Whether frames for all addresses are taken.
        promiscuous: bool,
    },
}

/// An underlay port of an interface's own, by which frames come straight into its guest's buffers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirectSpec {
    /// The port (UDP), at the bridge's address.
    pub port: u16,
    /// The link whose other host sends there.
    pub link: String,
}

/// A thing of the host that only one interface can have.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Resource {
    /// A Unix socket.
    Socket(PathBuf),
    /// A network device in a network namespace, the latter as it is written.
    Device(String, Option<String>),
}

impl fmt::Display for Resource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Resource::Socket(path) => write!(f, "socket '{}'", path.display()),
            Resource::Device(device, None) => write!(f, "device '{device}'"),
            Resource::Device(device, Some(netns)) => write!(f, "device '{device}' in netns '{netns}'"),
        }
    }
}

impl Attachment {
    /// What the attachment takes from the host.
    pub fn resource(&self) -> Resource {
        match self {
            Attachment::VhostUser { socket, .. } => Resource::Socket(socket.clone()),
            Attachment::Tap { device, netns } | Attachment::Local { device, netns, .. } => {
                Resource::Device(device.clone(), netns.as_ref().map(ToString::to_string))
            }
        }
    }

    /// Its `kind` in the configuration.
    pub fn kind(&self) -> &'static str {
        match self {
            Attachment::VhostUser { .. } => "vhost-user",
            Attachment::Tap { .. } => "tap",
            Attachment::Local { .. } => "local",
        }
    }
}

/// One link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinkSpec {
    /// Its name on this host.
    pub name: String,
    /// The other host; [`ANYWHERE`](vnet::link::ANYWHERE) when a sealed link learns that from its peer.
    pub remote: SocketAddr,
    /// Ports of the other host, from that of `remote` on.
    pub ports: u16,
    /// How frames travel.
    pub encapsulation: Encapsulation,
    /// The networks it carries; all when absent.
    pub networks: Option<Vec<NetworkId>>,
    /// MTU of the path in bytes; found out when absent.
    pub mtu: Option<u16>,
    /// What only its encapsulation has.
    pub tunnel: Tunnel,
    /// What it lets through, and how.
    pub security: LinkSecurity,
}

impl LinkSpec {
    /// True when one of its ports is among the `ports` ports from `first` on.
    pub fn has_port_of(&self, first: u16, ports: u16) -> bool {
        let last = |first: u16, ports: u16| first.saturating_add(ports - 1);
        let own = self.remote.port();
        first <= last(own, self.ports) && own <= last(first, ports)
    }

    /// The addresses that its datagrams go to and come from.
    pub fn remotes(&self) -> impl Iterator<Item = SocketAddr> {
        let remote = self.remote;
        let ports = (0..self.ports).map_while(move |offset| remote.port().checked_add(offset));
        ports.map(move |port| {
            let mut address = remote;
            address.set_port(port);
            address
        })
    }

    /// True when the link carries frames of `network`.
    pub fn carries(&self, network: NetworkId) -> bool {
        self.networks.as_ref().is_none_or(|networks| networks.contains(&network))
    }
}

/// One rule.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct RouteSpec {
    /// The network it applies in.
    pub network: NetworkId,
    /// Source addresses it applies to.
    pub src: Qualifier,
    /// Destination addresses it applies to.
    pub dst: Qualifier,
    /// Where frames must have come from.
    pub from: Origin,
    /// Where they go.
    pub to: Target,
}

impl RouteSpec {
    /// True when the rule names `target`.
    pub fn names(&self, target: &Target) -> bool {
        self.to == *target || matches!(&self.from, Origin::One(from) if from == target)
    }
}

/// Where a rule wants frames to have come from.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Origin {
    /// Anywhere.
    Any,
    /// Any interface.
    AnyInterface,
    /// Any link.
    AnyLink,
    /// One of them.
    One(Target),
}

/// An interface or a link, by its name.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Target {
    /// `interface NAME`
    Interface(String),
    /// `link NAME`
    Link(String),
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Target::Interface(name) => write!(f, "interface {name}"),
            Target::Link(name) => write!(f, "link {name}"),
        }
    }
}

impl FromStr for Target {
    type Err = String;

    fn from_str(text: &str) -> Result<Target, String> {
        let words: Vec<_> = text.split_whitespace().collect();
        match words[..] {
            ["interface", name] => Ok(Target::Interface(name.into())),
            ["link", name] => Ok(Target::Link(name.into())),
            _ => Err(format!("{} is no place to send frames to; write interface NAME or link NAME", q(text))),
        }
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::Any => f.write_str("any"),
            Origin::AnyInterface => f.write_str("interface"),
            Origin::AnyLink => f.write_str("link"),
            Origin::One(target) => target.fmt(f),
        }
    }
}

impl FromStr for Origin {
    type Err = String;

    fn from_str(text: &str) -> Result<Origin, String> {
        match text.trim() {
            "any" => Ok(Origin::Any),
            "interface" => Ok(Origin::AnyInterface),
            "link" => Ok(Origin::AnyLink),
            _ => text.parse().map(Origin::One).map_err(|_| {
                format!(
                    "{} is no place frames come from; write any, interface, link, interface NAME or link NAME",
                    q(text)
                )
            }),
        }
    }
}

/// True for an address at which another host can be reached: not this host's own, not a group's, with a port.
pub fn is_host_address(address: SocketAddr) -> bool {
    address.port() != 0 && !address.ip().is_loopback() && is_station_address(address.ip())
}

/// True for an address that one station may have.
pub fn is_station_address(address: IpAddr) -> bool {
    let broadcast = matches!(address, IpAddr::V4(v4) if v4.is_broadcast());
    !(address.is_unspecified() || address.is_multicast() || address.is_loopback() || broadcast)
}

fn q(text: &str) -> String {
    super::table::quote(text)
}

impl fmt::Display for InterfaceSpec {
    /// What a plan shows: the interface's settings, those left at their defaults left out.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.attachment {
            Attachment::VhostUser { socket, server, direct } => {
                write!(f, "vhost-user {} {}", if *server { "at" } else { "to" }, socket.display())?;
                if let Some(DirectSpec { port, link }) = direct {
                    write!(f, ", direct from link {link} at port {port}")?;
                }
            }
            Attachment::Tap { device, netns } | Attachment::Local { device, netns, .. } => {
                write!(f, "{} {device}", self.attachment.kind())?;
                if let Some(netns) = netns {
                    write!(f, " in {netns}")?;
                }
                if matches!(self.attachment, Attachment::Local { promiscuous: true, .. }) {
                    f.write_str(", promiscuous")?;
                }
            }
        }
        if self.network != NetworkId::DEFAULT {
            write!(f, ", network {}", self.network)?;
        }
        if let Some(mac) = self.mac {
            write!(f, ", mac {mac}")?;
        }
        if !self.addresses.is_empty() {
            let addresses: Vec<_> = self.addresses.iter().map(ToString::to_string).collect();
            write!(f, ", addresses {}", addresses.join(" "))?;
        }
        write!(f, ", mtu {}", self.mtu)?;
        if self.queues != 1 {
            write!(f, ", {} queues", self.queues)?;
        }
        if self.storm_limit != STORM_FRAMES_PER_S {
            write!(f, ", storm limit {}/s", self.storm_limit)?;
        }
        if self.port_security {
            f.write_str(", port security")?;
        }
        self.driving.fmt(f)
    }
}

impl fmt::Display for LinkSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} to {}", self.encapsulation, tunnel::remote(self))?;
        if self.ports != 1 {
            write!(f, ", {} ports", self.ports)?;
        }
        if let Some(networks) = &self.networks {
            let networks: Vec<_> = networks.iter().map(ToString::to_string).collect();
            write!(f, ", networks {}", networks.join(" "))?;
        }
        if let Some(mtu) = self.mtu {
            write!(f, ", mtu {mtu}")?;
        }
        tunnel::Shown(&self.tunnel).fmt(f)?;
        self.security.fmt(f)
    }
}

impl fmt::Display for RouteSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.network != NetworkId::DEFAULT {
            write!(f, "network {}, ", self.network)?;
        }
        write!(f, "src {}, dst {}, from {}, to {}", self.src, self.dst, self.from, self.to)
    }
}

impl fmt::Display for NetworkSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let learning = if self.learning { "learning" } else { "no learning" };
        write!(f, "{learning}, ageing {} s", self.ageing_s)?;
        f.write_str(if self.relay { ", relayed" } else { "" })
    }
}
