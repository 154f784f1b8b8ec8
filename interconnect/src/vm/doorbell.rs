//! A bell whose rings travel in frames that may be lost: a ring is repeated until the other side has heard it.

use std::time::{Duration, Instant};

use super::wire::Body;

/// Time after which an unanswered ring is repeated; doubled up to the longest.
const AGAIN: Duration = Duration::from_millis(5);
const AGAIN_MAX: Duration = Duration::from_millis(100);

/// One side of a bell.
#[derive(Debug, Default)]
pub(super) struct Doorbell {
    /// How often this side has rung, and how often the other one has heard that.
    rung: u32,
    answered: u32,
    /// How often the other side has rung.
    heard: u32,
    /// When the last unanswered ring was sent, and the time until it is repeated.
    sent: Option<(Instant, Duration)>,
    /// The other side wants an answer.
    owes: bool,
}

impl Doorbell {
    /// Rings once.
    pub(super) fn ring(&mut self) {
        // A ring that is not answered yet stands for this one only if it is still to be sent.
        if self.rung == self.answered || self.sent.is_some() {
            self.rung = self.rung.wrapping_add(1);
            self.sent = None;
        }
    }

    /// The other side's frame. Returns whether it has rung since the last one.
    pub(super) fn hear(&mut self, rung: u32, heard: u32, asks: bool) -> bool {
        self.owes |= asks;
        if self.is_later(heard, self.answered) && !self.is_later(heard, self.rung) {
            self.answered = heard;
            self.sent = self.sent.filter(|_| self.answered != self.rung);
        }
        let is_new = self.is_later(rung, self.heard);
        if is_new {
            self.heard = rung;
        }
        is_new
    }

    fn is_later(&self, a: u32, b: u32) -> bool {
        (1..1 << 31).contains(&a.wrapping_sub(b))
    }

    /// The frame that is due, if any. `is_asking`: also one that only asks whether the other side is there.
    pub(super) fn due(&mut self, now: Instant, is_asking: bool) -> Option<Body> {
        let is_unheard = self.rung != self.answered;
        let is_time = self.sent.is_none_or(|(at, after)| now.saturating_duration_since(at) >= after);
        let rings = is_unheard && is_time;
        if !rings && !self.owes && !is_asking {
            return None;
        }
        if rings {
            let after = self.sent.map_or(AGAIN, |(_, after)| (after * 2).min(AGAIN_MAX));
            self.sent = Some((now, after));
        }
        self.owes = false;
        Some(Body::Ring { rung: self.rung, heard: self.heard, asks: rings || is_asking })
    }

    /// When the next frame is due; `None`: no ring is unanswered.
    pub(super) fn due_at(&self, now: Instant) -> Option<Instant> {
        if self.owes {
            return Some(now);
        }
        (self.rung != self.answered).then(|| self.sent.map_or(now, |(at, after)| at + after))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Passes what is due from one side to the other, unless it is lost. Returns whether the other side was rung.
    fn pass(from: &mut Doorbell, to: &mut Doorbell, now: Instant, is_lost: bool) -> bool {
        match from.due(now, false) {
            Some(Body::Ring { rung, heard, asks }) if !is_lost => to.hear(rung, heard, asks),
            _ => false,
        }
    }

    #[test]
    fn each_ring_is_heard_although_frames_are_lost() {
        let (mut a, mut b) = (Doorbell::default(), Doorbell::default());
        let mut now = Instant::now();
        let mut random = 1u64;
        for _ in 0..1000 {
            a.ring();
            let mut is_heard = false;
            let end = now + Duration::from_secs(60);
            while now < end && !(is_heard && a.rung == a.answered) {
                random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                is_heard |= pass(&mut a, &mut b, now, random >> 60 < 8);
                pass(&mut b, &mut a, now, random >> 40 & 15 < 8);
                now += Duration::from_millis(3);
            }
            assert!(is_heard);
            assert_eq!(a.due_at(now), None, "answered");
        }
        assert_eq!(a.rung, 1000);
    }

    #[test]
    fn a_ring_between_two_frames_is_not_swallowed() {
        let (mut a, mut b, now) = (Doorbell::default(), Doorbell::default(), Instant::now());
        a.ring();
        let Some(Body::Ring { rung, heard, asks }) = a.due(now, false) else { panic!() };
        // It is on its way when the next one comes: the other side may have looked before that.
        a.ring();
        assert!(b.hear(rung, heard, asks));
        pass(&mut b, &mut a, now, false);
        assert!(pass(&mut a, &mut b, now, false), "the second ring");
        // Rings that nothing was sent for are one.
        pass(&mut b, &mut a, now, false);
        a.ring();
        a.ring();
        assert_eq!(a.rung, 3);
    }

    #[test]
    fn nobody_answers_an_answer() {
        let (mut a, mut b, now) = (Doorbell::default(), Doorbell::default(), Instant::now());
        a.ring();
        assert!(pass(&mut a, &mut b, now, false));
        assert!(!pass(&mut b, &mut a, now, false));
        assert_eq!((a.due(now, false), b.due(now, false)), (None, None));
        assert!(matches!(a.due(now, true), Some(Body::Ring { rung: 1, asks: true, .. })));
        // What a forger claims to have heard was never rung.
        a.hear(0, 77, false);
        assert_eq!(a.answered, 1);
    }
}
