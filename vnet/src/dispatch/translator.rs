//! Translations, joined to dispatchers: which conversations of guests leave without a tunnel, and which of other hosts arrive so.
//!
//! The renewer calls [`Translator::tick`] in each of its rounds, every [`POLL`], and when a message has arrived. It pops conversations with
//! many frames from the programs' queue, offers them to the other hosts (`link/native/translations.rs`), installs a lease for each accepted
//! one, and accepts other hosts' offers once their indices are installed. When a lease expires, frames take the tunnel again.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use super::wire_path::WirePath;
use crate::kernel::{Index, Kernel, Seen, TranslationMaps, Wanted};
use crate::link::Link;
use crate::link::translations::{ACCEPT_MS, KNOWN_MS, LEASE_MS, REPEAT_MS, Translations};
use crate::stats::DiscardReason;
use crate::wire::translation::{Conversation, Transport};

const NS_PER_MS: u64 = 1_000_000;
/// Maximum number of conversations that are taken from the programs at a time: guests that make many of them take little of the renewer.
const WANTED_MAX: usize = 32;
/// Time in milliseconds from a link's first round to its first offer: leases of an earlier vnetd, or of the link before it, have ended, and
/// packets with their indices have arrived.
const SETTLED_MS: u64 = LEASE_MS + 1_000;
/// Time between two looks for conversations with many frames.
const POLL: Duration = Duration::from_millis(50);

/// Time of a round: milliseconds of the dispatchers' clock, nanoseconds of CLOCK_MONOTONIC.
type Now = (u64, u64);

/// Another host.
struct Host {
    remote: Ipv4Addr,
    link: Arc<Link>,
    /// Earliest time of the first offer.
    settled_ms: u64,
    /// Its indices that programs restore; the time is since when an index is no longer offered.
    installed: BTreeMap<u16, (Conversation, Option<u64>)>,
    /// Leases for conversations to this host: the end of each in milliseconds.
    leased: HashMap<Conversation, u64>,
    /// Last check of its proofs, after which an acceptance is sent if it offers anything; and whether those of TCP and UDP had arrived.
    looked_ms: Option<u64>,
    proved: [bool; 2],
    /// Last count of frames, and last proofs sent.
    counted_ms: Option<u64>,
    proofs_ms: Option<u64>,
    /// Last time that its offers could be accepted; `None`: programs restore none of its packets.
    expected_ms: Option<u64>,
    /// Lost packets of TCP and UDP that are in the link's counters already.
    lost: [u64; 2],
}

/// The translations of a host.
#[derive(Default)]
pub(super) struct Translator {
    hosts: HashMap<Ipv4Addr, Host>,
    /// When the first round was.
    began_ms: Option<u64>,
    /// Indices that an earlier vnetd has accepted, until the other hosts' leases have ended.
    adopted: Vec<Index>,
    /// The kernel refuses to pop from the queue; logged once.
    is_refused: bool,
}

impl Translator {
    /// A round for all links that take the wire, or for those where a message has arrived or whose guests have new conversations. Returns
    /// how long the next round may wait at most.
    pub(super) fn tick(&mut self, wire: &WirePath, kernel: &Kernel, now: Now, all: bool) -> Duration {
        let maps = kernel.translations();
        let began_ms = *self.began_ms.get_or_insert_with(|| {
            self.adopted = maps.indices();
            now.0
        });
        let links = wire.links();
        self.take_wanted(wire, maps, &links, now.0);
        if all {
            self.forget_removed(maps, &links);
        }
        let mut wait = Duration::MAX;
        for (remote, link) in links {
            let Some(translations) = link.translations() else { continue };
            if link.peer_translates() {
                wait = POLL;
            }
            if !translations.has_news() && !all {
                continue;
            }
            translations.apply_here();
            let host =
                self.hosts.entry(remote).or_insert_with(|| Host::new(remote, link.clone(), maps, now.0));
            if !Arc::ptr_eq(&host.link, &link) {
                host.replace_link(link.clone(), maps, now.0);
            }
            if wire.translates(&link, now.0).is_ok() && now.0 >= host.settled_ms {
                host.send(translations, (wire, maps), now);
            } else {
                translations.withdraw_all();
                host.end_leases(maps);
            }
            if wire.takes_translated(&link).is_ok() && link.peer_translates() {
                host.receive(translations, (wire, maps), now);
            } else {
                host.refuse(maps, now.0);
            }
        }
        if !self.adopted.is_empty() && now.0 >= began_ms + KNOWN_MS {
            self.forget_adopted(maps);
        }
        wait
    }

