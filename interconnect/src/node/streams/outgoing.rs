//! The sending end of a stream: connects, authenticates, and sends packets without blocking.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::time::Duration;

use rustix::net::bind;
use rustix::net::sockopt as socket_options;

use crate::node::local::Local;
use crate::node::socket::{PARTS_MAX, send_parts};
use crate::node::tcp::{Closed, HALF, MAGIC, Segments, new_socket, set_timeouts, start_connect, would_block};
use crate::proto::{Departure, Engine, Span};

/// Packets that are sent with one system call: 1 MiB. A call for each packet has half of the rate, because the kernel processes what arrives for
/// the socket after each call.
const BATCH_MAX: usize = PARTS_MAX / 2;
/// Number of segments over which the loss rate is measured.
const LOSS_SAMPLE: u32 = 20_000;

/// A connection to a peer that pulls bytes from this node.
pub(super) struct Outgoing {
    pub(super) address: SocketAddr,
    pub(super) socket: TcpStream,
    /// What has arrived of the peer's answer.
    pub(super) answer: Vec<u8>,
    /// The answer that authenticates the peer: second half of the secret.
    pub(super) expected: [u8; HALF],
    /// The peer is authenticated.
    pub(super) is_open: bool,
    /// Counted in `StreamCounters::opened`.
    pub(super) was_counted: bool,
    /// Deadline of the handshake.
    pub(super) until: u64,
    /// Lengths and headers of the packets that wait for `send_batch`, and for each of them how many bytes of these are its own, and its payload.
    heads: Vec<u8>,
    batch: Vec<(usize, Span)>,
    /// The preface, or the tail of packets that did not fit into the socket's send buffer.
    pub(super) unsent: Vec<u8>,
    /// How much of `unsent` has been sent meanwhile.
    pub(super) sent: usize,
    /// The last packet was sent with `MSG_MORE`, so the kernel may hold its last segment back.
    pub(super) is_corked: bool,
    /// Start of the current loss measurement.
    pub(super) segments: Segments,
}

impl Outgoing {
    /// Starts a non-blocking connect from the node's own address, which the peer checks.
    pub(super) fn connect(
        address: SocketAddr,
        own: SocketAddr,
        secret: [u8; 16],
        (until, user_timeout): (u64, Duration),
    ) -> io::Result<Self> {
        let socket = new_socket(address)?;
        if !own.ip().is_unspecified() {
            bind(&socket, &SocketAddr::new(own.ip(), 0))?;
        }
        let socket = start_connect(socket, address)?;
        // No Nagle delay for the last segment of a transfer.
        socket.set_nodelay(true)?;
        // BBR, the default of some systems, has half of cubic's rate between containers. Best effort: the system may not allow cubic.
        let _ = socket_options::set_tcp_congestion(&socket, "cubic");
        set_timeouts(&socket, user_timeout)?;
        let (shown, expected) = secret.split_at(HALF);
        let expected = expected.try_into().expect("the secret has two halves");
        Ok(Self {
            address,
            socket,
            answer: vec![],
            expected,
            is_open: false,
            was_counted: false,
            until,
            heads: vec![],
            batch: vec![],
            unsent: [&MAGIC, shown].concat(),
            sent: 0,
            is_corked: false,
            segments: Segments::default(),
        })
    }

    /// Goes on with the handshake, or with a packet that was sent in part.
    pub(super) fn advance(&mut self, engine: &mut Engine, local: &Local, now: u64) -> Result<(), Closed> {
        if !self.unsent.is_empty() {
            if !self.send_unsent()? {
                return if self.is_open || now < self.until { Ok(()) } else { Err(Closed) };
            }
            local.watch_room(self.socket.as_fd(), false).map_err(|_| Closed)?;
        }
        if !self.is_open {
            if now >= self.until {
                return Err(Closed);
            }
            if !self.read_answer()? {
                return Ok(());
            }
            self.is_open = true;
        }
        if engine.set_outgoing_stream(self.address, Some(true)) { Ok(()) } else { Err(Closed) }
    }

    /// Reads the peer's answer. Returns true once it is complete and right.
    fn read_answer(&mut self) -> Result<bool, Closed> {
        let mut bytes = [0; HALF];
        let room = &mut bytes[self.answer.len()..];
        match self.socket.read(room) {
            Ok(0) => return Err(Closed),
            Ok(count) => self.answer.extend(&room[..count]),
            Err(error) if would_block(&error) => return Ok(false),
            Err(_) => return Err(Closed),
        }
        match self.answer.len() {
            HALF if self.answer == self.expected => Ok(true),
            HALF => Err(Closed),
            _ => Ok(false),
        }
    }

    /// Queues a packet, whose payload stays valid until `send_batch`. Sends the queue if it is full; returns false if the socket's send buffer
    /// was full, too, and the tail is kept.
    pub(super) fn send(&mut self, packet: &Departure) -> Result<bool, Closed> {
        let header = packet.header.as_bytes();
        let length = ((header.len() + packet.payload.len()) as u32).to_be_bytes();
        self.heads.extend_from_slice(&length);
        self.heads.extend_from_slice(header);
        self.batch.push((length.len() + header.len(), packet.payload));
        if self.batch.len() < BATCH_MAX { Ok(true) } else { self.send_batch(true) }
    }

