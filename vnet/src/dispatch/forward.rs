//! Decide and deliver: one batch from where it came from to where it goes.
//!
//! Frames are decided one by one, collected by destination, and delivered destination by destination, so that every guest is
//! notified and every socket called once a batch. The order of frames between two ports is kept.
//!
//! A guest's question for a neighbour that is published ([`Published::neighbours`](crate::route::Published)) is not flooded:
//! the answer takes its place, and goes back to where it came from.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::counters::DispatcherStats;
use super::observe;
use super::setup::{InterfacePort, Port, Setup};
use crate::frame::{BATCH_MAX, Batch, DropSink, Frame, Origin, PortId, Selection};
use crate::interface::Interface;
use crate::interface::interrupts::CHECK_AFTER;
use crate::link::Sender;
use crate::route::{Decision, Flow, Router};
use crate::stats::{DropReason, watch};
use crate::wire::flow;
use crate::wire::neighbour::{self, ANSWER_MAX};
use crate::wire::offload::Offload;

/// How much was moved.
#[derive(Clone, Copy, Default)]
pub(super) struct Work {
    pub(super) frames: u64,
    pub(super) bytes: u64,
}

/// The deciding and delivering half of a dispatcher.
pub(super) struct Forwarder {
    /// Which dispatcher's.
    pub(super) dispatcher: usize,
    router: Router,
    sender: Sender,
    drops: DropSink,
    pub(super) setup: Arc<Setup>,
    /// Milliseconds since the core started; set once a turn.
    pub(super) now_ms: u64,
    /// Moved since the dispatcher last set it to nothing.
    pub(super) work: Work,
    /// What the dispatcher counts about itself.
    pub(super) stats: Arc<DispatcherStats>,
    /// Frames of the batch under way, by destination port.
    lists: Vec<Vec<u16>>,
    /// Destinations whose list is not empty.
    pub(super) touched: Vec<PortId>,
    /// Frames of the batch under way that go nowhere, in order, and why.
    pub(super) undelivered: Vec<(u16, DropReason)>,
    /// Frames of one list, by the queue they go to.
    by_queue: Vec<Vec<u16>>,
    /// Answers to frames of the batch under way, in the place of those frames.
    answers: Batch,
    /// Guests that may have to be notified yet.
    pending: Pending,
}

impl Forwarder {
    pub(super) fn new(dispatcher: usize, router: Router, sender: Sender, setup: Arc<Setup>) -> Forwarder {
        let mut forwarder = Forwarder {
            dispatcher,
            router,
            sender,
            drops: DropSink::new(),
            setup: setup.clone(),
            now_ms: 0,
            work: Work::default(),
            stats: Arc::default(),
            lists: vec![],
            touched: vec![],
            undelivered: Vec::with_capacity(BATCH_MAX),
            by_queue: vec![],
            answers: Batch::new(),
            pending: Pending::default(),
        };
        forwarder.adopt(setup);
        forwarder
    }

    /// Takes over a new setup. Called between two batches.
    pub(super) fn adopt(&mut self, setup: Arc<Setup>) {
        if let Some(question) = &setup.observers.question {
            question.ask(self.dispatcher, &self.router, self.now_ms);
        }
        watch::set(setup.is_observed());
        // Of a setup in which only the observers differ, the cache stays good.
        if !Arc::ptr_eq(&setup.table, self.router.table()) {
            self.router.adopt(setup.table.clone());
        }
        // All that a batch can need: nothing is allocated on a frame's way.
        let list = || Vec::with_capacity(BATCH_MAX);
        self.lists.resize_with(setup.slots(), list);
        self.touched.reserve(setup.slots());
        let queues = setup.interfaces().map(|port| port.interface.queues()).max().unwrap_or(1);
        self.by_queue.resize_with(queues, list);
        self.setup = setup;
    }

    /// The one port that frames of `flow` go to, if it is one.
    pub(super) fn sole(&mut self, flow: &Flow) -> Option<PortId> {
        self.router.sole(flow, self.now_ms)
    }

    /// Counts a frame of `len` bytes that was received in place, and notes what is owed for it.
    pub(super) fn delivered_in_place(&mut self, port: &InterfacePort, queue: usize, len: usize) {
        self.work.frames += 1;
        self.work.bytes += len as u64;
        self.pending.note(port, queue);
    }

