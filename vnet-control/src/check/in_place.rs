//! Checks receive in place: which interfaces and links may use an interface's own underlay port.

use std::collections::HashMap;

use vnet::link::{Encapsulation, LinkKind};

use crate::desired::{Attachment, Desired, DirectSpec, InterfaceSpec, Item, LinkSpec};
use crate::table::{Problem, quote};

/// Checks interfaces' own underlay ports against the rest of the desired state.
pub(super) fn check(desired: &Desired, problems: &mut Vec<Problem>) {
    let mut taken = HashMap::new();
    for Item { place, spec } in &desired.interfaces {
        let Attachment::VhostUser { direct: Some(direct), .. } = &spec.attachment else { continue };
        let link = desired.links.iter().map(|item| &item.spec).find(|link| link.name == direct.link);
        let before = taken.insert(direct.port, &spec.name);
        if let Some(text) = interface_problem(desired, spec, direct, link, before) {
            problems.push(Problem::new(place, text));
        }
    }
    for Item { place, spec } in &desired.links {
        if !matches!(&spec.kind, LinkKind::Native { guests } if !guests.is_empty()) {
            continue;
        }
        if let Some(why) = unfit(spec) {
            problems.push(Problem::new(place, format!("link {}: direct is for {why}", spec.name)));
        }
        if desired.bridge.spec.ports > 1 {
            let text = format!(
                "link {}: direct needs a host with one port, because guests' ports accept one sender; remove ports from [bridge]",
                spec.name
            );
            problems.push(Problem::new(place, text));
        }
    }
}

fn interface_problem(
    desired: &Desired,
    spec: &InterfaceSpec,
    direct: &DirectSpec,
    link: Option<&LinkSpec>,
    before: Option<&String>,
) -> Option<String> {
    let DirectSpec { port, link: name } = direct;
    let bridge = &desired.bridge.spec;
    let bridge_ports = bridge.listen.port()..=bridge.listen.port().saturating_add(bridge.ports - 1);
    if let Some(other) = before {
        return Some(format!("direct_port {port} is already used by interface {other}; choose another"));
    }
    if bridge_ports.contains(port) {
        return Some(format!("direct_port {port} belongs to [bridge] listen; choose another"));
    }
    if spec.mac.is_none() {
        return Some(format!(
            "direct_port {port} receives frames for the interface's address; give it a 'mac'"
        ));
    }
    let Some(link) = link else {
        return Some(format!("direct_link {} does not exist; name a [[link]]", quote(name)));
    };
    unfit(link).map(|why| format!("direct_link {name}: direct_port is for {why}"))
}

/// Reason why a link cannot deliver to interfaces' own underlay ports; `None` if it can.
fn unfit(link: &LinkSpec) -> Option<&'static str> {
    if link.encapsulation() != Encapsulation::Native {
        return Some("native links only");
    }
    if link.security.peer.is_some() {
        return Some("links in clear text only: sealed datagrams are decrypted in vnetd's memory first");
    }
    if link.ports > 1 {
        return Some("links with one port only: the kernel drops datagrams from any other");
    }
    // One message may mix frames of several networks, and a MAC address may occur in more than one.
    let one = link.networks.as_ref().is_some_and(|networks| networks.len() == 1);
    (!one).then_some("links that carry one network only; write networks = [1]")
}
