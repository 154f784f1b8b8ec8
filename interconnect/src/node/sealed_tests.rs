//! Nodes of two hosts with a sealed link between them: each host has a daemon, and the link's secret is known to both.

use super::tests::{BOTH, LEN, unique, wait};
use super::*;
use crate::meeting::{Host, KeyRequest, Keys, Place, Question, Reach, Sealer, Stopper, Token, listen};
use crate::proto::{Kind, Peer, Status};
use crate::vm::fake::toy_keys;
use crate::{Endpoint, Node, Region};

/// A host's daemon, in a thread.
pub(super) struct Daemon(Stopper, Option<JoinHandle<()>>);

/// All peers are reached like this: with `Reach::Sealed` they are behind one sealed link.
pub(crate) struct Behind(pub(crate) Reach);

impl Sealer for Behind {
    fn reach(&mut self, _: &Place, _: &Question) -> Reach {
        self.0
    }

    fn gone(&mut self, _: Token) {}

    fn keys(&mut self, _: Token, _: &Place, request: &KeyRequest) -> Result<Keys, Reach> {
        toy_keys(self.0, request)
    }
}

impl Daemon {
    pub(super) fn start(name: &str, reach: Reach) -> Self {
        let mut host = Host::new().unwrap();
        let mut listener = Some(listen(name).unwrap());
        host.set_places(&[Place { id: (1, 1), networks: vec![1] }], |_| listener.take());
        host.seal(Box::new(Behind(reach)));
        let stopper = host.stopper();
        let thread = std::thread::spawn(move || {
            while !host.is_stopped() {
                host.turn(Duration::from_secs(60)).unwrap();
            }
        });
        Self(stopper, Some(thread))
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.0.stop();
        self.1.take().unwrap().join().unwrap();
    }
}

struct Side {
    node: Node,
    end: Endpoint,
    region: Region,
    peer: Peer,
    _daemon: Daemon,
}

fn side(reach: Reach) -> Side {
    side_with(reach, Options::default().config.datagram_max)
}

fn side_with(reach: Reach, datagram_max: usize) -> Side {
    let name = unique();
    let daemon = Daemon::start(&name, reach);
    let bind = "127.0.0.1:0".parse().unwrap();
    let config = Config { dead_after_ns: 2_000_000_000, datagram_max, ..Options::default().config };
    let options = Options { bind, meeting: Some(name), seal: None, config, ..Options::default() };
    let node = Node::open(&options).unwrap();
    let end = node.endpoint(Some(0)).unwrap();
    let region = Region::new(&end, 2 * LEN, BOTH).unwrap();
    let peer = Peer { address: node.address(), endpoint: 0 };
    Side { node, end, region, peer, _daemon: daemon }
}

#[test]
fn nodes_behind_a_sealed_link_seal_what_they_send() {
    let (a, b) = (side(Reach::Sealed), side(Reach::Sealed));
    for len in [1, 1500, 16_384, 16_385, 65_507, LEN] {
        let bytes: Vec<u8> = (0..len).map(|place| (place * 13 + place / 255) as u8).collect();
        a.region.fill(0, &bytes).unwrap();
        b.end.receive(b.region.span(LEN, LEN).unwrap(), 7).unwrap();
        a.end.send(b.peer, a.region.span(0, len).unwrap(), None, 8).unwrap();
        let received = wait(&b.end, Kind::Receive);
        assert_eq!((received.status, received.len), (Status::Success, len as u64));
        let mut arrived = vec![0; len];
        b.region.copy_to(LEN, &mut arrived).unwrap();
        assert!(arrived == bytes, "message of {len} bytes");
        assert_eq!(wait(&a.end, Kind::Send).status, Status::Success);
        let (span, key) = (a.region.span(LEN, len).unwrap(), b.region.key());
        a.end.read(b.peer, span, (key, LEN as u64), 0).unwrap();
        assert_eq!(wait(&a.end, Kind::Read).status, Status::Success);
        a.region.copy_to(LEN, &mut arrived).unwrap();
        assert!(arrived == bytes, "read of {len} bytes");
    }
    for (own, peer) in [(&a, &b), (&b, &a)] {
        assert_eq!(own.end.attachment(peer.peer), Attachment::Sealed);
        assert_eq!(own.end.attachment(peer.peer).to_string(), "sealed");
        let SealCounters { sessions, packets_out, packets_in, clear, forged, .. } = own.node.seal_counters();
        // At least those that the bytes of the longest message take, or their acknowledgements.
        let least = (LEN / 65_507) as u64;
        assert!(sessions > 0 && packets_out > least && packets_in > least);
        assert_eq!((clear, forged), (0, 0));
    }
    // What a stranger sends in the peer's name is dropped, and harms nothing.
    let before = b.node.process().counters();
    let stranger = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    stranger.send_to(&[&[0x20, 0, 0, 0][..], &[9; 44]].concat(), b.peer.address).unwrap();
    let end = Instant::now() + Duration::from_secs(60);
    while b.node.seal_counters().unknown == 0 {
        assert!(Instant::now() < end);
        b.end.poll();
    }
    assert_eq!(b.node.process().counters().packets_in, before.packets_in);
}

