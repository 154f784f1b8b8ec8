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
//! A batch is run to completion before the next is taken: no frame ever waits in a queue between threads. Sources are shared
//! out over the dispatchers; nobody else reads from what a dispatcher owns.
//!
//! - [`core`](mod@self::core): the dispatchers together, and how a new setup reaches them without a lock on a frame's way.
//! - [`setup`](mod@self::setup): what a core forwards between: ports, peers, routes. Immutable once published.
//! - [`forward`](mod@self::forward): decide and deliver, for one batch.
//! - [`in_place`](mod@self::in_place): frames received straight into a guest's buffers (cut-through forwarding).
//! - [`counters`](mod@self::counters): what a dispatcher counts about itself.
//! - `observe`: records frames for captures; [`observers`](mod@self::observers): who captures or asks.
//! - [`mode`](mod@self::mode): who drives an interface, its guest or the dispatcher; `served`: when a queue is looked at.
//! - [`yielding`](mod@self::yielding): what a dispatcher does when there is nothing to do.
//! - [`isolation`](mod@self::isolation): keeping the noise of the host away from dispatchers.

pub mod core;
pub mod counters;
mod forward;
pub mod in_place;
pub mod isolation;
pub mod mode;
mod observe;
pub mod observers;
mod served;
#[cfg(test)]
mod served_model;
pub mod setup;
pub mod yielding;

use std::sync::Arc;
use std::time::{Duration, Instant};

use self::core::Shared;
use self::counters::DispatcherStats;
use self::forward::Forwarder;
use self::mode::{Drive, Mode, ModeSettings};
use self::served::Served;
use self::setup::{Feed, FeedKind, Setup, SetupView, SourceParts};
use self::yielding::{Idle, Yielder};
use crate::frame::DropSink;
use crate::link::{Bridge, PeersView, ReceiverParts};
use crate::poll::Poller;
use crate::route::Router;
use crate::source::{self, BatchSlot, Source};

/// How often timers run: reassembly time-outs, ageing, path MTUs.
const TICK: Duration = Duration::from_millis(20);
/// The same while nothing moves.
const IDLE_TICK: Duration = Duration::from_millis(1000);
/// While there is work, file descriptors are polled after so many turns, frames or bytes: some ten microseconds of
/// work, beside which the question costs nothing and behind which nobody's frame waits long.
const TURNS_PER_POLL: u32 = 8;
const FRAMES_PER_POLL: u64 = 128;
const BYTES_PER_POLL: u64 = 128 << 10;
/// While it spins, a dispatcher looks straight into the descriptors that had news last, at most so many...
const WARM_MAX: usize = 4;
/// ...and polls all of them once in so many spins: some microseconds.
const SPINS_PER_POLL: u32 = 4;

/// One dispatcher's own state. Lives on its thread.
struct Dispatcher {
    id: usize,
    shared: Arc<Shared>,
    poller: Poller,
    generation: u64,
    setup: Arc<Setup>,
    /// The same for sources that decide for themselves, and its links for receivers.
    setup_view: SetupView,
    peers: PeersView,
    /// Makes receivers for underlay ports.
    receivers: ReceiverParts,
    forwarder: Forwarder,
    /// All sources, in ascending order of their tokens.
    served: Vec<Served>,
    next_token: u64,
    /// Tokens that had news since the dispatcher blocked last, in the order in which they first had.
    warm: Vec<u64>,
    spins: u32,
    /// Tokens with news, while they are being marked.
    news: Vec<u64>,
    batch: BatchSlot,
    drops: DropSink,
    yielder: Yielder,
    clock: BusyClock,
    stats: Arc<DispatcherStats>,
    next_tick: Instant,
}

/// How long the turns with work take. The clock is read once a turn, at its begin, which is the end of the one before.
struct BusyClock {
    started: Instant,
    now: Instant,
    /// Since `now` the dispatcher has been busy.
    busy: bool,
    busy_ns: u64,
    turns: u64,
}

impl BusyClock {
    fn new(started: Instant) -> BusyClock {
        BusyClock { started, now: started, busy: false, busy_ns: 0, turns: 0 }
    }

    /// Begins a turn.
    #[inline]
    fn turn(&mut self) {
        let now = Instant::now();
        if self.busy {
            self.busy_ns += now.saturating_duration_since(self.now).as_nanos() as u64;
            self.turns += 1;
        }
        (self.now, self.busy) = (now, false);
    }

    /// Milliseconds from the core's start to the begin of this turn.
    #[inline]
    fn now_ms(&self) -> u64 {
        self.ms(self.now)
    }

    /// Milliseconds from the core's start to `now`.
    fn ms(&self, now: Instant) -> u64 {
        now.saturating_duration_since(self.started).as_millis() as u64
    }

