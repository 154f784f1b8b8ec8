//! The sending side of a channel: tracks packets in flight, detects lost packets, and bounds the bytes in flight (congestion
//! control).

use std::collections::VecDeque;

use super::wire::expand;

/// Maximum number of unacknowledged packets of a channel: 1.4 MB in flight with packets of 1 400 bytes.
pub(super) const WINDOW: usize = 1024;
/// Number of a channel's first packet. It is chosen so that the low 32 bits, which travel on the wire, wrap early, also in
/// every test.
pub(super) const FIRST: u64 = 0xffff_f000;

/// A packet counts as lost when this many packets that were sent after it have arrived.
const LOSS_AFTER: u64 = 3;
/// Maximum number of unacknowledged packets in a stream: 1.5 MiB. It bounds head-of-line blocking.
const STREAMING_MAX: usize = 24;
/// Maximum number of unacknowledged packets of a channel with a stream. Stream packets may arrive last, and the selective map covers
/// 256 packets behind the first missing one.
const WINDOW_BESIDE_STREAM: usize = 256;
/// Minimum retransmission timeout: covers the time until the operating system schedules the receiving process.
const TIMEOUT_MIN_NS: u64 = 1_000_000;
const TIMEOUT_MAX_NS: u64 = 200_000_000;
/// Minimum retransmission timeout of a path that loses nothing: a packet is late only if its receiver does not run.
const TIMEOUT_LOSSLESS_NS: u64 = 200_000_000;
/// Minimum timeout of a tail: covers the time for which a receiver holds an acknowledgement back.
const TAIL_MIN_NS: u64 = 250_000;
/// How long a path counts as one that loses packets, after a loss. On others what looks late is a receiver that waits for a processor.
const LOSSY_FOR_NS: u64 = 1_000_000_000;
/// Retransmission timeout before the first round-trip measurement.
const TIMEOUT_FIRST_NS: u64 = 20_000_000;
/// Interval at which a round trip is measured while nobody waits for acknowledgements.
const ROUND_TRIP_EVERY_NS: u64 = 1_000_000;
const CONGESTION_WINDOW_FIRST: u64 = 128 << 10;
/// Minimum congestion window: one datagram of the maximum size.
const CONGESTION_WINDOW_MIN: u64 = 64 << 10;
/// Tolerated delay above twice the shortest round trip. Two processes that share a core cause such delays without congestion.
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
    /// Number of this transmission; a retransmission takes a new number.
    order: u64,
    state: State,
    resent: bool,
    /// The receiver acknowledges this packet without delay, so its acknowledgement measures the round trip.
    soon: bool,
    /// In a stream: exempt from loss detection and the congestion window.
    by_stream: bool,
    /// Sent again after a timeout, or because later ones arrived: if it arrives one round trip after that, the first one was lost.
    shows_loss: bool,
    /// Sent again as part of a tail. It keeps its place in the order, because the first one may arrive after all.
    is_tail: bool,
}

/// Result of [`Window::tick`].
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Timeout {
    Nothing,
    /// Packets were marked as lost and have to be retransmitted.
    Resend,
    /// The peer has acknowledged nothing for `dead_after`.
    Dead,
}

pub(super) struct Window<W> {
    /// Packets in order of their numbers, from the first unacknowledged packet.
    packets: VecDeque<Sent<W>>,
    first: u64,
    lost: VecDeque<u64>,
    order: u64,
    order_arrived: u64,
    /// Not counting packets in a stream.
    flying_bytes: u64,
    /// There is a stream.
    has_stream: bool,
    /// Number of packets in it.
    streaming: usize,
    /// Bytes newly acknowledged by the current acknowledgement, not counting packets in a stream.
    arrived_bytes: u64,
    timer_from: u64,
    timeouts: u32,
    /// When a loss was last seen, and when one was seen less than a second after another.
    loss_at: Option<u64>,
    lossy_at: Option<u64>,
    /// The last packets were sent again, and nothing has arrived since.
    is_tail_probed: bool,
    progress_at: u64,
    round_trip: RoundTrip,
    /// When the last packet was sent that is acknowledged at once.
    soon_at: Option<u64>,
    congestion: Congestion,
    /// Number of retransmitted packets.
    pub(super) resent: u64,
}

