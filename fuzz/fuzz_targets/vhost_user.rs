//! Messages of a vhost-user front end in any order, with any descriptors; its guest and a dispatcher run between them.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vnet::interface::vhost_user::fuzz::messages(data));
