//! Reassembly: joins the fragments of one link into frames. Protocol state without sockets and clocks.
//!
//! The input is a burst: one run of memory with the datagrams received together. [`Reassembly::accept`] takes each fragment as a
//! header and a range in it; the last missing fragment yields the frame, as a list of ranges, without a copy.
//! [`Reassembly::settle`], at the end of the burst, copies only the fragments of incomplete frames, into memory that counts
//! against the budgets of the link and of the host.
//!
//! A frame ends exactly once, in one of these ways. Its name is then recorded as ended (duplicates.rs), so a late fragment is
//! stale and starts no new frame:
//! - *complete*: every fragment has arrived;
//! - *contradicted*: a fragment is inconsistent with the others (another size, two last fragments, a frame too long);
//! - *timed out* (reassembly timeout): incomplete [`TIMEOUT_MS`] after its first fragment;
//! - *overtaken*: the link's datagram numbers have advanced by a whole window;
//! - *refused*: no memory is left at the end of the burst; the newest frame is dropped;
//! - *flushed*: the peer has restarted, or the link was removed.
//!
//! All ways but the first count one frame as dropped for [`DropReason::Reassembly`]. A frame without any accepted fragment is
//! unknown, so only its datagrams count, as discarded. An end is remembered for at least 400 ms.
//!
//! A restarted peer uses new numbers: vnet starts from the clock, above all old numbers. A peer that restarts at 1 is detected if
//! its numbers had come far (131 072 datagrams), and all partial frames are flushed. Otherwise it recovers within 800 ms; until
//! then, fragments whose number belongs to an ended frame are taken for late ones.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use crate::frame::{FRAME_MAX, SEGMENTS_MAX};
use crate::link::native::duplicates::{MEMORY_MS, Window};
use crate::stats::{DiscardReason, DropReason, PortStats};
use crate::wire::native::Header;
use crate::wire::offload::WIRE_LEN;

/// Maximum number of fragments of a frame: a frame in a batch has this many segments behind its head.
pub const FRAGMENTS_MAX: usize = SEGMENTS_MAX - 1;
/// How long a frame may stay incomplete, in ms.
pub const TIMEOUT_MS: u64 = 200;
// The end of a frame must be remembered for as long as its late fragments may arrive.
const _: () = assert!(MEMORY_MS >= 2 * TIMEOUT_MS);
/// Maximum number of bytes in all fragments of a frame: a frame of maximum size and its metadata.
const BYTES_MAX: usize = FRAME_MAX + WIRE_LEN;
/// Maximum number of piece lists kept for reuse.
const SPARE_MAX: usize = 64;

/// A limit on reassembly memory, shared by several owners.
#[derive(Debug)]
pub struct ReassemblyBudget {
    limit: usize,
    used: AtomicUsize,
}

impl ReassemblyBudget {
    /// Reassembly memory for all links of one host, in bytes.
    pub const HOST: usize = 64 << 20;

    /// A budget of `limit` bytes.
    pub fn new(limit: usize) -> ReassemblyBudget {
        ReassemblyBudget { limit, used: AtomicUsize::new(0) }
    }

    /// Number of bytes in use.
    pub fn used(&self) -> usize {
        self.used.load(Relaxed)
    }

    fn take(&self, bytes: usize) -> bool {
        let taken = self.used.fetch_add(bytes, Relaxed) + bytes <= self.limit;
        if !taken {
            self.give(bytes);
        }
        taken
    }

    fn give(&self, bytes: usize) {
        self.used.fetch_sub(bytes, Relaxed);
    }
}

/// Memory that one incomplete frame has taken from both budgets; given back on drop.
#[derive(Debug)]
struct Charge {
    budgets: [Arc<ReassemblyBudget>; 2],
    bytes: usize,
}

impl Charge {
    fn grow(&mut self, bytes: usize) -> bool {
        let [link, host] = &self.budgets;
        if !link.take(bytes) {
            return false;
        }
        if !host.take(bytes) {
            link.give(bytes);
            return false;
        }
        self.bytes += bytes;
        true
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        for budget in &self.budgets {
            budget.give(self.bytes);
        }
    }
}

