//! The keeper: what sealed links need outside the frames' way.
//!
//! Two threads, and one more for each handshake under way:
//!
//! - `seal-keeper` looks at every sealed link ten times a second: it sends keepalives, has keys agreed on anew when they are
//!   old, worn or asked for, forgets old ones, holds certificates against the present lists, and judges the link's state.
//! - `seal-accept` takes TCP connections at the bridge's port number, of the remotes of sealed links only, as long as all of
//!   these have one: whoever is refused was sent nothing. Where a link has none its peer may come from anywhere, and anybody may
//!   begin; others never take more than half of the handshakes that there may be. TCP itself has validated the address by
//!   then, so nobody can be flooded by way of us. `keeper/answering.rs` has this half.
//!
//! Of two hosts, the one whose name comes first connects; the other one does when that has not come about for a
//! second, unless its link has no remote. New keys are agreed on by the side that connected before. Where two hosts
//! meet by a third one, both connect to that (meet.rs). The keeper also moves links to where their peers have gone
//! (place.rs). The number of handshakes under way is bounded, in all and per address; each is bounded in time and
//! bytes (handshake.rs). Dispatchers see nothing of all this but the keys.

use std::collections::HashMap;
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};
use rustls::pki_types::CertificateDer;

use crate::link::rendezvous::choice::Via;
use crate::link::rendezvous::client::attend;
use crate::link::rendezvous::relay::Meetings;
use crate::link::sealed::handshake::{self, HandshakeError, initiates};
use crate::link::sealed::identity::{Identity, IdentityStore, is_for};
use crate::link::sealed::roaming::follow;
use crate::link::sealed::session::{Current, Role, Seal};
use crate::link::socket::control_datagrams::Courier;
use crate::link::socket::udp;
use crate::link::{Link, LinkState, normalised};
use crate::stats::PortStats;

mod answering;

use answering::Taken;

/// How often links are looked at.
const TICK: Duration = Duration::from_millis(100);
/// Keepalives are sent every so many ticks.
const KEEPALIVE_TICKS: u32 = 2;
/// A peer that was not heard for so long, in ms, is down: noticed within a second of its death.
const SILENCE_MS: u64 = 800;
/// How often the identity's files are looked at.
const REFRESH: Duration = Duration::from_secs(1);
/// How often certificates of present sessions are held against clock and revocations, even when no file has changed.
const VERIFY: Duration = Duration::from_secs(30);
/// Waits between tries to connect, doubled each time.
const RETRY_MIN: Duration = Duration::from_millis(250);
const RETRY_MAX: Duration = Duration::from_secs(2);
/// New keys are given so long before they are taken for useless.
const SETTLE: Duration = Duration::from_secs(1);
/// Wait for a TCP connection.
const CONNECT_MAX: Duration = Duration::from_secs(3);
/// Handshakes under way in each direction. Each has a thread and at most 5 s.
const HANDSHAKES_MAX: usize = 32;
/// How long the host whose name comes second waits for the other to connect.
const PATIENCE: Duration = Duration::from_secs(1);
/// After so much silence, in ms, a peer is sought where the configuration says.
const FORGET_MS: u64 = 10_000;
/// When others are due and cannot be agreed on, keys end at twice that age, but not before this one.
const AGE_MAX_LEAST: Duration = Duration::from_secs(60);

