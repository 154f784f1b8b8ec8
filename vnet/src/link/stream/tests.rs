//! Two stream links on the loopback device, served like by a dispatcher.

use std::cell::RefCell;
use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::connections::keepalive;
use super::*;
use crate::frame::{BATCH_MAX, Batch, DropSink, FRAME_MAX, NetworkId, PortId, Segment, Selection};
use crate::link::sealed::identity::IdentityStore;
use crate::link::sealed::pki::{Flaw, Pki};
use crate::link::{Link, LinkKind, LinkOptions, LinkState, Security};
use crate::source::{self, BatchSlot, Source, drain};
use crate::stats::{DiscardReason, DropReason, PortStats};
use crate::wire::native::{Header, Kind};
use crate::wire::offload::Offload;
use crate::wire::socks::Destination;
use crate::wire::stream::Prefix;

fn link(destination: SocketAddr, connect: bool) -> Arc<Link> {
    sealed_link(destination, connect, None)
}

fn sealed_link(destination: SocketAddr, connect: bool, peer: Option<&str>) -> Arc<Link> {
    let options = LinkOptions {
        name: "peer".into(),
        remote: destination,
        ports: 1,
        networks: None,
        mtu: None,
        kind: LinkKind::Stream(StreamOptions {
            destination: Destination::Address(destination),
            proxy: None,
            connect,
        }),
    };
    let security = Security { peer: peer.map(Into::into), macs: None, via: None };
    Link::with_security(options, security, PortId(7), Arc::default())
}

/// The contents of a frame of `len` bytes.
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
        let which: Vec<u16> = (0..batch.len() as u16).collect();
        link.stream_send(Selection { batch: &batch, which: &which }, &mut DropSink::new());
    }
}

thread_local! {
    /// Sources that a dispatcher would serve, by link and slot.
    static SOURCES: RefCell<HashMap<(u64, usize), Box<dyn Source>>> = RefCell::default();
}

fn serve(link: &Arc<Link>, slot: usize, each: &mut dyn FnMut(&Batch)) {
    SOURCES.with_borrow_mut(|sources| {
        let source = sources.entry((link.id, slot)).or_insert_with(|| link.stream_source(slot).unwrap());
        drain(&mut **source, 1, each);
    });
}

