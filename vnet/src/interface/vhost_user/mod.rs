//! vhost-user: unmodified VMs (QEMU, Cloud Hypervisor, DPDK's virtio-user) attach through a Unix socket and share their memory.
//!
//! How it works: one control thread per interface talks to the front end ([`control`], [`session`]) and changes the vrings
//! ([`vring`]) of the [`queue_pairs`], each under its own lock. Dispatchers move frames under the same locks, taken once per
//! burst. The rings themselves are in [`virtqueue`](super::virtqueue); [`event`] notifies guests without ever blocking.
//!
//! Either side may disconnect and reconnect: the connection's end discards negotiated state, and rings continue at the used
//! index. A malformed message ends the connection with one line in the log; a malformed ring disables its queue.
//!
//! No thread outside this room waits for a front end. [`admission`] refuses a second front end at once, [`closer`] closes its
//! descriptors, and an interface stops without waiting for its control thread.

mod admission;
mod allowance;
mod closer;
mod config_space;
mod control;
mod event;
mod faults;
mod features;
#[cfg(any(test, feature = "test-util"))]
pub mod fuzz;
mod looks;
mod options;
mod private;
mod queue_pairs;
mod session;
mod slow_work;
mod source;
mod succession;
#[cfg(test)]
mod tests;
mod usage;
mod vring;

use std::io;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Acquire, Ordering::Relaxed};
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;

use parking_lot::Mutex;

use crate::frame::{DropSink, NetworkId, PortId, Selection};
use crate::inherit::{self, Inheritance};
use crate::interface::virtqueue::window::Loans;
use crate::interface::{Coalesce, Handed, Interface, Land, State};
use crate::source::Source;
use crate::stats::PortStats;

use crate::unix::Listener;
use control::{Connection, Endpoint, Stop};
pub use options::{AllowedPeer, MTU_MIN, QUEUES_MAX, VhostUserError, VhostUserOptions};
use queue_pairs::Device;
use source::GuestSource;
use succession::Waiting;
use vring::Vring;

/// Mode of the socket file before the umask: every process that may connect to it may attach a guest.
const SOCKET_MODE: u32 = 0o666;

/// What lets a control thread begin, and the guest that it serves first.
type Beginning = (Sender<Option<Connection>>, Option<Waiting>);

/// A virtual NIC behind a vhost-user socket.
pub struct VhostUser {
    device: Arc<Device>,
    stop: Arc<Stop>,
    endpoint: Arc<Endpoint>,
    stopping: AtomicBool,
    /// Starts the control thread of an interface that was handed over, with its connection.
    waiting: Mutex<Option<Beginning>>,
    /// Waits for chains that the kernel still holds when the interface stops.
    draining: Mutex<Option<JoinHandle<()>>>,
}

impl VhostUser {
    /// Opens the socket and starts the control thread. Frames from the guest enter at `port` in `network`.
    ///
    /// # Errors
    /// See the variants of [`VhostUserError`]. A server fails at once if it cannot listen. A client retries forever, and its
    /// [`state`](Interface::state) holds the reason why it is not connected.
    pub fn start(
        options: VhostUserOptions,
        port: PortId,
        network: NetworkId,
        stats: Arc<PortStats>,
    ) -> Result<Arc<VhostUser>, VhostUserError> {
        options.check()?;
        let endpoint = if options.server {
            Endpoint::Listen(Listener::bind_for(&options.socket, SOCKET_MODE, options.access)?)
        } else {
            Endpoint::Connect(options.socket.clone())
        };
        let (interface, begin) = VhostUser::open(options, endpoint, (port, network), stats)?;
        // The thread waits for this.
        let _ = begin.send(None);
        Ok(interface)
    }

    /// The interface of a running vnetd, which hands over its socket, and the guest if one is connected. It serves them after
    /// [`start`](Interface::start).
    ///
    /// # Errors
    /// Something was not handed over, or is invalid.
    pub fn inherit(
        options: VhostUserOptions,
        inheritance: &Arc<Inheritance>,
        (port, network): (PortId, NetworkId),
        stats: Arc<PortStats>,
    ) -> Result<Arc<VhostUser>, VhostUserError> {
        options.check()?;
        let name = options.name.clone();
        let failed = |source| VhostUserError::Thread { name: name.clone(), source };
        let missing = || failed(io::Error::other("its socket was not handed over"));
        let endpoint = if options.server {
            let socket = inheritance.take_one(&inherit::interface(&name, "listener")).ok_or_else(missing)?;
            Endpoint::Listen(Listener::inherit(&options.socket, socket, inheritance.clone()))
        } else {
            Endpoint::Connect(options.socket.clone())
        };
        let (interface, begin) = VhostUser::open(options, endpoint, (port, network), stats)?;
        let guest = succession::take_over(&interface.device, &name, inheritance);
        let guest = guest.map_err(|error| failed(io::Error::other(control::text(&error))))?;
        *interface.waiting.lock() = Some((begin, guest));
        Ok(interface)
    }

