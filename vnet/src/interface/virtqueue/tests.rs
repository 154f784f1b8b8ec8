//! Rings between a mock driver and the device: everything that goes in comes out, and what must not get in does not.

use std::collections::HashMap;

use proptest::prelude::*;

use super::mock::{GUEST_BASE, MockMemory, MockRing, USER_BASE, bytes_of};
use super::net::{BUFFERS_MAX, Format, Giver, LEGACY_HDR_LEN, Owner, Taken, take};
use super::split::needs_event;
use super::*;
use crate::frame::{Batch, FRAME_MAX, NetworkId, PortId, Segment};
use crate::stats::{DropReason, PortStats};
use crate::wire::offload::{Accepts, F_DATA_VALID, F_NEEDS_CSUM, GSO_TCPV4, Offload};

const SIZE: u16 = 16;
/// Where buffers begin, behind any ring of the tests.
const ARENA: u64 = GUEST_BASE + 0x4000;
/// Bytes of each chain's own part of the arena.
const SLOT: u64 = 0x1_4000;
const MODERN: Format = Format { header_len: 12, mergeable: true, accepts: Accepts::ALL };

/// A driver's and a device's end of one ring.
struct Pair {
    mock: MockMemory,
    driver: MockRing,
    ring: Ring,
    stats: PortStats,
    batch: Batch,
    taken: Taken,
    giver: Giver,
    slots: u64,
}

impl Pair {
    fn new(start: u16, event_idx: bool) -> Pair {
        let mock = MockMemory::new(0x4000 + SLOT * 64);
        let driver = MockRing::new(&mock, GUEST_BASE, SIZE, start);
        let ring = Ring::new(mock.map(), &driver.config(event_idx, true), None).unwrap();
        let (batch, taken, giver) = (Batch::new(), Taken::default(), Giver::default());
        Pair { mock, driver, ring, stats: PortStats::default(), batch, taken, giver, slots: 0 }
    }

    /// A place in the arena for the next chain's buffers; comes again after 64 chains.
    fn slot(&mut self) -> u64 {
        self.slots += 1;
        ARENA + self.slots % 64 * SLOT
    }

    /// Offers `bytes` cut at `cuts`, as one chain.
    fn send(&mut self, bytes: &[u8], cuts: &[usize], indirect: bool) -> Option<u16> {
        let slot = self.slot();
        let mut at = slot + if indirect { 0x1000 } else { 0 };
        let mut chain = vec![];
        let cuts: Vec<usize> = [0].iter().chain(cuts).copied().chain([bytes.len()]).collect();
        for pair in cuts.windows(2) {
            let part = &bytes[pair[0]..pair[1]];
            self.mock.write(at, part);
            // An empty buffer may point anywhere.
            let addr = if part.is_empty() { u64::MAX } else { at };
            chain.push((addr, part.len() as u32, 0));
            at += part.len() as u64;
        }
        if indirect {
            let len = 16 * chain.len() as u32;
            table(&self.mock, slot, &chain);
            chain = vec![(slot, len, DESC_INDIRECT | DESC_WRITE)];
        }
        self.driver.add(&self.mock, &chain)
    }

    fn take(&mut self, format: &Format) -> Result<usize, RingError> {
        self.driver.publish(&self.mock);
        self.batch.clear();
        let owner = Owner { port: PortId(3), network: NetworkId::DEFAULT, mtu: 9000, stats: &self.stats };
        take(&mut self.ring, format, &owner, &mut self.batch, &mut self.taken)
    }

    fn frames(&self) -> Vec<Vec<u8>> {
        let copy = |frame| {
            let mut bytes = vec![0; FRAME_MAX];
            let len = self.batch.copy_to(frame, &mut bytes);
            bytes.truncate(len);
            bytes
        };
        self.batch.frames().iter().map(copy).collect()
    }

