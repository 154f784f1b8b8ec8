//! Endpoints: posting operations, taking completions, waiting.

use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use super::notice::Notice;
use super::pages::Pages;
use super::patience::Patience;
use super::socket::wait_readable;
use super::{Attachment, Error, Inner, Shared};
use crate::proto::{
    Access, Completion, EndpointCounters, Engine, Key, Match, Outgoing, Peer, PostError, Receive, Seen,
    ShareSettings, Span,
};
use crate::seal::OVERHEAD;

/// After this time `wait` calls sched_yield(2) between polls. On a path through vnetd, vnetd may need this processor to deliver the message;
/// on the kernel's path, a round trip takes less.
const YIELD_NS: u64 = 10_000;
/// Polls between two looks at the clock, each of which takes a tenth of a poll.
const POLLS_A_LOOK: u32 = 4;
/// Upper bound on the sleep while several threads wait, because one thread may receive the packet that another thread
/// waits for.
const SHARED_SLEEP_NS: u64 = 20_000_000;

/// An endpoint: the application posts operations on it and takes completions from it. Dropping it closes it.
pub struct Endpoint {
    pub(super) shared: Arc<Shared>,
    pub(super) number: u16,
    pub(super) patience: Patience,
}

impl Endpoint {
    /// Number of the endpoint within the node.
    pub fn number(&self) -> u16 {
        self.number
    }

    /// Sets the endpoint's share of what the node sends.
    pub fn set_share(&self, share: ShareSettings) -> Result<(), Error> {
        let mut inner = self.shared.inner.lock();
        inner.engine.set_share(self.number, share)?;
        // What an earlier rate held back may leave now.
        self.shared.send(&mut inner);
        self.shared.rouse(&mut inner);
        Ok(())
    }

    /// Counters of what the endpoint has sent.
    pub fn counters(&self) -> EndpointCounters {
        self.shared.inner.lock().engine.endpoint_counters(self.number)
    }

    /// Registers memory whose first byte has the offset `base`, under `key` if one is given.
    pub fn register_at(&self, span: Span, base: u64, access: Access, key: Option<Key>) -> Result<Key, Error> {
        Ok(self.shared.inner.lock().engine.register(self.number, span, base, access, key)?)
    }

    /// Deregisters memory. When this call returns, no peer reads or writes the memory any more. The application must not write into a
    /// [`Region`](super::Region) during the call.
    pub fn deregister(&self, key: Key) -> Result<(), Error> {
        let mut inner = self.shared.inner.lock();
        let known = inner.engine.deregister(key);
        let taken = inner.local.take_back(key);
        self.shared.send(&mut inner);
        drop(inner);
        taken.map_err(Error::Memory)?;
        if known { Ok(()) } else { Err(PostError::UnknownKey.into()) }
    }

    /// Posts an operation, and sends as many packets as the window allows.
    pub fn post(&self, peer: Peer, out: &Outgoing) -> Result<(), Error> {
        let mut inner = self.shared.inner.lock();
        if !inner.engine.has_datagram(peer.address) {
            let most = inner.engine.config().datagram_max;
            let datagram = inner.wire.packet_to(peer.address, most)?.min(most);
            let is_sealed = inner.seal.is_sealed(peer.address);
            let datagram = if is_sealed { datagram - OVERHEAD } else { datagram };
            inner.engine.set_datagram(peer.address, datagram);
        }
        let Inner { engine, local, .. } = &mut *inner;
        // A write that is copied at once cannot be held to a rate.
        let is_limited = engine.share(self.number).rate > 0;
        let placed = (!is_limited).then(|| local.write(engine, peer, out)).flatten();
        engine.post(self.shared.now(), self.number, peer, placed.as_ref().unwrap_or(out))?;
        self.shared.send(&mut inner);
        // The operation may start a timer although nothing could be sent, and a buffered one has completed.
        self.shared.rouse(&mut inner);
        inner.signal(Some(self.number));
        Ok(())
    }

    /// Posts a buffer for a message.
    pub fn post_receive(&self, receive: &Receive) -> Result<(), Error> {
        let mut inner = self.shared.inner.lock();
        inner.engine.post_receive(self.number, receive)?;
        self.shared.send(&mut inner);
        inner.signal(Some(self.number));
        Ok(())
    }

