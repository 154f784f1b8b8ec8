//! Dispatchers: the threads that move frames (VNET/P section 4.3).
//!
//! ```text
//! loop {
//!     adopt a new setup, if one was published
//!     for queue in mine { queue.receive() -> decide -> deliver }   // from guests
//!     for socket in mine { socket.receive() -> decide -> deliver } // from other hosts
//!     nothing done? yield, spin or sleep
//! }
//! ```
//!
//! A batch is run to completion before the next is taken: no frame ever waits in a queue between threads. Interfaces'
//! queues and links' sockets are shared out over the dispatchers; what a dispatcher owns, nobody else reads from.
//!
//! - [`core`](mod@self::core): the dispatchers together, and how a new setup reaches them without a lock on a frame's way.
//! - [`stream`](mod@self::stream): a stream link as something with queues.
//! - [`setup`](mod@self::setup): what a core forwards between: ports, peers, routes. Immutable once published.
//! - [`forward`](mod@self::forward): decide and deliver, for one batch; `direct`: interfaces' own underlay ports.
//! - [`counters`](mod@self::counters): what a dispatcher counts about itself.
//! - [`observe`](mod@self::observe): what is done more while somebody captures or asks.
//! - [`mode`](mod@self::mode): who drives an interface, its guest or the dispatcher; `served`: when a queue is looked at.
//! - [`yielding`](mod@self::yielding): what a dispatcher does when there is nothing to do.
//! - [`isolation`](mod@self::isolation): keeping the noise of the host away from dispatchers.

pub mod core;
pub mod counters;
mod direct;
mod forward;
pub mod isolation;
pub mod mode;
pub mod observe;
mod served;
#[cfg(test)]
mod served_model;
pub mod setup;
pub mod stream;
pub mod yielding;

use std::sync::Arc;
use std::time::{Duration, Instant};

use self::core::Shared;
use self::counters::DispatcherStats;
use self::direct::DirectPort;
use self::forward::Forwarder;
use self::served::Served;
use self::setup::{Port, Setup};
use self::yielding::{Idle, Yielder};
use crate::frame::{Batch, PortId};
use crate::link::{Direct, Receiver};
use crate::poll::Poller;
use crate::route::Router;

/// Token of the first of the dispatcher's own link sockets; interface queues have `port << 16 | queue`.
const SOCKET: u64 = 1 << 40;
/// The same for VXLAN.
const VXLAN_SOCKET: u64 = 1 << 41;
/// The same for interfaces' own ports; their numbers are added.
const DIRECT_SOCKET: u64 = 1 << 42;
/// How often timers run: reassembly time-outs, ageing, path MTUs.
const TICK: Duration = Duration::from_millis(20);
/// The same while nothing moves.
const IDLE_TICK: Duration = Duration::from_millis(1000);
/// While there is work, file descriptors are asked for news after so many turns, frames or bytes: some ten microseconds of
/// work, beside which the question costs nothing and behind which nobody's frame waits long.
const TURNS_PER_POLL: u32 = 8;
const FRAMES_PER_POLL: u64 = 128;
const BYTES_PER_POLL: u64 = 128 << 10;
/// While it spins, a dispatcher looks straight into the descriptors that had news last, at most so many...
const WARM_MAX: usize = 4;
/// ...and asks for news of all of them once in so many spins: some microseconds.
const SPINS_PER_POLL: u32 = 4;

