//! The relay: two other hosts that cannot reach each other meet at this host, which forwards their datagrams (client.rs).
//!
//! A *pair* is two hosts that both have a sealed link with this host. Each pair has its own UDP port, behind those of the bridge,
//! so its datagrams need no extra header. The configuration limits the number of pairs. Each host gets a new key for each
//! rendezvous and registers its source address under that key. A datagram from one host's address is forwarded unchanged to the
//! other's; any other datagram is counted and dropped.
//!
//! The host that connects first waits at most [`WAIT`] for the other host; then their TCP connections are joined for at most
//! [`JOINED_MAX`]. Each connection has a thread during that time. At most one connection waits per pair; a newer connection of
//! the same host replaces it. One thread forwards datagrams for all pairs.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Barrier};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use aws_lc_rs::rand;
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustls::pki_types::CertificateDer;

use super::client::{ALPN, ID_LEN, KEY_LEN, REGISTRATION_LEN, Registration, RendezvousMessage, Ticket};
use crate::link::normalised;
use crate::link::sealed::identity::tls::{BYTES_MAX, Channel, HandshakeError, Patient, one_line};
use crate::link::sealed::keeper::{Guest, GuestService};
use crate::link::socket::buffers;
use crate::link::socket::udp::{Oversize, oversize};
use crate::stats::{DiscardReason, PortStats};
use crate::threads;

/// How long a host waits for the other host. Its handshake has 5 s in all.
const WAIT: Duration = Duration::from_millis(3500);
/// How long two connections are joined: the handshake over them has 5 s.
const JOINED_MAX: Duration = Duration::from_secs(6);
/// How long a pair exists without a registration from either host.
const IDLE: Duration = Duration::from_secs(60);
/// Interval at which the forwarding thread checks for new and ended pairs.
const LOOK: Duration = Duration::from_millis(100);
/// Maximum number of datagrams forwarded for one pair before the other pairs get their turn.
const BURST: usize = 64;
/// Why hosts cannot meet for a moment.
const REPLACED: &str = "the vnetd here is being replaced; it goes on in a moment";
/// Maximum number of connections of a pair's hosts that wait or are joined at a time.
const GUESTS_PER_PAIR: usize = 3;

/// One host of a pair.
#[derive(Default)]
pub(super) struct Side {
    pub(super) id: [u8; ID_LEN],
    pub(super) key: [u8; KEY_LEN],
    /// Number of its last registration.
    pub(super) number: u64,
    /// The address that the host registered, and when.
    pub(super) at: Option<(SocketAddr, Instant)>,
    /// The host's certificate, followed by those of its issuers. Empty until it has met the other host.
    pub(super) chain: Vec<CertificateDer<'static>>,
}

/// Two hosts that meet at this relay. Names are in lower case and sorted.
pub(super) struct Pair {
    pub(super) names: [String; 2],
    pub(super) socket: UdpSocket,
    pub(super) port: u16,
    pub(super) sides: Mutex<[Side; 2]>,
    waiting: Mutex<Option<Waiting>>,
    guests: AtomicUsize,
    made: Instant,
}

/// The host that connected first.
struct Waiting {
    /// Distinguishes this connection from later ones of the same host.
    number: u64,
    side: usize,
    stream: TcpStream,
    /// Passes the other host's connection to it.
    give: Sender<Met>,
}

/// The other host's connection, and a barrier at which both sides wait until each has its ticket.
struct Met {
    stream: TcpStream,
    told: Arc<Barrier>,
}

/// A host that asked to meet another one.
struct Request {
    channel: Channel<TcpStream>,
    chain: Vec<CertificateDer<'static>>,
    name: String,
    wanted: String,
}

