//! An interface's share of its dispatchers: deficit round robin over sources, and rate limits.
//!
//! Each turn grants every source that has frames a *quantum* of work, measured as [`Batch::cost`]: bytes, segments and pieces of
//! memory, not frames alone. A source takes frames until the grant is used up. The last frame may exceed it; the source owes the
//! excess and is passed over until later quanta have paid for it (deficit round robin, Shreedhar and Varghese 1995). So a guest whose
//! frames are expensive gets no more of the dispatcher than its neighbours, and weights divide a busy dispatcher.
//!
//! Rate limits are token buckets that all queues of an interface share. Frames above the rate wait in the guest's ring: the guest
//! sees a slow network, and nothing is dropped. So do all frames of a guest that invents source addresses faster than its learning
//! limit: each such frame takes the slow path, through the lock of all learned addresses. A third limit is built in: descriptors and
//! segments beyond those that a driver needs for its frames ([`Batch::excess`]), which take much of a dispatcher for few bytes.
//!
//! [`Batch::cost`]: crate::frame::Batch::cost
//! [`Batch::excess`]: crate::frame::Batch::excess

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use crate::frame::{Batch, COST_MAX, COST_MIN, FRAME_MAX, Frame};

/// Largest and default weight: a full quantum per turn.
pub const WEIGHT_MAX: u32 = 100;
/// Default learning limit. A guest that bridges a thousand containers has a tenth of a second's worth of addresses; the slow path
/// of so many frames takes some percent of a core.
pub const LEARNING_PER_S: u32 = 10_000;
/// Frames of minimum cost that a guest gets in a turn until [`LEARNING_NS`] after its last new source address. A full batch of frames from
/// new addresses, each on the slow path, doubled neighbours' p99 round trip (docs/lab-notes/2026-11-26-attacks.md).
const LEARNING_BURST: u64 = 8;
const LEARNING_NS: u64 = 100_000_000;
/// Depth of the buckets in nanoseconds at the limit's rate; at least one frame.
const DEPTH_NS: u64 = 10_000_000;
/// Maximum rate of descriptors that no driver needs, per second and interface; a segment that no driver needs counts as several
/// (`cost::excess`). Without this limit, frames in 254 pieces made neighbours' p99 round trip five times as long, and super-frames of 1 364
/// segments 15 times (docs/lab-notes/2026-11-26-attacks.md).
const EXCESS_PER_S: u64 = 500_000;
const NS_PER_S: u64 = 1_000_000_000;

/// An interface's share, as configured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShareSettings {
    /// Weight among the sources of a dispatcher, 1 to [`WEIGHT_MAX`].
    pub weight: u32,
    /// Maximum rate from the guest in Mbit/s; 0: no limit.
    pub rate_limit: u32,
    /// Maximum rate from the guest in frames per second; 0: no limit.
    pub frame_limit: u32,
    /// Maximum rate of source addresses from the guest that are not known at its port, per second; 0: no limit.
    pub learning_limit: u32,
}

impl Default for ShareSettings {
    fn default() -> ShareSettings {
        ShareSettings { weight: WEIGHT_MAX, rate_limit: 0, frame_limit: 0, learning_limit: LEARNING_PER_S }
    }
}

impl ShareSettings {
    /// True when frames may have to wait for a rate limit.
    pub fn is_limited(&self) -> bool {
        self.rate_limit != 0 || self.frame_limit != 0
    }

    /// Depths of the buckets for bytes and frames in nanoseconds: each holds a frame of any size.
    fn depths_ns(&self) -> [u64; 2] {
        [self.bytes_ns(FRAME_MAX as u64), self.frames_ns(1)].map(|frame| frame.max(DEPTH_NS))
    }

    /// Nanoseconds that `bytes` take at the rate limit.
    fn bytes_ns(&self, bytes: u64) -> u64 {
        (bytes * 8 * 1_000).checked_div(u64::from(self.rate_limit)).unwrap_or(0)
    }

    /// Nanoseconds that `frames` take at the frame limit.
    fn frames_ns(&self, frames: u64) -> u64 {
        (frames * NS_PER_S).checked_div(u64::from(self.frame_limit)).unwrap_or(0)
    }
}

/// A token bucket: the time at which it is full again (the generic cell rate algorithm, ITU-T I.371), one word that dispatchers
/// share without a lock.
#[derive(Debug, Default)]
struct Bucket(AtomicU64);

