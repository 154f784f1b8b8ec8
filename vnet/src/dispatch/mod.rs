//! Dispatchers: the threads that move frames (VNET/P section 4.3).
//!
//! ```text
//! loop {
//!     adopt a new setup, if one was published
//!     for queue in mine { queue.receive() -> decide -> deliver }   // from guests
//!     socket.receive() -> decide -> deliver                        // from other hosts
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
//! - [`forward`](mod@self::forward): decide and deliver, for one batch.
//! - [`counters`](mod@self::counters): what a dispatcher counts about itself.
//! - [`observe`](mod@self::observe): what is done more while somebody captures or asks.
//! - [`yielding`](mod@self::yielding): what a dispatcher does when there is nothing to do.

pub mod core;
pub mod counters;
mod forward;
pub mod observe;
pub mod setup;
pub mod stream;
pub mod yielding;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use self::core::Shared;
use self::forward::Forwarder;
use self::setup::{Port, Setup};
use self::yielding::{Idle, Yielder};
use crate::frame::{Batch, PortId};
use crate::interface::Interface;
use crate::link::Receiver;
use crate::poll::Poller;
use crate::route::Router;

/// Token of the dispatcher's own link socket; interface queues have `port << 16 | queue`.
const SOCKET: u64 = 1 << 40;
/// The same for VXLAN.
const VXLAN_SOCKET: u64 = SOCKET + 1;
/// How often timers run: reassembly time-outs, ageing, path MTUs.
const TICK: Duration = Duration::from_millis(20);
/// The same while nothing moves.
const IDLE_TICK: Duration = Duration::from_millis(1000);
/// While there is work, file descriptors are asked for news after so many turns, frames or bytes: some ten microseconds of
/// work, beside which the question costs nothing and behind which nobody's frame waits long.
const TURNS_PER_POLL: u32 = 8;
const FRAMES_PER_POLL: u64 = 128;
const BYTES_PER_POLL: u64 = 128 << 10;
/// A ring that was empty so many turns in a row is left until its guest notifies.
const EMPTY_TURNS_MAX: u32 = 1024;

/// A queue that this dispatcher serves.
struct Served {
    port: PortId,
    queue: usize,
    interface: Arc<dyn Interface>,
    /// Worth a `receive`: it had frames last time, was woken, or is cheap to look at.
    ready: bool,
    /// The guest has been asked to notify.
    armed: bool,
    empty_turns: u32,
}

impl Served {
    fn token(&self) -> u64 {
        token(self.port, self.queue)
    }
}

fn token(port: PortId, queue: usize) -> u64 {
    u64::from(port.0) << 16 | queue as u64
}

/// One dispatcher's own state. Lives on its thread.
struct Dispatcher {
    id: usize,
    shared: Arc<Shared>,
    poller: Poller,
    generation: u64,
    setup: Arc<Setup>,
    forwarder: Forwarder,
    receiver: Receiver,
    socket_ready: bool,
    /// For VXLAN, where it is listened for, and whether it may have something.
    vxlan: Option<Receiver>,
    vxlan_ready: bool,
    served: Vec<Served>,
    by_token: HashMap<u64, usize>,
    batch: Batch,
    yielder: Yielder,
    started: Instant,
    next_tick: Instant,
}

impl Dispatcher {
    fn new(
        id: usize,
        shared: Arc<Shared>,
        bridge: crate::link::Bridge,
        yielder: Yielder,
    ) -> std::io::Result<Dispatcher> {
        let poller = shared.poller(id).clone();
        poller.waker(SOCKET).watch(bridge.rx.fd())?;
        if let Some(rx) = &bridge.vxlan_rx {
            poller.waker(VXLAN_SOCKET).watch(rx.fd())?;
        }
        let setup = shared.setup();
        let started = shared.started();
        let router = Router::new(setup.table.clone(), shared.learned().clone());
        let mut forwarder = Forwarder::new(id, router, bridge.tx, setup.clone());
        forwarder.stats = shared.dispatcher_stats()[id].clone();
        Ok(Dispatcher {
            id,
            poller,
            generation: 0,
            forwarder,
            setup,
            receiver: bridge.rx,
            socket_ready: true,
            vxlan_ready: bridge.vxlan_rx.is_some(),
            vxlan: bridge.vxlan_rx,
            served: Vec::new(),
            by_token: HashMap::new(),
            batch: Batch::new(),
            yielder,
            started,
            next_tick: Instant::now(),
            shared,
        })
    }

    /// Runs until the core shuts down.
    fn run(mut self) {
        let mut turns = 0;
        while !self.shared.is_stopping() {
            if self.shared.generation() != self.generation {
                self.adopt();
            }
            if self.turn() {
                turns += 1;
                let work = self.forwarder.work;
                if turns >= TURNS_PER_POLL || work.frames >= FRAMES_PER_POLL || work.bytes >= BYTES_PER_POLL {
                    turns = 0;
                    self.tally();
                    self.wait(Duration::ZERO);
                    self.tick_if_due();
                }
            } else {
                if std::mem::take(&mut turns) > 0 {
                    self.tally();
                }
                self.idle();
                self.tick_if_due();
            }
        }
        self.release_all();
    }

    /// Tells the yield strategy what was moved since it was told last.
    fn tally(&mut self) {
        self.yielder.worked(std::mem::take(&mut self.forwarder.work).bytes);
    }

