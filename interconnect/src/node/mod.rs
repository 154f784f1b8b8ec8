//! The process engine: runs the protocol inside the application over a UDP socket.
//!
//! Each call that polls or waits makes progress: it receives packets, lets the engine send, and takes completions. If the
//! application has not called for some milliseconds, a library thread makes progress instead, so that peers get answers while
//! the application computes. The thread then sleeps on the socket. While the application polls, the thread stays away from the
//! socket, so that a message wakes no other process or thread.
//!
//! `wait` polls for `SPIN_NS`, then sleeps on the socket.
//!
//! Each sleeping thread wakes for the engine's next timer. A call that starts an earlier timer wakes a thread that would sleep
//! beyond it (`rouse`), and a call that receives packets for other endpoints wakes the threads that wait there (`signal`).

mod notice;
mod region;
mod socket;

use std::io;
use std::net::{Ipv4Addr, SocketAddr, ToSocketAddrs};
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;

use crate::proto::{
    Access, Completion, Config, Counters, Engine, Key, Match, Outgoing, Peer, PostError, Receive, Seen,
    Shape, Span,
};
use notice::{Event, Notice};
pub use region::Region;
use socket::{Socket, datagram_to, segments, wait_readable};

/// Maximum number of datagrams received before the engine sends.
const RECEIVES_MAX: usize = 16;
/// How long `wait` polls before it sleeps.
const SPIN_NS: u64 = 50_000;
/// Interval at which the library thread checks whether the application polls.
const LOOK: Duration = Duration::from_millis(5);
/// Upper bound on the sleep while several threads wait, because one thread may receive the packet that another thread
/// waits for.
const SHARED_SLEEP_NS: u64 = 20_000_000;
/// How long closing a node waits for acknowledgements.
const LINGER: Duration = Duration::from_secs(2);

/// Error of a call.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A system call on the socket failed.
    #[error("cannot use UDP address {0}: {1}")]
    Socket(SocketAddr, io::Error),
    /// The name of an endpoint is malformed, or its host is unknown.
    #[error("'{0}' is no endpoint: write HOST:PORT/ENDPOINT, such as 10.77.2.1:7000/0 ({1})")]
    Name(String, String),
    /// The engine rejected the call.
    #[error(transparent)]
    Refused(#[from] PostError),
    /// The range exceeds its region.
    #[error("bytes {0} to {1} are not all inside the region of {2}")]
    Range(usize, usize, usize),
}

/// Options for opening a node.
#[derive(Clone, Debug)]
pub struct Options {
    /// Address of the UDP socket; port 0 selects any free port.
    pub bind: SocketAddr,
    /// Configuration of the protocol engine. A `receive_budget` of 0 stands for the capacity of the socket's receive buffer.
    pub config: Config,
    /// Whether a library thread answers peers while the application does not poll.
    pub has_thread: bool,
}

impl Default for Options {
    fn default() -> Self {
        let config = Config { datagram_max: 65_507, receive_budget: 0, ..Config::default() };
        Self { bind: (Ipv4Addr::UNSPECIFIED, 0).into(), config, has_thread: true }
    }
}

struct Inner {
    engine: Engine,
    socket: Socket,
    /// Memory of the regions, which the node frees when it is dropped.
    kept: Vec<Arc<[AtomicU8]>>,
    /// By endpoint number. Created when a thread first sleeps on the endpoint, or requests its descriptor.
    notices: Vec<(u16, Notice)>,
}

impl Inner {
    fn notice(&mut self, endpoint: u16) -> Option<&mut Notice> {
        self.notices.iter_mut().find(|(number, _)| *number == endpoint).map(|(_, notice)| notice)
    }

    fn new_notice(&mut self, endpoint: u16) -> io::Result<&mut Notice> {
        let place = match self.notices.iter().position(|(number, _)| *number == endpoint) {
            Some(place) => place,
            None => {
                self.notices.push((endpoint, Notice::new()?));
                self.notices.len() - 1
            }
        };
        Ok(&mut self.notices[place].1)
    }

    fn lower(&mut self, endpoint: u16) {
        if let Some(notice) = self.notice(endpoint) {
            notice.lower();
        }
    }

    /// Wakes threads that wait for completions which are queued now. `own`: the endpoint whose completions the caller takes.
    fn signal(&mut self, own: Option<u16>) {
        for (number, notice) in &mut self.notices {
            if notice.is_awaited(own == Some(*number)) && self.engine.waiting(*number) > 0 {
                notice.raise();
            }
        }
    }
}

