//! Whole datagrams: fragments of a datagram of which the kernel's queue has lost a part go no further.
//!
//! A sender that is faster than the dispatcher fills the queue ([`queue_len`](super::queue_len)), and the kernel drops what does not fit. It drops
//! fragments, not datagrams: of 44 fragments of 64 000 bytes some are lost nearly every time. The others would cost this host and
//! the next one their work in vain, and the receiving kernel its reassembly memory for 30 s, so that no large datagram would arrive any
//! more. So while the queue is that full, a datagram's fragments wait until the last one has been read; if one is missing, all others are
//! dropped, and counted. A dropped fragment costs a tenth of a forwarded one, so the dispatcher catches up and whole datagrams fit again.
//!
//! Fragments wait only behind a full queue: the kernel can have lost frames only if the dispatcher has read [`BACKLOG`] frames without
//! finding the queue empty. They wait for at most one turn if the queue is empty, and for [`STALE`] further frames otherwise. Fragments of a
//! datagram whose beginning nobody has seen pass, unless the queue has lost frames lately. Only then it matters that fragments arrive in
//! order, as hosts send them.

use super::queue_len::QUEUE_LEN_MAX;
use crate::frame::{Batch, Origin};
use crate::wire::ip::{self, Fragment};
use crate::wire::offload::{Offload, VIRTIO_NET_HDR_LEN};

/// Frames read since the queue was empty, from which on frames may have been lost: half of the kernel's default queue length.
const BACKLOG: u64 = 500;
/// Frames after the last loss during which more is expected: the longest queue.
const LOSS_WINDOW: u64 = QUEUE_LEN_MAX as u64;
/// Datagrams of which fragments are tracked at the same time: one for each thread of a guest that sends.
const CHAINS_MAX: usize = 8;
/// A datagram that makes no progress for this number of frames has lost its end: two of the largest from each of the other threads of a
/// two-processor guest.
const STALE: u64 = 128;
/// Most bytes of fragments that wait for the next turn: two datagrams with their headers.
const HELD_MAX: usize = 160 << 10;

/// What is known of a datagram.
#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    /// Its fragments wait for the last one.
    Waiting,
    /// Its fragments pass.
    Passing,
    /// One is missing: the others are dropped.
    Broken,
}

/// The fragments of a datagram so far.
#[derive(Clone, Copy)]
struct Chain {
    datagram: u64,
    state: State,
    /// Where the next fragment begins.
    next: u32,
    /// Number of the frame that was its last fragment.
    seen: u64,
}

/// The datagrams of one queue.
#[derive(Default)]
pub(super) struct Datagrams {
    /// Frames read.
    read: u64,
    /// Frames read when the queue was last empty.
    empty: u64,
    lost: Option<u64>,
    chains: Vec<Chain>,
    /// Fragments of the batch that wait: index and datagram.
    waiting: Vec<(usize, u64)>,
    /// Fragments of the batch to be dropped.
    broken: Vec<usize>,
    /// Fragments that wait for the next batch: length and datagram, and their bytes.
    held: Vec<(usize, u64)>,
    bytes: Vec<u8>,
}

impl Datagrams {
    /// True while fragments wait for the next batch.
    pub(super) fn holds(&self) -> bool {
        !self.held.is_empty()
    }

    /// Adds the fragments that have waited to an empty batch.
    #[inline]
    pub(super) fn begin(&mut self, batch: &mut Batch, origin: Origin) {
        if !self.held.is_empty() {
            self.restore(batch, origin);
        }
    }

    #[cold]
    fn restore(&mut self, batch: &mut Batch, origin: Origin) {
        let mut bytes = &self.bytes[..];
        for &(len, datagram) in &self.held {
            let (frame, rest) = bytes.split_at(len);
            bytes = rest;
            let whole = VIRTIO_NET_HDR_LEN + len;
            // There is room: the batch is empty, and `HELD_MAX` is less than its memory.
            let Some(room) = batch.spare(whole) else { break };
            room[VIRTIO_NET_HDR_LEN..whole].copy_from_slice(frame);
            if batch.push_spare(VIRTIO_NET_HDR_LEN, whole, origin, Offload::default()).is_ok() {
                self.waiting.push((batch.len() - 1, datagram));
            }
        }
        self.held.clear();
        self.bytes.clear();
    }

    /// Takes note of the last frame of the batch.
    #[inline]
    pub(super) fn read(&mut self, batch: &Batch) {
        self.read += 1;
        if self.watches() {
            self.look(batch);
        }
    }

    fn watches(&self) -> bool {
        self.read - self.empty > BACKLOG || self.loses()
    }

    /// True while the queue loses frames.
    fn loses(&self) -> bool {
        self.lost.is_some_and(|at| self.read - at < LOSS_WINDOW)
    }

