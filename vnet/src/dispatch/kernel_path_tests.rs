//! The kernel's verdict is the router's: random rules, moves, setups and captures, and after each a frame that both decide.
//!
//! A frame that the program takes must go to the only port that a router without a cache names; every other frame comes up, is
//! decided by a dispatcher's router and installs its flow. `VNET_TEST_FRAMES` sets the number of frames.

use super::super::mode::Drive;
use super::super::observers::Observers;
use super::super::setup::{InterfacePort, Parts};
use super::*;
use crate::capture::{Options, Session, Tap};
use crate::frame::{DropSink, NetworkId, Origin, Selection};
use crate::interface::{Interface, State};
use crate::route::{AddressGuard, Member, NetworkSpec, Networks, PortKind, Qualifier, Rule, RuleSource};
use crate::source::Source;
use crate::stats::PortStats;
use crate::wire::ethernet::Mac;

const PORTS: u16 = 5;
/// Frames between two changes of the setup, on average, and between two sets of stations.
const FRAMES_PER_SETUP: u64 = 50;
const FRAMES_PER_WORLD: u64 = 2000;
const STATIONS: u64 = 8;

/// A guest's device that nobody uses: `run` tries out the programs at the loopback device.
struct Guest(Option<KernelDevice>);

impl Interface for Guest {
    fn queues(&self) -> usize {
        1
    }

    fn source(self: Arc<Self>, _queue: usize) -> Box<dyn Source> {
        unreachable!("no dispatcher runs")
    }

    fn deliver(&self, _queue: usize, _frames: Selection<'_>, _drops: &mut DropSink) {}

    fn kernel_device(&self) -> Option<&KernelDevice> {
        self.0.as_ref()
    }

    fn state(&self) -> State {
        State::Up
    }

    fn stop(&self) {}
}

/// A small generator (splitmix64), so that a failure names the seed that repeats it.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ z >> 31) % end
    }
}

struct World {
    path: KernelPath,
    random: Random,
    stats: Vec<Arc<PortStats>>,
    generation: u32,
    /// Part of the stations' addresses: an address that moves often is frozen, so each world has its own.
    number: u64,
    session: Arc<Session>,
}

impl World {
    fn new(seed: u64) -> Option<World> {
        let kernel = match Kernel::load(None) {
            Ok(kernel) => kernel,
            Err(error) => {
                assert!(!rustix::process::geteuid().is_root(), "{error}");
                return None;
            }
        };
        let learned = Arc::new(Learned::new());
        learned.keep_versions_in(kernel.clone());
        let setup = Arc::new(Setup::new(Parts::default()));
        let core = CorePart {
            learned,
            started: Instant::now(),
            outlive: Duration::ZERO,
            vxlan_listen: None,
            inheritance: None,
        };
        let path = KernelPath::new(kernel, setup, core).unwrap();
        let stats = (0..PORTS).map(|_| Arc::default()).collect();
        Some(World {
            path,
            random: Random(seed),
            stats,
            generation: 0,
            number: 0,
            session: Arc::new(Session::new(Options::default(), 1)),
        })
    }

    fn port(&mut self) -> PortId {
        PortId(self.random.below(PORTS.into()) as u16)
    }

    fn station(&mut self) -> Mac {
        let [_, _, _, _, _, _, a, b] = self.number.to_be_bytes();
        Mac([2, 0, 0, a, b, self.random.below(STATIONS) as u8])
    }

    fn qualifier(&mut self) -> Qualifier {
        match self.random.below(4) {
            0 => Qualifier::Any,
            1 => Qualifier::Not(self.station()),
            _ => Qualifier::Is(self.station()),
        }
    }

