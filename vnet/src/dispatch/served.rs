//! State of a source at its dispatcher: polled every turn, or resting until its guest notifies.
//!
//! ```text
//!              empty look, guest-driven: armed
//!    ready  ------------------------------------->  resting
//!  (looked at   <----------------------------------  (left alone until
//!  every turn)    the guest notified; VMM-driven      the guest notifies)
//! ```
//!
//! A source rests only after [`Source::rest`] succeeded: it requested a notification in the guest's ring and then found the ring
//! empty. So nothing is waiting, and the guest notifies of whatever it adds later. Before it sleeps in the kernel, a dispatcher
//! rests every source, VMM-driven ones too: it cannot poll while it sleeps.

use std::sync::Arc;
use std::time::Instant;

use super::arrival::Prediction;
use super::mode::{Drive, Driver};
use super::setup::{Feed, FeedKind};
use super::share::{Grant, Share};
use crate::frame::PortId;
use crate::source::Source;
use crate::stats::PortStats;

/// A source that a dispatcher serves.
pub(super) struct Served {
    /// Token of the source's wake-ups.
    pub(super) token: u64,
    /// The source's feed in the setup; `None` for a socket of the bridge, which is served until shutdown.
    pub(super) feed: Option<Feed>,
    pub(super) source: Box<dyn Source>,
    /// True when the source must be polled: it had frames last time, was woken, or is VMM-driven.
    pub(super) ready: bool,
    /// True when a notification has been requested and no frame taken since.
    armed: bool,
    driver: Driver,
    /// The source's share of the dispatcher; `None` for sources other than a guest's queues.
    pub(super) share: Option<Share>,
    /// True while a rate limit is reached: frames may be waiting, but need no look.
    pub(super) limited: bool,
    /// Whom the source's next frames are for.
    pub(super) prediction: Prediction,
    /// Time of the event since the last look, while receptions are recorded.
    pub(super) event: Option<Instant>,
}

impl Served {
    /// Creates the state of source `queue` of its interface.
    pub(super) fn new(
        token: u64,
        source: Box<dyn Source>,
        (drive, queue): (Drive, usize),
        now: Instant,
    ) -> Served {
        Served {
            token,
            feed: None,
            source,
            ready: true,
            armed: false,
            driver: Driver::new(drive, queue, now),
            share: None,
            limited: false,
            prediction: Prediction::default(),
            event: None,
        }
    }

    /// Counts the frames that a guest's port delivers in the rate that decides about its mode.
    pub(super) fn counting(self, port: Arc<PortStats>) -> Served {
        Served { driver: self.driver.counting(port), ..self }
    }

    /// The guest whose queue the source is.
    pub(super) fn guest(&self) -> Option<PortId> {
        let feed = self.feed.as_ref().filter(|feed| matches!(feed.kind, FeedKind::Interface(_)));
        feed.map(|feed| feed.port)
    }

    /// True when the source is polled every turn, notified or not.
    pub(super) fn is_polled(&self) -> bool {
        self.driver.is_vmm_driven()
    }

    /// Records that a poll returned `units` frames.
    #[inline]
    pub(super) fn looked(&mut self, units: usize, now: Instant) {
        self.driver.account(units, now);
        if units > 0 && self.armed {
            // The notification request covered only the frames just taken.
            self.source.resume();
            self.armed = false;
        }
        // A source that costs a system call per poll already knows that it is empty, even after a poll that returned frames.
        if !self.is_polled() && (units == 0 || !self.source.polls()) {
            self.rest();
        }
    }

    /// Advances the rate window without a poll: a resting source becomes ready when frames to its guest make it VMM-driven.
    pub(super) fn refresh(&mut self, now: Instant) {
        self.driver.account(0, now);
        self.resume();
    }

    /// What the source may take in this turn.
    #[inline]
    pub(super) fn grant(&mut self, now: Instant) -> Grant {
        let grant = self.share.as_mut().map_or(Grant::Cost(u64::MAX), |share| share.grant(now));
        self.limited = matches!(grant, Grant::At(_));
        grant
    }

