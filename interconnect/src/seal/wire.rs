//! Formats of sealed packets, and of the packets that make keys new. docs/interconnect.md shows every byte.

use crate::meeting::Nonce;
use crate::proto::PARTS_MAX;

/// Version of sealing, in the high four bits of the first byte: packets of the protocol in clear text have another one there.
const VERSION: u8 = 2;
/// Bytes of the header in front of an encrypted packet. They are authenticated, not encrypted.
pub const HEADER: usize = 16;
/// Bytes of the tag behind it.
pub const TAG: usize = 16;
/// Bytes that sealing adds to a packet.
pub const OVERHEAD: usize = HEADER + TAG;

const SEALED: u8 = VERSION << 4;
const OPEN: u8 = SEALED | 1;
const AGREE: u8 = SEALED | 2;
const ASK: u8 = SEALED | 3;

/// A packet that makes keys new. It is in clear text, and nothing in it is secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Control {
    /// Opens a session.
    Open {
        /// Key id that packets to the sender will carry.
        id: u32,
        /// The sender's random number.
        nonce: Nonce,
    },
    /// Answers OPEN.
    Agree {
        /// Key id of the OPEN.
        to: u32,
        /// Key id that packets to the sender will carry.
        id: u32,
        /// Epoch of the link's keys.
        epoch: u8,
        /// The sender's random number.
        nonce: Nonce,
    },
    /// The sender takes only sealed packets, and has no key with this id.
    Ask {
        /// Key id of the packet that it did not take; 0 if that was in clear text.
        id: u32,
    },
}

/// Whether a packet is one of these formats.
#[inline]
pub fn is_sealing(packet: &[u8]) -> bool {
    packet.first().is_some_and(|first| first >> 4 == VERSION)
}

/// Header of a sealed packet, or of one of its parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Head {
    /// Key id of the receiver.
    pub(super) id: u32,
    /// Number of the packet.
    pub(super) number: u64,
    /// Which part it is, and which is the last; both 0: the packet is whole.
    pub(super) part: u8,
    pub(super) last: u8,
}

impl Head {
    #[inline]
    pub(super) fn encode(&self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        (bytes[0], bytes[2], bytes[3]) = (SEALED, self.part, self.last);
        bytes[4..8].copy_from_slice(&self.id.to_be_bytes());
        bytes[8..].copy_from_slice(&self.number.to_be_bytes());
        bytes
    }

    /// The header that is authenticated: that of the first part.
    #[inline]
    pub(super) fn encode_whole(&self) -> [u8; HEADER] {
        Self { part: 0, ..*self }.encode()
    }

    /// Reads the header of a datagram. Its rest has at least one byte in a part, otherwise at least a tag's.
    #[inline]
    pub(super) fn read(packet: &[u8]) -> Option<Self> {
        let (header, rest) = packet.split_first_chunk::<HEADER>()?;
        let [SEALED, 0, part, last, a, b, c, d, number @ ..] = *header else { return None };
        let least = if last == 0 { TAG } else { 1 };
        let is_right = part <= last && usize::from(last) < PARTS_MAX && rest.len() >= least;
        let (id, number) = (u32::from_be_bytes([a, b, c, d]), u64::from_be_bytes(number));
        is_right.then_some(Self { id, number, part, last })
    }
}

impl Control {
    /// Encodes the packet.
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Control::Open { id, nonce } => [&[OPEN, 0, 0, 0][..], &id.to_be_bytes(), nonce].concat(),
            Control::Agree { to, id, epoch, nonce } => {
                [&[AGREE, *epoch, 0, 0][..], &to.to_be_bytes(), &id.to_be_bytes(), nonce].concat()
            }
            Control::Ask { id } => [&[ASK, 0, 0, 0][..], &id.to_be_bytes()].concat(),
        }
    }

    /// Decodes a packet. Returns `None` if it is malformed.
    pub fn decode(packet: &[u8]) -> Option<Self> {
        let ([kind, epoch, 0, 0, a, b, c, d], rest) = packet.split_first_chunk::<8>()? else { return None };
        let first = u32::from_be_bytes([*a, *b, *c, *d]);
        match (*kind, *epoch) {
            (OPEN, 0) => Some(Control::Open { id: first, nonce: rest.try_into().ok()? }),
            (AGREE, epoch @ 0..=3) => {
                let (id, nonce) = rest.split_first_chunk()?;
                Some(Control::Agree {
                    to: first,
                    id: u32::from_be_bytes(*id),
                    epoch,
                    nonce: nonce.try_into().ok()?,
                })
            }
            (ASK, 0) if rest.is_empty() => Some(Control::Ask { id: first }),
            _ => None,
        }
    }
}
