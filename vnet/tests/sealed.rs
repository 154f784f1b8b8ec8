//! Whole hosts with sealed links on the loopback address: cores, keepers, certificates, and their failures.

mod common;

use std::collections::HashSet;
use std::io::Read;
use std::net::{TcpStream, UdpSocket};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{WAIT, link_port, link_to, wait_for};
use vnet::dispatch::core::{Core, CoreOptions};
use vnet::dispatch::in_place::UnderlayPort;
use vnet::dispatch::yielding::Strategy;
use vnet::frame::{NetworkId, PortId};
use vnet::interface::fake::{Fake, OwnedFrame};
use vnet::link::sealed::identity::IdentityStore;
use vnet::link::sealed::keeper::{Keeper, KeeperOptions};
use vnet::link::sealed::pki::{Flaw, Pki};
use vnet::link::{ANYWHERE, DirectOffer, DirectPort, Encapsulation, Link, LinkOptions, LinkState, Security};
use vnet::stats::{DiscardReason, DropReason};
use vnet::wire::offload::Offload;

/// A host with one interface and one sealed link.
struct Host {
    host: common::Host,
    keeper: Option<Keeper>,
    fake: Arc<Fake>,
}

impl Host {
    /// A host without a link.
    fn start(identity: Arc<IdentityStore>, rekey: Duration, dispatchers: usize) -> Host {
        let options = CoreOptions {
            threads: dispatchers,
            ports: dispatchers as u16,
            yield_strategy: Strategy::Block,
            ..CoreOptions::default()
        };
        let start = || {
            let core = Core::start(&options).unwrap();
            let (listen, started, courier) = (core.bridge_address(), core.started(), core.courier().clone());
            let keeper = Keeper::start(keeping(listen, identity.clone(), started, rekey, courier)).ok()?;
            Some((core, keeper))
        };
        // The UDP port that the kernel chose may be in use for TCP.
        let (core, keeper) = (0..10).find_map(|_| start()).expect("a port that is free for UDP and TCP");
        let mut host = common::Host::of(core);
        let fake = host.add_fake(NetworkId::DEFAULT);
        Host { host, keeper: Some(keeper), fake }
    }

    fn link_to(&mut self, remote: std::net::SocketAddr, peer: &str) {
        let ports = self.host.core.dispatchers() as u16;
        let options =
            LinkOptions { name: peer.into(), ports, ..link_to(remote, Encapsulation::Native, Some(1500)) };
        let security = Security { peer: Some(peer.into()), macs: None, via: None };
        // Alternates between two ports, so that a new link is not mistaken for the previous one.
        let port = PortId(1 + self.host.links.first().map_or(0, |link| link.link.port().0 % 2));
        let link = Link::with_security(options, security, port, Arc::default());
        self.host.links = vec![link_port(link.clone())];
        self.host.publish();
        if let Some(keeper) = &self.keeper {
            keeper.set_links(&[link]);
        }
    }

    fn address(&self) -> std::net::SocketAddr {
        self.host.core.bridge_address()
    }

    fn assert_balanced(&self) {
        self.host.assert_balanced();
    }

    fn link(&self) -> &Link {
        &self.host.links[0].link
    }

    fn wait_up(&self) {
        wait_for(
            "the link to be up",
            || self.link().state() == LinkState::Up,
            || format!("{:?}", self.link().state()),
        );
    }

    /// Waits until the link is down with `why` in its reason.
    fn wait_down(&self, why: &str) {
        let down = || matches!(self.link().state(), LinkState::Down(reason) if reason.contains(why));
        wait_for(&format!("the link to be down, '{why}'"), down, || format!("{:?}", self.link().state()));
    }
}

fn keeping(
    listen: std::net::SocketAddr,
    identity: Arc<IdentityStore>,
    started: Instant,
    rekey: Duration,
    courier: vnet::link::Courier,
) -> KeeperOptions {
    let courier = Box::new(courier);
    KeeperOptions { listen, identity, started, rekey, courier, relay: None, inheritance: None }
}

const HOUR: Duration = Duration::from_secs(3600);

