//! Two stream links on the loopback device, served as a dispatcher would.

use std::net::{IpAddr, Ipv4Addr, TcpListener, TcpStream};

use super::*;
use crate::frame::{BATCH_MAX, PortId};
use crate::link::sealed::pki::{Flaw, Pki};
use crate::link::{LinkOptions, Security};
use crate::stats::PortStats;
use std::io::{Read, Write};

fn link(destination: SocketAddr, connect: bool) -> Arc<Link> {
    sealed_link(destination, connect, None)
}

fn sealed_link(destination: SocketAddr, connect: bool, peer: Option<&str>) -> Arc<Link> {
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
    let security = Security { peer: peer.map(Into::into), macs: None, via: None };
    Link::with_security(options, security, PortId(7), Arc::default())
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
    passive.start(None).unwrap();
    listener.adopt(vec![passive.clone()]);
    let active = link(listener.local_addr(), true);
    active.start(None).unwrap();
    until("a connection", || active.state() == LinkState::Up && passive.state() == LinkState::Up);
    (listener, stats, active, passive)
}

/// The same by TLS: h1 dials h2.
fn sealed_pair(pki: &Pki, h1: IdentityStore) -> (Listener, Arc<PortStats>, Arc<Link>, Arc<Link>) {
    let stats = Arc::<PortStats>::default();
    let listener = Listener::bind("127.0.0.1:0".parse().unwrap(), stats.clone()).unwrap();
    // Where it says that its peer is plays no part.
    let passive = sealed_link("192.0.2.1:1".parse().unwrap(), false, Some("h1"));
    passive.start(Some(Arc::new(pki.store("h2", 2)))).unwrap();
    listener.adopt(vec![passive.clone()]);
    let active = sealed_link(listener.local_addr(), true, Some("h2"));
    active.start(Some(Arc::new(h1))).unwrap();
    (listener, stats, active, passive)
}

fn is_up(link: &Link) -> bool {
    link.state() == LinkState::Up
}

#[test]
fn frames_of_all_sizes_cross_by_tls() {
    let folder = tempfile::tempdir().unwrap();
    let pki = Pki::new(folder.path());
    let (_listener, _, active, passive) = sealed_pair(&pki, pki.store("h1", 1));
    until("a connection", || is_up(&active) && is_up(&passive));
    exchange(&active, &passive);
    assert!(active.seal_view().is_none() && active.stream_peer() == Some("h2"));
    active.stop();
    passive.stop();
}

#[test]
fn what_does_not_fit_into_tls_is_dropped_and_the_rest_comes_whole() {
    let folder = tempfile::tempdir().unwrap();
    let pki = Pki::new(folder.path());
    let (_listener, _, active, passive) = sealed_pair(&pki, pki.store("h1", 1));
    until("a connection", || is_up(&active) && is_up(&passive));
    overfill(&active, &passive);
    active.stop();
    passive.stop();
}

#[test]
fn who_shows_no_good_certificate_is_refused_and_counted() {
    let (folder, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (pki, foreign) = (Pki::new(folder.path()), Pki::new(elsewhere.path()));
    let revoked = pki.store("h1", 9);
    pki.revoke(&[9]);
    for (h1, why) in [
        (revoked, "revoked"),
        (foreign.store("h1", 1), "authority"),
        // Believed, but of a host that no link leads to.
        (pki.store("h3", 3), "closed"),
    ] {
        let (_listener, stats, active, passive) = sealed_pair(&pki, h1);
        until(why, || stats.discards(DiscardReason::UnknownSource) > 0 && !is_up(&active));
        assert!(matches!(passive.state(), LinkState::Unreachable(_) | LinkState::Down(_)));
        assert_eq!(passive.stats().in_frames.get(), 0);
        active.stop();
        passive.stop();
    }
    // In clear text, as of another age, and as nothing at all.
    let (listener, stats, active, passive) = sealed_pair(&pki, pki.store("h1", 1));
    until("a connection", || is_up(&active) && is_up(&passive));
    for bytes in [&b"GET / HTTP/1.0\r\n\r\n"[..], &[0x16, 3, 1, 0xff, 0xff, 1], &[]] {
        let before = stats.discards(DiscardReason::UnknownSource);
        let mut stranger = TcpStream::connect(listener.local_addr()).unwrap();
        stranger.write_all(bytes).unwrap();
        stranger.shutdown(std::net::Shutdown::Write).unwrap();
        let mut said = vec![];
        // Closed or reset: both are an end.
        let _ = stranger.read_to_end(&mut said);
        until("the count", || stats.discards(DiscardReason::UnknownSource) == before + 1);
    }
    exchange(&active, &passive);
    active.stop();
    passive.stop();
}

#[test]
fn a_certificate_speaks_for_what_it_names() {
    let folder = tempfile::tempdir().unwrap();
    let pki = Pki::new(folder.path());
    let claims = ["vnet:mac=52:54:00:00:00:01"];
    let files = pki.issue("h1", 1, Flaw::None, &claims);
    let (_listener, _, active, passive) = sealed_pair(&pki, IdentityStore::open(files, "h1").unwrap());
    until("a connection", || is_up(&active) && is_up(&passive));
    let frame = |last: u8| [&[0xff; 6][..], &[0x52, 0x54, 0, 0, 0, last], &[8, 0], &[7; 46]].concat();
    send(&active, &[frame(2), frame(1), frame(3)]);
    let mut got = vec![];
    until("the frame", || {
        got.extend(receive(&passive, ACCEPTED));
        passive.stats().drops(DropReason::BadSource) == 2 && !got.is_empty()
    });
    assert_eq!(got, [frame(1)]);
    active.stop();
    passive.stop();
}

#[test]
fn frames_of_all_sizes_cross_both_ways() {
    let (_listener, _, active, passive) = pair();
    exchange(&active, &passive);
    active.stop();
    passive.stop();
}

/// Frames of all sizes, both ways.
fn exchange(active: &Arc<Link>, passive: &Arc<Link>) {
    let frames: Vec<_> = [14, 60, 1514, 9000, FRAME_MAX, 15, FRAME_MAX - 1].map(bytes).into();
    for (from, to, place) in [(active, passive, ACCEPTED), (passive, active, MADE)] {
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
}

#[test]
fn what_does_not_fit_is_dropped_and_counted_and_the_rest_comes_whole() {
    let (_listener, _, active, passive) = pair();
    overfill(&active, &passive);
    active.stop();
    passive.stop();
}

/// More than fits, from one side to the other, which looks at it only then.
fn overfill(active: &Arc<Link>, passive: &Arc<Link>) {
    let frames: Vec<_> = (0..2000).map(|n| bytes(40_000 + n)).collect();
    // Nobody reads: the socket's buffers and the outbox fill.
    send(active, &frames);
    let stats = active.stats();
    let (sent, dropped) = (stats.out_frames.get(), stats.drops(DropReason::NoBuffer));
    assert!(dropped > 0 && sent > 0 && sent + dropped == frames.len() as u64, "{sent} + {dropped}");
    let mut got = 0;
    until("what was sent", || {
        active.stream_receive(MADE, &mut Batch::new(), &mut |_| ());
        for frame in receive(passive, ACCEPTED) {
            assert_eq!(frame, bytes(frame.len()));
            got += 1;
        }
        got == sent
    });
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
    active.start(None).unwrap();
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
