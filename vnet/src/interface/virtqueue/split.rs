//! The split virtqueue, device side (virtio 1.2 section 2.7).
//!
//! One burst: [`Ring::prime`] reads the available index once, copies up to [`BURST`] heads and their first descriptors out of
//! guest memory, and prefetches the buffers they point to. [`Ring::next`] returns the heads one by one. [`Ring::complete`] writes
//! used entries in the order of the heads. [`Ring::publish`] makes them visible together and returns whether to notify the
//! driver. A device that may postpone the notification calls [`Ring::show`] instead and [`Ring::waits`] later. If another such
//! burst is waiting, [`Ring::read_ahead`] primes it before other queues are served.
//!
//! Completion is strictly in order, whether or not VIRTIO_F_IN_ORDER was negotiated. Net devices have no in-flight record, so a
//! front end restarts a dead back end at the used index; with in-order completion that neither loses nor repeats a buffer.

use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering, fence};

use super::chain::{self, Buffer, ChainError, DescriptorTable};
use super::dirty::DirtyLog;
use super::layout::{
    AVAIL_NO_INTERRUPT, DESC_INDIRECT, DESC_NEXT, DESC_WRITE, Descriptor, QUEUE_SIZE_MAX, USED_NO_NOTIFY,
};
use super::memory::{GuestMemory, Translator};
use super::prefetch::{prefetch, prefetch_write};

/// Maximum number of chains read ahead: one batch.
pub const BURST: usize = crate::frame::BATCH_MAX;
/// Minimum burst size for reading ahead. After a smaller burst the next chains are unlikely to arrive soon.
const READ_AHEAD_MIN: usize = 8;

/// Reason why a queue was disabled. It stays disabled until the guest resets it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RingError {
    /// The queue size is 0, not a power of two, or above 32 768.
    #[error("queue size {0} is not a power of two up to 32768")]
    Size(u32),
    /// A part of the queue does not lie inside one mapping.
    #[error("{part} at front-end address {addr:#x} lies outside the shared memory")]
    Address {
        /// Descriptor table, available ring or used ring.
        part: &'static str,
        /// Address of that part in the front end's address space.
        addr: u64,
    },
    /// A part of the queue is not aligned as virtio 1.2 section 2.7 requires.
    #[error("{part} at front-end address {addr:#x} is misaligned")]
    Misaligned {
        /// Descriptor table, available ring or used ring.
        part: &'static str,
        /// Address of that part in the front end's address space.
        addr: u64,
    },
    /// The driver claims more new chains than the ring has entries.
    #[error("available index jumped from {from} to {to} in a ring of {size}")]
    AvailableJump {
        /// Next available index.
        from: u16,
        /// Index the driver wrote.
        to: u16,
        /// Queue size.
        size: u16,
    },
    /// A head outside the descriptor table: there is no chain to return.
    #[error("available ring names descriptor {index} in a ring of {size}")]
    Head {
        /// Head the driver wrote.
        index: u16,
        /// Queue size.
        size: u16,
    },
}

/// Location and negotiated features of a virtqueue.
#[derive(Clone, Copy, Debug, Default)]
pub struct RingConfig {
    /// Queue size as received, unchecked.
    pub size: u32,
    /// Address of the descriptor table in the front end's address space.
    pub descriptors: u64,
    /// Address of the available ring in the front end's address space.
    pub available: u64,
    /// Address of the used ring in the front end's address space.
    pub used: u64,
    /// Guest physical address of the used ring if writes to the ring are logged as dirty pages.
    pub used_log: Option<u64>,
    /// Index of the next available entry.
    pub base: u16,
    /// True if VIRTIO_F_EVENT_IDX was negotiated.
    pub event_idx: bool,
    /// True if VIRTIO_F_INDIRECT_DESC was negotiated.
    pub indirect: bool,
}

/// The head of a chain, with a private copy of its first descriptor.
#[derive(Clone, Copy, Debug)]
pub struct Head {
    /// Index of the first descriptor: the chain's id in the used ring.
    pub index: u16,
    first: Descriptor,
    /// The translated buffer if the chain is one direct descriptor of non-zero length, else null.
    single: *mut u8,
}

// SAFETY: the pointer leads to guest memory, which the ring keeps mapped.
unsafe impl Send for Head {}

impl Head {
    const NONE: Head = Head {
        index: 0,
        first: Descriptor { addr: 0, len: 0, flags: 0, next: 0 },
        single: std::ptr::null_mut(),
    };

