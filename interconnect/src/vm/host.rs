//! The daemon's side: the attachments of one guest. The guest may be hostile: each frame is decoded from a private copy, its pages are mapped
//! only if they are the guest's, and attachments, pages and work are bounded.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use chacha20::ChaCha20Rng;
use chacha20::rand_core::{Rng, SeedableRng};
use parking_lot::Mutex;
use rustix::net::{Shutdown, shutdown};

use super::doorbell::Doorbell;
use super::nic::Nic;
use super::per_second::PerSecond;
use super::questions::Questions;
use super::relay::Pace;
use super::wire::{
    Body, DATAGRAM_HEADERS, DATAGRAM_MAX, Message, OWN, PAGE, QUEUES, QUEUES_BYTES, RUNS_MAX, Run,
    ShareState, Token,
};
use crate::daemon::carrier::{GuestPort, Neighbours, ToHelper};
use crate::daemon::lent::Inbox;
use crate::daemon::udp_frame::{ETHERNET, Ends, Headers, UDP};
use crate::daemon::{
    ContainerId, Datagrams, GuestEnds, GuestFrame, Lent, MacAddress, Service, ShareSettings,
};
use crate::meeting::{Decline, Request};
use crate::random::random;
use crate::ring::Bell;

/// Attachments of a guest, those included that are being opened or closed.
const ATTACHMENTS_MAX: usize = 16;
/// Maximum number of pieces and of memories of one attachment: what the engine takes of a process.
const PIECES_MAX: usize = 1024;
const MEMORIES_MAX: usize = 1024;
/// Attachments that a guest may open in a second: ending one may take milliseconds of the engine's thread.
const OPENS_PER_S: u32 = 20;
/// How long a helper may be silent: it speaks every second.
const LEASE: Duration = Duration::from_secs(10);
/// How often ends and revocations are looked for, without and with a reason to: each look passes all memory of the guest's attachments.
const LOOK_EVERY: Duration = Duration::from_millis(500);
const LOOK_AGAIN: Duration = Duration::from_millis(20);
/// How often it is looked whether the engine has released the memory of an attachment that is closed.
const RELEASED_EVERY: Duration = Duration::from_millis(2);
/// Below, ports are for privileged programs.
const PORT_MIN: u16 = 1024;
/// Words of the engine in one turn.
const WORDS: usize = 64;

/// A list of pages that is not complete.
struct Sharing {
    memory: u32,
    bytes: u64,
    total: usize,
    runs: Vec<Run>,
}

/// The engine of a process, and what speaks for the process.
struct Running {
    bell: Bell,
    /// The engine's end of the bell.
    leash: OwnedFd,
    questions: Questions,
}

struct Attachment {
    number: u64,
    token: Token,
    mac: MacAddress,
    request: Request,
    share: ShareSettings,
    /// Until the engine runs.
    datagrams: Option<Box<dyn Datagrams>>,
    lendings: Arc<Inbox>,
    neighbours: Arc<Mutex<Neighbours>>,
    doorbell: Doorbell,
    running: Option<Running>,
    sharing: Option<Sharing>,
    /// What became of memories.
    shared: HashMap<u32, ShareState>,
    pieces: usize,
    lent: Vec<Weak<dyn Lent>>,
    heard_at: Instant,
    is_closing: bool,
}

/// Control frames of an engine to the helper.
struct Caller {
    nic: Arc<dyn Nic>,
    mac: MacAddress,
    attachment: u64,
    token: Token,
    /// Rate limit of datagrams that are relayed to the helper, of all attachments.
    pace: Arc<Mutex<Pace>>,
}

impl Caller {
    fn tell(&self, body: Body) {
        let Self { attachment, token, .. } = *self;
        self.nic.tell(&Message { attachment, token, body }.encode(OWN, self.mac));
    }
}

impl ToHelper for Caller {
    fn ask(&self, ip: IpAddr) {
        self.tell(Body::Ask(ip));
    }

