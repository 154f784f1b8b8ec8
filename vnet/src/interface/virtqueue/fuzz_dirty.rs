//! Fuzz entry point: arbitrary receive chains and frames, with a dirty log that must name exactly the written pages.
//!
//! Guest memory begins with bytes that no write of the device leaves unchanged. So a page was written if and only if it differs.

use std::collections::BTreeSet;
use std::fs::File;
use std::sync::Arc;

use rustix::fs::{MemfdFlags, memfd_create};

use crate::frame::{Batch, DropSink, NetworkId, PortId, Room, Segment, Selection};
use crate::stats::PortStats;
use crate::wire::offload::{Accepts, Offload};

use super::dirty::{DirtyLog, LOG_PAGE};
use super::layout::DESC_WRITE;
use super::memory::{GuestMemory, Region, RegionSpec};
use super::mock::{GUEST_BASE, MockMemory, MockRing};
use super::net::{Format, Giver, LEGACY_HDR_LEN, Owner};
use super::split::{Ring, RingConfig};

const SIZE: u16 = 64;
/// Bytes of guest memory: two pages with the ring, and room for buffers.
const LEN: u64 = 0x1_2000;
/// Offset of the ring: its ninth used entry lies on two pages.
const RING: u64 = 0x1000 - 1232;
/// First byte of the buffers, as an offset into guest memory.
const ARENA: u64 = 0x2000;
/// Offset at which the second region begins; its guest physical addresses continue 16 MiB later.
const SPLIT: u64 = 0xa000;
const GAP: u64 = 1 << 24;
/// Initial contents of guest memory, and the frames' contents. Headers and used entries hold neither.
const BEFORE: u8 = 0xa5;
const WRITTEN: u8 = 0x5a;
/// Upper bound on the steps of one input.
const STEPS_MAX: usize = 64;

/// Takes numbers off the input; zeros behind its end.
struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    fn word(&mut self) -> u16 {
        u16::from_le_bytes([self.byte(), self.byte()])
    }
}

struct Guest {
    mock: MockMemory,
    ring: Ring,
    log: Arc<DirtyLog>,
    log_file: File,
    before: Vec<u8>,
    /// Pages marked by calls of [`DirtyLog::mark`].
    marked: BTreeSet<u64>,
}

/// The guest physical address of byte `offset` of guest memory.
fn address(offset: u64) -> u64 {
    GUEST_BASE + offset + if offset < SPLIT { 0 } else { GAP }
}

impl Guest {
    fn new(input: &mut Input<'_>, flags: u8) -> Guest {
        let mock = MockMemory::new(LEN);
        mock.write(GUEST_BASE, &vec![BEFORE; LEN as usize]);
        let mut driver = MockRing::new(&mock, GUEST_BASE + RING, SIZE, 0);
        mock.write(driver.used(), &[0; 4]);
        for _ in 0..input.byte() % 32 {
            let chain: Vec<_> = (0..=input.byte() % 4)
                .map(|_| {
                    let (offset, len) = (ARENA + u64::from(input.word()), u32::from(input.word() % 0x3000));
                    (address(offset.min(LEN - 1)), len, DESC_WRITE)
                })
                .collect();
            driver.add(&mock, &chain);
        }
        driver.publish(&mock);
        let low = RegionSpec { len: SPLIT, ..mock.spec() };
        let high = RegionSpec {
            guest_addr: address(SPLIT),
            user_addr: low.user_addr + SPLIT,
            len: LEN - SPLIT,
            offset: SPLIT,
        };
        let regions = [low, high].map(|spec| Region::map(spec, mock.file()).expect("region"));
        let memory = Arc::new(GuestMemory::new(regions.to_vec()).expect("memory"));
        let log_file = File::from(memfd_create("vnet-log", MemfdFlags::CLOEXEC).expect("memfd"));
        let bytes = DirtyLog::bytes_for(&memory);
        log_file.set_len(bytes).expect("memory");
        let log = Arc::new(DirtyLog::map(&log_file, 0, bytes).expect("log"));
        // Without an address for the ring, its own is logged.
        let used_log = (flags & 4 != 0).then_some(driver.used());
        let config = RingConfig { used_log, ..driver.config(flags & 1 != 0, true) };
        let before = mock.read(GUEST_BASE, LEN as usize);
        let mut ring = Ring::new(memory, &config, Some(log.clone())).expect("ring");
        ring.disarm();
        Guest { mock, ring, log, log_file, before, marked: BTreeSet::new() }
    }

