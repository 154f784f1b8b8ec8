//! Windows: pages of a guest's memory, lent to an engine of this process as one contiguous range.
//!
//! A guest names pages by guest physical addresses. [`Window::open`] duplicates their mappings, piece by piece, behind each other
//! (`mremap` with an old size of 0 maps the same pages of a shared file a second time). So a window needs no translation while it is used,
//! reaches nothing but these pages, and stays valid when the region's own mapping is gone.
//!
//! [`Loans`] is the lender's side. A loan is revoked when its pages leave the guest's memory table, when the guest's rings stop, and when a
//! migration begins; its borrower drops the window soon after. What a borrower may have written while pages were logged as dirty is marked as
//! a whole once the window is gone.

use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::mm::{MapFlags, MremapFlags, ProtFlags, mmap_anonymous, mremap_fixed, munmap};

use super::dirty::{DirtyLog, LOG_PAGE};
use super::memory::{GuestMemory, Region};
use super::sigbus::Registration;

/// Size of a guest's page in bytes: runs are multiples of it.
pub const PAGE: u64 = LOG_PAGE;
/// Maximum number of runs of one window: each becomes a mapping of this process.
pub const RUNS_MAX: usize = 1024;
/// Maximum size of a window in bytes.
pub const WINDOW_MAX: u64 = 1 << 36;
/// Maximum number of windows of one guest. Each takes a slot of the signal handler's table.
pub const WINDOWS_MAX: usize = 1024;
/// How long the end of a loan is waited for before its pages are marked: a borrower drops a window within milliseconds.
const RETURN_WITHIN: Duration = Duration::from_secs(1);

/// Contiguous guest physical memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageRun {
    /// Guest physical address, a multiple of [`PAGE`].
    pub addr: u64,
    /// Length in bytes, a positive multiple of [`PAGE`].
    pub len: u64,
}

/// Why pages are not lent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WindowError {
    /// A run is empty, no multiple of a page, or there are too many.
    #[error("the list of pages is empty, not aligned to pages, or longer than {RUNS_MAX} runs")]
    BadRuns,
    /// An address is not memory of the guest.
    #[error("an address is outside the guest's memory")]
    Outside,
    /// The guest has too many windows.
    #[error("the guest has {WINDOWS_MAX} windows already")]
    TooMany,
    /// The guest's memory consists of the host's huge pages, and a run is no multiple of them.
    #[error(
        "the guest's memory lies in huge pages of the host, and a run of its pages is no multiple of them"
    )]
    HugePages,
    /// There is no guest, or it is being migrated.
    #[error("the guest is not running, or is being migrated")]
    NotReady,
    /// The kernel refused.
    #[error("the kernel cannot map the pages a second time")]
    Map,
}

/// What lender and borrower know of a window.
#[derive(Debug)]
struct Loan {
    runs: Vec<PageRun>,
    /// Regions that contain the runs.
    regions: Vec<Weak<Region>>,
    is_revoked: AtomicBool,
}

/// Pages of a guest as one range. The guest may write to them at any time. Dropping the window returns them.
#[derive(Debug)]
pub struct Window {
    start: *mut u8,
    len: usize,
    /// `None` only during construction and drop.
    registration: Option<Registration>,
    /// Last, so that the lender learns of the end when the range is unmapped.
    loan: Arc<Loan>,
}

// SAFETY: the range belongs to the window, whose users treat its bytes as written by the guest at any time.
unsafe impl Send for Window {}
// SAFETY: as above; the window itself does not change.
unsafe impl Sync for Window {}

