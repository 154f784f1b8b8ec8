//! Served processes whose peers are behind sealed links.

use std::net::{SocketAddr, UdpSocket};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair};

use super::entry::{Extent, Submission, Task};
use super::fuzz::Raw;
use super::room::Room;
use super::service;
use super::tests::{Daemon, all_operations, wait};
use super::translation::{Budget, Total};
use super::*;
use crate::meeting::{Ends, Guest, Heard, KEY, KeyRequest, Keys, Message, Question, Reach, Role};
use crate::proto::wire::{Body, Header};
use crate::proto::{Config, Kind, Peer, Span, Status};
use crate::seal::{OVERHEAD, Sealing, wire};
use crate::{Attachment, Endpoint, Node, Options, SealCounters};

const PATIENCE: Duration = Duration::from_secs(60);

/// Messages from `a` to `b` until `is_so`.
fn talk_until(what: &str, a: &Endpoint, b: &Endpoint, to: Peer, mut is_so: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !is_so() {
        assert!(begin.elapsed() < PATIENCE, "no {what}");
        b.receive(Span::EMPTY, 1).unwrap();
        a.send(to, Span::EMPTY, None, 2).unwrap();
        assert_eq!(wait(b, Kind::Receive).status, Status::Success);
        assert_eq!(wait(a, Kind::Send).status, Status::Success);
    }
}

/// Checks all operations between two hosts with a sealed link, in both directions: memory, attachment and counters.
fn meet(near: (&Daemon, &str), far: (&Daemon, &str)) {
    let ((_a_node, a, a_peer), (_b_node, b, b_peer)) = (near.0.node(near.1), far.0.node(far.1));
    all_operations(&a, &b, a_peer, b_peer);
    all_operations(&b, &a, b_peer, a_peer);
    for (end, peer) in [(&a, b_peer), (&b, a_peer)] {
        assert_eq!(end.attachment(peer), Attachment::Sealed);
    }
    near.0.until("sealed packets", |counters| {
        let SealCounters { sessions, packets_out, packets_in, clear, forged, .. } = counters.seal;
        // But for those that make keys new, all packets are sealed: megabytes in each direction.
        let others = counters.packets_out - packets_out + counters.packets_in - packets_in;
        sessions > 0 && packets_out.min(packets_in) > 100 && others < 20 && (clear, forged) == (0, 0)
    });
}

#[test]
fn the_daemons_engine_seals_as_that_of_a_process_does() {
    let (near, far) = (Daemon::of_sealed(Reach::Sealed), Daemon::of_sealed(Reach::Sealed));
    meet((&near, "daemon"), (&far, "process"));
}

#[test]
fn two_daemons_engines_seal() {
    let (near, far) = (Daemon::of_sealed(Reach::Sealed), Daemon::of_sealed(Reach::Sealed));
    meet((&near, "daemon"), (&far, "daemon"));
}

#[test]
fn keys_of_an_engine_go_to_nobody_else_in_the_container() {
    let (near, far) = (Daemon::of_sealed(Reach::Sealed), Daemon::of_sealed(Reach::Sealed));
    let (_a_node, _a, a_peer) = near.node("daemon");
    let (_b_node, _b, b_peer) = far.node("process");
    let spy = Guest::connect(&near.name).unwrap();
    let ask = |own: SocketAddr| {
        let between = Question { own, peer: b_peer.address };
        let (nonce, peer_nonce) = ([1; 16], [2; 16]);
        let request = KeyRequest { ticket: 7, role: Role::Opener, epoch: None, between, nonce, peer_nonce };
        assert!(spy.say(Message::Key(request)));
        let begin = Instant::now();
        loop {
            if let Some(Heard::Keys(7, answer)) = spy.receive().unwrap() {
                return answer.map(|_| ());
            }
            assert!(begin.elapsed() < PATIENCE);
        }
    };
    let port = a_peer.address.port();
    assert_eq!(ask(a_peer.address), Err(Reach::NotYet));
    assert_eq!(ask(([0, 0, 0, 0], port).into()), Err(Reach::NotYet), "the kernel may choose its address");
    assert_eq!(ask(([10, 0, 0, 1], port).into()), Ok(()), "another address of the container");
    assert_eq!(ask(([127, 0, 0, 1], port ^ 1).into()), Ok(()), "another port");
}

