//! The stream thread: one for all stream links of a host. It dials, accepts, does TLS handshakes, and keeps connections alive.
//!
//! It blocks only while it waits for events. Each connection being established is an *attempt* with a token of the event set; it
//! advances when its socket is ready and ends at its deadline. An established connection is passed to its link, and dispatchers
//! serve it from then on. Certificates are checked over ten rounds, a tenth of the links in each, so that thousands of links do
//! not delay keepalives.
//!
//! Implemented without an async runtime: the data plane has none, and a machine monitor that embeds it need not build one.

use std::collections::HashMap;
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::accept::{Newcomer, install, is_remote, owner_of};
use super::connections::{DIALED, Stream};
use super::dial::{Backoff, Dial, DialError, Progress};
use crate::inherit::{self, Inheritance};
use crate::link::sealed::handshake_gate::HandshakeGate;
use crate::link::socket::tcp::listening;
use crate::link::{Link, normalised};
use crate::listen::until_free;
use crate::log_limit::LogLimit;
use crate::poll::Poller;
use crate::stats::{DiscardReason, PortStats};
use crate::threads;

/// Interval at which connections are checked.
const LOOK: Duration = Duration::from_secs(1);
/// Number of rounds over which all certificates are checked.
const VERIFY_LOOKS: usize = 10;
/// Lifetime of a connection that resets the backoff.
const GOOD: Duration = Duration::from_secs(10);
/// Maximum number of connections accepted in a row: keepalives of all links must not wait for a flood of connections.
const ACCEPTS_MAX: usize = 64;
/// Pause after a failed accept, most likely for lack of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Token of the listening socket. Tokens of attempts follow it.
const LISTENER: u64 = 0;

/// Error when starting the stream thread.
#[derive(Debug, thiserror::Error)]
pub enum StreamsError {
    /// The port is in use, or the process may not bind it.
    #[error("cannot listen on {0} (TCP): {1}; choose another [bridge] stream_listen")]
    Listen(SocketAddr, #[source] io::Error),
    /// The system refused a thread or an event set.
    #[error("cannot start the thread of stream links: {0}")]
    Thread(#[source] io::Error),
}

/// Establishes and maintains the connections of stream links. Stops on drop; established connections stay with their links.
pub struct Streams {
    state: Arc<StreamsState>,
    address: Option<SocketAddr>,
    listener: Option<Arc<TcpListener>>,
    thread: Option<JoinHandle<()>>,
}

struct StreamsState {
    links: Mutex<Vec<Arc<Link>>>,
    stopping: AtomicBool,
    poller: Poller,
    /// Counts connections that belong to no link.
    stats: Arc<PortStats>,
}

impl Streams {
    /// Starts the thread, without links. It accepts connections on `listen`, if given; with `inheritance`, by the listener of a running
    /// vnetd.
    pub fn start(
        listen: Option<SocketAddr>,
        stats: Arc<PortStats>,
        inheritance: Option<&Inheritance>,
    ) -> Result<Streams, StreamsError> {
        let poller = Poller::new().map_err(StreamsError::Thread)?;
        let (mut listener, mut address) = (None, None);
        if let Some(at) = listen {
            let failed = |error| StreamsError::Listen(at, error);
            let missing = || io::Error::other("the running vnetd does not hand over the listener");
            let socket = match inheritance {
                Some(inheritance) => {
                    inheritance.take_one(inherit::STREAMS).map(TcpListener::from).ok_or_else(missing)
                }
                None => until_free(|| listening(at)),
            };
            let socket = Arc::new(socket.map_err(failed)?);
            poller.waker(LISTENER).watch(&socket).map_err(failed)?;
            address = Some(socket.local_addr().map_err(failed)?);
            listener = Some(socket);
        }
        let (links, stopping) = (Mutex::default(), AtomicBool::new(false));
        let state = Arc::new(StreamsState { links, stopping, poller, stats });
        let mut worker = Worker::new(state.clone(), listener.clone());
        let thread = std::thread::Builder::new().name("streams".into()).spawn(move || {
            threads::confine();
            worker.run();
        });
        Ok(Streams { state, address, listener, thread: Some(thread.map_err(StreamsError::Thread)?) })
    }

    /// A duplicate of the listener.
    pub(crate) fn descriptor(&self) -> Option<io::Result<OwnedFd>> {
        Some(self.listener.as_ref()?.as_fd().try_clone_to_owned())
    }

    /// Listening address, with the port that the kernel chose.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.address
    }

    /// Establishes connections for exactly the stream links among `links` from now on.
    pub fn set_links(&self, links: &[Arc<Link>]) {
        let streams: Vec<_> = links.iter().filter(|link| link.is_stream()).cloned().collect();
        for stream in streams.iter().filter_map(|link| link.stream()) {
            stream.set_dialer(&self.state.poller);
        }
        *self.state.links.lock() = streams;
        self.state.poller.ring();
    }
}

impl Drop for Streams {
    fn drop(&mut self) {
        self.state.stopping.store(true, Relaxed);
        self.state.poller.ring();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!(
                "the thread of stream links panicked: they did not reconnect; restart vnetd and report this"
            );
        }
    }
}

