//! The daemon's thread that runs the engines of all processes it serves.
//!
//! Containers take turns: the heaviest first, each with as many bytes as its weight and its rate allow. A container's processes take turns
//! within its share. The thread polls for a moment after the last work, then sleeps on all sockets and bells.

use std::collections::HashMap;
use std::io;
use std::net::UdpSocket;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use super::carrier::{Carrier, GuestPort};
use super::lent::{Inbox as Lendings, Lent};
use super::queue::{self, Queues};
use super::served::{Counts, End, Served};
use super::translation::{Budget, Total};
use crate::closer::is_behind;
use crate::meeting::Ends;
use crate::node::socket::Socket;
use crate::proto::share::Share;
use crate::proto::{Config, ShareSettings};
use crate::random::random;

/// Maximum number of processes served at once, in all and of one container. One takes up to 16 MiB of socket buffers and about 40 MiB of
/// tables and kept messages if it is hostile.
pub const SERVED_MAX: usize = 32;
const SERVED_OF_CONTAINER_MAX: usize = 8;
/// Containers whose counters are kept. Beyond, those without processes are forgotten.
const CONTAINERS_MAX: usize = 256;
/// How long the thread polls after the last work.
const SPIN_NS: u64 = 50_000;
/// Interval at which counters are published while there is work.
const PUBLISH_EVERY_NS: u64 = 100_000_000;
/// Longest sleep: peers that have gone silent are noticed by timers.
const SLEEP_MAX_NS: u64 = 1_000_000_000;

/// Identity of a container: device and inode of its network namespace.
pub type ContainerId = (u64, u64);

/// Counters of a container.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ContainerCounters {
    /// Which container.
    pub id: ContainerId,
    /// Processes served now.
    pub processes: u64,
    /// Their open endpoints.
    pub endpoints: u64,
    /// Mappings of registered memory.
    pub mappings: u64,
    /// Bytes of registered memory.
    pub mapped_bytes: u64,
    /// Submissions taken.
    pub submissions: u64,
    /// Submissions with an address outside the registered memory, and memory that was not mapped.
    pub refused: u64,
    /// Processes that were cut off because they wrote nonsense.
    pub broken: u64,
    /// Packets sent.
    pub packets_out: u64,
    /// Bytes of packets sent.
    pub bytes_out: u64,
    /// Packets received.
    pub packets_in: u64,
    /// Turns that ended because the rate was used up.
    pub throttled: u64,
    /// How often the rate limit of an endpoint began to hold packets back.
    pub held_back: u64,
}

struct Container {
    share: Share,
    budget: Budget,
    served: Vec<Served>,
    /// Process that begins the next turn.
    next: usize,
    counters: ContainerCounters,
}

struct New {
    id: ContainerId,
    settings: ShareSettings,
    served: Served,
}

#[derive(Default)]
struct Inbox {
    new: Vec<New>,
    shares: Vec<(ContainerId, ShareSettings)>,
}

struct Common {
    inbox: Mutex<Inbox>,
    has_news: AtomicBool,
    is_stopped: AtomicBool,
    wake: OwnedFd,
    report: Mutex<Vec<ContainerCounters>>,
    /// Number of processes served, by container.
    served: Mutex<HashMap<ContainerId, usize>>,
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
            served: Mutex::default(),
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
        self.admit(id, settings, || provide(socket, limits))
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
            let (bell, own, leash) = bell()?;
            let served =
                Served::new(queues, own, (Carrier::Guest(Box::new(port)), Some(lendings)), limits, life()?);
            Ok((GuestEnds { bell, leash }, served))
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

    /// Counters of the containers that have been served.
    pub fn counters(&self) -> Vec<ContainerCounters> {
        self.common.report.lock().clone()
    }
}

/// Creates what a process and the daemon need.
pub(super) fn provide(socket: UdpSocket, limits: Config) -> io::Result<(Ends, Served)> {
    // A full socket must not hold up the other processes: its packets count as lost.
    socket.set_nonblocking(true)?;
    let address = socket.local_addr()?;
    let memory = queue::provide()?;
    let queues = Queues::of_daemon(memory.try_clone()?)?;
    let (bell, own, leash) = bell()?;
    let carrier = Carrier::Socket(Box::new(Socket::new(socket)?));
    let served = Served::new(queues, own, (carrier, None), limits, life()?);
    Ok((Ends { address, memory, bell, leash }, served))
}

