//! What a configuration says about routing: VNET/P's rules, networks and their members.
//!
//! A rule applies to a frame when its network, both its qualifiers and its source fit. Its priority then depends on the
//! *kinds* of its qualifiers alone, never on the frame, so it is known when the table is built.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::frame::{Frame, NetworkId, PortId};
use crate::wire::ethernet::Mac;

/// What a rule asks of a MAC address (VNET/P, section 4).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Qualifier {
    /// Fits no address: the rule never applies.
    None,
    /// Fits every address.
    Any,
    /// Fits every address but this.
    Not(Mac),
    /// Fits this address alone.
    Is(Mac),
}

impl Qualifier {
    /// True when the qualifier fits `mac`.
    #[inline]
    pub fn fits(self, mac: Mac) -> bool {
        match self {
            Qualifier::None => false,
            Qualifier::Any => true,
            Qualifier::Not(other) => other != mac,
            Qualifier::Is(own) => own == mac,
        }
    }

    /// Row or column in [`PRIORITY`].
    fn class(self) -> Option<usize> {
        match self {
            Qualifier::None => None,
            Qualifier::Not(_) => Some(0),
            Qualifier::Any => Some(1),
            Qualifier::Is(_) => Some(2),
        }
    }
}

/// A text that is not a qualifier.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is not a MAC qualifier; write any, none, xx:xx:xx:xx:xx:xx or not-xx:xx:xx:xx:xx:xx")]
pub struct QualifierError(pub String);

impl FromStr for Qualifier {
    type Err = QualifierError;

    /// Reads `none`, `any`, `not-xx:xx:xx:xx:xx:xx` or `xx:xx:xx:xx:xx:xx`; keywords in either case.
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

/// Which side of the core a port is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PortKind {
    /// A guest's virtual NIC, or the local network.
    Interface,
    /// A way to another host.
    Link,
}

/// Where a frame must have come from for a rule to apply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Source {
    /// Anywhere.
    Any,
    /// Any interface.
    AnyInterface,
    /// Any link.
    AnyLink,
    /// This port.
    Port(PortId),
}

impl Source {
    /// True when a frame from `port` of kind `kind` is meant.
    #[inline]
    pub fn covers(self, port: PortId, kind: PortKind) -> bool {
        match self {
            Source::Any => true,
            Source::AnyInterface => kind == PortKind::Interface,
            Source::AnyLink => kind == PortKind::Link,
            Source::Port(own) => own == port,
        }
    }
}

/// One VNET rule: frames of `network` that fit `src`, `dst` and `from` go to `to`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rule {
    /// The number it was given when it was added: counted from 1, never reused.
    pub index: u32,
    /// The network it belongs to.
    pub network: NetworkId,
    /// What the frame's source address must be.
    pub src: Qualifier,
    /// What the frame's destination address must be.
    pub dst: Qualifier,
    /// Where the frame must have come from.
    pub from: Source,
    /// Where a copy goes.
    pub to: PortId,
}

/// VNET/P's published priorities, `[source][destination]`, each NOT, ANY, DIRECT. The highest that applies wins.
const PRIORITY: [[u8; 3]; 3] = [[3, 5, 7], [5, 6, 6], [7, 8, 8]];

impl Rule {
    /// The rule's priority where it applies, 3 to 8; `None` when it never applies.
    pub fn priority(&self) -> Option<u8> {
        Some(PRIORITY[self.src.class()?][self.dst.class()?])
    }
}

/// What a routing decision depends on, besides time: where a frame comes from and its addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flow {
    /// The network it belongs to.
    pub network: NetworkId,
    /// Source address.
    pub src: Mac,
    /// Destination address.
    pub dst: Mac,
    /// The port where it entered the core.
    pub from: PortId,
}

impl From<&Frame> for Flow {
    #[inline]
    fn from(frame: &Frame) -> Flow {
        Flow { network: frame.network, src: frame.src, dst: frame.dst, from: frame.from }
    }
}

/// The networks that a port is part of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Networks {
    /// Every network there is.
    All,
    /// These, in ascending order (see [`Networks::only`]).
    Only(Box<[NetworkId]>),
}

impl Networks {
    /// The named networks, in any order.
    pub fn only(networks: impl IntoIterator<Item = NetworkId>) -> Networks {
        let mut networks: Vec<NetworkId> = networks.into_iter().collect();
        networks.sort_unstable();
        networks.dedup();
        Networks::Only(networks.into_boxed_slice())
    }

    /// True when `network` is one of them.
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
    /// Its slot.
    pub port: PortId,
    /// Which side of the core it is on.
    pub kind: PortKind,
    /// The networks whose frames may enter and leave here.
    pub networks: Networks,
    /// The address configured for its guest: found here and nowhere else, without having been learned.
    pub mac: Option<Mac>,
    /// How many frames a second may be flooded from here; `None`: any number.
    pub storm_frames_per_s: Option<u32>,
    /// Whether only `mac` may be the source of frames from here. Without a `mac`, no frame may enter.
    pub port_security: bool,
}

/// What a network is configured to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NetworkSpec {
    /// Its number.
    pub id: NetworkId,
    /// Whether sources are learned, and frames without a rule or a known destination flooded.
    pub learning: bool,
    /// Seconds after which a silent address is forgotten ([`AGEING_S`] is usual). 0: nothing is ever learned, frames
    /// without a rule are always flooded (a hub).
    pub ageing_s: u32,
}

/// The usual ageing time in seconds (IEEE 802.1Q, table 8-6).
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
        // 2^20 rules below 200 bytes each with their index (DESIGN.md section 10).
        assert!(size_of::<Rule>() <= 28);
    }
}
