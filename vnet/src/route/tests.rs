//! Routers as dispatchers use them: cache hits, invalidation, limits, and agreement between threads.

use std::sync::Arc;

use super::learning::{INTERFACE_ADDRESSES_MAX, LINK_ADDRESSES_MAX, LINKS_ADDRESSES_MAX, REFRESH_MS};
use super::*;
use crate::frame::{Batch, NetworkId, Origin};
use crate::wire::ethernet::Mac;
use crate::wire::offload::Offload;

const NETWORK: NetworkId = NetworkId::DEFAULT;
const HOST: PortId = PortId(0);
const GUEST: PortId = PortId(1);
const LINK: PortId = PortId(2);
const LINK_2: PortId = PortId(3);

fn mac(n: u32) -> Mac {
    let [a, b, c, d] = n.to_be_bytes();
    Mac([2, 1, a, b, c, d])
}

fn flow(from: PortId, src: Mac, dst: Mac) -> Flow {
    Flow { network: NETWORK, src, dst, from }
}

fn members() -> Vec<Member> {
    [
        (HOST, PortKind::Interface),
        (GUEST, PortKind::Interface),
        (LINK, PortKind::Link),
        (LINK_2, PortKind::Link),
    ]
    .map(|(port, kind)| Member {
        port,
        kind,
        networks: Networks::only([NETWORK]),
        mac: None,
        storm_frames_per_s: None,
        counts_hops: true,
        port_security: false,
    })
    .into()
}

fn learning() -> NetworkSpec {
    NetworkSpec { id: NETWORK, learning: true, ageing_s: AGEING_S }
}

fn rule(index: u32, src: Qualifier, dst: Qualifier, to: PortId) -> Rule {
    Rule { index, network: NETWORK, src, dst, from: RuleSource::Any, to }
}

fn router(rules: Vec<Rule>, members: &[Member]) -> Router {
    Router::new(Arc::new(Table::build(rules, &[learning()], members)), Arc::new(Learned::new()))
}

/// Routes a frame so that its source is learned.
fn send(router: &mut Router, flow: &Flow, now_ms: u64) {
    router.route(flow, now_ms);
}

#[test]
fn the_second_frame_is_answered_by_the_cache() {
    let mut router = router(vec![], &members());
    let there = flow(HOST, mac(1), mac(2));
    let back = flow(LINK, mac(2), mac(1));
    assert!(matches!(router.route(&there, 0), Decision::Copies(ports) if ports.len() == 3));
    assert_eq!(router.route(&back, 0), Decision::To(HOST));
    assert_eq!(router.route(&there, 0), Decision::To(LINK));
    let misses = router.misses();
    assert_eq!(misses, 3);
    for now in 0..REFRESH_MS {
        assert_eq!(router.route(&there, now), Decision::To(LINK));
        assert_eq!(router.route(&back, now), Decision::To(HOST));
    }
    assert_eq!(router.misses(), misses, "all of them from the cache");
    router.route(&there, REFRESH_MS);
    assert_eq!(router.misses(), misses + 1, "refreshed once a second");
}

#[test]
fn a_flood_of_addresses_leaves_other_flows_cached() {
    let mut router = router(vec![], &members());
    let flows: Vec<Flow> = (0..100).map(|n| flow(LINK, mac(n), mac(1000 + n))).collect();
    let mut other = Router::new(router.table().clone(), router.learned.clone());
    flows.iter().for_each(|flow| send(&mut router, flow, 0));
    let misses = router.misses();
    // Another dispatcher learns twenty new addresses: each of them may share a bucket with a few of the flows.
    (0..20).for_each(|n| send(&mut other, &flow(GUEST, mac(5000 + n), mac(1)), 0));
    flows.iter().for_each(|flow| send(&mut router, flow, 0));
    let disturbed = router.misses() - misses;
    assert!(disturbed < 50, "{disturbed} of 100 flows disturbed, about 1 expected");
}

