//! The process's side of the daemon engine: the same calls as those of the process engine.
//!
//! Calls that need an answer wait for the daemon; posting and polling do not. Whoever polls takes events for all endpoints, and wakes the
//! threads that sleep on others.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};

use super::arena;
use super::entry::{Answer, Submission};
use super::inner::Inner;
use super::posting::{Posting, buffered};
use super::queue::Queues;
use super::served::{RECEIVES_MAX, WAY_LOCAL, WAY_SEALED};
use crate::ether::address::Bind;
use crate::meeting::{Guest, Heard, Request};
use crate::node::notice::Notice;
use crate::node::pages::Pages;
use crate::node::socket::{datagram_to, wait_readable};
use crate::node::{Attachment, Error, Options};
use crate::proto::{
    Access, Completion, EndpointCounters, Key, Kind, Match, Outgoing, Peer, PostError, Receive, Seen,
    ShareSettings, Span,
};
use crate::ring::{Bell, Word};

/// How long a call waits for the daemon.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long `wait` polls before it sleeps.
const SPIN: Duration = Duration::from_micros(50);
/// How often a call that waits for an answer looks: another thread may have taken it.
const LOOK_NS: u64 = 1_000_000;
/// How long closing waits for operations that were reported as complete before they were.
const LINGER: Duration = Duration::from_secs(2);
/// How often a process that only polls looks for events before it looks whether the daemon is gone, which costs a system call.
const LOOKS_PER_BELL: u32 = 4096;
/// Maximum number of peers whose datagram size the daemon was told.
const ROUTES_MAX: usize = 4096;
/// How often a thread takes events for threads that sleep, instead of arming the queue for them.
const REARMS_MAX: u32 = 4;

struct Shared {
    inner: Mutex<Inner>,
    bell: Bell,
    /// Keeps the attachment: the daemon ends it when the connection ends.
    _daemon: Guest,
    address: SocketAddr,
    /// The daemon is reached through the helper in this virtual machine.
    is_vm: bool,
}

/// A process on the network whose engine the daemon runs.
pub(crate) struct Node {
    shared: Arc<Shared>,
}

/// An endpoint of such a process. Dropping it closes it.
pub(crate) struct Endpoint {
    shared: Arc<Shared>,
    number: u16,
}

fn lost() -> Error {
    Error::Daemon(
        "it has ended the attachment: it was stopped, or does not allow it any more; open a new node".into(),
    )
}

impl Node {
    /// Opens a node; `is_vm`: the daemon is the helper in a virtual machine.
    pub(crate) fn open(options: &Options, is_vm: bool) -> Result<Self, Error> {
        let Some(name) = &options.meeting else {
            return Err(Error::Daemon("VNET_RDMA_MEETING is empty; unset it".into()));
        };
        let Bind::Udp(bind) = options.bind else {
            return Err(Error::Daemon("it has no raw Ethernet: use the process engine, or UDP".into()));
        };
        let daemon = Guest::connect(name).map_err(|error| {
            let mend = match is_vm {
                true => "is vnet-rdma-guest running in this virtual machine?",
                false => "is vnetd running, and has the container an interface of its own?",
            };
            Error::Daemon(format!("cannot reach it in this network namespace: {error}; {mend}"))
        })?;
        let end = Instant::now() + PATIENCE;
        let is_asked = daemon.attach(Request::new(bind, &options.config));
        while is_asked && Instant::now() < end {
            match daemon.receive().map_err(|error| Error::Daemon(format!("it has hung up: {error}")))? {
                None => wait_readable(&[daemon.descriptor().as_raw_fd()], Some(LOOK_NS)),
                Some(Heard::Declined(why)) => return Err(Error::Daemon(why.to_string())),
                Some(Heard::Attached { address, memory, bell }) => {
                    let queues = Queues::of_process(memory).map_err(Error::Memory)?;
                    let inner = Inner::new(queues, if is_vm { arena::LOCKED_BYTES } else { arena::BYTES });
                    let (inner, bell) = (Mutex::new(inner), Bell::new(bell));
                    let shared = Shared { inner, bell, _daemon: daemon, address, is_vm };
                    return Ok(Self { shared: Arc::new(shared) });
                }
                Some(_) => {}
            }
        }
        Err(Error::Daemon("it does not answer: an older vnetd?".into()))
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.shared.address
    }

    pub(crate) fn endpoint(&self, number: Option<u16>) -> Result<Endpoint, Error> {
        let number = self.shared.call(|ticket| Submission::Open { ticket, number })? as u16;
        self.shared.inner.lock().completions.insert(number, VecDeque::new());
        Ok(Endpoint { shared: Arc::clone(&self.shared), number })
    }
}

