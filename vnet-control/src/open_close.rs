//! The engine's live interfaces and links.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use super::absence::Absence;
use super::attach::{adopt_flows, attach, without_kernel};
use super::desired::*;
use super::inherited;
use vnet::dispatch::core::Core;
use vnet::dispatch::in_place::UnderlayPort;
use vnet::dispatch::mode::Drive;
use vnet::frame::{self, PortId};
use vnet::inherit::Inheritance;
use vnet::interface::kept::{self, Keep};
use vnet::interface::local::{Local, LocalError, LocalOptions};
use vnet::interface::pair::VethOptions;
use vnet::interface::sideband::{Sideband, WithSideband};
use vnet::interface::stand_in::Absent;
use vnet::interface::tap::{Netns, Process, Tap, TapError, TapOptions};
use vnet::interface::veth::{self, Veth, VethError};
use vnet::interface::vhost_user::{VhostUser, VhostUserError};
use vnet::interface::{Interface, State};
use vnet::kernel::{Attached, Kernel};
use vnet::link::inquiry::Inbox;
use vnet::link::{BridgeError, Link, LinkOptions, Security};
use vnet::stats::PortStats;
use vnet::wire::ethernet::Mac;

/// Number of interfaces opened in parallel. Opening mostly waits for the kernel's lock on network devices.
const OPENED_AT_A_TIME: usize = 8;
/// Number of interfaces closed in parallel.
const CLOSED_AT_A_TIME: usize = 32;
/// Rate limit of log lines about the state of one interface: this many per [`LINES_TIME`].
const LINES_MAX: u32 = 10;
const LINES_TIME: Duration = Duration::from_secs(10);

/// An interface at its port: open, or absent until it can be opened.
pub(super) struct LiveInterface {
    pub port: PortId,
    pub stats: Arc<PortStats>,
    pub drive: Drive,
    pub interface: Arc<dyn Interface>,
    /// How engines of this process talk to a virtual machine's guest.
    pub sideband: Option<Arc<Sideband>>,
    /// The interface's own underlay port, for receive in place.
    pub direct: Option<Arc<UnderlayPort>>,
    /// The programs attached to the interface's device, or the reason why the kernel does not forward its frames.
    pub kernel: Result<Attached, String>,
    /// Retry state while the interface cannot be opened.
    pub absent: Option<Absence>,
    /// Last known MAC address of the device that vnetd created; the next device gets the same.
    pub mac: Option<Mac>,
    /// The process whose network namespace the device is in, where a process id names the namespace.
    pub process: Option<Process>,
    /// The state that was logged last.
    pub logged: Logged,
    mtu: u32,
}

/// The state that was logged last, and a rate limit: the owner of a device can set it down and up in a loop, so at most
/// [`LINES_MAX`] lines are logged per [`LINES_TIME`].
pub(super) struct Logged {
    pub state: State,
    lines: u32,
    since: Instant,
}

impl Default for Logged {
    fn default() -> Logged {
        Logged { state: State::Up, lines: 0, since: Instant::now() }
    }
}

impl Logged {
    /// Takes one line from the rate limit; true if the line may be logged.
    pub fn allow(&mut self) -> bool {
        if self.since.elapsed() > LINES_TIME {
            *self = Logged { state: self.state.clone(), ..Logged::default() };
        }
        self.lines += 1;
        self.lines <= LINES_MAX
    }
}

impl LiveInterface {
    pub fn state(&self) -> State {
        self.interface.state()
    }

    /// The MTU in use.
    pub fn mtu(&self) -> u32 {
        self.interface.device().map_or(self.mtu, |device| device.mtu() as u32)
    }

    /// What it keeps when it is opened again.
    pub fn before(&self) -> Before {
        Before { stats: self.stats.clone(), mac: self.mac, process: self.process.clone() }
    }

