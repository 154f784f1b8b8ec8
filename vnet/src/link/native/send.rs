//! The sending half of the bridge: frames become datagrams.
//!
//! On a `native` link, in the frames' order:
//! - small frames that follow each other, of one network and number of hops, all finished or all with offload metadata, are
//!   *bundled* into one datagram as long as they fit; nothing waits for a bundle to fill;
//! - any other frame becomes one datagram, or as many fragments as it needs, of headers and slices of its own memory.
//!
//! Large frames of guests' memory may go without being copied, each by itself, see zero_copy.rs.
//!
//! On a sealed link the same datagrams are put together by copying, and encrypted in place before they are handed over.
//! Frames for which there is no key are dropped.
//!
//! On `vnet` and `vxlan` links each datagram holds one finished frame, see bare.rs.
//!
//! Between hosts with several ports frames are first parted by *path*, a socket of ours and a port of theirs, which the hash
//! of their flow chooses: a flow stays in order, and so do the datagrams of a frame.
//!
//! All datagrams of a call are handed to the kernel at once, see gather.rs. When a native datagram turns out to be larger than
//! the path MTU, the kernel is asked for the new one and the frames not sent yet are encoded again, once; a frame that had
//! gone out in part then goes again under a new name, and the other host counts the first try as incomplete.

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use crate::frame::{BATCH_MAX, Batch, FRAME_MAX, Frame, SEGMENTS_MAX, Segment};
use crate::link::native::reassembly::FRAGMENTS_MAX;
use crate::link::native::zero_copy::{CutThrough, Outcome, ZeroCopy};
use crate::link::path::PATH_MTU_FALLBACK;
use crate::link::sealed::aead::{SealingKey, TAG_LEN};
use crate::link::sealed::session::Seal;
use crate::link::socket::buffers;
use crate::link::socket::gather::{Gather, TooBig};
use crate::link::socket::udp::{Name, RouteProbe, Socket};
use crate::link::vxlan::SourcePorts;
use crate::link::vxlan::kernel_device::Streams;
use crate::link::{DIRECT_MAX, Encapsulation, Link, PORTS_MAX, Peers, Tunnel};
use crate::stats::DropReason;
use crate::wire::flow;
use crate::wire::native::{ENTRY_LEN, HEADER_LEN, HOPS_MAX, Header, Kind};
use crate::wire::offload::WIRE_LEN;

/// Largest frame that goes into a bundle. Bundles are copied; beyond this a datagram of its own costs no more.
const BUNDLE_FRAME_MAX: usize = 1024;
/// Largest bundle in bytes, where the path would allow more.
const BUNDLE_MAX: usize = 16 << 10;
/// How often the kernel is asked for each link's path MTU, in ms.
const REFRESH_MS: u64 = 1000;
/// Links looked at in one tick, so that no tick holds up the frames of a host with thousands of links...
const TICK_LINKS: usize = 32;
/// ...and in how many ms. Ticks that come more rarely look at as many more, up to [`TICKS_MAX`] times: all of 4 096 links have
/// their turn within 4 s, on a quiet host as on a busy one.
const TICK_MS: u64 = 20;
const TICKS_MAX: u64 = 32;

/// A socket to send by, and what it was last told about fragmentation by IP.
pub(in crate::link) struct Exit {
    pub(in crate::link) socket: Arc<Socket>,
    dont_fragment: Option<bool>,
}

/// How a frame leaves: by which of the exits, where to, and sealed with which key.
#[derive(Clone, Copy)]
struct Path<'a> {
    exit: usize,
    name: &'a Name,
    key: Option<&'a SealingKey>,
}