impl<W: Copy> Window<W> {
    /// Creates a window that allows at most `window_max` bytes in flight.
    pub(super) fn new(window_max: u64) -> Self {
        Self {
            packets: VecDeque::new(),
            first: FIRST,
            lost: VecDeque::new(),
            order: LOSS_AFTER,
            order_arrived: 0,
            flying_bytes: 0,
            has_stream: false,
            streaming: 0,
            arrived_bytes: 0,
            timer_from: 0,
            timeouts: 0,
            loss_at: None,
            lossy_at: None,
            is_tail_probed: false,
            progress_at: 0,
            round_trip: RoundTrip::default(),
            soon_at: None,
            congestion: Congestion::new(window_max),
            resent: 0,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.packets.is_empty()
    }

    /// Whether a packet of `bytes` may be sent now.
    pub(super) fn has_room(&self, bytes: usize) -> bool {
        self.packets.len() < self.most() && self.may_fly(bytes as u64)
    }

    fn most(&self) -> usize {
        if self.has_stream { WINDOW_BESIDE_STREAM } else { WINDOW }
    }

    /// Whether a packet may be sent through a stream now.
    pub(super) fn has_room_in_stream(&self) -> bool {
        self.packets.len() < self.most() && self.streaming < STREAMING_MAX
    }

    /// Whether a control packet may be sent now. Control packets ignore the congestion window because they request or end the
    /// transfers that make room in it.
    pub(super) fn has_room_for_control(&self) -> bool {
        self.packets.len() < self.most()
    }

    fn may_fly(&self, bytes: u64) -> bool {
        self.flying_bytes == 0 || self.flying_bytes + bytes <= self.congestion.window
    }

    /// Whether half of the congestion window or of the packet window is in use, so that the sender requests an acknowledgement.
    pub(super) fn is_half_full(&self) -> bool {
        self.flying_bytes * 2 >= self.congestion.window
            || self.packets.len() * 2 >= WINDOW
            || self.streaming * 2 >= STREAMING_MAX
    }

    /// Limits the congestion window to `bytes`, which the peer can receive at once.
    pub(super) fn limit(&mut self, bytes: u64) {
        self.congestion.max = bytes.max(CONGESTION_WINDOW_MIN);
        self.congestion.window = self.congestion.window.min(self.congestion.max);
    }

    /// The path changes. `lossless`: it loses nothing and takes this many bytes, so that congestion control does not apply.
    pub(super) fn set_lossless(&mut self, lossless: Option<u64>) {
        self.congestion = Congestion::new(lossless.unwrap_or(self.congestion.max));
        if lossless.is_some() {
            self.congestion.window = self.congestion.max;
        }
        self.congestion.is_fixed = lossless.is_some();
        self.round_trip = RoundTrip::default();
        (self.loss_at, self.lossy_at) = (None, None);
    }

    /// Assigns the next number to a packet that is sent now.
    pub(super) fn send(&mut self, now: u64, what: W, bytes: usize, soon: bool) -> u64 {
        debug_assert!(self.packets.len() < WINDOW);
        if self.packets.is_empty() {
            (self.timer_from, self.progress_at) = (now, now);
        }
        if soon {
            self.soon_at = Some(now);
        }
        if self.flying_bytes == 0 && self.lost.is_empty() {
            // Only stream packets were in flight.
            (self.timer_from, self.timeouts, self.is_tail_probed) = (now, 0, false);
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
            by_stream: false,
            shows_loss: false,
            is_tail: false,
        });
        self.first + self.packets.len() as u64 - 1
    }

