//! Processes of one daemon whose packets bypass the network, on a clock of their own, with sockets that can be cut.

use std::net::UdpSocket;
use std::os::fd::AsRawFd;

use super::entry::{Answer, Event, Extent, Submission, Task};
use super::fuzz::Raw;
use super::room::{ContainerCounters, Room};
use super::{ContainerId, ShareSettings};
use crate::meeting::Place;
use crate::proto::{Access, Change, Completion, Datatype, Kind, Match, Peer, Status};
use crate::ring::{View, Word, create};

const KEY: u64 = 5;
const MEMORY: u32 = 1;
const LEN: usize = 8 << 20;
/// Nothing here takes so long.
const PATIENCE_NS: u64 = 30_000_000_000;

/// A process, and what the test sees of it.
struct Process {
    raw: Raw,
    container: u64,
    /// The process's own mapping of its registered memory.
    memory: View,
    socket: UdpSocket,
    peer: Peer,
    completions: Vec<Completion>,
    answers: Vec<(u64, Answer)>,
}

impl Process {
    fn fill(&self, at: usize, bytes: &[u8]) {
        assert!(self.memory.all().write(at as u64, bytes));
    }

    fn bytes(&self, at: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![];
        self.memory.all().part(at as u64, len as u64).unwrap().read_to(&mut bytes);
        bytes
    }

    /// From now on no packet arrives by the socket, or all do.
    fn cut(&self, is_cut: bool) {
        let mut refuse = libc::sock_filter { code: (libc::BPF_RET | libc::BPF_K) as u16, jt: 0, jf: 0, k: 0 };
        let program = libc::sock_fprog { len: 1, filter: &mut refuse };
        let option = if is_cut { libc::SO_ATTACH_FILTER } else { libc::SO_DETACH_FILTER };
        // SAFETY: the kernel reads the program, which lives during the call, and its one instruction.
        let result = unsafe {
            libc::setsockopt(
                self.socket.as_raw_fd(),
                libc::SOL_SOCKET,
                option,
                (&raw const program).cast(),
                size_of::<libc::sock_fprog>() as u32,
            )
        };
        assert_eq!(result, 0);
    }
}

/// Two processes of containers 1 and 2, in a room with a clock.
struct Pair {
    room: Room,
    now: u64,
    processes: Vec<Process>,
}

impl Pair {
    /// `networks`: those of each container.
    fn new(networks: [&[u32]; 2], settings: [ShareSettings; 2]) -> Self {
        let mut pair = Self { room: Room::new(), now: 1, processes: vec![] };
        pair.set_networks(networks);
        for (place, settings) in settings.into_iter().enumerate() {
            pair.add(place as u64 + 1, settings);
        }
        pair
    }

    fn joined() -> Self {
        Self::new([&[7], &[8, 7]], [ShareSettings::default(); 2])
    }

    fn set_networks(&mut self, networks: [&[u32]; 2]) {
        let place = |(place, networks): (usize, &&[u32])| Place {
            id: (1, place as u64 + 1),
            networks: networks.to_vec(),
        };
        self.room.set_places(networks.iter().enumerate().map(place).collect());
    }

    fn add(&mut self, container: u64, settings: ShareSettings) {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let mut raw = Raw::add_by(&mut self.room, container, settings, socket.try_clone().unwrap());
        raw.submit(&Submission::Open { ticket: 1, number: Some(0) });
        let file = create(LEN).unwrap();
        let memory = View::new(file.try_clone().unwrap()).ok().unwrap();
        assert!(raw.bell.try_say(&Word::Grant(MEMORY.into(), file)));
        let (extent, access) = (extent(0, LEN), Access { read: true, write: true });
        raw.submit(&Submission::Register { ticket: 2, endpoint: 0, extent, base: 0, access, key: Some(KEY) });
        let peer = Peer { address: raw.address, endpoint: 0 };
        let (completions, answers) = (vec![], vec![]);
        self.processes.push(Process { raw, container, memory, socket, peer, completions, answers });
    }

    fn turn(&mut self) {
        self.now += 20_000;
        self.room.turn(self.now);
        for process in &mut self.processes {
            while let Some(event) = process.raw.event() {
                match event {
                    Event::Completed(0, completion) => process.completions.push(completion),
                    Event::Answered(ticket, answer) => process.answers.push((ticket, answer)),
                    Event::Completed(..) => panic!("{event:?}"),
                }
            }
        }
    }

