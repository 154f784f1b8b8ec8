//! The daemon's side with processes of several places, in one test process.

use std::io::ErrorKind;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};

use super::*;
use crate::closer;
use crate::ring::Ring;

/// A name that no other test of this machine has.
fn unique(what: &str) -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("vnet-test-{what}-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

fn place(inode: u64, networks: &[u32]) -> Place {
    Place { id: (4, inode), networks: networks.to_vec() }
}

/// Keeps other tests of this module from running: the thread that closes descriptors serves all, and a host that finds it behind
/// takes no processes.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    let guard = ALONE.lock();
    wait_for_closer();
    guard
}

fn wait_for_closer() {
    while closer::is_behind() {
        thread::sleep(Duration::from_millis(1));
    }
}

/// A host with these places, and the names of their sockets.
fn host(places: &[Place]) -> (Host, Vec<String>) {
    let names: Vec<String> = places.iter().map(|_| unique("meeting")).collect();
    let mut host = Host::new().unwrap();
    let mut sockets = names.iter().map(|name| listen(name).unwrap());
    host.set_places(places, |_| sockets.next());
    (host, names)
}

fn turn(host: &mut Host) {
    host.turn(Duration::ZERO).unwrap();
}

fn connect(host: &mut Host, name: &str) -> (Guest, Token) {
    let guest = Guest::connect(name).unwrap();
    wait_for_closer();
    turn(host);
    let Some(Heard::Named(own)) = guest.receive().unwrap() else { panic!("no name") };
    (guest, own)
}

fn ring(guest: &Guest, expected: Token) -> Ring {
    match guest.receive().unwrap() {
        Some(Heard::Ring { side, secret, memory, bell }) if secret == expected => {
            Ring::open(memory, bell, side.into()).unwrap()
        }
        Some(Heard::Absent(_)) => panic!("absent"),
        _ => panic!("no ring"),
    }
}

fn is_absent(guest: &Guest) -> bool {
    matches!(guest.receive().unwrap(), Some(Heard::Absent(_)))
}

#[test]
fn messages_are_read_as_they_are_written() {
    let _alone = alone();
    let (a, b) = ([3; 16], [4; 16]);
    let [own, peer] = ["10.0.0.1:7000", "[fe80::1%3]:7001"].map(|address| address.parse().unwrap());
    let between = Question { own, peer };
    let request = |role, epoch| KeyRequest { ticket: 7, role, epoch, between, nonce: a, peer_nonce: b };
    let keys = Keys { epoch: 2, keys: std::array::from_fn(|place| place as u8) };
    for message in [
        Message::Named(a),
        Message::Join(a, b),
        Message::Ring { side: 1, secret: a },
        Message::Absent(b),
        Message::Reach(between),
        Message::Reached(peer, Reach::Several),
        Message::Reach(Question::ANY),
        Message::Reached(Question::ANY.peer, Reach::SomeSealed),
        Message::Key(request(Role::Opener, None)),
        Message::Key(request(Role::Answerer, Some(3))),
        Message::Keys(u32::MAX, Ok(keys)),
        Message::Keys(1, Err(Reach::NotYet)),
        Message::Declined(Decline::Sealed),
    ] {
        let (bytes, len) = message.encode();
        assert_eq!(Message::decode(&bytes[..len]), Some(message));
        assert!((0..len).all(|short| Message::decode(&bytes[..short]).is_none()));
        assert_eq!(Message::decode(&[&bytes[..len], &[0]].concat()), None);
    }
    assert_eq!(Message::decode(&[[3, 2].as_slice(), &a].concat()), None, "side 2");
    assert_eq!(Message::decode(&[9; 17]), None);
}