/// What the daemon keeps of a process in a virtual machine: both speak for it.
pub(crate) struct GuestEnds {
    /// The process's end of the bell.
    pub(crate) bell: OwnedFd,
    /// The engine's end: shutting it down ends the attachment.
    pub(crate) leash: OwnedFd,
}

/// A bell: the process's end, the engine's, and the engine's once more.
fn bell() -> io::Result<(OwnedFd, OwnedFd, OwnedFd)> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (bell, own) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    let leash = own.try_clone()?;
    Ok((bell, own, leash))
}

/// Epoch and seed of a new engine.
fn life() -> io::Result<(u64, [u8; 32])> {
    let epoch = SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |since| since.as_nanos() as u64);
    Ok((epoch, random()?))
}

/// All containers, and the clock.
pub(super) struct Room {
    containers: Vec<Container>,
    start: Instant,
    publish_at: u64,
}

fn run(common: &Common) {
    let mut room = Room::new();
    let mut busy_until = 0;
    loop {
        if common.has_news.swap(false, Ordering::AcqRel) {
            room.take(common);
        }
        // After the news: `take` may have read the wake-up of `stop`, which sets this before.
        if common.is_stopped.load(Ordering::Acquire) {
            break;
        }
        let now = room.now();
        let (worked, ended) = room.turn(now);
        common.forget(&ended);
        if !ended.is_empty() || now >= room.publish_at {
            room.publish(common, now);
        }
        if worked {
            busy_until = now + SPIN_NS;
        } else if now < busy_until {
            std::hint::spin_loop();
        } else {
            room.publish(common, now);
            room.sleep(common);
        }
    }
    let now = room.now();
    room.containers.iter_mut().flat_map(|container| &mut container.served).for_each(|s| s.say_goodbye(now));
}

impl Room {
    pub(super) fn new() -> Self {
        Self { containers: vec![], start: Instant::now(), publish_at: 0 }
    }

    fn now(&self) -> u64 {
        self.start.elapsed().as_nanos() as u64 + 1
    }

    /// Takes new processes and changed shares.
    fn take(&mut self, common: &Common) {
        // Lowered before the inbox is read, so that what comes later wakes the thread again.
        let _ = rustix::io::read(&common.wake, &mut [0; 8]);
        let Inbox { new, shares } = std::mem::take(&mut *common.inbox.lock());
        if self.containers.len() >= CONTAINERS_MAX {
            self.containers.retain(|container| !container.served.is_empty());
        }
        for New { id, settings, served } in new {
            let budget = Budget::new(common.memory_max, Arc::clone(&common.memory));
            self.add(id, settings, served, budget);
        }
        for (id, settings) in shares {
            if let Some(container) = self.containers.iter_mut().find(|known| known.counters.id == id) {
                container.share.set(settings);
            }
        }
        self.sort();
    }

    /// Adds a process of a container.
    pub(super) fn add(&mut self, id: ContainerId, settings: ShareSettings, served: Served, budget: Budget) {
        match self.containers.iter_mut().find(|container| container.counters.id == id) {
            Some(container) => container.served.push(served),
            None => self.containers.push(Container::new(id, settings, served, budget)),
        }
        self.sort();
    }

    /// The heaviest containers are served first.
    fn sort(&mut self) {
        self.containers.sort_by_key(|container| std::cmp::Reverse(container.share.weight()));
    }

    /// One turn of all containers. Returns whether there was anything to do, and the container of each process that has gone.
    pub(super) fn turn(&mut self, now: u64) -> (bool, Vec<ContainerId>) {
        let (mut worked, mut ended) = (false, vec![]);
        for container in &mut self.containers {
            let (some, gone) = container.turn(now);
            worked |= some;
            ended.resize(ended.len() + gone, container.counters.id);
        }
        (worked, ended)
    }

