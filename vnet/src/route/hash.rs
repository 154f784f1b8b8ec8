//! The keyed hash of routing: fast enough for every frame, and safe against chosen addresses (hash flooding).
//!
//! Two folded multiplications, as in wyhash and foldhash, under secret words that each structure draws from the operating system.
//! A guest that chooses addresses cannot choose their slots. (One multiplication is not enough: under some secrets it puts
//! consecutive addresses next to each other, as the test below showed.)

use std::hash::{BuildHasher, RandomState};

/// The secret words of one structure.
#[derive(Clone, Copy)]
pub(super) struct Seed(u64, u64, u64);

impl Seed {
    /// A fresh secret.
    pub(super) fn random() -> Seed {
        // std's keys come from the operating system; SipHash turns them into independent words.
        let state = RandomState::new();
        Seed(state.hash_one(0u64), state.hash_one(1u64), state.hash_one(2u64) | 1)
    }

    /// Hashes two words to 64 bits, all of which are usable.
    #[inline(always)]
    pub(super) fn hash(self, a: u64, b: u64) -> u64 {
        fold(fold(a ^ self.0, b ^ self.1), self.2)
    }
}

#[inline(always)]
fn fold(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    (product >> 64) as u64 ^ product as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Consecutive addresses, as hypervisors assign them, spread like balls thrown at random: about n/e of n bins stay empty.
    /// Checked for low bits (slots) and high bits (tags), for either word.
    #[test]
    fn consecutive_addresses_spread() {
        const BINS: usize = 4096;
        for round in 0..64 {
            let seed = Seed::random();
            for high in [false, true] {
                let mut taken = vec![false; BINS];
                for i in 0..BINS as u64 {
                    let mac = (0x5254_0000_0000 + i) << 16 | 3;
                    let hash = if round % 2 == 0 { seed.hash(mac, 77) } else { seed.hash(77, mac) };
                    let bin = if high { hash >> 52 } else { hash & (BINS as u64 - 1) };
                    taken[bin as usize] = true;
                }
                let empty = taken.iter().filter(|t| !**t).count();
                assert!(empty < BINS * 45 / 100, "{empty} of {BINS} bins are empty");
            }
        }
    }
}
