//! Memory of the regions that the library allocates.
//!
//! It is a memfd, which the node gives to peers of the same host that know a region's key, so that their writes take one copy. When the
//! region is deregistered, private memory with the same bytes replaces it at the same address: who has mapped the memfd
//! reaches it no more.

use std::ops::Deref;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr;
use std::sync::atomic::AtomicU8;

use parking_lot::Mutex;
use rustix::mm::{MapFlags, MremapFlags, ProtFlags, mmap, mmap_anonymous, mremap_fixed, munmap};

use crate::proto::Span;
use crate::ring;

/// Smaller regions are private: their writes are pushed, not pulled, and a descriptor for each would be too much.
const SHARED_MIN: usize = 64 << 10;
const PROTECTION: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);

pub(crate) struct Pages {
    start: *mut AtomicU8,
    len: usize,
    /// The memory's file, and whether peers may have mapped it. `None`: the memory is private.
    file: Mutex<Option<(OwnedFd, bool)>>,
}

// SAFETY: the mapping belongs to this value; its bytes are accessed as atomics only.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

impl Pages {
    /// Allocates zeroed memory.
    pub(crate) fn new(len: usize) -> std::io::Result<Self> {
        Self::map(len, if len < SHARED_MIN { None } else { ring::create(len).ok() })
    }

    /// Allocates zeroed memory that can be lent, whatever its size.
    pub(crate) fn shared(len: usize) -> std::io::Result<Self> {
        Self::map(len, Some(ring::create(len.max(1))?))
    }

    fn map(len: usize, file: Option<OwnedFd>) -> std::io::Result<Self> {
        let len_mapped = len.max(1);
        // SAFETY: the kernel chooses an unused range of addresses.
        let start = unsafe {
            match &file {
                Some(file) => {
                    mmap(ptr::null_mut(), len_mapped, PROTECTION, MapFlags::SHARED, file.as_fd(), 0)?
                }
                None => mmap_anonymous(ptr::null_mut(), len_mapped, PROTECTION, MapFlags::PRIVATE)?,
            }
        };
        Ok(Self { start: start.cast(), len, file: Mutex::new(file.map(|file| (file, false))) })
    }

    /// All bytes, for operations. They stay mapped as long as this value.
    pub(crate) fn span(&self) -> Span {
        // SAFETY: whoever uses the span holds a reference to the pages meanwhile. The bytes are atomic: safe code holds no reference
        // that assumes they do not change.
        unsafe { Span::new(self.start.cast(), self.len) }
    }

    /// Returns the memory's file for a peer, if there is one.
    pub(crate) fn lend(&self) -> Option<OwnedFd> {
        let mut file = self.file.lock();
        let (file, is_lent) = file.as_mut()?;
        *is_lent = true;
        file.try_clone().ok()
    }

    /// From now on no peer reaches the memory by its file. Bytes that are written meanwhile may be lost.
    ///
    /// # Errors
    /// There is no memory for the copy. All bytes are lost then, and zeroes in their place.
    pub(super) fn take_back(&self) -> std::io::Result<()> {
        let Some((_, true)) = self.file.lock().take() else { return Ok(()) };
        let start = self.start.cast();
        // SAFETY: the new range is filled before it takes the place of the old one, in one step and with the same length, so that all
        // pointers to the memory stay valid.
        let moved = unsafe {
            mmap_anonymous(ptr::null_mut(), self.len, PROTECTION, MapFlags::PRIVATE).and_then(|copy| {
                copy.cast::<u8>().copy_from_nonoverlapping(self.start.cast(), self.len);
                mremap_fixed(copy, self.len, self.len, MremapFlags::MAYMOVE, start)
            })
        };
        let Err(error) = moved else { return Ok(()) };
        // SAFETY: as above, with zeroes.
        unsafe { mmap_anonymous(start, self.len, PROTECTION, MapFlags::PRIVATE | MapFlags::FIXED)? };
        Err(error.into())
    }
}

impl Deref for Pages {
    type Target = [AtomicU8];

    fn deref(&self) -> &[AtomicU8] {
        // SAFETY: the mapping has this length and stays until the value is dropped; all its users access the bytes as atomics, or copy
        // them without a reference.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the range is this mapping's, and nothing refers to it any more.
        let _ = unsafe { munmap(self.start.cast(), self.len.max(1)) };
    }
}
