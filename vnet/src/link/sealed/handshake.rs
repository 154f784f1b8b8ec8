//! How two hosts agree on keys: TLS 1.3 with certificates on both sides, then three short messages (docs/security.md).
//!
//! ```text
//! initiator                                             responder
//!     | ------------- TLS 1.3, ALPN "vnet-seal/1" ---------- |
//!     | <-------------------- ACCEPT e --------------------- |   it opens datagrams of epoch e
//!     | --------------------- CONFIRM e -------------------> |   it seals with epoch e; the responder does from now on
//!     | <-------------------- (close) ---------------------- |
//! ```
//!
//! Keys come from the TLS exporter (RFC 8446, section 7.5), so that they are bound to this handshake and its certificates.
//! The connection carries nothing else and ends here; new keys are a new handshake. Whoever says no says why, by a TLS
//! alert or a REFUSE, so that both sides can tell.
//!
//! Nothing here knows of sockets or threads: a stream ends or fails when its time or its bytes are used up ([`Limited`]).

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustls::pki_types::CertificateDer;
use rustls::{ClientConnection, Connection, ServerConnection};

use crate::link::Link;
use crate::link::sealed::aead::MATERIAL_LEN;
use crate::link::sealed::identity::{Identity, explain, server_name};
use crate::link::sealed::session::{Exported, Role, Session};

/// The protocol's name and version (RFC 7301). Another version gets another name.
pub const ALPN: &[u8] = b"vnet-seal/1";
/// Label of the exporter.
const EXPORTER: &[u8] = b"EXPORTER-vnet-seal";
/// How long a handshake may take.
pub const TIME_MAX: Duration = Duration::from_secs(5);
/// Bytes that the other side may send in a handshake: chains of several RSA certificates fit.
pub const BYTES_MAX: usize = 128 << 10;
/// Longest reason that is read or sent, in bytes.
const TEXT_MAX: usize = 512;
const HEAD_LEN: usize = 4;
/// What is said when both sides begin at once; they try again, the one that waits for the other later.
const BUSY: &str = "another handshake for this link is under way";

/// Why a handshake failed: one line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct HandshakeError(pub String);

/// What is said when TLS stands. Four bytes: kind, epoch, length of the text that follows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// 1: datagrams of this epoch are opened here.
    Accept(u8),
    /// 2: so they are here, and all that comes will be sealed with it.
    Confirm(u8),
    /// 3: no, for this reason.
    Refuse(String),
}

impl Message {
    /// The message's bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        let (kind, epoch, text) = match self {
            Message::Accept(epoch) => (1, *epoch, ""),
            Message::Confirm(epoch) => (2, *epoch, ""),
            Message::Refuse(text) => (3, 0, text.as_str()),
        };
        let text = &text.as_bytes()[..text.len().min(TEXT_MAX)];
        let len = (text.len() as u16).to_be_bytes();
        [&[kind, epoch, len[0], len[1]], text].concat()
    }

    /// Bytes that follow a message's first four. The error says what is wrong with those.
    fn rest_len(head: [u8; HEAD_LEN]) -> Result<usize, HandshakeError> {
        let [kind, epoch, l0, l1] = head;
        let len = usize::from(u16::from_be_bytes([l0, l1]));
        let good = match kind {
            1 | 2 => epoch < 4 && len == 0,
            3 => epoch == 0 && len <= TEXT_MAX,
            _ => false,
        };
        good.then_some(len)
            .ok_or_else(|| HandshakeError("the other host speaks another protocol there".into()))
    }

    /// Reads one message from `stream`.
    pub fn read(stream: &mut impl Read) -> Result<Message, HandshakeError> {
        let broken = |error: io::Error| HandshakeError(reason(&error));
        let mut head = [0; HEAD_LEN];
        stream.read_exact(&mut head).map_err(broken)?;
        let mut text = vec![0; Message::rest_len(head)?];
        stream.read_exact(&mut text).map_err(broken)?;
        Ok(match head[0] {
            1 => Message::Accept(head[1]),
            2 => Message::Confirm(head[1]),
            _ => Message::Refuse(one_line(&text)),
        })
    }
}