impl Drop for Node {
    /// Waits up to two seconds until operations have ended, then leaves the daemon.
    fn drop(&mut self) {
        self.shared.linger(|posting| posting.operations());
        self.shared.bell.end();
        self.shared.inner.lock().is_lost = true;
    }
}

impl Shared {
    /// Submits an entry and wakes the daemon if it sleeps. Returns false if the queue is full.
    fn submit(&self, inner: &mut Inner, submission: &Submission) -> Result<bool, Error> {
        if inner.is_lost {
            return Err(lost());
        }
        let is_written = inner.queues.writer.push(&submission.encode()).map_err(|_| lost())?;
        if inner.queues.writer.wakes_reader() {
            self.bell.say(&Word::Ring);
        }
        Ok(is_written)
    }

    /// Takes events, and wakes the threads that wait for them.
    fn progress(&self, inner: &mut Inner, own: Option<u16>) {
        for _ in 0..REARMS_MAX {
            let mut is_well = inner.take_events().is_ok();
            if inner.queues.reader.wakes_writer() {
                self.bell.say(&Word::Ring);
            }
            inner.looks = inner.looks.wrapping_add(1);
            let is_rung = inner.is_armed && !inner.queues.reader.is_armed();
            if is_rung || inner.looks.is_multiple_of(LOOKS_PER_BELL) {
                is_well &= self.hear(inner);
            }
            if !is_well && !inner.is_lost {
                inner.lose();
            }
            // Threads that sleep rely on the bell, which this call may have silenced.
            if !inner.notices.any_sleep(|_| true) || !self.arm(inner) {
                break;
            }
        }
        inner.signal(own);
    }

    /// Silences the bell. Returns false if the daemon is gone.
    fn hear(&self, inner: &mut Inner) -> bool {
        loop {
            match self.bell.hear() {
                Ok(Some(_)) => inner.is_armed = inner.queues.reader.is_armed(),
                Ok(None) => return true,
                Err(_) => return false,
            }
        }
    }

    /// Asks the daemon to ring. Returns true if events are there.
    fn arm(&self, inner: &mut Inner) -> bool {
        inner.is_armed = true;
        inner.queues.reader.arm()
    }

    /// Submits a request and waits for its answer.
    fn ask(&self, make: impl FnOnce(u64) -> Submission) -> Result<Answer, Error> {
        let mut inner = self.inner.lock();
        let ticket = inner.next_ticket;
        inner.next_ticket += 1;
        let (request, end) = (make(ticket), Instant::now() + PATIENCE);
        let mut is_submitted = false;
        loop {
            is_submitted = is_submitted || self.submit(&mut inner, &request)?;
            self.progress(&mut inner, None);
            if let Some(answer) = inner.answers.remove(&ticket) {
                return Ok(answer);
            }
            if inner.is_lost {
                return Err(lost());
            }
            if Instant::now() >= end {
                return Err(Error::Daemon("it does not answer".into()));
            }
            self.nap(inner);
            inner = self.inner.lock();
        }
    }

    /// Sleeps until the daemon rings, or for a moment.
    fn nap(&self, mut inner: MutexGuard<'_, Inner>) {
        let is_there = self.arm(&mut inner);
        drop(inner);
        if !is_there {
            wait_readable(&[self.bell_descriptor()], Some(LOOK_NS));
        }
        // The daemon's end is noticed although it has not rung.
        let mut inner = self.inner.lock();
        if !self.hear(&mut inner) && !inner.is_lost {
            inner.lose();
        }
    }

    fn call(&self, make: impl FnOnce(u64) -> Submission) -> Result<u64, Error> {
        match self.ask(make)? {
            Answer::Done(value) => Ok(value),
            Answer::Refused(error) => Err(error.into()),
            Answer::Seen(_) | Answer::Counted(_) => Err(lost()),
        }
    }

    fn bell_descriptor(&self) -> RawFd {
        self.bell.descriptor().as_raw_fd()
    }

    /// Waits until nothing of this kind is under way.
    fn linger(&self, left: impl Fn(&Posting) -> usize) {
        let end = Instant::now() + LINGER;
        loop {
            let mut inner = self.inner.lock();
            self.progress(&mut inner, None);
            if inner.is_lost || left(&inner.posting) == 0 || Instant::now() >= end {
                return;
            }
            self.nap(inner);
        }
    }
}

impl Endpoint {
    pub(crate) fn number(&self) -> u16 {
        self.number
    }

