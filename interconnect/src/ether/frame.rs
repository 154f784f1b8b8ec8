//! The frame: what stands between the Ethernet header and the protocol's packet.
//!
//! ```text
//!   0          4             6        8        10
//!   | "vrde"   | destination | source | length | packet, padding ...
//!   |          | port        | port   |        |
//! ```
//!
//! Numbers are in network byte order. The Ethernet header before it has the ethertype 0x88b5, "local experimental 1" (IEEE 802), which it
//! shares with control frames of virtual machines; those begin with `vrdm`. The packet is one in clear text: version 1 in the high bits
//! of its first byte.

/// A MAC address.
pub type Mac = [u8; 6];

/// Ethertype of the frames.
pub const ETHERTYPE: u16 = 0x88b5;
/// First bytes behind the Ethernet header.
pub const MAGIC: [u8; 4] = *b"vrde";
/// Length of the header in bytes.
pub const HEADER: usize = 10;
/// Version of the protocol's packets, in the high bits of their first byte.
pub const PACKET_VERSION: u8 = 1;

/// A frame to this node, without its Ethernet header.
#[derive(Debug, PartialEq, Eq)]
pub struct Frame<'a> {
    /// Port of the node that sends.
    pub source: u16,
    /// The protocol's packet.
    pub packet: &'a mut [u8],
}

/// Returns the header of a frame.
pub fn header(destination: u16, source: u16, packet_len: u16) -> [u8; HEADER] {
    let [m0, m1, m2, m3] = MAGIC;
    let ([d0, d1], [s0, s1], [l0, l1]) =
        (destination.to_be_bytes(), source.to_be_bytes(), packet_len.to_be_bytes());
    [m0, m1, m2, m3, d0, d1, s0, s1, l0, l1]
}

/// Parses what follows the Ethernet header of a frame to the node at `port`. Returns `None` if the frame is not for it or malformed: cut
/// short, without a packet, or from port 0.
pub fn decode(bytes: &mut [u8], port: u16) -> Option<Frame<'_>> {
    let (header, rest) = bytes.split_first_chunk_mut::<HEADER>()?;
    let [m0, m1, m2, m3, d0, d1, s0, s1, l0, l1] = *header;
    let number = |bytes| u16::from_be_bytes(bytes);
    if [m0, m1, m2, m3] != MAGIC || number([d0, d1]) != port || number([s0, s1]) == 0 {
        return None;
    }
    let packet = rest.get_mut(..usize::from(number([l0, l1])))?;
    let is_packet = packet.first().is_some_and(|first| first >> 4 == PACKET_VERSION);
    is_packet.then_some(Frame { source: number([s0, s1]), packet })
}
