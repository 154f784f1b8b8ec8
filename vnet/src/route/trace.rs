//! Explains a routing decision (`vnet trace`). Learns nothing and takes no storm tokens.

use super::learning::Learned;
use super::rule::{Flow, Rule};
use super::table::Table;
use crate::frame::PortId;
use crate::stats::DropReason;

/// The step that decides about a frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum By {
    /// The guard refuses the frame: unknown network, port not in the network, or source address not allowed.
    Guard,
    /// These rules, all of priority `priority`.
    Rules {
        /// The highest matching priority.
        priority: u8,
        /// All rules that share it, ordered by index.
        rules: Vec<Rule>,
    },
    /// The destination is configured on an interface or published by another host.
    Pinned,
    /// The destination was learned.
    Learned {
        /// Seconds since the last recorded sighting.
        age_s: u32,
        /// True when the address is frozen.
        frozen: bool,
    },
    /// The network learns, and the destination is a group address or unknown.
    Flood,
    /// No rule applies, and the network does not learn.
    Nothing,
}

/// Destinations of a frame, and the step that decided them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Explanation {
    /// The deciding step.
    pub by: By,
    /// The destinations, or the drop reason.
    pub outcome: Result<Vec<PortId>, DropReason>,
}

/// Explains what a router would decide about `flow`, without the storm limit and without learning its source.
pub fn explain(table: &Table, learned: &Learned, flow: &Flow, now_ms: u64) -> Explanation {
    let here = match table.admit(flow) {
        Ok(here) => here,
        Err(reason) => return Explanation { by: By::Guard, outcome: Err(reason) },
    };
    let mut found = vec![];
    if let Some(priority) = table.best(&here, flow, &mut found) {
        let mut list = vec![];
        let outcome = table.destinations(flow, &found, &mut list).map(|()| list);
        let rules = found.iter().map(|&place| *table.rule(place)).collect();
        return Explanation { by: By::Rules { priority, rules }, outcome };
    }
    if !here.network.learning {
        return Explanation { by: By::Nothing, outcome: Err(DropReason::NoRoute) };
    }
    let toward = |port| table.toward(&here, flow, port).map(|port| vec![port]);
    if let Some(port) = table.pinned(flow.network, flow.dst) {
        return Explanation { by: By::Pinned, outcome: toward(port) };
    }
    let known = learned.known(flow.network, flow.dst, now_ms);
    if let Some(address) = known.filter(|address| table.carries(address.last.port, flow.network)) {
        let age_s = (now_ms.saturating_sub(address.last.at_ms) / 1000) as u32;
        let by = By::Learned { age_s, frozen: address.is_frozen(now_ms) };
        return Explanation { by, outcome: toward(address.last.port) };
    }
    if let Some(port) = table.advised(flow.network, flow.dst) {
        return Explanation { by: By::Pinned, outcome: toward(port) };
    }
    let range = table.flood(&here);
    let ports = table.ring(range.start, range.len() as u32).to_vec();
    Explanation {
        by: By::Flood,
        outcome: if ports.is_empty() { Err(DropReason::NoRoute) } else { Ok(ports) },
    }
}
