//! The naive model: it searches rules one by one, as VNET/P published it, learns in a plain map, and has no cache, index or lock.
//! A property test compares routers with it across table changes, port removals and the passing of time.

use std::collections::HashMap;
use std::sync::Arc;

use proptest::prelude::*;

use super::rule::Flow;
use super::*;
use crate::frame::NetworkId;
use crate::wire::ethernet::Mac;

/// A configuration of the model and the routers.
#[derive(Clone, Debug)]
struct Config {
    rules: Vec<Rule>,
    networks: Vec<NetworkSpec>,
    members: Vec<Member>,
}

impl Config {
    fn table(&self) -> Arc<Table> {
        Arc::new(Table::build(self.rules.clone(), &self.networks, &self.members))
    }

    fn member(&self, port: PortId) -> Option<&Member> {
        self.members.iter().find(|member| member.port == port)
    }

    fn member_of(&self, port: PortId, network: NetworkId) -> Option<&Member> {
        self.member(port).filter(|member| match &member.networks {
            Networks::All => true,
            Networks::Only(list) => list.contains(&network),
        })
    }

    fn pinned(&self, network: NetworkId, mac: Mac) -> Option<PortId> {
        let owner = |member: &&Member| {
            member.kind == PortKind::Interface
                && member.mac == Some(mac)
                && self.member_of(member.port, network).is_some()
        };
        self.members.iter().find(owner).map(|member| member.port).filter(|_| is_station(mac))
    }
}

fn is_station(mac: Mac) -> bool {
    mac.0[0] & 1 == 0 && mac != Mac([0; 6])
}

/// VNET/P's matching of one MAC: the class of a matching qualifier.
fn class(qualifier: Qualifier, mac: Mac) -> Option<&'static str> {
    match qualifier {
        Qualifier::Not(other) if other != mac => Some("NOT"),
        Qualifier::Any => Some("ANY"),
        Qualifier::Is(own) if own == mac => Some("DIRECT"),
        _ => None,
    }
}

/// VNET/P's priority table, as published.
fn priority(src: &str, dst: &str) -> u8 {
    match (src, dst) {
        ("NOT", "NOT") => 3,
        ("NOT", "ANY") => 5,
        ("NOT", "DIRECT") => 7,
        ("ANY", "NOT") => 5,
        ("ANY", "ANY") => 6,
        ("ANY", "DIRECT") => 6,
        ("DIRECT", "NOT") => 7,
        ("DIRECT", "ANY") => 8,
        ("DIRECT", "DIRECT") => 8,
        _ => unreachable!("no such class"),
    }
}

/// A learned address in the model.
#[derive(Clone, Debug)]
struct Station {
    port: PortId,
    noted_ms: u64,
    expires_ms: u64,
    moves_ms: Vec<u64>,
    frozen_until_ms: u64,
}

#[derive(Debug)]
struct Model {
    config: Config,
    stations: HashMap<(NetworkId, Mac), Station>,
    /// Storm credit per port in thousandths of a frame, and the time at which it was computed.
    credit: HashMap<PortId, (u64, u64)>,
    /// Maximum number of addresses of a port in a network.
    share: usize,
    now_ms: u64,
}

/// Sorted destinations, or the drop reason.
type Outcome = Result<Vec<PortId>, DropReason>;

impl Model {
    fn rules(&self, flow: &Flow, kind: PortKind) -> Vec<Rule> {
        let mut best = (0, vec![]);
        for rule in self.config.rules.iter().filter(|rule| rule.network == flow.network) {
            let from = match rule.from {
                RuleSource::Any => true,
                RuleSource::AnyInterface => kind == PortKind::Interface,
                RuleSource::AnyLink => kind == PortKind::Link,
                RuleSource::Port(port) => port == flow.from,
            };
            if let (true, Some(src), Some(dst)) = (from, class(rule.src, flow.src), class(rule.dst, flow.dst))
            {
                let priority = priority(src, dst);
                if priority > best.0 {
                    best = (priority, vec![]);
                }
                if priority == best.0 {
                    best.1.push(*rule);
                }
            }
        }
        best.1
    }

