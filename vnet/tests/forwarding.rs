//! Whole cores on loopback: frames from interface to interface, on one host and across links, with every frame accounted for.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vnet::dispatch::core::{Core, CoreOptions};
use vnet::dispatch::isolation::Isolation;
use vnet::dispatch::mode::Drive;
use vnet::dispatch::setup::{InterfacePort, LinkPort, Parts};
use vnet::dispatch::yielding::Strategy;
use vnet::frame::{FRAME_MAX, MTU_MAX, NetworkId, Origin, PortId};
use vnet::interface::fake::{Fake, OwnedFrame};
use vnet::link::{Encapsulation, Link, LinkOptions, Tunnel};
use vnet::route::{Member, NetworkSpec, Networks, PortKind, Published, Qualifier, Rule, Source};
use vnet::stats::{DropReason, PortStats};
use vnet::wire::ethernet::Mac;
use vnet::wire::offload::{F_NEEDS_CSUM, GSO_TCPV4, Offload};

const WAIT: Duration = Duration::from_secs(10);

/// A host under test: a core, its fakes, its links.
struct Host {
    core: Core,
    fakes: Vec<Arc<Fake>>,
    interfaces: Vec<InterfacePort>,
    links: Vec<LinkPort>,
    rules: Vec<Rule>,
    networks: Vec<NetworkSpec>,
    published: Arc<Published>,
}

impl Host {
    fn start(threads: usize, strategy: Strategy) -> Host {
        Host::with_ports(threads, 1, strategy)
    }

    fn with_ports(threads: usize, ports: u16, strategy: Strategy) -> Host {
        let options = CoreOptions {
            threads,
            cpus: vec![],
            yield_strategy: strategy,
            sleep_us: 50,
            nowork_us: 200,
            burst: 64,
            listen: "127.0.0.1:0".parse().unwrap(),
            ports,
            vxlan_listen: None,
            stream_listen: None,
            zero_copy: Default::default(),
            isolation: Isolation::default(),
        };
        let core = Core::start(&options).unwrap();
        let networks = vec![NetworkSpec { id: NetworkId::DEFAULT, learning: true, ageing_s: 300 }];
        Host {
            core,
            fakes: vec![],
            interfaces: vec![],
            links: vec![],
            rules: vec![],
            networks,
            published: Arc::default(),
        }
    }

    fn member(&self, kind: PortKind, networks: Networks) -> Member {
        let port = PortId((self.interfaces.len() + self.links.len()) as u16);
        Member { port, kind, networks, mac: None, storm_frames_per_s: None, port_security: false }
    }

    fn add_fake(&mut self, network: NetworkId) -> Arc<Fake> {
        let member = self.member(PortKind::Interface, Networks::only([network]));
        let stats = Arc::new(PortStats::default());
        let origin = Origin { port: member.port, network };
        let fake = Fake::new(origin, MTU_MAX, 200_000, stats.clone()).unwrap();
        let name = format!("fake{}", member.port.0);
        self.interfaces.push(InterfacePort {
            member,
            name,
            stats,
            interface: fake.clone(),
            drive: Drive::default(),
        });
        self.fakes.push(fake.clone());
        fake
    }

    fn add_link(&mut self, remote: SocketAddr, ports: u16, encapsulation: Encapsulation, mtu: Option<u16>) {
        let member = self.member(PortKind::Link, Networks::All);
        let options = LinkOptions {
            name: format!("link{}", member.port.0),
            remote,
            ports,
            encapsulation,
            networks: None,
            mtu,
            tunnel: Tunnel::None,
        };
        let link = Link::new(options, member.port, Arc::new(PortStats::default()));
        self.links.push(LinkPort { member, link, stream: None });
    }

    fn publish(&self) {
        self.core.publish(Parts {
            networks: self.networks.clone(),
            interfaces: self.interfaces.clone(),
            links: self.links.clone(),
            rules: self.rules.clone(),
            published: self.published.clone(),
            ..Parts::default()
        });
    }

    /// in + copies - out - drops over all ports: zero when nothing is under way or lost.
    fn imbalance(&self) -> i64 {
        let stats =
            self.interfaces.iter().map(|i| &*i.stats).chain(self.links.iter().map(|l| &**l.link.stats()));
        stats
            .map(|s| {
                (s.in_frames.get() + s.copies.get()) as i64 - (s.out_frames.get() + s.drops_total()) as i64
            })
            .sum()
    }

