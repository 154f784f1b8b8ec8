//! The routing table: the configuration, indexed for lookups. Immutable, shared by all dispatchers; a configuration change builds
//! a new one.
//!
//! # Rule lookup
//! The kinds of a rule's two qualifiers determine its priority, and the *way* in which a lookup finds it:
//!
//! | found by | rules (source, destination) with their priority |
//! |---|---|
//! | both addresses | (is, is) 8 |
//! | source address | (is, any) 8, (is, not) 7 |
//! | destination address | (not, is) 7, (any, is) 6 |
//! | nothing | (any, any) 6, (not, any) 5, (any, not) 5, (not, not) 3 |
//!
//! One array holds all rules, sorted by network, way, addresses and falling priority. One hash table of `u32` maps (way, network,
//! addresses) to the first rule of a *run*; it stores no keys, because the rule holds them. A lookup takes at most three probes
//! and scans four runs, each until its priorities fall below the best match: the cost does not grow with the number of other
//! addresses' rules. A route takes 28 bytes, and 6 to 12 bytes of the index.
//!
//! # Flooding
//! The members of a network that learns form a *ring*: interfaces, then links to spokes (hosts that this one relays for), then
//! all other links, followed by a second copy of this sequence. "All members but the sender" is then one slice that starts behind
//! the sender, and "all interfaces and spokes" is the start of the ring. Nothing is copied per frame.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use hashbrown::HashTable;

use super::hash::Seed;
use super::port_security::source_allowed;
use super::published::Published;
use super::rule::{Flow, Member, NetworkSpec, PortKind, Qualifier, Rule};
use crate::frame::{NetworkId, PortId};
use crate::stats::DropReason;
use crate::wire::ethernet::Mac;

/// The addresses by which a rule is indexed.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Way {
    Both,
    Source,
    Destination,
    Nothing,
}

/// Key of a run of rules.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct RunKey {
    network: NetworkId,
    way: Way,
    /// Zero where the way does not use it.
    src: Mac,
    dst: Mac,
}

impl RunKey {
    fn of(rule: &Rule) -> RunKey {
        let network = rule.network;
        match (rule.src, rule.dst) {
            (Qualifier::Is(src), Qualifier::Is(dst)) => RunKey { network, way: Way::Both, src, dst },
            (Qualifier::Is(src), _) => RunKey { network, way: Way::Source, src, dst: Mac::default() },
            (_, Qualifier::Is(dst)) => RunKey { network, way: Way::Destination, src: Mac::default(), dst },
            _ => RunKey { network, way: Way::Nothing, src: Mac::default(), dst: Mac::default() },
        }
    }

    fn hash(&self, seed: Seed) -> u64 {
        seed.hash(
            self.src.to_u64() << 16 | self.way as u64,
            self.dst.to_u64() << 16 ^ u64::from(self.network.get()),
        )
    }
}

/// A network, indexed for lookups.
pub(super) struct Network {
    /// True to learn sources and flood unknown destinations.
    pub(super) learning: bool,
    /// True to relay between all links: no split horizon.
    relayed: bool,
    /// Ageing time of learned addresses.
    pub(super) ageing_ms: u64,
    /// Ways for which the network has rules, indexed by [`Way`]; saves useless probes.
    ways: [bool; 4],
    /// The network's ring, as a range of `Table::rings`.
    ring: Range<u32>,
    /// Number of members, and how many of them are interfaces or spokes.
    members: u32,
    interfaces: u32,
    spokes: u32,
}

/// Network and ingress port of an admitted flow.
pub(super) struct Admitted<'a> {
    pub(super) network: &'a Network,
    pub(super) port: &'a Member,
}

/// The routing table.
pub struct Table {
    rules: Box<[Rule]>,
    index: HashTable<u32>,
    seed: Seed,
    networks: HashMap<NetworkId, Network>,
    ports: Box<[Option<Member>]>,
    pinned: HashMap<(NetworkId, Mac), PortId>,
    published: Arc<Published>,
    rings: Box<[PortId]>,
}

