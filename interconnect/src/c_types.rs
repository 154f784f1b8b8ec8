//! Structures and flags of `include/vnet_rdma.h`, in the C layout.

use std::ffi::c_void;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};

use crate::proto::{Completion, Counters, EndpointCounters, Peer};

pub(crate) const TAGGED: u32 = 1;
pub(crate) const DATA: u32 = 2;
pub(crate) const BUFFERED: u32 = 4;
pub(crate) const QUIET: u32 = 8;
pub(crate) const RELEASED: u32 = 16;
pub(crate) const DISCARD: u32 = 32;
pub(crate) const LATE: u32 = 64;

/// The header's `vnet_rdma_peer`: address of an endpoint.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct CPeer {
    ip: [u8; 16],
    scope: u32,
    port: u16,
    endpoint: u16,
    family: u16,
    reserved: u16,
}

/// The header's `vnet_rdma_completion`: a completion.
#[repr(C)]
pub struct CCompletion {
    context: u64,
    len: u64,
    tag: u64,
    data: u64,
    offset: u64,
    kind: u32,
    status: u32,
    flags: u32,
    reserved: u32,
    peer: CPeer,
}

/// The header's `vnet_rdma_atomic_op`: parameters of an atomic operation.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct CAtomic {
    pub(crate) key: u64,
    pub(crate) offset: u64,
    pub(crate) operands: *const c_void,
    pub(crate) compare: *const c_void,
    pub(crate) found: *mut c_void,
    pub(crate) count: u32,
    pub(crate) change: u16,
    pub(crate) datatype: u16,
}

/// The header's `vnet_rdma_counters`: counters of an endpoint.
#[repr(C)]
pub struct CEndpointCounters {
    packets: u64,
    bytes: u64,
    held_back: u64,
}

impl From<EndpointCounters> for CEndpointCounters {
    fn from(EndpointCounters { packets, bytes, held_back }: EndpointCounters) -> Self {
        Self { packets, bytes, held_back }
    }
}

/// The header's `vnet_rdma_node_counters`: counters of a node's engine.
#[repr(C)]
pub struct CNodeCounters {
    packets_out: u64,
    resent: u64,
    packets_in: u64,
    malformed: u64,
    unknown: u64,
    useless: u64,
    no_memory: u64,
    not_ready: u64,
    bad_keys: u64,
    failed_channels: u64,
    held_back: u64,
}

impl From<Counters> for CNodeCounters {
    fn from(counters: Counters) -> Self {
        Self {
            packets_out: counters.packets_out,
            resent: counters.resent,
            packets_in: counters.packets_in,
            malformed: counters.malformed,
            unknown: counters.unknown,
            useless: counters.useless,
            no_memory: counters.no_memory,
            not_ready: counters.not_ready,
            bad_keys: counters.bad_keys,
            failed_channels: counters.failed_channels,
            held_back: counters.held_back,
        }
    }
}

impl From<Peer> for CPeer {
    fn from(peer: Peer) -> Self {
        let mut ip = [0; 16];
        let (family, scope) = match peer.address {
            SocketAddr::V4(v4) => {
                ip[..4].copy_from_slice(&v4.ip().octets());
                (4, 0)
            }
            SocketAddr::V6(v6) => {
                ip = v6.ip().octets();
                (6, v6.scope_id())
            }
        };
        Self { ip, scope, port: peer.address.port(), endpoint: peer.endpoint, family, reserved: 0 }
    }
}

impl CPeer {
    /// Returns `None` if the family is neither IPv4 nor IPv6.
    pub(crate) fn peer(&self) -> Option<Peer> {
        let [a, b, c, d, ..] = self.ip;
        let address = match self.family {
            6 => SocketAddrV6::new(Ipv6Addr::from(self.ip), self.port, 0, self.scope).into(),
            4 => SocketAddr::new(IpAddr::V4(Ipv4Addr::new(a, b, c, d)), self.port),
            _ => return None,
        };
        Some(Peer { address, endpoint: self.endpoint })
    }
}

impl From<Completion> for CCompletion {
    fn from(completion: Completion) -> Self {
        let flag = |is: bool, flag: u32| if is { flag } else { 0 };
        Self {
            context: completion.context,
            len: completion.len,
            tag: completion.tag.unwrap_or(0),
            data: completion.data.unwrap_or(0),
            offset: completion.offset,
            kind: completion.kind as u32,
            status: completion.status as u32,
            flags: flag(completion.tag.is_some(), TAGGED)
                | flag(completion.data.is_some(), DATA)
                | flag(completion.is_released, RELEASED)
                | flag(completion.is_late, LATE),
            reserved: 0,
            peer: completion.peer.into(),
        }
    }
}
