//! Sealed packets of the interconnect in Ethernet frames: those that two applications seal end to end (docs/interconnect.md).

use std::net::{Ipv4Addr, SocketAddrV4};

use super::ethernet::{ETHERTYPE_IPV4, HEADER_LEN};
use super::ip::{IPV4_LEN_MIN, UDP};

/// First byte of a sealed packet.
pub const SEALED_PACKET: u8 = 0x20;
/// Bytes of a UDP header.
const UDP_LEN: usize = 8;
/// A first or later fragment.
const FRAGMENT: u16 = 0x3fff;
/// IPv4 without options.
const VERSION: u8 = 0x45;

/// Where sealed packets come from and go to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SealedDatagram {
    /// Their source.
    pub src: SocketAddrV4,
    /// Their destination.
    pub dst: SocketAddrV4,
}

impl SealedDatagram {
    /// Those of the other direction.
    #[must_use]
    pub fn reversed(self) -> SealedDatagram {
        SealedDatagram { src: self.dst, dst: self.src }
    }

    /// Reads an Ethernet frame, as `is_sealed_datagram` of the kernel's programs does; `None` for other frames. That the packet is
    /// authentic only its receiver knows.
    pub fn of_frame(frame: &[u8]) -> Option<SealedDatagram> {
        const IP: usize = HEADER_LEN;
        const UDP_AT: usize = IP + IPV4_LEN_MIN;
        let head: &[u8; UDP_AT + UDP_LEN + 1] = frame.first_chunk()?;
        let word = |at: usize| u16::from_be_bytes([head[at], head[at + 1]]);
        let address = |at: usize| Ipv4Addr::new(head[at], head[at + 1], head[at + 2], head[at + 3]);
        let is_it = word(IP - 2) == ETHERTYPE_IPV4
            && head[IP] == VERSION
            && head[IP + 9] == UDP
            && word(IP + 6) & FRAGMENT == 0
            && head[UDP_AT + UDP_LEN] == SEALED_PACKET;
        is_it.then(|| SealedDatagram {
            src: SocketAddrV4::new(address(IP + 12), word(UDP_AT)),
            dst: SocketAddrV4::new(address(IP + 16), word(UDP_AT + 2)),
        })
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::wire::ethernet::Mac;

    /// A frame with a sealed packet.
    pub(crate) fn frame(dst: Mac, src: Mac, between: SealedDatagram) -> Vec<u8> {
        let mut frame = [&dst.0[..], &src.0, &ETHERTYPE_IPV4.to_be_bytes(), &[VERSION, 0, 0, 66]].concat();
        frame.extend([0, 0, 0x40, 0, 64, UDP, 0, 0]);
        frame.extend(between.src.ip().octets());
        frame.extend(between.dst.ip().octets());
        frame.extend(between.src.port().to_be_bytes());
        frame.extend(between.dst.port().to_be_bytes());
        frame.extend([0, 46, 0, 0, SEALED_PACKET]);
        frame.resize(80, 0);
        frame
    }

    pub(crate) fn between() -> SealedDatagram {
        SealedDatagram { src: "10.0.0.1:7000".parse().unwrap(), dst: "10.0.0.2:7001".parse().unwrap() }
    }

    #[test]
    fn only_whole_sealed_packets_are_taken() {
        let whole = frame(Mac([2; 6]), Mac([4; 6]), between());
        assert_eq!(SealedDatagram::of_frame(&whole), Some(between()));
        assert_eq!(SealedDatagram::of_frame(&whole[..42]), None, "no payload");
        // Type, header length, more fragments, offset, protocol, control packets of sealing, packets in clear text.
        for (at, byte) in [(12, 0x86), (14, 0x46), (20, 0x20), (21, 1), (23, 6), (42, 0x21), (42, 0x10)] {
            let mut other = whole.clone();
            other[at] = byte;
            assert_eq!(SealedDatagram::of_frame(&other), None, "byte {at}");
        }
        assert_eq!(between().reversed().reversed(), between());
    }
}
