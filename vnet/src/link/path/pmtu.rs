//! Path MTU discovery by probes (RFC 8899, DPLPMTUD): finds the packet size that really arrives, without trusting ICMP.
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
//! The kernel's value (device and route; on links in clear text also ICMP that it believed) is the starting point, used at once
//! and never exceeded. It is confirmed while frames flow. When [`TRIES`] probes of it in a row are lost although small ones arrive, the path is a *black
//! hole* for that size: the link falls back to [`BASE`] and searches for the largest size that arrives. While a peer does not
//! answer small probes either, no size is judged, because its silence says nothing about sizes.
//!
//! No I/O and no clock: [`Discovery::poll`] returns the size to probe now, [`Discovery::answer`] takes replies.

/// Packet size in bytes that nearly every path carries (the IPv6 minimum MTU, RFC 8200 section 5).
pub(in crate::link) const BASE: u16 = 1280;
/// Number of probes of one size that must be lost in a row (MAX_PROBES). RFC 8899 has 3, but a false black hole costs frames
/// here: at a loss of one in ten in each direction, four probes in a row are lost once in 800 times.
const TRIES: u8 = 4;
/// Minimum and maximum wait for a reply, in ms (PROBE_TIMER).
const ANSWER_MIN_MS: u64 = 250;
const ANSWER_MAX_MS: u64 = 2000;
/// Interval between confirmations of the current size, with and without traffic, in ms (CONFIRMATION_TIMER).
const CONFIRM_MS: u64 = 500;
const CONFIRM_IDLE_MS: u64 = 30_000;
/// How long a size below the kernel's is kept before larger sizes are retried, in ms (PMTU_RAISE_TIMER; RFC 8899 has 600 s, for
/// transports whose probes carry data).
const RAISE_MS: u64 = 60_000;
/// Resolution of the search in bytes.
const GRAIN: u16 = 8;

/// Inputs of a [`Discovery`] step.
#[derive(Clone, Copy, Debug)]
pub(in crate::link) struct Moment {
    /// Time on any monotonic clock, in milliseconds.
    pub now_ms: u64,
    /// True if frames were sent recently.
    pub active: bool,
    /// True if a small probe was answered recently.
    pub alive: bool,
    /// Round trip of small probes in ms; 0 if unknown.
    pub rtt_ms: u64,
}

/// The MTU search on one path. Sizes are those of IP packets in bytes.
#[derive(Debug)]
pub(in crate::link) struct Discovery {
    /// Minimum packet size considered.
    least: u16,
    /// The kernel's value.
    top: u16,
    mtu: u16,
    /// The smallest size known to be lost; `top` + 1 if none.
    above: u32,
    /// The outstanding probe: its size and send time.
    sent: Option<(u16, u64)>,
    /// Numbers of probes lost in a row: of the current size, and of the larger size being tried.
    lost: [u8; 2],
    /// Time at which `mtu` was last confirmed; `None`: confirm it now.
    confirmed_ms: Option<u64>,
    /// Time at which `above` was determined.
    found_ms: u64,
}

impl Discovery {
    /// Starts at the kernel's value. The search never goes below `least`.
    pub(in crate::link) fn new(top: u16, least: u16) -> Discovery {
        let top = top.max(least);
        let above = u32::from(top) + 1;
        Discovery { least, top, mtu: top, above, sent: None, lost: [0; 2], confirmed_ms: None, found_ms: 0 }
    }

    /// The current path MTU.
    pub(in crate::link) fn mtu(&self) -> u16 {
        self.mtu
    }

    /// Sets a new kernel's value, because the path or the kernel's information about it has changed.
    pub(in crate::link) fn set_top(&mut self, top: u16) {
        let top = top.max(self.least);
        if top != self.top {
            let mtu = if self.mtu == self.top { top } else { self.mtu.min(top) };
            // A size that was lost stays lost.
            let none = u32::from(top) + 1;
            let above = if self.above > u32::from(self.top) { none } else { self.above.min(none) };
            *self = Discovery { mtu, above, found_ms: self.found_ms, ..Discovery::new(top, self.least) };
        }
    }

    /// Forgets the path, because the peer has moved.
    pub(in crate::link) fn restart(&mut self) {
        *self = Discovery::new(self.top, self.least);
    }

    /// Returns the size to probe now, if a probe is due.
    pub(in crate::link) fn poll(&mut self, at: Moment) -> Option<u16> {
        if !at.alive {
            // While nothing gets through, lost probes say nothing about sizes.
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

    /// Chooses the next probe. Confirming the current size comes first, because a search takes time.
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

    /// Records that packets of `size` are lost.
    fn fail(&mut self, size: u16, now_ms: u64) {
        self.found_ms = now_ms;
        if size > self.mtu {
            self.above = u32::from(size);
        } else if self.mtu > self.least {
            // Forget the upper bound: the search restarts at the kernel's size, in case the losses happened by chance.
            self.above = u32::from(self.top) + 1;
            self.mtu = if self.mtu > BASE { BASE } else { self.least }.max(self.least);
            self.confirmed_ms = None;
        } else {
            // No smaller size is left: small probes must suffice as confirmation.
            self.confirmed_ms = Some(now_ms);
        }
    }

    /// Records the answer to a probe of `size`. `now_ms` is on the clock of [`Discovery::poll`].
    pub(in crate::link) fn answer(&mut self, size: u16, now_ms: u64) {
        // Ignore late replies: they may be older than a change of the path.
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
