//! The addresses that are asked for. Frames on real devices are the laboratory's matter (lab/tests/test_local.py).

use super::*;

fn socket() -> OwnedFd {
    // Any descriptor: memberships fail on it, which changes nothing here.
    File::open("/dev/null").unwrap().into()
}

fn mac(n: u16) -> Mac {
    let [a, b] = n.to_be_bytes();
    Mac([2, 0, 0, 0, a, b])
}

#[test]
fn what_left_is_asked_for_and_is_ours_for_a_moment() {
    let (socket, mut asked) = (socket(), Asked::new(1));
    asked.hear(&socket, [mac(1), Mac::BROADCAST, Mac::default()].into_iter());
    assert!(asked.has(mac(1)) && asked.is_ours(mac(1)));
    assert_eq!(asked.known.len(), 1, "groups and nobody are not asked for");
    asked.known.get_mut(&mac(1)).unwrap().heard_ms = Some(0);
    asked.started -= std::time::Duration::from_millis(OURS_MS);
    assert!(asked.has(mac(1)) && !asked.is_ours(mac(1)), "it may have moved to the LAN");
}

#[test]
fn configured_addresses_stay_and_go_by_the_configuration() {
    let (socket, mut asked) = (socket(), Asked::new(1));
    asked.configure(&socket, &[mac(1), mac(2)]);
    asked.hear(&socket, [mac(2)].into_iter());
    assert!(asked.has(mac(1)) && !asked.is_ours(mac(1)) && asked.is_ours(mac(2)));
    asked.configure(&socket, &[]);
    assert!(!asked.has(mac(1)) && asked.has(mac(2)), "what was heard stays");
}

#[test]
fn addresses_are_bounded_and_silent_ones_make_room() {
    let (socket, mut asked) = (socket(), Asked::new(1));
    asked.configure(&socket, &[mac(u16::MAX)]);
    asked.hear(&socket, (0..ASKED_MAX as u16 - 1).map(mac));
    asked.hear(&socket, [mac(60_000)].into_iter());
    assert!(!asked.has(mac(60_000)) && asked.known.len() == ASKED_MAX);
    for known in asked.known.values_mut().filter(|known| known.heard_ms.is_some()) {
        known.heard_ms = Some(0);
    }
    asked.started -= std::time::Duration::from_millis(ASKED_MS + 2000);
    asked.hear(&socket, [mac(60_000)].into_iter());
    assert!(asked.has(mac(60_000)) && asked.has(mac(u16::MAX)) && asked.known.len() == 2);
}
