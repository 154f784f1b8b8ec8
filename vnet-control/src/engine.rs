//! The engine: the running core and its state.
//!
//! `apply.rs` applies changes: it opens new objects and stops removed ones; `reopen.rs` retries interfaces that could not be
//! opened; `edits.rs` has single changes, `overlay_join.rs` the overlay's links and stations; queries are in `answers.rs`,
//! `trace.rs`, `capture.rs` and `watch.rs`. All of these use the engine; the engine uses none of them.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::api::{self, Counters};
use super::config::ConfigError;
use super::desired::*;
use super::direct::{Around, DirectPorts};
use super::events::{Asker, Sink, Witness};
use super::indices::Indices;
use super::kept::KeptTaps;
use super::observers::Captures;
use super::open_close::{LiveInterface, LiveLink, close_all};
use super::overlay::Computed;
use super::plan;
use super::table::Problem;
use super::take_over::{LastState, Positions};
use parking_lot::Mutex;
use vnet::dispatch::core::{Core, CoreError, CoreOptions};
use vnet::dispatch::observers::Observers;
use vnet::dispatch::setup::{Feeder, InterfacePort, LinkPort, Parts};
use vnet::dispatch::timeline::Timeline;
use vnet::frame::{NetworkId, PortId};
use vnet::inherit::{self, Inheritance};
use vnet::interface::change_events::Bell;
use vnet::interface::sideband::Sideband;
use vnet::kernel::{Outlive, PinOptions};
use vnet::link::inquiry::Inbox;
use vnet::link::rendezvous::relay::Relay;
use vnet::link::sealed::identity::IdentityStore;
use vnet::link::sealed::keeper::{GuestService, Keeper, KeeperError, KeeperOptions};
use vnet::route::{self, AddressGuard, Member, Networks, PortKind, Rule, RuleSource};
use vnet::stats::PortStats;
use vnet::wire::ethernet::Mac;

/// Error of a refused request or change. The state is unchanged, unless the message says otherwise.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The core cannot start.
    #[error(transparent)]
    Core(#[from] CoreError),
    /// The desired state is inconsistent, one line for each mistake.
    #[error(transparent)]
    Invalid(#[from] ConfigError),
    /// The desired state differs in settings that need a restart.
    #[error(transparent)]
    Restart(ConfigError),
    /// An interface or link cannot be opened.
    #[error("{0}")]
    Open(Problem),
    /// No object has that name.
    #[error("there is no {0}; see {cmd}", cmd = .1.command())]
    NotFound(String, Listed),
    /// An interface and a link both have that name.
    #[error("there are both {0} and {1}; write one of them in full")]
    Ambiguous(Target, Target),
    /// The limit of captures is reached.
    #[error("{} captures are under way, which is the limit; end one first", vnet::capture::SESSIONS_MAX)]
    CapturesMax,
    /// Receptions of one guest are recorded at a time.
    #[error("a timeline is being recorded already; wait until it ends")]
    TimelinesMax,
    /// The port of a traced frame's source is unknown.
    #[error("it is not known where {0} is; give the frame's origin: --from 'interface NAME'")]
    UnknownSource(Mac),
    /// No interface and no other host has this IP address.
    #[error(
        "which MAC address has {address} in network {network} is not known: no interface lists it in 'addresses', and no \
         other host publishes it; give the MAC address ('vnet addresses' lists those heard)"
    )]
    UnknownAddress {
        /// The IP address.
        address: IpAddr,
        /// The network.
        network: NetworkId,
    },
    /// The MAC address of an interface's guest is unknown.
    #[error(
        "the MAC address of the guest at interface {interface} is not clear: {why}; give the address instead"
    )]
    Guest {
        /// The interface.
        interface: String,
        /// Reason why the address is ambiguous or unknown.
        why: String,
    },
    /// A link that the overlay computed cannot be removed.
    #[error("{0} exists because its host is in the overlay's store; it goes when that host leaves")]
    Computed(Target),
    /// Routes use the interface or link to remove.
    #[error("{target} is named by route {routes}; delete that first")]
    InUse {
        /// The interface or link.
        target: Target,
        /// The routes' indices.
        routes: String,
    },
}

