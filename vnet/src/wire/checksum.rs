//! The Internet checksum (RFC 1071), summed in 32-bit words and folded at the end.

/// A running ones' complement sum. Pieces may be added in any order; all but the last must have even length.
#[derive(Clone, Copy, Default, Debug)]
pub struct Sum(u64);

impl Sum {
    /// Adds bytes; an odd last byte counts as the high half of a word.
    #[inline]
    pub fn with(mut self, bytes: &[u8]) -> Sum {
        // Words are summed in native order: ones' complement addition commutes with swapping bytes (RFC 1071 section 2 B).
        let mut chunks = bytes.chunks_exact(4);
        for chunk in &mut chunks {
            let [a, b, c, d] = *chunk else { continue };
            self.0 += u64::from(u32::from_ne_bytes([a, b, c, d]));
        }
        let mut tail = [0; 4];
        let rest = chunks.remainder();
        tail[..rest.len()].copy_from_slice(rest);
        self.0 += u64::from(u32::from_ne_bytes(tail));
        // 2^30 additions of 32-bit words cannot overflow 64 bits; a frame has at most 2^14, so folding per call suffices.
        self.0 = (self.0 & 0xffff_ffff) + (self.0 >> 32);
        self
    }

    /// Adds one 16-bit word in host order.
    #[inline]
    pub fn with_u16(self, word: u16) -> Sum {
        self.with(&word.to_be_bytes())
    }

    /// The sum folded to 16 bits, not complemented. Over the pseudo-header, this is the value of a partial checksum field.
    #[inline]
    pub fn partial(self) -> u16 {
        let mut sum = self.0;
        while sum >> 16 != 0 {
            sum = (sum & 0xffff) + (sum >> 16);
        }
        u16::from_be((sum & 0xffff) as u16)
    }

    /// The complement of the sum, as a header field holds it.
    #[inline]
    pub fn finish(self) -> u16 {
        !self.partial()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// RFC 1071 section 4.1, word by word.
    fn naive(bytes: &[u8]) -> u16 {
        let mut sum = 0u32;
        for pair in bytes.chunks(2) {
            sum += u32::from(u16::from_be_bytes([pair[0], *pair.get(1).unwrap_or(&0)]));
        }
        while sum > 0xffff {
            sum = (sum & 0xffff) + (sum >> 16);
        }
        !(sum as u16)
    }

    proptest! {
        #[test]
        fn equals_the_naive_sum(bytes in prop::collection::vec(any::<u8>(), 0..3000), cut in 0usize..1500) {
            prop_assert_eq!(Sum::default().with(&bytes).finish(), naive(&bytes));
            let cut = (cut * 2).min(bytes.len() & !1);
            prop_assert_eq!(Sum::default().with(&bytes[..cut]).with(&bytes[cut..]).finish(), naive(&bytes));
        }
    }
}
