//! Measures one link by probes: round trip, loss, liveness, path MTU. No I/O; time is passed in.

use std::collections::VecDeque;

use rustix::time::{ClockId, clock_gettime};

use super::pmtu::{Discovery, Moment};
use crate::link::limits::PATH_MTU_MIN;
use crate::link::state::{LinkState, StateLog};
use crate::stats::PortStats;

/// First bytes of a probe's payload.
pub(in crate::link) const MAGIC: [u8; 8] = *b"vnet-mtu";
/// Payload of a reply in bytes: magic and id.
pub(in crate::link) const ANSWER_LEN: usize = 16;
/// Payload of a small probe in bytes: magic, id and [`NameTag`].
pub(in crate::link) const PROBE_LEN: usize = ANSWER_LEN + size_of::<NameTag>();
/// How long a peer that answered before may stay silent until the link is down, in ms: detected within a second.
pub(super) const SILENCE_MS: u64 = 800;
/// A small probe is lost after this many ms, or three round trips, without a reply.
const ANSWER_MS: u64 = 600;
/// Number of small probes in the loss statistics: ten seconds' worth.
const HISTORY: u32 = 50;
/// Loss in thousandths, both directions together, above which a link is degraded.
const LOSS_PERMILLE_MAX: u32 = 50;
/// Window of the rate measurement, in ms.
pub(super) const RATE_MS: u64 = 1000;
/// Maximum number of outstanding probes: small ones of at most 2 s, and a large one.
const OUTSTANDING_MAX: usize = 16;

/// This host's monotonic clock for keepalives and probes, in microseconds; never 0. It goes on in the next vnetd: of two keepalives of a
/// session the later one has the higher clock, also across a take-over.
pub(in crate::link) fn clock_us() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000 + now.tv_nsec as u64 / 1000 + 1
}

/// A digest of the sender's host name in its probes: two hosts of one name notice each other. Older hosts send zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::link) struct NameTag([u8; 8]);

impl NameTag {
    /// The tag of the host called `name`.
    pub(in crate::link) fn of(name: &str) -> NameTag {
        let digest = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, name.as_bytes());
        NameTag(std::array::from_fn(|at| digest.as_ref()[at]))
    }

    /// The tag in a probe's payload; `None` in a probe of a host that sends none.
    pub(in crate::link) fn found_in(payload: &[u8]) -> Option<NameTag> {
        let behind_id = payload.strip_prefix(&MAGIC)?.get(8..)?;
        Some(NameTag(*behind_id.first_chunk()?)).filter(|tag| tag.0 != [0; 8])
    }
}

/// The payload of a probe of `len` bytes, at least [`PROBE_LEN`].
pub(in crate::link) fn probe_payload(id: &[u8; 8], tag: Option<NameTag>, len: usize) -> Vec<u8> {
    let NameTag(tag) = tag.unwrap_or(NameTag([0; 8]));
    let mut payload = [&MAGIC[..], id, &tag].concat();
    payload.resize(len.max(PROBE_LEN), 0);
    payload
}

/// An outstanding probe.
#[derive(Debug)]
struct Sent {
    id: [u8; 8],
    at_us: u64,
    /// Size of the packet; `None` for a small probe.
    size: Option<u16>,
}

/// A link's traffic rates over the last full second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rates {
    /// Frames received per second.
    pub in_frames: u64,
    /// Bits received per second.
    pub in_bits: u64,
    /// Frames sent per second.
    pub out_frames: u64,
    /// Bits sent per second.
    pub out_bits: u64,
}

/// The state that the prober keeps for a link.
#[derive(Debug)]
pub(in crate::link) struct Probing {
    pub(super) discovery: Discovery,
    sent: VecDeque<Sent>,
    /// Time of the last reply to a small probe, on [`clock_us`].
    answered_us: Option<u64>,
    /// One bit per small probe, set if it was answered, and the number of bits.
    pub(super) history: (u64, u32),
    rtt_us: u32,
    pub(super) state: LinkState,
    /// Decides which changes of the link's state are logged.
    pub(super) log: StateLog,
    rates: Rates,
    /// Time and counter values of the last rate measurement.
    counted: (u64, [u64; 4]),
    /// Number of frames sent as of the last round.
    out_frames: u64,
    /// Time of the last round that saw newly sent frames.
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
            log: StateLog::default(),
            rates: Rates::default(),
            counted: (0, [0; 4]),
            out_frames: 0,
            active_ms: 0,
        }
    }
}

impl Probing {
    /// Loss of small probes and their answers, in thousandths; `None` before the first answer.
    fn loss_permille(&self) -> Option<u32> {
        let (answered, count) = self.history;
        self.answered_us?;
        (count > 0).then(|| (count - answered.count_ones()) * 1000 / count)
    }

    /// The measured values, for status output.
    pub(super) fn probed(&self) -> Probed {
        let rtt_us = Some(self.rtt_us).filter(|rtt| *rtt != 0);
        Probed { rtt_us, loss_permille: self.loss_permille(), rates: self.rates }
    }

    /// One step of path MTU discovery below `top`, the kernel's limit. Returns the MTU before this step, and the size to probe,
    /// if any.
    pub(super) fn discover(&mut self, top: Option<u16>, now_ms: u64, now_us: u64) -> (u16, Option<u16>) {
        if let Some(top) = top {
            self.discovery.set_top(top);
        }
        let patience_us = self.patience_us();
        let before = self.discovery.mtu();
        let size = self.discovery.poll(Moment {
            now_ms: now_us / 1000,
            active: self.out_frames != 0 && now_ms.saturating_sub(self.active_ms) < RATE_MS,
            alive: self.answered_us.is_some_and(|at| now_us.saturating_sub(at) < patience_us),
            rtt_ms: self.rtt_ms(),
        });
        (before, size)
    }

