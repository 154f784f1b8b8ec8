//! One attachment on the helper's side, without I/O: requests are repeated until the daemon has answered.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use super::doorbell::Doorbell;
use super::wire::{Body, GROUP, Message, QUEUES, QUEUES_BYTES, RUNS_SENT, Run, ShareState, Token};
use crate::daemon::MacAddress;
use crate::meeting::{Decline, Request};

/// Time after which a request without answer is repeated; doubled up to the longest.
const AGAIN: Duration = Duration::from_millis(20);
const AGAIN_MAX: Duration = Duration::from_millis(500);
/// How long the daemon has to answer the first request, and how long it may be silent later.
const PATIENCE: Duration = Duration::from_secs(3);
const SILENCE_MAX: Duration = Duration::from_secs(6);
/// Interval at which the daemon hears that the helper is alive. It ends attachments that are silent for longer than `host::LEASE`.
const ALIVE_EVERY: Duration = Duration::from_secs(1);

/// What the daemon has said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The engine runs at this address.
    Attached(SocketAddr),
    /// It does not, for this reason. The attachment is over when the daemon has confirmed that.
    Declined(Decline),
    /// The application is to be woken.
    Ring,
    /// The daemon asks for the MAC address of a peer.
    Ask(IpAddr),
    /// Relay this datagram of the engine to another application of the machine, at this address.
    Datagram(SocketAddr, Vec<u8>),
    /// The engine has ended, or the daemon is silent.
    Lost,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Opening,
    /// The queues are being shared.
    Sharing,
    Running,
    Closing,
    Closed,
}

struct Sharing {
    memory: u32,
    bytes: u64,
    /// Empty: it cannot be lent.
    runs: Vec<Run>,
    /// Number of runs that the daemon has.
    done: usize,
}

/// An attachment.
pub struct Client {
    mac: MacAddress,
    token: Token,
    request: Request,
    attachment: u64,
    address: Option<SocketAddr>,
    phase: Phase,
    shares: VecDeque<Sharing>,
    doorbell: Doorbell,
    neighbours: VecDeque<(IpAddr, MacAddress)>,
    opened_at: Instant,
    heard_at: Instant,
    sent_at: Instant,
    /// When the current request was sent last, and the time until it is repeated.
    asked: Option<(Instant, Duration)>,
}

impl Client {
    /// An attachment of the interface with this MAC address, whose queues lie in these pages.
    pub fn new(now: Instant, mac: MacAddress, token: Token, request: Request, queues: Vec<Run>) -> Self {
        let bytes = QUEUES_BYTES as u64;
        Self {
            mac,
            token,
            request,
            attachment: 0,
            address: None,
            phase: Phase::Opening,
            shares: VecDeque::from([Sharing { memory: QUEUES, bytes, runs: queues, done: 0 }]),
            doorbell: Doorbell::default(),
            neighbours: VecDeque::new(),
            opened_at: now,
            heard_at: now,
            sent_at: now,
            asked: None,
        }
    }

    /// Secret of the attachment, by which its frames are recognised.
    pub fn token(&self) -> Token {
        self.token
    }

    /// True when the daemon uses none of the attachment's memory any more.
    pub fn is_closed(&self) -> bool {
        self.phase == Phase::Closed
    }

    /// Lends memory of the application; without runs the daemon learns that it cannot be lent.
    pub fn share(&mut self, memory: u32, bytes: u64, runs: Vec<Run>) {
        self.shares.push_back(Sharing { memory, bytes, runs, done: 0 });
    }

    /// Rings for the engine.
    pub fn ring(&mut self) {
        self.doorbell.ring();
    }

    /// Tells the MAC address of a peer.
    pub fn tell(&mut self, ip: IpAddr, mac: MacAddress) {
        self.neighbours.push_back((ip, mac));
    }

    /// Ends the attachment. Its memory stays the daemon's until `is_closed`.
    pub fn close(&mut self) {
        if !matches!(self.phase, Phase::Closing | Phase::Closed) {
            (self.phase, self.asked) = (Phase::Closing, None);
        }
    }

    /// Encodes a DATAGRAM frame: relays a datagram that another application of the machine, at `from`, has sent to this one. `None`: the engine does not
    /// run.
    pub fn datagram(&self, from: SocketAddr, bytes: &[u8]) -> Option<Vec<u8>> {
        let body = Body::Datagram { other: from, bytes: bytes.to_vec() };
        let (attachment, token) = (self.attachment, self.token);
        self.is_running().then(|| Message { attachment, token, body }.encode(self.mac, GROUP))
    }

    /// Whether the engine runs.
    pub fn is_running(&self) -> bool {
        self.phase == Phase::Running
    }