impl Bucket {
    /// Nanoseconds until the bucket, `depth_ns` deep, has a token again; 0 if it has one.
    fn wait_ns(&self, now_ns: u64, depth_ns: u64) -> u64 {
        self.0.load(Relaxed).saturating_sub(now_ns).saturating_sub(depth_ns)
    }

    /// Nanoseconds of tokens in the bucket.
    fn tokens_ns(&self, now_ns: u64, depth_ns: u64) -> u64 {
        depth_ns.saturating_sub(self.0.load(Relaxed).saturating_sub(now_ns))
    }

    /// Whether the bucket was not full at some time in the last `span_ns`.
    fn was_used_within(&self, now_ns: u64, span_ns: u64) -> bool {
        let full_at = self.0.load(Relaxed);
        full_at > 0 && full_at.saturating_add(span_ns) > now_ns
    }

    /// Takes tokens worth `cost_ns`.
    fn take(&self, now_ns: u64, cost_ns: u64) {
        let taken = |full_at: u64| Some(full_at.max(now_ns).saturating_add(cost_ns));
        // The closure never refuses.
        let _ = self.0.fetch_update(Relaxed, Relaxed, taken);
    }
}

/// State of an interface's rate limits.
#[derive(Debug)]
pub(super) struct Limits {
    epoch: Instant,
    bytes: Bucket,
    frames: Bucket,
    sources: Bucket,
    excess: Bucket,
}

impl Default for Limits {
    fn default() -> Limits {
        let [bytes, frames, sources, excess] = Default::default();
        Limits { epoch: Instant::now(), bytes, frames, sources, excess }
    }
}

/// What a source may take in this turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Grant {
    /// Frames of this cost.
    Cost(u64),
    /// Nothing: it owes for earlier turns.
    NextTurn,
    /// Nothing before this time: a rate limit is reached.
    At(Instant),
}

/// A source's share of its dispatcher.
pub(super) struct Share {
    settings: ShareSettings,
    limits: Arc<Limits>,
    /// Cost that the source may still make, negative while it owes.
    credit: i64,
}

impl Share {
    pub(super) fn new(settings: ShareSettings, limits: Arc<Limits>) -> Share {
        Share { settings, limits, credit: 0 }
    }

    /// Applies new settings.
    pub(super) fn set(&mut self, settings: ShareSettings) {
        self.settings = settings;
    }

    /// Grants the next turn, at `now`.
    #[inline]
    pub(super) fn grant(&mut self, now: Instant) -> Grant {
        if let Some(at) = self.waits_until(now) {
            return Grant::At(at);
        }
        let quantum = (COST_MAX * u64::from(self.settings.weight) / u64::from(WEIGHT_MAX)) as i64;
        // What a source leaves is not saved for later: it had nothing more to send.
        self.credit = (self.credit + quantum).min(quantum);
        match u64::try_from(self.credit) {
            Ok(cost) if cost > 0 => Grant::Cost(self.within_limits(cost, now)),
            _ => Grant::NextTurn,
        }
    }

    /// Charges a burst of the last grant.
    #[inline]
    pub(super) fn charge(&mut self, batch: &Batch, now: Instant) {
        self.credit = self.credit.saturating_sub_unsigned(batch.cost());
        let excess = batch.excess() as u64;
        if excess > 0 {
            self.limits.excess.take(self.limits.now_ns(now), excess * NS_PER_S / EXCESS_PER_S);
        }
        if self.settings.is_limited() {
            self.charge_limits(batch, now);
        }
    }

    /// Charges source addresses that were not known at the port.
    #[inline]
    pub(super) fn charge_sources(&mut self, new: u64, now: Instant) {
        let cost_ns = (new * NS_PER_S).checked_div(u64::from(self.settings.learning_limit));
        if new > 0
            && let Some(cost_ns) = cost_ns
        {
            self.limits.sources.take(self.limits.now_ns(now), cost_ns);
        }
    }

