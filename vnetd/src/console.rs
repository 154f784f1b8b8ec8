//! The console: the control language over TCP, one line per command and per answer.
//!
//! A slow client cannot delay others: a line must be complete [`LINE_TIME`] after its first byte, an idle session ends after
//! [`IDLE_TIME`], and the kernel drops a peer that does not read. A line over the limit is skipped up to its end and answered
//! with an error; it takes no more memory than a valid line.
//!
//! A line of HTTP ends the session at once. Any web page can make a browser on this host send a request to a loopback address, and
//! lines of the request's body would be commands.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::time::{Instant, timeout_at};
use tokio_rustls::TlsAcceptor;
use vnet_control::console::{Answer, answer};
use vnet_control::events::Asker;
use vnet_control::language::{Dialect, LINE_MAX, LanguageError};

use crate::serve::{self, Slots, Stream};
use crate::shared::{Shared, change};

/// Maximum number of concurrent sessions: people and scripts that control one host.
const CLIENTS: usize = 64;
/// Idle timeout of a session.
const IDLE_TIME: Duration = Duration::from_secs(600);
/// Timeout of a line, from its first byte to its last.
const LINE_TIME: Duration = Duration::from_secs(30);

/// Accept loop of the console.
pub async fn serve(listener: TcpListener, tls: Option<TlsAcceptor>, shared: Shared) {
    let slots = Slots::new(CLIENTS);
    loop {
        match serve::accept(&listener).await {
            Ok((stream, peer)) => {
                let Some(slot) = slots.take("console") else {
                    // The socket's send buffer is empty, so this does not block.
                    let _ = stream.try_write(b"ERROR too many clients; try again later\n");
                    continue;
                };
                let (tls, shared) = (tls.clone(), shared.clone());
                tokio::spawn(async move {
                    let _slot = slot;
                    let ended = match serve::secure(stream, peer, tls).await {
                        Some(Stream::Clear(stream)) => session(stream, peer, &shared).await,
                        Some(Stream::Tls(stream)) => session(stream, peer, &shared).await,
                        None => return,
                    };
                    if let Err(error) = ended {
                        tracing::debug!(%peer, %error, "console session failed");
                    }
                });
            }
            Err(error) => serve::cannot_accept("console", &error).await,
        }
    }
}

/// Answers lines until the client quits, disconnects or times out.
async fn session(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    peer: SocketAddr,
    shared: &Shared,
) -> io::Result<()> {
    let mut lines = Lines::new(stream);
    loop {
        let said = match lines.next(IDLE_TIME, LINE_TIME).await? {
            Read::Line(line) if is_http(line) => {
                tracing::warn!(%peer, "the console was spoken to in HTTP; the session is closed");
                lines.stream.write_all(b"ERROR this is no HTTP server\n").await?;
                return lines.stream.shutdown().await;
            }
            Read::Line(line) => {
                let line = line.to_vec();
                let asker = Asker::Console(peer);
                let said =
                    change(shared.clone(), asker, move |engine| Ok(answer(engine, Dialect::Console, &line)));
                match said.await {
                    Ok(said) => said,
                    Err(_) => Answer::Error("vnetd is stopping".into()),
                }
            }
            Read::TooLong => LanguageError::TooLong.into(),
            Read::End => return Ok(()),
            Read::Late => {
                lines.stream.write_all(b"ERROR idle for too long\n").await?;
                return lines.stream.shutdown().await;
            }
        };
        lines.stream.write_all(said.to_string().as_bytes()).await?;
        lines.stream.flush().await?;
        if said == Answer::Done {
            return lines.stream.shutdown().await;
        }
    }
}

/// True for the first line of an HTTP request, whose last word is the protocol's version (RFC 9112, section 3). No command ends so.
fn is_http(line: &[u8]) -> bool {
    line.rsplit(|byte| *byte == b' ').next().is_some_and(|word| word.starts_with(b"HTTP/"))
}

/// Input from the client.
#[derive(Debug, PartialEq)]
enum Read<'a> {
    /// A line without its line ending.
    Line(&'a [u8]),
    /// A line of more than [`LINE_MAX`] bytes; it was skipped.
    TooLong,
    /// End of stream.
    End,
    /// Timeout.
    Late,
}

/// Splits a stream into lines, in a buffer of one line.
struct Lines<S> {
    stream: S,
    buffer: Box<[u8]>,
    /// Number of bytes in the buffer.
    filled: usize,
    /// Length of the previous line, which is removed before the next one is read.
    used: usize,
    /// True while the rest of a line over the limit is discarded.
    skipping: bool,
}

impl<S: AsyncRead + Unpin> Lines<S> {
    fn new(stream: S) -> Lines<S> {
        // Room for a line and its two-byte line ending.
        Lines { stream, buffer: vec![0; LINE_MAX + 2].into(), filled: 0, used: 0, skipping: false }
    }

