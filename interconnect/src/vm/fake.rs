//! Guests without machines, for tests: memory, interfaces and the network between them, in one process.

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use parking_lot::Mutex;
use rustix::event::{EventfdFlags, eventfd};
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};

use super::helper::{Machine, Pinned, Reserved};
use super::nic::{Nic, Stations};
use super::wire::{PAGE, Run, Token};
use crate::daemon::udp_frame::{ETHERNET, parse};
use crate::daemon::{Datagrams, GuestFrame, Lent, MacAddress};
use crate::meeting::{KEY, KeyRequest, Keys, Reach, Role};
use crate::proto::Span;
use crate::seal::wire::is_sealing;

/// Pages are scattered in pieces of so many, each before the one that precedes it.
const PIECE: u64 = 16;

/// A queue with a descriptor.
pub(super) struct Queue<T> {
    items: Mutex<VecDeque<T>>,
    bell: OwnedFd,
}

impl<T> Queue<T> {
    fn new() -> Arc<Self> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        Arc::new(Self { items: Mutex::default(), bell })
    }

    pub(super) fn put(&self, item: T) {
        self.items.lock().push_back(item);
        let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
    }

    fn take(&self) -> Option<T> {
        let mut items = self.items.lock();
        if items.len() <= 1 {
            let _ = rustix::io::read(&self.bell, &mut [0; 8]);
        }
        items.pop_front()
    }
}

/// A network: where the datagrams to an address go.
pub(super) type Network = Arc<Mutex<HashMap<SocketAddr, Arc<Queue<GuestFrame>>>>>;

/// A piece of a guest's physical memory.
#[derive(Clone)]
pub struct Piece {
    /// Guest physical address.
    pub addr: u64,
    /// Where the bytes are.
    pub file: Arc<File>,
    /// Offset of the first one in the file.
    pub offset: u64,
    /// Their number.
    pub len: u64,
}

/// Lends pages of a guest.
pub trait Physical: Send + Sync {
    /// The guest's memory consists of these pieces from now on.
    fn set(&self, pieces: &[Piece]);

    /// As [`Nic::lend`].
    fn lend(&self, runs: &[Run]) -> Option<Arc<dyn Lent>>;
}

/// Pieces of guest physical memory: where they begin, and the memory behind.
#[derive(Default)]
struct Ram {
    pieces: Vec<(u64, u64, Arc<OwnedFd>, u64)>,
    next: u64,
}

/// A guest and its interface.
#[derive(Clone)]
pub(super) struct FakeGuest {
    pub(super) mac: MacAddress,
    ram: Arc<Mutex<Ram>>,
    /// Control frames.
    pub(super) up: Arc<Mutex<VecDeque<Vec<u8>>>>,
    down: Arc<QueueOfFrames>,
    network: Network,
    /// All memory has to be given back.
    pub(super) is_revoked: Arc<AtomicBool>,
    /// The guest's ring is full: it gets no control frames.
    pub(super) is_deaf: Arc<AtomicBool>,
    /// Bytes of the network card's queue.
    pub(super) mtu: usize,
    /// How every peer whose MAC address is known is reached.
    pub(super) reach: Arc<Mutex<Reach>>,
    /// How often engines got keys, and engines with keys that are gone.
    pub(super) engines: Arc<(AtomicUsize, AtomicUsize)>,
    /// Who lends the guest's memory; `None`: `place` tells where that is.
    pub(super) physical: Option<Arc<dyn Physical>>,
    /// Packets of its applications that left unsealed, but for those of handshakes of sealing.
    pub(super) clear_packets: Arc<AtomicUsize>,
}

/// Keys that both sides of a session derive from its nonces: a toy.
pub(crate) fn toy_keys(reach: Reach, request: &KeyRequest) -> Result<Keys, Reach> {
    let (mine, theirs) = (request.nonce, request.peer_nonce);
    let [first, second] = if request.role == Role::Opener { [mine, theirs] } else { [theirs, mine] };
    let keys = std::array::from_fn(|place| {
        first[place % 16] ^ second[(place + 3) % 16].wrapping_add((place / KEY) as u8)
    });
    if reach == Reach::Sealed { Ok(Keys { epoch: 1, keys }) } else { Err(reach) }
}

type QueueOfFrames = Queue<Vec<u8>>;