/// What a keeper works with.
pub struct KeeperOptions {
    /// Where TCP connections are taken: the bridge's address.
    pub listen: SocketAddr,
    /// Who this host is.
    pub identity: Arc<IdentityStore>,
    /// When the dispatchers' clock began.
    pub started: Instant,
    /// After how long new keys are agreed on.
    pub rekey: Duration,
    /// Sends from the bridge's socket.
    pub courier: Courier,
    /// How many pairs of other hosts may meet by this one.
    pub meetings: u16,
    /// The first of as many UDP ports, one for each pair.
    pub meet_at: SocketAddr,
    /// Counts what is forwarded for them.
    pub stats: Arc<PortStats>,
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

/// What is known of tries to agree on keys for a link that this host initiates.
#[derive(Default)]
struct Progress {
    under_way: bool,
    /// When the next try may begin.
    not_before: Option<Instant>,
    wait: Duration,
    /// Since when there are no keys that work.
    lost: Option<Instant>,
    /// What the last one failed for.
    failure: Option<String>,
}

struct Shared {
    options: KeeperOptions,
    links: Mutex<Vec<Arc<Link>>>,
    /// By link id.
    progress: Mutex<HashMap<u64, Progress>>,
    taken: Mutex<Taken>,
    given: [AtomicUsize; 2],
    /// Where other hosts meet by this one.
    meetings: Option<Meetings>,
    stopping: AtomicBool,
    /// Set to have the files looked at now.
    refresh: AtomicBool,
}

/// Keeps the sealed links of a host. Dropped, it stops; handshakes under way end by themselves.
pub struct Keeper {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl Keeper {
    /// Listens and starts, without links.
    pub fn start(options: KeeperOptions) -> Result<Keeper, KeeperError> {
        let listen = options.listen;
        let listener = TcpListener::bind(listen).map_err(|error| KeeperError::Listen(listen, error))?;
        let prepared = listener.set_nonblocking(true).and_then(|()| udp::answer_briefly(&listener));
        prepared.map_err(|error| KeeperError::Listen(listen, error))?;
        let meetings = (options.meetings > 0)
            .then(|| Meetings::start(options.meet_at, options.meetings, options.stats.clone()));
        let meetings = meetings.transpose().map_err(KeeperError::Thread)?;
        let shared = Arc::new(Shared {
            options,
            meetings,
            links: Mutex::default(),
            progress: Mutex::default(),
            taken: Mutex::default(),
            given: Default::default(),
            stopping: AtomicBool::new(false),
            refresh: AtomicBool::new(false),
        });
        let mut keeper = Keeper { shared: shared.clone(), threads: vec![] };
        let (ticking, accepting) = (shared.clone(), shared);
        keeper.threads.push(spawn("seal-keeper", move || ticking.keep()).map_err(KeeperError::Thread)?);
        let accept = move || accepting.accept_all(&listener);
        keeper.threads.push(spawn("seal-accept", accept).map_err(KeeperError::Thread)?);
        Ok(keeper)
    }

    /// Keeps the sealed ones among `links` from now on, and no others.
    pub fn set_links(&self, links: &[Arc<Link>]) {
        let sealed: Vec<_> = links.iter().filter(|link| link.seal().is_some()).cloned().collect();
        lock(&self.shared.progress).retain(|id, _| sealed.iter().any(|link| link.id == *id));
        *lock(&self.shared.links) = sealed;
    }

    /// Who this host is.
    pub fn identity(&self) -> &Arc<IdentityStore> {
        &self.shared.options.identity
    }

    /// Has the identity's files looked at now.
    pub fn refresh(&self) {
        self.shared.refresh.store(true, Ordering::Relaxed);
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.shared.stopping.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            thread.thread().unpark();
            if thread.join().is_err() {
                tracing::error!("the keeper of sealed links ended in a panic");
            }
        }
    }
}

fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    // Names of threads are cut to 15 bytes by the kernel.
    std::thread::Builder::new().name(name.into()).spawn(run)
}

