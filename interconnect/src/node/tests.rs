//! Nodes of one host, and its daemon's meeting point, in one process.

use std::sync::atomic::AtomicU32;
use std::thread::JoinHandle;

use super::*;
use crate::meeting::{Host, Place, Stopper, listen};
use crate::proto::{Access, Completion, Kind, Match, Peer, Receive, Status};
use crate::{Endpoint, Node, Region};

pub(super) const BOTH: Access = Access { read: true, write: true };
pub(super) const LEN: usize = 3 << 20;

/// A daemon in a thread.
pub(super) struct Daemon {
    stopper: Stopper,
    thread: Option<JoinHandle<()>>,
}

impl Daemon {
    pub(super) fn start(name: &str) -> Self {
        let mut host = Host::new().unwrap();
        // The name is free once a thread has closed the previous daemon's socket.
        let begin = Instant::now();
        let mut listener = loop {
            match listen(name) {
                Ok(listener) => break Some(listener),
                Err(error) if begin.elapsed() > Duration::from_secs(60) => panic!("{error}"),
                Err(_) => std::thread::sleep(Duration::from_millis(1)),
            }
        };
        host.set_places(&[Place { id: (1, 1), networks: vec![1] }], |_| listener.take());
        let stopper = host.stopper();
        let thread = std::thread::spawn(move || {
            while !host.is_stopped() {
                host.turn(Duration::from_secs(60)).unwrap();
            }
        });
        Self { stopper, thread: Some(thread) }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.stopper.stop();
        self.thread.take().unwrap().join().unwrap();
    }
}

