use super::*;
use crate::frame::PortId;
use crate::link::sealed::identity::{is_for, server_name};
use crate::link::sealed::pki::{Flaw, Pki};
use crate::link::{LinkKind, LinkOptions, Security};
use crate::wire::native::{HEADER_LEN, Header, Kind};
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;

use rustls::ClientConnection;

fn link(peer: &str) -> Arc<Link> {
    let remote = "127.0.0.1:9".parse().unwrap();
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

fn streams() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (near, listener.accept().unwrap().0)
}

/// Runs a handshake between two hosts. Returns the result of each side.
fn shake(h1: &Identity, a: &Arc<Link>, h2: &Identity, b: &Arc<Link>) -> [Result<(), String>; 2] {
    let (near, far) = streams();
    std::thread::scope(|scope| {
        let responder = scope.spawn(|| {
            respond(far, h2, |chain| {
                let peer = &b.seal().unwrap().peer;
                if is_for(chain, peer) { Ok(b) } else { Err(format!("the certificate is not for {peer}")) }
            })
        });
        let initiator = initiate(near, h1, a).map_err(|error| error.0);
        [initiator, responder.join().unwrap().map(drop).map_err(|error| error.0)]
    })
}

/// Sends one datagram from one side to the other. Returns true if it arrives.
fn crosses(from: &Link, to: &Link) -> bool {
    let (sending, receiving) = (from.seal().unwrap().keyring(), to.seal().unwrap().keyring());
    let Some(key) = sending.sealing(from.next_number()) else { return false };
    let header = Header {
        kind: Kind::Frame,
        last: true,
        offload: false,
        sealed: true,
        hops: 0,
        epoch: key.epoch(),
        index: 0,
        network: 1,
        queue: 0,
        number: from.take_numbers(1),
    };
    let mut datagram = [&header.to_bytes()[..], b"frame", &[0; 16]].concat();
    key.seal(&mut datagram);
    let opened = receiving.opening(key.epoch()).is_some_and(|key| key.open(&mut datagram).is_ok());
    opened && &datagram[HEADER_LEN..HEADER_LEN + 5] == b"frame"
}

#[test]
fn two_hosts_agree_again_and_again() {
    let folder = tempfile::tempdir().unwrap();
    let pki = Pki::new(folder.path());
    let (h1, h2) = (pki.identity("h1"), pki.identity("h2"));
    let (a, b) = (link("h2"), link("h1"));
    for round in 0..6u8 {
        assert_eq!(shake(&h1, &a, &h2, &b), [Ok(()), Ok(())]);
        assert!(crosses(&a, &b) && crosses(&b, &a), "round {round}");
        assert_eq!(a.seal().unwrap().current(0).map(|current| current.epoch), Some(round & 3));
    }
}

/// Applications at both ends get the same keys for the same session, and other keys for any other one.
#[test]
fn applications_get_keys_of_their_own_from_the_links() {
    let folder = tempfile::tempdir().unwrap();
    let pki = Pki::new(folder.path());
    let (h1, h2) = (pki.identity("h1"), pki.identity("h2"));
    let (a, b) = (link("h2"), link("h1"));
    assert_eq!(a.application_keys(None, true, b"session"), None, "no keys yet");
    let mut all = std::collections::HashSet::new();
    for round in 0..3u8 {
        assert_eq!(shake(&h1, &a, &h2, &b), [Ok(()), Ok(())]);
        for (context, opens) in [(&b"session"[..], true), (b"session", false), (b"another", true)] {
            let keys = a.application_keys(None, opens, context).unwrap();
            assert_eq!(keys.0, round);
            assert_eq!(b.application_keys(Some(round), !opens, context), Some(keys));
            assert!(all.insert(keys), "round {round}: keys of their own");
            assert!(keys.1[..32] != keys.1[32..], "of each direction");
        }
        // Earlier keys are asked for while packets with newer ones are on their way.
        let before = round.checked_sub(1);
        let earlier = before.map(|epoch| a.application_keys(Some(epoch), true, b"session"));
        assert_eq!(earlier, before.map(|epoch| b.application_keys(Some(epoch), false, b"session")));
        assert!(earlier.is_none_or(|keys| keys.is_some()));
    }
    let (c, d) = (link("h2"), link("h1"));
    assert_eq!(shake(&h1, &c, &h2, &d), [Ok(()), Ok(())]);
    let other = c.application_keys(None, true, b"session").unwrap();
    assert!(all.insert(other), "another handshake, another secret");
    assert_eq!(a.application_keys(Some(3), true, b"session"), None, "no such epoch");
}

