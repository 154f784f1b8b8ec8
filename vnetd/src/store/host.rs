//! The host that an agent serves.

use std::sync::Arc;

use parking_lot::Mutex;
use vnet_control::api;
use vnet_control::engine::Engine;
use vnet_control::events::Asker;
use vnet_control::overlay::{Computed, Local};

/// Interface between an agent and its host: a real engine, or a simulated host.
pub trait Host {
    /// Stations on this host.
    fn locals(&mut self) -> Vec<Local>;

    /// Hosts whose links received something recently.
    fn heard(&mut self) -> Vec<String>;

    /// Applies the computed links and stations; returns a line for each that cannot be applied.
    fn join(&mut self, computed: Computed) -> Vec<String>;

    /// Publishes the overlay's state for `vnet overlay`.
    fn show(&mut self, shown: api::Overlay);
}

/// This host's engine; `None` while vnetd stops.
pub struct EngineHost(pub Arc<Mutex<Option<Engine>>>);

impl EngineHost {
    fn with<T: Default>(&self, task: impl FnOnce(&mut Engine) -> T) -> T {
        self.0.lock().as_mut().map(task).unwrap_or_default()
    }
}

impl Host for EngineHost {
    fn locals(&mut self) -> Vec<Local> {
        self.with(|engine| engine.locals())
    }

    fn heard(&mut self) -> Vec<String> {
        self.with(|engine| engine.heard())
    }

    fn join(&mut self, computed: Computed) -> Vec<String> {
        let store = Asker::Part("the overlay's store");
        self.with(|engine| match engine.on_behalf(store, |engine| engine.join(computed)) {
            Ok((_, refused)) => refused,
            Err(error) => error.to_string().lines().map(String::from).collect(),
        })
    }

    fn show(&mut self, shown: api::Overlay) {
        self.with(|engine| engine.show_overlay(shown));
    }
}
