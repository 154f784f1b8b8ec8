//! Work that a front end can make slow, on a thread of its interface instead of a dispatcher.
//!
//! Two kinds: signals of eventfds that have very many waiters (`event.rs`), and page faults of a guest whose pages vnetd has lost
//! (`faults.rs`). The thread starts when it is first needed, does one piece of work after the other, and rests as the interface's
//! [`Allowance`] says.
//!
//! A piece of work waits at most once, and one whose owner is gone is forgotten. So at most as much waits as the interface has eventfds
//! and queues.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use rustix::thread::CpuSet;

use super::allowance::Allowance;
use super::usage::processor_time;

/// From this length on, the queue is searched for work whose owner is gone.
const SEARCHED: usize = 64;

/// Work for the interface's own thread.
pub(super) trait Slow: Send + Sync {
    /// Does it.
    fn carry_out(&self);

    /// Processor time charged to the interface's allowance for work that took `taken`.
    fn charge(&self, taken: Duration) -> Duration {
        taken
    }
}

/// The interface's own thread.
#[derive(Default)]
pub(super) struct SlowWork {
    shared: Arc<Shared>,
    /// What the interface's threads may use.
    pub(super) allowance: Arc<Allowance>,
}

#[derive(Default)]
struct Shared {
    queue: Mutex<Queue>,
    /// There is work, or the interface is gone.
    news: Condvar,
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Weak<dyn Slow>>,
    has_thread: bool,
    ended: bool,
}

impl SlowWork {
    /// Has the interface's own thread carry out `work`, which must not wait already, unless its owner drops it before. Returns false if
    /// there is no thread and none can be started.
    #[cold]
    pub(super) fn later(&self, work: Weak<dyn Slow>) -> bool {
        let mut queue = self.shared.queue.lock();
        if !queue.has_thread {
            let (shared, allowance) = (self.shared.clone(), self.allowance.clone());
            let run = move || run(&shared, &allowance);
            queue.has_thread = std::thread::Builder::new().name("vhost-user-slow".into()).spawn(run).is_ok();
        }
        if queue.waiting.len() >= SEARCHED {
            queue.waiting.retain(|work| work.strong_count() > 0);
        }
        if queue.has_thread {
            queue.waiting.push_back(work);
            self.shared.news.notify_one();
        }
        queue.has_thread
    }
}

impl Drop for SlowWork {
    fn drop(&mut self) {
        self.shared.queue.lock().ended = true;
        self.shared.news.notify_one();
    }
}

impl std::fmt::Debug for SlowWork {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SlowWork").finish_non_exhaustive()
    }
}

/// Lowest scheduling priority (sched(7)): dispatchers and guests preempt this thread.
const NICE_MAX: i32 = 19;

/// Lets the calling thread run on all CPUs of the process but those that it has inherited from the thread that started it: a dispatcher,
/// which may be pinned. Without others it stays there, and the dispatcher preempts it.
fn leave_dispatchers_cpu() {
    let all = rustix::thread::sched_getaffinity(Some(rustix::process::getpid()));
    let (Ok(mut others), Ok(own)) = (all, rustix::thread::sched_getaffinity(None)) else { return };
    (0..CpuSet::MAX_CPU).filter(|cpu| own.is_set(*cpu)).for_each(|cpu| others.unset(cpu));
    if others.count() > 0 {
        // Best effort, as above.
        let _ = rustix::thread::sched_setaffinity(None, &others);
    }
}

/// Body of the thread.
fn run(shared: &Shared, allowance: &Allowance) {
    // On Linux the nice value is per thread. Best effort: without it the thread competes as an equal.
    let _ = rustix::process::setpriority_process(None, NICE_MAX);
    leave_dispatchers_cpu();
    loop {
        let mut queue = shared.queue.lock();
        let work = loop {
            if queue.ended {
                return;
            }
            match queue.waiting.pop_front() {
                Some(work) => break work,
                None => shared.news.wait(&mut queue),
            }
        };
        while let Some(rest) = allowance.rest() {
            if queue.ended {
                return;
            }
            shared.news.wait_for(&mut queue, rest);
        }
        drop(queue);
        if let Some(work) = work.upgrade() {
            let start = processor_time();
            work.carry_out();
            allowance.charge(work.charge(processor_time().saturating_sub(start)));
            // The last reference may unmap the guest's memory.
            allowance.charged(|| drop(work));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc::{Sender, channel};

    struct Counted(AtomicUsize, Sender<()>);

    impl Slow for Counted {
        fn carry_out(&self) {
            self.0.fetch_add(1, Ordering::Relaxed);
            let _ = self.1.send(());
        }
    }

    struct Where(Sender<CpuSet>);

    impl Slow for Where {
        fn carry_out(&self) {
            let _ = self.0.send(rustix::thread::sched_getaffinity(None).unwrap());
        }
    }

    /// With one CPU there is nothing to leave.
    #[test]
    fn the_thread_leaves_a_dispatchers_cpu() {
        let all = rustix::thread::sched_getaffinity(Some(rustix::process::getpid())).unwrap();
        let first = (0..CpuSet::MAX_CPU).find(|cpu| all.is_set(*cpu)).unwrap();
        let (mut one, mut others) = (CpuSet::new(), all);
        one.set(first);
        others.unset(first);
        let dispatcher = std::thread::spawn(move || {
            rustix::thread::sched_setaffinity(None, &one).unwrap();
            let (sender, found) = channel();
            let (slow, work) = (SlowWork::default(), Arc::new(Where(sender)));
            assert!(slow.later(Arc::downgrade(&work) as Weak<dyn Slow>));
            found.recv().unwrap()
        });
        assert_eq!(dispatcher.join().unwrap(), if others.count() > 0 { others } else { all });
    }

    fn weak(work: &Arc<Counted>) -> Weak<dyn Slow> {
        let work: Arc<dyn Slow> = work.clone();
        Arc::downgrade(&work)
    }

    #[test]
    fn work_is_done_unless_its_owner_is_gone() {
        let (done, is_done) = channel();
        let slow = SlowWork::default();
        let kept = Arc::new(Counted(AtomicUsize::new(0), done.clone()));
        let gone = Arc::new(Counted(AtomicUsize::new(0), done));
        let moot = weak(&gone);
        drop(gone);
        for work in [moot.clone(), weak(&kept), moot, weak(&kept)] {
            assert!(slow.later(work));
        }
        for _ in 0..2 {
            is_done.recv_timeout(Duration::from_secs(60)).unwrap();
        }
        assert_eq!(kept.0.load(Ordering::Relaxed), 2);
    }

    #[test]
    fn work_without_an_owner_does_not_pile_up() {
        let (done, _is_done) = channel();
        let slow = SlowWork::default();
        // The thread rests while the work comes.
        slow.allowance.charge(Duration::from_secs(3));
        let kept = Arc::new(Counted(AtomicUsize::new(0), done.clone()));
        for _ in 0..10_000 {
            let gone = Arc::new(Counted(AtomicUsize::new(0), done.clone()));
            assert!(slow.later(weak(&gone)));
        }
        assert!(slow.later(weak(&kept)));
        assert!(slow.shared.queue.lock().waiting.len() <= SEARCHED + 1);
    }
}
