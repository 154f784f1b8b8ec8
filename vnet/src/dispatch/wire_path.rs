//! The wire, joined to dispatchers: the links that use it, its trials, and its frames that come up.
//!
//! A link may use the wire if it is native and leads to an IPv4 address that no other link has
//! ([`Link::wire_remote`]). Trials show whether it works (`link/native/wire_state.rs`). Frames that arrive by the wire are checked
//! twice: programs drop those from addresses of no such link; a frame that comes up is checked against the dispatcher's own setup, as a
//! datagram of the link would be. A sealed link's wire carries only what applications have sealed (`sealed_sessions`): everything else
//! that arrives by it is dropped.
//!
//! ARP and ND between known stations come up. If the other host's vnetd is silent, they leave by the wire: it has probably died, and
//! native datagrams would be lost, but the kernel there still forwards what the wire brings. So neighbours go on to answer each other's
//! probes, of which hosts send three, a second apart.

use std::io;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use super::sealed_sessions::SealedSessions;
use super::setup::{Feeder, Port, SendNeighbours, Setup, SetupView, SourceParts};
use super::tunnels::Tunnels;
use crate::frame::{Batch, DropSink, FRAME_MAX, Frame, NetworkId, Origin, PortId, Selection};
use crate::interface::wire::{OVERHEAD, PACKET_MAX, Wire, is_trial};
use crate::kernel::{Attached, Destination, Kernel, Sources, Target, Translates, WireHead};
use crate::link::{Courier, Link, WireTerms};
use crate::poll::Waker;
use crate::route::{Learned, explain};
use crate::source::{Source, Taken};
use crate::stats::{DiscardReason, DropReason, PortStats};
use crate::wire::ethernet::VLAN_TAG_LEN;
use crate::wire::neighbour::is_neighbours;
use crate::wire::offload::{F_NEEDS_CSUM, GSO_NONE, Offload, VIRTIO_NET_HDR_LEN};
use crate::wire::translation::{Transport, proof};
use crate::wire::vxlan::WIRE_PORT;

/// Maximum number of IP fragments of one frame.
const FRAGMENTS_MAX: usize = 8;
/// Time in milliseconds without a datagram of another host's vnetd, which announces the wire once a second, after which it counts as dead.
const SILENT_MS: u64 = 1_500;
/// Bytes before a frame that came up: virtio-net header and head.
const START: usize = VIRTIO_NET_HDR_LEN + WireHead::LEN;
/// Bytes of a frame's two addresses.
const ADDRESSES: usize = 12;
/// Where the kernel inserts a VLAN tag: behind twelve bytes, which are the head's first instead of the frame's addresses.
const TAG_AT: usize = VIRTIO_NET_HDR_LEN + ADDRESSES;

/// The wire of a core.
pub(super) struct WirePath {
    /// Dropped before `wire`: detaches the programs before the devices are removed.
    _attached: Attached,
    wire: Wire,
    courier: Courier,
    /// This host's terms, announced to the other hosts; `translates` is announced per link.
    announced: WireTerms,
    tunnels: Arc<Tunnels>,
    /// Counters of frames that belong to no link.
    strangers: Arc<PortStats>,
    sealed: Arc<SealedSessions>,
    learned: Arc<Learned>,
}

impl WirePath {
    /// Attaches `kernel`'s programs to the devices of `wire`. `announced` is what this host tells others.
    ///
    /// # Errors
    /// The reason why there is no wire, in one line.
    pub(super) fn open(
        kernel: &Arc<Kernel>,
        wire: Wire,
        courier: Courier,
        (strangers, sealed, learned): (Arc<PortStats>, Arc<SealedSessions>, Arc<Learned>),
        (announced, tunnels): (WireTerms, Arc<Tunnels>),
    ) -> Result<Arc<WirePath>, String> {
        let attached = kernel.attach_wire(&wire.device, &wire.tap).map_err(|error| error.to_string())?;
        wire.raise().map_err(|error| format!("cannot set up the wire: {error}"))?;
        tunnels.add_wire();
        Ok(Arc::new(WirePath {
            _attached: attached,
            wire,
            courier,
            announced,
            tunnels,
            strangers,
            sealed,
            learned,
        }))
    }

