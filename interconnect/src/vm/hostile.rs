//! Hostile guests at length: random control frames, pages, rings and entries by the million, and memory whose every byte is watched.
//!
//! Two hostile guests, and two well-behaved ones that write into each other's memory, share a network. The hostile ones know the keys of the
//! third one's two regions, of which peers may read one and write the other. Their helpers send control frames of all kinds with random
//! attachment numbers, secrets, lengths and lists of pages: inside the guest's memory, across its end, repeated, outside, with addresses that
//! overflow. Some frames are truncated or have flipped bits. Such pages are shared as registered memory and as queues. Through valid
//! queues the guests submit the random entries of hostile processes (`daemon/hostile.rs`). At times a guest's memory table becomes
//! empty while its memory is shared.
//!
//! Each guest's memory is a part of a file between pages with a secret, and the third guest's has secrets beside its regions. What must
//! hold at all times:
//!
//! - secrets, and the region that peers may only read, keep their bytes: nothing is written outside registered memory;
//! - no secret is in memory that hostile guests can see: nothing outside registered memory is read;
//! - what the well-behaved guests write arrives, unchanged and within a minute.
//!
//! Who lends the pages is the caller's: vnetd lends those of virtual machines.

use std::collections::HashMap;
use std::fs::File;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::fake::{FakeGuest, Network};
pub use super::fake::{Physical, Piece};
use super::helper::Machine;
use super::host::GuestHost;
use super::wire::{
    Body, DATAGRAM_MAX, FRAME_MAX, GROUP, Message, QUEUES, QUEUES_BYTES, RUNS_OF_FRAME, Run, ShareState,
    Token,
};
use crate::daemon::entry::{Event, Extent, Submission, Task};
use crate::daemon::hostile::{
    LEN, MEMORY, PAGE, PART, READABLE, Random, SECRET, WRITABLE, entry, has_secret,
};
use crate::daemon::queue::Queues;
use crate::daemon::{Service, ShareSettings};
use crate::meeting::{Place, Request};
use crate::proto::{Access, Peer, Span, Status};
use crate::ring::{View, create};

/// Guest physical addresses of a guest's memory and of its queues.
const RAM_AT: u64 = 0x10_0000;
const QUEUES_AT: u64 = 0x100_0000;
/// Numbers of memories, besides that of all its pages in order.
const BACKWARDS: u32 = 2;
const ABSENT: u32 = 0;
/// Region of the fourth guest, which only the third one knows.
const OWN_KEY: u64 = 0x00c0_ffee_0000_0001;
const PORT: u16 = 7000;
/// Entries and frames of each hostile guest in a turn, and turns between two looks at all memory.
const ENTRIES: usize = 64;
const FRAMES: usize = 8;
const TURNS: u64 = 256;
/// Simulated time of a turn.
const TURN: Duration = Duration::from_millis(2);
/// Turns between two signs of life of a well-behaved guest's helper: a second.
const ALIVE_EVERY: u64 = 500;
/// How long a well-behaved guest waits, in true time.
const PATIENCE: Duration = Duration::from_secs(60);
/// Secret of the attachment whose queues a hostile guest writes; of others, which take random pages as queues.
const TOKEN: Token = [1; 16];
const OTHERS: u8 = 6;

/// What has been done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Frames of hostile guests that were heard.
    pub frames: u64,
    /// Entries that the daemon has taken from them.
    pub entries: u64,
    /// Entries with an address outside the registered memory, and memory that was not mapped.
    pub refused: u64,
    /// Attachments that they have opened.
    pub opened: u64,
    /// Turns in which they had an attachment with queues of their own.
    pub attached: u64,
    /// Attachments that were cut off.
    pub broken: u64,
    /// How often a guest's memory went away.
    pub revoked: u64,
    /// Bytes that went from guest to guest without the network.
    pub same_host_bytes: u64,
    /// Writes between the well-behaved guests.
    pub exchanged: u64,
}