    fn publish(&mut self, common: &Common, now: u64) {
        self.publish_at = now + PUBLISH_EVERY_NS;
        *common.report.lock() = self.report();
    }

    pub(super) fn report(&self) -> Vec<ContainerCounters> {
        self.containers.iter().map(Container::report).collect()
    }

    /// Sleeps until a packet, a bell, a timer or news.
    fn sleep(&mut self, common: &Common) {
        let now = self.now();
        let mut until = now + SLEEP_MAX_NS;
        for Container { share, served, .. } in &mut self.containers {
            share.begin();
            for process in served {
                match process.arm(now, share) {
                    // The next turn finds out what has ended.
                    Ok(true) | Err(_) => return,
                    Ok(false) => until = until.min(process.wakes_at(now, share).unwrap_or(until)),
                }
            }
        }
        let served = self.containers.iter().flat_map(|container| &container.served);
        let mut polled = vec![PollFd::new(&common.wake, PollFlags::IN)];
        polled.extend(
            served.flat_map(Served::descriptors).map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)),
        );
        let left = until.saturating_sub(self.now());
        let time = Timespec { tv_sec: (left / 1_000_000_000) as i64, tv_nsec: (left % 1_000_000_000) as i64 };
        let is_idle = polled.len() == 1;
        let _ = poll(&mut polled, Some(&time).filter(|_| !is_idle));
    }
}

impl Container {
    fn new(id: ContainerId, settings: ShareSettings, served: Served, budget: Budget) -> Self {
        let counters = ContainerCounters { id, ..ContainerCounters::default() };
        Self { share: Share::new(settings), budget, served: vec![served], next: 0, counters }
    }

    fn turn(&mut self, now: u64) -> (bool, usize) {
        let (mut worked, mut ended) = (false, vec![]);
        self.share.begin();
        let count = self.served.len();
        self.next = (self.next + 1) % count.max(1);
        for place in (0..count).map(|step| (self.next + step) % count) {
            match self.served[place].turn(now, &mut self.share, &mut self.budget) {
                Ok(some) => worked |= some,
                Err(end) => ended.push((place, end)),
            }
        }
        self.counters.throttled += u64::from(self.share.wakes_at(now).is_some());
        ended.sort_unstable_by_key(|(place, _)| std::cmp::Reverse(*place));
        for (place, end) in &ended {
            let process = self.served.swap_remove(*place);
            self.revoke(now, process, *end);
        }
        (worked, ended.len())
    }

    /// Takes everything back from a process that has gone.
    fn revoke(&mut self, now: u64, mut process: Served, end: End) {
        process.say_goodbye(now);
        self.counters.broken += u64::from(end == End::Broken);
        self.budget.give_back(process.memory().bytes());
        self.add(process.counts());
        // Unmapping much memory takes long: nobody waits for it. Without a thread it happens here.
        let _ = std::thread::Builder::new().name("vnet-rdma-unmap".into()).spawn(move || drop(process));
    }

    fn add(&mut self, counts: Counts) {
        let Counts { submissions, refused, bytes_out, packets_out, packets_in, held_back } = counts;
        let counters = &mut self.counters;
        counters.submissions += submissions;
        counters.refused += refused;
        counters.bytes_out += bytes_out;
        counters.packets_out += packets_out;
        counters.packets_in += packets_in;
        counters.held_back += held_back;
    }

    /// Counters of past and present processes.
    fn report(&self) -> ContainerCounters {
        let mut all = self.counters.clone();
        all.processes = self.served.len() as u64;
        for process in &self.served {
            let Counts { submissions, refused, bytes_out, packets_out, packets_in, held_back } =
                process.counts();
            all.submissions += submissions;
            all.refused += refused;
            all.bytes_out += bytes_out;
            all.packets_out += packets_out;
            all.packets_in += packets_in;
            all.held_back += held_back;
            all.endpoints += process.endpoints() as u64;
            all.mappings += process.memory().mappings() as u64;
            all.mapped_bytes += process.memory().bytes();
        }
        all
    }
}
