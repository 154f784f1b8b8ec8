//! The prober: what is known of links by asking, outside the frames' way. One thread, and no other.
//!
//! On every native link, clear or sealed, it sends
//!
//! - a *small* probe five times a second, whose answers tell round trip and loss, and of a link in clear text whether the other
//!   host is there: that is `down` after 0.8 s in which nothing came, once it has answered at all. Frames are sent all the same;
//! - probes of the sizes that path MTU discovery (pmtu.rs) wants to know about, one at a time.
//!
//! A probe's payload is [`MAGIC`], 8 random bytes that name it, and zeros up to its size. The other host answers with the first
//! 16 bytes of it (older ones with all of them), so that the way back does not matter. Answers are sealed where the link is;
//! where it is not, those 8 bytes keep others from answering who do not see the probe.
//!
//! Dispatchers touch this only when an answer comes ([`Link::answered`]), and never wait: an answer that meets the prober at
//! work counts as lost. The number of large probes is bounded over all links.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::link::path::pmtu::{Discovery, Moment};
use crate::link::sealed::keepalive::clock_us;
use crate::link::socket::control_datagrams::Courier;
use crate::link::{Encapsulation, Link, LinkState, PATH_MTU_MIN};

/// What the payload of such a probe begins with.
pub(in crate::link) const MAGIC: [u8; 8] = *b"vnet-mtu";
/// Bytes of a small probe's payload, and of an answer's.
pub(in crate::link) const ANSWER_LEN: usize = 16;
/// How often links are looked at.
const TICK: Duration = Duration::from_millis(50);
/// Each link has a small probe every so many ticks.
const SMALL_TICKS: u64 = 4;
/// Large probes of all links in one tick; links take turns.
const LARGE_PER_TICK_MAX: usize = 64;
/// Without links the thread sleeps so long.
const IDLE: Duration = Duration::from_secs(1);
/// A peer that has answered before is down when it was not heard for so long: noticed within a second.
const SILENCE_MS: u64 = 800;
/// Small probes are lost when they are not answered within so many ms, or three round trips.
const ANSWER_MS: u64 = 600;
/// Small probes that loss is told of: ten seconds.
const HISTORY: u32 = 50;
/// A link is degraded when more than so many thousandths of its probes are lost, both ways together.
const LOSS_PERMILLE_MAX: u32 = 50;
/// Time over which rates are measured, in ms.
const RATE_MS: u64 = 1000;
/// Probes under way: small ones of at most 2 s, and a large one.
const OUTSTANDING_MAX: usize = 16;

/// A probe that was not answered yet.
#[derive(Debug)]
struct Sent {
    id: [u8; 8],
    at_us: u64,
    /// The packet's size; `None` for a small one.
    size: Option<u16>,
}

/// How much a link carries, averaged over the last full second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rates {
    /// Frames that came, a second.
    pub in_frames: u64,
    /// Their bits.
    pub in_bits: u64,
    /// Frames that left, a second.
    pub out_frames: u64,
    /// Their bits.
    pub out_bits: u64,
}

/// What the prober knows of a link.
#[derive(Debug)]
pub(in crate::link) struct Probing {
    discovery: Discovery,
    sent: VecDeque<Sent>,
    /// When a small probe was answered last, on [`clock_us`].
    answered_us: Option<u64>,
    /// Whether the last small probes were answered, one bit each, and how many those are.
    history: (u64, u32),
    rtt_us: u32,
    state: LinkState,
    rates: Rates,
    /// Counters as they were when rates were measured last, and when that was.
    counted: (u64, [u64; 4]),
    /// Frames sent at the last look.
    out_frames: u64,
    /// When frames were sent last, as far as looks tell.
    active_ms: u64,
}

impl Default for Probing {
    fn default() -> Probing {
        Probing {
            discovery: Discovery::new(u16::MAX, PATH_MTU_MIN),
            sent: VecDeque::new(),
            answered_us: None,
            history: (0, 0),
            rtt_us: 0,
            state: LinkState::Up,
            rates: Rates::default(),
            counted: (0, [0; 4]),
            out_frames: 0,
            active_ms: 0,
        }
    }
}

impl Probing {
    /// Loss of small probes and their answers, in thousandths; `None` before any was answered.
    fn loss_permille(&self) -> Option<u32> {
        let (answered, count) = self.history;
        self.answered_us?;
        (count > 0).then(|| (count - answered.count_ones()) * 1000 / count)
    }

    fn note(&mut self, answered: bool) {
        let (bits, count) = self.history;
        let kept = (1 << HISTORY) - 1;
        self.history = ((bits << 1 | u64::from(answered)) & kept, (count + 1).min(HISTORY));
    }

    fn rtt_ms(&self) -> u64 {
        u64::from(self.rtt_us.div_ceil(1000))
    }

    fn patience_us(&self) -> u64 {
        ANSWER_MS.max(3 * self.rtt_ms()) * 1000
    }

