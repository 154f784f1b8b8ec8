//! Frames, and the batch that carries them through the data plane.
//!
//! A frame is a list of segments. The first is a private copy of its first bytes, its *head*: the bytes that are checked and
//! routed are the bytes that are sent, even when a hostile guest writes to its memory in between. The other segments point into
//! guest memory or a receive buffer; vnet never interprets them, it only copies them or passes them to the kernel. A frame is
//! copied at most once.
//!
//! A source fills a [`Batch`], and the dispatcher runs it to completion and clears it. A batch allocates all its memory up front,
//! and nothing while frames flow.

mod cost;
mod drop_sink;
mod hold;
#[cfg(test)]
mod hold_model;
mod ids;
mod reader;
mod room;
/// Holds are built from these; their model takes loom's.
mod sync {
    pub(super) use std::sync::Arc;
    pub(super) use std::sync::atomic::{AtomicU32, Ordering};
}

use std::sync::Arc;

pub use cost::{COST_MAX, COST_MIN};
pub use drop_sink::{DropSink, DroppedFrame, Refusal};
pub use hold::{Hold, Holds};
pub use ids::{NetworkId, PortId};
pub use reader::Reader;
pub use room::Room;

use crate::copy::copy;
use crate::scratch::Scratch;
use crate::stats::{DropReason, Sent};
use crate::wire::ethernet::{self, HEADER_LEN, Mac, VLAN_TAG_LEN};
use crate::wire::offload::Offload;

/// Largest interface MTU in bytes.
pub const MTU_MAX: usize = 65_535;
/// Largest frame in bytes: MTU, Ethernet header, one VLAN tag.
pub const FRAME_MAX: usize = MTU_MAX + HEADER_LEN + VLAN_TAG_LEN;
/// Bytes of a frame's head: large enough for Ethernet, two tags, IPv6 and a TCP header.
pub const HEAD_MAX: usize = 128;
/// Maximum number of frames in one batch: enough to amortise a notification, few enough to keep all heads in the L1 cache (8
/// KiB).
pub const BATCH_MAX: usize = 64;
/// Size in bytes of the memory that a batch provides to sources that read frames (TAP): eight frames of maximum size, so that a
/// batch of super-frames stays in the L2 cache.
const ARENA_LEN: usize = 8 * (FRAME_MAX + 128);
/// Maximum number of segments of one frame: those of the longest descriptor chain, and the head.
pub const SEGMENTS_MAX: usize = 256 + 1;

/// A contiguous run of a frame's bytes. Same layout as `struct iovec`.
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

    /// Pointer to the first byte.
    #[inline]
    pub fn as_ptr(&self) -> *const u8 {
        self.base
    }

    /// Length in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// True when the segment has no bytes.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// At most `len` bytes from `start`; clamped to the segment.
    #[inline]
    pub fn slice(&self, start: usize, len: usize) -> Segment {
        let start = start.min(self.len);
        Segment { base: self.base.wrapping_add(start), len: len.min(self.len - start) }
    }
}

/// Ingress port and network that all frames of a batch share, because one interface sent them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Origin {
    /// The interface's port.
    pub port: PortId,
    /// The interface's network.
    pub network: NetworkId,
}

/// One frame of a batch.
#[derive(Clone, Copy, Debug)]
pub struct Frame {
    /// Ingress port.
    pub from: PortId,
    /// Network of the frame.
    pub network: NetworkId,
    /// Destination MAC, from the private head.
    pub dst: Mac,
    /// Source MAC, from the private head.
    pub src: Mac,
    /// Offload metadata, checked against the length.
    pub offload: Offload,
    /// Number of hops taken so far (3 bits of the native header).
    pub hops: u8,
    len: u32,
    first: u32,
    count: u32,
    /// Identifies the frame's memory to its interface for [`Batch::hold`]; [`NO_SLOT`] when the memory cannot be held.
    slot: u16,
}

/// Slot of a frame whose memory is valid only until its batch is cleared.
const NO_SLOT: u16 = u16::MAX;

