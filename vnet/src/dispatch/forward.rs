//! Decide and deliver: routes one batch and hands it to its destinations.
//!
//! Frames are decided one by one, grouped by destination, and delivered group by group, so that each batch costs one notification
//! per guest and one system call per socket. The order of frames between two ports is kept.
//!
//! Neighbour suppression: an ARP or neighbour solicitation for a published neighbour
//! ([`Published::neighbours`](crate::route::Published)) is answered here, to its ingress port, instead of being flooded.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::arrival::Prediction;
use super::dispatcher_stats::DispatcherStats;
use super::pending::Pending;
use super::setup::{Port, SendNeighbours, Setup};
use super::timeline::Recorder;
use crate::frame::{BATCH_MAX, Batch, DropSink, Frame, Origin, PortId, Selection};
use crate::interface::interrupts::CHECK_AFTER_MAX;
use crate::link::{Link, Sender};
use crate::route::{Decision, Router, Verdicts};
use crate::source::InPlace;
use crate::stats::DropReason;
use crate::wire::flow;
use crate::wire::neighbour::{self, ANSWER_MAX};
use crate::wire::offload::Offload;

/// Number of frames and bytes moved.
#[derive(Clone, Copy, Default)]
pub(super) struct Work {
    pub(super) frames: u64,
    pub(super) bytes: u64,
}

/// The part of a dispatcher that decides about frames and delivers them.
pub(super) struct Forwarder {
    /// The dispatcher's number.
    pub(super) dispatcher: usize,
    router: Router,
    sender: Sender,
    pub(super) setup: Arc<Setup>,
    /// Milliseconds since the core started; set once a turn.
    pub(super) now_ms: u64,
    /// Work since the dispatcher last reset it.
    pub(super) work: Work,
    /// The dispatcher's statistics.
    pub(super) stats: Arc<DispatcherStats>,
    /// Indices of the current batch's frames, by destination port.
    lists: Vec<Vec<u16>>,
    /// Destinations with a non-empty list.
    pub(super) touched: Vec<PortId>,
    /// Frames of one list, by destination queue.
    by_queue: Vec<Vec<u16>>,
    /// Frames of one list that leave by the link and not by the wire.
    rest: Vec<u16>,
    /// Answers that replace frames of the current batch.
    answers: Batch,
    /// Guests that may still need a notification.
    pending: Pending,
    /// Bytes of `work` before the current burst.
    burst_starts: u64,
    /// Records when a guest receives, if that is observed.
    recorder: Option<Recorder>,
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
            rest: Vec::with_capacity(BATCH_MAX),
            answers: Batch::new(),
            pending: Pending::default(),
            burst_starts: 0,
            recorder: None,
        };
        forwarder.adopt(setup, None);
        forwarder
    }

    /// Number of frames from source addresses that were not known at their port.
    pub(super) fn new_sources(&self) -> u64 {
        self.router.new_sources()
    }

    /// Adopts a new setup, and offers verdicts to the kernel's own path. Call between two batches.
    pub(super) fn adopt(&mut self, setup: Arc<Setup>, verdicts: Option<Verdicts>) {
        if let Some(question) = &setup.observers.question {
            question.ask(self.dispatcher, &self.router, self.now_ms);
        }
        let timeline = setup.observers.timeline.as_ref();
        let is_same = |timeline| self.recorder.as_ref().is_some_and(|before| before.is_of(timeline));
        if !timeline.is_some_and(is_same) {
            self.recorder = timeline.and_then(|timeline| {
                let port = setup.interface(timeline.port())?;
                Some(Recorder::new(timeline.clone(), port.stats.clone()))
            });
        }
        // When only the observers differ, the route cache stays valid.
        if !Arc::ptr_eq(&setup.table, self.router.table()) {
            self.router.adopt(setup.table.clone());
        }
        if let Some(verdicts) = verdicts.filter(|new| new.generation != self.setup.generation) {
            self.router.offer_to(verdicts);
        }
        // Capacity for a full batch: the data path never allocates.
        let list = || Vec::with_capacity(BATCH_MAX);
        self.lists.resize_with(setup.slots(), list);
        self.touched.reserve(setup.slots());
        let queues = setup.interfaces().map(|port| port.interface.queues()).max().unwrap_or(1);
        self.by_queue.resize_with(queues, list);
        self.setup = setup;
    }

    /// Counts frames received in place for the interface `id`, and notes that its guest may need a notification.
    pub(super) fn landed(&mut self, id: PortId, landed: InPlace) {
        if landed.frames == 0 {
            return;
        }
        self.work.frames += landed.frames;
        self.work.bytes += landed.bytes;
        // Each frame arrived in a separate batch.
        (0..landed.frames).for_each(|_| _ = self.stats.begin(1));
        if let Some(port) = self.setup.interface(id) {
            self.pending.landed(port, landed.queue);
        }
        self.record(|recorder, now| recorder.delivered(id, now));
    }

    /// Reads zero-copy completions from the kernel. Returns true when interfaces may reclaim buffers.
    #[inline]
    pub(super) fn reap(&mut self) -> bool {
        self.sender.reap()
    }

    pub(super) fn tick(&mut self, now_ms: u64) {
        self.sender.tick(now_ms);
    }

    /// Forwards every frame of the batch: delivers it, or counts it with a drop reason.
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

    /// Delivers each answer to the interface that asked.
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
        drops.clear();
        self.answers.clear();
    }

    /// Takes the list of frames for `port`.
    pub(super) fn take_list(&mut self, port: PortId) -> Vec<u16> {
        std::mem::take(&mut self.lists[port.index()])
    }

    /// Returns a list's memory for reuse.
    pub(super) fn return_list(&mut self, port: PortId, mut list: Vec<u16>) {
        list.clear();
        self.lists[port.index()] = list;
    }

    /// Groups the frames by destination.
    fn decide(&mut self, batch: &Batch, drops: &mut DropSink) {
        let setup = &*self.setup;
        self.work.frames += batch.len() as u64;
        self.router.begin();
        // A batch with a guest's frame has no frames of other ports.
        let guard = batch.frames().first().and_then(|first| setup.interface(first.from)?.guard.as_deref());
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
            let decision = if guard.is_some_and(|guard| !guard.admits(batch.head(frame))) {
                Decision::Drop(DropReason::BadAddress)
            } else {
                self.router.decide(frame, self.now_ms)
            };
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
                        if reason == DropReason::BadSource {
                            port.stats().last_bad_source.note(frame.sent());
                        }
                        drops.dropped(port.stats(), reason, index, 1);
                    }
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
            Some(Port::Link(port)) => match silent_host(&self.setup, &port.link, frames, self.now_ms) {
                None => self.sender.send(&port.link, frames, drops),
                Some((wire, remote)) => {
                    wire.send_neighbours((&port.link, remote), frames, (drops, &mut self.rest));
                    if !self.rest.is_empty() {
                        self.sender.send(&port.link, frames.only(&self.rest), drops);
                    }
                }
            },
            None => {
                for (index, frame) in frames.frames() {
                    if let Some(port) = self.setup.port(frame.from) {
                        drops.dropped(port.stats(), DropReason::PortGone, index, 1);
                    }
                }
            }
        }
        self.record(|recorder, now| recorder.delivered(id, now));
    }
}