    /// Registers memory of the library, and keeps it alive as long as the node.
    pub(crate) fn register_pages(&self, bytes: &Arc<Pages>, access: Access) -> Result<Key, Error> {
        let key = self.register_at(bytes.span(), 0, access, None)?;
        let mut inner = self.shared.inner.lock();
        inner.local.offer(key, Arc::clone(bytes));
        inner.kept.push(Arc::clone(bytes));
        Ok(key)
    }

    /// How packets to a peer travel now. A channel to a process of this host begins on the network.
    pub fn attachment(&self, peer: Peer) -> Attachment {
        self.shared.inner.lock().attachment(peer.address)
    }

    /// Withdraws a posted buffer. Returns false if no posted buffer has this context, or if a message is being received into
    /// it.
    pub fn cancel(&self, context: u64) -> bool {
        self.shared.inner.lock().engine.cancel(self.number, context)
    }

    /// Finds an unexpected message without receiving it; `claim` reserves it for `receive_claimed`.
    pub fn peek(&self, matching: &Match, claim: Option<u64>) -> Option<Seen> {
        let mut inner = self.shared.inner.lock();
        self.shared.polled.fetch_add(1, Ordering::Relaxed);
        self.shared.progress(&mut inner, Some(self.number));
        inner.signal(Some(self.number));
        inner.engine.peek(self.number, matching, claim)
    }

    /// Receives the message reserved with `claim`, or discards it if there is no span. Returns false if no such message exists.
    pub fn receive_claimed(&self, claim: u64, span: Option<Span>, context: u64) -> bool {
        let mut inner = self.shared.inner.lock();
        let taken = inner.engine.receive_claimed(self.number, claim, span, context);
        self.shared.send(&mut inner);
        inner.signal(Some(self.number));
        taken
    }

    /// Makes progress, then takes one completion if there is any.
    pub fn poll(&self) -> Option<Completion> {
        self.poll_by(Engine::poll).0
    }

    /// Like `poll`, but leaves the arrivals of peers' writes in the queue, so that peers which write with immediate data have to
    /// wait until the application takes them.
    pub fn poll_own(&self) -> Option<Completion> {
        self.poll_by(Engine::poll_own).0
    }

    /// Makes progress if no completion is there. Returns also whether packets of peers have arrived.
    fn poll_by(&self, take: impl Fn(&mut Engine, u16) -> Option<Completion>) -> (Option<Completion>, bool) {
        let mut inner = self.shared.inner.lock();
        self.shared.polled.fetch_add(1, Ordering::Relaxed);
        inner.lower(self.number);
        let (mut completion, mut arrived) = (take(&mut inner.engine, self.number), false);
        if completion.is_none() {
            let before = inner.engine.accepted();
            self.shared.progress(&mut inner, Some(self.number));
            arrived = inner.engine.accepted() != before;
            completion = take(&mut inner.engine, self.number);
        }
        self.finish_taking(&mut inner);
        (completion, arrived)
    }

    /// Takes one queued completion without making progress.
    pub fn take(&self) -> Option<Completion> {
        let mut inner = self.shared.inner.lock();
        let completion = inner.engine.poll(self.number);
        self.finish_taking(&mut inner);
        completion
    }

    /// Sends the credits that taking completions returns, and wakes the threads that wait for other completions.
    fn finish_taking(&self, inner: &mut Inner) {
        if inner.engine.has_departures() {
            self.shared.send(inner);
        }
        inner.signal(Some(self.number));
    }

