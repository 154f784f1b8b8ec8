//! ARP (RFC 826) and IPv6 neighbour discovery (ND, RFC 4861) for a proxy that answers requests instead of flooding them (ARP/ND
//! suppression, RFC 9161).
//!
//! [`question`] recognises only requests that a proxy may answer. Announcements (the sender asks for its own address), probes for
//! duplicate address detection (the sender has no address yet) and frames with VLAN tags are flooded as usual.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ops::RangeInclusive;

use super::checksum::Sum;
use super::ethernet::{self, ETHERTYPE_ARP, ETHERTYPE_IPV6, HEADER_LEN, Mac};
use super::ip::{self, ICMPV6, IPV6_LEN};

/// Maximum length of a reply in bytes: a neighbour advertisement with the target link-layer address option.
pub const ANSWER_MAX: usize = HEADER_LEN + IPV6_LEN + ADVERTISEMENT_LEN;

const ARP_LEN: usize = 28;
/// Hardware type Ethernet, protocol type IPv4, and the address length of each.
const ARP_KIND: [u8; 6] = [0, 1, 8, 0, 6, 4];
const ARP_REQUEST: u16 = 1;
const ARP_REPLY: u16 = 2;
/// Types of ND messages, from router solicitation to redirect.
const ND: RangeInclusive<u8> = 133..=137;
const SOLICITATION: u8 = 135;
const SOLICITATION_LEN: usize = 24;
const ADVERTISEMENT: u8 = 136;
const ADVERTISEMENT_LEN: usize = 32;
/// Hop limit of all ND messages; it proves that no router forwarded them (RFC 4861, section 7.1).
const HOP_LIMIT: u8 = 255;
/// Solicited and Override flags (RFC 4861, section 4.4).
const ADVERTISEMENT_FLAGS: u8 = 0x60;
const TARGET_ADDRESS: u8 = 2;

/// An ARP request or neighbour solicitation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Question {
    /// The asker's Ethernet address: the frame's source.
    pub asker: Mac,
    /// The asker's IP address.
    pub from: IpAddr,
    /// The IP address to resolve.
    pub target: IpAddr,
}

/// True for a frame of ARP or ND, also with VLAN tags.
#[inline]
pub fn is_neighbours(frame: &[u8]) -> bool {
    let Some(payload) = ethernet::payload(frame) else { return false };
    let byte = |at: usize| frame.get(payload.offset + at).copied();
    match payload.ethertype {
        ETHERTYPE_ARP => true,
        ETHERTYPE_IPV6 => byte(6) == Some(ICMPV6) && byte(IPV6_LEN).is_some_and(|kind| ND.contains(&kind)),
        _ => false,
    }
}

/// Parses a request. `None` for all other frames, and for a request that only its target may answer.
pub fn question(frame: &[u8]) -> Option<Question> {
    let (_, asker) = ethernet::addresses(frame)?;
    let payload = ethernet::payload(frame)?;
    let packet = frame.get(HEADER_LEN..)?;
    match payload.ethertype {
        // A tagged frame is flooded as usual.
        _ if payload.offset != HEADER_LEN => None,
        ETHERTYPE_ARP => arp(asker, packet),
        ETHERTYPE_IPV6 => solicitation(asker, packet),
        _ => None,
    }
}

fn arp(asker: Mac, packet: &[u8]) -> Option<Question> {
    let packet: &[u8; ARP_LEN] = packet.first_chunk()?;
    let ip = |at: usize| Ipv4Addr::new(packet[at], packet[at + 1], packet[at + 2], packet[at + 3]);
    let (from, target) = (ip(14), ip(24));
    let honest = packet[..6] == ARP_KIND
        && packet[6..8] == ARP_REQUEST.to_be_bytes()
        && packet[8..14] == asker.0
        && !from.is_unspecified()
        && from != target;
    honest.then_some(Question { asker, from: from.into(), target: target.into() })
}

