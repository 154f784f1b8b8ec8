//! One direction of a ring: records of one packet each, in a circle of bytes.
//!
//! The writer owns `head` and `asleep` is set by the reader, which owns `tail`. Positions count bytes from the beginning and never
//! wrap. A record begins at a multiple of 64 bytes: a word with the lengths of header and payload, the header, and, if there is a
//! payload, the payload from byte `PAYLOAD_AT` on.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use crate::proto::wire::{COMMON, HEADER_MAX, is_placed};
use crate::proto::{LOCAL_PACKET_MAX, Span};

/// Bytes of a lane: enough for 15 packets of the largest size, so that writer and reader copy at the same time, and few enough to stay in
/// the processors' caches.
pub(super) const LANE_BYTES: usize = 1 << 20;
const RECORD_ALIGN: usize = 64;
const WORD: usize = size_of::<u64>();
/// The first multiple of 64 behind the longest header.
const PAYLOAD_AT: usize = 128;
const _: () = assert!(WORD + HEADER_MAX <= PAYLOAD_AT && LANE_BYTES.is_multiple_of(RECORD_ALIGN));

/// Positions of a lane, in the shared memory, each in cache lines of its own.
#[repr(C)]
pub(super) struct Control {
    head: Line<AtomicU64>,
    tail: Line<AtomicU64>,
    /// 1: the reader wants the bell to be rung.
    asleep: Line<AtomicU32>,
}

#[repr(C, align(128))]
struct Line<T>(T);

/// A lane in mapped memory.
#[derive(Clone, Copy)]
pub(super) struct Lane {
    pub(super) control: *const Control,
    /// `LANE_BYTES` bytes, mapped twice, one behind the other.
    pub(super) data: *mut u8,
}

// SAFETY: the memory is mapped for the whole process, and its users in other threads are no more than those in other processes.
unsafe impl Send for Lane {}

impl Lane {
    fn control(&self) -> &Control {
        // SAFETY: the mapping outlives the lane, is aligned, and holds only atomic numbers, which others may change at any time.
        unsafe { &*self.control }
    }

    /// Address of a position.
    fn at(&self, position: u64) -> *mut u8 {
        // SAFETY: the offset is below `LANE_BYTES`.
        unsafe { self.data.add(position as usize % LANE_BYTES) }
    }

    /// The word at the beginning of a record.
    fn word(&self, position: u64) -> &AtomicU64 {
        debug_assert!(position.is_multiple_of(WORD as u64));
        // SAFETY: the address is inside the mapping and aligned; others may change the number at any time.
        unsafe { &*self.at(position).cast::<AtomicU64>() }
    }
}

/// The peer has written impossible positions or lengths.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the peer has damaged the shared memory")]
pub struct Broken;

fn record_bytes(header: usize, payload: usize) -> usize {
    let bytes = if payload > 0 { PAYLOAD_AT + payload } else { WORD + header };
    bytes.next_multiple_of(RECORD_ALIGN)
}

/// The writer's end.
pub(super) struct Outgoing {
    lane: Lane,
    head: u64,
    /// The reader's position when this end last looked.
    tail: u64,
}

impl Outgoing {
    pub(super) fn new(lane: Lane) -> Self {
        Self { lane, head: 0, tail: 0 }
    }

    /// Writes a packet. Returns false if there is no room.
    pub(super) fn push(&mut self, header: &[u8], payload: Span) -> Result<bool, Broken> {
        if header.len() > HEADER_MAX || header.len() + payload.len() > LOCAL_PACKET_MAX {
            return Ok(false);
        }
        let record = record_bytes(header.len(), payload.len());
        if self.room() < record {
            let tail = self.lane.control().tail.0.load(Ordering::Acquire);
            if tail > self.head || self.head - tail > LANE_BYTES as u64 {
                return Err(Broken);
            }
            self.tail = tail;
            if self.room() < record {
                return Ok(false);
            }
        }
        let to = self.lane.at(self.head);
        // SAFETY: `record` bytes from `to` are inside the twice mapped lane; the header is this process's memory, and the payload a
        // span whose creator guarantees valid memory, which is never that of a ring.
        unsafe {
            to.add(WORD).copy_from_nonoverlapping(header.as_ptr(), header.len());
            to.add(PAYLOAD_AT).copy_from_nonoverlapping(payload.start(), payload.len());
        }
        let lengths = header.len() as u64 | (payload.len() as u64) << 32;
        self.lane.word(self.head).store(lengths, Ordering::Relaxed);
        self.head += record as u64;
        self.lane.control().head.0.store(self.head, Ordering::Release);
        Ok(true)
    }

