//! Connections to peers that pull (`streams.rs`).

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::time::Duration;

use rustix::net::sockopt as socket_options;
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, connect, socket_with};

use super::connection::{Ended, HALF, MAGIC, Segments, end_when_silent, is_passing};
use super::local::Local;
use super::socket::send_parts;
use crate::proto::{Departure, Engine, Span};

/// Number of segments that are judged together.
const JUDGED: u32 = 20_000;

/// A connection to a peer that pulls.
pub(super) struct Outgoing {
    pub(super) address: SocketAddr,
    pub(super) socket: TcpStream,
    /// What has been read of the proof.
    pub(super) proof: Vec<u8>,
    /// What the peer has to show.
    pub(super) expected: [u8; HALF],
    /// The peer has shown the proof.
    pub(super) is_open: bool,
    pub(super) was_counted: bool,
    /// Time by which it has to.
    pub(super) until: u64,
    /// What the socket has not taken yet: the preface, or the rest of a packet.
    pub(super) rest: Vec<u8>,
    pub(super) sent: usize,
    /// The socket may hold the end of the last packet back, because another one was to follow.
    pub(super) is_open_ended: bool,
    /// Where the judgement about its losses begins.
    pub(super) segments: Segments,
}

impl Outgoing {
    /// Begins to connect. The connection comes from the address of the node's own packets.
    pub(super) fn connect(
        address: SocketAddr,
        own: SocketAddr,
        secret: [u8; 16],
        (until, silence): (u64, Duration),
    ) -> io::Result<Self> {
        let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket = socket_with(family, SocketType::STREAM, flags, None)?;
        if !own.ip().is_unspecified() {
            bind(&socket, &SocketAddr::new(own.ip(), 0))?;
        }
        match connect(&socket, &address) {
            Ok(()) | Err(rustix::io::Errno::INPROGRESS) => {}
            Err(error) => return Err(error.into()),
        }
        let socket = TcpStream::from(socket);
        // The last packet of a transfer must not wait for an acknowledgement.
        socket.set_nodelay(true)?;
        // BBR, which some systems prefer, halves the rate between containers. Best effort: the system may not allow another one.
        let _ = socket_options::set_tcp_congestion(&socket, "cubic");
        end_when_silent(&socket, silence)?;
        let (shown, expected) = secret.split_at(HALF);
        let expected = expected.try_into().expect("the secret has two halves");
        Ok(Self {
            address,
            socket,
            proof: vec![],
            expected,
            is_open: false,
            was_counted: false,
            until,
            rest: [&MAGIC, shown].concat(),
            sent: 0,
            is_open_ended: false,
            segments: Segments::default(),
        })
    }

    /// Sends what waits, and reads the proof.
    pub(super) fn proceed(&mut self, engine: &mut Engine, local: &Local, now: u64) -> Result<(), Ended> {
        if !self.rest.is_empty() {
            if !self.send_rest()? {
                return if self.is_open || now < self.until { Ok(()) } else { Err(Ended) };
            }
            local.watch_room(self.socket.as_fd(), false).map_err(|_| Ended)?;
        }
        if !self.is_open {
            if now >= self.until {
                return Err(Ended);
            }
            if !self.read_proof()? {
                return Ok(());
            }
            self.is_open = true;
        }
        if engine.set_outgoing_stream(self.address, Some(true)) { Ok(()) } else { Err(Ended) }
    }

    /// Reads the proof that the peer has taken the secret. Returns true once it is there.
    pub(super) fn read_proof(&mut self) -> Result<bool, Ended> {
        let mut bytes = [0; HALF];
        let room = &mut bytes[self.proof.len()..];
        match self.socket.read(room) {
            Ok(0) => return Err(Ended),
            Ok(count) => self.proof.extend(&room[..count]),
            Err(error) if is_passing(&error) => return Ok(false),
            Err(_) => return Err(Ended),
        }
        match self.proof.len() {
            HALF if self.proof == self.expected => Ok(true),
            HALF => Err(Ended),
            _ => Ok(false),
        }
    }

