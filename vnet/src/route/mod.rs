//! Routing: where each frame goes.
//!
//! Each dispatcher has a [`Router`]. For every frame it consults, in this order:
//!
//! 1. the flow cache (`cache.rs`): decides all but the first frames of a flow with one probe, without a lock;
//! 2. the guard (`port_security.rs`): checks that a frame with this source address may enter at the port;
//!    [`AddressGuard`] also checks IP sources, frame by frame, where an interface asks for it;
//! 3. the [`Table`] (`table.rs`): if VNET rules apply, they alone decide, and all rules of the highest priority get a copy;
//! 4. in a network that learns: configured and published addresses ([`Published`]), then learned ones ([`Learned`], in
//!    `learning.rs`, which first learns the frame's source). A known destination gets the frame;
//! 5. flooding, with split horizon, within the port's storm limit (`storm_limit.rs`).
//!
//! All dispatchers share the table and the learned addresses. A table never changes; a router adopts a new one as a whole. The
//! cache decides exactly as steps 2 to 5 would: `oracle.rs` compares it with a naive model that searches rules one by one, as
//! VNET/P published it.
//!
//! Implemented here because no library has VNET's rule semantics, and because hash probes, leases and bucket versions must work
//! together for a cached decision to take no lock.

mod address_security;
mod addresses;
mod cache;
mod conflicts;
mod hash;
mod install;
mod learning;
#[cfg(test)]
mod oracle;
mod port_security;
mod published;
mod rule;
mod sightings;
mod storm_limit;
mod table;
#[cfg(test)]
mod tests;
mod trace;

use std::sync::Arc;

pub use address_security::AddressGuard;
pub use conflicts::Conflict;
pub use install::{Answer, INSTALLED_MS, Install, Installed, Verdicts};
pub use learning::{
    FREEZE_MS, Held, Learned, LearnedEntry, LearnedStats, MOVES_MAX, MOVES_WINDOW_MS, Moved, VERSIONS,
    VersionMemory,
};
pub use published::Published;
pub use rule::{
    AGEING_S, Flow, Member, NetworkSpec, Networks, PortKind, Qualifier, QualifierError, Rule, RuleSource,
};
pub use sightings::{SIGHTINGS_MAX, Sighting};
pub use storm_limit::STORM_FRAMES_PER_S;
pub use table::Table;
pub use trace::{By, Explanation, explain};

use addresses::Heard;
use cache::{Cache, ENTRIES, FEW, Verdict};
use learning::{Claim, Lease};
use table::Admitted;

use crate::frame::{Frame, PortId};
use crate::stats::DropReason;

/// Destination of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision<'a> {
    /// To one port.
    To(PortId),
    /// One copy for each of these ports, two or more. Rules may name a port repeatedly.
    Copies(&'a [PortId]),
    /// Dropped: the caller counts the frame under this reason at the ingress port.
    Drop(DropReason),
}

/// One dispatcher's router.
pub struct Router {
    table: Arc<Table>,
    learned: Arc<Learned>,
    cache: Cache,
    scratch: Scratch,
    /// Destinations of the cached decision in use.
    few: [PortId; FEW],
    /// Flow and port of the previous frame, when it went to one port: bursts of one flow are common.
    last: Option<(Flow, PortId)>,
    misses: u64,
    /// Receives verdicts that the kernel's own path can apply without this router.
    verdicts: Option<Verdicts>,
}

impl Router {
    /// A router with an empty cache. All dispatchers share `learned`.
    pub fn new(table: Arc<Table>, learned: Arc<Learned>) -> Router {
        Router::with_cache(table, learned, ENTRIES)
    }

    fn with_cache(table: Arc<Table>, learned: Arc<Learned>, entries: usize) -> Router {
        Router {
            table,
            learned,
            cache: Cache::new(entries),
            scratch: Scratch::default(),
            few: [PortId::NONE; FEW],
            last: None,
            misses: 0,
            verdicts: None,
        }
    }

    /// Switches to `table` and empties the cache.
    pub fn adopt(&mut self, table: Arc<Table>) {
        self.table = table;
        self.last = None;
        self.cache.empty();
    }

