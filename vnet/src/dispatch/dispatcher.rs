//! One dispatcher: its sources, sockets, cache and statistics, and its turn.
//!
//! A dispatcher knows no thread: a worker runs it, and may hand it to another one between two turns. Everything that a frame's order
//! depends on moves with it: sources, sending sockets, reassembly, chains that the kernel still reads.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::arrival::Prediction;
use super::busy_clock::BusyClock;
use super::dispatcher_stats::DispatcherStats;
use super::forward::Forwarder;
use super::mode::{Drive, Mode, ModeSettings};
use super::observe;
use super::served::Served;
use super::setup::{Feed, FeedKind, Setup, SetupView, SourceParts};
use super::share::{Grant, Share};
use super::shared::Shared;
use super::yielding::Yielder;
use crate::frame::DropSink;
use crate::link::{Bridge, PeersView, Receiver, ReceiverParts};
use crate::poll::Poller;
use crate::route::Router;
use crate::source::{self, BatchSlot, Source};

/// Timer interval: reassembly timeouts, ageing, path MTUs.
const TICK: Duration = Duration::from_millis(20);
/// Timer interval while the dispatcher is idle.
const IDLE_TICK: Duration = Duration::from_millis(1000);
/// Under load, file descriptors are polled after this many turns, frames or bytes. That is about ten microseconds of work: the
/// poll is cheap compared with it, and no frame waits long for the next poll.
const TURNS_PER_POLL: u32 = 8;
const FRAMES_PER_POLL: u64 = 128;
const BYTES_PER_POLL: u64 = 128 << 10;
/// Maximum number of recently active descriptors that a spinning dispatcher checks directly on each spin.
const WARM_MAX: usize = 4;

/// What a dispatcher did in a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// No source had work.
    Idle,
    /// Some source had work.
    Busy,
    /// Some source had work, and enough was done since the last poll of file descriptors for another one.
    Polled,
}

/// State of one dispatcher. One thread at a time runs it.
pub(super) struct Dispatcher {
    pub(super) id: usize,
    shared: Arc<Shared>,
    pub(super) poller: Poller,
    generation: u64,
    setup: Arc<Setup>,
    /// The current setup as sources that route by themselves see it, and its links as receivers see them.
    setup_view: SetupView,
    peers: PeersView,
    /// Creates receivers for underlay ports.
    receivers: ReceiverParts,
    forwarder: Forwarder,
    /// Receivers of the bridge's sockets until the first setup: without links, every datagram would be a stranger's.
    bridge: Vec<Receiver>,
    /// All sources, sorted by token.
    served: Vec<Served>,
    next_token: u64,
    /// Tokens with events since the dispatcher last blocked, in the order of their first event.
    warm: Vec<u64>,
    /// Turns with work since the last poll of file descriptors.
    turns: u32,
    /// Time at which a rate limit admits the next frame of a source.
    resumes: Option<Instant>,
    /// Scratch list of tokens with events that are not marked yet, and whether data has arrived there.
    news: Vec<(u64, bool)>,
    batch: BatchSlot,
    drops: DropSink,
    clock: BusyClock,
    stats: Arc<DispatcherStats>,
    next_tick: Instant,
}

impl Dispatcher {
    pub(super) fn new(id: usize, shared: Arc<Shared>, bridge: Bridge, burst: usize) -> Dispatcher {
        let setup = shared.setup();
        let router = Router::new(setup.table.clone(), shared.learned().clone());
        let mut forwarder = Forwarder::new(id, router, bridge.tx, setup.clone());
        forwarder.stats = shared.dispatcher_stats()[id].clone();
        let mut dispatcher = Dispatcher {
            id,
            poller: shared.poller(id).clone(),
            generation: 0,
            forwarder,
            setup_view: SetupView::new(setup.clone().into()),
            peers: bridge.peers,
            receivers: bridge.receivers.taking(burst),
            setup,
            bridge: vec![],
            served: Vec::new(),
            next_token: 0,
            warm: Vec::with_capacity(WARM_MAX),
            turns: 0,
            resumes: None,
            news: Vec::with_capacity(crate::poll::EVENTS_MAX),
            batch: BatchSlot::new(burst),
            drops: DropSink::new(),
            clock: BusyClock::new(shared.started()),
            stats: shared.dispatcher_stats()[id].clone(),
            next_tick: Instant::now(),
            shared,
        };
        let receivers = bridge.rx.into_iter().chain(bridge.vxlan_rx);
        dispatcher.bridge = receivers.map(|receiver| receiver.taking(burst)).collect();
        dispatcher
    }