    fn assert_balanced(&self) {
        let deadline = Instant::now() + WAIT;
        while self.imbalance() != 0 && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(self.imbalance(), 0, "in + copies = out + drops");
    }
}

fn mac(n: u8) -> Mac {
    Mac([0x52, 0x54, 0, 0, 0, n])
}

fn frame(dst: Mac, src: Mac, len: usize, seed: u8) -> OwnedFrame {
    let mut bytes: Vec<u8> = dst.0.into_iter().chain(src.0).chain([0x88, 0xb5]).collect();
    bytes.extend((bytes.len()..len).map(|i| (i as u8).wrapping_mul(31).wrapping_add(seed)));
    (bytes, Offload::default())
}

/// Two hosts with one fake each and a link between them.
fn pair(
    threads: usize,
    encapsulation: Encapsulation,
    mtu: Option<u16>,
) -> (Host, Host, Arc<Fake>, Arc<Fake>) {
    let (mut one, mut two) =
        (Host::start(threads, Strategy::Adaptive), Host::start(threads, Strategy::Block));
    let (a, b) = (one.add_fake(NetworkId::DEFAULT), two.add_fake(NetworkId::DEFAULT));
    one.add_link(two.core.bridge_address(), 1, encapsulation, mtu);
    two.add_link(one.core.bridge_address(), 1, encapsulation, mtu);
    one.publish();
    two.publish();
    (one, two, a, b)
}

#[test]
fn same_host_learns_and_floods() {
    for strategy in [Strategy::Block, Strategy::Immediate, Strategy::Timed, Strategy::Adaptive] {
        let mut host = Host::start(1, strategy);
        let fakes: Vec<_> = (0..3).map(|_| host.add_fake(NetworkId::DEFAULT)).collect();
        host.publish();
        // Unknown: to all but the sender.
        fakes[0].send([frame(mac(1), mac(0), 60, 1)]);
        assert_eq!(fakes[1].wait_for(1, WAIT).len(), 1);
        assert_eq!(fakes[2].wait_for(1, WAIT).len(), 1);
        // The answer goes to where the question came from, and to nobody else.
        fakes[1].send([frame(mac(0), mac(1), 60, 2)]);
        assert_eq!(fakes[0].wait_for(1, WAIT), [frame(mac(0), mac(1), 60, 2)]);
        fakes[0].send([frame(mac(1), mac(0), 60, 3)]);
        assert_eq!(fakes[1].wait_for(1, WAIT), [frame(mac(1), mac(0), 60, 3)]);
        host.assert_balanced();
        assert!(fakes[2].take().is_empty() && fakes[0].take().is_empty());
    }
}

#[test]
fn every_size_crosses_native_links() {
    for mtu in [None, Some(576), Some(1500), Some(9000)] {
        let (one, two, a, b) = pair(1, Encapsulation::Native, mtu);
        for len in [14, 60, 127, 128, 129, 576, 1514, 9014, 65_535, FRAME_MAX] {
            let sent = frame(mac(2), mac(1), len, len as u8);
            a.send([sent.clone()]);
            assert_eq!(b.wait_for(1, WAIT), [sent], "{len} bytes at path MTU {mtu:?}");
        }
        one.assert_balanced();
        two.assert_balanced();
    }
}

#[test]
fn vnet_links_carry_finished_frames() {
    let (one, two, a, b) = pair(1, Encapsulation::Vnet, None);
    let sent = frame(mac(2), mac(1), 1514, 7);
    a.send([sent.clone()]);
    assert_eq!(b.wait_for(1, WAIT), [sent]);
    // A super-frame is cut before it leaves.
    let (mut bytes, _) = frame(mac(2), mac(1), 54 + 4000, 0);
    bytes[12..16].copy_from_slice(&[8, 0, 0x45, 0]);
    bytes[16..18].copy_from_slice(&(40u16 + 4000).to_be_bytes());
    bytes[23] = 6;
    bytes[46] = 0x50;
    let offload = Offload {
        flags: F_NEEDS_CSUM,
        gso_type: GSO_TCPV4,
        hdr_len: 54,
        gso_size: 1000,
        csum_start: 34,
        csum_offset: 16,
    };
    a.send([(bytes, offload)]);
    let got = b.wait_for(4, WAIT);
    assert_eq!(got.len(), 4);
    assert!(got.iter().all(|(bytes, offload)| bytes.len() == 1054 && offload.is_none()));
    // Too large for one bare datagram.
    a.send([frame(mac(2), mac(1), FRAME_MAX, 1)]);
    let dropped = || one.links[0].link.stats().drops(DropReason::MtuExceeded);
    let deadline = Instant::now() + WAIT;
    while dropped() == 0 && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(dropped(), 1);
    one.assert_balanced();
    two.assert_balanced();
}

