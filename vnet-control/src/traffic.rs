//! Rates and losses of a link.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use vnet::link::Link;
use vnet::stats::{DiscardReason, DropReason};

/// Rates and losses of a link.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(default)]
pub struct Traffic {
    /// Frames received in the last second.
    pub in_frames_per_s: u64,
    /// Bits received in the last second.
    pub in_bits_per_s: u64,
    /// Frames sent in the last second.
    pub out_frames_per_s: u64,
    /// Bits sent in the last second.
    pub out_bits_per_s: u64,
    /// Dropped frames by reason since the link was added; reasons without drops are omitted.
    pub drops: BTreeMap<String, u64>,
    /// Discarded datagrams by reason since the link was added; reasons without discards are omitted.
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
