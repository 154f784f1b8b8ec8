//! The helper's loop: passes what applications say to the daemon of the host, and back.
//!
//! One thread runs [`Helper::run`]. Another one, of the meeting point, asks for attachments ([`Helper::attach`]) and waits until the daemon
//! has answered. The memory of an application is pinned until the daemon has confirmed that it does not use it any more, also if
//! the application is gone: its pages must not become somebody else's before. The helper relays datagrams between
//! two applications of the machine if only one has the daemon's engine (`relay.rs`).

use std::io;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use super::client::{Client, Event};
use super::relay::Pace;
use super::wire::{Body, DATAGRAM_MAX, FRAME_MAX, GROUP, Message, RUNS_MAX, Run, Token};
use crate::closer::close_or_leak_now;
use crate::daemon::{MacAddress, queue};
use crate::meeting::{Decline, Ends, Request};
use crate::random::random;
use crate::ring::{Bell, Word, sealed_len};

/// Attachments of the machine, those included whose end the daemon has not confirmed.
const ATTACHMENTS_MAX: usize = 64;
/// How long an application waits for the daemon: longer than an attachment needs to give up.
const PATIENCE: Duration = Duration::from_secs(8);
/// How long, and how often, the MAC address of a peer is looked for.
const RESOLVE_WITHIN: Duration = Duration::from_secs(2);
const RESOLVE_EVERY: Duration = Duration::from_millis(5);
/// Addresses that are looked for at once, of one attachment.
const UNRESOLVED_MAX: usize = 64;
/// Frames of one turn, and words and datagrams of one attachment.
const FRAMES: usize = 64;
const WORDS: usize = 64;
const DATAGRAMS: usize = 16;
/// Longest sleep.
const SLEEP_MAX: Duration = Duration::from_secs(1);

/// Pages that stay where they are.
pub struct Pinned {
    /// Their guest physical addresses.
    pub runs: Vec<Run>,
    /// Dropping it lets them move again.
    pub keep: Box<dyn Send>,
}

/// An address that no other program of the machine uses.
pub struct Reserved {
    /// The address, with its port.
    pub address: SocketAddr,
    /// Number of the interface that has it.
    pub interface: u32,
    /// MAC address of the interface.
    pub mac: MacAddress,
    /// Bound to the address. It receives only by the loopback device: what other applications of the machine send to the address.
    pub socket: UdpSocket,
}

/// What the helper needs of its machine.
pub trait Machine: Send + Sync {
    /// Sends a frame by an interface.
    fn send(&self, interface: u32, frame: &[u8]);

    /// Receives a frame of the daemon into the buffer, without blocking. Returns its length.
    fn receive(&self, buffer: &mut [u8]) -> Option<usize>;

    /// Readable when frames wait.
    fn descriptor(&self) -> BorrowedFd<'_>;

    /// Pins the pages of a memfd of this length.
    ///
    /// # Errors
    /// No memory, no permission, or too many pieces.
    fn pin(&self, memory: &OwnedFd, len: usize) -> io::Result<Pinned>;

    /// Reserves a UDP address. If it has no IP address, the machine chooses one.
    ///
    /// # Errors
    /// It is not the machine's, or taken.
    fn reserve(&self, bind: SocketAddr) -> io::Result<Reserved>;

    /// Whether this is a local address of the machine.
    fn is_local_address(&self, ip: IpAddr) -> bool;

    /// The MAC address of a peer, if it is known already; otherwise the machine looks for it. For local addresses it is that of the interface.
    fn resolve(&self, interface: u32, ip: IpAddr) -> Option<MacAddress>;

    /// Tells the administrator.
    fn note(&self, text: &str);
}

struct Attached {
    client: Client,
    interface: u32,
    /// The helper's end of the application's bell; `None`: the application is gone, or was told that the engine is.
    ear: Option<Bell>,
    /// Who waits for the daemon's answer.
    outcome: Option<SyncSender<Result<SocketAddr, Decline>>>,
    /// Peers whose MAC address is looked for, and until when.
    unresolved: Vec<(IpAddr, Instant)>,
    /// Reserves the address.
    socket: Arc<UdpSocket>,
    pinned: Vec<(OwnedFd, Pinned)>,
}

/// The attachments of a machine.
pub struct Helper {
    machine: Box<dyn Machine>,
    attached: Mutex<Vec<Attached>>,
    /// Rate limit of datagrams that are relayed to the daemon, of all attachments.
    pace: Mutex<Pace>,
    wake: OwnedFd,
}

