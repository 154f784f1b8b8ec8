//! Links: the edges of the overlay, and the bridge that carries frames along them.
//!
//! ```text
//!            batch of frames                                         batch of frames
//!                  |                                                        ^
//!   Sender: bundle or fragment (native/send.rs)                    Receiver: split, reassemble (native/receive.rs)
//!                  v                                                        |
//!     messages of headers and slices (socket/gather.rs) -- sendmmsg --> IP --> recvmmsg into one burst of buffers
//! ```
//!
//! A [`Link`] is what is known of one neighbour: address, encapsulation, counters, the next datagram number, the path MTU.
//! It owns no socket (but a stream link's connections, see [`stream`]). Each dispatcher has one [`Bridge`] for all links: UDP
//! sockets with a [`Sender`] and a [`Receiver`], two halves so that a frame may be relayed while the burst it came in is still
//! being worked on. Which link a datagram came by is told by its source address and port, through an immutable [`Peers`] that
//! control replaces as a whole; sealed links follow their peers to other addresses (`sealed/roaming.rs`). A host may have several ports,
//! over which flows are spread (`socket/ports.rs`).
//!
//! A *sealed* link carries nothing in clear text: [`sealed`] encrypts datagrams with keys that two hosts agree on by TLS
//! which the [`keeper`](sealed::keeper) sees to outside the frames' way. Two hosts behind NAT meet by
//! a third one ([`rendezvous`]).
//!
//! Bytes are not copied on the way, unless they are to be sealed: what is sent are slices of the guest's memory between
//! prepared headers, what is received are slices of the receive buffers, and only frames that are still incomplete when a
//! burst ends are moved.

use std::net::{IpAddr, SocketAddr, SocketAddrV6};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use crate::frame::{NetworkId, PortId};
use crate::stats::PortStats;
use crate::wire::ethernet::Mac;
use crate::wire::native::HOPS_MAX;

mod direct;
pub mod fake;
#[cfg(feature = "test-util")]
pub mod fuzz;
pub mod inquiry;
pub mod native;
pub mod path;
mod peers;
pub mod rendezvous;
pub mod sealed;
mod sending_keepalives;
pub mod socket;
pub mod stream;
pub mod vxlan;

pub use direct::{Candidate, Direct, Landed, Peeked};
pub use native::reassembly::ReassemblyBudget;
pub use native::receive::{Received, Receiver};
pub use native::send::Sender;
use native::zero_copy;
pub use native::zero_copy::ZeroCopy;
use path::prober;
pub use peers::Peers;
use rendezvous::choice::PathChoice;
pub use sealed::roaming::ANYWHERE;
use sealed::roaming::{self, RemoteAddress};
use sealed::session::Seal;
pub use sealed::session::SealView;
pub use socket::udp::{Bridge, BridgeError, kernel_offloads};
use stream::Stream;
pub use stream::{Proxy, StreamOptions};
pub use vxlan::{FLOOD_MAX, VxlanOptions};
use vxlan::{Vteps, kernel_device};

/// Largest UDP payload over IPv4; IPv6 would take 20 bytes more, but one limit for both is easier to live with.
pub const UDP_PAYLOAD_MAX: usize = 65_507;
/// Smallest path MTU the bridge works with. Linux does not believe an ICMP message that claims less than this
/// (net.ipv4.route.min_pmtu), and a frame of any size still has at most [`native::reassembly::FRAGMENTS_MAX`] fragments.
pub const PATH_MTU_MIN: u16 = 552;
/// Hops of a frame from a link whose encapsulation cannot count them: one more than a relay may have taken, so that it
/// reaches this host's interfaces but is not relayed. Loops of links end here at the latest.
pub const HOPS_UNKNOWN: u8 = HOPS_MAX + 1;

/// Most ports of a host's bridge: as many as it may have dispatchers.
pub const PORTS_MAX: u16 = 64;
/// Most guests of another host that a link knows own ports of.
pub const DIRECT_MAX: usize = 32;
/// Reassembly memory of one link (DESIGN.md section 10).
const LINK_BUDGET: usize = 4 << 20;