/// A connection being established.
enum Attempt {
    Outgoing(Arc<Link>, Dial),
    Incoming(Box<Newcomer>),
}

impl Attempt {
    fn deadline(&self) -> Instant {
        match self {
            Attempt::Outgoing(_, dial) => dial.deadline(),
            Attempt::Incoming(newcomer) => newcomer.deadline,
        }
    }
}

/// Dialing state of one link.
struct Redial {
    backoff: Backoff,
    /// Earliest time of the next attempt.
    at: Instant,
    under_way: bool,
    /// Time at which the dialed connection was established.
    connected: Option<Instant>,
}

/// State of the thread.
struct Worker {
    state: Arc<StreamsState>,
    listener: Option<Arc<TcpListener>>,
    /// Time at which to accept the next connection, if one may be waiting.
    accept_at: Option<Instant>,
    attempts: HashMap<u64, Attempt>,
    /// Dialing state by link id, for links that dial.
    redials: HashMap<u64, Redial>,
    next_token: u64,
    next_look: Instant,
    looks: usize,
    /// Admits handshakes of accepted connections; further ones are refused and counted.
    gate: HandshakeGate,
    /// Rate limit of warnings about refused connections.
    refusals: LogLimit,
}

impl Worker {
    fn new(state: Arc<StreamsState>, listener: Option<Arc<TcpListener>>) -> Worker {
        Worker {
            state,
            listener,
            accept_at: None,
            attempts: HashMap::new(),
            redials: HashMap::new(),
            next_token: LISTENER + 1,
            next_look: Instant::now(),
            looks: 0,
            gate: HandshakeGate::default(),
            refusals: LogLimit::default(),
        }
    }

    fn run(&mut self) {
        let mut ready = vec![];
        while !self.state.stopping.load(Relaxed) {
            let links = self.state.links.lock().clone();
            self.dial_lost(&links);
            let wait = self.next_due(&links).map(|due| due.saturating_duration_since(Instant::now()));
            if let Err(error) = self.state.poller.wait(wait, |token| ready.push(token)) {
                tracing::error!(%error, "stream links: cannot wait for connections");
                return;
            }
            for token in ready.drain(..) {
                match token {
                    LISTENER => self.accept_at = Some(Instant::now()),
                    token => self.advance(token),
                }
            }
            self.accept_waiting();
            self.end_late_attempts();
            self.look_after(&links);
        }
    }

