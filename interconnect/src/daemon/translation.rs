//! The memory that a container's processes have registered with the daemon's engine: what an IOMMU's translation buffer is for a device.
//!
//! A process names its memory by numbers of its own and passes a descriptor for each. The daemon maps it once; every address in a
//! submission is a number, an offset and a length, looked up here. A mapping lasts until its process is gone, because operations may
//! refer to it; the engine is dropped before.
//!
//! A virtual machine lends pages instead (`lent.rs`).
//!
//! All mappings of a container are accounted together. The pages of a sealed memfd are allocated at first touch, possibly by the daemon, so the
//! sizes of the mappings bound what a container can make the daemon allocate.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::entry::Extent;
use super::lent::Lent;
use crate::closer::close_or_leak_now;
use crate::proto::Span;
use crate::ring::{View, sealed_len};

/// Maximum number of mappings of a process. With `SERVED_MAX` processes they stay below half of the kernel's default `vm.max_map_count`.
pub(super) const MAPPINGS_MAX: usize = 1024;

/// Memory of all containers.
#[derive(Debug)]
pub(super) struct Total {
    pub(super) bytes_max: u64,
    pub(super) bytes: AtomicU64,
}

/// Memory of a container.
#[derive(Debug)]
pub(super) struct Budget {
    bytes_max: u64,
    bytes: u64,
    total: Arc<Total>,
}

impl Budget {
    pub(super) fn new(bytes_max: u64, total: Arc<Total>) -> Self {
        Self { bytes_max, bytes: 0, total }
    }

    fn left(&self) -> u64 {
        let of_all = self.total.bytes_max.saturating_sub(self.total.bytes.load(Ordering::Relaxed));
        self.bytes_max.saturating_sub(self.bytes).min(of_all)
    }

    fn take(&mut self, bytes: u64) {
        self.bytes += bytes;
        self.total.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// A process with so much memory is gone.
    pub(super) fn give_back(&mut self, bytes: u64) {
        self.bytes -= bytes;
        self.total.bytes.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// A process passed what its library never passes.
pub(super) struct Foreign;

/// The memory of one process.
#[derive(Default)]
pub(super) struct Translation {
    /// `None`: memory that was refused.
    mappings: HashMap<u32, Option<Arc<dyn Lent>>>,
    pieces: usize,
    bytes: u64,
}

impl Translation {
    /// Maps memory under this number. Returns false if it is too much.
    ///
    /// # Errors
    /// It is not sealed memory, or the number is taken.
    pub(super) fn map(&mut self, number: u32, memory: OwnedFd, budget: &mut Budget) -> Result<bool, Foreign> {
        let Some(len) = sealed_len(&memory).filter(|_| !self.has(number)) else {
            close_or_leak_now(memory);
            return Err(Foreign);
        };
        let is_too_much = self.pieces >= MAPPINGS_MAX || len as u64 > budget.left();
        let view = if is_too_much { Err(memory) } else { View::new(memory) };
        // The last close of a large file takes long.
        let Ok(view) = view.map_err(close_or_leak_now) else { return Ok(false) };
        self.insert(number, Arc::new(view), budget);
        Ok(true)
    }

    /// Uses memory that a virtual machine has lent under this number; `None`: it could not be lent. Returns false if it is not used.
    ///
    /// # Errors
    /// The number is taken.
    pub(super) fn adopt(
        &mut self,
        number: u32,
        lent: Option<Arc<dyn Lent>>,
        budget: &mut Budget,
    ) -> Result<bool, Foreign> {
        if self.has(number) {
            return Err(Foreign);
        }
        let fits = |lent: &Arc<dyn Lent>| {
            self.pieces + lent.pieces() <= MAPPINGS_MAX && lent.span().len() as u64 <= budget.left()
        };
        match lent.filter(fits) {
            Some(lent) => {
                self.insert(number, lent, budget);
                Ok(true)
            }
            None if self.mappings.len() < MAPPINGS_MAX => {
                self.mappings.insert(number, None);
                Ok(false)
            }
            None => Err(Foreign),
        }
    }

    fn insert(&mut self, number: u32, memory: Arc<dyn Lent>, budget: &mut Budget) {
        let len = memory.span().len() as u64;
        self.bytes += len;
        self.pieces += memory.pieces();
        budget.take(len);
        self.mappings.insert(number, Some(memory));
    }

    pub(super) fn has(&self, number: u32) -> bool {
        self.mappings.contains_key(&number)
    }

    /// Returns the bytes of an extent, or `None` if they are not all inside one mapping.
    pub(super) fn find(&self, extent: Extent) -> Option<Span> {
        if extent.len == 0 {
            return Some(Span::EMPTY);
        }
        self.mappings.get(&extent.memory)?.as_ref()?.span().part(extent.offset, extent.len)
    }

    /// Size of all mappings.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Number of pieces of memory in use.
    pub(super) fn mappings(&self) -> usize {
        self.mappings.values().flatten().count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ring::create;

    #[test]
    fn only_mapped_memory_is_found_and_only_so_much_is_mapped() {
        let total = Arc::new(Total { bytes_max: 4 * 4096, bytes: AtomicU64::new(0) });
        let (mut memory, mut budget) = (Translation::default(), Budget::new(3 * 4096, Arc::clone(&total)));
        let mut map =
            |memory: &mut Translation, number, len| memory.map(number, create(len).unwrap(), &mut budget);
        assert!(matches!(map(&mut memory, 7, 8192), Ok(true)));
        assert!(map(&mut memory, 7, 4096).is_err(), "the number is taken");
        let mut map = |memory: &mut Translation, number, len| map(memory, number, len).is_ok_and(|is| is);
        assert!(!map(&mut memory, 8, 8192), "too much");
        assert!(map(&mut memory, 9, 4096) && !map(&mut memory, 10, 1));
        assert_eq!((memory.bytes(), memory.mappings(), budget.bytes), (3 * 4096, 2, 3 * 4096));
        let (mut other, mut others) = (Translation::default(), Budget::new(3 * 4096, total));
        let mut fits = |others: &mut Budget, number, len| {
            other.map(number, create(len).unwrap(), others).is_ok_and(|is| is)
        };
        assert!(!fits(&mut others, 1, 8192), "too much of all");
        assert!(fits(&mut others, 1, 4096) && !fits(&mut others, 2, 4096));
        others.give_back(4096);
        assert!(fits(&mut others, 2, 4096));
        let find = |number, offset, len| memory.find(Extent { memory: number, offset, len });
        assert_eq!(find(7, 0, 8192).unwrap().len(), 8192);
        assert!(find(7, 8191, 1).is_some() && find(1, u64::MAX, 0).is_some_and(|span| span.is_empty()));
        for (number, offset, len) in
            [(7, 8192, 1), (7, 1, 8192), (7, u64::MAX, 2), (7, 1, u64::MAX), (6, 0, 1)]
        {
            assert!(find(number, offset, len).is_none(), "{number} {offset} {len}");
        }
    }

    #[test]
    fn a_file_that_may_shrink_is_not_mapped() {
        let total = Arc::new(Total { bytes_max: 1 << 30, bytes: AtomicU64::new(0) });
        let (mut memory, mut budget) = (Translation::default(), Budget::new(1 << 30, total));
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        assert!(memory.map(1, file.into(), &mut budget).is_err() && budget.bytes == 0);
    }
}
