//! Runs the programs on packets of conversations that leave translated, and restores them.

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::process::Command;

use proptest::prelude::*;

use super::segment_tests::Tap;
use super::tests::{
    A, B, Bench, FROM, LOOPBACK, TC_ACT_REDIRECT, TC_ACT_SHOT, TC_ACT_UNSPEC, by_wire, guest, kernel, known,
    own_network, peer, sender, terms,
};
use super::*;
use crate::frame::NetworkId;
use crate::wire::checksum::Sum;
use crate::wire::ethernet::HEADER_LEN;
use crate::wire::ip::IPV4_LEN_MIN;
use crate::wire::translation::{Conversation, TRANSLATED_PORT, Transport, proof};
use crate::wire::vxlan::WIRE_PORT;

const HERE: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
const THERE: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 2);
const INDEX: u16 = 0x1234;
const IP: usize = HEADER_LEN;
const L4: usize = HEADER_LEN + IPV4_LEN_MIN;
/// Bytes of the headers of a datagram of the wire.
const OUTER_LEN: usize = 50;

/// A conversation from A to B.
fn conversation(transport: Transport) -> Conversation {
    Conversation {
        network: 1,
        dst: B,
        src: A,
        source: SocketAddrV4::new(Ipv4Addr::new(10, 0, 0, 1), 4000),
        destination: SocketAddrV4::new(Ipv4Addr::new(10, 0, 0, 2), 80),
        transport,
        ttl: 64,
    }
}

fn set_ip_sum(frame: &mut [u8]) {
    frame[IP + 10..IP + 12].fill(0);
    let sum = Sum::default().with(&frame[IP..L4]).finish();
    frame[IP + 10..IP + 12].copy_from_slice(&sum.to_be_bytes());
}

fn l4_sum(frame: &[u8]) -> u16 {
    let pseudo = Sum::default().with(&frame[IP + 12..L4]).with(&[0, frame[IP + 9]]);
    pseudo.with_u16((frame.len() - L4) as u16).with(&frame[L4..]).finish()
}

/// A frame of the conversation with this payload.
fn frame(is: &Conversation, payload: &[u8]) -> Vec<u8> {
    let mut frame = [&is.dst.0[..], &is.src.0, &[8, 0, 0x45, 2]].concat();
    frame.extend([0, 0, 0x12, 0x34, 0x40, 0, is.ttl, is.transport.number(), 0, 0]);
    frame.extend(is.source.ip().octets().into_iter().chain(is.destination.ip().octets()));
    frame.extend([is.source, is.destination].map(|end| end.port().to_be_bytes()).concat());
    let at = match is.transport {
        Transport::Tcp => {
            frame.extend([0, 0, 0, 9, 0, 0, 0, 8, 0x50, 0x18, 1, 0, 0, 0, 0, 0]);
            L4 + 16
        }
        Transport::Udp => {
            frame.extend(((8 + payload.len()) as u16).to_be_bytes());
            frame.extend([0, 0]);
            L4 + 6
        }
    };
    frame.extend(payload);
    let len = (frame.len() - IP) as u16;
    frame[IP + 2..IP + 4].copy_from_slice(&len.to_be_bytes());
    set_ip_sum(&mut frame);
    let sum = l4_sum(&frame);
    frame[at..at + 2].copy_from_slice(&sum.to_be_bytes());
    frame
}

/// A bench whose flow to B leads to another host that takes translated packets.
fn sending() -> Option<Bench> {
    let mut bench = Bench::new()?;
    let underlay = Underlay { device: LOOPBACK, local: HERE, next_hop: Some(THERE) };
    let Target::Host { remote, packet_max, underlay, sources, .. } = by_wire(THERE, Some(underlay)) else {
        unreachable!()
    };
    bench.to.target = Target::Host { remote, packet_max, underlay, sources, translates: Translates::All };
    assert!(bench.install(&terms()));
    Some(bench)
}