    /// Adds what was gathered to the counters.
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
            served: Vec::new(),
            next_token: 0,
            warm: Vec::with_capacity(WARM_MAX),
            spins: 0,
            news: Vec::with_capacity(crate::poll::EVENTS_MAX),
            batch: BatchSlot::new(burst),
            drops: DropSink::new(),
            yielder,
            clock: BusyClock::new(shared.started()),
            stats: shared.dispatcher_stats()[id].clone(),
            next_tick: Instant::now(),
            shared,
        };
        let guest_driven = ModeSettings { mode: Mode::GuestDriven, ..ModeSettings::default() };
        for receiver in bridge.rx.into_iter().chain(bridge.vxlan_rx) {
            let source = Box::new(receiver.taking(burst));
            dispatcher.serve(source, (Drive::new(guest_driven, 1), 0), None);
        }
        dispatcher
    }

    /// Takes up a source.
    fn serve(&mut self, mut source: Box<dyn Source>, drive: (Drive, usize), feed: Option<Feed>) {
        let token = self.next_token;
        self.next_token += 1;
        source.watch(self.poller.waker(token));
        let mut served = Served::new(token, source, drive, Instant::now());
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
                // A few datagrams without a frame are what hosts say to each other, probes and keepalives. Nobody waits for what
                // comes after them, so they are no reason to spin.
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

    /// Tells the yield strategy, and whoever reads the counters, what was moved since they were told last.
    fn tally(&mut self) {
        let work = std::mem::take(&mut self.forwarder.work);
        self.yielder.worked(work.bytes, self.clock.now);
        self.clock.publish(&self.stats);
    }

    /// Serves every source that may have frames once. True when there were any.
    fn turn(&mut self) -> bool {
        let now = self.clock.now;
        let now_ms = self.clock.now_ms();
        self.forwarder.now_ms = now_ms;
        let (mut busy, mut drained) = (false, true);
        for served in self.served.iter_mut().filter(|served| served.ready) {
            let burst = source::receive(&mut *served.source, &mut self.batch, &mut self.drops, now_ms);
            let taken = burst.taken;
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

    /// Nothing was there: do what the yield strategy says.
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
                    // Somebody has frames, or cannot notify at all and wants to be polled.
                    self.spin();
                }
                self.served.iter_mut().for_each(Served::resume);
            }
        }
    }

    /// Lets others have the core for a moment, first of all those who have just been given frames; then looks for frames.
    ///
    /// Asking for news touches much memory that other cores have written to, and the answer is a second system call away from
    /// the frame. Where a frame was last, the next one is looked for without asking: the exchange that spinning is for comes
    /// by the same descriptors again and again.
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

    /// Asks every guest to notify. False when one has frames waiting, so that sleeping now would leave them there.
    fn rest_all(&mut self) -> bool {
        self.served.iter_mut().all(Served::rest)
    }

    /// Waits for news of file descriptors and marks what they concern. A guest that may not have noticed its frames is
    /// looked after in time.
    fn wait(&mut self, timeout: Duration) {
        let timeout = self.forwarder.time_to_check().map_or(timeout, |check| timeout.min(check));
        // What comes after this look wakes: news in a socket's error queue count as an event of it.
        self.reap();
        let mut news = std::mem::take(&mut self.news);
        let result = self.poller.wait(Some(timeout), |token| news.push(token));
        for token in news.drain(..) {
            self.mark(token);
            self.keep_warm(token);
        }
        self.news = news;
        if let Err(error) = result {
            // Only programming errors get here (a closed epoll descriptor); sleeping keeps the log readable.
            tracing::error!(dispatcher = self.id, %error, "cannot wait for events");
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Marks the source of a token as worth a look.
    fn mark(&mut self, token: u64) {
        if let Some(index) = self.place(token) {
            self.served[index].wake();
        }
    }

    /// Where the source of that token is among those served.
    fn place(&self, token: u64) -> Option<usize> {
        self.served.binary_search_by_key(&token, |served| served.token).ok()
    }

    /// Remembers what had news, in the place of what is remembered for longest. Rings are not looked into that way: those that are
    /// worth it are polled anyway.
    fn keep_warm(&mut self, token: u64) {
        let is_ring = |index: usize| self.served[index].source.polls();
        if self.warm.contains(&token) || self.place(token).is_some_and(is_ring) {
            return;
        }
        if self.warm.len() == WARM_MAX {
            self.warm.remove(0);
        }
        self.warm.push(token);
    }

    /// Has guests get back what the kernel no longer reads of their memory.
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
        self.forwarder.tick(now_ms);
        for served in &mut self.served {
            served.source.tick(now_ms);
            served.refresh(now);
        }
        self.next_tick = now + if self.yielder.is_quiet() { IDLE_TICK } else { TICK };
    }

    /// Takes over the setup that was published last: lets go of sources that went, takes up those that came.
    fn adopt(&mut self) {
        let generation = self.shared.generation();
        self.forwarder.settle_all();
        self.setup = self.shared.setup();
        self.setup_view.store(self.setup.clone());
        self.peers.store(self.setup.peers.clone());
        self.drops.watch(self.setup.is_observed());
        let now_ms = self.clock.now_ms();
        self.forwarder.now_ms = now_ms;
        self.forwarder.adopt(self.setup.clone());
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

    /// The source of a feed of the present setup.
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
