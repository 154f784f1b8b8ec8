//! Guest memory that a frame may be received into.

/// A run of writable guest memory: a pointer and a length. Dereferencing the pointer needs the lender's guarantee that the memory
/// is mapped.
#[derive(Clone, Copy, Debug)]
pub struct Room {
    base: *mut u8,
    len: usize,
}

// SAFETY: a pointer and a length give no access by themselves; dereferencing needs the lender's guarantee on any thread.
unsafe impl Send for Room {}

impl Room {
    /// A room over memory that the caller keeps writable while it is lent.
    #[inline]
    pub fn new(base: *mut u8, len: usize) -> Room {
        Room { base, len }
    }

    /// Pointer to the first byte.
    #[inline]
    pub fn as_ptr(&self) -> *mut u8 {
        self.base
    }

    /// Length in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// True when the room has no bytes.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}
