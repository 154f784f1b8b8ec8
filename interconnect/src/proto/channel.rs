//! State of one channel, and of the operations on it. What is done with it stands in the engine.

use std::collections::VecDeque;
use std::net::SocketAddr;

use super::arrivals::Arrivals;
use super::atomic::{Change, Datatype};
use super::memory::{Key, Span};
use super::slab::Slab;
use super::status::Status;
use super::window::Window;
use super::wire::{Body, End, Hello};

/// Messages to one endpoint of a peer that its application has not received. At `eager_max` 16 KiB: 4 MiB a peer and endpoint.
pub(super) const CREDITS: u32 = 256;
/// Pulls that one channel serves at once. A peer asks for 256 and its budget in chunks, which are 320.
pub(super) const SERVES_MAX: usize = 1024;
/// Pulls under way on one channel.
pub(super) const PULLING_MAX: u32 = 256;
/// Writes offered to one endpoint, and taken from one peer.
pub(super) const WRITES_OFFERED_MAX: u32 = 1024;
/// Atomic operations of one channel whose numbers are awaited.
pub(super) const FETCHING_MAX: u32 = 256;
/// Numbers that atomic operations of a peer found, kept until it acknowledges them. A peer asks for 256 at once; the news that it has them may
/// be late.
pub(super) const FOUND_MAX: usize = 1024;
/// Small packets waiting to be sent; a peer that makes more of them than it acknowledges violates the protocol.
pub(super) const CONTROL_MAX: usize = 8192;
/// Fragments of messages that wait for packets before them.
pub(super) const WAITING_BYTES_MAX: usize = 2 << 20;

/// What a packet carried, to send it again.
#[derive(Clone, Copy, Debug)]
pub(super) enum What {
    Control(Body, u8),
    /// Tells of a failure that the acknowledgements count.
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
    /// What an atomic operation of the peer found.
    Found {
        found: u32,
    },
}

/// Numbers that an atomic operation of the peer found.
pub(super) struct Numbers {
    /// The peer's number of the operation.
    pub(super) op: u32,
    pub(super) bytes: Vec<u8>,
}

/// What waits until all packets before it have arrived.
pub(super) struct Event {
    pub(super) body: Body,
    pub(super) flags: u8,
    /// Of a packet that carries bytes in order.
    pub(super) payload: Vec<u8>,
    /// Of a write: whether it was placed.
    pub(super) status: Status,
}

/// What an operation does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    Message {
        tag: Option<u64>,
    },
    Write {
        key: Key,
        at: u64,
    },
    Read {
        key: Key,
        at: u64,
    },
    /// `found`: where the numbers go that it found.
    Atomic {
        key: Key,
        at: u64,
        change: Change,
        datatype: Datatype,
        count: u16,
        found: Option<Span>,
    },
}

/// An operation of this side.
pub(super) struct Op {
    pub(super) channel: u32,
    /// The endpoint that it was posted on.
    pub(super) endpoint: u16,
    pub(super) to: u16,
    pub(super) context: u64,
    pub(super) form: Form,
    pub(super) data: Option<u64>,
    pub(super) span: Span,
    /// A copy of the bytes; `span` points into it.
    pub(super) owned: Option<Vec<u8>>,
    /// Its completion was reported already, or none is wanted.
    pub(super) is_quiet: bool,
    pub(super) is_eager: bool,
    /// Bytes that have been sent once.
    pub(super) sent: u32,
    pub(super) seq: Option<u32>,
    /// Grows when the message is sent again from its beginning.
    pub(super) attempt: u8,
    /// First message after "receiver not ready".
    pub(super) resumes: bool,
    /// Counted in `Channel::fetching`.
    pub(super) is_fetching: bool,
    pub(super) deadline: u64,
}

impl Op {
    /// Whether the target's application sees it, so that it takes a number and a credit.
    pub(super) fn is_seen(&self) -> bool {
        matches!(self.form, Form::Message { .. })
            || self.data.is_some() && matches!(self.form, Form::Write { .. })
    }

    /// Whether it is a write that the target pulls.
    pub(super) fn is_offered_write(&self) -> bool {
        !self.is_eager && matches!(self.form, Form::Write { .. })
    }

    /// Whether it ends with the numbers that it found.
    pub(super) fn fetches(&self) -> bool {
        matches!(self.form, Form::Atomic { found: Some(_), .. })
    }

    /// Whether it is a plain write, which waits for nothing.
    pub(super) fn is_plain_write(&self) -> bool {
        matches!(self.form, Form::Write { .. }) && self.data.is_none()
    }
}

