//! Translations of a link: which conversations the two hosts have agreed to send translated (wire/translation.rs).
//!
//! ```text
//!   sending host                                          receiving host
//!        --- offer by the link: indices, conversations ---->  its programs know the indices
//!        --- proofs: translated packets of index 0 -------->  (a firewall lets them pass)
//!        <-- acceptance by the link: indices, proved -------
//!        === translated packets ===========================>
//! ```
//!
//! Offers and acceptances are repeated every second. A conversation is translated for [`LEASE_MS`] after its last acceptance, and the
//! receiving host keeps an index for longer than that after its last offer: so whichever vnetd dies, no packet with an unknown index is on
//! its way, and frames of such a conversation take the tunnel again, which needs no agreement. The next vnetd has another epoch. Indices
//! are given in turn, so that one is not given anew while packets with it may still be on their way.
//!
//! An acceptance also says of which indices packets have arrived. A conversation whose packets do not, although proofs do, takes the tunnel
//! from then on: parts of the path may lose it alone.
//!
//! The peer is not trusted: what it offers must be of a network of the link and from a station that it may speak for, and a restored
//! frame still needs a verdict on its flow, as any frame of the link.

use std::collections::BTreeMap;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread::Thread;

use parking_lot::Mutex;

use crate::frame::PortId;
use crate::wire::translation::{Acceptance, Conversation, Offer, Transport};

/// Maximum number of conversations that are offered at a time, and of those from one guest.
pub const OFFERED_MAX: usize = 256;
/// See [`OFFERED_MAX`].
const GUEST_MAX: usize = OFFERED_MAX / 2;
/// Maximum number of the other host's conversations that are known, with those that it does not offer any more.
const KNOWN_MAX: usize = 2 * OFFERED_MAX;
/// Interval between offers, between acceptances and between proofs, in milliseconds.
pub const REPEAT_MS: u64 = 1_000;
/// Time in milliseconds for which an acceptance holds: three of them.
pub const LEASE_MS: u64 = 3_000;
/// Time in milliseconds after an index's last offer within which the receiving host accepts it; also the age up to which it reports packets
/// and proofs as arriving.
pub const ACCEPT_MS: u64 = 2_500;
/// Time in milliseconds after an index's last offer for which the receiving host restores its packets: the last acceptance, its lease, and
/// two seconds for packets on their way.
pub const KNOWN_MS: u64 = ACCEPT_MS + LEASE_MS + 2_000;
/// Time in milliseconds after which a conversation without frames is offered no longer.
pub const UNUSED_MS: u64 = 30_000;
/// Maximum number of seconds in which a leased conversation has frames and the other host sees none; then it is barred. If the path loses
/// proofs, too, the lease ends sooner, and nothing is barred.
const UNSEEN_MAX: u32 = 4;
/// Minimum time in milliseconds from one wake-up of the thread that applies messages to the next.
const WAKE_MS: u64 = 20;

/// A conversation from a guest of this host.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Offered {
    is: Conversation,
    from: PortId,
    /// Its last offer and acceptance.
    told_ms: Option<u64>,
    accepted_ms: Option<u64>,
    /// Number of its frames, and when it grew last.
    frames: u32,
    used_ms: u64,
    /// When it was offered first.
    since_ms: u64,
    /// Number of seconds with frames since the other host has reported one last.
    unseen: u32,
    /// Barred: its packets get lost without a tunnel, so it keeps the tunnel until it is unused.
    is_barred: bool,
}

#[derive(Debug, Default)]
struct Mine {
    epoch: u32,
    /// The next index to be given.
    next: u16,
    list: BTreeMap<u16, Offered>,
    /// When the peer said last that packets of TCP, and of UDP, arrive.
    proved_ms: [Option<u64>; 2],
}

