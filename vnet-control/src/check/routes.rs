//! Checks routes: the interfaces and links that they name exist, and which routes share frames.

use std::collections::{HashMap, HashSet};

use vnet::route::Qualifier;

use crate::desired::*;
use crate::table::{Problem, quote};

pub(super) fn check(desired: &Desired, broken: &[Target], problems: &mut Vec<Problem>) {
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

/// Completes an error about an unknown name with the list of existing names.
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

/// Warns of routes to every address that tie with routes to one address: VNET's priorities rank both equal, so each frame to that
/// address is sent to both destinations. One warning for each route to every address.
pub(super) fn warn(desired: &Desired, warnings: &mut Vec<Problem>) {
    let key = |spec: &RouteSpec| match spec.src {
        Qualifier::Any | Qualifier::Is(_) => Some((spec.network, spec.src)),
        Qualifier::Not(_) | Qualifier::None => None,
    };
    let mut exact: HashMap<_, Vec<&Item<RouteSpec>>> = HashMap::new();
    let defaults: Vec<_> = desired.routes.iter().filter(|item| item.spec.dst == Qualifier::Any).collect();
    if defaults.is_empty() {
        return;
    }
    for item in desired.routes.iter().filter(|item| matches!(item.spec.dst, Qualifier::Is(_))) {
        key(&item.spec).into_iter().for_each(|key| exact.entry(key).or_default().push(item));
    }
    for Item { place, spec } in defaults {
        let Some(others) = key(spec).and_then(|key| exact.get(&key)) else { continue };
        let mut ties = others.iter().filter(|other| overlap(&other.spec.from, &spec.from));
        let Some(first) = ties.next() else { continue };
        let more = match ties.count() {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        let text = format!(
            "the route ({spec}) has the same priority as the route ({}){}{more}: both get the frames to that address, as in \
             VNET/P; for a route that only takes what no other does, write dst = \"not-00:00:00:00:00:00\"",
            first.spec,
            first.place.aside()
        );
        warnings.push(Problem::new(place, text));
    }
}

/// True if frames of one origin can match both sources.
fn overlap(a: &RouteSource, b: &RouteSource) -> bool {
    use RouteSource::{Any, AnyInterface, AnyLink, One};
    match (a, b) {
        (Any, _) | (_, Any) => true,
        (AnyInterface, One(Target::Interface(_))) | (One(Target::Interface(_)), AnyInterface) => true,
        (AnyLink, One(Target::Link(_))) | (One(Target::Link(_)), AnyLink) => true,
        (a, b) => a == b,
    }
}
