//! Validation of a host's desired state as a whole: names, addresses and resources are used once, and every reference
//! resolves. Every change passes through here, whether it comes from a file, a command or the overlay.

use std::collections::{HashMap, HashSet};
use std::fmt::Display;
use std::hash::Hash;

pub(crate) mod files;
mod in_place;
pub(crate) mod links;
mod overlay;
pub(crate) mod security;

use vnet::frame::NetworkId;

use crate::desired::*;
use crate::table::{Place, Problem, quote};

/// Validates `desired` and adds what it finds to `problems`.
///
/// `broken` lists interfaces and links whose own tables were refused: references to them are not reported again.
pub fn check(desired: &Desired, broken: &[Target], problems: &mut Vec<Problem>) {
    limit("interfaces", &desired.interfaces, INTERFACES_MAX, problems);
    limit("links", &desired.links, LINKS_MAX, problems);
    limit("routes", &desired.routes, ROUTES_MAX, problems);
    check_bridge(desired, problems);
    check_networks(desired, problems);
    check_interfaces(desired, problems);
    check_links(desired, problems);
    in_place::check(desired, problems);
    security::check(desired, problems);
    check_routes(desired, broken, problems);
    overlay::check(desired, problems);
}

fn limit<T>(what: &str, items: &[Item<T>], most: usize, problems: &mut Vec<Problem>) {
    if let Some(item) = items.get(most) {
        let text = format!("more than {most} {what}, the limit of a host; spread them over more hosts");
        problems.push(Problem::new(&item.place, text));
    }
}

/// Keys that may have one user each.
struct Once<K>(HashMap<K, (String, Place)>);

impl<K: Hash + Eq> Once<K> {
    fn new() -> Once<K> {
        Once(HashMap::new())
    }

    fn is_taken(&self, key: &K) -> bool {
        self.0.contains_key(key)
    }

    /// Records `user` as the user of `key`; reports a problem when there is another.
    fn claim(
        &mut self,
        key: K,
        what: impl Display,
        user: String,
        place: &Place,
        problems: &mut Vec<Problem>,
    ) {
        match self.0.entry(key) {
            std::collections::hash_map::Entry::Occupied(taken) => {
                let (by, at) = taken.get();
                let text = format!("{what} is already used by {by}{}; choose another", at.aside());
                problems.push(Problem::new(place, text));
            }
            std::collections::hash_map::Entry::Vacant(free) => {
                free.insert((user, place.clone()));
            }
        }
    }
}

fn check_bridge(desired: &Desired, problems: &mut Vec<Problem>) {
    let (ports, threads) = (desired.bridge.spec.ports, desired.dispatch.spec.threads);
    if ports > 1 && usize::from(ports) < threads {
        let text = format!(
            "ports = {ports} for {threads} dispatchers leaves some without a port; write ports = {threads}, or 1 for all of them"
        );
        problems.push(Problem::new(&desired.bridge.place, text));
    }
    if ports > 1 && desired.overlay.is_some() {
        let text =
            "hosts of an [overlay] reach each other at one port; remove ports, or list the links instead";
        problems.push(Problem::new(&desired.bridge.place, text));
    }
}

fn check_networks(desired: &Desired, problems: &mut Vec<Problem>) {
    let mut seen = HashMap::new();
    for Item { place, spec } in &desired.networks {
        if let Some(first) = seen.insert(spec.id, place.clone()) {
            let text =
                format!("network {} is already declared{}; remove one of the two", spec.id, first.aside());
            problems.push(Problem::new(place, text));
        }
    }
    let mut declared = |network: NetworkId, place: &Place| {
        if network != NetworkId::DEFAULT && !seen.contains_key(&network) {
            let text = format!("network {network} is not declared; add [[network]] with id = {network}");
            problems.push(Problem::new(place, text));
        }
    };
    for Item { place, spec } in &desired.interfaces {
        declared(spec.network, place);
    }
    for Item { place, spec } in &desired.links {
        spec.networks.iter().flatten().for_each(|network| declared(*network, place));
    }
    for Item { place, spec } in &desired.routes {
        declared(spec.network, place);
    }
}

