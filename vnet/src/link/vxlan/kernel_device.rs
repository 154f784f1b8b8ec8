//! TCP streams on a VXLAN link, sent unsegmented through the kernel's own VXLAN driver.
//!
//! A VTEP expects one datagram per segment, and vnet can segment super-frames itself (finish_frames.rs). But then the network
//! device has nothing left to segment, and a receiving kernel processes each segment in its whole receive path. The kernel's
//! VXLAN driver keeps a super-frame whole until the device, which segments it in hardware if it can, or passes it unsegmented to
//! a veth's other end.
//!
//! So a link has a VXLAN device for each of its networks and VTEPs, with one forwarding entry that sends all frames to the VTEP's
//! port. A packet socket writes frames to it with virtio-net metadata, as on a local network (interface/local/mod.rs). The device
//! lives in a network namespace that only that socket keeps alive, while its datagrams leave from vnetd's namespace
//! (`IFLA_NET_NS_FD`): the device is invisible, takes no name in vnetd's namespace, and disappears with vnetd, however vnetd
//! ends.
//!
//! The device only sends. The namespace has no IPv6, so the device sends and answers nothing by itself; it does not learn
//! (`nolearning`), and the packet socket receives no protocol. The bridge's own socket receives VXLAN, from configured peers
//! only. vnetd's sockets bind the source ports: the kernel accepts an ICMP error about a datagram only if a socket owns its
//! source port, and without that a shrinking path MTU would go unnoticed.
//!
//! TCP flows use the device while they have frames to segment ([`Streams`]); everything else is cheaper gathered in one message.
//! Switching changes the flow's source port, so on a network with several paths one frame may overtake another, once. ECN-capable
//! flows (ECT, RFC 3168) never use it: the driver copies the codepoint to the outer header (RFC 6040), and a congested router
//! would then set a mark that vnet at the other end does not copy to the inner header.
//!
//! All of this needs CAP_NET_ADMIN, CAP_NET_RAW and CAP_SYS_ADMIN. Without them, and for networks and VTEPs beyond the limits,
//! vnet segments frames itself.

use std::fs::File;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

use netlink_packet_core::{NLM_F_APPEND, NLM_F_CREATE, NLM_F_EXCL};
use netlink_packet_route::link::{
    InfoData, InfoKind, InfoVxlan, LinkAttribute, LinkFlags, LinkInfo, LinkMessage, VxlanDf,
};
use netlink_packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourFlags, NeighbourMessage, NeighbourState,
};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use parking_lot::Mutex;

use super::finish_frames::{TCP_CHECKSUM, must_be_cut};
use crate::frame::{Batch, Frame, NetworkId, SEGMENTS_MAX};
use crate::helper::{self, Kind};
use crate::link::sending::Sending;
use crate::link::socket::buffers;
use crate::link::socket::udp::{Socket, check, set};
use crate::netlink::Netlink;
use crate::stats::DropReason;
use crate::wire::ip;
use crate::wire::offload::{F_NEEDS_CSUM, Offload};
use crate::wire::segment::Cut;

/// Maximum number of devices of one link, and of all links together. Each is a namespace (some hundred kilobytes) and a kernel
/// socket.
const DRIVERS_MAX: usize = 16;
const DRIVERS_ALL: usize = 128;
/// Current number of devices.
static DRIVERS: AtomicUsize = AtomicUsize::new(0);
/// Number of source ports of a link's devices, consecutive; a power of two for the kernel's own path.
const PORTS: u16 = 16;
const _: () = assert!(PORTS.is_power_of_two());
/// Length in bytes of the virtio-net header on a packet socket, which has no `num_buffers`.
const VIRTIO_HEADER_LEN: usize = 10;
/// MTU of the device in bytes. The path's limit is checked before.
const MTU: u32 = 65_000;
/// The name the kernel gives the first VXLAN device in a namespace.
const NAME: &str = "vxlan0";
/// Maximum number of attempts to get a free port, or several consecutive ones.
const TRIES: u32 = 32;
/// Number of entries in the flow table. Colliding flows count as streams together.
const FLOWS: usize = 1024;
/// A flow keeps using the device for this long after its last frame to segment, in ms.
const STREAM_MS: u64 = 1_000;