/// State that the relay shares with its threads.
pub(super) struct RelayState {
    listen: SocketAddr,
    pairs_max: u16,
    /// Counts datagrams of all pairs, in and out; dropped datagrams count as of unknown source.
    stats: Arc<PortStats>,
    pub(super) pairs: Mutex<HashMap<[String; 2], Arc<Pair>>>,
    /// Sockets that a running vnetd has handed over, with their ports, until its pairs are known.
    pub(super) inherited: Mutex<Vec<(UdpSocket, u16)>>,
    /// Taken while datagrams are forwarded.
    pub(super) forwarding: Mutex<()>,
    /// True while a take-over is being prepared: no pair is added or removed.
    pub(super) frozen: AtomicBool,
    /// True while the next vnetd is about to forward in place of this one.
    pub(super) resting: AtomicBool,
    stopping: AtomicBool,
}

/// Lets other hosts meet, and forwards their datagrams. Stops on drop.
pub struct Relay {
    pub(super) state: Arc<RelayState>,
    thread: Option<JoinHandle<()>>,
}

/// The sockets of the vnetd before, with their ports.
fn inherited(sockets: Vec<OwnedFd>) -> io::Result<Vec<(UdpSocket, u16)>> {
    let one = |socket| {
        let socket = UdpSocket::from(socket);
        let port = socket.local_addr()?.port();
        Ok((socket, port))
    };
    sockets.into_iter().map(one).collect()
}

impl Relay {
    /// Starts forwarding for up to `pairs_max` pairs, on consecutive UDP ports from that of `first` on (any ports if it is 0).
    /// `sockets` are those that a running vnetd hands over.
    ///
    /// # Errors
    /// The system refuses a thread, or a descriptor is no UDP socket.
    pub fn start(
        first: SocketAddr,
        pairs_max: u16,
        stats: Arc<PortStats>,
        sockets: Vec<OwnedFd>,
    ) -> io::Result<Relay> {
        let state = Arc::new(RelayState {
            listen: first,
            pairs_max,
            stats,
            pairs: Mutex::default(),
            inherited: Mutex::new(inherited(sockets)?),
            forwarding: Mutex::default(),
            frozen: AtomicBool::new(false),
            resting: AtomicBool::new(false),
            stopping: AtomicBool::new(false),
        });
        let forwarding = state.clone();
        let thread = std::thread::Builder::new().name("relay".into()).spawn(move || {
            threads::confine();
            forwarding.forward_all();
        })?;
        Ok(Relay { state, thread: Some(thread) })
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            self.state.stopping.store(true, Relaxed);
            if thread.join().is_err() {
                tracing::error!(
                    "the relay panicked: hosts that meet by this one were cut off; restart vnetd and report this"
                );
            }
        }
    }
}

