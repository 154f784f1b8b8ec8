//! Indices of links and interfaces, which the control language uses as names.

use std::collections::{BTreeMap, HashMap};

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
