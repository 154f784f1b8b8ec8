//! How many threads the load needs (VNET/P figure 4: "the selection of how many, and which cores to use for packet dispatcher threads
//! is made dynamically"; VNET/P+: "otherwise available processor cores are recruited").
//!
//! A host has a fixed number of dispatchers. While there is little to do, few threads run them, in turn. A *load* is the share of
//! time in turns with work, which dispatchers measure themselves. The policy looks at windows of 100 ms:
//!
//! - **Recruit** when a thread's load has been `load_high` or more for 200 ms, its dispatchers can be divided, and CPUs have been idle
//!   for `spare_cpu` of the window: with none, another thread would only take time from guests. Half of the dispatchers, by load, move
//!   to the new thread.
//! - **Release** when the two threads with the least load together have had `load_low` or less for 2 s: one takes over the other's
//!   dispatchers.
//!
//! Hysteresis: a divided thread's halves had `load_high` together, so they are not joined again before the load falls by the
//! difference of the two (35 points by default). Joined threads have `load_low` at most, so they are not divided before it rises by
//! as much. A thread has work for at most two windows before it gets help, and help is kept over pauses shorter than 2 s: moving a
//! dispatcher costs it about 100 us and the caches of its CPU, so even a load that changes all the time costs less than 0.1 %.

use std::time::Duration;

/// Length of a window.
const WINDOW: Duration = Duration::from_millis(100);
/// Length of a window while the host is idle with the fewest threads.
const IDLE_WINDOW: Duration = Duration::from_secs(1);
/// A thread is divided after this time of high load.
const HOT: Duration = Duration::from_millis(200);
/// Two threads are joined after this time of low load.
const COOL: Duration = Duration::from_secs(2);
/// A thread is divided only if both parts have this part of `load_high`: a single queue's load cannot be divided.
const PART: u32 = 8;
/// Loads are in parts of a thousand.
pub(super) const FULL: u32 = 1000;

/// When threads are recruited and released.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Recruiting {
    /// Number of threads that always run; `None`: one for each dispatcher, so that no thread is ever recruited.
    pub threads_min: Option<usize>,
    /// Load of a thread in percent from which another one is recruited.
    pub load_high: u32,
    /// Load of two threads together in percent up to which one of them is released. Less than `load_high`.
    pub load_low: u32,
    /// Idle time in percent of one CPU that it takes to recruit a thread; 0: threads are recruited even if no CPU is idle.
    pub spare_cpu: u32,
}

impl Default for Recruiting {
    fn default() -> Recruiting {
        Recruiting { threads_min: None, load_high: 75, load_low: 40, spare_cpu: 20 }
    }
}

/// The threads of a core.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Threads {
    /// Number of threads that always run.
    pub min: usize,
    /// Number of dispatchers, and of threads under full load.
    pub max: usize,
    /// Number of threads now.
    pub now: usize,
    /// Number of threads recruited so far.
    pub recruited: u64,
    /// Number of threads released so far.
    pub released: u64,
    /// Number of times that a dispatcher has moved to another thread.
    pub moves: u64,
    /// Number of the thread that runs each dispatcher.
    pub of_dispatchers: Vec<usize>,
}

/// The load of one window.
#[derive(Clone, Debug)]
pub(super) struct Sample<'a> {
    pub(super) length: Duration,
    /// Load of each dispatcher in parts of a thousand.
    pub(super) loads: &'a [u32],
    /// Slot of the thread that runs each dispatcher.
    pub(super) slots: &'a [usize],
    /// Idle time of the CPUs on which another thread would run, in parts of a thousand of one CPU.
    pub(super) idle: u32,
}

/// What to do after a window.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Stay,
    /// Start a thread, which takes these dispatchers.
    Recruit(Vec<usize>),
    /// End the thread in `slot`; the one in `to` takes over its dispatchers.
    Release {
        slot: usize,
        to: usize,
    },
}

/// A thread's part of a sample.
struct Thread {
    slot: usize,
    load: u32,
    /// Its dispatchers with their loads.
    dispatchers: Vec<(u32, usize)>,
}

impl Thread {
    /// The dispatchers to move, so that both parts have nearly the same load (longest processing time first), and the smaller load.
    fn divide(&self) -> (Vec<usize>, u32) {
        let mut sorted = self.dispatchers.clone();
        sorted.sort_by_key(|&(load, id)| (std::cmp::Reverse(load), id));
        let (mut kept, mut moved) = ((0, 0), (0, vec![]));
        for (load, id) in sorted {
            if kept <= (moved.0, moved.1.len()) {
                kept = (kept.0 + load, kept.1 + 1);
            } else {
                moved.0 += load;
                moved.1.push(id);
            }
        }
        (moved.1, kept.0.min(moved.0))
    }
}

