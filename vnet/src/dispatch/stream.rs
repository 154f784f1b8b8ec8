//! A stream link as a dispatcher serves it: like an interface, with a queue for each place that a connection can have.

use std::sync::Arc;

use crate::frame::Batch;
use crate::interface::{Interface, State};
use crate::link::{Link, LinkState, stream};
use crate::poll::Waker;

/// A stream link's queues.
pub struct StreamPort(Arc<Link>);

impl StreamPort {
    /// The queues of `link`, if it is a stream link.
    pub fn of(link: &Arc<Link>) -> Option<Arc<StreamPort>> {
        link.is_stream().then(|| Arc::new(StreamPort(link.clone())))
    }
}

impl Interface for StreamPort {
    fn queues(&self) -> usize {
        stream::CONNECTIONS
    }

    fn receive(&self, queue: usize, batch: &mut Batch, run: &mut dyn FnMut(&Batch)) -> usize {
        self.0.stream_receive(queue, batch, run)
    }

    /// The link itself chooses the connection.
    fn deliver(&self, _queue: usize, batch: &Batch, which: &[u16]) {
        self.0.stream_send(batch, which);
    }

    fn attach(&self, queue: usize, waker: Waker) {
        self.0.stream_attach(queue, waker);
    }

    fn detach(&self, queue: usize) {
        self.0.stream_detach(queue);
    }

    fn arm(&self, queue: usize) -> bool {
        // Connections are watched edge-triggered all the time; only after an empty read is the next edge certain.
        self.0.stream_is_drained(queue)
    }

    fn disarm(&self, _queue: usize) {}

    fn polls(&self) -> bool {
        false
    }

    fn state(&self) -> State {
        match self.0.state() {
            LinkState::Up | LinkState::Degraded(_) => State::Up,
            LinkState::Down(reason) | LinkState::Unreachable(reason) => State::Down(reason),
        }
    }

    fn stop(&self) {
        self.0.stop();
    }
}
