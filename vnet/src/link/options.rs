//! A link's configuration.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use super::stream::StreamOptions;
use super::vxlan::vteps::VxlanOptions;
use crate::frame::NetworkId;
use crate::wire::ethernet::Mac;

/// Encapsulations.
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
    /// Native datagrams over UDP: super-frames, vnet's fragmentation, any network.
    #[default]
    Native,
    /// VNET/P: the bare Ethernet frame is the UDP payload.
    Vnet,
    /// VXLAN (RFC 7348), for kernels, Open vSwitch and hardware.
    Vxlan,
    /// Native frames over a TCP connection.
    Stream,
}

/// How datagrams are matched to a `vnet` link.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    strum::Display,
    strum::EnumString,
    strum::IntoStaticStr,
    strum::VariantNames,
)]
#[strum(serialize_all = "kebab-case")]
pub enum SourceMatch {
    /// By the remote's address, whatever the port: VNET/P sends from a port that its kernel chose.
    #[default]
    Address,
    /// By the remote's address and port.
    AddressPort,
}

/// A link's configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinkOptions {
    /// Name of the link on this host.
    pub name: String,
    /// The other host's address, with its bridge's first port. With [`ANYWHERE`](super::ANYWHERE) a sealed link learns the
    /// address from its peer.
    pub remote: SocketAddr,
    /// Number of consecutive ports of the other host's bridge, starting at that of `remote`: 1 to
    /// [`PORTS_MAX`](super::PORTS_MAX). A `vnet` link uses only the first.
    pub ports: u16,
    /// Networks on the link; `None` for all.
    pub networks: Option<Vec<NetworkId>>,
    /// Path MTU limit in bytes (IP packet), where the kernel's value is too large.
    pub mtu: Option<u16>,
    /// Kind of link, with its own options.
    pub kind: LinkKind,
}

/// Kind of link, with its own options.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LinkKind {
    /// Native datagrams over UDP.
    Native {
        /// Guests of the other host that have their own ports, by MAC address; at most [`DIRECT_MAX`](super::DIRECT_MAX).
        guests: Vec<(Mac, u16)>,
    },
    /// The classic VNET encapsulation: bare Ethernet frames over UDP.
    Classic(SourceMatch),
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
    /// True if the link's frames carry a hop count.
    pub fn counts_hops(&self) -> bool {
        matches!(self, LinkKind::Native { .. } | LinkKind::Stream(_))
    }

    /// The encapsulation.
    pub fn encapsulation(&self) -> Encapsulation {
        match self {
            LinkKind::Native { .. } => Encapsulation::Native,
            LinkKind::Classic(_) => Encapsulation::Vnet,
            LinkKind::Vxlan(_) => Encapsulation::Vxlan,
            LinkKind::Stream(_) => Encapsulation::Stream,
        }
    }
}

/// Access limits and encryption of a link.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Security {
    /// Seals the link: nothing is sent in clear text, and keys are agreed on with the host of this name.
    pub peer: Option<String>,
    /// Source MAC addresses that the other host may use; `None` for all.
    pub macs: Option<Vec<Mac>>,
    /// Rendezvous: name of the link to the relay through which two hosts meet that cannot reach each other; for sealed native
    /// links without a remote.
    pub via: Option<String>,
}