#[test]
fn an_adopted_table_applies_to_the_next_frame() {
    let mut router = router(vec![], &members());
    let one = flow(HOST, mac(1), mac(2));
    router.route(&flow(LINK, mac(2), mac(1)), 0);
    assert_eq!(router.route(&one, 0), Decision::To(LINK));
    let rules = vec![rule(1, Qualifier::Any, Qualifier::Is(mac(2)), GUEST)];
    router.adopt(Arc::new(Table::build(rules, &[learning()], &members())));
    assert_eq!(router.route(&one, 0), Decision::To(GUEST), "rules win over learned addresses");
    router.adopt(Arc::new(Table::build(vec![], &[learning()], &members())));
    assert_eq!(router.route(&one, 0), Decision::To(LINK));
}

#[test]
fn any_any_and_any_mac_both_match() {
    let rules = vec![
        rule(1, Qualifier::Any, Qualifier::Any, LINK),
        rule(2, Qualifier::Any, Qualifier::Is(mac(2)), GUEST),
        rule(3, Qualifier::Any, Qualifier::Is(mac(2)), GUEST),
        rule(4, Qualifier::Not(mac(1)), Qualifier::Is(mac(2)), LINK_2),
    ];
    let mut router = router(rules, &members());
    for _ in 0..2 {
        assert_eq!(router.route(&flow(HOST, mac(1), mac(2)), 0), Decision::Copies(&[LINK, GUEST, GUEST]));
        assert_eq!(router.route(&flow(HOST, mac(9), mac(2)), 0), Decision::To(LINK_2));
        assert_eq!(router.route(&flow(LINK, mac(9), mac(8)), 0), Decision::Drop(DropReason::Hairpin));
    }
    let explained = explain(router.table(), &router.learned, &flow(HOST, mac(1), mac(2)), 0);
    assert!(matches!(explained.by, By::Rules { priority: 6, ref rules } if rules.len() == 3));
}

#[test]
fn more_copies_than_a_cache_entry_holds() {
    for count in [FEW, FEW + 1, 40] {
        let rules = (0..count as u32).map(|n| rule(n, Qualifier::Any, Qualifier::Any, LINK)).collect();
        let mut router = router(rules, &members());
        for _ in 0..3 {
            let expected = vec![LINK; count];
            assert_eq!(router.route(&flow(HOST, mac(1), mac(2)), 0), Decision::Copies(&expected));
        }
    }
}

#[test]
fn configured_addresses_stay_where_they_are() {
    let mut members = members();
    members[1].mac = Some(mac(7));
    members[1].port_security = true;
    let mut router = router(vec![], &members);
    assert_eq!(router.route(&flow(HOST, mac(1), mac(7)), 0), Decision::To(GUEST), "without a frame from it");
    router.route(&flow(LINK, mac(7), mac(1)), 0);
    assert_eq!(router.route(&flow(HOST, mac(1), mac(7)), 0), Decision::To(GUEST), "nobody takes it away");
    assert_eq!(router.learned.stats().duplicates, 1, "two stations use it, which is told");
    router.route(&flow(GUEST, mac(7), mac(1)), 0);
    assert_eq!(router.learned.stats().duplicates, 1, "its owner may");
    let told: Vec<_> = router.learned.conflicts(0).iter().map(|c| (c.mac, c.at, c.also)).collect();
    assert_eq!(told, [(mac(7), GUEST, LINK)]);
    let spoofed = flow(GUEST, mac(8), mac(1));
    assert_eq!(router.route(&spoofed, 0), Decision::Drop(DropReason::BadSource));
    let entries = router.learned.entries(router.table(), 2500);
    let shown: Vec<_> = entries.iter().map(|e| (e.mac, e.port, e.age_s, e.held)).collect();
    assert_eq!(shown, [(mac(1), HOST, 2, Held::Learned), (mac(7), GUEST, 0, Held::Pinned)]);
}