    /// Time of the next timed action; `None`: wait for events only.
    fn next_due(&self, links: &[Arc<Link>]) -> Option<Instant> {
        let waiting = |redial: &&Redial| !redial.under_way && redial.connected.is_none();
        let dials = self.redials.values().filter(waiting).map(|redial| redial.at);
        let deadlines = self.attempts.values().map(Attempt::deadline);
        let look = (!links.is_empty()).then_some(self.next_look);
        dials.chain(deadlines).chain(look).chain(self.accept_at).min()
    }

    /// Starts an attempt for each link that has lost its connection, once its backoff has expired.
    fn dial_lost(&mut self, links: &[Arc<Link>]) {
        let now = Instant::now();
        let dialing = |link: &&Arc<Link>| {
            link.stream().is_some_and(|stream| stream.options.connect && !stream.is_stopping())
        };
        let dialing: HashMap<u64, &Arc<Link>> =
            links.iter().filter(dialing).map(|link| (link.id, link)).collect();
        self.redials.retain(|id, _| dialing.contains_key(id));
        self.attempts.retain(|_, attempt| match attempt {
            Attempt::Outgoing(link, _) => dialing.contains_key(&link.id),
            Attempt::Incoming(_) => true,
        });
        for (id, link) in dialing {
            let Some(stream) = link.stream() else { continue };
            let redial = self.redials.entry(id).or_insert_with(|| Redial {
                backoff: Backoff::new(),
                at: now,
                under_way: false,
                connected: None,
            });
            if stream.is_connected(DIALED) {
                redial.connected.get_or_insert(now);
                continue;
            }
            if redial.under_way {
                continue;
            }
            if let Some(since) = redial.connected.take() {
                if since.elapsed() >= GOOD {
                    redial.backoff = Backoff::new();
                }
                redial.at = now + redial.backoff.next_pause();
            }
            if now >= redial.at {
                self.dial(link, stream);
            }
        }
    }

    fn dial(&mut self, link: &Arc<Link>, stream: &Stream) {
        let attempt = Dial::start(&stream.options).and_then(|dial| {
            let failed = |error| DialError::Connect(stream.options.destination.to_string(), error);
            self.state.poller.waker(self.next_token).watch_both(&dial).map_err(failed)?;
            Ok(Attempt::Outgoing(link.clone(), dial))
        });
        match attempt {
            Ok(attempt) => {
                self.redials.entry(link.id).and_modify(|redial| redial.under_way = true);
                self.add(attempt);
            }
            Err(error) => self.dial_failed(link, &error),
        }
    }

    fn dial_failed(&mut self, link: &Link, error: &DialError) {
        if let Some(stream) = link.stream() {
            stream.failed(error.to_string());
        }
        if let Some(redial) = self.redials.get_mut(&link.id) {
            redial.under_way = false;
            redial.at = Instant::now() + redial.backoff.next_pause();
        }
    }

    /// Adds an attempt and watches its socket under the next token.
    fn add(&mut self, attempt: Attempt) {
        self.attempts.insert(self.next_token, attempt);
        self.next_token += 1;
    }

    /// Continues an attempt whose socket is ready.
    fn advance(&mut self, token: u64) {
        // An event may arrive late, after its attempt has ended.
        match self.attempts.remove(&token) {
            None => {}
            Some(Attempt::Outgoing(link, dial)) => self.advance_dial(token, link, dial),
            Some(Attempt::Incoming(mut newcomer)) => match newcomer.advance() {
                Ok(false) => drop(self.attempts.insert(token, Attempt::Incoming(newcomer))),
                Ok(true) => {
                    self.forget(token, &newcomer.socket);
                    let (source, links) = (newcomer.source, self.state.links.lock().clone());
                    if let Err(why) = newcomer.install(&links) {
                        self.refuse(source, &why);
                    }
                }
                Err(why) => self.refuse(newcomer.source, &why),
            },
        }
    }

