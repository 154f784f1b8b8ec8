use std::net::{SocketAddr, UdpSocket};

use super::*;
use crate::frame::PortId;
use crate::link::path::probe_health::{
    ANSWER_LEN, MAGIC, NameTag, Probed, RATE_MS, Rates, SILENCE_MS, probe_payload,
};
use crate::link::{Bridge, Link, LinkKind, LinkOptions, LinkState, Peers, ReassemblyBudget, SourceMatch};
use crate::source::drain;

fn link(remote: SocketAddr) -> Arc<Link> {
    let options = LinkOptions {
        name: "peer".into(),
        remote,
        ports: 1,
        networks: None,
        mtu: Some(1500),
        kind: LinkKind::default(),
    };
    Link::new(options, PortId(0), Arc::default())
}

fn bridge() -> Bridge {
    let listen = "127.0.0.1:0".parse().unwrap();
    Bridge::bind(listen, false, Arc::default(), Arc::new(ReassemblyBudget::new(0))).unwrap()
}

/// A prober, and the bridge that receives the replies.
struct Asking {
    work: Work,
    bridge: Bridge,
    link: Arc<Link>,
    now_ms: u64,
}

impl Asking {
    fn new(remote: SocketAddr) -> Asking {
        let bridge = bridge();
        let watch = PathWatch::of(std::slice::from_ref(&bridge));
        let work = Work {
            socket: watch.socket().clone(),
            watch: Mutex::new(watch),
            started: Instant::now(),
            links: Mutex::default(),
            stopping: AtomicBool::new(false),
        };
        let link = link(remote);
        link.path.set_route_mtu(1500);
        let peers = Peers::build(std::slice::from_ref(&link));
        bridge.peers.store(Arc::new(peers));
        Asking { work, bridge, link, now_ms: 1 }
    }

    /// Receives waiting datagrams and runs one round, `passed_ms` after the previous one on the dispatchers' clock.
    fn look(&mut self, passed_ms: u64, small: bool) {
        while drain(&mut self.bridge.rx[0], self.now_ms, &mut |_| ()) > 0 {}
        self.now_ms += passed_ms;
        self.work.look_after(&*self.link, self.now_ms, small, true);
    }
}

/// Replies like a peer of this version or, with `whole`, like an older peer.
fn echo(peer: &UdpSocket, whole: bool) -> Vec<usize> {
    let (mut buffer, mut sizes) = ([0; 65_536], vec![]);
    while let Ok((len, from)) = peer.recv_from(&mut buffer) {
        assert_eq!(buffer[0], 0x12, "a probe");
        buffer[0] = 0x13;
        let reply = if whole { len } else { len.min(16 + ANSWER_LEN) };
        peer.send_to(&buffer[..reply], from).unwrap();
        sizes.push(len + 28);
    }
    sizes
}

fn peer() -> UdpSocket {
    let peer = UdpSocket::bind("127.0.0.1:0").unwrap();
    peer.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
    peer
}

#[test]
fn a_peer_is_measured_and_its_silence_noticed() {
    for whole in [false, true] {
        let peer = peer();
        let mut asking = Asking::new(peer.local_addr().unwrap());
        assert_eq!(asking.link.probed(), Probed::default());
        let mut sizes = vec![];
        for _ in 0..5 {
            asking.look(50, true);
            sizes.extend(echo(&peer, whole));
        }
        asking.look(50, false);
        assert!(sizes.contains(&68) && sizes.contains(&1500), "small ones and the path's size: {sizes:?}");
        let probed = asking.link.probed();
        assert!(probed.rtt_us.is_some_and(|rtt| rtt < 1_000_000), "{probed:?}");
        assert_eq!((probed.loss_permille, asking.link.state()), (Some(0), LinkState::Up));
        asking.look(SILENCE_MS - 100, true);
        assert_eq!(asking.link.state(), LinkState::Up);
        asking.look(100, true);
        assert_eq!(asking.link.state(), LinkState::Down("nothing came for 0.8 s".into()));
        echo(&peer, whole);
        asking.look(1, false);
        assert_eq!(asking.link.state(), LinkState::Up);
    }
}

fn is_down(link: &Link, why: &str) -> bool {
    matches!(link.state(), LinkState::Down(reason) if reason.contains(why))
}

