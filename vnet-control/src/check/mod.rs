//! Validation of a host's desired state as a whole: names, addresses and resources are used once, and every reference resolves.
//! Every change passes these checks, whether it comes from a file, a command or the overlay.

mod bridge;
pub(crate) mod files;
mod in_place;
mod interfaces;
pub(crate) mod links;
mod networks;
mod overlay;
mod owner;
mod routes;
pub(crate) mod security;

use crate::desired::*;
use crate::table::Problem;

/// Validates `desired` and appends errors to `problems`.
///
/// `broken` lists interfaces and links whose own tables were refused: references to them are not reported again.
pub fn check(desired: &Desired, broken: &[Target], problems: &mut Vec<Problem>) {
    limit("interfaces", &desired.interfaces, INTERFACES_MAX, problems);
    limit("links", &desired.links, LINKS_MAX, problems);
    limit("routes", &desired.routes, ROUTES_MAX, problems);
    bridge::check(desired, problems);
    networks::check(desired, problems);
    interfaces::check(desired, problems);
    links::check(desired, problems);
    in_place::check(desired, problems);
    security::check(desired, problems);
    routes::check(desired, broken, problems);
    overlay::check(desired, problems);
}

/// Appends warnings about settings that are valid but do not have the effect that they suggest.
pub fn warn(desired: &Desired, warnings: &mut Vec<Problem>) {
    bridge::warn(desired, warnings);
    interfaces::warn(desired, warnings);
    routes::warn(desired, warnings);
}

fn limit<T>(what: &str, items: &[Item<T>], most: usize, problems: &mut Vec<Problem>) {
    if let Some(item) = items.get(most) {
        let text = format!("more than {most} {what}, the limit of a host; spread them over more hosts");
        problems.push(Problem::new(&item.place, text));
    }
}
