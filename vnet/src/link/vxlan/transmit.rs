//! Sending by encapsulations that carry finished Ethernet frames and nothing else: `vnet` and `vxlan`.
//!
//! What a guest left to its NIC is done here, in one pass that copies and one that sums: a checksum is completed, a
//! super-frame cut. Segments of TCP are made so small that the path carries each in one packet, whatever MTU the guest believes
//! in; a TCP frame that is too large without being a super-frame is cut as well. So the segments of a frame have one size, and
//! the gather (gather.rs) joins them in one message that the kernel or the NIC takes apart again. Frames that are finished are
//! sent from where they lie.
//!
//! Other frames than TCP that the path does not carry in one packet: a `vnet` peer gets them in IP fragments, as VNET/P's peers
//! always did; a VTEP must not send fragments (RFC 7348 section 4.3), so on a `vxlan` link they are dropped and counted.

use std::sync::atomic::Ordering::Relaxed;

use crate::frame::{Batch, Frame, SEGMENTS_MAX};
use crate::link::native::send::Sender;
use crate::link::socket::gather::Gather;
use crate::link::socket::udp::{Name, Socket};
use crate::link::vxlan::kernel_device::{self, Sent};
use crate::link::{Encapsulation, Link, UDP_PAYLOAD_MAX};
use crate::stats::DropReason;
use crate::wire::segment::{self, Cut};
use crate::wire::{flow, vxlan};

/// Offset of TCP's checksum in its header.
pub(in crate::link) const TCP_CHECKSUM: u16 = 16;

/// A way that is no source port, but a device of the kernel's VXLAN driver: its number and this.
const DRIVEN: u8 = crate::link::vxlan::PORTS as u8;

/// Where datagrams of one call go, and how they are made.
struct Way<'a> {
    link: &'a Link,
    socket: &'a Socket,
    name: &'a Name,
    /// Largest frame in bytes that travels in one packet, and largest that travels at all.
    room: usize,
    most: usize,
}

impl<'a> Way<'a> {
    fn new(link: &'a Link, socket: &'a Socket, name: &'a Name) -> Way<'a> {
        let (room, most) = match link.options.encapsulation {
            Encapsulation::Vxlan => {
                let room = link.udp_payload() - vxlan::HEADER_LEN;
                (room, room)
            }
            _ => (link.udp_payload(), UDP_PAYLOAD_MAX),
        };
        Way { link, socket, name, room, most }
    }

    /// Adds what stands before the frame.
    #[inline]
    fn put_header(&self, gather: &mut Gather, frame: &Frame) {
        if self.link.options.encapsulation == Encapsulation::Vxlan {
            gather.copy(&vxlan::header(frame.network.get()));
        }
    }

    /// Makes room for one more datagram with `bytes` of copies.
    #[inline]
    fn make_room(&self, gather: &mut Gather, bytes: usize) {
        if !gather.has_room(1, SEGMENTS_MAX + 1, bytes + vxlan::HEADER_LEN) {
            self.flush(gather);
        }
    }

    fn flush(&self, gather: &mut Gather) {
        // Never stops early: what cannot be sent is counted as dropped.
        _ = gather.flush(self.socket, self.name, self.link, false);
    }

    fn drop_frame(&self, reason: DropReason) {
        self.link.stats.drop_frames(reason, 1);
    }

    /// Ends a datagram that holds `len` bytes of frame.
    #[inline]
    fn end(&self, gather: &mut Gather, len: usize) {
        let message = gather.end_datagram(len <= self.room);
        gather.record(0, len, message, message);
    }

    /// One frame, whatever it needs.
    fn put(&self, gather: &mut Gather, batch: &Batch, frame: &Frame) {
        let offload = &frame.offload;
        if offload.is_none() {
            if frame.len() > self.most {
                return self.drop_frame(DropReason::MtuExceeded);
            }
            self.make_room(gather, 0);
            self.put_header(gather, frame);
            batch.segments(frame).iter().for_each(|segment| gather.slice(*segment));
            self.end(gather, frame.len());
        } else if kernel_device::must_be_cut(frame, self.room) {
            match Cut::new(batch.head(frame), frame.len(), offload, self.room) {
                Ok(cut) => self.put_segments(gather, batch, frame, &cut),
                Err(_) => self.drop_frame(DropReason::Unsegmentable),
            }
        } else if frame.len() > self.most {
            self.drop_frame(DropReason::MtuExceeded);
        } else {
            self.make_room(gather, frame.len());
            self.put_header(gather, frame);
            let mut summed = true;
            gather.write(frame.len(), |copy| {
                batch.copy_to(frame, copy);
                summed = segment::complete_checksum(copy, offload).is_ok();
            });
            // The metadata was checked against the frame's length: there is no such frame.
            debug_assert!(summed);
            self.end(gather, frame.len());
        }
    }

    /// A frame in segments.
    fn put_segments(&self, gather: &mut Gather, batch: &Batch, frame: &Frame, cut: &Cut) {
        // One frame came in: what goes on beyond one is a copy.
        self.link.stats.copies.add(cut.count() as u64 - 1);
        let mut payload = batch.reader(frame);
        payload.skip(cut.headers_len());
        for index in 0..cut.count() {
            let len = cut.segment_len(index);
            if len > self.most {
                payload.skip(len - cut.headers_len());
                self.drop_frame(DropReason::MtuExceeded);
                continue;
            }
            self.make_room(gather, len);
            self.put_header(gather, frame);
            gather.write(len, |segment| {
                payload.read(&mut segment[cut.headers_len()..]);
                cut.write_headers(index, segment);
            });
            self.end(gather, len);
        }
    }
}

impl Sender {
    /// Sends frames as they are, each the payload of a datagram.
    pub(in crate::link) fn send_vnet(&mut self, link: &Link, name: &Name, batch: &Batch, which: &[u16]) {
        let way = Way::new(link, &self.exits[0].socket, name);
        for &index in which {
            way.put(&mut self.gather, batch, batch.frame(usize::from(index)));
        }
        way.flush(&mut self.gather);
    }

