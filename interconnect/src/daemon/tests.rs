//! The daemon's engine with processes of several containers, in one test process.

use std::net::UdpSocket;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::entry::{Answer, Event, Extent, Submission, Task, WORDS};
use super::fuzz::Raw;
use super::room::Room;
use super::*;
use crate::meeting::{Decline, Guest, Heard, Host, Place, Reach, Request, Stopper, listen};
use crate::node::sealed_tests::Behind;
use crate::proto::{
    Access, Atomic, Change, Completion, Datatype, Kind, Match, Outgoing, Peer, PostError, Receive, Shape,
    Span, Status,
};
use crate::ring::Word;
use crate::{Attachment, Endpoint, Error, Node, Options, Region};

const BOTH: Access = Access { read: true, write: true };
const LEN: usize = 3 << 20;
/// Memory of a container, in bytes.
const MEMORY: usize = 1 << 30;
const PATIENCE: Duration = Duration::from_secs(60);

/// A daemon with one container, in threads.
pub(super) struct Daemon {
    pub(super) name: String,
    service: Service,
    stopper: Stopper,
    thread: Option<JoinHandle<()>>,
}

/// A meeting point with one container, whose processes `service` serves, and the name of its socket.
fn meeting_point(service: &Service) -> (Host, String) {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let name = format!("vnet-test-daemon-{}-{number}", std::process::id());
    (meeting_point_at(&name, service), name)
}

fn meeting_point_at(name: &str, service: &Service) -> Host {
    let (mut host, own) = (Host::new().unwrap(), service.clone());
    // The name is free once a thread has closed the previous daemon's socket.
    let pause = |_: &_| std::thread::sleep(Duration::from_millis(1));
    let mut listener = (0..60_000).find_map(|_| listen(name).inspect_err(pause).ok());
    host.set_places(&[Place { id: (1, 1), networks: vec![1] }], |_| listener.take());
    host.serve(Box::new(move |place, request: &Request| {
        let socket = UdpSocket::bind(request.bind)
            .map_err(|error| Decline::Address(error.raw_os_error().unwrap_or(0)))?;
        let attached = own.attach(place.id, ShareSettings::default(), socket, request.config());
        attached.map_err(|_| Decline::TooMany)
    }));
    host
}

/// Waits until the container's counters are as they should be.
fn until(service: &Service, what: &str, is_so: impl Fn(&ContainerCounters) -> bool) {
    let begin = Instant::now();
    while !service.counters().first().is_some_and(&is_so) {
        assert!(begin.elapsed() < PATIENCE, "no {what}: {:?}", service.counters());
        std::thread::sleep(Duration::from_millis(2));
    }
}

impl Daemon {
    fn start() -> Self {
        let service = Service::start(MEMORY as u64, 1 << 40).unwrap();
        let (host, name) = meeting_point(&service);
        Self::run(host, name, service)
    }

    /// A daemon that answers every question about a peer with `reach`.
    pub(super) fn of_sealed(reach: Reach) -> Self {
        let service = Service::start(MEMORY as u64, 1 << 40).unwrap();
        let (mut host, name) = meeting_point(&service);
        host.seal(Box::new(Behind(reach)));
        Self::run(host, name, service)
    }

    /// The daemon is restarted.
    pub(super) fn restart(self, reach: Reach) -> Self {
        let name = self.name.clone();
        drop(self);
        let service = Service::start(MEMORY as u64, 1 << 40).unwrap();
        let mut host = meeting_point_at(&name, &service);
        host.seal(Box::new(Behind(reach)));
        Self::run(host, name, service)
    }

    fn run(mut host: Host, name: String, service: Service) -> Self {
        let stopper = host.stopper();
        let thread = std::thread::spawn(move || {
            while !host.is_stopped() {
                host.turn(PATIENCE).unwrap();
            }
        });
        Self { name, service, stopper, thread: Some(thread) }
    }

