//! What passes a link, for those who look at links and not at counters: rates, and what was lost under which reasons.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use vnet::link::Link;
use vnet::stats::{DiscardReason, DropReason};

/// What passes a link.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(default)]
pub struct Traffic {
    /// Frames that came in the last second.
    pub in_frames_per_s: u64,
    /// Their bits.
    pub in_bits_per_s: u64,
    /// Frames that left in the last second.
    pub out_frames_per_s: u64,
    /// Their bits.
    pub out_bits_per_s: u64,
    /// Frames that were not delivered, by reason, since the link is there; reasons without any are left out.
    pub drops: BTreeMap<String, u64>,
    /// Datagrams that brought nothing into the core, by reason; reasons without any are left out.
    pub discards: BTreeMap<String, u64>,
}

impl From<&Link> for Traffic {
    fn from(link: &Link) -> Traffic {
        let (rates, stats) = (link.probed().rates, link.stats());
        let drops = DropReason::ALL.iter().map(|reason| (reason.name().into(), stats.drops(*reason)));
        let discards =
            DiscardReason::ALL.iter().map(|reason| (reason.name().into(), stats.discards(*reason)));
        Traffic {
            in_frames_per_s: rates.in_frames,
            in_bits_per_s: rates.in_bits,
            out_frames_per_s: rates.out_frames,
            out_bits_per_s: rates.out_bits,
            drops: drops.filter(|(_, count)| *count > 0).collect(),
            discards: discards.filter(|(_, count)| *count > 0).collect(),
        }
    }
}
