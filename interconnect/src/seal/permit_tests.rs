//! Permission for packets in raw Ethernet frames, on a fake clock.

use super::*;

const MS: u64 = 1_000_000;
const PACKET: [u8; 3] = [0x13, 1, 2];

/// Address of a station.
fn station() -> SocketAddr {
    "[fe80::ff:fe00:1]:7000".parse().unwrap()
}

/// A node at an Ethernet device whose daemon listens.
fn node() -> Sealing {
    let mut sealing = Sealing::of_frames(station(), false, [1; 32]);
    sealing.connected();
    sealing
}

/// Number of questions since the last call.
fn questions(sealing: &mut Sealing) -> usize {
    std::iter::from_fn(|| sealing.next_ask())
        .map(|ask| assert_eq!(ask, Message::Reach(Question::ANY)))
        .count()
}

fn leaves(sealing: &mut Sealing, now: u64) -> bool {
    matches!(sealing.depart(now, station(), &PACKET, Span::EMPTY), Way::Clear)
}

fn arrives(sealing: &mut Sealing, now: u64) -> bool {
    sealing.arrive(now, station(), &mut PACKET.clone()).is_some()
}

fn answer(sealing: &mut Sealing, now: u64, reach: Reach) {
    sealing.reached(now, Question::ANY.peer, reach);
}

#[test]
fn nothing_leaves_before_the_daemon_has_answered() {
    let mut own = node();
    assert_eq!(own.permission(0), Permission::Awaited);
    assert!(!leaves(&mut own, 0) && !leaves(&mut own, MS));
    assert_eq!((questions(&mut own), own.counters().unsent), (1, 2));
    // A busy daemon is asked again after a moment.
    answer(&mut own, MS, Reach::NotYet);
    assert!(!leaves(&mut own, 2 * MS) && !leaves(&mut own, 30 * MS) && !leaves(&mut own, 31 * MS));
    assert_eq!(questions(&mut own), 1);
    answer(&mut own, 40 * MS, Reach::AllClear);
    assert!(leaves(&mut own, 41 * MS) && arrives(&mut own, 41 * MS));
    assert_eq!((own.permission(41 * MS), questions(&mut own)), (Permission::Given, 0));
}

#[test]
fn a_link_that_becomes_sealed_ends_it_until_it_is_clear_again() {
    let mut own = node();
    own.permission(0);
    answer(&mut own, 0, Reach::AllClear);
    assert_eq!(questions(&mut own), 1);
    assert!(leaves(&mut own, LOOK_AGAIN_NS - 1));
    assert_eq!(questions(&mut own), 0, "once a minute");
    assert!(leaves(&mut own, LOOK_AGAIN_NS));
    assert_eq!(questions(&mut own), 1);
    answer(&mut own, LOOK_AGAIN_NS, Reach::SomeSealed);
    let now = LOOK_AGAIN_NS + MS;
    assert!(!leaves(&mut own, now) && !arrives(&mut own, now));
    let counters = own.counters();
    assert_eq!((counters.unsent, counters.clear), (1, 1));
    let note = own.next_note().unwrap();
    assert!(note.contains("raw Ethernet") && note.contains("VNET_RDMA_SEAL=off"), "{note}");
    // A busy daemon changes nothing, and neither does one that is gone.
    assert!(!leaves(&mut own, now + DOUBT_NS));
    assert_eq!(questions(&mut own), 1);
    answer(&mut own, now + DOUBT_NS, Reach::NotYet);
    own.disconnected();
    assert!(!leaves(&mut own, now + DOUBT_NS));
    own.connected();
    assert!(!leaves(&mut own, now + DOUBT_NS));
    assert_eq!(questions(&mut own), 1, "another daemon is asked at once");
    answer(&mut own, now + DOUBT_NS, Reach::AllClear);
    assert!(leaves(&mut own, now + DOUBT_NS) && arrives(&mut own, now + DOUBT_NS));
    assert_eq!(own.next_note(), None, "one line");
}

#[test]
fn without_a_daemon_and_for_who_wants_clear_text_packets_leave() {
    let mut alone = Sealing::of_frames(station(), false, [1; 32]);
    assert!(leaves(&mut alone, 0) && arrives(&mut alone, 0));
    let mut off = Sealing::of_frames(station(), true, [1; 32]);
    off.connected();
    assert!(leaves(&mut off, 0) && arrives(&mut off, 0));
    // An older daemon ends the connection instead of an answer.
    let mut older = node();
    for _ in 0..STRIKES {
        older.connected();
        assert!(!leaves(&mut older, 0));
        assert_eq!(questions(&mut older), 1);
        older.disconnected();
    }
    assert!(leaves(&mut older, 0));
}
