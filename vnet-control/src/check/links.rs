//! What a link claims for itself, and why it may be unusable, by its encapsulation.

use std::net::{IpAddr, SocketAddr};

use vnet::link::{ANYWHERE, LinkKind, StreamOptions, VxlanOptions};
use vnet::wire::vxlan;

use crate::desired::{BridgeSpec, LinkSpec};

/// True when the link's datagrams arrive where the bridge listens, so that its own address would lead back to it.
pub(crate) fn arrives_at_bridge(link: &LinkSpec) -> bool {
    matches!(link.kind, LinkKind::Native { .. } | LinkKind::Classic)
}

/// What a link claims for itself among the host's links: the addresses it is known by, in words.
pub(crate) fn claims(link: &LinkSpec) -> Vec<String> {
    match &link.kind {
        LinkKind::Vxlan(VxlanOptions { flood, .. }) => {
            let mut addresses: Vec<_> = [link.remote.ip()].iter().chain(flood).copied().collect();
            addresses.sort();
            addresses.iter().map(|ip| format!("VTEP {ip}")).collect()
        }
        // A connection that comes in belongs to the link whose remote it comes from; from a proxy nobody comes.
        LinkKind::Stream(StreamOptions { proxy: None, .. }) => {
            vec![format!("stream peer {}", link.remote.ip())]
        }
        LinkKind::Stream(StreamOptions { destination, .. }) => vec![format!("stream to {destination}")],
        LinkKind::Native { .. } | LinkKind::Classic if link.remote == ANYWHERE => vec![],
        LinkKind::Native { .. } | LinkKind::Classic => {
            link.remotes().map(|remote| format!("remote {remote}")).collect()
        }
    }
}

/// Why a link cannot work, whatever the host is.
pub(crate) fn unusable(bridge: &BridgeSpec, link: &LinkSpec) -> Option<String> {
    let name = &link.name;
    match (&link.kind, bridge.vxlan_listen) {
        (LinkKind::Vxlan(_), None) => Some(format!(
            "link {name} needs VXLAN to be listened for; write vxlan_listen = \"[::]:{}\" in [bridge]",
            vxlan::PORT
        )),
        (LinkKind::Vxlan(_), Some(listen)) => unreachable(listen, 1, "vxlan_listen", link),
        (LinkKind::Stream(StreamOptions { connect: false, proxy: Some(_), .. }), _) => Some(format!(
            "link {name} waits for the other side to connect (connect = false), but names a proxy; remove one of them"
        )),
        (LinkKind::Stream(StreamOptions { connect: false, .. }), _) if bridge.stream_listen.is_none() => {
            Some(format!(
                "link {name} waits for the other side to connect; write stream_listen = \"[::]:9002\" in [bridge]"
            ))
        }
        (LinkKind::Stream(_), _) => None,
        (LinkKind::Native { .. } | LinkKind::Classic, _) if link.remote == ANYWHERE => None,
        (LinkKind::Native { .. } | LinkKind::Classic, _) => {
            unreachable(bridge.listen, bridge.ports, "listen", link)
        }
    }
}

/// Why a link cannot work, whatever the host is.
///
/// The host listens at `listen` and the ports behind it, `ports` all together; `key` is what that is called.
fn unreachable(listen: SocketAddr, ports: u16, key: &str, link: &LinkSpec) -> Option<String> {
    let LinkSpec { name, remote, .. } = link;
    let wildcard = listen.ip().is_unspecified();
    let own = if wildcard { remote.ip().is_loopback() } else { remote.ip() == listen.ip() };
    if own && link.has_port_of(listen.port(), ports) {
        return Some(to_oneself(link));
    }
    // [::] takes both; every other address only its own kind.
    let both = listen.ip() == IpAddr::from(std::net::Ipv6Addr::UNSPECIFIED);
    if !both && listen.is_ipv4() != remote.is_ipv4() {
        let (ours, theirs) = if listen.is_ipv4() { ("IPv4", "IPv6") } else { ("IPv6", "IPv4") };
        return Some(format!(
            "link {name} goes to {theirs} address {remote}, but [bridge] listens on {ours} only ({listen}); \
             write {key} = \"[::]:{}\"",
            listen.port()
        ));
    }
    None
}

/// The message about a link that leads back to its own host.
pub(crate) fn to_oneself(link: &LinkSpec) -> String {
    format!("link {} leads to this host itself ({}); name the other host's address", link.name, link.remote)
}
