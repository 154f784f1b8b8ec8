//! Limits that all links share.

use crate::wire::native::HOPS_MAX;

/// Largest UDP payload in bytes over IPv4. IPv6 allows 20 more; one limit for both is simpler.
pub const UDP_PAYLOAD_MAX: usize = 65_507;
/// Smallest path MTU in bytes. Linux ignores ICMP messages that claim less (net.ipv4.route.min_pmtu), and a frame of any size
/// still has at most [`FRAGMENTS_MAX`](super::native::reassembly::FRAGMENTS_MAX) fragments.
pub const PATH_MTU_MIN: u16 = 552;
/// Hop count of frames from encapsulations that carry none: one above the relay limit, so such a frame reaches this host's
/// interfaces but is not relayed. This ends loops of links.
pub const HOPS_UNKNOWN: u8 = HOPS_MAX + 1;
/// Most guests with own ports per link.
pub const DIRECT_MAX: usize = 32;
