//! The process engine: runs the protocol inside the application over a UDP socket or in raw Ethernet frames (`wire.rs`), and through shared
//! memory with processes of the same host (`local.rs`). The busiest peer has a socket of its own (`busy_peer.rs`). Large transfers take TCP connections beside the socket (`streams/`), and all packets to a
//! peer that UDP does not reach take another one (`bounce/`). Packets to peers behind sealed links are sealed on their way to the socket ([`crate::seal`]).
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

mod bounce;
mod busy_peer;
mod endpoint;
mod error;
mod local;
mod name;
pub(crate) mod notice;
pub(crate) mod pages;
mod patience;
mod records;
pub(crate) mod socket;
mod streams;
mod tcp;
mod udp;
mod wire;

use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;

use crate::ether::address::Bind;
use crate::meeting;
use crate::proto::{Config, Counters, Departure, Engine};
use crate::random::random;
use crate::seal::{OVERHEAD, Permission, SealCounters, Sealing, Way};
pub use bounce::BounceCounters;
use bounce::Bounces;
pub use endpoint::Endpoint;
pub use error::Error;
use local::Local;
pub use local::{Attachment, RingCounters};
pub use name::{name_of, resolve};
use notice::{Event, Notices};
use pages::Pages;
use patience::Patience;
pub use records::Records;
use socket::wait_readable;
pub use streams::StreamCounters;
use streams::Streams;
use wire::{Arrival, Wire};

/// Maximum number of system calls that receive before the engine sends.
const RECEIVES_MAX: usize = 16;
/// Interval at which the library thread checks whether the application polls.
const LOOK: Duration = Duration::from_millis(5);
/// Environment variable with another name for the daemon's socket; empty: no shared memory.
const MEETING_VARIABLE: &str = "VNET_RDMA_MEETING";
/// Environment variable that says who runs the engine.
const ATTACHMENT_VARIABLE: &str = "VNET_RDMA_ATTACHMENT";
/// Environment variable that allows clear text to peers behind sealed links.
const SEAL_VARIABLE: &str = "VNET_RDMA_SEAL";
/// Environment variable: `auto` or `off`, see [`Options::streams`].
const STREAMS_VARIABLE: &str = "VNET_RDMA_STREAMS";
/// Smallest pull that opens a stream, in bytes.
const STREAM_MIN: usize = 256 << 10;
/// How often a thread takes packets from rings before it wakes the threads that sleep, instead of arming the rings for them.
const REARMS_MAX: u32 = 4;
/// How long opening a node at an Ethernet device waits for the daemon's permission.
const PERMISSION: Duration = Duration::from_secs(2);
/// Size of the largest probe in bytes: what jumbo frames carry.
const PROBE_MAX: usize = 9_000;
/// How long closing a node waits for acknowledgements.
const LINGER: Duration = Duration::from_secs(2);

/// Options for opening a node.
#[derive(Clone, Debug)]
pub struct Options {
    /// Address of the UDP socket, or Ethernet device; port 0 selects any free port.
    pub bind: Bind,
    /// Configuration of the protocol engine. A `receive_budget` of 0 stands for the capacity of the socket's receive buffer.
    pub config: Config,
    /// Whether a library thread answers peers while the application does not poll.
    pub has_thread: bool,
    /// Abstract Unix socket of this host's daemon, which gives shared memory to processes of one host. `None`: all packets take the
    /// network.
    pub meeting: Option<String>,
    /// Who runs the engine: `process`: this process; `daemon`: this host's vnetd; `vm`, in a virtual machine: the vnetd of its host.
    /// `bounce` is `process` without UDP: packets take TCP connections. `auto` (the default) is `vm` in a virtual machine whose helper runs and
    /// has it from the host, `daemon` in a container whose network prefers it, both only if the application does not register memory of its own, and
    /// otherwise `process`.
    pub attachment: Option<String>,
    /// The application registers memory of its own, besides regions, which the host's daemon does not reach: true by default.
    pub own_memory: bool,
    /// `auto` (the default) seals packets to peers behind sealed links; `off` sends and takes clear text.
    pub seal: Option<String>,
    /// `auto` (the default) has large transfers travel through TCP connections beside the UDP socket, and all packets to peers that UDP does not
    /// reach; with `off` the node neither listens at a TCP port nor connects.
    pub streams: Option<String>,
}

