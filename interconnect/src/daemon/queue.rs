//! Two queues of entries in memory shared by a process and the daemon: submissions one way, events the other way.
//!
//! ```text
//! file: control of the submissions | control of the events | submissions | events
//! ```
//!
//! Neither side trusts the memory: an entry is copied once before it is parsed, each side keeps its own position in private memory, and a
//! position of the other side is checked when it is read. Positions count entries and never wrap.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use super::entry::{Entry, WORDS};
use super::lent::Lent;
use crate::ring::{Broken, View, create};

/// Entries of the queue of submissions: more than the operations that a process may have under way.
pub(super) const SUBMISSIONS: usize = 2048;
/// Entries of the queue of events. A full queue holds back further completions, which stay in the engine.
pub(super) const EVENTS: usize = 4096;
const CONTROL_BYTES: usize = 4096;
const ENTRY_BYTES: usize = WORDS * size_of::<u64>();
/// Size of the memory of both queues: whole pages.
pub(crate) const FILE_BYTES: usize = 2 * CONTROL_BYTES + (SUBMISSIONS + EVENTS) * ENTRY_BYTES;
const _: () = assert!(size_of::<Control>() <= CONTROL_BYTES && FILE_BYTES.is_multiple_of(4096));

/// Positions of a queue and requests to be woken, in the shared memory, each in cache lines of its own.
#[repr(C)]
struct Control {
    head: Line<AtomicU64>,
    tail: Line<AtomicU64>,
    /// 1: the reader wants the bell to be rung for the next entry.
    asleep: Line<AtomicU32>,
    /// 1: the writer wants the bell to be rung when there is room.
    starved: Line<AtomicU32>,
}

#[repr(C, align(128))]
struct Line<T>(T);

type Cell = [AtomicU64; WORDS];

/// Creates the memory of both queues.
pub(crate) fn provide() -> io::Result<OwnedFd> {
    create(FILE_BYTES)
}

/// One queue in mapped memory.
#[derive(Clone, Copy)]
struct Queue {
    control: *const Control,
    cells: *const Cell,
    entries: u64,
}

// SAFETY: the memory is mapped for the whole process, and its users in other threads are no more than those in other processes.
unsafe impl Send for Queue {}

impl Queue {
    fn control(&self) -> &Control {
        // SAFETY: the mapping outlives the queue, is aligned, and holds only atomic numbers, which others may change at any time.
        unsafe { &*self.control }
    }

    fn cell(&self, position: u64) -> &Cell {
        // SAFETY: the index is below the number of cells in the mapping; the words are atomic.
        unsafe { &*self.cells.add((position % self.entries) as usize) }
    }
}

/// The writer's end.
pub(crate) struct Writer {
    queue: Queue,
    head: u64,
    /// The reader's position when this end last looked.
    tail: u64,
}

impl Writer {
    /// Number of entries that fit.
    pub(super) fn room(&mut self) -> Result<usize, Broken> {
        let filled = |tail: u64| self.head.checked_sub(tail).filter(|filled| *filled <= self.queue.entries);
        // A caller may need room for two.
        if filled(self.tail).is_none_or(|filled| filled + 1 >= self.queue.entries) {
            let tail = self.queue.control().tail.0.load(Ordering::Acquire);
            if tail < self.tail || filled(tail).is_none() {
                return Err(Broken);
            }
            self.tail = tail;
        }
        Ok((self.queue.entries - (self.head - self.tail)) as usize)
    }

    /// Writes an entry. Returns false if there is no room.
    pub(crate) fn push(&mut self, entry: &Entry) -> Result<bool, Broken> {
        if self.room()? == 0 {
            return Ok(false);
        }
        let cell = self.queue.cell(self.head);
        cell.iter().zip(entry).for_each(|(to, word)| to.store(*word, Ordering::Relaxed));
        self.head += 1;
        self.queue.control().head.0.store(self.head, Ordering::Release);
        Ok(true)
    }

    /// Whether the reader sleeps and wants the bell to be rung; then it is rung once.
    pub(crate) fn wakes_reader(&self) -> bool {
        takes(&self.queue.control().asleep.0)
    }

    /// Asks the reader to ring when there is room. Returns true if there is room already.
    pub(super) fn starve(&mut self) -> Result<bool, Broken> {
        self.queue.control().starved.0.store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        Ok(self.room()? > 0)
    }
}

/// The reader's end.
pub(crate) struct Reader {
    queue: Queue,
    tail: u64,
    /// The writer's position when this end last looked.
    head: u64,
}

impl Reader {
    /// Takes the next entry: a private copy.
    pub(crate) fn next(&mut self) -> Result<Option<Entry>, Broken> {
        if self.tail == self.head {
            let head = self.queue.control().head.0.load(Ordering::Acquire);
            if head.checked_sub(self.tail).is_none_or(|filled| filled > self.queue.entries) {
                return Err(Broken);
            }
            self.head = head;
        }
        if self.tail == self.head {
            return Ok(None);
        }
        let mut entry = [0; WORDS];
        let cell = self.queue.cell(self.tail);
        entry.iter_mut().zip(cell).for_each(|(word, from)| *word = from.load(Ordering::Relaxed));
        self.tail += 1;
        self.queue.control().tail.0.store(self.tail, Ordering::Release);
        Ok(Some(entry))
    }

    /// Asks the writer to ring for the next entry. Returns true if one is there already.
    pub(super) fn arm(&self) -> bool {
        let control = self.queue.control();
        control.asleep.0.store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        control.head.0.load(Ordering::Relaxed) != self.tail
    }