/// Two linked hosts, h1 and h2.
fn pair(pki: &Pki, rekey: Duration, dispatchers: usize) -> [Host; 2] {
    let mut h1 = Host::start(Arc::new(pki.store("h1", 1)), rekey, dispatchers);
    let mut h2 = Host::start(Arc::new(pki.store("h2", 2)), rekey, dispatchers);
    h1.link_to(h2.address(), "h2");
    h2.link_to(h1.address(), "h1");
    [h1, h2]
}

fn frame(to: u8, from: u8, len: usize, seed: u64) -> OwnedFrame {
    let mut bytes = vec![0x52, 0x54, 0, 0, 0, to, 0x52, 0x54, 0, 0, 0, from, 0x88, 0xb5];
    bytes.extend(seed.to_be_bytes());
    bytes.extend((bytes.len()..len.max(60)).map(|at| (at as u64 + seed) as u8));
    (bytes, Offload::default())
}

fn folder() -> (tempfile::TempDir, Pki) {
    let folder = tempfile::tempdir().unwrap();
    let pki = Pki::new(Path::new(folder.path()));
    (folder, pki)
}

#[test]
fn sealed_links_come_up_and_carry_frames() {
    let (_folder, pki) = folder();
    let hosts = pair(&pki, HOUR, 2);
    hosts.iter().for_each(Host::wait_up);
    let [h1, h2] = &hosts;
    for len in [60, 1400, 9000, 65_000] {
        h1.fake.send([frame(2, 1, len, 1)]);
        assert_eq!(h2.fake.wait_for(1, WAIT), [frame(2, 1, len, 1)]);
        h2.fake.send([frame(1, 2, len, 2)]);
        assert_eq!(h1.fake.wait_for(1, WAIT), [frame(1, 2, len, 2)]);
    }
    hosts.iter().for_each(Host::assert_balanced);
    wait_for("a round trip", || h1.link().seal_view().unwrap().rtt_us.is_some(), String::new);
}

/// Hosts of a sealed link negotiate a port for a guest. Its frames arrive there sealed, small and large, and all others at the link's
/// port.
#[test]
fn sealed_links_negotiate_direct_ports() {
    let (_folder, pki) = folder();
    let [h1, mut h2] = pair(&pki, HOUR, 1);
    h2.host.interfaces[0].member.mac = Some(common::mac(2));
    let port = UnderlayPort::bind((h2.address().ip(), 0).into(), false).unwrap();
    h2.host.feeders = vec![(h2.host.interfaces[0].member.port, port.clone())];
    h2.host.publish();
    let at = DirectPort { network: NetworkId::DEFAULT, mac: common::mac(2), port: port.local_addr().port() };
    port.aim(h1.address()).unwrap();
    assert!(h2.link().offer_direct(vec![DirectOffer { port: at, is_up: Arc::new(|| true) }]));
    wait_for(
        "the port to be used",
        || h1.link().direct_guests() == [(at, true)],
        || format!("{:?}", h1.link().direct_guests()),
    );
    for len in [60, 1400, 9000, 65_000] {
        h1.fake.send([frame(2, 1, len, 1), frame(3, 1, len, 2)]);
        let got: HashSet<_> = h2.fake.wait_for(2, WAIT).into_iter().map(|(bytes, _)| bytes).collect();
        assert_eq!(got, HashSet::from([frame(2, 1, len, 1).0, frame(3, 1, len, 2).0]), "{len} bytes");
    }
    // With the port closed to the peer, the guest's frames do not come, but those for others do.
    port.aim("127.0.0.9:9".parse().unwrap()).unwrap();
    h1.fake.send([frame(2, 1, 100, 3), frame(3, 1, 100, 4)]);
    assert_eq!(h2.fake.wait_for(1, WAIT), [frame(3, 1, 100, 4)]);
    assert_eq!(h2.link().stats().direct_in_place.get(), 0, "decrypted in vnetd's memory");
    // Without trials that arrive, the link's port is used again.
    wait_for("the port to be unused", || h1.link().direct_guests() == [(at, false)], String::new);
    h1.fake.send([frame(2, 1, 100, 5)]);
    assert_eq!(h2.fake.wait_for(1, WAIT), [frame(2, 1, 100, 5)]);
}

