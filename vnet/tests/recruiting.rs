//! Dispatchers that move from thread to thread: frames of a flow keep their order, none is lost, and threads come and go with the load.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use common::{Host, WAIT, link_to, mac, wait_for, yielding};
use vnet::dispatch::core::CoreOptions;
use vnet::dispatch::recruit::Recruiting;
use vnet::dispatch::yielding::Strategy;
use vnet::frame::NetworkId;
use vnet::interface::fake::{Fake, OwnedFrame};
use vnet::link::Encapsulation;
use vnet::wire::ethernet::Mac;

/// Number of dispatchers, and of guests on each host.
const COUNT: usize = 4;
/// Time limit for what takes several windows of load.
const LONG: Duration = Duration::from_secs(60);

/// A frame with a sequence number.
fn numbered(dst: Mac, src: Mac, number: u64) -> OwnedFrame {
    let (mut bytes, offload) = common::frame(dst, src, 80, 0);
    bytes[20..28].copy_from_slice(&number.to_be_bytes());
    (bytes, offload)
}

/// One flow: a guest sends numbered frames to another, in bursts of `burst`, and waits for each burst, so that no buffer overflows.
struct Flow {
    from: (Arc<Fake>, Mac),
    to: (Arc<Fake>, Mac),
    burst: u64,
}

impl Flow {
    /// Sends until `stop`; panics if a frame is late, missing or out of order. Adds to `sent`.
    fn run(&self, stop: &AtomicBool, sent: &AtomicU64, pause: Duration) {
        let mut next = 0;
        while !stop.load(Relaxed) {
            self.from.0.send((next..next + self.burst).map(|n| numbered(self.to.1, self.from.1, n)));
            for (frame, _) in self.to.0.wait_for(self.burst as usize, WAIT) {
                let number = u64::from_be_bytes(frame[20..28].try_into().unwrap());
                assert_eq!(number, next, "from {:?} to {:?}", self.from.1, self.to.1);
                assert_eq!(&frame[6..12], &self.from.1.0);
                next += 1;
            }
            assert_eq!(next % self.burst, 0, "a frame from {:?} to {:?} is missing", self.from.1, self.to.1);
            sent.fetch_add(self.burst, Relaxed);
            std::thread::sleep(pause);
        }
    }
}

/// Two hosts with `COUNT` guests each: the first half of the flows stays on host one, the others cross the link.
fn hosts(one: CoreOptions, two: CoreOptions) -> ([Host; 2], Vec<Flow>) {
    let mut hosts = [one, two].map(Host::start);
    let mut guests: Vec<Vec<_>> = vec![];
    for (host, base) in hosts.iter_mut().zip([1, 101]) {
        guests
            .push((0..2 * COUNT as u8).map(|n| (host.add_fake(NetworkId::DEFAULT), mac(base + n))).collect());
        for (port, (_, mac)) in host.interfaces.iter_mut().zip(guests.last().unwrap()) {
            port.member.mac = Some(*mac);
        }
    }
    let [at_one, at_two] = [0, 1].map(|n: usize| hosts[n].core.bridge_address());
    hosts[0].add_link(link_to(at_two, Encapsulation::Native, Some(1500)));
    hosts[1].add_link(link_to(at_one, Encapsulation::Native, Some(1500)));
    hosts.iter().for_each(Host::publish);
    let (ours, theirs) = (&guests[0], &guests[1]);
    let flow = |from: &(Arc<Fake>, Mac), to: &(Arc<Fake>, Mac)| Flow {
        from: from.clone(),
        to: to.clone(),
        burst: 32,
    };
    // Guests 0 to 3 send to 4 to 7; guests 4 to 7 send to the other host's, so that each gets frames of one flow only.
    let local = (0..COUNT).map(|n| flow(&ours[n], &ours[COUNT + n]));
    let away = (0..COUNT).map(|n| flow(&ours[COUNT + n], &theirs[n]));
    let back = (0..COUNT).map(|n| flow(&theirs[COUNT + n], &ours[n]));
    let flows: Vec<_> = local.chain(away).chain(back).collect();
    // Every station is heard once, so that no frame of a flow is flooded.
    for (guest, mac) in guests.iter().flatten() {
        guest.send([numbered(common::mac(250), *mac, 0)]);
    }
    for (guest, mac) in guests.iter().flatten() {
        assert_eq!(guest.wait_for(4 * COUNT - 1, WAIT).len(), 4 * COUNT - 1, "{mac:?}");
    }
    hosts.iter().for_each(Host::assert_balanced);
    (hosts, flows)
}

