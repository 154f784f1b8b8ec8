//! `[[route]]`: its keys.

use std::fmt;

use vnet::frame::NetworkId;
use vnet::route::Qualifier;

use super::key::{Applies, Declaration, field};
use super::kinds::{network, parsed};
use crate::desired::{Item, RouteSource, RouteSpec, Target};
use crate::table::{KeyTable, Notes};

/// `[[route]]`
pub static ROUTE: Declaration<RouteSpec> = Declaration {
    title: "[[route]]",
    applies: Applies::Reload,
    selector: None,
    default: || RouteSpec {
        network: NetworkId::DEFAULT,
        src: Qualifier::Any,
        dst: Qualifier::Any,
        from: RouteSource::Any,
        to: Target::Link(String::new()),
    },
    fields: &[
        field!("network", network(), |route: RouteSpec| route.network, "network in which the route applies")
            .phrase("network {}"),
        field!(
            "src",
            parsed::<Qualifier>("QUALIFIER"),
            |route: RouteSpec| route.src,
            "source: any, none, a MAC address or not-MAC"
        )
        .always(),
        field!(
            "dst",
            parsed::<Qualifier>("QUALIFIER"),
            |route: RouteSpec| route.dst,
            "destination: any, none, a MAC address or not-MAC"
        )
        .needed("\"52:54:00:00:00:02\"")
        .always(),
        field!(
            "from",
            parsed::<RouteSource>("PLACE"),
            |route: RouteSpec| route.from,
            "where matching frames enter: any, interface, link, interface NAME or link NAME"
        )
        .always(),
        field!(
            "to",
            parsed::<Target>("PLACE"),
            |route: RouteSpec| route.to,
            "where matching frames go: interface NAME or link NAME"
        )
        .needed("\"link h2\"")
        .always(),
    ],
};

pub(super) fn read(table: KeyTable, notes: &mut Notes) -> Option<Item<RouteSpec>> {
    let before = notes.problems.len();
    let item = super::host::read(&ROUTE, table, notes, |_, _| ());
    (notes.problems.len() == before).then_some(item)
}

impl fmt::Display for RouteSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(ROUTE.phrases(self).trim_start_matches(", "))
    }
}
