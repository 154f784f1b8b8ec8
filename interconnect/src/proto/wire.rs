//! Packets as bytes; docs/interconnect.md shows each format. Everything is in network byte order.

use super::atomic::{Change, Datatype};
use super::status::Status;

/// Version of the protocol, in the high four bits of the first byte.
pub const VERSION: u8 = 1;
/// Bytes that every packet begins with.
pub const COMMON: usize = 16;
/// Bytes of a map of arrivals.
pub const MAP: usize = 32;
/// Longest header: common part, map, offer.
pub const HEADER_MAX: usize = COMMON + MAP + 44;
/// Header of a packet of pulled data, without a map.
pub const DATA_HEADER: usize = COMMON + 12;

/// Flags of a packet.
pub mod flags {
    /// A map of arrivals follows the common part.
    pub const MAP: u8 = 0x01;
    /// The sender wants an acknowledgement soon.
    pub const ACK_SOON: u8 = 0x02;
    /// The sender received packets marked "congestion experienced".
    pub const CONGESTION: u8 = 0x04;
    /// The message has a tag.
    pub const TAGGED: u8 = 0x08;
    /// `data` is shown to the target's application; of an atomic operation: the origin wants what it found.
    pub const DATA: u8 = 0x10;
    /// The offer is for a write, the pull for a key.
    pub const MEMORY: u8 = 0x20;
    /// First message after "receiver not ready".
    pub const RESUME: u8 = 0x40;
    /// The end of an operation that is counted in `failures`.
    pub const FAILURE: u8 = 0x80;
}

/// Opens a channel, or accepts one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// When the engine was started, in nanoseconds: grows with each restart.
    pub epoch: u64,
    /// Number of this channel within the epoch: grows with each channel.
    pub channel: u32,
    /// What packets to the sender of this one shall carry as `session`.
    pub session: u32,
    /// Bytes that the sender is able to receive at once.
    pub window: u32,
    /// Largest datagram on the way to the peer, as the sender knows it.
    pub datagram: u16,
}

/// Fragment of an eager message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message {
    /// Target and origin endpoint.
    pub to: u16,
    /// Origin endpoint.
    pub from: u16,
    /// The origin's number of the operation.
    pub op: u32,
    /// Number of the message among those to this endpoint over this channel.
    pub seq: u32,
    /// Length of the whole message.
    pub total: u32,
    /// Place of this fragment in it.
    pub offset: u32,
    /// Tag, if the message has one.
    pub tag: u64,
    /// Immediate data, if there is any.
    pub data: u64,
}

/// Fragment of an eager write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Write {
    /// Target endpoint.
    pub to: u16,
    /// Origin endpoint.
    pub from: u16,
    /// The origin's number of the operation.
    pub op: u32,
    /// Number among the messages, if it has immediate data.
    pub seq: u32,
    /// Bytes of the operation that are still to come behind this packet.
    pub behind: u32,
    /// Names the memory.
    pub key: u64,
    /// Place of this fragment in it.
    pub at: u64,
    /// Immediate data, if there is any.
    pub data: u64,
}

/// Announces a message or write for the target to pull.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offer {
    /// Target endpoint.
    pub to: u16,
    /// Origin endpoint.
    pub from: u16,
    /// The origin's number of the operation.
    pub op: u32,
    /// Number among the messages, unless it is a write without immediate data.
    pub seq: u32,
    /// Length in bytes.
    pub total: u64,
    /// Tag of a message, key of a write.
    pub tag: u64,
    /// Place in the region that is written.
    pub at: u64,
    /// Immediate data, if there is any.
    pub data: u64,
}

/// Asks for bytes of an offer, or of registered memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pull {
    /// Endpoint through which memory is read.
    pub to: u16,
    /// Number of the pull at its sender.
    pub pull: u32,
    /// Bytes wanted.
    pub len: u32,
    /// The peer's number of the operation, or the key.
    pub source: u64,
    /// Place of the first byte in the offer or region.
    pub at: u64,
    /// Place of the first byte in the pull.
    pub offset: u64,
}

/// Bytes of a pull.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Data {
    /// Number of the pull at its receiver.
    pub pull: u32,
    /// Place of the first byte in the pull.
    pub offset: u64,
}