/// Lists in which names and numbers of objects are found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Listed {
    /// Interfaces.
    Interfaces,
    /// Links.
    Links,
    /// Interfaces and links.
    Ports,
    /// Routes.
    Routes,
    /// Networks.
    Networks,
}

impl Listed {
    /// The command that shows the list.
    pub fn command(self) -> &'static str {
        match self {
            Listed::Interfaces => "'vnet interface list'",
            Listed::Links => "'vnet link list'",
            Listed::Ports => "'vnet interface list' and 'vnet link list'",
            Listed::Routes => "'vnet route list'",
            Listed::Networks => "'vnet network list'",
        }
    }

    /// The console's line that shows the list, or the command if it has none.
    pub fn line(self) -> &'static str {
        match self {
            Listed::Interfaces => "INTERFACES?",
            Listed::Links => "LINKS?",
            Listed::Ports => "INTERFACES? and LINKS?",
            Listed::Routes => "ROUTES?",
            Listed::Networks => self.command(),
        }
    }
}

impl EngineError {
    /// No interface or link is `target`.
    pub(super) fn no(target: &Target) -> EngineError {
        let listed = match target {
            Target::Interface(_) => Listed::Interfaces,
            Target::Link(_) => Listed::Links,
        };
        EngineError::NotFound(target.to_string(), listed)
    }
}

/// The running core and its configuration.
pub struct Engine {
    pub(super) core: Core,
    pub(super) started: Instant,
    /// The state of the host: the configured state plus the overlay's.
    pub(super) current: Desired,
    /// The configured state.
    pub(super) own: Desired,
    /// The overlay's computed links and stations, merged into `current`.
    pub(super) joined: Computed,
    /// The latest report of the overlay's agent.
    pub(super) shown: Option<api::Overlay>,
    pub(super) interfaces: BTreeMap<String, LiveInterface>,
    pub(super) links: BTreeMap<String, LiveLink>,
    pub(super) route_indices: HashMap<RouteSpec, u32>,
    /// Sum of the counters of removed ports, so that the frame balance holds.
    pub(super) retired: Counters,
    pub(super) captures: Captures,
    /// The recording of receptions in progress.
    pub(super) timeline: Option<Arc<Timeline>>,
    /// Direct ports. Locked: setups make them, from the engine as it is.
    pub(super) direct: Mutex<DirectPorts>,
    pub(super) inbox: Arc<Inbox>,
    /// TAP devices that outlive this process. Locked: interfaces are opened by the engine as it is.
    pub(super) kept: Mutex<KeptTaps>,
    /// Keeper of sealed links; present if this host has an identity.
    pub(super) keeper: Option<Keeper>,
    /// The hosts that meet at this one, if it lets hosts meet.
    pub(super) relay: Option<Arc<Relay>>,
    pub(super) next_route: u32,
    pub(super) indices: Indices,
    pub(super) witness: Witness,
    /// Wakes the thread that calls [`Engine::tend`].
    pub(super) bell: Option<Bell>,
    /// Where a running vnetd has its objects, until this one goes on in its place.
    pub(super) positions: Positions,
    /// The last steps of a take-over.
    pub(super) eve: Option<Eve>,
    /// The last state, until interfaces and links go on with it.
    pub(super) last: Option<LastState>,
}

/// Called once, when all is open that a running vnetd hands over.
pub(super) struct Eve {
    /// Has the running vnetd stand still, and gets its last state.
    pub last: Step<LastState>,
    /// Tells it that this one begins.
    pub begins: Step<()>,
}

