//! The engine: all channels, endpoints and memory of one process.
//!
//! `post.rs` takes operations, `depart.rs` makes packets of them, `arrive.rs` takes packets, `messages.rs` matches messages with posted
//! buffers, `atomics.rs` changes numbers, `pulls.rs` asks for and serves bytes of offers, reads and large writes, `ends.rs` completes and fails what is under way.

mod arrive;
mod atomics;
mod depart;
mod ends;
mod messages;
mod post;
mod pulls;

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;

use super::channel::{Channel, Op, What};
use super::endpoint::{Completion, ENDPOINTS_MAX, Endpoint, Held, Kind, POSTED_MAX};
use super::memory::{Access, Key, Memory, Span};
use super::random::mix;
use super::slab::Slab;
use super::status::Status;
use super::wire::Hello;

pub use atomics::Atomic;
pub use depart::Departure;
pub use messages::Seen;
pub use post::{Outgoing, Receive, Shape};

/// Operations of one engine that are not complete.
pub(super) const OPERATIONS_MAX: usize = 32_768;
/// Pulls under way: large receives, large writes of peers, reads.
pub(super) const PULLS_MAX: usize = 16_384;
/// Peers of one engine. A channel without traffic costs about 1 KiB.
pub(super) const CHANNELS_MAX: usize = 4096;
/// Buffers kept for the next messages.
const SPARE_MAX: usize = 256;

/// How an engine behaves.
#[derive(Clone, Debug)]
pub struct Config {
    /// Largest datagram sent, in bytes, unless the application names another for a peer.
    pub datagram_max: usize,
    /// Up to so many bytes an operation is pushed; above, the target pulls.
    pub eager_max: usize,
    /// Bytes that all peers together may be asked to send at once: what the socket's receive buffer holds.
    pub receive_budget: usize,
    /// A peer that acknowledges nothing for so long is unreachable, in nanoseconds.
    pub dead_after_ns: u64,
    /// Deadline of an operation, in nanoseconds; 0: none but the peer's death.
    pub operation_timeout_ns: u64,
    /// How long messages wait for an endpoint that is not ready, in nanoseconds.
    pub not_ready_ns: u64,
    /// A channel with work but without traffic is tried so often, in nanoseconds.
    pub keepalive_ns: u64,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            datagram_max: 1472,
            eager_max: 16 << 10,
            receive_budget: 1 << 20,
            dead_after_ns: 10_000_000_000,
            operation_timeout_ns: 60_000_000_000,
            not_ready_ns: 10_000_000_000,
            keepalive_ns: 1_000_000_000,
        }
    }
}

/// Why an operation was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PostError {
    /// A table is full: take completions, then try again.
    #[error("too many operations under way: take completions, then try again")]
    Busy,
    /// There is no such endpoint here.
    #[error("no such endpoint")]
    NoEndpoint,
    /// Too many endpoints, or this one is taken.
    #[error("the endpoint's number is taken or above 1023")]
    Taken,
    /// The region table is full, or the key is taken.
    #[error("too many regions, or the key is taken")]
    NoRegion,
    /// No such region.
    #[error("no such region")]
    UnknownKey,
    /// Numbers of an atomic operation are too many, or those given do not agree.
    #[error(
        "an atomic operation takes 1 to 240 bytes of numbers, and operands, numbers to compare with and the place for the result that suit it"
    )]
    BadAtomic,
}

/// What an engine counted since it was started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Packets given out to be sent, retransmissions too.
    pub packets_out: u64,
    /// Packets sent again.
    pub resent: u64,
    /// Packets that arrived.
    pub packets_in: u64,
    /// Packets that are none of this protocol.
    pub malformed: u64,
    /// Packets of no channel of this engine.
    pub unknown: u64,
    /// Packets that had arrived before, or were too far ahead.
    pub useless: u64,
    /// Packets ahead of others that found no memory to wait in.
    pub no_memory: u64,
    /// Messages refused because the endpoint had no room or did not exist.
    pub not_ready: u64,
    /// Writes and reads of peers refused for their key, range or access.
    pub bad_keys: u64,
    /// Channels that failed.
    pub failed_channels: u64,
}

struct Pull {
    channel: u32,
    source: PullSource,
    /// Endpoint at the peer.
    to: u16,
    span: Span,
    asked: u64,
    received: u64,
    purpose: Purpose,
}

#[derive(Clone, Copy)]
enum PullSource {
    Offer(u32),
    Key { key: Key, at: u64 },
}

/// What to do when a pull is complete.
enum Purpose {
    /// End this operation.
    Read(u32),
    /// Report that a message was received on this endpoint.
    Message(u16, Box<Completion>),
    /// A peer's write through this endpoint arrived, with immediate data to report perhaps.
    Write { endpoint: u16, key: Key, from: u16, data: Option<u64> },
}

