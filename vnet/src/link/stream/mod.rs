//! Stream links: native frames over a TCP connection, with TLS or in clear text, made directly or through a SOCKS 5 proxy.
//!
//! ```text
//!  dial.rs: makes a connection, with back-off ----.       .---- listen.rs: takes connections, by the peer's address
//!                                                  v       v
//!                              two places for connections: made, accepted
//!                                                  |
//!   dispatcher: reads into the place's inbox,      |     dispatchers: put frames in the outbox of one
//!   runs the frames where they lie                 |     of the two, and hand it to the socket
//! ```
//!
//! A stream is served as an interface's queues are: its sockets do not block, the dispatcher that owns the link watches them
//! (edge-triggered, both ways) and runs what arrived to completion. No thread of its own touches a frame. Threads make
//! connections, which may take seconds, and look once a second whether they live.
//!
//! **Two hosts that both dial** have two connections then. Each sends on the one that it made, and on the other one only while
//! it has none, and reads from both: there is no contest, frames keep their order, and a side behind a firewall may only dial,
//! or only accept (`connect = false`).
//!
//! **Back-pressure.** The socket's buffer and the outbox, [`OUTBOX_MAX`] bytes, are all the queue there is. When it is full the
//! newest frame is dropped and counted (`no_buffer`), as on a congested path: nobody waits.
//!
//! **Half-open connections.** A side that has sent nothing for [`KEEPALIVE`] sends a keepalive; a connection on which nothing
//! was heard for [`SILENCE`] is closed. So a dead one is noticed within 10 s, whether or not anything is to be sent.

mod connection;
mod dial;
mod listen;
mod tls;

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use connection::{Connection, Inbox};
pub use listen::{ListenError, Listener, Roster};

use super::{Encapsulation, Link, LinkState, Tunnel};
use crate::frame::{Batch, FRAME_MAX, NetworkId, Segment};
use crate::link::sealed::identity::{Claims, IdentityStore};
use crate::poll::Waker;
use crate::stats::{DiscardReason, DropReason};
use crate::wire::ethernet;
use crate::wire::native::{HEADER_LEN, HOPS_MAX, Header, Kind};
use crate::wire::offload::{Offload, WIRE_LEN};
use crate::wire::socks::{Credentials, Destination};
use crate::wire::stream::{self, MESSAGE_MAX, Message, Prefix};

/// Bytes that wait for the socket to take them, at most: some of the largest frames.
pub const OUTBOX_MAX: usize = 512 << 10;
/// A side that sent nothing for so long sends a keepalive.
pub const KEEPALIVE: Duration = Duration::from_secs(2);
/// A connection on which nothing was heard for so long is dead.
pub const SILENCE: Duration = Duration::from_secs(8);
/// How often the certificates of present connections are held against clock and revocations.
const VERIFY: Duration = Duration::from_secs(10);
/// How often connections are looked at.
const LOOK: Duration = Duration::from_secs(1);

const _: () = assert!(MESSAGE_MAX == HEADER_LEN + WIRE_LEN + FRAME_MAX);

/// The places for connections, which are the stream's queues, too.
pub const MADE: usize = 0;
/// See [`MADE`].
pub const ACCEPTED: usize = 1;
/// How many there are.
pub const PLACES: usize = 2;

/// A SOCKS 5 proxy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Proxy {
    /// Where it listens.
    pub address: SocketAddr,
    /// How to log in, if it wants that.
    pub credentials: Option<Credentials>,
}

/// How a stream link is made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamOptions {
    /// The other host. A name needs a proxy, which resolves it.
    pub destination: Destination,
    /// What carries the connection there.
    pub proxy: Option<Proxy>,
    /// Whether this side makes connections; false: it waits for the other one's.
    pub connect: bool,
}

/// The connections of a link.
#[derive(Debug)]
pub(super) struct Stream {
    pub(super) options: StreamOptions,
    /// The name in the other host's certificate; `None` for a stream in clear text.
    peer: Option<String>,
    /// Who this host is, once it was told.
    identity: OnceLock<Arc<IdentityStore>>,
    places: [Place; PLACES],
    status: Mutex<Status>,
    changed: Condvar,
    stopping: AtomicBool,
}

#[derive(Debug, Default)]
struct Place {
    connection: Mutex<Option<Connection>>,
    /// Only the dispatcher that serves the place touches it; frames are run out of it.
    inbox: Mutex<Inbox>,
    waker: Mutex<Option<Waker>>,
    /// The last look found the socket empty: the next bytes will wake the dispatcher.
    drained: AtomicBool,
}

