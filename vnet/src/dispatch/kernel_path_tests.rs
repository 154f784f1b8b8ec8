//! The kernel's verdict is the router's: random rules, moves, setups and captures, and after each a frame that both decide.
//!
//! A frame that the program takes must go to the only port that a router without a cache names; every other frame comes up, is
//! decided by a dispatcher's router and installs its flow. `VNET_TEST_FRAMES` sets the number of frames.
//!
//! The host has two networks in which the same addresses are used, five interfaces, a native link that takes the wire, in both networks,
//! and a link to a VTEP, in one. Links are sources and destinations as interfaces are; frames from link to link are relayed by vnetd
//! only. All this is in a network namespace of its own, with a device that leads to the other hosts.

use super::super::mode::Drive;
use super::super::observers::Observers;
use std::net::{IpAddr, Ipv4Addr};
use std::process::Command;

use super::super::setup::{InterfacePort, Parts};
use super::*;
use crate::capture::{Options, Session, Tap};
use crate::frame::{DropSink, NetworkId, Origin, Selection};
use crate::interface::{Interface, State};
use crate::kernel::tests::{kernel, own_network};
use crate::link::{Bridge, LinkKind, LinkOptions, ReassemblyBudget, VxlanOptions};
use crate::route::{
    AddressGuard, Member, NetworkSpec, Networks, PortKind, Published, Qualifier, Rule, RuleSource,
};
use crate::source::Source;
use crate::stats::PortStats;
use crate::wire::ethernet::Mac;
use crate::wire::vxlan;

/// Number of interfaces, which have the lowest port ids; the two links follow.
const INTERFACES: u16 = 5;
const NATIVE: PortId = PortId(INTERFACES);
const VTEP: PortId = PortId(INTERFACES + 1);
const PORTS: u16 = INTERFACES + 2;
/// Ports of each network. The VTEP is in the first only.
const IN_NETWORK: [&[u16]; 2] = [&[0, 1, 4, NATIVE.0, VTEP.0], &[2, 3, NATIVE.0]];
/// Frames between two changes of the setup, on average, and between two sets of stations.
const FRAMES_PER_SETUP: u64 = 50;
const FRAMES_PER_WORLD: u64 = 2000;
const STATIONS: u64 = 8;

/// A guest's device that nobody uses: `run` tries out the programs at the loopback device.
struct Guest(Option<KernelDevice>);

impl Interface for Guest {
    fn queues(&self) -> usize {
        1
    }

    fn source(self: Arc<Self>, _queue: usize) -> Box<dyn Source> {
        unreachable!("no dispatcher runs")
    }

    fn deliver(&self, _queue: usize, _frames: Selection<'_>, _drops: &mut DropSink) {}

    fn kernel_device(&self) -> Option<&KernelDevice> {
        self.0.as_ref()
    }

    fn state(&self) -> State {
        State::Up
    }

    fn stop(&self) {}
}

/// A small generator (splitmix64), so that a failure names the seed that repeats it.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ z >> 31) % end
    }
}

struct World {
    path: KernelPath,
    random: Random,
    stats: Vec<Arc<PortStats>>,
    links: [Arc<Link>; 2],
    generation: u32,
    /// Part of the stations' addresses: an address that moves often is frozen, so each world has its own.
    number: u64,
    session: Arc<Session>,
}

/// The id of a network by its index.
fn network(index: usize) -> NetworkId {
    NetworkId::new(index as u32 + 1).unwrap()
}

/// Networks of a port.
fn networks_of(port: u16) -> impl Iterator<Item = NetworkId> {
    (0..IN_NETWORK.len()).filter(move |index| IN_NETWORK[*index].contains(&port)).map(network)
}

fn is_link(port: PortId) -> bool {
    port == NATIVE || port == VTEP
}