/// All channels, endpoints and memory of one process. It has no clock: `now` is nanoseconds since any moment, never falling.
pub struct Engine {
    config: Config,
    epoch: u64,
    random: u64,
    channel_number: u32,
    memory: Memory,
    endpoints: Vec<Option<Endpoint>>,
    ops: Slab<Op>,
    pulls: Slab<Pull>,
    channels: Slab<Channel>,
    addresses: HashMap<SocketAddr, u32>,
    /// Datagram sizes that the application named.
    datagrams: HashMap<SocketAddr, usize>,
    /// Channels with something to send.
    ready: VecDeque<u32>,
    /// Channels whose acknowledgement may wait.
    late: VecDeque<u32>,
    /// Pulls that have more to ask for.
    pulls_waiting: VecDeque<u32>,
    /// Bytes that may be asked for.
    budget: i64,
    resets: VecDeque<(SocketAddr, u32)>,
    done: Vec<What>,
    spare: Vec<Vec<u8>>,
    now: u64,
    looked_at: u64,
    deadlines_at: u64,
    counters: Counters,
}

impl Engine {
    /// An engine started at `epoch`, nanoseconds of a clock that a restart does not set back. `seed` makes keys hard to guess.
    pub fn new(config: Config, epoch: u64, seed: u64) -> Self {
        let budget = config.receive_budget as i64;
        let mut random = seed;
        let memory = Memory::new(mix(&mut random));
        Self {
            config,
            epoch,
            random,
            channel_number: 0,
            memory,
            endpoints: vec![],
            ops: Slab::new(OPERATIONS_MAX),
            pulls: Slab::new(PULLS_MAX),
            channels: Slab::new(CHANNELS_MAX),
            addresses: HashMap::new(),
            datagrams: HashMap::new(),
            ready: VecDeque::new(),
            late: VecDeque::new(),
            pulls_waiting: VecDeque::new(),
            budget,
            resets: VecDeque::new(),
            done: vec![],
            spare: vec![],
            now: 0,
            looked_at: 0,
            deadlines_at: 0,
            counters: Counters::default(),
        }
    }

    /// How it behaves.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// What it counted.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Opens an endpoint of this number, or of the first free one.
    pub fn open(&mut self, number: Option<u16>) -> Result<u16, PostError> {
        let place = match number {
            Some(number) => usize::from(number),
            None => self.endpoints.iter().position(Option::is_none).unwrap_or(self.endpoints.len()),
        };
        if place >= ENDPOINTS_MAX || self.endpoint(place as u16).is_some() {
            return Err(PostError::Taken);
        }
        if self.endpoints.len() <= place {
            self.endpoints.resize_with(place + 1, || None);
        }
        self.endpoints[place] = Some(Endpoint::default());
        Ok(place as u16)
    }

    /// Closes an endpoint: its operations end without completion, its regions are deregistered. Messages that are sent and were reported
    /// complete still reach their target.
    pub fn close(&mut self, endpoint: u16) {
        if self.endpoint(endpoint).is_none() {
            return;
        }
        for key in self.memory.keys_of(endpoint) {
            self.deregister(key);
        }
        let outlives = |op: &Op| op.owned.is_some() && op.is_quiet && !op.fetches();
        for op in self.ops.numbers(|op| op.endpoint == endpoint && !outlives(op)) {
            self.complete_op(op, Status::Cancelled, 0);
        }
        self.drop_pulls_of(endpoint);
        let assembles =
            |channel: &Channel| channel.assembly.as_ref().is_some_and(|assembly| assembly.to == endpoint);
        for channel in self.channels.numbers(assembles) {
            self.abandon_assembly(channel);
        }
        self.give_back(endpoint);
        self.endpoints[usize::from(endpoint)] = None;
    }

    /// Refuses the messages that wait for an endpoint, and returns their credits.
    fn give_back(&mut self, endpoint: u16) {
        let Some(own) = self.endpoint_mut(endpoint) else { return };
        let (held, completions) = (std::mem::take(&mut own.unexpected), std::mem::take(&mut own.completions));
        let arrivals = completions.iter().filter(|completion| completion.kind == Kind::Arrival);
        for peer in held.iter().map(|message| message.from).chain(arrivals.map(|completion| completion.peer))
        {
            if let Some(channel) = self.addresses.get(&peer.address).copied() {
                self.consumed(channel, endpoint, 1);
            }
        }
        for message in held {
            if let Held::Offer { channel, op } = message.held {
                self.end_operation(channel, op, Status::NotReady);
            }
        }
    }