impl Table {
    /// Builds a table of `rules` and `networks` between `members`.
    ///
    /// Omits rules that never apply: those with a qualifier `none`, and those of other networks. When two members claim the same
    /// address in a network, the first member gets it.
    pub fn build(rules: Vec<Rule>, networks: &[NetworkSpec], members: &[Member]) -> Table {
        Table::build_published(rules, networks, members, Arc::default())
    }

    /// Like [`Table::build`], with published stations on other hosts.
    pub(crate) fn build_published(
        mut rules: Vec<Rule>,
        networks: &[NetworkSpec],
        members: &[Member],
        published: Arc<Published>,
    ) -> Table {
        let mut specs: HashMap<NetworkId, Network> = HashMap::with_capacity(networks.len());
        let mut rings = Vec::new();
        for spec in networks {
            specs.entry(spec.id).or_insert_with(|| Network::new(spec, members, &published, &mut rings));
        }
        rules.retain(|rule| rule.priority().is_some() && specs.contains_key(&rule.network));
        rules.sort_unstable_by_key(|rule| (RunKey::of(rule), Reverse(rule.priority()), rule.index));
        let mut table = Table {
            rules: rules.into_boxed_slice(),
            index: HashTable::new(),
            seed: Seed::random(),
            networks: specs,
            ports: slots(members),
            pinned: HashMap::new(),
            published,
            rings: rings.into_boxed_slice(),
        };
        table.index_rules();
        table.pin_addresses(members);
        table
    }

    fn index_rules(&mut self) {
        let (rules, seed) = (&self.rules, self.seed);
        let runs = || rules.chunk_by(|a, b| RunKey::of(a) == RunKey::of(b));
        self.index = HashTable::with_capacity(runs().count());
        let mut at = 0;
        for run in runs() {
            let key = RunKey::of(&run[0]);
            let rehash = |&first: &u32| RunKey::of(&rules[first as usize]).hash(seed);
            self.index.insert_unique(key.hash(seed), at, rehash);
            let network = self.networks.get_mut(&key.network).expect("rules of other networks were left out");
            network.ways[key.way as usize] = true;
            at += run.len() as u32;
        }
    }

    fn pin_addresses(&mut self, members: &[Member]) {
        for member in members {
            let Some(mac) = member.mac.filter(|mac| mac.is_unicast()) else { continue };
            if member.kind != PortKind::Interface {
                continue;
            }
            for network in self.networks.keys().filter(|&&id| member.networks.contains(id)) {
                self.pinned.entry((*network, mac)).or_insert(member.port);
            }
        }
    }

    /// A port's configuration.
    pub(super) fn port(&self, port: PortId) -> Option<&Member> {
        self.ports.get(port.index())?.as_ref()
    }

    /// True when `port` exists and carries `network`.
    pub(super) fn carries(&self, port: PortId, network: NetworkId) -> bool {
        self.port(port).is_some_and(|member| member.networks.contains(network))
    }

    /// The port of `mac` regardless of learning: the link to a published station while publications are firm, or the interface
    /// that `mac` is configured on.
    pub(super) fn pinned(&self, network: NetworkId, mac: Mac) -> Option<PortId> {
        match self.published.place(network, mac) {
            Some(port) => Some(port).filter(|&port| self.published.firm && self.carries(port, network)),
            None => self.pinned.get(&(network, mac)).copied(),
        }
    }

    /// The interface that `mac` is configured on, even if the address is also published.
    pub(super) fn configured(&self, network: NetworkId, mac: Mac) -> Option<PortId> {
        self.pinned.get(&(network, mac)).copied()
    }

    /// The link to the published station `mac`, firm or advisory; a learned address takes precedence over advisory ones.
    pub(super) fn advised(&self, network: NetworkId, mac: Mac) -> Option<PortId> {
        self.published.place(network, mac).filter(|&port| self.carries(port, network))
    }