impl FakeGuest {
    pub(super) fn new(number: u8, network: &Network) -> Self {
        Self {
            mac: [2, 0, 0, 0, 0, number],
            ram: Arc::new(Mutex::new(Ram { pieces: vec![], next: 1 << 32 })),
            up: Arc::default(),
            down: Queue::new(),
            network: Arc::clone(network),
            is_revoked: Arc::default(),
            is_deaf: Arc::default(),
            mtu: 9000,
            reach: Arc::new(Mutex::new(Reach::AllClear)),
            engines: Arc::default(),
            physical: None,
            clear_packets: Arc::default(),
        }
    }

    /// The guest's address. The network between guests consists of loopback addresses.
    pub(super) fn own_ip(&self) -> IpAddr {
        [127, 1, 0, self.mac[5]].into()
    }

    /// Gives memory guest physical addresses.
    pub(super) fn place(&self, memory: &OwnedFd, len: usize) -> Vec<Run> {
        let file = Arc::new(memory.try_clone().unwrap());
        let mut ram = self.ram.lock();
        let pages = (len as u64).div_ceil(PAGE);
        let end = ram.next + (pages.div_ceil(PIECE) * PIECE) * PAGE;
        ram.next = end + PAGE;
        let starts = (0..pages).step_by(PIECE as usize);
        let runs: Vec<Run> = starts
            .map(|page| Run { addr: end - (page + PIECE) * PAGE, pages: PIECE.min(pages - page) as u32 })
            .collect();
        for (number, run) in runs.iter().enumerate() {
            let offset = number as u64 * PIECE * PAGE;
            ram.pieces.push((run.addr, u64::from(run.pages) * PAGE, Arc::clone(&file), offset));
        }
        runs
    }
}

struct FakeWindow {
    start: *mut u8,
    len: usize,
    pieces: usize,
    is_revoked: Arc<AtomicBool>,
}

// SAFETY: the mapping belongs to this value; its bytes are accessed by spans only.
unsafe impl Send for FakeWindow {}
// SAFETY: as above.
unsafe impl Sync for FakeWindow {}

impl Lent for FakeWindow {
    fn span(&self) -> Span {
        // SAFETY: the mapping is as long as this value says, and may change at any time for all who use it.
        unsafe { Span::new(self.start, self.len) }
    }

    fn pieces(&self) -> usize {
        self.pieces
    }

    fn is_revoked(&self) -> bool {
        self.is_revoked.load(Ordering::Relaxed)
    }
}

impl Drop for FakeWindow {
    fn drop(&mut self) {
        // SAFETY: the range is this mapping's, and nothing refers to it any more.
        let _ = unsafe { munmap(self.start.cast(), self.len) };
    }
}

impl Nic for FakeGuest {
    fn tell(&self, frame: &[u8]) {
        if !self.is_deaf.load(Ordering::Relaxed) && frame.len() <= self.mtu + ETHERNET {
            self.down.put(frame.to_vec());
        }
    }

    fn lend(&self, runs: &[Run]) -> Option<Arc<dyn Lent>> {
        if let Some(physical) = &self.physical {
            return physical.lend(runs);
        }
        let ram = self.ram.lock();
        let sum = runs.iter().try_fold(0u64, |sum, run| sum.checked_add(u64::from(run.pages) * PAGE))?;
        let len = usize::try_from(sum).ok().filter(|len| (1..1 << 34).contains(len))?;
        // SAFETY: the kernel chooses an unused range of addresses.
        let start =
            unsafe { mmap_anonymous(std::ptr::null_mut(), len, ProtFlags::empty(), MapFlags::PRIVATE) }
                .ok()?;
        let is_revoked = Arc::clone(&self.is_revoked);
        let window = FakeWindow { start: start.cast(), len, pieces: runs.len(), is_revoked };
        let mut at = 0;
        for run in runs {
            let bytes = u64::from(run.pages) * PAGE;
            let inside = |(addr, len, ..): &&(u64, u64, Arc<OwnedFd>, u64)| {
                run.addr.checked_sub(*addr).is_some_and(|from| from < *len && bytes <= len - from)
            };
            let (addr, _, file, offset) =
                ram.pieces.iter().find(inside).filter(|_| bytes > 0 && run.addr.is_multiple_of(PAGE))?;
            let (protection, flags) =
                (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::FIXED);
            let from = offset + (run.addr - addr);
            // SAFETY: the target lies inside the range that was just reserved.
            unsafe { mmap(window.start.add(at).cast(), bytes as usize, protection, flags, &**file, from) }
                .ok()?;
            at += bytes as usize;
        }
        Some(Arc::new(window))
    }

