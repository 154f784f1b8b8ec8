//! Stream links: native frames over a TCP connection, with TLS or in clear text, made directly or through a SOCKS 5 proxy.
//!
//! ```text
//!  one thread for all links (thread.rs): dials with backoff (dial.rs), accepts (accept.rs), does TLS handshakes (tls.rs)
//!                                                  |
//!                                                  v
//!                         two connections per link: dialed, accepted (connections.rs)
//!                                                  |
//!   dispatcher: reads into the connection's inbox, |     dispatchers: put frames in the outbox of one
//!   runs the frames where they lie (source.rs)     |     of the two, and hand it to the socket
//! ```
//!
//! Dispatchers serve a stream link like an interface's queues: its sockets do not block, and the dispatcher that owns the link
//! watches them (edge-triggered, both directions) and runs received frames to completion. The stream thread establishes
//! connections, which may take seconds, and keeps them alive; it never handles a frame.
//!
//! **Two hosts that both dial** have two connections. Each host sends on the connection that it dialed, and on the accepted one
//! only while it has dialed none, and reads from both. So the hosts need not agree on one connection, frames keep their order,
//! and a side behind a firewall may only dial, or only accept (`connect = false`).
//!
//! **Back-pressure.** The socket's buffer and the outbox, [`OUTBOX_MAX`] bytes, are the only queue. When it is full, the newest
//! frame is dropped and counted (`no_buffer`), as on a congested path: no dispatcher waits.
//!
//! **Half-open connections.** A side that has sent nothing for [`KEEPALIVE`] sends a keepalive; a connection on which nothing has
//! arrived for [`SILENCE`] is closed. So a dead connection is detected within 10 s, whether or not there is data to send.

mod accept;
mod connection;
mod connections;
mod dial;
mod link_side;
mod options;
mod proxy;
mod send;
mod source;
mod thread;
mod tls;

pub use connection::{OUTBOX_MAX, SILENCE};
pub(in crate::link) use connections::Stream;
pub use connections::{ACCEPTED, CONNECTIONS, DIALED, KEEPALIVE};
pub use options::{Proxy, StreamOptions};
pub use thread::{Streams, StreamsError};

#[cfg(test)]
mod tests;
