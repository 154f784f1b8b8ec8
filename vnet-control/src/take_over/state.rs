//! What is handed over besides descriptors.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use vnet::frame::PortId;
use vnet::inherit::{GuestState, PortState};
use vnet::kernel::Counted;
use vnet::link::rendezvous::relay_succession::PairState;
use vnet::link::succession::SealedState;
use vnet::route::{LearnedStats, Sighting};

use crate::api::Counters;
use crate::indices::Assigned;

/// Settings and positions, which stay the same while they are handed over.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Estate {
    /// The configured state with all changes by commands, as a configuration file.
    pub settings: String,
    /// Where everything is.
    pub positions: Positions,
}

/// Ports and numbers of objects, which stay the same.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Positions {
    /// Ports of interfaces.
    pub interfaces: BTreeMap<String, PortId>,
    /// Ports of links.
    pub links: BTreeMap<String, PortId>,
    /// Guests by interface.
    #[serde(default)]
    pub guests: BTreeMap<String, GuestState>,
    /// Direct ports by interface.
    #[serde(default)]
    pub ports: BTreeMap<String, Vec<PortState>>,
    /// Numbers of the routes, in the order of the settings.
    pub routes: Vec<u32>,
    /// Number of the next route.
    pub next_route: u32,
    /// Numbers of links and interfaces in the control language.
    pub indices: Assigned,
}

impl Positions {
    /// True if no port belongs to two objects.
    pub(crate) fn is_consistent(&self) -> bool {
        let ports: Vec<_> = self.interfaces.values().chain(self.links.values()).collect();
        let different: BTreeSet<_> = ports.iter().collect();
        different.len() == ports.len() && ports.iter().all(|port| **port != PortId::NONE)
    }
}

/// Counters by name.
pub(crate) type Counts = BTreeMap<String, u64>;

/// The last state, once no frame moves any more.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Last {
    /// Counters of interfaces.
    pub interfaces: BTreeMap<String, Counts>,
    /// Counters of links.
    pub links: BTreeMap<String, Counts>,
    /// Counters of datagrams that belong to no link.
    pub bridge: Counts,
    /// Sum of the counters of removed ports.
    pub removed: Counters,
    /// Learned addresses.
    pub sightings: Vec<Sighting>,
    /// Their counters.
    pub learned: LearnedStats,
    /// Numbers of the next messages without a copy, by socket.
    #[serde(default)]
    pub zero_copies: BTreeMap<String, u32>,
    /// What has been counted of the kernel's flows.
    pub flows: Vec<Counted>,
}

/// The last state, and what holds keys, which never become text.
pub struct LastState {
    /// Counters and addresses.
    pub last: Last,
    /// The sealed links.
    pub sealed: Vec<SealedState>,
    /// The pairs of hosts that meet at this host.
    pub pairs: Vec<PairState>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_belongs_to_one_object() {
        let port = |name: &str, port| BTreeMap::from([(name.to_owned(), PortId(port))]);
        let at = |a, b| Positions { interfaces: port("a", a), links: port("b", b), ..Positions::default() };
        assert!(at(0, 1).is_consistent());
        assert!(!at(1, 1).is_consistent());
        assert!(!at(0, PortId::NONE.0).is_consistent());
    }
}
