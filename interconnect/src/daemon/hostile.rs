//! Hostile processes at length: random entries by the million, and memory whose every byte is watched.
//!
//! Two hostile processes and a well-behaved one share a network, so that their packets need none (`links.rs`). The hostile ones know the keys of the
//! third one's two regions, of which peers may read one and write the other, and submit entries with random kinds,
//! memory, offsets, lengths, keys and peers, most of them nearly right. At times an entry has any bits at all, or the positions of the queue are
//! overwritten; then the daemon cuts the process off, and another one takes its place.
//!
//! Each memory lies between pages with a secret, and inaccessible pages behind those. The third process also has secrets beside its
//! regions. What must hold at all times:
//!
//! - secrets, and the region that peers may only read, keep their bytes: nothing is written outside registered memory;
//! - no secret is in memory that hostile processes can see: nothing outside registered memory is read;
//! - memory of a process that is gone keeps its bytes.
//!
//! Bytes of secrets have the highest bit, and those that may be copied do not, so one byte tells. Atomic operations make such bytes, too:
//! with them (odd seeds), sixteen bytes of a secret tell.

use std::collections::VecDeque;
use std::net::UdpSocket;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect, munmap};

use super::entry::{Entry, Submission, WORDS};
use super::fuzz::Raw;
use super::lent::{Inbox, Lent};
use super::room::Room;
use super::service;
use super::translation::{Budget, Total};
use crate::meeting::{Ends, Place};
use crate::proto::{Access, Config, Match, ShareSettings, Span};
use crate::ring::View;

pub(crate) const PAGE: usize = 4096;
/// Bytes of a process's memory, in four parts.
pub(crate) const LEN: usize = 16 * PAGE;
pub(crate) const PART: usize = LEN / 4;
pub(crate) const MEMORY: u32 = 1;
/// Keys of the region that peers may read, and of that which they may write.
pub(crate) const READABLE: u64 = 0x5ead;
pub(crate) const WRITABLE: u64 = 0x3417e;
pub(crate) const SECRET: u8 = 0xc5;
/// Sixteen of them are no accident.
const RUN: usize = 16;
/// Entries of each hostile process in a turn, and turns between two looks at all memory.
const ENTRIES: usize = 32;
const TURNS: u64 = 256;
/// Processes that are gone whose memory is watched.
const GONE_MAX: usize = 8;

/// What has been done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Entries that the daemon has taken from hostile processes.
    pub operations: u64,
    /// Entries with an address outside the registered memory.
    pub refused: u64,
    /// Processes that were cut off.
    pub broken: u64,
    /// Bytes that went from process to process without the network.
    pub same_host_bytes: u64,
    /// Bytes of all packets.
    pub bytes: u64,
}

/// Memory between secrets.
struct Guarded(*mut u8);

// SAFETY: the mapping belongs to this value; its bytes are read and written by copies only, as those of any memory that is lent.
unsafe impl Send for Guarded {}
// SAFETY: as above.
unsafe impl Sync for Guarded {}

impl Guarded {
    /// Inaccessible page, secret page, memory, secret page, inaccessible page.
    const BYTES: usize = LEN + 4 * PAGE;

    fn new() -> Self {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the kernel chooses an unused range of addresses.
        let start =
            unsafe { mmap_anonymous(ptr::null_mut(), Self::BYTES, protection, MapFlags::PRIVATE) }.unwrap();
        let guarded = Self(start.cast());
        for page in [0, Self::BYTES - PAGE] {
            // SAFETY: the page is one of the new mapping, of which nobody has a reference.
            unsafe { mprotect(start.byte_add(page), PAGE, MprotectFlags::empty()) }.unwrap();
        }
        for page in [PAGE, Self::BYTES - 2 * PAGE] {
            guarded.all().part((page - PAGE) as u64, PAGE as u64).unwrap().write(0, &[SECRET; PAGE]);
        }
        guarded
    }

    /// Secret page, memory, secret page.
    fn all(&self) -> Span {
        // SAFETY: these bytes are mapped and accessible as long as this value, and nobody has a reference to them.
        unsafe { Span::new(self.0.add(PAGE), Self::BYTES - 2 * PAGE) }
    }

    fn copy(&self, into: &mut Vec<u8>) {
        into.clear();
        self.all().read_to(into);
    }
}