/// What people want to know.
#[derive(Debug, Default)]
struct Status {
    /// Why there is no connection.
    reason: String,
    heard: Option<Instant>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Stream {
    pub(super) fn new(options: StreamOptions, peer: Option<String>) -> Stream {
        let reason = if options.connect { "not connected yet" } else { "nobody has connected yet" };
        Stream {
            options,
            peer,
            identity: OnceLock::new(),
            places: Default::default(),
            status: Mutex::new(Status { reason: reason.into(), heard: None }),
            changed: Condvar::new(),
            stopping: AtomicBool::new(false),
        }
    }

    fn is_stopping(&self) -> bool {
        self.stopping.load(Relaxed)
    }

    fn is_connected(&self, place: usize) -> bool {
        lock(&self.places[place].connection).is_some()
    }

    pub(super) fn state(&self) -> LinkState {
        if (0..PLACES).any(|place| self.is_connected(place)) {
            LinkState::Up
        } else {
            LinkState::Unreachable(lock(&self.status).reason.clone())
        }
    }

    /// Waits for `time`, or until something changed.
    fn wait(&self, time: Duration) {
        let status = lock(&self.status);
        if !self.is_stopping() {
            drop(self.changed.wait_timeout(status, time).unwrap_or_else(PoisonError::into_inner));
        }
    }

    fn failed(&self, reason: String) {
        lock(&self.status).reason = reason;
        self.changed.notify_all();
    }

    /// Puts a connection into its place, where it replaces the one before.
    fn install(&self, place: usize, connection: Connection) {
        let there = &self.places[place];
        let mut current = lock(&there.connection);
        there.drained.store(false, Relaxed);
        if let Some(waker) = &*lock(&there.waker)
            && let Err(error) = waker.watch_both(&connection)
        {
            return self.failed(format!("cannot watch the connection: {error}"));
        }
        *current = Some(connection);
        drop(current);
        lock(&self.status).heard = Some(Instant::now());
        self.changed.notify_all();
    }

    /// Holds the other end's certificate against the present clock and lists.
    fn verify(&self, connection: &Connection) -> Result<(), String> {
        let (Some(chain), Some(peer), Some(identity)) = (connection.chain(), &self.peer, self.identity.get())
        else {
            return Ok(());
        };
        identity.current().verify(chain, peer).map(drop)
    }

    /// Ends what is in `current`.
    fn close(&self, current: &mut Option<Connection>, why: String) {
        *current = None;
        self.failed(why);
    }
}

/// The link's side of its stream; nothing happens on a link that has none.
impl Link {
    /// True when it is a stream link, which is served as an interface's queues are.
    pub fn is_stream(&self) -> bool {
        self.options.encapsulation == Encapsulation::Stream
    }

    /// Starts the threads of a stream link, which is `identity` where it is sealed. They end with [`Link::stop`].
    pub fn start(self: &Arc<Self>, identity: Option<Arc<IdentityStore>>) -> std::io::Result<()> {
        let Some(stream) = &self.stream else { return Ok(()) };
        if let Some(identity) = identity {
            // It is started once.
            let _ = stream.identity.set(identity);
        }
        let spawn = |what: &str, run: fn(&Link, &Stream)| {
            let link = self.clone();
            // Linux cuts names of threads at 15 bytes.
            std::thread::Builder::new().name(format!("{what}-{}", self.name())).stack_size(256 << 10).spawn(
                move || {
                    if let Some(stream) = &link.stream {
                        run(&link, stream);
                    }
                },
            )
        };
        spawn("watch", watch)?;
        if stream.options.connect {
            spawn("dial", dial::run)?;
        }
        Ok(())
    }

    /// Ends a stream link's connections and threads.
    pub fn stop(&self) {
        if let Some(stream) = &self.stream {
            stream.stopping.store(true, Relaxed);
            for place in &stream.places {
                *lock(&place.connection) = None;
            }
            stream.failed("removed".into());
        }
    }

    /// The name that the other host's certificate has to have, where the link is a sealed stream.
    pub fn stream_peer(&self) -> Option<&str> {
        self.stream.as_ref()?.peer.as_deref()
    }

    /// Seconds since anything came by a stream link; `None` when nothing ever did, or it is none.
    pub fn stream_heard_s(&self) -> Option<u64> {
        lock(&self.stream.as_ref()?.status).heard.map(|heard| heard.elapsed().as_secs())
    }

