//! The core: all dispatchers, and the publication of new setups to them.
//!
//! `publish` returns when all dispatchers have adopted the new setup (`shared`): from then on none uses a port or link that the new
//! setup lacks.

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::MutexGuard;

use super::crew::{self, Crew, CrewError, CrewOptions};
use super::dispatcher::Dispatcher;
use super::dispatcher_stats::DispatcherStats;
use super::isolation::{Isolation, IsolationError};
use super::kernel_path::KernelPath;
use super::observers::Observers;
use super::recruit::{Recruiting, Threads};
use super::sealed_sessions::SealedSessions;
use super::setup::{InterfacePort, LinkPort, Parts, Setup};
use super::shared::{KernelPart, Shared};
use super::yielding::Strategy;
use crate::frame::{BATCH_MAX, PortId};
use crate::inherit::{self, Inheritance};
use crate::kernel::{Counted, Kernel, Outlive, PinOptions};
use crate::link::path::prober::Prober;
use crate::link::socket::udp::Socket;
use crate::link::{
    self, Bridge, BridgeError, Courier, Link, PathWatch, ReassemblyBudget, Receiver, ZeroCopy, stream,
};
use crate::route::{Learned, Table};
use crate::stats::PortStats;

/// Options of a core.
#[derive(Clone, Debug)]
pub struct CoreOptions {
    /// Number of dispatchers, at least 1 (`n_dispatchers`), and of the threads that run them under full load.
    pub threads: usize,
    /// When threads are recruited and released.
    pub recruiting: Recruiting,
    /// CPUs to pin threads to, round robin; empty: not pinned.
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
    /// Agree with other hosts on packets that need no tunnel.
    pub translates: bool,
    /// How flows of the kernel's own path outlive this process.
    pub outlive: Outlive,
    /// What a running vnetd hands over; `None`: everything is opened anew.
    pub inheritance: Option<Arc<Inheritance>>,
}

