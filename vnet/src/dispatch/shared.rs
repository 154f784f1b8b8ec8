//! What all dispatchers of a core share: the current setup, the learned addresses, the kernel's own path.
//!
//! Publishing swaps one pointer and raises a generation number. A dispatcher compares that number once per turn and adopts the new
//! setup between two batches. Readers never lock.

use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use parking_lot::{Condvar, Mutex};

use super::dispatcher_stats::DispatcherStats;
use super::kernel_path::{CorePart, KernelPath};
use super::setup::{Parts, Setup};
use crate::interface::veth;
use crate::kernel::{self, Kernel, Outlive};
use crate::poll::Poller;
use crate::route::Learned;

/// How the kernel's own path is opened, once an interface requests it.
pub(super) struct KernelPart {
    /// True when the kernel may forward known flows.
    pub(super) allowed: bool,
    pub(super) outlive: Outlive,
    pub(super) vxlan_listen: Option<SocketAddr>,
}

/// State that the core shares with its dispatchers.
pub(super) struct Shared {
    setup: ArcSwap<Setup>,
    generation: AtomicU64,
    stopping: AtomicBool,
    /// A thread has panicked: its dispatchers will adopt no setup any more.
    broken: AtomicBool,
    pollers: Vec<Poller>,
    learned: Arc<Learned>,
    kernel: KernelPart,
    /// The kernel's own path, or the reason why it is unavailable. Created when the first interface requests it, because loading
    /// its programs takes time and memory.
    kernel_path: OnceLock<Result<KernelPath, String>>,
    dispatcher_stats: Vec<Arc<DispatcherStats>>,
    started: Instant,
    progress: Mutex<Progress>,
    changed: Condvar,
}

/// What dispatchers and threads have reported, by dispatcher.
struct Progress {
    /// The generation that it has adopted.
    adopted: Vec<u64>,
    /// The slot of the thread that runs it.
    slots: Vec<usize>,
}

/// A report is awaited for this long before it is checked whether its thread still exists.
const LOOK: Duration = Duration::from_millis(100);

impl Shared {
    /// The state of `count` dispatchers, with an empty setup.
    pub(super) fn new(count: usize, kernel: KernelPart) -> io::Result<Shared> {
        Ok(Shared {
            setup: ArcSwap::from_pointee(Setup::new(Parts::default())),
            generation: AtomicU64::new(0),
            stopping: AtomicBool::new(false),
            broken: AtomicBool::new(false),
            pollers: (0..count).map(|_| Poller::new()).collect::<io::Result<_>>()?,
            learned: Arc::new(Learned::new()),
            kernel,
            kernel_path: OnceLock::new(),
            dispatcher_stats: (0..count).map(|_| Arc::default()).collect(),
            started: Instant::now(),
            progress: Mutex::new(Progress { adopted: vec![0; count], slots: vec![usize::MAX; count] }),
            changed: Condvar::new(),
        })
    }

    #[inline]
    pub(super) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    #[inline]
    pub(super) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Relaxed)
    }

    /// Ends all threads: each stops after its current round.
    pub(super) fn stop(&self) {
        self.stopping.store(true, Ordering::Relaxed);
        self.ring_all();
    }

    pub(super) fn setup(&self) -> Arc<Setup> {
        self.setup.load_full()
    }

    /// Publishes a setup; returns the one before when every dispatcher has adopted the new one.
    pub(super) fn publish(&self, setup: Arc<Setup>) -> Arc<Setup> {
        let before = self.setup.swap(setup);
        let generation = self.generation.fetch_add(1, Ordering::AcqRel) + 1;
        self.ring_all();
        self.until(|progress| progress.adopted.iter().all(|&adopted| adopted >= generation));
        before
    }

    /// Waits until `done`, the core stops or a thread has panicked.
    fn until(&self, done: impl Fn(&Progress) -> bool) {
        let mut progress = self.progress.lock();
        while !done(&progress) && !self.broken.load(Ordering::Relaxed) && !self.is_stopping() {
            self.changed.wait_for(&mut progress, LOOK);
        }
    }

    /// Reports that dispatcher `id` has adopted the setup of this generation.
    pub(super) fn adopted(&self, id: usize, generation: u64) {
        self.progress.lock().adopted[id] = generation;
        self.changed.notify_all();
    }

    /// Reports that the thread in `slot` runs dispatcher `id`.
    pub(super) fn runs(&self, id: usize, slot: usize) {
        self.progress.lock().slots[id] = slot;
        self.changed.notify_all();
    }

    /// The slots of the threads that run the dispatchers, by dispatcher.
    pub(super) fn slots(&self) -> Vec<usize> {
        self.progress.lock().slots.clone()
    }

    /// Waits until the thread in `slot` runs dispatcher `id`.
    pub(super) fn until_runs(&self, id: usize, slot: usize) {
        self.until(|progress| progress.slots[id] == slot);
    }

    /// Reports that a thread has panicked.
    pub(super) fn panicked(&self) {
        self.broken.store(true, Ordering::Relaxed);
        self.changed.notify_all();
    }

    pub(super) fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Relaxed)
    }

    pub(super) fn learned(&self) -> &Arc<Learned> {
        &self.learned
    }

    pub(super) fn kernel_part(&self) -> &KernelPart {
        &self.kernel
    }

    pub(super) fn kernel_path(&self) -> Option<&KernelPath> {
        self.kernel_path.get()?.as_ref().ok()
    }

    /// The kernel's own path, opened by the first call, or the reason why it is unavailable.
    pub(super) fn kernel_path_or_open(&self) -> &Result<KernelPath, String> {
        self.kernel_path.get_or_init(|| self.open_kernel_path())
    }

    pub(super) fn poller(&self, id: usize) -> &Poller {
        &self.pollers[id]
    }

    pub(super) fn dispatchers(&self) -> usize {
        self.pollers.len()
    }

    pub(super) fn started(&self) -> Instant {
        self.started
    }

    pub(super) fn dispatcher_stats(&self) -> &[Arc<DispatcherStats>] {
        &self.dispatcher_stats
    }

    fn open_kernel_path(&self) -> Result<KernelPath, String> {
        let Outlive { time, pins } = &self.kernel.outlive;
        if !self.kernel.allowed {
            if let Some(pins) = pins {
                kernel::forget(pins).into_iter().for_each(veth::remove_unclaimed);
            }
            return Err("kernel_path is off".into());
        }
        let kernel = Kernel::load(pins.as_ref()).map_err(|error| {
            tracing::info!("no kernel path, vnetd forwards all frames itself: {error}");
            error.to_string()
        })?;
        if let (Some(_), Err(why)) = (pins, kernel.adoptable()) {
            tracing::warn!("the next vnetd cannot adopt flows of the kernel path: {why}");
        } else if kernel.is_adopted() {
            tracing::info!("goes on with the flows of a vnetd that has died");
        }
        if !self.learned.keep_versions_in(kernel.clone()) {
            // The flows of a vnetd that has died depend on other versions.
            kernel.set_generation(kernel.next_generation());
        }
        let part = CorePart {
            learned: self.learned.clone(),
            started: self.started,
            outlive: *time,
            vxlan_listen: self.kernel.vxlan_listen,
        };
        KernelPath::new(kernel, self.setup(), part)
            .map_err(|error| format!("cannot start the thread of kernel flows: {error}"))
    }

    fn ring_all(&self) {
        for poller in &self.pollers {
            poller.ring();
        }
    }
}
