//! Rendezvous: messages between hosts and relay, and registrations, from arbitrary bytes.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vnet::link::fuzz::meeting(data));
