//! Installed flows: the programs' map, its limits per port, and the frames and bytes that flows have carried.
//!
//! A flow has a *slot*, the index of its tally. A slot stays taken for one sweep after its flow has ended, so that a program that
//! still runs counts for the right flow.
//!
//! Bounded: [`FLOWS_MAX`] flows in all; the newest is refused. A flow is charged to the guest it comes from, or leads to if it comes
//! from another host, so that no guest of that host can use up the share of the others. A guest has at most [`FLOWS_PORT_MAX`] flows,
//! and no more than are still free: so many guests that scan the network together leave room for one more.

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use aya::maps::{HashMap as BpfMap, MapData};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::mapping::Mapping;
use super::shared::{
    FLOWS_MAX, FlowKey, FlowValue, Known, NO_NAMESPACE, TO_INTERFACE, TO_LINK, TRANSLATES,
    TRANSLATES_DATAGRAMS, Tally,
};
use crate::frame::PortId;
use crate::stats::PortStats;
use crate::wire::ethernet::{HEADER_LEN, Mac, VLAN_TAG_LEN};

/// Maximum number of flows charged to one port: a guest that scans the network uses a sixteenth of all.
pub const FLOWS_PORT_MAX: u32 = 4096;

/// First of the wire's source ports, and their number.
const WIRE_SOURCES: (u16, u16) = (49_152, 16_384);

/// The conditions under which a verdict holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    /// Time at which the verdict ends, in nanoseconds of the clock of [`Kernel::tick`](super::Kernel::tick).
    pub until_ns: u64,
    /// Generation of the table.
    pub generation: u32,
    /// Versions of learned addresses: buckets, and the versions they must have.
    pub buckets: [u16; 2],
    /// See `buckets`.
    pub versions: [u32; 2],
}

/// An interface or a link that a flow comes from.
#[derive(Clone, Debug)]
pub struct Sender {
    /// Its counters.
    pub stats: Arc<PortStats>,
    /// The guest that the flow is charged to.
    pub payer: PortId,
}

/// An interface or a link that a flow leads to.
#[derive(Clone, Debug)]
pub struct Destination {
    /// Its port.
    pub port: PortId,
    /// Index of the device that takes its frames: the host's end of a guest's, or the wire; 0: frames that programs cannot send
    /// themselves come up.
    pub device: u32,
    /// MTU in bytes, for unsegmented frames.
    pub mtu: usize,
    /// Its counters.
    pub stats: Arc<PortStats>,
    /// A guest or another host.
    pub target: Target,
}

/// The end of a flow on this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// A guest.
    Guest {
        /// Its address, if it is in a namespace of its own: frames to it skip the device's queue.
        mac: Option<Mac>,
        /// Its network namespace (nsid), if known.
        namespace: Option<u32>,
    },
    /// Another host, by the wire or as a VTEP.
    Host {
        /// Its address, and the UDP port of its end.
        remote: SocketAddrV4,
        /// Longest IP packet of a guest, in bytes, that fits the path in one datagram.
        packet_max: u32,
        /// How programs send datagrams that they make themselves; `None`: the wire's device makes them all.
        underlay: Option<Underlay>,
        /// Their source ports.
        sources: Sources,
        /// Which frames may be translated.
        translates: Translates,
    },
}

/// Frames to another host that may leave without a tunnel (`translations`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Translates {
    /// No frames: the other host takes no translated packets.
    Nothing,
    /// All except UDP super-frames: the guest's MTU, and so a segment, may exceed the path MTU.
    NoUdpSuperFrames,
    /// All frames that fit the path MTU, super-frames included.
    All,
}

/// Source ports of datagrams that programs make. A flow has one of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sources {
    /// The wire's: the range that RFC 7348 recommends. Its datagrams carry the guests' ECN field (RFC 6040 section 4.1, normal mode).
    Wire,
    /// Ports that sockets of vnetd own, so that the kernel accepts ICMP errors about the datagrams: the first, and their number, a
    /// power of two. ECN is zero (compatibility mode), as in vnetd's own datagrams: a vnetd at the other end would lose the mark of a
    /// congested router.
    Owned(u16, u16),
}

/// The route of datagrams to another host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Underlay {
    /// Index of the device.
    pub device: u32,
    /// This host's address on it.
    pub local: Ipv4Addr,
    /// The router, or the other host itself; `None`: the kernel looks up the route for each datagram.
    pub next_hop: Option<Ipv4Addr>,
}

