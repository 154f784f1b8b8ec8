//! The split ring, device side (virtio 1.2 section 2.7).
//!
//! A burst goes like this: [`Ring::prime`] reads the available index once, copies up to [`BURST`] heads and their first
//! descriptors out of guest memory, and prefetches what they point to; [`Ring::next`] hands them out one by one;
//! [`Ring::complete`] writes used entries, in the order of the heads; [`Ring::publish`] makes them visible at once and says
//! whether the driver wants to be notified. Who may notify later calls [`Ring::show`] instead, and asks [`Ring::waits`] then.
//! Where as many chains wait again, [`Ring::read_ahead`] does the first step for the next burst before others are served.
//!
//! Completion is strictly in order, whether or not the driver negotiated IN_ORDER. Net devices have no in-flight
//! record, so a front end restarts a dead back end at the used index; in order, that neither loses nor repeats a buffer.

use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering, fence};

use super::chain::{self, Buffer, ChainError, Table};
use super::dirty::DirtyLog;
use super::memory::{GuestMemory, Translator};
use super::{
    AVAIL_NO_INTERRUPT, DESC_INDIRECT, DESC_NEXT, DESC_WRITE, Descriptor, QUEUE_SIZE_MAX, USED_NO_NOTIFY,
    prefetch, prefetch_write,
};

/// Chains that are read ahead: a batch.
pub const BURST: usize = crate::frame::BATCH_MAX;
/// Smaller bursts are not read ahead for: they are waited for, and what comes next is not likely to come soon.
const READ_AHEAD_MIN: usize = 8;

/// Why a queue was disabled. It stays so until the guest resets it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RingError {
    /// Not a power of two, 0, or above 32 768.
    #[error("queue size {0} is not a power of two up to 32768")]
    Size(u32),
    /// A ring is not wholly inside one mapping.
    #[error("{part} at front-end address {addr:#x} lies outside the shared memory")]
    Address {
        /// Which of the three parts.
        part: &'static str,
        /// Its address in the front end's address space.
        addr: u64,
    },
    /// A ring is not aligned as virtio 1.2 section 2.7 asks.
    #[error("{part} at front-end address {addr:#x} is misaligned")]
    Misaligned {
        /// Which of the three parts.
        part: &'static str,
        /// Its address in the front end's address space.
        addr: u64,
    },
    /// More new chains than the ring has places.
    #[error("available index jumped from {from} to {to} in a ring of {size}")]
    AvailableJump {
        /// The next index expected.
        from: u16,
        /// The index found.
        to: u16,
        /// The ring's size.
        size: u16,
    },
    /// A head that is not in the descriptor table; there is nothing that could be given back.
    #[error("available ring names descriptor {index} in a ring of {size}")]
    Head {
        /// The head found.
        index: u16,
        /// The ring's size.
        size: u16,
    },
}

/// Where a ring lies and what was negotiated for it.
#[derive(Clone, Copy, Debug, Default)]
pub struct RingConfig {
    /// Queue size as it came over the wire.
    pub size: u32,
    /// Descriptor table, in the front end's address space.
    pub descriptors: u64,
    /// Available ring, likewise.
    pub available: u64,
    /// Used ring, likewise.
    pub used: u64,
    /// The used ring's guest physical address for dirty logging, when its pages are to be logged.
    pub used_log: Option<u64>,
    /// Index of the next available entry.
    pub base: u16,
    /// EVENT_IDX was negotiated.
    pub event_idx: bool,
    /// INDIRECT_DESC was negotiated.
    pub indirect: bool,
}

/// A chain's head with a private copy of its first descriptor.
#[derive(Clone, Copy, Debug)]
pub struct Head {
    /// The descriptor's index: what the used ring calls the chain.
    pub index: u16,
    first: Descriptor,
    /// Where the first descriptor points, when it is the only one, direct and not empty. Null otherwise.
    single: *mut u8,
}

// SAFETY: the pointer names guest memory, which the ring keeps mapped.
unsafe impl Send for Head {}

