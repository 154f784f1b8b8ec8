//! Links to other hosts.

use std::net::SocketAddr;

use vnet::frame::NetworkId;
use vnet::link::{ANYWHERE, Encapsulation, LinkKind, StreamOptions};
use vnet::wire::ethernet::Mac;

/// Text shown for the remote of a link that has not learned it from its peer yet.
pub const UNKNOWN_REMOTE: &str = "anywhere";

/// One link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinkSpec {
    /// Name of the link on this host.
    pub name: String,
    /// Address of the other host; [`ANYWHERE`] while a sealed link learns it from its peer.
    pub remote: SocketAddr,
    /// Number of UDP ports of the other host, consecutive from that of `remote`.
    pub ports: u16,
    /// Networks that the link carries; all if absent.
    pub networks: Option<Vec<NetworkId>>,
    /// Path MTU in bytes; discovered when absent.
    pub mtu: Option<u16>,
    /// Encapsulation, with the settings that only this kind of link has.
    pub kind: LinkKind,
    /// Encryption, peer and admitted source addresses.
    pub security: LinkSecurity,
}

impl LinkSpec {
    /// The link's encapsulation.
    pub fn encapsulation(&self) -> Encapsulation {
        self.kind.encapsulation()
    }

    /// The remote as the configuration writes it: `ADDRESS:PORT`, `NAME:PORT` behind a proxy, or `anywhere`.
    pub fn remote_text(&self) -> String {
        match &self.kind {
            _ if self.remote == ANYWHERE => UNKNOWN_REMOTE.into(),
            LinkKind::Stream(StreamOptions { destination, .. }) => destination.to_string(),
            _ => self.remote.to_string(),
        }
    }

    /// True when the remote's port range overlaps `ports` ports from `first` on.
    pub fn has_port_of(&self, first: u16, ports: u16) -> bool {
        let last = |first: u16, ports: u16| first.saturating_add(ports - 1);
        let own = self.remote.port();
        first <= last(own, self.ports) && own <= last(first, ports)
    }

    /// The addresses of the other host: one per port.
    pub fn remotes(&self) -> impl Iterator<Item = SocketAddr> {
        let remote = self.remote;
        let ports = (0..self.ports).map_while(move |offset| remote.port().checked_add(offset));
        ports.map(move |port| {
            let mut address = remote;
            address.set_port(port);
            address
        })
    }

    /// True when the link carries frames of `network`.
    pub fn carries(&self, network: NetworkId) -> bool {
        self.networks.as_ref().is_none_or(|networks| networks.contains(&network))
    }
}

/// Encryption, peer and admitted source addresses of a link.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LinkSecurity {
    /// The path is trusted: the link may carry clear text.
    pub trusted: bool,
    /// Name in the certificate of a sealed link's other host. `None`: clear text.
    pub peer: Option<String>,
    /// Admitted source MAC addresses of received frames, sorted; all when absent.
    pub macs: Option<Vec<Mac>>,
    /// Rendezvous: name of the link to a host that both sides reach, so that two hosts behind NAT find each other.
    pub via: Option<String>,
}
