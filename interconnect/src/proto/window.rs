//! The sender's side of a channel: packets on their way, which of them are lost, and how many may be on their way at once.

use std::collections::VecDeque;

use super::wire::expand;

/// Packets without acknowledgement. At 1 400 bytes: 1.4 MB on their way.
pub(super) const WINDOW: usize = 1024;
/// Number of a channel's first packet: the low 32 bits that travel wrap early, in every test as well.
pub(super) const FIRST: u64 = 0xffff_f000;

/// A packet is lost when this many that were sent later have arrived.
const LOSS_AFTER: u64 = 3;
/// Shortest retransmission timeout: what a receiver may need to be scheduled.
const TIMEOUT_MIN_NS: u64 = 1_000_000;
const TIMEOUT_MAX_NS: u64 = 200_000_000;
/// Before the first measurement.
const TIMEOUT_FIRST_NS: u64 = 20_000_000;
const CONGESTION_WINDOW_FIRST: u64 = 128 << 10;
/// One of the largest datagrams.
const CONGESTION_WINDOW_MIN: u64 = 64 << 10;
/// Delay above twice the shortest round trip that is no congestion: two processes that share a core.
const DELAY_SLACK_NS: u64 = 2_000_000;

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Flying,
    Lost,
    Arrived,
}

struct Sent<W> {
    what: W,
    bytes: u64,
    sent_at: u64,
    /// Number of this transmission; a retransmission takes a new one.
    order: u64,
    state: State,
    resent: bool,
    /// Acknowledged without delay, so it measures the round trip.
    soon: bool,
}

/// What a look at the clock led to.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Timeout {
    Nothing,
    /// Packets are to be sent again.
    Resend,
    /// Nothing was acknowledged for too long.
    Dead,
}

pub(super) struct Window<W> {
    /// From the first that is not acknowledged.
    packets: VecDeque<Sent<W>>,
    first: u64,
    lost: VecDeque<u64>,
    order: u64,
    order_arrived: u64,
    flying_bytes: u64,
    timer_from: u64,
    timeouts: u32,
    progress_at: u64,
    round_trip: RoundTrip,
    congestion: Congestion,
    /// Packets sent again.
    pub(super) resent: u64,
}

