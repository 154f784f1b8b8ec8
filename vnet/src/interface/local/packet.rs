//! The packet socket of a local network (packet(7)): opens the socket, changes its memberships, and receives frames in bursts.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use crate::frame::FRAME_MAX;
use crate::helper::{self, Kind};
use crate::interface::device;
use crate::interface::netns::NetnsError;
use crate::interface::tun;
use crate::wire::ethernet::{ETHERTYPE_VLAN, Mac, VLAN_TAG_LEN};
use crate::wire::offload::{Offload, VIRTIO_NET_HDR_LEN};

/// Size of the virtio-net header on a packet socket in bytes, which has no `num_buffers`.
pub(super) const HEADER_LEN: usize = 10;
/// Maximum number of packets in a burst.
const PACKETS: usize = 32;
/// Bytes reserved in front of a frame for the restored VLAN tag and for alignment.
const HEADROOM: usize = 16;
/// Bytes per packet in the burst's memory.
const STRIDE: usize = (HEADROOM + FRAME_MAX).next_multiple_of(64);
/// Requested size of the socket buffer in each direction, in bytes.
const SOCKET_BUFFER: libc::c_int = 8 << 20;
/// `PACKET_IGNORE_OUTGOING` (linux/if_packet.h), since Linux 4.20.
const PACKET_IGNORE_OUTGOING: libc::c_int = 23;
/// `TP_STATUS_VLAN_VALID` and `TP_STATUS_VLAN_TPID_VALID`.
const VLAN_VALID: u32 = 1 << 4;
const TPID_VALID: u32 = 1 << 6;

/// Error when opening a local network.
#[derive(Debug, thiserror::Error)]
pub enum LocalError {
    /// The namespace does not exist, or vnetd may not enter it.
    #[error(transparent)]
    Netns(#[from] NetnsError),
    /// The device does not exist.
    #[error("there is no device '{0}'; the local network needs an existing one, see 'ip link'")]
    NoDevice(String),
    /// The kernel refused a step of opening the device.
    #[error("cannot {step} device '{device}': {error}{hint}")]
    Step {
        /// The step, as a verb for the message.
        step: &'static str,
        /// Name of the device.
        device: String,
        /// The kernel's error.
        error: io::Error,
        /// A hint for the user, or empty.
        hint: &'static str,
    },
    /// The kernel cannot forward frames of the device by itself; holds the reason.
    #[error("{0}")]
    NoKernelPath(String),
}

impl LocalError {
    /// The error of a step that the kernel refused.
    fn step(step: &'static str, device: &str, error: io::Error) -> LocalError {
        let hint = match error.raw_os_error() {
            Some(libc::EPERM) => "; run vnetd as root or give it CAP_NET_RAW",
            _ => "",
        };
        LocalError::Step { step, device: device.into(), error, hint }
    }

