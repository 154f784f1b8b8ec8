//! Copies messages from one process into memory that it shares with another: the upper bound for any transfer between processes of
//! one host that copies once (`lab/lab bench interconnect`).
//!
//! `copies SIZE SECONDS` starts a second process, which acknowledges each message, and prints one JSON object.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Memory behind the page of counters, and messages without acknowledgement: as `vnet-rdma-perf` has them.
const MEMORY: usize = 4 << 20;
const PAGE: usize = 4096;
const DEPTH: u64 = 16;
/// The number that ends the second process.
const LAST: u64 = u64::MAX;

/// Numbers of written and of acknowledged messages, each on a cache line of its own.
#[repr(C, align(128))]
struct Counter(AtomicU64);

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    match &words[..] {
        [mode, file] if mode == "acknowledge" => acknowledge(file.parse().expect("a descriptor")),
        [size, seconds] => {
            let size: usize = size.parse().expect("a size");
            let time = Duration::from_secs_f64(seconds.parse().expect("seconds"));
            assert!((1..=MEMORY).contains(&size), "at most {MEMORY} bytes");
            let bps = transfer(size, time);
            println!("{{\"bps\": {bps}}}");
        }
        _ => panic!("usage: copies SIZE SECONDS"),
    }
}

/// Maps the shared memory, which stays mapped; returns the counters and the start of the messages' memory.
fn map(file: libc::c_int) -> ([&'static AtomicU64; 2], *mut u8) {
    let rights = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping at an address that the kernel chooses.
    let start = unsafe { libc::mmap(std::ptr::null_mut(), PAGE + MEMORY, rights, libc::MAP_SHARED, file, 0) };
    assert_ne!(start, libc::MAP_FAILED, "{}", std::io::Error::last_os_error());
    // SAFETY: the mapping is never removed, its first page holds two counters, and both processes use them as atomics only.
    let [written, read] = unsafe { &*start.cast::<[Counter; 2]>() };
    // SAFETY: the mapping is longer than a page.
    ([&written.0, &read.0], unsafe { start.cast::<u8>().add(PAGE) })
}

fn transfer(size: usize, time: Duration) -> f64 {
    // SAFETY: the name is a C string; the second process inherits the descriptor, so it stays open across exec.
    let file = unsafe { libc::memfd_create(c"copies".as_ptr(), 0) };
    assert!(file >= 0, "{}", std::io::Error::last_os_error());
    // SAFETY: the descriptor is new and nobody else's.
    let file = unsafe { OwnedFd::from_raw_fd(file) };
    // SAFETY: the descriptor is open.
    assert_eq!(unsafe { libc::ftruncate(file.as_raw_fd(), (PAGE + MEMORY) as libc::off_t) }, 0);
    let ([written, read], messages) = map(file.as_raw_fd());
    let own = std::env::current_exe().expect("the path of this program");
    let descriptor = file.as_raw_fd().to_string();
    let mut other = Command::new(own).args(["acknowledge", &descriptor]).spawn().expect("a second process");
    let source = vec![0x5a_u8; size];
    let mut count = 0;
    // The second process may start while the first messages are copied; it has started when one is acknowledged.
    let mut begin = Instant::now();
    while begin.elapsed() < time {
        while count - read.load(Ordering::Acquire) >= DEPTH {
            std::hint::spin_loop();
        }
        // SAFETY: the message's memory is mapped and `size` fits; nobody reads it, and it does not overlap the source.
        unsafe { messages.copy_from_nonoverlapping(source.as_ptr(), size) };
        count += 1;
        written.store(count, Ordering::Release);
        if count == DEPTH {
            while read.load(Ordering::Acquire) < DEPTH {
                std::thread::yield_now();
            }
            begin = Instant::now();
        }
    }
    let seconds = begin.elapsed().as_secs_f64();
    written.store(LAST, Ordering::Release);
    other.wait().expect("the second process ends");
    count.saturating_sub(DEPTH) as f64 * size as f64 * 8.0 / seconds
}

fn acknowledge(file: libc::c_int) {
    let ([written, read], _) = map(file);
    loop {
        let count = written.load(Ordering::Acquire);
        if count == LAST {
            return;
        }
        read.store(count, Ordering::Release);
        std::hint::spin_loop();
    }
}