#[test]
fn networks_do_not_meet() {
    let mut host = Host::start(1, Strategy::Adaptive);
    let other = NetworkId::new(7).unwrap();
    host.networks.push(NetworkSpec { id: other, learning: true, ageing_s: 300 });
    let (a, b, c) =
        (host.add_fake(NetworkId::DEFAULT), host.add_fake(other), host.add_fake(NetworkId::DEFAULT));
    host.publish();
    a.send([frame(Mac::BROADCAST, mac(1), 60, 1)]);
    assert_eq!(c.wait_for(1, WAIT).len(), 1);
    host.assert_balanced();
    assert!(b.take().is_empty());
}

#[test]
fn all_equally_good_rules_get_a_copy() {
    let mut host = Host::start(1, Strategy::Adaptive);
    let fakes: Vec<_> = (0..3).map(|_| host.add_fake(NetworkId::DEFAULT)).collect();
    let rule = |index, dst, to| Rule {
        index,
        network: NetworkId::DEFAULT,
        src: Qualifier::Any,
        dst,
        from: Source::Any,
        to: PortId(to),
    };
    // Published behaviour: `any any` and `any X` have the same priority.
    host.rules = vec![rule(1, Qualifier::Any, 1), rule(2, Qualifier::Is(mac(9)), 2)];
    host.publish();
    fakes[0].send([frame(mac(9), mac(1), 60, 1), frame(mac(8), mac(1), 60, 2)]);
    assert_eq!(fakes[1].wait_for(2, WAIT).len(), 2);
    assert_eq!(fakes[2].wait_for(1, WAIT).len(), 1);
    host.assert_balanced();
    assert!(fakes[2].take().is_empty());
}

/// A million frames of mixed sizes, both ways at once, through two dispatchers a host: nothing unaccounted for.
#[test]
fn a_million_frames_are_accounted_for() {
    for threads in [1, 2] {
        let (one, two, a, b) = pair(threads, Encapsulation::Native, Some(1500));
        a.send([frame(mac(2), mac(1), 60, 0)]);
        assert_eq!(b.wait_for(1, WAIT).len(), 1);
        let sizes = [60, 60, 64, 128, 300, 1514, 60, 4000];
        let rounds = 500_000 / 2 / 1000;
        for round in 0..rounds {
            let burst =
                |dst, src| (0..1000).map(move |i| frame(dst, src, sizes[(i + round) % sizes.len()], i as u8));
            a.send(burst(mac(2), mac(1)));
            b.send(burst(mac(1), mac(2)));
            if round % 8 == 0 {
                a.take();
                b.take();
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        let total = (rounds * 1000) as u64;
        let deadline = Instant::now() + WAIT;
        let entered = |host: &Host| host.interfaces[0].stats.in_frames.get();
        while (entered(&one) < total + 1 || entered(&two) < total) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(10));
        }
        assert_eq!((entered(&one), entered(&two)), (total + 1, total));
        one.assert_balanced();
        two.assert_balanced();
    }
}

/// Changes take effect under traffic and lose nothing on what did not change.
#[test]
fn publishing_loses_nothing_on_what_stays() {
    let mut host = Host::start(2, Strategy::Adaptive);
    let (a, b) = (host.add_fake(NetworkId::DEFAULT), host.add_fake(NetworkId::DEFAULT));
    host.publish();
    a.send([frame(mac(2), mac(1), 60, 0)]);
    b.send([frame(mac(1), mac(2), 60, 0)]);
    assert_eq!((b.wait_for(1, WAIT).len(), a.wait_for(1, WAIT).len()), (1, 1));
    let sender = std::thread::spawn({
        let a = a.clone();
        move || {
            for i in 0..20_000u32 {
                a.send([frame(mac(2), mac(1), 60, i as u8)]);
                if i % 16 == 0 {
                    std::thread::sleep(Duration::from_micros(50));
                }
            }
        }
    });
    while !sender.is_finished() {
        host.add_fake(NetworkId::DEFAULT);
        host.publish();
        host.interfaces.pop();
        host.fakes.pop();
        host.publish();
    }
    sender.join().unwrap();
    let got = b.wait_for(20_000, WAIT);
    assert_eq!(got.len(), 20_000);
    for (i, (bytes, _)) in got.iter().enumerate() {
        assert_eq!(*bytes, frame(mac(2), mac(1), 60, i as u8).0, "frame {i} in order");
    }
}

