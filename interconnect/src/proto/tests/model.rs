//! Random operations checked against a model of memory, on a network that loses, duplicates, delays and reorders packets, with
//! restarts.
//!
//! `VNET_RDMA_OPERATIONS=1000000 cargo test --release -p vnet-rdma model` runs a million operations on each network.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::random::mix;
use super::world::{CLEAN, Network, World};
use crate::proto::{Atomic, Change, Completion, Config, Datatype, Kind, Shape, Span, Status};

/// The target memory of each node is divided into slots; at most one operation at a time uses a slot.
const SLOTS: usize = 32;
const SLOT: usize = 64 << 10;
/// Behind the slots: the buffers of local operations, then the buffers of receives.
const LOCAL: usize = SLOTS * SLOT;
const RECEIVES: usize = 2 * SLOTS * SLOT;
/// Key of the slots; it stays the same after a restart.
const KEY: u64 = 0x5eed;
const TAGS: u64 = 3;

#[derive(Clone, Copy, Debug)]
enum Job {
    /// Writes `len` bytes, generated from this seed, into a slot.
    Write {
        slot: usize,
        len: usize,
        seed: u64,
    },
    Read {
        slot: usize,
        len: usize,
    },
    /// Adds to the value at the beginning of a slot. The addition must happen exactly once despite losses and duplicates.
    Add {
        slot: usize,
        operand: u64,
    },
    /// A write or read that the target must refuse.
    Refused,
    Send {
        number: u64,
    },
}

#[derive(Default)]
struct Side {
    /// Pending operations by context, which is the number of the local buffer.
    jobs: HashMap<u64, Job>,
    /// Posted receives by context.
    receives: HashMap<u64, usize>,
    next_receive: u64,
    /// Slots of this node's memory that an operation of the other node uses.
    busy: [bool; SLOTS],
    /// Numbers of the messages received for each kind of posted tag, in posting order.
    received: BTreeMap<(u64, u64), u64>,
    sent: u64,
    /// Number of writes with immediate data, and the last of the other node's that has arrived, with its incarnation.
    noticed: u64,
    /// Numbers of the other node's writes that have ended well, and of those that have arrived, as far as there was no restart.
    due: BTreeSet<u64>,
    seen: BTreeSet<u64>,
    /// Numbers of pending writes with immediate data, by context.
    numbers: HashMap<u64, u64>,
    arrived: (u64, u64),
    /// Expected content of the slots.
    model: Vec<u8>,
    lives: u64,
}

struct Model {
    world: World,
    sides: [Side; 2],
    done: u64,
    failed: u64,
    /// The nodes get a ring and lose it, at random times.
    has_rings: bool,
}

fn bytes_of(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed;
    (0..len.div_ceil(8)).flat_map(|_| mix(&mut state).to_be_bytes()).take(len).collect()
}

impl Model {
    fn new(network: Network, seed: u64) -> Self {
        let config =
            Config { dead_after_ns: 2_000_000_000, operation_timeout_ns: 5_000_000_000, ..Config::default() };
        let mut world = World::new(2, &config, network, seed);
        let sides = std::array::from_fn(|_| Side { model: vec![0; SLOTS * SLOT], ..Side::default() });
        for node in 0..2 {
            world.register(node, 0, SLOTS * SLOT, Some(KEY));
        }
        Self { world, sides, done: 0, failed: 0, has_rings: false }
    }

    /// Like `new`, but pulls of more than `eager_max` are worth a stream.
    fn with_streams(network: Network, seed: u64) -> Self {
        let mut model = Self::new(network, seed);
        let config = Config { stream_min: 1, ..model.world.nodes[0].engine.config().clone() };
        model.world = World::new(2, &config, network, seed);
        for node in 0..2 {
            model.world.register(node, 0, SLOTS * SLOT, Some(KEY));
        }
        model.world.connects = true;
        model
    }

    /// Like `new`, but nodes send packets in parts.
    fn with_parts(network: Network, seed: u64) -> Self {
        let mut model = Self::new(network, seed);
        let config = Config { takes_parts: true, ..model.world.nodes[0].engine.config().clone() };
        model.world = World::new(2, &config, network, seed);
        for node in 0..2 {
            model.world.register(node, 0, SLOTS * SLOT, Some(KEY));
        }
        model.world.allow_parts();
        model
    }

