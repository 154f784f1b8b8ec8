//! The handshake by which two hosts agree on keys: TLS 1.3, then three short messages (docs/security.md).
//!
//! ```text
//! initiator                                             responder
//!     | ------------- TLS 1.3, ALPN "vnet-seal/1" ---------- |
//!     | <-------------------- ACCEPT e --------------------- |   the responder opens datagrams of epoch e
//!     | --------------------- CONFIRM e -------------------> |   both seal with epoch e from now on
//!     | <-------------------- (close) ---------------------- |
//! ```
//!
//! Keys come from the TLS exporter (RFC 8446, section 7.5), which binds them to this handshake and its certificates. The
//! connection carries nothing else and ends here; a rekey is a new handshake. A side that refuses sends the reason, in a TLS
//! alert or a REFUSE, so that both hosts can log it.

use std::io::Read;

use rustls::pki_types::CertificateDer;
use zeroize::Zeroizing;

use super::identity::tls::{Channel, HandshakeError, Patient, one_line};
use super::identity::{CertificateInfo, Identity};
use super::session::{Role, Seal, Session};
use crate::link::Link;

/// Protocol name and version (RFC 7301). Another version gets another name.
pub const ALPN: &[u8] = b"vnet-seal/1";
/// Label of the exporter.
const EXPORTER: &[u8] = b"EXPORTER-vnet-seal";
/// Label of the secret that applications' keys are derived from.
const APPLICATIONS: &[u8] = b"EXPORTER-vnet-rdma";
/// Maximum length in bytes of a reason that is read or sent.
const TEXT_MAX: usize = 512;
const HEAD_LEN: usize = 4;
/// Sent when both sides begin at once. Both retry; the side that normally waits for the other retries later.
const BUSY: &str = "another handshake for this link is under way";

/// A message after the TLS handshake. Four bytes precede its text: kind, epoch, length of the text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HandshakeMessage {
    /// Kind 1: the responder opens datagrams of this epoch.
    Accept(u8),
    /// Kind 2: the initiator also opens datagrams of this epoch, and seals with it from now on.
    Confirm(u8),
    /// Kind 3: refused, for this reason.
    Refuse(String),
}

impl HandshakeMessage {
    /// Encodes the message.
    pub fn to_bytes(&self) -> Vec<u8> {
        let (kind, epoch, text) = match self {
            HandshakeMessage::Accept(epoch) => (1, *epoch, ""),
            HandshakeMessage::Confirm(epoch) => (2, *epoch, ""),
            HandshakeMessage::Refuse(text) => (3, 0, text.as_str()),
        };
        let text = &text.as_bytes()[..text.len().min(TEXT_MAX)];
        let len = (text.len() as u16).to_be_bytes();
        [&[kind, epoch, len[0], len[1]], text].concat()
    }

    /// Length of the text after a message's first four bytes.
    fn text_len(head: [u8; HEAD_LEN]) -> Result<usize, HandshakeError> {
        let [kind, epoch, l0, l1] = head;
        let len = usize::from(u16::from_be_bytes([l0, l1]));
        let good = match kind {
            1 | 2 => epoch < 4 && len == 0,
            3 => epoch == 0 && len <= TEXT_MAX,
            _ => false,
        };
        good.then_some(len).ok_or_else(HandshakeError::another_protocol)
    }

    /// Reads one message from `stream`.
    pub fn read(stream: &mut impl Read) -> Result<HandshakeMessage, HandshakeError> {
        let mut head = [0; HEAD_LEN];
        stream.read_exact(&mut head)?;
        let mut text = vec![0; HandshakeMessage::text_len(head)?];
        stream.read_exact(&mut text)?;
        Ok(match head[0] {
            1 => HandshakeMessage::Accept(head[1]),
            2 => HandshakeMessage::Confirm(head[1]),
            _ => HandshakeMessage::Refuse(one_line(&text)),
        })
    }
}

