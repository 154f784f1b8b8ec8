//! Hostile guests: one test per kind of attack.

use proptest::prelude::*;

use super::*;

#[test]
fn bad_chains_are_returned_and_counted() {
    let mut pair = Pair::new(0, true);
    let end = GUEST_BASE + 0x4000 + SLOT * 64;
    let slot = ARENA;
    let bad = Some(DropReason::BadChain);
    // The buffer does not lie inside one mapping.
    assert_eq!(pair.refused_as(&[(end - 10, 80, 0)]), bad);
    assert_eq!(pair.refused_as(&[(0, 80, 0)]), bad);
    assert_eq!(pair.refused_as(&[(u64::MAX - 10, 80, 0)]), bad);
    assert_eq!(pair.refused_as(&[(slot, u32::MAX, 0)]), bad);
    assert_eq!(pair.refused_as(&[(slot, 80, 0), (u64::MAX, 1, 0)]), bad);
    // The address of an empty buffer is ignored, and an empty chain is no frame.
    assert_eq!(pair.refused_as(&[(u64::MAX, 0, 0)]), bad);
    // A chain shorter than the header; only the header; nothing readable; readable after writable.
    assert_eq!(pair.refused_as(&[(slot, 11, 0)]), bad);
    assert_eq!(pair.refused_as(&[(slot, 12, 0)]), Some(DropReason::TooShort));
    assert_eq!(pair.refused_as(&[(slot, 25, 0)]), Some(DropReason::TooShort));
    assert_eq!(pair.refused_as(&[(slot, 80, DESC_WRITE)]), bad);
    assert_eq!(pair.refused_as(&[(slot, 80, DESC_WRITE), (slot, 80, 0)]), bad);
    // A frame longer than any allowed.
    assert_eq!(pair.refused_as(&[(slot, 12 + FRAME_MAX as u32 + 1, 0)]), Some(DropReason::TooLong));
    // A writable buffer behind a good frame is ignored.
    assert_eq!(pair.refused_as(&[(slot, 80, 0), (slot, 80, DESC_WRITE)]), None);
    assert_eq!(pair.stats.in_frames.get(), pair.stats.drops_total() + 1);
}

#[test]
fn bad_indirect_tables_are_returned_and_counted() {
    let mut pair = Pair::new(0, true);
    let (slot, bad) = (ARENA, Some(DropReason::BadChain));
    let end = GUEST_BASE + 0x4000 + SLOT * 64;
    table(&pair.mock, slot, &[(slot + 0x2000, 80, 0)]);
    assert_eq!(pair.refused_as(&[(slot, 16, DESC_INDIRECT)]), None);
    // An indirect descriptor may follow direct ones (virtio 1.2 section 2.7.5.3.2).
    assert_eq!(pair.refused_as(&[(slot + 0x3000, 12, 0), (slot, 16, DESC_INDIRECT)]), None);
    // Partial descriptors; no descriptors; 65 535 of them; not inside one mapping.
    for len in [0, 15, 17, 16 * 257, 16 * 65_535, u32::MAX] {
        assert_eq!(pair.refused_as(&[(slot, len, DESC_INDIRECT)]), bad, "{len}");
    }
    assert_eq!(pair.refused_as(&[(end - 16, 32, DESC_INDIRECT)]), bad);
    // NEXT flag on an indirect descriptor; nested table; next outside the table; loop.
    assert_eq!(pair.refused_as(&[(slot, 16, DESC_INDIRECT), (slot, 80, 0)]), bad);
    table(&pair.mock, slot, &[(slot, 16, DESC_INDIRECT)]);
    assert_eq!(pair.refused_as(&[(slot, 16, DESC_INDIRECT)]), bad);
    for next in [1, 0, u16::MAX] {
        let entry = Descriptor { addr: slot + 0x2000, len: 80, flags: DESC_NEXT, next };
        pair.mock.write(slot, &bytes_of(entry));
        assert_eq!(pair.refused_as(&[(slot, 16, DESC_INDIRECT)]), bad, "{next}");
    }
    // INDIRECT_DESC was not negotiated.
    table(&pair.mock, slot, &[(slot + 0x2000, 80, 0)]);
    let config = pair.driver.config(true, false);
    pair.ring = Ring::new(pair.mock.map(), &config, None).unwrap();
    assert_eq!(pair.refused_as(&[(slot, 16, DESC_INDIRECT)]), bad);
}

