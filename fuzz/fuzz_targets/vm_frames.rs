//! Control frames of a hostile guest, for the interconnect's daemon: a length of two bytes before each.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vnet_rdma::daemon::fuzz::alone(|| vnet_rdma::vm::fuzz::run(data)));