#[test]
fn without_keys_operations_end_and_the_log_says_why() {
    let (near, far) = (Daemon::of_sealed(Reach::Stream), Daemon::of_sealed(Reach::Stream));
    let ((_a_node, a, _), (_b_node, _b, b_peer)) = (near.node("daemon"), far.node("daemon"));
    a.send(b_peer, Span::EMPTY, None, 8).unwrap();
    assert_eq!(wait(&a, Kind::Send).status, Status::Unreachable);
    near.until("packets that were not sent", |counters| counters.seal.unsent > 0);
    assert_eq!((near.counters().packets_out, far.counters().packets_in), (0, 0));
    let notes = near.take_notes();
    assert!(matches!(&notes[..], [((1, 1), line)] if line.contains("TLS stream")), "{notes:?}");
}

#[test]
fn clear_text_from_behind_a_sealed_link_is_dropped() {
    let near = Daemon::of_sealed(Reach::Sealed);
    let (_a_node, a, a_peer) = near.node("daemon");
    let config = Config { dead_after_ns: 2_000_000_000, ..Options::default().config };
    let off = Options { config, seal: Some("off".into()), ..near.options("process") };
    let node = Node::open(&off).unwrap();
    let b = node.endpoint(None).unwrap();
    b.send(a_peer, Span::EMPTY, None, 1).unwrap();
    assert_eq!(wait(&b, Kind::Send).status, Status::Unreachable);
    near.until("clear text that was dropped", |counters| counters.seal.clear > 0);
    assert_eq!(node.process().counters().packets_in, 0, "nothing came back in clear text");
    assert!(a.take().is_none());
}

#[test]
fn sessions_are_renewed_when_the_peer_or_its_daemon_has_restarted() {
    let (near, far) = (Daemon::of_sealed(Reach::Sealed), Daemon::of_sealed(Reach::Sealed));
    let ((_a_node, a, _), (b_node, b, b_peer)) = (near.node("daemon"), far.node("process"));
    talk_until("session", &a, &b, b_peer, || near.counters().seal.sessions == 1);
    // The process meets the other daemon, and opens a session for it.
    let far = far.restart(Reach::Sealed);
    talk_until("new session for the new daemon", &a, &b, b_peer, || near.counters().seal.sessions > 1);
    // A new process at the same address has no keys.
    let before = near.counters().seal.sessions;
    drop((b, b_node));
    let node = Node::open(&Options { bind: b_peer.address.into(), ..far.options("process") }).unwrap();
    let b = node.endpoint(Some(0)).unwrap();
    talk_until("session with the new process", &a, &b, b_peer, || near.counters().seal.sessions > before);
    // The same with an engine of the other daemon.
    drop((b, node));
    let before = near.counters().seal.sessions;
    let node = Node::open(&Options { bind: b_peer.address.into(), ..far.options("daemon") }).unwrap();
    let b = node.endpoint(Some(0)).unwrap();
    talk_until("session with the other daemon", &a, &b, b_peer, || near.counters().seal.sessions > before);
    assert_eq!(near.counters().seal.forged, 0);
}

/// A served process whose daemon and whose peer are the test.
struct Alone {
    room: Room,
    raw: Raw,
    keeper: OwnedFd,
    peer: UdpSocket,
    now: u64,
}

impl Alone {
    fn new() -> Self {
        let mut room = Room::new();
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (keeper, own) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let (ends, served) = service::provide(socket, Config::default(), None, Some(Guest::on(own))).unwrap();
        let total = Total { bytes_max: 1 << 30, bytes: AtomicU64::new(0) };
        room.add((1, 1), ShareSettings::default(), served, Budget::new(1 << 30, Arc::new(total)));
        let Ends { address, memory, bell, .. } = ends;
        let mut raw = Raw::new(address, memory, bell);
        raw.submit(&Submission::Open { ticket: 1, number: Some(0) });
        let peer = UdpSocket::bind("127.0.0.1:0").unwrap();
        peer.set_nonblocking(true).unwrap();
        Self { room, raw, keeper, peer, now: 0 }
    }

    fn address(&self) -> SocketAddr {
        self.peer.local_addr().unwrap()
    }

    /// The process sends an empty message to the peer.
    fn send(&mut self) {
        let (peer, task) = (Peer { address: self.address(), endpoint: 0 }, Task::Message(None));
        let extent = Extent::default();
        self.raw.submit(&Submission::Post { endpoint: 0, peer, task, extent, data: None, context: 1 });
    }

