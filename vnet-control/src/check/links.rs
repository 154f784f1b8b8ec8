//! Checks links: names and remotes are used once, and each link can work with this host's bridge. [`claims`] has the addresses that
//! a link of each kind claims on this host.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};

use vnet::link::{ANYWHERE, LinkKind, SourceMatch, StreamOptions, VxlanOptions};
use vnet::wire::vxlan;

use super::owner::Owners;
use crate::desired::{BridgeSpec, Desired, Item, LinkSpec};
use crate::table::Problem;

/// Checks the names, remotes and kinds of links.
pub(super) fn check(desired: &Desired, problems: &mut Vec<Problem>) {
    let (mut names, mut remotes, mut hosts) = (Owners::new(), Owners::new(), Hosts::default());
    for item in &desired.links {
        let Item { place, spec } = item;
        names.claim(&spec.name, format!("the name '{}'", spec.name), "a link".into(), place, problems);
        // Received datagrams are matched to links by source address, so a remote belongs to one link.
        // If several claims are taken, report only the first.
        let claims = claims(spec);
        let taken = claims.iter().find(|what| remotes.is_taken(*what));
        if let Some(text) = hosts.claim(item).filter(|_| taken.is_none()) {
            problems.push(Problem::new(place, text));
        }
        if spec.name.eq_ignore_ascii_case(&desired.host.spec.name) {
            let text = format!(
                "link {} has the name of this host itself; name it after the host at its other end, or this host differently \
                 ([host] name)",
                spec.name
            );
            problems.push(Problem::new(place, text));
        }
        for what in taken.map_or(&claims[..], std::slice::from_ref) {
            let user = format!("link {}", spec.name);
            remotes.claim(what.clone(), what, user, place, problems);
        }
        if let Some(text) = unusable(&desired.bridge.spec, spec) {
            problems.push(Problem::new(place, text));
        }
    }
}

/// True if the link's datagrams arrive at the bridge's ports, so that a remote at this host's own address would loop.
pub(crate) fn arrives_at_bridge(link: &LinkSpec) -> bool {
    matches!(link.kind, LinkKind::Native { .. } | LinkKind::Classic(_))
}

/// The addresses that identify the link on receive, as text; each may belong to one link only.
pub(crate) fn claims(link: &LinkSpec) -> Vec<String> {
    match &link.kind {
        LinkKind::Vxlan(VxlanOptions { flood, .. }) => {
            let mut addresses: Vec<_> = [link.remote.ip()].iter().chain(flood).copied().collect();
            addresses.sort();
            addresses.iter().map(|ip| format!("VTEP {ip}")).collect()
        }
        // Incoming connections are matched to links by source address; a proxy only connects outwards.
        LinkKind::Stream(StreamOptions { proxy: None, .. }) => {
            vec![format!("stream peer {}", link.remote.ip())]
        }
        LinkKind::Stream(StreamOptions { destination, .. }) => vec![format!("stream to {destination}")],
        LinkKind::Native { .. } | LinkKind::Classic(_) if link.remote == ANYWHERE => vec![],
        LinkKind::Native { .. } | LinkKind::Classic(_) => {
            link.remotes().map(|remote| format!("remote {remote}")).collect()
        }
    }
}

/// Links by remote IP address, to find pairs whose datagrams cannot be told apart because one of them matches by address alone.
#[derive(Default)]
pub(crate) struct Hosts<'a>(HashMap<IpAddr, &'a Item<LinkSpec>>);

impl<'a> Hosts<'a> {
    /// Records a link; returns an error text if its datagrams cannot be told apart from those of a link recorded before.
    pub(crate) fn claim(&mut self, item: &'a Item<LinkSpec>) -> Option<String> {
        let spec = &item.spec;
        if !arrives_at_bridge(spec) || spec.remote == ANYWHERE {
            return None;
        }
        let by_address = |spec: &LinkSpec| spec.kind == LinkKind::Classic(SourceMatch::Address);
        let ip = spec.remote.ip();
        let Some(first) = self.0.get(&ip).copied() else {
            self.0.insert(ip, item);
            return None;
        };
        let one = [spec, &first.spec].into_iter().find(|spec| by_address(spec))?;
        // Keep the link that matches all ports of the address, so that later links are compared with it.
        self.0.insert(ip, if by_address(spec) { item } else { first });
        Some(format!(
            "links {} and {}{} both lead to {ip}, and link {} takes the datagrams of all its ports; write source = \
             \"address-port\" for each of encapsulation vnet",
            spec.name,
            first.spec.name,
            first.place.aside(),
            one.name
        ))
    }
}

/// Reason why a link cannot work with these bridge settings.
pub(crate) fn unusable(bridge: &BridgeSpec, link: &LinkSpec) -> Option<String> {
    let name = &link.name;
    match (&link.kind, bridge.vxlan_listen) {
        (LinkKind::Vxlan(_), None) => Some(format!(
            "link {name} needs a VXLAN port; write vxlan_listen = \"[::]:{}\" in [bridge]",
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
        (LinkKind::Native { .. } | LinkKind::Classic(_), _) if link.remote == ANYWHERE => None,
        (LinkKind::Native { .. } | LinkKind::Classic(_), _) => {
            unreachable(bridge.listen, bridge.ports, "listen", link)
        }
    }
}

/// Reason why the link's remote cannot be reached from a host that listens at `ports` consecutive ports from `listen` on; `key`
/// is the setting of `listen`, for the message.
fn unreachable(listen: SocketAddr, ports: u16, key: &str, link: &LinkSpec) -> Option<String> {
    let LinkSpec { name, remote, .. } = link;
    let wildcard = listen.ip().is_unspecified();
    let own = if wildcard { remote.ip().is_loopback() } else { remote.ip() == listen.ip() };
    if own && link.has_port_of(listen.port(), ports) {
        return Some(to_oneself(link));
    }
    // [::] accepts IPv4 and IPv6; every other address only its own version.
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

/// Error text for a link whose remote is this host.
pub(crate) fn to_oneself(link: &LinkSpec) -> String {
    format!("link {} leads to this host itself ({}); name the other host's address", link.name, link.remote)
}
