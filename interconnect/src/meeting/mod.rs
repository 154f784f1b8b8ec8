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
//! Messages are packets (`SOCK_SEQPACKET`) of a kind and fields of fixed size. A process takes them only from a daemon that is root,
//! or outside its own PID namespace: a program of the container that had taken the name before the daemon could otherwise hand
//! out rings of its own.

mod attach;
mod guest;
mod host;

pub use attach::{Decline, Ends, Request};
pub(crate) use guest::{Guest, Heard};
pub(crate) use host::RINGS_OF_PROCESS_MAX;
pub use host::{Attach, Host, Place, Stopper, listen};

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
    /// Process: run the engine.
    Attach(Request),
    /// Daemon: it runs the engine at this address. The memory of the queues and the bell come with it.
    Attached(SocketAddr),
    /// Daemon: it does not run the engine.
    Declined(Decline),
}

impl Message {
    /// Length in bytes of the longest message.
    pub const BYTES_MAX: usize = 33;

    /// Encodes the message. Returns the bytes and their number.
    pub fn encode(&self) -> ([u8; Self::BYTES_MAX], usize) {
        let (request, address, refusal);
        let (kind, first, second): (u8, &[u8], &[u8]) = match self {
            Message::Named(name) => (1, name, &[]),
            Message::Join(name, secret) => (2, name, secret),
            Message::Ring { side, secret } => (3, std::slice::from_ref(side), secret),
            Message::Absent(secret) => (4, secret, &[]),
            Message::Attach(wanted) => {
                request = wanted.encode();
                (16, &request, &[])
            }
            Message::Attached(at) => {
                address = attach::encode_address(*at);
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
            16 => Message::Attach(Request::decode(rest.try_into().ok()?)?),
            17 => Message::Attached(attach::decode_address(rest.try_into().ok()?)?),
            18 => Message::Declined(Decline::decode(rest.try_into().ok()?)?),
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests;
