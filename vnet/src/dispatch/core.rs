//! The core: all dispatchers, and the publication of new setups to them.
//!
//! Publishing swaps one pointer and raises a generation number. A dispatcher compares that number once per turn and adopts the
//! new setup between two batches. `publish` returns when all have adopted it: from then on no dispatcher uses a port or link that
//! the new setup lacks. Readers never lock.

use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use parking_lot::{Condvar, Mutex};

use super::Dispatcher;
use super::dispatcher_stats::DispatcherStats;
use super::isolation::{self, Isolation, IsolationError};
use super::kernel_path::{CorePart, KernelPath};
use super::observers::Observers;
use super::setup::{InterfacePort, LinkPort, Parts, Setup};
use super::yielding::{Strategy, Yielder};
use crate::frame::{BATCH_MAX, PortId};
use crate::interface::veth;
use crate::kernel::{self, Kernel, Outlive, PinOptions};
use crate::link::path::prober::Prober;
use crate::link::{
    Bridge, BridgeError, Courier, Link, PathWatch, ReassemblyBudget, Receiver, ZeroCopy, stream,
};
use crate::poll::Poller;
use crate::route::{Learned, Table};
use crate::stats::PortStats;

/// Options of a core.
#[derive(Clone, Debug)]
pub struct CoreOptions {
    /// Number of dispatchers, at least 1 (`n_dispatchers`).
    pub threads: usize,
    /// CPUs to pin dispatchers to, round robin; empty: not pinned.
    pub cpus: Vec<usize>,
    /// Yield strategy of an idle dispatcher.
    pub yield_strategy: Strategy,
    /// `T_sleep` in microseconds.
    pub sleep_us: u32,
    /// `T_nowork` in microseconds.
    pub nowork_us: u32,
    /// Maximum number of frames per read from an interface, and of messages per read from a socket: 1 to
    /// [`crate::frame::BATCH_MAX`].
    pub burst: usize,
    /// Listening address of links' datagrams, with the first port.
    pub listen: SocketAddr,
    /// Number of consecutive ports, starting at the port of `listen`.
    pub ports: u16,
    /// Listening address for VXLAN; `None`: off.
    pub vxlan_listen: Option<SocketAddr>,
    /// TCP listening address for stream links; `None`: off.
    pub stream_listen: Option<SocketAddr>,
    /// Zero-copy transmission of guest memory.
    pub zero_copy: ZeroCopy,
    /// How dispatchers are shielded from the rest of the host.
    pub isolation: Isolation,
    /// Forward known flows of containers in the kernel where the kernel supports it.
    pub kernel_path: bool,
    /// How flows of the kernel's own path outlive this process.
    pub outlive: Outlive,
}

impl Default for CoreOptions {
    /// One dispatcher that listens on the loopback interface, on a port that the kernel chooses.
    fn default() -> CoreOptions {
        CoreOptions {
            threads: 1,
            cpus: vec![],
            yield_strategy: Strategy::default(),
            sleep_us: 50,
            nowork_us: 200,
            burst: BATCH_MAX,
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            ports: 1,
            vxlan_listen: None,
            stream_listen: None,
            zero_copy: ZeroCopy::default(),
            isolation: Isolation::default(),
            kernel_path: false,
            outlive: Outlive::default(),
        }
    }
}