impl Report {
    /// Frames and entries.
    pub fn operations(&self) -> u64 {
        self.frames + self.entries
    }
}

/// A guest's memory: secret page, memory, secret page.
struct Ram {
    file: Arc<File>,
    all: View,
}

impl Ram {
    fn new() -> Self {
        let memory = create(LEN + 2 * PAGE).unwrap();
        let all = View::new(memory.try_clone().unwrap()).ok().unwrap();
        let ram = Self { file: Arc::new(File::from(memory)), all };
        for at in [0, PAGE + LEN] {
            ram.part(at, PAGE).write(0, &[SECRET; PAGE]);
        }
        ram
    }

    fn part(&self, at: usize, len: usize) -> Span {
        self.all.all().part(at as u64, len as u64).unwrap()
    }

    /// Bytes of the guest's memory from `at` on.
    fn span(&self, at: usize, len: usize) -> Span {
        self.part(PAGE + at, len)
    }

    fn bytes(&self, at: usize, len: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(len);
        self.part(at, len).read_to(&mut bytes);
        bytes
    }

    fn piece(&self) -> Piece {
        Piece { addr: RAM_AT, file: Arc::clone(&self.file), offset: PAGE as u64, len: LEN as u64 }
    }
}

struct Guest {
    nic: FakeGuest,
    physical: Arc<dyn Physical>,
    host: GuestHost,
    ram: Ram,
    /// Queues of the attachment with the secret `TOKEN`, and their bytes; `None`: there is none.
    queues: Option<(Queues, View)>,
    /// Numbers of the attachments, by their secrets.
    known: HashMap<Token, u64>,
    /// The daemon uses the queues that were shared last.
    is_served: bool,
    ip: Ipv4Addr,
    rung: u32,
}

impl Guest {
    fn new(number: u8, network: &Network, service: &Service, physical: Arc<dyn Physical>) -> Self {
        let mut nic = FakeGuest::new(number, network);
        nic.physical = Some(Arc::clone(&physical));
        let host = GuestHost::new(Arc::new(nic.clone()), service.clone(), (1, number.into())).unwrap();
        let ip = Ipv4Addr::new(10, 9, 0, number);
        Self {
            nic,
            physical,
            host,
            ram: Ram::new(),
            queues: None,
            known: HashMap::new(),
            is_served: false,
            ip,
            rung: 0,
        }
    }

    fn say(&mut self, now: Instant, token: Token, body: Body) {
        let attachment = self.known.get(&token).copied().unwrap_or(0);
        let frame = Message { attachment, token, body }.encode(self.nic.mac, GROUP);
        self.hear(now, &frame);
    }

    /// The daemon hears a frame, and the guest its answers. Returns the number of attachments that were opened.
    fn hear(&mut self, now: Instant, frame: &[u8]) -> u64 {
        self.host.hear(now, frame, Ok(ShareSettings::default()));
        self.listen()
    }

    fn listen(&mut self) -> u64 {
        let (mut frame, mut opened) = ([0; FRAME_MAX], 0);
        while let Some(len) = self.nic.receive(&mut frame) {
            let Some((_, Message { attachment, token, body })) = Message::decode(&frame[..len]) else {
                panic!("the daemon sends frames that are none");
            };
            match body {
                Body::Opened(_) => {
                    opened += u64::from(self.known.insert(token, attachment) != Some(attachment))
                }
                Body::Closed => {
                    self.known.retain(|known, number| *known != token || *number != attachment);
                }
                Body::Shared { memory: QUEUES, state, .. } if token == TOKEN => {
                    self.is_served = state == ShareState::Used;
                }
                _ => {}
            }
        }
        if !self.known.contains_key(&TOKEN) {
            self.queues = None;
        }
        opened
    }

