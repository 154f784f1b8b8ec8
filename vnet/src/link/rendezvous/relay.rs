//! The host between two others that cannot reach each other: where they meet, and what forwards for them (meet.rs).
//!
//! A *pair* is two hosts that both have a sealed link with this one. It has a UDP port of its own, behind those of the bridge, so
//! that what comes to it needs nothing of ours before its payload to be known by. There are as many as the configuration says, and
//! no more. Each side has a key, anew for each meeting, under which it registers the address that it sends from; a datagram from
//! one side's address goes to the other's, as it is, and everything else is counted and ends.
//!
//! A host that comes to meet another waits for it, [`WAIT`] at most, then their TCP connections are joined, [`JOINED_MAX`] at most.
//! Each has a thread for so long; there is one who waits for each pair, and the latest takes the place of the one before. One
//! thread forwards for all pairs.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Barrier, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use aws_lc_rs::rand;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustls::pki_types::CertificateDer;

use crate::link::normalised;
use crate::link::rendezvous::client::{ID_LEN, KEY_LEN, Message, REGISTRATION_LEN, Registration, Ticket};
use crate::link::sealed::handshake::{BYTES_MAX, Channel, HandshakeError, Patient};
use crate::link::socket::buffers;
use crate::link::socket::udp::dont_fragment;
use crate::stats::{DiscardReason, PortStats};

/// How long a host waits for the other one. A handshake has 5 s in all.
const WAIT: Duration = Duration::from_millis(3500);
/// How long two connections are joined: their handshake has 5 s.
const JOINED_MAX: Duration = Duration::from_secs(6);
/// A pair ends when neither side has registered for so long.
const IDLE: Duration = Duration::from_secs(60);
/// How often the forwarder looks for pairs that came or went.
const LOOK: Duration = Duration::from_millis(100);
/// Datagrams of a pair that are forwarded before the others have their turn.
const BURST: usize = 64;
/// Hosts of a pair that may be here at a time, waiting or joined.
const GUESTS_PER_PAIR: usize = 3;

/// One host of a pair.
#[derive(Default)]
struct Side {
    id: [u8; ID_LEN],
    key: [u8; KEY_LEN],
    /// The number of its last registration.
    number: u64,
    /// From where it registered, and when.
    at: Option<(SocketAddr, Instant)>,
    /// Its certificate, and those up to its authority.
    chain: Vec<CertificateDer<'static>>,
}

/// Two hosts that meet here. Names in lower case, in order.
struct Pair {
    names: [String; 2],
    socket: UdpSocket,
    port: u16,
    sides: Mutex<[Side; 2]>,
    waiting: Mutex<Option<Waiting>>,
    guests: AtomicUsize,
    made: Instant,
}

/// Who has come first.
struct Waiting {
    /// Tells it from others of its side.
    number: u64,
    side: usize,
    stream: TcpStream,
    /// By which the other one's connection is given to it.
    give: Sender<Met>,
}

/// The other one's connection, and what both wait at until each was told.
struct Met {
    stream: TcpStream,
    told: Arc<Barrier>,
}

/// A host that has proved who it is, and wants to meet another.
pub(in crate::link) struct Guest {
    pub(in crate::link) channel: Channel<TcpStream>,
    pub(in crate::link) chain: Vec<CertificateDer<'static>>,
    pub(in crate::link) name: String,
    pub(in crate::link) wanted: String,
}

struct Shared {
    listen: SocketAddr,
    pairs_max: u16,
    /// What all pairs have got, and sent on; what ended here is of unknown source.
    stats: Arc<PortStats>,
    pairs: Mutex<HashMap<[String; 2], Arc<Pair>>>,
    stopping: AtomicBool,
}

/// What forwards for pairs of other hosts. Dropped, it stops.
pub(in crate::link) struct Meetings {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// What these locks protect is whole at any time.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Meetings {
    /// Up to `pairs_max` pairs, at the UDP ports from that of `first` on (any ports, when that is 0).
    pub(in crate::link) fn start(
        first: SocketAddr,
        pairs_max: u16,
        stats: Arc<PortStats>,
    ) -> io::Result<Meetings> {
        let shared = Arc::new(Shared {
            listen: first,
            pairs_max,
            stats,
            pairs: Mutex::default(),
            stopping: AtomicBool::new(false),
        });
        let forwarding = shared.clone();
        let thread = std::thread::Builder::new()
            .name("meet-forward".into())
            .spawn(move || forwarding.forward_all())?;
        Ok(Meetings { shared, thread: Some(thread) })
    }