impl Lent for Guarded {
    fn span(&self) -> Span {
        self.all().part(PAGE as u64, LEN as u64).unwrap_or(Span::EMPTY)
    }

    fn pieces(&self) -> usize {
        1
    }

    fn is_revoked(&self) -> bool {
        false
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's, and no engine uses the memory any more, because each one keeps the value alive.
        let _ = unsafe { munmap(self.0.cast(), Self::BYTES) };
    }
}

struct Process {
    raw: Raw,
    memory: Arc<Guarded>,
    /// The queues, as the process can write them.
    queues: View,
}

pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        // SplitMix64.
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    pub(crate) fn is_one_in(&mut self, number: u64) -> bool {
        self.below(number) == 0
    }

    pub(crate) fn of<const N: usize>(&mut self, all: [u64; N]) -> u64 {
        all[self.below(N as u64) as usize]
    }

    /// An offset: inside, at an edge, or anywhere.
    fn offset(&mut self) -> u64 {
        let (small, inside) = (self.below(40), self.below(LEN as u64));
        let edge = self.of([0, PART as u64, LEN as u64 / 2, LEN as u64, u64::MAX, 1 << 63]);
        let any = self.next();
        self.of([inside, inside, inside, edge, edge.wrapping_add(small), edge.wrapping_sub(small), any])
    }

    fn len(&mut self) -> u64 {
        let (small, inside, any) = (self.below(40), self.below(PART as u64), self.next());
        let edge = self.of([0, 1500, 16_384, PART as u64, LEN as u64, u64::MAX]);
        match self.below(16) {
            0..6 => small,
            6..11 => inside,
            11 => edge,
            12 => edge.wrapping_add(small),
            13 => edge.wrapping_sub(small),
            14 => any >> self.below(64),
            _ => any,
        }
    }
}

struct Run {
    room: Room,
    random: Random,
    has_atomics: bool,
    now: u64,
    /// Two hostile processes, then the other one. Each is one container's.
    processes: Vec<Process>,
    /// Memory of processes that are gone, as they left it.
    gone: VecDeque<(Arc<Guarded>, Vec<u8>)>,
    /// What the other process's memory was.
    before: Vec<u8>,
    seen: Vec<u8>,
}

/// Runs this many operations. The same seed runs the same entries; the network's times differ.
///
/// # Panics
/// A byte outside registered memory was read or written, or a process that does no harm was cut off or not served.
pub fn run(seed: u64, operations: u64) -> Report {
    let mut run = Run::new(seed);
    let mut report = Report::default();
    let mut turns = 0;
    while report.operations < operations {
        run.turn();
        turns += 1;
        if u64::is_multiple_of(turns, TURNS) {
            run.look();
            report = run.report();
        }
    }
    run.look();
    run.report()
}

impl Run {
    fn new(seed: u64) -> Self {
        let mut run = Self {
            room: Room::new(),
            random: Random(seed),
            has_atomics: seed % 2 == 1,
            now: 1,
            processes: vec![],
            gone: VecDeque::new(),
            before: vec![],
            seen: vec![],
        };
        run.room
            .set_places((0..3).map(|container| Place { id: (1, container), networks: vec![1] }).collect());
        for container in 0..3 {
            let process = run.start(container);
            run.processes.push(process);
        }
        run.prepare();
        run
    }

    /// A new process whose memory has no bytes of secrets.
    fn start(&mut self, container: u64) -> Process {
        let limits = Config {
            dead_after_ns: 1_000_000_000,
            operation_timeout_ns: 200_000_000,
            not_ready_ns: 50_000_000,
            ..Config::default()
        };
        let (socket, lendings) = (UdpSocket::bind("127.0.0.1:0").unwrap(), Arc::new(Inbox::default()));
        let (ends, served) = service::provide(socket, limits, Some(Arc::clone(&lendings)), None).unwrap();
        let total = Total { bytes_max: 1 << 30, bytes: AtomicU64::new(0) };
        self.room.add(
            (1, container),
            ShareSettings::default(),
            served,
            Budget::new(1 << 30, Arc::new(total)),
        );
        let memory = Arc::new(Guarded::new());
        let bytes: Vec<u8> = (0..LEN).map(|_| self.random.next() as u8 & 0x7f).collect();
        memory.span().write(0, &bytes);
        // Memory that could not be lent has a number, too.
        let lent: Arc<dyn Lent> = Arc::clone(&memory) as _;
        for (number, memory) in [(0, None), (MEMORY, Some(lent)), (2, None)] {
            lendings.put((number, memory));
        }
        let Ends { address, memory: queues, bell, .. } = ends;
        let own = View::new(queues.try_clone().unwrap()).ok().unwrap();
        let mut raw = Raw::new(address, queues, bell);
        for endpoint in 0..3 {
            raw.submit(&Submission::Open { ticket: 0, number: Some(endpoint) });
        }
        Process { raw, memory, queues: own }
    }

