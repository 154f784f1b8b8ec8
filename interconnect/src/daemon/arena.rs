//! Memory through which operations on bytes outside registered memory pass.

use std::io;

use super::entry::Extent;
use crate::node::pages::Pages;
use crate::proto::Span;

/// Size of an arena. Pages that were never used take no memory.
pub(super) const BYTES: u64 = 64 << 20;
/// Size of an arena in a virtual machine, where all pages are locked in memory.
pub(super) const LOCKED_BYTES: u64 = 8 << 20;
const ALIGN: u64 = 64;
/// The process's number of the arena's memory.
pub(super) const NUMBER: u32 = 0;

pub(super) struct Arena {
    pages: Pages,
    /// Free blocks in order: offset and length. No two touch.
    free: Vec<(u64, u64)>,
}

impl Arena {
    pub(super) fn new(bytes: u64) -> io::Result<Self> {
        Ok(Self { pages: Pages::shared(bytes as usize)?, free: vec![(0, bytes)] })
    }

    pub(super) fn pages(&self) -> &Pages {
        &self.pages
    }

    /// Takes a block of at least `len` bytes. Returns `None` if none is free.
    pub(super) fn take(&mut self, len: u64) -> Option<Extent> {
        let rounded = len.checked_next_multiple_of(ALIGN)?;
        let place = self.free.iter().position(|(_, free)| *free >= rounded)?;
        let (at, free) = &mut self.free[place];
        let offset = *at;
        (*at, *free) = (*at + rounded, *free - rounded);
        if *free == 0 {
            self.free.remove(place);
        }
        Some(Extent { memory: NUMBER, offset, len })
    }

    /// Gives a block back.
    pub(super) fn give_back(&mut self, block: Extent) {
        let rounded = block.len.next_multiple_of(ALIGN);
        if rounded == 0 {
            return;
        }
        let place = self.free.partition_point(|(at, _)| *at < block.offset);
        self.free.insert(place, (block.offset, rounded));
        let touches = |free: &[(u64, u64)], first: usize| {
            free.get(first + 1).is_some_and(|(next, _)| free[first].0 + free[first].1 == *next)
        };
        for first in [Some(place), place.checked_sub(1)].into_iter().flatten() {
            if touches(&self.free, first) {
                let (_, len) = self.free.remove(first + 1);
                self.free[first].1 += len;
            }
        }
    }

    /// Bytes of a block, from `offset` within it.
    pub(super) fn span(&self, block: Extent, offset: u64, len: u64) -> Span {
        let part = self.pages.span().part(block.offset + offset, len.min(block.len.saturating_sub(offset)));
        part.unwrap_or(Span::EMPTY)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_never_overlap_and_return_whole() {
        let mut arena = Arena::new(BYTES).unwrap();
        let mut taken: Vec<Extent> = vec![];
        let mut state = 1u64;
        for _ in 0..10_000 {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let random = state >> 33;
            if random.is_multiple_of(2) {
                taken.extend(arena.take(random % (BYTES / 16)));
            } else if !taken.is_empty() {
                arena.give_back(taken.swap_remove(random as usize % taken.len()));
            }
            let mut all: Vec<(u64, u64)> =
                taken.iter().map(|block| (block.offset, block.len.next_multiple_of(ALIGN))).collect();
            all.extend(&arena.free);
            all.retain(|(_, len)| *len > 0);
            all.sort_unstable();
            assert!(all.windows(2).all(|two| two[0].0 + two[0].1 == two[1].0), "{all:?}");
            assert_eq!(all.iter().map(|(_, len)| len).sum::<u64>(), BYTES);
        }
        taken.into_iter().for_each(|block| arena.give_back(block));
        assert_eq!(arena.free, [(0, BYTES)]);
        assert!(arena.take(BYTES + 1).is_none() && arena.take(u64::MAX).is_none());
    }
}
