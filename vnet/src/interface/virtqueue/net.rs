//! Frames in and out of virtqueues (virtio 1.2 section 5.1.6).
//!
//! *Transmit* is the guest's word for what enters the core: [`take`] makes a frame of each chain, in place. *Receive* is
//! the guest's word for what leaves it: [`Giver::give`] copies a frame into as many chains as it needs.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::copy::copy;
use crate::frame::{BATCH_MAX, Batch, DropSink, Frame, Holds, NetworkId, PortId, Room, Segment, Selection};
use crate::interface::piece_exceeds_mtu;
use crate::stats::{DropReason, PortStats};
use crate::wire::offload::{Accepts, F_DATA_VALID, F_NEEDS_CSUM, Offload, VIRTIO_NET_HDR_LEN};
use crate::wire::segment;

use super::{Buffer, CHAIN_MAX, Ring, RingError};

/// Bytes of the header of legacy drivers that negotiated neither VERSION_1 nor MRG_RXBUF: no `num_buffers`.
pub const LEGACY_HDR_LEN: usize = 10;
/// Chains that one frame may be spread over (MRG_RXBUF): 65 553 bytes in chains of 257 bytes.
pub const MERGE_MAX: usize = 256;
/// Buffers in those chains.
pub const BUFFERS_MAX: usize = 1024;

/// What was negotiated on how frames look in a ring.
#[derive(Clone, Copy, Debug)]
pub struct Format {
    /// Bytes of the virtio-net header: 12, or [`LEGACY_HDR_LEN`].
    pub header_len: usize,
    /// MRG_RXBUF: a frame may be spread over several chains.
    pub mergeable: bool,
    /// What the guest takes unfinished.
    pub accepts: Accepts,
}

/// Whose frames they are, and how they look in the rings.
#[derive(Clone, Copy, Debug)]
pub struct Owner<'a> {
    /// The interface's port.
    pub port: PortId,
    /// Its network.
    pub network: NetworkId,
    /// Its MTU in bytes.
    pub mtu: usize,
    /// Its counters.
    pub stats: &'a PortStats,
    /// What was negotiated.
    pub format: Format,
}

/// The chains of a guest's transmit ring from [`take`] to [`Taken::give_back`], or longer while their memory is held (see
/// [`Holds`]). Belongs to one ring.
#[derive(Debug)]
pub struct Taken {
    /// Of the last burst.
    heads: [u16; BATCH_MAX],
    count: usize,
    /// Of earlier bursts, oldest first: held themselves, or behind one that is.
    kept: VecDeque<u16>,
    /// A chain's slot is its place in the ring.
    holds: Arc<Holds>,
    /// Room for the buffers of one chain.
    buffers: Vec<Buffer>,
}

impl Default for Taken {
    fn default() -> Taken {
        Taken {
            heads: [0; BATCH_MAX],
            count: 0,
            kept: VecDeque::new(),
            holds: Holds::new(0),
            buffers: Vec::with_capacity(CHAIN_MAX),
        }
    }
}

impl Taken {
    /// Gives the chains back unread bytes or not, in order, up to the first one whose memory is held. Returns true when the
    /// guest wants to know.
    pub fn give_back(&mut self, ring: &mut Ring) -> bool {
        let heads = &self.heads[..std::mem::take(&mut self.count)];
        if self.kept.is_empty() && !self.holds.any() {
            heads.iter().for_each(|index| ring.complete(*index, 0));
            return ring.publish();
        }
        self.kept.extend(heads);
        self.reclaim(ring)
    }

    /// Gives back those chains kept before that are held no longer. Returns true when the guest wants to know.
    pub fn reclaim(&mut self, ring: &mut Ring) -> bool {
        while let Some(index) = self.kept.front()
            && !self.holds.is_held(slot(ring, ring.completed()))
        {
            ring.complete(*index, 0);
            self.kept.pop_front();
        }
        ring.publish()
    }

    /// True while chains are kept.
    pub fn is_held(&self) -> bool {
        !self.kept.is_empty()
    }

