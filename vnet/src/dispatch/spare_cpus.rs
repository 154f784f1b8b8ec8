//! Idle time of CPUs, from /proc/stat.

use std::collections::HashMap;

use super::recruit::FULL;

/// Clock ticks of one CPU since the machine started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Ticks {
    idle: u64,
    total: u64,
}

/// The idle time of each CPU since the previous reading.
#[derive(Default)]
pub(super) struct SpareCpus {
    before: HashMap<usize, Ticks>,
    /// Share of each CPU, in parts of a thousand.
    idle: HashMap<usize, u32>,
}

impl SpareCpus {
    /// Reads the kernel's counters.
    pub(super) fn read(&mut self) {
        // Some containers hide the file. Then all CPUs count as idle.
        let text = std::fs::read_to_string("/proc/stat").unwrap_or_default();
        self.update(&text);
    }

    fn update(&mut self, text: &str) {
        let now: HashMap<usize, Ticks> = text.lines().filter_map(parse).collect();
        self.idle = now
            .iter()
            .map(|(cpu, now)| {
                let before = self.before.get(cpu).copied().unwrap_or_default();
                let idle = now.idle.saturating_sub(before.idle);
                let total = now.total.saturating_sub(before.total).max(1);
                (*cpu, (idle * u64::from(FULL) / total).min(FULL.into()) as u32)
            })
            .collect();
        self.before = now;
    }

    /// Idle time of `cpus` together, in parts of a thousand of one CPU. A CPU that the kernel does not list counts as idle.
    pub(super) fn idle(&self, cpus: impl Iterator<Item = usize>) -> u32 {
        cpus.map(|cpu| self.idle.get(&cpu).copied().unwrap_or(FULL)).sum()
    }
}

/// The CPUs that this process may use.
pub(super) fn allowed() -> Vec<usize> {
    let set = rustix::thread::sched_getaffinity(None);
    let is_in = |cpu: &usize| set.as_ref().is_ok_and(|set| set.is_set(*cpu));
    (0..rustix::thread::CpuSet::MAX_CPU).filter(is_in).collect()
}

/// The CPU and ticks of a line `cpuN user nice system idle iowait irq softirq steal ...`; `None` for other lines.
fn parse(line: &str) -> Option<(usize, Ticks)> {
    let mut words = line.split_ascii_whitespace();
    let cpu = words.next()?.strip_prefix("cpu")?.parse().ok()?;
    // A guest's time, after these, is part of the user's.
    let ticks: Vec<u64> = words.take(8).map_while(|word| word.parse().ok()).collect();
    let idle = ticks.get(3)? + ticks.get(4)?;
    Some((cpu, Ticks { idle, total: ticks.iter().sum() }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_time_is_that_since_the_previous_reading() {
        let mut cpus = SpareCpus::default();
        cpus.update("cpu  9 9 9 9 9\ncpu0 10 0 10 80 0 0 0 0 50 50\ncpu1 0 0 0 100 0 0 0 0 0 0\nintr 1 2\n");
        assert_eq!(cpus.idle([0].into_iter()), 800);
        cpus.update("cpu0 19 0 10 80 1 0 0 0 59 50\ncpu1 5 0 0 105 0 0 0 0 0 0\n");
        assert_eq!((cpus.idle([0].into_iter()), cpus.idle([0, 1].into_iter())), (100, 600));
        // CPU 7 is not listed.
        assert_eq!(cpus.idle([1, 7].into_iter()), 500 + FULL);
        cpus.update("");
        assert_eq!(cpus.idle([0].into_iter()), FULL);
    }

    #[test]
    fn the_kernels_own_file_is_understood() {
        let mut cpus = SpareCpus::default();
        cpus.read();
        let allowed = allowed();
        assert!(!allowed.is_empty());
        assert!(allowed.iter().all(|cpu| cpus.idle.contains_key(cpu)), "{allowed:?} {:?}", cpus.idle);
    }
}
