//! The kernel's own path, joined to dispatchers: installs routers' verdicts as flows, and renews those in use.
//!
//! A flow may be installed if both its ports have devices with programs, or one has and the other is a link that the kernel reaches
//! by itself (`tunnels`), and no capture watches either: a watched port's frames come up. Every setup has a generation. Publishing stores it
//! where the programs look: that ends all older flows at once, before any dispatcher has adopted the setup; afterwards no program
//! follows the old one ([`KernelPath::settle`]).
//!
//! A flow's verdict ends within two seconds. The renewer decides flows in use anew in time, as a frame of them would: it learns
//! their sources, and they never come up. Flows that end unused are removed; their next frame comes up.
//!
//! Between two stations at the ends of a sealed link the same holds for datagrams of applications' sealed sessions only
//! (`sealed_sessions`): the verdict on the stations' flow is installed for each of them.
//!
//! The renewer also advances the leases' clock, after it has renewed: a flow in use does not end because the renewer is late or vnetd
//! has died. The clock starts with the first setup that has the kernel path. Until then the flows of a vnetd that has died stay
//! valid. Its devices that no interface has claimed after [`Outlive::time`](crate::kernel::Outlive) are removed. A vnetd that ends before
//! its first setup has failed to start: it leaves devices and flows to the next one.

use std::collections::HashSet;
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use arc_swap::{ArcSwap, ArcSwapOption};
use parking_lot::{Mutex, MutexGuard};

use super::sealed_sessions::SealedSessions;
use super::setup::{InterfacePort, LinkPort, Port, Setup};
use super::translator::Translator;
use super::tunnels::Tunnels;
use super::wire_path::WirePath;
use crate::frame::{NetworkId, PortId};
use crate::inherit::{Inheritance, WIRE};
use crate::interface::tap::TapError;
use crate::interface::wire::Wire;
use crate::interface::{Interface, KernelDevice, LeadsTo, headroom, veth, wire};
use crate::kernel::{Destination, Kernel, Known, Sender, Target, Terms, now_ns};
use crate::link::{Courier, Link, Tunnel, WireTerms};
use crate::route::{Answer, Flow, INSTALLED_MS, Install, Installed, Learned, Router, Verdicts};
use crate::stats::PortStats;
use crate::wire::vxlan::WIRE_PORT;

/// Time between two rounds of the renewer: several within a verdict's lifetime.
const RENEW: Duration = Duration::from_millis(INSTALLED_MS / 8);
/// Verdicts that end within this time are renewed, so that a late round still renews in time.
const RENEW_AHEAD_NS: u64 = 3 * RENEW.as_nanos() as u64;
const NS_PER_MS: u64 = 1_000_000;
/// Rounds of the renewer from one trial of the wire to the next: a second.
const ROUNDS_PER_TRIAL: u64 = 1000 / RENEW.as_millis() as u64;
/// Why the kernel does not forward frames of a sealed link whose wire works.
const SEALED_BY_APPLICATIONS: &str = "it is sealed; what applications have sealed takes the kernel's path";
/// Minimum time between a failure to open the wire and the next attempt.
const OPEN_AGAIN: Duration = Duration::from_secs(10);

/// Installs dispatchers' verdicts as flows.
struct Installer {
    kernel: Arc<Kernel>,
    /// CLOCK_MONOTONIC time of the core's start, in nanoseconds.
    started_ns: u64,
    setup: ArcSwap<Ways>,
    sealed: Arc<SealedSessions>,
}

/// Ports of a setup whose frames the kernel may forward, by index.
struct Ways {
    generation: u32,
    tunnels: Arc<Tunnels>,
    wire: Option<Arc<WirePath>>,
    ports: Vec<Option<Way>>,
    /// Ports whose guests' frames must all reach vnetd.
    checked: Vec<bool>,
}

/// A port whose frames the kernel may forward.
enum Way {
    Guest(Destination, Arc<dyn Interface>),
    Host(Arc<Link>),
}

impl Way {
    fn stats(&self) -> &Arc<PortStats> {
        match self {
            Way::Guest(destination, _) => &destination.stats,
            Way::Host(link) => link.stats(),
        }
    }

