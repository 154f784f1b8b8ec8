//! Compares reassembly with a naive oracle that keeps every fragment and re-evaluates all of them each time.

use super::*;
use crate::link::fake::{Faults, Random, Wire};
use crate::wire::native::Kind;
use proptest::prelude::*;
use std::collections::{HashMap, HashSet};

#[derive(Clone, Debug, PartialEq, Eq)]
struct Fragment {
    id: u64,
    index: u16,
    last: bool,
    payload: Vec<u8>,
}

impl Fragment {
    fn header(&self) -> Header {
        let number = self.id + u64::from(self.index);
        Header { last: self.last, index: self.index, ..Header::whole(Kind::Frame, 1, number) }
    }
}

/// One link's reassembly, fed with bursts whose memory is overwritten when they end.
struct Bench {
    reassembly: Reassembly,
    stats: Arc<PortStats>,
    link: Arc<ReassemblyBudget>,
    host: Arc<ReassemblyBudget>,
    burst: Vec<u8>,
}

const BURST: usize = 1 << 18;

impl Bench {
    fn new(link: usize, host: usize) -> Bench {
        let stats: Arc<PortStats> = Arc::default();
        let (link, host) = (Arc::new(ReassemblyBudget::new(link)), Arc::new(ReassemblyBudget::new(host)));
        let reassembly = Reassembly::new(stats.clone(), link.clone(), host.clone(), 0);
        Bench { reassembly, stats, link, host, burst: Vec::with_capacity(BURST) }
    }

    fn accept(&mut self, fragment: &Fragment, now_ms: u64) -> Option<Vec<u8>> {
        self.accept_header(&fragment.header(), &fragment.payload, now_ms)
    }

    fn accept_header(&mut self, header: &Header, payload: &[u8], now_ms: u64) -> Option<Vec<u8>> {
        let at = self.burst.len();
        self.burst.extend_from_slice(payload);
        let whole = self.reassembly.accept(header, at..self.burst.len(), now_ms)?;
        let bytes = whole.pieces(&self.burst).flatten().copied().collect::<Vec<u8>>();
        assert_eq!(bytes.len(), whole.bytes());
        self.reassembly.recycle(whole);
        Some(bytes)
    }

    fn settle(&mut self) {
        self.reassembly.settle(&self.burst);
        self.burst.fill(0xee);
        self.burst.clear();
    }

    fn lost(&self) -> u64 {
        self.stats.drops(DropReason::Reassembly)
    }

    fn discards(&self) -> [u64; 3] {
        [DiscardReason::Stale, DiscardReason::BadHeader, DiscardReason::MemoryLimit]
            .map(|r| self.stats.discards(r))
    }
}

fn payload(len: usize, salt: u64) -> Vec<u8> {
    let mut random = Random::new(salt);
    (0..len).map(|_| random.below(256) as u8).collect()
}

/// The fragments of frame `id`: `data` cut every `size` bytes.
fn cut(id: u64, data: &[u8], size: usize) -> Vec<Fragment> {
    let count = data.len().div_ceil(size);
    data.chunks(size)
        .enumerate()
        .map(|(k, chunk)| Fragment { id, index: k as u16, last: k + 1 == count, payload: chunk.to_vec() })
        .collect()
}

/// The contract of [`Reassembly`] in its simplest form.
#[derive(Default)]
struct Oracle {
    open: HashMap<u64, (u64, Vec<Fragment>)>,
    ended: HashSet<u64>,
    lost: u64,
    stale: u64,
    bad: u64,
}

impl Oracle {
    fn end(&mut self, id: u64, complete: bool) {
        self.open.remove(&id);
        self.ended.insert(id);
        self.lost += u64::from(!complete);
    }

    fn consistent(all: &[Fragment]) -> bool {
        let sizes: HashSet<usize> = all.iter().filter(|f| !f.last).map(|f| f.payload.len()).collect();
        let ends: HashSet<u16> = all.iter().filter(|f| f.last).map(|f| f.index).collect();
        if sizes.len() > 1 || ends.len() > 1 {
            return false;
        }
        let size = sizes.into_iter().next();
        let mut end = 0;
        for fragment in all {
            let (k, len) = (usize::from(fragment.index), fragment.payload.len());
            if fragment.last && size.is_some_and(|size| len > size) {
                return false;
            }
            if let Some(last) = ends.iter().next()
                && (fragment.index > *last || (fragment.index == *last) != fragment.last)
            {
                return false;
            }
            end = end.max(k * size.unwrap_or(0) + len);
        }
        end <= BYTES_MAX
    }

