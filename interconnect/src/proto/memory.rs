//! Application memory: spans of bytes, and the table of the regions that are registered for peers.

use std::collections::HashMap;

use chacha20::ChaCha20Rng;
use chacha20::rand_core::Rng;

use super::status::Status;

/// Maximum number of regions of one engine. A region costs about 80 bytes, so a full table takes 5 MiB.
pub(super) const REGIONS_MAX: usize = 65_536;

/// Key by which peers address registered memory.
pub type Key = u64;

/// A range of application memory. The creator of a span guarantees that it stays valid until the operation or registration that
/// uses it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    start: *mut u8,
    len: usize,
}

// SAFETY: a span is only an address and a length; the contract of `Span::new` governs access to the bytes.
unsafe impl Send for Span {}

impl Span {
    /// An empty span.
    pub const EMPTY: Self = Self { start: std::ptr::NonNull::dangling().as_ptr(), len: 0 };

    /// Creates a span of the `len` bytes at `start`.
    ///
    /// # Safety
    /// Until the operation completes or the region is deregistered, the bytes must stay mapped and readable, and also writable
    /// if a receive or a remote write may write them. Like RDMA hardware, the engine copies without synchronization: the
    /// application must neither access bytes that an operation writes nor hold a reference to them before that operation
    /// completes.
    // SAFETY: stores the pointer only; whoever copies through the span relies on the caller's promise above.
    pub const unsafe fn new(start: *mut u8, len: usize) -> Self {
        Self { start, len }
    }

    /// Length in bytes.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether the span is empty.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Address of the first byte.
    pub const fn start(&self) -> *mut u8 {
        self.start
    }

    /// Returns the `len` bytes from `offset`, or `None` if that range is not entirely inside the span.
    pub fn part(&self, offset: u64, len: u64) -> Option<Self> {
        let end = offset.checked_add(len)?;
        if end > self.len as u64 {
            return None;
        }
        // SAFETY: `offset` was just checked to be at most `self.len`, so the address stays within the span or one past its end.
        Some(Self { start: unsafe { self.start.add(offset as usize) }, len: len as usize })
    }

    /// Returns the first `len` bytes, or the whole span if it is shorter.
    pub fn first(&self, len: u64) -> Self {
        Self { start: self.start, len: len.min(self.len as u64) as usize }
    }

    /// Writes `bytes` at `offset`. Returns false and writes nothing if they do not fit.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> bool {
        let Some(part) = self.part(offset, bytes.len() as u64) else { return false };
        // SAFETY: `part` lies within the span, whose creator guarantees valid memory; `bytes` is the engine's own memory, which
        // no application span overlaps.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), part.start, bytes.len()) };
        true
    }

    /// Copies the bytes of `from` to `offset`. Returns false and copies nothing if they do not fit.
    pub(crate) fn copy_from(&self, offset: u64, from: Span) -> bool {
        let Some(part) = self.part(offset, from.len as u64) else { return false };
        // SAFETY: both spans' creators guarantee valid memory; the copy allows that they overlap.
        unsafe { std::ptr::copy(from.start, part.start, from.len) };
        true
    }

    /// Appends the bytes of the span to `to`.
    pub fn read_to(&self, to: &mut Vec<u8>) {
        to.reserve(self.len);
        // SAFETY: the span's creator guarantees `len` readable bytes; `reserve` made room for them behind the vector's end, and
        // they are written before the length covers them.
        unsafe {
            std::ptr::copy_nonoverlapping(self.start, to.as_mut_ptr().add(to.len()), self.len);
            to.set_len(to.len() + self.len);
        }
    }
}

/// Access rights of peers to a region.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Access {
    /// Peers may read the region.
    pub read: bool,
    /// Peers may write the region.
    pub write: bool,
}

struct Region {
    endpoint: u16,
    span: Span,
    /// Offset by which peers address the region's first byte.
    base: u64,
    access: Access,
}

/// Table of the registered regions by key.
pub(super) struct Memory {
    regions: HashMap<Key, Region>,
    /// Generator of keys. It is cryptographic, because a peer that knows some keys must not be able to compute others.
    random: ChaCha20Rng,
}

impl Memory {
    pub(super) fn new(random: ChaCha20Rng) -> Self {
        Self { regions: HashMap::new(), random }
    }

    /// Registers `span` for operations that address `endpoint`. Returns `None` if the table is full or the requested key is
    /// taken.
    pub(super) fn register(
        &mut self,
        endpoint: u16,
        span: Span,
        base: u64,
        access: Access,
        key: Option<Key>,
    ) -> Option<Key> {
        if self.regions.len() >= REGIONS_MAX {
            return None;
        }
        let key = match key {
            Some(key) => key,
            None => loop {
                let key = self.random.next_u64();
                if !self.regions.contains_key(&key) {
                    break key;
                }
            },
        };
        if self.regions.contains_key(&key) {
            return None;
        }
        self.regions.insert(key, Region { endpoint, span, base, access });
        Some(key)
    }

