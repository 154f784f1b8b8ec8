//! The keeper: keepalives, handshakes and rekeying of sealed links, away from the data path.
//!
//! The keeper has two threads, and one more for each handshake in progress:
//!
//! - `seal-keeper` (upkeep.rs) checks every sealed link ten times a second: it sends keepalives, starts a rekey when keys are old
//!   or worn or when the peer requests one, discards old keys, checks certificates against the current revocation lists, moves
//!   links whose peers roam (roaming.rs), and sets each link's state.
//! - `seal-accept` (answering.rs) accepts TCP connections on the bridge's port number if the host has a sealed link. It accepts
//!   them from any address: a peer may have moved, even while this host was down, and its certificate identifies it. The number
//!   and rate of handshakes are bounded (handshake_gate.rs). TCP has validated the address by then, so the handshake cannot be
//!   used to flood others.
//!
//! Of two hosts, the one whose name sorts first connects (initiating.rs). The other host connects when that has not happened for
//! a second, or almost at once when it has no keys, as after a restart; unless its link has no remote. The side that connected
//! starts the rekeys. Two hosts behind NAT both connect to a relay ([`GuestService`]). Each handshake has a thread, and is bounded
//! in time and bytes. Dispatchers see only the keys.

use std::collections::HashMap;
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustls::pki_types::CertificateDer;

use super::handshake_gate::HandshakeGate;
use super::identity::IdentityStore;
use super::identity::tls::{Channel, HandshakeError};
use super::session::Seal;
use crate::inherit::{self, Inheritance};
use crate::link::Link;
use crate::link::socket::tcp::listening;
use crate::listen::until_free;
use crate::log_limit::LogLimit;
use crate::threads;

mod answering;
mod initiating;
mod upkeep;

/// Interval between two checks of all links.
const TICK: Duration = Duration::from_millis(100);

/// Options of a keeper.
pub struct KeeperOptions {
    /// Listening address for TCP connections: the bridge's address.
    pub listen: SocketAddr,
    /// This host's certificate, and the authorities that it trusts.
    pub identity: Arc<IdentityStore>,
    /// Start of the dispatchers' clock.
    pub started: Instant,
    /// Age of keys at which new keys are agreed on (`rekey_s` in the configuration).
    pub rekey: Duration,
    /// Sends keepalives from the bridge's socket.
    pub courier: Box<dyn KeepaliveSender>,
    /// Lets other hosts meet at this host.
    pub relay: Option<Arc<dyn GuestService>>,
    /// What a running vnetd hands over. The keeper then rests until it has links.
    pub inheritance: Option<Arc<Inheritance>>,
}

/// Sends the keeper's datagrams. A datagram that cannot be sent counts as lost.
pub trait KeepaliveSender: Send + Sync {
    /// Sends a keepalive on every path of a sealed link. `asks_rekey`: requests that the peer start a handshake.
    fn keepalive(&self, link: &Link, asks_rekey: bool);

    /// Registers this host's address at the link's relay, if it has one.
    fn register(&self, link: &Link);
}