    fn len(&mut self) -> usize {
        let most = [9, 100, 1500, 5000, 20_000, SLOT as u64][self.world.random(6) as usize];
        self.world.random(most) as usize
    }

    /// Posts a random operation from `node` if a buffer is free.
    fn post(&mut self, node: usize) {
        let other = 1 - node;
        let context = self.world.random(SLOTS as u64);
        if self.sides[node].jobs.contains_key(&context) {
            return;
        }
        let (len, slot) = (self.len(), self.world.random(SLOTS as u64) as usize);
        let local = LOCAL + context as usize * SLOT;
        let seed = self.world.random(u64::MAX);
        let kind = self.world.random(11);
        let (job, shape) = match kind {
            0..4 | 10 if self.sides[other].busy[slot] => return,
            10 => (Job::Add { slot, operand: seed }, self.addition(node, slot, local)),
            0..3 => (Job::Write { slot, len, seed }, Shape::Write { key: KEY, at: (slot * SLOT) as u64 }),
            3 => (Job::Read { slot, len }, Shape::Read { key: KEY, at: (slot * SLOT) as u64 }),
            4 => (Job::Refused, Shape::Write { key: KEY + 1, at: 0 }),
            5 => (Job::Refused, Shape::Read { key: KEY, at: (SLOTS * SLOT - len) as u64 + 1 }),
            _ => {
                let (tag, number) = (self.world.random(TAGS), self.sides[node].sent + 1);
                (Job::Send { number }, Shape::Message { tag: Some(tag) })
            }
        };
        let mut bytes = bytes_of(seed, len.max(24));
        let mut len = len;
        if let Job::Send { number, .. } = job {
            // The message describes itself: number, incarnation of the sender, length.
            len = len.max(24);
            let words = [number, self.sides[node].lives, len as u64];
            bytes = bytes_of(words.iter().sum(), len);
            words
                .iter()
                .zip(bytes.chunks_exact_mut(8))
                .for_each(|(word, to)| to.copy_from_slice(&word.to_be_bytes()));
        }
        if let Job::Add { operand, .. } = job {
            len = 8;
            bytes = operand.to_ne_bytes().to_vec();
        }
        if matches!(job, Job::Refused) && len == 0 {
            return;
        }
        self.world.nodes[node].memory[local..local + len].copy_from_slice(&bytes[..len]);
        let (mut shape, mut span) = (shape, self.world.span(node, local, len));
        if matches!(job, Job::Write { .. }) && self.world.has_rings() && seed.is_multiple_of(2) {
            // As the process does if it has mapped the peer's memory.
            self.world.nodes[other].memory[slot * SLOT..][..len].copy_from_slice(&bytes[..len]);
            shape = Shape::Placed { key: KEY, at: (slot * SLOT) as u64, len: len as u32 };
            span = Span::EMPTY;
        }
        let has_data = seed.is_multiple_of(3) && matches!(job, Job::Write { .. });
        // Number of the write, incarnation of its sender, and context.
        let data = has_data.then(|| {
            let side = &mut self.sides[node];
            side.noticed += 1;
            side.numbers.insert(context, side.noticed);
            side.noticed << 32 | side.lives << 8 | context
        });
        self.world.post_data(node, other, shape, span, context, data).unwrap();
        match job {
            Job::Write { slot, .. } | Job::Read { slot, .. } | Job::Add { slot, .. } => {
                self.sides[other].busy[slot] = true
            }
            Job::Send { .. } => self.sides[node].sent += 1,
            Job::Refused => {}
        }
        self.sides[node].jobs.insert(context, job);
    }

    /// The operand is at the beginning of the local buffer; the fetched value goes behind it.
    fn addition(&mut self, node: usize, slot: usize, local: usize) -> Shape {
        Shape::Atomic(Atomic {
            key: KEY,
            at: (slot * SLOT) as u64,
            change: Change::Sum,
            datatype: Datatype::U64,
            count: 1,
            compare: Span::EMPTY,
            found: Some(self.world.span(node, local + 8, 8)),
        })
    }

