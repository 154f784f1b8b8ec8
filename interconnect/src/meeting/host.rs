//! The daemon's side of the meeting point. It runs in a thread of the daemon.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use chacha20::ChaCha20Rng;
use chacha20::rand_core::{Rng, SeedableRng};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind,
    recvmsg, send, sendmsg, shutdown, socket_with,
};

use super::{Decline, Ends, KeyRequest, Keys, Message, Question, Reach, Request, Token};
use crate::closer::{close, close_or_leak};
use crate::random::random;
use crate::ring::{PASSED_MAX, Provided, provide};

/// Maximum number of processes that are connected at once, of one namespace and in all. A process costs one descriptor.
const PROCESSES_OF_PLACE_MAX: usize = 256;
const PROCESSES_MAX: usize = 4096;
/// Maximum number of rings of one process and in all. A ring costs the daemon one descriptor; its memory is accounted to the processes that
/// touch it.
pub(crate) const RINGS_OF_PROCESS_MAX: usize = 64;
const RINGS_MAX: usize = 4096;
/// Maximum number of requests of one process that are read in a second, so that no process keeps the daemon's thread busy. Others wait
/// in its socket.
const JOINS_PER_S: u32 = 100;
/// Maximum number of engines started in a second: ending one may take milliseconds of the thread that runs all of them.
const ENGINES_PER_S: u32 = 20;
/// Maximum number of questions about peers that are looked into in a second: each enters the process's network namespace. Beyond, processes
/// are told to ask again.
const LOOKUPS_PER_S: u32 = 1000;
const BACKLOG: i32 = 64;

/// Opens the socket in the network namespace of the calling thread.
///
/// # Errors
/// The name is taken.
pub fn listen(name: &str) -> io::Result<OwnedFd> {
    listen_on(socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?, name)
}

/// The same with a Unix socket (`SOCK_SEQPACKET`), in whose network namespace the name is.
///
/// # Errors
/// The name is taken.
pub fn listen_on(socket: OwnedFd, name: &str) -> io::Result<OwnedFd> {
    rustix::io::ioctl_fionbio(&socket, true)?;
    bind(&socket, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket)
}

/// A network namespace with containers' interfaces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Device and inode of the namespace.
    pub id: (u64, u64),
    /// Networks of its interfaces. Processes of two namespaces may meet if both have one of them.
    pub networks: Vec<u32>,
}

impl Place {
    /// Whether processes of the two containers may exchange packets through shared memory, or inside the daemon.
    pub(crate) fn may_meet(&self, other: &Place) -> bool {
        self.id == other.id || self.networks.iter().any(|network| other.networks.contains(network))
    }
}

/// Interrupts the host's wait.
#[derive(Clone)]
pub struct Stopper(Arc<OwnedFd>);

impl Stopper {
    /// From now on `turn` returns at once.
    pub fn stop(&self) {
        let _ = rustix::io::write(&*self.0, &1u64.to_ne_bytes());
    }
}

/// A process, or an engine that the daemon runs for one, which has a connection of its own.
struct Process {
    place: (u64, u64),
    socket: OwnedFd,
    name: Token,
    rings: usize,
    /// Second since the host's start, and number of requests in it.
    joins: (u64, u32),
    /// The daemon's end of the bell of an engine that it runs for the process: shutting it down ends that.
    leash: Option<OwnedFd>,
    /// It got keys.
    has_keys: bool,
    /// An engine's own socket, whose keys nobody else gets.
    engine: Option<SocketAddr>,
}

struct Ring {
    between: [Token; 2],
    /// One end of the socket pair of the two bells: shutting it down ends the ring for both.
    bell: OwnedFd,
}

/// Serves a process of a place, or says why not.
pub type Attach = Box<dyn FnMut(&Place, &Request) -> Result<Ends, Decline> + Send>;

/// Knows how peers are reached, and derives keys for processes of a place.
pub trait Sealer: Send {
    /// How a peer is reached from a place.
    fn reach(&mut self, place: &Place, question: &Question) -> Reach;