impl Window {
    fn open(memory: &GuestMemory, runs: &[PageRun]) -> Result<Window, WindowError> {
        let len = total(runs).ok_or(WindowError::BadRuns)?;
        let mut regions: Vec<Weak<Region>> = vec![];
        let mut pieces = Vec::with_capacity(runs.len());
        let mut at = 0;
        for run in runs {
            let (region, host) = memory.locate(run.addr, run.len).ok_or(WindowError::Outside)?;
            let page = region.page_len();
            if [host as u64, run.len, at].iter().any(|number| !number.is_multiple_of(page)) {
                return Err(WindowError::HugePages);
            }
            pieces.push((at as usize, host, run.len as usize));
            at += run.len;
            if !regions.iter().any(|known| ptr::eq(known.as_ptr(), Arc::as_ptr(region))) {
                regions.push(Arc::downgrade(region));
            }
        }
        let loan = Loan { runs: runs.to_vec(), regions, is_revoked: AtomicBool::new(false) };
        let align = memory.regions().iter().map(|region| region.page_len()).max().unwrap_or(PAGE);
        let mut window = Window::reserve(len, align as usize, loan)?;
        for (at, host, len) in pieces {
            // SAFETY: `host` is `len` bytes of a region that `memory` keeps mapped; with an old size of 0 that mapping stays as it is. The
            // target lies inside the reserved range, and both are multiples of the mapping's page size, so the kernel rounds nothing up.
            let moved = unsafe {
                let target = window.start.add(at).cast();
                mremap_fixed(host.cast(), 0, len, MremapFlags::MAYMOVE, target)
            };
            moved.map_err(|_| WindowError::Map)?;
        }
        let registration = Registration::new(window.start as usize, window.len);
        window.registration = Some(registration.map_err(|_| WindowError::Map)?);
        Ok(window)
    }

    /// Reserves addresses without memory, from a multiple of `align` on.
    fn reserve(len: usize, align: usize, loan: Loan) -> Result<Window, WindowError> {
        let spare = len.checked_add(align).ok_or(WindowError::BadRuns)?;
        // SAFETY: the kernel chooses an unused range of addresses.
        let range = unsafe { mmap_anonymous(ptr::null_mut(), spare, ProtFlags::empty(), MapFlags::PRIVATE) };
        let range = range.map_err(|_| WindowError::Map)?.cast::<u8>();
        let before = range.align_offset(align);
        let start = range.wrapping_add(before);
        for (unused, len) in [(range, before), (start.wrapping_add(len), align - before)] {
            if len > 0 {
                // SAFETY: a part of the range that was just reserved, outside the window; `before` is below `align`.
                let _ = unsafe { munmap(unused.cast(), len) };
            }
        }
        // From here on, dropping the window unmaps the range.
        Ok(Window { start, len, registration: None, loan: Arc::new(loan) })
    }

    /// Pointer to the first byte. [`Window::len`] bytes from there stay mapped, readable and writable as long as the window lives.
    pub fn start(&self) -> *mut u8 {
        self.start
    }

    /// Length in bytes.
    #[expect(clippy::len_without_is_empty, reason = "a window has at least a page")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Number of mappings that the window consists of.
    pub fn pieces(&self) -> usize {
        self.loan.runs.len()
    }

    /// True when the pages have to be returned, or their file was truncated, so that they read as zeros.
    pub fn is_revoked(&self) -> bool {
        self.loan.is_revoked.load(Ordering::Acquire)
            || self.registration.as_ref().is_some_and(Registration::is_poisoned)
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // Unregister before unmapping, as for a region.
        self.registration = None;
        // SAFETY: the range is this window's, and its last user is gone.
        if let Err(error) = unsafe { munmap(self.start.cast(), self.len) } {
            tracing::warn!(%error, "cannot unmap pages that a guest has lent");
        }
    }
}

/// Sum of the runs' lengths; `None` if they are no list of pages.
fn total(runs: &[PageRun]) -> Option<usize> {
    let is_paged = |run: &PageRun| {
        run.len > 0
            && run.addr.is_multiple_of(PAGE)
            && run.len.is_multiple_of(PAGE)
            && run.addr.checked_add(run.len).is_some()
    };
    if runs.is_empty() || runs.len() > RUNS_MAX || !runs.iter().all(is_paged) {
        return None;
    }
    let len = runs.iter().try_fold(0u64, |sum, run| sum.checked_add(run.len))?;
    usize::try_from(len).ok().filter(|_| len <= WINDOW_MAX)
}

/// A guest's memory and what is lent of it.
#[derive(Default)]
pub struct Loans(Mutex<State>);

