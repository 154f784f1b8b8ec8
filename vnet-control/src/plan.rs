//! The difference between what a host is and what it should be.
//!
//! A [`Plan`] is a pure value: what goes, what comes, what changes, per kind of object. Carrying it out makes the one
//! state the other; when there is no difference it is empty. What is not in it is not touched.

use std::collections::HashMap;
use std::fmt;
use std::hash::Hash;
use std::net::SocketAddr;

use super::api;
use super::desired::*;
use super::table::Problem;
use vnet::frame::NetworkId;

/// What to do to the objects of one kind.
#[derive(Clone, Debug, PartialEq)]
pub struct Diff<T> {
    /// There, but not wanted.
    pub removed: Vec<Item<T>>,
    /// Wanted, but not there.
    pub added: Vec<Item<T>>,
    /// There, but wanted otherwise: as it is, as it should be.
    pub changed: Vec<(Item<T>, Item<T>)>,
}

impl<T> Diff<T> {
    fn is_empty(&self) -> bool {
        self.removed.is_empty() && self.added.is_empty() && self.changed.is_empty()
    }
}

impl<T: Clone + PartialEq> Diff<T> {
    /// Compares two lists, whose items are the same object when their keys are equal.
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

/// Everything that differs.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// The host's name.
    pub host: Option<(HostSpec, HostSpec)>,
    /// Networks.
    pub networks: Diff<NetworkSpec>,
    /// Interfaces, by name.
    pub interfaces: Diff<InterfaceSpec>,
    /// Links, by name.
    pub links: Diff<LinkSpec>,
    /// Rules; one that differs in anything is another one.
    pub routes: Diff<RouteSpec>,
}

impl Plan {
    /// What makes `current` be `desired`.
    pub fn between(current: &Desired, desired: &Desired) -> Plan {
        let (is, wanted) = (&current.host.spec, &desired.host.spec);
        Plan {
            host: (is != wanted).then(|| (is.clone(), wanted.clone())),
            networks: Diff::between(&networks(current), &networks(desired), |spec| spec.id),
            interfaces: Diff::between(&current.interfaces, &desired.interfaces, |spec| spec.name.as_str()),
            links: Diff::between(&current.links, &desired.links, |spec| spec.name.as_str()),
            routes: Diff::between(&current.routes, &desired.routes, |spec| spec),
        }
    }

    /// True when there is nothing to do.
    pub fn is_empty(&self) -> bool {
        self.host.is_none()
            && self.networks.is_empty()
            && self.interfaces.is_empty()
            && self.links.is_empty()
            && self.routes.is_empty()
    }

    /// The single steps, what goes first.
    pub fn changes(&self) -> Vec<api::Change> {
        let mut changes = vec![];
        if let Some((is, wanted)) = &self.host {
            let detail = format!("{} -> {}", is.name, wanted.name);
            changes.push(change(api::Action::Change, "host", "name", detail));
        }
        list(&mut changes, "route", &self.routes, |_| String::new());
        list(&mut changes, "link", &self.links, |spec| spec.name.clone());
        list(&mut changes, "interface", &self.interfaces, |spec| spec.name.clone());
        list(&mut changes, "network", &self.networks, |spec| spec.id.to_string());
        changes.sort_by_key(|change| change.action);
        changes
    }
}

/// The networks with the default one, which is there even when nothing is said about it.
pub(super) fn networks(desired: &Desired) -> Vec<Item<NetworkSpec>> {
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
    /// One line a step: `+` comes, `-` goes, `~` changes.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lines: Vec<_> = self.changes().iter().map(ToString::to_string).collect();
        f.write_str(&lines.join("\n"))
    }
}

/// What differs in settings that are fixed while vnetd runs; empty when nothing does.
pub fn restart_needed(current: &Desired, desired: &Desired) -> Vec<Problem> {
    let mut problems = vec![];
    let mut fixed = |place, table: &str, what: String| {
        let text = format!("[{table}] {what}, which takes a restart of vnetd; nothing was changed");
        problems.push(Problem::new(place, text));
    };
    let (is, wanted) = (&current.control, &desired.control);
    if is != wanted {
        let (is, to) = (&is.spec, &wanted.spec);
        let what = if is.socket != to.socket {
            format!("socket changes from {} to {}", is.socket.display(), to.socket.display())
        } else {
            "http, console, token_file or tls_… changes".into()
        };
        fixed(&wanted.place, "control", what);
    }
    if current.dispatch != desired.dispatch {
        let DispatchSpec { threads, yield_strategy, .. } = &desired.dispatch.spec;
        let what = format!("changes (threads = {threads}, yield = {}, …)", yield_strategy);
        fixed(&desired.dispatch.place, "dispatch", what);
    }
    let (is, wanted) = (&current.bridge, &desired.bridge);
    if is != wanted {
        let place = &wanted.place;
        for (key, is, wanted) in [
            ("listen", Some(is.spec.listen), Some(wanted.spec.listen)),
            ("vxlan_listen", is.spec.vxlan_listen, wanted.spec.vxlan_listen),
            ("stream_listen", is.spec.stream_listen, wanted.spec.stream_listen),
        ] {
            if is != wanted {
                let show = |address: Option<SocketAddr>| address.map_or("nowhere".into(), |a| a.to_string());
                fixed(place, "bridge", format!("{key} changes from {} to {}", show(is), show(wanted)));
            }
        }
        let (before, after) = (is.spec.zero_copy, wanted.spec.zero_copy);
        if before != after {
            fixed(place, "bridge", format!("zero_copy changes from {before} to {after}"));
        }
        for (key, is, wanted) in [
            ("ports", u32::from(is.spec.ports), u32::from(wanted.spec.ports)),
            ("rekey_s", is.spec.rekey_s, wanted.spec.rekey_s),
            ("meetings", u32::from(is.spec.meetings), u32::from(wanted.spec.meetings)),
        ] {
            if is != wanted {
                fixed(place, "bridge", format!("{key} changes from {is} to {wanted}"));
            }
        }
    }
    let (is, wanted) = (&current.overlay, &desired.overlay);
    if is != wanted {
        let place = wanted.as_ref().map_or(&desired.host.place, |item| &item.place);
        let what = match (is, wanted) {
            (None, _) => "is new",
            (_, None) => "is gone",
            _ => "changes",
        };
        fixed(place, "overlay", what.into());
    }
    if current.identity != desired.identity {
        let place = desired.identity.as_ref().or(current.identity.as_ref()).map(|item| &item.place);
        let what = "names other files (to renew a certificate, replace those that are there)";
        fixed(place.unwrap_or(&desired.host.place), "identity", what.into());
    }
    // A certificate is for a name, and which of two hosts connects depends on their names.
    if current.identity.is_some() && current.host != desired.host {
        let what = format!("name changes to {} beside an [identity]", desired.host.spec.name);
        fixed(&desired.host.place, "host", what);
    }
    problems
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
