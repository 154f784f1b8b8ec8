//! Names of Ethernet stations, and frames of any station of the LAN, for the interconnect.
#![no_main]

use vnet_rdma::ether::address::{Bind, mac_of, name_of, parse, station};
use vnet_rdma::ether::frame::{HEADER, decode, header};

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    if let Ok(text) = std::str::from_utf8(data) {
        if let Some(Ok(address)) = parse(text) {
            let mac = mac_of(address).expect("a name gives a station");
            assert_eq!(
                (station(mac, address.port()), parse(&name_of(address))),
                (address, Some(Ok(address)))
            );
        }
        if let Ok(bind) = text.parse::<Bind>() {
            assert_eq!(bind.to_string().parse::<Bind>().as_ref(), Ok(&bind));
        }
    }
    let Some((port, frame)) = data.split_first_chunk() else { return };
    let (port, mut copy) = (u16::from_be_bytes(*port), frame.to_vec());
    if let Some(found) = decode(&mut copy, port) {
        let len = found.packet.len();
        assert!(len > 0 && found.source > 0);
        assert_eq!(frame[..HEADER], header(port, found.source, len as u16));
        assert_eq!(*found.packet, frame[HEADER..HEADER + len]);
    }
});