/// What failed, or is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Subject {
    /// An eager operation or an offer of the receiver.
    Operation = 0,
    /// A pull of the receiver.
    Pull = 1,
    /// A message: its endpoint is not ready. `seq` and `to` name the first that has to be sent again.
    NotReady = 2,
}

/// The end of an operation or a pull.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct End {
    /// What ended.
    pub subject: Subject,
    /// How.
    pub status: Status,
    /// The endpoint that is not ready.
    pub to: u16,
    /// Number of the operation or pull.
    pub number: u32,
    /// Number of the message.
    pub seq: u32,
}

/// Messages that an endpoint takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Credit {
    /// The endpoint.
    pub to: u16,
    /// First message number that it does not take yet.
    pub limit: u32,
}

/// Changes numbers in registered memory. The operands follow, then those to compare with if the operation compares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Atomic {
    /// Target endpoint.
    pub to: u16,
    /// Origin endpoint.
    pub from: u16,
    /// The origin's number of the operation.
    pub op: u32,
    /// What happens to each number.
    pub change: Change,
    /// What the numbers are.
    pub datatype: Datatype,
    /// How many there are.
    pub count: u16,
    /// Names the memory.
    pub key: u64,
    /// Place of the first number in it.
    pub at: u64,
}

/// What the numbers were before an atomic operation; they follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// The receiver's number of the operation.
    pub op: u32,
}

/// What a packet is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Body {
    /// Opens a channel. Carries no number, as `Welcome`, `Reset` and `Ack`.
    Hello(Hello),
    /// Accepts a channel.
    Welcome(Hello),
    /// There is no channel with the session of the packet that this one answers.
    Reset,
    /// Only acknowledges.
    Ack,
    /// Takes a number and does nothing: keep-alive, or in place of what was cancelled.
    Noop,
    /// Fragment of an eager message.
    Message(Message),
    /// Fragment of an eager write.
    Write(Write),
    /// Announces what is to be pulled.
    Offer(Offer),
    /// Asks for bytes.
    Pull(Pull),
    /// Bytes that were asked for.
    Data(Data),
    /// An operation or a pull ended.
    End(End),
    /// An endpoint takes more messages.
    Credit(Credit),
    /// An atomic operation.
    Atomic(Atomic),
    /// What an atomic operation found.
    Found(Found),
}

impl Body {
    /// Whether the packet takes a number, is acknowledged and sent again when it is lost.
    pub fn is_numbered(&self) -> bool {
        !matches!(self, Body::Hello(_) | Body::Welcome(_) | Body::Reset | Body::Ack)
    }

    /// Whether a payload follows.
    pub fn carries(&self) -> bool {
        let is_placed = matches!(self, Body::Write(_) | Body::Data(_));
        is_placed || self.carries_in_order()
    }

    /// Whether a payload follows that waits for the packets before it.
    pub(super) fn carries_in_order(&self) -> bool {
        matches!(self, Body::Message(_) | Body::Atomic(_) | Body::Found(_))
    }
}

/// A packet without its payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// `flags`, without `MAP`.
    pub flags: u8,
    /// Failures among the packets before `ack`, of which the receiver learns by as many ends. Success waits for them.
    pub failures: u16,
    /// Names the channel at the receiver.
    pub session: u32,
    /// Low bits of the packet's number.
    pub number: u32,
    /// Low bits of the number that the sender expects next.
    pub ack: u32,
    /// Bit `i` of word `i / 64`: packet `ack + i` has arrived.
    pub map: Option<[u64; 4]>,
    /// What it is for.
    pub body: Body,
}

/// Bytes of a header.
#[derive(Clone, Copy, Debug)]
pub struct Encoded {
    bytes: [u8; HEADER_MAX],
    len: usize,
}

impl Encoded {
    /// The bytes.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }

    fn put<const N: usize>(&mut self, bytes: [u8; N]) {
        self.bytes[self.len..self.len + N].copy_from_slice(&bytes);
        self.len += N;
    }

    fn u8(&mut self, value: u8) {
        self.put([value]);
    }

    fn u16(&mut self, value: u16) {
        self.put(value.to_be_bytes());
    }

