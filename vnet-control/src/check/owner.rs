//! Keys that may have only one owner on a host: names, addresses and resources.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt::Display;
use std::hash::Hash;

use crate::table::{Place, Problem};

/// The owner of each key.
pub(super) struct Owners<K>(HashMap<K, (String, Place)>);

impl<K: Hash + Eq> Owners<K> {
    pub(super) fn new() -> Owners<K> {
        Owners(HashMap::new())
    }

    /// True if `key` has an owner.
    pub(super) fn is_taken(&self, key: &K) -> bool {
        self.0.contains_key(key)
    }

    /// Records `user` as the owner of `key`, or reports a problem if another user owns it.
    pub(super) fn claim(
        &mut self,
        key: K,
        what: impl Display,
        user: String,
        place: &Place,
        problems: &mut Vec<Problem>,
    ) {
        match self.0.entry(key) {
            Entry::Occupied(taken) => {
                let (by, at) = taken.get();
                let text = format!("{what} is already used by {by}{}; choose another", at.aside());
                problems.push(Problem::new(place, text));
            }
            Entry::Vacant(free) => {
                free.insert((user, place.clone()));
            }
        }
    }
}
