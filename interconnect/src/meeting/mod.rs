//! The meeting point: how two processes of one host get a ring.
//!
//! The daemon listens in each container's network namespace at an abstract Unix socket. Abstract names belong to the network namespace, so
//! the socket needs no file in the container, and is reached by a container with its own mount, user and PID namespaces.
//!
//! ```text
//!   elder                    daemon                  younger
//!     |------- connects ------>|<------ connects -------|
//!     |<--- NAMED (name) ------|------- NAMED --------->|
//!     |---- INVITE (name, secret), over the channel --->|
//!     |                        |<- JOIN (name, secret) -|
//!     |<- RING (secret) -------|-- RING (secret) ------>|   each with the memory and a bell
//! ```
//!
//! The daemon gives a ring only to processes whose namespaces share a network by its configuration, or are the same. It ends the ring
//! when that changes, or when one of them disconnects. What it says about a process is only its name; the secret shows the elder
//! that the younger process is at the other end of the channel.
//!
//! A process may also ask the daemon to run its engine (`daemon/`): ATTACH with the address of its socket, answered by ATTACHED with memory and
//! a bell, or by DECLINED. The daemon does so if a callback of its own allows it.
//!
//! Whether processes are to ask for that by themselves shows a second socket (`presence.rs`), before they have to decide.
//!
//! A process also asks how a peer is reached (REACH, answered by REACHED), and for the keys of a session with a peer behind a sealed link (KEY,
//! answered by KEYS). The daemon derives them from the link's keys: it has a callback for that, too.
//!
//! Messages are packets (`SOCK_SEQPACKET`) of a kind and fields of fixed size. A process takes them only from a daemon that is root,
//! or outside its own PID namespace: a program of the container that had taken the name before the daemon could otherwise hand
//! out rings of its own.

mod attach;
mod guest;
mod host;
mod presence;
mod sealing;

pub(crate) use attach::{ADDRESS, decode_address, encode_address};
pub use attach::{Decline, Ends, Request};
pub(crate) use guest::{Guest, Heard};
pub(crate) use host::RINGS_OF_PROCESS_MAX;
pub use host::{Attach, Host, Place, Sealer, Stopper, listen, listen_on};
pub use presence::{Offer, Presence};
pub use sealing::{KEY, KeyRequest, Keys, Nonce, Question, Reach, Role};

use std::net::SocketAddr;

/// Name of the abstract socket.
pub const SOCKET: &str = "vnet-rdma";

/// Name by which a daemon knows a process, or secret of a channel. Both are random.
pub type Token = [u8; 16];

/// A message between a process and its daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Message {
    /// Daemon: the process's name.
    Named(Token),
    /// Process: it was invited by the process with this name, with this secret.
    Join(Token, Token),
    /// Daemon: one end of a ring, for the channel with this secret. The memory and the bell come with it.
    Ring {
        /// Which end.
        side: u8,
        /// Secret of the channel.
        secret: Token,
    },
    /// Daemon: no ring for the channel with this secret.
    Absent(Token),
    /// Process: how is this peer reached?
    Reach(Question),
    /// Daemon: how the peer at this address is reached.
    Reached(SocketAddr, Reach),
    /// Process: the keys of a session.
    Key(KeyRequest),
    /// Daemon: the keys of the request with this ticket, or why there are none.
    Keys(u32, Result<Keys, Reach>),
    /// Process: run the engine.
    Attach(Request),
    /// Daemon: it runs the engine at this address. The memory of the queues and the bell come with it.
    Attached(SocketAddr),
    /// Daemon: it does not run the engine.
    Declined(Decline),
}

impl Message {
    /// Length in bytes of the longest message.
    pub const BYTES_MAX: usize = 1 + sealing::REQUEST;

    /// Encodes the message. Returns the bytes and their number.
    pub fn encode(&self) -> ([u8; Self::BYTES_MAX], usize) {
        let (request, address, refusal, question, reached, key, keys);
        let (kind, first, second): (u8, &[u8], &[u8]) = match self {
            Message::Named(name) => (1, name, &[]),
            Message::Join(name, secret) => (2, name, secret),
            Message::Ring { side, secret } => (3, std::slice::from_ref(side), secret),
            Message::Absent(secret) => (4, secret, &[]),
            Message::Reach(wanted) => {
                question = wanted.encode();
                (5, &question, &[])
            }
            Message::Reached(peer, reach) => {
                reached = sealing::encode_reached(*peer, *reach);
                (6, &reached, &[])
            }
            Message::Key(wanted) => {
                key = wanted.encode();
                (7, &key, &[])
            }
            Message::Keys(ticket, answer) => {
                keys = sealing::encode_answer(*ticket, answer);
                (8, &keys, &[])
            }
            Message::Attach(wanted) => {
                request = wanted.encode();
                (16, &request, &[])
            }
            Message::Attached(at) => {
                address = encode_address(*at);
                (17, &address, &[])
            }
            Message::Declined(why) => {
                refusal = why.encode();
                (18, &refusal, &[])
            }
        };
        let (mut bytes, end) = ([0; Self::BYTES_MAX], 1 + first.len());
        let len = end + second.len();
        bytes[0] = kind;
        bytes[1..end].copy_from_slice(first);
        bytes[end..len].copy_from_slice(second);
        (bytes, len)
    }

    /// Decodes a message. Returns `None` if it is malformed.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let (kind, rest) = bytes.split_first()?;
        let token = |bytes: &[u8]| bytes.try_into().ok();
        Some(match kind {
            1 => Message::Named(token(rest)?),
            2 => {
                let (name, secret) = rest.split_at_checked(16)?;
                Message::Join(token(name)?, token(secret)?)
            }
            3 => {
                let (side, secret) = rest.split_first()?;
                Message::Ring { side: Some(*side).filter(|side| *side < 2)?, secret: token(secret)? }
            }
            4 => Message::Absent(token(rest)?),
            5 => Message::Reach(Question::decode(rest.try_into().ok()?)?),
            6 => {
                let (peer, reach) = sealing::decode_reached(rest.try_into().ok()?)?;
                Message::Reached(peer, reach)
            }
            7 => Message::Key(KeyRequest::decode(rest.try_into().ok()?)?),
            8 => {
                let (ticket, answer) = sealing::decode_answer(rest.try_into().ok()?)?;
                Message::Keys(ticket, answer)
            }
            16 => Message::Attach(Request::decode(rest.try_into().ok()?)?),
            17 => Message::Attached(decode_address(rest.try_into().ok()?)?),
            18 => Message::Declined(Decline::decode(rest.try_into().ok()?)?),
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests;
