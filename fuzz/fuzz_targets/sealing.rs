//! Packets of hostile peers, and a daemon's answers in any order, for the interconnect's sealing.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    vnet_rdma::seal::fuzz::run(data);
    if let Some(message) = vnet_rdma::meeting::Message::decode(data) {
        let (bytes, len) = message.encode();
        assert_eq!(&bytes[..len], data);
    }
});