/// Agrees on keys for `link` as the connecting side, and installs them.
pub(in crate::link) fn initiate<S: Patient>(
    stream: S,
    identity: &Identity,
    link: &Link,
) -> Result<(), HandshakeError> {
    let seal = link.seal().ok_or_else(not_sealed)?;
    let _under_way = seal.begin_handshake().ok_or_else(|| HandshakeError(BUSY.into()))?;
    let mut channel = Channel::connect(stream, identity, &seal.peer, ALPN)?;
    let epoch = match HandshakeMessage::read(&mut channel)? {
        HandshakeMessage::Accept(epoch) => epoch,
        HandshakeMessage::Refuse(why) => return Err(HandshakeError::refused("the other host", &why)),
        HandshakeMessage::Confirm(_) => return Err(HandshakeError::unexpected_message()),
    };
    let chain = channel.certificates()?;
    // TLS verified the certificate for use by a server. It must also be valid for a client, or the opposite direction would fail.
    let info = match identity.verify(&chain, &seal.peer) {
        Ok(info) => info,
        Err(why) => {
            let _ = channel.send(&HandshakeMessage::Refuse(why.clone()).to_bytes());
            return Err(HandshakeError(why));
        }
    };
    let session = session(&channel, Role::Initiator, epoch, (link, (chain, info)))?;
    accept(seal, session)?;
    seal.switch(epoch);
    channel.send(&HandshakeMessage::Confirm(epoch).to_bytes())?;
    channel.close();
    // The responder closes once it has read CONFIRM. Until then the connection must stay open.
    let _ = HandshakeMessage::read(&mut channel);
    Ok(())
}

/// Agrees on keys as the accepting side, and installs them. `choose` finds the link by the other host's certificates, which a
/// trusted authority has issued, or returns the reason why there is none.
pub(in crate::link) fn respond<'l, S: Patient>(
    stream: S,
    identity: &Identity,
    choose: impl FnOnce(&[CertificateDer<'_>]) -> Result<&'l Link, String>,
) -> Result<&'l Link, HandshakeError> {
    agree(Channel::accept(stream, identity, &[ALPN])?, identity, choose)
}

/// Like [`respond`], on a connection whose TLS handshake is complete.
pub(in crate::link) fn agree<'l, S: Patient>(
    mut channel: Channel<S>,
    identity: &Identity,
    choose: impl FnOnce(&[CertificateDer<'_>]) -> Result<&'l Link, String>,
) -> Result<&'l Link, HandshakeError> {
    let chain = channel.certificates()?;
    let chosen = choose(&chain).and_then(|link| {
        let peer = link.seal().map(|seal| seal.peer.clone()).unwrap_or_default();
        identity.verify(&chain, &peer).map(|info| (link, info))
    });
    let (link, info) = match chosen {
        Ok(chosen) => chosen,
        Err(why) => return refuse(channel, why),
    };
    let seal = link.seal().ok_or_else(not_sealed)?;
    let Some(under_way) = seal.begin_handshake() else { return refuse(channel, BUSY.into()) };
    let epoch = seal.next_epoch();
    let session = session(&channel, Role::Responder, epoch, (link, (chain, info)))?;
    accept(seal, session)?;
    channel.send(&HandshakeMessage::Accept(epoch).to_bytes())?;
    match HandshakeMessage::read(&mut channel)? {
        HandshakeMessage::Confirm(confirmed) if confirmed == epoch => {
            seal.switch(epoch);
            drop(under_way);
            channel.close();
            Ok(link)
        }
        HandshakeMessage::Refuse(why) => Err(HandshakeError::refused("the other host", &why)),
        _ => Err(HandshakeError::unexpected_message()),
    }
}

/// The session of `epoch` that this TLS connection gives a link with the other host's certificates.
fn session<S: Patient>(
    channel: &Channel<S>,
    role: Role,
    epoch: u8,
    (link, certificates): (&Link, (Vec<CertificateDer<'static>>, CertificateInfo)),
) -> Result<Session, HandshakeError> {
    let exported = Zeroizing::new(channel.export(EXPORTER, &[epoch])?);
    let secret = Zeroizing::new(channel.export(APPLICATIONS, &[epoch])?);
    let session = Session::new(&exported, role, epoch, link.next_number(), certificates);
    Ok(session.with_application_secret(secret))
}

fn accept(seal: &Seal, session: Session) -> Result<(), HandshakeError> {
    let accepted = seal.accept(session);
    accepted.then_some(()).ok_or_else(|| HandshakeError("another vnetd takes over".into()))
}

fn refuse<S: Patient, T>(mut channel: Channel<S>, why: String) -> Result<T, HandshakeError> {
    // The other side may have closed already; this side logs the reason in any case.
    let _ = channel.send(&HandshakeMessage::Refuse(why.clone()).to_bytes());
    channel.close();
    Err(HandshakeError(why))
}

fn not_sealed() -> HandshakeError {
    HandshakeError("the link is not sealed".into())
}

/// True if this host connects: of two hosts, the one whose name sorts first does. Names are compared without case.
pub(in crate::link) fn initiates(own: &str, peer: &str) -> bool {
    own.to_ascii_lowercase() < peer.to_ascii_lowercase()
}

#[cfg(test)]
#[path = "handshake_tests.rs"]
mod tests;