    /// So many turns, 1 ms each. Returns whether the process has gone.
    fn turns(&mut self, count: u64) -> bool {
        (0..count).any(|_| {
            self.now += 1_000_000;
            !self.room.turn(self.now).1.is_empty()
        })
    }

    /// What the peer has received.
    fn received(&self) -> Vec<Vec<u8>> {
        let mut bytes = [0; 65_536];
        std::iter::from_fn(|| self.peer.recv(&mut bytes).ok().map(|len| bytes[..len].to_vec())).collect()
    }

    /// The next question to the daemon.
    fn question(&self) -> Option<Message> {
        let mut bytes = [0; Message::BYTES_MAX];
        let (len, _) = recv(&self.keeper, &mut bytes, RecvFlags::DONTWAIT).ok()?;
        Message::decode(&bytes[..len])
    }

    fn answer(&self, message: Message) {
        let (bytes, len) = message.encode();
        send(&self.keeper, &bytes[..len], SendFlags::NOSIGNAL).unwrap();
    }

    fn reached(&self, reach: Reach) {
        self.answer(Message::Reached(self.address(), reach));
    }
}

#[test]
fn nothing_leaves_in_clear_text_before_the_daemon_says_so() {
    let mut alone = Alone::new();
    let question = Question { own: alone.raw.address, peer: alone.address() };
    alone.send();
    alone.turns(500);
    assert_eq!(alone.received(), [] as [Vec<u8>; 0], "nobody knows how the peer is reached");
    assert_eq!(alone.question(), Some(Message::Reach(question)));
    let is_hidden = |packet: &Vec<u8>| wire::is_sealing(packet);
    for reach in [Reach::NotYet, Reach::Sealed, Reach::Several, Reach::Router, Reach::Foreign, Reach::Stream]
    {
        alone.reached(reach);
        alone.turns(1500);
        assert!(alone.received().iter().all(is_hidden), "{reach}");
        while alone.question().is_some() {}
    }
    alone.reached(Reach::Clear);
    alone.turns(1500);
    assert!(alone.received().iter().any(|packet| Header::decode(packet).is_some()), "a clear link");
}

#[test]
fn the_attachment_ends_with_the_connection_that_gives_keys() {
    let mut alone = Alone::new();
    alone.send();
    assert!(!alone.turns(100));
    rustix::net::shutdown(&alone.keeper, rustix::net::Shutdown::Both).unwrap();
    assert!(alone.turns(100));
    assert_eq!(alone.received(), [] as [Vec<u8>; 0]);
}

#[test]
fn what_is_sealed_has_the_size_that_fits_the_path() {
    const SIZE: usize = 1000;
    let mut alone = Alone::new();
    let (own, address) = (alone.raw.address, alone.address());
    let keys = Keys { epoch: 1, keys: std::array::from_fn::<u8, { 2 * KEY }, _>(|at| at as u8) };
    let mut sealing = Sealing::new(address, false, [9; 32]);
    sealing.connected();
    alone.raw.submit(&Submission::Route { address, bytes: SIZE as u64 });
    alone.send();
    let mut hello = None;
    while hello.is_none() {
        assert!(!alone.turns(1) && alone.now < 5_000_000_000);
        for mut packet in alone.received() {
            assert!(wire::is_sealing(&packet), "{packet:?}");
            let len = packet.len();
            let Some(opened) = sealing.arrive(alone.now, own, &mut packet) else { continue };
            assert!(len <= SIZE && opened.len() == len - OVERHEAD);
            let (Header { body, .. }, _) = Header::decode(opened).unwrap();
            hello = Some(body);
        }
        while let Some(ask) = sealing.next_ask() {
            match ask {
                Message::Key(request) => sealing.keys(alone.now, request.ticket, Ok(keys)),
                _ => sealing.reached(alone.now, own, Reach::Sealed),
            }
        }
        while let Some((_, packet)) = sealing.next_packet() {
            alone.peer.send_to(&packet, own).unwrap();
        }
        while let Some(question) = alone.question() {
            match question {
                Message::Key(request) => alone.answer(Message::Keys(request.ticket, Ok(keys))),
                _ => alone.reached(Reach::Sealed),
            }
        }
    }
    assert!(matches!(hello, Some(Body::Hello(hello)) if usize::from(hello.datagram) == SIZE - OVERHEAD));
}