    /// Serves everything that may have frames once. True when there were any.
    fn turn(&mut self) -> bool {
        self.forwarder.now_ms = self.now_ms();
        let mut busy = false;
        for served in &mut self.served {
            if !served.ready {
                continue;
            }
            let forwarder = &mut self.forwarder;
            let taken =
                served.interface.receive(served.queue, &mut self.batch, &mut |batch| forwarder.run(batch));
            busy |= taken > 0;
            if !served.interface.polls() {
                // Emptied, it need not be looked at before it wakes us.
                served.ready = !served.interface.arm(served.queue);
            } else if taken > 0 {
                served.empty_turns = 0;
            } else {
                served.empty_turns += 1;
                if served.empty_turns >= EMPTY_TURNS_MAX {
                    served.rest();
                }
            }
        }
        let sockets = [
            (Some(&mut self.receiver), &mut self.socket_ready),
            (self.vxlan.as_mut(), &mut self.vxlan_ready),
        ];
        for (receiver, ready) in sockets {
            if let Some(receiver) = receiver.filter(|_| *ready) {
                let forwarder = &mut self.forwarder;
                let (peers, now_ms) = (&self.setup.peers, forwarder.now_ms);
                let received =
                    receiver.receive(peers, &mut self.batch, now_ms, &mut |batch| forwarder.run(batch));
                *ready = !received.emptied;
                busy |= received.datagrams > 0;
            }
        }
        if busy && self.setup.is_observed() {
            observe::refusals(&self.setup, self.id);
        }
        busy
    }

    /// Nothing was there: do what the yield strategy says.
    fn idle(&mut self) {
        match self.yielder.idle(Instant::now()) {
            Idle::Spin => self.spin(),
            Idle::Sleep(time) => self.wait(time),
            Idle::Block => {
                if self.arm_all() {
                    self.wait(self.time_to_tick());
                } else {
                    // Somebody has frames, or cannot notify at all and wants to be polled.
                    self.spin();
                }
            }
        }
    }

    /// Hears of file descriptors, and lets others have the core for a moment.
    fn spin(&mut self) {
        self.wait(Duration::ZERO);
        let before = Instant::now();
        std::thread::yield_now();
        self.yielder.yielded(before, Instant::now());
    }

    /// Asks every guest to notify. False when one has frames waiting, so that sleeping now would leave them there.
    fn arm_all(&mut self) -> bool {
        for served in &mut self.served {
            if !served.armed && !served.rest() {
                return false;
            }
        }
        !self.socket_ready && !self.vxlan_ready
    }

    /// Waits for news of file descriptors and marks what they concern.
    fn wait(&mut self, timeout: Duration) {
        let (served, by_token) = (&mut self.served, &self.by_token);
        let (socket_ready, vxlan_ready) = (&mut self.socket_ready, &mut self.vxlan_ready);
        let result = self.poller.wait(Some(timeout), |token| {
            if token == SOCKET {
                *socket_ready = true;
            } else if token == VXLAN_SOCKET {
                *vxlan_ready = true;
            } else if let Some(&index) = by_token.get(&token) {
                served[index].wake();
            }
        });
        if let Err(error) = result {
            // Only programming errors get here (a closed epoll descriptor); sleeping keeps the log readable.
            tracing::error!(dispatcher = self.id, %error, "cannot wait for events");
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    fn now_ms(&self) -> u64 {
        self.started.elapsed().as_millis() as u64
    }

    fn time_to_tick(&self) -> Duration {
        self.next_tick.saturating_duration_since(Instant::now())
    }

    fn tick_if_due(&mut self) {
        let now = Instant::now();
        if now < self.next_tick {
            return;
        }
        let now_ms = self.now_ms();
        self.receiver.tick(&self.setup.peers, now_ms);
        self.forwarder.tick(now_ms);
        self.next_tick = now + if self.yielder.is_quiet() { IDLE_TICK } else { TICK };
    }

    /// Takes over the setup that was published last: lets go of queues that went, takes up those that came.
    fn adopt(&mut self) {
        let generation = self.shared.generation();
        self.setup = self.shared.setup();
        self.forwarder.now_ms = self.now_ms();
        self.forwarder.adopt(self.setup.clone());
        let mut kept = Vec::new();
        for served in std::mem::take(&mut self.served) {
            let now = self.setup.port(served.port).and_then(Port::served);
            let same = now.is_some_and(|now| Arc::ptr_eq(&now, &served.interface));
            if same {
                kept.push(served);
            } else {
                served.interface.detach(served.queue);
            }
        }
        for (port, interface) in self.setup.served() {
            for queue in 0..interface.queues() {
                let mine = (port.index() + queue) % self.shared.dispatchers() == self.id;
                if !mine || kept.iter().any(|s| s.port == port && s.queue == queue) {
                    continue;
                }
                let served = Served {
                    port,
                    queue,
                    interface: interface.clone(),
                    ready: true,
                    armed: false,
                    empty_turns: 0,
                };
                served.interface.attach(queue, self.poller.waker(served.token()));
                kept.push(served);
            }
        }
        self.by_token = kept.iter().enumerate().map(|(i, s)| (s.token(), i)).collect();
        self.served = kept;
        self.receiver.tick(&self.setup.peers, self.now_ms());
        if let Some(receiver) = &mut self.vxlan {
            receiver.adopt(&self.setup.peers);
        }
        self.next_tick = Instant::now();
        self.generation = generation;
        self.shared.adopted(self.id, generation);
    }

    fn release_all(&mut self) {
        for served in self.served.drain(..) {
            served.interface.detach(served.queue);
        }
    }
}

impl Served {
    /// Leaves the queue until its guest notifies. False when frames are waiting already.
    fn rest(&mut self) -> bool {
        if self.interface.arm(self.queue) {
            self.armed = true;
            self.ready = false;
        } else {
            self.ready = true;
        }
        self.empty_turns = 0;
        !self.ready
    }

    /// The guest notified.
    fn wake(&mut self) {
        if self.armed {
            self.interface.disarm(self.queue);
            self.armed = false;
        }
        self.ready = true;
    }
}