    /// Opens the attachment whose queues the guest writes, if the daemon lets it.
    fn attach(&mut self, now: Instant, timeout_ms: u32) -> bool {
        let memory = create(QUEUES_BYTES).unwrap();
        let file = Arc::new(File::from(memory.try_clone().unwrap()));
        let queues = Piece { addr: QUEUES_AT, file, offset: 0, len: QUEUES_BYTES as u64 };
        self.physical.set(&[self.ram.piece(), queues]);
        let bind = SocketAddr::new(self.ip.into(), PORT);
        self.is_served = false;
        self.say(now, TOKEN, Body::Open(Request { bind, timeout_ms, not_ready_ms: 1 }));
        if !self.known.contains_key(&TOKEN) {
            return false;
        }
        let whole = |addr: u64, bytes: usize| vec![Run { addr, pages: bytes.div_ceil(PAGE) as u32 }];
        // Entries that name memory which nobody has shared yet wait for it. The guest's pages are a second memory, backwards.
        let last = RAM_AT + (LEN - PAGE) as u64;
        let backwards =
            (0..(LEN / PAGE) as u64).map(|page| Run { addr: last - page * PAGE as u64, pages: 1 });
        let shared = [
            (QUEUES, QUEUES_BYTES, whole(QUEUES_AT, QUEUES_BYTES)),
            (MEMORY, LEN, whole(RAM_AT, LEN)),
            (BACKWARDS, LEN, backwards.collect()),
            (ABSENT, LEN, vec![]),
        ];
        for (memory, bytes, runs) in shared {
            let (bytes, total) = (bytes as u64, runs.len() as u16);
            self.say(now, TOKEN, Body::Share { memory, bytes, total, first: 0, runs });
        }
        for number in 1..=4 {
            let peer = IpAddr::from([10, 9, 0, number]);
            self.say(now, TOKEN, Body::Neighbour(peer, [2, 0, 0, 0, 0, number]));
        }
        if !self.is_served {
            // The engine serves too many, or has not let go of what was before.
            self.say(now, TOKEN, Body::Close);
            return false;
        }
        let rings = View::new(memory.try_clone().unwrap()).ok().unwrap();
        self.queues = Some((Queues::of_process(memory).unwrap(), rings));
        (0..3).for_each(|number| self.submit(now, &Submission::Open { ticket: 0, number: Some(number) }));
        true
    }

    fn submit(&mut self, now: Instant, submission: &Submission) {
        if let Some((queues, _)) = &mut self.queues {
            assert!(queues.writer.push(&submission.encode()).unwrap(), "there is room");
        }
        self.ring(now);
    }

    fn ring(&mut self, now: Instant) {
        self.rung = self.rung.wrapping_add(1);
        self.say(now, TOKEN, Body::Ring { rung: self.rung, heard: 0, asks: false });
    }
}

struct Hostilities {
    service: Service,
    random: Random,
    now: Instant,
    turns: u64,
    /// Two hostile guests, then the others.
    guests: Vec<Guest>,
    /// What the third guest's memory was.
    before: Vec<u8>,
    /// The write between the others that is under way: where from and to, how long, and since when.
    write: Option<(usize, usize, usize, Instant)>,
    report: Report,
}

/// Runs this many operations.
///
/// # Panics
/// A byte outside registered memory was read or written, or a guest that does no harm was cut off or not served.
pub fn run(seed: u64, operations: u64, physical: &dyn Fn() -> Arc<dyn Physical>) -> Report {
    let mut run = Hostilities::new(seed, physical);
    while run.report.operations() < operations {
        (0..TURNS).for_each(|_| run.turn());
        run.look();
    }
    let Hostilities { service, guests, report, .. } = run;
    drop(guests);
    service.stop();
    report
}

