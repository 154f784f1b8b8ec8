//! Links whose known flows the kernel sends by itself, joined to dispatchers: which links, their routes, and programs at devices of the
//! underlay.
//!
//! Native links take the wire (`wire_path`), sealed ones only with what applications have sealed (`sealed_sessions`). A VXLAN link with one VTEP needs no device and no agreement with the other host: programs
//! make its datagrams as vnetd would, from source ports that the link's own sockets hold, and take those that arrive at the VXLAN
//! port. What programs cannot send in one datagram comes up to vnetd, so a VTEP never gets IP fragments. What they leave at the
//! underlay's device arrives at vnetd's socket.

use std::collections::{HashMap, HashSet};
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

use arc_swap::ArcSwap;
use parking_lot::Mutex;

use super::setup::Setup;
use crate::interface::underlay::{self, Way};
use crate::interface::wire::OVERHEAD;
use crate::kernel::{
    AtUnderlay, Destination, End, Kernel, Known, Peer, Sources, Target, Translates, Underlay,
};
use crate::link::{Link, Tunnel};
use crate::wire::vxlan::WIRE_PORT;

/// Target number of route queries per tick: with more links, ticks pass between two queries.
const ROUTES_PER_TICK: usize = 64;
/// Ticks, of a second each, after which routes are known: the wire to other hosts is ready by then.
const START_TICKS: usize = 5;
/// Time from a failure to attach a program to a device of the underlay to the next attempt.
const ATTACH_AGAIN_MS: u64 = 60_000;

/// A route over which programs send datagrams that they make themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Road {
    underlay: Underlay,
    /// Longest IP packet in bytes, to a VTEP; 0: by the wire, whose flows follow the path with their next verdict.
    mtu: u16,
}

/// The links of a core that the kernel reaches by itself.
pub(super) struct Tunnels {
    /// Where datagrams of VXLAN links arrive.
    vxlan_listen: Option<SocketAddr>,
    /// True once the wire is open.
    has_wire: AtomicBool,
    links: ArcSwap<HashMap<End, Arc<Link>>>,
    roads: ArcSwap<HashMap<End, Road>>,
    /// Devices of the underlay, by index.
    programs: Mutex<HashMap<u32, UnderlayDevice>>,
    ticks: AtomicUsize,
    /// True once routes are known: those of an earlier vnetd count until then.
    knows_routes: AtomicBool,
    publishing: Mutex<()>,
}

/// A device of the underlay.
struct UnderlayDevice {
    program: Option<AtUnderlay>,
    /// Without a program: the time of the next attempt.
    again_ms: u64,
}

impl Tunnels {
    /// The tunnels of a host where datagrams of VXLAN links arrive at `vxlan_listen`.
    pub(super) fn new(vxlan_listen: Option<SocketAddr>) -> Tunnels {
        Tunnels {
            vxlan_listen,
            has_wire: AtomicBool::new(false),
            links: ArcSwap::default(),
            roads: ArcSwap::default(),
            programs: Mutex::default(),
            ticks: AtomicUsize::new(0),
            knows_routes: AtomicBool::new(false),
            publishing: Mutex::default(),
        }
    }

    /// Includes links that take the wire.
    pub(super) fn add_wire(&self) {
        self.has_wire.store(true, Relaxed);
    }

    /// Links that take the wire, by the other host's address.
    pub(super) fn wire_links(&self) -> Vec<(Ipv4Addr, Arc<Link>)> {
        let links = self.links.load();
        let links = links.iter().filter(|(end, _)| end.port == WIRE_PORT);
        links.map(|(end, link)| (end.remote, link.clone())).collect()
    }

