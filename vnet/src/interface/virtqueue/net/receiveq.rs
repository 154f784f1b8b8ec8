//! Delivery of frames into a guest's receiveq (virtio 1.2 sections 5.1.6.3 and 5.1.6.4): each frame is copied into one chain, or
//! into several if mergeable buffers were negotiated. Offloads that the guest did not negotiate are finished in software first.

use super::format::{Format, Owner};
use crate::copy::copy;
use crate::frame::{Batch, DropSink, Frame, Room, Segment, Selection};
use crate::interface::piece_exceeds_mtu;
use crate::interface::virtqueue::chain::{Buffer, CHAIN_MAX};
use crate::interface::virtqueue::split::{Ring, RingError};
use crate::stats::DropReason;
use crate::wire::offload::{F_DATA_VALID, Offload, VIRTIO_NET_HDR_LEN};
use crate::wire::segment;

/// Maximum number of chains that one frame is spread over (MRG_RXBUF): 65 553 bytes in chains of 257 bytes.
pub const MERGE_MAX: usize = 256;
/// Maximum number of buffers in those chains.
pub const BUFFERS_MAX: usize = 1024;

/// Reason why a frame was not delivered into the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Refused {
    Dropped(DropReason),
    Broken(RingError),
}

impl From<RingError> for Refused {
    fn from(error: RingError) -> Refused {
        Refused::Broken(error)
    }
}

/// Copies frames into a receiveq. Holds the scratch memory for that, so that no frame allocates.
#[derive(Debug)]
pub struct Giver {
    buffers: Vec<Buffer>,
    /// Chains gathered for one frame, each with its head and its capacity in bytes.
    chains: Vec<(u16, usize)>,
    /// The parts of the buffers that hold the frame itself, without its header; see [`Giver::land`].
    room: Vec<Room>,
    /// Scratch memory for a frame whose offloads are finished in software; allocated for the first such frame.
    scratch: Vec<u8>,
}

impl Default for Giver {
    fn default() -> Giver {
        Giver {
            buffers: Vec::with_capacity(BUFFERS_MAX),
            chains: Vec::with_capacity(MERGE_MAX),
            room: Vec::with_capacity(BUFFERS_MAX),
            scratch: Vec::new(),
        }
    }
}

/// A frame, or a piece that a super-frame was cut into.
struct Piece<'a> {
    /// Index of the frame in its batch.
    index: u16,
    offload: Offload,
    /// Total length of the segments in bytes.
    len: usize,
    segments: &'a [Segment],
}

impl Giver {
    /// Copies frames into a receiveq and counts each one; drops are reported to `drops`. The caller must publish the ring.
    ///
    /// # Errors
    /// The ring is broken; the remaining frames are counted as dropped.
    pub fn give(
        &mut self,
        ring: &mut Ring,
        owner: &Owner<'_>,
        frames: Selection<'_>,
        drops: &mut DropSink,
    ) -> Result<(), RingError> {
        let batch = frames.batch;
        let mut to = Delivery { ring, owner, batch, frames: 0, bytes: 0, broken: None, drops };
        if let Err(error) = to.ring.ensure(frames.which.len()) {
            to.broken = Some(error);
        }
        for (index, frame) in frames.frames() {
            if frame.offload.fits(&owner.format.accepts) {
                let segments = frames.batch.segments(frame);
                let piece = Piece { index, offload: frame.offload, len: frame.len(), segments };
                self.put_counted(&mut to, &piece);
            } else {
                self.finish_and_put(&mut to, frames, index);
            }
        }
        owner.stats.delivered(to.frames, to.bytes);
        to.broken.map_or(Ok(()), Err)
    }

    /// Slow path: finishes offloads that the guest did not negotiate in a private copy, and delivers the resulting pieces.
    #[cold]
    fn finish_and_put(&mut self, to: &mut Delivery<'_>, frames: Selection<'_>, index: u16) {
        let frame: &Frame = frames.batch.frame(usize::from(index));
        let mut scratch = std::mem::take(&mut self.scratch);
        scratch.resize(frame.len().max(scratch.len()), 0);
        let len = frames.batch.copy_to(frame, &mut scratch);
        let owner = to.owner;
        let mut pieces = 0;
        let mut emit = |piece: &[u8], offload: Offload| {
            pieces += 1;
            let segments = &[Segment::new(piece.as_ptr(), piece.len())];
            let piece = Piece { index, offload, len: piece.len(), segments };
            self.put_counted(to, &piece);
        };
        let finished = segment::finish(&mut scratch[..len], &frame.offload, &owner.format.accepts, &mut emit);
        self.scratch = scratch;
        match finished {
            Ok(()) => owner.stats.copies.add(pieces - 1),
            Err(_) => to.drops.dropped(owner.stats, DropReason::Unsegmentable, index, 1),
        }
    }

