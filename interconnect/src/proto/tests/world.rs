//! A simulated network with loss, duplication, delay, reordering and a rate limit, a simulated clock, and engines with their
//! memory.

use std::collections::{BTreeMap, VecDeque};
use std::net::{Ipv4Addr, SocketAddr};

use super::random::mix;
use crate::proto::{
    Access, Completion, Config, Departure, Engine, Match, Outgoing, Peer, PostError, Receive, Shape, Span,
    Status,
};
use crate::ring::{Provided, Ring, WINDOW_BYTES, provide};

/// Properties of the network: probabilities of packet events in parts per million, and delays.
#[derive(Clone, Copy)]
pub struct Network {
    pub lost: u64,
    pub twice: u64,
    /// Packets delayed by up to `late_ns` more than the other packets, which overtake them.
    pub late: u64,
    pub late_ns: u64,
    pub delay_ns: u64,
    /// Time per byte on the link into a host, in thousandths of a nanosecond; 0 means no rate limit.
    pub byte_ps: u64,
}

pub const CLEAN: Network = Network { lost: 0, twice: 0, late: 0, late_ns: 0, delay_ns: 5_000, byte_ps: 0 };

pub struct Node {
    pub engine: Engine,
    /// Memory of the node. It is never resized because spans point into it.
    pub memory: Vec<u8>,
    /// Time at which the link into the host becomes idle.
    busy_until: u64,
}

pub struct World {
    pub now: u64,
    pub nodes: Vec<Node>,
    pub network: Network,
    random: u64,
    /// Packets in flight by arrival time and number: destination, source, bytes.
    flying: BTreeMap<(u64, u64), (usize, usize, Vec<u8>)>,
    sent: u64,
    /// Hosts whose packets the network drops.
    pub cut: Vec<bool>,
    /// Both ends of the ring between nodes 0 and 1, if they have one.
    rings: Option<[Ring; 2]>,
    /// The nodes have had a ring. Packets cut for it may be sent again by the network.
    had_rings: bool,
    /// Number of packets that rings have carried.
    pub ring_packets: u64,
    /// Packets in the streams between nodes 0 and 1, by the node that sends.
    streams: [Option<VecDeque<Vec<u8>>>; 2],
    /// Whether nodes that are invited to a stream connect.
    pub connects: bool,
    /// Number of packets that streams have carried.
    pub stream_packets: u64,
    /// Nodes can send packets in parts; how many each has sent.
    has_parts: bool,
    /// Largest datagram.
    datagram: usize,
    pub parted: Vec<u64>,
}

/// Packets after which a stream has no room.
const STREAM_ROOM: usize = 4;

pub const MEMORY: usize = 8 << 20;

fn address(node: usize) -> SocketAddr {
    SocketAddr::from((Ipv4Addr::new(10, 0, 0, node as u8 + 1), 7000))
}

fn seed_from(random: &mut u64) -> [u8; 32] {
    std::array::from_fn(|_| mix(random) as u8)
}

impl World {
    pub fn new(nodes: usize, config: &Config, network: Network, seed: u64) -> Self {
        let mut random = seed;
        let nodes: Vec<Node> = (0..nodes)
            .map(|node| {
                let mut engine = Engine::new(config.clone(), 1, seed_from(&mut random));
                assert_eq!(engine.open(None), Ok(0), "node {node}");
                Node { engine, memory: vec![0; MEMORY], busy_until: 0 }
            })
            .collect();
        let cut = vec![false; nodes.len()];
        let (flying, rings, parted) = (BTreeMap::new(), None, vec![0; nodes.len()]);
        Self {
            now: 1,
            nodes,
            network,
            random,
            flying,
            sent: 0,
            cut,
            rings,
            had_rings: false,
            ring_packets: 0,
            streams: [None, None],
            connects: false,
            stream_packets: 0,
            has_parts: false,
            datagram: 1472,
            parted,
        }
    }

    pub fn random(&mut self, below: u64) -> u64 {
        mix(&mut self.random) % below
    }