    /// An interface that is down for `reason`.
    pub fn absent(spec: &InterfaceSpec, port: PortId, before: Before, reason: String) -> LiveInterface {
        let Before { stats, mac, process } = before;
        let stand_in = Arc::new(Absent::new(reason, stats.clone()));
        let netns = spec.attachment.netns();
        let process = process.or_else(|| netns.and_then(Netns::process));
        // Do not retry after the process has exited: a later process with the same id is another guest.
        let retried =
            netns.and_then(Netns::pid).is_none() || process.as_ref().is_some_and(|p| !p.has_exited());
        LiveInterface {
            port,
            stats,
            drive: drive(spec, 1),
            interface: stand_in.clone(),
            sideband: None,
            direct: None,
            kernel: Err("the interface is down".into()),
            absent: Some(Absence::new(stand_in, retried)),
            mac,
            process,
            logged: Logged::default(),
            mtu: spec.mtu,
        }
    }
}

/// State that an interface keeps when it is reopened.
#[derive(Clone, Default)]
pub(super) struct Before {
    pub stats: Arc<PortStats>,
    pub mac: Option<Mac>,
    /// Absent: whatever process has the number now.
    pub process: Option<Process>,
}

/// Error from opening an interface.
pub(super) struct NotOpen {
    pub error: String,
    /// What the interface waits for, if it can appear later: a device, namespace or directory.
    pub waits_for: Option<String>,
}

impl NotOpen {
    /// Why the interface is down.
    pub fn reason(self) -> String {
        self.waits_for.unwrap_or(self.error)
    }
}

impl From<BridgeError> for NotOpen {
    fn from(error: BridgeError) -> NotOpen {
        NotOpen { error: error.to_string(), waits_for: None }
    }
}

macro_rules! not_open {
    ($($error:ty),*) => {
        $(impl From<$error> for NotOpen {
            fn from(error: $error) -> NotOpen {
                NotOpen { error: error.to_string(), waits_for: error.waits_for() }
            }
        })*
    };
}
not_open!(TapError, LocalError, VhostUserError, AccountError);

/// Which interfaces a change may leave down when they cannot be opened.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Patience {
    /// None: the client that adds a single interface gets the error.
    None,
    /// Interfaces that wait for something that can appear later: a namespace, a device, a directory.
    Awaited,
    /// All interfaces: a host starts even if some of them cannot be opened.
    All,
}

impl Patience {
    /// The reason for an interface to be down, if this change may leave it down; else `None`.
    pub fn bears(self, why: &NotOpen) -> Option<String> {
        match self {
            Patience::None => None,
            Patience::Awaited => why.waits_for.clone(),
            Patience::All => Some(why.waits_for.as_ref().unwrap_or(&why.error).clone()),
        }
    }
}

/// A link and its port in the core.
pub(super) struct LiveLink {
    pub port: PortId,
    pub stats: Arc<PortStats>,
    pub link: Arc<Link>,
}

impl LiveLink {
    pub fn new(spec: &LinkSpec, port: PortId, inbox: &Arc<Inbox>) -> LiveLink {
        let stats = Arc::new(PortStats::default());
        let LinkSpec { name, remote, ports, networks, mtu, kind, security } = spec.clone();
        let options = LinkOptions { name, remote, ports, networks, mtu, kind };
        let security = Security { peer: security.peer, macs: security.macs, via: security.via };
        let link = Link::with_security(options, security, port, stats.clone());
        link.answer_by(inbox.clone());
        LiveLink { port, stats, link }
    }
}

/// Interfaces that are open but not in the core yet; dropping this closes them, and removes devices that were made for them.
#[derive(Default)]
pub(super) struct Opened(pub Vec<(String, LiveInterface)>);

impl Drop for Opened {
    fn drop(&mut self) {
        self.0.iter().for_each(|(_, live)| live.interface.undo());
    }
}

