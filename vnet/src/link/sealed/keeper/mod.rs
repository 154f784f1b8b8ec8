//! The keeper: keepalives, handshakes and rekeying of sealed links, away from the data path.
//!
//! Two threads, and one more for each handshake under way:
//!
//! - `seal-keeper` (upkeep.rs) looks at every sealed link ten times a second: it sends keepalives, starts a rekey when keys are
//!   old, worn or the peer asks, forgets old keys, checks certificates against the present revocation lists, moves links whose
//!   peers roam (roaming.rs), and sets each link's state.
//! - `seal-accept` (answering.rs) accepts TCP connections at the bridge's port number, where the host has a sealed link. From any
//!   address: a peer may have moved, even while this host was down, and its certificate tells who it is. Strangers get at most
//!   half of the handshake slots. TCP has validated the address by then, so the handshake cannot be used to flood others.
//!
//! Of two hosts, the one whose name comes first connects (initiating.rs). The other one does when that has not happened for a
//! second, or at once when it has no keys, as after a restart; unless its link has no remote. The side that connected before starts the rekeys. Two hosts behind NAT both connect to a
//! relay ([`GuestService`]). The number of handshakes under way is bounded, in all and per address, and each is bounded in time and
//! bytes. Dispatchers see only the keys.

use std::collections::HashMap;
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustls::pki_types::CertificateDer;

use super::identity::IdentityStore;
use super::identity::tls::{Channel, HandshakeError};
use super::session::Seal;
use crate::link::Link;
use crate::link::socket::udp;

mod answering;
mod initiating;
mod upkeep;

/// How often links are looked at.
const TICK: Duration = Duration::from_millis(100);
/// Handshakes under way in each direction. Each has a thread, and at most 5 s.
const HANDSHAKES_MAX: usize = 32;

/// What a keeper works with.
pub struct KeeperOptions {
    /// Where TCP connections are accepted: the bridge's address.
    pub listen: SocketAddr,
    /// This host's certificate, and whom it trusts.
    pub identity: Arc<IdentityStore>,
    /// Zero of the dispatchers' clock.
    pub started: Instant,
    /// Age of keys at which new ones are agreed on (`rekey_s` in the configuration).
    pub rekey: Duration,
    /// Sends keepalives from the bridge's socket.
    pub courier: Box<dyn KeepaliveSender>,
    /// Lets other hosts meet by this one.
    pub relay: Option<Arc<dyn GuestService>>,
}

/// Sends the keeper's datagrams. One that cannot be sent is like one that got lost.
pub trait KeepaliveSender: Send + Sync {
    /// Sends a keepalive by every path that a sealed link has. `asks_rekey`: the peer is to start a handshake.
    fn keepalive(&self, link: &Link, asks_rekey: bool);

    /// Registers this host's address at the link's relay, if it has one.
    fn register(&self, link: &Link);
}