/// How frames are wrapped for a link.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    Hash,
    Serialize,
    Deserialize,
    strum::Display,
    strum::EnumString,
    strum::VariantNames,
)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "kebab-case")]
pub enum Encapsulation {
    /// Native datagrams over UDP: super-frames, own fragmentation, any network.
    #[default]
    Native,
    /// VNET/P and VNET/U: the bare Ethernet frame is the UDP payload.
    Vnet,
    /// VXLAN (RFC 7348): kernels, Open vSwitch, hardware.
    Vxlan,
    /// Native frames over a TCP connection.
    Stream,
}

/// What a link is configured to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinkOptions {
    /// Its name on this host.
    pub name: String,
    /// The other host's bridge: its first port. [`ANYWHERE`] when a sealed link is to learn it from its peer.
    pub remote: SocketAddr,
    /// How many ports the other host's bridge has, from that of `remote` on: 1 to [`PORTS_MAX`]. A `vnet` link uses the first.
    pub ports: u16,
    /// How frames are wrapped.
    pub encapsulation: Encapsulation,
    /// Networks that the link carries; `None` for all.
    pub networks: Option<Vec<NetworkId>>,
    /// Largest IP packet on the path in bytes, where the kernel's idea of it is too large.
    pub mtu: Option<u16>,
    /// What only some encapsulations have.
    pub tunnel: Tunnel,
}

/// What only some encapsulations have.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Tunnel {
    /// Nothing.
    #[default]
    None,
    /// A VXLAN link's other VTEPs.
    Vxlan(VxlanOptions),
    /// How a stream link connects.
    Stream(StreamOptions),
    /// A native link: ports of the other host that are its guests' own, by their addresses ([`Direct`] there); at most
    /// [`DIRECT_MAX`].
    Direct(Vec<(Mac, u16)>),
}

/// What a link lets through, and how.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Security {
    /// Nothing travels in clear text; keys are agreed on with the host of this name.
    pub peer: Option<String>,
    /// Source addresses that frames from the other host may have; `None` for all.
    pub macs: Option<Vec<Mac>>,
    /// The link to the host by which the two meet, where neither can reach the other; of a sealed native link without remote.
    pub via: Option<String>,
}

/// What a link is able to do at the moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LinkState {
    /// The kernel has a route to the remote address, and the other host, if it ever answered, has not gone silent; for a sealed
    /// link: it was heard under keys agreed with it.
    Up,
    /// It works, but badly, or not for long.
    Degraded(String),
    /// A sealed link without keys, or one whose other end has gone silent. Frames are sent all the same where they can be.
    Down(String),
    /// It has none, and says why.
    Unreachable(String),
}

/// One edge of the overlay. Shared by all dispatchers.
///
/// What changes with every burst lies apart from what every burst reads, and senders' part from receivers'.
#[derive(Debug)]
pub struct Link {
    /// Never reused, unlike ports and addresses: what belongs to an earlier link cannot be taken for this one's.
    id: u64,
    port: PortId,
    options: LinkOptions,
    /// Where the other host is.
    place: RemoteAddress,
    /// Of a VXLAN link.
    vteps: Option<Vteps>,
    /// Of the same, unless it is told to do without.
    drivers: Option<kernel_device::Drivers>,
    /// Of a stream link.
    stream: Option<Stream>,
    /// Of a sealed link.
    seal: Option<Box<Seal>>,
    /// Of one whose hosts meet by a third.
    via: Option<PathChoice>,
    /// Source addresses that frames from the other host may have, sorted.
    macs: Option<Vec<Mac>>,
    stats: Arc<PortStats>,
    budget: Arc<ReassemblyBudget>,
    inquiries: inquiry::Inquiries,
    /// What the kernel says of the path.
    path_mtu: AtomicU32,
    /// The largest packet that arrives, as far as probes tell; 0: they do not.
    probed_mtu: AtomicU32,
    probing: Mutex<prober::Probing>,
    /// Speed of the path's device in Mbit/s; 0: to be asked for.
    mbps: AtomicU32,
    refreshed_ms: AtomicU64,
    route_error: AtomicI32,
    /// Whether the path's device cuts messages (`UDP_SEGMENT`), as far as is known.
    segmentation: AtomicBool,
    /// Whether it spares copying what is sent.
    zero_copy: Arc<zero_copy::Verdict>,
    number: CacheLine<AtomicU64>,
    heard_ms: CacheLine<AtomicU64>,
}