    fn happens(&mut self, per_million: u64) -> bool {
        per_million > 0 && self.random(1_000_000) < per_million
    }

    /// Restarts a node: it loses all state except its memory.
    pub fn restart(&mut self, node: usize) {
        self.restart_at(node, self.now + 1);
    }

    /// Restarts a node whose clock shows `epoch`.
    pub fn restart_at(&mut self, node: usize, epoch: u64) {
        (0..2).for_each(|from| self.end_stream(from));
        let config = self.nodes[node].engine.config().clone();
        let seed = seed_from(&mut self.random);
        self.nodes[node].engine = Engine::new(config, epoch, seed);
        self.nodes[node].engine.open(None).unwrap();
        if self.has_parts {
            self.allow_parts();
        }
    }

    /// Restarts a node with another configuration.
    pub fn reopen(&mut self, node: usize, config: &Config) {
        self.nodes[node].engine = Engine::new(config.clone(), 1, [0; 32]);
        self.restart(node);
    }

    /// Lowers the maximum datagram size of all nodes.
    pub fn shrink_datagrams(&mut self, bytes: usize) {
        let addresses: Vec<SocketAddr> = (0..self.nodes.len()).map(address).collect();
        for node in &mut self.nodes {
            addresses.iter().for_each(|address| node.engine.limit_datagram(*address, bytes));
        }
        self.datagram = bytes;
    }

    /// All nodes can send packets in parts from now on.
    pub fn allow_parts(&mut self) {
        self.has_parts = true;
        let addresses: Vec<SocketAddr> = (0..self.nodes.len()).map(address).collect();
        for node in &mut self.nodes {
            addresses.iter().for_each(|address| node.engine.set_parts(*address, true));
        }
    }

    pub fn span(&mut self, node: usize, offset: usize, len: usize) -> Span {
        let memory = &mut self.nodes[node].memory;
        assert!(offset + len <= memory.len());
        // SAFETY: the range is inside the node's memory, which lives as long as the world and is never resized; tests look at
        // the bytes only between calls of the engine.
        unsafe { Span::new(memory.as_mut_ptr().add(offset), len) }
    }

    pub fn peer(&self, node: usize) -> Peer {
        Peer { address: address(node), endpoint: 0 }
    }

    pub fn register(&mut self, node: usize, offset: usize, len: usize, key: Option<u64>) -> u64 {
        let span = self.span(node, offset, len);
        let access = Access { read: true, write: true };
        self.nodes[node].engine.register(0, span, 0, access, key).unwrap()
    }

    pub fn post(
        &mut self,
        from: usize,
        to: usize,
        shape: Shape,
        span: Span,
        context: u64,
    ) -> Result<(), PostError> {
        self.post_data(from, to, shape, span, context, None)
    }

    pub fn post_data(
        &mut self,
        from: usize,
        to: usize,
        shape: Shape,
        span: Span,
        context: u64,
        data: Option<u64>,
    ) -> Result<(), PostError> {
        let peer = self.peer(to);
        let out = Outgoing { shape, span, data, context, is_buffered: false, is_quiet: false };
        self.nodes[from].engine.post(self.now, 0, peer, &out)
    }

    /// Node 0 writes `len` bytes into node 1's region `key`.
    pub fn write(&mut self, key: u64, len: usize) {
        let source = self.span(0, 0, len);
        self.post(0, 1, Shape::Write { key, at: 0 }, source, 1).unwrap();
        assert_eq!(self.wait(0).status, Status::Success);
    }

    pub fn receive(&mut self, node: usize, tag: Option<(u64, u64)>, span: Span, context: u64) {
        let receive = Receive { matching: Match { tag, from: None }, span, context, several: None };
        self.nodes[node].engine.post_receive(0, &receive).unwrap();
    }

    pub fn poll(&mut self, node: usize) -> Option<Completion> {
        self.nodes[node].engine.poll(0)
    }

    pub fn has_rings(&self) -> bool {
        self.rings.is_some()
    }