/// Frames and bytes of an installed flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Carried {
    /// The flow.
    pub flow: Known,
    /// Its destination.
    pub to: PortId,
    /// Frames since it was installed first.
    pub frames: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// What a vnetd has added to the counters of a flow's ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counted {
    /// The flow's slot.
    pub slot: u32,
    /// Its source.
    pub from: PortId,
    /// Its destination.
    pub to: PortId,
    /// Frames and bytes of its tally that both ports have.
    pub counted: [u64; 2],
}

/// One flow's slot.
struct Slot {
    flow: Known,
    from: Sender,
    to: Destination,
    /// Frames and bytes of the tally when the slot was taken.
    first: [u64; 2],
    /// Frames and bytes of the tally that both ports have.
    counted: [u64; 2],
    /// Absent until the flow is installed.
    terms: Option<Terms>,
    /// Last use when it was installed.
    used_ns: u64,
}

struct Book {
    map: BpfMap<MapData, FlowKey, FlowValue>,
    slots: HashMap<u32, Slot>,
    by_key: HashMap<FlowKey, u32>,
    /// Flows by the port that they are charged to.
    shares: HashMap<PortId, u32>,
    /// Slots that no flow uses. Those of `leaving` have lost theirs since the last sweep.
    free: Vec<u32>,
    leaving: Vec<u32>,
    /// Flows of a vnetd that has died or that this one succeeds, with their slots.
    adopted: HashMap<FlowKey, u32>,
    /// What the vnetd that this one succeeds has counted.
    counted: Vec<Counted>,
    refused: u64,
    /// Number of the last installation. It starts with the time, so that it is not one of a vnetd that has died.
    id: u64,
}

/// The installed flows.
pub struct Flows {
    book: Mutex<Book>,
    tallies: Mapping<Tally>,
}

impl Flows {
    pub(super) fn new(map: BpfMap<MapData, FlowKey, FlowValue>, tallies: Mapping<Tally>) -> Flows {
        let mut book = Book {
            map,
            slots: HashMap::new(),
            by_key: HashMap::new(),
            shares: HashMap::new(),
            free: vec![],
            leaving: vec![],
            adopted: HashMap::new(),
            counted: vec![],
            refused: 0,
            id: super::now_ns(),
        };
        book.adopt();
        Flows { book: Mutex::new(book), tallies }
    }

    /// Counts, and returns what has been counted of each flow, for the vnetd that takes over. Nothing is installed afterwards.
    pub fn counted(&self) -> Vec<Counted> {
        let mut book = self.book.lock();
        let counted = |(at, slot): (&u32, &mut Slot)| {
            slot.count(&self.tallies.get()[*at as usize]);
            Counted { slot: *at, from: slot.flow.from, to: slot.to.port, counted: slot.counted }
        };
        book.slots.iter_mut().map(counted).collect()
    }

    /// Adopts the flows of the running vnetd, which has `counted` them and installs no more. Nothing is installed here yet.
    pub fn succeed(&self, counted: Vec<Counted>) {
        let mut book = self.book.lock();
        book.adopt();
        book.counted = counted;
    }

    /// Installs a flow, or renews it. False: refused, vnetd goes on forwarding it.
    pub fn install(&self, flow: &Known, from: &Sender, to: &Destination, terms: &Terms) -> bool {
        let key = FlowKey::new(flow);
        let mut book = self.book.lock();
        let Some(slot) = book.slot(flow, from, to, &self.tallies) else {
            book.refused += 1;
            return false;
        };
        book.id += 1;
        let value = FlowValue {
            until_ns: terms.until_ns,
            id: book.id,
            generation: terms.generation,
            buckets: terms.buckets.map(u32::from),
            versions: terms.versions,
            slot,
            device: to.device,
            len_max: (to.mtu + HEADER_LEN + VLAN_TAG_LEN) as u32,
            stations: [flow.dst.0, flow.src.0],
            ..to.target.value(flow.dst)
        };
        let done = book.map.insert(key, value, 0).is_ok();
        if done {
            let used_ns = self.tallies.get()[slot as usize].used_ns.load(Relaxed);
            if let Some(slot) = book.slots.get_mut(&slot) {
                (slot.terms, slot.used_ns) = (Some(*terms), used_ns);
            }
        } else {
            book.remove(slot);
            book.refused += 1;
        }
        done
    }

    /// The entry of `flow` in the programs' map.
    pub(super) fn get(&self, flow: &Known) -> Option<FlowValue> {
        let key = FlowKey::new(flow);
        self.book.lock().map.get(&key, 0).ok()
    }

    /// Adds what flows have carried to their ports' counters.
    pub fn count(&self) {
        let mut book = self.book.lock();
        book.slots.iter_mut().for_each(|(at, slot)| slot.count(&self.tallies.get()[*at as usize]));
    }