/// Decides about recruiting and releasing, by the history of loads.
#[derive(Default)]
pub(super) struct Policy {
    /// How long the load has been high.
    hot: Duration,
    /// How long it has been low.
    cool: Duration,
    /// True when the last window was idle with the fewest threads.
    idle: bool,
}

impl Policy {
    /// Length of the next window.
    pub(super) fn window(&self) -> Duration {
        if self.idle { IDLE_WINDOW } else { WINDOW }
    }

    /// Decides after a window, for a core with at least `min` threads.
    pub(super) fn judge(&mut self, recruiting: &Recruiting, min: usize, sample: &Sample<'_>) -> Step {
        let threads = threads(sample);
        let step = match self.recruit(recruiting, min, sample, &threads) {
            Step::Stay => self.release(recruiting, min, sample, &threads),
            step => step,
        };
        let load: u32 = threads.iter().map(|thread| thread.load).sum();
        self.idle = threads.len() == min && load < FULL / 100;
        if step != Step::Stay {
            (self.hot, self.cool) = (Duration::ZERO, Duration::ZERO);
        }
        step
    }

    fn recruit(
        &mut self,
        recruiting: &Recruiting,
        min: usize,
        sample: &Sample<'_>,
        threads: &[Thread],
    ) -> Step {
        let divisible = threads.iter().filter(|thread| thread.dispatchers.len() > 1);
        if threads.len() < min {
            // The minimum has been raised.
            let most = divisible.max_by_key(|thread| (thread.load, thread.dispatchers.len()));
            return most.map_or(Step::Stay, |thread| Step::Recruit(thread.divide().0));
        }
        let high = recruiting.load_high * FULL / 100;
        let hot = divisible.filter(|thread| thread.load >= high);
        let parts = hot.map(|thread| (thread.load, thread.divide()));
        let best = parts.filter(|(_, (_, smaller))| *smaller >= high / PART).max_by_key(|(load, _)| *load);
        let Some((_, (moved, _))) = best else {
            self.hot = Duration::ZERO;
            return Step::Stay;
        };
        self.hot += sample.length;
        if self.hot >= HOT && sample.idle >= recruiting.spare_cpu * FULL / 100 {
            Step::Recruit(moved)
        } else {
            Step::Stay
        }
    }

    fn release(
        &mut self,
        recruiting: &Recruiting,
        min: usize,
        sample: &Sample<'_>,
        threads: &[Thread],
    ) -> Step {
        let mut least: Vec<_> = threads.iter().map(|thread| (thread.load, thread.slot)).collect();
        least.sort_unstable();
        let together = least.iter().take(2).map(|(load, _)| load).sum::<u32>();
        if threads.len() <= min || together > recruiting.load_low * FULL / 100 {
            self.cool = Duration::ZERO;
            return Step::Stay;
        }
        self.cool += sample.length;
        if self.cool < COOL {
            return Step::Stay;
        }
        let (one, other) = (least[0].1, least[1].1);
        Step::Release { slot: one.max(other), to: one.min(other) }
    }
}

/// The threads of a sample, by slot.
fn threads(sample: &Sample<'_>) -> Vec<Thread> {
    let mut threads: Vec<Thread> = vec![];
    for (id, (&slot, &load)) in sample.slots.iter().zip(sample.loads).enumerate() {
        let at = threads.iter().position(|thread| thread.slot == slot).unwrap_or_else(|| {
            threads.push(Thread { slot, load: 0, dispatchers: vec![] });
            threads.len() - 1
        });
        threads[at].load += load;
        threads[at].dispatchers.push((load, id));
    }
    threads
}

#[cfg(test)]
mod tests {
    use super::*;

    const RECRUITING: Recruiting =
        Recruiting { threads_min: Some(1), load_high: 75, load_low: 40, spare_cpu: 20 };

    /// Judges `windows` windows of 100 ms, and returns the number of the first with a step, and the step.
    fn first(policy: &mut Policy, sample: &Sample<'_>, windows: usize) -> Option<(usize, Step)> {
        (1..=windows).find_map(|window| {
            let step = policy.judge(&RECRUITING, 1, sample);
            (step != Step::Stay).then_some((window, step))
        })
    }

    fn sample<'a>(loads: &'a [u32], slots: &'a [usize]) -> Sample<'a> {
        Sample { length: WINDOW, loads, slots, idle: 200 }
    }

