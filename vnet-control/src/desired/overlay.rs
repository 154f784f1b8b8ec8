//! How this host takes part in the distributed overlay.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

use vnet::frame::NetworkId;

use super::limits::is_name;
use crate::table::quote;

/// How this host takes part in the distributed overlay.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OverlaySpec {
    /// Members of the etcd cluster: `http://HOST:PORT` or `https://HOST:PORT`.
    pub etcd: Vec<String>,
    /// PEM file of the authorities that the store's certificate is checked against; there when an endpoint has https.
    pub ca: Option<PathBuf>,
    /// PEM files of this host's certificate and key for the store.
    pub identity: Option<(PathBuf, PathBuf)>,
    /// Which hosts have links to each other.
    pub topology: Topology,
    /// Hosts that relay for those behind NAT, the first that is there for all.
    pub reflectors: Vec<String>,
    /// Whether only reflectors can reach this host.
    pub behind_nat: bool,
    /// Where other hosts reach this one; found out when absent.
    pub address: Option<SocketAddr>,
    /// The networks that are published and joined; all that are declared when absent.
    pub networks: Option<Vec<NetworkId>>,
    /// Computed links are sealed, with the host that each leads to.
    pub sealed: bool,
    /// Clear text may travel computed links.
    pub trusted: bool,
}

/// Which hosts have links to each other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Topology {
    /// All that share a network; those behind NAT by way of a reflector.
    #[default]
    Mesh,
    /// All with one host, which relays.
    Hub(String),
    /// Those that the file links; the store only tells where stations are.
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