    /// Takes a message of the daemon.
    pub fn hear(&mut self, now: Instant, message: Message) -> Option<Event> {
        let is_own = message.token == self.token
            && (message.attachment == self.attachment
                || matches!(message.body, Body::Opened(_) | Body::Declined(_)));
        if !is_own || self.phase == Phase::Closed {
            return None;
        }
        self.heard_at = now;
        match (message.body, self.phase) {
            (Body::Opened(address), Phase::Opening) => {
                (self.attachment, self.address) = (message.attachment, Some(address));
                (self.phase, self.asked) = (Phase::Sharing, None);
                None
            }
            (Body::Declined(why), Phase::Opening) => {
                self.phase = Phase::Closed;
                Some(Event::Declined(why))
            }
            (Body::Declined(why), Phase::Sharing) => {
                self.close();
                Some(Event::Declined(why))
            }
            (Body::Closed, Phase::Closing) => {
                self.phase = Phase::Closed;
                None
            }
            (Body::Closed, Phase::Sharing | Phase::Running) => {
                self.phase = Phase::Closed;
                Some(Event::Lost)
            }
            (Body::Shared { memory, next, state }, Phase::Sharing | Phase::Running) => {
                self.shared(memory, next.into(), state)
            }
            (Body::Ring { rung, heard, asks }, Phase::Running) => {
                self.doorbell.hear(rung, heard, asks).then_some(Event::Ring)
            }
            (Body::Ask(ip), Phase::Running) => Some(Event::Ask(ip)),
            (Body::Datagram { other, bytes }, Phase::Running) => Some(Event::Datagram(other, bytes)),
            _ => None,
        }
    }

    fn shared(&mut self, memory: u32, next: usize, state: ShareState) -> Option<Event> {
        let sharing = self.shares.front_mut().filter(|sharing| sharing.memory == memory)?;
        if state == ShareState::More {
            if next > sharing.done && next <= sharing.runs.len() {
                (sharing.done, self.asked) = (next, None);
            }
            return None;
        }
        self.shares.pop_front();
        self.asked = None;
        match (memory, state, self.address) {
            (QUEUES, ShareState::Used, Some(address)) => {
                self.phase = Phase::Running;
                Some(Event::Attached(address))
            }
            (QUEUES, ..) => {
                self.close();
                Some(Event::Declined(Decline::Memory))
            }
            _ => None,
        }
    }

    /// Returns the next frame that is due. An event tells that the daemon is silent.
    pub fn depart(&mut self, now: Instant) -> (Option<Vec<u8>>, Option<Event>) {
        let is_late = |at: Instant, most: Duration| now.saturating_duration_since(at) >= most;
        let mut event = None;
        if self.phase == Phase::Opening && is_late(self.opened_at, PATIENCE) {
            // The daemon may have opened it: its answer may be lost.
            self.close();
            event = Some(Event::Declined(Decline::Silent));
        }
        if matches!(self.phase, Phase::Sharing | Phase::Running) && is_late(self.heard_at, SILENCE_MAX) {
            self.close();
            event = Some(Event::Lost);
        }
        let body = self.next_body(now);
        if body.is_some() {
            self.sent_at = now;
        }
        let (attachment, token) = (self.attachment, self.token);
        (body.map(|body| Message { attachment, token, body }.encode(self.mac, GROUP)), event)
    }

    fn next_body(&mut self, now: Instant) -> Option<Body> {
        if self.phase == Phase::Closed {
            return None;
        }
        if self.phase == Phase::Running {
            if let Some((ip, mac)) = self.neighbours.pop_front() {
                return Some(Body::Neighbour(ip, mac));
            }
            let is_quiet = now.saturating_duration_since(self.sent_at) >= ALIVE_EVERY;
            if let Some(ring) = self.doorbell.due(now, is_quiet) {
                return Some(ring);
            }
        }
        let request = match self.phase {
            Phase::Opening => Body::Open(self.request),
            Phase::Closing => Body::Close,
            _ => {
                let Sharing { memory, bytes, runs, done } = self.shares.front()?;
                let chunk = &runs[*done..runs.len().min(done + RUNS_SENT)];
                let (total, first) = (runs.len() as u16, *done as u16);
                Body::Share { memory: *memory, bytes: *bytes, total, first, runs: chunk.to_vec() }
            }
        };
        let after = match self.asked {
            None => AGAIN,
            Some((at, after)) if now.saturating_duration_since(at) >= after => (after * 2).min(AGAIN_MAX),
            Some(_) => return None,
        };
        self.asked = Some((now, after));
        Some(request)
    }

    /// When `depart` has to be called again at the latest.
    pub fn wakes_at(&self, now: Instant) -> Option<Instant> {
        if self.phase == Phase::Closed {
            return None;
        }
        let has_request = self.phase != Phase::Running || !self.shares.is_empty();
        let request = has_request.then(|| self.asked.map_or(now, |(at, after)| at + after));
        let running = (self.phase == Phase::Running).then(|| self.sent_at + ALIVE_EVERY);
        let bell = (self.phase == Phase::Running).then(|| self.doorbell.due_at(now)).flatten();
        let told = (!self.neighbours.is_empty()).then_some(now);
        [request, running, bell, told].into_iter().flatten().min()
    }
}
