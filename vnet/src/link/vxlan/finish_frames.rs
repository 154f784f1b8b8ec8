//! Completes the offloads that guests leave to their NIC (checksums, segmentation), and puts the finished Ethernet frames into
//! datagrams.
//!
//! Completing a checksum and segmenting a super-frame take one pass over the data to copy it and one to sum it. TCP segments are
//! made small enough for one packet on the path, whatever MTU the guest assumes; an oversized TCP frame that is not a super-frame
//! is also segmented. A frame's segments have equal sizes, so the gather buffer joins them in one message that the kernel or NIC
//! splits again. Finished frames are sent without a copy.
//!
//! Oversized frames other than TCP: a `vnet` peer gets them in IP fragments, as VNET/P's peers always have; a VTEP must not send
//! fragments (RFC 7348 section 4.3), so a `vxlan` link drops and counts them.

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

/// True if a frame exceeds `room` bytes, the limit of the path, but can be segmented.
#[inline]
pub(super) fn must_be_cut(frame: &Frame, room: usize) -> bool {
    frame.offload.gso_type != 0 || (frame.len() > room && frame.offload.csum_offset == TCP_CHECKSUM)
}

/// Destination and encapsulation of the datagrams of one call.
pub(super) struct Way<'a> {
    socket: &'a Socket,
    name: &'a Name,
    /// True if each frame gets a VXLAN header.
    has_header: bool,
    /// Maximum length in bytes of a frame that fits into one packet, and of a frame that can be sent at all.
    room: usize,
    most: usize,
}

impl<'a> Way<'a> {
    /// Bare frames; those longer than `room` bytes leave in IP fragments.
    pub(super) fn classic(socket: &'a Socket, name: &'a Name, room: usize) -> Way<'a> {
        Way { socket, name, has_header: false, room, most: UDP_PAYLOAD_MAX }
    }

    /// Frames of at most `room` bytes, with VXLAN headers.
    pub(super) fn vxlan(socket: &'a Socket, name: &'a Name, room: usize) -> Way<'a> {
        Way { socket, name, has_header: true, room, most: room }
    }

    /// Adds the encapsulation header, if any.
    #[inline]
    fn put_header(&self, out: &mut Sending<'_>, frame: &Frame) {
        if self.has_header {
            out.gather.copy(&vxlan::header(frame.network.get()));
        }
    }

    /// Flushes if necessary, so that one more datagram with `bytes` of copies fits.
    #[inline]
    fn make_room(&self, out: &mut Sending<'_>, bytes: usize) {
        if !out.gather.has_room(1, SEGMENTS_MAX + 1, bytes + vxlan::HEADER_LEN) {
            self.flush(out);
        }
    }

    /// Sends the gathered datagrams.
    pub(super) fn flush(&self, out: &mut Sending<'_>) {
        // Never stops early: a datagram that cannot be sent counts as dropped.
        _ = out.flush(self.socket, self.name, false);
    }

    /// Finishes a datagram with `len` bytes of frame `index`.
    #[inline]
    fn end(&self, out: &mut Sending<'_>, index: u16, len: usize) {
        let message = out.gather.end_datagram(len <= self.room);
        out.gather.record(index, len, message, message);
    }

    /// Sends one frame, with checksum or segmentation as needed.
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
            // Cannot fail: the metadata was checked against the frame's length.
            debug_assert!(summed);
            self.end(out, index, frame.len());
        }
    }

    /// Sends a frame in segments.
    fn put_segments(&self, out: &mut Sending<'_>, index: u16, cut: &Cut) {
        let frame = out.frame(index);
        // One frame arrived, so every further segment counts as a copy.
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
