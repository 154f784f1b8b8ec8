//! Errors of calls.

use std::io;
use std::net::SocketAddr;

use crate::ether::Refusal;
use crate::ether::address::{Bind, name_of as wire_name};
use crate::proto::PostError;
use crate::seal::FRAMES_REFUSED;

/// Error of a call.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A system call on the socket failed.
    #[error("cannot use UDP address {0}: {1}")]
    Socket(SocketAddr, io::Error),
    /// A node cannot be bound to an Ethernet device, or a system call for its socket failed.
    #[error("cannot use Ethernet device {0}: {1}")]
    Device(String, Refusal),
    /// A link of this host is sealed.
    #[error("cannot use Ethernet device {0}: {FRAMES_REFUSED}")]
    NotSealed(String),
    /// The daemon does not say whether a link of this host is sealed.
    #[error(
        "cannot use Ethernet device {0}: this host's vnetd does not say that no link is sealed: an older one?"
    )]
    Unpermitted(String),
    /// The peer is at another kind of wire.
    #[error("{} is out of reach: a node at an Ethernet device reaches only names of the kind ether://MAC:PORT/ENDPOINT, and one at a UDP address none of them", wire_name(*.0))]
    OtherWire(SocketAddr),
    /// The peer is at the node's own Ethernet device.
    #[error("{} is out of reach: it is at the same Ethernet device, which does not return frames to itself; use UDP", wire_name(*.0))]
    OwnDevice(SocketAddr),
    /// The name of an endpoint is malformed, or its host is unknown.
    #[error(
        "'{0}' is no endpoint: write HOST:PORT/ENDPOINT, such as 10.77.2.1:7000/0, or ether://MAC:PORT/ENDPOINT ({1})"
    )]
    Name(String, String),
    /// The engine rejected the call.
    #[error(transparent)]
    Refused(#[from] PostError),
    /// Memory cannot be allocated for a region, or be taken back from processes of this host.
    #[error("no memory for a region: {0}; raise the memory limit")]
    Memory(io::Error),
    /// The range exceeds its region.
    #[error("bytes {0} to {1} are not all inside the region of {2}")]
    Range(usize, usize, usize),
    /// The daemon of the host does not run the engine.
    #[error("no engine by the host's daemon: {0}")]
    Daemon(String),
    /// The memory is not the library's.
    #[error(
        "the host's daemon reaches only memory of the library: register a Region, or memory of vnet_rdma_allocate(), or set VNET_RDMA_ATTACHMENT=process"
    )]
    Foreign,
    /// There is no such attachment.
    #[error("VNET_RDMA_ATTACHMENT is '{0}', but must be auto, process, daemon, vm or bounce")]
    Attachment(String),
    /// Packets are to take TCP connections only, and the node cannot listen for them.
    #[error("VNET_RDMA_ATTACHMENT=bounce needs a UDP address whose TCP port is free")]
    NoBounce,
    /// Sealing is either on or off.
    #[error("VNET_RDMA_SEAL is '{0}', but must be auto or off")]
    Seal(String),
    /// `VNET_RDMA_STREAMS` has an invalid value.
    #[error("VNET_RDMA_STREAMS is '{0}', but must be auto or off")]
    Streams(String),
}

impl Error {
    /// A system call for the socket at this place failed.
    pub(super) fn socket(bind: &Bind, error: io::Error) -> Self {
        match bind {
            Bind::Udp(address) => Error::Socket(*address, error),
            Bind::Ethernet { .. } => Error::Device(bind.device(), error.into()),
        }
    }
}
