//! A map's memory, shared with the programs: read and written without a system call.

use std::io;
use std::os::fd::AsFd;
use std::ptr::NonNull;

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// Types that a map's memory may be seen as.
///
/// # Safety
/// All bit patterns are valid, and all fields are atomics: programs write at any time.
pub(super) unsafe trait Shared: Sync {}

// SAFETY: atomic integers only.
unsafe impl Shared for super::shared::State {}
// SAFETY: atomic integers only.
unsafe impl Shared for super::shared::Tally {}

/// The memory of an array map created with `BPF_F_MMAPABLE`.
pub(super) struct Mapping<T: Shared> {
    first: NonNull<T>,
    count: usize,
}

// SAFETY: it only lends shared references to atomics.
unsafe impl<T: Shared> Send for Mapping<T> {}
// SAFETY: as above.
unsafe impl<T: Shared> Sync for Mapping<T> {}

impl<T: Shared> Mapping<T> {
    /// Maps `count` elements from the start of the map's memory, which must hold as many.
    pub(super) fn new(map: impl AsFd, count: usize) -> io::Result<Mapping<T>> {
        // SAFETY: a new mapping at an address that the kernel chooses.
        let start = unsafe {
            mmap(
                std::ptr::null_mut(),
                count * size_of::<T>(),
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                map,
                0,
            )
        }?;
        let first = NonNull::new(start.cast()).ok_or(io::ErrorKind::InvalidData)?;
        Ok(Mapping { first, count })
    }

    pub(super) fn get(&self) -> &[T] {
        // SAFETY: the mapping has this length (a BPF map refuses a longer one), starts at a page and lives as long as `self`;
        // `Shared` allows concurrent writers.
        unsafe { std::slice::from_raw_parts(self.first.as_ptr(), self.count) }
    }
}

impl<T: Shared> Drop for Mapping<T> {
    fn drop(&mut self) {
        // SAFETY: mapped by `new` with this length; no reference outlives `self`.
        let _ = unsafe { munmap(self.first.as_ptr().cast(), self.count * size_of::<T>()) };
    }
}
