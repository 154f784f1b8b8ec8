//! Making connections: directly or through a SOCKS 5 proxy, again and again until the link stops.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use super::connection::Connection;
use super::{MADE, Proxy, Stream, StreamOptions, tls};
use crate::link::Link;
use crate::wire::socks::{self, Destination, Login, SocksError};

/// How long any step of making a connection may take.
const PATIENCE: Duration = Duration::from_secs(5);
/// First pause after a failure; doubled after each up to [`PAUSE_MAX`].
const PAUSE_MIN: Duration = Duration::from_millis(100);
/// Longest pause.
const PAUSE_MAX: Duration = Duration::from_secs(10);
/// A connection that lasted so long was a good one: the next failure is the first again.
const GOOD: Duration = Duration::from_secs(10);

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
enum DialError {
    #[error("cannot connect to {0}: {1}")]
    Connect(String, #[source] io::Error),
    #[error("the proxy at {0} broke off: {1}")]
    Proxy(String, #[source] io::Error),
    #[error(transparent)]
    Refused(#[from] SocksError),
    #[error("{0}")]
    Tls(String),
    #[error("a name needs a proxy that resolves it")]
    Name,
}

/// Keeps one connection made until the link stops.
pub(super) fn run(link: &Link, stream: &Stream) {
    let mut pauses = Pauses::new();
    while !stream.is_stopping() {
        let connected = dial(&stream.options).and_then(|socket| secure(stream, socket));
        match connected {
            Ok(connection) => {
                tracing::info!(link = link.name(), to = %stream.options.destination, "connected");
                let start = Instant::now();
                stream.install(MADE, connection);
                while stream.is_connected(MADE) && !stream.is_stopping() {
                    stream.wait(super::LOOK);
                }
                if start.elapsed() >= GOOD {
                    pauses = Pauses::new();
                }
            }
            Err(error) => stream.failed(error.to_string()),
        }
        let until = Instant::now() + pauses.next();
        while !stream.is_stopping() && Instant::now() < until {
            stream.wait(until.saturating_duration_since(Instant::now()));
        }
    }
    // One that was made while the link stopped.
    *super::lock(&stream.places[MADE].connection) = None;
}

fn dial(options: &StreamOptions) -> Result<TcpStream, DialError> {
    let to = match (&options.proxy, &options.destination) {
        (Some(proxy), _) => proxy.address,
        (None, Destination::Address(address)) => *address,
        (None, Destination::Name(..)) => return Err(DialError::Name),
    };
    let socket =
        TcpStream::connect_timeout(&to, PATIENCE).map_err(|e| DialError::Connect(to.to_string(), e))?;
    if let Some(proxy) = &options.proxy {
        let broke = |error| DialError::Proxy(to.to_string(), error);
        socket.set_read_timeout(Some(PATIENCE)).map_err(broke)?;
        socket.set_write_timeout(Some(PATIENCE)).map_err(broke)?;
        pass(&socket, proxy, &options.destination)?;
    }
    Ok(socket)
}

/// Makes TLS of it, where the link is sealed.
fn secure(stream: &Stream, socket: TcpStream) -> Result<Connection, DialError> {
    let secured = match (&stream.peer, stream.identity.get()) {
        (None, _) => None,
        (Some(_), None) => return Err(DialError::Tls("this host has no certificate; see [identity]".into())),
        (Some(peer), Some(identity)) => {
            Some(tls::connect(&socket, &identity.current(), peer).map_err(DialError::Tls)?)
        }
    };
    Connection::new(socket, secured)
        .map_err(|e| DialError::Connect(stream.options.destination.to_string(), e))
}

/// Asks the proxy for a connection to `to`. Not a byte is read that is not the proxy's.
fn pass(mut socket: &TcpStream, proxy: &Proxy, to: &Destination) -> Result<(), DialError> {
    let broke = |error| DialError::Proxy(proxy.address.to_string(), error);
    let mut two = [0; 2];
    socket.write_all(&socks::greeting(proxy.credentials.is_some())).map_err(broke)?;
    socket.read_exact(&mut two).map_err(broke)?;
    if let (Login::Password, Some(credentials)) =
        (socks::login(two, proxy.credentials.is_some())?, &proxy.credentials)
    {
        socket.write_all(&socks::password(credentials)).map_err(broke)?;
        socket.read_exact(&mut two).map_err(broke)?;
        socks::granted(two)?;
    }
    socket.write_all(&socks::connect(to)).map_err(broke)?;
    let mut start = [0; socks::ANSWER_START];
    socket.read_exact(&mut start).map_err(broke)?;
    let mut rest = vec![0; socks::answer_rest(start)?];
    socket.read_exact(&mut rest).map_err(broke)
}

/// Exponential back-off with jitter: each pause is half to all of twice the one before.
struct Pauses(Duration);

impl Pauses {
    fn new() -> Pauses {
        Pauses(PAUSE_MIN)
    }

    fn next(&mut self) -> Duration {
        let whole = self.0;
        self.0 = (2 * whole).min(PAUSE_MAX);
        // Not all hosts that lost the same peer shall come back at once; std's hasher is seeded by the system.
        let chance = RandomState::new().build_hasher().finish() % 1000;
        whole / 2 + whole * chance as u32 / 2000
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_a_limit_and_differ() {
        let mut pauses = Pauses::new();
        let mut whole = PAUSE_MIN;
        for _ in 0..12 {
            let pause = pauses.next();
            assert!(whole / 2 <= pause && pause <= whole, "{pause:?} of {whole:?}");
            whole = (2 * whole).min(PAUSE_MAX);
        }
        assert_eq!(pauses.0, PAUSE_MAX);
        let some: std::collections::HashSet<_> = (0..20).map(|_| Pauses(PAUSE_MAX).next()).collect();
        assert!(some.len() > 1);
    }
}