    /// Gives nodes 0 and 1 a ring, if they have an open channel.
    pub fn share(&mut self) {
        let Provided { memory, bells: [a, b] } = provide().unwrap();
        let other = memory.try_clone().unwrap();
        self.rings = Some([Ring::open(memory, a, 0).unwrap(), Ring::open(other, b, 1).unwrap()]);
        self.had_rings = true;
        let is_open = |node: usize| self.nodes[node].engine.set_local(address(1 - node), Some(WINDOW_BYTES));
        if [0, 1].map(is_open).contains(&false) {
            self.unshare();
        }
    }

    /// Takes the ring away, with the packets in it.
    pub fn unshare(&mut self) {
        if self.rings.take().is_some() {
            for node in 0..2 {
                self.nodes[node].engine.set_local(address(1 - node), None);
            }
        }
    }

    /// Sends a packet through the ring, if there is one with room.
    fn send_through_ring(&mut self, from: usize, packet: &Departure) -> bool {
        let Some(rings) = self.rings.as_mut().filter(|_| from < 2 && packet.to == address(1 - from)) else {
            return false;
        };
        !packet.is_handshake() && rings[from].send(packet.header.as_bytes(), packet.payload).unwrap()
    }

    /// Gives the engines what is in their rings. Returns whether there was anything.
    fn empty_rings(&mut self) -> bool {
        let Some(mut rings) = self.rings.take() else { return false };
        let (mut is_busy, mut is_usable) = (false, true);
        for (node, ring) in rings.iter_mut().enumerate() {
            let engine = &mut self.nodes[node].engine;
            is_usable &= engine.is_local(address(1 - node));
            while let Some(arrived) = ring.receive().unwrap() {
                is_busy = true;
                self.ring_packets += 1;
                is_usable &=
                    engine.receive_local(self.now, address(1 - node), arrived.packet, arrived.placed);
                ring.release();
            }
        }
        self.rings = Some(rings);
        if !is_usable {
            self.unshare();
        }
        is_busy
    }

    /// Whether node `from` has a stream to the other one.
    pub fn has_stream(&self, from: usize) -> bool {
        self.streams[from].is_some()
    }

    /// Ends the stream of node `from`, with the packets in it.
    pub fn end_stream(&mut self, from: usize) {
        if self.streams[from].take().is_some() {
            self.nodes[from].engine.set_outgoing_stream(address(1 - from), None);
            self.nodes[1 - from].engine.set_incoming_stream(address(from), false);
        }
    }

    /// Connects nodes that are invited, and gives the engines some of the packets in their streams. Returns whether more are there.
    fn carry_streams(&mut self) -> bool {
        let mut is_busy = false;
        for from in 0..self.nodes.len().min(2) {
            let (own, peer) = (address(from), address(1 - from));
            while let Some((inviter, secret)) = self.nodes[from].engine.next_stream_invite() {
                let shown = secret.first_chunk().unwrap();
                let invited = self.nodes[1 - from].engine.invited_to_stream(shown);
                let invited = invited.is_some_and(|(to, proof)| to == own && secret.ends_with(&proof));
                if self.connects && inviter == peer && invited && !self.has_stream(from) {
                    assert!(self.nodes[1 - from].engine.set_incoming_stream(own, true));
                    assert!(self.nodes[from].engine.set_outgoing_stream(peer, Some(true)));
                    self.streams[from] = Some(VecDeque::new());
                }
            }
            // A channel that was closed had the stream.
            let is_known =
                self.nodes[1 - from].engine.streams(own).0 && self.nodes[from].engine.streams(peer).1;
            if !is_known {
                self.end_stream(from);
            }
            let Some(mut queue) = self.streams[from].take() else { continue };
            let mut is_usable = true;
            while is_usable
                && self.random(4) > 0
                && let Some(packet) = queue.pop_front()
            {
                self.stream_packets += 1;
                is_usable = self.nodes[1 - from].engine.receive_stream(self.now, own, &packet);
            }
            is_busy |= !queue.is_empty();
            let has_room = queue.len() < STREAM_ROOM;
            self.streams[from] = Some(queue);
            if !is_usable {
                self.end_stream(from);
            } else if has_room {
                self.nodes[from].engine.set_outgoing_stream(peer, Some(true));
            }
        }
        is_busy
    }