/// A link comes up if only one side knows the other's address, whichever of the two names sorts first.
#[test]
fn one_side_may_know_no_address() {
    let (_folder, pki) = folder();
    for waiting in [0, 1] {
        let mut hosts = [("h1", 1), ("h2", 2)]
            .map(|(name, serial)| Host::start(Arc::new(pki.store(name, serial)), HOUR, 2));
        let at = hosts.each_ref().map(|host| host.address());
        for (own, peer) in [(0, 1), (1, 0)] {
            hosts[own].link_to(if own == waiting { ANYWHERE } else { at[peer] }, ["h1", "h2"][peer]);
        }
        hosts.iter().for_each(Host::wait_up);
        let found = || hosts[waiting].link().remote() == Some(at[1 - waiting]);
        wait_for("the peer to be found", found, String::new);
        for (from, to) in [(1, 2), (2, 1)] {
            hosts[from - 1].fake.send([frame(to as u8, from as u8, 9000, 1)]);
            assert_eq!(hosts[to - 1].fake.wait_for(1, WAIT), [frame(to as u8, from as u8, 9000, 1)]);
        }
        hosts.iter().for_each(Host::assert_balanced);
    }
}

/// Half-open connections from unknown addresses take at most half of the handshake slots; the others are reserved for known
/// addresses.
#[test]
fn unknown_addresses_get_half_of_the_handshakes() {
    let (_folder, pki) = folder();
    let mut h2 = Host::start(Arc::new(pki.store("h2", 2)), HOUR, 1);
    h2.link_to(ANYWHERE, "h1");
    let threads = || std::fs::read_dir("/proc/self/task").unwrap().count();
    let before = threads();
    // All of 127.0.0.0/8 is loopback.
    let half_open: Vec<_> = (1..100u8)
        .map(|n| {
            let socket =
                rustix::net::socket(rustix::net::AddressFamily::INET, rustix::net::SocketType::STREAM, None);
            let socket = socket.unwrap();
            rustix::net::bind(&socket, &std::net::SocketAddr::from(([127, 0, 1, n], 0))).unwrap();
            rustix::net::connect(&socket, &h2.address()).unwrap();
            TcpStream::from(socket)
        })
        .collect();
    half_open.iter().for_each(|stream| stream.set_nonblocking(true).unwrap());
    let closed = |stream: &&TcpStream| match stream.peek(&mut [0; 1]) {
        Ok(bytes) => bytes == 0,
        Err(error) => error.kind() != std::io::ErrorKind::WouldBlock,
    };
    wait_for(
        "all but sixteen to be closed",
        || half_open.iter().filter(closed).count() == 99 - 16,
        || format!("{} closed, {} threads more", half_open.iter().filter(closed).count(), threads() - before),
    );
}

/// Rekeys every two seconds under traffic: every frame arrives once and in order, under more than one key.
#[test]
fn rekeying_under_traffic_loses_no_frame() {
    let (_folder, pki) = folder();
    let hosts = pair(&pki, Duration::from_secs(2), 1);
    hosts.iter().for_each(Host::wait_up);
    let [h1, h2] = &hosts;
    let (start, mut sent, mut ages) = (Instant::now(), 0u64, HashSet::new());
    while start.elapsed() < Duration::from_millis(5500) {
        let frames: Vec<_> =
            (0..20).map(|n| frame(2, 1, if n == 7 { 9000 } else { 200 }, sent + n)).collect();
        sent += 20;
        h1.fake.send(frames.clone());
        let got = h2.fake.wait_for(20, WAIT);
        assert_eq!(got, frames);
        ages.insert(h1.link().seal_view().unwrap().keys_s);
        assert_eq!(h2.link().state(), LinkState::Up);
        std::thread::sleep(Duration::from_millis(2));
    }
    assert!(h1.link().seal_view().unwrap().keys_s < Some(4), "no rekey: {ages:?}");
    for host in &hosts {
        host.assert_balanced();
        for reason in [DiscardReason::WrongEpoch, DiscardReason::Forged, DiscardReason::Replayed] {
            assert_eq!(host.link().stats().discards(reason), 0, "{reason:?}");
        }
    }
}

