//! Arbitrary datagrams at an interface's own UDP port, up to the decision whether to receive in place.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vnet::dispatch::in_place::fuzz::peeked(data));