    fn relay(&self, to: SocketAddr, bytes: &[u8]) -> bool {
        let may = bytes.len() <= self.relayed_max() && self.pace.lock().takes(Instant::now());
        if may {
            self.tell(Body::Datagram { other: to, bytes: bytes.to_vec() });
        }
        may
    }

    fn relayed_max(&self) -> usize {
        DATAGRAM_MAX.min((self.nic.mtu() + ETHERNET).saturating_sub(DATAGRAM_HEADERS))
    }

    fn relay_mac(&self) -> MacAddress {
        OWN
    }
}

/// The attachments of one guest.
pub struct GuestHost {
    nic: Arc<dyn Nic>,
    service: Service,
    id: ContainerId,
    attachments: Vec<Attachment>,
    random: ChaCha20Rng,
    /// Attachments that were opened.
    opened: PerSecond,
    /// When revocations were looked for last.
    looked_at: Option<Instant>,
    /// Rate limit of datagrams that are relayed to the helper.
    pace: Arc<Mutex<Pace>>,
}

impl GuestHost {
    /// A guest without attachments. Its processes count under `id`.
    ///
    /// # Errors
    /// No random numbers.
    pub fn new(nic: Arc<dyn Nic>, service: Service, id: ContainerId) -> io::Result<Self> {
        let random = ChaCha20Rng::from_seed(random()?);
        Ok(Self {
            nic,
            service,
            id,
            attachments: vec![],
            random,
            opened: PerSecond::default(),
            looked_at: None,
            pace: Arc::default(),
        })
    }

    /// Takes a control frame of the guest. `share` is what its processes get, or why they may not be served.
    pub fn hear(&mut self, now: Instant, frame: &[u8], share: Result<ShareSettings, Decline>) {
        let Some((mac, Message { attachment, token, body })) = Message::decode(frame) else { return };
        if let Body::Open(request) = body {
            return self.open(now, (mac, token), request, share);
        }
        if let (Body::Close, 0) = (&body, attachment) {
            // A helper begins, or its first request was never answered: nothing of an earlier one, or with this token, may stay.
            self.attachments.iter_mut().for_each(|known| {
                if token == Token::default() || known.token == token {
                    known.close();
                }
            });
            let is_open = |known: &Attachment| token == Token::default() || known.token == token;
            if !self.attachments.iter().any(is_open) {
                self.tell(mac, (0, token), Body::Closed);
            }
            return;
        }
        let known =
            self.attachments.iter_mut().find(|known| known.number == attachment && known.token == token);
        let Some(known) = known else {
            if !matches!(body, Body::Closed) {
                self.tell(mac, (attachment, token), Body::Closed);
            }
            return;
        };
        known.heard_at = now;
        match body {
            _ if known.is_closing => {}
            Body::Close => known.close(),
            Body::Share { memory, bytes, total, first, runs } => {
                let place = self.attachments.iter().position(|known| known.number == attachment);
                if let Some(place) = place {
                    let sharing = Sharing { memory, bytes, total: total.into(), runs };
                    self.share(place, sharing, first.into());
                }
            }
            Body::Ring { rung, heard, asks } => {
                if let (true, Some(running)) = (known.doorbell.hear(rung, heard, asks), &known.running) {
                    running.bell.say(&crate::ring::Word::Ring);
                }
            }
            Body::Neighbour(ip, mac) => known.neighbours.lock().learn(ip, mac, now),
            Body::Datagram { other, bytes } => known.relay(&*self.nic, now, other, &bytes),
            _ => {}
        }
    }

    fn tell(&self, mac: MacAddress, (attachment, token): (u64, Token), body: Body) {
        self.nic.tell(&Message { attachment, token, body }.encode(OWN, mac));
    }

