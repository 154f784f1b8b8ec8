//! Runs the overlay's agent in a separate thread, so that the store's latency never delays the API.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::thread::JoinHandle;

use crate::store::{Agent, EngineHost, LastKnown, Options, settings};
use tokio::sync::watch::{Sender, channel};
use vnet::frame::NetworkId;
use vnet_control::desired::Desired;
use vnet_control::engine::Engine;
use vnet_control::overlay::{Authenticator, Computed, Overlay};

use crate::shared::Shared;

/// A running agent.
pub struct Running {
    stop: Sender<bool>,
    thread: JoinHandle<()>,
}

impl Running {
    /// Signals the agent to leave the overlay, and waits until it has ended.
    pub fn stop(self) {
        // The channel has no receiver if the agent has already ended.
        let _ = self.stop.send(true);
        if self.thread.join().is_err() {
            tracing::error!(
                "the overlay's agent panicked: news of other hosts was missed; restart vnetd and report this"
            );
        }
    }
}

/// The overlay's state before its agent has connected to the store.
pub struct Prepared {
    overlay: Overlay,
    authenticator: Option<Authenticator>,
    kept: LastKnown,
}

/// Prepares the overlay, if the configuration has an `[overlay]`, from the last known state of the previous run. Returns the
/// links and stations computed from that state.
pub fn prepare(engine: &Engine, desired: &Desired) -> Option<(Prepared, Computed)> {
    let spec = &desired.overlay.as_ref()?.spec;
    let declared = desired.networks.iter().map(|item| item.spec.id).chain([NetworkId::DEFAULT]);
    let me = desired.host.spec.name.as_str();
    let mut overlay = Overlay::new(me.into(), instance(), settings(spec, declared));
    let mut authenticator = engine.identity().filter(|_| spec.sealed).map(Authenticator::new);
    let kept = LastKnown::new(spec, me);
    let records = kept.read();
    if !records.is_empty() {
        let restored = overlay.restore(authenticator.as_mut(), &records);
        let (all, file) = (records.len(), kept.path().display());
        tracing::info!(
            "overlay: starting with {restored} of {all} records of the last known state in {file}"
        );
    }
    overlay.locals(&Engine::planned_locals(desired));
    let computed = overlay.computed();
    Some((Prepared { overlay, authenticator, kept }, computed))
}

/// Starts the agent of a prepared overlay.
pub fn start(shared: &Shared, prepared: Prepared) -> Result<Option<Running>, Box<dyn std::error::Error>> {
    let mut locked = shared.lock();
    let Some(engine) = locked.as_mut() else { return Ok(None) };
    let Some(spec) = engine.current().overlay.as_ref().map(|item| &item.spec) else { return Ok(None) };
    let options = Options::new(spec, engine.bridge_address())?;
    // Whoever asks before the agent's first report learns that this host is in an overlay.
    engine.show_overlay(prepared.overlay.show(&options.endpoints, 0, 0));
    drop(locked);
    let host = EngineHost(shared.clone());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (stop, stopping) = channel(false);
    let thread = std::thread::Builder::new().name("overlay".into()).spawn(move || {
        runtime.block_on(async {
            let Prepared { overlay, authenticator, kept } = prepared;
            let agent = Agent::new(overlay, host, options).keeping(kept);
            match authenticator {
                Some(authenticator) => agent.with_authenticator(authenticator).run(stopping).await,
                None => agent.run(stopping).await,
            }
        });
    })?;
    Ok(Some(Running { stop, thread }))
}

/// A random number that identifies this run of vnetd; it comes from the random seed of the standard library's hash maps.
fn instance() -> u64 {
    RandomState::new().build_hasher().finish()
}