    /// Counts, lists flows that end within `ahead_ns` and were used since they were installed or listed, with their terms, and removes
    /// others that have ended.
    pub fn sweep(&self, now_ns: u64, ahead_ns: u64) -> Vec<(Known, Terms)> {
        let mut book = self.book.lock();
        let (mut used, mut ended) = (vec![], vec![]);
        for (at, slot) in &mut book.slots {
            let tally = &self.tallies.get()[*at as usize];
            slot.count(tally);
            let used_ns = tally.used_ns.load(Relaxed);
            let until_ns = slot.terms.map_or(0, |terms| terms.until_ns);
            if until_ns.saturating_sub(now_ns) < ahead_ns && used_ns > slot.used_ns {
                slot.used_ns = used_ns;
                used.extend(slot.terms.map(|terms| (slot.flow, terms)));
            } else if until_ns <= now_ns {
                ended.push(*at);
            }
        }
        // Counted above; no program has used them since the last sweep.
        for at in std::mem::take(&mut book.leaving) {
            book.slots.remove(&at);
            book.free.push(at);
        }
        ended.into_iter().for_each(|at| book.remove(at));
        used
    }

    /// Sources of the flows to `device` of a vnetd that has died.
    pub fn adopted_sources(&self, device: u32) -> Vec<Mac> {
        let book = self.book.lock();
        let leads = |key: &&FlowKey| book.map.get(key, 0).is_ok_and(|flow| flow.device == device);
        let sources = book.adopted.keys().filter(leads);
        sources.filter_map(FlowKey::source).collect()
    }

    /// Removes the flows of a vnetd that has died or that this one succeeds. No program may follow them any more. Returns what the latter
    /// flows have carried since they were counted: frames and bytes.
    pub fn forget_adopted(&self) -> Vec<(Counted, [u64; 2])> {
        let mut book = self.book.lock();
        let mut carried = vec![];
        for last in std::mem::take(&mut book.counted) {
            let Some(tally) = self.tallies.get().get(last.slot as usize) else { continue };
            let now = [tally.frames.load(Relaxed), tally.bytes.load(Relaxed)];
            carried.push((last, [0, 1].map(|at| now[at].wrapping_sub(last.counted[at]))));
        }
        for (key, slot) in std::mem::take(&mut book.adopted) {
            if !book.by_key.contains_key(&key) {
                // The entry is absent if the flow was installed again and has ended.
                let _ = book.map.remove(&key);
            }
            book.leaving.push(slot);
        }
        carried
    }

    /// The `most` flows that have carried most bytes.
    pub fn largest(&self, most: usize) -> Vec<Carried> {
        let mut book = self.book.lock();
        let carried = |(at, slot): (&u32, &mut Slot)| {
            slot.count(&self.tallies.get()[*at as usize]);
            let [frames, bytes] = [0, 1].map(|at| slot.counted[at].wrapping_sub(slot.first[at]));
            Carried { flow: slot.flow, to: slot.to.port, frames, bytes }
        };
        let mut all: Vec<_> = book.slots.iter_mut().map(carried).collect();
        all.sort_unstable_by_key(|carried| (std::cmp::Reverse(carried.bytes), carried.flow));
        all.truncate(most);
        all
    }

    /// Ends the flows to the ports with counters `to`, and lists those whose verdicts had not ended: a router that has offered one does
    /// not offer it again before. Programs that run at this moment may still follow them.
    pub fn end(&self, to: &[&Arc<PortStats>]) -> Vec<Known> {
        let now_ns = super::now_ns();
        let mut book = self.book.lock();
        // Sorted: many containers can be down while the map is full.
        let mut to: Vec<_> = to.iter().map(|stats| Arc::as_ptr(stats)).collect();
        to.sort_unstable();
        let leads = |slot: &Slot| to.binary_search(&Arc::as_ptr(&slot.to.stats)).is_ok();
        // Removed ones keep their slots until the next sweep.
        let is_installed = |at: &u32, slot: &Slot| book.by_key.get(&FlowKey::new(&slot.flow)) == Some(at);
        let slots = book.slots.iter().filter(|(at, slot)| leads(slot) && is_installed(at, slot));
        let ended: Vec<_> = slots.map(|(at, slot)| (*at, slot.flow, slot.terms)).collect();
        let mut valid = vec![];
        for (at, flow, terms) in ended {
            book.remove(at);
            if terms.is_some_and(|terms| terms.until_ns > now_ns) {
                valid.push(flow);
            }
        }
        valid
    }

    /// Number of installed flows, and of refused ones so far.
    pub fn len(&self) -> (usize, u64) {
        let book = self.book.lock();
        (book.by_key.len(), book.refused)
    }
}

