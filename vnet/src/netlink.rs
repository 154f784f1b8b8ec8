//! Requests to the kernel's rtnetlink(7), one at a time.

use std::io;

use netlink_packet_core::{NLM_F_ACK, NLM_F_REQUEST, NetlinkMessage, NetlinkPayload};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_sys::protocols::NETLINK_ROUTE;
use netlink_sys::{Socket, SocketAddr};

/// An rtnetlink socket in the network namespace of the thread that created it.
pub(crate) struct Netlink(Socket);

impl Netlink {
    /// In the calling thread's network namespace.
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