    /// Publishes a random setup. Port 4 has no device, some of the others are captured.
    fn change(&mut self) -> Arc<Setup> {
        let count = self.random.below(4);
        let rule = |index: u64| Rule {
            index: index as u32 + 1,
            network: NetworkId::DEFAULT,
            src: self.qualifier(),
            dst: self.qualifier(),
            from: if self.random.below(2) == 0 { RuleSource::Any } else { RuleSource::Port(self.port()) },
            to: self.port(),
        };
        let rules = (0..count).map(rule).collect();
        let captured = (self.random.below(3) == 0).then(|| self.port());
        let tap = |port| Tap::new(self.session.clone(), [(port, "captured")]);
        let taps = captured.into_iter().map(tap).collect();
        let interface = |n: u16| {
            let device = KernelDevice {
                host: ("lo".into(), u32::from(n) + 1),
                tap: ("lo".into(), 1),
                mac: Mac([2, 0, 0, 0, 0, n as u8]),
                mtu: 1500.into(),
                leads_to: LeadsTo::Namespace(None),
                pair: None,
            };
            InterfacePort {
                member: Member {
                    port: PortId(n),
                    kind: PortKind::Interface,
                    networks: Networks::only([NetworkId::DEFAULT]),
                    mac: (self.random.below(4) == 0).then_some(Mac([2, 1, 0, 0, 0, n as u8])),
                    storm_frames_per_s: None,
                    port_security: self.random.below(8) == 0,
                    counts_hops: false,
                },
                name: format!("i{n}"),
                stats: self.stats[usize::from(n)].clone(),
                interface: Arc::new(Guest((n != 4).then_some(device))),
                drive: Drive::default(),
                guard: (self.random.below(8) == 0).then(|| Arc::new(AddressGuard::new(&[], None))),
            }
        };
        let interfaces = (0..PORTS).map(interface).collect();
        let networks = vec![NetworkSpec { id: NetworkId::DEFAULT, learning: true, ageing_s: 300 }];
        let observers = Observers { taps, ..Observers::default() };
        let mut setup = Setup::new(Parts { networks, interfaces, rules, observers, ..Parts::default() });
        self.generation += 1;
        setup.generation = self.generation;
        let setup = Arc::new(setup);
        self.path.publish(&setup);
        setup
    }

    /// The port that got the frame from the kernel; `None`: it came up.
    fn by_kernel(&self, flow: &Flow) -> Option<PortId> {
        let (kernel, out) = (self.path.kernel(), |port: &Arc<PortStats>| port.out_frames.get());
        kernel.flows().count();
        let before: Vec<_> = self.stats.iter().map(out).collect();
        kernel.try_out(Origin { port: flow.from, network: flow.network }, flow.dst, flow.src);
        kernel.flows().count();
        let got: Vec<_> =
            (0..PORTS).filter(|n| out(&self.stats[usize::from(*n)]) > before[usize::from(*n)]).collect();
        assert!(got.len() <= 1);
        got.first().map(|n| PortId(*n))
    }
}

#[test]
fn the_kernels_verdict_is_the_routers() {
    let frames = std::env::var("VNET_TEST_FRAMES").map_or(100_000, |text| text.parse().unwrap());
    let seed = std::process::id().into();
    let Some(mut world) = World::new(seed) else { return };
    let mut setup = world.change();
    let learned = world.path.learned.clone();
    let new = |setup: &Setup| Router::new(setup.table.clone(), learned.clone());
    let (mut dispatcher, mut oracle) = (new(&setup), new(&setup));
    dispatcher.offer_to(world.path.verdicts(&setup));
    let mut taken = 0;
    for frame in 0..frames {
        if world.random.below(FRAMES_PER_SETUP) == 0 {
            if world.random.below(FRAMES_PER_WORLD / FRAMES_PER_SETUP) == 0 {
                world.number += 1;
            }
            setup = world.change();
            dispatcher.adopt(setup.table.clone());
            dispatcher.offer_to(world.path.verdicts(&setup));
            if world.random.below(8) == 0 {
                learned.forget_port(world.port());
            }
        }
        let src = world.station();
        // Stations are at home, mostly.
        let home = PortId(u16::from(src.0[5]) % PORTS);
        let from = if world.random.below(50) == 0 { world.port() } else { home };
        let dst = if world.random.below(20) == 0 { Mac::BROADCAST } else { world.station() };
        let flow = Flow { network: NetworkId::DEFAULT, src, dst, from };
        let now_ms = world.path.started.elapsed().as_millis() as u64;
        let by_kernel = world.by_kernel(&flow);
        // Without a cache: every answer is the table's own.
        oracle.adopt(setup.table.clone());
        let by_router = oracle.sole(&flow, now_ms);
        if let Some(port) = by_kernel {
            taken += 1;
            assert_eq!(Some(port), by_router, "seed {seed}, frame {frame}: {flow:?}");
            assert!(
                !setup.watches(port) && !setup.watches(flow.from),
                "seed {seed}, frame {frame}: {flow:?} was captured"
            );
            let needed = setup.interface(flow.from).unwrap().needs_every_frame();
            assert!(!needed, "seed {seed}, frame {frame}: addresses of {flow:?} were not checked");
        } else {
            dispatcher.begin();
            dispatcher.sole(&flow, now_ms);
        }
    }
    assert!(taken > frames / 20, "{taken} of {frames}: hardly any flow was installed");
}