/// The native link, and that to a VTEP.
fn links(stats: &[Arc<PortStats>]) -> [Arc<Link>; 2] {
    let vxlan = LinkKind::Vxlan(VxlanOptions::default());
    [(NATIVE, LinkKind::default(), 9000), (VTEP, vxlan, vxlan::PORT)].map(|(id, kind, port)| {
        let options = LinkOptions {
            name: format!("l{}", id.0),
            remote: SocketAddr::from(([192, 0, 2, 10 + id.0 as u8], port)),
            ports: 1,
            networks: Some(networks_of(id.0).collect()),
            mtu: None,
            kind,
        };
        let link = Link::new(options, id, stats[id.index()].clone());
        link.assume_path_mtu(1500);
        link
    })
}

impl World {
    fn new(seed: u64) -> Option<World> {
        let kernel = kernel()?;
        if !own_network() {
            return None;
        }
        for words in
            ["link add under type veth peer other", "address add 192.0.2.1/24 dev under", "link set under up"]
        {
            assert!(Command::new("ip").args(words.split(' ')).status().unwrap().success(), "ip {words}");
        }
        let learned = Arc::new(Learned::new());
        learned.keep_versions_in(kernel.clone());
        let setup = Arc::new(Setup::new(Parts::default()));
        let core = CorePart {
            learned,
            started: Instant::now(),
            translates: true,
            outlive: Duration::ZERO,
            vxlan_listen: Some(SocketAddr::from((Ipv4Addr::UNSPECIFIED, vxlan::PORT))),
            inheritance: None,
            sealed: Arc::default(),
        };
        let path = KernelPath::new(kernel, setup, core).unwrap();
        let stats: Vec<_> = (0..PORTS).map(|_| Arc::default()).collect();
        let links = links(&stats);
        links[1].open_drivers(IpAddr::V4(Ipv4Addr::UNSPECIFIED), &[network(0)]);
        let mut world = World {
            path,
            random: Random(seed),
            stats,
            links,
            generation: 0,
            number: 0,
            session: Arc::new(Session::new(Options::default(), 1)),
        };
        world.reach_other_hosts();
        Some(world)
    }

