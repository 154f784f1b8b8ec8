//! State of one channel and of its operations. The engine implements the behaviour.

use std::collections::VecDeque;
use std::net::SocketAddr;

use super::arrivals::Arrivals;
use super::atomic::{Change, Datatype};
use super::lanes::Lanes;
use super::memory::{Key, Span};
use super::slab::Slab;
use super::status::Status;
use super::window::Window;
use super::wire::{Body, End, Hello, Write, flags};
use super::write_order::WriteOrder;

/// Maximum number of messages to one endpoint of a peer that the peer's application has not received. With an `eager_max` of
/// 16 KiB: 4 MiB per peer and endpoint.
pub(super) const CREDITS: u32 = 256;
/// Maximum number of pull requests that one channel serves at once. A conforming peer stays below it: its 256 pulls and
/// the chunks of its budget make at most 320 requests.
pub(super) const SERVES_MAX: usize = 1024;
/// Maximum number of pulls in progress on one channel.
pub(super) const PULLING_MAX: u32 = 256;
/// Maximum number of writes offered to one endpoint, and of offered writes accepted from one peer.
pub(super) const WRITES_OFFERED_MAX: u32 = 1024;
/// Maximum number of writes under way to one endpoint when another large write with immediate data is offered. They have at least 256 KiB
/// together, and usually several MiB.
pub(super) const NOTICED_WRITES_MAX: u32 = 16;
/// Maximum number of atomic operations of one channel that wait for fetched values.
pub(super) const FETCHING_MAX: u32 = 256;
/// Maximum number of fetched values that are kept for a peer until the peer acknowledges them. A peer has at most 256 requests
/// outstanding, but the acknowledgement of their results may arrive late.
pub(super) const FOUND_MAX: usize = 1024;
/// Maximum number of queued control packets. A peer that causes more of them than it acknowledges violates the protocol.
pub(super) const CONTROL_MAX: usize = 8192;
/// Maximum memory of the events of one channel that wait for earlier packets, in bytes.
pub(super) const WAITING_BYTES_MAX: usize = 2 << 20;
/// Maximum memory of these events and of messages in assembly on all channels together, in bytes: enough for 32 channels that
/// lose packets at once. Further packets that arrive out of order are dropped, and the peer retransmits them.
pub(super) const KEPT_BYTES_MAX: usize = 64 << 20;

/// Content of a packet, kept for its retransmission.
#[derive(Clone, Copy, Debug)]
pub(super) enum What {
    Control(Body, u8),
    /// Reports a failure that the acknowledgements count.
    Failure(End),
    Eager {
        op: u32,
        attempt: u8,
        offset: u32,
        len: u32,
    },
    Offer {
        op: u32,
        attempt: u8,
    },
    Data {
        serve: u32,
        offset: u32,
        len: u32,
    },
    /// Returns the values that an atomic operation of the peer fetched.
    Found {
        found: u32,
    },
}

/// Values that an atomic operation of the peer fetched.
pub(super) struct Numbers {
    /// The operation's number at the peer.
    pub(super) op: u32,
    pub(super) bytes: Vec<u8>,
}

/// Part of a packet that is processed only after all earlier packets have arrived.
pub(super) struct Event {
    pub(super) body: Body,
    pub(super) flags: u8,
    /// Payload of a packet that carries bytes in order.
    pub(super) payload: Vec<u8>,
    /// Length of the packet's payload, which may have been placed already.
    pub(super) len: usize,
    /// For a packet of a write: whether its bytes were placed.
    pub(super) status: Status,
}

impl Event {
    /// Bytes of memory that the event takes while it waits.
    pub(super) fn cost(&self) -> usize {
        size_of::<Self>() + self.payload.capacity()
    }
}

/// A peer's write with immediate data whose packets are being processed, in order.
#[derive(Default)]
pub(super) struct Writing {
    op: u32,
    /// Offset within the region where the next packet continues the write.
    next: u64,
    /// Number of bytes from there to the end of the write.
    behind: u32,
    placed: u64,
}