/// Error when starting a keeper.
#[derive(Debug, thiserror::Error)]
pub enum KeeperError {
    /// The port is in use, or the process may not bind it.
    #[error(
        "cannot listen on {0} (TCP) for the handshakes of sealed links: {1}; choose another [bridge] listen"
    )]
    Listen(SocketAddr, #[source] io::Error),
    /// The kernel refused a thread.
    #[error("cannot start a thread for sealed links: {0}")]
    Thread(#[source] io::Error),
}

/// A host with a trusted certificate that speaks the protocol of a [`GuestService`].
pub struct Guest {
    pub(in crate::link) channel: Channel<TcpStream>,
    /// The host's certificate, followed by those of its issuers.
    pub(in crate::link) chain: Vec<CertificateDer<'static>>,
    /// Name of the host if a sealed link leads to it, else the reason for refusing the host.
    pub(in crate::link) host: Result<String, String>,
    /// Names of the hosts to which sealed links lead.
    pub(in crate::link) known: Vec<String>,
}

/// A protocol besides the handshake, on the same TCP port: a rendezvous relay accepts its guests with it.
pub trait GuestService: Send + Sync {
    /// Name and version of the protocol (RFC 7301).
    fn alpn(&self) -> &'static [u8];

    /// Reads and checks a guest's request, within the time limit of a handshake. The returned function serves the guest, and may
    /// block for longer.
    ///
    /// # Errors
    /// The guest was refused, and has received the reason.
    fn admit(&self, guest: Guest) -> Result<Box<dyn FnOnce() + Send>, HandshakeError>;

    /// Removes guests whose name and certificate `keep` refuses.
    fn retain(&self, keep: &dyn Fn(&str, &[CertificateDer<'_>]) -> bool);
}

/// Progress of the handshakes that this host starts for one link.
#[derive(Default)]
struct Progress {
    under_way: bool,
    /// Earliest time of the next attempt.
    not_before: Option<Instant>,
    /// The current backoff.
    wait: Duration,
    /// Time since which the link has had no working keys.
    lost: Option<Instant>,
    /// Reason why the last attempt failed.
    failure: Option<String>,
}

/// State that the keeper's threads share.
struct KeeperState {
    options: KeeperOptions,
    links: Mutex<Vec<Arc<Link>>>,
    /// Progress by link id.
    progress: Mutex<HashMap<u64, Progress>>,
    /// Admits handshakes that other hosts start.
    gate: HandshakeGate,
    /// Rate limits of warnings about failed handshakes: with remotes of links, with strangers.
    failures: [Mutex<LogLimit>; 2],
    /// Numbers of handshakes that this host has in progress: direct ones, and those at a relay.
    initiated: [AtomicUsize; 2],
    stopping: AtomicBool,
    /// True while another vnetd keeps the links: a running one until this one has links, or the next one that is about to take over.
    resting: AtomicBool,
    /// True to check all certificates at the next check.
    verify_now: AtomicBool,
    /// True to read the identity's files now.
    refresh: AtomicBool,
    /// True to send keepalives at the next check, because a link has new keys.
    has_news: AtomicBool,
    /// The thread that checks links.
    keeper: OnceLock<Thread>,
}

/// Maintains the sealed links of a host. Stops on drop; handshakes in progress end by themselves.
pub struct Keeper {
    state: Arc<KeeperState>,
    listener: Arc<TcpListener>,
    threads: Vec<JoinHandle<()>>,
}

impl Keeper {
    /// Listens and starts the threads, without links.
    pub fn start(options: KeeperOptions) -> Result<Keeper, KeeperError> {
        let listen = options.listen;
        let missing = || io::Error::other("the running vnetd does not hand over the listener");
        let listener = match &options.inheritance {
            Some(inheritance) => {
                inheritance.take_one(inherit::SEALED).map(TcpListener::from).ok_or_else(missing)
            }
            None => until_free(|| listening(listen)),
        };
        let listener = Arc::new(listener.map_err(|error| KeeperError::Listen(listen, error))?);
        let state = Arc::new(KeeperState::new(options));
        let mut keeper = Keeper { state: state.clone(), listener: listener.clone(), threads: vec![] };
        let (ticking, accepting) = (state.clone(), state);
        keeper.threads.push(spawn("seal-keeper", move || ticking.keep()).map_err(KeeperError::Thread)?);
        let accept = move || {
            threads::confine();
            accepting.accept_all(&listener);
        };
        keeper.threads.push(spawn("seal-accept", accept).map_err(KeeperError::Thread)?);
        Ok(keeper)
    }

    /// A duplicate of the listener.
    ///
    /// # Errors
    /// The kernel has no descriptor left.
    pub fn descriptor(&self) -> io::Result<OwnedFd> {
        self.listener.as_fd().try_clone_to_owned()
    }

    /// Starts no handshakes and accepts none, until [`Keeper::go_on`]: the next vnetd does. What is under way fails by itself
    /// (link/succession.rs).
    pub fn rest(&self) {
        self.state.resting.store(true, Relaxed);
    }

    /// Ends [`Keeper::rest`].
    pub fn go_on(&self) {
        self.state.resting.store(false, Relaxed);
        self.state.wake();
    }

    /// Maintains exactly the sealed links among `links` from now on.
    pub fn set_links(&self, links: &[Arc<Link>]) {
        let sealed: Vec<_> = links.iter().filter(|link| link.seal().is_some()).cloned().collect();
        self.state.progress.lock().retain(|id, _| sealed.iter().any(|link| link.id == *id));
        *self.state.links.lock() = sealed;
        self.go_on();
    }

    /// This host's certificate, and the authorities that it trusts.
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

/// Starts a thread; the kernel truncates its name to 15 bytes.
fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name(name.into()).spawn(run)
}

impl KeeperState {
    /// Creates the state, without links and threads.
    fn new(options: KeeperOptions) -> KeeperState {
        let is_heir = options.inheritance.is_some();
        KeeperState {
            options,
            links: Mutex::default(),
            progress: Mutex::default(),
            gate: HandshakeGate::default(),
            failures: Default::default(),
            initiated: Default::default(),
            stopping: AtomicBool::new(false),
            resting: AtomicBool::new(is_heir),
            // The sessions of the vnetd before may be of certificates that are revoked in this one's files.
            verify_now: AtomicBool::new(is_heir),
            refresh: AtomicBool::new(false),
            has_news: AtomicBool::new(false),
            keeper: OnceLock::new(),
        }
    }

    fn now_ms(&self) -> u64 {
        self.options.started.elapsed().as_millis() as u64
    }

    /// Triggers a check of the links now instead of at the next tick.
    fn wake(&self) {
        self.keeper.get().iter().for_each(|thread| thread.unpark());
    }

    /// Triggers keepalives now: they show the peer that new keys work.
    fn announce_keys(&self) {
        self.has_news.store(true, Relaxed);
        self.wake();
    }

    fn is_resting(&self) -> bool {
        self.resting.load(Relaxed)
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