    fn post_receive(&mut self, node: usize) {
        if self.sides[node].receives.len() >= SLOTS {
            // Otherwise all receives might wait for one tag while messages with the other tags hold the credits.
            let context = *self.sides[node].receives.keys().min().unwrap();
            if self.world.random(8) == 0 && self.world.nodes[node].engine.cancel(0, context) {
                self.sides[node].receives.remove(&context);
            }
            return;
        }
        let used: Vec<usize> = self.sides[node].receives.values().copied().collect();
        let Some(place) = (0..SLOTS).find(|place| !used.contains(place)) else { return };
        // The receive accepts one tag, or any tag.
        let tag = self.world.random(TAGS + 1);
        let matching = if tag == TAGS { (0, u64::MAX) } else { (tag, 0) };
        let span = self.world.span(node, RECEIVES + place * SLOT, SLOT);
        let side = &mut self.sides[node];
        side.next_receive += 1;
        let context = side.next_receive << 8 | tag;
        side.receives.insert(context, place);
        self.world.receive(node, Some(matching), span, context);
    }

    fn take(&mut self, node: usize, completion: Completion) {
        match completion.kind {
            Kind::Arrival => self.arrived(node, &completion),
            Kind::Receive => self.received(node, &completion),
            _ => self.ended(node, &completion),
        }
    }

    fn ended(&mut self, node: usize, completion: &Completion) {
        let other = 1 - node;
        let local = LOCAL + completion.context as usize * SLOT;
        let job = self.sides[node].jobs.remove(&completion.context).expect("ended twice");
        self.done += 1;
        let is_success = completion.status == Status::Success;
        if let Some(number) = self.sides[node].numbers.remove(&completion.context).filter(|_| is_success) {
            self.sides[other].due.insert(number);
        }
        self.failed += u64::from(!is_success);
        match job {
            Job::Write { slot, len, seed } => {
                let range = slot * SLOT..slot * SLOT + len;
                let memory = &self.world.nodes[other].memory[range.clone()];
                let model = &mut self.sides[other].model[range];
                let bytes = bytes_of(seed, len);
                let is_mixed =
                    memory.iter().zip(&bytes).zip(&*model).all(|((is, new), old)| is == new || is == old);
                assert!(if is_success { memory == bytes } else { is_mixed }, "{job:?} {completion:?}");
                model.copy_from_slice(memory);
                self.sides[other].busy[slot] = false;
            }
            Job::Read { slot, len } => {
                let model = &self.sides[other].model[slot * SLOT..slot * SLOT + len];
                let read = &self.world.nodes[node].memory[local..local + len];
                assert!(!is_success || read == model, "{job:?} {completion:?}");
                self.sides[other].busy[slot] = false;
            }
            Job::Add { slot, operand } => {
                let number = |bytes: &[u8]| u64::from_ne_bytes(bytes.try_into().unwrap());
                let model = &mut self.sides[other].model[slot * SLOT..slot * SLOT + 8];
                let memory = &self.world.nodes[other].memory[slot * SLOT..slot * SLOT + 8];
                let (old, is) = (number(model), number(memory));
                let found = number(&self.world.nodes[node].memory[local + 8..local + 16]);
                let new = old.wrapping_add(operand);
                let is_right = if is_success { is == new && found == old } else { is == new || is == old };
                assert!(is_right, "{job:?} {completion:?}: {old} became {is}, found {found}");
                model.copy_from_slice(memory);
                self.sides[other].busy[slot] = false;
            }
            Job::Refused => assert!(!is_success, "{completion:?}"),
            Job::Send { .. } => {}
        }
    }

    /// Arrivals come in the order of the writes, and not before the bytes.
    fn arrived(&mut self, node: usize, completion: &Completion) {
        let other = 1 - node;
        let data = completion.data.unwrap();
        let (number, life, context) = (data >> 32, data >> 8 & 0xff_ffff, data & 0xff);
        let name = (life, number);
        assert!(name > self.sides[node].arrived, "{name:?} after {:?}", self.sides[node].arrived);
        self.sides[node].arrived = name;
        self.sides[node].seen.insert(number);
        // Once the write has ended at its origin, other operations may use the slot.
        let is_own = life == self.sides[other].lives;
        if let Some(Job::Write { slot, len, seed }) = self.sides[other].jobs.get(&context).filter(|_| is_own)
        {
            let is_same = self.sides[other].numbers.get(&context) == Some(&number);
            let memory = &self.world.nodes[node].memory[slot * SLOT..][..*len];
            assert!(!is_same || memory == bytes_of(*seed, *len), "write {number} has not arrived");
        }
    }

