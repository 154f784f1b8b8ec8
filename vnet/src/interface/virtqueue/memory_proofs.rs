//! Proofs: address translation, against a set of bytes.

use super::*;
use crate::proof::{Choices, bound, proofs};

impl GuestMemory {
    /// A table without mappings: rows of guest address, length and pointer, sorted.
    pub(in crate::interface::virtqueue) fn of_rows(rows: &[(u64, u64, *mut u8)]) -> GuestMemory {
        let row = |&(guest_addr, len, host): &(u64, u64, *mut u8)| Row { guest_addr, len, host };
        GuestMemory { rows: rows.iter().map(row).collect(), regions: vec![] }
    }
}

/// Regions of up to three bytes each with gaps of up to two, at `base`. No pointer is dereferenced.
fn any_rows(choices: &mut Choices, base: u64, most: u64) -> Vec<(u64, u64, *mut u8)> {
    let (mut rows, mut next) = (vec![], base);
    for index in 0..choices.below(most + 1) {
        let guest_addr = next + choices.below(3);
        let len = 1 + choices.below(3);
        // In another order than the guest addresses.
        let host = std::ptr::without_provenance_mut(0x9000 - 0x100 * index as usize);
        rows.push((guest_addr, len, host));
        next = guest_addr + len;
    }
    rows
}

/// The pointer to `addr` if `len` bytes from there are bytes of one row, counted one by one.
fn naive(rows: &[(u64, u64, *mut u8)], addr: u64, len: usize) -> Option<*mut u8> {
    rows.iter().find_map(|&(start, size, host)| {
        let offset = (0..size).find(|at| start + at == addr)?;
        // A range of no bytes needs only its first address.
        (len == 0 || (len as u64 <= size && (offset..offset + len as u64).all(|at| at < size)))
            .then(|| host.wrapping_add(offset as usize))
    })
}

/// Lowest addresses, the last ones before 2^64, and the sign bit.
const BASES: [u64; 3] = [0, u64::MAX - 16, (1 << 63) - 8];

/// A translation, after another one that may have left its row in the translator's cache.
fn translates_exactly_the_bytes_of_one_region(choices: &mut Choices) {
    let base = choices.one_of(&BASES);
    let rows = any_rows(choices, base, bound(2, 3));
    let memory = Arc::new(GuestMemory::of_rows(&rows));
    let mut translator = Translator::new(memory.clone());
    if choices.flag() {
        translator.translate(base + choices.below(8), 1);
    }
    // From one byte below the base, which may wrap.
    let addr = base.wrapping_sub(1).wrapping_add(choices.below(17));
    let len = choices.one_of(&[0, 1, 2, 3, 4, 17, usize::MAX - 2, usize::MAX]);
    let expected = naive(&rows, addr, len);
    assert_eq!(memory.translate(addr, len), expected);
    assert_eq!(translator.translate(addr, len), expected);
    if let Some(pointer) = expected {
        assert_eq!(memory.guest_addr(pointer), Some(addr));
    }
}

/// Overlap of up to four ranges, compared with the bytes that two of them share.
fn finds_an_overlap_exactly_if_two_regions_share_a_byte(choices: &mut Choices) {
    let base = choices.one_of(&[0, u64::MAX - 16]);
    let count = choices.below(bound(4, 5)) as usize;
    let mut ranges: Vec<(u64, u64)> =
        (0..count).map(|_| (base + choices.below(bound(4, 6)), 1 + choices.below(3))).collect();
    let shares = |(a, a_len): (u64, u64), (b, b_len): (u64, u64)| {
        (a..a + a_len).any(|byte| (b..b + b_len).contains(&byte))
    };
    let expected = (0..count).any(|i| (0..i).any(|j| shares(ranges[i], ranges[j])));
    ranges.sort_by_key(|(start, _)| *start);
    assert_eq!(first_overlap(ranges.into_iter()).is_some(), expected);
}

proofs! {
    #[cfg_attr(kani, kani::unwind(18))]
    translation: translates_exactly_the_bytes_of_one_region;
    #[cfg_attr(kani, kani::unwind(8))]
    overlap: finds_an_overlap_exactly_if_two_regions_share_a_byte;
}
