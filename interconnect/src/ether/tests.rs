//! Names, the frame's parser, and the filter as the kernel runs it.

use std::net::SocketAddr;
use std::os::unix::net::UnixDatagram;
use std::time::Duration;

use super::address::{Bind, mac_of, name_of, parse, station};
use super::filter;
use super::frame::{HEADER, Mac, decode, header};
use crate::vm::Token;

const MAC: Mac = [2, 0, 0, 0, 0xab, 1];
const PORT: u16 = 7000;
/// A packet of the protocol: an acknowledgement.
const PACKET: [u8; 16] = [0x13, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0, 0];

/// A frame of the node at port 9 to the one at `PORT`.
fn frame() -> Vec<u8> {
    [&header(PORT, 9, PACKET.len() as u16)[..], &PACKET].concat()
}

#[test]
fn names_of_stations_are_those_that_are_parsed() {
    let address = station(MAC, PORT);
    assert_eq!(address.to_string(), "[fe80::ff:fe00:ab01]:7000");
    assert_eq!((mac_of(address), name_of(address).as_str()), (Some(MAC), "ether://02-00-00-00-ab-01:7000"));
    for name in ["ether://02-00-00-00-ab-01:7000", "ether://02:00:00:00:AB:01:7000"] {
        assert_eq!(parse(name), Some(Ok(address)), "{name}");
    }
    assert_eq!(parse("10.0.0.1:7000"), None);
    for wrong in [
        "ether://",
        "ether://eth0:7000",
        "ether://02-00-00-00-ab-01",
        "ether://02:00:00:00:ab:01",
        "ether://02-00-00-00-ab-01:0",
        "ether://02-00-00-00-ab-01:65536",
        "ether://02-00-00-00-ab:7000",
        "ether://02-00-00-00-ab-01-01:7000",
        "ether://02-00:00-00:ab-01:7000",
        "ether://2-00-00-00-ab-01:7000",
        "ether://+2-00-00-00-ab-01:7000",
        "ether://03-00-00-00-ab-01:7000",
        "ether://00-00-00-00-00-00:7000",
        "ether://ff-ff-ff-ff-ff-ff:7000",
    ] {
        assert!(matches!(parse(wrong), Some(Err(_))), "{wrong}");
    }
}

#[test]
fn every_station_has_an_address_of_its_own() {
    for mac in [[0, 0, 0, 0, 0, 1], [0xfe, 0xff, 0xff, 0xff, 0xff, 0xff], [0x52, 0x54, 0, 0xff, 0xfe, 3]] {
        assert_eq!(mac_of(station(mac, 1)), Some(mac));
    }
    assert_eq!(mac_of(station([3, 0, 0, 0, 0, 1], 1)), None, "a group's");
    for udp in
        ["10.0.0.1:1", "[fe80::1]:1", "[fe80::ff:fe00:1%2]:1", "[fe80:1::ff:fe00:1]:1", "[fd00::ff:fe00:1]:1"]
    {
        assert_eq!(mac_of(udp.parse::<SocketAddr>().unwrap()), None, "{udp}");
    }
}

#[test]
fn a_node_is_bound_to_a_udp_address_or_to_a_device() {
    for text in ["10.77.1.1:7000", "[::1]:0", "ether://eth0:7000", "ether://enp3s0f1:0"] {
        assert_eq!(text.parse::<Bind>().unwrap().to_string(), text);
    }
    let ethernet = Bind::Ethernet { device: "eth0.5".into(), port: 1 };
    assert_eq!("ether://eth0.5:1".parse(), Ok(ethernet));
    for wrong in [
        "",
        "eth0:7000",
        "ether://eth0",
        "ether://:7000",
        "ether://eth0:65536",
        "ether://a/b:1",
        "ether://a b:1",
    ] {
        let error = wrong.parse::<Bind>().unwrap_err().to_string();
        assert!(error.contains("ether://DEVICE:PORT") && !error.contains('\n'), "{error}");
    }
    assert!("ether://a23456789012345:1".parse::<Bind>().is_ok());
    assert!("ether://a234567890123456:1".parse::<Bind>().is_err(), "no device has such a name");
}

#[test]
fn a_frame_gives_its_packet_without_padding() {
    for padding in [0, 20, 1400] {
        let mut bytes = frame();
        bytes.resize(HEADER + PACKET.len() + padding, 0xaa);
        let found = decode(&mut bytes, PORT).unwrap();
        assert_eq!((found.source, &*found.packet), (9, &PACKET[..]));
    }
}

#[test]
fn frames_of_others_and_malformed_ones_give_nothing() {
    for len in 0..frame().len() {
        assert_eq!(decode(&mut frame()[..len], PORT), None, "cut at {len}");
    }
    assert_eq!(decode(&mut frame(), 9), None, "another node's");
    for (place, byte) in [(3, b'm'), (4, 0), (10, 0x20), (10, b'v')] {
        let mut bytes = frame();
        bytes[place] = byte;
        assert_eq!(decode(&mut bytes, PORT), None, "byte {place} is {byte}");
    }
    let mut of_port_0 = frame();
    of_port_0[6..8].fill(0);
    assert_eq!(decode(&mut of_port_0, PORT), None);
    let mut empty = frame();
    empty[8..10].fill(0);
    assert_eq!(decode(&mut empty, PORT), None, "no packet");
}

/// Which of these frames pass the filter.
fn left(frames: &[&[u8]]) -> Vec<usize> {
    let (from, to) = UnixDatagram::pair().unwrap();
    filter::attach(&to, PORT).unwrap();
    to.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
    let passes = |frame: &&[u8]| {
        from.send(frame).unwrap();
        let mut bytes = [0; 2000];
        to.recv(&mut bytes).is_ok_and(|len| bytes[..len] == **frame)
    };
    frames.iter().enumerate().filter(|(_, frame)| passes(frame)).map(|(place, _)| place).collect()
}

#[test]
fn the_kernel_leaves_only_frames_of_this_node() {
    let own = frame();
    let mut padded = own.clone();
    padded.resize(46, 0);
    let mut others = own.clone();
    others[5] ^= 1;
    let mut sealed = own.clone();
    sealed[HEADER] = 0x20;
    // As a helper sends it: `vrdm`, version 1, OPEN; the secret where the ports are.
    let mut control = b"vrdm\x01\x01\x00\x00".to_vec();
    control.extend([0; 8]);
    control.extend(Token::default());
    control.extend([0x10; 64]);
    assert_eq!(left(&[&own, &padded, &others, &sealed, &control, &own[..HEADER], &own[..5]]), [0, 1]);
}
