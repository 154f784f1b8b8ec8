//! Packets of hostile peers, whole and in parts, and a daemon's answers in any order, for the interconnect's sealing.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    vnet_rdma::seal::fuzz::run(data);
    vnet_rdma::seal::fuzz::run_parts(data);
    if let Some(message) = vnet_rdma::meeting::Message::decode(data) {
        let (bytes, len) = message.encode();
        assert_eq!(&bytes[..len], data);
    }
});