    fn post(&mut self, from: usize, task: Task, extent: Extent, data: Option<u64>) {
        let peer = self.processes[1 - from].peer;
        let post = Submission::Post { endpoint: 0, peer, task, extent, data, context: 3 };
        self.processes[from].raw.submit(&post);
    }

    /// Takes the next completion of a process.
    fn wait(&mut self, process: usize) -> Completion {
        let end = self.now + PATIENCE_NS;
        while self.processes[process].completions.is_empty() {
            assert!(self.now < end, "no completion");
            self.turn();
        }
        self.processes[process].completions.remove(0)
    }

    fn write(&mut self, from: usize, len: usize) -> Status {
        self.post(from, Task::Write(KEY, 0), extent(0, len), None);
        self.wait(from).status
    }

    fn is_same_host(&mut self, process: usize) -> bool {
        let peer = self.processes[1 - process].peer.address;
        self.processes[process].raw.submit(&Submission::Way { ticket: 99, peer });
        loop {
            self.turn();
            let answers = &mut self.processes[process].answers;
            if let Some(place) = answers.iter().position(|(ticket, _)| *ticket == 99) {
                return answers.swap_remove(place).1 == Answer::Done(1);
            }
        }
    }

    /// Exchanges small writes until packets bypass the network, or for half a second. Returns whether they do not.
    fn meet(&mut self) -> bool {
        let end = self.now + 500_000_000;
        while self.now < end {
            assert_eq!(self.write(0, 8), Status::Success);
            if self.is_same_host(0) && self.is_same_host(1) {
                return true;
            }
            (0..100).for_each(|_| self.turn());
        }
        false
    }

    fn cut(&self, is_cut: bool) {
        self.processes.iter().for_each(|process| process.cut(is_cut));
    }

    fn counters(&self, process: usize) -> ContainerCounters {
        let id: ContainerId = (1, self.processes[process].container);
        self.room.report().into_iter().find(|counters| counters.id == id).unwrap()
    }

    /// The process ends.
    fn end(&mut self, process: usize) {
        drop(self.processes.remove(process));
        (0..2_000).for_each(|_| self.turn());
    }
}

fn extent(offset: usize, len: usize) -> Extent {
    Extent { memory: MEMORY, offset: offset as u64, len: len as u64 }
}

fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|place| (place * 13 + place / 255) as u8 ^ seed).collect()
}

#[test]
fn all_operations_go_without_the_network() {
    let mut pair = Pair::joined();
    assert!(pair.meet());
    pair.cut(true);
    for (seed, len) in [0, 1, 1500, 16_384, 16_385, 65_507, 3 << 20].into_iter().enumerate() {
        for from in 0..2 {
            let bytes = pattern(len, seed as u8 + 8 * from as u8);
            let half = LEN / 2;
            pair.processes[from].fill(0, &bytes);
            pair.post(from, Task::Write(KEY, half as u64), extent(0, len), Some(seed as u64));
            assert_eq!(pair.wait(from).status, Status::Success);
            let arrival = pair.wait(1 - from);
            assert_eq!(
                (arrival.kind, arrival.data, arrival.len),
                (Kind::Arrival, Some(seed as u64), len as u64)
            );
            assert!(pair.processes[1 - from].bytes(half, len) == bytes, "write of {len}");
            pair.post(from, Task::Read(KEY, half as u64), extent(half, len), None);
            assert_eq!(pair.wait(from).status, Status::Success);
            assert!(pair.processes[from].bytes(half, len) == bytes, "read of {len}");
            pair.processes[1 - from].fill(half, &vec![0xff; len]);
            let (matching, context) = (Match::default(), 4);
            let extent_there = extent(half, len);
            pair.processes[1 - from].raw.submit(&Submission::Receive {
                endpoint: 0,
                matching,
                extent: extent_there,
                context,
                several: None,
            });
            pair.post(from, Task::Message(None), extent(0, len), None);
            assert_eq!((pair.wait(from).kind, pair.wait(1 - from).kind), (Kind::Send, Kind::Receive));
            assert!(pair.processes[1 - from].bytes(half, len) == bytes, "message of {len}");
        }
    }
    let add = Task::Atomic {
        key: KEY,
        at: 0,
        change: Change::Sum,
        datatype: Datatype::U64,
        count: 1,
        compare: Extent::default(),
        found: Some(extent(64, 8)),
    };
    pair.processes[0].fill(0, &5u64.to_ne_bytes());
    pair.processes[1].fill(0, &37u64.to_ne_bytes());
    pair.post(0, add, extent(0, 8), None);
    assert_eq!(pair.wait(0).status, Status::Success);
    assert_eq!(
        (pair.processes[1].bytes(0, 8), pair.processes[0].bytes(64, 8)),
        (42u64.to_ne_bytes().into(), 37u64.to_ne_bytes().into())
    );
    let counters = pair.counters(0);
    assert!(counters.same_host_bytes > 3 << 20 && counters.bytes_out >= counters.same_host_bytes);
}

