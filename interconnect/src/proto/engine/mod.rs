//! The engine: all channels, endpoints and registered memory of one process.
//!
//! `post.rs` accepts operations, `depart.rs` and `pieces.rs` create packets, `arrive.rs` processes arriving packets, `messages.rs` matches
//! messages with posted buffers, `atomics.rs` executes atomic operations, `pulls.rs` requests and serves the bytes of offers,
//! reads and large writes, `ends.rs` completes or fails pending operations, `local.rs` moves channels to shared memory, `streams.rs` lets
//! pulled bytes travel through connections, and `parts.rs` in packets that are larger than a datagram.

mod arrive;
mod atomics;
mod depart;
mod ends;
mod local;
mod messages;
mod parts;
mod pieces;
mod post;
mod pulls;
mod streams;

pub(crate) use parts::{PARTED_MAX, PARTS_MAX};

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;

use chacha20::ChaCha20Rng;
use chacha20::rand_core::{Rng, SeedableRng};

use super::asking::Asking;
use super::channel::{Channel, KEPT_BYTES_MAX, Op, Reports, What};
use super::endpoint::{Completion, ENDPOINTS_MAX, Endpoint, Held, Kind, POSTED_MAX, UNEXPECTED_BYTES_MAX};
use super::memory::{Access, Key, Memory, Span};
use super::ranges::Ranges;
use super::share::ShareSettings;
use super::shares::{EndpointCounters, Shares};
use super::slab::Slab;
use super::status::Status;
use super::wire::{Hello, Invite};

pub use atomics::Atomic;
pub use depart::Departure;
pub use local::LOCAL_PACKET_MAX;
pub use messages::Seen;
pub use post::{Outgoing, Receive, Shape};

/// Maximum number of incomplete operations of one engine.
pub(super) const OPERATIONS_MAX: usize = 32_768;
/// Maximum number of pulls in progress: large receives, large writes of peers, and reads.
pub(super) const PULLS_MAX: usize = 16_384;
/// Maximum number of peers of one engine. A channel without traffic costs about 1 KiB.
pub(super) const CHANNELS_MAX: usize = 4096;
/// Maximum number of buffers that are kept for reuse by later messages.
const SPARE_MAX: usize = 256;

/// Configuration of an engine.
#[derive(Clone, Debug)]
pub struct Config {
    /// Maximum size of sent datagrams in bytes, unless the application sets another limit for a peer.
    pub datagram_max: usize,
    /// Whether the network takes longer packets, too, in fragments. Then packets through shared memory are longer: one that finds the memory full or
    /// gone takes the network.
    pub has_fragments: bool,
    /// Whether the node takes packets in parts (`parts.rs`).
    pub takes_parts: bool,
    /// Smallest pull that opens a stream, in bytes (`streams.rs`). 0: the engine opens none; a node puts its own default there.
    pub stream_min: usize,
    /// Operations of up to this many bytes are pushed; the target pulls larger ones.
    pub eager_max: usize,
    /// Maximum number of bytes that all peers together are asked to send at once: the capacity of the socket's receive buffer.
    pub receive_budget: usize,
    /// A peer that acknowledges nothing for this many nanoseconds counts as unreachable.
    pub dead_after_ns: u64,
    /// Deadline of an operation in nanoseconds. With 0, an operation fails only if its peer dies.
    pub operation_timeout_ns: u64,
    /// How long messages wait for an endpoint that is not ready, in nanoseconds. With 0, without limit.
    pub not_ready_ns: u64,
    /// Keep-alive interval, in nanoseconds, of a channel with pending work but without traffic.
    pub keepalive_ns: u64,
    /// Maximum memory of an endpoint's unexpected messages, in bytes.
    pub unexpected_bytes_max: usize,
    /// Maximum memory of events that wait and of messages in assembly, in bytes.
    pub kept_bytes_max: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            datagram_max: 1472,
            has_fragments: true,
            takes_parts: false,
            stream_min: 0,
            eager_max: 16 << 10,
            receive_budget: 1 << 20,
            dead_after_ns: 10_000_000_000,
            operation_timeout_ns: 60_000_000_000,
            not_ready_ns: 10_000_000_000,
            keepalive_ns: 1_000_000_000,
            unexpected_bytes_max: UNEXPECTED_BYTES_MAX,
            kept_bytes_max: KEPT_BYTES_MAX,
        }
    }
}

