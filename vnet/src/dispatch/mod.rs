//! Dispatchers: the threads that move frames (VNET/P section 4.3).
//!
//! ```text
//! loop {
//!     adopt a new setup, if one was published
//!     for source in mine {                         // guests' queues, the bridge's sockets, stream links' connections
//!         burst = source.receive()
//!         decide(burst)
//!         for destination in decided { deliver(selection of the burst) }
//!     }                                            // the burst gives its memory back
//!     nothing done? yield, spin or sleep
//! }
//! ```
//!
//! A batch runs to completion before the next one is taken: no frame ever waits in a queue between threads. Each source belongs
//! to exactly one dispatcher; no other thread reads from it.
//!
//! - [`core`](mod@self::core): all dispatchers together, and how they adopt a new setup without a lock on the data path.
//! - [`setup`](mod@self::setup): the ports, peers and routes that a core forwards between. Immutable once published.
//! - [`forward`](mod@self::forward): decide and deliver, for one batch.
//! - [`in_place`](mod@self::in_place): frames received straight into a guest's buffers (cut-through forwarding).
//! - [`dispatcher_stats`]: a dispatcher's own statistics.
//! - `observe`: records frames for captures; [`observers`](mod@self::observers): active captures and cache queries.
//! - `kernel_path`: verdicts that the kernel applies by itself; `tunnels`: between hosts; `wire_path`: to vnet hosts.
//! - [`mode`](mod@self::mode): guest-driven or VMM-driven queues; `served`: when a queue is polled and when it sleeps.
//! - [`yielding`](mod@self::yielding): the yield strategy of an idle dispatcher.
//! - [`share`]: weights of sources, and rate limits.
//! - [`isolation`](mod@self::isolation): shields dispatchers from noise of the host.

pub mod core;
pub mod dispatcher_stats;
mod forward;
pub mod in_place;
pub mod isolation;
mod kernel_path;
pub mod mode;
mod observe;
pub mod observers;
mod served;
#[cfg(test)]
mod served_model;
pub mod setup;
pub mod share;
mod tunnels;
mod wire_path;
pub mod yielding;

use std::sync::Arc;
use std::time::{Duration, Instant};

use self::core::Shared;
use self::dispatcher_stats::DispatcherStats;
use self::forward::Forwarder;
use self::mode::{Drive, Mode, ModeSettings};
use self::served::Served;
use self::setup::{Feed, FeedKind, Setup, SetupView, SourceParts};
use self::share::{Grant, Share};
use self::yielding::{Idle, Yielder};
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
/// A spinning dispatcher polls all descriptors once every this many spins, a few microseconds.
const SPINS_PER_POLL: u32 = 4;

/// State of one dispatcher. Lives on its thread.
struct Dispatcher {
    id: usize,
    shared: Arc<Shared>,
    poller: Poller,
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
    spins: u32,
    /// Time at which a rate limit admits the next frame of a source.
    resumes: Option<Instant>,
    /// Scratch list of tokens with events that are not marked yet.
    news: Vec<u64>,
    batch: BatchSlot,
    drops: DropSink,
    yielder: Yielder,
    clock: BusyClock,
    stats: Arc<DispatcherStats>,
    next_tick: Instant,
}

/// Time spent in busy turns. The clock is read once per turn, at its start, which is also the end of the previous turn.
struct BusyClock {
    started: Instant,
    now: Instant,
    /// True when the current turn, which began at `now`, had work.
    busy: bool,
    busy_ns: u64,
    turns: u64,
}

impl BusyClock {
    fn new(started: Instant) -> BusyClock {
        BusyClock { started, now: started, busy: false, busy_ns: 0, turns: 0 }
    }

    /// Starts a turn.
    #[inline]
    fn turn(&mut self) {
        let now = Instant::now();
        if self.busy {
            self.busy_ns += now.saturating_duration_since(self.now).as_nanos() as u64;
            self.turns += 1;
        }
        (self.now, self.busy) = (now, false);
    }

    /// Milliseconds from the core's start to the start of this turn.
    #[inline]
    fn now_ms(&self) -> u64 {
        self.ms(self.now)
    }

    /// Milliseconds from the core's start to `now`.
    fn ms(&self, now: Instant) -> u64 {
        now.saturating_duration_since(self.started).as_millis() as u64
    }

    /// Adds the accumulated time to the counters.
    fn publish(&mut self, stats: &DispatcherStats) {
        stats.busy(std::mem::take(&mut self.turns), std::mem::take(&mut self.busy_ns));
    }
}

impl Dispatcher {
    fn new(id: usize, shared: Arc<Shared>, bridge: Bridge, yielder: Yielder, burst: usize) -> Dispatcher {
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
            spins: 0,
            resumes: None,
            news: Vec::with_capacity(crate::poll::EVENTS_MAX),
            batch: BatchSlot::new(burst),
            drops: DropSink::new(),
            yielder,
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
        served.feed = feed;
        self.served.push(served);
    }

    /// Runs until the core shuts down.
    fn run(mut self) {
        let mut turns = 0;
        while !self.shared.is_stopping() {
            self.clock.turn();
            if self.shared.generation() != self.generation {
                self.adopt();
            }
            self.tick_if_due();
            if self.turn() {
                self.clock.busy = true;
                turns += 1;
                let work = self.forwarder.work;
                if turns >= TURNS_PER_POLL || work.frames >= FRAMES_PER_POLL || work.bytes >= BYTES_PER_POLL {
                    turns = 0;
                    self.tally();
                    self.forwarder.end_of_coalescing();
                    self.wait(Duration::ZERO);
                }
            } else {
                // Datagrams without a frame are probes and keepalives between hosts. No guest waits for what follows them, so
                // they do not justify spinning.
                if std::mem::take(&mut turns) > 0 && self.forwarder.work.frames > 0 {
                    self.tally();
                }
                self.idle();
            }
            self.forwarder.check_if_due();
        }
        self.forwarder.settle_all();
        self.release_all();
    }