#[test]
fn two_processes_of_one_network_get_a_ring() {
    let _alone = alone();
    let (mut host, names) = host(&[place(1, &[5, 7]), place(2, &[7])]);
    let ((a, a_name), (b, _)) = (connect(&mut host, &names[0]), connect(&mut host, &names[1]));
    assert!(b.join(a_name, [9; 16]));
    turn(&mut host);
    let (mut a_end, mut b_end) = (ring(&a, [9; 16]), ring(&b, [9; 16]));
    assert_eq!(host.rings(), 1);
    assert!(a_end.listen() && b_end.listen());
    // The end of a process ends its rings, also if a child holds its descriptors.
    let child = b_end.bell().try_clone_to_owned().unwrap();
    drop(b);
    turn(&mut host);
    assert_eq!((host.rings(), a_end.listen()), (0, false));
    drop(child);
}

#[test]
fn other_networks_and_unknown_names_get_none() {
    let _alone = alone();
    let (mut host, names) = host(&[place(1, &[5]), place(2, &[7])]);
    let (a, a_name) = connect(&mut host, &names[0]);
    let (b, b_name) = connect(&mut host, &names[1]);
    for name in [a_name, b_name, [0; 16]] {
        assert!(b.join(name, [9; 16]));
        turn(&mut host);
        assert!(is_absent(&b), "another tenant, itself, nobody");
    }
    assert!(a.receive().unwrap().is_none(), "the other tenant does not notice");
    // Two processes of one namespace reach each other anyway.
    let (c, c_name) = connect(&mut host, &names[1]);
    assert!(b.join(c_name, [9; 16]));
    turn(&mut host);
    drop((ring(&b, [9; 16]), ring(&c, [9; 16])));
    turn(&mut host);
    assert_eq!(host.rings(), 0, "both have closed it");
}

#[test]
fn a_ring_ends_when_the_configuration_forbids_it() {
    let _alone = alone();
    let both = [place(1, &[5]), place(2, &[5])];
    let (mut host, names) = host(&both);
    let ((a, a_name), (b, _)) = (connect(&mut host, &names[0]), connect(&mut host, &names[1]));
    let meet = |host: &mut Host| {
        assert!(b.join(a_name, [1; 16]));
        turn(host);
        (ring(&a, [1; 16]), ring(&b, [1; 16]))
    };
    let nothing = |_: &Place| None::<OwnedFd>;
    let (mut a_end, mut b_end) = meet(&mut host);
    host.set_places(&both, nothing);
    assert!(a_end.listen() && b_end.listen(), "nothing has changed");
    host.set_places(&[place(1, &[5]), place(2, &[6])], nothing);
    assert!(!a_end.listen() && !b_end.listen() && host.rings() == 0);
    host.set_places(&both, nothing);
    let (mut a_end, _b_end) = meet(&mut host);
    host.set_places(&both[..1], nothing);
    assert!(!a_end.listen(), "the namespace is gone");
    assert_eq!(b.receive().err().map(|error| error.kind()), Some(ErrorKind::UnexpectedEof));
    assert!(a.receive().unwrap().is_none());
}

#[test]
fn hostile_processes_are_bounded() {
    let _alone = alone();
    let (mut host, names) = host(&[place(1, &[5])]);
    let ((a, a_name), (b, _)) = (connect(&mut host, &names[0]), connect(&mut host, &names[0]));
    let (mut ends, mut refused) = (vec![], 0);
    for _ in 0..90 {
        assert!(b.join(a_name, [1; 16]));
        turn(&mut host);
        match b.receive().unwrap() {
            Some(Heard::Ring { memory, .. }) => ends.push(memory),
            Some(Heard::Absent(_)) => refused += 1,
            _ => panic!("no answer"),
        }
    }
    assert_eq!((host.rings(), ends.len(), refused), (64, 64, 26));
    // `a` never read its messages. Its end ends its rings.
    drop(a);
    turn(&mut host);
    assert_eq!(host.rings(), 0);
    // Requests beyond the rate wait for the next second; one that began meanwhile allows as many again.
    (0..200).for_each(|_| assert!(b.join([0; 16], [1; 16])));
    (0..200).for_each(|_| turn(&mut host));
    let answers = std::iter::from_fn(|| b.receive().unwrap()).count();
    assert!(answers < 200, "{answers}");
    // One that talks nonsense is disconnected.
    let (c, _) = connect(&mut host, &names[0]);
    rustix::net::send(c.descriptor(), &[77; 20], rustix::net::SendFlags::empty()).unwrap();
    turn(&mut host);
    assert!(c.receive().is_err());
}