    /// Time at which the limits admit the next frame; `None`: now.
    #[inline]
    fn waits_until(&self, now: Instant) -> Option<Instant> {
        let limits = &*self.limits;
        let now_ns = limits.now_ns(now);
        let mut wait = match self.settings.learning_limit {
            0 => 0,
            _ => limits.sources.wait_ns(now_ns, DEPTH_NS),
        };
        wait = wait.max(limits.excess.wait_ns(now_ns, DEPTH_NS));
        if self.settings.is_limited() {
            let [bytes_depth, frames_depth] = self.settings.depths_ns();
            let of_both =
                limits.bytes.wait_ns(now_ns, bytes_depth).max(limits.frames.wait_ns(now_ns, frames_depth));
            wait = wait.max(of_both);
        }
        (wait > 0).then(|| now + Duration::from_nanos(wait))
    }

    /// Reduces a grant to the tokens of `rate_limit` and `frame_limit`, whose buckets are overdrawn by one frame at most, and to
    /// [`LEARNING_BURST`].
    #[inline]
    fn within_limits(&self, cost: u64, now: Instant) -> u64 {
        let (limits, settings) = (&*self.limits, &self.settings);
        let (now_ns, mut within) = (limits.now_ns(now), cost);
        if settings.learning_limit != 0 && limits.sources.was_used_within(now_ns, LEARNING_NS) {
            within = within.min(COST_MIN * LEARNING_BURST);
        }
        if !settings.is_limited() {
            return within;
        }
        let [bytes_depth, frames_depth] = settings.depths_ns();
        if settings.rate_limit != 0 {
            // A frame costs no less than its bytes.
            let bytes = limits.bytes.tokens_ns(now_ns, bytes_depth) * u64::from(settings.rate_limit) / 8_000;
            within = within.min(bytes);
        }
        if settings.frame_limit != 0 {
            let tokens = limits.frames.tokens_ns(now_ns, frames_depth);
            within = within.min(COST_MIN * (tokens.saturating_mul(settings.frame_limit.into()) / NS_PER_S));
        }
        within.max(1)
    }

    fn charge_limits(&self, batch: &Batch, now: Instant) {
        let (limits, settings) = (&*self.limits, &self.settings);
        let now_ns = limits.now_ns(now);
        let bytes: usize = batch.frames().iter().map(Frame::len).sum();
        limits.bytes.take(now_ns, settings.bytes_ns(bytes as u64));
        limits.frames.take(now_ns, settings.frames_ns(batch.len() as u64));
    }
}

impl Limits {
    /// True while frames wait for the limit of descriptors and segments.
    pub(super) fn has_excess(&self) -> bool {
        self.excess.tokens_ns(self.now_ns(Instant::now()), DEPTH_NS) < DEPTH_NS / 2
    }

