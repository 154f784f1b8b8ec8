//! Fuzz entry points of links: handshakes and all other parsers of foreign bytes on sealed links.

use std::io::{self, Read, Write};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use rustls::pki_types::CertificateDer;

use super::{DIRECT_MAX, DirectOffer, DirectPort, Link, LinkKind, LinkOptions, Security};
use crate::frame::{NetworkId, PortId};
use crate::link::native::direct_ports::DirectPorts;
use crate::link::native::translations::{OFFERED_MAX, Translations};
use crate::link::rendezvous::client::{KEY_LEN, Registration, RendezvousMessage};
use crate::link::rendezvous::relay_succession::PairState;
use crate::link::sealed::handshake::{self, HandshakeMessage};
use crate::link::sealed::identity::tls::Patient;
use crate::link::sealed::identity::{CertificateInfo, Identity, is_for};
use crate::link::sealed::pki::Pki;
use crate::link::succession::SealedState;
use crate::wire::translation::{Acceptance, Conversation, Transport};

/// The identities of h1 and h2, cached: key generation is slow.
fn identities() -> &'static [Identity; 2] {
    static MADE: OnceLock<[Identity; 2]> = OnceLock::new();
    MADE.get_or_init(|| {
        let folder = std::env::temp_dir().join(format!("vnet-fuzz-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder for keys");
        let pki = Pki::new(&folder);
        let made = ["h1", "h2"].map(|name| pki.identity(name));
        std::fs::remove_dir_all(folder).expect("the folder is removed again");
        made
    })
}

fn link(peer: &str) -> Arc<Link> {
    let remote = "127.0.0.1:9".parse().expect("an address");
    let options = LinkOptions {
        name: peer.into(),
        remote,
        ports: 1,
        networks: None,
        mtu: None,
        kind: LinkKind::default(),
    };
    let security = Security { peer: Some(peer.into()), macs: None, via: None };
    Link::with_security(options, security, PortId(0), Arc::default())
}

/// A peer that sends the given bytes and then closes.
struct Peer<'a>(&'a [u8]);

impl Read for Peer<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.read(buffer)
    }
}

impl Write for Peer<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Patient for Peer<'_> {
    fn wait_at_most(&mut self, _time: Duration) -> io::Result<()> {
        Ok(())
    }
}

/// Feeds arbitrary bytes to both sides of a handshake, and to the parsers of messages, certificates and keepalives.
///
/// Invariants: no panic; neither side gets keys; an accepted message re-encodes to the same bytes; a reason is one line.
pub fn handshake(data: &[u8]) {
    let [h1, h2] = identities();
    let (a, b) = (link("h2"), link("h1"));
    let choose = |chain: &[CertificateDer<'_>]| {
        if is_for(chain, "h1") { Ok(&*b) } else { Err("no".to_string()) }
    };
    let said = [
        handshake::respond(Peer(data), h2, choose).map(drop).expect_err("no keys without a certificate"),
        handshake::initiate(Peer(data), h1, &a).expect_err("no keys without a certificate"),
    ];
    assert!(said.iter().all(|why| why.0.lines().count() == 1));
    for link in [&a, &b] {
        let seal = link.seal().expect("it is sealed");
        seal.hear(data, true);
        assert!(
            seal.keyring().sealing(1).is_none()
                && (0..4).all(|epoch| seal.keyring().opening(epoch).is_none())
        );
    }
    if let Ok(message) = HandshakeMessage::read(&mut &data[..]) {
        let bytes = message.to_bytes();
        match &message {
            HandshakeMessage::Refuse(why) => assert!(!why.chars().any(char::is_control)),
            _ => assert_eq!(bytes, data[..bytes.len()]),
        }
        assert!(HandshakeMessage::read(&mut &bytes[..]).is_ok());
    }
    if let Ok(info) = CertificateInfo::read(data) {
        assert_eq!(info.fingerprint.len(), 64);
        assert!(is_for(&[data.into()], "h1") || !info.names.iter().any(|name| name == "h1"));
    }
}

