//! The part of vnetd that is a library: the overlay's store agent, which benchmarks run by the thousand.

pub mod store;