    pub(super) fn options(&self, attachment: &str) -> Options {
        Options {
            bind: "127.0.0.1:0".parse().unwrap(),
            meeting: Some(self.name.clone()),
            attachment: Some(attachment.into()),
            ..Options::default()
        }
    }

    pub(super) fn node(&self, attachment: &str) -> (Node, Endpoint, Peer) {
        let node = Node::open(&self.options(attachment)).unwrap();
        let endpoint = node.endpoint(Some(0)).unwrap();
        let peer = Peer { address: node.address(), endpoint: 0 };
        (node, endpoint, peer)
    }

    pub(super) fn until(&self, what: &str, is_so: impl Fn(&ContainerCounters) -> bool) {
        until(&self.service, what, is_so);
    }

    pub(super) fn counters(&self) -> ContainerCounters {
        self.service.counters().first().cloned().unwrap_or_default()
    }

    pub(super) fn take_notes(&self) -> Vec<Note> {
        self.service.take_notes()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.stopper.stop();
        self.thread.take().unwrap().join().unwrap();
        self.service.stop();
    }
}

pub(super) fn wait(endpoint: &Endpoint, kind: Kind) -> Completion {
    let end = Instant::now() + PATIENCE;
    while Instant::now() < end {
        if let Some(completion) = endpoint.wait(Some(Duration::from_secs(1))) {
            assert_eq!(completion.kind, kind, "{completion:?}");
            return completion;
        }
    }
    panic!("no {kind:?} in a minute");
}

/// The application's own memory.
fn own(bytes: &mut [u8]) -> Span {
    // SAFETY: the tests keep the bytes until the operations on them are complete, and do not touch them before.
    unsafe { Span::new(bytes.as_mut_ptr(), bytes.len()) }
}

fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|place| (place * 13 + place / 255) as u8 ^ seed).collect()
}

/// All operations between two nodes, whoever runs their engines.
pub(crate) fn all_operations(a: &Endpoint, b: &Endpoint, from: Peer, to: Peer) {
    let [near, far] = [a, b].map(|end| Region::new(end, 2 * LEN, BOTH).unwrap());
    for (seed, len) in [0, 1, 8, 1500, 16_384, 16_385, 65_507, LEN].into_iter().enumerate() {
        let bytes = pattern(len, seed as u8);
        let mut arrived = vec![0; len];
        // A message between registered memory, and one between the applications' own.
        near.fill(0, &bytes).unwrap();
        b.receive(far.span(LEN, LEN).unwrap(), 7).unwrap();
        a.send(to, near.span(0, len).unwrap(), Some(9).filter(|_| false), 8).unwrap();
        let received = wait(b, Kind::Receive);
        assert_eq!((received.status, received.len, received.context), (Status::Success, len as u64, 7));
        assert_eq!((wait(a, Kind::Send).context, received.peer), (8, from));
        far.copy_to(LEN, &mut arrived).unwrap();
        assert!(arrived == bytes, "message of {len} bytes");
        let (mut sent, mut arrived) = (bytes.clone(), vec![0; len]);
        b.receive(own(&mut arrived), 7).unwrap();
        a.send(to, own(&mut sent), None, 8).unwrap();
        assert_eq!(wait(b, Kind::Receive).len, len as u64);
        assert_eq!(wait(a, Kind::Send).status, Status::Success);
        assert!(arrived == bytes, "message of {len} own bytes");
        // A write with immediate data, and a read of what it wrote.
        a.write(to, near.span(0, len).unwrap(), (far.key(), 5), Some(seed as u64), 3).unwrap();
        assert_eq!(wait(b, Kind::Arrival).data, Some(seed as u64));
        assert_eq!(wait(a, Kind::Write).context, 3);
        let mut read = vec![0; len];
        a.read(to, own(&mut read), (far.key(), 5), 4).unwrap();
        assert_eq!(wait(a, Kind::Read).status, Status::Success);
        assert!(read == bytes, "read of {len} bytes");
        a.read(to, near.span(LEN, len).unwrap(), (far.key(), 5), 4).unwrap();
        wait(a, Kind::Read);
        near.copy_to(LEN, &mut read).unwrap();
        assert!(read == bytes);
    }
    atomics(a, to, &far);
    messages(a, b, to);
    shares(a, to, &near, &far);
    // Wrong keys fail, and a region that is deregistered is reached no more.
    a.write(to, near.span(0, 8).unwrap(), (far.key() ^ 1, 0), None, 1).unwrap();
    assert_eq!(wait(a, Kind::Write).status, Status::BadKey);
    b.deregister(far.key()).unwrap();
    a.write(to, near.span(0, 8).unwrap(), (far.key(), 0), None, 1).unwrap();
    assert_eq!(wait(a, Kind::Write).status, Status::BadKey);
}