impl Default for Options {
    fn default() -> Self {
        let config =
            Config { datagram_max: 65_507, takes_parts: true, receive_budget: 0, ..Config::default() };
        let meeting = std::env::var(MEETING_VARIABLE).unwrap_or_else(|_| meeting::SOCKET.into());
        let meeting = Some(meeting).filter(|name| !name.is_empty());
        let set = |variable| std::env::var(variable).ok().filter(|value| !value.is_empty());
        let (attachment, seal, streams) =
            (set(ATTACHMENT_VARIABLE), set(SEAL_VARIABLE), set(STREAMS_VARIABLE));
        let bind = Bind::Udp((Ipv4Addr::UNSPECIFIED, 0).into());
        Self { bind, config, has_thread: true, meeting, attachment, own_memory: true, seal, streams }
    }
}

struct Inner {
    engine: Engine,
    wire: Wire,
    /// The packet that is being sent.
    packet: Departure,
    local: Local,
    seal: Sealing,
    streams: Streams,
    bounces: Bounces,
    /// Memory of the regions, which the node frees when it is dropped.
    kept: Vec<Arc<Pages>>,
    /// By endpoint number. Created when a thread first sleeps on the endpoint, or requests its descriptor.
    notices: Notices,
}

impl Inner {
    fn attachment(&self, address: SocketAddr) -> Attachment {
        match address {
            _ if self.engine.is_local(address) => Attachment::SameHost,
            _ if self.seal.is_sealed(address) => Attachment::Sealed,
            _ if self.bounces.carries(address) => Attachment::Bounce,
            _ => match self.wire {
                Wire::Udp(_) => Attachment::Udp,
                Wire::Ethernet(_) => Attachment::Ethernet,
            },
        }
    }

    /// Has peers with a new session greeted at once, and leaves room for what sealing adds to packets.
    fn settle_sessions(&mut self) {
        while let Some(address) = self.seal.next_ready() {
            let most = self.engine.config().datagram_max;
            let Ok(datagram) = self.wire.packet_to(address, most) else { continue };
            self.engine.limit_datagram(address, datagram.min(most) - OVERHEAD);
            self.engine.set_parts(address, matches!(self.wire, Wire::Udp(_)));
            // Streams are not sealed.
            self.engine.refuse_streams(address);
            self.engine.greet_again(address);
        }
        while let Some(note) = self.seal.next_note() {
            eprintln!("vnet-rdma: {note}");
        }
    }

    /// Waits until the daemon has said whether packets may leave in frames that nobody seals. Over UDP that is decided for each peer.
    fn await_permission(&mut self, bind: &Bind, start: Instant) -> Result<(), Error> {
        while start.elapsed() < PERMISSION {
            let now = start.elapsed().as_nanos() as u64;
            match self.seal.permission(now) {
                Permission::Given => return Ok(()),
                Permission::Refused => return Err(Error::NotSealed(bind.device())),
                Permission::Awaited => {}
            }
            self.local.ask(&mut self.seal);
            wait_readable(&[self.local.inbox()], Some(1_000_000));
            self.local.tend(&mut self.engine, &mut self.seal, now);
        }
        Err(Error::Unpermitted(bind.device()))
    }

    fn lower(&mut self, endpoint: u16) {
        if let Some(notice) = self.notices.get(endpoint) {
            notice.lower();
        }
    }

