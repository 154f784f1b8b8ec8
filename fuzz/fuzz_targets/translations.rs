//! Offers and acceptances of translations, from a hostile peer.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vnet::link::fuzz::translations(data));
