//! Modes under traffic: a million switches between guest-driven and VMM-driven, and no frame that waits.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use vnet::dispatch::core::{Core, CoreOptions};
use vnet::dispatch::isolation::Isolation;
use vnet::dispatch::mode::{Drive, Mode, ModeSettings};
use vnet::dispatch::setup::{InterfacePort, Parts};
use vnet::dispatch::yielding::Strategy;
use vnet::frame::{Batch, NetworkId, Origin, PortId};
use vnet::interface::fake::{Fake, OwnedFrame};
use vnet::interface::{Interface, State};
use vnet::poll::Waker;
use vnet::route::{Member, NetworkSpec, Networks, PortKind};
use vnet::stats::PortStats;
use vnet::wire::ethernet::Mac;
use vnet::wire::offload::Offload;

const SWITCHES: u64 = 1_000_000;
const BURST: usize = 500;
const WAIT: Duration = Duration::from_secs(10);

/// A guest that sends every frame it gets back, at the worst moment: just when its dispatcher has asked to be notified.
struct Echo {
    fake: Arc<Fake>,
    /// Frames to send back, and whether the dispatcher has asked.
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

    fn receive(&self, queue: usize, batch: &mut Batch, run: &mut dyn FnMut(&Batch)) -> usize {
        self.fake.receive(queue, batch, run)
    }

    fn deliver(&self, queue: usize, batch: &Batch, which: &[u16]) {
        self.fake.deliver(queue, batch, which);
        self.held.lock().unwrap().0.extend(self.fake.take());
        self.send_back();
    }

    fn attach(&self, queue: usize, waker: Waker) {
        self.fake.attach(queue, waker);
    }

    fn detach(&self, queue: usize) {
        self.fake.detach(queue);
    }

    fn arm(&self, queue: usize) -> bool {
        let armed = self.fake.arm(queue);
        self.held.lock().unwrap().1 = armed;
        self.send_back();
        armed
    }

    fn disarm(&self, queue: usize) {
        self.held.lock().unwrap().1 = false;
        self.fake.disarm(queue);
    }

    fn polls(&self) -> bool {
        true
    }

    fn state(&self) -> State {
        self.fake.state()
    }

    fn stop(&self) {
        self.fake.stop();
    }
}

/// A core with two interfaces that are driven as `drive` says.
struct Host {
    core: Core,
    fakes: [Arc<Fake>; 2],
    ports: Vec<InterfacePort>,
}

impl Host {
    fn start(yield_strategy: Strategy, settings: ModeSettings) -> Host {
        let core = Core::start(&CoreOptions {
            threads: 1,
            cpus: vec![],
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
        let stats = [0, 1].map(|_| Arc::new(PortStats::default()));
        let fake = |n: u16| {
            let origin = Origin { port: PortId(n), network };
            Fake::new(origin, 1500, 2 * BURST, stats[usize::from(n)].clone()).unwrap()
        };
        let fakes = [fake(0), fake(1)];
        let port = |n: u16| InterfacePort {
            member: Member {
                port: PortId(n),
                kind: PortKind::Interface,
                networks: Networks::only([network]),
                mac: Some(mac(n as u8)),
                storm_frames_per_s: None,
                port_security: false,
            },
            name: format!("fake{n}"),
            stats: stats[usize::from(n)].clone(),
            interface: fakes[usize::from(n)].clone(),
            drive: Drive::new(settings, 1),
        };
        let host = Host { core, ports: vec![port(0), port(1)], fakes: fakes.clone() };
        host.publish();
        host
    }

    fn publish(&self) {
        let networks = vec![NetworkSpec { id: NetworkId::DEFAULT, learning: true, ageing_s: 300 }];
        let interfaces = self.ports.clone();
        self.core.publish(Parts { networks, interfaces, ..Parts::default() });
    }

    fn switches(&self) -> u64 {
        self.ports[0].drive.gauge.switches.get()
    }
}

fn mac(n: u8) -> Mac {
    Mac([0x52, 0x54, 0, 0, 0, n])
}

fn frame(number: usize) -> OwnedFrame {
    let number = (number as u32).to_be_bytes();
    let mut bytes = [&mac(1).0[..], &mac(0).0, &[0x88, 0xb5], &number].concat();
    bytes.resize(60, 0);
    (bytes, Offload::default())
}

/// Sends a burst of frames, each when the one before has arrived if they are to be `single`, and sees them all in order.
fn burst(host: &Host, single: bool) {
    let delivered = &host.ports[1].stats.out_frames;
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
                assert!(sent.elapsed() < WAIT, "frame {number} waits for a wake-up that does not come");
                std::thread::yield_now();
            }
        }
    }
    let got = host.fakes[1].wait_for(BURST, WAIT);
    assert_eq!(got.len(), BURST, "frames wait for a wake-up that does not come");
    assert!((0..).zip(&got).all(|(number, got)| *got == frame(number)));
}