/// An endpoint is held to its rate, and a weight that does not exist is refused.
fn shares(a: &Endpoint, to: Peer, near: &Region, far: &Region) {
    const RATE: u64 = 50_000_000;
    for weight in [0, 101] {
        assert!(matches!(a.set_share(weight, 0), Err(Error::Refused(PostError::BadShare))));
    }
    a.set_share(1, RATE).unwrap();
    let begin = Instant::now();
    a.write(to, near.span(0, LEN).unwrap(), (far.key(), 0), None, 1).unwrap();
    assert_eq!(wait(a, Kind::Write).status, Status::Success);
    let (time, least) = (begin.elapsed(), Duration::from_millis(LEN as u64 * 1_000 / RATE - 3));
    assert!(time >= least);
    a.set_share(100, 0).unwrap();
    let (sent, is_slow) = (a.counters().unwrap(), time > 2 * least);
    assert!(sent.bytes >= LEN as u64 && (sent.held_back > 0 || is_slow), "{time:?}");
}

fn atomics(a: &Endpoint, to: Peer, far: &Region) {
    let (mut five, mut found) = (5u64.to_ne_bytes(), [0; 8]);
    far.fill(0, &37u64.to_ne_bytes()).unwrap();
    let atomic = Atomic {
        key: far.key(),
        at: 0,
        change: Change::Sum,
        datatype: Datatype::U64,
        count: 1,
        compare: Span::EMPTY,
        found: Some(own(&mut found)),
    };
    let out = |span| Outgoing {
        shape: Shape::Atomic(atomic),
        span,
        data: None,
        context: 6,
        is_buffered: false,
        is_quiet: false,
    };
    a.post(to, &out(own(&mut five))).unwrap();
    assert_eq!(wait(a, Kind::Atomic).status, Status::Success);
    assert_eq!(u64::from_ne_bytes(found), 37);
    far.copy_to(0, &mut five).unwrap();
    assert_eq!(u64::from_ne_bytes(five), 42);
    assert!(a.post(to, &out(Span::EMPTY)).is_err(), "no operands");
}