struct Shared {
    inner: Mutex<Inner>,
    start: Instant,
    /// Number of calls in which the application made progress.
    polled: AtomicU64,
    sleeping: AtomicU32,
    is_closing: AtomicBool,
    descriptor: RawFd,
    /// Wakes the library thread.
    wake: Event,
    /// Time at which the library thread wakes by itself, or 0 if that is within `LOOK`. It grows only under the lock of `inner`.
    attends_at: AtomicU64,
    address: SocketAddr,
}

impl Shared {
    fn now(&self) -> u64 {
        self.start.elapsed().as_nanos() as u64 + 1
    }

    /// Receives packets, checks the timers and sends. Returns whether any packet arrived.
    fn progress(&self, inner: &mut Inner) -> bool {
        let mut arrived = false;
        let now = self.now();
        for _ in 0..RECEIVES_MAX {
            let Some(received) = inner.socket.receive() else { break };
            arrived = true;
            for packet in segments(&received) {
                inner.engine.receive(now, received.from, packet, received.congestion);
            }
        }
        inner.engine.tick(now);
        self.send(inner);
        arrived
    }

    fn send(&self, inner: &mut Inner) {
        let now = self.now();
        let mut sent = false;
        while let Some(packet) = inner.engine.depart(now) {
            inner.socket.send(packet);
            sent = true;
        }
        inner.socket.flush();
        if sent {
            self.rouse(inner);
        }
    }

    /// Makes sure that a thread wakes for the engine's next timer, because the caller may not call again for a long time. Threads
    /// that wake soon anyway are left alone.
    fn rouse(&self, inner: &mut Inner) {
        let now = self.now();
        let soon = now + 2 * LOOK.as_nanos() as u64;
        let attends_at = self.attends_at.load(Ordering::Relaxed);
        let is_late = |notice: &Notice, at: u64| notice.sleepers > 0 && notice.until > at;
        if attends_at <= soon && !inner.notices.iter().any(|(_, notice)| is_late(notice, soon)) {
            return;
        }
        let Some(at) = inner.engine.wake_at(now).map(|at| at.max(soon)) else { return };
        if attends_at > at {
            self.attends_at.store(0, Ordering::Relaxed);
            self.wake.raise();
        }
        inner.notices.iter_mut().filter(|(_, notice)| is_late(notice, at)).for_each(|(_, n)| n.raise());
    }

    /// Whether a timer has been due for longer than `LOOK`, although threads sleep that wake for timers.
    fn is_overdue(&self) -> bool {
        let now = self.now();
        let inner = self.inner.try_lock();
        let at = inner.and_then(|inner| inner.engine.wake_at(now));
        at.is_some_and(|at| at + (LOOK.as_nanos() as u64) < now)
    }

    /// Body of the library thread: makes progress while the application does not.
    fn attend(&self) {
        let mut seen = 0;
        loop {
            // Before the check, so that the event that closing raises stays raised or is no longer needed.
            self.wake.lower();
            if self.is_closing.load(Ordering::Acquire) {
                return;
            }
            let polled = self.polled.load(Ordering::Relaxed);
            let is_attended = std::mem::replace(&mut seen, polled) != polled
                || self.sleeping.load(Ordering::Relaxed) > 0 && !self.is_overdue();
            // The thread that holds the lock makes progress.
            let inner = if is_attended { None } else { self.inner.try_lock() };
            let Some(mut inner) = inner else {
                wait_readable(&[self.wake.descriptor()], Some(LOOK.as_nanos() as u64));
                continue;
            };
            self.progress(&mut inner);
            inner.engine.hurry();
            self.send(&mut inner);
            inner.signal(None);
            let now = self.now();
            let wake_at = inner.engine.wake_at(now);
            self.attends_at.store(wake_at.unwrap_or(u64::MAX), Ordering::Relaxed);
            drop(inner);
            let sleep = wake_at.map(|at| at.saturating_sub(now));
            wait_readable(&[self.descriptor, self.wake.descriptor()], sleep);
            self.attends_at.store(0, Ordering::Relaxed);
        }
    }
}

