//! A host with an engine.

use std::sync::{Arc, Mutex, PoisonError};

use vnet_control::api;
use vnet_control::engine::Engine;
use vnet_control::events::Asker;
use vnet_control::overlay::{Computed, Local};

use super::Host;

/// The engine of this host; `None` inside when vnetd stops.
pub struct EngineHost(pub Arc<Mutex<Option<Engine>>>);

impl EngineHost {
    fn with<T: Default>(&self, task: impl FnOnce(&mut Engine) -> T) -> T {
        // A panic ends the whole process (`panic = "abort"`): nobody has left the lock poisoned.
        let mut engine = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        engine.as_mut().map(task).unwrap_or_default()
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
