//! Applications in guests without machines: library, helper, control frames, the daemon's side and the engine, in one process.

use std::net::UdpSocket;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::fake::FakeGuest;
use super::helper::Helper;
use super::host::GuestHost;
use super::wire::{
    Body, DATAGRAM_MAX, GROUP, Message, PAGE, QUEUES, QUEUES_BYTES, RUNS_MAX, Run, ShareState, Token,
};
use super::{Client, Event, fuzz};
use crate::daemon::entry::{Event as Happened, Submission};
use crate::daemon::queue::Queues;
use crate::daemon::tests::all_operations;
use crate::daemon::{Service, ShareSettings};
use crate::meeting::{Decline, Host, Place, Reach, Request, Stopper, listen};
use crate::ring::create;
use crate::{Access, Attachment, Endpoint, Error, Node, Options, Peer, Region, Span, Status};

pub(super) const PATIENCE: Duration = Duration::from_secs(60);

/// A guest with a helper, and the daemon's thread for it.
pub(super) struct Machine {
    pub(super) guest: FakeGuest,
    helper: Arc<Helper>,
    name: String,
    /// Why its applications are not served.
    refusal: Arc<Mutex<Option<Decline>>>,
    is_cut: Arc<AtomicBool>,
    is_over: Arc<AtomicBool>,
    stopper: Stopper,
    threads: Vec<JoinHandle<()>>,
}

impl Machine {
    pub(super) fn start(number: u8, service: &Service, network: &super::fake::Network) -> Self {
        Self::of(FakeGuest::new(number, network), service)
    }

    pub(super) fn of(guest: FakeGuest, service: &Service) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("vnet-test-vm-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let number = guest.mac[5];
        let helper = Arc::new(Helper::new(Box::new(guest.clone()), &[(1, guest.mac)]).unwrap());
        let (mut meeting, own) = (Host::new().unwrap(), Arc::clone(&helper));
        let mut listener = Some(listen(&name).unwrap());
        meeting.set_places(&[Place { id: (9, number.into()), networks: vec![] }], |_| listener.take());
        meeting.serve(Box::new(move |_, request| own.attach(request)));
        let (stopper, is_over) = (meeting.stopper(), Arc::new(AtomicBool::new(false)));
        let meets = move || {
            while !meeting.is_stopped() {
                meeting.turn(PATIENCE).unwrap();
            }
        };
        let (own, over) = (Arc::clone(&helper), Arc::clone(&is_over));
        let helps = move || {
            while !over.load(Ordering::Relaxed) {
                own.turn().unwrap();
            }
        };
        let (refusal, is_cut): (Arc<Mutex<Option<Decline>>>, Arc<AtomicBool>) = Default::default();
        let mut host = GuestHost::new(Arc::new(guest.clone()), service.clone(), (9, number.into())).unwrap();
        let (own, over, why, cut) =
            (guest.clone(), Arc::clone(&is_over), Arc::clone(&refusal), Arc::clone(&is_cut));
        let hosts = move || {
            while !over.load(Ordering::Relaxed) {
                let (now, frame) = (Instant::now(), own.up.lock().pop_front());
                if cut.load(Ordering::Relaxed) {
                    host.close_all();
                    std::thread::sleep(Duration::from_millis(1));
                    continue;
                }
                if let Some(frame) = &frame {
                    host.hear(now, frame, why.lock().map_or(Ok(ShareSettings::default()), Err));
                }
                host.turn(now);
                if frame.is_none() {
                    std::thread::sleep(Duration::from_micros(50));
                }
            }
        };
        let threads = vec![std::thread::spawn(meets), std::thread::spawn(helps), std::thread::spawn(hosts)];
        Self { guest, helper, name, refusal, is_cut, is_over, stopper, threads }
    }

    pub(super) fn options(&self) -> Options {
        Options {
            bind: format!("{}:0", self.guest.own_ip()).parse().unwrap(),
            meeting: Some(self.name.clone()),
            attachment: Some("vm".into()),
            ..Options::default()
        }
    }

    fn node(&self) -> (Node, Endpoint, Peer) {
        let node = Node::open(&self.options()).unwrap();
        let endpoint = node.endpoint(Some(0)).unwrap();
        let peer = Peer { address: node.address(), endpoint: 0 };
        (node, endpoint, peer)
    }