    /// Starts serving a source.
    fn serve(&mut self, mut source: Box<dyn Source>, drive: (Drive, usize), feed: Option<Feed>) {
        let token = self.next_token;
        self.next_token += 1;
        source.watch(self.poller.waker(token));
        let of_guest = feed.as_ref().is_some_and(|feed| matches!(feed.kind, FeedKind::Interface(_)));
        let share = of_guest.then(|| Share::new(drive.0.share, drive.0.gauge.limits.clone()));
        let mut served = Served::new(token, source, drive, Instant::now());
        // The counters of a port with the kernel path include frames that no dispatcher has delivered.
        if let Some(port) = feed.as_ref().and_then(|feed| self.setup.interface(feed.port))
            && port.interface.kernel_device().is_none()
        {
            served = served.counting(port.stats.clone());
        }
        served.share = share;
        // Only an interface's own underlay port is a feeder.
        let own = feed.as_ref().filter(|feed| matches!(feed.kind, FeedKind::Other(_)));
        served.prediction = Prediction::new(own.map(|feed| feed.port));
        served.feed = feed;
        self.served.push(served);
    }

    /// Ends the turn before, at the time at which the thread turns to something else.
    #[inline]
    pub(super) fn end_turn(&mut self, now: Instant) {
        self.clock.end(now);
    }

    /// One turn, which starts `now`; polls file descriptors when enough has been done since the last time.
    #[inline]
    pub(super) fn work(&mut self, now: Instant, yielder: &mut Yielder) -> Turn {
        self.clock.begin(now);
        if self.shared.publication.generation() != self.generation {
            self.adopt();
        }
        self.tick_if_due(yielder);
        if self.turn() {
            self.clock.busy = true;
            self.turns += 1;
            let work = self.forwarder.work;
            if self.turns < TURNS_PER_POLL && work.frames < FRAMES_PER_POLL && work.bytes < BYTES_PER_POLL {
                return Turn::Busy;
            }
            self.turns = 0;
            self.tally(yielder);
            self.forwarder.end_of_coalescing(true);
            self.wait(Duration::ZERO);
            Turn::Polled
        } else {
            // Datagrams without a frame are probes and keepalives between hosts. No guest waits for what follows them, so
            // they do not justify spinning.
            if std::mem::take(&mut self.turns) > 0 && self.forwarder.work.frames > 0 {
                self.tally(yielder);
            }
            Turn::Idle
        }
    }

    /// Sends interrupts to guests that have not reacted to an earlier one in time.
    #[inline]
    pub(super) fn check_interrupts(&mut self) {
        self.forwarder.check_if_due();
    }

    /// Prepares the hand-over to another thread, between two turns: no guest waits for it, and all work is counted.
    pub(super) fn pause(&mut self, now: Instant, yielder: &mut Yielder) {
        self.clock.end(now);
        self.turns = 0;
        self.tally(yielder);
        self.forwarder.settle_all();
    }

    /// Serves only sources that have taken a part of a frame or of a burst already, and returns buffers that the kernel has read. Returns
    /// true when there is nothing more to wait for.
    pub(super) fn complete(&mut self, now: Instant) -> bool {
        let mut none = true;
        for served in &mut self.served {
            served.ready = served.source.is_unfinished();
            none &= !served.ready;
        }
        if !none {
            self.clock.begin(now);
            self.turn();
        }
        self.reap();
        none && !self.served.iter().any(|served| served.source.is_held())
    }

    /// Makes all sources ready, because events may have been missed.
    pub(super) fn look_everywhere(&mut self) {
        self.served.iter_mut().for_each(Served::wake);
    }

    /// The last act, at shutdown.
    pub(super) fn finish(&mut self) {
        self.forwarder.settle_all();
        self.served.drain(..).for_each(|mut served| served.source.unwatch());
    }

    /// Reports the work since the last call to the yield strategy and the counters.
    fn tally(&mut self, yielder: &mut Yielder) {
        let work = std::mem::take(&mut self.forwarder.work);
        yielder.worked(work.bytes, self.clock.now);
        self.clock.publish(&self.stats);
    }