/// Feeds bytes to the parser of sealed links that are handed over, and goes on with what it accepts.
///
/// Invariants: no panic; the link goes on with later numbers, opens no forged datagram, and hands over as many sessions again, unless a
/// number or an age has reached its limit.
pub fn succession(data: &[u8]) {
    if let Ok(pair) = PairState::parse(data) {
        // An IPv4 address in the form of IPv6 is written as one of IPv4.
        let form = pair.to_bytes();
        assert!(form.len() <= data.len());
        assert_eq!(PairState::parse(&form).expect("it was written here").to_bytes().len(), form.len());
    }
    let Ok(state) = SealedState::parse(data) else { return };
    let (name, link) = (state.name().to_owned(), link("h2"));
    assert!(name.len() < data.len());
    link.resume(state, 1000);
    let seal = link.seal().expect("it is sealed");
    let before = link.next_number();
    for epoch in 0..4 {
        if let Some(key) = seal.keyring().opening(epoch) {
            let mut forged = [0x5a; 64];
            assert!(key.open(&mut forged).is_err(), "a forged datagram opens");
        }
    }
    if let Some(key) = seal.keyring().sealing(before) {
        key.seal(&mut [0; 64]);
    }
    seal.expire(Instant::now(), Duration::from_secs(3600));
    let count = seal.sessions.lock().len();
    assert!(count <= 4);
    link.begin_hand_over();
    let form = link.hand_over(2000).expect("it is sealed");
    let heir = self::link("h2");
    if let Ok(again) = SealedState::parse(&form) {
        heir.resume(again, 0);
        assert!(heir.next_number() > before);
        assert_eq!(heir.seal().expect("it is sealed").sessions.lock().len(), count);
    }
}

/// Feeds a peer's probes to the state of direct ports. Input: records of a byte, the probe's length in words of four bytes, and the probe;
/// a length of 0xff lets a second pass.
///
/// Invariants: no panic; frames take only ports that the peer announced with this host's key, at most [`DIRECT_MAX`], at its own
/// address; what this host announces, its peer takes whole.
pub fn direct_ports(data: &[u8]) {
    let remote = "127.0.0.1:9".parse().ok();
    let (ports, peer) = (DirectPorts::new(remote, &[]), DirectPorts::new(remote, &[]));
    let guest = DirectPort { network: NetworkId::DEFAULT, mac: crate::wire::ethernet::Mac([2; 6]), port: 7 };
    ports.offer(vec![DirectOffer { port: guest, is_up: Arc::new(|| true) }]);
    let (mut rest, mut now_ms) = (data, 0);
    while let Some((len, tail)) = rest.split_first() {
        if *len == 0xff {
            now_ms += 1000;
            rest = tail;
            continue;
        }
        let (probe, tail) = tail.split_at((4 * usize::from(*len)).min(tail.len()));
        rest = tail;
        let is_announcement = ports.announced(probe, |_| true, now_ms).is_some();
        assert_eq!(is_announcement, probe.starts_with(b"vnet-dir"));
        assert!(is_announcement || ports.tried(probe, 7, now_ms) == probe.starts_with(b"vnet-try"));
        let followed = ports.followed();
        assert!(followed.len() <= DIRECT_MAX);
        assert!(followed.iter().all(|(port, _)| port.port != 0 && port.mac.is_unicast()));
        let key = &ports.trial()[8..];
        let echoes = probe.windows(key.len()).any(|bytes| bytes == key);
        assert!(!is_announcement || echoes || followed.iter().all(|(_, is_used)| !is_used));
        assert!(
            ports.trials(remote, now_ms).iter().all(|at| Some(at.ip()) == remote.map(|remote| remote.ip()))
        );
        if let Some(announcement) = ports.announcement(1400, now_ms) {
            assert_eq!(peer.announced(&announcement, |_| true, now_ms), Some(0));
            assert_eq!(peer.followed().first().map(|(port, _)| *port), Some(guest));
        }
    }
}

