//! Port security: checks that a source address may enter at a port. The router checks a flow's first frame and caches the result.

use super::rule::{Member, PortKind};
use crate::wire::ethernet::Mac;

/// True when a frame with source `src` may enter at `port`.
pub(super) fn source_allowed(src: Mac, port: &Member) -> bool {
    // A group address is never a source (IEEE 802.3, 3.2.3). Port security applies to interfaces only, because a link carries
    // many stations.
    !src.is_multicast()
        && (port.kind == PortKind::Link || !port.port_security || port.mac.is_some_and(|mac| mac == src))
}
