//! Makes finished Ethernet frames of what guests left to their NIC, and datagrams of them.
//!
//! A checksum is completed and a super-frame cut in one pass that copies and one that sums. Segments of TCP are made so small
//! that the path carries each in one packet, whatever MTU the guest believes in; a TCP frame that is too large without being a
//! super-frame is cut as well. So the segments of a frame have one size, and the gather joins them in one message that the kernel
//! or the NIC takes apart again. Frames that are finished are sent from where they lie.
//!
//! Other frames than TCP that the path does not carry in one packet: a `vnet` peer gets them in IP fragments, as VNET/P's peers
//! always did; a VTEP must not send fragments (RFC 7348 section 4.3), so on a `vxlan` link they are dropped and counted.

use crate::frame::{Frame, SEGMENTS_MAX};
use crate::link::limits::UDP_PAYLOAD_MAX;
use crate::link::sending::Sending;
use crate::link::socket::name::Name;
use crate::link::socket::udp::Socket;
use crate::stats::DropReason;
use crate::wire::segment::{self, Cut};
use crate::wire::vxlan;

/// Offset of TCP's checksum in its header.
pub(super) const TCP_CHECKSUM: u16 = 16;

/// Whether a frame does not travel as it is on a path that carries frames of `room` bytes, but may travel in segments.
#[inline]
pub(super) fn must_be_cut(frame: &Frame, room: usize) -> bool {
    frame.offload.gso_type != 0 || (frame.len() > room && frame.offload.csum_offset == TCP_CHECKSUM)
}

/// Where datagrams of one call go, and how they are made.
pub(super) struct Way<'a> {
    socket: &'a Socket,
    name: &'a Name,
    /// Whether a VXLAN header stands before each frame.
    has_header: bool,
    /// Largest frame in bytes that travels in one packet, and largest that travels at all.
    room: usize,
    most: usize,
}

impl<'a> Way<'a> {
    /// Bare frames of `room` bytes at most, larger ones in IP fragments.
    pub(super) fn classic(socket: &'a Socket, name: &'a Name, room: usize) -> Way<'a> {
        Way { socket, name, has_header: false, room, most: UDP_PAYLOAD_MAX }
    }

    /// Frames of `room` bytes at most behind VXLAN headers.
    pub(super) fn vxlan(socket: &'a Socket, name: &'a Name, room: usize) -> Way<'a> {
        Way { socket, name, has_header: true, room, most: room }
    }

    /// Adds what stands before the frame.
    #[inline]
    fn put_header(&self, out: &mut Sending<'_>, frame: &Frame) {
        if self.has_header {
            out.gather.copy(&vxlan::header(frame.network.get()));
        }
    }

    /// Makes room for one more datagram with `bytes` of copies.
    #[inline]
    fn make_room(&self, out: &mut Sending<'_>, bytes: usize) {
        if !out.gather.has_room(1, SEGMENTS_MAX + 1, bytes + vxlan::HEADER_LEN) {
            self.flush(out);
        }
    }

    /// Sends what has gathered.
    pub(super) fn flush(&self, out: &mut Sending<'_>) {
        // Never stops early: what cannot be sent is counted as dropped.
        _ = out.flush(self.socket, self.name, false);
    }

    /// Ends a datagram that holds `len` bytes of frame `index`.
    #[inline]
    fn end(&self, out: &mut Sending<'_>, index: u16, len: usize) {
        let message = out.gather.end_datagram(len <= self.room);
        out.gather.record(index, len, message, message);
    }

    /// One frame, whatever it needs.
    pub(super) fn put(&self, out: &mut Sending<'_>, index: u16) {
        let (frame, batch) = (out.frame(index), out.batch);
        let offload = &frame.offload;
        if offload.is_none() {
            if frame.len() > self.most {
                return out.dropped(DropReason::MtuExceeded, index);
            }
            self.make_room(out, 0);
            self.put_header(out, frame);
            batch.segments(frame).iter().for_each(|segment| out.gather.slice(*segment));
            self.end(out, index, frame.len());
        } else if must_be_cut(frame, self.room) {
            match Cut::new(batch.head(frame), frame.len(), offload, self.room) {
                Ok(cut) => self.put_segments(out, index, &cut),
                Err(_) => out.dropped(DropReason::Unsegmentable, index),
            }
        } else if frame.len() > self.most {
            out.dropped(DropReason::MtuExceeded, index);
        } else {
            self.make_room(out, frame.len());
            self.put_header(out, frame);
            let mut summed = true;
            out.gather.write(frame.len(), |copy| {
                batch.copy_to(frame, copy);
                summed = segment::complete_checksum(copy, offload).is_ok();
            });
            // The metadata was checked against the frame's length: there is no such frame.
            debug_assert!(summed);
            self.end(out, index, frame.len());
        }
    }

    /// A frame in segments.
    fn put_segments(&self, out: &mut Sending<'_>, index: u16, cut: &Cut) {
        let frame = out.frame(index);
        // One frame came in: every further segment is a copy.
        out.link.stats.copies.add(cut.count() as u64 - 1);
        let mut payload = out.batch.reader(frame);
        payload.skip(cut.headers_len());
        for n in 0..cut.count() {
            let len = cut.segment_len(n);
            if len > self.most {
                payload.skip(len - cut.headers_len());
                out.dropped(DropReason::MtuExceeded, index);
                continue;
            }
            self.make_room(out, len);
            self.put_header(out, frame);
            out.gather.write(len, |segment| {
                payload.read(&mut segment[cut.headers_len()..]);
                cut.write_headers(n, segment);
            });
            self.end(out, index, len);
        }
    }
}