/// Tags, buffers for several messages, cancellation, claims, buffered and quiet operations.
fn messages(a: &Endpoint, b: &Endpoint, to: Peer) {
    let mut bytes = pattern(100, 1);
    let send = |span, tag, (is_buffered, is_quiet), context| {
        let shape = Shape::Message { tag };
        a.post(to, &Outgoing { shape, span, data: None, context, is_buffered, is_quiet }).unwrap();
    };
    let post = |matching, span, context, several| {
        b.post_receive(&Receive { matching, span, context, several }).unwrap();
    };
    let tagged = |tag| Match { tag: Some((tag, 0)), from: None };
    let (mut short, mut several, mut claimed) = (vec![0; 40], vec![0; 250], vec![0; 100]);
    post(tagged(2), own(&mut short), 20, None);
    post(tagged(1), own(&mut several), 10, Some(1));
    for (tag, context) in [(1, 1), (2, 2), (1, 3)] {
        send(own(&mut bytes), Some(tag), (false, false), context);
        let received = wait(b, Kind::Receive);
        let expected = if tag == 2 { Status::Truncated } else { Status::Success };
        assert_eq!((received.tag, received.context, received.status), (Some(tag), tag * 10, expected));
        assert_eq!((wait(a, Kind::Send).context, received.is_released), (context, tag == 2));
    }
    assert!(short[..] == bytes[..40] && several[..100] == bytes[..] && several[100..200] == bytes[..]);
    assert!(b.cancel(10) && !b.cancel(10) && !b.cancel(20));
    // A buffered one is complete at once, a quiet one says nothing.
    send(own(&mut bytes), Some(4), (true, false), 4);
    assert_eq!(a.take().map(|completion| completion.context), Some(4));
    bytes.fill(0);
    send(own(&mut bytes), Some(5), (false, true), 5);
    let begin = Instant::now();
    let seen = loop {
        match b.peek(&tagged(4), Some(77)) {
            Some(seen) => break seen,
            None => assert!(begin.elapsed() < PATIENCE),
        }
    };
    assert_eq!((seen.len, seen.tag), (100, Some(4)));
    assert!(b.receive_claimed(77, Some(own(&mut claimed)), 40) && !b.receive_claimed(77, None, 40));
    assert_eq!(wait(b, Kind::Receive).context, 40);
    assert!(claimed == pattern(100, 1), "the bytes when it was posted");
    post(tagged(5), own(&mut claimed), 50, None);
    assert_eq!(wait(b, Kind::Receive).context, 50);
    assert!(a.wait(Some(Duration::from_millis(20))).is_none());
}

#[test]
fn the_daemons_engine_meets_that_of_a_process() {
    let daemon = Daemon::start();
    let ((near, a, a_peer), (_far, b, b_peer)) = (daemon.node("daemon"), daemon.node("process"));
    assert_eq!((a.attachment(b_peer), a.number()), (Attachment::Daemon, 0));
    all_operations(&a, &b, a_peer, b_peer);
    all_operations(&b, &a, b_peer, a_peer);
    daemon.until("counters", |own| own.processes == 1 && own.endpoints.len() == 1 && own.packets_in > 0);
    daemon.until("no refusal", |own| own.refused == 0);
    drop((a, near));
    daemon.until("revocation", |counters| counters.processes == 0 && counters.mapped_bytes == 0);
}

#[test]
fn two_processes_of_one_daemon_meet() {
    let daemon = Daemon::start();
    let ((_near, a, a_peer), (_far, b, b_peer)) = (daemon.node("daemon"), daemon.node("daemon"));
    assert_eq!(a.attachment(b_peer), Attachment::Daemon, "nothing has been sent");
    all_operations(&a, &b, a_peer, b_peer);
    let begin = Instant::now();
    while [(&a, b_peer), (&b, a_peer)].map(|(end, peer)| end.attachment(peer)) != [Attachment::SameHost; 2] {
        assert!(begin.elapsed() < PATIENCE);
        b.receive(Span::EMPTY, 1).unwrap();
        a.send(b_peer, Span::EMPTY, None, 2).unwrap();
        wait(&b, Kind::Receive);
        wait(&a, Kind::Send);
    }
    all_operations(&a, &b, a_peer, b_peer);
    all_operations(&b, &a, b_peer, a_peer);
    // Many operations of 3 MB. Only what has opened the channel took the sockets.
    let is_so = |counters: &ContainerCounters| {
        let by_sockets = counters.packets_out - counters.same_host_packets;
        counters.same_host_bytes > 10 * LEN as u64 && by_sockets < 1_000
    };
    daemon.until("packets without the network", is_so);
}

