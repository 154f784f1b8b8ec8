//! Checks `[overlay]` against the rest of the configuration.

use vnet::frame::NetworkId;

use crate::desired::{Desired, Item, Topology};
use crate::table::Problem;

pub(crate) fn check(desired: &Desired, problems: &mut Vec<Problem>) {
    let Some(Item { place, spec }) = &desired.overlay else { return };
    if spec.sealed && desired.identity.is_none() {
        let text = format!(
            "[overlay] sealed needs an [identity]; make one with 'vnet keys init' and 'vnet keys issue {}'",
            desired.host.spec.name
        );
        problems.push(Problem::new(place, text));
    }
    let safe = spec.sealed || spec.trusted || spec.topology == Topology::Explicit;
    if !safe && desired.bridge.spec.trusted.is_empty() {
        let text = "the overlay's links would carry frames in clear text; write sealed = true, or trusted = true if their \
                    paths are safe (or the paths' networks in [bridge] trusted)";
        problems.push(Problem::new(place, text));
    }
    for network in spec.networks.iter().flatten() {
        let declared = desired.networks.iter().any(|item| item.spec.id == *network);
        if !declared && *network != NetworkId::DEFAULT {
            let text = format!("network {network} is not declared; add [[network]] with id = {network}");
            problems.push(Problem::new(place, text));
        }
    }
    if let Some(address) = spec.address
        && !desired.bridge.spec.listen.ip().is_unspecified()
        && desired.bridge.spec.listen.is_ipv4() != address.is_ipv4()
    {
        let listen = desired.bridge.spec.listen;
        let text = format!("[overlay] address {address} differs in IP version from [bridge] listen {listen}");
        problems.push(Problem::new(place, text));
    }
}