    async fn next(&mut self, idle: Duration, line: Duration) -> io::Result<Read<'_>> {
        self.buffer.copy_within(self.used..self.filled, 0);
        self.filled -= std::mem::take(&mut self.used);
        let mut scanned = 0;
        let mut begun = self.filled > 0;
        let mut deadline = Instant::now() + if begun { line } else { idle };
        loop {
            if let Some(at) = self.buffer[scanned..self.filled].iter().position(|byte| *byte == b'\n') {
                let end = scanned + at;
                self.used = end + 1;
                if std::mem::take(&mut self.skipping) {
                    return Ok(Read::TooLong);
                }
                let line = &self.buffer[..end];
                let line = line.strip_suffix(b"\r").unwrap_or(line);
                return Ok(if line.len() > LINE_MAX { Read::TooLong } else { Read::Line(line) });
            }
            scanned = self.filled;
            if self.filled == self.buffer.len() {
                (self.skipping, self.filled, scanned) = (true, 0, 0);
            }
            match timeout_at(deadline, self.stream.read(&mut self.buffer[self.filled..])).await {
                Err(_) => return Ok(Read::Late),
                Ok(read) => match read? {
                    0 => return Ok(Read::End),
                    count => self.filled += count,
                },
            }
            if !begun {
                (begun, deadline) = (true, Instant::now() + line);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(600);

    /// Reads all lines of `text`, sent in pieces of `piece` bytes; `None` for a line over the limit.
    async fn read(text: &[u8], piece: usize) -> Vec<Option<Vec<u8>>> {
        let (mut here, there) = tokio::io::duplex(piece);
        let text = text.to_vec();
        tokio::spawn(async move { here.write_all(&text).await });
        let mut lines = Lines::new(there);
        let mut got = vec![];
        loop {
            match lines.next(LONG, LONG).await.unwrap() {
                Read::Line(line) => got.push(Some(line.to_vec())),
                Read::TooLong => got.push(None),
                Read::End => return got,
                Read::Late => panic!("late"),
            }
        }
    }

    #[tokio::test]
    async fn lines_are_split_the_same_for_any_read_size() {
        let full = vec![b'x'; LINE_MAX];
        let over = vec![b'y'; LINE_MAX + 1];
        let huge = vec![b'z'; 10 * LINE_MAX + 7];
        let mut text = vec![];
        for line in [&b"one"[..], b"", b"two\r", &full, &over, b"three", &huge, &over, b"\xff\0", &full] {
            text.extend_from_slice(line);
            text.push(b'\n');
        }
        text.extend_from_slice(b"without an end");
        let some = |line: &[u8]| Some(line.to_vec());
        let want = vec![
            some(b"one"),
            some(b""),
            some(b"two"),
            some(&full),
            None,
            some(b"three"),
            None,
            None,
            some(b"\xff\0"),
            some(&full),
        ];
        for piece in [1, 2, 7, 4095, 4096, 4097, 4098, 100_000] {
            assert_eq!(read(&text, piece).await, want, "pieces of {piece}");
        }
    }

    #[tokio::test]
    async fn a_browsers_request_ends_the_session_before_its_body_is_read() {
        let (mut here, there) = tokio::io::duplex(4096);
        let shared = crate::handlers::tests::app(None).shared;
        let peer = SocketAddr::from(([127, 0, 0, 1], 1));
        let served = tokio::spawn(async move { session(there, peer, &shared).await });
        let request = "POST / HTTP/1.1\r\nHost: 127.0.0.1:9001\r\n\r\nROUTE ADD any any any interface c1\r\n";
        here.write_all(request.as_bytes()).await.unwrap();
        let mut said = String::new();
        here.read_to_string(&mut said).await.unwrap();
        assert_eq!(said, "ERROR this is no HTTP server\n");
        served.await.unwrap().unwrap();
        for line in ["GET /v1/status HTTP/1.0", "PRI * HTTP/2.0"] {
            assert!(is_http(line.as_bytes()), "{line}");
        }
        assert!(!is_http(b"LINK ADD 127.0.0.2 9000") && !is_http(b""));
    }

    #[tokio::test(start_paused = true)]
    async fn slow_clients_time_out() {
        let (mut here, there) = tokio::io::duplex(64);
        let mut lines = Lines::new(there);
        assert_eq!(lines.next(IDLE_TIME, LINE_TIME).await.unwrap(), Read::Late, "says nothing");
        tokio::spawn(async move {
            for _ in 0..1000 {
                here.write_all(b"x").await.unwrap();
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
        });
        let before = Instant::now();
        assert_eq!(lines.next(IDLE_TIME, LINE_TIME).await.unwrap(), Read::Late, "never ends its line");
        assert!(before.elapsed() <= LINE_TIME + Duration::from_secs(2), "{:?}", before.elapsed());
    }
}