    /// A duplicate of the TAP's descriptor.
    pub(super) fn descriptor(&self) -> io::Result<OwnedFd> {
        Ok(self.wire.file().try_clone()?.into())
    }

    /// How the kernel sends frames of a guest with MTU `mtu` to the other host of `link`; `None` while the link's wire is not ready,
    /// and for a guest whose frames would leave in too many IP fragments: native datagrams carry those better.
    pub(super) fn to(&self, link: &Link, mtu: usize, now_ms: u64) -> Option<Destination> {
        let remote = link.wire_remote().filter(|_| link.is_wire_ready(now_ms))?;
        let packet_max = usize::from(link.path_mtu()) - OVERHEAD;
        if mtu > PACKET_MAX || mtu > FRAGMENTS_MAX * packet_max {
            return None;
        }
        let target = Target::Host {
            remote: SocketAddrV4::new(remote, WIRE_PORT),
            packet_max: packet_max as u32,
            underlay: self.tunnels.underlay(link),
            sources: Sources::Wire,
            translates: match self.translates(link, now_ms) {
                Err(_) => Translates::Nothing,
                Ok(()) if mtu > link.path_mtu().into() => Translates::NoUdpSuperFrames,
                Ok(()) => Translates::All,
            },
        };
        let (port, device, stats) = (link.port(), self.wire.device.1, link.stats().clone());
        Some(Destination { port, device, mtu: PACKET_MAX, stats, target })
    }

    /// Checks that frames of `link` take the wire.
    ///
    /// # Errors
    /// The reason why they do not.
    pub(super) fn is_ready(&self, link: &Arc<Link>, now_ms: u64) -> Result<(), &'static str> {
        self.tunnels.is_sole(link)?;
        if !link.is_wire_ready(now_ms) {
            return Err(
                "the other host does not receive UDP port 9789, or has no interface with the kernel path",
            );
        }
        Ok(())
    }

    /// Links that take the wire, by the other host's address.
    pub(super) fn links(&self) -> Vec<(Ipv4Addr, Arc<Link>)> {
        self.tunnels.wire_links()
    }

    /// Sends datagrams of links without frames.
    pub(super) fn courier(&self) -> &Courier {
        &self.courier
    }

    /// Checks that packets to the other host of `link` may be translated.
    ///
    /// # Errors
    /// Why packets take the tunnel, in one line.
    pub(super) fn translates(&self, link: &Link, now_ms: u64) -> Result<(), &'static str> {
        self.takes_translated(link)?;
        if !link.peer_translates() || !link.is_wire_ready(now_ms) {
            return Err("the other host takes no packets without one");
        }
        Ok(())
    }

    /// Why packets to the other host of `link` take the tunnel, or would; `None` if they may be translated, and for links that are not native.
    pub(super) fn tunnel_reason(&self, link: &Link, now_ms: u64) -> Option<&'static str> {
        let translations = link.translations()?;
        let lost = || match translations.unproved(now_ms) {
            [true, true] => Some("packets to TCP and UDP port 9790 do not arrive at the other host"),
            [true, false] => Some("packets to TCP port 9790 do not arrive at the other host"),
            [false, true] => Some("packets to UDP port 9790 do not arrive at the other host"),
            [false, false] => None,
        };
        self.translates(link, now_ms).err().or_else(lost)
    }

    /// Checks that programs take translated packets from the other host of `link`.
    ///
    /// # Errors
    /// The reason why they do not.
    pub(super) fn takes_translated(&self, link: &Link) -> Result<(), &'static str> {
        if !self.announced.translates {
            Err("translate is off")
        } else if link.needs_seal() {
            Err("it is sealed")
        } else if self.tunnels.underlay(link).is_none() {
            Err("no device that takes programs leads to its remote")
        } else {
            Ok(())
        }
    }

    /// Sends proofs to the other host of `link`: translated packets of index 0 and the path MTU, one of each protocol.
    pub(super) fn prove(&self, link: &Link) {
        let (Some(way), Some(remote)) = (self.tunnels.underlay(link), link.wire_remote()) else { return };
        for transport in Transport::ALL {
            let frame = proof(transport, way.local, remote, link.path_mtu());
            self.wire.send_bare(&frame, way.device, way.next_hop);
        }
    }

    /// Sends trials and announcements to all hosts, and ends the flows of links whose wire is not ready any more.
    pub(super) fn tick(&self, kernel: &Kernel, now_ms: u64) {
        for (ip, link) in &self.tunnels.wire_links() {
            self.wire.try_out(*ip);
            let translates = self.takes_translated(link).is_ok();
            self.courier.announce_wire(link, WireTerms { translates, ..self.announced }, now_ms);
            match link.wire_change(now_ms) {
                Some(true) if link.needs_seal() => {
                    tracing::info!(link = link.name(), "what applications have sealed takes the wire");
                }
                Some(true) => tracing::info!(link = link.name(), "known flows of containers take the wire"),
                Some(false) => {
                    // vnetd forwards them from now on.
                    let _ = kernel.flows().end(&[link.stats()]);
                    tracing::info!(
                        link = link.name(),
                        "vnetd forwards all frames: the other host does not receive the wire any more"
                    );
                }
                None => {}
            }
        }
    }
}

