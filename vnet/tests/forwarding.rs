//! Whole cores on the loopback address: frames cross from interface to interface, on one host and over links, and every frame is
//! accounted for.

mod common;

use std::net::{TcpListener, UdpSocket};
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{Host, LEARNING, WAIT, frame, link_to, mac, wait_for, yielding};
use vnet::dispatch::core::{Core, CoreOptions};
use vnet::dispatch::yielding::Strategy;
use vnet::frame::{FRAME_MAX, NetworkId, PortId};
use vnet::interface::fake::{Fake, OwnedFrame};
use vnet::link::{Encapsulation, LinkKind, LinkOptions, SourceMatch};
use vnet::route::{NetworkSpec, Published, Qualifier, Rule, RuleSource};
use vnet::stats::{DiscardReason, DropReason, PortStats};
use vnet::wire::ethernet::Mac;
use vnet::wire::offload::{F_NEEDS_CSUM, GSO_TCPV4, Offload};

fn host(threads: usize, ports: u16, yield_strategy: Strategy) -> Host {
    Host::start(CoreOptions { threads, ports, ..yielding(yield_strategy) })
}

/// Two hosts with one fake each and a link between them.
fn pair(
    threads: usize,
    encapsulation: Encapsulation,
    mtu: Option<u16>,
) -> (Host, Host, Arc<Fake>, Arc<Fake>) {
    let (mut one, mut two) = (host(threads, 1, Strategy::Adaptive), host(threads, 1, Strategy::Block));
    let (a, b) = (one.add_fake(NetworkId::DEFAULT), two.add_fake(NetworkId::DEFAULT));
    one.add_link(link_to(two.core.bridge_address(), encapsulation, mtu));
    two.add_link(link_to(one.core.bridge_address(), encapsulation, mtu));
    one.publish();
    two.publish();
    (one, two, a, b)
}

#[test]
fn the_ports_of_a_process_that_is_dying_are_waited_for() {
    let [udp, vxlan] = [(); 2].map(|()| UdpSocket::bind("127.0.0.1:0").unwrap());
    let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
    let options = CoreOptions {
        listen: udp.local_addr().unwrap(),
        vxlan_listen: vxlan.local_addr().ok(),
        stream_listen: tcp.local_addr().ok(),
        threads: 2,
        ..CoreOptions::default()
    };
    let dying = std::thread::spawn(move || {
        for socket in [Box::new(udp) as Box<dyn Send>, Box::new(vxlan), Box::new(tcp)] {
            std::thread::sleep(Duration::from_millis(100));
            drop(socket);
        }
    });
    Core::start(&options).unwrap();
    dying.join().unwrap();
}

#[test]
fn what_arrives_before_the_first_setup_belongs_to_its_link() {
    let mut host = host(2, 1, Strategy::Adaptive);
    let peer = UdpSocket::bind("127.0.0.1:0").unwrap();
    peer.send_to(&[0; 20], host.core.bridge_address()).unwrap();
    // A dispatcher that already receives would take the datagram for a stranger's.
    std::thread::sleep(Duration::from_millis(50));
    host.add_link(link_to(peer.local_addr().unwrap(), Encapsulation::Native, None));
    host.publish();
    let come = || host.links[0].link.stats().in_datagrams.get();
    wait_for("the link's datagram", || come() == 1, || come().to_string());
    assert!(host.core.bridge_stats().last_stranger.lately().is_none());
    assert_eq!(host.core.bridge_stats().discards(DiscardReason::UnknownSource), 0);
}