    fn room(&self) -> usize {
        LANE_BYTES - (self.head - self.tail) as usize
    }

    /// Whether the reader sleeps and wants the bell to be rung; then it is rung once.
    pub(super) fn wakes_peer(&self) -> bool {
        // Against `Incoming::arm`: either this end sees that the reader sleeps, or the reader sees the packet.
        fence(Ordering::SeqCst);
        let asleep = &self.lane.control().asleep.0;
        asleep.load(Ordering::Relaxed) == 1 && asleep.swap(0, Ordering::Relaxed) == 1
    }
}

/// A packet in a lane.
#[derive(Debug)]
pub struct Arrived<'a> {
    /// Private copy of the header, with the payload behind it unless that is in `placed`.
    pub packet: &'a [u8],
    /// Payload of a packet that names its place: in the shared memory, where it may change at any time.
    pub placed: Option<Span>,
}

/// The reader's end.
pub(super) struct Incoming {
    lane: Lane,
    tail: u64,
    /// The writer's position when this end last looked.
    head: u64,
    /// Length of the record that `next` has returned.
    record: u64,
    /// Private copy of the packet.
    packet: Vec<u8>,
}

impl Incoming {
    pub(super) fn new(lane: Lane) -> Self {
        Self { lane, tail: 0, head: 0, record: 0, packet: Vec::with_capacity(HEADER_MAX) }
    }

    pub(super) fn next(&mut self) -> Result<Option<Arrived<'_>>, Broken> {
        if self.tail == self.head {
            let head = self.lane.control().head.0.load(Ordering::Acquire);
            let is_possible = head.checked_sub(self.tail).is_some_and(|filled| filled <= LANE_BYTES as u64);
            if !is_possible || !head.is_multiple_of(RECORD_ALIGN as u64) {
                return Err(Broken);
            }
            self.head = head;
        }
        let filled = (self.head - self.tail) as usize;
        if filled == 0 {
            return Ok(None);
        }
        let lengths = self.lane.word(self.tail).load(Ordering::Relaxed);
        let (header, payload) = (lengths as u32 as usize, (lengths >> 32) as usize);
        if !(COMMON..=HEADER_MAX).contains(&header) || header.saturating_add(payload) > LOCAL_PACKET_MAX {
            return Err(Broken);
        }
        let record = record_bytes(header, payload);
        if record > filled {
            return Err(Broken);
        }
        self.record = record as u64;
        let from = self.lane.at(self.tail);
        self.packet.clear();
        // SAFETY: the record was just checked to be inside the filled part of the twice mapped lane, and the offsets are inside the record.
        let (header, payload) =
            unsafe { (Span::new(from.add(WORD), header), Span::new(from.add(PAYLOAD_AT), payload)) };
        header.read_to(&mut self.packet);
        // The kind comes from the private copy, so it stays what it is.
        let placed = if payload.is_empty() {
            None
        } else if is_placed(self.packet[0]) {
            Some(payload)
        } else {
            payload.read_to(&mut self.packet);
            None
        };
        Ok(Some(Arrived { packet: &self.packet, placed }))
    }

    pub(super) fn release(&mut self) {
        self.tail += std::mem::take(&mut self.record);
        self.lane.control().tail.0.store(self.tail, Ordering::Release);
    }

    /// Asks the writer to ring. Returns true if there is something to read.
    pub(super) fn arm(&self) -> bool {
        let control = self.lane.control();
        control.asleep.0.store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        control.head.0.load(Ordering::Relaxed) != self.tail
    }

    pub(super) fn is_armed(&self) -> bool {
        self.lane.control().asleep.0.load(Ordering::Relaxed) == 1
    }
}
