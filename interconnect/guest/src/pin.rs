//! Pages that stay where they are, and their guest physical addresses.
//!
//! Locked pages (mlock) are not swapped out, but the kernel may still move them (compaction, memory hot-unplug). Buffers that are registered with
//! io_uring are pinned for good (FOLL_LONGTERM); where io_uring is turned off, `vm.compact_unevictable_allowed = 0` keeps locked pages in
//! their places most of the time. In both cases a page that was moved nevertheless can only harm this machine: the host maps no
//! others.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::ptr;

use io_uring::IoUring;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mlock, mmap, munmap};
use vnet_rdma::vm::{PAGE, Pinned, Run};

/// An entry of /proc/PID/pagemap (Documentation/admin-guide/mm/pagemap.rst): the page is in memory, and its number.
const PRESENT: u64 = 1 << 63;
const PFN: u64 = (1 << 55) - 1;

/// Pinned memory, until it is dropped.
struct Mapping {
    /// Before the mapping that it pins. `None`: io_uring is turned off.
    _ring: Option<IoUring>,
    start: *mut u8,
    len: usize,
}

// SAFETY: the mapping belongs to this value; nobody reads or writes it.
unsafe impl Send for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range is this mapping's, and nothing refers to it.
        let _ = unsafe { munmap(self.start.cast(), self.len) };
    }
}

/// Pins the pages of a memfd of `len` bytes.
///
/// # Errors
/// No memory, no permission, or pages of another size than 4 KiB.
pub fn pin(memory: &OwnedFd, len: usize, note: impl Fn(&str)) -> io::Result<Pinned> {
    let len = len.next_multiple_of(PAGE as usize);
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: the kernel chooses an unused range of addresses.
    let start = unsafe { mmap(ptr::null_mut(), len, protection, MapFlags::SHARED, memory.as_fd(), 0)? };
    let mut mapping = Mapping { _ring: None, start: start.cast(), len };
    // SAFETY: the range is this mapping's. Neither call changes its bytes; the first is a wish.
    unsafe {
        let _ = madvise(start, len, Advice::LinuxHugepage);
        mlock(start, len)?;
    }
    mapping._ring = match register(&mapping) {
        Ok(ring) => Some(ring),
        Err(error) => {
            note(&format!(
                "pages are locked but not pinned, because io_uring refuses: {error}; set vm.compact_unevictable_allowed to 0"
            ));
            None
        }
    };
    Ok(Pinned { runs: runs(start as u64, len)?, keep: Box::new(mapping) })
}

/// Registers the pages as a buffer of io_uring, which pins them.
fn register(mapping: &Mapping) -> io::Result<IoUring> {
    /// Largest buffer that io_uring takes.
    const BUFFER_MAX: usize = 1 << 30;
    let ring = IoUring::new(1)?;
    let pieces = (0..mapping.len).step_by(BUFFER_MAX);
    let buffers: Vec<libc::iovec> = pieces
        .map(|at| libc::iovec {
            iov_base: mapping.start.wrapping_add(at).cast(),
            iov_len: BUFFER_MAX.min(mapping.len - at),
        })
        .collect();
    // SAFETY: the buffers lie within the mapping, which outlives the ring; nothing is submitted to it.
    unsafe { ring.submitter().register_buffers(&buffers)? };
    Ok(ring)
}

/// Guest physical addresses of mapped pages.
fn runs(start: u64, len: usize) -> io::Result<Vec<Run>> {
    let pagemap = File::open("/proc/self/pagemap")?;
    let pages = len / PAGE as usize;
    let mut entries = vec![0; pages * size_of::<u64>()];
    pagemap.read_exact_at(&mut entries, start / PAGE * size_of::<u64>() as u64)?;
    let (words, _) = entries.as_chunks::<8>();
    let mut runs: Vec<Run> = vec![];
    for entry in words.iter().map(|word| u64::from_ne_bytes(*word)) {
        let number = entry & PFN;
        if entry & PRESENT == 0 || number == 0 {
            let text = "a locked page has no address: /proc/self/pagemap shows none without CAP_SYS_ADMIN";
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, text));
        }
        let addr = number * PAGE;
        match runs.last_mut() {
            Some(last) if last.addr + u64::from(last.pages) * PAGE == addr && last.pages < u32::MAX => {
                last.pages += 1
            }
            _ => runs.push(Run { addr, pages: 1 }),
        }
    }
    Ok(runs)
}

/// Checks that physical addresses can be found.
///
/// # Errors
/// The page size is not 4 KiB, or there is no permission.
pub fn check() -> io::Result<()> {
    if rustix::param::page_size() as u64 != PAGE {
        return Err(io::Error::other("pages of this machine are not 4 KiB"));
    }
    // SAFETY: the kernel chooses an unused range of addresses, which is unmapped below.
    unsafe {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let page = rustix::mm::mmap_anonymous(ptr::null_mut(), PAGE as usize, protection, MapFlags::PRIVATE)?;
        page.cast::<u8>().write_volatile(1);
        let found = runs(page as u64, PAGE as usize);
        munmap(page, PAGE as usize)?;
        found.map(drop)
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    use super::*;

    /// Where the kernel shows physical addresses (to root, outside most containers).
    #[test]
    fn the_pages_of_a_memfd_have_addresses() {
        let memory = memfd_create("vnet-test", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&memory, 10 * PAGE + 1).unwrap();
        let pinned = pin(&memory, 10 * PAGE as usize + 1, |_| {});
        assert_eq!(pinned.is_ok(), check().is_ok());
        if let Ok(pinned) = pinned {
            assert_eq!(pinned.runs.iter().map(|run| run.pages).sum::<u32>(), 11);
            assert!(pinned.runs.iter().all(|run| run.addr.is_multiple_of(PAGE) && run.addr > 0));
        }
    }
}