/// Stops interfaces in parallel: the kernel takes milliseconds to end a device or an AIO context.
pub(super) fn close_all(mut interfaces: Vec<LiveInterface>) {
    let share = interfaces.len().div_ceil(CLOSED_AT_A_TIME).max(1);
    std::thread::scope(|scope| {
        while !interfaces.is_empty() {
            let part = interfaces.split_off(interfaces.len().saturating_sub(share));
            scope.spawn(move || {
                part.iter().for_each(|live| live.interface.stop());
                part.iter().for_each(|live| live.interface.settle());
            });
        }
    });
}

/// A request to open an interface at a port.
pub(super) struct Order<'a> {
    pub spec: &'a InterfaceSpec,
    pub port: PortId,
    pub before: Before,
    /// How a TAP outlives this process.
    pub keep: Keep,
}

/// Opens interfaces in parallel. Results are in the order of `orders`.
pub(super) fn open_all(orders: &[Order<'_>], core: &Core) -> Vec<Result<LiveInterface, NotOpen>> {
    let next = AtomicUsize::new(0);
    let work = || {
        let mut done = vec![];
        loop {
            let index = next.fetch_add(1, Relaxed);
            let Some(order) = orders.get(index) else { return done };
            done.push((index, open(order, core)));
        }
    };
    let workers = orders.len().min(OPENED_AT_A_TIME);
    if workers < 2 {
        return orders.iter().map(|order| open(order, core)).collect();
    }
    let mut done: Vec<_> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
        let join = |worker: std::thread::ScopedJoinHandle<'_, _>| {
            worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        workers.into_iter().flat_map(join).collect()
    });
    done.sort_by_key(|(index, _)| *index);
    done.into_iter().map(|(_, result)| result).collect()
}

fn open(order: &Order<'_>, core: &Core) -> Result<LiveInterface, NotOpen> {
    let Order { spec, port, before, .. } = order;
    let (port, stats) = (*port, before.stats.clone());
    let netns = spec.attachment.netns();
    let process = before.process.clone().or_else(|| netns.and_then(Netns::process));
    check_process(netns, process.as_ref())?;
    let origin = frame::Origin { port, network: spec.network };
    let handed = core.inheritance().filter(|inheritance| !inheritance.is_settled());
    let (direct, (kernel, interface)) = match handed {
        Some(inheritance) => inherit(order, (origin, &stats), core, inheritance)?,
        None => open_anew(order, (origin, &stats), core)?,
    };
    let sideband = match &spec.attachment {
        Attachment::VhostUser { .. } => Some(sideband(interface.clone(), spec, (origin, &stats))?),
        _ => None,
    };
    let interface = match &sideband {
        Some(sideband) => Arc::new(WithSideband(sideband.clone())),
        None => interface,
    };
    if let Some(guest) = interface.coalesce() {
        guest.set_interrupts(spec.driving.interrupts);
    }
    if let Err(exited) = check_process(netns, process.as_ref()) {
        // It may be in the namespace of another process, which has the number now.
        interface.undo();
        return Err(exited);
    }
    let drive = drive(spec, spec.queues as usize);
    let (mac, mtu) = (interface.device().and_then(|device| device.mac()), spec.mtu);
    let (absent, logged) = (None, Logged::default());
    Ok(LiveInterface {
        port,
        stats,
        drive,
        interface,
        sideband,
        direct,
        kernel,
        absent,
        mac,
        process,
        logged,
        mtu,
    })
}

/// An open interface, with its programs or the reason why it has none.
type Open = (Result<Attached, String>, Arc<dyn Interface>);

