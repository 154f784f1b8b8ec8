//! When the steps happen by which a guest receives, from the arrival of its data to its reaction (`vnet interface timeline`).
//!
//! ```text
//!   event of the source -- announced -- received -- delivered -- notified -- reacted
//!   0                      early        from the    into the     if still    the guest's next frame
//!                          interrupt    source      guest's ring needed
//! ```
//!
//! A *reception* begins with an event of a source. It counts if the source's burst brings the guest a frame, and ends with the
//! guest's next frame, or with the next reception. A notification shows by the guest's counter after each step, so that of a
//! delivery is as late as its end. Only dispatchers that notice the event and the reaction themselves record them: with several,
//! reactions at another dispatcher's queue are missing.
//!
//! The recording is an observer of the setup. Without one, a turn costs one check of an empty option per source.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::frame::PortId;
use crate::stats::PortStats;

/// Maximum number of receptions of a recording; later ones are not recorded. Ten minutes of pings at 100 a second.
pub const RECEPTIONS_MAX: usize = 65_536;
const STEPS: usize = 5;

/// A step of a reception.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::Display, strum::VariantArray)]
#[strum(serialize_all = "lowercase")]
pub enum Step {
    /// The guest was notified before the data was received.
    Announced,
    /// The data was received from its source.
    Received,
    /// The guest's frames were in its ring.
    Delivered,
    /// The guest was notified after the data was received.
    Notified,
    /// The guest's next frame arrived.
    Reacted,
}

/// Times of a reception's steps since its event, in ns; `None`: the step did not happen.
type Times = [Option<u32>; STEPS];

/// A recording of a guest's receptions, shared by control and the dispatchers.
pub struct Timeline {
    port: PortId,
    receptions: Mutex<Vec<Times>>,
}

/// How often a step happened, and when.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepTimes {
    /// The step.
    pub step: Step,
    /// Number of receptions in which it happened.
    pub count: usize,
    /// Median of its times since the event in us, and the time that nine of ten do not exceed; 0 if it never happened.
    pub us: (f64, f64),
}

impl Timeline {
    /// A recording of the guest at `port`.
    pub fn new(port: PortId) -> Timeline {
        // Room for all of them: dispatchers do not allocate.
        Timeline { port, receptions: Mutex::new(Vec::with_capacity(RECEPTIONS_MAX)) }
    }

    /// The guest's port.
    pub fn port(&self) -> PortId {
        self.port
    }

    /// Number of receptions, and the times of each step.
    pub fn summary(&self) -> (usize, Vec<StepTimes>) {
        let receptions = self.receptions.lock().clone();
        let of = |step: &Step| {
            let mut ns: Vec<u32> = receptions.iter().filter_map(|times| times[*step as usize]).collect();
            ns.sort_unstable();
            let at = |share: usize| {
                let last = ns.len().checked_sub(1);
                last.map_or(0.0, |last| f64::from(ns[last * share / 100]) / 1000.0)
            };
            StepTimes { step: *step, count: ns.len(), us: (at(50), at(90)) }
        };
        let steps = <Step as strum::VariantArray>::VARIANTS.iter().map(of).collect();
        (receptions.len(), steps)
    }

    fn add(&self, times: Times) {
        let mut receptions = self.receptions.lock();
        if receptions.len() < RECEPTIONS_MAX {
            receptions.push(times);
        }
    }
}

/// A reception under way.
#[derive(Clone, Copy)]
struct Reception {
    event: Instant,
    times: Times,
}

impl Reception {
    /// Records the first time of a step.
    fn note(&mut self, step: Step, at: Instant) {
        let ns = at.saturating_duration_since(self.event).min(Duration::from_secs(4)).as_nanos() as u32;
        self.times[step as usize].get_or_insert(ns);
    }
}

/// Records a guest's receptions at one dispatcher.
pub(super) struct Recorder {
    timeline: Arc<Timeline>,
    /// Counters of the guest's port.
    stats: Arc<PortStats>,
    /// The guest's notifications at the last look.
    notifications: u64,
    /// Of the current burst.
    current: Option<Reception>,
    /// Delivered; the guest's reaction is missing.
    open: Option<Reception>,
}

impl Recorder {
    pub(super) fn new(timeline: Arc<Timeline>, stats: Arc<PortStats>) -> Recorder {
        Recorder { timeline, stats, notifications: 0, current: None, open: None }
    }

    /// True if this records for `timeline`.
    pub(super) fn is_of(&self, timeline: &Arc<Timeline>) -> bool {
        Arc::ptr_eq(&self.timeline, timeline)
    }

    /// A source is about to be looked at, because of an event at `event`, if any.
    pub(super) fn begin(&mut self, event: Option<Instant>) {
        self.current = event.map(|event| Reception { event, times: [None; STEPS] });
        self.notifications = self.stats.notifications.get();
    }