    /// Registers memory for peers that address `endpoint`. Its first byte has the offset `base`. A `key` is chosen unless one is given.
    pub fn register(
        &mut self,
        endpoint: u16,
        span: Span,
        base: u64,
        access: Access,
        key: Option<Key>,
    ) -> Result<Key, PostError> {
        self.endpoint(endpoint).ok_or(PostError::NoEndpoint)?;
        self.memory.register(endpoint, span, base, access, key).ok_or(PostError::NoRegion)
    }

    /// Takes memory back: from now on the engine neither reads nor writes it for peers. What they were doing with it fails.
    pub fn deregister(&mut self, key: Key) -> bool {
        let known = self.memory.deregister(key);
        if known {
            self.revoke(key);
        }
        known
    }

    /// Names the largest datagram for peers at this address.
    pub fn set_datagram(&mut self, address: SocketAddr, bytes: usize) {
        let bytes = bytes.clamp(576, 65_507);
        if self.datagrams.len() < 2 * CHANNELS_MAX {
            self.datagrams.insert(address, bytes);
        }
    }

    /// Takes one completion of an endpoint.
    pub fn poll(&mut self, endpoint: u16) -> Option<Completion> {
        let completion = self.endpoint_mut(endpoint)?.completions.pop_front()?;
        if completion.kind == Kind::Arrival
            && let Some(channel) = self.addresses.get(&completion.peer.address).copied()
        {
            self.consumed(channel, endpoint, 1);
        }
        Some(completion)
    }

    /// Completions that wait to be taken.
    pub fn waiting(&self, endpoint: u16) -> usize {
        self.endpoint(endpoint).map_or(0, |endpoint| endpoint.completions.len())
    }

    /// Whether any endpoint has completions that wait to be taken.
    pub fn has_completions(&self) -> bool {
        self.endpoints.iter().flatten().any(|endpoint| !endpoint.completions.is_empty())
    }

    /// Whether all that was posted has been acknowledged.
    pub fn is_idle(&self) -> bool {
        self.ops.len() == 0 && self.channels.numbers(|channel| !channel.window.is_empty()).is_empty()
    }

    fn endpoint(&self, number: u16) -> Option<&Endpoint> {
        self.endpoints.get(usize::from(number))?.as_ref()
    }

    fn endpoint_mut(&mut self, number: u16) -> Option<&mut Endpoint> {
        self.endpoints.get_mut(usize::from(number))?.as_mut()
    }

    fn has_room_for_receive(&self, endpoint: u16) -> Result<(), PostError> {
        let endpoint = self.endpoint(endpoint).ok_or(PostError::NoEndpoint)?;
        let is_full = endpoint.posted.len() >= POSTED_MAX || endpoint.completions.len() >= POSTED_MAX;
        if is_full { Err(PostError::Busy) } else { Ok(()) }
    }

    /// The channel to an address; opened if there is none.
    fn channel_to(&mut self, address: SocketAddr) -> Result<u32, PostError> {
        if let Some(number) = self.addresses.get(&address) {
            return Ok(*number);
        }
        self.new_channel(address, None).ok_or(PostError::Busy)
    }

    /// Makes a channel. `peer` has opened it, or it has to be opened.
    fn new_channel(&mut self, address: SocketAddr, peer: Option<Hello>) -> Option<u32> {
        self.channel_number += 1;
        let window_max = peer.map_or(1 << 20, |peer| u64::from(peer.window));
        let datagram = self.datagrams.get(&address).copied().unwrap_or(self.config.datagram_max);
        let mut channel = Channel::new(address, self.channel_number, 0, self.now, window_max);
        channel.datagram = peer.map_or(datagram, |peer| datagram.min(usize::from(peer.datagram).max(576)));
        channel.is_welcome_due = peer.is_some();
        channel.peer = peer;
        let number = self.channels.insert(channel)?;
        // The session leads back to the channel's place; its other bits are hard to guess.
        let session = (mix(&mut self.random) as u32) << 12 | (number & 0xfff);
        self.channels.get_mut(number)?.session = session;
        self.addresses.insert(address, number);
        self.make_ready(number);
        Some(number)
    }

    /// The channel has something to send.
    fn make_ready(&mut self, number: u32) {
        if let Some(channel) = self.channels.get_mut(number).filter(|channel| !channel.is_queued) {
            channel.is_queued = true;
            self.ready.push_back(number);
        }
    }

    fn buffer(&mut self) -> Vec<u8> {
        self.spare.pop().unwrap_or_else(|| Vec::with_capacity(self.config.eager_max))
    }

    fn recycle(&mut self, mut buffer: Vec<u8>) {
        if self.spare.len() < SPARE_MAX && buffer.capacity() > 0 {
            buffer.clear();
            self.spare.push(buffer);
        }
    }
}
