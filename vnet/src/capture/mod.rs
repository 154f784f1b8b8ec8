//! Captures: frames copied aside where they pass a port, for those who look (`vnet capture`).
//!
//! ```text
//!   dispatcher 0 --- lane 0 ---+
//!   dispatcher 1 --- lane 1 ---+--- Session::drain() --- control: pcapng --- client
//! ```
//!
//! A [`Session`] is one capture: a [`Filter`], a snap length, and a *lane* for each dispatcher, a buffer of fixed size. A
//! dispatcher appends to its own lane, once for the frames of a batch that enter and once for each destination they are given
//! to. Control exchanges full buffers for empty ones, which is all that ever happens under a lane's lock. What finds no room is
//! missed, and counted: a reader who stalls costs frames of the capture, never frames of the network.
//!
//! Which ports a session looks at is part of the setup that dispatchers adopt. When nobody captures, that is one empty list,
//! and looking at it once a batch is all there is to it.

mod filter;
mod packet;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

pub use filter::{EXPRESSION_MAX, Filter, FilterError, Subject};
pub use packet::{Inside, Packet};

use crate::frame::{Batch, FRAME_MAX, Frame, NetworkId};
use crate::stats::DropReason;
use crate::wire::offload::GSO_NONE;

/// Bytes of frames that one session holds, all lanes together: what comes in 5 ms, the time between two looks of control, at
/// 13 Gbit/s. Twice that is allocated, and only what is used is ever touched.
pub const SESSION_BYTES: usize = 8 << 20;
/// Records of one lane: as many frames of 256 bytes as fill its share when there is one dispatcher.
const LANE_RECORDS: usize = SESSION_BYTES / 256;
/// Captures at a time, on one host. Bounds their memory and what they cost every frame.
pub const SESSIONS_MAX: usize = 4;
/// Smallest snap length: an Ethernet header.
pub const SNAP_MIN: u32 = 14;

/// What is captured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Which frames.
    pub filter: Filter,
    /// Bytes kept of each, [`SNAP_MIN`] to [`FRAME_MAX`].
    pub snap: u32,
    /// Only frames that are dropped.
    pub drops_only: bool,
}

impl Default for Options {
    fn default() -> Options {
        Options { filter: Filter::default(), snap: FRAME_MAX as u32, drops_only: false }
    }
}

/// Which way a frame went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Into the core: from the guest, or from the other host.
    In,
    /// Out of the core: to the guest, or to the other host.
    Out,
}

/// Why a frame, or part of it, got no further.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dropped {
    /// The reason it is counted under.
    pub reason: DropReason,
    /// How many of the pieces that a super-frame was cut into; 1 for others.
    pub pieces: u64,
}

/// One captured frame; its bytes follow those of the record before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// Since 1970-01-01 UTC.
    pub at: Duration,
    /// Where: index of a name of [`Session::names`].
    pub place: u16,
    /// Which way.
    pub direction: Direction,
    /// Network; `None` for what was refused before that was known.
    pub network: Option<NetworkId>,
    /// What became of it.
    pub dropped: Option<Dropped>,
    /// Payload bytes of each segment, for a super-frame.
    pub segment: Option<u16>,
    /// Its checksum was left to be completed further on.
    pub partial_checksum: bool,
    /// Bytes of the frame.
    pub len: u32,
    /// Bytes kept of it.
    pub kept: u32,
}

/// Frames taken out of a session, oldest first.
#[derive(Debug, Default)]
pub struct Batched {
    records: Vec<Record>,
    bytes: Vec<u8>,
}

impl Batched {
    fn with_room(bytes: usize) -> Batched {
        Batched { records: Vec::with_capacity(LANE_RECORDS), bytes: Vec::with_capacity(bytes) }
    }

    /// The frames with their bytes.
    pub fn frames(&self) -> impl Iterator<Item = (&Record, &[u8])> {
        let mut rest = &self.bytes[..];
        self.records.iter().map(move |record| {
            let (bytes, after) = rest.split_at(record.kept as usize);
            rest = after;
            (record, bytes)
        })
    }

    /// True when nothing was captured.
    pub fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    fn clear(&mut self) {
        self.records.clear();
        self.bytes.clear();
    }
}

/// One dispatcher's end of a session.
#[derive(Debug)]
pub struct Lane {
    filled: Batched,
    room: usize,
    missed: u64,
}