    /// Has the dispatcher that serves a stream link's `place` told of it by `waker`.
    pub fn stream_attach(&self, place: usize, waker: Waker) {
        let Some(stream) = &self.stream else { return };
        let there = &stream.places[place];
        let mut current = lock(&there.connection);
        there.drained.store(false, Relaxed);
        if let Some(connection) = &*current
            && let Err(error) = waker.watch_both(connection)
        {
            stream.close(&mut current, format!("cannot watch the connection: {error}"));
        }
        *lock(&there.waker) = Some(waker);
    }

    /// Takes the waker of `place` back.
    pub fn stream_detach(&self, place: usize) {
        let Some(stream) = &self.stream else { return };
        let there = &stream.places[place];
        let current = lock(&there.connection);
        if let (Some(waker), Some(connection)) = (lock(&there.waker).take(), &*current) {
            waker.forget(connection);
        }
    }

    /// True when the next bytes at `place` will wake the dispatcher; false when some may be waiting.
    pub fn stream_is_drained(&self, place: usize) -> bool {
        self.stream.as_ref().is_none_or(|stream| stream.places[place].drained.load(Relaxed))
    }

    /// Sends what waits at `place`, then takes what has arrived and has `run` take its frames to completion. `batch` is empty on
    /// entry and on return. Returns the number of messages.
    pub fn stream_receive(&self, place: usize, batch: &mut Batch, run: &mut dyn FnMut(&Batch)) -> usize {
        let Some(stream) = &self.stream else { return 0 };
        let there = &stream.places[place];
        let mut inbox = lock(&there.inbox);
        if !self.fill(stream, there, &mut inbox) {
            return 0;
        }
        let result = self.run_messages(&mut inbox, batch, run);
        match result {
            Ok(messages) => messages,
            Err(error) => {
                // There is no way on behind a length that makes no sense.
                self.stats.discard(DiscardReason::BadHeader, 1);
                stream.close(&mut lock(&there.connection), format!("the other end sent {error}"));
                0
            }
        }
    }

    /// Reads into the inbox. The connection is locked meanwhile, but not while frames are run: they may leave by it.
    fn fill(&self, stream: &Stream, there: &Place, inbox: &mut Inbox) -> bool {
        let mut current = lock(&there.connection);
        let Some(connection) = &mut *current else {
            there.drained.store(true, Relaxed);
            return false;
        };
        match connection.flush().and_then(|()| connection.read(inbox)) {
            Ok(read) => {
                there.drained.store(read.emptied, Relaxed);
                read.bytes > 0
            }
            Err(error) => {
                stream.close(&mut current, format!("the connection ended: {error}"));
                false
            }
        }
    }

    fn run_messages(
        &self,
        inbox: &mut Inbox,
        batch: &mut Batch,
        run: &mut dyn FnMut(&Batch),
    ) -> Result<usize, stream::LengthError> {
        let (mut at, mut messages) = (0, 0);
        let mut bytes = 0;
        let mut flush = |batch: &mut Batch, bytes: &mut u64| {
            self.stats.in_frames.add(batch.len() as u64);
            self.stats.in_bytes.add(std::mem::take(bytes));
            if !batch.is_empty() {
                run(batch);
                batch.clear();
            }
        };
        let result = loop {
            let (message, len) = match stream::next(&inbox.bytes()[at..]) {
                Ok(Some(found)) => found,
                Ok(None) => break Ok(messages),
                Err(error) => break Err(error),
            };
            at += len;
            messages += 1;
            match message {
                Message::Frame(header, offload, frame) => {
                    if batch.is_full() {
                        flush(batch, &mut bytes);
                    }
                    bytes += self.enter(inbox.claims.as_deref(), batch, &header, offload, frame);
                }
                Message::Keepalive => {}
                Message::Bad => self.stats.discard(DiscardReason::BadHeader, 1),
            }
        };
        flush(batch, &mut bytes);
        self.stats.in_datagrams.add(messages as u64);
        inbox.consume(at);
        result
    }

