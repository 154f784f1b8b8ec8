//! Translated packets between hosts, and the messages in which two hosts agree on them (docs/containers.md).
//!
//! A translated packet has the two hosts' addresses, an *index* as source port and [`TRANSLATED_PORT`] as destination port. The receiving
//! host restores the packet's own addresses and ports from the index. The sending host *offers* what each index stands for; the receiving
//! host *accepts* the indices that it knows. Both messages are payloads of probes.

use std::net::{Ipv4Addr, SocketAddrV4};

use super::checksum::Sum;
use super::ethernet::{ETHERTYPE_IPV4, HEADER_LEN, Mac};
use super::ip::{IPV4_LEN_MIN, TCP, UDP};

/// Destination port of translated packets.
pub const TRANSLATED_PORT: u16 = 9790;

/// First bytes of an offer and of an acceptance. Older hosts echo them like any probe.
const OFFER: [u8; 8] = *b"vnet-tra";
const ACCEPTANCE: [u8; 8] = *b"vnet-trb";
/// Bytes of an offer before its conversations: [`OFFER`] and the epoch.
const OFFER_LEN: usize = OFFER.len() + 4;
/// Bytes of one conversation: index, protocol, time to live, network, MAC addresses, IPv4 addresses, ports, zeros.
const ENTRY_LEN: usize = 36;
/// Bytes of an acceptance before its indices: [`ACCEPTANCE`], the epoch, flags of `proved`, zeros.
const ACCEPTANCE_LEN: usize = ACCEPTANCE.len() + 8;
/// Bytes of one index: the index, whether packets with it arrive, zero.
const ACCEPTED_LEN: usize = 4;
const UDP_LEN: usize = 8;
const TCP_LEN: usize = 20;

/// A protocol whose packets can be translated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Transport {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
}

impl Transport {
    /// Both.
    pub const ALL: [Transport; 2] = [Transport::Tcp, Transport::Udp];

    /// Its number in an IP header.
    pub fn number(self) -> u8 {
        match self {
            Transport::Tcp => TCP,
            Transport::Udp => UDP,
        }
    }

    /// The protocol with this number.
    pub fn new(number: u8) -> Option<Transport> {
        Transport::ALL.into_iter().find(|transport| transport.number() == number)
    }
}

/// The packets of one TCP connection or UDP flow in one direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Conversation {
    /// Number of its network, of 24 bits.
    pub network: u32,
    /// Destination of its frames.
    pub dst: Mac,
    /// Source of its frames.
    pub src: Mac,
    /// Source of its packets.
    pub source: SocketAddrV4,
    /// Destination of its packets.
    pub destination: SocketAddrV4,
    /// TCP or UDP.
    pub transport: Transport,
    /// Their time to live.
    pub ttl: u8,
}

/// What indices of the sending host stand for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    /// Number of the sending host's run: indices of different runs have nothing in common.
    pub epoch: u32,
    /// Each index, and its conversation.
    pub conversations: Vec<(u16, Conversation)>,
}

/// Indices that the receiving host knows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Acceptance {
    /// That of the offers.
    pub epoch: u32,
    /// Whether translated packets of TCP, and of UDP, have arrived lately.
    pub proved: [bool; 2],
    /// Each index, and whether packets with it have arrived lately.
    pub indices: Vec<(u16, bool)>,
}

impl Conversation {
    fn write(&self, index: u16, to: &mut Vec<u8>) {
        to.extend(index.to_be_bytes());
        to.extend([self.transport.number(), self.ttl]);
        to.extend(self.network.to_be_bytes());
        to.extend(self.dst.0);
        to.extend(self.src.0);
        for end in [self.source, self.destination] {
            to.extend(end.ip().octets());
        }
        for end in [self.source, self.destination] {
            to.extend(end.port().to_be_bytes());
        }
        to.extend([0; 4]);
    }