impl Writing {
    /// Adds a packet of `len` bytes, and returns how many bytes of its operation have been placed. A packet that does not continue
    /// the operation begins it, perhaps for another attempt.
    pub(super) fn add(&mut self, write: &Write, len: usize) -> u64 {
        let continues = self.op == write.op
            && self.next == write.at
            && u64::from(self.behind) == len as u64 + u64::from(write.behind);
        let placed = if continues { self.placed } else { 0 } + len as u64;
        *self = Self { op: write.op, next: write.at.wrapping_add(len as u64), behind: write.behind, placed };
        placed
    }
}

/// Kind and parameters of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    Message {
        tag: Option<u64>,
    },
    Write {
        key: Key,
        at: u64,
    },
    /// A write of `len` bytes that are in the target's memory already.
    Placed {
        key: Key,
        at: u64,
        len: u32,
    },
    Read {
        key: Key,
        at: u64,
    },
    /// `found`: destination of the fetched values.
    Atomic {
        key: Key,
        at: u64,
        change: Change,
        datatype: Datatype,
        count: u16,
        found: Option<Span>,
    },
}

/// Completions that an operation still reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reports {
    /// Success or failure.
    Any,
    /// The application wants to know of a failure only.
    Failure,
    /// A buffered operation whose success has been reported already.
    LateFailure,
    /// The endpoint has closed.
    Nothing,
}

/// An operation that this engine originated.
pub(super) struct Op {
    pub(super) channel: u32,
    /// The endpoint on which the application posted the operation.
    pub(super) endpoint: u16,
    pub(super) to: u16,
    pub(super) context: u64,
    pub(super) form: Form,
    pub(super) data: Option<u64>,
    pub(super) span: Span,
    /// A copy of the bytes; `span` points into it.
    pub(super) owned: Option<Vec<u8>>,
    pub(super) reports: Reports,
    pub(super) is_eager: bool,
    /// Number of bytes that have been sent at least once.
    pub(super) sent: u32,
    pub(super) seq: Option<u32>,
    /// Incremented when the message is sent again from its beginning.
    pub(super) attempt: u8,
    /// The message is the first one after "receiver not ready".
    pub(super) resumes: bool,
    /// The pull of a read that has started.
    pub(super) pull: Option<u32>,
    /// `Channel::fetching` counts this operation.
    pub(super) is_fetching: bool,
    pub(super) deadline: u64,
}

impl Op {
    /// Whether the operation is visible to the target's application, so that it takes a message number and a credit.
    pub(super) fn is_seen(&self) -> bool {
        matches!(self.form, Form::Message { .. })
            || self.data.is_some() && matches!(self.form, Form::Write { .. } | Form::Placed { .. })
    }

    /// Whether the operation is a write that the target pulls.
    pub(super) fn is_offered_write(&self) -> bool {
        !self.is_eager && matches!(self.form, Form::Write { .. })
    }

    /// Whether the operation fetches values.
    pub(super) fn fetches(&self) -> bool {
        matches!(self.form, Form::Atomic { found: Some(_), .. })
    }

    /// Whether the operation is a write without immediate data, which need not wait for other operations.
    pub(super) fn is_plain_write(&self) -> bool {
        matches!(self.form, Form::Write { .. } | Form::Placed { .. }) && self.data.is_none()
    }

    /// Number of bytes that the operation moves.
    pub(super) fn len(&self) -> u64 {
        if let Form::Placed { len, .. } = self.form { len.into() } else { self.span.len() as u64 }
    }
}

/// Operations to one endpoint of a peer.
pub(super) struct Flow {
    pub(super) to: u16,
    /// Operations that have to be sent again, in order, before all others.
    pub(super) again: VecDeque<u32>,
    /// Operations that have not been sent, or not completely, by this engine's endpoint.
    pub(super) lanes: Lanes,
    /// Operations that were sent, in order. Some of them may be complete already.
    pub(super) sent: VecDeque<u32>,
    pub(super) next_seq: u32,
    pub(super) limit: u32,
    /// The next message is the first one after "receiver not ready".
    pub(super) resume: bool,
    pub(super) paused_until: u64,
    pub(super) not_ready_since: Option<u64>,
    /// Number of incomplete offered writes. Reads, atomic operations and what the target's application sees in order wait for them. Offered writes
    /// with immediate data do not: the target orders their arrivals.
    pub(super) writes_offered: u32,
}

