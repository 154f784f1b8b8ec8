//! A thread: the loop over the dispatchers that it runs, usually one.
//!
//! ```text
//! loop {
//!     mail: dispatchers that arrive here, or have to go to another thread
//!     for dispatcher in mine { one turn }
//!     all idle? yield, spin or sleep
//! }
//! ```
//!
//! **Handing over.** A dispatcher is moved as a whole, between two rounds: its last turn has forwarded every frame that
//! it had taken, and the lock of the mailbox orders everything the old thread did before everything that the new one does. So no
//! frame of a flow is overtaken: its queue, its cache and the socket that it leaves by stay together. What arrives meanwhile waits
//! in rings and sockets, and its events in the dispatcher's epoll set, so that no wake-up is lost either.
//!
//! **Standing still.** While another vnetd takes over, all threads wait between two rounds. Before, they forward the frames of which a
//! source has taken a part already: the rest of a burst, and frames whose other fragments are in the socket.
//!
//! **Sleeping.** With one dispatcher, a thread sleeps on the dispatcher's own epoll set; with several, on a set that holds theirs.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::dispatcher::{Dispatcher, Turn};
use super::mailbox::Mailbox;
use super::shared::Shared;
use super::yielding::{Idle, Yielder};
use crate::poll::Poller;

/// A spinning thread has all descriptors polled once every this many spins, a few microseconds.
const SPINS_PER_POLL: u32 = 4;
/// Longest sleep of a thread that runs no dispatcher yet.
const EMPTY_SLEEP: Duration = Duration::from_secs(1);
/// Longest sleep when the kernel refused to nest the dispatchers' epoll sets, so that their events wake nobody.
const UNNESTED_SLEEP: Duration = Duration::from_millis(1);

/// How long a thread that is to stand still completes frames. A frame's fragments are sent at once, so the others are in the socket, unless
/// the network has lost them.
const COMPLETE_MAX: Duration = Duration::from_millis(5);

/// A thread's mailbox.
pub(super) struct Post {
    /// Wakes a thread that runs no dispatcher; holds the epoll sets of several.
    pub(super) poller: Poller,
    mailbox: Mailbox<Mail>,
}

#[derive(Default)]
struct Mail {
    arriving: Vec<Dispatcher>,
    orders: Vec<Order>,
    /// The thread shall end once it runs no dispatcher any more.
    dismissed: bool,
}

/// Orders a thread to hand over a dispatcher.
pub(super) struct Order {
    pub(super) dispatcher: usize,
    pub(super) to: Arc<Post>,
    /// Wakes the thread that reads `to`.
    pub(super) bell: Poller,
}

impl Post {
    pub(super) fn new() -> std::io::Result<Post> {
        Ok(Post { poller: Poller::new()?, mailbox: Mailbox::new() })
    }

    /// Adds to the mail, and wakes the thread by `bell`.
    fn drop_in(&self, bell: &Poller, add: impl FnOnce(&mut Mail)) {
        self.mailbox.add(add);
        bell.ring();
    }

    /// Orders the thread to hand over a dispatcher; `bell` wakes the thread.
    pub(super) fn order(&self, order: Order, bell: &Poller) {
        self.drop_in(bell, |mail| mail.orders.push(order));
    }

    /// Ends the thread once it runs no dispatcher.
    pub(super) fn dismiss(&self) {
        self.drop_in(&self.poller, |mail| mail.dismissed = true);
    }

    /// Dispatchers that no thread has taken before it ended.
    pub(super) fn unclaimed(&self) -> Vec<Dispatcher> {
        self.mailbox.take().arriving
    }
}

/// What a thread runs.
pub(super) struct Worker {
    slot: usize,
    shared: Arc<Shared>,
    post: Arc<Post>,
    dispatchers: Vec<Dispatcher>,
    yielder: Yielder,
    spins: u32,
    /// Start of the last turn.
    now: Instant,
    /// False when the kernel refused to nest an epoll set.
    nested: bool,
}

impl Worker {
    /// The worker in `slot`, which starts with these dispatchers.
    pub(super) fn new(
        slot: usize,
        shared: Arc<Shared>,
        post: Arc<Post>,
        dispatchers: Vec<Dispatcher>,
        yielder: Yielder,
    ) -> Worker {
        let now = Instant::now();
        Worker { slot, shared, post, dispatchers, yielder, spins: 0, now, nested: true }
    }

    /// Runs until the core shuts down, or until it is dismissed and another thread runs its dispatchers.
    pub(super) fn run(mut self) {
        self.nest();
        while !self.shared.publication.is_stopping() {
            if self.post.mailbox.has_mail() && self.exchange() {
                return;
            }
            if self.shared.publication.is_pausing() {
                self.stand_still();
                continue;
            }
            if !self.round() {
                self.idle();
            }
            self.dispatchers.iter_mut().for_each(|dispatcher| dispatcher.check_interrupts());
        }
        self.dispatchers.iter_mut().for_each(|dispatcher| dispatcher.finish());
    }