    /// Has links offer the conversations with many frames.
    fn take_wanted(
        &mut self,
        wire: &WirePath,
        maps: &TranslationMaps,
        links: &[(Ipv4Addr, Arc<Link>)],
        now_ms: u64,
    ) {
        for _ in 0..WANTED_MAX {
            let Some(Wanted { is, remote, from }) = self.next_wanted(maps) else { return };
            for host in self.hosts.values_mut().filter(|host| host.remote != remote) {
                // The destination was there before.
                if host.end(&is, maps)
                    && let Some(translations) = host.link.translations()
                {
                    translations.withdraw(&is);
                }
            }
            let link = links.iter().find(|(there, _)| *there == remote).map(|(_, link)| link);
            if let Some(link) = link.filter(|link| wire.translates(link, now_ms).is_ok())
                && let Some(translations) = link.translations()
            {
                translations.want(is, from, now_ms);
            }
        }
    }

    fn next_wanted(&mut self, maps: &TranslationMaps) -> Option<Wanted> {
        maps.next_wanted().unwrap_or_else(|error| {
            if !std::mem::replace(&mut self.is_refused, true) {
                tracing::warn!("all packets to other hosts take a tunnel: {error}");
            }
            None
        })
    }

    /// Ends everything of hosts to which no link leads any more.
    fn forget_removed(&mut self, maps: &TranslationMaps, links: &[(Ipv4Addr, Arc<Link>)]) {
        self.hosts.retain(|remote, host| {
            let stays = links.iter().any(|(there, _)| there == remote);
            if !stays {
                host.end_leases(maps);
                host.forget(maps);
            }
            stays
        });
    }

    fn forget_adopted(&mut self, maps: &TranslationMaps) {
        for index in std::mem::take(&mut self.adopted) {
            let knows = |host: &Host| match host.installed.get(&index.index) {
                _ if index.index == 0 => host.expected_ms.is_some(),
                Some((is, _)) => is.transport == index.transport,
                None => false,
            };
            if !self.hosts.get(&index.remote).is_some_and(knows) {
                maps.remove(index);
            }
        }
    }
}

impl Host {
    fn new(remote: Ipv4Addr, link: Arc<Link>, maps: &TranslationMaps, now_ms: u64) -> Host {
        // What an earlier vnetd has counted.
        let lost = |transport| maps.seen(Index { remote, index: 0, transport }).map_or(0, |seen| seen.lost);
        Host {
            remote,
            link,
            settled_ms: now_ms + SETTLED_MS,
            installed: BTreeMap::new(),
            leased: HashMap::new(),
            looked_ms: None,
            proved: [false; 2],
            counted_ms: None,
            proofs_ms: None,
            expected_ms: None,
            lost: Transport::ALL.map(lost),
        }
    }

    /// Another link leads to the host now, with other indices. The other host may use those that the old one has accepted for a while.
    fn replace_link(&mut self, link: Arc<Link>, maps: &TranslationMaps, now_ms: u64) {
        self.end_leases(maps);
        (self.link, self.settled_ms) = (link, now_ms + SETTLED_MS);
        (self.looked_ms, self.counted_ms, self.proofs_ms) = (None, None, None);
    }

    /// Offers conversations, proves that translated packets arrive, and has programs translate what is accepted.
    fn send(
        &mut self,
        translations: &Translations,
        (wire, maps): (&WirePath, &TranslationMaps),
        (now_ms, now_ns): Now,
    ) {
        if !is_early(self.counted_ms, now_ms) {
            self.counted_ms = Some(now_ms);
            self.note_use(translations, maps, now_ms);
        }
        if translations.is_offering() && !is_early(self.proofs_ms, now_ms) {
            self.proofs_ms = Some(now_ms);
            // Before the offers, so that their first acceptance says that proofs arrive.
            wire.prove(&self.link);
        }
        wire.courier().offer_translations(&self.link, now_ms);
        let leased = translations.leased(now_ms);
        let lasting: HashSet<_> = leased.iter().map(|lease| lease.is).collect();
        let ended: Vec<_> = self.leased.keys().filter(|is| !lasting.contains(is)).copied().collect();
        ended.iter().for_each(|is| _ = self.end(is, maps));
        for lease in leased {
            let until_ns = now_ns + (lease.until_ms - now_ms) * NS_PER_MS;
            let is_new = self.leased.insert(lease.is, lease.until_ms) != Some(lease.until_ms);
            if is_new && !maps.lease(&lease.is, lease.index, self.remote, until_ns) {
                self.leased.remove(&lease.is);
            }
        }
    }

    /// Notes how many frames conversations have had.
    fn note_use(&self, translations: &Translations, maps: &TranslationMaps, now_ms: u64) {
        let frames = |is: Conversation| Some((is, maps.frames(&is, self.remote)?));
        let frames = translations.wanted().into_iter().filter_map(frames).collect();
        let barred = translations.used(&frames, now_ms);
        if barred > 0 {
            let link = self.link.name();
            tracing::info!(link, "packets of {barred} connections do not arrive without a tunnel");
        }
    }