    fn open(&self, address: SocketAddr) -> io::Result<Box<dyn Datagrams>> {
        let mut network = self.network.lock();
        if network.contains_key(&address) {
            return Err(io::ErrorKind::AddrInUse.into());
        }
        let queue = Queue::new();
        network.insert(address, Arc::clone(&queue));
        let (network, clear_packets) = (Arc::clone(&self.network), Arc::clone(&self.clear_packets));
        Ok(Box::new(FakePort { address, queue, network, mtu: self.mtu, clear_packets }))
    }

    fn inject(&self, frame: GuestFrame) -> bool {
        let to = parse(&frame.bytes, true).map(|datagram| datagram.to);
        let port = to.and_then(|to| self.network.lock().get(&to).cloned());
        port.inspect(|port| port.put(GuestFrame { is_local: true, ..frame })).is_some()
    }

    fn mtu(&self) -> usize {
        self.mtu
    }

    fn reach(&self, stations: &Stations) -> Reach {
        assert_eq!(stations.own.1, self.mac);
        match *self.reach.lock() {
            Reach::AllClear => Reach::AllClear,
            reach => stations.peer.map_or(Reach::NotYet, |_| reach),
        }
    }

    fn keys(&self, _: Token, stations: &Stations, request: &KeyRequest) -> Result<Keys, Reach> {
        let keys = toy_keys(self.reach(stations), request)?;
        self.engines.0.fetch_add(1, Ordering::Relaxed);
        Ok(keys)
    }

    fn gone(&self, _: Token) {
        self.engines.1.fetch_add(1, Ordering::Relaxed);
    }
}

struct FakePort {
    address: SocketAddr,
    queue: Arc<Queue<GuestFrame>>,
    network: Network,
    mtu: usize,
    clear_packets: Arc<AtomicUsize>,
}

impl Datagrams for FakePort {
    fn send(&mut self, frame: GuestFrame) -> bool {
        let Some(datagram) = parse(&frame.bytes, true) else { return false };
        let is_clear = !is_sealing(&frame.bytes[datagram.payload]);
        self.clear_packets.fetch_add(is_clear.into(), Ordering::Relaxed);
        let to = self.network.lock().get(&datagram.to).cloned();
        let is_local = datagram.from.ip() == datagram.to.ip();
        to.inspect(|to| to.put(GuestFrame { is_local, ..frame })).is_some()
    }

    fn receive(&mut self) -> Option<GuestFrame> {
        self.queue.take()
    }

    fn as_fd(&self) -> BorrowedFd<'_> {
        self.queue.bell.as_fd()
    }

    fn room(&self) -> usize {
        8 << 20
    }

    fn mtu(&self) -> usize {
        self.mtu
    }

    fn reaches(&self, address: SocketAddr) -> bool {
        self.network.lock().contains_key(&address)
    }
}

impl Drop for FakePort {
    fn drop(&mut self) {
        self.network.lock().remove(&self.address);
    }
}

impl Machine for FakeGuest {
    fn send(&self, _interface: u32, frame: &[u8]) {
        if frame.len() <= self.mtu + ETHERNET {
            self.up.lock().push_back(frame.to_vec());
        }
    }

    fn receive(&self, buffer: &mut [u8]) -> Option<usize> {
        let frame = self.down.take()?;
        buffer[..frame.len()].copy_from_slice(&frame);
        Some(frame.len())
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        self.down.bell.as_fd()
    }

    fn pin(&self, memory: &OwnedFd, len: usize) -> io::Result<Pinned> {
        Ok(Pinned { runs: self.place(memory, len), keep: Box::new(()) })
    }

    fn reserve(&self, bind: SocketAddr) -> io::Result<Reserved> {
        // Ports from the ephemeral range of a socket that is kept open.
        let socket = std::net::UdpSocket::bind(bind)?;
        Ok(Reserved { address: socket.local_addr()?, interface: 1, mac: self.mac, socket })
    }

    fn is_local_address(&self, ip: IpAddr) -> bool {
        ip == self.own_ip()
    }

    fn resolve(&self, _interface: u32, ip: IpAddr) -> Option<MacAddress> {
        ip.is_loopback().then_some(if self.is_local_address(ip) { self.mac } else { [2, 9, 9, 9, 9, 9] })
    }

    fn note(&self, text: &str) {
        eprintln!("{text}");
    }
}