    /// The third process registers two parts of its memory. The others are secrets.
    fn prepare(&mut self) {
        let Process { raw, memory, .. } = &mut self.processes[2];
        for part in [1, 3] {
            memory.span().write((part * PART) as u64, &[SECRET; PART]);
        }
        for (key, offset, read) in [(READABLE, 0, true), (WRITABLE, 2 * PART, false)] {
            let extent = super::entry::Extent { memory: MEMORY, offset: offset as u64, len: PART as u64 };
            let (access, base) = (Access { read, write: !read }, 0);
            raw.submit(&Submission::Register {
                ticket: 0,
                endpoint: 0,
                extent,
                base,
                access,
                key: Some(key),
            });
        }
        memory.copy(&mut self.before);
    }

    /// A turn of the room, before which hostile processes submit entries.
    fn turn(&mut self) {
        for hostile in 0..2 {
            for _ in 0..ENTRIES {
                let entry = self.entry(hostile);
                self.processes[hostile].raw.write(&entry);
            }
            if self.random.is_one_in(100_000 / ENTRIES as u64) {
                let at = self.random.of([0, 128, PAGE as u64, PAGE as u64 + 128]);
                let position = self.random.next() >> self.random.below(64);
                self.processes[hostile].queues.all().write(at, &position.to_ne_bytes());
            }
        }
        self.receive();
        self.now += 20_000 + self.random.below(1_000_000);
        let (_, ended) = self.room.turn(self.now);
        for (_, container) in ended {
            assert_ne!(container, 2, "nobody else is cut off");
            let process = self.start(container);
            let gone = std::mem::replace(&mut self.processes[container as usize], process);
            gone.memory.copy(&mut self.seen);
            self.gone.push_back((gone.memory, self.seen.clone()));
            if self.gone.len() > GONE_MAX {
                self.gone.pop_front();
            }
        }
        for process in &mut self.processes {
            // A process that has damaged its queue reads nonsense there.
            while let Ok(Some(_)) = process.raw.queues.reader.next() {}
        }
    }

    /// The third process takes messages, where peers may write anyway.
    fn receive(&mut self) {
        let len = self.random.below(PART as u64 / 2);
        let extent = super::entry::Extent { memory: MEMORY, offset: 2 * PART as u64 + len, len };
        let (endpoint, context, several) = (self.random.below(3) as u16, 1, None);
        let matching = Match::default();
        self.processes[2].raw.submit(&Submission::Receive { endpoint, matching, extent, context, several });
    }

    /// A random entry of a hostile process.
    fn entry(&mut self, hostile: usize) -> Entry {
        let [own, other, third] = [hostile, 1 - hostile, 2].map(|place| {
            (u32::from(std::net::Ipv4Addr::LOCALHOST), self.processes[place].raw.address.port())
        });
        entry(&mut self.random, self.has_atomics, [own, other, other, third, third, third])
    }

    /// Looks at all memory.
    fn look(&mut self) {
        let Self { processes, gone, before, seen, has_atomics, .. } = self;
        for (place, process) in processes.iter().enumerate() {
            process.memory.copy(seen);
            let (front, rest) = seen.split_at(PAGE);
            let (bytes, back) = rest.split_at(LEN);
            assert!(
                front.iter().chain(back).all(|byte| *byte == SECRET),
                "written beside the memory of {place}"
            );
            let visible = if place < 2 { bytes } else { &bytes[2 * PART..3 * PART] };
            assert!(!has_secret(visible, *has_atomics), "a secret in the memory of {place}");
        }
        // The third process was the last.
        for part in [0, 1, 3] {
            let range = PAGE + part * PART..PAGE + (part + 1) * PART;
            assert!(seen[range.clone()] == before[range], "written into part {part}");
        }
        for (memory, left) in gone {
            memory.copy(seen);
            assert!(seen == left, "written into the memory of a process that is gone");
        }
    }