/// The receiving engine checks keys and ranges, and writes nothing that it refuses.
#[test]
fn keys_ranges_and_rights_are_checked() {
    let mut pair = Pair::joined();
    assert!(pair.meet());
    pair.cut(true);
    let before = pair.processes[1].bytes(0, LEN);
    pair.processes[0].fill(0, &pattern(1 << 20, 9));
    let end = LEN as u64;
    for (len, key, at) in
        [(8, KEY ^ 1, 0), (8, KEY, end - 7), (1 << 20, KEY, end - (1 << 20) + 1), (8, KEY, u64::MAX)]
    {
        for task in [Task::Write(key, at), Task::Read(key, at)] {
            pair.post(0, task, extent(0, len), None);
            assert_eq!(pair.wait(0).status, Status::BadKey, "{task:?}");
        }
    }
    assert!(pair.processes[1].bytes(0, LEN) == before);
    // What is deregistered while a large write is under way is written no more.
    pair.post(0, Task::Write(KEY, 0), extent(0, LEN), None);
    pair.turn();
    pair.processes[1].raw.submit(&Submission::Deregister { ticket: 9, key: KEY });
    assert_eq!(pair.wait(0).status, Status::BadKey);
    pair.processes[1].fill(0, &before);
    (0..1_000).for_each(|_| pair.turn());
    assert!(pair.processes[1].bytes(0, LEN) == before);
}

#[test]
fn containers_without_a_common_network_keep_to_the_sockets() {
    let mut pair = Pair::new([&[7], &[8]], [ShareSettings::default(); 2]);
    assert!(!pair.meet());
    assert_eq!(pair.write(0, 1 << 20), Status::Success);
    assert_eq!((pair.counters(0).same_host_packets, pair.counters(1).same_host_packets), (0, 0));
    // Nobody may meet a container that the configuration does not have.
    pair.room.set_places(vec![]);
    assert!(!pair.meet());
    // Processes of one container always may.
    pair.processes.pop();
    pair.add(1, ShareSettings::default());
    assert!(pair.meet());
}

#[test]
fn the_configuration_ends_links_and_operations_go_on_by_the_sockets() {
    let mut pair = Pair::joined();
    assert!(pair.meet());
    let bytes = pattern(LEN, 3);
    pair.processes[0].fill(0, &bytes);
    pair.post(0, Task::Write(KEY, 0), extent(0, LEN), None);
    pair.turn();
    pair.cut(true);
    pair.set_networks([&[7], &[8]]);
    assert!(!pair.is_same_host(0) && !pair.is_same_host(1));
    let before = pair.counters(0).same_host_packets;
    (0..1_000).for_each(|_| pair.turn());
    assert!(pair.processes[0].completions.is_empty(), "there is no way");
    pair.cut(false);
    assert_eq!(pair.wait(0).status, Status::Success);
    assert!(pair.processes[1].bytes(0, LEN) == bytes);
    assert_eq!(pair.counters(0).same_host_packets, before);
    pair.set_networks([&[9, 7], &[9]]);
    // The next invitation comes when it is due.
    let end = pair.now + 20_000_000_000;
    while !pair.meet() {
        assert!(pair.now < end);
    }
}

