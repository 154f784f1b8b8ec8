//! Entries that a hostile process writes for the interconnect's engine in the daemon: 128 bytes each.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vnet_rdma::daemon::fuzz::alone(|| vnet_rdma::daemon::fuzz::run(
    data
)));
