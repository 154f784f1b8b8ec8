//! Fuzz entry point: arbitrary bytes as a guest's memory and rings, run through the code that serves real guests.

use std::cell::RefCell;
use std::fs::File;
use std::sync::Arc;

use rustix::fs::{MemfdFlags, memfd_create};

use crate::frame::{Batch, DropSink, NetworkId, PortId, Selection};
use crate::stats::PortStats;
use crate::wire::offload::Accepts;

use super::dirty::{DirtyLog, LOG_PAGE};
use super::memory::{GuestMemory, Region, RegionSpec};
use super::mock::{GUEST_BASE, MockMemory, USER_BASE};
use super::net::{Format, Giver, LEGACY_HDR_LEN, Owner, TakenChains, take};
use super::split::{Ring, RingConfig};

/// Size of guest memory in bytes: small, so that random addresses often hit it.
pub const MEMORY_LEN: usize = 0x1_0000;
/// Bytes of input before guest memory: features, log2 of the queue size, both ring bases.
pub const PREFIX_LEN: usize = 6;
/// Offsets of the transmit and receive descriptor tables in guest memory. The available ring follows at 0x200 and the used ring at
/// 0x280, close together to keep inputs short.
pub const RINGS: [usize; 2] = [0, 0x400];

/// Guest memory reused for every input, because mapping it each time would dominate the run time.
struct World {
    mock: MockMemory,
    memory: Arc<GuestMemory>,
    batch: Batch,
    taken: TakenChains,
    giver: Giver,
    log: Arc<DirtyLog>,
    log_file: File,
}

/// Size of the dirty log in bytes: one bit per page, including the page below guest memory.
const LOG_LEN: usize = (GUEST_BASE as usize + MEMORY_LEN).div_ceil(8 * LOG_PAGE as usize);

thread_local! {
    static WORLD: RefCell<World> = RefCell::new(World::new());
}

impl World {
    fn new() -> World {
        let mock = MockMemory::new(MEMORY_LEN as u64);
        // Two adjacent mappings, so that ranges across their border are tried.
        let half = MEMORY_LEN as u64 / 2;
        let (low, high) = (mock.spec(), mock.spec());
        let low = RegionSpec { len: half, ..low };
        let high = RegionSpec {
            guest_addr: GUEST_BASE + half,
            user_addr: high.user_addr + half,
            len: half,
            offset: half,
        };
        let regions = [low, high].map(|spec| Region::map(spec, mock.file()).expect("region"));
        let memory = Arc::new(GuestMemory::new(regions.to_vec()).expect("memory"));
        let log_file = File::from(memfd_create("vnet-log", MemfdFlags::CLOEXEC).expect("memfd"));
        log_file.set_len(LOG_LEN as u64).expect("memory");
        let log = Arc::new(DirtyLog::map(&log_file, 0, LOG_LEN as u64).expect("log"));
        World {
            log,
            log_file,
            mock,
            memory,
            batch: Batch::new(),
            taken: TakenChains::default(),
            giver: Giver::default(),
        }
    }
}

/// Runs `data` as guest memory: moves frames from its transmit ring to its receive ring until no more chains move.
///
/// # Panics
/// If the guest breaks an invariant: more chains than the ring holds, frames not counted, or a page written but not logged.
pub fn rings(data: &[u8]) {
    let Some((prefix, memory)) = data.split_first_chunk::<PREFIX_LEN>() else { return };
    WORLD.with_borrow_mut(|world| {
        let mut image = memory[..memory.len().min(MEMORY_LEN)].to_vec();
        image.resize(MEMORY_LEN, 0);
        world.mock.write(GUEST_BASE, &image);
        // Feature bit 5: dirty pages are logged, as during a live migration.
        let logged = prefix[0] & 32 != 0;
        run(world, prefix, logged);
        if logged {
            check_log(world, &image);
        }
    });
}

/// Checks that every page that differs from `image` is marked. Clears the log.
fn check_log(world: &World, image: &[u8]) {
    let mut bits = [0; LOG_LEN];
    rustix::io::pread(&world.log_file, &mut bits, 0).expect("log");
    rustix::io::pwrite(&world.log_file, &[0; LOG_LEN], 0).expect("log");
    let after = world.mock.read(GUEST_BASE, MEMORY_LEN);
    let pages = image.chunks(LOG_PAGE as usize).zip(after.chunks(LOG_PAGE as usize));
    for (page, (before, after)) in
        pages.enumerate().map(|(n, pages)| (n + GUEST_BASE as usize / LOG_PAGE as usize, pages))
    {
        let marked = bits[page / 8] & 1 << (page % 8) != 0;
        assert!(marked || before == after, "page {page} was written but not logged");
    }
}

fn run(world: &mut World, prefix: &[u8; PREFIX_LEN], logged: bool) {
    let [features, size, tx_low, tx_high, rx_low, rx_high] = *prefix;
    let config = |offset: usize, base: [u8; 2]| {
        let start = USER_BASE + GUEST_BASE + offset as u64;
        RingConfig {
            size: 1 << (size % 6),
            descriptors: start,
            available: start + 0x200,
            used: start + 0x280,
            used_log: Some(start - USER_BASE + 0x280),
            base: u16::from_le_bytes(base),
            event_idx: features & 1 != 0,
            indirect: features & 2 != 0,
        }
    };
    let log = || logged.then(|| world.log.clone());
    let tx = Ring::new(world.memory.clone(), &config(RINGS[0], [tx_low, tx_high]), log());
    let rx = Ring::new(world.memory.clone(), &config(RINGS[1], [rx_low, rx_high]), log());
    let (Ok(mut tx), Ok(mut rx)) = (tx, rx) else { return };
    let format = Format {
        header_len: if features & 4 != 0 { LEGACY_HDR_LEN } else { 12 },
        mergeable: features & 8 != 0,
        accepts: if features & 16 != 0 { Accepts::ALL } else { Accepts::NOTHING },
    };
    let (stats, out) = (PortStats::default(), PortStats::default());
    let owner = |stats| Owner { port: PortId(1), network: NetworkId::DEFAULT, mtu: 9000, stats, format };
    let mut drops = DropSink::new();
    let mut given = 0;
    // A guest that does not run offers at most one ring full of chains; the device's writes may add some, so the rounds are
    // bounded.
    for _ in 0..64 {
        tx.disarm();
        let before = tx.position();
        let taken = take(&mut tx, &mut world.taken, &owner(&stats), &mut world.batch, &mut drops);
        let count = *taken.as_ref().unwrap_or(&0);
        assert_eq!(usize::from(tx.position().wrapping_sub(before)), count, "chains taken and counted");
        assert!(world.batch.len() <= count, "a frame without a chain");
        let which: Vec<u16> = (0..world.batch.len() as u16).collect();
        given += which.len() as u64;
        let delivered = world.giver.give(
            &mut rx,
            &owner(&out),
            Selection { batch: &world.batch, which: &which },
            &mut drops,
        );
        rx.publish();
        world.batch.clear();
        world.taken.give_back(&mut tx);
        if taken.is_err() || delivered.is_err() || tx.arm() || count == 0 {
            break;
        }
    }
    let sums = |s: &PortStats| s.out_frames.get() + s.drops_total();
    assert_eq!(stats.in_frames.get(), given + sums(&stats), "every chain is a frame or counted");
    assert_eq!(given + out.copies.get(), sums(&out), "every frame is delivered or counted");
}
