//! Admission of handshakes that other hosts start: how many at a time and how often, in total and per address.
//!
//! A TLS handshake costs this host about a millisecond of a processor, and a hostile client next to nothing. TCP has proved the
//! source address by then, under load by SYN cookies, which keep no state before the answer. So each address can get its share:
//!
//! - a number of handshakes at a time. Addresses that no link has (*strangers*) get at most half of all, so that links' remotes
//!   find room;
//! - a rate of *failures*. A handshake that succeeds takes no token, so that many peers behind one NAT do not slow each other down.
//!
//! IPv6 strangers are counted by /64 network: one machine may use all its addresses.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Maximum number of concurrent handshakes in each direction. Each takes at most 5 s.
pub(in crate::link) const HANDSHAKES_MAX: usize = 32;
/// Maximum number of concurrent handshakes from one address.
const PER_ADDRESS_MAX: usize = 4;
/// Maximum number of concurrent handshakes from strangers.
const STRANGERS_MAX: usize = HANDSHAKES_MAX / 2;
/// Failures of one stranger, of all strangers, and of the remote of a link. A peer retries every 2 s at most after its first three
/// attempts, and all strangers together take less than two percent of a processor.
const OF_STRANGER: Rate = Rate { burst: 8, interval: Duration::from_secs(1) };
const OF_STRANGERS: Rate = Rate { burst: 64, interval: Duration::from_micros(62_500) };
const OF_REMOTE: Rate = Rate { burst: 32, interval: Duration::from_millis(125) };
/// Number of counted addresses above which idle ones are removed. Far fewer strangers than this have failed within the 8 s that
/// their buckets take to refill, because all of them share one rate.
const ADDRESSES: usize = 512;

const TOO_MANY: &str = "too many handshakes are under way";
const TOO_OFTEN: &str = "too many handshakes have failed";

/// A number of tokens, and the time in which one is added.
#[derive(Clone, Copy)]
struct Rate {
    burst: u32,
    interval: Duration,
}

/// A token bucket: the time at which it is full again (the generic cell rate algorithm); `None`: it is full.
#[derive(Clone, Copy, Debug, Default)]
struct Bucket(Option<Instant>);

impl Bucket {
    fn is_full(self, now: Instant) -> bool {
        self.0.is_none_or(|full_at| full_at <= now)
    }

    fn has_token(self, rate: Rate, now: Instant) -> bool {
        let missing = self.0.map_or(Duration::ZERO, |full_at| full_at.saturating_duration_since(now));
        missing + rate.interval <= rate.interval * rate.burst
    }

    fn take(&mut self, rate: Rate, now: Instant) {
        self.0 = Some(self.0.map_or(now, |full_at| full_at.max(now)) + rate.interval);
    }

    fn put_back(&mut self, rate: Rate) {
        self.0 = self.0.and_then(|full_at| full_at.checked_sub(rate.interval));
    }
}

/// An address, or a stranger's network, and true for a stranger.
type Key = (IpAddr, bool);

#[derive(Debug, Default)]
struct Source {
    under_way: usize,
    failures: Bucket,
}

#[derive(Debug, Default)]
struct Counts {
    sources: HashMap<Key, Source>,
    under_way: usize,
    strangers: usize,
    failures_of_strangers: Bucket,
    /// Number of sources after the last removal of idle ones.
    kept: usize,
}

/// Admits handshakes to one port.
#[derive(Debug, Default)]
pub(in crate::link) struct HandshakeGate(Arc<Mutex<Counts>>);

/// A handshake under way, until it is dropped.
#[derive(Debug)]
pub(in crate::link) struct Slot {
    counts: Arc<Mutex<Counts>>,
    key: Key,
}

impl HandshakeGate {
    /// Admits a handshake from `source`, or returns the reason why not. `stranger`: no link has this address.
    pub(in crate::link) fn admit(&self, source: IpAddr, stranger: bool) -> Result<Slot, &'static str> {
        self.admit_at(source, stranger, Instant::now())
    }

    fn admit_at(&self, source: IpAddr, stranger: bool, now: Instant) -> Result<Slot, &'static str> {
        let key = (if stranger { network_of(source) } else { source }, stranger);
        let mut guard = self.0.lock();
        let counts = &mut *guard;
        counts.remove_idle(now);
        let (own, failures) =
            counts.sources.get(&key).map_or_else(Default::default, |own| (own.under_way, own.failures));
        if counts.under_way >= HANDSHAKES_MAX
            || own >= PER_ADDRESS_MAX
            || stranger && counts.strangers >= STRANGERS_MAX
        {
            return Err(TOO_MANY);
        }
        let has_token = failures.has_token(rate(stranger), now)
            && (!stranger || counts.failures_of_strangers.has_token(OF_STRANGERS, now));
        if !has_token {
            return Err(TOO_OFTEN);
        }
        let own = counts.sources.entry(key).or_default();
        own.under_way += 1;
        own.failures.take(rate(stranger), now);
        counts.under_way += 1;
        if stranger {
            counts.strangers += 1;
            counts.failures_of_strangers.take(OF_STRANGERS, now);
        }
        Ok(Slot { counts: self.0.clone(), key })
    }
}

