//! Well-behaved guests: sending, receiving, notifications, offloads finished in software.

use std::collections::VecDeque;

use proptest::prelude::*;

use super::*;

/// Length, cuts (as fractions of the length), indirect or not.
fn shape() -> impl Strategy<Value = (usize, Vec<usize>, bool)> {
    let len = prop_oneof![8 => 14usize..200, 4 => 200usize..3000, 1 => Just(FRAME_MAX)];
    (len, prop::collection::vec(0usize..1000, 0..6), any::<bool>())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// Random frames in random chains arrive unchanged and in order, each descriptor is returned exactly once, and indices wrap.
    #[test]
    fn sent_frames_arrive_unchanged(
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

    /// The driver reads random frames from random receive chains unchanged and in order; frames that do not fit are counted as
    /// dropped.
    #[test]
    fn delivered_frames_are_read_unchanged(
        lens in prop::collection::vec(prop_oneof![14usize..100, 100usize..9000], 1..60),
        // The first chain of a frame holds its header, in one or two buffers.
        rooms in prop::collection::vec((1u32..3000, 11u32..3000, any::<bool>()), 4..16),
        start in any::<u16>(),
        mergeable: bool,
    ) {
        let mut pair = Pair::new(start, true);
        let format = Format { mergeable, ..MODERN };
        let mut buffers = HashMap::new();
        let mut next_room = 0;
        let mut expected = VecDeque::new();
        let mut read = 0;
        for (seed, len) in lens.iter().enumerate() {
            // Refill the ring with chains of two buffers, direct or in an indirect table.
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
            // The driver reads num_buffers chains per frame.
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
                prop_assert!(expected.pop_front().is_some(), "a frame that was not sent");
                read += 1;
            }
        }
        let stats = &pair.stats;
        prop_assert_eq!(stats.out_frames.get(), read);
        prop_assert_eq!(read + stats.drops(DropReason::NoBuffer), lens.len() as u64);
        prop_assert_eq!(stats.drops_total(), stats.drops(DropReason::NoBuffer));
    }

    /// No wake-up is lost: neither by a device that arms before it sleeps, with a driver that kicks only if requested, nor by a
    /// driver that sleeps until it is interrupted.
    #[test]
    fn suppressed_notifications_lose_no_wakeup(
        steps in prop::collection::vec((0u8..4, 1u16..5), 1..200),
        start in any::<u16>(),
        event_idx: bool,
    ) {
        let mut pair = Pair::new(start, event_idx);
        let wire = with_header(&bytes(60, 1), 12);
        let (mut asleep, mut kicked, mut kicked_at) = (false, false, start);
        // Used index from which the driver waits; `None` if it does not wait.
        let mut waiting: Option<u16> = None;
        let mut interrupted = false;
        pair.driver.set_used_event(&pair.mock, start.wrapping_sub(1));
        pair.ring.disarm();
        for (step, amount) in steps {
            match step {
                // The driver adds chains and kicks if the device requested it.
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
                // The device processes a burst if it is awake.
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
                // The device goes to sleep if no chain is available.
                2 => if !asleep && pair.ring.arm() {
                    prop_assert_eq!(pair.ring.position(), pair.driver.avail_idx);
                    (asleep, kicked) = (true, false);
                },
                // The driver collects used entries and waits for more.
                _ => {
                    while pair.driver.collect(&pair.mock).is_some() {}
                    pair.driver.set_used_event(&pair.mock, pair.driver.used_idx);
                    waiting = Some(pair.driver.used_idx);
                    interrupted = false;
                }
            }
            let work = pair.ring.position() != pair.driver.avail_idx;
            prop_assert!(!(asleep && work) || kicked, "the device sleeps while chains wait");
            let done = waiting.is_some_and(|from| pair.ring.position() != from);
            prop_assert!(!done || interrupted, "the driver sleeps while used chains wait");
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
fn a_ring_continues_at_its_used_index() {
    let mut pair = Pair::new(40, true);
    let wire = with_header(&bytes(60, 1), 12);
    let heads: Vec<_> = (0..3).map(|_| pair.send(&wire, &[], false).unwrap()).collect();
    // The back end dies after taking all chains and completing the first; the front end knows only the used index.
    assert_eq!(pair.take(&MODERN), Ok(3));
    pair.ring.complete(heads[0], 0);
    pair.ring.publish();
    let config = RingConfig { base: 43, ..pair.driver.config(true, true) };
    pair.ring = Ring::new(pair.mock.map(), &config, None).unwrap();
    pair.taken = TakenChains::default();
    assert_eq!(pair.ring.position(), 41);
    assert_eq!(pair.take(&MODERN), Ok(2));
}

#[test]
fn the_header_may_span_chains() {
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
fn offloads_are_finished_for_guests_that_lack_them() {
    let plain = Format { accepts: Accepts::NOTHING, ..MODERN };
    let mut pair = Pair::new(0, false);
    for _ in 0..4 {
        let slot = pair.slot();
        pair.driver.add(&pair.mock, &[(slot, 4000, DESC_WRITE)]);
    }
    let slot = ARENA + SLOT;
    // A partial checksum is completed; DATA_VALID is cleared for a guest without GUEST_CSUM.
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
    // A guest with GUEST_CSUM gets the partial checksum unchanged.
    pair.give(&MODERN, &[(frame.clone(), partial)]).unwrap();
    assert_eq!(pair.mock.read(slot + 2 * SLOT, 12), partial.to_virtio(1));
    // A super-frame that cannot be segmented, and a frame above the MTU.
    let tso = Offload { gso_type: GSO_TCPV4, gso_size: 1000, ..partial };
    pair.give(&plain, &[(vec![0; 2000], tso)]).unwrap();
    assert_eq!(pair.stats.drops(DropReason::Unsegmentable), 1);
    pair.give(&plain, &[(vec![0; 9019], Offload::default())]).unwrap();
    assert_eq!(pair.stats.drops(DropReason::MtuExceeded), 1);
    assert_eq!(pair.stats.out_frames.get(), 3);
    assert_eq!(pair.stats.copies.get(), 0);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]
    /// Chains return strictly in order and never while their memory is held. At most as many chains as the queue size are
    /// outstanding, and all return in the end.
    #[test]
    fn held_chains_return_in_order(
        start: u16,
        steps in prop::collection::vec((1u16..=SIZE, any::<u64>(), any::<u64>()), 1..40),
    ) {
        let mut pair = Pair::new(start, true);
        let wire = with_header(&bytes(200, 3), 12);
        // The driver's chains in order, each with up to two holds.
        let mut out: VecDeque<(u16, Vec<crate::frame::Hold>)> = VecDeque::new();
        let mut sent = VecDeque::new();
        for (count, held, let_go) in steps {
            // Without a free descriptor the guest skips the frame.
            sent.extend((0..count).filter_map(|_| pair.send(&wire, &[], false)));
            let taken = pair.take(&MODERN).unwrap();
            prop_assert_eq!(sent.len(), taken);
            for n in 0..taken {
                let frame = *pair.batch.frame(n);
                let holds = (held >> (2 * n) & 3) % 3;
                // Frames taken while half the ring is kept cannot be held.
                let holds = (0..holds).filter_map(|_| pair.batch.hold(&frame)).collect();
                out.push_back((sent.pop_front().unwrap(), holds));
            }
            pair.batch.clear();
            pair.taken.give_back(&mut pair.ring);
            for (n, (_, holds)) in out.iter_mut().enumerate() {
                if let_go >> (n % 64) & 1 == 1 {
                    holds.pop();
                }
            }
            pair.taken.reclaim(&mut pair.ring);
            while let Some((head, len)) = pair.driver.collect(&pair.mock) {
                let (expected, holds) = out.pop_front().unwrap();
                prop_assert_eq!((head, len, holds.len()), (expected, 0, 0));
            }
            prop_assert!(out.front().is_none_or(|(_, holds)| !holds.is_empty()), "only held chains, and those behind them, are kept");
            prop_assert_eq!(pair.taken.is_held(), !out.is_empty());
            prop_assert_eq!(usize::from(pair.ring.position().wrapping_sub(pair.ring.completed())), out.len());
        }
        let heads: Vec<u16> = out.drain(..).map(|(head, _)| head).collect();
        pair.taken.reclaim(&mut pair.ring);
        prop_assert_eq!(std::iter::from_fn(|| pair.driver.collect(&pair.mock)).map(|(head, _)| head).collect::<Vec<_>>(), heads);
    }
}
