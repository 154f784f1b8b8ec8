//! Sealed links that a running vnetd hands over with their keys.
//!
//! Invariants: see `vnet::link::fuzz::succession`.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| vnet::link::fuzz::succession(data));