    fn received(&mut self, node: usize, completion: &Completion) {
        let side = &mut self.sides[node];
        let place = side.receives.remove(&completion.context).expect("received twice");
        if completion.status != Status::Success {
            return;
        }
        self.done += 1;
        let len = completion.len as usize;
        let bytes = &self.world.nodes[node].memory[RECEIVES + place * SLOT..][..len];
        let words: Vec<u64> =
            bytes.chunks_exact(8).take(3).map(|word| u64::from_be_bytes(word.try_into().unwrap())).collect();
        let expected = bytes_of(words.iter().sum(), len);
        assert!(
            words[2] == len as u64 && bytes[24..] == expected[24..],
            "a message of {len} bytes is damaged"
        );
        // Of two receives of the same kind, the one that was posted first gets the message that was sent first.
        let (order, kind) = (completion.context >> 8, completion.context & 0xff);
        let name = (kind << 32 | completion.tag.unwrap(), order);
        side.received.insert(name, words[1] << 40 | words[0]);
    }

    fn check_order(&mut self) {
        for side in &mut self.sides {
            let received = std::mem::take(&mut side.received);
            let mut last = (u64::MAX, 0);
            for ((kind, order), number) in received {
                assert!(
                    last.0 != kind || last.1 < number,
                    "kind {kind:x}, receive {order}: {number:x} after {:x}",
                    last.1
                );
                last = (kind, number);
            }
        }
    }

    fn restart(&mut self, node: usize) {
        self.check_order();
        self.world.restart(node);
        self.world.register(node, 0, SLOTS * SLOT, Some(KEY));
        let other = 1 - node;
        // The restarted node's own operations are gone. Their effects on the other node's memory are visible now and can no
        // longer change.
        for (_, job) in std::mem::take(&mut self.sides[node].jobs) {
            if let Job::Write { slot, .. } | Job::Read { slot, .. } | Job::Add { slot, .. } = job {
                self.sides[other].busy[slot] = true;
            }
        }
        self.sides[node].receives.clear();
        // Packets that the node sent before the restart are still in flight.
        self.world.run(1_000_000);
        self.sides[node].lives += 1;
    }

    /// Waits until no operation is pending, then takes the memory content as the expected content.
    fn settle(&mut self) {
        let end = self.world.now + 60_000_000_000;
        while self.sides.iter().any(|side| !side.jobs.is_empty()) {
            for node in 0..2 {
                (0..4).for_each(|_| self.post_receive(node));
                while let Some(completion) = self.world.poll(node) {
                    self.take(node, completion);
                }
            }
            self.world.step();
            assert!(self.world.now < end, "never ends: {:?} {:?}", self.sides[0].jobs, self.sides[1].jobs);
        }
        for (side, node) in self.sides.iter_mut().zip(&self.world.nodes) {
            side.busy = [false; SLOTS];
            side.model.copy_from_slice(&node.memory[..SLOTS * SLOT]);
        }
    }

    fn check_memory(&self) {
        for (side, node) in self.sides.iter().zip(&self.world.nodes) {
            assert!(side.model == node.memory[..SLOTS * SLOT], "memory that no operation wrote has changed");
        }
    }

    fn run(&mut self, operations: u64, restarts: bool) {
        let mut next_restart = operations / 10;
        while self.done < operations {
            for node in 0..2 {
                self.post(node);
                self.post_receive(node);
                while let Some(completion) = self.world.poll(node) {
                    self.take(node, completion);
                }
            }
            self.world.step();
            if self.has_rings && self.world.random(300) == 0 {
                if self.world.has_rings() { self.world.unshare() } else { self.world.share() }
            }
            if self.world.connects && self.world.random(2_000) == 0 {
                let from = self.world.random(2) as usize;
                self.world.end_stream(from);
            }
            if restarts && self.done >= next_restart {
                next_restart += operations / 10;
                let node = self.world.random(2) as usize;
                self.restart(node);
                self.settle();
            }
            if self.sides.iter().any(|side| side.received.len() > 50_000) {
                self.settle();
                self.check_memory();
                self.check_order();
            }
        }
        self.settle();
        self.check_order();
        if self.sides.iter().all(|side| side.lives == 0) && self.failed_channels() == 0 {
            self.world.run(1_000_000_000);
            for node in 0..2 {
                while let Some(completion) = self.world.poll(node) {
                    self.take(node, completion);
                }
                let Side { due, seen, .. } = &self.sides[node];
                assert!(
                    due.is_subset(seen),
                    "{:?} have not arrived",
                    due.difference(seen).collect::<Vec<_>>()
                );
            }
        }
    }