    /// Whether packets wait for `send_batch`.
    pub(super) fn has_batch(&self) -> bool {
        !self.batch.is_empty()
    }

    /// Sends the queued packets. `more` fills the last segment with the next packet; `Streams::flush` uncorks then. Returns false if the
    /// socket's send buffer is full; the tail is kept.
    pub(super) fn send_batch(&mut self, more: bool) -> Result<bool, Closed> {
        let mut at = 0;
        let parts = self.batch.iter().flat_map(|(head, payload)| {
            let own = &self.heads[at..at + head];
            at += head;
            // SAFETY: the heads outlive the call, which only reads from the spans.
            let own = unsafe { Span::new(own.as_ptr().cast_mut(), own.len()) };
            [own, *payload]
        });
        self.is_corked = more;
        let sent = match send_parts(&self.socket, parts, if more { libc::MSG_MORE } else { 0 }) {
            Ok(sent) => sent,
            Err(error) if would_block(&error) => 0,
            Err(_) => return Err(Closed),
        };
        self.keep_unsent(sent);
        Ok(self.unsent.is_empty())
    }

    /// Empties the queue, of which `sent` bytes were sent, and keeps a copy of the rest.
    fn keep_unsent(&mut self, mut sent: usize) {
        let mut heads = &self.heads[..];
        for (head, payload) in self.batch.drain(..) {
            let (own, others) = heads.split_at(head);
            heads = others;
            let skipped = sent.min(head);
            self.unsent.extend_from_slice(&own[skipped..]);
            sent -= skipped;
            let skipped = sent.min(payload.len());
            let left = payload.part(skipped as u64, (payload.len() - skipped) as u64);
            left.into_iter().for_each(|left| left.read_to(&mut self.unsent));
            sent -= skipped;
        }
        self.heads.clear();
    }

    /// Sends `unsent`. Returns true once it is empty.
    fn send_unsent(&mut self) -> Result<bool, Closed> {
        if !self.is_open && !matches!(self.socket.take_error(), Ok(None)) {
            return Err(Closed);
        }
        match (&self.socket).write(&self.unsent[self.sent..]) {
            Ok(sent) => self.sent += sent,
            Err(error) if would_block(&error) => return Ok(false),
            Err(_) => return Err(Closed),
        }
        if self.sent < self.unsent.len() {
            return Ok(false);
        }
        self.unsent.clear();
        self.sent = 0;
        Ok(true)
    }

    /// Whether the path loses too many segments, measured over [`LOSS_SAMPLE`].
    pub(super) fn is_lossy(&mut self) -> bool {
        let Some(now) = Segments::of(&self.socket) else { return false };
        let is_lossy = now.is_lossy_since(self.segments);
        if now.sent.wrapping_sub(self.segments.sent) >= LOSS_SAMPLE {
            self.segments = now;
        }
        is_lossy
    }

    /// Whether the peer has closed the connection. After its answer it never sends anything.
    pub(super) fn is_closed_by_peer(&mut self) -> bool {
        let mut byte = [0];
        !matches!(self.socket.read(&mut byte), Err(error) if would_block(&error))
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;
    use crate::node::tcp::PREFACE;
    use crate::seal::Sealing;

    /// Another program at the peer's port gets no bytes.
    #[test]
    fn a_stream_opens_only_after_the_peers_answer() {
        let wire = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let own = wire.local_addr().unwrap();
        let mut seal = Sealing::new(own, true, [1; 32]);
        let local = Local::new(None, wire.as_fd(), &mut seal).unwrap();
        let mut engine = Engine::new(crate::proto::Config::default(), 1, [2; 32]);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let secret: [u8; 16] = std::array::from_fn(|place| place as u8);
        let connected = || {
            let stream = Outgoing::connect(
                listener.local_addr().unwrap(),
                own,
                secret,
                (1_000, Duration::from_secs(3)),
            )
            .unwrap();
            local.watch(stream.socket.as_fd()).unwrap();
            (stream, listener.accept().unwrap().0)
        };
        let (mut stream, mut peer) = connected();
        assert!(stream.advance(&mut engine, &local, 1).is_ok());
        let mut preface = [0; PREFACE];
        peer.read_exact(&mut preface).unwrap();
        assert_eq!(preface, [&MAGIC, &secret[..HALF]].concat()[..]);
        assert!(stream.advance(&mut engine, &local, 999).is_ok() && !stream.is_open, "it waits");
        assert!(stream.advance(&mut engine, &local, 1_000).is_err(), "not for ever");
        for (answer, is_right) in [(&secret[..HALF], false), (&secret[HALF..], true)] {
            let (mut stream, mut peer) = connected();
            assert!(stream.advance(&mut engine, &local, 1).is_ok());
            peer.write_all(answer).unwrap();
            let begin = std::time::Instant::now();
            // The engine knows no such channel, so the stream ends as soon as it has opened.
            while stream.advance(&mut engine, &local, 1).is_ok() {
                assert!(begin.elapsed() < Duration::from_secs(60));
            }
            assert_eq!(stream.is_open, is_right);
        }
    }
}
