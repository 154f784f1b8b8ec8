//! Loom models of [`publication`] and [`mailbox`]: no thread uses what control has taken back, and a dispatcher is run by one
//! thread at a time, wherever it is moved.
//!
//! Threads follow `Worker::run` and control follows `Crew`, with the real publication and mailbox. Bells are eventfds. All sleeps
//! are without a limit, so a wake-up that is lost is a deadlock, which loom reports.

use std::sync::Arc;
use std::time::Duration;

use loom::cell::UnsafeCell;
use loom::thread;

use crate::alone;
use crate::loomed::{Bells, explore};
use crate::proof::bound;

#[allow(clippy::duplicate_mod, reason = "the real code, with loom's types")]
#[path = "mailbox.rs"]
mod mailbox;
#[allow(clippy::duplicate_mod, dead_code, reason = "the real code, with loom's types")]
#[path = "publication.rs"]
mod publication;
mod sync {
    pub(super) use std::sync::Arc;

    pub(super) use crate::loomed::{ArcSwap, Condvar, Mutex};
    pub(super) use loom::sync::atomic::{AtomicBool, AtomicU64, Ordering};
}
use mailbox::Mailbox;
use publication::Publication;

/// Memory that only one thread may use at a time: loom reports two that are not ordered.
struct Watched(UnsafeCell<u32>);

// SAFETY: loom reports every unordered access.
unsafe impl Send for Watched {}
// SAFETY: as above.
unsafe impl Sync for Watched {}

impl Watched {
    fn new() -> Watched {
        Watched(UnsafeCell::new(0))
    }

    fn read(&self) {
        // SAFETY: loom reports an access that is not ordered with this one.
        self.0.with(|value| unsafe { value.read() });
    }

    fn write(&self) {
        // SAFETY: as above.
        self.0.with_mut(|value| unsafe { value.write(1) });
    }
}

struct Dispatcher {
    id: usize,
    generation: u64,
    setup: Arc<Watched>,
    /// Sources, cache and sockets.
    state: Watched,
}

#[derive(Default)]
struct Mail {
    arriving: Vec<Dispatcher>,
    /// Dispatcher, and the slot of the thread that takes it.
    orders: Vec<(usize, usize, usize)>,
    dismissed: bool,
}

/// Two dispatchers and two slots for threads. Bells: of both dispatchers, then of both slots.
struct Core {
    publication: Publication<Watched>,
    bells: Bells,
    posts: [Mailbox<Mail>; 2],
}

impl Core {
    fn new() -> Arc<Core> {
        let posts = [Mailbox::new(), Mailbox::new()];
        Arc::new(Core { publication: Publication::new(2, Watched::new()), bells: Bells::new(4), posts })
    }

    fn dispatcher(&self, id: usize) -> Dispatcher {
        Dispatcher { id, generation: 0, setup: self.publication.value(), state: Watched::new() }
    }

    fn ring_all(&self) {
        [0, 1].into_iter().for_each(|dispatcher| self.bells.ring(dispatcher));
    }

    /// `Crew::drop`.
    fn stop(&self) {
        self.publication.stop();
        (0..4).for_each(|bell| self.bells.ring(bell));
    }

    /// `Roster::hand_over`.
    fn hand_over(&self, id: usize, slot: usize) {
        let slots = self.publication.slots();
        let there = slots.iter().position(|other| *other == slot);
        let bell = there.unwrap_or(2 + slot);
        self.posts[slots[id]].add(|mail| mail.orders.push((id, slot, bell)));
        self.bells.ring(id);
        self.publication.until_runs(id, slot);
    }

    /// The end of `Roster::release`.
    fn dismiss(&self, slot: usize) {
        self.posts[slot].add(|mail| mail.dismissed = true);
        self.bells.ring(2 + slot);
    }

    fn spawn(self: &Arc<Core>, slot: usize, mine: Vec<usize>) -> thread::JoinHandle<()> {
        let core = self.clone();
        thread::spawn(move || {
            let dispatchers = mine.into_iter().map(|id| core.dispatcher(id)).collect();
            Worker { core, slot, dispatchers }.run();
        })
    }
}

struct Worker {
    core: Arc<Core>,
    slot: usize,
    dispatchers: Vec<Dispatcher>,
}

impl Worker {
    fn run(mut self) {
        self.report();
        while !self.core.publication.is_stopping() {
            if self.core.posts[self.slot].has_mail() && self.exchange() {
                return;
            }
            if self.core.publication.is_pausing() {
                let ids: Vec<usize> = self.dispatchers.iter().map(|dispatcher| dispatcher.id).collect();
                self.core.publication.stand_still(&ids);
                continue;
            }
            self.round();
            // A thread sleeps on its dispatcher's own set, on one that holds those of several, or on its own.
            let mut bells: Vec<usize> = self.dispatchers.iter().map(|dispatcher| dispatcher.id).collect();
            if bells.len() != 1 {
                bells.push(2 + self.slot);
            }
            self.core.bells.sleep(&bells);
        }
    }

