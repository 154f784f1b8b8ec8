//! Nodes between which UDP is blocked.

use std::io::{Read, Write};
use std::net::{TcpStream, UdpSocket};
use std::time::Instant;

use super::*;
use crate::node::tests::{BOTH, LEN, Two, wait};
use crate::node::{Attachment, Options};
use crate::proto::{Kind, Peer, Status};
use crate::{Node, Region};

/// A node with memory.
fn open(attachment: Option<&str>, bind: &str) -> (Node, crate::Endpoint, Region, Peer) {
    let attachment = attachment.map(Into::into);
    let options = Options { bind: bind.parse().unwrap(), meeting: None, attachment, ..Options::default() };
    let node = Node::open(&options).unwrap();
    let end = node.endpoint(Some(0)).unwrap();
    let region = Region::new(&end, 2 * LEN, BOTH).unwrap();
    let peer = Peer { address: node.address(), endpoint: 0 };
    (node, end, region, peer)
}

fn two(attachments: [Option<&str>; 2]) -> Two {
    let [(a, a_end, a_region, a_peer), (b, b_end, b_region, b_peer)] =
        attachments.map(|own| open(own, "127.0.0.1:0"));
    Two { nodes: [a, b], ends: [a_end, b_end], regions: [a_region, b_region], peers: [a_peer, b_peer] }
}

fn counters(two: &Two) -> [BounceCounters; 2] {
    two.nodes.each_ref().map(|node| node.bounce_counters())
}

/// Has the sockets of these nodes discard datagrams, or no longer, as a firewall would.
fn block(two: &Two, places: &[usize], is_blocked: bool) {
    for place in places {
        two.nodes[*place].process().block_datagrams(is_blocked);
    }
}

/// Exchanges bytes in all ways, also more than a connection queues at once.
fn exchange(two: &Two) {
    for len in [1, 5_000, LEN] {
        two.to_and_fro(len);
        assert_eq!(two.message(len, len as u8), Status::Success);
    }
}

#[test]
fn peers_that_datagrams_do_not_reach_exchange_packets_by_tcp() {
    for blocked in [&[0, 1][..], &[0], &[1]] {
        let two = two([None; 2]);
        block(&two, blocked, true);
        exchange(&two);
        // Each direction by itself.
        let begin = Instant::now();
        let takes = |from: usize| match two.ends[from].attachment(two.peers[1 - from]) {
            Attachment::Bounce => blocked.contains(&(1 - from)),
            Attachment::Udp => !blocked.contains(&(1 - from)),
            _ => false,
        };
        while !(takes(0) && takes(1)) {
            assert!(begin.elapsed() < Duration::from_secs(60), "{blocked:?}: {:?}", counters(&two));
            two.to_and_fro(1);
        }
        let before = counters(&two);
        exchange(&two);
        let after = counters(&two);
        for place in blocked {
            let from = 1 - place;
            assert!(after[from].packets_out > before[from].packets_out, "{after:?}");
            assert!(after[*place].packets_in > before[*place].packets_in, "{after:?}");
        }
        assert!(after.iter().all(|own| own.opened >= 1), "{after:?}");
    }
}

#[test]
fn packets_return_to_udp_when_it_reaches_the_peer_again() {
    let two = two([None; 2]);
    block(&two, &[0, 1], true);
    two.to_and_fro(LEN);
    two.until(Attachment::Bounce);
    block(&two, &[0, 1], false);
    two.until(Attachment::Udp);
    assert!(counters(&two).iter().all(|own| own.returned == 1), "{:?}", counters(&two));
    // Something blocks datagrams in the middle of an exchange.
    block(&two, &[0, 1], true);
    exchange(&two);
    two.until(Attachment::Bounce);
}

#[test]
fn operations_outlive_their_connection() {
    let two = two([Some("bounce"); 2]);
    two.to_and_fro(1);
    two.writes_outlive(5, |round| two.nodes[usize::from(round % 2)].process().cut_bounces());
    assert!(counters(&two).iter().any(|own| own.ended > 0), "{:?}", counters(&two));
}

#[test]
fn a_node_that_takes_only_connections_meets_others() {
    for attachments in [[Some("bounce"), None], [None, Some("bounce")], [Some("bounce"); 2]] {
        let two = two(attachments);
        exchange(&two);
        two.until(Attachment::Bounce);
        assert!(
            counters(&two).iter().all(|own| own.bounces > 0 && own.returned == 0),
            "{:?}",
            counters(&two)
        );
    }
}

/// A node that starts again at the same port is reached at once, whoever connects: its kernel keeps no old connection (TIME_WAIT).
#[test]
fn a_node_that_starts_again_is_reached() {
    let bind = "127.0.0.1:0";
    let (_node, end, region, _) = open(Some("bounce"), bind);
    let (first, first_end, first_region, peer) = open(Some("bounce"), bind);
    let write = |to: &Region| {
        end.write(peer, region.span(0, 100).unwrap(), (to.key(), 0), None, 0).unwrap();
        wait(&end, Kind::Write).status
    };
    assert_eq!(write(&first_region), Status::Success);
    drop((first_end, first_region, first));
    let port = format!(":{:04X} ", peer.address.port());
    let sockets = std::fs::read_to_string("/proc/self/net/tcp").unwrap();
    let waits = |line: &str| line.contains(&port) && line.split_whitespace().nth(3) == Some("06");
    assert!(!sockets.lines().any(waits), "{sockets}");
    let begin = Instant::now();
    let (_first, _end, again, _) = open(Some("bounce"), &peer.address.to_string());
    while write(&again) != Status::Success {
        assert!(begin.elapsed() < Duration::from_secs(60), "no connection in a minute");
    }
}