    /// The published stations.
    pub fn published(&self) -> &Published {
        &self.published
    }

    /// True when split horizon applies to `port`: a link to a host that this host does not relay for.
    fn is_horizon(&self, network: &Network, port: &Member) -> bool {
        port.kind == PortKind::Link && !network.relayed && !self.published.spokes.contains(&port.port)
    }

    /// All configured addresses.
    pub(super) fn all_pinned(&self) -> impl Iterator<Item = (NetworkId, Mac, PortId)> {
        self.pinned.iter().map(|(&(network, mac), &port)| (network, mac, port))
    }

    /// A network's configuration.
    pub(super) fn network(&self, network: NetworkId) -> Option<&Network> {
        self.networks.get(&network)
    }

    /// The guard: admits a flow if its network exists, its port carries it, and its source address is allowed there.
    pub(super) fn admit(&self, flow: &Flow) -> Result<Admitted<'_>, DropReason> {
        let network = self.network(flow.network).ok_or(DropReason::NoRoute)?;
        let port = self
            .port(flow.from)
            .filter(|port| port.networks.contains(flow.network))
            .ok_or(DropReason::WrongNetwork)?;
        if source_allowed(flow.src, port) {
            Ok(Admitted { network, port })
        } else {
            Err(DropReason::BadSource)
        }
    }

    /// Finds the matching rules of the highest priority. Fills `found` with their positions in the table, ordered by rule
    /// index, and returns the priority.
    pub(super) fn best(&self, here: &Admitted<'_>, flow: &Flow, found: &mut Vec<u32>) -> Option<u8> {
        let mut best = None;
        found.clear();
        for way in [Way::Both, Way::Source, Way::Destination, Way::Nothing] {
            if !here.network.ways[way as usize] {
                continue;
            }
            for (place, rule) in self.run(flow, way) {
                let priority = rule.priority();
                if priority < best {
                    break;
                }
                let applies = rule.src.fits(flow.src)
                    && rule.dst.fits(flow.dst)
                    && rule.from.covers(flow.from, here.port.kind);
                if applies {
                    if priority > best {
                        best = priority;
                        found.clear();
                    }
                    found.push(place);
                }
            }
        }
        found.sort_unstable_by_key(|&place| self.rules[place as usize].index);
        best
    }

    /// The run of rules for a flow and way, with their positions, in falling priority.
    fn run(&self, flow: &Flow, way: Way) -> impl Iterator<Item = (u32, &Rule)> {
        let (src, dst) = match way {
            Way::Both => (flow.src, flow.dst),
            Way::Source => (flow.src, Mac::default()),
            Way::Destination => (Mac::default(), flow.dst),
            Way::Nothing => (Mac::default(), Mac::default()),
        };
        let key = RunKey { network: flow.network, way, src, dst };
        let is_key = |&first: &u32| RunKey::of(&self.rules[first as usize]) == key;
        let first = self.index.find(key.hash(self.seed), is_key).copied();
        let places = first.map_or(0..0, |first| first..self.rules.len() as u32);
        places
            .map(|place| (place, &self.rules[place as usize]))
            .take_while(move |(_, rule)| RunKey::of(rule) == key)
    }

    /// The rule at a position from [`Table::best`].
    pub(super) fn rule(&self, place: u32) -> &Rule {
        &self.rules[place as usize]
    }

    /// Fills `list` with the rules' destinations, one per rule, without the ingress port and without ports that do not carry the
    /// network. Returns the reason when none remains.
    pub(super) fn destinations(
        &self,
        flow: &Flow,
        found: &[u32],
        list: &mut Vec<PortId>,
    ) -> Result<(), DropReason> {
        let mut reason = DropReason::NoRoute;
        list.clear();
        for &place in found {
            let to = self.rule(place).to;
            if to == flow.from {
                reason = DropReason::Hairpin;
            } else if self.carries(to, flow.network) {
                list.push(to);
            } else if self.port(to).is_some() {
                reason = DropReason::WrongNetwork;
            } else {
                reason = DropReason::PortGone;
            }
        }
        if list.is_empty() { Err(reason) } else { Ok(()) }
    }

    /// `port` as the destination of a flow. `None` when it is the ingress port, or when split horizon or a missing hop count
    /// forbids forwarding from one link to another.
    pub(super) fn toward(
        &self,
        here: &Admitted<'_>,
        flow: &Flow,
        port: PortId,
    ) -> Result<PortId, DropReason> {
        let to = self.port(port);
        let behind = to.is_some_and(|to| self.is_horizon(here.network, to));
        let split = behind
            && self.is_horizon(here.network, here.port)
            && !self.published.forwarded.contains(&(flow.network, flow.dst));
        if port == flow.from || split {
            Err(DropReason::Hairpin)
        } else if !here.port.counts_hops && to.is_some_and(|to| to.kind == PortKind::Link) {
            Err(DropReason::HopLimit)
        } else {
            Ok(port)
        }
    }

    /// The range of the rings to flood a flow to. From an interface or a spoke: all other members. From any other link:
    /// interfaces and spokes only (split horizon, because the sending host has sent the frame to all others itself).
    pub(super) fn flood(&self, here: &Admitted<'_>) -> Range<u32> {
        let Network { ring, members, interfaces, spokes, .. } = here.network;
        if !here.port.counts_hops {
            return ring.start..ring.start + interfaces;
        }
        if self.is_horizon(here.network, here.port) {
            return ring.start..ring.start + interfaces + spokes;
        }
        // Interfaces come first, then spokes, both in ascending order.
        let (start, count) = match here.port.kind {
            PortKind::Interface => (ring.start, *interfaces),
            PortKind::Link => (ring.start + interfaces, *spokes),
        };
        match self.ring(start, count).binary_search(&here.port.port) {
            Ok(own) => {
                let behind = start + own as u32 + 1;
                behind..behind + members - 1
            }
            Err(_) => 0..0,
        }
    }

    /// A range of the rings.
    #[inline]
    pub(super) fn ring(&self, start: u32, len: u32) -> &[PortId] {
        &self.rings[start as usize..][..len as usize]
    }

    /// Number of rules that can apply.
    pub fn len(&self) -> usize {
        self.rules.len()
    }

    /// True when no rule can apply.
    pub fn is_empty(&self) -> bool {
        self.rules.is_empty()
    }

    /// Memory of the rules and their index in bytes.
    pub fn rules_bytes(&self) -> usize {
        size_of_val(&*self.rules) + self.index.allocation_size()
    }
}

