//! The difference between the current and the desired state of a host.
//!
//! A [`Plan`] is a pure value: objects to remove, add and change, per kind. Applying it turns the current state into the desired
//! one. Objects that do not differ are not in the plan and keep running.

use std::collections::HashMap;
use std::fmt;
use std::hash::Hash;

use super::api;
use super::desired::*;
use super::settings;
use vnet::frame::NetworkId;

/// The objects of one kind that a plan removes, adds or changes.
#[derive(Clone, Debug, PartialEq)]
pub struct Diff<T> {
    /// Objects to remove.
    pub removed: Vec<Item<T>>,
    /// Objects to add.
    pub added: Vec<Item<T>>,
    /// Objects to change: current, desired.
    pub changed: Vec<(Item<T>, Item<T>)>,
}

impl<T> Diff<T> {
    fn is_empty(&self) -> bool {
        self.removed.is_empty() && self.added.is_empty() && self.changed.is_empty()
    }
}

impl<T: Clone + PartialEq> Diff<T> {
    /// Compares two lists; items with equal keys are the same object.
    fn between<'a, K: Hash + Eq>(
        current: &'a [Item<T>],
        desired: &'a [Item<T>],
        key: impl Fn(&'a T) -> K,
    ) -> Diff<T> {
        let is: HashMap<K, &Item<T>> = current.iter().map(|item| (key(&item.spec), item)).collect();
        let wanted: HashMap<K, &Item<T>> = desired.iter().map(|item| (key(&item.spec), item)).collect();
        let mut diff = Diff { removed: vec![], added: vec![], changed: vec![] };
        diff.removed.extend(current.iter().filter(|item| !wanted.contains_key(&key(&item.spec))).cloned());
        for item in desired {
            match is.get(&key(&item.spec)) {
                None => diff.added.push(item.clone()),
                Some(old) if **old != *item => diff.changed.push(((*old).clone(), item.clone())),
                Some(_) => {}
            }
        }
        diff
    }
}

/// All differences between two states.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// The host's name: current, desired.
    pub host: Option<(HostSpec, HostSpec)>,
    /// The dispatchers' threads: current, desired.
    pub dispatch: Option<(DispatchSpec, DispatchSpec)>,
    /// Networks.
    pub networks: Diff<NetworkSpec>,
    /// Interfaces, by name.
    pub interfaces: Diff<InterfaceSpec>,
    /// Links, by name.
    pub links: Diff<LinkSpec>,
    /// Rules. A rule has no name: a changed one is removed and added.
    pub routes: Diff<RouteSpec>,
}

impl Plan {
    /// The plan that turns `current` into `desired`.
    pub fn between(current: &Desired, desired: &Desired) -> Plan {
        fn both<T: Clone + PartialEq>(is: &T, wanted: &T) -> Option<(T, T)> {
            (is != wanted).then(|| (is.clone(), wanted.clone()))
        }
        Plan {
            host: both(&current.host.spec, &desired.host.spec),
            dispatch: both(&current.dispatch.spec, &desired.dispatch.spec),
            networks: Diff::between(&networks(current), &networks(desired), |spec| spec.id),
            interfaces: Diff::between(&current.interfaces, &desired.interfaces, |spec| spec.name.as_str()),
            links: Diff::between(&current.links, &desired.links, |spec| spec.name.as_str()),
            routes: Diff::between(&current.routes, &desired.routes, |spec| spec),
        }
    }

    /// True if the states do not differ.
    pub fn is_empty(&self) -> bool {
        self.host.is_none()
            && self.dispatch.is_none()
            && self.networks.is_empty()
            && self.interfaces.is_empty()
            && self.links.is_empty()
            && self.routes.is_empty()
    }

    /// The steps in display order, removals first. `apply.rs` decides the order of execution.
    pub fn changes(&self) -> Vec<api::Change> {
        let mut changes = vec![];
        if let Some((is, wanted)) = &self.host {
            let detail = format!("{} -> {}", is.name, wanted.name);
            changes.push(change(api::Action::Change, "host", "name", detail));
        }
        if let Some((is, wanted)) = &self.dispatch {
            changes.extend(settings::dispatch_changes(is, wanted).into_iter().map(|(key, from, to)| {
                change(api::Action::Change, "dispatch", key, format!("{from} -> {to}"))
            }));
        }
        list(&mut changes, "route", &self.routes, |_| String::new());
        list(&mut changes, "link", &self.links, |spec| spec.name.clone());
        list(&mut changes, "interface", &self.interfaces, |spec| spec.name.clone());
        list(&mut changes, "network", &self.networks, |spec| spec.id.to_string());
        changes.sort_by_key(|change| change.action);
        changes
    }
}

/// The networks, including network 1, which exists without being declared.
pub(crate) fn networks(desired: &Desired) -> Vec<Item<NetworkSpec>> {
    let mut networks = desired.networks.clone();
    if !networks.iter().any(|item| item.spec.id == NetworkId::DEFAULT) {
        let spec = NetworkSpec::new(NetworkId::DEFAULT);
        networks.insert(0, Item { place: super::Place::default(), spec });
    }
    networks
}

fn change(action: api::Action, object: &str, name: impl Into<String>, detail: String) -> api::Change {
    api::Change { action, object: object.into(), name: name.into(), detail }
}

fn list<T: fmt::Display>(
    changes: &mut Vec<api::Change>,
    object: &str,
    diff: &Diff<T>,
    name: impl Fn(&T) -> String,
) {
    for Item { spec, .. } in &diff.removed {
        changes.push(change(api::Action::Remove, object, name(spec), spec.to_string()));
    }
    for (is, wanted) in &diff.changed {
        let detail = format!("{} -> {}", is.spec, wanted.spec);
        changes.push(change(api::Action::Change, object, name(&is.spec), detail));
    }
    for Item { spec, .. } in &diff.added {
        changes.push(change(api::Action::Add, object, name(spec), spec.to_string()));
    }
}

impl fmt::Display for Plan {
    /// One line per step: `+` added, `-` removed, `~` changed.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lines: Vec<_> = self.changes().iter().map(ToString::to_string).collect();
        f.write_str(&lines.join("\n"))
    }
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
