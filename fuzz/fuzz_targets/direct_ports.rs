//! Announcements and trials of direct ports, from a hostile peer.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vnet::link::fuzz::direct_ports(data));
