//! Copying between guests' memories and our own: small pieces without a call, long ones without a trap of `rep movsb`.
//!
//! The C library copies long pieces with `rep movsb` where the processor calls it fast. AMD's Zen 3 and 4 are then ten times slower
//! (3 in place of 30 GB/s) when the destination's place in its page is 1 to 15 bytes behind the source's (glibc's bug
//! 30994). That is the usual case here: a driver's receive buffer is a page, 12 bytes of which are the virtio-net header,
//! and what a sender's pages hold goes behind it.

/// Copies `len` bytes. The two places may overlap, as they do when guests share memory.
///
/// Headers and small frames are copied without a call: as two blocks of fixed size, of which one begins at the first byte and
/// the other ends at the last. The rest is left to the C library, but for long pieces whose places in their pages nearly agree.
///
/// # Safety
/// `len` bytes must be readable at `from` and writable at `to`.
#[inline(always)]
pub(crate) unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    /// # Safety
    /// As for [`copy`], and `len` is at least that of `Block`, which needs no alignment.
    #[inline(always)]
    unsafe fn ends<Block: Copy>(from: *const u8, to: *mut u8, len: usize) {
        let last = len - size_of::<Block>();
        // SAFETY: both blocks are inside the `len` bytes. Both are read before one is written.
        unsafe {
            let blocks =
                (from.cast::<Block>().read_unaligned(), from.add(last).cast::<Block>().read_unaligned());
            to.cast::<Block>().write_unaligned(blocks.0);
            to.add(last).cast::<Block>().write_unaligned(blocks.1);
        }
    }
    // SAFETY: as the caller promises, with blocks no longer than `len`.
    unsafe {
        match len {
            8..=16 => ends::<[u8; 8]>(from, to, len),
            17..=32 => ends::<[u8; 16]>(from, to, len),
            33..=64 => ends::<[u8; 32]>(from, to, len),
            65..=128 => ends::<[u8; 64]>(from, to, len),
            LONG.. if nearly_agree(from, to, len) => blocks(from, to, len),
            _ => std::ptr::copy(from, to, len),
        }
    }
}

/// From this length on the C library might use `rep movsb`; glibc does so from 2 112 bytes on, if not later.
const LONG: usize = 2048;
/// Four of the vector registers that every x86-64 and ARMv8 has.
type Block = [u8; 64];

/// Whether `to` lies less than a block behind `from` once whole pages are taken off, in places that do not overlap.
#[inline]
fn nearly_agree(from: *const u8, to: *mut u8, len: usize) -> bool {
    let (from, to) = (from.addr(), to.addr());
    (1..size_of::<Block>()).contains(&(to.wrapping_sub(from) % 4096)) && from.abs_diff(to) >= len
}

/// Copies block by block, forwards. Backwards no load would have the low address bits of a store just before it, which processors
/// may take for the same place; here it is slower nonetheless (109 against 149 Gbit/s of super-frames, EPYC).
///
/// # Safety
/// As for [`copy`]; `len` is at least that of a block, and the places do not overlap.
unsafe fn blocks(from: *const u8, to: *mut u8, len: usize) {
    let last = len - size_of::<Block>();
    let mut at = 0;
    loop {
        // SAFETY: `at` is at most `last`, a block before the end. A block needs no alignment.
        unsafe { to.add(at).cast::<Block>().write_unaligned(from.add(at).cast::<Block>().read_unaligned()) };
        if at == last {
            return;
        }
        // The last block may be written in part already: with the same bytes.
        at = (at + size_of::<Block>()).min(last);
    }
}

#[cfg(test)]
mod tests {
    use super::{LONG, copy};

    #[test]
    fn copies_are_exact_and_may_overlap() {
        const ROOM: usize = 10_000;
        let fresh: Vec<u8> = (0..ROOM).map(|i| (i * 7 + i / 256) as u8).collect();
        let short = (0..300).flat_map(|len| [0, 1, 63, 100, 300].map(|to| (len, 100, to)));
        let lengths = [LONG - 1, LONG, LONG + 1, LONG + 63, 4000];
        // Apart by far, by less than a page and by less than a block, both ways, and not at all.
        let places = [
            (0, 5000),
            (12, 5000),
            (5000, 0),
            (100, 88),
            (100, 1),
            (100, 100),
            (88, 100),
            (1, 100),
            (0, 3000),
        ];
        let long = lengths.into_iter().flat_map(|len| places.map(|(from, to)| (len, from, to)));
        for (len, from, to) in short.chain(long) {
            let (mut ours, mut theirs) = (fresh.clone(), fresh.clone());
            // SAFETY: from + len and to + len are at most 9 000, and `ours` has ROOM bytes.
            unsafe { copy(ours.as_ptr().add(from), ours.as_mut_ptr().add(to), len) };
            theirs.copy_within(from..from + len, to);
            assert!(ours == theirs, "{len} bytes from {from} to {to}");
        }
    }
}
