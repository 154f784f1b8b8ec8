//! A queue that a dispatcher serves: when it is looked at, and when its guest has to notify.
//!
//! ```text
//!              empty look, guest-driven: armed
//!    ready  ------------------------------------->  resting
//!  (looked at   <----------------------------------  (left alone until
//!  every turn)    the guest notified; VMM-driven      the guest notifies)
//! ```
//!
//! A queue rests only when [`Interface::arm`] has said yes: the request to notify is in the guest's ring, and after that the
//! ring was seen empty. So whatever the guest adds later it notifies of, and nothing is waiting now. A dispatcher that is
//! about to sleep in the kernel has every queue rest, VMM-driven ones too, since it cannot look while it sleeps.

use std::sync::Arc;
use std::time::Instant;

use super::mode::{Drive, Driver};
use crate::frame::PortId;
use crate::interface::Interface;

/// A queue that a dispatcher serves.
pub(super) struct Served {
    pub(super) port: PortId,
    pub(super) queue: usize,
    pub(super) interface: Arc<dyn Interface>,
    /// Worth a `receive`: it had frames last time, was woken, or is VMM-driven.
    pub(super) ready: bool,
    /// The guest has been asked to notify, and no frame was taken since.
    armed: bool,
    driver: Driver,
}

impl Served {
    pub(super) fn new(
        port: PortId,
        queue: usize,
        interface: Arc<dyn Interface>,
        drive: &Drive,
        now: Instant,
    ) -> Served {
        let driver = Driver::new(drive.clone(), queue, now);
        Served { port, queue, interface, ready: true, armed: false, driver }
    }

    /// By which it is woken.
    pub(super) fn token(&self) -> u64 {
        u64::from(self.port.0) << 16 | self.queue as u64
    }

    /// True when it is looked at every turn whether or not its guest notifies.
    pub(super) fn is_polled(&self) -> bool {
        self.driver.is_vmm_driven()
    }

    /// It was looked at and gave `taken` frames.
    #[inline]
    pub(super) fn looked(&mut self, taken: usize, now: Instant) {
        self.driver.account(taken, now);
        if taken > 0 && self.armed {
            // The request was for these: it says nothing of the next.
            self.interface.disarm(self.queue);
            self.armed = false;
        }
        // What costs a system call to look at says by itself that it is empty now, frames or not.
        if !self.is_polled() && (taken == 0 || !self.interface.polls()) {
            self.rest();
        }
    }

    /// Time went by without a look.
    pub(super) fn refresh(&mut self, now: Instant) {
        self.driver.account(0, now);
    }

    /// Leaves the queue until its guest notifies. False when frames are waiting already.
    pub(super) fn rest(&mut self) -> bool {
        if !self.armed || !self.interface.polls() {
            self.armed = self.interface.arm(self.queue);
        }
        self.ready = !self.armed;
        self.armed
    }

    /// The guest notified.
    pub(super) fn wake(&mut self) {
        if self.armed {
            self.interface.disarm(self.queue);
            self.armed = false;
        }
        self.ready = true;
    }

    /// The dispatcher is awake again: what it polls need not wait for a notification.
    pub(super) fn resume(&mut self) {
        self.ready |= self.is_polled();
    }

    /// Takes over other settings.
    pub(super) fn set_drive(&mut self, drive: &Drive) {
        self.driver.set(drive);
        self.resume();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dispatch::mode::{Mode, ModeSettings};
    use crate::frame::{Batch, NetworkId, Origin};
    use crate::interface::fake::Fake;
    use crate::wire::offload::Offload;
    use std::time::Duration;

    fn served(mode: Mode) -> (Served, Arc<Fake>, Instant) {
        let origin = Origin { port: PortId(0), network: NetworkId::DEFAULT };
        let fake = Fake::new(origin, 1500, 10, Arc::default()).unwrap();
        let (drive, now) = (Drive::new(ModeSettings { mode, ..ModeSettings::default() }, 1), Instant::now());
        (Served::new(PortId(0), 0, fake.clone(), &drive, now), fake, now)
    }

    fn look(served: &mut Served, now: Instant) -> usize {
        let taken = served.interface.receive(0, &mut Batch::new(), &mut |_| {});
        served.looked(taken, now);
        taken
    }

    #[test]
    fn guest_driven_rests_after_one_empty_look() {
        let (mut served, fake, now) = served(Mode::GuestDriven);
        fake.send([(vec![0; 60], Offload::default())]);
        assert_eq!(look(&mut served, now), 1);
        assert!(served.ready, "there may be more");
        assert_eq!(look(&mut served, now), 0);
        assert!(!served.ready);
        // A frame that came between look and rest keeps it awake.
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
        // Found by the look, not by the notification: the next sleep asks anew.
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
}
