//! Single frames at random intervals, in both directions. No frame may be late, which shows that no wake-up and no notification
//! is lost.
//!
//! Two cores with a link between them and a guest on each. The guests share nothing but their rings: they sleep until they are
//! notified, and notify only when the event index requests it, so that a lost notification stays lost. One sends a frame, the
//! other returns it, each after a random pause near one of the times at which something changes: T_sleep, T_nowork, the window
//! over which rates are measured, the check of optimistic interrupts, the dispatcher's ticks.
//!
//! `VNET_STALL_FRAMES=10000000 cargo test --release --test stalls` sends that many frames (ten minutes to an hour).

mod arrival;
#[path = "../common/mod.rs"]
mod common;
mod guest;
#[path = "../common/ring.rs"]
mod ring;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{link_to, mac};
use guest::Guest;
use parking_lot::Mutex;
use vnet::dispatch::core::CoreOptions;
use vnet::dispatch::mode::{Drive, Gauge, Mode, ModeSettings};
use vnet::dispatch::yielding::Strategy;
use vnet::frame::{NetworkId, PortId};
use vnet::interface::Interface;
use vnet::interface::interrupts::{InterruptSettings, Interrupts};
use vnet::interface::vhost_user::{AllowedPeer, VhostUser, VhostUserOptions};
use vnet::link::Encapsulation;
use vnet::stats::PortStats;
use vnet::unix::SocketAccess;

/// Number of frames in an ordinary run, all tests together.
const FRAMES: u64 = 100_000;
/// Number of tests that share them.
const TESTS: u64 = 6;
/// A frame that takes longer has stalled: ten times the longest pause of all threads except the tick of an idle core.
const STALL: Duration = Duration::from_millis(900);

const SLEEP_US: u32 = 50;
const NOWORK_US: u32 = 200;
const WINDOW_US: u32 = 1_000;

/// Settings of a host.
#[derive(Clone, Copy, Debug)]
struct Settings {
    strategy: Strategy,
    mode: Mode,
    interrupts: Interrupts,
    /// Interrupt densities alpha and beta.
    densities: (u64, u64),
}

/// A host with one vhost-user interface, its guest, and a link.
struct Host {
    host: common::Host,
    stats: Arc<PortStats>,
    gauge: Arc<Gauge>,
    guest: Guest,
    _folder: tempfile::TempDir,
}

impl Host {
    fn start(settings: Settings) -> Host {
        let mut host = common::Host::start(CoreOptions {
            yield_strategy: settings.strategy,
            sleep_us: SLEEP_US,
            nowork_us: NOWORK_US,
            ..CoreOptions::default()
        });
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("guest");
        let stats = Arc::new(PortStats::default());
        let options = VhostUserOptions {
            name: "guest".into(),
            socket: socket.clone(),
            server: true,
            mac: None,
            mtu: 1500,
            queues: 1,
            access: SocketAccess::default(),
            peer: AllowedPeer::default(),
            memory_max: None,
        };
        let interface = VhostUser::start(options, PortId(0), NetworkId::DEFAULT, stats.clone()).unwrap();
        let (density_low, density_high) = settings.densities;
        let interrupts = settings.interrupts;
        // Even a lone frame is announced early.
        let early_bytes = 0;
        let guest = interface.coalesce().expect("a kind that notifies");
        guest.set_interrupts(InterruptSettings { interrupts, density_low, density_high, early_bytes });
        // Three frames in a window, or none: rates that cross these bounds again and again on any machine.
        let mode =
            ModeSettings { mode: settings.mode, rate_low: 1_000, rate_high: 2_000, window_us: WINDOW_US };
        let drive = Drive::new(mode, 1);
        let gauge = drive.gauge.clone();
        host.add_interface(NetworkId::DEFAULT, interface, stats.clone()).drive = drive;
        let guest = Guest::connect(&socket);
        Host { host, stats, gauge, guest, _folder: folder }
    }

    fn join(&mut self, other: &Host) {
        self.host.add_link(link_to(other.host.core.bridge_address(), Encapsulation::Native, None));
        self.host.publish();
    }
}

/// Pseudo-random numbers (xorshift64*), the same in every run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// A pause: none, or one of the relevant times plus or minus a fifth; long ones are rare.
    fn pause(&mut self) -> Duration {
        let us = match self.next() % 4096 {
            0..1600 => return Duration::ZERO,
            1600..3000 => 10,
            3000..3800 => u64::from(SLEEP_US),
            3800..4060 => u64::from(NOWORK_US),
            4060..4094 => u64::from(WINDOW_US),
            _ => 20_000,
        };
        Duration::from_nanos(us * (800 + self.next() % 400))
    }
}

/// Waits precisely: sleeps while that is exact enough, then spins.
fn pause(time: Duration) {
    const INEXACT: Duration = Duration::from_micros(150);
    let end = Instant::now() + time;
    if time > INEXACT {
        std::thread::sleep(time - INEXACT);
    }
    while Instant::now() < end {
        std::hint::spin_loop();
    }
}

