//! Limits that all links share.

/// Maximum UDP payload in bytes over IPv4. IPv6 allows 20 more; one limit for both is simpler.
pub const UDP_PAYLOAD_MAX: usize = 65_507;
/// Minimum path MTU in bytes. Linux ignores ICMP messages that claim less (net.ipv4.route.min_pmtu), and a frame of any size
/// still has at most [`FRAGMENTS_MAX`](super::native::reassembly::FRAGMENTS_MAX) fragments.
pub const PATH_MTU_MIN: u16 = 552;
/// Hop count assumed for a frame whose encapsulation carries none: the one hop to this host. Only explicit rules forward such a
/// frame to another link (`Member::counts_hops`), so flooding and learning cannot create loops.
pub const HOPS_UNKNOWN: u8 = 1;
/// Maximum number of guests with their own ports per link.
pub const DIRECT_MAX: usize = 32;
