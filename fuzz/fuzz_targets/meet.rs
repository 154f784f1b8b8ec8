//! What hosts say that meet by a third one, and registrations with it, from arbitrary bytes.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vnet::link::fuzz::meeting(data));