    /// Ends the lease of a conversation; false if it has none.
    fn end(&mut self, is: &Conversation, maps: &TranslationMaps) -> bool {
        let had_one = self.leased.remove(is).is_some();
        if had_one {
            maps.end(is, self.remote);
        }
        had_one
    }

    fn end_leases(&mut self, maps: &TranslationMaps) {
        let leased = std::mem::take(&mut self.leased);
        leased.keys().for_each(|is| maps.end(is, self.remote));
    }

    /// Tells the programs what the other host's indices stand for, and the other host which of them they know.
    fn receive(
        &mut self,
        translations: &Translations,
        (wire, maps): (&WirePath, &TranslationMaps),
        (now_ms, now_ns): Now,
    ) {
        self.expected_ms = Some(now_ms);
        let has_changed = self.install(translations.known(now_ms), maps, now_ms);
        if self.installed.is_empty() && is_early(self.looked_ms, now_ms) {
            return;
        }
        let is_recent = |seen_ns: u64| seen_ns != 0 && now_ns.saturating_sub(seen_ns) < ACCEPT_MS * NS_PER_MS;
        let mut proved = [false; 2];
        for (at, transport) in Transport::ALL.into_iter().enumerate() {
            let Some(seen) = maps.expect_proof(self.remote, transport) else { continue };
            proved[at] = is_recent(seen.seen_ns);
            self.count_lost(at, seen);
        }
        if has_changed || proved != self.proved || !is_early(self.looked_ms, now_ms) {
            (self.looked_ms, self.proved) = (Some(now_ms), proved);
            let seen = |index: u16, is: &Conversation| {
                let is_known = self.installed.get(&index).is_some_and(|(known, _)| known == is);
                let at = Index { remote: self.remote, index, transport: is.transport };
                maps.seen(at).filter(|_| is_known).map(|seen| is_recent(seen.seen_ns))
            };
            wire.courier().accept_translations(&self.link, seen, proved, now_ms);
        }
    }

    /// Adds new lost packets to the link's counters.
    fn count_lost(&mut self, transport: usize, seen: Seen) {
        let before = std::mem::replace(&mut self.lost[transport], seen.lost);
        self.link.stats().discard(DiscardReason::UnknownIndex, seen.lost.saturating_sub(before));
    }

    /// Tells the programs of `known` indices, and forgets others after a while. Returns whether there are new ones.
    fn install(&mut self, known: Vec<(u16, Conversation)>, maps: &TranslationMaps, now_ms: u64) -> bool {
        let known: BTreeMap<_, _> = known.into_iter().collect();
        let remote = self.remote;
        let at = |index: u16, is: &Conversation| Index { remote, index, transport: is.transport };
        self.installed.retain(|index, (is, gone_ms)| {
            let stays = match known.get(index) {
                Some(now) => now == is,
                // Not offered for long, or by a link that has been replaced.
                None => now_ms.saturating_sub(*gone_ms.get_or_insert(now_ms)) < KNOWN_MS,
            };
            if !stays {
                maps.remove(at(*index, is));
            }
            stays
        });
        let mut has_changed = false;
        for (index, is) in known {
            if let Some((_, gone_ms)) = self.installed.get_mut(&index) {
                *gone_ms = None;
            } else if maps.insert(at(index, &is), &is) {
                self.installed.insert(index, (is, None));
                has_changed = true;
            }
        }
        has_changed
    }

    /// Accepts no offers. Keeps the installed indices until the other host's leases have expired.
    fn refuse(&mut self, maps: &TranslationMaps, now_ms: u64) {
        if self.expected_ms.is_some_and(|expected_ms| now_ms.saturating_sub(expected_ms) >= KNOWN_MS) {
            self.forget(maps);
        }
    }

    /// Removes all its indices: its packets to port 9790 go to this host's network stack.
    fn forget(&mut self, maps: &TranslationMaps) {
        for (index, (is, _)) in std::mem::take(&mut self.installed) {
            maps.remove(Index { remote: self.remote, index, transport: is.transport });
        }
        for (at, transport) in Transport::ALL.into_iter().enumerate() {
            let index = Index { remote: self.remote, index: 0, transport };
            if let Some(seen) = maps.seen(index) {
                self.count_lost(at, seen);
            }
            maps.remove(index);
            // It counts anew when proofs are expected again.
            self.lost[at] = 0;
        }
        (self.expected_ms, self.looked_ms) = (None, None);
    }
}

fn is_early(last_ms: Option<u64>, now_ms: u64) -> bool {
    last_ms.is_some_and(|last_ms| now_ms.saturating_sub(last_ms) < REPEAT_MS)
}