    /// Reports the work since the last call to the yield strategy and the counters.
    fn tally(&mut self) {
        let work = std::mem::take(&mut self.forwarder.work);
        self.yielder.worked(work.bytes, self.clock.now);
        self.clock.publish(&self.stats);
    }

    /// Serves each ready source once. Returns true when any had work.
    fn turn(&mut self) -> bool {
        let now = self.clock.now;
        let now_ms = self.clock.now_ms();
        self.forwarder.now_ms = now_ms;
        let (mut busy, mut drained) = (false, true);
        self.resumes = None;
        for served in self.served.iter_mut().filter(|served| served.ready) {
            match served.grant(now) {
                Grant::Cost(cost) => self.batch.set_budget(cost),
                Grant::NextTurn => {
                    (busy, drained) = (true, false);
                    continue;
                }
                Grant::At(at) => {
                    self.resumes = Some(self.resumes.map_or(at, |other| other.min(at)));
                    continue;
                }
            }
            let burst = source::receive(&mut *served.source, &mut self.batch, &mut self.drops, now_ms);
            let taken = burst.taken;
            if let Some(share) = &mut served.share {
                share.charge(&burst, now);
            }
            if !burst.is_empty() {
                self.forwarder.forward(&burst, &mut self.drops);
            }
            drop(burst);
            if let Some(feed) = &served.feed {
                self.forwarder.landed(feed.port, taken.in_place);
            }
            served.looked(taken.units, now);
            busy |= taken.units > 0;
            drained &= taken.drained;
        }
        if drained {
            self.forwarder.end_of_coalescing();
        }
        if busy && self.setup.is_observed() {
            observe::refusals(&self.setup, self.id, &mut self.drops);
        }
        busy
    }

    /// No work: follows the yield strategy.
    fn idle(&mut self) {
        let polled = self.served.iter().any(Served::is_polled);
        match self.yielder.idle(self.clock.now, polled) {
            Idle::Spin => self.spin(),
            Idle::Sleep(time) => self.wait(time),
            Idle::Block => {
                if self.rest_all() {
                    self.warm.clear();
                    self.wait(self.time_to_tick());
                } else {
                    // A source has frames, or cannot notify and must be polled.
                    self.spin();
                }
                self.served.iter_mut().for_each(Served::resume);
            }
        }
    }

    /// Yields the core once, so that receivers of fresh frames can run, and then checks for frames.
    ///
    /// Polling the epoll set touches memory that other cores have written, and receiving the frame takes another system call. So
    /// the sources that had frames last are checked directly, without epoll: a request/response exchange, the reason for
    /// spinning, uses the same descriptors again and again.
    fn spin(&mut self) {
        let before = Instant::now();
        std::thread::yield_now();
        let long = self.yielder.yielded(before, Instant::now());
        self.spins = self.spins.wrapping_add(1);
        if long || self.warm.is_empty() || self.spins.is_multiple_of(SPINS_PER_POLL) {
            self.wait(Duration::ZERO);
        }
        for at in 0..self.warm.len() {
            self.mark(self.warm[at]);
        }
    }

    /// Requests notifications from every guest. Returns false when a guest has frames waiting already: the dispatcher must not
    /// sleep then.
    fn rest_all(&mut self) -> bool {
        self.served.iter_mut().all(Served::rest)
    }

    /// Waits for file descriptor events and marks their sources. Wakes in time for pending interrupt checks of guests.
    fn wait(&mut self, timeout: Duration) {
        let timeout = self.forwarder.time_to_check().map_or(timeout, |check| timeout.min(check));
        let timeout =
            self.resumes.map_or(timeout, |at| timeout.min(at.saturating_duration_since(Instant::now())));
        // Reads error queues first: entries that arrive after this read wake the poller.
        self.reap();
        let mut news = std::mem::take(&mut self.news);
        let result = self.poller.wait(Some(timeout), |token| news.push(token));
        for token in news.drain(..) {
            self.mark(token);
            self.keep_warm(token);
        }
        self.news = news;
        if let Err(error) = result {
            // Only a programming error leads here (a closed epoll descriptor); the sleep bounds the log rate.
            tracing::error!(dispatcher = self.id, %error, "cannot wait for events");
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Marks the token's source as ready.
    fn mark(&mut self, token: u64) {
        if let Some(index) = self.index_of(token) {
            self.served[index].wake();
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

    fn time_to_tick(&self) -> Duration {
        self.next_tick.saturating_duration_since(Instant::now())
    }

    fn tick_if_due(&mut self) {
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
        self.next_tick = now + if self.yielder.is_quiet() { IDLE_TICK } else { TICK };
    }

    /// Adopts the latest published setup: drops removed sources and starts new ones.
    fn adopt(&mut self) {
        let generation = self.shared.generation();
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
        self.served.iter_mut().for_each(|served| served.source.tick(now_ms));
        self.next_tick = Instant::now();
        self.generation = generation;
        self.shared.adopted(self.id, generation);
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

    fn release_all(&mut self) {
        self.served.drain(..).for_each(|mut served| served.source.unwatch());
    }
}