impl Lane {
    /// Keeps a frame, or counts it as missed. `record` says all but the bytes.
    pub fn push(&mut self, record: Record, batch: &Batch, frame: &Frame, snap: u32) {
        let wanted = frame.len().min(snap as usize);
        if !self.has_room(wanted) {
            self.missed += 1;
            return;
        }
        let kept = batch.append_to(frame, wanted, &mut self.filled.bytes) as u32;
        self.filled.records.push(Record { kept, len: frame.len() as u32, ..record });
    }

    /// Keeps what is known of a frame whose bytes are gone.
    pub fn push_empty(&mut self, record: Record) {
        if self.has_room(0) {
            self.filled.records.push(Record { kept: 0, ..record });
        } else {
            self.missed += 1;
        }
    }

    /// Counts frames that could not even be looked at.
    pub fn miss(&mut self, frames: u64) {
        self.missed += frames;
    }

    fn has_room(&self, bytes: usize) -> bool {
        self.filled.records.len() < LANE_RECORDS && self.filled.bytes.len() + bytes <= self.room
    }
}

/// One capture.
#[derive(Debug)]
pub struct Session {
    options: Options,
    lanes: Box<[Mutex<Lane>]>,
    /// What is exchanged for a lane's full buffer.
    spare: Mutex<Batched>,
    names: Mutex<Vec<String>>,
    missed: AtomicU64,
    ended: AtomicBool,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Session {
    /// A session for so many dispatchers, which share its memory.
    pub fn new(options: Options, dispatchers: usize) -> Session {
        let count = dispatchers.max(1);
        // At least one frame fits, whatever its size.
        let room = (SESSION_BYTES / count).max(FRAME_MAX);
        let lane = || Mutex::new(Lane { filled: Batched::with_room(room), room, missed: 0 });
        Session {
            options,
            lanes: (0..count).map(|_| lane()).collect(),
            spare: Mutex::new(Batched::with_room(room)),
            names: Mutex::default(),
            missed: AtomicU64::new(0),
            ended: AtomicBool::new(false),
        }
    }

    /// What is captured.
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// The lane of a dispatcher. Held only while frames are appended or buffers exchanged.
    pub fn lane(&self, dispatcher: usize) -> MutexGuard<'_, Lane> {
        locked(&self.lanes[dispatcher % self.lanes.len()])
    }

    /// Has `each` look at what was captured since the last call: lane by lane, each in order of time. Returns whether there was
    /// anything.
    pub fn drain(&self, mut each: impl FnMut(&Batched)) -> bool {
        let mut spare = locked(&self.spare);
        let mut any = false;
        for lane in &self.lanes {
            let mut lane = locked(lane);
            std::mem::swap(&mut lane.filled, &mut spare);
            let missed = std::mem::take(&mut lane.missed);
            drop(lane);
            self.missed.fetch_add(missed, Relaxed);
            if !spare.is_empty() {
                any = true;
                each(&spare);
            }
            spare.clear();
        }
        any
    }

    /// Frames that found no room, as of the last [`Session::drain`].
    pub fn missed(&self) -> u64 {
        self.missed.load(Relaxed)
    }

    /// The index of a place's name, the same for the whole life of the session. `None` when there are too many.
    pub fn place(&self, name: &str) -> Option<u16> {
        let mut names = locked(&self.names);
        let found = names.iter().position(|known| known == name);
        let index = found.unwrap_or_else(|| {
            names.push(name.into());
            names.len() - 1
        });
        u16::try_from(index).ok().filter(|index| *index != Tap::UNSEEN)
    }

    /// Names of places, by index.
    pub fn names(&self) -> Vec<String> {
        locked(&self.names).clone()
    }

    /// Nobody reads it any more.
    pub fn end(&self) {
        self.ended.store(true, Relaxed);
    }

    /// Whether it was ended.
    pub fn is_ended(&self) -> bool {
        self.ended.load(Relaxed)
    }
}

/// A session in a setup: the ports it looks at.
#[derive(Clone, Debug)]
pub struct Tap {
    /// The session.
    pub session: std::sync::Arc<Session>,
    /// By port index: the place's index, or [`Tap::UNSEEN`].
    places: Box<[u16]>,
}

impl Tap {
    /// Where the session does not look.
    pub const UNSEEN: u16 = u16::MAX;

    /// A session that looks at the ports of this list, each with its name.
    pub fn new<'a>(
        session: std::sync::Arc<Session>,
        ports: impl IntoIterator<Item = (crate::frame::PortId, &'a str)>,
    ) -> Tap {
        let mut places = vec![];
        for (port, name) in ports {
            if places.len() <= port.index() {
                places.resize(port.index() + 1, Tap::UNSEEN);
            }
            places[port.index()] = session.place(name).unwrap_or(Tap::UNSEEN);
        }
        Tap { session, places: places.into() }
    }

