//! The prober: one thread that measures paths, outside the data path.
//!
//! On every native link, clear or sealed, it sends
//!
//! - a *small* probe five times a second; the replies give round trip and loss. On a link in clear text they also show whether
//!   the peer is alive: once the peer has answered at all, the link is `down` after 0.8 s of silence. Frames are still sent;
//! - probes of the sizes that path MTU discovery (pmtu.rs) asks for, one at a time.
//!
//! A probe's payload is [`MAGIC`](super::probe_health::MAGIC), an 8-byte random id, a tag of the sender's host name, and zero
//! padding. The peer replies with its first 16 bytes (older peers with all of it), so the reverse path's MTU does not matter.
//! Replies are sealed on sealed links; on other links, the random id prevents hosts that do not see the probe from forging a reply.
//!
//! With the small probes it has links negotiate the direct ports of guests (native/direct_ports.rs).
//!
//! For all links the prober also queries the kernel's routes (watch.rs) and measures rates.
//!
//! Dispatchers access this state only for replies and never wait: a reply that finds the prober busy counts as lost. The total
//! rates of large probes and of kernel queries over all links are bounded.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::probe_health::clock_us;
use super::watch::{Monitored, PathWatch};
use crate::link::socket::udp::Socket;
use crate::link::state;
use crate::threads;

/// Interval between rounds.
const TICK: Duration = Duration::from_millis(50);
/// Number of ticks between two small probes on a link.
const SMALL_TICKS: u64 = 4;
/// Maximum number of large probes per tick over all links; links take turns.
const LARGE_PER_TICK_MAX: usize = 64;
/// Sleep interval while there are no links.
const IDLE: Duration = Duration::from_secs(1);
/// Maximum number of kernel queries per tick: each of 4 096 links gets its turn within a second.
const ROUTES_PER_TICK_MAX: usize = 256;

struct Work {
    watch: Mutex<PathWatch>,
    /// The socket on which probes are sent.
    socket: Arc<Socket>,
    started: Instant,
    links: Mutex<Vec<Arc<dyn Monitored>>>,
    stopping: AtomicBool,
}

/// Probes a host's native links, refreshes the path state of all links, and measures their rates. Stops on drop.
pub struct Prober {
    work: Arc<Work>,
    thread: Option<JoinHandle<()>>,
}

impl Prober {
    /// Starts without links. `started` is the start of the dispatchers' clock.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start(started: Instant, watch: PathWatch) -> std::io::Result<Prober> {
        let (socket, watch) = (watch.socket().clone(), Mutex::new(watch));
        let (links, stopping) = (Mutex::default(), AtomicBool::new(false));
        let work = Arc::new(Work { watch, socket, started, links, stopping });
        let run = work.clone();
        let thread = std::thread::Builder::new().name("link-prober".into()).spawn(move || {
            threads::confine();
            run.probe_all();
        })?;
        Ok(Prober { work, thread: Some(thread) })
    }

    /// Replaces the set of monitored links. Returns when the routes of new links are known.
    pub(in crate::link) fn watch(&self, links: Vec<Arc<dyn Monitored>>) {
        let mut watch = self.work.watch.lock();
        links.iter().for_each(|link| watch.meet(&**link));
        drop(watch);
        if let Some(thread) = &self.thread {
            links.iter().for_each(|link| link.path().watched_by(thread.thread()));
            *self.work.links.lock() = links;
            thread.thread().unpark();
        }
    }
}

impl Drop for Prober {
    fn drop(&mut self) {
        self.work.stopping.store(true, Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            if thread.join().is_err() {
                tracing::error!(
                    "the prober of links panicked: their states were stale; restart vnetd and report this"
                );
            }
        }
    }
}

impl Work {
    /// The prober's loop.
    fn probe_all(&self) {
        // Start of the next round: links that got no turn come first.
        let (mut ticks, mut begin, mut begin_routes) = (0u64, 0, 0);
        let mut next = Instant::now();
        while !self.stopping.load(Relaxed) {
            let links = self.links.lock().clone();
            let now_ms = self.started.elapsed().as_millis() as u64;
            self.ask_routes(&links, &mut begin_routes, now_ms);
            // A sender's request wakes the prober between ticks.
            if Instant::now() >= next {
                next = Instant::now() + TICK;
                let mut large = LARGE_PER_TICK_MAX;
                for at in 0..links.len() {
                    let place = (begin + at) % links.len();
                    let small = (ticks + links[place].id()).is_multiple_of(SMALL_TICKS);
                    if self.look_after(&*links[place], now_ms, small, large > 0) {
                        large -= 1;
                        if large == 0 {
                            begin = (place + 1) % links.len();
                        }
                    }
                }
                ticks += 1;
            }
            let rest = if links.is_empty() { IDLE } else { next.saturating_duration_since(Instant::now()) };
            std::thread::park_timeout(rest);
        }
    }

    /// Refreshes the routes of links whose turn it is.
    fn ask_routes(&self, links: &[Arc<dyn Monitored>], begin: &mut usize, now_ms: u64) {
        let (mut watch, mut asked) = (self.watch.lock(), 0);
        let first = *begin;
        for at in 0..links.len() {
            let place = (first + at) % links.len();
            // Requested by a sender: never skipped.
            if asked < ROUTES_PER_TICK_MAX || links[place].path().is_wanted() {
                asked += usize::from(watch.look_at(&*links[place], now_ms));
                if asked == ROUTES_PER_TICK_MAX {
                    *begin = (place + 1) % links.len();
                }
            }
        }
    }

    /// Checks one link. Returns true when it used a large probe.
    fn look_after(&self, link: &dyn Monitored, now_ms: u64, small: bool, large: bool) -> bool {
        let (path, now_us, mut asked) = (link.path(), clock_us(), [None; 2]);
        {
            let mut probing = path.probing.lock();
            probing.measure(link.stats(), now_ms);
            path.expire_hint(now_ms);
            if !link.is_probed() {
                drop(probing);
                tell(link, now_ms);
                return false;
            }
            probing.expire(now_us);
            if !link.is_sealed() && path.has_route() {
                probing.judge(link.heard_ms().map(|heard| now_ms.saturating_sub(heard)));
            }
            if small {
                asked[0] = probing.ask(None, now_us);
            }
            if large {
                let (before, size) = probing.discover(path.unprobed_mtu(), now_ms, now_us);
                asked[1] = size.and_then(|size| probing.ask(Some(size), now_us));
                let mtu = probing.discovery.mtu();
                if mtu < before {
                    let name = link.name();
                    tracing::warn!(
                        "link {name}: packets of {before} bytes do not arrive; going on with {mtu}"
                    );
                }
                path.set_probed_mtu(mtu);
            }
        }
        tell(link, now_ms);
        // Sends after unlocking: a reply may arrive at once and must not find the prober busy.
        for (id, size) in asked.iter().flatten() {
            link.send_probe(&self.socket, id, *size);
        }
        if small {
            link.negotiate(&self.socket, now_ms);
        }
        asked[1].is_some()
    }
}

/// Logs a change of the link's state, unless another room logs it.
fn tell(link: &dyn Monitored, now_ms: u64) {
    let Some(state) = link.clear_state() else { return };
    let news = link.path().probing.lock().log.news(&state, now_ms);
    if let Some(changes) = news {
        state::log(link.name(), &state, "", changes);
    }
}

#[cfg(test)]
#[path = "prober_tests.rs"]
mod tests;
