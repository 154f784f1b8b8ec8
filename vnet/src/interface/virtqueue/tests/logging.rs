//! Dirty pages: the log names exactly the pages that the device wrote, at a cost of what it wrote.

use proptest::prelude::*;

use super::*;

/// A receive ring with a dirty log, in guest memory of `len` bytes; `buffers` are one chain.
struct Logged {
    mock: MockMemory,
    ring: Ring,
    log: std::fs::File,
}

impl Logged {
    fn new(len: u64, size: u16, chains: &[Vec<(u64, u32, u16)>]) -> Logged {
        let mock = MockMemory::new(len);
        let mut driver = MockRing::new(&mock, GUEST_BASE, size, 0);
        let log =
            std::fs::File::from(rustix::fs::memfd_create("log", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
        let bytes = (GUEST_BASE + len).div_ceil(8 * dirty::LOG_PAGE);
        log.set_len(bytes).unwrap();
        let map = std::sync::Arc::new(dirty::DirtyLog::map(&log, 0, bytes).unwrap());
        let config = RingConfig { used_log: Some(driver.used()), ..driver.config(true, true) };
        let ring = Ring::new(mock.map(), &config, Some(map)).unwrap();
        for chain in chains {
            driver.add(&mock, chain).unwrap();
        }
        driver.publish(&mock);
        Logged { mock, ring, log }
    }

    /// Delivers a frame of 1 000 bytes.
    fn give(&mut self) {
        let stats = PortStats::default();
        let owner =
            Owner { port: PortId(0), network: NetworkId::DEFAULT, mtu: 9000, stats: &stats, format: MODERN };
        let frame = bytes(1000, 0);
        let mut batch = Batch::new();
        let mut builder = batch.begin();
        // SAFETY: `frame` outlives the batch and is not written to.
        unsafe { builder.push_stable(Segment::new(frame.as_ptr(), frame.len())) };
        builder.finish(PortId(1), NetworkId::DEFAULT, Offload::default(), 0).unwrap();
        let frames = Selection { batch: &batch, which: &[0] };
        Giver::default().give(&mut self.ring, &owner, frames, &mut DropSink::new()).unwrap();
        self.ring.publish();
        assert_eq!(stats.out_frames.get(), 1);
    }

    /// The pages marked so far.
    fn marked(&self) -> Vec<u64> {
        let mut bits = vec![0; self.log.metadata().unwrap().len() as usize];
        rustix::io::pread(&self.log, &mut bits, 0).unwrap();
        (0..8 * bits.len() as u64).filter(|page| bits[*page as usize / 8] & 1 << (page % 8) != 0).collect()
    }
}

#[test]
fn dirty_pages_are_logged() {
    // A buffer across three pages, with a frame that reaches into the second; then the same range in three buffers.
    let mut logged = Logged::new(0x1_0000, SIZE, &[vec![(0x5f00, 0x2000, DESC_WRITE)]]);
    logged.give();
    assert_eq!(logged.marked(), [1, 5, 6]);
    let chain = [(0x5ff0, 0x10, DESC_WRITE), (0x8000, 0x2000, DESC_WRITE), (0xb000, 0x1000, DESC_WRITE)];
    let mut logged = Logged::new(0x1_0000, SIZE, &[chain.to_vec()]);
    logged.give();
    assert_eq!(logged.marked(), [1, 5, 8]);
    // Several chains: the frame fills the first, and one page of the second.
    let chains = [vec![(0x5f00, 0x200, DESC_WRITE)], vec![(0x8000, 0x4000, DESC_WRITE)]];
    let mut logged = Logged::new(0x1_0000, SIZE, &chains);
    logged.give();
    assert_eq!(logged.marked(), [1, 5, 6, 8]);
}

/// The cost of a frame does not depend on the lengths that a guest claims for its buffers: 255 buffers of 4 GiB would be 2^28
/// pages.
#[test]
fn a_log_costs_what_was_written() {
    let len = (1 << 32) + 0x1_0000;
    let chain = vec![(0x8000, u32::MAX, DESC_WRITE); 255];
    let mut logged = Logged::new(len, 256, std::slice::from_ref(&chain));
    logged.give();
    // The used ring, behind descriptors and available ring; and the frame.
    let used = (GUEST_BASE + 16 * 256) / dirty::LOG_PAGE;
    assert_eq!(logged.marked(), [used, 8]);

    // The fastest of several: others may use the processor.
    let once = |_| {
        let mut logged = Logged::new(len, 256, std::slice::from_ref(&chain));
        let begun = std::time::Instant::now();
        logged.give();
        begun.elapsed()
    };
    let fastest = (0..20).map(once).min().unwrap();
    assert!(fastest < std::time::Duration::from_millis(1), "a frame took {fastest:?}");

    // The frame was written in place in vain: the pages of its room are marked.
    let mut logged = Logged::new(len, 256, &[chain]);
    let stats = PortStats::default();
    let owner =
        Owner { port: PortId(0), network: NetworkId::DEFAULT, mtu: 9000, stats: &stats, format: MODERN };
    let landed = Giver::default().land(&mut logged.ring, &owner, (&Offload::default(), 5000), &mut |_| false);
    assert_eq!((landed, logged.marked()), (Ok(false), vec![8, 9]));
    assert_eq!(logged.mock.read(0x8000, 1), [0]);
}

/// Copies, in-place writes and in-place writes in vain, into chains at any place: the marked pages are exactly the written ones.
#[test]
fn exactly_the_written_pages_are_marked() {
    let chains =
        prop::collection::vec((0u8..4, prop::collection::vec((any::<u16>(), any::<u16>()), 4)), 0..32);
    let steps = prop::collection::vec((any::<u8>(), any::<u16>(), any::<u16>()), 1..40);
    let mut runner = proptest::test_runner::TestRunner::default();
    runner
        .run(&(any::<u8>(), chains, steps), |(flags, chains, steps)| {
            let mut input = vec![flags, chains.len() as u8];
            for (more, buffers) in chains {
                input.push(more);
                for (offset, len) in &buffers[..=usize::from(more)] {
                    input.extend([offset.to_le_bytes(), len.to_le_bytes()].concat());
                }
            }
            for (step, len, addr) in steps {
                input.push(step);
                input.extend(len.to_le_bytes());
                if step % 4 == 3 {
                    input.extend(addr.to_le_bytes());
                }
            }
            fuzz_dirty::dirty(&input);
            Ok(())
        })
        .unwrap();
}

/// Runs the corpus of the fuzzer as a unit test.
#[test]
fn the_corpus_of_the_dirty_log_does_no_harm() {
    let corpus = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../fuzz/corpus/dirty")).unwrap();
    let inputs: Vec<_> = corpus.map(|entry| std::fs::read(entry.unwrap().path()).unwrap()).collect();
    assert!(inputs.len() >= 6);
    inputs.iter().for_each(|input| fuzz_dirty::dirty(input));
}