    /// The guest as a destination, with its device's current MTU.
    fn guest(&self) -> Option<Destination> {
        let Way::Guest(to, interface) = self else { return None };
        Some(Destination { mtu: interface.kernel_device()?.mtu.load(Relaxed), ..to.clone() })
    }

    /// True for a link that leaves the kernel only what applications have sealed.
    fn is_sealed(&self) -> bool {
        matches!(self, Way::Host(link) if link.needs_seal())
    }

    /// True if the kernel would discard frames to the guest, which nobody counts: vnetd drops them instead.
    fn is_down(&self) -> bool {
        let Way::Guest(_, interface) = self else { return false };
        interface.kernel_device().is_some_and(|device| !device.up.load(Relaxed))
    }
}

impl Ways {
    fn of(setup: &Setup, tunnels: Arc<Tunnels>, wire: Option<Arc<WirePath>>) -> Ways {
        let way = |index: usize| {
            let id = PortId(index as u16);
            let way = match setup.port(id)? {
                Port::Interface(port) => {
                    let KernelDevice { host, mac, leads_to, .. } = port.interface.kernel_device()?;
                    let target = match *leads_to {
                        LeadsTo::Namespace(namespace) => Target::Guest { mac: Some(*mac), namespace },
                        LeadsTo::Outside => Target::Guest { mac: None, namespace: None },
                    };
                    let (device, stats) = (host.1, port.stats.clone());
                    let to = Destination { port: id, device, mtu: 0, stats, target };
                    Way::Guest(to, port.interface.clone())
                }
                Port::Link(port) => {
                    port.link.tunnel().ok()?;
                    Way::Host(port.link.clone())
                }
            };
            (!setup.watches(id)).then_some(way)
        };
        let checked = |index: usize| {
            setup.interface(PortId(index as u16)).is_some_and(InterfacePort::needs_every_frame)
        };
        let (ports, checked) = (0..setup.slots()).map(|index| (way(index), checked(index))).unzip();
        Ways { generation: setup.generation, tunnels, wire, ports, checked }
    }

    fn get(&self, port: PortId) -> Option<&Way> {
        self.ports.get(port.index())?.as_ref()
    }

    /// Ends the flows to guests whose device is down.
    fn end_downed(&self, kernel: &Kernel) {
        let downed: Vec<_> =
            self.ports.iter().flatten().filter(|way| way.is_down()).map(Way::stats).collect();
        if !downed.is_empty() {
            // They come up, and are offered again.
            let _ = kernel.flows().end(&downed);
        }
    }

    /// Where the kernel sends a flow of `network` between two ports; `None`: nowhere. `Err`: nowhere now, but that may change under
    /// this setup.
    fn way(&self, from: &Way, to: &Way, network: NetworkId, now_ms: u64) -> Option<Result<Destination, ()>> {
        let carries = |link: &Link| link.carries(network);
        match (from, to) {
            _ if to.is_down() => Some(Err(())),
            (Way::Guest(..), Way::Guest(..)) => to.guest().map(Ok),
            (Way::Host(link), Way::Guest(..)) => to.guest().filter(|_| carries(link)).map(Ok),
            (Way::Guest(..), Way::Host(link)) => {
                let mtu = from.guest()?.mtu;
                let way = match link.tunnel().ok().filter(|_| carries(link))? {
                    Tunnel::Wire(_) | Tunnel::Sealed(_) => self.wire.as_ref()?.to(link, mtu, now_ms),
                    Tunnel::Vtep(_) => self.tunnels.to_vtep(link, mtu),
                };
                Some(way.ok_or(()))
            }
            // Relayed frames count their hops.
            (Way::Host(_), Way::Host(_)) => None,
        }
    }
}

impl Install for Installer {
    fn install(&self, flow: &Flow, verdict: &Installed) -> Answer {
        self.offered(flow, verdict, |known, sender, way, terms, is_sealed| {
            if is_sealed {
                // There may be many, and the dispatcher has frames to forward: the renewer installs them.
                self.sealed.came_up(flow);
            } else {
                self.kernel.flows().install(known, sender, way, terms);
            }
        })
    }
}

