//! Single changes of the configured state: each one builds a new desired state, which is checked and applied like any other.

use std::collections::HashSet;

use vnet::frame::NetworkId;
use vnet::route::Qualifier;
use vnet::wire::ethernet::Mac;

use super::config::{self, ConfigError};
use super::desired::*;
use super::engine::{Engine, EngineError, Listed};
use super::open_close::Patience;

impl Engine {
    fn edit(&mut self, edit: impl FnOnce(&mut Desired)) -> Result<(), EngineError> {
        let mut desired = self.own.clone();
        edit(&mut desired);
        config::validate(&desired)?;
        self.change(desired, Patience::None).map(drop)
    }

    /// Adds an interface and returns its index.
    pub fn add_interface(&mut self, item: Item<InterfaceSpec>) -> Result<u32, EngineError> {
        let name = item.spec.name.clone();
        self.edit(|desired| desired.interfaces.push(item))?;
        Ok(self.indices.interface(&name))
    }

    /// Changes settings of an open interface; `change` derives the new spec from the old one.
    pub fn change_interface(
        &mut self,
        name: &str,
        change: impl FnOnce(&InterfaceSpec) -> Result<InterfaceSpec, ConfigError>,
    ) -> Result<(), EngineError> {
        let at = self.current.interfaces.iter().position(|item| item.spec.name == name);
        let at = at.ok_or_else(|| EngineError::no(&Target::Interface(name.into())))?;
        let spec = change(&self.current.interfaces[at].spec)?;
        self.edit(|desired| desired.interfaces[at].spec = spec)
    }

    /// Adds a link and returns its index. A computed link of the same name is replaced and keeps its index.
    pub fn add_link(&mut self, item: Item<LinkSpec>) -> Result<u32, EngineError> {
        let name = item.spec.name.clone();
        self.edit(|desired| desired.links.push(item))?;
        Ok(self.indices.link(&name))
    }

    /// Adds a rule and returns its index.
    pub fn add_route(&mut self, item: Item<RouteSpec>) -> Result<u32, EngineError> {
        self.edit(|desired| desired.routes.push(item))?;
        Ok(self.next_route - 1)
    }

    /// Removes an interface that no rule names.
    pub fn remove_interface(&mut self, name: &str) -> Result<(), EngineError> {
        let target = Target::Interface(name.into());
        if !self.interfaces.contains_key(name) {
            return Err(EngineError::no(&target));
        }
        self.not_in_use(target)?;
        self.edit(|desired| desired.interfaces.retain(|item| item.spec.name != name))
    }

    /// Removes a link that no rule names.
    pub fn remove_link(&mut self, name: &str) -> Result<(), EngineError> {
        let target = Target::Link(name.into());
        if !self.links.contains_key(name) {
            return Err(EngineError::no(&target));
        }
        if !self.own.links.iter().any(|item| item.spec.name == name) {
            return Err(EngineError::Computed(target));
        }
        self.not_in_use(target)?;
        self.edit(|desired| desired.links.retain(|item| item.spec.name != name))
    }

    /// Removes the rule with index `index`.
    pub fn remove_route(&mut self, index: u32) -> Result<(), EngineError> {
        let found = self.route_indices.iter().find(|(_, i)| **i == index).map(|(spec, _)| spec.clone());
        let spec = found.ok_or_else(|| EngineError::NotFound(format!("route {index}"), Listed::Routes))?;
        self.edit(|desired| desired.routes.retain(|item| item.spec != spec))
    }

    /// Makes all rules for frames to `dst` lead to `to` and returns their indices, in order. Dispatchers switch from the old rules
    /// to the new ones at once: no frame meets neither, and none meets both.
    pub fn move_routes(
        &mut self,
        network: NetworkId,
        dst: Mac,
        to: &Target,
    ) -> Result<Vec<u32>, EngineError> {
        let leads_there = |spec: &RouteSpec| spec.network == network && spec.dst == Qualifier::Is(dst);
        if !self.own.routes.iter().any(|item| leads_there(&item.spec)) {
            let what = format!("route to {dst} in network {network}");
            return Err(EngineError::NotFound(what, Listed::Routes));
        }
        self.edit(|desired| {
            let mut known = HashSet::new();
            desired.routes.retain_mut(|item| {
                if leads_there(&item.spec) {
                    item.spec.to = to.clone();
                }
                // Rules that differed in their target only are one rule now.
                known.insert(item.spec.clone())
            });
        })?;
        let moved = self.route_indices.iter().filter(|(spec, _)| leads_there(spec) && spec.to == *to);
        let mut moved: Vec<_> = moved.map(|(_, index)| *index).collect();
        moved.sort_unstable();
        Ok(moved)
    }

    fn not_in_use(&self, target: Target) -> Result<(), EngineError> {
        let routes = self.current.routes.iter().filter(|item| item.spec.names(&target));
        match routes.map(|item| &item.spec).next() {
            Some(spec) => {
                let routes = format!("{} ({spec})", self.route_indices[spec]);
                Err(EngineError::InUse { target, routes })
            }
            None => Ok(()),
        }
    }
}