/// What these locks protect is whole at any time.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    fn now_ms(&self) -> u64 {
        self.options.started.elapsed().as_millis() as u64
    }

    fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Relaxed)
    }

    /// The keeper's loop.
    fn keep(self: &Arc<Shared>) {
        let (mut refreshed, mut verified, mut ticks) = (Instant::now(), Instant::now(), 0u32);
        while !self.is_stopping() {
            let identity = self.options.identity.current();
            if self.refresh.swap(false, Ordering::Relaxed) || refreshed.elapsed() >= REFRESH {
                refreshed = Instant::now();
                if self.read_identity() {
                    verified = Instant::now();
                }
            }
            let links = lock(&self.links).clone();
            if verified.elapsed() >= VERIFY {
                verified = Instant::now();
                links.iter().for_each(|link| self.verify(link, &identity));
                self.verify_pairs(&identity);
            }
            follow(&links);
            for link in &links {
                if let Some(seal) = link.seal() {
                    self.look_after(link, seal, &identity, ticks.is_multiple_of(KEEPALIVE_TICKS));
                }
            }
            ticks = ticks.wrapping_add(1);
            std::thread::park_timeout(TICK);
        }
    }

    /// Reads the files again if they have changed. True when there is a new identity: present sessions were held against
    /// it, and those that stay are made anew.
    fn read_identity(self: &Arc<Shared>) -> bool {
        match self.options.identity.refresh() {
            Ok(false) => false,
            Ok(true) => {
                let identity = self.options.identity.current();
                let serial = &identity.info().serial;
                tracing::info!("identity read again: certificate {serial}; sealed links get new keys");
                let links = lock(&self.links).clone();
                for link in &links {
                    self.verify(link, &identity);
                    if let Some(seal) = link.seal() {
                        seal.renew();
                    }
                }
                self.verify_pairs(&identity);
                lock(&self.progress).values_mut().for_each(|progress| progress.not_before = None);
                true
            }
            Err(error) => {
                tracing::error!("{error}; the identity stays as it was");
                false
            }
        }
    }

    /// Forgets a link's sessions whose certificate would not be accepted now.
    fn verify(&self, link: &Link, identity: &Identity) {
        let Some(seal) = link.seal() else { return };
        let mut why = None;
        let lost = seal.retain(|session| {
            let verified = identity.verify(&session.chain, &seal.peer);
            why = why.take().or(verified.as_ref().err().cloned());
            verified.is_ok()
        });
        if lost && let Some(why) = why {
            tracing::warn!("link {}: {} is not accepted any more: {why}", link.name(), seal.peer);
            lock(&self.progress).entry(link.id).or_default().failure = Some(why);
        }
    }

    /// Forgets pairs of hosts of which one has no link here any more, or a certificate that would not be accepted now.
    fn verify_pairs(&self, identity: &Identity) {
        let links = lock(&self.links).clone();
        let is_known = |name: &str| seals(&links).any(|seal| seal.peer.eq_ignore_ascii_case(name));
        if let Some(meetings) = &self.meetings {
            meetings.retain(|name, chain| is_known(name) && identity.verify(chain, name).is_ok());
        }
    }

    /// One look at one link.
    fn look_after(self: &Arc<Shared>, link: &Arc<Link>, seal: &Seal, identity: &Identity, keepalive: bool) {
        let rekey = self.options.rekey;
        seal.expire(Instant::now(), (2 * rekey).max(AGE_MAX_LEAST));
        let current = seal.current(link.next_number());
        let silent_ms = link.heard_ms().map(|heard| self.now_ms().saturating_sub(heard));
        let silent = silent_ms.is_none_or(|silent| silent >= SILENCE_MS);
        let due = match &current {
            None => true,
            Some(current) => {
                let useless = silent && current.age >= SETTLE;
                current.age >= rekey || current.is_worn || seal.must_renew() || useless
            }
        };
        if silent_ms.is_some_and(|silent| silent >= FORGET_MS) && link.via.is_none() && link.place.forget() {
            link.forget_path();
            seal.roster().iter().for_each(|roster| roster.refresh());
        }
        let mine = self.is_mine(link, seal, identity, current.as_ref().filter(|_| !silent));
        let failure = lock(&self.progress).get(&link.id).and_then(|progress| progress.failure.clone());
        let state = match (&current, link.route_failure(), silent_ms) {
            (_, Some(error), _) => LinkState::Down(error),
            (None, None, _) => LinkState::Down(match failure {
                Some(why) => why,
                None if mine => format!("agreeing on keys with {}", seal.peer),
                None => format!(
                    "waiting for {} to connect to port {} (TCP)",
                    seal.peer,
                    self.options.listen.port()
                ),
            }),
            (Some(_), None, None) => LinkState::Down(format!("nothing came from {} yet", seal.peer)),
            (Some(_), None, Some(ms)) if silent => LinkState::Down(format!(
                "nothing came from {} for {}.{} s",
                seal.peer,
                ms / 1000,
                ms / 100 % 10
            )),
            (Some(_), None, Some(_)) => match failure {
                Some(why) => LinkState::Degraded(format!("no new keys: {why}")),
                None => LinkState::Up,
            },
        };
        self.tell(link, seal, state);
        if keepalive {
            self.options.courier.register(link);
        }
        if keepalive && current.is_some() {
            // The other side initiates, and so has to be asked; where the two meet by a third host, both have to come. Not as
            // often as the answer takes.
            let asks = due && (!mine || link.via.is_some());
            self.options.courier.keepalive(link, seal, asks);
        }
        if due && mine {
            self.initiate(link);
        }
    }

    /// Whether it is up to this host to begin a handshake; `working` are the present keys, if they do work.
    fn is_mine(&self, link: &Link, seal: &Seal, identity: &Identity, working: Option<&Current>) -> bool {
        if link.via.is_some() {
            return true;
        }
        let mut all = lock(&self.progress);
        let progress = all.entry(link.id).or_default();
        let lost = match working {
            Some(current) => {
                progress.lost = None;
                return current.role == Role::Initiator && link.remote().is_some();
            }
            None => progress.lost.get_or_insert_with(Instant::now).elapsed(),
        };
        link.remote().is_some() && (initiates(identity.name(), &seal.peer) || lost >= PATIENCE)
    }

    /// Sets a link's state, and logs it when it is another one.
    fn tell(&self, link: &Link, seal: &Seal, state: LinkState) {
        let before = seal.state();
        if !seal.set_state(state.clone()) {
            return;
        }
        match (&before, &state) {
            // How long it has been silent is no news.
            (LinkState::Down(a), LinkState::Down(b))
                if a.split(" for ").next() == b.split(" for ").next() => {}
            (_, LinkState::Up) => match seal.current(link.next_number()) {
                Some(current) => tracing::info!(
                    "link {}: up, sealed with {} (certificate {}, epoch {})",
                    link.name(),
                    seal.peer,
                    current.serial,
                    current.epoch
                ),
                None => tracing::info!("link {}: up", link.name()),
            },
            (_, LinkState::Degraded(why)) => tracing::warn!("link {}: degraded: {why}", link.name()),
            (_, LinkState::Down(why) | LinkState::Unreachable(why)) => {
                tracing::warn!("link {}: down: {why}", link.name());
            }
        }
    }

    /// Begins a handshake for a link, unless one is under way or the last one has just failed.
    fn initiate(self: &Arc<Shared>, link: &Arc<Link>) {
        let now = Instant::now();
        {
            let mut progress = lock(&self.progress);
            let progress = progress.entry(link.id).or_default();
            if progress.under_way || progress.not_before.is_some_and(|time| now < time) {
                return;
            }
            let given = self.given(link);
            if given.fetch_add(1, Ordering::Relaxed) >= HANDSHAKES_MAX {
                given.fetch_sub(1, Ordering::Relaxed);
                return;
            }
            progress.under_way = true;
        }
        let (shared, link) = (self.clone(), link.clone());
        let run = {
            let (shared, link) = (shared.clone(), link.clone());
            move || {
                let identity = shared.options.identity.current();
                let remote = link.remote().unwrap_or(link.options.remote);
                let done = match &link.via {
                    Some(via) => shared.meet(&link, via, &identity),
                    None => connect(shared.options.listen, remote)
                        .and_then(|stream| handshake::initiate(stream, &identity, &link)),
                };
                shared.initiated(&link, done);
            }
        };
        if let Err(error) = spawn("seal-connect", run) {
            shared.initiated(&link, Err(HandshakeError(format!("cannot start a thread: {error}"))));
        }
    }

    /// Meets the other host of a link by a third one, and agrees on keys there.
    fn meet(&self, link: &Arc<Link>, via: &Via, identity: &Identity) -> Result<(), HandshakeError> {
        let between = lock(&self.links).iter().find(|other| other.name() == via.link).cloned();
        let failed = |why: String| HandshakeError(format!("by way of {}: {why}", via.link));
        let seals =
            between.as_ref().and_then(|between| Some((between.seal()?, between.remote()?))).zip(link.seal());
        let Some(((between, remote), seal)) = seals else {
            return Err(failed("no sealed link of this name leads anywhere".into()));
        };
        let stream = connect(self.options.listen, remote)?;
        let met = attend(stream, identity, &between.peer, &seal.peer);
        let (stream, ticket) = met.map_err(|HandshakeError(why)| failed(why))?;
        via.met(SocketAddr::new(remote.ip(), ticket.port), ticket);
        if initiates(identity.name(), &seal.peer) {
            return handshake::initiate(stream, identity, link);
        }
        let choose = |chain: &[CertificateDer<'_>]| {
            let right = is_for(chain, &seal.peer).then(|| link.clone());
            right.ok_or_else(|| format!("the certificate is not for {}", seal.peer))
        };
        handshake::respond(stream, identity, choose).map(drop)
    }

    /// How many handshakes of ours are under way: those by a third host, which wait there for the other one, count by themselves.
    fn given(&self, link: &Link) -> &AtomicUsize {
        &self.given[usize::from(link.via.is_some())]
    }

    /// Notes how a handshake of ours ended.
    fn initiated(&self, link: &Link, done: Result<(), HandshakeError>) {
        self.given(link).fetch_sub(1, Ordering::Relaxed);
        let mut all = lock(&self.progress);
        // A link that has gone meanwhile leaves nothing behind.
        let Some(progress) = all.get_mut(&link.id) else { return };
        progress.under_way = false;
        match done {
            Ok(()) => {
                progress.failure = None;
                progress.wait = RETRY_MIN;
                progress.not_before = Some(Instant::now() + SETTLE);
            }
            Err(HandshakeError(why)) => {
                if progress.failure.as_ref() != Some(&why) {
                    tracing::warn!(
                        "link {}: no keys from {}: {why}",
                        link.name(),
                        link.remote().map_or("anywhere".into(), |remote| remote.to_string())
                    );
                }
                progress.failure = Some(why);
                progress.wait = (progress.wait * 2).clamp(RETRY_MIN, RETRY_MAX);
                progress.not_before = Some(Instant::now() + progress.wait);
            }
        }
    }
}