    fn advance_dial(&mut self, token: u64, link: Arc<Link>, dial: Dial) {
        let Some(stream) = link.stream() else { return };
        match dial.advance(stream) {
            Ok(Progress::Waiting(dial)) => {
                self.attempts.insert(token, Attempt::Outgoing(link, dial));
            }
            Ok(Progress::Connected(connection)) => {
                self.forget(token, &connection);
                tracing::info!(link = link.name(), to = %stream.options.destination, "connected");
                if let Some(redial) = self.redials.get_mut(&link.id) {
                    (redial.under_way, redial.connected) = (false, Some(Instant::now()));
                }
                stream.install(DIALED, connection);
            }
            Err(error) => self.dial_failed(&link, &error),
        }
    }

    /// Stops watching a socket that a dispatcher watches from now on.
    fn forget(&self, token: u64, socket: impl AsFd) {
        self.state.poller.waker(token).forget(socket);
    }

    fn accept_waiting(&mut self) {
        for _ in 0..ACCEPTS_MAX {
            if self.accept_at.is_none_or(|at| at > Instant::now()) {
                return;
            }
            let Some(listener) = &self.listener else { return };
            match listener.accept() {
                Ok((socket, source)) => self.accept(socket, normalised(source)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.accept_at = None,
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a stream connection");
                    self.accept_at = Some(Instant::now() + ACCEPT_PAUSE);
                }
            }
        }
    }

    /// Assigns an accepted connection to its link in clear text, or starts a TLS handshake to identify the link.
    fn accept(&mut self, socket: TcpStream, source: SocketAddr) {
        let links = self.state.links.lock().clone();
        if let Some((link, stream)) = owner_of(&links, source) {
            return install(link, stream, socket, None, source);
        }
        let unknown = || self.state.stats.discard(DiscardReason::UnknownSource, 1);
        let Some(identity) = links.iter().find_map(|link| link.stream()?.identity()) else {
            return unknown();
        };
        let admitted = self.gate.admit(source.ip(), !is_remote(&links, source)).map_err(String::from);
        let newcomer = admitted.and_then(|slot| Newcomer::new(socket, source, identity, slot));
        let newcomer = newcomer.and_then(|newcomer| {
            let watched = self.state.poller.waker(self.next_token).watch_both(&newcomer.socket);
            watched.map(|()| newcomer).map_err(|error| error.to_string())
        });
        match newcomer {
            Ok(newcomer) => self.add(Attempt::Incoming(Box::new(newcomer))),
            Err(why) => self.refuse(source, &why),
        }
    }

    fn refuse(&mut self, source: SocketAddr, why: &str) {
        self.state.stats.discard(DiscardReason::UnknownSource, 1);
        if let Some(suppressed) = self.refusals.allow() {
            tracing::warn!(%source, suppressed, "a stream connection was refused: {why}");
        }
    }

    /// Ends the attempts that have passed their deadline.
    fn end_late_attempts(&mut self) {
        let now = Instant::now();
        let late: Vec<u64> = self
            .attempts
            .iter()
            .filter(|(_, attempt)| attempt.deadline() <= now)
            .map(|(token, _)| *token)
            .collect();
        for token in late {
            match self.attempts.remove(&token) {
                Some(Attempt::Outgoing(link, dial)) => {
                    if let Some(stream) = link.stream() {
                        self.dial_failed(&link, &dial.timed_out(&stream.options));
                    }
                }
                Some(Attempt::Incoming(newcomer)) => self.refuse(newcomer.source, &Newcomer::timed_out()),
                None => {}
            }
        }
    }

    /// Once a second: sends keepalives, closes silent connections, and checks certificates.
    fn look_after(&mut self, links: &[Arc<Link>]) {
        let now = Instant::now();
        if now < self.next_look {
            return;
        }
        self.next_look = now + LOOK;
        self.looks = self.looks.wrapping_add(1);
        for (index, link) in links.iter().enumerate() {
            if let Some(stream) = link.stream() {
                let verify = (index + self.looks).is_multiple_of(VERIFY_LOOKS);
                stream.look_after(verify, || link.take_numbers(1));
            }
        }
    }
}
