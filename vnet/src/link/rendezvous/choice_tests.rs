use crate::link::rendezvous::client::{ID_LEN, KEY_LEN};
use crate::link::{ANYWHERE, Encapsulation, LinkOptions, Tunnel};

use super::*;

const RELAY: &str = "192.0.2.9:9001";
const STRAIGHT: &str = "198.51.100.2:9000";

fn address(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

fn ticket() -> Ticket {
    Ticket { port: 9001, id: [1; ID_LEN], key: [2; KEY_LEN] }
}

/// A link that has met its peer, and its place.
fn met() -> (Via, Place) {
    let options = LinkOptions {
        name: "h2".into(),
        remote: ANYWHERE,
        ports: 1,
        encapsulation: Encapsulation::Native,
        networks: None,
        mtu: None,
        tunnel: Tunnel::None,
    };
    let via = Via::new("r".into());
    via.met(address(RELAY), ticket());
    (via, Place::new(&options, true))
}

/// The answer to the registration that `via` makes now.
fn answer(via: &Via, other: &str) -> Vec<u8> {
    let (to, question) = via.registration().unwrap();
    assert_eq!(to, address(RELAY));
    let question = Registration::read(&question, &ticket().key).unwrap();
    let answer = Registration { other: Some(address(other)), is_answer: true, ..question };
    answer.to_bytes(&ticket().key).to_vec()
}

#[test]
fn datagrams_go_by_the_host_between_until_the_direct_way_is_confirmed() {
    let (via, place) = met();
    assert_eq!(via.settle(&place), (Some(address(RELAY)), true));
    assert_eq!(via.besides(place.remote()), (false, vec![]), "nobody has said where the other host is");
    assert!(via.answered(&answer(&via, STRAIGHT)));
    assert_eq!(via.besides(place.remote()), (false, vec![address(STRAIGHT)]));
    // The other host hears nothing straight: this one goes on as before, though it does.
    via.heard(address(STRAIGHT), false, (1, 1));
    assert_eq!(via.settle(&place), (None, true));
    assert_eq!(
        (place.remote(), via.sources()),
        (Some(address(RELAY)), vec![address(RELAY), address(STRAIGHT)])
    );
    assert!(via.besides(place.remote()).0, "it says that it hears it");
    via.heard(address(RELAY), true, (1, 2));
    assert_eq!(via.settle(&place), (Some(address(STRAIGHT)), true));
    assert_eq!(via.besides(place.remote()), (true, vec![address(RELAY)]), "the way back stays awake");
    // And back, when the other one hears it no more.
    via.heard(address(RELAY), false, (1, 3));
    assert_eq!(via.settle(&place), (Some(address(RELAY)), true));
    assert!(via.is_between(place.remote().unwrap()));
}

/// One that has another address for each it sends to is answered where it was heard, not where it is said to be.
#[test]
fn where_it_was_heard_counts_more_than_where_it_is_said_to_be() {
    let (via, place) = met();
    let heard = address("198.51.100.2:40000");
    assert!(via.answered(&answer(&via, STRAIGHT)));
    via.heard(heard, true, (1, 4));
    via.settle(&place);
    assert_eq!(place.remote(), Some(heard));
}

#[test]
fn a_direct_way_that_falls_silent_is_left() {
    let (via, place) = met();
    via.heard(address(STRAIGHT), true, (1, 5));
    via.settle(&place);
    assert_eq!(place.remote(), Some(address(STRAIGHT)));
    std::thread::sleep(DIRECT + Duration::from_millis(50));
    assert!(!via.besides(None).0);
    assert_eq!(via.settle(&place).0, Some(address(RELAY)));
}

#[test]
fn what_was_held_back_moves_nothing() {
    let (via, place) = met();
    via.heard(address(STRAIGHT), true, (1, 200));
    via.settle(&place);
    via.heard(address("203.0.113.1:1"), true, (1, 199));
    via.settle(&place);
    assert_eq!(place.remote(), Some(address(STRAIGHT)));
    // A new session's clock may be that of a host that was started again.
    via.heard(address("198.51.100.2:7"), true, (2, 1));
    via.settle(&place);
    assert_eq!(place.remote(), Some(address("198.51.100.2:7")));
}

#[test]
fn an_answer_counts_unless_a_later_one_has_come() {
    let (via, place) = met();
    let late = answer(&via, "203.0.113.1:1");
    let good = answer(&via, STRAIGHT);
    // The round trip to the host between takes longer than the time from one question to the next.
    via.registration();
    assert!(via.answered(&good) && via.answered(&late) && via.answered(&good));
    via.settle(&place);
    assert_eq!(via.besides(place.remote()).1, [address(STRAIGHT)]);
    let mut forged = answer(&via, "203.0.113.1:1");
    forged[63] ^= 1;
    assert!(!via.answered(&forged));
    // Nor does a question come back as an answer.
    let (_, question) = via.registration().unwrap();
    assert!(!via.answered(&question));
    assert_eq!(via.besides(place.remote()).1, [address(STRAIGHT)]);
    assert!(!Via::new("r".into()).answered(&good), "nobody was met");
}