    /// Has one transmit chain of arbitrary descriptors taken and given back; returns what it was counted as.
    fn refused_as(&mut self, chain: &[(u64, u32, u16)]) -> Option<DropReason> {
        let count = |s: &PortStats| DropReason::ALL.iter().map(|r| s.drops(*r)).collect::<Vec<_>>();
        let before = count(&self.stats);
        let head = self.driver.add(&self.mock, chain).unwrap();
        assert_eq!(self.take(&MODERN), Ok(1));
        let empty = self.batch.is_empty();
        self.taken.give_back(&mut self.ring);
        assert_eq!(self.driver.collect(&self.mock), Some((head, 0)));
        let after = count(&self.stats);
        let reason =
            DropReason::ALL.iter().enumerate().find(|(i, _)| before[*i] != after[*i]).map(|(_, r)| *r);
        assert_eq!(empty, reason.is_some());
        reason
    }

    fn give(&mut self, format: &Format, frames: &[(Vec<u8>, Offload)]) -> Result<(), RingError> {
        self.driver.publish(&self.mock);
        self.batch.clear();
        for (bytes, offload) in frames {
            let mut builder = self.batch.begin();
            // SAFETY: `frames` outlives the batch's use below, and nobody writes to it.
            unsafe { builder.push_stable(Segment::new(bytes.as_ptr(), bytes.len())) };
            builder.finish(PortId(0), NetworkId::DEFAULT, *offload, 0).unwrap();
        }
        let which: Vec<u16> = (0..frames.len() as u16).collect();
        let owner = Owner { port: PortId(3), network: NetworkId::DEFAULT, mtu: 9000, stats: &self.stats };
        let result = self.giver.give(&mut self.ring, format, &owner, &self.batch, &which);
        self.ring.publish();
        self.batch.clear();
        result
    }
}

fn table(mock: &MockMemory, at: u64, chain: &[(u64, u32, u16)]) {
    for (i, (addr, len, flags)) in chain.iter().enumerate() {
        let last = i + 1 == chain.len();
        let flags = flags | if last { 0 } else { DESC_NEXT };
        let descriptor = Descriptor { addr: *addr, len: *len, flags, next: i as u16 + 1 };
        mock.write(at + 16 * i as u64, &bytes_of(descriptor));
    }
}

/// What a receive chain of two buffers holds: its slot and the first one's room are in `buffers`.
fn contents(mock: &MockMemory, buffers: &HashMap<u16, (u64, usize)>, (head, len): (u16, u32)) -> Vec<u8> {
    let (slot, room) = buffers[&head];
    let (len, part) = (len as usize, (len as usize).min(room));
    [mock.read(slot + 0x1000, part), mock.read(slot + 0x8000, len - part)].concat()
}

fn bytes(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 7 + i / 256 + seed * 31) as u8).collect()
}

/// A frame behind an empty header of `header_len` bytes.
fn with_header(frame: &[u8], header_len: usize) -> Vec<u8> {
    [&vec![0; header_len], frame].concat()
}