    /// Whether no packet that is acknowledged at once was sent for a while: round trips are measured with such packets only.
    pub(super) fn wants_round_trip(&self, now: u64) -> bool {
        self.soon_at.is_none_or(|at| now.saturating_sub(at) >= ROUND_TRIP_EVERY_NS)
    }

    /// A stream was opened.
    pub(super) fn begin_stream(&mut self) {
        self.has_stream = true;
    }

    /// The last packet that `send` has numbered takes the stream.
    pub(super) fn put_into_stream(&mut self) {
        let Some(packet) = self.packets.back_mut() else { return };
        packet.by_stream = true;
        self.flying_bytes -= packet.bytes;
        self.streaming += 1;
        // Not part of the order by which losses are detected.
        self.order -= 1;
    }

    /// The stream was closed. Returns the content of its unacknowledged packets. `instead`, of `bytes` bytes, is sent under their
    /// numbers, because every number has to arrive.
    pub(super) fn end_stream(&mut self, instead: W, bytes: usize) -> Vec<W> {
        let mut left = vec![];
        for (place, packet) in self.packets.iter_mut().enumerate() {
            if std::mem::take(&mut packet.by_stream) && packet.state == State::Flying {
                left.push(std::mem::replace(&mut packet.what, instead));
                (packet.state, packet.bytes) = (State::Lost, bytes as u64);
                // A late acknowledgement must not count as a round trip, or for loss detection.
                (packet.resent, packet.order, packet.shows_loss) = (true, 0, false);
                self.lost.push_back(self.first + place as u64);
            }
        }
        (self.streaming, self.has_stream) = (0, false);
        left
    }