    /// Hears what the kernel has done with of what was sent without a copy. True when interfaces may give that back.
    #[inline]
    pub(super) fn reap(&mut self) -> bool {
        self.sender.reap()
    }

    pub(super) fn tick(&mut self, now_ms: u64) {
        self.sender.tick(now_ms);
    }

    /// Takes every frame of the batch to completion: delivered, or counted under the reason why not.
    pub(super) fn run(&mut self, batch: &Batch) {
        let begun = self.stats.begin(batch.len());
        if self.setup.is_observed() {
            self.run_observed(batch);
        } else {
            self.decide(batch);
            while let Some(port) = self.touched.pop() {
                let list = self.take_list(port);
                self.deliver(port, batch, &list);
                self.return_list(port, list);
            }
        }
        if !self.answers.is_empty() {
            self.deliver_answers();
        }
        self.stats.end(begun);
    }

    /// Delivers the answers, each to the interface whose question it takes the place of.
    #[cold]
    fn deliver_answers(&mut self) {
        let setup = self.setup.clone();
        for (index, frame) in self.answers.frames().iter().enumerate() {
            let Some(Port::Interface(port)) = setup.port(frame.from) else { continue };
            let index = index as u16;
            port.stats.answers.add(1);
            watch::take(|_| ());
            self.pending.give(port, 0, &self.answers, &[index]);
            self.record_exit(frame.from, &self.answers, index, observe::drops(), &setup.observers.taps);
        }
        self.answers.clear();
    }

    /// The frames that go to `port`, which are no more on its list.
    pub(super) fn take_list(&mut self, port: PortId) -> Vec<u16> {
        std::mem::take(&mut self.lists[port.index()])
    }

    /// Gives a list's memory back.
    pub(super) fn return_list(&mut self, port: PortId, mut list: Vec<u16>) {
        list.clear();
        self.lists[port.index()] = list;
    }

    pub(super) fn decide(&mut self, batch: &Batch) {
        let setup = &*self.setup;
        self.work.frames += batch.len() as u64;
        self.undelivered.clear();
        self.router.begin();
        for (index, frame) in batch.frames().iter().enumerate() {
            let index = index as u16;
            self.work.bytes += frame.len() as u64;
            let (lists, touched) = (&mut self.lists, &mut self.touched);
            let mut push = |port: PortId| match lists.get_mut(port.index()) {
                Some(list) => {
                    if list.is_empty() {
                        touched.push(port);
                    }
                    list.push(index);
                    true
                }
                None => false,
            };
            let decision = self.router.decide(frame, self.now_ms);
            if frame.dst.is_multicast()
                && !matches!(decision, Decision::Drop(_))
                && answer(setup, batch.head(frame), frame, &mut self.answers)
            {
                continue;
            }
            let (made, reason) = match decision {
                Decision::To(port) => (u64::from(push(port)), DropReason::PortGone),
                Decision::Copies(ports) => {
                    (ports.iter().map(|&port| u64::from(push(port))).sum(), DropReason::PortGone)
                }
                Decision::Drop(reason) => (0, reason),
            };
            if made != 1
                && let Some(port) = setup.port(frame.from)
            {
                match made {
                    0 => {
                        port.stats().drop_frames(reason, 1);
                        self.undelivered.push((index, reason));
                    }
                    _ => port.stats().copies.add(made - 1),
                }
            }
        }
    }

    pub(super) fn deliver(&mut self, id: PortId, batch: &Batch, list: &[u16]) {
        match self.setup.port(id) {
            Some(Port::Interface(port)) => match port.interface.active_queues() {
                1 => self.pending.give(port, 0, batch, list),
                queues => {
                    for &index in list.iter() {
                        let hash = flow::hash(batch.head(batch.frame(index.into())));
                        self.by_queue[hash as usize % queues].push(index);
                    }
                    for (queue, list) in self.by_queue[..queues].iter_mut().enumerate() {
                        if !list.is_empty() {
                            self.pending.give(port, queue, batch, list);
                            list.clear();
                        }
                    }
                }
            },
            Some(Port::Link(port)) => match &port.stream {
                Some(stream) => stream.deliver(0, batch, list),
                None => {
                    let frames = Selection { batch, which: list };
                    self.sender.send(&port.link, frames, &mut self.drops);
                }
            },
            None => {
                for &index in list {
                    if let Some(port) = self.setup.port(batch.frame(index.into()).from) {
                        port.stats().drop_frames(DropReason::PortGone, 1);
                    }
                }
            }
        }
    }
}