impl<W: Copy> Window<W> {
    /// At most `window_max` bytes on their way.
    pub(super) fn new(window_max: u64) -> Self {
        Self {
            packets: VecDeque::new(),
            first: FIRST,
            lost: VecDeque::new(),
            order: LOSS_AFTER,
            order_arrived: 0,
            flying_bytes: 0,
            timer_from: 0,
            timeouts: 0,
            progress_at: 0,
            round_trip: RoundTrip::default(),
            congestion: Congestion::new(window_max),
            resent: 0,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.packets.is_empty()
    }

    /// Whether a packet of `bytes` may be sent now.
    pub(super) fn has_room(&self, bytes: usize) -> bool {
        self.packets.len() < WINDOW && self.may_fly(bytes as u64)
    }

    /// Whether a small packet may be sent now, whatever the congestion window: what it asks for or ends makes room.
    pub(super) fn has_room_for_control(&self) -> bool {
        self.packets.len() < WINDOW
    }

    fn may_fly(&self, bytes: u64) -> bool {
        self.flying_bytes == 0 || self.flying_bytes + bytes <= self.congestion.window
    }

    /// Whether half of what may be on its way is: time for an acknowledgement.
    pub(super) fn is_half_full(&self) -> bool {
        self.flying_bytes * 2 >= self.congestion.window || self.packets.len() * 2 >= WINDOW
    }

    /// The peer receives so many bytes at once.
    pub(super) fn limit(&mut self, bytes: u64) {
        self.congestion.max = bytes.max(CONGESTION_WINDOW_MIN);
        self.congestion.window = self.congestion.window.min(self.congestion.max);
    }

    /// Takes the next number for a packet that is sent now.
    pub(super) fn send(&mut self, now: u64, what: W, bytes: usize, soon: bool) -> u64 {
        debug_assert!(self.packets.len() < WINDOW);
        if self.packets.is_empty() {
            (self.timer_from, self.progress_at) = (now, now);
        }
        self.order += 1;
        let bytes = bytes as u64;
        self.flying_bytes += bytes;
        let order = self.order;
        self.packets.push_back(Sent {
            what,
            bytes,
            sent_at: now,
            order,
            state: State::Flying,
            resent: false,
            soon,
        });
        self.first + self.packets.len() as u64 - 1
    }

    /// The next packet to send again, if it may be sent: its number and what it was.
    pub(super) fn resend(&mut self, now: u64) -> Option<(u64, W)> {
        loop {
            let number = *self.lost.front()?;
            let place = number.checked_sub(self.first);
            let packet = place.and_then(|place| self.packets.get_mut(place as usize));
            let Some(packet) = packet.filter(|packet| packet.state == State::Lost) else {
                self.lost.pop_front();
                continue;
            };
            let bytes = packet.bytes;
            if self.flying_bytes != 0 && self.flying_bytes + bytes > self.congestion.window {
                return None;
            }
            self.lost.pop_front();
            self.order += 1;
            (packet.state, packet.resent, packet.sent_at, packet.order) =
                (State::Flying, true, now, self.order);
            self.flying_bytes += bytes;
            self.resent += 1;
            return Some((number, packet.what));
        }
    }

    /// Takes an acknowledgement. Appends to `done` what has arrived with everything before it.
    pub(super) fn acknowledge(
        &mut self,
        now: u64,
        ack: u32,
        map: Option<&[u64; 4]>,
        congestion: bool,
        done: &mut Vec<W>,
    ) {
        let ack = expand(self.first, ack);
        if ack < self.first || ack > self.first + self.packets.len() as u64 {
            return;
        }
        let (mut bytes, advanced) = (0, ack > self.first);
        while self.first < ack {
            let Some(mut packet) = self.packets.pop_front() else { break };
            self.first += 1;
            bytes += self.arrive(now, &mut packet);
            done.push(packet.what);
        }
        if let Some(map) = map {
            bytes += self.mark(now, map);
        }
        if advanced || bytes > 0 {
            (self.timer_from, self.progress_at, self.timeouts) = (now, now, 0);
            self.congestion.grow(bytes);
        }
        if congestion {
            self.congestion.shrink(now, self.round_trip.smooth, 7, 8);
        }
        self.congestion.judge_losses(now, self.round_trip.smooth);
    }

    /// Marks what the map names as arrived, and what it leaves out for too long as lost. Returns newly arrived bytes.
    fn mark(&mut self, now: u64, map: &[u64; 4]) -> u64 {
        let (mut bytes, mut highest) = (0, 0);
        for (word, mut bits) in map.iter().copied().enumerate() {
            while bits != 0 {
                let place = word * 64 + bits.trailing_zeros() as usize;
                bits &= bits - 1;
                if place >= self.packets.len() {
                    break;
                }
                highest = place;
                if self.packets[place].state != State::Arrived {
                    bytes += self.arrive_at(now, place);
                }
            }
        }
        for place in 0..highest {
            let packet = &mut self.packets[place];
            if packet.state == State::Flying && packet.order + LOSS_AFTER <= self.order_arrived {
                packet.state = State::Lost;
                self.flying_bytes -= packet.bytes;
                self.lost.push_back(self.first + place as u64);
                self.congestion.lost += packet.bytes;
            }
        }
        bytes
    }

    fn arrive_at(&mut self, now: u64, place: usize) -> u64 {
        let packet = &mut self.packets[place];
        let mut copy = Sent { what: packet.what, ..*packet };
        packet.state = State::Arrived;
        self.arrive(now, &mut copy)
    }

    /// Returns the packet's bytes, if this is the first news of its arrival.
    fn arrive(&mut self, now: u64, packet: &mut Sent<W>) -> u64 {
        if packet.state == State::Arrived {
            return 0;
        }
        if packet.state == State::Flying {
            self.flying_bytes -= packet.bytes;
        }
        packet.state = State::Arrived;
        self.order_arrived = self.order_arrived.max(packet.order);
        if !packet.resent && packet.soon {
            let sample = now.saturating_sub(packet.sent_at);
            self.round_trip.measure(now, sample);
            if sample > 2 * self.round_trip.shortest + DELAY_SLACK_NS {
                self.congestion.shrink(now, self.round_trip.smooth, 4, 5);
            }
        }
        packet.bytes
    }

    /// When the next timeout is due.
    pub(super) fn deadline(&self) -> Option<u64> {
        let timeout = self.round_trip.timeout() << self.timeouts.min(8);
        (!self.packets.is_empty()).then(|| self.timer_from + timeout.min(TIMEOUT_MAX_NS))
    }

    /// Looks at the clock. The first timeout sends one packet again, as a probe: its acknowledgement tells what else is lost. The
    /// second sends all again.
    pub(super) fn tick(&mut self, now: u64, dead_after: u64) -> Timeout {
        if self.deadline().is_none_or(|deadline| now < deadline) {
            return Timeout::Nothing;
        }
        if now.saturating_sub(self.progress_at) >= dead_after {
            return Timeout::Dead;
        }
        self.timer_from = now;
        self.timeouts += 1;
        let limit = if self.timeouts == 1 { 1 } else { WINDOW };
        let flying = self.packets.iter_mut().enumerate().filter(|(_, packet)| packet.state == State::Flying);
        for (place, packet) in flying.take(limit) {
            packet.state = State::Lost;
            self.flying_bytes -= packet.bytes;
            self.lost.push_back(self.first + place as u64);
        }
        if self.timeouts > 1 {
            self.congestion.halve();
        }
        Timeout::Resend
    }
}

/// Round trip, as RFC 6298 smooths it, and the shortest seen of late.
#[derive(Default)]
struct RoundTrip {
    smooth: u64,
    variation: u64,
    shortest: u64,
    shortest_at: u64,
}

impl RoundTrip {
    /// For so long the shortest round trip stays valid; then routes may have changed.
    const SHORTEST_VALID_NS: u64 = 10_000_000_000;