impl Flow {
    fn new(to: u16) -> Self {
        Self {
            to,
            again: VecDeque::new(),
            lanes: Lanes::default(),
            sent: VecDeque::new(),
            next_seq: 0,
            limit: CREDITS,
            resume: false,
            paused_until: 0,
            not_ready_since: None,
            writes_offered: 0,
        }
    }

    /// Whether nothing waits to be sent.
    pub(super) fn is_empty(&self) -> bool {
        self.again.is_empty() && self.lanes.is_empty()
    }

    /// The operation to send next, and whether it is sent again.
    pub(super) fn front(&self) -> Option<(u32, bool)> {
        let again = self.again.front().map(|id| (*id, true));
        again.or_else(|| Some((self.lanes.front()?.1, false)))
    }

    /// Removes the operation that `front` returns.
    pub(super) fn pop(&mut self) {
        if self.again.pop_front().is_none() {
            self.lanes.pop();
        }
    }

    /// Operations that wait to be sent, or sent again.
    pub(super) fn waiting(&self) -> impl Iterator<Item = u32> {
        self.again.iter().copied().chain(self.lanes.iter())
    }
}

/// Flow control of the messages from a peer to one endpoint of this engine.
pub(super) struct Grant {
    pub(super) to: u16,
    /// Number of the next expected message.
    pub(super) expected: u32,
    /// Number of messages that the application has received.
    pub(super) consumed: u32,
    pub(super) limit: u32,
    /// The endpoint discards messages until one carries the flag `RESUME`.
    pub(super) is_refusing: bool,
    /// Large writes of the peer to the endpoint.
    pub(super) writes: WriteOrder,
}

/// Bytes that the peer requested with a pull.
pub(super) struct Serve {
    pub(super) source: Source,
    /// The endpoint of this engine that sends them.
    pub(super) endpoint: u16,
    pub(super) span: Span,
    pub(super) pull: u32,
    /// Offset of the first byte within the peer's pull.
    pub(super) offset: u64,
    pub(super) sent: u32,
    /// Offset and length of bytes to send again in datagrams: lost with a stream, or in a packet larger than a datagram.
    pub(super) again: Vec<(u32, u32)>,
    pub(super) arrived: u32,
}

impl Serve {
    /// Takes the next bytes to send, at most `most`: offset and length.
    pub(super) fn next(&mut self, most: usize) -> Option<(u32, u32)> {
        if let Some((offset, len)) = self.again.pop() {
            let first = len.min(most as u32);
            if first < len {
                self.again.push((offset + first, len - first));
            }
            return Some((offset, first));
        }
        let offset = self.sent;
        let len = most.min(self.span.len() - offset as usize) as u32;
        self.sent += len;
        (len > 0).then_some((offset, len))
    }

    /// Whether all has been sent.
    pub(super) fn is_sent(&self) -> bool {
        self.sent as usize == self.span.len() && self.again.is_empty()
    }
}

/// Source of pulled bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    Offer(u32),
    Key(Key),
}

/// A message whose fragments are arriving.
pub(super) struct Assembly {
    pub(super) to: u16,
    pub(super) op: u32,
    pub(super) total: u32,
    pub(super) received: u32,
    pub(super) target: Assembled,
}

impl Assembly {
    /// Bytes of the engine's own memory that the message takes.
    pub(super) fn cost(&self) -> usize {
        if matches!(self.target, Assembled::Unexpected(_)) { self.total as usize } else { 0 }
    }
}