impl Frame {
    /// Length in bytes, without encapsulation and virtio-net header.
    #[inline]
    #[expect(clippy::len_without_is_empty, reason = "a frame has at least an Ethernet header")]
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// Sender of the frame, for a [`LastSender`](crate::stats::LastSender).
    pub fn sent(&self) -> Sent {
        Sent { mac: self.src.0, port: self.from.0, len: self.len() }
    }
}

/// Reason to refuse bytes as a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// The frame is shorter than an Ethernet header.
    #[error("shorter than an Ethernet header")]
    TooShort,
    /// The frame is longer than [`FRAME_MAX`].
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

/// Up to [`BATCH_MAX`] frames and their segments.
pub struct Batch {
    frames: Vec<Frame>,
    /// Maximum number of frames in this batch.
    limit: usize,
    segments: Vec<Segment>,
    /// The head of frame `i` at `i * HEAD_MAX`.
    heads: Scratch,
    /// Memory for sources that read frames; the first `arena_used` bytes are in use.
    arena: Scratch,
    arena_used: usize,
    /// Work that the batch makes, and its upper bound.
    cost: u64,
    budget: u64,
    /// See [`Batch::excess`].
    excess: usize,
    /// Hold counts of the queue that the frames came from, if the queue supports holds.
    holds: Option<Arc<Holds>>,
}

// SAFETY: the raw pointers in `segments` are dereferenced only while their memory is readable (the contract of `Builder::push`),
// and a cleared batch has none. Moving a batch to another thread adds no access.
unsafe impl Send for Batch {}

impl Default for Batch {
    fn default() -> Batch {
        Batch::new()
    }
}

impl Batch {
    /// An empty batch for [`BATCH_MAX`] frames.
    pub fn new() -> Batch {
        Batch::of(BATCH_MAX)
    }

    /// An empty batch for at most `limit` frames, clamped to 1..=[`BATCH_MAX`].
    pub fn of(limit: usize) -> Batch {
        Batch {
            limit: limit.clamp(1, BATCH_MAX),
            frames: Vec::with_capacity(BATCH_MAX),
            // Pages that no frame uses are never touched.
            segments: Vec::with_capacity(BATCH_MAX * SEGMENTS_MAX),
            heads: Scratch::new(BATCH_MAX * HEAD_MAX),
            arena: Scratch::new(ARENA_LEN),
            arena_used: 0,
            cost: 0,
            excess: 0,
            budget: u64::MAX,
            holds: None,
        }
    }

    /// The frames in order of arrival.
    #[inline]
    pub fn frames(&self) -> &[Frame] {
        &self.frames
    }

    /// The frame at `index`.
    #[inline]
    pub fn frame(&self, index: usize) -> &Frame {
        &self.frames[index]
    }

    /// Number of frames.
    #[inline]
    pub fn len(&self) -> usize {
        self.frames.len()
    }

    /// True when the batch has no frames.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// Maximum number of frames in this batch, at least 1.
    #[inline]
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// True when the batch has `limit` frames.
    #[inline]
    pub fn is_full(&self) -> bool {
        self.frames.len() == self.limit
    }

    /// Bounds the work of this batch: a source that [can stop](Batch::is_spent) adds frames until their cost reaches `budget`.
    #[inline]
    pub fn set_budget(&mut self, budget: u64) {
        self.budget = budget;
    }

    /// Work that the batch makes, in bytes. Counts segments, pieces of memory and refused chains besides the frames' bytes: a
    /// super-frame of 64 KiB with a `gso_size` of 48 makes 1 400 frames for a guest without segmentation offload.
    #[inline]
    pub fn cost(&self) -> u64 {
        self.cost
    }

    /// Forgets the cost of the frames so far: they were charged in the turn in which they were read, and have waited since.
    #[inline]
    pub fn restart_cost(&mut self) {
        (self.cost, self.excess) = (0, 0);
    }