    /// Sends a packet. Returns false if the socket has not taken all of it.
    pub(super) fn send(&mut self, packet: &Departure) -> Result<bool, Ended> {
        let header = packet.header.as_bytes();
        let length = ((header.len() + packet.payload.len()) as u32).to_be_bytes();
        // SAFETY: both slices outlive the call, which only reads from the spans.
        let [own_length, own_header] =
            [&length[..], header].map(|part| unsafe { Span::new(part.as_ptr().cast_mut(), part.len()) });
        // The last segment is filled up with the next packet; `flush` says that none follows.
        self.is_open_ended = true;
        let sent = match send_parts(&self.socket, [own_length, own_header, packet.payload], libc::MSG_MORE) {
            Ok(sent) => sent,
            Err(error) if is_passing(&error) => 0,
            Err(_) => return Err(Ended),
        };
        Ok(self.keep(&length, packet, sent))
    }

    /// Keeps what is left of a packet after `sent` bytes. Returns true if nothing is.
    pub(super) fn keep(&mut self, length: &[u8], packet: &Departure, sent: usize) -> bool {
        let header = packet.header.as_bytes();
        let before = length.len() + header.len();
        if sent >= before + packet.payload.len() {
            return true;
        }
        (self.sent, self.rest) = (sent.min(before), [length, header].concat());
        let gone = sent.saturating_sub(before);
        let left = packet.payload.part(gone as u64, (packet.payload.len() - gone) as u64);
        left.into_iter().for_each(|left| left.read_to(&mut self.rest));
        false
    }

    /// Sends what waits. Returns true if nothing waits any more.
    pub(super) fn send_rest(&mut self) -> Result<bool, Ended> {
        if !self.is_open && !matches!(self.socket.take_error(), Ok(None)) {
            return Err(Ended);
        }
        match (&self.socket).write(&self.rest[self.sent..]) {
            Ok(sent) => self.sent += sent,
            Err(error) if is_passing(&error) => return Ok(false),
            Err(_) => return Err(Ended),
        }
        if self.sent < self.rest.len() {
            return Ok(false);
        }
        self.rest.clear();
        self.sent = 0;
        Ok(true)
    }

    /// Whether the path has lost more than a few segments of the last [`JUDGED`].
    pub(super) fn is_lossy(&mut self) -> bool {
        let Some(now) = Segments::of(&self.socket) else { return false };
        let is_lossy = now.shows_losses_since(self.segments);
        if now.all.wrapping_sub(self.segments.all) >= JUDGED {
            self.segments = now;
        }
        is_lossy
    }

    /// Whether the peer has closed the connection. It never sends anything.
    pub(super) fn has_ended(&mut self) -> bool {
        let mut byte = [0];
        !matches!(self.socket.read(&mut byte), Err(error) if is_passing(&error))
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::super::connection::PREFACE;
    use super::*;
    use crate::seal::Sealing;

    /// Who has the port of a peer, but not its secret, gets no bytes.
    #[test]
    fn a_stream_opens_only_when_the_peer_has_shown_the_proof() {
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
        assert!(stream.proceed(&mut engine, &local, 1).is_ok());
        let mut preface = [0; PREFACE];
        peer.read_exact(&mut preface).unwrap();
        assert_eq!(preface, [&MAGIC, &secret[..HALF]].concat()[..]);
        assert!(stream.proceed(&mut engine, &local, 999).is_ok() && !stream.is_open, "it waits");
        assert!(stream.proceed(&mut engine, &local, 1_000).is_err(), "not for ever");
        for (answer, is_proof) in [(&secret[..HALF], false), (&secret[HALF..], true)] {
            let (mut stream, mut peer) = connected();
            assert!(stream.proceed(&mut engine, &local, 1).is_ok());
            peer.write_all(answer).unwrap();
            let begin = std::time::Instant::now();
            // The engine knows no such channel, so the stream ends as soon as it has opened.
            while stream.proceed(&mut engine, &local, 1).is_ok() {
                assert!(begin.elapsed() < Duration::from_secs(60));
            }
            assert_eq!(stream.is_open, is_proof);
        }
    }
}