/// Each bad certificate is refused, no keys remain on either side, and both sides report the reason.
#[test]
fn a_host_that_is_not_trusted_is_refused_and_both_sides_say_why() {
    let (folder, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (pki, foreign) = (Pki::new(folder.path()), Pki::new(elsewhere.path()));
    let good = || (pki.identity("h1"), pki.identity("h2"));
    // The certificate was valid when it was loaded.
    let revoked = {
        let identity = Identity::load(&pki.issue("h1", 9, Flaw::None, &[]), "h1").unwrap();
        let other = Identity::load(&pki.issue("h2", 9, Flaw::None, &[]), "h2").unwrap();
        pki.revoke(&[9]);
        (identity, other)
    };
    let (h1, h2) = good();
    let cases: [(&str, &Identity, &Identity, &str, &str); 6] = [
        ("a revoked initiator", &revoked.0, &h2, "revoked", "revoked"),
        ("a revoked responder", &h1, &revoked.1, "revoked", "revoked"),
        ("a foreign initiator", &foreign.identity("h1"), &h2, "not trusted here", "authority"),
        ("a foreign responder", &h1, &foreign.identity("h2"), "not trusted here", "authority"),
        ("another initiator", &pki.identity("h3"), &h2, "not for h1", "not for h1"),
        ("another responder", &h1, &pki.identity("h4"), "another name", "another name"),
    ];
    for (what, initiator, responder, one, other) in cases {
        let (a, b) = (link("h2"), link("h1"));
        let said = shake(initiator, &a, responder, &b).map(|result| result.expect_err(what));
        let all = said.join(" / ");
        assert!(all.contains(one) && all.contains(other), "{what}: {all}");
        assert!(said.iter().all(|line| line.lines().count() == 1 && !line.is_empty()), "{what}: {all}");
        assert!(a.seal().unwrap().current(0).is_none(), "{what}");
        assert!(b.seal().unwrap().current(0).is_none(), "{what}");
    }
}

#[test]
fn bytes_that_are_no_handshake_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let pki = Pki::new(folder.path());
    let (h1, h2) = (pki.identity("h1"), pki.identity("h2"));
    let b = link("h1");
    let refused = |bytes: &[u8]| {
        let (mut near, far) = streams();
        near.write_all(bytes).unwrap();
        near.shutdown(std::net::Shutdown::Write).unwrap();
        respond(far, &h2, |_| Ok(&b)).map(drop).unwrap_err().0
    };
    assert!(refused(b"GET / HTTP/1.1\r\n\r\n").contains("does not speak TLS"));
    assert!(refused(b"").contains("closed the connection"));
    assert!(!refused(&[0x16, 3, 1, 0xff, 0xff]).is_empty());
    // TLS with another protocol, or with none.
    for alpn in [&[&b"http/1.1"[..]][..], &[]] {
        let (mut near, far) = streams();
        std::thread::scope(|scope| {
            let responder = scope.spawn(|| respond(far, &h2, |_| Ok(&b)).map(drop).unwrap_err().0);
            let config = h1.client(alpn).unwrap();
            let mut tls = ClientConnection::new(Arc::new(config), server_name("h2").unwrap()).unwrap();
            let _ = tls.complete_io(&mut near);
            let why = responder.join().unwrap();
            assert!(why.contains("protocol"), "{why}");
        });
    }
}

/// Older TLS versions are not offered, so an attacker cannot force a downgrade.
#[test]
fn there_is_nothing_to_downgrade_to() {
    let folder = tempfile::tempdir().unwrap();
    let pki = Pki::new(folder.path());
    let h2 = pki.identity("h2");
    // A TLS 1.2 ClientHello: legacy version, random, no session, one suite of 1.2, no compression, no extensions.
    let mut hello = vec![0x16, 3, 3, 0, 45, 1, 0, 0, 41, 3, 3];
    let b = link("h1");
    hello.extend([7; 32]);
    hello.extend([0, 0, 2, 0xc0, 0x30, 1, 0]);
    let (mut near, far) = streams();
    near.write_all(&hello).unwrap();
    let why = respond(far, &h2, |_| Ok(&b)).map(drop).unwrap_err().0;
    assert!(!why.is_empty() && !why.contains("within"), "{why}");
    let mut answer = vec![];
    near.read_to_end(&mut answer).unwrap();
    assert_eq!(answer[0], 0x15, "an alert, and nothing else");
}

#[test]
fn messages_are_laid_out_as_documented() {
    for (message, bytes) in [
        (HandshakeMessage::Accept(2), &[1, 2, 0, 0][..]),
        (HandshakeMessage::Confirm(3), &[2, 3, 0, 0]),
        (HandshakeMessage::Refuse("no".into()), &[3, 0, 0, 2, b'n', b'o']),
    ] {
        assert_eq!(message.to_bytes(), bytes);
        assert_eq!(HandshakeMessage::read(&mut &bytes[..]), Ok(message));
        assert!(HandshakeMessage::read(&mut &bytes[..bytes.len() - 1]).is_err());
    }
    for bad in [[0, 0, 0, 0], [1, 4, 0, 0], [1, 0, 0, 1], [3, 1, 0, 0], [3, 0, 2, 1], [4, 0, 0, 0]] {
        assert!(HandshakeMessage::read(&mut &bad[..]).is_err(), "{bad:?}");
    }
    let long = HandshakeMessage::Refuse("x".repeat(5000)).to_bytes();
    assert_eq!(HandshakeMessage::read(&mut &long[..]), Ok(HandshakeMessage::Refuse("x".repeat(TEXT_MAX))));
    let rude = HandshakeMessage::read(&mut &[3, 0, 0, 3, b'a', 0x1b, b'b'][..]).unwrap();
    assert_eq!(rude, HandshakeMessage::Refuse("a\u{fffd}b".into()));
}

#[test]
fn one_of_two_connects() {
    assert!(initiates("h1", "h2") && !initiates("h2", "h1"));
    assert!(initiates("A", "b") && !initiates("B", "a") && !initiates("h1", "H1"));
}
