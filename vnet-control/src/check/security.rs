//! Whether links are safe: sealed with somebody else, or on a path where clear text may travel.
//!
//! A link is safe unless its writer says otherwise: it is sealed, or it stays on this machine, or its remote is in a
//! network of `[bridge] trusted`, or it says `trusted = true`.

use std::net::IpAddr;

use vnet::link::sealed::identity::server_name;
use vnet::link::{ANYWHERE, Encapsulation, LinkKind, StreamOptions};

use crate::desired::{Desired, Item, LinkSpec};
use crate::table::{Problem, quote};

/// Adds what is wrong between links and the host's security to `problems`.
pub(crate) fn check(desired: &Desired, problems: &mut Vec<Problem>) {
    let mut peers: Vec<(String, &Item<LinkSpec>)> = vec![];
    for item in &desired.links {
        check_meeting(desired, item, problems);
        let LinkSpec { name, security, .. } = &item.spec;
        let Some(peer) = &security.peer else {
            if let Some(text) = clear(desired, &item.spec) {
                problems.push(Problem::new(&item.place, text));
            }
            continue;
        };
        let own = &desired.host.spec.name;
        if desired.identity.is_none() {
            let text = format!(
                "link {name} is sealed, but there is no [identity] to be known by at {}; \
                 make one with 'vnet keys init' and 'vnet keys issue {own}'",
                item.spec.remote_text()
            );
            problems.push(Problem::new(&item.place, text));
        } else if let Err(why) = server_name(own) {
            problems.push(Problem::new(&desired.host.place, why));
        }
        if peer.eq_ignore_ascii_case(own) {
            let text = format!(
                "link {name} is sealed with '{peer}', which is this host's own name; write peer = \"…\""
            );
            problems.push(Problem::new(&item.place, text));
        }
        if let Some((_, first)) = peers.iter().find(|(other, _)| other.eq_ignore_ascii_case(peer)) {
            let text = format!(
                "link {name} is sealed with {peer}, as link {} is{}; hosts are told apart by their names: name another peer",
                first.spec.name,
                first.place.aside()
            );
            problems.push(Problem::new(&item.place, text));
        }
        peers.push((peer.clone(), item));
    }
}

/// Adds what is wrong with links whose hosts meet by a third one to `problems`.
fn check_meeting(desired: &Desired, item: &Item<LinkSpec>, problems: &mut Vec<Problem>) {
    let LinkSpec { name, remote, ports, security, .. } = &item.spec;
    let Some(via) = &security.via else { return };
    let between = desired.links.iter().find(|other| other.spec.name == *via).map(|other| &other.spec);
    let good = between.is_some_and(|between| {
        let sealed = between.encapsulation() == Encapsulation::Native && between.security.peer.is_some();
        sealed && between.security.via.is_none() && between.remote != ANYWHERE
    });
    if !good {
        let text = format!(
            "link {name} goes via {}, which is no sealed native link with a remote; name one",
            quote(via)
        );
        problems.push(Problem::new(&item.place, text));
    }
    if *remote != ANYWHERE || *ports != 1 {
        let text = format!(
            "link {name} goes via {}, so its remote is found out; remove remote and ports",
            quote(via)
        );
        problems.push(Problem::new(&item.place, text));
    }
}

/// Why a link that the overlay asks for is refused: no mistake in the configuration, but nothing to be done.
pub(crate) fn unsafe_link(desired: &Desired, link: &LinkSpec) -> Option<String> {
    let Some(peer) = &link.security.peer else { return clear(desired, link) };
    let own = peer.eq_ignore_ascii_case(&desired.host.spec.name);
    let own = own.then(|| format!("link {} would be sealed with this host's own name", link.name));
    own.or_else(|| server_name(peer).err().map(|why| format!("link {} cannot be sealed: {why}", link.name)))
}

/// Why a link in clear text is refused.
fn clear(desired: &Desired, link: &LinkSpec) -> Option<String> {
    let LinkSpec { name, remote, security, kind, .. } = link;
    if security.trusted {
        return None;
    }
    if let LinkKind::Stream(StreamOptions { proxy: Some(_), .. }) = kind {
        // The path goes on behind the proxy, nobody knows where.
        return Some(format!(
            "link {name} would carry frames through a proxy to {} in clear text; write sealed = true, or trusted = true if \
             its path is safe",
            link.remote_text()
        ));
    }
    let flood = if let LinkKind::Vxlan(vxlan) = kind { &vxlan.flood[..] } else { &[] };
    let near =
        |ip: IpAddr| ip.is_loopback() || desired.bridge.spec.trusted.iter().any(|prefix| prefix.contains(ip));
    let mut leads_to = std::iter::once(remote.ip()).chain(flood.iter().copied()).map(|ip| ip.to_canonical());
    let ip = leads_to.find(|ip| !near(*ip))?;
    Some(match link.encapsulation() {
        Encapsulation::Native | Encapsulation::Stream => format!(
            "link {name} would carry frames to {ip} in clear text; write sealed = true, or trusted = true if its path is safe \
             (or the path's network in [bridge] trusted)"
        ),
        encapsulation => format!(
            "link {name} would carry frames to {ip} in clear text, as the {encapsulation} encapsulation does; use a sealed \
             native or stream link, or write trusted = true if its path is safe"
        ),
    })
}