/// The link to a peer that dies without notice is down within a second, and up again after the peer returns.
#[test]
fn a_dead_peer_is_detected_within_a_second() {
    let (_folder, pki) = folder();
    let [h1, mut h2] = pair(&pki, HOUR, 1);
    h1.wait_up();
    h2.wait_up();
    // No more keepalives and probes, as if the host had lost power.
    let died = Instant::now();
    h2.host.core.publish(vnet::dispatch::setup::Parts::default());
    h2.keeper = None;
    h1.wait_down("nothing came from h2");
    let detected = died.elapsed();
    // vnet promises one second; the test's machine may be busy.
    assert!(detected < Duration::from_millis(1800), "detected after {detected:?}");
    assert!(detected > Duration::from_millis(400), "detected after {detected:?}: too early to be sure");
    let (listen, started, courier) = (h2.address(), h2.host.core.started(), h2.host.core.courier().clone());
    let identity = pki.store("h2", 3);
    h2.keeper = Some(Keeper::start(keeping(listen, Arc::new(identity), started, HOUR, courier)).unwrap());
    // The restarted host has no sessions.
    h2.link_to(h1.address(), "h1");
    h1.wait_up();
    h2.wait_up();
    h1.fake.send([frame(2, 1, 100, 1)]);
    assert_eq!(h2.fake.wait_for(1, WAIT).len(), 1);
}

/// A restarted host restores its sealed links before its peer could even notice the outage, whichever of the two names sorts
/// first. vnet promises 0.3 s; the test's machine may be busy, so one of three attempts has to succeed.
#[test]
fn a_restarted_host_is_back_at_once() {
    let (_folder, pki) = folder();
    for restarted in [0, 1] {
        let mut hosts = pair(&pki, HOUR, 1);
        let at = hosts[1 - restarted].address();
        let peer = ["h2", "h1"][restarted];
        let mut took = vec![];
        while took.last().is_none_or(|time| *time > Duration::from_millis(500)) {
            assert!(took.len() < 3, "{peer}'s peer: {took:?}");
            hosts.iter().for_each(Host::wait_up);
            // A new link object: the keys are gone.
            let start = Instant::now();
            hosts[restarted].link_to(at, peer);
            hosts[restarted].wait_up();
            hosts[restarted].fake.send([frame(2, 1, 100, 1)]);
            assert_eq!(hosts[1 - restarted].fake.wait_for(1, WAIT).len(), 1);
            took.push(start.elapsed());
        }
        println!("h{} was back after {took:?}", restarted + 1);
    }
}

/// A link that is replaced a thousand times leaks neither descriptors nor threads, and still works.
#[test]
fn a_thousand_flaps_leak_nothing() {
    let (_folder, pki) = folder();
    let [mut h1, mut h2] = pair(&pki, HOUR, 1);
    h1.wait_up();
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let threads = || std::fs::read_dir("/proc/self/task").unwrap().count();
    let before = (descriptors(), threads());
    let (at_h1, at_h2) = (h1.address(), h2.address());
    for flap in 0..1000 {
        h1.link_to(at_h2, "h2");
        if flap % 3 == 0 {
            h2.link_to(at_h1, "h1");
        }
        if flap % 100 == 99 {
            h1.wait_up();
            h2.wait_up();
        }
    }
    h1.wait_up();
    h2.wait_up();
    h1.fake.send([frame(2, 1, 5000, 1)]);
    assert_eq!(h2.fake.wait_for(1, WAIT), [frame(2, 1, 5000, 1)]);
    // Other tests of this process also open and close files and threads.
    let slack = 60;
    wait_for(
        "handshakes to end",
        || descriptors() <= before.0 + slack && threads() <= before.1 + slack,
        || format!("{before:?} became {:?}", (descriptors(), threads())),
    );
}

