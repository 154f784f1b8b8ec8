//! Pairs of devices between a container and its host: netkit where the kernel has it, else veth.
//!
//! Both are two ends of one cable, in two network namespaces. They differ in where programs run. A veth queues a frame (the backlog of
//! `netif_rx`) before the programs at the host's end see it. A netkit pair (Linux 6.7, `CONFIG_NETKIT`) runs them while the
//! container sends, before any queue; the host's end manages them, and the container cannot detach them.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{
    InfoData, InfoKind, InfoNetkit, InfoVeth, LinkAttribute, LinkInfo, LinkMessage, NetkitMode,
};

use super::netns::Netns;
use super::tap::TapError;
use crate::netlink::{self, Netlink};
use crate::wire::ethernet::Mac;
use crate::wire::vxlan::SUPER_FRAME_MAX;

/// `gso_max_size` of the container's device, in bytes: its kernel segments frames of this length and more, which would not fit into one
/// IP packet of the wire. TCP stays well below it, by Linux's `MAX_TCP_HEADER`; messages of `UDP_SEGMENT` are up to 65 535 bytes long.
const GSO_MAX_SIZE: u32 = SUPER_FRAME_MAX as u32 + 1;

/// Configuration of a container's interface.
#[derive(Clone, Debug)]
pub struct VethOptions {
    /// The container's device, at most [`DEVICE_NAME_MAX`](super::tap::DEVICE_NAME_MAX) bytes.
    pub device: String,
    /// The container's network namespace. Not vnetd's own: the kernel hands frames into other namespaces only.
    pub netns: Netns,
    /// The container's MAC address; chosen by the kernel if absent.
    pub mac: Option<Mac>,
    /// MTU in bytes, capped at [`TAP_MTU_MAX`](super::tap::TAP_MTU_MAX).
    pub mtu: usize,
    /// Which pair is made.
    pub pair: Pair,
}

/// Which pair connects a container.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, strum::Display, strum::EnumString, strum::VariantNames,
)]
#[strum(serialize_all = "kebab-case")]
pub enum Pair {
    /// netkit where the kernel has it, else veth. A pair of a vnetd that has died stays as it is.
    #[default]
    Auto,
    /// Always veth.
    Veth,
    /// Always netkit.
    Netkit,
}

/// Kind of an existing pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "kebab-case")]
pub enum PairKind {
    /// Programs run at the host's end, behind a queue.
    Veth,
    /// Programs run while the container sends.
    Netkit,
}

impl Pair {
    /// True if a pair of this kind may be used.
    pub(super) fn takes(self, kind: PairKind) -> bool {
        match self {
            Pair::Auto => true,
            Pair::Veth => kind == PairKind::Veth,
            Pair::Netkit => kind == PairKind::Netkit,
        }
    }
}

/// Kind of the pair that a device of the calling thread's namespace belongs to.
pub(super) fn kind_of(index: u32) -> io::Result<PairKind> {
    let link = netlink::link(index)?;
    let infos = link.attributes.iter().filter_map(|attribute| match attribute {
        LinkAttribute::LinkInfo(infos) => Some(infos),
        _ => None,
    });
    let is_netkit = infos.flatten().any(|info| *info == LinkInfo::Kind(InfoKind::Netkit));
    Ok(if is_netkit { PairKind::Netkit } else { PairKind::Veth })
}

/// Creates the pair, down.
pub(super) fn make(host: &str, options: &VethOptions, mtu: usize, namespace: &File) -> Result<(), TapError> {
    let of = |kind| create(kind, host, options, mtu, namespace);
    let made = match options.pair {
        Pair::Veth => of(PairKind::Veth),
        Pair::Netkit => of(PairKind::Netkit),
        // An error that has another reason than the kind happens again.
        Pair::Auto => of(PairKind::Netkit).or_else(|_| of(PairKind::Veth)),
    };
    made.map_err(|error| {
        let hint = match error.raw_os_error() {
            Some(libc::EEXIST) => "; the namespace has a device of that name already, which is not vnetd's",
            Some(libc::EOPNOTSUPP) if options.pair == Pair::Netkit => {
                "; netkit needs Linux 6.10 with CONFIG_NETKIT: write pair = \"auto\" or \"veth\""
            }
            _ => "",
        };
        TapError::Step { step: "create", device: options.device.clone(), error, hint }
    })
}

fn create(kind: PairKind, host: &str, options: &VethOptions, mtu: usize, namespace: &File) -> io::Result<()> {
    let attributes = |name: &str| {
        vec![
            LinkAttribute::IfName(name.into()),
            LinkAttribute::Mtu(mtu as u32),
            LinkAttribute::GsoMaxSize(GSO_MAX_SIZE),
        ]
    };
    let mut guest = LinkMessage::default();
    guest.attributes = attributes(&options.device);
    guest.attributes.push(LinkAttribute::NetNsFd(namespace.as_raw_fd()));
    if let Some(mac) = options.mac {
        guest.attributes.push(LinkAttribute::Address(mac.0.to_vec()));
    }
    let (kind, data) = match kind {
        PairKind::Veth => (InfoKind::Veth, InfoData::Veth(InfoVeth::Peer(guest))),
        PairKind::Netkit => {
            // Frames pass to the host's end while no program is attached, as with veth.
            let settings = vec![InfoNetkit::Peer(guest), InfoNetkit::Mode(NetkitMode::L2)];
            (InfoKind::Netkit, InfoData::Netkit(settings))
        }
    };
    let mut request = LinkMessage::default();
    request.attributes = attributes(host);
    request.attributes.push(LinkAttribute::LinkInfo(vec![LinkInfo::Kind(kind), LinkInfo::Data(data)]));
    Netlink::new()?.change(RouteNetlinkMessage::NewLink(request), NLM_F_CREATE | NLM_F_EXCL)
}
