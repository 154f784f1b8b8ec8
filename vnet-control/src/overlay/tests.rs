//! Hosts that share one store: their computed results, checked after every step.

use proptest::prelude::*;

use super::oracle::*;
use super::record::{HostRecord, Key, Record, StationRecord};
use super::state::SWEEP_MS;
use super::*;
use crate::desired::Topology;
use vnet::wire::ethernet::Mac;

fn station(n: usize) -> String {
    Key::Station(network(1), mac(n)).to_string()
}

fn claim(host: &str, sequence: u32) -> String {
    format!(r#"{{"host":"{host}","sequence":{sequence}}}"#)
}

#[test]
fn empty_hosts_find_each_other() {
    let mut world = World::new(3);
    world.host(3).locals.push(guest(2, 30));
    world.run(300, |_| {});
    world.assert_truth();
    // Network 2 has only one member, so no link carries it.
    assert!(world.computed(1).links.iter().all(|link| link.networks == [network(1)]));
    assert_eq!(world.keys(), 3 + 1 + 4);
}

#[test]
fn a_guest_that_migrates_is_found_at_once() {
    let mut world = World::new(3);
    world.run(300, |_| {});
    let moved = world.host(1).locals.pop().unwrap();
    world.run(60, |_| {});
    world.host(2).locals.push(moved.clone());
    world.run(200, |_| {});
    assert_eq!(world.toward(3, 1, 1), Some("h2".into()));
    assert_eq!(world.toward(1, 1, 1), None, "no interface, no member");
    // Live migration: both hosts have the guest for a while, only the new one sends. The new host claims it 100 ms after the
    // guest connected there.
    world.host(3).locals.push(Local { in_frames: 7, ..moved });
    world.run(200, |_| {});
    assert_eq!(
        world.toward(2, 1, 1),
        Some("h3".into()),
        "the old host yields, although its guest is still attached"
    );
    assert_eq!(world.toward(3, 1, 1), None, "a local station has no next hop");
    assert_eq!(StationRecord::parse(world.value(&station(1)).unwrap().as_bytes()).unwrap().sequence, 3);
}

#[test]
fn two_guests_with_the_same_address_freeze_it() {
    let mut world = World::new(3);
    world.run(300, |_| {});
    world.host(2).locals.push(guest(1, 1));
    let mut writes = 0;
    for round in 1..=100u64 {
        // Both guests keep sending.
        for host in [1, 2] {
            world.host(host).locals.iter_mut().for_each(|local| local.in_frames = round);
        }
        let before = world.value(&station(1));
        world.run(50, |_| {});
        writes += u32::from(before != world.value(&station(1)));
    }
    assert!(world.alarms(3).contains(&"frozen".into()), "{:?}", world.alarms(3));
    // The alarms of both hosts name the address and the other host.
    for (host, other) in [(1, "h2"), (2, "h1")] {
        let shown = world.host(host).overlay.show(&[], 0, 1).alarms;
        let texts: Vec<_> = shown.iter().filter(|alarm| alarm.name == "duplicate").map(|a| &a.text).collect();
        assert!(texts.len() == 1 && texts[0].contains(other), "{shown:?}");
        assert!(shown.iter().all(|alarm| alarm.name != "forged"), "nobody attacks: {shown:?}");
    }
    assert!(writes <= 10, "{writes} writes: conflicting claims must not load the store");
    let place = world.toward(3, 1, 1);
    world.run(10_000, |world| assert_eq!(world.toward(3, 1, 1), place, "a frozen station does not move"));
}

/// Asserts that no route becomes wrong while `bad` tampers with the store every 30 ms.
fn no_wrong_route(bad: impl FnMut(&mut World, u32)) -> World {
    no_wrong_route_in(World::new(3), bad)
}

/// [`no_wrong_route`] in a given world of three hosts.
pub(super) fn no_wrong_route_in(mut world: World, mut bad: impl FnMut(&mut World, u32)) -> World {
    world.run(300, |_| {});
    world.assert_truth();
    for round in 0..40 {
        bad(&mut world, round);
        world.run(30, |world| {
            for (host, n) in [(1, 2), (1, 3), (2, 1), (2, 3), (3, 1), (3, 2)] {
                let toward = world.toward(host, 1, n);
                assert_eq!(
                    toward,
                    Some(name(n)),
                    "round {round}, {} at {host}: {:?}",
                    mac(n),
                    world.alarms(host)
                );
            }
            assert_eq!(world.computed(1).links.len(), 2);
            assert_eq!(world.computed(1).links[0].remote, address(2));
        });
    }
    world
}

#[test]
fn a_claim_in_another_hosts_name_is_repaired_before_it_settles() {
    let world = no_wrong_route(|world, round| world.put(&station(1), &claim("h3", 2 + round)));
    assert!(world.alarms(3).contains(&"forged".into()));
}

/// Records of this host's own history (from before its start, under an expired lease, or replaced by itself) raise no alarm.
#[test]
fn own_history_is_no_attack() {
    let mut world = World::new(3);
    world.run(300, |_| {});
    // Deleted, added again and edited, faster than the store answers.
    for round in 0..10 {
        let mut local = world.host(1).locals.pop().unwrap();
        world.run(if round % 2 == 0 { 10 } else { 60 }, |_| {});
        local.addresses = vec![ip(100 + round)];
        world.host(1).locals.push(local);
        world.run(if round % 3 == 0 { 10 } else { 60 }, |_| {});
    }
    // The lease expires while the store is unreachable.
    world.disconnect(1);
    world.expire(1);
    world.skip(20_000, |_| {});
    world.connect(1);
    world.run(1_000, |_| {});
    // The host restarts meanwhile, with another guest.
    world.disconnect(1);
    world.host(1).overlay = Overlay::new("h1".into(), 99, settings(1));
    world.host(1).locals = vec![guest(1, 9)];
    world.skip(1_000, |_| {});
    world.connect(1);
    world.run(2_000, |_| {});
    // The host's address changes and changes back.
    for at in [4, 1] {
        world.host(1).overlay.set_address(address(at));
        world.run(500, |_| {});
        assert_eq!(world.computed(2).links[0].remote, address(at));
    }
    assert_eq!(world.alarms(1), Vec::<String>::new());
    assert_eq!(world.toward(2, 1, 9), Some("h1".into()));
    assert_eq!(world.toward(2, 1, 1), None, "its last guest is withdrawn");
}

#[test]
fn a_new_guest_replaces_what_lies_under_its_key() {
    let mut world = World::new(2);
    world.run(300, |_| {});
    for n in [7, 8] {
        world.put(&station(n), "nonsense");
    }
    world.run(100, |_| {});
    world.delete(&station(8));
    world.run(100, |_| {});
    world.host(1).locals.extend([guest(1, 7), guest(1, 8)]);
    world.run(1_000, |_| {});
    for n in [7, 8] {
        assert_eq!(world.toward(2, 1, n), Some("h1".into()), "{n}");
    }
    assert_eq!(world.alarms(1), ["garbage"]);
}

#[test]
fn two_hosts_of_one_name_are_told_so_and_do_not_fight() {
    let mut world = World::new(2);
    world.run(300, |_| {});
    world.disconnect(2);
    let mut namesake = Overlay::new("h1".into(), 99, settings(2));
    namesake.locals(&[guest(1, 2)]);
    world.host(2).overlay = namesake;
    world.connect(2);
    let mut revisions = std::collections::HashSet::new();
    world.run(30_000, |world| {
        revisions.insert((world.value(&station(1)), world.value(&station(2))));
    });
    for host in [1, 2] {
        let shown = world.host(host).overlay.show(&[], 0, 1);
        let text = &shown.alarms.iter().find(|alarm| alarm.name == "name").unwrap().text;
        assert!(text.contains(&address(3 - host).to_string()), "it names the other host: {text}");
        assert!(world.alarms(host).iter().all(|name| name != "forged"), "{shown:?}");
        assert!(shown.alarms_total <= 10, "{shown:?}");
    }
    assert!(revisions.len() <= 8, "{revisions:?}");
}

#[test]
fn the_last_known_state_survives_a_restart() {
    let mut world = World::new(3);
    world.run(300, |_| {});
    let kept = world.host(1).overlay.last_known(None);
    assert_eq!(kept.len(), 4, "{kept:?}");
    let restart = |world: &mut World| {
        world.disconnect(1);
        let mut overlay = Overlay::new("h1".into(), 99, settings(1));
        assert_eq!(overlay.restore(None, &kept), 4);
        world.host(1).overlay = overlay;
        world.run(100, |_| {});
        assert_eq!(world.computed(1).links.len(), 2);
        assert_eq!((world.toward(1, 1, 2), world.toward(1, 1, 3)), (Some("h2".into()), Some("h3".into())));
    };
    restart(&mut world);
    world.connect(1);
    world.run(1_000, |_| {});
    world.assert_truth();
    assert_eq!(world.alarms(1), Vec::<String>::new());

    // While host 1 was down, h3 left, and a new host took its address: the store's records win.
    restart(&mut world);
    world.disconnect(3);
    world.delete("/vnet/v1/1/hosts/h3");
    world.delete(&station(3));
    world.put("/vnet/v1/1/hosts/h4", r#"{"address":"10.0.0.3:9000","instance":4}"#);
    world.connect(1);
    world.run(1_000, |_| {});
    let names = |world: &World| world.computed(1).links.into_iter().map(|link| link.name).collect::<Vec<_>>();
    assert_eq!(names(&world), ["h2".into(), "h4".into()]);
    assert_eq!(world.alarms(1), Vec::<String>::new());
    world.skip(120_000, |_| {});
    assert_eq!(world.host(1).overlay.show(&[], 0, 1).hosts.len(), 2, "h3 is forgotten");
}

#[test]
fn lost_records_are_told_with_their_hosts() {
    let mut world = World::new(3);
    world.run(300, |_| {});
    for host in [2, 3] {
        world.disconnect(host);
        world.expire(host);
    }
    world.disconnect(1);
    world.connect(1);
    let shown = world.host(1).overlay.show(&[], 0, 1).alarms;
    assert!(shown.len() == 1 && shown[0].text.contains("lost 4 of 5 records"), "{shown:?}");
    assert!(shown[0].text.contains("of h2, h3:"), "{shown:?}");
}

#[test]
fn a_claim_for_an_unknown_host_is_ignored() {
    let world = no_wrong_route(|world, round| world.put(&station(1), &claim("h99", 2 + round)));
    assert!(world.alarms(2).contains(&"unknown_host".into()));
}

#[test]
fn a_sequence_number_cannot_be_exhausted() {
    let world = no_wrong_route(|world, round| {
        let sequence = [1 << 31, u32::MAX, (1 << 31) - 1][round as usize % 3];
        world.put(&station(1), &claim("h3", sequence));
    });
    assert!(world.alarms(2).contains(&"sequence".into()));
    let mut moved = world;
    let guest = moved.host(1).locals.pop().unwrap();
    moved.host(2).locals.push(guest);
    // The forgeries froze the station; wait until it thaws.
    moved.skip(400_000, |_| {});
    assert_eq!(moved.toward(3, 1, 1), Some("h2".into()));
}

#[test]
fn malformed_records_are_ignored_and_replaced() {
    let mut world = no_wrong_route(|world, round| {
        world.put(&station(1), "nonsense");
        world.put("/vnet/v1/1/hosts/h2", "{}");
        world.put(&format!("/vnet/v1/1/nonsense/{round}"), "");
    });
    assert!(world.alarms(3).contains(&"garbage".into()));
    world.run(2_000, |_| {});
    world.assert_truth();
}

#[test]
fn an_emptied_store_changes_nothing_and_is_refilled() {
    let mut world = no_wrong_route(|world, _| {
        world.wipe();
        world.reread();
    });
    assert!(world.alarms(1).contains(&"vanished".into()));
    world.run(2_000, |_| {});
    assert_eq!(world.keys(), 6);
}

#[test]
fn a_forged_host_address_is_repaired_before_it_settles() {
    let evil = r#"{"address":"10.9.9.9:9000","instance":5}"#;
    let world = no_wrong_route(|world, _| world.put("/vnet/v1/1/hosts/h2", evil));
    assert!(world.alarms(2).contains(&"forged".into()) || world.alarms(2).contains(&"name".into()));
    // A new host with the address of an existing one, or of this host itself, takes no traffic.
    let copy = r#"{"address":"10.0.0.2:9000","instance":5}"#;
    let own = r#"{"address":"10.0.0.1:9000","instance":5}"#;
    let mut world = no_wrong_route(|world, _| {
        world.put("/vnet/v1/1/hosts/a", copy);
        world.put("/vnet/v1/1/hosts/b", own);
        world.host(1).overlay.check_addresses(1);
    });
    assert!(world.host(1).overlay.show(&[], 0, 1).alarms.iter().any(|alarm| alarm.name == "address"));
}

#[test]
fn forged_withdrawals_are_repaired() {
    let gone = StationRecord { withdrawn: true, ..StationRecord::parse(claim("h1", 1).as_bytes()).unwrap() };
    let left = HostRecord { address: address(1), behind_nat: false, instance: 1, withdrawn: true };
    let (gone, left) = (String::from_utf8(gone.write()).unwrap(), String::from_utf8(left.write()).unwrap());
    // One forgery per record: a host stops repairing a record after five moves.
    no_wrong_route(|world, round| {
        if round == 0 {
            world.put(&station(1), &gone);
        }
        if round == 10 {
            world.put("/vnet/v1/1/hosts/h1", &left);
        }
    });
}

#[test]
fn memory_is_bounded_however_much_is_written() {
    let mut overlay = Overlay::new("h1".into(), 1, settings(1));
    overlay.connected(1, 1);
    overlay.locals(&[guest(1, 1)]);
    overlay.begin_reading();
    let host = HostRecord { address: address(2), behind_nat: false, instance: 1, withdrawn: false };
    overlay.put(b"/vnet/v1/1/hosts/h2", &host.write(), 1, 1, 1);
    let value = claim("h2", 1);
    for n in 0..STATIONS_MAX as u32 + 1000 {
        let [a, b, c, d] = n.to_be_bytes();
        let key = Key::Station(network(1), Mac([2, 1, a, b, c, d])).to_string();
        overlay.put(key.as_bytes(), value.as_bytes(), 0, 2, 1);
    }
    for n in 0..HOSTS_MAX + 10 {
        overlay.put(format!("/vnet/v1/1/hosts/x{n}").as_bytes(), &host.write(), 0, 2, 1);
        overlay.put(format!("/vnet/v1/1/hosts/y{n}").as_bytes(), b"", 0, 2, 1);
        overlay.put(format!("/vnet/v1/9/hosts/z{n}").as_bytes(), &host.write(), 0, 2, 1);
    }
    overlay.end_reading(1);
    let shown = overlay.show(&[], 1, 1);
    assert_eq!(shown.stations, STATIONS_MAX);
    assert_eq!(shown.hosts.len(), HOSTS_MAX);
    assert_eq!(overlay.computed().stations.len(), STATIONS_MAX);
    assert_eq!(overlay.computed().links.len(), 1, "all of them claim one address");
    let limit = shown.alarms.iter().find(|alarm| alarm.name == "limit").unwrap();
    assert_eq!(limit.count, 1000 + 11);
}

#[test]
fn repairs_are_rate_limited() {
    let mut world = World::new(2);
    world.run(300, |_| {});
    for n in 10..250 {
        world.put(&station(n), &claim("h2", 1));
    }
    world.run(1_000, |_| {});
    let withdrawn = (10..250).filter(|n| world.value(&station(*n)).unwrap().contains("withdrawn")).count();
    assert!((50..=110).contains(&withdrawn), "{withdrawn}");
    world.run(5_000, |_| {});
    assert!((10..250).all(|n| world.toward(1, 1, n).is_none()));
    world.skip(70_000, |_| {});
    assert_eq!(world.keys(), 4, "withdrawals expire");
}

#[test]
fn records_that_expire_while_the_store_is_away_are_kept() {
    let mut world = World::new(3);
    world.run(300, |_| {});
    for host in 1..=3 {
        world.disconnect(host);
    }
    (1..=3).for_each(|host| world.expire(host));
    assert_eq!(world.keys(), 0);
    let all = |world: &World| {
        for host in 1..=3 {
            assert_eq!(world.computed(host).links.len(), 2);
            assert_eq!(world.computed(host).stations.len(), 2);
        }
    };
    world.skip(2 * FORGET_MS, all);
    assert!(!world.computed(1).firm);
    // The hosts reconnect one by one, each to a store without the others' records.
    for host in 1..=3 {
        world.connect(host);
        world.run(5_000, all);
    }
    world.assert_truth();
}

#[test]
fn a_missing_host_is_forgotten_eventually() {
    let mut world = World::new(3);
    world.run(300, |_| {});
    world.disconnect(3);
    world.expire(3);
    world.skip(FORGET_MS / 2, |world| assert_eq!(world.toward(1, 1, 3), Some("h3".into())));
    world.reread();
    world.skip(FORGET_MS, |_| {});
    assert_eq!(world.toward(1, 1, 3), Some("h3".into()), "one reading is not enough");
    // The host's link received something: the host is alive, only its record is missing.
    let now_ms = world.now_ms;
    world.host(1).overlay.heard("h3", now_ms);
    world.reread();
    world.skip(20_000, |_| {});
    assert_eq!(world.toward(1, 1, 3), Some("h3".into()));
    assert_eq!(world.toward(2, 1, 3), None);
    world.skip(FORGET_MS, |_| {});
    assert_eq!(world.toward(1, 1, 3), None);
    assert_eq!(world.computed(1).links.len(), 1);
}

#[test]
fn a_host_that_leaves_is_removed_at_once() {
    let mut world = World::new(3);
    world.run(300, |_| {});
    let farewell = world.host(3).overlay.farewell();
    assert_eq!(farewell.len(), 1);
    world.disconnect(3);
    for write in farewell {
        world.put(&write.key, str::from_utf8(&write.value.unwrap()).unwrap());
    }
    world.run(HOLD_MS + 2 * STEP_MS, |_| {});
    assert_eq!((world.toward(1, 1, 3), world.computed(1).links.len()), (None, 1));
    // The host returns as a new instance.
    world.host(3).overlay = Overlay::new("h3".into(), 77, settings(3));
    world.connect(3);
    world.run(500, |_| {});
    world.assert_truth();
}

#[test]
fn an_ip_address_with_two_owners_is_not_answered() {
    let mut world = World::new(3);
    world.host(2).locals[0].addresses = vec![ip(1), ip(2)];
    world.run(300, |_| {});
    for host in 1..=3 {
        let neighbours = world.computed(host).neighbours;
        assert_eq!(neighbours.get(&(network(1), ip(1))), None);
        assert_eq!(neighbours.get(&(network(1), ip(2))), Some(&mac(2)));
    }
}

#[test]
fn in_a_star_all_hosts_communicate_through_the_hub() {
    let hub = || Topology::Hub("h2".into());
    let mut world = World::with((1..=4).map(|host| in_topology(host, hub())).collect());
    world.host(2).locals.clear();
    world.run(300, |_| {});
    let names = |world: &World, host| -> Vec<String> {
        world.computed(host).links.iter().map(|link| link.name.to_string()).collect()
    };
    assert_eq!(names(&world, 1), ["h2"]);
    assert_eq!(names(&world, 2), ["h1", "h3", "h4"], "the hub relays without a member of its own");
    assert!(world.computed(2).links.iter().all(|link| link.spoke));
    assert!(!world.computed(1).links[0].spoke);
    assert_eq!(world.toward(1, 1, 3), Some("h2".into()));
    assert_eq!(world.toward(2, 1, 3), Some("h3".into()));
}

#[test]
fn hosts_behind_nat_are_reached_by_the_first_reflector() {
    let reflectors = vec!["h1".to_string(), "h2".to_string()];
    let make =
        |host: usize| Settings { reflectors: reflectors.clone(), behind_nat: host > 3, ..settings(host) };
    let mut world = World::with((1..=5).map(make).collect());
    let names = |world: &World, host| -> Vec<String> {
        let shown = |link: &PeerLink| format!("{}{}", link.name, if link.spoke { "*" } else { "" });
        world.computed(host).links.iter().map(shown).collect()
    };
    world.run(300, |_| {});
    assert_eq!(names(&world, 1), ["h2", "h3", "h4*", "h5*"]);
    assert_eq!(names(&world, 3), ["h1", "h2"]);
    assert_eq!(names(&world, 4), ["h1"]);
    for (from, to, hop) in
        [(3, 4, "h1"), (4, 5, "h1"), (4, 3, "h1"), (2, 5, "h1"), (1, 5, "h5"), (3, 2, "h2")]
    {
        assert_eq!(world.toward(from, 1, to), Some(hop.into()), "{from} to {to}");
    }
    // The first reflector leaves: the second takes over.
    let farewell = world.host(1).overlay.farewell();
    world.disconnect(1);
    for write in farewell {
        world.put(&write.key, str::from_utf8(&write.value.unwrap()).unwrap());
    }
    world.run(300, |_| {});
    assert_eq!(names(&world, 2), ["h3", "h4*", "h5*"]);
    assert_eq!(world.toward(4, 1, 3), Some("h2".into()));
}

#[test]
fn configured_links_are_used_and_not_computed() {
    let mut world = World::with((1..=2).map(|host| in_topology(host, Topology::Explicit)).collect());
    world.run(300, |_| {});
    assert!(world.computed(1).links.is_empty());
    assert_eq!(world.toward(1, 1, 2), Some("h2".into()));
}

#[derive(Clone, Debug)]
enum Step {
    /// A guest stops, and starts on host `to` after a pause.
    Move {
        n: usize,
        to: usize,
        pause_ms: u64,
    },
    Stop {
        n: usize,
    },
    Disconnect {
        host: usize,
    },
    Connect {
        host: usize,
    },
    Expire {
        host: usize,
    },
    Wipe,
    Wait {
        ms: u64,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let host = || 1..5usize;
    prop_oneof![
        3 => (1..6usize, host(), 0..30u64).prop_map(|(n, to, p)| Step::Move { n, to, pause_ms: p * STEP_MS }),
        1 => (1..6usize).prop_map(|n| Step::Stop { n }),
        1 => host().prop_map(|host| Step::Disconnect { host }),
        1 => host().prop_map(|host| Step::Connect { host }),
        1 => host().prop_map(|host| Step::Expire { host }),
        1 => Just(Step::Wipe),
        3 => (0..40u64).prop_map(|ms| Step::Wait { ms: ms * STEP_MS }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// After any sequence of events every host converges to the oracle's result.
    #[test]
    fn hosts_converge_after_any_events(steps in prop::collection::vec(step(), 1..25)) {
        let mut world = World::new(4);
        // A permanent guest keeps every host in network 1.
        for host in 1..=4 {
            world.host(host).locals = vec![Local { mac: Some(mac(100 + host)), addresses: vec![], ..guest(1, host) }];
        }
        let mut moves = [0; 6];
        for step in steps {
            let stop = |world: &mut World, n: usize| {
                world.hosts.iter_mut().for_each(|host| host.locals.retain(|local| local.mac != Some(mac(n))));
            };
            match step {
                // Five moves would freeze the station.
                Step::Move { n, to, pause_ms } if moves[n] < 3 => {
                    moves[n] += 1;
                    stop(&mut world, n);
                    world.run(pause_ms, |_| {});
                    world.host(to).locals.push(guest(1, n));
                }
                Step::Move { .. } => {}
                Step::Stop { n } => stop(&mut world, n),
                Step::Disconnect { host } => world.disconnect(host),
                Step::Connect { host } => {
                    if !world.host(host).connected {
                        world.connect(host);
                    }
                }
                Step::Expire { host } => {
                    if !world.host(host).connected {
                        world.expire(host);
                    }
                }
                Step::Wipe => world.wipe(),
                Step::Wait { ms } => world.run(ms, |_| {}),
            }
        }
        for host in 1..=4 {
            if !world.host(host).connected {
                world.connect(host);
            }
        }
        world.run(3_000, |_| {});
        // Records that vanished without a withdrawal are kept for FORGET_MS: wait for that to pass.
        for _ in 0..3 {
            world.reread();
            world.skip(FORGET_MS / 2 + SWEEP_MS, |_| {});
        }
        world.assert_truth();
    }
}