    /// A turn of each dispatcher: adopts what is new, and forwards with it.
    fn round(&mut self) {
        let publication = &self.core.publication;
        for dispatcher in &mut self.dispatchers {
            if publication.generation() != dispatcher.generation {
                let generation = publication.generation();
                dispatcher.setup = publication.value();
                dispatcher.generation = generation;
                publication.adopted(dispatcher.id, generation);
            }
            dispatcher.setup.read();
            dispatcher.state.write();
        }
    }

    fn exchange(&mut self) -> bool {
        let Mail { arriving, orders, dismissed } = self.core.posts[self.slot].take();
        self.dispatchers.extend(arriving);
        for (id, to, bell) in orders {
            let Some(at) = self.dispatchers.iter().position(|mine| mine.id == id) else { continue };
            let gone = self.dispatchers.remove(at);
            self.core.posts[to].add(|mail| mail.arriving.push(gone));
            self.core.bells.ring(bell);
        }
        self.report();
        dismissed && self.dispatchers.is_empty()
    }

    fn report(&self) {
        self.dispatchers.iter().for_each(|dispatcher| self.core.publication.runs(dispatcher.id, self.slot));
    }
}

/// Control publishes a setup, and takes the one before back: nobody may still read it.
fn publish() {
    let core = Core::new();
    let threads = [0, 1].map(|slot| core.spawn(slot, vec![slot]));
    let before = core.publication.publish(Arc::new(Watched::new()), || core.ring_all());
    before.write();
    core.stop();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}

/// Recruits a thread: it takes over one of two dispatchers.
fn recruit() {
    let core = Core::new();
    let first = core.spawn(0, vec![0, 1]);
    [0, 1].into_iter().for_each(|id| core.publication.until_runs(id, 0));
    let second = core.spawn(1, vec![]);
    core.hand_over(1, 1);
    core.stop();
    [first, second].into_iter().for_each(|thread| thread.join().unwrap());
}

/// Releases a thread: its dispatcher goes to the other, then it ends.
fn release() {
    let core = Core::new();
    let [first, second] = [0, 1].map(|slot| core.spawn(slot, vec![slot]));
    [0, 1].into_iter().for_each(|id| core.publication.until_runs(id, id));
    core.hand_over(1, 0);
    core.dismiss(1);
    second.join().unwrap();
    core.stop();
    first.join().unwrap();
}

/// Control publishes while a dispatcher is on its way.
fn publish_while_one_moves() {
    let core = Core::new();
    let first = core.spawn(0, vec![0, 1]);
    [0, 1].into_iter().for_each(|id| core.publication.until_runs(id, 0));
    let second = core.spawn(1, vec![]);
    let recruiter = thread::spawn({
        let core = core.clone();
        move || core.hand_over(1, 1)
    });
    let before = core.publication.publish(Arc::new(Watched::new()), || core.ring_all());
    before.write();
    recruiter.join().unwrap();
    core.stop();
    [first, second].into_iter().for_each(|thread| thread.join().unwrap());
}

/// All threads stand still: control may use what they use, and they go on.
fn stand_still() {
    let core = Core::new();
    let threads = [0, 1].map(|slot| core.spawn(slot, vec![slot]));
    let is_still = core.publication.pause(|| core.ring_all(), Duration::from_secs(3600));
    assert!(is_still);
    core.publication.value().write();
    core.publication.resume();
    core.stop();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}

#[test]
fn what_stands_still_is_not_used() {
    alone("dispatch::handover_model::what_stands_still_is_not_used", || explore(bound(1, 2), stand_still));
}

#[test]
fn a_setup_is_taken_back_after_its_last_use() {
    alone("dispatch::handover_model::a_setup_is_taken_back_after_its_last_use", || explore(2, publish));
}

#[test]
fn a_dispatcher_moves_as_a_whole() {
    alone("dispatch::handover_model::a_dispatcher_moves_as_a_whole", || {
        explore(2, recruit);
        explore(2, release);
    });
}

#[test]
fn a_setup_reaches_a_dispatcher_that_moves() {
    alone("dispatch::handover_model::a_setup_reaches_a_dispatcher_that_moves", || {
        explore(bound(1, 2), publish_while_one_moves);
    });
}

/// Verifies the model itself: what is taken back before everybody has adopted its successor is still read.
#[test]
fn the_model_finds_a_setup_that_is_taken_back_early() {
    let careless = || {
        let core = Core::new();
        let thread = core.spawn(0, vec![0]);
        core.publication.value().write();
        core.stop();
        thread.join().unwrap();
    };
    alone("dispatch::handover_model::the_model_finds_a_setup_that_is_taken_back_early", || {
        assert!(std::panic::catch_unwind(|| explore(2, careless)).is_err());
    });
}
