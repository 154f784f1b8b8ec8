//! Path state of links (route, path MTU, round trip, loss) and its measurement.
//!
//! ```text
//!   prober thread: every 50 ms --- probes ---> the other host        (probe_health.rs, pmtu.rs)
//!        |  once a second, or when a sender asks
//!        v
//!   watch.rs: route, MTU (connect, getsockopt), device speed (netlink), buffer sizes
//!        |  stores
//!        v
//!   state.rs: atomics of one link  <--- loads --- senders
//! ```
//!
//! Only this room writes path state. A sender whose datagram exceeds the path MTU requests a refresh ([`state::Path::learn`]),
//! which wakes the prober, and continues with a size that nearly every path carries.

pub(in crate::link) mod device_speed;
mod pmtu;
pub mod probe_health;
pub mod prober;
pub(in crate::link) mod route;
pub(in crate::link) mod state;
pub mod watch;