impl Network {
    /// Indexes a network. Appends its ring to `rings` if the network learns.
    fn new(
        spec: &NetworkSpec,
        members: &[Member],
        published: &Published,
        rings: &mut Vec<PortId>,
    ) -> Network {
        let relayed = published.relayed.contains(&spec.id);
        let spoke = |member: &Member| {
            member.kind == PortKind::Link && (relayed || published.spokes.contains(&member.port))
        };
        let of_kind = |kind, spokes: bool| {
            let ours = members
                .iter()
                .filter(|m| m.kind == kind && m.networks.contains(spec.id) && spoke(m) == spokes);
            let mut ports: Vec<PortId> = ours.map(|m| m.port).collect();
            ports.sort_unstable();
            ports.dedup();
            ports
        };
        let start = rings.len() as u32;
        let (mut interfaces, mut spokes, mut members) = (0, 0, 0);
        if spec.learning {
            let mut ring = of_kind(PortKind::Interface, false);
            interfaces = ring.len() as u32;
            ring.extend(of_kind(PortKind::Link, true));
            spokes = ring.len() as u32 - interfaces;
            ring.extend(of_kind(PortKind::Link, false));
            members = ring.len() as u32;
            rings.extend_from_slice(&ring);
            rings.extend_from_slice(&ring);
        }
        Network {
            learning: spec.learning,
            relayed,
            ageing_ms: u64::from(spec.ageing_s) * 1000,
            ways: [false; 4],
            ring: start..rings.len() as u32,
            members,
            interfaces,
            spokes,
        }
    }
}

