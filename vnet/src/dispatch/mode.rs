//! Drive modes: guest-driven or VMM-driven (polled) interfaces (VNET/P section 4.3, figure 6).
//!
//! - *guest-driven*: the ring is not polled until the guest notifies. Best for occasional frames: no poll is wasted, and the
//!   notification wakes the dispatcher at once.
//! - *VMM-driven*: notifications are suppressed and the ring is polled every turn. Best for high rates: no frame costs the guest
//!   a notification, and each turn takes everything that is queued.
//! - *adaptive*: follows the rate of frames from and to the guest, measured over windows of at least omega. Above alpha_u the queue
//!   becomes VMM-driven, below alpha_l guest-driven; in between it keeps its mode (hysteresis). A guest that mostly receives answers
//!   what it gets: its ring is polled, too.
//!
//! Each queue has its own mode, because the queues of an interface may belong to different dispatchers. Switching cannot lose a
//! wake-up: a resting queue was armed, and arming fails when a frame is waiting already.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use super::share::{Limits, ShareSettings};
use crate::stats::{Counter, PortStats};

/// Drive mode of an interface.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Default, strum::Display, strum::EnumString, strum::VariantNames,
)]
#[strum(serialize_all = "kebab-case")]
pub enum Mode {
    /// The guest's notifications wake the dispatcher.
    GuestDriven,
    /// The dispatcher polls the ring every turn.
    VmmDriven,
    /// Switches between the two by frame rate.
    #[default]
    Adaptive,
}

/// A drive mode and its thresholds. The defaults are VNET/P's (table 1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModeSettings {
    /// The mode.
    pub mode: Mode,
    /// alpha_l in frames/s: below it a queue becomes guest-driven.
    pub rate_low: u32,
    /// alpha_u in frames/s: above it a queue becomes VMM-driven. Not less than `rate_low`.
    pub rate_high: u32,
    /// omega in microseconds: the minimum length of the window over which a rate is measured.
    pub window_us: u32,
}

impl Default for ModeSettings {
    fn default() -> ModeSettings {
        ModeSettings { mode: Mode::Adaptive, rate_low: 1_000, rate_high: 10_000, window_us: 5_000 }
    }
}

/// An interface's drive settings and their current state.
#[derive(Clone, Debug)]
pub struct Drive {
    /// The configured settings.
    pub settings: ModeSettings,
    /// The interface's share of its dispatchers.
    pub share: ShareSettings,
    /// The current state, shared by all setups that hold the interface.
    pub gauge: Arc<Gauge>,
}

impl Drive {
    /// Drive state for an interface with `queues` queues.
    pub fn new(settings: ModeSettings, queues: usize) -> Drive {
        let queues = (0..queues.max(1)).map(|_| QueueGauge::default()).collect();
        let (switches, limits) = (Counter::default(), Arc::default());
        Drive {
            settings,
            share: ShareSettings::default(),
            gauge: Arc::new(Gauge { queues, switches, limits }),
        }
    }
}

impl Default for Drive {
    fn default() -> Drive {
        Drive::new(ModeSettings::default(), 1)
    }
}

/// State of an interface's queues, for status output.
#[derive(Debug)]
pub struct Gauge {
    queues: Vec<QueueGauge>,
    /// Number of mode switches of all queues.
    pub switches: Counter,
    /// State of the rate limits.
    pub(super) limits: Arc<Limits>,
}

#[derive(Debug, Default)]
struct QueueGauge {
    vmm_driven: AtomicBool,
    rate: AtomicU64,
}

impl Gauge {
    /// Number of VMM-driven queues.
    pub fn vmm_driven(&self) -> usize {
        self.queues.iter().filter(|queue| queue.vmm_driven.load(Relaxed)).count()
    }

    /// True while the guest's frames wait, because they have more descriptors or segments than a driver needs (`share.rs`).
    pub fn has_excess(&self) -> bool {
        self.limits.has_excess()
    }

    /// Frames per second from and to the guest over the last windows, summed over all queues.
    pub fn rate(&self) -> u64 {
        self.queues.iter().map(|queue| queue.rate.load(Relaxed)).sum()
    }
}

/// One queue's current mode and rate window.
pub(super) struct Driver {
    drive: Drive,
    queue: usize,
    vmm_driven: bool,
    window_start: Instant,
    /// Frames from the guest in this window.
    frames: u64,
    /// Counters of the guest's port, and the frames delivered to it when the window began.
    port: Option<(Arc<PortStats>, u64)>,
}

impl Driver {
    /// Creates the driver of queue `queue` of its interface.
    pub(super) fn new(drive: Drive, queue: usize, now: Instant) -> Driver {
        let vmm_driven = drive.settings.mode == Mode::VmmDriven;
        let driver = Driver { drive, queue, vmm_driven, window_start: now, frames: 0, port: None };
        driver.show(0);
        driver
    }

    /// Counts the frames that a port delivers, too.
    pub(super) fn counting(self, port: Arc<PortStats>) -> Driver {
        let delivered = port.out_frames.get();
        Driver { port: Some((port, delivered)), ..self }
    }

    /// True when the queue is polled every turn.
    #[inline]
    pub(super) fn is_vmm_driven(&self) -> bool {
        self.vmm_driven
    }

    /// Applies new settings.
    pub(super) fn set(&mut self, drive: &Drive) {
        if self.drive.settings != drive.settings {
            self.drive.settings = drive.settings;
            match drive.settings.mode {
                Mode::GuestDriven => self.switch(false),
                Mode::VmmDriven => self.switch(true),
                Mode::Adaptive => {}
            }
        }
    }

