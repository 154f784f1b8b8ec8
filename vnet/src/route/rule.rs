//! Routing configuration: VNET/P's rules, networks and their members.
//!
//! A rule applies to a frame when its network, both qualifiers and its source match. Its priority depends only on the *kinds* of
//! its qualifiers, never on the frame, so it is computed when the table is built.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::frame::{Frame, NetworkId, PortId};
use crate::wire::ethernet::Mac;

/// A rule's condition on a MAC address (VNET/P, section 4).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Qualifier {
    /// Matches no address: the rule never applies.
    None,
    /// Matches every address.
    Any,
    /// Matches every address but this.
    Not(Mac),
    /// Matches this address only.
    Is(Mac),
}

impl Qualifier {
    /// True when the qualifier matches `mac`.
    #[inline]
    pub fn fits(self, mac: Mac) -> bool {
        match self {
            Qualifier::None => false,
            Qualifier::Any => true,
            Qualifier::Not(other) => other != mac,
            Qualifier::Is(own) => own == mac,
        }
    }

    /// The qualifier's row or column in [`PRIORITY`].
    fn class(self) -> Option<usize> {
        match self {
            Qualifier::None => None,
            Qualifier::Not(_) => Some(0),
            Qualifier::Any => Some(1),
            Qualifier::Is(_) => Some(2),
        }
    }
}

/// Error for a string that is not a qualifier.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is not a MAC qualifier; write any, none, xx:xx:xx:xx:xx:xx or not-xx:xx:xx:xx:xx:xx")]
pub struct QualifierError(pub String);

impl FromStr for Qualifier {
    type Err = QualifierError;

    /// Parses `none`, `any`, `not-xx:xx:xx:xx:xx:xx` or `xx:xx:xx:xx:xx:xx`; keywords in either case.
    fn from_str(text: &str) -> Result<Qualifier, QualifierError> {
        let error = |_| QualifierError(text.chars().take(64).collect());
        if text.eq_ignore_ascii_case("none") {
            return Ok(Qualifier::None);
        }
        if text.eq_ignore_ascii_case("any") {
            return Ok(Qualifier::Any);
        }
        match text.split_at_checked(4) {
            Some((not, mac)) if not.eq_ignore_ascii_case("not-") => {
                mac.parse().map(Qualifier::Not).map_err(error)
            }
            _ => text.parse().map(Qualifier::Is).map_err(error),
        }
    }
}

impl fmt::Display for Qualifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Qualifier::None => f.write_str("none"),
            Qualifier::Any => f.write_str("any"),
            Qualifier::Not(mac) => write!(f, "not-{mac}"),
            Qualifier::Is(mac) => mac.fmt(f),
        }
    }
}

impl TryFrom<String> for Qualifier {
    type Error = QualifierError;
    fn try_from(text: String) -> Result<Qualifier, QualifierError> {
        text.parse()
    }
}

impl From<Qualifier> for String {
    fn from(qualifier: Qualifier) -> String {
        qualifier.to_string()
    }
}

/// The side of the core that a port is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PortKind {
    /// A guest's virtual NIC, or the local network.
    Interface,
    /// A tunnel to another host.
    Link,
}

/// Condition on the ingress port of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RuleSource {
    /// Any port.
    Any,
    /// Any interface.
    AnyInterface,
    /// Any link.
    AnyLink,
    /// This port.
    Port(PortId),
}

impl RuleSource {
    /// True when the condition includes `port`, which is of kind `kind`.
    #[inline]
    pub(super) fn covers(self, port: PortId, kind: PortKind) -> bool {
        match self {
            RuleSource::Any => true,
            RuleSource::AnyInterface => kind == PortKind::Interface,
            RuleSource::AnyLink => kind == PortKind::Link,
            RuleSource::Port(own) => own == port,
        }
    }
}

/// One VNET rule: frames of `network` that match `src`, `dst` and `from` go to `to`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rule {
    /// Number assigned when the rule was added: counted from 1, never reused.
    pub index: u32,
    /// Network of the rule.
    pub network: NetworkId,
    /// Condition on the source address.
    pub src: Qualifier,
    /// Condition on the destination address.
    pub dst: Qualifier,
    /// Condition on the ingress port.
    pub from: RuleSource,
    /// Destination port.
    pub to: PortId,
}

