use proptest::prelude::*;

use super::*;
use crate::link::PATH_MTU_MIN;

/// The prober's tick, in ms.
const STEP_MS: u64 = 50;

/// A simulated path with an MTU, jitter and loss.
struct Path {
    capacity: u16,
    /// Loss in each direction, in thousandths.
    loss: u64,
    delay_ms: u64,
    jitter_ms: u64,
    random: crate::link::fake::Random,
    /// Replies in flight: arrival time and size.
    answers: Vec<(u64, u16)>,
    probes: Vec<u64>,
}

impl Path {
    fn new(capacity: u16, loss: u64, delay_ms: u64, seed: u64) -> Path {
        let random = crate::link::fake::Random::new(seed);
        Path {
            capacity,
            loss,
            delay_ms,
            jitter_ms: delay_ms / 2 + 1,
            random,
            answers: vec![],
            probes: vec![],
        }
    }

    fn probe(&mut self, size: u16, now_ms: u64) {
        self.probes.push(now_ms);
        let lost = (0..2).any(|_| self.random.below(1000) < self.loss);
        if size <= self.capacity && !lost {
            let jitter = self.random.below(self.jitter_ms);
            self.answers.push((now_ms + self.delay_ms + jitter, size));
        }
    }

    /// Advances time to `until_ms`. Returns each change of the size in use, with its time.
    fn run(
        &mut self,
        discovery: &mut Discovery,
        now_ms: &mut u64,
        until_ms: u64,
        alive: bool,
    ) -> Vec<(u64, u16)> {
        let mut changes = vec![];
        while *now_ms < until_ms {
            let before = discovery.mtu();
            let now = *now_ms;
            // Jitter reorders replies.
            self.answers.sort_unstable();
            let due = self.answers.partition_point(|(at, _)| *at <= now);
            self.answers.drain(..due).for_each(|(at, size)| discovery.answer(size, at));
            let at = Moment { now_ms: now, active: true, alive, rtt_ms: self.delay_ms };
            if let Some(size) = discovery.poll(at) {
                assert!((PATH_MTU_MIN..=discovery.top).contains(&size));
                self.probe(size, now);
            }
            if discovery.mtu() != before {
                changes.push((now, discovery.mtu()));
            }
            *now_ms += STEP_MS;
        }
        changes
    }
}

proptest! {
    /// Any path MTU is found, a decrease is followed within three seconds, and there is never more than one probe per tick.
    #[test]
    fn a_drop_is_obeyed_and_the_largest_size_found(
        top in prop::sample::select(vec![1280u16, 1500, 4000, 9000, 65_535]),
        first in 0u16..10_000,
        then in 0u16..10_000,
        loss in 0u64..=100,
        delay_ms in 1u64..200,
        seed: u64,
    ) {
        let within = |part: u16| BASE + (u32::from(top - BASE) * u32::from(part) / 10_000) as u16;
        let (first, then) = (within(first), within(then));
        let mut discovery = Discovery::new(top, PATH_MTU_MIN);
        let mut path = Path::new(first, loss, delay_ms, seed);
        let mut now = 0;
        path.run(&mut discovery, &mut now, 60_000, true);
        // The search has recovered from chance losses by then; the resolution is a grain plus the last half of it.
        prop_assert!(discovery.mtu() <= first, "{} of {}", discovery.mtu(), first);
        if loss == 0 {
            prop_assert!(discovery.mtu() + GRAIN >= first, "{} of {}", discovery.mtu(), first);
        }
        path.capacity = then;
        let dropped = now;
        let changes = path.run(&mut discovery, &mut now, dropped + 3000, true);
        prop_assert!(discovery.mtu() <= then, "{changes:?} from {first} to {then}");
        // The discovery rests, then searches for a larger size.
        path.run(&mut discovery, &mut now, dropped + 150_000, true);
        prop_assert!(discovery.mtu() <= then);
        if loss == 0 {
            prop_assert!(discovery.mtu() + GRAIN >= then, "{} of {}", discovery.mtu(), then);
        }
        for second in path.probes.windows(21) {
            prop_assert!(second[20] - second[0] >= 1000 , "more than 20 a second");
        }
    }

    /// The kernel's value is never exceeded, whatever it is and whatever probes are answered.
    #[test]
    fn the_kernel_is_obeyed(
        steps in prop::collection::vec((any::<u16>(), any::<u16>(), any::<bool>(), any::<bool>(), 0u64..2000), 1..300),
    ) {
        let (mut discovery, mut now_ms, mut top) = (Discovery::new(1500, PATH_MTU_MIN), 0, 1500);
        for (number, size, alive, active, passed) in steps {
            now_ms += passed;
            if number % 16 == 0 {
                top = number.max(PATH_MTU_MIN);
                discovery.set_top(number);
            }
            discovery.answer(size, now_ms);
            if let Some(size) = discovery.poll(Moment { now_ms, active, alive, rtt_ms: passed }) {
                prop_assert!((PATH_MTU_MIN..=top).contains(&size));
                if number % 3 == 0 {
                    discovery.answer(size, now_ms);
                }
            }
            prop_assert!((PATH_MTU_MIN..=top).contains(&discovery.mtu()));
        }
    }
}

#[test]
fn a_silent_peer_is_not_judged() {
    let mut discovery = Discovery::new(1500, PATH_MTU_MIN);
    let mut path = Path::new(0, 0, 10, 1);
    assert_eq!(path.run(&mut discovery, &mut 0, 600_000, false), []);
    assert_eq!((discovery.mtu(), path.probes.len()), (1500, 0));
}

#[test]
fn a_black_hole_is_noticed_in_under_two_seconds() {
    for capacity in [1280, 1400, 1492] {
        let mut discovery = Discovery::new(1500, PATH_MTU_MIN);
        let (mut path, mut now) = (Path::new(1500, 0, 10, 1), 0);
        assert_eq!(path.run(&mut discovery, &mut now, 5000, true), []);
        path.capacity = capacity;
        let changes = path.run(&mut discovery, &mut now, 15_000, true);
        let (at, size) = changes[0];
        assert_eq!(size, BASE);
        assert!(at < 7000, "noticed after {} ms", at - 5000);
        assert!(discovery.mtu() <= capacity && discovery.mtu() + GRAIN >= capacity, "{}", discovery.mtu());
        // The path recovers; the size is raised when the timer expires.
        path.capacity = 1500;
        path.run(&mut discovery, &mut now, 5000 + 2 * RAISE_MS, true);
        assert_eq!(discovery.mtu(), 1500);
    }
}

#[test]
fn paths_below_the_base_work() {
    let mut discovery = Discovery::new(1500, PATH_MTU_MIN);
    let (mut path, mut now) = (Path::new(800, 0, 10, 1), 0);
    path.run(&mut discovery, &mut now, 30_000, true);
    assert!((800 - GRAIN..=800).contains(&discovery.mtu()), "{}", discovery.mtu());
}

#[test]
fn a_quiet_link_is_probed_rarely() {
    let mut discovery = Discovery::new(1500, PATH_MTU_MIN);
    let mut probes = 0;
    for now_ms in (0..600_000).step_by(50) {
        if let Some(size) = discovery.poll(Moment { now_ms, active: false, alive: true, rtt_ms: 1 }) {
            discovery.answer(size, now_ms);
            probes += 1;
        }
    }
    assert_eq!(probes, 600_000 / CONFIRM_IDLE_MS);
}
