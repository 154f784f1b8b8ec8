//! TLS connections between hosts, bounded in time and bytes.
//!
//! A [`Channel`] is TLS 1.3 with certificates on both sides, over any stream with a timeout for reads and writes. It carries
//! handshakes of sealed links and requests to a rendezvous relay. It depends on neither sockets nor threads: a stream ends or
//! fails when its time or its bytes are used up ([`Limited`]).

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustls::pki_types::CertificateDer;
use rustls::{ClientConnection, Connection, ServerConnection};

use super::{Identity, explain, server_name};

/// Time limit for a handshake and the messages after it.
pub const TIME_MAX: Duration = Duration::from_secs(5);
/// Maximum number of bytes that the other side may send in that time: enough for certificate chains of several RSA keys.
pub const BYTES_MAX: usize = 128 << 10;
/// Maximum number of certificates that the other side may show.
pub(in crate::link) const CERTIFICATES_MAX: usize = 32;
/// How long a failed handshake waits for the other side to close. It closes as soon as it has read the alert.
const LINGER: Duration = Duration::from_millis(500);
const ANOTHER_PROTOCOL: &str = "the other host speaks another protocol there";

/// Reason why a handshake failed, in one line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct HandshakeError(pub String);

impl HandshakeError {
    /// The error for a peer that uses another protocol, or another version of it.
    pub(in crate::link) fn another_protocol() -> HandshakeError {
        HandshakeError(ANOTHER_PROTOCOL.into())
    }

    /// The error for a message that is not allowed at this point of the protocol.
    pub(in crate::link) fn unexpected_message() -> HandshakeError {
        HandshakeError("the other host sent an unexpected message".into())
    }

    /// The error for a message that refuses the request.
    pub(in crate::link) fn refused(by: &str, why: &str) -> HandshakeError {
        HandshakeError(format!("{by} refused: {why}"))
    }
}

impl From<rustls::Error> for HandshakeError {
    fn from(error: rustls::Error) -> HandshakeError {
        HandshakeError(explain(&error))
    }
}

/// Describes a failed stream in one line.
impl From<io::Error> for HandshakeError {
    fn from(error: io::Error) -> HandshakeError {
        if let Some(error) = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()) {
            return HandshakeError(explain(error));
        }
        HandshakeError(match error.kind() {
            io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => {
                format!("the handshake was not done within {} s", TIME_MAX.as_secs())
            }
            io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => {
                "the other host closed the connection; its log says why".into()
            }
            _ => error.to_string(),
        })
    }
}

/// Makes foreign text safe for a log: one line, without control characters that a terminal would interpret.
pub(in crate::link) fn one_line(text: &[u8]) -> String {
    String::from_utf8_lossy(text).chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

/// A stream with a timeout for reads and writes.
pub trait Patient: Read + Write {
    /// Limits the next read or write to `time`.
    fn wait_at_most(&mut self, time: Duration) -> io::Result<()>;

    /// Tells the other side that no more bytes follow, where the stream can be closed in one direction.
    fn end_sending(&mut self) {}
}

impl Patient for TcpStream {
    fn wait_at_most(&mut self, time: Duration) -> io::Result<()> {
        self.set_read_timeout(Some(time))?;
        self.set_write_timeout(Some(time))
    }

    fn end_sending(&mut self) {
        // Fails only when the connection is gone.
        let _ = self.shutdown(Shutdown::Write);
    }
}

/// A stream with a deadline and a limit on bytes received.
pub struct Limited<S> {
    stream: S,
    deadline: Instant,
    bytes_left: usize,
}

impl<S: Patient> Limited<S> {
    /// A stream that may take [`TIME_MAX`] and [`BYTES_MAX`] from now on.
    pub fn new(stream: S) -> Limited<S> {
        Limited { stream, deadline: Instant::now() + TIME_MAX, bytes_left: BYTES_MAX }
    }

    fn limit(&mut self) -> io::Result<()> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        // A timeout of zero would mean no timeout.
        self.stream.wait_at_most(left.max(Duration::from_millis(1)))
    }

    /// Ends sending, and discards what the other side still sends until it closes or [`LINGER`] is over. Closing a TCP socket with
    /// unread bytes resets the connection, and the other side would lose the alert that was sent just before.
    fn linger(&mut self) {
        self.stream.end_sending();
        self.deadline = self.deadline.min(Instant::now() + LINGER);
        let mut discarded = [0; 4096];
        while self.read(&mut discarded).is_ok_and(|count| count > 0) {}
    }
}

