//! Links to other hosts.

use std::net::SocketAddr;

use vnet::frame::NetworkId;
use vnet::link::{ANYWHERE, Encapsulation, LinkKind, StreamOptions};
use vnet::wire::ethernet::Mac;

/// One link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinkSpec {
    /// Its name on this host.
    pub name: String,
    /// The other host; [`ANYWHERE`] when a sealed link learns that from its peer.
    pub remote: SocketAddr,
    /// Ports of the other host, from that of `remote` on.
    pub ports: u16,
    /// The networks it carries; all when absent.
    pub networks: Option<Vec<NetworkId>>,
    /// MTU of the path in bytes; found out when absent.
    pub mtu: Option<u16>,
    /// Its encapsulation, with the settings that only this one has.
    pub kind: LinkKind,
    /// What it lets through, and how.
    pub security: LinkSecurity,
}

impl LinkSpec {
    /// How its frames are wrapped.
    pub fn encapsulation(&self) -> Encapsulation {
        self.kind.encapsulation()
    }

    /// The remote as the configuration writes it: `ADDRESS:PORT`, `NAME:PORT` behind a proxy, or `anywhere`.
    pub fn remote_text(&self) -> String {
        match &self.kind {
            _ if self.remote == ANYWHERE => "anywhere".into(),
            LinkKind::Stream(StreamOptions { destination, .. }) => destination.to_string(),
            _ => self.remote.to_string(),
        }
    }

    /// True when one of its ports is among the `ports` ports from `first` on.
    pub fn has_port_of(&self, first: u16, ports: u16) -> bool {
        let last = |first: u16, ports: u16| first.saturating_add(ports - 1);
        let own = self.remote.port();
        first <= last(own, self.ports) && own <= last(first, ports)
    }

    /// The addresses that its datagrams go to and come from.
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

/// What a link lets through, and how.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LinkSecurity {
    /// Clear text may travel its path.
    pub trusted: bool,
    /// Nothing travels in clear text; the other host's certificate has to have this name.
    pub peer: Option<String>,
    /// Source addresses that frames from the other host may have, sorted; all when absent.
    pub macs: Option<Vec<Mac>>,
    /// The link to the host by which the two hosts meet, where neither reaches the other.
    pub via: Option<String>,
}
