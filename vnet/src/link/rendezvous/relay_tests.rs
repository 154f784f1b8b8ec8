use std::net::TcpListener;

use super::*;
use crate::link::rendezvous::client::attend;
use crate::link::rendezvous::relay_succession::PairState;
use crate::link::sealed::identity::Identity;
use crate::link::sealed::pki::Pki;

/// A relay that admits each guest under the name that the test gives it.
struct Between {
    relay: Arc<Relay>,
    identity: Arc<Identity>,
    listener: TcpListener,
}

impl Between {
    fn new(pki: &Pki, pairs: u16) -> Between {
        let relay =
            Arc::new(Relay::start("127.0.0.1:0".parse().unwrap(), pairs, Arc::default(), vec![]).unwrap());
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        Between { relay, identity: Arc::new(pki.identity("r")), listener }
    }

    /// Makes a host ask for another host; the returned thread holds the outcome.
    fn ask(&self, identity: Identity, name: &str, wanted: &str) -> Asked {
        let to = self.listener.local_addr().unwrap();
        let (own, other) = (name.to_string(), wanted.to_string());
        let asked = std::thread::spawn(move || {
            attend(TcpStream::connect(to).unwrap(), &identity, "r", &other).map_err(|error| error.0)
        });
        let (stream, _) = self.listener.accept().unwrap();
        let (relay, identity, known) = (self.relay.clone(), self.identity.clone(), wanted.to_string());
        std::thread::spawn(move || {
            let channel = Channel::accept(stream, &identity, &[ALPN]).unwrap();
            let chain = channel.certificates().unwrap();
            let guest = Guest { channel, chain, host: Ok(own), known: vec![known] };
            relay.admit(guest).unwrap()();
        });
        asked
    }
}

type Asked = JoinHandle<Result<(TcpStream, Ticket), String>>;

fn pki() -> (tempfile::TempDir, Pki) {
    let folder = tempfile::tempdir().unwrap();
    let pki = Pki::new(folder.path());
    (folder, pki)
}

fn socket() -> UdpSocket {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    socket
}

/// Registers and returns the answer.
fn register(socket: &UdpSocket, ticket: &Ticket, number: u64) -> Registration {
    let question = Registration { id: ticket.id, number, other: None, is_answer: false };
    socket.send_to(&question.to_bytes(&ticket.key), ("127.0.0.1", ticket.port)).unwrap();
    receive(socket, &ticket.key)
}

fn receive(socket: &UdpSocket, key: &[u8; KEY_LEN]) -> Registration {
    let mut buffer = [0; 100];
    let (len, _) = socket.recv_from(&mut buffer).unwrap();
    Registration::read(&buffer[..len], key).expect("an answer")
}