/// A bench whose flow to B, from a link, leads to a guest.
fn receiving() -> Option<Bench> {
    let bench = Bench::new()?;
    bench.kernel.state().core.store(LOOPBACK, Ordering::Relaxed);
    let link = peer(7);
    bench.kernel.set_peers(&[(End { remote: THERE, port: WIRE_PORT }, link)].into(), false).unwrap();
    let flow = Known { network: NetworkId::DEFAULT, from: PortId(7), dst: B, src: A, datagram: None };
    assert!(bench.kernel.flows().install(&flow, &bench.from, &guest(), &terms()));
    Some(bench)
}

/// What arrives of a translated frame that was sent to THERE, at a host with the address HERE, from THERE.
fn arrived(sent: &[u8]) -> Vec<u8> {
    let mut frame = sent.to_vec();
    frame[..12].fill(0);
    // Exchanged addresses have the same sums.
    frame[IP + 12..IP + 16].copy_from_slice(&THERE.octets());
    frame[IP + 16..L4].copy_from_slice(&HERE.octets());
    frame
}

fn index(index: u16, transport: Transport) -> Index {
    Index { remote: THERE, index, transport }
}

#[test]
fn a_conversation_is_translated_while_its_lease_holds() {
    for transport in Transport::ALL {
        let Some(bench) = sending() else { return };
        let is = conversation(transport);
        let whole = frame(&is, &[7; 100]);
        let maps = bench.kernel.translations();
        for _ in 0..31 {
            assert_eq!(bench.change("from_guest", &whole).1[OUTER_LEN..], whole, "in a datagram of the wire");
            assert_eq!(maps.next_wanted().unwrap(), None);
        }
        bench.change("from_guest", &whole);
        let wanted = Wanted { is, remote: THERE, from: FROM };
        assert_eq!([maps.next_wanted().unwrap(), maps.next_wanted().unwrap()], [Some(wanted), None]);
        assert_eq!(maps.frames(&is, THERE), None, "of no host yet");

        assert!(maps.lease(&is, INDEX, THERE, u64::MAX));
        let (verdict, sent) = bench.change("from_guest", &whole);
        assert_eq!((verdict, sent.len()), (TC_ACT_REDIRECT, whole.len()));
        assert_eq!(sent[IP + 12..L4], [HERE.octets(), THERE.octets()].concat());
        assert_eq!(sent[L4..L4 + 4], [INDEX, TRANSLATED_PORT].map(u16::to_be_bytes).concat());
        assert_eq!(sent[IP + 1], 2, "ECN");
        assert_eq!(Sum::default().with(&sent[IP..L4]).finish(), 0);
        assert_eq!(l4_sum(&sent), 0);
        assert_eq!(sent[L4 + if transport == Transport::Tcp { 20 } else { 8 }..], [7; 100]);
        assert_eq!(maps.frames(&is, THERE), Some(33));
        bench.kernel.flows().count();
        assert_eq!(bench.to.stats.out_bytes.get(), 33 * whole.len() as u64, "frames count alike");

        assert!(maps.lease(&is, INDEX, THERE, 1));
        assert_eq!(bench.change("from_guest", &whole).1[OUTER_LEN..], whole, "the lease has ended");
        assert!(maps.lease(&is, INDEX, HERE, u64::MAX));
        assert_eq!(bench.change("from_guest", &whole).1[OUTER_LEN..], whole, "the station has moved");
        assert!(maps.lease(&is, INDEX, THERE, u64::MAX));
        maps.end(&is, HERE);
        assert_eq!(bench.change("from_guest", &whole).1.len(), whole.len(), "another host's has ended");
        maps.end(&is, THERE);
        assert_eq!(bench.change("from_guest", &whole).1[OUTER_LEN..], whole, "withdrawn");
        assert_eq!(maps.frames(&is, THERE), Some(37), "and counted");
    }
}