impl WirePath {
    /// Whether a frame that has come by the wire of a sealed link is a sealed packet for an application of this host, from a station that
    /// is at this link already and that the other host may speak for. Nothing is learned from it but that the station is still there.
    fn is_sealed(&self, setup: &Setup, link: &Link, network: NetworkId, frame: &[u8], now_ms: u64) -> bool {
        let Some(answers) = self.sealed.answers_to(network, frame) else { return false };
        let leads_here = || {
            explain(&setup.table, &self.learned, &answers, now_ms).outcome.is_ok_and(|to| to == [link.port()])
        };
        link.peer_may_send(network, answers.dst) && leads_here()
    }
}

impl SendNeighbours for WirePath {
    fn silent_host(&self, link: &Link, now_ms: u64) -> Option<Ipv4Addr> {
        let is_silent = link.heard_ms().is_none_or(|heard_ms| now_ms > heard_ms + SILENT_MS);
        link.wire_remote().filter(|_| is_silent && !link.needs_seal() && link.is_wire_ready(now_ms))
    }

    fn send_neighbours(
        &self,
        (link, remote): (&Link, Ipv4Addr),
        frames: Selection<'_>,
        (drops, rest): (&mut DropSink, &mut Vec<u16>),
    ) {
        rest.clear();
        for (index, frame) in frames.frames() {
            let Some(bytes) = neighbours_frame(frames.batch, frame) else {
                rest.push(index);
                continue;
            };
            match self.wire.send(bytes, remote, frame.network.get()) {
                Ok(()) => link.stats().delivered(1, bytes.len() as u64),
                Err(error) => {
                    let reason = DropReason::of_refusal(error.raw_os_error().unwrap_or(libc::EIO));
                    drops.dropped(link.stats(), reason, index, 1);
                }
            }
        }
    }
}

impl Feeder for WirePath {
    fn source(self: Arc<Self>, _port: PortId, parts: SourceParts) -> Box<dyn Source> {
        Box::new(WireSource { path: self, setup: parts.setup, drained: false, waker: None })
    }
}

/// The source of the wire's frames that come up.
struct WireSource {
    path: Arc<WirePath>,
    /// The setup of its dispatcher.
    setup: SetupView,
    /// The last read found the TAP empty, so the next frame wakes the dispatcher.
    drained: bool,
    waker: Option<Waker>,
}