    /// The place of a port, if the session looks at it.
    #[inline]
    pub fn place(&self, port: crate::frame::PortId) -> Option<u16> {
        self.places.get(port.index()).copied().filter(|place| *place != Tap::UNSEEN)
    }

    /// Whether the session wants a frame that passes a port it looks at.
    #[inline]
    pub fn wants(&self, batch: &Batch, frame: &Frame, direction: Direction) -> bool {
        let inbound = direction == Direction::In;
        let subject = Subject { head: batch.head(frame), len: frame.len(), network: frame.network, inbound };
        self.session.options.filter.matches(&subject)
    }
}

/// The record of a frame in a batch.
pub fn record(
    at: Duration,
    place: u16,
    direction: Direction,
    frame: &Frame,
    dropped: Option<Dropped>,
) -> Record {
    Record {
        at,
        place,
        direction,
        network: Some(frame.network),
        dropped,
        segment: (frame.offload.gso_type != GSO_NONE).then_some(frame.offload.gso_size),
        partial_checksum: frame.offload.flags & crate::wire::offload::F_NEEDS_CSUM != 0,
        len: frame.len() as u32,
        kept: 0,
    }
}

/// The time that records are given: since 1970-01-01 UTC.
pub fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::{Origin, PortId};
    use crate::wire::offload::Offload;
    use std::sync::Arc;

    fn batch(lens: &[usize]) -> Batch {
        let mut batch = Batch::new();
        for len in lens {
            let origin = Origin { port: PortId(2), network: NetworkId::DEFAULT };
            batch.spare(*len).unwrap()[..*len].fill(*len as u8);
            batch.push_spare(0, *len, origin, Offload::default()).unwrap();
        }
        batch
    }

    fn push(session: &Session, batch: &Batch, index: usize, snap: u32) {
        let frame = batch.frame(index);
        session.lane(0).push(record(now(), 0, Direction::In, frame, None), batch, frame, snap);
    }

    fn drained(session: &Session) -> Vec<(u32, usize, Option<u8>)> {
        let mut found = vec![];
        session.drain(|batched| {
            found.extend(batched.frames().map(|(r, bytes)| (r.len, bytes.len(), bytes.last().copied())));
        });
        found
    }

    #[test]
    fn frames_come_out_as_they_went_in_cut_to_the_snap_length() {
        let session = Session::new(Options::default(), 2);
        let batch = batch(&[60, 1500, 60_000]);
        for (index, snap) in [(0, 100), (1, 100), (2, 65_553), (0, 14)] {
            push(&session, &batch, index, snap);
        }
        session.lane(1).push_empty(record(now(), 0, Direction::Out, batch.frame(1), None));
        assert_eq!(
            drained(&session),
            [
                (60, 60, Some(60)),
                (1500, 100, Some(220)),
                (60_000, 60_000, Some(96)),
                (60, 14, Some(60)),
                (1500, 0, None)
            ]
        );
        assert_eq!((drained(&session), session.missed()), (vec![], 0));
    }

    #[test]
    fn what_finds_no_room_is_counted_and_nothing_is_allocated() {
        let session = Session::new(Options::default(), 64);
        let batch = batch(&[60_000, 14]);
        let room = session.lane(0).filled.bytes.capacity();
        (0..10).for_each(|_| push(&session, &batch, 0, u32::MAX));
        assert_eq!(session.lane(0).filled.bytes.capacity(), room);
        assert_eq!((drained(&session).len(), session.missed()), (room / 60_000, 10 - room as u64 / 60_000));
        let session = Session::new(Options::default(), 1);
        (0..LANE_RECORDS + 3).for_each(|_| push(&session, &batch, 1, SNAP_MIN));
        session.lane(0).miss(2);
        assert_eq!((drained(&session).len(), session.missed()), (LANE_RECORDS, 5));
    }

    #[test]
    fn places_keep_their_numbers() {
        let session = Arc::new(Session::new(Options::default(), 1));
        let tap = Tap::new(session.clone(), [(PortId(5), "b"), (PortId(2), "a")]);
        assert_eq!([5, 2, 1, 9].map(|port| tap.place(PortId(port))), [Some(0), Some(1), None, None]);
        let moved = Tap::new(session.clone(), [(PortId(9), "a"), (PortId(0), "c")]);
        assert_eq!([9, 0, 5].map(|port| moved.place(PortId(port))), [Some(1), Some(2), None]);
        assert_eq!(session.names(), ["b", "a", "c"]);
    }
}
