//! Settings of the distributed overlay.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

use vnet::frame::NetworkId;

use super::limits::is_name;
use crate::table::quote;

/// Default of `forward_s`: longer than other hosts take to learn a new location, even from a busy store.
const FORWARD_S: u32 = 10;

/// `[overlay]`: the store, and the links computed from it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OverlaySpec {
    /// Members of the etcd cluster: `http://HOST:PORT` or `https://HOST:PORT`.
    pub etcd: Vec<String>,
    /// PEM file of the authorities that verify the store's certificate; set if an endpoint uses https.
    pub ca: Option<PathBuf>,
    /// PEM files of this host's client certificate and key for the store.
    pub identity: Option<(PathBuf, PathBuf)>,
    /// Which hosts have links to each other.
    pub topology: Topology,
    /// Hosts that relay for hosts behind NAT; the first one that is present serves all.
    pub reflectors: Vec<String>,
    /// This host is behind NAT: only reflectors can reach it.
    pub behind_nat: bool,
    /// Address at which other hosts reach this one; detected if absent.
    pub address: Option<SocketAddr>,
    /// Networks to publish and join; all declared networks if absent.
    pub networks: Option<Vec<NetworkId>>,
    /// Computed links are sealed; the name of a link's other host is its peer.
    pub sealed: bool,
    /// Computed links may carry clear text.
    pub trusted: bool,
    /// How long this host forwards frames to a guest that has migrated to another host, in seconds.
    pub forward_s: u32,
    /// Folder of the last known state; if absent, the service manager's, or `/var/lib/vnet`.
    pub state: Option<PathBuf>,
}

impl Default for OverlaySpec {
    fn default() -> OverlaySpec {
        OverlaySpec {
            etcd: vec![],
            ca: None,
            identity: None,
            topology: Topology::default(),
            reflectors: vec![],
            behind_nat: false,
            address: None,
            networks: None,
            sealed: false,
            trusted: false,
            forward_s: FORWARD_S,
            state: None,
        }
    }
}

/// Which hosts have links to each other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Topology {
    /// A link between every two hosts that share a network; hosts behind NAT use a reflector.
    #[default]
    Mesh,
    /// Hub and spoke: every host has a link to the named hub, which relays.
    Hub(String),
    /// Only links of the configuration file; the store provides only station locations.
    Explicit,
}

impl FromStr for Topology {
    type Err = String;

    fn from_str(text: &str) -> Result<Topology, String> {
        match text.split_whitespace().collect::<Vec<_>>()[..] {
            ["mesh"] => Ok(Topology::Mesh),
            ["explicit"] => Ok(Topology::Explicit),
            ["hub", name] if is_name(name) => Ok(Topology::Hub(name.into())),
            _ => Err(format!("{} is not known; use 'mesh', 'hub NAME' or 'explicit'", quote(text))),
        }
    }
}

impl fmt::Display for Topology {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Topology::Mesh => f.write_str("mesh"),
            Topology::Hub(name) => write!(f, "hub {name}"),
            Topology::Explicit => f.write_str("explicit"),
        }
    }
}
