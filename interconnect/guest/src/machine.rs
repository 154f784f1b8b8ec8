//! What the helper does with its machine: a packet socket for control frames, pinned pages, addresses.

use std::collections::HashMap;
use std::io;
use std::mem::zeroed;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::net::sockopt;
use vnet_rdma::daemon::MacAddress;
use vnet_rdma::vm::{ETHERTYPE, Machine, OWN, Pinned, Reserved};

use crate::{interfaces, loopback_filter, neighbour, pin};

/// How often the kernel is asked to look for the same neighbour.
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// Neighbours that are looked for at once.
const LOOKED_FOR_MAX: usize = 1024;
/// How long the list of the machine's addresses is cached.
const OWN_FRESH: Duration = Duration::from_secs(1);
/// Receive buffer of a socket in bytes. The kernel counts 2 304 for a frame.
const RECEIVE_ROOM: usize = 1 << 20;
/// Interval at which the same note is repeated at most.
const NOTE_EVERY: Duration = Duration::from_secs(10);

/// Enlarges a socket's receive buffer; without CAP_NET_ADMIN up to net.core.rmem_max.
fn make_room(socket: impl AsFd) {
    if sockopt::set_socket_recv_buffer_size_force(&socket, RECEIVE_ROOM).is_err() {
        let _ = sockopt::set_socket_recv_buffer_size(&socket, RECEIVE_ROOM);
    }
}

/// This machine.
pub struct LinuxMachine {
    packets: OwnedFd,
    /// Cached list of the machine's addresses, and when it was read.
    own: Mutex<(Vec<IpAddr>, Option<Instant>)>,
    looked_for: Mutex<HashMap<IpAddr, Instant>>,
    noted: Mutex<Option<(String, Instant)>>,
}

impl LinuxMachine {
    /// Opens the packet socket, for all interfaces.
    pub fn open() -> io::Result<Self> {
        let protocol = libc::c_int::from(ETHERTYPE.to_be());
        let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        // SAFETY: the call takes no pointers.
        let socket = unsafe { libc::socket(libc::AF_PACKET, kind, protocol) };
        if socket < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just returned this descriptor, and nobody else owns it.
        let packets = unsafe { OwnedFd::from_raw_fd(socket) };
        make_room(&packets);
        Ok(Self { packets, own: Mutex::default(), looked_for: Mutex::default(), noted: Mutex::default() })
    }
}

impl Machine for LinuxMachine {
    fn send(&self, interface: u32, frame: &[u8]) {
        // SAFETY: a plain C structure, for which zero bytes are valid.
        let mut to: libc::sockaddr_ll = unsafe { zeroed() };
        to.sll_family = libc::AF_PACKET as u16;
        to.sll_protocol = ETHERTYPE.to_be();
        to.sll_ifindex = interface as i32;
        to.sll_halen = 6;
        to.sll_addr[..6].copy_from_slice(&frame[..6]);
        let len = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
        // SAFETY: the kernel reads `frame` and `to`, which outlive the call and have these lengths. A frame that is not sent counts as lost.
        unsafe {
            let to = (&raw const to).cast();
            libc::sendto(
                self.packets.as_raw_fd(),
                frame.as_ptr().cast(),
                frame.len(),
                libc::MSG_DONTWAIT,
                to,
                len,
            );
        }
    }

    fn receive(&self, buffer: &mut [u8]) -> Option<usize> {
        loop {
            let (received, _) =
                rustix::net::recv(&self.packets, &mut *buffer, rustix::net::RecvFlags::DONTWAIT).ok()?;
            // The socket also sees what this machine sends.
            if buffer[..received].get(6..12) == Some(&OWN) {
                return Some(received);
            }
        }
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        self.packets.as_fd()
    }

    fn pin(&self, memory: &OwnedFd, len: usize) -> io::Result<Pinned> {
        pin::pin(memory, len, |text| self.note(text))
    }

    fn reserve(&self, bind: SocketAddr) -> io::Result<Reserved> {
        let all = interfaces::ethernet()?;
        let none = || io::Error::from_raw_os_error(libc::EADDRNOTAVAIL);
        let (interface, ip) = interfaces::choose(&all, bind).ok_or_else(none)?;
        let socket = UdpSocket::bind((ip, bind.port()))?;
        loopback_filter::attach(&socket)?;
        make_room(&socket);
        let (address, index, mac) = (socket.local_addr()?, interface.index, interface.mac);
        Ok(Reserved { address, interface: index, mac, socket })
    }

    fn is_local_address(&self, ip: IpAddr) -> bool {
        let (mut own, now) = (self.own.lock(), Instant::now());
        if own.1.is_none_or(|at| now.saturating_duration_since(at) >= OWN_FRESH)
            && let Ok(all) = interfaces::addresses()
        {
            *own = (all, Some(now));
        }
        own.0.contains(&ip)
    }

    fn resolve(&self, interface: u32, ip: IpAddr) -> Option<MacAddress> {
        if ip.is_loopback() {
            // A datagram of the engine's address to a loopback address is answered from another address, so the channel would not open.
            return None;
        }
        if self.is_local_address(ip) {
            let all = interfaces::ethernet().ok()?;
            return all.iter().find(|known| known.index == interface).map(|known| known.mac);
        }
        let found = neighbour::known(ip, interface);
        let mut looked_for = self.looked_for.lock();
        if found.is_some() {
            looked_for.remove(&ip);
            return found;
        }
        let now = Instant::now();
        if looked_for.len() >= LOOKED_FOR_MAX {
            looked_for.clear();
        }
        if looked_for.get(&ip).is_none_or(|at| now.saturating_duration_since(*at) >= LOOK_EVERY) {
            looked_for.insert(ip, now);
            neighbour::look_for(ip);
        }
        None
    }

    fn note(&self, text: &str) {
        let (mut noted, now) = (self.noted.lock(), Instant::now());
        let is_known = noted
            .as_ref()
            .is_some_and(|(known, at)| known == text && now.saturating_duration_since(*at) < NOTE_EVERY);
        if !is_known {
            eprintln!("vnet-rdma-guest: {text}");
            *noted = Some((text.to_owned(), now));
        }
    }
}