/// The devices of one link.
#[derive(Debug, Default)]
pub(in crate::link) struct Drivers {
    slots: [OnceLock<Driver>; DRIVERS_MAX],
    /// Held while devices are created: the sockets that own the devices' source ports.
    ports: Mutex<Vec<Socket>>,
    /// The first of these ports.
    first: OnceLock<u16>,
    /// True once the lack of devices has been logged.
    told: AtomicBool,
}

/// One device: sends all frames to one VTEP, in one network.
#[derive(Debug)]
pub(in crate::link) struct Driver {
    network: NetworkId,
    vtep: u16,
    socket: OwnedFd,
}

impl Drop for Driver {
    fn drop(&mut self) {
        DRIVERS.fetch_sub(1, Relaxed);
    }
}

/// Outcome of sending a frame through a device.
pub(in crate::link) enum Sent {
    /// The frame is sent, or counted as dropped.
    Done,
    /// The kernel refused the frame, or the device no longer exists.
    NotTaken,
}

impl Drivers {
    /// Creates the missing devices for `wanted` networks and VTEPs.
    pub(in crate::link) fn open(
        &self,
        link: &str,
        local: IpAddr,
        wanted: impl Iterator<Item = (NetworkId, u16, SocketAddr)>,
    ) {
        let mut ports = self.ports.lock();
        if let Ok(first) = block(&mut ports, local) {
            // The same at every call.
            let _ = self.first.set(first);
        }
        for (network, vtep, remote) in wanted {
            if self.find(network, vtep).is_some() {
                continue;
            }
            let Some(free) = self.slots.iter().find(|slot| slot.get().is_none()) else { return };
            if DRIVERS.fetch_add(1, Relaxed) >= DRIVERS_ALL {
                DRIVERS.fetch_sub(1, Relaxed);
                return;
            }
            match block(&mut ports, local).and_then(|first| open(network, remote, local, first)) {
                // No other thread can fill it, because `ports` is held.
                Ok(socket) => drop(free.set(Driver { network, vtep, socket })),
                Err(error) => {
                    DRIVERS.fetch_sub(1, Relaxed);
                    if !self.told.swap(true, Relaxed) {
                        tracing::info!(link, %error, "no kernel VXLAN device for TCP streams: vnetd segments them itself");
                    }
                    return;
                }
            }
        }
    }

    /// The source ports that the link's sockets own: the first, and their number. `None` before [`Drivers::open`].
    pub(in crate::link) fn source_ports(&self) -> Option<(u16, u16)> {
        self.first.get().map(|first| (*first, PORTS))
    }

    /// The index of the device for `network` to VTEP `vtep`.
    #[inline]
    pub(in crate::link) fn find(&self, network: NetworkId, vtep: u16) -> Option<u8> {
        // The first free slot ends the list.
        let there = self.slots.iter().map_while(OnceLock::get);
        (0..).zip(there).find(|(_, it)| it.network == network && it.vtep == vtep).map(|(number, _)| number)
    }

    #[inline]
    pub(in crate::link) fn get(&self, number: u8) -> Option<&Driver> {
        self.slots.get(usize::from(number))?.get()
    }
}