/// Length, cuts (as fractions of the length), indirect or not.
fn shape() -> impl Strategy<Value = (usize, Vec<usize>, bool)> {
    let len = prop_oneof![8 => 14usize..200, 4 => 200usize..3000, 1 => Just(FRAME_MAX)];
    (len, prop::collection::vec(0usize..1000, 0..6), any::<bool>())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// Random frames in random chains come out as they went in, in order, each descriptor given back exactly once, and
    /// indices wrap without anybody noticing.
    #[test]
    fn what_a_guest_sends_is_what_comes_out(
        shapes in prop::collection::vec(shape(), 1..80),
        start in prop_oneof![any::<u16>(), Just(u16::MAX - 3)],
        event_idx: bool,
        modern: bool,
        burst in 1usize..12,
    ) {
        let mut pair = Pair::new(start, event_idx);
        let header_len = if modern { 12 } else { LEGACY_HDR_LEN };
        let format = Format { header_len, mergeable: modern, accepts: Accepts::ALL };
        let mut sent = vec![];
        let mut checked = 0;
        let mut shapes = shapes.iter().enumerate().peekable();
        while shapes.peek().is_some() {
            let mut heads = vec![];
            while let Some((seed, (len, cuts, indirect))) = shapes.peek() {
                let frame = bytes(*len, *seed);
                let wire = with_header(&frame, header_len);
                let mut cuts: Vec<usize> = cuts.iter().map(|c| c * wire.len() / 1000).collect();
                cuts.sort_unstable();
                if heads.len() == burst { break }
                let Some(head) = pair.send(&wire, &cuts, *indirect) else { break };
                heads.push(head);
                sent.push(frame);
                shapes.next();
            }
            prop_assert_eq!(pair.take(&format), Ok(heads.len()));
            let frames = pair.frames();
            prop_assert_eq!(&frames[..], &sent[checked..]);
            checked += frames.len();
            pair.taken.give_back(&mut pair.ring);
            let used: Vec<_> = std::iter::from_fn(|| pair.driver.collect(&pair.mock)).collect();
            prop_assert_eq!(used, heads.iter().map(|h| (*h, 0)).collect::<Vec<_>>());
            prop_assert_eq!(pair.driver.free.len(), usize::from(SIZE));
        }
        prop_assert_eq!(pair.stats.in_frames.get(), sent.len() as u64);
        prop_assert_eq!(pair.stats.in_bytes.get(), sent.iter().map(|f| f.len() as u64).sum::<u64>());
        prop_assert_eq!(pair.stats.drops_total(), 0);
        prop_assert_eq!(pair.ring.position(), start.wrapping_add(sent.len() as u16));
    }

    /// Random frames put into random receive chains are read back by the driver as they were, in order, or were dropped
    /// for want of room, which is counted.
    #[test]
    fn what_is_given_is_what_the_guest_reads(
        lens in prop::collection::vec(prop_oneof![14usize..100, 100usize..9000], 1..60),
        // The first chain of a frame holds its header, in one buffer or two.
        rooms in prop::collection::vec((1u32..3000, 11u32..3000, any::<bool>()), 4..16),
        start in any::<u16>(),
        mergeable: bool,
    ) {
        let mut pair = Pair::new(start, true);
        let format = Format { mergeable, ..MODERN };
        let mut buffers = HashMap::new();
        let mut next_room = 0;
        let mut expected = std::collections::VecDeque::new();
        let mut read = 0;
        for (seed, len) in lens.iter().enumerate() {
            // Refill: chains of one or two buffers, or an indirect table of two.
            loop {
                let (first, second, indirect) = rooms[next_room % rooms.len()];
                let slot = pair.slot();
                let chain = [(slot + 0x1000, first, DESC_WRITE), (slot + 0x8000, second, DESC_WRITE)];
                let head = if indirect {
                    table(&pair.mock, slot, &chain);
                    pair.driver.add(&pair.mock, &[(slot, 32, DESC_INDIRECT)])
                } else {
                    pair.driver.add(&pair.mock, &chain)
                };
                let Some(head) = head else { break };
                buffers.insert(head, (slot, first as usize));
                next_room += 1;
            }
            let frame = bytes(*len, seed);
            expected.push_back(frame.clone());
            pair.give(&format, &[(frame, Offload::default())]).unwrap();
            // The driver reads: num_buffers chains are one frame.
            while let Some(first) = pair.driver.collect(&pair.mock) {
                let mut frame = contents(&pair.mock, &buffers, first);
                let num_buffers = u16::from_le_bytes([frame[10], frame[11]]);
                prop_assert!(num_buffers == 1 || mergeable);
                for _ in 1..num_buffers {
                    let next = pair.driver.collect(&pair.mock);
                    frame.extend(contents(&pair.mock, &buffers, next.unwrap()));
                }
                let got = frame.split_off(12);
                while expected.front().is_some_and(|e| *e != got) {
                    expected.pop_front();
                }
                prop_assert!(expected.pop_front().is_some(), "a frame nobody sent");
                read += 1;
            }
        }
        let stats = &pair.stats;
        prop_assert_eq!(stats.out_frames.get(), read);
        prop_assert_eq!(read + stats.drops(DropReason::NoBuffer), lens.len() as u64);
        prop_assert_eq!(stats.drops_total(), stats.drops(DropReason::NoBuffer));
    }

    /// Whoever sleeps is woken: a driver that kicks only when asked and a device that arms before it sleeps never lose a
    /// chain, and neither does a driver that sleeps on used entries.
    #[test]
    fn suppressed_notifications_lose_no_wakeup(
        steps in prop::collection::vec((0u8..4, 1u16..5), 1..200),
        start in any::<u16>(),
        event_idx: bool,
    ) {
        let mut pair = Pair::new(start, event_idx);
        let wire = with_header(&bytes(60, 1), 12);
        let (mut asleep, mut kicked, mut kicked_at) = (false, false, start);
        // The driver waits for used entries from here on, or does not wait.
        let mut waiting: Option<u16> = None;
        let mut interrupted = false;
        pair.driver.set_used_event(&pair.mock, start.wrapping_sub(1));
        pair.ring.disarm();
        for (step, amount) in steps {
            match step {
                // The driver adds chains and kicks when the device asked for it.
                0 => {
                    for _ in 0..amount {
                        pair.send(&wire, &[], false);
                    }
                    pair.driver.publish(&pair.mock);
                    let (new, old) = (pair.driver.avail_idx, std::mem::replace(&mut kicked_at, pair.driver.avail_idx));
                    kicked |= new != old && if event_idx {
                        needs_event(pair.driver.avail_event(&pair.mock), new, old)
                    } else {
                        pair.driver.used_flags(&pair.mock) & USED_NO_NOTIFY == 0
                    };
                }
                // The device works a burst, when it is awake.
                1 => {
                    if asleep && kicked {
                        (asleep, kicked) = (false, false);
                        pair.ring.disarm();
                    }
                    if !asleep {
                        pair.take(&MODERN).unwrap();
                        interrupted |= pair.taken.give_back(&mut pair.ring);
                    }
                }
                // The device goes to sleep, if nothing waits.
                2 => if !asleep && pair.ring.arm() {
                    prop_assert_eq!(pair.ring.position(), pair.driver.avail_idx);
                    (asleep, kicked) = (true, false);
                },
                // The driver collects what is there and waits for more.
                _ => {
                    while pair.driver.collect(&pair.mock).is_some() {}
                    pair.driver.set_used_event(&pair.mock, pair.driver.used_idx);
                    waiting = Some(pair.driver.used_idx);
                    interrupted = false;
                }
            }
            let work = pair.ring.position() != pair.driver.avail_idx;
            prop_assert!(!(asleep && work) || kicked, "the device sleeps over waiting chains");
            let done = waiting.is_some_and(|from| pair.ring.position() != from);
            prop_assert!(!done || interrupted, "the driver sleeps over used chains");
        }
    }
}

