//! The packet socket of a local network (packet(7)): made, asked, read in bursts.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use super::local::{LocalError, LocalOptions, Opened, own};
use crate::frame::FRAME_MAX;
use crate::wire::ethernet::{ETHERTYPE_VLAN, Mac, VLAN_TAG_LEN};
use crate::wire::offload::{Offload, VIRTIO_NET_HDR_LEN};

/// Bytes of the virtio-net header on a packet socket: the one without `num_buffers`.
pub(super) const HEADER_LEN: usize = 10;
/// Frames in a burst.
const PACKETS: usize = 32;
/// Bytes in front of a frame: room for the tag that is put back, and its alignment.
const ROOM: usize = 16;
/// Bytes of a frame's place.
const PLACE: usize = (ROOM + FRAME_MAX).next_multiple_of(64);
/// Socket buffers asked for in each direction, in bytes.
const SOCKET_BUFFER: libc::c_int = 8 << 20;
/// `PACKET_IGNORE_OUTGOING` (linux/if_packet.h), since Linux 4.20.
const PACKET_IGNORE_OUTGOING: libc::c_int = 23;
/// `TP_STATUS_VLAN_VALID` and `TP_STATUS_VLAN_TPID_VALID`.
const VLAN_VALID: u32 = 1 << 4;
const TPID_VALID: u32 = 1 << 6;

/// Opens the device in the namespace of the calling thread.
pub(super) fn open(options: &LocalOptions) -> Result<Opened, LocalError> {
    let device: String = options.device.chars().take(64).collect();
    let no_device = || LocalError::NoDevice(device.clone());
    let name = CString::new(options.device.as_str()).map_err(|_| no_device())?;
    // SAFETY: `name` is a zero-terminated string that lives across the call.
    let index = unsafe { libc::if_nametoindex(name.as_ptr()) } as libc::c_int;
    if index == 0 {
        return Err(no_device());
    }
    let fail = |step, error: io::Error| {
        let hint = match error.raw_os_error() {
            Some(libc::EPERM) => "; run vnetd as root or give it CAP_NET_RAW",
            _ => "",
        };
        LocalError::Step { step, device: device.clone(), error, hint }
    };
    // Protocol 0: nothing is received before the socket is bound and set up.
    let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: no memory is passed.
    let socket = own(unsafe { libc::socket(libc::AF_PACKET, kind, 0) }).map_err(|e| fail("open", e))?;
    for option in [libc::PACKET_VNET_HDR, libc::PACKET_AUXDATA, PACKET_IGNORE_OUTGOING] {
        set(&socket, libc::SOL_PACKET, option, 1).map_err(|e| fail("set up", e))?;
    }
    for (forced, polite) in [(libc::SO_RCVBUFFORCE, libc::SO_RCVBUF), (libc::SO_SNDBUFFORCE, libc::SO_SNDBUF)]
    {
        set(&socket, libc::SOL_SOCKET, forced, SOCKET_BUFFER)
            .or_else(|_| set(&socket, libc::SOL_SOCKET, polite, SOCKET_BUFFER))
            .map_err(|e| fail("set up", e))?;
    }
    let what = if options.promiscuous { libc::PACKET_MR_PROMISC } else { libc::PACKET_MR_ALLMULTI };
    ask(&socket, index, what, Mac::default(), true).map_err(|e| fail("listen on", e))?;
    let (mac, mtu) = describe(&socket, &options.device).map_err(|e| fail("look at", e))?;
    bind(&socket, index).map_err(|e| fail("bind to", e))?;
    Ok(Opened { socket, index, mac, mtu })
}