#[test]
fn two_hosts_meet_and_their_datagrams_are_forwarded() {
    let (_folder, pki) = pki();
    let between = Between::new(&pki, 1);
    let first = between.ask(pki.identity("h2"), "h2", "H1");
    let second = between.ask(pki.identity("h1"), "h1", "h2");
    let (one, ticket_one) = second.join().unwrap().unwrap();
    let (other, ticket_other) = first.join().unwrap().unwrap();
    assert_eq!(ticket_one.port, ticket_other.port);
    assert!(ticket_one.id != ticket_other.id && ticket_one.key != ticket_other.key);
    // The other host reads the first byte that is sent after the outer TLS.
    for (mut from, mut to) in [(&one, &other), (&other, &one)] {
        from.write_all(b"said in clear here, for it is the end of the one TLS and the begin of the other")
            .unwrap();
        let mut heard = [0; 79];
        to.read_exact(&mut heard).unwrap();
        assert!(heard.starts_with(b"said in clear here") && heard.ends_with(b"the other"));
    }
    let (near, far, stranger) = (socket(), socket(), socket());
    let to = ("127.0.0.1", ticket_one.port);
    assert_eq!(register(&near, &ticket_one, 1).other, None);
    let answer = register(&far, &ticket_other, 5);
    assert_eq!((answer.number, answer.other, answer.is_answer), (5, near.local_addr().ok(), true));
    assert_eq!(register(&near, &ticket_one, 2).other, far.local_addr().ok());
    // Datagrams of unknown hosts, replayed registrations and registrations under another key are dropped.
    stranger.send_to(b"whatever", to).unwrap();
    let recorded = Registration { id: ticket_one.id, number: 2, other: None, is_answer: false };
    stranger.send_to(&recorded.to_bytes(&ticket_one.key), to).unwrap();
    let forged = Registration { number: 9, ..recorded };
    stranger.send_to(&forged.to_bytes(&ticket_other.key), to).unwrap();
    for (from, by, text) in [(&near, &far, "one way"), (&far, &near, "the other way")] {
        from.send_to(text.as_bytes(), to).unwrap();
        let mut buffer = [0; 100];
        let (len, source) = by.recv_from(&mut buffer).unwrap();
        assert_eq!((&buffer[..len], source.port()), (text.as_bytes(), ticket_one.port));
    }
    let stats = &between.relay.state.stats;
    // The last datagram may be counted shortly after it has arrived.
    let until = Instant::now() + Duration::from_secs(5);
    while stats.out_datagrams.get() < 3 + 2 && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(1));
    }
    let discarded = stats.discards(DiscardReason::UnknownSource);
    assert_eq!((stats.in_datagrams.get(), stats.out_datagrams.get(), discarded), (8, 3 + 2, 3));
}

/// The relay of the next vnetd, after the one before stands still.
fn succeed(relay: &Relay) -> Relay {
    let (sockets, frozen) = relay.hand_over().unwrap();
    let heir = Relay::start("127.0.0.1:0".parse().unwrap(), 1, Arc::default(), sockets).unwrap();
    relay.rest();
    for bytes in relay.states() {
        let pair = PairState::parse(&bytes).unwrap();
        assert!(pair.to_bytes().len() == bytes.len() && bytes.len() <= bytes.capacity());
        for len in 0..bytes.len() {
            assert!(PairState::parse(&bytes[..len]).is_err(), "{len} bytes");
        }
        heir.resume(pair);
    }
    heir.resumed();
    drop(frozen);
    heir
}

#[test]
fn hosts_go_on_to_meet_at_the_next_vnetd() {
    let (_folder, pki) = pki();
    let between = Between::new(&pki, 2);
    let second = between.ask(pki.identity("h2"), "h2", "h1");
    let (_one, ticket_one) = between.ask(pki.identity("h1"), "h1", "h2").join().unwrap().unwrap();
    let (_other, ticket_other) = second.join().unwrap().unwrap();
    let (near, far) = (socket(), socket());
    register(&near, &ticket_one, 5);
    register(&far, &ticket_other, 6);
    let pass = |from: &UdpSocket, to: &UdpSocket, text: &str| {
        from.send_to(text.as_bytes(), ("127.0.0.1", ticket_one.port)).unwrap();
        let mut buffer = [0; 100];
        let (len, source) = to.recv_from(&mut buffer).unwrap();
        assert_eq!((&buffer[..len], source.port()), (text.as_bytes(), ticket_one.port));
    };
    pass(&near, &far, "before");
    // No pair begins while the next vnetd prepares itself.
    let (_, frozen) = between.relay.hand_over().unwrap();
    let refused = between.ask(pki.identity("h1"), "h1", "h3").join().unwrap().unwrap_err();
    assert!(refused.contains("is being replaced"), "{refused}");
    between.relay.retain(&|_, _| false);
    drop(frozen);

    let heir = succeed(&between.relay);
    pass(&near, &far, "one way");
    pass(&far, &near, "the other way");
    // A registration of the vnetd before is not accepted again.
    let recorded = Registration { id: ticket_one.id, number: 5, other: None, is_answer: false };
    let stranger = socket();
    stranger.send_to(&recorded.to_bytes(&ticket_one.key), ("127.0.0.1", ticket_one.port)).unwrap();
    pass(&far, &near, "still there");
    assert_eq!(heir.state.stats.discards(DiscardReason::UnknownSource), 1);
    assert_eq!(register(&near, &ticket_one, 7).other, far.local_addr().ok());
    // The next one fails: the one before goes on where it stood.
    drop(heir);
    near.send_to(b"waits", ("127.0.0.1", ticket_one.port)).unwrap();
    between.relay.go_on();
    let mut buffer = [0; 100];
    let (len, _) = far.recv_from(&mut buffer).unwrap();
    assert_eq!(&buffer[..len], b"waits");
    between.relay.retain(&|name, _| name != "h2");
    assert!(between.relay.states().is_empty());
}

