//! Control frames between the helper in a guest and the daemon of its host. docs/interconnect.md has the format.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use crate::daemon::MacAddress;
use crate::meeting::{ADDRESS, Decline, Request, decode_address, encode_address};

/// Ethertype of control frames, which packets in raw Ethernet frames share.
pub use crate::ether::frame::ETHERTYPE;
/// Destination of the helper's frames: the daemon at the other end of the interface.
pub const GROUP: MacAddress = [0x03, 0x76, 0x6e, 0x65, 0x74, 0x01];
/// Source of the daemon's frames.
pub const OWN: MacAddress = [0x02, 0x76, 0x6e, 0x65, 0x74, 0x01];
/// Longest frame in bytes.
pub const FRAME_MAX: usize = 1514;
/// Size in bytes of the pages that runs consist of.
pub const PAGE: u64 = 4096;
/// Maximum number of runs of one memory.
pub const RUNS_MAX: usize = 1024;
/// Number of the queues' memory; the application numbers the others.
pub const QUEUES: u32 = u32::MAX;
/// Size of that memory in bytes.
pub const QUEUES_BYTES: usize = crate::daemon::queue::FILE_BYTES;
/// Secret of an attachment: chosen by the helper, in each of its frames.
pub type Token = [u8; 16];

const ETHERNET: usize = 14;
const FRAME_MIN: usize = 60;
const MAGIC: [u8; 4] = *b"vrdm";
const VERSION: u8 = 1;
/// Magic, version, kind, reserved, attachment, token.
const COMMON: usize = 32;
const RUN: usize = 12;
/// Bytes of a DATAGRAM frame in front of the datagram.
pub(super) const DATAGRAM_HEADERS: usize = ETHERNET + COMMON + ADDRESS + 2;
/// Longest frame that is sent: it fits an MTU of 1 280, the smallest one of IPv6.
const SENT_MAX: usize = 1_280 + ETHERNET;
/// Longest datagram of a DATAGRAM frame, in bytes.
pub const DATAGRAM_MAX: usize = SENT_MAX - DATAGRAM_HEADERS;
/// Maximum number of runs of a SHARE frame that is received, and of one that is sent.
pub(super) const RUNS_OF_FRAME: usize = (FRAME_MAX - ETHERNET - COMMON - 18) / RUN;
pub(super) const RUNS_SENT: usize = (SENT_MAX - ETHERNET - COMMON - 18) / RUN;

/// Contiguous guest physical pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Guest physical address of the first.
    pub addr: u64,
    /// Their number.
    pub pages: u32,
}

/// What became of a list of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShareState {
    /// More runs are expected.
    More,
    /// The engine uses the memory.
    Used,
    /// The memory is not used: wrong addresses, too many pieces, or too much.
    Refused,
}

/// A control frame's content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// The daemon's number of the attachment; 0 in OPEN and its answers, and for all attachments in CLOSE and CLOSED.
    pub attachment: u64,
    /// Secret of the attachment.
    pub token: Token,
    /// What is said.
    pub body: Body,
}

/// Kinds of control frames, with their fields.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Body {
    /// Helper: run the engine of an application.
    Open(Request),
    /// Daemon: the attachment has this number, and its packets this address.
    Opened(SocketAddr),
    /// Daemon: it does not run the engine.
    Declined(Decline),
    /// Helper: memory of the application.
    Share {
        /// The application's number of the memory, or [`QUEUES`].
        memory: u32,
        /// Its length in bytes; the last page may be used in part.
        bytes: u64,
        /// Number of all runs; 0: it cannot be lent.
        total: u16,
        /// Number of runs in earlier frames.
        first: u16,
        /// The next runs.
        runs: Vec<Run>,
    },
    /// Daemon: has so many runs of a memory.
    Shared {
        /// Number of the memory.
        memory: u32,
        /// Number of the next run.
        next: u16,
        /// What became of it.
        state: ShareState,
    },
    /// Both: the bell.
    Ring {
        /// How often the sender has rung.
        rung: u32,
        /// How often it has heard the other one.
        heard: u32,
        /// It wants an answer.
        asks: bool,
    },
    /// Daemon: which MAC address has a peer?
    Ask(IpAddr),
    /// Helper: the MAC address of a peer.
    Neighbour(IpAddr, MacAddress),
    /// Both: relays a datagram between the attachment's application and another one of the machine, which has the process engine.
    Datagram {
        /// Address of the application with the process engine.
        other: SocketAddr,
        /// UDP payload.
        bytes: Vec<u8>,
    },
    /// Helper: ends the attachment.
    Close,
    /// Daemon: there is no such attachment any more; it reads and writes none of its memory.
    Closed,
}

