//! Early interrupts at arrival: the notification comes before the data is received, for a port of the guest's own and for one that
//! several guests share.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use parking_lot::Mutex;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use vnet::dispatch::mode::{Drive, ModeSettings};
use vnet::dispatch::setup::{Feeder, Parts, SourceParts};
use vnet::frame::{Batch, DropSink, NetworkId, PortId, Segment, Selection};
use vnet::interface::interrupts::InterruptSettings;
use vnet::interface::{Coalesce, Interface, State};
use vnet::poll::Waker;
use vnet::source::{Source, Taken};
use vnet::stats::PortStats;
use vnet::wire::ethernet::Mac;
use vnet::wire::offload::Offload;

use super::common::{self, WAIT, mac, wait_for, yielding};
use super::{Host, NOTIFIED, Strategy, optimistic};
use super::{Mode, ring};

const ROUNDS: u64 = 50;
const ATTEMPTS: usize = 20;
const PREDICTIONS: u64 = 200;
/// When a recorder is checked after the end of coalescing.
const CHECK: Duration = Duration::from_millis(1);

/// A port like a socket: a descriptor is readable while frames wait. Observes the guest when it is received from.
struct Port {
    /// Counts waiting frames.
    waiting: OwnedFd,
    /// Destination of each frame.
    to: Mutex<Mac>,
    number: AtomicU64,
    /// Number of fills.
    looks: AtomicU64,
    observe: Box<dyn Fn() + Send + Sync>,
    stats: Arc<PortStats>,
}

impl Port {
    fn new(observe: impl Fn() + Send + Sync + 'static) -> Arc<Port> {
        let flags = EventfdFlags::SEMAPHORE | EventfdFlags::NONBLOCK;
        Arc::new(Port {
            waiting: eventfd(0, flags).unwrap(),
            to: Mutex::new(mac(1)),
            number: AtomicU64::new(0),
            looks: AtomicU64::new(0),
            observe: Box::new(observe),
            stats: Arc::default(),
        })
    }

    /// Whether further frames wait.
    fn has_more(&self) -> bool {
        let mut event = [PollFd::new(&self.waiting, PollFlags::IN)];
        poll(&mut event, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() > 0
    }

    /// A frame to `to` arrives.
    fn arrive(&self, to: Mac, number: u64) {
        self.arrive_at_once(to, number, 1);
    }

    /// A burst of equal frames to `to` arrives.
    fn arrive_at_once(&self, to: Mac, number: u64, frames: u64) {
        *self.to.lock() = to;
        self.number.store(number, SeqCst);
        rustix::io::write(&self.waiting, &frames.to_ne_bytes()).unwrap();
    }
}

/// The port as the shared port of all guests.
struct Shared(Arc<Port>, PortId);

impl Interface for Shared {
    fn queues(&self) -> usize {
        1
    }

    fn source(self: Arc<Self>, _queue: usize) -> Box<dyn Source> {
        Box::new(PortSource { port: self.0.clone(), id: self.1, memory: vec![], waker: None, drained: false })
    }

    fn deliver(&self, _queue: usize, _frames: Selection<'_>, _drops: &mut DropSink) {}

    fn state(&self) -> State {
        State::Up
    }

    fn stop(&self) {}
}

/// The port as a guest's own one.
struct Own(Arc<Port>, PortId);

impl Feeder for Own {
    fn source(self: Arc<Self>, _guest: PortId, _parts: SourceParts) -> Box<dyn Source> {
        Box::new(PortSource { port: self.0.clone(), id: self.1, memory: vec![], waker: None, drained: false })
    }
}

struct PortSource {
    port: Arc<Port>,
    id: PortId,
    memory: Vec<u8>,
    waker: Option<Waker>,
    drained: bool,
}

impl Source for PortSource {
    // SAFETY: the frame lies in `memory`, which only the next fill changes.
    unsafe fn fill(&mut self, batch: &mut Batch, _drops: &mut DropSink, _now_ms: u64) -> Taken {
        self.drained = true;
        self.port.looks.fetch_add(1, SeqCst);
        let drained = Taken { drained: true, ..Taken::default() };
        if rustix::io::read(&self.port.waiting, &mut [0; 8]).is_err() {
            return drained;
        }
        self.drained = !self.port.has_more();
        (self.port.observe)();
        let number = self.port.number.load(SeqCst).to_be_bytes();
        self.memory = [&self.port.to.lock().0[..], &mac(9).0, &[0x88, 0xb5], &number, &[0; 38]].concat();
        let mut builder = batch.begin();
        // SAFETY: nothing writes to the memory before the next fill, which follows `give_back`.
        unsafe { builder.push_stable(Segment::new(self.memory.as_ptr(), self.memory.len())) };
        builder.finish(self.id, NetworkId::DEFAULT, Offload::default(), 0).unwrap();
        self.port.stats.in_frames.add(1);
        Taken { units: 1, drained: self.drained, ..drained }
    }

