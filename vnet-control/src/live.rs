//! Open interfaces and links of the engine.

use std::net::SocketAddr;
use std::sync::Arc;

use super::desired::*;
use vnet::dispatch::core::Core;
use vnet::dispatch::in_place::UnderlayPort;
use vnet::dispatch::mode::Drive;
use vnet::frame::{self, PortId};
use vnet::interface::local::{Local, LocalOptions};
use vnet::interface::tap::{Netns, Tap, TapOptions};
use vnet::interface::veth::{Veth, VethOptions};
use vnet::interface::vhost_user::{VhostUser, VhostUserOptions};
use vnet::interface::{Interface, State};
use vnet::kernel::{Attached, GuestDevice};
use vnet::link::inquiry::Inbox;
use vnet::link::{Link, LinkOptions, Security};
use vnet::stats::PortStats;

/// An open interface.
pub(super) struct LiveInterface {
    pub port: PortId,
    pub mtu: u32,
    pub stats: Arc<PortStats>,
    pub drive: Drive,
    pub interface: Arc<dyn Interface>,
    /// Its own underlay port, for receiving in place.
    pub direct: Option<Arc<UnderlayPort>>,
    /// Programs at its device, or why the kernel does not forward for it.
    pub kernel: Result<Attached, String>,
}

impl LiveInterface {
    pub fn state(&self) -> State {
        self.interface.state()
    }
}

/// A link of the core.
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

/// Interfaces that are open but not in the core yet; dropping closes them.
#[derive(Default)]
pub(super) struct Opened(pub Vec<(String, LiveInterface)>);

impl Drop for Opened {
    fn drop(&mut self) {
        self.0.iter().for_each(|(_, live)| live.interface.stop());
    }
}

/// Opens an interface as port `port` of `core`.
pub(super) fn open_interface(
    spec: &InterfaceSpec,
    port: PortId,
    core: &Core,
) -> Result<LiveInterface, String> {
    let mut direct = None;
    let stats = Arc::new(PortStats::default());
    let (mac, mtu, queues) = (spec.mac, spec.mtu as usize, spec.queues as usize);
    let origin = frame::Origin { port, network: spec.network };
    let mut kernel = Err(format!("only kind veth has it, this is kind {}", spec.attachment.kind()));
    let (interface, mtu): (Arc<dyn Interface>, u32) = match &spec.attachment {
        Attachment::VhostUser { socket, server, front_end, direct: own } => {
            if let Some(DirectSpec { port, .. }) = own {
                let address = SocketAddr::new(core.bridge_address().ip(), *port);
                direct = Some(UnderlayPort::bind(address).map_err(|e| e.to_string())?);
            }
            let (socket, server, name) = (socket.clone(), *server, spec.name.clone());
            let access = front_end.access().map_err(|e| e.to_string())?;
            let peer = front_end.peer().map_err(|e| e.to_string())?;
            let memory_max = front_end.memory_max();
            let options =
                VhostUserOptions { name, socket, server, mac, mtu, queues, access, peer, memory_max };
            let interface =
                VhostUser::start(options, port, spec.network, stats.clone()).map_err(|e| e.to_string())?;
            (interface, spec.mtu)
        }
        Attachment::Tap { device, netns } => open_tap(spec, (device, netns), origin, &stats)?,
        Attachment::Veth { device, netns } => match open_veth(spec, (device, netns), (origin, &stats), core)?
        {
            Ok((attached, veth)) => {
                kernel = Ok(attached);
                let mtu = veth.mtu() as u32;
                (veth, mtu)
            }
            Err(why) => {
                kernel = Err(why);
                open_tap(spec, (device, netns), origin, &stats)?
            }
        },
        Attachment::Local { device, netns, promiscuous } => {
            let (device, netns, promiscuous) = (device.clone(), netns.clone(), *promiscuous);
            let options = LocalOptions { device, netns, promiscuous, mtu };
            let local = Local::open(&options, origin, stats.clone()).map_err(|e| e.to_string())?;
            let mtu = local.mtu() as u32;
            (local, mtu)
        }
    };
    if let Some(guest) = interface.coalesce() {
        guest.set_interrupts(spec.driving.interrupts);
    }
    let drive = Drive::new(spec.driving.mode, queues);
    Ok(LiveInterface { port, mtu, stats, drive, interface, direct, kernel })
}

/// A device's name and network namespace, as configured.
type Place<'a> = (&'a String, &'a Option<Netns>);

fn open_tap(
    spec: &InterfaceSpec,
    (device, netns): Place<'_>,
    origin: frame::Origin,
    stats: &Arc<PortStats>,
) -> Result<(Arc<dyn Interface>, u32), String> {
    let (device, netns, mac) = (device.clone(), netns.clone(), spec.mac);
    let (mtu, queues) = (spec.mtu as usize, spec.queues as usize);
    let options = TapOptions { device, netns, mac, mtu, queues, silent: false };
    let tap = Tap::open(&options, origin, stats.clone()).map_err(|e| e.to_string())?;
    let mtu = tap.mtu() as u32;
    Ok((tap, mtu))
}

/// Opens a veth with the kernel's programs at it. The inner error says why there is no kernel path: a TAP then does the same.
fn open_veth(
    spec: &InterfaceSpec,
    (device, netns): Place<'_>,
    (origin, stats): (frame::Origin, &Arc<PortStats>),
    core: &Core,
) -> Result<Result<(Attached, Arc<Veth>), String>, String> {
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
    let options = VethOptions { device: device.clone(), netns, mac: spec.mac, mtu: spec.mtu as usize };
    let veth = Veth::open(&options, origin, stats.clone()).map_err(|e| e.to_string())?;
    let attached = veth.kernel_device().ok_or_else(|| "it has no device".to_string()).and_then(|device| {
        let (host, tap) = (device.host.clone(), device.tap.clone());
        let device = GuestDevice { host, tap, mac: device.mac };
        kernel.attach(&device, origin).map_err(|error| error.to_string())
    });
    match attached {
        Ok(attached) => {
            veth.raise().map_err(|e| e.to_string())?;
            Ok(Ok((attached, veth)))
        }
        Err(why) => {
            tracing::info!(interface = spec.name, "no kernel path: {why}");
            veth.stop();
            Ok(Err(why))
        }
    }
}
