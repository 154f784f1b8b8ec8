//! A VXLAN link and plain sockets as VTEPs: packets on the wire, and reception of VTEPs' packets.

use std::net::{SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use vnet::frame::NetworkId;
use vnet::link::{Bridge, Encapsulation, HOPS_UNKNOWN, LinkKind, LinkOptions, VxlanOptions};
use vnet::stats::{DiscardReason, DropReason};
use vnet::wire::checksum::Sum;
use vnet::wire::offload::{F_NEEDS_CSUM, GSO_TCPV4, Offload};
use vnet::wire::vxlan;

use super::host::*;

const MTU: u16 = 1500;
/// Maximum length in bytes of an inner frame on a path of 1500 bytes: without IPv4, UDP and VXLAN headers.
const ROOM: usize = 1500 - 20 - 8 - 8;

/// A host whose VXLAN link leads to `vteps`, the first of which is the remote.
fn host(vteps: &[SocketAddr]) -> (Host, SocketAddr) {
    let (bridge, unknown) = bridge("127.0.0.1:0");
    let mut bridges = [bridge];
    Bridge::add_vxlan(&mut bridges, "127.0.0.1:0".parse().unwrap(), None).unwrap();
    let [bridge] = bridges;
    let listen = bridge.vxlan_rx.as_ref().unwrap().local_addr();
    let flood = vteps[1..].iter().map(SocketAddr::ip).collect();
    let kind = LinkKind::Vxlan(VxlanOptions { flood, ..VxlanOptions::default() });
    let options = LinkOptions { kind, ..options(vteps[0], Encapsulation::Vxlan, Some(MTU)) };
    let mut host = Host::new((bridge, unknown), options);
    // Makes the test receive from the VXLAN socket.
    std::mem::swap(&mut host.bridge.rx[0], host.bridge.vxlan_rx.as_mut().unwrap());
    (host, listen)
}

fn vtep(address: &str) -> UdpSocket {
    let socket = UdpSocket::bind(address).unwrap();
    socket.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    socket
}

/// A TCP segment over IPv4 with a partial checksum.
fn tcp(payload: usize, port: u16, gso_size: u16) -> Got {
    let mut bytes = vec![2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 8, 0, 0x45, 0];
    bytes.extend(((40 + payload) as u16).to_be_bytes());
    bytes.extend([0, 1, 0x40, 0, 64, 6, 0, 0, 10, 77, 1, 1, 10, 77, 2, 1]);
    let header = Sum::default().with(&bytes[14..]).finish().to_be_bytes();
    bytes[24..26].copy_from_slice(&header);
    let sum = Sum::default().with(&bytes[26..34]).with_u16(6).with_u16((20 + payload) as u16).partial();
    bytes.extend(port.to_be_bytes());
    bytes.extend([0, 80, 0, 0, 0, 0, 0, 0, 0, 9, 0x50, 0x18, 1, 0]);
    bytes.extend(sum.to_be_bytes());
    bytes.extend([0, 0]);
    bytes.extend((0..payload).map(|i| (i * 7 + i / 256) as u8));
    let gso_type = if gso_size == 0 { 0 } else { GSO_TCPV4 };
    let offload =
        Offload { flags: F_NEEDS_CSUM, gso_type, hdr_len: 0, gso_size, csum_start: 34, csum_offset: 16 };
    Got { bytes, offload, network: NetworkId::DEFAULT, hops: 0 }
}

/// Verifies both checksums of a TCP frame. Returns its sequence number and payload.
fn finished(frame: &[u8]) -> (usize, Vec<u8>) {
    assert_eq!(usize::from(u16::from_be_bytes([frame[16], frame[17]])), frame.len() - 14);
    assert_eq!(Sum::default().with(&frame[14..34]).finish(), 0, "IPv4 header checksum");
    let transport = (frame.len() - 34) as u16;
    let sum = Sum::default().with(&frame[26..34]).with_u16(6).with_u16(transport).with(&frame[34..]);
    assert_eq!(sum.finish(), 0, "TCP checksum");
    (u32::from_be_bytes(frame[38..42].try_into().unwrap()) as usize, frame[54..].to_vec())
}

#[test]
fn frames_leave_with_checksums_and_segmented_for_the_path() {
    let peer = vtep("127.0.0.1:0");
    let (mut host, _) = host(&[peer.local_addr().unwrap()]);
    let plain = Got { network: NetworkId::new(0xab_cdef).unwrap(), ..frame(ROOM, 1) };
    // Super-frames with segments larger and smaller than the path carries, a single segment that is too large, and a small one.
    let streams = [tcp(60_000, 1, 8_900), tcp(20_000, 1, 500), tcp(1460, 1, 0), tcp(10, 1, 0)];
    let too_large = frame(ROOM + 1, 2);
    host.send(&[&[plain.clone(), too_large][..], &streams].concat());
    let mut datagrams = datagrams(&peer).into_iter();
    assert_eq!(vxlan::parse(&datagrams.next().unwrap()), Ok((0xab_cdef, &plain.bytes[..])));
    for (stream, size) in streams.iter().zip([ROOM - 54, 500, ROOM - 54, ROOM - 54]) {
        let payload = &stream.bytes[54..];
        let mut got = 0;
        while got < payload.len() {
            let datagram = datagrams.next().expect("the rest of the stream");
            let (vni, segment) = vxlan::parse(&datagram).unwrap();
            let (at, bytes) = finished(segment);
            assert_eq!((vni, at, bytes.len()), (1, got, size.min(payload.len() - got)));
            assert_eq!(bytes, payload[at..at + bytes.len()]);
            got += bytes.len();
        }
    }
    assert_eq!(datagrams.next(), None);
    let stats = host.link.stats();
    assert_eq!(stats.drops(DropReason::MtuExceeded), 1);
    assert_eq!(stats.out_frames.get() + stats.drops_total(), 6 + stats.copies.get());
    assert_eq!(stats.out_datagrams.get(), stats.out_frames.get());
}

#[test]
fn source_ports_follow_flows_and_flows_stay_in_order() {
    let peer = vtep("127.0.0.1:0");
    let (mut host, _) = host(&[peer.local_addr().unwrap()]);
    let frames: Vec<Got> = (0..200u16).map(|n| tcp(n.into(), 1000 + n % 20, 0)).collect();
    host.send(&frames);
    let mut ports = std::collections::HashMap::new();
    let mut latest = [0; 20];
    let mut buffer = vec![0; 65_536];
    for _ in 0..frames.len() {
        let (len, source) = peer.recv_from(&mut buffer).unwrap();
        let (_, inner) = vxlan::parse(&buffer[..len]).unwrap();
        let flow = u16::from_be_bytes([inner[34], inner[35]]);
        assert_eq!(*ports.entry(flow).or_insert(source.port()), source.port());
        let place = &mut latest[usize::from(flow - 1000)];
        assert!(*place <= inner.len(), "frames of a flow grow");
        *place = inner.len();
    }
    let different: std::collections::HashSet<_> = ports.values().collect();
    assert!(different.len() >= 6, "20 flows left by {} ports", different.len());
}

#[test]
fn frames_are_accepted_from_configured_vteps_at_any_port() {
    let peer = vtep("127.0.0.1:0");
    let (mut host, listen) = host(&[peer.local_addr().unwrap(), "127.0.0.5:1".parse().unwrap()]);
    let sent = frame(100, 3);
    let packet = |vni: u32, bytes: &[u8]| [&vxlan::header(vni)[..], bytes].concat();
    for address in ["127.0.0.1:0", "127.0.0.5:0"] {
        let mut other = packet(1, &sent.bytes);
        // Reserved bits are ignored.
        (other[0], other[3], other[7]) = (0xff, 1, 0x80);
        vtep(address).send_to(&other, listen).unwrap();
        assert_eq!(host.receive(1), [Got { hops: HOPS_UNKNOWN, ..sent.clone() }]);
    }
    let silent = [&[0u8; 8], &sent.bytes[..]].concat();
    for (bytes, from) in [
        (packet(1, &sent.bytes), "127.0.0.9:0"),
        (silent, "127.0.0.1:0"),
        (packet(1, &sent.bytes[..13]), "127.0.0.1:0"),
    ] {
        vtep(from).send_to(&bytes, listen).unwrap();
        let start = Instant::now();
        loop {
            let (got, datagrams) = host.receive_once();
            assert_eq!(got, []);
            if datagrams == 1 {
                break;
            }
            assert!(start.elapsed() < Duration::from_secs(5));
        }
    }
    assert_eq!(host.unknown.discards(DiscardReason::UnknownSource), 1);
    assert_eq!(host.discards(), [(DiscardReason::Truncated, 1), (DiscardReason::BadHeader, 1)]);
}

#[test]
fn partial_checksums_of_inner_frames_are_recognised() {
    let peer = vtep("127.0.0.1:0");
    let (mut host, listen) = host(&[peer.local_addr().unwrap()]);
    // Nothing was sent yet: the timer triggers the query of the path MTU.
    host.ask_routes(20);
    for (sent, gso_size) in [(tcp(100, 1, 0), 0), (tcp(30_000, 1, 1400), (ROOM - 54) as u16)] {
        peer.send_to(&[&vxlan::header(1)[..], &sent.bytes].concat(), listen).unwrap();
        let got = host.receive(1).remove(0);
        assert!(got.bytes == sent.bytes);
        assert_eq!(got.offload.gso_size, gso_size);
        assert_eq!((got.offload.csum_start, got.offload.csum_offset), (34, 16));
    }
}

#[test]
fn unknown_addresses_flood_to_all_vteps_and_learned_ones_to_theirs() {
    let first = vtep("127.0.0.1:0");
    let port = first.local_addr().unwrap().port();
    let second = vtep(&format!("127.0.0.5:{port}"));
    let vteps = [first.local_addr().unwrap(), second.local_addr().unwrap()];
    let (mut host, listen) = host(&vteps);
    let to_both = tcp(10, 1, 0);
    host.send(std::slice::from_ref(&to_both));
    assert_eq!((datagrams(&first).len(), datagrams(&second).len()), (1, 1));
    assert_eq!((host.link.stats().out_frames.get(), host.link.stats().copies.get()), (2, 1));
    // The destination is learned from the second VTEP.
    let mut answer = frame(60, 4);
    answer.bytes[..12].copy_from_slice(&[2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2]);
    second.send_to(&[&vxlan::header(1)[..], &answer.bytes].concat(), listen).unwrap();
    host.receive(1);
    host.send(&[to_both]);
    assert_eq!((datagrams(&first).len(), datagrams(&second).len()), (0, 1));
}
