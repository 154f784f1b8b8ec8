//! The layout of the programs' maps, as in `programs/shared.h`. A test compiles that header and compares.

use std::net::{Ipv4Addr, SocketAddrV4};
use std::sync::atomic::{AtomicU32, AtomicU64};

use aya::Pod;

use crate::frame::{NetworkId, PortId};
use crate::wire::ethernet::Mac;
use crate::wire::sealed_datagram::SealedDatagram;
use crate::wire::translation::{Conversation, Transport};

/// Maximum number of installed flows.
pub const FLOWS_MAX: u32 = 65_536;
/// Buckets of learned addresses, and the one that never changes.
pub const VERSIONS: usize = 4097;

/// A flow: where its frames come from, and their addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Known {
    /// Its network.
    pub network: NetworkId,
    /// The port it comes from.
    pub from: PortId,
    /// Destination.
    pub dst: Mac,
    /// Source.
    pub src: Mac,
    /// Only these datagrams of it, by a sealed link; `None`: all its frames.
    pub datagram: Option<SealedDatagram>,
}

/// A flow as a key of the programs' map.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct FlowKey {
    network: u32,
    from: u16,
    dst: [u8; 6],
    src: [u8; 6],
    is_sealed: u16,
}

impl FlowKey {
    pub(super) fn new(flow: &Known) -> FlowKey {
        let Known { network, from, dst, src, datagram } = *flow;
        let (network, from, is_sealed) = (network.get(), from.0, u16::from(datagram.is_some()));
        let Some(SealedDatagram { src: source, dst: destination }) = datagram else {
            return FlowKey { network, from, dst: dst.0, src: src.0, is_sealed };
        };
        let ([a, b, c, d], [e, f, g, h]) = (source.ip().octets(), destination.ip().octets());
        let ([i, j], [k, l]) = (source.port().to_be_bytes(), destination.port().to_be_bytes());
        FlowKey { network, from, dst: [a, b, c, d, e, f], src: [g, h, i, j, k, l], is_sealed }
    }

    /// Source of the flow's frames; `None` if the key has none.
    pub(super) fn source(&self) -> Option<Mac> {
        (self.is_sealed == 0).then_some(Mac(self.src))
    }
}

/// `kind` of a flow to an interface.
pub(super) const TO_INTERFACE: u16 = 1;
/// `kind` of a flow to a link, by the wire.
pub(super) const TO_LINK: u16 = 2;
/// `translates`: the other host takes translated packets; and the guest's packets are not longer than the path's.
pub(super) const TRANSLATES: u32 = 1;
/// See [`TRANSLATES`].
pub(super) const TRANSLATES_DATAGRAMS: u32 = 2;
/// `namespace` of a guest whose namespace is unknown.
pub(super) const NO_NAMESPACE: u32 = u32::MAX;
/// Age of the leases' clock at which vnetd counts as dead.
#[cfg(test)]
pub(super) const DEAD_NS: u64 = 1_000_000_000;
/// Maximum number of links whose datagrams programs take: all links of a host.
#[cfg(test)]
const PEERS_MAX: u32 = 4096;

/// A verdict with one destination, and what it depends on.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct FlowValue {
    pub(super) until_ns: u64,
    pub(super) id: u64,
    pub(super) generation: u32,
    pub(super) buckets: [u32; 2],
    pub(super) versions: [u32; 2],
    pub(super) slot: u32,
    pub(super) kind: u16,
    pub(super) own_address: u16,
    pub(super) device: u32,
    pub(super) len_max: u32,
    pub(super) remote: u32,
    pub(super) segment_max: u32,
    pub(super) underlay: u32,
    pub(super) port: u32,
    pub(super) local: u32,
    pub(super) next_hop: u32,
    pub(super) first_port: u16,
    pub(super) port_mask: u16,
    pub(super) ecn_mask: u32,
    pub(super) namespace: u32,
    pub(super) stations: [[u8; 6]; 2],
    pub(super) translates: u32,
}

/// A device with a program.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct PortValue {
    pub(super) network: u32,
    pub(super) from: u16,
    pub(super) mac: [u8; 6],
    pub(super) other: u32,
}

/// Where a link's datagrams come from and arrive, as a key of the programs' map.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PeerKey {
    remote: u32,
    port: u16,
    zero: u16,
}

impl PeerKey {
    pub(super) fn new(end: &End) -> PeerKey {
        PeerKey { remote: end.remote.to_bits(), port: end.port, zero: 0 }
    }

    pub(super) fn end(&self) -> End {
        End { remote: Ipv4Addr::from_bits(self.remote), port: self.port }
    }
}

/// The two ends of a link's datagrams that arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct End {
    /// The other host's address.
    pub remote: Ipv4Addr,
    /// This host's UDP port.
    pub port: u16,
}

/// A link whose datagrams programs take, as a value of the programs' map.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct PeerValue {
    pub(super) from: u16,
    pub(super) zero: [u16; 3],
    pub(super) device: u32,
    pub(super) local: u32,
    pub(super) coalesced_ns: u64,
}

