//! The thread that calls [`Engine::tend`] when interfaces' devices, namespaces or folders change.

use std::io;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use vnet::interface::change_events::{Bell, Watcher};

use crate::shared::Shared;

/// Minimum time between two checks. Creating a namespace takes several steps with an event each, and the owner of a namespace can
/// cause any number of events.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// A running watch thread.
pub struct Running {
    bell: Bell,
    thread: JoinHandle<()>,
}

impl Running {
    /// Waits until the thread ends; the engine must have been taken from [`Shared`] before.
    pub fn stop(self) {
        self.bell.ring();
        if self.thread.join().is_err() {
            tracing::error!("the watch of interfaces ended in a panic");
        }
    }
}

/// Starts the thread.
pub fn start(shared: &Shared) -> io::Result<Running> {
    let watcher = Watcher::new()?;
    let bell = watcher.bell();
    if let Some(engine) = shared.lock().as_mut() {
        engine.call_by(bell.clone());
    }
    let shared = shared.clone();
    let thread =
        std::thread::Builder::new().name("interfaces".into()).spawn(move || run(&shared, watcher))?;
    Ok(Running { bell, thread })
}

/// Watches until the engine is stopped.
fn run(shared: &Shared, mut watcher: Watcher) {
    let mut stirred = false;
    loop {
        let began = Instant::now();
        let Some((_, places)) = shared.lock().as_ref().map(|engine| engine.watched()) else { return };
        watcher.watch(&places);
        let wait = shared.lock().as_mut().map(|engine| {
            // Hold the devices only while the lock is held: a device that is in use cannot be reopened by others.
            watcher.look(&engine.watched().0);
            engine.tend(stirred)
        });
        let Some(wait) = wait else { return };
        stirred = watcher.wait(wait).unwrap_or_else(|error| {
            tracing::error!(%error, "cannot wait for changes of interfaces");
            std::thread::sleep(wait);
            false
        });
        let rest = LOOK_EVERY.saturating_sub(began.elapsed());
        if !rest.is_zero() {
            std::thread::sleep(rest);
        }
    }
}
