//! The format of frames in a guest's rings, and the port that the frames belong to.

use crate::frame::{NetworkId, PortId};
use crate::stats::PortStats;
use crate::wire::offload::Accepts;

/// Header size in bytes of legacy drivers that negotiated neither VERSION_1 nor MRG_RXBUF: the header has no `num_buffers`.
pub const LEGACY_HDR_LEN: usize = 10;

/// The frame format that guest and device negotiated.
#[derive(Clone, Copy, Debug)]
pub struct Format {
    /// Size of the virtio-net header in bytes: 12, or [`LEGACY_HDR_LEN`].
    pub header_len: usize,
    /// True if VIRTIO_NET_F_MRG_RXBUF was negotiated: a frame may be spread over several chains.
    pub mergeable: bool,
    /// Offloads that the guest accepts.
    pub accepts: Accepts,
}

/// The port at which frames enter or leave, and their format in the guest's rings.
#[derive(Clone, Copy, Debug)]
pub struct Owner<'a> {
    /// The interface's port.
    pub port: PortId,
    /// The interface's network.
    pub network: NetworkId,
    /// The interface's MTU in bytes.
    pub mtu: usize,
    /// The port's counters.
    pub stats: &'a PortStats,
    /// The negotiated frame format.
    pub format: Format,
}