#[test]
fn a_thousand_moves_keep_the_order_of_every_flow() {
    const MOVES: u64 = 1_000;
    let options = CoreOptions { threads: COUNT, ..yielding(Strategy::Adaptive) };
    let (hosts, flows) = hosts(options.clone(), options);
    let (stop, sent) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for flow in &flows {
            scope.spawn(|| flow.run(&stop, &sent, Duration::ZERO));
        }
        let mut random = 0x9e37_79b9_u32;
        let mut next = |n: usize| {
            random ^= random << 13;
            random ^= random >> 17;
            random ^= random << 5;
            random as usize % n
        };
        for _ in 0..MOVES {
            let before = sent.load(Relaxed);
            let (host, id) = (&hosts[next(2)], next(COUNT));
            let other = (host.core.threads().of_dispatchers[id] + 1 + next(COUNT - 1)) % COUNT;
            host.core.hand_over(id, other);
            assert_eq!(host.core.threads().of_dispatchers[id], other);
            // Traffic flows between two moves.
            wait_for("traffic", || sent.load(Relaxed) > before, String::new);
        }
        stop.store(true, Relaxed);
    });
    let moves: u64 = hosts.iter().map(|host| host.core.threads().moves).sum();
    assert_eq!(moves, MOVES);
    for host in &hosts {
        host.assert_balanced();
        assert_eq!(host.core.threads().now, COUNT);
        let dropped: u64 = host.interfaces.iter().map(|port| port.stats.drops_total()).sum();
        assert_eq!(dropped, 0);
        // A new setup reaches all dispatchers, wherever they run.
        host.publish();
    }
}

#[test]
fn threads_are_recruited_under_load_and_released_when_idle() {
    std::thread::scope(|scope| {
        for strategy in [Strategy::Adaptive, Strategy::Block, Strategy::Timed] {
            scope.spawn(move || threads_come_and_go(strategy));
        }
    });
}

fn threads_come_and_go(strategy: Strategy) {
    let recruiting = Recruiting { threads_min: Some(1), load_high: 2, load_low: 1, spare_cpu: 0 };
    let options = CoreOptions { threads: COUNT, recruiting, ..yielding(strategy) };
    let (hosts, flows) = hosts(options.clone(), options);
    let core = &hosts[0].core;
    assert_eq!((core.threads().min, core.threads().max), (1, COUNT));
    let (stop, sent) = (AtomicBool::new(false), AtomicU64::new(0));
    let state = || format!("{:?}", core.threads());
    std::thread::scope(|scope| {
        for flow in &flows {
            scope.spawn(|| flow.run(&stop, &sent, Duration::from_micros(100)));
        }
        until("a recruited thread", || core.threads().now > 1, state);
        // Setups are adopted while dispatchers move.
        until(
            "more threads",
            || {
                hosts[0].publish();
                core.threads().recruited >= 2
            },
            state,
        );
        stop.store(true, Relaxed);
    });
    until("one thread", || core.threads().released == core.threads().recruited, state);
    let threads = core.threads();
    assert_eq!(threads.now, 1, "{strategy}");
    assert!(threads.moves >= threads.recruited + threads.released, "{threads:?}");
    assert_eq!(threads.of_dispatchers, [threads.of_dispatchers[0]; COUNT]);
    hosts.iter().for_each(Host::assert_balanced);
    // Traffic goes on with one thread.
    stop.store(false, Relaxed);
    let before = sent.load(Relaxed);
    std::thread::scope(|scope| {
        scope.spawn(|| flows[COUNT].run(&stop, &sent, Duration::ZERO));
        until("traffic", || sent.load(Relaxed) > before + 1_000, String::new);
        stop.store(true, Relaxed);
    });
}

#[test]
fn the_fewest_threads_change_under_traffic() {
    let recruiting = |min| Recruiting { threads_min: Some(min), load_high: 100, load_low: 99, spare_cpu: 0 };
    let mut host = Host::start(CoreOptions { threads: COUNT, ..yielding(Strategy::Adaptive) });
    let fakes = [(); 2].map(|()| host.add_fake(NetworkId::DEFAULT));
    host.publish();
    assert_eq!(host.core.threads().now, COUNT);
    for min in [3, 4, 2] {
        host.core.recruit(recruiting(min));
        until("threads", || host.core.threads().now == min, || format!("{:?}", host.core.threads()));
        fakes[0].send([numbered(mac(2), mac(1), 7)]);
        assert_eq!(fakes[1].wait_for(1, WAIT).len(), 1);
    }
    host.assert_balanced();
}

/// Waits until `done`, which takes windows of load.
fn until(what: &str, done: impl Fn() -> bool, now: impl Fn() -> String) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < LONG, "{what}: {}", now());
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn nothing_moves_while_all_threads_stand_still_and_everything_goes_on() {
    const TIMES: usize = 100;
    let recruiting = Recruiting { threads_min: Some(1), load_high: 2, load_low: 1, spare_cpu: 0 };
    let options = CoreOptions { threads: COUNT, recruiting, ..yielding(Strategy::Adaptive) };
    let (hosts, flows) = hosts(options.clone(), options);
    let (stop, sent) = (AtomicBool::new(false), AtomicU64::new(0));
    let moved =
        |host: &Host| -> u64 { host.core.dispatcher_stats().iter().map(|stats| stats.frames()).sum() };
    std::thread::scope(|scope| {
        for flow in &flows {
            scope.spawn(|| flow.run(&stop, &sent, Duration::ZERO));
        }
        for turn in 0..TIMES {
            let (before, host) = (sent.load(Relaxed), &hosts[turn % 2]);
            let still = host.core.stand_still().expect("all threads stop in time");
            let frames = moved(host);
            assert_eq!(host.imbalance(), 0, "every frame that was taken has been forwarded");
            std::thread::sleep(Duration::from_millis(5));
            assert_eq!((moved(host), host.imbalance()), (frames, 0));
            drop(still);
            wait_for("traffic", || sent.load(Relaxed) > before, String::new);
        }
        stop.store(true, Relaxed);
    });
    for host in &hosts {
        host.assert_balanced();
        host.publish();
    }
}