    /// Opens the wire, and finds the routes to both hosts.
    fn reach_other_hosts(&mut self) {
        let budget = Arc::new(ReassemblyBudget::new(ReassemblyBudget::HOST));
        let listen = SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0));
        let bridge = Bridge::bind(listen, false, Arc::default(), budget).unwrap();
        assert!(self.path.wire(&self.link_ports(), &bridge.courier(), &Arc::default()).is_some(), "no wire");
        self.change();
        self.path.tunnels.tick(self.path.kernel(), self.now_ms());
        for link in &self.links {
            assert_eq!(self.path.reaches(link, self.now_ms()), Ok(()), "{}", link.name());
        }
    }

    fn now_ms(&self) -> u64 {
        self.path.started.elapsed().as_millis() as u64
    }

    fn link_ports(&self) -> Vec<LinkPort> {
        let port = |link: &Arc<Link>| {
            let networks = Networks::only(networks_of(link.port().0));
            let counts_hops = link.options().kind.counts_hops();
            let member = Member { networks, counts_hops, ..member(link.port(), PortKind::Link) };
            LinkPort { member, link: link.clone() }
        };
        self.links.iter().map(port).collect()
    }

    fn port(&mut self) -> PortId {
        PortId(self.random.below(PORTS.into()) as u16)
    }

    /// A random member of `IN_NETWORK[network]`.
    fn port_in(&mut self, network: usize) -> PortId {
        let ports = IN_NETWORK[network];
        PortId(ports[self.random.below(ports.len() as u64) as usize])
    }

    fn station(&mut self) -> Mac {
        let [_, _, _, _, _, _, a, b] = self.number.to_be_bytes();
        Mac([2, 0, 0, a, b, self.random.below(STATIONS) as u8])
    }

    fn qualifier(&mut self) -> Qualifier {
        match self.random.below(4) {
            0 => Qualifier::Any,
            1 => Qualifier::Not(self.station()),
            _ => Qualifier::Is(self.station()),
        }
    }

    fn rule(&mut self, index: u64) -> Rule {
        let at = self.random.below(IN_NETWORK.len() as u64) as usize;
        Rule {
            index: index as u32 + 1,
            network: network(at),
            src: self.qualifier(),
            dst: self.qualifier(),
            from: match self.random.below(5) {
                0 | 1 => RuleSource::Any,
                2 => RuleSource::AnyInterface,
                3 => RuleSource::AnyLink,
                _ => RuleSource::Port(self.port_in(at)),
            },
            to: self.port_in(at),
        }
    }

    fn interface(&mut self, n: u16) -> InterfacePort {
        let device = KernelDevice {
            host: ("lo".into(), u32::from(n) + 1),
            tap: ("lo".into(), 1),
            mac: Mac([2, 0, 0, 0, 0, n as u8]),
            mtu: 1500.into(),
            up: true.into(),
            leads_to: LeadsTo::Namespace(None),
            pair: None,
        };
        InterfacePort {
            member: Member {
                networks: Networks::only(networks_of(n)),
                mac: (self.random.below(4) == 0).then_some(Mac([2, 1, 0, 0, 0, n as u8])),
                port_security: self.random.below(8) == 0,
                ..member(PortId(n), PortKind::Interface)
            },
            name: format!("i{n}"),
            stats: self.stats[usize::from(n)].clone(),
            interface: Arc::new(Guest((n != 4).then_some(device))),
            drive: Drive::default(),
            guard: (self.random.below(8) == 0).then(|| Arc::new(AddressGuard::new(&[], None))),
        }
    }

    /// Publishes a random setup. Port 4 has no device, some of the others are captured, and some networks relay between links.
    fn change(&mut self) -> Arc<Setup> {
        let rules = (0..self.random.below(4)).map(|index| self.rule(index)).collect();
        let captured = (self.random.below(3) == 0).then(|| self.port());
        let tap = |port| Tap::new(self.session.clone(), [(port, "captured")]);
        let taps = captured.into_iter().map(tap).collect();
        let interfaces = (0..INTERFACES).map(|n| self.interface(n)).collect();
        let all = (0..IN_NETWORK.len()).map(network);
        let spec = |id| NetworkSpec { id, learning: true, ageing_s: 300 };
        let networks = all.clone().map(spec).collect();
        let relayed = all.filter(|_| self.random.below(2) == 0).collect();
        let published = Arc::new(Published { relayed, ..Published::default() });
        let observers = Observers { taps, ..Observers::default() };
        let links = self.link_ports();
        let parts = Parts { networks, interfaces, links, rules, observers, published, ..Parts::default() };
        let mut setup = Setup::new(parts);
        self.generation += 1;
        setup.generation = self.generation;
        let setup = Arc::new(setup);
        self.links[0].assume_wire(self.now_ms());
        self.path.publish(&setup);
        setup
    }

    /// A frame's flow. Stations are at home, mostly; other frames come from any port, also from one that is not in the network.
    fn flow(&mut self) -> Flow {
        let at = self.random.below(IN_NETWORK.len() as u64) as usize;
        let src = self.station();
        let ports = IN_NETWORK[at];
        let home = PortId(ports[usize::from(src.0[5]) % ports.len()]);
        let from = if self.random.below(50) == 0 { self.port() } else { home };
        let dst = if self.random.below(20) == 0 { Mac::BROADCAST } else { self.station() };
        Flow { network: network(at), src, dst, from }
    }

    /// The port that got the frame from the kernel; `None`: it came up.
    fn by_kernel(&self, flow: &Flow) -> Option<PortId> {
        let (kernel, out) = (self.path.kernel(), |port: &Arc<PortStats>| port.out_frames.get());
        kernel.flows().count();
        let before: Vec<_> = self.stats.iter().map(out).collect();
        kernel.try_out(Origin { port: flow.from, network: flow.network }, flow.dst, flow.src);
        kernel.flows().count();
        let got: Vec<_> =
            (0..PORTS).filter(|n| out(&self.stats[usize::from(*n)]) > before[usize::from(*n)]).collect();
        assert!(got.len() <= 1);
        got.first().map(|n| PortId(*n))
    }
}

