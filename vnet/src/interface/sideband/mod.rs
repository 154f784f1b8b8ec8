//! The sideband of an interface: how a program of this process talks to the guest, and sends and receives frames in its name.
//!
//! ```text
//!   guest ring -> source -> control frames? ---> [control] --> program
//!                      \--> all others ------------------------------> decide
//!   program --> [outbox] -> source ----------------------------------> decide
//!   deliver -> datagrams to an open port? -----> [port] ----> program
//!          \--> all others ------------------------------------------> guest ring
//!   program --> tell ------------------------------------------------> guest ring
//! ```
//!
//! - **Control frames** have the ethertype [`ETHERTYPE`] and the destination [`GROUP`]. They end here, are never forwarded, and are limited in
//!   number and size. [`Sideband::tell`] delivers the program's answers to the guest's ring.
//! - **Frames in the guest's name** ([`Sideband::send`]) enter the core as if the guest had sent them: port security, rate limits and routes
//!   apply. So who may use the sideband gains nothing that the guest itself could not send.
//! - **Ports** ([`Sideband::open`]) take the UDP datagrams to one address and port out of what is delivered to this guest.
//!
//! It wraps an interface of any kind. All queues are bounded; each frame is delivered (to the guest or to the program) or counted as dropped.

mod channel;
mod mailbox;
mod source;
#[cfg(test)]
mod tests;

use std::sync::Arc;

pub use self::channel::{CONTROL_MAX, ETHERTYPE, GROUP, OWN, PORT_BYTES, PORTS_MAX, Port, Sideband};
pub use self::mailbox::Message;
use self::source::SidebandSource;
use super::virtqueue::window::Loans;
use super::{Coalesce, Handed, Interface, KernelDevice, Land, OnDevice, State};
use crate::frame::{DropSink, Selection};
use crate::source::Source;
use crate::wire::ethernet::Mac;

/// An interface with a sideband.
pub struct WithSideband(pub Arc<Sideband>);

impl Interface for WithSideband {
    fn queues(&self) -> usize {
        self.0.inner.queues()
    }

    fn active_queues(&self) -> usize {
        self.0.inner.active_queues()
    }

    fn source(self: Arc<Self>, queue: usize) -> Box<dyn Source> {
        let inner = Arc::clone(&self.0.inner).source(queue);
        // The first queue's dispatcher sends the frames in the guest's name.
        Box::new(SidebandSource::new(Arc::clone(&self.0), inner, queue == 0))
    }

    fn deliver(&self, queue: usize, frames: Selection<'_>, drops: &mut DropSink) {
        if self.0.steers() {
            self.0.steer(queue, frames, drops);
        } else {
            self.0.inner.deliver(queue, frames, drops);
        }
    }

    fn coalesce(&self) -> Option<&dyn Coalesce> {
        self.0.inner.coalesce()
    }

    fn land(&self) -> Option<&dyn Land> {
        // A frame that is received in place would pass the open ports.
        self.0.inner.land().filter(|_| !self.0.steers())
    }

    fn loans(&self) -> Option<&Loans> {
        self.0.inner.loans()
    }

    fn kernel_device(&self) -> Option<&KernelDevice> {
        self.0.inner.kernel_device()
    }

    fn forwarded_from(&self, src: Mac) {
        self.0.inner.forwarded_from(src);
    }

    fn device(&self) -> Option<&dyn OnDevice> {
        self.0.inner.device()
    }

    fn state(&self) -> State {
        self.0.inner.state()
    }

    fn has_departed(&self) -> bool {
        self.0.inner.has_departed()
    }

    fn notes(&self) -> Vec<String> {
        self.0.inner.notes()
    }

    fn stop(&self) {
        self.0.stop();
    }

    fn settle(&self) {
        self.0.inner.settle();
    }

    fn hand_over(&self) -> Result<Handed<'_>, String> {
        Ok(Handed { quiet: Some(self.0.batch.lock()), ..self.0.inner.hand_over()? })
    }

    fn start(&self) {
        self.0.inner.start();
    }

    fn go_on(&self) {
        self.0.inner.go_on();
    }

    fn may_be_answered(&self) -> bool {
        self.0.inner.may_be_answered()
    }

    fn expect(&self, macs: &[Mac]) {
        self.0.inner.expect(macs);
    }
}
