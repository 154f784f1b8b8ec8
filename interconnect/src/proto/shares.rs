//! Shares of an engine's endpoints: who of them may send now.
//!
//! Endpoints that have something to send take turns of bytes by weight (deficit round robin). All endpoints are in the same round:
//! each may send until its credit of the round is used up, and when all that have something to send have used theirs, the next round
//! begins. So an endpoint alone never waits, and rounds that nobody needs cost nothing: a share catches up with the rounds
//! when it is looked at. Rounds are longer while many channels wait for them, because all have to be looked at when one begins.
//!
//! An endpoint with a rate limit is held to it by a token bucket. Acknowledgements, other control packets and lost packets are never
//! held back; what is sent again is charged all the same.

use super::share::{Share, ShareSettings, WEIGHT_MAX};

/// Number of channels that wait for a round that is once more as long.
const CHANNELS: usize = 16;
/// How much longer than necessary a channel waits whose endpoint is beyond its rate: half the depth of the bucket, so that it
/// sends several packets at once and loses none of its rate.
const PAUSE_NS: u64 = 1_000_000;

/// Counters of an endpoint since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EndpointCounters {
    /// Packets of its operations, and of its memory that peers read.
    pub packets: u64,
    /// Bytes of these packets, and of writes straight into memory shared with a peer.
    pub bytes: u64,
    /// How often its rate limit began to hold packets back.
    pub held_back: u64,
}

struct Own {
    share: Share,
    /// Round up to which the share has its credit.
    round: u64,
    is_held: bool,
    counters: EndpointCounters,
}

impl Own {
    fn new(settings: ShareSettings, round: u64) -> Self {
        let mut share = Share::new(settings);
        share.begin();
        Self { share, round, is_held: false, counters: EndpointCounters::default() }
    }
}

/// What held packets back.
#[derive(Clone, Copy, Default)]
pub(super) struct Held {
    /// Rounds until the first of the endpoints without credit may send.
    pub(super) rounds: Option<u64>,
    /// Time at which the first of the endpoints beyond their rate may send.
    pub(super) until: Option<u64>,
}

/// The shares of all endpoints, by number. Those of closed endpoints stay: their last packets may be under way.
#[derive(Default)]
pub(super) struct Shares {
    own: Vec<Option<Own>>,
    round: u64,
    /// Length of the round in that of an ordinary one, less one.
    stretch: u32,
    held: Held,
    /// How often a rate limit began to hold packets back, of all endpoints.
    held_back: u64,
}

impl Shares {
    /// An endpoint opens.
    pub(super) fn open(&mut self, endpoint: u16) {
        let place = usize::from(endpoint);
        if self.own.len() <= place {
            self.own.resize_with(place + 1, || None);
        }
        self.own[place] = Some(Own::new(ShareSettings::default(), self.round));
    }

    /// Changes the share of an endpoint. Returns false if there is no such weight. What it owes to an earlier rate is forgiven.
    pub(super) fn set(&mut self, endpoint: u16, settings: ShareSettings) -> bool {
        if !(1..=WEIGHT_MAX).contains(&settings.weight) {
            return false;
        }
        let round = self.round;
        if let Some(own) = self.own_mut(endpoint).filter(|own| own.share.settings() != settings) {
            *own = Own { counters: own.counters, ..Own::new(settings, round) };
        }
        true
    }

    pub(super) fn counters(&self, endpoint: u16) -> EndpointCounters {
        let own = self.own.get(usize::from(endpoint)).and_then(Option::as_ref);
        own.map_or_else(EndpointCounters::default, |own| own.counters)
    }

    pub(super) fn held_back(&self) -> u64 {
        self.held_back
    }

    pub(super) fn settings(&self, endpoint: u16) -> ShareSettings {
        let own = self.own.get(usize::from(endpoint)).and_then(Option::as_ref);
        own.map_or_else(ShareSettings::default, |own| own.share.settings())
    }

    fn own_mut(&mut self, endpoint: u16) -> Option<&mut Own> {
        self.own.get_mut(usize::from(endpoint))?.as_mut()
    }

