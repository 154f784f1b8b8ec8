//! The table of subscriptions. Frames on real devices are tested in the lab.

use std::fs::File;

use super::*;

fn socket() -> OwnedFd {
    // Any descriptor works: a failure to set a membership is ignored.
    File::open("/dev/null").unwrap().into()
}

fn mac(n: u16) -> Mac {
    let [a, b] = n.to_be_bytes();
    Mac([2, 0, 0, 0, a, b])
}

#[test]
fn sources_are_subscribed_and_looped_back_frames_recognised_for_a_while() {
    let (socket, mut table) = (socket(), Subscriptions::new(1));
    table.subscribe_sources(&socket, [mac(1), Mac::BROADCAST, Mac::default()].into_iter());
    assert!(table.contains(mac(1)) && table.sent_recently(mac(1)));
    assert_eq!(table.addresses.len(), 1, "group and zero addresses are not subscribed");
    table.addresses.get_mut(&mac(1)).unwrap().sent_ms = Some(0);
    table.started -= std::time::Duration::from_millis(HAIRPIN_MS);
    assert!(table.contains(mac(1)) && !table.sent_recently(mac(1)), "it may have moved to the LAN");
}

#[test]
fn a_forwarded_source_is_recognised_until_its_verdict_has_ended() {
    let (socket, mut table) = (socket(), Subscriptions::new(1));
    table.subscribe_forwarded(&socket, mac(1));
    table.subscribe_sources(&socket, [mac(1)].into_iter());
    table.started -= std::time::Duration::from_millis(FORWARDED_MS + HAIRPIN_MS - 500);
    assert!(table.contains(mac(1)) && table.sent_recently(mac(1)), "the kernel may have sent a frame");
    table.started -= std::time::Duration::from_millis(500);
    assert!(table.contains(mac(1)) && !table.sent_recently(mac(1)));
}

#[test]
fn configured_addresses_follow_the_configuration() {
    let (socket, mut table) = (socket(), Subscriptions::new(1));
    table.configure(&socket, &[mac(1), mac(2)]);
    table.subscribe_sources(&socket, [mac(2)].into_iter());
    assert!(table.contains(mac(1)) && !table.sent_recently(mac(1)) && table.sent_recently(mac(2)));
    table.configure(&socket, &[]);
    assert!(!table.contains(mac(1)) && table.contains(mac(2)), "an address in use stays");
}

#[test]
fn the_table_is_bounded_and_silent_addresses_make_room() {
    let (socket, mut table) = (socket(), Subscriptions::new(1));
    table.configure(&socket, &[mac(u16::MAX)]);
    table.subscribe_sources(&socket, (0..SUBSCRIPTIONS_MAX as u16 - 1).map(mac));
    table.subscribe_sources(&socket, [mac(60_000)].into_iter());
    assert!(!table.contains(mac(60_000)) && table.addresses.len() == SUBSCRIPTIONS_MAX);
    for known in table.addresses.values_mut().filter(|known| known.sent_ms.is_some()) {
        known.sent_ms = Some(0);
    }
    table.started -= std::time::Duration::from_millis(SILENT_MS + 2000);
    table.subscribe_sources(&socket, [mac(60_000)].into_iter());
    assert!(table.contains(mac(60_000)) && table.contains(mac(u16::MAX)) && table.addresses.len() == 2);
}