/// Sends `rounds` frames back and forth and returns how many were late.
fn to_and_fro(one: &mut Guest, other: &mut Guest, rounds: u64, seed: u64) -> u64 {
    // Tells the answering guest that this is the last frame.
    const LAST: u64 = u64::MAX;
    std::thread::scope(|scope| {
        let answers = scope.spawn(move || {
            let mut random = Random(seed ^ 0x9e37_79b9_7f4a_7c15);
            // Waits long, because the asking guest measures stalls.
            while let Some(number) = other.take(Duration::from_secs(30)) {
                pause(random.pause());
                other.send(mac(1), mac(2), number);
                if number == LAST {
                    break;
                }
            }
        });
        let (mut random, mut stalls) = (Random(seed), 0);
        for number in (0..rounds).chain([LAST]) {
            pause(random.pause());
            one.send(mac(2), mac(1), number);
            let sent = Instant::now();
            let mut got = one.take(STALL);
            while got != Some(number) {
                // Answers to a frame that was sent again are recognised by their number.
                stalls += u64::from(got.is_none());
                assert!(sent.elapsed() < Duration::from_secs(20), "frame {number} was lost");
                if got.is_none() {
                    one.send(mac(2), mac(1), number);
                }
                got = one.take(STALL);
            }
        }
        answers.join().unwrap();
        stalls
    })
}

/// alpha and beta with which the notification at the end is always withheld, withheld as by default, and never withheld.
const WITHHELD: (u64, u64) = (u64::MAX, u64::MAX);
const DEFAULT: (u64, u64) = (50_000_000, 1_000_000_000);
const NOTIFIED: (u64, u64) = (0, u64::MAX);

fn direct(strategy: Strategy, mode: Mode) -> Settings {
    Settings { strategy, mode, interrupts: Interrupts::Direct, densities: (0, 0) }
}

fn optimistic(strategy: Strategy, mode: Mode, densities: (u64, u64)) -> Settings {
    Settings { interrupts: Interrupts::Optimistic, densities, ..direct(strategy, mode) }
}

/// Sends frames back and forth between two hosts with the same settings; no frame may be late.
fn no_single_frame_stalls(settings: Settings, seed: u64) {
    // Runs one test at a time, because rates must cross the bounds of the modes, and on busy processors they do not.
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock();
    let frames: u64 =
        std::env::var("VNET_STALL_FRAMES").map_or(FRAMES, |count| count.parse().expect("a number"));
    let rounds = frames / 2 / TESTS;
    let (mut one, mut other) = (Host::start(settings), Host::start(settings));
    one.join(&other);
    other.join(&one);
    let stalls = to_and_fro(&mut one.guest, &mut other.guest, rounds, seed);
    assert_eq!(stalls, 0, "{settings:?}: stalled frames");
    let interrupts = &one.stats.interrupts;
    println!(
        "{settings:?}: {} frames, {} notifications, {} kicks, {} switches, early {} (at arrival {}, mispredicted {}, \
         discarded {}, premature {}), at the end {} (withheld {})",
        2 * rounds,
        one.stats.notifications.get(),
        one.stats.kicks.get(),
        one.gauge.switches.get(),
        interrupts.early.get(),
        interrupts.early_at_arrival.get(),
        interrupts.early_mispredicted.get(),
        interrupts.early_discarded.get(),
        interrupts.early_premature.get(),
        interrupts.coalesced_injected.get(),
        interrupts.coalesced_withheld.get(),
    );
    assert_eq!(interrupts.early.get() > 0, settings.interrupts == Interrupts::Optimistic);
    assert_eq!(interrupts.early_at_arrival.get() > 0, settings.interrupts == Interrupts::Optimistic);
    if settings.densities == WITHHELD {
        assert!(interrupts.coalesced_withheld.get() > 0);
    }
    assert_eq!(one.gauge.switches.get() > 0, settings.mode == Mode::Adaptive);
}

#[test]
fn adaptive() {
    no_single_frame_stalls(direct(Strategy::Adaptive, Mode::Adaptive), 1);
}

#[test]
fn adaptive_optimistic() {
    no_single_frame_stalls(optimistic(Strategy::Adaptive, Mode::Adaptive, DEFAULT), 2);
}

#[test]
fn blocking_guest_driven() {
    no_single_frame_stalls(direct(Strategy::Block, Mode::GuestDriven), 3);
}

#[test]
fn blocking_optimistic_always_withheld() {
    no_single_frame_stalls(optimistic(Strategy::Block, Mode::Adaptive, WITHHELD), 4);
}

#[test]
fn timed_optimistic_never_withheld() {
    no_single_frame_stalls(optimistic(Strategy::Timed, Mode::VmmDriven, NOTIFIED), 5);
}

#[test]
fn adaptive_vmm_driven_always_withheld() {
    no_single_frame_stalls(optimistic(Strategy::Adaptive, Mode::VmmDriven, WITHHELD), 6);
}
