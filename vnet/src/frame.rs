//! A frame on its way, and the batch it travels in.
//!
//! A frame is a list of segments: the first is a private copy of its first bytes (its *head*), so that what is checked
//! and routed is what is sent, whatever a hostile guest does to its memory meanwhile; the others point straight into
//! guest memory or a receive buffer and are never read by vnet, only copied or handed to the kernel. One copy at most.
//!
//! A [`Batch`] is filled by an interface's or a link's `receive`, lives for one call of the closure that runs it to
//! completion, and is cleared. It owns all its memory up front and never allocates on a frame's way.

mod drops;
mod hold;
mod room;

use std::fmt;
use std::sync::Arc;

pub use drops::{DropSink, DroppedFrame, Refusal};
pub use hold::{Hold, Holds};
pub use room::Room;
use serde::{Deserialize, Serialize};

use crate::copy::copy;
use crate::scratch::Scratch;
use crate::stats::DropReason;
use crate::wire::ethernet::{self, HEADER_LEN, Mac, VLAN_TAG_LEN};
use crate::wire::offload::Offload;

/// Largest interface MTU in bytes.
pub const MTU_MAX: usize = 65_535;
/// Largest frame in bytes: MTU, Ethernet header, one VLAN tag (DESIGN.md section 10).
pub const FRAME_MAX: usize = MTU_MAX + HEADER_LEN + VLAN_TAG_LEN;
/// Bytes of a frame that are copied before anybody looks at them: Ethernet, two tags, IPv6, and a TCP header fit.
pub const HEAD_MAX: usize = 128;
/// Frames in one batch. Enough to spread a notification over, few enough that heads stay in the L1 cache (8 KiB).
pub const BATCH_MAX: usize = 64;
/// Bytes that a batch offers to interfaces whose frames have to be read into memory (TAP): eight of the largest frames,
/// so that a batch of super-frames stays in the L2 cache.
const ARENA_LEN: usize = 8 * (FRAME_MAX + 128);
/// Segments of one frame: a descriptor chain's limit (DESIGN.md section 10) and the head.
pub const SEGMENTS_MAX: usize = 256 + 1;

/// A network's number in the overlay (VNI), 24 bits; network 1 is the default.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(try_from = "u32", into = "u32")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct NetworkId(u32);

impl NetworkId {
    /// The network of interfaces that do not name one.
    pub const DEFAULT: NetworkId = NetworkId(1);

    /// `None` when `id` does not fit into 24 bits.
    #[inline]
    pub const fn new(id: u32) -> Option<NetworkId> {
        if id < 1 << 24 { Some(NetworkId(id)) } else { None }
    }

    /// The number, below 2^24.
    #[inline]
    pub const fn get(self) -> u32 {
        self.0
    }
}

impl Default for NetworkId {
    fn default() -> NetworkId {
        NetworkId::DEFAULT
    }
}

impl TryFrom<u32> for NetworkId {
    type Error = String;
    fn try_from(id: u32) -> Result<NetworkId, String> {
        NetworkId::new(id).ok_or_else(|| format!("network id {id} is larger than 24 bits allow (16777215)"))
    }
}

impl From<NetworkId> for u32 {
    fn from(id: NetworkId) -> u32 {
        id.0
    }
}

impl fmt::Display for NetworkId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A place where frames enter and leave the core: the slot of an interface or a link in its port table.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct PortId(pub u16);

impl PortId {
    /// No port at all.
    pub const NONE: PortId = PortId(u16::MAX);

    /// The slot's number.
    #[inline]
    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}

/// A run of bytes of a frame: same layout as `struct iovec`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Segment {
    base: *const u8,
    len: usize,
}

impl Segment {
    /// A segment over memory that the caller keeps readable (see [`Batch::begin`]).
    #[inline]
    pub fn new(base: *const u8, len: usize) -> Segment {
        Segment { base, len }
    }

    /// First byte.
    #[inline]
    pub fn as_ptr(&self) -> *const u8 {
        self.base
    }