#[test]
fn event_arithmetic_wraps() {
    assert!(needs_event(0, 1, 0));
    assert!(!needs_event(1, 1, 0));
    assert!(needs_event(u16::MAX, 0, u16::MAX));
    assert!(needs_event(u16::MAX, 3, u16::MAX - 4));
    assert!(!needs_event(3, 3, u16::MAX - 4));
    assert!(!needs_event(5, 5, 5));
}

#[test]
fn bad_chains_are_given_back_and_counted() {
    let mut pair = Pair::new(0, true);
    let end = GUEST_BASE + 0x4000 + SLOT * 64;
    let slot = ARENA;
    let bad = Some(DropReason::BadChain);
    // Not wholly inside one mapping.
    assert_eq!(pair.refused_as(&[(end - 10, 80, 0)]), bad);
    assert_eq!(pair.refused_as(&[(0, 80, 0)]), bad);
    assert_eq!(pair.refused_as(&[(u64::MAX - 10, 80, 0)]), bad);
    assert_eq!(pair.refused_as(&[(slot, u32::MAX, 0)]), bad);
    assert_eq!(pair.refused_as(&[(slot, 80, 0), (u64::MAX, 1, 0)]), bad);
    // Length zero points nowhere, and is no frame either.
    assert_eq!(pair.refused_as(&[(u64::MAX, 0, 0)]), bad);
    // Shorter than its header; nothing but the header; nothing readable; readable behind writable.
    assert_eq!(pair.refused_as(&[(slot, 11, 0)]), bad);
    assert_eq!(pair.refused_as(&[(slot, 12, 0)]), Some(DropReason::TooShort));
    assert_eq!(pair.refused_as(&[(slot, 25, 0)]), Some(DropReason::TooShort));
    assert_eq!(pair.refused_as(&[(slot, 80, DESC_WRITE)]), bad);
    assert_eq!(pair.refused_as(&[(slot, 80, DESC_WRITE), (slot, 80, 0)]), bad);
    // Longer than any frame.
    assert_eq!(pair.refused_as(&[(slot, 12 + FRAME_MAX as u32 + 1, 0)]), Some(DropReason::TooLong));
    // A writable buffer behind a good frame is none of our business.
    assert_eq!(pair.refused_as(&[(slot, 80, 0), (slot, 80, DESC_WRITE)]), None);
    assert_eq!(pair.stats.in_frames.get(), pair.stats.drops_total() + 1);
}

