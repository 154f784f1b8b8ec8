//! Runs the overlay's agent on a thread of its own, so that the store's latency never delays the API.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::thread::JoinHandle;

use tokio::sync::watch::{Sender, channel};
use vnet::frame::NetworkId;
use vnet_control::overlay::{Authenticator, Overlay};
use vnetd::store::{Agent, EngineHost, Options, settings};

use crate::shared::Shared;

/// A running agent.
pub struct Running {
    stop: Sender<bool>,
    thread: JoinHandle<()>,
}

impl Running {
    /// Tells the agent to leave the overlay, and waits for it.
    pub fn stop(self) {
        // The receiver is gone if the agent ended by itself.
        let _ = self.stop.send(true);
        if self.thread.join().is_err() {
            tracing::error!("the overlay's agent ended in a panic");
        }
    }
}

/// Starts the agent if the configuration has an `[overlay]`.
pub fn start(shared: &Shared) -> Result<Option<Running>, Box<dyn std::error::Error>> {
    let locked = shared.lock();
    let Some(engine) = locked.as_ref() else { return Ok(None) };
    let desired = engine.current();
    let Some(spec) = desired.overlay.as_ref().map(|item| &item.spec) else { return Ok(None) };
    let declared = desired.networks.iter().map(|item| item.spec.id).chain([NetworkId::DEFAULT]);
    let settings = settings(spec, declared);
    let options = Options::new(spec, engine.bridge_address())?;
    let me = desired.host.spec.name.as_str().into();
    let authenticator = engine.identity().filter(|_| spec.sealed).map(Authenticator::new);
    drop(locked);
    let instance = instance();
    let host = EngineHost(shared.clone());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (stop, stopping) = channel(false);
    let thread = std::thread::Builder::new().name("overlay".into()).spawn(move || {
        runtime.block_on(async {
            let overlay = Overlay::new(me, instance, settings);
            let agent = Agent::new(overlay, host, options);
            match authenticator {
                Some(authenticator) => agent.with_authenticator(authenticator).run(stopping).await,
                None => agent.run(stopping).await,
            }
        });
    })?;
    Ok(Some(Running { stop, thread }))
}

/// A random number that identifies this run of the daemon; the standard library seeds its hash maps with it.
fn instance() -> u64 {
    RandomState::new().build_hasher().finish()
}
