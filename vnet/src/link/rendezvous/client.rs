//! Rendezvous messages, and the client side: the two hosts that cannot reach each other (docs/security.md).
//!
//! ```text
//! h1                               r, the relay                               h2
//!  | --- TLS "vnet-meet/1", MEET h2 --->|<--- TLS "vnet-meet/1", MEET h1 --- |
//!  | <-- OPEN port, id, key ------------|------------ OPEN port, id, key --> |
//!  | <======== the same two TCP connections, bytes copied both ways =======> |   handshake.rs, end to end
//!  | <------- datagrams of the link, forwarded unchanged by the UDP port ---> |
//! ```
//!
//! The outer TLS only authenticates the asking host: r assigns a UDP port and copies bytes that it cannot read. That port
//! forwards datagrams between two addresses. Each host *registers* its address ([`Registration`]) repeatedly, which keeps NAT
//! mappings alive; the answer holds the other host's address as r sees it, for hole punching (hole_punching.rs). relay.rs
//! implements r's side.

use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpStream};
use std::time::Duration;

use aws_lc_rs::hmac;

use crate::link::normalised;
use crate::link::sealed::identity::Identity;
use crate::link::sealed::identity::tls::{Channel, HandshakeError, Patient, one_line};

/// Protocol name and version (RFC 7301).
pub const ALPN: &[u8] = b"vnet-meet/1";
/// Length in bytes of the key that authenticates registrations.
pub const KEY_LEN: usize = 32;
/// Length in bytes of a registration's id.
pub const ID_LEN: usize = 8;
/// Length in bytes of a registration and of its answer. They are equal, so there is no amplification.
pub const REGISTRATION_LEN: usize = 64;
const MAGIC: &[u8; 8] = b"vnet-via";
const TAG_LEN: usize = 16;
const HEAD_LEN: usize = 4;
/// Maximum length in bytes of a host name (RFC 1035), and of a reason.
pub(super) const NAME_MAX: usize = 253;
const TEXT_MAX: usize = 512;
const OPEN_LEN: usize = 2 + ID_LEN + KEY_LEN;
const REQUEST: u8 = 1;
const ANSWER: u8 = 2;

/// Entitles a host to use the UDP port of its pair.
#[derive(Clone, PartialEq, Eq)]
pub struct Ticket {
    /// UDP port of the relay.
    pub port: u16,
    /// Identifies this host's side of the pair.
    pub id: [u8; ID_LEN],
    /// Authenticates registrations of this side.
    pub key: [u8; KEY_LEN],
}

impl std::fmt::Debug for Ticket {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Ticket(port {})", self.port)
    }
}

/// A message after the TLS handshake. Four bytes precede its text: kind, 0, and the length of the text in network byte order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RendezvousMessage {
    /// Kind 1: the host to meet.
    Meet(String),
    /// Kind 2: that host has connected; its bytes follow, outside of this TLS connection.
    Open(Ticket),
    /// Kind 3: refused, for this reason.
    Refuse(String),
}

impl RendezvousMessage {
    /// Encodes the message.
    pub fn to_bytes(&self) -> Vec<u8> {
        let (kind, rest) = match self {
            RendezvousMessage::Meet(name) => (1, name.as_bytes()[..name.len().min(NAME_MAX)].to_vec()),
            RendezvousMessage::Open(ticket) => {
                (2, [&ticket.port.to_be_bytes()[..], &ticket.id, &ticket.key].concat())
            }
            RendezvousMessage::Refuse(text) => (3, text.as_bytes()[..text.len().min(TEXT_MAX)].to_vec()),
        };
        let len = (rest.len() as u16).to_be_bytes();
        [&[kind, 0, len[0], len[1]], &rest[..]].concat()
    }

    /// Reads one message from `stream`.
    pub fn read(stream: &mut impl Read) -> Result<RendezvousMessage, HandshakeError> {
        let foreign = HandshakeError::another_protocol;
        let mut head = [0; HEAD_LEN];
        stream.read_exact(&mut head)?;
        let len = usize::from(u16::from_be_bytes([head[2], head[3]]));
        let good = match head[0] {
            1 => (1..=NAME_MAX).contains(&len),
            2 => len == OPEN_LEN,
            3 => len <= TEXT_MAX,
            _ => false,
        };
        if !good || head[1] != 0 {
            return Err(foreign());
        }
        let mut rest = vec![0; len];
        stream.read_exact(&mut rest)?;
        match head[0] {
            1 => String::from_utf8(rest).map(RendezvousMessage::Meet).map_err(|_| foreign()),
            2 => {
                let (port, rest) = rest.split_first_chunk::<2>().ok_or_else(foreign)?;
                let (id, key) = rest.split_first_chunk::<ID_LEN>().ok_or_else(foreign)?;
                let key = *key.first_chunk::<KEY_LEN>().ok_or_else(foreign)?;
                Ok(RendezvousMessage::Open(Ticket { port: u16::from_be_bytes(*port), id: *id, key }))
            }
            _ => Ok(RendezvousMessage::Refuse(one_line(&rest))),
        }
    }
}