    /// Descriptors and segments of all frames and refused chains beyond those that a driver needs (`cost::excess`).
    #[inline]
    pub fn excess(&self) -> usize {
        self.excess
    }

    /// True when the cost has reached the budget.
    #[inline]
    pub fn is_spent(&self) -> bool {
        self.cost >= self.budget
    }

    /// Adds the cost of a refused chain of `pieces` descriptors.
    #[inline]
    pub fn charge_refused(&mut self, pieces: usize) {
        self.cost += cost::of_refused(pieces);
        self.excess += cost::excess_pieces(0, pieces);
    }

    /// Removes all frames; keeps the memory.
    #[inline]
    pub fn clear(&mut self) {
        (self.cost, self.excess) = (0, 0);
        self.budget = u64::MAX;
        self.frames.clear();
        self.segments.clear();
        self.arena_used = 0;
        self.holds = None;
    }

    /// Removes the frames for whose index `keep` returns false. Until the batch is cleared, no frame may be added.
    pub fn retain(&mut self, mut keep: impl FnMut(usize) -> bool) {
        let mut index = 0;
        self.frames.retain(|_| {
            index += 1;
            keep(index - 1)
        });
    }

    /// Lets senders hold the memory of frames added from now on beyond the life of the batch; see [`Batch::set_slot`].
    #[inline]
    pub fn set_holds(&mut self, holds: Arc<Holds>) {
        self.holds = Some(holds);
    }

    /// Sets the slot of the last frame's memory.
    #[inline]
    pub fn set_slot(&mut self, slot: u16) {
        if let Some(frame) = self.frames.last_mut() {
            frame.slot = slot;
        }
    }

    /// True when [`Batch::hold`] can hold the frame's memory.
    #[inline]
    pub fn can_hold(&self, frame: &Frame) -> bool {
        frame.slot != NO_SLOT && self.holds.is_some()
    }

    /// Keeps all segments of the frame but the first valid after the batch is cleared, for as long as the hold lives. `None` when
    /// the frame's source does not support holds. The memory still belongs to the guest, which may write to it at any time.
    #[inline]
    pub fn hold(&self, frame: &Frame) -> Option<Hold> {
        Hold::new(self.holds.as_ref()?, frame.slot)
    }

    /// At least `len` bytes of the batch's own memory, for the caller to read the next frame into. `None` when that memory is
    /// used up.
    #[inline]
    pub fn spare(&mut self, len: usize) -> Option<&mut [u8]> {
        let room = self.arena_used..self.arena.len();
        (room.len() >= len && self.frames.len() < self.limit).then(|| self.arena.bytes_mut(room))
    }

    /// Adds a frame made of bytes `skip..len` of the memory from [`Batch::spare`].
    ///
    /// # Panics
    /// When `len` exceeds that memory.
    #[inline]
    pub fn push_spare(
        &mut self,
        skip: usize,
        len: usize,
        from: Origin,
        offload: Offload,
    ) -> Result<(), FrameError> {
        assert!(len <= self.arena.len() - self.arena_used, "more bytes than the spare memory has");
        let segment = Segment::new(self.arena.ptr(self.arena_used), len).slice(skip, len);
        // Aligns the next frame, so that two frames never share a cache line.
        self.arena_used = (self.arena_used + len).next_multiple_of(64).min(self.arena.len());
        let mut builder = self.begin();
        // SAFETY: the arena lives as long as the batch, and these bytes do not change before `clear`: `spare` hands out
        // only bytes behind `arena_used`.
        unsafe { builder.push_stable(segment) };
        builder.finish(from.port, from.network, offload, 0)
    }

    /// The segments of a frame, head first. Their lengths add up to the frame's length.
    #[inline]
    pub fn segments(&self, frame: &Frame) -> &[Segment] {
        &self.segments[frame.first as usize..][..frame.count as usize]
    }

