use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use super::*;
use crate::frame::PortId;
use crate::link::{Link, LinkKind, LinkOptions, Security};

const REMOTE: &str = "10.0.0.2:9000";

fn remote() -> Option<SocketAddr> {
    REMOTE.parse().ok()
}

fn ports() -> DirectPorts {
    DirectPorts::new(remote(), &[])
}

fn port(network: u32, last: u8, port: u16) -> DirectPort {
    DirectPort { network: NetworkId::new(network).unwrap(), mac: Mac([2, 0, 0, 0, 0, last]), port }
}

fn offer(port: DirectPort) -> DirectOffer {
    DirectOffer { port, is_up: Arc::new(|| true) }
}

/// Two hosts: `one` has direct ports, `two` sends to them.
struct Hosts {
    one: DirectPorts,
    two: DirectPorts,
}

impl Hosts {
    fn new(offers: &[DirectPort]) -> Hosts {
        let hosts = Hosts { one: ports(), two: ports() };
        assert_eq!(hosts.one.offer(offers.iter().copied().map(offer).collect()), !offers.is_empty());
        hosts
    }

    /// A round at `now_ms`: an announcement if one is due, then the trials that are due. Returns how many of each there were.
    fn round(&self, now_ms: u64) -> (usize, usize) {
        let announcement = self.one.announcement(1400, now_ms);
        if let Some(payload) = &announcement {
            assert_eq!(self.two.announced(payload, |_| true, now_ms), Some(0));
        }
        let trials = self.two.trials(remote(), now_ms);
        for address in &trials {
            assert_eq!(address.ip(), REMOTE.parse::<SocketAddr>().unwrap().ip());
            assert!(self.one.tried(&self.two.trial(), address.port(), now_ms));
        }
        (usize::from(announcement.is_some()), trials.len())
    }

    /// The port that frames to this guest take.
    fn taken(&self, guest: DirectPort) -> bool {
        let guests = self.two.guests();
        guests.iter().any(|known| known.is(guest.network, guest.mac))
    }
}

#[test]
fn a_port_is_used_once_its_trial_is_echoed() {
    let guests = [port(1, 1, 4001), port(2, 1, 4002)];
    let hosts = Hosts::new(&guests);
    assert_eq!(hosts.round(0), (1, 2));
    assert!(!hosts.taken(guests[0]), "its key is not echoed yet");
    assert_eq!(hosts.round(200), (1, 0), "the echo is announced at once");
    assert!(hosts.taken(guests[0]) && hosts.taken(guests[1]));
    assert!(!hosts.taken(port(3, 1, 1)), "the same address in another network");
    assert_eq!(hosts.round(400), (0, 0));
    assert_eq!(hosts.round(1200), (1, 2), "repeated every second");
    assert_eq!(hosts.one.offered(1200), [(guests[0], DirectState::Tried), (guests[1], DirectState::Tried)]);
    assert!(!hosts.one.offer(guests.map(offer).to_vec()), "the same ports");
    assert_eq!(hosts.one.offered(1200)[0].1, DirectState::Tried, "still tried");
}

#[test]
fn a_port_behind_a_firewall_is_never_used() {
    let hosts = Hosts::new(&[port(1, 1, 4001)]);
    for now_ms in (0..10_000).step_by(200) {
        if let Some(payload) = hosts.one.announcement(1400, now_ms) {
            hosts.two.announced(&payload, |_| true, now_ms);
        }
        // Trials are lost.
        hosts.two.trials(remote(), now_ms);
        assert!(!hosts.taken(port(1, 1, 4001)));
    }
    assert_eq!(hosts.one.offered(10_000), [(port(1, 1, 4001), DirectState::Untried)]);
}

#[test]
fn an_interface_that_goes_down_is_withdrawn_at_once() {
    let is_up = Arc::new(AtomicBool::new(true));
    let hosts = Hosts::new(&[]);
    let asks = is_up.clone();
    let offer = DirectOffer { port: port(1, 1, 4001), is_up: Arc::new(move || asks.load(Relaxed)) };
    hosts.one.offer(vec![offer]);
    hosts.round(0);
    hosts.round(200);
    assert!(hosts.taken(port(1, 1, 4001)));
    is_up.store(false, Relaxed);
    assert_eq!(hosts.round(400), (1, 0));
    assert!(!hosts.taken(port(1, 1, 4001)));
    assert_eq!(hosts.one.offered(400), [(port(1, 1, 4001), DirectState::Withdrawn)]);
    let later: usize = (600..20_000).step_by(200).map(|now_ms| hosts.round(now_ms).0).sum();
    assert_eq!(later, 3, "said again in case it was lost, then silence");
    is_up.store(true, Relaxed);
    hosts.round(20_000);
    hosts.round(20_200);
    assert!(hosts.taken(port(1, 1, 4001)));
}