/// A text for a log: one line, and nothing that a terminal would obey.
pub(in crate::link) fn one_line(text: &[u8]) -> String {
    String::from_utf8_lossy(text).chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

/// A stream that ends in time: every wait is cut to what is left, and so is what may come.
pub struct Limited<S> {
    stream: S,
    until: Instant,
    bytes_left: usize,
}

/// A stream whose waits can be limited.
pub trait Patient: Read + Write {
    /// The next read or write may wait so long.
    fn wait_at_most(&mut self, time: Duration) -> io::Result<()>;
}

impl Patient for TcpStream {
    fn wait_at_most(&mut self, time: Duration) -> io::Result<()> {
        self.set_read_timeout(Some(time))?;
        self.set_write_timeout(Some(time))
    }
}

impl<S: Patient> Limited<S> {
    /// A stream that takes [`TIME_MAX`] and [`BYTES_MAX`] from now on.
    pub fn new(stream: S) -> Limited<S> {
        Limited { stream, until: Instant::now() + TIME_MAX, bytes_left: BYTES_MAX }
    }

    fn limit(&mut self) -> io::Result<()> {
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        // Zero would mean for ever.
        self.stream.wait_at_most(left.max(Duration::from_millis(1)))
    }
}

impl<S: Patient> Read for Limited<S> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.limit()?;
        if self.bytes_left == 0 {
            return Err(io::Error::other("it sends more than a handshake takes"));
        }
        let most = buffer.len().min(self.bytes_left);
        let count = self.stream.read(&mut buffer[..most])?;
        self.bytes_left -= count;
        Ok(count)
    }
}

impl<S: Patient> Write for Limited<S> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.limit()?;
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

/// Agrees on keys for `link` as the side that connects, and puts them in place.
pub(in crate::link) fn initiate<S: Patient>(
    stream: S,
    identity: &Identity,
    link: &Link,
) -> Result<(), HandshakeError> {
    let seal = link.seal().ok_or_else(|| HandshakeError("the link is not sealed".into()))?;
    let _busy = seal.begin().ok_or_else(|| HandshakeError(BUSY.into()))?;
    let mut channel = Channel::connect(stream, identity, &seal.peer, ALPN)?;
    let epoch = match channel.receive()? {
        Message::Accept(epoch) => epoch,
        Message::Refuse(why) => return Err(HandshakeError(format!("the other host refused: {why}"))),
        Message::Confirm(_) => return Err(HandshakeError("the other host speaks out of turn".into())),
    };
    let chain = channel.certificates()?;
    // TLS has found it to be a server of this name; it has to be good for a client, too, or the other way round fails.
    let info = match identity.verify(&chain, &seal.peer) {
        Ok(info) => info,
        Err(why) => {
            let _ = channel.send(&Message::Refuse(why.clone()));
            return Err(HandshakeError(why));
        }
    };
    let exported = channel.export(epoch)?;
    seal.accept(Session::new(&exported, Role::Initiator, epoch, link.next_number(), chain, info));
    seal.switch(epoch);
    channel.send(&Message::Confirm(epoch))?;
    channel.close();
    // The other side closes when it has read that: until then the connection must not be torn down.
    let _ = channel.receive();
    Ok(())
}