    /// Bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// True when there is nothing in it.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The part from `start` of at most `len` bytes; both are clamped to the segment.
    #[inline]
    pub fn slice(&self, start: usize, len: usize) -> Segment {
        let start = start.min(self.len);
        Segment { base: self.base.wrapping_add(start), len: len.min(self.len - start) }
    }
}

/// Where a batch's frames come from, when they all come from one interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Origin {
    /// The interface's port.
    pub port: PortId,
    /// The network it stands in.
    pub network: NetworkId,
}

/// What the core knows of one frame.
#[derive(Clone, Copy, Debug)]
pub struct Frame {
    /// Where it came from.
    pub from: PortId,
    /// The network it belongs to.
    pub network: NetworkId,
    /// Destination address, from the private head.
    pub dst: Mac,
    /// Source address, from the private head.
    pub src: Mac,
    /// What is left to do on it; already checked against its length.
    pub offload: Offload,
    /// Relays passed (native header, 3 bits).
    pub hops: u8,
    len: u32,
    first: u32,
    count: u32,
    /// By which its interface knows the memory it is in; [`NO_SLOT`] when that cannot be held.
    slot: u16,
}

/// The slot of a frame whose memory is its batch's only.
const NO_SLOT: u16 = u16::MAX;

impl Frame {
    /// Bytes, without any encapsulation or virtio-net header.
    #[inline]
    #[expect(clippy::len_without_is_empty, reason = "a frame has at least an Ethernet header")]
    pub fn len(&self) -> usize {
        self.len as usize
    }
}

/// Why bytes did not become a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// Fewer bytes than an Ethernet header.
    #[error("shorter than an Ethernet header")]
    TooShort,
    /// More bytes than [`FRAME_MAX`].
    #[error("longer than {FRAME_MAX} bytes")]
    TooLong,
    /// The offload metadata does not fit the frame.
    #[error(transparent)]
    Offload(#[from] crate::wire::offload::OffloadError),
}

impl From<FrameError> for DropReason {
    #[cold]
    fn from(error: FrameError) -> DropReason {
        match error {
            FrameError::TooShort => DropReason::TooShort,
            FrameError::TooLong => DropReason::TooLong,
            FrameError::Offload(_) => DropReason::BadOffload,
        }
    }
}

/// Up to [`BATCH_MAX`] frames and the segments they are made of.
pub struct Batch {
    frames: Vec<Frame>,
    /// Frames that it takes.
    limit: usize,
    segments: Vec<Segment>,
    /// The head of frame `i` at `i * HEAD_MAX`.
    heads: Scratch,
    /// What interfaces read frames into, up to `arena_used`.
    arena: Scratch,
    arena_used: usize,
    /// Of the queue that the frames came from, where their memory can be held.
    holds: Option<Arc<Holds>>,
}

// SAFETY: the raw pointers in `segments` are only followed while the memory they were made from is kept readable (the
// contract of `Builder::push`), and a cleared batch holds none; sending an empty or filled batch to another thread adds
// no access.
unsafe impl Send for Batch {}

impl Default for Batch {
    fn default() -> Batch {
        Batch::new()
    }
}

impl Batch {
    /// An empty batch with all its memory.
    pub fn new() -> Batch {
        Batch::of(BATCH_MAX)
    }

    /// The same, for at most `limit` frames: 1 to [`BATCH_MAX`].
    pub fn of(limit: usize) -> Batch {
        Batch {
            limit: limit.clamp(1, BATCH_MAX),
            frames: Vec::with_capacity(BATCH_MAX),
            // Pages of it that are never needed are never touched.
            segments: Vec::with_capacity(BATCH_MAX * SEGMENTS_MAX),
            heads: Scratch::new(BATCH_MAX * HEAD_MAX),
            arena: Scratch::new(ARENA_LEN),
            arena_used: 0,
            holds: None,
        }
    }

    /// The frames, in the order of their arrival.
    #[inline]
    pub fn frames(&self) -> &[Frame] {
        &self.frames
    }