    fn open(
        &mut self,
        now: Instant,
        (mac, token): (MacAddress, Token),
        request: Request,
        share: Result<ShareSettings, Decline>,
    ) {
        if let Some(known) = self.attachments.iter().find(|known| known.token == token) {
            if !known.is_closing {
                self.tell(mac, (known.number, token), Body::Opened(known.request.bind));
            }
            return;
        }
        match share.and_then(|share| self.admit(now, &request).map(|datagrams| (share, datagrams))) {
            Err(why) => self.tell(mac, (0, token), Body::Declined(why)),
            Ok((share, datagrams)) => {
                let number = self.random.next_u64().max(1);
                self.attachments.push(Attachment {
                    number,
                    token,
                    mac,
                    request,
                    share,
                    datagrams: Some(datagrams),
                    lendings: Arc::default(),
                    neighbours: Arc::default(),
                    doorbell: Doorbell::default(),
                    running: None,
                    sharing: None,
                    shared: HashMap::new(),
                    pieces: 0,
                    lent: vec![],
                    heard_at: now,
                    is_closing: false,
                });
                self.tell(mac, (number, token), Body::Opened(request.bind));
            }
        }
    }

    fn admit(&mut self, now: Instant, request: &Request) -> Result<Box<dyn Datagrams>, Decline> {
        if self.attachments.len() >= ATTACHMENTS_MAX || !self.opened.takes(now, OPENS_PER_S) {
            return Err(Decline::TooMany);
        }
        let bind = request.bind;
        if bind.port() < PORT_MIN {
            return Err(Decline::Port);
        }
        // An IPv4 address in IPv6 form would be another spelling of an address that belongs to somebody else.
        let is_mapped = bind.ip().to_canonical() != bind.ip();
        if bind.ip().is_unspecified() || bind.ip().is_multicast() || is_mapped {
            return Err(Decline::Address(libc::EADDRNOTAVAIL));
        }
        self.nic.open(bind).map_err(|error| match error.kind() {
            io::ErrorKind::AddrInUse => Decline::Address(libc::EADDRINUSE),
            _ => Decline::TooMany,
        })
    }

    /// Takes the next runs of a memory, and uses it when they are complete.
    fn share(&mut self, place: usize, next: Sharing, first: usize) {
        let known = &mut self.attachments[place];
        let (memory, total) = (next.memory, next.total);
        let state = match known.shared.get(&memory) {
            Some(state) => *state,
            None => known.collect(next, first),
        };
        let have = known
            .sharing
            .as_ref()
            .filter(|sharing| sharing.memory == memory)
            .map(|sharing| sharing.runs.len());
        let used = match have {
            Some(have) if have == total && state == ShareState::More => self.use_memory(place),
            _ => Ok(state),
        };
        let state = used.unwrap_or(ShareState::Refused);
        let known = &mut self.attachments[place];
        if state != ShareState::More
            && (known.shared.len() < MEMORIES_MAX || known.shared.contains_key(&memory))
        {
            known.shared.insert(memory, state);
        }
        let next = have.unwrap_or(total).min(usize::from(u16::MAX)) as u16;
        let (mac, names) = (known.mac, (known.number, known.token));
        let answer = used.map_or_else(Body::Declined, |state| Body::Shared { memory, next, state });
        self.tell(mac, names, answer);
    }

