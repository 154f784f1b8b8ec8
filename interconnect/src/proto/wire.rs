//! Encoding and decoding of packets. docs/interconnect.md shows each format. All fields are in network byte order.

use super::atomic::{Change, Datatype};
use super::status::Status;

/// Protocol version, in the high four bits of the first byte.
pub const VERSION: u8 = 1;
/// Size in bytes of the common header that begins every packet.
pub const COMMON: usize = 16;
/// Size in bytes of an arrival map.
pub const MAP: usize = 32;
/// Size in bytes of the longest header: common header, arrival map, offer.
pub const HEADER_MAX: usize = COMMON + MAP + 44;
/// Size in bytes of the header of a data packet without an arrival map.
pub const DATA_HEADER: usize = COMMON + 12;

/// Packet flags.
pub mod flags {
    /// An arrival map follows the common header.
    pub const MAP: u8 = 0x01;
    /// The sender requests a prompt acknowledgement.
    pub const ACK_SOON: u8 = 0x02;
    /// The sender has received packets marked "congestion experienced".
    pub const CONGESTION: u8 = 0x04;
    /// The message has a tag.
    pub const TAGGED: u8 = 0x08;
    /// The packet carries immediate data for the target's application. In an atomic operation: the origin wants the fetched
    /// values.
    pub const DATA: u8 = 0x10;
    /// The offer announces a write. In a pull: the pull addresses a region by its key.
    pub const MEMORY: u8 = 0x20;
    /// The message is the first one after "receiver not ready".
    pub const RESUME: u8 = 0x40;
    /// In a handshake, which has no RESUME: the sender takes packets in parts.
    pub const PARTS: u8 = RESUME;
    /// In a handshake, which has no MEMORY: the sender orders the arrivals of large writes, and reports those that it gives up.
    pub const IN_ORDER: u8 = MEMORY;
    /// The end report belongs to an operation that `failures` counts.
    pub const FAILURE: u8 = 0x80;
}

/// Handshake that opens or accepts a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// Start time of the engine in nanoseconds, which tells its lives apart.
    pub epoch: u64,
    /// Number of this channel within the epoch.
    pub channel: u32,
    /// Session number that packets to the sender of this handshake have to carry.
    pub session: u32,
    /// Number of bytes that the sender can receive at once.
    pub window: u32,
    /// Size in bytes of the largest datagram on the path to the peer, as far as the sender knows.
    pub datagram: u16,
}

/// Fragment of an eager message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message {
    /// Target endpoint.
    pub to: u16,
    /// Origin endpoint.
    pub from: u16,
    /// The operation's number at its origin.
    pub op: u32,
    /// Number of the message in the sequence of messages to this endpoint over this channel.
    pub seq: u32,
    /// Length of the whole message in bytes.
    pub total: u32,
    /// Offset of this fragment within the message.
    pub offset: u32,
    /// Tag of the message, if any.
    pub tag: u64,
    /// Immediate data, if any.
    pub data: u64,
}

/// Fragment of an eager write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Write {
    /// Target endpoint.
    pub to: u16,
    /// Origin endpoint.
    pub from: u16,
    /// The operation's number at its origin.
    pub op: u32,
    /// Number in the sequence of messages, if the write has immediate data.
    pub seq: u32,
    /// Number of bytes of the operation that follow this packet's bytes.
    pub behind: u32,
    /// Key of the region.
    pub key: u64,
    /// Offset of this fragment within the region.
    pub at: u64,
    /// Immediate data, if any.
    pub data: u64,
}

/// Offers a message or write to the target, which pulls its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offer {
    /// Target endpoint.
    pub to: u16,
    /// Origin endpoint.
    pub from: u16,
    /// The operation's number at its origin.
    pub op: u32,
    /// Number in the sequence of messages; unused for a write without immediate data.
    pub seq: u32,
    /// Length in bytes.
    pub total: u64,
    /// Tag of a message, or key of a write.
    pub tag: u64,
    /// Offset of the write within the region.
    pub at: u64,
    /// Immediate data, if any.
    pub data: u64,
}