    /// The interface, and what lets its control thread begin.
    fn open(
        options: VhostUserOptions,
        endpoint: Endpoint,
        (port, network): (PortId, NetworkId),
        stats: Arc<PortStats>,
    ) -> Result<(Arc<VhostUser>, Sender<Option<Connection>>), VhostUserError> {
        let endpoint = Arc::new(endpoint);
        let name = options.name.clone();
        let failed = |source| VhostUserError::Thread { name: name.clone(), source };
        let stop = Arc::new(Stop::new().map_err(failed)?);
        let device = Arc::new(Device::new(options, port, network, stats).map_err(failed)?);
        let (begin, begins) = channel();
        let control = std::thread::Builder::new().name(format!("vhost-user-{}", port.0)).spawn({
            let (device, endpoint, stop) = (device.clone(), endpoint.clone(), stop.clone());
            let span = tracing::info_span!("interface", name = %name);
            move || {
                let _span = span.enter();
                // Without a sender, the interface was dropped before it started.
                let Ok(first) = begins.recv() else { return };
                let run = AssertUnwindSafe(|| control::run(&device, &endpoint, &stop, first));
                if std::panic::catch_unwind(run).is_err() {
                    tracing::error!(
                        "the interface's protocol thread panicked: its guest was cut off; restart vnetd and report this"
                    );
                }
            }
        });
        // The thread is never joined, see `stop`.
        control.map_err(failed)?;
        let (stopping, waiting, draining) = (AtomicBool::new(false), Mutex::new(None), Mutex::new(None));
        Ok((Arc::new(VhostUser { device, stop, endpoint, stopping, waiting, draining }), begin))
    }
}

impl Interface for VhostUser {
    fn queues(&self) -> usize {
        self.device.options.queues
    }

    fn active_queues(&self) -> usize {
        self.device.active_pairs()
    }

    fn source(self: Arc<Self>, queue: usize) -> Box<dyn Source> {
        Box::new(GuestSource::new(self.device.clone(), queue))
    }

    fn deliver(&self, queue: usize, frames: Selection<'_>, drops: &mut DropSink) {
        self.device.deliver(queue, frames, drops);
    }

    fn coalesce(&self) -> Option<&dyn Coalesce> {
        Some(&*self.device)
    }

    fn land(&self) -> Option<&dyn Land> {
        Some(&*self.device)
    }

    fn loans(&self) -> Option<&Loans> {
        Some(&self.device.loans)
    }

    fn state(&self) -> State {
        if self.stopping.load(Relaxed) { State::Down("stopped".to_owned()) } else { self.device.state() }
    }

    fn has_departed(&self) -> bool {
        self.device.departed.load(Acquire)
    }

    fn notes(&self) -> Vec<String> {
        self.device.notes()
    }

    fn hand_over(&self) -> Result<Handed<'_>, String> {
        let (files, guest, turn) = succession::hand_over(&self.device, &self.endpoint, &self.stop)?;
        Ok(Handed { files, guest: Some(guest), turn: Some(turn), quiet: None })
    }

    fn start(&self) {
        if let Some((begin, guest)) = self.waiting.lock().take() {
            // The thread waits for this.
            let _ = begin.send(guest.map(Waiting::start));
        }
    }

    fn go_on(&self) {
        self.device.change_all(Vring::restart);
    }

    fn stop(&self) {
        if self.stopping.swap(true, Relaxed) {
            return;
        }
        // At once, so that a successor can bind the socket.
        if let Endpoint::Listen(listener) = &*self.endpoint {
            listener.close();
        }
        if !self.device.reclaim_all() {
            return end(&self.device, &self.stop);
        }
        let (device, stop) = (self.device.clone(), self.stop.clone());
        let wait = move || {
            device.drain_all();
            end(&device, &stop);
        };
        match std::thread::Builder::new().name("vhost-user-drain".into()).spawn(wait) {
            Ok(draining) => *self.draining.lock() = Some(draining),
            Err(_) => {
                self.device.drain_all();
                end(&self.device, &self.stop);
            }
        }
    }

    fn settle(&self) {
        if let Some(draining) = self.draining.lock().take() {
            // A panic has been logged; there is nothing to wait for any more.
            let _ = draining.join();
        }
    }
}

/// Ends a drained interface. Draining comes before, because the front end takes the rings back when the connection ends.
fn end(device: &Device, stop: &Stop) {
    // The control thread ends soon, or when a call returns that its front end makes block, such as closing a file. Nobody waits
    // for that: what it would do in the end is done here.
    stop.request();
    device.reset_all();
}

impl Drop for VhostUser {
    fn drop(&mut self) {
        self.stop();
    }
}
