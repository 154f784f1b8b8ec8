//! Requests to vnetd's API in any order, by any caller, with any parameters and bodies.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vnetd::fuzz::requests(data));