/// Range of a fragment: in the burst, or (`kept`) in the frame's own store. `len` 0: missing.
#[derive(Clone, Copy, Debug, Default)]
struct Piece {
    at: u32,
    len: u16,
    kept: bool,
}

/// An incomplete frame.
#[derive(Debug)]
struct Partial {
    id: u64,
    started_ms: u64,
    network: u32,
    hops: u8,
    offload: bool,
    /// Length in bytes of each fragment but the last; 0 while only the last has arrived.
    size: usize,
    /// Index of the last fragment, once known.
    last: Option<usize>,
    /// Pieces by fragment index, up to the highest one seen.
    pieces: Vec<Piece>,
    /// Number of pieces present.
    count: usize,
    /// Sum of their lengths in bytes.
    bytes: usize,
    /// Number of pieces still in the burst.
    in_burst: usize,
    store: Vec<u8>,
    charge: Option<Charge>,
}

enum Added {
    Incomplete,
    Complete,
    Duplicate,
    Contradiction,
}

impl Partial {
    fn new(header: &Header, now_ms: u64, pieces: Vec<Piece>) -> Partial {
        Partial {
            id: header.frame_id(),
            started_ms: now_ms,
            network: header.network,
            hops: header.hops,
            offload: false,
            size: 0,
            last: None,
            pieces,
            count: 0,
            bytes: 0,
            in_burst: 0,
            store: Vec::new(),
            charge: None,
        }
    }

    #[inline]
    fn timed_out(&self, now_ms: u64) -> bool {
        now_ms.saturating_sub(self.started_ms) >= TIMEOUT_MS
    }

    /// True when a fragment of `len` bytes is consistent with the others.
    #[inline]
    fn agrees(&self, header: &Header, len: usize) -> bool {
        let index = usize::from(header.index);
        let size = if header.last { self.size } else { len };
        let last = match self.last {
            Some(last) => Some((last, usize::from(self.pieces[last].len))),
            None => header.last.then_some((index, len)),
        };
        let end = match last {
            Some((last, len)) => last * size + len,
            None => self.pieces.len().max(index + 1) * size,
        };
        let order = match last {
            // The last fragment follows all others, is not longer than they are, and is unique.
            Some((last, last_len)) => {
                (index == last) == header.last
                    && index <= last
                    && self.pieces.len() <= last + usize::from(self.last.is_some())
                    && (size == 0 || last_len <= size)
                    && (!header.last || last_len == len)
            }
            None => true,
        };
        let metadata = index == 0 && header.offload;
        order
            && (self.size == 0 || self.size == size)
            && end <= BYTES_MAX
            && (self.network, self.hops) == (header.network, header.hops)
            && (!metadata || len >= WIRE_LEN)
    }

    #[inline]
    fn add(&mut self, header: &Header, place: &Range<usize>) -> Added {
        let (index, len) = (usize::from(header.index), place.len());
        if !self.agrees(header, len) {
            return Added::Contradiction;
        }
        if self.pieces.len() <= index {
            self.pieces.resize(index + 1, Piece::default());
        }
        let piece = &mut self.pieces[index];
        if piece.len != 0 {
            return Added::Duplicate;
        }
        *piece = Piece { at: place.start as u32, len: len as u16, kept: false };
        self.count += 1;
        self.in_burst += 1;
        self.bytes += len;
        if header.last {
            self.last = Some(index);
        } else {
            self.size = len;
        }
        if index == 0 {
            self.offload = header.offload;
        }
        match self.last {
            Some(last) if self.count == last + 1 => Added::Complete,
            _ => Added::Incomplete,
        }
    }