impl Head {
    const NONE: Head = Head {
        index: 0,
        first: Descriptor { addr: 0, len: 0, flags: 0, next: 0 },
        single: std::ptr::null_mut(),
    };

    /// The chain's only buffer when it is one that the device reads: the common case, checked already.
    #[inline]
    pub fn single_readable(&self) -> Option<Buffer> {
        self.single_with(0)
    }

    /// The chain's only buffer when it is one that the device writes.
    #[inline]
    pub fn single_writable(&self) -> Option<Buffer> {
        self.single_with(DESC_WRITE)
    }

    #[inline]
    fn single_with(&self, write: u16) -> Option<Buffer> {
        let hit = !self.single.is_null() && self.first.flags & DESC_WRITE == write;
        hit.then_some(Buffer { ptr: self.single, len: self.first.len as usize })
    }
}

/// One virtqueue in use.
#[derive(Debug)]
pub struct Ring {
    translator: Translator,
    size: u16,
    descriptors: *const u8,
    available: *mut u8,
    used: *mut u8,
    event_idx: bool,
    indirect: bool,
    /// Entry of the available ring that is taken next.
    next_avail: u16,
    /// The driver's index as last read.
    seen_avail: u16,
    /// Entry of the used ring that is written next.
    next_used: u16,
    /// The used index that the driver sees.
    published: u16,
    /// Entries shown since the driver was last notified, or found not to want it.
    unsettled: u32,
    /// The first publication always notifies: what the driver was told before is not known.
    notified_once: bool,
    heads: Box<[Head; BURST]>,
    at: usize,
    primed: usize,
    log: Option<Arc<DirtyLog>>,
    used_log: Option<u64>,
}

// SAFETY: the pointers name guest memory that `translator` keeps mapped; the ring is used by one thread at a time.
unsafe impl Send for Ring {}

impl Ring {
    /// A ring at `config`'s addresses, each translated whole inside one mapping of `memory`.
    ///
    /// Continues at the used index in guest memory when that differs from `config.base`: the chains in between were
    /// taken by a back end that died, and never completed.
    pub fn new(
        memory: Arc<GuestMemory>,
        config: &RingConfig,
        log: Option<Arc<DirtyLog>>,
    ) -> Result<Ring, RingError> {
        let size = u16::try_from(config.size).ok();
        let size = size.filter(|size| size.is_power_of_two() && *size <= QUEUE_SIZE_MAX);
        let size = size.ok_or(RingError::Size(config.size))?;
        let n = usize::from(size);
        let part = |part, addr: u64, len: usize, align: usize| {
            let pointer = memory.translate_user(addr, len).ok_or(RingError::Address { part, addr })?;
            // What counts is our own pointer: a region may be mapped at any offset.
            if pointer.align_offset(align) == 0 {
                Ok(pointer)
            } else {
                Err(RingError::Misaligned { part, addr })
            }
        };
        let mut ring = Ring {
            descriptors: part("descriptor table", config.descriptors, Descriptor::SIZE * n, 16)?,
            // flags, idx, ring[n], used_event
            available: part("available ring", config.available, 6 + 2 * n, 2)?,
            // flags, idx, ring[n], avail_event
            used: part("used ring", config.used, 6 + 8 * n, 4)?,
            translator: Translator::new(memory),
            size,
            event_idx: config.event_idx,
            indirect: config.indirect,
            next_avail: config.base,
            seen_avail: config.base,
            next_used: config.base,
            published: config.base,
            unsettled: 0,
            notified_once: false,
            heads: Box::new([Head::NONE; BURST]),
            at: 0,
            primed: 0,
            used_log: config.used_log.filter(|_| log.is_some()),
            log,
        };
        let used = ring.used_idx().load(Ordering::Acquire);
        if used != config.base {
            tracing::info!(base = config.base, used, "ring continues at its used index");
            ring.next_avail = used;
            ring.seen_avail = used;
            ring.next_used = used;
            ring.published = used;
        }
        Ok(ring)
    }

    /// Index of the next available entry.
    pub fn position(&self) -> u16 {
        self.next_avail
    }