#[test]
fn a_machine_that_has_moved_is_known_when_its_interface_goes() {
    let mut there = members();
    there[1].mac = Some(mac(7));
    let mut router = router(vec![], &there);
    router.route(&flow(LINK, mac(7), mac(1)), 0);
    router.route(&flow(LINK, mac(8), mac(1)), 0);
    there.remove(1);
    let without = Arc::new(Table::build(vec![], &[learning()], &there));
    let with = router.table().clone();
    router.adopt(without.clone());
    router.learned.remove_port(GUEST, &with, &without, 10);
    assert_eq!(router.route(&flow(HOST, mac(1), mac(7)), 10), Decision::To(LINK), "it was heard there");
    let entries = router.learned.entries(&without, 10);
    assert_eq!(entries.iter().map(|entry| entry.mac).collect::<Vec<_>>(), [mac(1), mac(7), mac(8)]);
    // What was heard too long ago is not known.
    let expired = 1_000 * u64::from(AGEING_S) + 1;
    assert!(matches!(router.route(&flow(HOST, mac(1), mac(7)), expired), Decision::Copies(_)));
    // An address that has only moved is not known anywhere when its port goes.
    for n in 0..20 {
        router.route(&flow([LINK, LINK_2][n % 2], mac(9), mac(1)), expired + n as u64);
    }
    let now = expired + 20;
    let (at, also) = (LINK_2, LINK);
    assert!(router.learned.conflicts(now).iter().any(|c| (c.mac, c.at, c.also) == (mac(9), at, also)));
    there.retain(|member| member.port != at);
    let after = Arc::new(Table::build(vec![], &[learning()], &there));
    router.adopt(after.clone());
    router.learned.remove_port(at, &without, &after, now);
    assert!(router.learned.entries(&after, now).iter().all(|entry| entry.mac != mac(9)));
}

#[test]
fn an_address_in_two_places_is_frozen_and_thaws() {
    let mut router = router(vec![], &members());
    let claim = |n: u32| flow([HOST, GUEST][n as usize % 2], mac(1), mac(2));
    (0..20).for_each(|n| send(&mut router, &claim(n), u64::from(n)));
    // Learned at HOST, then moved five times.
    let stats = router.learned.stats();
    assert_eq!(stats, LearnedStats { entries: 1, moves: 5, frozen: 1, refused: 0, duplicates: 0 });
    let told: Vec<_> = router.learned.conflicts(20).iter().map(|c| (c.mac, c.at, c.also)).collect();
    assert_eq!(told, [(mac(1), GUEST, HOST)]);
    let where_is = |router: &mut Router, now| outcome_port(router.route(&flow(LINK, mac(3), mac(1)), now));
    assert_eq!(where_is(&mut router, 20), GUEST);
    assert_eq!(router.learned.entries(router.table(), 20)[0].held, Held::Frozen);
    // The station at GUEST keeps sending; the one at HOST gets the address when the freeze ends.
    for now in [60_000, 120_000, 5 + FREEZE_MS - 1] {
        router.route(&claim(1), now);
        router.route(&claim(0), now);
        assert_eq!(where_is(&mut router, now), GUEST);
    }
    router.route(&claim(0), 5 + FREEZE_MS);
    assert_eq!(where_is(&mut router, 5 + FREEZE_MS), HOST);
}

#[test]
fn the_last_moves_are_kept() {
    let mut router = router(vec![], &members());
    (0..6).for_each(|n| send(&mut router, &flow([HOST, GUEST][n % 2], mac(1), mac(2)), 0));
    let (moves, next) = router.learned.moves_since(0);
    assert_eq!((moves.len(), next), (5, 5));
    let told: Vec<_> = moves.iter().map(|moved| (moved.from, moved.to, moved.frozen)).collect();
    assert_eq!(told[0], (HOST, GUEST, false));
    assert_eq!(told[4], (HOST, GUEST, true), "the fifth freezes it");
    assert_eq!(router.learned.moves_since(4), (moves[4..].to_vec(), 5));
    assert_eq!(router.learned.moves_since(5), (vec![], 5));
    // More moves than are kept: the oldest are gone, and the returned number shows how many.
    for n in 10..1_010 {
        send(&mut router, &flow(HOST, mac(n), mac(2)), 1_000);
        send(&mut router, &flow(GUEST, mac(n), mac(2)), 1_000);
        send(&mut router, &flow(LINK, mac(n), mac(2)), 1_000);
    }
    let (moves, next) = router.learned.moves_since(5);
    assert_eq!((moves.len(), next), (1_024, 2_005));
    assert_eq!((moves[1_023].mac, moves[1_023].to), (mac(1_009), LINK));
}