    /// Removes a region. Returns false if it does not exist.
    pub(super) fn deregister(&mut self, key: Key) -> bool {
        self.regions.remove(&key).is_some()
    }

    pub(super) fn has(&self, key: Key) -> bool {
        self.regions.contains_key(&key)
    }

    /// Returns the keys of the regions of `endpoint`.
    pub(super) fn keys_of(&self, endpoint: u16) -> Vec<Key> {
        self.regions.iter().filter(|(_, region)| region.endpoint == endpoint).map(|(key, _)| *key).collect()
    }

    /// Returns the `len` bytes at `at` for a peer's access through `endpoint`.
    pub(super) fn find(
        &self,
        endpoint: u16,
        key: Key,
        at: u64,
        len: u64,
        write: bool,
    ) -> Result<Span, Status> {
        let region =
            self.regions.get(&key).filter(|region| region.endpoint == endpoint).ok_or(Status::BadKey)?;
        if !(if write { region.access.write } else { region.access.read }) {
            return Err(Status::BadKey);
        }
        let offset = at.checked_sub(region.base).ok_or(Status::BadKey)?;
        region.span.part(offset, len).ok_or(Status::BadKey)
    }
}

#[cfg(test)]
mod tests {
    use chacha20::rand_core::SeedableRng;

    use super::*;

    #[test]
    fn only_what_was_registered_is_found() {
        let mut bytes = [7u8; 100];
        // SAFETY: `bytes` outlives all uses of the span below, and the test does not access it meanwhile.
        let span = unsafe { Span::new(bytes.as_mut_ptr(), bytes.len()) };
        let mut memory = Memory::new(ChaCha20Rng::from_seed([1; 32]));
        let read = Access { read: true, write: false };
        let key = memory.register(3, span, 1000, read, None).unwrap();
        assert_eq!(memory.register(3, span, 0, read, Some(key)), None);
        assert_eq!(memory.find(3, key, 1000, 100, false).unwrap().len(), 100);
        assert_eq!(memory.find(3, key, 1100, 0, false).unwrap().len(), 0);
        let refused = [
            memory.find(3, key, 1000, 100, true),
            memory.find(2, key, 1000, 100, false),
            memory.find(3, key + 1, 1000, 100, false),
            memory.find(3, key, 999, 1, false),
            memory.find(3, key, 1001, 100, false),
            memory.find(3, key, 1000, u64::MAX, false),
            memory.find(3, key, u64::MAX, u64::MAX, false),
        ];
        assert!(refused.into_iter().all(|found| found.is_err_and(|status| status == Status::BadKey)));
        assert!(memory.deregister(key) && !memory.deregister(key));
        assert!(memory.find(3, key, 1000, 1, false).is_err());
    }

    /// A SplitMix64 generator, whose state follows from any of its numbers, would reveal all keys.
    #[test]
    fn a_key_tells_nothing_of_the_next() {
        const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
        let mix = |state: u64| {
            let z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            z ^ (z >> 31)
        };
        let undo_shift = |number: u64, by: u32| (0..64 / by + 1).fold(number, |z, _| number ^ (z >> by));
        // The inverses of the two factors modulo 2^64.
        let state_of = |key: u64| {
            let z = undo_shift(key, 31).wrapping_mul(0x3196_42b2_d24d_8ec3);
            let z = undo_shift(z, 27).wrapping_mul(0x96de_1b17_3f11_9089);
            undo_shift(z, 30)
        };
        assert_eq!(mix(state_of(77)), 77);
        let mut memory = Memory::new(ChaCha20Rng::from_seed([1; 32]));
        let mut key = || memory.register(0, Span::EMPTY, 0, Access::default(), None).unwrap();
        let (first, second) = (key(), key());
        assert_ne!(mix(state_of(first).wrapping_add(STEP)), second);
    }

    #[test]
    fn spans_copy_inside_only() {
        let mut bytes = [0u8; 8];
        // SAFETY: `bytes` outlives all uses of the span below, and the test does not access it meanwhile.
        let span = unsafe { Span::new(bytes.as_mut_ptr(), bytes.len()) };
        assert!(span.write(6, &[1, 2]) && !span.write(7, &[3, 3]) && !span.write(u64::MAX, &[3]));
        let mut out = vec![9];
        span.part(5, 3).unwrap().read_to(&mut out);
        assert_eq!(out, [9, 0, 1, 2]);
        assert_eq!(span.first(3).len(), 3);
    }
}
