//! The cost of a lookup with 10 to 1 000 000 routes, and the memory of a route. `lab/lab bench scale` runs it.
//!
//! Each route leads from any source to one destination. The program measures three kinds of traffic:
//!
//! - `cached_ns`: 64 flows in turn; after the first round the route cache decides;
//! - `few_ns`: new sources to 64 destinations, so that the cache misses and the table decides;
//! - `all_ns`: new sources to destinations spread over the table, which adds misses of the processor's caches.
//!
//! Usage: `lookup [ROUTES]...` prints one JSON object per line; times are in nanoseconds per decision.

use std::alloc::{GlobalAlloc, Layout, System};
use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use vnet::frame::{Batch, Frame, NetworkId, PortId, Segment};
use vnet::route::{
    Decision, Learned, Member, NetworkSpec, Networks, PortKind, Qualifier, Router, Rule, RuleSource, Table,
};
use vnet::wire::ethernet::Mac;
use vnet::wire::offload::Offload;

const GUEST: PortId = PortId(0);
const LINK: PortId = PortId(1);
const FEW: u32 = 64;
const DECISIONS: u32 = 2_000_000;
const SIZES: [u32; 6] = [10, 100, 1_000, 10_000, 100_000, 1_000_000];

/// An allocator that counts the bytes in use.
struct Counting;

static IN_USE: AtomicUsize = AtomicUsize::new(0);

// SAFETY: forwards every call to `System` unchanged; counting does not access the memory.
unsafe impl GlobalAlloc for Counting {
    // SAFETY: forwards to `System`, which keeps the contract.
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        IN_USE.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller fulfils the contract of `GlobalAlloc::alloc`, which is the same.
        unsafe { System.alloc(layout) }
    }

    // SAFETY: forwards to `System`, which keeps the contract.
    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        IN_USE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller fulfils the contract of `GlobalAlloc::dealloc`, and `memory` came from `System`.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn main() {
    let asked: Vec<u32> =
        std::env::args().skip(1).map(|word| word.parse().expect("a number of routes")).collect();
    for &routes in if asked.is_empty() { &SIZES[..] } else { &asked } {
        println!("{}", measure(routes));
    }
}

/// Measures a table of `routes` routes.
fn measure(routes: u32) -> serde_json::Value {
    let rules: Vec<Rule> = (0..routes).map(rule).collect();
    let network = NetworkSpec { id: NetworkId::DEFAULT, learning: false, ageing_s: 0 };
    let before = IN_USE.load(Ordering::Relaxed);
    let given = rules.capacity() * size_of::<Rule>();
    let begin = Instant::now();
    let table = Arc::new(Table::build(rules, &[network], &members()));
    let build_s = begin.elapsed().as_secs_f64();
    // The memory of the rules has moved into the table or was freed.
    let bytes = IN_USE.load(Ordering::Relaxed) + given - before;
    let mut router = Router::new(table, Arc::new(Learned::new()));
    let spread = routes.min(FEW);
    let cached_ns = time(&mut router, |n| (mac(1, n % FEW), mac(2, n % FEW % spread)));
    let few_ns = time(&mut router, |n| (mac(3, n), mac(2, n % spread)));
    // An odd multiplier visits every destination in an order that no prefetcher predicts.
    let all_ns = time(&mut router, |n| (mac(4, n), mac(2, n.wrapping_mul(0x9e37_79b1) % routes)));
    serde_json::json!({
        "routes": routes,
        "bytes_a_route": bytes as f64 / f64::from(routes),
        "build_ms": build_s * 1e3,
        "cached_ns": cached_ns,
        "few_ns": few_ns,
        "all_ns": all_ns,
    })
}

/// Nanoseconds per decision for frames with these `addresses`, without the cost of the loop itself.
fn time(router: &mut Router, addresses: impl Fn(u32) -> (Mac, Mac)) -> f64 {
    let mut frame = some_frame();
    // Every frame is in a separate batch, so that the router keeps nothing from the previous frame.
    let mut round = |decide: &mut dyn FnMut(&Frame)| {
        let begin = Instant::now();
        for n in 0..DECISIONS {
            (frame.src, frame.dst) = addresses(n);
            decide(black_box(&frame));
        }
        begin.elapsed().as_nanos() as f64 / f64::from(DECISIONS)
    };
    let nothing = round(&mut |frame| {
        black_box(frame);
    });
    // The first round fills the caches.
    for _ in 0..2 {
        let mut to_link = 0;
        let cost = round(&mut |frame| {
            router.begin();
            to_link += u32::from(router.decide(frame, 1) == Decision::To(LINK));
        });
        assert_eq!(to_link, DECISIONS, "every frame has a route");
        black_box(cost);
    }
    round(&mut |frame| {
        router.begin();
        black_box(router.decide(frame, 1));
    }) - nothing
}

fn some_frame() -> Frame {
    let bytes = [0; 64];
    let mut batch = Batch::new();
    let mut builder = batch.begin();
    // SAFETY: `bytes` outlives the batch and is not written to.
    unsafe { builder.push_stable(Segment::new(bytes.as_ptr(), bytes.len())) };
    builder.finish(GUEST, NetworkId::DEFAULT, Offload::default(), 0).expect("a frame");
    *batch.frame(0)
}

fn rule(n: u32) -> Rule {
    let dst = Qualifier::Is(mac(2, n));
    Rule {
        index: n + 1,
        network: NetworkId::DEFAULT,
        src: Qualifier::Any,
        dst,
        from: RuleSource::Any,
        to: LINK,
    }
}

fn members() -> [Member; 2] {
    [(GUEST, PortKind::Interface), (LINK, PortKind::Link)].map(|(port, kind)| Member {
        port,
        kind,
        networks: Networks::only([NetworkId::DEFAULT]),
        mac: None,
        storm_frames_per_s: None,
        counts_hops: true,
        port_security: false,
    })
}

/// Locally administered address `n` of a family.
fn mac(family: u8, n: u32) -> Mac {
    let [a, b, c, d] = n.to_be_bytes();
    Mac([2, family, a, b, c, d])
}
