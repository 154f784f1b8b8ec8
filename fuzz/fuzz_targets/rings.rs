//! Guest memory and virtqueues that a guest may write anything into: frames are taken and given through them.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vnet::interface::virtqueue::fuzz::rings(data));