/// Puts the answer to a guest's question for a published neighbour into `answers`. False when it is none: it is flooded.
fn answer(setup: &Setup, head: &[u8], frame: &Frame, answers: &mut Batch) -> bool {
    let known = &setup.table.published().neighbours;
    let asks =
        || matches!(setup.port(frame.from), Some(Port::Interface(port)) if port.interface.may_be_answered());
    if known.is_empty() || !asks() || answers.is_full() {
        return false;
    }
    let Some(asked) = neighbour::question(head) else { return false };
    // Who asks for an address of its own wants to hear of others that use it.
    let owner = known.get(&(frame.network, asked.target)).filter(|owner| **owner != asked.asker);
    let (Some(owner), Some(room)) = (owner, answers.spare(ANSWER_MAX)) else { return false };
    let Some(room) = room.first_chunk_mut() else { return false };
    let Some(length) = neighbour::answer(&asked, *owner, room) else { return false };
    let from = Origin { port: frame.from, network: frame.network };
    answers.push_spare(0, length, from, Offload::default()).is_ok()
}

/// Optimistic interrupts: which guests are owed a decision.
impl Forwarder {
    /// The sources are drained, or so much was moved that guests should hear of it.
    #[inline]
    pub(super) fn end_of_coalescing(&mut self) {
        if !self.pending.delivered.is_empty() {
            self.pending.end(&self.setup);
        }
    }

    /// Looks after guests whose time is up.
    #[inline]
    pub(super) fn check_if_due(&mut self) {
        if self.pending.time_to_check() == Some(Duration::ZERO) {
            self.pending.check(&self.setup, Instant::now());
        }
    }

    /// Until when the dispatcher may sleep; `None` when no guest has to be looked after.
    #[inline]
    pub(super) fn time_to_check(&self) -> Option<Duration> {
        self.pending.time_to_check()
    }

    /// Leaves no guest waiting: before the setup changes, and at the end.
    pub(super) fn settle_all(&mut self) {
        self.pending.end(&self.setup);
        self.pending.check(&self.setup, Instant::now() + CHECK_AFTER);
    }
}

/// Queues whose guests have been given frames and may have to be notified yet. Every queue is in each list once at most, so
/// that the queues there are bound them.
#[derive(Default)]
struct Pending {
    /// Given something since the last end of coalescing.
    delivered: Vec<(PortId, usize)>,
    /// Not notified then; to be checked when the time comes, in this order.
    checks: VecDeque<(PortId, usize, Instant)>,
}

impl Pending {
    /// Delivers to an interface and notes what is owed for it: the only way there.
    #[inline]
    fn give(&mut self, port: &InterfacePort, queue: usize, batch: &Batch, list: &[u16]) {
        port.interface.deliver(queue, batch, list);
        self.note(port, queue);
    }

    /// Notes what is owed for something that was delivered.
    #[inline]
    fn note(&mut self, port: &InterfacePort, queue: usize) {
        let place = (port.member.port, queue);
        if port.interface.coalesces() && !self.delivered.contains(&place) {
            self.delivered.push(place);
        }
    }

    fn end(&mut self, setup: &Setup) {
        for (id, queue) in self.delivered.drain(..) {
            let Some(port) = setup.interface(id) else { continue };
            let known = self.checks.iter().any(|check| (check.0, check.1) == (id, queue));
            if port.interface.end_of_coalescing(queue) && !known {
                self.checks.push_back((id, queue, Instant::now() + CHECK_AFTER));
            }
        }
    }

    fn check(&mut self, setup: &Setup, now: Instant) {
        while let Some(&(id, queue, at)) = self.checks.front() {
            if at > now {
                break;
            }
            self.checks.pop_front();
            if let Some(port) = setup.interface(id) {
                port.interface.check(queue);
            }
        }
    }

    #[inline]
    fn time_to_check(&self) -> Option<Duration> {
        let (_, _, at) = self.checks.front()?;
        Some(at.saturating_duration_since(Instant::now()))
    }
}