    fn learn(&mut self, flow: &Flow, ageing_ms: u64) {
        let now_ms = self.now_ms;
        if !is_station(flow.src) || ageing_ms == 0 || self.config.pinned(flow.network, flow.src).is_some() {
            return;
        }
        let key = (flow.network, flow.src);
        self.stations.retain(|_, station| now_ms < station.expires_ms);
        let here = |(key, station): &(&(NetworkId, Mac), &Station)| {
            (key.0, station.port) == (flow.network, flow.from)
        };
        let room = self.stations.iter().filter(here).count() < self.share;
        let new = Station {
            port: flow.from,
            noted_ms: now_ms,
            expires_ms: now_ms + ageing_ms,
            moves_ms: vec![],
            frozen_until_ms: 0,
        };
        match self.stations.get_mut(&key) {
            None if !room => {}
            None => drop(self.stations.insert(key, new)),
            Some(station) if station.port == flow.from => {
                if now_ms >= station.noted_ms + 1000 {
                    (station.noted_ms, station.expires_ms) = (now_ms, now_ms + ageing_ms);
                }
            }
            Some(station) if now_ms < station.frozen_until_ms => {}
            Some(_) if !room => drop(self.stations.remove(&key)),
            Some(station) => {
                let mut moves_ms = std::mem::take(&mut station.moves_ms);
                if moves_ms.first().is_some_and(|first| now_ms >= first + 180_000) {
                    moves_ms.clear();
                }
                moves_ms.push(now_ms);
                let freeze = moves_ms.len() == 5;
                let frozen_until_ms = if freeze { now_ms + 180_000 } else { 0 };
                *station =
                    Station { moves_ms: if freeze { vec![] } else { moves_ms }, frozen_until_ms, ..new };
            }
        }
    }

    fn storm_admits(&mut self, member: &Member) -> bool {
        let Some(rate) = member.storm_frames_per_s.map(u64::from) else { return true };
        let (credit, since_ms) = self.credit.get(&member.port).copied().unwrap_or((u64::MAX, self.now_ms));
        let credit = credit.saturating_add((self.now_ms - since_ms) * rate).min(rate * 1000);
        let admits = credit >= 1000;
        self.credit.insert(member.port, (if admits { credit - 1000 } else { credit }, self.now_ms));
        admits
    }

    fn decide(&mut self, flow: &Flow) -> Outcome {
        let spec = *self.config.networks.iter().find(|n| n.id == flow.network).ok_or(DropReason::NoRoute)?;
        let from = self.config.member_of(flow.from, flow.network).ok_or(DropReason::WrongNetwork)?.clone();
        let secured = from.kind == PortKind::Interface && from.port_security;
        if flow.src.is_multicast() || (secured && from.mac != Some(flow.src)) {
            return Err(DropReason::BadSource);
        }
        if spec.learning {
            self.learn(flow, u64::from(spec.ageing_s) * 1000);
        }
        let rules = self.rules(flow, from.kind);
        if !rules.is_empty() {
            return self.by_rules(flow, &rules);
        }
        if !spec.learning {
            return Err(DropReason::NoRoute);
        }
        let station = self.stations.get(&(flow.network, flow.dst));
        let learned = station.filter(|station| self.now_ms < station.expires_ms).map(|station| station.port);
        let learned = learned.filter(|port| self.config.member_of(*port, flow.network).is_some());
        if let Some(port) = self.config.pinned(flow.network, flow.dst).or(learned) {
            let both_links =
                from.kind == PortKind::Link && self.config.member(port).unwrap().kind == PortKind::Link;
            return if port == flow.from || both_links { Err(DropReason::Hairpin) } else { Ok(vec![port]) };
        }
        self.flood(flow, &from)
    }

    fn by_rules(&self, flow: &Flow, rules: &[Rule]) -> Outcome {
        let mut reason = DropReason::NoRoute;
        let mut ports = vec![];
        for rule in rules {
            if rule.to == flow.from {
                reason = DropReason::Hairpin;
            } else if self.config.member(rule.to).is_none() {
                reason = DropReason::PortGone;
            } else if self.config.member_of(rule.to, flow.network).is_none() {
                reason = DropReason::WrongNetwork;
            } else {
                ports.push(rule.to);
            }
        }
        ports.sort();
        if ports.is_empty() { Err(reason) } else { Ok(ports) }
    }

    fn flood(&mut self, flow: &Flow, from: &Member) -> Outcome {
        let reached = |member: &&Member| {
            member.port != flow.from
                && self.config.member_of(member.port, flow.network).is_some()
                && (from.kind == PortKind::Interface || member.kind == PortKind::Interface)
        };
        let mut ports: Vec<PortId> = self.config.members.iter().filter(reached).map(|m| m.port).collect();
        ports.sort();
        if ports.is_empty() {
            return Err(DropReason::NoRoute);
        }
        if self.storm_admits(from) { Ok(ports) } else { Err(DropReason::StormLimit) }
    }
}

fn outcome(decision: Decision<'_>) -> Outcome {
    match decision {
        Decision::To(port) => Ok(vec![port]),
        Decision::Copies(ports) => {
            assert!(ports.len() >= 2, "copies are two or more");
            let mut ports = ports.to_vec();
            ports.sort();
            Ok(ports)
        }
        Decision::Drop(reason) => Err(reason),
    }
}