    fn failed_channels(&self) -> u64 {
        self.world.nodes.iter().map(|node| node.engine.counters().failed_channels).sum()
    }
}

fn operations() -> u64 {
    std::env::var("VNET_RDMA_OPERATIONS").ok().and_then(|text| text.parse().ok()).unwrap_or(3000)
}

fn run(network: Network, seed: u64, restarts: bool) -> Model {
    let mut model = Model::new(network, seed);
    model.run(operations(), restarts);
    model
}

fn run_with_rings(network: Network, seed: u64, restarts: bool) -> Model {
    let mut model = Model::new(network, seed);
    model.has_rings = true;
    model.run(operations(), restarts);
    assert!(model.world.ring_packets > 300, "{} packets through rings", model.world.ring_packets);
    model
}

const WILD: Network = Network { lost: 30_000, twice: 30_000, late: 100_000, late_ns: 300_000, ..CLEAN };

#[test]
fn model_on_a_clean_network() {
    let model = run(CLEAN, 1, false);
    for node in &model.world.nodes {
        assert_eq!((node.engine.counters().resent, node.engine.counters().failed_channels), (0, 0));
    }
}

#[test]
fn model_with_loss_duplication_and_reordering() {
    let model = run(WILD, 2, false);
    let counters = model.world.nodes[0].engine.counters();
    assert!(counters.resent > 0 && counters.useless > 0 && counters.failed_channels == 0, "{counters:?}");
    assert!(model.failed < model.done / 3, "{} of {} failed", model.failed, model.done);
}

#[test]
fn model_with_heavy_loss() {
    run(Network { lost: 200_000, ..WILD }, 3, false);
}

#[test]
fn model_with_restarts() {
    let model = run(WILD, 4, true);
    assert!(model.sides.iter().map(|side| side.lives).sum::<u64>() >= 5);
}

/// What is in a ring is lost when it ends; packets by the ring overtake those on the network.
#[test]
fn model_through_rings_that_come_and_go() {
    let model = run_with_rings(WILD, 5, false);
    let counters = model.world.nodes[0].engine.counters();
    assert!(counters.failed_channels == 0 && counters.malformed == 0, "{counters:?}");
    assert!(model.failed < model.done / 3, "{} of {} failed", model.failed, model.done);
}

#[test]
fn model_through_rings_with_restarts() {
    run_with_rings(WILD, 6, true);
}

fn run_with_streams(network: Network, seed: u64, restarts: bool) -> Model {
    let mut model = Model::with_streams(network, seed);
    model.run(operations(), restarts);
    assert!(model.world.stream_packets > 100, "{} packets through streams", model.world.stream_packets);
    model
}

/// What is in a stream is lost when it ends; packets by the network overtake those in it.
#[test]
fn model_through_streams_that_come_and_go() {
    let model = run_with_streams(WILD, 7, false);
    let counters = model.world.nodes[0].engine.counters();
    assert!(counters.failed_channels == 0 && counters.malformed == 0, "{counters:?}");
    assert!(model.failed < model.done / 3, "{} of {} failed", model.failed, model.done);
}

#[test]
fn model_through_streams_with_restarts() {
    run_with_streams(WILD, 8, true);
}

fn run_with_parts(network: Network, seed: u64, restarts: bool) -> Model {
    let mut model = Model::with_parts(network, seed);
    model.run(operations(), restarts);
    assert!(model.world.parted.iter().sum::<u64>() > 100, "{:?} packets in parts", model.world.parted);
    model
}

#[test]
fn model_with_packets_in_parts() {
    let model = run_with_parts(Network { lost: 500, ..WILD }, 9, false);
    let counters = model.world.nodes[0].engine.counters();
    assert!(counters.failed_channels == 0 && counters.malformed == 0, "{counters:?}");
    assert!(model.failed < model.done / 3, "{} of {} failed", model.failed, model.done);
}

#[test]
fn model_with_packets_in_parts_and_restarts() {
    run_with_parts(WILD, 10, true);
}