    /// Index of the oldest entry that was taken and not completed, or of the next one: where another back end would go on.
    #[inline]
    pub fn completed(&self) -> u16 {
        self.next_used
    }

    /// Places in the ring.
    #[inline]
    pub fn size(&self) -> u16 {
        self.size
    }

    /// The memory behind the ring.
    #[inline]
    pub fn memory(&self) -> &Arc<GuestMemory> {
        self.translator.memory()
    }

    /// Reads ahead: up to `max` (at most [`BURST`]) chains that wait are copied and prefetched. Returns how many.
    #[inline(never)]
    pub fn prime(&mut self, max: usize) -> Result<usize, RingError> {
        let max = max.min(BURST);
        self.at = 0;
        self.primed = 0;
        let mut waiting = self.seen_avail.wrapping_sub(self.next_avail);
        if usize::from(waiting) < max {
            // Acquire: the entries up to the index are read after it.
            let to = self.avail_idx().load(Ordering::Acquire);
            waiting = to.wrapping_sub(self.next_avail);
            if waiting > self.size {
                return Err(RingError::AvailableJump { from: self.next_avail, to, size: self.size });
            }
            self.seen_avail = to;
        }
        let count = usize::from(waiting).min(max);
        for i in 0..count {
            let index = self.avail_entry(self.next_avail.wrapping_add(i as u16));
            if index >= self.size {
                return Err(RingError::Head { index, size: self.size });
            }
            self.heads[i].index = index;
            prefetch(self.descriptors.wrapping_add(usize::from(index) * Descriptor::SIZE));
        }
        for head in &mut self.heads[..count] {
            // SAFETY: the index was checked above, and the table is mapped for `size` descriptors.
            head.first = unsafe { Descriptor::fetch(self.descriptors, head.index) };
            head.single = std::ptr::null_mut();
            let Descriptor { addr, len, flags, .. } = head.first;
            if flags & DESC_NEXT == 0 && len != 0 {
                // An address that is refused here is refused again, and counted, by `walk`.
                let target = self.translator.translate(addr, len as usize).unwrap_or(std::ptr::null_mut());
                if flags & DESC_INDIRECT == 0 {
                    head.single = target;
                }
                let ask = if flags & DESC_WRITE == 0 { prefetch } else { prefetch_write };
                ask(target);
                ask(target.wrapping_add(64));
            }
        }
        // Used entries of as many chains: eight share a line.
        for i in (0..count).step_by(8) {
            let slot = usize::from(self.next_used.wrapping_add(i as u16) & (self.size - 1));
            prefetch_write(self.used.wrapping_add(4 + 8 * slot));
        }
        self.primed = count;
        Ok(count)
    }

    /// Reads ahead as [`Ring::prime`] does, unless `max` chains are left that were. Returns how many there are, at most `max`.
    #[inline]
    pub fn ensure(&mut self, max: usize) -> Result<usize, RingError> {
        let max = max.min(BURST);
        // With fewer all is read again, of which nothing was handed out: who gets less than `max` knows that no more wait.
        if self.primed - self.at < max { self.prime(max) } else { Ok(max) }
    }

    /// Reads ahead for the next burst when the driver is known to have made `count` chains more available: what is prefetched now
    /// arrives while others are served. Cheaper than waiting for it then, as long as many chains come.
    #[inline]
    pub fn read_ahead(&mut self, count: usize) {
        if count >= READ_AHEAD_MIN && usize::from(self.seen_avail.wrapping_sub(self.next_avail)) >= count {
            // A ring that is broken is found so again by whoever takes the next chain.
            let _ = self.ensure(count);
        }
    }