    /// Adds one frame to the batch; returns its bytes, or 0 when it is refused.
    fn enter(
        &self,
        claims: Option<&Claims>,
        batch: &mut Batch,
        header: &Header,
        offload: Offload,
        frame: &[u8],
    ) -> u64 {
        let len = frame.len() as u64;
        let allowed = |network: &NetworkId| {
            self.carries(*network) && claims.is_none_or(|claims| claims.allows_network(*network))
        };
        let Some(network) = NetworkId::new(header.network).filter(allowed) else {
            self.stats.refuse(DropReason::WrongNetwork, len);
            return 0;
        };
        if let Some((_, src)) = ethernet::addresses(frame)
            && !(self.allows_source(src) && claims.is_none_or(|claims| claims.allows_source(src)))
        {
            self.stats.refuse(DropReason::BadSource, len);
            return 0;
        }
        let mut builder = batch.begin();
        // SAFETY: the frame lies in the inbox, which the caller keeps locked and unchanged until it has cleared the batch.
        unsafe { builder.push_stable(Segment::new(frame.as_ptr(), frame.len())) };
        match builder.finish(self.port, network, offload, header.hops + 1) {
            Ok(()) => len,
            Err(error) => {
                self.stats.refuse(error.into(), len);
                0
            }
        }
    }

    /// Sends the frames `which` on the connection there is, counting each as out or dropped.
    pub fn stream_send(&self, batch: &Batch, which: &[u16]) {
        let Some(stream) = &self.stream else { return };
        for place in &stream.places {
            let mut current = lock(&place.connection);
            if let Some(connection) = &mut *current {
                if let Err(error) = self.put_frames(connection, batch, which) {
                    stream.close(&mut current, format!("the connection ended: {error}"));
                }
                return;
            }
        }
        self.stats.drop_frames(DropReason::NotReady, which.len() as u64);
    }

    fn put_frames(&self, connection: &mut Connection, batch: &Batch, which: &[u16]) -> std::io::Result<()> {
        let (mut frames, mut bytes) = (0, 0);
        let mut result = Ok(());
        for &index in which {
            let frame = batch.frame(usize::from(index));
            if frame.hops > HOPS_MAX {
                self.stats.drop_frames(DropReason::HopLimit, 1);
                continue;
            }
            let header = crate::link::native::send::header(frame, None, self.take_numbers(1));
            let prefix = Prefix::new(&header, &frame.offload, frame.len());
            result = result.and_then(|()| connection.make_room(prefix.bytes().len() + frame.len()));
            if result.is_err() {
                self.stats.drop_frames(DropReason::SendFailed, 1);
            } else if connection.put(prefix.bytes(), frame.len(), |to| _ = batch.copy_to(frame, to)) {
                frames += 1;
                bytes += frame.len() as u64;
            } else {
                self.stats.drop_frames(DropReason::NoBuffer, 1);
            }
        }
        self.stats.delivered(frames, bytes);
        self.stats.out_datagrams.add(frames);
        result.and_then(|()| connection.flush())
    }
}

/// Looks after the connections until the link stops.
fn watch(link: &Link, stream: &Stream) {
    let mut verified = Instant::now();
    while !stream.is_stopping() {
        stream.wait(LOOK);
        let due = verified.elapsed() >= VERIFY;
        if due {
            verified = Instant::now();
        }
        for place in &stream.places {
            let mut current = lock(&place.connection);
            let Some(connection) = &mut *current else { continue };
            if due && let Err(why) = stream.verify(connection) {
                stream.close(&mut current, why);
                continue;
            }
            let (heard, sent) = (connection.heard(), connection.sent());
            if heard.elapsed() >= SILENCE {
                stream.close(&mut current, format!("nothing was heard for {} s", SILENCE.as_secs()));
                continue;
            }
            {
                let mut status = lock(&stream.status);
                status.heard = status.heard.max(Some(heard));
            }
            if sent.elapsed() >= KEEPALIVE {
                let prefix = Prefix::new(&keepalive(link), &Offload::default(), 0);
                connection.put(prefix.bytes(), 0, |_| ());
                if let Err(error) = connection.flush() {
                    stream.close(&mut current, format!("the connection ended: {error}"));
                }
            }
        }
    }
}

fn keepalive(link: &Link) -> Header {
    Header {
        kind: Kind::Keepalive,
        last: true,
        offload: false,
        sealed: false,
        hops: 0,
        epoch: 0,
        index: 0,
        network: 0,
        queue: 0,
        number: link.take_numbers(1),
    }
}

/// The stream of a link with these options, if it is to have one, which then takes what `peer` says.
pub(super) fn of(tunnel: &Tunnel, peer: &mut Option<String>) -> Option<Stream> {
    match tunnel {
        Tunnel::Stream(options) => Some(Stream::new(options.clone(), peer.take())),
        _ => None,
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
