//! An interface without a guest: the program itself sends and receives frames. Used by tests and by programs that embed the core.

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use rustix::event::{EventfdFlags, eventfd};

use super::{Interface, State, exceeds_mtu};
use crate::frame::{Batch, DropSink, Origin, Segment, Selection};
use crate::poll::Waker;
use crate::source::{Source, Taken};
use crate::stats::{DropReason, PortStats};
use crate::wire::offload::{Accepts, Offload};

/// A frame outside a batch: its bytes and offload metadata.
pub type OwnedFrame = (Vec<u8>, Offload);

#[derive(Default)]
struct Queues {
    from_guest: VecDeque<OwnedFrame>,
    to_guest: VecDeque<OwnedFrame>,
    armed: bool,
}

/// An interface whose guest is the calling program.
pub struct Fake {
    origin: Origin,
    mtu: usize,
    room: usize,
    stats: Arc<PortStats>,
    queues: Mutex<Queues>,
    arrived: Condvar,
    kick: OwnedFd,
    stopped: AtomicBool,
}

impl Fake {
    /// Creates an interface that queues at most `room` delivered frames until they are taken.
    ///
    /// # Errors
    /// The process is out of file descriptors.
    pub fn new(origin: Origin, mtu: usize, room: usize, stats: Arc<PortStats>) -> std::io::Result<Arc<Fake>> {
        Ok(Arc::new(Fake {
            origin,
            mtu,
            room,
            stats,
            queues: Mutex::default(),
            arrived: Condvar::new(),
            kick: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            stopped: AtomicBool::new(false),
        }))
    }

    /// Sends frames as a guest would: all at once, with one notification if the dispatcher requested one.
    pub fn send(&self, frames: impl IntoIterator<Item = OwnedFrame>) {
        let mut queues = self.queues.lock();
        queues.from_guest.extend(frames);
        if std::mem::take(&mut queues.armed) {
            // The counter cannot overflow: there is at most one write per arming.
            let _ = rustix::io::write(&self.kick, &1u64.to_ne_bytes());
        }
    }

    /// Takes all frames delivered so far.
    pub fn take(&self) -> Vec<OwnedFrame> {
        self.queues.lock().to_guest.drain(..).collect()
    }

    /// Takes `count` delivered frames, or fewer if `timeout` expires first.
    pub fn wait_for(&self, count: usize, timeout: Duration) -> Vec<OwnedFrame> {
        let deadline = Instant::now() + timeout;
        let mut queues = self.queues.lock();
        while queues.to_guest.len() < count {
            if self.arrived.wait_until(&mut queues, deadline).timed_out() {
                break;
            }
        }
        let count = count.min(queues.to_guest.len());
        queues.to_guest.drain(..count).collect()
    }
}

impl Interface for Fake {
    fn queues(&self) -> usize {
        1
    }

    fn source(self: Arc<Self>, _queue: usize) -> Box<dyn Source> {
        Box::new(FakeSource { fake: self, taken: Vec::new(), waker: None })
    }

    fn deliver(&self, _queue: usize, frames: Selection<'_>, drops: &mut DropSink) {
        let mut queues = self.queues.lock();
        for (index, frame) in frames.frames() {
            let reason = if self.stopped.load(Relaxed) {
                DropReason::NotReady
            } else if exceeds_mtu(frame, self.mtu) {
                self.stats.last_oversize.note(frame.sent());
                DropReason::MtuExceeded
            } else if queues.to_guest.len() >= self.room {
                DropReason::NoBuffer
            } else {
                let mut bytes = vec![0; frame.len()];
                frames.batch.copy_to(frame, &mut bytes);
                debug_assert!(frame.offload.fits(&Accepts::ALL));
                queues.to_guest.push_back((bytes, frame.offload));
                self.stats.delivered(1, frame.len() as u64);
                continue;
            };
            drops.dropped(&self.stats, reason, index, 1);
        }
        self.arrived.notify_all();
    }

    fn state(&self) -> State {
        if self.stopped.load(Relaxed) { State::Down("stopped".into()) } else { State::Up }
    }

    fn stop(&self) {
        self.stopped.store(true, Relaxed);
    }
}

/// Source of the frames that the program sends.
struct FakeSource {
    fake: Arc<Fake>,
    /// Frames of the last fill.
    taken: Vec<OwnedFrame>,
    waker: Option<Waker>,
}

impl Source for FakeSource {
    // SAFETY: frames lie in `taken`, which stays unchanged until `give_back`.
    unsafe fn fill(&mut self, batch: &mut Batch, drops: &mut DropSink, _now_ms: u64) -> Taken {
        let fake = &*self.fake;
        if fake.stopped.load(Relaxed) {
            return Taken { drained: true, ..Taken::default() };
        }
        {
            let mut queues = fake.queues.lock();
            let count = queues.from_guest.len().min(batch.limit());
            self.taken.extend(queues.from_guest.drain(..count));
        }
        let mut units = 0;
        for (bytes, offload) in &self.taken {
            if batch.is_spent() {
                break;
            }
            units += 1;
            let mut builder = batch.begin();
            // SAFETY: `taken` stays unchanged until `give_back`, and the batch is cleared before that call.
            unsafe { builder.push_stable(Segment::new(bytes.as_ptr(), bytes.len())) };
            match builder.finish(fake.origin.port, fake.origin.network, *offload, 0) {
                Ok(()) => {
                    fake.stats.in_frames.add(1);
                    fake.stats.in_bytes.add(bytes.len() as u64);
                }
                Err(error) => {
                    drops.refused(&fake.stats, fake.origin.port, error.into(), bytes.len() as u64);
                }
            }
        }
        let left = self.taken.len() - units;
        if left > 0 {
            let mut queues = fake.queues.lock();
            // The batch refers to the bytes of the frames before them, which do not move.
            self.taken.drain(units..).rev().for_each(|frame| queues.from_guest.push_front(frame));
        }
        Taken { units, drained: units < batch.limit() && !batch.is_spent(), ..Taken::default() }
    }

    fn give_back(&mut self) {
        self.taken.clear();
    }

    fn watch(&mut self, waker: Waker) {
        if let Err(error) = waker.watch(&self.fake.kick) {
            tracing::error!(%error, "cannot watch a fake interface");
        }
        self.waker = Some(waker);
    }

    fn unwatch(&mut self) {
        if let Some(waker) = self.waker.take() {
            waker.forget(self.fake.kick.as_fd());
        }
    }

    fn rest(&mut self) -> bool {
        let mut queues = self.fake.queues.lock();
        queues.armed = queues.from_guest.is_empty();
        queues.armed
    }

    fn resume(&mut self) {
        self.fake.queues.lock().armed = false;
    }

    fn polls(&self) -> bool {
        true
    }
}