    /// Whether the writer has not rung since `arm`.
    pub(super) fn is_armed(&self) -> bool {
        self.queue.control().asleep.0.load(Ordering::Relaxed) == 1
    }

    /// Whether the writer waits for room and wants the bell to be rung; then it is rung once.
    pub(super) fn wakes_writer(&self) -> bool {
        takes(&self.queue.control().starved.0)
    }
}

/// Against `arm` and `starve`: either this side sees the request, or the other side sees what happened before this call.
fn takes(request: &AtomicU32) -> bool {
    fence(Ordering::SeqCst);
    request.load(Ordering::Relaxed) == 1 && request.swap(0, Ordering::Relaxed) == 1
}

/// The mapped memory of both queues, and this side's ends of them.
pub(crate) struct Queues {
    pub(crate) writer: Writer,
    pub(crate) reader: Reader,
    /// Unmapped when both ends are gone.
    _memory: Arc<dyn Lent>,
}

impl Queues {
    /// The daemon's side: reads submissions and writes events.
    pub(super) fn of_daemon(memory: OwnedFd) -> io::Result<Self> {
        Self::of_daemon_in(map(memory)?)
    }

    /// The daemon's side, in memory that a virtual machine has lent.
    pub(super) fn of_daemon_in(memory: Arc<dyn Lent>) -> io::Result<Self> {
        Self::open(memory, |submissions, events| (events, submissions))
    }

    /// The process's side: writes submissions and reads events.
    pub(crate) fn of_process(memory: OwnedFd) -> io::Result<Self> {
        Self::open(map(memory)?, |submissions, events| (submissions, events))
    }

    fn open(memory: Arc<dyn Lent>, ends: impl Fn(Queue, Queue) -> (Queue, Queue)) -> io::Result<Self> {
        let all = memory.span();
        if all.len() != FILE_BYTES {
            return Err(io::Error::other("the memory of the queues has another size"));
        }
        let queue = |number: usize, offset: usize, entries: usize| {
            // SAFETY: both offsets lie within the mapping, whose length was just checked.
            let (control, cells) =
                unsafe { (all.start().add(number * CONTROL_BYTES), all.start().add(offset)) };
            Queue { control: control.cast(), cells: cells.cast(), entries: entries as u64 }
        };
        let submissions = queue(0, 2 * CONTROL_BYTES, SUBMISSIONS);
        let events = queue(1, 2 * CONTROL_BYTES + SUBMISSIONS * ENTRY_BYTES, EVENTS);
        let (out, into) = ends(submissions, events);
        Ok(Self {
            writer: Writer { queue: out, head: 0, tail: 0 },
            reader: Reader { queue: into, tail: 0, head: 0 },
            _memory: memory,
        })
    }
}

fn map(memory: OwnedFd) -> io::Result<Arc<dyn Lent>> {
    let wrong = |_| io::Error::other("the memory of the queues has another size or is not sealed");
    Ok(Arc::new(View::new(memory).map_err(wrong)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> (Queues, Queues) {
        let memory = provide().unwrap();
        (Queues::of_process(memory.try_clone().unwrap()).unwrap(), Queues::of_daemon(memory).unwrap())
    }

    #[test]
    fn entries_arrive_in_order_and_a_full_queue_takes_no_more() {
        let (mut process, mut daemon) = pair();
        for turn in 0..3 {
            for number in 0..SUBMISSIONS as u64 {
                assert!(process.writer.push(&[turn + number; WORDS]).unwrap());
            }
            assert!(!process.writer.push(&[0; WORDS]).unwrap());
            for number in 0..SUBMISSIONS as u64 {
                assert_eq!(daemon.reader.next().unwrap(), Some([turn + number; WORDS]));
            }
            assert_eq!(daemon.reader.next().unwrap(), None);
        }
    }

    /// A process that posts needs two entries: what the reader has taken meanwhile counts before the queue is full.
    #[test]
    fn room_for_two_is_found_before_the_queue_is_full() {
        let (mut process, mut daemon) = pair();
        for _ in 0..3 * SUBMISSIONS {
            assert!(process.writer.room().unwrap() >= 2);
            process.writer.push(&[1; WORDS]).unwrap();
            daemon.reader.next().unwrap();
        }
    }

    #[test]
    fn both_sides_are_woken_once() {
        let (mut process, mut daemon) = pair();
        assert!(!process.writer.wakes_reader());
        assert!(!daemon.reader.arm());
        process.writer.push(&[1; WORDS]).unwrap();
        assert!(process.writer.wakes_reader() && !process.writer.wakes_reader());
        assert!(daemon.reader.arm(), "an entry is there: nobody may sleep");
        while process.writer.push(&[1; WORDS]).unwrap() {}
        assert!(!process.writer.starve().unwrap());
        daemon.reader.next().unwrap();
        assert!(daemon.reader.wakes_writer() && !daemon.reader.wakes_writer());
        assert!(process.writer.starve().unwrap(), "there is room: nobody may sleep");
    }

    #[test]
    fn impossible_positions_break_the_queue() {
        for head in [u64::MAX, SUBMISSIONS as u64 + 1] {
            let (process, mut daemon) = pair();
            process.writer.queue.control().head.0.store(head, Ordering::Relaxed);
            assert!(daemon.reader.next().is_err());
        }
        let (process, mut daemon) = pair();
        while daemon.writer.push(&[1; WORDS]).unwrap() {}
        process.reader.queue.control().tail.0.store(EVENTS as u64 + 1, Ordering::Relaxed);
        assert!(daemon.writer.push(&[1; WORDS]).is_err());
    }
}