#[test]
fn loops_and_overlong_chains_are_refused() {
    let mut pair = Pair::new(0, true);
    // Descriptor 0 continues at itself.
    let entry = Descriptor { addr: ARENA, len: 1, flags: DESC_NEXT, next: 0 };
    pair.driver.describe(&pair.mock, 0, entry);
    pair.driver.offer(&pair.mock, 0);
    // Descriptor 1 continues outside the table.
    let entry = Descriptor { addr: ARENA, len: 100, flags: DESC_NEXT, next: SIZE };
    pair.driver.describe(&pair.mock, 1, entry);
    pair.driver.offer(&pair.mock, 1);
    assert_eq!(pair.take(&MODERN), Ok(2));
    assert_eq!(pair.stats.drops(DropReason::BadChain), 2);
    pair.taken.give_back(&mut pair.ring);
    assert_eq!(pair.driver.collect(&pair.mock), Some((0, 0)));
    assert_eq!(pair.driver.collect(&pair.mock), Some((1, 0)));
    // The longest allowed chain: an indirect table of 255 behind a direct descriptor.
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
    // DATA_VALID from a guest is cleared.
    let data_valid = Offload { flags: F_DATA_VALID, ..Offload::default() };
    pair.mock.write(ARENA, &[&data_valid.to_virtio(0)[..], &bytes(100, 1)].concat());
    pair.driver.add(&pair.mock, &[(ARENA, 112, 0)]);
    pair.take(&MODERN).unwrap();
    assert_eq!(pair.batch.frame(0).offload, Offload::default());
}

#[test]
fn ring_errors_tell_the_cause() {
    let mut pair = Pair::new(7, true);
    // More new chains than the ring has entries.
    pair.driver.avail_idx = 7 + SIZE + 1;
    let jump = RingError::AvailableJump { from: 7, to: 7 + SIZE + 1, size: SIZE };
    assert_eq!(pair.take(&MODERN), Err(jump));
    assert_eq!(pair.give(&MODERN, &[(bytes(60, 0), Offload::default())]), Err(jump));
    assert_eq!(pair.stats.drops(DropReason::NotReady), 1);
    pair.driver.avail_idx = 6;
    assert_eq!(pair.take(&MODERN), Err(RingError::AvailableJump { from: 7, to: 6, size: SIZE }));
    // A head outside the descriptor table.
    pair.driver.avail_idx = 7;
    pair.driver.offer(&pair.mock, SIZE);
    assert_eq!(pair.take(&MODERN), Err(RingError::Head { index: SIZE, size: SIZE }));
    assert!(pair.batch.is_empty());
    assert_eq!(pair.driver.collect(&pair.mock), None);
}

