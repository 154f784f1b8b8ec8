//! What models run the real code with instead of std's, parking_lot's and arc_swap's types: the same names over loom.
//!
//! A file that a model covers takes its atomics and locks from `super::sync`. The model includes that file a second time, as a
//! module of its own, with a `sync` that has these types. So loom runs the code itself, not a copy of it.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::Duration;

use loom::sync::atomic::{AtomicUsize, Ordering};

/// Explores every interleaving with at most `preemptions` forced switches between threads.
pub(crate) fn explore(preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(model);
}

/// parking_lot's mutex.
#[derive(Debug, Default)]
pub(crate) struct Mutex<T>(loom::sync::Mutex<T>);

/// A locked [`Mutex`]; empty only inside [`Condvar::wait`].
pub(crate) struct MutexGuard<'a, T>(Option<loom::sync::MutexGuard<'a, T>>);

impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Mutex<T> {
        Mutex(loom::sync::Mutex::new(value))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        MutexGuard(Some(self.0.lock().unwrap()))
    }
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        self.0.as_ref().unwrap()
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.0.as_mut().unwrap()
    }
}

/// parking_lot's condition variable. Waits have no timeout: a model fails if a thread depends on one.
pub(crate) struct Condvar(loom::sync::Condvar);

impl Condvar {
    pub(crate) fn new() -> Condvar {
        Condvar(loom::sync::Condvar::new())
    }

    pub(crate) fn notify_all(&self) {
        self.0.notify_all();
    }

    pub(crate) fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
        let inner = guard.0.take().unwrap();
        guard.0 = Some(self.0.wait(inner).unwrap());
    }

    pub(crate) fn wait_for<T>(&self, guard: &mut MutexGuard<'_, T>, _: Duration) {
        self.wait(guard);
    }
}

/// parking_lot's lock for readers and writers.
#[derive(Debug, Default)]
pub(crate) struct RwLock<T>(loom::sync::RwLock<T>);

pub(crate) type RwLockReadGuard<'a, T> = loom::sync::RwLockReadGuard<'a, T>;

impl<T> RwLock<T> {
    pub(crate) fn read(&self) -> RwLockReadGuard<'_, T> {
        self.0.read().unwrap()
    }

    pub(crate) fn write(&self) -> loom::sync::RwLockWriteGuard<'_, T> {
        self.0.write().unwrap()
    }
}

/// arc_swap's borrowed pointer: here a counted one.
pub(crate) type Guard<T> = T;

/// arc_swap's pointer: a swap or store releases, a load acquires. Its reclamation of values is not modelled: they live as long as it
/// does.
#[derive(Debug)]
pub(crate) struct ArcSwap<T> {
    current: AtomicUsize,
    values: std::sync::Mutex<Vec<Arc<T>>>,
}

impl<T: Default> Default for ArcSwap<T> {
    fn default() -> ArcSwap<T> {
        ArcSwap::from_pointee(T::default())
    }
}

impl<T> ArcSwap<T> {
    pub(crate) fn from_pointee(value: T) -> ArcSwap<T> {
        ArcSwap { current: AtomicUsize::new(0), values: std::sync::Mutex::new(vec![Arc::new(value)]) }
    }

    pub(crate) fn swap(&self, value: Arc<T>) -> Arc<T> {
        let mut values = self.values.lock().unwrap();
        values.push(value);
        let new = values.len() - 1;
        drop(values);
        self.value(self.current.swap(new, Ordering::AcqRel))
    }

    pub(crate) fn store(&self, value: Arc<T>) {
        drop(self.swap(value));
    }

    pub(crate) fn load(&self) -> Guard<Arc<T>> {
        self.load_full()
    }

    pub(crate) fn load_full(&self) -> Arc<T> {
        self.value(self.current.load(Ordering::Acquire))
    }

    fn value(&self, index: usize) -> Arc<T> {
        self.values.lock().unwrap()[index].clone()
    }
}

/// The eventfds of several epoll sets: a thread sleeps until one of its own was rung.
pub(crate) struct Bells {
    rung: Mutex<Vec<bool>>,
    changed: Condvar,
}

impl Bells {
    pub(crate) fn new(count: usize) -> Bells {
        Bells { rung: Mutex::new(vec![false; count]), changed: Condvar::new() }
    }

    pub(crate) fn ring(&self, bell: usize) {
        self.rung.lock()[bell] = true;
        self.changed.notify_all();
    }

    /// Sleeps until one of `bells` was rung.
    pub(crate) fn sleep(&self, bells: &[usize]) {
        let mut rung = self.rung.lock();
        while !bells.iter().any(|bell| rung[*bell]) {
            self.changed.wait(&mut rung);
        }
        bells.iter().for_each(|bell| rung[*bell] = false);
    }
}