/// Requests bytes of an offer or of registered memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pull {
    /// Endpoint that grants access to the memory.
    pub to: u16,
    /// Number of the pull at the sender of this request.
    pub pull: u32,
    /// Number of requested bytes.
    pub len: u32,
    /// The operation's number at the receiver of this request, or the key of the region.
    pub source: u64,
    /// Offset of the first byte within the offer or region.
    pub at: u64,
    /// Offset of the first byte within the pull.
    pub offset: u64,
}

/// Bytes that a pull requested.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Data {
    /// Number of the pull at the receiver of this packet.
    pub pull: u32,
    /// Offset of the first byte within the pull.
    pub offset: u64,
}

/// Kind of operation that failed or ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Subject {
    /// An eager operation or an offer of the packet's receiver.
    Operation = 0,
    /// A pull of the packet's receiver.
    Pull = 1,
    /// A message whose target endpoint is not ready. `seq` and `to` name the first message that has to be sent again.
    NotReady = 2,
}

/// The end of an operation or a pull.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct End {
    /// Kind of operation that ended.
    pub subject: Subject,
    /// Result of the operation.
    pub status: Status,
    /// The endpoint that is not ready.
    pub to: u16,
    /// Number of the operation or pull at the packet's receiver.
    pub number: u32,
    /// Number of the message to resume from.
    pub seq: u32,
}

/// Credit update: the number of messages that an endpoint accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Credit {
    /// The endpoint that accepts messages.
    pub to: u16,
    /// First message number that the endpoint does not accept yet.
    pub limit: u32,
}

/// Atomic operation on values in registered memory. The operands follow, then the compare operands if the function takes any.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Atomic {
    /// Target endpoint.
    pub to: u16,
    /// Origin endpoint.
    pub from: u16,
    /// The operation's number at its origin.
    pub op: u32,
    /// Function that is applied to each value.
    pub change: Change,
    /// Data type of the values.
    pub datatype: Datatype,
    /// Number of values.
    pub count: u16,
    /// Key of the region.
    pub key: u64,
    /// Offset of the first value within the region.
    pub at: u64,
}

/// Header of the values that an atomic operation fetched, which follow as payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// The operation's number at the packet's receiver.
    pub op: u32,
}

/// Invites a peer of the same host to exchange packets through shared memory, which the host's daemon provides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Invite {
    /// Name by which the daemon knows the inviting process.
    pub name: [u8; 16],
    /// Identifies the channel to the inviting process. Only the peer gets it.
    pub secret: [u8; 16],
}

/// Packet type with its fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Body {
    /// Opens a channel. Like `Welcome`, `Reset` and `Ack`, this packet has no packet number.
    Hello(Hello),
    /// Accepts a channel.
    Welcome(Hello),
    /// Answers a packet whose session does not belong to any channel.
    Reset,
    /// Carries only an acknowledgement.
    Ack,
    /// Takes a packet number without any effect: a keep-alive, or a replacement for a cancelled packet.
    Noop,
    /// Fragment of an eager message.
    Message(Message),
    /// Fragment of an eager write.
    Write(Write),
    /// Offers a message or write that the target pulls.
    Offer(Offer),
    /// Requests bytes.
    Pull(Pull),
    /// Bytes that a pull requested.
    Data(Data),
    /// Reports the end of an operation or a pull.
    End(End),
    /// Grants credits for messages to an endpoint.
    Credit(Credit),
    /// An atomic operation.
    Atomic(Atomic),
    /// Values that an atomic operation fetched.
    Found(Found),
    /// A write whose bytes the origin has copied into the target's memory, which processes of one host can share. `behind` is their number.
    Placed(Write),
    /// Invites the peer to shared memory. Without packet number, and ignored by peers that do not know it.
    Invite(Invite),
}

impl Body {
    /// Whether the packet takes a packet number, so that it is acknowledged, and retransmitted after a loss.
    pub fn is_numbered(&self) -> bool {
        !matches!(self, Body::Hello(_) | Body::Welcome(_) | Body::Reset | Body::Ack | Body::Invite(_))
    }

