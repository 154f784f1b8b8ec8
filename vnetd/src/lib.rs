//! The part of vnetd that is a library: the overlay's store agent, so that load tests can run many of them.

pub mod store;
