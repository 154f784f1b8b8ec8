//! rtnetlink(7): requests to the kernel, one at a time, and its notifications.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use netlink_packet_core::{NLM_F_ACK, NLM_F_REQUEST, NetlinkMessage, NetlinkPayload};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_sys::protocols::NETLINK_ROUTE;
use netlink_sys::{Socket, SocketAddr};

/// An rtnetlink socket in the network namespace of the thread that created it.
pub(crate) struct Netlink(Socket);

impl Netlink {
    /// Opens the socket in the calling thread's network namespace.
    pub(crate) fn new() -> io::Result<Netlink> {
        let mut socket = Socket::new(NETLINK_ROUTE)?;
        socket.bind_auto()?;
        socket.connect(&SocketAddr::new(0, 0))?;
        Ok(Netlink(socket))
    }

    /// Sends a change with extra `flags` (`NLM_F_…`) and waits for the kernel's acknowledgement.
    pub(crate) fn change(&self, request: RouteNetlinkMessage, flags: u16) -> io::Result<()> {
        let mut message = NetlinkMessage::from(request);
        message.header.flags = NLM_F_REQUEST | NLM_F_ACK | flags;
        match self.exchange(message)?.payload {
            NetlinkPayload::Error(error) if error.code.is_some() => Err(error.to_io()),
            _ => Ok(()),
        }
    }

    /// Sends a query for one object and returns the reply.
    pub(crate) fn ask(&self, request: RouteNetlinkMessage) -> io::Result<RouteNetlinkMessage> {
        let mut message = NetlinkMessage::from(request);
        message.header.flags = NLM_F_REQUEST;
        match self.exchange(message)?.payload {
            NetlinkPayload::InnerMessage(answer) => Ok(answer),
            NetlinkPayload::Error(error) => Err(error.to_io()),
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }

    fn exchange(
        &self,
        mut message: NetlinkMessage<RouteNetlinkMessage>,
    ) -> io::Result<NetlinkMessage<RouteNetlinkMessage>> {
        message.finalize();
        let mut bytes = vec![0; message.buffer_len()];
        message.serialize(&mut bytes);
        self.0.send(&bytes, 0)?;
        let (answer, _) = self.0.recv_from_full()?;
        NetlinkMessage::<RouteNetlinkMessage>::deserialize(&answer).map_err(io::Error::other)
    }
}

impl AsFd for Netlink {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Notifications that something changed in the network namespace of the thread that created the socket. The reader looks up what
/// changed: when many notifications arrive at once the kernel may drop some of them, but never all.
pub(crate) struct Notifications(Socket);

impl Notifications {
    /// Subscribes to `groups` (`RTMGRP_…`).
    pub(crate) fn subscribe(groups: u32) -> io::Result<Notifications> {
        let mut socket = Socket::new(NETLINK_ROUTE)?;
        socket.set_non_blocking(true)?;
        socket.bind(&SocketAddr::new(0, groups))?;
        Ok(Notifications(socket))
    }

    /// Discards pending notifications. Stops after a bounded number, so that a fast writer cannot keep the reader here.
    pub(crate) fn drain(&self) {
        const MESSAGES_MAX: usize = 1024;
        for _ in 0..MESSAGES_MAX {
            let mut room = [0; 1];
            // The kernel truncates messages to `room`. ENOBUFS reports lost messages and precedes the remaining ones.
            match self.0.recv(&mut room.as_mut_slice(), 0) {
                Err(error) if error.raw_os_error() != Some(libc::ENOBUFS) => return,
                _ => {}
            }
        }
    }
}

impl AsFd for Notifications {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
