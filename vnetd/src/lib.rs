//! vnetd as a library: the program itself, the overlay's store agent for load tests, and what fuzz targets need.

mod capture;
mod confine;
mod console;
pub mod daemon;
mod events;
mod follow;
#[cfg(feature = "test-util")]
pub mod fuzz;
mod gate;
mod guests;
mod handlers;
#[cfg(any(test, feature = "test-util"))]
pub mod hostile_guests;
mod interface_watch;
mod meetings;
mod metrics;
mod overlay;
mod paced;
mod privileges;
mod rdma_engine;
#[cfg(test)]
mod reference;
mod remote;
mod script;
mod sealing;
mod serve;
mod shared;
pub mod store;
mod take_over;
mod timeline;
mod tls;
mod watchdog;
