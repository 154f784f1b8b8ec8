use super::*;
use crate::link::sealed::identity::hex;
use crate::wire::native::{Header, Kind};
use proptest::prelude::*;
use std::collections::HashSet;

fn material(seed: u8) -> [u8; MATERIAL_LEN] {
    std::array::from_fn(|at| seed.wrapping_add(at as u8))
}

fn datagram(number: u64, payload: &[u8]) -> Vec<u8> {
    let header = Header {
        kind: Kind::Frame,
        last: true,
        offload: false,
        sealed: true,
        hops: 1,
        epoch: 2,
        index: 0,
        network: 1,
        queue: 0,
        number,
    };
    [&header.to_bytes()[..], payload, &[0; TAG_LEN]].concat()
}

/// This code generates the test vectors in docs/security.md.
#[test]
fn the_documented_test_vectors_hold() {
    let text = include_str!("../../../../docs/security.md");
    let value = |name: &str| {
        let line = text.lines().find_map(|line| line.trim().strip_prefix(&format!("{name} = ")));
        line.unwrap_or_else(|| panic!("docs/security.md has no '{name}'")).to_string()
    };
    for (n, number, payload) in [
        (1, 1, &b""[..]),
        (2, 0x17f0_0000_0000_0001, &b"an Ethernet frame, or a part of one"[..]),
        (3, u64::MAX, &[0u8; 64][..]),
    ] {
        assert_eq!(value(&format!("material {n}")), hex(&material(n)));
        let mut sealed = datagram(number, payload);
        assert_eq!(value(&format!("clear {n}")), hex(&sealed[..sealed.len() - TAG_LEN]));
        SealingKey::new(&material(n), 2, 1).seal(&mut sealed);
        assert_eq!(value(&format!("sealed {n}")), hex(&sealed));
        assert_eq!(OpeningKey::new(&material(n)).open(&mut sealed), Ok(()));
        assert_eq!(&sealed[HEADER_LEN..sealed.len() - TAG_LEN], payload);
    }
}

/// The nonce is the salt followed by the number, so two numbers never share a nonce.
#[test]
fn a_nonce_is_salt_and_number() {
    let key = Material::new(&material(1));
    let header = Header::parse(&datagram(0x0102_0304_0506_0708, b"")).unwrap().0.to_bytes();
    assert_eq!(key.nonce(&header).as_ref(), &[33, 34, 35, 36, 1, 2, 3, 4, 5, 6, 7, 8]);
}

#[test]
fn a_key_is_worn_then_spent_before_its_limit() {
    let key = SealingKey::new(&material(1), 7, 1000);
    assert_eq!(key.epoch(), 3);
    assert!(!key.is_spent(1000 + DATAGRAMS_MAX / 2) && !key.is_worn(1000 + DATAGRAMS_MAX / 2));
    assert!(key.is_worn(1001 + DATAGRAMS_MAX / 2) && key.is_spent(1000 + DATAGRAMS_MAX));
}

proptest! {
    #[test]
    fn a_sealed_datagram_opens_once(payload in prop::collection::vec(any::<u8>(), 0..3000), number in 1u64..) {
        let (sealing, opening) = (SealingKey::new(&material(9), 2, 1), OpeningKey::new(&material(9)));
        let mut sealed = datagram(number, &payload);
        sealing.seal(&mut sealed);
        let mut again = sealed.clone();
        prop_assert_eq!(opening.open(&mut sealed), Ok(()));
        prop_assert_eq!(&sealed[HEADER_LEN..sealed.len() - TAG_LEN], &payload[..]);
        prop_assert_eq!(opening.open(&mut again), Err(DiscardReason::Replayed));
    }
}

/// Flips every single bit of header, payload and tag; tries every length, another key, and the other direction.
#[test]
fn a_modified_datagram_does_not_open() {
    let (sealing, opening) = (SealingKey::new(&material(9), 2, 1), OpeningKey::new(&material(9)));
    let mut good = datagram(5, b"forty-two bytes that nobody else may know.");
    sealing.seal(&mut good);
    for bit in 0..good.len() * 8 {
        let mut bad = good.clone();
        bad[bit / 8] ^= 1 << (bit % 8);
        assert_eq!(opening.open(&mut bad), Err(DiscardReason::Forged), "bit {bit}");
    }
    for len in 0..good.len() {
        let reason =
            if len < HEADER_LEN + TAG_LEN { DiscardReason::Truncated } else { DiscardReason::Forged };
        assert_eq!(opening.open(&mut good[..len].to_vec()), Err(reason), "{len} bytes");
    }
    assert_eq!(OpeningKey::new(&material(8)).open(&mut good.clone()), Err(DiscardReason::Forged));
    assert_eq!(opening.open(&mut good), Ok(()), "none of it changed anything");
}

/// A million forged and a million replayed datagrams: none opens, and a genuine one still does.
#[test]
fn a_million_of_each_attack() {
    let (sealing, opening) = (SealingKey::new(&material(9), 2, 1), OpeningKey::new(&material(9)));
    let mut real = datagram(1_000_000, b"payload");
    sealing.seal(&mut real);
    assert_eq!(opening.open(&mut real.clone()), Ok(()));
    let (mut forged, mut replayed) = (0u32, 0u32);
    let mut attack = real.clone();
    for n in 0..1_000_000u64 {
        attack.copy_from_slice(&real);
        replayed += u32::from(opening.open(&mut attack) == Err(DiscardReason::Replayed));
        attack.copy_from_slice(&real);
        attack[NUMBER].copy_from_slice(&(1_000_001 + n).to_be_bytes());
        forged += u32::from(opening.open(&mut attack) == Err(DiscardReason::Forged));
    }
    assert_eq!((forged, replayed), (1_000_000, 1_000_000));
    let mut next = datagram(1_000_001, b"payload");
    sealing.seal(&mut next);
    assert_eq!(opening.open(&mut next), Ok(()));
}

/// Reordering within the replay window loses nothing; datagrams that arrive later are refused.
#[test]
fn datagrams_below_the_replay_window_are_refused() {
    let (sealing, opening) = (SealingKey::new(&material(9), 2, 1), OpeningKey::new(&material(9)));
    let open = |number| {
        let mut sealed = datagram(number, b"");
        sealing.seal(&mut sealed);
        opening.open(&mut sealed)
    };
    let (late, later) = (5_000, 50);
    for number in (1..=10_000).filter(|number| ![late, later].contains(number)) {
        assert_eq!(open(number), Ok(()));
    }
    assert_eq!((open(late), open(late)), (Ok(()), Err(DiscardReason::Replayed)));
    assert_eq!(open(later), Err(DiscardReason::Replayed));
}

/// The same number and payload under two keys, or two numbers under one, have nothing in common.
#[test]
fn ciphertexts_differ() {
    let mut seen = HashSet::new();
    for (key, number) in [(1, 1), (2, 1), (1, 2), (2, 2)] {
        let mut sealed = datagram(number, &[0; 32]);
        SealingKey::new(&material(key), 0, 1).seal(&mut sealed);
        assert!(seen.insert(sealed[HEADER_LEN..].to_vec()));
    }
}
