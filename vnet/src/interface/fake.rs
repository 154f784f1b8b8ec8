//! An interface without a guest: frames are put in and taken out by the program itself. For tests, and for programs that
//! embed the core.

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};

use super::{Interface, State, exceeds_mtu};
use crate::frame::{Batch, Origin, Segment};
use crate::poll::Waker;
use crate::stats::{DropReason, PortStats};
use crate::wire::offload::{Accepts, Offload};

/// A frame outside a batch: its bytes and what is left to do on them.
pub type OwnedFrame = (Vec<u8>, Offload);

#[derive(Default)]
struct Queues {
    from_guest: VecDeque<OwnedFrame>,
    to_guest: VecDeque<OwnedFrame>,
    waker: Option<Waker>,
    armed: bool,
}

/// An interface whose guest is this program.
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
    /// An interface that holds at most `room` delivered frames until they are taken.
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

    fn queues(&self) -> MutexGuard<'_, Queues> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends frames as the guest would: all at once, with one notification if it was asked for.
    pub fn send(&self, frames: impl IntoIterator<Item = OwnedFrame>) {
        let mut queues = self.queues();
        queues.from_guest.extend(frames);
        if std::mem::take(&mut queues.armed) {
            // The counter cannot overflow: it is written once for each time it was armed.
            let _ = rustix::io::write(&self.kick, &1u64.to_ne_bytes());
        }
    }

    /// Takes all frames delivered so far.
    pub fn take(&self) -> Vec<OwnedFrame> {
        self.queues().to_guest.drain(..).collect()
    }

    /// Takes `count` delivered frames, waiting for them at most `timeout`; fewer when it passed.
    pub fn wait_for(&self, count: usize, timeout: Duration) -> Vec<OwnedFrame> {
        let deadline = Instant::now() + timeout;
        let mut queues = self.queues();
        while queues.to_guest.len() < count {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            (queues, _) = self.arrived.wait_timeout(queues, left).unwrap_or_else(PoisonError::into_inner);
        }
        let count = count.min(queues.to_guest.len());
        queues.to_guest.drain(..count).collect()
    }
}

impl Interface for Fake {
    fn queues(&self) -> usize {
        1
    }

    fn receive(&self, _queue: usize, batch: &mut Batch, run: &mut dyn FnMut(&Batch)) -> usize {
        if self.stopped.load(Relaxed) {
            return 0;
        }
        let taken: Vec<OwnedFrame> = {
            let mut queues = self.queues();
            let count = queues.from_guest.len().min(batch.limit());
            queues.from_guest.drain(..count).collect()
        };
        for (bytes, offload) in &taken {
            let mut builder = batch.begin();
            // SAFETY: `taken` lives, unchanged, until after the batch is cleared below.
            unsafe { builder.push_stable(Segment::new(bytes.as_ptr(), bytes.len())) };
            match builder.finish(self.origin.port, self.origin.network, *offload, 0) {
                Ok(()) => {
                    self.stats.in_frames.add(1);
                    self.stats.in_bytes.add(bytes.len() as u64);
                }
                Err(error) => self.stats.refuse(error.into(), bytes.len() as u64),
            }
        }
        if !batch.is_empty() {
            run(batch);
            batch.clear();
        }
        taken.len()
    }

    fn deliver(&self, _queue: usize, batch: &Batch, which: &[u16]) {
        let mut queues = self.queues();
        for &index in which {
            let frame = batch.frame(index.into());
            let reason = if self.stopped.load(Relaxed) {
                DropReason::NotReady
            } else if exceeds_mtu(frame, self.mtu) {
                DropReason::MtuExceeded
            } else if queues.to_guest.len() >= self.room {
                DropReason::NoBuffer
            } else {
                let mut bytes = vec![0; frame.len()];
                batch.copy_to(frame, &mut bytes);
                debug_assert!(frame.offload.fits(&Accepts::ALL));
                queues.to_guest.push_back((bytes, frame.offload));
                self.stats.delivered(1, frame.len() as u64);
                continue;
            };
            self.stats.drop_frames(reason, 1);
        }
        self.arrived.notify_all();
    }

    fn attach(&self, _queue: usize, waker: Waker) {
        if let Err(error) = waker.watch(&self.kick) {
            tracing::error!(%error, "cannot watch a fake interface");
        }
        self.queues().waker = Some(waker);
    }

    fn detach(&self, _queue: usize) {
        if let Some(waker) = self.queues().waker.take() {
            waker.forget(self.kick.as_fd());
        }
    }

    fn arm(&self, _queue: usize) -> bool {
        let mut queues = self.queues();
        queues.armed = queues.from_guest.is_empty();
        queues.armed
    }

    fn disarm(&self, _queue: usize) {
        self.queues().armed = false;
    }

    fn polls(&self) -> bool {
        true
    }

    fn state(&self) -> State {
        if self.stopped.load(Relaxed) { State::Down("stopped".into()) } else { State::Up }
    }

    fn stop(&self) {
        self.stopped.store(true, Relaxed);
    }
}