impl Driver {
    /// Sends frame `index` on a path that carries frames of `room` bytes; the kernel segments larger ones where possible.
    pub(super) fn send(&self, out: &mut Sending<'_>, index: u16, room: usize) -> Sent {
        let (batch, frame) = (out.batch, out.frame(index));
        let (offload, segments, largest) = if must_be_cut(frame, room) {
            match Cut::new(batch.head(frame), frame.len(), &frame.offload, room) {
                Ok(cut) => (cut.offload(), cut.count() as u64, cut.segment_len(0)),
                Err(_) => {
                    out.dropped(DropReason::Unsegmentable, index);
                    return Sent::Done;
                }
            }
        } else {
            (frame.offload, 1, frame.len())
        };
        if largest > room {
            out.dropped(DropReason::MtuExceeded, index);
            return Sent::Done;
        }
        match self.write(&offload, batch, frame) {
            Ok(()) => {
                out.link.stats.delivered(1, frame.len() as u64);
                out.link.stats.out_datagrams.add(segments);
            }
            Err(error) => match error.raw_os_error() {
                Some(libc::EAGAIN | libc::ENOBUFS | libc::ENOMEM) => {
                    out.dropped(DropReason::NoBuffer, index);
                }
                _ => return Sent::NotTaken,
            },
        }
        Sent::Done
    }

    fn write(&self, offload: &Offload, batch: &Batch, frame: &Frame) -> io::Result<()> {
        let header = offload.to_virtio(0);
        let empty = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        let mut vectors = [empty; 1 + SEGMENTS_MAX];
        vectors[0] = libc::iovec { iov_base: header.as_ptr().cast_mut().cast(), iov_len: VIRTIO_HEADER_LEN };
        let segments = batch.segments(frame);
        for (vector, segment) in vectors[1..].iter_mut().zip(segments) {
            *vector = libc::iovec { iov_base: segment.as_ptr().cast_mut().cast(), iov_len: segment.len() };
        }
        loop {
            let count = (1 + segments.len()) as libc::c_int;
            // SAFETY: a frame has at most SEGMENTS_MAX segments, so `count` vectors are filled: the first with the header, a
            // local variable, the others with slices that are readable until the batch is cleared.
            match check(unsafe { libc::writev(self.socket.as_raw_fd(), vectors.as_ptr(), count) }) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                result => return result.map(drop),
            }
        }
    }
}

/// A dispatcher's table of flows that are streams.
pub(in crate::link) struct Streams {
    /// Expiry in ms, by hash of link and flow.
    until: Box<[u64; FLOWS]>,
}

impl Streams {
    pub(in crate::link) fn new() -> Streams {
        Streams { until: Box::new([0; FLOWS]) }
    }

    /// True when the frame leaves through the kernel device: a TCP frame to segment, or a frame of a flow that recently had one.
    /// `flow` is a hash of link and flow.
    #[inline]
    pub(super) fn go_by_driver(
        &mut self,
        flow: usize,
        batch: &Batch,
        frame: &Frame,
        room: usize,
        now_ms: u64,
    ) -> bool {
        let offload = &frame.offload;
        if offload.flags & F_NEEDS_CSUM == 0 || offload.csum_offset != TCP_CHECKSUM {
            return false;
        }
        let until = &mut self.until[flow % FLOWS];
        if must_be_cut(frame, room) {
            if hears_of_congestion(batch.head(frame)) {
                return false;
            }
            *until = now_ms + STREAM_MS;
        }
        *until > now_ms
    }
}

/// True if a frame's IP header carries ECT(0), ECT(1) or CE (RFC 3168 section 5).
fn hears_of_congestion(head: &[u8]) -> bool {
    ip::in_frame(head).is_some_and(|(_, ip)| ip.ecn != 0)
}

/// Extends `ports` to [`PORTS`] sockets on consecutive ports, starting at the port of the first one.
fn block(ports: &mut Vec<Socket>, local: IpAddr) -> io::Result<u16> {
    if let Some(first) = ports.first() {
        return Ok(first.local().port());
    }
    for _ in 0..TRIES {
        let first = Socket::sending(SocketAddr::new(local, 0))?;
        let from = first.local().port();
        // The port after the last one must also exist, because the device's range is half-open.
        let Some(end) = from.checked_add(PORTS) else { continue };
        let rest = (from + 1..end).map(|port| Socket::sending(SocketAddr::new(local, port)));
        // A port of the range is in use: try another range.
        if let Ok(rest) = rest.collect::<io::Result<Vec<_>>>() {
            ports.push(first);
            ports.extend(rest);
            return Ok(from);
        }
    }
    Err(io::ErrorKind::AddrInUse.into())
}