    /// The two ends of the datagrams of `link` that arrive.
    ///
    /// # Errors
    /// The reason why the kernel does not reach its other host.
    fn end(&self, link: &Link) -> Result<End, &'static str> {
        match link.tunnel()? {
            Tunnel::Wire(remote) | Tunnel::Sealed(remote) => Ok(End { remote, port: WIRE_PORT }),
            Tunnel::Vtep(vtep) => {
                let listen = self.vxlan_listen.ok_or("vxlan_listen is not set")?;
                Ok(End { remote: *vtep.ip(), port: listen.port() })
            }
        }
    }

    /// The route of datagrams that programs make for `link`.
    pub(super) fn underlay(&self, link: &Link) -> Option<Underlay> {
        Some(self.road(link)?.underlay)
    }

    fn road(&self, link: &Link) -> Option<Road> {
        self.roads.load().get(&self.end(link).ok()?).copied()
    }

    /// How the kernel sends frames of a guest with MTU `mtu` to the VTEP of `link`; `None` while it cannot, and for a guest whose TCP
    /// segments programs cannot make small enough: its frames would alternate between the kernel and vnetd.
    pub(super) fn to_vtep(&self, link: &Link, mtu: usize) -> Option<Destination> {
        let Ok(Tunnel::Vtep(remote)) = link.tunnel() else { return None };
        let (road, (first, count)) = (self.road(link)?, link.vtep_sources()?);
        if mtu > usize::from(road.mtu) {
            return None;
        }
        let packet_max = usize::from(road.mtu).saturating_sub(OVERHEAD);
        let target = Target::Host {
            remote,
            packet_max: packet_max as u32,
            underlay: Some(road.underlay),
            sources: Sources::Owned(first, count),
            translates: Translates::Nothing,
        };
        Some(Destination {
            port: link.port(),
            device: 0,
            mtu: packet_max,
            stats: link.stats().clone(),
            target,
        })
    }

    /// Checks that no other link has the datagrams of `link`.
    ///
    /// # Errors
    /// The reason why the kernel does not reach its other host.
    pub(super) fn is_sole(&self, link: &Arc<Link>) -> Result<(), &'static str> {
        let is_it = self.links.load().get(&self.end(link)?).is_some_and(|at| Arc::ptr_eq(at, link));
        if is_it { Ok(()) } else { Err("another link leads to the same address") }
    }

    /// Checks that programs send and take the datagrams of `link`, which leads to a VTEP.
    ///
    /// # Errors
    /// The reason why they do not.
    pub(super) fn is_ready(&self, link: &Arc<Link>) -> Result<(), &'static str> {
        self.is_sole(link)?;
        if link.vtep_sources().is_none() {
            Err("its source ports are not open")
        } else if self.road(link).is_none() {
            Err("no device that takes programs leads to its remote")
        } else {
            Ok(())
        }
    }

    /// Takes the links of the current setup, and no others. Call it also while a setup lasts: the other host of a sealed link may roam.
    pub(super) fn publish(&self, kernel: &Kernel, current: &ArcSwap<Setup>) {
        // Control and the renewer call this: who comes last has the newest setup.
        let _one_at_a_time = self.publishing.lock();
        let setup = current.load();
        let links = self.links_of(&setup);
        let is_same =
            |end: &End| links.get(end).map(Arc::as_ptr) == self.links.load().get(end).map(Arc::as_ptr);
        if links.len() != self.links.load().len() || !links.keys().all(is_same) {
            self.links.store(Arc::new(links));
            self.set_peers(kernel);
        }
    }

    /// The links that the kernel reaches, by the ends of their datagrams.
    fn links_of(&self, setup: &Setup) -> HashMap<End, Arc<Link>> {
        let (mut links, mut twice) = (HashMap::new(), HashSet::new());
        for link in setup.peers.links() {
            if let Ok(end) = self.end(link)
                && (end.port != WIRE_PORT || self.has_wire.load(Relaxed))
                && links.insert(end, link.clone()).is_some()
            {
                twice.insert(end);
            }
        }
        links.retain(|end, _| !twice.contains(end));
        links
    }

    fn set_peers(&self, kernel: &Kernel) {
        // Control publishes setups while the renewer looks for routes.
        let _one_at_a_time = self.programs.lock();
        let (links, roads) = (self.links.load(), self.roads.load());
        let peer = |(end, link): (&End, &Arc<Link>)| {
            (*end, Peer { port: link.port(), underlay: roads.get(end).map(|road| road.underlay) })
        };
        let keeps = !self.knows_routes.load(Relaxed) && !underlay::has_ipsec_policies();
        if let Err(error) = kernel.set_peers(&links.iter().map(peer).collect(), keeps) {
            tracing::warn!("the kernel does not take the datagrams of some links: {error}");
        }
    }

    /// Looks up the routes to all hosts, attaches programs to their devices, and ends flows whose route, or path MTU to a VTEP, has changed.
    /// Lists those whose verdicts had not ended: until they are decided anew, dispatchers forward them.
    pub(super) fn tick(&self, kernel: &Kernel, now_ms: u64) -> Vec<Known> {
        let links = self.links.load();
        let is_ready = |link: &Link| link.is_wire_ready(now_ms) || link.vtep_sources().is_some();
        let mut ready: Vec<_> = links.iter().filter(|(_, link)| is_ready(link)).collect();
        // Programs bypass IPsec policies: a host with any leaves all datagrams to its network stack.
        if !ready.is_empty() && underlay::has_ipsec_policies() {
            ready.clear();
        }
        // Each route costs two requests to the kernel.
        let tick = self.ticks.fetch_add(1, Relaxed);
        if !ready.is_empty() && !tick.is_multiple_of(1 + links.len() / ROUTES_PER_TICK) {
            return vec![];
        }
        let found = ready.into_iter().filter_map(|(end, link)| Some((*end, self.road_to(*end, link)?)));
        let mut found: HashMap<_, _> = found.collect();
        {
            let mut programs = self.programs.lock();
            programs.retain(|device, _| found.values().any(|road| road.underlay.device == *device));
            found.retain(|_, road| {
                let device = road.underlay.device;
                let at =
                    programs.entry(device).or_insert_with(|| UnderlayDevice::open(kernel, device, now_ms));
                if at.program.is_none() && now_ms >= at.again_ms {
                    *at = UnderlayDevice::open(kernel, device, now_ms);
                }
                at.program.is_some()
            });
        }
        let before = self.roads.swap(Arc::new(found.clone()));
        let knows_now = tick >= START_TICKS && !self.knows_routes.swap(true, Relaxed);
        if *before == found && !knows_now {
            return vec![];
        }
        self.set_peers(kernel);
        let changed = links.iter().filter(|(end, _)| before.get(end) != found.get(end));
        let to: Vec<_> = changed.map(|(_, link)| link.stats()).collect();
        kernel.flows().end(&to)
    }

    /// The route to the other host of `link`. `None` also if datagrams of VXLAN links leave from another address than the route's.
    fn road_to(&self, end: End, link: &Link) -> Option<Road> {
        let Way { device, local, next_hop } = underlay::way_to(end.remote)?;
        let underlay = Underlay { device, local, next_hop };
        if end.port == WIRE_PORT {
            return Some(Road { underlay, mtu: 0 });
        }
        let listen = self.vxlan_listen?.ip().to_canonical();
        (listen.is_unspecified() || listen == local).then(|| Road { underlay, mtu: link.path_mtu() })
    }
}

impl UnderlayDevice {
    /// Has a program take datagrams at a device.
    fn open(kernel: &Kernel, device: u32, now_ms: u64) -> UnderlayDevice {
        let again_ms = now_ms + ATTACH_AGAIN_MS;
        // A device without a name is gone.
        let Some(name) = underlay::name_of(device) else { return UnderlayDevice { program: None, again_ms } };
        match kernel.attach_underlay(&(name, device)) {
            Ok(Some(program)) => UnderlayDevice { program: Some(program), again_ms },
            Ok(None) => UnderlayDevice { program: None, again_ms: u64::MAX },
            Err(error) => {
                tracing::info!("all datagrams of links pass the host's network stack: {error}");
                UnderlayDevice { program: None, again_ms }
            }
        }
    }
}