    /// Makes room for the chains of `ring`, which bound what is kept.
    fn fit(&mut self, ring: &Ring) {
        if self.holds.len() != usize::from(ring.size()) {
            self.holds = Holds::new(ring.size());
            self.kept = VecDeque::with_capacity(usize::from(ring.size()));
        }
    }
}

/// The slot of the chain at `position` of the available ring.
#[inline]
fn slot(ring: &Ring, position: u16) -> u16 {
    position & (ring.size() - 1)
}

/// Fills `batch` with the frames that wait on a guest's transmit ring, at most a batch. Returns the number of chains taken,
/// refused ones included, which [`Taken::give_back`] must complete once the frames are done with.
///
/// The frames point into guest memory, which `ring` keeps mapped and which can be held. No more chains are taken than the ring
/// has places, those that are kept included, whatever the guest says.
///
/// # Errors
/// The ring is broken; frames taken before stand in the batch.
pub fn take(
    ring: &mut Ring,
    taken: &mut Taken,
    owner: &Owner<'_>,
    batch: &mut Batch,
    drops: &mut DropSink,
) -> Result<usize, RingError> {
    taken.fit(ring);
    let count = ring.ensure(batch.limit().min(usize::from(ring.size()) - taken.kept.len()))?;
    if count != 0 {
        batch.set_holds(taken.holds.clone());
    }
    // Chains go back in order: where half the ring waits for a slow device, what follows is copied and cannot wait, too.
    let holdable = taken.kept.len() < usize::from(ring.size()) / 2;
    let mut bytes = 0;
    for _ in 0..count {
        let slot = slot(ring, ring.position());
        let Some(head) = ring.next()? else { break };
        taken.heads[taken.count] = head.index;
        taken.count += 1;
        let single = head.single_readable();
        let result = match single {
            Some(buffer) => frame(std::slice::from_ref(&buffer), owner, batch),
            None => {
                taken.buffers.clear();
                match ring.walk(&head, &mut taken.buffers) {
                    Ok(readable) => frame(&taken.buffers[..readable], owner, batch),
                    Err(error) => {
                        tracing::debug!(%error, port = owner.port.0, "chain refused");
                        Err((DropReason::BadChain, 0))
                    }
                }
            }
        };
        match result {
            Ok(len) => {
                if holdable {
                    batch.set_slot(slot);
                }
                bytes += len as u64;
            }
            Err((reason, len)) => drops.refused(owner.stats, owner.port, reason, len),
        }
    }
    ring.read_ahead(count);
    owner.stats.in_frames.add(batch.len() as u64);
    owner.stats.in_bytes.add(bytes);
    Ok(taken.count)
}

/// Adds one frame to the batch: header, then Ethernet. Returns its length, or why it was refused and how long it was.
#[inline]
fn frame(buffers: &[Buffer], owner: &Owner<'_>, batch: &mut Batch) -> Result<usize, (DropReason, u64)> {
    let mut header = [0; VIRTIO_NET_HDR_LEN];
    let (mut next, mut offset) =
        read_header(buffers, &mut header, owner.format.header_len).ok_or((DropReason::BadChain, 0))?;
    let mut offload = Offload::from_virtio(&header);
    // Only a device may vouch for a checksum (virtio 1.2 section 5.1.6.2).
    offload.flags &= F_NEEDS_CSUM;
    let mut builder = batch.begin();
    while let Some(buffer) = buffers.get(next) {
        let segment = Segment::new(buffer.ptr.wrapping_add(offset), buffer.len - offset);
        // SAFETY: the buffer lies in guest memory that the ring keeps mapped; its queue is locked until the batch is
        // cleared, and changes of the memory take that lock.
        unsafe { builder.push(segment) };
        offset = 0;
        next += 1;
    }
    let len = builder.len();
    match builder.finish(owner.port, owner.network, offload, 0) {
        Ok(()) => Ok(len),
        Err(error) => Err((error.into(), len as u64)),
    }
}

