//! Feature negotiation: the virtio and vhost-user features offered, and the frame format that the accepted ones imply.
//!
//! Only features that work end to end are offered.
//!
//! The front end itself implements CTRL_VQ, STATUS and GUEST_ANNOUNCE: QEMU, Cloud Hypervisor and DPDK's virtio-user handle the
//! control queue and the link status, but expose the bits only if the back end offers them.

use vhost::vhost_user::message::VhostUserProtocolFeatures;

use super::options::VhostUserOptions;
use crate::interface::virtqueue::net::{Format, LEGACY_HDR_LEN};
use crate::wire::offload::{Accepts, VIRTIO_NET_HDR_LEN};

// Feature bits, virtio 1.2 sections 5.1.3 and 6; vhost-user, "Feature bits".
pub(super) const CSUM: u64 = 1 << 0;
pub(super) const GUEST_CSUM: u64 = 1 << 1;
pub(super) const MTU: u64 = 1 << 3;
pub(super) const MAC: u64 = 1 << 5;
pub(super) const GUEST_TSO4: u64 = 1 << 7;
pub(super) const GUEST_TSO6: u64 = 1 << 8;
pub(super) const GUEST_ECN: u64 = 1 << 9;
pub(super) const HOST_TSO4: u64 = 1 << 11;
pub(super) const HOST_TSO6: u64 = 1 << 12;
pub(super) const HOST_ECN: u64 = 1 << 13;
pub(super) const MRG_RXBUF: u64 = 1 << 15;
pub(super) const STATUS: u64 = 1 << 16;
pub(super) const CTRL_VQ: u64 = 1 << 17;
pub(super) const GUEST_ANNOUNCE: u64 = 1 << 21;
pub(super) const MQ: u64 = 1 << 22;
pub(super) const LOG_ALL: u64 = 1 << 26;
pub(super) const ANY_LAYOUT: u64 = 1 << 27;
pub(super) const INDIRECT_DESC: u64 = 1 << 28;
pub(super) const EVENT_IDX: u64 = 1 << 29;
pub(super) const PROTOCOL_FEATURES: u64 = 1 << 30;
pub(super) const VERSION_1: u64 = 1 << 32;
pub(super) const IN_ORDER: u64 = 1 << 35;
pub(super) const GUEST_USO4: u64 = 1 << 54;
pub(super) const GUEST_USO6: u64 = 1 << 55;
pub(super) const HOST_USO: u64 = 1 << 56;

/// Features that every interface offers.
const ALWAYS: u64 = CSUM
    | GUEST_CSUM
    | MTU
    | GUEST_TSO4
    | GUEST_TSO6
    | GUEST_ECN
    | HOST_TSO4
    | HOST_TSO6
    | HOST_ECN
    | MRG_RXBUF
    | STATUS
    | CTRL_VQ
    | GUEST_ANNOUNCE
    | LOG_ALL
    | ANY_LAYOUT
    | INDIRECT_DESC
    | EVENT_IDX
    | PROTOCOL_FEATURES
    | VERSION_1
    | IN_ORDER
    | GUEST_USO4
    | GUEST_USO6
    | HOST_USO;

/// The virtio features that an interface offers.
pub(super) fn offered(options: &VhostUserOptions) -> u64 {
    let mq = if options.queues > 1 { MQ } else { 0 };
    let mac = if options.mac.is_some() { MAC } else { 0 };
    ALWAYS | mq | mac
}

/// The vhost-user protocol features that an interface offers. [`super::control`] implements MTU and RARP; crate `vhost` the others.
pub(super) fn protocol(options: &VhostUserOptions) -> VhostUserProtocolFeatures {
    let mut features = VhostUserProtocolFeatures::REPLY_ACK
        | VhostUserProtocolFeatures::RARP
        | VhostUserProtocolFeatures::MTU
        | VhostUserProtocolFeatures::LOG_SHMFD
        | VhostUserProtocolFeatures::CONFIG
        | VhostUserProtocolFeatures::RESET_DEVICE;
    // QEMU 7.2 adds every memory slot once per queue pair, which vnetd cannot tell from a front end that adds a region twice.
    // Without memory slots QEMU sends its whole memory table, of up to eight regions.
    features |= match options.queues {
        1 => VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS,
        _ => VhostUserProtocolFeatures::MQ,
    };
    features
}

/// The frame format in the rings of a guest that negotiated `features`.
pub(super) fn format(features: u64) -> Format {
    let has = |bits| features & bits == bits;
    let csum = has(GUEST_CSUM);
    Format {
        header_len: if features & (VERSION_1 | MRG_RXBUF) == 0 { LEGACY_HDR_LEN } else { VIRTIO_NET_HDR_LEN },
        mergeable: has(MRG_RXBUF),
        accepts: Accepts {
            csum,
            tso4: csum && has(GUEST_TSO4),
            tso6: csum && has(GUEST_TSO6),
            uso: csum && has(GUEST_USO4 | GUEST_USO6),
            ecn: has(GUEST_ECN),
        },
    }
}
