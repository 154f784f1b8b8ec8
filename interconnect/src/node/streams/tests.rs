//! Streams between two nodes of one process.

use std::io::{self, Read, Write};
use std::net::TcpStream;

use crate::node::tests::{BOTH, LEN, Two};
use crate::node::*;
use crate::proto::{Peer, Status};
use crate::{Node, Region};

/// A node with memory, which sends datagrams as on an Ethernet.
fn open(streams: &str) -> Result<(Node, crate::Endpoint, Region, Peer), Error> {
    let bind = "127.0.0.1:0".parse().unwrap();
    let config = Config { datagram_max: 1400, ..Options::default().config };
    let options =
        Options { bind, config, meeting: None, streams: Some(streams.into()), ..Options::default() };
    let node = Node::open(&options)?;
    let end = node.endpoint(Some(0))?;
    let region = Region::new(&end, 2 * LEN, BOTH)?;
    let peer = Peer { address: node.address(), endpoint: 0 };
    Ok((node, end, region, peer))
}

fn two_of(streams: [&str; 2]) -> Two {
    let [(a, a_end, a_region, a_peer), (b, b_end, b_region, b_peer)] = streams.map(|own| open(own).unwrap());
    Two { nodes: [a, b], ends: [a_end, b_end], regions: [a_region, b_region], peers: [a_peer, b_peer] }
}

/// Two nodes with streams in both directions.
fn two() -> Two {
    let two = two_of(["auto"; 2]);
    let begin = Instant::now();
    while two.nodes.iter().any(|node| node.stream_counters().streams < 2) {
        assert!(begin.elapsed() < Duration::from_secs(60), "no streams in a minute");
        two.to_and_fro(LEN);
    }
    two
}

fn counters(two: &Two) -> [StreamCounters; 2] {
    two.nodes.each_ref().map(|node| node.stream_counters())
}

#[test]
fn large_transfers_take_streams_and_small_ones_the_socket() {
    let two = two();
    let before = counters(&two);
    for _ in 0..10 {
        two.to_and_fro(LEN);
        assert_eq!(two.message(LEN, 3), Status::Success);
    }
    let after = counters(&two);
    let sent = |from: usize| after[from].packets_out - before[from].packets_out;
    // A write and a message one way, a read the other.
    assert!(sent(0) >= 20 * 48 && sent(1) >= 10 * 48, "{after:?}");
    assert_eq!(two.message(1000, 4), Status::Success);
    assert_eq!(counters(&two).map(|own| own.packets_out), after.map(|own| own.packets_out));
    assert_eq!(after.map(|own| (own.streams, own.opened, own.ended, own.refused)), [(2, 2, 0, 0); 2]);
}

#[test]
fn transfers_outlive_their_streams() {
    let two = two();
    two.writes_outlive(20, |round| {
        if round % 2 == 0 {
            two.nodes[usize::from(round / 2 % 2)].process().shared.inner.lock().streams.cut();
        }
    });
    assert!(counters(&two).iter().any(|own| own.ended > 0), "{:?}", counters(&two));
}

/// Idle streams wake no sleeping thread.
#[test]
fn idle_streams_wake_nobody() {
    let two = two();
    for node in &two.nodes {
        let inbox = node.process().shared.descriptor;
        let is_quiet = || {
            let mut polled = libc::pollfd { fd: inbox, events: libc::POLLIN, revents: 0 };
            // SAFETY: the entry outlives the call.
            unsafe { libc::poll(&raw mut polled, 1, 0) == 0 }
        };
        let begin = Instant::now();
        let mut quiet = 0;
        while quiet < 20 {
            assert!(begin.elapsed() < Duration::from_secs(60), "the inbox is readable again and again");
            std::thread::sleep(Duration::from_millis(1));
            quiet = if is_quiet() { quiet + 1 } else { 0 };
        }
    }
}

#[test]
fn connections_without_the_secret_are_refused() {
    let two = two();
    let address = two.peers[1].address;
    let wrong = [&b"vnet-rdma-bytes1"[..], &[7; 16]].concat();
    for bytes in [&b"GET / HTTP/1.0\r\n\r\n and more of the same"[..], &wrong] {
        let mut stranger = TcpStream::connect(address).unwrap();
        stranger.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stranger.write_all(bytes).unwrap();
        // Closed, by a reset if not all has been read.
        let end = Instant::now() + Duration::from_secs(60);
        stranger.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
        loop {
            assert_eq!(two.message(8, 1), Status::Success);
            match stranger.read(&mut [0]) {
                Ok(0) => break,
                Ok(_) => panic!("an answer"),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    assert!(Instant::now() < end, "not closed in a minute");
                }
                Err(_) => break,
            }
        }
    }
    // More than may wait.
    let waiting: Vec<TcpStream> = (0..100).map(|_| TcpStream::connect(address).unwrap()).collect();
    two.to_and_fro(LEN);
    drop(waiting);
    two.to_and_fro(LEN);
    let refused = two.nodes[1].stream_counters().refused;
    assert!(refused >= 2, "{refused} refused");
}

#[test]
fn streams_can_be_switched_off() {
    assert!(matches!(open("yes"), Err(Error::Streams(_))));
    let two = two_of(["auto", "off"]);
    for _ in 0..5 {
        two.to_and_fro(LEN);
    }
    assert_eq!(counters(&two).map(|own| (own.opened, own.packets_out)), [(0, 0); 2]);
}
