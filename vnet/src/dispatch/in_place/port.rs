//! An interface's own underlay port: a UDP socket that receives from one peer, with the next message peeked before it is received.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use parking_lot::Mutex;

use crate::frame::HEAD_MAX;
use crate::link::BridgeError;
use crate::link::socket::message::{Report, receive_message};
use crate::link::socket::name::Name;
use crate::link::socket::udp::Socket;
use crate::wire::native::HEADER_LEN;
use crate::wire::offload::WIRE_LEN;

/// Bytes per peek: headers and a frame's head.
pub(super) const PEEK_LEN: usize = HEADER_LEN + WIRE_LEN + HEAD_MAX;

/// The socket and its current peer.
pub struct UnderlayPort {
    socket: Arc<Socket>,
    /// The address whose datagrams the socket accepts.
    peer: Mutex<Option<SocketAddr>>,
    /// False for a sealed link: its datagrams are decrypted in vnetd's memory.
    in_place: bool,
}

impl UnderlayPort {
    /// Binds `address`, for frames that are received `in_place` or, from sealed links, in vnetd's memory. Nothing is received
    /// before [`UnderlayPort::aim`].
    pub fn bind(address: SocketAddr, in_place: bool) -> Result<Arc<UnderlayPort>, BridgeError> {
        let refused = |error| BridgeError::new("direct_port", address, error);
        let socket = Socket::bind(address, false).map_err(refused)?;
        let port = UnderlayPort { socket: Arc::new(socket), peer: Mutex::new(None), in_place };
        port.accept_only(None).map_err(refused)?;
        Ok(Arc::new(port))
    }

    /// The socket of a running vnetd, which takes datagrams from `peer` only. What waits in it stays.
    ///
    /// # Errors
    /// It is not a bound socket.
    pub fn inherit(fd: OwnedFd, peer: Option<SocketAddr>, in_place: bool) -> io::Result<Arc<UnderlayPort>> {
        let socket = Arc::new(Socket::inherit(fd)?);
        Ok(Arc::new(UnderlayPort { socket, peer: Mutex::new(peer), in_place }))
    }

    /// A duplicate of the socket for the next vnetd, and the only address from which it takes datagrams.
    ///
    /// # Errors
    /// The kernel has no descriptor left.
    pub fn hand_over(&self) -> io::Result<(OwnedFd, Option<SocketAddr>)> {
        let peer = *self.peer.lock();
        Ok((self.fd().try_clone_to_owned()?, peer))
    }

    /// Accepts datagrams only from `peer` from now on, and drops those that arrived before. This host's own addresses may change
    /// meanwhile.
    pub fn aim(&self, peer: SocketAddr) -> io::Result<()> {
        let mut current = self.peer.lock();
        if *current != Some(peer) {
            *current = None;
            self.accept_only(Some(peer))?;
            *current = Some(peer);
        }
        Ok(())
    }

    /// Drops what waits, too.
    pub(super) fn accept_only(&self, peer: Option<SocketAddr>) -> io::Result<()> {
        self.socket.accept_only(peer)?;
        let mut byte = [0u8; 1];
        // SAFETY: the one byte of the buffer is writable; the kernel drops the rest of the datagram.
        while unsafe { libc::recv(self.fd().as_raw_fd(), byte.as_mut_ptr().cast(), 1, libc::MSG_DONTWAIT) }
            >= 0
        {}
        Ok(())
    }

    /// Whether frames may be received in place.
    pub(super) fn in_place(&self) -> bool {
        self.in_place
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