    /// Uses the memory whose runs are complete.
    ///
    /// # Errors
    /// The engine does not serve the process.
    fn use_memory(&mut self, place: usize) -> Result<ShareState, Decline> {
        let known = &mut self.attachments[place];
        let Some(Sharing { memory, bytes, runs, .. }) = known.sharing.take() else {
            return Ok(ShareState::Refused);
        };
        let pages = runs.iter().map(|run| u64::from(run.pages)).sum::<u64>();
        let is_whole = bytes.div_ceil(PAGE) == pages && known.pieces + runs.len() <= PIECES_MAX;
        let is_expected = known.running.is_some() != (memory == QUEUES);
        let lent = if is_whole && is_expected { self.nic.lend(&runs) } else { None };
        let used = match lent {
            None => false,
            Some(lent) if memory == QUEUES => self.start(place, &lent, bytes)?,
            Some(lent) => {
                let known = &mut self.attachments[place];
                known.lent.retain(|lent| lent.strong_count() > 0);
                known.lent.push(Arc::downgrade(&lent));
                known.lendings.put((memory, Some(lent)))
            }
        };
        let known = &mut self.attachments[place];
        known.pieces += if used { runs.len() } else { 0 };
        if !used && memory != QUEUES {
            known.lendings.put((memory, None));
        }
        if let Some(running) = &known.running {
            running.bell.say(&crate::ring::Word::Ring);
        }
        Ok(if used { ShareState::Used } else { ShareState::Refused })
    }

    /// Has the engine serve the process. Returns false if the queues are too small.
    ///
    /// # Errors
    /// It serves too many.
    fn start(&mut self, place: usize, queues: &Arc<dyn Lent>, bytes: u64) -> Result<bool, Decline> {
        let known = &mut self.attachments[place];
        if bytes != QUEUES_BYTES as u64 || queues.span().len() as u64 != bytes {
            return Ok(false);
        }
        let Some(datagrams) = known.datagrams.take() else { return Ok(false) };
        let (nic, mac) = (Arc::clone(&self.nic), known.mac);
        let (attachment, token, pace) = (known.number, known.token, Arc::clone(&self.pace));
        let helper = Caller { nic, mac, attachment, token, pace };
        let (address, neighbours) = ((known.request.bind, mac), Arc::clone(&known.neighbours));
        let port = GuestPort::new(datagrams, address, neighbours, Box::new(helper));
        let (queues_of_engine, lendings) = (Arc::clone(queues), Arc::clone(&known.lendings));
        let limits = known.request.config();
        let ends =
            self.service.attach_guest((self.id, known.share), port, limits, queues_of_engine, lendings);
        let GuestEnds { bell, leash, questions: socket } = ends.map_err(|_| Decline::TooMany)?;
        let mut name = Token::default();
        self.random.fill_bytes(&mut name);
        let (nic, neighbours) = (Arc::clone(&self.nic), Arc::clone(&known.neighbours));
        let questions = Questions::new(nic, socket, name, address, neighbours);
        known.lent.push(Arc::downgrade(queues));
        known.running = Some(Running { bell: Bell::new(bell), leash, questions });
        Ok(true)
    }

    /// Ends all attachments: the guest's interface is gone, or it may not be served any more.
    pub fn close_all(&mut self) {
        self.attachments.iter_mut().for_each(Attachment::close);
    }

    /// Number of attachments.
    pub fn attachments(&self) -> usize {
        self.attachments.len()
    }

    /// Numbers of the attachments.
    #[cfg(any(test, feature = "test-util"))]
    pub(super) fn numbers(&self) -> impl Iterator<Item = u64> {
        self.attachments.iter().map(|known| known.number)
    }

