//! Test runs of the programs with datagrams to and from a VTEP.

use std::net::{Ipv4Addr, SocketAddrV4};

use super::tests::{
    B, Bench, FROM, LOOPBACK, TC_ACT_REDIRECT, TC_ACT_UNSPEC, echo, known, ones_complement, peer, terms,
};
use super::*;

const REMOTE: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 2);
/// UDP port of the VTEP.
const PORT: u16 = 4789;
/// UDP port at which this host receives VXLAN.
const LISTEN: u16 = 4790;
const FIRST: u16 = 50_000;
/// Longest IP packet of a guest.
const ROOM: usize = 1450;

/// A bench whose flow to B leads to a VTEP.
fn bench() -> Option<Bench> {
    let mut bench = Bench::new()?;
    bench.to.target = Target::Host {
        remote: SocketAddrV4::new(REMOTE, PORT),
        packet_max: ROOM as u32,
        underlay: Some(Underlay { device: LOOPBACK, local: REMOTE, next_hop: Some(REMOTE) }),
        sources: Sources::Owned(FIRST, 16),
        translates: Translates::Nothing,
    };
    (bench.to.device, bench.to.mtu) = (0, ROOM);
    assert!(bench.install(&terms()));
    Some(bench)
}

/// Frames and bytes that the flow to B has carried.
fn carried(bench: &Bench) -> (u64, u64) {
    bench.kernel.flows().count();
    (bench.to.stats.out_frames.get(), bench.to.stats.out_bytes.get())
}

#[test]
fn a_datagram_to_a_vtep_is_as_vnetd_would_send_it() {
    let Some(bench) = bench() else { return };
    let frame = echo(ROOM + 14);
    let (verdict, datagram) = bench.change("from_guest", &frame);
    assert_eq!(verdict, TC_ACT_REDIRECT);
    assert_eq!(datagram[50..], frame);
    assert_eq!(datagram[14..16], [0x45, 0], "not ECN-capable, although the guest is");
    assert_eq!(datagram[16..18], 1500_u16.to_be_bytes());
    assert_eq!(datagram[20..22], [0x40, 0], "never a fragment");
    assert_eq!(ones_complement(&datagram[14..34]), 0xffff, "checksum");
    let sport = u16::from_be_bytes([datagram[34], datagram[35]]);
    assert!((FIRST..FIRST + 16).contains(&sport), "{sport}: a port of vnetd's sockets");
    assert_eq!(datagram[36..38], PORT.to_be_bytes());
    assert_eq!(datagram[42..50], [8, 0, 0, 0, 0, 0, 1, 0]);
    assert_eq!(carried(&bench), (1, 1464));
}

#[test]
fn flows_have_different_source_ports() {
    let Some(bench) = bench() else { return };
    let sport = |n: u8| {
        let mut frame = echo(60);
        // UDP from another port, with IPv4 addresses.
        (frame[17], frame[23]) = (46, 17);
        frame[26..34].copy_from_slice(&[10, 0, 0, 1, 10, 0, 0, 2]);
        (frame[35], frame[37], frame[39]) = (n, 7, 26);
        let (_, datagram) = bench.change("from_guest", &frame);
        assert_eq!(datagram.len(), 110);
        [datagram[34], datagram[35]]
    };
    let ports: collections::HashSet<_> = (0..32).map(sport).collect();
    assert!(ports.len() >= 8, "{ports:?}");
    assert_eq!(sport(1), sport(1));
}

#[test]
fn what_programs_cannot_send_comes_up_uncounted() {
    let Some(bench) = bench() else { return };
    let mut not_ip = echo(60);
    not_ip[12..14].copy_from_slice(&[0x88, 0xb5]);
    let too_long = echo(ROOM + 15);
    // A segment of TCP that stays too long when 50 bytes are moved to the next.
    let mut super_frame = echo(2000);
    (super_frame[23], super_frame[46]) = (6, 0x50);
    for (frame, gso_size) in [(not_ip, 0), (too_long, 0), (super_frame, 1461)] {
        let (verdict, after) = bench.change_segmented("from_guest", &frame, gso_size);
        assert_eq!((verdict, after), (TC_ACT_REDIRECT, frame));
    }
    assert_eq!(carried(&bench), (0, 0));
}