    /// Forgets probes whose time is up.
    fn expire(&mut self, now_us: u64) {
        let patience = self.patience_us();
        while let Some(first) = self.sent.front()
            && (now_us.saturating_sub(first.at_us) >= patience || self.sent.len() > OUTSTANDING_MAX)
        {
            if first.size.is_none() && self.answered_us.is_some() {
                self.note(false);
            }
            self.sent.pop_front();
        }
    }

    /// Notes a probe that is to be sent: its name, and its size if it is a large one. `None` without random bytes.
    fn ask(&mut self, size: Option<u16>, at_us: u64) -> Option<([u8; 8], Option<u16>)> {
        let mut id = [0; 8];
        aws_lc_rs::rand::fill(&mut id).ok()?;
        self.sent.push_back(Sent { id, at_us, size });
        Some((id, size))
    }

    /// Takes an answer; false when nobody asked.
    fn answer(&mut self, id: [u8; 8], now_us: u64) -> bool {
        let Some(place) = self.sent.iter().position(|sent| sent.id == id) else { return false };
        let Some(Sent { at_us, size, .. }) = self.sent.remove(place) else { return false };
        match size {
            Some(size) => self.discovery.answer(size, now_us / 1000),
            None => {
                let rtt = u32::try_from(now_us.saturating_sub(at_us)).unwrap_or(u32::MAX).max(1);
                // RFC 6298's smoothing.
                self.rtt_us = if self.rtt_us == 0 {
                    rtt
                } else {
                    (u64::from(self.rtt_us) * 7 + u64::from(rtt)).div_ceil(8) as u32
                };
                if self.answered_us.replace(now_us).is_none() {
                    // What was asked before the other host was there is not lost.
                    self.sent.retain(|sent| sent.size.is_some() || sent.at_us > at_us);
                }
                self.note(true);
            }
        }
        true
    }

    fn measure(&mut self, link: &Link, now_ms: u64) {
        let stats = link.stats();
        let counters =
            [&stats.in_frames, &stats.in_bytes, &stats.out_frames, &stats.out_bytes].map(|c| c.get());
        let (before_ms, before) = self.counted;
        let passed = now_ms.saturating_sub(before_ms);
        if passed >= RATE_MS {
            let per_s = |at: usize| counters[at].saturating_sub(before[at]).saturating_mul(1000) / passed;
            self.rates = Rates {
                in_frames: per_s(0),
                in_bits: per_s(1).saturating_mul(8),
                out_frames: per_s(2),
                out_bits: per_s(3).saturating_mul(8),
            };
            self.counted = (now_ms, counters);
        }
        if counters[2] != self.out_frames {
            (self.out_frames, self.active_ms) = (counters[2], now_ms);
        }
    }

    /// Judges a link in clear text; `silent_ms` is how long nothing came by it.
    fn judge(&mut self, silent_ms: Option<u64>) -> Option<LinkState> {
        let state = match (self.answered_us, silent_ms) {
            (Some(_), Some(ms)) if ms >= SILENCE_MS => {
                LinkState::Down(format!("nothing came for {}.{} s", ms / 1000, ms / 100 % 10))
            }
            _ => match self.loss_permille() {
                Some(loss) if loss > LOSS_PERMILLE_MAX && self.history.1 == HISTORY => {
                    LinkState::Degraded(format!("{}.{} % of probes are lost", loss / 10, loss % 10))
                }
                _ => LinkState::Up,
            },
        };
        let news = std::mem::discriminant(&state) != std::mem::discriminant(&self.state);
        self.state = state;
        news.then(|| self.state.clone())
    }
}

/// What is known of a link by probes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Probed {
    /// Round trip in microseconds, smoothed; `None` while nothing was answered.
    pub rtt_us: Option<u32>,
    /// Of the last 50 probes, thousandths that were lost, they or their answers.
    pub loss_permille: Option<u32>,
    /// What it carries.
    pub rates: Rates,
}

impl Link {
    /// What is known of it by probes, and its rates.
    pub fn probed(&self) -> Probed {
        let probing = lock(&self.probing);
        let rtt_us = Some(probing.rtt_us).filter(|rtt| *rtt != 0);
        Probed { rtt_us, loss_permille: probing.loss_permille(), rates: probing.rates }
    }

    /// Takes the answer to a probe. False when it is none of ours, or comes too late.
    #[cold]
    pub(in crate::link) fn answered(&self, payload: &[u8]) -> bool {
        let Some(rest) = payload.strip_prefix(&MAGIC) else { return false };
        let Some(id) = rest.first_chunk() else { return false };
        // The dispatcher does not wait for the prober.
        self.probing.try_lock().is_ok_and(|mut probing| {
            let taken = probing.answer(*id, clock_us());
            self.probed_mtu.store(u32::from(probing.discovery.mtu()), Relaxed);
            taken
        })
    }

    /// What the prober thinks of it; for a link in clear text.
    pub(in crate::link) fn probed_state(&self) -> LinkState {
        lock(&self.probing).state.clone()
    }