/// Opens an interface, and its own underlay port if it has one.
fn open_anew(
    order: &Order<'_>,
    (origin, stats): (frame::Origin, &Arc<PortStats>),
    core: &Core,
) -> Result<(Option<Arc<UnderlayPort>>, Open), NotOpen> {
    let spec = order.spec;
    let mut direct = None;
    let open = match &spec.attachment {
        Attachment::VhostUser { direct: own, .. } => {
            if let Some(DirectSpec { port, .. }) = own {
                let address = SocketAddr::new(core.bridge_address().ip(), *port);
                direct = Some(UnderlayPort::bind(address, true)?);
            }
            let options = inherited::guest_options(spec)?;
            let guest = VhostUser::start(options, origin.port, spec.network, stats.clone())?;
            (Err(without_kernel(spec)), guest as Arc<dyn Interface>)
        }
        Attachment::Tap { .. } => (Err(without_kernel(spec)), open_tap(order, origin, stats)?),
        Attachment::Veth { .. } => match open_veth(order, (origin, stats), core)? {
            Ok((attached, veth)) => (Ok(attached), veth as Arc<dyn Interface>),
            Err(why) => (Err(why), open_tap(order, origin, stats)?),
        },
        Attachment::Local { .. } => {
            let (kernel, local) = open_local(order, (origin, stats), core)?;
            (kernel, local as Arc<dyn Interface>)
        }
    };
    Ok((direct, open))
}

/// How engines of this process talk to the guest behind an interface.
fn sideband(
    guest: Arc<dyn Interface>,
    spec: &InterfaceSpec,
    (origin, stats): (frame::Origin, &Arc<PortStats>),
) -> Result<Arc<Sideband>, NotOpen> {
    Sideband::new(guest, origin, spec.mtu as usize, stats.clone()).map_err(|error| NotOpen {
        error: format!("cannot open the sideband of interface {}: {error}", spec.name),
        waits_for: None,
    })
}

/// Takes an interface of a running vnetd, and its own underlay port if it has one. One that it has not opened is down until it has ended.
fn inherit(
    Order { spec, keep, .. }: &Order<'_>,
    origin: (frame::Origin, &Arc<PortStats>),
    core: &Core,
    inheritance: &Arc<Inheritance>,
) -> Result<(Option<Arc<UnderlayPort>>, Open), NotOpen> {
    let failed = |error| NotOpen { error, waits_for: None };
    match inherited::take((spec, keep), origin, core, inheritance) {
        Ok(Some(taken)) => Ok((inherited::direct(spec, inheritance).map_err(failed)?, taken)),
        Ok(None) => {
            let error = "it was down in the vnetd before".to_owned();
            Err(NotOpen { waits_for: Some(error.clone()), error })
        }
        Err(error) => Err(failed(error)),
    }
}

/// The drive of an interface with `queues` queues.
fn drive(spec: &InterfaceSpec, queues: usize) -> Drive {
    Drive { share: spec.driving.share, ..Drive::new(spec.driving.mode, queues) }
}

/// Fails when the process that a namespace is named by has exited.
fn check_process(netns: Option<&Netns>, process: Option<&Process>) -> Result<(), NotOpen> {
    match (netns, process) {
        (Some(netns), Some(process)) if process.has_exited() => {
            Err(NotOpen { error: netns.absence(), waits_for: Some(netns.absence()) })
        }
        _ => Ok(()),
    }
}

/// Opens a TAP: for kind `tap`, and for kind `veth` if there is no kernel path.
fn open_tap(
    order: &Order<'_>,
    origin: frame::Origin,
    stats: &Arc<PortStats>,
) -> Result<Arc<dyn Interface>, NotOpen> {
    let Order { spec, before, keep, .. } = order;
    let (Attachment::Tap { device, netns } | Attachment::Veth { device, netns }) = &spec.attachment else {
        unreachable!("only these kinds have a TAP");
    };
    let (device, netns, mac, mac_before) = (device.clone(), netns.clone(), spec.mac, before.mac);
    let (mtu, queues) = (spec.mtu as usize, spec.queues as usize);
    if let (Attachment::Veth { .. }, Some(netns)) = (&spec.attachment, &netns) {
        veth::remove_old(&device, netns);
    }
    let options =
        TapOptions { device, netns, mac, mac_before, mtu, queues, silent: false, keep: Some(keep.clone()) };
    Ok(Tap::open(&options, origin, stats.clone())?)
}