    /// An index and its conversation; `None` if no host may offer that.
    fn read(entry: &[u8; ENTRY_LEN]) -> Option<(u16, Conversation)> {
        let number = |at: usize| u16::from_be_bytes([entry[at], entry[at + 1]]);
        let mac = |at: usize| entry[at..].first_chunk().copied().map(Mac);
        let ip = |at: usize| Ipv4Addr::new(entry[at], entry[at + 1], entry[at + 2], entry[at + 3]);
        let network = u32::from_be_bytes([entry[4], entry[5], entry[6], entry[7]]);
        let conversation = Conversation {
            network,
            dst: mac(8)?,
            src: mac(14)?,
            source: SocketAddrV4::new(ip(20), number(28)),
            destination: SocketAddrV4::new(ip(24), number(30)),
            transport: Transport::new(entry[2])?,
            ttl: entry[3],
        };
        let is_possible = number(0) != 0
            && network < 1 << 24
            && conversation.dst.is_unicast()
            && conversation.src.is_unicast();
        is_possible.then_some((number(0), conversation))
    }
}

impl Offer {
    /// Number of conversations that fit a payload of `len_max` bytes.
    pub fn room(len_max: usize) -> usize {
        len_max.saturating_sub(OFFER_LEN) / ENTRY_LEN
    }

    /// Its payload.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = [&OFFER[..], &self.epoch.to_be_bytes()].concat();
        self.conversations.iter().for_each(|(index, conversation)| conversation.write(*index, &mut bytes));
        bytes
    }

    /// Reads a payload, and counts what no host may offer; `None` if it is no offer.
    pub fn parse(payload: &[u8]) -> Option<(Offer, u64)> {
        let (epoch, rest) = payload.strip_prefix(&OFFER)?.split_first_chunk()?;
        let (entries, _) = rest.as_chunks::<ENTRY_LEN>();
        let conversations: Vec<_> = entries.iter().filter_map(Conversation::read).collect();
        let refused = entries.len() - conversations.len();
        Some((Offer { epoch: u32::from_be_bytes(*epoch), conversations }, refused as u64))
    }
}

impl Acceptance {
    /// Its payload.
    pub fn to_bytes(&self) -> Vec<u8> {
        let proved = u8::from(self.proved[0]) | u8::from(self.proved[1]) << 1;
        let mut bytes = [&ACCEPTANCE[..], &self.epoch.to_be_bytes(), &[proved, 0, 0, 0]].concat();
        for (index, is_seen) in &self.indices {
            bytes.extend(index.to_be_bytes());
            bytes.extend([u8::from(*is_seen), 0]);
        }
        bytes
    }

    /// Reads a payload; `None` if it is no acceptance.
    pub fn parse(payload: &[u8]) -> Option<Acceptance> {
        let (epoch, rest) = payload.strip_prefix(&ACCEPTANCE)?.split_first_chunk()?;
        let ([proved, ..], rest) = rest.split_first_chunk::<4>()?;
        let (indices, _) = rest.as_chunks::<ACCEPTED_LEN>();
        Some(Acceptance {
            epoch: u32::from_be_bytes(*epoch),
            proved: [proved & 1 != 0, proved & 2 != 0],
            indices: indices
                .iter()
                .map(|[high, low, seen, _]| (u16::from_be_bytes([*high, *low]), seen & 1 != 0))
                .collect(),
        })
    }

    /// Number of indices that fit a payload of `len_max` bytes.
    pub fn room(len_max: usize) -> usize {
        len_max.saturating_sub(ACCEPTANCE_LEN) / ACCEPTED_LEN
    }
}