/// How established flows outlive vnetd.
fn outlive(desired: &Desired) -> Outlive {
    let DispatchSpec { outlive_s, bpffs, .. } = &desired.dispatch.spec;
    let pins = PinOptions { bpffs: bpffs.clone(), host: desired.host.spec.name.clone() };
    Outlive { time: Duration::from_secs((*outlive_s).into()), pins: Some(pins) }
}

/// A step of a take-over.
pub(super) type Step<T> = Box<dyn FnOnce() -> Result<T, EngineError> + Send>;

impl Engine {
    /// Starts a core without interfaces, links and routes, with what a running vnetd hands over.
    pub(super) fn idle(
        desired: &Desired,
        inheritance: Option<Arc<Inheritance>>,
    ) -> Result<Engine, EngineError> {
        let DispatchSpec {
            threads,
            recruiting,
            cpus,
            yield_strategy,
            sleep_us,
            nowork_us,
            burst,
            isolation,
            kernel_path,
            translate,
            ..
        } = desired.dispatch.spec.clone();
        let BridgeSpec { listen, ports, vxlan_listen, stream_listen, zero_copy, .. } = desired.bridge.spec;
        let kept = KeptTaps::load(&desired.control.spec.socket, inheritance.clone());
        let core = Core::start(&CoreOptions {
            threads,
            recruiting,
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
            kernel_path: kernel_path == KernelPath::Auto,
            translates: translate == KernelPath::Auto,
            outlive: outlive(desired),
            inheritance,
        })
        .map_err(|error| core_error(desired, error))?;
        let (keeper, relay) = keeper(desired, &core)?.unzip();
        let (networks, interfaces, links, routes) = (vec![], vec![], vec![], vec![]);
        let nothing = Desired { networks, interfaces, links, routes, ..desired.clone() };
        Ok(Engine {
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
            captures: Captures::default(),
            timeline: None,
            direct: Mutex::default(),
            kept: Mutex::new(kept),
            inbox: Arc::new(Inbox::new().map_err(CoreError::from)?),
            keeper,
            relay: relay.flatten(),
            next_route: 1,
            indices: Indices::default(),
            witness: Witness::default(),
            bell: None,
            positions: Positions::default(),
            eve: None,
            last: None,
        })
    }

    /// Runs `task` on behalf of `asker`: changes that the task makes are logged and reported with that name.
    pub fn on_behalf<T>(&mut self, asker: Asker, task: impl FnOnce(&mut Engine) -> T) -> T {
        let before = std::mem::replace(&mut self.witness.asker, asker);
        let done = task(self);
        self.witness.asker = before;
        done
    }

    /// Reports configuration changes to `sink`.
    pub fn tell(&mut self, sink: Sink) {
        self.witness.sink = Some(sink);
    }

    /// Reloads the identity's files now; otherwise they are checked every second.
    pub fn refresh_identity(&self) {
        if let Some(keeper) = &self.keeper {
            keeper.refresh();
        }
    }

    /// This host's identity, if it has one.
    pub fn identity(&self) -> Option<Arc<IdentityStore>> {
        self.keeper.as_ref().map(|keeper| keeper.identity().clone())
    }

    /// Stops everything: guests see link down, sockets and containers' pairs are removed. TAP devices stay for the next vnetd.
    pub fn stop(self) {
        self.core.bridge_stats().last_stranger.silence();
        self.direct.lock().withdraw(self.around());
        self.core.publish(Parts::default());
        self.links.values().for_each(|live| live.link.stop());
        self.remove_containers_taps();
        close_all(self.interfaces.into_values().collect());
    }

    /// The state of the host.
    pub fn current(&self) -> &Desired {
        &self.current
    }

    /// The sidebands of virtual machines' interfaces, by the interfaces' names.
    pub fn sidebands(&self) -> Vec<(String, Arc<Sideband>)> {
        let of = |(name, live): (&String, &LiveInterface)| Some((name.clone(), live.sideband.clone()?));
        self.interfaces.iter().filter_map(of).collect()
    }

