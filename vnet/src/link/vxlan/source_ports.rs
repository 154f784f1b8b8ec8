//! Source ports of VXLAN datagrams: the sockets that one dispatcher sends from.
//!
//! The hash of the inner flow chooses a datagram's source port (RFC 7348 section 5), so that the underlay spreads flows over its
//! paths. Raw sockets would need a privilege and could not use segmentation offload, so each dispatcher has [`PORTS`] UDP sockets
//! instead, bound in the range that the RFC recommends. They are never read.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use crate::link::socket::udp::{Oversize, Socket};

/// Number of source ports of a dispatcher.
pub(in crate::link) const PORTS: usize = 16;
/// One dispatcher's sockets for sending VXLAN.
pub(in crate::link) struct SourcePorts(Vec<Arc<Socket>>);

impl SourcePorts {
    /// Binds sockets to the address on which the VXLAN socket listens.
    pub(in crate::link) fn new(listen: SocketAddr) -> io::Result<SourcePorts> {
        let sockets = (0..PORTS).map(|_| {
            let socket = Socket::sending(SocketAddr::new(listen.ip(), 0))?;
            // RFC 7348 section 4.3: VTEPs do not fragment.
            socket.set_oversize(Oversize::Refuse);
            Ok(Arc::new(socket))
        });
        Ok(SourcePorts(sockets.collect::<io::Result<_>>()?))
    }

    pub(in crate::link) fn len(&self) -> usize {
        self.0.len()
    }

    pub(in crate::link) fn socket(&self, index: usize) -> &Socket {
        &self.0[index]
    }

    pub(in crate::link) fn all(&self) -> &[Arc<Socket>] {
        &self.0
    }
}