fn set(socket: &OwnedFd, level: libc::c_int, option: libc::c_int, value: libc::c_int) -> io::Result<()> {
    let len = size_of_val(&value) as libc::socklen_t;
    // SAFETY: `value` is readable for the `len` bytes told.
    let result =
        unsafe { libc::setsockopt(socket.as_raw_fd(), level, option, (&raw const value).cast(), len) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Adds or drops a membership: frames for `mac`, or all of a kind.
pub(super) fn ask(
    socket: &OwnedFd,
    index: libc::c_int,
    what: libc::c_int,
    mac: Mac,
    on: bool,
) -> io::Result<()> {
    let [a, b, c, d, e, f] = mac.0;
    let request = libc::packet_mreq {
        mr_ifindex: index,
        mr_type: what as libc::c_ushort,
        mr_alen: 6,
        mr_address: [a, b, c, d, e, f, 0, 0],
    };
    let option = if on { libc::PACKET_ADD_MEMBERSHIP } else { libc::PACKET_DROP_MEMBERSHIP };
    let len = size_of_val(&request) as libc::socklen_t;
    // SAFETY: `request` is readable for the `len` bytes told.
    let result = unsafe {
        libc::setsockopt(socket.as_raw_fd(), libc::SOL_PACKET, option, (&raw const request).cast(), len)
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn bind(socket: &OwnedFd, index: libc::c_int) -> io::Result<()> {
    // SAFETY: `sockaddr_ll` is plain data, for which all zeros is a value.
    let mut name = unsafe { std::mem::zeroed::<libc::sockaddr_ll>() };
    name.sll_family = libc::AF_PACKET as libc::c_ushort;
    name.sll_protocol = (libc::ETH_P_ALL as u16).to_be();
    name.sll_ifindex = index;
    let len = size_of_val(&name) as libc::socklen_t;
    // SAFETY: `name` is a socket address of the length told.
    let result = unsafe { libc::bind(socket.as_raw_fd(), (&raw const name).cast(), len) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Asks about a device by a request of netdevice(7); the socket is in the device's namespace.
fn request(socket: &OwnedFd, device: &str, what: libc::c_ulong) -> io::Result<libc::ifreq> {
    // SAFETY: `ifreq` is plain data, for which all zeros is a value.
    let mut request = unsafe { std::mem::zeroed::<libc::ifreq>() };
    // The last byte stays zero.
    let room = request.ifr_name.len() - 1;
    for (to, from) in request.ifr_name[..room].iter_mut().zip(device.bytes()) {
        *to = from as libc::c_char;
    }
    // SAFETY: the requests used here read and write one `struct ifreq`, which `request` is, exclusively ours.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), what as _, &raw mut request) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(request) }
}

/// The device's flags (`IFF_…`).
pub(super) fn flags(socket: &OwnedFd, device: &str) -> io::Result<libc::c_int> {
    let answer = request(socket, device, libc::SIOCGIFFLAGS)?;
    // SAFETY: the answer to SIOCGIFFLAGS is in this member; every bit pattern is a value of it.
    Ok(libc::c_int::from(unsafe { answer.ifr_ifru.ifru_flags }))
}

fn describe(socket: &OwnedFd, device: &str) -> io::Result<(Mac, usize)> {
    let answer = request(socket, device, libc::SIOCGIFHWADDR)?;
    // SAFETY: the answer to SIOCGIFHWADDR is in this member; every bit pattern is a value of it.
    let address = unsafe { answer.ifr_ifru.ifru_hwaddr };
    if address.sa_family != libc::ARPHRD_ETHER {
        return Err(io::Error::other("it is no Ethernet device"));
    }
    let mac = Mac(std::array::from_fn(|i| address.sa_data[i] as u8));
    let answer = request(socket, device, libc::SIOCGIFMTU)?;
    // SAFETY: the answer to SIOCGIFMTU is in this member; every bit pattern is a value of it.
    let mtu = unsafe { answer.ifr_ifru.ifru_mtu };
    Ok((mac, usize::try_from(mtu).unwrap_or(0)))
}

/// `struct tpacket_auxdata` behind its control message's header.
#[repr(C)]
#[derive(Clone, Copy)]
struct Control {
    header: libc::cmsghdr,
    status: u32,
    len: u32,
    snaplen: u32,
    mac: u16,
    net: u16,
    vlan_tci: u16,
    vlan_tpid: u16,
}

/// What one look at the socket brought.
#[derive(Default)]
pub(super) struct Received {
    /// Packets in the burst.
    pub(super) packets: usize,
    /// Packets that the kernel dropped while handing them over.
    pub(super) unreadable: usize,
    /// No more were waiting.
    pub(super) emptied: bool,
}

/// One packet of a burst.
pub(super) struct Packet<'a> {
    pub(super) bytes: &'a [u8],
    pub(super) offload: Offload,
    pub(super) truncated: bool,
}

/// Buffers for one `recvmmsg`, and what it said of them.
pub(super) struct Burst {
    memory: Box<[u8]>,
    names: Box<[libc::sockaddr_ll]>,
    virtio: Box<[[u8; VIRTIO_NET_HDR_LEN]]>,
    controls: Box<[Control]>,
    slices: Box<[[libc::iovec; 2]]>,
    headers: Box<[libc::mmsghdr]>,
    /// Where each packet begins, once its tag is in place.
    starts: [usize; PACKETS],
}

// SAFETY: the pointers in `slices` and `headers` point into the boxes beside them and are written anew before each use,
// through `&mut self`.
unsafe impl Send for Burst {}

impl Burst {
    pub(super) fn new() -> Burst {
        // SAFETY: all are plain data of integers and pointers, for which all zeros is a value.
        let (name, control, slices, header) = unsafe {
            (
                std::mem::zeroed::<libc::sockaddr_ll>(),
                std::mem::zeroed::<Control>(),
                std::mem::zeroed::<[libc::iovec; 2]>(),
                std::mem::zeroed::<libc::mmsghdr>(),
            )
        };
        Burst {
            memory: vec![0; PACKETS * PLACE].into_boxed_slice(),
            names: vec![name; PACKETS].into_boxed_slice(),
            virtio: vec![[0; VIRTIO_NET_HDR_LEN]; PACKETS].into_boxed_slice(),
            controls: vec![control; PACKETS].into_boxed_slice(),
            slices: vec![slices; PACKETS].into_boxed_slice(),
            headers: vec![header; PACKETS].into_boxed_slice(),
            starts: [ROOM; PACKETS],
        }
    }

    /// Receives what is waiting, at most `limit` packets.
    pub(super) fn receive(&mut self, socket: &OwnedFd, limit: usize) -> Received {
        let count = limit.min(PACKETS) as libc::c_uint;
        for (index, place) in self.memory.chunks_exact_mut(PLACE).enumerate() {
            let frame = &mut place[ROOM..];
            self.slices[index] = [
                libc::iovec { iov_base: self.virtio[index].as_mut_ptr().cast(), iov_len: HEADER_LEN },
                libc::iovec { iov_base: frame.as_mut_ptr().cast(), iov_len: frame.len() },
            ];
            let header = &mut self.headers[index].msg_hdr;
            header.msg_name = (&raw mut self.names[index]).cast();
            header.msg_namelen = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
            header.msg_iov = self.slices[index].as_mut_ptr();
            header.msg_iovlen = 2;
            header.msg_control = (&raw mut self.controls[index]).cast();
            header.msg_controllen = size_of::<Control>();
            header.msg_flags = 0;
        }
        let mut received = Received::default();
        // Every error but "empty" takes a packet away, or is told once.
        for _ in 0..PACKETS {
            let (fd, headers) = (socket.as_raw_fd(), self.headers.as_mut_ptr());
            // SAFETY: each of the at most PACKETS headers points to a name, two slices of buffers, and a control message of `self`, all
            // writable for the lengths told.
            let got = unsafe { libc::recvmmsg(fd, headers, count, libc::MSG_DONTWAIT, std::ptr::null_mut()) };
            if got >= 0 {
                received.packets = got as usize;
                received.emptied = received.packets == 0;
                break;
            }
            match io::Error::last_os_error().raw_os_error() {
                Some(libc::EAGAIN) => {
                    received.emptied = true;
                    break;
                }
                Some(libc::EINVAL) => received.unreadable += 1,
                // Interrupted, or the device went down.
                _ => {}
            }
        }
        (0..received.packets).for_each(|index| self.restore_tag(index));
        received
    }

    /// Puts the VLAN tag back that the kernel took out of packet `index`, if it did.
    fn restore_tag(&mut self, index: usize) {
        self.starts[index] = ROOM;
        let control = &self.controls[index];
        let header = &self.headers[index];
        let told = header.msg_hdr.msg_controllen >= size_of::<libc::cmsghdr>() + 20
            && control.header.cmsg_level == libc::SOL_PACKET
            && control.header.cmsg_type == libc::PACKET_AUXDATA;
        let len = (header.msg_len as usize).saturating_sub(HEADER_LEN);
        if !told || control.status & VLAN_VALID == 0 || len < 12 {
            return;
        }
        let tpid = if control.status & TPID_VALID != 0 { control.vlan_tpid } else { ETHERTYPE_VLAN };
        let start = ROOM - VLAN_TAG_LEN;
        let place = &mut self.memory[index * PLACE..][..PLACE];
        place.copy_within(ROOM..ROOM + 12, start);
        place[start + 12..start + 14].copy_from_slice(&tpid.to_be_bytes());
        place[start + 14..start + 16].copy_from_slice(&control.vlan_tci.to_be_bytes());
        self.starts[index] = start;
    }

    /// Packet `index`; `None` when it is one of this host's own.
    pub(super) fn packet(&self, index: usize) -> Option<Packet<'_>> {
        if self.names[index].sll_pkttype == libc::PACKET_OUTGOING {
            return None;
        }
        let header = &self.headers[index];
        let start = self.starts[index];
        let len = (header.msg_len as usize).saturating_sub(HEADER_LEN).min(PLACE - ROOM);
        let mut offload = Offload::from_virtio(&self.virtio[index]);
        let tag = (ROOM - start) as u16;
        // The kernel counts from a frame without the tag.
        offload.csum_start = offload.csum_start.saturating_add(tag);
        offload.hdr_len = offload.hdr_len.saturating_add(tag);
        Some(Packet {
            bytes: &self.memory[index * PLACE + start..index * PLACE + ROOM + len],
            offload,
            truncated: header.msg_hdr.msg_flags & libc::MSG_TRUNC != 0,
        })
    }
}