    /// The reason for the state "down" if the missing part may still appear; `None` if only another configuration helps.
    pub fn waits_for(&self) -> Option<String> {
        match self {
            LocalError::Netns(error) => error.waits_for(),
            LocalError::NoDevice(device) => Some(format!("waiting for device '{device}'")),
            // The device was deleted while it was being opened.
            LocalError::Step { device, error, .. } => {
                let gone = matches!(error.raw_os_error(), Some(libc::ENODEV | libc::ENXIO));
                gone.then(|| format!("waiting for device '{device}'"))
            }
            LocalError::NoKernelPath(_) => None,
        }
    }
}

/// A bound packet socket, and properties of its device.
pub(super) struct PacketSocket {
    pub(super) socket: OwnedFd,
    /// Interface index of the device.
    pub(super) index: libc::c_int,
    pub(super) mac: Mac,
    pub(super) mtu: usize,
}

/// Opens the device in the thread's target namespace. The socket receives its frames if it `listens`.
pub(super) fn open(device_name: &str, promiscuous: bool, listens: bool) -> Result<PacketSocket, LocalError> {
    let device: String = device_name.chars().take(64).collect();
    let no_device = || LocalError::NoDevice(device.clone());
    let index = tun::device_index(device_name).ok_or_else(no_device)? as libc::c_int;
    let fail = |(step, error)| LocalError::step(step, &device, error);
    let socket = make().map_err(fail)?;
    let kind = if promiscuous { libc::PACKET_MR_PROMISC } else { libc::PACKET_MR_ALLMULTI };
    set_membership(&socket, index, kind, Mac::default(), true).map_err(|e| fail(("listen on", e)))?;
    let mac = device::mac(&socket, device_name).map_err(|e| fail(("look at", e)))?;
    let mtu = device::see(&socket, device_name).map_err(|e| fail(("look at", e)))?.mtu;
    bind(&socket, index, if listens { libc::ETH_P_ALL } else { 0 }).map_err(|e| fail(("bind to", e)))?;
    Ok(PacketSocket { socket, index, mac, mtu })
}

/// The device of a running vnetd, which hands over its `socket`; in the network namespace of the calling thread.
pub(super) fn inherit(device: &str, socket: OwnedFd) -> Result<PacketSocket, LocalError> {
    let fail = |error| LocalError::step("look at", device, error);
    let sight = device::see(&socket, device).map_err(fail)?;
    let mac = device::mac(&socket, device).map_err(fail)?;
    Ok(PacketSocket { socket, index: sight.index, mac, mtu: sight.mtu })
}

/// A socket that receives all frames that reach a device.
pub(super) fn listen(device: &str, index: libc::c_int) -> Result<OwnedFd, LocalError> {
    let fail = |(step, error)| LocalError::step(step, device, error);
    let socket = make().map_err(fail)?;
    bind(&socket, index, libc::ETH_P_ALL).map_err(|error| fail(("bind to", error)))?;
    Ok(socket)
}

/// Makes a socket that is not bound yet; the error names the step.
fn make() -> Result<OwnedFd, (&'static str, io::Error)> {
    let socket = helper::socket(Kind::PACKETS).map_err(|error| ("open", error))?;
    rustix::io::ioctl_fionbio(&socket, true).map_err(|error| ("set up", error.into()))?;
    for option in [libc::PACKET_VNET_HDR, libc::PACKET_AUXDATA, PACKET_IGNORE_OUTGOING] {
        set(&socket, libc::SOL_PACKET, option, 1).map_err(|error| ("set up", error))?;
    }
    for (force, unprivileged) in
        [(libc::SO_RCVBUFFORCE, libc::SO_RCVBUF), (libc::SO_SNDBUFFORCE, libc::SO_SNDBUF)]
    {
        set(&socket, libc::SOL_SOCKET, force, SOCKET_BUFFER)
            .or_else(|_| set(&socket, libc::SOL_SOCKET, unprivileged, SOCKET_BUFFER))
            .map_err(|error| ("set up", error))?;
    }
    Ok(socket)
}

fn set(socket: &OwnedFd, level: libc::c_int, option: libc::c_int, value: libc::c_int) -> io::Result<()> {
    let len = size_of_val(&value) as libc::socklen_t;
    // SAFETY: `value` is readable for `len` bytes.
    let result =
        unsafe { libc::setsockopt(socket.as_raw_fd(), level, option, (&raw const value).cast(), len) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Adds or drops a membership of `kind` (`PACKET_MR_…`): frames for `mac`, or all frames of that kind.
pub(super) fn set_membership(
    socket: &OwnedFd,
    index: libc::c_int,
    kind: libc::c_int,
    mac: Mac,
    on: bool,
) -> io::Result<()> {
    let [a, b, c, d, e, f] = mac.0;
    let request = libc::packet_mreq {
        mr_ifindex: index,
        mr_type: kind as libc::c_ushort,
        mr_alen: 6,
        mr_address: [a, b, c, d, e, f, 0, 0],
    };
    let option = if on { libc::PACKET_ADD_MEMBERSHIP } else { libc::PACKET_DROP_MEMBERSHIP };
    let len = size_of_val(&request) as libc::socklen_t;
    // SAFETY: `request` is readable for `len` bytes.
    let result = unsafe {
        libc::setsockopt(socket.as_raw_fd(), libc::SOL_PACKET, option, (&raw const request).cast(), len)
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Binds a socket to a device, from which it receives frames of `protocol`; 0: none.
fn bind(socket: &OwnedFd, index: libc::c_int, protocol: libc::c_int) -> io::Result<()> {
    // SAFETY: `sockaddr_ll` is plain data, for which all zeros is a valid value.
    let mut name = unsafe { std::mem::zeroed::<libc::sockaddr_ll>() };
    name.sll_family = libc::AF_PACKET as libc::c_ushort;
    name.sll_protocol = (protocol as u16).to_be();
    name.sll_ifindex = index;
    let len = size_of_val(&name) as libc::socklen_t;
    // SAFETY: `name` is a socket address of length `len`.
    let result = unsafe { libc::bind(socket.as_raw_fd(), (&raw const name).cast(), len) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// A control message with `struct tpacket_auxdata`.
#[repr(C)]
#[derive(Clone, Copy)]
struct AuxData {
    header: libc::cmsghdr,
    status: u32,
    len: u32,
    snaplen: u32,
    mac: u16,
    net: u16,
    vlan_tci: u16,
    vlan_tpid: u16,
}

/// Result of one receive call.
#[derive(Default)]
pub(super) struct Received {
    /// Packets received into the burst.
    pub(super) packets: usize,
    /// Packets that the kernel dropped because virtio-net metadata cannot describe them.
    pub(super) unreadable: usize,
    /// True if the socket was empty at the end.
    pub(super) emptied: bool,
}

/// One packet of a burst.
pub(super) struct Packet<'a> {
    pub(super) bytes: &'a [u8],
    pub(super) offload: Offload,
    pub(super) truncated: bool,
}

/// Buffers for one `recvmmsg`, and the packets received.
pub(super) struct PacketBurst {
    memory: Box<[u8]>,
    names: Box<[libc::sockaddr_ll]>,
    virtio: Box<[[u8; VIRTIO_NET_HDR_LEN]]>,
    controls: Box<[AuxData]>,
    slices: Box<[[libc::iovec; 2]]>,
    headers: Box<[libc::mmsghdr]>,
    /// Offset of each packet in its part of `memory`: less than the headroom if the packet's VLAN tag was restored.
    starts: [usize; PACKETS],
}

// SAFETY: the pointers in `slices` and `headers` point into boxes of the same value and are rewritten before each use, through
// `&mut self`.
unsafe impl Send for PacketBurst {}

impl PacketBurst {
    pub(super) fn new() -> PacketBurst {
        // SAFETY: plain data of integers and pointers, for which all zeros is a valid value.
        let (name, control, slices, header) = unsafe {
            (
                std::mem::zeroed::<libc::sockaddr_ll>(),
                std::mem::zeroed::<AuxData>(),
                std::mem::zeroed::<[libc::iovec; 2]>(),
                std::mem::zeroed::<libc::mmsghdr>(),
            )
        };
        PacketBurst {
            memory: vec![0; PACKETS * STRIDE].into_boxed_slice(),
            names: vec![name; PACKETS].into_boxed_slice(),
            virtio: vec![[0; VIRTIO_NET_HDR_LEN]; PACKETS].into_boxed_slice(),
            controls: vec![control; PACKETS].into_boxed_slice(),
            slices: vec![slices; PACKETS].into_boxed_slice(),
            headers: vec![header; PACKETS].into_boxed_slice(),
            starts: [HEADROOM; PACKETS],
        }
    }

    /// Receives at most `limit` waiting packets.
    pub(super) fn receive(&mut self, socket: &OwnedFd, limit: usize) -> Received {
        let count = limit.min(PACKETS) as libc::c_uint;
        for (index, part) in self.memory.chunks_exact_mut(STRIDE).enumerate() {
            let frame = &mut part[HEADROOM..];
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
            header.msg_controllen = size_of::<AuxData>();
            header.msg_flags = 0;
        }
        let mut received = Received::default();
        // Every error except EAGAIN consumes a packet or is reported once, so the attempts are bounded.
        for _ in 0..PACKETS {
            let (fd, headers) = (socket.as_raw_fd(), self.headers.as_mut_ptr());
            // SAFETY: each of the at most PACKETS headers points to a name, two buffers and a control message of `self`, all
            // writable for the given lengths.
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
                // Interrupted (EINTR), or the device went down (ENETDOWN).
                _ => {}
            }
        }
        (0..received.packets).for_each(|index| self.restore_tag(index));
        received
    }

    /// Restores the VLAN tag that the kernel stripped from packet `index`, if any.
    fn restore_tag(&mut self, index: usize) {
        self.starts[index] = HEADROOM;
        let control = &self.controls[index];
        let header = &self.headers[index];
        let has_auxdata = header.msg_hdr.msg_controllen >= size_of::<libc::cmsghdr>() + 20
            && control.header.cmsg_level == libc::SOL_PACKET
            && control.header.cmsg_type == libc::PACKET_AUXDATA;
        let len = (header.msg_len as usize).saturating_sub(HEADER_LEN);
        if !has_auxdata || control.status & VLAN_VALID == 0 || len < 12 {
            return;
        }
        let tpid = if control.status & TPID_VALID != 0 { control.vlan_tpid } else { ETHERTYPE_VLAN };
        let start = HEADROOM - VLAN_TAG_LEN;
        let part = &mut self.memory[index * STRIDE..][..STRIDE];
        part.copy_within(HEADROOM..HEADROOM + 12, start);
        part[start + 12..start + 14].copy_from_slice(&tpid.to_be_bytes());
        part[start + 14..start + 16].copy_from_slice(&control.vlan_tci.to_be_bytes());
        self.starts[index] = start;
    }

    /// Packet `index`; `None` if this host sent it.
    pub(super) fn packet(&self, index: usize) -> Option<Packet<'_>> {
        if self.names[index].sll_pkttype == libc::PACKET_OUTGOING {
            return None;
        }
        let header = &self.headers[index];
        let start = self.starts[index];
        let len = (header.msg_len as usize).saturating_sub(HEADER_LEN).min(STRIDE - HEADROOM);
        let mut offload = Offload::from_virtio(&self.virtio[index]);
        let tag = (HEADROOM - start) as u16;
        // The kernel's offsets refer to the frame without the tag.
        offload.csum_start = offload.csum_start.saturating_add(tag);
        offload.hdr_len = offload.hdr_len.saturating_add(tag);
        Some(Packet {
            bytes: &self.memory[index * STRIDE + start..index * STRIDE + HEADROOM + len],
            offload,
            truncated: header.msg_hdr.msg_flags & libc::MSG_TRUNC != 0,
        })
    }
}