    fn u32(&mut self, value: u32) {
        self.put(value.to_be_bytes());
    }

    fn u64(&mut self, value: u64) {
        self.put(value.to_be_bytes());
    }
}

/// Reads bytes from the front.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (bytes, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*bytes)
    }

    fn u8(&mut self) -> Option<u8> {
        self.take::<1>().map(|[byte]| byte)
    }

    fn u16(&mut self) -> Option<u16> {
        self.take().map(u16::from_be_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_be_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_be_bytes)
    }
}

impl Header {
    /// The header's bytes.
    pub fn encode(&self) -> Encoded {
        let mut out = Encoded { bytes: [0; HEADER_MAX], len: 0 };
        out.u8(VERSION << 4 | kind(&self.body));
        out.u8(self.flags & !flags::MAP | if self.map.is_some() { flags::MAP } else { 0 });
        out.u16(self.failures);
        out.u32(self.session);
        out.u32(self.number);
        out.u32(self.ack);
        for word in self.map.iter().flatten() {
            out.u64(*word);
        }
        encode_body(&mut out, &self.body);
        out
    }

    /// Reads a packet: its header and its payload. None: it is none of this version.
    pub fn decode(packet: &[u8]) -> Option<(Self, &[u8])> {
        let mut reader = Reader(packet);
        let first = reader.u8()?;
        let flags = reader.u8()?;
        let failures = reader.u16()?;
        if first >> 4 != VERSION {
            return None;
        }
        let (session, number, ack) = (reader.u32()?, reader.u32()?, reader.u32()?);
        let map = match flags & flags::MAP {
            0 => None,
            _ => Some([reader.u64()?, reader.u64()?, reader.u64()?, reader.u64()?]),
        };
        let body = decode_body(&mut reader, first & 15)?;
        if !body.carries() && !reader.0.is_empty() {
            return None;
        }
        Some((Self { flags: flags & !flags::MAP, failures, session, number, ack, map, body }, reader.0))
    }

    /// Length of the encoded header.
    pub fn len(body: &Body, has_map: bool) -> usize {
        let own = match body {
            Body::Reset | Body::Ack | Body::Noop => 0,
            Body::Hello(_) | Body::Welcome(_) => 22,
            Body::Message(_) => 36,
            Body::Write(_) => 40,
            Body::Offer(_) => 44,
            Body::Pull(_) => 34,
            Body::Data(_) => 12,
            Body::End(_) => 12,
            Body::Credit(_) => 6,
            Body::Atomic(_) => 28,
            Body::Found(_) => 4,
        };
        COMMON + own + if has_map { MAP } else { 0 }
    }
}

fn kind(body: &Body) -> u8 {
    match body {
        Body::Hello(_) => 0,
        Body::Welcome(_) => 1,
        Body::Reset => 2,
        Body::Ack => 3,
        Body::Noop => 4,
        Body::Message(_) => 5,
        Body::Write(_) => 6,
        Body::Offer(_) => 7,
        Body::Pull(_) => 8,
        Body::Data(_) => 9,
        Body::End(_) => 10,
        Body::Credit(_) => 11,
        Body::Atomic(_) => 12,
        Body::Found(_) => 13,
    }
}