pub(super) enum Assembled {
    /// The message goes into a posted buffer: its span, and the completion to report.
    Posted(Span, Box<super::endpoint::Completion>),
    /// No posted receive matches the message yet.
    Unexpected(Vec<u8>),
}

/// State of a channel's streams; see `engine/streams.rs`.
#[derive(Default)]
pub(super) struct StreamState {
    /// An invitation is scheduled.
    pub(super) is_wanted: bool,
    /// Number of invitations sent, and the earliest time of the next one.
    pub(super) invites: u32,
    pub(super) invite_at: u64,
    /// Earliest time of the next connect.
    pub(super) connects_at: u64,
    /// An incoming stream is open.
    pub(super) is_incoming: bool,
    /// `Some` if an outgoing stream is open: whether its send buffer has room.
    pub(super) outgoing: Option<bool>,
}

/// State of a channel's packets in parts; see `engine/parts.rs`.
#[derive(Default)]
pub(super) struct Parts {
    /// The node can send them.
    pub(super) is_possible: bool,
    /// The peer takes them.
    pub(super) is_taken: bool,
    /// Number of such packets sent, and lost, over which losses are counted.
    pub(super) sent: u32,
    pub(super) lost: u32,
    /// Until when none is sent because the path is lossy.
    pub(super) avoided_until: u64,
}

/// A channel. Its number is its index in the engine.
pub(super) struct Channel {
    pub(super) address: SocketAddr,
    /// Number of the channel within this engine's epoch.
    pub(super) number: u32,
    /// Session number that the peer's packets carry.
    pub(super) session: u32,
    /// The peer's half of the handshake; `None` until it arrives.
    pub(super) peer: Option<Hello>,
    pub(super) opened_at: u64,
    pub(super) hello_at: u64,
    pub(super) hellos: u32,
    pub(super) is_welcome_due: bool,
    pub(super) datagram: usize,
    pub(super) parts: Parts,
    /// The peer's handshake has the flag IN_ORDER.
    pub(super) peer_orders: bool,
    /// Packets travel through shared memory; the datagram size of the network meanwhile.
    pub(super) local: Option<usize>,
    /// Names this channel in an invitation to shared memory, or to a stream.
    pub(super) secret: [u8; 16],
    pub(super) stream: StreamState,
    /// Number of invitations sent, and the earliest time of the next one.
    pub(super) invites: u32,
    pub(super) invite_at: u64,
    pub(super) window: Window<What>,
    pub(super) arrivals: Arrivals<Event>,
    pub(super) waiting_bytes: usize,
    pub(super) control: VecDeque<What>,
    pub(super) flows: Vec<Flow>,
    /// Index of the flow that sends next; 0 while there are none.
    pub(super) turn: usize,
    pub(super) serves: Slab<Serve>,
    pub(super) serving: Lanes,
    /// Whether pulled data goes before the fragments and offers of the flows in the current turn.
    pub(super) is_data_turn: bool,
    /// When asked last, no flow had a packet that may be sent: all are empty, or wait for credit, a share or an earlier write.
    pub(super) flows_wait: bool,
    pub(super) grants: Vec<Grant>,
    pub(super) assembly: Option<Assembly>,
    pub(super) pulling: u32,
    /// Number of atomic operations that wait for fetched values. At most `FETCHING_MAX`.
    pub(super) fetching: u32,
    pub(super) found: Slab<Numbers>,
    pub(super) writes_taken: u32,
    /// Number of failures that the peer's acknowledgements count, and number of failure reports received.
    pub(super) failures: (u16, u16),
    /// Acknowledged operations that succeed unless an outstanding failure report names them. At most `OPERATIONS_MAX`.
    pub(super) held: VecDeque<What>,
    pub(super) last_sent_at: u64,
    pub(super) is_queued: bool,
    /// The channel waits for credit, or for the time at which a rate allows packets.
    pub(super) is_short: bool,
    pub(super) is_limited: bool,
    pub(super) writing: Writing,
    /// Time until which no other handshake of the peer causes a challenge.
    pub(super) challenged_until: u64,
    /// Time of the last packet with this channel's session number, which proves that the peer receives at its address.
    pub(super) heard_at: Option<u64>,
    /// Number of operations, pulls and held offers that name this channel.
    pub(super) uses: u32,
}

