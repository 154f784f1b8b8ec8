//! Path MTU discovery by probes (RFC 8899, DPLPMTUD): which size of packet really arrives, without trust in ICMP.
//!
//! ```text
//!            confirmed, and nothing larger left to try
//!   +---------+ ---------------------------------------> +----------+
//!   | confirm | <---- confirm again / time to raise ---- |  rest    |
//!   +---------+                                          +----------+
//!     |     |  confirmed, larger sizes left   +--------+      ^
//!     |     +-------------------------------> | search | -----+
//!     |  black hole: go on with BASE          +--------+
//!     +--> confirm                   the kernel's size first, then by halves
//! ```
//!
//! What the kernel says (device, route, ICMP that it believed) is where it begins, used at once and never exceeded. That size
//! is confirmed while frames flow. When [`TRIES`] probes of it in a row find no answer although small ones do, the path is a
//! *black hole* for it: the link goes on with [`BASE`], and looks for the largest size that does arrive. A peer that answers
//! not even small ones is not judged: that nothing arrives is not a matter of size.
//!
//! No I/O and no clock: [`Discovery::poll`] says which size to probe now, [`Discovery::answer`] takes what came back.

/// Size in bytes of packets that nearly every path carries (the least that IPv6 allows, RFC 8200 section 5).
pub(in crate::link) const BASE: u16 = 1280;
/// Probes of one size that have to be lost in a row (MAX_PROBES; RFC 8899 has 3, but here frames are lost meanwhile only if
/// it is no chance: at a loss of one in ten each way, four are lost together once in 800 times).
const TRIES: u8 = 4;
/// Least wait for an answer, in ms, and most (PROBE_TIMER).
const ANSWER_MIN_MS: u64 = 250;
const ANSWER_MAX_MS: u64 = 2000;
/// How often the present size is confirmed while frames flow, and while none do, in ms (CONFIRMATION_TIMER).
const CONFIRM_MS: u64 = 500;
const CONFIRM_IDLE_MS: u64 = 30_000;
/// How long a size smaller than the kernel's is kept before larger ones are tried again, in ms (PMTU_RAISE_TIMER; RFC 8899 has
/// 600 s, for transports whose probes carry data).
const RAISE_MS: u64 = 60_000;
/// Sizes closer together than this are not told apart.
const GRAIN: u16 = 8;

/// What a [`Discovery`] has to know of the moment.
#[derive(Clone, Copy, Debug)]
pub(in crate::link) struct Moment {
    /// Any clock in milliseconds that does not run backwards.
    pub now_ms: u64,
    /// Frames were sent lately.
    pub active: bool,
    /// A small probe was answered lately.
    pub alive: bool,
    /// Round trip of small probes in ms; 0 while it is not known.
    pub rtt_ms: u64,
}

/// The search for one path's MTU. Sizes are those of IP packets in bytes.
#[derive(Debug)]
pub(in crate::link) struct Discovery {
    /// Smallest packet worth thinking of.
    least: u16,
    /// What the kernel says.
    top: u16,
    mtu: u16,
    /// The smallest size that is known not to arrive; one more than `top` when there is none.
    above: u32,
    /// The probe under way: its size, and when it was sent.
    sent: Option<(u16, u64)>,
    /// How many were lost in a row: of the present size, and of the larger one that is tried.
    lost: [u8; 2],
    /// When `mtu` was confirmed last; `None` when it has to be.
    confirmed_ms: Option<u64>,
    /// When `above` was found.
    found_ms: u64,
}

impl Discovery {
    /// Begins with what the kernel says; `least` is used whatever probes say.
    pub(in crate::link) fn new(top: u16, least: u16) -> Discovery {
        let top = top.max(least);
        let above = u32::from(top) + 1;
        Discovery { least, top, mtu: top, above, sent: None, lost: [0; 2], confirmed_ms: None, found_ms: 0 }
    }