    /// The guest of the source's data may have been notified early.
    pub(super) fn announced(&mut self, now: Instant) {
        if self.has_notified()
            && let Some(current) = &mut self.current
        {
            current.note(Step::Announced, now);
        }
    }

    /// Frames were received at `now`; `from`: the guest whose frames they are. `event`: the event that showed them.
    pub(super) fn received(&mut self, from: Option<PortId>, event: Option<Instant>, now: Instant) {
        if let Some(current) = &mut self.current {
            current.note(Step::Received, now);
        }
        if from == Some(self.timeline.port)
            && let Some(mut open) = self.open.take()
        {
            open.note(Step::Reacted, event.unwrap_or(now));
            self.timeline.add(open.times);
        }
    }

    /// Frames were delivered to the guest at `port`.
    pub(super) fn delivered(&mut self, port: PortId, now: Instant) {
        if port != self.timeline.port {
            return;
        }
        if let Some(mut current) = self.current.take() {
            current.note(Step::Delivered, now);
            if let Some(before) = self.open.replace(current) {
                self.timeline.add(before.times);
            }
        }
        self.notified(now);
    }

    /// The guest may have been notified.
    pub(super) fn notified(&mut self, now: Instant) {
        if self.has_notified()
            && let Some(open) = &mut self.open
        {
            open.note(Step::Notified, now);
        }
    }

    fn has_notified(&mut self) -> bool {
        let now = self.stats.notifications.get();
        std::mem::replace(&mut self.notifications, now) != now
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        if let Some(open) = self.open.take() {
            self.timeline.add(open.times);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GUEST: PortId = PortId(3);

    fn recorder() -> (Recorder, Arc<Timeline>, Arc<PortStats>) {
        let (timeline, stats) = (Arc::new(Timeline::new(GUEST)), Arc::new(PortStats::default()));
        (Recorder::new(timeline.clone(), stats.clone()), timeline, stats)
    }

    /// Count and median of each step.
    fn found(timeline: &Timeline) -> Vec<(usize, f64)> {
        timeline.summary().1.iter().map(|times| (times.count, times.us.0)).collect()
    }

    #[test]
    fn steps_are_told_apart_by_notifications() {
        let (mut recorder, timeline, stats) = recorder();
        let start = Instant::now();
        let at = |us| start + Duration::from_micros(us);
        // Early: notified before the receive, not again.
        recorder.begin(Some(start));
        stats.notifications.add(1);
        recorder.announced(at(2));
        recorder.received(None, Some(start), at(5));
        recorder.delivered(GUEST, at(7));
        recorder.notified(at(8));
        // Another source's burst in between, for another guest.
        recorder.begin(Some(at(9)));
        recorder.announced(at(9));
        recorder.received(None, Some(at(9)), at(10));
        recorder.delivered(PortId(4), at(11));
        // The guest's reaction, which notifies it of its own ring's progress.
        recorder.begin(Some(at(50)));
        recorder.received(Some(GUEST), Some(at(50)), at(52));
        stats.notifications.add(1);
        recorder.notified(at(53));
        assert_eq!(found(&timeline), [(1, 2.0), (1, 5.0), (1, 7.0), (0, 0.0), (1, 50.0)]);
        // Direct: notified by the delivery, or at the end of coalescing; no reaction before the next reception.
        for late in [0, 3] {
            recorder.begin(Some(at(100)));
            recorder.announced(at(100));
            recorder.received(None, Some(at(100)), at(103));
            stats.notifications.add(u64::from(late == 0));
            recorder.delivered(GUEST, at(106));
            stats.notifications.add(u64::from(late != 0));
            recorder.notified(at(106 + late));
        }
        drop(recorder);
        assert_eq!(timeline.summary().0, 3);
        assert_eq!(found(&timeline), [(1, 2.0), (3, 3.0), (3, 6.0), (2, 6.0), (1, 50.0)]);
        let notified = timeline.summary().1[Step::Notified as usize];
        assert_eq!(notified, StepTimes { step: Step::Notified, count: 2, us: (6.0, 6.0) });
    }

    #[test]
    fn a_recording_is_bounded() {
        let timeline = Timeline::new(GUEST);
        (0..RECEPTIONS_MAX + 10).for_each(|_| timeline.add([Some(1000); STEPS]));
        assert_eq!(timeline.summary().0, RECEPTIONS_MAX);
        assert_eq!(found(&timeline), [(RECEPTIONS_MAX, 1.0); STEPS]);
        assert_eq!(found(&Timeline::new(GUEST)), [(0, 0.0); STEPS]);
    }

    #[test]
    fn data_without_an_event_is_not_recorded() {
        let (mut recorder, timeline, _) = recorder();
        recorder.begin(None);
        recorder.received(None, None, Instant::now());
        recorder.delivered(GUEST, Instant::now());
        drop(recorder);
        assert_eq!(timeline.summary().0, 0);
    }
}
