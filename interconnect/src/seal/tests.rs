//! Two nodes' sealing, their daemons, and a network in between, without sockets.

use super::session::Session;
use super::*;
use chacha20::rand_core::Rng;

use crate::meeting::{KEY, KeyRequest, Keys};

const MS: u64 = 1_000_000;
const A: &str = "10.0.0.1:7000";
const B: &str = "10.0.0.2:7000";

fn address(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

/// What both daemons know: the link's keys by epoch, the epoch that is current, and how peers are reached.
#[derive(Clone, Copy)]
struct Daemon {
    reach: Reach,
    epoch: u8,
}

impl Daemon {
    /// Keys as vnetd derives them: from everything that names the session.
    fn keys(&self, request: &KeyRequest) -> Result<Keys, Reach> {
        if self.reach != Reach::Sealed {
            return Err(self.reach);
        }
        let epoch = request.epoch.unwrap_or(self.epoch);
        let Question { own, peer } = request.between;
        let mut ends = [(own, request.nonce), (peer, request.peer_nonce)];
        if request.role == Role::Answerer {
            ends.reverse();
        }
        let text = format!("{epoch} {ends:?}");
        let mut state = 0xcbf2_9ce4_8422_2325_u64;
        let mut keys = [0; 2 * KEY];
        for (place, byte) in keys.iter_mut().enumerate() {
            for letter in text.bytes().chain([place as u8]) {
                state = (state ^ u64::from(letter)).wrapping_mul(0x0100_0000_01b3);
            }
            *byte = (state >> 32) as u8;
        }
        Ok(Keys { epoch, keys })
    }
}

struct Node {
    at: SocketAddr,
    sealing: Sealing,
    daemon: Daemon,
    inbox: VecDeque<(SocketAddr, Vec<u8>)>,
    /// Packets of the protocol that arrived.
    arrived: Vec<Vec<u8>>,
    /// What left the node.
    wire: Vec<Vec<u8>>,
}

impl Node {
    fn new(at: &str, seed: u8, reach: Reach) -> Self {
        let at = address(at);
        let mut sealing = Sealing::new(at, false, [seed; 32]);
        sealing.connected();
        let daemon = Daemon { reach, epoch: 1 };
        Self { at, sealing, daemon, inbox: VecDeque::new(), arrived: vec![], wire: vec![] }
    }

    fn notes(&mut self) -> Vec<String> {
        std::iter::from_fn(|| self.sealing.next_note()).collect()
    }
}

struct World {
    now: u64,
    nodes: [Node; 2],
    /// Packets that the network drops from now on.
    loses: usize,
}

impl World {
    fn new(reach: Reach) -> Self {
        Self { now: MS, nodes: [Node::new(A, 1, reach), Node::new(B, 2, reach)], loses: 0 }
    }

    fn carry(&mut self, from: usize, to: SocketAddr, packet: Vec<u8>) {
        self.nodes[from].wire.push(packet.clone());
        if self.loses > 0 {
            self.loses -= 1;
            return;
        }
        let at = self.nodes[from].at;
        if let Some(node) = self.nodes.iter_mut().find(|node| node.at == to) {
            node.inbox.push_back((at, packet));
        }
    }

    /// Sends a packet of the protocol. Returns whether it left.
    fn send(&mut self, from: usize, to: usize, text: &[u8]) -> bool {
        let (now, to) = (self.now, self.nodes[to].at);
        let packet = match self.nodes[from].sealing.depart(now, to, text, Span::EMPTY) {
            Way::Clear => text.to_vec(),
            Way::Sealed(session) => {
                let mut packet = vec![];
                session.seal(&mut packet, text, Span::EMPTY);
                packet
            }
            Way::Held => return false,
        };
        self.carry(from, to, packet);
        true
    }

    /// Delivers everything, and has the daemons answer.
    fn settle(&mut self) {
        loop {
            let mut is_quiet = true;
            for place in 0..2 {
                let now = self.now;
                let node = &mut self.nodes[place];
                while let Some(ask) = node.sealing.next_ask() {
                    is_quiet = false;
                    match ask {
                        Message::Reach(question) => {
                            node.sealing.reached(now, question.peer, node.daemon.reach);
                        }
                        Message::Key(request) => {
                            node.sealing.keys(now, request.ticket, node.daemon.keys(&request));
                        }
                        other => panic!("{other:?}"),
                    }
                }
                while let Some((from, mut packet)) = node.inbox.pop_front() {
                    is_quiet = false;
                    let arrived = node.sealing.arrive(now, from, &mut packet).map(|packet| packet.to_vec());
                    node.arrived.extend(arrived);
                }
                let out: Vec<_> = std::iter::from_fn(|| node.sealing.next_packet()).collect();
                for (to, packet) in out {
                    is_quiet = false;
                    self.carry(place, to, packet);
                }
            }
            if is_quiet {
                return;
            }
        }
    }

    /// Sends a packet again and again until it arrives, as the protocol does.
    fn exchange(&mut self, from: usize, to: usize, text: &[u8]) {
        for _ in 0..200 {
            self.send(from, to, text);
            self.settle();
            self.now += 5 * MS;
            if self.nodes[to].arrived.pop().is_some_and(|arrived| arrived == text) {
                return;
            }
        }
        panic!("nothing arrives");
    }

    fn sessions(&mut self, of: usize) -> &mut Vec<Session> {
        let peer = self.nodes[1 - of].at;
        self.nodes[of].sealing.peers.get_mut(&peer).unwrap().sessions()
    }

    /// Whether this was seen on the way.
    fn shows(&self, text: &[u8]) -> bool {
        let mut wire = self.nodes.iter().flat_map(|node| &node.wire);
        wire.any(|packet| packet.windows(text.len()).any(|window| window == text))
    }
}

const TEXT: &[u8] = b"\x15 a secret of the application";

#[test]
fn packets_to_a_sealed_peer_are_sealed_from_the_first_on() {
    let mut world = World::new(Reach::Sealed);
    world.exchange(0, 1, TEXT);
    world.exchange(1, 0, TEXT);
    assert!(!world.shows(TEXT));
    for node in &mut world.nodes {
        let SealCounters { sessions, packets_out, packets_in, clear, forged, replayed, unknown, .. } =
            node.sealing.counters();
        assert_eq!((sessions, packets_out, packets_in), (1, 1, 1));
        assert_eq!((clear, forged, replayed, unknown), (0, 0, 0, 0));
        assert_eq!(node.notes(), Vec::<String>::new());
    }
    assert!(world.nodes.iter_mut().all(|node| node.sealing.next_ready().is_some()));
}

#[test]
fn packets_to_a_clear_peer_are_left_as_they_are() {
    let mut world = World::new(Reach::Clear);
    assert!(!world.send(0, 1, TEXT), "it waits for the daemon");
    world.settle();
    assert_eq!(world.nodes[1].arrived, [TEXT], "and is not lost");
    assert!(world.send(0, 1, TEXT));
    assert_eq!(world.nodes[0].wire, [TEXT, TEXT], "nothing else was sent");
    let mut alone = Sealing::new(address(A), false, [1; 32]);
    assert!(matches!(alone.depart(MS, address(B), TEXT, Span::EMPTY), Way::Clear), "no daemon");
}

#[test]
fn where_no_link_is_sealed_the_daemon_is_asked_once_a_minute() {
    let mut world = World::new(Reach::AllClear);
    world.send(0, 1, TEXT);
    world.settle();
    assert_eq!(world.nodes[1].arrived, [TEXT]);
    let Node { sealing, .. } = &mut world.nodes[0];
    for round in 0..10 {
        for number in 0..200u8 {
            let to = SocketAddr::new([10, 2, 0, number].into(), 7000);
            assert!(matches!(sealing.depart(world.now, to, TEXT, Span::EMPTY), Way::Clear), "none waits");
        }
        let asks = std::iter::from_fn(|| sealing.next_ask()).count();
        assert_eq!(asks > 0, round > 0);
        sealing.reached(world.now, address(B), Reach::AllClear);
        sealing.reached(world.now, SocketAddr::new([10, 2, 0, 0].into(), 7000), Reach::AllClear);
        world.now += LOOK_AGAIN_NS;
    }
    // A link becomes sealed.
    world.nodes.iter_mut().for_each(|node| node.daemon.reach = Reach::Sealed);
    world.exchange(0, 1, TEXT);
    world.exchange(1, 0, TEXT);
    world.exchange(0, 1, TEXT);
    assert!(world.nodes[0].sealing.is_sealed(address(B)));
}

#[test]
fn lost_handshakes_are_repeated() {
    for loses in 1..8 {
        let mut world = World::new(Reach::Sealed);
        world.loses = loses;
        world.exchange(0, 1, TEXT);
        world.exchange(1, 0, TEXT);
        assert!(!world.shows(TEXT));
    }
}

#[test]
fn both_may_open_at_once() {
    let mut world = World::new(Reach::Sealed);
    assert!(!world.send(0, 1, TEXT) && !world.send(1, 0, TEXT));
    for _ in 0..3 {
        world.exchange(0, 1, TEXT);
        world.exchange(1, 0, TEXT);
    }
    assert!(world.nodes.iter().all(|node| node.sealing.counters().unknown == 0));
}

#[test]
fn clear_text_of_a_sealed_peer_is_refused() {
    let mut world = World::new(Reach::Sealed);
    world.exchange(0, 1, TEXT);
    let (from, to) = (world.nodes[0].at, world.nodes[1].at);
    world.carry(0, to, b"\x15 forged".to_vec());
    world.settle();
    assert!(world.nodes[1].arrived.is_empty());
    assert_eq!(world.nodes[1].sealing.counters().clear, 1);
    assert!(world.nodes[1].sealing.is_sealed(from));
    world.exchange(0, 1, TEXT);
}

#[test]
fn replayed_and_changed_packets_are_refused() {
    let mut world = World::new(Reach::Sealed);
    world.exchange(0, 1, TEXT);
    let packet = world.nodes[0].wire.last().unwrap().clone();
    let (mut changed, to) = (packet.clone(), world.nodes[1].at);
    changed[15] ^= 64;
    world.carry(0, to, packet);
    world.carry(0, to, changed);
    world.settle();
    let counters = world.nodes[1].sealing.counters();
    assert_eq!((counters.replayed, counters.forged, world.nodes[1].arrived.len()), (1, 1, 0));
}

#[test]
fn a_restarted_peer_gets_new_keys() {
    let mut world = World::new(Reach::Sealed);
    world.exchange(0, 1, TEXT);
    world.exchange(1, 0, TEXT);
    let old = world.nodes[0].wire.last().unwrap().clone();
    world.nodes[1] = Node::new(B, 3, Reach::Sealed);
    world.exchange(0, 1, TEXT);
    world.exchange(1, 0, TEXT);
    let to = world.nodes[1].at;
    world.carry(0, to, old);
    world.settle();
    assert!(world.nodes[1].arrived.is_empty(), "packets of the former life have no key");
}

#[test]
fn worn_keys_are_replaced_without_loss() {
    let mut world = World::new(Reach::Sealed);
    world.exchange(0, 1, TEXT);
    for round in 0..10 {
        // The link has new keys, too, and the daemons learn that one after the other.
        world.nodes[round % 2].daemon.epoch = (round / 2 % 4) as u8;
        let side = round % 2;
        world.sessions(side).last_mut().unwrap().wear(false);
        for _ in 0..5 {
            for from in [side, 1 - side] {
                assert!(world.send(from, 1 - from, TEXT), "the old keys serve meanwhile");
                world.settle();
                assert!(world.nodes[1 - from].arrived.pop().is_some(), "none is lost");
                world.now += MS;
            }
        }
        let sessions = world.nodes.each_ref().map(|node| node.sealing.counters().sessions);
        assert_eq!(sessions, [round as u64 + 2; 2]);
        assert!(world.sessions(side).len() <= 4);
    }
}

#[test]
fn spent_keys_seal_nothing() {
    let mut world = World::new(Reach::Sealed);
    world.exchange(0, 1, TEXT);
    world.sessions(0).last_mut().unwrap().wear(true);
    assert!(!world.send(0, 1, TEXT));
    world.exchange(0, 1, TEXT);
    world.now += 3 * 3_600_000 * MS;
    assert!(!world.send(0, 1, TEXT), "too old");
    world.exchange(0, 1, TEXT);
    assert!(!world.shows(TEXT));
}

#[test]
fn daemons_of_other_opinions_let_nothing_through() {
    // Another network or another link: other keys.
    let mut world = World::new(Reach::Sealed);
    world.nodes[1].daemon.epoch = 2;
    world.send(0, 1, TEXT);
    world.settle();
    let wrong = Keys { epoch: 2, keys: [9; 2 * KEY] };
    let (a, b) = (world.nodes[0].at, world.nodes[1].at);
    let session = Session::new(&wrong, Role::Opener, (1, world.sessions(1)[0].id), world.now);
    world.nodes[0].sealing.peer(0, b).add(session);
    for _ in 0..5 {
        assert!(world.send(0, 1, TEXT));
    }
    world.settle();
    assert!(world.nodes[1].arrived.is_empty() && world.nodes[1].sealing.counters().forged > 0);
    assert!(world.nodes[1].sealing.is_sealed(a));
    // One says clear, the other one sealed.
    let mut world = World::new(Reach::Sealed);
    world.nodes[0].daemon.reach = Reach::Clear;
    for _ in 0..20 {
        world.send(0, 1, TEXT);
        world.send(1, 0, TEXT);
        world.settle();
        world.now += 200 * MS;
    }
    assert!(world.nodes[0].arrived.is_empty());
    assert!(world.nodes[0].notes().concat().contains("takes only sealed packets"));
}

#[test]
fn without_keys_nothing_is_sent_and_one_line_says_why() {
    for reach in [Reach::Stream, Reach::Router, Reach::Foreign, Reach::Several] {
        let mut world = World::new(reach);
        for _ in 0..10 {
            world.send(0, 1, TEXT);
            world.settle();
            world.now += 500 * MS;
        }
        assert!(world.nodes[0].wire.is_empty(), "{reach:?}");
        let notes = world.nodes[0].notes();
        assert_eq!(notes.len(), 1, "{notes:?}");
        assert!(
            notes[0].contains(&reach.to_string()) && notes[0].contains("VNET_RDMA_SEAL=off"),
            "{notes:?}"
        );
        assert!(world.nodes[0].sealing.counters().unsent > 0);
        // The configuration changes.
        world.nodes.iter_mut().for_each(|node| node.daemon.reach = Reach::Sealed);
        world.now += 2000 * MS;
        world.exchange(0, 1, TEXT);
        assert!(!world.shows(TEXT));
    }
}

#[test]
fn a_link_may_become_sealed_and_clear_again() {
    let mut world = World::new(Reach::Clear);
    world.exchange(0, 1, TEXT);
    world.exchange(1, 0, TEXT);
    let set = |world: &mut World, reach| world.nodes.iter_mut().for_each(|node| node.daemon.reach = reach);
    set(&mut world, Reach::Sealed);
    world.now += 2 * LOOK_AGAIN_NS;
    world.exchange(0, 1, TEXT);
    world.exchange(1, 0, TEXT);
    assert!(world.nodes.iter().all(|node| node.sealing.counters().sessions == 1));
    set(&mut world, Reach::Clear);
    world.now += 3 * 3_600_000 * MS;
    for _ in 0..3 {
        world.exchange(0, 1, TEXT);
        world.exchange(1, 0, TEXT);
        world.now += 2 * DOUBT_NS;
    }
}

#[test]
fn who_wants_clear_text_is_told_that_the_peer_does_not() {
    let mut world = World::new(Reach::Sealed);
    world.nodes[0].sealing = Sealing::new(address(A), true, [1; 32]);
    world.nodes[0].sealing.connected();
    world.send(1, 0, TEXT);
    world.settle();
    assert!(world.send(0, 1, TEXT));
    world.settle();
    assert!(world.nodes[1].arrived.is_empty());
    assert!(world.nodes[0].notes().concat().contains("unset VNET_RDMA_SEAL"));
    for _ in 0..20 {
        world.now += 500 * MS;
        world.send(1, 0, TEXT);
        world.settle();
    }
    assert!(world.nodes[1].notes().concat().contains("does not answer in sealed packets"));
    assert!(world.nodes[0].arrived.is_empty());
}

#[test]
fn a_daemon_that_cannot_answer_is_given_up() {
    let mut sealing = Sealing::new(address(A), false, [1; 32]);
    for _ in 0..2 {
        sealing.connected();
        assert!(matches!(sealing.depart(MS, address(B), TEXT, Span::EMPTY), Way::Held));
        assert!(sealing.next_ask().is_some());
        sealing.disconnected();
    }
    assert_eq!(sealing.next_packet().map(|(_, packet)| packet), Some(TEXT.to_vec()));
    assert!(matches!(sealing.depart(MS, address(B), TEXT, Span::EMPTY), Way::Clear));
    sealing.connected();
    assert!(matches!(sealing.depart(MS, address(B), TEXT, Span::EMPTY), Way::Clear));
}

#[test]
fn a_restarted_daemon_is_asked_again() {
    let mut world = World::new(Reach::Sealed);
    world.exchange(0, 1, TEXT);
    let sealing = &mut world.nodes[0].sealing;
    assert!(!world.nodes[0].daemon.reach.eq(&Reach::Clear));
    let stranger = address("10.0.0.9:1");
    assert!(matches!(sealing.depart(MS, stranger, TEXT, Span::EMPTY), Way::Held));
    assert!(sealing.next_ask().is_some());
    sealing.disconnected();
    assert!(matches!(sealing.depart(MS, stranger, TEXT, Span::EMPTY), Way::Held));
    sealing.connected();
    assert!(matches!(sealing.depart(MS, stranger, TEXT, Span::EMPTY), Way::Held));
    assert!(sealing.next_ask().is_some());
    assert!(world.send(0, 1, TEXT), "sessions stay");
}

/// A daemon has the kernel forward packets only of sessions that it knows.
#[test]
fn a_restarted_daemon_learns_of_sessions_by_new_ones() {
    let mut world = World::new(Reach::Sealed);
    world.exchange(0, 1, TEXT);
    let sessions = |world: &World| world.nodes.each_ref().map(|node| node.sealing.counters().sessions);
    assert_eq!(sessions(&world), [1, 1]);
    world.nodes[0].sealing.disconnected();
    world.exchange(0, 1, TEXT);
    assert_eq!(sessions(&world), [1, 1], "without a daemon there are no keys");
    world.nodes[0].sealing.connected();
    let now = world.now;
    world.nodes[0].sealing.renew_sessions(now);
    world.settle();
    assert_eq!(sessions(&world), [2, 2], "without a packet to send");
    for _ in 0..3 {
        world.exchange(0, 1, TEXT);
        world.exchange(1, 0, TEXT);
    }
    assert_eq!(sessions(&world), [2, 2]);
    assert_eq!(world.nodes.each_ref().map(|node| node.sealing.counters().unsent), [0, 0]);
}

/// The peer's daemon is away, so there is no new session, but the old one still serves.
#[test]
fn nothing_is_said_about_a_peer_whose_packets_arrive() {
    let mut world = World::new(Reach::Sealed);
    world.exchange(0, 1, TEXT);
    world.nodes[1].sealing.disconnected();
    world.nodes[0].sealing.connected();
    world.nodes[1].daemon.reach = Reach::NotYet;
    for _ in 0..40 {
        world.exchange(0, 1, TEXT);
        world.now += 500 * MS;
    }
    assert_eq!(world.nodes[0].notes(), Vec::<String>::new());
}

#[test]
fn strangers_cost_little() {
    let mut sealing = Sealing::new(address(A), false, [1; 32]);
    sealing.connected();
    for number in 0..10_000u32 {
        let from = SocketAddr::new([10, 1, (number >> 8) as u8, number as u8].into(), 7000);
        let mut open = Control::Open { id: number, nonce: [3; 16] }.encode();
        assert!(sealing.arrive(MS, from, &mut open).is_none());
        let mut sealed = [&[0x20, 0, 0, 0][..], &number.to_be_bytes(), &[0; 40]].concat();
        assert!(sealing.arrive(MS, from, &mut sealed).is_none());
    }
    assert!(sealing.peers.len() <= 1 && sealing.asks.len() <= 1 && sealing.packets.len() <= 2);
    for number in 0..10_000u32 {
        let from = SocketAddr::new([10, 1, (number >> 8) as u8, number as u8].into(), 7000);
        let mut open = Control::Open { id: number, nonce: [3; 16] }.encode();
        sealing.arrive(u64::from(number) * 2 * MS, from, &mut open);
    }
    assert!(sealing.peers.len() <= BOUNDS.peers && sealing.asks.len() <= ASKS_MAX);
}

#[test]
fn control_packets_are_read_as_they_are_written() {
    for control in [
        Control::Open { id: 0x0102_0304, nonce: [5; 16] },
        Control::Agree { to: 1, id: u32::MAX, epoch: 3, nonce: [6; 16] },
        Control::Ask { id: 7 },
    ] {
        let bytes = control.encode();
        assert!(wire::is_sealing(&bytes));
        assert_eq!(Control::decode(&bytes), Some(control));
        assert_eq!(Control::decode(&bytes[..bytes.len() - 1]), None);
        assert_eq!(Control::decode(&[&bytes[..], &[0]].concat()), None);
    }
}

/// The fuzz target's rules hold for its corpus, cut and changed anywhere, too.
#[test]
fn scripts_of_the_corpus_hold_the_rules() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../fuzz/corpus/sealing");
    let mut random = ChaCha20Rng::from_seed([4; 32]);
    for file in std::fs::read_dir(folder).unwrap() {
        let script = std::fs::read(file.unwrap().path()).unwrap();
        fuzz::run(&script);
        for _ in 0..500 {
            let mut changed = script.repeat(2);
            for _ in 0..4 {
                let place = random.next_u32() as usize % changed.len();
                changed[place] = random.next_u32() as u8;
            }
            fuzz::run(&changed[..random.next_u32() as usize % changed.len()]);
        }
    }
    for _ in 0..500 {
        // Short steps, without packets, in any order.
        let steps: Vec<u8> = (0..60).map(|_| random.next_u32() as u8 | 2).collect();
        fuzz::run(&steps);
    }
}

#[test]
fn packets_in_parts_survive_any_network() {
    let mut state = 1u64;
    let mut random = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 33) as u8
    };
    for _ in 0..500 {
        let script: Vec<u8> = (0..400).map(|_| random()).collect();
        fuzz::run_parts(&script);
    }
}