/// Sends frames on links. One per dispatcher; shares its sockets with a [`super::Receiver`].
pub struct Sender {
    /// The first one is bound to the host's first port.
    pub(in crate::link) exits: Vec<Exit>,
    /// Native frames leave by this exit and those behind it.
    native_from: usize,
    /// Frames of a call, by path.
    by_path: Vec<Vec<u16>>,
    /// The same, by guest of the other host that has a port of its own; those for others come first.
    by_guest: Vec<Vec<u16>>,
    pub(in crate::link) gather: Gather,
    cut: CutThrough,
    pub(in crate::link) routes: RouteProbe,
    /// What VXLAN is sent from, where it is listened for.
    pub(in crate::link) vxlan: Option<SourcePorts>,
    /// Which flows on VXLAN links have frames to be cut.
    pub(in crate::link) streams: Streams,
    /// Frames of a call on a VXLAN link: the VTEP's number, the source port, the index in the batch.
    pub(in crate::link) ways: Vec<(u16, u8, u16)>,
    /// Speed in Mbit/s that the sockets' buffers are sized for; 0 before any path's is known.
    mbps: u32,
    /// Where the next tick goes on in the list of links, and when the last one was.
    next_link: usize,
    pub(in crate::link) ticked_ms: u64,
}

impl Sender {
    /// A sender by `sockets`, of which the first is bound to the host's first port, and native frames leave by those from
    /// `native_from` on.
    pub(in crate::link) fn new(sockets: Vec<Arc<Socket>>, native_from: usize) -> Sender {
        let routes = RouteProbe::new(sockets[0].local());
        let exits: Vec<_> = sockets.into_iter().map(|socket| Exit { socket, dont_fragment: None }).collect();
        let paths = exits.len().max(usize::from(PORTS_MAX));
        let cut = CutThrough::new(exits.len());
        Sender {
            exits,
            native_from,
            // All that a batch can need: nothing is allocated on a frame's way.
            by_path: (0..paths).map(|_| Vec::with_capacity(BATCH_MAX)).collect(),
            gather: Gather::new(),
            cut,
            routes,
            vxlan: None,
            streams: Streams::new(),
            ways: Vec::with_capacity(BATCH_MAX),
            by_guest: (0..=DIRECT_MAX).map(|_| Vec::with_capacity(BATCH_MAX)).collect(),
            mbps: 0,
            next_link: 0,
            ticked_ms: 0,
        }
    }

    /// Whether guests' memory is sent without copying it, from now on.
    pub fn set_zero_copy(&mut self, setting: ZeroCopy) {
        self.cut.configure(setting, self.exits.iter().map(|exit| &exit.socket));
    }

    /// Hears which frames' memory the kernel has done with, and lets it go. True when there was any.
    #[inline]
    pub fn reap(&mut self) -> bool {
        self.cut.reap(self.exits.iter().map(|exit| &exit.socket))
    }

    pub(in crate::link) fn socket(&self) -> &Arc<Socket> {
        &self.exits[0].socket
    }

    pub(in crate::link) fn local_addr(&self) -> SocketAddr {
        self.exits[0].socket.local()
    }

    /// Encapsulates the frames `which` (indices into `batch`, in order) and sends them on `link`, counting each as out or
    /// dropped.
    pub fn send(&mut self, link: &Link, batch: &Batch, which: &[u16]) {
        if link.path_mtu.load(Relaxed) == 0 {
            self.refresh(link);
        }
        let relayed_too_often = |index: &u16| batch.frame(usize::from(*index)).hops > HOPS_MAX;
        if which.iter().any(relayed_too_often) {
            let rest: Vec<u16> = which.iter().copied().filter(|index| !relayed_too_often(index)).collect();
            link.stats.drop_frames(DropReason::HopLimit, (which.len() - rest.len()) as u64);
            self.by_guest(link, batch, &rest);
        } else {
            self.by_guest(link, batch, which);
        }
    }

    /// Asks the kernel for the path MTU of the links whose turn it is and that were not asked for within the last second. Call
    /// it every 20 ms, or as often as there is time.
    pub fn tick(&mut self, peers: &Peers, now_ms: u64) {
        let links = peers.links();
        let passed = now_ms.saturating_sub(std::mem::replace(&mut self.ticked_ms, now_ms));
        let count = TICK_LINKS * (passed / TICK_MS).clamp(1, TICKS_MAX) as usize;
        for _ in 0..count.min(links.len()) {
            self.next_link = (self.next_link + 1) % links.len();
            let link = &links[self.next_link];
            let last = link.refreshed_ms.load(Relaxed);
            // Of several dispatchers one does it.
            if (last == 0 || now_ms.saturating_sub(last) >= REFRESH_MS)
                && link.refreshed_ms.compare_exchange(last, now_ms.max(1), Relaxed, Relaxed).is_ok()
            {
                self.refresh(link);
                if link.mbps.load(Relaxed) == 0
                    && let Some(remote) = link.remote()
                {
                    let socket = self.exits[0].socket.as_fd();
                    link.mbps.store(buffers::path_mbps(socket, remote).max(1), Relaxed);
                }
            }
            if let Some(vteps) = &link.vteps {
                vteps.age(now_ms);
            }
            self.fit_buffers(link.mbps.load(Relaxed));
        }
    }