#[test]
fn a_link_that_nothing_came_from_is_not_up() {
    let peer = peer();
    let mut asking = Asking::new(peer.local_addr().unwrap());
    for _ in 0..30 {
        asking.look(200, true);
        assert!(is_down(&asking.link, "nothing came from the other host yet"), "{:?}", asking.link.state());
    }
    assert_eq!(asking.link.probed().loss_permille, None);
    assert_eq!(asking.link.path_mtu(), 1500, "it sends all the same");
    // The first reply ends that state at once.
    echo(&peer, false);
    asking.look(1, false);
    assert_eq!(asking.link.state(), LinkState::Up);
}

/// A peer that answers no probes, such as a foreign VNET/P host, counts as heard after its first frame.
#[test]
fn a_foreign_peer_is_heard_by_its_first_frame() {
    let peer = peer();
    let mut asking = Asking::new(peer.local_addr().unwrap());
    let classic =
        LinkOptions { kind: LinkKind::Classic(SourceMatch::Address), ..asking.link.options().clone() };
    asking.link = Link::new(classic, PortId(0), Arc::default());
    asking.link.path.set_route_mtu(1500);
    asking.bridge.peers.store(Arc::new(Peers::build(std::slice::from_ref(&asking.link))));
    asking.look(5000, true);
    assert!(is_down(&asking.link, "nothing came"));
    peer.send_to(&[0; 60], asking.bridge.local_addr()).unwrap();
    asking.look(1, false);
    // Such a peer may stay silent for any time.
    asking.look(600_000, false);
    assert_eq!(asking.link.state(), LinkState::Up);
}

/// The lost probes of an outage do not count against the path that works again.
#[test]
fn a_link_is_up_and_not_degraded_after_an_outage() {
    let peer = peer();
    let mut asking = Asking::new(peer.local_addr().unwrap());
    asking.link.path.probing.lock().history = (u64::MAX >> 14, 50);
    asking.look(50, true);
    echo(&peer, false);
    for _ in 0..60 {
        asking.look(200, true);
        // Each of these probes is lost.
        asking.link.path.probing.lock().expire(u64::MAX);
    }
    assert!(is_down(&asking.link, "nothing came for 1"), "{:?}", asking.link.state());
    peer.set_nonblocking(true).unwrap();
    while peer.recv_from(&mut [0; 65_536]).is_ok() {}
    peer.set_nonblocking(false).unwrap();
    asking.look(200, true);
    echo(&peer, false);
    asking.look(1, false);
    assert_eq!(asking.link.state(), LinkState::Up);
    assert!(asking.link.probed().loss_permille.is_none_or(|loss| loss == 0));
}

/// A link in clear text whose peer is sealed, or that leads to its own host, reports that instead of silence.
#[test]
fn hints_explain_why_a_link_is_down() {
    let peer = peer();
    let mut asking = Asking::new(peer.local_addr().unwrap());
    asking.look(50, true);
    let mut sealed = vec![0x13, 0x05, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];
    peer.send_to(&sealed, asking.bridge.local_addr()).unwrap();
    asking.look(1, false);
    assert!(is_down(&asking.link, "the peer asks for sealing"), "{:?}", asking.link.state());
    // The hint expires when it is not repeated.
    asking.look(2000, false);
    assert!(!is_down(&asking.link, "sealing"));
    // A probe comes back unchanged.
    asking.look(50, true);
    let mut buffer = [0; 65_536];
    while let Ok((len, from)) = peer.recv_from(&mut buffer) {
        if buffer[0] == 0x12 {
            peer.send_to(&buffer[..len], from).unwrap();
        }
    }
    asking.look(1, false);
    assert!(is_down(&asking.link, "leads to this host"), "{:?}", asking.link.state());
    // A probe of another host is answered as usual.
    sealed[..2].copy_from_slice(&[0x12, 0x01]);
    sealed.extend(MAGIC);
    sealed.extend([7; 8]);
    peer.send_to(&sealed, asking.bridge.local_addr()).unwrap();
    asking.look(2000, false);
    assert!(!is_down(&asking.link, "leads to this host"));
    let (len, _) = peer.recv_from(&mut buffer).unwrap();
    assert_eq!((buffer[0], len), (0x13, 32));
}