    /// Takes care of a guest until he has met the other one, or that has not come. Blocks for [`WAIT`] and [`JOINED_MAX`] at most.
    pub(in crate::link) fn host(&self, guest: Guest) -> Result<(), HandshakeError> {
        self.shared.meet(guest)
    }

    /// Forgets the pairs of hosts of which `keep` says no to the name or the certificate.
    pub(in crate::link) fn retain(&self, keep: impl Fn(&str, &[CertificateDer<'_>]) -> bool) {
        lock(&self.shared.pairs).retain(|names, pair| {
            let sides = lock(&pair.sides);
            names.iter().zip(&*sides).all(|(name, side)| side.chain.is_empty() || keep(name, &side.chain))
        });
    }
}

impl Drop for Meetings {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            self.shared.stopping.store(true, Ordering::Relaxed);
            if thread.join().is_err() {
                tracing::error!("the thread that forwards for other hosts ended in a panic");
            }
        }
    }
}

fn random<const N: usize>() -> Result<[u8; N], HandshakeError> {
    let mut bytes = [0; N];
    rand::fill(&mut bytes).map_err(|_| HandshakeError("the system has no random numbers".into()))?;
    Ok(bytes)
}

impl Shared {
    fn meet(&self, guest: Guest) -> Result<(), HandshakeError> {
        let (name, wanted) = (guest.name.to_ascii_lowercase(), guest.wanted.to_ascii_lowercase());
        let side = usize::from(name > wanted);
        let pair = match self.pair(if side == 0 { [name, wanted] } else { [wanted, name] }) {
            Ok(pair) => pair,
            Err(why) => return refuse(guest.channel, why),
        };
        let met = guest.channel.stream().try_clone().map_err(lost).and_then(|own| pair.come(side, own));
        let result = match met {
            Ok(Some(met)) => pair.introduce(side, guest, met),
            Ok(None) => refuse(guest.channel, format!("{} has not come", pair.names[1 - side])),
            Err(why) => Err(why),
        };
        pair.guests.fetch_sub(1, Ordering::Relaxed);
        self.forget_unmet(&pair);
        result
    }

    /// Ends a pair that has never met and that nobody waits in: another may need its place.
    fn forget_unmet(&self, pair: &Arc<Pair>) {
        let mut pairs = lock(&self.pairs);
        let unmet = lock(&pair.sides).iter().all(|side| side.chain.is_empty());
        if unmet && pair.guests.load(Ordering::Relaxed) == 0 {
            // The same one, not its successor.
            pairs.retain(|_, other| !Arc::ptr_eq(other, pair));
        }
    }

    /// The pair of these hosts, made when there is none, with one more guest: as long as it has any it does not end.
    fn pair(&self, names: [String; 2]) -> Result<Arc<Pair>, String> {
        let mut pairs = lock(&self.pairs);
        if let Some(pair) = pairs.get(&names) {
            if pair.guests.fetch_add(1, Ordering::Relaxed) >= GUESTS_PER_PAIR {
                pair.guests.fetch_sub(1, Ordering::Relaxed);
                return Err("too many connections of these two wait here".into());
            }
            return Ok(pair.clone());
        }
        if pairs.len() >= usize::from(self.pairs_max) {
            return Err(format!("{} pairs of hosts meet here, and more there cannot be", pairs.len()));
        }
        let ports = 0..if self.listen.port() == 0 { 1 } else { self.pairs_max };
        let mut sockets = ports.filter_map(|offset| {
            let port = self.listen.port().checked_add(offset)?;
            let taken = port != 0 && pairs.values().any(|pair| pair.port == port);
            let socket = (!taken).then(|| UdpSocket::bind((self.listen.ip(), port)).ok())??;
            let port = socket.local_addr().ok()?.port();
            socket.set_nonblocking(true).ok()?;
            let bytes = buffers::buffer_bytes(buffers::ASSUMED_MBPS);
            rustix::net::sockopt::set_socket_recv_buffer_size(&socket, bytes).ok()?;
            // The two find out what the whole path takes: a fragment that this host makes would hide it.
            dont_fragment(&socket, self.listen.is_ipv6(), true).ok()?;
            Some((socket, port))
        });
        let (socket, port) = sockets.next().ok_or("no UDP port is free here for another pair of hosts")?;
        let (sides, waiting) = (Mutex::default(), Mutex::default());
        tracing::info!("{} and {} meet by this host, UDP port {port}", names[0], names[1]);
        let made = Instant::now();
        let guests = AtomicUsize::new(1);
        let pair = Arc::new(Pair { names: names.clone(), socket, port, sides, waiting, guests, made });
        pairs.insert(names, pair.clone());
        Ok(pair)
    }