#[test]
fn bad_indirect_tables_are_given_back_and_counted() {
    let mut pair = Pair::new(0, true);
    let (slot, bad) = (ARENA, Some(DropReason::BadChain));
    let end = GUEST_BASE + 0x4000 + SLOT * 64;
    table(&pair.mock, slot, &[(slot + 0x2000, 80, 0)]);
    assert_eq!(pair.refused_as(&[(slot, 16, DESC_INDIRECT)]), None);
    // Behind direct descriptors it may come last (virtio 1.2 section 2.7.5.3.2).
    assert_eq!(pair.refused_as(&[(slot + 0x3000, 12, 0), (slot, 16, DESC_INDIRECT)]), None);
    // Not whole descriptors; none; 65 535 of them; not wholly mapped.
    for len in [0, 15, 17, 16 * 257, 16 * 65_535, u32::MAX] {
        assert_eq!(pair.refused_as(&[(slot, len, DESC_INDIRECT)]), bad, "{len}");
    }
    assert_eq!(pair.refused_as(&[(end - 16, 32, DESC_INDIRECT)]), bad);
    // Chained on; nested; leaving the table; looping.
    assert_eq!(pair.refused_as(&[(slot, 16, DESC_INDIRECT), (slot, 80, 0)]), bad);
    table(&pair.mock, slot, &[(slot, 16, DESC_INDIRECT)]);
    assert_eq!(pair.refused_as(&[(slot, 16, DESC_INDIRECT)]), bad);
    for next in [1, 0, u16::MAX] {
        let entry = Descriptor { addr: slot + 0x2000, len: 80, flags: DESC_NEXT, next };
        pair.mock.write(slot, &bytes_of(entry));
        assert_eq!(pair.refused_as(&[(slot, 16, DESC_INDIRECT)]), bad, "{next}");
    }
    // Not negotiated.
    table(&pair.mock, slot, &[(slot + 0x2000, 80, 0)]);
    let config = pair.driver.config(true, false);
    pair.ring = Ring::new(pair.mock.map(), &config, None).unwrap();
    assert_eq!(pair.refused_as(&[(slot, 16, DESC_INDIRECT)]), bad);
}

#[test]
fn loops_and_long_chains_end() {
    let mut pair = Pair::new(0, true);
    // Descriptor 0 continues in itself.
    let entry = Descriptor { addr: ARENA, len: 1, flags: DESC_NEXT, next: 0 };
    pair.driver.describe(&pair.mock, 0, entry);
    pair.driver.offer(&pair.mock, 0);
    // Descriptor 1 continues outside of the table.
    let entry = Descriptor { addr: ARENA, len: 100, flags: DESC_NEXT, next: SIZE };
    pair.driver.describe(&pair.mock, 1, entry);
    pair.driver.offer(&pair.mock, 1);
    assert_eq!(pair.take(&MODERN), Ok(2));
    assert_eq!(pair.stats.drops(DropReason::BadChain), 2);
    pair.taken.give_back(&mut pair.ring);
    assert_eq!(pair.driver.collect(&pair.mock), Some((0, 0)));
    assert_eq!(pair.driver.collect(&pair.mock), Some((1, 0)));
    // The longest chain allowed: an indirect table of 255 behind its own descriptor.
    let mut chain = vec![(ARENA + 0x8000, 1, 0); 255];
    table(&pair.mock, ARENA, &chain);
    assert_eq!(pair.refused_as(&[(ARENA, 255 * 16, DESC_INDIRECT)]), None);
    chain.push((ARENA, 1, 0));
    table(&pair.mock, ARENA, &chain);
    assert_eq!(pair.refused_as(&[(ARENA, 256 * 16, DESC_INDIRECT)]), Some(DropReason::BadChain));
}