    /// Has the path looked at anew: it leads elsewhere.
    pub(in crate::link) fn forget_path(&self) {
        lock(&self.probing).discovery.restart();
        self.refresh_soon();
    }
}

/// What this lock protects is whole at any time.
fn lock(probing: &Mutex<Probing>) -> MutexGuard<'_, Probing> {
    probing.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Shared {
    courier: Courier,
    started: Instant,
    links: Mutex<Vec<Arc<Link>>>,
    stopping: AtomicBool,
}

/// Probes the native links of a host, and measures the rates of all. Dropped, it stops.
pub struct Prober {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Prober {
    /// Starts without links. `started` is when the dispatchers' clock began; `courier` sends from the bridge's socket.
    ///
    /// # Errors
    /// There is no thread to be had.
    pub fn start(started: Instant, courier: Courier) -> std::io::Result<Prober> {
        let (links, stopping) = (Mutex::default(), AtomicBool::new(false));
        let shared = Arc::new(Shared { courier, started, links, stopping });
        let run = shared.clone();
        let thread = std::thread::Builder::new().name("link-prober".into()).spawn(move || run.probe_all())?;
        Ok(Prober { shared, thread: Some(thread) })
    }

    /// Looks after `links` from now on, and no others.
    pub fn set_links(&self, links: &[Arc<Link>]) {
        *self.shared.links() = links.to_vec();
        self.thread.iter().for_each(|thread| thread.thread().unpark());
    }
}

impl Drop for Prober {
    fn drop(&mut self) {
        self.shared.stopping.store(true, Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            if thread.join().is_err() {
                tracing::error!("the prober of links ended in a panic");
            }
        }
    }
}

impl Shared {
    fn links(&self) -> MutexGuard<'_, Vec<Arc<Link>>> {
        self.links.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The prober's loop.
    fn probe_all(&self) {
        let (mut ticks, mut begin) = (0u64, 0);
        while !self.stopping.load(Relaxed) {
            let links = self.links().clone();
            let now_ms = self.started.elapsed().as_millis() as u64;
            let mut large = LARGE_PER_TICK_MAX;
            for at in 0..links.len() {
                let place = (begin + at) % links.len();
                let small = (ticks + links[place].id).is_multiple_of(SMALL_TICKS);
                if self.look_after(&links[place], now_ms, small, large > 0) {
                    large -= 1;
                    if large == 0 {
                        // Who had no turn comes first next time.
                        begin = (place + 1) % links.len();
                    }
                }
            }
            ticks += 1;
            std::thread::park_timeout(if links.is_empty() { IDLE } else { TICK });
        }
    }

    /// One look at one link. True when it took a large probe.
    fn look_after(&self, link: &Link, now_ms: u64, small: bool, large: bool) -> bool {
        let (now_us, mut asked) = (clock_us(), [None; 2]);
        {
            let mut probing = lock(&link.probing);
            probing.measure(link, now_ms);
            if link.options.encapsulation != Encapsulation::Native || link.remote().is_none() {
                return false;
            }
            probing.expire(now_us);
            if link.seal().is_none() && link.route_failure().is_none() {
                let silent_ms = link.heard_ms().map(|heard| now_ms.saturating_sub(heard));
                probing.judge(silent_ms).iter().for_each(|state| tell(link, state));
            }
            if small {
                asked[0] = probing.ask(None, now_us);
            }
            if large && let Some(size) = discover(&mut probing, link, now_ms, now_us) {
                asked[1] = probing.ask(Some(size), now_us);
            }
        }
        // An answer may be here at once: it is not to find the prober at work.
        for (id, size) in asked.iter().flatten() {
            let len = size.map_or(ANSWER_LEN, |size| link.payload_of(size).max(ANSWER_LEN));
            let mut payload = vec![0; len];
            payload[..8].copy_from_slice(&MAGIC);
            payload[8..16].copy_from_slice(id);
            self.courier.probe(link, &payload);
        }
        asked[1].is_some()
    }
}

/// One step of a link's path MTU discovery: the size to probe, if there is one.
fn discover(probing: &mut Probing, link: &Link, now_ms: u64, now_us: u64) -> Option<u16> {
    if let Some(top) = link.unprobed_mtu() {
        probing.discovery.set_top(top);
    }
    let patience_us = probing.patience_us();
    let at = Moment {
        now_ms: now_us / 1000,
        active: probing.out_frames != 0 && now_ms.saturating_sub(probing.active_ms) < RATE_MS,
        alive: probing.answered_us.is_some_and(|at| now_us.saturating_sub(at) < patience_us),
        rtt_ms: probing.rtt_ms(),
    };
    let before = probing.discovery.mtu();
    let size = probing.discovery.poll(at);
    let mtu = probing.discovery.mtu();
    if mtu < before {
        tracing::warn!("link {}: packets of {before} bytes do not arrive; going on with {mtu}", link.name());
    }
    link.probed_mtu.store(mtu.into(), Relaxed);
    size
}

fn tell(link: &Link, state: &LinkState) {
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