    fn measure(&mut self, now: u64, sample: u64) {
        let sample = sample.max(1);
        if self.smooth == 0 {
            (self.smooth, self.variation) = (sample, sample / 2);
        } else {
            self.variation = (3 * self.variation + self.smooth.abs_diff(sample)) / 4;
            self.smooth = (7 * self.smooth + sample) / 8;
        }
        let is_stale = now.saturating_sub(self.shortest_at) > Self::SHORTEST_VALID_NS;
        if self.shortest == 0 || sample <= self.shortest || is_stale {
            (self.shortest, self.shortest_at) = (sample, now);
        }
    }

    fn timeout(&self) -> u64 {
        if self.smooth == 0 {
            TIMEOUT_FIRST_NS
        } else {
            (self.smooth + 4 * self.variation).max(TIMEOUT_MIN_NS)
        }
    }
}

/// Bytes that may be on their way. Grows to what the receiver can take; shrinks with delay, with packets marked "congestion experienced",
/// and when an eighth of the packets is lost. Fewer losses do not shrink it: they are the network's noise, and are sent again.
struct Congestion {
    window: u64,
    max: u64,
    is_slow_start: bool,
    shrunk_at: u64,
    judged_at: u64,
    arrived: u64,
    lost: u64,
}

impl Congestion {
    fn new(max: u64) -> Self {
        let max = max.max(CONGESTION_WINDOW_MIN);
        let window = CONGESTION_WINDOW_FIRST.min(max);
        Self { window, max, is_slow_start: true, shrunk_at: 0, judged_at: 0, arrived: 0, lost: 0 }
    }

    fn grow(&mut self, bytes: u64) {
        self.arrived += bytes;
        let step = if self.is_slow_start { bytes } else { bytes.min(self.window) * 4096 / self.window };
        self.window = (self.window + step).min(self.max);
    }

