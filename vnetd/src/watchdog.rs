//! The service manager's watchdog (`WatchdogSec` of the unit): signs of life as long as every dispatcher is alive.
//!
//! A dispatcher that hangs stalls its guests without ending the daemon. The service manager gets no more signs of life then,
//! aborts vnetd and starts it anew. The signs come from vnetd's main thread: requests that block it for too long count as well.

use std::time::Duration;

use sd_notify::NotifyState;
use vnet::dispatch::core::Pulse;

/// Signs of life in each period of the watchdog.
const SIGNS: u32 = 4;
/// A dispatcher that has been silent for the period divided by this hangs.
const SILENCE: u32 = 2;

/// Reports signs of life to the service manager, for ever.
pub async fn serve(period: Duration, pulse: Pulse) {
    let mut interval = tokio::time::interval(period / SIGNS);
    loop {
        interval.tick().await;
        match pulse.silent_for(period / SILENCE) {
            None => notify(&[NotifyState::Watchdog]),
            Some(id) => tracing::error!(
                "dispatcher {id} has hung for more than {:?}: no sign of life for the service manager",
                period / SILENCE
            ),
        }
    }
}

/// Sends a state to the service manager, if vnetd has one.
pub fn notify(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::warn!("cannot notify the service manager: {error}");
    }
}
