//! An interface's own underlay port: a UDP socket connected to one peer, with the next message peeked before it is received.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;

use parking_lot::Mutex;

use crate::frame::HEAD_MAX;
use crate::link::BridgeError;
use crate::link::socket::message::{Report, receive_message};
use crate::link::socket::name::Name;
use crate::link::socket::udp::{Socket, check};
use crate::wire::native::HEADER_LEN;
use crate::wire::offload::WIRE_LEN;

/// Bytes per peek: headers and a frame's head.
pub(super) const PEEK_LEN: usize = HEADER_LEN + WIRE_LEN + HEAD_MAX;

/// The socket and its current peer.
pub struct UnderlayPort {
    socket: Arc<Socket>,
    /// The peer's address that the socket is connected to.
    peer: Mutex<Option<SocketAddr>>,
}

impl UnderlayPort {
    /// Binds `address`. Nothing is received before [`UnderlayPort::aim`].
    pub fn bind(address: SocketAddr) -> Result<Arc<UnderlayPort>, BridgeError> {
        let socket =
            Socket::bind(address, false).map_err(|error| BridgeError::new("direct_port", address, error))?;
        Ok(Arc::new(UnderlayPort { socket: Arc::new(socket), peer: Mutex::new(None) }))
    }

    /// Accepts datagrams only from `peer` from now on, and drops those that arrived before.
    pub fn aim(&self, peer: SocketAddr) -> io::Result<()> {
        let mut current = self.peer.lock();
        if *current == Some(peer) {
            return Ok(());
        }
        let name = Name::new(peer, self.socket.local().is_ipv6()).ok_or(io::ErrorKind::InvalidInput)?;
        // SAFETY: `name` holds a socket address (AF_UNSPEC disconnects) of the stated length.
        let connect =
            |name: &Name| unsafe { libc::connect(self.fd().as_raw_fd(), name.as_ptr(), name.len()) };
        if current.take().is_some() {
            // The first connect fixed the source address; disconnecting first lets the kernel choose it again.
            check(connect(&Name::unknown()))?;
        }
        check(connect(&name))?;
        let mut byte = [0u8; 1];
        // SAFETY: the one byte of the buffer is writable; the kernel drops the rest of the datagram.
        while unsafe { libc::recv(self.fd().as_raw_fd(), byte.as_mut_ptr().cast(), 1, libc::MSG_DONTWAIT) }
            >= 0
        {}
        *current = Some(peer);
        Ok(())
    }

    /// The bound address, with the port that the kernel chose if none was configured.
    pub fn local_addr(&self) -> SocketAddr {
        self.socket.local()
    }

    /// The socket's descriptor, to poll.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    pub(in crate::dispatch) fn socket(&self) -> &Arc<Socket> {
        &self.socket
    }

    /// Peeks at the next message. `None` when none is waiting.
    pub(super) fn peek(&self) -> Option<Peeked> {
        let mut head = [0; PEEK_LEN];
        let slice = libc::iovec { iov_base: head.as_mut_ptr().cast(), iov_len: PEEK_LEN };
        let flags = libc::MSG_PEEK | libc::MSG_TRUNC;
        let Ok(Report { source, len, segment, .. }) = receive_message(&self.socket, &mut [slice], flags)
        else {
            return None;
        };
        Some(Peeked { source, len, segment, head })
    }
}

/// The peeked first bytes of the next message, with its source and lengths.
pub(super) struct Peeked {
    pub(super) source: Name,
    pub(super) len: usize,
    pub(super) segment: usize,
    pub(super) head: [u8; PEEK_LEN],
}