/// Creates a device in its own namespace, which sends from the ports starting at `first`, and the socket that writes to it.
fn open(network: NetworkId, remote: SocketAddr, local: IpAddr, first: u16) -> io::Result<OwnedFd> {
    let here = Netlink::new()?;
    let namespace = helper::new_namespace()?;
    let target = namespace.try_clone()?;
    helper::within(target, || make((&here, &namespace), network, remote, local, first))?
}

/// Like [`open`], with the new namespace `there` as the thread's target; the device sends its datagrams in vnetd's namespace, by the socket `here`.
fn make(
    (here, there): (&Netlink, &File),
    network: NetworkId,
    remote: SocketAddr,
    local: IpAddr,
    first: u16,
) -> io::Result<OwnedFd> {
    let mut request = LinkMessage::default();
    request.header.flags = LinkFlags::Up;
    request.header.change_mask = LinkFlags::Up;
    // Without a name, because older kernels would check it against those of the wrong namespace.
    request.attributes = vec![LinkAttribute::Mtu(MTU), LinkAttribute::NetNsFd(there.as_raw_fd())];
    for _ in 0..TRIES {
        // A listening port is mandatory. The kernel picks a port that is currently free.
        let port = Socket::sending(SocketAddr::new(local, 0))?.local().port();
        let info = vec![
            InfoVxlan::Id(network.get()),
            InfoVxlan::Learning(false),
            InfoVxlan::Port(port),
            // The range is half-open.
            InfoVxlan::PortRange((first, first + PORTS)),
            // VTEPs do not fragment (RFC 7348 section 4.3).
            InfoVxlan::Df(VxlanDf::Set),
            source(local, remote)?,
        ];
        let mut request = request.clone();
        let info = vec![LinkInfo::Kind(InfoKind::Vxlan), LinkInfo::Data(InfoData::Vxlan(info))];
        request.attributes.push(LinkAttribute::LinkInfo(info));
        match here.change(RouteNetlinkMessage::NewLink(request), NLM_F_CREATE | NLM_F_EXCL) {
            Err(error) if matches!(error.raw_os_error(), Some(libc::EADDRINUSE | libc::EEXIST)) => continue,
            result => result?,
        }
        let index = helper::device_index(NAME)?;
        lead(index, remote)?;
        return socket(index);
    }
    Err(io::ErrorKind::AddrInUse.into())
}

/// The attribute with the datagrams' source address, which also sets their family; unspecified for any address.
fn source(local: IpAddr, remote: SocketAddr) -> io::Result<InfoVxlan> {
    match (local.to_canonical(), remote.ip()) {
        (IpAddr::V4(ip), IpAddr::V4(_)) => Ok(InfoVxlan::Local(ip)),
        (IpAddr::V6(ip), IpAddr::V6(_)) => Ok(InfoVxlan::Local6(ip)),
        (IpAddr::V6(ip), IpAddr::V4(_)) if ip.is_unspecified() => Ok(InfoVxlan::Local(Ipv4Addr::UNSPECIFIED)),
        _ => Err(io::Error::other("the VTEP's address is of another family than the own one")),
    }
}

/// Makes device `index` send all frames to `remote`.
fn lead(index: u32, remote: SocketAddr) -> io::Result<()> {
    let mut entry = NeighbourMessage::default();
    entry.header.family = AddressFamily::Bridge;
    entry.header.ifindex = index;
    entry.header.state = NeighbourState::Permanent;
    entry.header.flags = NeighbourFlags::Own;
    entry.attributes = vec![
        // The default entry, and the only one.
        NeighbourAttribute::LinkLayerAddress(vec![0; 6]),
        NeighbourAttribute::Destination(match remote.ip() {
            IpAddr::V4(ip) => NeighbourAddress::Inet(ip),
            IpAddr::V6(ip) => NeighbourAddress::Inet6(ip),
        }),
        NeighbourAttribute::Port(remote.port()),
    ];
    Netlink::new()?.change(RouteNetlinkMessage::NewNeighbour(entry), NLM_F_CREATE | NLM_F_APPEND)
}