/// The head of a frame of the wire that comes up.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WireHead {
    remote: u32,
    network: u32,
    from: u16,
    zero: [u16; 3],
}

impl WireHead {
    /// Its bytes.
    pub const LEN: usize = size_of::<WireHead>();

    /// Reads it.
    pub fn parse(bytes: &[u8; WireHead::LEN]) -> WireHead {
        let [a, b, c, d, e, f, g, h, i, j, ..] = *bytes;
        WireHead {
            remote: u32::from_ne_bytes([a, b, c, d]),
            network: u32::from_ne_bytes([e, f, g, h]),
            from: u16::from_ne_bytes([i, j]),
            zero: [0; 3],
        }
    }

    /// The other host's address.
    pub fn remote(&self) -> Ipv4Addr {
        Ipv4Addr::from_bits(self.remote)
    }

    /// The network id (VNI).
    pub fn network(&self) -> u32 {
        self.network
    }

    /// The link's port when the frame arrived.
    pub fn from(&self) -> PortId {
        PortId(self.from)
    }
}

/// A conversation with many frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// It.
    pub is: Conversation,
    /// The other host.
    pub remote: Ipv4Addr,
    /// Port of its guest.
    pub from: PortId,
}

/// An index of another host. Its packets carry it as source port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Index {
    /// The other host.
    pub remote: Ipv4Addr,
    /// The index; 0: its proofs.
    pub index: u16,
    /// The protocol of its packets.
    pub transport: Transport,
}

/// A conversation as a key of the programs' map, in the byte order of a frame.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct ConversationKey {
    network: u32,
    dst: [u8; 6],
    src: [u8; 6],
    source: [u8; 4],
    destination: [u8; 4],
    ports: [[u8; 2]; 2],
    protocol: u16,
    ttl: u16,
}

impl ConversationKey {
    pub(super) fn new(is: &Conversation) -> ConversationKey {
        ConversationKey {
            network: is.network,
            dst: is.dst.0,
            src: is.src.0,
            source: is.source.ip().octets(),
            destination: is.destination.ip().octets(),
            ports: [is.source, is.destination].map(|end| end.port().to_be_bytes()),
            protocol: is.transport.number().into(),
            ttl: is.ttl.into(),
        }
    }

    /// The conversation; `None` for a key that programs do not write.
    fn conversation(&self) -> Option<Conversation> {
        let [source, destination] = self.ports.map(u16::from_be_bytes);
        Some(Conversation {
            network: self.network,
            dst: Mac(self.dst),
            src: Mac(self.src),
            source: SocketAddrV4::new(self.source.into(), source),
            destination: SocketAddrV4::new(self.destination.into(), destination),
            transport: Transport::new(u8::try_from(self.protocol).ok()?)?,
            ttl: u8::try_from(self.ttl).ok()?,
        })
    }
}

/// A conversation from a guest of this host, as a value of the programs' map.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct TranslatedValue {
    pub(super) until_ns: u64,
    pub(super) frames: u32,
    pub(super) remote: u32,
    /// In the byte order of a frame.
    pub(super) index: u16,
    pub(super) zero: [u16; 3],
}

/// A conversation with many frames, in the programs' queue.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct WantedValue {
    is: ConversationKey,
    remote: u32,
    from: u16,
    zero: u16,
}

impl WantedValue {
    pub(super) fn wanted(&self) -> Option<Wanted> {
        let (remote, from) = (Ipv4Addr::from_bits(self.remote), PortId(self.from));
        Some(Wanted { is: self.is.conversation()?, remote, from })
    }
}

/// What identifies translated packets, as a key of the programs' map.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TranslationKey {
    remote: u32,
    /// In the byte order of a frame.
    index: u16,
    protocol: u16,
}

impl TranslationKey {
    pub(super) fn new(at: Index) -> TranslationKey {
        let (remote, index) = (at.remote.to_bits(), at.index.to_be());
        TranslationKey { remote, index, protocol: at.transport.number().into() }
    }

    /// `None` for a key that vnetd does not write.
    pub(super) fn index(&self) -> Option<Index> {
        let transport = Transport::new(u8::try_from(self.protocol).ok()?)?;
        Some(Index { remote: Ipv4Addr::from_bits(self.remote), index: u16::from_be(self.index), transport })
    }
}

/// What translated packets stand for, as a value of the programs' map.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct TranslationValue {
    pub(super) is: ConversationKey,
    pub(super) seen_ns: u64,
    pub(super) lost: u64,
}

/// Frames and bytes of a flow. The programs add to it.
#[repr(C)]
#[derive(Debug, Default)]
pub(super) struct Tally {
    pub(super) frames: AtomicU64,
    pub(super) bytes: AtomicU64,
    pub(super) used_ns: AtomicU64,
    zero: [AtomicU64; 5],
}

/// The current state that every verdict is compared with.
#[repr(C)]
pub(super) struct State {
    pub(super) versions: [AtomicU32; VERSIONS],
    pub(super) generation: AtomicU32,
    /// vnetd's clock: see [`Kernel::tick`](super::Kernel::tick).
    pub(super) clock_ns: AtomicU64,
    pub(super) end_ns: AtomicU64,
    pub(super) core: AtomicU32,
    zero: AtomicU32,
}

