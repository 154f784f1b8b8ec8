//! Verdicts for others: a router offers what it has decided to whoever can forward a flow without asking it again.
//!
//! Only verdicts with one destination are offered, and none for group addresses: those are answered, flooded or limited frame by
//! frame. An offer has the terms of the cache entry, so it ends when that does.

use std::sync::Arc;

use super::learning::Lease;
use super::rule::Flow;
use crate::frame::PortId;

/// Longest life of an offered verdict, in milliseconds, here and there: the next frame that comes to the router after it, or a
/// renewal before, makes a new offer.
pub const INSTALLED_MS: u64 = 2000;

/// What an offered verdict depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Installed {
    /// The only port that gets the flow's frames.
    pub to: PortId,
    /// End, in milliseconds of the router's clock.
    pub until_ms: u64,
    /// Generation of the setup that it was made under.
    pub generation: u32,
    /// Buckets of learned addresses, and their versions (see [`VERSIONS`](super::VERSIONS)).
    pub buckets: [u16; 2],
    /// See `buckets`.
    pub versions: [u32; 2],
}

/// Takes verdicts.
pub trait Install: Send + Sync {
    /// A router has decided `flow`. False when the flow is of no use here: then it is not offered again while the router's
    /// cache has it.
    fn install(&self, flow: &Flow, verdict: &Installed) -> bool;
}

/// Where a router's verdicts go.
#[derive(Clone)]
pub struct Verdicts {
    /// Who takes them.
    pub to: Arc<dyn Install>,
    /// Generation of the router's setup.
    pub generation: u32,
}

impl Verdicts {
    /// Offers a verdict, and shortens its lease when it was of use.
    pub(super) fn offer(&self, flow: &Flow, to: PortId, lease: &mut Lease, now_ms: u64) {
        if !flow.dst.is_unicast() {
            return;
        }
        let until_ms = lease.until_ms.min(now_ms + INSTALLED_MS);
        let Lease { versions, buckets, .. } = *lease;
        let verdict = Installed { to, until_ms, generation: self.generation, buckets, versions };
        if self.to.install(flow, &verdict) {
            lease.until_ms = until_ms;
        }
    }
}
