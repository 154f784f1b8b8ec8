//! Live migration: writes to guest memory are logged while the front end wants it, and rings continue on another host.

use std::fs::File;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering::SeqCst};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use vhost::VhostUserDirtyLogRegion;

use super::*;
use crate::frame::Room;
use crate::interface::virtqueue::dirty::LOG_PAGE;
use crate::interface::virtqueue::memory::{Region, RegionSpec};
use crate::interface::virtqueue::window::PageRun;

/// No page.
const NONE: [u64; 0] = [];

/// The front end's bitmap of dirty pages.
struct Log(File);

impl Log {
    /// A bitmap large enough for the guest's memory.
    fn new(guest: &Guest) -> Log {
        let spec = guest.memory.spec();
        let file = File::from(memfd_create("vnet-test-log", MemfdFlags::CLOEXEC).unwrap());
        file.set_len((spec.guest_addr + spec.len).div_ceil(8 * LOG_PAGE)).unwrap();
        Log(file)
    }

    fn bytes(&self) -> u64 {
        self.0.metadata().unwrap().len()
    }

    /// The marked pages, which are cleared.
    fn take(&self) -> Vec<u64> {
        let mut bits = vec![0; self.bytes() as usize];
        rustix::io::pread(&self.0, &mut bits, 0).unwrap();
        rustix::io::pwrite(&self.0, &vec![0; bits.len()], 0).unwrap();
        (0..8 * bits.len() as u64).filter(|page| bits[*page as usize / 8] & 1 << (page % 8) != 0).collect()
    }
}

fn page(addr: u64) -> u64 {
    addr / LOG_PAGE
}

impl Guest {
    /// SET_LOG_BASE with the first `bytes` of the log.
    fn share_log(&mut self, log: &Log, bytes: u64) -> bool {
        let region =
            VhostUserDirtyLogRegion { mmap_size: bytes, mmap_offset: 0, mmap_handle: log.0.as_raw_fd() };
        self.frontend.set_log_base(0, Some(region)).is_ok()
    }

    /// Switches logging on or off like vhost_dev_set_log in QEMU: features, then each ring's addresses.
    fn set_logging(&mut self, on: bool) {
        self.features = if on { self.features | LOG_ALL } else { self.features & !LOG_ALL };
        self.frontend.set_features(self.features).unwrap();
        for index in 0..self.rings.len() {
            let config = self.rings[index].config(true, true);
            let used_log = on.then_some(self.rings[index].used());
            self.set_addresses(index, &RingConfig { used_log, ..config });
        }
    }

    /// The pages of a ring's used ring that hold its index and its next entry.
    fn used_page(&self, index: usize) -> u64 {
        page(self.rings[index].used())
    }

    /// The page of the next receive buffer.
    fn buffer_page(&self) -> u64 {
        page(ARENA + 0x20_0000 + 0x1000 * u64::from(self.rings[0].used_idx % 512))
    }
}

fn pair() -> (Host, Guest) {
    let host = Host::new(1);
    let mut guest = Guest::connect(&host.path, 1);
    guest.start();
    (host, guest)
}

/// One frame each way, copied and in place: exactly the buffers' pages and the rings' pages are marked.
#[test]
fn writes_are_logged_from_the_request_until_it_ends() {
    let (mut host, mut guest) = pair();
    let log = Log::new(&guest);
    guest.offer(20);
    host.deliver(0, &frame(64, 0));
    assert!(guest.read().is_some());
    for _ in 0..2 {
        // A log alone changes nothing.
        assert!(guest.share_log(&log, log.bytes()));
        host.deliver(0, &frame(64, 1));
        assert!(guest.read().is_some());
        assert_eq!(log.take(), NONE);

        guest.set_logging(true);
        log.take();
        let mut expected = vec![guest.used_page(0), guest.buffer_page()];
        expected.sort_unstable();
        host.deliver(0, &frame(64, 2));
        assert_eq!(log.take(), expected);
        assert_eq!(guest.read(), Some(frame(64, 2)));

        // A transmitted frame changes the used ring alone.
        guest.transmit(&frame(64, 3));
        assert_eq!(host.receive(), [frame(64, 3)]);
        assert_eq!(log.take(), [guest.used_page(1)]);
        guest.rings[1].collect(&guest.memory).unwrap();

        // In place, then in place in vain.
        for landed in [true, false] {
            let mut expected = vec![guest.buffer_page()];
            expected.extend(landed.then(|| guest.used_page(0)));
            expected.sort_unstable();
            let mut fill = |room: &[Room]| {
                // SAFETY: the room is writable for its length until this callback returns.
                room.iter().for_each(|part| unsafe { part.as_ptr().write_bytes(1, part.len()) });
                landed
            };
            let land = host.interface.land().unwrap();
            assert_eq!(land.land(0, &Offload::default(), 1000, &mut fill), landed);
            assert_eq!(log.take(), expected, "landed: {landed}");
            assert_eq!(guest.read().is_some(), landed);
        }

        // The migration failed, after the rings were stopped: the guest goes on here, unlogged.
        for index in 0..2 {
            guest.frontend.get_vring_base(index).unwrap();
        }
        assert!(host.interface.has_departed());
        guest.set_logging(false);
        (0..2).for_each(|index| guest.start_ring(index));
        assert!(!host.interface.has_departed());
        host.deliver(0, &frame(64, 4));
        guest.transmit(&frame(64, 5));
        assert_eq!(host.receive(), [frame(64, 5)]);
        guest.rings[1].collect(&guest.memory).unwrap();
        assert_eq!(guest.read(), Some(frame(64, 4)));
        assert_eq!(log.take(), NONE);
        assert!(host.is_up(), "{}", host.reason());
    }
}

