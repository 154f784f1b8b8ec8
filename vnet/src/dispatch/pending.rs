//! Guests with a pending interrupt decision: which of them received frames since the last end of coalescing, and which must be
//! checked because they were not notified then. Each list holds a queue at most once, so the number of queues bounds both.
//!
//! Coalescing ends for a guest when the source of its frames is drained, whatever other sources do.

use std::time::{Duration, Instant};

use super::arrival::{GuestQueue, Prediction, Recipients};
use super::setup::{InterfacePort, Setup};
use crate::frame::{DropSink, Selection};
use crate::interface::Coalesce;

/// A queue that received frames, or was told that they arrive, since the last end of coalescing.
struct Delivered {
    guest: GuestQueue,
    /// A source whose frames it received in this turn is not drained.
    more: bool,
}

/// Pending interrupt decisions of one dispatcher.
#[derive(Default)]
pub(super) struct Pending {
    delivered: Vec<Delivered>,
    /// Queues that were not notified at the end of coalescing, with the time of their check.
    checks: Vec<(GuestQueue, Instant)>,
    /// Time of the next check.
    due: Option<Instant>,
    /// The current burst's.
    recipients: Recipients,
    /// The source of the current burst is not drained.
    more: bool,
}

/// The guest of `port`, if it has optimistic interrupts.
fn coalescing(port: &InterfacePort) -> Option<&dyn Coalesce> {
    port.interface.coalesce().filter(|guest| guest.coalesces())
}

/// The guest at a queue's port.
fn guest_at(setup: &Setup, guest: GuestQueue) -> Option<&dyn Coalesce> {
    setup.interface(guest.0)?.interface.coalesce()
}

impl Pending {
    /// Notifies the guest that a source's arriving data is predicted to be for, before the data is received.
    #[inline]
    pub(super) fn announce(&mut self, setup: &Setup, prediction: &mut Prediction) {
        if let Some((guest, bytes)) = prediction.guess()
            && let Some(port) = setup.interface(guest.0)
            && coalescing(port).is_some_and(|coalesce| coalesce.announce(guest.1, bytes))
        {
            prediction.announced(guest);
        }
        self.recipients = Recipients::expecting(prediction.expected());
    }

    /// Records the state of the source of the current burst.
    #[inline]
    pub(super) fn received(&mut self, drained: bool) {
        self.more = !drained;
    }

    /// Learns from the current burst of `bytes` bytes whom the source's next one is for.
    #[inline]
    pub(super) fn learn(&mut self, setup: &Setup, prediction: &mut Prediction, bytes: u64) {
        if let Some(guest) = prediction.expected().filter(|_| prediction.is_announced()) {
            // Its early interrupt ends with the burst, even if no frame follows.
            self.await_end(guest);
        }
        let wrong = prediction.learn(&self.recipients, bytes, !self.more);
        if let Some(port) = wrong.and_then(|guest| setup.interface(guest.0)) {
            port.stats.interrupts.early_mispredicted.add(1);
        }
    }

    /// Delivers to an interface and notes the pending interrupt. All deliveries to interfaces pass here.
    #[inline]
    pub(super) fn give(
        &mut self,
        port: &InterfacePort,
        queue: usize,
        frames: Selection<'_>,
        drops: &mut DropSink,
    ) {
        port.interface.deliver(queue, frames, drops);
        self.note(port, queue);
    }

    /// Notes that a delivery may need an interrupt.
    #[inline]
    pub(super) fn note(&mut self, port: &InterfacePort, queue: usize) {
        if coalescing(port).is_some() {
            let guest = (port.member.port, queue);
            self.recipients.add(guest);
            self.await_end(guest);
        }
    }

    /// Notes deliveries in place to several queues, the last one to `queue`.
    pub(super) fn landed(&mut self, port: &InterfacePort, queue: usize) {
        self.note(port, queue);
        if coalescing(port).is_some() {
            (0..port.interface.active_queues()).for_each(|queue| self.await_end((port.member.port, queue)));
        }
    }

    fn await_end(&mut self, guest: GuestQueue) {
        match self.delivered.iter_mut().find(|delivered| delivered.guest == guest) {
            Some(delivered) => delivered.more |= self.more,
            None => self.delivered.push(Delivered { guest, more: self.more }),
        }
    }

    /// Ends coalescing for guests whose sources are drained; for all guests if `all`.
    #[inline]
    pub(super) fn end(&mut self, setup: &Setup, all: bool) {
        if self.delivered.is_empty() {
            return;
        }
        let mut delivered = std::mem::take(&mut self.delivered);
        delivered.retain_mut(|Delivered { guest, more }| {
            // A source that stays undrained says so again in the next turn.
            let stays = std::mem::take(more) && !all;
            if !stays {
                self.end_of(setup, *guest);
            }
            stays
        });
        self.delivered = delivered;
    }

    fn end_of(&mut self, setup: &Setup, guest: GuestQueue) {
        let Some(coalesce) = guest_at(setup, guest) else { return };
        if let Some(time) = coalesce.end_of_coalescing(guest.1)
            && !self.checks.iter().any(|check| check.0 == guest)
        {
            let at = Instant::now() + time;
            self.checks.push((guest, at));
            self.due = Some(self.due.map_or(at, |due| due.min(at)));
        }
    }

    /// Runs the checks that are due at `now`.
    pub(super) fn check(&mut self, setup: &Setup, now: Instant) {
        self.keep_checks(|guest, at| {
            let due = at <= now;
            if let Some(coalesce) = guest_at(setup, guest).filter(|_| due) {
                coalesce.check(guest.1);
            }
            !due
        });
    }

    /// Drops the checks of guests whose rings show that they have reacted.
    pub(super) fn drop_settled(&mut self, setup: &Setup) {
        if self.due.is_some() {
            self.keep_checks(|guest, _| {
                guest_at(setup, guest).is_some_and(|coalesce| !coalesce.has_reacted(guest.1))
            });
        }
    }

    fn keep_checks(&mut self, mut keeps: impl FnMut(GuestQueue, Instant) -> bool) {
        self.checks.retain(|(guest, at)| keeps(*guest, *at));
        self.due = self.checks.iter().map(|check| check.1).min();
    }

    /// Time until the next check; `None`: none is pending.
    #[inline]
    pub(super) fn time_to_check(&self) -> Option<Duration> {
        Some(self.due?.saturating_duration_since(Instant::now()))
    }
}
