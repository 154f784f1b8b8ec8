//! Shares of what is sent: deficit round robin by weight, and a token bucket.
//!
//! Containers of the daemon's engine have shares of its thread, and all processes of a container have one together, so that nobody gets
//! more by starting more processes. The endpoints of an engine have shares of what that engine sends (`shares.rs`).

/// Highest weight: that of a container or endpoint without setting.
pub const WEIGHT_MAX: u32 = 100;
/// Bytes that the highest weight may send in a turn: four trains of packets, so that another one waits for little.
const QUANTUM: i64 = 256 << 10;
/// Depth of the bucket in time: what may be sent at once after a pause.
const DEPTH_NS: u64 = 2_000_000;

/// Share of a container or an endpoint, as set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShareSettings {
    /// Weight among those that have something to send, 1 to [`WEIGHT_MAX`]. A heavier container is also served first.
    pub weight: u32,
    /// Maximum rate in bytes per second; 0: no limit.
    pub rate: u64,
}

impl Default for ShareSettings {
    fn default() -> Self {
        Self { weight: WEIGHT_MAX, rate: 0 }
    }
}

/// A share in use.
pub(crate) struct Share {
    settings: ShareSettings,
    /// Bytes that may still leave in this turn, negative after a packet that was larger.
    credit: i64,
    /// Time at which all bytes that have left are paid for.
    paid_at: u64,
}

impl Share {
    pub(crate) fn new(settings: ShareSettings) -> Self {
        Self { settings, credit: 0, paid_at: 0 }
    }

    pub(crate) fn set(&mut self, settings: ShareSettings) {
        self.settings = settings;
    }

    pub(crate) fn weight(&self) -> u32 {
        self.settings.weight
    }

    pub(crate) fn settings(&self) -> ShareSettings {
        self.settings
    }

    /// Bytes of a turn.
    fn quantum(&self) -> i64 {
        QUANTUM * i64::from(self.settings.weight.clamp(1, WEIGHT_MAX)) / i64::from(WEIGHT_MAX)
    }

    /// Begins a turn. What a turn leaves is not saved for the next one: there was nothing more to send.
    pub(crate) fn begin(&mut self) {
        self.skip(1, 1);
    }

    /// Begins a turn after `turns - 1` others in which nothing was sent. Turns are `length` times as long as usual.
    pub(crate) fn skip(&mut self, turns: u64, length: u32) {
        let quantum = self.quantum() * i64::from(length);
        let earned = quantum.saturating_mul(i64::try_from(turns).unwrap_or(i64::MAX));
        self.credit = self.credit.saturating_add(earned).min(quantum);
    }

    /// Number of turns of this length until a packet may leave, apart from the rate; 0: in this one.
    pub(crate) fn turns_left(&self, length: u32) -> u64 {
        let quantum = self.quantum() * i64::from(length);
        if self.credit > 0 { 0 } else { (self.credit.unsigned_abs() / quantum.unsigned_abs()) + 1 }
    }

    /// Whether another packet may leave now.
    pub(crate) fn may_send(&self, now: u64) -> bool {
        self.credit > 0 && self.wakes_at(now).is_none()
    }

    /// A packet has left.
    pub(crate) fn spend(&mut self, now: u64, bytes: u64) {
        self.credit = self.credit.saturating_sub_unsigned(bytes);
        if let Some(time) = bytes.saturating_mul(1_000_000_000).checked_div(self.settings.rate) {
            self.paid_at = self.paid_at.max(now).saturating_add(time);
        }
    }

    /// When the bucket has tokens again; `None`: it has some.
    pub(crate) fn wakes_at(&self, now: u64) -> Option<u64> {
        let at = self.paid_at.saturating_sub(DEPTH_NS);
        (self.settings.rate > 0 && at > now).then_some(at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes that leave in `turns` turns of containers that always have more packets of this size.
    fn sent(settings: &[ShareSettings], turns: u64, packet: usize) -> Vec<u64> {
        let mut shares: Vec<Share> = settings.iter().map(|settings| Share::new(*settings)).collect();
        let mut bytes = vec![0; shares.len()];
        for now in (0..turns).map(|turn| turn * 100_000) {
            for (share, bytes) in shares.iter_mut().zip(&mut bytes) {
                share.begin();
                while share.may_send(now) {
                    share.spend(now, packet as u64);
                    *bytes += packet as u64;
                }
            }
        }
        bytes
    }

    #[test]
    fn bytes_leave_by_weight() {
        let weight = |weight| ShareSettings { weight, rate: 0 };
        for packet in [64, 1400, 65_507] {
            let bytes = sent(&[weight(100), weight(25), weight(1)], 10_000, packet);
            let ratio = |place: usize| bytes[0] as f64 / bytes[place] as f64;
            assert!((3.95..4.05).contains(&ratio(1)) && (97.0..103.0).contains(&ratio(2)), "{bytes:?}");
        }
    }

    #[test]
    fn a_limited_container_gets_its_rate_and_no_more() {
        let limited = ShareSettings { weight: 100, rate: 10_000_000 };
        // 10 000 turns of 100 us are a second.
        let bytes = sent(&[limited, ShareSettings::default()], 10_000, 1400);
        let depth = 10_000_000 / 500 + 1400;
        assert!((9_990_000..=10_000_000 + depth).contains(&bytes[0]), "{bytes:?}");
        assert!(bytes[1] > 100 * bytes[0], "nobody else is held back");
    }
}