#[test]
fn what_translation_would_lose_takes_the_tunnel() {
    let Some(bench) = sending() else { return };
    let is = conversation(Transport::Tcp);
    let whole = frame(&is, &[7; 100]);
    assert!(bench.kernel.translations().lease(&is, INDEX, THERE, u64::MAX));
    let takes_tunnel = |frame: &[u8], what: &str| {
        assert_eq!(bench.change("from_guest", frame).1[OUTER_LEN..], *frame, "{what}");
    };
    let changed = |at: usize, byte: u8| {
        let mut frame = whole.clone();
        frame[at] = byte;
        set_ip_sum(&mut frame);
        frame
    };
    for (at, byte, what) in [
        (IP + 8, 63, "another time to live"),
        (IP + 1, 0x48, "a DSCP"),
        (IP, 0x46, "options"),
        (IP + 6, 0x20, "a fragment"),
        (IP + 6, 0x60, "a fragment that must not be fragmented"),
        (IP + 7, 1, "a later fragment"),
        (IP + 9, 1, "another protocol"),
        (L4 + 1, 0, "another port"),
        (IP + 19, 9, "another address"),
    ] {
        takes_tunnel(&changed(at, byte), what);
    }
    let mut wrong = whole.clone();
    wrong[IP + 10] ^= 1;
    takes_tunnel(&wrong, "a wrong checksum");
    // A firewall on the way takes every translated segment for one of an established connection.
    for flags in [0x02, 0x12, 0x11, 0x14, 0x04, 0x00] {
        takes_tunnel(&changed(L4 + 13, flags), "no acknowledgement");
    }
    let mut bare = frame(&conversation(Transport::Udp), &[7; 100]);
    assert!(bench.kernel.translations().lease(&conversation(Transport::Udp), INDEX, THERE, u64::MAX));
    assert_eq!(bench.change("from_guest", &bare).1.len(), bare.len());
    bare[L4 + 6..L4 + 8].fill(0);
    takes_tunnel(&bare, "no checksum");
    // Without a tunnel's headers the whole path MTU is the packet's.
    let longest = frame(&is, &[7; 1500 - 40]);
    assert_eq!(bench.change("from_guest", &longest).1.len(), longest.len());
    for flags in [0, 0x40] {
        let kept = bench.change("from_guest", &changed(IP + 6, flags)).1;
        assert_eq!((kept.len(), kept[IP + 6]), (whole.len(), flags), "whether routers may fragment it");
    }
    let ecn = changed(IP + 1, 3);
    assert_eq!(bench.change("from_guest", &ecn).1[IP + 1], 3, "congestion is told");
}

#[test]
fn packets_with_known_indices_are_restored() {
    let Some(bench) = receiving() else { return };
    let is = conversation(Transport::Udp);
    let whole = frame(&is, &[7; 100]);
    let Some(sender) = sending() else { return };
    assert!(sender.kernel.translations().lease(&is, INDEX, THERE, u64::MAX));
    let packet = arrived(&sender.change("from_guest", &whole).1);
    let maps = bench.kernel.translations();
    assert_eq!(
        bench.change("from_underlay", &packet),
        (TC_ACT_UNSPEC, packet.clone()),
        "nothing is expected"
    );
    let proof = || maps.expect_proof(THERE, Transport::Udp);
    assert_eq!([proof(), proof()], [Some(Seen::default()); 2]);
    assert_eq!(bench.change("from_underlay", &packet).0, TC_ACT_SHOT);
    assert_eq!(maps.seen(index(0, Transport::Udp)), Some(Seen { seen_ns: 0, lost: 1 }));
    assert!(maps.insert(index(INDEX, Transport::Udp), &is));
    assert_eq!(bench.change("from_underlay", &packet), (TC_ACT_REDIRECT, whole.clone()));
    bench.kernel.flows().count();
    assert_eq!(bench.from.stats.in_bytes.get(), whole.len() as u64);

    // Congestion on the way reaches the guest, a router's DSCP does not.
    let mut marked = packet.clone();
    marked[IP + 1] = 0x48 | 3;
    set_ip_sum(&mut marked);
    assert_eq!(bench.change("from_underlay", &marked).1[IP + 1], 3);
    // No packet of another host, or damaged.
    for (at, what) in [(IP + 15, "source"), (IP + 10, "checksum"), (L4 + 3, "port")] {
        let mut other = packet.clone();
        other[at] ^= 0x40;
        if what != "checksum" {
            set_ip_sum(&mut other);
        }
        assert_eq!(bench.change("from_underlay", &other), (TC_ACT_UNSPEC, other.clone()), "{what}");
    }
    // Of the host, but at another address or device: nobody else may take it.
    let mut elsewhere = packet.clone();
    elsewhere[IP + 19] ^= 0x40;
    set_ip_sum(&mut elsewhere);
    assert_eq!(bench.change("from_underlay", &elsewhere).0, TC_ACT_SHOT);
    bench.kernel.set_peers(&HashMap::new(), false).unwrap();
    assert_eq!(bench.change("from_underlay", &packet).0, TC_ACT_SHOT);
    maps.remove(index(INDEX, Transport::Udp));
    assert_eq!(bench.change("from_underlay", &packet).0, TC_ACT_SHOT);
    assert_eq!(maps.seen(index(0, Transport::Udp)).unwrap().lost, 4);
    assert_eq!(maps.indices(), [index(0, Transport::Udp)]);
}