impl Helper {
    /// A helper without attachments. Earlier ones of this machine, whose helper has ended, end at the daemon.
    ///
    /// # Errors
    /// No descriptors.
    pub fn new(machine: Box<dyn Machine>, interfaces: &[(u32, MacAddress)]) -> io::Result<Self> {
        let all = Message { attachment: 0, token: Token::default(), body: Body::Close };
        for (interface, mac) in interfaces {
            machine.send(*interface, &all.encode(*mac, GROUP));
        }
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { machine, attached: Mutex::default(), pace: Mutex::default(), wake })
    }

    /// Attaches an application to the engine of the host's daemon: for [`Host::serve`](crate::meeting::Host::serve).
    ///
    /// # Errors
    /// Why it cannot have it.
    pub fn attach(&self, request: &Request) -> Result<Ends, Decline> {
        let refused = |error: &io::Error| Decline::Address(error.raw_os_error().unwrap_or(0));
        let reserved = self.machine.reserve(request.bind).map_err(|error| refused(&error))?;
        reserved.socket.set_nonblocking(true).map_err(|error| refused(&error))?;
        let no_memory = |error: io::Error| {
            self.machine.note(&format!("cannot pin the queues of an application: {error}"));
            Decline::Memory
        };
        let memory = queue::provide().map_err(no_memory)?;
        let own = memory.try_clone().map_err(no_memory)?;
        let pinned = self.machine.pin(&memory, queue::FILE_BYTES).map_err(no_memory)?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let pair = || socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
        let (bell, ear) = pair().map_err(|_| Decline::TooMany)?;
        let leash = ear.try_clone().map_err(|_| Decline::TooMany)?;
        let seed = random().map_err(|_| Decline::TooMany)?;
        let token: Token = seed.first_chunk().copied().unwrap_or_default();
        let request = Request { bind: reserved.address, ..*request };
        let client = Client::new(Instant::now(), reserved.mac, token, request, pinned.runs.clone());
        let (sender, outcome) = sync_channel(1);
        {
            let mut attached = self.attached.lock();
            if attached.len() >= ATTACHMENTS_MAX {
                return Err(Decline::TooMany);
            }
            attached.push(Attached {
                client,
                interface: reserved.interface,
                ear: Some(Bell::new(ear)),
                outcome: Some(sender),
                unresolved: vec![],
                socket: Arc::new(reserved.socket),
                pinned: vec![(own, pinned)],
            });
        }
        self.wake();
        let address = outcome.recv_timeout(PATIENCE).unwrap_or(Err(Decline::Silent))?;
        Ok(Ends { address, memory, bell, leash, questions: None })
    }

    /// Number of attachments.
    pub fn attachments(&self) -> usize {
        self.attached.lock().len()
    }

    fn wake(&self) {
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// Passes on what there is, then sleeps until there is more.
    ///
    /// # Errors
    /// The kernel cannot wait.
    pub fn turn(&self) -> io::Result<()> {
        let _ = rustix::io::read(&self.wake, &mut [0; 8]);
        let mut attached = self.attached.lock();
        self.hear_daemon(&mut attached);
        let now = Instant::now();
        let mut next = now + SLEEP_MAX;
        // Round robin: otherwise a busy first attachment would use up the rate limit.
        let others = attached.len().min(1);
        attached.rotate_left(others);
        for known in attached.iter_mut() {
            self.hear_application(known);
            self.relay(known, now);
            self.resolve(known, now);
            loop {
                let (frame, event) = known.client.depart(now);
                if let Some(event) = event {
                    self.happened(known, now, event);
                }
                let Some(frame) = frame else { break };
                self.machine.send(known.interface, &frame);
            }
            let resolve = (!known.unresolved.is_empty()).then(|| now + RESOLVE_EVERY);
            next = [known.client.wakes_at(now), resolve].into_iter().flatten().fold(next, Instant::min);
        }
        // Their memory is free from here on.
        attached.retain(|known| !known.client.is_closed());
        let ears: Vec<OwnedFd> = attached
            .iter()
            .filter_map(|known| known.ear.as_ref()?.descriptor().try_clone_to_owned().ok())
            .collect();
        let full_until = self.pace.lock().full_until(now);
        let hears = |known: &&Attached| full_until.is_none() && known.client.is_running();
        let sockets: Vec<Arc<UdpSocket>> =
            attached.iter().filter(hears).map(|known| Arc::clone(&known.socket)).collect();
        next = full_until.into_iter().fold(next, Instant::min);
        drop(attached);
        let mut polled = vec![
            PollFd::new(&self.wake, PollFlags::IN),
            PollFd::from_borrowed_fd(self.machine.descriptor(), PollFlags::IN),
        ];
        polled.extend(ears.iter().map(|ear| PollFd::new(ear, PollFlags::IN)));
        polled.extend(sockets.iter().map(|socket| PollFd::new(&**socket, PollFlags::IN)));
        let left = next.saturating_duration_since(Instant::now());
        let time = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        match poll(&mut polled, Some(&time)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn hear_daemon(&self, attached: &mut [Attached]) {
        let mut buffer = [0; FRAME_MAX];
        for _ in 0..FRAMES {
            let Some(len) = self.machine.receive(&mut buffer) else { return };
            let Some((_, message)) = buffer.get(..len).and_then(Message::decode) else { continue };
            let known = attached.iter_mut().find(|known| known.client.token() == message.token);
            if let Some(known) = known
                && let Some(event) = known.client.hear(Instant::now(), message)
            {
                self.happened(known, Instant::now(), event);
            }
        }
    }

    fn happened(&self, known: &mut Attached, now: Instant, event: Event) {
        match event {
            Event::Attached(address) => {
                let waits = known.outcome.take().is_some_and(|outcome| outcome.send(Ok(address)).is_ok());
                if !waits {
                    known.client.close();
                }
            }
            Event::Declined(why) => {
                known.outcome.take().into_iter().for_each(|outcome| _ = outcome.send(Err(why)));
                known.ear = None;
            }
            Event::Ring => known.ear.iter().for_each(|ear| ear.say(&Word::Ring)),
            Event::Ask(ip) => {
                let is_new = known.unresolved.iter().all(|(known, _)| *known != ip);
                if is_new && known.unresolved.len() < UNRESOLVED_MAX {
                    known.unresolved.push((ip, now + RESOLVE_WITHIN));
                }
            }
            Event::Datagram(to, bytes) if to.ip().is_loopback() || self.machine.is_local_address(to.ip()) => {
                // A datagram that a full socket buffer drops counts as lost in the network.
                let _ = known.socket.send_to(&bytes, to);
            }
            Event::Datagram(..) => {}
            // The application finds its bell closed.
            Event::Lost => {
                let lost = Err(Decline::Silent);
                known.outcome.take().into_iter().for_each(|outcome| _ = outcome.send(lost));
                known.ear = None;
            }
        }
    }

    /// Relays datagrams that other applications of the machine have sent to this one.
    fn relay(&self, known: &Attached, now: Instant) {
        let mut buffer = [0; DATAGRAM_MAX + 1];
        for _ in 0..DATAGRAMS {
            // They wait in the socket's buffer until the engine runs, and while the rate limit is used up.
            if !known.client.is_running() || self.pace.lock().full_until(now).is_some() {
                return;
            }
            let Ok((len, from)) = known.socket.recv_from(&mut buffer) else { return };
            self.pace.lock().takes(now);
            if len > DATAGRAM_MAX {
                // A peer of the interconnect knows the limit from WELCOME.
                let what = "datagrams from inside the machine for an application were dropped";
                self.machine.note(&format!("{what}: they have more than {DATAGRAM_MAX} bytes"));
                continue;
            }
            if let Some(frame) = known.client.datagram(from, &buffer[..len]) {
                self.machine.send(known.interface, &frame);
            }
        }
    }

    fn resolve(&self, known: &mut Attached, now: Instant) {
        let Attached { client, interface, unresolved, .. } = known;
        unresolved.retain(|(ip, end)| match self.machine.resolve(*interface, *ip) {
            Some(mac) => {
                client.tell(*ip, mac);
                false
            }
            None => now < *end,
        });
    }

    fn hear_application(&self, known: &mut Attached) {
        for _ in 0..WORDS {
            let Some(ear) = &known.ear else { return };
            match ear.hear_with(close_or_leak_now) {
                Ok(None) => return,
                Ok(Some(Word::Ring)) => known.client.ring(),
                Ok(Some(Word::Grant(number, memory))) => match u32::try_from(number) {
                    Ok(number) => self.lend(known, number, memory),
                    Err(_) => close_or_leak_now(memory),
                },
                Ok(Some(Word::Ask(..) | Word::Refuse(_))) | Err(_) => {
                    known.ear = None;
                    known.client.close();
                }
            }
        }
    }

    /// Pins memory that an application lends, and shares it with the daemon.
    fn lend(&self, known: &mut Attached, number: u32, memory: OwnedFd) {
        let Some(len) = sealed_len(&memory) else {
            close_or_leak_now(memory);
            return known.client.share(number, 0, vec![]);
        };
        match self.machine.pin(&memory, len) {
            Ok(pinned) if pinned.runs.len() <= RUNS_MAX => {
                known.client.share(number, len as u64, pinned.runs.clone());
                known.pinned.push((memory, pinned));
            }
            Ok(pinned) => {
                let pieces = pinned.runs.len();
                self.machine.note(&format!(
                    "{len} bytes of an application lie in {pieces} pieces, but at most {RUNS_MAX} are shared; larger pieces: echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled"
                ));
                known.client.share(number, 0, vec![]);
            }
            Err(error) => {
                self.machine.note(&format!("cannot pin {len} bytes of an application: {error}"));
                known.client.share(number, 0, vec![]);
            }
        }
    }
}
