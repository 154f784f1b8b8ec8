//! Flow hashes: frames of one flow get one value, so that spreading by it keeps their order.

use super::ethernet::{self, ETHERTYPE_IPV4, ETHERTYPE_IPV6};

/// Hash of a frame's addresses, and of IP addresses, protocol and ports where `head` shows them.
///
/// Fragments of an IPv4 packet all hash without ports, so that they stay together.
#[inline]
pub fn hash(head: &[u8]) -> u32 {
    let mut state = mix(0x9e37_79b9_7f4a_7c15, head.get(..8));
    state = mix(state, head.get(8..12));
    let Some(payload) = ethernet::payload(head) else { return finish(state) };
    let ip = &head[payload.offset.min(head.len())..];
    let (protocol, addresses, transport) = match payload.ethertype {
        ETHERTYPE_IPV4 if ip.len() >= 20 => {
            let fragmented = u16::from_be_bytes([ip[6], ip[7]]) & 0x3fff != 0;
            let header = usize::from(ip[0] & 0xf) * 4;
            (ip[9], 12..20, if fragmented { usize::MAX } else { header })
        }
        ETHERTYPE_IPV6 if ip.len() >= 40 => (ip[6], 8..40, 40),
        _ => return finish(state),
    };
    for part in ip[addresses].chunks(8) {
        state = mix(state, Some(part));
    }
    state = mix(state, Some(&[protocol]));
    // TCP, UDP, DCCP, SCTP, UDP-Lite: ports are the first four bytes.
    if matches!(protocol, 6 | 17 | 33 | 132 | 136) {
        state = mix(state, transport.checked_add(4).and_then(|end| ip.get(transport..end)));
    }
    finish(state)
}

/// Folds up to eight bytes in; absent ones change nothing.
#[inline]
fn mix(state: u64, bytes: Option<&[u8]>) -> u64 {
    let Some(bytes) = bytes else { return state };
    let mut word = [0; 8];
    word[..bytes.len()].copy_from_slice(bytes);
    (state ^ u64::from_le_bytes(word)).wrapping_mul(0xff51_afd7_ed55_8ccd).rotate_left(29)
}

#[inline]
fn finish(state: u64) -> u32 {
    ((state ^ (state >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53) >> 32) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn udp(ports: [u8; 4], fragment: u16) -> Vec<u8> {
        let mut frame = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0, 0x45, 0, 0, 28, 0, 0];
        frame.extend(fragment.to_be_bytes());
        frame.extend([64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
        frame.extend(ports);
        frame.extend([0; 4]);
        frame
    }

    #[test]
    fn flows_differ_and_fragments_stay_together() {
        assert_ne!(hash(&udp([0, 1, 0, 2], 0)), hash(&udp([0, 1, 0, 3], 0)));
        assert_eq!(hash(&udp([0, 1, 0, 2], 0x2000)), hash(&udp([9, 9, 9, 9], 0x00b9)));
    }

    #[test]
    fn flows_spread() {
        let mut buckets = [0; 8];
        for port in 0..8000u16 {
            let [a, b] = port.to_be_bytes();
            buckets[hash(&udp([a, b, 0, 80], 0)) as usize % 8] += 1;
        }
        assert!(buckets.iter().all(|&n| (800..1200).contains(&n)), "{buckets:?}");
    }

    #[test]
    fn short_heads_are_no_trouble() {
        let frame = udp([1, 2, 3, 4], 0);
        for len in 0..frame.len() {
            hash(&frame[..len]);
        }
    }
}