/// Knows one sealed link: to peers with an even port. Keeps the names of processes with keys that are gone.
#[derive(Default)]
struct Even(Arc<Mutex<Vec<Token>>>);

impl Sealer for Even {
    fn reach(&mut self, place: &Place, question: &Question) -> Reach {
        match (place.id, question.peer.port() % 2) {
            ((4, 1), 0) => Reach::Sealed,
            ((4, 1), _) => Reach::Clear,
            _ => Reach::Foreign,
        }
    }

    fn gone(&mut self, name: Token) {
        self.0.lock().push(name);
    }

    fn keys(&mut self, _: Token, place: &Place, request: &KeyRequest) -> Result<Keys, Reach> {
        match self.reach(place, &request.between) {
            Reach::Sealed => Ok(Keys { epoch: request.epoch.unwrap_or(1), keys: [5; 2 * KEY] }),
            reach => Err(reach),
        }
    }
}

#[test]
fn a_process_gets_keys_for_what_its_container_may_have() {
    let _alone = alone();
    let (mut host, names) = host(&[place(1, &[5]), place(2, &[5])]);
    let ((own, name), (foreign, _)) = (connect(&mut host, &names[0]), connect(&mut host, &names[1]));
    let [even, odd] = ["10.0.0.2:2", "10.0.0.2:3"].map(|address| address.parse().unwrap());
    let between = |peer| Question { own: "10.0.0.1:1".parse().unwrap(), peer };
    let mut ask = |guest: &Guest, message| {
        assert!(guest.say(message));
        turn(&mut host);
        guest.receive().unwrap()
    };
    let is = |heard, expected| matches!(heard, Some(Heard::Reached(_, reach)) if reach == expected);
    assert!(is(ask(&own, Message::Reach(between(even))), Reach::AllClear), "nobody gives keys here");
    let gone = Arc::<Mutex<Vec<Token>>>::default();
    host.seal(Box::new(Even(gone.clone())));
    let mut ask = |guest: &Guest, message| {
        assert!(guest.say(message));
        turn(&mut host);
        guest.receive().unwrap()
    };
    assert!(is(ask(&own, Message::Reach(between(even))), Reach::Sealed));
    assert!(is(ask(&own, Message::Reach(between(odd))), Reach::Clear));
    assert!(is(ask(&foreign, Message::Reach(between(even))), Reach::Foreign));
    let request = |ticket, peer| {
        let (nonce, peer_nonce) = ([1; 16], [2; 16]);
        let between = between(peer);
        Message::Key(KeyRequest { ticket, role: Role::Opener, epoch: Some(2), between, nonce, peer_nonce })
    };
    let keys = Keys { epoch: 2, keys: [5; 2 * KEY] };
    assert!(matches!(ask(&own, request(8, even)), Some(Heard::Keys(8, Ok(got))) if got == keys));
    assert!(matches!(ask(&own, request(9, odd)), Some(Heard::Keys(9, Err(Reach::Clear)))));
    assert!(matches!(ask(&foreign, request(10, even)), Some(Heard::Keys(10, Err(Reach::Foreign)))));
    // An answer is nothing that a process says.
    assert!(own.say(Message::Reached(even, Reach::Clear)));
    turn(&mut host);
    assert!(own.receive().is_err());
    drop(foreign);
    turn(&mut host);
    assert_eq!(*gone.lock(), [name], "the other one got no keys");
}