#[test]
fn a_frozen_address_that_ages_out_is_learned_anew() {
    let network = NetworkSpec { ageing_s: 10, ..learning() };
    let table = Arc::new(Table::build(vec![], &[network], &members()));
    let mut router = Router::new(table, Arc::new(Learned::new()));
    let claim = |n: u32| flow([HOST, GUEST][n as usize % 2], mac(1), mac(2));
    (0..6).for_each(|n| send(&mut router, &claim(n), 0));
    // Frozen at GUEST. HOST's claims are refused until the sighting at GUEST has aged out.
    send(&mut router, &claim(0), 0);
    send(&mut router, &claim(0), 9_999);
    assert_eq!(router.learned.entries(router.table(), 9_999)[0].port, GUEST);
    send(&mut router, &claim(0), 10_000);
    assert_eq!(router.learned.entries(router.table(), 10_000)[0].port, HOST);
}

fn outcome_port(decision: Decision<'_>) -> PortId {
    match decision {
        Decision::To(port) => port,
        other => panic!("one destination expected, not {other:?}"),
    }
}

#[test]
fn a_guest_fills_its_own_share_only() {
    let mut router = router(vec![], &members());
    router.route(&flow(GUEST, mac(9_000_000), mac(1)), 0);
    let flood = INTERFACE_ADDRESSES_MAX + 500;
    for n in 0..flood {
        router.route(&flow(HOST, mac(n), Mac::BROADCAST), 10);
    }
    let stats = router.learned.stats();
    assert_eq!(stats.entries, u64::from(INTERFACE_ADDRESSES_MAX) + 1);
    assert_eq!(stats.refused, 500);
    assert_eq!(router.new_sources(), u64::from(flood) + 1);
    router.route(&flow(HOST, mac(1), mac(2)), 20);
    assert_eq!(router.new_sources(), u64::from(flood) + 1, "a known one in a new flow");
    // A refused address is tried again after a while, not with every frame.
    for (now, refused) in [(11, 500), (109, 500), (110, 501), (209, 501)] {
        router.route(&flow(HOST, mac(flood - 1), Mac::BROADCAST), now);
        assert_eq!(router.learned.stats().refused, refused, "at {now} ms");
    }
    // Other ports still learn, and their addresses are found; frames to refused addresses are flooded.
    assert_eq!(router.route(&flow(LINK, mac(8_000_000), mac(9_000_000)), 10), Decision::To(GUEST));
    assert_eq!(router.route(&flow(GUEST, mac(9_000_000), mac(8_000_000)), 10), Decision::To(LINK));
    assert!(matches!(router.route(&flow(LINK, mac(8_000_000), mac(flood - 1)), 10), Decision::Copies(_)));
    // When all addresses of the share have aged out, the share is empty again.
    let later = 10 + u64::from(AGEING_S) * 1000;
    for n in 0..INTERFACE_ADDRESSES_MAX {
        router.route(&flow(HOST, mac(100_000 + n), Mac::BROADCAST), later);
    }
    assert_eq!(router.learned.stats().refused, 501);
}

#[test]
fn an_address_that_moves_to_a_full_port_is_flooded() {
    let mut router = router(vec![], &members());
    router.route(&flow(LINK, mac(9_000_000), Mac::BROADCAST), 0);
    let to_it = flow(HOST, mac(8_000_000), mac(9_000_000));
    assert_eq!(router.route(&to_it, 0), Decision::To(LINK));
    (0..LINK_ADDRESSES_MAX).for_each(|n| send(&mut router, &flow(LINK_2, mac(n), Mac::BROADCAST), 0));
    router.route(&flow(LINK_2, mac(9_000_000), Mac::BROADCAST), 1);
    assert!(matches!(router.route(&to_it, 1), Decision::Copies(_)), "not to the link that it left");
    // The old port's share has space: an address heard there is found again.
    router.route(&flow(LINK, mac(9_000_000), Mac::BROADCAST), 2);
    assert_eq!(router.route(&to_it, 2), Decision::To(LINK));
}