/// What sealed links have.
fn seals(links: &[Arc<Link>]) -> impl Iterator<Item = &Seal> {
    links.iter().filter_map(|link| link.seal())
}

/// A TCP connection to a link's remote, from the address that the bridge listens on.
fn connect(listen: SocketAddr, remote: SocketAddr) -> Result<TcpStream, HandshakeError> {
    let tried = || -> io::Result<TcpStream> {
        let local = normalised(listen).ip();
        let family = if remote.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let fd = rustix::net::socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        // On Linux this limits connecting, too.
        sockopt::set_socket_timeout(&fd, sockopt::Timeout::Send, Some(CONNECT_MAX))?;
        if !local.is_unspecified() && local.is_ipv4() == remote.is_ipv4() {
            rustix::net::bind(&fd, &SocketAddr::new(local, 0))?;
        }
        rustix::net::connect(&fd, &remote)?;
        Ok(TcpStream::from(fd))
    };
    tried().map_err(|error| {
        let text = match error.kind() {
            io::ErrorKind::WouldBlock => format!("nothing answered within {} s", CONNECT_MAX.as_secs()),
            io::ErrorKind::ConnectionRefused => {
                "connection refused; is vnetd with a sealed link running there?".into()
            }
            _ => error.to_string(),
        };
        HandshakeError(format!("cannot connect to {remote} (TCP): {text}"))
    })
}
