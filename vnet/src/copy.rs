//! Copying small pieces of memory without a call.

/// Copies `len` bytes. The two places may overlap, as they do when guests share memory.
///
/// Headers and small frames are copied without a call: as two blocks of fixed size, of which one begins at the first byte and
/// the other ends at the last.
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
            _ => std::ptr::copy(from, to, len),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::copy;

    #[test]
    fn copies_are_exact_and_may_overlap() {
        let fresh: Vec<u8> = (0..600).map(|i| (i * 7 + i / 256) as u8).collect();
        for len in 0..300 {
            for to in [0, 1, 63, 100, 300] {
                let (mut ours, mut theirs) = (fresh.clone(), fresh.clone());
                // SAFETY: 100 + len and to + len are at most 600, the length of `ours`.
                unsafe { copy(ours.as_ptr().add(100), ours.as_mut_ptr().add(to), len) };
                theirs.copy_within(100..100 + len, to);
                assert_eq!(ours, theirs, "{len} bytes to {to}");
            }
        }
    }
}