/// A value that shares no cache line with another.
#[derive(Debug)]
#[repr(align(64))]
struct CacheLine<T>(T);

impl Link {
    /// A link that nothing has been sent on.
    pub fn new(options: LinkOptions, port: PortId, stats: Arc<PortStats>) -> Arc<Link> {
        Link::with_security(options, Security::default(), port, stats)
    }

    /// The same, with limits on what comes and goes.
    pub fn with_security(
        mut options: LinkOptions,
        security: Security,
        port: PortId,
        stats: Arc<PortStats>,
    ) -> Arc<Link> {
        static LINKS: AtomicU64 = AtomicU64::new(0);
        options.remote = normalised(options.remote);
        let vteps = match (&options.tunnel, options.encapsulation) {
            (Tunnel::Vxlan(vxlan), _) => Some(Vteps::new(options.remote, vxlan)),
            (_, Encapsulation::Vxlan) => Some(Vteps::new(options.remote, &VxlanOptions::default())),
            _ => None,
        };
        let offload = !matches!(&options.tunnel, Tunnel::Vxlan(VxlanOptions { offload: false, .. }));
        let drivers = (vteps.is_some() && offload).then(kernel_device::Drivers::default);
        let Security { mut peer, mut macs, via } = security;
        // A sealed stream has TLS, not keys of its own.
        let stream = match &options.tunnel {
            Tunnel::Stream(options) => Some(Stream::new(options.clone(), peer.take())),
            _ => None,
        };
        macs.iter_mut().for_each(|macs| macs.sort());
        let zero_copy = zero_copy::Verdict::new(stats.clone());
        Arc::new(Link {
            id: LINKS.fetch_add(1, Relaxed),
            port,
            place: RemoteAddress::new(&options, roaming::follows(&options, peer.is_some())),
            drivers,
            vteps,
            stream,
            seal: peer.map(|peer| Box::new(Seal::new(peer))),
            via: via.map(PathChoice::new),
            macs,
            options,
            stats,
            budget: Arc::new(ReassemblyBudget::new(LINK_BUDGET)),
            inquiries: inquiry::Inquiries::default(),
            path_mtu: AtomicU32::new(0),
            probed_mtu: AtomicU32::new(0),
            probing: Mutex::default(),
            mbps: AtomicU32::new(0),
            refreshed_ms: AtomicU64::new(0),
            route_error: AtomicI32::new(0),
            segmentation: AtomicBool::new(true),
            zero_copy,
            number: CacheLine(AtomicU64::new(first_number())),
            heard_ms: CacheLine(AtomicU64::new(0)),
        })
    }

    /// Its slot in the port table.
    #[inline]
    pub fn port(&self) -> PortId {
        self.port
    }

    /// Its name on this host.
    pub fn name(&self) -> &str {
        &self.options.name
    }

    /// What it was configured to be; the remote address is normalised.
    pub fn options(&self) -> &LinkOptions {
        &self.options
    }

    /// Its counters.
    #[inline]
    pub fn stats(&self) -> &Arc<PortStats> {
        &self.stats
    }

    /// What it is able to do at the moment.
    pub fn state(&self) -> LinkState {
        if let Some(stream) = &self.stream {
            return stream.state();
        }
        match (self.seal(), self.route_failure()) {
            (Some(seal), _) => seal.state(),
            (None, Some(why)) => LinkState::Unreachable(why),
            (None, None) => self.probed_state(),
        }
    }

    /// Why the kernel has no way to the remote address.
    fn route_failure(&self) -> Option<String> {
        match self.route_error.load(Relaxed) {
            0 => None,
            error => Some(std::io::Error::from_raw_os_error(error).to_string()),
        }
    }