    pub(super) fn until(&self, attachments: usize) {
        let begin = Instant::now();
        while self.helper.attachments() != attachments {
            assert!(begin.elapsed() < PATIENCE, "{} attachments", self.helper.attachments());
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        self.stopper.stop();
        for thread in self.threads.drain(..) {
            thread.join().unwrap();
        }
    }
}

#[test]
fn applications_of_two_guests_do_what_those_of_containers_do() {
    let (service, network) = (Service::start(1 << 30, 1 << 40).unwrap(), Default::default());
    let (one, two) = (Machine::start(1, &service, &network), Machine::start(2, &service, &network));
    let ((near, a, a_peer), (far, b, b_peer)) = (one.node(), two.node());
    all_operations(&a, &b, a_peer, b_peer);
    all_operations(&b, &a, b_peer, a_peer);
    one.until(1);
    drop((a, near));
    one.until(0);
    // The other one's operations end, as with a process that is gone.
    let region = Region::new(&b, 64, Access { read: true, write: true }).unwrap();
    b.write(a_peer, region.span(0, 8).unwrap(), (1, 0), None, 1).unwrap();
    let ended = b.wait(Some(PATIENCE)).unwrap();
    assert!(ended.status != Status::Success, "{ended:?}");
    drop((b, far));
    two.until(0);
    // Published soon after the daemon has released the memory.
    let (begin, all) = (Instant::now(), || service.counters());
    while all().iter().any(|counters| counters.mapped_bytes > 0) {
        assert!(begin.elapsed() < PATIENCE, "{:?}", all());
        std::thread::sleep(Duration::from_millis(2));
    }
    assert!(all().iter().all(|counters| counters.broken == 0));
    drop((one, two));
    service.stop();
}

/// Packets of guests of one network bypass it, in both directions, until the configuration forbids that.
#[test]
fn applications_of_guests_of_one_network_are_linked() {
    let (service, network) = (Service::start(1 << 30, 1 << 40).unwrap(), Default::default());
    let place = |number, network| Place { id: (9, number), networks: vec![network] };
    service.set_places(&[place(11, 7), place(12, 7)]);
    let (one, two) = (Machine::start(11, &service, &network), Machine::start(12, &service, &network));
    let ((near, a, a_peer), (far, b, b_peer)) = (one.node(), two.node());
    let until = |wanted: Attachment| {
        let begin = Instant::now();
        while [a.attachment(b_peer), b.attachment(a_peer)] != [wanted; 2] {
            assert!(begin.elapsed() < PATIENCE, "{wanted}");
            a.send(b_peer, Span::EMPTY, None, 8).unwrap();
            b.receive(Span::EMPTY, 9).unwrap();
            assert_eq!(a.wait(Some(PATIENCE)).unwrap().status, Status::Success);
            assert_eq!(b.wait(Some(PATIENCE)).unwrap().status, Status::Success);
        }
    };
    until(Attachment::SameHost);
    all_operations(&a, &b, a_peer, b_peer);
    all_operations(&b, &a, b_peer, a_peer);
    service.set_places(&[place(11, 7), place(12, 8)]);
    until(Attachment::Vm);
    all_operations(&a, &b, a_peer, b_peer);
    drop((a, near, b, far));
    [&one, &two].iter().for_each(|machine| machine.until(0));
    for counters in service.counters() {
        assert!(counters.same_host_packets > 100, "{counters:?}");
        assert!(counters.packets_out > counters.same_host_packets, "{counters:?}");
        assert_eq!(counters.broken, 0);
    }
    drop((one, two));
    service.stop();
}

#[test]
fn engines_of_guests_seal_what_crosses_sealed_links() {
    let (service, network) = (Service::start(1 << 30, 1 << 40).unwrap(), Default::default());
    let (one, two) = (Machine::start(6, &service, &network), Machine::start(7, &service, &network));
    let machines = [&one, &two];
    machines.iter().for_each(|machine| *machine.guest.reach.lock() = Reach::Sealed);
    let ((near, a, a_peer), (far, b, b_peer)) = (one.node(), two.node());
    all_operations(&a, &b, a_peer, b_peer);
    all_operations(&b, &a, b_peer, a_peer);
    assert_eq!([a.attachment(b_peer), b.attachment(a_peer)], [Attachment::Sealed; 2]);
    drop((a, near, b, far));
    machines.iter().for_each(|machine| machine.until(0));
    for counters in service.counters() {
        let others = counters.packets_out - counters.seal.packets_out;
        assert!(counters.seal.packets_out > 100 && others < 20, "{counters:?}");
        assert_eq!((counters.seal.clear, counters.seal.forged), (0, 0));
    }
    for machine in machines {
        let engines = &machine.guest.engines;
        assert!(engines.0.load(Ordering::Relaxed) > 0);
        assert_eq!(engines.1.load(Ordering::Relaxed), 1, "the daemon forgets its sessions");
        assert_eq!(machine.guest.clear_packets.load(Ordering::Relaxed), 0);
    }
    drop((one, two));
    service.stop();
}

#[test]
fn without_keys_a_guest_sends_nothing_and_the_log_says_why() {
    let (service, network) = (Service::start(1 << 30, 1 << 40).unwrap(), Default::default());
    let (one, two) = (Machine::start(8, &service, &network), Machine::start(9, &service, &network));
    [&one, &two].iter().for_each(|machine| *machine.guest.reach.lock() = Reach::Stream);
    let ((near, a, _), (far, b, b_peer)) = (one.node(), two.node());
    a.send(b_peer, Span::EMPTY, None, 8).unwrap();
    assert_eq!(a.wait(Some(PATIENCE)).unwrap().status, Status::Unreachable);
    drop((a, near, b, far));
    [&one, &two].iter().for_each(|machine| machine.until(0));
    let notes = service.take_notes();
    assert!(notes.iter().any(|(id, line)| *id == (9, 8) && line.contains("TLS stream")), "{notes:?}");
    // Only OPEN may have been sent, before the peer's MAC address was known.
    assert!([&one, &two].iter().all(|machine| machine.guest.clear_packets.load(Ordering::Relaxed) == 0));
    drop((one, two));
    service.stop();
}

#[test]
fn what_the_daemon_says_reaches_the_application() {
    let (service, network) = (Service::start(1 << 30, 1 << 40).unwrap(), Default::default());
    let machine = Machine::start(3, &service, &network);
    let failure = |options: &Options| match Node::open(options) {
        Err(error) => error.to_string(),
        Ok(_) => panic!("opened"),
    };
    *machine.refusal.lock() = Some(Decline::NotAllowed);
    let refused = failure(&machine.options());
    assert!(refused.contains("daemon_engine = true"), "{refused}");
    *machine.refusal.lock() = None;
    let socket = UdpSocket::bind((machine.guest.own_ip(), 0)).unwrap();
    let taken = failure(&Options { bind: socket.local_addr().unwrap().into(), ..machine.options() });
    assert!(taken.contains("in use"), "{taken}");
    let absent = failure(&Options { meeting: Some("vnet-test-nobody".into()), ..machine.options() });
    assert!(absent.contains("is vnet-rdma-guest running"), "{absent}");
    machine.until(0);
    let eight: Vec<Node> = (0..8).map(|_| Node::open(&machine.options()).unwrap()).collect();
    let full = failure(&machine.options());
    assert!(full.contains("too many processes"), "{full}");
    drop(eight);
    machine.until(0);
    machine.guest.is_deaf.store(true, Ordering::Relaxed);
    let silent = failure(&machine.options());
    assert!(silent.contains("no vnetd answers"), "{silent}");
    machine.guest.is_deaf.store(false, Ordering::Relaxed);
    // The daemon had opened it: the helper has it closed.
    machine.until(0);
    let (node, _endpoint, _) = machine.node();
    machine.guest.is_revoked.store(true, Ordering::Relaxed);
    machine.until(0);
    assert!(matches!(node.endpoint(None), Err(Error::Daemon(_))), "its memory was revoked");
    machine.guest.is_revoked.store(false, Ordering::Relaxed);
    let (_node, _endpoint, _) = machine.node();
    machine.is_cut.store(true, Ordering::Relaxed);
    let begin = Instant::now();
    while !service.counters().iter().all(|counters| counters.processes == 0 && counters.mapped_bytes == 0) {
        assert!(begin.elapsed() < PATIENCE);
        std::thread::sleep(Duration::from_millis(2));
    }
    machine.is_cut.store(false, Ordering::Relaxed);
    // A daemon that has forgotten it says so, and the helper frees the memory.
    machine.until(0);
    drop(machine);
    service.stop();
}

/// A guest that writes its control frames itself.
struct Raw {
    guest: FakeGuest,
    host: GuestHost,
    now: Instant,
}

impl Raw {
    fn new(service: &Service) -> Self {
        let guest = FakeGuest::new(4, &Default::default());
        let host = GuestHost::new(Arc::new(guest.clone()), service.clone(), (9, 4)).unwrap();
        Self { guest, host, now: Instant::now() }
    }

