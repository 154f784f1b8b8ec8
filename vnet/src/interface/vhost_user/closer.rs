//! Closes descriptors that a front end gave, on a thread that nobody waits for.
//!
//! The last close of a file may block for as long as its maker likes: a socket that lingers, a file whose file system is a process.
//! So connections, on which descriptors may still be in flight, and files that were refused are closed here. What was accepted is
//! an eventfd or memory, whose close never blocks.
//!
//! The queue is bounded. When it is full, whoever gives a descriptor closes it itself: that is the control thread of the one
//! interface whose front end gave it.

use std::os::fd::OwnedFd;
use std::sync::OnceLock;
use std::sync::mpsc::{SyncSender, sync_channel};

/// Most descriptors that wait behind one whose close blocks.
const WAITING_MAX: usize = 64;

/// Closes `file` soon, without making the caller wait.
pub(super) fn close(file: impl Into<OwnedFd>) {
    static CLOSER: OnceLock<Option<SyncSender<OwnedFd>>> = OnceLock::new();
    let closer = CLOSER.get_or_init(|| {
        let (sender, files) = sync_channel::<OwnedFd>(WAITING_MAX);
        let run = move || files.into_iter().for_each(drop);
        std::thread::Builder::new().name("closer".into()).spawn(run).ok().map(|_| sender)
    });
    if let Some(closer) = closer {
        // A full queue returns the descriptor, which is then closed here.
        let _ = closer.try_send(file.into());
    }
}