/// The wire, and the other host's address on it, if that host's vnetd is silent and `frames` came up from a port with the kernel's path.
fn silent_host<'a>(
    setup: &'a Setup,
    link: &Link,
    frames: Selection<'_>,
    now_ms: u64,
) -> Option<(&'a dyn SendNeighbours, Ipv4Addr)> {
    let wire = setup.wire.as_deref()?;
    let remote = wire.silent_host(link, now_ms)?;
    let (_, first) = frames.frames().next()?;
    // A batch with a guest's frame has no frames of other ports.
    setup.interface(first.from)?.interface.kernel_device()?;
    Some((wire, remote))
}

/// Appends the reply to a guest's ARP request or neighbour solicitation for a published neighbour to `answers`. Returns false
/// when there is no answer; the frame is then flooded.
fn answer(setup: &Setup, head: &[u8], frame: &Frame, answers: &mut Batch) -> bool {
    let known = &setup.table.published().neighbours;
    let asks =
        || matches!(setup.port(frame.from), Some(Port::Interface(port)) if port.interface.may_be_answered());
    if known.is_empty() || !asks() || answers.is_full() {
        return false;
    }
    let Some(asked) = neighbour::question(head) else { return false };
    // A host that asks for its own address runs duplicate address detection: only another owner of the address may answer.
    let owner = known.get(&(frame.network, asked.target)).filter(|owner| **owner != asked.asker);
    let (Some(owner), Some(room)) = (owner, answers.spare(ANSWER_MAX)) else { return false };
    let Some(room) = room.first_chunk_mut() else { return false };
    let Some(length) = neighbour::answer(&asked, *owner, room) else { return false };
    let from = Origin { port: frame.from, network: frame.network };
    answers.push_spare(0, length, from, Offload::default()).is_ok()
}

/// Optimistic interrupts: guests with a pending interrupt decision.
impl Forwarder {
    /// Notes a step of a reception, if receptions are recorded.
    #[inline]
    pub(super) fn record(&mut self, note: impl FnOnce(&mut Recorder, Instant)) {
        if let Some(recorder) = &mut self.recorder {
            note(recorder, Instant::now());
        }
    }

    /// True if receptions are recorded.
    #[inline]
    pub(super) fn is_recorded(&self) -> bool {
        self.recorder.is_some()
    }

    /// Begins a burst of a source: notifies the guest that it is predicted to be for, if its data has just arrived.
    #[inline]
    pub(super) fn announce(&mut self, prediction: &mut Prediction) {
        self.burst_starts = self.work.bytes;
        self.pending.announce(&self.setup, prediction);
        self.record(Recorder::announced);
    }

    /// Records that the burst is received, and whether the source is drained.
    #[inline]
    pub(super) fn received(&mut self, drained: bool) {
        self.pending.received(drained);
    }

    /// Ends a burst: learns whom the source's next one is for.
    #[inline]
    pub(super) fn learn(&mut self, prediction: &mut Prediction) {
        self.pending.learn(&self.setup, prediction, self.work.bytes - self.burst_starts);
    }

    /// Ends a turn: decides about interrupts of guests whose sources are drained, or of all guests.
    #[inline]
    pub(super) fn end_of_coalescing(&mut self, all: bool) {
        self.pending.end(&self.setup, all);
        self.record(Recorder::notified);
    }

    /// Drops the checks of guests that have reacted to their interrupts.
    #[inline]
    pub(super) fn drop_settled_checks(&mut self) {
        self.pending.drop_settled(&self.setup);
    }

    /// Runs interrupt checks that are due.
    #[inline]
    pub(super) fn check_if_due(&mut self) {
        if self.pending.time_to_check() == Some(Duration::ZERO) {
            self.pending.check(&self.setup, Instant::now());
            self.record(Recorder::notified);
        }
    }

    /// Time until the next interrupt check; `None`: none is pending.
    #[inline]
    pub(super) fn time_to_check(&self) -> Option<Duration> {
        self.pending.time_to_check()
    }

    /// Settles every pending interrupt: before the setup changes, and at shutdown.
    pub(super) fn settle_all(&mut self) {
        self.pending.end(&self.setup, true);
        self.pending.check(&self.setup, Instant::now() + CHECK_AFTER_MAX);
    }
}
