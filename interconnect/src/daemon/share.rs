//! A container's share of the daemon's engine: deficit round robin by weight, and a token bucket. All processes of a container have one
//! share together, so that nobody gets more by starting more processes.

/// Highest weight: that of a container without setting.
pub const WEIGHT_MAX: u32 = 100;
/// Bytes that a container of the highest weight may send in a turn: four trains of packets, so that another one waits for little.
const QUANTUM: i64 = 256 << 10;
/// Depth of the bucket in time: what a container may send at once after a pause.
const DEPTH_NS: u64 = 2_000_000;

/// A container's share, as configured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShareSettings {
    /// Weight among the containers that have something to send, 1 to [`WEIGHT_MAX`]. A heavier one is also served first.
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
pub(super) struct Share {
    settings: ShareSettings,
    /// Bytes that may still leave in this turn, negative after a packet that was larger.
    credit: i64,
    /// Time at which all bytes that have left are paid for.
    paid_at: u64,
}

impl Share {
    pub(super) fn new(settings: ShareSettings) -> Self {
        Self { settings, credit: 0, paid_at: 0 }
    }

    pub(super) fn set(&mut self, settings: ShareSettings) {
        self.settings = settings;
    }

    pub(super) fn weight(&self) -> u32 {
        self.settings.weight
    }

    /// Begins a turn. What a turn leaves is not saved for the next one: the container had nothing more to send.
    pub(super) fn begin(&mut self) {
        let weight = i64::from(self.settings.weight.clamp(1, WEIGHT_MAX));
        let quantum = QUANTUM * weight / i64::from(WEIGHT_MAX);
        self.credit = (self.credit + quantum).min(quantum);
    }

    /// Whether another packet may leave now.
    pub(super) fn may_send(&self, now: u64) -> bool {
        self.credit > 0 && self.wakes_at(now).is_none()
    }

    /// A packet has left.
    pub(super) fn spend(&mut self, now: u64, bytes: usize) {
        self.credit -= bytes as i64;
        if let Some(time) = (bytes as u64 * 1_000_000_000).checked_div(self.settings.rate) {
            self.paid_at = self.paid_at.max(now) + time;
        }
    }

    /// When the bucket has tokens again; `None`: it has some.
    pub(super) fn wakes_at(&self, now: u64) -> Option<u64> {
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
                    share.spend(now, packet);
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