    /// Sizes the sockets' buffers for a path of `mbps` Mbit/s, when it is the first or the fastest so far.
    fn fit_buffers(&mut self, mbps: u32) {
        if mbps <= self.mbps {
            return;
        }
        self.mbps = mbps;
        for exit in &self.exits {
            if let Err(error) = exit.socket.set_buffers(buffers::buffer_bytes(mbps)) {
                tracing::warn!(%error, mbps, "cannot size a socket's buffers, which stay as they are");
            }
        }
    }

    /// Learns anew what the path is able to do.
    fn refresh(&mut self, link: &Link) {
        let Some(remote) = link.remote() else { return };
        if let Some(ports) = &self.vxlan {
            ports.aim(link, &mut self.routes);
        }
        // VXLAN has sockets of its own.
        let path_mtu = if link.vteps.is_some() || self.socket().name(link, 0).is_some() {
            self.routes.path_mtu(remote)
        } else {
            Err(io::Error::from_raw_os_error(libc::EAFNOSUPPORT))
        };
        match path_mtu {
            Ok(mtu) => {
                if link.path_mtu.swap(mtu, Relaxed) != mtu {
                    // Likely another device.
                    link.mbps.store(0, Relaxed);
                }
                link.route_error.store(0, Relaxed);
            }
            Err(error) => {
                let unknown = u32::from(PATH_MTU_FALLBACK);
                let _ = link.path_mtu.compare_exchange(0, unknown, Relaxed, Relaxed);
                link.route_error.store(error.raw_os_error().unwrap_or(libc::EIO), Relaxed);
            }
        }
        // The route may lead over another device by now. If not, that costs one refused message.
        link.segmentation.store(true, Relaxed);
    }

    /// Parts the frames by whether they are for a guest of the other host that has a port of its own, and sends them.
    fn by_guest(&mut self, link: &Link, batch: &Batch, which: &[u16]) {
        let Tunnel::Direct(guests) = &link.options.tunnel else { return self.spread(link, batch, which) };
        let mut by_guest = std::mem::take(&mut self.by_guest);
        for &index in which {
            let dst = batch.frame(usize::from(index)).dst;
            let guest = guests.iter().take(DIRECT_MAX).position(|(mac, _)| *mac == dst);
            by_guest[guest.map_or(0, |guest| guest + 1)].push(index);
        }
        for (guest, which) in by_guest.iter_mut().enumerate().filter(|(_, which)| !which.is_empty()) {
            match guest.checked_sub(1) {
                None => self.spread(link, batch, which),
                Some(guest) => {
                    self.send_by(link, self.native_from, usize::from(PORTS_MAX) + guest, batch, which);
                }
            }
            which.clear();
        }
        self.by_guest = by_guest;
    }

    /// Parts the frames by the path that each takes, and sends them.
    ///
    /// There are as many paths as the side with more sockets has, so that each of those is used, by one path.
    fn spread(&mut self, link: &Link, batch: &Batch, which: &[u16]) {
        let (exits, ports) = match link.options.encapsulation {
            // The host between, and translators, know the first port.
            Encapsulation::Native if link.via.is_some() => return self.send_by(link, 0, 0, batch, which),
            Encapsulation::Native => (self.exits.len() - self.native_from, link.place.ports()),
            _ => return self.send_by(link, 0, 0, batch, which),
        };
        let paths = exits.max(ports);
        if paths == 1 {
            return self.send_by(link, self.native_from, 0, batch, which);
        }
        let mut by_path = std::mem::take(&mut self.by_path);
        for &index in which {
            let hash = flow::hash(batch.head(batch.frame(usize::from(index))));
            by_path[hash as usize % paths].push(index);
        }
        for (path, which) in by_path[..paths].iter_mut().enumerate().filter(|(_, which)| !which.is_empty()) {
            self.send_by(link, self.native_from + path % exits, path % ports, batch, which);
            which.clear();
        }
        self.by_path = by_path;
    }