    /// Sends frames behind VXLAN headers, each to the VTEP where its destination is known to be or to all, from a source port
    /// that its flow chooses.
    pub(in crate::link) fn send_vxlan(&mut self, link: &Link, batch: &Batch, which: &[u16]) {
        let (Some(ports), Some(vteps)) = (&self.vxlan, &link.vteps) else {
            return link.stats.drop_frames(DropReason::SendFailed, which.len() as u64);
        };
        let room = link.udp_payload() - vxlan::HEADER_LEN;
        // Without a route the driver would not say so.
        let drivers = link.drivers.as_ref().filter(|_| link.route_error.load(Relaxed) == 0);
        self.ways.clear();
        for &index in which {
            let frame = batch.frame(usize::from(index));
            let hash = flow::hash(batch.head(frame));
            let flow = hash as usize % ports.len();
            let destinations = vteps.destinations(frame);
            link.stats.copies.add(destinations.len() as u64 - 1);
            let streams = &mut self.streams;
            let drivers =
                drivers.filter(|_| streams.go_by_driver(link, hash, batch, frame, room, self.ticked_ms));
            self.ways.extend(destinations.map(|vtep| {
                let driver = drivers.and_then(|drivers| drivers.find(frame.network, vtep));
                (vtep, driver.map_or(flow as u8, |number| DRIVEN + number), index)
            }));
        }
        // Frames of one flow have one source port: their order stays.
        self.ways.sort_unstable();
        for run in self.ways.chunk_by(|a, b| (a.0, a.1) == (b.0, b.1)) {
            let (vtep, port, _) = run[0];
            let driver = link.drivers.as_ref().and_then(|drivers| drivers.get(port.checked_sub(DRIVEN)?));
            let socket = ports.socket(if driver.is_some() { 0 } else { usize::from(port) });
            let Some(name) = vteps.name(vtep, socket) else {
                link.stats.drop_frames(DropReason::SendFailed, run.len() as u64);
                continue;
            };
            let way = Way::new(link, socket, name);
            for &(_, _, index) in run {
                let frame = batch.frame(usize::from(index));
                let sent = driver.map(|driver| driver.send(&link.stats, batch, frame, room));
                if !matches!(sent, Some(Sent::Done)) {
                    way.put(&mut self.gather, batch, frame);
                }
            }
            way.flush(&mut self.gather);
        }
    }
}