/// Installs the verdicts of the renewer's router.
struct Renewing(Arc<Installer>);

impl Install for Renewing {
    fn install(&self, flow: &Flow, verdict: &Installed) -> Answer {
        let Installer { kernel, sealed, .. } = &*self.0;
        self.0.offered(flow, verdict, |known, sender, way, terms, is_sealed| {
            if is_sealed {
                for datagram in sealed.between(flow.network, flow.src, flow.dst) {
                    kernel.flows().install(&Known { datagram: Some(datagram), ..*known }, sender, way, terms);
                }
            } else {
                kernel.flows().install(known, sender, way, terms);
            }
        })
    }
}

impl Installer {
    /// Gives `install` the flow of a verdict, and whether it is between stations at the ends of a sealed link: then the kernel may have
    /// only the datagrams of their sessions.
    fn offered(
        &self,
        flow: &Flow,
        verdict: &Installed,
        install: impl FnOnce(&Known, &Sender, &Destination, &Terms, bool),
    ) -> Answer {
        let ways = self.setup.load();
        let (Some(from), Some(to)) = (ways.get(flow.from), ways.get(verdict.to)) else {
            return Answer::Never;
        };
        if verdict.generation != ways.generation || ways.checked[flow.from.index()] {
            return Answer::Never;
        }
        let now_ms = now_ns().saturating_sub(self.started_ns) / NS_PER_MS;
        let way = match ways.way(from, to, flow.network, now_ms) {
            None => return Answer::Never,
            Some(Err(())) => return Answer::NotYet,
            Some(Ok(way)) => way,
        };
        let Installed { generation, buckets, versions, .. } = *verdict;
        let until_ns = self.started_ns.saturating_add(verdict.until_ms.saturating_mul(NS_PER_MS));
        let Flow { network, from: port, dst, src } = *flow;
        if let Way::Host(link) = from
            && !link.peer_may_send(network, src)
        {
            return Answer::Never;
        }
        let known = Known { network, from: port, dst, src, datagram: None };
        let terms = Terms { until_ns, generation, buckets, versions };
        let payer = if matches!(from, Way::Host(_)) { way.port } else { flow.from };
        let sender = Sender { stats: from.stats().clone(), payer };
        if let Way::Guest(_, interface) = to {
            interface.forwarded_from(flow.src);
        }
        install(&known, &sender, &way, &terms, from.is_sealed() || to.is_sealed());
        // Refused ones are offered again, too.
        Answer::Taken
    }
}

/// What the kernel path needs of its core.
pub(super) struct CorePart {
    pub(super) learned: Arc<Learned>,
    pub(super) started: Instant,
    /// How long flows outlive vnetd.
    pub(super) outlive: Duration,
    /// Whether packets may be translated.
    pub(super) translates: bool,
    /// Where datagrams of VXLAN links arrive.
    pub(super) vxlan_listen: Option<SocketAddr>,
    /// What the running vnetd hands over.
    pub(super) inheritance: Option<Arc<Inheritance>>,
    /// Sessions whose datagrams take the wire of sealed links.
    pub(super) sealed: Arc<SealedSessions>,
}

/// The kernel path of a core.
pub(super) struct KernelPath {
    installer: Arc<Installer>,
    learned: Arc<Learned>,
    started: Instant,
    stopping: Arc<AtomicBool>,
    /// True once a setup has the kernel path: the leases' clock runs.
    serving: Arc<AtomicBool>,
    outlive: Duration,
    translates: bool,
    renewer: Option<JoinHandle<()>>,
    /// The setup that the renewer's router decides by.
    current: Arc<ArcSwap<Setup>>,
    tunnels: Arc<Tunnels>,
    wire: Arc<ArcSwapOption<WirePath>>,
    /// The last failure to open the wire: its time and reason.
    no_wire: Mutex<Option<(Instant, String)>>,
    /// Held by the renewer during a round.
    round: Arc<Mutex<()>>,
    inheritance: Option<Arc<Inheritance>>,
}