/// Members by port slot.
fn slots(members: &[Member]) -> Box<[Option<Member>]> {
    let count = members.iter().map(|member| member.port.index() + 1).max().unwrap_or(0);
    let mut slots = vec![None; count];
    for member in members {
        slots[member.port.index()] = Some(member.clone());
    }
    slots.into_boxed_slice()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::route::rule::{Networks, RuleSource};

    fn mac(n: u32) -> Mac {
        let [a, b, c, d] = n.to_be_bytes();
        Mac([0x52, 0x54, a, b, c, d])
    }

    fn member(port: u16, kind: PortKind) -> Member {
        Member {
            port: PortId(port),
            kind,
            networks: Networks::All,
            mac: None,
            storm_frames_per_s: None,
            counts_hops: true,
            port_security: false,
        }
    }

    fn network(learning: bool) -> NetworkSpec {
        NetworkSpec { id: NetworkId::DEFAULT, learning, ageing_s: 300 }
    }

    fn exact(n: u32) -> Rule {
        Rule {
            index: n + 1,
            network: NetworkId::DEFAULT,
            src: Qualifier::Is(mac(n / 1024)),
            dst: Qualifier::Is(mac(n)),
            from: RuleSource::Any,
            to: PortId((n % 7) as u16 + 1),
        }
    }

    /// The limit is 1 048 576 exact routes of less than 200 bytes each. Measured: 38 bytes.
    #[test]
    fn a_million_routes_are_found_and_small() {
        const ROUTES: u32 = 1 << 20;
        let members: Vec<Member> = (0..8).map(|port| member(port, PortKind::Link)).collect();
        let table = Table::build((0..ROUTES).map(exact).collect(), &[network(false)], &members);
        assert_eq!(table.len(), ROUTES as usize);
        let each = table.rules_bytes() as f64 / f64::from(ROUTES);
        assert!((28.0..48.0).contains(&each), "{each} bytes a route");
        let mut found = Vec::new();
        for n in (0..ROUTES).step_by(997) {
            let flow = Flow { network: NetworkId::DEFAULT, src: mac(n / 1024), dst: mac(n), from: PortId(0) };
            let here = table.admit(&flow).unwrap();
            assert_eq!(table.best(&here, &flow, &mut found), Some(8));
            assert_eq!(found.iter().map(|&p| table.rule(p).index).collect::<Vec<_>>(), [n + 1]);
            let other = Flow { src: mac(n / 1024 + 1), ..flow };
            assert_eq!(table.best(&here, &other, &mut found), None);
        }
    }

    #[test]
    fn rings_exclude_the_sender_and_respect_split_horizon() {
        let kinds =
            [PortKind::Link, PortKind::Interface, PortKind::Interface, PortKind::Link, PortKind::Interface];
        let members: Vec<Member> = kinds.iter().enumerate().map(|(i, &k)| member(i as u16, k)).collect();
        let table = Table::build(vec![], &[network(true)], &members);
        for from in 0..5u16 {
            let flow =
                Flow { network: NetworkId::DEFAULT, src: mac(1), dst: Mac::BROADCAST, from: PortId(from) };
            let range = table.flood(&table.admit(&flow).unwrap());
            let mut ports = table.ring(range.start, range.len() as u32).to_vec();
            ports.sort_unstable();
            let expected: Vec<PortId> = (0..5u16)
                .filter(|&to| to != from)
                .filter(|&to| {
                    kinds[from as usize] == PortKind::Interface || kinds[to as usize] == PortKind::Interface
                })
                .map(PortId)
                .collect();
            assert_eq!(ports, expected, "from {from}");
        }
    }

    /// Split horizon does not apply in a relayed network; it applies in all others.
    #[test]
    fn relayed_networks_have_no_split_horizon() {
        let kinds = [PortKind::Link, PortKind::Interface, PortKind::Link, PortKind::Link];
        let members: Vec<Member> = kinds.iter().enumerate().map(|(i, &k)| member(i as u16, k)).collect();
        for relayed in [NetworkId::DEFAULT, NetworkId::new(7).unwrap()] {
            let published = Arc::new(Published { relayed: [relayed].into(), ..Published::default() });
            let table = Table::build_published(vec![], &[network(true)], &members, published);
            for from in [0, 2, 3] {
                let flow = Flow {
                    network: NetworkId::DEFAULT,
                    src: mac(1),
                    dst: Mac::BROADCAST,
                    from: PortId(from),
                };
                let here = table.admit(&flow).unwrap();
                let range = table.flood(&here);
                let mut ports = table.ring(range.start, range.len() as u32).to_vec();
                ports.sort_unstable();
                let all = (0..4).filter(|to| *to != from);
                let expected: Vec<_> =
                    all.filter(|to| *to == 1 || relayed == NetworkId::DEFAULT).map(PortId).collect();
                assert_eq!(ports, expected, "from {from}");
                for to in 0..4u16 {
                    let allowed = expected.contains(&PortId(to));
                    assert_eq!(table.toward(&here, &flow, PortId(to)).is_ok(), allowed, "{from} to {to}");
                }
            }
        }
    }

    #[test]
    fn frames_are_relayed_between_spokes() {
        // An interface, two spokes, and two links of the mesh.
        let kinds = [PortKind::Link, PortKind::Link, PortKind::Interface, PortKind::Link, PortKind::Link];
        let members: Vec<Member> = kinds.iter().enumerate().map(|(i, &k)| member(i as u16, k)).collect();
        let spokes: std::collections::HashSet<_> = [PortId(1), PortId(3)].into();
        let published = Arc::new(Published { spokes: spokes.clone(), ..Published::default() });
        let table = Table::build_published(vec![], &[network(true)], &members, published);
        let mesh = |port: u16| kinds[port as usize] == PortKind::Link && !spokes.contains(&PortId(port));
        for from in 0..5u16 {
            let (src, dst) = (mac(1), Mac::BROADCAST);
            let flow = Flow { network: NetworkId::DEFAULT, src, dst, from: PortId(from) };
            let here = table.admit(&flow).unwrap();
            let range = table.flood(&here);
            let mut ports = table.ring(range.start, range.len() as u32).to_vec();
            ports.sort_unstable();
            let allowed = |&to: &u16| to != from && !(mesh(from) && mesh(to));
            let expected: Vec<PortId> = (0..5).filter(allowed).map(PortId).collect();
            assert_eq!(ports, expected, "from {from}");
            for to in 0..5u16 {
                assert_eq!(table.toward(&here, &flow, PortId(to)).is_ok(), allowed(&to), "{from} to {to}");
            }
        }
    }

    /// Frames for a station that has migrated from here are forwarded from link to link; others are not.
    #[test]
    fn frames_follow_a_station_that_has_migrated() {
        let kinds = [PortKind::Link, PortKind::Link, PortKind::Interface];
        let members: Vec<Member> = kinds.iter().enumerate().map(|(i, &k)| member(i as u16, k)).collect();
        let forwarded = [(NetworkId::DEFAULT, mac(2))].into();
        let published = Arc::new(Published { forwarded, ..Published::default() });
        let table = Table::build_published(vec![], &[network(true)], &members, published);
        for (dst, to, allowed) in [(2, 1, true), (3, 1, false), (2, 0, false), (2, 2, true)] {
            let flow = Flow { network: NetworkId::DEFAULT, src: mac(1), dst: mac(dst), from: PortId(0) };
            let here = table.admit(&flow).unwrap();
            assert_eq!(table.toward(&here, &flow, PortId(to)).is_ok(), allowed, "{dst} to {to}");
        }
    }
}
