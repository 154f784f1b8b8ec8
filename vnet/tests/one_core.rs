//! Fewer processors than threads: a dispatcher that spins shares its processor with an application that wants it too.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use rustix::time::{ClockId, clock_gettime};
use vnet::dispatch::core::{Core, CoreOptions};
use vnet::dispatch::isolation::Isolation;
use vnet::dispatch::mode::Drive;
use vnet::dispatch::setup::{InterfacePort, Parts};
use vnet::dispatch::yielding::Strategy;
use vnet::frame::{NetworkId, Origin, PortId};
use vnet::interface::fake::Fake;
use vnet::route::{Member, NetworkSpec, Networks, PortKind};
use vnet::stats::PortStats;
use vnet::wire::offload::Offload;

const TIME: Duration = Duration::from_millis(700);

/// Processor time of the calling thread.
fn own_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Processor time of the dispatcher, in this process the only one of its name (proc_pid_stat(5): nanoseconds on a processor).
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

/// A computation on the dispatcher's processor; returns its share of the time that both had, and the frames that crossed.
fn compute_beside(yield_strategy: Strategy) -> (f64, usize) {
    let allowed = sched_getaffinity(None).unwrap();
    let cpu = (0..CpuSet::MAX_CPU).find(|&cpu| allowed.is_set(cpu)).unwrap();
    let core = Core::start(&CoreOptions {
        threads: 1,
        cpus: vec![cpu],
        yield_strategy,
        sleep_us: 50,
        nowork_us: 200,
        burst: 64,
        listen: "127.0.0.1:0".parse().unwrap(),
        ports: 1,
        vxlan_listen: None,
        stream_listen: None,
        zero_copy: Default::default(),
        isolation: Isolation::default(),
    })
    .unwrap();
    let network = NetworkId::DEFAULT;
    let (fakes, interfaces): (Vec<_>, Vec<_>) = (0..2)
        .map(|n| {
            let (port, stats) = (PortId(n), Arc::new(PortStats::default()));
            let fake = Fake::new(Origin { port, network }, 1500, 1000, stats.clone()).unwrap();
            let member = Member {
                port,
                kind: PortKind::Interface,
                networks: Networks::only([network]),
                mac: None,
                storm_frames_per_s: None,
                port_security: false,
            };
            let (name, interface) = (format!("fake{n}"), fake.clone());
            (fake, InterfacePort { member, name, stats, interface, drive: Drive::default() })
        })
        .unzip();
    let networks = vec![NetworkSpec { id: network, learning: true, ageing_s: 300 }];
    core.publish(Parts { networks, interfaces, ..Parts::default() });
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
        // Frames now and then, which have to get through all the same.
        let mut crossed = 0;
        while !application.is_finished() {
            let broadcast = [&[0xff; 6][..], &[2, 0, 0, 0, 0, 1], &[0x88; 48]].concat();
            fakes[0].send([(broadcast, Offload::default())]);
            crossed += fakes[1].wait_for(1, Duration::from_secs(5)).len();
            std::thread::sleep(Duration::from_millis(10));
        }
        (application.join().unwrap(), crossed)
    })
}

#[test]
fn a_spinning_dispatcher_starves_nobody() {
    // It yields at every turn without work: half of the processor each at least, and with EEVDF the application has nearly
    // all of it.
    let (share, crossed) = compute_beside(Strategy::Immediate);
    println!(
        "immediate: the application has {:.0} % of the processor, {crossed} frames crossed",
        share * 100.0
    );
    assert!(share > 0.35, "{share}");
    assert!(crossed >= 10, "{crossed}");
    // It leaves a wanted processor alone.
    let (share, crossed) = compute_beside(Strategy::Adaptive);
    println!(
        "adaptive: the application has {:.0} % of the processor, {crossed} frames crossed",
        share * 100.0
    );
    assert!(share > 0.8, "{share}");
    assert!(crossed >= 10, "{crossed}");
}