    /// Marks `len` bytes at a guest physical address, in the log and, page by page, in the reference.
    fn mark(&mut self, addr: u64, len: u64) {
        self.log.mark(addr, len);
        let pages = (addr..addr + len).map(|byte| byte / LOG_PAGE);
        self.marked.extend(pages.filter(|page| page / 8 < self.log.bytes()));
    }

    /// Checks that the marked pages are exactly those that differ from `before`.
    fn check(&self) {
        let mut bits = vec![0; self.log.bytes() as usize];
        rustix::io::pread(&self.log_file, &mut bits, 0).expect("log");
        let is_marked = |page: u64| bits[page as usize / 8] & 1 << (page % 8) != 0;
        let marked =
            (0..8 * bits.len() as u64).filter(|page| bits[*page as usize / 8] != 0 && is_marked(*page));
        let after = self.mock.read(GUEST_BASE, LEN as usize);
        let pages = self.before.chunks(LOG_PAGE as usize).zip(after.chunks(LOG_PAGE as usize));
        let changed = pages.enumerate().filter(|(_, (before, after))| before != after);
        let mut expected = self.marked.clone();
        expected.extend(changed.map(|(page, _)| address(page as u64 * LOG_PAGE) / LOG_PAGE));
        assert_eq!(marked.collect::<BTreeSet<_>>(), expected, "exactly the written pages are marked");
    }
}

/// Runs `data`: chains of a receive ring, then frames that are copied, received in place, or received in place in vain.
///
/// # Panics
/// If the log misses a written page or names another one.
pub fn dirty(data: &[u8]) {
    let mut input = Input(data);
    let flags = input.byte();
    let mut guest = Guest::new(&mut input, flags);
    let mergeable = flags & 2 != 0;
    let header_len = if !mergeable && flags & 8 != 0 { LEGACY_HDR_LEN } else { 12 };
    let format = Format { header_len, mergeable, accepts: Accepts::ALL };
    let stats = PortStats::default();
    let owner = Owner { port: PortId(1), network: NetworkId::DEFAULT, mtu: 9000, stats: &stats, format };
    let (mut giver, mut batch, mut drops) = (Giver::default(), Batch::new(), DropSink::new());
    let bytes = vec![WRITTEN; 9014];
    guest.check();
    for _ in 0..STEPS_MAX {
        if input.0.is_empty() {
            break;
        }
        let (step, len) = (input.byte(), 14 + usize::from(input.word()) % 9001);
        let ok = match step % 4 {
            0 => {
                let mut builder = batch.begin();
                // SAFETY: `bytes` outlives the batch's use below, and no code writes to it.
                unsafe { builder.push_stable(Segment::new(bytes.as_ptr(), len)) };
                builder.finish(PortId(0), NetworkId::DEFAULT, Offload::default(), 0).expect("a frame");
                let frames = Selection { batch: &batch, which: &[0] };
                let given = giver.give(&mut guest.ring, &owner, frames, &mut drops);
                batch.clear();
                given.is_ok()
            }
            3 => {
                let addr = u64::from(input.word()) * 0x1ff;
                guest.mark(addr, len as u64);
                true
            }
            way => {
                let mut fill = |room: &[Room]| {
                    for part in room {
                        // SAFETY: the room is writable for its length until this callback returns.
                        unsafe { part.as_ptr().write_bytes(WRITTEN, part.len()) };
                    }
                    way == 1
                };
                giver.land(&mut guest.ring, &owner, (&Offload::default(), len), &mut fill).is_ok()
            }
        };
        guest.ring.publish();
        guest.check();
        if !ok {
            break;
        }
    }
}
