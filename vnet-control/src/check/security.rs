//! Link security: no link carries clear text over an untrusted path.
//!
//! A link is accepted if it is sealed, its remote is on this machine or in a network of `[bridge] trusted`, or it sets `trusted =
//! true`. A sealed link needs an identity, and a peer whose name differs from this host's.

use std::net::IpAddr;

use vnet::link::sealed::identity::server_name;
use vnet::link::{ANYWHERE, Encapsulation, LinkKind, StreamOptions};

use crate::desired::{Desired, Item, LinkSpec};
use crate::table::{Problem, quote};

/// Checks the security of every link.
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
                "link {name} to {} is sealed, but the host has no [identity]; \
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
                "link {name} is sealed with {peer}, as link {} is{}; a host's name identifies it: name another peer",
                first.spec.name,
                first.place.aside()
            );
            problems.push(Problem::new(&item.place, text));
        }
        peers.push((peer.clone(), item));
    }
}

/// Checks a link that finds its peer by rendezvous at a third host (`via`).
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
            "link {name} goes via {}, which is not a sealed native link with a remote; name one",
            quote(via)
        );
        problems.push(Problem::new(&item.place, text));
    }
    if *remote != ANYWHERE || *ports != 1 {
        let text = format!(
            "link {name} goes via {}, so it discovers its remote; remove remote and ports",
            quote(via)
        );
        problems.push(Problem::new(&item.place, text));
    }
}

/// Reason why a link that the overlay computed is unsafe. The link is then left out; this is not a configuration error.
pub(crate) fn unsafe_link(desired: &Desired, link: &LinkSpec) -> Option<String> {
    let Some(peer) = &link.security.peer else { return clear(desired, link) };
    let own = peer.eq_ignore_ascii_case(&desired.host.spec.name);
    let own = own.then(|| format!("link {} would be sealed with this host's own name", link.name));
    own.or_else(|| server_name(peer).err().map(|why| format!("link {} cannot be sealed: {why}", link.name)))
}

/// Reason why a link in clear text is refused.
fn clear(desired: &Desired, link: &LinkSpec) -> Option<String> {
    let LinkSpec { name, remote, security, kind, .. } = link;
    if security.trusted {
        return None;
    }
    if let LinkKind::Stream(StreamOptions { proxy: Some(_), .. }) = kind {
        // The path behind the proxy is unknown.
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
