//! Guest-driven and VMM-driven mode under traffic: a million switches between them, and no frame is left waiting.

mod common;

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::{Host, WAIT, mac, yielding};
use vnet::dispatch::mode::{Drive, Mode, ModeSettings};
use vnet::dispatch::yielding::Strategy;
use vnet::frame::{Batch, DropSink, NetworkId, Origin, PortId, Selection};
use vnet::interface::fake::{Fake, OwnedFrame};
use vnet::interface::{Interface, State};
use vnet::poll::Waker;
use vnet::source::{Source, Taken};
use vnet::stats::PortStats;
use vnet::wire::offload::Offload;

const SWITCHES: u64 = 1_000_000;
const BURST: usize = 500;

/// A guest that returns every frame to its sender at the worst moment: just after its dispatcher has requested a notification.
struct Echo {
    fake: Arc<Fake>,
    /// Frames to return, and whether the dispatcher has requested a notification.
    held: Mutex<(Vec<OwnedFrame>, bool)>,
}

impl Echo {
    fn send_back(&self) {
        let mut held = self.held.lock().unwrap();
        if held.1 && !held.0.is_empty() {
            held.1 = false;
            let frames = std::mem::take(&mut held.0).into_iter().map(|(mut bytes, offload)| {
                let (to, from) = bytes[..12].split_at_mut(6);
                to.swap_with_slice(from);
                (bytes, offload)
            });
            self.fake.send(frames);
        }
    }
}

impl Interface for Echo {
    fn queues(&self) -> usize {
        1
    }

    fn source(self: Arc<Self>, queue: usize) -> Box<dyn Source> {
        let inner = self.fake.clone().source(queue);
        Box::new(EchoSource { echo: self, inner })
    }

    fn deliver(&self, queue: usize, frames: Selection<'_>, drops: &mut DropSink) {
        self.fake.deliver(queue, frames, drops);
        self.held.lock().unwrap().0.extend(self.fake.take());
        self.send_back();
    }

    fn state(&self) -> State {
        self.fake.state()
    }

    fn stop(&self) {
        self.fake.stop();
    }
}

struct EchoSource {
    echo: Arc<Echo>,
    inner: Box<dyn Source>,
}

impl Source for EchoSource {
    // SAFETY: every frame in the batch is `inner`'s, whose `fill` has the same contract.
    unsafe fn fill(&mut self, batch: &mut Batch, drops: &mut DropSink, now_ms: u64) -> Taken {
        // SAFETY: this function has the same contract as its caller.
        unsafe { self.inner.fill(batch, drops, now_ms) }
    }

    fn give_back(&mut self) {
        self.inner.give_back();
    }

    fn watch(&mut self, waker: Waker) {
        self.inner.watch(waker);
    }

    fn unwatch(&mut self) {
        self.inner.unwatch();
    }

    fn rest(&mut self) -> bool {
        let armed = self.inner.rest();
        self.echo.held.lock().unwrap().1 = armed;
        self.echo.send_back();
        armed
    }

    fn resume(&mut self) {
        self.echo.held.lock().unwrap().1 = false;
        self.inner.resume();
    }

    fn polls(&self) -> bool {
        true
    }
}

/// A host with two interfaces in this mode.
fn host(yield_strategy: Strategy, settings: ModeSettings) -> Host {
    let mut host = Host::start(yielding(yield_strategy));
    for n in [0, 1] {
        host.add_fake(NetworkId::DEFAULT);
        host.interfaces[n].member.mac = Some(mac(n as u8));
        host.interfaces[n].drive = Drive::new(settings, 1);
    }
    host.publish();
    host
}

fn switches(host: &Host) -> u64 {
    host.interfaces[0].drive.gauge.switches.get()
}

fn frame(number: usize) -> OwnedFrame {
    let number = (number as u32).to_be_bytes();
    let mut bytes = [&mac(1).0[..], &mac(0).0, &[0x88, 0xb5], &number].concat();
    bytes.resize(60, 0);
    (bytes, Offload::default())
}

/// Sends a burst of frames and checks that all arrive in order. `single`: each frame is sent after the previous one has arrived.
fn burst(host: &Host, single: bool) {
    let delivered = &host.interfaces[1].stats.out_frames;
    let before = delivered.get();
    for number in 0..BURST {
        host.fakes[0].send([frame(number)]);
        let sent = Instant::now();
        for looks in 1u32.. {
            if !single || delivered.get() > before + number as u64 {
                break;
            }
            std::hint::spin_loop();
            if looks.is_multiple_of(256) {
                assert!(sent.elapsed() < WAIT, "no wake-up for frame {number}");
                std::thread::yield_now();
            }
        }
    }
    let got = host.fakes[1].wait_for(BURST, WAIT);
    assert_eq!(got.len(), BURST, "no wake-up for frames");
    assert!((0..).zip(&got).all(|(number, got)| *got == frame(number)));
}

/// A frame goes back and forth between two guests that answer at the moment when their dispatcher stops polling, while another
/// thread's frames cross.
#[test]
fn a_million_mode_switches_lose_no_frame() {
    // One poll that finds a frame makes a queue VMM-driven; one that finds none makes it guest-driven.
    let settings = ModeSettings { mode: Mode::Adaptive, rate_low: 1, rate_high: 1, window_us: 1 };
    let mut host = host(Strategy::Block, settings);
    for n in [2, 3] {
        let origin = Origin { port: PortId(n), network: NetworkId::DEFAULT };
        let stats = Arc::new(PortStats::default());
        let fake = Fake::new(origin, 1500, 10, stats.clone()).unwrap();
        if n == 2 {
            let bytes = [&mac(3).0[..], &mac(2).0, &[0x88; 48]].concat();
            fake.send([(bytes, Offload::default())]);
        }
        let echo = Arc::new(Echo { fake, held: Mutex::default() });
        let port = host.add_interface(NetworkId::DEFAULT, echo, stats);
        (port.member.mac, port.drive) = (Some(mac(n as u8)), Drive::new(settings, 1));
    }
    host.publish();
    let echoes = &host.interfaces[2..];
    let echoed = || echoes.iter().map(|port| port.drive.gauge.switches.get()).sum::<u64>();
    let mut before = 0;
    while before < SWITCHES {
        burst(&host, true);
        let now = echoed();
        assert!(now > before, "no wake-up for the frame that goes to and fro");
        before = now;
    }
    assert!(switches(&host) > 0);
    let sum = |count: fn(&PortStats) -> u64| echoes.iter().map(|port| count(&port.stats)).sum::<u64>();
    assert!(sum(|stats| stats.in_frames.get()) >= SWITCHES / 4);
    assert_eq!(sum(PortStats::drops_total), 0);
}

/// The configured mode changes under traffic and takes effect at once.
#[test]
fn modes_change_while_frames_flow() {
    let fixed = |mode| ModeSettings { mode, ..ModeSettings::default() };
    let mut host = host(Strategy::Adaptive, fixed(Mode::GuestDriven));
    let end = Instant::now() + Duration::from_secs(1);
    let mut set = 0;
    while Instant::now() < end {
        for mode in [Mode::VmmDriven, Mode::GuestDriven] {
            std::thread::scope(|scope| {
                let traffic = scope.spawn(|| burst(&host, false));
                traffic.join().unwrap();
            });
            host.interfaces.iter_mut().for_each(|port| port.drive.settings = fixed(mode));
            host.publish();
            set += 1;
            assert_eq!(switches(&host), set);
            assert_eq!(host.interfaces[0].drive.gauge.vmm_driven(), usize::from(mode == Mode::VmmDriven));
        }
    }
}
