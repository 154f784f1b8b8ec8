//! Survives truncated guest memory: a front end may truncate the file under a mapping, and vnetd's next access raises SIGBUS.
//!
//! Mapped regions are registered in a fixed table that the signal handler reads without locks. The handler finds the region
//! around the faulting address, marks it *poisoned*, and maps zero pages in its place. The interrupted instruction then succeeds;
//! the queue sees the mark after the burst and disables itself. The mark comes first: another thread may read the zeros at once.
//! Any other fault is passed to the previously installed handler.
//!
//! Implemented here because a signal handler may only use async-signal-safe operations on memory that is set up beforehand.

use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

/// Maximum number of regions mapped at a time: 1 024 interfaces with 64 memory slots each.
pub const REGIONS_MAX: usize = 65_536;
/// Maximum size of a region in bytes: its page count shares a 64-bit word with its address.
pub const REGION_LEN_MAX: u64 = (1 << PAGES_BITS) * PAGE - PAGE;

const PAGE: u64 = 4096;
const PAGES_BITS: u32 = 28;
/// Marks a slot that is taken but not filled in yet; page 0 is never mapped.
const CLAIMED: u64 = 1;

/// One region: first page number and page count in one word, so that readers never see a partial change.
struct Slot {
    range: AtomicU64,
    poisoned: AtomicBool,
}

static SLOTS: [Slot; REGIONS_MAX] =
    [const { Slot { range: AtomicU64::new(0), poisoned: AtomicBool::new(false) } }; REGIONS_MAX];
/// Index of the first slot that has never been used.
static HIGH_WATER: AtomicUsize = AtomicUsize::new(0);
static PREVIOUS: OnceLock<Option<libc::sigaction>> = OnceLock::new();

/// A region's slot in the table, freed on drop. Drop it before unmapping the region.
#[derive(Debug)]
pub struct Registration(usize);

impl Registration {
    /// Registers the mapping of `len` bytes at `start`, both multiples of 4 096. The first call installs the handler.
    ///
    /// # Errors
    /// The table is full, the range does not fit a slot, or the handler cannot be installed.
    pub fn new(start: usize, len: usize) -> io::Result<Registration> {
        let (start, len) = (start as u64, len as u64);
        let misfit = start == 0 || start % PAGE != 0 || len % PAGE != 0 || len == 0 || len > REGION_LEN_MAX;
        if misfit || start >> (64 - PAGES_BITS + 12) != 0 {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "mapping is not page aligned or above 1 TiB",
            ));
        }
        install()?;
        for (index, slot) in SLOTS.iter().enumerate() {
            if slot.range.compare_exchange(0, CLAIMED, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                slot.poisoned.store(false, Ordering::Relaxed);
                HIGH_WATER.fetch_max(index + 1, Ordering::Relaxed);
                slot.range.store(((start / PAGE) << PAGES_BITS) | (len / PAGE), Ordering::Release);
                return Ok(Registration(index));
            }
        }
        Err(io::Error::new(
            io::ErrorKind::OutOfMemory,
            format!("{REGIONS_MAX} memory regions are mapped already"),
        ))
    }

    /// True once the file under the mapping was truncated: recent reads may have returned zeros.
    #[inline]
    pub fn is_poisoned(&self) -> bool {
        SLOTS[self.0].poisoned.load(Ordering::Acquire)
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        SLOTS[self.0].range.store(0, Ordering::Release);
    }
}

/// Installs the handler once for the process.
fn install() -> io::Result<()> {
    static DONE: OnceLock<Result<(), i32>> = OnceLock::new();
    let result = DONE.get_or_init(|| {
        // SAFETY: both structures are plain data for which all zeros is a valid value; `sigaction` reads and writes only them. The
        // handler uses only async-signal-safe operations: atomics, mmap, sigaction, raise.
        unsafe {
            let mut previous: libc::sigaction = std::mem::zeroed();
            if libc::sigaction(libc::SIGBUS, std::ptr::null(), &mut previous) != 0 {
                return Err(io::Error::last_os_error().raw_os_error().unwrap_or(libc::EINVAL));
            }
            // Stored before the handler can run, so that the handler always finds it.
            let _ = PREVIOUS.set(Some(previous));
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = on_sigbus as extern "C" fn(_, _, _) as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            if libc::sigaction(libc::SIGBUS, &action, std::ptr::null_mut()) != 0 {
                return Err(io::Error::last_os_error().raw_os_error().unwrap_or(libc::EINVAL));
            }
        }
        Ok(())
    });
    result.map_err(io::Error::from_raw_os_error)
}

