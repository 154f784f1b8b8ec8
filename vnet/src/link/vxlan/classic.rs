//! The classic VNET encapsulation (VNET/P): the bare Ethernet frame is the UDP payload.

use std::net::SocketAddr;

use super::finish_frames::Way;
use crate::link::path::state::udp_payload;
use crate::link::sending::Sending;
use crate::link::socket::name::Target;
use crate::link::socket::udp::{Oversize, Socket};
use crate::stats::DropReason;

/// The `vnet` part of a link.
#[derive(Debug)]
pub(in crate::link) struct Classic {
    pub(in crate::link) remote: SocketAddr,
    name: Target,
}

impl Classic {
    /// A link to the peer's only port.
    pub(in crate::link) fn new(remote: SocketAddr) -> Classic {
        Classic { remote, name: Target::new(remote) }
    }

    /// Sends the frames `which` of the batch without a header, one per datagram.
    pub(in crate::link) fn send(&self, socket: &Socket, out: &mut Sending<'_>, which: &[u16]) {
        let Some(name) = socket.form_of(&self.name) else {
            return out.dropped_all(DropReason::SendFailed, which);
        };
        out.gather.segmentation = out.link.path.segmentation();
        socket.set_oversize(Oversize::Fragment);
        let way = Way::classic(socket, name, udp_payload(out.link.path.mtu(), self.remote.is_ipv4()));
        which.iter().for_each(|&index| way.put(out, index));
        way.flush(out);
    }
}
