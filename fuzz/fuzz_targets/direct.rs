//! The beginning of what comes to an interface's own port, from arbitrary bytes.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vnet::link::fuzz::direct(data));
