//! Proofs: walking descriptor chains of any content, against a naive walk of the same table.
//!
//! The table is guest memory, too: an indirect descriptor may point at the table that it is in, so that loops, nesting and tables
//! that overlap are in the domain.

use super::super::memory::GuestMemory;
use super::*;
use crate::proof::{Choices, bound, proofs};
use std::sync::Arc;

/// Guest address of the table.
const TABLE: u64 = 0x1000;
/// An address outside guest memory.
const NOWHERE: u64 = 0x9000;

/// A table of two descriptors, or three with fewer lengths and addresses.
fn any_table(choices: &mut Choices, size: usize) -> Vec<Descriptor> {
    let small = size > 2;
    let bytes = (size * Descriptor::SIZE) as u32;
    let (lens, addrs): (&[u32], &[u64]) = match small {
        false => (&[0, 1, 16, bytes], &[TABLE, TABLE + 16, NOWHERE]),
        true => (&[0, 16, bytes], &[TABLE, NOWHERE]),
    };
    (0..size)
        .map(|_| {
            let flags = choices.below(8) as u16;
            // One that ends the chain has no use for its `next`.
            let next = if flags & DESC_NEXT == 0 { 0 } else { choices.below(size as u64 + 1) as u16 };
            Descriptor { addr: choices.one_of(addrs), len: choices.one_of(lens), flags, next }
        })
        .collect()
}

/// The table's bytes that `addr` and `len` select, as descriptors.
fn indirect(table: &[Descriptor], addr: u64, len: u32) -> Option<&[Descriptor]> {
    let (first, count) = ((addr.checked_sub(TABLE)? / 16) as usize, len as usize / 16);
    (len != 0 && len.is_multiple_of(16)).then(|| table.get(first..first + count)).flatten()
}

/// Follows the chain by the words of virtio 1.2 section 2.7.5, without regard to speed: lists the descriptors, then checks the
/// list. Returns the buffers as (guest address, length, device-writable).
fn naive(table: &[Descriptor], first: Descriptor, negotiated: bool) -> Option<Vec<(u64, u32, bool)>> {
    let (mut current, mut inside, mut next, mut seen) = (table, false, first, 0);
    let mut list = vec![];
    loop {
        seen += 1;
        if seen > CHAIN_MAX {
            return None;
        }
        if next.flags & DESC_INDIRECT != 0 {
            if !negotiated || inside || next.flags & DESC_NEXT != 0 {
                return None;
            }
            current = indirect(table, next.addr, next.len)?;
            inside = true;
            next = current[0];
            continue;
        }
        list.push((next.addr, next.len, next.flags & DESC_WRITE != 0));
        if next.flags & DESC_NEXT == 0 {
            break;
        }
        next = *current.get(usize::from(next.next))?;
    }
    let end = TABLE + 16 * table.len() as u64;
    let inside = |&(addr, len, _): &(u64, u32, bool)| {
        len == 0 || (addr >= TABLE && addr < end && addr + u64::from(len) <= end)
    };
    let ordered = list.windows(2).all(|pair| !pair[0].2 || pair[1].2);
    (list.iter().all(inside) && ordered).then(|| list.into_iter().filter(|(_, len, _)| *len != 0).collect())
}

fn walks_as_the_specification_says(choices: &mut Choices, size: usize) {
    let descriptors = any_table(choices, size);
    let negotiated = choices.flag();
    let bytes: Vec<[u64; 2]> = descriptors
        .iter()
        .map(|d| [d.addr, u64::from(d.len) | u64::from(d.flags) << 32 | u64::from(d.next) << 48])
        .collect();
    let base = bytes.as_ptr().cast::<u8>().cast_mut();
    let memory = GuestMemory::of_rows(&[(TABLE, 16 * size as u64, base)]);
    let mut translator = Translator::new(Arc::new(memory));
    // Something that earlier chains have left.
    let mut buffers = vec![Buffer { ptr: base, len: 99 }];
    let table = DescriptorTable { base, size: size as u16, indirect: negotiated };
    let result = walk(table, descriptors[0], &mut translator, &mut buffers);
    assert_eq!(buffers[0].len, 99);
    match (result, naive(&descriptors, descriptors[0], negotiated)) {
        (Err(_), None) => assert_eq!(buffers.len(), 1),
        (Ok(readable), Some(expected)) => {
            assert!(expected.len() <= CHAIN_MAX);
            assert_eq!(readable, expected.iter().filter(|(_, _, writable)| !writable).count());
            let found = buffers[1..].iter().map(|b| (b.ptr as usize - base as usize, b.len));
            let wanted = expected.iter().map(|(addr, len, _)| ((addr - TABLE) as usize, *len as usize));
            assert!(found.eq(wanted));
        }
        (result, expected) => panic!("{result:?} for {descriptors:?}, which is {expected:?}"),
    }
}

proofs! {
    #[cfg_attr(kani, kani::unwind(258))]
    chains_of_two: |choices| walks_as_the_specification_says(choices, 2);
    #[cfg_attr(kani, kani::unwind(258))]
    chains_of_three: |choices| walks_as_the_specification_says(choices, bound(1, 3));
}
