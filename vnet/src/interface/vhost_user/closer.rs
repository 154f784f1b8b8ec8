//! Closes descriptors received from a front end, on a thread that no other thread waits for.
//!
//! The last close of a file may block for as long as the file's creator chooses: a socket may linger, and a file system may be
//! implemented by a process. So two kinds of files are closed here: connections, on which descriptors may still be in flight, and
//! files that vnetd refused. Accepted files are eventfds or memory, whose close never blocks.
//!
//! The queue is bounded. When it is full, the calling thread closes the descriptor itself: that is the control thread of the
//! interface whose front end sent it.

use std::os::fd::OwnedFd;
use std::sync::OnceLock;
use std::sync::mpsc::{SyncSender, sync_channel};

/// Upper bound on descriptors that wait behind a blocking close.
const WAITING_MAX: usize = 64;

/// Closes `file` soon, without blocking the caller.
pub(super) fn close(file: impl Into<OwnedFd>) {
    static CLOSER: OnceLock<Option<SyncSender<OwnedFd>>> = OnceLock::new();
    let closer = CLOSER.get_or_init(|| {
        let (sender, files) = sync_channel::<OwnedFd>(WAITING_MAX);
        let run = move || files.into_iter().for_each(drop);
        std::thread::Builder::new().name("closer".into()).spawn(run).ok().map(|_| sender)
    });
    if let Some(closer) = closer {
        // A full queue returns the descriptor, which is dropped and so closed on this thread.
        let _ = closer.try_send(file.into());
    }
}