/// A frame goes to and fro between two guests that answer in the moment in which they are left alone, and frames of another
/// thread cross meanwhile.
#[test]
fn a_million_switches_lose_nothing() {
    // A look that finds a frame makes a queue VMM-driven, one that finds none guest-driven.
    let settings = ModeSettings { mode: Mode::Adaptive, rate_low: 1, rate_high: 1, window_us: 1 };
    let mut host = Host::start(Strategy::Block, settings);
    for n in [2, 3] {
        let origin = Origin { port: PortId(n), network: NetworkId::DEFAULT };
        let stats = Arc::new(PortStats::default());
        let fake = Fake::new(origin, 1500, 10, stats.clone()).unwrap();
        if n == 2 {
            let bytes = [&mac(3).0[..], &mac(2).0, &[0x88; 48]].concat();
            fake.send([(bytes, Offload::default())]);
        }
        let mut port = host.ports[0].clone();
        (port.member.port, port.member.mac) = (PortId(n), Some(mac(n as u8)));
        (port.stats, port.drive) = (stats, Drive::new(settings, 1));
        port.interface = Arc::new(Echo { fake, held: Mutex::default() });
        host.ports.push(port);
    }
    host.publish();
    let switches = || host.ports[2..].iter().map(|port| port.drive.gauge.switches.get()).sum::<u64>();
    let mut before = 0;
    while before < SWITCHES {
        burst(&host, true);
        let now = switches();
        assert!(now > before, "the frame that goes to and fro waits for a wake-up that does not come");
        before = now;
    }
    assert!(host.switches() > 0);
    let sum =
        |count: fn(&PortStats) -> u64| host.ports[2..].iter().map(|port| count(&port.stats)).sum::<u64>();
    assert!(sum(|stats| stats.in_frames.get()) >= SWITCHES / 4);
    assert_eq!(sum(PortStats::drops_total), 0);
}

/// Settings change under traffic, from one fixed mode to another, and take effect at once.
#[test]
fn modes_are_set_while_frames_flow() {
    let fixed = |mode| ModeSettings { mode, ..ModeSettings::default() };
    let mut host = Host::start(Strategy::Adaptive, fixed(Mode::GuestDriven));
    let end = Instant::now() + Duration::from_secs(1);
    let mut set = 0;
    while Instant::now() < end {
        for mode in [Mode::VmmDriven, Mode::GuestDriven] {
            std::thread::scope(|scope| {
                let traffic = scope.spawn(|| burst(&host, false));
                traffic.join().unwrap();
            });
            host.ports.iter_mut().for_each(|port| port.drive.settings = fixed(mode));
            host.publish();
            set += 1;
            assert_eq!(host.switches(), set);
            assert_eq!(host.ports[0].drive.gauge.vmm_driven(), usize::from(mode == Mode::VmmDriven));
        }
    }
}
