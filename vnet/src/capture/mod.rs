//! Captures: copies of frames as they pass a port (`vnet capture`).
//!
//! ```text
//!   dispatcher 0 --- lane 0 ---+
//!   dispatcher 1 --- lane 1 ---+--- Session::drain() --- control: pcapng --- client
//! ```
//!
//! A [`Session`] is one capture: a [`Filter`], a snap length, and one *lane* per dispatcher, a buffer of fixed size. A dispatcher
//! appends to its own lane, once for a batch's incoming frames and once per destination. Control swaps full buffers for empty
//! ones; nothing else happens under a lane's lock. A frame that finds its lane full is counted as missed: a slow reader loses
//! frames of the capture, never frames of the network.
//!
//! The setup that dispatchers adopt lists the captured ports. Without captures that list is empty, and checking it costs one read
//! per batch.

mod filter;
mod packet;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use parking_lot::{Mutex, MutexGuard};

pub use filter::{EXPRESSION_MAX, Filter, FilterError, Subject};

use crate::frame::{Batch, FRAME_MAX, Frame, NetworkId};
use crate::stats::DropReason;
use crate::wire::offload::GSO_NONE;

/// Capacity of one session in bytes, all lanes together: the traffic of 5 ms (control's polling interval) at 13 Gbit/s. Twice as
/// much is allocated; unused pages are never touched.
pub const SESSION_BYTES: usize = 8 << 20;
/// Capacity of one lane in records: enough for frames of 256 bytes to fill the lane of a single dispatcher.
const LANE_RECORDS: usize = SESSION_BYTES / 256;
/// Maximum number of concurrent captures per host; bounds their memory and their cost per frame.
pub const SESSIONS_MAX: usize = 4;
/// Minimum snap length in bytes: an Ethernet header.
pub const SNAP_MIN: u32 = 14;

/// Options of a capture.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Frames to capture.
    pub filter: Filter,
    /// Bytes kept of each frame, [`SNAP_MIN`] to [`FRAME_MAX`].
    pub snap: u32,
    /// Capture only dropped frames.
    pub drops_only: bool,
}

impl Default for Options {
    fn default() -> Options {
        Options { filter: Filter::default(), snap: FRAME_MAX as u32, drops_only: false }
    }
}

/// Direction of a frame, seen from the core.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Into the core: from the guest, or from the other host.
    In,
    /// Out of the core: to the guest, or to the other host.
    Out,
}

/// Records that a frame, or some of its segments, were dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dropped {
    /// The reason that counts the drop.
    pub reason: DropReason,
    /// Dropped segments of a super-frame; 1 for other frames.
    pub pieces: u64,
}

/// One captured frame. [`Batched`] stores the captured bytes of all records back to back, in the order of the records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// Time since 1970-01-01 UTC.
    pub at: Duration,
    /// Capture point: an index into [`Session::names`].
    pub place: u16,
    /// Into or out of the core.
    pub direction: Direction,
    /// Network; `None` for a frame refused before its network was known.
    pub network: Option<NetworkId>,
    /// The drop, if the frame was dropped.
    pub dropped: Option<Dropped>,
    /// Payload bytes per segment of a super-frame (`gso_size`).
    pub segment: Option<u16>,
    /// The transport checksum is partial (`VIRTIO_NET_HDR_F_NEEDS_CSUM`).
    pub partial_checksum: bool,
    /// Length of the frame in bytes.
    pub len: u32,
    /// Captured bytes.
    pub kept: u32,
}

/// Captured frames, oldest first.
#[derive(Debug, Default)]
pub struct Batched {
    records: Vec<Record>,
    bytes: Vec<u8>,
}

impl Batched {
    fn with_room(bytes: usize) -> Batched {
        Batched { records: Vec::with_capacity(LANE_RECORDS), bytes: Vec::with_capacity(bytes) }
    }

    /// The records with their captured bytes.
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

/// The part of a session that one dispatcher writes to.
#[derive(Debug)]
pub struct Lane {
    filled: Batched,
    room: usize,
    missed: u64,
}

impl Lane {
    /// Records at most `snap` bytes of a frame and fills in the lengths in `record`, or counts the frame as missed.
    pub fn push(&mut self, record: Record, batch: &Batch, frame: &Frame, snap: u32) {
        let wanted = frame.len().min(snap as usize);
        if !self.has_room(wanted) {
            self.missed += 1;
            return;
        }
        let kept = batch.append_to(frame, wanted, &mut self.filled.bytes) as u32;
        self.filled.records.push(Record { kept, len: frame.len() as u32, ..record });
    }