/// The bench after the VTEP's link, port 7, has a flow to the guest, and a datagram of it.
fn received() -> Option<(Bench, Vec<u8>)> {
    let mut bench = bench()?;
    let (_, mut datagram) = bench.change("from_guest", &echo(200));
    let local = peer(7).underlay.unwrap().local;
    datagram[..6].fill(0);
    datagram[30..34].copy_from_slice(&local.octets());
    datagram[36..38].copy_from_slice(&LISTEN.to_be_bytes());
    datagram[24..26].fill(0);
    let sum = !ones_complement(&datagram[14..34]);
    datagram[24..26].copy_from_slice(&sum.to_be_bytes());
    bench.to.target = Target::Guest { mac: Some(B), namespace: Some(0) };
    bench.to.device = LOOPBACK;
    let flow = Known { from: PortId(7), ..known(B) };
    assert_ne!(flow.from, FROM);
    assert!(bench.kernel.flows().install(&flow, &bench.from, &bench.to, &terms()));
    listen(&bench, LISTEN);
    Some((bench, datagram))
}

fn listen(bench: &Bench, port: u16) {
    bench.kernel.set_peers(&[(End { remote: REMOTE, port }, peer(7))].into(), false).unwrap();
}

#[test]
fn a_datagram_of_a_vtep_arrives_at_the_links_port_only() {
    let Some((bench, datagram)) = received() else { return };
    assert_eq!(bench.change("from_underlay", &datagram), (TC_ACT_REDIRECT, echo(200)));
    let mut with_checksum = datagram.clone();
    with_checksum[40] = 1;
    assert_eq!(bench.change("from_underlay", &with_checksum), (TC_ACT_REDIRECT, echo(200)));
    for port in [PORT, 9789] {
        listen(&bench, port);
        assert_eq!(bench.change("from_underlay", &datagram), (TC_ACT_UNSPEC, datagram.clone()));
    }
}

#[test]
fn coalesced_datagrams_are_left_to_vnetd_with_all_others_for_a_while() {
    let Some((bench, mut datagram)) = received() else { return };
    let frame_len = 200_u16;
    // One super-frame has one IP header.
    let set_len = |datagram: &mut Vec<u8>, len: u16| datagram[66..68].copy_from_slice(&len.to_be_bytes());
    set_len(&mut datagram, frame_len - 14);
    assert_eq!(bench.change_segmented("from_underlay", &datagram, 100).0, TC_ACT_UNSPEC, "not TCP");
    assert_eq!(bench.change("from_underlay", &datagram).0, TC_ACT_REDIRECT);
    // Several datagrams: the first one's header shows its own length.
    set_len(&mut datagram, 86);
    assert_eq!(bench.change_segmented("from_underlay", &datagram, 136).0, TC_ACT_UNSPEC);
    set_len(&mut datagram, frame_len - 14);
    assert_eq!(bench.change("from_underlay", &datagram).0, TC_ACT_UNSPEC, "it would overtake");
    // It begins with the entry of the peer that is removed here.
    listen(&bench, PORT);
    listen(&bench, LISTEN);
    assert_eq!(bench.change("from_underlay", &datagram).0, TC_ACT_REDIRECT);
}

/// Also those that nothing has used: a router that has offered a verdict does not offer it again before it ends.
#[test]
fn ended_flows_are_listed_while_their_verdicts_hold() {
    let Some(bench) = bench() else { return };
    let end = || bench.kernel.flows().end(&[&bench.to.stats]);
    assert!(bench.install(&terms()));
    assert_eq!((end(), end()), (vec![known(B)], vec![]));
    assert!(bench.install(&Terms { until_ns: 1, ..terms() }));
    assert_eq!(end(), []);
}