#[test]
fn rings_must_be_aligned_and_inside_one_mapping() {
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
    // The last used ring that fits, including the event index, and the first that does not.
    assert_eq!(new(RingConfig { used: end - 6 - 8 * 256 - 2, ..config }), Ok(()));
    assert!(outside(new(RingConfig { used: end - 6 - 8 * 256 + 2, ..config })));
    let misaligned = |result| matches!(result, Err(RingError::Misaligned { .. }));
    assert!(misaligned(new(RingConfig { descriptors: config.descriptors + 8, ..config })));
    assert!(misaligned(new(RingConfig { available: config.available + 1, ..config })));
    assert!(misaligned(new(RingConfig { used: config.used + 2, ..config })));
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
    let returned: Vec<_> = std::iter::from_fn(|| pair.driver.collect(&pair.mock)).collect();
    assert!(returned.len() <= BUFFERS_MAX / 255 && returned.iter().all(|(_, len)| *len == 0));

    // A readable descriptor and an address outside guest memory: both chains are returned empty and cost one frame each.
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

/// Runs the corpus of the fuzzer as a unit test.
#[test]
fn fuzz_corpus_does_no_harm() {
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

#[test]
fn chains_put_back_are_not_fetched_twice() {
    let mut pair = Pair::new(0, true);
    for len in [80, 81, 82] {
        pair.driver.add(&pair.mock, &[(ARENA, len, 0)]).unwrap();
    }
    pair.driver.publish(&pair.mock);
    let lens = |ring: &mut Ring, count| {
        (0..count).map(|_| ring.next().unwrap().unwrap().single_readable().unwrap().len).collect::<Vec<_>>()
    };
    assert_eq!(lens(&mut pair.ring, 2), [80, 81]);
    pair.ring.put_back(2);
    assert_eq!(pair.ring.position(), 0);
    // The guest changes the descriptors after they were copied.
    for index in 0..3 {
        pair.driver.describe(&pair.mock, index, Descriptor { addr: ARENA, len: 7, flags: 0, next: 0 });
    }
    assert_eq!(lens(&mut pair.ring, 3), [80, 81, 82]);
    assert_eq!(pair.ring.position(), 3);
    // More chains than are cached: they are fetched again.
    pair.ring.put_back(3);
    pair.ring.prime(1).unwrap();
    assert_eq!(lens(&mut pair.ring, 2), [7, 7]);
    pair.ring.put_back(2);
    assert_eq!(lens(&mut pair.ring, 3), [7, 7, 7]);
}

#[test]
fn read_ahead_fetches_once_and_only_for_large_bursts() {
    let mut pair = Pair::new(0, true);
    for len in 80..96 {
        pair.driver.add(&pair.mock, &[(ARENA, len, 0)]).unwrap();
    }
    pair.driver.publish(&pair.mock);
    let lens = |ring: &mut Ring, count| {
        (0..count).map(|_| ring.next().unwrap().unwrap().single_readable().unwrap().len).collect::<Vec<_>>()
    };
    assert_eq!(pair.ring.ensure(8).unwrap(), 8);
    assert_eq!(lens(&mut pair.ring, 8), (80..88).collect::<Vec<_>>());
    // Eight chains are known to be waiting: read_ahead ignores a count below its minimum and one above the known number.
    pair.ring.read_ahead(7);
    pair.ring.read_ahead(9);
    // Nothing was read ahead, so this change is seen.
    pair.driver.describe(&pair.mock, 8, Descriptor { addr: ARENA, len: 7, flags: 0, next: 0 });
    pair.ring.read_ahead(8);
    // The guest changes the descriptors after they were copied.
    for index in 8..16 {
        pair.driver.describe(&pair.mock, index, Descriptor { addr: ARENA, len: 8, flags: 0, next: 0 });
    }
    assert_eq!(pair.ring.position(), 8, "nothing was taken");
    assert_eq!(pair.ring.ensure(4).unwrap(), 4, "at most as many as requested");
    assert_eq!(pair.ring.ensure(8).unwrap(), 8);
    assert_eq!(lens(&mut pair.ring, 4), [7, 89, 90, 91]);
    assert_eq!(pair.ring.ensure(64).unwrap(), 4, "more requested than cached: fetched again");
    assert_eq!(lens(&mut pair.ring, 4), [8, 8, 8, 8]);
    assert_eq!(pair.ring.ensure(64).unwrap(), 0);
}

#[test]
fn an_awake_device_suppresses_kicks() {
    let mut pair = Pair::new(0, false);
    assert!(pair.ring.is_blank());
    assert!(pair.ring.arm());
    assert_eq!(pair.driver.used_flags(&pair.mock), 0);
    pair.send(&with_header(&bytes(60, 1), 12), &[], false);
    pair.driver.publish(&pair.mock);
    assert!(!pair.ring.is_blank());
    assert!(!pair.ring.arm(), "a frame waits");
    assert_eq!(pair.driver.used_flags(&pair.mock), USED_NO_NOTIFY);
}