impl KernelPath {
    /// Joins `kernel` to a core with its first setup.
    pub(super) fn new(kernel: Arc<Kernel>, setup: Arc<Setup>, core: CorePart) -> io::Result<KernelPath> {
        let CorePart { learned, started, outlive, translates, vxlan_listen, inheritance, sealed } = core;
        let tunnels = Arc::new(Tunnels::new(vxlan_listen));
        let started_ns = now_ns().saturating_sub(started.elapsed().as_nanos() as u64);
        let ways = ArcSwap::from_pointee(Ways::of(&setup, tunnels.clone(), None));
        let installer = Arc::new(Installer { kernel, started_ns, setup: ways, sealed });
        let mut path = KernelPath {
            installer,
            learned,
            started,
            stopping: Arc::default(),
            serving: Arc::default(),
            outlive: outlive.max(Duration::from_millis(INSTALLED_MS)),
            translates,
            renewer: None,
            current: Arc::new(ArcSwap::new(setup)),
            tunnels,
            wire: Arc::default(),
            no_wire: Mutex::default(),
            round: Arc::default(),
            inheritance,
        };
        let renewer = path.renewer();
        let renewer = std::thread::Builder::new().name("kernel-flows".into()).spawn(renewer)?;
        path.installer.sealed.wake(renewer.thread().clone());
        path.renewer = Some(renewer);
        Ok(path)
    }

    pub(super) fn kernel(&self) -> &Arc<Kernel> {
        &self.installer.kernel
    }

    /// The wire, for a setup with `links`. Opens the wire if one of them may use it.
    pub(super) fn wire(
        &self,
        links: &[LinkPort],
        courier: &Courier,
        strangers: &Arc<PortStats>,
    ) -> Option<Arc<WirePath>> {
        if let Some(wire) = self.wire.load_full() {
            return Some(wire);
        }
        let mut failed = self.no_wire.lock();
        if links.iter().all(|port| port.link.wire_remote().is_none())
            || failed.as_ref().is_some_and(|(at, _)| at.elapsed() < OPEN_AGAIN)
        {
            return None;
        }
        match self.open_wire(Wire::open(WIRE_PORT), courier, strangers) {
            Ok(wire) => Some(wire),
            Err(error) => {
                tracing::info!("no wire, vnetd forwards all frames to other hosts itself: {error}");
                *failed = Some((Instant::now(), error));
                None
            }
        }
    }

    /// Opens the wire of the running vnetd, if it hands it over: attaching programs takes longer than frames should wait.
    ///
    /// # Errors
    /// The reason why it cannot be taken over.
    pub(super) fn inherit_wire(&self, courier: &Courier, strangers: &Arc<PortStats>) -> Result<(), String> {
        match &self.inheritance {
            Some(inheritance) if inheritance.has(WIRE) => {
                self.open_wire(Wire::inherit(WIRE_PORT, inheritance), courier, strangers).map(drop)
            }
            _ => Ok(()),
        }
    }

    fn open_wire(
        &self,
        wire: Result<Wire, TapError>,
        courier: &Courier,
        strangers: &Arc<PortStats>,
    ) -> Result<Arc<WirePath>, String> {
        let wire = wire.map_err(|error| error.to_string())?;
        let announced = WireTerms { outlive: self.outlive, translates: self.translates };
        let sealed = self.installer.sealed.clone();
        let wire = WirePath::open(
            self.kernel(),
            wire,
            courier.clone(),
            (strangers.clone(), sealed, self.learned.clone()),
            (announced, self.tunnels.clone()),
        )?;
        self.wire.store(Some(wire.clone()));
        Ok(wire)
    }

