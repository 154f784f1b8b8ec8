//! The engine: keeps the core in the state that is wanted.
//!
//! A change is a new desired state. Its difference to the current one is carried out all or nothing:
//!
//! 1. everything new is opened; if that fails, what was opened is closed and nothing has changed;
//! 2. one new setup is published, which the dispatchers adopt between two batches;
//! 3. what is gone is stopped, when no dispatcher uses it any more.
//!
//! What the plan does not name is not touched. How interfaces are opened is in `opening.rs`, single changes are in
//! `edits.rs`, what the engine shows of itself in `view.rs`.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::api::{self, Counters};
use super::capture::Capture;
use super::config::ConfigError;
use super::desired::*;
use super::events::{Asker, Indices, Witness};
use super::opening::leaving;
use super::overlay::Computed;
use super::plan::{self, Plan};
use super::table::Problem;
use super::{check, tunnel};
use vnet::dispatch::core::{Core, CoreError, CoreOptions};
use vnet::dispatch::mode::Drive;
use vnet::dispatch::setup::{InterfacePort, LinkPort, Parts};
use vnet::dispatch::stream::StreamPort;
use vnet::frame::{NetworkId, PortId};
use vnet::interface::{Interface, State};
use vnet::link::inquiry::Inbox;
use vnet::link::path::prober::Prober;
use vnet::link::sealed::identity::IdentityStore;
use vnet::link::sealed::keeper::{Keeper, KeeperOptions};
use vnet::link::{Direct, Link, LinkOptions, Security};
use vnet::route::{self, Member, Networks, PortKind, Rule, Source};
use vnet::stats::PortStats;
use vnet::wire::ethernet::Mac;

/// Why a change was refused. Nothing has changed then, unless the message says so.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The core could not be started.
    #[error(transparent)]
    Core(#[from] CoreError),
    /// The desired state contradicts itself, one line for each mistake.
    #[error(transparent)]
    Invalid(#[from] ConfigError),
    /// The desired state differs in what is fixed while vnetd runs.
    #[error(transparent)]
    Restart(ConfigError),
    /// Something new could not be opened.
    #[error("{0}")]
    Open(Problem),
    /// What should be removed is not there.
    #[error("there is no {0}; see what there is with 'list'")]
    NotFound(String),
    /// A name that an interface and a link have.
    #[error("there are both {0} and {1}; write the whole of one")]
    Ambiguous(Target, Target),
    /// As many captures as there may be.
    #[error(
        "{} captures are under way, and more there cannot be; end one first",
        vnet::capture::SESSIONS_MAX
    )]
    CapturesMax,
    /// Nobody knows where a traced frame would come from.
    #[error("it is not known where {0} is; say where the frame comes from: --from 'interface NAME'")]
    UnknownSource(Mac),
    /// What should be removed is there because of the overlay.
    #[error("{0} is there because its host is in the overlay's store; it goes when that host does")]
    Computed(Target),
    /// What should be removed is named by rules.
    #[error("{target} is named by route {routes}; delete that first")]
    InUse {
        /// What should be removed.
        target: Target,
        /// The rules' indices.
        routes: String,
    },
}

/// An interface that is open.
pub(super) struct LiveInterface {
    pub port: PortId,
    pub mtu: u32,
    pub stats: Arc<PortStats>,
    pub drive: Drive,
    pub interface: Arc<dyn Interface>,
    /// Its own underlay port.
    pub direct: Option<Arc<Direct>>,
}

impl LiveInterface {
    pub fn state(&self) -> State {
        self.interface.state()
    }
}

/// A link in the core.
pub(super) struct LiveLink {
    pub port: PortId,
    pub stats: Arc<PortStats>,
    pub link: Arc<Link>,
    stream: Option<Arc<StreamPort>>,
}