extern "C" fn on_sigbus(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: with SA_SIGINFO the kernel passes a valid siginfo; for SIGBUS with si_code > 0 it holds an address.
    let (code, address) = unsafe { ((*info).si_code, (*info).si_addr() as usize) };
    if code > 0 && replace_region_at(address as u64) {
        return;
    }
    call_previous_handler(signal, info, context);
}

/// Maps zero pages in place of the region around `address`. Returns false if there is no such region or the kernel is out of
/// memory.
fn replace_region_at(address: u64) -> bool {
    let used = HIGH_WATER.load(Ordering::Relaxed).min(REGIONS_MAX);
    for slot in &SLOTS[..used] {
        let range = slot.range.load(Ordering::Acquire);
        let start = (range >> PAGES_BITS) * PAGE;
        let len = (range & ((1 << PAGES_BITS) - 1)) * PAGE;
        if start == 0 || address.wrapping_sub(start) >= len {
            continue;
        }
        // SAFETY: the range is a live mapping of guest memory: a region leaves the table before it is unmapped, and is not
        // unmapped while the faulting thread uses it. Replacing it changes only bytes that the guest could also change. Several
        // threads may do so concurrently; the last thread's zeros stay. errno is restored.
        return poison(slot, || unsafe {
            let errno = libc::__errno_location();
            let saved = *errno;
            let page = libc::mmap(
                start as *mut libc::c_void,
                len as usize,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_FIXED | libc::MAP_ANONYMOUS | libc::MAP_PRIVATE | libc::MAP_NORESERVE,
                -1,
                0,
            );
            *errno = saved;
            page != libc::MAP_FAILED
        });
    }
    false
}

/// Marks a region as poisoned, then replaces its pages, so that a thread that reads a replaced page sees the mark afterwards.
fn poison(slot: &Slot, replace: impl FnOnce() -> bool) -> bool {
    // Sequentially consistent: the mark is visible before the system call that changes the page tables.
    slot.poisoned.store(true, Ordering::SeqCst);
    replace()
}

/// Passes a foreign fault to the previously installed handler.
fn call_previous_handler(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let previous = PREVIOUS.get().copied().flatten();
    let handler = previous.map_or(libc::SIG_DFL, |p| p.sa_sigaction);
    if handler == libc::SIG_DFL || handler == libc::SIG_IGN {
        // SAFETY: a zeroed sigaction is valid and means SIG_DFL; the raised signal is delivered when this handler returns.
        unsafe {
            let default: libc::sigaction = std::mem::zeroed();
            libc::sigaction(signal, &default, std::ptr::null_mut());
            libc::raise(signal);
        }
    } else if previous.is_some_and(|p| p.sa_flags & libc::SA_SIGINFO != 0) {
        // SAFETY: the kernel returned this address as a handler installed with SA_SIGINFO, which has this signature.
        let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
            unsafe { std::mem::transmute(handler) };
        handler(signal, info, context);
    } else {
        // SAFETY: the kernel returned this address as a handler installed without SA_SIGINFO, which has this signature.
        let handler: extern "C" fn(libc::c_int) = unsafe { std::mem::transmute(handler) };
        handler(signal);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mark_is_set_before_the_pages_are_replaced() {
        let slot = Slot { range: AtomicU64::new(0), poisoned: AtomicBool::new(false) };
        assert!(
            poison(&slot, || slot.poisoned.load(Ordering::Acquire)),
            "zeros could be read without the mark"
        );
    }
}