/// The packet is restored and comes up as a frame of the wire does, behind a head.
#[test]
fn a_packet_without_a_verdict_comes_up() {
    let Some(bench) = receiving() else { return };
    let is = conversation(Transport::Tcp);
    let Some(sender) = sending() else { return };
    assert!(sender.kernel.translations().lease(&is, INDEX, THERE, u64::MAX));
    let whole = frame(&is, &[7; 100]);
    let packet = arrived(&sender.change("from_guest", &whole).1);
    assert!(bench.kernel.translations().insert(index(INDEX, Transport::Tcp), &is));
    bench.kernel.set_generation(8);
    let (verdict, up) = bench.change("from_underlay", &packet);
    let (head, frame) = up.split_first_chunk::<{ WireHead::LEN }>().unwrap();
    let head = WireHead::parse(head);
    assert_eq!((verdict, head.remote(), head.network(), head.from()), (TC_ACT_REDIRECT, THERE, 1, PortId(7)));
    assert_eq!(frame, whole);
    bench.kernel.flows().count();
    assert_eq!(bench.from.stats.in_frames.get(), 0, "vnetd counts it");
}

#[test]
fn proofs_are_noted() {
    let Some(bench) = receiving() else { return };
    let maps = bench.kernel.translations();
    for transport in Transport::ALL {
        let packet = arrived(&proof(transport, HERE, THERE, 1500));
        assert_eq!(bench.change("from_underlay", &packet).0, TC_ACT_UNSPEC, "it is not expected");
        assert_eq!(maps.expect_proof(THERE, transport), Some(Seen::default()));
        assert_eq!(bench.change("from_underlay", &packet).0, TC_ACT_SHOT);
        let seen = maps.seen(index(0, transport)).unwrap();
        assert!(seen.seen_ns.abs_diff(now_ns()) < 60_000_000_000 && seen.lost == 0, "{seen:?}");
    }
}

#[test]
fn every_packet_is_restored_as_it_was_sent() {
    let (Some(sender), Some(receiver)) = (sending(), receiving()) else { return };
    let packets = (any::<[u8; 4]>(), any::<[u8; 4]>(), any::<(u16, u16, u16)>(), any::<(u8, bool)>());
    let payload = prop::collection::vec(any::<u8>(), 0..300);
    proptest!(ProptestConfig::with_cases(300), |(packet in packets, payload in payload)| {
        let (source, destination, (sport, dport, number), (ttl, is_tcp)) = packet;
        let transport = if is_tcp { Transport::Tcp } else { Transport::Udp };
        let is = Conversation {
            source: SocketAddrV4::new(source.into(), sport),
            destination: SocketAddrV4::new(destination.into(), dport),
            ttl,
            ..conversation(transport)
        };
        let number: u16 = number.max(1);
        let whole = frame(&is, &payload);
        // One of 65 536 ports and indices leaves the sum as it is, as if the kernel were to complete it.
        let sum = |ports: [u16; 2]| Sum::default().with_u16(ports[0]).with_u16(ports[1]).partial() % 0xffff;
        prop_assume!(sum([sport, dport]) != sum([number, TRANSLATED_PORT]));
        prop_assert!(sender.kernel.translations().lease(&is, number, THERE, u64::MAX));
        prop_assert!(receiver.kernel.translations().insert(index(number, transport), &is));
        let (verdict, sent) = sender.change("from_guest", &whole);
        prop_assert_eq!((verdict, sent.len()), (TC_ACT_REDIRECT, whole.len()));
        prop_assert_eq!(receiver.change("from_underlay", &arrived(&sent)), (TC_ACT_REDIRECT, whole));
    });
}