/// A name for a daemon's socket that no other test has.
pub(super) fn unique() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("vnet-test-node-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

fn node(bind: &str, meeting: Option<&str>) -> (Node, Endpoint, Peer) {
    let bind = bind.parse().unwrap();
    let options = Options { bind, meeting: meeting.map(Into::into), ..Options::default() };
    let node = Node::open(&options).unwrap();
    let endpoint = node.endpoint(Some(0)).unwrap();
    let peer = Peer { address: node.address(), endpoint: 0 };
    (node, endpoint, peer)
}

pub(super) fn wait(endpoint: &Endpoint, kind: Kind) -> Completion {
    let end = Instant::now() + Duration::from_secs(60);
    while Instant::now() < end {
        if let Some(completion) = endpoint.wait(Some(Duration::from_secs(1))).filter(|c| c.kind == kind) {
            return completion;
        }
    }
    panic!("no {kind:?} in a minute");
}

/// Two nodes with memory.
pub(super) struct Two {
    pub(super) nodes: [Node; 2],
    pub(super) ends: [Endpoint; 2],
    pub(super) regions: [Region; 2],
    pub(super) peers: [Peer; 2],
}

impl Two {
    fn new(meeting: &str) -> Self {
        Self::at(["127.0.0.1:0"; 2], Some(meeting))
    }

    /// Nodes that are bound to these places.
    pub(super) fn at(binds: [&str; 2], meeting: Option<&str>) -> Self {
        let [(a, a_end, a_peer), (b, b_end, b_peer)] = binds.map(|bind| node(bind, meeting));
        let regions = [&a_end, &b_end].map(|end| Region::new(end, 2 * LEN, BOTH).unwrap());
        Self { nodes: [a, b], ends: [a_end, b_end], regions, peers: [a_peer, b_peer] }
    }

    /// The daemon goes in the middle of a long message, which arrives.
    pub(super) fn outlives(&self, daemon: Daemon) {
        let [from, to] = &self.ends;
        to.receive(self.regions[1].span(0, LEN).unwrap(), 1).unwrap();
        from.send(self.peers[1], self.regions[0].span(0, LEN).unwrap(), None, 2).unwrap();
        drop(daemon);
        assert_eq!(wait(to, Kind::Receive).status, Status::Success);
        assert_eq!(wait(from, Kind::Send).status, Status::Success);
    }

    /// A message of `len` bytes from the first to the second.
    pub(super) fn message(&self, len: usize, seed: u8) -> Status {
        let bytes: Vec<u8> = (0..len).map(|place| (place * 13 + place / 255) as u8 ^ seed).collect();
        self.regions[0].fill(0, &bytes).unwrap();
        self.ends[1].receive(self.regions[1].span(LEN, LEN).unwrap(), 7).unwrap();
        self.ends[0].send(self.peers[1], self.regions[0].span(0, len).unwrap(), None, 8).unwrap();
        let received = wait(&self.ends[1], Kind::Receive);
        assert_eq!((received.status, received.len), (Status::Success, len as u64));
        let mut arrived = vec![0; len];
        self.regions[1].copy_to(LEN, &mut arrived).unwrap();
        assert!(arrived == bytes, "message of {len} bytes");
        wait(&self.ends[0], Kind::Send).status
    }

    /// Writes `len` bytes into the second's memory, and reads them back.
    pub(super) fn to_and_fro(&self, len: usize) {
        let [local, remote] = &self.regions;
        let (span, key) = (local.span(0, len).unwrap(), remote.key());
        self.ends[0].write(self.peers[1], span, (key, 0), Some(5), 0).unwrap();
        assert_eq!(wait(&self.ends[1], Kind::Arrival).len, len as u64);
        assert_eq!(wait(&self.ends[0], Kind::Write).status, Status::Success);
        let back = local.span(LEN, len).unwrap();
        self.ends[0].read(self.peers[1], back, (key, 0), 0).unwrap();
        assert_eq!(wait(&self.ends[0], Kind::Read).status, Status::Success);
        let (mut sent, mut read) = (vec![0; len], vec![1; len]);
        local.copy_to(0, &mut sent).unwrap();
        local.copy_to(LEN, &mut read).unwrap();
        assert!(sent == read, "{len} bytes to and fro");
    }

    /// Writes into the second's memory, `rounds` times; `cut` disturbs the way of each write.
    pub(super) fn writes_outlive(&self, rounds: u8, cut: impl Fn(u8)) {
        let (span, key) = (self.regions[0].span(0, LEN).unwrap(), self.regions[1].key());
        for round in 0..rounds {
            let bytes: Vec<u8> = (0..LEN).map(|place| (place * 7 + place / 255) as u8 ^ round).collect();
            self.regions[0].fill(0, &bytes).unwrap();
            self.ends[0].write(self.peers[1], span, (key, 0), None, 0).unwrap();
            cut(round);
            assert_eq!(wait(&self.ends[0], Kind::Write).status, Status::Success);
            let mut arrived = vec![0; LEN];
            self.regions[1].copy_to(0, &mut arrived).unwrap();
            assert!(arrived == bytes, "round {round}");
        }
    }

    /// Exchanges messages until both nodes say that they use this way.
    pub(super) fn until(&self, attachment: Attachment) {
        let begin = Instant::now();
        let is = |from: usize| self.ends[from].attachment(self.peers[1 - from]) == attachment;
        while !(is(0) && is(1)) {
            assert!(begin.elapsed() < Duration::from_secs(60), "no {attachment} in a minute");
            assert_eq!(self.message(8, 1), Status::Success);
        }
    }
}

#[test]
fn nodes_of_one_host_use_a_ring_by_themselves() {
    let name = unique();
    let _daemon = Daemon::start(&name);
    let two = Two::new(&name);
    two.until(Attachment::SameHost);
    let packets_out = |node: &Node| (node.process().counters().packets_out, node.ring_counters().packets_out);
    let before = packets_out(&two.nodes[0]);
    for (seed, len) in [0, 1, 8, 1500, 16_384, 16_385, 65_507, 1 << 20, LEN].into_iter().enumerate() {
        assert_eq!(two.message(len, seed as u8), Status::Success);
    }
    for len in [8, 16_385, LEN] {
        two.to_and_fro(len);
    }
    let (wrong, remote) = (two.regions[0].span(0, 8).unwrap(), &two.regions[1]);
    two.ends[0].write(two.peers[1], wrong, (remote.key() ^ 1, 0), None, 0).unwrap();
    assert_eq!(wait(&two.ends[0], Kind::Write).status, Status::BadKey);
    let after = packets_out(&two.nodes[0]);
    let counters = two.nodes[0].ring_counters();
    assert_eq!((counters.rings, counters.opened, counters.ended, counters.broken), (1, 1, 0, 0));
    assert_eq!(
        after.0 - before.0,
        after.1 - before.1 + counters.full,
        "all packets took the ring: {counters:?}"
    );
}

#[test]
fn operations_go_on_by_udp_when_the_daemon_goes_and_by_a_ring_when_it_returns() {
    let name = unique();
    let daemon = Daemon::start(&name);
    let two = Two::new(&name);
    two.until(Attachment::SameHost);
    two.outlives(daemon);
    two.until(Attachment::Udp);
    assert_eq!(two.message(LEN, 9), Status::Success);
    let _daemon = Daemon::start(&name);
    two.until(Attachment::SameHost);
    assert_eq!(two.message(LEN, 10), Status::Success);
    assert!(two.nodes[0].ring_counters().ended >= 1);
}

#[test]
fn a_peer_that_damages_the_ring_loses_it_and_nothing_else() {
    let name = unique();
    let _daemon = Daemon::start(&name);
    let two = Two::new(&name);
    two.until(Attachment::SameHost);
    // Head of the lane from node 0 to node 1, or the other way round.
    for offset in [0, 64 << 10] {
        two.nodes[0].process().shared.inner.lock().local.scribble(offset, &u64::MAX.to_ne_bytes());
    }
    // The readers look before a writer puts its own position there again.
    assert!(two.ends.iter().all(|end| end.poll().is_none()));
    assert_eq!(two.message(LEN, 1), Status::Success);
    let broken = two.nodes.each_ref().map(|node| node.ring_counters().broken);
    assert!(broken.iter().sum::<u64>() >= 1, "{broken:?}");
}

/// The peer rings the bell of a thread that sleeps, and of an application that sleeps on the endpoint's descriptor.
#[test]
fn sleepers_are_woken_by_the_bell() {
    let name = unique();
    let _daemon = Daemon::start(&name);
    let two = Two::new(&name);
    two.until(Attachment::SameHost);
    let [from, to] = &two.ends;
    let begin = Instant::now();
    for round in 0..20 {
        to.receive(two.regions[1].span(0, 8).unwrap(), round).unwrap();
        std::thread::scope(|scope| {
            let sleeper = scope.spawn(|| to.wait(Some(Duration::from_secs(60))));
            std::thread::sleep(Duration::from_millis(10));
            from.send(two.peers[1], two.regions[0].span(0, 8).unwrap(), None, 0).unwrap();
            assert_eq!(sleeper.join().unwrap().unwrap().context, round);
        });
        assert_eq!(wait(from, Kind::Send).status, Status::Success);
    }
    let descriptor = to.descriptor().unwrap();
    for round in 0..20 {
        let span = two.regions[1].span(0, 8).unwrap();
        to.post_receive(&Receive { matching: Match::default(), span, context: round, several: None })
            .unwrap();
        while to.poll().is_some() {}
        to.pause(Duration::ZERO);
        from.send(two.peers[1], two.regions[0].span(0, 8).unwrap(), None, 0).unwrap();
        let received = loop {
            wait_readable(&[descriptor], Some(1_000_000_000));
            if let Some(completion) = to.poll() {
                break completion;
            }
            to.pause(Duration::ZERO);
            assert!(begin.elapsed() < Duration::from_secs(60));
        };
        assert_eq!((received.kind, received.context), (Kind::Receive, round));
        assert_eq!(wait(from, Kind::Send).status, Status::Success);
    }
    assert!(begin.elapsed() < Duration::from_secs(30), "no wake-up was lost");
}

#[test]
fn without_a_daemon_all_packets_take_the_socket() {
    let two = Two::new(&unique());
    assert_eq!(two.message(LEN, 1), Status::Success);
    two.until(Attachment::Udp);
    assert_eq!(two.nodes[0].ring_counters(), RingCounters::default());
}

#[test]
fn large_writes_take_one_copy_until_the_region_is_deregistered() {
    let name = unique();
    let _daemon = Daemon::start(&name);
    let two = Two::new(&name);
    two.until(Attachment::SameHost);
    let [local, remote] = &two.regions;
    let (from, peer, key) = (&two.ends[0], two.peers[1], remote.key());
    let write = |at: usize, data| {
        from.write(peer, local.span(0, LEN).unwrap(), (key, at as u64), data, 0).unwrap();
        wait(from, Kind::Write).status
    };
    let begin = Instant::now();
    while two.nodes[0].ring_counters().placed == 0 {
        assert_eq!(write(0, None), Status::Success);
        assert!(begin.elapsed() < Duration::from_secs(60), "not lent in a minute");
    }
    let content: Vec<u8> = (0..LEN).map(|place| (place * 3 + place / 999) as u8).collect();
    local.fill(0, &content).unwrap();
    let before = two.nodes[0].ring_counters();
    assert_eq!(write(77, Some(5)), Status::Success);
    assert_eq!(wait(&two.ends[1], Kind::Arrival).len, LEN as u64);
    let after = two.nodes[0].ring_counters();
    assert_eq!(after.placed, before.placed + 1);
    assert!(after.packets_out - before.packets_out < 10, "the bytes did not take the lane");
    let arrived = |at: usize| {
        let mut bytes = vec![0; LEN];
        remote.copy_to(at, &mut bytes).unwrap();
        bytes == content
    };
    assert!(arrived(77));
    assert_eq!(write(LEN + 1, None), Status::BadKey, "behind the end");
    two.ends[1].deregister(key).unwrap();
    local.fill(0, &vec![9; LEN]).unwrap();
    assert!(two.nodes[0].process().shared.inner.lock().local.write_lent(key, local.span(0, LEN).unwrap()));
    assert!(arrived(77), "the peer's mapping leads elsewhere");
    assert_eq!(write(0, None), Status::BadKey);
    assert!(arrived(77) && two.nodes[1].ring_counters().rings == 1);
}

#[test]
fn a_region_that_peers_may_only_write_is_not_lent() {
    let name = unique();
    let _daemon = Daemon::start(&name);
    let two = Two::new(&name);
    two.until(Attachment::SameHost);
    let remote = Region::new(&two.ends[1], LEN, Access { read: false, write: true }).unwrap();
    for _ in 0..20 {
        let span = two.regions[0].span(0, LEN).unwrap();
        two.ends[0].write(two.peers[1], span, (remote.key(), 0), None, 0).unwrap();
        assert_eq!(wait(&two.ends[0], Kind::Write).status, Status::Success);
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(two.nodes[0].ring_counters().placed, 0);
}