/// Error when starting a core.
#[derive(Debug, thiserror::Error)]
pub enum CoreError {
    /// The bridge's socket failed.
    #[error(transparent)]
    Bridge(#[from] BridgeError),
    /// The thread of stream links, or its listening socket, failed.
    #[error(transparent)]
    Stream(#[from] stream::StreamsError),
    /// The kernel refused a thread, an epoll instance or another resource.
    #[error("cannot start a dispatcher: {0}")]
    System(#[from] io::Error),
    /// The kernel refused to isolate the dispatchers.
    #[error(transparent)]
    Isolation(#[from] IsolationError),
}

/// State that the core shares with its dispatchers.
pub(super) struct Shared {
    setup: ArcSwap<Setup>,
    generation: AtomicU64,
    stopping: AtomicBool,
    pollers: Vec<Poller>,
    learned: Arc<Learned>,
    /// True when the kernel may forward known flows.
    may_kernel: bool,
    outlive: Outlive,
    vxlan_listen: Option<SocketAddr>,
    /// The kernel's own path, or the reason why it is unavailable. Created when the first interface requests it, because loading
    /// its programs takes time and memory.
    kernel_path: OnceLock<Result<KernelPath, String>>,
    dispatcher_stats: Vec<Arc<DispatcherStats>>,
    started: Instant,
    /// Generation that each dispatcher has adopted.
    adopted: Mutex<Vec<u64>>,
    progress: Condvar,
}

impl Shared {
    #[inline]
    pub(super) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    #[inline]
    pub(super) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Relaxed)
    }

    pub(super) fn setup(&self) -> Arc<Setup> {
        self.setup.load_full()
    }

    pub(super) fn learned(&self) -> &Arc<Learned> {
        &self.learned
    }

    pub(super) fn kernel_path(&self) -> Option<&KernelPath> {
        self.kernel_path.get()?.as_ref().ok()
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

    pub(super) fn adopted(&self, id: usize, generation: u64) {
        self.adopted.lock()[id] = generation;
        self.progress.notify_all();
    }

    fn open_kernel_path(&self) -> Result<KernelPath, String> {
        let Outlive { time, pins } = &self.outlive;
        if !self.may_kernel {
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
            vxlan_listen: self.vxlan_listen,
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

/// Signs of life of a core's dispatchers.
#[derive(Clone, Debug)]
pub struct Pulse {
    stats: Vec<Arc<DispatcherStats>>,
    started: Instant,
}

impl Pulse {
    /// The first dispatcher that has not ticked for `limit`, if there is one. An idle dispatcher ticks once a second.
    pub fn silent_for(&self, limit: Duration) -> Option<usize> {
        let now_ms = self.started.elapsed().as_millis() as u64;
        let silent = |stats: &Arc<DispatcherStats>| {
            u128::from(now_ms.saturating_sub(stats.ticked_ms())) > limit.as_millis()
        };
        self.stats.iter().position(silent)
    }
}

/// The running data plane of a host.
pub struct Core {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    bridge_address: SocketAddr,
    bridge_stats: Arc<PortStats>,
    streams: stream::Streams,
    courier: Courier,
    prober: Prober,
}

impl Core {
    /// Binds the bridge's sockets and starts the dispatchers with an empty setup.
    pub fn start(options: &CoreOptions) -> Result<Core, CoreError> {
        let count = options.threads.max(1);
        options.isolation.apply_to_process()?;
        let bridge_stats = Arc::new(PortStats::default());
        let budget = Arc::new(ReassemblyBudget::new(ReassemblyBudget::HOST));
        let ports = options.ports.max(1);
        let mut bridges = Bridge::bind_group(options.listen, ports, count, &bridge_stats, &budget)?;
        if let Some(listen) = options.vxlan_listen {
            Bridge::add_vxlan(&mut bridges, listen)?;
        }
        bridges.iter_mut().for_each(|bridge| bridge.tx.set_zero_copy(options.zero_copy));
        let (bridge_address, courier) = (bridges[0].local_addr(), bridges[0].courier());
        let paths = PathWatch::of(&bridges);
        let shared = Arc::new(Shared {
            setup: ArcSwap::from_pointee(Setup::new(Parts::default())),
            generation: AtomicU64::new(0),
            stopping: AtomicBool::new(false),
            pollers: (0..count).map(|_| Poller::new()).collect::<io::Result<_>>()?,
            learned: Arc::new(Learned::new()),
            may_kernel: options.kernel_path,
            outlive: options.outlive.clone(),
            vxlan_listen: options.vxlan_listen,
            kernel_path: OnceLock::new(),
            dispatcher_stats: (0..count).map(|_| Arc::default()).collect(),
            started: Instant::now(),
            adopted: Mutex::new(vec![0; count]),
            progress: Condvar::new(),
        });
        let streams = stream::Streams::start(options.stream_listen, bridge_stats.clone())?;
        let threads = Vec::with_capacity(count);
        let prober = Prober::start(shared.started, paths)?;
        let mut core = Core { shared, threads, bridge_address, bridge_stats, streams, courier, prober };
        for (id, bridge) in bridges.into_iter().enumerate() {
            core.spawn(id, bridge, options)?;
        }
        Ok(core)
    }

    fn spawn(&mut self, id: usize, bridge: Bridge, options: &CoreOptions) -> Result<(), CoreError> {
        let yielder = Yielder::new(options.yield_strategy, options.sleep_us, options.nowork_us);
        options.isolation.apply_to_sockets(bridge.rx.iter().map(Receiver::fd), self.shared.poller(id));
        let dispatcher = Dispatcher::new(id, self.shared.clone(), bridge, yielder, options.burst);
        let (isolation, cpu) = (options.isolation, options.cpus.get(id % options.cpus.len().max(1)).copied());
        let (report, pinned) = std::sync::mpsc::channel();
        let thread = std::thread::Builder::new().name(format!("dispatch-{id}")).spawn(move || {
            let result = cpu.map_or(Ok(()), isolation::pin).and_then(|()| isolation.apply_to_thread());
            let run = result.is_ok();
            // `Core::start` waits for exactly this report.
            let _ = report.send(result);
            if run {
                dispatcher.run();
            }
        })?;
        self.threads.push(thread);
        Ok(pinned.recv().map_err(|_| io::Error::other("the thread ended at once"))??)
    }

    /// Adopts devices and flows of a vnetd that has died; those without an interface are removed after a while. Call this before the
    /// first setup, once nothing else can keep vnetd from starting.
    pub fn take_over(&self) {
        if self.shared.outlive.pins.as_ref().is_some_and(PinOptions::exist) {
            let _ = self.kernel();
        }
    }

    /// Publishes `parts` as the new setup, atomically and under traffic.
    ///
    /// Returns when every dispatcher has adopted it, so nothing uses removed ports any more. Addresses learned at removed ports
    /// are flushed before the ports' slots can be reused.
    pub fn publish(&self, mut parts: Parts) {
        let interface = |port: &InterfacePort| (port.member.port, format!("interface {}", port.name));
        let link = |port: &LinkPort| (port.member.port, format!("link {}", port.link.name()));
        let interfaces = parts.interfaces.iter().map(interface);
        self.shared.learned.name_ports(interfaces.chain(parts.links.iter().map(link)).collect());
        let path = self.shared.kernel_path();
        if let Some(wire) = path.and_then(|path| path.wire(&parts.links, &self.courier, &self.bridge_stats)) {
            parts.feeders.push((PortId::NONE, wire));
        }
        let setup = Setup::new(parts);
        // Before any frame leaves on a new link: senders need the link's route.
        self.prober.set_links(setup.peers.links());
        self.streams.set_links(setup.peers.links());
        self.adopt(setup);
    }

    /// Replaces only the observers. Returns when every dispatcher has adopted them.
    pub fn observe(&self, observers: Observers) {
        let setup = self.shared.setup.load().with(observers);
        self.adopt(setup);
    }

    fn adopt(&self, mut setup: Setup) {
        let path = self.shared.kernel_path().filter(|path| !path.has(&setup));
        if let Some(path) = path {
            // One thread of control publishes at a time.
            setup.generation = path.kernel().next_generation();
        }
        let setup = Arc::new(setup);
        if let Some(path) = path {
            path.publish(&setup);
        }
        let before = self.shared.setup.swap(setup.clone());
        let generation = self.shared.generation.fetch_add(1, Ordering::AcqRel) + 1;
        self.shared.ring_all();
        let mut adopted = self.shared.adopted.lock();
        while adopted.iter().any(|&g| g < generation) && self.threads.iter().all(|t| !t.is_finished()) {
            let wait = Duration::from_millis(100);
            self.shared.progress.wait_for(&mut adopted, wait);
        }
        drop(adopted);
        if let Some(path) = path {
            path.settle();
        }
        for id in before.ports_missing_in(&setup) {
            self.shared.learned.forget_port(id);
        }
    }

    /// Listening address of links' datagrams, with the first port.
    pub fn bridge_address(&self) -> SocketAddr {
        self.bridge_address
    }

    /// True if datagrams from `source` belong to a link.
    pub fn knows(&self, source: SocketAddr) -> bool {
        self.shared.setup.load().peers.knows(source)
    }

    /// Start of the core's clock.
    pub fn started(&self) -> Instant {
        self.shared.started
    }

    /// Counters of datagrams that belong to no link.
    pub fn bridge_stats(&self) -> &Arc<PortStats> {
        &self.bridge_stats
    }

    /// The courier that sends inquiries and keepalives to other hosts' control.
    pub fn courier(&self) -> &Courier {
        &self.courier
    }

    /// Addresses learned so far.
    pub fn learned(&self) -> &Arc<Learned> {
        &self.shared.learned
    }

    /// The kernel's own path, created by the first call. Setups published afterwards use it.
    ///
    /// # Errors
    /// The reason why it is unavailable, as one line.
    pub fn kernel(&self) -> Result<&Arc<Kernel>, &str> {
        let path = self.shared.kernel_path.get_or_init(|| self.shared.open_kernel_path());
        path.as_ref().map(KernelPath::kernel).map_err(String::as_str)
    }

    /// The kernel's own path; `None` while no interface has requested it.
    pub fn kernel_if_open(&self) -> Option<&Arc<Kernel>> {
        self.shared.kernel_path().map(KernelPath::kernel)
    }

    /// Checks that the kernel forwards known flows to the other host of `link`; `None` while no interface has requested the kernel's own
    /// path.
    pub fn kernel_reaches(&self, link: &Arc<Link>) -> Option<Result<(), String>> {
        Some(self.shared.kernel_path()?.reaches(link, self.now_ms()))
    }

    /// Adds frames that the kernel forwarded to their ports' counters. Call it before reading the counters.
    pub fn count(&self) {
        if let Some(path) = self.shared.kernel_path() {
            path.kernel().flows().count();
        }
    }

    /// Signs of life of the dispatchers.
    pub fn pulse(&self) -> Pulse {
        Pulse { stats: self.shared.dispatcher_stats.clone(), started: self.shared.started }
    }

    /// Each dispatcher's own statistics.
    pub fn dispatcher_stats(&self) -> &[Arc<DispatcherStats>] {
        &self.shared.dispatcher_stats
    }

    /// Number of dispatchers.
    pub fn dispatchers(&self) -> usize {
        self.shared.dispatchers()
    }

    /// The current routing table.
    pub fn table(&self) -> Arc<Table> {
        self.shared.setup.load().table.clone()
    }

    /// Milliseconds on the core's clock.
    pub fn now_ms(&self) -> u64 {
        self.shared.started.elapsed().as_millis() as u64
    }
}

impl Drop for Core {
    /// Stops the dispatchers and waits for them.
    fn drop(&mut self) {
        self.shared.stopping.store(true, Ordering::Relaxed);
        self.shared.ring_all();
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!(
                    "a dispatcher panicked: its interfaces and links were cut off; restart vnetd and report this"
                );
            }
        }
    }
}