    /// Sends the frames by an exit to one of the remote's ports, or its guests' (see [`Socket::name`]).
    fn send_by(&mut self, link: &Link, exit: usize, port: usize, batch: &Batch, which: &[u16]) {
        self.gather.segmentation = link.segmentation.load(Relaxed);
        if link.options.encapsulation == Encapsulation::Vxlan {
            return self.send_vxlan(link, batch, which);
        }
        let Exit { socket, dont_fragment } = &mut self.exits[exit];
        let Some(name) = socket.name(link, port) else {
            let unknown = link.remote().is_none();
            let reason = if unknown { DropReason::NoAddress } else { DropReason::SendFailed };
            return link.stats.drop_frames(reason, which.len() as u64);
        };
        let native = link.options.encapsulation == Encapsulation::Native;
        if *dont_fragment != Some(native) {
            // A socket that cannot be told sends all the same; only what IP does with large packets differs.
            let _ = socket.set_dont_fragment(native);
            *dont_fragment = Some(native);
        }
        if !native {
            return self.send_vnet(link, &name, batch, which);
        }
        let keyring = link.seal().map(Seal::keyring);
        let key = keyring.as_ref().and_then(|keyring| keyring.sealing(link.next_number()));
        if keyring.is_some() && key.is_none() {
            return link.stats.drop_frames(DropReason::NoKey, which.len() as u64);
        }
        let path = Path { exit, name: &name, key };
        if let Err(TooBig { position }) = self.send_native(link, path, batch, which, true) {
            self.refresh(link);
            // Never stops early: what is too big again is counted as dropped.
            _ = self.send_native(link, path, batch, &which[position..], false);
        }
    }

    fn send_native(
        &mut self,
        link: &Link,
        path: Path<'_>,
        batch: &Batch,
        which: &[u16],
        may_stop: bool,
    ) -> Result<(), TooBig> {
        let size = link.fragment_payload();
        let mut at = 0;
        while at < which.len() {
            // Enough for any frame: each of its segments may be cut once by each fragment's end.
            let slices = 2 * FRAGMENTS_MAX + SEGMENTS_MAX;
            let frame = if path.key.is_some() { FRAME_MAX + WIRE_LEN } else { 0 };
            let copies = FRAGMENTS_MAX * (HEADER_LEN + TAG_LEN) + BUNDLE_MAX.max(frame);
            if !self.gather.has_room(FRAGMENTS_MAX, slices, copies) {
                self.gather.flush(&self.exits[path.exit].socket, path.name, link, may_stop)?;
            }
            let count = bundled(batch, &which[at..], size);
            let frame = batch.frame(usize::from(which[at]));
            if path.key.is_none() && self.cut.wants(path.exit, link, batch, frame, size) {
                // What was gathered goes first.
                let socket = &self.exits[path.exit].socket;
                self.gather.flush(socket, path.name, link, may_stop)?;
                if self.cut.send((path.exit, socket, path.name), link, batch, frame, size) == Outcome::Done {
                    at += 1;
                    continue;
                }
            }
            if count > 1 {
                self.put_bundle(link, path.key, batch, &which[at..at + count], at);
            } else {
                self.put_frame(link, path.key, batch, which[at], at, size);
            }
            at += count;
        }
        self.gather.flush(&self.exits[path.exit].socket, path.name, link, may_stop)
    }

    /// One datagram with several frames.
    fn put_bundle(
        &mut self,
        link: &Link,
        key: Option<&SealingKey>,
        batch: &Batch,
        which: &[u16],
        position: usize,
    ) {
        let first = batch.frame(usize::from(which[0]));
        let header = Header { kind: Kind::Bundle, ..header(first, key, link.take_numbers(1)) };
        self.gather.copy(&header.to_bytes());
        for &index in which {
            let frame = batch.frame(usize::from(index));
            let metadata = if header.offload { WIRE_LEN } else { 0 };
            self.gather.copy(&((frame.len() + metadata) as u16).to_be_bytes());
            if header.offload {
                self.gather.copy(&frame.offload.to_wire());
            }
            self.gather.copy_frame(batch, frame);
        }
        if let Some(key) = key {
            self.gather.seal(key);
        }
        let message = self.gather.end_datagram(true);
        for (i, &index) in which.iter().enumerate() {
            self.gather.record(position + i, batch.frame(usize::from(index)).len(), message, message);
        }
    }