fn receive(link: &Arc<Link>, slot: usize) -> Vec<Vec<u8>> {
    let mut got = vec![];
    serve(link, slot, &mut |batch| {
        for frame in batch.frames() {
            assert_eq!((frame.hops, frame.from), (1, PortId(7)));
            let mut copy = vec![0; frame.len()];
            batch.copy_to(frame, &mut copy);
            got.push(copy);
        }
    });
    got
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < Duration::from_secs(10), "waited for {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// One host: its stream thread, and one link.
struct Host {
    streams: Streams,
    link: Arc<Link>,
    /// Counts connections that belong to no link.
    stats: Arc<PortStats>,
}

impl Host {
    fn new(listen: bool, link: Arc<Link>, identity: Option<IdentityStore>) -> Host {
        let stats = Arc::<PortStats>::default();
        let listen = listen.then(|| "127.0.0.1:0".parse().unwrap());
        let streams = Streams::start(listen, stats.clone(), None).unwrap();
        if let Some(identity) = identity {
            link.set_identity(Arc::new(identity));
        }
        streams.set_links(std::slice::from_ref(&link));
        Host { streams, link, stats }
    }

    fn accepting(link: Arc<Link>, identity: Option<IdentityStore>) -> Host {
        Host::new(true, link, identity)
    }

    fn dialing(link: Arc<Link>, identity: Option<IdentityStore>) -> Host {
        Host::new(false, link, identity)
    }

    fn address(&self) -> SocketAddr {
        self.streams.local_addr().unwrap()
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.link.stop();
    }
}

/// A host that accepts any connection from the loopback address, and a host that dials it.
fn pair() -> (Host, Host) {
    let passive = Host::accepting(link((IpAddr::V4(Ipv4Addr::LOCALHOST), 1).into(), false), None);
    let active = Host::dialing(link(passive.address(), true), None);
    until("a connection", || is_up(&active.link) && is_up(&passive.link));
    (active, passive)
}

/// Like [`pair`], with TLS: h1 dials h2.
fn sealed_pair(pki: &Pki, h1: IdentityStore) -> (Host, Host) {
    // The certificate identifies the link of a connection, whatever the remote.
    let remote = "192.0.2.1:1".parse().unwrap();
    let passive = Host::accepting(sealed_link(remote, false, Some("h1")), Some(pki.store("h2", 2)));
    let active = Host::dialing(sealed_link(passive.address(), true, Some("h2")), Some(h1));
    (active, passive)
}

fn is_up(link: &Link) -> bool {
    link.state() == LinkState::Up
}

#[test]
fn frames_of_all_sizes_cross_by_tls() {
    let folder = tempfile::tempdir().unwrap();
    let pki = Pki::new(folder.path());
    let (active, passive) = sealed_pair(&pki, pki.store("h1", 1));
    until("a connection", || is_up(&active.link) && is_up(&passive.link));
    exchange(&active.link, &passive.link);
    assert!(active.link.seal_view().is_none() && active.link.stream_peer() == Some("h2"));
}

#[test]
fn frames_beyond_the_outbox_are_dropped_on_tls_and_the_others_arrive_whole() {
    let folder = tempfile::tempdir().unwrap();
    let pki = Pki::new(folder.path());
    let (active, passive) = sealed_pair(&pki, pki.store("h1", 1));
    until("a connection", || is_up(&active.link) && is_up(&passive.link));
    overfill(&active.link, &passive.link);
}

#[test]
fn peers_without_a_good_certificate_are_refused_and_counted() {
    let (folder, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (pki, foreign) = (Pki::new(folder.path()), Pki::new(elsewhere.path()));
    let revoked = pki.store("h1", 9);
    pki.revoke(&[9]);
    for (h1, why) in [
        (revoked, "revoked"),
        (foreign.store("h1", 1), "authority"),
        // A valid certificate, but of a host to which no link leads.
        (pki.store("h3", 3), "closed"),
    ] {
        let (active, passive) = sealed_pair(&pki, h1);
        until(why, || passive.stats.discards(DiscardReason::UnknownSource) > 0 && !is_up(&active.link));
        assert!(matches!(passive.link.state(), LinkState::Unreachable(_) | LinkState::Down(_)));
        assert_eq!(passive.link.stats().in_frames.get(), 0);
    }
    // Clear text, a TLS record with an impossible version and length, and nothing at all.
    let (active, passive) = sealed_pair(&pki, pki.store("h1", 1));
    until("a connection", || is_up(&active.link) && is_up(&passive.link));
    for bytes in [&b"GET / HTTP/1.0\r\n\r\n"[..], &[0x16, 3, 1, 0xff, 0xff, 1], &[]] {
        let before = passive.stats.discards(DiscardReason::UnknownSource);
        let mut stranger = TcpStream::connect(passive.address()).unwrap();
        stranger.write_all(bytes).unwrap();
        stranger.shutdown(std::net::Shutdown::Write).unwrap();
        let mut said = vec![];
        // Closed or reset: both end the connection.
        let _ = stranger.read_to_end(&mut said);
        until("the count", || passive.stats.discards(DiscardReason::UnknownSource) == before + 1);
    }
    exchange(&active.link, &passive.link);
}

#[test]
fn a_certificate_limits_source_addresses() {
    let folder = tempfile::tempdir().unwrap();
    let pki = Pki::new(folder.path());
    let claims = ["vnet:mac=52:54:00:00:00:01"];
    let files = pki.issue("h1", 1, Flaw::None, &claims);
    let (active, passive) = sealed_pair(&pki, IdentityStore::open(files, "h1").unwrap());
    until("a connection", || is_up(&active.link) && is_up(&passive.link));
    let frame = |last: u8| [&[0xff; 6][..], &[0x52, 0x54, 0, 0, 0, last], &[8, 0], &[7; 46]].concat();
    send(&active.link, &[frame(2), frame(1), frame(3)]);
    let mut got = vec![];
    until("the frame", || {
        got.extend(receive(&passive.link, ACCEPTED));
        passive.link.stats().drops(DropReason::BadSource) == 2 && !got.is_empty()
    });
    assert_eq!(got, [frame(1)]);
}

#[test]
fn frames_of_all_sizes_cross_both_ways() {
    let (active, passive) = pair();
    exchange(&active.link, &passive.link);
}

/// An inbox with more frames than a batch: bytes that arrive before the inbox is processed keep the source awake.
#[test]
fn an_unfinished_inbox_does_not_know_that_the_socket_is_empty() {
    let (active, passive) = pair();
    until("a connection", || is_up(&active.link) && is_up(&passive.link));
    let mut source = passive.link.stream_source(ACCEPTED).unwrap();
    let (mut slot, mut drops) = (BatchSlot::new(2), DropSink::new());
    send(&active.link, &(0..9).map(|n| bytes(100 + n)).collect::<Vec<_>>());
    let mut frames = 0;
    until("the frames", || {
        while {
            frames += source::receive(&mut *source, &mut slot, &mut drops, 1).len();
            frames % 2 == 0 && (1..8).contains(&frames)
        } {
            assert!(!source.rest(), "more wait after {frames}");
        }
        frames == 9
    });
    until("a read that finds nothing", || {
        assert!(source::receive(&mut *source, &mut slot, &mut drops, 1).is_empty());
        source.rest()
    });
}

/// Exchanges frames of all sizes, in both directions.
fn exchange(active: &Arc<Link>, passive: &Arc<Link>) {
    let frames: Vec<_> = [14, 60, 1514, 9000, FRAME_MAX, 15, FRAME_MAX - 1].map(bytes).into();
    for (from, to, slot) in [(active, passive, ACCEPTED), (passive, active, DIALED)] {
        send(from, &frames);
        let mut got = vec![];
        until("the frames", || {
            serve(from, 1 - slot, &mut |_| panic!("nothing was sent back"));
            got.extend(receive(to, slot));
            got.len() >= frames.len()
        });
        assert_eq!(got, frames);
        assert_eq!(from.stats().out_frames.get(), frames.len() as u64);
        assert_eq!(to.stats().in_frames.get(), frames.len() as u64);
    }
}

#[test]
fn frames_beyond_the_outbox_are_dropped_and_the_others_arrive_whole() {
    let (active, passive) = pair();
    overfill(&active.link, &passive.link);
}

/// Sends more than fits while the peer does not read, then reads.
fn overfill(active: &Arc<Link>, passive: &Arc<Link>) {
    let frames: Vec<_> = (0..2000).map(|n| bytes(40_000 + n)).collect();
    send(active, &frames);
    let stats = active.stats();
    let (sent, dropped) = (stats.out_frames.get(), stats.drops(DropReason::NoBuffer));
    assert!(dropped > 0 && sent > 0 && sent + dropped == frames.len() as u64, "{sent} + {dropped}");
    let mut got = 0;
    until("what was sent", || {
        serve(active, DIALED, &mut |_| ());
        for frame in receive(passive, ACCEPTED) {
            assert_eq!(frame, bytes(frame.len()));
            got += 1;
        }
        got == sent
    });
}

#[test]
fn a_lost_connection_is_dialed_again() {
    let (active, passive) = pair();
    *passive.link.stream().unwrap().slots[ACCEPTED].connection.lock() = None;
    until("the loss to be noticed", || {
        receive(&active.link, DIALED);
        !is_up(&active.link)
    });
    send(&active.link, &[bytes(100)]);
    assert_eq!(active.link.stats().drops(DropReason::NotReady), 1);
    until("another connection", || is_up(&active.link) && is_up(&passive.link));
    send(&active.link, &[bytes(100)]);
    let mut got = vec![];
    until("the frame", || {
        got.extend(receive(&passive.link, ACCEPTED));
        !got.is_empty()
    });
    assert_eq!(got, [bytes(100)]);
}

/// A removed link is neither dialed again nor gets accepted connections.
#[test]
fn a_stopped_link_stays_closed() {
    let (active, passive) = pair();
    active.link.stop();
    until("the end", || {
        receive(&passive.link, ACCEPTED);
        !is_up(&passive.link)
    });
    passive.link.stop();
    let mut late = TcpStream::connect(passive.address()).unwrap();
    assert_eq!(late.read(&mut [0; 1]).unwrap_or(0), 0, "closed");
    std::thread::sleep(Duration::from_millis(200));
    assert!(!is_up(&active.link) && !is_up(&passive.link));
}

/// Connections that begin no handshake, from another address than the peer's.
#[test]
fn one_address_cannot_take_all_handshakes() {
    use rustix::net::{AddressFamily, SocketType, bind, connect, socket};
    let folder = tempfile::tempdir().unwrap();
    let pki = Pki::new(folder.path());
    let remote = "192.0.2.1:1".parse().unwrap();
    let passive = Host::accepting(sealed_link(remote, false, Some("h1")), Some(pki.store("h2", 2)));
    let idle = (0..40).map(|_| {
        let socket = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        bind(&socket, &SocketAddr::from(([127, 0, 0, 2], 0))).unwrap();
        connect(&socket, &passive.address()).unwrap();
        socket
    });
    let _idle: Vec<_> = idle.collect();
    until("all but four to be closed", || passive.stats.discards(DiscardReason::UnknownSource) == 36);
    let active = Host::dialing(sealed_link(passive.address(), true, Some("h2")), Some(pki.store("h1", 1)));
    until("a connection", || is_up(&active.link) && is_up(&passive.link));
}

#[test]
fn strangers_are_closed_and_counted() {
    let host = Host::accepting(link("10.0.0.9:1".parse().unwrap(), false), None);
    let mut stranger = TcpStream::connect(host.address()).unwrap();
    assert_eq!(stranger.read(&mut [0; 1]).unwrap_or(0), 0, "closed");
    assert_eq!(host.stats.discards(DiscardReason::UnknownSource), 1);
}

#[test]
fn an_impossible_length_ends_the_connection_and_a_bad_message_does_not() {
    let (active, passive) = pair();
    let passive_link = &passive.link;
    active.link.stop();
    until("the end", || {
        receive(passive_link, ACCEPTED);
        !is_up(passive_link)
    });
    let mut peer = TcpStream::connect(passive.address()).unwrap();
    until("a connection", || is_up(passive_link));
    let header = keepalive(active.link.take_numbers(1));
    let frame = Header { kind: Kind::Frame, network: 1, ..header };
    let bundle = Header { kind: Kind::Bundle, ..header };
    for header in [bundle, frame] {
        peer.write_all(Prefix::new(&header, &Offload::default(), 60).bytes()).unwrap();
        peer.write_all(&bytes(60)).unwrap();
    }
    let mut got = vec![];
    until("the frame", || {
        got.extend(receive(passive_link, ACCEPTED));
        !got.is_empty()
    });
    assert_eq!((got.len(), passive_link.stats().discards(DiscardReason::BadHeader)), (1, 1));
    peer.write_all(&[0xff; 4]).unwrap();
    until("the end", || {
        receive(passive_link, ACCEPTED);
        !is_up(passive_link)
    });
    assert_eq!(passive_link.stats().discards(DiscardReason::BadHeader), 2);
}

/// A connection whose peer accepts and then stays silent is closed.
#[test]
fn silence_is_noticed_within_ten_seconds() {
    let deaf = TcpListener::bind("127.0.0.1:0").unwrap();
    let host = Host::dialing(link(deaf.local_addr().unwrap(), true), None);
    let (mut socket, _) = deaf.accept().unwrap();
    until("a connection", || is_up(&host.link));
    let start = Instant::now();
    while is_up(&host.link) {
        assert!(start.elapsed() < Duration::from_secs(10));
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(start.elapsed() >= SILENCE - Duration::from_millis(100));
    let mut kept_alive = vec![];
    socket.set_nonblocking(true).unwrap();
    let _ = socket.read_to_end(&mut kept_alive);
    let expected = SILENCE.as_secs() / KEEPALIVE.as_secs();
    assert!(kept_alive.len() as u64 / 20 >= expected - 2, "{} bytes of keepalives", kept_alive.len());
}

/// One thread serves all links, and a peer that never answers a TLS handshake delays none of the others.
#[test]
fn many_links_connect_beside_one_that_hangs() {
    const LINKS: usize = 100;
    let folder = tempfile::tempdir().unwrap();
    let pki = Pki::new(folder.path());
    let deaf = TcpListener::bind("127.0.0.1:0").unwrap();
    let open = TcpListener::bind("127.0.0.1:0").unwrap();
    let hanging = sealed_link(deaf.local_addr().unwrap(), true, Some("h2"));
    hanging.set_identity(Arc::new(pki.store("h1", 1)));
    let others = (0..LINKS).map(|_| link(open.local_addr().unwrap(), true));
    let links: Vec<_> = std::iter::once(hanging.clone()).chain(others).collect();
    let threads = || std::fs::read_dir("/proc/self/task").unwrap().count();
    let before = threads();
    let streams = Streams::start(None, Arc::default(), None).unwrap();
    streams.set_links(&links);
    let accepted: Vec<_> = (0..LINKS).map(|_| open.accept().unwrap()).collect();
    until("all connections", || links[1..].iter().all(|link| is_up(link)));
    // Other tests have threads, too, but not one per link.
    assert!(threads() < before + LINKS / 2, "{} threads, {before} before", threads());
    assert!(!is_up(&hanging));
    let why = || format!("{:?}", hanging.state());
    until("the deadline", || why().contains("the TLS handshake took longer than 5 s"));
    assert!(links[1..].iter().all(|link| is_up(link)), "kept alive meanwhile");
    drop(accepted);
    links.iter().for_each(|link| link.stop());
}

/// The proxy replies byte by byte; the bytes after its reply belong to the peer.
#[test]
fn a_proxy_connects_and_its_bytes_are_not_the_peers() {
    let proxy = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut options = link("192.0.2.9:9".parse().unwrap(), true).options().clone();
    options.kind = LinkKind::Stream(StreamOptions {
        destination: Destination::Name("peer.example".into(), 9000),
        proxy: Some(Proxy { address: proxy.local_addr().unwrap(), credentials: None }),
        connect: true,
    });
    let host = Host::dialing(Link::new(options, PortId(7), Arc::default()), None);
    let (mut socket, _) = proxy.accept().unwrap();
    socket.set_nodelay(true).unwrap();
    let mut greeting = [0; 3];
    socket.read_exact(&mut greeting).unwrap();
    assert_eq!(greeting, [5, 1, 0]);
    socket.write_all(&[5]).unwrap();
    std::thread::sleep(Duration::from_millis(20));
    socket.write_all(&[0]).unwrap();
    let mut request = [0; 4 + 1 + 12 + 2];
    socket.read_exact(&mut request).unwrap();
    assert_eq!(&request[..5], &[5, 1, 0, 3, 12]);
    for byte in [5, 0, 0, 1, 127, 0, 0, 1, 0x23] {
        socket.write_all(&[byte]).unwrap();
        std::thread::sleep(Duration::from_millis(2));
    }
    assert!(!is_up(&host.link));
    let header = Header { kind: Kind::Frame, network: 1, ..keepalive(1) };
    let prefix = Prefix::new(&header, &Offload::default(), 60);
    socket.write_all(&[&[0x28], prefix.bytes(), &bytes(60)].concat()).unwrap();
    until("the connection", || is_up(&host.link));
    let mut got = vec![];
    until("the frame", || {
        got.extend(receive(&host.link, DIALED));
        !got.is_empty()
    });
    assert_eq!(got, [bytes(60)]);
}