    fn report(&self) -> Report {
        let mut report = Report::default();
        for counters in self.room.report() {
            report.operations += if counters.id.1 < 2 { counters.submissions } else { 0 };
            report.refused += counters.refused;
            report.broken += counters.broken;
            report.same_host_bytes += counters.same_host_bytes;
            report.bytes += counters.bytes_out;
        }
        report
    }
}

/// A random entry of a hostile process, to one of these peers or to nobody.
pub(crate) fn entry(random: &mut Random, has_atomics: bool, peers: [(u32, u16); 6]) -> Entry {
    let kind = match random.below(64) {
        kind @ 0..13 => kind + 1,
        13..22 => 7,
        22..24 => 3,
        _ => 6,
    };
    let details = if has_atomics { 4 } else { 3 };
    let any = random.next();
    // Most addresses are of IPv4.
    let flags = if random.is_one_in(64) { any } else { any & !16 } & 0xff_ffff;
    let (endpoint, detail) = (random.below(4), random.below(details));
    let mut entry: Entry = [0; WORDS];
    entry[0] = kind | flags << 8 | endpoint << 32 | detail << 48;
    entry[1] = random.below(64);
    (entry[2], entry[3], entry[4]) = (random.of([0, 1, 1, 1, 1, 1, 1, 2]), random.offset(), random.len());
    let is_nobody = random.is_one_in(64);
    let (ip, port) = peers[random.below(6) as usize];
    let port = if is_nobody { 9 } else { u64::from(port) };
    (entry[6], entry[7]) = (ip.into(), port | random.below(4) << 16);
    let key = random.next();
    entry[8] = random.of([READABLE, WRITABLE, READABLE, WRITABLE, random.0 % 8, key]);
    (entry[9], entry[10], entry[11]) = (random.offset(), random.next(), random.below(3));
    entry[12] = random.next();
    if kind == 6 && detail == 3 {
        let (change, datatype, count) = (random.below(19), random.below(10), random.below(40));
        let lens = random.below(400) << 32 | random.below(400) << 48;
        entry[12] = change | datatype << 8 | count << 16 | lens;
        entry[13] = random.of([0, 1, 1, 1, 2]) | random.of([0, 1, 1, 1, 2]) << 32;
        (entry[14], entry[15]) = (random.offset(), random.offset());
    }
    if random.is_one_in(20_000) {
        entry[random.below(2) as usize * 8] ^= random.next() & random.next();
    }
    if !has_atomics && entry[0] as u8 == 6 && entry[0] >> 48 & 0xff == 3 {
        entry[0] &= !(3 << 48);
    }
    entry
}

pub(crate) fn has_secret(bytes: &[u8], has_atomics: bool) -> bool {
    if has_atomics {
        return bytes.chunk_by(|a, b| a == b).any(|run| run[0] == SECRET && run.len() >= RUN);
    }
    bytes.iter().any(|byte| *byte >= 0x80)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `cargo run --release --example hostile --features test-util -- SEED OPERATIONS` runs more.
    #[test]
    fn hostile_processes_reach_registered_memory_only() {
        for seed in [1, 2] {
            let report = run(seed, 200_000);
            assert!(
                report.operations >= 200_000 && report.refused > 1_000 && report.broken > 0,
                "{report:?}"
            );
            assert!(report.same_host_bytes > 1 << 20 && report.bytes > report.same_host_bytes, "{report:?}");
        }
    }

    /// The watch itself: each of these is found.
    #[test]
    fn what_is_forbidden_is_seen() {
        let outside =
            [(2, PAGE - 1), (2, PAGE + LEN), (0, PAGE - 1), (2, PAGE), (2, PAGE + PART), (2, PAGE + LEN - 1)];
        let inside = [(0, PAGE), (2, PAGE + 2 * PART)];
        for (process, at) in outside.into_iter().chain(inside) {
            let mut run = Run::new(2);
            (0..64).for_each(|_| run.turn());
            run.look();
            run.processes[process].memory.all().write(at as u64, &[0xff]);
            assert!(
                std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| run.look())).is_err(),
                "{process} {at}"
            );
        }
        let mut run = Run::new(1);
        (0..64).for_each(|_| run.turn());
        run.processes[1].memory.span().write(77, &[SECRET; RUN]);
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| run.look())).is_err());
    }
}