impl Source for WireSource {
    // SAFETY: frames lie in the batch's own memory, so they live as long as it does.
    unsafe fn fill(&mut self, batch: &mut Batch, drops: &mut DropSink, now_ms: u64) -> Taken {
        const ROOM: usize = START + FRAME_MAX;
        let setup = self.setup.load();
        self.drained = false;
        let mut units = 0;
        // Refused frames do not fill the batch, so bound the attempts.
        for _ in 0..batch.limit() {
            let Some(room) = batch.spare(ROOM) else { break };
            let len = match self.path.wire.read(&mut room[..ROOM]) {
                Ok(len) => len,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                // Also if the device was removed: no more frames will come.
                Err(_) => {
                    self.drained = true;
                    break;
                }
            };
            units += 1;
            let restored = restore(&mut room[..len]);
            let found = restored.and_then(|(offload, head)| Some((offload, head, link_at(&setup, &head)?)));
            let Some((offload, head, link)) = found else {
                // The link was removed after the program had looked it up.
                self.path.strangers.discard(DiscardReason::UnknownSource, 1);
                continue;
            };
            let (bytes, stats) = ((len - START) as u64, link.stats());
            if head.network() == 0 && is_trial(&room[START..len]) {
                link.wire_tried(now_ms);
                continue;
            }
            let network = NetworkId::new(head.network()).filter(|network| link.carries(*network));
            let Some(network) = network else {
                drops.refused(stats, link.port(), DropReason::WrongNetwork, bytes);
                continue;
            };
            if link.needs_seal() && !self.path.is_sealed(&setup, link, network, &room[START..len], now_ms) {
                stats.discard(DiscardReason::SealRequired, 1);
                continue;
            }
            let origin = Origin { port: link.port(), network };
            match batch.push_spare(START, len, origin, offload) {
                Ok(()) => {
                    stats.in_frames.add(1);
                    stats.in_bytes.add(bytes);
                }
                Err(error) => drops.refused(stats, link.port(), error.into(), bytes),
            }
        }
        Taken { units, drained: self.drained, ..Taken::default() }
    }

    fn watch(&mut self, waker: Waker) {
        self.drained = false;
        if let Err(error) = waker.watch(self.path.wire.file()) {
            tracing::error!(%error, "cannot watch the wire's TAP device");
        }
        self.waker = Some(waker);
    }

    fn unwatch(&mut self) {
        if let Some(waker) = self.waker.take() {
            waker.forget(self.path.wire.file().as_fd());
        }
    }

    /// Watched edge-triggered; only an empty read guarantees an edge for the next frame.
    fn rest(&mut self) -> bool {
        self.drained
    }
}

/// The bytes of a unicast ARP or ND frame. `None` for other frames, for one that is not contiguous in memory, and for one with a partial
/// checksum: those leave by the link.
fn neighbours_frame<'a>(batch: &'a Batch, frame: &Frame) -> Option<&'a [u8]> {
    let head = batch.head(frame);
    let is_complete = frame.offload.flags & F_NEEDS_CSUM == 0 && frame.offload.gso_type == GSO_NONE;
    (!frame.dst.is_multicast() && head.len() == frame.len() && is_complete && is_neighbours(head))
        .then_some(head)
}

/// The link of `setup` over which a frame with `head` arrived.
fn link_at<'a>(setup: &'a Setup, head: &WireHead) -> Option<&'a Arc<Link>> {
    let Port::Link(port) = setup.port(head.from())? else { return None };
    (port.link.wire_remote() == Some(head.remote())).then_some(&port.link)
}

