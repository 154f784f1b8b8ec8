use std::net::TcpListener;

use super::*;
use crate::link::rendezvous::client::{self, attend};
use crate::link::sealed::identity::Identity;
use crate::link::sealed::pki::Pki;

/// A host between that takes whoever comes, by the name in `names` at its place.
struct Between {
    meetings: Arc<Meetings>,
    identity: Arc<Identity>,
    listener: TcpListener,
}

impl Between {
    fn new(pki: &Pki, pairs: u16) -> Between {
        let meetings =
            Arc::new(Meetings::start("127.0.0.1:0".parse().unwrap(), pairs, Arc::default()).unwrap());
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        Between { meetings, identity: Arc::new(pki.identity("r")), listener }
    }

    /// A host asks for another; the thread gives what became of it.
    fn ask(&self, identity: Identity, name: &str, wanted: &str) -> Asked {
        let to = self.listener.local_addr().unwrap();
        let (own, other) = (name.to_string(), wanted.to_string());
        let asked = std::thread::spawn(move || {
            attend(TcpStream::connect(to).unwrap(), &identity, "r", &other).map_err(|error| error.0)
        });
        let (stream, _) = self.listener.accept().unwrap();
        let (meetings, identity) = (self.meetings.clone(), self.identity.clone());
        std::thread::spawn(move || {
            let mut channel = Channel::accept(stream, &identity, &[client::ALPN]).unwrap();
            let chain = channel.certificates().unwrap();
            let Message::Meet(wanted) = Message::read(&mut channel).unwrap() else { panic!("it asks") };
            let _ = meetings.host(Guest { channel, chain, name: own, wanted });
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

/// Registers, and gives the answer.
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
fn two_hosts_meet_and_what_they_send_is_forwarded() {
    let (_folder, pki) = pki();
    let between = Between::new(&pki, 1);
    let first = between.ask(pki.identity("h2"), "h2", "H1");
    let second = between.ask(pki.identity("h1"), "h1", "h2");
    let (one, ticket_one) = second.join().unwrap().unwrap();
    let (other, ticket_other) = first.join().unwrap().unwrap();
    assert_eq!(ticket_one.port, ticket_other.port);
    assert!(ticket_one.id != ticket_other.id && ticket_one.key != ticket_other.key);
    // What one says, whenever, the other reads from its first byte on.
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
    // Of strangers nothing is taken, nor what was recorded, or is of another key.
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
    let stats = &between.meetings.shared.stats;
    // The last one may be counted a moment after it has come.
    let until = Instant::now() + Duration::from_secs(5);
    while stats.out_datagrams.get() < 3 + 2 && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(1));
    }
    let discarded = stats.discards(DiscardReason::UnknownSource);
    assert_eq!((stats.in_datagrams.get(), stats.out_datagrams.get(), discarded), (8, 3 + 2, 3));
}

#[test]
fn who_waits_in_vain_is_told() {
    let (_folder, pki) = pki();
    let between = Between::new(&pki, 1);
    let begun = Instant::now();
    let alone = between.ask(pki.identity("h1"), "h1", "h2").join().unwrap().unwrap_err();
    assert_eq!(alone, "r refused: h2 has not come");
    assert!(begun.elapsed() < WAIT + Duration::from_secs(1));
    let pairs = || lock(&between.meetings.shared.pairs).len();
    while pairs() > 0 {
        assert!(begun.elapsed() < WAIT + Duration::from_secs(2), "nobody waits any more");
        std::thread::sleep(Duration::from_millis(10));
    }
    let alone = between.ask(pki.identity("h1"), "h1", "h2");
    while pairs() == 0 {
        std::thread::sleep(Duration::from_millis(10));
    }
    let another = between.ask(pki.identity("h1"), "h1", "h3").join().unwrap().unwrap_err();
    assert!(another.contains("1 pairs of hosts meet here"), "{another}");
    between.meetings.retain(|_, _| false);
    assert_eq!(pairs(), 1, "nobody was there to be forgotten");
    assert!(alone.join().unwrap().is_err());
}

/// A host that asks again, because its connection was lost, takes the place of its former self.
#[test]
fn the_latest_of_a_side_is_the_one_who_waits() {
    let (_folder, pki) = pki();
    let between = Between::new(&pki, 2);
    let before = between.ask(pki.identity("h1"), "h1", "h2");
    std::thread::sleep(Duration::from_millis(200));
    let waiting = between.ask(pki.identity("h1"), "h1", "h2");
    assert_eq!(before.join().unwrap().unwrap_err(), "r refused: h2 has not come");
    let come = between.ask(pki.identity("h2"), "h2", "h1");
    assert!(waiting.join().unwrap().is_ok() && come.join().unwrap().is_ok());
    between.meetings.retain(|name, chain| name != "h2" || chain.is_empty());
    assert!(lock(&between.meetings.shared.pairs).is_empty(), "h2 was forgotten");
}