#[test]
fn a_host_whose_peer_does_not_come_is_told() {
    let (_folder, pki) = pki();
    let between = Between::new(&pki, 1);
    let begun = Instant::now();
    let alone = between.ask(pki.identity("h1"), "h1", "h2").join().unwrap().unwrap_err();
    assert_eq!(alone, "r refused: h2 has not come");
    assert!(begun.elapsed() < WAIT + Duration::from_secs(1));
    let pairs = || between.relay.state.pairs.lock().len();
    while pairs() > 0 {
        assert!(begun.elapsed() < WAIT + Duration::from_secs(2), "nobody waits any more");
        std::thread::sleep(Duration::from_millis(10));
    }
    let alone = between.ask(pki.identity("h1"), "h1", "h2");
    while pairs() == 0 {
        std::thread::sleep(Duration::from_millis(10));
    }
    let another = between.ask(pki.identity("h1"), "h1", "h3").join().unwrap().unwrap_err();
    assert!(another.contains("1 pairs of hosts meet here, the limit"), "{another}");
    between.relay.retain(&|_, _| false);
    assert_eq!(pairs(), 1, "nobody was there to be forgotten");
    assert!(alone.join().unwrap().is_err());
}

/// A host that asks again, because its connection was lost, replaces its older connection.
#[test]
fn a_newer_connection_of_a_host_replaces_the_one_that_waits() {
    let (_folder, pki) = pki();
    let between = Between::new(&pki, 2);
    let before = between.ask(pki.identity("h1"), "h1", "h2");
    std::thread::sleep(Duration::from_millis(200));
    let waiting = between.ask(pki.identity("h1"), "h1", "h2");
    assert_eq!(before.join().unwrap().unwrap_err(), "r refused: h2 has not come");
    let come = between.ask(pki.identity("h2"), "h2", "h1");
    assert!(waiting.join().unwrap().is_ok() && come.join().unwrap().is_ok());
    between.relay.retain(&|name, chain| name != "h2" || chain.is_empty());
    assert!(between.relay.state.pairs.lock().is_empty(), "h2 was forgotten");
}

/// The relay refuses a guest without a sealed link here, and a guest that asks for a host without one.
#[test]
fn only_hosts_with_sealed_links_meet() {
    let (_folder, pki) = pki();
    let between = Between::new(&pki, 1);
    for (host, known, expected) in [
        (Err("the certificate is not for h9".to_string()), vec!["h2"], "the certificate is not for h9"),
        (Ok("h1".to_string()), vec!["h1", "h3"], "this host has no link with h2"),
        (Ok("h2".to_string()), vec!["h2"], "this host has no link with h2"),
    ] {
        let (to, identity) = (between.listener.local_addr().unwrap(), pki.identity("h1"));
        let asked = std::thread::spawn(move || {
            attend(TcpStream::connect(to).unwrap(), &identity, "r", "h2").map_err(|error| error.0)
        });
        let channel =
            Channel::accept(between.listener.accept().unwrap().0, &between.identity, &[ALPN]).unwrap();
        let chain = channel.certificates().unwrap();
        let known = known.into_iter().map(String::from).collect();
        let refused = between.relay.admit(Guest { channel, chain, host, known });
        assert_eq!(refused.map(drop).unwrap_err().0, expected);
        assert_eq!(asked.join().unwrap().unwrap_err(), format!("r refused: {expected}"));
    }
}