    /// Sends a frame, and returns what the daemon answers.
    fn say(&mut self, attachment: u64, token: Token, body: Body) -> Option<Message> {
        use super::helper::Machine as _;
        let frame = Message { attachment, token, body }.encode(self.guest.mac, GROUP);
        self.host.hear(self.now, &frame, Ok(ShareSettings::default()));
        let mut buffer = [0; super::FRAME_MAX];
        let mut answer = None;
        while let Some(len) = self.guest.receive(&mut buffer) {
            answer = Message::decode(&buffer[..len]).map(|(_, message)| message);
        }
        answer
    }

    fn open(&mut self, token: Token, port: u16) -> Body {
        let bind = ([10, 0, 0, 1], port).into();
        self.say(0, token, Body::Open(Request { bind, timeout_ms: 0, not_ready_ms: 0 })).unwrap().body
    }

    /// An attachment with queues.
    fn attach(&mut self, token: Token, port: u16) -> (u64, Queues) {
        self.open(token, port);
        let number = self.host.numbers().last().unwrap();
        let memory = create(QUEUES_BYTES).unwrap();
        let runs = self.guest.place(&memory, QUEUES_BYTES);
        assert_eq!(self.share(number, token, QUEUES, QUEUES_BYTES as u64, &runs), ShareState::Used);
        (number, Queues::of_process(memory).unwrap())
    }

