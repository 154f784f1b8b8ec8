//! A virtual machine's device is plugged and unplugged again and again under traffic: no write into memory that is no longer the
//! device's, no descriptor or mapping that stays behind.
//!
//! ```text
//!   station --- core --- interface: device_add, map, start the rings, frames both ways
//!                          | ADD_MEM_REG: the guest's buffers lie in the new memory; used up, REM_MEM_REG: the memory is painted
//!                          | the driver reloads, or the guest reboots: rings stopped, all memory is painted, rings started again
//!                          | the end, each in turn: [`End`]; all memory is painted
//!                        device_del
//! ```
//!
//! The station sends all the time, so every step falls into frames that are being delivered. Painted memory must keep its paint,
//! and so must the *canary pages* around the guest's buffers. A link and a network come and go with each device.
//!
//! `VNET_TEST_CYCLES=1000 cargo test --test hot_plug` runs that many cycles (`make proof PROOF=hot-plug`).

mod common;
#[path = "common/ring.rs"]
mod ring;

use std::net::UdpSocket;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use common::{WAIT, link_to, mac, wait_for};
use vhost::VhostBackend;
use vhost::vhost_user::message::VhostUserHeaderFlag;
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vnet::dispatch::yielding::Strategy;
use vnet::frame::NetworkId;
use vnet::interface::fake::Fake;
use vnet::interface::vhost_user::{AllowedPeer, VhostUser, VhostUserOptions};
use vnet::interface::virtqueue::{DESC_WRITE, Descriptor};
use vnet::interface::{Interface, State};
use vnet::link::Encapsulation;
use vnet::route::NetworkSpec;
use vnet::stats::PortStats;
use vnet::unix::SocketAccess;
use vnet::wire::offload::Offload;

use ring::{Memory, RING_SPACE, Ring, SIZE};

/// Cycles of an ordinary run.
const CYCLES: usize = 20;
/// Cycles after which each kind of end has been seen, and threads and the allocator have what they keep.
const WARM: usize = 8;
/// Mappings that may come and go by themselves: stacks of ended threads, the allocator's.
const MAPPINGS_SLACK: usize = 8;
/// MRG_RXBUF, EVENT_IDX, PROTOCOL_FEATURES, VERSION_1.
const FEATURES: u64 = 1 << 15 | 1 << 29 | 1 << 30 | 1 << 32;
const RECEIVE: usize = 0;
const TRANSMIT: usize = 1;
const HEADER: usize = 12;
const FRAME: usize = 1400;
/// The guest's address, and the station's.
const GUEST: u8 = 1;
const STATION: u8 = 9;

/// Name of the guest's memory in /proc/self/maps.
const NAME: &str = "vnet-hot-plug";
const PAGE: usize = 0x1000;
const BUFFER: usize = 0x800;
/// Buffers of a ring, between two canary pages: the last page of one area is the first of the next.
const AREA: usize = PAGE + SIZE as usize * BUFFER;
const MAIN_LEN: usize = 2 * RING_SPACE + 2 * AREA + PAGE;
const DIMM_LEN: usize = AREA + PAGE;
/// Where the guest sees the memory that is plugged later.
const DIMM_AT: u64 = 0x10_0000;
const PAINT: u64 = 0xc5c5_c5c5_c5c5_c5c5;

/// How a device ends.
#[derive(Clone, Copy, Debug)]
enum End {
    /// `device_del` while the guest runs.
    Unplugged,
    /// The machine monitor is killed, with frames on their way.
    Killed,
    /// Memory is removed although the guest's ring still has buffers there; then the machine monitor is killed.
    MemoryTaken,
    /// The rings are stopped first.
    Clean,
}

const ENDS: [End; 4] = [End::Unplugged, End::Killed, End::MemoryTaken, End::Clean];

/// Where a receive buffer lies.
#[derive(Clone, Copy, PartialEq)]
enum Place {
    Main,
    Dimm,
}

fn paint(memory: &Memory, range: std::ops::Range<usize>) {
    range.step_by(8).for_each(|offset| memory.write(offset, PAINT));
}

fn assert_painted(memory: &Memory, range: std::ops::Range<usize>, what: &str) {
    let stale = range.clone().step_by(8).find(|offset| memory.read::<u64>(*offset) != PAINT);
    assert_eq!(
        stale, None,
        "{what}: a write into memory that is not the device's, at this offset of {range:x?}"
    );
}

/// The canary pages of memory whose areas of buffers begin at `first`.
fn canaries(first: usize, len: usize) -> impl Iterator<Item = std::ops::Range<usize>> {
    (first..len).step_by(AREA).map(|at| at..at + PAGE)
}

