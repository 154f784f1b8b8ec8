//! Registered memory of a peer, mapped here, so that a write takes one copy.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr;

use rustix::fs::{
    MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, fstatfs, ftruncate, memfd_create,
};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

use crate::proto::Span;

/// The file system of a memfd (linux/magic.h); huge pages are another one, and end in SIGBUS if there are no more.
const TMPFS_MAGIC: u64 = 0x0102_1994;
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// Creates memory of a fixed size that other processes may map. Pages are allocated, and accounted to a process, when it first
/// touches them.
pub(crate) fn create(len: usize) -> io::Result<OwnedFd> {
    let memory = memfd_create("vnet-rdma", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&memory, len as u64)?;
    fcntl_add_seals(&memory, SEALS)?;
    Ok(memory)
}

/// Returns the size of memory that cannot shrink, so that no access to it ends in SIGBUS. Other files are not touched: their file systems
/// may be hostile.
pub(crate) fn sealed_len(memory: &OwnedFd) -> Option<usize> {
    let seals = fcntl_get_seals(memory).ok()?;
    let is_memfd = fstatfs(memory).is_ok_and(|system| system.f_type as u64 == TMPFS_MAGIC);
    let len = usize::try_from(fstat(memory).ok()?.st_size).ok()?;
    (seals.contains(SEALS) && is_memfd && len > 0).then_some(len)
}

/// The memory, mapped for as long as the ring to the peer is used.
pub(crate) struct View {
    start: *mut u8,
    len: usize,
}

// SAFETY: the mapping belongs to this value, and any thread may access and unmap it.
unsafe impl Send for View {}
// SAFETY: as above; the value itself does not change.
unsafe impl Sync for View {}

impl View {
    /// Maps memory that a peer has passed. Returns the descriptor if it is not what it should be.
    pub(crate) fn new(memory: OwnedFd) -> Result<Self, OwnedFd> {
        let Some(len) = sealed_len(&memory) else { return Err(memory) };
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the kernel chooses an unused range of addresses.
        let mapped = unsafe { mmap(ptr::null_mut(), len, protection, MapFlags::SHARED, memory.as_fd(), 0) };
        let Ok(start) = mapped else { return Err(memory) };
        let view = Self { start: start.cast(), len };
        // SAFETY: the range is this mapping's. A child process of the application must not hold the peer's memory.
        let _ = unsafe { madvise(start, len, Advice::LinuxDontFork) };
        Ok(view)
    }

    /// Copies bytes to `at`. Returns false and copies nothing if they do not fit.
    pub(crate) fn write(&self, at: u64, bytes: Span) -> bool {
        self.all().copy_from(at, bytes)
    }

    /// All bytes. They stay mapped as long as this value, and may change at any time.
    pub(crate) fn all(&self) -> Span {
        // SAFETY: the mapping is as long as this value says, and its memory may change at any time for all who use it.
        unsafe { Span::new(self.start, self.len) }
    }
}

impl Drop for View {
    fn drop(&mut self) {
        // SAFETY: the range is this mapping's, and nothing refers to it any more.
        let _ = unsafe { munmap(self.start.cast(), self.len) };
    }
}
