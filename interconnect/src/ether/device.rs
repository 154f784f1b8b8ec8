//! The device that a node is bound to, and the node's port there.

use std::ffi::{c_int, c_ulong};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, socket_with};

use super::frame::{HEADER, Mac};
use crate::random::random;

/// Smallest MTU that carries the protocol's packets: IPv4 hosts take as much, too (RFC 791).
const MTU_MIN: usize = 576 + HEADER;
/// First port that port 0 stands for (RFC 6335), and the number of attempts.
const FREE_FROM: u16 = 49_152;
const ATTEMPTS: usize = 16;

/// Why a node cannot be bound to a device.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// This network namespace has no such device.
    #[error("there is no such device in this network namespace")]
    Absent,
    /// The process may not open packet sockets.
    #[error("packet sockets need CAP_NET_RAW in this network namespace")]
    Capability,
    /// The device is none of Ethernet, such as loopback.
    #[error("it is no Ethernet device")]
    Kind,
    /// The MTU is too small.
    #[error("its MTU is {0}, and must be at least {MTU_MIN}")]
    Narrow(usize),
    /// Another node has the port.
    #[error("another process has port {0} there")]
    Taken(u16),
    /// A system call failed.
    #[error(transparent)]
    Kernel(#[from] io::Error),
}

impl Refusal {
    /// The error number of the C interface.
    pub(crate) fn errno(&self) -> c_int {
        match self {
            Refusal::Absent => libc::ENODEV,
            Refusal::Capability => libc::EPERM,
            Refusal::Kind | Refusal::Narrow(_) => libc::EINVAL,
            Refusal::Taken(_) => libc::EADDRINUSE,
            Refusal::Kernel(error) => error.raw_os_error().unwrap_or(libc::EIO),
        }
    }
}

/// An Ethernet device.
#[derive(Clone, Copy, Debug)]
pub(super) struct Device {
    pub(super) index: c_int,
    pub(super) mac: Mac,
    /// Bytes of a frame behind its Ethernet header, at most.
    pub(super) mtu: usize,
}

impl Device {
    /// Finds a device by its name, which has at most 15 bytes.
    pub(super) fn find(socket: &OwnedFd, name: &str) -> Result<Self, Refusal> {
        let absent = |error: io::Error| match error.raw_os_error() {
            Some(libc::ENODEV) => Refusal::Absent,
            _ => Refusal::Kernel(error),
        };
        let index = ask(socket, name, libc::SIOCGIFINDEX).map_err(absent)?;
        let hardware = ask(socket, name, libc::SIOCGIFHWADDR).map_err(absent)?;
        let mtu = ask(socket, name, libc::SIOCGIFMTU).map_err(absent)?;
        // SAFETY: the kernel has filled the member of the union that each request stands for.
        let (index, hardware, mtu) = unsafe { (index.ifru_ifindex, hardware.ifru_hwaddr, mtu.ifru_mtu) };
        if hardware.sa_family != libc::ARPHRD_ETHER {
            return Err(Refusal::Kind);
        }
        let mtu = usize::try_from(mtu).unwrap_or(0);
        if mtu < MTU_MIN {
            return Err(Refusal::Narrow(mtu));
        }
        let mac = std::array::from_fn(|place| hardware.sa_data[place] as u8);
        Ok(Self { index, mac, mtu })
    }

    /// Reserves a port of the device; 0 stands for any free one. The port is free again when the descriptor is closed.
    pub(super) fn reserve(&self, port: u16) -> Result<(OwnedFd, u16), Refusal> {
        if port != 0 {
            return Ok((self.reserve_one(port)?, port));
        }
        let seeds = random()?;
        for seed in seeds.chunks_exact(2).take(ATTEMPTS) {
            let port = FREE_FROM | u16::from_be_bytes([seed[0], seed[1]]);
            match self.reserve_one(port) {
                Err(Refusal::Taken(_)) => {}
                reserved => return Ok((reserved?, port)),
            }
        }
        Err(io::Error::from_raw_os_error(libc::EADDRINUSE).into())
    }

    fn reserve_one(&self, port: u16) -> Result<OwnedFd, Refusal> {
        let name = format!("vnet-rdma-ether/{}/{port}", self.index);
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None);
        let socket = socket.map_err(io::Error::from)?;
        let name = SocketAddrUnix::new_abstract_name(name.as_bytes()).map_err(io::Error::from)?;
        match bind(&socket, &name) {
            Ok(()) => Ok(socket),
            Err(rustix::io::Errno::ADDRINUSE) => Err(Refusal::Taken(port)),
            Err(error) => Err(io::Error::from(error).into()),
        }
    }
}

/// Asks the kernel about a device (netdevice(7)).
fn ask(socket: impl AsFd, name: &str, request: c_ulong) -> io::Result<libc::__c_anonymous_ifr_ifru> {
    // SAFETY: a plain C structure, for which zero bytes are valid.
    let mut asked = unsafe { std::mem::zeroed::<libc::ifreq>() };
    let room = asked.ifr_name.len() - 1;
    if name.len() > room {
        return Err(io::Error::from_raw_os_error(libc::ENODEV));
    }
    for (place, byte) in asked.ifr_name.iter_mut().zip(name.bytes()) {
        *place = byte as libc::c_char;
    }
    // SAFETY: the request reads the name, which ends with a zero, and writes into the structure, which outlives the call.
    let result = unsafe { libc::ioctl(socket.as_fd().as_raw_fd(), request as _, &raw mut asked) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(asked.ifr_ifru) }
}
