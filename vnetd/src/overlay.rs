//! The overlay's agent as part of the daemon: on a thread of its own, so that neither waits for the other.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::thread::JoinHandle;

use tokio::sync::watch::{Sender, channel};
use vnet::frame::NetworkId;
use vnet_control::overlay::{Authenticator, Overlay};
use vnetd::store::{Agent, EngineHost, Options, settings};

use crate::{Failure, Shared, api};

/// A running agent.
pub struct Running {
    stop: Sender<bool>,
    thread: JoinHandle<()>,
}

impl Running {
    /// Has it take leave of the other hosts, and waits until it has.
    pub fn stop(self) {
        // It may have ended by itself.
        let _ = self.stop.send(true);
        if self.thread.join().is_err() {
            tracing::error!("the overlay's agent ended in a panic");
        }
    }
}

/// Starts the agent, when the configuration has an `[overlay]`.
pub fn start(shared: &Shared) -> Result<Option<Running>, Failure> {
    let locked = api::lock(shared);
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

/// A number that no other life of a daemon has, drawn from what the standard library seeds its hash maps with.
fn instance() -> u64 {
    RandomState::new().build_hasher().finish()
}
