//! Decodes VXLAN datagrams into frames (RFC 7348 section 5).

use std::sync::Arc;

use crate::frame::NetworkId;
use crate::link::intake::Intake;
use crate::link::{HOPS_UNKNOWN, Link};
use crate::stats::{DiscardReason, DropReason};
use crate::wire::vxlan::{self, VxlanError};
use crate::wire::{ethernet, partial};

/// Adds the frame of one datagram from the link's VTEP number `vtep`.
pub(in crate::link) fn datagram(link: &Arc<Link>, vtep: u16, datagram: &[u8], intake: &mut Intake<'_>) {
    let (vni, frame) = match vxlan::parse(datagram) {
        Ok(parsed) => parsed,
        Err(VxlanError::Short) => return link.stats.discard(DiscardReason::Truncated, 1),
        Err(VxlanError::NoNetwork) => return link.stats.discard(DiscardReason::BadHeader, 1),
    };
    let Some(network) = NetworkId::new(vni).filter(|network| link.carries(*network)) else {
        return intake.refuse(link, DropReason::WrongNetwork, frame.len());
    };
    if let (Some(vteps), Some((_, src))) = (link.vteps(), ethernet::addresses(frame)) {
        vteps.heard(src, vtep);
    }
    let offload = partial::inferred(frame, link.udp_payload() - vxlan::HEADER_LEN);
    intake.frame(link, network, offload, HOPS_UNKNOWN, frame);
}