fn member(port: PortId, kind: PortKind) -> Member {
    Member {
        port,
        kind,
        networks: Networks::All,
        mac: None,
        storm_frames_per_s: None,
        counts_hops: false,
        port_security: false,
    }
}

/// Frames of each kind, by what they are tested for.
#[derive(Debug, Default)]
struct Tested {
    /// Forwarded by the kernel, by network.
    taken: [u64; 2],
    /// To and from the links.
    to_link: [u64; 2],
    from_link: [u64; 2],
    /// From link to link: vnetd relays them.
    relayed: u64,
}

impl Tested {
    fn count(&mut self, flow: &Flow, by_kernel: Option<PortId>, by_router: Option<PortId>) {
        self.relayed += u64::from(is_link(flow.from) && by_router.is_some_and(is_link));
        let Some(to) = by_kernel else { return };
        self.taken[flow.network.get() as usize - 1] += 1;
        for (at, link) in [NATIVE, VTEP].into_iter().enumerate() {
            self.to_link[at] += u64::from(to == link);
            self.from_link[at] += u64::from(flow.from == link);
        }
    }

    /// Checks that each kind is frequent.
    fn check(&self, frames: u64) {
        let Tested { taken, to_link, from_link, relayed } = self;
        assert!(taken.iter().all(|count| *count > frames / 40), "{self:?}: hardly any flow was installed");
        let rare = to_link.iter().chain(from_link).chain([relayed]).min();
        assert!(rare.is_some_and(|count| *count > frames / 1000), "{self:?}: a kind is hardly tested");
    }
}

#[test]
fn the_kernels_verdict_is_the_routers() {
    let frames = std::env::var("VNET_TEST_FRAMES").map_or(100_000, |text| text.parse().unwrap());
    let seed = std::process::id().into();
    let Some(mut world) = World::new(seed) else { return };
    let mut setup = world.change();
    let learned = world.path.learned.clone();
    let new = |setup: &Setup| Router::new(setup.table.clone(), learned.clone());
    let (mut dispatcher, mut oracle) = (new(&setup), new(&setup));
    dispatcher.offer_to(world.path.verdicts(&setup));
    let (mut tested, mut last) = (Tested::default(), world.flow());
    for frame in 0..frames {
        if world.random.below(FRAMES_PER_SETUP) == 0 {
            if world.random.below(FRAMES_PER_WORLD / FRAMES_PER_SETUP) == 0 {
                world.number += 1;
            }
            setup = world.change();
            dispatcher.adopt(setup.table.clone());
            dispatcher.offer_to(world.path.verdicts(&setup));
            if world.random.below(8) == 0 {
                learned.forget_port(world.port());
            }
        }
        // The first frame of a flow comes up; half of all frames follow one.
        let flow = if world.random.below(2) == 0 { last } else { world.flow() };
        last = flow;
        let now_ms = world.now_ms();
        let by_kernel = world.by_kernel(&flow);
        // Without a cache: every answer is the table's own.
        oracle.adopt(setup.table.clone());
        let by_router = oracle.sole(&flow, now_ms);
        let place = || format!("seed {seed}, frame {frame}: {flow:?}");
        tested.count(&flow, by_kernel, by_router);
        if let Some(port) = by_kernel {
            assert_eq!(Some(port), by_router, "{}", place());
            assert!(!is_link(port) || !is_link(flow.from), "{} was relayed without a hop count", place());
            let carries = |port: PortId| networks_of(port.0).any(|network| network == flow.network);
            assert!(carries(port) && carries(flow.from), "{} left its network", place());
            assert!(!setup.watches(port) && !setup.watches(flow.from), "{} was captured", place());
            let needed = setup.interface(flow.from).is_some_and(InterfacePort::needs_every_frame);
            assert!(!needed, "{}: its addresses were not checked", place());
        } else {
            dispatcher.begin();
            dispatcher.sole(&flow, now_ms);
        }
    }
    println!("{frames} frames, seed {seed}: {tested:?}");
    tested.check(frames);
}