impl<S: Patient> Read for Limited<S> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.limit()?;
        if self.bytes_left == 0 {
            return Err(io::Error::other("the other host sends more than a handshake takes"));
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

/// An established TLS connection.
pub(in crate::link) struct Channel<S: Patient> {
    tls: Connection,
    stream: Limited<S>,
}

impl<S: Patient> Channel<S> {
    /// Runs TLS as the connecting side, to the host `peer`, for the protocol `alpn`.
    pub(in crate::link) fn connect(
        stream: S,
        identity: &Identity,
        peer: &str,
        alpn: &[u8],
    ) -> Result<Channel<S>, HandshakeError> {
        let config = identity.client(&[alpn])?;
        let name = server_name(peer).map_err(HandshakeError)?;
        Channel::open(ClientConnection::new(Arc::new(config), name)?.into(), stream, &[alpn])
    }

    /// Runs TLS as the accepting side, for one of the protocols `alpn`.
    pub(in crate::link) fn accept(
        stream: S,
        identity: &Identity,
        alpn: &[&[u8]],
    ) -> Result<Channel<S>, HandshakeError> {
        let config = identity.server(alpn)?;
        Channel::open(ServerConnection::new(Arc::new(config))?.into(), stream, alpn)
    }

    fn open(mut tls: Connection, stream: S, alpn: &[&[u8]]) -> Result<Channel<S>, HandshakeError> {
        let mut stream = Limited::new(stream);
        while tls.is_handshaking() {
            if let Err(error) = tls.complete_io(&mut stream) {
                // rustls writes once, which may end before the alert.
                while tls.wants_write() && tls.write_tls(&mut stream).is_ok_and(|count| count > 0) {}
                stream.linger();
                return Err(error.into());
            }
        }
        // A peer that offers no protocol at all passes ALPN.
        if !tls.alpn_protocol().is_some_and(|protocol| alpn.contains(&protocol)) {
            return Err(HandshakeError::another_protocol());
        }
        Ok(Channel { tls, stream })
    }

    /// The protocol that both sides agreed on (RFC 7301).
    pub(in crate::link) fn protocol(&self) -> Option<&[u8]> {
        self.tls.alpn_protocol()
    }

    /// The stream under TLS.
    pub(in crate::link) fn stream(&self) -> &S {
        &self.stream.stream
    }

    /// Returns the stream; TLS ends here.
    pub(in crate::link) fn into_stream(self) -> S {
        self.stream.stream
    }

    /// The other host's certificate, followed by those of its issuers.
    pub(in crate::link) fn certificates(&self) -> Result<Vec<CertificateDer<'static>>, HandshakeError> {
        let chain = self.tls.peer_certificates().unwrap_or_default();
        if chain.is_empty() {
            return Err(HandshakeError("the other host shows no certificate".into()));
        }
        if chain.len() > CERTIFICATES_MAX {
            return Err(HandshakeError("the other host shows too many certificates".into()));
        }
        Ok(chain.iter().map(|certificate| certificate.clone().into_owned()).collect())
    }

    /// Exports keying material (RFC 8446, section 7.5).
    pub(in crate::link) fn export<const N: usize>(
        &self,
        label: &[u8],
        context: &[u8],
    ) -> Result<[u8; N], HandshakeError> {
        Ok(self.tls.export_keying_material([0; N], label, Some(context))?)
    }

    /// Sends bytes without delay.
    pub(in crate::link) fn send(&mut self, bytes: &[u8]) -> Result<(), HandshakeError> {
        Ok(self.tls.writer().write_all(bytes).and_then(|()| self.flush())?)
    }

    /// Sends the records that TLS has buffered.
    fn flush(&mut self) -> io::Result<()> {
        while self.tls.wants_write() {
            self.tls.write_tls(&mut self.stream)?;
        }
        self.stream.flush()
    }

    /// Announces to the other side that no more data follows.
    pub(in crate::link) fn close(&mut self) {
        self.tls.send_close_notify();
        // If the alert does not arrive, the end of the connection has the same meaning.
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
                // An alert gives the other side the reason, if it still reads.
                let _ = self.flush();
                self.stream.linger();
                return Err(io::Error::new(io::ErrorKind::InvalidData, error));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Yields one byte at a time, without end.
    struct Trickle(u32);

    impl Read for Trickle {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            self.0 += 1;
            buffer[0] = 0;
            Ok(1)
        }
    }

    impl Write for Trickle {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl Patient for Trickle {
        fn wait_at_most(&mut self, time: Duration) -> io::Result<()> {
            assert!(!time.is_zero() && time <= TIME_MAX);
            Ok(())
        }
    }

    /// A peer that sends a byte now and then, or too many bytes, is disconnected in time.
    #[test]
    fn a_slow_or_long_handshake_ends() {
        let mut stream = Limited::new(Trickle(0));
        let mut read = vec![];
        let error = stream.read_to_end(&mut read).unwrap_err();
        assert_eq!(read.len(), BYTES_MAX, "{error}");
        let mut late = Limited { stream: Trickle(0), deadline: Instant::now(), bytes_left: 100 };
        assert_eq!(late.read(&mut [0; 10]).unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert_eq!(late.stream.0, 0);
    }
}