impl Mine {
    /// The end of the lease of `offered`, if it has one.
    fn lease(&self, offered: &Offered, now_ms: u64) -> Option<u64> {
        let at = Transport::ALL.iter().position(|transport| *transport == offered.is.transport)?;
        let until_ms = offered.accepted_ms?.min(self.proved_ms[at]?) + LEASE_MS;
        (until_ms > now_ms && !offered.is_barred).then_some(until_ms)
    }
}

/// A conversation of the other host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Known {
    is: Conversation,
    epoch: u32,
    /// Its last offer.
    told_ms: u64,
}

#[derive(Debug, Default)]
struct Theirs {
    /// That of the last offer.
    epoch: u32,
    list: BTreeMap<u16, Known>,
}

impl Theirs {
    fn is_accepted(&self, known: &Known, now_ms: u64) -> bool {
        known.epoch == self.epoch && now_ms.saturating_sub(known.told_ms) < ACCEPT_MS
    }
}

/// A conversation that may be translated now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Leased {
    /// It.
    pub is: Conversation,
    /// Its index at the receiving host.
    pub index: u16,
    /// The end of the lease.
    pub until_ms: u64,
}

/// Translations of a link, in both directions.
#[derive(Debug, Default)]
pub(crate) struct Translations {
    mine: Mutex<Mine>,
    theirs: Mutex<Theirs>,
    /// The thread that applies messages.
    applier: OnceLock<Thread>,
    /// A message or a new conversation waits for the applier.
    has_news: AtomicBool,
    /// Last wake-up by a message, for the limit of [`WAKE_MS`].
    woken_ms: AtomicU64,
}

impl Translations {
    /// Those of a new run of vnetd.
    pub(in crate::link) fn new() -> Translations {
        let mut random = [0; 6];
        // Without random bytes two runs may have the same epoch: then old indices end with their leases.
        let _ = aws_lc_rs::rand::fill(&mut random);
        let [a, b, c, d, e, f] = random;
        let mine = Mine {
            epoch: u32::from_be_bytes([a, b, c, d]),
            next: u16::from_be_bytes([e, f]),
            ..Mine::default()
        };
        Translations { mine: Mutex::new(mine), ..Translations::default() }
    }

    /// Has the calling thread woken when a message arrives.
    pub(crate) fn apply_here(&self) {
        self.applier.get_or_init(std::thread::current);
    }

    /// Whether a message has arrived, or a conversation was added, since the last call.
    pub(crate) fn has_news(&self) -> bool {
        self.has_news.swap(false, Relaxed)
    }

    /// Wakes the thread that applies what has arrived, unless it was just woken: a peer cannot keep it busy.
    fn wake(&self, now_ms: u64) {
        let woken_ms = self.woken_ms.load(Relaxed);
        if let Some(applier) = self.applier.get()
            && now_ms.saturating_sub(woken_ms) >= WAKE_MS
        {
            self.woken_ms.store(now_ms, Relaxed);
            self.has_news.store(true, Relaxed);
            applier.unpark();
        }
    }

    /// Offers a conversation from the guest at port `from`, as far as there is room.
    pub(crate) fn want(&self, conversation: Conversation, from: PortId, now_ms: u64) {
        let mut mine = self.mine.lock();
        let count = mine.list.values().filter(|offered| offered.from == from).count();
        let is_known = mine.list.values().any(|offered| offered.is == conversation);
        if is_known || count >= GUEST_MAX || mine.list.len() >= OFFERED_MAX {
            return;
        }
        let mut index = mine.next.max(1);
        while mine.list.contains_key(&index) {
            index = index.wrapping_add(1).max(1);
        }
        mine.next = index.wrapping_add(1);
        let offered = Offered {
            is: conversation,
            from,
            told_ms: None,
            accepted_ms: None,
            frames: 0,
            used_ms: now_ms,
            since_ms: now_ms,
            unseen: 0,
            is_barred: false,
        };
        mine.list.insert(index, offered);
        self.has_news.store(true, Relaxed);
    }

