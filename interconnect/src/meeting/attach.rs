//! Messages about the engine that the daemon runs for a process.

use std::net::{IpAddr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::os::fd::OwnedFd;

use crate::proto::Config;

/// Bytes of an address: IPv6 or mapped IPv4 (16), scope (4), port (2), 1 for IPv6 (1).
pub(crate) const ADDRESS: usize = 23;

/// What a process wants of the daemon's engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Address of the UDP socket, in the process's network namespace; port 0 selects any free one.
    pub bind: SocketAddr,
    /// Deadline of operations in milliseconds; 0: none.
    pub timeout_ms: u32,
    /// How long messages wait for an endpoint that is not ready, in milliseconds; 0: without limit.
    pub not_ready_ms: u32,
}

impl Request {
    /// A request with these bounds of `config`.
    pub(crate) fn new(bind: SocketAddr, config: &Config) -> Self {
        let ms = |ns: u64| u32::try_from(ns.div_ceil(1_000_000)).unwrap_or(u32::MAX);
        Self { bind, timeout_ms: ms(config.operation_timeout_ns), not_ready_ms: ms(config.not_ready_ns) }
    }

    /// Configuration of the engine.
    pub fn config(&self) -> Config {
        let ns = |ms: u32| u64::from(ms) * 1_000_000;
        Config {
            operation_timeout_ns: ns(self.timeout_ms),
            not_ready_ns: ns(self.not_ready_ms),
            ..Config::default()
        }
    }

    pub(crate) fn encode(&self) -> [u8; ADDRESS + 8] {
        let mut bytes = [0; ADDRESS + 8];
        bytes[..ADDRESS].copy_from_slice(&encode_address(self.bind));
        bytes[ADDRESS..ADDRESS + 4].copy_from_slice(&self.timeout_ms.to_be_bytes());
        bytes[ADDRESS + 4..].copy_from_slice(&self.not_ready_ms.to_be_bytes());
        bytes
    }

    pub(crate) fn decode(bytes: &[u8; ADDRESS + 8]) -> Option<Self> {
        let (address, [t0, t1, t2, t3, n0, n1, n2, n3]) = bytes
            .split_first_chunk()
            .and_then(|(address, rest)| Some((decode_address(address)?, <[u8; 8]>::try_from(rest).ok()?)))?;
        let (timeout, not_ready) = ([t0, t1, t2, t3], [n0, n1, n2, n3]);
        Some(Self {
            bind: address,
            timeout_ms: u32::from_be_bytes(timeout),
            not_ready_ms: u32::from_be_bytes(not_ready),
        })
    }
}

pub(crate) fn encode_address(address: SocketAddr) -> [u8; ADDRESS] {
    let mut bytes = [0; ADDRESS];
    let (ip, scope) = match address {
        SocketAddr::V4(v4) => (v4.ip().to_ipv6_mapped(), 0),
        SocketAddr::V6(v6) => (*v6.ip(), v6.scope_id()),
    };
    bytes[..16].copy_from_slice(&ip.octets());
    bytes[16..20].copy_from_slice(&scope.to_be_bytes());
    bytes[20..22].copy_from_slice(&address.port().to_be_bytes());
    bytes[22] = address.is_ipv6().into();
    bytes
}

/// Returns `None` if the bytes are not those of `encode_address`.
pub(crate) fn decode_address(bytes: &[u8; ADDRESS]) -> Option<SocketAddr> {
    let [ip @ .., s0, s1, s2, s3, p0, p1, is_v6] = *bytes;
    let (ip, port) = (Ipv6Addr::from(ip), u16::from_be_bytes([p0, p1]));
    let scope = u32::from_be_bytes([s0, s1, s2, s3]);
    let address = match ip.to_ipv4_mapped().filter(|_| is_v6 == 0) {
        Some(v4) => SocketAddr::new(IpAddr::V4(v4), port),
        None => SocketAddrV6::new(ip, port, 0, scope).into(),
    };
    Some(address).filter(|address| encode_address(*address) == *bytes)
}

/// What a process gets to be served, and what its daemon keeps.
pub struct Ends {
    /// Address of the socket that carries its packets.
    pub address: SocketAddr,
    /// The queues' memory.
    pub memory: OwnedFd,
    /// The process's end of the bell.
    pub bell: OwnedFd,
    /// The daemon's end: shutting it down ends the attachment.
    pub leash: OwnedFd,
    /// The daemon's end of the connection by which the engine asks how peers are reached, and for keys. `None`: it does not ask.
    pub questions: Option<OwnedFd>,
}

/// Why the daemon does not run the engine of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Decline {
    /// No network of the container allows it.
    #[error(
        "no network of this container allows it; set daemon_engine = true in its [[network]] on this host"
    )]
    NotAllowed,
    /// Too many processes are served.
    #[error("the daemon serves too many processes already; close some")]
    TooMany,
    /// The address cannot be used, for this reason (errno).
    #[error("cannot use the address: {}", std::io::Error::from_raw_os_error(*.0))]
    Address(i32),
    /// Ports below 1024 are not opened for processes.
    #[error("the daemon opens no ports below 1024; use a higher one")]
    Port,
    /// A link of the network is sealed: what an older daemon says, which does not seal for this application.
    #[error(
        "a link of this network is sealed, and this host's vnetd is too old to seal for it; unset VNET_RDMA_ATTACHMENT"
    )]
    Sealed,
    /// No vnetd answers at the virtual machine's interface.
    #[error(
        "no vnetd answers at this virtual machine's interface; it needs kind = 'vhost-user' and daemon_engine = true in its [[network]]"
    )]
    Silent,
    /// The daemon cannot use the virtual machine's memory.
    #[error(
        "the memory cannot be shared with the host: it lies in too many pieces, the machine is being migrated, or its memory is private; \
         'echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled' makes pieces larger"
    )]
    Memory,
}

impl Decline {
    pub(crate) fn encode(self) -> [u8; 5] {
        let (code, errno) = match self {
            Decline::NotAllowed => (1, 0),
            Decline::TooMany => (2, 0),
            Decline::Address(errno) => (3, errno),
            Decline::Port => (4, 0),
            Decline::Sealed => (5, 0),
            Decline::Silent => (6, 0),
            Decline::Memory => (7, 0),
        };
        let [a, b, c, d] = i32::to_be_bytes(errno);
        [code, a, b, c, d]
    }

    pub(crate) fn decode(bytes: &[u8; 5]) -> Option<Self> {
        let [code, errno @ ..] = *bytes;
        let errno = i32::from_be_bytes(errno);
        Some(match (code, errno) {
            (1, 0) => Decline::NotAllowed,
            (2, 0) => Decline::TooMany,
            (3, errno) => Decline::Address(errno),
            (4, 0) => Decline::Port,
            (5, 0) => Decline::Sealed,
            (6, 0) => Decline::Silent,
            (7, 0) => Decline::Memory,
            _ => return None,
        })
    }
}