fn encode_body(out: &mut Encoded, body: &Body) {
    match *body {
        Body::Reset | Body::Ack | Body::Noop => {}
        Body::Hello(hello) | Body::Welcome(hello) => {
            out.u64(hello.epoch);
            [hello.channel, hello.session, hello.window].into_iter().for_each(|value| out.u32(value));
            out.u16(hello.datagram);
        }
        Body::Message(message) => {
            [message.to, message.from].into_iter().for_each(|value| out.u16(value));
            [message.op, message.seq, message.total, message.offset]
                .into_iter()
                .for_each(|value| out.u32(value));
            [message.tag, message.data].into_iter().for_each(|value| out.u64(value));
        }
        Body::Write(write) => {
            [write.to, write.from].into_iter().for_each(|value| out.u16(value));
            [write.op, write.seq, write.behind].into_iter().for_each(|value| out.u32(value));
            [write.key, write.at, write.data].into_iter().for_each(|value| out.u64(value));
        }
        Body::Offer(offer) => {
            [offer.to, offer.from].into_iter().for_each(|value| out.u16(value));
            [offer.op, offer.seq].into_iter().for_each(|value| out.u32(value));
            [offer.total, offer.tag, offer.at, offer.data].into_iter().for_each(|value| out.u64(value));
        }
        Body::Pull(pull) => {
            out.u16(pull.to);
            [pull.pull, pull.len].into_iter().for_each(|value| out.u32(value));
            [pull.source, pull.at, pull.offset].into_iter().for_each(|value| out.u64(value));
        }
        Body::Data(data) => {
            out.u32(data.pull);
            out.u64(data.offset);
        }
        Body::End(end) => {
            out.u8(end.subject as u8);
            out.u8(end.status as u8);
            out.u16(end.to);
            out.u32(end.number);
            out.u32(end.seq);
        }
        Body::Credit(credit) => {
            out.u16(credit.to);
            out.u32(credit.limit);
        }
        Body::Atomic(atomic) => {
            [atomic.to, atomic.from].into_iter().for_each(|value| out.u16(value));
            out.u32(atomic.op);
            [atomic.change as u8, atomic.datatype as u8].into_iter().for_each(|value| out.u8(value));
            out.u16(atomic.count);
            [atomic.key, atomic.at].into_iter().for_each(|value| out.u64(value));
        }
        Body::Found(found) => out.u32(found.op),
    }
}

fn decode_body(r: &mut Reader, kind: u8) -> Option<Body> {
    Some(match kind {
        0 | 1 => {
            let (epoch, channel, session) = (r.u64()?, r.u32()?, r.u32()?);
            let hello = Hello { epoch, channel, session, window: r.u32()?, datagram: r.u16()? };
            if kind == 0 { Body::Hello(hello) } else { Body::Welcome(hello) }
        }
        2 => Body::Reset,
        3 => Body::Ack,
        4 => Body::Noop,
        5 => {
            let (to, from, op, seq, total) = (r.u16()?, r.u16()?, r.u32()?, r.u32()?, r.u32()?);
            Body::Message(Message {
                to,
                from,
                op,
                seq,
                total,
                offset: r.u32()?,
                tag: r.u64()?,
                data: r.u64()?,
            })
        }
        6 => {
            let (to, from, op, seq, behind) = (r.u16()?, r.u16()?, r.u32()?, r.u32()?, r.u32()?);
            Body::Write(Write { to, from, op, seq, behind, key: r.u64()?, at: r.u64()?, data: r.u64()? })
        }
        7 => {
            let (to, from, op, seq, total) = (r.u16()?, r.u16()?, r.u32()?, r.u32()?, r.u64()?);
            Body::Offer(Offer { to, from, op, seq, total, tag: r.u64()?, at: r.u64()?, data: r.u64()? })
        }
        8 => {
            let (to, pull, len, source) = (r.u16()?, r.u32()?, r.u32()?, r.u64()?);
            Body::Pull(Pull { to, pull, len, source, at: r.u64()?, offset: r.u64()? })
        }
        9 => Body::Data(Data { pull: r.u32()?, offset: r.u64()? }),
        10 => {
            let subjects = [Subject::Operation, Subject::Pull, Subject::NotReady];
            let subject = *subjects.get(usize::from(r.u8()?))?;
            let status = Status::from_number(r.u8()?)?;
            Body::End(End { subject, status, to: r.u16()?, number: r.u32()?, seq: r.u32()? })
        }
        11 => Body::Credit(Credit { to: r.u16()?, limit: r.u32()? }),
        12 => {
            let (to, from, op) = (r.u16()?, r.u16()?, r.u32()?);
            let change = Change::from_number(r.u8()?)?;
            let datatype = Datatype::from_number(r.u8()?)?;
            let (count, key, at) = (r.u16()?, r.u64()?, r.u64()?);
            Body::Atomic(Atomic { to, from, op, change, datatype, count, key, at })
        }
        13 => Body::Found(Found { op: r.u32()? }),
        _ => return None,
    })
}

/// The number near `reference` with these low 32 bits.
pub fn expand(reference: u64, low: u32) -> u64 {
    reference.wrapping_add_signed(i64::from(low.wrapping_sub(reference as u32) as i32))
}
