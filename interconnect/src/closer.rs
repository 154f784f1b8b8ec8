//! Closes descriptors on a thread that no other thread waits for: those that a hostile process has passed, and sockets on which such ones
//! may be in flight.
//!
//! The last close of a file may block for as long as its creator chooses: a socket may linger, and a file system may be implemented by a
//! process. The queue is bounded.

use std::os::fd::OwnedFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::time::Duration;

/// Upper bound on descriptors that wait behind a blocking close.
const WAITING_MAX: usize = 64;
/// How often, and how long, a full queue is waited for: the thread empties it at once unless a close blocks.
const ATTEMPTS: u32 = 20;
const PAUSE: Duration = Duration::from_micros(100);
/// Descriptors that wait.
static WAITING: AtomicUsize = AtomicUsize::new(0);

/// Closes `file` soon. Returns it if too many wait already.
pub(crate) fn close(file: OwnedFd) -> Result<(), OwnedFd> {
    static CLOSER: OnceLock<Option<SyncSender<OwnedFd>>> = OnceLock::new();
    let closer = CLOSER.get_or_init(|| {
        let (sender, files) = sync_channel::<OwnedFd>(WAITING_MAX);
        let run = move || {
            for file in files {
                drop(file);
                WAITING.fetch_sub(1, Ordering::Relaxed);
            }
        };
        std::thread::Builder::new().name("vnet-rdma-close".into()).spawn(run).ok().map(|_| sender)
    });
    let Some(closer) = closer else { return Err(file) };
    WAITING.fetch_add(1, Ordering::Relaxed);
    closer.try_send(file).map_err(|error| {
        WAITING.fetch_sub(1, Ordering::Relaxed);
        match error {
            TrySendError::Full(file) | TrySendError::Disconnected(file) => file,
        }
    })
}

/// Whether a close seems to block: many descriptors wait behind it.
pub(crate) fn is_behind() -> bool {
    WAITING.load(Ordering::Relaxed) >= WAITING_MAX / 2
}

/// Closes `file` soon. It stays open if too many wait already; callers bound how often that happens.
pub(crate) fn close_or_leak_now(file: OwnedFd) {
    if let Err(file) = close(file) {
        std::mem::forget(file);
    }
}

/// Closes `file` soon. If the thread does not get to it within milliseconds because an earlier close blocks, it stays open.
pub(crate) fn close_or_leak(file: OwnedFd) {
    let mut left = file;
    for _ in 0..ATTEMPTS {
        match close(left) {
            Ok(()) => return,
            Err(file) => left = file,
        }
        std::thread::sleep(PAUSE);
    }
    std::mem::forget(left);
}