    #[test]
    fn a_thread_with_high_load_is_divided_by_load() {
        // The heaviest stays, the others balance it.
        let busy = sample(&[300, 100, 250, 100], &[0; 4]);
        assert_eq!(first(&mut Policy::default(), &busy, 9), Some((2, Step::Recruit(vec![2, 1]))));
        // Just below the bound: never.
        let less = sample(&[300, 99, 250, 100], &[0; 4]);
        assert_eq!(first(&mut Policy::default(), &less, 99), None);
        // One low window in between starts the count again.
        let mut policy = Policy::default();
        for _ in 0..9 {
            assert_eq!(policy.judge(&RECRUITING, 1, &busy), Step::Stay);
            assert_eq!(policy.judge(&RECRUITING, 1, &less), Step::Stay);
        }
    }

    #[test]
    fn the_busiest_divisible_thread_gets_help() {
        // Thread 0 has one dispatcher, and cannot be helped.
        let busy = sample(&[1000, 400, 390, 0], &[0, 1, 1, 1]);
        assert_eq!(first(&mut Policy::default(), &busy, 9), Some((2, Step::Recruit(vec![2, 3]))));
    }

    #[test]
    fn what_cannot_be_divided_gets_no_help() {
        assert_eq!(first(&mut Policy::default(), &sample(&[1000, 10, 10], &[0; 3]), 99), None);
        assert_eq!(first(&mut Policy::default(), &sample(&[1000, 1000], &[0, 1]), 99), None);
    }

    #[test]
    fn without_a_spare_cpu_nobody_is_recruited() {
        let busy = sample(&[500, 500], &[0, 0]);
        let mut policy = Policy::default();
        assert_eq!(first(&mut policy, &Sample { idle: 199, ..busy.clone() }, 99), None);
        assert_eq!(first(&mut policy, &busy, 1), Some((1, Step::Recruit(vec![1]))), "one becomes idle");
    }

    #[test]
    fn two_threads_with_low_load_are_joined() {
        let low = sample(&[100, 300, 700, 0], &[0, 1, 2, 0]);
        let joined = Step::Release { slot: 1, to: 0 };
        assert_eq!(first(&mut Policy::default(), &low, 99), Some((20, joined)));
        let more = sample(&[100, 301, 700, 0], &[0, 1, 2, 0]);
        assert_eq!(first(&mut Policy::default(), &more, 99), None);
        // The last threads stay.
        let idle = sample(&[0, 0], &[0, 1]);
        let judge = |min| (0..99).map(|_| Policy::default().judge(&RECRUITING, min, &idle)).next().unwrap();
        assert_eq!(judge(2), Step::Stay);
        assert_eq!(first(&mut Policy::default(), &sample(&[0, 0], &[0, 0]), 99), None);
    }

    /// Whatever the loads: what was divided is not joined at the same load, and what was joined is not divided.
    #[test]
    fn no_load_makes_threads_come_and_go() {
        for seed in 0..2_000_u32 {
            let random =
                |n: u32| (seed.wrapping_mul(2_654_435_761) ^ n.wrapping_mul(40_503)).rotate_left(n) % 400;
            let loads: Vec<u32> = (0..4).map(random).collect();
            let mut slots = vec![0; 4];
            let (mut policy, mut steps) = (Policy::default(), 0);
            for _ in 0..1_000 {
                match policy.judge(&RECRUITING, 1, &sample(&loads, &slots)) {
                    Step::Stay => {}
                    Step::Recruit(moved) => {
                        let free = (0..).find(|slot| !slots.contains(slot)).unwrap();
                        moved.into_iter().for_each(|id| slots[id] = free);
                        steps += 1;
                    }
                    Step::Release { .. } => panic!("{loads:?} {slots:?}: divided, then joined"),
                }
            }
            assert!(steps <= 3, "{loads:?}");
        }
    }

    #[test]
    fn a_raised_minimum_is_met_at_once() {
        let mut slots = vec![0; 5];
        let mut policy = Policy::default();
        for threads in 2..=5 {
            let Step::Recruit(moved) = policy.judge(&RECRUITING, 5, &sample(&[0; 5], &slots)) else {
                panic!("{slots:?}")
            };
            moved.into_iter().for_each(|id| slots[id] = threads);
        }
        assert_eq!(policy.judge(&RECRUITING, 5, &sample(&[0; 5], &slots)), Step::Stay);
        slots.sort_unstable();
        slots.dedup();
        assert_eq!(slots.len(), 5);
    }

    #[test]
    fn an_idle_host_is_looked_at_seldom() {
        let mut policy = Policy::default();
        policy.judge(&RECRUITING, 1, &sample(&[4, 5], &[0, 0]));
        assert_eq!(policy.window(), IDLE_WINDOW);
        policy.judge(&RECRUITING, 1, &sample(&[5, 5], &[0, 0]));
        assert_eq!(policy.window(), WINDOW);
        policy.judge(&RECRUITING, 1, &sample(&[0, 0], &[0, 1]));
        assert_eq!(policy.window(), WINDOW, "a thread is to be released");
    }
}
