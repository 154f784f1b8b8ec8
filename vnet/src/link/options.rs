//! What a link is configured to be.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use super::stream::StreamOptions;
use super::vxlan::vteps::VxlanOptions;
use crate::frame::NetworkId;
use crate::wire::ethernet::Mac;

/// How frames are wrapped for a link.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    Hash,
    Serialize,
    Deserialize,
    strum::Display,
    strum::EnumString,
    strum::IntoStaticStr,
    strum::VariantNames,
)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "kebab-case")]
pub enum Encapsulation {
    /// Native datagrams over UDP: super-frames, own fragmentation, any network.
    #[default]
    Native,
    /// VNET/P and VNET/U: the bare Ethernet frame is the UDP payload.
    Vnet,
    /// VXLAN (RFC 7348): kernels, Open vSwitch, hardware.
    Vxlan,
    /// Native frames over a TCP connection.
    Stream,
}

/// What a link is configured to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinkOptions {
    /// Its name on this host.
    pub name: String,
    /// The other host's bridge: its first port. [`ANYWHERE`](super::ANYWHERE) when a sealed link is to learn it from its peer.
    pub remote: SocketAddr,
    /// How many ports the other host's bridge has, from that of `remote` on: 1 to [`PORTS_MAX`](super::PORTS_MAX). A `vnet` link
    /// sends to the first.
    pub ports: u16,
    /// Networks that the link carries; `None` for all.
    pub networks: Option<Vec<NetworkId>>,
    /// Largest IP packet on the path in bytes, where the kernel's idea of it is too large.
    pub mtu: Option<u16>,
    /// What carries its frames.
    pub kind: LinkKind,
}

/// What carries a link's frames, with what only that kind has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LinkKind {
    /// Native datagrams over UDP.
    Native {
        /// Ports of the other host that are its guests' own, by their MAC addresses; at most [`DIRECT_MAX`](super::DIRECT_MAX).
        guests: Vec<(Mac, u16)>,
    },
    /// The classic VNET encapsulation: bare Ethernet frames over UDP.
    Classic,
    /// VXLAN, to one VTEP or several.
    Vxlan(VxlanOptions),
    /// Native frames over a TCP connection.
    Stream(StreamOptions),
}

impl Default for LinkKind {
    fn default() -> LinkKind {
        LinkKind::Native { guests: vec![] }
    }
}

impl LinkKind {
    /// How frames are wrapped.
    pub fn encapsulation(&self) -> Encapsulation {
        match self {
            LinkKind::Native { .. } => Encapsulation::Native,
            LinkKind::Classic => Encapsulation::Vnet,
            LinkKind::Vxlan(_) => Encapsulation::Vxlan,
            LinkKind::Stream(_) => Encapsulation::Stream,
        }
    }
}

/// What a link lets through, and how.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Security {
    /// Nothing travels in clear text; keys are agreed on with the host of this name.
    pub peer: Option<String>,
    /// Source addresses that frames from the other host may have; `None` for all.
    pub macs: Option<Vec<Mac>>,
    /// The link to the host by which the two meet, where neither can reach the other; of a sealed native link without remote.
    pub via: Option<String>,
}