    /// Whether a payload follows the header.
    pub fn carries(&self) -> bool {
        let is_placed = matches!(self, Body::Write(_) | Body::Data(_));
        is_placed || self.carries_in_order()
    }

    /// Whether a payload follows that has to wait for all earlier packets.
    pub(super) fn carries_in_order(&self) -> bool {
        matches!(self, Body::Message(_) | Body::Atomic(_) | Body::Found(_))
    }
}

/// Decoded header of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Packet flags (see `flags`) without `MAP`.
    pub flags: u8,
    /// Number of failures among the packets before `ack`. The receiver gets an end report for each of them, and reports success
    /// of operations only after it has all of these reports.
    pub failures: u16,
    /// Session number of the channel at the packet's receiver.
    pub session: u32,
    /// Low 32 bits of the packet's number.
    pub number: u32,
    /// Low 32 bits of the packet number that the sender expects next.
    pub ack: u32,
    /// Arrival map. Bit `i % 64` of word `i / 64` is set if packet `ack + i` has arrived.
    pub map: Option<[u64; 4]>,
    /// Packet type with its fields.
    pub body: Body,
}

/// Encoded header.
#[derive(Clone, Copy, Debug)]
pub struct Encoded {
    bytes: [u8; HEADER_MAX],
    len: usize,
}

impl Encoded {
    /// No header yet; see [`Header::encode_to`].
    pub const EMPTY: Self = Self { bytes: [0; HEADER_MAX], len: 0 };

    /// The encoded bytes.
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

/// Reads fields from the front of a packet.
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
    /// Encodes the header.
    pub fn encode(&self) -> Encoded {
        let mut out = Encoded::EMPTY;
        self.encode_to(&mut out);
        out
    }

    /// Encodes the header in the place of another one.
    #[inline]
    pub fn encode_to(&self, out: &mut Encoded) {
        out.len = 0;
        out.u8(VERSION << 4 | kind(&self.body));
        out.u8(self.flags & !flags::MAP | if self.map.is_some() { flags::MAP } else { 0 });
        out.u16(self.failures);
        out.u32(self.session);
        out.u32(self.number);
        out.u32(self.ack);
        for word in self.map.iter().flatten() {
            out.u64(*word);
        }
        encode_body(out, &self.body);
    }

    /// Decodes a packet into its header and its payload. Returns `None` if it is not a valid packet of this protocol version.
    #[inline]
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
            Body::Write(_) | Body::Placed(_) => 40,
            Body::Offer(_) => 44,
            Body::Pull(_) => 34,
            Body::Data(_) => 12,
            Body::End(_) => 12,
            Body::Credit(_) => 6,
            Body::Atomic(_) => 28,
            Body::Found(_) => 4,
            Body::Invite(_) => 32,
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
        Body::Invite(_) => 14,
        Body::Placed(_) => 15,
    }
}

#[inline]
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
        Body::Write(write) | Body::Placed(write) => {
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
        Body::Invite(invite) => {
            out.put(invite.name);
            out.put(invite.secret);
        }
    }
}

#[inline]
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
        6 | 15 => {
            let (to, from, op, seq, behind) = (r.u16()?, r.u16()?, r.u32()?, r.u32()?, r.u32()?);
            let write = Write { to, from, op, seq, behind, key: r.u64()?, at: r.u64()?, data: r.u64()? };
            if kind == 6 { Body::Write(write) } else { Body::Placed(write) }
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
        14 => Body::Invite(Invite { name: r.take()?, secret: r.take()? }),
        _ => return None,
    })
}

/// Whether a packet that begins with this byte carries bytes that the receiver places in registered memory or in a pull.
pub(crate) fn is_placed(first: u8) -> bool {
    matches!(first & 15, 6 | 9)
}

/// Returns the number near `reference` that has these low 32 bits.
pub fn expand(reference: u64, low: u32) -> u64 {
    reference.wrapping_add_signed(i64::from(low.wrapping_sub(reference as u32) as i32))
}