    /// Returns the number and content of the next packet to retransmit, if the window allows a packet now.
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
            (packet.state, packet.resent, packet.sent_at) = (State::Flying, true, now);
            if !packet.is_tail {
                self.order += 1;
                packet.order = self.order;
            }
            self.flying_bytes += bytes;
            self.resent += 1;
            return Some((number, packet.what));
        }
    }

    /// From now on the packet `number`, which `resend` has returned, contains `what`, of `bytes` bytes.
    pub(super) fn replace(&mut self, number: u64, what: W, bytes: usize) {
        let place = number.checked_sub(self.first);
        let packet = place.and_then(|place| self.packets.get_mut(place as usize));
        let Some(packet) = packet.filter(|packet| packet.state == State::Flying) else { return };
        self.flying_bytes = self.flying_bytes - packet.bytes + bytes as u64;
        (packet.what, packet.bytes) = (what, bytes as u64);
    }

    /// Whether the peer has been silent since the last timeout.
    pub(super) fn is_timed_out(&self) -> bool {
        self.timeouts > 0 || self.is_tail_probed
    }

    /// Whether packets have timed out, and nothing was acknowledged for `silence` ns.
    pub(super) fn is_silent(&self, now: u64, silence: u64) -> bool {
        self.timeouts > 0 && now.saturating_sub(self.progress_at) >= silence
    }

    /// Processes an acknowledgement. Appends to `done` the content of each packet that arrived together with all packets before
    /// it.
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
        self.arrived_bytes = 0;
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
            self.progress_at = now;
            // Acknowledgements of stream packets must not restart the timer of the others.
            if self.arrived_bytes > 0 || self.flying_bytes == 0 {
                (self.timer_from, self.timeouts, self.is_tail_probed) = (now, 0, false);
            }
            self.congestion.grow(self.arrived_bytes);
        }
        if congestion {
            self.congestion.shrink(now, self.round_trip.smooth, 7, 8);
        }
        self.congestion.judge_losses(now, self.round_trip.smooth);
    }

    /// Marks the packets in `map` as arrived, and gaps in the map that are old enough as lost. Returns the number of newly
    /// acknowledged bytes.
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
            let is_in_network = packet.state == State::Flying && !packet.by_stream;
            if is_in_network && packet.order + LOSS_AFTER <= self.order_arrived {
                (packet.state, packet.shows_loss, packet.is_tail) = (State::Lost, true, false);
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

    /// Marks a packet as arrived. Returns its size in bytes, or 0 if an earlier acknowledgement already covered it.
    fn arrive(&mut self, now: u64, packet: &mut Sent<W>) -> u64 {
        if packet.state == State::Arrived {
            return 0;
        }
        let was_flying = packet.state == State::Flying;
        packet.state = State::Arrived;
        if packet.by_stream {
            self.streaming -= usize::from(was_flying);
            return packet.bytes;
        }
        if was_flying {
            self.flying_bytes -= packet.bytes;
        }
        self.arrived_bytes += packet.bytes;
        self.order_arrived = self.order_arrived.max(packet.order);
        let sample = now.saturating_sub(packet.sent_at);
        let is_one_trip = (self.round_trip.shortest..=2 * self.round_trip.smooth).contains(&sample);
        if packet.shows_loss && is_one_trip {
            self.see_loss(now);
        }
        if !packet.resent && packet.soon {
            self.round_trip.measure(now, sample);
            if sample > 2 * self.round_trip.shortest + DELAY_SLACK_NS {
                self.congestion.shrink(now, self.round_trip.smooth, 4, 5);
            }
        }
        packet.bytes
    }

    /// A packet arrived one round trip after it was sent again. That can be chance, where a receiver is late: only the second one in a
    /// second makes a path lossy.
    fn see_loss(&mut self, now: u64) {
        if self.loss_at.is_some_and(|at| now < at + LOSSY_FOR_NS) {
            self.lossy_at = Some(now);
        }
        self.loss_at = Some(now);
    }

    /// Whether the path loses packets.
    pub(super) fn is_lossy(&self, now: u64) -> bool {
        self.lossy_at.is_some_and(|at| now < at + LOSSY_FOR_NS)
    }

    /// Time of the next timeout.
    pub(super) fn deadline(&self) -> Option<u64> {
        self.retransmission_at().map(|at| self.tail_at().map_or(at, |tail| at.min(tail)))
    }

    fn retransmission_at(&self) -> Option<u64> {
        let least = if self.congestion.is_fixed { TIMEOUT_LOSSLESS_NS } else { TIMEOUT_MIN_NS };
        let timeout = self.round_trip.timeout().max(least) << self.timeouts.min(8);
        (!self.packets.is_empty()).then(|| self.timer_from + timeout.min(TIMEOUT_MAX_NS))
    }

    /// When the last packets are sent again. No later ones can show that they are lost.
    fn tail_at(&self) -> Option<u64> {
        let lossy_at = self.lossy_at.filter(|_| !self.congestion.is_fixed && self.flying_bytes > 0)?;
        if self.is_tail_probed || self.timeouts > 0 || !self.lost.is_empty() {
            return None;
        }
        let last =
            self.packets.iter().rev().find(|packet| packet.state == State::Flying && !packet.by_stream)?;
        let at = last.sent_at.max(self.timer_from) + (2 * self.round_trip.smooth).max(TAIL_MIN_NS);
        (at < lossy_at + LOSSY_FOR_NS).then_some(at)
    }

    /// Sends the last packets in flight again: as many as too few later ones follow.
    fn probe_tail(&mut self, now: u64) {
        (self.is_tail_probed, self.timer_from) = (true, now);
        let is_in_network = |packet: &Sent<W>| packet.state == State::Flying && !packet.by_stream;
        let flying = self.packets.iter_mut().enumerate().rev().filter(|(_, packet)| is_in_network(packet));
        for (place, packet) in flying.take(LOSS_AFTER as usize) {
            (packet.state, packet.shows_loss, packet.is_tail) = (State::Lost, false, true);
            self.flying_bytes -= packet.bytes;
            self.lost.push_front(self.first + place as u64);
        }
    }

    /// Checks the timeouts. The first retransmission timeout retransmits one packet as a probe, whose acknowledgement shows which other
    /// packets are lost. Later ones retransmit all packets in flight. On a path that loses packets the last ones are sent again sooner.
    pub(super) fn tick(&mut self, now: u64, dead_after: u64) -> Timeout {
        if self.retransmission_at().is_none_or(|at| now < at) {
            if self.tail_at().is_none_or(|at| now < at) {
                return Timeout::Nothing;
            }
            self.probe_tail(now);
            return Timeout::Resend;
        }
        if now.saturating_sub(self.progress_at) >= dead_after {
            return Timeout::Dead;
        }
        // What the tail has sent again can arrive at any time.
        let shows_loss = !self.is_tail_probed;
        self.timer_from = now;
        self.timeouts += 1;
        let limit = if self.timeouts == 1 { 1 } else { WINDOW };
        let is_in_network = |packet: &Sent<W>| packet.state == State::Flying && !packet.by_stream;
        let flying = self.packets.iter_mut().enumerate().filter(|(_, packet)| is_in_network(packet));
        for (place, packet) in flying.take(limit) {
            (packet.state, packet.shows_loss, packet.is_tail) = (State::Lost, shows_loss, false);
            self.flying_bytes -= packet.bytes;
            self.lost.push_back(self.first + place as u64);
        }
        if self.lost.is_empty() {
            // Only stream packets are in flight: no sign of congestion.
            return Timeout::Nothing;
        }
        if self.timeouts > 1 {
            self.congestion.halve();
        }
        Timeout::Resend
    }
}

