//! A running vnetd hands interfaces, sockets and state to a new one (`vnetd --take-over`), which then moves the frames.
//!
//! ```text
//!   new                                      running
//!   checks its configuration file
//!   Hello             ------------------->   checks that everything can be handed over
//!                     <-------------------   Estate, Descriptors ...
//!   opens everything, without dispatchers
//!   Prepared          ------------------->   stands still: frames wait in the kernel's queues
//!                     <-------------------   Last: counters, learned addresses; sealed links with their keys
//!   Begins            ------------------->
//!   publishes its first setup: frames flow
//!   Running           ------------------->   ends
//! ```
//!
//! Until the running vnetd has ended, it can go on: it keeps all descriptors, and the new one removes nothing. It goes on when the new one
//! refuses, ends or is late; a late one is killed first, so that no frame has two readers. Keys of sealed links go on there only if the new
//! one had not begun ([`vnet::link::succession`] has the proof that no nonce is used twice).
//!
//! - `state`: what is handed over; [`message`]: its form on the socket.
//! - `giving`: the running vnetd's part of the engine; `taking`: the new one's. vnetd does the talking.

mod giving;
pub mod message;
mod state;
mod taking;
#[cfg(test)]
mod tests;

pub use giving::Given;
pub use state::{Estate, Last, LastState, Positions};
pub use taking::Taking;