    fn now_ns(&self, now: Instant) -> u64 {
        now.saturating_duration_since(self.epoch).as_nanos() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::{BATCH_MAX, DropSink, NetworkId, Origin, PortId};
    use crate::interface::Interface;
    use crate::interface::fake::Fake;
    use crate::source::{BatchSlot, Source, receive};
    use crate::wire::offload::{F_NEEDS_CSUM, GSO_TCPV4, Offload};

    /// A super-frame of 64 KiB that makes 1 366 segments.
    fn expensive() -> (Vec<u8>, Offload) {
        cut(48)
    }

    fn cut(gso_size: u16) -> (Vec<u8>, Offload) {
        let (gso_type, csum_start, csum_offset) = (GSO_TCPV4, 34, 16);
        let offload =
            Offload { flags: F_NEEDS_CSUM, gso_type, hdr_len: 54, gso_size, csum_start, csum_offset };
        (vec![0; FRAME_MAX - 18], offload)
    }

    fn cheap(len: usize) -> (Vec<u8>, Offload) {
        (vec![0; len], Offload::default())
    }

    /// A guest with a backlog.
    struct Guest {
        fake: Arc<Fake>,
        source: Box<dyn Source>,
        share: Share,
        slot: BatchSlot,
        frames: usize,
        bytes: usize,
        work: u64,
    }

    impl Guest {
        fn new(settings: ShareSettings, backlog: Vec<(Vec<u8>, Offload)>) -> Guest {
            let origin = Origin { port: PortId(0), network: NetworkId::DEFAULT };
            let fake = Fake::new(origin, FRAME_MAX, 10, Arc::default()).unwrap();
            fake.send(backlog);
            let share = Share::new(settings, Arc::default());
            let slot = BatchSlot::new(BATCH_MAX);
            Guest { source: fake.clone().source(0), fake, share, slot, frames: 0, bytes: 0, work: 0 }
        }

        /// One turn; returns the number of frames taken, and when to come back if there is a limit.
        fn turn(&mut self, now: Instant) -> (usize, Option<Instant>) {
            match self.share.grant(now) {
                Grant::Cost(cost) => self.slot.set_budget(cost),
                Grant::NextTurn => return (0, None),
                Grant::At(at) => return (0, Some(at)),
            }
            let burst = receive(&mut *self.source, &mut self.slot, &mut DropSink::new(), 0);
            self.share.charge(&burst, now);
            self.frames += burst.len();
            self.bytes += burst.frames().iter().map(Frame::len).sum::<usize>();
            self.work += burst.cost();
            (burst.len(), None)
        }
    }

    fn weight(weight: u32) -> ShareSettings {
        ShareSettings { weight, ..ShareSettings::default() }
    }

    #[test]
    fn a_turn_is_bounded_in_work_not_only_in_frames() {
        let now = Instant::now();
        let mut attacker = Guest::new(weight(100), (0..64).map(|_| expensive()).collect());
        assert_eq!(attacker.turn(now).0, 1, "1 366 segments are more than a turn's work");
        let mut ordinary = Guest::new(weight(100), (0..100).map(|_| cheap(60)).collect());
        assert_eq!(ordinary.turn(now).0, 64, "small frames fill the batch");
        assert_eq!(ordinary.turn(now).0, 36);
        let mut jumbo = Guest::new(weight(100), (0..64).map(|_| cheap(65_000)).collect());
        assert_eq!(jumbo.turn(now).0, 16);
    }

    #[test]
    fn expensive_frames_buy_no_larger_share() {
        let now = Instant::now();
        let mut attacker = Guest::new(weight(100), (0..2_000).map(|_| cut(536)).collect());
        let mut ordinary = Guest::new(weight(100), (0..20_000).map(|_| cheap(1514)).collect());
        for _ in 0..200 {
            attacker.turn(now);
            ordinary.turn(now);
        }
        let ratio = attacker.work as f64 / ordinary.work as f64;
        assert!((0.97..1.03).contains(&ratio), "{ratio}: {} frames, {}", attacker.frames, ordinary.frames);
    }

    #[test]
    fn weights_divide_a_busy_dispatcher() {
        let now = Instant::now();
        let backlog = || (0..60_000).map(|_| cheap(60)).collect::<Vec<_>>();
        let mut guests = [100, 25, 1].map(|weight_of| Guest::new(weight(weight_of), backlog()));
        (0..800).for_each(|_| guests.iter_mut().for_each(|guest| _ = guest.turn(now)));
        let [full, quarter, least] = guests.map(|guest| guest.frames);
        assert_eq!(full, 800 * 64);
        assert!(
            (quarter as i64 - 800 * 16).abs() <= 16 && (least as i64 - 512).abs() <= 1,
            "{quarter} {least}"
        );
    }

    #[test]
    fn a_guest_that_scatters_its_frames_waits_for_pieces() {
        let (mut share, start) = (Share::new(weight(100), Arc::default()), Instant::now());
        let (mut now, mut pieces) = (start, 0);
        while now < start + Duration::from_secs(10) {
            match share.grant(now) {
                Grant::At(at) => now = at,
                Grant::NextTurn => {}
                Grant::Cost(_) => {
                    let mut batch = Batch::new();
                    batch.charge_refused(254);
                    pieces += batch.excess() as u64;
                    share.charge(&batch, now);
                }
            }
        }
        let per_s = pieces / 10;
        assert!(share.limits.excess.tokens_ns(share.limits.now_ns(now), DEPTH_NS) < DEPTH_NS / 2, "said so");
        assert!((EXCESS_PER_S..EXCESS_PER_S * 102 / 100).contains(&per_s), "{per_s}");
        let mut ordinary = Batch::new();
        (0..64).for_each(|_| ordinary.charge_refused(19));
        share.charge(&ordinary, now + Duration::from_secs(1));
        assert!(!matches!(share.grant(now + Duration::from_secs(1)), Grant::At(_)));
    }

    #[test]
    fn a_guest_that_cuts_its_frames_finely_waits() {
        let mut guest = Guest::new(weight(100), (0..1_000).map(|_| expensive()).collect());
        run(&mut guest, 10);
        // 25 000 segments a second beyond what a driver needs, 1 202 of each frame.
        assert!((207..=211).contains(&guest.frames), "{}", guest.frames);
        let mut ordinary = Guest::new(weight(100), (0..1_000).map(|_| cut(536)).collect());
        let now = Instant::now();
        (0..1_000).for_each(|_| _ = ordinary.turn(now));
        assert_eq!(ordinary.frames, 1_000);
    }

    #[test]
    fn an_idle_source_saves_nothing() {
        let now = Instant::now();
        let mut guest = Guest::new(weight(25), vec![]);
        (0..100).for_each(|_| _ = guest.turn(now));
        guest.fake.send((0..100).map(|_| cheap(60)));
        assert_eq!(guest.turn(now).0, 16);
    }

    /// Runs a limited guest for `seconds` on a fake clock.
    fn run(guest: &mut Guest, seconds: u64) {
        let start = Instant::now();
        let mut now = start;
        while now < start + Duration::from_secs(seconds) {
            now = guest.turn(now).1.unwrap_or(now);
        }
    }

    #[test]
    fn a_rate_limit_bounds_bytes_and_a_frame_limit_frames() {
        let limits = ShareSettings { rate_limit: 8, ..weight(100) };
        let mut guest = Guest::new(limits, (0..6_000).map(|_| cheap(1_000)).collect());
        run(&mut guest, 4);
        // 1 MB per second, and a bucket of one super-frame.
        assert!((4_000_000..4_080_000).contains(&guest.bytes), "{}", guest.bytes);
        let limits = ShareSettings { frame_limit: 1_000, ..weight(100) };
        let mut guest = Guest::new(limits, (0..6_000).map(|_| cheap(1_000)).collect());
        run(&mut guest, 4);
        assert!((4_000..4_020).contains(&guest.frames), "{}", guest.frames);
        let mut slow = Guest::new(
            ShareSettings { rate_limit: 1, ..weight(100) },
            (0..64).map(|_| expensive()).collect(),
        );
        run(&mut slow, 10);
        // 125 kB per second are two super-frames.
        assert!((18..=22).contains(&slow.frames), "{}", slow.frames);
    }

    #[test]
    fn who_invents_source_addresses_waits() {
        let settings = ShareSettings { learning_limit: 1_000, ..weight(100) };
        let mut guest = Guest::new(settings, (0..6_000).map(|_| cheap(60)).collect());
        let start = Instant::now();
        let mut now = start;
        while now < start + Duration::from_secs(4) {
            let (taken, wait) = guest.turn(now);
            now = wait.unwrap_or(now);
            guest.share.charge_sources(taken as u64, now);
            assert!(taken <= 8 || now < start + Duration::from_millis(1), "{taken} frames in a turn");
        }
        assert!((4_000..4_100).contains(&guest.frames), "{}", guest.frames);
        // Frames from known addresses are not limited.
        let mut ordinary = Guest::new(settings, (0..6_000).map(|_| cheap(60)).collect());
        (0..100).for_each(|_| _ = ordinary.turn(start));
        assert_eq!(ordinary.frames, 6_000);
    }

    /// Pauses in which the bucket fills again buy no larger turns.
    #[test]
    fn who_invents_source_addresses_now_and_then_takes_few_frames_in_a_turn() {
        let settings = ShareSettings { learning_limit: 1_000, ..weight(100) };
        let mut guest = Guest::new(settings, (0..6_000).map(|_| cheap(60)).collect());
        let mut now = Instant::now();
        assert_eq!(guest.turn(now).0, 64);
        for _ in 0..20 {
            guest.share.charge_sources(5, now);
            now += Duration::from_millis(90);
            assert_eq!(guest.turn(now).0, 8);
        }
        now += Duration::from_millis(20);
        assert_eq!(guest.turn(now).0, 64);
    }

    #[test]
    fn all_queues_of_an_interface_share_its_limits() {
        let limits = ShareSettings { frame_limit: 1_000, ..weight(100) };
        let backlog = || (0..6_000).map(|_| cheap(60)).collect::<Vec<_>>();
        let (mut one, mut other) = (Guest::new(limits, backlog()), Guest::new(limits, backlog()));
        other.share.limits = one.share.limits.clone();
        let start = Instant::now();
        for ms in 0..4_000 {
            let now = start + Duration::from_millis(ms);
            one.turn(now);
            other.turn(now);
        }
        let frames = one.frames + other.frames;
        assert!((3_980..4_020).contains(&frames), "{frames}");
    }
}
