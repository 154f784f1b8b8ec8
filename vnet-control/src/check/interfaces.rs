//! Checks interfaces: each name, MAC address, socket and device has a single owner.

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
