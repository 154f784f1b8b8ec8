//! The crew: the threads that run a core's dispatchers. One of its own, the *recruiter*, starts and ends threads as [`Policy`] decides.
//!
//! ```text
//!   recruit   start thread 2 (empty) -> order thread 0 to hand dispatcher 3 to thread 2 -> wait until thread 2 runs it
//!   release   order thread 2 to hand dispatcher 3 to thread 0 -> wait until thread 0 runs it -> dismiss thread 2, join it
//! ```
//!
//! Only the recruiter moves dispatchers, one at a time, so it always knows where each of them is. A thread that cannot be started
//! leaves everything as it was.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::dispatcher::Dispatcher;
use super::isolation::{self, Isolation, IsolationError};
use super::recruit::{FULL, Policy, Recruiting, Sample, Step, Threads};
use super::shared::Shared;
use super::spare_cpus::{self, SpareCpus};
use super::worker::{Order, Post, Worker};
use super::yielding::{Strategy, Yielder};
use crate::threads;

/// How long all threads may take until they stand still: a turn takes microseconds, but other programs may have the processors.
const STILL_WITHIN: Duration = Duration::from_millis(500);
/// Pause after the kernel has refused a thread.
const REFUSED_PAUSE: Duration = Duration::from_secs(10);

/// How threads are started.
#[derive(Clone, Debug)]
pub(super) struct CrewOptions {
    pub(super) recruiting: Recruiting,
    /// CPUs to pin threads to, round robin; empty: not pinned.
    pub(super) cpus: Vec<usize>,
    pub(super) isolation: Isolation,
    /// Yield strategy, `T_sleep` and `T_nowork` in microseconds.
    pub(super) yielding: (Strategy, u32, u32),
}

/// Error when starting a thread.
#[derive(Debug, thiserror::Error)]
pub(super) enum CrewError {
    #[error(transparent)]
    System(#[from] io::Error),
    #[error(transparent)]
    Isolation(#[from] IsolationError),
}

/// The threads of a core. Dropping it stops them.
pub(super) struct Crew {
    roster: Arc<Roster>,
    recruiter: Option<JoinHandle<()>>,
}

/// What the recruiter and control share.
struct Roster {
    shared: Arc<Shared>,
    options: CrewOptions,
    /// Mailbox of each slot.
    posts: Vec<Arc<Post>>,
    /// Thread in each slot, if there is one.
    threads: Mutex<Vec<Option<JoinHandle<()>>>>,
    recruiting: Mutex<Recruiting>,
    /// Held while a dispatcher is on its way to another thread, and while all threads stand still.
    moving: Mutex<()>,
    /// The core stops, or `recruiting` has changed.
    changed: Condvar,
    recruited: AtomicU64,
    released: AtomicU64,
    moves: AtomicU64,
}

impl Crew {
    /// Starts the fewest threads, which share the dispatchers, and the recruiter if there may be more.
    pub(super) fn start(
        shared: Arc<Shared>,
        dispatchers: Vec<Dispatcher>,
        options: CrewOptions,
    ) -> Result<Crew, CrewError> {
        let count = dispatchers.len();
        let roster = Arc::new(Roster {
            posts: (0..count).map(|_| Post::new().map(Arc::new)).collect::<io::Result<_>>()?,
            threads: Mutex::new((0..count).map(|_| None).collect()),
            recruiting: Mutex::new(options.recruiting),
            moving: Mutex::new(()),
            shared,
            options,
            changed: Condvar::new(),
            recruited: AtomicU64::new(0),
            released: AtomicU64::new(0),
            moves: AtomicU64::new(0),
        });
        let mut crew = Crew { roster: roster.clone(), recruiter: None };
        let mut shares: Vec<Vec<_>> = (0..roster.min()).map(|_| vec![]).collect();
        for dispatcher in dispatchers {
            let slot = dispatcher.id % shares.len();
            shares[slot].push(dispatcher);
        }
        for (slot, share) in shares.into_iter().enumerate() {
            roster.spawn(slot, share)?;
        }
        (0..count).for_each(|id| roster.shared.publication.until_runs(id, id % roster.min()));
        if count > 1 {
            let thread = std::thread::Builder::new().name("recruiter".into());
            crew.recruiter = Some(thread.spawn(move || roster.recruit_and_release())?);
        }
        Ok(crew)
    }

    /// The threads now.
    pub(super) fn threads(&self) -> Threads {
        let roster = &self.roster;
        Threads {
            min: roster.min(),
            max: roster.posts.len(),
            now: roster.threads.lock().iter().flatten().count(),
            recruited: roster.recruited.load(Relaxed),
            released: roster.released.load(Relaxed),
            moves: roster.moves.load(Relaxed),
            of_dispatchers: roster.shared.publication.slots(),
        }
    }

    /// Moves dispatcher `id` to the thread in `slot`, which must exist. Only while no thread can be recruited or released.
    #[cfg(feature = "test-util")]
    pub(super) fn hand_over(&self, id: usize, slot: usize) {
        self.roster.hand_over(id, slot);
    }

    /// Has all threads stand still until the result is dropped; `None` if one of them does not in time.
    pub(super) fn stand_still(&self) -> Option<Still<'_>> {
        let roster = &*self.roster;
        let still = Still { roster, _moving: roster.moving.lock() };
        let wake = || {
            roster.shared.ring_all();
            roster.posts.iter().for_each(|post| post.poller.ring());
        };
        roster.shared.publication.pause(wake, STILL_WITHIN).then_some(still)
    }

    /// Changes when threads are recruited and released.
    pub(super) fn recruit(&self, recruiting: Recruiting) {
        *self.roster.recruiting.lock() = recruiting;
        self.roster.changed.notify_all();
    }
}

/// All threads of a core stand still. Dropping it lets them go on.
pub(super) struct Still<'a> {
    roster: &'a Roster,
    _moving: MutexGuard<'a, ()>,
}

