//! Hosts with signed records on one store, against a client that writes arbitrary records: unsigned, signed with its own
//! certificate, or replayed.

use std::cell::Cell;

use tempfile::TempDir;

use super::super::oracle::*;
use super::super::record::{Record, StationRecord};
use super::super::tests::no_wrong_route_in;
use super::*;
use vnet::link::sealed::pki::{Flaw, Pki};

fn pki() -> (TempDir, Pki) {
    let folder = tempfile::tempdir().unwrap();
    let pki = Pki::new(folder.path());
    (folder, pki)
}

fn station(n: usize) -> String {
    Key::Station(network(1), mac(n)).to_string()
}

fn host(n: usize) -> String {
    Key::Host(network(1), name(n).into()).to_string()
}

fn claim(host: &str, sequence: u32) -> String {
    format!(r#"{{"host":"{host}","sequence":{sequence}}}"#)
}

/// Signs as host `name` with the claims of its certificate.
fn signer(pki: &Pki, name: &str, serial: u8, claims: &[&str]) -> Authenticator {
    let files = pki.issue(name, serial, Flaw::None, claims);
    Authenticator::new(Arc::new(IdentityStore::open(files, name).unwrap()))
}

/// `value` under `key`, signed.
fn signed_by(signer: &mut Authenticator, key: &str, value: &str) -> String {
    let mut write = Write { key: key.into(), value: Some(value.into()), expect: 0 };
    signer.sign(&mut write).unwrap();
    String::from_utf8(write.value.unwrap()).unwrap()
}

#[test]
fn what_was_kept_is_verified_again() {
    let (_folder, pki) = pki();
    let mut world = World::sealed(3, &pki);
    world.run(400, |_| {});
    let one = world.host(1);
    let (judge, identity) = one.identity.as_ref().unwrap();
    let (kept, identity) = (one.overlay.last_known(Some(judge)), identity.clone());
    assert_eq!(kept.len(), 4);
    assert!(kept.iter().all(|(_, value)| value.contains("\"signature\":")), "{kept:?}");
    let restored = |records: &[(String, String)]| {
        let (mut overlay, mut judge) =
            (Overlay::new("h1".into(), 99, settings(1)), Authenticator::new(identity.clone()));
        let restored = overlay.restore(Some(&mut judge), records);
        (restored, overlay.last_known(Some(&judge)).len())
    };
    assert_eq!(restored(&kept), (4, 4));
    // A forged address; a station without its host; records without a signature.
    let mut forged = kept.clone();
    forged[0].1 = forged[0].1.replace("10.0.0.", "10.9.9.");
    assert_eq!(restored(&forged).0, 2);
    let plain: Vec<_> = kept.iter().map(|(key, _)| (key.clone(), claim("h2", 1))).collect();
    assert_eq!(restored(&plain).0, 0);
}

/// The records of the host's previous run are unsigned: the host replaces them without an alarm.
#[test]
fn a_host_that_switches_to_sealed_raises_no_alarm() {
    let (_folder, pki) = pki();
    let mut world = World::sealed(1, &pki);
    world.run(400, |_| {});
    world.disconnect(1);
    world.put(&host(1), r#"{"address":"10.0.0.1:9000","instance":5}"#);
    world.put(&station(1), &claim("h1", 3));
    world.put(&station(7), &claim("h1", 3));
    let identity = world.host(1).identity.as_ref().unwrap().1.clone();
    world.host(1).identity = Some((Authenticator::new(identity.clone()), identity));
    let mut sealed = Overlay::new("h1".into(), 99, settings(1));
    sealed.locals(&[guest(1, 1)]);
    world.host(1).overlay = sealed;
    world.connect(1);
    world.run(1_000, |_| {});
    assert_eq!(world.alarms(1), Vec::<String>::new());
    assert!(world.value(&host(1)).unwrap().contains("signature"));
    assert!(world.value(&station(1)).unwrap().contains("signature"));
    // Later such a record no longer counts as the host's history.
    world.put(&station(1), &claim("h1", 4));
    world.run(1_000, |_| {});
    assert_eq!(world.alarms(1), ["forged", "untrusted"]);
}

#[test]
fn signed_hosts_find_each_other() {
    let (_folder, pki) = pki();
    let mut world = World::sealed(3, &pki);
    world.host(3).locals.push(guest(2, 30));
    world.run(400, |_| {});
    world.assert_truth();
    assert!(world.value(&host(1)).unwrap().contains("\"certificate\":[\""));
    assert!(!world.value(&station(1)).unwrap().contains("certificate"));
    world.reread();
    world.run(400, |_| {});
    world.assert_truth();
    for host in 1..=3 {
        assert_eq!(world.alarms(host), Vec::<String>::new());
    }
    // Guests can move, as in an overlay without signatures.
    let moved = world.host(1).locals.pop().unwrap();
    world.host(2).locals.push(moved);
    world.host(1).locals.push(guest(1, 10));
    world.run(400, |_| {});
    world.assert_truth();
    assert_eq!(StationRecord::parse(world.value(&station(1)).unwrap().as_bytes()).unwrap().sequence, 2);
}

#[test]
fn unauthorized_records_change_nothing() {
    let (_folder, pki) = pki();
    let (elsewhere, foreign) = self::pki();
    let mut evil = signer(&pki, "evil", 66, &["vnet:mac=02:00:00:00:00:66"]);
    let mut stranger = signer(&foreign, "h1", 1, &[]);
    let at = r#"{"address":"10.0.0.66:9000","instance":66}"#;
    let world = no_wrong_route_in(World::sealed(3, &pki), |world, round| {
        let value = world.value(&station(1)).unwrap();
        // The attacker's certificate allows it to publish a host record in its own name.
        let own = Key::Host(network(2), "evil".into()).to_string();
        world.put(&own, &signed_by(&mut evil, &own, at));
        match round % 8 {
            0 => world.put(&station(1), &claim("h3", 2 + round)),
            1 => world.put(&station(1), &signed_by(&mut stranger, &station(1), &claim("h1", 2 + round))),
            2 => world.put(&host(2), &signed_by(&mut stranger, &host(2), at)),
            3 => world.put(&host(1), &signed_by(&mut stranger, &host(1), at)),
            // A signed value under another key, and a tampered one.
            4 => world.put(&station(2), &value),
            5 => world.put(&station(1), &value.replace("\"sequence\":1", "\"sequence\":2")),
            6 => world.put(&host(3), &world.value(&host(1)).unwrap()),
            // Signed by a trusted host, but in another host's name.
            _ => {
                let text = signed_by(&mut evil, &own, &claim("h3", 2 + round));
                world.put(&station(1), &text);
            }
        }
    });
    for host in 1..=3 {
        assert!(world.alarms(host).contains(&"untrusted".into()), "{:?}", world.alarms(host));
    }
    drop(elsewhere);
}

#[test]
fn a_certificate_limits_what_its_host_may_claim() {
    let (_folder, pki) = pki();
    let mut evil = signer(&pki, "evil", 66, &["vnet:network=1", "vnet:mac=02:00:00:00:00:66"]);
    let place = Key::Host(network(1), "evil".into()).to_string();
    let other = Key::Host(network(2), "evil".into()).to_string();
    let at = r#"{"address":"10.0.0.66:9000","instance":66}"#;
    let mut world = World::sealed(2, &pki);
    world.host(1).locals.push(guest(2, 11));
    world.run(400, |_| {});
    world.put(&place, &signed_by(&mut evil, &place, at));
    let mut without = signer(&pki, "evil", 66, &[]);
    world.put(&other, &signed_by(&mut without, &other, at));
    world.run(400, |_| {});
    // Each record is verified against the certificate that it contains.
    assert_eq!(world.computed(1).links.len(), 2);
    let mut write = Write { key: station(1), value: Some(claim("evil", 2).into()), expect: 0 };
    assert!(evil.sign(&mut write).unwrap_err().contains("vnet:mac"), "an honest host refuses to sign it");
    write.key = other.clone();
    assert!(evil.sign(&mut write).unwrap_err().contains("vnet:network"));
    // Signed with the private key directly, which bypasses the check of claims when signing.
    let key = Key::parse(station(1).as_bytes()).unwrap();
    for sequence in 2..5 {
        let sign = |message: &[u8]| evil.identity.sign(message);
        let value =
            signed_format::sign(&key, claim("evil", sequence).as_bytes(), &[], u64::MAX / 2, sign).unwrap();
        world.put(&station(1), &String::from_utf8(value).unwrap());
        world.run(400, |world| assert_eq!(world.toward(2, 1, 1), Some("h1".into())));
    }
    assert!(world.alarms(2).contains(&"untrusted".into()));
}

#[test]
fn a_replayed_record_is_harmless() {
    let (_folder, pki) = pki();
    let mut world = World::sealed(3, &pki);
    world.run(400, |_| {});
    // Station 9 moves between hosts 1, 2 and 3 without sending frames; all values are recorded for the replay.
    let mut kept = vec![];
    for at in [1, 2, 3, 1, 3] {
        for n in 1..=3 {
            world.host(n).locals.retain(|local| local.mac != Some(mac(9)));
        }
        world.host(at).locals.push(guest(1, 9));
        world.run(400, |_| {});
        kept.push((station(9), world.value(&station(9)).unwrap()));
    }
    kept.push((host(2), world.value(&host(2)).unwrap()));
    // Host 2 changes its address.
    world.host(2).overlay.set_address(address(20));
    world.run(400, |_| {});
    assert_eq!(world.toward(1, 1, 9), Some("h3".into()));
    let right = |world: &World| {
        assert_eq!(world.toward(1, 1, 9), Some("h3".into()));
        assert_eq!(world.computed(1).links[0].remote, address(20));
        assert_eq!(world.computed(3).links[1].remote, address(20));
    };
    kept.remove(4);
    for round in 0..40 {
        let (key, value) = &kept[round % kept.len()];
        if round % 2 == 0 {
            world.delete(key);
        }
        world.put(key, value);
        world.run(30 + 10 * (round as u64 % 20), right);
    }
    assert!(world.alarms(1).contains(&"replayed".into()), "{:?}", world.alarms(1));
    // A replay also fails while the owners are offline and cannot repair the record.
    world.disconnect(2);
    world.disconnect(3);
    for (key, value) in &kept {
        world.put(key, value);
        world.run(2_000, right);
    }
}

#[test]
fn a_renewed_certificate_is_published_without_interruption() {
    let (_folder, pki) = pki();
    let mut world = World::sealed(3, &pki);
    world.run(400, |_| {});
    let before = world.value(&host(2)).unwrap();
    pki.issue("h2", 22, Flaw::None, &[]);
    assert!(world.host(2).identity.as_ref().unwrap().1.refresh().unwrap());
    world.run(400, |world| {
        assert_eq!((world.toward(1, 1, 2), world.toward(1, 1, 3)), (Some("h2".into()), Some("h3".into())));
        assert_eq!(world.computed(1).links.len(), 2);
    });
    world.assert_truth();
    let certificate =
        |text: &str| text.split("certificate").nth(1).unwrap().split(']').next().unwrap().to_string();
    let now = world.value(&host(2)).unwrap();
    assert_ne!(certificate(&before), certificate(&now));
    for host in 1..=3 {
        assert_eq!(world.alarms(host), Vec::<String>::new());
    }
    // A host that joins now accepts all records: the stations, too, are signed with the new certificate.
    let mut late = World::sealed(1, &pki);
    for key in [host(2), host(3), station(2), station(3)] {
        late.put(&key, &world.value(&key).unwrap());
    }
    late.run(400, |_| {});
    assert_eq!(late.toward(1, 1, 2), Some("h2".into()));
    assert_eq!(late.alarms(1), Vec::<String>::new());
}

#[test]
fn a_revoked_host_is_removed_until_it_has_a_new_certificate() {
    let (_folder, pki) = pki();
    let mut world = World::sealed(3, &pki);
    world.run(400, |_| {});
    let refresh = |world: &mut World, hosts: &[usize]| {
        for host in hosts {
            // Refreshing the revoked host's own identity fails and leaves it unchanged.
            let _ = world.host(*host).identity.as_ref().unwrap().1.refresh();
        }
    };
    pki.revoke(&[2]);
    refresh(&mut world, &[1, 2, 3]);
    world.run(100, |_| {});
    world.run(400, |world| {
        assert_eq!(world.computed(1).links.len(), 1);
        assert_eq!((world.toward(1, 1, 2), world.toward(3, 1, 2)), (None, None));
    });
    world.reread();
    world.host(2).locals.push(guest(1, 20));
    world.run(400, |world| assert_eq!((world.toward(1, 1, 2), world.toward(1, 1, 20)), (None, None)));
    assert!(world.alarms(1).contains(&"untrusted".into()));
    // The revoked host's station can move to another host.
    let moved = world.host(2).locals.remove(0);
    world.host(3).locals.push(moved);
    world.run(400, |_| {});
    assert_eq!(world.toward(1, 1, 2), Some("h3".into()));
    pki.issue("h2", 22, Flaw::None, &[]);
    refresh(&mut world, &[2]);
    world.run(400, |_| {});
    world.assert_truth();
    assert_eq!(world.toward(1, 1, 20), Some("h2".into()));
}

#[test]
fn a_station_waits_for_its_hosts_certificate() {
    let (_folder, pki) = pki();
    let mut world = World::sealed(2, &pki);
    world.run(400, |_| {});
    let mut late = World::sealed(1, &pki);
    late.put(&station(2), &world.value(&station(2)).unwrap());
    late.run(400, |world| assert_eq!(world.toward(1, 1, 2), None));
    assert_eq!(late.alarms(1), ["unknown_host"]);
    late.put(&host(2), &world.value(&host(2)).unwrap());
    late.run(400, |_| {});
    assert_eq!(late.toward(1, 1, 2), Some("h2".into()));
    // The queue of waiting records is bounded.
    let mut judge = signer(&pki, "h1", 1, &[]);
    let mut overlay = Overlay::new("h1".into(), 1, settings(1));
    let sign = |_: &[u8]| Ok(vec![0; 64]);
    for n in 0..WAITING_MAX as u32 + 100 {
        let [_, a, b, c] = n.to_be_bytes();
        let key = Key::Station(network(1), Mac([2, 9, 9, a, b, c]));
        let value = signed_format::sign(&key, claim("h9", 1).as_bytes(), &[], 1, sign).unwrap();
        judge.put(&mut overlay, key.to_string().as_bytes(), &value, 1, i64::from(n) + 2, 1);
    }
    assert_eq!(judge.waiting.len(), WAITING_MAX);
    assert!(judge.stations.is_empty());
}

#[test]
fn an_expired_certificate_keeps_its_settled_records() {
    let (_folder, pki) = pki();
    let mut judge = signer(&pki, "h1", 1, &[]);
    let mut overlay = Overlay::new("h1".into(), 1, settings(1));
    let mut other = signer(&pki, "h2", 2, &[]);
    let at = r#"{"address":"10.0.0.2:9000","instance":2}"#;
    let revision = Cell::new(1);
    let put = |judge: &mut Authenticator, overlay: &mut Overlay, key: &str, value: &str| {
        revision.set(revision.get() + 1);
        judge.put(overlay, key.as_bytes(), value.as_bytes(), 1, revision.get(), 1);
    };
    put(&mut judge, &mut overlay, &host(2), &signed_by(&mut other, &host(2), at));
    put(&mut judge, &mut overlay, &station(2), &signed_by(&mut other, &station(2), &claim("h2", 1)));
    let known = judge.hosts.get_mut(&(network(1), "h2".into())).unwrap();
    Arc::get_mut(&mut known.signatory).unwrap().end_now();
    judge.refresh(&mut overlay, 2);
    let stations = |overlay: &mut Overlay| overlay.computed().stations.len();
    overlay.locals(&[guest(1, 1)]);
    assert_eq!(stations(&mut overlay), 1);
    put(&mut judge, &mut overlay, &station(3), &signed_by(&mut other, &station(3), &claim("h2", 1)));
    assert_eq!(stations(&mut overlay), 1, "records signed after expiry are rejected");
}

#[test]
fn records_that_the_overlay_drops_are_forgotten() {
    let (_folder, pki) = pki();
    let (mut judge, mut other) = (signer(&pki, "h1", 1, &[]), signer(&pki, "h2", 2, &[]));
    let mut overlay = Overlay::new("h1".into(), 1, settings(1));
    let mut put = |judge: &mut Authenticator, key: &str, value: &str, revision| {
        let value = signed_by(&mut other, key, value);
        judge.put(&mut overlay, key.as_bytes(), value.as_bytes(), 1, revision, 1);
    };
    put(&mut judge, &host(2), r#"{"address":"0.0.0.0:1","instance":2}"#, 2);
    assert!(judge.hosts.is_empty(), "signed, but invalid");
    put(&mut judge, &host(2), r#"{"address":"10.0.0.2:9000","instance":2}"#, 3);
    put(&mut judge, &station(2), r#"{"host":"h2","sequence":-1}"#, 4);
    assert!(judge.hosts.len() == 1 && judge.stations.is_empty());
    put(&mut judge, &station(2), &claim("h2", 1), 5);
    assert_eq!(judge.stations.len(), 1);
}

#[test]
fn signing_times_are_strictly_increasing() {
    let (_folder, pki) = pki();
    let mut one = signer(&pki, "h1", 1, &[]);
    let number = |text: &str| -> u64 {
        text.split("\"signed\":").nth(1).unwrap().split([',', '}']).next().unwrap().parse().unwrap()
    };
    let first = number(&signed_by(&mut one, &station(1), &claim("h1", 1)));
    one.signed = first + 3_600_000_000;
    let next = signed_by(&mut one, &station(1), &claim("h1", 1));
    assert_eq!(number(&next), first + 3_600_000_001, "despite a clock that went back by an hour");
    // After a restart the host finds the values of its previous run in the store.
    let mut again = Authenticator::new(one.store.clone());
    let mut overlay = Overlay::new("h1".into(), 2, settings(1));
    again.put(&mut overlay, station(1).as_bytes(), next.as_bytes(), 1, 2, 1);
    assert!(number(&signed_by(&mut again, &station(1), &claim("h1", 1))) > number(&next));
}

#[test]
fn many_records_are_verified_in_time() {
    let (_folder, pki) = pki();
    let mut judge = signer(&pki, "h1", 1, &[]);
    let mut other = signer(&pki, "h2", 2, &[]);
    let mut overlay = Overlay::new("h1".into(), 1, settings(1));
    let at = r#"{"address":"10.0.0.2:9000","instance":2}"#;
    let value = signed_by(&mut other, &host(2), at);
    judge.put(&mut overlay, host(2).as_bytes(), value.as_bytes(), 1, 2, 1);
    let records: Vec<_> = (0..1000u32)
        .map(|n| {
            let [_, a, b, c] = n.to_be_bytes();
            let key = Key::Station(network(1), Mac([2, 9, 9, a, b, c])).to_string();
            let value = signed_by(&mut other, &key, &claim("h2", 1));
            (key, value)
        })
        .collect();
    let mut read = || {
        let begun = std::time::Instant::now();
        for (index, (key, value)) in records.iter().enumerate() {
            judge.put(&mut overlay, key.as_bytes(), value.as_bytes(), 1, index as i64 + 3, 1);
        }
        begun.elapsed()
    };
    let first = read();
    let again = (0..5).map(|_| read()).min().unwrap();
    println!("1000 records: {first:?}, and {again:?} when known");
    assert_eq!(judge.stations.len(), 1000);
    assert!(again * 5 < first, "{again:?} for known records, {first:?} for new ones");
}