impl GuestService for Relay {
    fn alpn(&self) -> &'static [u8] {
        ALPN
    }

    fn admit(&self, guest: Guest) -> Result<Box<dyn FnOnce() + Send>, HandshakeError> {
        let Guest { mut channel, chain, host, known } = guest;
        let RendezvousMessage::Meet(wanted) = RendezvousMessage::read(&mut channel)? else {
            return Err(HandshakeError::unexpected_message());
        };
        let is_known = |name: &String| {
            let other = !wanted.eq_ignore_ascii_case(name);
            other && known.iter().any(|host| host.eq_ignore_ascii_case(&wanted))
        };
        let no_link = || format!("this host has no link with {}", one_line(wanted.as_bytes()));
        let name = match host.and_then(|name| if is_known(&name) { Ok(name) } else { Err(no_link()) }) {
            Ok(name) => name,
            Err(why) => return refuse(channel, why),
        };
        let state = self.state.clone();
        Ok(Box::new(move || {
            let (from, to) = (name.clone(), wanted.clone());
            if let Err(HandshakeError(why)) = state.meet(Request { channel, chain, name, wanted }) {
                tracing::debug!("{from} has not met {to} here: {why}");
            }
        }))
    }

    fn retain(&self, keep: &dyn Fn(&str, &[CertificateDer<'_>]) -> bool) {
        let mut pairs = self.state.pairs.lock();
        if self.state.frozen.load(Relaxed) {
            return;
        }
        pairs.retain(|names, pair| {
            let sides = pair.sides.lock();
            names.iter().zip(&*sides).all(|(name, side)| side.chain.is_empty() || keep(name, &side.chain))
        });
    }
}

fn random<const N: usize>() -> Result<[u8; N], HandshakeError> {
    let mut bytes = [0; N];
    rand::fill(&mut bytes).map_err(|_| HandshakeError("the system has no random numbers".into()))?;
    Ok(bytes)
}

impl RelayState {
    /// Lets a host meet the host that it asks for. Blocks for at most [`WAIT`] and [`JOINED_MAX`].
    fn meet(&self, request: Request) -> Result<(), HandshakeError> {
        let (name, wanted) = (request.name.to_ascii_lowercase(), request.wanted.to_ascii_lowercase());
        let side = usize::from(name > wanted);
        if self.resting.load(Relaxed) {
            return refuse(request.channel, REPLACED.into());
        }
        let pair = match self.pair(if side == 0 { [name, wanted] } else { [wanted, name] }) {
            Ok(pair) => pair,
            Err(why) => return refuse(request.channel, why),
        };
        let own = request.channel.stream().try_clone();
        let result = match own.map_err(lost).and_then(|own| pair.come(side, own)) {
            Ok(Some(met)) => pair.introduce(side, request, met),
            Ok(None) => refuse(request.channel, format!("{} has not come", pair.names[1 - side])),
            Err(why) => Err(why),
        };
        pair.guests.fetch_sub(1, Relaxed);
        self.forget_unmet(&pair);
        result
    }

    /// Removes a pair that has never met and in which no host waits, so that another pair can take its place.
    fn forget_unmet(&self, pair: &Arc<Pair>) {
        let mut pairs = self.pairs.lock();
        let unmet = pair.sides.lock().iter().all(|side| side.chain.is_empty());
        if unmet && pair.guests.load(Relaxed) == 0 {
            // Compares identity, so as not to remove a successor of the pair.
            pairs.retain(|_, other| !Arc::ptr_eq(other, pair));
        }
    }

    /// The pair of these hosts, created if necessary, with its number of guests incremented: a pair with guests does not end.
    fn pair(&self, names: [String; 2]) -> Result<Arc<Pair>, String> {
        let mut pairs = self.pairs.lock();
        if let Some(pair) = pairs.get(&names) {
            if pair.guests.fetch_add(1, Relaxed) >= GUESTS_PER_PAIR {
                pair.guests.fetch_sub(1, Relaxed);
                return Err("too many connections of these two wait here".into());
            }
            return Ok(pair.clone());
        }
        if self.frozen.load(Relaxed) {
            return Err(REPLACED.into());
        }
        if pairs.len() >= usize::from(self.pairs_max) {
            return Err(format!("{} pairs of hosts meet here, the limit", pairs.len()));
        }
        let (socket, port) =
            self.free_port(&pairs).ok_or("no UDP port is free here for another pair of hosts")?;
        tracing::info!("{} and {} meet by this host, UDP port {port}", names[0], names[1]);
        let pair = Arc::new(Pair::new(names.clone(), socket, port));
        pair.guests.store(1, Relaxed);
        pairs.insert(names, pair.clone());
        Ok(pair)
    }

    /// A socket on the first free port.
    fn free_port(&self, pairs: &HashMap<[String; 2], Arc<Pair>>) -> Option<(UdpSocket, u16)> {
        let ports = 0..if self.listen.port() == 0 { 1 } else { self.pairs_max };
        let mut sockets = ports.filter_map(|offset| {
            let port = self.listen.port().checked_add(offset)?;
            let taken = port != 0 && pairs.values().any(|pair| pair.port == port);
            let socket = (!taken).then(|| UdpSocket::bind((self.listen.ip(), port)).ok())??;
            let port = socket.local_addr().ok()?.port();
            socket.set_nonblocking(true).ok()?;
            let bytes = buffers::buffer_bytes(buffers::ASSUMED_MBPS);
            rustix::net::sockopt::set_socket_recv_buffer_size(&socket, bytes).ok()?;
            // The hosts probe the MTU of the whole path: fragmentation at the relay would hide it, and ICMP may be forged.
            oversize(&socket, self.listen.is_ipv6(), Oversize::Probe).ok()?;
            Some((socket, port))
        });
        sockets.next()
    }

    /// The forwarding thread's loop.
    fn forward_all(&self) {
        let mut buffer = vec![0; 65_536];
        let timeout = Timespec { tv_sec: 0, tv_nsec: LOOK.as_nanos() as i64 };
        while !self.stopping.load(Relaxed) {
            let pairs: Vec<Arc<Pair>> = {
                let mut pairs = self.pairs.lock();
                if !self.frozen.load(Relaxed) {
                    pairs.retain(|_, pair| pair.is_used());
                }
                pairs.values().cloned().collect()
            };
            let mut fds: Vec<_> = pairs
                .iter()
                .map(|pair| PollFd::from_borrowed_fd(pair.socket.as_fd(), PollFlags::IN))
                .collect();
            if !matches!(poll(&mut fds, Some(&timeout)), Ok(1..)) {
                continue;
            }
            let forwarding = self.forwarding.lock();
            if self.resting.load(Relaxed) {
                drop(forwarding);
                std::thread::sleep(LOOK);
                continue;
            }
            for (pair, fd) in pairs.iter().zip(&fds) {
                if !fd.revents().is_empty() {
                    pair.forward(&mut buffer, &self.stats);
                }
            }
        }
    }
}

fn refuse<T>(mut channel: Channel<TcpStream>, why: String) -> Result<T, HandshakeError> {
    // The other side may have closed already; this side logs the reason in any case.
    let _ = channel.send(&RendezvousMessage::Refuse(why.clone()).to_bytes());
    channel.close();
    Err(HandshakeError(why))
}

/// Copies from `from` to `to` within limits of time and bytes, then ends both connections. Another thread copies the opposite
/// direction.
fn copy(mut from: TcpStream, mut to: TcpStream) {
    let until = Instant::now() + JOINED_MAX;
    let (mut buffer, mut left) = ([0; 4096], BYTES_MAX);
    while left > 0 {
        let time = until.saturating_duration_since(Instant::now());
        if time.is_zero() || from.wait_at_most(time).is_err() || to.wait_at_most(time).is_err() {
            break;
        }
        match from.read(&mut buffer[..left.min(4096)]) {
            Ok(count) if count > 0 && to.write_all(&buffer[..count]).is_ok() => left -= count,
            _ => break,
        }
    }
    // Bytes already written still arrive.
    let _ = to.shutdown(std::net::Shutdown::Write);
}

impl Pair {
    /// A pair without guests.
    pub(super) fn new(names: [String; 2], socket: UdpSocket, port: u16) -> Pair {
        Pair {
            names,
            socket,
            port,
            sides: Mutex::default(),
            waiting: Mutex::default(),
            guests: AtomicUsize::new(0),
            made: Instant::now(),
        }
    }

    /// Sends a host its ticket, and joins its connection with the other host's.
    fn introduce(&self, side: usize, request: Request, met: Met) -> Result<(), HandshakeError> {
        let Request { mut channel, chain, .. } = request;
        // The other host's thread also waits at the barrier, so this thread must reach it in every case.
        let told = self
            .admit(side, chain)
            .and_then(|ticket| channel.send(&RendezvousMessage::Open(ticket).to_bytes()));
        met.told.wait();
        told?;
        copy(channel.into_stream(), met.stream);
        Ok(())
    }

    /// Creates a new ticket for a side.
    fn admit(&self, side: usize, chain: Vec<CertificateDer<'static>>) -> Result<Ticket, HandshakeError> {
        let ticket = Ticket { port: self.port, id: random()?, key: random()? };
        let own = &mut self.sides.lock()[side];
        (own.id, own.key, own.number, own.chain) = (ticket.id, ticket.key, 0, chain);
        Ok(ticket)
    }

    /// Exchanges the connection `own` with the other host's connection, if that one is waiting or arrives in time.
    fn come(&self, side: usize, own: TcpStream) -> Result<Option<Met>, HandshakeError> {
        static NUMBERS: AtomicU64 = AtomicU64::new(0);
        let number = NUMBERS.fetch_add(1, Relaxed);
        let receive = {
            let mut waiting = self.waiting.lock();
            if let Some(other) = waiting.take_if(|other| other.side != side) {
                let told = Arc::new(Barrier::new(2));
                // The other thread cannot have left, because leaving takes this lock.
                let given = other.give.send(Met { stream: own, told: told.clone() });
                return Ok(given.is_ok().then_some(Met { stream: other.stream, told }));
            }
            let (give, receive) = channel();
            *waiting = Some(Waiting { number, side, stream: own, give });
            receive
        };
        if let Ok(met) = receive.recv_timeout(WAIT) {
            return Ok(Some(met));
        }
        let mut waiting = self.waiting.lock();
        waiting.take_if(|waiting| waiting.number == number);
        // The other host may have arrived just before the lock was taken.
        Ok(receive.try_recv().ok())
    }

    fn is_used(&self) -> bool {
        let sides = self.sides.lock();
        let last = sides.iter().filter_map(|side| side.at.map(|(_, at)| at)).max();
        let has_guests = self.guests.load(Relaxed) > 0;
        let used = has_guests || last.unwrap_or(self.made).elapsed() < IDLE;
        if !used {
            let [one, other] = &self.names;
            tracing::info!("{one} and {other} do not meet by this host any more");
        }
        used
    }

    /// Forwards waiting datagrams, at most a burst.
    fn forward(&self, buffer: &mut [u8], stats: &PortStats) {
        for _ in 0..BURST {
            let Ok((len, source)) = self.socket.recv_from(buffer) else { return };
            let (datagram, source) = (&buffer[..len], normalised(source));
            let send = |to, bytes: &[u8]| self.socket.send_to(bytes, self.form(to)).is_ok();
            // A datagram that cannot be sent counts as lost.
            let went = match Registration::id_of(datagram) {
                Some(id) => self.register(id, datagram, source).is_some_and(|answer| send(source, &answer)),
                None => self.other(source).is_some_and(|to| send(to, datagram)),
            };
            stats.in_datagrams.add(1);
            if went {
                stats.out_datagrams.add(1);
            } else {
                stats.discard(DiscardReason::UnknownSource, 1);
            }
        }
    }

    /// Destination of datagrams from `source`.
    fn other(&self, source: SocketAddr) -> Option<SocketAddr> {
        let sides = self.sides.lock();
        let at = |side: usize| sides[side].at.map(|(at, _)| at);
        let from = (0..2).find(|side| at(*side) == Some(source))?;
        at(1 - from)
    }

    /// Processes a registration. Returns its answer, which has the same length.
    fn register(
        &self,
        id: [u8; ID_LEN],
        datagram: &[u8],
        source: SocketAddr,
    ) -> Option<[u8; REGISTRATION_LEN]> {
        let mut sides = self.sides.lock();
        let at = sides.iter().position(|side| side.id == id && !side.chain.is_empty())?;
        let other = sides[1 - at].at.map(|(at, _)| at);
        let side = &mut sides[at];
        let registration = Registration::read(datagram, &side.key)?;
        if registration.is_answer || registration.number <= side.number {
            return None;
        }
        (side.number, side.at) = (registration.number, Some((source, Instant::now())));
        let answer = Registration { other, is_answer: true, ..registration };
        Some(answer.to_bytes(&side.key))
    }

    /// An address in the form for the socket.
    fn form(&self, to: SocketAddr) -> SocketAddr {
        let v6 = self.socket.local_addr().is_ok_and(|local| local.is_ipv6());
        match to {
            SocketAddr::V4(v4) if v6 => SocketAddr::new(v4.ip().to_ipv6_mapped().into(), v4.port()),
            other => other,
        }
    }
}

fn lost(error: io::Error) -> HandshakeError {
    HandshakeError(error.to_string())
}

#[cfg(test)]
#[path = "relay_tests.rs"]
mod tests;