// SAFETY: plain integers without padding (the layout test compares with C, where padding would be a field).
unsafe impl Pod for FlowKey {}
// SAFETY: as above.
unsafe impl Pod for FlowValue {}
// SAFETY: as above.
unsafe impl Pod for PortValue {}
// SAFETY: as above.
unsafe impl Pod for PeerKey {}
// SAFETY: as above.
unsafe impl Pod for PeerValue {}
// SAFETY: as above.
unsafe impl Pod for ConversationKey {}
// SAFETY: as above.
unsafe impl Pod for TranslatedValue {}
// SAFETY: as above.
unsafe impl Pod for WantedValue {}
// SAFETY: as above.
unsafe impl Pod for TranslationKey {}
// SAFETY: as above.
unsafe impl Pod for TranslationValue {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::vxlan::{SUPER_FRAME_MAX, WIRE_PORT, WireTail};
    use std::fmt::Write;
    use std::mem::offset_of;
    use std::path::Path;
    use std::process::Command;

    /// Lines "name size" or "name.field offset", as Rust has them.
    macro_rules! layout {
        ($($c:literal = $rust:ident { $($field:ident),* })*) => {{
            let (mut ours, mut probe) = (String::new(), String::new());
            $(
                writeln!(ours, "{} {}", $c, size_of::<$rust>()).unwrap();
                writeln!(probe, "printf(\"{} %zu\\n\", sizeof(struct {}));", $c, $c).unwrap();
                $(
                    writeln!(ours, "{}.{} {}", $c, stringify!($field), offset_of!($rust, $field)).unwrap();
                    writeln!(probe, "printf(\"{}.{} %zu\\n\", offsetof(struct {}, {}));", $c, stringify!($field), $c, stringify!($field)).unwrap();
                )*
            )*
            (ours, probe)
        }};
    }

    #[test]
    fn structs_are_those_of_the_header() {
        let (mut ours, mut probe) = layout! {
            "flow_key" = FlowKey { network, from, dst, src, is_sealed }
            "flow" = FlowValue {
                until_ns, id, generation, buckets, versions, slot, kind, own_address, device, len_max, remote, segment_max,
                underlay, port, local, next_hop, first_port, port_mask, ecn_mask, namespace, stations, translates
            }
            "port" = PortValue { network, from, mac, other }
            "peer_key" = PeerKey { remote, port, zero }
            "peer" = PeerValue { from, zero, device, local, coalesced_ns }
            "wire_head" = WireHead { remote, network, from, zero }
            "wire_tail" = WireTail { remote, network, underlay, next_hop }
            "conversation" = ConversationKey { network, dst, src, source, destination, ports, protocol, ttl }
            "translated" = TranslatedValue { until_ns, frames, remote, index, zero }
            "wanted" = WantedValue { is, remote, from, zero }
            "translation_key" = TranslationKey { remote, index, protocol }
            "translation" = TranslationValue { is, seen_ns, lost }
            "tally" = Tally { frames, bytes, used_ns, zero }
            "state" = State { versions, generation, clock_ns, end_ns, core, zero }
        };
        for (name, ours_is) in [
            ("FLOWS_MAX", FLOWS_MAX as usize),
            ("VERSIONS", VERSIONS),
            ("TO_INTERFACE", TO_INTERFACE as usize),
            ("TO_LINK", TO_LINK as usize),
            ("PEERS_MAX", PEERS_MAX as usize),
            ("TRANSLATES", TRANSLATES as usize),
            ("TRANSLATES_DATAGRAMS", TRANSLATES_DATAGRAMS as usize),
            ("NO_NAMESPACE", NO_NAMESPACE as usize),
            ("WIRE_PORT", WIRE_PORT.into()),
            ("SUPER_FRAME_MAX", SUPER_FRAME_MAX),
            ("TRANSLATED_PORT", crate::wire::translation::TRANSLATED_PORT.into()),
            ("DEAD_NS", DEAD_NS as usize),
            ("SEALED_PACKET", crate::wire::sealed_datagram::SEALED_PACKET.into()),
        ] {
            writeln!(ours, "{name} {ours_is}").unwrap();
            writeln!(probe, "printf(\"{name} %zu\\n\", (size_t){name});").unwrap();
        }
        let folder = tempfile::tempdir().unwrap();
        let (source, program) = (folder.path().join("layout.c"), folder.path().join("layout"));
        let code = format!(
            "#include <stddef.h>\n#include <stdio.h>\n#include \"shared.h\"\nint main(void) {{\n{probe}}}\n"
        );
        std::fs::write(&source, code).unwrap();
        let headers = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/kernel/programs");
        let made = Command::new("cc").arg("-I").arg(headers).arg(&source).arg("-o").arg(&program).status();
        assert!(made.unwrap().success());
        let said = Command::new(&program).output().unwrap();
        assert_eq!(ours, String::from_utf8(said.stdout).unwrap());
    }
}