#[derive(Default)]
struct State {
    memory: Option<Arc<GuestMemory>>,
    /// Writes to the guest's memory are logged.
    logs: bool,
    log: Option<Arc<DirtyLog>>,
    loans: Vec<Weak<Loan>>,
    /// Loans that ended while writes were logged, and whose pages are not marked yet.
    unmarked: Vec<Unmarked>,
    /// Told when loans are revoked.
    bell: Option<Bell>,
}

/// Wakes whoever has borrowed pages.
pub type Bell = Arc<dyn Fn() + Send + Sync>;

struct Unmarked {
    loan: Weak<Loan>,
    runs: Vec<PageRun>,
}

impl Loans {
    /// Lends pages of the current memory.
    ///
    /// # Errors
    /// See the variants of [`WindowError`].
    pub fn lend(&self, runs: &[PageRun]) -> Result<Window, WindowError> {
        let mut state = self.0.lock();
        state.loans.retain(|loan| loan.strong_count() > 0);
        if state.loans.len() >= WINDOWS_MAX {
            return Err(WindowError::TooMany);
        }
        let memory = state.memory.as_ref().filter(|_| !state.logs).ok_or(WindowError::NotReady)?;
        let window = Window::open(memory, runs)?;
        state.loans.push(Arc::downgrade(&window.loan));
        Ok(window)
    }

    /// From now on `bell` is rung when loans are revoked.
    pub fn tell(&self, bell: Bell) {
        self.0.lock().bell = Some(bell);
    }

    /// Follows the front end's memory table and log. Revokes loans of regions that are gone, and all while writes are logged.
    pub fn follow(&self, memory: Option<&Arc<GuestMemory>>, logs: bool, log: Option<&Arc<DirtyLog>>) {
        {
            let mut state = self.0.lock();
            (state.memory, state.logs, state.log) = (memory.cloned(), logs, log.cloned());
            if !logs {
                state.unmarked.clear();
            }
            let is_there = |region: &Weak<Region>| {
                memory.is_some_and(|memory| {
                    memory.regions().iter().any(|known| ptr::eq(Arc::as_ptr(known), region.as_ptr()))
                })
            };
            state.revoke(|loan| logs || !loan.regions.iter().all(is_there));
        }
        self.mark();
    }

    /// Revokes all loans: the guest's rings stop.
    pub fn revoke_all(&self) {
        self.0.lock().revoke(|_| true);
        self.mark();
    }

    /// Number of windows that are not dropped yet.
    pub fn count(&self) -> usize {
        self.0.lock().loans.iter().filter(|loan| loan.strong_count() > 0).count()
    }

    /// Marks the pages of loans that ended while writes were logged, after their windows are gone.
    fn mark(&self) {
        let (ended, log) = {
            let mut state = self.0.lock();
            let Some(log) = state.log.clone().filter(|_| state.logs) else { return };
            (std::mem::take(&mut state.unmarked), log)
        };
        if ended.is_empty() {
            return;
        }
        let end = Instant::now() + RETURN_WITHIN;
        while ended.iter().any(|ended| ended.loan.strong_count() > 0) && Instant::now() < end {
            std::thread::sleep(Duration::from_micros(100));
        }
        if ended.iter().any(|ended| ended.loan.strong_count() > 0) {
            tracing::warn!("an engine still uses a guest's memory while the guest is migrated");
        }
        for run in ended.iter().flat_map(|ended| &ended.runs) {
            log.mark(run.addr, run.len);
        }
        log.report();
        // What is still in use is marked again when the rings stop.
        let in_use = ended.into_iter().filter(|ended| ended.loan.strong_count() > 0);
        self.0.lock().unmarked.extend(in_use);
    }
}

impl State {
    fn revoke(&mut self, is_meant: impl Fn(&Loan) -> bool) {
        let mut revoked = 0;
        for loan in self.loans.iter().filter_map(Weak::upgrade).filter(|loan| is_meant(loan)) {
            if !loan.is_revoked.swap(true, Ordering::AcqRel) {
                revoked += 1;
                if self.logs {
                    self.unmarked.push(Unmarked { loan: Arc::downgrade(&loan), runs: loan.runs.clone() });
                }
            }
        }
        if let (Some(bell), 1..) = (&self.bell, revoked) {
            bell();
        }
    }
}

#[cfg(test)]
#[path = "window_tests.rs"]
mod tests;
