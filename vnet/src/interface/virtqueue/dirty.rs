//! Dirty page logging for live migration (vhost-user, "Migration"). While the VM's memory is copied to another host, vnetd marks
//! each page it writes in a bitmap shared with the front end; otherwise the guest would lose that write.
//!
//! The bitmap is memory of the front end, and hostile: a truncated file poisons its mapping ([`sigbus`](super::sigbus)), which
//! breaks the ring that logs to it. A mark changes single bits, whatever the front end writes there.

use std::fmt;
use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use super::memory::{GuestMemory, MemoryError, Region, RegionSpec};

/// Bytes of guest memory per bit (`VHOST_LOG_PAGE`).
pub const LOG_PAGE: u64 = 4096;

/// The dirty bitmap: bit `p % 8` of byte `p / 8` is the page at guest physical address `p * 4096`.
pub struct DirtyLog {
    region: Arc<Region>,
    /// Called after each burst of marks (SET_LOG_FD).
    signal: Option<Signal>,
}

/// Tells the front end that pages were marked.
pub type Signal = Arc<dyn Fn() + Send + Sync>;

impl fmt::Debug for DirtyLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DirtyLog").field("region", &self.region).finish_non_exhaustive()
    }
}

impl DirtyLog {
    /// Maps `len` bytes at `offset` of `file`.
    ///
    /// # Errors
    /// See [`Region::map`].
    pub fn map(file: &File, offset: u64, len: u64) -> Result<DirtyLog, MemoryError> {
        let region = Region::map(RegionSpec { guest_addr: 0, user_addr: 0, len, offset }, file)?;
        Ok(DirtyLog { region, signal: None })
    }

    /// The same bitmap, with `signal` called after each burst of marks.
    pub fn with_signal(&self, signal: Option<Signal>) -> DirtyLog {
        DirtyLog { region: self.region.clone(), signal }
    }

    /// Length of the bitmap in bytes.
    pub fn bytes(&self) -> u64 {
        self.region.spec().len
    }

    /// Bytes that a bitmap of `memory` needs at least.
    pub fn bytes_for(memory: &GuestMemory) -> u64 {
        // Regions are sorted and never empty.
        let last = memory.regions().last().map(|region| region.spec());
        last.map_or(0, |last| (last.guest_addr + (last.len - 1)) / LOG_PAGE / 8 + 1)
    }

    /// True once the bitmap's file was truncated: marks are lost.
    #[inline]
    pub fn is_poisoned(&self) -> bool {
        self.region.is_poisoned()
    }

    /// Reports the marks of a burst.
    pub(super) fn report(&self) {
        if let Some(signal) = &self.signal {
            signal();
        }
    }

    /// Marks the pages of `len` bytes at guest physical address `addr`. These bytes must have been written, because the cost is
    /// proportional to the number of pages. Pages beyond the bitmap are ignored.
    pub fn mark(&self, addr: u64, len: u64) {
        if len == 0 {
            return;
        }
        let last = addr.saturating_add(len - 1) / LOG_PAGE;
        for page in addr / LOG_PAGE..=last {
            if page / 8 >= self.region.spec().len {
                break;
            }
            // SAFETY: the byte lies inside the region, which stays mapped as long as `self`; a byte is always aligned, and the
            // front end, which clears bits concurrently, also uses atomic operations.
            let byte = unsafe { AtomicU8::from_ptr(self.region.host().add((page / 8) as usize)) };
            // Release: a front end that sees the bit also sees the bytes written to the page. Never skipped for a bit that is
            // set already, because the front end may clear it and copy the page before these bytes are visible.
            byte.fetch_or(1 << (page % 8), Ordering::Release);
        }
    }

    /// Marks the pages of `len` bytes from a pointer that `memory` returned.
    #[cold]
    pub fn mark_host(&self, memory: &GuestMemory, pointer: *const u8, len: usize) {
        if let Some(addr) = memory.guest_addr(pointer) {
            self.mark(addr, len as u64);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_every_written_page() {
        let file = File::from(rustix::fs::memfd_create("log", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
        file.set_len(8).unwrap();
        assert!(matches!(DirtyLog::map(&file, 4, 5), Err(MemoryError::FileTooSmall { .. })));
        assert!(DirtyLog::map(&file, u64::MAX, 2).is_err());
        assert!(DirtyLog::map(&file, 0, 0).is_err());

        let log = DirtyLog::map(&file, 4, 2).unwrap();
        log.mark(0x0fff, 2);
        log.mark(0x8000, 1);
        log.mark(0x9000, 0);
        log.mark(0xf000, u64::MAX);
        let mut bits = [0; 8];
        rustix::io::pread(&file, &mut bits, 0).unwrap();
        assert_eq!(bits, [0, 0, 0, 0, 0b11, 0b1000_0001, 0, 0]);
    }
}