    /// Copies one piece into the ring and counts it as delivered, or as dropped with the reason.
    #[inline]
    fn put_counted(&mut self, to: &mut Delivery<'_>, piece: &Piece<'_>) {
        let owner = to.owner;
        let outcome = if to.broken.is_some() {
            Err(Refused::Dropped(DropReason::NotReady))
        } else if piece_exceeds_mtu(&piece.offload, piece.len, owner.mtu) {
            owner.stats.last_oversize.note(to.batch.frame(piece.index.into()).sent());
            Err(Refused::Dropped(DropReason::MtuExceeded))
        } else {
            self.put(to.ring, &owner.format, piece)
        };
        match outcome {
            Ok(()) => {
                to.frames += 1;
                to.bytes += piece.len as u64;
            }
            Err(Refused::Dropped(reason)) => to.drops.dropped(owner.stats, reason, piece.index, 1),
            Err(Refused::Broken(error)) => {
                to.drops.dropped(owner.stats, DropReason::NotReady, piece.index, 1);
                to.broken = Some(error);
            }
        }
    }

    /// Copies one piece into the ring.
    #[inline]
    fn put(&mut self, ring: &mut Ring, format: &Format, piece: &Piece<'_>) -> Result<(), Refused> {
        let offload = guest_offload(&piece.offload, format);
        let total = format.header_len + piece.len;
        let head = ring.next()?.ok_or(Refused::Dropped(DropReason::NoBuffer))?;
        if let Some(buffer) = head.single_writable()
            && buffer.len >= total
        {
            let (first, rest) = offload.to_virtio_words(1);
            let rest = rest.to_le_bytes();
            let mut to = buffer.ptr;
            // SAFETY: the buffer is mapped and has `total` bytes: enough for a header of either length and all segments, whose
            // lengths add up to `len`. Segments are readable by the contract of their creator.
            unsafe {
                to.cast::<[u8; 8]>().write_unaligned(first.to_le_bytes());
                if format.header_len == VIRTIO_NET_HDR_LEN {
                    to.add(8).cast::<[u8; 4]>().write_unaligned(rest);
                } else {
                    to.add(8).cast::<[u8; 2]>().write_unaligned([rest[0], rest[1]]);
                }
                to = to.add(format.header_len);
                for segment in piece.segments {
                    copy(segment.as_ptr(), to, segment.len());
                    to = to.add(segment.len());
                }
            }
            ring.wrote(Buffer { ptr: buffer.ptr, len: total });
            ring.complete(head.index, total as u32);
            return Ok(());
        }
        ring.put_back(1);
        self.put_spread(ring, format, &Piece { offload, ..*piece })
    }

    /// Copies one piece into a chain of several buffers, or into several chains.
    fn put_spread(&mut self, ring: &mut Ring, format: &Format, piece: &Piece<'_>) -> Result<(), Refused> {
        let total = format.header_len + piece.len;
        self.gather(ring, format, total)?;
        let header = piece.offload.to_virtio(self.chains.len() as u16);
        let mut out = Writer { buffers: &self.buffers, offset: 0 };
        out.write(header.as_ptr(), format.header_len);
        piece.segments.iter().for_each(|s| out.write(s.as_ptr(), s.len()));
        self.complete(ring, total);
        Ok(())
    }

    /// Marks the first `total` bytes of the gathered buffers as written, if dirty pages are logged.
    fn wrote(&self, ring: &Ring, total: usize) {
        if !ring.logs() {
            return;
        }
        let mut left = total;
        for buffer in &self.buffers {
            // A guest may claim up to 4 GiB per buffer, so only the part that the frame reaches is marked.
            let len = left.min(buffer.len);
            ring.wrote(Buffer { ptr: buffer.ptr, len });
            left -= len;
            if left == 0 {
                break;
            }
        }
    }

    /// Returns the gathered chains to the driver with `total` bytes written.
    fn complete(&mut self, ring: &mut Ring, total: usize) {
        self.wrote(ring, total);
        let mut left = total;
        for (index, room) in &self.chains {
            let part = left.min(*room);
            ring.complete(*index, part as u32);
            left -= part;
        }
    }