/// A process on the network: a UDP socket, the protocol's engine, and endpoints.
pub struct Node {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Node {
    /// Opens a node: binds its socket and starts its library thread if requested.
    pub fn open(options: &Options) -> Result<Self, Error> {
        let refused = |error| Error::Socket(options.bind, error);
        let socket = Socket::bind(options.bind).map_err(refused)?;
        let address = socket.address().map_err(refused)?;
        let mut config = options.config.clone();
        if config.receive_budget == 0 {
            config.receive_budget = socket.receive_room().clamp(64 << 10, 4 << 20);
        }
        let epoch = SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |since| since.as_nanos() as u64);
        let engine = Engine::new(config, epoch, random()?);
        let inner = Inner { engine, socket, kept: vec![], notices: vec![] };
        let shared = Arc::new(Shared {
            descriptor: inner.socket.descriptor(),
            inner: Mutex::new(inner),
            start: Instant::now(),
            polled: AtomicU64::new(0),
            sleeping: AtomicU32::new(0),
            is_closing: AtomicBool::new(false),
            wake: Event::new().map_err(refused)?,
            attends_at: AtomicU64::new(0),
            address,
        });
        let thread = options.has_thread.then(|| {
            let shared = Arc::clone(&shared);
            std::thread::Builder::new().name("vnet-rdma".into()).spawn(move || shared.attend())
        });
        let thread = thread.transpose().map_err(refused)?;
        Ok(Self { shared, thread })
    }

    /// Address of the socket.
    pub fn address(&self) -> SocketAddr {
        self.shared.address
    }

    /// Returns the engine's counters.
    pub fn counters(&self) -> Counters {
        self.shared.inner.lock().engine.counters()
    }

    /// Opens the endpoint with this number, or with the first free number.
    pub fn endpoint(&self, number: Option<u16>) -> Result<Endpoint, Error> {
        let number = self.shared.inner.lock().engine.open(number)?;
        Ok(Endpoint { shared: Arc::clone(&self.shared), number })
    }
}

