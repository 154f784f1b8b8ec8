//! Messages about keys: how a peer is reached, and the keys of a session with it.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use super::attach::{ADDRESS, decode_address, encode_address};

/// Bytes of each direction's key.
pub const KEY: usize = 32;
/// Random number by which an engine makes the keys of a session new.
pub type Nonce = [u8; 16];
/// Value of the epoch in a request that leaves the choice to the daemon.
const ANY: u8 = 255;

/// How packets to a peer leave this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Reach {
    /// No sealed link is on the way.
    #[error("no sealed link is on the way")]
    Clear,
    /// By a sealed link, which gives keys.
    #[error("a sealed link is on the way")]
    Sealed,
    /// It is not known yet where the peer is, or the link has no keys yet.
    #[error("it is not known yet where it is")]
    NotYet,
    /// By a sealed link that gives no keys, because it is a TLS stream.
    #[error("its sealed link is a TLS stream, which gives no keys")]
    Stream,
    /// Through a router, behind which the link of the peer's own host is not known.
    #[error("a router is on the way, so its host is not known")]
    Router,
    /// The process's own address is not one of this container.
    #[error("the own address is none that the host's configuration gives to this container")]
    Foreign,
    /// By several links, of which one is sealed.
    #[error("packets to it take several links")]
    Several,
    /// No link of this host is sealed, so this holds for every peer.
    #[error("no link of this host is sealed")]
    AllClear,
    /// Some link of this host is sealed. Answers the question about no peer, [`Question::ANY`].
    #[error("a link of this host is sealed")]
    SomeSealed,
}

impl Reach {
    const ALL: [Reach; 9] = [
        Reach::Clear,
        Reach::Sealed,
        Reach::NotYet,
        Reach::Stream,
        Reach::Router,
        Reach::Foreign,
        Reach::Several,
        Reach::AllClear,
        Reach::SomeSealed,
    ];

    fn code(self) -> u8 {
        Self::ALL.iter().position(|reach| *reach == self).unwrap_or(0) as u8
    }

    fn from_code(code: u8) -> Option<Self> {
        Self::ALL.get(usize::from(code)).copied()
    }
}

/// Stands for no peer: no UDP packet goes to port 0.
const NOBODY: SocketAddr = SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), 0);

/// A process's question how a peer is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Question {
    /// Address of the process's socket. An unspecified one stands for the source that the kernel chooses.
    pub own: SocketAddr,
    /// Address of the peer's socket.
    pub peer: SocketAddr,
}

/// Side of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// It has opened the session.
    Opener = 0,
    /// It has answered.
    Answerer = 1,
}

/// A process's request for the keys of a session with a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyRequest {
    /// Number that the answer repeats.
    pub ticket: u32,
    /// Side of the process.
    pub role: Role,
    /// Epoch of the link's keys; `None`: the current one.
    pub epoch: Option<u8>,
    /// Both addresses.
    pub between: Question,
    /// The process's random number.
    pub nonce: Nonce,
    /// The peer's random number.
    pub peer_nonce: Nonce,
}

/// Keys of a session.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Keys {
    /// Epoch of the link's keys that they are derived from.
    pub epoch: u8,
    /// Key of what the opener sends, then key of what the answerer sends.
    pub keys: [u8; 2 * KEY],
}

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Keys(epoch {})", self.epoch)
    }
}

pub(super) const QUESTION: usize = 2 * ADDRESS;
pub(super) const REACHED: usize = ADDRESS + 1;
pub(super) const REQUEST: usize = 4 + 1 + 1 + QUESTION + 16 + 16;
pub(super) const ANSWER: usize = 4 + 1 + 1 + 2 * KEY;

impl Question {
    /// The question about no peer: is any link of this host sealed?
    pub const ANY: Self = Self { own: NOBODY, peer: NOBODY };

    pub(super) fn encode(&self) -> [u8; QUESTION] {
        let mut bytes = [0; QUESTION];
        bytes[..ADDRESS].copy_from_slice(&encode_address(self.own));
        bytes[ADDRESS..].copy_from_slice(&encode_address(self.peer));
        bytes
    }

    pub(super) fn decode(bytes: &[u8; QUESTION]) -> Option<Self> {
        let (own, peer) = bytes.split_first_chunk()?;
        Some(Self { own: decode_address(own)?, peer: decode_address(peer.try_into().ok()?)? })
    }
}

pub(super) fn encode_reached(peer: SocketAddr, reach: Reach) -> [u8; REACHED] {
    let mut bytes = [0; REACHED];
    bytes[..ADDRESS].copy_from_slice(&encode_address(peer));
    bytes[ADDRESS] = reach.code();
    bytes
}

pub(super) fn decode_reached(bytes: &[u8; REACHED]) -> Option<(SocketAddr, Reach)> {
    let (address, code) = bytes.split_first_chunk()?;
    Some((decode_address(address)?, Reach::from_code(*code.first()?)?))
}

impl KeyRequest {
    pub(super) fn encode(&self) -> [u8; REQUEST] {
        let mut bytes = [0; REQUEST];
        bytes[..4].copy_from_slice(&self.ticket.to_be_bytes());
        bytes[4] = self.role as u8;
        bytes[5] = self.epoch.unwrap_or(ANY);
        bytes[6..6 + QUESTION].copy_from_slice(&self.between.encode());
        bytes[6 + QUESTION..22 + QUESTION].copy_from_slice(&self.nonce);
        bytes[22 + QUESTION..].copy_from_slice(&self.peer_nonce);
        bytes
    }

    pub(super) fn decode(bytes: &[u8; REQUEST]) -> Option<Self> {
        let ([t0, t1, t2, t3, role, epoch], rest) = bytes.split_first_chunk()?;
        let (between, nonces) = rest.split_first_chunk()?;
        let (nonce, peer_nonce) = nonces.split_first_chunk()?;
        Some(Self {
            ticket: u32::from_be_bytes([*t0, *t1, *t2, *t3]),
            role: match role {
                0 => Role::Opener,
                1 => Role::Answerer,
                _ => return None,
            },
            epoch: match *epoch {
                ANY => None,
                epoch => Some(epoch).filter(|epoch| *epoch < 4)?.into(),
            },
            between: Question::decode(between)?,
            nonce: *nonce,
            peer_nonce: peer_nonce.try_into().ok()?,
        })
    }
}

pub(super) fn encode_answer(ticket: u32, answer: &Result<Keys, Reach>) -> [u8; ANSWER] {
    let mut bytes = [0; ANSWER];
    bytes[..4].copy_from_slice(&ticket.to_be_bytes());
    match answer {
        Ok(Keys { epoch, keys }) => {
            bytes[4] = Reach::Sealed.code();
            bytes[5] = *epoch;
            bytes[6..].copy_from_slice(keys);
        }
        Err(reach) => bytes[4] = reach.code(),
    }
    bytes
}

pub(super) fn decode_answer(bytes: &[u8; ANSWER]) -> Option<(u32, Result<Keys, Reach>)> {
    let ([t0, t1, t2, t3, code, epoch], keys) = bytes.split_first_chunk()?;
    let ticket = u32::from_be_bytes([*t0, *t1, *t2, *t3]);
    let answer = match Reach::from_code(*code)? {
        Reach::Sealed if *epoch < 4 => Ok(Keys { epoch: *epoch, keys: keys.try_into().ok()? }),
        Reach::Sealed => return None,
        reach if *epoch == 0 && keys.iter().all(|byte| *byte == 0) => Err(reach),
        _ => return None,
    };
    Some((ticket, answer))
}
