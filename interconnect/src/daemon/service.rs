//! The daemon's thread that runs the engines of all processes it serves, in a room (`room.rs`).
//!
//! The thread polls for a moment after the last work, then sleeps on all sockets and bells.

use std::collections::HashMap;
use std::io;
use std::net::UdpSocket;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use rustix::event::{EventfdFlags, eventfd};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use super::carrier::{Carrier, GuestPort};
use super::lent::{Inbox as Lendings, Lent};
use super::queue::{self, Queues};
use super::room::{ContainerCounters, ContainerId, Note, Room};
use super::seals::Seals;
use super::served::Served;
use super::translation::{Budget, Total};
use crate::closer::is_behind;
use crate::meeting::{Ends, Guest, Place, Token};
use crate::node::socket::Socket;
use crate::proto::{Config, ShareSettings};
use crate::random::random;

/// Maximum number of processes served at once, in all and of one container. One takes up to 16 MiB of socket buffers and about 40 MiB of
/// tables and kept messages if it is hostile.
pub const SERVED_MAX: usize = 32;
const SERVED_OF_CONTAINER_MAX: usize = 8;
/// Maximum number of lines that wait for the daemon's log.
const NOTES_MAX: usize = 64;
/// How long the thread polls after the last work.
const SPIN_NS: u64 = 50_000;
/// Interval at which counters are published while there is work.
const PUBLISH_EVERY_NS: u64 = 100_000_000;

#[derive(Default)]
struct Inbox {
    new: Vec<New>,
    shares: Vec<(ContainerId, ShareSettings)>,
    places: Option<Vec<Place>>,
}

struct Common {
    inbox: Mutex<Inbox>,
    has_news: AtomicBool,
    is_stopped: AtomicBool,
    wake: OwnedFd,
    report: Mutex<Vec<ContainerCounters>>,
    notes: Mutex<Vec<Note>>,
    /// Number of processes served, by container.
    served: Mutex<HashMap<ContainerId, usize>>,
    /// Places of the configuration, as the thread knows them.
    places: Mutex<Vec<Place>>,
    memory_max: u64,
    memory: Arc<Total>,
}

impl Common {
    /// Processes of these containers have gone.
    fn forget(&self, ended: &[ContainerId]) {
        if ended.is_empty() {
            return;
        }
        let mut served = self.served.lock();
        for id in ended {
            served.entry(*id).and_modify(|count| *count -= 1);
        }
        served.retain(|_, count| *count > 0);
    }

    fn tell(&self) {
        self.has_news.store(true, Ordering::Release);
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }
}

/// The running thread. Clones refer to the same one.
#[derive(Clone)]
pub struct Service {
    common: Arc<Common>,
    thread: Arc<Mutex<Option<JoinHandle<()>>>>,
}

impl Service {
    /// Starts the thread. It sleeps until a process is served. The registered memory of a container is at most `memory_max` bytes, that of
    /// all together at most `total_max`.
    ///
    /// # Errors
    /// No descriptors or no thread.
    pub fn start(memory_max: u64, total_max: u64) -> io::Result<Self> {
        let common = Arc::new(Common {
            inbox: Mutex::default(),
            has_news: AtomicBool::new(false),
            is_stopped: AtomicBool::new(false),
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            report: Mutex::default(),
            notes: Mutex::default(),
            served: Mutex::default(),
            places: Mutex::default(),
            memory_max,
            memory: Arc::new(Total { bytes_max: total_max, bytes: AtomicU64::new(0) }),
        });
        let shared = Arc::clone(&common);
        let thread = std::thread::Builder::new().name("interconnect".into()).spawn(move || run(&shared))?;
        Ok(Self { common, thread: Arc::new(Mutex::new(Some(thread))) })
    }

    /// Ends the thread and all attachments.
    pub fn stop(&self) {
        self.common.is_stopped.store(true, Ordering::Release);
        self.common.tell();
        if let Some(thread) = self.thread.lock().take() {
            let _ = thread.join();
        }
    }

    /// Serves a process of this container by `socket`, which is bound in the container's network namespace.
    ///
    /// # Errors
    /// Too many processes (`QuotaExceeded`), or no memory or descriptors.
    pub fn attach(
        &self,
        id: ContainerId,
        settings: ShareSettings,
        socket: UdpSocket,
        limits: Config,
    ) -> io::Result<Ends> {
        let (daemon, questions) = connection()?;
        self.admit(id, settings, || {
            let (ends, served) = provide(socket, limits, None, Some(Guest::on(daemon)))?;
            Ok((Ends { questions: Some(questions), ..ends }, served))
        })
    }

    /// Serves a process in a virtual machine, whose queues lie in memory that the machine has lent, and whose packets take its interface. Later
    /// memory comes by `lendings`; the bell is rung for it.
    ///
    /// # Errors
    /// As `attach`.
    pub(crate) fn attach_guest(
        &self,
        (id, settings): (ContainerId, ShareSettings),
        port: GuestPort,
        limits: Config,
        queues: Arc<dyn Lent>,
        lendings: Arc<Lendings>,
    ) -> io::Result<GuestEnds> {
        self.admit(id, settings, || {
            let queues = Queues::of_daemon_in(queues)?;
            let ((bell, own, leash), (daemon, questions)) = (bell()?, connection()?);
            let seals = Seals::new(port.address(), Some(Guest::on(daemon)), random()?);
            let carrier = Carrier::Guest(Box::new(port));
            let served = Served::new(queues, own, (carrier, seals, Some(lendings)), limits, life()?);
            Ok((GuestEnds { bell, leash, questions }, served))
        })
    }