    /// The chain's only buffer if it is device-readable: the common case, already checked. Else `None`.
    #[inline]
    pub fn single_readable(&self) -> Option<Buffer> {
        self.single_with(0)
    }

    /// The chain's only buffer if it is device-writable, else `None`.
    #[inline]
    pub fn single_writable(&self) -> Option<Buffer> {
        self.single_with(DESC_WRITE)
    }

    #[inline]
    fn single_with(&self, write: u16) -> Option<Buffer> {
        let matches = !self.single.is_null() && self.first.flags & DESC_WRITE == write;
        matches.then_some(Buffer { ptr: self.single, len: self.first.len as usize })
    }
}

/// The device side of one running virtqueue.
#[derive(Debug)]
pub struct Ring {
    translator: Translator,
    size: u16,
    descriptors: *const u8,
    available: *mut u8,
    used: *mut u8,
    event_idx: bool,
    indirect: bool,
    /// Index of the next entry of the available ring to take.
    next_avail: u16,
    /// The driver's available index as last read.
    seen_avail: u16,
    /// Index of the next entry of the used ring to write.
    next_used: u16,
    /// The used index that the driver sees.
    published: u16,
    /// Number of used entries shown since the driver was last notified, or since it was found not to want a notification.
    unsettled: u32,
    /// False until the first publication, which always notifies, because notifications by an earlier back end are unknown.
    notified_once: bool,
    /// Chains read ahead; those from `at` to `primed` have not been returned by `next` yet.
    heads: Box<[Head; BURST]>,
    at: usize,
    primed: usize,
    log: Option<Arc<DirtyLog>>,
    used_log: Option<u64>,
}

// SAFETY: the pointers lead to guest memory that `translator` keeps mapped; one thread at a time uses the ring.
unsafe impl Send for Ring {}