    /// Serves each ready source once. Returns true when any had work.
    fn turn(&mut self) -> bool {
        let now = self.clock.now;
        let now_ms = self.clock.now_ms();
        self.forwarder.now_ms = now_ms;
        let mut busy = false;
        self.resumes = None;
        for served in self.served.iter_mut().filter(|served| served.ready) {
            match served.grant(now) {
                Grant::Cost(cost) => self.batch.set_budget(cost),
                Grant::NextTurn => {
                    busy = true;
                    continue;
                }
                Grant::At(at) => {
                    self.resumes = Some(self.resumes.map_or(at, |other| other.min(at)));
                    continue;
                }
            }
            let (event, from) = (served.event.take(), served.guest());
            self.forwarder.record(|recorder, _| recorder.begin(event));
            self.forwarder.announce(&mut served.prediction);
            let burst = source::receive(&mut *served.source, &mut self.batch, &mut self.drops, now_ms);
            let taken = burst.taken;
            self.forwarder.received(taken.drained);
            if taken.units > 0 {
                self.forwarder.record(|recorder, now| recorder.received(from, event, now));
            }
            if let Some(share) = &mut served.share {
                share.charge(&burst, now);
            }
            if !burst.is_empty() {
                let before = self.forwarder.new_sources();
                self.forwarder.forward(&burst, &mut self.drops);
                if let Some(share) = &mut served.share {
                    share.charge_sources(self.forwarder.new_sources() - before, now);
                }
            }
            drop(burst);
            if let Some(feed) = &served.feed {
                self.forwarder.landed(feed.port, taken.in_place);
            }
            self.forwarder.learn(&mut served.prediction);
            served.looked(taken.units, now);
            busy |= taken.units > 0;
        }
        self.forwarder.end_of_coalescing(!busy);
        if busy && self.setup.is_observed() {
            observe::refusals(&self.setup, self.id, &mut self.drops);
        }
        busy
    }

    /// True when a source must be polled, because its guest does not notify.
    pub(super) fn is_polled(&self) -> bool {
        self.served.iter().any(Served::is_polled)
    }

    /// Requests notifications from every guest. Returns false when a guest has frames waiting already, or cannot notify: the
    /// thread must not sleep then.
    pub(super) fn rest(&mut self) -> bool {
        self.served.iter_mut().all(Served::rest)
    }

    /// Forgets which descriptors were active lately: the thread is about to sleep.
    pub(super) fn cool(&mut self) {
        self.warm.clear();
    }

    /// Makes polled sources ready again after a rest.
    pub(super) fn resume(&mut self) {
        self.served.iter_mut().for_each(Served::resume);
    }

    /// Checks for frames between two spins; with `poll`, at all descriptors.
    ///
    /// Polling the epoll set touches memory that other cores have written, and receiving the frame takes another system call. So
    /// the sources that had frames last are checked directly, without epoll: a request/response exchange, the reason for
    /// spinning, uses the same descriptors again and again.
    pub(super) fn look(&mut self, poll: bool) {
        let foretold = self.warm.iter().any(|token| self.foretells(*token));
        if poll || foretold || self.warm.is_empty() {
            self.wait(Duration::ZERO);
        }
        for at in 0..self.warm.len() {
            // A guest can be notified of an arrival only if an event shows it before it is received.
            if !self.foretells(self.warm[at]) {
                self.mark(self.warm[at], false);
            }
        }
    }

    /// True if the token's next event notifies a guest.
    fn foretells(&self, token: u64) -> bool {
        self.index_of(token).is_some_and(|index| self.served[index].prediction.wants_events())
    }

    /// The part of `timeout` for which the thread may sleep: pending interrupt checks of guests and rate limits end it. Call this
    /// before every sleep.
    pub(super) fn sleep_limit(&mut self, timeout: Duration) -> Duration {
        if !timeout.is_zero() {
            self.forwarder.drop_settled_checks();
        }
        let timeout = self.forwarder.time_to_check().map_or(timeout, |check| timeout.min(check));
        let timeout =
            self.resumes.map_or(timeout, |at| timeout.min(at.saturating_duration_since(Instant::now())));
        // Reads error queues first: entries that arrive after this read wake the poller.
        self.reap();
        timeout
    }