    /// Its keys, if nothing may travel in clear text.
    #[inline]
    fn seal(&self) -> Option<&Seal> {
        self.seal.as_deref()
    }

    /// The choice between relayed and direct path, where the hosts meet by a relay.
    fn via(&self) -> Option<&PathChoice> {
        self.via.as_ref()
    }

    /// True when a frame from the other host may have the source `mac`, as far as the configuration says.
    #[inline]
    fn allows_source(&self, mac: Mac) -> bool {
        self.macs.as_ref().is_none_or(|macs| macs.binary_search(&mac).is_ok())
    }

    /// When the last datagram came by it, on the dispatchers' clock; `None` when none ever did.
    pub fn heard_ms(&self) -> Option<u64> {
        self.heard_ms.0.load(Relaxed).checked_sub(1)
    }

    /// True when the link carries `network`.
    #[inline]
    pub fn carries(&self, network: NetworkId) -> bool {
        self.options.networks.as_ref().is_none_or(|networks| networks.contains(&network))
    }

    /// The network of frames whose encapsulation names none.
    fn default_network(&self) -> NetworkId {
        self.options.networks.as_ref().and_then(|networks| networks.first().copied()).unwrap_or_default()
    }

    /// The number that will be taken next.
    #[inline]
    fn next_number(&self) -> u64 {
        self.number.0.load(Relaxed)
    }

    /// Takes `count` consecutive datagram numbers and returns the first.
    #[inline]
    fn take_numbers(&self, count: u64) -> u64 {
        self.number.0.fetch_add(count, Relaxed)
    }

    /// Has the path MTU asked for at one of the next ticks.
    fn refresh_soon(&self) {
        self.refreshed_ms.store(0, Relaxed);
    }

    fn heard(&self, now_ms: u64) {
        // A shared cache line is written once a millisecond, not once a burst. The value is shifted by one: 0 is never.
        if self.heard_ms.0.load(Relaxed) != now_ms + 1 {
            self.heard_ms.0.store(now_ms + 1, Relaxed);
        }
    }
}

/// Where a link's datagram numbers start: the time in nanoseconds. Numbers then go on rising when a host restarts or a link
/// is configured anew, at any rate below 10^9 datagrams/s, and the other side can never mistake a new datagram for one of
/// the past. (A peer may as well start at 1; see native/reassembly.rs for how that is told from a late datagram.)
///
/// The wall clock is read once: after that a clock counts that is never set back.
fn first_number() -> u64 {
    static START: LazyLock<(u64, Instant)> = LazyLock::new(|| {
        let wall = SystemTime::now().duration_since(UNIX_EPOCH);
        (wall.map_or(1, |time| time.as_nanos() as u64).max(1), Instant::now())
    });
    let (wall, instant) = *START;
    wall + instant.elapsed().as_nanos() as u64
}

/// The addresses that a link's datagrams come from, as far as they are declared.
fn remotes(options: &LinkOptions) -> impl Iterator<Item = SocketAddr> {
    roaming::addresses(options.remote, if options.remote == ANYWHERE { 0 } else { options.ports.max(1) })
}