    fn share(&mut self, number: u64, token: Token, memory: u32, bytes: u64, runs: &[Run]) -> ShareState {
        let body = |first: usize, runs: &[Run], total| Body::Share {
            memory,
            bytes,
            total,
            first: first as u16,
            runs: runs.to_vec(),
        };
        let mut state = None;
        for (place, part) in runs.chunks(100).enumerate() {
            let answer = self.say(number, token, body(place * 100, part, runs.len() as u16));
            let Some(Body::Shared { state: now, .. }) = answer.map(|answer| answer.body) else { panic!() };
            state = Some(now);
        }
        state.unwrap_or_else(|| match self.say(number, token, body(0, &[], 0)).unwrap().body {
            Body::Shared { state, .. } => state,
            other => panic!("{other:?}"),
        })
    }
}

#[test]
fn a_hostile_guest_reaches_only_its_own_pages() {
    let service = Service::start(1 << 24, 1 << 40).unwrap();
    let mut raw = Raw::new(&service);
    let token = [1; 16];
    let (number, mut queues) = raw.attach(token, 7000);
    let memory = create(64 * PAGE as usize).unwrap();
    let own = raw.guest.place(&memory, 64 * PAGE as usize);
    let pages = |runs: &[Run]| runs.iter().map(|run| u64::from(run.pages)).sum::<u64>() * PAGE;
    let mut share = |number, token, memory, runs: &[Run]| raw.share(number, token, memory, pages(runs), runs);
    assert_eq!(share(number, token, 1, &own), ShareState::Used);
    assert_eq!(share(number, token, 1, &[]), ShareState::Used, "it was answered before");
    let foreign = [
        Run { addr: 0, pages: 1 },
        Run { addr: own[0].addr, pages: own[0].pages + 1 },
        Run { addr: own[0].addr + 1, pages: 1 },
        Run { addr: !(PAGE - 1), pages: u32::MAX },
        Run { addr: own[0].addr, pages: 0 },
    ];
    for (memory, run) in foreign.into_iter().enumerate() {
        assert_eq!(share(number, token, 10 + memory as u32, &[own[1], run]), ShareState::Refused, "{run:?}");
    }
    assert_eq!(share(number, token, 20, &vec![own[0]; RUNS_MAX]), ShareState::Refused, "too many pieces");
    assert_eq!(share(number, token, QUEUES, &own), ShareState::Used, "the queues are there: nothing changes");
    // A length that the pages do not have.
    assert_eq!(raw.share(number, token, 21, pages(&own) + 1, &own), ShareState::Refused);
    assert_eq!(raw.share(number, token, 22, u64::MAX, &own), ShareState::Refused);
    // Refused memory is refused to the engine, too: an entry with it is answered at once.
    let extent = crate::daemon::entry::Extent { memory: 10, offset: 0, len: 8 };
    queues.writer.push(&Submission::Open { ticket: 1, number: Some(0) }.encode()).unwrap();
    let access = Access { read: true, write: true };
    for (ticket, memory) in [(2, 10), (3, 1)] {
        let extent = crate::daemon::entry::Extent { memory, ..extent };
        let register = Submission::Register { ticket, endpoint: 0, extent, base: 0, access, key: Some(5) };
        queues.writer.push(&register.encode()).unwrap();
    }
    raw.say(number, token, Body::Ring { rung: 1, heard: 0, asks: false });
    let (mut seen, begin) = (vec![], Instant::now());
    while seen.len() < 3 {
        assert!(begin.elapsed() < Duration::from_secs(1), "{seen:?}");
        if let Some(entry) = queues.reader.next().unwrap()
            && let Some(Happened::Answered(ticket, answer)) = Happened::decode(&entry)
        {
            seen.push((ticket, matches!(answer, crate::daemon::entry::Answer::Done(_))));
        }
    }
    assert_eq!(seen, [(1, true), (2, false), (3, true)]);
    // Another secret, or another number, reaches nothing.
    assert_eq!(raw.say(number, [2; 16], Body::Close).unwrap().body, Body::Closed);
    assert_eq!(raw.say(number ^ 1, token, Body::Close).unwrap().body, Body::Closed);
    assert_eq!(raw.host.attachments(), 1);
    drop(raw);
    service.stop();
}

#[test]
fn attachments_are_bounded_and_end() {
    let service = Service::start(1 << 30, 1 << 40).unwrap();
    let mut raw = Raw::new(&service);
    let token = |number: u16| {
        let mut token: Token = [7; 16];
        token[..2].copy_from_slice(&number.to_be_bytes());
        token
    };
    assert_eq!(raw.open(token(1), 80), Body::Declined(Decline::Port));
    let unspecified = Request { bind: "0.0.0.0:7000".parse().unwrap(), timeout_ms: 0, not_ready_ms: 0 };
    assert!(matches!(raw.say(0, token(1), Body::Open(unspecified)).unwrap().body, Body::Declined(_)));
    for number in 2..18 {
        let opened = raw.open(token(number), 7000 + number);
        assert_eq!(opened, Body::Opened(([10, 0, 0, 1], 7000 + number).into()));
        assert_eq!(raw.open(token(number), 7000 + number), opened, "the answer was lost");
    }
    assert_eq!(raw.open(token(99), 8000), Body::Declined(Decline::TooMany));
    // Nothing was heard of them for too long.
    raw.now += Duration::from_secs(11);
    raw.host.turn(raw.now);
    raw.host.turn(raw.now + Duration::from_millis(30));
    assert_eq!(raw.host.attachments(), 0);
    assert_eq!(
        raw.open(token(99), 7002),
        Body::Opened(([10, 0, 0, 1], 7002).into()),
        "its port is free again"
    );
    assert_eq!(raw.open(token(98), 7002), Body::Declined(Decline::Address(libc::EADDRINUSE)));
    for number in 0..40 {
        raw.open(token(200 + number), 9000 + number);
        raw.say(0, token(200 + number), Body::Close);
        raw.host.turn(raw.now);
    }
    assert_eq!(raw.open(token(300), 9300), Body::Declined(Decline::TooMany), "20 in a second");
    // A new helper ends what an earlier one has left.
    let (number, _queues) = {
        raw.now += Duration::from_secs(2);
        raw.attach(token(400), 9400)
    };
    assert!(raw.host.numbers().any(|known| known == number));
    raw.say(0, Token::default(), Body::Close);
    let begin = Instant::now();
    while raw.host.attachments() > 0 {
        assert!(begin.elapsed() < PATIENCE);
        raw.host.turn(raw.now);
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(raw.say(0, Token::default(), Body::Close).unwrap().body, Body::Closed);
    drop(raw);
    service.stop();
}

/// The engine has ended when memory is shared with it: the attachment ends nevertheless, and lets go of the memory.
#[test]
fn memory_that_no_engine_takes_is_given_back() {
    let service = Service::start(1 << 24, 1 << 40).unwrap();
    let mut raw = Raw::new(&service);
    let token = [1; 16];
    let (number, _queues) = raw.attach(token, 7000);
    service.stop();
    let memory = create(PAGE as usize).unwrap();
    let own = raw.guest.place(&memory, PAGE as usize);
    assert_eq!(raw.share(number, token, 1, PAGE, &own), ShareState::Used);
    raw.say(number, token, Body::Close);
    let begin = Instant::now();
    while raw.host.attachments() > 0 {
        assert!(begin.elapsed() < PATIENCE, "the attachment is not over");
        raw.host.turn(raw.now);
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Frames between helper and daemon are lost, half of them: what was asked is answered in the end, and done once.
#[test]
fn lost_frames_are_repeated() {
    let service = Service::start(1 << 30, 1 << 40).unwrap();
    let guest = FakeGuest::new(5, &Default::default());
    let mut host = GuestHost::new(Arc::new(guest.clone()), service.clone(), (9, 5)).unwrap();
    let memory = create(QUEUES_BYTES).unwrap();
    let request = Request { bind: ([10, 0, 0, 1], 7000).into(), timeout_ms: 0, not_ready_ms: 0 };
    let (mut now, mut random) = (Instant::now(), 7u64);
    let mut client = Client::new(now, guest.mac, [3; 16], request, guest.place(&memory, QUEUES_BYTES));
    let large = create(900 * PAGE as usize).unwrap();
    let runs: Vec<Run> = guest.place(&large, 900 * PAGE as usize);
    let mut events = vec![];
    let mut run = |client: &mut Client, now: &mut Instant, end: &dyn Fn(&Client, &[Event]) -> bool| {
        let begin = Instant::now();
        while !end(client, &events) {
            assert!(begin.elapsed() < PATIENCE, "{events:?}");
            *now += Duration::from_millis(2);
            let mut is_lost = || {
                random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                random >> 63 == 0
            };
            if let (Some(frame), _) = client.depart(*now)
                && !is_lost()
            {
                host.hear(*now, &frame, Ok(ShareSettings::default()));
            }
            host.turn(*now);
            let mut buffer = [0; super::FRAME_MAX];
            while let Some(len) = super::helper::Machine::receive(&guest, &mut buffer) {
                let (_, message) = Message::decode(&buffer[..len]).unwrap();
                if !is_lost() {
                    events.extend(client.hear(*now, message));
                }
            }
        }
    };
    run(&mut client, &mut now, &|_, events| matches!(events, [Event::Attached(_)]));
    client.share(1, 900 * PAGE, runs);
    client.ring();
    run(&mut client, &mut now, &|client, _| {
        client.wakes_at(Instant::now()).is_none_or(|at| at > Instant::now())
    });
    client.close();
    run(&mut client, &mut now, &|client, _| {
        // The engine's thread releases the memory: the test's clock must not run ahead of the machine's.
        std::thread::sleep(Duration::from_millis(2));
        client.is_closed()
    });
    assert_eq!(host.attachments(), 0);
    drop(host);
    service.stop();
}

#[test]
fn arbitrary_frames_do_no_harm() {
    let mut random = 1u64;
    let mut next = || {
        random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (random >> 32) as u32
    };
    for _ in 0..50 {
        let mut script = vec![];
        for _ in 0..50 {
            let body = match next() % 9 {
                0 => Body::Close,
                1 => Body::Ring { rung: next(), heard: next(), asks: next() & 1 == 1 },
                2 => Body::Open(Request {
                    bind: ([10, 0, 0, 1], next() as u16).into(),
                    timeout_ms: 1,
                    not_ready_ms: 1,
                }),
                3 => Body::Neighbour(std::net::Ipv4Addr::from(next()).into(), [2; 6]),
                4 => Body::Datagram {
                    other: (std::net::Ipv4Addr::from(next()), next() as u16).into(),
                    bytes: vec![next() as u8; next() as usize % (DATAGRAM_MAX + 1)],
                },
                _ => {
                    let run = |_| Run { addr: (1 << 32) + u64::from(next() % 64) * 2048, pages: next() % 20 };
                    let runs: Vec<Run> = (0..4).map(run).collect();
                    let bytes = runs.iter().map(|run| u64::from(run.pages) * PAGE).sum();
                    Body::Share { memory: next() % 4, bytes, total: 4 - (next() % 2) as u16, first: 0, runs }
                }
            };
            let mut frame = Message { attachment: 0, token: [next() as u8; 16], body }.encode([2; 6], GROUP);
            if next() % 4 == 0 {
                let place = next() as usize % frame.len();
                frame[place] = next() as u8;
            }
            script.extend((frame.len() as u16).to_be_bytes());
            script.extend(frame);
        }
        fuzz::run(&script);
    }
}

#[test]
fn the_fuzz_corpus_does_no_harm() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../fuzz/corpus/vm_frames");
    let files: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert!(files.len() >= 10);
    for file in files {
        fuzz::run(&std::fs::read(file).unwrap());
    }
}
