//! Memory of a guest that a frame for it may be written to.

/// A run of bytes of a guest's memory. Only a pointer: who follows it needs somebody's word that the memory is there.
#[derive(Clone, Copy, Debug)]
pub struct Room {
    base: *mut u8,
    len: usize,
}

// SAFETY: a pointer and a length; having them gives no access, and who follows them needs the lender's word on any thread.
unsafe impl Send for Room {}

impl Room {
    /// Room over memory that the caller keeps writable for as long as it is lent.
    #[inline]
    pub fn new(base: *mut u8, len: usize) -> Room {
        Room { base, len }
    }

    /// First byte.
    #[inline]
    pub fn as_ptr(&self) -> *mut u8 {
        self.base
    }

    /// Bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// True when there are none.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}