    /// Lets `fill` write a frame of `len` bytes directly into the receiveq's buffers. `fill` returns whether it wrote the frame;
    /// if not, the chains stay in the ring. Returns true if the frame was delivered and counted, else false; `fill` is not called
    /// if the buffers have too little space. The caller must publish the ring in either case.
    ///
    /// # Errors
    /// The ring is broken.
    pub fn land(
        &mut self,
        ring: &mut Ring,
        owner: &Owner<'_>,
        (offload, len): (&Offload, usize),
        fill: &mut dyn FnMut(&[Room]) -> bool,
    ) -> Result<bool, RingError> {
        let format = &owner.format;
        if !offload.fits(&format.accepts) || piece_exceeds_mtu(offload, len, owner.mtu) {
            return Ok(false);
        }
        let total = format.header_len + len;
        match self.gather(ring, format, total) {
            Ok(()) => {}
            Err(Refused::Dropped(_)) => return Ok(false),
            Err(Refused::Broken(error)) => return Err(error),
        }
        self.room.clear();
        let (mut skip, mut left) = (format.header_len, len);
        for buffer in &self.buffers {
            let start = skip.min(buffer.len);
            let part = left.min(buffer.len - start);
            (skip, left) = (skip - start, left - part);
            if part > 0 {
                self.room.push(Room::new(buffer.ptr.wrapping_add(start), part));
            }
        }
        if !fill(&self.room) {
            // `fill` may have written to the room even if it failed. The header was not written.
            self.room.iter().for_each(|room| ring.wrote(Buffer { ptr: room.as_ptr(), len: room.len() }));
            ring.put_back(self.chains.len() as u16);
            return Ok(false);
        }
        let header = guest_offload(offload, format).to_virtio(self.chains.len() as u16);
        Writer { buffers: &self.buffers, offset: 0 }.write(header.as_ptr(), format.header_len);
        self.complete(ring, total);
        owner.stats.delivered(1, len as u64);
        Ok(true)
    }

    /// Takes as many chains as `total` bytes need: one, or up to [`MERGE_MAX`] with MRG_RXBUF.
    ///
    /// If too few chains are available, they stay in the ring. A malformed chain is returned empty together with those before it,
    /// because order is kept, and the frame is dropped. So each frame encounters at most one malformed chain.
    fn gather(&mut self, ring: &mut Ring, format: &Format, total: usize) -> Result<(), Refused> {
        self.buffers.clear();
        self.chains.clear();
        let mut room = 0;
        while room < total {
            let limit = if format.mergeable { MERGE_MAX } else { 1 };
            let next = if self.chains.len() < limit { ring.next()? } else { None };
            let Some(head) = next else {
                ring.put_back(self.chains.len() as u16);
                return Err(Refused::Dropped(DropReason::NoBuffer));
            };
            let before = self.buffers.len();
            let walked = ring.walk(&head, &mut self.buffers);
            if !matches!(walked, Ok(0)) || self.buffers.len() + CHAIN_MAX > BUFFERS_MAX {
                tracing::debug!(?walked, buffers = self.buffers.len(), "receive chain refused");
                self.chains.iter().for_each(|(index, _)| ring.complete(*index, 0));
                ring.complete(head.index, 0);
                return Err(Refused::Dropped(DropReason::BadChain));
            }
            let chain_room = self.buffers[before..].iter().map(|b| b.len).sum();
            self.chains.push((head.index, chain_room));
            room += chain_room;
        }
        Ok(())
    }
}

/// The offload metadata that the guest may see.
#[inline]
fn guest_offload(offload: &Offload, format: &Format) -> Offload {
    // Without GUEST_CSUM, flags must be zero (virtio 1.2 section 5.1.6.4.1).
    let cleared = if format.accepts.csum { 0 } else { F_DATA_VALID };
    Offload { flags: offload.flags & !cleared, ..*offload }
}

/// The receiveq of one call to [`Giver::give`], and its counts of delivered frames, which are added to the counters once at the
/// end.
struct Delivery<'a> {
    ring: &'a mut Ring,
    owner: &'a Owner<'a>,
    batch: &'a Batch,
    frames: u64,
    bytes: u64,
    broken: Option<RingError>,
    drops: &'a mut DropSink,
}

/// Writes sequentially into buffers that are large enough for all of the data.
struct Writer<'a> {
    buffers: &'a [Buffer],
    offset: usize,
}

impl Writer<'_> {
    #[inline]
    fn write(&mut self, mut from: *const u8, mut len: usize) {
        while len != 0 {
            let Some(buffer) = self.buffers.first() else { return };
            let part = len.min(buffer.len - self.offset);
            // SAFETY: `part` bytes remain in the mapped buffer, and are readable at `from` by the contract of the segment's
            // creator.
            unsafe { copy(from, buffer.ptr.add(self.offset), part) };
            from = from.wrapping_add(part);
            len -= part;
            self.offset += part;
            if self.offset == buffer.len {
                self.buffers = &self.buffers[1..];
                self.offset = 0;
            }
        }
    }
}