/// Chains held for zero copy are returned later: that write is logged, too, whichever thread makes it.
#[test]
fn chains_returned_late_are_logged() {
    let (mut host, mut guest) = pair();
    let log = Log::new(&guest);
    assert!(guest.share_log(&log, log.bytes()));
    guest.set_logging(true);
    guest.transmit(&frame(64, 1));
    let hold = {
        let mut drops = DropSink::new();
        let burst = receive(&mut *host.sources[0], &mut host.slot, &mut drops, 0);
        burst.hold(burst.frame(0)).expect("a guest's memory")
    };
    log.take();
    drop(hold);
    assert_eq!(guest.frontend.get_vring_base(1).unwrap(), 1);
    assert_eq!(log.take(), [guest.used_page(1)]);
    // Nothing is written after the ring has stopped.
    host.deliver(0, &frame(64, 2));
    host.source(0).reclaim();
    assert!(host.source(0).rest());
    host.source(0).resume();
    assert_eq!(log.take(), NONE);
}

/// QEMU starts the rings before it shares the log if a device restarts during a migration.
#[test]
fn nothing_is_written_before_the_log_is_shared() {
    let mut host = Host::new(1);
    let mut guest = Guest::connect(&host.path, 1);
    let log = Log::new(&guest);
    guest.features |= LOG_ALL;
    guest.start();
    guest.offer(1);
    host.deliver(0, &frame(64, 1));
    assert_eq!(guest.read(), None);
    assert!(host.reason().contains("SET_LOG_BASE"), "{}", host.reason());
    assert!(guest.share_log(&log, log.bytes()));
    assert!(host.is_up(), "{}", host.reason());
    log.take();
    host.deliver(0, &frame(64, 2));
    assert_eq!(guest.read(), Some(frame(64, 2)));
    // The rings' own addresses stand in for those that SET_VRING_ADDR lacks.
    assert!(log.take().contains(&guest.used_page(0)));
}

/// The front end wants to know of marks (SET_LOG_FD).
#[test]
fn marks_are_signalled() {
    let (mut host, mut guest) = pair();
    let (log, signal) = (Log::new(&guest), event());
    guest.frontend.set_log_fd(signal.as_raw_fd()).unwrap();
    assert!(guest.share_log(&log, log.bytes()));
    guest.offer(2);
    host.deliver(0, &frame(64, 1));
    assert!(signal.read().is_err());
    guest.set_logging(true);
    let _ = signal.read();
    host.deliver(0, &frame(64, 2));
    assert!(signal.read().is_ok());
}

/// A log that cannot hold every page would lose writes.
#[test]
fn a_log_smaller_than_memory_is_refused() {
    let (host, mut guest) = pair();
    let log = Log::new(&guest);
    assert!(guest.share_log(&log, log.bytes() - 1), "memory may still change");
    assert!(guest.frontend.set_features(guest.features | LOG_ALL).is_err());
    assert!(guest.is_closed());
    let mut guest = Guest::connect(&host.path, 1);
    guest.start();
    assert!(guest.share_log(&log, log.bytes()));
    guest.set_logging(true);
    let mut region = guest.region();
    region.guest_phys_addr = 8 * LOG_PAGE * log.bytes();
    region.userspace_addr = 0x1000;
    region.memory_size = 0x1000;
    assert!(guest.frontend.add_mem_region(&region).is_err());
}

/// A truncated log stops only the guest whose front end truncated it.
#[test]
fn a_truncated_log_breaks_its_own_rings() {
    let (mut host, mut guest) = pair();
    let (mut other, mut healthy) = pair();
    let log = Log::new(&guest);
    assert!(guest.share_log(&log, log.bytes()));
    guest.set_logging(true);
    ftruncate(&log.0, 0).unwrap();
    guest.offer(1);
    host.deliver(0, &frame(64, 1));
    assert!(host.reason().contains("dirty log was truncated"), "{}", host.reason());
    healthy.offer(1);
    other.deliver(0, &frame(64, 1));
    assert_eq!(healthy.read(), Some(frame(64, 1)));
}

