//! One connection: a socket that does not block, what waits to be sent on it, and what was received.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

use rustix::net::sockopt;

use super::{OUTBOX_MAX, SILENCE};
use crate::wire::stream::{LENGTH_LEN, MESSAGE_MAX};

/// Bytes read at a time, at most: as much as the socket likely holds, and room for the longest message.
const INBOX_LEN: usize = 512 << 10;
/// The outbox is handed to the socket when it holds so much.
const FLUSH_LEN: usize = 128 << 10;

const _: () =
    assert!(INBOX_LEN >= 2 * (LENGTH_LEN + MESSAGE_MAX) && OUTBOX_MAX >= 2 * (LENGTH_LEN + MESSAGE_MAX));

/// What arrived and is not worked on yet.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    /// Empty until something comes.
    memory: Box<[u8]>,
    filled: usize,
    /// Which connection the bytes are of.
    serial: u64,
}

impl Inbox {
    pub(super) fn bytes(&self) -> &[u8] {
        &self.memory[..self.filled]
    }

    /// Forgets the first `len` bytes.
    pub(super) fn consume(&mut self, len: usize) {
        self.memory.copy_within(len..self.filled, 0);
        self.filled -= len;
    }
}

/// What one look at the socket brought.
pub(super) struct Bytes {
    pub(super) bytes: usize,
    pub(super) emptied: bool,
}

/// See the module's comment.
#[derive(Debug)]
pub(super) struct Connection {
    socket: TcpStream,
    serial: u64,
    outbox: Vec<u8>,
    /// How much of the outbox the socket has taken.
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
    pub(super) fn new(socket: TcpStream) -> io::Result<Connection> {
        static CONNECTIONS: AtomicU64 = AtomicU64::new(1);
        socket.set_nonblocking(true)?;
        socket.set_nodelay(true)?;
        // What is sent and never acknowledged ends it, too (RFC 5482).
        sockopt::set_tcp_user_timeout(&socket, SILENCE.as_millis() as u32)?;
        let now = Instant::now();
        let serial = CONNECTIONS.fetch_add(1, Relaxed);
        Ok(Connection { socket, serial, outbox: Vec::new(), taken: 0, heard: now, sent: now })
    }

    pub(super) fn heard(&self) -> Instant {
        self.heard
    }

    pub(super) fn sent(&self) -> Instant {
        self.sent
    }

    /// Reads what has arrived, as much as the inbox has room for.
    pub(super) fn read(&mut self, inbox: &mut Inbox) -> io::Result<Bytes> {
        if inbox.memory.is_empty() {
            inbox.memory = vec![0; INBOX_LEN].into_boxed_slice();
        }
        if inbox.serial != self.serial {
            // The rest of an earlier connection belongs to no message of this one.
            (inbox.serial, inbox.filled) = (self.serial, 0);
        }
        let mut read = Bytes { bytes: 0, emptied: false };
        while inbox.filled < inbox.memory.len() {
            match self.socket.read(&mut inbox.memory[inbox.filled..]) {
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

    /// Tries to have room for `len` more bytes in the outbox.
    pub(super) fn make_room(&mut self, len: usize) -> io::Result<()> {
        let waiting = self.outbox.len() - self.taken;
        if waiting >= FLUSH_LEN || waiting + len > OUTBOX_MAX {
            self.flush()?;
        }
        Ok(())
    }

    /// Adds a message: `prefix`, then `len` bytes that `fill` writes. False when there is no room.
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

    /// Hands the socket what waits, as far as it takes it. The rest goes when the socket says that it has room again.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        while self.taken < self.outbox.len() {
            match self.socket.write(&self.outbox[self.taken..]) {
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
        Ok(())
    }
}