/// Copies the header, once, however it is spread over buffers. Returns the buffer and the offset where the frame begins;
/// `None` when the chain ends before its header does.
#[inline]
fn read_header(
    buffers: &[Buffer],
    header: &mut [u8; VIRTIO_NET_HDR_LEN],
    header_len: usize,
) -> Option<(usize, usize)> {
    if header_len == VIRTIO_NET_HDR_LEN
        && let Some(first) = buffers.first()
        && first.len >= VIRTIO_NET_HDR_LEN
    {
        // SAFETY: so many bytes are inside the buffer; the type needs no alignment.
        *header = unsafe { first.ptr.cast::<[u8; VIRTIO_NET_HDR_LEN]>().read_unaligned() };
        return Some((0, VIRTIO_NET_HDR_LEN));
    }
    gather_header(buffers, &mut header[..header_len])
}

/// The other headers: short ones, and those that are spread over buffers.
fn gather_header(buffers: &[Buffer], header: &mut [u8]) -> Option<(usize, usize)> {
    let mut at = 0;
    for (i, buffer) in buffers.iter().enumerate() {
        let part = buffer.len.min(header.len() - at);
        // SAFETY: `part` bytes are inside the buffer and inside the header, which is our own memory.
        unsafe { std::ptr::copy_nonoverlapping(buffer.ptr, header[at..].as_mut_ptr(), part) };
        at += part;
        if at == header.len() {
            return Some((i, part));
        }
    }
    None
}

/// Why a frame did not get into the ring.
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

/// What filling a guest's receive ring needs besides the ring; made once, so that no frame allocates.
#[derive(Debug)]
pub struct Giver {
    buffers: Vec<Buffer>,
    /// Chains gathered for one frame: head, bytes of room.
    chains: Vec<(u16, usize)>,
    /// Where the frame itself goes of the buffers, see [`Giver::land`].
    room: Vec<Room>,
    /// A frame that is finished in software; allocated when the first one comes.
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

/// One frame, or a piece of one, on its way into a ring.
struct Piece<'a> {
    /// The frame's index in its batch.
    index: u16,
    offload: Offload,
    len: usize,
    /// Readable memory whose lengths add up to `len`.
    segments: &'a [Segment],
}

impl Giver {
    /// Copies frames into a guest's receive ring and counts each one; drops are reported to `drops`. The caller publishes.
    ///
    /// # Errors
    /// The ring is broken; frames not delivered by then are counted as dropped.
    pub fn give(
        &mut self,
        ring: &mut Ring,
        owner: &Owner<'_>,
        frames: Selection<'_>,
        drops: &mut DropSink,
    ) -> Result<(), RingError> {
        let mut tally = Tally { frames: 0, bytes: 0, broken: None, drops };
        if let Err(error) = ring.ensure(frames.which.len()) {
            tally.broken = Some(error);
        }
        for (index, frame) in frames.frames() {
            if frame.offload.fits(&owner.format.accepts) {
                let segments = frames.batch.segments(frame);
                let piece = Piece { index, offload: frame.offload, len: frame.len(), segments };
                self.put_counted(ring, owner, &piece, &mut tally);
            } else {
                self.finish_and_put(ring, owner, (frames.batch, index), &mut tally);
            }
        }
        owner.stats.delivered(tally.frames, tally.bytes);
        tally.broken.map_or(Ok(()), Err)
    }

    /// The slow path: finishes what the guest did not negotiate, in a private copy, and puts what comes out.
    #[cold]
    fn finish_and_put(
        &mut self,
        ring: &mut Ring,
        owner: &Owner<'_>,
        (batch, index): (&Batch, u16),
        tally: &mut Tally<'_>,
    ) {
        let frame: &Frame = batch.frame(usize::from(index));
        let mut scratch = std::mem::take(&mut self.scratch);
        scratch.resize(frame.len().max(scratch.len()), 0);
        let len = batch.copy_to(frame, &mut scratch);
        let mut pieces = 0;
        let mut emit = |piece: &[u8], offload: Offload| {
            pieces += 1;
            let segments = &[Segment::new(piece.as_ptr(), piece.len())];
            let piece = Piece { index, offload, len: piece.len(), segments };
            self.put_counted(ring, owner, &piece, tally);
        };
        let finished = segment::finish(&mut scratch[..len], &frame.offload, &owner.format.accepts, &mut emit);
        self.scratch = scratch;
        match finished {
            Ok(()) => owner.stats.copies.add(pieces - 1),
            Err(_) => tally.drops.dropped(owner.stats, DropReason::Unsegmentable, index, 1),
        }
    }