    fn send_through_stream(&mut self, from: usize, departure: &Departure) {
        let queue = self.streams[from].as_mut().expect("a packet for a stream that is not there");
        let mut bytes = departure.header.as_bytes().to_vec();
        departure.payload.read_to(&mut bytes);
        queue.push_back(bytes);
        assert!(departure.to == address(1 - from) && queue.len() <= STREAM_ROOM);
        if queue.len() == STREAM_ROOM {
            self.nodes[from].engine.set_outgoing_stream(departure.to, Some(false));
        }
    }

    /// Lets all engines send, then advances the clock to the next event, by at most 100 us.
    pub fn step(&mut self) {
        for from in 0..self.nodes.len() {
            self.nodes[from].engine.tick(self.now);
            while let Some(departure) = self.nodes[from].engine.depart(self.now) {
                if departure.by_stream {
                    self.send_through_stream(from, &departure);
                    continue;
                }
                if self.send_through_ring(from, &departure) {
                    continue;
                }
                let mut bytes = departure.header.as_bytes().to_vec();
                departure.payload.read_to(&mut bytes);
                let parts = if departure.parts_of > 0 {
                    (bytes.len() + 16).div_ceil(departure.parts_of + 16)
                } else {
                    1
                };
                assert!(parts > 1 || bytes.len() <= self.datagram || self.had_rings, "{} bytes", bytes.len());
                assert!(parts <= 16 && (parts == 1 || bytes.len() <= 16 << 10), "{parts} parts");
                self.parted[from] += u64::from(parts > 1);
                // A packet is lost with any of its parts.
                if (1..parts).any(|_| self.happens(self.network.lost)) {
                    continue;
                }
                let Some(to) = (0..self.nodes.len()).find(|node| address(*node) == departure.to) else {
                    continue;
                };
                self.carry(from, to, bytes);
            }
        }
        let is_busy = self.empty_rings() | self.carry_streams();
        let until = self.now + if is_busy { 1_000 } else { 100_000 };
        let next = self.flying.keys().next().copied();
        let Some(key) = next.filter(|key| key.0 <= until) else {
            self.now = until;
            return;
        };
        self.now = self.now.max(key.0);
        while let Some(key) = self.flying.keys().next().copied().filter(|key| key.0 <= self.now) {
            let Some((to, from, bytes)) = self.flying.remove(&key) else { break };
            self.nodes[to].engine.receive(self.now, address(from), &bytes, false);
        }
    }

    fn carry(&mut self, from: usize, to: usize, bytes: Vec<u8>) {
        let network = self.network;
        let copies = if self.happens(network.lost) || self.cut[from] || self.cut[to] {
            0
        } else if self.happens(network.twice) {
            2
        } else {
            1
        };
        for _ in 0..copies {
            let start = self.now.max(self.nodes[to].busy_until);
            let end = start + bytes.len() as u64 * network.byte_ps / 1000;
            self.nodes[to].busy_until = end;
            let late = if self.happens(network.late) { self.random(network.late_ns.max(1)) } else { 0 };
            self.sent += 1;
            self.flying.insert((end + network.delay_ns + late, self.sent), (to, from, bytes.clone()));
        }
    }

    /// Steps the world until `node` has a completion.
    pub fn wait(&mut self, node: usize) -> Completion {
        let end = self.now + 200_000_000_000;
        loop {
            if let Some(completion) = self.poll(node) {
                return completion;
            }
            self.step();
            assert!(self.now < end, "node {node} has no completion");
        }
    }

    /// Steps the world for this duration.
    pub fn run(&mut self, ns: u64) {
        let end = self.now + ns;
        while self.now < end {
            self.step();
        }
    }
}
