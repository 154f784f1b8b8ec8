//! The log of dirty pages: it names exactly the pages that frames were written to.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vnet::interface::virtqueue::fuzz_dirty::dirty(data));