impl Channel {
    pub(super) fn new(address: SocketAddr, number: u32, session: u32, now: u64, window_max: u64) -> Self {
        Self {
            address,
            number,
            session,
            peer: None,
            opened_at: now,
            hello_at: 0,
            hellos: 0,
            is_welcome_due: false,
            datagram: 1200,
            parts: Parts::default(),
            peer_orders: false,
            local: None,
            secret: [0; 16],
            stream: StreamState::default(),
            invites: 0,
            invite_at: 0,
            window: Window::new(window_max),
            arrivals: Arrivals::new(),
            waiting_bytes: 0,
            control: VecDeque::new(),
            flows: vec![],
            turn: 0,
            serves: Slab::new(SERVES_MAX),
            serving: Lanes::default(),
            is_data_turn: false,
            flows_wait: false,
            grants: vec![],
            assembly: None,
            pulling: 0,
            fetching: 0,
            found: Slab::new(FOUND_MAX),
            writes_taken: 0,
            failures: (0, 0),
            held: VecDeque::new(),
            last_sent_at: now,
            is_queued: false,
            is_short: false,
            is_limited: false,
            writing: Writing::default(),
            challenged_until: 0,
            heard_at: None,
            uses: 0,
        }
    }

    /// Notes what the peer's handshake says that it can do.
    pub(super) fn note_abilities(&mut self, flags: u8) {
        self.parts.is_taken = flags & flags::PARTS != 0;
        self.peer_orders = flags & flags::IN_ORDER != 0;
    }

    /// Whether nothing is under way, so that closing the channel ends no operation of either side.
    pub(super) fn is_idle(&self) -> bool {
        self.uses == 0
            && self.window.is_empty()
            && self.control.is_empty()
            && self.assembly.is_none()
            && self.serves.len() == 0
            && !self.arrivals.has_gaps()
            && self.arrivals.due().is_none()
            && !self.is_welcome_due
    }

    /// Whether only a handshake came from the peer's address, which anybody may have forged.
    pub(super) fn is_unproven(&self) -> bool {
        self.peer.is_some() && self.heard_at.is_none()
    }

    /// Bytes of the engine's own memory that the channel's packets take.
    pub(super) fn kept_bytes(&self) -> usize {
        self.waiting_bytes + self.assembly.as_ref().map_or(0, Assembly::cost)
    }

    /// Number of incomplete offered writes to all endpoints of the peer.
    pub(super) fn writes_offered(&self) -> u32 {
        self.flows.iter().map(|flow| flow.writes_offered).sum()
    }

    /// Returns the flow to an endpoint of the peer, and creates it if needed.
    pub(super) fn flow(&mut self, to: u16) -> &mut Flow {
        let place = self.flows.iter().position(|flow| flow.to == to).unwrap_or_else(|| {
            self.flows.push(Flow::new(to));
            self.flows.len() - 1
        });
        &mut self.flows[place]
    }

    /// Returns the flow control of an endpoint of this engine, or `None` if the peer named more endpoints than can exist.
    pub(super) fn grant(&mut self, to: u16) -> Option<&mut Grant> {
        if let Some(place) = self.grants.iter().position(|grant| grant.to == to) {
            return self.grants.get_mut(place);
        }
        if self.grants.len() >= super::endpoint::ENDPOINTS_MAX {
            return None;
        }
        let writes = WriteOrder::default();
        self.grants.push(Grant { to, expected: 0, consumed: 0, limit: CREDITS, is_refusing: false, writes });
        self.grants.last_mut()
    }

    /// Whether the channel waits for its peer, so that keep-alives have to be sent.
    pub(super) fn has_work(&self) -> bool {
        self.pulling > 0 || self.flows.iter().any(|flow| !flow.is_empty() || !flow.sent.is_empty())
    }
}