#[test]
fn hostile_offload_metadata_is_refused() {
    let mut pair = Pair::new(0, true);
    let tso = Offload {
        flags: F_NEEDS_CSUM,
        gso_type: GSO_TCPV4,
        hdr_len: 54,
        gso_size: 1448,
        csum_start: 34,
        csum_offset: 16,
    };
    let mut try_header = |offload: Offload| {
        pair.mock.write(ARENA, &[&offload.to_virtio(0)[..], &bytes(2000, 1)].concat());
        pair.refused_as(&[(ARENA, 2012, 0)])
    };
    let bad = Some(DropReason::BadOffload);
    assert_eq!(try_header(tso), None);
    assert_eq!(try_header(Offload { gso_size: 0, ..tso }), bad);
    assert_eq!(try_header(Offload { csum_start: 1990, ..tso }), bad);
    assert_eq!(try_header(Offload { csum_start: u16::MAX, csum_offset: u16::MAX, ..tso }), bad);
    assert_eq!(try_header(Offload { gso_type: 77, ..tso }), bad);
    assert_eq!(try_header(Offload { flags: 0, ..tso }), bad);
    // A guest cannot vouch for its own checksums.
    let vouched = Offload { flags: F_DATA_VALID, ..Offload::default() };
    pair.mock.write(ARENA, &[&vouched.to_virtio(0)[..], &bytes(100, 1)].concat());
    pair.driver.add(&pair.mock, &[(ARENA, 112, 0)]);
    pair.take(&MODERN).unwrap();
    assert_eq!(pair.batch.frame(0).offload, Offload::default());
}

#[test]
fn broken_rings_are_named() {
    let mut pair = Pair::new(7, true);
    // More chains than the ring holds.
    pair.driver.avail_idx = 7 + SIZE + 1;
    let jump = RingError::AvailableJump { from: 7, to: 7 + SIZE + 1, size: SIZE };
    assert_eq!(pair.take(&MODERN), Err(jump));
    assert_eq!(pair.give(&MODERN, &[(bytes(60, 0), Offload::default())]), Err(jump));
    assert_eq!(pair.stats.drops(DropReason::NotReady), 1);
    pair.driver.avail_idx = 6;
    assert_eq!(pair.take(&MODERN), Err(RingError::AvailableJump { from: 7, to: 6, size: SIZE }));
    // A head that is no descriptor.
    pair.driver.avail_idx = 7;
    pair.driver.offer(&pair.mock, SIZE);
    assert_eq!(pair.take(&MODERN), Err(RingError::Head { index: SIZE, size: SIZE }));
    assert!(pair.batch.is_empty());
    assert_eq!(pair.driver.collect(&pair.mock), None);
}

#[test]
fn rings_lie_in_one_mapping_and_aligned() {
    let mock = MockMemory::new(0x4000);
    let memory = mock.map();
    let config = MockRing::new(&mock, GUEST_BASE, 256, 0).config(false, false);
    let new = |config| Ring::new(memory.clone(), &config, None).map(drop);
    assert_eq!(new(config), Ok(()));
    for size in [0, 3, 65_536, 0x1_0100, u32::MAX] {
        assert_eq!(new(RingConfig { size, ..config }), Err(RingError::Size(size)));
    }
    let end = USER_BASE + GUEST_BASE + 0x4000;
    let outside = |result| matches!(result, Err(RingError::Address { .. }));
    assert!(outside(new(RingConfig { descriptors: end - 16 * 255, ..config })));
    assert!(outside(new(RingConfig { available: end - 2, ..config })));
    assert!(outside(new(RingConfig { used: end - 4, ..config })));
    assert!(outside(new(RingConfig { used: u64::MAX - 3, ..config })));
    // The last ring that fits, event index included, and the first that does not.
    assert_eq!(new(RingConfig { used: end - 6 - 8 * 256 - 2, ..config }), Ok(()));
    assert!(outside(new(RingConfig { used: end - 6 - 8 * 256 + 2, ..config })));
    let misaligned = |result| matches!(result, Err(RingError::Misaligned { .. }));
    assert!(misaligned(new(RingConfig { descriptors: config.descriptors + 8, ..config })));
    assert!(misaligned(new(RingConfig { available: config.available + 1, ..config })));
    assert!(misaligned(new(RingConfig { used: config.used + 2, ..config })));
}

