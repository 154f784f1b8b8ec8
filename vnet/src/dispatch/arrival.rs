//! Early interrupts at arrival: predicts which guest the data is for that has arrived at a source (VNET/P+ section IV.A.1).
//!
//! In the paper a network adapter belongs to one guest, so an arrival says whom to interrupt. Here most sources are shared: the next
//! burst is predicted to be for the guest that the last one was for, and about as large.
//!
//! ```text
//!   event of the source --- guess() ---> announce(): interrupt --- receive, decide, deliver --- learn(): right or wrong
//! ```
//!
//! A wrong prediction costs its guest an interrupt with nothing in the ring. It is counted, and makes the source's next
//! announcements back off exponentially. A guest's own underlay port leads to that guest from the start.
//!
//! Only an event shows an arrival before the receive: a ring that is polled shows it by its frames, whose guest is notified before
//! the copy.

use crate::frame::PortId;
use crate::interface::interrupts::Backoff;

/// A queue of the guest at a port.
pub(super) type GuestQueue = (PortId, usize);

/// The guests with optimistic interrupts that received frames of one burst.
#[derive(Default)]
pub(super) struct Recipients {
    predicted: Option<GuestQueue>,
    first: Option<GuestQueue>,
    several: bool,
    has_predicted: bool,
}

impl Recipients {
    /// None so far, of a burst predicted to be for `predicted`.
    pub(super) fn expecting(predicted: Option<GuestQueue>) -> Recipients {
        Recipients { predicted, ..Recipients::default() }
    }

    #[inline]
    pub(super) fn add(&mut self, guest: GuestQueue) {
        self.has_predicted |= self.predicted == Some(guest);
        self.several |= *self.first.get_or_insert(guest) != guest;
    }
}

/// Predicts whom a source's next burst is for.
#[derive(Default)]
pub(super) struct Prediction {
    /// The guest whose own port the source is.
    owner: Option<PortId>,
    /// Whom the last burst was for; `None`: several guests, or none with optimistic interrupts.
    guest: Option<GuestQueue>,
    /// Bytes of the last burst for that guest.
    bytes: u64,
    /// Data has arrived since the last guess.
    arrived: bool,
    /// The guest that was notified of the data being received.
    announced: Option<GuestQueue>,
    backoff: Backoff,
}

impl Prediction {
    /// For a source that is the own port of the guest at `owner`, or that several share.
    pub(super) fn new(owner: Option<PortId>) -> Prediction {
        Prediction { owner, ..Prediction::default() }
    }

    /// Forgets what was learned, because ports may have changed.
    pub(super) fn forget(&mut self) {
        *self = Prediction::new(self.owner);
    }

    /// True if the next arrival should be seen as an event, before it is received.
    pub(super) fn wants_events(&self) -> bool {
        self.guest.is_some()
    }

    /// Records that an event has shown data in the source.
    #[inline]
    pub(super) fn arrived(&mut self) {
        self.arrived = true;
    }

    /// The guest to notify of data that has arrived since the last call, with the number of bytes predicted.
    #[inline]
    pub(super) fn guess(&mut self) -> Option<(GuestQueue, u64)> {
        if !std::mem::take(&mut self.arrived) {
            return None;
        }
        let guest = self.expected()?;
        self.backoff.allows().then_some((guest, self.bytes))
    }

    /// The guest that the next burst is expected to be for.
    #[inline]
    pub(super) fn expected(&self) -> Option<GuestQueue> {
        self.guest.or(self.owner.map(|owner| (owner, 0)))
    }

    /// Records that the guest of the last guess was notified.
    pub(super) fn announced(&mut self, guest: GuestQueue) {
        self.announced = Some(guest);
    }

    /// True while a notified guest waits for its frames.
    #[inline]
    pub(super) fn is_announced(&self) -> bool {
        self.announced.is_some()
    }