    fn watch(&mut self, waker: Waker) {
        waker.watch(&self.port.waiting).unwrap();
        self.waker = Some(waker);
    }

    fn unwatch(&mut self) {
        if let Some(waker) = self.waker.take() {
            waker.forget(&self.port.waiting);
        }
    }

    fn rest(&mut self) -> bool {
        self.drained
    }
}

/// How a port belongs to its guests.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Own,
    Shared,
}

/// Adds the port, whose data is for the guest at port 0, and publishes.
fn add(host: &mut common::Host, port: &Arc<Port>, kind: Kind) {
    host.interfaces[0].member.mac = Some(mac(1));
    let id = PortId(host.interfaces.len() as u16);
    // Frames enter at this port, whichever source they come from.
    let unused = Port::new(|| ());
    let entry = if kind == Kind::Shared { port } else { &unused };
    let shared = Arc::new(Shared(entry.clone(), id));
    // A polled port would show no arrivals.
    let guest_driven = ModeSettings { mode: Mode::GuestDriven, ..ModeSettings::default() };
    host.add_interface(NetworkId::DEFAULT, shared, port.stats.clone()).drive = Drive::new(guest_driven, 1);
    let own: Arc<dyn Feeder> = Arc::new(Own(port.clone(), id));
    host.core.publish(Parts {
        networks: host.networks.clone(),
        interfaces: host.interfaces.clone(),
        feeders: if kind == Kind::Own { vec![(PortId(0), own)] } else { vec![] },
        ..Parts::default()
    });
    // The dispatcher looks at a new port once without an event.
    wait_for("the first look", || port.looks.load(SeqCst) > 0, String::new);
}

/// A guest's call descriptor is readable before its data is received, each time the guest sleeps.
///
/// On a busy machine a call may take so long that it is left to the interface's own thread for a while, which may come later than the receive:
/// one of several attempts has to be without.
fn the_call_precedes_the_receive(strategy: Strategy, kind: Kind) {
    // Nothing is known about a shared port before its first frame.
    let announced = if kind == Kind::Own { ROUNDS } else { ROUNDS - 1 };
    let all_precede = |_| calls_before(strategy, kind, announced) == announced;
    assert!((0..ATTEMPTS).any(all_precede), "in none of {ATTEMPTS} attempts all calls preceded");
}

/// Rounds in which the descriptor was readable before the receive, which all but `announced` cannot be.
fn calls_before(strategy: Strategy, kind: Kind, announced: u64) -> u64 {
    let mut host = Host::start(optimistic(strategy, Mode::GuestDriven, NOTIFIED));
    let call = host.guest.call();
    let early = Arc::new(AtomicU64::new(0));
    let port = Port::new({
        let early = early.clone();
        move || _ = early.fetch_add(u64::from(ring::is_readable(&call)), SeqCst)
    });
    add(&mut host.host, &port, kind);
    let interrupts = &host.stats.interrupts;
    for number in 0..ROUNDS {
        assert!(host.guest.sleeps());
        port.arrive(mac(1), number);
        // The second notification follows when the port is drained, because the guest has not moved.
        wait_for("the end", || interrupts.coalesced_injected.get() == number + 1, || number.to_string());
        assert_eq!(host.guest.take(WAIT), Some(number));
    }
    assert_eq!((interrupts.early_at_arrival.get(), interrupts.early.get()), (announced, ROUNDS));
    assert_eq!(interrupts.early_mispredicted.get(), 0);
    early.load(SeqCst)
}

#[test]
fn the_guest_is_notified_before_its_own_port_is_received() {
    for strategy in [Strategy::Block, Strategy::Adaptive] {
        the_call_precedes_the_receive(strategy, Kind::Own);
    }
}

#[test]
fn the_guest_of_the_last_burst_is_notified_before_a_shared_port_is_received() {
    for strategy in [Strategy::Block, Strategy::Adaptive] {
        the_call_precedes_the_receive(strategy, Kind::Shared);
    }
}

#[test]
fn wrong_predictions_are_counted_and_back_off() {
    let mut host = Host::start(optimistic(Strategy::Block, Mode::GuestDriven, NOTIFIED));
    let other = host.host.add_fake(NetworkId::DEFAULT);
    host.host.interfaces[1].member.mac = Some(mac(2));
    let port = Port::new(|| ());
    add(&mut host.host, &port, Kind::Shared);
    let interrupts = &host.stats.interrupts;
    for number in 0..PREDICTIONS {
        // The guest is interrupted for frames that are not its own, and finds its ring empty.
        assert!(host.guest.sleeps());
        port.arrive(mac(2), number);
        assert_eq!(other.wait_for(1, WAIT).len(), 1);
        port.arrive(mac(1), number);
        assert_eq!(host.guest.take(WAIT), Some(number), "nothing is lost");
    }
    let wrong = interrupts.early_mispredicted.get();
    assert!((1..=9).contains(&wrong), "{wrong} of {PREDICTIONS}");
    host.host.assert_balanced();
}

/// A guest that records what it is told, and when; and whether its ring shows that it has reacted.
struct Recorder(Arc<Mutex<Vec<&'static str>>>, Arc<PortStats>, bool);

impl Interface for Recorder {
    fn queues(&self) -> usize {
        1
    }

    fn source(self: Arc<Self>, _queue: usize) -> Box<dyn Source> {
        Box::new(PortSource {
            port: Port::new(|| ()),
            id: PortId(0),
            memory: vec![],
            waker: None,
            drained: false,
        })
    }

    fn deliver(&self, _queue: usize, frames: Selection<'_>, _drops: &mut DropSink) {
        self.0.lock().push("deliver");
        self.1.delivered(frames.which.len() as u64, 0);
    }

    fn coalesce(&self) -> Option<&dyn Coalesce> {
        Some(self)
    }

    fn state(&self) -> State {
        State::Up
    }

    fn stop(&self) {}
}

impl Coalesce for Recorder {
    fn set_interrupts(&self, _settings: InterruptSettings) {}

    fn coalesces(&self) -> bool {
        true
    }

    fn announce(&self, queue: usize, bytes: u64) -> bool {
        assert!(queue == 0 && (bytes == 0 || bytes == 60));
        self.0.lock().push("announce");
        true
    }

    fn end_of_coalescing(&self, _queue: usize) -> Option<Duration> {
        self.0.lock().push("end");
        Some(CHECK)
    }

    fn has_reacted(&self, _queue: usize) -> bool {
        self.2
    }

    fn check(&self, _queue: usize) {
        self.0.lock().push("check");
    }
}

/// Rounds in which so many frames arrive for a guest that `reacts`, and the last call of each. The calls of each round are asserted.
fn rounds(frames: u64, reacts: bool, last: &'static str, expected: &[&[&str]]) {
    let (calls, stats) = (Arc::new(Mutex::new(vec![])), Arc::new(PortStats::default()));
    let port = Port::new({
        let calls = calls.clone();
        move || calls.lock().push("receive")
    });
    let mut host = common::Host::start(yielding(Strategy::Block));
    let guest = Arc::new(Recorder(calls.clone(), stats.clone(), reacts));
    host.add_interface(NetworkId::DEFAULT, guest, stats);
    add(&mut host, &port, Kind::Shared);
    for expected in expected {
        port.arrive_at_once(mac(1), 0, frames);
        wait_for("the last call", || calls.lock().last() == Some(&last), || format!("{:?}", calls.lock()));
        // Ten times as long as the check takes to come.
        std::thread::sleep(10 * CHECK);
        assert_eq!(*std::mem::take(&mut *calls.lock()), **expected);
    }
}

#[test]
fn calls_come_in_the_order_of_the_paper() {
    let first: &[&str] = &["receive", "deliver", "end", "check"];
    let next: &[&str] = &["announce", "receive", "deliver", "end", "check"];
    rounds(1, false, "check", &[first, next, next, next]);
}

/// Its ring shows by the event index that it has reacted to the early interrupt.
#[test]
fn a_guest_that_has_reacted_is_not_checked() {
    let first: &[&str] = &["receive", "deliver", "end"];
    let next: &[&str] = &["announce", "receive", "deliver", "end"];
    rounds(1, true, "end", &[first, next, next, next]);
}

/// The end of coalescing comes when nothing waits at the port any more, not after each receive.
#[test]
fn a_burst_ends_when_its_port_is_drained() {
    let first: &[&str] = &["receive", "deliver", "receive", "deliver", "receive", "deliver", "end", "check"];
    let next = [&["announce"][..], first].concat();
    rounds(3, false, "check", &[first, &next, &next]);
}
