//! Sends frames on VXLAN links: each frame to the VTEP at which its destination was learned, or to all; from a source port chosen
//! by its flow, or through a kernel VXLAN device if it belongs to a TCP stream.

use std::sync::Arc;

use super::finish_frames::Way;
use super::kernel_device::{Drivers, Sent, Streams};
use super::link_part::Vxlan;
use super::source_ports::{PORTS, SourcePorts};
use crate::frame::BATCH_MAX;
use crate::link::path::state::udp_payload;
use crate::link::sending::Sending;
use crate::link::socket::udp::Socket;
use crate::stats::DropReason;
use crate::wire::{flow, vxlan};

/// Marks a frame that leaves through a kernel device: this value plus the device's index. Smaller values are source ports.
const BY_DEVICE: u8 = PORTS as u8;

/// Sends frames on VXLAN links, for one dispatcher.
pub(in crate::link) struct VxlanSender {
    ports: SourcePorts,
    /// Flows that have frames to segment.
    streams: Streams,
    /// Frames of a call: VTEP number, source port or [`BY_DEVICE`], index in the batch.
    ways: Vec<(u16, u8, u16)>,
    now_ms: u64,
}

impl VxlanSender {
    pub(in crate::link) fn new(ports: SourcePorts) -> VxlanSender {
        VxlanSender { ports, streams: Streams::new(), ways: Vec::with_capacity(BATCH_MAX), now_ms: 0 }
    }

    /// The sockets of the source ports.
    pub(in crate::link) fn sockets(&self) -> &[Arc<Socket>] {
        self.ports.all()
    }

    /// Advances the clock by which stream flows expire.
    pub(in crate::link) fn tick(&mut self, now_ms: u64) {
        self.now_ms = now_ms;
    }

    /// Sends the frames `which` of the batch with VXLAN headers.
    pub(in crate::link) fn send(&mut self, link: &Vxlan, out: &mut Sending<'_>, which: &[u16]) {
        out.gather.segmentation = out.link.path.segmentation();
        let room = udp_payload(out.link.path.mtu(), link.remote.is_ipv4()) - vxlan::HEADER_LEN;
        self.choose_ways(link, out, which, room);
        // A flow has one source port, so sorting keeps its order.
        self.ways.sort_unstable();
        for run in self.ways.chunk_by(|a, b| (a.0, a.1) == (b.0, b.1)) {
            let (vtep, way, _) = run[0];
            let device = link.drivers.as_ref().and_then(|drivers| drivers.get(way.checked_sub(BY_DEVICE)?));
            let socket = self.ports.socket(if device.is_some() { 0 } else { usize::from(way) });
            let Some(name) = link.vteps.name(vtep, socket) else {
                run.iter().for_each(|&(_, _, index)| out.dropped(DropReason::SendFailed, index));
                continue;
            };
            let way = Way::vxlan(socket, name, room);
            for &(_, _, index) in run {
                let sent = device.map(|device| device.send(out, index, room));
                if !matches!(sent, Some(Sent::Done)) {
                    way.put(out, index);
                }
            }
            way.flush(out);
        }
    }

    /// Chooses each frame's VTEP and source port, or kernel device.
    fn choose_ways(&mut self, link: &Vxlan, out: &Sending<'_>, which: &[u16], room: usize) {
        // Without a route the device would drop frames silently.
        let drivers = link.drivers.as_ref().filter(|_| out.link.path.has_route());
        self.ways.clear();
        for &index in which {
            let frame = out.frame(index);
            let hash = flow::hash(out.batch.head(frame));
            let port = (hash as usize % self.ports.len()) as u8;
            let destinations = link.vteps.destinations(frame);
            out.link.stats.copies.add(destinations.len() as u64 - 1);
            let flow = hash as usize ^ out.link.id as usize;
            let (streams, now_ms) = (&mut self.streams, self.now_ms);
            let drivers: Option<&Drivers> =
                drivers.filter(|_| streams.go_by_driver(flow, out.batch, frame, room, now_ms));
            self.ways.extend(destinations.map(|vtep| {
                let device = drivers.and_then(|drivers| drivers.find(frame.network, vtep));
                (vtep, device.map_or(port, |number| BY_DEVICE + number), index)
            }));
        }
    }
}
