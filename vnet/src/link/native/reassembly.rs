//! Reassembly: fragments of one link become frames again. Protocol state without sockets and clocks.
//!
//! The input is a burst: one run of memory in which the datagrams received together lie. [`Reassembly::accept`] takes each
//! fragment of it as a header and a place; when it is a frame's last missing one, the frame comes out as the list of places
//! of its pieces. Nothing is copied for that. Only when the burst is over, [`Reassembly::settle`] copies what belongs to
//! frames that are still incomplete, into memory that counts against the budgets of the link and of the host.
//!
//! A frame ends exactly once, in one of these ways, and its name is noted as ended (duplicates.rs), so that a late fragment is
//! stale and starts nothing:
//! - *complete*: every fragment is there;
//! - *contradicted*: a fragment does not fit the others (another size, two ends, a frame too long);
//! - *timed out*: incomplete [`TIMEOUT_MS`] after its first fragment;
//! - *overtaken*: the link's datagram numbers have moved on by a whole window;
//! - *refused*: no memory is left when its burst ends; it is always the newest that goes;
//! - *flushed*: the peer has started again, or the link is gone.
//!
//! All but the first count one frame as dropped for [`DropReason::Reassembly`]. A frame of which no fragment was accepted
//! is not known to exist and counts as discarded datagrams only. An end is remembered for at least 400 ms.
//!
//! A peer that starts again has new numbers: vnet's own go on from the clock and leave the old ones behind. One that starts
//! from 1 is noticed when it had come far (131 072 datagrams), and everything partial is flushed; one that had not is
//! understood within 800 ms, in which fragments whose number belongs to an ended frame are taken for late ones.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use crate::frame::{FRAME_MAX, SEGMENTS_MAX};
use crate::link::native::duplicates::Window;
use crate::stats::{DiscardReason, DropReason, PortStats};
use crate::wire::native::Header;
use crate::wire::offload::WIRE_LEN;

/// Most fragments of a frame: as many as a frame in a batch has segments behind its head.
pub const FRAGMENTS_MAX: usize = SEGMENTS_MAX - 1;
/// How long a frame may stay incomplete, in ms.
pub const TIMEOUT_MS: u64 = 200;
/// Most bytes of all fragments together: the largest frame and its metadata.
const BYTES_MAX: usize = FRAME_MAX + WIRE_LEN;
/// Lists of pieces kept for the next frames.
const SPARE_MAX: usize = 64;

/// A limit on reassembly memory that several owners share.
#[derive(Debug)]
pub struct ReassemblyBudget {
    limit: usize,
    used: AtomicUsize,
}

impl ReassemblyBudget {
    /// Memory that one host may use for all its links, in bytes.
    pub const HOST: usize = 64 << 20;

    /// A budget of `limit` bytes.
    pub fn new(limit: usize) -> ReassemblyBudget {
        ReassemblyBudget { limit, used: AtomicUsize::new(0) }
    }

    /// Bytes in use.
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

/// What one incomplete frame has taken from both budgets; gives it back when dropped.
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

/// Where a fragment's bytes are: in the burst, or (`kept`) in the frame's own store. `len` 0: not there yet.
#[derive(Clone, Copy, Debug, Default)]
struct Piece {
    at: u32,
    len: u16,
    kept: bool,
}

/// A frame of which some fragments are there.
#[derive(Debug)]
struct Partial {
    id: u64,
    started_ms: u64,
    network: u32,
    hops: u8,
    offload: bool,
    /// Bytes of each fragment but the last; 0 while only the last is there.
    size: usize,
    /// Index of the last fragment, once known.
    last: Option<usize>,
    /// By fragment index, up to the highest one seen.
    pieces: Vec<Piece>,
    /// Pieces that are there.
    count: usize,
    /// Their bytes.
    bytes: usize,
    /// Pieces that lie in the burst.
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

    /// True when a fragment of `len` bytes says nothing that contradicts the others.
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
            // The last fragment is behind all others, not longer than they, and only one.
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