    fn admit<T>(
        &self,
        id: ContainerId,
        settings: ShareSettings,
        provide: impl FnOnce() -> io::Result<(T, Served)>,
    ) -> io::Result<T> {
        let mut counts = self.common.served.lock();
        let of_container = counts.get(&id).copied().unwrap_or(0);
        // What a process passes and nobody closes must stay little.
        if is_behind()
            || of_container >= SERVED_OF_CONTAINER_MAX
            || counts.values().sum::<usize>() >= SERVED_MAX
        {
            return Err(io::ErrorKind::QuotaExceeded.into());
        }
        let (ends, served) = provide()?;
        counts.insert(id, of_container + 1);
        self.common.inbox.lock().new.push(New { id, settings, served });
        self.common.tell();
        Ok(ends)
    }

    /// Changes the shares of containers.
    pub fn set_shares(&self, shares: Vec<(ContainerId, ShareSettings)>) {
        // Without a process there is nothing to change, and nobody to wake.
        if !self.common.served.lock().is_empty() {
            self.common.inbox.lock().shares = shares;
            self.common.tell();
        }
    }

    /// Sets the networks of containers and virtual machines: processes of two of them with a common one exchange packets without the network
    /// from now on, others do not any more. Processes of one container or machine always may.
    pub fn set_places(&self, places: &[Place]) {
        let mut known = self.common.places.lock();
        if *known != places {
            places.clone_into(&mut known);
            self.common.inbox.lock().places = Some(places.to_vec());
            self.common.tell();
        }
    }

    /// Warnings since the last call: why packets of a container were not sent. At most 16 for each container, ever.
    pub fn take_notes(&self) -> Vec<Note> {
        std::mem::take(&mut *self.common.notes.lock())
    }

    /// Counters of the containers that have been served.
    pub fn counters(&self) -> Vec<ContainerCounters> {
        self.common.report.lock().clone()
    }
}

/// Creates what a process and the daemon need. With `lendings`, the process's memory comes that way. The engine asks `daemon` which packets
/// to seal.
pub(super) fn provide(
    socket: UdpSocket,
    limits: Config,
    lendings: Option<Arc<Lendings>>,
    daemon: Option<Guest>,
) -> io::Result<(Ends, Served)> {
    // A full socket must not hold up the other processes: its packets count as lost.
    socket.set_nonblocking(true)?;
    let address = socket.local_addr()?;
    let memory = queue::provide()?;
    let queues = Queues::of_daemon(memory.try_clone()?)?;
    let (bell, own, leash) = bell()?;
    let carrier = Carrier::Socket(Box::new(Socket::new(socket)?));
    let seals = Seals::new(address, daemon, random()?);
    let served = Served::new(queues, own, (carrier, seals, lendings), limits, life()?);
    Ok((Ends { address, memory, bell, leash, questions: None }, served))
}

struct New {
    id: ContainerId,
    settings: ShareSettings,
    served: Served,
}

/// What the daemon keeps of a process in a virtual machine: both speak for it.
pub(crate) struct GuestEnds {
    /// The process's end of the bell.
    pub(crate) bell: OwnedFd,
    /// The engine's end: shutting it down ends the attachment.
    pub(crate) leash: OwnedFd,
    /// The other end of the socket pair by which the engine asks about peers and for keys.
    pub(crate) questions: OwnedFd,
}

/// A bell: the process's end, the engine's, and the engine's once more.
fn bell() -> io::Result<(OwnedFd, OwnedFd, OwnedFd)> {
    let (bell, own) = connection()?;
    let leash = own.try_clone()?;
    Ok((bell, own, leash))
}

fn connection() -> io::Result<(OwnedFd, OwnedFd)> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?)
}

/// Epoch, seed and name of a new engine.
fn life() -> io::Result<(u64, [u8; 32], Token)> {
    let epoch = SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |since| since.as_nanos() as u64);
    let [seed, name] = [random()?, random()?];
    Ok((epoch, seed, std::array::from_fn(|place| name[place])))
}

fn run(common: &Common) {
    let mut room = Room::new();
    let (mut busy_until, mut publish_at) = (0, 0);
    loop {
        if common.has_news.swap(false, Ordering::AcqRel) {
            take(&mut room, common);
        }
        // After the news: `take` may have read the wake-up of `stop`, which sets this before.
        if common.is_stopped.load(Ordering::Acquire) {
            break;
        }
        let now = room.now();
        let (worked, ended) = room.turn(now);
        common.forget(&ended);
        if !ended.is_empty() || now >= publish_at {
            publish(&mut room, common);
            publish_at = now + PUBLISH_EVERY_NS;
        }
        if worked {
            busy_until = now + SPIN_NS;
        } else if now < busy_until {
            std::hint::spin_loop();
        } else {
            publish(&mut room, common);
            room.sleep(&common.wake);
        }
    }
    room.say_goodbye();
}

/// Takes new processes and changed settings.
fn take(room: &mut Room, common: &Common) {
    // Lowered before the inbox is read, so that what comes later wakes the thread again.
    let _ = rustix::io::read(&common.wake, &mut [0; 8]);
    let Inbox { new, shares, places } = std::mem::take(&mut *common.inbox.lock());
    places.into_iter().for_each(|places| room.set_places(places));
    for New { id, settings, served } in new {
        let budget = Budget::new(common.memory_max, Arc::clone(&common.memory));
        room.add(id, settings, served, budget);
    }
    room.set_shares(&shares);
}

fn publish(room: &mut Room, common: &Common) {
    *common.report.lock() = room.report();
    let new = room.take_notes();
    if !new.is_empty() {
        let mut notes = common.notes.lock();
        notes.extend(new);
        notes.truncate(NOTES_MAX);
    }
}
