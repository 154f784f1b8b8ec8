//! Fewer processors than threads: a dispatcher that spins yields its processor to an application that needs it.

mod common;

use std::time::{Duration, Instant};

use common::{Host, WAIT, frame, mac, yielding};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use rustix::time::{ClockId, clock_gettime};
use vnet::dispatch::core::CoreOptions;
use vnet::dispatch::yielding::Strategy;
use vnet::frame::NetworkId;
use vnet::wire::ethernet::Mac;

const TIME: Duration = Duration::from_millis(700);

/// Processor time used by the calling thread.
fn own_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Processor time used by the dispatcher, the only thread of its name in this process (proc_pid_stat(5): nanoseconds on a
/// processor).
fn dispatcher_time() -> Duration {
    for task in std::fs::read_dir("/proc/self/task").unwrap() {
        let task = task.unwrap().path();
        if std::fs::read_to_string(task.join("comm")).is_ok_and(|name| name.trim() == "dispatch-0") {
            let text = std::fs::read_to_string(task.join("schedstat")).unwrap();
            return Duration::from_nanos(text.split(' ').next().unwrap().parse().unwrap());
        }
    }
    panic!("no dispatcher")
}

/// Computes on the dispatcher's processor. Returns the computation's share of the processor time of both, and the number of
/// frames that crossed during it.
fn compute_beside(yield_strategy: Strategy) -> (f64, usize) {
    let allowed = sched_getaffinity(None).unwrap();
    let cpu = (0..CpuSet::MAX_CPU).find(|&cpu| allowed.is_set(cpu)).unwrap();
    let mut host = Host::start(CoreOptions { cpus: vec![cpu], ..yielding(yield_strategy) });
    let [from, to] = [(); 2].map(|()| host.add_fake(NetworkId::DEFAULT));
    host.publish();
    std::thread::scope(|scope| {
        let application = scope.spawn(move || {
            let mut set = CpuSet::new();
            set.set(cpu);
            sched_setaffinity(None, &set).unwrap();
            let (begin, before, other) = (Instant::now(), own_time(), dispatcher_time());
            while begin.elapsed() < TIME {
                (0..1000).for_each(|_| std::hint::spin_loop());
            }
            let (own, other) = (own_time() - before, dispatcher_time() - other);
            own.as_secs_f64() / (own + other).as_secs_f64()
        });
        // An occasional frame, which must still arrive.
        let mut crossed = 0;
        while !application.is_finished() {
            from.send([frame(Mac::BROADCAST, mac(1), 60, 0)]);
            crossed += to.wait_for(1, WAIT).len();
            std::thread::sleep(Duration::from_millis(10));
        }
        (application.join().unwrap(), crossed)
    })
}

#[test]
fn a_spinning_dispatcher_does_not_starve_applications() {
    // `immediate` calls sched_yield in every turn without work: the application gets at least half of the processor, and nearly
    // all of it under EEVDF.
    let (share, crossed) = compute_beside(Strategy::Immediate);
    println!(
        "immediate: {:.0} % of the processor for the application, {crossed} frames crossed",
        share * 100.0
    );
    assert!(share > 0.35, "{share}");
    assert!(crossed >= 10, "{crossed}");
    // `adaptive` sleeps when other threads need the processor.
    let (share, crossed) = compute_beside(Strategy::Adaptive);
    println!(
        "adaptive: {:.0} % of the processor for the application, {crossed} frames crossed",
        share * 100.0
    );
    assert!(share > 0.8, "{share}");
    assert!(crossed >= 10, "{crossed}");
}