fn check_interfaces(desired: &Desired, problems: &mut Vec<Problem>) {
    let (mut names, mut macs, mut resources) = (Once::new(), Once::new(), Once::new());
    let control = Resource::Socket(desired.control.spec.socket.clone());
    resources.claim(control.clone(), &control, "the control API".into(), &desired.control.place, problems);
    for Item { place, spec } in &desired.interfaces {
        let user = || format!("interface {}", spec.name);
        names.claim(&spec.name, format!("the name '{}'", spec.name), "an interface".into(), place, problems);
        if let Some(mac) = spec.mac {
            macs.claim(mac, format!("mac {mac}"), user(), place, problems);
        }
        let resource = spec.attachment.resource();
        resources.claim(resource.clone(), resource, user(), place, problems);
    }
}

fn check_links(desired: &Desired, problems: &mut Vec<Problem>) {
    let (mut names, mut remotes) = (Once::new(), Once::new());
    for Item { place, spec } in &desired.links {
        names.claim(&spec.name, format!("the name '{}'", spec.name), "a link".into(), place, problems);
        // Received datagrams are matched to links by source address, so a remote belongs to one link.
        // If several claims are taken, report only the first.
        let claims = links::claims(spec);
        let taken = claims.iter().find(|what| remotes.is_taken(*what));
        for what in taken.map_or(&claims[..], std::slice::from_ref) {
            let user = format!("link {}", spec.name);
            remotes.claim(what.clone(), what, user, place, problems);
        }
        if let Some(text) = links::unusable(&desired.bridge.spec, spec) {
            problems.push(Problem::new(place, text));
        }
    }
}

fn check_routes(desired: &Desired, broken: &[Target], problems: &mut Vec<Problem>) {
    let interfaces: HashMap<_, _> =
        desired.interfaces.iter().map(|item| (item.spec.name.as_str(), &item.spec)).collect();
    let links: HashMap<_, _> =
        desired.links.iter().map(|item| (item.spec.name.as_str(), &item.spec)).collect();
    let mut seen = HashSet::new();
    for Item { place, spec } in &desired.routes {
        if !seen.insert(spec) {
            let text = format!(
                "the route ({spec}) is already there, so frames would arrive twice; remove one of them"
            );
            problems.push(Problem::new(place, text));
        }
        let from = match &spec.from {
            RouteSource::One(target) => Some(target),
            _ => None,
        };
        for target in from.into_iter().chain([&spec.to]).filter(|target| !broken.contains(target)) {
            let network = spec.network;
            let text = match target {
                Target::Interface(name) => match interfaces.get(name.as_str()) {
                    None => format!("the route names interface {}, {}", quote(name), missing(&interfaces)),
                    Some(interface) if interface.network != network => format!(
                        "the route is in network {network}, but interface {name} in network {}; write network = {}",
                        interface.network, interface.network
                    ),
                    Some(_) => continue,
                },
                Target::Link(name) => match links.get(name.as_str()) {
                    None if desired.overlay.is_some() => format!(
                        "the route names link {}, which the configuration does not have; links of the overlay come and go with \
                         their hosts, so no route may name one: add a [[link]] of that name with the host's address",
                        quote(name)
                    ),
                    None => format!("the route names link {}, {}", quote(name), missing(&links)),
                    Some(link) if !link.carries(network) => format!(
                        "link {name} does not carry network {network} of the route; add it to the link's networks"
                    ),
                    Some(_) => continue,
                },
            };
            problems.push(Problem::new(place, text));
        }
    }
}

/// Ends an error about an unknown name with the names that exist.
fn missing<T>(there: &HashMap<&str, T>) -> String {
    const NAMED_MAX: usize = 8;
    if there.is_empty() {
        return "which does not exist; there is none".into();
    }
    let mut names: Vec<_> = there.keys().copied().collect();
    names.sort_unstable();
    let more = if names.len() > NAMED_MAX { ", …" } else { "" };
    names.truncate(NAMED_MAX);
    format!("which does not exist; there is {}{more}", names.join(", "))
}
