//! Interfaces that a running vnetd hands over, from their descriptors. Nothing at a device changes.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::attach::{adopt_flows, attach, without_kernel};
use super::desired::*;
use vnet::dispatch::core::Core;
use vnet::dispatch::in_place::UnderlayPort;
use vnet::frame::Origin;
use vnet::inherit::{self, Inheritance};
use vnet::interface::Interface;
use vnet::interface::kept::Keep;
use vnet::interface::local::{Local, LocalOptions};
use vnet::interface::pair::VethOptions;
use vnet::interface::tap::{Tap, TapOptions};
use vnet::interface::veth::Veth;
use vnet::interface::vhost_user::{VhostUser, VhostUserOptions};
use vnet::kernel::Attached;
use vnet::stats::PortStats;

/// An interface, with its programs or the reason why it has none.
type Taken = (Result<Attached, String>, Arc<dyn Interface>);

/// Takes an interface; `None` if no descriptor of it was handed over.
pub(super) fn take(
    (spec, keep): (&InterfaceSpec, &Keep),
    (origin, stats): (Origin, &Arc<PortStats>),
    core: &Core,
    inheritance: &Arc<Inheritance>,
) -> Result<Option<Taken>, String> {
    let name = |kind| inherit::interface(&spec.name, kind);
    match &spec.attachment {
        Attachment::Veth { .. } if inheritance.has(&name("veth")) => {
            veth(spec, (origin, stats), core, inheritance).map(Some)
        }
        Attachment::Tap { .. } | Attachment::Veth { .. } if inheritance.has(&name("tap")) => {
            let queues = inheritance.take(&name("tap"));
            let why = match spec.attachment {
                Attachment::Veth { .. } => "it had none in the vnetd before".into(),
                _ => without_kernel(spec),
            };
            Ok(Some((Err(why), tap((spec, keep), queues, (origin, stats))?)))
        }
        Attachment::Local { .. } if inheritance.has(&name("packet")) => {
            local(spec, (origin, stats), core, inheritance).map(Some)
        }
        Attachment::VhostUser { .. } if inheritance.has_guest(&spec.name) => {
            let guest = guest(spec, (origin, stats), inheritance)?;
            Ok(Some((Err(without_kernel(spec)), guest)))
        }
        _ => Ok(None),
    }
}

/// The options of a virtual machine's interface.
pub(super) fn guest_options(spec: &InterfaceSpec) -> Result<VhostUserOptions, AccountError> {
    let Attachment::VhostUser { socket, server, front_end, .. } = &spec.attachment else {
        unreachable!("it is a virtual machine's");
    };
    Ok(VhostUserOptions {
        name: spec.name.clone(),
        socket: socket.clone(),
        server: *server,
        mac: spec.mac,
        mtu: spec.mtu as usize,
        queues: spec.queues as usize,
        access: front_end.access()?,
        peer: front_end.peer()?,
        memory_max: front_end.memory_max(),
    })
}

/// The configured underlay port of an interface; `None` if it has none.
pub(super) fn direct(
    spec: &InterfaceSpec,
    inheritance: &Inheritance,
) -> Result<Option<Arc<UnderlayPort>>, String> {
    let Some(wanted) = spec.attachment.direct() else { return Ok(None) };
    let handed = inheritance.port(&spec.name, &wanted.link, false);
    let (socket, peer) = handed.ok_or("its own underlay port was not handed over")?;
    UnderlayPort::inherit(socket, peer, true).map(Some).map_err(|error| error.to_string())
}

fn guest(
    spec: &InterfaceSpec,
    (origin, stats): (Origin, &Arc<PortStats>),
    inheritance: &Arc<Inheritance>,
) -> Result<Arc<VhostUser>, String> {
    let options = guest_options(spec).map_err(|error| error.to_string())?;
    let guest = VhostUser::inherit(options, inheritance, (origin.port, origin.network), stats.clone());
    guest.map_err(|error| error.to_string())
}

fn tap(
    (spec, keep): (&InterfaceSpec, &Keep),
    queues: Vec<OwnedFd>,
    (origin, stats): (Origin, &Arc<PortStats>),
) -> Result<Arc<Tap>, String> {
    let (Attachment::Tap { device, netns } | Attachment::Veth { device, netns }) = &spec.attachment else {
        unreachable!("only these kinds have a TAP");
    };
    let options = TapOptions {
        device: device.clone(),
        netns: netns.clone(),
        mac: spec.mac,
        mac_before: None,
        mtu: spec.mtu as usize,
        queues: spec.queues as usize,
        silent: false,
        keep: Some(keep.clone()),
    };
    Tap::inherit(&options, queues, origin, stats.clone()).map_err(|error| error.to_string())
}

fn veth(
    spec: &InterfaceSpec,
    (origin, stats): (Origin, &Arc<PortStats>),
    core: &Core,
    inheritance: &Arc<Inheritance>,
) -> Result<Taken, String> {
    let Attachment::Veth { device, netns: Some(netns) } = &spec.attachment else {
        return Err("its namespace is missing".into());
    };
    let (device, netns, mtu) = (device.clone(), netns.clone(), spec.mtu as usize);
    let options = VethOptions { device, netns, mac: spec.mac, mtu, pair: spec.pair };
    let name = inherit::interface(&spec.name, "veth");
    let veth = Veth::inherit(&options, (inheritance, &name), origin, stats.clone());
    let veth = veth.map_err(|error| error.to_string())?;
    let kernel = core.kernel()?;
    let attached = attach(&*veth, |device| kernel.attach(device, origin))?;
    Ok((Ok(attached), veth))
}

fn local(
    spec: &InterfaceSpec,
    (origin, stats): (Origin, &Arc<PortStats>),
    core: &Core,
    inheritance: &Inheritance,
) -> Result<Taken, String> {
    let Attachment::Local { device, netns, promiscuous } = &spec.attachment else {
        unreachable!("it is a local network");
    };
    let name = |kind| inherit::interface(&spec.name, kind);
    let socket = inheritance.take_one(&name("packet")).ok_or("its packet socket is missing")?;
    let copies = match inheritance.take(&name("copies")) {
        none if none.is_empty() => None,
        files => Some(<[OwnedFd; 2]>::try_from(files).map_err(|_| "its copies are incomplete")?),
    };
    let kernel_path = copies.is_some();
    let (device, netns, mtu) = (device.clone(), netns.clone(), spec.mtu as usize);
    let options = LocalOptions { device, netns, promiscuous: *promiscuous, mtu, kernel_path };
    let local = Local::inherit(&options, socket, copies, (origin, stats.clone()));
    let local = local.map_err(|error| error.to_string())?;
    if !kernel_path {
        return Ok((Err("it had none in the vnetd before".into()), local));
    }
    let kernel = core.kernel()?;
    let attached = attach(&*local, |device| kernel.attach_lan(device, origin))?;
    adopt_flows(kernel, &*local);
    Ok((Ok(attached), local))
}