impl LiveLink {
    fn new(spec: &LinkSpec, port: PortId, inbox: &Arc<Inbox>) -> LiveLink {
        let stats = Arc::new(PortStats::default());
        let LinkSpec { name, remote, ports, encapsulation, networks, mtu, tunnel, security } = spec.clone();
        let options = LinkOptions { name, remote, ports, encapsulation, networks, mtu, tunnel };
        let security = Security { peer: security.peer, macs: security.macs, via: security.via };
        let link = Link::with_security(options, security, port, stats.clone());
        link.answer_by(inbox.clone());
        LiveLink { port, stats, stream: StreamPort::of(&link), link }
    }
}

/// A running core and what it was told.
pub struct Engine {
    pub(super) core: Core,
    pub(super) started: Instant,
    /// What the host is: what was asked for, and what the overlay adds.
    pub(super) current: Desired,
    /// What was asked for.
    pub(super) own: Desired,
    /// What the overlay adds.
    pub(super) joined: Computed,
    /// What its agent says about it.
    pub(super) shown: Option<api::Overlay>,
    pub(super) interfaces: BTreeMap<String, LiveInterface>,
    pub(super) links: BTreeMap<String, LiveLink>,
    pub(super) route_indices: HashMap<RouteSpec, u32>,
    /// Counters of all ports that are gone, so that the balance still adds up.
    pub(super) retired: Counters,
    pub(super) captures: Vec<Capture>,
    pub(super) inbox: Arc<Inbox>,
    /// Sees to sealed links; there when this host has an identity.
    keeper: Option<Keeper>,
    prober: Prober,
    pub(super) next_route: u32,
    pub(super) indices: Indices,
    pub(super) witness: Witness,
}

impl Engine {
    /// Starts a core and brings it into the desired state.
    pub fn start(desired: Desired) -> Result<Engine, EngineError> {
        let DispatchSpec { threads, cpus, yield_strategy, sleep_us, nowork_us, burst, isolation } =
            desired.dispatch.spec.clone();
        let BridgeSpec { listen, ports, vxlan_listen, stream_listen, zero_copy, .. } = desired.bridge.spec;
        let core = Core::start(&CoreOptions {
            threads,
            cpus,
            yield_strategy,
            sleep_us,
            nowork_us,
            burst,
            listen,
            ports,
            vxlan_listen,
            stream_listen,
            zero_copy,
            isolation,
        })?;
        let keeper = keeper(&desired, &core)?;
        let prober = Prober::start(core.started(), core.courier().clone()).map_err(CoreError::from)?;
        let (networks, interfaces, links, routes) = (vec![], vec![], vec![], vec![]);
        let nothing = Desired { networks, interfaces, links, routes, ..desired.clone() };
        let mut engine = Engine {
            core,
            started: Instant::now(),
            current: nothing.clone(),
            own: nothing,
            joined: Computed::default(),
            shown: None,
            interfaces: BTreeMap::new(),
            links: BTreeMap::new(),
            route_indices: HashMap::new(),
            retired: Counters::from(&PortStats::default()),
            captures: vec![],
            inbox: Arc::new(Inbox::new().map_err(CoreError::from)?),
            keeper,
            prober,
            next_route: 1,
            indices: Indices::default(),
            witness: Witness::default(),
        };
        match engine.on_behalf(Asker::Part("the configuration file"), |engine| engine.apply(desired)) {
            Ok(_) => Ok(engine),
            Err(error) => {
                engine.stop();
                Err(error)
            }
        }
    }

    /// Has the identity's files looked at now, and not only within a second.
    pub fn refresh_identity(&self) {
        if let Some(keeper) = &self.keeper {
            keeper.refresh();
        }
    }

    /// Who this host is, where it has an identity.
    pub fn identity(&self) -> Option<Arc<IdentityStore>> {
        self.keeper.as_ref().map(|keeper| keeper.identity().clone())
    }

    /// Stops everything: the guests see their links go down, sockets and devices are removed.
    pub fn stop(self) {
        self.core.publish(Parts::default());
        self.links.values().for_each(|live| live.link.stop());
        self.interfaces.values().for_each(|live| live.interface.stop());
    }

    /// What the host is.
    pub fn current(&self) -> &Desired {
        &self.current
    }