    /// One turn of each dispatcher. Returns true when any had work.
    fn round(&mut self) -> bool {
        let count = self.dispatchers.len();
        let (mut busy, mut polled) = (false, false);
        for at in 0..count {
            self.now = Instant::now();
            self.dispatchers[(at + count - 1) % count].end_turn(self.now);
            let turn = self.dispatchers[at].work(self.now, &mut self.yielder);
            busy |= turn != Turn::Idle;
            polled |= turn == Turn::Polled;
        }
        if polled && count > 1 {
            // The others' descriptors are polled as often as those of the busiest.
            self.dispatchers.iter_mut().for_each(|dispatcher| dispatcher.wait(Duration::ZERO));
        }
        busy
    }

    /// No work: follows the yield strategy.
    fn idle(&mut self) {
        let polled = self.dispatchers.iter().any(|dispatcher| dispatcher.is_polled());
        match self.yielder.idle(self.now, polled) {
            Idle::Spin if !self.dispatchers.is_empty() => self.spin(),
            Idle::Sleep(time) => self.wait(time),
            Idle::Spin | Idle::Block => {
                if self.dispatchers.iter_mut().all(|dispatcher| dispatcher.rest()) {
                    self.dispatchers.iter_mut().for_each(|dispatcher| dispatcher.cool());
                    let tick = self.dispatchers.iter().map(|dispatcher| dispatcher.time_to_tick()).min();
                    self.wait(tick.unwrap_or(EMPTY_SLEEP));
                } else {
                    // A source has frames, or cannot notify and must be polled.
                    self.spin();
                }
                self.dispatchers.iter_mut().for_each(|dispatcher| dispatcher.resume());
            }
        }
    }

    /// Yields the core once, so that receivers of fresh frames can run, and then checks for frames.
    fn spin(&mut self) {
        let before = Instant::now();
        std::thread::yield_now();
        let long = self.yielder.yielded(before, Instant::now());
        self.spins = self.spins.wrapping_add(1);
        let poll = long || self.spins.is_multiple_of(SPINS_PER_POLL);
        self.dispatchers.iter_mut().for_each(|dispatcher| dispatcher.look(poll));
    }

    /// Sleeps until an event or for `timeout`.
    fn wait(&mut self, timeout: Duration) {
        if let [only] = &mut self.dispatchers[..] {
            return only.wait(timeout);
        }
        let limit = |timeout, dispatcher: &mut Dispatcher| dispatcher.sleep_limit(timeout);
        let mut timeout = self.dispatchers.iter_mut().fold(timeout, limit);
        if !self.nested {
            timeout = timeout.min(UNNESTED_SLEEP);
        }
        if let Err(error) = self.post.poller.wait(Some(timeout), |_| {}) {
            // Only a programming error leads here (a closed epoll descriptor); the sleep bounds the log rate.
            tracing::error!(thread = self.slot, %error, "cannot wait for events");
            std::thread::sleep(Duration::from_millis(100));
        }
        self.dispatchers.iter_mut().for_each(|dispatcher| dispatcher.wait(Duration::ZERO));
    }

    /// Completes what the dispatchers have begun, and waits until they may go on.
    #[cold]
    fn stand_still(&mut self) {
        let deadline = Instant::now() + COMPLETE_MAX;
        while !self.dispatchers.iter_mut().all(|dispatcher| dispatcher.complete(Instant::now()))
            && Instant::now() < deadline
        {}
        let now = Instant::now();
        let ids: Vec<_> = self.dispatchers.iter().map(|dispatcher| dispatcher.id).collect();
        self.dispatchers.iter_mut().for_each(|dispatcher| dispatcher.pause(now, &mut self.yielder));
        self.shared.publication.stand_still(&ids);
        self.dispatchers.iter_mut().for_each(|dispatcher| dispatcher.look_everywhere());
    }

    /// Takes arriving dispatchers and hands over those that have to go. Returns true when the thread shall end.
    #[cold]
    fn exchange(&mut self) -> bool {
        let Mail { arriving, orders, dismissed } = self.post.mailbox.take();
        self.dispatchers.iter().for_each(|dispatcher| self.post.poller.forget(&dispatcher.poller));
        self.dispatchers.extend(arriving);
        let now = Instant::now();
        for Order { dispatcher, to, bell } in orders {
            let Some(at) = self.dispatchers.iter().position(|mine| mine.id == dispatcher) else { continue };
            let mut gone = self.dispatchers.remove(at);
            gone.pause(now, &mut self.yielder);
            to.drop_in(&bell, |mail| mail.arriving.push(gone));
        }
        self.nest();
        dismissed && self.dispatchers.is_empty()
    }

    /// Collects the epoll sets of several dispatchers in one, and reports which dispatchers the thread runs.
    fn nest(&mut self) {
        let poller = &self.post.poller;
        let several = self.dispatchers.len() > 1;
        let failed = |dispatcher: &Dispatcher| poller.nest(&dispatcher.poller).err();
        let error = self.dispatchers.iter().filter(|_| several).find_map(failed);
        if let Some(error) = &error {
            tracing::warn!(%error, "cannot watch several dispatchers at once: the thread wakes each millisecond");
        }
        self.nested = error.is_none();
        self.dispatchers.iter().for_each(|dispatcher| self.shared.publication.runs(dispatcher.id, self.slot));
    }
}
