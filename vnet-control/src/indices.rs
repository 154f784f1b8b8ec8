//! Indices of links and interfaces, which the control language uses as names.

use std::collections::{BTreeMap, HashMap};

use serde::{Deserialize, Serialize};

use super::plan::Plan;

/// Indices of links and interfaces: they count from 1, are never reused, and stay with a name as long as it exists.
#[derive(Default)]
pub struct Indices {
    links: Numbers,
    interfaces: Numbers,
}

#[derive(Default)]
struct Numbers {
    by_name: HashMap<String, u32>,
    by_index: BTreeMap<u32, String>,
    used: u32,
}

impl Numbers {
    fn follow<'a>(
        &mut self,
        removed: impl Iterator<Item = &'a String>,
        added: impl Iterator<Item = &'a String>,
    ) {
        for name in removed {
            if let Some(index) = self.by_name.remove(name) {
                self.by_index.remove(&index);
            }
        }
        for name in added {
            self.used += 1;
            self.by_name.insert(name.clone(), self.used);
            self.by_index.insert(self.used, name.clone());
        }
    }

    fn index(&self, name: &str) -> u32 {
        self.by_name.get(name).copied().unwrap_or(0)
    }

    fn assigned(&self) -> AssignedNumbers {
        AssignedNumbers { by_name: self.by_name.clone().into_iter().collect(), used: self.used }
    }

    /// Gives the objects that exist the numbers that they had.
    fn resume(&mut self, before: AssignedNumbers) {
        let AssignedNumbers { by_name, used } = before;
        let known = |(name, _): &(String, u32)| self.by_name.contains_key(name);
        let kept: Vec<_> = by_name.into_iter().filter(known).collect();
        let next = used.max(kept.iter().map(|(_, index)| *index).max().unwrap_or(0));
        let new: Vec<_> = self
            .by_index
            .values()
            .filter(|name| !kept.iter().any(|(known, _)| known == *name))
            .cloned()
            .collect();
        self.used = next;
        self.by_name = kept.into_iter().collect();
        for name in new {
            self.used += 1;
            self.by_name.insert(name, self.used);
        }
        self.by_index = self.by_name.iter().map(|(name, index)| (*index, name.clone())).collect();
    }
}

/// Indices as another vnetd gets them that takes over.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Assigned {
    links: AssignedNumbers,
    interfaces: AssignedNumbers,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct AssignedNumbers {
    by_name: BTreeMap<String, u32>,
    used: u32,
}

impl Indices {
    /// Assigns indices to objects that a plan adds, and drops those of objects that it removes.
    pub(super) fn follow(&mut self, plan: &Plan) {
        let (links, interfaces) = (&plan.links, &plan.interfaces);
        self.links.follow(
            links.removed.iter().map(|item| &item.spec.name),
            links.added.iter().map(|item| &item.spec.name),
        );
        self.interfaces.follow(
            interfaces.removed.iter().map(|item| &item.spec.name),
            interfaces.added.iter().map(|item| &item.spec.name),
        );
    }

    /// All indices, for the vnetd that takes over.
    pub(super) fn assigned(&self) -> Assigned {
        Assigned { links: self.links.assigned(), interfaces: self.interfaces.assigned() }
    }

    /// Gives the objects that exist the indices that they had in another vnetd.
    pub(super) fn resume(&mut self, before: Assigned) {
        self.links.resume(before.links);
        self.interfaces.resume(before.interfaces);
    }

    /// A link's index; 0 if unknown.
    pub fn link(&self, name: &str) -> u32 {
        self.links.index(name)
    }

    /// An interface's index; 0 if unknown.
    pub fn interface(&self, name: &str) -> u32 {
        self.interfaces.index(name)
    }

    /// The name of the link with an index.
    pub fn link_name(&self, index: u32) -> Option<&str> {
        self.links.by_index.get(&index).map(String::as_str)
    }

    /// The name of the interface with an index.
    pub fn interface_name(&self, index: u32) -> Option<&str> {
        self.interfaces.by_index.get(&index).map(String::as_str)
    }

    /// The index that the next link gets.
    pub fn next_link(&self) -> u32 {
        self.links.used + 1
    }
}
