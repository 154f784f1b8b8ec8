use crate::link::ANYWHERE;
use crate::link::rendezvous::client::{ID_LEN, KEY_LEN};
use crate::link::sealed::roaming::RemoteAddress;

use super::*;

const RELAY: &str = "192.0.2.9:9001";
const PEER: &str = "198.51.100.2:9000";

fn address(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

fn ticket() -> Ticket {
    Ticket { port: 9001, id: [1; ID_LEN], key: [2; KEY_LEN] }
}

/// The path choice of a link that has met its peer, and its remote address.
fn met() -> (PathChoice, RemoteAddress) {
    let via = PathChoice::new("r".into());
    via.met(address(RELAY), ticket());
    (via, RemoteAddress::new(ANYWHERE, 1, true))
}

/// Settles the path as the keeper does.
fn settle(via: &PathChoice, place: &RemoteAddress) -> (Option<SocketAddr>, bool) {
    let settled = via.settle(place.remote());
    settled.0.iter().for_each(|remote| place.move_to(*remote));
    settled
}

/// The answer to the registration that `via` sends now.
fn answer(via: &PathChoice, other: &str) -> Vec<u8> {
    let (to, question) = via.registration().unwrap();
    assert_eq!(to, address(RELAY));
    let question = Registration::read(&question, &ticket().key).unwrap();
    let answer = Registration { other: Some(address(other)), is_answer: true, ..question };
    answer.to_bytes(&ticket().key).to_vec()
}

#[test]
fn datagrams_are_relayed_until_the_direct_path_is_confirmed() {
    let (via, place) = met();
    assert_eq!(settle(&via, &place), (Some(address(RELAY)), true));
    assert_eq!(
        via.other_paths(place.remote()),
        (false, vec![]),
        "the relay has not reported the other host's address"
    );
    assert!(via.answered(&answer(&via, PEER)));
    assert_eq!(via.other_paths(place.remote()), (false, vec![address(PEER)]));
    // The other host hears nothing directly: datagrams are still relayed, although this host hears the other one.
    via.heard(address(PEER), false, (1, 1));
    assert_eq!(settle(&via, &place), (None, true));
    assert_eq!((place.remote(), via.sources()), (Some(address(RELAY)), vec![address(RELAY), address(PEER)]));
    assert!(via.other_paths(place.remote()).0, "keepalives confirm that it is heard");
    via.heard(address(RELAY), true, (1, 2));
    assert_eq!(settle(&via, &place), (Some(address(PEER)), true));
    assert_eq!(
        via.other_paths(place.remote()),
        (true, vec![address(RELAY)]),
        "the NAT mapping towards the relay stays alive"
    );
    // Relayed again once the other host no longer hears this host directly.
    via.heard(address(RELAY), false, (1, 3));
    assert_eq!(settle(&via, &place), (Some(address(RELAY)), true));
    assert!(via.is_relay(place.remote().unwrap()));
}

/// A NAT that maps each destination to another address: the peer is answered at the address where it was heard, not at the one
/// that the relay reports.
#[test]
fn the_heard_address_wins_over_the_reported_one() {
    let (via, place) = met();
    let heard = address("198.51.100.2:40000");
    assert!(via.answered(&answer(&via, PEER)));
    via.heard(heard, true, (1, 4));
    settle(&via, &place);
    assert_eq!(place.remote(), Some(heard));
}

#[test]
fn a_silent_direct_path_is_left() {
    let (via, place) = met();
    via.heard(address(PEER), true, (1, 5));
    settle(&via, &place);
    assert_eq!(place.remote(), Some(address(PEER)));
    std::thread::sleep(DIRECT + Duration::from_millis(50));
    assert!(!via.other_paths(None).0);
    assert_eq!(settle(&via, &place).0, Some(address(RELAY)));
}

#[test]
fn a_delayed_keepalive_moves_nothing() {
    let (via, place) = met();
    via.heard(address(PEER), true, (1, 200));
    settle(&via, &place);
    via.heard(address("203.0.113.1:1"), true, (1, 199));
    settle(&via, &place);
    assert_eq!(place.remote(), Some(address(PEER)));
    // The clock of a new session may restart with the host.
    via.heard(address("198.51.100.2:7"), true, (2, 1));
    settle(&via, &place);
    assert_eq!(place.remote(), Some(address("198.51.100.2:7")));
}

#[test]
fn an_answer_counts_unless_a_later_one_has_come() {
    let (via, place) = met();
    let late = answer(&via, "203.0.113.1:1");
    let good = answer(&via, PEER);
    // The round trip to the relay takes longer than the interval of registrations.
    via.registration();
    assert!(via.answered(&good) && via.answered(&late) && via.answered(&good));
    settle(&via, &place);
    assert_eq!(via.other_paths(place.remote()).1, [address(PEER)]);
    let mut forged = answer(&via, "203.0.113.1:1");
    forged[63] ^= 1;
    assert!(!via.answered(&forged));
    // A reflected registration is not accepted as an answer.
    let (_, question) = via.registration().unwrap();
    assert!(!via.answered(&question));
    assert_eq!(via.other_paths(place.remote()).1, [address(PEER)]);
    assert!(!PathChoice::new("r".into()).answered(&good), "no ticket");
}