    /// Wakes threads that wait for completions which are queued now. `own`: the endpoint whose completions the caller takes.
    fn signal(&mut self, own: Option<u16>) {
        self.notices.signal(own, |endpoint| self.engine.waiting(endpoint) > 0);
    }
}

struct Shared {
    inner: Mutex<Inner>,
    start: Instant,
    /// Number of calls in which the application made progress.
    polled: AtomicU64,
    sleeping: AtomicU32,
    /// Number of threads in `wait`.
    waiting: AtomicU32,
    is_closing: AtomicBool,
    /// Readable when packets arrive, by the socket or by a ring.
    descriptor: RawFd,
    /// Wakes the library thread.
    wake: Event,
    /// Time at which the library thread wakes by itself, or 0 if that is within `LOOK`. It grows only under the lock of `inner`.
    attends_at: AtomicU64,
    address: SocketAddr,
    bind: Bind,
    /// Datagrams that arrive are discarded.
    #[cfg(test)]
    is_deaf: AtomicBool,
}

impl Shared {
    fn now(&self) -> u64 {
        self.start.elapsed().as_nanos() as u64 + 1
    }

    /// Receives packets, checks the timers and sends. Returns whether any packet arrived. `own`: the endpoint whose completions the
    /// caller takes. It gets one as soon as there is one: another look at the socket would take a tenth of a message's time.
    fn progress(&self, inner: &mut Inner, own: Option<u16>) -> bool {
        let mut now = self.now();
        let mut arrived = self.receive_local(inner, now);
        let receives = if inner.local.is_socket_turn(now) { RECEIVES_MAX } else { 0 };
        // While rings are in use, the wire is polled rarely.
        let all = inner.local.has_rings();
        for _ in 0..receives {
            let Inner { engine, wire, seal, bounces, .. } = inner;
            let before = engine.accepted();
            let mut is_first = true;
            let found = wire.receive(all, |Arrival { from, packet, congestion }| {
                // Copying a large datagram takes as long as an acknowledgement is delayed: the arrival time is after the copy.
                if std::mem::take(&mut is_first) {
                    now = self.now();
                }
                #[cfg(test)]
                if self.is_deaf.load(Ordering::Relaxed) {
                    return;
                }
                if bounces.takes(from, packet) {
                    return;
                }
                if let Some(packet) = seal.arrive(now, from, packet) {
                    engine.receive(now, from, packet, congestion);
                }
            });
            if !found {
                break;
            }
            if engine.accepted() != before {
                wire.accepted();
            }
            arrived = true;
            if own.is_some_and(|own| inner.engine.waiting(own) > 0) {
                break;
            }
        }
        let Inner { engine, wire, local, seal, streams, bounces, .. } = inner;
        wire.settle(now, local);
        arrived |= streams.progress(engine, local, seal, now);
        streams.callers().for_each(|caller| bounces.accept(engine, local, now, caller));
        arrived |= bounces.progress(engine, local, seal, now);
        local.tend(engine, seal, now);
        inner.settle_sessions();
        inner.engine.tick(now);
        self.send_at(inner, now);
        arrived
    }

    /// Receives packets from rings. Who sleeps on the inbox relies on bells: a thread that takes packets must not leave a sleeper
    /// without one.
    fn receive_local(&self, inner: &mut Inner, now: u64) -> bool {
        let mut arrived = false;
        for _ in 0..REARMS_MAX {
            let taken = inner.local.receive(&mut inner.engine, now);
            arrived |= taken.arrived;
            if taken.heard && self.attends_at.swap(0, Ordering::Relaxed) != 0 {
                // The library thread may have missed the bell. Awake, it looks often, and arms the rings before it sleeps long.
                self.wake.raise();
            }
            if self.sleeping.load(Ordering::Relaxed) == 0 || !inner.local.arm() {
                return arrived;
            }
        }
        inner.notices.wake(|_| true);
        arrived
    }

    fn send(&self, inner: &mut Inner) {
        self.send_at(inner, self.now());
    }