    /// Takes the next chain, reading ahead again when the last burst is used up. `None` when no chain waits.
    #[inline]
    #[expect(
        clippy::should_implement_trait,
        reason = "an iterator could not tell an empty ring from a broken one"
    )]
    pub fn next(&mut self) -> Result<Option<Head>, RingError> {
        if self.at == self.primed && self.prime(BURST)? == 0 {
            return Ok(None);
        }
        let head = self.heads[self.at];
        self.at += 1;
        self.next_avail = self.next_avail.wrapping_add(1);
        Ok(Some(head))
    }

    /// Puts back the `count` chains taken last, none of which is completed.
    pub fn put_back(&mut self, count: u16) {
        self.next_avail = self.next_avail.wrapping_sub(count);
        match self.at.checked_sub(usize::from(count)) {
            // The copies are handed out again, so that what was checked is what is used, and nothing is read twice.
            Some(at) => self.at = at,
            // The first of them were read ahead in an earlier burst.
            None => (self.at, self.primed) = (0, 0),
        }
    }

    /// Appends the chain's buffers to `buffers`: readable ones first. Returns how many of them are readable.
    #[inline]
    pub fn walk(&mut self, head: &Head, buffers: &mut Vec<Buffer>) -> Result<usize, ChainError> {
        let table = Table { base: self.descriptors, size: self.size, indirect: self.indirect };
        chain::walk(table, head.first, &mut self.translator, buffers)
    }

    /// Gives the chain `index` back with `len` bytes written, in the order in which chains were taken. The driver sees it
    /// after [`Ring::publish`].
    #[inline]
    pub fn complete(&mut self, index: u16, len: u32) {
        let slot = usize::from(self.next_used & (self.size - 1));
        // struct virtq_used_elem { le32 id; le32 len; }
        let entry = u64::from(index) | u64::from(len) << 32;
        // SAFETY: entry `slot` < size of the used ring, which is mapped whole; the write needs no alignment.
        unsafe { self.used.add(4 + 8 * slot).cast::<u64>().write_unaligned(entry) };
        self.next_used = self.next_used.wrapping_add(1);
        if self.log.is_some() {
            self.log_used(4 + 8 * slot, 8);
        }
    }

    /// Shows the driver everything completed since the last call, and tells whether it wants to be notified.
    #[inline]
    pub fn publish(&mut self) -> bool {
        self.show();
        let waits = self.waits();
        self.settle();
        waits
    }

    /// Shows the driver everything completed since the last call. Whoever calls it owes [`Ring::waits`] and
    /// [`Ring::settle`] later.
    #[inline]
    pub fn show(&mut self) {
        let new = self.next_used;
        if self.published == new {
            return;
        }
        // Release: entries and buffers are written before the index.
        self.used_idx().store(new, Ordering::Release);
        self.unsettled = self.unsettled.saturating_add(u32::from(new.wrapping_sub(self.published)));
        self.published = new;
        if self.log.is_some() {
            self.log_used(2, 2);
        }
    }

    /// True when the driver wants to be notified of something that was shown since the last [`Ring::settle`].
    #[inline]
    pub fn waits(&self) -> bool {
        if self.unsettled == 0 {
            return false;
        }
        // The index is written before the driver's wish is read (virtio 1.2 section 2.7.7.2), or both could go to sleep.
        fence(Ordering::SeqCst);
        let wanted = match u16::try_from(self.unsettled) {
            Ok(count) if self.event_idx => {
                let event = self.used_event().load(Ordering::Relaxed);
                needs_event(event, self.published, self.published.wrapping_sub(count))
            }
            Ok(_) => self.avail_flags().load(Ordering::Relaxed) & AVAIL_NO_INTERRUPT == 0,
            // An event index says nothing about more entries than it can count.
            Err(_) => true,
        };
        wanted || !self.notified_once
    }

    /// The driver was notified of everything shown so far, or does not want to be.
    #[inline]
    pub fn settle(&mut self) {
        self.notified_once |= self.unsettled != 0;
        self.unsettled = 0;
    }

    /// True when something was shown that is not settled, and the driver has since taken all of it and waits for the next.
    /// Without EVENT_IDX that cannot be seen.
    #[inline]
    pub fn caught_up(&self) -> bool {
        self.event_idx && self.unsettled != 0 && self.used_event().load(Ordering::Relaxed) == self.published
    }

    /// True when the driver wants to be notified of the next entry and knows of none before it: it has nothing to do.
    #[inline]
    pub fn would_wait(&self) -> bool {
        if self.event_idx {
            self.used_event().load(Ordering::Relaxed) == self.published
        } else {
            self.avail_flags().load(Ordering::Relaxed) & AVAIL_NO_INTERRUPT == 0
        }
    }

    /// Asks the driver to notify us of the next chain. False when one waits already: it came before the request took
    /// effect, and no notification will follow.
    pub fn arm(&mut self) -> bool {
        if self.event_idx {
            self.avail_event().store(self.next_avail, Ordering::Relaxed);
            if self.log.is_some() {
                self.log_used(4 + 8 * usize::from(self.size), 2);
            }
        } else {
            self.set_used_flags(0);
        }
        // The request is written before the index is read (virtio 1.2 section 2.7.10).
        fence(Ordering::SeqCst);
        let armed = self.avail_idx().load(Ordering::Acquire) == self.next_avail;
        if !armed {
            self.disarm();
        }
        armed
    }

    /// Tells the driver that notifications are not needed. With EVENT_IDX the event index simply stays behind.
    pub fn disarm(&mut self) {
        if !self.event_idx {
            self.set_used_flags(USED_NO_NOTIFY);
        }
    }

    /// True when neither driver nor device has ever used the ring, or its indices stand at 0 again.
    pub fn is_blank(&self) -> bool {
        self.avail_idx().load(Ordering::Relaxed) == 0 && self.used_idx().load(Ordering::Relaxed) == 0
    }

    /// Marks the pages of `buffer` as written to, when dirty pages are logged.
    #[inline]
    pub fn wrote(&self, buffer: Buffer) {
        if let Some(log) = &self.log {
            log.mark_host(self.memory(), buffer.ptr, buffer.len);
        }
    }

    fn set_used_flags(&mut self, flags: u16) {
        self.used_flags().store(flags, Ordering::Relaxed);
        if self.log.is_some() {
            self.log_used(0, 2);
        }
    }

    #[cold]
    fn log_used(&self, offset: usize, len: u64) {
        if let (Some(log), Some(used)) = (&self.log, self.used_log) {
            log.mark(used.saturating_add(offset as u64), len);
        }
    }

    #[inline]
    fn avail_entry(&self, at: u16) -> u16 {
        let slot = usize::from(at & (self.size - 1));
        // SAFETY: `slot` < size; the ring is mapped whole and 2-byte aligned; a volatile read happens exactly once.
        unsafe { self.available.add(4 + 2 * slot).cast::<u16>().read_volatile() }
    }

    #[inline]
    fn avail_flags(&self) -> &AtomicU16 {
        self.word(self.available, 0)
    }

    #[inline]
    fn avail_idx(&self) -> &AtomicU16 {
        self.word(self.available, 2)
    }

    #[inline]
    fn used_event(&self) -> &AtomicU16 {
        self.word(self.available, 4 + 2 * usize::from(self.size))
    }

    #[inline]
    fn used_flags(&self) -> &AtomicU16 {
        self.word(self.used, 0)
    }

    #[inline]
    fn used_idx(&self) -> &AtomicU16 {
        self.word(self.used, 2)
    }

    #[inline]
    fn avail_event(&self) -> &AtomicU16 {
        self.word(self.used, 4 + 8 * usize::from(self.size))
    }

    /// The 16-bit word at `offset` of one of the two rings.
    #[inline]
    fn word(&self, ring: *mut u8, offset: usize) -> &AtomicU16 {
        // SAFETY: the six callers above pass offsets of words of that ring, all even and inside what `new` translated and
        // found aligned; the memory stays mapped as long as `self`. Guest and device both access it atomically.
        unsafe { AtomicU16::from_ptr(ring.add(offset).cast()) }
    }
}

/// True when moving an index from `old` to `new` passed the event index `event` (virtio 1.2 section 2.7.10,
/// `virtq_need_event`), in 16-bit arithmetic that wraps.
#[inline]
pub fn needs_event(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}