/// A frame with a translated packet of `len` bytes of index 0, which carries nothing: it proves that packets of this kind and size
/// arrive. To a stateful firewall it is one of an established connection, as all later ones will be.
pub fn proof(transport: Transport, local: Ipv4Addr, remote: Ipv4Addr, len: u16) -> Vec<u8> {
    let mut frame = [&[0; 12][..], &ETHERTYPE_IPV4.to_be_bytes()].concat();
    frame.extend([0x45, 0]);
    frame.extend(len.to_be_bytes());
    frame.extend([0, 0, 0x40, 0, 64, transport.number(), 0, 0]);
    frame.extend(local.octets());
    frame.extend(remote.octets());
    let sum = Sum::default().with(&frame[HEADER_LEN..]).finish();
    frame[HEADER_LEN + 10..HEADER_LEN + 12].copy_from_slice(&sum.to_be_bytes());
    let payload = len.saturating_sub(IPV4_LEN_MIN as u16);
    frame.extend([0, 0]);
    frame.extend(TRANSLATED_PORT.to_be_bytes());
    let at = match transport {
        // Sequence number, acknowledgement, length of the header, ACK, window, checksum, no urgent data.
        Transport::Tcp => {
            frame.extend([0, 0, 0, 1, 0, 0, 0, 1, (TCP_LEN as u8 / 4) << 4, 0x10, 1, 0, 0, 0, 0, 0]);
            16
        }
        Transport::Udp => {
            frame.extend(payload.to_be_bytes());
            frame.extend([0, 0]);
            UDP_LEN - 2
        }
    };
    let start = HEADER_LEN + IPV4_LEN_MIN;
    frame.resize((HEADER_LEN + usize::from(len)).max(frame.len()), 0);
    let hosts = Sum::default().with(&local.octets()).with(&remote.octets());
    let pseudo = hosts.with(&[0, transport.number()]).with_u16(payload);
    let sum = pseudo.with(&frame[start..]).finish();
    frame[start + at..start + at + 2].copy_from_slice(&sum.to_be_bytes());
    frame
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn conversation(port: u16) -> Conversation {
        Conversation {
            network: 7,
            dst: Mac([2, 0, 0, 0, 0, 0xb]),
            src: Mac([2, 0, 0, 0, 0, 0xa]),
            source: SocketAddrV4::new(Ipv4Addr::new(10, 0, 0, 1), port),
            destination: SocketAddrV4::new(Ipv4Addr::new(10, 0, 0, 2), 80),
            transport: Transport::Tcp,
            ttl: 64,
        }
    }

    #[test]
    fn messages_are_read_as_written() {
        let offer =
            Offer { epoch: 5, conversations: vec![(1, conversation(4000)), (0xffff, conversation(4001))] };
        let bytes = offer.to_bytes();
        assert_eq!(bytes.len(), OFFER_LEN + 2 * ENTRY_LEN);
        assert_eq!((Offer::room(bytes.len()), Offer::room(bytes.len() - 1), Offer::room(0)), (2, 1, 0));
        assert_eq!(Offer::parse(&bytes), Some((offer.clone(), 0)));
        assert_eq!(Offer::parse(&bytes[..bytes.len() - 1]).unwrap().0.conversations.len(), 1);
        let acceptance =
            Acceptance { epoch: 5, proved: [true, false], indices: vec![(1, true), (0xffff, false)] };
        let bytes = acceptance.to_bytes();
        assert_eq!(Acceptance::parse(&bytes), Some(acceptance));
        assert_eq!((Acceptance::room(bytes.len()), Acceptance::room(3)), (2, 0));
        assert_eq!((Offer::parse(&bytes), Acceptance::parse(&offer.to_bytes())), (None, None));
        for len in 0..OFFER_LEN {
            assert_eq!(Offer::parse(&offer.to_bytes()[..len]), None);
        }
    }

    #[test]
    fn what_no_host_may_offer_is_refused() {
        let change = |at: usize, byte: u8| {
            let mut bytes = Offer { epoch: 1, conversations: vec![(1, conversation(4000))] }.to_bytes();
            bytes[OFFER_LEN + at] = byte;
            Offer::parse(&bytes).unwrap()
        };
        assert_eq!(change(1, 2).0.conversations, [(2, conversation(4000))]);
        // Index 0, another protocol, network 2^24 and more, group addresses.
        for (at, byte) in [(1, 0), (2, 1), (4, 1), (8, 1), (14, 0xff)] {
            let (offer, refused) = change(at, byte);
            assert_eq!((offer.conversations.len(), refused), (0, 1), "byte {at}");
        }
    }

    #[test]
    fn a_proof_has_right_checksums() {
        for transport in Transport::ALL {
            let (local, remote) = (Ipv4Addr::new(10, 0, 0, 1), Ipv4Addr::new(10, 0, 0, 2));
            for len in [1500_u16, 601] {
                let frame = proof(transport, local, remote, len);
                assert_eq!(frame.len(), HEADER_LEN + usize::from(len));
                assert_eq!(Sum::default().with(&frame[HEADER_LEN..HEADER_LEN + IPV4_LEN_MIN]).finish(), 0);
                let payload = len - IPV4_LEN_MIN as u16;
                let pseudo = Sum::default().with(&local.octets()).with(&remote.octets());
                let all = pseudo.with(&[0, transport.number()]).with_u16(payload);
                let all = all.with(&frame[HEADER_LEN + IPV4_LEN_MIN..]);
                assert_eq!(all.finish(), 0, "{transport:?}");
            }
        }
    }
}