    /// Copies pieces from the burst to the store. Returns false when a budget is exhausted.
    fn keep(&mut self, burst: &[u8], budgets: &[Arc<ReassemblyBudget>; 2]) -> bool {
        let fixed = size_of::<Partial>() + FRAGMENTS_MAX * size_of::<Piece>();
        let wanted = self.bytes;
        let charge = match &mut self.charge {
            Some(charge) => charge,
            none => none.insert(Charge { budgets: budgets.clone(), bytes: 0 }),
        };
        if charge.bytes < fixed + wanted {
            // Doubles the capacity, so that a frame spread over many bursts is not moved for each of them.
            let capacity = wanted.max((2 * self.store.capacity()).min(BYTES_MAX));
            if !charge.grow(fixed + capacity - charge.bytes) {
                return false;
            }
            self.store.reserve_exact(capacity - self.store.len());
        }
        for piece in self.pieces.iter_mut().filter(|piece| piece.len != 0 && !piece.kept) {
            let at = self.store.len();
            self.store.extend_from_slice(&burst[piece.at as usize..][..usize::from(piece.len)]);
            *piece = Piece { at: at as u32, len: piece.len, kept: true };
        }
        self.in_burst = 0;
        true
    }
}

/// A complete frame. Its pieces stay valid as long as both this value and the burst exist.
#[derive(Debug)]
pub struct Whole(Partial);

impl Whole {
    /// The frame's bytes in order, preceded by metadata if [`Whole::offload`]. `burst` is the memory of the burst in which its
    /// last fragments arrived.
    pub fn pieces<'a>(&'a self, burst: &'a [u8]) -> impl Iterator<Item = &'a [u8]> + Clone {
        self.0.pieces.iter().map(move |piece| {
            let from = if piece.kept { &self.0.store[..] } else { burst };
            &from[piece.at as usize..][..usize::from(piece.len)]
        })
    }

    /// Network id of the frame.
    pub fn network(&self) -> u32 {
        self.0.network
    }

    /// Number of relays that the frame passed before this link.
    pub fn hops(&self) -> u8 {
        self.0.hops
    }

    /// True when the bytes begin with offload metadata.
    pub fn offload(&self) -> bool {
        self.0.offload
    }

    /// Sum of the lengths of all pieces in bytes.
    pub fn bytes(&self) -> usize {
        self.0.bytes
    }

    /// True when the frame owns memory, which must outlive its pieces.
    pub fn owns_memory(&self) -> bool {
        !self.0.store.is_empty()
    }
}

/// The incomplete frames of one link, at one dispatcher.
pub struct Reassembly {
    stats: Arc<PortStats>,
    budgets: [Arc<ReassemblyBudget>; 2],
    window: Window,
    /// The frame of the latest fragment. Most frames begin and complete here.
    current: Option<Partial>,
    /// The other incomplete frames, by name.
    others: BTreeMap<u64, Partial>,
    /// Names of other frames with pieces in the burst; some of them may have ended since.
    unsettled: Vec<u64>,
    spare: Vec<Vec<Piece>>,
}

impl Reassembly {
    /// Creates an empty reassembly. Discards and drops count in `stats`; memory is taken from the budgets of the link and the
    /// host.
    pub fn new(
        stats: Arc<PortStats>,
        link: Arc<ReassemblyBudget>,
        host: Arc<ReassemblyBudget>,
        now_ms: u64,
    ) -> Reassembly {
        Reassembly {
            stats,
            budgets: [link, host],
            window: Window::new(now_ms),
            current: None,
            others: BTreeMap::new(),
            unsettled: Vec::new(),
            spare: Vec::new(),
        }
    }

    /// Number of incomplete frames.
    pub fn incomplete(&self) -> usize {
        self.others.len() + usize::from(self.current.is_some())
    }

    /// Accepts the fragment whose payload lies at `place` in the burst. Returns the frame once it is complete.
    ///
    /// `header` must come from [`Header::parse`]. `now_ms` must not decrease.
    #[inline]
    pub fn accept(&mut self, header: &Header, place: Range<usize>, now_ms: u64) -> Option<Whole> {
        if usize::from(header.index) >= FRAGMENTS_MAX
            || place.is_empty()
            || place.len() > usize::from(u16::MAX)
        {
            self.stats.discard(DiscardReason::BadHeader, 1);
            return None;
        }
        self.window.age(now_ms);
        match self.select(header, now_ms)?.add(header, &place) {
            Added::Incomplete => self.advance(header.number),
            Added::Complete => {
                self.advance(header.number);
                self.window.end(header.frame_id());
                return self.current.take().map(Whole);
            }
            Added::Duplicate => self.stats.discard(DiscardReason::Stale, 1),
            Added::Contradiction => {
                self.stats.discard(DiscardReason::BadHeader, 1);
                if let Some(partial) = self.current.take() {
                    self.lose(partial);
                }
            }
        }
        None
    }