    /// Copies the pieces that lie in the burst to the store. False when the budgets do not allow it.
    fn keep(&mut self, burst: &[u8], budgets: &[Arc<ReassemblyBudget>; 2]) -> bool {
        let fixed = size_of::<Partial>() + FRAGMENTS_MAX * size_of::<Piece>();
        let wanted = self.bytes;
        let charge = match &mut self.charge {
            Some(charge) => charge,
            none => none.insert(Charge { budgets: budgets.clone(), bytes: 0 }),
        };
        if charge.bytes < fixed + wanted {
            // Doubling, so that a frame in many bursts is not moved for each of them.
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

/// A complete frame. Its pieces stay where they are as long as it and the burst exist.
#[derive(Debug)]
pub struct Whole(Partial);

impl Whole {
    /// The frame's bytes in order, metadata first when [`Whole::offload`] says so. `burst` is the memory that the places of
    /// its last fragments were given in.
    pub fn pieces<'a>(&'a self, burst: &'a [u8]) -> impl Iterator<Item = &'a [u8]> + Clone {
        self.0.pieces.iter().map(move |piece| {
            let from = if piece.kept { &self.0.store[..] } else { burst };
            &from[piece.at as usize..][..usize::from(piece.len)]
        })
    }

    /// Its network id.
    pub fn network(&self) -> u32 {
        self.0.network
    }

    /// Relays it had passed before it was sent here.
    pub fn hops(&self) -> u8 {
        self.0.hops
    }

    /// True when it begins with offload metadata.
    pub fn offload(&self) -> bool {
        self.0.offload
    }

    /// Bytes of all pieces.
    pub fn bytes(&self) -> usize {
        self.0.bytes
    }

    /// True when it has memory of its own, which must outlive the use of its pieces.
    pub fn owns_memory(&self) -> bool {
        !self.0.store.is_empty()
    }
}

/// The incomplete frames of one link (at one dispatcher).
pub struct Reassembly {
    stats: Arc<PortStats>,
    budgets: [Arc<ReassemblyBudget>; 2],
    window: Window,
    /// The frame that the latest fragment belongs to. Most frames begin and complete here.
    current: Option<Partial>,
    /// The other incomplete frames, by name.
    others: BTreeMap<u64, Partial>,
    /// Names of others with pieces in the burst; some may have ended since.
    unsettled: Vec<u64>,
    spare: Vec<Vec<Piece>>,
}

impl Reassembly {
    /// No frame yet. What is discarded and dropped counts in `stats`; memory comes from the link's and the host's budget.
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

    /// Incomplete frames.
    pub fn incomplete(&self) -> usize {
        self.others.len() + usize::from(self.current.is_some())
    }

    /// Takes the fragment whose payload lies at `place` in the burst, and returns the frame when that makes it complete.
    ///
    /// `header` is one that [`Header::parse`] returned. Time does not run backwards.
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

    /// Makes the frame that a fragment belongs to the current one; a new one when it is the first. `None` when the frame has
    /// ended: the fragment is counted as stale.
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

    /// Moves the current frame to the others.
    fn park(&mut self) {
        if let Some(partial) = self.current.take() {
            if partial.in_burst != 0 {
                self.unsettled.push(partial.id);
            }
            self.others.insert(partial.id, partial);
        }
    }

    /// Moves the window; what it leaves behind has ended.
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

    /// The burst is over: moves what belongs to incomplete frames out of it.
    pub fn settle(&mut self, burst: &[u8]) {
        self.park();
        let mut unsettled = std::mem::take(&mut self.unsettled);
        // In the order of their arrival, so that it is the newest that memory runs out for.
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

    /// Ends the frames whose time is up. Between two bursts.
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

    /// Ends all incomplete frames and forgets all numbers.
    pub fn flush(&mut self) {
        self.park();
        while let Some((_, partial)) = self.others.pop_first() {
            self.lose(partial);
        }
        self.window.clear();
    }

    /// Ends an incomplete frame: the one place where it is counted.
    #[cold]
    fn lose(&mut self, partial: Partial) {
        if partial.count != 0 {
            self.stats.refuse(DropReason::Reassembly, partial.bytes as u64);
            self.window.end(partial.id);
        }
        self.recycle(Whole(partial));
    }

    /// Takes back a frame that is done with, so that the next needs no allocation.
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
