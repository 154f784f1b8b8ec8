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
use super::setup::{InterfacePort, Port, Setup};
use crate::frame::{BATCH_MAX, Batch, DropSink, Frame, Origin, PortId, Selection};
use crate::interface::Coalesce;
use crate::interface::interrupts::CHECK_AFTER;
use crate::link::Sender;
use crate::route::{Decision, Router};
use crate::source::InPlace;
use crate::stats::DropReason;
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
            setup: setup.clone(),
            now_ms: 0,
            work: Work::default(),
            stats: Arc::default(),
            lists: vec![],
            touched: vec![],
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

    /// Counts frames that were received in place for the interface `id`, and notes what its guest is owed.
    pub(super) fn landed(&mut self, id: PortId, landed: InPlace) {
        if landed.frames == 0 {
            return;
        }
        self.work.frames += landed.frames;
        self.work.bytes += landed.bytes;
        // Each as a batch of its own, as they came.
        (0..landed.frames).for_each(|_| _ = self.stats.begin(1));
        if let Some(port) = self.setup.interface(id) {
            (0..port.interface.active_queues()).for_each(|queue| self.pending.note(port, queue));
        }
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
    pub(super) fn forward(&mut self, batch: &Batch, drops: &mut DropSink) {
        let begun = self.stats.begin(batch.len());
        self.decide(batch, drops);
        if self.setup.is_observed() {
            self.deliver_observed(batch, drops);
        } else {
            while let Some(port) = self.touched.pop() {
                let list = self.take_list(port);
                self.deliver(port, Selection { batch, which: &list }, drops);
                self.return_list(port, list);
            }
        }
        if !self.answers.is_empty() {
            self.deliver_answers(drops);
        }
        self.stats.end(begun);
    }

    /// Delivers the answers, each to the interface whose question it takes the place of.
    #[cold]
    fn deliver_answers(&mut self, drops: &mut DropSink) {
        let setup = self.setup.clone();
        for (index, frame) in self.answers.frames().iter().enumerate() {
            let Some(Port::Interface(port)) = setup.port(frame.from) else { continue };
            let answer = Selection { batch: &self.answers, which: &[index as u16] };
            port.stats.answers.add(1);
            drops.clear();
            self.pending.give(port, 0, answer, drops);
            self.record_exits(frame.from, answer, drops);
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

    /// Sorts the frames by destination.
    fn decide(&mut self, batch: &Batch, drops: &mut DropSink) {
        let setup = &*self.setup;
        self.work.frames += batch.len() as u64;
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
                    0 => drops.dropped(port.stats(), reason, index, 1),
                    _ => port.stats().copies.add(made - 1),
                }
            }
        }
    }

    /// Delivers frames to one port.
    pub(super) fn deliver(&mut self, id: PortId, frames: Selection<'_>, drops: &mut DropSink) {
        match self.setup.port(id) {
            Some(Port::Interface(port)) => match port.interface.active_queues() {
                1 => self.pending.give(port, 0, frames, drops),
                queues => {
                    for (index, frame) in frames.frames() {
                        let hash = flow::hash(frames.batch.head(frame));
                        self.by_queue[hash as usize % queues].push(index);
                    }
                    for (queue, list) in self.by_queue[..queues].iter_mut().enumerate() {
                        if !list.is_empty() {
                            self.pending.give(port, queue, frames.only(list), drops);
                            list.clear();
                        }
                    }
                }
            },
            Some(Port::Link(port)) => self.sender.send(&port.link, frames, drops),
            None => {
                for (index, frame) in frames.frames() {
                    if let Some(port) = self.setup.port(frame.from) {
                        drops.dropped(port.stats(), DropReason::PortGone, index, 1);
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
    fn give(&mut self, port: &InterfacePort, queue: usize, frames: Selection<'_>, drops: &mut DropSink) {
        port.interface.deliver(queue, frames, drops);
        self.note(port, queue);
    }

    /// Notes what is owed for something that was delivered.
    #[inline]
    fn note(&mut self, port: &InterfacePort, queue: usize) {
        let place = (port.member.port, queue);
        let coalesces = port.interface.coalesce().is_some_and(Coalesce::coalesces);
        if coalesces && !self.delivered.contains(&place) {
            self.delivered.push(place);
        }
    }

    fn end(&mut self, setup: &Setup) {
        for (id, queue) in self.delivered.drain(..) {
            let Some(guest) = setup.interface(id).and_then(|port| port.interface.coalesce()) else {
                continue;
            };
            let known = self.checks.iter().any(|check| (check.0, check.1) == (id, queue));
            if guest.end_of_coalescing(queue) && !known {
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
            if let Some(guest) = setup.interface(id).and_then(|port| port.interface.coalesce()) {
                guest.check(queue);
            }
        }
    }

    #[inline]
    fn time_to_check(&self) -> Option<Duration> {
        let (_, _, at) = self.checks.front()?;
        Some(at.saturating_duration_since(Instant::now()))
    }
}