    /// Checks that the kernel sends known flows of `link` by itself.
    ///
    /// # Errors
    /// The reason why vnetd forwards its frames, in one line.
    pub(super) fn reaches(&self, link: &Arc<Link>, now_ms: u64) -> Result<(), String> {
        match link.tunnel()? {
            Tunnel::Vtep(_) => return Ok(self.tunnels.is_ready(link)?),
            Tunnel::Sealed(_) => {
                let is_ready = |wire: &Arc<WirePath>| wire.is_ready(link, now_ms).is_ok();
                let is_ready = self.wire.load_full().as_ref().is_some_and(is_ready);
                return Err(if is_ready { SEALED_BY_APPLICATIONS } else { "it is sealed" }.into());
            }
            Tunnel::Wire(_) => {}
        }
        if let Some(wire) = &*self.wire.load() {
            return Ok(wire.is_ready(link, now_ms)?);
        }
        let failed = self.no_wire.lock();
        Err(failed.as_ref().map_or("the wire is not open".into(), |(_, error)| error.clone()))
    }

    /// Why packets to the other host of `link` take the tunnel, in one line; `None` if they may be translated.
    pub(super) fn tunnel_reason(&self, link: &Link, now_ms: u64) -> Option<&'static str> {
        self.wire.load().as_ref()?.tunnel_reason(link, now_ms)
    }

    /// Where routers of `setup` offer their verdicts.
    pub(super) fn verdicts(&self, setup: &Setup) -> Verdicts {
        Verdicts { to: self.installer.clone(), generation: setup.generation }
    }

    /// Has the renewer stand still until the result is dropped.
    pub(super) fn stand_still(&self) -> MutexGuard<'_, ()> {
        self.round.lock()
    }

    /// Descriptor of the wire's TAP.
    pub(super) fn wire_descriptor(&self) -> Option<io::Result<OwnedFd>> {
        Some(self.wire.load_full()?.descriptor())
    }

    /// True when `setup` differs from the current one in nothing that matters to a flow.
    pub(super) fn has(&self, setup: &Setup) -> bool {
        let current = self.current.load();
        let watched = |setup: &Setup| -> Vec<bool> {
            (0..setup.slots()).map(|port| setup.watches(PortId(port as u16))).collect()
        };
        // The first one was current before there was a path.
        setup.generation != 0
            && setup.generation == current.generation
            && Arc::ptr_eq(&setup.table, &current.table)
            && watched(setup) == watched(&current)
    }

    /// Ends all flows of older setups and takes those of `setup`.
    pub(super) fn publish(&self, setup: &Arc<Setup>) {
        let wire = self.wire.load_full();
        self.installer.setup.store(Arc::new(Ways::of(setup, self.tunnels.clone(), wire)));
        self.current.store(setup.clone());
        self.kernel().set_generation(setup.generation);
        self.tunnels.publish(self.kernel(), &self.current);
        if !self.serving.swap(true, Relaxed) {
            let now_ns = now_ns();
            self.kernel().tick(now_ns, now_ns + self.outlive.as_nanos() as u64);
        }
    }

    /// Returns when no program follows an older setup any more, with their frames counted.
    pub(super) fn settle(&self) {
        let kernel = self.kernel();
        kernel.settle();
        let ways = self.installer.setup.load();
        for (flow, [frames, bytes]) in kernel.flows().forget_adopted() {
            if let (Some(from), Some(to)) = (ways.get(flow.from), ways.get(flow.to)) {
                from.stats().in_frames.add(frames);
                from.stats().in_bytes.add(bytes);
                to.stats().delivered(frames, bytes);
            }
        }
        kernel.flows().count();
    }

    /// The renewer's loop.
    fn renewer(&self) -> impl FnOnce() + Send + use<> {
        let (stopping, serving, current) =
            (self.stopping.clone(), self.serving.clone(), self.current.clone());
        let (tunnels, wire) = (self.tunnels.clone(), self.wire.clone());
        let (kernel, started, outlive) = (self.kernel().clone(), self.started, self.outlive);
        let (round, inheritance) = (self.round.clone(), self.inheritance.clone());
        let installer = self.installer.clone();
        let to: Arc<dyn Install> = Arc::new(Renewing(installer.clone()));
        let mut router = Router::new(current.load().table.clone(), self.learned.clone());
        move || {
            let (mut generation, mut rounds) = (None, 0_u64);
            let mut inherits = true;
            let (mut translator, mut wait) = (Translator::default(), Duration::MAX);
            let mut due = Instant::now() + RENEW;
            while !stopping.load(Relaxed) {
                std::thread::park_timeout(due.saturating_duration_since(Instant::now()).min(wait));
                let _round = round.lock();
                let (now_ns, now_ms) = (now_ns(), started.elapsed().as_millis() as u64);
                let end_ns = now_ns + outlive.as_nanos() as u64;
                if !serving.load(Relaxed) {
                    // Flows of a vnetd that has died end if this one dies, too.
                    kernel.postpone(end_ns);
                    due = Instant::now() + RENEW;
                    continue;
                }
                let setup = current.load_full();
                if generation.replace(setup.generation) != Some(setup.generation) {
                    router.adopt(setup.table.clone());
                    router.offer_to(Verdicts { to: to.clone(), generation: setup.generation });
                }
                for flow in installer.sealed.fresh() {
                    router.renew(&flow, now_ms);
                }
                if let Some(wire) = &*wire.load() {
                    wait = translator.tick(wire, &kernel, (now_ms, now_ns), Instant::now() >= due);
                }
                if Instant::now() < due {
                    continue;
                }
                due = Instant::now() + RENEW;
                for flow in in_use(&kernel, now_ns) {
                    router.renew(&flow, now_ms);
                    if let Some(Port::Link(port)) = setup.port(flow.from) {
                        port.link.vtep_heard(now_ms);
                    }
                }
                installer.setup.load().end_downed(&kernel);
                kernel.tick(now_ns, end_ns);
                rounds += 1;
                if rounds.is_multiple_of(ROUNDS_PER_TRIAL) {
                    tunnels.publish(&kernel, &current);
                    // By their new route.
                    for flow in rerouted(&tunnels, wire.load().as_ref(), &kernel, now_ms) {
                        router.renew(&flow, now_ms);
                    }
                }
                if inherits && started.elapsed() > outlive {
                    inherits = false;
                    remove_unclaimed(&kernel);
                }
            }
            let is_owner = inheritance.is_none_or(|inheritance| inheritance.is_settled());
            if serving.load(Relaxed) && is_owner {
                remove_unclaimed(&kernel);
            } else {
                // This vnetd has failed to start or to take over. Devices and flows wait for one that does.
                kernel.leave();
            }
        }
    }
}