    /// The numbers of links and interfaces.
    pub fn indices(&self) -> &Indices {
        &self.indices
    }

    /// Every rule with its index, in no order.
    pub(super) fn route_indices(&self) -> impl Iterator<Item = (u32, &RouteSpec)> {
        self.route_indices.iter().map(|(spec, index)| (*index, spec))
    }

    /// What [`Engine::apply`] would do.
    pub fn plan(&self, desired: &Desired) -> Result<Plan, EngineError> {
        self.difference(&self.merged(desired))
    }

    fn difference(&self, desired: &Desired) -> Result<Plan, EngineError> {
        let problems = plan::restart_needed(&self.current, desired);
        if !problems.is_empty() {
            return Err(EngineError::Restart(ConfigError(problems)));
        }
        let plan = Plan::between(&self.current, desired);
        let new_links = plan.links.added.iter().chain(plan.links.changed.iter().map(|(_, wanted)| wanted));
        for Item { place, spec } in new_links {
            if self.leads_here(spec) {
                return Err(EngineError::Open(Problem::new(place, check::to_oneself(spec))));
            }
        }
        Ok(plan)
    }

    /// True when a link's remote is an address of this very host, at one of the bridge's ports.
    pub(super) fn leads_here(&self, link: &LinkSpec) -> bool {
        let bridge = self.core.bridge_address();
        let ports = self.current.bridge.spec.ports;
        if !tunnel::arrives_at_bridge(link)
            || !link.has_port_of(bridge.port(), ports)
            || !bridge.ip().is_unspecified()
        {
            return false;
        }
        // The way to an address of one's own starts at that address. Nothing is sent.
        let any: IpAddr = match link.remote {
            SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        let start = UdpSocket::bind((any, 0)).and_then(|socket| {
            socket.connect(link.remote)?;
            socket.local_addr()
        });
        link.remote.ip().is_loopback() || start.is_ok_and(|start| start.ip() == link.remote.ip())
    }

    /// Makes the host be as desired, and says what that took. On an error nothing has changed.
    pub fn apply(&mut self, desired: Desired) -> Result<Plan, EngineError> {
        let plan = self.carry_out(self.merged(&desired))?;
        self.own = desired;
        Ok(plan)
    }

    /// Makes the host be exactly `desired`.
    pub(super) fn carry_out(&mut self, desired: Desired) -> Result<Plan, EngineError> {
        let plan = self.difference(&desired)?;
        if plan.is_empty() {
            // Lines may have moved, though.
            self.current = desired;
            return Ok(plan);
        }
        let mut opened = self.open_new(&plan)?;
        // Nothing fails from here on.
        let gone: Vec<_> =
            leaving(&plan).filter_map(|item| self.interfaces.remove(&item.spec.name)).collect();
        self.interfaces.extend(std::mem::take(&mut opened.0));
        let gone_links = self.change_links(&plan.links);
        self.change_routes(&plan.routes);
        self.indices.follow(&plan);
        self.change_driving(&plan.interfaces);
        self.current = desired;
        self.publish();
        let links: Vec<_> = self.links.values().map(|live| live.link.clone()).collect();
        self.keeper.iter().for_each(|keeper| keeper.set_links(&links));
        self.prober.set_links(&links);
        for live in gone {
            live.interface.stop();
            self.retire(&live.stats);
        }
        for live in gone_links {
            live.link.stop();
            self.retire(&live.stats);
        }
        self.open_drivers();
        self.tell_addresses();
        self.witness.tell(&plan);
        Ok(plan)
    }

    /// Tells every interface the addresses that are configured in its network.
    fn tell_addresses(&self) {
        let here = |network| {
            let specs = self.current.interfaces.iter().map(|item| &item.spec);
            specs.filter(move |spec| spec.network == network).filter_map(|spec| spec.mac)
        };
        for Item { spec, .. } in &self.current.interfaces {
            if let Some(live) = self.interfaces.get(&spec.name) {
                live.interface.expect(&here(spec.network).collect::<Vec<_>>());
            }
        }
    }

    pub(super) fn retire(&mut self, stats: &PortStats) {
        self.retired.add(&Counters::from(stats));
    }

    /// The lowest port that neither a live object nor one of `taken` has. What a plan removes is live until it is carried
    /// out, so that no port changes hands within one publication.
    pub(super) fn free_port(&self, taken: impl Iterator<Item = PortId>) -> PortId {
        let interfaces = self.interfaces.values().map(|live| live.port);
        let links = self.links.values().map(|live| live.port);
        let used: HashSet<_> = interfaces.chain(links).chain(taken).collect();
        let free = (0..PortId::NONE.0).map(PortId).find(|port| !used.contains(port));
        free.expect("the limits of interfaces and links together are far below the number of ports")
    }

    /// Puts new links in the place of old ones, and returns the latter.
    fn change_links(&mut self, diff: &plan::Diff<LinkSpec>) -> Vec<LiveLink> {
        let changed = diff.changed.iter();
        let new: Vec<_> = diff.added.iter().chain(changed.clone().map(|(_, wanted)| wanted)).collect();
        // Made before the old ones go, so that they get other ports.
        let mut made: Vec<(String, LiveLink)> = vec![];
        for Item { spec, .. } in new {
            let port = self.free_port(made.iter().map(|(_, live)| live.port));
            let live = LiveLink::new(spec, port, &self.inbox);
            if let Some(keeper) = &self.keeper {
                live.link.set_identity(keeper.identity().clone());
            }
            made.push((spec.name.clone(), live));
        }
        let old = diff.removed.iter().chain(changed.map(|(is, _)| is));
        let gone = old.filter_map(|item| self.links.remove(&item.spec.name)).collect();
        self.links.extend(made);
        gone
    }

    /// Has streams on VXLAN links go by the kernel's driver, where it can be had, beside what else is to be done.
    fn open_drivers(&self) {
        let Some(listen) = self.current.bridge.spec.vxlan_listen else { return };
        let declared = self.current.networks.iter().map(|item| item.spec.id);
        let networks: Vec<_> = std::iter::once(NetworkId::default()).chain(declared).collect();
        let links = self.links.values().map(|live| live.link.clone());
        let links: Vec<_> = links.filter(|link| link.has_drivers().is_some()).collect();
        if links.is_empty() {
            return;
        }
        let open = move || links.iter().for_each(|link| link.open_drivers(listen.ip(), &networks));
        if let Err(error) = std::thread::Builder::new().name("vxlan-drivers".into()).spawn(open) {
            tracing::warn!(%error, "cannot start a thread: streams on VXLAN links are cut by vnetd");
        }
    }

    /// Has open interfaces driven, and their guests notified, as is wanted now. Dispatchers hear of it with the next setup.
    fn change_driving(&mut self, diff: &plan::Diff<InterfaceSpec>) {
        for (is, Item { spec, .. }) in &diff.changed {
            if let Some(live) = self.interfaces.get_mut(&spec.name)
                && is.spec.driving != spec.driving
            {
                live.drive.settings = spec.driving.mode;
                live.interface.set_interrupts(spec.driving.interrupts);
            }
        }
    }

    fn change_routes(&mut self, diff: &plan::Diff<RouteSpec>) {
        for Item { spec, .. } in &diff.removed {
            self.route_indices.remove(spec);
        }
        for Item { spec, .. } in &diff.added {
            self.route_indices.insert(spec.clone(), self.next_route);
            self.next_route += 1;
        }
    }

    /// What the core is to do: `desired`, as far as it is open.
    pub(super) fn setup(&self, desired: &Desired) -> Parts {
        let port = |target: &Target| match target {
            Target::Interface(name) => self.interfaces.get(name).map(|live| live.port),
            Target::Link(name) => self.links.get(name).map(|live| live.port),
        };
        let rule = |Item { spec, .. }: &Item<RouteSpec>| {
            let from = match &spec.from {
                Origin::Any => Source::Any,
                Origin::AnyInterface => Source::AnyInterface,
                Origin::AnyLink => Source::AnyLink,
                Origin::One(target) => Source::Port(port(target)?),
            };
            let index = *self.route_indices.get(spec)?;
            let RouteSpec { network, src, dst, .. } = *spec;
            Some(Rule { index, network, src, dst, from, to: port(&spec.to)? })
        };
        let interface = |Item { spec, .. }: &Item<InterfaceSpec>| {
            let live = self.interfaces.get(&spec.name)?;
            let member = Member {
                port: live.port,
                kind: PortKind::Interface,
                networks: Networks::only([spec.network]),
                mac: spec.mac,
                storm_frames_per_s: Some(spec.storm_limit),
                port_security: spec.port_security,
            };
            let (name, stats, interface) = (spec.name.clone(), live.stats.clone(), live.interface.clone());
            Some(InterfacePort { member, name, stats, interface, drive: live.drive.clone() })
        };
        let link = |Item { spec, .. }: &Item<LinkSpec>| {
            let live = self.links.get(&spec.name)?;
            let networks = spec.networks.clone();
            let member = Member {
                port: live.port,
                kind: PortKind::Link,
                networks: networks.map_or(Networks::All, Networks::only),
                mac: None,
                storm_frames_per_s: None,
                port_security: false,
            };
            Some(LinkPort { member, link: live.link.clone(), stream: live.stream.clone() })
        };
        let direct = |Item { spec, .. }: &Item<InterfaceSpec>| {
            let Attachment::VhostUser { direct: Some(wanted), .. } = &spec.attachment else { return None };
            let live = self.interfaces.get(&spec.name)?;
            let (direct, link) = (live.direct.as_ref()?, self.links.get(&wanted.link)?);
            if let Err(error) = direct.aim(link.link.options().remote) {
                // Its frames are lost, then, which the state of the peer's link shows.
                tracing::warn!(%error, interface = spec.name, "no datagrams can come to its own port");
            }
            Some((live.port, direct.clone()))
        };
        Parts {
            directs: desired.interfaces.iter().filter_map(direct).collect(),
            networks: plan::networks(desired).into_iter().map(|item| network(&item.spec)).collect(),
            interfaces: desired.interfaces.iter().filter_map(interface).collect(),
            links: desired.links.iter().filter_map(link).collect(),
            rules: desired.routes.iter().filter_map(rule).collect(),
            observers: self.observers(),
            published: self.published(),
        }
    }

    /// Has the core do what the host is now.
    pub(super) fn publish(&self) {
        self.core.publish(self.setup(&self.current));
    }

    /// Where links' datagrams arrive.
    pub fn bridge_address(&self) -> SocketAddr {
        self.core.bridge_address()
    }
}

/// Starts what sees to sealed links, if this host has an identity to seal with.
fn keeper(desired: &Desired, core: &Core) -> Result<Option<Keeper>, EngineError> {
    let Some(Item { place, spec: files }) = &desired.identity else { return Ok(None) };
    let open = |text: String| EngineError::Open(Problem::new(place, text));
    let name = &desired.host.spec.name;
    let identity =
        Arc::new(IdentityStore::open(files.clone(), name).map_err(|error| open(error.to_string()))?);
    let options = KeeperOptions {
        listen: core.bridge_address(),
        identity,
        started: core.started(),
        rekey: Duration::from_secs(desired.bridge.spec.rekey_s.into()),
        courier: core.courier().clone(),
        meetings: desired.bridge.spec.meetings,
        meet_at: desired.bridge.spec.meet_at(core.bridge_address()),
        stats: core.bridge_stats().clone(),
    };
    Keeper::start(options).map(Some).map_err(|error| open(error.to_string()))
}

fn network(spec: &NetworkSpec) -> route::NetworkSpec {
    let NetworkSpec { id, learning, ageing_s, .. } = *spec;
    route::NetworkSpec { id, learning, ageing_s }
}

#[cfg(test)]
#[path = "engine_tests.rs"]
mod tests;
