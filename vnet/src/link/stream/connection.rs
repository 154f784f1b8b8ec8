//! One connection: a non-blocking socket, with or without TLS, the outbox of bytes to send, and the inbox of received bytes.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use rustix::net::sockopt;
use rustls::pki_types::CertificateDer;

use super::tls::Secured;
use crate::frame::FRAME_MAX;
use crate::link::sealed::identity::{Claims, explain};
use crate::wire::native::HEADER_LEN;
use crate::wire::offload::WIRE_LEN;
use crate::wire::stream::{LENGTH_LEN, MESSAGE_MAX};

/// Maximum number of bytes that wait for the socket: several frames of maximum size.
pub const OUTBOX_MAX: usize = 512 << 10;
/// Silence after which a connection counts as dead.
pub const SILENCE: Duration = Duration::from_secs(8);
/// Maximum number of bytes read at a time: about the size of the socket's buffer, and enough for the longest message.
const INBOX_LEN: usize = 512 << 10;
/// Number of bytes in the outbox from which it is passed to the socket.
const FLUSH_LEN: usize = 128 << 10;

const _: () = assert!(MESSAGE_MAX == HEADER_LEN + WIRE_LEN + FRAME_MAX);
const _: () =
    assert!(INBOX_LEN >= 2 * (LENGTH_LEN + MESSAGE_MAX) && OUTBOX_MAX >= 2 * (LENGTH_LEN + MESSAGE_MAX));

/// Received bytes that are not processed yet.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    /// Allocated when the first bytes arrive.
    memory: Box<[u8]>,
    filled: usize,
    /// Serial number of the connection on which the bytes arrived.
    serial: u64,
    /// Networks and addresses from which the peer may send; `None`: no limit.
    pub(super) claims: Option<Arc<Claims>>,
}

impl Inbox {
    pub(super) fn bytes(&self) -> &[u8] {
        &self.memory[..self.filled]
    }

    /// Removes the first `len` bytes.
    pub(super) fn consume(&mut self, len: usize) {
        self.memory.copy_within(len..self.filled, 0);
        self.filled -= len;
    }
}

/// Result of [`Connection::read`].
pub(super) struct Bytes {
    pub(super) bytes: usize,
    pub(super) emptied: bool,
}