    /// Offers verdicts with one destination to `verdicts` from now on. Empties the cache, so that all verdicts are offered again.
    pub fn offer_to(&mut self, verdicts: Verdicts) {
        self.verdicts = Some(verdicts);
        self.last = None;
        self.cache.empty();
    }

    /// Decides `flow` again and offers the verdict, as if a frame of the flow had arrived.
    pub fn renew(&mut self, flow: &Flow, now_ms: u64) {
        self.resolve(flow, now_ms);
    }

    /// The table in use.
    pub fn table(&self) -> &Arc<Table> {
        &self.table
    }

    /// Number of cache misses.
    pub fn misses(&self) -> u64 {
        self.misses
    }

    /// Number of frames from source addresses that were not known at their port: learned, moved there, or refused.
    pub fn new_sources(&self) -> u64 {
        self.scratch.new_sources
    }

    /// The cached decision for `flow`, if it is valid. Does not change the cache.
    pub fn cached(&self, flow: &Flow, now_ms: u64) -> Option<Result<Vec<PortId>, DropReason>> {
        match self.cache.get(flow, now_ms, &self.learned.versions)? {
            Verdict::To(port) => Some(Ok(vec![port])),
            Verdict::Few { len, ports } => Some(Ok(ports[..usize::from(len)].to_vec())),
            Verdict::Flood { start, len } => Some(Ok(self.table.ring(start, len).to_vec())),
            Verdict::Drop(reason) => Some(Err(reason)),
            Verdict::Many => None,
        }
    }

    /// Begins a batch. Within a batch, a frame goes to the same port as the previous frame of its flow, whatever other
    /// dispatchers learn in between.
    #[inline]
    pub fn begin(&mut self) {
        self.last = None;
    }

    /// Decides where `frame` goes. `now_ms` is monotonic time in milliseconds; one clock reading per batch suffices.
    #[inline]
    pub fn decide(&mut self, frame: &Frame, now_ms: u64) -> Decision<'_> {
        let flow = Flow::from(frame);
        if let Some((last, port)) = &self.last
            && *last == flow
        {
            return Decision::To(*port);
        }
        let verdict = self.verdict(&flow, now_ms);
        self.last = match verdict {
            Verdict::To(port) => Some((flow, port)),
            _ => None,
        };
        self.decision(verdict, &flow, now_ms)
    }

    /// The port of a flow with exactly one destination; `None` when the flow is dropped or copied. Learns and counts like
    /// [`Router::decide`].
    pub fn sole(&mut self, flow: &Flow, now_ms: u64) -> Option<PortId> {
        match self.verdict(flow, now_ms) {
            Verdict::To(port) => Some(port),
            _ => None,
        }
    }

    /// Decides without using the result of the batch's previous frame.
    #[cfg(test)]
    fn route(&mut self, flow: &Flow, now_ms: u64) -> Decision<'_> {
        let verdict = self.verdict(flow, now_ms);
        self.decision(verdict, flow, now_ms)
    }

    #[inline]
    fn verdict(&mut self, flow: &Flow, now_ms: u64) -> Verdict {
        match self.cache.get(flow, now_ms, &self.learned.versions) {
            Some(verdict) => verdict,
            None => self.resolve(flow, now_ms),
        }
    }

    #[inline]
    fn decision(&mut self, verdict: Verdict, flow: &Flow, now_ms: u64) -> Decision<'_> {
        match verdict {
            Verdict::To(port) => Decision::To(port),
            Verdict::Drop(reason) => Decision::Drop(reason),
            Verdict::Flood { start, len } => self.flood(flow, start, len, now_ms),
            Verdict::Few { len, ports } => {
                self.few = ports;
                Decision::Copies(&self.few[..usize::from(len)])
            }
            Verdict::Many => Decision::Copies(&self.scratch.list),
        }
    }

    fn flood(&self, flow: &Flow, start: u32, len: u32, now_ms: u64) -> Decision<'_> {
        let limit = self.table.port(flow.from).and_then(|port| port.storm_frames_per_s);
        if !self.learned.storm.admit(flow.from, limit, now_ms) {
            return Decision::Drop(DropReason::StormLimit);
        }
        match self.table.ring(start, len) {
            [only] => Decision::To(*only),
            ports => Decision::Copies(ports),
        }
    }

    /// Decides without the cache, then caches the decision.
    #[cold]
    fn resolve(&mut self, flow: &Flow, now_ms: u64) -> Verdict {
        self.misses += 1;
        let (verdict, mut lease) = match self.table.admit(flow) {
            Ok(here) => self.scratch.forward(&self.table, &self.learned, &here, flow, now_ms),
            Err(reason) => (Verdict::Drop(reason), Lease::FOREVER),
        };
        if let (Verdict::To(port), Some(verdicts)) = (verdict, &self.verdicts) {
            verdicts.offer(flow, port, &mut lease, now_ms);
        }
        if verdict != Verdict::Many && now_ms < lease.until_ms {
            self.cache.put(flow, now_ms, lease, verdict);
        }
        verdict
    }
}

