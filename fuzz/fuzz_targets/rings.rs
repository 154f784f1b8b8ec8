//! Virtqueues in hostile guest memory: frames are received from them and delivered to them.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vnet::interface::virtqueue::fuzz::rings(data));
