//! How an interface is driven and how its guest is notified: the keys of `[[interface]]` that may be changed while frames
//! flow, read, shown, and put into effect without opening the interface anew.

use std::fmt;

use super::api;
use super::desired::InterfaceSpec;
use super::table::{Problem, Reader};
use vnet::dispatch::mode::{Drive, Mode, ModeSettings};
use vnet::interface::interrupts::{InterruptSettings, Interrupts};
use vnet::route::STORM_FRAMES_PER_S;
use vnet::stats::PortStats;

const RATE_MAX: u32 = i32::MAX as u32;
const WINDOW_MAX_US: u32 = 10_000_000;
/// Bytes a second: 34 Gbit/s.
const DENSITY_MAX: u32 = u32::MAX;
/// What announces nothing early, whatever a dispatcher moves between two ends of coalescing.
const EARLY_BYTES_MAX: u32 = u32::MAX;

/// How an interface is driven and how its guest is notified.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Driving {
    /// `mode`, `rate_low`, `rate_high`, `window_us`
    pub mode: ModeSettings,
    /// `interrupts`, `receive_density_low`, `receive_density_high`, `early_bytes`
    pub interrupts: InterruptSettings,
}

impl Driving {
    /// Reads the keys; those that are not there stay as in `before`.
    pub(super) fn read(reader: &mut Reader<'_>, before: Driving) -> Driving {
        const MODES: [(&str, Option<Mode>); 3] = [
            ("guest-driven", Some(Mode::GuestDriven)),
            ("vmm-driven", Some(Mode::VmmDriven)),
            ("adaptive", Some(Mode::Adaptive)),
        ];
        const INTERRUPTS: [(&str, Option<Interrupts>); 2] =
            [("direct", Some(Interrupts::Direct)), ("optimistic", Some(Interrupts::Optimistic))];
        let Driving { mut mode, mut interrupts } = before;
        mode.mode = reader.word("mode", &MODES).map_or(mode.mode, |(_, word)| word);
        let place = reader.place_of("rate_high");
        mode.rate_low = reader.number("rate_low", 1, RATE_MAX).unwrap_or(mode.rate_low);
        mode.rate_high = reader.number("rate_high", 1, RATE_MAX).unwrap_or(mode.rate_high);
        mode.window_us = reader.number("window_us", 1, WINDOW_MAX_US).unwrap_or(mode.window_us);
        if mode.rate_low > mode.rate_high {
            let text = format!("rate_low {} exceeds rate_high {}; swap them", mode.rate_low, mode.rate_high);
            reader.problem(&place, text);
        }
        interrupts.interrupts =
            reader.word("interrupts", &INTERRUPTS).map_or(interrupts.interrupts, |(_, word)| word);
        let place = reader.place_of("receive_density_high");
        let low = reader.number("receive_density_low", 0, DENSITY_MAX);
        let high = reader.number("receive_density_high", 0, DENSITY_MAX);
        interrupts.density_low = low.map_or(interrupts.density_low, u64::from);
        interrupts.density_high = high.map_or(interrupts.density_high, u64::from);
        let early_bytes = reader.number("early_bytes", 0, EARLY_BYTES_MAX);
        interrupts.early_bytes = early_bytes.map_or(interrupts.early_bytes, u64::from);
        let InterruptSettings { density_low, density_high, .. } = interrupts;
        if density_low > density_high {
            let text = format!(
                "receive_density_low {density_low} exceeds receive_density_high {density_high}; swap them"
            );
            reader.problem(&place, text);
        }
        Driving { mode, interrupts }
    }

    /// Keys that mean nothing to a TAP, whose kernel notifies as it likes.
    pub(super) fn without_effect(reader: &Reader<'_>, tap: bool) -> Vec<Problem> {
        let keys = ["interrupts", "receive_density_low", "receive_density_high", "early_bytes"];
        let given = keys.into_iter().filter(|key| tap && reader.has(key));
        let text = |key| format!("{key} has no effect on kind tap: the kernel hands frames over at once");
        given.map(|key| Problem::new(&reader.place_of(key), text(key))).collect()
    }
}

impl fmt::Display for Driving {
    /// What differs from the defaults, each behind a comma.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Driving { mode, interrupts } = Driving::default();
        if self.mode.mode != mode.mode {
            write!(f, ", {}", self.mode.mode)?;
        }
        let ModeSettings { rate_low, rate_high, window_us, .. } = self.mode;
        if (rate_low, rate_high) != (mode.rate_low, mode.rate_high) {
            write!(f, ", rates {rate_low} to {rate_high}/s")?;
        }
        if window_us != mode.window_us {
            write!(f, ", window {window_us} us")?;
        }
        if self.interrupts.interrupts != interrupts.interrupts {
            write!(f, ", {} interrupts", self.interrupts.interrupts)?;
        }
        let InterruptSettings { density_low, density_high, early_bytes, .. } = self.interrupts;
        if (density_low, density_high) != (interrupts.density_low, interrupts.density_high) {
            write!(f, ", receive densities {density_low} to {density_high} bytes/s")?;
        }
        if early_bytes != interrupts.early_bytes {
            write!(f, ", early from {early_bytes} bytes")?;
        }
        Ok(())
    }
}

/// Reads the keys that can be changed while an interface is open; those that are not there stay as they are.
pub(super) fn read_change(reader: &mut Reader<'_>, spec: &mut InterfaceSpec) {
    spec.driving = Driving::read(reader, spec.driving);
    spec.storm_limit = reader.number("storm_limit", 1, RATE_MAX).unwrap_or(spec.storm_limit);
    if let Some((place, flag)) = reader.flag("port_security") {
        if flag && spec.mac.is_none() {
            reader.problem(&place, "port_security holds frames to the interface's address; give it a 'mac'");
        }
        spec.port_security = flag;
    }
}

/// The same spec with everything at its default that is not the interface's own, or can be changed while it is open.
pub(super) fn fixed_part(spec: &InterfaceSpec) -> InterfaceSpec {
    let (driving, storm_limit) = (Driving::default(), STORM_FRAMES_PER_S);
    InterfaceSpec { driving, storm_limit, port_security: false, addresses: vec![], ..spec.clone() }
}

/// What `vnet interface list` shows of it.
pub(super) fn view(driving: &Driving, drive: &Drive, queues: usize, stats: &PortStats) -> api::Driving {
    let Driving { mode, interrupts } = driving;
    let vmm_driven = drive.gauge.vmm_driven();
    let driven_by = match vmm_driven {
        0 => "guest",
        n if n == queues => "vmm",
        _ => "both",
    };
    let (notifications, frames) = (stats.notifications.get(), stats.out_frames.get());
    api::Driving {
        mode: mode.mode.to_string(),
        rate_low: mode.rate_low,
        rate_high: mode.rate_high,
        window_us: mode.window_us,
        driven_by: driven_by.into(),
        rate: drive.gauge.rate(),
        switches: drive.gauge.switches.get(),
        interrupts: interrupts.interrupts.to_string(),
        receive_density_low: interrupts.density_low,
        receive_density_high: interrupts.density_high,
        early_bytes: interrupts.early_bytes,
        notifications_per_1000_frames: notifications.saturating_mul(1000) / frames.max(1),
        interrupt_counters: (&stats.interrupts).into(),
    }
}
