//! Flow hashes: all frames of a flow have the same hash, so distributing frames by it keeps a flow in order.

use super::ip::{self, TCP, UDP};

const DCCP: u8 = 33;
const SCTP: u8 = 132;
const UDP_LITE: u8 = 136;

/// Hashes a frame's MAC addresses, and its IP addresses, protocol and ports as far as `head` contains them.
///
/// IPv4 fragments hash without ports, so all fragments of a packet stay together.
#[inline]
pub fn hash(head: &[u8]) -> u32 {
    let mut state = mix(0x9e37_79b9_7f4a_7c15, head.get(..8));
    state = mix(state, head.get(8..12));
    let Some((offset, ip)) = ip::in_frame(head) else { return finish(state) };
    for part in ip.addresses.chunks_exact(8) {
        state = mix(state, Some(part));
    }
    state = mix(state, Some(&[ip.protocol]));
    // All of these protocols begin with two 16-bit ports.
    if matches!(ip.protocol, TCP | UDP | DCCP | SCTP | UDP_LITE) && !ip.is_fragment() {
        let ports = offset + ip.len;
        state = mix(state, head.get(ports..ports + 4));
    }
    finish(state)
}

/// Mixes in up to eight bytes; `None` changes nothing.
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
    fn ports_tell_flows_apart_and_fragments_stay_together() {
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
    fn truncated_heads_never_panic() {
        let frame = udp([1, 2, 3, 4], 0);
        for len in 0..frame.len() {
            hash(&frame[..len]);
        }
    }
}