#[test]
fn what_cannot_be_is_said_in_one_line() {
    let daemon = Daemon::start();
    let failure = |options: &Options| match Node::open(options) {
        Err(error) => error.to_string(),
        Ok(_) => panic!("opened"),
    };
    let wrong = failure(&daemon.options("fast"));
    assert!(wrong.contains("must be auto, process, daemon, vm or bounce"), "{wrong}");
    let absent = failure(&Options { meeting: Some("vnet-test-nobody".into()), ..daemon.options("daemon") });
    assert!(absent.contains("is vnetd running"), "{absent}");
    let (node, endpoint, _) = daemon.node("daemon");
    let taken = failure(&Options { bind: node.address().into(), ..daemon.options("daemon") });
    assert!(taken.contains("in use"), "{taken}");
    let mut bytes = [0; 8];
    assert!(matches!(endpoint.register(own(&mut bytes), BOTH), Err(Error::Foreign)));
    // The place of the one that was declined is free again.
    daemon.until("room", |counters| counters.processes == 1);
    let more: Vec<Node> = (0..7).map(|_| Node::open(&daemon.options("daemon")).unwrap()).collect();
    let full = failure(&daemon.options("daemon"));
    assert!(full.contains("too many processes"), "{full}");
    drop(more);
    daemon.until("room", |counters| counters.processes == 1);
    Node::open(&daemon.options("daemon")).unwrap();
}

#[test]
fn operations_end_when_the_daemon_is_gone() {
    let mut daemon = Daemon::start();
    let (_node, endpoint, peer) = daemon.node("daemon");
    let mut bytes = [0; 8];
    endpoint.receive(own(&mut bytes), 5).unwrap();
    daemon.stopper.stop();
    daemon.thread.take().unwrap().join().unwrap();
    daemon.thread = Some(std::thread::spawn(|| ()));
    let ended = wait(&endpoint, Kind::Receive);
    assert_eq!((ended.status, ended.context), (Status::Unreachable, 5));
    assert!(matches!(endpoint.send(peer, Span::EMPTY, None, 0), Err(Error::Daemon(_))));
}

/// Attaches a process without the library. The attachment ends with the connection.
fn attach(daemon: &Daemon) -> (Raw, Guest) {
    let guest = Guest::connect(&daemon.name).unwrap();
    let bind = "127.0.0.1:0".parse().unwrap();
    assert!(guest.attach(Request { bind, timeout_ms: 0, not_ready_ms: 0 }));
    let begin = Instant::now();
    loop {
        if let Some(Heard::Attached { address, memory, bell }) = guest.receive().unwrap() {
            return (Raw::new(address, memory, bell), guest);
        }
        assert!(begin.elapsed() < PATIENCE);
    }
}

fn next(raw: &mut Raw) -> Event {
    let begin = Instant::now();
    loop {
        match raw.event() {
            Some(event) => return event,
            None => assert!(begin.elapsed() < PATIENCE, "no event"),
        }
    }
}

/// Whether the daemon cuts the process off.
fn is_cut_off(raw: &Raw) -> bool {
    let begin = Instant::now();
    while begin.elapsed() < PATIENCE {
        match raw.bell.hear() {
            Err(_) => return true,
            Ok(_) => std::thread::sleep(Duration::from_millis(1)),
        }
    }
    false
}

