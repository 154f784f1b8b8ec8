//! Offers of verdicts: a router offers its decisions to a component that can forward the flow by itself, such as the kernel's own
//! path.
//!
//! Only verdicts with one destination are offered, and none for group addresses, because their frames are answered, flooded or
//! rate-limited one by one. An offer has the lease of the cache entry, so both end together.

use std::sync::Arc;

use super::learning::Lease;
use super::rule::Flow;
use crate::frame::PortId;

/// Maximum lifetime of an offered verdict in milliseconds, both in the router's cache and at the receiver of the offer. The next
/// frame that reaches the router after that time, or a renewal before it, makes a new offer.
pub const INSTALLED_MS: u64 = 2000;
/// The same for a verdict that the receiver cannot use yet. A dispatcher's cache full of such flows takes some percent of a core.
const AGAIN_MS: u64 = 250;

/// An offered verdict and the terms under which it stays valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Installed {
    /// The only port that gets the flow's frames.
    pub to: PortId,
    /// End of validity, in milliseconds of the router's clock.
    pub until_ms: u64,
    /// Generation of the setup under which the verdict was made.
    pub generation: u32,
    /// Buckets of the learned source and destination addresses; see `versions`.
    pub buckets: [u16; 2],
    /// Versions of `buckets` under which the verdict is valid (see [`VERSIONS`](super::VERSIONS)).
    pub versions: [u32; 2],
}

/// Answer to an offer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The receiver forwards the flow until the verdict ends, unless it was full.
    Taken,
    /// The receiver may use the verdict soon.
    NotYet,
    /// The receiver cannot use it: the router does not offer the flow again while it is in the router's cache.
    Never,
}

/// Receiver of offered verdicts.
pub trait Install: Send + Sync {
    /// Takes the router's verdict on `flow`, if it can.
    fn install(&self, flow: &Flow, verdict: &Installed) -> Answer;
}

/// Destination of a router's offers.
#[derive(Clone)]
pub struct Verdicts {
    /// Receiver of the verdicts.
    pub to: Arc<dyn Install>,
    /// Generation of the router's setup.
    pub generation: u32,
}

impl Verdicts {
    /// Offers a verdict, and shortens the lease of the cache entry when the receiver took the offer.
    pub(super) fn offer(&self, flow: &Flow, to: PortId, lease: &mut Lease, now_ms: u64) {
        if !flow.dst.is_unicast() {
            return;
        }
        let until_ms = lease.until_ms.min(now_ms + INSTALLED_MS);
        let Lease { versions, buckets, .. } = *lease;
        let verdict = Installed { to, until_ms, generation: self.generation, buckets, versions };
        match self.to.install(flow, &verdict) {
            Answer::Taken => lease.until_ms = until_ms,
            Answer::NotYet => lease.until_ms = until_ms.min(now_ms + AGAIN_MS),
            Answer::Never => {}
        }
    }
}