    /// Whether the endpoint may send a packet now. If not, `take_held` tells when.
    #[inline]
    pub(super) fn admit(&mut self, now: u64, endpoint: u16) -> bool {
        let (round, length) = (self.round, self.stretch + 1);
        let Some(own) = self.own_mut(endpoint) else { return true };
        if own.round != round {
            own.share.skip(round - own.round, length);
            own.round = round;
        }
        let (wakes_at, rounds) = (own.share.wakes_at(now), own.share.turns_left(length));
        if let Some(at) = wakes_at {
            let begins = !std::mem::replace(&mut own.is_held, true);
            own.counters.held_back += u64::from(begins);
            self.held_back += u64::from(begins);
            let at = at + PAUSE_NS;
            self.held.until = Some(self.held.until.map_or(at, |until| until.min(at)));
            return false;
        }
        if rounds > 0 {
            self.held.rounds = Some(self.held.rounds.map_or(rounds, |known| known.min(rounds)));
            return false;
        }
        true
    }

    /// A packet of an endpoint leaves. Returns whether its rate limit holds the next one back.
    #[inline]
    pub(super) fn spend(&mut self, now: u64, endpoint: u16, bytes: u64) -> bool {
        let Some(own) = self.own_mut(endpoint) else { return false };
        own.share.spend(now, bytes);
        own.is_held = false;
        own.counters.packets += 1;
        own.counters.bytes += bytes;
        own.share.wakes_at(now).is_some()
    }

    /// What has held packets back since the last call.
    pub(super) fn take_held(&mut self) -> Held {
        std::mem::take(&mut self.held)
    }

    /// Begins the next round, or the one so many later, for which this number of channels has waited.
    pub(super) fn advance(&mut self, rounds: u64, channels: usize) {
        self.stretch = (channels / CHANNELS) as u32;
        self.round = self.round.saturating_add(rounds.max(1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn impossible_weights_are_refused() {
        let mut shares = Shares::default();
        shares.open(3);
        for weight in [0, WEIGHT_MAX + 1, u32::MAX] {
            assert!(!shares.set(3, ShareSettings { weight, rate: 0 }), "{weight}");
        }
        assert!(shares.set(3, ShareSettings { weight: 1, rate: u64::MAX }));
        assert!(shares.admit(1, 3) && !shares.spend(1, 3, u64::MAX), "no debt overflows");
        assert!(shares.admit(1, 2) && !shares.spend(1, 2, 9), "an endpoint that never was has no share");
    }

    #[test]
    fn a_debt_of_any_size_is_paid_by_skipping_rounds() {
        let mut shares = Shares::default();
        shares.open(0);
        shares.set(0, ShareSettings { weight: 1, rate: 0 });
        for bytes in [1, 65_507, 4 << 30] {
            assert!(shares.admit(1, 0));
            while shares.admit(1, 0) {
                shares.spend(1, 0, bytes);
            }
            let rounds = shares.take_held().rounds.unwrap();
            if rounds > 1 {
                shares.advance(rounds - 1, 1);
                assert!(!shares.admit(1, 0), "{bytes}");
                assert_eq!(shares.take_held().rounds, Some(1));
            }
            shares.advance(1, 1);
            assert!(shares.admit(1, 0) && shares.take_held().rounds.is_none(), "{bytes}");
        }
    }

    /// A slow endpoint owes much time: a higher rate does not have to wait for it.
    #[test]
    fn a_new_rate_holds_at_once() {
        let mut shares = Shares::default();
        shares.open(0);
        shares.set(0, ShareSettings { weight: 100, rate: 1 });
        assert!(
            shares.admit(1, 0) && shares.spend(1, 0, 65_507) && !shares.admit(1, 0) && !shares.admit(2, 0)
        );
        assert_eq!(shares.counters(0), EndpointCounters { packets: 1, bytes: 65_507, held_back: 1 });
        shares.set(0, ShareSettings { weight: 100, rate: 1_000_000 });
        assert!(shares.admit(3, 0) && shares.settings(0).rate > 0 && shares.settings(1).rate == 0);
        assert_eq!(shares.counters(0).held_back, 1, "counters stay");
    }
}