#[test]
fn addresses_outside_the_registered_memory_are_refused() {
    let daemon = Daemon::start();
    let (mut raw, _guest) = attach(&daemon);
    raw.submit(&Submission::Open { ticket: 1, number: Some(0) });
    assert!(matches!(next(&mut raw), Event::Answered(1, Answer::Done(0))));
    raw.lend(7, 8192);
    let peer = Peer { address: raw.address, endpoint: 0 };
    let extent = |memory, offset, len| Extent { memory, offset, len };
    let good = extent(7, 0, 8192);
    let bad = [
        extent(7, 1, 8192),
        extent(7, 8192, 1),
        extent(7, u64::MAX, 2),
        extent(8, 0, 1),
        extent(7, 0, u64::MAX),
    ];
    let atomic = |compare, found| Task::Atomic {
        key: 1,
        at: 0,
        change: Change::Sum,
        datatype: Datatype::U8,
        count: 1,
        compare,
        found,
    };
    let mut wrong = 0;
    for extent in bad {
        for task in [Task::Message(None), Task::Write(1, 0), Task::Read(1, 0)] {
            raw.submit(&Submission::Post { endpoint: 0, peer, task, extent, data: None, context: 9 });
            let Event::Completed(0, completion) = next(&mut raw) else { panic!("no completion") };
            assert_eq!((completion.context, completion.status), (9, Status::BadKey));
            wrong += 1;
        }
        raw.submit(&Submission::Receive {
            endpoint: 0,
            matching: Match::default(),
            extent,
            context: 8,
            several: None,
        });
        let Event::Completed(0, completion) = next(&mut raw) else { panic!("no completion") };
        assert_eq!((completion.kind, completion.status), (Kind::Receive, Status::Cancelled));
        raw.submit(&Submission::Register {
            ticket: 3,
            endpoint: 0,
            extent,
            base: 0,
            access: BOTH,
            key: None,
        });
        assert!(matches!(next(&mut raw), Event::Answered(3, Answer::Refused(_))));
        wrong += 2;
    }
    for task in [atomic(extent(8, 0, 1), None), atomic(Extent::default(), Some(extent(7, 8192, 1)))] {
        raw.submit(&Submission::Post { endpoint: 0, peer, task, extent: good, data: None, context: 9 });
        let Event::Completed(0, completion) = next(&mut raw) else { panic!("no completion") };
        assert_eq!((completion.kind, completion.status), (Kind::Atomic, Status::BadKey));
        wrong += 1;
    }
    daemon.until("count of refusals", |counters| counters.refused == wrong && counters.broken == 0);
    // More memory than a container may have is not mapped, and what refers to it is refused.
    raw.lend(9, MEMORY);
    let (task, extent) = (Task::Message(None), extent(9, 0, 1));
    raw.submit(&Submission::Post { endpoint: 0, peer, task, extent, data: None, context: 9 });
    assert!(matches!(next(&mut raw), Event::Completed(0, Completion { status: Status::BadKey, .. })));
    // What could shrink ends the attachment.
    let file = std::fs::File::open("/proc/self/exe").unwrap();
    assert!(raw.bell.try_say(&Word::Grant(10, file.into())));
    assert!(is_cut_off(&raw));
}

#[test]
fn nonsense_cuts_a_process_off_and_nobody_else() {
    let daemon = Daemon::start();
    let ((_near, a, a_peer), (_far, b, b_peer)) = (daemon.node("daemon"), daemon.node("process"));
    let (mut unknown_kind, _guest) = attach(&daemon);
    unknown_kind.write(&[0xff; WORDS]);
    assert!(is_cut_off(&unknown_kind));
    let (strange_word, _guest) = attach(&daemon);
    strange_word.bell.say(&Word::Ask(1, 1));
    assert!(is_cut_off(&strange_word));
    daemon.until("count of hostile processes", |counters| counters.broken == 2 && counters.processes == 1);
    all_operations(&a, &b, a_peer, b_peer);
}

#[test]
fn a_container_that_is_not_allowed_any_more_loses_everything() {
    let service = Service::start(MEMORY as u64, 1 << 40).unwrap();
    let (mut host, name) = meeting_point(&service);
    let guest = Guest::connect(&name).unwrap();
    let bind = "127.0.0.1:0".parse().unwrap();
    assert!(guest.attach(Request { bind, timeout_ms: 0, not_ready_ms: 0 }));
    let raw = loop {
        host.turn(Duration::ZERO).unwrap();
        if let Some(Heard::Attached { address, memory, bell }) = guest.receive().unwrap() {
            break Raw::new(address, memory, bell);
        }
    };
    raw.lend(7, 8192);
    until(&service, "memory", |counters| counters.mapped_bytes == 8192 && counters.mappings == 1);
    host.serve_only(|id| id == (1, 1));
    host.serve_only(|id| id != (1, 1));
    assert!(is_cut_off(&raw));
    until(&service, "revocation", |counters| (counters.processes, counters.mapped_bytes) == (0, 0));
    // Whoever attaches twice by one connection is disconnected.
    assert!(guest.attach(Request { bind, timeout_ms: 0, not_ready_ms: 0 }));
    host.turn(Duration::ZERO).unwrap();
    assert!(matches!(guest.receive(), Ok(Some(Heard::Attached { .. }))), "the first one has ended");
    assert!(guest.attach(Request { bind, timeout_ms: 0, not_ready_ms: 0 }));
    host.turn(Duration::ZERO).unwrap();
    assert!(guest.receive().is_err());
    service.stop();
}