    /// Records a frame whose bytes are no longer available.
    pub fn push_empty(&mut self, record: Record) {
        if self.has_room(0) {
            self.filled.records.push(Record { kept: 0, ..record });
        } else {
            self.missed += 1;
        }
    }

    /// Counts frames as missed.
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
    /// The empty buffer that [`Session::drain`] swaps for the next lane's full one.
    spare: Mutex<Batched>,
    names: Mutex<Vec<String>>,
    missed: AtomicU64,
    ended: AtomicBool,
}

impl Session {
    /// Creates a session. The lanes of all `dispatchers` dispatchers share its memory.
    pub fn new(options: Options, dispatchers: usize) -> Session {
        let count = dispatchers.max(1);
        // A lane holds at least one frame of any size.
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

    /// Options of the capture.
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// Locks a dispatcher's lane. Hold it only to append frames.
    pub fn lane(&self, dispatcher: usize) -> MutexGuard<'_, Lane> {
        self.lanes[dispatcher % self.lanes.len()].lock()
    }

    /// Calls `each` with the frames captured since the last call, lane by lane, each lane in chronological order. Returns false
    /// when there were none.
    pub fn drain(&self, mut each: impl FnMut(&Batched)) -> bool {
        let mut spare = self.spare.lock();
        let mut any = false;
        for lane in &self.lanes {
            let mut lane = lane.lock();
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

    /// Frames missed because a lane was full, as of the last [`Session::drain`].
    pub fn missed(&self) -> u64 {
        self.missed.load(Relaxed)
    }

    /// Index of a capture point by name; stays the same while the session lives. `None` when there are too many.
    pub fn place(&self, name: &str) -> Option<u16> {
        let mut names = self.names.lock();
        let found = names.iter().position(|known| known == name);
        let index = found.unwrap_or_else(|| {
            names.push(name.into());
            names.len() - 1
        });
        u16::try_from(index).ok().filter(|index| *index != Tap::UNSEEN)
    }

    /// Names of capture points, by index.
    pub fn names(&self) -> Vec<String> {
        self.names.lock().clone()
    }

    /// Ends the session because its reader has disconnected.
    pub fn end(&self) {
        self.ended.store(true, Relaxed);
    }

    /// True after [`Session::end`].
    pub fn is_ended(&self) -> bool {
        self.ended.load(Relaxed)
    }
}

/// A session as part of a setup, with the ports that it captures.
#[derive(Clone, Debug)]
pub struct Tap {
    /// The session.
    pub session: std::sync::Arc<Session>,
    /// Capture point by port index, or [`Tap::UNSEEN`].
    places: Box<[u16]>,
}

impl Tap {
    /// True when the session captures at `port`.
    pub(crate) fn sees(&self, port: crate::frame::PortId) -> bool {
        self.place(port).is_some()
    }

    /// Marks a port that is not captured.
    const UNSEEN: u16 = u16::MAX;

    /// A tap on `ports`, each with its name.
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

    /// The capture point of a port; `None` when the session does not capture there.
    #[inline]
    pub fn place(&self, port: crate::frame::PortId) -> Option<u16> {
        self.places.get(port.index()).copied().filter(|place| *place != Tap::UNSEEN)
    }

    /// True when the session captures at the frame's port and its filter matches the frame.
    #[inline]
    pub fn wants(&self, batch: &Batch, frame: &Frame, direction: Direction) -> bool {
        let inbound = direction == Direction::In;
        let subject = Subject { head: batch.head(frame), len: frame.len(), network: frame.network, inbound };
        self.session.options.filter.matches(&subject)
    }
}

/// Builds the record of a frame in a batch. `kept` is still 0.
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

/// Timestamp for records: time since 1970-01-01 UTC.
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
    fn frames_are_captured_up_to_the_snap_length() {
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
    fn full_lanes_count_missed_frames_and_never_allocate() {
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
    fn capture_points_keep_their_indices() {
        let session = Arc::new(Session::new(Options::default(), 1));
        let tap = Tap::new(session.clone(), [(PortId(5), "b"), (PortId(2), "a")]);
        assert_eq!([5, 2, 1, 9].map(|port| tap.place(PortId(port))), [Some(0), Some(1), None, None]);
        let moved = Tap::new(session.clone(), [(PortId(9), "a"), (PortId(0), "c")]);
        assert_eq!([9, 0, 5].map(|port| moved.place(PortId(port))), [Some(1), Some(2), None]);
        assert_eq!(session.names(), ["b", "a", "c"]);
    }
}