    /// Counts `frames` frames of one poll; ends the window when it is long enough.
    #[inline]
    pub(super) fn account(&mut self, frames: usize, now: Instant) {
        self.frames += frames as u64;
        let length = now.saturating_duration_since(self.window_start);
        if length >= Duration::from_micros(self.drive.settings.window_us.into()) {
            self.judge(length);
            self.window_start = now;
            self.frames = 0;
        }
    }

    /// Compares the rate with the thresholds (VNET/P, figure 6).
    fn judge(&mut self, length: Duration) {
        let frames = self.frames + self.delivered();
        let rate = frames.saturating_mul(1_000_000) / (length.as_micros() as u64).max(1);
        let ModeSettings { mode, rate_low, rate_high, .. } = self.drive.settings;
        if mode == Mode::Adaptive {
            if rate > u64::from(rate_high) {
                self.switch(true);
            } else if rate < u64::from(rate_low) {
                self.switch(false);
            }
        }
        self.show(rate);
    }

    /// Frames delivered to the guest in this window: an equal share for each of its queues, over which flows are spread.
    fn delivered(&mut self) -> u64 {
        let Some((port, before)) = &mut self.port else { return 0 };
        let now = port.out_frames.get();
        let frames = now.saturating_sub(std::mem::replace(before, now));
        frames / self.drive.gauge.queues.len() as u64
    }

    fn switch(&mut self, vmm_driven: bool) {
        if self.vmm_driven != vmm_driven {
            self.vmm_driven = vmm_driven;
            self.drive.gauge.switches.add(1);
            if let Some(gauge) = self.drive.gauge.queues.get(self.queue) {
                gauge.vmm_driven.store(vmm_driven, Relaxed);
            }
        }
    }

    fn show(&self, rate: u64) {
        if let Some(gauge) = self.drive.gauge.queues.get(self.queue) {
            gauge.vmm_driven.store(self.vmm_driven, Relaxed);
            gauge.rate.store(rate, Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn driver(mode: Mode) -> (Driver, Drive, Instant) {
        let settings = ModeSettings { mode, ..ModeSettings::default() };
        let (drive, start) = (Drive::new(settings, 1), Instant::now());
        (Driver::new(drive.clone(), 0, start), drive, start)
    }

    #[test]
    fn the_rate_decides_with_hysteresis() {
        let (mut driver, drive, start) = driver(Mode::Adaptive);
        // Frames in each window of 5 ms, and the mode at its end: 51 are 10 200/s, 50 are 10 000/s, 5 are 1 000/s.
        let windows = [(50, false), (51, true), (50, true), (5, true), (4, false), (5, false), (51, true)];
        for (i, (frames, vmm_driven)) in (1..).zip(windows) {
            driver.account(frames, start + Duration::from_micros(5_000 * i - 1));
            driver.account(0, start + Duration::from_micros(5_000 * i));
            assert_eq!(driver.is_vmm_driven(), vmm_driven, "window {i}");
            assert_eq!(drive.gauge.rate(), frames as u64 * 200);
            assert_eq!(drive.gauge.vmm_driven(), usize::from(vmm_driven));
        }
        assert_eq!(drive.gauge.switches.get(), 3);
    }

    #[test]
    fn frames_to_the_guest_count_like_those_from_it() {
        let (drive, start) = (Drive::new(ModeSettings::default(), 2), Instant::now());
        let port = Arc::new(PortStats::default());
        port.delivered(1_000_000, 0);
        let mut driver = Driver::new(drive.clone(), 0, start).counting(port.clone());
        // Of 80 frames, 40 are this queue's: with 11 from the guest, 51 in 5 ms are 10 200/s.
        let windows = [(80, 10, false), (80, 11, true), (12, 0, true), (0, 4, false), (102, 0, true)];
        for (i, (to, from, vmm_driven)) in (1..).zip(windows) {
            port.delivered(to, 0);
            driver.account(from, start + Duration::from_millis(5 * i));
            assert_eq!(driver.is_vmm_driven(), vmm_driven, "window {i}");
            assert_eq!(drive.gauge.rate(), (to / 2 + from as u64) * 200);
        }
    }

    #[test]
    fn a_window_that_was_slept_through_counts_whole() {
        let (mut driver, _, start) = driver(Mode::Adaptive);
        driver.account(500, start + Duration::from_millis(5));
        assert!(driver.is_vmm_driven());
        // 64 frames at once after a second of silence are not a high rate.
        driver.account(64, start + Duration::from_millis(1_005));
        assert!(!driver.is_vmm_driven());
    }

    #[test]
    fn a_fixed_mode_stays() {
        for (mode, vmm_driven) in [(Mode::GuestDriven, false), (Mode::VmmDriven, true)] {
            let (mut driver, drive, start) = driver(mode);
            for (ms, frames) in [(5, 1_000_000), (10, 0), (2_000, 0)] {
                driver.account(frames, start + Duration::from_millis(ms));
                assert_eq!(driver.is_vmm_driven(), vmm_driven);
            }
            assert_eq!(drive.gauge.switches.get(), 0);
            let other = if vmm_driven { Mode::GuestDriven } else { Mode::VmmDriven };
            driver.set(&Drive { settings: ModeSettings { mode: other, ..drive.settings }, ..drive.clone() });
            assert_eq!(driver.is_vmm_driven(), !vmm_driven);
            assert_eq!((drive.gauge.switches.get(), drive.gauge.vmm_driven()), (1, usize::from(!vmm_driven)));
        }
    }
}