    /// Waits for a completion: polls for 50 us, or longer where packets come soon (`patience.rs`), letting other processes run after 10 us, then sleeps.
    /// Returns `None` if the time expires.
    pub fn wait(&self, timeout: Option<Duration>) -> Option<Completion> {
        let shared = &self.shared;
        let _waits = Waits::begin(&shared.waiting);
        let start = shared.now();
        let end = timeout.map(|timeout| start.saturating_add(timeout.as_nanos() as u64));
        let (mut yield_from, mut spin_end) = (start + YIELD_NS, start + self.patience.first());
        let (mut now, mut heard_at) = (start, start);
        loop {
            let (before, mut heard) = (now, false);
            for _ in 0..POLLS_A_LOOK {
                let (completion, arrived) = self.poll_by(Engine::poll);
                heard |= arrived;
                if let Some(completion) = completion {
                    if now != start {
                        self.patience.waited(now - start);
                    }
                    return Some(completion);
                }
                std::hint::spin_loop();
            }
            now = shared.now();
            if end.is_some_and(|end| now >= end) {
                return None;
            }
            // With several threads, packets of one endpoint must not keep all of them polling.
            if heard && shared.waiting.load(Ordering::Relaxed) == 1 {
                if heard_at != before {
                    self.patience.waited(now - heard_at);
                }
                heard_at = now;
                spin_end = spin_end.max(now + self.patience.after_sleep());
            }
            if now < spin_end {
                if now >= yield_from {
                    std::thread::yield_now();
                }
                continue;
            }
            self.sleep(end);
            let woken = shared.now();
            self.patience.waited(woken - now);
            (now, heard_at) = (woken, woken);
            (yield_from, spin_end) = (now, now + self.patience.after_sleep());
        }
    }

    /// Returns a descriptor for `poll` or `epoll` that is readable when there may be completions to take. The application
    /// should take completions until there are none, call `pause` with a time of zero so that peers get their answers, and then
    /// wait. The descriptor stays open as long as the node.
    pub fn descriptor(&self) -> Result<RawFd, Error> {
        let mut inner = self.shared.inner.lock();
        let descriptor =
            inner.notices.get_or_new(self.number).and_then(|notice| notice.watch(self.shared.descriptor));
        descriptor.map_err(|error| Error::socket(&self.shared.bind, error))
    }

    /// Wakes a thread that sleeps on the endpoint's descriptor, or in `pause` or `wait`.
    pub fn wake(&self) {
        if let Some(notice) = self.shared.inner.lock().notices.get(self.number) {
            notice.raise();
        }
    }

    /// Sleeps until there may be completions to take, or until the time expires.
    pub fn pause(&self, timeout: Duration) {
        self.sleep(Some(self.shared.now() + timeout.as_nanos() as u64));
    }

    /// Sleeps until a packet arrives, a timer is due, or `end` is reached.
    fn sleep(&self, end: Option<u64>) {
        let shared = &self.shared;
        let mut inner = shared.inner.lock();
        inner.engine.hurry();
        shared.send(&mut inner);
        let now = shared.now();
        if inner.local.arm() {
            // Packets are there. The application may be about to sleep on the endpoint's descriptor.
            inner.notices.get(self.number).into_iter().for_each(Notice::raise);
            return;
        }
        if inner.engine.waiting(self.number) > 0 || end.is_some_and(|end| end <= now) {
            return;
        }
        let others = shared.sleeping.fetch_add(1, Ordering::Relaxed);
        let wake_at = inner.engine.wake_at(now);
        let notice = inner.notices.get_or_new(self.number);
        // Without an event no other thread can wake this one.
        let shared_sleep = (others > 0 || notice.is_err()).then_some(now + SHARED_SLEEP_NS);
        let wake = [wake_at, end, shared_sleep].into_iter().flatten().min();
        let event = notice.map_or(-1, |notice| {
            let until = wake.unwrap_or(u64::MAX);
            notice.until = if notice.sleepers == 0 { until } else { notice.until.max(until) };
            notice.sleepers += 1;
            notice.event()
        });
        drop(inner);
        wait_readable(&[shared.descriptor, event], wake.map(|wake| wake.saturating_sub(now)));
        shared.sleeping.fetch_sub(1, Ordering::Relaxed);
        if event >= 0
            && let Some(notice) = shared.inner.lock().notices.get(self.number)
        {
            notice.sleepers -= 1;
        }
    }
}

/// Counts a thread in `Shared::waiting` until it is dropped.
struct Waits<'a>(&'a AtomicU32);

impl<'a> Waits<'a> {
    fn begin(waiting: &'a AtomicU32) -> Self {
        waiting.fetch_add(1, Ordering::Relaxed);
        Self(waiting)
    }
}

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        let mut inner = self.shared.inner.lock();
        inner.engine.close(self.number);
        let Inner { engine, local, .. } = &mut *inner;
        local.take_back_closed(engine);
        self.shared.send(&mut inner);
    }
}