/// Reason why the engine rejected a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PostError {
    /// A table is full. The application should take completions and then try again.
    #[error("too many operations under way: take completions, then try again")]
    Busy,
    /// This engine has no such endpoint.
    #[error("no such endpoint")]
    NoEndpoint,
    /// The endpoint table is full, or the endpoint number is taken.
    #[error("the endpoint's number is taken or above 1023")]
    Taken,
    /// The region table is full, or the key is taken.
    #[error("too many regions, or the key is taken")]
    NoRegion,
    /// The region does not exist.
    #[error("no such region")]
    UnknownKey,
    /// There is no such weight.
    #[error("an endpoint's weight is 1 to 100")]
    BadShare,
    /// An atomic operation has too many values, or the lengths of its parameters do not match.
    #[error(
        "an atomic operation takes 1 to 240 bytes of numbers, and operands, numbers to compare with and the place for the result that suit it"
    )]
    BadAtomic,
}

/// Counters since the start of the engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Packets sent, including retransmissions.
    pub packets_out: u64,
    /// Retransmitted packets.
    pub resent: u64,
    /// Packets received.
    pub packets_in: u64,
    /// Received packets that do not belong to this protocol.
    pub malformed: u64,
    /// Received packets that belong to no channel of this engine.
    pub unknown: u64,
    /// Received packets that were duplicates or beyond the receive window.
    pub useless: u64,
    /// Out-of-order packets dropped because no memory was left to hold them.
    pub no_memory: u64,
    /// Messages refused because the endpoint had no room or did not exist.
    pub not_ready: u64,
    /// Writes and reads of peers refused because of a wrong key, range or access right.
    pub bad_keys: u64,
    /// Channels that failed.
    pub failed_channels: u64,
    /// How often the rate limit of an endpoint began to hold its packets back.
    pub held_back: u64,
}

struct Pull {
    channel: u32,
    source: PullSource,
    /// Endpoint at the peer.
    to: u16,
    span: Span,
    asked: u64,
    received: Ranges,
    purpose: Purpose,
    /// Its sender's group in `asking`. `None`: the pull does not use the budget, because its bytes do not take the socket's receive
    /// buffer.
    group: Option<u32>,
}

#[derive(Clone, Copy)]
enum PullSource {
    Offer(u32),
    Key { key: Key, at: u64 },
}

/// Action on completion of a pull.
enum Purpose {
    /// Ends this operation.
    Read(u32),
    /// Reports a received message on this endpoint.
    Message(u16, Box<Completion>),
    /// Ends a peer's write through this endpoint, and reports its immediate data, if any. `place`: from `WriteOrder`; `None` if the peer lacks
    /// the flag IN_ORDER.
    Write { endpoint: u16, key: Key, from: u16, data: Option<u64>, place: Option<u64> },
}

/// Datagram size, and whether packets can be sent in parts, that the application has set for an address.
#[derive(Clone, Copy)]
struct Sizes {
    /// Maximum datagram size.
    datagram: usize,
    /// Packets can be sent in parts.
    has_parts: bool,
}