/// A process that ends in the middle: its memory is unmapped, and neither read nor written.
#[test]
fn what_ends_is_reached_no_more() {
    for (ending, task) in [(1, Task::Write(KEY, 0)), (1, Task::Read(KEY, 0)), (0, Task::Write(KEY, 0))] {
        // Slow enough that it ends within the operation.
        let slow = ShareSettings { weight: 100, rate: 100_000_000 };
        let mut pair = Pair::new([&[7], &[7]], [slow; 2]);
        assert!(pair.meet());
        pair.post(0, task, extent(0, LEN), Some(1).filter(|_| task == Task::Write(KEY, 0)));
        (0..400).for_each(|_| pair.turn());
        let moved = pair.counters(0).same_host_bytes + pair.counters(1).same_host_bytes;
        assert!(moved > 1 << 16 && moved < LEN as u64, "{moved}");
        pair.end(ending);
        let left = pair.counters(0);
        assert_eq!(
            (
                left.processes,
                left.mapped_bytes,
                pair.room.report().iter().map(|all| all.processes).sum::<u64>()
            ),
            (1, LEN as u64, 1)
        );
        if ending == 1 {
            assert_eq!(pair.processes[0].completions.remove(0).status, Status::PeerRestarted, "{task:?}");
        } else {
            assert!(pair.processes[0].completions.is_empty(), "no arrival of a write that did not end");
        }
        // Its place is another process's now, which nobody takes for it.
        pair.add(3 - pair.processes[0].container, ShareSettings::default());
        assert!(!pair.is_same_host(0) && pair.meet());
        pair.cut(true);
        assert_eq!(pair.write(0, 1 << 20), Status::Success);
    }
}

/// A container's rate holds for what needs no network, too.
#[test]
fn bytes_of_the_same_host_count_for_the_share() {
    const RATE: u64 = 50_000_000;
    let limited = ShareSettings { weight: 100, rate: RATE };
    let mut pair = Pair::new([&[7], &[7]], [limited, ShareSettings::default()]);
    assert!(pair.meet());
    pair.cut(true);
    (0..200).for_each(|_| pair.turn());
    let begin = pair.now;
    assert_eq!(pair.write(0, LEN), Status::Success);
    let expected = LEN as u64 * 1_000_000_000 / RATE;
    let took = pair.now - begin;
    assert!(took.abs_diff(expected) * 20 <= expected, "{took} instead of {expected} ns");
    // An endpoint's own rate is below it.
    let share = ShareSettings { weight: 1, rate: RATE / 4 };
    pair.processes[0].raw.submit(&Submission::Share { ticket: 8, endpoint: 0, share });
    (0..200).for_each(|_| pair.turn());
    let begin = pair.now;
    assert_eq!(pair.write(0, LEN), Status::Success);
    let took = pair.now - begin;
    assert!(took.abs_diff(4 * expected) * 20 <= 4 * expected, "{took} instead of {} ns", 4 * expected);
    assert!(pair.counters(0).throttled > 0 && pair.counters(0).held_back > 0);
}

/// Endpoints of a process share by weight what its container may send.
#[test]
fn endpoints_share_what_their_container_may_send() {
    let limited = ShareSettings { weight: 100, rate: 40_000_000 };
    let mut pair = Pair::new([&[7], &[7]], [limited, ShareSettings::default()]);
    assert!(pair.meet());
    let share = ShareSettings { weight: 25, rate: 0 };
    pair.processes[0].raw.submit(&Submission::Share { ticket: 8, endpoint: 0, share });
    pair.processes[0].raw.submit(&Submission::Open { ticket: 9, number: Some(1) });
    let peer = pair.processes[1].peer;
    let post = |pair: &mut Pair, endpoint| {
        let (task, extent, context) = (Task::Write(KEY, 0), extent(0, 1 << 20), 3);
        pair.processes[0].raw.submit(&Submission::Post { endpoint, peer, task, extent, data: None, context });
    };
    for endpoint in [0, 1] {
        (0..3).for_each(|_| post(&mut pair, endpoint));
    }
    let mut done = [0u64; 2];
    while done.iter().sum::<u64>() < 100 {
        pair.now += 20_000;
        pair.room.turn(pair.now);
        while let Some(event) = pair.processes[0].raw.event() {
            let Event::Completed(endpoint, completion) = event else { continue };
            assert_eq!(completion.status, Status::Success);
            done[usize::from(endpoint)] += 1;
            post(&mut pair, endpoint);
        }
    }
    assert!(done[1].abs_diff(4 * done[0]) <= 5, "{done:?}");
}
