//! Checks interfaces: each name, MAC address, socket and device has a single owner; so should each IP address.

use std::collections::HashMap;

use super::owner::Owners;
use crate::desired::{Desired, Item, Resource};
use crate::table::Problem;

/// Checks the names, addresses and resources of interfaces.
pub(super) fn check(desired: &Desired, problems: &mut Vec<Problem>) {
    let (mut names, mut macs, mut resources) = (Owners::new(), Owners::new(), Owners::new());
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

/// Warns of IP addresses that two interfaces of a network list: only one of the guests can be reached at it.
pub(super) fn warn(desired: &Desired, warnings: &mut Vec<Problem>) {
    let mut first = HashMap::new();
    for Item { place, spec } in &desired.interfaces {
        for address in &spec.addresses {
            let Some(other) = first.insert((spec.network, *address), &spec.name) else { continue };
            let text = format!(
                "interface {}: addresses lists {address}, as interface {other} does; give each guest its own",
                spec.name
            );
            warnings.push(Problem::new(place, text));
        }
    }
}