impl Counts {
    /// Removes sources that would be counted in the same way if they were unknown, when there are many.
    fn remove_idle(&mut self, now: Instant) {
        if self.sources.len() >= ADDRESSES.max(2 * self.kept) {
            self.sources.retain(|_, source| source.under_way > 0 || !source.failures.is_full(now));
            self.kept = self.sources.len();
        }
    }
}

impl Slot {
    /// Ends a handshake that succeeded.
    pub(in crate::link) fn succeeded(self) {
        let (_, stranger) = self.key;
        let mut counts = self.counts.lock();
        if let Some(source) = counts.sources.get_mut(&self.key) {
            source.failures.put_back(rate(stranger));
        }
        if stranger {
            counts.failures_of_strangers.put_back(OF_STRANGERS);
        }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let (_, stranger) = self.key;
        let mut counts = self.counts.lock();
        counts.under_way -= 1;
        counts.strangers -= usize::from(stranger);
        if let Some(source) = counts.sources.get_mut(&self.key) {
            source.under_way -= 1;
        }
    }
}

/// Rate of failures of one source.
fn rate(stranger: bool) -> Rate {
    if stranger { OF_STRANGER } else { OF_REMOTE }
}

/// The network that one stranger may own: a /64, or one address of IPv4.
fn network_of(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V4(_) => address,
        IpAddr::V6(v6) => Ipv6Addr::from_bits(v6.to_bits() & !u128::from(u64::MAX)).into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(last: u32) -> IpAddr {
        IpAddr::V4((0x0a00_0000 + last).into())
    }

    #[test]
    fn strangers_leave_room_for_remotes_and_one_address_for_others() {
        let gate = HandshakeGate::default();
        let first: Vec<_> = (0..4).map(|_| gate.admit(address(1), true).unwrap()).collect();
        assert_eq!(gate.admit(address(1), true).err(), Some(TOO_MANY));
        let others: Vec<_> = (0..12).map(|n| gate.admit(address(2 + n), true).unwrap()).collect();
        assert_eq!(gate.admit(address(99), true).err(), Some(TOO_MANY), "half is for remotes");
        // The same address as a remote has a share of its own.
        let remotes: Vec<_> = (0..16).map(|n| gate.admit(address(1 + n / 4), false).unwrap()).collect();
        assert_eq!(gate.admit(address(5), false).err(), Some(TOO_MANY), "32 at a time");
        drop((first, others, remotes));
        assert!(gate.admit(address(1), true).is_ok());
        let counts = gate.0.lock();
        assert_eq!((counts.under_way, counts.strangers), (0, 0));
    }

    #[test]
    fn failures_are_limited_per_address_and_successes_are_not() {
        let (gate, start) = (HandshakeGate::default(), Instant::now());
        let fail = |last, stranger, now| gate.admit_at(address(last), stranger, now).map(drop);
        (0..8).for_each(|_| fail(1, true, start).unwrap());
        assert_eq!(fail(1, true, start), Err(TOO_OFTEN));
        assert_eq!(fail(2, true, start), Ok(()), "another address");
        assert_eq!(fail(1, true, start + Duration::from_millis(1001)), Ok(()), "one a second");
        assert_eq!(fail(1, true, start + Duration::from_millis(1001)), Err(TOO_OFTEN));
        (0..32).for_each(|_| fail(3, false, start).unwrap());
        assert_eq!(fail(3, false, start), Err(TOO_OFTEN));
        assert_eq!(fail(3, false, start + Duration::from_millis(126)), Ok(()));
        // Many peers behind one address.
        (0..1000).for_each(|_| gate.admit_at(address(4), true, start).unwrap().succeeded());
        assert_eq!(gate.0.lock().under_way, 0);
    }

    #[test]
    fn an_ipv6_network_counts_as_one_stranger() {
        let gate = HandshakeGate::default();
        let address = |text: &str| text.parse::<IpAddr>().unwrap();
        let _slots: Vec<_> =
            (1..5).map(|n| gate.admit(address(&format!("2001:db8::{n}")), true).unwrap()).collect();
        assert_eq!(gate.admit(address("2001:db8::ffff:1"), true).err(), Some(TOO_MANY));
        assert!(gate.admit(address("2001:db8:0:1::1"), true).is_ok());
        assert!(gate.admit(address("2001:db8::1"), false).is_ok(), "a link's remote in this network");
    }

    /// 10^5 addresses, as many a second as may be: the table and the rate stay bounded.
    #[test]
    fn many_addresses_share_one_rate_and_a_bounded_table() {
        let (gate, start) = (HandshakeGate::default(), Instant::now());
        let admitted = (0..100_000u32).filter(|n| {
            let now = start + Duration::from_micros(u64::from(*n) * 100);
            gate.admit_at(address(*n), true, now).is_ok()
        });
        // Ten seconds.
        let admitted = admitted.count();
        assert!((220..=225).contains(&admitted), "{admitted}");
        let refused = (0..1000).filter(|_| gate.admit_at(address(7), false, start).is_err()).count();
        assert_eq!(refused, 1000 - 32, "remotes are not affected");
        assert!(gate.0.lock().sources.len() <= ADDRESSES);
    }
}
