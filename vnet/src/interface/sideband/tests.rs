//! A sideband around an interface whose guest is the test.

use std::net::SocketAddr;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::*;
use crate::frame::{BATCH_MAX, Batch, NetworkId, Origin, PortId, Segment};
use crate::interface::fake::Fake;
use crate::poll::Poller;
use crate::source::{BatchSlot, receive};
use crate::stats::{DropReason, PortStats};
use crate::wire::offload::{F_NEEDS_CSUM, GSO_UDP_L4, Offload};

const MTU: usize = 1500;

struct World {
    fake: Arc<Fake>,
    sideband: Arc<Sideband>,
    interface: Arc<WithSideband>,
    source: Box<dyn Source>,
    stats: Arc<PortStats>,
}

impl World {
    fn new() -> World {
        let stats: Arc<PortStats> = Arc::default();
        let origin = Origin { port: PortId(3), network: NetworkId::DEFAULT };
        let fake = Fake::new(origin, MTU, 100, stats.clone()).unwrap();
        let sideband = Sideband::new(fake.clone(), origin, MTU, stats.clone()).unwrap();
        let interface = Arc::new(WithSideband(sideband.clone()));
        let source = interface.clone().source(0);
        World { fake, sideband, interface, source, stats }
    }

    /// Frames that enter the core in one round.
    fn enter(&mut self) -> Vec<Vec<u8>> {
        let (mut slot, mut drops) = (BatchSlot::new(BATCH_MAX), DropSink::new());
        let burst = receive(&mut *self.source, &mut slot, &mut drops, 0);
        let bytes = |frame| {
            let mut bytes = vec![];
            burst.append_to(frame, usize::MAX, &mut bytes);
            bytes
        };
        burst.frames().iter().map(bytes).collect()
    }

    fn deliver(&self, frames: &[(Vec<u8>, Offload)]) {
        let mut batch = Batch::new();
        for (bytes, offload) in frames {
            let mut builder = batch.begin();
            // SAFETY: the frames outlive the batch.
            unsafe { builder.push(Segment::new(bytes.as_ptr(), bytes.len())) };
            builder.finish(PortId(9), NetworkId::DEFAULT, *offload, 0).unwrap();
        }
        let which: Vec<u16> = (0..frames.len() as u16).collect();
        self.interface.deliver(0, Selection { batch: &batch, which: &which }, &mut DropSink::new());
    }

    fn is_readable(&self) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut [PollFd::from_borrowed_fd(self.sideband.as_fd(), PollFlags::IN)], Some(&now)).unwrap() > 0
    }
}

fn control(len: usize) -> (Vec<u8>, Offload) {
    let mut bytes = [&GROUP.0[..], &[2, 0, 0, 0, 0, 9], &ETHERTYPE.to_be_bytes()].concat();
    bytes.resize(len, 7);
    (bytes, Offload::default())
}

fn plain(mark: u8) -> (Vec<u8>, Offload) {
    let mut bytes = [&[2, 0, 0, 0, 0, 1][..], &[2, 0, 0, 0, 0, 9], &[8, 0]].concat();
    bytes.resize(60, mark);
    (bytes, Offload::default())
}

fn datagram(to: SocketAddr, fragment: u16) -> (Vec<u8>, Offload) {
    let mut bytes = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 9];
    let ports = [&9u16.to_be_bytes()[..], &to.port().to_be_bytes(), &[0, 12, 0, 0], b"data"].concat();
    match to.ip() {
        std::net::IpAddr::V4(ip) => {
            let [a, b] = fragment.to_be_bytes();
            bytes.extend([8, 0, 0x45, 0, 0, 32, 0, 0, a, b, 64, 17, 0, 0, 10, 0, 0, 9]);
            bytes.extend(ip.octets());
        }
        std::net::IpAddr::V6(ip) => {
            bytes.extend([0x86, 0xdd, 0x60, 0, 0, 0, 0, 12, 17, 64]);
            bytes.extend([0xfd; 16]);
            bytes.extend(ip.octets());
        }
    }
    bytes.extend(ports);
    (bytes, Offload::default())
}

#[test]
fn control_frames_reach_the_program_and_nobody_else() {
    let mut world = World::new();
    let mut other = control(64);
    other.0[12] = 8;
    world.fake.send([
        plain(1),
        control(64),
        plain(2),
        control(CONTROL_MAX),
        other.clone(),
        control(CONTROL_MAX + 1),
    ]);
    assert!(!world.is_readable());
    assert_eq!(world.enter(), [plain(1).0, plain(2).0, other.0]);
    assert!(world.is_readable());
    assert_eq!(world.sideband.take().unwrap().bytes, control(64).0);
    assert_eq!(world.sideband.take().unwrap().bytes, control(CONTROL_MAX).0);
    assert_eq!(world.sideband.take(), None);
    assert!(!world.is_readable());
    let stats = &world.stats;
    assert_eq!((stats.in_frames.get(), stats.out_frames.get(), stats.drops(DropReason::Sideband)), (6, 2, 1));
}

#[test]
fn control_frames_are_limited_in_number_and_rate() {
    let mut world = World::new();
    for _ in 0..10 {
        world.fake.send((0..64).map(|_| control(64)));
        assert!(world.enter().is_empty());
    }
    assert_eq!(world.stats.drops(DropReason::Sideband), 640 - 256);
    let mut taken = 0;
    // Below a second: the rate limit is far above what the queue holds.
    for _ in 0..400 {
        while world.sideband.take().is_some() {
            taken += 1;
        }
        world.fake.send((0..64).map(|_| control(64)));
        world.enter();
    }
    let all = 640 + 400 * 64;
    assert_eq!(world.stats.in_frames.get(), all);
    assert!(taken < 2 * 20_000 + 256, "{taken}");
    assert_eq!(world.stats.out_frames.get() + world.stats.drops_total(), all);
}