    /// Keys of a session between the process `name` of this place and its peer.
    ///
    /// # Errors
    /// How the peer is reached, if not by a sealed link with keys.
    fn keys(&mut self, name: Token, place: &Place, request: &KeyRequest) -> Result<Keys, Reach>;

    /// A process that got keys is gone.
    fn gone(&mut self, name: Token);
}

/// The meeting points of a daemon.
pub struct Host {
    places: Vec<(Place, OwnedFd)>,
    processes: Vec<Process>,
    rings: Vec<Ring>,
    random: ChaCha20Rng,
    start: Instant,
    wake: Stopper,
    is_stopped: bool,
    attach: Option<Attach>,
    sealer: Option<Box<dyn Sealer>>,
    /// Second since the host's start, and number of questions in it.
    looked_up: (u64, u32),
    /// Second since the host's start, and number of engines started in it.
    attached: (u64, u32),
    /// Sockets that wait for the thread that closes them, because a process may have sent descriptors whose close blocks. Meanwhile
    /// nobody gets a connection or a ring, so that they stay few.
    unclosed: Vec<OwnedFd>,
}

/// Index of a polled descriptor.
enum Polled {
    Wake,
    Listener(usize),
    Process(Token),
    Ring(usize),
}

impl Host {
    /// A host without places.
    ///
    /// # Errors
    /// No descriptors or no random numbers.
    pub fn new() -> io::Result<Self> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let random = ChaCha20Rng::from_seed(random()?);
        let (places, processes, rings) = (vec![], vec![], vec![]);
        let (start, wake) = (Instant::now(), Stopper(Arc::new(wake)));
        Ok(Self {
            places,
            processes,
            rings,
            random,
            start,
            wake,
            is_stopped: false,
            attach: None,
            sealer: None,
            looked_up: (0, 0),
            attached: (0, 0),
            unclosed: vec![],
        })
    }

    /// From now on processes learn how peers are reached, and get keys. Before, no link is sealed.
    pub fn seal(&mut self, sealer: Box<dyn Sealer>) {
        self.sealer = Some(sealer);
    }

    /// From now on the daemon runs engines for processes, if `attach` allows it.
    pub fn serve(&mut self, attach: Attach) {
        self.attach = Some(attach);
    }

    /// Ends the engines of processes of all other places.
    pub fn serve_only(&mut self, is_allowed: impl Fn((u64, u64)) -> bool) {
        let mut ended = vec![];
        for process in self.processes.iter_mut().filter(|process| !is_allowed(process.place)) {
            ended.extend(process.leash.take());
        }
        ended.into_iter().for_each(|leash| self.unleash(leash));
    }

    fn unleash(&mut self, leash: OwnedFd) {
        let _ = shutdown(&leash, Shutdown::Both);
        self.discard(leash);
    }

    /// Interrupts `turn`, from any thread.
    pub fn stopper(&self) -> Stopper {
        self.wake.clone()
    }

    /// Whether `turn` was interrupted for good.
    pub fn is_stopped(&self) -> bool {
        self.is_stopped
    }

    /// Number of rings.
    pub fn rings(&self) -> usize {
        self.rings.len()
    }

    /// Makes the places those of `wanted`. `open` opens the socket of a new one, or returns `None`, and then is called again the next time.
    /// Rings between places that may not meet any more end.
    pub fn set_places(&mut self, wanted: &[Place], mut open: impl FnMut(&Place) -> Option<OwnedFd>) {
        let is_wanted = |id: (u64, u64)| wanted.iter().any(|place| place.id == id);
        for (_, listener) in self.places.extract_if(.., |(place, _)| !is_wanted(place.id)).collect::<Vec<_>>()
        {
            self.discard(listener);
        }
        let gone: Vec<Token> =
            self.processes.iter().filter(|process| !is_wanted(process.place)).map(|p| p.name).collect();
        gone.into_iter().for_each(|name| self.disconnect(name));
        for place in wanted {
            match self.places.iter_mut().find(|(known, _)| known.id == place.id) {
                Some((known, _)) => known.networks.clone_from(&place.networks),
                None => self.places.extend(open(place).map(|listener| (place.clone(), listener))),
            }
        }
        let ended: Vec<usize> = (0..self.rings.len())
            .rev()
            .filter(|ring| {
                let [a, b] = self.rings[*ring].between;
                !self.may_meet(a, b)
            })
            .collect();
        ended.into_iter().for_each(|ring| self.end(ring));
    }

    fn process(&mut self, name: Token) -> Option<&mut Process> {
        self.processes.iter_mut().find(|process| process.name == name)
    }

    fn place_of(&self, name: Token) -> Option<&Place> {
        let process = self.processes.iter().find(|process| process.name == name)?;
        self.places.iter().map(|(place, _)| place).find(|place| place.id == process.place)
    }

    fn may_meet(&self, a: Token, b: Token) -> bool {
        let places = self.place_of(a).zip(self.place_of(b));
        a != b && places.is_some_and(|(a, b)| a.may_meet(b))
    }

    /// Ends a ring: both processes find their bells closed.
    fn end(&mut self, ring: usize) {
        let Ring { between, bell } = self.rings.swap_remove(ring);
        let _ = shutdown(&bell, Shutdown::Both);
        self.discard(bell);
        for name in between {
            if let Some(process) = self.process(name) {
                process.rings -= 1;
            }
        }
    }

    /// Closes a descriptor without waiting.
    fn discard(&mut self, descriptor: OwnedFd) {
        self.unclosed.extend(close(descriptor).err());
    }

    fn disconnect(&mut self, name: Token) {
        if let Some(place) = self.processes.iter().position(|process| process.name == name) {
            let process = self.processes.swap_remove(place);
            // Now, even if closing it takes long.
            let _ = shutdown(&process.socket, Shutdown::Both);
            self.discard(process.socket);
            process.leash.into_iter().for_each(|leash| self.unleash(leash));
            if let Some(sealer) = self.sealer.as_mut().filter(|_| process.has_keys) {
                sealer.gone(name);
            }
        }
        while let Some(ring) = self.rings.iter().position(|ring| ring.between.contains(&name)) {
            self.end(ring);
        }
    }

    /// Waits for one event, at most this long (a second or so), and handles all that have happened.
    ///
    /// # Errors
    /// The kernel cannot wait.
    pub fn turn(&mut self, timeout: Duration) -> io::Result<()> {
        for descriptor in std::mem::take(&mut self.unclosed) {
            self.discard(descriptor);
        }
        let mut kinds = vec![Polled::Wake];
        let mut polled = vec![PollFd::new(&*self.wake.0, PollFlags::IN)];
        let takes_more = |(_, (place, _)): &(usize, &(Place, OwnedFd))| self.takes_more(place.id);
        for (index, (_, listener)) in self.places.iter().enumerate().filter(takes_more) {
            kinds.push(Polled::Listener(index));
            polled.push(PollFd::new(listener, PollFlags::IN));
        }
        let second = self.start.elapsed().as_secs();
        for process in self.processes.iter().filter(|process| process.joins != (second, JOINS_PER_S)) {
            kinds.push(Polled::Process(process.name));
            polled.push(PollFd::new(&process.socket, PollFlags::IN));
        }
        for (index, ring) in self.rings.iter().enumerate() {
            kinds.push(Polled::Ring(index));
            // Only the end of both processes' sockets, which is always reported.
            polled.push(PollFd::new(&ring.bell, PollFlags::empty()));
        }
        let time = Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: timeout.subsec_nanos().into() };
        match poll(&mut polled, Some(&time)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let happened: Vec<bool> = polled.iter().map(|polled| !polled.revents().is_empty()).collect();
        // From the last to the first, because ending a ring moves later ones.
        for (kind, _) in kinds.iter().zip(happened).rev().filter(|(_, happened)| *happened) {
            match *kind {
                Polled::Wake => self.is_stopped = true,
                Polled::Listener(index) => self.accept(index),
                Polled::Process(name) => self.listen_to(name),
                Polled::Ring(index) => self.end(index),
            }
        }
        Ok(())
    }

    fn accept(&mut self, index: usize) {
        let (place, listener) = &self.places[index];
        let id = place.id;
        let Ok(socket) = accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) else { return };
        let name = self.token();
        if say(&socket, Message::Named(name), &[]) {
            self.enter(id, socket, name, None);
        } else {
            self.discard(socket);
        }
    }

    fn token(&mut self) -> Token {
        let mut token = Token::default();
        self.random.fill_bytes(&mut token);
        token
    }

    fn enter(&mut self, place: (u64, u64), socket: OwnedFd, name: Token, engine: Option<SocketAddr>) {
        let (rings, joins, leash, has_keys) = (0, (0, 0), None, false);
        self.processes.push(Process { place, socket, name, rings, joins, leash, has_keys, engine });
    }

    /// Whether an engine of the daemon has a process's address. Processes of its container see the packets with which it makes keys,
    /// and could ask for the same.
    fn is_engines(&self, name: Token, own: SocketAddr) -> bool {
        let place = self.processes.iter().find(|process| process.name == name).map(|process| process.place);
        let is_same = |ip: IpAddr| ip == own.ip() || ip.is_unspecified() || own.ip().is_unspecified();
        let has = |at: SocketAddr| at.port() == own.port() && is_same(at.ip());
        let mut others =
            self.processes.iter().filter(|other| other.name != name && Some(other.place) == place);
        others.any(|other| other.engine.is_some_and(has))
    }

    /// Whether another process of a place may connect. Others wait in the listener's queue.
    fn takes_more(&self, place: (u64, u64)) -> bool {
        let of_place = self.processes.iter().filter(|process| process.place == place).count();
        self.unclosed.is_empty() && self.processes.len() < PROCESSES_MAX && of_place < PROCESSES_OF_PLACE_MAX
    }

    fn listen_to(&mut self, name: Token) {
        let second = self.start.elapsed().as_secs();
        let Some(process) = self.process(name) else { return };
        let mut bytes = [0; Message::BYTES_MAX];
        // Without room for descriptors the kernel would close them in this thread.
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(PASSED_MAX))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let vector = &mut [IoSliceMut::new(&mut bytes)];
        let message = match recvmsg(&process.socket, vector, &mut control, flags) {
            Ok(received) => Message::decode(&bytes[..received.bytes]),
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return,
            Err(_) => None,
        };
        let mut passed: Vec<OwnedFd> = vec![];
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                passed.extend(descriptors);
            }
        }
        let is_hostile = !passed.is_empty();
        passed.into_iter().for_each(|descriptor| self.discard(descriptor));
        let Some(process) = self.process(name) else { return };
        let joins = if process.joins.0 == second { process.joins.1 + 1 } else { 1 };
        process.joins = (second, joins);
        let (named, secret) = match message.filter(|_| !is_hostile) {
            Some(Message::Join(named, secret)) => (named, secret),
            Some(Message::Attach(request)) if process.leash.is_none() => return self.answer(name, &request),
            Some(Message::Reach(question)) => {
                let reach = self.look_up(name, |sealer, place| sealer.reach(place, &question));
                return self.tell(name, Message::Reached(question.peer, reach));
            }
            Some(Message::Key(request)) => {
                let mut keys = None;
                if self.is_engines(name, request.between.own) {
                    return self.tell(name, Message::Keys(request.ticket, Err(Reach::NotYet)));
                }
                let reach = self.look_up(name, |sealer, place| match sealer.keys(name, place, &request) {
                    Ok(found) => {
                        keys = Some(found);
                        Reach::Sealed
                    }
                    // Only keys say that.
                    Err(Reach::Sealed) => Reach::NotYet,
                    Err(reach) => reach,
                });
                if let Some(process) = self.process(name) {
                    process.has_keys |= keys.is_some();
                }
                return self.tell(name, Message::Keys(request.ticket, keys.ok_or(reach)));
            }
            _ => return self.disconnect(name),
        };
        if !self.join([name, named], secret)
            && let Some(process) = self.process(name)
        {
            say(&process.socket, Message::Absent(secret), &[]);
        }
    }

    fn tell(&mut self, name: Token, message: Message) {
        if let Some(process) = self.process(name) {
            say(&process.socket, message, &[]);
        }
    }

    /// Looks into a question of a process about a peer.
    fn look_up(&mut self, name: Token, ask: impl FnOnce(&mut dyn Sealer, &Place) -> Reach) -> Reach {
        let second = self.start.elapsed().as_secs();
        let looked_up = if self.looked_up.0 == second { self.looked_up.1 } else { 0 };
        let place = self.place_of(name).cloned();
        let Some(sealer) = &mut self.sealer else { return Reach::AllClear };
        let Some(place) = place else { return Reach::NotYet };
        if looked_up >= LOOKUPS_PER_S {
            return Reach::NotYet;
        }
        self.looked_up = (second, looked_up + 1);
        ask(sealer.as_mut(), &place)
    }

    /// Answers a process that wants the daemon to run its engine.
    fn answer(&mut self, name: Token, request: &Request) {
        let second = self.start.elapsed().as_secs();
        let started = if self.attached.0 == second { self.attached.1 } else { 0 };
        let place = self.place_of(name).cloned();
        let attached = match (place, &mut self.attach) {
            _ if started >= ENGINES_PER_S || !self.unclosed.is_empty() => Err(Decline::TooMany),
            (Some(place), Some(attach)) => attach(&place, request),
            _ => Err(Decline::NotAllowed),
        };
        self.attached = (second, started + u32::from(attached.is_ok()));
        let Some(process) = self.process(name) else { return };
        match attached {
            Err(why) => _ = say(&process.socket, Message::Declined(why), &[]),
            Ok(Ends { address, memory, bell, leash, questions }) => {
                let (message, place) = (Message::Attached(address), process.place);
                process.leash = Some(leash);
                if let Some(questions) = questions {
                    let own = self.token();
                    self.enter(place, questions, own, Some(address));
                }
                let Some(process) = self.process(name) else { return };
                if !say(&process.socket, message, &[memory.as_fd(), bell.as_fd()]) {
                    self.disconnect(name);
                }
            }
        }
    }

    /// Gives the two processes a ring. Returns false if they may not have one, or if there are too many.
    fn join(&mut self, between: [Token; 2], secret: Token) -> bool {
        let [joining, named] = between;
        let is_full = |process: Option<&mut Process>| {
            process.is_none_or(|process| process.rings >= RINGS_OF_PROCESS_MAX)
        };
        if !self.may_meet(joining, named)
            || !self.unclosed.is_empty()
            || self.rings.len() >= RINGS_MAX
            || is_full(self.process(joining))
            || is_full(self.process(named))
        {
            return false;
        }
        let Ok(Provided { memory, bells }) = provide() else { return false };
        for (name, side) in [(named, 1), (joining, 0)] {
            let bell = &bells[usize::from(side)];
            let ring = Message::Ring { side, secret };
            let is_told = self
                .process(name)
                .is_some_and(|process| say(&process.socket, ring, &[memory.as_fd(), bell.as_fd()]));
            if !is_told {
                // The other one may have its end already.
                let _ = shutdown(&bells[0], Shutdown::Both);
                return false;
            }
        }
        for name in between {
            if let Some(process) = self.process(name) {
                process.rings += 1;
            }
        }
        let [bell, _] = bells;
        self.rings.push(Ring { between, bell });
        true
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let listeners = self.places.drain(..).map(|(_, listener)| listener);
        let processes = self.processes.drain(..).flat_map(|process| [Some(process.socket), process.leash]);
        let processes = processes.flatten();
        let bells = self.rings.drain(..).map(|ring| ring.bell);
        for socket in listeners.chain(processes).chain(bells).chain(self.unclosed.drain(..)) {
            let _ = shutdown(&socket, Shutdown::Both);
            close_or_leak(socket);
        }
    }
}

/// Sends a message with descriptors. Returns false if the process does not read its messages or has gone.
fn say(socket: &OwnedFd, message: Message, descriptors: &[std::os::fd::BorrowedFd<'_>]) -> bool {
    let (bytes, len) = message.encode();
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    if descriptors.is_empty() {
        return send(socket, &bytes[..len], flags).is_ok();
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(descriptors))
        && sendmsg(socket, &[IoSlice::new(&bytes[..len])], &mut control, flags).is_ok()
}
