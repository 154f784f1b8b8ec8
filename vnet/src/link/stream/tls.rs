//! TLS on a stream link: 1.3, with certificates on both sides, the same that sealed links have (identity.rs).
//!
//! The thread that made or accepted the connection does the handshake, for which it may wait. After that the connection is
//! the dispatchers' like any other: rustls works records off as they come and go over a socket that does not block.

use std::io;
use std::net::TcpStream;
use std::sync::Arc;

use rustls::pki_types::CertificateDer;
use rustls::{ClientConnection, ServerConnection};

use super::OUTBOX_MAX;
use crate::link::sealed::handshake::Limited;
use crate::link::sealed::identity::{Claims, Identity, explain, server_name};

/// The protocol's name and version (RFC 7301). Another version gets another name.
pub(super) const ALPN: &[u8] = b"vnet-stream/1";

/// An established TLS connection, and who is at the other end.
pub(super) struct Secured {
    pub(super) tls: rustls::Connection,
    pub(super) chain: Vec<CertificateDer<'static>>,
    /// For what the other host may speak.
    pub(super) claims: Arc<Claims>,
}

impl std::fmt::Debug for Secured {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Secured").field("claims", &self.claims).finish_non_exhaustive()
    }
}

/// Makes the connection that this host dialled one with `peer`, by TLS. The error is one line.
pub(super) fn connect(socket: &TcpStream, identity: &Identity, peer: &str) -> Result<Secured, String> {
    let config = identity.client(&[ALPN]).map_err(|error| explain(&error))?;
    let tls = ClientConnection::new(Arc::new(config), server_name(peer)?).map_err(|error| explain(&error))?;
    let (tls, chain) = shake_hands(tls.into(), socket)?;
    let info = identity.verify(&chain, peer)?;
    Ok(Secured { tls, chain, claims: Arc::new(info.claims) })
}

/// The same for a connection that came in; the caller finds out whose it is by the certificates.
pub(super) fn accept(
    socket: &TcpStream,
    identity: &Identity,
) -> Result<(rustls::Connection, Vec<CertificateDer<'static>>), String> {
    let config = identity.server(&[ALPN]).map_err(|error| explain(&error))?;
    let tls = ServerConnection::new(Arc::new(config)).map_err(|error| explain(&error))?;
    shake_hands(tls.into(), socket)
}

fn shake_hands(
    mut tls: rustls::Connection,
    socket: &TcpStream,
) -> Result<(rustls::Connection, Vec<CertificateDer<'static>>), String> {
    let socket = socket.try_clone().map_err(|error| error.to_string())?;
    let mut socket = Limited::new(socket);
    while tls.is_handshaking() {
        tls.complete_io(&mut socket).map_err(|error| reason(&error))?;
    }
    // Whoever offers no protocol at all gets through the negotiation.
    if tls.alpn_protocol() != Some(ALPN) {
        return Err("the other host speaks another protocol there".into());
    }
    let chain: Vec<_> =
        tls.peer_certificates().unwrap_or_default().iter().map(|c| c.clone().into_owned()).collect();
    if chain.is_empty() {
        return Err("the other host shows no certificate".into());
    }
    // One more than the outbox hands over at a time.
    tls.set_buffer_limit(Some(OUTBOX_MAX));
    Ok((tls, chain))
}

fn reason(error: &io::Error) -> String {
    match error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()) {
        Some(error) => explain(error),
        None => format!("the TLS handshake ended: {error}"),
    }
}
