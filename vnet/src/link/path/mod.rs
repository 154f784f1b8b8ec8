//! What the path to another host is like, and who finds out.
//!
//! ```text
//!   prober thread: every 50 ms --- probes ---> the other host        (link_health.rs, pmtu.rs)
//!        |  once a second, or when a sender asks
//!        v
//!   watch.rs: route, MTU (connect, getsockopt), device speed (netlink), buffer sizes
//!        |  stores
//!        v
//!   state.rs: atomics of one link  <--- loads --- senders
//! ```
//!
//! Nobody else writes what a path is like. A sender whose datagram turns out to be larger than the path MTU asks for another look
//! ([`state::Path::learn`]), which wakes the prober, and goes on with a size that nearly every path carries.

pub(in crate::link) mod device;
pub mod link_health;
mod pmtu;
pub mod prober;
pub(in crate::link) mod route;
pub(in crate::link) mod state;
pub mod watch;