/// Where datagrams are as on an Ethernet, large transfers are sealed in larger packets.
#[test]
fn large_transfers_are_sealed_in_parts() {
    let (a, b) = (side_with(Reach::Sealed, 1400), side_with(Reach::Sealed, 1400));
    for round in 0..20 {
        let bytes: Vec<u8> = (0..LEN).map(|place| (place * 11 + place / 255) as u8 ^ round).collect();
        a.region.fill(0, &bytes).unwrap();
        let (span, key) = (a.region.span(0, LEN).unwrap(), b.region.key());
        a.end.write(b.peer, span, (key, 0), None, 0).unwrap();
        assert_eq!(wait(&a.end, Kind::Write).status, Status::Success);
        let mut arrived = vec![0; LEN];
        b.region.copy_to(0, &mut arrived).unwrap();
        assert!(arrived == bytes, "round {round}");
    }
    let sealed = b.node.seal_counters();
    assert_eq!((sealed.clear, sealed.forged, sealed.incomplete), (0, 0, 0));
    // Packets of 1 400 bytes would be ten times as many.
    let most = 20 * (LEN / 5000) as u64;
    assert!(sealed.packets_in < most, "{} packets for {} bytes", sealed.packets_in, 20 * LEN);
}

#[test]
fn without_keys_operations_end_and_nothing_is_sent() {
    let (a, b) = (side(Reach::Stream), side(Reach::Stream));
    a.end.send(b.peer, a.region.span(0, 8).unwrap(), None, 8).unwrap();
    assert_eq!(wait(&a.end, Kind::Send).status, Status::Unreachable);
    assert_eq!(b.node.process().counters().packets_in, 0);
    assert!(a.node.seal_counters().unsent > 0);
    let options = Options { seal: Some("on".into()), ..Options::default() };
    assert!(Node::open(&options).err().unwrap().to_string().contains("auto or off"));
}

#[test]
fn clear_text_goes_where_both_want_it() {
    let name = unique();
    let _daemon = Daemon::start(&name, Reach::Stream);
    let open = || {
        let (bind, seal) = ("127.0.0.1:0".parse().unwrap(), Some("off".into()));
        let node = Node::open(&Options { bind, meeting: Some(name.clone()), seal, ..Options::default() });
        let node = node.unwrap();
        let end = node.endpoint(Some(0)).unwrap();
        let region = Region::new(&end, 64, BOTH).unwrap();
        (Peer { address: node.address(), endpoint: 0 }, region, end, node)
    };
    let (a, b) = (open(), open());
    b.2.receive(b.1.span(0, 64).unwrap(), 7).unwrap();
    a.2.send(b.0, a.1.span(0, 8).unwrap(), None, 8).unwrap();
    assert_eq!(wait(&b.2, Kind::Receive).status, Status::Success);
    assert_eq!(b.3.seal_counters(), SealCounters::default());
}
