//! Hosts with several ports and several dispatchers.

use std::collections::HashMap;
use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;
use std::time::{Duration, Instant};

use vnet::frame::PortId;
use vnet::link::{Bridge, BridgeError, Encapsulation, Link, LinkOptions, Peers, ReassemblyBudget};
use vnet::stats::{DiscardReason, PortStats};

use super::host::*;

const LOOPBACK: &str = "127.0.0.1:0";

/// All dispatchers of one host.
fn host(listen: &str, ports: u16, dispatchers: usize) -> Vec<(Bridge, Arc<PortStats>)> {
    let stats: Arc<PortStats> = Arc::default();
    let budget = Arc::new(ReassemblyBudget::new(ReassemblyBudget::HOST));
    let group = Bridge::bind_group(listen.parse().unwrap(), ports, dispatchers, &stats, &budget).unwrap();
    group.into_iter().map(|bridge| (bridge, stats.clone())).collect()
}

/// Gives all dispatchers of a host one link to `remote`.
fn linked(host: Vec<(Bridge, Arc<PortStats>)>, options: LinkOptions) -> Vec<Host> {
    let link = Link::new(options, PortId(7), Arc::default());
    host.into_iter()
        .map(|bridge| {
            let peers = Arc::new(Peers::build(std::slice::from_ref(&link)));
            Host { link: link.clone(), peers, ..Host::new(bridge, link.options().clone()) }
        })
        .collect()
}

/// Two linked hosts with the given numbers of ports and dispatchers.
fn pair(listen: &str, encapsulation: Encapsulation, sizes: [(u16, usize); 2]) -> [Vec<Host>; 2] {
    let [a, b] = sizes.map(|(ports, dispatchers)| host(listen, ports, dispatchers));
    let (a_addr, b_addr) = (a[0].0.local_addr(), b[0].0.local_addr());
    let to = |remote: SocketAddr, (ports, _): (u16, usize)| {
        let ports = if encapsulation == Encapsulation::Native { ports } else { 1 };
        LinkOptions { ports, ..options(remote, encapsulation, Some(1500)) }
    };
    [linked(a, to(b_addr, sizes[1])), linked(b, to(a_addr, sizes[0]))]
}

/// A UDP packet of `flow` that carries a number, as an Ethernet frame of `len` bytes.
fn packet(flow: u16, number: u32, len: usize) -> Got {
    let mut got = frame(len, u64::from(number) << 16 | u64::from(flow));
    got.bytes[..12].copy_from_slice(&[2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1]);
    got.bytes[12..26].copy_from_slice(&[8, 0, 0x45, 0, 0, 0, 0, 0, 0x40, 0, 64, 17, 0, 0]);
    got.bytes[26..34].copy_from_slice(&[10, 0, 0, 1, 10, 0, 0, 2]);
    got.bytes[34..36].copy_from_slice(&flow.to_be_bytes());
    got.bytes[36..38].copy_from_slice(&7u16.to_be_bytes());
    got.bytes[38..42].copy_from_slice(&number.to_be_bytes());
    got
}

fn flow_of(got: &Got) -> u16 {
    u16::from_be_bytes([got.bytes[34], got.bytes[35]])
}

/// Receives `count` frames in total. Returns those of each dispatcher.
fn receive_all(hosts: &mut [Host], count: usize) -> Vec<Vec<Got>> {
    let mut got: Vec<Vec<Got>> = hosts.iter().map(|_| vec![]).collect();
    let start = Instant::now();
    while got.iter().map(Vec::len).sum::<usize>() < count {
        for (host, got) in hosts.iter_mut().zip(&mut got) {
            got.extend(host.receive_once().0);
        }
        assert!(
            start.elapsed() < Duration::from_secs(5),
            "{} of {count}",
            got.iter().map(Vec::len).sum::<usize>()
        );
    }
    got
}