    /// Copies one piece into the ring, or drops it; either way it is counted.
    #[inline]
    fn put_counted(&mut self, ring: &mut Ring, owner: &Owner<'_>, piece: &Piece<'_>, tally: &mut Tally<'_>) {
        let outcome = if tally.broken.is_some() {
            Err(Refused::Dropped(DropReason::NotReady))
        } else if piece_exceeds_mtu(&piece.offload, piece.len, owner.mtu) {
            Err(Refused::Dropped(DropReason::MtuExceeded))
        } else {
            self.put(ring, &owner.format, piece)
        };
        match outcome {
            Ok(()) => {
                tally.frames += 1;
                tally.bytes += piece.len as u64;
            }
            Err(Refused::Dropped(reason)) => tally.drops.dropped(owner.stats, reason, piece.index, 1),
            Err(Refused::Broken(error)) => {
                tally.drops.dropped(owner.stats, DropReason::NotReady, piece.index, 1);
                tally.broken = Some(error);
            }
        }
    }

    /// Copies one piece into the ring.
    #[inline]
    fn put(&mut self, ring: &mut Ring, format: &Format, piece: &Piece<'_>) -> Result<(), Refused> {
        let offload = announced(&piece.offload, format);
        let total = format.header_len + piece.len;
        let head = ring.next()?.ok_or(Refused::Dropped(DropReason::NoBuffer))?;
        if let Some(buffer) = head.single_writable()
            && buffer.len >= total
        {
            let (first, rest) = offload.to_virtio_words(1);
            let rest = rest.to_le_bytes();
            let mut to = buffer.ptr;
            // SAFETY: the buffer is mapped and has room for `total` bytes: the header, of either length, and all segments, whose
            // lengths add up to `len`. Segments are readable by the contract of whoever made them.
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

    /// Copies one piece into chains of several buffers, or several chains.
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

    /// Gives the chains gathered back with `total` bytes written to them.
    fn complete(&mut self, ring: &mut Ring, total: usize) {
        self.buffers.iter().for_each(|buffer| ring.wrote(*buffer));
        let mut left = total;
        for (index, room) in &self.chains {
            let part = left.min(*room);
            ring.complete(*index, part as u32);
            left -= part;
        }
    }

    /// Has `fill` write a frame of `len` bytes straight into a guest's receive ring. It gets the room and says whether the
    /// frame stands there; if not, the chains stay in the ring. Returns true, and has counted the frame, when it is the guest's;
    /// false when it is not, and `fill` may not even have been called. The caller publishes in any case.
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
            // Something may stand there all the same.
            self.buffers.iter().for_each(|buffer| ring.wrote(*buffer));
            ring.put_back(self.chains.len() as u16);
            return Ok(false);
        }
        let header = announced(offload, format).to_virtio(self.chains.len() as u16);
        Writer { buffers: &self.buffers, offset: 0 }.write(header.as_ptr(), format.header_len);
        self.complete(ring, total);
        owner.stats.delivered(1, len as u64);
        Ok(true)
    }

    /// Takes as many chains as `total` bytes need: one, or up to [`MERGE_MAX`] with MRG_RXBUF.
    ///
    /// When there are too few, they stay in the ring. A malformed one is given back empty, and so are those before it,
    /// because order is kept; the frame is dropped with it, so that each frame meets at most one.
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

/// What the guest is told of a frame.
#[inline]
fn announced(offload: &Offload, format: &Format) -> Offload {
    // Without GUEST_CSUM the flags are zero (virtio 1.2 section 5.1.6.4.1).
    let cleared = if format.accepts.csum { 0 } else { F_DATA_VALID };
    Offload { flags: offload.flags & !cleared, ..*offload }
}

/// What came of the frames of one call; frames delivered are counted once at its end.
struct Tally<'a> {
    frames: u64,
    bytes: u64,
    broken: Option<RingError>,
    drops: &'a mut DropSink,
}

/// Writes one after the other into buffers that have room for everything that is written.
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
            // SAFETY: `part` bytes are left in the buffer, which is mapped, and are readable at `from` by the contract of
            // whoever made the segment.
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