    /// One frame in as many datagrams as it needs, with `size` bytes of payload each.
    fn put_frame(
        &mut self,
        link: &Link,
        key: Option<&SealingKey>,
        batch: &Batch,
        index: u16,
        position: usize,
        size: usize,
    ) {
        let frame = batch.frame(usize::from(index));
        let mut header = header(frame, key, 0);
        let metadata = if header.offload { WIRE_LEN } else { 0 };
        let count = (frame.len() + metadata).div_ceil(size);
        header.number = link.take_numbers(count as u64);
        let mut cursor = Cursor { segments: batch.segments(frame), offset: 0 };
        let (mut first, mut last) = (usize::MAX, 0);
        for k in 0..count {
            header.index = k as u16;
            header.last = k + 1 == count;
            self.gather.copy(&header.to_bytes());
            if header.offload {
                self.gather.copy(&frame.offload.to_wire());
            }
            let len = size - if header.offload { WIRE_LEN } else { 0 };
            match key {
                None => cursor.take(len, |slice| self.gather.slice(slice)),
                Some(key) => {
                    cursor.take(len, |slice| self.gather.copy_slice(slice));
                    self.gather.seal(key);
                }
            }
            last = self.gather.end_datagram(true);
            first = first.min(last);
            header.number += 1;
            header.offload = false;
        }
        self.gather.record(position, frame.len(), first, last);
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        self.cut.end(self.exits.iter().map(|exit| &exit.socket));
    }
}

/// How many of the frames `which`, from the first on, go into one datagram; 1 when the first stands alone.
#[inline]
fn bundled(batch: &Batch, which: &[u16], size: usize) -> usize {
    let first = batch.frame(usize::from(which[0]));
    let kind = |frame: &Frame| (frame.network, frame.hops, frame.offload.is_none());
    let overhead = ENTRY_LEN + if first.offload.is_none() { 0 } else { WIRE_LEN };
    let mut left = size.min(BUNDLE_MAX);
    let fits = |index: &&u16| {
        let frame = batch.frame(usize::from(**index));
        let entry = overhead + frame.len();
        let fits = frame.len() <= BUNDLE_FRAME_MAX && entry <= left && kind(frame) == kind(first);
        left = left.saturating_sub(entry);
        fits
    };
    which.iter().take_while(fits).count().max(1)
}

/// The header of a datagram that holds all of `frame`, to be sealed with `key`.
#[inline]
pub(in crate::link) fn header(frame: &Frame, key: Option<&SealingKey>, number: u64) -> Header {
    Header {
        kind: Kind::Frame,
        last: true,
        offload: !frame.offload.is_none(),
        sealed: key.is_some(),
        hops: frame.hops,
        epoch: key.map_or(0, SealingKey::epoch),
        index: 0,
        network: frame.network.get(),
        queue: 0,
        number,
    }
}

/// A place in a frame's segments.
pub(in crate::link) struct Cursor<'a> {
    pub(in crate::link) segments: &'a [Segment],
    pub(in crate::link) offset: usize,
}