/// Frames arrive while the front end copies the pages that the log names, as QEMU does: it clears a mark, then reads the page. In
/// the end the copy equals the guest's memory.
#[test]
fn a_copy_that_follows_the_log_is_complete() {
    let (mut host, mut guest) = pair();
    let log = Log::new(&guest);
    let spec = guest.memory.spec();
    assert!(guest.share_log(&log, log.bytes()));
    guest.offer(60);
    guest.set_logging(true);
    let mut copy = guest.memory.read(spec.guest_addr, spec.len as usize);
    let whole = RegionSpec { guest_addr: 0, user_addr: 0, len: log.bytes(), offset: 0 };
    let bitmap = Region::map(whole, &log.0).unwrap();
    let memory = &guest.memory;
    let mut follow = || {
        for byte in 0..log.bytes() {
            // SAFETY: the byte lies inside the mapping, which lives as long as `bitmap`; both sides use atomic operations.
            let bits = unsafe { AtomicU8::from_ptr(bitmap.host().add(byte as usize)) }.swap(0, SeqCst);
            for page in (0..8).filter(|bit| bits & 1 << bit != 0).map(|bit| 8 * byte + bit) {
                let from = page * LOG_PAGE;
                let at = (from - spec.guest_addr) as usize;
                copy[at..at + LOG_PAGE as usize].copy_from_slice(&memory.read(from, LOG_PAGE as usize));
            }
        }
    };
    let end = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for seed in 0..60 {
                host.deliver(0, &frame(1000 + usize::from(seed), seed));
            }
            end.store(true, SeqCst);
        });
        while !end.load(SeqCst) {
            follow();
        }
    });
    assert_eq!(guest.frontend.get_vring_base(0).unwrap(), 60);
    assert_eq!(guest.frontend.get_vring_base(1).unwrap(), 0);
    follow();
    assert!(copy == guest.memory.read(spec.guest_addr, spec.len as usize));
}

/// The destination continues at the index at which the source stopped, with the chains that the source left.
#[test]
fn rings_continue_on_another_host() {
    let (mut source, mut guest) = pair();
    guest.offer(3);
    source.deliver(0, &frame(64, 1));
    (1..4).for_each(|seed| guest.transmit(&frame(64, seed)));
    assert_eq!(source.receive().len(), 3);
    let log = Log::new(&guest);
    assert!(guest.share_log(&log, log.bytes()));
    guest.set_logging(true);
    let bases = [0, 1].map(|index| guest.frontend.get_vring_base(index).unwrap());
    assert_eq!(bases, [1, 3], "drained: every taken chain has been returned");
    assert!(source.interface.has_departed());
    assert!(guest.read().is_some());
    while guest.rings[1].collect(&guest.memory).is_some() {}
    guest.transmit(&frame(64, 4));
    assert!(source.receive().is_empty());

    let mut destination = Host::new(1);
    let arrived = Guest::connect(&destination.path, 1);
    let mut guest = Guest { memory: guest.memory, rings: guest.rings, ..arrived };
    guest.features &= !LOG_ALL;
    guest.start();
    assert!(source.interface.has_departed() && !destination.interface.has_departed());
    assert_eq!(destination.receive(), [frame(64, 4)]);
    destination.deliver(0, &frame(64, 5));
    assert_eq!(guest.read(), Some(frame(64, 5)));
    assert!(source.receive().is_empty());
    assert!(!source.is_up());
}

/// An engine that has borrowed pages loses them when a migration begins; all of them count as written.
#[test]
fn lent_pages_are_marked_once_they_are_given_back() {
    let (host, mut guest) = pair();
    let log = Log::new(&guest);
    let run = |page| PageRun { addr: ARENA + page * LOG_PAGE, len: LOG_PAGE };
    let loans = host.interface.loans().unwrap();
    let window = loans.lend(&[run(9), run(2)]).unwrap();
    assert!(guest.share_log(&log, log.bytes()));
    assert!(!window.is_revoked(), "a log alone changes nothing");
    std::thread::scope(|scope| {
        scope.spawn(move || {
            wait_for("the migration", || window.is_revoked());
            drop(window);
        });
        guest.set_logging(true);
    });
    let marked = log.take();
    assert!([2, 9].iter().all(|number| marked.contains(&(page(ARENA) + number))), "{marked:?}");
    assert!(!marked.contains(&(page(ARENA) + 3)));
    assert!(loans.lend(&[run(1)]).is_err(), "nothing is lent during a migration");
    guest.set_logging(false);
    assert!(loans.lend(&[run(1)]).is_ok(), "it has failed");
}