impl Drop for Still<'_> {
    fn drop(&mut self) {
        self.roster.shared.publication.resume();
    }
}

impl Drop for Crew {
    /// Stops the threads and waits for them.
    fn drop(&mut self) {
        let roster = &self.roster;
        {
            // Under the lock, so that the recruiter cannot miss it.
            let _recruiting = roster.recruiting.lock();
            roster.shared.stop();
        }
        roster.changed.notify_all();
        roster.posts.iter().for_each(|post| post.poller.ring());
        // The recruiter first: it may be starting a thread.
        self.recruiter.take().into_iter().for_each(join);
        let threads: Vec<_> = roster.threads.lock().iter_mut().filter_map(Option::take).collect();
        threads.into_iter().for_each(join);
        for post in &roster.posts {
            post.unclaimed().iter_mut().for_each(|dispatcher| dispatcher.finish());
        }
    }
}

fn join(thread: JoinHandle<()>) {
    if thread.join().is_err() {
        tracing::error!(
            "a dispatcher panicked: its interfaces and links were cut off; restart vnetd and report this"
        );
    }
}

/// Reports a panic of its thread.
struct PanicReport(Arc<Shared>);

impl Drop for PanicReport {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.publication.panicked();
        }
    }
}

impl Roster {
    fn min(&self) -> usize {
        let count = self.posts.len();
        self.recruiting.lock().threads_min.unwrap_or(count).clamp(1, count)
    }

    /// The CPU of the thread in `slot`; `None`: not pinned.
    fn cpu(&self, slot: usize) -> Option<usize> {
        let cpus = &self.options.cpus;
        cpus.get(slot % cpus.len().max(1)).copied()
    }

    /// Starts the thread in `slot`, which runs `dispatchers` at first. Returns once it is pinned and isolated.
    fn spawn(&self, slot: usize, dispatchers: Vec<Dispatcher>) -> Result<(), CrewError> {
        let (strategy, sleep_us, nowork_us) = self.options.yielding;
        let yielder = Yielder::new(strategy, sleep_us, nowork_us);
        let worker = Worker::new(slot, self.shared.clone(), self.posts[slot].clone(), dispatchers, yielder);
        let (isolation, cpu, report) =
            (self.options.isolation, self.cpu(slot), PanicReport(self.shared.clone()));
        let (ready, pinned) = mpsc::channel();
        let thread = std::thread::Builder::new().name(format!("dispatch-{slot}")).spawn(move || {
            let _report = report;
            let result = cpu.map_or(Ok(()), isolation::pin).and_then(|()| isolation.apply_to_thread());
            let run = result.is_ok();
            // The starter waits for exactly this report.
            let _ = ready.send(result);
            if run {
                threads::confine();
                worker.run();
            }
        })?;
        self.threads.lock()[slot] = Some(thread);
        let result = pinned.recv().map_err(|_| io::Error::other("the thread ended at once"));
        result.map_err(CrewError::from).and_then(|result| Ok(result?)).inspect_err(|_| self.end(slot))
    }

    /// Waits for the end of the thread in `slot`.
    fn end(&self, slot: usize) {
        let thread = self.threads.lock()[slot].take();
        thread.into_iter().for_each(join);
    }