#[test]
fn links_have_a_share_each_and_one_together() {
    let links: Vec<Member> = (10..40)
        .map(|port| Member { port: PortId(port), kind: PortKind::Link, ..members()[2].clone() })
        .collect();
    let mut members = members();
    members.extend(links);
    let mut router = router(vec![], &members);
    let mut learn = |port: u16, from: u32, count: u32| {
        let before = router.learned.stats().entries;
        (from..from + count).for_each(|n| send(&mut router, &flow(PortId(port), mac(n), Mac::BROADCAST), 0));
        (router.learned.stats().entries - before) as u32
    };
    assert_eq!(learn(10, 0, LINK_ADDRESSES_MAX + 10), LINK_ADDRESSES_MAX);
    let links = LINKS_ADDRESSES_MAX / LINK_ADDRESSES_MAX;
    for link in 1..links {
        assert_eq!(learn(10 + link as u16, link << 16, LINK_ADDRESSES_MAX), LINK_ADDRESSES_MAX);
    }
    assert_eq!(learn(10 + links as u16, links << 16, 1), 0);
    assert_eq!(learn(HOST.0, 1 << 30, 10), 10, "interfaces are not touched by it");
    router.learned.forget_port(PortId(10));
    let expected = LINKS_ADDRESSES_MAX - LINK_ADDRESSES_MAX + 10;
    assert_eq!(router.learned.stats().entries, u64::from(expected));
    router.route(&flow(PortId(30), mac(1), Mac::BROADCAST), 0);
    assert_eq!(router.learned.stats().entries, u64::from(expected) + 1);
}

#[test]
fn no_cache_uses_a_flushed_port() {
    let mut router = router(vec![], &members());
    router.route(&flow(LINK, mac(2), mac(1)), 0);
    let there = flow(HOST, mac(1), mac(2));
    assert_eq!(router.route(&there, 0), Decision::To(LINK));
    router.learned.forget_port(LINK);
    assert!(matches!(router.route(&there, 0), Decision::Copies(_)), "even before a table is adopted");
}

#[test]
fn a_flow_is_remembered_for_a_batch_and_no_longer() {
    let mut router = router(vec![], &members());
    let mut batch = Batch::new();
    batch.spare(14).unwrap()[..12].copy_from_slice(&[mac(2).0, mac(1).0].concat());
    let from = Origin { port: HOST, network: NETWORK };
    batch.push_spare(0, 14, from, Offload::default()).unwrap();
    let there = batch.frame(0);
    router.route(&flow(LINK, mac(2), mac(1)), 0);
    router.begin();
    assert_eq!(router.decide(there, 0), Decision::To(LINK));
    router.learned.forget_port(LINK);
    assert_eq!(router.decide(there, 0), Decision::To(LINK), "the batch sees one state");
    router.begin();
    assert!(matches!(router.decide(there, 0), Decision::Copies(_)));
}

#[test]
fn storm_limits_spare_unicast() {
    let mut members = members();
    members[0].storm_frames_per_s = Some(10);
    let mut router = router(vec![], &members);
    router.route(&flow(LINK, mac(2), mac(1)), 0);
    let mut counts = [0; 2];
    for _ in 0..50 {
        let limited =
            router.route(&flow(HOST, mac(1), Mac::BROADCAST), 0) == Decision::Drop(DropReason::StormLimit);
        counts[usize::from(limited)] += 1;
        assert_eq!(router.route(&flow(HOST, mac(1), mac(2)), 0), Decision::To(LINK));
    }
    assert_eq!(counts, [10, 40]);
}

