//! A process without the library, for tests and for the fuzz target.

use std::net::{SocketAddr, UdpSocket};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use super::entry::{Entry, Event, Submission, WORDS};
use super::queue::Queues;
use super::room::Room;
use super::service;
use super::translation::{Budget, Total};
use crate::meeting::Ends;
use crate::proto::{Config, ShareSettings};
use crate::ring::{Bell, Word, create};

/// Bytes of the process's registered memory, and its number.
const LEN: usize = 8192;
const NUMBER: u32 = 7;
const MEMORY_MAX: u64 = 1 << 30;

/// A process that writes its entries itself.
pub(super) struct Raw {
    pub(super) queues: Queues,
    pub(super) bell: Bell,
    pub(super) address: SocketAddr,
}

impl Raw {
    pub(super) fn new(address: SocketAddr, memory: OwnedFd, bell: OwnedFd) -> Self {
        Self { queues: Queues::of_process(memory).unwrap(), bell: Bell::new(bell), address }
    }

    /// A process of a container in `room`, without threads.
    pub(super) fn add(room: &mut Room, container: u64, settings: ShareSettings) -> Self {
        Self::add_by(room, container, settings, UdpSocket::bind("127.0.0.1:0").unwrap())
    }

    /// The same, whose packets take this socket.
    pub(super) fn add_by(
        room: &mut Room,
        container: u64,
        settings: ShareSettings,
        socket: UdpSocket,
    ) -> Self {
        let (ends, served) = service::provide(socket, Config::default(), None, None).unwrap();
        let total = Total { bytes_max: MEMORY_MAX, bytes: AtomicU64::new(0) };
        room.add((1, container), settings, served, Budget::new(MEMORY_MAX, Arc::new(total)));
        let Ends { address, memory, bell, .. } = ends;
        Self::new(address, memory, bell)
    }

    /// Writes an entry, if there is room.
    pub(super) fn write(&mut self, entry: &Entry) {
        let _ = self.queues.writer.push(entry);
        if self.queues.writer.wakes_reader() {
            self.bell.say(&Word::Ring);
        }
    }

    pub(super) fn submit(&mut self, submission: &Submission) {
        self.write(&submission.encode());
    }

    pub(super) fn lend(&self, number: u32, len: usize) {
        assert!(self.bell.try_say(&Word::Grant(number.into(), create(len).unwrap())));
    }

    pub(super) fn event(&mut self) -> Option<Event> {
        self.queues.reader.next().unwrap().map(|entry| Event::decode(&entry).unwrap())
    }
}

/// Serves a process that writes these entries, 128 bytes each. Its peers are itself and unused addresses of this host.
///
/// # Panics
/// If the daemon's side misbehaves: that is what the fuzzer looks for.
pub fn run(data: &[u8]) {
    let mut room = Room::new();
    let mut raw = Raw::add(&mut room, 1, ShareSettings::default());
    raw.submit(&Submission::Open { ticket: 1, number: Some(0) });
    raw.lend(NUMBER, LEN);
    let mut now = 1;
    for bytes in data.chunks_exact(WORDS * size_of::<u64>()) {
        let mut entry: Entry = std::array::from_fn(|word| {
            bytes[word * 8..].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
        });
        if let Some(submission) = Submission::decode(&entry) {
            assert_eq!(Submission::decode(&submission.encode()), Some(submission));
        }
        // Packets stay on this host.
        (entry[5], entry[6]) = (0, 0xffff_7f00_0001);
        let port = if entry[7].is_multiple_of(2) { raw.address.port() } else { 9 };
        entry[7] = (entry[7] & !0xffff) | u64::from(port);
        raw.write(&entry);
        now += 1_000_000;
        room.turn(now);
        while raw.event().is_some() {}
    }
    let report = room.report();
    assert!(report.iter().all(|counters| counters.mapped_bytes <= LEN as u64));
}

/// Runs one input of a fuzz target, and waits for the threads that it has started: a leak detector takes for lost what an ending thread still
/// holds. Nothing else may run in this process.
pub fn alone(run: impl FnOnce()) {
    let before = threads();
    run();
    while threads() > before {
        std::thread::sleep(Duration::from_micros(100));
    }
}

/// Threads of this process, besides the one that closes files and never ends.
fn threads() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").expect("this process").flatten();
    // One that has ended meanwhile has no name.
    let names = tasks.filter_map(|task| std::fs::read(task.path().join("comm")).ok());
    names.filter(|name| !name.starts_with(b"vnet-rdma-close")).count()
}
