//! What carries a link's frames, as the configuration says it.

use vnet::link::{Encapsulation, LinkKind, StreamOptions, VxlanOptions};
use vnet::wire::ethernet::Mac;

/// Settings that only some encapsulations have.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Tunnel {
    /// None.
    #[default]
    None,
    /// A VXLAN link's other VTEPs.
    Vxlan(VxlanOptions),
    /// How a stream link connects.
    Stream(StreamOptions),
    /// A native link: the other host's ports that are its guests' own, by their MAC addresses.
    Direct(Vec<(Mac, u16)>),
}

/// The kind of link that these settings describe; `None` for a stream that does not say how it connects.
pub(super) fn kind(encapsulation: Encapsulation, tunnel: Tunnel) -> Option<LinkKind> {
    Some(match (encapsulation, tunnel) {
        (Encapsulation::Native, Tunnel::Direct(guests)) => LinkKind::Native { guests },
        (Encapsulation::Native, _) => LinkKind::default(),
        (Encapsulation::Vnet, _) => LinkKind::Classic,
        (Encapsulation::Vxlan, Tunnel::Vxlan(vxlan)) => LinkKind::Vxlan(vxlan),
        (Encapsulation::Vxlan, _) => LinkKind::Vxlan(VxlanOptions::default()),
        (Encapsulation::Stream, Tunnel::Stream(stream)) => LinkKind::Stream(stream),
        (Encapsulation::Stream, _) => return None,
    })
}
