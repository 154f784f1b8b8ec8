//! Sealed links: handshake messages, certificates and keepalives from arbitrary bytes.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vnet::link::fuzz::handshake(data));