/// An address as the peer table knows it: IPv4 in its own form, no flow label.
pub fn normalised(address: SocketAddr) -> SocketAddr {
    match address {
        SocketAddr::V6(v6) => match v6.ip().to_ipv4_mapped() {
            Some(ip) => SocketAddr::new(IpAddr::V4(ip), v6.port()),
            None => SocketAddrV6::new(*v6.ip(), v6.port(), 0, v6.scope_id()).into(),
        },
        v4 => v4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link(remote: &str, encapsulation: Encapsulation, mtu: Option<u16>) -> Arc<Link> {
        let remote = remote.parse().unwrap();
        let (name, tunnel) = ("h2".into(), Tunnel::None);
        let options = LinkOptions { name, remote, ports: 1, encapsulation, networks: None, mtu, tunnel };
        Link::new(options, PortId(3), Arc::default())
    }

    #[test]
    fn a_peer_has_its_own_ports_only() {
        let several = |remote: &str, ports| {
            let options = LinkOptions { ports, ..link(remote, Encapsulation::Native, None).options.clone() };
            Link::new(options, PortId(3), Arc::default())
        };
        let links = [several("10.0.0.2:9000", 3), several("10.0.0.2:9003", 1), several("[fd00::5]:65534", 9)];
        let peers = Peers::build(&links);
        let find = |text: &str| peers.link(text.parse().unwrap()).map(|found| found.options.remote.port());
        for port in 9000..9003 {
            assert_eq!(find(&format!("[::ffff:10.0.0.2]:{port}")), Some(9000));
        }
        assert_eq!(
            (find("10.0.0.2:9003"), find("10.0.0.2:9004"), find("10.0.0.2:8999")),
            (Some(9003), None, None)
        );
        assert_eq!(
            (find("[fd00::5]:65535"), find("[fd00::5]:1"), links[2].place.ports()),
            (Some(65_534), None, 2)
        );
    }

    #[test]
    fn peers_are_found_by_address_and_port() {
        use Encapsulation::{Native, Vnet};
        let links = [
            link("10.0.0.2:9000", Native, None),
            link("[::ffff:10.0.0.3]:9000", Native, None),
            link("10.0.0.3:9001", Native, None),
            link("10.0.0.4:9000", Vnet, None),
            link("[fd00::5]:9000", Native, None),
        ];
        let peers = Peers::build(&links);
        let find = |text: &str| {
            peers
                .link(text.parse().unwrap())
                .map(|found| links.iter().position(|l| Arc::ptr_eq(l, found)).unwrap())
        };
        assert_eq!(find("10.0.0.2:9000"), Some(0));
        assert_eq!(find("10.0.0.2:4711"), None, "anybody on the peer's host");
        assert_eq!(find("10.0.0.3:9000"), Some(1));
        assert_eq!(find("[::ffff:10.0.0.3]:9001"), Some(2));
        assert_eq!(find("10.0.0.4:9000"), Some(3));
        assert_eq!(find("10.0.0.4:4711"), None);
        assert_eq!(find("[fd00::5]:9000"), Some(4));
        assert_eq!(find("[fd00::5]:1"), None);
        assert_eq!(find("10.0.0.9:9000"), None);
    }

    #[test]
    fn fragments_fit_the_path() {
        let v4 = link("10.0.0.2:9000", Encapsulation::Native, Some(1500));
        v4.path_mtu.store(9000, Relaxed);
        assert_eq!((v4.path_mtu(), v4.fragment_payload()), (1500, 1500 - 20 - 8 - 16));
        let v6 = link("[fd00::2]:9000", Encapsulation::Native, None);
        v6.path_mtu.store(1500, Relaxed);
        assert_eq!(v6.fragment_payload(), 1500 - 40 - 8 - 16);
        let loopback = link("127.0.0.1:9000", Encapsulation::Native, None);
        loopback.path_mtu.store(65536, Relaxed);
        assert_eq!(loopback.fragment_payload(), UDP_PAYLOAD_MAX - 16);
        loopback.path_mtu.store(68, Relaxed);
        assert_eq!(loopback.path_mtu(), PATH_MTU_MIN);
    }

    #[test]
    fn encapsulations_have_names() {
        use Encapsulation::{Native, Stream, Vnet, Vxlan};
        use strum::VariantNames;
        for encapsulation in [Native, Vnet, Vxlan, Stream] {
            assert_eq!(encapsulation.to_string().parse(), Ok(encapsulation));
        }
        assert_eq!(Encapsulation::VARIANTS, ["native", "vnet", "vxlan", "stream"]);
        assert!("gre".parse::<Encapsulation>().is_err());
    }

    #[test]
    fn numbers_rise_over_restarts() {
        let first = link("10.0.0.2:9000", Encapsulation::Native, None);
        let used = first.take_numbers(100) + 100;
        std::thread::sleep(std::time::Duration::from_millis(1));
        assert!(link("10.0.0.2:9000", Encapsulation::Native, None).take_numbers(1) > used);
    }
}