#[test]
fn a_ring_continues_at_its_used_index() {
    let mut pair = Pair::new(40, true);
    let wire = with_header(&bytes(60, 1), 12);
    let heads: Vec<_> = (0..3).map(|_| pair.send(&wire, &[], false).unwrap()).collect();
    // All are taken and the first is completed when the back end dies; the front end knows only the used index.
    assert_eq!(pair.take(&MODERN), Ok(3));
    pair.ring.complete(heads[0], 0);
    pair.ring.publish();
    let config = RingConfig { base: 43, ..pair.driver.config(true, true) };
    pair.ring = Ring::new(pair.mock.map(), &config, None).unwrap();
    pair.taken = Taken::default();
    assert_eq!(pair.ring.position(), 41);
    assert_eq!(pair.take(&MODERN), Ok(2));
}

#[test]
fn tiny_and_bad_receive_chains_are_bounded() {
    let mut pair = Pair::new(0, true);
    let frame = (bytes(1000, 0), Offload::default());
    let one = [frame.clone()];
    // Each chain is a table of 255 one-byte buffers: more buffers than a frame may use.
    let chain = vec![(ARENA + 0x8000, 1, DESC_WRITE); 255];
    table(&pair.mock, ARENA, &chain);
    for _ in 0..SIZE {
        pair.driver.add(&pair.mock, &[(ARENA, 255 * 16, DESC_INDIRECT)]);
    }
    pair.give(&MODERN, &one).unwrap();
    assert_eq!(pair.stats.drops(DropReason::BadChain), 1);
    let given_back: Vec<_> = std::iter::from_fn(|| pair.driver.collect(&pair.mock)).collect();
    assert!(given_back.len() <= BUFFERS_MAX / 255 && given_back.iter().all(|(_, len)| *len == 0));

    // A readable descriptor and an address outside: given back empty, one frame each.
    let mut pair = Pair::new(0, true);
    pair.driver.add(&pair.mock, &[(ARENA, 2000, 0)]);
    pair.driver.add(&pair.mock, &[(1, 2000, DESC_WRITE)]);
    pair.driver.add(&pair.mock, &[(ARENA, 2000, DESC_WRITE)]);
    pair.give(&MODERN, &[frame.clone(), frame.clone(), frame.clone(), frame]).unwrap();
    let lens: Vec<_> = std::iter::from_fn(|| pair.driver.collect(&pair.mock)).map(|(_, len)| len).collect();
    assert_eq!(lens, [0, 0, 1012]);
    assert_eq!(pair.stats.drops(DropReason::BadChain), 2);
    assert_eq!(pair.stats.drops(DropReason::NoBuffer), 1);
    assert_eq!(pair.stats.out_frames.get(), 1);
}

#[test]
fn a_header_may_be_spread_over_chains() {
    let mut pair = Pair::new(0, true);
    let slots: Vec<_> = (0..4).map(|_| pair.slot()).collect();
    for (slot, room) in slots.iter().zip([1, 10, 2, 100]) {
        pair.driver.add(&pair.mock, &[(*slot, room, DESC_WRITE)]);
    }
    let frame = bytes(60, 5);
    pair.give(&MODERN, &[(frame.clone(), Offload::default())]).unwrap();
    let lens: Vec<_> = std::iter::from_fn(|| pair.driver.collect(&pair.mock)).map(|(_, len)| len).collect();
    assert_eq!(lens, [1, 10, 2, 59]);
    let read: Vec<_> =
        slots.iter().zip(lens).flat_map(|(at, len)| pair.mock.read(*at, len as usize)).collect();
    assert_eq!(read, [&Offload::default().to_virtio(4)[..], &frame].concat());
}

