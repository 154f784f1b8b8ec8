//! Admission of front ends: decides which process may connect, and refuses a second front end while one is served.
//!
//! The kernel reports the credentials of the connecting process (`SO_PEERCRED`). One front end is served at a time. Others are
//! refused at once rather than left waiting: a VM that waits for the socket of another VM looks as if it hung, and must not get
//! that socket later.

use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::closer;
use super::options::AllowedPeer;
use crate::log_limit::LogLimit;
use crate::unix::{Listener, Peer};

/// How long the interface's note reports a refused front end. Longer than the retry interval of front ends.
const NOTED: Duration = Duration::from_secs(60);

/// Admits and refuses front ends of one interface.
pub(super) struct Admission {
    allowed: AllowedPeer,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The last refusal.
    refused: Option<(Instant, String)>,
    log_limit: LogLimit,
}

impl Admission {
    pub(super) fn new(allowed: AllowedPeer) -> Admission {
        Admission { allowed, state: Mutex::default() }
    }

    /// Returns the front end's process if it may be served, and refuses it otherwise.
    pub(super) fn admit(&self, stream: UnixStream) -> Option<(UnixStream, Peer)> {
        let refused = match Peer::of(&stream) {
            Ok(peer) if self.allowed.admits(&peer) => return Some((stream, peer)),
            Ok(peer) => format!("{peer} may not connect; peer_user and peer_group say who may"),
            Err(error) => format!("it is unknown who connected: {error}"),
        };
        self.refuse(stream, refused);
        None
    }

    /// Refuses the front end that has waited longest at `listener` while another one is served. Only that front end is certain to
    /// have connected while the served one was still alive.
    ///
    /// # Errors
    /// The kernel cannot accept a connection.
    pub(super) fn refuse_waiting(&self, listener: &Listener) -> std::io::Result<()> {
        let stream = match listener.accept() {
            Ok(stream) => stream,
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return Ok(()),
            Err(error) => return Err(error),
        };
        let who = Peer::of(&stream).map_or("another process".into(), |peer| peer.to_string());
        self.refuse(stream, format!("{who} connects too; give each VM a socket of its own"));
        Ok(())
    }

    #[cold]
    fn refuse(&self, stream: UnixStream, reason: String) {
        let mut state = self.state.lock();
        if let Some(suppressed) = state.log_limit.allow() {
            tracing::warn!(%reason, suppressed, "front end refused");
        }
        state.refused = Some((Instant::now(), reason));
        drop(state);
        // Tells the front end now, even if the closer blocks.
        let _ = stream.shutdown(Shutdown::Both);
        closer::close(stream);
    }

    /// Describes a recently refused front end.
    pub(super) fn note(&self) -> Option<String> {
        let state = self.state.lock();
        let (when, reason) = state.refused.as_ref()?;
        (when.elapsed() < NOTED).then(|| format!("a front end is refused: {reason}"))
    }
}