/// VNET/P's published priorities as `[source][destination]`, each in the order NOT, ANY, DIRECT. The highest matching priority
/// wins.
const PRIORITY: [[u8; 3]; 3] = [[3, 5, 7], [5, 6, 6], [7, 8, 8]];

impl Rule {
    /// The rule's priority, 3 to 8; `None` when it never applies.
    pub fn priority(&self) -> Option<u8> {
        Some(PRIORITY[self.src.class()?][self.dst.class()?])
    }
}

/// The inputs of a routing decision, besides time: network, addresses and ingress port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Flow {
    /// Network of the flow.
    pub network: NetworkId,
    /// Source address.
    pub src: Mac,
    /// Destination address.
    pub dst: Mac,
    /// Ingress port.
    pub from: PortId,
}

impl From<&Frame> for Flow {
    #[inline]
    fn from(frame: &Frame) -> Flow {
        Flow { network: frame.network, src: frame.src, dst: frame.dst, from: frame.from }
    }
}

/// The networks of a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Networks {
    /// Every network.
    All,
    /// These networks, in ascending order (see [`Networks::only`]).
    Only(Box<[NetworkId]>),
}

impl Networks {
    /// Restricts a port to the named networks, in any order.
    pub fn only(networks: impl IntoIterator<Item = NetworkId>) -> Networks {
        let mut networks: Vec<NetworkId> = networks.into_iter().collect();
        networks.sort_unstable();
        networks.dedup();
        Networks::Only(networks.into_boxed_slice())
    }

    /// True when `network` is included.
    pub fn contains(&self, network: NetworkId) -> bool {
        match self {
            Networks::All => true,
            Networks::Only(networks) => networks.binary_search(&network).is_ok(),
        }
    }
}

/// A port as the routing table sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Slot of the port.
    pub port: PortId,
    /// The side of the core that the port is on.
    pub kind: PortKind,
    /// Networks whose frames may enter and leave here.
    pub networks: Networks,
    /// The guest's configured address: always located at this port, never learned.
    pub mac: Option<Mac>,
    /// Storm limit: flooded frames per second; `None`: no limit.
    pub storm_frames_per_s: Option<u32>,
    /// False for a link whose encapsulation carries no hop count: only rules forward its frames to other links. Learning or
    /// flooding could send them round a loop forever.
    pub counts_hops: bool,
    /// Port security: only `mac` may be a source address at this port. Without a `mac`, no frame may enter.
    pub port_security: bool,
}

/// A network's configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NetworkSpec {
    /// Network id.
    pub id: NetworkId,
    /// True to learn sources, and to flood frames that have neither a rule nor a known destination.
    pub learning: bool,
    /// Ageing time in seconds ([`AGEING_S`] by default). 0 makes the network a hub: nothing is learned, and frames without a rule
    /// are flooded.
    pub ageing_s: u32,
}

/// Default ageing time in seconds (IEEE 802.1Q, table 8-6).
pub const AGEING_S: u32 = 300;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn qualifier_text_round_trip() {
        for (text, shown) in [
            ("none", "none"),
            ("NONE", "none"),
            ("Any", "any"),
            ("52:54:00:AB:cd:ef", "52:54:00:ab:cd:ef"),
            ("NOT-52:54:00:ab:cd:ef", "not-52:54:00:ab:cd:ef"),
        ] {
            let qualifier: Qualifier = text.parse().unwrap();
            assert_eq!(qualifier.to_string(), shown);
            assert_eq!(shown.parse(), Ok(qualifier));
        }
        for bad in
            ["", "not", "not-", "not-any", "anyx", "not52:54:00:ab:cd:ef", "nöt-52:54:00:ab:cd:ef", "*"]
        {
            assert!(bad.parse::<Qualifier>().unwrap_err().to_string().contains("write any"), "{bad}");
        }
    }

    #[test]
    fn a_rule_is_small() {
        // A route may take 200 bytes, index included (ARCHITECTURE.md, Limits).
        assert!(size_of::<Rule>() <= 28);
    }
}