/// Dispatchers learn, move and look up the same addresses concurrently while a port is flushed. After the last frame, each cache
/// agrees with the MAC table.
#[test]
fn threads_agree_when_all_is_quiet() {
    const THREADS: u64 = 4;
    const FLOWS: u32 = 64;
    let members = members();
    let static_rule = rule(1, Qualifier::Any, Qualifier::Is(mac(FLOWS)), GUEST);
    let table = Arc::new(Table::build(vec![static_rule], &[learning()], &members));
    let learned = Arc::new(Learned::new());
    let work = |seed: u64| {
        let (mut router, mut state) = (Router::new(table.clone(), learned.clone()), seed);
        for _ in 0..100_000 {
            // Knuth's MMIX generator.
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let pick = (state >> 33) as u32;
            let flow = flow(PortId((pick % 4) as u16), mac(pick / 4 % FLOWS), mac(pick / 256 % (FLOWS + 1)));
            match router.route(&flow, 5000) {
                Decision::To(port) => {
                    assert_ne!(port, flow.from);
                    assert!(flow.dst != mac(FLOWS) || port == GUEST);
                }
                Decision::Copies(ports) => assert!(!ports.contains(&flow.from) && flow.dst != mac(FLOWS)),
                Decision::Drop(reason) => assert_eq!(reason, DropReason::Hairpin),
            }
            if pick.is_multiple_of(10_007) {
                learned.forget_port(LINK_2);
            }
        }
        router
    };
    let routers: Vec<Router> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS).map(|seed| scope.spawn(move || work(seed))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let entries = learned.entries(&table, 5000);
    assert!(entries.iter().any(|entry| entry.held == Held::Frozen), "addresses moved under contention");
    for mut router in routers {
        let misses = router.misses();
        for entry in &entries {
            // A frame from a port where the address is not learned anew.
            let from = if entry.port == HOST { GUEST } else { HOST };
            let seen = flow(from, Mac([0; 6]), entry.mac);
            assert_eq!(router.route(&seen, 5000), Decision::To(entry.port));
        }
        for (src, dst) in (0..FLOWS).flat_map(|src| (0..FLOWS).map(move |dst| (src, dst))) {
            let Some(entry) = entries.iter().find(|entry| entry.mac == mac(src)) else { continue };
            let cached = flow(entry.port, mac(src), mac(dst));
            let expected = explain(&table, &learned, &cached, 5000).outcome;
            let got = match router.route(&cached, 5000) {
                Decision::To(port) => Ok(vec![port]),
                Decision::Copies(ports) => Ok(ports.to_vec()),
                Decision::Drop(reason) => Err(reason),
            };
            assert_eq!(got, expected, "{cached:?}");
        }
        assert!(router.misses() - misses < u64::from(FLOWS * FLOWS), "some of these were cached");
    }
}

#[test]
fn published_addresses_cannot_be_spoofed_away() {
    let (away, near, local) = (Mac([2, 0, 0, 0, 0, 9]), Mac([2, 0, 0, 0, 0, 8]), Mac([2, 0, 0, 0, 0, 7]));
    let mut members = members();
    // Configured here but published by another host: the machine has migrated.
    members[1].mac = Some(away);
    members[0].mac = Some(local);
    let table = |firm| {
        let places = Arc::new([((NETWORK, away), 0)].into());
        let published = Arc::new(Published { firm, places, links: vec![LINK], ..Published::default() });
        Arc::new(Table::build_published(vec![], &[learning()], &members, published))
    };
    let mut router = Router::new(table(true), Arc::new(Learned::new()));
    let to = |router: &mut Router, dst| match router.route(&flow(HOST, near, dst), 10) {
        Decision::To(port) => Some(port),
        _ => None,
    };
    assert_eq!(to(&mut router, away), Some(LINK));
    // Another station uses the address: the address does not move while the store is reachable.
    send(&mut router, &flow(LINK_2, away, near), 11);
    assert_eq!(to(&mut router, away), Some(LINK));
    // The store is unreachable: learned addresses take precedence over published ones.
    router.adopt(table(false));
    assert_eq!(to(&mut router, away), Some(LINK));
    send(&mut router, &flow(LINK_2, away, near), 12);
    assert_eq!(to(&mut router, away), Some(LINK_2));
    router.adopt(table(true));
    assert_eq!(to(&mut router, away), Some(LINK));
    let own = router.route(&flow(GUEST, near, local), 13);
    assert_eq!(own, Decision::To(HOST));
}