impl Default for CoreOptions {
    /// One dispatcher that listens on the loopback interface, on a port that the kernel chooses.
    fn default() -> CoreOptions {
        CoreOptions {
            threads: 1,
            recruiting: Recruiting::default(),
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
            translates: false,
            outlive: Outlive::default(),
            inheritance: None,
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

impl From<CrewError> for CoreError {
    fn from(error: CrewError) -> CoreError {
        match error {
            CrewError::System(error) => CoreError::System(error),
            CrewError::Isolation(error) => CoreError::Isolation(error),
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
    crew: Crew,
    bridge_address: SocketAddr,
    bridge_stats: Arc<PortStats>,
    streams: stream::Streams,
    courier: Courier,
    prober: Prober,
    /// The bridge's sockets by name, for the next vnetd.
    sockets: Vec<(String, Arc<Socket>)>,
}

/// A core that stands still: no dispatcher takes a frame, and the kernel's own path changes no flow. Dropping it lets the core go on.
pub struct Still<'a> {
    _crew: crew::Still<'a>,
    _kernel: Option<MutexGuard<'a, ()>>,
}

impl Core {
    /// Binds the bridge's sockets and starts the dispatchers with an empty setup.
    pub fn start(options: &CoreOptions) -> Result<Core, CoreError> {
        let count = options.threads.max(1);
        if options.inheritance.is_some() {
            // Before frames wait.
            link::seed();
        }
        options.isolation.apply_to_process()?;
        let bridge_stats = Arc::new(PortStats::default());
        let budget = Arc::new(ReassemblyBudget::new(ReassemblyBudget::HOST));
        let ports = options.ports.max(1);
        let inheritance = options.inheritance.as_deref();
        let listen = (options.listen, ports);
        let mut bridges = match inheritance {
            Some(inheritance) => Bridge::inherit_group(inheritance, listen, count, &bridge_stats, &budget)?,
            None => Bridge::bind_group(options.listen, ports, count, &bridge_stats, &budget)?,
        };
        if let Some(listen) = options.vxlan_listen {
            Bridge::add_vxlan(&mut bridges, listen, inheritance)?;
        }
        let sockets = bridges.iter().enumerate().flat_map(|(id, bridge)| bridge.descriptors(id)).collect();
        bridges.iter_mut().for_each(|bridge| bridge.tx.set_zero_copy(options.zero_copy));
        let (bridge_address, courier) = (bridges[0].local_addr(), bridges[0].courier());
        let paths = PathWatch::of(&bridges);
        let kernel = KernelPart {
            allowed: options.kernel_path,
            translates: options.translates,
            outlive: options.outlive.clone(),
            vxlan_listen: options.vxlan_listen,
            inheritance: options.inheritance.clone(),
        };
        let shared = Arc::new(Shared::new(count, kernel)?);
        let streams = stream::Streams::start(options.stream_listen, bridge_stats.clone(), inheritance)?;
        let prober = Prober::start(shared.started(), paths)?;
        let dispatcher = |(id, bridge): (usize, Bridge)| {
            options.isolation.apply_to_sockets(bridge.rx.iter().map(Receiver::fd), shared.poller(id));
            Dispatcher::new(id, shared.clone(), bridge, options.burst)
        };
        let dispatchers = bridges.into_iter().enumerate().map(dispatcher).collect();
        let crew = CrewOptions {
            recruiting: options.recruiting,
            cpus: options.cpus.clone(),
            isolation: options.isolation,
            yielding: (options.yield_strategy, options.sleep_us, options.nowork_us),
        };
        let crew = Crew::start(shared.clone(), dispatchers, crew)?;
        Ok(Core { shared, crew, bridge_address, bridge_stats, streams, courier, prober, sockets })
    }

    /// Adopts devices and flows of a vnetd that has died; those without an interface are removed after a while. Call this before the
    /// first setup, once nothing else can keep vnetd from starting.
    pub fn take_over(&self) {
        if self.shared.kernel_part().outlive.pins.as_ref().is_some_and(PinOptions::exist) {
            let _ = self.kernel();
        }
    }

    /// What a running vnetd hands over to this core.
    pub fn inheritance(&self) -> Option<&Arc<Inheritance>> {
        self.shared.kernel_part().inheritance.as_ref()
    }

    /// Opens the kernel's own path of a running vnetd, if it hands it over. Call it before the first setup.
    ///
    /// # Errors
    /// The reason why it cannot be taken over, in one line.
    pub fn inherit_kernel(&self) -> Result<(), String> {
        let Some(inheritance) = self.inheritance() else { return Ok(()) };
        if !inheritance.has(inherit::KERNEL_LOCK) && !inheritance.has(inherit::KERNEL_MOUNT) {
            return Ok(());
        }
        let path = self.shared.kernel_path_or_open().as_ref().map_err(String::clone)?;
        path.inherit_wire(&self.courier, &self.bridge_stats)
    }

    /// The running vnetd has ended: everything that it has handed over is this process's own.
    pub fn own(&self) {
        self.inheritance().into_iter().for_each(|inheritance| inheritance.settle());
        self.kernel_if_open().into_iter().for_each(|kernel| kernel.own());
    }

    /// Duplicates of the core's descriptors by name, for the next vnetd.
    ///
    /// # Errors
    /// Why the next vnetd could not take over, in one line.
    pub fn descriptors(&self) -> Result<Vec<(String, OwnedFd)>, String> {
        let failed = |error: io::Error| format!("cannot duplicate a descriptor: {error}");
        let duplicate =
            |(name, socket): &(String, Arc<Socket>)| Ok((name.clone(), socket.as_fd().try_clone_to_owned()?));
        let mut all = self.sockets.iter().map(duplicate).collect::<io::Result<Vec<_>>>().map_err(failed)?;
        if let Some(listener) = self.streams.descriptor() {
            all.push((inherit::STREAMS.into(), listener.map_err(failed)?));
        }
        if let Some(path) = self.shared.kernel_path() {
            let no_pins = |why: &str| format!("flows of the kernel path cannot be handed over: {why}");
            let (lock, mounted) = path.kernel().lock().map_err(no_pins)?;
            let name = if mounted { inherit::KERNEL_MOUNT } else { inherit::KERNEL_LOCK };
            all.push((name.into(), lock.try_clone_to_owned().map_err(failed)?));
            if let Some(wire) = path.wire_descriptor() {
                all.push((inherit::WIRE.into(), wire.map_err(failed)?));
            }
        }
        Ok(all)
    }

    /// Has all dispatchers and the kernel path stand still, with every frame that they have taken forwarded, until the result is dropped.
    /// `None` if a dispatcher does not stop in time. Publish nothing meanwhile.
    pub fn stand_still(&self) -> Option<Still<'_>> {
        let kernel = self.shared.kernel_path().map(KernelPath::stand_still);
        Some(Still { _crew: self.crew.stand_still()?, _kernel: kernel })
    }

    /// The numbers of the next messages without a copy, by the names of the sockets.
    pub fn zero_copies(&self) -> BTreeMap<String, u32> {
        self.sockets.iter().map(|(name, socket)| (name.clone(), socket.zero_copies())).collect()
    }

    /// Goes on with the [`zero_copies`](Core::zero_copies) of a core that stands still. Call it before the first setup.
    pub fn resume_zero_copies(&self, next: &BTreeMap<String, u32>) {
        for (name, socket) in &self.sockets {
            next.get(name).into_iter().for_each(|next| socket.set_zero_copies(*next));
        }
    }

    /// Counts frames that the kernel has forwarded, and returns what has been counted of each flow.
    pub fn counted(&self) -> Vec<Counted> {
        self.kernel_if_open().map_or(vec![], |kernel| kernel.flows().counted())
    }

    /// Takes over the flows that a core which stands still has [`counted`](Core::counted). Call it before the first setup.
    pub fn succeed(&self, counted: Vec<Counted>) {
        if let Some(kernel) = self.kernel_if_open() {
            kernel.flows().succeed(counted);
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
        self.shared.learned().name_ports(interfaces.chain(parts.links.iter().map(link)).collect());
        let path = self.shared.kernel_path();
        let wire = path.and_then(|path| path.wire(&parts.links, &self.courier, &self.bridge_stats));
        if let Some(wire) = &wire {
            parts.feeders.push((PortId::NONE, wire.clone()));
        }
        let mut setup = Setup::new(parts);
        setup.wire = wire.map(|wire| wire as _);
        tracing::debug!("a setup is made");
        // Before any frame leaves on a new link: senders need the link's route.
        self.prober.set_links(setup.peers.links());
        self.streams.set_links(setup.peers.links());
        tracing::debug!("the routes of its links are known");
        self.adopt(setup);
    }

    /// Replaces only the observers. Returns when every dispatcher has adopted them.
    pub fn observe(&self, observers: Observers) {
        let setup = self.shared.setup().with(observers);
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
        let before = self.shared.publish(setup.clone());
        tracing::debug!("all dispatchers have adopted it");
        if let Some(path) = path {
            path.settle();
        }
        for id in before.ports_missing_in(&setup) {
            self.shared.learned().remove_port(id, &before.table, &setup.table, self.now_ms());
        }
    }

    /// Listening address of links' datagrams, with the first port.
    pub fn bridge_address(&self) -> SocketAddr {
        self.bridge_address
    }

    /// True if datagrams from `source` belong to a link.
    pub fn knows(&self, source: SocketAddr) -> bool {
        self.shared.setup().peers.knows(source)
    }

    /// Start of the core's clock.
    pub fn started(&self) -> Instant {
        self.shared.started()
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
        self.shared.learned()
    }

    /// Sessions of applications whose datagrams the kernel carries across sealed links.
    pub fn sealed_sessions(&self) -> &Arc<SealedSessions> {
        self.shared.sealed()
    }

    /// The kernel's own path, created by the first call. Setups published afterwards use it.
    ///
    /// # Errors
    /// The reason why it is unavailable, as one line.
    pub fn kernel(&self) -> Result<&Arc<Kernel>, &str> {
        self.shared.kernel_path_or_open().as_ref().map(KernelPath::kernel).map_err(String::as_str)
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

    /// Why packets that the kernel sends to the other host of `link` take a tunnel; `None` if they may be translated.
    pub fn tunnel_reason(&self, link: &Link) -> Option<&'static str> {
        self.shared.kernel_path()?.tunnel_reason(link, self.now_ms())
    }

    /// Adds frames that the kernel forwarded to their ports' counters. Call it before reading the counters.
    pub fn count(&self) {
        if let Some(path) = self.shared.kernel_path() {
            path.kernel().flows().count();
        }
    }

    /// Signs of life of the dispatchers.
    pub fn pulse(&self) -> Pulse {
        Pulse { stats: self.shared.dispatcher_stats().to_vec(), started: self.shared.started() }
    }

    /// Each dispatcher's own statistics.
    pub fn dispatcher_stats(&self) -> &[Arc<DispatcherStats>] {
        self.shared.dispatcher_stats()
    }

    /// Number of dispatchers.
    pub fn dispatchers(&self) -> usize {
        self.shared.dispatchers()
    }

    /// The threads that run the dispatchers now, and how many were recruited and released.
    pub fn threads(&self) -> Threads {
        self.crew.threads()
    }

    /// Changes when threads are recruited and released, under traffic.
    pub fn recruit(&self, recruiting: Recruiting) {
        self.crew.recruit(recruiting);
    }

    /// Moves dispatcher `id` to the thread in `slot`, under traffic. Only for a core with as many threads as dispatchers.
    #[cfg(feature = "test-util")]
    pub fn hand_over(&self, id: usize, slot: usize) {
        self.crew.hand_over(id, slot);
    }

    /// The current routing table.
    pub fn table(&self) -> Arc<Table> {
        self.shared.setup().table.clone()
    }

    /// Milliseconds on the core's clock.
    pub fn now_ms(&self) -> u64 {
        self.shared.started().elapsed().as_millis() as u64
    }
}