/// The frame with this number.
fn frame(to: u8, from: u8, number: u64) -> Vec<u8> {
    let mut bytes = [&mac(to).0[..], &mac(from).0, &[0x88, 0xb5], &number.to_be_bytes()].concat();
    bytes.extend((bytes.len()..FRAME).map(|at| (at as u64 ^ number) as u8));
    bytes
}

fn assert_intact(bytes: &[u8], to: u8, from: u8) {
    let number = u64::from_be_bytes(bytes[14..22].try_into().unwrap());
    assert!(bytes == frame(to, from, number), "frame {number} has been changed on its way");
}

/// A virtual machine with one device: the front end, its memory and its driver.
struct Machine {
    frontend: Frontend,
    main: Memory,
    dimm: Memory,
    rings: [Ring; 2],
    /// Where the buffer of each receive chain lies.
    places: [Place; SIZE as usize],
    /// Free chains of the transmit ring.
    free: Vec<u16>,
    sent: u64,
}

impl Machine {
    fn start(socket: &Path) -> Machine {
        let mut frontend = Frontend::from_stream(UnixStream::connect(socket).unwrap(), 2);
        frontend.set_owner().unwrap();
        assert_eq!(frontend.get_features().unwrap() & FEATURES, FEATURES);
        let protocol = frontend.get_protocol_features().unwrap();
        frontend.set_protocol_features(protocol).unwrap();
        frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        frontend.set_features(FEATURES).unwrap();
        let (main, dimm) = (Memory::new(NAME, MAIN_LEN), Memory::new(NAME, DIMM_LEN));
        frontend.set_mem_table(&[main.region(0)]).unwrap();
        let rings = [RECEIVE, TRANSMIT].map(|index| Ring::new(index * RING_SPACE));
        let (places, free) = ([Place::Main; SIZE as usize], vec![]);
        let mut machine = Machine { frontend, main, dimm, rings, places, free, sent: 0 };
        machine.start_rings();
        machine
    }

    /// The driver starts: new rings, and all receive buffers in the main memory.
    fn start_rings(&mut self) {
        (0..2 * RING_SPACE).step_by(8).for_each(|offset| self.main.write(offset, 0u64));
        canaries(2 * RING_SPACE, MAIN_LEN).for_each(|page| paint(&self.main, page));
        self.rings = [RECEIVE, TRANSMIT].map(|index| Ring::new(index * RING_SPACE));
        self.free = (0..SIZE).collect();
        for (index, ring) in self.rings.iter().enumerate() {
            ring.start(&mut self.frontend, index, &self.main);
        }
        (0..SIZE).for_each(|chain| self.post(chain, Place::Main));
    }

    /// The driver stops: the device has let go of all memory when this returns.
    fn stop_rings(&mut self) {
        for index in [RECEIVE, TRANSMIT] {
            self.frontend.set_vring_enable(index, false).unwrap();
            self.frontend.get_vring_base(index).unwrap();
        }
    }

    /// Posts the receive chain with its buffer in `place`.
    fn post(&mut self, chain: u16, place: Place) {
        self.places[usize::from(chain)] = place;
        let offset = (PAGE + usize::from(chain) * BUFFER) as u64;
        let addr = match place {
            Place::Main => 2 * RING_SPACE as u64 + offset,
            Place::Dimm => DIMM_AT + offset,
        };
        let descriptor = Descriptor { addr, len: BUFFER as u32, flags: DESC_WRITE, next: 0 };
        self.rings[RECEIVE].describe(&self.main, chain, descriptor);
        self.rings[RECEIVE].offer(&self.main, chain);
    }