const PORTS: u16 = 8;

/// Three networks; two of them differ in the highest bits only.
fn network() -> impl Strategy<Value = NetworkId> {
    prop_oneof![4 => Just(1u32), 2 => Just(0x01_0001), 1 => Just(7)]
        .prop_map(|id| NetworkId::new(id).unwrap())
}

fn station() -> impl Strategy<Value = Mac> {
    (1..5u8).prop_map(|n| Mac([0x52, 0x54, 0, 0, 0, n]))
}

fn mac() -> impl Strategy<Value = Mac> {
    let odd = prop_oneof![
        4 => Just(Mac::BROADCAST),
        2 => Just(Mac([0x33, 0x33, 0, 0, 0, 1])),
        1 => Just(Mac([0; 6])),
    ];
    prop_oneof![12 => station(), 1 => odd]
}

fn qualifier() -> impl Strategy<Value = Qualifier> {
    prop_oneof![
        1 => Just(Qualifier::None),
        3 => Just(Qualifier::Any),
        2 => mac().prop_map(Qualifier::Not),
        6 => mac().prop_map(Qualifier::Is),
    ]
}

fn rule() -> impl Strategy<Value = Rule> {
    let port = || (0..PORTS + 1).prop_map(PortId);
    let from = prop_oneof![
        3 => Just(RuleSource::Any),
        1 => Just(RuleSource::AnyInterface),
        1 => Just(RuleSource::AnyLink),
        2 => port().prop_map(RuleSource::Port),
    ];
    (network(), qualifier(), qualifier(), from, port()).prop_map(|(network, src, dst, from, to)| Rule {
        index: 0,
        network,
        src,
        dst,
        from,
        to,
    })
}

fn member(port: u16) -> impl Strategy<Value = Option<Member>> {
    let networks = prop_oneof![
        2 => Just(Networks::All),
        1 => prop::collection::vec(network(), 0..3).prop_map(Networks::only),
    ];
    let kind = if port.is_multiple_of(2) { PortKind::Interface } else { PortKind::Link };
    // Constant per port: the model does not carry credit over to another limit.
    let storm_frames_per_s = [None, None, Some(2), None, None, Some(5), None, None][usize::from(port)];
    (prop::bool::weighted(0.85), networks, prop::option::weighted(0.15, mac()), prop::bool::weighted(0.05))
        .prop_map(move |(there, networks, mac, port_security)| {
            there.then_some(Member {
                port: PortId(port),
                kind,
                networks,
                mac,
                storm_frames_per_s,
                counts_hops: port % 4 != 3,
                port_security,
            })
        })
}

fn config() -> impl Strategy<Value = Config> {
    let spec = |id: u32| {
        (
            prop::bool::weighted(0.9),
            prop::bool::weighted(0.8),
            prop::sample::select(vec![0u32, 1, 10, 300, 300]),
        )
            .prop_map(move |(there, learning, ageing_s)| {
                there.then_some(NetworkSpec { id: NetworkId::new(id).unwrap(), learning, ageing_s })
            })
    };
    let networks = [spec(1), spec(0x01_0001), spec(7)];
    let members: Vec<_> = (0..PORTS).map(member).collect();
    let rules = prop_oneof![
        1 => Just(vec![]),
        2 => prop::collection::vec(rule(), 0..6),
        1 => prop::collection::vec(rule(), 20..60),
    ];
    (rules, networks, members).prop_map(|(mut rules, networks, members)| {
        (1..).zip(&mut rules).for_each(|(index, rule)| rule.index = index);
        Config {
            rules,
            networks: networks.into_iter().flatten().collect(),
            members: members.into_iter().flatten().collect(),
        }
    })
}

#[derive(Clone, Debug)]
enum Step {
    Frame { router: usize, flow: Flow },
    Wait { ms: u64 },
    Adopt(Box<Config>),
    Remove(PortId),
}

fn step() -> impl Strategy<Value = Step> {
    let flow = (network(), mac(), mac(), (0..PORTS + 1).prop_map(PortId))
        .prop_map(|(network, src, dst, from)| Flow { network, src, dst, from });
    let waits = vec![1u64, 100, 499, 500, 999, 1000, 1001, 9_000, 60_000, 180_000, 299_500, 300_000];
    prop_oneof![
        80 => (0..2usize, flow).prop_map(|(router, flow)| Step::Frame { router, flow }),
        12 => prop::sample::select(waits).prop_map(|ms| Step::Wait { ms }),
        1 => config().prop_map(|config| Step::Adopt(Box::new(config))),
        1 => (0..PORTS).prop_map(|port| Step::Remove(PortId(port))),
    ]
}

