//! TLS on a stream link: version 1.3, with the certificates of sealed links on both sides.
//!
//! A [`Handshake`] never blocks: the stream thread advances it when the socket is ready, and limits its time. The handshake
//! limits the bytes that the other side may send. Afterwards dispatchers use the connection like any other: rustls encrypts and
//! decrypts records as bytes are sent and received.

use std::io::{self, Read};
use std::net::TcpStream;
use std::sync::Arc;

use rustls::pki_types::CertificateDer;
use rustls::{ClientConnection, Connection, ServerConnection};

use crate::link::sealed::identity::tls::BYTES_MAX;
use crate::link::sealed::identity::{Claims, Identity, explain, server_name};

/// Protocol name and version (RFC 7301). Another version gets another name.
const ALPN: &[u8] = b"vnet-stream/1";

/// An established TLS connection and the identity of the peer.
pub(super) struct Secured {
    pub(super) tls: Connection,
    pub(super) chain: Vec<CertificateDer<'static>>,
    /// Networks and addresses that the certificate allows the peer to use.
    pub(super) claims: Arc<Claims>,
}

impl std::fmt::Debug for Secured {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Secured").field("claims", &self.claims).finish_non_exhaustive()
    }
}

/// A TLS handshake in progress. Errors are one line.
pub(super) struct Handshake {
    tls: Connection,
    /// Number of bytes that the other side may still send.
    bytes_left: u64,
}

impl Handshake {
    /// Creates a handshake for a connection that this host dialed to `peer`.
    pub(super) fn client(identity: &Identity, peer: &str) -> Result<Handshake, String> {
        let config = identity.client(&[ALPN]).map_err(|error| explain(&error))?;
        let tls = ClientConnection::new(Arc::new(config), server_name(peer)?);
        Ok(Handshake::new(tls.map_err(|error| explain(&error))?.into()))
    }

    /// Creates a handshake for a connection that this host accepted; the certificate identifies the peer.
    pub(super) fn server(identity: &Identity) -> Result<Handshake, String> {
        let config = identity.server(&[ALPN]).map_err(|error| explain(&error))?;
        let tls = ServerConnection::new(Arc::new(config)).map_err(|error| explain(&error))?;
        Ok(Handshake::new(tls.into()))
    }

    fn new(tls: Connection) -> Handshake {
        Handshake { tls, bytes_left: BYTES_MAX as u64 }
    }

    /// Continues until the socket would block. Returns true when the handshake is complete and all of its bytes have been sent.
    pub(super) fn advance(&mut self, mut socket: &TcpStream) -> Result<bool, String> {
        let ended = |error: io::Error| format!("the TLS handshake ended: {error}");
        loop {
            let written = self.write(socket).map_err(ended)?;
            if !self.tls.is_handshaking() {
                return Ok(written);
            }
            if self.bytes_left == 0 {
                return Err(ended(io::Error::other("the other host sends more than a handshake takes")));
            }
            let mut limited = socket.take(self.bytes_left);
            match self.tls.read_tls(&mut limited) {
                Ok(0) => return Err(ended(io::ErrorKind::UnexpectedEof.into())),
                Ok(_) => self.bytes_left = limited.limit(),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(ended(error)),
            }
            if let Err(error) = self.tls.process_new_packets() {
                // An alert gives the other side the reason, if it still reads.
                let _ = self.tls.write_tls(&mut socket);
                return Err(explain(&error));
            }
        }
    }

    /// Sends the records that TLS has buffered. Returns false when the socket would block.
    fn write(&mut self, mut socket: &TcpStream) -> io::Result<bool> {
        while self.tls.wants_write() {
            match self.tls.write_tls(&mut socket) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    /// The certificates of the peer. The handshake must be complete.
    pub(super) fn chain(&self) -> Result<Vec<CertificateDer<'static>>, String> {
        // A peer that offers no protocol at all passes ALPN.
        if self.tls.alpn_protocol() != Some(ALPN) {
            return Err("the other host speaks another protocol there".into());
        }
        let chain = self.tls.peer_certificates().unwrap_or_default();
        if chain.is_empty() {
            return Err("the other host shows no certificate".into());
        }
        Ok(chain.iter().map(|certificate| certificate.clone().into_owned()).collect())
    }

    /// Returns the connection if the certificates are those of `peer`. The handshake must be complete.
    pub(super) fn secured_with(self, identity: &Identity, peer: &str) -> Result<Secured, String> {
        let chain = self.chain()?;
        let info = identity.verify(&chain, peer)?;
        Ok(Secured { tls: self.tls, chain, claims: Arc::new(info.claims) })
    }
}