    /// Waits for file descriptor events and marks their sources. Wakes in time for pending interrupt checks of guests.
    pub(super) fn wait(&mut self, timeout: Duration) {
        let timeout = self.sleep_limit(timeout);
        let mut news = std::mem::take(&mut self.news);
        let result =
            self.poller.wait_for_input(Some(timeout), |token, readable| news.push((token, readable)));
        for (token, readable) in news.drain(..) {
            self.mark(token, readable);
            self.keep_warm(token);
        }
        self.news = news;
        if let Err(error) = result {
            // Only a programming error leads here (a closed epoll descriptor); the sleep bounds the log rate.
            tracing::error!(dispatcher = self.id, %error, "cannot wait for events");
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Marks the token's source as ready. `arrived`: an event shows that data has arrived.
    fn mark(&mut self, token: u64, arrived: bool) {
        if let Some(index) = self.index_of(token) {
            self.served[index].wake();
            if arrived {
                self.served[index].prediction.arrived();
            }
            if self.forwarder.is_recorded() {
                self.served[index].event.get_or_insert_with(Instant::now);
            }
        }
    }

    /// Index of the token's source in `served`.
    fn index_of(&self, token: u64) -> Option<usize> {
        self.served.binary_search_by_key(&token, |served| served.token).ok()
    }

    /// Records the token as recently active and evicts the oldest one. Rings are excluded: busy ones are polled anyway.
    fn keep_warm(&mut self, token: u64) {
        let is_ring = |index: usize| self.served[index].source.polls();
        if self.warm.contains(&token) || self.index_of(token).is_some_and(is_ring) {
            return;
        }
        if self.warm.len() == WARM_MAX {
            self.warm.remove(0);
        }
        self.warm.push(token);
    }

    /// Returns buffers to guests once the kernel has finished reading them.
    #[inline]
    fn reap(&mut self) {
        if self.forwarder.reap() {
            self.served.iter_mut().for_each(|served| served.source.reclaim());
        }
    }

    pub(super) fn time_to_tick(&self) -> Duration {
        self.next_tick.saturating_duration_since(Instant::now())
    }

    fn tick_if_due(&mut self, yielder: &Yielder) {
        let now = self.clock.now;
        if now < self.next_tick {
            return;
        }
        let now_ms = self.clock.ms(now);
        self.stats.ticked(now_ms);
        self.forwarder.tick(now_ms);
        for served in &mut self.served {
            served.source.tick(now_ms);
            served.refresh(now);
        }
        self.next_tick = now + if yielder.is_quiet() { IDLE_TICK } else { TICK };
    }

    /// Adopts the latest published setup: drops removed sources and starts new ones.
    fn adopt(&mut self) {
        let generation = self.shared.publication.generation();
        self.forwarder.settle_all();
        self.setup = self.shared.setup();
        self.setup_view.store(self.setup.clone());
        self.peers.store(self.setup.peers.clone());
        self.drops.watch(self.setup.is_observed());
        let now_ms = self.clock.now_ms();
        self.forwarder.now_ms = now_ms;
        let verdicts = self.shared.kernel_path().map(|path| path.verdicts(&self.setup));
        self.forwarder.adopt(self.setup.clone(), verdicts);
        let guest_driven = ModeSettings { mode: Mode::GuestDriven, ..ModeSettings::default() };
        for receiver in std::mem::take(&mut self.bridge) {
            self.serve(Box::new(receiver), (Drive::new(guest_driven, 1), 0), None);
        }
        let (id, dispatchers) = (self.id, self.shared.dispatchers());
        let mut feeds = self.setup.feeds();
        feeds.retain(|feed| (feed.port.index() + feed.queue) % dispatchers == id);
        self.served.retain_mut(|served| {
            let Some(known) = &served.feed else { return true };
            match feeds.iter().find(|feed| feed.is(known)) {
                Some(feed) => served.set_drive(&feed.drive),
                None => {
                    served.source.unwatch();
                    return false;
                }
            }
            true
        });
        for feed in feeds {
            let known = self.served.iter().filter_map(|served| served.feed.as_ref());
            if known.into_iter().any(|known| known.is(&feed)) {
                continue;
            }
            if let Some(source) = self.source(&feed) {
                self.serve(source, (feed.drive.clone(), feed.queue), Some(feed));
            }
        }
        self.warm.clear();
        for served in &mut self.served {
            served.prediction.forget();
            served.source.tick(now_ms);
        }
        self.next_tick = Instant::now();
        self.generation = generation;
        self.shared.publication.adopted(self.id, generation);
    }

    /// Creates the source of a feed of the current setup.
    fn source(&self, feed: &Feed) -> Option<Box<dyn Source>> {
        match &feed.kind {
            FeedKind::Interface(interface) => Some(interface.clone().source(feed.queue)),
            FeedKind::Stream(link) => link.stream_source(feed.queue),
            FeedKind::Other(feeder) => {
                let router = Router::new(self.setup.table.clone(), self.shared.learned().clone());
                let (setup, receivers) = (self.setup_view.clone(), self.receivers.clone());
                Some(feeder.clone().source(feed.port, SourceParts { setup, receivers, router }))
            }
        }
    }
}