/// One dispatcher's own state. Lives on its thread.
struct Dispatcher {
    id: usize,
    shared: Arc<Shared>,
    poller: Poller,
    generation: u64,
    setup: Arc<Setup>,
    forwarder: Forwarder,
    receiver: Receiver,
    /// Which of the receiver's sockets may have datagrams.
    sockets_ready: Vec<bool>,
    /// For VXLAN, where it is listened for, and whether it may have something.
    vxlan: Option<Receiver>,
    vxlan_ready: bool,
    /// Underlay ports of interfaces that this dispatcher serves.
    directs: Vec<DirectPort>,
    served: Vec<Served>,
    /// Tokens of `served` with their places, in order.
    by_token: Vec<(u64, usize)>,
    /// Tokens that had news since the dispatcher blocked last, in the order in which they first had.
    warm: Vec<u64>,
    spins: u32,
    /// Tokens with news, while they are being marked.
    news: Vec<u64>,
    batch: Batch,
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
    fn new(
        id: usize,
        shared: Arc<Shared>,
        bridge: crate::link::Bridge,
        yielder: Yielder,
        burst: usize,
    ) -> std::io::Result<Dispatcher> {
        let poller = shared.poller(id).clone();
        for (token, fd) in (SOCKET..).zip(bridge.rx.fds()) {
            poller.waker(token).watch(fd)?;
        }
        if let Some(fd) = bridge.vxlan_rx.as_ref().and_then(|rx| rx.fds().next()) {
            poller.waker(VXLAN_SOCKET).watch(fd)?;
        }
        let setup = shared.setup();
        let router = Router::new(setup.table.clone(), shared.learned().clone());
        let mut forwarder = Forwarder::new(id, router, bridge.tx, setup.clone());
        forwarder.stats = shared.dispatcher_stats()[id].clone();
        Ok(Dispatcher {
            id,
            poller,
            generation: 0,
            forwarder,
            setup,
            sockets_ready: vec![true; bridge.rx.fds().count()],
            receiver: bridge.rx.taking(burst),
            vxlan_ready: bridge.vxlan_rx.is_some(),
            vxlan: bridge.vxlan_rx.map(|rx| rx.taking(burst)),
            directs: Vec::new(),
            served: Vec::new(),
            by_token: Vec::new(),
            warm: Vec::with_capacity(WARM_MAX),
            spins: 0,
            news: Vec::with_capacity(crate::poll::EVENTS_MAX),
            batch: Batch::of(burst),
            yielder,
            clock: BusyClock::new(shared.started()),
            stats: shared.dispatcher_stats()[id].clone(),
            next_tick: Instant::now(),
            shared,
        })
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

    /// Serves everything that may have frames once. True when there were any.
    fn turn(&mut self) -> bool {
        let now = self.clock.now;
        self.forwarder.now_ms = self.clock.now_ms();
        let (mut busy, mut drained) = (false, true);
        for served in &mut self.served {
            if !served.ready {
                continue;
            }
            let forwarder = &mut self.forwarder;
            let taken =
                served.interface.receive(served.queue, &mut self.batch, &mut |batch| forwarder.run(batch));
            served.looked(taken, now);
            busy |= taken > 0;
            drained &= taken < self.batch.limit();
        }
        let sockets = self.sockets_ready.iter_mut().enumerate();
        let bridge = sockets.map(|(socket, ready)| (false, socket, ready));
        for (vxlan, socket, ready) in bridge.chain([(true, 0, &mut self.vxlan_ready)]) {
            let receiver = if vxlan { self.vxlan.as_mut() } else { Some(&mut self.receiver) };
            if let Some(receiver) = receiver.filter(|_| *ready) {
                let forwarder = &mut self.forwarder;
                let (peers, now_ms) = (&self.setup.peers, forwarder.now_ms);
                let mut run = |batch: &Batch| forwarder.run(batch);
                let received = receiver.receive(socket, peers, &mut self.batch, now_ms, &mut run);
                *ready = !received.emptied;
                busy |= received.datagrams > 0;
                drained &= received.emptied;
            }
        }
        for port in self.directs.iter_mut().filter(|port| port.ready) {
            let (forwarder, receiver) = (&mut self.forwarder, &mut self.receiver);
            let received = forwarder.receive_direct(port.id, &port.direct, receiver, &mut self.batch);
            port.ready = !received.emptied;
            busy |= received.datagrams > 0;
            drained &= received.emptied;
        }
        if drained {
            self.forwarder.end_of_coalescing();
        }
        if busy && self.setup.is_observed() {
            observe::refusals(&self.setup, self.id);
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
        let sockets = self.sockets_ready.contains(&true) || self.vxlan_ready;
        !sockets && !self.directs.iter().any(|port| port.ready) && self.served.iter_mut().all(Served::rest)
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

    /// Marks what a token stands for as worth a look.
    fn mark(&mut self, token: u64) {
        if let Some(id) = token.checked_sub(DIRECT_SOCKET) {
            let directs = self.directs.iter_mut().filter(|port| u64::from(port.id.0) == id);
            directs.for_each(|port| port.ready = true);
        } else if token == VXLAN_SOCKET {
            self.vxlan_ready = true;
        } else if let Some(socket) = token.checked_sub(SOCKET) {
            self.sockets_ready[socket as usize] = true;
        } else if let Some(index) = self.place(token) {
            self.served[index].wake();
        }
    }

    /// Where the queue of that token is among those served.
    fn place(&self, token: u64) -> Option<usize> {
        let at = self.by_token.binary_search_by_key(&token, |(token, _)| *token).ok()?;
        Some(self.by_token[at].1)
    }

    /// Remembers what had news, in the place of what is remembered for longest. Rings are not looked into that way: those that are
    /// worth it are polled anyway.
    fn keep_warm(&mut self, token: u64) {
        let is_ring = |index: usize| self.served[index].interface.polls();
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
            self.served.iter().for_each(|served| served.interface.reclaim(served.queue));
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
        self.receiver.tick(&self.setup.peers, now_ms);
        self.forwarder.tick(now_ms);
        self.served.iter_mut().for_each(|served| served.refresh(now));
        self.next_tick = now + if self.yielder.is_quiet() { IDLE_TICK } else { TICK };
    }

    /// Takes over the setup that was published last: lets go of queues that went, takes up those that came.
    fn adopt(&mut self) {
        let generation = self.shared.generation();
        self.forwarder.settle_all();
        self.setup = self.shared.setup();
        self.forwarder.now_ms = self.clock.now_ms();
        self.forwarder.adopt(self.setup.clone());
        let mut kept = Vec::new();
        for mut served in std::mem::take(&mut self.served) {
            let port = self.setup.port(served.port).and_then(Port::served);
            match port.filter(|(interface, _)| Arc::ptr_eq(interface, &served.interface)) {
                Some((_, drive)) => {
                    served.set_drive(&drive);
                    kept.push(served);
                }
                None => served.interface.detach(served.queue),
            }
        }
        let now = Instant::now();
        for (port, (interface, drive)) in self.setup.served() {
            for queue in 0..interface.queues() {
                let mine = (port.index() + queue) % self.shared.dispatchers() == self.id;
                if !mine || kept.iter().any(|s| s.port == port && s.queue == queue) {
                    continue;
                }
                let served = Served::new(port, queue, interface.clone(), &drive, now);
                served.interface.attach(queue, self.poller.waker(served.token()));
                kept.push(served);
            }
        }
        // A port that came may have the token of one that went.
        self.warm.clear();
        self.by_token = kept.iter().enumerate().map(|(i, s)| (s.token(), i)).collect();
        self.by_token.sort_unstable();
        self.served = kept;
        self.adopt_directs();
        self.receiver.tick(&self.setup.peers, self.clock.now_ms());
        if let Some(receiver) = &mut self.vxlan {
            receiver.adopt(&self.setup.peers);
        }
        self.next_tick = now;
        self.generation = generation;
        self.shared.adopted(self.id, generation);
    }

    /// Takes up and lets go of interfaces' own ports: each is the dispatcher's that serves the interface's first queue.
    fn adopt_directs(&mut self) {
        let (id, dispatchers) = (self.id, self.shared.dispatchers());
        let mine = |port: &&(PortId, Arc<Direct>)| port.0.index() % dispatchers == id;
        let mut before = std::mem::take(&mut self.directs);
        for (port, direct) in self.setup.directs.iter().filter(mine) {
            let known =
                before.iter().position(|known| known.id == *port && Arc::ptr_eq(&known.direct, direct));
            let token = DIRECT_SOCKET + u64::from(port.0);
            match known {
                Some(at) => self.directs.push(before.swap_remove(at)),
                None => match self.poller.waker(token).watch(direct.fd()) {
                    Ok(()) => {
                        self.directs.push(DirectPort { id: *port, direct: direct.clone(), ready: true });
                    }
                    Err(error) => tracing::error!(%error, "cannot watch an interface's own port"),
                },
            }
        }
        for gone in before {
            self.poller.waker(DIRECT_SOCKET).forget(gone.direct.fd());
        }
    }

    fn release_all(&mut self) {
        for served in self.served.drain(..) {
            served.interface.detach(served.queue);
        }
    }
}
