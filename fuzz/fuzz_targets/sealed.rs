//! Corrupted, replayed, reordered and forged sealed datagrams.
//!
//! Input: records of four bytes: an action, the datagram that it applies to, and two numbers. Datagrams are sealed one after the
//! other, with different lengths.
//!
//! Invariants: no panic; only unchanged datagrams open, each once; other datagrams are refused for the right reason and have no
//! effect: datagrams that did not arrive still open at the end.
#![no_main]

use std::collections::HashSet;

use libfuzzer_sys::fuzz_target;
use vnet::link::sealed::aead::{MATERIAL_LEN, OpeningKey, SealingKey, TAG_LEN};
use vnet::stats::DiscardReason;
use vnet::wire::native::HEADER_LEN;

fuzz_target!(|data: &[u8]| {
    let material: [u8; MATERIAL_LEN] = std::array::from_fn(|at| (at * 7) as u8);
    let (sealing, opening) = (SealingKey::new(&material, 1, 1), OpeningKey::new(&material));
    let (mut sent, mut opened) = (Vec::<(Vec<u8>, Vec<u8>)>::new(), HashSet::new());
    let mut number = 1u64;
    for record in data.chunks_exact(4) {
        let [action, which, x, y] = record.try_into().expect("four bytes");
        if action % 4 == 0 || sent.is_empty() {
            number += u64::from(x) + 1;
            let mut datagram = vec![0x10, 0x45, 0, 0, 0, 0, 1, 0];
            datagram.extend(number.to_be_bytes());
            datagram.extend(std::iter::repeat_n(y, usize::from(which)));
            let clear = datagram[HEADER_LEN..].to_vec();
            datagram.extend([0; TAG_LEN]);
            sealing.seal(&mut datagram);
            sent.push((datagram, clear));
            continue;
        }
        let index = usize::from(which) % sent.len();
        let (original, clear) = &sent[index];
        let mut arrived = original.clone();
        match action % 4 {
            1 => {}
            2 => {
                let at = (usize::from(x) << 8 | usize::from(y)) % arrived.len();
                arrived[at] ^= 1 << (action >> 2 & 7);
            }
            _ => {
                arrived.truncate((usize::from(x) << 8 | usize::from(y)) % (arrived.len() + 1));
            }
        }
        let intact = arrived == *original;
        match opening.open(&mut arrived) {
            Ok(()) => {
                assert!(intact, "a forged datagram was opened");
                assert!(opened.insert(index), "a datagram was opened twice");
                assert_eq!(&arrived[HEADER_LEN..arrived.len() - TAG_LEN], &clear[..]);
            }
            Err(DiscardReason::Truncated) => assert!(arrived.len() < HEADER_LEN + TAG_LEN),
            Err(DiscardReason::Forged) => assert!(!intact),
            Err(DiscardReason::Replayed) => assert!(!intact || opened.contains(&index) || number > 8192),
            Err(other) => panic!("unexpected {other:?}"),
        }
    }
    if number <= 8192 {
        for (index, (datagram, _)) in sent.into_iter().enumerate() {
            let result = opening.open(&mut datagram.clone());
            assert_eq!(result.is_ok(), !opened.contains(&index));
        }
    }
});