#[test]
fn same_host_learns_and_floods() {
    for strategy in [Strategy::Block, Strategy::Immediate, Strategy::Timed, Strategy::Adaptive] {
        let mut host = Host::start(yielding(strategy));
        let fakes: Vec<_> = (0..3).map(|_| host.add_fake(NetworkId::DEFAULT)).collect();
        host.publish();
        // An unknown destination is flooded to all ports but the sender's.
        fakes[0].send([frame(mac(1), mac(0), 60, 1)]);
        assert_eq!(fakes[1].wait_for(1, WAIT).len(), 1);
        assert_eq!(fakes[2].wait_for(1, WAIT).len(), 1);
        // The answer goes to the learned port only.
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

/// A TCP super-frame with `payload` bytes.
fn super_frame(payload: u16, gso_size: u16) -> OwnedFrame {
    let (mut bytes, _) = frame(mac(2), mac(1), 54 + usize::from(payload), 0);
    bytes[12..16].copy_from_slice(&[8, 0, 0x45, 0]);
    bytes[16..18].copy_from_slice(&(40 + payload).to_be_bytes());
    bytes[23] = 6;
    bytes[46] = 0x50;
    let (flags, gso_type, csum_start, csum_offset) = (F_NEEDS_CSUM, GSO_TCPV4, 34, 16);
    (bytes, Offload { flags, gso_type, hdr_len: 54, gso_size, csum_start, csum_offset })
}

/// A guest that always has 64 super-frames of 1 366 segments waiting for a link without segmentation offload does not keep the
/// dispatcher from its neighbours: between a neighbour's frame and its delivery, it gets a few of them out, not all 64.
#[test]
fn expensive_frames_do_not_keep_a_neighbour_waiting() {
    let mut host = Host::start(yielding(Strategy::Adaptive));
    let [attacker, one, other] = [(); 3].map(|()| host.add_fake(NetworkId::DEFAULT));
    let sink = UdpSocket::bind("127.0.0.1:0").unwrap();
    host.add_link(link_to(sink.local_addr().unwrap(), Encapsulation::Vnet, None));
    host.interfaces[1].member.mac = Some(mac(3));
    host.interfaces[2].member.mac = Some(mac(4));
    let link = host.links[0].member.port;
    let (any, to_link) = (Qualifier::Any, Qualifier::Is(mac(2)));
    let from = RuleSource::Any;
    host.rules = vec![Rule { index: 1, network: NetworkId::DEFAULT, src: any, dst: to_link, from, to: link }];
    host.publish();
    let taken = || host.interfaces[0].stats.in_frames.get();
    let round_trips = |load: bool| {
        let mut trips = vec![];
        let mut sent = taken();
        for round in 0..200 {
            while load && sent - taken() < 64 {
                attacker.send([super_frame(65_481, 48)]);
                sent += 1;
            }
            let (begun, before) = (Instant::now(), taken());
            one.send([frame(mac(4), mac(3), 60, round)]);
            assert_eq!(other.wait_for(1, WAIT).len(), 1);
            trips.push((taken() - before, begun.elapsed()));
        }
        trips.sort_unstable();
        trips
    };
    let unloaded = round_trips(false);
    let loaded = round_trips(true);
    let (median, p99) = (loaded[100], loaded[198]);
    println!(
        "unloaded p99 {:?}; under attack {} super-frames and {:?}, p99 {} and {:?}",
        unloaded[198].1, median.0, median.1, p99.0, p99.1
    );
    assert!(median.0 <= 8, "{} super-frames were sent first", median.0);
}

#[test]
fn vnet_links_carry_finished_frames() {
    let (one, two, a, b) = pair(1, Encapsulation::Vnet, None);
    let sent = frame(mac(2), mac(1), 1514, 7);
    a.send([sent.clone()]);
    assert_eq!(b.wait_for(1, WAIT), [sent]);
    // A super-frame is segmented before it leaves.
    a.send([super_frame(4000, 1000)]);
    let got = b.wait_for(4, WAIT);
    assert_eq!(got.len(), 4);
    assert!(got.iter().all(|(bytes, offload)| bytes.len() == 1054 && offload.is_none()));
    // Too large for one datagram.
    a.send([frame(mac(2), mac(1), FRAME_MAX, 1)]);
    let dropped = || one.links[0].link.stats().drops(DropReason::MtuExceeded);
    wait_for("the drop", || dropped() > 0, String::new);
    assert_eq!(dropped(), 1);
    one.assert_balanced();
    two.assert_balanced();
}

#[test]
fn networks_are_isolated() {
    let mut host = Host::start(CoreOptions::default());
    let other = NetworkId::new(7).unwrap();
    host.networks.push(NetworkSpec { id: other, ..LEARNING });
    let (a, b, c) =
        (host.add_fake(NetworkId::DEFAULT), host.add_fake(other), host.add_fake(NetworkId::DEFAULT));
    host.publish();
    a.send([frame(Mac::BROADCAST, mac(1), 60, 1)]);
    assert_eq!(c.wait_for(1, WAIT).len(), 1);
    host.assert_balanced();
    assert!(b.take().is_empty());
}

#[test]
fn all_rules_of_the_same_priority_get_a_copy() {
    let mut host = Host::start(CoreOptions::default());
    let fakes: Vec<_> = (0..3).map(|_| host.add_fake(NetworkId::DEFAULT)).collect();
    let rule = |index, dst, to| Rule {
        index,
        network: NetworkId::DEFAULT,
        src: Qualifier::Any,
        dst,
        from: RuleSource::Any,
        to: PortId(to),
    };
    // As in VNET/P: `any any` and `any X` have the same priority.
    host.rules = vec![rule(1, Qualifier::Any, 1), rule(2, Qualifier::Is(mac(9)), 2)];
    host.publish();
    fakes[0].send([frame(mac(9), mac(1), 60, 1), frame(mac(8), mac(1), 60, 2)]);
    assert_eq!(fakes[1].wait_for(2, WAIT).len(), 2);
    assert_eq!(fakes[2].wait_for(1, WAIT).len(), 1);
    host.assert_balanced();
    assert!(fakes[2].take().is_empty());
}

/// A million frames of mixed sizes, in both directions at once, with one dispatcher per host and with two.
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
        let entered = || [&one, &two].map(|host| host.interfaces[0].stats.in_frames.get());
        let all = || entered()[0] > total && entered()[1] >= total;
        wait_for("all frames to enter", all, || format!("{:?}", entered()));
        assert_eq!(entered(), [total + 1, total]);
        one.assert_balanced();
        two.assert_balanced();
    }
}