    /// The offers to send now, each of at most `len_max` bytes.
    pub(in crate::link) fn offers(&self, len_max: usize, now_ms: u64) -> Vec<Vec<u8>> {
        let mut mine = self.mine.lock();
        let epoch = mine.epoch;
        let is_due = |offered: &Offered| {
            let is_early = |told_ms: u64| now_ms.saturating_sub(told_ms) < REPEAT_MS;
            !offered.is_barred && !offered.told_ms.is_some_and(is_early)
        };
        let due: Vec<_> = mine
            .list
            .iter_mut()
            .filter(|(_, offered)| is_due(offered))
            .map(|(index, offered)| {
                offered.told_ms = Some(now_ms);
                (*index, offered.is)
            })
            .collect();
        let offer = |some: &[_]| Offer { epoch, conversations: some.to_vec() }.to_bytes();
        due.chunks(Offer::room(len_max).max(1)).map(offer).collect()
    }

    /// Whether anything is offered, so that proofs are needed.
    pub(crate) fn is_offering(&self) -> bool {
        self.mine.lock().list.values().any(|offered| !offered.is_barred)
    }

    /// Takes an acceptance, which lists all indices that are accepted; false if `payload` is none. The dispatcher does not wait for other
    /// threads: acceptances are repeated.
    pub(in crate::link) fn accepted(&self, payload: &[u8], now_ms: u64) -> bool {
        let Some(acceptance) = Acceptance::parse(payload) else { return false };
        let Some(mut mine) = self.mine.try_lock() else { return true };
        if acceptance.epoch != mine.epoch {
            return true;
        }
        for (proved_ms, proved) in mine.proved_ms.iter_mut().zip(acceptance.proved) {
            *proved_ms = proved.then_some(now_ms);
        }
        let accepted: BTreeMap<_, _> = acceptance.indices.into_iter().collect();
        for (index, offered) in &mut mine.list {
            let is_seen = accepted.get(index);
            offered.accepted_ms = is_seen.and(offered.told_ms).map(|_| now_ms);
            if is_seen == Some(&true) {
                offered.unseen = 0;
            }
        }
        drop(mine);
        self.wake(now_ms);
        true
    }

    /// Whether conversations of TCP, and of UDP, have waited for a proof for longer than a lease.
    pub(crate) fn unproved(&self, now_ms: u64) -> [bool; 2] {
        let mine = self.mine.lock();
        let is_old = |at_ms: u64| now_ms.saturating_sub(at_ms) >= LEASE_MS;
        let waits = |at: usize| {
            let waits =
                |offered: &Offered| offered.is.transport == Transport::ALL[at] && is_old(offered.since_ms);
            mine.proved_ms[at].is_none_or(is_old) && mine.list.values().any(waits)
        };
        [waits(0), waits(1)]
    }

    /// The conversations that may be translated now.
    pub(crate) fn leased(&self, now_ms: u64) -> Vec<Leased> {
        let mine = self.mine.lock();
        let leased = |(index, offered): (&u16, &Offered)| {
            Some(Leased { is: offered.is, index: *index, until_ms: mine.lease(offered, now_ms)? })
        };
        mine.list.iter().filter_map(leased).collect()
    }

    /// What is offered, or barred.
    pub(crate) fn wanted(&self) -> Vec<Conversation> {
        self.mine.lock().list.values().map(|offered| offered.is).collect()
    }

    /// Notes how many frames conversations have had; call it every [`REPEAT_MS`]. Withdraws those that have had none for a while, and bars
    /// those whose packets the other host does not see. Returns the number of the latter.
    pub(crate) fn used(&self, frames: &BTreeMap<Conversation, u32>, now_ms: u64) -> usize {
        let mut mine = self.mine.lock();
        let mut list = std::mem::take(&mut mine.list);
        let mut barred = 0;
        list.retain(|_, offered| {
            let is_leased = mine.lease(offered, now_ms).is_some();
            if !is_leased {
                offered.unseen = 0;
            }
            if let Some(now) = frames.get(&offered.is).filter(|now| **now != offered.frames) {
                (offered.frames, offered.used_ms) = (*now, now_ms);
                offered.unseen += u32::from(is_leased);
            }
            if !offered.is_barred && offered.unseen > UNSEEN_MAX {
                offered.is_barred = true;
                barred += 1;
            }
            now_ms.saturating_sub(offered.used_ms) < UNUSED_MS
        });
        mine.list = list;
        barred
    }