    /// One frame.
    #[inline]
    pub fn frame(&self, index: usize) -> &Frame {
        &self.frames[index]
    }

    /// Frames in the batch.
    #[inline]
    pub fn len(&self) -> usize {
        self.frames.len()
    }

    /// True when no frame is in the batch.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// Frames that it takes, at least 1.
    #[inline]
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// True when no frame can be added.
    #[inline]
    pub fn is_full(&self) -> bool {
        self.frames.len() == self.limit
    }

    /// Forgets all frames; keeps the memory.
    #[inline]
    pub fn clear(&mut self) {
        self.frames.clear();
        self.segments.clear();
        self.arena_used = 0;
        self.holds = None;
    }

    /// Lets the memory of the frames that follow be held beyond the batch's life, see [`Batch::set_slot`].
    #[inline]
    pub fn set_holds(&mut self, holds: Arc<Holds>) {
        self.holds = Some(holds);
    }

    /// Names the slot that the memory of the last frame is known by.
    #[inline]
    pub fn set_slot(&mut self, slot: u16) {
        if let Some(frame) = self.frames.last_mut() {
            frame.slot = slot;
        }
    }

    /// True when the frame's memory, but for its head, can be held.
    #[inline]
    pub fn can_hold(&self, frame: &Frame) -> bool {
        frame.slot != NO_SLOT && self.holds.is_some()
    }

    /// Has all segments of the frame but the first stay the frame's when the batch is cleared, for as long as the hold lives.
    /// `None` when that is not possible. The memory stays a guest's: readable, and written to by whom it likes.
    #[inline]
    pub fn hold(&self, frame: &Frame) -> Option<Hold> {
        Hold::new(self.holds.as_ref()?, frame.slot)
    }

    /// Room of at least `len` bytes in the batch's own memory to read the next frame into; `None` when it is used up.
    #[inline]
    pub fn spare(&mut self, len: usize) -> Option<&mut [u8]> {
        let room = self.arena_used..self.arena.len();
        (room.len() >= len && self.frames.len() < self.limit).then(|| self.arena.bytes_mut(room))
    }

    /// Makes a frame of bytes `skip..len` of the room that [`Batch::spare`] gave.
    ///
    /// # Panics
    /// When `len` is more than that room.
    #[inline]
    pub fn push_spare(
        &mut self,
        skip: usize,
        len: usize,
        from: Origin,
        offload: Offload,
    ) -> Result<(), FrameError> {
        assert!(len <= self.arena.len() - self.arena_used, "more bytes than there was room for");
        let segment = Segment::new(self.arena.ptr(self.arena_used), len).slice(skip, len);
        // Cache lines are not shared between frames.
        self.arena_used = (self.arena_used + len).next_multiple_of(64).min(self.arena.len());
        let mut builder = self.begin();
        // SAFETY: the arena lives as long as the batch and nobody writes to these bytes before `clear`: `spare` gives
        // out only what lies behind `arena_used`.
        unsafe { builder.push_stable(segment) };
        builder.finish(from.port, from.network, offload, 0)
    }

    /// The segments of a frame, head first. Their lengths add up to the frame's length.
    #[inline]
    pub fn segments(&self, frame: &Frame) -> &[Segment] {
        &self.segments[frame.first as usize..][..frame.count as usize]
    }

    /// The frame's first bytes, at least `min(len, HEAD_MAX)`, in memory that no guest can change.
    #[inline]
    pub fn head(&self, frame: &Frame) -> &[u8] {
        let head = self.segments[frame.first as usize];
        // SAFETY: `Builder::finish` made the first segment either from `heads`, which this batch owns and does not write
        // to before `clear`, or from memory whose giver promised with `Builder::stable` that nobody writes to it.
        unsafe { std::slice::from_raw_parts(head.base, head.len) }
    }