/// A new setup takes effect under traffic; ports that remain lose no frame.
#[test]
fn publishing_loses_no_frame_of_ports_that_stay() {
    let mut host = host(2, 1, Strategy::Adaptive);
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

/// ARP suppression: a request for a published neighbour is answered at its ingress port and reaches no other port; requests for
/// other addresses are flooded.
#[test]
fn arp_requests_for_published_neighbours_are_answered() {
    let request = |target: u8| -> OwnedFrame {
        let mut frame = [Mac::BROADCAST.0, mac(1).0].concat();
        frame.extend([8, 6, 0, 1, 8, 0, 6, 4, 0, 1]);
        frame.extend([mac(1).0.as_slice(), &[10, 0, 0, 1], &[0; 6], &[10, 0, 0, target]].concat());
        (frame, Offload::default())
    };
    let mut host = Host::start(CoreOptions::default());
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
    // Requests that enter at the other interface are answered there.
    other.send([request(2)]);
    assert_eq!(other.wait_for(1, WAIT).len(), 1);
    host.assert_balanced();
    assert_eq!(host.interfaces[0].stats.out_frames.get(), 2, "no request of the other interface came here");
}

/// A UDP packet of `flow` that carries a number.
fn packet(flow: u16, number: u32, len: usize) -> OwnedFrame {
    let (mut bytes, offload) = frame(mac(2), mac(1), len, number as u8);
    bytes[12..24].copy_from_slice(&[8, 0, 0x45, 0, 0, 0, 0, 0, 0x40, 0, 64, 17]);
    bytes[26..34].copy_from_slice(&[10, 0, 0, 1, 10, 0, 0, 2]);
    bytes[34..36].copy_from_slice(&flow.to_be_bytes());
    bytes[36..38].copy_from_slice(&7u16.to_be_bytes());
    bytes[38..42].copy_from_slice(&number.to_be_bytes());
    (bytes, offload)
}

/// Different numbers of dispatchers and ports on the two hosts: each of them gets frames, every flow stays in order, and no frame
/// is lost.
#[test]
fn flows_spread_over_dispatchers_and_stay_in_order() {
    const FLOWS: u16 = 32;
    const ROUNDS: u32 = 300;
    let (mut one, mut two) = (host(2, 2, Strategy::Adaptive), host(3, 3, Strategy::Adaptive));
    let (a, b) = (one.add_fake(NetworkId::DEFAULT), two.add_fake(NetworkId::DEFAULT));
    one.add_link(LinkOptions {
        ports: 3,
        ..link_to(two.core.bridge_address(), Encapsulation::Native, Some(1500))
    });
    two.add_link(LinkOptions {
        ports: 2,
        ..link_to(one.core.bridge_address(), Encapsulation::Native, Some(1500))
    });
    one.publish();
    two.publish();
    // Lets the hosts learn the return path first, because flooded frames are rate-limited.
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
    wait_for("all frames to be counted", || frames() >= all, || frames().to_string());
    assert_eq!(frames(), all);
    for (id, stats) in two.core.dispatcher_stats().iter().enumerate() {
        assert!(stats.frames() > 0 && stats.busy_ns() > 0, "dispatcher {id} did nothing: {stats:?}");
    }
}

/// Hosts with one fake each and with these links between them; with `relayed`, all of them relay.
fn joined(hosts: usize, links: &[(usize, usize)], relayed: bool) -> Vec<Host> {
    let mut all: Vec<_> = (0..hosts).map(|_| Host::start(yielding(Strategy::Block))).collect();
    for host in &mut all {
        host.add_fake(NetworkId::DEFAULT);
        if relayed {
            let relayed = [NetworkId::DEFAULT].into();
            host.published = Arc::new(Published { relayed, ..Published::default() });
        }
    }
    for &(one, other) in links {
        let at = all[other].core.bridge_address();
        all[one].add_link(link_to(at, Encapsulation::Native, Some(1500)));
        let at = all[one].core.bridge_address();
        all[other].add_link(link_to(at, Encapsulation::Native, Some(1500)));
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
    // Both addresses are learned now: frames go only to the host of their destination.
    for (from, to, len) in [(2, 0, 60), (0, 2, 9000), (2, 0, FRAME_MAX)] {
        let sent = frame(mac(to as u8 + 1), mac(from as u8 + 1), len, 2);
        fakes[from].send([sent.clone()]);
        assert_eq!(fakes[to].wait_for(1, WAIT), [sent]);
    }
    hosts.iter().for_each(Host::assert_balanced);
    assert!(fakes[1].take().is_empty());
    // Without relaying, a flooded frame from a link is not forwarded to another link.
    let hosts = joined(3, &[(0, 1), (1, 2)], false);
    let fakes: Vec<_> = hosts.iter().map(|host| host.fakes[0].clone()).collect();
    fakes[0].send([frame(Mac::BROADCAST, mac(1), 60, 1)]);
    assert_eq!(fakes[1].wait_for(1, WAIT).len(), 1);
    hosts.iter().for_each(Host::assert_balanced);
    std::thread::sleep(Duration::from_millis(50));
    assert!(fakes[2].take().is_empty());
}

/// A foreign host that behaves like VNET/P: it receives at the configured port, and sends from another port.
struct Foreign {
    receives: UdpSocket,
    sends: UdpSocket,
    /// Bytes in front of every frame.
    header: Vec<u8>,
}

impl Foreign {
    fn at(ip: [u8; 4], header: &[u8]) -> Foreign {
        let [receives, sends] = [(); 2].map(|()| UdpSocket::bind((std::net::Ipv4Addr::from(ip), 0)).unwrap());
        receives.set_read_timeout(Some(WAIT)).unwrap();
        Foreign { receives, sends, header: header.into() }
    }

    fn send(&self, to: std::net::SocketAddr, frame: &OwnedFrame) {
        self.sends.send_to(&[&self.header[..], &frame.0].concat(), to).unwrap();
    }

    /// Receives frames up to `last`, and returns all that have arrived.
    fn got(&self, last: &OwnedFrame) -> Vec<Vec<u8>> {
        let (mut got, mut buffer) = (vec![], [0; 2048]);
        while got.last() != Some(&last.0) {
            let len = self.receives.recv(&mut buffer).expect("the last frame");
            got.push(buffer[self.header.len()..len].to_vec());
        }
        got
    }
}

/// VNET/P's way-points: a rule forwards frames of foreign hosts, whose formats have no hop count, to another link. Neither
/// flooding nor learning does so, even on a relay, and no rule sends a frame back.
#[test]
fn rules_lead_frames_of_foreign_hosts_from_link_to_link_and_nothing_else_does() {
    const VXLAN: [u8; 8] = [8, 0, 0, 0, 0, 0, 1, 0];
    for relayed in [false, true] {
        let free = UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let mut host = Host::start(CoreOptions { vxlan_listen: Some(free), ..yielding(Strategy::Block) });
        let guest = host.add_fake(NetworkId::DEFAULT);
        let (one, two) = (Foreign::at([127, 0, 1, 1], &[]), Foreign::at([127, 0, 1, 2], &VXLAN));
        let address = |peer: &Foreign| peer.receives.local_addr().unwrap();
        let kind = LinkKind::Classic(SourceMatch::Address);
        host.add_link(LinkOptions { kind, ..link_to(address(&one), Encapsulation::Vnet, Some(1500)) });
        host.add_link(link_to(address(&two), Encapsulation::Vxlan, Some(1500)));
        let rule = |index, dst, to| Rule {
            index,
            network: NetworkId::DEFAULT,
            src: Qualifier::Any,
            dst: Qualifier::Is(mac(dst)),
            from: RuleSource::Any,
            to: PortId(to),
        };
        host.rules = vec![rule(1, 1, 1), rule(2, 2, 2)];
        if relayed {
            let relayed = [NetworkId::DEFAULT].into();
            host.published = Arc::new(Published { relayed, ..Published::default() });
        }
        host.publish();
        let at = host.core.bridge_address();
        // Rules forward in both directions.
        let there = frame(mac(2), mac(1), 100, 1);
        one.send(at, &there);
        assert_eq!(two.got(&there), std::slice::from_ref(&there.0));
        let back = frame(mac(1), mac(2), 200, 2);
        two.send(free, &back);
        assert_eq!(one.got(&back), std::slice::from_ref(&back.0));
        // Flooding, a learned address, and a rule that leads back: none of these frames reaches a link.
        let flooded = frame(Mac::BROADCAST, mac(1), 100, 3);
        one.send(at, &flooded);
        assert_eq!(guest.wait_for(1, WAIT), [flooded]);
        let teaching = frame(Mac::BROADCAST, mac(3), 100, 4);
        two.send(free, &teaching);
        assert_eq!(guest.wait_for(1, WAIT), [teaching]);
        one.send(at, &frame(mac(3), mac(1), 100, 5));
        one.send(at, &frame(mac(1), mac(9), 100, 6));
        let last = frame(mac(2), mac(1), 100, 7);
        one.send(at, &last);
        assert_eq!(two.got(&last), std::slice::from_ref(&last.0));
        let last = frame(mac(1), mac(2), 100, 8);
        two.send(free, &last);
        assert_eq!(one.got(&last), std::slice::from_ref(&last.0));
        host.assert_balanced();
        let drops = |reason| host.links.iter().map(|link| link.link.stats().drops(reason)).sum::<u64>();
        let (hop_limit, hairpin) = (drops(DropReason::HopLimit), drops(DropReason::Hairpin));
        assert_eq!((hop_limit, hairpin), if relayed { (1, 1) } else { (0, 2) });
    }
}

/// Three relays in a ring, a misconfiguration: a flooded frame passes seven relays in each direction, then its hop limit drops
/// it.
#[test]
fn the_hop_limit_ends_storms_in_a_ring_of_relays() {
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
    wait_for("all frames to end", || links(ended) >= 2 * FRAMES, || links(ended).to_string());
    std::thread::sleep(Duration::from_millis(100));
    hosts.iter().for_each(Host::assert_balanced);
    assert_eq!(links(ended), 2 * FRAMES, "each direction ends once");
    assert_eq!(links(|stats| stats.out_frames.get()), CROSSINGS * FRAMES);
    assert_eq!(links(|stats| stats.in_frames.get()), CROSSINGS * FRAMES);
    let delivered: usize = hosts.iter().map(|host| host.fakes[0].take().len()).sum();
    assert_eq!(delivered as u64, CROSSINGS * FRAMES, "every crossing is delivered to a guest, too");
}