/// With new certificate files, links stay up and rekey with the new certificate. A revoked certificate takes its link down.
#[test]
fn certificates_are_renewed_and_revoked_under_live_links() {
    let (_folder, pki) = folder();
    let [h1, h2] = pair(&pki, HOUR, 1);
    h1.wait_up();
    h2.wait_up();
    std::thread::sleep(Duration::from_millis(1100));
    assert!(h1.link().seal_view().unwrap().keys_s >= Some(1));
    // h2 accepts connections, so it must request the rekey from h1.
    pki.issue("h2", 12, Flaw::None, &[]);
    h2.keeper.as_ref().unwrap().refresh();
    wait_for(
        "new keys",
        || h1.link().seal_view().unwrap().keys_s == Some(0),
        || format!("{:?}", h1.link().seal_view()),
    );
    assert_eq!((h1.link().state(), h2.link().state()), (LinkState::Up, LinkState::Up));
    // Revoking the old certificate has no effect any more.
    std::thread::sleep(Duration::from_millis(300));
    pki.revoke(&[2]);
    [&h1, &h2].iter().for_each(|host| host.keeper.as_ref().unwrap().refresh());
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!((h1.link().state(), h2.link().state()), (LinkState::Up, LinkState::Up));
    // The new certificate is revoked at h1 only.
    let before = h1.link().stats().drops(DropReason::NoKey);
    pki.revoke(&[2, 12]);
    h1.keeper.as_ref().unwrap().refresh();
    h1.wait_down("revoked");
    h1.fake.send([frame(2, 1, 100, 1)]);
    wait_for("the drop", || h1.link().stats().drops(DropReason::NoKey) == before + 1, String::new);
    h2.wait_down("nothing came");
}

/// Connections from unknown addresses and half-open handshakes get no answer and delay no other handshake.
#[test]
fn handshake_floods_are_bounded() {
    let (_folder, pki) = folder();
    let [h1, h2] = pair(&pki, Duration::from_secs(2), 1);
    h1.wait_up();
    h2.wait_up();
    let threads = || std::fs::read_dir("/proc/self/task").unwrap().count();
    let before = threads();
    // Silent connections from the peer's address: only a few are served at a time.
    let half_open: Vec<_> = (0..200).map(|_| TcpStream::connect(h2.address()).unwrap()).collect();
    std::thread::sleep(Duration::from_millis(300));
    assert!(threads() < before + 60, "{before} threads became {}", threads());
    for mut stream in half_open.into_iter().skip(10) {
        stream.set_read_timeout(Some(WAIT)).unwrap();
        assert_eq!(stream.read(&mut [0; 100]).unwrap_or(0), 0, "closed without a byte");
    }
    // A host whose address no link has.
    let stranger = Host::start(Arc::new(pki.store("h3", 3)), HOUR, 1);
    let mut stream = TcpStream::connect(stranger.address()).unwrap();
    assert_eq!(stream.read(&mut [0; 100]).unwrap_or(0), 0);
    h1.fake.send([frame(2, 1, 100, 1)]);
    assert_eq!(h2.fake.wait_for(1, WAIT).len(), 1, "frames flow meanwhile");
    h1.wait_up();
    wait_for(
        "new keys",
        || h1.link().seal_view().unwrap().keys_s < Some(2),
        || format!("{:?}", h1.link().seal_view()),
    );
}

/// The host refuses a peer with another name in its certificate, and clear text from the correct address.
#[test]
fn impostors_are_refused() {
    let (_folder, pki) = folder();
    let mut h1 = Host::start(Arc::new(pki.store("h1", 1)), HOUR, 1);
    let mut h3 = Host::start(Arc::new(pki.store("h3", 3)), HOUR, 1);
    h1.link_to(h3.address(), "h2");
    h3.link_to(h1.address(), "h1");
    h1.wait_down("for h3, not for h2");
    let plain = UdpSocket::bind("127.0.0.1:0").unwrap();
    let mut h4 = Host::start(Arc::new(pki.store("h4", 4)), HOUR, 1);
    h4.link_to(plain.local_addr().unwrap(), "h5");
    let mut datagram = vec![0x10, 0x01, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 9];
    datagram.extend(frame(2, 1, 100, 1).0);
    plain.send_to(&datagram, h4.address()).unwrap();
    wait_for("the discard", || h4.link().stats().discards(DiscardReason::SealRequired) == 1, String::new);
    // A probe in clear text is answered with 16 bytes that reveal only that the link is sealed.
    let probe = [&[0x12, 0x01], &datagram[2..16], b"vnet-mtu", &[7; 8]].concat();
    plain.send_to(&probe, h4.address()).unwrap();
    plain.set_read_timeout(Some(WAIT)).unwrap();
    let mut answer = [0; 100];
    let len = plain.recv(&mut answer).unwrap();
    assert_eq!(answer[..len], [0x13, 0x05, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]);
    assert!(h4.fake.take().is_empty());
    h4.wait_down("cannot connect");
}