/// Opens a local network, with the kernel's programs attached to its device if they can be.
fn open_local(
    order: &Order<'_>,
    (origin, stats): (frame::Origin, &Arc<PortStats>),
    core: &Core,
) -> Result<(Result<Attached, String>, Arc<Local>), NotOpen> {
    let spec = order.spec;
    let Attachment::Local { device, netns, promiscuous } = &spec.attachment else {
        unreachable!("it is a local network");
    };
    let (device, netns, promiscuous, mtu) = (device.clone(), netns.clone(), *promiscuous, spec.mtu as usize);
    let mut options = LocalOptions { device, netns, promiscuous, mtu, kernel_path: true };
    let why = match programs_for_local(spec, core) {
        Err(why) => why,
        Ok(kernel) => {
            let why = match Local::open(&options, origin, stats.clone()) {
                Err(LocalError::NoKernelPath(why)) => why,
                Err(error) => return Err(error.into()),
                Ok(local) => match attach(&*local, |device| kernel.attach_lan(device, origin)) {
                    Ok(attached) => {
                        adopt_flows(kernel, &*local);
                        return Ok((Ok(attached), local));
                    }
                    Err(why) => why,
                },
            };
            tracing::info!(interface = spec.name, "no kernel path: {why}");
            why
        }
    };
    options.kernel_path = false;
    Ok((Err(why), Local::open(&options, origin, stats.clone())?))
}

/// The programs for a local network's device, or the reason why there are none.
fn programs_for_local<'a>(spec: &InterfaceSpec, core: &'a Core) -> Result<&'a Arc<Kernel>, String> {
    if spec.kernel_path == KernelPath::Off {
        return Err("its kernel_path is off".into());
    }
    if spec.attachment.netns().is_some_and(|netns| !netns.is_own()) {
        return Err("its device is in another network namespace than vnetd".into());
    }
    Ok(core.kernel()?)
}

/// Opens a veth with the kernel's programs attached. The inner error is the reason why there is no kernel path; the caller then
/// opens a TAP instead.
fn open_veth(
    order: &Order<'_>,
    (origin, stats): (frame::Origin, &Arc<PortStats>),
    core: &Core,
) -> Result<Result<(Attached, Arc<Veth>), String>, NotOpen> {
    let Order { spec, before, keep, .. } = order;
    let Attachment::Veth { device, netns } = &spec.attachment else { unreachable!("it is a veth") };
    if spec.kernel_path == KernelPath::Off {
        return Ok(Err("its kernel_path is off".into()));
    }
    let kernel = match core.kernel() {
        Ok(kernel) => kernel,
        Err(why) => return Ok(Err(why.into())),
    };
    let Some(netns) = netns.clone().filter(|netns| !netns.is_own()) else {
        return Ok(Err("its device is in vnetd's own network namespace; name another by netns".into()));
    };
    if let Err(error) = kept::remove_left(&keep.mark, keep.moved.as_ref(), (device, Some(&netns))) {
        tracing::warn!(interface = spec.name, "cannot remove the TAP before it: {error}");
    }
    let mac = spec.mac.or(before.mac);
    let options = VethOptions { device: device.clone(), netns, mac, mtu: spec.mtu as usize, pair: spec.pair };
    let veth = match Veth::open(&options, origin, stats.clone()) {
        Ok(veth) => veth,
        Err(VethError::Tap(error)) => return Err(error.into()),
        Err(error @ VethError::Exposed { .. }) => {
            tracing::warn!(interface = spec.name, "no kernel path: {error}");
            return Ok(Err(error.to_string()));
        }
    };
    match attach(&*veth, |device| kernel.attach(device, origin)) {
        Ok(attached) => {
            veth.raise().map_err(NotOpen::from)?;
            Ok(Ok((attached, veth)))
        }
        Err(why) => {
            tracing::info!(interface = spec.name, "no kernel path: {why}");
            veth.stop();
            Ok(Err(why))
        }
    }
}