    /// At most once a round trip.
    fn shrink(&mut self, now: u64, round_trip: u64, to: u64, of: u64) {
        if now.saturating_sub(self.shrunk_at) >= round_trip {
            self.shrunk_at = now;
            self.is_slow_start = false;
            self.window = (self.window * to / of).max(CONGESTION_WINDOW_MIN);
        }
    }

    fn judge_losses(&mut self, now: u64, round_trip: u64) {
        if now.saturating_sub(self.judged_at) < round_trip || self.arrived + self.lost < 64 << 10 {
            return;
        }
        if self.lost * 8 > self.arrived + self.lost {
            self.shrink(now, round_trip, 5, 8);
        }
        (self.judged_at, self.arrived, self.lost) = (now, 0, 0);
    }

    /// Nothing came back for two timeouts. It may only be that the peer's process waits for a processor, so the window does not collapse.
    fn halve(&mut self) {
        self.window = (self.window / 2).max(CONGESTION_WINDOW_MIN);
        self.is_slow_start = true;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(packets: u64) -> Window<u64> {
        let mut window = Window::new(1 << 20);
        for what in 0..packets {
            assert_eq!(window.send(what, what, 100, true), FIRST + what);
        }
        window
    }

    fn done(window: &mut Window<u64>, now: u64, ack: u64, map: Option<[u64; 4]>) -> Vec<u64> {
        let mut done = vec![];
        window.acknowledge(now, (FIRST + ack) as u32, map.as_ref(), false, &mut done);
        done
    }

    #[test]
    fn three_later_arrivals_make_a_loss() {
        let mut window = filled(10);
        assert_eq!(done(&mut window, 100, 2, Some([0b0110, 0, 0, 0])), [0, 1]);
        assert_eq!(window.resend(100), None, "two later ones have arrived");
        assert_eq!(done(&mut window, 101, 2, Some([0b1110, 0, 0, 0])), [0; 0]);
        assert_eq!(window.resend(101), Some((FIRST + 2, 2)));
        assert_eq!(window.resend(101), None);
        done(&mut window, 102, 2, Some([0b1111_1110, 0, 0, 0]));
        assert_eq!(window.resend(102), None, "its retransmission was sent after these");
        assert_eq!(done(&mut window, 103, 10, None), [2, 3, 4, 5, 6, 7, 8, 9]);
        assert!(window.is_empty() && window.flying_bytes == 0);
    }

    #[test]
    fn old_and_impossible_acknowledgements_change_nothing() {
        let mut window = filled(4);
        assert_eq!(done(&mut window, 10, 3, None), [0, 1, 2]);
        for ack in [0, 2, 5, 1 << 20] {
            assert_eq!(done(&mut window, 11, ack, Some([u64::MAX; 4])), [0; 0]);
        }
        assert_eq!(window.flying_bytes, 100);
    }

    #[test]
    fn timeouts_probe_then_resend_all_then_give_up() {
        let mut window = filled(3);
        assert_eq!(window.tick(TIMEOUT_FIRST_NS - 1, 1 << 40), Timeout::Nothing);
        assert_eq!(window.tick(TIMEOUT_FIRST_NS + 3, 1 << 40), Timeout::Resend);
        assert_eq!(window.resend(30_000_000).unwrap().1, 0);
        assert_eq!(window.resend(30_000_000), None);
        assert_eq!(window.tick(1 << 30, 1 << 40), Timeout::Resend);
        let again: Vec<u64> = std::iter::from_fn(|| window.resend(1 << 30)).map(|(_, what)| what).collect();
        assert_eq!(again, [0, 1, 2], "all are sent again");
        assert_eq!(window.tick(1 << 41, 1 << 40), Timeout::Dead);
    }

    #[test]
    fn the_window_bounds_what_flies() {
        let mut window: Window<u64> = Window::new(1 << 20);
        let mut sent = 0;
        while window.has_room(1400) {
            window.send(1, sent, 1400, false);
            sent += 1;
        }
        assert_eq!(sent, CONGESTION_WINDOW_FIRST / 1400);
        assert_eq!(done(&mut window, 2, sent, None).len() as u64, sent);
        assert!(window.congestion.window > CONGESTION_WINDOW_FIRST, "it grows");
    }
}
