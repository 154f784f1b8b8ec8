//! Inquiries: the control of one host asks another host's control where it would send a frame (`vnet trace --follow`).
//!
//! A question is a probe (type 2) whose payload begins with [`MAGIC`], the answer a probe reply (type 3) with the same magic;
//! control defines the text that follows. So inquiries take the path of the link's frames and need no separate port. A peer that
//! does not support them echoes the question like any probe, which the asking host recognises.
//!
//! Peers are not trusted: a dispatcher only copies texts of limited length into a short queue, within the link's rate limit, and
//! control reads that queue. An answer is never longer than its question and goes to the link's remote address only, so inquiries
//! allow no amplification.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use rustix::event::{EventfdFlags, eventfd};

use crate::frame::PortId;

/// First bytes of a question's or answer's payload.
pub const MAGIC: [u8; 8] = *b"vnet-ask";
/// Maximum length of a question's or answer's text in bytes; less if the path MTU requires it.
pub const TEXT_MAX: usize = 1400;
/// Maximum number of questions and answers that wait for control. Further ones are ignored, because the other side retries.
const WAITING_MAX: usize = 64;
/// Rate limit per link, separately for questions and answers: burst size, and rate per second.
const RATE_PER_S: u64 = 64;
const NS_PER_S: u64 = 1_000_000_000;
const NS_PER_MS: u64 = 1_000_000;

/// True if a probe's payload is a question or an answer.
#[inline]
pub(super) fn is_inquiry(payload: &[u8]) -> bool {
    payload.starts_with(&MAGIC)
}

/// A received question or answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inquiry {
    /// Port of the link on which it arrived.
    pub link: PortId,
    /// True for an answer.
    pub answer: bool,
    /// The bytes behind the magic.
    pub text: Vec<u8>,
}

/// The queue from dispatchers to control.
pub struct Inbox {
    waiting: Mutex<VecDeque<Inquiry>>,
    bell: OwnedFd,
}

impl Inbox {
    /// An empty queue.
    pub fn new() -> io::Result<Inbox> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Inbox { waiting: Mutex::default(), bell })
    }

    /// Takes all waiting inquiries.
    pub fn take(&self) -> Vec<Inquiry> {
        let mut count = [0; 8];
        // Fails if the eventfd is empty: nothing has arrived since the last call.
        let _ = rustix::io::read(&self.bell, &mut count);
        self.waiting.lock().drain(..).collect()
    }

    fn put(&self, inquiry: Inquiry) {
        let mut waiting = self.waiting.lock();
        if waiting.len() < WAITING_MAX {
            waiting.push_back(inquiry);
            drop(waiting);
            // Fails only when the counter is full, and in that case control is already woken.
            let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
        }
    }
}

impl AsFd for Inbox {
    /// The descriptor is readable while an inquiry waits.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }
}

impl AsRawFd for Inbox {
    fn as_raw_fd(&self) -> i32 {
        self.bell.as_raw_fd()
    }
}

/// Inbox and rate limiters of a link.
#[derive(Default)]
pub(super) struct Inquiries {
    inbox: OnceLock<Arc<Inbox>>,
    /// Time at which the token bucket is full again, for questions and for answers, as in `route/storm_limit.rs`.
    empty_at_ns: [AtomicU64; 2],
}

impl std::fmt::Debug for Inquiries {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Inquiries").field("taken", &self.inbox.get().is_some()).finish()
    }
}

impl Inquiries {
    /// Copies a question or answer for control. Returns false if the link has no inbox: a question is then treated as an ordinary
    /// probe.
    #[cold]
    pub(super) fn put(&self, link: PortId, answer: bool, payload: &[u8], now_ms: u64) -> bool {
        let Some(inbox) = self.inbox.get() else { return false };
        let text = payload.get(MAGIC.len()..).unwrap_or_default();
        if text.len() <= TEXT_MAX && self.admits(answer, now_ms) {
            inbox.put(Inquiry { link, answer, text: text.to_vec() });
        }
        true
    }

    /// Delivers arriving inquiries to `inbox` from now on. Only the first call has an effect.
    pub(super) fn answer_by(&self, inbox: Arc<Inbox>) {
        let _ = self.inbox.set(inbox);
    }

    fn admits(&self, answer: bool, now_ms: u64) -> bool {
        let now = now_ms * NS_PER_MS;
        let bucket = &self.empty_at_ns[usize::from(answer)];
        let next = |empty_at: u64| {
            let empty_at = empty_at.max(now) + NS_PER_S / RATE_PER_S;
            (empty_at - now <= NS_PER_S).then_some(empty_at)
        };
        bucket.fetch_update(Relaxed, Relaxed, next).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn length_and_rate_are_limited() {
        let inquiries = Inquiries::default();
        let payload = [&MAGIC[..], b"text"].concat();
        assert!(is_inquiry(&payload) && !is_inquiry(b"vnet-as") && !is_inquiry(&[0; 64]));
        assert!(!inquiries.put(PortId(1), false, &payload, 0), "no inbox");
        let inbox = Arc::new(Inbox::new().unwrap());
        inquiries.answer_by(inbox.clone());
        assert!(inquiries.put(PortId(1), false, &payload, 1000));
        assert!(inquiries.put(PortId(1), true, &[0; TEXT_MAX + 9], 1000));
        let want = Inquiry { link: PortId(1), answer: false, text: b"text".to_vec() };
        assert_eq!((inbox.take(), inbox.take()), (vec![want], vec![]), "the other one is too long");
        let count = |now_ms| {
            (0..500).for_each(|_| assert!(inquiries.put(PortId(1), false, &payload, now_ms)));
            inbox.take().len() as u64
        };
        assert_eq!(count(1000), RATE_PER_S - 1);
        assert_eq!(count(1250), RATE_PER_S / 4);
        assert!(inquiries.put(PortId(1), true, &payload, 1250), "answers have a limit of their own");
        assert_eq!(inbox.take().len(), 1);
    }

    #[test]
    fn the_queue_is_short() {
        let inbox = Inbox::new().unwrap();
        let inquiry = Inquiry { link: PortId(0), answer: true, text: vec![] };
        (0..WAITING_MAX + 9).for_each(|_| inbox.put(inquiry.clone()));
        assert_eq!(inbox.take().len(), WAITING_MAX);
    }
}