/// Feeds a peer's probes to the state of translations. Input: records of a byte, the probe's length in words of four bytes, and the probe; a
/// length of 0xff lets a second pass.
///
/// Invariants: no panic; a conversation is translated only with an index that the peer has accepted in this epoch; what is known is bounded
/// and could be offered; what is accepted and offered here, the peer reads.
pub fn translations(data: &[u8]) {
    let (link, peer) = (Translations::new(), Translations::new());
    let mut now_ms = 1000;
    for port in 0..4 {
        let end = |host: u8, port| std::net::SocketAddrV4::new([10, 0, 0, host].into(), port);
        let conversation = Conversation {
            network: 1,
            dst: crate::wire::ethernet::Mac([2; 6]),
            src: crate::wire::ethernet::Mac([6; 6]),
            source: end(1, port),
            destination: end(2, 80),
            transport: Transport::ALL[usize::from(port % 2)],
            ttl: 64,
        };
        link.want(conversation, PortId(1), now_ms);
    }
    let mut rest = data;
    while let Some((len, tail)) = rest.split_first() {
        if *len == 0xff {
            now_ms += 1000;
            rest = tail;
            for offer in link.offers(1400, now_ms) {
                assert_eq!(peer.offered(&offer, |_| true, now_ms), Some(0));
            }
            if let Some(said) = link.acceptance(|_, _| Some(true), [true, false], 1400, now_ms) {
                assert!(Acceptance::parse(&said).is_some_and(|said| said.indices.len() <= OFFERED_MAX));
            }
            continue;
        }
        let (probe, tail) = tail.split_at((4 * usize::from(*len)).min(tail.len()));
        rest = tail;
        let is_offer = link.offered(probe, |is| is.ttl != 7, now_ms).is_some();
        assert!(!is_offer || probe.starts_with(b"vnet-tra"));
        let is_acceptance = !is_offer && link.accepted(probe, now_ms);
        assert!(!is_acceptance || probe.starts_with(b"vnet-trb"));
        let known = link.known(now_ms);
        assert!(known.len() <= 2 * OFFERED_MAX);
        assert!(known.iter().all(|(index, is)| *index != 0 && is.ttl != 7 && is.dst.is_unicast()));
        let wanted = link.wanted();
        assert!(link.leased(now_ms).iter().all(|leased| wanted.contains(&leased.is)));
    }
    // Nothing was accepted by the peer itself.
    assert_eq!(peer.leased(now_ms), []);
}

/// Feeds arbitrary bytes to the parsers of a rendezvous relay and its clients: messages and registrations.
///
/// Invariants: no panic; an accepted message re-encodes to the same bytes; a reason is one line; only authenticated bytes parse
/// as a registration, and it re-encodes to the same bytes.
pub fn meeting(data: &[u8]) {
    if let Ok(message) = RendezvousMessage::read(&mut &data[..]) {
        let bytes = message.to_bytes();
        match &message {
            RendezvousMessage::Refuse(why) => assert!(!why.chars().any(char::is_control)),
            _ => assert_eq!(bytes, data[..bytes.len()]),
        }
        assert!(RendezvousMessage::read(&mut &bytes[..]).is_ok());
    }
    let key = [0x5a; KEY_LEN];
    if let Some(registration) = Registration::read(data, &key) {
        assert_eq!(registration.to_bytes(&key), data);
    }
    // The same bytes, authenticated by a holder of the key.
    let Some((id, rest)) = data.split_first_chunk() else { return };
    let Some((number, rest)) = rest.split_first_chunk() else { return };
    let other = rest.first_chunk::<6>().map(|[a, b, c, d, p, q]| {
        std::net::SocketAddr::from(([*a, *b, *c, *d], u16::from_be_bytes([*p, *q]).max(1)))
    });
    let written =
        Registration { id: *id, number: u64::from_be_bytes(*number), other, is_answer: rest.len() % 2 == 1 };
    let mut bytes = written.to_bytes(&key);
    assert_eq!(Registration::read(&bytes, &key), Some(written));
    let at = data.len() % bytes.len();
    bytes[at] ^= 1 << (data[0] % 8);
    assert_eq!(Registration::read(&bytes, &key), None);
}