    /// Lets the source rest until the guest notifies. Returns false when frames are waiting already.
    pub(super) fn rest(&mut self) -> bool {
        if self.limited {
            // It stays ready: the dispatcher wakes when the limit admits the next frame.
            return true;
        }
        if !self.armed || !self.source.polls() {
            self.armed = self.source.rest();
        }
        self.ready = !self.armed;
        self.armed
    }

    /// Records the guest's notification.
    pub(super) fn wake(&mut self) {
        if self.armed {
            self.source.resume();
            self.armed = false;
        }
        self.ready = true;
    }

    /// Makes polled sources ready again after the dispatcher has woken.
    pub(super) fn resume(&mut self) {
        self.ready |= self.is_polled();
    }

    /// Applies new drive settings.
    pub(super) fn set_drive(&mut self, drive: &Drive) {
        self.driver.set(drive);
        if let Some(share) = &mut self.share {
            share.set(drive.share);
        }
        self.resume();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dispatch::mode::{Mode, ModeSettings};
    use crate::frame::{BATCH_MAX, DropSink, NetworkId, Origin, PortId};
    use crate::interface::Interface;
    use crate::interface::fake::Fake;
    use crate::source::{BatchSlot, receive};
    use crate::wire::offload::Offload;
    use std::time::Duration;

    fn served(mode: Mode) -> (Served, Arc<Fake>, Instant) {
        let origin = Origin { port: PortId(0), network: NetworkId::DEFAULT };
        let fake = Fake::new(origin, 1500, 10, Arc::default()).unwrap();
        let (drive, now) = (Drive::new(ModeSettings { mode, ..ModeSettings::default() }, 1), Instant::now());
        (Served::new(0, fake.clone().source(0), (drive, 0), now), fake, now)
    }

    fn look(served: &mut Served, now: Instant) -> usize {
        let (mut slot, mut drops) = (BatchSlot::new(BATCH_MAX), DropSink::new());
        let units = receive(&mut *served.source, &mut slot, &mut drops, 0).taken.units;
        served.looked(units, now);
        units
    }

    #[test]
    fn guest_driven_rests_after_one_empty_look() {
        let (mut served, fake, now) = served(Mode::GuestDriven);
        fake.send([(vec![0; 60], Offload::default())]);
        assert_eq!(look(&mut served, now), 1);
        assert!(served.ready, "there may be more");
        assert_eq!(look(&mut served, now), 0);
        assert!(!served.ready);
        // A frame that arrives between poll and rest keeps the source awake.
        served.wake();
        fake.send([(vec![0; 60], Offload::default())]);
        assert!(!served.rest() && served.ready);
    }

    #[test]
    fn vmm_driven_rests_only_when_the_dispatcher_sleeps() {
        let (mut served, fake, now) = served(Mode::VmmDriven);
        for _ in 0..3 {
            assert_eq!(look(&mut served, now), 0);
            assert!(served.ready);
        }
        assert!(served.rest() && !served.ready);
        served.resume();
        assert!(served.ready);
        // The poll found the frame, not the notification: the next sleep must request a notification again.
        fake.send([(vec![0; 60], Offload::default())]);
        assert_eq!(look(&mut served, now), 1);
        assert!(!served.armed);
    }

    #[test]
    fn adaptive_goes_where_the_rate_is() {
        let (mut served, fake, now) = served(Mode::Adaptive);
        fake.send((0..60).map(|_| (vec![0; 60], Offload::default())));
        assert_eq!(look(&mut served, now + Duration::from_millis(5)), 60);
        assert!(served.is_polled());
        assert_eq!(look(&mut served, now + Duration::from_millis(6)), 0);
        assert!(served.ready);
        assert_eq!(look(&mut served, now + Duration::from_millis(10)), 0);
        assert!(!served.is_polled() && !served.ready && served.armed);
    }

    #[test]
    fn a_resting_guest_that_receives_much_is_polled() {
        let (served, _fake, now) = served(Mode::Adaptive);
        let port = Arc::new(PortStats::default());
        let mut served = served.counting(port.clone());
        assert_eq!(look(&mut served, now), 0);
        assert!(!served.ready);
        port.delivered(60, 0);
        served.refresh(now + Duration::from_millis(5));
        assert!(served.is_polled() && served.ready);
        assert_eq!(look(&mut served, now + Duration::from_millis(10)), 0);
        assert!(!served.is_polled() && !served.ready, "nothing more was delivered");
    }
}