    /// The frame's head: at least `min(len, HEAD_MAX)` bytes, in memory that no guest can change.
    #[inline]
    pub fn head(&self, frame: &Frame) -> &[u8] {
        let head = self.segments[frame.first as usize];
        // SAFETY: `Builder::finish` made the first segment either from `heads`, which this batch owns and does not write
        // to before `clear`, or from memory that the caller of `Builder::push_stable` promised to keep unchanged.
        unsafe { std::slice::from_raw_parts(head.base, head.len) }
    }

    /// Starts a frame.
    ///
    /// # Panics
    /// When the batch is full; see [`Batch::is_full`].
    #[inline]
    pub fn begin(&mut self) -> Builder<'_> {
        assert!(!self.is_full(), "batch of {} frames is full", self.limit);
        let first = self.segments.len();
        // Placeholder for the head, which `finish` fills in.
        self.segments.push(Segment::new(std::ptr::null(), 0));
        Builder { batch: self, first, len: 0, stable: true }
    }

    /// Appends the first `limit` bytes of the frame, or all of it if it is shorter, to `to`. Returns the number of bytes.
    pub fn append_to(&self, frame: &Frame, limit: usize, to: &mut Vec<u8>) -> usize {
        let wanted = frame.len().min(limit);
        to.reserve(wanted);
        let mut left = wanted;
        for segment in self.segments(frame) {
            let len = segment.len.min(left);
            let at = to.len();
            // Raw pointers, never references: a guest may write to the source at the same time.
            // SAFETY: the segment is readable until the batch is cleared (contract of `Builder::push`). `reserve` made room for
            // `wanted` bytes, of which `left >= len` are still free; `set_len` follows the copy, so it covers initialised bytes only.
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

    /// Reads the frame piece by piece, from its first byte on.
    #[inline]
    pub fn reader(&self, frame: &Frame) -> Reader<'_> {
        Reader::new(self.segments(frame))
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

    /// Selects other frames of the same batch.
    #[inline]
    pub fn only<'b>(self, which: &'b [u16]) -> Selection<'b>
    where
        'a: 'b,
    {
        Selection { batch: self.batch, which }
    }
}

/// A frame under construction. Dropped without [`Builder::finish`], it leaves the batch unchanged.
pub struct Builder<'a> {
    batch: &'a mut Batch,
    first: usize,
    len: usize,
    stable: bool,
}

impl Builder<'_> {
    /// Appends bytes that a guest may write to at any time.
    ///
    /// # Safety
    /// The segment's memory must stay mapped and readable until the batch is cleared.
    #[inline]
    pub unsafe fn push(&mut self, segment: Segment) {
        self.stable = false;
        self.add(segment);
    }

    /// Appends bytes that do not change while the batch uses them, so that the head need not be copied.
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

    /// Length so far in bytes.
    #[inline]
    #[expect(clippy::len_without_is_empty, reason = "only the length is asked for")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Adds the frame to the batch: copies its head, checks its length and offload metadata, and reads its addresses.
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
        let pieces = self.batch.segments.len() - self.first;
        self.batch.cost += cost::of(self.len, pieces, &offload);
        self.batch.excess += cost::excess(self.len, pieces, &offload);
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

    /// Turns the first segment into the head: the frame's first `min(len, HEAD_MAX)` bytes in memory that no guest can change.
    #[inline]
    fn settle_head(&mut self) {
        let wanted = self.len.min(HEAD_MAX);
        let segments = &mut self.batch.segments;
        if self.stable && segments[self.first + 1].len >= wanted {
            // Nothing to copy: the first stable segment becomes the head and replaces the placeholder.
            segments.remove(self.first);
            return;
        }
        let place = self.batch.frames.len() * HEAD_MAX;
        let head = self.batch.heads.bytes_mut(place..place + HEAD_MAX);
        if let [_, only] = segments[self.first..]
            && only.len == wanted
        {
            // A small frame in one segment, the most common case: all of it becomes the head. SAFETY: as for the copy below.
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
            // SAFETY: readable by the contract of `push`; `head` belongs to this batch, has HEAD_MAX >= at + part.len bytes, and
            // no segment of an unfinished frame points into it.
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