impl Drop for Node {
    /// Closes the node: waits up to two seconds until peers have acknowledged everything, then notifies them that this node
    /// shuts down.
    fn drop(&mut self) {
        let end = Instant::now() + LINGER;
        loop {
            let mut inner = self.shared.inner.lock();
            self.shared.polled.fetch_add(1, Ordering::Relaxed);
            self.shared.progress(&mut inner);
            inner.engine.hurry();
            self.shared.send(&mut inner);
            if inner.engine.is_idle() || Instant::now() >= end {
                inner.engine.say_goodbye();
                self.shared.send(&mut inner);
                break;
            }
            drop(inner);
            wait_readable(&[self.shared.descriptor], Some(1_000_000));
        }
        self.shared.is_closing.store(true, Ordering::Release);
        self.shared.wake.raise();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// An endpoint: the application posts operations on it and takes completions from it. Dropping it closes it.
pub struct Endpoint {
    shared: Arc<Shared>,
    number: u16,
}

impl Endpoint {
    /// Number of the endpoint within the node.
    pub fn number(&self) -> u16 {
        self.number
    }

    /// Registers memory that peers address by the returned key. Its first byte has the offset 0.
    pub fn register(&self, span: Span, access: Access) -> Result<Key, Error> {
        self.register_at(span, 0, access, None)
    }

    /// Registers memory whose first byte has the offset `base`, under `key` if one is given.
    pub fn register_at(&self, span: Span, base: u64, access: Access, key: Option<Key>) -> Result<Key, Error> {
        Ok(self.shared.inner.lock().engine.register(self.number, span, base, access, key)?)
    }

    /// Deregisters memory. When this call returns, no peer reads or writes the memory any more.
    pub fn deregister(&self, key: Key) -> Result<(), Error> {
        let mut inner = self.shared.inner.lock();
        let known = inner.engine.deregister(key);
        self.shared.send(&mut inner);
        drop(inner);
        if known { Ok(()) } else { Err(PostError::UnknownKey.into()) }
    }

    /// Posts an operation, and sends as many packets as the window allows.
    pub fn post(&self, peer: Peer, out: &Outgoing) -> Result<(), Error> {
        let mut inner = self.shared.inner.lock();
        if !inner.engine.has_datagram(peer.address) {
            // Without a route the default size is as good as any: the peer is later reported as unreachable.
            let datagram = datagram_to(peer.address).unwrap_or(inner.engine.config().datagram_max);
            inner.engine.set_datagram(peer.address, datagram);
        }
        inner.engine.post(self.shared.now(), self.number, peer, out)?;
        self.shared.send(&mut inner);
        // The operation may start a timer although nothing could be sent, and a buffered one has completed.
        self.shared.rouse(&mut inner);
        inner.signal(Some(self.number));
        Ok(())
    }

    /// Posts a buffer for a message.
    pub fn post_receive(&self, receive: &Receive) -> Result<(), Error> {
        let mut inner = self.shared.inner.lock();
        inner.engine.post_receive(self.number, receive)?;
        self.shared.send(&mut inner);
        inner.signal(Some(self.number));
        Ok(())
    }

    /// Sends a message.
    pub fn send(&self, peer: Peer, span: Span, tag: Option<u64>, context: u64) -> Result<(), Error> {
        self.post(peer, &plain(Shape::Message { tag }, span, None, context))
    }

    /// Receives a message without a tag.
    pub fn receive(&self, span: Span, context: u64) -> Result<(), Error> {
        self.post_receive(&Receive { matching: Match::default(), span, context, several: None })
    }

    /// Writes into registered memory of a peer. With `data`, the peer gets a completion when all bytes have arrived.
    pub fn write(
        &self,
        peer: Peer,
        span: Span,
        (key, at): (Key, u64),
        data: Option<u64>,
        context: u64,
    ) -> Result<(), Error> {
        self.post(peer, &plain(Shape::Write { key, at }, span, data, context))
    }

    /// Reads from registered memory of a peer.
    pub fn read(&self, peer: Peer, span: Span, (key, at): (Key, u64), context: u64) -> Result<(), Error> {
        self.post(peer, &plain(Shape::Read { key, at }, span, None, context))
    }

    /// Keeps a region's memory alive as long as the node.
    fn keep(&self, bytes: Arc<[AtomicU8]>) {
        self.shared.inner.lock().kept.push(bytes);
    }

    /// Withdraws a posted buffer. Returns false if no posted buffer has this context, or if a message is being received into
    /// it.
    pub fn cancel(&self, context: u64) -> bool {
        self.shared.inner.lock().engine.cancel(self.number, context)
    }

    /// Finds an unexpected message without receiving it; `claim` reserves it for `receive_claimed`.
    pub fn peek(&self, matching: &Match, claim: Option<u64>) -> Option<Seen> {
        let mut inner = self.shared.inner.lock();
        self.shared.polled.fetch_add(1, Ordering::Relaxed);
        self.shared.progress(&mut inner);
        inner.signal(Some(self.number));
        inner.engine.peek(self.number, matching, claim)
    }

    /// Receives the message reserved with `claim`, or discards it if there is no span. Returns false if no such message exists.
    pub fn receive_claimed(&self, claim: u64, span: Option<Span>, context: u64) -> bool {
        let mut inner = self.shared.inner.lock();
        let taken = inner.engine.receive_claimed(self.number, claim, span, context);
        self.shared.send(&mut inner);
        inner.signal(Some(self.number));
        taken
    }

    /// Makes progress, then takes one completion if there is any.
    pub fn poll(&self) -> Option<Completion> {
        self.poll_by(Engine::poll)
    }

    /// Like `poll`, but leaves the arrivals of peers' writes in the queue, so that peers which write with immediate data have to
    /// wait until the application takes them.
    pub fn poll_own(&self) -> Option<Completion> {
        self.poll_by(Engine::poll_own)
    }

    fn poll_by(&self, take: impl Fn(&mut Engine, u16) -> Option<Completion>) -> Option<Completion> {
        let mut inner = self.shared.inner.lock();
        self.shared.polled.fetch_add(1, Ordering::Relaxed);
        inner.lower(self.number);
        let mut completion = take(&mut inner.engine, self.number);
        if completion.is_none() {
            self.shared.progress(&mut inner);
            completion = take(&mut inner.engine, self.number);
        }
        self.finish_taking(&mut inner);
        completion
    }

    /// Takes one queued completion without making progress.
    pub fn take(&self) -> Option<Completion> {
        let mut inner = self.shared.inner.lock();
        let completion = inner.engine.poll(self.number);
        self.finish_taking(&mut inner);
        completion
    }

    /// Sends the credits that taking completions returns, and wakes the threads that wait for other completions.
    fn finish_taking(&self, inner: &mut Inner) {
        if inner.engine.has_departures() {
            self.shared.send(inner);
        }
        inner.signal(Some(self.number));
    }

    /// Waits for a completion: polls for 50 us, then sleeps. Returns `None` if the time expires.
    pub fn wait(&self, timeout: Option<Duration>) -> Option<Completion> {
        let shared = &self.shared;
        let start = shared.now();
        let end = timeout.map(|timeout| start.saturating_add(timeout.as_nanos() as u64));
        let mut spin_end = start + SPIN_NS;
        loop {
            if let Some(completion) = self.poll() {
                return Some(completion);
            }
            let now = shared.now();
            if end.is_some_and(|end| now >= end) {
                return None;
            }
            if now < spin_end {
                std::hint::spin_loop();
                continue;
            }
            self.sleep(end);
            spin_end = shared.now() + SPIN_NS / 10;
        }
    }

    /// Returns a descriptor for `poll` or `epoll` that is readable when there may be completions to take. The application
    /// should take completions until there are none, call `pause` with a time of zero so that peers get their answers, and then
    /// wait. The descriptor stays open as long as the node.
    pub fn descriptor(&self) -> Result<RawFd, Error> {
        let mut inner = self.shared.inner.lock();
        let descriptor =
            inner.new_notice(self.number).and_then(|notice| notice.watch(self.shared.descriptor));
        descriptor.map_err(|error| Error::Socket(self.shared.address, error))
    }

    /// Wakes a thread that sleeps on the endpoint's descriptor, or in `pause` or `wait`.
    pub fn wake(&self) {
        if let Some(notice) = self.shared.inner.lock().notice(self.number) {
            notice.raise();
        }
    }

    /// Sleeps until there may be completions to take, or until the time expires.
    pub fn pause(&self, timeout: Duration) {
        self.sleep(Some(self.shared.now() + timeout.as_nanos() as u64));
    }

    /// Sleeps until a packet arrives, a timer is due, or `end` is reached.
    fn sleep(&self, end: Option<u64>) {
        let shared = &self.shared;
        let mut inner = shared.inner.lock();
        inner.engine.hurry();
        shared.send(&mut inner);
        let now = shared.now();
        if inner.engine.waiting(self.number) > 0 || end.is_some_and(|end| end <= now) {
            return;
        }
        let others = shared.sleeping.fetch_add(1, Ordering::Relaxed);
        let wake_at = inner.engine.wake_at(now);
        let notice = inner.new_notice(self.number);
        // Without an event no other thread can wake this one.
        let shared_sleep = (others > 0 || notice.is_err()).then_some(now + SHARED_SLEEP_NS);
        let wake = [wake_at, end, shared_sleep].into_iter().flatten().min();
        let event = notice.map_or(-1, |notice| {
            let until = wake.unwrap_or(u64::MAX);
            notice.until = if notice.sleepers == 0 { until } else { notice.until.max(until) };
            notice.sleepers += 1;
            notice.event()
        });
        drop(inner);
        wait_readable(&[shared.descriptor, event], wake.map(|wake| wake.saturating_sub(now)));
        shared.sleeping.fetch_sub(1, Ordering::Relaxed);
        if event >= 0
            && let Some(notice) = shared.inner.lock().notice(self.number)
        {
            notice.sleepers -= 1;
        }
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        let mut inner = self.shared.inner.lock();
        inner.engine.close(self.number);
        self.shared.send(&mut inner);
    }
}

fn plain(shape: Shape, span: Span, data: Option<u64>, context: u64) -> Outgoing {
    Outgoing { shape, span, data, context, is_buffered: false, is_quiet: false }
}

/// Parses the name of an endpoint, `HOST:PORT/ENDPOINT`, where HOST is an address or a name that the system resolves.
pub fn resolve(name: &str) -> Result<Peer, Error> {
    let wrong = |why: String| Error::Name(name.into(), why);
    let (host, endpoint) = name.rsplit_once('/').ok_or_else(|| wrong("no '/'".into()))?;
    let endpoint = endpoint.parse().map_err(|_| wrong(format!("'{endpoint}' is no number below 1024")))?;
    let mut addresses = host.to_socket_addrs().map_err(|error| wrong(error.to_string()))?;
    let address = addresses.next().ok_or_else(|| wrong("the host has no address".into()))?;
    Ok(Peer { address, endpoint })
}

/// Returns random bytes from the kernel.
fn random() -> Result<[u8; 32], Error> {
    let mut bytes = [0u8; 32];
    // SAFETY: the kernel writes at most as many bytes into `bytes` as it has.
    let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    if got == bytes.len() as isize {
        return Ok(bytes);
    }
    Err(Error::Socket((Ipv4Addr::UNSPECIFIED, 0).into(), io::Error::last_os_error()))
}