/// A packet socket that writes to device `index` and receives nothing.
fn socket(index: u32) -> io::Result<OwnedFd> {
    let socket = helper::socket(Kind::PACKETS)?;
    rustix::io::ioctl_fionbio(&socket, true)?;
    set(&socket, libc::SOL_PACKET, libc::PACKET_VNET_HDR, 1)?;
    let bytes = buffers::buffer_bytes(buffers::ASSUMED_MBPS) as libc::c_int;
    set(&socket, libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, bytes)
        .or_else(|_| set(&socket, libc::SOL_SOCKET, libc::SO_SNDBUF, bytes))?;
    // SAFETY: `sockaddr_ll` is plain data, for which all zeros is a valid value.
    let mut name = unsafe { std::mem::zeroed::<libc::sockaddr_ll>() };
    // Protocol 0: receives nothing.
    name.sll_family = libc::AF_PACKET as libc::c_ushort;
    name.sll_ifindex = index as libc::c_int;
    let len = size_of_val(&name) as libc::socklen_t;
    // SAFETY: `name` is a socket address of the stated length.
    check(unsafe { libc::bind(socket.as_raw_fd(), (&raw const name).cast(), len) })?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ecn_marks_are_seen_in_both_families_and_behind_tags() {
        let frame = |tag: &[u8], ethertype: [u8; 2], first: [u8; 2]| {
            [&[2; 12], tag, &ethertype, &first, &[0; 40]].concat()
        };
        for tag in [&[][..], &[0x81, 0, 0, 7]] {
            for mark in 0..4 {
                let ipv4 = frame(tag, [8, 0], [0x45, 0xb8 | mark]);
                let ipv6 = frame(tag, [0x86, 0xdd], [0x6b, 0x8f | mark << 4]);
                assert_eq!(hears_of_congestion(&ipv4), mark != 0);
                assert_eq!(hears_of_congestion(&ipv6), mark != 0);
            }
            assert!(!hears_of_congestion(&frame(tag, [8, 6], [0xff, 0xff])));
        }
        assert!(!hears_of_congestion(&[0xff; 15]));
    }

    #[test]
    fn ports_are_consecutive_and_stay() {
        let mut ports = vec![];
        let first = block(&mut ports, Ipv4Addr::LOCALHOST.into()).unwrap();
        let found: Vec<_> = ports.iter().map(|socket| socket.local().port()).collect();
        assert_eq!(found, (first..first + PORTS).collect::<Vec<_>>());
        assert_eq!(block(&mut ports, Ipv4Addr::LOCALHOST.into()).unwrap(), first);
        assert_eq!(ports.len(), usize::from(PORTS));
    }

    #[test]
    fn the_source_address_matches_the_vteps_family_or_is_refused() {
        let vtep = |text: &str| SocketAddr::new(text.parse().unwrap(), 4789);
        let own = |text: &str| text.parse::<IpAddr>().unwrap();
        assert_eq!(source(own("::"), vtep("10.0.0.2")).unwrap(), InfoVxlan::Local(Ipv4Addr::UNSPECIFIED));
        assert_eq!(
            source(own("::ffff:10.0.0.1"), vtep("10.0.0.2")).unwrap(),
            InfoVxlan::Local([10, 0, 0, 1].into())
        );
        assert_eq!(source(own("::"), vtep("fd00::2")).unwrap(), InfoVxlan::Local6([0; 16].into()));
        assert!(source(own("10.0.0.1"), vtep("fd00::2")).is_err());
        assert!(source(own("fd00::1"), vtep("10.0.0.2")).is_err());
    }
}
