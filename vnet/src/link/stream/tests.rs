//! Two stream links on the loopback device, served as a dispatcher would.

use std::net::{IpAddr, Ipv4Addr, TcpListener, TcpStream};

use super::*;
use crate::frame::{BATCH_MAX, PortId};
use crate::link::LinkOptions;
use crate::stats::PortStats;
use std::io::{Read, Write};

fn link(destination: SocketAddr, connect: bool) -> Arc<Link> {
    let options = LinkOptions {
        name: "peer".into(),
        remote: destination,
        ports: 1,
        encapsulation: Encapsulation::Stream,
        networks: None,
        mtu: None,
        tunnel: Tunnel::Stream(StreamOptions {
            destination: Destination::Address(destination),
            proxy: None,
            connect,
        }),
    };
    Link::new(options, PortId(7), Arc::default())
}

/// A frame of some length and its bytes.
fn bytes(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 7 + len) as u8).collect()
}

fn send(link: &Link, frames: &[Vec<u8>]) {
    for chunk in frames.chunks(BATCH_MAX) {
        let mut batch = Batch::new();
        for frame in chunk {
            let mut builder = batch.begin();
            // SAFETY: `frames` outlives the batch and is not written to.
            unsafe { builder.push_stable(Segment::new(frame.as_ptr(), frame.len())) };
            builder.finish(PortId(1), NetworkId::DEFAULT, Offload::default(), 0).unwrap();
        }
        link.stream_send(&batch, &(0..batch.len() as u16).collect::<Vec<_>>());
    }
}