    /// The size to use.
    pub(in crate::link) fn mtu(&self) -> u16 {
        self.mtu
    }

    /// The kernel says something else: the path, or what is known of it, is another one.
    pub(in crate::link) fn set_top(&mut self, top: u16) {
        let top = top.max(self.least);
        if top != self.top {
            let mtu = if self.mtu == self.top { top } else { self.mtu.min(top) };
            // A size that did not arrive still does not.
            let none = u32::from(top) + 1;
            let above = if self.above > u32::from(self.top) { none } else { self.above.min(none) };
            *self = Discovery { mtu, above, found_ms: self.found_ms, ..Discovery::new(top, self.least) };
        }
    }

    /// The peer is elsewhere: nothing is known of the path.
    pub(in crate::link) fn restart(&mut self) {
        *self = Discovery::new(self.top, self.least);
    }

    /// The size to probe now, if it is time for a probe.
    pub(in crate::link) fn poll(&mut self, at: Moment) -> Option<u16> {
        if !at.alive {
            // When nothing comes through, sizes tell nothing.
            (self.sent, self.lost) = (None, [0; 2]);
            return None;
        }
        if let Some((size, sent_ms)) = self.sent {
            let wait = (2 * at.rtt_ms).clamp(ANSWER_MIN_MS, ANSWER_MAX_MS);
            if at.now_ms.saturating_sub(sent_ms) < wait {
                return None;
            }
            self.sent = None;
            let lost = &mut self.lost[usize::from(size > self.mtu)];
            *lost += 1;
            if *lost == TRIES {
                self.lost = [0; 2];
                self.fail(size, at.now_ms);
            }
        }
        let size = self.next(at)?;
        self.sent = Some((size, at.now_ms));
        Some(size)
    }

    /// What to find out next. That the present size still works comes first: a search takes its time.
    fn next(&mut self, at: Moment) -> Option<u16> {
        let Some(confirmed_ms) = self.confirmed_ms else { return Some(self.mtu) };
        if self.above <= u32::from(self.top) && at.now_ms.saturating_sub(self.found_ms) >= RAISE_MS {
            self.above = u32::from(self.top) + 1;
        }
        let every = if at.active { CONFIRM_MS } else { CONFIRM_IDLE_MS };
        if at.now_ms.saturating_sub(confirmed_ms) >= every {
            return Some(self.mtu);
        }
        if self.mtu < self.top && self.above > u32::from(self.top) {
            return Some(self.top);
        }
        let gap = self.above - u32::from(self.mtu);
        (gap > u32::from(GRAIN)).then(|| self.mtu + (gap / 2) as u16)
    }

    /// No packet of `size` arrives.
    fn fail(&mut self, size: u16, now_ms: u64) {
        self.found_ms = now_ms;
        if size > self.mtu {
            self.above = u32::from(size);
        } else if self.mtu > self.least {
            // What is above is not taken for known: the search begins with the kernel's size, should it all have been chance.
            self.above = u32::from(self.top) + 1;
            self.mtu = if self.mtu > BASE { BASE } else { self.least }.max(self.least);
            self.confirmed_ms = None;
        } else {
            // Nothing smaller is left: what small probes prove has to do.
            self.confirmed_ms = Some(now_ms);
        }
    }

    /// A probe of `size` was answered; `now_ms` is the clock of [`Discovery::poll`].
    pub(in crate::link) fn answer(&mut self, size: u16, now_ms: u64) {
        // Late ones may be from before the path changed.
        if self.sent.is_some_and(|(sent, _)| sent == size) {
            self.sent = None;
            self.lost[0] = 0;
            if size >= self.mtu {
                if size > self.mtu {
                    self.lost[1] = 0;
                }
                self.mtu = size;
                self.confirmed_ms = Some(now_ms);
            }
        }
    }
}

#[cfg(test)]
#[path = "pmtu_tests.rs"]
mod tests;