    /// The recruiter's loop.
    fn recruit_and_release(&self) {
        let (mut policy, mut spare) = (Policy::default(), SpareCpus::default());
        let allowed = spare_cpus::allowed();
        let mut gauge = Gauge::new(&self.shared);
        let mut pause = policy.window();
        while let Some(recruiting) = self.pause(pause) {
            let slots = self.shared.publication.slots();
            // With no free slot, nobody is recruited.
            let free = (0..slots.len()).find(|slot| !slots.contains(slot)).unwrap_or(0);
            spare.read();
            let idle = match self.cpu(free) {
                Some(cpu) => spare.idle(std::iter::once(cpu)),
                None => spare.idle(allowed.iter().copied()),
            };
            let (length, loads) = gauge.read(&self.shared);
            let sample = Sample { length, loads: &loads, slots: &slots, idle };
            let step = policy.judge(&recruiting, self.min(), &sample);
            pause = policy.window();
            match step {
                Step::Stay => {}
                Step::Recruit(moved) => {
                    if let Err(error) = self.begin(free, &moved) {
                        tracing::warn!("cannot recruit a thread: {error}; tries again in 10 s");
                        pause = REFUSED_PAUSE;
                    }
                }
                Step::Release { slot, to } => self.release(slot, to),
            }
        }
    }

    /// Waits for the next window, without limit while no thread can be recruited or released; `None`: the core stops.
    fn pause(&self, window: Duration) -> Option<Recruiting> {
        let mut recruiting = self.recruiting.lock();
        let count = self.posts.len();
        let fixed = |recruiting: &Recruiting| recruiting.threads_min.is_none_or(|min| min >= count);
        let all = self.threads.lock().iter().flatten().count() == count;
        if self.shared.publication.is_stopping() {
            return None;
        }
        if all && fixed(&recruiting) {
            self.changed.wait(&mut recruiting);
        } else {
            self.changed.wait_for(&mut recruiting, window);
        }
        (!self.shared.publication.is_stopping() && !self.shared.publication.is_broken())
            .then_some(*recruiting)
    }

    /// Starts a thread in the free `slot`, which takes the dispatchers `moved`.
    fn begin(&self, slot: usize, moved: &[usize]) -> Result<(), CrewError> {
        let _moving = self.moving.lock();
        self.spawn(slot, vec![])?;
        moved.iter().for_each(|id| self.hand_over(*id, slot));
        self.recruited.fetch_add(1, Relaxed);
        tracing::info!(thread = slot, dispatchers = ?moved, "recruits a thread: the load is high");
        Ok(())
    }

    /// Ends the thread in `slot`; the one in `to` takes over its dispatchers.
    fn release(&self, slot: usize, to: usize) {
        let _moving = self.moving.lock();
        let slots = self.shared.publication.slots();
        let moved: Vec<_> = (0..slots.len()).filter(|id| slots[*id] == slot).collect();
        moved.iter().for_each(|id| self.hand_over(*id, to));
        if self.shared.publication.is_stopping() || self.shared.publication.is_broken() {
            return;
        }
        self.posts[slot].dismiss();
        self.end(slot);
        self.released.fetch_add(1, Relaxed);
        tracing::info!(thread = slot, dispatchers = ?moved, "releases a thread: the load is low");
    }

    /// Moves dispatcher `id` to the thread in `slot`; returns when that thread runs it.
    fn hand_over(&self, id: usize, slot: usize) {
        let slots = self.shared.publication.slots();
        // A thread sleeps on a dispatcher's set if it runs one.
        let there = slots.iter().position(|other| *other == slot);
        let bell = there.map_or(&self.posts[slot].poller, |other| self.shared.poller(other)).clone();
        let order = Order { dispatcher: id, to: self.posts[slot].clone(), bell };
        self.posts[slots[id]].order(order, self.shared.poller(id));
        self.shared.publication.until_runs(id, slot);
        self.moves.fetch_add(1, Relaxed);
    }
}

/// Reads dispatchers' loads.
struct Gauge {
    at: Instant,
    busy_ns: Vec<u64>,
}

impl Gauge {
    fn new(shared: &Shared) -> Gauge {
        Gauge { at: Instant::now(), busy_ns: busy_ns(shared) }
    }

    /// Time since the previous reading, and each dispatcher's load since, in parts of a thousand.
    fn read(&mut self, shared: &Shared) -> (Duration, Vec<u32>) {
        let (at, busy_ns) = (Instant::now(), busy_ns(shared));
        let length = at.saturating_duration_since(self.at);
        let load = |(now, before): (&u64, &u64)| {
            let load = now.saturating_sub(*before) * u64::from(FULL) / (length.as_nanos() as u64).max(1);
            load.min(FULL.into()) as u32
        };
        let loads = busy_ns.iter().zip(&self.busy_ns).map(load).collect();
        *self = Gauge { at, busy_ns };
        (length, loads)
    }
}

fn busy_ns(shared: &Shared) -> Vec<u64> {
    shared.dispatcher_stats().iter().map(|stats| stats.busy_ns()).collect()
}
