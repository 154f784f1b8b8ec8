//! What of vnetd other programs use: the agent between the overlay's store and a host, which benchmarks run by the thousand.

pub mod store;