    fn send_at(&self, inner: &mut Inner, now: u64) {
        let mut sent = false;
        let Inner { engine, wire, local, seal, streams, bounces, packet, .. } = inner;
        while engine.depart_into(now, packet) {
            sent = true;
            if packet.by_stream {
                streams.send(engine, local, seal, packet);
                continue;
            }
            if local.send(engine, packet) {
                continue;
            }
            match seal.depart(now, packet.to, packet.header.as_bytes(), packet.payload) {
                Way::Clear => {
                    if packet.parts_of > 0 {
                        // The link is no longer sealed. Until the packet has arrived, the kernel fragments it.
                        engine.set_parts(packet.to, false);
                    }
                    if !bounces.send(packet) {
                        wire.send(packet);
                    }
                }
                Way::Sealed(session) => {
                    if !bounces.send_sealed(packet, session) {
                        wire.send_sealed(packet, session);
                    }
                }
                Way::Held => {}
            }
        }
        let Inner { engine, wire, local, streams, bounces, seal, .. } = inner;
        wire.flush();
        streams.flush(engine, local);
        while let Some((to, packet)) = seal.next_packet() {
            if !bounces.send_alone(to, &packet) {
                wire.send_alone(to, &packet);
            }
        }
        while let Some((to, probe)) = bounces.next_probe() {
            // A path may lose large datagrams only.
            let mut datagram = probe.to_vec();
            datagram.resize(wire.packet_to(to, probe.len()).unwrap_or(probe.len()).min(PROBE_MAX), 0);
            wire.send_alone(to, &datagram);
        }
        bounces.flush(local);
        inner.local.ask(&mut inner.seal);
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
        if attends_at <= soon && !inner.notices.any_sleep(|notice| notice.until > soon) {
            return;
        }
        let Some(at) = inner.engine.wake_at(now).map(|at| at.max(soon)) else { return };
        if attends_at > at {
            self.attends_at.store(0, Ordering::Relaxed);
            self.wake.raise();
        }
        inner.notices.wake(|notice| notice.until > at);
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
            self.progress(&mut inner, None);
            inner.engine.hurry();
            self.send(&mut inner);
            inner.signal(None);
            let now = self.now();
            let wake_at = inner.engine.wake_at(now);
            self.attends_at.store(wake_at.unwrap_or(u64::MAX), Ordering::Relaxed);
            let wake_at = if inner.local.arm() { Some(now) } else { wake_at };
            drop(inner);
            let sleep = wake_at.map(|at| at.saturating_sub(now));
            wait_readable(&[self.descriptor, self.wake.descriptor()], sleep);
            self.attends_at.store(0, Ordering::Relaxed);
        }
    }
}

