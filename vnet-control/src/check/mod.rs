//! Validation of a host's desired state as a whole: names, addresses and resources are used once, and every reference
//! resolves. Every change passes through here, whether it comes from a file, a command or the overlay.

use std::collections::HashMap;
use std::fmt::Display;
use std::hash::Hash;

pub(crate) mod files;
mod in_place;
pub(crate) mod links;
mod overlay;
mod routes;
pub(crate) mod security;

use vnet::frame::NetworkId;

use crate::desired::*;
use crate::table::{Place, Problem};

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
    routes::check(desired, broken, problems);
    overlay::check(desired, problems);
}

/// Adds what is allowed but does not do what it seems to.
pub fn warn(desired: &Desired, warnings: &mut Vec<Problem>) {
    routes::warn(desired, warnings);
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
    let (mut names, mut remotes, mut hosts) = (Once::new(), Once::new(), links::Hosts::default());
    for item in &desired.links {
        let Item { place, spec } = item;
        names.claim(&spec.name, format!("the name '{}'", spec.name), "a link".into(), place, problems);
        // Received datagrams are matched to links by source address, so a remote belongs to one link.
        // If several claims are taken, report only the first.
        let claims = links::claims(spec);
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
        if let Some(text) = links::unusable(&desired.bridge.spec, spec) {
            problems.push(Problem::new(place, text));
        }
    }
}
