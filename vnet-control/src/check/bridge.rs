//! Checks the bridge's settings: enough ports for all dispatchers, and a single port with an `[overlay]`.

use crate::desired::Desired;
use crate::table::Problem;

/// Checks the bridge's ports.
pub(super) fn check(desired: &Desired, problems: &mut Vec<Problem>) {
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