#[test]
fn what_the_program_sends_enters_in_turn_with_the_guests_frames() {
    let mut world = World::new();
    let poller = Poller::new().unwrap();
    world.source.watch(poller.waker(5));
    assert!(world.source.rest());
    let message = |mark| Message { bytes: plain(mark).0, offload: Offload::default(), is_local: false };
    assert!(world.sideband.send(message(7)));
    let mut woken = vec![];
    poller.wait(Some(Duration::ZERO), |token| woken.push(token)).unwrap();
    assert_eq!(woken, [5]);
    assert!(!world.source.rest(), "a message waits");
    world.fake.send([plain(1)]);
    assert!(world.sideband.send(message(8)));
    assert_eq!(world.enter(), [plain(7).0, plain(8).0]);
    assert_eq!(world.enter(), [plain(1).0]);
    assert!(world.enter().is_empty() && world.source.rest());
    world.source.unwatch();
    let stats = &world.stats;
    assert_eq!((stats.in_frames.get(), stats.drops_total()), (3, 0));
}

#[test]
fn no_guest_could_send_more() {
    let mut world = World::new();
    let sends =
        |len: usize, offload| world.sideband.send(Message { bytes: vec![2; len], offload, is_local: false });
    let uso = Offload {
        flags: F_NEEDS_CSUM,
        gso_type: GSO_UDP_L4,
        gso_size: 1400,
        csum_start: 34,
        csum_offset: 6,
        ..Offload::default()
    };
    assert!(sends(MTU + 18, Offload::default()) && sends(60_000, uso));
    assert!(!sends(MTU + 19, Offload::default()));
    assert!(!sends(60_000, Offload { csum_start: 13, ..uso }));
    assert!((0..10_000).filter(|_| sends(60, Offload::default())).count() < 1024);
    assert_eq!(world.enter().len(), 64);
    world.interface.stop();
    assert!(!world.sideband.send(Message {
        bytes: plain(1).0,
        offload: Offload::default(),
        is_local: false
    }));
    assert!(world.sideband.is_stopped() && world.is_readable());
}

#[test]
fn the_program_tells_the_guest() {
    let world = World::new();
    assert_eq!(world.sideband.tell(&control(64).0), Ok(()));
    assert_eq!(world.fake.take(), [control(64)]);
    assert!(world.sideband.tell(&[1; 5]).is_err());
    assert_eq!(world.sideband.tell(&control(MTU + 100).0), Ok(()));
    assert_eq!(
        (world.stats.in_frames.get(), world.stats.out_frames.get(), world.stats.drops_total()),
        (2, 1, 1)
    );
}

#[test]
fn datagrams_to_an_open_port_do_not_reach_the_guest() {
    let world = World::new();
    for (address, other) in [("10.0.0.1:7000", "10.0.0.2:7000"), ("[fd00::1]:7000", "[fd00::1]:7001")] {
        let [address, other]: [SocketAddr; 2] = [address, other].map(|text| text.parse().unwrap());
        let port = world.sideband.open(address).unwrap().unwrap();
        assert!(world.sideband.open(address).unwrap().is_none(), "it is taken");
        let frames = [datagram(other, 0), datagram(address, 0), plain(1), datagram(address, 0)];
        world.deliver(&frames);
        assert_eq!(world.fake.take(), [datagram(other, 0), plain(1)]);
        let taken = port.take().unwrap();
        assert_eq!((taken.bytes, taken.is_local), (datagram(address, 0).0, false));
        assert!(port.take().is_some() && port.take().is_none());
        if address.is_ipv4() {
            world.deliver(&[datagram(address, 0x2000), datagram(address, 1)]);
            assert_eq!(world.fake.take().len(), 2, "fragments are the guest's");
        }
        port.close();
        world.deliver(&frames);
        assert_eq!(world.fake.take().len(), 4);
    }
    // From one port of the guest to another: no frame enters the core.
    let port = world.sideband.open("10.0.0.1:7000".parse().unwrap()).unwrap().unwrap();
    let (bytes, offload) = datagram("10.0.0.1:7000".parse().unwrap(), 0);
    assert!(world.sideband.send(Message { bytes: bytes.clone(), offload, is_local: false }));
    assert_eq!(port.take().map(|message| (message.bytes, message.is_local)), Some((bytes.clone(), true)));
    // Injected by the program: only an open port gets it, never the guest.
    assert!(world.sideband.inject(Message { bytes: bytes.clone(), offload, is_local: false }));
    assert_eq!(port.take().map(|message| (message.bytes, message.is_local)), Some((bytes.clone(), true)));
    assert!(world.sideband.has_port("10.0.0.1:7000".parse().unwrap()));
    port.close();
    assert!(!world.sideband.has_port("10.0.0.1:7000".parse().unwrap()));
    assert!(!world.sideband.inject(Message { bytes, offload, is_local: false }));
    assert_eq!(world.fake.take(), []);
    let open = |port: u16| world.sideband.open((std::net::Ipv4Addr::LOCALHOST, port).into()).unwrap();
    let ports: Vec<_> = (1..100).filter_map(open).collect();
    assert_eq!(ports.len(), PORTS_MAX);
    let drops = world.stats.drops_total();
    (0..5000).for_each(|_| world.deliver(&[datagram("127.0.0.1:1".parse().unwrap(), 0)]));
    assert_eq!(world.stats.drops_total() - drops, 5000 - 4096);
    assert_eq!(world.stats.drops(DropReason::NoBuffer), 904);
}