    /// Indices of links and interfaces.
    pub fn indices(&self) -> &Indices {
        &self.indices
    }

    /// Every route with its index, unordered.
    pub(super) fn route_indices(&self) -> impl Iterator<Item = (u32, &RouteSpec)> {
        self.route_indices.iter().map(|(spec, index)| (*index, spec))
    }

    pub(super) fn retire(&mut self, stats: &PortStats) {
        self.retired.add(&Counters::from(stats));
    }

    /// Unused port numbers: neither live nor in `taken`, lowest first. Objects that a plan removes stay live until the plan is
    /// applied, so no port is reused within one publication.
    pub(super) fn free_ports(&self, taken: &[PortId]) -> impl Iterator<Item = PortId> + use<> {
        let interfaces = self.interfaces.values().map(|live| live.port);
        let links = self.links.values().map(|live| live.port);
        let used: HashSet<_> = interfaces.chain(links).chain(taken.iter().copied()).collect();
        (0..PortId::NONE.0).map(PortId).filter(move |port| !used.contains(port))
    }

    /// A port for each of `targets`, which exist in neither `taken` nor the engine: those that a running vnetd has given them, else free ones.
    pub(super) fn ports_for<'a>(
        &self,
        targets: impl Iterator<Item = Target> + 'a,
        taken: &[PortId],
    ) -> Vec<PortId> {
        let Positions { interfaces, links, .. } = &self.positions;
        let reserved: HashSet<_> = interfaces.values().chain(links.values()).copied().collect();
        let mut free = self.free_ports(taken).filter(|port| !reserved.contains(port));
        let port = |target: Target| {
            let before = match &target {
                Target::Interface(name) => interfaces.get(name),
                Target::Link(name) => links.get(name),
            };
            before.copied().or_else(|| free.next())
        };
        targets.map_while(port).collect()
    }

    /// The core's setup for `desired`, limited to objects that have a port.
    pub(super) fn setup(&self, desired: &Desired) -> Parts {
        let port = |target: &Target| match target {
            Target::Interface(name) => self.interfaces.get(name).map(|live| live.port),
            Target::Link(name) => self.links.get(name).map(|live| live.port),
        };
        let rule = |Item { spec, .. }: &Item<RouteSpec>| {
            let from = match &spec.from {
                RouteSource::Any => RuleSource::Any,
                RouteSource::AnyInterface => RuleSource::AnyInterface,
                RouteSource::AnyLink => RuleSource::AnyLink,
                RouteSource::One(target) => RuleSource::Port(port(target)?),
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
                counts_hops: true,
                port_security: spec.port_security,
            };
            let (name, stats, interface) = (spec.name.clone(), live.stats.clone(), live.interface.clone());
            let guard = spec.address_security.then(|| Arc::new(AddressGuard::new(&spec.addresses, spec.mac)));
            Some(InterfacePort { member, name, stats, interface, drive: live.drive.clone(), guard })
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
                counts_hops: spec.kind.counts_hops(),
                port_security: false,
            };
            Some(LinkPort { member, link: live.link.clone() })
        };
        let direct = |Item { spec, .. }: &Item<InterfaceSpec>| {
            let Attachment::VhostUser { direct: Some(wanted), .. } = &spec.attachment else { return None };
            let live = self.interfaces.get(&spec.name)?;
            let (direct, link) = (live.direct.as_ref()?, self.links.get(&wanted.link)?);
            if let Err(error) = direct.aim(link.link.options().remote) {
                tracing::warn!(%error, interface = spec.name, "cannot connect its own port to the peer; it will receive nothing");
            }
            Some((live.port, direct.clone() as Arc<dyn Feeder>))
        };
        let mut feeders: Vec<_> = desired.interfaces.iter().filter_map(direct).collect();
        feeders.extend(self.direct.lock().follow(self.around(), desired));
        Parts {
            feeders,
            networks: plan::networks(desired).into_iter().map(|item| network(&item.spec)).collect(),
            interfaces: desired.interfaces.iter().filter_map(interface).collect(),
            links: desired.links.iter().filter_map(link).collect(),
            rules: desired.routes.iter().filter_map(rule).collect(),
            observers: self.observers(),
            published: self.published(),
        }
    }

    /// Has the keeper maintain the sealed links of the current state.
    pub(super) fn keep_sealed_links(&self) {
        let links: Vec<_> = self.links.values().map(|live| live.link.clone()).collect();
        self.keeper.iter().for_each(|keeper| keeper.set_links(&links));
    }

    fn around(&self) -> Around<'_> {
        Around { core: &self.core, interfaces: &self.interfaces, links: &self.links }
    }

    /// The interface or link at each port.
    pub(super) fn targets(&self) -> HashMap<PortId, Target> {
        let interfaces = self.interfaces.iter().map(|(name, i)| (i.port, Target::Interface(name.clone())));
        let links = self.links.iter().map(|(name, link)| (link.port, Target::Link(name.clone())));
        interfaces.chain(links).collect()
    }

    /// What dispatchers need for the captures and the timeline in progress.
    pub(super) fn observers(&self) -> Observers {
        Observers { timeline: self.timeline.clone(), ..self.captures.observers(&self.targets()) }
    }

    /// Publishes the current state to the core.
    pub(super) fn publish(&self) {
        self.core.publish(self.setup(&self.current));
    }

    /// The address of the bridge's first UDP socket.
    pub fn bridge_address(&self) -> SocketAddr {
        self.core.bridge_address()
    }
}