/// Flows in use whose verdicts end soon and have not changed: a frame of one that has changed comes up by itself, and until then nothing
/// shows that its source is still there.
fn in_use(kernel: &Kernel, now_ns: u64) -> HashSet<Flow> {
    let used = kernel.flows().sweep(now_ns, RENEW_AHEAD_NS).into_iter();
    stations(used.filter(|(_, terms)| kernel.is_current(terms)).map(|(flow, _)| flow))
}

/// Tries the wire, looks up the routes to all hosts, and returns the flows whose route has changed.
fn rerouted(tunnels: &Tunnels, wire: Option<&Arc<WirePath>>, kernel: &Kernel, now_ms: u64) -> HashSet<Flow> {
    if let Some(wire) = wire {
        wire.tick(kernel, now_ms);
    }
    stations(tunnels.tick(kernel, now_ms))
}

/// The flows by their stations: the datagrams of two stations have one verdict.
fn stations(flows: impl IntoIterator<Item = Known>) -> HashSet<Flow> {
    let flow = |Known { network, from, dst, src, .. }| Flow { network, src, dst, from };
    flows.into_iter().map(flow).collect()
}

/// Removes devices of a vnetd that has died and that this vnetd has not adopted.
fn remove_unclaimed(kernel: &Kernel) {
    kernel.forget_unclaimed().into_iter().for_each(veth::remove_unclaimed);
    // Without pins, no map contains the wire's device.
    wire::remove_dead();
    headroom::remove_dead();
}

impl Drop for KernelPath {
    fn drop(&mut self) {
        self.stopping.store(true, Relaxed);
        if let Some(thread) = self.renewer.take() {
            thread.thread().unpark();
            if thread.join().is_err() {
                tracing::error!("the renewer of kernel flows panicked");
            }
        }
    }
}

#[cfg(test)]
#[path = "kernel_path_tests.rs"]
mod tests;