/// Parses a frame that came up, and moves a VLAN tag from the head into the frame, which then begins at [`START`]. The kernel's
/// offsets count from the head.
fn restore(room: &mut [u8]) -> Option<(Offload, WireHead)> {
    let offload = Offload::from_virtio(room.first_chunk()?);
    let head = room.get(VIRTIO_NET_HDR_LEN..START)?.first_chunk().map(WireHead::parse)?;
    if room[TAG_AT..START] != [0; VLAN_TAG_LEN] {
        let tag: [u8; VLAN_TAG_LEN] = room[TAG_AT..START].first_chunk().copied()?;
        // The kernel's order: twelve bytes of the head, tag, the rest of the head, frame.
        let frame = START + VLAN_TAG_LEN;
        if room.len() < frame + ADDRESSES {
            return None;
        }
        room.copy_within(frame..frame + ADDRESSES, START);
        room[START + ADDRESSES..frame + ADDRESSES].copy_from_slice(&tag);
    }
    let less = |at: u16| at.saturating_sub(WireHead::LEN as u16);
    let csum_start = if offload.flags & F_NEEDS_CSUM != 0 { less(offload.csum_start) } else { 0 };
    Some((Offload { hdr_len: less(offload.hdr_len), csum_start, ..offload }, head))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    /// A packet as the kernel writes it to the TAP: metadata with offsets from the head, head, frame.
    fn came_up(tag: Option<[u8; 4]>, frame: &[u8]) -> Vec<u8> {
        let offload = Offload {
            flags: F_NEEDS_CSUM,
            hdr_len: 70,
            csum_start: 50,
            csum_offset: 6,
            ..Offload::default()
        };
        let mut head = [0; WireHead::LEN];
        head[..4].copy_from_slice(&0x0a00_0002_u32.to_ne_bytes());
        head[4..8].copy_from_slice(&7_u32.to_ne_bytes());
        head[8..10].copy_from_slice(&3_u16.to_ne_bytes());
        let tag = tag.as_ref().map_or(&[][..], |tag| &tag[..]);
        [&offload.to_virtio(0)[..], &head[..12], tag, &head[12..], frame].concat()
    }

    #[test]
    fn a_frame_that_came_up_is_as_it_was_sent() {
        let frame: Vec<u8> = (1..=80).collect();
        let mut room = came_up(None, &frame);
        let (offload, head) = restore(&mut room).unwrap();
        assert_eq!((head.remote(), head.network(), head.from()), (Ipv4Addr::new(10, 0, 0, 2), 7, PortId(3)));
        assert_eq!((offload.hdr_len, offload.csum_start, offload.csum_offset), (54, 34, 6));
        assert_eq!(room[START..], frame);

        let tag = [0x81, 0, 0, 42];
        let mut room = came_up(Some(tag), &frame);
        let (_, tagged) = restore(&mut room).unwrap();
        assert_eq!(tagged, head);
        assert_eq!(room[START..], [&frame[..12], &tag, &frame[12..]].concat());
    }

    #[test]
    fn only_whole_frames_for_one_station_leave_in_place_of_native_datagrams() {
        let arp = |first: u8| {
            let mut frame = [0; 42];
            (frame[0], frame[12], frame[13]) = (first, 8, 6);
            frame
        };
        let whole = Offload::default();
        let partial = Offload { flags: F_NEEDS_CSUM, csum_start: 34, csum_offset: 6, ..whole };
        let mut other = arp(2);
        other[13] = 0;
        let origin = Origin { port: PortId(1), network: NetworkId::DEFAULT };
        for (frame, offload, leaves) in [
            (arp(2), whole, true),
            (arp(0xff), whole, false),
            (arp(2), partial, false),
            (other, whole, false),
        ] {
            let mut batch = Batch::new();
            batch.spare(frame.len()).unwrap()[..frame.len()].copy_from_slice(&frame);
            batch.push_spare(0, frame.len(), origin, offload).unwrap();
            let found = neighbours_frame(&batch, batch.frame(0));
            assert_eq!(found, leaves.then_some(&frame[..]), "{frame:?} {offload:?}");
        }
    }

    #[test]
    fn nothing_shorter_than_its_head_is_a_frame() {
        let whole = came_up(Some([0x81, 0, 0, 1]), &[0; 14]);
        for len in 0..whole.len() {
            let is_frame = len >= START + VLAN_TAG_LEN + ADDRESSES;
            assert_eq!(restore(&mut whole[..len].to_vec()).is_some(), is_frame, "{len} bytes");
        }
    }
}