/// A question for a published neighbour is answered on the spot and reaches nobody else; another is flooded.
#[test]
fn questions_for_published_neighbours_are_answered() {
    let request = |target: u8| -> OwnedFrame {
        let mut frame = [Mac::BROADCAST.0, mac(1).0].concat();
        frame.extend([8, 6, 0, 1, 8, 0, 6, 4, 0, 1]);
        frame.extend([mac(1).0.as_slice(), &[10, 0, 0, 1], &[0; 6], &[10, 0, 0, target]].concat());
        (frame, Offload::default())
    };
    let mut host = Host::start(1, Strategy::Adaptive);
    let (asker, other) = (host.add_fake(NetworkId::DEFAULT), host.add_fake(NetworkId::DEFAULT));
    let neighbours = Arc::new([((NetworkId::DEFAULT, [10, 0, 0, 2].into()), mac(2))].into());
    host.published = Arc::new(Published { neighbours, ..Published::default() });
    host.publish();
    asker.send([request(2), request(3), request(2)]);
    let answers = asker.wait_for(2, WAIT);
    assert_eq!(answers.len(), 2);
    for (frame, _) in &answers {
        assert_eq!(frame[..12], [mac(1).0, mac(2).0].concat());
        assert_eq!(frame[20..22], [0, 2]);
    }
    assert_eq!(other.wait_for(1, WAIT), [request(3)]);
    assert_eq!(host.interfaces[0].stats.answers.get(), 2);
    // What enters by the other interface is answered there, for all that is published in its network.
    other.send([request(2)]);
    assert_eq!(other.wait_for(1, WAIT).len(), 1);
    host.assert_balanced();
    assert_eq!(host.interfaces[0].stats.out_frames.get(), 2, "nobody else's question came here");
}

/// A UDP packet of `flow` with a number inside.
fn packet(flow: u16, number: u32, len: usize) -> OwnedFrame {
    let (mut bytes, offload) = frame(mac(2), mac(1), len, number as u8);
    bytes[12..24].copy_from_slice(&[8, 0, 0x45, 0, 0, 0, 0, 0, 0x40, 0, 64, 17]);
    bytes[26..34].copy_from_slice(&[10, 0, 0, 1, 10, 0, 0, 2]);
    bytes[34..36].copy_from_slice(&flow.to_be_bytes());
    bytes[36..38].copy_from_slice(&7u16.to_be_bytes());
    bytes[38..42].copy_from_slice(&number.to_be_bytes());
    (bytes, offload)
}

/// Several dispatchers and ports, different on the two hosts: all of them work, every flow stays in order, nothing is lost.
#[test]
fn dispatchers_share_flows_and_keep_their_order() {
    const FLOWS: u16 = 32;
    const ROUNDS: u32 = 300;
    let (mut one, mut two) =
        (Host::with_ports(2, 2, Strategy::Adaptive), Host::with_ports(3, 3, Strategy::Adaptive));
    let (a, b) = (one.add_fake(NetworkId::DEFAULT), two.add_fake(NetworkId::DEFAULT));
    one.add_link(two.core.bridge_address(), 3, Encapsulation::Native, Some(1500));
    two.add_link(one.core.bridge_address(), 2, Encapsulation::Native, Some(1500));
    one.publish();
    two.publish();
    // What is not known is flooded, and floods have a limit.
    b.send([frame(mac(1), mac(2), 60, 0)]);
    assert_eq!(a.wait_for(1, WAIT).len(), 1);
    for number in 0..ROUNDS {
        let len = [60, 64, 1514, 4000][number as usize % 4];
        a.send((0..FLOWS).map(|flow| packet(flow, number, len)));
        std::thread::sleep(Duration::from_micros(200));
    }
    let mut next = [0; FLOWS as usize];
    let got = b.wait_for(usize::from(FLOWS) * ROUNDS as usize, WAIT);
    assert_eq!(got.len(), usize::from(FLOWS) * ROUNDS as usize);
    for (bytes, _) in got {
        let flow = u16::from_be_bytes([bytes[34], bytes[35]]);
        let number = u32::from_be_bytes(bytes[38..42].try_into().unwrap());
        assert_eq!(number, next[usize::from(flow)], "flow {flow}");
        next[usize::from(flow)] += 1;
    }
    assert_eq!(next, [ROUNDS; FLOWS as usize]);
    one.assert_balanced();
    two.assert_balanced();
    let all = u64::from(FLOWS) * u64::from(ROUNDS) + 1;
    let frames = || two.core.dispatcher_stats().iter().map(|stats| stats.frames()).sum::<u64>();
    let deadline = Instant::now() + WAIT;
    while frames() < all && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(frames(), all);
    for (id, stats) in two.core.dispatcher_stats().iter().enumerate() {
        assert!(stats.frames() > 0 && stats.busy_ns() > 0, "dispatcher {id} had its share: {stats:?}");
    }
}