/// All channels, endpoints and registered memory of one process. The engine has no clock: callers pass `now` in nanoseconds
/// since an arbitrary start, and `now` must never decrease.
pub struct Engine {
    config: Config,
    epoch: u64,
    random: ChaCha20Rng,
    channel_number: u32,
    memory: Memory,
    endpoints: Vec<Option<Endpoint>>,
    ops: Slab<Op>,
    pulls: Slab<Pull>,
    channels: Slab<Channel>,
    addresses: HashMap<SocketAddr, u32>,
    /// Datagram sizes, and whether packets can be sent in parts, that the application has set for addresses.
    sizes: HashMap<SocketAddr, Sizes>,
    /// Channels that have packets to send.
    ready: VecDeque<u32>,
    /// Channels with a delayed acknowledgement.
    late: VecDeque<u32>,
    /// Channels whose endpoints have no credit in this round, so that they wait for the next one.
    short: VecDeque<u32>,
    /// Rounds until the first of them may send.
    short_rounds: u64,
    /// Channels whose endpoints are beyond their rate, and when the first of them may send.
    limited: Vec<u32>,
    limited_until: u64,
    shares: Shares,
    /// Pulls with bytes that have not been requested yet.
    asking: Asking,
    /// Memory of events that wait and of messages in assembly, in bytes. At most `Config::kept_bytes_max`.
    kept_bytes: usize,
    resets: VecDeque<(SocketAddr, u32)>,
    /// Name by which this host's daemon knows the process.
    name: Option<[u8; 16]>,
    /// Invitations of peers to shared memory.
    invites: VecDeque<(SocketAddr, Invite)>,
    /// Invitations to connect, with their secrets.
    stream_invites: VecDeque<(SocketAddr, [u8; 16])>,
    /// Number of channels that have been closed.
    closed: u64,
    done: Vec<What>,
    spare: Vec<Vec<u8>>,
    now: u64,
    looked_at: u64,
    /// A path loses packets.
    is_lossy: bool,
    deadlines_at: u64,
    /// Number of packets that belonged to a channel.
    accepted: u64,
    counters: Counters,
}

