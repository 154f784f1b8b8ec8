//! Checks networks: each is declared once, and every interface, link and route refers to a declared one.

use std::collections::HashMap;

use vnet::frame::NetworkId;

use crate::desired::{Desired, Item};
use crate::table::{Place, Problem};

/// Checks the networks of interfaces, links and routes.
pub(super) fn check(desired: &Desired, problems: &mut Vec<Problem>) {
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
