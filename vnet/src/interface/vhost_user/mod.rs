//! vhost-user: unmodified VMs (QEMU, Cloud Hypervisor, DPDK's virtio-user) attach by a Unix socket and share their memory.
//!
//! How it works: one control thread per interface talks to the front end ([`control`], [`session`]) and changes the vrings
//! ([`vring`]) of the [`device`], each under a lock of its own; dispatchers move frames under the same locks, one lock a
//! burst. The rings themselves are [`virtqueue`](super::virtqueue)'s; [`event`] tells guests of them without ever waiting.
//!
//! A front end may go and come back, as may we: whatever it negotiated goes with its connection, and rings continue at the
//! used index. A malformed message ends the connection with one line in the log; a malformed ring disables its queue.

mod control;
mod device;
mod event;
mod features;
mod session;
mod source;
#[cfg(test)]
mod tests;
mod vring;

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;

use parking_lot::Mutex;

use crate::frame::{DropSink, MTU_MAX, NetworkId, PortId, Selection};
use crate::interface::{Coalesce, Interface, Land, State};
use crate::source::Source;
use crate::stats::PortStats;
use crate::wire::ethernet::Mac;

use crate::unix::{ListenError, Listener};
use control::{Endpoint, Stop};
use device::Device;
use source::GuestSource;

/// Queue pairs of one interface: vhost-user numbers vrings with eight bits where it passes file descriptors.
pub const QUEUES_MAX: usize = 128;
/// Smallest MTU of an interface (RFC 791).
pub const MTU_MIN: usize = 68;

/// What an interface is made of.
#[derive(Clone, Debug)]
pub struct VhostUserOptions {
    /// The interface's name, for people.
    pub name: String,
    /// Path of the Unix socket.
    pub socket: PathBuf,
    /// True: listen there. False: connect, and again whenever the front end has gone.
    pub server: bool,
    /// The address that the guest finds in its configuration space, if the front end asks us for it.
    pub mac: Option<Mac>,
    /// Largest payload of a frame to the guest, in bytes; `MTU_MIN` to [`MTU_MAX`].
    pub mtu: usize,
    /// Queue pairs, 1 to [`QUEUES_MAX`].
    pub queues: usize,
}

/// Why an interface could not be made.
#[derive(Debug, thiserror::Error)]
pub enum VhostUserError {
    /// The socket cannot be listened on.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// `queues` out of range.
    #[error("{0} queues; an interface has 1 to {QUEUES_MAX}")]
    Queues(usize),
    /// `mtu` out of range.
    #[error("MTU {0} is not between {MTU_MIN} and {MTU_MAX}")]
    Mtu(usize),
    /// No more threads, file descriptors or AIO contexts.
    #[error("cannot start interface {name}: {source}")]
    Thread {
        /// The interface.
        name: String,
        /// What the system said.
        source: io::Error,
    },
}

/// Permissions of the socket's file, less vnetd's mask: who may connect may be a guest.
const SOCKET_MODE: u32 = 0o666;

/// A virtual NIC behind a vhost-user socket.
pub struct VhostUser {
    device: Arc<Device>,
    stop: Arc<Stop>,
    control: Mutex<Option<JoinHandle<()>>>,
}

impl VhostUser {
    /// Opens the socket and starts the control thread. Frames of the guest enter as `port` in `network`.
    ///
    /// # Errors
    /// As the variants of [`VhostUserError`] say. A server finds out at once that its socket cannot be had; a client keeps
    /// trying, and its [`state`](Interface::state) says what is missing.
    pub fn start(
        options: VhostUserOptions,
        port: PortId,
        network: NetworkId,
        stats: Arc<PortStats>,
    ) -> Result<Arc<VhostUser>, VhostUserError> {
        if options.queues == 0 || options.queues > QUEUES_MAX {
            return Err(VhostUserError::Queues(options.queues));
        }
        if !(MTU_MIN..=MTU_MAX).contains(&options.mtu) {
            return Err(VhostUserError::Mtu(options.mtu));
        }
        let endpoint = if options.server {
            Endpoint::Listen(Listener::bind(&options.socket, SOCKET_MODE)?)
        } else {
            Endpoint::Connect(options.socket.clone())
        };
        let name = options.name.clone();
        let failed = |source| VhostUserError::Thread { name: name.clone(), source };
        let stop = Arc::new(Stop::new().map_err(failed)?);
        let device = Arc::new(Device::new(options, port, network, stats).map_err(failed)?);
        let control = std::thread::Builder::new().name(format!("vhost-user-{}", port.0)).spawn({
            let (device, stop) = (device.clone(), stop.clone());
            let span = tracing::info_span!("interface", name = %name);
            move || span.in_scope(|| control::run(&device, &endpoint, &stop))
        });
        let control = Mutex::new(Some(control.map_err(failed)?));
        Ok(Arc::new(VhostUser { device, stop, control }))
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

    fn state(&self) -> State {
        self.device.state()
    }

    fn stop(&self) {
        // The front end takes the rings back when it sees the connection end.
        self.device.drain_all();
        self.stop.ask();
        let control = self.control.lock().take();
        if control.is_some_and(|control| control.join().is_err()) {
            tracing::error!(name = self.device.options.name, "the control thread panicked");
        }
    }
}

impl Drop for VhostUser {
    fn drop(&mut self) {
        self.stop();
    }
}