/// Round-trip estimate, smoothed as in RFC 6298, and the shortest recent round trip.
#[derive(Default)]
struct RoundTrip {
    smooth: u64,
    variation: u64,
    shortest: u64,
    shortest_at: u64,
}

impl RoundTrip {
    /// How long the shortest round trip stays valid; a route change may have made an older one obsolete.
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
        if self.smooth == 0 { TIMEOUT_FIRST_NS } else { self.smooth + 4 * self.variation }
    }
}

/// Congestion window in bytes. It grows up to what the receiver can take. It shrinks when delay rises, when packets arrive
/// marked "congestion experienced", and when more than an eighth of the bytes is lost. A lower loss rate counts as noise of the
/// network: lost packets are retransmitted and the window keeps its size.
struct Congestion {
    window: u64,
    max: u64,
    is_slow_start: bool,
    /// The window neither grows nor shrinks.
    is_fixed: bool,
    shrunk_at: u64,
    judged_at: u64,
    arrived: u64,
    lost: u64,
}

impl Congestion {
    fn new(max: u64) -> Self {
        let max = max.max(CONGESTION_WINDOW_MIN);
        let window = CONGESTION_WINDOW_FIRST.min(max);
        let (is_slow_start, is_fixed) = (true, false);
        Self { window, max, is_slow_start, is_fixed, shrunk_at: 0, judged_at: 0, arrived: 0, lost: 0 }
    }

    fn grow(&mut self, bytes: u64) {
        self.arrived += bytes;
        let step = if self.is_slow_start { bytes } else { bytes.min(self.window) * 4096 / self.window };
        self.window = (self.window + step).min(self.max);
    }

    /// Shrinks the window to `to / of` of its size, at most once per round trip.
    fn shrink(&mut self, now: u64, round_trip: u64, to: u64, of: u64) {
        if !self.is_fixed && now.saturating_sub(self.shrunk_at) >= round_trip {
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

    /// Halves the window after repeated timeouts. It does not collapse to the minimum because the peer's process may only be
    /// waiting for a CPU.
    fn halve(&mut self) {
        if !self.is_fixed {
            self.window = (self.window / 2).max(CONGESTION_WINDOW_MIN);
            self.is_slow_start = true;
        }
    }
}

#[cfg(test)]
#[path = "window_tests.rs"]
mod tests;