impl Hostilities {
    fn new(seed: u64, physical: &dyn Fn() -> Arc<dyn Physical>) -> Self {
        let service = Service::start(1 << 24, 1 << 27).unwrap();
        let places: Vec<Place> = (1..=4).map(|number| Place { id: (1, number), networks: vec![1] }).collect();
        service.set_places(&places);
        let network = Network::default();
        let guests = (1..=4).map(|number| Guest::new(number, &network, &service, physical())).collect();
        let (random, now) = (Random(seed), Instant::now());
        let mut run = Self {
            service,
            random,
            now,
            turns: 0,
            guests,
            before: vec![],
            write: None,
            report: Report::default(),
        };
        for place in 0..4 {
            let bytes: Vec<u8> = (0..LEN).map(|_| run.random.next() as u8 & 0x7f).collect();
            run.guests[place].ram.span(0, LEN).write(0, &bytes);
        }
        run.prepare();
        run
    }

    /// The third guest registers two parts of its memory, the others are secrets; the fourth registers all.
    fn prepare(&mut self) {
        let now = self.now;
        for place in [2, 3] {
            assert!(self.guests[place].attach(now, 0));
        }
        let third = &mut self.guests[2];
        for part in [1, 3] {
            third.ram.span(part * PART, PART).write(0, &[SECRET; PART]);
        }
        let read = Access { read: true, write: false };
        let write = Access { read: false, write: true };
        let registered =
            [(2, READABLE, 0, PART, read), (2, WRITABLE, 2 * PART, PART, write), (3, OWN_KEY, 0, LEN, write)];
        for (place, key, offset, len, access) in registered {
            let extent = Extent { memory: MEMORY, offset: offset as u64, len: len as u64 };
            let (ticket, endpoint, base, key) = (0, 0, 0, Some(key));
            let submission = Submission::Register { ticket, endpoint, extent, base, access, key };
            self.guests[place].submit(now, &submission);
        }
        self.before = self.guests[2].ram.bytes(0, LEN + 2 * PAGE);
    }

    fn turn(&mut self) {
        self.turns += 1;
        self.now += TURN;
        for hostile in 0..2 {
            self.attack(hostile);
        }
        self.exchange();
        for guest in &mut self.guests {
            guest.host.turn(self.now);
            guest.listen();
            assert!(guest.host.attachments() <= 16);
        }
    }

    /// A hostile guest writes entries and sends frames.
    fn attack(&mut self, hostile: usize) {
        let now = self.now;
        if self.random.is_one_in(5_000) {
            // Its memory goes away, until it attaches again.
            self.guests[hostile].physical.set(&[]);
            self.report.revoked += 1;
        }
        if self.guests[hostile].queues.is_none() && self.guests[hostile].attach(now, 2) {
            self.report.opened += 1;
        }
        self.submit(hostile);
        for _ in 0..FRAMES {
            let frame = self.frame(hostile);
            self.report.opened += self.guests[hostile].hear(now, &frame);
            self.report.frames += 1;
        }
    }

    fn submit(&mut self, hostile: usize) {
        let ips = [hostile, 1 - hostile, 2].map(|place| (u32::from(self.guests[place].ip), PORT));
        let [own, other, third] = ips;
        let (guest, random) = (&mut self.guests[hostile], &mut self.random);
        let Some((queues, rings)) = &mut guest.queues else { return };
        self.report.attached += 1;
        if random.is_one_in(2_000) {
            let at = random.of([0, 128, PAGE as u64, PAGE as u64 + 128]);
            rings.all().write(at, &(random.next() >> random.below(64)).to_ne_bytes());
        }
        for _ in 0..ENTRIES {
            let entry = entry(random, true, [own, other, other, third, third, third]);
            if !queues.writer.push(&entry).unwrap_or(false) {
                std::thread::yield_now();
                break;
            }
        }
        // One that has damaged its queue reads nonsense there.
        while let Ok(Some(_)) = queues.reader.next() {}
        if queues.writer.wakes_reader() {
            guest.ring(self.now);
        }
    }