impl Ring {
    /// Creates a ring at the addresses of `config`; each of its three parts must lie inside one mapping of `memory`.
    ///
    /// Continues at the used index in guest memory if that differs from `config.base`: a back end that died had taken the chains
    /// in between and never completed them.
    ///
    /// # Errors
    /// [`RingError::Size`], [`RingError::Address`] or [`RingError::Misaligned`].
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
            // The pointer itself must be aligned, because a region may be mapped at any offset.
            if pointer.align_offset(align) == 0 {
                Ok(pointer)
            } else {
                Err(RingError::Misaligned { part, addr })
            }
        };
        // flags, idx, ring[n], avail_event
        let used = part("used ring", config.used, 6 + 8 * n, 4)?;
        // A front end that logs all writes and gives no address for the ring gets the ring's own.
        let used_log = config.used_log.or_else(|| memory.guest_addr(used)).filter(|_| log.is_some());
        let mut ring = Ring {
            descriptors: part("descriptor table", config.descriptors, Descriptor::SIZE * n, 16)?,
            // flags, idx, ring[n], used_event
            available: part("available ring", config.available, 6 + 2 * n, 2)?,
            used,
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
            used_log,
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

    /// Index of the oldest entry taken but not completed; if there is none, of the next entry. Another back end would continue
    /// there.
    #[inline]
    pub fn completed(&self) -> u16 {
        self.next_used
    }

    /// Queue size in entries.
    #[inline]
    pub fn size(&self) -> u16 {
        self.size
    }

    /// The memory behind the ring.
    #[inline]
    pub fn memory(&self) -> &Arc<GuestMemory> {
        self.translator.memory()
    }

    /// True once a file behind the guest's memory or the dirty log was truncated: data read may be substituted zeros, and marks
    /// may be lost.
    #[inline]
    pub fn is_poisoned(&self) -> bool {
        self.memory().is_poisoned() || self.log.as_ref().is_some_and(|log| log.is_poisoned())
    }

    /// Copies the heads and first descriptors of up to `max` (at most [`BURST`]) waiting chains and prefetches their buffers.
    /// Returns the number of chains.
    ///
    /// # Errors
    /// [`RingError::AvailableJump`] or [`RingError::Head`]: the driver broke the ring.
    #[inline(never)]
    pub fn prime(&mut self, max: usize) -> Result<usize, RingError> {
        let max = max.min(BURST);
        self.at = 0;
        self.primed = 0;
        let mut waiting = self.seen_avail.wrapping_sub(self.next_avail);
        if usize::from(waiting) < max {
            // Acquire: the entries below the index are read after the index.
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
            // SAFETY: `index` < `size` was checked above; the table is mapped for `size` descriptors.
            head.first = unsafe { Descriptor::fetch(self.descriptors, head.index) };
            head.single = std::ptr::null_mut();
            let Descriptor { addr, len, flags, .. } = head.first;
            if flags & DESC_NEXT == 0 && len != 0 {
                // A bad address stays null here; `walk` refuses it again, and the frame is counted there.
                let target = self.translator.translate(addr, len as usize).unwrap_or(std::ptr::null_mut());
                if flags & DESC_INDIRECT == 0 {
                    head.single = target;
                }
                let prefetch_line = if flags & DESC_WRITE == 0 { prefetch } else { prefetch_write };
                prefetch_line(target);
                prefetch_line(target.wrapping_add(64));
            }
        }
        // Prefetch the used entries of these chains; eight share a cache line.
        for i in (0..count).step_by(8) {
            let slot = usize::from(self.next_used.wrapping_add(i as u16) & (self.size - 1));
            prefetch_write(self.used.wrapping_add(4 + 8 * slot));
        }
        self.primed = count;
        Ok(count)
    }

    /// Primes the ring unless `max` chains are cached already. Returns the number of chains, at most `max`.
    ///
    /// # Errors
    /// See [`Ring::prime`].
    #[inline]
    pub fn ensure(&mut self, max: usize) -> Result<usize, RingError> {
        let max = max.min(BURST);
        // Too few cached: re-read them all; `next` has returned none of them. A short count means that the ring is empty.
        if self.primed - self.at < max { self.prime(max) } else { Ok(max) }
    }

    /// Primes the next burst if the driver is known to have made another `count` chains available: their cache lines arrive while
    /// other queues are served. Pays off only for large bursts.
    #[inline]
    pub fn read_ahead(&mut self, count: usize) {
        if count >= READ_AHEAD_MIN && usize::from(self.seen_avail.wrapping_sub(self.next_avail)) >= count {
            // An error is detected again when the next chain is taken.
            let _ = self.ensure(count);
        }
    }

    /// Takes the next chain, priming another burst when the last one is used up. `None` if no chain is available.
    ///
    /// # Errors
    /// See [`Ring::prime`].
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

    /// Puts back the last `count` chains taken, none of which may have been completed.
    pub fn put_back(&mut self, count: u16) {
        self.next_avail = self.next_avail.wrapping_sub(count);
        match self.at.checked_sub(usize::from(count)) {
            // `next` returns the same copies again: no descriptor is read twice.
            Some(at) => self.at = at,
            // The first of them belong to an earlier burst, whose copies are overwritten.
            None => (self.at, self.primed) = (0, 0),
        }
    }

    /// Appends the chain's buffers to `buffers`, readable ones first. Returns the number of readable ones.
    ///
    /// # Errors
    /// The chain is malformed; the caller must return it unused.
    #[inline]
    pub fn walk(&mut self, head: &Head, buffers: &mut Vec<Buffer>) -> Result<usize, ChainError> {
        let table = DescriptorTable { base: self.descriptors, size: self.size, indirect: self.indirect };
        chain::walk(table, head.first, &mut self.translator, buffers)
    }

    /// Writes the used entry of chain `index` with `len` bytes written. Must be called in the order in which chains were taken.
    /// The driver sees the entry after [`Ring::publish`] or [`Ring::show`].
    #[inline]
    pub fn complete(&mut self, index: u16, len: u32) {
        let slot = usize::from(self.next_used & (self.size - 1));
        // struct virtq_used_elem { le32 id; le32 len; }
        let entry = u64::from(index) | u64::from(len) << 32;
        // SAFETY: `slot` < `size`, and the whole used ring is mapped; the write needs no alignment.
        unsafe { self.used.add(4 + 8 * slot).cast::<u64>().write_unaligned(entry) };
        self.next_used = self.next_used.wrapping_add(1);
        if self.log.is_some() {
            self.log_used(4 + 8 * slot, 8);
        }
    }

    /// Shows the driver all entries completed since the last call. Returns true if it wants to be notified.
    #[inline]
    pub fn publish(&mut self) -> bool {
        self.show();
        let waits = self.waits();
        self.settle();
        waits
    }

    /// Shows the driver all entries completed since the last call. The caller must call [`Ring::waits`] and [`Ring::settle`]
    /// later.
    #[inline]
    pub fn show(&mut self) {
        let new = self.next_used;
        if self.published == new {
            return;
        }
        // Release: entries and buffers are written before the index is.
        self.used_idx().store(new, Ordering::Release);
        self.unsettled = self.unsettled.saturating_add(u32::from(new.wrapping_sub(self.published)));
        self.published = new;
        if self.log.is_some() {
            self.log_shown();
        }
    }

    /// True if the driver wants to be notified of an entry shown since the last [`Ring::settle`].
    #[inline]
    pub fn waits(&self) -> bool {
        if self.unsettled == 0 {
            return false;
        }
        // Writes the used index before reading the driver's suppression state (virtio 1.2 section 2.7.7.2). Otherwise device and
        // driver could both go to sleep.
        fence(Ordering::SeqCst);
        let wanted = match u16::try_from(self.unsettled) {
            Ok(count) if self.event_idx => {
                let event = self.used_event().load(Ordering::Relaxed);
                needs_event(event, self.published, self.published.wrapping_sub(count))
            }
            Ok(_) => self.avail_flags().load(Ordering::Relaxed) & AVAIL_NO_INTERRUPT == 0,
            // A 16-bit event index is meaningless after 65 536 entries.
            Err(_) => true,
        };
        wanted || !self.notified_once
    }

    /// Records that the driver was notified of all entries shown so far, or does not want to be.
    #[inline]
    pub fn settle(&mut self) {
        self.notified_once |= self.unsettled != 0;
        self.unsettled = 0;
    }

    /// True if the driver has consumed all entries shown since the last [`Ring::settle`] and waits for the next one. Always false
    /// without EVENT_IDX, which does not reveal it.
    #[inline]
    pub fn caught_up(&self) -> bool {
        self.event_idx && self.unsettled != 0 && self.used_event().load(Ordering::Relaxed) == self.published
    }

    /// True if the driver shows by an event index how far it has come.
    pub fn has_event_index(&self) -> bool {
        self.event_idx
    }

    /// True if the driver is idle: it wants to be notified of the next used entry and has none to consume.
    #[inline]
    pub fn would_wait(&self) -> bool {
        if self.event_idx {
            self.used_event().load(Ordering::Relaxed) == self.published
        } else {
            self.avail_flags().load(Ordering::Relaxed) & AVAIL_NO_INTERRUPT == 0
        }
    }

    /// Requests a notification of the next chain from the driver. Returns false if a chain is already waiting: the driver made it
    /// available before the request took effect, and no notification will follow.
    pub fn arm(&mut self) -> bool {
        if self.event_idx {
            self.avail_event().store(self.next_avail, Ordering::Relaxed);
            if self.log.is_some() {
                self.log_used(4 + 8 * usize::from(self.size), 2);
            }
        } else {
            self.set_used_flags(0);
        }
        // Writes the request before reading the available index (virtio 1.2 section 2.7.10).
        fence(Ordering::SeqCst);
        let armed = self.avail_idx().load(Ordering::Acquire) == self.next_avail;
        if !armed {
            self.disarm();
        }
        armed
    }

    /// Suppresses the driver's notifications. With EVENT_IDX it suffices to leave the event index behind.
    pub fn disarm(&mut self) {
        if !self.event_idx {
            self.set_used_flags(USED_NO_NOTIFY);
        }
    }

    /// True if both indices are 0: neither driver nor device has used the ring, or both indices wrapped to 0.
    pub fn is_blank(&self) -> bool {
        self.avail_idx().load(Ordering::Relaxed) == 0 && self.used_idx().load(Ordering::Relaxed) == 0
    }

    /// True if dirty pages are logged.
    #[inline]
    pub fn logs(&self) -> bool {
        self.log.is_some()
    }

    /// Marks the pages of `buffer` as dirty if dirty pages are logged. The buffer must have been written.
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

    /// Logs the used index, the last write of a burst.
    #[cold]
    fn log_shown(&self) {
        self.log_used(2, 2);
        if let Some(log) = &self.log {
            log.report();
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
        // SAFETY: `slot` < `size`; the whole ring is mapped and 2-byte aligned; a volatile read happens exactly once.
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

    /// The 16-bit word at byte `offset` of the available or used ring.
    #[inline]
    fn word(&self, ring: *mut u8, offset: usize) -> &AtomicU16 {
        // SAFETY: the six callers above pass even offsets inside the ring that `new` translated and found aligned; the memory stays
        // mapped as long as `self`. Guest and device both access it atomically.
        unsafe { AtomicU16::from_ptr(ring.add(offset).cast()) }
    }
}

/// True if moving an index from `old` to `new` passed the event index `event`, in wrapping 16-bit arithmetic (virtio 1.2 section
/// 2.7.10, `virtq_need_event`).
#[inline]
pub fn needs_event(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

#[cfg(any(test, kani))]
#[path = "split_proofs.rs"]
mod proofs;
