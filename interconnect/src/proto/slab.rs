//! A bounded table of numbered entries. Each reuse of a slot gets a new number, so a late packet cannot reach a newer entry in
//! the same slot.

/// Entries by number. A number combines a 16-bit slot index with a 16-bit generation.
pub(crate) struct Slab<T> {
    entries: Vec<(u16, Option<T>)>,
    free: Vec<u16>,
    max: usize,
}

impl<T> Slab<T> {
    /// Creates a table of at most `max` entries; `max` is at most 65 536.
    pub(crate) fn new(max: usize) -> Self {
        assert!(max <= 1 << 16);
        Self { entries: vec![], free: vec![], max }
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    pub(crate) fn is_full(&self) -> bool {
        self.len() >= self.max
    }

    /// Adds an entry. Returns `None` if the table is full.
    pub(crate) fn insert(&mut self, value: T) -> Option<u32> {
        let place = match self.free.pop() {
            Some(place) => place,
            None if self.entries.len() < self.max => {
                self.entries.push((0, None));
                (self.entries.len() - 1) as u16
            }
            None => return None,
        };
        let entry = &mut self.entries[usize::from(place)];
        entry.1 = Some(value);
        Some(u32::from(entry.0) << 16 | u32::from(place))
    }

    pub(crate) fn get(&self, number: u32) -> Option<&T> {
        let (life, value) = self.entries.get(number as usize & 0xffff)?;
        value.as_ref().filter(|_| u32::from(*life) == number >> 16)
    }

    pub(crate) fn get_mut(&mut self, number: u32) -> Option<&mut T> {
        let (life, value) = self.entries.get_mut(number as usize & 0xffff)?;
        value.as_mut().filter(|_| u32::from(*life) == number >> 16)
    }

    /// Returns the number of the entry in slot `place`.
    pub(crate) fn number_at(&self, place: usize) -> Option<u32> {
        let (life, value) = self.entries.get(place)?;
        value.as_ref().map(|_| u32::from(*life) << 16 | place as u32)
    }

    pub(crate) fn remove(&mut self, number: u32) -> Option<T> {
        self.get(number)?;
        let place = number as u16;
        let (life, value) = &mut self.entries[usize::from(place)];
        *life = life.wrapping_add(1);
        self.free.push(place);
        value.take()
    }

    /// Iterates over the entries.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.entries.iter().filter_map(|(_, value)| value.as_ref())
    }

    /// Returns the numbers of the entries for which `f` returns true.
    pub(crate) fn numbers(&self, mut f: impl FnMut(&T) -> bool) -> Vec<u32> {
        let entries = self.entries.iter().enumerate();
        entries
            .filter_map(|(place, (life, value))| {
                value.as_ref().filter(|value| f(value)).map(|_| u32::from(*life) << 16 | place as u32)
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_names_one_life() {
        let mut slab = Slab::new(2);
        let (a, b) = (slab.insert('a').unwrap(), slab.insert('b').unwrap());
        assert_eq!(slab.insert('c'), None);
        assert_eq!(slab.remove(a), Some('a'));
        assert_eq!(slab.remove(a), None);
        let c = slab.insert('c').unwrap();
        assert!(slab.get(a).is_none() && c != a && slab.is_full());
        assert_eq!(slab.numbers(|_| true), [c, b]);
    }
}