    /// Takes one frame, checks it, and posts its buffer in `next`. Returns where the frame was.
    fn take(&mut self, next: Place) -> Place {
        let end = Instant::now() + WAIT;
        let chain = loop {
            let ring = &mut self.rings[RECEIVE];
            if let Some(chain) = ring.collect(&self.main) {
                break chain;
            }
            let left = end.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "no frame comes");
            if ring.arm(&self.main) {
                ring.sleep(left);
            }
        };
        let place = self.places[usize::from(chain)];
        let offset = PAGE + usize::from(chain) * BUFFER;
        let bytes: [u8; HEADER + FRAME] = match place {
            Place::Main => self.main.read(2 * RING_SPACE + offset),
            Place::Dimm => self.dimm.read(offset),
        };
        assert_intact(&bytes[HEADER..], GUEST, STATION);
        self.post(chain, next);
        place
    }

    /// Takes frames until the buffers of all chains lie in `place`.
    fn move_buffers(&mut self, place: Place) {
        while self.places.iter().any(|at| *at != place) {
            self.take(place);
        }
    }

    /// Sends frames, which the station must get.
    fn send(&mut self, station: &Fake, count: usize) {
        station.take();
        for _ in 0..count {
            while let Some(chain) = self.rings[TRANSMIT].collect(&self.main) {
                self.free.push(chain);
            }
            let chain = self.free.pop().expect("the device gives chains back before as many frames are sent");
            let offset = 2 * RING_SPACE + AREA + PAGE + usize::from(chain) * BUFFER;
            let bytes = [&[0; HEADER][..], &frame(STATION, GUEST, self.sent)].concat();
            self.sent += 1;
            bytes.iter().zip(offset..).for_each(|(byte, at)| self.main.write(at, *byte));
            let addr = offset as u64;
            let descriptor = Descriptor { addr, len: bytes.len() as u32, flags: 0, next: 0 };
            self.rings[TRANSMIT].describe(&self.main, chain, descriptor);
            self.rings[TRANSMIT].offer(&self.main, chain);
        }
        let frames = station.wait_for(count, WAIT);
        assert_eq!(frames.len(), count);
        frames.iter().for_each(|(bytes, _)| assert_intact(bytes, STATION, GUEST));
    }

    /// Memory is plugged, used for buffers, and unplugged once the guest has its buffers back.
    fn change_memory(&mut self, station: &Station) {
        paint(&self.dimm, 0..DIMM_LEN);
        self.frontend.add_mem_region(&self.dimm.region(DIMM_AT)).unwrap();
        // The test's own mappings, and vnet's: otherwise their end would prove nothing.
        assert_eq!(guest_mappings(), 4);
        self.move_buffers(Place::Dimm);
        self.move_buffers(Place::Main);
        canaries(0, DIMM_LEN).for_each(|page| assert_painted(&self.dimm, page, "a canary page"));
        self.frontend.remove_mem_region(&self.dimm.region(DIMM_AT)).unwrap();
        paint(&self.dimm, 0..DIMM_LEN);
        (0..4 * SIZE).for_each(|_| _ = self.take(Place::Main));
        self.assert_idle(station, "after REM_MEM_REG", false);
    }

    /// The driver is loaded again, or the guest reboots.
    fn reload(&mut self, station: &Station) {
        self.assert_canaries();
        self.stop_rings();
        paint(&self.main, 0..MAIN_LEN);
        self.assert_idle(station, "with stopped rings", true);
        self.start_rings();
    }

    fn assert_canaries(&self) {
        for page in canaries(2 * RING_SPACE, MAIN_LEN) {
            assert_painted(&self.main, page, "a canary page");
        }
    }

    /// Asserts that painted memory stays as it is while the station sends: the hot-plugged one, and with `all` the main one.
    fn assert_idle(&self, station: &Station, when: &str, all: bool) {
        station.sends_more();
        assert_painted(&self.dimm, 0..DIMM_LEN, when);
        if all {
            assert_painted(&self.main, 0..MAIN_LEN, when);
        }
    }
}