/// A process on the network: a UDP or packet socket, the protocol's engine, and endpoints.
pub struct Node {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Node {
    /// Opens a node: binds its socket and starts its library thread if requested.
    pub fn open(options: &Options) -> Result<Self, Error> {
        let refused = |error| Error::socket(&options.bind, error);
        let has_streams = match options.streams.as_deref() {
            None | Some("auto") => true,
            Some("off") => false,
            Some(other) => return Err(Error::Streams(other.into())),
        };
        let is_only = options.attachment.as_deref() == Some("bounce");
        let (wire, address, listener) = wire::bind(&options.bind, has_streams || is_only)?;
        if is_only && listener.is_none() {
            return Err(Error::NoBounce);
        }
        let mut config = options.config.clone();
        if config.receive_budget == 0 {
            config.receive_budget = wire.receive_room().clamp(64 << 10, 4 << 20);
        }
        if let Some(most) = wire.packet_max() {
            (config.datagram_max, config.has_fragments) = (config.datagram_max.min(most), false);
        }
        let is_off = match options.seal.as_deref() {
            None | Some("auto") => false,
            Some("off") => true,
            Some(other) => return Err(Error::Seal(other.into())),
        };
        let seed = random().map_err(refused)?;
        let mut seal = match wire {
            Wire::Udp(_) => Sealing::new(address, is_off, seed),
            Wire::Ethernet(_) => Sealing::of_frames(address, is_off, seed),
        };
        let local = Local::new(options.meeting.clone(), wire.as_fd(), &mut seal).map_err(refused)?;
        if let Some(listener) = &listener {
            local.watch(listener.as_fd()).map_err(refused)?;
        }
        let dead_after = config.dead_after_ns;
        let bounces = Bounces::new(address, is_only, listener.is_some(), dead_after);
        let streams = Streams::new(address, listener, dead_after);
        config.stream_min = match config.stream_min {
            _ if !has_streams || !streams.can_listen() => 0,
            0 => STREAM_MIN,
            least => least,
        };
        let epoch = SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |since| since.as_nanos() as u64);
        let engine = Engine::new(config, epoch, random().map_err(refused)?);
        let packet = Departure::empty();
        let (kept, notices) = (vec![], Notices::default());
        let mut inner = Inner { engine, wire, packet, local, seal, streams, bounces, kept, notices };
        let start = Instant::now();
        inner.await_permission(&options.bind, start)?;
        let shared = Arc::new(Shared {
            descriptor: inner.local.inbox(),
            inner: Mutex::new(inner),
            start,
            polled: AtomicU64::new(0),
            sleeping: AtomicU32::new(0),
            waiting: AtomicU32::new(0),
            is_closing: AtomicBool::new(false),
            wake: Event::new().map_err(refused)?,
            attends_at: AtomicU64::new(0),
            address,
            bind: options.bind.clone(),
            #[cfg(test)]
            is_deaf: AtomicBool::new(false),
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

    /// Returns the counters of the rings to processes of this host.
    pub fn ring_counters(&self) -> RingCounters {
        self.shared.inner.lock().local.counters()
    }

    /// Returns the counters of the streams for large transfers.
    pub fn stream_counters(&self) -> StreamCounters {
        self.shared.inner.lock().streams.counters()
    }

    /// Returns the counters of the connections that stand in for UDP.
    pub fn bounce_counters(&self) -> BounceCounters {
        self.shared.inner.lock().bounces.counters()
    }

    /// Returns the counters of sealing.
    pub fn seal_counters(&self) -> SealCounters {
        self.shared.inner.lock().seal.counters()
    }

    /// The peer with a socket of its own.
    #[cfg(test)]
    fn busy_peer(&self) -> Option<SocketAddr> {
        match &self.shared.inner.lock().wire {
            Wire::Udp(socket) => socket.busy_peer(),
            Wire::Ethernet(_) => None,
        }
    }

    /// Discards datagrams that arrive, as a firewall would, or no longer.
    #[cfg(test)]
    fn block_datagrams(&self, is_deaf: bool) {
        self.shared.is_deaf.store(is_deaf, Ordering::Relaxed);
    }

    /// Shuts the connections that stand in for UDP down, as a network failure would.
    #[cfg(test)]
    fn cut_bounces(&self) {
        self.shared.inner.lock().bounces.cut();
    }

    /// Opens the endpoint with this number, or with the first free number.
    pub fn endpoint(&self, number: Option<u16>) -> Result<Endpoint, Error> {
        let number = self.shared.inner.lock().engine.open(number)?;
        Ok(Endpoint { shared: Arc::clone(&self.shared), number, patience: Patience::new() })
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
            self.shared.progress(&mut inner, None);
            inner.engine.hurry();
            self.shared.send(&mut inner);
            if inner.engine.is_idle() || Instant::now() >= end {
                inner.engine.say_goodbye();
                self.shared.send(&mut inner);
                inner.bounces.drain();
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

#[cfg(test)]
mod ether_tests;
#[cfg(test)]
pub(crate) mod sealed_tests;
#[cfg(test)]
mod tests;