    /// Makes the fragment's frame the current one and starts it if it is new. `None` when that frame has ended: the fragment
    /// counts as stale.
    #[inline]
    fn select(&mut self, header: &Header, now_ms: u64) -> Option<&mut Partial> {
        let id = header.frame_id();
        if self.current.as_ref().is_none_or(|partial| partial.id != id) {
            self.park();
            self.current = self.others.remove(&id);
        }
        if let Some(partial) = self.current.take_if(|partial| partial.timed_out(now_ms)) {
            self.lose(partial);
        }
        if self.current.is_none() {
            if self.window.restarted(header.number) {
                self.flush();
            }
            if self.window.has_ended(id) {
                self.stats.discard(DiscardReason::Stale, 1);
                return None;
            }
            self.current = Some(Partial::new(header, now_ms, self.spare.pop().unwrap_or_default()));
        }
        self.current.as_mut()
    }

    /// Moves the current frame to `others`.
    fn park(&mut self) {
        if let Some(partial) = self.current.take() {
            if partial.in_burst != 0 {
                self.unsettled.push(partial.id);
            }
            self.others.insert(partial.id, partial);
        }
    }

    /// Advances the window; frames that leave it have ended.
    #[inline]
    fn advance(&mut self, number: u64) {
        self.window.see(number);
        let low = self.window.low();
        while self.others.first_key_value().is_some_and(|(id, _)| *id < low) {
            if let Some((_, partial)) = self.others.pop_first() {
                self.lose(partial);
            }
        }
    }

    /// Ends the burst: copies the pieces of incomplete frames out of it.
    pub fn settle(&mut self, burst: &[u8]) {
        self.park();
        let mut unsettled = std::mem::take(&mut self.unsettled);
        // In order of arrival, so that the newest frames fail when memory runs out.
        for id in unsettled.drain(..) {
            let Some(partial) = self.others.get_mut(&id) else { continue };
            if partial.in_burst == 0 || partial.keep(burst, &self.budgets) {
                continue;
            }
            self.stats.discard(DiscardReason::MemoryLimit, partial.in_burst as u64);
            if let Some(partial) = self.others.remove(&id) {
                self.lose(partial);
            }
        }
        self.unsettled = unsettled;
    }

    /// Ends timed-out frames. Call it between two bursts.
    pub fn tick(&mut self, now_ms: u64) {
        self.window.age(now_ms);
        self.park();
        let late = self.others.values().filter(|partial| partial.timed_out(now_ms)).map(|partial| partial.id);
        for id in late.collect::<Vec<_>>() {
            if let Some(partial) = self.others.remove(&id) {
                self.lose(partial);
            }
        }
    }

    /// Ends all incomplete frames and clears all recorded numbers.
    pub fn flush(&mut self) {
        self.park();
        while let Some((_, partial)) = self.others.pop_first() {
            self.lose(partial);
        }
        self.window.clear();
    }

    /// Ends an incomplete frame. Only this function counts it.
    #[cold]
    fn lose(&mut self, partial: Partial) {
        if partial.count != 0 {
            self.stats.refuse(DropReason::Reassembly, partial.bytes as u64);
            self.window.end(partial.id);
        }
        self.recycle(Whole(partial));
    }

    /// Recycles a finished frame, so that the next one needs no allocation.
    #[inline]
    pub fn recycle(&mut self, whole: Whole) {
        let mut pieces = whole.0.pieces;
        if self.spare.len() < SPARE_MAX {
            pieces.clear();
            self.spare.push(pieces);
        }
    }
}

#[cfg(test)]
#[path = "reassembly_tests.rs"]
mod tests;