#[derive(Debug)]
pub(super) struct Connection {
    socket: TcpStream,
    secured: Option<Box<Secured>>,
    serial: u64,
    outbox: Vec<u8>,
    /// Number of bytes of the outbox that the socket has taken.
    taken: usize,
    heard: Instant,
    sent: Instant,
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Connection {
    /// Takes over an established connection.
    pub(super) fn new(socket: TcpStream, secured: Option<Secured>) -> io::Result<Connection> {
        static CONNECTIONS: AtomicU64 = AtomicU64::new(1);
        socket.set_nonblocking(true)?;
        socket.set_nodelay(true)?;
        // Data that is never acknowledged also ends the connection (RFC 5482).
        sockopt::set_tcp_user_timeout(&socket, SILENCE.as_millis() as u32)?;
        let now = Instant::now();
        let serial = CONNECTIONS.fetch_add(1, Relaxed);
        let mut secured = secured.map(Box::new);
        if let Some(secured) = &mut secured {
            // More than the outbox passes on at a time.
            secured.tls.set_buffer_limit(Some(OUTBOX_MAX));
        }
        Ok(Connection { socket, secured, serial, outbox: Vec::new(), taken: 0, heard: now, sent: now })
    }

    /// True when the bytes in `inbox` arrived on this connection.
    pub(super) fn filled(&self, inbox: &Inbox) -> bool {
        inbox.serial == self.serial
    }

    pub(super) fn heard(&self) -> Instant {
        self.heard
    }

    pub(super) fn sent(&self) -> Instant {
        self.sent
    }

    /// Reads as many bytes as the inbox has space for.
    pub(super) fn read(&mut self, inbox: &mut Inbox) -> io::Result<Bytes> {
        if inbox.memory.is_empty() {
            inbox.memory = vec![0; INBOX_LEN].into_boxed_slice();
        }
        if inbox.serial != self.serial {
            // A partial message of an earlier connection: its rest will never arrive.
            (inbox.serial, inbox.filled) = (self.serial, 0);
            inbox.claims = self.secured.as_ref().map(|secured| secured.claims.clone());
        }
        let mut read = Bytes { bytes: 0, emptied: false };
        while inbox.filled < inbox.memory.len() {
            match self.read_some(&mut inbox.memory[inbox.filled..]) {
                Ok(0) => return Err(io::Error::other("the other end closed it")),
                Ok(len) => {
                    inbox.filled += len;
                    read.bytes += len;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    read.emptied = true;
                    break;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        if read.bytes > 0 {
            self.heard = Instant::now();
        }
        Ok(read)
    }

    /// Reads from the socket, through TLS if there is any.
    fn read_some(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let Some(secured) = &mut self.secured else { return self.socket.read(to) };
        loop {
            match secured.tls.reader().read(to) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                done => return done,
            }
            if secured.tls.read_tls(&mut self.socket)? == 0 {
                return Ok(0);
            }
            if let Err(error) = secured.tls.process_new_packets() {
                // An alert gives the other side the reason, if it still reads.
                let _ = secured.tls.write_tls(&mut self.socket);
                return Err(io::Error::other(explain(&error)));
            }
        }
    }

    /// Writes as much of the outbox as the socket takes, through TLS if there is any. Returns the number of bytes of the outbox.
    fn write_some(&mut self) -> io::Result<usize> {
        let bytes = &self.outbox[self.taken..];
        let Some(secured) = &mut self.secured else { return self.socket.write(bytes) };
        // Sends records that are already encrypted first, so that they stay within the limit of TLS's own buffer.
        while secured.tls.wants_write() {
            secured.tls.write_tls(&mut self.socket)?;
        }
        secured.tls.writer().write(&bytes[..bytes.len().min(FLUSH_LEN)])
    }

    /// The certificates of the peer; `None` in clear text.
    pub(super) fn chain(&self) -> Option<&[CertificateDer<'static>]> {
        self.secured.as_ref().map(|secured| &secured.chain[..])
    }

    /// Flushes the outbox when it is long or has no space for `len` more bytes.
    pub(super) fn make_room(&mut self, len: usize) -> io::Result<()> {
        let waiting = self.outbox.len() - self.taken;
        if waiting >= FLUSH_LEN || waiting + len > OUTBOX_MAX {
            self.flush()?;
        }
        Ok(())
    }

    /// Adds a message: `prefix`, then `len` bytes that `fill` writes. Returns false when the outbox is full.
    pub(super) fn put(&mut self, prefix: &[u8], len: usize, fill: impl FnOnce(&mut [u8])) -> bool {
        if self.outbox.len() - self.taken + prefix.len() + len > OUTBOX_MAX {
            return false;
        }
        if self.taken > 0 && self.outbox.len() + prefix.len() + len > OUTBOX_MAX {
            self.outbox.drain(..std::mem::take(&mut self.taken));
        }
        self.outbox.extend_from_slice(prefix);
        let start = self.outbox.len();
        self.outbox.resize(start + len, 0);
        fill(&mut self.outbox[start..]);
        true
    }

    /// Passes the outbox to the socket. Bytes that the socket does not take are sent at its next write event.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        while self.taken < self.outbox.len() {
            match self.write_some() {
                Ok(len) => {
                    self.taken += len;
                    self.sent = Instant::now();
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        self.outbox.clear();
        self.taken = 0;
        while let Some(secured) = &mut self.secured
            && secured.tls.wants_write()
        {
            match secured.tls.write_tls(&mut self.socket) {
                Ok(_) => self.sent = Instant::now(),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}