impl Target {
    /// The part of a map entry that depends on the target, for a flow to `dst`.
    fn value(&self, dst: Mac) -> FlowValue {
        match *self {
            Target::Guest { mac, namespace } => FlowValue {
                kind: TO_INTERFACE,
                own_address: u16::from(mac == Some(dst)),
                namespace: namespace.unwrap_or(NO_NAMESPACE),
                ..FlowValue::default()
            },
            Target::Host { remote, packet_max, underlay, sources, translates } => {
                let (first_port, count, ecn_mask) = match sources {
                    Sources::Wire => (WIRE_SOURCES.0, WIRE_SOURCES.1, 3),
                    Sources::Owned(first, count) => (first, count, 0),
                };
                FlowValue {
                    kind: TO_LINK,
                    remote: remote.ip().to_bits(),
                    segment_max: packet_max,
                    underlay: underlay.map_or(0, |way| way.device),
                    local: underlay.map_or(0, |way| way.local.to_bits()),
                    next_hop: underlay.and_then(|way| way.next_hop).map_or(0, Ipv4Addr::to_bits),
                    port: remote.port().into(),
                    first_port,
                    port_mask: count.saturating_sub(1),
                    ecn_mask,
                    translates: match translates {
                        Translates::Nothing => 0,
                        Translates::NoUdpSuperFrames => TRANSLATES,
                        Translates::All => TRANSLATES | TRANSLATES_DATAGRAMS,
                    },
                    namespace: NO_NAMESPACE,
                    ..FlowValue::default()
                }
            }
        }
    }
}

impl Book {
    /// Adopts the flows of the map, while there are no others.
    fn adopt(&mut self) {
        self.adopted = self.map.iter().flatten().map(|(key, flow)| (key, flow.slot)).collect();
        let mut is_free = vec![true; FLOWS_MAX as usize];
        for slot in self.adopted.values() {
            is_free.get_mut(*slot as usize).into_iter().for_each(|free| *free = false);
        }
        self.free = (0..FLOWS_MAX).rev().filter(|slot| is_free[*slot as usize]).collect();
    }

    /// The slot of `flow`, a new one if it has none; `None` at the limit.
    fn slot(
        &mut self,
        flow: &Known,
        from: &Sender,
        to: &Destination,
        tallies: &Mapping<Tally>,
    ) -> Option<u32> {
        let key = FlowKey::new(flow);
        if let Some(at) = self.by_key.get(&key) {
            let slot = self.slots.get_mut(at)?;
            // Frames so far went to the old destination.
            slot.count(&tallies.get()[*at as usize]);
            let payer = std::mem::replace(&mut slot.from, from.clone()).payer;
            slot.to = to.clone();
            // Sealed datagrams may have got other stations.
            slot.flow = *flow;
            let at = *at;
            self.refund(payer);
            *self.shares.entry(from.payer).or_default() += 1;
            return Some(at);
        }
        let share = self.shares.entry(from.payer).or_default();
        if *share >= FLOWS_PORT_MAX || *share as usize >= self.free.len() {
            return None;
        }
        let at = self.free.pop()?;
        *share += 1;
        let tally = &tallies.get()[at as usize];
        let counted = [tally.frames.load(Relaxed), tally.bytes.load(Relaxed)];
        let used_ns = tally.used_ns.load(Relaxed);
        let (from, to) = (from.clone(), to.clone());
        self.slots.insert(at, Slot { flow: *flow, from, to, first: counted, counted, terms: None, used_ns });
        self.by_key.insert(key, at);
        Some(at)
    }

    /// Removes the flow in slot `at`; the slot is free after the next sweep.
    fn remove(&mut self, at: u32) {
        let Some(slot) = self.slots.get(&at) else { return };
        let (key, payer) = (FlowKey::new(&slot.flow), slot.from.payer);
        // Absent when its installation failed.
        let _ = self.map.remove(&key);
        if self.by_key.remove(&key).is_some() {
            self.refund(payer);
            self.leaving.push(at);
        }
    }

    fn refund(&mut self, payer: PortId) {
        if let Some(share) = self.shares.get_mut(&payer) {
            *share = share.saturating_sub(1);
        }
    }
}

impl Slot {
    /// Adds what is new in `tally` to both ports.
    fn count(&mut self, tally: &Tally) {
        let now = [tally.frames.load(Relaxed), tally.bytes.load(Relaxed)];
        let new = [0, 1].map(|at| now[at].wrapping_sub(self.counted[at]));
        self.counted = now;
        self.from.stats.in_frames.add(new[0]);
        self.from.stats.in_bytes.add(new[1]);
        self.to.stats.delivered(new[0], new[1]);
    }
}