    /// Learns from a fill of the source: `recipients` received `bytes` bytes, and `drained` says that the burst has ended. Returns the
    /// guest that was notified by mistake.
    #[inline]
    pub(super) fn learn(&mut self, recipients: &Recipients, bytes: u64, drained: bool) -> Option<GuestQueue> {
        if recipients.first.is_none() && bytes == 0 && !(drained && self.is_announced()) {
            // Nothing, or a part of a frame: the next fill brings the rest.
            return None;
        }
        let announced = self.announced.take();
        if announced.is_none() && self.guest.is_none() && recipients.first.is_none() {
            return None;
        }
        if recipients.has_predicted {
            self.backoff.succeeded();
            self.guest = recipients.predicted;
        } else {
            if announced.is_some() || self.guest.is_some() {
                self.backoff.failed();
            }
            self.guest = recipients.first.filter(|_| !recipients.several);
        }
        self.bytes = bytes;
        announced.filter(|_| !recipients.has_predicted)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: GuestQueue = (PortId(1), 0);
    const OTHER: GuestQueue = (PortId(2), 1);

    /// Receives a burst of 100 bytes for each of `guests` after an event. Returns whom the event announced, and whether by mistake.
    fn burst(prediction: &mut Prediction, guests: &[GuestQueue]) -> (Option<GuestQueue>, bool) {
        prediction.arrived();
        let guess = prediction.guess().map(|(guest, _)| guest);
        if let Some(guest) = guess {
            prediction.announced(guest);
        }
        let mut recipients = Recipients::expecting(prediction.expected());
        guests.iter().for_each(|guest| recipients.add(*guest));
        let wrong = prediction.learn(&recipients, 100 * guests.len() as u64, true);
        assert!(wrong.is_none() || wrong == guess);
        (guess, wrong.is_some())
    }

    #[test]
    fn the_next_burst_is_for_whom_the_last_one_was() {
        let mut prediction = Prediction::default();
        assert_eq!(burst(&mut prediction, &[ONE]), (None, false), "nothing is known");
        assert_eq!(burst(&mut prediction, &[ONE, ONE]), (Some(ONE), false));
        prediction.arrived();
        assert_eq!(prediction.guess(), Some((ONE, 200)), "as large as the last one");
        assert_eq!(prediction.guess(), None, "each arrival once");
        assert_eq!(burst(&mut prediction, &[ONE, OTHER]), (Some(ONE), false), "a broadcast");
        assert_eq!(burst(&mut prediction, &[OTHER]), (Some(ONE), true));
    }

    #[test]
    fn several_guests_or_none_are_not_predicted() {
        let mut prediction = Prediction::default();
        assert_eq!(burst(&mut prediction, &[ONE, OTHER]), (None, false));
        assert!(!prediction.wants_events());
        assert_eq!(burst(&mut prediction, &[ONE]), (None, false));
        assert!(prediction.wants_events());
        assert_eq!(burst(&mut prediction, &[]), (Some(ONE), true));
        assert!(!prediction.wants_events());
    }

    #[test]
    fn wrong_predictions_back_off() {
        let mut prediction = Prediction::default();
        // Two guests in turn: every prediction is wrong.
        let wrong = (0..2000).filter(|n| burst(&mut prediction, &[[ONE, OTHER][n % 2]]).1).count();
        assert!(wrong <= 8, "{wrong} of 2000");
        // Then one guest.
        let right = (0..1000).filter(|_| burst(&mut prediction, &[ONE]).0.is_some()).count();
        assert!(right >= 700, "{right} of 1000");
    }

    #[test]
    fn an_own_port_is_known_from_the_start() {
        let mut prediction = Prediction::new(Some(ONE.0));
        assert_eq!(burst(&mut prediction, &[ONE]), (Some(ONE), false));
        prediction.forget();
        assert_eq!(burst(&mut prediction, &[ONE]), (Some(ONE), false));
    }

    #[test]
    fn a_frame_in_parts_is_judged_when_it_is_whole() {
        let mut prediction = Prediction::new(Some(ONE.0));
        prediction.arrived();
        let (guest, _) = prediction.guess().unwrap();
        prediction.announced(guest);
        let mut recipients = Recipients::expecting(Some(ONE));
        assert_eq!(prediction.learn(&recipients, 0, false), None);
        assert!(prediction.is_announced());
        recipients.add(ONE);
        assert_eq!(prediction.learn(&recipients, 60_000, true), None);
        assert!(!prediction.is_announced());
        // An event without data.
        prediction.arrived();
        prediction.announced(prediction.expected().unwrap());
        assert_eq!(prediction.learn(&Recipients::expecting(Some(ONE)), 0, true), Some(ONE));
    }
}