/// Agrees on keys as the side that was connected to, and puts them in place. `choose` finds the link by the certificates
/// that the other host showed, which are of a known authority; or says why there is none.
pub(in crate::link) fn respond<S: Patient>(
    stream: S,
    identity: &Identity,
    choose: impl FnOnce(&[CertificateDer<'_>]) -> Result<Arc<Link>, String>,
) -> Result<Arc<Link>, HandshakeError> {
    agree(Channel::accept(stream, identity, &[ALPN])?, identity, choose)
}

/// The same on a connection for which TLS stands.
pub(in crate::link) fn agree<S: Patient>(
    mut channel: Channel<S>,
    identity: &Identity,
    choose: impl FnOnce(&[CertificateDer<'_>]) -> Result<Arc<Link>, String>,
) -> Result<Arc<Link>, HandshakeError> {
    let chain = channel.certificates()?;
    let chosen = choose(&chain).and_then(|link| {
        let peer = link.seal().map(|seal| seal.peer.clone()).unwrap_or_default();
        identity.verify(&chain, &peer).map(|info| (link, info))
    });
    let (link, info) = match chosen {
        Ok(chosen) => chosen,
        Err(why) => {
            let _ = channel.send(&Message::Refuse(why.clone()));
            channel.close();
            return Err(HandshakeError(why));
        }
    };
    let Some(seal) = link.seal() else { return Err(HandshakeError("the link is not sealed".into())) };
    let Some(busy) = seal.begin() else {
        let _ = channel.send(&Message::Refuse(BUSY.into()));
        channel.close();
        return Err(HandshakeError(BUSY.into()));
    };
    let epoch = seal.next_epoch();
    let exported = channel.export(epoch)?;
    seal.accept(Session::new(&exported, Role::Responder, epoch, link.next_number(), chain, info));
    channel.send(&Message::Accept(epoch))?;
    match channel.receive()? {
        Message::Confirm(confirmed) if confirmed == epoch => {
            seal.switch(epoch);
            drop(busy);
            channel.close();
            Ok(link)
        }
        Message::Refuse(why) => Err(HandshakeError(format!("the other host refused: {why}"))),
        _ => Err(HandshakeError("the other host speaks out of turn".into())),
    }
}

/// An established TLS connection.
pub(in crate::link) struct Channel<S: Patient> {
    tls: Connection,
    stream: Limited<S>,
}

impl<S: Patient> Channel<S> {
    /// TLS as the side that connects, to the host `peer`, for the protocol `alpn`.
    pub(in crate::link) fn connect(
        stream: S,
        identity: &Identity,
        peer: &str,
        alpn: &[u8],
    ) -> Result<Channel<S>, HandshakeError> {
        let failed = |error: rustls::Error| HandshakeError(explain(&error));
        let config = identity.client(&[alpn]).map_err(failed)?;
        let name = server_name(peer).map_err(HandshakeError)?;
        Channel::open(ClientConnection::new(Arc::new(config), name).map_err(failed)?.into(), stream, &[alpn])
    }

    /// TLS as the side that is connected to, for one of the protocols `alpn`.
    pub(in crate::link) fn accept(
        stream: S,
        identity: &Identity,
        alpn: &[&[u8]],
    ) -> Result<Channel<S>, HandshakeError> {
        let failed = |error: rustls::Error| HandshakeError(explain(&error));
        let config = identity.server(alpn).map_err(failed)?;
        Channel::open(ServerConnection::new(Arc::new(config)).map_err(failed)?.into(), stream, alpn)
    }

    fn open(mut tls: Connection, stream: S, alpn: &[&[u8]]) -> Result<Channel<S>, HandshakeError> {
        let mut stream = Limited::new(stream);
        while tls.is_handshaking() {
            tls.complete_io(&mut stream).map_err(|error| HandshakeError(reason(&error)))?;
        }
        // Whoever offers no protocol at all gets through the negotiation.
        if !tls.alpn_protocol().is_some_and(|protocol| alpn.contains(&protocol)) {
            return Err(HandshakeError("the other host speaks another protocol there".into()));
        }
        Ok(Channel { tls, stream })
    }

    /// The protocol that both sides speak (RFC 7301).
    pub(in crate::link) fn protocol(&self) -> Option<&[u8]> {
        self.tls.alpn_protocol()
    }

    /// What TLS goes by.
    pub(in crate::link) fn stream(&self) -> &S {
        &self.stream.stream
    }

    /// The same, without TLS.
    pub(in crate::link) fn into_stream(self) -> S {
        self.stream.stream
    }

    /// The other host's certificate, and those up to its authority.
    pub(in crate::link) fn certificates(&self) -> Result<Vec<CertificateDer<'static>>, HandshakeError> {
        let chain = self.tls.peer_certificates().unwrap_or_default();
        if chain.is_empty() {
            return Err(HandshakeError("the other host shows no certificate".into()));
        }
        Ok(chain.iter().map(|certificate| certificate.clone().into_owned()).collect())
    }

    fn export(&self, epoch: u8) -> Result<Exported, HandshakeError> {
        let failed = |error: rustls::Error| HandshakeError(explain(&error));
        self.tls.export_keying_material([0; 2 * MATERIAL_LEN], EXPORTER, Some(&[epoch])).map_err(failed)
    }

    fn send(&mut self, message: &Message) -> Result<(), HandshakeError> {
        self.send_bytes(&message.to_bytes())
    }

    /// Sends bytes at once.
    pub(in crate::link) fn send_bytes(&mut self, bytes: &[u8]) -> Result<(), HandshakeError> {
        let sent = self.tls.writer().write_all(bytes).and_then(|()| self.flush());
        sent.map_err(|error| HandshakeError(reason(&error)))
    }

    fn receive(&mut self) -> Result<Message, HandshakeError> {
        Message::read(self)
    }

    /// Sends what TLS has to send.
    fn flush(&mut self) -> io::Result<()> {
        while self.tls.wants_write() {
            self.tls.write_tls(&mut self.stream)?;
        }
        self.stream.flush()
    }

    /// Says that nothing more will be sent.
    pub(in crate::link) fn close(&mut self) {
        self.tls.send_close_notify();
        // If it does not arrive the end of the connection says the same.
        let _ = self.flush();
    }
}

impl<S: Patient> Read for Channel<S> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.tls.reader().read(buffer) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                done => return done,
            }
            self.flush()?;
            if self.tls.read_tls(&mut self.stream)? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            if let Err(error) = self.tls.process_new_packets() {
                // The other side is told by an alert, if it still listens.
                let _ = self.flush();
                return Err(io::Error::new(io::ErrorKind::InvalidData, error));
            }
        }
    }
}

/// One line about a stream that failed.
pub(in crate::link) fn reason(error: &io::Error) -> String {
    if let Some(error) = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()) {
        return explain(error);
    }
    match error.kind() {
        io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => {
            format!("the handshake was not done within {} s", TIME_MAX.as_secs())
        }
        io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => {
            "the other host closed the connection; its log says why".into()
        }
        _ => error.to_string(),
    }
}

/// Whether this host connects: of two, the one whose name comes first does. Names have no case.
pub(in crate::link) fn initiates(own: &str, peer: &str) -> bool {
    own.to_ascii_lowercase() < peer.to_ascii_lowercase()
}

#[cfg(test)]
#[path = "handshake_tests.rs"]
mod tests;