fn solicitation(asker: Mac, packet: &[u8]) -> Option<Question> {
    let ip = ip::Header::parse(ETHERTYPE_IPV6, packet)?;
    let message = packet.get(ip.len..ip.total_len)?;
    let head: &[u8; SOLICITATION_LEN] = message.first_chunk()?;
    let (from, target) = (ip.source(), Ipv6Addr::from(*head[8..].first_chunk::<16>()?));
    let honest = ip.protocol == ICMPV6
        && ip.hop_limit == HOP_LIMIT
        && head[..2] == [SOLICITATION, 0]
        && pseudo_header(ip.addresses, message.len()).with(message).finish() == 0
        && !from.is_unspecified()
        && !from.is_multicast()
        && !target.is_multicast()
        && from != target;
    honest.then_some(Question { asker, from, target: target.into() })
}

/// Sums the pseudo-header (RFC 8200, section 8.1) of source and destination `addresses`.
fn pseudo_header(addresses: &[u8], length: usize) -> Sum {
    Sum::default().with(&addresses[..32]).with_u16(length as u16).with_u16(ICMPV6.into())
}

/// Writes the reply that resolves the question's target to `mac` to `frame` and returns its length. `None` when the request mixes
/// IPv4 and IPv6.
pub fn answer(question: &Question, mac: Mac, frame: &mut [u8; ANSWER_MAX]) -> Option<usize> {
    frame.fill(0);
    frame[..6].copy_from_slice(&question.asker.0);
    frame[6..12].copy_from_slice(&mac.0);
    match (question.from, question.target) {
        (IpAddr::V4(from), IpAddr::V4(target)) => {
            frame[12..14].copy_from_slice(&ETHERTYPE_ARP.to_be_bytes());
            let packet = &mut frame[HEADER_LEN..][..ARP_LEN];
            packet[..6].copy_from_slice(&ARP_KIND);
            packet[6..8].copy_from_slice(&ARP_REPLY.to_be_bytes());
            packet[8..14].copy_from_slice(&mac.0);
            packet[14..18].copy_from_slice(&target.octets());
            packet[18..24].copy_from_slice(&question.asker.0);
            packet[24..28].copy_from_slice(&from.octets());
            Some(HEADER_LEN + ARP_LEN)
        }
        (IpAddr::V6(from), IpAddr::V6(target)) => {
            frame[12..14].copy_from_slice(&ETHERTYPE_IPV6.to_be_bytes());
            let (ip, message) = frame[HEADER_LEN..].split_at_mut(IPV6_LEN);
            ip[0] = 0x60;
            ip[5] = ADVERTISEMENT_LEN as u8;
            ip[6..8].copy_from_slice(&[ICMPV6, HOP_LIMIT]);
            ip[8..24].copy_from_slice(&target.octets());
            ip[24..40].copy_from_slice(&from.octets());
            message[0] = ADVERTISEMENT;
            message[4] = ADVERTISEMENT_FLAGS;
            message[8..24].copy_from_slice(&target.octets());
            // The option's length is in units of eight bytes.
            message[24..26].copy_from_slice(&[TARGET_ADDRESS, 1]);
            message[26..32].copy_from_slice(&mac.0);
            let sum = pseudo_header(&ip[8..], ADVERTISEMENT_LEN).with(message).finish();
            message[2..4].copy_from_slice(&sum.to_be_bytes());
            Some(ANSWER_MAX)
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ASKER: Mac = Mac([2, 0, 0, 0, 0, 1]);
    const OWNER: Mac = Mac([2, 0, 0, 0, 0, 2]);

    fn request(from: [u8; 4], target: [u8; 4]) -> Vec<u8> {
        let mut frame = [Mac::BROADCAST.0, ASKER.0].concat();
        frame.extend([8, 6, 0, 1, 8, 0, 6, 4, 0, 1]);
        frame.extend(ASKER.0);
        frame.extend(from);
        frame.extend([0; 6]);
        frame.extend(target);
        frame.resize(60, 0);
        frame
    }

    fn solicit(from: Ipv6Addr, target: Ipv6Addr) -> Vec<u8> {
        let [.., a, b, c] = target.octets();
        let group = [0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0xff, a, b, c];
        let mut message = vec![SOLICITATION, 0, 0, 0, 0, 0, 0, 0];
        message.extend(target.octets());
        message.extend([1, 1]);
        message.extend(ASKER.0);
        let addresses = [from.octets(), group].concat();
        let sum = pseudo_header(&addresses, message.len()).with(&message).finish();
        message[2..4].copy_from_slice(&sum.to_be_bytes());
        let mut frame = [vec![0x33, 0x33, 0xff, a, b, c], ASKER.0.to_vec(), vec![0x86, 0xdd]].concat();
        frame.extend([0x60, 0, 0, 0, 0, message.len() as u8, ICMPV6, HOP_LIMIT]);
        frame.extend(addresses);
        frame.extend(message);
        frame
    }

    #[test]
    fn arp_requests_are_answered_for_the_owner() {
        let asked = question(&request([10, 0, 0, 1], [10, 0, 0, 2])).unwrap();
        let want = Question { asker: ASKER, from: [10, 0, 0, 1].into(), target: [10, 0, 0, 2].into() };
        assert_eq!(asked, want);
        let mut frame = [0xaa; ANSWER_MAX];
        let length = answer(&asked, OWNER, &mut frame).unwrap();
        let mut reply = [ASKER.0, OWNER.0].concat();
        reply.extend([8, 6, 0, 1, 8, 0, 6, 4, 0, 2]);
        reply.extend([OWNER.0.as_slice(), &[10, 0, 0, 2], &ASKER.0, &[10, 0, 0, 1]].concat());
        assert_eq!(frame[..length], reply);
        assert_eq!(question(&frame[..length]), None, "a reply is not a request");
        assert!(is_neighbours(&frame[..length]) && is_neighbours(&request([10, 0, 0, 1], [10, 0, 0, 2])));
        frame[13] = 0;
        assert!(!is_neighbours(&frame[..length]), "IPv4");
        (0..HEADER_LEN).for_each(|len| assert!(!is_neighbours(&frame[..len])));
    }

    #[test]
    fn solicitations_are_answered_for_the_owner() {
        let (from, target): (Ipv6Addr, Ipv6Addr) = ("fd00::1".parse().unwrap(), "fd00::2".parse().unwrap());
        let mut asking = solicit(from, target);
        let is = |at: usize, value: u8| {
            let mut frame = asking.clone();
            frame[at] = value;
            is_neighbours(&frame)
        };
        assert!(is(54, SOLICITATION) && is(54, ADVERTISEMENT) && is(54, 133) && is(54, 137));
        assert!(!is(54, 128) && !is(54, 138) && !is(20, 17), "an echo, a node query, UDP");
        assert!((0..55).all(|len| !is_neighbours(&asking[..len])));
        let asked = question(&asking).unwrap();
        assert_eq!(asked, Question { asker: ASKER, from: from.into(), target: target.into() });
        let mut frame = [0xaa; ANSWER_MAX];
        assert_eq!(answer(&asked, OWNER, &mut frame), Some(86));
        assert_eq!(frame[..12], [ASKER.0, OWNER.0].concat());
        let (ip, message) = frame[HEADER_LEN..].split_at(IPV6_LEN);
        assert_eq!(pseudo_header(&ip[8..], 32).with(message).finish(), 0);
        assert_eq!((&ip[8..24], &ip[24..40]), (&target.octets()[..], &from.octets()[..]));
        assert_eq!((message[0], message[4], &message[26..]), (136, 0x60, &OWNER.0[..]));
        assert_eq!(question(&frame), None, "a reply is not a request");
        // A wrong checksum, and a truncated frame.
        assert_eq!(question(&asking[..asking.len() - 1]), None);
        asking[80] ^= 1;
        assert_eq!(question(&asking), None);
    }

    #[test]
    fn requests_that_only_the_target_may_answer_are_left() {
        assert_eq!(question(&request([10, 0, 0, 1], [10, 0, 0, 1])), None, "an announcement");
        assert_eq!(question(&request([0; 4], [10, 0, 0, 1])), None, "a probe (RFC 5227)");
        let target: Ipv6Addr = "fd00::2".parse().unwrap();
        assert_eq!(question(&solicit(Ipv6Addr::UNSPECIFIED, target)), None, "duplicate address detection");
        assert_eq!(question(&solicit(target, target)), None);
        let mut other = request([10, 0, 0, 1], [10, 0, 0, 2]);
        other[22] ^= 1;
        assert_eq!(question(&other), None, "the ARP sender address is not the source MAC");
        let mut tagged = request([10, 0, 0, 1], [10, 0, 0, 2]);
        tagged.splice(12..12, [0x81, 0, 0, 5]);
        assert_eq!(question(&tagged), None);
        assert!(is_neighbours(&tagged));
    }
}