    /// A random frame of a hostile guest.
    fn frame(&mut self, hostile: usize) -> Vec<u8> {
        let (guest, random) = (&self.guests[hostile], &mut self.random);
        let own = if random.is_one_in(4) { [2 + random.below(OTHERS.into()) as u8; 16] } else { TOKEN };
        // An attachment ends after ten seconds without a frame, and a guest has 16: a new secret for each OPEN would use them up.
        let kind = random.below(2_000);
        // Opening an attachment takes as long as thousands of entries.
        let kind = if kind == 0 && !random.is_one_in(20) { 1_000 } else { kind };
        let is_open = (1..6).contains(&kind);
        let token = if !is_open && random.is_one_in(32) { [random.next() as u8; 16] } else { own };
        let attachment = match random.below(32) {
            0 => 0,
            1 => random.next(),
            _ => guest.known.get(&token).copied().unwrap_or(0),
        };
        let body = match kind {
            0 => Body::Close,
            1..6 => {
                let bind = SocketAddr::new(guest.ip.into(), random.next() as u16);
                Body::Open(Request { bind, timeout_ms: 200, not_ready_ms: 50 })
            }
            6..1_000 => share(random),
            1_000..1_900 => Body::Ring {
                rung: if random.is_one_in(4) { random.next() as u32 } else { guest.rung },
                heard: random.below(4) as u32,
                asks: random.is_one_in(2),
            },
            1_900..1_950 => {
                Body::Neighbour([10, 9, 0, random.below(6) as u8].into(), [random.next() as u8; 6])
            }
            1_950..1_960 => Body::Ask([10, 9, 0, 1].into()),
            1_960..1_975 => datagram(random),
            _ => Body::Closed,
        };
        let mut frame = Message { attachment, token, body }.encode(guest.nic.mac, GROUP);
        if random.is_one_in(64) {
            for _ in 0..=random.below(3) {
                let at = random.below(frame.len() as u64) as usize;
                frame[at] ^= 1 << random.below(8);
            }
        }
        if random.is_one_in(64) {
            frame.truncate(random.below(frame.len() as u64) as usize);
        }
        frame
    }

    /// The third guest writes into the fourth one's memory, one write after another.
    fn exchange(&mut self) {
        if self.turns.is_multiple_of(ALIVE_EVERY) {
            (2..4).for_each(|place| self.guests[place].ring(self.now));
        }
        let now = self.now;
        while let Some(entry) = self.guests[3].queues.as_mut().expect("served").0.reader.next().unwrap() {
            Event::decode(&entry).expect("an event");
        }
        while let Some(entry) = self.guests[2].queues.as_mut().expect("served").0.reader.next().unwrap() {
            let Event::Completed(0, completion) = Event::decode(&entry).expect("an event") else { continue };
            // Peers' writes are no business of this guest.
            let Some((from, to, len, _)) = self.write.take_if(|_| completion.context == u64::MAX) else {
                continue;
            };
            assert_eq!(completion.status, Status::Success);
            let [third, fourth] = [&self.guests[2], &self.guests[3]];
            assert!(third.ram.bytes(PAGE + from, len) == fourth.ram.bytes(PAGE + to, len), "wrong bytes");
            self.report.exchanged += 1;
        }
        if let Some((.., since)) = self.write {
            assert!(since.elapsed() < PATIENCE, "a guest that does no harm is not served: {:?}", self.report);
            return;
        }
        let len = self.random.below(PART as u64) as usize;
        let (from, to) =
            (self.random.below((PART - len) as u64) as usize, self.random.below((LEN - len) as u64) as usize);
        let peer = Peer { address: SocketAddr::new(self.guests[3].ip.into(), PORT), endpoint: 0 };
        let extent = Extent { memory: MEMORY, offset: from as u64, len: len as u64 };
        let (endpoint, task, data) = (0, Task::Write(OWN_KEY, to as u64), None);
        let post = Submission::Post { endpoint, peer, task, extent, data, context: u64::MAX };
        self.guests[2].submit(now, &post);
        self.write = Some((from, to, len, Instant::now()));
    }