/// One direction fails, then the other one: who only answers has nothing to find a silence by.
#[test]
fn who_only_answers_learns_of_a_silence() {
    let two = two([None; 2]);
    let write = || {
        let (span, key) = (two.regions[0].span(0, 100).unwrap(), two.regions[1].key());
        two.ends[0].write(two.peers[1], span, (key, 0), None, 0).unwrap();
        assert_eq!(wait(&two.ends[0], Kind::Write).status, Status::Success);
    };
    for deaf in [1, 0] {
        write();
        block(&two, &[deaf], true);
        write();
    }
    write();
    assert_eq!(two.ends[0].attachment(two.peers[1]), Attachment::Bounce);
}

/// Another program has the TCP port of a peer that is heard by UDP: packets do not go there.
#[test]
fn a_peer_that_is_heard_by_udp_is_not_diverted() {
    let (_node, end, region, peer) = open(None, "127.0.0.1:0");
    let quiet = Options {
        bind: "127.0.0.1:0".parse().unwrap(),
        meeting: None,
        streams: Some("off".into()),
        ..Options::default()
    };
    let other = Node::open(&quiet).unwrap();
    let other_end = other.endpoint(Some(0)).unwrap();
    let memory = Region::new(&other_end, 1000, BOTH).unwrap();
    let to = Peer { address: other.address(), endpoint: 0 };
    let write = || {
        end.write(to, region.span(0, 100).unwrap(), (memory.key(), 0), None, 0).unwrap();
        assert_eq!(wait(&end, Kind::Write).status, Status::Success);
    };
    write();
    let family = rustix::net::AddressFamily::INET;
    let socket = rustix::net::socket(family, rustix::net::SocketType::STREAM, None).unwrap();
    rustix::net::bind(&socket, &to.address).unwrap();
    rustix::net::connect(&socket, &peer.address).unwrap();
    let mut stranger = TcpStream::from(socket);
    // With the word that packets by UDP are not answered.
    stranger.write_all(&[&MAGIC[..], &[1; SECRET], &[0, 0, 0, 1, 2]].concat()).unwrap();
    let begin = Instant::now();
    while _node.bounce_counters().opened == 0 {
        assert!(begin.elapsed() < Duration::from_secs(60));
        end.wait(Some(Duration::from_millis(1)));
    }
    (0..100).for_each(|_| write());
    let counters = _node.bounce_counters();
    assert_eq!((counters.bounces, counters.packets_out), (0, 0), "{counters:?}");
}

/// Reads until the node says nothing for a while, or closes the connection.
fn heard(socket: &mut TcpStream, end: &crate::Endpoint) -> Vec<u8> {
    let (mut bytes, mut part) = (vec![], [0; 64]);
    socket.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
    for _ in 0..20 {
        end.wait(Some(Duration::from_millis(5)));
        if let Ok(count) = socket.read(&mut part) {
            bytes.extend(&part[..count]);
        }
    }
    bytes
}

/// Who does not send the magic, or sends a record that no packet has, is closed. Probes are answered if they have the peer's secret.
#[test]
fn strangers_get_nothing() {
    let (node, end, ..) = open(None, "127.0.0.1:0");
    let connect = || TcpStream::connect(node.address()).unwrap();
    let is_closed = |socket: &mut TcpStream| {
        let begin = Instant::now();
        socket.set_read_timeout(Some(Duration::from_millis(10))).unwrap();
        loop {
            end.wait(Some(Duration::from_millis(5)));
            match socket.read(&mut [0; 64]) {
                Ok(0) => return true,
                Ok(_) => {}
                Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return true,
                Err(_) if begin.elapsed() > Duration::from_secs(60) => return false,
                Err(_) => {}
            }
        }
    };
    let mut wrong = connect();
    wrong.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
    assert!(is_closed(&mut wrong));
    let preface = |secret: u8| [&MAGIC[..], &[secret; SECRET]].concat();
    let mut long = connect();
    long.write_all(&[preface(1), u32::MAX.to_be_bytes().to_vec()].concat()).unwrap();
    assert!(is_closed(&mut long));
    // Session numbers cannot be tried out.
    let mut guesses = connect();
    let record = [&100u32.to_be_bytes()[..], &[7; 100]].concat();
    guesses.write_all(&[preface(1), record.repeat(100)].concat()).unwrap();
    assert!(is_closed(&mut guesses));
    assert!(node.counters().unwrap().malformed > 0);
    let mut other = connect();
    let probe = UdpSocket::bind(other.local_addr().unwrap()).unwrap();
    other.write_all(&preface(1)).unwrap();
    assert_eq!(heard(&mut other, &end)[..MAGIC.len()], MAGIC, "its own preface");
    probe.send_to(&preface(2), node.address()).unwrap();
    assert_eq!(heard(&mut other, &end), [0; 0]);
    probe.send_to(&[preface(1), vec![0; 1000]].concat(), node.address()).unwrap();
    assert_eq!(heard(&mut other, &end), [0, 0, 0, 1, 1]);
}

#[test]
fn only_tcp_needs_a_free_port() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let bind = taken.local_addr().unwrap().to_string().parse().unwrap();
    let options = Options { bind, meeting: None, attachment: Some("bounce".into()), ..Options::default() };
    assert!(matches!(Node::open(&options), Err(crate::Error::NoBounce)));
    let usual = Options { attachment: None, ..options };
    assert!(Node::open(&usual).is_ok());
}
