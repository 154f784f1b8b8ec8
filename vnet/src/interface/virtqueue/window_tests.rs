//! Windows against memory that a front end shares.

use std::fs::File;
use std::os::unix::fs::FileExt;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use super::super::memory::RegionSpec;
use super::*;

const BASE: u64 = 0x10_0000;

fn memfd(pages: u64) -> File {
    let file = memfd_create("vnet-window", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, pages * PAGE).unwrap();
    File::from(file)
}

fn region(file: &File, guest_addr: u64, pages: u64, offset: u64) -> Arc<Region> {
    let spec = RegionSpec { guest_addr, user_addr: guest_addr, len: pages * PAGE, offset };
    Region::map(spec, file).unwrap()
}

fn table(regions: &[Arc<Region>]) -> Arc<GuestMemory> {
    Arc::new(GuestMemory::new(regions.to_vec()).unwrap())
}

fn run(page: u64, pages: u64) -> PageRun {
    PageRun { addr: BASE + page * PAGE, len: pages * PAGE }
}

/// Loans of a guest with 16 pages, each of which begins with its number.
fn guest() -> (Loans, File, Arc<GuestMemory>) {
    let file = memfd(16);
    (0..16).for_each(|page| file.write_all_at(&[page as u8], page * PAGE).unwrap());
    let memory = table(&[region(&file, BASE, 16, 0)]);
    let loans = Loans::default();
    loans.follow(Some(&memory), false, None);
    (loans, file, memory)
}

fn first_bytes(window: &Window) -> Vec<u8> {
    // SAFETY: the offsets lie within the window.
    (0..window.len())
        .step_by(PAGE as usize)
        .map(|at| unsafe { window.start().add(at).read_volatile() })
        .collect()
}

#[test]
fn scattered_pages_become_one_range_of_the_same_memory() {
    let (loans, file, _memory) = guest();
    let window = loans.lend(&[run(9, 1), run(2, 3), run(15, 1), run(9, 1)]).unwrap();
    assert_eq!(first_bytes(&window), [9, 2, 3, 4, 15, 9]);
    assert_eq!((window.len() as u64, window.pieces(), loans.count()), (6 * PAGE, 4, 1));
    // SAFETY: the offset lies within the window.
    unsafe { window.start().add(PAGE as usize).write_volatile(77) };
    let mut byte = [0];
    file.read_exact_at(&mut byte, 2 * PAGE).unwrap();
    assert_eq!(byte, [77], "what is written there, the guest reads");
    drop(window);
    assert_eq!(loans.count(), 0);
}

#[test]
fn only_pages_of_the_guest_are_lent() {
    let (loans, ..) = guest();
    let lend = |runs: &[PageRun]| loans.lend(runs).map(drop);
    assert_eq!(lend(&[]), Err(WindowError::BadRuns));
    assert_eq!(lend(&[PageRun { addr: BASE + 1, len: PAGE }]), Err(WindowError::BadRuns));
    assert_eq!(lend(&[PageRun { addr: BASE, len: PAGE + 1 }]), Err(WindowError::BadRuns));
    assert_eq!(lend(&[PageRun { addr: BASE, len: 0 }]), Err(WindowError::BadRuns));
    assert_eq!(lend(&[PageRun { addr: u64::MAX - PAGE + 1, len: PAGE }]), Err(WindowError::BadRuns));
    assert_eq!(lend(&vec![run(0, 1); RUNS_MAX + 1]), Err(WindowError::BadRuns));
    let huge = PageRun { addr: 0, len: 1 << 63 };
    assert_eq!(lend(&[huge, huge]), Err(WindowError::BadRuns));
    for outside in
        [run(16, 1), run(15, 2), PageRun { addr: BASE - PAGE, len: PAGE }, PageRun { addr: 0, len: PAGE }]
    {
        assert_eq!(lend(&[run(0, 1), outside]), Err(WindowError::Outside), "{outside:?}");
    }
    assert_eq!(lend(&vec![run(3, 1); RUNS_MAX]), Ok(()));
    let kept: Vec<Window> = (0..WINDOWS_MAX).map(|_| loans.lend(&[run(0, 1)]).unwrap()).collect();
    assert_eq!(lend(&[run(0, 1)]), Err(WindowError::TooMany));
    drop(kept);
    assert_eq!(lend(&[run(0, 1)]), Ok(()));
    assert_eq!(Loans::default().lend(&[run(0, 1)]).map(drop), Err(WindowError::NotReady));
}