    fn accept(&mut self, fragment: &Fragment, now_ms: u64) -> Option<Vec<u8>> {
        let id = fragment.id;
        if fragment.payload.is_empty() || usize::from(fragment.index) >= FRAGMENTS_MAX {
            self.bad += 1;
            return None;
        }
        if self.open.get(&id).is_some_and(|(started, _)| now_ms - started >= TIMEOUT_MS) {
            self.end(id, false);
        }
        if self.ended.contains(&id) {
            self.stale += 1;
            return None;
        }
        let (_, mut all) = self.open.get(&id).cloned().unwrap_or((now_ms, vec![]));
        if let Some(twin) = all.iter().find(|f| f.index == fragment.index && f.last == fragment.last)
            && twin.payload.len() == fragment.payload.len()
        {
            self.stale += 1;
            return None;
        }
        all.push(fragment.clone());
        if !Oracle::consistent(&all) || all.iter().filter(|f| f.index == fragment.index).count() > 1 {
            self.bad += 1;
            if all.len() > 1 {
                self.end(id, false);
            }
            return None;
        }
        all.sort_by_key(|f| f.index);
        if all.last().is_some_and(|f| f.last)
            && all.iter().enumerate().all(|(k, f)| usize::from(f.index) == k)
        {
            self.end(id, true);
            return Some(all.into_iter().flat_map(|f| f.payload).collect());
        }
        self.open.entry(id).or_insert((now_ms, vec![])).1 = all;
        None
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// On a lossy, reordering, duplicating path, each frame whose fragments all arrive comes out once and unchanged, each other
    /// frame with any fragment is counted once, each duplicate is stale, and all memory is returned.
    #[test]
    fn honest_frames_over_a_faulty_wire(
        seed: u64,
        first in prop::sample::select(vec![1u64, 1000, 1 << 40]),
        frames in prop::collection::vec((2usize..40, 1usize..60, any::<bool>()), 1..30),
        loss in 0u32..150, duplication in 0u32..150, reordering in 0u32..500, distance in 0usize..200,
        burst in 1usize..60,
    ) {
        let mut id = first;
        let mut sent = vec![];
        let mut data = HashMap::new();
        for (count, size, short) in frames {
            let len = count * size - if short { size - 1 } else { 0 };
            let bytes = payload(len, seed ^ id);
            let fragments = cut(id, &bytes, size);
            data.insert(id, (bytes, fragments.len()));
            id += fragments.len() as u64;
            if fragments.len() > 1 {
                sent.extend(fragments);
            }
        }
        let arrived = Wire::new(seed, Faults { loss, duplication, reordering, distance }).carry(sent);
        let mut bench = Bench::new(usize::MAX / 2, usize::MAX / 2);
        let mut seen: HashMap<u64, HashSet<u16>> = HashMap::new();
        let mut out = HashMap::new();
        for (n, fragment) in arrived.iter().enumerate() {
            seen.entry(fragment.id).or_default().insert(fragment.index);
            if let Some(bytes) = bench.accept(fragment, 7) {
                prop_assert!(out.insert(fragment.id, bytes).is_none(), "frame {} came out twice", fragment.id);
            }
            if n % burst == 0 {
                bench.settle();
            }
        }
        let distinct: usize = seen.values().map(HashSet::len).sum();
        for (id, indices) in &seen {
            let (bytes, count) = &data[id];
            prop_assert_eq!(out.get(id), (indices.len() == *count).then_some(bytes));
        }
        prop_assert_eq!(bench.discards(), [(arrived.len() - distinct) as u64, 0, 0]);
        bench.settle();
        prop_assert_eq!(bench.lost(), 0);
        bench.reassembly.tick(6 + TIMEOUT_MS);
        prop_assert_eq!(bench.lost(), 0);
        bench.reassembly.tick(7 + TIMEOUT_MS);
        prop_assert_eq!(bench.lost() as usize, seen.len() - out.len());
        prop_assert_eq!((bench.reassembly.incomplete(), bench.link.used(), bench.host.used()), (0, 0, 0));
        // All fragments again: now all of them are late.
        for fragment in &arrived {
            prop_assert_eq!(bench.accept(fragment, 7 + TIMEOUT_MS), None);
        }
        prop_assert_eq!(bench.lost() as usize, seen.len() - out.len());
        prop_assert_eq!(bench.reassembly.incomplete(), 0);
    }

    /// Random fragments that fit together only by chance, with time passing: all counters match the oracle.
    #[test]
    fn any_fragments_as_the_oracle_says(
        steps in prop::collection::vec(
            (0u64..4, 0u16..5, any::<bool>(), prop::sample::select(vec![0usize, 1, 8, 8, 8, 8, 9, 30_000]), 0u64..3, any::<bool>()),
            1..120,
        ),
        far in prop::bool::weighted(0.1),
    ) {
        let mut bench = Bench::new(usize::MAX / 2, usize::MAX / 2);
        let mut oracle = Oracle::default();
        let mut now = 0;
        for (n, (id, index, last, len, wait, settle)) in steps.into_iter().enumerate() {
            now += wait;
            let index = if far && index == 4 { FRAGMENTS_MAX as u16 } else { index };
            // Whole frames bypass reassembly.
            let index = if last { index.max(1) } else { index };
            let fragment = Fragment { id: 100 + id, index, last, payload: payload(len, n as u64) };
            prop_assert_eq!(bench.accept(&fragment, now), oracle.accept(&fragment, now), "step {}", n);
            prop_assert_eq!(bench.discards(), [oracle.stale, oracle.bad, 0], "step {}", n);
            prop_assert_eq!(bench.lost(), oracle.lost, "step {}", n);
            if settle {
                bench.settle();
            }
        }
        let open = oracle.open.len() as u64;
        prop_assert_eq!(bench.reassembly.incomplete() as u64, open);
        bench.settle();
        bench.reassembly.tick(now + TIMEOUT_MS);
        prop_assert_eq!(bench.lost(), oracle.lost + open);
        prop_assert_eq!((bench.link.used(), bench.host.used()), (0, 0));
    }

    /// For all budgets, memory in use stays within them, and every frame ends exactly once.
    #[test]
    fn memory_is_bounded(
        seed: u64, link in 3000usize..200_000, host in 3000usize..200_000,
        frames in prop::collection::vec((2usize..60, 1usize..2000), 1..40), burst in 1usize..50,
    ) {
        let mut bench = Bench::new(link, host);
        let (mut id, mut sent, mut whole) = (1, vec![], 0);
        for (count, size) in &frames {
            let len = (count * size).min(BYTES_MAX);
            let fragments = cut(id, &payload(len, id), *size);
            id += fragments.len() as u64;
            sent.extend(fragments);
        }
        let total = frames.len() as u64;
        let faults = Faults { loss: 0, duplication: 0, reordering: 300, distance: 100 };
        for (n, fragment) in Wire::new(seed, faults).carry(sent).iter().enumerate() {
            whole += u64::from(bench.accept(fragment, 0).is_some());
            if n % burst == 0 || bench.burst.len() + 2000 > BURST {
                bench.settle();
            }
            prop_assert!(bench.link.used() <= link && bench.host.used() <= host);
            prop_assert_eq!(bench.link.used(), bench.host.used());
        }
        bench.settle();
        bench.reassembly.tick(TIMEOUT_MS);
        prop_assert_eq!(whole + bench.lost(), total);
        prop_assert_eq!(bench.lost() > 0, bench.discards()[2] > 0);
        prop_assert_eq!(bench.link.used(), 0);
    }
}

#[test]
fn a_frame_in_one_burst_takes_no_memory() {
    let mut bench = Bench::new(0, 0);
    let data = payload(65_565, 1);
    for fragment in cut(1, &data, 1440) {
        let out = bench.accept(&fragment, 0);
        assert_eq!(out.is_some(), fragment.last);
        assert!(out.is_none_or(|bytes| bytes == data));
    }
    bench.settle();
    assert_eq!((bench.lost(), bench.discards()), (0, [0; 3]));
}

#[test]
fn memory_runs_out_for_the_newest_frame() {
    let mut bench = Bench::new(12_000, 1 << 20);
    let frames: Vec<_> = (0..4u64).map(|n| cut(10 * (n + 1), &payload(2000, n), 1000)).collect();
    for frame in &frames {
        assert_eq!(bench.accept(&frame[0], 0), None);
    }
    bench.settle();
    let kept: Vec<bool> = frames.iter().map(|frame| bench.accept(&frame[1], 0).is_some()).collect();
    assert_eq!(kept, [true, true, true, false]);
    assert_eq!((bench.lost(), bench.discards()), (1, [1, 0, 1]));
}

#[test]
fn a_frame_too_long_is_refused() {
    let mut bench = Bench::new(1 << 20, 1 << 20);
    for fragment in cut(1, &payload(BYTES_MAX + 1, 1), 1440) {
        assert_eq!(bench.accept(&fragment, 0), None);
    }
    assert_eq!(bench.lost(), 1);
    assert_eq!(bench.discards(), [0, 1, 0], "only the last fragment is one too much");
}

#[test]
fn fragments_of_different_networks_or_hops_do_not_mix() {
    for change in [|h: &mut Header| h.network = 2, |h: &mut Header| h.hops = 1] {
        let mut bench = Bench::new(1 << 20, 1 << 20);
        let fragments = cut(1, &payload(40, 1), 20);
        assert_eq!(bench.accept(&fragments[0], 0), None);
        let mut header = fragments[1].header();
        change(&mut header);
        assert_eq!(bench.accept_header(&header, &fragments[1].payload, 0), None);
        assert_eq!(bench.accept(&fragments[1], 0), None);
        assert_eq!((bench.lost(), bench.discards()), (1, [1, 1, 0]));
    }
}

#[test]
fn metadata_must_fit_the_first_fragment() {
    let mut bench = Bench::new(1 << 20, 1 << 20);
    let fragments = cut(1, &payload(40, 1), 20);
    let header = Header { offload: true, ..fragments[0].header() };
    assert_eq!(bench.accept_header(&header, &[0; WIRE_LEN - 1], 0), None);
    assert_eq!((bench.lost(), bench.discards()), (0, [0, 1, 0]));
    assert_eq!(bench.accept_header(&header, &fragments[0].payload, 0), None);
    assert!(bench.accept(&fragments[1], 0).is_some());
}

#[test]
fn a_restarted_peer_is_accepted() {
    let mut bench = Bench::new(1 << 20, 1 << 20);
    let data = payload(60, 1);
    let old = cut(500_000, &data, 20);
    assert_eq!(bench.accept(&old[0], 0), None);
    bench.settle();
    // The peer restarts at 1: partial frames are flushed at once, and the new frames are accepted.
    let new = cut(1, &payload(60, 2), 20);
    for fragment in &new[..2] {
        assert_eq!(bench.accept(fragment, 1), None);
    }
    assert_eq!(bench.lost(), 1);
    assert_eq!(bench.accept(&new[2], 1), Some(payload(60, 2)));

    // A restart that looks like late datagrams is over when the recorded ends have expired.
    assert_eq!(bench.accept(&new[0], 2), None);
    assert_eq!(bench.discards(), [1, 0, 0]);
    let later = 2 + 2 * MEMORY_MS;
    assert_eq!(bench.accept(&new[0], later), None);
    assert_eq!(bench.accept(&new[1], later), None);
    assert_eq!(bench.accept(&new[2], later), Some(payload(60, 2)));
    assert_eq!((bench.lost(), bench.discards()), (1, [1, 0, 0]));
}

#[test]
fn frames_below_the_window_end() {
    let mut bench = Bench::new(1 << 20, 1 << 20);
    let old = cut(10, &payload(40, 1), 20);
    assert_eq!(bench.accept(&old[0], 0), None);
    bench.settle();
    let new = cut(10 + crate::link::native::duplicates::SPAN, &payload(40, 2), 20);
    assert_eq!(bench.accept(&new[0], 0), None);
    assert_eq!(bench.lost(), 1);
    assert_eq!(bench.accept(&old[1], 0), None);
    assert_eq!((bench.lost(), bench.discards()), (1, [1, 0, 0]));
    assert_eq!(bench.accept(&new[1], 0), Some(payload(40, 2)));
}