fn adopt(routers: &mut [Router], config: &Config) {
    let table = config.table();
    routers.iter_mut().for_each(|router| router.adopt(table.clone()));
}

/// Runs `steps` on the model and on two routers that share learned addresses, one of them with a tiny cache.
fn run(config: Config, steps: Vec<Step>) -> Result<(), TestCaseError> {
    run_with(config, steps, Learned::new(), usize::MAX)
}

/// Like [`run`], with a share of at most `share` addresses per port and network.
fn run_with(config: Config, steps: Vec<Step>, learned: Learned, share: usize) -> Result<(), TestCaseError> {
    let learned = Arc::new(learned);
    let router = |entries| Router::with_cache(config.table(), learned.clone(), entries);
    let mut routers = [router(2), router(256)];
    let mut model = Model { config, stations: HashMap::new(), credit: HashMap::new(), share, now_ms: 1 };
    for step in steps {
        match step {
            Step::Wait { ms } => model.now_ms += ms,
            Step::Adopt(config) => {
                adopt(&mut routers, &config);
                model.config = *config;
            }
            Step::Remove(port) => {
                model.config.members.retain(|member| member.port != port);
                adopt(&mut routers, &model.config);
                learned.forget_port(port);
                model.stations.retain(|_, station| station.port != port);
                model.credit.remove(&port);
            }
            Step::Frame { router, flow } => {
                let table = routers[router].table().clone();
                // Routing learns the source first, explaining does not: the two differ for a frame to its own source.
                let explained =
                    (flow.src != flow.dst).then(|| explain(&table, &learned, &flow, model.now_ms).outcome);
                let expected = model.decide(&flow);
                let got = outcome(routers[router].route(&flow, model.now_ms));
                prop_assert_eq!(&got, &expected, "{:?} at {}", flow, model.now_ms);
                if let Some(explained) = explained.filter(|_| got != Err(DropReason::StormLimit)) {
                    let explained = explained.map(|mut ports| {
                        ports.sort();
                        ports
                    });
                    prop_assert_eq!(explained, expected, "explained {:?}", flow);
                }
            }
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]

    #[test]
    fn decisions_are_those_of_the_naive_model(
        config in config(),
        steps in prop::collection::vec(step(), 1..300),
    ) {
        run(config, steps)?;
    }

    /// Three stations in one network that learns. Moves and ageing, rare in the test above, happen all the time.
    #[test]
    fn moves_and_ageing_are_those_of_the_naive_model(
        ageing_s in prop::sample::select(vec![10, AGEING_S]),
        steps in prop::collection::vec((0..2usize, 1..4u8, 1..4u8, 0..4u16, 0..8usize), 1..300),
    ) {
        run(learning(ageing_s), few_stations(steps, [0, 0, 0, 1, 500, 1000, 9_000, 90_000]))?;
    }

    /// Ports with space for one or two addresses. Routers remember a refusal for 100 ms and the model does not, so no two frames
    /// are that close.
    #[test]
    fn full_shares_are_those_of_the_naive_model(
        share in 1..3u32,
        steps in prop::collection::vec((0..2usize, 1..4u8, 1..4u8, 0..4u16, 0..8usize), 1..300),
    ) {
        let steps = few_stations(steps, [100, 100, 100, 101, 500, 1000, 9_000, 90_000]);
        run_with(learning(10), steps, Learned::with_shares(share), share as usize)?;
    }
}

/// Five ports, three of them interfaces, in one network that learns.
fn learning(ageing_s: u32) -> Config {
    let member = |port: u16| Member {
        port: PortId(port),
        kind: if port < 3 { PortKind::Interface } else { PortKind::Link },
        networks: Networks::All,
        mac: None,
        storm_frames_per_s: None,
        counts_hops: port != 4,
        port_security: false,
    };
    let networks = vec![NetworkSpec { id: NetworkId::DEFAULT, learning: true, ageing_s }];
    Config { rules: vec![], networks, members: (0..5).map(member).collect() }
}

/// Frames of three stations, each followed by one of the `waits`.
fn few_stations(steps: Vec<(usize, u8, u8, u16, usize)>, waits: [u64; 8]) -> Vec<Step> {
    let mac = |n| Mac([2, 0, 0, 0, 0, n]);
    let steps = steps.into_iter().flat_map(|(router, src, dst, from, wait)| {
        let flow = Flow { network: NetworkId::DEFAULT, src: mac(src), dst: mac(dst), from: PortId(from) };
        [Step::Frame { router, flow }, Step::Wait { ms: waits[wait] }]
    });
    steps.collect()
}