impl Engine {
    /// Creates an engine. `epoch` is its start time in nanoseconds, which no other life of this address has. A random `seed` makes
    /// keys and session numbers impossible to guess.
    pub fn new(config: Config, epoch: u64, seed: [u8; 32]) -> Self {
        let asking = Asking::new(config.receive_budget);
        let mut random = ChaCha20Rng::from_seed(seed);
        let memory = Memory::new(ChaCha20Rng::from_rng(&mut random));
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
            sizes: HashMap::new(),
            ready: VecDeque::new(),
            late: VecDeque::new(),
            short: VecDeque::new(),
            short_rounds: u64::MAX,
            limited: vec![],
            limited_until: u64::MAX,
            shares: Shares::default(),
            asking,
            kept_bytes: 0,
            resets: VecDeque::new(),
            name: None,
            invites: VecDeque::new(),
            stream_invites: VecDeque::new(),
            closed: 0,
            done: vec![],
            spare: vec![],
            now: 0,
            looked_at: 0,
            is_lossy: false,
            deadlines_at: 0,
            accepted: 0,
            counters: Counters::default(),
        }
    }

    /// Returns the configuration.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Returns the counters.
    pub fn counters(&self) -> Counters {
        Counters { held_back: self.shares.held_back(), ..self.counters }
    }

    /// Number of packets that belonged to a channel: no stranger can send such ones.
    pub(crate) fn accepted(&self) -> u64 {
        self.accepted
    }

    /// Opens the endpoint with this number, or with the first free number.
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
        self.shares.open(place as u16);
        Ok(place as u16)
    }

    /// Sets an endpoint's share of what this engine sends, from now on. It starts with the highest weight and without a limit.
    pub fn set_share(&mut self, endpoint: u16, share: ShareSettings) -> Result<(), PostError> {
        self.endpoint(endpoint).ok_or(PostError::NoEndpoint)?;
        if !self.shares.set(endpoint, share) {
            return Err(PostError::BadShare);
        }
        // What an earlier rate held back looks again.
        self.limited_until = 0;
        Ok(())
    }

    /// Counters of what an endpoint has sent since it was opened.
    pub fn endpoint_counters(&self, endpoint: u16) -> EndpointCounters {
        self.shares.counters(endpoint)
    }

    /// The endpoint's share, as set.
    pub fn share(&self, endpoint: u16) -> ShareSettings {
        self.shares.settings(endpoint)
    }

    /// Closes an endpoint: its operations end without completion, and its regions are deregistered. Messages that were already
    /// sent and reported as complete still reach their target.
    pub fn close(&mut self, endpoint: u16) {
        if self.endpoint(endpoint).is_none() {
            return;
        }
        for key in self.memory.keys_of(endpoint) {
            self.deregister(key);
        }
        let outlives = |op: &Op| op.owned.is_some() && op.reports != Reports::Any && !op.fetches();
        for number in self.ops.numbers(|op| op.endpoint == endpoint) {
            match self.ops.get_mut(number) {
                Some(op) if outlives(op) => op.reports = Reports::Nothing,
                _ => self.complete_op(number, Status::Cancelled, 0),
            }
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
                self.offer_leaves(channel);
                self.end_operation(channel, op, Status::NotReady);
            }
        }
    }

    /// Registers memory for peers that address `endpoint`. Peers address its first byte by the offset `base`. Without a `key`
    /// the engine chooses one.
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

    /// Deregisters memory: from now on the engine neither reads nor writes it for peers. Accesses in progress fail.
    pub fn deregister(&mut self, key: Key) -> bool {
        let known = self.memory.deregister(key);
        if known {
            self.revoke(key);
        }
        known
    }

    /// Sets the maximum datagram size for peers at this address.
    pub fn set_datagram(&mut self, address: SocketAddr, bytes: usize) {
        self.sizes_of(address).datagram = bytes.clamp(576, 65_507);
    }

    fn sizes_of(&mut self, address: SocketAddr) -> &mut Sizes {
        if self.sizes.len() >= 2 * CHANNELS_MAX && !self.sizes.contains_key(&address) {
            let addresses = &self.addresses;
            self.sizes.retain(|address, _| addresses.contains_key(address));
        }
        let unset = Sizes { datagram: self.config.datagram_max, has_parts: false };
        self.sizes.entry(address).or_insert(unset)
    }

    /// Lowers the maximum datagram size for peers at this address, also of an open channel.
    pub fn limit_datagram(&mut self, address: SocketAddr, bytes: usize) {
        let known = self.sizes.get(&address).map_or(self.config.datagram_max, |sizes| sizes.datagram);
        self.set_datagram(address, bytes.min(known));
        let bytes = self.sizes.get(&address).map_or(bytes, |sizes| sizes.datagram);
        let channel = self.addresses.get(&address).copied().and_then(|number| self.channels.get_mut(number));
        if let Some(channel) = channel {
            channel.datagram = channel.datagram.min(bytes);
        }
    }

    /// Repeats HELLO at once, because the one before was not sent.
    pub fn greet_again(&mut self, address: SocketAddr) {
        let Some(number) = self.addresses.get(&address).copied() else { return };
        if let Some(channel) = self.channels.get_mut(number).filter(|channel| channel.peer.is_none()) {
            channel.hello_at = 0;
            self.make_ready(number);
        }
    }

    /// Whether the maximum datagram size for peers at this address has been set.
    pub fn has_datagram(&self, address: SocketAddr) -> bool {
        self.sizes.contains_key(&address)
    }

    /// Removes the oldest completion of an endpoint and returns it.
    pub fn poll(&mut self, endpoint: u16) -> Option<Completion> {
        let completion = self.endpoint_mut(endpoint)?.completions.pop_front()?;
        if completion.kind == Kind::Arrival
            && let Some(channel) = self.addresses.get(&completion.peer.address).copied()
        {
            self.consumed(channel, endpoint, 1);
        }
        Some(completion)
    }

    /// Removes the oldest completion of an operation or receive of this endpoint, and returns it. Notices of writes of peers stay,
    /// and hold back further ones.
    pub fn poll_own(&mut self, endpoint: u16) -> Option<Completion> {
        let completions = &mut self.endpoint_mut(endpoint)?.completions;
        let place = completions.iter().position(|completion| completion.kind != Kind::Arrival)?;
        completions.remove(place)
    }

    /// Number of completions that the application has not taken yet.
    pub fn waiting(&self, endpoint: u16) -> usize {
        self.endpoint(endpoint).map_or(0, |endpoint| endpoint.completions.len())
    }

    /// Number of incomplete operations.
    pub fn operations(&self) -> usize {
        self.ops.len()
    }

    /// Number of receives posted on an endpoint.
    pub fn posted(&self, endpoint: u16) -> usize {
        self.endpoint(endpoint).map_or(0, |endpoint| endpoint.posted.len())
    }

    /// Whether channels may have packets to send.
    pub fn has_departures(&self) -> bool {
        !self.ready.is_empty() || !self.short.is_empty()
    }

    /// Whether all posted operations have been acknowledged.
    pub fn is_idle(&self) -> bool {
        self.ops.len() == 0 && self.channels.numbers(|channel| !channel.window.is_empty()).is_empty()
    }

    /// Number of channels.
    #[cfg(test)]
    pub(super) fn channels(&self) -> usize {
        self.channels.len()
    }

    /// Number of flows of all channels.
    #[cfg(test)]
    pub(super) fn flows(&self) -> usize {
        self.channels.iter().map(|channel| channel.flows.len()).sum()
    }

    /// Memory of events that wait and of messages in assembly, in bytes.
    #[cfg(test)]
    pub(super) fn kept_bytes(&self) -> usize {
        self.kept_bytes
    }

    /// Memory of an endpoint's unexpected messages in bytes: as counted, and of their buffers.
    #[cfg(test)]
    pub(super) fn unexpected_bytes(&self, endpoint: u16) -> (usize, usize) {
        let buffer = |held: &Held| if let Held::Bytes(bytes) = held { bytes.capacity() } else { 0 };
        self.endpoint(endpoint).map_or((0, 0), |own| {
            (own.unexpected_bytes, own.unexpected.iter().map(|message| buffer(&message.held)).sum())
        })
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

    /// Returns the channel to an address, and opens it if needed.
    fn channel_to(&mut self, address: SocketAddr) -> Result<u32, PostError> {
        if let Some(number) = self.addresses.get(&address) {
            return Ok(*number);
        }
        self.new_channel(address, None).ok_or(PostError::Busy)
    }

    /// Creates a channel, which either `peer` has opened or this engine has to open.
    fn new_channel(&mut self, address: SocketAddr, peer: Option<Hello>) -> Option<u32> {
        if self.channels.is_full() {
            self.evict();
        }
        self.channel_number += 1;
        let window_max = peer.map_or(1 << 20, |peer| u64::from(peer.window));
        let unknown = Sizes { datagram: self.config.datagram_max, has_parts: false };
        let Sizes { datagram, has_parts } = self.sizes.get(&address).copied().unwrap_or(unknown);
        let mut channel = Channel::new(address, self.channel_number, 0, self.now, window_max);
        channel.datagram = peer.map_or(datagram, |peer| datagram.min(usize::from(peer.datagram).max(576)));
        channel.parts.is_possible = has_parts;
        channel.is_welcome_due = peer.is_some();
        channel.peer = peer;
        let number = self.channels.insert(channel)?;
        // The session number contains the channel's slot; its other bits are hard to guess.
        let session = self.random.next_u32() << 12 | (number & 0xfff);
        let mut secret = [0; 16];
        self.random.fill_bytes(&mut secret);
        let channel = self.channels.get_mut(number)?;
        (channel.session, channel.secret) = (session, secret);
        self.addresses.insert(address, number);
        self.make_ready(number);
        Some(number)
    }

    /// Queues the channel because it has packets to send.
    fn make_ready(&mut self, number: u32) {
        if let Some(channel) = self.channels.get_mut(number).filter(|channel| !channel.is_queued) {
            channel.is_queued = true;
            self.ready.push_back(number);
        }
    }

    fn buffer(&mut self) -> Vec<u8> {
        self.spare.pop().unwrap_or_else(|| Vec::with_capacity(self.config.eager_max))
    }

    /// Returns a buffer for an unexpected message, which may keep it for long: a small one does not take the memory of a large one.
    fn buffer_for(&mut self, len: usize) -> Vec<u8> {
        if 2 * len > self.config.eager_max { self.buffer() } else { Vec::with_capacity(len) }
    }

    fn recycle(&mut self, mut buffer: Vec<u8>) {
        let eager_max = self.config.eager_max;
        if self.spare.len() < SPARE_MAX && (eager_max.max(1)..=2 * eager_max).contains(&buffer.capacity()) {
            buffer.clear();
            self.spare.push(buffer);
        }
    }
}