    /// Looks at all memory, and counts.
    fn look(&mut self) {
        for (place, guest) in self.guests.iter().enumerate() {
            let bytes = guest.ram.bytes(0, LEN + 2 * PAGE);
            let (front, rest) = bytes.split_at(PAGE);
            let (own, back) = rest.split_at(LEN);
            let is_secret = front.iter().chain(back).all(|byte| *byte == SECRET);
            assert!(is_secret, "written beside the memory of {place}");
            let visible = if place == 2 { &own[2 * PART..3 * PART] } else { own };
            assert!(!has_secret(visible, true), "a secret in the memory of {place}");
            for part in if place == 2 { &[0, 1, 3][..] } else { &[] } {
                let range = PAGE + part * PART..PAGE + (part + 1) * PART;
                assert!(bytes[range.clone()] == self.before[range], "written into part {part}");
            }
        }
        let report = &mut self.report;
        (report.entries, report.refused, report.broken, report.same_host_bytes) = (0, 0, 0, 0);
        for counters in self.service.counters() {
            report.same_host_bytes += counters.same_host_bytes;
            if counters.id.1 <= 2 {
                report.entries += counters.submissions;
                report.refused += counters.refused;
                report.broken += counters.broken;
            } else {
                // The memory that cannot be lent is refused.
                assert!(counters.refused <= 1 && counters.broken == 0, "nobody else is cut off");
            }
        }
    }
}

/// Random pages of a guest's memory: inside, at an edge, twice, or anywhere.
fn share(random: &mut Random) -> Body {
    let any = random.next();
    // Few numbers, so that messages meet memory that is shared already, and seldom use up a guest's pieces (`PIECES_MAX`).
    let memory = random.of([1, 3, 4, QUEUES.into(), any & 0x3f]) as u32;
    let memory = if random.is_one_in(4_096) { any as u32 } else { memory };
    let count = random.of([0, 1, 1, 1, 2, 3, 16, RUNS_OF_FRAME as u64]);
    let runs: Vec<Run> = (0..count).map(|_| run_of(random)).collect();
    let pages: u64 = runs.iter().map(|run| u64::from(run.pages)).sum();
    let whole = pages.wrapping_mul(PAGE as u64);
    let bytes =
        random.of([whole, whole, whole, whole.wrapping_sub(random.0 % 5000), QUEUES_BYTES as u64, any]);
    let (all, some) = (runs.len() as u64, random.below(1_200));
    let total = random.of([all, all, all, all + 1, some]) as u16;
    let first = random.of([0, 0, 0, 1, some]) as u16;
    Body::Share { memory, bytes, total, first, runs }
}

/// A datagram of another application of the guest: random bytes, whose first one may be that of a packet.
fn datagram(random: &mut Random) -> Body {
    let len = random.of([0, 1, 40, 200, DATAGRAM_MAX as u64]) as usize;
    let mut bytes: Vec<u8> = (0..len).map(|_| random.next() as u8).collect();
    if random.is_one_in(2) {
        bytes.iter_mut().take(1).for_each(|first| *first = 0x10 | *first & 15);
    }
    let other = SocketAddr::new([10, 9, 0, random.below(6) as u8].into(), random.of([PORT.into(), 9]) as u16);
    Body::Datagram { other, bytes }
}

fn run_of(random: &mut Random) -> Run {
    let (page, any) = (random.below(LEN as u64 / PAGE as u64), random.next());
    let edge =
        random.of([RAM_AT, RAM_AT + LEN as u64, QUEUES_AT, QUEUES_AT + QUEUES_BYTES as u64, 0, u64::MAX]);
    let inside = RAM_AT + page * PAGE as u64;
    let near = edge.wrapping_add(random.of([0, PAGE as u64, 1, u64::MAX, (PAGE as u64).wrapping_neg()]));
    let addr = random.of([inside, inside, inside, inside, QUEUES_AT, near, any, any & !(PAGE as u64 - 1)]);
    let pages = random.of([1, 1, 1, 2, 3, 16, QUEUES_BYTES as u64 / PAGE as u64, any >> 40, any]) as u32;
    Run { addr, pages }
}