/// Operations to one endpoint of a peer.
pub(super) struct Flow {
    pub(super) to: u16,
    pub(super) queue: VecDeque<u32>,
    /// Sent but not complete, in order; some may be complete by now.
    pub(super) sent: VecDeque<u32>,
    pub(super) next_seq: u32,
    pub(super) limit: u32,
    /// The next message is the first after "receiver not ready".
    pub(super) resume: bool,
    pub(super) paused_until: u64,
    pub(super) not_ready_since: Option<u64>,
    /// Offered writes that are not complete. What the target sees in order waits for them.
    pub(super) writes_offered: u32,
}

impl Flow {
    fn new(to: u16) -> Self {
        Self {
            to,
            queue: VecDeque::new(),
            sent: VecDeque::new(),
            next_seq: 0,
            limit: CREDITS,
            resume: false,
            paused_until: 0,
            not_ready_since: None,
            writes_offered: 0,
        }
    }
}

/// Messages taken from a peer for one endpoint of this side.
pub(super) struct Grant {
    pub(super) to: u16,
    /// Number of the next message.
    pub(super) expected: u32,
    /// Messages that the application has received.
    pub(super) consumed: u32,
    pub(super) limit: u32,
    /// Messages are thrown away until one says `RESUME`.
    pub(super) is_refusing: bool,
}

/// Bytes that the peer asked for.
pub(super) struct Serve {
    pub(super) source: Source,
    pub(super) span: Span,
    pub(super) pull: u32,
    /// Place of the first byte in the peer's pull.
    pub(super) offset: u64,
    pub(super) sent: u32,
    pub(super) arrived: u32,
}

/// Where pulled bytes come from.
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

pub(super) enum Assembled {
    /// A posted buffer: where, and the completion to report.
    Posted(Span, Box<super::endpoint::Completion>),
    /// Nobody waits for it yet.
    Unexpected(Vec<u8>),
}

/// A channel is numbered by its place in the engine.
pub(super) struct Channel {
    pub(super) address: SocketAddr,
    /// Number within this engine's epoch.
    pub(super) number: u32,
    /// What the peer's packets carry.
    pub(super) session: u32,
    /// The peer's answer; none while the channel is being opened.
    pub(super) peer: Option<Hello>,
    pub(super) opened_at: u64,
    pub(super) hello_at: u64,
    pub(super) hellos: u32,
    pub(super) is_welcome_due: bool,
    pub(super) datagram: usize,
    pub(super) window: Window<What>,
    pub(super) arrivals: Arrivals<Event>,
    pub(super) waiting_bytes: usize,
    pub(super) control: VecDeque<What>,
    pub(super) flows: Vec<Flow>,
    pub(super) turn: usize,
    pub(super) serves: Slab<Serve>,
    pub(super) serving: VecDeque<u32>,
    /// Whether offers or pulled data have the next turn.
    pub(super) is_data_turn: bool,
    pub(super) grants: Vec<Grant>,
    pub(super) assembly: Option<Assembly>,
    pub(super) pulling: u32,
    /// Atomic operations whose numbers are awaited. At most `FETCHING_MAX`.
    pub(super) fetching: u32,
    pub(super) found: Slab<Numbers>,
    pub(super) writes_taken: u32,
    /// Failures that the peer counted, and those that it told about.
    pub(super) failures: (u16, u16),
    /// Operations that are successful unless news of a failure comes. At most `OPERATIONS_MAX`.
    pub(super) held: VecDeque<What>,
    pub(super) last_sent_at: u64,
    pub(super) is_queued: bool,
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
            window: Window::new(window_max),
            arrivals: Arrivals::new(),
            waiting_bytes: 0,
            control: VecDeque::new(),
            flows: vec![],
            turn: 0,
            serves: Slab::new(SERVES_MAX),
            serving: VecDeque::new(),
            is_data_turn: false,
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
        }
    }

    /// The flow to an endpoint of the peer.
    pub(super) fn flow(&mut self, to: u16) -> &mut Flow {
        let place = self.flows.iter().position(|flow| flow.to == to).unwrap_or_else(|| {
            self.flows.push(Flow::new(to));
            self.flows.len() - 1
        });
        &mut self.flows[place]
    }

    /// Counts of messages for an endpoint of this side. None: the peer named more endpoints than there can be.
    pub(super) fn grant(&mut self, to: u16) -> Option<&mut Grant> {
        if let Some(place) = self.grants.iter().position(|grant| grant.to == to) {
            return self.grants.get_mut(place);
        }
        if self.grants.len() >= super::endpoint::ENDPOINTS_MAX {
            return None;
        }
        self.grants.push(Grant { to, expected: 0, consumed: 0, limit: CREDITS, is_refusing: false });
        self.grants.last_mut()
    }

    /// Whether the channel waits for its peer, which is asked for a sign of life then.
    pub(super) fn has_work(&self) -> bool {
        self.pulling > 0 || self.flows.iter().any(|flow| !flow.queue.is_empty() || !flow.sent.is_empty())
    }
}
