//! When a guest receives, in answers.

use serde::{Deserialize, Serialize};

/// Times of the steps by which an interface's guest received, since the event that showed the data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Timeline {
    /// Name of the interface.
    pub interface: String,
    /// Number of receptions: bursts with frames for the guest that an event has shown.
    pub receptions: usize,
    /// The steps, in their order.
    pub steps: Vec<TimelineStep>,
}

/// A step of receptions.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct TimelineStep {
    /// `announced`: early notification, before the receive; `received`: from the source; `delivered`: into the guest's ring;
    /// `notified`: after the receive; `reacted`: the guest's next frame.
    pub step: String,
    /// Number of receptions in which it happened.
    pub count: usize,
    /// Median of its times in microseconds; 0 if it never happened.
    pub median_us: f64,
    /// Time in microseconds that nine of ten do not exceed.
    pub ninth_decile_us: f64,
}