/// A guest can have the kernel write a checksum anywhere into its packet, also over what is the hosts' when it leaves.
#[test]
fn no_checksum_is_written_over_the_hosts_headers() {
    let Some(kernel) = kernel() else { return };
    if !own_network() {
        return;
    }
    let [host, core, under] = ["guest", "core", "under"].map(Tap::open);
    for words in [
        "address add 192.0.2.1/24 dev under".to_string(),
        format!("neighbour add {THERE} lladdr 02:00:00:00:00:99 dev under nud permanent"),
    ] {
        assert!(Command::new("ip").args(words.split(' ')).status().unwrap().success(), "ip {words}");
    }
    kernel.set_generation(7);
    kernel.tick(1, u64::MAX);
    let device = GuestDevice { host: host.name.clone(), tap: core.name.clone(), mac: A, netkit: false };
    let origin = Origin { port: FROM, network: NetworkId::DEFAULT };
    let _attached = kernel.attach(&device, origin).unwrap();
    let underlay = Underlay { device: under.name.1, local: HERE, next_hop: Some(THERE) };
    let Target::Host { remote, packet_max, underlay, sources, .. } = by_wire(THERE, Some(underlay)) else {
        unreachable!()
    };
    let target = Target::Host { remote, packet_max, underlay, sources, translates: Translates::All };
    let to = Destination { device: under.name.1, mtu: 1500, target, ..guest() };
    assert!(kernel.flows().install(&known(B), &sender(), &to, &terms()));
    let is = conversation(Transport::Udp);
    assert!(kernel.translations().lease(&is, INDEX, THERE, u64::MAX));

    // The checksum's field has what the kernel is to complete.
    let mut partial = frame(&is, &[7; 100]);
    let pseudo = Sum::default().with(&partial[IP + 12..L4]).with(&[0, partial[IP + 9]]);
    let pseudo = pseudo.with_u16((partial.len() - L4) as u16).partial().to_be_bytes();
    partial[L4 + 6..L4 + 8].copy_from_slice(&pseudo);
    // NEEDS_CSUM, where the sum begins and where it is written.
    let send = |frame: &[u8], start: u16, offset: u16| {
        let header = [&[1, 0, 0, 0, 0, 0][..], &start.to_ne_bytes(), &offset.to_ne_bytes()].concat();
        host.write(&[&header[..], frame].concat())
    };
    let is_translated = |sent: &[u8]| sent[L4 + 2..L4 + 4] == TRANSLATED_PORT.to_be_bytes();
    assert!(send(&partial, L4 as u16, 6));
    assert!(is_translated(&under.next().1), "as kernels send");
    // Into the index, the port, an address, the IP checksum: nothing of it leaves. Then one of a tunnel in the guest takes the tunnel.
    let refused = [(L4, 0), (L4, 2), (IP, 12), (IP, 16), (IP, 10), (L4, 4)];
    // Kernels since 6.11 refuse some of them.
    let sent = refused.into_iter().filter(|(start, offset)| send(&partial, *start as u16, *offset)).count();
    assert!(sent >= 3);
    let mut nested = frame(&is, &[7; 100]);
    nested[L4 + 50] = 8;
    assert!(send(&nested, L4 as u16 + 40, 6));
    let sent = under.next().1;
    assert_eq!(sent[L4 + 2..L4 + 4], WIRE_PORT.to_be_bytes(), "in a datagram of the wire");
    assert!(send(&partial, L4 as u16, 6));
    assert!(is_translated(&under.next().1), "the next frame");
}