/// The other end of the traffic: sends frames to the guest without pause.
struct Station {
    fake: Arc<Fake>,
    stats: Arc<PortStats>,
    ends: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Station {
    fn start(fake: Arc<Fake>, stats: Arc<PortStats>) -> Station {
        let ends = Arc::new(AtomicBool::new(false));
        let thread = std::thread::spawn({
            let (fake, ends) = (fake.clone(), ends.clone());
            move || {
                for burst in (0u64..).step_by(8) {
                    if ends.load(Relaxed) {
                        return;
                    }
                    fake.send((burst..burst + 8).map(|n| (frame(GUEST, STATION, n), Offload::default())));
                    std::thread::sleep(Duration::from_micros(200));
                }
            }
        });
        Station { fake, stats, ends, thread: Some(thread) }
    }

    /// Waits until vnet has forwarded or dropped four rings of further frames.
    fn sends_more(&self) {
        let until = self.stats.in_frames.get() + 4 * u64::from(SIZE);
        wait_for("the station's frames", || self.stats.in_frames.get() >= until, String::new);
    }
}

impl Drop for Station {
    fn drop(&mut self) {
        self.ends.store(true, Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Mappings of the guest's memory in this process: the test's own and vnet's.
fn guest_mappings() -> usize {
    std::fs::read_to_string("/proc/self/maps").unwrap().matches(NAME).count()
}

fn count(folder: &str) -> usize {
    std::fs::read_dir(folder).unwrap().count()
}

/// Descriptors, mappings and threads of this process.
fn holdings() -> [usize; 3] {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap().lines().count();
    [count("/proc/self/fd"), maps, count("/proc/self/task")]
}

fn plug(host: &mut common::Host, socket: &Path, peer: &UdpSocket) -> Arc<VhostUser> {
    let second = NetworkSpec { id: NetworkId::new(2).unwrap(), ..common::LEARNING };
    host.networks.push(second);
    let options = VhostUserOptions {
        name: "guest".into(),
        socket: socket.into(),
        server: true,
        mac: None,
        mtu: 1500,
        queues: 1,
        access: SocketAccess::default(),
        peer: AllowedPeer::default(),
        memory_max: None,
    };
    let (stats, port) = (Arc::new(PortStats::default()), vnet::frame::PortId(1));
    let interface = VhostUser::start(options, port, NetworkId::DEFAULT, stats.clone()).unwrap();
    host.add_interface(NetworkId::DEFAULT, interface.clone(), stats).member.mac = Some(mac(GUEST));
    host.add_link(link_to(peer.local_addr().unwrap(), Encapsulation::Native, Some(1500)));
    host.publish();
    interface
}

/// Removes the device, the link and the network. Returns their counters.
fn unplug(host: &mut common::Host, interface: &VhostUser) -> [Arc<PortStats>; 2] {
    let port = host.interfaces.pop().unwrap();
    let link = host.links.pop().unwrap();
    host.networks.pop();
    host.publish();
    interface.stop();
    [port.stats, link.link.stats().clone()]
}

/// Plugs a device, uses it, and ends it. Returns the counters of what is gone.
fn cycle(host: &mut common::Host, station: &Station, end: End, peer: &UdpSocket) -> [Arc<PortStats>; 2] {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("guest");
    let interface = plug(host, &socket, peer);
    let mut machine = Machine::start(&socket);
    (0..2 * SIZE).for_each(|_| _ = machine.take(Place::Main));
    machine.send(&station.fake, usize::from(SIZE));
    machine.change_memory(station);
    machine.reload(station);
    (0..2 * SIZE).for_each(|_| _ = machine.take(Place::Main));
    machine.send(&station.fake, usize::from(SIZE));

    let mut gone = None;
    let Machine { frontend, main, dimm, rings, .. } = match end {
        End::Unplugged => {
            gone = Some(unplug(host, &interface));
            machine
        }
        End::Killed => machine,
        End::MemoryTaken => {
            machine.frontend.add_mem_region(&machine.dimm.region(DIMM_AT)).unwrap();
            machine.move_buffers(Place::Dimm);
            machine.frontend.remove_mem_region(&machine.dimm.region(DIMM_AT)).unwrap();
            paint(&machine.dimm, 0..DIMM_LEN);
            machine.assert_idle(station, "after REM_MEM_REG of posted buffers", false);
            machine
        }
        End::Clean => {
            machine.stop_rings();
            machine
        }
    };
    // The connection ends; the memory lives on in other hands.
    drop(frontend);
    wait_for("vnet to let go of the memory", || guest_mappings() == 2, || format!("{end:?}"));
    assert_ne!(interface.state(), State::Up);
    for page in canaries(2 * RING_SPACE, MAIN_LEN) {
        assert_painted(&main, page, "a canary page");
    }
    for (memory, len) in [(&main, MAIN_LEN), (&dimm, DIMM_LEN)] {
        paint(memory, 0..len);
        station.sends_more();
        assert_painted(memory, 0..len, &format!("{end:?}"));
    }
    drop((main, dimm, rings));
    gone.unwrap_or_else(|| unplug(host, &interface))
}

#[test]
fn nothing_is_written_or_left_behind() {
    let cycles = std::env::var("VNET_TEST_CYCLES").map_or(CYCLES, |cycles| cycles.parse().expect("a number"));
    let mut host = common::Host::start(common::yielding(Strategy::Block));
    let fake = host.add_fake(NetworkId::DEFAULT);
    host.interfaces[0].member.mac = Some(mac(STATION));
    host.publish();
    let station = Station::start(fake, host.interfaces[0].stats.clone());
    let peer = UdpSocket::bind("127.0.0.1:0").unwrap();
    let (mut gone, mut before): (Vec<Arc<PortStats>>, _) = (vec![], [0; 3]);
    for n in 0..WARM + cycles {
        gone.extend(cycle(&mut host, &station, ENDS[n % ENDS.len()], &peer));
        assert_eq!(guest_mappings(), 0);
        if n < WARM {
            before = holdings();
            continue;
        }
        // Descriptors are closed, and threads end, a moment later.
        let allowed = [before[0], before[1] + MAPPINGS_SLACK, before[2]];
        let left = || holdings().iter().zip(&allowed).all(|(now, allowed)| now <= allowed);
        let now = || {
            format!("descriptors, mappings and threads {:?} after {n} cycles, not {allowed:?}", holdings())
        };
        wait_for("what the device had to go", left, now);
    }
    drop(station);
    let imbalance = || {
        let of = |stats: &Arc<PortStats>| {
            let entered = stats.in_frames.get() + stats.copies.get();
            entered as i64 - (stats.out_frames.get() + stats.drops_total()) as i64
        };
        host.imbalance() + gone.iter().map(of).sum::<i64>()
    };
    wait_for("in + copies = out + drops", || imbalance() == 0, || imbalance().to_string());
}