/// The error of a core that cannot start, with the place of the table that names the refused resource.
fn core_error(desired: &Desired, error: CoreError) -> EngineError {
    let place = match &error {
        CoreError::Bridge(_) | CoreError::Stream(_) => &desired.bridge.place,
        CoreError::Isolation(_) => &desired.dispatch.place,
        CoreError::System(_) => return error.into(),
    };
    EngineError::Open(Problem::new(place, error.to_string()))
}

/// The keeper of sealed links, and the relay if other hosts meet here.
type KeeperAndRelay = (Keeper, Option<Arc<Relay>>);

/// Starts the keeper of sealed links, if this host has an identity, and the relay, if other hosts meet here.
fn keeper(desired: &Desired, core: &Core) -> Result<Option<KeeperAndRelay>, EngineError> {
    let Some(Item { place, spec: files }) = &desired.identity else { return Ok(None) };
    let open = |text: String| EngineError::Open(Problem::new(place, text));
    let name = &desired.host.spec.name;
    let identity =
        Arc::new(IdentityStore::open(files.clone(), name).map_err(|error| open(error.to_string()))?);
    let BridgeSpec { meetings, .. } = desired.bridge.spec;
    let meet_at = desired.bridge.spec.meet_at(core.bridge_address());
    let sockets = || core.inheritance().map(|from| from.take(inherit::RELAY)).unwrap_or_default();
    let start = || Relay::start(meet_at, meetings, core.bridge_stats().clone(), sockets());
    let relay = (meetings > 0)
        .then(start)
        .transpose()
        .map_err(|error| open(KeeperError::Thread(error).to_string()))?
        .map(Arc::new);
    let options = KeeperOptions {
        listen: core.bridge_address(),
        identity,
        started: core.started(),
        rekey: Duration::from_secs(desired.bridge.spec.rekey_s.into()),
        courier: Box::new(core.courier().clone()),
        relay: relay.clone().map(|relay| relay as Arc<dyn GuestService>),
        inheritance: core.inheritance().cloned(),
    };
    let keeper = Keeper::start(options).map_err(|error| open(error.to_string()))?;
    Ok(Some((keeper, relay)))
}

fn network(spec: &NetworkSpec) -> route::NetworkSpec {
    let NetworkSpec { id, learning, ageing_s, .. } = *spec;
    route::NetworkSpec { id, learning, ageing_s }
}