/// Two hosts of one name on a link in clear text notice at the first contact; frames pass all the same.
#[test]
fn a_peer_with_this_hosts_name_is_noticed() {
    let peer = peer();
    let mut asking = Asking::new(peer.local_addr().unwrap());
    asking.link.name_host("h1");
    let mut probe = vec![0x12, 0x01, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];
    let head_len = probe.len();
    let degraded = |asking: &Asking| match asking.link.state() {
        LinkState::Degraded(why) => why.contains("the other host has this host's name"),
        _ => false,
    };
    for (name, same) in [("h2", false), ("h1", true)] {
        probe.truncate(head_len);
        probe.extend(probe_payload(&[7; 8], Some(NameTag::of(name)), 0));
        peer.send_to(&probe, asking.bridge.local_addr()).unwrap();
        asking.look(50, true);
        assert_eq!(degraded(&asking), same, "{name}: {:?}", asking.link.state());
    }
    // It sends its own name in each probe.
    let mut buffer = [0; 65_536];
    let tags = std::iter::from_fn(|| peer.recv_from(&mut buffer).ok().map(|(len, _)| buffer[..len].to_vec()));
    let tags: Vec<_> =
        tags.filter(|datagram| datagram[0] == 0x12).map(|d| NameTag::found_in(&d[head_len..])).collect();
    assert!(!tags.is_empty() && tags.iter().all(|tag| *tag == Some(NameTag::of("h1"))), "{tags:?}");
    // Over when the other host has another name.
    asking.look(2000, false);
    assert!(!degraded(&asking));
}

#[test]
fn unsolicited_replies_are_ignored() {
    let peer = peer();
    let mut asking = Asking::new(peer.local_addr().unwrap());
    asking.look(50, true);
    let mut forged = vec![0x13, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];
    forged.extend(MAGIC);
    forged.extend([7; 8]);
    for len in 16..=forged.len() {
        peer.send_to(&forged[..len], asking.bridge.local_addr()).unwrap();
        asking.look(1, false);
    }
    assert_eq!(asking.link.probed().rtt_us, None);
    // A repeated reply is also ignored.
    let mut buffer = [0; 100];
    let (len, from) = peer.recv_from(&mut buffer).unwrap();
    buffer[0] = 0x13;
    for _ in 0..3 {
        peer.send_to(&buffer[..len], from).unwrap();
        asking.look(1, false);
    }
    assert_eq!(asking.link.path.probing.lock().history.1, 1);
}

#[test]
fn rates_are_those_of_the_last_second() {
    let mut asking = Asking::new("127.0.0.1:9".parse().unwrap());
    asking.look(RATE_MS, false);
    let link = asking.link.clone();
    let stats = link.stats();
    stats.in_frames.add(3000);
    stats.in_bytes.add(300_000);
    stats.delivered(10, 1000);
    asking.look(RATE_MS / 2, false);
    assert_eq!(asking.link.probed().rates, Rates::default());
    asking.look(RATE_MS / 2, false);
    let rates = Rates { in_frames: 3000, in_bits: 2_400_000, out_frames: 10, out_bits: 8000 };
    assert_eq!(asking.link.probed().rates, rates);
    asking.look(2 * RATE_MS, false);
    assert_eq!(asking.link.probed().rates, Rates::default());
}

/// Thousands of links are not queried at once, and each link gets its turn within a second.
#[test]
fn links_take_turns() {
    let asking = Asking::new("127.0.0.1:9".parse().unwrap());
    let links: Vec<Arc<dyn Monitored>> =
        (0..4096u16).map(|n| link(SocketAddr::new([127, 0, 0, 1].into(), 10_000 + n)) as _).collect();
    let unknown = || links.iter().filter(|link| link.path().is_unknown()).count();
    let mut begin = 0;
    for tick in 1..=4096 / ROUTES_PER_TICK_MAX {
        asking.work.ask_routes(&links, &mut begin, tick as u64 * 50);
        assert_eq!(unknown(), 4096 - tick * ROUTES_PER_TICK_MAX);
    }
    // A sender's request is served in the next round, however many links are due.
    let path = links[4000].path();
    let before = path.mtu();
    path.set_route_mtu(1400);
    path.ask();
    asking.work.ask_routes(&links, &mut begin, 5000);
    assert_eq!((before, path.mtu()), (1500, 1500));
}