    fn open<'a>(&self, inner: &'a Mutex<Inner>) -> Result<MutexGuard<'a, Inner>, Error> {
        let inner = inner.lock();
        if inner.is_lost { Err(lost()) } else { Ok(inner) }
    }

    /// Registers memory that the daemon knows already.
    pub(crate) fn register_at(
        &self,
        span: Span,
        base: u64,
        access: Access,
        key: Option<Key>,
    ) -> Result<Key, Error> {
        let found = self.open(&self.shared.inner)?.posting.locate(span);
        let extent = found.ok_or(Error::Foreign)?;
        let endpoint = self.number;
        self.shared.call(|ticket| Submission::Register { ticket, endpoint, extent, base, access, key })
    }

    /// Registers memory of the library.
    pub(crate) fn register_pages(&self, pages: &Arc<Pages>, access: Access) -> Result<Key, Error> {
        {
            let mut inner = self.open(&self.shared.inner)?;
            inner.posting.lend(&self.shared.bell, pages).map_err(Error::Memory)?;
            inner.kept.push(Arc::clone(pages));
        }
        self.register_at(pages.span(), 0, access, None)
    }

    pub(crate) fn set_share(&self, share: ShareSettings) -> Result<(), Error> {
        let endpoint = self.number;
        self.shared.call(|ticket| Submission::Share { ticket, endpoint, share }).map(|_| ())
    }

    pub(crate) fn attachment(&self, peer: Peer) -> Attachment {
        match self.shared.call(|ticket| Submission::Way { ticket, peer: peer.address }) {
            Ok(WAY_LOCAL) => Attachment::SameHost,
            Ok(WAY_SEALED) => Attachment::Sealed,
            _ if self.shared.is_vm => Attachment::Vm,
            _ => Attachment::Daemon,
        }
    }

    pub(crate) fn counters(&self) -> Result<EndpointCounters, Error> {
        let endpoint = self.number;
        match self.shared.ask(|ticket| Submission::Count { ticket, endpoint })? {
            Answer::Counted(counters) => Ok(counters),
            _ => Err(lost()),
        }
    }

    pub(crate) fn deregister(&self, key: Key) -> Result<(), Error> {
        self.shared.call(|ticket| Submission::Deregister { ticket, key }).map(|_| ())
    }

    pub(crate) fn post(&self, peer: Peer, out: &Outgoing) -> Result<(), Error> {
        let shared = &self.shared;
        let mut inner = self.open(&shared.inner)?;
        // Room for this operation and for the size of its datagrams.
        if inner.queues.writer.room().map_err(|_| lost())? < 2 {
            return Err(PostError::Busy.into());
        }
        if !inner.routes.contains(&peer.address) {
            if inner.routes.len() >= ROUTES_MAX {
                inner.routes.clear();
            }
            if let Ok(bytes) = datagram_to(peer.address) {
                let route = Submission::Route { address: peer.address, bytes: bytes as u64 };
                shared.submit(&mut inner, &route)?;
            }
            inner.routes.insert(peer.address);
        }
        let (endpoint, data) = (self.number, out.data);
        let (number, task, extent) = inner.posting.operation(&shared.bell, endpoint, out)?;
        let context = number.into();
        let post = Submission::Post { endpoint, peer, task, extent, data, context };
        shared.submit(&mut inner, &post)?;
        if out.is_buffered && !out.is_quiet {
            let completion = buffered(peer, out);
            inner.report(endpoint, completion);
            inner.signal(Some(endpoint));
        }
        Ok(())
    }

    pub(crate) fn post_receive(&self, receive: &Receive) -> Result<(), Error> {
        let mut inner = self.open(&self.shared.inner)?;
        if inner.posting.buffers() >= RECEIVES_MAX || inner.queues.writer.room().map_err(|_| lost())? == 0 {
            return Err(PostError::Busy.into());
        }
        let (endpoint, Receive { matching, several, .. }) = (self.number, *receive);
        let (number, extent) = inner.posting.receive(&self.shared.bell, endpoint, receive)?;
        let context = number.into();
        let posted = Submission::Receive { endpoint, matching, extent, context, several };
        self.shared.submit(&mut inner, &posted)?;
        Ok(())
    }

    pub(crate) fn cancel(&self, context: u64) -> bool {
        let Some(number) = self.shared.inner.lock().posting.buffer(self.number, context) else {
            return false;
        };
        let (endpoint, context) = (self.number, number.into());
        let is_withdrawn = self.shared.call(|ticket| Submission::Cancel { ticket, endpoint, context });
        let is_withdrawn = is_withdrawn.is_ok_and(|answer| answer == 1);
        if is_withdrawn {
            self.shared.inner.lock().posting.release(number);
        }
        is_withdrawn
    }

    pub(crate) fn peek(&self, matching: &Match, claim: Option<u64>) -> Option<Seen> {
        let (endpoint, matching) = (self.number, *matching);
        let answer = self.shared.ask(|ticket| Submission::Peek { ticket, endpoint, matching, claim });
        match answer {
            Ok(Answer::Seen(seen)) => Some(seen),
            _ => None,
        }
    }

    pub(crate) fn receive_claimed(&self, claim: u64, span: Option<Span>, context: u64) -> bool {
        let endpoint = self.number;
        // A discarded message is reported, too.
        let (matching, buffer) = (Match::default(), span.unwrap_or(Span::EMPTY));
        let receive = Receive { matching, span: buffer, context, several: None };
        let prepared = self.shared.inner.lock().posting.receive(&self.shared.bell, endpoint, &receive);
        let Ok((number, extent)) = prepared else { return false };
        let (extent, context) = (span.map(|_| extent), number.into());
        let taken =
            self.shared.call(|ticket| Submission::Claimed { ticket, endpoint, claim, extent, context });
        let is_taken = taken.is_ok_and(|answer| answer == 1);
        if !is_taken {
            self.shared.inner.lock().posting.release(number);
        }
        is_taken
    }

    pub(crate) fn poll(&self) -> Option<Completion> {
        self.poll_by(|queue| queue.pop_front(), true)
    }

    pub(crate) fn poll_own(&self) -> Option<Completion> {
        let own = |queue: &mut VecDeque<Completion>| {
            let place = queue.iter().position(|completion| completion.kind != Kind::Arrival)?;
            queue.remove(place)
        };
        self.poll_by(own, true)
    }

    pub(crate) fn take(&self) -> Option<Completion> {
        self.poll_by(|queue| queue.pop_front(), false)
    }

    fn poll_by(
        &self,
        take: impl Fn(&mut VecDeque<Completion>) -> Option<Completion>,
        makes_progress: bool,
    ) -> Option<Completion> {
        let mut inner = self.shared.inner.lock();
        if let Some(notice) = inner.notices.get(self.number) {
            notice.lower();
        }
        let mut completion = inner.completions.get_mut(&self.number).and_then(&take);
        if completion.is_none() && makes_progress {
            self.shared.progress(&mut inner, Some(self.number));
            completion = inner.completions.get_mut(&self.number).and_then(&take);
        }
        inner.signal(Some(self.number));
        completion
    }

    pub(crate) fn wait(&self, timeout: Option<Duration>) -> Option<Completion> {
        let start = Instant::now();
        let end = timeout.and_then(|timeout| start.checked_add(timeout));
        let mut spin_end = start + SPIN;
        loop {
            if let Some(completion) = self.poll() {
                return Some(completion);
            }
            let now = Instant::now();
            if end.is_some_and(|end| now >= end) {
                return None;
            }
            if now < spin_end {
                std::hint::spin_loop();
                continue;
            }
            self.sleep(end.map(|end| end - now));
            spin_end = Instant::now() + SPIN / 10;
        }
    }

    pub(crate) fn descriptor(&self) -> Result<RawFd, Error> {
        let bell = self.shared.bell_descriptor();
        let mut inner = self.shared.inner.lock();
        let descriptor = inner.notices.get_or_new(self.number).and_then(|notice| notice.watch(bell));
        descriptor.map_err(|error| Error::Socket(self.shared.address, error))
    }

    pub(crate) fn wake(&self) {
        if let Some(notice) = self.shared.inner.lock().notices.get(self.number) {
            notice.raise();
        }
    }

    pub(crate) fn pause(&self, timeout: Duration) {
        self.sleep(Some(timeout));
    }

    /// Sleeps until there may be completions to take, or until the time expires.
    fn sleep(&self, timeout: Option<Duration>) {
        let shared = &self.shared;
        let mut inner = shared.inner.lock();
        if shared.arm(&mut inner) {
            // The application may be about to sleep on the endpoint's descriptor.
            inner.notices.get(self.number).into_iter().for_each(Notice::raise);
            return;
        }
        if inner.waiting(self.number) > 0 || inner.is_lost || timeout.is_some_and(|left| left.is_zero()) {
            return;
        }
        // Without an event no other thread can wake this one.
        let mut nap = timeout;
        let event = match inner.notices.get_or_new(self.number) {
            Ok(notice) => {
                notice.sleepers += 1;
                Some(notice.event())
            }
            Err(_) => {
                nap = Some(Duration::from_nanos(LOOK_NS));
                None
            }
        };
        drop(inner);
        let nap = nap.map(|nap| u64::try_from(nap.as_nanos()).unwrap_or(u64::MAX));
        wait_readable(&[shared.bell_descriptor(), event.unwrap_or(-1)], nap);
        let mut inner = shared.inner.lock();
        if event.is_some()
            && let Some(notice) = inner.notices.get(self.number)
        {
            notice.sleepers -= 1;
        }
        if !shared.hear(&mut inner) && !inner.is_lost {
            inner.lose();
        }
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        let endpoint = self.number;
        self.shared.linger(|posting| posting.buffered(Some(endpoint)));
        let _ = self.shared.call(|ticket| Submission::Close { ticket, endpoint });
        let mut inner = self.shared.inner.lock();
        inner.posting.release_all(endpoint);
        inner.completions.remove(&endpoint);
    }
}