    /// Starts a frame.
    ///
    /// # Panics
    /// When the batch is full: ask [`Batch::is_full`] first.
    #[inline]
    pub fn begin(&mut self) -> Builder<'_> {
        assert!(!self.is_full(), "batch of {} frames is full", self.limit);
        let first = self.segments.len();
        // The head's place. Empty until `finish` knows the bytes.
        self.segments.push(Segment::new(std::ptr::null(), 0));
        Builder { batch: self, first, len: 0, stable: true }
    }

    /// Appends at most the first `limit` bytes of the frame to `to` and returns how many that were.
    pub fn append_to(&self, frame: &Frame, limit: usize, to: &mut Vec<u8>) -> usize {
        let wanted = frame.len().min(limit);
        to.reserve(wanted);
        let mut left = wanted;
        for segment in self.segments(frame) {
            let len = segment.len.min(left);
            let at = to.len();
            // SAFETY: the segment is readable for its length until the batch is cleared (contract of `Builder::push`).
            // `reserve` made room for `wanted` bytes in all, of which `left >= len` are still free, in memory that is `to`'s
            // alone; the bytes are initialised when the length says so. They are copied as raw bytes, never borrowed, as a
            // guest may be writing to them.
            unsafe {
                std::ptr::copy_nonoverlapping(segment.base, to.as_mut_ptr().add(at), len);
                to.set_len(at + len);
            }
            left -= len;
        }
        wanted - left
    }

    /// Copies the whole frame to the start of `to` and returns its length.
    ///
    /// # Panics
    /// When `to` is shorter than the frame; [`FRAME_MAX`] bytes always suffice.
    pub fn copy_to(&self, frame: &Frame, to: &mut [u8]) -> usize {
        self.reader(frame).read(&mut to[..frame.len()]);
        frame.len()
    }

    /// Copies the frame piece by piece, from its first byte on.
    #[inline]
    pub fn reader(&self, frame: &Frame) -> Reader<'_> {
        Reader { segments: self.segments(frame), offset: 0 }
    }
}

/// Frames of a batch that go to one destination.
#[derive(Clone, Copy)]
pub struct Selection<'a> {
    /// The batch.
    pub batch: &'a Batch,
    /// Indices of the frames, in order of arrival.
    pub which: &'a [u16],
}

impl<'a> Selection<'a> {
    /// The frames with their indices.
    #[inline]
    pub fn frames(self) -> impl Iterator<Item = (u16, &'a Frame)> {
        self.which.iter().map(move |&index| (index, self.batch.frame(usize::from(index))))
    }

    /// The same batch, other frames.
    #[inline]
    pub fn only<'b>(self, which: &'b [u16]) -> Selection<'b>
    where
        'a: 'b,
    {
        Selection { batch: self.batch, which }
    }
}

/// A place in a frame from which it is copied.
pub struct Reader<'a> {
    segments: &'a [Segment],
    /// Bytes of the first segment that were copied.
    offset: usize,
}

impl Reader<'_> {
    /// Fills `to` with the frame's next bytes.
    ///
    /// # Panics
    /// When fewer are left.
    #[inline]
    pub fn read(&mut self, mut to: &mut [u8]) {
        while !to.is_empty() {
            let part = self.segments[0].slice(self.offset, to.len());
            let (now, later) = std::mem::take(&mut to).split_at_mut(part.len);
            // SAFETY: the segment is readable for its length until the batch, which `self` borrows, is cleared (contract of
            // `Builder::push`), and `now` is an exclusive slice of the same length, so the two cannot overlap.
            unsafe { std::ptr::copy_nonoverlapping(part.base, now.as_mut_ptr(), part.len) };
            self.skip(part.len);
            to = later;
        }
    }

    /// Goes on behind the next `len` bytes.
    ///
    /// # Panics
    /// When fewer are left.
    #[inline]
    pub fn skip(&mut self, len: usize) {
        self.offset += len;
        while let [segment, rest @ ..] = self.segments
            && self.offset >= segment.len
        {
            self.offset -= segment.len;
            self.segments = rest;
        }
        assert!(!self.segments.is_empty() || self.offset == 0, "behind the frame's end");
    }
}

/// A frame being put together; dropped without [`Builder::finish`], it leaves the batch as it was.
pub struct Builder<'a> {
    batch: &'a mut Batch,
    first: usize,
    len: usize,
    stable: bool,
}

