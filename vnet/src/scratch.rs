//! A buffer that raw pointers may point into while other parts of it are written.
//!
//! Frames and datagrams are lists of pointers and lengths, as the kernel takes them. Some of the pointers lead into a buffer that
//! is still written to at other offsets. `Box<[u8]>` does not allow that: a mutable borrow of any part invalidates all pointers
//! into it. A [`Scratch`] creates references only to the ranges asked for.

use std::ops::Range;

/// A buffer of fixed size, initially zeroed.
pub(crate) struct Scratch {
    base: *mut [u8],
}

// SAFETY: this value owns the allocation exclusively, as a `Box<[u8]>` would.
unsafe impl Send for Scratch {}

impl Scratch {
    pub(crate) fn new(len: usize) -> Scratch {
        Scratch { base: Box::into_raw(vec![0; len].into_boxed_slice()) }
    }

    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.base.len()
    }

    /// A pointer to the byte at `offset`, at most one past the end. Borrowing other ranges does not invalidate it.
    #[inline]
    pub(crate) fn ptr(&self, offset: usize) -> *const u8 {
        debug_assert!(offset <= self.len());
        self.base.cast::<u8>().cast_const().wrapping_add(offset)
    }

    /// The bytes of `range`, read-only.
    ///
    /// # Panics
    /// When `range` exceeds the buffer.
    #[inline]
    pub(crate) fn bytes(&self, range: Range<usize>) -> &[u8] {
        assert!(range.start <= range.end && range.end <= self.len(), "range exceeds the buffer");
        // SAFETY: the range lies in our allocation, as asserted; `&self` excludes mutable references.
        unsafe { std::slice::from_raw_parts(self.ptr(range.start), range.len()) }
    }

    /// The bytes of `range`, writable.
    ///
    /// # Panics
    /// When `range` exceeds the buffer.
    #[inline]
    pub(crate) fn bytes_mut(&mut self, range: Range<usize>) -> &mut [u8] {
        assert!(range.start <= range.end && range.end <= self.len(), "range exceeds the buffer");
        let start = self.base.cast::<u8>().wrapping_add(range.start);
        // SAFETY: the range lies in our allocation, as asserted; `&mut self` excludes every other reference.
        unsafe { std::slice::from_raw_parts_mut(start, range.len()) }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // SAFETY: `base` came from `Box::into_raw` and is freed only here.
        drop(unsafe { Box::from_raw(self.base) });
    }
}