    #[cold]
    fn look(&mut self, batch: &Batch) {
        let index = batch.len() - 1;
        let head = batch.head(batch.frame(index));
        let Some((offset, header)) = ip::in_frame(head) else { return };
        if let Some(fragment) = header.fragment(&head[offset..]) {
            let datagram =
                u64::from(crate::wire::flow::hash(head)) << 32 | u64::from(fragment.identification);
            self.arrives(index, datagram, &fragment);
        }
    }

    /// Decides about a fragment, the frame `index` of the batch, and about those of its datagram that wait.
    fn arrives(&mut self, index: usize, datagram: u64, fragment: &Fragment) {
        let read = self.read;
        let Some(at) = self.chains.iter().position(|chain| chain.datagram == datagram) else {
            if fragment.start == 0 {
                self.open(Chain { datagram, state: State::Waiting, next: fragment.end, seen: read });
                self.waiting.push((index, datagram));
            } else if self.loses() {
                // Its beginning is lost.
                self.lost = Some(read);
                self.broken.push(index);
            }
            return;
        };
        let chain = &mut self.chains[at];
        if chain.state != State::Broken && fragment.start != chain.next {
            chain.state = State::Broken;
            self.lost = Some(read);
        }
        (chain.next, chain.seen) = (fragment.end, read);
        match chain.state {
            State::Waiting => self.waiting.push((index, datagram)),
            State::Passing => {}
            State::Broken => {
                self.break_off(datagram);
                self.broken.push(index);
            }
        }
        if fragment.last {
            self.chains.swap_remove(at);
            self.waiting.retain(|waiting| waiting.1 != datagram);
        }
    }

    /// Tracks another datagram instead of the one without progress for longest.
    fn open(&mut self, chain: Chain) {
        if self.chains.len() == CHAINS_MAX {
            let oldest = (0..CHAINS_MAX).min_by_key(|&at| self.chains[at].seen).unwrap_or(0);
            if self.chains[oldest].state == State::Waiting {
                self.give_up(oldest);
            }
            self.chains.swap_remove(oldest);
        }
        self.chains.push(chain);
    }

    /// Waits no longer for a datagram's end: it is lost, or may not have been sent yet.
    fn give_up(&mut self, at: usize) {
        let idle = self.read - self.chains[at].seen;
        let lost = self.loses() && idle >= CHAINS_MAX as u64;
        let chain = &mut self.chains[at];
        let datagram = chain.datagram;
        chain.state = if lost { State::Broken } else { State::Passing };
        if lost {
            self.lost = Some(self.read);
            self.break_off(datagram);
        } else {
            self.waiting.retain(|waiting| waiting.1 != datagram);
        }
    }

    /// Drops the waiting fragments of a datagram.
    fn break_off(&mut self, datagram: u64) {
        let Datagrams { waiting, broken, .. } = self;
        waiting.retain(|&(index, of)| {
            if of == datagram {
                broken.push(index);
            }
            of != datagram
        });
    }

    /// Ends a turn that has read all that was there (`empty`) or a batch. Removes from the batch the fragments that wait for the next turn, and
    /// those to be dropped, whose lengths `drop` gets.
    #[inline]
    pub(super) fn end(&mut self, batch: &mut Batch, empty: bool, drop: impl FnMut(usize)) {
        if !self.waiting.is_empty() || !self.broken.is_empty() {
            self.settle(batch, empty, drop);
        }
        if empty {
            self.empty = self.read;
        }
    }

    #[cold]
    fn settle(&mut self, batch: &mut Batch, empty: bool, mut drop: impl FnMut(usize)) {
        let len = |index: usize| batch.frame(index).len();
        for at in 0..self.chains.len() {
            let Chain { state, seen, .. } = self.chains[at];
            if state == State::Waiting && (empty || self.read - seen > STALE) {
                self.give_up(at);
            }
        }
        while self.waiting.len() >= batch.limit()
            || self.waiting.iter().map(|&(index, _)| len(index)).sum::<usize>() > HELD_MAX
        {
            let waiting = (0..self.chains.len()).filter(|&at| self.chains[at].state == State::Waiting);
            match waiting.min_by_key(|&at| self.chains[at].seen) {
                Some(oldest) => self.give_up(oldest),
                None => self.waiting.clear(),
            }
        }
        self.waiting.sort_unstable();
        for &(index, datagram) in &self.waiting {
            let frame = batch.frame(index);
            batch.append_to(frame, usize::MAX, &mut self.bytes);
            self.held.push((frame.len(), datagram));
        }
        self.broken.iter().for_each(|&index| drop(len(index)));
        let Datagrams { waiting, broken, .. } = self;
        batch.retain(|index| !broken.contains(&index) && !waiting.iter().any(|waiting| waiting.0 == index));
        waiting.clear();
        broken.clear();
    }
}

#[cfg(test)]
#[path = "whole_datagrams_tests.rs"]
mod tests;