impl Builder<'_> {
    /// Adds the next bytes of the frame, memory that a guest may write to at any time.
    ///
    /// # Safety
    /// The segment's memory must stay mapped and readable until the batch is cleared.
    #[inline]
    pub unsafe fn push(&mut self, segment: Segment) {
        self.stable = false;
        self.add(segment);
    }

    /// Adds the next bytes of the frame, memory that nobody writes to.
    ///
    /// # Safety
    /// The segment's memory must stay mapped, readable and unchanged until the batch is cleared.
    #[inline]
    pub unsafe fn push_stable(&mut self, segment: Segment) {
        self.add(segment);
    }

    #[inline]
    fn add(&mut self, segment: Segment) {
        if !segment.is_empty() {
            self.len = self.len.saturating_add(segment.len);
            self.batch.segments.push(segment);
        }
    }

    /// Bytes so far.
    #[inline]
    #[expect(clippy::len_without_is_empty, reason = "only the length is asked for")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Makes the frame: copies its head, checks length and offload metadata, reads its addresses.
    #[inline]
    pub fn finish(
        mut self,
        from: PortId,
        network: NetworkId,
        offload: Offload,
        hops: u8,
    ) -> Result<(), FrameError> {
        if self.len < HEADER_LEN {
            return Err(FrameError::TooShort);
        }
        if self.len > FRAME_MAX {
            return Err(FrameError::TooLong);
        }
        let offload = offload.checked(self.len)?;
        self.settle_head();
        let first = self.first;
        let count = self.batch.segments.len() - first;
        let frame = Frame {
            from,
            network,
            dst: Mac::default(),
            src: Mac::default(),
            offload,
            hops,
            len: self.len as u32,
            first: first as u32,
            count: count as u32,
            slot: NO_SLOT,
        };
        let (dst, src) = ethernet::addresses(self.batch.head(&frame)).ok_or(FrameError::TooShort)?;
        self.batch.frames.push(Frame { dst, src, ..frame });
        std::mem::forget(self);
        Ok(())
    }

    /// Makes the first segment hold the frame's first `min(len, HEAD_MAX)` bytes in memory that no guest can change.
    #[inline]
    fn settle_head(&mut self) {
        let wanted = self.len.min(HEAD_MAX);
        let segments = &mut self.batch.segments;
        if self.stable && segments[self.first + 1].len >= wanted {
            // Nothing to copy: the placeholder goes, the first segment is the head.
            segments.remove(self.first);
            return;
        }
        let place = self.batch.frames.len() * HEAD_MAX;
        let head = self.batch.heads.bytes_mut(place..place + HEAD_MAX);
        if let [_, only] = segments[self.first..]
            && only.len == wanted
        {
            // A small frame in one piece, the commonest by number: all of it becomes the head.
            // SAFETY: as below.
            unsafe { copy(only.base, head.as_mut_ptr(), wanted) };
            segments.truncate(self.first + 1);
            segments[self.first] = Segment::new(self.batch.heads.ptr(place), wanted);
            return;
        }
        let mut at = 0;
        let mut next = self.first + 1;
        while at < wanted {
            let segment = segments[next];
            let part = segment.slice(0, wanted - at);
            // SAFETY: readable by the contract of `push`; `head` is ours, has HEAD_MAX >= at + part.len bytes, and no
            // segment of an unfinished frame points into it.
            unsafe { std::ptr::copy_nonoverlapping(part.base, head[at..].as_mut_ptr(), part.len) };
            at += part.len;
            if part.len == segment.len {
                next += 1;
            } else {
                segments[next] = segment.slice(part.len, segment.len);
            }
        }
        segments[self.first] = Segment::new(self.batch.heads.ptr(place), wanted);
        segments.drain(self.first + 1..next);
    }
}

impl Drop for Builder<'_> {
    fn drop(&mut self) {
        self.batch.segments.truncate(self.first);
    }
}

#[cfg(test)]
mod tests;