/// Hosts with one fake each, joined by links as told, all of which relay if so told.
fn joined(hosts: usize, links: &[(usize, usize)], relayed: bool) -> Vec<Host> {
    let mut all: Vec<_> = (0..hosts).map(|_| Host::start(1, Strategy::Block)).collect();
    for host in &mut all {
        host.add_fake(NetworkId::DEFAULT);
        if relayed {
            let relayed = [NetworkId::DEFAULT].into();
            host.published = Arc::new(Published { relayed, ..Published::default() });
        }
    }
    for &(one, other) in links {
        let at = all[other].core.bridge_address();
        all[one].add_link(at, 1, Encapsulation::Native, Some(1500));
        let at = all[one].core.bridge_address();
        all[other].add_link(at, 1, Encapsulation::Native, Some(1500));
    }
    all.iter().for_each(Host::publish);
    all
}

#[test]
fn a_relay_joins_hosts_that_have_no_link() {
    let hosts = joined(3, &[(0, 1), (1, 2)], true);
    let fakes: Vec<_> = hosts.iter().map(|host| host.fakes[0].clone()).collect();
    fakes[0].send([frame(Mac::BROADCAST, mac(1), 60, 1)]);
    assert_eq!(fakes[1].wait_for(1, WAIT).len(), 1);
    assert_eq!(fakes[2].wait_for(1, WAIT).len(), 1);
    // Now it is known where to, both ways, and nobody else is bothered.
    for (from, to, len) in [(2, 0, 60), (0, 2, 9000), (2, 0, FRAME_MAX)] {
        let sent = frame(mac(to as u8 + 1), mac(from as u8 + 1), len, 2);
        fakes[from].send([sent.clone()]);
        assert_eq!(fakes[to].wait_for(1, WAIT), [sent]);
    }
    hosts.iter().for_each(Host::assert_balanced);
    assert!(fakes[1].take().is_empty());
    // Who does not relay keeps what is for others to himself.
    let hosts = joined(3, &[(0, 1), (1, 2)], false);
    let fakes: Vec<_> = hosts.iter().map(|host| host.fakes[0].clone()).collect();
    fakes[0].send([frame(Mac::BROADCAST, mac(1), 60, 1)]);
    assert_eq!(fakes[1].wait_for(1, WAIT).len(), 1);
    hosts.iter().for_each(Host::assert_balanced);
    std::thread::sleep(Duration::from_millis(50));
    assert!(fakes[2].take().is_empty());
}

/// Three relays in a ring, which nobody should configure: what is flooded goes around seven relays each way, and ends.
#[test]
fn a_ring_of_relays_makes_no_storm() {
    const CROSSINGS: u64 = 2 * 8;
    const FRAMES: u64 = 500;
    let hosts = joined(3, &[(0, 1), (1, 2), (2, 0)], true);
    for number in 0..FRAMES {
        hosts[0].fakes[0].send([frame(Mac::BROADCAST, mac(1), 60, number as u8)]);
        std::thread::sleep(Duration::from_micros(500));
    }
    let links = |of: fn(&PortStats) -> u64| -> u64 {
        hosts.iter().flat_map(|host| &host.links).map(|link| of(link.link.stats())).sum()
    };
    let ended = |stats: &PortStats| stats.drops(DropReason::HopLimit);
    let deadline = Instant::now() + WAIT;
    while links(ended) < 2 * FRAMES && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
    std::thread::sleep(Duration::from_millis(100));
    hosts.iter().for_each(Host::assert_balanced);
    assert_eq!(links(ended), 2 * FRAMES, "each way ends once");
    assert_eq!(links(|stats| stats.out_frames.get()), CROSSINGS * FRAMES);
    assert_eq!(links(|stats| stats.in_frames.get()), CROSSINGS * FRAMES);
    let delivered: usize = hosts.iter().map(|host| host.fakes[0].take().len()).sum();
    assert_eq!(delivered as u64, CROSSINGS * FRAMES, "every crossing ends at a guest, too");
}
