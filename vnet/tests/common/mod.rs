//! Hosts under test: a core on the loopback address, interfaces whose guests are the test itself, and links to other hosts.

// Each test program uses only a part of this module.
#![allow(dead_code)]

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vnet::dispatch::core::{Core, CoreOptions};
use vnet::dispatch::mode::Drive;
use vnet::dispatch::setup::{Feeder, InterfacePort, LinkPort, Parts};
use vnet::frame::{MTU_MAX, NetworkId, Origin, PortId};
use vnet::interface::Interface;
use vnet::interface::fake::{Fake, OwnedFrame};
use vnet::link::{Encapsulation, Link, LinkKind, LinkOptions, SourceMatch, VxlanOptions};
use vnet::route::{Member, NetworkSpec, Networks, PortKind, Published, Rule};
use vnet::stats::PortStats;
use vnet::wire::ethernet::Mac;
use vnet::wire::offload::Offload;

/// Time limit for events that should happen at once.
pub const WAIT: Duration = Duration::from_secs(10);

/// Number of delivered frames that a fake interface keeps until the test takes them.
const FAKE_ROOM: usize = 200_000;

/// The default network, which learns addresses.
pub const LEARNING: NetworkSpec = NetworkSpec { id: NetworkId::DEFAULT, learning: true, ageing_s: 300 };

/// A core with its ports. Changes take effect with `publish`.
pub struct Host {
    pub core: Core,
    pub fakes: Vec<Arc<Fake>>,
    pub interfaces: Vec<InterfacePort>,
    pub links: Vec<LinkPort>,
    /// Sources of frames for single interfaces.
    pub feeders: Vec<(PortId, Arc<dyn Feeder>)>,
    pub rules: Vec<Rule>,
    pub networks: Vec<NetworkSpec>,
    pub published: Arc<Published>,
}

impl Host {
    pub fn start(options: CoreOptions) -> Host {
        Host::of(Core::start(&options).unwrap())
    }

    /// Wraps a core that is already running.
    pub fn of(core: Core) -> Host {
        Host {
            core,
            fakes: vec![],
            interfaces: vec![],
            links: vec![],
            feeders: vec![],
            rules: vec![],
            networks: vec![LEARNING],
            published: Arc::default(),
        }
    }

    fn next_port(&self) -> PortId {
        PortId((self.interfaces.len() + self.links.len()) as u16)
    }

    /// Adds an interface whose guest is the test.
    pub fn add_fake(&mut self, network: NetworkId) -> Arc<Fake> {
        self.add_fake_with_mtu(network, MTU_MAX)
    }

    pub fn add_fake_with_mtu(&mut self, network: NetworkId, mtu: usize) -> Arc<Fake> {
        let stats = Arc::new(PortStats::default());
        let origin = Origin { port: self.next_port(), network };
        let fake = Fake::new(origin, mtu, FAKE_ROOM, stats.clone()).unwrap();
        self.add_interface(network, fake.clone(), stats);
        self.fakes.push(fake.clone());
        fake
    }

    /// Adds an interface that was opened for the next free port.
    pub fn add_interface(
        &mut self,
        network: NetworkId,
        interface: Arc<dyn Interface>,
        stats: Arc<PortStats>,
    ) -> &mut InterfacePort {
        let member = member(self.next_port(), PortKind::Interface, Networks::only([network]));
        let name = format!("interface{}", member.port.0);
        self.interfaces.push(InterfacePort {
            member,
            name,
            stats,
            interface,
            drive: Drive::default(),
            guard: None,
        });
        self.interfaces.last_mut().unwrap()
    }

    pub fn add_link(&mut self, options: LinkOptions) {
        let link = Link::new(options, self.next_port(), Arc::default());
        self.links.push(link_port(link));
    }

    pub fn publish(&self) {
        self.core.publish(Parts {
            networks: self.networks.clone(),
            interfaces: self.interfaces.clone(),
            links: self.links.clone(),
            feeders: self.feeders.clone(),
            rules: self.rules.clone(),
            published: self.published.clone(),
            ..Parts::default()
        });
    }

    /// The sum in + copies - out - drops over all ports: zero when no frame is in flight or lost.
    pub fn imbalance(&self) -> i64 {
        let interfaces = self.interfaces.iter().map(|port| &*port.stats);
        let links = self.links.iter().map(|port| &**port.link.stats());
        let imbalance = |stats: &PortStats| {
            let entered = stats.in_frames.get() + stats.copies.get();
            entered as i64 - (stats.out_frames.get() + stats.drops_total()) as i64
        };
        interfaces.chain(links).map(imbalance).sum()
    }

    /// Waits until every frame that entered has left or is counted as dropped.
    pub fn assert_balanced(&self) {
        wait_for("in + copies = out + drops", || self.imbalance() == 0, || self.imbalance().to_string());
    }
}

/// One dispatcher on the loopback address, with the given `yield_strategy`.
pub fn yielding(yield_strategy: vnet::dispatch::yielding::Strategy) -> CoreOptions {
    CoreOptions { yield_strategy, ..CoreOptions::default() }
}

/// A port as the routing table sees it, without limits or a configured address.
pub fn member(port: PortId, kind: PortKind, networks: Networks) -> Member {
    let (mac, storm_frames_per_s) = (None, None);
    Member { port, kind, networks, mac, storm_frames_per_s, counts_hops: true, port_security: false }
}

/// A link that carries all networks.
pub fn link_port(link: Arc<Link>) -> LinkPort {
    let counts_hops = link.options().kind.counts_hops();
    LinkPort { member: Member { counts_hops, ..member(link.port(), PortKind::Link, Networks::All) }, link }
}

/// A link to the first of a host's UDP ports. `mtu` sets the path MTU; `None`: the link discovers it.
pub fn link_to(remote: SocketAddr, encapsulation: Encapsulation, mtu: Option<u16>) -> LinkOptions {
    let kind = match encapsulation {
        Encapsulation::Native => LinkKind::default(),
        Encapsulation::Vnet => LinkKind::Classic(SourceMatch::AddressPort),
        Encapsulation::Vxlan => LinkKind::Vxlan(VxlanOptions::default()),
        Encapsulation::Stream => panic!("a stream link says how it connects"),
    };
    LinkOptions { name: "peer".into(), remote, ports: 1, networks: None, mtu, kind }
}

pub fn mac(n: u8) -> Mac {
    Mac([0x52, 0x54, 0, 0, 0, n])
}

/// A frame of `len` bytes of an unknown protocol, filled from `seed`.
pub fn frame(dst: Mac, src: Mac, len: usize, seed: u8) -> OwnedFrame {
    let mut bytes: Vec<u8> = dst.0.into_iter().chain(src.0).chain([0x88, 0xb5]).collect();
    bytes.extend((bytes.len()..len).map(|i| (i as u8).wrapping_mul(31).wrapping_add(seed)));
    (bytes, Offload::default())
}

/// Waits until `done`. When that takes too long, fails with the progress that `now` reports.
pub fn wait_for(what: &str, done: impl Fn() -> bool, now: impl Fn() -> String) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < WAIT, "{what}: {}", now());
        std::thread::sleep(Duration::from_millis(1));
    }
}
