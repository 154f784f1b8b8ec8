//! Interfaces' own underlay ports: `direct_port` and `direct_link` of an interface, `direct` of a link; reading and checking them.

use std::collections::HashMap;

use super::desired::{Attachment, Desired, DirectSpec, InterfaceSpec, Item, LinkSpec};
use super::table::{Problem, Reader, quote};
use vnet::link::{DIRECT_MAX, Encapsulation, Tunnel};
use vnet::wire::ethernet::Mac;

/// The keys of an interface.
pub(super) const KEYS: [&str; 2] = ["direct_port", "direct_link"];

/// Reads an interface's own port, and whose datagrams it takes.
pub(super) fn read_interface(reader: &mut Reader<'_>) -> Option<DirectSpec> {
    let [port_at, link_at] = KEYS.map(|key| reader.place_of(key));
    let port = reader.number("direct_port", 1, u16::MAX.into());
    let link = reader.text("direct_link").map(|(_, text)| text);
    match (port, link) {
        (Some(port), Some(link)) => Some(DirectSpec { port: port as u16, link }),
        (Some(_), None) => {
            reader.problem(&port_at, "direct_port takes datagrams of one link; write direct_link = \"h2\"");
            None
        }
        (None, Some(_)) => {
            reader.problem(&link_at, "direct_link needs a port; write direct_port = 9101");
            None
        }
        (None, None) => None,
    }
}

/// Reads which guests of a link's other host have ports of their own.
pub(super) fn read_link(reader: &mut Reader<'_>) -> Tunnel {
    let Some((place, texts)) = reader.texts("direct") else { return Tunnel::None };
    if texts.len() > DIRECT_MAX {
        reader.problem(&place, format!("direct lists {}, the limit is {DIRECT_MAX}", texts.len()));
    }
    let mut guests: Vec<(Mac, u16)> = vec![];
    for (place, text) in texts {
        let parts = text.rsplit_once('@').map(|(mac, port)| (mac.parse::<Mac>(), port.parse::<u16>()));
        match parts {
            Some((Ok(mac), Ok(port))) if port != 0 && !mac.is_multicast() => {
                if guests.iter().any(|(other, _)| *other == mac) {
                    reader.problem(&place, format!("direct names {mac} twice; remove one of them"));
                }
                guests.push((mac, port));
            }
            _ => {
                let text =
                    format!("direct: {} is no guest's port; write 52:54:00:00:00:02@9101", quote(&text));
                reader.problem(&place, text);
            }
        }
    }
    if guests.is_empty() { Tunnel::None } else { Tunnel::Direct(guests) }
}

/// Adds what is wrong between own ports and the rest of the state to `problems`.
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
        if !matches!(spec.tunnel, Tunnel::Direct(_)) {
            continue;
        }
        if let Some(why) = unfit(spec) {
            problems.push(Problem::new(place, format!("link {}: direct is for {why}", spec.name)));
        }
        if desired.bridge.spec.ports > 1 {
            let text = format!(
                "link {}: direct is for hosts with one port, for guests' own ports know one sender; remove ports from [bridge]",
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
        return Some(format!("direct_port {port} is used already by interface {other}; choose another"));
    }
    if bridge_ports.contains(port) {
        return Some(format!("direct_port {port} is one of [bridge] listen's; choose another"));
    }
    if spec.mac.is_none() {
        return Some(format!("direct_port {port} takes frames for the interface's address; give it a 'mac'"));
    }
    let Some(link) = link else {
        return Some(format!("direct_link {} does not exist; name a [[link]]", quote(name)));
    };
    unfit(link).map(|why| format!("direct_link {name}: direct_port is for {why}"))
}

/// Why a link's frames cannot come to guests' own ports.
fn unfit(link: &LinkSpec) -> Option<&'static str> {
    if link.encapsulation != Encapsulation::Native {
        return Some("native links only");
    }
    if link.security.peer.is_some() {
        return Some("links in clear text only: what is sealed has to be opened in memory of our own");
    }
    if link.ports > 1 {
        return Some("links with one port only: it is how the kernel knows the sender");
    }
    // Frames of several networks could stand in one message, and addresses in several networks.
    let one = link.networks.as_ref().is_some_and(|networks| networks.len() == 1);
    (!one).then_some("links that carry one network only; write networks = [1]")
}
