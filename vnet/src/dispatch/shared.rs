//! What all dispatchers of a core share: the current setup, the learned addresses, the kernel's own path.

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use super::dispatcher_stats::DispatcherStats;
use super::kernel_path::{CorePart, KernelPath};
use super::publication::Publication;
use super::sealed_sessions::SealedSessions;
use super::setup::{Parts, Setup};
use crate::inherit::{Inheritance, KERNEL_LOCK, KERNEL_MOUNT};
use crate::interface::{headroom, veth};
use crate::kernel::{self, Kernel, KernelError, Outlive, PinOptions};
use crate::poll::Poller;
use crate::route::Learned;

/// How the kernel's own path is opened, once an interface requests it.
pub(super) struct KernelPart {
    /// True when the kernel may forward known flows.
    pub(super) allowed: bool,
    /// Whether packets may be translated.
    pub(super) translates: bool,
    pub(super) outlive: Outlive,
    pub(super) vxlan_listen: Option<SocketAddr>,
    /// What the running vnetd hands over.
    pub(super) inheritance: Option<Arc<Inheritance>>,
}

/// State that the core shares with its dispatchers.
pub(super) struct Shared {
    /// The setup, and who has adopted it.
    pub(super) publication: Publication<Setup>,
    pollers: Vec<Poller>,
    learned: Arc<Learned>,
    sealed: Arc<SealedSessions>,
    kernel: KernelPart,
    /// The kernel's own path, or the reason why it is unavailable. Created when the first interface requests it, because loading
    /// its programs takes time and memory.
    kernel_path: OnceLock<Result<KernelPath, String>>,
    dispatcher_stats: Vec<Arc<DispatcherStats>>,
    started: Instant,
}

impl Shared {
    /// The state of `count` dispatchers, with an empty setup.
    pub(super) fn new(count: usize, kernel: KernelPart) -> io::Result<Shared> {
        Ok(Shared {
            publication: Publication::new(count, Setup::new(Parts::default())),
            pollers: (0..count).map(|_| Poller::new()).collect::<io::Result<_>>()?,
            learned: Arc::new(Learned::new()),
            sealed: Arc::default(),
            kernel,
            kernel_path: OnceLock::new(),
            dispatcher_stats: (0..count).map(|_| Arc::default()).collect(),
            started: Instant::now(),
        })
    }

    /// Ends all threads: each stops after its current round.
    pub(super) fn stop(&self) {
        self.publication.stop();
        self.ring_all();
    }

    pub(super) fn setup(&self) -> Arc<Setup> {
        self.publication.value()
    }

    /// Publishes a setup; returns the one before when every dispatcher has adopted the new one.
    pub(super) fn publish(&self, setup: Arc<Setup>) -> Arc<Setup> {
        self.publication.publish(setup, || self.ring_all())
    }

    pub(super) fn learned(&self) -> &Arc<Learned> {
        &self.learned
    }

    pub(super) fn sealed(&self) -> &Arc<SealedSessions> {
        &self.sealed
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
            headroom::remove_dead();
            return Err("kernel_path is off".into());
        }
        let kernel = self.load_kernel(pins.as_ref()).map_err(|error| {
            tracing::info!("no kernel path, vnetd forwards all frames itself: {error}");
            error.to_string()
        })?;
        if self.kernel.inheritance.is_some() {
            tracing::debug!("goes on with the flows of the running vnetd");
        } else if let (Some(_), Err(why)) = (pins, kernel.adoptable()) {
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
            translates: self.kernel.translates,
            vxlan_listen: self.kernel.vxlan_listen,
            inheritance: self.kernel.inheritance.clone(),
            sealed: self.sealed.clone(),
        };
        KernelPath::new(kernel, self.setup(), part)
            .map_err(|error| format!("cannot start the thread of kernel flows: {error}"))
    }

    /// Loads the programs, on the running vnetd's maps if it hands over their lock.
    fn load_kernel(&self, pins: Option<&PinOptions>) -> Result<Arc<Kernel>, KernelError> {
        let handed = |name| self.kernel.inheritance.as_ref()?.take_one(name);
        let lock = handed(KERNEL_MOUNT).map(|lock| (lock, true));
        match (pins, lock.or_else(|| handed(KERNEL_LOCK).map(|lock| (lock, false)))) {
            (Some(pins), Some((lock, mounted))) => Kernel::inherit(pins, lock, mounted),
            _ => Kernel::load(pins),
        }
    }

    pub(super) fn ring_all(&self) {
        for poller in &self.pollers {
            poller.ring();
        }
    }
}