#[test]
fn silence_ends_the_use_of_ports() {
    let hosts = Hosts::new(&[port(1, 1, 4001)]);
    hosts.round(0);
    hosts.round(200);
    hosts.two.trials(remote(), 200 + SILENCE_MS - 1);
    assert!(hosts.taken(port(1, 1, 4001)));
    hosts.two.trials(remote(), 200 + SILENCE_MS);
    assert!(!hosts.taken(port(1, 1, 4001)) && hosts.two.followed().is_empty());
}

/// A peer that roams: its ports are tried at the new address, and used there once the trials are echoed.
#[test]
fn ports_follow_a_peer_that_roams() {
    let hosts = Hosts::new(&[port(1, 1, 4001)]);
    hosts.round(0);
    hosts.round(200);
    let target = || hosts.two.guests().first().map(|guest| format!("{:?}", guest.port));
    assert!(target().unwrap().contains("10.0.0.2:4001"));
    let moved: SocketAddr = "10.0.0.3:9000".parse().unwrap();
    assert_eq!(hosts.two.trials(Some(moved), 400), ["10.0.0.3:4001".parse().unwrap()], "at once");
    assert_eq!((target(), hosts.two.followed()), (None, vec![(port(1, 1, 4001), false)]));
    // The trial arrives; the next announcement echoes the key.
    assert!(hosts.one.tried(&hosts.two.trial(), 4001, 400));
    let payload = hosts.one.announcement(1400, 1200).unwrap();
    hosts.two.announced(&payload, |_| true, 1200);
    assert!(target().unwrap().contains("10.0.0.3:4001"));
    // It is gone.
    assert_eq!(hosts.two.trials(None, 1400), []);
    assert_eq!(target(), None);
}

#[test]
fn trials_that_do_not_arrive_any_more_end_the_use() {
    let hosts = Hosts::new(&[port(1, 1, 4001)]);
    hosts.round(0);
    hosts.round(200);
    let mut end_ms = None;
    for now_ms in (400..10_000).step_by(200) {
        if let Some(payload) = hosts.one.announcement(1400, now_ms) {
            hosts.two.announced(&payload, |_| true, now_ms);
        }
        if !hosts.taken(port(1, 1, 4001)) {
            end_ms = end_ms.or(Some(now_ms));
        }
    }
    assert_eq!(end_ms, Some(3_600), "the trial of time 0 is not echoed any more");
}

/// An announcement with these entries: network, address, port, echo.
fn forged(entries: &[(u32, [u8; 6], u16, u32)]) -> Vec<u8> {
    let mut payload = ANNOUNCEMENT.to_vec();
    for (network, mac, port, echo) in entries {
        payload.extend(network.to_be_bytes());
        payload.extend(mac);
        payload.extend(port.to_be_bytes());
        payload.extend(echo.to_be_bytes());
    }
    payload
}

#[test]
fn a_hostile_peer_is_bounded() {
    let ports = ports();
    let many: Vec<_> = (0..100).map(|n| (1, [2, 0, 0, 0, 0, n], 4000 + u16::from(n), ports.key)).collect();
    let refused = ports.announced(&forged(&many), |_| true, 0);
    assert_eq!((refused, ports.guests().len()), (Some(100 - DIRECT_MAX as u64), DIRECT_MAX));
    assert_eq!((ports.trials(remote(), 0).len(), ports.trials(remote(), 999).len()), (DIRECT_MAX, 0));
    let mac = [2, 0, 0, 0, 0, 1];
    let malformed = [
        (1 << 24, mac, 4000, ports.key),
        (1, [0xff; 6], 4000, ports.key),
        (1, [0; 6], 4000, ports.key),
        (1, mac, 0, ports.key),
    ];
    assert_eq!(ports.announced(&forged(&malformed), |_| true, 0), Some(4));
    assert!(ports.guests().is_empty());
    // Without this host's key no port is used; a guest that the link may not have is refused.
    assert_eq!(ports.announced(&forged(&[(1, mac, 4000, ports.key ^ 1)]), |_| true, 0), Some(0));
    assert!(ports.guests().is_empty());
    assert_eq!(ports.announced(&forged(&[(1, mac, 4000, ports.key)]), |_| false, 0), Some(1));
    assert!(ports.guests().is_empty());
    // Parts of an entry are ignored, other probes are not announcements.
    assert_eq!(ports.announced(&[&ANNOUNCEMENT[..], &[1; 15]].concat(), |_| true, 0), Some(0));
    assert_eq!(ports.announced(b"vnet-mtu", |_| true, 0), None);
    assert!(!ports.tried(b"vnet-mtu", 4000, 0) && ports.tried(&TRIAL, 4000, 0));
}

