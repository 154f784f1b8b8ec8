//! The routing table: everything that is configured, made ready for a look-up. Built once, never changed, shared by all
//! dispatchers; a change of configuration builds a new one.
//!
//! # How rules are found
//! A rule's priority follows from the kinds of its two qualifiers, and so does the way to find it:
//!
//! | found by | rules (source, destination) with their priority |
//! |---|---|
//! | both addresses | (is, is) 8 |
//! | source address | (is, any) 8, (is, not) 7 |
//! | destination address | (not, is) 7, (any, is) 6 |
//! | nothing | (any, any) 6, (not, any) 5, (any, not) 5, (not, not) 3 |
//!
//! All rules stand in one array, sorted by network, way, addresses and falling priority. One hash table of `u32` leads from
//! (way, network, addresses) to the first rule of a *run*; it stores no keys, because the rule it leads to has them. A
//! look-up is at most three probes and the scan of the four runs, each left as soon as its priorities fall below the best
//! found: its cost does not grow with the number of other addresses' rules. A route costs 28 bytes and 6 to 12 of the index.
//!
//! # How frames are flooded
//! The members of a network that learns stand in a *ring*: interfaces, then links to spokes (hosts that this one relays
//! for), then all other links, and the same once more. "Everybody but me" is then one slice, starting behind me; "all
//! interfaces and spokes" is the ring's beginning. Nothing is copied.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use hashbrown::HashTable;

use super::guard::source_allowed;
use super::hash::Seed;
use super::published::Published;
use super::rule::{Flow, Member, NetworkSpec, PortKind, Qualifier, Rule};
use crate::frame::{NetworkId, PortId};
use crate::stats::DropReason;
use crate::wire::ethernet::Mac;

/// How a rule is found; the columns of a run's key.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Way {
    Both,
    Source,
    Destination,
    Nothing,
}

/// Names a run of rules.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct RunKey {
    network: NetworkId,
    way: Way,
    /// Zero where the way does not ask for it.
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

/// A network, ready for use.
pub(super) struct Network {
    /// Whether unknown destinations are flooded.
    pub(super) learning: bool,
    /// Whether frames go from any link to any other.
    relayed: bool,
    /// How long a learned address lives without a frame from it.
    pub(super) ageing_ms: u64,
    /// Ways by which the network has any rules, indexed by [`Way`]; saves probes that cannot find anything.
    ways: [bool; 4],
    /// Its members within `Table::rings`.
    ring: Range<u32>,
    /// How many members there are, and how many of them are interfaces and spokes.
    members: u32,
    interfaces: u32,
    spokes: u32,
}

/// A frame's flow that may enter, with what the table knows of its network and port.
pub(super) struct Admitted<'a> {
    pub(super) network: &'a Network,
    pub(super) port: &'a Member,
}

/// Everything that is configured about routing.
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
    /// Makes a table of `rules`, which apply in the networks named by `networks` only, between `members`.
    ///
    /// Rules whose qualifier is `none`, and rules of other networks, can never apply and are left out. Of two members with
    /// one address in one network the first keeps it.
    pub fn build(rules: Vec<Rule>, networks: &[NetworkSpec], members: &[Member]) -> Table {
        Table::build_published(rules, networks, members, Arc::default())
    }

    /// The same, with what is published of stations on other hosts.
    pub fn build_published(
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

    /// True when `port` exists and is part of `network`.
    pub(super) fn carries(&self, port: PortId, network: NetworkId) -> bool {
        self.port(port).is_some_and(|member| member.networks.contains(network))
    }

    /// Where `mac` is, whatever is learned: at the interface whose configured address it is, unless it is published to be
    /// elsewhere, which is then where it is while that is firm.
    pub(super) fn pinned(&self, network: NetworkId, mac: Mac) -> Option<PortId> {
        match self.published.place(network, mac) {
            Some(port) => Some(port).filter(|&port| self.published.firm && self.carries(port, network)),
            None => self.pinned.get(&(network, mac)).copied(),
        }
    }

    /// Where `mac` was published to be before the store went away; what is learned goes first.
    pub(super) fn advised(&self, network: NetworkId, mac: Mac) -> Option<PortId> {
        self.published.place(network, mac).filter(|&port| self.carries(port, network))
    }

    /// What is published.
    pub fn published(&self) -> &Published {
        &self.published
    }

    /// True for a port that split horizon concerns: a link to a host that this one does not relay for.
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

    /// Lets a flow in: its network exists, its port is part of it, its source may be used there.
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

    /// Finds the rules of the highest priority that apply to `flow`: their places in the table, in the order of their
    /// indices, replace what is in `found`. Returns the priority.
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

    /// The rules to be found one way for a flow, with their places, by falling priority.
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

    /// The rule at a place that [`Table::best`] found.
    pub(super) fn rule(&self, place: u32) -> &Rule {
        &self.rules[place as usize]
    }

    /// Turns rules into destinations, one for each rule, except those that lead back to where the frame came from or to a
    /// port that does not carry the network. When nothing remains, says why.
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

    /// Sends a flow to the one port where its destination is known to be, unless that leads back: to where it came from, or
    /// from one link to another (split horizon).
    pub(super) fn toward(
        &self,
        here: &Admitted<'_>,
        flow: &Flow,
        port: PortId,
    ) -> Result<PortId, DropReason> {
        let behind = self.port(port).is_some_and(|port| self.is_horizon(here.network, port));
        if port == flow.from || (behind && self.is_horizon(here.network, here.port)) {
            Err(DropReason::Hairpin)
        } else {
            Ok(port)
        }
    }

    /// Where in the rings a flow is flooded to: from an interface or a spoke to all other members, from another link to
    /// interfaces and spokes only (split horizon: the host that sent it has sent it to all others itself).
    pub(super) fn flood(&self, here: &Admitted<'_>) -> Range<u32> {
        let Network { ring, members, interfaces, spokes, .. } = here.network;
        if self.is_horizon(here.network, here.port) {
            return ring.start..ring.start + interfaces + spokes;
        }
        // Interfaces stand first, then spokes, each in ascending order.
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

    /// Ports of the rings.
    #[inline]
    pub(super) fn ring(&self, start: u32, len: u32) -> &[PortId] {
        &self.rings[start as usize..][..len as usize]
    }

    /// Rules that can apply.
    pub fn len(&self) -> usize {
        self.rules.len()
    }

    /// True when no rule can apply.
    pub fn is_empty(&self) -> bool {
        self.rules.is_empty()
    }

    /// Bytes of memory that the rules and their index take.
    pub fn rules_bytes(&self) -> usize {
        size_of_val(&*self.rules) + self.index.allocation_size()
    }
}

impl Network {
    /// Prepares a network, and adds its ring to `rings` when it can be needed.
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

/// Members by their slots.
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
    use crate::route::rule::{Networks, Source};

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
            from: Source::Any,
            to: PortId((n % 7) as u16 + 1),
        }
    }

    /// DESIGN.md section 10: 1 048 576 exact routes in less than 200 bytes each. Measured: 38 bytes.
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
    fn rings_leave_out_the_sender_and_respect_split_horizon() {
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

    /// Where a network is relayed a link is like an interface; in the others it is not.
    #[test]
    fn relayed_networks_know_no_horizon() {
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
    fn spokes_are_relayed_between() {
        // An interface, two spokes, two links of the mesh.
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
}