/// A registration of this host's address, or the answer that holds the other host's address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Registration {
    /// Identifies the side of the pair.
    pub id: [u8; ID_LEN],
    /// Increases with each registration; an answer repeats the number of its registration.
    pub number: u64,
    /// In an answer: the other host's address, if it is known.
    pub other: Option<SocketAddr>,
    /// True for an answer.
    pub is_answer: bool,
}

impl Registration {
    /// Encodes the datagram, authenticated with `key`.
    pub fn to_bytes(&self, key: &[u8; KEY_LEN]) -> [u8; REGISTRATION_LEN] {
        let mut bytes = [0; REGISTRATION_LEN];
        bytes[..8].copy_from_slice(MAGIC);
        bytes[8..16].copy_from_slice(&self.id);
        bytes[16..24].copy_from_slice(&self.number.to_be_bytes());
        if let Some(other) = self.other {
            let ip = match other.ip() {
                IpAddr::V4(v4) => v4.to_ipv6_mapped(),
                IpAddr::V6(v6) => v6,
            };
            bytes[24..40].copy_from_slice(&ip.octets());
            bytes[40..42].copy_from_slice(&other.port().to_be_bytes());
        }
        bytes[42] = if self.is_answer { ANSWER } else { REQUEST };
        let tag = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, key), &bytes[..48]);
        bytes[48..].copy_from_slice(&tag.as_ref()[..TAG_LEN]);
        bytes
    }

    /// True for a datagram that the relay must parse as a registration instead of forwarding it.
    pub fn is_one(datagram: &[u8]) -> bool {
        datagram.len() == REGISTRATION_LEN && datagram.starts_with(MAGIC)
    }

    /// The side of the pair from which a datagram claims to come.
    pub fn id_of(datagram: &[u8]) -> Option<[u8; ID_LEN]> {
        Registration::is_one(datagram).then(|| *datagram[8..].first_chunk().expect("64 bytes"))
    }

    /// Parses a datagram that was authenticated with `key`; `None` for any other datagram.
    pub fn read(datagram: &[u8], key: &[u8; KEY_LEN]) -> Option<Registration> {
        let id = Registration::id_of(datagram)?;
        let read = |at: usize| -> [u8; 8] { datagram[at..at + 8].try_into().expect("8 bytes") };
        let octets: [u8; 16] = datagram[24..40].try_into().expect("16 bytes");
        let port = u16::from_be_bytes([datagram[40], datagram[41]]);
        let other = (port != 0).then(|| normalised(SocketAddr::new(Ipv6Addr::from(octets).into(), port)));
        let number = u64::from_be_bytes(read(16));
        let registration = Registration { id, number, other, is_answer: datagram[42] == ANSWER };
        // Compared as a whole, in constant time, because each registration has exactly one encoding.
        let same = aws_lc_rs::constant_time::verify_slices_are_equal(&registration.to_bytes(key), datagram);
        same.is_ok().then_some(registration)
    }
}

/// Reads a TCP stream one TLS record at a time, so that bytes after the last record stay in the socket.
struct Records {
    stream: TcpStream,
    head: Vec<u8>,
    /// Number of bytes of the head already returned.
    given: usize,
    /// Number of bytes of the body still to be read.
    left: usize,
}

impl Records {
    const HEAD_LEN: usize = 5;

    fn new(stream: TcpStream) -> Records {
        Records { stream, head: Vec::new(), given: 0, left: 0 }
    }
}

impl Read for Records {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.given == self.head.len() && self.left == 0 {
            let mut head = [0; Records::HEAD_LEN];
            self.stream.read_exact(&mut head)?;
            self.left = usize::from(u16::from_be_bytes([head[3], head[4]]));
            (self.head, self.given) = (head.to_vec(), 0);
        }
        if self.given < self.head.len() {
            let count = buffer.len().min(self.head.len() - self.given);
            buffer[..count].copy_from_slice(&self.head[self.given..self.given + count]);
            self.given += count;
            return Ok(count);
        }
        let most = buffer.len().min(self.left);
        let count = self.stream.read(&mut buffer[..most])?;
        self.left -= count;
        Ok(count)
    }
}

impl Write for Records {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

impl Patient for Records {
    fn wait_at_most(&mut self, time: Duration) -> io::Result<()> {
        self.stream.wait_at_most(time)
    }
}

/// Asks the relay, whose certificate must be for `relay`, for a rendezvous with `wanted`. Returns a connection to that host,
/// which must not be trusted before a handshake over it.
pub(super) fn attend(
    stream: TcpStream,
    identity: &Identity,
    relay: &str,
    wanted: &str,
) -> Result<(TcpStream, Ticket), HandshakeError> {
    let mut channel = Channel::connect(Records::new(stream), identity, relay, ALPN)?;
    channel.send(&RendezvousMessage::Meet(wanted.into()).to_bytes())?;
    match RendezvousMessage::read(&mut channel)? {
        RendezvousMessage::Open(ticket) => Ok((channel.into_stream().stream, ticket)),
        RendezvousMessage::Refuse(why) => Err(HandshakeError::refused(relay, &why)),
        RendezvousMessage::Meet(_) => Err(HandshakeError::unexpected_message()),
    }
}

#[cfg(test)]
#[path = "client_tests.rs"]
mod tests;