impl Cursor<'_> {
    /// Calls `with` for each slice of the next `len` bytes, or of what is left.
    #[inline]
    pub(in crate::link) fn take(&mut self, mut len: usize, mut with: impl FnMut(Segment)) {
        while let [segment, rest @ ..] = self.segments
            && len > 0
        {
            let slice = segment.slice(self.offset, len);
            len -= slice.len();
            self.offset += slice.len();
            with(slice);
            if self.offset == segment.len() {
                self.segments = rest;
                self.offset = 0;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::{FRAME_MAX, NetworkId, PortId};
    use crate::link::{Bridge, LinkOptions, Tunnel};
    use crate::wire::offload::Offload;
    use std::net::UdpSocket;
    use std::time::Duration;

    fn send(segmentation: bool, lens: &[usize]) -> (Vec<Vec<u8>>, u64) {
        let peer = UdpSocket::bind("127.0.0.1:0").unwrap();
        peer.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
        let listen = "127.0.0.1:0".parse().unwrap();
        let mut bridge =
            Bridge::bind(listen, false, Arc::default(), Arc::new(crate::link::ReassemblyBudget::new(0)))
                .unwrap();
        let options = LinkOptions {
            name: "peer".into(),
            remote: peer.local_addr().unwrap(),
            ports: 1,
            encapsulation: Encapsulation::Native,
            networks: None,
            mtu: Some(1500),
            tunnel: Tunnel::None,
        };
        let link = Link::new(options, PortId(0), Arc::default());
        link.number.0.store(1, Relaxed);
        link.path_mtu.store(1500, Relaxed);
        link.segmentation.store(segmentation, Relaxed);
        let frames: Vec<Vec<u8>> =
            lens.iter().map(|len| (0..*len).map(|i| (i * 7 + len) as u8).collect()).collect();
        let mut batch = Batch::new();
        for frame in &frames {
            let mut builder = batch.begin();
            // SAFETY: `frames` outlives the batch and is not written to.
            unsafe { builder.push_stable(Segment::new(frame.as_ptr(), frame.len())) };
            builder.finish(PortId(1), NetworkId::DEFAULT, Offload::default(), 0).unwrap();
        }
        bridge.tx.send(&link, &batch, &(0..lens.len() as u16).collect::<Vec<_>>());
        assert_eq!(link.stats.out_frames.get(), lens.len() as u64);
        let mut buffer = vec![0; 65_536];
        let got =
            std::iter::from_fn(|| peer.recv(&mut buffer).ok().map(|len| buffer[..len].to_vec())).collect();
        (got, link.stats.out_datagrams.get())
    }

    /// A device that cannot cut messages gets every datagram by itself; the same ones come out, in the same order.
    #[test]
    fn segmentation_changes_nothing_on_the_wire() {
        let lens = [60, 1400, 1400, 1400, 9000, 64, 64, 64, 1456, 1457, 2912, 30_000, FRAME_MAX];
        let (with, sent) = send(true, &lens);
        assert_eq!(with.len() as u64, sent);
        assert_eq!((with, sent), send(false, &lens));
    }

    /// Thousands of links are not asked for at once, and each has its turn within seconds.
    #[test]
    fn links_take_turns() {
        let listen = "127.0.0.1:0".parse().unwrap();
        let budget = Arc::new(crate::link::ReassemblyBudget::new(0));
        let mut bridge = Bridge::bind(listen, false, Arc::default(), budget).unwrap();
        let links: Vec<Arc<Link>> = (0..4096u16)
            .map(|n| {
                let options = LinkOptions {
                    name: format!("peer{n}"),
                    remote: SocketAddr::new(listen.ip(), 10_000 + n),
                    ports: 1,
                    encapsulation: Encapsulation::Native,
                    networks: None,
                    mtu: None,
                    tunnel: Tunnel::None,
                };
                Link::new(options, PortId(n), Arc::default())
            })
            .collect();
        links.iter().for_each(|link| link.segmentation.store(false, Relaxed));
        let peers = Peers::build(&links);
        let asked = |at: u64| links.iter().filter(|link| link.refreshed_ms.load(Relaxed) == at).count();
        for now_ms in (20..=2560).step_by(20) {
            bridge.tx.tick(&peers, now_ms);
            assert_eq!(asked(now_ms), TICK_LINKS, "at {now_ms} ms");
        }
        assert!(links.iter().all(|link| link.path_mtu() > PATH_MTU_FALLBACK));
        assert!(links.iter().all(|link| link.segmentation.load(Relaxed)), "what is not known is tried again");
        // A quiet host ticks once a second.
        for now_ms in [3560, 4560, 5560, 6560] {
            bridge.tx.tick(&peers, now_ms);
        }
        assert!(links.iter().all(|link| link.refreshed_ms.load(Relaxed) >= 3560));
        // A few links are looked at in every tick, and asked for once a second.
        let peers = Peers::build(&links[..3]);
        for now_ms in (7000..8000).step_by(20) {
            bridge.tx.tick(&peers, now_ms);
            assert!(links[..3].iter().all(|link| now_ms - link.refreshed_ms.load(Relaxed) < REFRESH_MS));
        }
    }
}
