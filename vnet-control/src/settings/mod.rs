//! Settings: every key of the configuration, declared once.
//!
//! A [`Declaration`] lists the keys of one table. A [`Key`] has a name, type, limits, unit, default, the kinds that have the key,
//! the way in which a change takes effect, and help; a `Field` binds it to a member of a plain struct, which is often declared by
//! a room of the data plane. Everything else is derived:
//!
//! | what | made by |
//! |---|---|
//! | TOML of a file, JSON of a request, with all error messages | [`read_file`], [`interface_from`], … |
//! | JSON of answers | [`values`] |
//! | OpenAPI schemas of both | `openapi` |
//! | arguments of `vnet interface add`, `vnet link add`, `vnet route add`; help of `vnet interface set` | [`Declaration::described`] |
//! | the text of a spec in plans and logs | `Declaration::phrases` |
//! | what a change means: nothing, live, close and open again, restart | `Declaration::changed` |
//! | the tables of docs/configuration.md | [`document`] |
//! | the file that `vnet save` writes | [`save()`] |
//!
//! A new key for one room touches two files: the struct of that room, with the default, and a `field!` in a declaration
//! here. Constraints between keys of one table belong in its `judge` function; between tables, in `check`.

mod document;
mod host;
mod interface;
mod key;
mod kinds;
mod link;
#[cfg(feature = "openapi")]
pub mod openapi;
mod overlay;
mod route;
mod save;
#[cfg(test)]
mod tests;
pub mod values;

pub use document::{OVERLAY_TABLES, TABLES, document};
pub use host::{BRIDGE, CONTROL, DISPATCH, HOST, IDENTITY, NETWORK};
pub use interface::INTERFACE;
pub use key::{Applies, Declaration, Described, Key, Takes, plain};
pub use link::{LINK, LinkForm};
pub use overlay::OVERLAY;
pub use route::ROUTE;
pub use save::save;

use crate::desired::*;
use crate::table::{KeyTable, Notes, Place, Problem, Reader};

/// Reads the root table of a file, which begins at `top`. Invalid interfaces and links are left out, and their names are added to
/// `broken`.
pub(crate) fn read_file(
    table: KeyTable,
    top: &Place,
    notes: &mut Notes,
    broken: &mut Vec<Target>,
) -> Desired {
    let mut root = Reader::new("the file", table, notes);
    let [host, control, dispatch, bridge, identity] =
        ["host", "control", "dispatch", "bridge", "identity"].map(|key| root.table(key));
    let [networks, interfaces, links, routes] =
        ["network", "interface", "link", "route"].map(|key| root.tables(key));
    let overlay = root.table("overlay");
    root.finish();
    let or_top =
        |table: Option<KeyTable>| table.unwrap_or(KeyTable { place: top.clone(), ..KeyTable::default() });
    Desired {
        host: host::read_host(or_top(host), notes),
        control: host::read_control(or_top(control), notes),
        dispatch: host::read_dispatch(or_top(dispatch), notes),
        bridge: host::read_bridge(or_top(bridge), notes),
        overlay: overlay.and_then(|table| overlay::read(table, notes)),
        identity: identity.and_then(|table| host::read_identity(table, notes)),
        networks: networks.into_iter().filter_map(|table| host::read_network(table, notes)).collect(),
        interfaces: interfaces
            .into_iter()
            .filter_map(|table| interface::read(table, notes, broken))
            .collect(),
        links: links.into_iter().filter_map(|table| link::read(table, notes, broken)).collect(),
        routes: routes.into_iter().filter_map(|table| route::read(table, notes)).collect(),
    }
}

/// Reads an interface from a table with the keys of `[[interface]]`.
pub(crate) fn interface_from(table: KeyTable, notes: &mut Notes) -> Option<Item<InterfaceSpec>> {
    interface::read(table, notes, &mut vec![])
}

/// Changes an open interface; refuses keys that need a reopen.
pub(crate) fn change_interface(table: KeyTable, notes: &mut Notes, interface: &mut InterfaceSpec) {
    let mut reader = Reader::new("an open interface", table, notes);
    INTERFACE.read_live(&mut reader, interface);
    interface::judge(&mut reader, interface);
    reader.finish();
}

/// Reads a link from a table with the keys of `[[link]]`.
pub(crate) fn link_from(table: KeyTable, notes: &mut Notes) -> Option<Item<LinkSpec>> {
    link::read(table, notes, &mut vec![])
}

/// Reads a rule from a table with the keys of `[[route]]`.
pub(crate) fn route_from(table: KeyTable, notes: &mut Notes) -> Option<Item<RouteSpec>> {
    route::read(table, notes)
}

/// True if the change requires closing and reopening the interface.
pub(crate) fn reopens(is: &InterfaceSpec, wanted: &InterfaceSpec) -> bool {
    INTERFACE.changed(is, wanted).iter().any(|change| change.applies == Applies::Reopen)
}

/// The keys of `[dispatch]` that differ, each with both values as text.
pub(crate) fn dispatch_changes(
    is: &DispatchSpec,
    wanted: &DispatchSpec,
) -> Vec<(&'static str, String, String)> {
    let changed = DISPATCH.changed(is, wanted).into_iter();
    changed.map(|change| (change.key.name, change.from, change.to)).collect()
}

/// Differences that need a restart of vnetd, one problem each.
pub fn restart_needed(current: &Desired, desired: &Desired) -> Vec<Problem> {
    let (is, wanted) = (current, desired);
    let mut problems = CONTROL.restarts(&is.control.spec, &wanted.control.spec, &wanted.control.place);
    problems.extend(DISPATCH.restarts(&is.dispatch.spec, &wanted.dispatch.spec, &wanted.dispatch.place));
    problems.extend(BRIDGE.restarts(&is.bridge.spec, &wanted.bridge.spec, &wanted.bridge.place));
    let mut fixed = |place: &Place, what: &str| {
        let text = format!("{what}, which takes a restart of vnetd; nothing was changed");
        problems.push(Problem::new(place, text));
    };
    let top = &wanted.host.place;
    match (&is.overlay, &wanted.overlay) {
        (None, Some(item)) => fixed(&item.place, "[overlay] is new"),
        (Some(_), None) => fixed(top, "[overlay] is gone"),
        _ => {}
    }
    if is.identity != wanted.identity {
        let place = wanted.identity.as_ref().or(is.identity.as_ref()).map_or(top, |item| &item.place);
        let what = "[identity] names other files (to renew a certificate, replace those that are there)";
        fixed(place, what);
    }
    // The certificate names the host, and on a sealed link the names decide which host connects.
    if is.identity.is_some() && is.host != wanted.host {
        fixed(top, &format!("[host] name changes to {} beside an [identity]", wanted.host.spec.name));
    }
    if let (Some(is), Some(wanted)) = (&is.overlay, &wanted.overlay) {
        problems.extend(OVERLAY.restarts(&is.spec, &wanted.spec, &wanted.place));
    }
    problems
}
