//! The prober: one thread that finds out what paths are like, outside the frames' way.
//!
//! On every native link, clear or sealed, it sends
//!
//! - a *small* probe five times a second, whose answers tell round trip and loss, and of a link in clear text whether the other
//!   host is there: the link is `down` after 0.8 s in which nothing came, once the other host has answered at all. Frames are
//!   sent all the same;
//! - probes of the sizes that path MTU discovery (pmtu.rs) wants to know about, one at a time.
//!
//! A probe's payload is [`MAGIC`](super::link_health::MAGIC), 8 random bytes that name it, and zeros up to its size. The other host
//! answers with the first 16 bytes of it (older ones with all of them), so that the path back does not matter. Answers are sealed
//! where the link is; where it is not, those 8 bytes keep others from answering who do not see the probe.
//!
//! For all links it asks the kernel about routes (watch.rs) and measures rates.
//!
//! Dispatchers touch this only when an answer comes, and never wait: an answer that meets the prober at work counts as lost. The
//! number of large probes, and of questions to the kernel, is bounded over all links.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::link_health::clock_us;
use super::watch::{Monitored, PathWatch};
use crate::link::socket::udp::Socket;
use crate::link::state::LinkState;

/// How often links are looked at.
const TICK: Duration = Duration::from_millis(50);
/// Each link has a small probe every so many ticks.
const SMALL_TICKS: u64 = 4;
/// Large probes of all links in one tick; links take turns.
const LARGE_PER_TICK_MAX: usize = 64;
/// Without links the thread sleeps so long.
const IDLE: Duration = Duration::from_secs(1);
/// Links of which the kernel is asked in one tick: all of 4 096 links have their turn within a second.
const ROUTES_PER_TICK_MAX: usize = 256;

struct Work {
    watch: Mutex<PathWatch>,
    /// What probes leave by.
    socket: Arc<Socket>,
    started: Instant,
    links: Mutex<Vec<Arc<dyn Monitored>>>,
    stopping: AtomicBool,
}

/// Probes the native links of a host, asks the kernel for the paths of all, and measures their rates. Dropped, it stops.
pub struct Prober {
    work: Arc<Work>,
    thread: Option<JoinHandle<()>>,
}

impl Prober {
    /// Starts without links. `started` is when the dispatchers' clock began.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn start(started: Instant, watch: PathWatch) -> std::io::Result<Prober> {
        let (socket, watch) = (watch.socket().clone(), Mutex::new(watch));
        let (links, stopping) = (Mutex::default(), AtomicBool::new(false));
        let work = Arc::new(Work { watch, socket, started, links, stopping });
        let run = work.clone();
        let thread = std::thread::Builder::new().name("link-prober".into()).spawn(move || run.probe_all())?;
        Ok(Prober { work, thread: Some(thread) })
    }

    /// Looks after `links` from now on, and no others. The routes of new ones are known on return.
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
                tracing::error!("the prober of links ended in a panic");
            }
        }
    }
}

impl Work {
    /// The prober's loop.
    fn probe_all(&self) {
        // Where the next tick begins: links that had no turn come first.
        let (mut ticks, mut begin, mut begin_routes) = (0u64, 0, 0);
        let mut next = Instant::now();
        while !self.stopping.load(Relaxed) {
            let links = self.links.lock().clone();
            let now_ms = self.started.elapsed().as_millis() as u64;
            self.ask_routes(&links, &mut begin_routes, now_ms);
            // A sender that asks wakes the prober between two ticks.
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

    /// Asks the kernel about the links whose turn it is.
    fn ask_routes(&self, links: &[Arc<dyn Monitored>], begin: &mut usize, now_ms: u64) {
        let (mut watch, mut asked) = (self.watch.lock(), 0);
        let first = *begin;
        for at in 0..links.len() {
            let place = (first + at) % links.len();
            // A sender waits for what is wanted.
            if asked < ROUTES_PER_TICK_MAX || links[place].path().is_wanted() {
                asked += usize::from(watch.look_at(&*links[place], now_ms));
                if asked == ROUTES_PER_TICK_MAX {
                    *begin = (place + 1) % links.len();
                }
            }
        }
    }

    /// One look at one link. True when it took a large probe.
    fn look_after(&self, link: &dyn Monitored, now_ms: u64, small: bool, large: bool) -> bool {
        let (path, now_us, mut asked) = (link.path(), clock_us(), [None; 2]);
        {
            let mut probing = path.probing.lock();
            probing.measure(link.stats(), now_ms);
            if !link.is_probed() {
                return false;
            }
            probing.expire(now_us);
            if !link.is_sealed() && path.has_route() {
                let silent_ms = link.heard_ms().map(|heard| now_ms.saturating_sub(heard));
                probing.judge(silent_ms).iter().for_each(|state| tell(link, state));
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
        // An answer may be here at once: it is not to find the prober at work.
        for (id, size) in asked.iter().flatten() {
            link.send_probe(&self.socket, id, *size);
        }
        asked[1].is_some()
    }
}

fn tell(link: &dyn Monitored, state: &LinkState) {
    match state {
        LinkState::Up => tracing::info!("link {}: up", link.name()),
        LinkState::Degraded(why) => tracing::warn!("link {}: degraded: {why}", link.name()),
        LinkState::Down(why) | LinkState::Unreachable(why) => {
            tracing::warn!("link {}: down: {why}", link.name());
        }
    }
}

#[cfg(test)]
#[path = "prober_tests.rs"]
mod tests;