    /// The forwarding thread's loop.
    fn forward_all(&self) {
        let mut buffer = vec![0; 65_536];
        let timeout = Timespec { tv_sec: 0, tv_nsec: LOOK.as_nanos() as i64 };
        while !self.stopping.load(Ordering::Relaxed) {
            let pairs: Vec<Arc<Pair>> = {
                let mut pairs = lock(&self.pairs);
                pairs.retain(|_, pair| pair.is_used());
                pairs.values().cloned().collect()
            };
            let mut fds: Vec<_> = pairs
                .iter()
                .map(|pair| PollFd::from_borrowed_fd(pair.socket.as_fd(), PollFlags::IN))
                .collect();
            if !matches!(poll(&mut fds, Some(&timeout)), Ok(1..)) {
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

/// Says no.
fn refuse(mut channel: Channel<TcpStream>, why: String) -> Result<(), HandshakeError> {
    let _ = channel.send_bytes(&Message::Refuse(why.clone()).to_bytes());
    channel.close();
    Err(HandshakeError(why))
}

/// Copies what comes by `from` to `to`, within bounds of time and bytes, and then ends both. The other direction is another thread's.
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
    // What has been sent arrives all the same.
    let _ = to.shutdown(std::net::Shutdown::Write);
}

impl Pair {
    /// Tells a host how it is forwarded for, and joins its connection with the other one's.
    fn introduce(&self, side: usize, guest: Guest, met: Met) -> Result<(), HandshakeError> {
        let Guest { mut channel, chain, .. } = guest;
        // Whatever becomes of this one, the other one waits here, too: nothing may end this thread before.
        let told =
            self.admit(side, chain).and_then(|ticket| channel.send_bytes(&Message::Open(ticket).to_bytes()));
        met.told.wait();
        told?;
        copy(channel.into_stream(), met.stream);
        Ok(())
    }

    /// Gives a side a new ticket.
    fn admit(&self, side: usize, chain: Vec<CertificateDer<'static>>) -> Result<Ticket, HandshakeError> {
        let ticket = Ticket { port: self.port, id: random()?, key: random()? };
        let own = &mut lock(&self.sides)[side];
        (own.id, own.key, own.number, own.chain) = (ticket.id, ticket.key, 0, chain);
        Ok(ticket)
    }

    /// A host has come: it is given the other one's connection, when that waits or comes in time.
    fn come(&self, side: usize, own: TcpStream) -> Result<Option<Met>, HandshakeError> {
        static NUMBERS: AtomicU64 = AtomicU64::new(0);
        let number = NUMBERS.fetch_add(1, Ordering::Relaxed);
        let receive = {
            let mut waiting = lock(&self.waiting);
            if let Some(other) = waiting.take_if(|other| other.side != side) {
                let told = Arc::new(Barrier::new(2));
                // It is there: it does not leave without this lock.
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
        let mut waiting = lock(&self.waiting);
        waiting.take_if(|waiting| waiting.number == number);
        // The other one may have come between the two.
        Ok(receive.try_recv().ok())
    }

    fn is_used(&self) -> bool {
        let sides = lock(&self.sides);
        let last = sides.iter().filter_map(|side| side.at.map(|(_, at)| at)).max();
        let waited_for = self.guests.load(Ordering::Relaxed) > 0;
        let used = waited_for || last.unwrap_or(self.made).elapsed() < IDLE;
        if !used {
            let [one, other] = &self.names;
            tracing::info!("{one} and {other} do not meet by this host any more");
        }
        used
    }

    /// Forwards what is waiting, up to a burst.
    fn forward(&self, buffer: &mut [u8], stats: &PortStats) {
        for _ in 0..BURST {
            let Ok((len, source)) = self.socket.recv_from(buffer) else { return };
            let (datagram, source) = (&buffer[..len], normalised(source));
            let send = |to, bytes: &[u8]| self.socket.send_to(bytes, self.form(to)).is_ok();
            // One that cannot be sent is like one that got lost.
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

    /// Where what comes from `source` goes.
    fn other(&self, source: SocketAddr) -> Option<SocketAddr> {
        let sides = lock(&self.sides);
        let at = |side: usize| sides[side].at.map(|(at, _)| at);
        let from = (0..2).find(|side| at(*side) == Some(source))?;
        at(1 - from)
    }

    /// Takes a registration, and gives its answer, which is as long.
    fn register(
        &self,
        id: [u8; ID_LEN],
        datagram: &[u8],
        source: SocketAddr,
    ) -> Option<[u8; REGISTRATION_LEN]> {
        let mut sides = lock(&self.sides);
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

    /// An address in the form that the socket sends to.
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