/// Single frames, bundles and fragments of many flows in turn: each flow arrives at one dispatcher and in order, whatever the
/// numbers of ports and dispatchers, and every dispatcher of the receiver gets frames.
#[test]
fn flows_spread_and_stay_in_order() {
    const FLOWS: u16 = 64;
    for listen in [LOOPBACK, "[::1]:0", "[::]:0"] {
        for sizes in [[(1, 1), (2, 2)], [(2, 2), (3, 3)], [(4, 2), (2, 1)], [(2, 3), (1, 1)]] {
            let [mut a, mut b] = if listen == "[::]:0" {
                let [a, b] = sizes.map(|(ports, dispatchers)| host(listen, ports, dispatchers));
                let at = |host: &[(Bridge, _)]| {
                    SocketAddr::new([127, 0, 0, 1].into(), host[0].0.local_addr().port())
                };
                let (a_addr, b_addr) = (at(&a), at(&b));
                let to = |remote, ports| LinkOptions {
                    ports,
                    ..options(remote, Encapsulation::Native, Some(1500))
                };
                [linked(a, to(b_addr, sizes[1].0)), linked(b, to(a_addr, sizes[0].0))]
            } else {
                pair(listen, Encapsulation::Native, sizes)
            };
            for from_a in [true, false] {
                let (from, to, (ports, _)) =
                    if from_a { (&mut a, &mut b, sizes[1]) } else { (&mut b, &mut a, sizes[0]) };
                let mut sent: HashMap<u16, Vec<Got>> = HashMap::new();
                // A flow is sent from one queue, and therefore by one dispatcher.
                for (index, sender) in from.iter_mut().enumerate() {
                    let mine = (0..FLOWS).filter(|flow| usize::from(*flow) % sizes.len().max(1) == index % 2);
                    let flows: Vec<u16> = mine.map(|flow| flow + 1000 * index as u16).collect();
                    let frames: Vec<Got> = (0..6)
                        .flat_map(|number| flows.iter().map(move |flow| (number, *flow)))
                        .map(|(number, flow)| {
                            packet(flow, number, [64, 60, 1400, 5000, 64, 100][number as usize])
                        })
                        .collect();
                    sender.send(&frames);
                    frames.into_iter().for_each(|frame| sent.entry(flow_of(&frame)).or_default().push(frame));
                }
                let count = sent.values().map(Vec::len).sum();
                let got = receive_all(to, count);
                let mut places: HashMap<u16, usize> = HashMap::new();
                let mut arrived_frames: HashMap<u16, Vec<Got>> = HashMap::new();
                for (dispatcher, frames) in got.into_iter().enumerate() {
                    let receives = dispatcher < usize::from(ports);
                    assert_eq!(!frames.is_empty(), receives, "dispatcher {dispatcher} of {sizes:?}");
                    for frame in frames {
                        let flow = flow_of(&frame);
                        assert_eq!(*places.entry(flow).or_insert(dispatcher), dispatcher, "flow {flow}");
                        arrived_frames.entry(flow).or_default().push(frame);
                    }
                }
                for (flow, frames) in sent {
                    assert_eq!(arrived_frames[&flow], arrived(&frames), "flow {flow} on {listen} {sizes:?}");
                }
                assert_eq!(to[0].unknown.discards(DiscardReason::UnknownSource), 0);
            }
        }
    }
}

/// Frames of the classic encapsulation leave and arrive at the first port, whichever dispatcher sends them.
#[test]
fn classic_frames_use_the_first_port() {
    let peer = UdpSocket::bind(LOOPBACK).unwrap();
    peer.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    let remote = peer.local_addr().unwrap();
    let mut hosts = linked(host(LOOPBACK, 3, 3), options(remote, Encapsulation::Vnet, Some(1500)));
    let first = hosts[0].bridge.local_addr();
    let mut buffer = vec![0; 2000];
    for (index, sender) in hosts.iter_mut().enumerate() {
        let sent = packet(index as u16, 1, 900);
        sender.send(std::slice::from_ref(&sent));
        let (len, source) = peer.recv_from(&mut buffer).unwrap();
        assert_eq!((&buffer[..len], source), (&sent.bytes[..], first), "dispatcher {index}");
    }
    for number in 0..30 {
        peer.send_to(&packet(number, 1, 60).bytes, first).unwrap();
    }
    let got = receive_all(&mut hosts, 30);
    assert_eq!(got.iter().map(Vec::len).collect::<Vec<_>>(), [30, 0, 0], "dispatcher 0 owns the first port");
}

/// Other users of the peer's host cannot inject frames from their ports.
#[test]
fn other_ports_of_the_peers_host_are_unknown_sources() {
    let [mut a, mut b] = pair(LOOPBACK, Encapsulation::Native, [(2, 2), (2, 2)]);
    let first = b[0].bridge.local_addr();
    let stranger = UdpSocket::bind(LOOPBACK).unwrap();
    let datagram = [&[0x10, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 9][..], &frame(60, 1).bytes].concat();
    for offset in 0..2 {
        stranger.send_to(&datagram, SocketAddr::new(first.ip(), first.port() + offset)).unwrap();
    }
    a[0].send(&[frame(60, 2)]);
    assert_eq!(receive_all(&mut b, 1).concat(), arrived(&[frame(60, 2)]));
    let start = Instant::now();
    while b[0].unknown.discards(DiscardReason::UnknownSource) < 2 {
        assert!(receive_all(&mut b, 0).concat().is_empty());
        b.iter_mut().for_each(|host| assert!(host.receive_once().0.is_empty()));
        assert!(start.elapsed() < Duration::from_secs(5));
    }
}

/// The error names the port in use, wherever it is in the range, and no other port stays bound.
#[test]
fn errors_name_a_port_in_use_within_the_range() {
    let stats: Arc<PortStats> = Arc::default();
    let budget = Arc::new(ReassemblyBudget::new(1 << 20));
    let row = Bridge::bind_group(LOOPBACK.parse().unwrap(), 3, 1, &stats, &budget).unwrap();
    let first = row[0].local_addr();
    drop(row);
    let taken = UdpSocket::bind((first.ip(), first.port() + 2)).unwrap();
    for dispatchers in [1, 2] {
        let error = Bridge::bind_group(first, 3, dispatchers, &stats, &budget).err().unwrap();
        assert!(matches!(error, BridgeError::InUse(at, _) if at == taken.local_addr().unwrap()), "{error}");
        drop(UdpSocket::bind((first.ip(), first.port() + 1)).unwrap());
    }
    let last = SocketAddr::new(first.ip(), 65_535);
    let beyond = Bridge::bind_group(last, 2, 1, &stats, &budget).err().unwrap();
    assert!(!matches!(beyond, BridgeError::NotHere(..)), "{beyond}");
}