/// Receives a peer's announcement on a link with these access limits; returns the number of refused ports and of used ones.
fn announced_to(security: Security, networks: Option<Vec<NetworkId>>, mac: [u8; 6]) -> (u64, usize) {
    let options = LinkOptions {
        name: "h2".into(),
        remote: REMOTE.parse().unwrap(),
        ports: 1,
        networks,
        mtu: None,
        kind: LinkKind::default(),
    };
    let link = Link::with_security(options, security, PortId(1), Arc::default());
    let native = link.native().unwrap();
    let probe = forged(&[(1, mac, 4000, native.direct.key)]);
    assert!(native.takes_agreement(&link, (&probe, 9000), 0));
    (link.stats().direct_refused.get(), native.direct.guests().len())
}

#[test]
fn a_link_refuses_ports_of_guests_that_it_may_not_have() {
    let (own, other) = ([2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2]);
    let limited = || Security { macs: Some(vec![Mac(own)]), ..Security::default() };
    assert_eq!(announced_to(Security::default(), None, own), (0, 1));
    assert_eq!(announced_to(limited(), None, own), (0, 1));
    assert_eq!(announced_to(limited(), None, other), (1, 0), "not one of its macs");
    let second = vec![NetworkId::new(2).unwrap()];
    assert_eq!(announced_to(Security::default(), Some(second), own), (1, 0), "not one of its networks");
    let sealed = || Security { peer: Some("h2".into()), ..Security::default() };
    assert_eq!(announced_to(sealed(), None, own), (0, 1), "sealed");
    let relayed = Security { via: Some("h3".into()), ..sealed() };
    assert_eq!(
        announced_to(relayed, None, own),
        (1, 0),
        "behind a relay, which forwards the link's port only"
    );
}

#[test]
fn configured_ports_come_first() {
    let fixed = DirectPorts::new(remote(), &[(Mac([2, 0, 0, 0, 0, 1]), 9101)]);
    let announced =
        forged(&[(1, [2, 0, 0, 0, 0, 1], 4001, fixed.key), (1, [2, 0, 0, 0, 0, 2], 4002, fixed.key)]);
    assert_eq!(fixed.announced(&announced, |_| true, 0), Some(0));
    let guests = fixed.guests();
    let takes = |last| {
        let guest = guests.iter().find(|guest| guest.is(NetworkId::DEFAULT, Mac([2, 0, 0, 0, 0, last])));
        format!("{:?}", guest.unwrap().port)
    };
    assert!(takes(1).contains("9101") && takes(2).contains("4002"), "{} {}", takes(1), takes(2));
}

#[test]
fn an_announcement_fits_its_datagram() {
    let offers: Vec<_> = (0..32).map(|n| offer(port(1, n, 4000 + u16::from(n)))).collect();
    let ports = ports();
    ports.offer(offers);
    assert_eq!(ports.announcement(508, 0).unwrap().len(), 8 + 31 * ENTRY_LEN);
    assert_eq!(ports.announcement(1400, 0).unwrap().len(), 8 + 32 * ENTRY_LEN);
}

/// Runs the corpus of the fuzzer as a unit test.
#[cfg(feature = "test-util")]
#[test]
fn the_fuzz_corpus_does_no_harm() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../fuzz/corpus/direct_ports");
    let inputs: Vec<_> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| std::fs::read(entry.unwrap().path()).unwrap())
        .collect();
    assert!(inputs.len() >= 6);
    inputs.iter().for_each(|input| crate::link::fuzz::direct_ports(input));
}