/// Why there is no keeper.
#[derive(Debug, thiserror::Error)]
pub enum KeeperError {
    /// The port is taken, or not allowed.
    #[error(
        "cannot listen on {0} (TCP) for the handshakes of sealed links: {1}; choose another [bridge] listen"
    )]
    Listen(SocketAddr, #[source] io::Error),
    /// No thread.
    #[error("cannot start a thread for sealed links: {0}")]
    Thread(#[source] io::Error),
}

/// A host with a trusted certificate that speaks the protocol of a [`GuestService`].
pub struct Guest {
    pub(in crate::link) channel: Channel<TcpStream>,
    /// Its certificate, then those up to its authority.
    pub(in crate::link) chain: Vec<CertificateDer<'static>>,
    /// Its name, if a sealed link leads to it; or why it is refused.
    pub(in crate::link) host: Result<String, String>,
    /// The hosts that sealed links lead to.
    pub(in crate::link) known: Vec<String>,
}

/// A protocol beside the handshake, at the same TCP port: by it a rendezvous relay takes its guests.
pub trait GuestService: Send + Sync {
    /// Its name and version (RFC 7301).
    fn alpn(&self) -> &'static [u8];

    /// Reads and checks a guest's request, in the time of a handshake. What is returned serves it, and may block for longer.
    ///
    /// # Errors
    /// The guest is refused, and was told why.
    fn admit(&self, guest: Guest) -> Result<Box<dyn FnOnce() + Send>, HandshakeError>;

    /// Forgets guests whose name and certificate `keep` refuses.
    fn retain(&self, keep: &dyn Fn(&str, &[CertificateDer<'_>]) -> bool);
}

/// Handshakes that this host starts for one link.
#[derive(Default)]
struct Progress {
    under_way: bool,
    /// The earliest next attempt.
    not_before: Option<Instant>,
    /// The present back-off.
    wait: Duration,
    /// Since when there are no working keys.
    lost: Option<Instant>,
    /// Why the last attempt failed.
    failure: Option<String>,
}

/// What the keeper's threads have in common.
struct KeeperState {
    options: KeeperOptions,
    links: Mutex<Vec<Arc<Link>>>,
    /// By link id.
    progress: Mutex<HashMap<u64, Progress>>,
    /// Handshakes that others started.
    accepted: Mutex<answering::Accepted>,
    /// Handshakes that this host started: direct ones, and those at a relay.
    initiated: [AtomicUsize; 2],
    stopping: AtomicBool,
    /// Read the identity's files now.
    refresh: AtomicBool,
    /// Send keepalives at the next look: a link has new keys.
    has_news: AtomicBool,
    /// The thread that looks at links.
    keeper: OnceLock<Thread>,
}

/// Keeps the sealed links of a host. Dropped, it stops; handshakes under way end by themselves.
pub struct Keeper {
    state: Arc<KeeperState>,
    threads: Vec<JoinHandle<()>>,
}

impl Keeper {
    /// Listens and starts, without links.
    pub fn start(options: KeeperOptions) -> Result<Keeper, KeeperError> {
        let listen = options.listen;
        let listener = TcpListener::bind(listen).map_err(|error| KeeperError::Listen(listen, error))?;
        let prepared = listener.set_nonblocking(true).and_then(|()| udp::answer_briefly(&listener));
        prepared.map_err(|error| KeeperError::Listen(listen, error))?;
        let state = Arc::new(KeeperState::new(options));
        let mut keeper = Keeper { state: state.clone(), threads: vec![] };
        let (ticking, accepting) = (state.clone(), state);
        keeper.threads.push(spawn("seal-keeper", move || ticking.keep()).map_err(KeeperError::Thread)?);
        let accept = move || accepting.accept_all(&listener);
        keeper.threads.push(spawn("seal-accept", accept).map_err(KeeperError::Thread)?);
        Ok(keeper)
    }

    /// Keeps the sealed ones among `links` from now on, and no others.
    pub fn set_links(&self, links: &[Arc<Link>]) {
        let sealed: Vec<_> = links.iter().filter(|link| link.seal().is_some()).cloned().collect();
        self.state.progress.lock().retain(|id, _| sealed.iter().any(|link| link.id == *id));
        *self.state.links.lock() = sealed;
        self.state.wake();
    }

    /// This host's certificate, and whom it trusts.
    pub fn identity(&self) -> &Arc<IdentityStore> {
        &self.state.options.identity
    }

    /// Reads the identity's files now.
    pub fn refresh(&self) {
        self.state.refresh.store(true, Relaxed);
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.state.stopping.store(true, Relaxed);
        for thread in self.threads.drain(..) {
            thread.thread().unpark();
            if thread.join().is_err() {
                tracing::error!(
                    "the keeper of sealed links panicked: they got no new keys; restart vnetd and report this"
                );
            }
        }
    }
}

/// Starts a thread; the kernel cuts its name at 15 bytes.
fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name(name.into()).spawn(run)
}

impl KeeperState {
    /// Without links and threads.
    fn new(options: KeeperOptions) -> KeeperState {
        KeeperState {
            options,
            links: Mutex::default(),
            progress: Mutex::default(),
            accepted: Mutex::default(),
            initiated: Default::default(),
            stopping: AtomicBool::new(false),
            refresh: AtomicBool::new(false),
            has_news: AtomicBool::new(false),
            keeper: OnceLock::new(),
        }
    }

    fn now_ms(&self) -> u64 {
        self.options.started.elapsed().as_millis() as u64
    }

    /// Has the links looked at now instead of at the next tick.
    fn wake(&self) {
        self.keeper.get().iter().for_each(|thread| thread.unpark());
    }

    /// Has keepalives sent now: the peer knows by them that new keys work.
    fn announce_keys(&self) {
        self.has_news.store(true, Relaxed);
        self.wake();
    }

    fn is_stopping(&self) -> bool {
        self.stopping.load(Relaxed)
    }
}

fn seals(links: &[Arc<Link>]) -> impl Iterator<Item = &Seal> {
    links.iter().filter_map(|link| link.seal())
}

#[cfg(test)]
mod tests;
