//! Live migration: a guest's location moves at once, and the source forwards frames that still arrive there.

use super::oracle::*;
use super::record::{Key, Record, StationRecord};
use super::{HOLD_MS, Local};

/// The store's record of guest 1.
fn stored(world: &World) -> StationRecord {
    let key = Key::Station(network(1), mac(1)).to_string();
    StationRecord::parse(world.value(&key).unwrap().as_bytes()).unwrap()
}

/// Stops guest 1 on host 1 as QEMU does at the end of a live migration.
fn departs(world: &mut World) -> Local {
    let local = &mut world.host(1).locals[0];
    let arrived = local.clone();
    (local.up, local.departed) = (false, true);
    arrived
}

/// A live migration: at every moment every host knows exactly one location, and the source forwards until the time is over.
#[test]
fn a_migrating_guest_moves_at_once() {
    for interface_stays in [true, false] {
        let mut world = World::new(3);
        world.hosts.iter_mut().for_each(|host| host.overlay.settings.forward_ms = 5_000);
        world.run(300, |_| {});
        let arrived = departs(&mut world);
        // It stands still for longer than a claim takes.
        world.run(400, |world| {
            assert_eq!(world.toward(3, 1, 1), Some("h1".into()));
            assert_eq!(world.toward(1, 1, 1), None);
            assert!(world.computed(1).forwarded.is_empty(), "nobody has claimed it");
            let stored = stored(world);
            assert!(*stored.host == *"h1" && !stored.withdrawn);
        });
        if !interface_stays {
            world.host(1).locals.clear();
        }
        world.host(2).locals.push(arrived);
        let mut forwarded_ms = None;
        world.run(200, |world| {
            let there = world.toward(3, 1, 1).unwrap();
            let forwarded = world.computed(1).forwarded.contains(&(network(1), mac(1)));
            assert_eq!(forwarded, world.toward(1, 1, 1) == Some("h2".into()));
            forwarded_ms = forwarded_ms.or(forwarded.then_some(world.now_ms));
            assert!(there == "h1" || forwarded, "the source knows it before the others send there");
            assert!(!stored(world).withdrawn);
        });
        let forwarded_ms = forwarded_ms.unwrap();
        assert!(
            world.now_ms - forwarded_ms >= HOLD_MS - 20,
            "the source follows before the hold time is over"
        );
        assert_eq!(world.toward(3, 1, 1), Some("h2".into()));
        // Forwarding ends after its time.
        world.run(4_000, |world| assert_eq!(world.computed(1).forwarded.len(), 1));
        world.run(1_000, |_| {});
        assert!(world.computed(1).forwarded.is_empty());
        assert_eq!(world.toward(3, 1, 1), Some("h2".into()));
        assert!((1..=3).all(|host| world.alarms(host).is_empty()));
    }
}

/// A guest that migrates back while the first source still forwards for it arrives there as at any other host.
#[test]
fn a_guest_migrates_there_and_back() {
    let mut world = World::new(3);
    world.hosts.iter_mut().for_each(|host| host.overlay.settings.forward_ms = 10_000);
    world.run(300, |_| {});
    let arrived = departs(&mut world);
    world.run(100, |_| {});
    world.host(2).locals.push(arrived.clone());
    world.run(1_000, |_| {});
    assert_eq!(world.toward(1, 1, 1), Some("h2".into()));
    // An interface waits on host 1 for the guest, which stops on host 2.
    world.host(1).locals[0].departed = false;
    world.run(500, |world| assert_eq!(world.toward(1, 1, 1), Some("h2".into())));
    let local = world.host(2).locals.last_mut().unwrap();
    (local.up, local.departed) = (false, true);
    world.run(200, |world| assert_eq!(world.toward(1, 1, 1), Some("h2".into())));
    world.host(1).locals[0] = arrived;
    world.run(100, |_| {});
    // At home at once, and never again elsewhere.
    world.run(15_000, |world| {
        assert_eq!(world.toward(1, 1, 1), None);
        assert_eq!(world.toward(2, 1, 1), Some("h1".into()));
    });
    assert_eq!(world.toward(3, 1, 1), Some("h1".into()));
    assert!((1..=3).all(|host| world.alarms(host).is_empty()));
}

/// The migration fails: the guest runs on where it was, or nowhere.
#[test]
fn a_guest_that_does_not_arrive_stays_or_is_withdrawn() {
    let mut world = World::new(3);
    world.hosts.iter_mut().for_each(|host| host.overlay.settings.forward_ms = 1_000);
    world.run(300, |_| {});
    let before = stored(&world);
    departs(&mut world);
    world.run(500, |_| {});
    world.host(1).locals[0] = guest(1, 1);
    world.run(2_000, |world| assert_eq!(world.toward(3, 1, 1), Some("h1".into())));
    assert_eq!(stored(&world), before);
    departs(&mut world);
    world.run(1_500, |_| {});
    assert_eq!(world.toward(3, 1, 1), None);
    // It may depart and come back repeatedly.
    world.host(1).locals[0] = guest(1, 1);
    world.run(500, |_| {});
    assert_eq!(world.toward(3, 1, 1), Some("h1".into()));
}
