//! Survives truncated guest memory: a front end may truncate the file under a mapping, and vnetd's next access raises SIGBUS.
//!
//! Mapped regions are registered in a fixed [`table`] that the signal handler reads without locks. The handler finds the region
//! around the faulting address, marks it *poisoned*, and maps zero pages in its place. The interrupted instruction then succeeds;
//! the queue sees the mark after the burst and disables itself. Any other fault is passed to the previously installed handler.
//!
//! Implemented here because a signal handler may only use async-signal-safe operations on memory that is set up beforehand.

#[cfg(test)]
#[path = "sigbus_model.rs"]
mod model;
#[path = "sigbus_table.rs"]
mod table;
/// The table is built from these; its model takes loom's.
mod sync {
    pub(super) use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
}

use std::io;
use std::sync::OnceLock;

use sync::{AtomicBool, AtomicU64, AtomicUsize};
use table::{PAGE, PAGES_BITS, Slot, Table};

/// Maximum number of regions mapped at a time: 1 024 interfaces with 64 memory slots each.
pub const REGIONS_MAX: usize = 65_536;
/// Maximum size of a region in bytes: its page count shares a 64-bit word with its address.
pub const REGION_LEN_MAX: u64 = (1 << PAGES_BITS) * PAGE - PAGE;

static SLOTS: [Slot; REGIONS_MAX] =
    [const { Slot { range: AtomicU64::new(0), poisoned: AtomicBool::new(false) } }; REGIONS_MAX];
static USED: AtomicUsize = AtomicUsize::new(0);
static TABLE: Table<'static> = Table { slots: &SLOTS, used: &USED };
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
        TABLE.enter(start, len).map(Registration).ok_or_else(|| {
            let text = format!("{REGIONS_MAX} memory regions are mapped already");
            io::Error::new(io::ErrorKind::OutOfMemory, text)
        })
    }

    /// True once the file under the mapping was truncated: recent reads may have returned zeros.
    #[inline]
    pub fn is_poisoned(&self) -> bool {
        TABLE.is_poisoned(self.0)
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        TABLE.leave(self.0);
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
    // SAFETY: the range is a live mapping of guest memory: a region leaves the table before it is unmapped, and is not unmapped
    // while the faulting thread uses it. Replacing it changes only bytes that the guest could also change. Several threads may
    // do so concurrently; the last thread's zeros stay. errno is restored.
    TABLE.replace_around(address, |start, len| unsafe {
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
    })
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
