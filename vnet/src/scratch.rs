//! Memory of our own that raw pointers point into.
//!
//! Frames and datagrams are lists of pointers and lengths, as the kernel wants them, some of which lead into memory that is
//! then written to elsewhere. A `Box<[u8]>` does not allow that: borrowing any of it mutably declares all pointers into it
//! dead. A [`Scratch`] hands out references to the ranges asked for and to nothing else.

use std::ops::Range;

/// A fixed run of bytes, zero at first.
pub(crate) struct Scratch {
    base: *mut [u8],
}

// SAFETY: the allocation is this value's alone, as that of a `Box<[u8]>` would be.
unsafe impl Send for Scratch {}

impl Scratch {
    pub(crate) fn new(len: usize) -> Scratch {
        Scratch { base: Box::into_raw(vec![0; len].into_boxed_slice()) }
    }

    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.base.len()
    }

    /// A pointer to the byte at `offset`, which may be one past the end; it stays good however other ranges are borrowed.
    #[inline]
    pub(crate) fn ptr(&self, offset: usize) -> *const u8 {
        debug_assert!(offset <= self.len());
        self.base.cast::<u8>().cast_const().wrapping_add(offset)
    }

    /// The bytes of a range, to be written to.
    ///
    /// # Panics
    /// When the range leaves the memory.
    #[inline]
    pub(crate) fn bytes_mut(&mut self, range: Range<usize>) -> &mut [u8] {
        assert!(range.start <= range.end && range.end <= self.len(), "outside the scratch memory");
        let start = self.base.cast::<u8>().wrapping_add(range.start);
        // SAFETY: the range lies in our allocation, as asserted; `&mut self` keeps every other reference away.
        unsafe { std::slice::from_raw_parts_mut(start, range.len()) }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // SAFETY: `base` came from `Box::into_raw` and is freed only here.
        drop(unsafe { Box::from_raw(self.base) });
    }
}
