//! A bounded queue of frames between a dispatcher and a program, with a descriptor that is readable while frames wait.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;
use rustix::event::{EventfdFlags, eventfd};

use crate::wire::offload::Offload;

/// A frame outside a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// The frame's bytes.
    pub bytes: Vec<u8>,
    /// Its offload metadata.
    pub offload: Offload,
    /// It was sent by the guest, or by the program in the guest's name; false: it was received from the network.
    pub is_local: bool,
}

#[derive(Default)]
struct Queue {
    messages: VecDeque<Message>,
    bytes: usize,
    /// The descriptor is readable.
    is_rung: bool,
}

pub(super) struct Mailbox {
    queue: Mutex<Queue>,
    /// Length of the queue, for a look without the lock.
    len: AtomicUsize,
    bell: OwnedFd,
    frames_max: usize,
    bytes_max: usize,
}

impl Mailbox {
    pub(super) fn new(frames_max: usize, bytes_max: usize) -> io::Result<Mailbox> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Mailbox { queue: Mutex::default(), len: AtomicUsize::new(0), bell, frames_max, bytes_max })
    }

    /// Appends a message. Returns false if there is no room.
    pub(super) fn put(&self, message: Message) -> bool {
        let mut queue = self.queue.lock();
        let bytes = queue.bytes + message.bytes.len();
        if queue.messages.len() >= self.frames_max || bytes > self.bytes_max {
            return false;
        }
        queue.bytes = bytes;
        queue.messages.push_back(message);
        self.len.store(queue.messages.len(), Ordering::Relaxed);
        self.ring_locked(&mut queue);
        true
    }

    /// Takes the oldest message. When none is left, the descriptor is not readable any more.
    pub(super) fn take(&self) -> Option<Message> {
        let mut queue = self.queue.lock();
        let message = queue.messages.pop_front();
        queue.bytes -= message.as_ref().map_or(0, |message| message.bytes.len());
        self.len.store(queue.messages.len(), Ordering::Relaxed);
        if queue.messages.is_empty() && std::mem::take(&mut queue.is_rung) {
            // Under the lock: a later `put` rings again.
            let _ = rustix::io::read(&self.bell, &mut [0; 8]);
        }
        message
    }

    /// True if no message waits. A `put` by another thread at this moment may not be seen; it rings the bell.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.len.load(Ordering::Relaxed) == 0
    }

    /// Makes the descriptor readable until the next `take`.
    pub(super) fn ring(&self) {
        self.ring_locked(&mut self.queue.lock());
    }

    fn ring_locked(&self, queue: &mut Queue) {
        if !std::mem::replace(&mut queue.is_rung, true) {
            // Fails only if the counter is full; the eventfd is readable then.
            let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
        }
    }

    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }
}