    /// Withdraws a conversation, because its destination has moved.
    pub(crate) fn withdraw(&self, conversation: &Conversation) {
        self.mine.lock().list.retain(|_, offered| offered.is != *conversation);
    }

    /// Withdraws everything.
    pub(crate) fn withdraw_all(&self) {
        self.mine.lock().list.clear();
    }

    /// Takes an offer; `None` if `payload` is none. Returns the number of conversations that were refused: malformed ones, those that `may`
    /// refuses, and those beyond [`OFFERED_MAX`]. The dispatcher does not wait for other threads: offers are repeated.
    pub(in crate::link) fn offered(
        &self,
        payload: &[u8],
        may: impl Fn(&Conversation) -> bool,
        now_ms: u64,
    ) -> Option<u64> {
        let (offer, mut refused) = Offer::parse(payload)?;
        let Some(mut theirs) = self.theirs.try_lock() else { return Some(refused) };
        // Packets of the epoch before may still be on their way.
        theirs.epoch = offer.epoch;
        let mut accepted = theirs.list.values().filter(|known| theirs.is_accepted(known, now_ms)).count();
        for (index, is) in offer.conversations {
            let is_new = theirs.list.get(&index).is_none_or(|known| !theirs.is_accepted(known, now_ms));
            let is_full = is_new && accepted >= OFFERED_MAX
                || !theirs.list.contains_key(&index) && theirs.list.len() >= KNOWN_MAX;
            if is_full || !may(&is) {
                refused += 1;
                continue;
            }
            accepted += usize::from(is_new);
            theirs.list.insert(index, Known { is, epoch: offer.epoch, told_ms: now_ms });
        }
        drop(theirs);
        self.wake(now_ms);
        Some(refused)
    }

    /// What the other host has offered lately.
    pub(crate) fn known(&self, now_ms: u64) -> Vec<(u16, Conversation)> {
        let mut theirs = self.theirs.lock();
        theirs.list.retain(|_, known| now_ms.saturating_sub(known.told_ms) < KNOWN_MS);
        theirs.list.iter().map(|(index, known)| (*index, known.is)).collect()
    }