#[test]
fn frames_are_finished_for_guests_that_cannot() {
    let plain = Format { accepts: Accepts::NOTHING, ..MODERN };
    let mut pair = Pair::new(0, false);
    for _ in 0..4 {
        let slot = pair.slot();
        pair.driver.add(&pair.mock, &[(slot, 4000, DESC_WRITE)]);
    }
    let slot = ARENA + SLOT;
    // A partial checksum is completed; DATA_VALID is not told to a guest that does not know it.
    let partial = Offload { flags: F_NEEDS_CSUM, csum_start: 14, csum_offset: 2, ..Offload::default() };
    let mut frame = vec![0; 60];
    frame[14] = 0x12;
    pair.give(&plain, &[(frame.clone(), partial)]).unwrap();
    let got = pair.mock.read(slot, 72);
    assert_eq!(got[..12], Offload::default().to_virtio(1));
    assert_eq!(got[28..30], (!0x1200u16).to_be_bytes());
    let valid = Offload { flags: F_DATA_VALID, ..Offload::default() };
    pair.give(&plain, &[(frame.clone(), valid)]).unwrap();
    assert_eq!(pair.mock.read(slot + SLOT, 1), [0]);
    // Who accepts it gets the partial checksum as it is.
    pair.give(&MODERN, &[(frame.clone(), partial)]).unwrap();
    assert_eq!(pair.mock.read(slot + 2 * SLOT, 12), partial.to_virtio(1));
    // A super-frame that cannot be cut, and a frame above the MTU.
    let tso = Offload { gso_type: GSO_TCPV4, gso_size: 1000, ..partial };
    pair.give(&plain, &[(vec![0; 2000], tso)]).unwrap();
    assert_eq!(pair.stats.drops(DropReason::Unsegmentable), 1);
    pair.give(&plain, &[(vec![0; 9019], Offload::default())]).unwrap();
    assert_eq!(pair.stats.drops(DropReason::MtuExceeded), 1);
    assert_eq!(pair.stats.out_frames.get(), 3);
    assert_eq!(pair.stats.copies.get(), 0);
}

#[test]
fn dirty_pages_are_logged() {
    let mock = MockMemory::new(0x1_0000);
    let mut driver = MockRing::new(&mock, GUEST_BASE, SIZE, 0);
    let file = std::fs::File::from(rustix::fs::memfd_create("log", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
    file.set_len(0x1000).unwrap();
    let log = std::sync::Arc::new(dirty::DirtyLog::map(&file, 0, 0x1000).unwrap());
    let config = RingConfig { used_log: Some(driver.used()), ..driver.config(true, true) };
    let mut ring = Ring::new(mock.map(), &config, Some(log)).unwrap();
    // Two pages of buffer, of which the frame reaches into the second.
    driver.add(&mock, &[(0x5f00, 0x2000, DESC_WRITE)]);
    driver.publish(&mock);
    let stats = PortStats::default();
    let owner = Owner { port: PortId(0), network: NetworkId::DEFAULT, mtu: 9000, stats: &stats };
    let frame = bytes(1000, 0);
    let mut batch = Batch::new();
    let mut builder = batch.begin();
    // SAFETY: `frame` outlives the batch and is not written to.
    unsafe { builder.push_stable(Segment::new(frame.as_ptr(), frame.len())) };
    builder.finish(PortId(1), NetworkId::DEFAULT, Offload::default(), 0).unwrap();
    Giver::default().give(&mut ring, &MODERN, &owner, &batch, &[0]).unwrap();
    ring.publish();
    let mut bits = [0; 2];
    rustix::io::pread(&file, &mut bits, 0).unwrap();
    assert_eq!(bits, [1 << 1 | 1 << 5 | 1 << 6, 0]);
}

/// Everything that the fuzzer has kept, whenever tests run.
#[test]
fn the_fuzzer_s_corpus_does_no_harm() {
    let corpus = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../fuzz/corpus/rings")).unwrap();
    let inputs: Vec<_> = corpus.map(|entry| std::fs::read(entry.unwrap().path()).unwrap()).collect();
    assert!(inputs.len() >= 9);
    inputs.iter().for_each(|input| fuzz::rings(input));
}

#[test]
fn arbitrary_bytes_do_no_harm() {
    let mut runner = proptest::test_runner::TestRunner::default();
    runner
        .run(&prop::collection::vec(any::<u8>(), 0..8192), |data| {
            fuzz::rings(&data);
            Ok(())
        })
        .unwrap();
}