fn encode_ip(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

fn decode_ip(bytes: [u8; 16]) -> IpAddr {
    let ip = Ipv6Addr::from(bytes);
    ip.to_ipv4_mapped().map_or(IpAddr::V6(ip), IpAddr::V4)
}

impl Message {
    /// Encodes a frame from `from` to `to`.
    pub fn encode(&self, from: MacAddress, to: MacAddress) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(FRAME_MIN);
        bytes.extend(to);
        bytes.extend(from);
        bytes.extend(ETHERTYPE.to_be_bytes());
        bytes.extend(MAGIC);
        bytes.extend([VERSION, self.body.kind(), 0, 0]);
        bytes.extend(self.attachment.to_be_bytes());
        bytes.extend(self.token);
        match &self.body {
            Body::Open(request) => bytes.extend(request.encode()),
            Body::Opened(address) => bytes.extend(encode_address(*address)),
            Body::Declined(why) => bytes.extend(why.encode()),
            Body::Share { memory, bytes: len, total, first, runs } => {
                bytes.extend(memory.to_be_bytes());
                bytes.extend(len.to_be_bytes());
                bytes.extend(total.to_be_bytes());
                bytes.extend(first.to_be_bytes());
                let runs = &runs[..runs.len().min(RUNS_OF_FRAME)];
                bytes.extend((runs.len() as u16).to_be_bytes());
                for run in runs {
                    bytes.extend(run.addr.to_be_bytes());
                    bytes.extend(run.pages.to_be_bytes());
                }
            }
            Body::Shared { memory, next, state } => {
                bytes.extend(memory.to_be_bytes());
                bytes.extend(next.to_be_bytes());
                bytes.push(*state as u8);
            }
            Body::Ring { rung, heard, asks } => {
                bytes.extend(rung.to_be_bytes());
                bytes.extend(heard.to_be_bytes());
                bytes.push((*asks).into());
            }
            Body::Ask(ip) => bytes.extend(encode_ip(*ip)),
            Body::Neighbour(ip, mac) => {
                bytes.extend(encode_ip(*ip));
                bytes.extend(mac);
            }
            Body::Datagram { other, bytes: payload } => {
                let payload = &payload[..payload.len().min(DATAGRAM_MAX)];
                bytes.extend(encode_address(*other));
                bytes.extend((payload.len() as u16).to_be_bytes());
                bytes.extend(payload);
            }
            Body::Close | Body::Closed => {}
        }
        bytes.resize(bytes.len().max(FRAME_MIN), 0);
        bytes
    }

    /// Decodes a frame. Returns its source and the message. Bytes behind the fields are padding.
    pub fn decode(frame: &[u8]) -> Option<(MacAddress, Self)> {
        let mut fields = Fields(frame);
        let (_, from) = (fields.take::<6>()?, fields.take::<6>()?);
        if fields.take()? != ETHERTYPE.to_be_bytes() || fields.take()? != MAGIC || fields.take()? != [VERSION]
        {
            return None;
        }
        let [kind, _, _] = fields.take()?;
        let (attachment, token) = (u64::from_be_bytes(fields.take()?), fields.take()?);
        let body = match kind {
            1 => Body::Open(Request::decode(&fields.take::<{ ADDRESS + 8 }>()?)?),
            2 => Body::Opened(decode_address(&fields.take()?)?),
            3 => Body::Declined(Decline::decode(&fields.take()?)?),
            4 => {
                let (memory, bytes) =
                    (u32::from_be_bytes(fields.take()?), u64::from_be_bytes(fields.take()?));
                let [total, first, count] = [fields.word()?, fields.word()?, fields.word()?];
                let run = |_| {
                    let (addr, pages) =
                        (u64::from_be_bytes(fields.take()?), u32::from_be_bytes(fields.take()?));
                    Some(Run { addr, pages })
                };
                let count = usize::from(count);
                let runs: Option<Vec<Run>> =
                    (count <= RUNS_OF_FRAME).then(|| (0..count).map(run).collect())?;
                Body::Share { memory, bytes, total, first, runs: runs? }
            }
            5 => {
                let (memory, next) = (u32::from_be_bytes(fields.take()?), fields.word()?);
                let state = match fields.take()? {
                    [0] => ShareState::More,
                    [1] => ShareState::Used,
                    [2] => ShareState::Refused,
                    _ => return None,
                };
                Body::Shared { memory, next, state }
            }
            6 => {
                let [rung, heard] = [u32::from_be_bytes(fields.take()?), u32::from_be_bytes(fields.take()?)];
                let [asks] = fields.take()?;
                Body::Ring {
                    rung,
                    heard,
                    asks: match asks {
                        0 => false,
                        1 => true,
                        _ => return None,
                    },
                }
            }
            7 => Body::Ask(decode_ip(fields.take()?)),
            8 => Body::Neighbour(decode_ip(fields.take()?), fields.take()?),
            9 => Body::Close,
            10 => Body::Closed,
            11 => {
                let (other, len) = (decode_address(&fields.take()?)?, fields.word()?);
                let bytes = fields.0.get(..len.into()).filter(|bytes| bytes.len() <= DATAGRAM_MAX)?;
                Body::Datagram { other, bytes: bytes.to_vec() }
            }
            _ => return None,
        };
        Some((from, Self { attachment, token, body }))
    }
}

