//! Limits that all links share.

use crate::wire::native::HOPS_MAX;

/// Largest UDP payload in bytes over IPv4; IPv6 would take 20 more, but one limit for both is easier to live with.
pub const UDP_PAYLOAD_MAX: usize = 65_507;
/// Smallest path MTU in bytes. Linux does not believe an ICMP message that claims less (net.ipv4.route.min_pmtu), and a frame of
/// any size still has at most [`FRAGMENTS_MAX`](super::native::reassembly::FRAGMENTS_MAX) fragments.
pub const PATH_MTU_MIN: u16 = 552;
/// Hops of a frame from a link whose encapsulation cannot count them: one more than a relay may have taken, so that it
/// reaches this host's interfaces but is not relayed. Loops of links end here at the latest.
pub const HOPS_UNKNOWN: u8 = HOPS_MAX + 1;
/// Most guests of another host that a link knows own ports of.
pub const DIRECT_MAX: usize = 32;
