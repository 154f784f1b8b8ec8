//! Open interfaces and links of the engine.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use super::desired::*;
use vnet::dispatch::in_place::UnderlayPort;
use vnet::dispatch::mode::Drive;
use vnet::frame::{self, PortId};
use vnet::interface::local::{Local, LocalOptions};
use vnet::interface::tap::{Tap, TapOptions};
use vnet::interface::vhost_user::{VhostUser, VhostUserOptions};
use vnet::interface::{Interface, State};
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

/// Opens an interface as port `port`; `listen` is the bridge's address.
pub(super) fn open_interface(
    spec: &InterfaceSpec,
    port: PortId,
    listen: IpAddr,
) -> Result<LiveInterface, String> {
    let mut direct = None;
    let stats = Arc::new(PortStats::default());
    let (mac, mtu, queues) = (spec.mac, spec.mtu as usize, spec.queues as usize);
    let (interface, mtu): (Arc<dyn Interface>, u32) = match &spec.attachment {
        Attachment::VhostUser { socket, server, front_end, direct: own } => {
            if let Some(DirectSpec { port, .. }) = own {
                direct = Some(UnderlayPort::bind(SocketAddr::new(listen, *port)).map_err(|e| e.to_string())?);
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
        Attachment::Tap { device, netns } => {
            let (device, netns) = (device.clone(), netns.clone());
            let origin = frame::Origin { port, network: spec.network };
            let options = TapOptions { device, netns, mac, mtu, queues };
            let tap = Tap::open(&options, origin, stats.clone()).map_err(|e| e.to_string())?;
            let mtu = tap.mtu() as u32;
            (tap, mtu)
        }
        Attachment::Local { device, netns, promiscuous } => {
            let (device, netns, promiscuous) = (device.clone(), netns.clone(), *promiscuous);
            let origin = frame::Origin { port, network: spec.network };
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
    Ok(LiveInterface { port, mtu, stats, drive, interface, direct })
}