    fn note(&mut self, answered: bool) {
        let (bits, count) = self.history;
        let kept = (1 << HISTORY) - 1;
        self.history = ((bits << 1 | u64::from(answered)) & kept, (count + 1).min(HISTORY));
    }

    pub(super) fn rtt_ms(&self) -> u64 {
        u64::from(self.rtt_us.div_ceil(1000))
    }

    pub(super) fn patience_us(&self) -> u64 {
        ANSWER_MS.max(3 * self.rtt_ms()) * 1000
    }

    /// Expires probes without a reply.
    pub(super) fn expire(&mut self, now_us: u64) {
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

    /// Records a probe about to be sent: its id, and its size if it is large. `None` when no random bytes are available.
    pub(super) fn ask(&mut self, size: Option<u16>, at_us: u64) -> Option<([u8; 8], Option<u16>)> {
        let mut id = [0; 8];
        aws_lc_rs::rand::fill(&mut id).ok()?;
        self.sent.push_back(Sent { id, at_us, size });
        Some((id, size))
    }

    /// True if a probe with this id is outstanding.
    pub(super) fn has_sent(&self, id: [u8; 8]) -> bool {
        self.sent.iter().any(|sent| sent.id == id)
    }

    /// Records a reply. Returns false when it is unsolicited.
    pub(super) fn answer(&mut self, id: [u8; 8], now_us: u64) -> bool {
        let Some(place) = self.sent.iter().position(|sent| sent.id == id) else { return false };
        let Some(Sent { at_us, size, .. }) = self.sent.remove(place) else { return false };
        match size {
            Some(size) => self.discovery.answer(size, now_us / 1000),
            None => {
                let rtt = u32::try_from(now_us.saturating_sub(at_us)).unwrap_or(u32::MAX).max(1);
                // Smoothed as in RFC 6298.
                self.rtt_us = if self.rtt_us == 0 {
                    rtt
                } else {
                    (u64::from(self.rtt_us) * 7 + u64::from(rtt)).div_ceil(8) as u32
                };
                if self.answered_us.replace(now_us).is_none() {
                    // Probes sent before the first reply do not count as lost, because the peer was not up yet.
                    self.sent.retain(|sent| sent.size.is_some() || sent.at_us > at_us);
                }
                self.note(true);
            }
        }
        true
    }

    pub(super) fn measure(&mut self, stats: &PortStats, now_ms: u64) {
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

    /// Determines the state of a link in clear text; `silent_ms` is the time since the last datagram.
    pub(super) fn judge(&mut self, silent_ms: Option<u64>) {
        let was_down = matches!(self.state, LinkState::Down(_));
        if was_down && silent_ms.is_some_and(|ms| ms < SILENCE_MS) {
            // The outage is over. Its lost probes do not count against the path that works again.
            self.history = (0, 0);
            self.sent.retain(|sent| sent.size.is_some());
        }
        self.state = match (self.answered_us, silent_ms) {
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
    }
}

/// Measurements of a link.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Probed {
    /// Smoothed round trip in microseconds; `None` before the first reply.
    pub rtt_us: Option<u32>,
    /// Loss in thousandths among the last 50 probes, of the probe or its reply.
    pub loss_permille: Option<u32>,
    /// Traffic rates.
    pub rates: Rates,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_probe_carries_its_senders_name_tag() {
        let tag = NameTag::of("h1");
        let probe = probe_payload(&[7; 8], Some(tag), 100);
        assert_eq!((probe.len(), NameTag::found_in(&probe)), (100, Some(tag)));
        assert_ne!(tag, NameTag::of("h2"));
        assert_eq!(NameTag::found_in(&probe_payload(&[7; 8], None, 0)), None);
        // An older host's small probe, and a cut one.
        assert_eq!((NameTag::found_in(&probe[..ANSWER_LEN]), NameTag::found_in(&probe[..23])), (None, None));
    }

    #[test]
    fn loss_covers_the_last_ten_seconds() {
        let mut probing = Probing { answered_us: Some(1), ..Probing::default() };
        let degraded = |probing: &mut Probing| {
            probing.judge(Some(0));
            matches!(probing.state, LinkState::Degraded(_))
        };
        for n in 0..49 {
            probing.note(n % 5 != 0);
        }
        assert_eq!(probing.loss_permille(), Some(10 * 1000 / 49));
        assert!(!degraded(&mut probing), "too few to judge");
        probing.note(true);
        assert!(degraded(&mut probing));
        assert_eq!(probing.state, LinkState::Degraded("20.0 % of probes are lost".into()));
        (0..50).for_each(|_| probing.note(true));
        assert_eq!(probing.loss_permille(), Some(0));
        assert!(!degraded(&mut probing));
    }

    #[test]
    fn probes_before_the_first_reply_are_not_lost() {
        let mut probing = Probing::default();
        let ids: Vec<_> = (0..5u64).map(|n| probing.ask(None, n * 200_000).unwrap().0).collect();
        assert!(probing.answer(ids[3], 601_000));
        // The probe sent after the reply got no answer; those before the reply do not count.
        probing.expire(10_000_000);
        assert_eq!(probing.history, (0b10, 2));
        assert_eq!(probing.loss_permille(), Some(500));
    }
}