/// Working memory for one decision, reused to avoid allocation.
#[derive(Default)]
struct Scratch {
    /// Indices of the rules that apply.
    found: Vec<u32>,
    /// Destinations of these rules.
    list: Vec<PortId>,
    /// Frames from addresses that were not known at their port.
    new_sources: u64,
}

impl Scratch {
    /// Decides for an admitted flow: learns its source, then applies rules, known addresses and flooding.
    fn forward(
        &mut self,
        table: &Table,
        learned: &Learned,
        here: &Admitted<'_>,
        flow: &Flow,
        now_ms: u64,
    ) -> (Verdict, Lease) {
        let ruled = table.best(here, flow, &mut self.found).is_some();
        let pinned = table.pinned(flow.network, flow.dst);
        let (mut known, mut lease) = (None, Lease::FOREVER);
        if here.network.learning {
            let claim = claim(table, here, flow, now_ms);
            // A guest that migrates has an interface on both hosts; the store says which one it is at.
            let home = table.pinned(flow.network, flow.src);
            let owner = table.configured(flow.network, flow.src).filter(|port| *port != flow.from);
            if let (None, Some(at)) = (claim, owner)
                && home != Some(flow.from)
            {
                let (network, mac, also) = (flow.network, flow.src, flow.from);
                learned.duplicate(Conflict { network, mac, at, also, seen_ms: now_ms });
            }
            let wanted = !ruled && pinned.is_none() && flow.dst.is_unicast();
            let met = learned.meet(flow.network, claim, wanted.then_some(flow.dst), now_ms);
            (known, lease) = (met.port, met.lease);
            self.new_sources += u64::from(met.is_new);
        }
        let verdict = if ruled {
            self.by_rules(table, flow)
        } else if !here.network.learning {
            Verdict::Drop(DropReason::NoRoute)
        } else if let Some(port) = pinned
            .or(known.filter(|&port| table.carries(port, flow.network)))
            .or_else(|| table.advised(flow.network, flow.dst))
        {
            table.toward(here, flow, port).map_or_else(Verdict::Drop, Verdict::To)
        } else {
            let range = table.flood(here);
            match range.len() as u32 {
                0 => Verdict::Drop(DropReason::NoRoute),
                len => Verdict::Flood { start: range.start, len },
            }
        };
        (verdict, lease)
    }

    /// Applies the rules in `found`.
    fn by_rules(&mut self, table: &Table, flow: &Flow) -> Verdict {
        if let Err(reason) = table.destinations(flow, &self.found, &mut self.list) {
            return Verdict::Drop(reason);
        }
        match *self.list.as_slice() {
            [port] => Verdict::To(port),
            ref list if list.len() <= FEW => {
                let mut ports = [PortId::NONE; FEW];
                ports[..list.len()].copy_from_slice(list);
                Verdict::Few { len: list.len() as u8, ports }
            }
            _ => Verdict::Many,
        }
    }
}

/// A frame's claim about its source, if it can be learned: a unicast address that is not configured on an interface.
fn claim(table: &Table, here: &Admitted<'_>, flow: &Flow, now_ms: u64) -> Option<Claim> {
    let learnable = flow.src.is_unicast()
        && here.network.ageing_ms != 0
        && table.pinned(flow.network, flow.src).is_none();
    let heard = Heard {
        port: flow.from,
        kind: here.port.kind,
        at_ms: now_ms,
        expires_ms: now_ms + here.network.ageing_ms,
    };
    learnable.then_some(Claim { mac: flow.src, heard })
}