#[test]
fn a_run_that_crosses_two_regions_is_refused() {
    let file = memfd(4);
    let memory = table(&[region(&file, BASE, 2, 0), region(&file, BASE + 2 * PAGE, 2, 2 * PAGE)]);
    let loans = Loans::default();
    loans.follow(Some(&memory), false, None);
    assert_eq!(loans.lend(&[run(1, 2)]).map(drop), Err(WindowError::Outside));
    assert!(loans.lend(&[run(1, 1), run(2, 1)]).is_ok());
}

#[test]
fn memory_that_leaves_the_table_is_revoked_and_no_other() {
    let file = memfd(8);
    let (low, high) = (region(&file, BASE, 4, 0), region(&file, BASE + 4 * PAGE, 4, 4 * PAGE));
    let loans = Loans::default();
    loans.follow(Some(&table(&[low.clone(), high.clone()])), false, None);
    let (of_low, of_high) = (loans.lend(&[run(0, 2)]).unwrap(), loans.lend(&[run(5, 1)]).unwrap());
    let rung = Arc::new(AtomicBool::new(false));
    let told = Arc::clone(&rung);
    loans.tell(Arc::new(move || told.store(true, Ordering::Relaxed)));
    loans.follow(Some(&table(&[low.clone(), high])), false, None);
    assert!(!of_low.is_revoked() && !of_high.is_revoked() && !rung.load(Ordering::Relaxed));
    loans.follow(Some(&table(&[low])), false, None);
    assert!(!of_low.is_revoked() && of_high.is_revoked() && rung.load(Ordering::Relaxed));
    // SAFETY: the window is mapped until it is dropped.
    unsafe { of_high.start().write_volatile(1) };
    loans.revoke_all();
    assert!(of_low.is_revoked());
    assert!(loans.lend(&[run(0, 1)]).is_ok(), "the rings may start again");
    loans.follow(None, false, None);
    assert_eq!(loans.lend(&[run(0, 1)]).map(drop), Err(WindowError::NotReady));
}

#[test]
fn what_was_lent_when_a_migration_began_is_marked_as_dirty() {
    let (loans, _file, memory) = guest();
    let log_file = memfd(1);
    let log = Arc::new(DirtyLog::map(&log_file, 0, PAGE).unwrap());
    let window = loans.lend(&[run(1, 2), run(8, 1)]).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !window.is_revoked() {
                std::thread::yield_now();
            }
            drop(window);
        });
        // LOG_ALL comes before the log.
        loans.follow(Some(&memory), true, None);
        assert_eq!(loans.lend(&[run(0, 1)]).map(drop), Err(WindowError::NotReady));
        loans.follow(Some(&memory), true, Some(&log));
    });
    let page = (BASE / PAGE) as usize;
    let mut bits = [0; 64];
    log_file.read_exact_at(&mut bits, page as u64 / 8).unwrap();
    assert_eq!(bits[..3], [0b110, 1, 0]);
    assert_eq!(loans.count(), 0);
}

#[test]
fn a_truncated_file_revokes_the_window() {
    let (loans, file, _memory) = guest();
    let window = loans.lend(&[run(12, 2), run(0, 1)]).unwrap();
    ftruncate(&file, 4 * PAGE).unwrap();
    // SAFETY: the range stays mapped: the signal handler replaces missing pages.
    assert_eq!(unsafe { window.start().read_volatile() }, 0);
    assert!(window.is_revoked());
}