    /// Descriptors that are readable when engines ring, ask or end.
    pub fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let running = self.attachments.iter().filter_map(|known| known.running.as_ref());
        running
            .flat_map(|running| [running.bell.descriptor()].into_iter().chain(running.questions.descriptor()))
    }

    /// Passes rings on and looks for what has ended. Returns when to call again at the latest.
    pub fn turn(&mut self, now: Instant) -> Option<Instant> {
        let (mut gone, mut next) = (vec![], None::<Instant>);
        let again_at = self.looked_at.map(|at| at + LOOK_AGAIN);
        let looks = again_at.is_none_or(|at| now >= at);
        let look_at = if looks { now + LOOK_EVERY } else { again_at.unwrap_or(now) };
        self.looked_at = if looks { Some(now) } else { self.looked_at };
        for known in &mut self.attachments {
            known.listen();
            let answers_at = known.running.as_mut().and_then(|running| running.questions.answer(now));
            let is_silent = now.saturating_duration_since(known.heard_at) > LEASE;
            let is_revoked =
                looks && known.lent.iter().filter_map(Weak::upgrade).any(|lent| lent.is_revoked());
            if is_silent || is_revoked {
                known.close();
            }
            let names = (known.number, known.token);
            if known.is_closing {
                if known.lent.iter().all(|lent| lent.strong_count() == 0) {
                    gone.push((known.mac, names));
                }
                next = Some(now + RELEASED_EVERY);
            } else if let Some(ring) = known.doorbell.due(now, false) {
                let (attachment, token) = names;
                self.nic.tell(&Message { attachment, token, body: ring }.encode(OWN, known.mac));
            }
            let ring = known.doorbell.due_at(now).filter(|_| !known.is_closing);
            next = [next, ring, answers_at, Some(look_at)].into_iter().flatten().min();
        }
        self.attachments.retain(|known| !gone.iter().any(|(_, (number, _))| *number == known.number));
        for (mac, names) in gone {
            self.tell(mac, names, Body::Closed);
        }
        next.filter(|_| !self.attachments.is_empty())
    }
}

impl Attachment {
    /// Adds runs to the list of a memory. Returns `Refused` if it can never be complete.
    fn collect(&mut self, next: Sharing, first: usize) -> ShareState {
        let Sharing { memory, bytes, total, runs } = next;
        if total == 0 || total > RUNS_MAX || self.shared.len() >= MEMORIES_MAX {
            if self.running.is_some() && memory != QUEUES && !self.shared.contains_key(&memory) {
                self.lendings.put((memory, None));
            }
            return ShareState::Refused;
        }
        if first == 0 && self.sharing.as_ref().is_none_or(|known| known.memory != memory) {
            self.sharing = Some(Sharing { memory, bytes, total, runs: vec![] });
        }
        let is_same =
            |known: &&mut Sharing| (known.memory, known.bytes, known.total) == (memory, bytes, total);
        if let Some(known) = self.sharing.as_mut().filter(is_same)
            && known.runs.len() == first
            && first + runs.len() <= total
        {
            known.runs.extend(runs);
        }
        ShareState::More
    }

    /// Relays a datagram of another application of the machine to the engine, in the frame that a network would have carried.
    fn relay(&self, nic: &dyn Nic, now: Instant, other: SocketAddr, bytes: &[u8]) {
        if self.running.is_none() {
            return;
        }
        let ends = Ends { from: other, from_mac: OWN, to: self.request.bind, to_mac: self.mac };
        let Some(headers) = Headers::new(&ends, bytes.len()) else { return };
        let headers = headers.as_bytes();
        let (bytes, partial_from) = ([headers, bytes].concat(), (headers.len() - UDP) as u16);
        let frame = GuestFrame { bytes, partial_from, is_local: true, ..GuestFrame::default() };
        // Before the engine receives it: answers are relayed, too.
        self.neighbours.lock().learn(other.ip(), self.mac, now);
        let is_relayed = nic.inject(frame);
        self.neighbours.lock().relay.count(is_relayed);
    }

    /// Hears the engine.
    fn listen(&mut self) {
        let Some(running) = &self.running else { return };
        for _ in 0..WORDS {
            match running.bell.hear() {
                Ok(None) => return,
                Ok(Some(_)) => self.doorbell.ring(),
                Err(_) => return self.close(),
            }
        }
    }

    /// Ends the engine; its memory is released soon after.
    fn close(&mut self) {
        self.is_closing = true;
        self.datagrams = None;
        if let Some(Running { leash, .. }) = self.running.take() {
            let _ = shutdown(&leash, Shutdown::Both);
        }
        // The engine takes nothing more, and what is kept here would keep the attachment from being over.
        self.lendings.discard();
    }
}

impl Drop for GuestHost {
    fn drop(&mut self) {
        self.close_all();
    }
}