impl Body {
    fn kind(&self) -> u8 {
        match self {
            Body::Open(_) => 1,
            Body::Opened(_) => 2,
            Body::Declined(_) => 3,
            Body::Share { .. } => 4,
            Body::Shared { .. } => 5,
            Body::Ring { .. } => 6,
            Body::Ask(_) => 7,
            Body::Neighbour(..) => 8,
            Body::Close => 9,
            Body::Closed => 10,
            Body::Datagram { .. } => 11,
        }
    }
}

/// Fields that have not been read yet.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (field, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*field)
    }

    fn word(&mut self) -> Option<u16> {
        self.take().map(u16::from_be_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_is_read_as_it_was_written() {
        let address: SocketAddr = "[fe80::1%3]:7000".parse().unwrap();
        let runs: Vec<Run> =
            (0..RUNS_OF_FRAME as u64).map(|n| Run { addr: n << 40, pages: n as u32 }).collect();
        let bodies = [
            Body::Open(Request { bind: address, timeout_ms: 1, not_ready_ms: 2 }),
            Body::Opened("10.0.0.1:7000".parse().unwrap()),
            Body::Declined(Decline::Address(98)),
            Body::Share { memory: 7, bytes: 1 << 40, total: 1024, first: 3, runs },
            Body::Share { memory: QUEUES, bytes: 1, total: 0, first: 0, runs: vec![] },
            Body::Shared { memory: 7, next: 120, state: ShareState::More },
            Body::Shared { memory: 7, next: 120, state: ShareState::Used },
            Body::Shared { memory: 7, next: 120, state: ShareState::Refused },
            Body::Ring { rung: u32::MAX, heard: 0, asks: true },
            Body::Ask("10.0.0.1".parse().unwrap()),
            Body::Neighbour("fd00::1".parse().unwrap(), [2, 0, 0, 0, 0, 9]),
            Body::Close,
            Body::Closed,
            Body::Datagram { other: address, bytes: vec![7; DATAGRAM_MAX] },
            Body::Datagram { other: "10.0.0.1:1".parse().unwrap(), bytes: vec![1] },
        ];
        for body in bodies {
            let message = Message { attachment: 0x0102_0304_0506_0708, token: [9; 16], body };
            let frame = message.encode(OWN, GROUP);
            assert!((FRAME_MIN..=FRAME_MAX).contains(&frame.len()));
            assert_eq!(Message::decode(&frame), Some((OWN, message.clone())));
            let fields = frame.len();
            if fields > FRAME_MIN {
                assert_eq!(Message::decode(&frame[..fields - 1]), None, "{message:?}");
            }
            for place in [12, 14, 18] {
                let mut wrong = frame.clone();
                wrong[place] ^= 0x40;
                assert_eq!(Message::decode(&wrong), None);
            }
        }
    }
}