fn receive(link: &Link, place: usize) -> Vec<Vec<u8>> {
    let (mut got, mut batch) = (vec![], Batch::new());
    link.stream_receive(place, &mut batch, &mut |batch| {
        for frame in batch.frames() {
            assert_eq!((frame.hops, frame.from), (1, PortId(7)));
            let mut copy = vec![0; frame.len()];
            batch.copy_to(frame, &mut copy);
            got.push(copy);
        }
    });
    assert!(batch.is_empty());
    got
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < Duration::from_secs(10), "waited for {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// A listener with a link for whoever comes from the loopback address, and a link that dials it.
fn pair() -> (Listener, Arc<PortStats>, Arc<Link>, Arc<Link>) {
    let stats = Arc::<PortStats>::default();
    let listener = Listener::bind("127.0.0.1:0".parse().unwrap(), stats.clone()).unwrap();
    let passive = link((IpAddr::V4(Ipv4Addr::LOCALHOST), 1).into(), false);
    passive.start().unwrap();
    listener.adopt(vec![passive.clone()]);
    let active = link(listener.local_addr(), true);
    active.start().unwrap();
    until("a connection", || active.state() == LinkState::Up && passive.state() == LinkState::Up);
    (listener, stats, active, passive)
}

#[test]
fn frames_of_all_sizes_cross_both_ways() {
    let (_listener, _, active, passive) = pair();
    let frames: Vec<_> = [14, 60, 1514, 9000, FRAME_MAX, 15, FRAME_MAX - 1].map(bytes).into();
    for (from, to, place) in [(&active, &passive, ACCEPTED), (&passive, &active, MADE)] {
        send(from, &frames);
        let mut got = vec![];
        until("the frames", || {
            from.stream_receive(1 - place, &mut Batch::new(), &mut |_| panic!("nothing was sent back"));
            got.extend(receive(to, place));
            got.len() >= frames.len()
        });
        assert_eq!(got, frames);
        assert_eq!(from.stats().out_frames.get(), frames.len() as u64);
        assert_eq!(to.stats().in_frames.get(), frames.len() as u64);
    }
    active.stop();
    passive.stop();
}

#[test]
fn what_does_not_fit_is_dropped_and_counted_and_the_rest_comes_whole() {
    let (_listener, _, active, passive) = pair();
    let frames: Vec<_> = (0..2000).map(|n| bytes(40_000 + n)).collect();
    // Nobody reads: the socket's buffers and the outbox fill.
    send(&active, &frames);
    let stats = active.stats();
    let (sent, dropped) = (stats.out_frames.get(), stats.drops(DropReason::NoBuffer));
    assert!(dropped > 0 && sent > 0 && sent + dropped == frames.len() as u64, "{sent} + {dropped}");
    let mut got = 0;
    until("what was sent", || {
        active.stream_receive(MADE, &mut Batch::new(), &mut |_| ());
        for frame in receive(&passive, ACCEPTED) {
            assert_eq!(frame, bytes(frame.len()));
            got += 1;
        }
        got == sent
    });
    active.stop();
    passive.stop();
}

#[test]
fn a_lost_connection_is_made_again() {
    let (_listener, _, active, passive) = pair();
    *lock(&passive.stream.as_ref().unwrap().places[ACCEPTED].connection) = None;
    until("the loss to be noticed", || {
        receive(&active, MADE);
        active.state() != LinkState::Up
    });
    send(&active, &[bytes(100)]);
    assert_eq!(active.stats().drops(DropReason::NotReady), 1);
    until("another connection", || active.state() == LinkState::Up && passive.state() == LinkState::Up);
    send(&active, &[bytes(100)]);
    let mut got = vec![];
    until("the frame", || {
        got.extend(receive(&passive, ACCEPTED));
        !got.is_empty()
    });
    assert_eq!(got, [bytes(100)]);
    active.stop();
    passive.stop();
}

#[test]
fn strangers_are_closed_and_counted() {
    let stats = Arc::<PortStats>::default();
    let listener = Listener::bind("127.0.0.1:0".parse().unwrap(), stats.clone()).unwrap();
    listener.adopt(vec![link("10.0.0.9:1".parse().unwrap(), false)]);
    let mut stranger = TcpStream::connect(listener.local_addr()).unwrap();
    assert_eq!(stranger.read(&mut [0; 1]).unwrap_or(0), 0, "closed");
    assert_eq!(stats.discards(DiscardReason::UnknownSource), 1);
}

#[test]
fn nonsense_ends_the_connection_and_bad_messages_do_not() {
    let (_listener, _, active, passive) = pair();
    active.stop();
    until("the end", || {
        receive(&passive, ACCEPTED);
        passive.state() != LinkState::Up
    });
    let mut peer = TcpStream::connect(_listener.local_addr()).unwrap();
    until("a connection", || passive.state() == LinkState::Up);
    let header = keepalive(&active);
    let frame = Header { kind: Kind::Frame, network: 1, ..header };
    let bundle = Header { kind: Kind::Bundle, ..header };
    for header in [bundle, frame] {
        peer.write_all(Prefix::new(&header, &Offload::default(), 60).bytes()).unwrap();
        peer.write_all(&bytes(60)).unwrap();
    }
    let mut got = vec![];
    until("the frame", || {
        got.extend(receive(&passive, ACCEPTED));
        !got.is_empty()
    });
    assert_eq!((got.len(), passive.stats().discards(DiscardReason::BadHeader)), (1, 1));
    peer.write_all(&[0xff; 4]).unwrap();
    until("the end", || {
        receive(&passive, ACCEPTED);
        passive.state() != LinkState::Up
    });
    assert_eq!(passive.stats().discards(DiscardReason::BadHeader), 2);
    passive.stop();
}

/// A peer that is there but says nothing more is given up.
#[test]
fn silence_is_noticed_within_ten_seconds() {
    let deaf = TcpListener::bind("127.0.0.1:0").unwrap();
    let active = link(deaf.local_addr().unwrap(), true);
    active.start().unwrap();
    let (mut socket, _) = deaf.accept().unwrap();
    until("a connection", || active.state() == LinkState::Up);
    let start = Instant::now();
    while active.state() == LinkState::Up {
        assert!(start.elapsed() < Duration::from_secs(10));
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(start.elapsed() >= SILENCE - Duration::from_millis(100));
    let mut kept_alive = vec![];
    socket.set_nonblocking(true).unwrap();
    let _ = socket.read_to_end(&mut kept_alive);
    let expected = SILENCE.as_secs() / KEEPALIVE.as_secs();
    assert!(kept_alive.len() as u64 / 20 >= expected - 2, "{} bytes of keepalives", kept_alive.len());
    active.stop();
}