/// The fuzz target, with entries that are nearly right.
#[test]
fn random_entries_break_nothing() {
    let mut state = 7u64;
    let mut random = move || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        state >> 31
    };
    for _ in 0..20 {
        let mut data = vec![];
        for _ in 0..400 {
            let mut entry: [u64; WORDS] = std::array::from_fn(|_| random());
            entry[0] = (entry[0] & 0x0003_0000_0003_ff00) | (random() % 12 + 1);
            (entry[2], entry[3], entry[4]) = (7, random() % 9000, random() % 9000);
            entry[12] &= 0x00ff_00ff_0003_0903;
            data.extend(entry.iter().flat_map(|word| word.to_le_bytes()));
        }
        fuzz::run(&data);
    }
    fuzz::run(&[0xff; 1024]);
}

#[test]
fn a_limited_container_gets_its_rate_and_the_heavier_one_is_served_first() {
    const BYTES: u64 = 1 << 20;
    const WRITES: u64 = 24;
    const RATE: u64 = 20_000_000;
    let mut room = Room::new();
    let bulk = ShareSettings { weight: 10, rate: RATE };
    let urgent = ShareSettings { weight: 100, rate: 0 };
    let mut senders = [Raw::add(&mut room, 1, bulk), Raw::add(&mut room, 2, urgent)];
    let mut sinks = [3, 4].map(|container| Raw::add(&mut room, container, ShareSettings::default()));
    let access = Access { read: false, write: true };
    let extent = Extent { memory: 1, offset: 0, len: BYTES };
    for process in senders.iter_mut().chain(&mut sinks) {
        process.submit(&Submission::Open { ticket: 1, number: Some(0) });
        process.lend(1, BYTES as usize);
        let register = Submission::Register { ticket: 2, endpoint: 0, extent, base: 0, access, key: Some(5) };
        process.submit(&register);
    }
    for (sender, sink) in senders.iter_mut().zip(&sinks) {
        let peer = Peer { address: sink.address, endpoint: 0 };
        for context in 0..WRITES {
            let task = Task::Write(5, 0);
            sender.submit(&Submission::Post { endpoint: 0, peer, task, extent, data: None, context });
        }
    }
    // A clock of its own: 20 us a turn.
    let (mut now, mut done) = (0, [0; 2]);
    let sent = |room: &Room, container: u64| {
        room.report().iter().find(|counters| counters.id == (1, container)).unwrap().bytes_out
    };
    while done[1] < WRITES {
        now += 20_000;
        assert!(now < 20_000_000_000, "{done:?}");
        room.turn(now);
        for (sender, done) in senders.iter_mut().zip(&mut done) {
            while let Some(event) = sender.event() {
                if let Event::Completed(0, completion) = event {
                    assert_eq!(completion.status, Status::Success);
                    *done += 1;
                }
            }
        }
    }
    let (bulk, urgent) = (sent(&room, 1), sent(&room, 2));
    let allowed = RATE as u128 * u128::from(now) / 1_000_000_000 + u128::from(RATE / 500 + 65_507);
    assert!(u128::from(bulk) <= allowed, "{bulk} bytes in {now} ns");
    assert!(urgent >= WRITES * BYTES && bulk < urgent / 2, "{bulk} beside {urgent}");
    assert!(done[0] < WRITES);
    // Alone, it still gets its rate.
    let (begin, before) = (now, bulk);
    while now < begin + 500_000_000 {
        now += 20_000;
        room.turn(now);
    }
    let got = sent(&room, 1) - before;
    assert!(got >= RATE / 2 * 8 / 10, "{got} bytes in half a second");
}
