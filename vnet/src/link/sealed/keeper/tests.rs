//! Tests of the keeper's check of one link, without its threads.

use std::path::Path;

use super::*;
use crate::frame::PortId;
use crate::link::sealed::identity::{CertificateInfo, Claims};
use crate::link::sealed::pki::Pki;
use crate::link::sealed::session::{Role, Session};
use crate::link::{LinkKind, LinkOptions, LinkState, Security, first_number};

struct NoCourier;

impl KeepaliveSender for NoCourier {
    fn keepalive(&self, _: &Link, _: bool) {}
    fn register(&self, _: &Link) {}
}

/// The keeper of the host `name`, and its link to `peer`.
fn keeper(folder: &Path, name: &str, peer: &str) -> (Arc<KeeperState>, Arc<Link>) {
    // No process listens on port 9.
    let remote = "127.0.0.1:9".parse().unwrap();
    let options = KeeperOptions {
        listen: remote,
        identity: Arc::new(Pki::new(folder).store(name, 1)),
        started: Instant::now() - Duration::from_secs(60),
        rekey: Duration::from_secs(3600),
        courier: Box::new(NoCourier),
        relay: None,
        inheritance: None,
    };
    let state = Arc::new(KeeperState::new(options));
    let (networks, mtu, kind) = (None, None, LinkKind::default());
    let options = LinkOptions { name: peer.into(), remote, ports: 1, networks, mtu, kind };
    let security = Security { peer: Some(peer.into()), macs: None, via: None };
    let link = Link::with_security(options, security, PortId(0), Arc::default());
    state.links.lock().push(link.clone());
    (state, link)
}

/// Agrees on keys for the link.
fn agree(link: &Link) {
    let info = CertificateInfo {
        names: vec![],
        claims: Claims::default(),
        valid: (0, i64::MAX),
        serial: "01".into(),
        fingerprint: String::new(),
    };
    let seal = link.seal().unwrap();
    seal.accept(Session::new(&[7; _], Role::Initiator, 0, first_number(), (vec![], info)));
    seal.switch(0);
}

fn look(state: &Arc<KeeperState>, link: &Arc<Link>) -> LinkState {
    let identity = state.options.identity.current();
    state.look_after(link, link.seal().unwrap(), &identity, false);
    link.state()
}

/// A handshake that began during an outage may fail after it: the current keys work then, and the keeper does nothing.
#[test]
fn a_failure_of_an_outage_ends_with_the_outage() {
    let folder = tempfile::tempdir().unwrap();
    let (state, link) = keeper(folder.path(), "h1", "h2");
    agree(&link);
    link.heard(state.now_ms());
    assert_eq!(look(&state, &link), LinkState::Up);
    state.progress.lock().get_mut(&link.id).unwrap().failure = Some("nothing answered within 3 s".into());
    link.heard(state.now_ms());
    assert_eq!(look(&state, &link), LinkState::Up);
    // New keys are requested and not available: that is not an outage.
    link.seal().unwrap().request_rekey();
    let failing = |progress: &mut Progress| {
        progress.failure = Some("connection refused".into());
        progress.not_before = Some(Instant::now() + Duration::from_secs(60));
    };
    failing(state.progress.lock().get_mut(&link.id).unwrap());
    assert_eq!(look(&state, &link), LinkState::Degraded("no new keys: connection refused".into()));
}

/// Without keys, as after a restart, the host whose name sorts second does not wait for a second, because the other host may not
/// know that it has to connect.
#[test]
fn a_host_without_keys_connects_soon_whatever_its_name() {
    let folder = tempfile::tempdir().unwrap();
    let (state, link) = keeper(folder.path(), "h2", "h1");
    let identity = state.options.identity.current();
    let must = |silent| {
        let seal = link.seal().unwrap();
        let current = seal.current(link.next_number());
        state.must_initiate(&link, seal, &identity, (current.as_ref(), silent))
    };
    assert!(!must(true), "the other one may be connecting right now");
    std::thread::sleep(Duration::from_millis(100));
    assert!(must(true));
    agree(&link);
    assert!(must(false), "it began the session");
    assert!(!must(true), "with keys, an outage is the likelier cause");
}

/// A listener with a full backlog drops segments like a firewall does.
#[test]
fn a_filtered_tcp_port_is_called_so() {
    use rustix::net::{AddressFamily, SocketType, bind, getsockname, listen, socket};
    let listener = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    let any: SocketAddr = "127.0.0.1:0".parse().unwrap();
    bind(&listener, &any).unwrap();
    listen(&listener, 0).unwrap();
    let at = SocketAddr::try_from(getsockname(&listener).unwrap()).unwrap();
    let connect = || initiating::connect(any, at);
    let mut connections = vec![];
    let HandshakeError(why) = loop {
        match connect() {
            Ok(stream) => connections.push(stream),
            Err(error) => break error,
        }
        assert!(connections.len() < 10, "the backlog is endless");
    };
    assert_eq!(why, format!("no answer from {at} over TCP within 3 s: does a firewall block it?"));
}