    /// The acceptance of those known indices that programs know, of at most `len_max` bytes; `None` if the other host offers nothing.
    /// `seen`: whether packets with an index have arrived lately, `None` if programs do not know it.
    pub(in crate::link) fn acceptance(
        &self,
        seen: impl Fn(u16, &Conversation) -> Option<bool>,
        proved: [bool; 2],
        len_max: usize,
        now_ms: u64,
    ) -> Option<Vec<u8>> {
        let theirs = self.theirs.lock();
        let mut offered =
            theirs.list.iter().filter(|(_, known)| theirs.is_accepted(known, now_ms)).peekable();
        offered.peek()?;
        let accepted = |(index, known): (&u16, &Known)| Some((*index, seen(*index, &known.is)?));
        let indices = offered.filter_map(accepted).take(Acceptance::room(len_max)).collect();
        Some(Acceptance { epoch: theirs.epoch, proved, indices }.to_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::translation::tests::conversation;

    const GUEST: PortId = PortId(3);
    const SEEN: fn(u16, &Conversation) -> Option<bool> = |_, _| Some(true);

    /// The acceptance that `two` sends at `now_ms`.
    fn acceptance(two: &Translations, now_ms: u64) -> Vec<u8> {
        two.acceptance(SEEN, [true, true], 1400, now_ms).unwrap()
    }

    /// A round at `now_ms`: offers and an acceptance of everything. Returns the indices that `one` may use.
    fn round(one: &Translations, two: &Translations, now_ms: u64) -> Vec<u16> {
        for offer in one.offers(1400, now_ms) {
            assert_eq!(two.offered(&offer, |_| true, now_ms), Some(0));
        }
        assert!(one.accepted(&acceptance(two, now_ms), now_ms));
        one.leased(now_ms).into_iter().map(|leased| leased.index).collect()
    }

    fn frames(of: &[(Conversation, u32)]) -> BTreeMap<Conversation, u32> {
        of.iter().copied().collect()
    }

    #[test]
    fn what_is_accepted_and_proved_is_translated_until_the_lease_ends() {
        let (one, two) = (Translations::new(), Translations::new());
        one.want(conversation(1), GUEST, 0);
        one.want(conversation(1), GUEST, 0);
        assert_eq!(one.leased(0), []);
        let index = round(&one, &two, 0);
        assert_eq!((index.len(), two.known(0)), (1, vec![(index[0], conversation(1))]));
        assert_eq!(one.offers(1400, REPEAT_MS - 1).len(), 0);
        // The other host hears nothing any more.
        assert_eq!(one.offers(1400, REPEAT_MS).len(), 1);
        assert_eq!((one.leased(LEASE_MS - 1).len(), one.leased(LEASE_MS).len()), (1, 0));
        // It accepts the index no longer, but knows it for longer than the last acceptance holds.
        assert_eq!(two.acceptance(SEEN, [true, true], 1400, ACCEPT_MS), None);
        assert_eq!((two.known(KNOWN_MS - 1).len(), two.known(KNOWN_MS).len()), (1, 0));
        const { assert!(KNOWN_MS > ACCEPT_MS + LEASE_MS) };
    }

    #[test]
    fn packets_that_do_not_arrive_are_not_sent() {
        let (one, two) = (Translations::new(), Translations::new());
        one.want(conversation(1), GUEST, 0);
        for offer in one.offers(1400, 0) {
            two.offered(&offer, |_| true, 0);
        }
        let say = |known: Option<bool>, proved| {
            one.accepted(&two.acceptance(|_, _| known, proved, 1400, 0).unwrap(), 0);
            one.leased(0).len()
        };
        assert_eq!((say(Some(true), [false, false]), say(Some(true), [false, true])), (0, 0), "no TCP");
        assert_eq!((one.unproved(LEASE_MS - 1), one.unproved(LEASE_MS)), ([false; 2], [true, false]));
        assert_eq!((say(Some(false), [true, false]), one.unproved(LEASE_MS - 1)), (1, [false; 2]));
        assert_eq!(say(None, [true, true]), 0, "no program knows it");
        assert_eq!(say(Some(false), [true, true]), 1);
        assert_eq!(say(Some(false), [false, true]), 0, "a firewall has come");
    }

    #[test]
    fn a_conversation_that_the_other_host_does_not_see_is_barred() {
        let (one, two) = (Translations::new(), Translations::new());
        for port in [1, 2] {
            one.want(conversation(port), GUEST, 0);
        }
        for count in 1..=UNSEEN_MAX + 2 {
            let now_ms = u64::from(count) * REPEAT_MS;
            for offer in one.offers(1400, now_ms) {
                two.offered(&offer, |_| true, now_ms);
            }
            let seen = |_: u16, is: &Conversation| Some(is.source.port() == 2);
            one.accepted(&two.acceptance(seen, [true, true], 1400, now_ms).unwrap(), now_ms);
            let both = frames(&[(conversation(1), count), (conversation(2), count)]);
            let barred = one.used(&both, now_ms);
            assert_eq!(barred, usize::from(count == UNSEEN_MAX + 1));
            assert_eq!(one.leased(now_ms).len(), 2 - usize::from(count > UNSEEN_MAX), "{now_ms}");
        }
        let now_ms = u64::from(UNSEEN_MAX + 3) * REPEAT_MS;
        assert_eq!(Offer::parse(&one.offers(1400, now_ms)[0]).unwrap().0.conversations.len(), 1);
        one.want(conversation(1), GUEST, now_ms);
        assert_eq!(one.wanted().len(), 2, "it is known");
    }

    #[test]
    fn another_run_has_other_indices() {
        let (one, two, next) = (Translations::new(), Translations::new(), Translations::new());
        one.want(conversation(1), GUEST, 0);
        next.want(conversation(2), GUEST, 0);
        assert_eq!(round(&one, &two, 0).len(), 1);
        assert!(next.accepted(&acceptance(&two, 0), 0));
        assert_eq!(next.leased(0), [], "of another epoch");
        assert_eq!(round(&next, &two, 1).len(), 1);
        assert_eq!(two.known(1).len(), 2, "packets of the first run may be on their way");
        assert!(one.accepted(&acceptance(&two, 1), 1));
        assert_eq!(Acceptance::parse(&acceptance(&two, 1)).unwrap().indices.len(), 1);
    }

    #[test]
    fn what_is_unused_is_withdrawn_and_its_index_is_not_given_again_soon() {
        let one = Translations::new();
        one.want(conversation(1), GUEST, 0);
        one.want(conversation(2), GUEST, 0);
        let first = one.mine.lock().list.keys().copied().next().unwrap();
        one.used(&frames(&[(conversation(2), 1)]), UNUSED_MS - 1);
        one.used(&frames(&[(conversation(2), 2)]), UNUSED_MS);
        assert_eq!(one.wanted(), [conversation(2)]);
        one.want(conversation(3), GUEST, 0);
        assert!(!one.mine.lock().list.contains_key(&first));
        one.withdraw(&conversation(3));
        assert_eq!(one.wanted(), [conversation(2)]);
        one.withdraw_all();
        assert!(!one.is_offering());
    }

    #[test]
    fn neither_guest_nor_peer_takes_more_than_its_share() {
        let (one, two) = (Translations::new(), Translations::new());
        for port in 0..1000 {
            one.want(conversation(port), GUEST, 0);
        }
        assert_eq!(one.mine.lock().list.len(), GUEST_MAX);
        for port in 1000..2000 {
            one.want(conversation(port), PortId(port), 0);
        }
        assert_eq!(one.mine.lock().list.len(), OFFERED_MAX);
        assert!(one.mine.lock().list.keys().all(|index| *index != 0));
        let refuses = |conversation: &Conversation| conversation.source.port() != 0;
        let offers = one.offers(1400, 0);
        assert!(offers.iter().all(|offer| offer.len() <= 1400));
        let refused: u64 = offers.iter().filter_map(|offer| two.offered(offer, refuses, 0)).sum();
        assert_eq!((refused, two.known(0).len()), (1, OFFERED_MAX - 1));
        // A peer that offers without end, in the same epoch and in others.
        for epoch in 0..9 {
            let conversations: Vec<_> =
                (1..=OFFERED_MAX as u16 + 9).map(|at| (at + 1000 * epoch, conversation(at))).collect();
            let offer = Offer { epoch: epoch.into(), conversations }.to_bytes();
            assert!(two.offered(&offer, |_| true, 0) >= Some(9));
            assert!(two.known(0).len() <= KNOWN_MAX);
        }
    }

    #[test]
    fn a_message_wakes_who_applies_it_but_not_all_the_time() {
        let two = Translations::new();
        two.apply_here();
        let offer = Offer { epoch: 1, conversations: vec![(1, conversation(1))] }.to_bytes();
        for (now_ms, wakes) in [(100, true), (100 + WAKE_MS - 1, false), (100 + WAKE_MS, true)] {
            two.offered(&offer, |_| true, now_ms);
            assert_eq!(two.has_news(), wakes, "{now_ms}");
        }
    }
}
