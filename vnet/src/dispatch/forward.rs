//! Decide and deliver: one batch from where it came from to where it goes.
//!
//! Frames are decided one by one, collected by destination, and delivered destination by destination, so that every guest is
//! notified and every socket called once a batch. The order of frames between two ports is kept.

use std::sync::Arc;

use super::setup::{Port, Setup};
use crate::frame::{BATCH_MAX, Batch, PortId};
use crate::link::Sender;
use crate::route::{Decision, Router};
use crate::stats::DropReason;
use crate::wire::flow;

/// How much was moved.
#[derive(Clone, Copy, Default)]
pub(super) struct Work {
    pub(super) frames: u64,
    pub(super) bytes: u64,
}

/// The deciding and delivering half of a dispatcher.
pub(super) struct Forwarder {
    router: Router,
    sender: Sender,
    setup: Arc<Setup>,
    /// Milliseconds since the core started; set once a turn.
    pub(super) now_ms: u64,
    /// Moved since the dispatcher last set it to nothing.
    pub(super) work: Work,
    /// Frames of the batch under way, by destination port.
    lists: Vec<Vec<u16>>,
    /// Destinations whose list is not empty.
    touched: Vec<PortId>,
    /// Frames of one list, by the queue they go to.
    by_queue: Vec<Vec<u16>>,
}

impl Forwarder {
    pub(super) fn new(router: Router, sender: Sender, setup: Arc<Setup>) -> Forwarder {
        let mut forwarder = Forwarder {
            router,
            sender,
            setup: setup.clone(),
            now_ms: 0,
            work: Work::default(),
            lists: vec![],
            touched: vec![],
            by_queue: vec![],
        };
        forwarder.adopt(setup);
        forwarder
    }

    /// Takes over a new setup. Called between two batches.
    pub(super) fn adopt(&mut self, setup: Arc<Setup>) {
        self.router.adopt(setup.table.clone());
        // All that a batch can need: nothing is allocated on a frame's way.
        let list = || Vec::with_capacity(BATCH_MAX);
        self.lists.resize_with(setup.slots(), list);
        self.touched.reserve(setup.slots());
        let queues = setup.interfaces().map(|port| port.interface.queues()).max().unwrap_or(1);
        self.by_queue.resize_with(queues, list);
        self.setup = setup;
    }

    pub(super) fn tick(&mut self, now_ms: u64) {
        self.sender.tick(&self.setup.peers, now_ms);
    }

    /// Takes every frame of the batch to completion: delivered, or counted under the reason why not.
    pub(super) fn run(&mut self, batch: &Batch) {
        self.decide(batch);
        while let Some(port) = self.touched.pop() {
            self.deliver(port, batch);
        }
    }

    fn decide(&mut self, batch: &Batch) {
        let setup = &*self.setup;
        self.work.frames += batch.len() as u64;
        self.router.begin();
        for (index, frame) in batch.frames().iter().enumerate() {
            let index = index as u16;
            self.work.bytes += frame.len() as u64;
            let (lists, touched) = (&mut self.lists, &mut self.touched);
            let mut push = |port: PortId| match lists.get_mut(port.index()) {
                Some(list) => {
                    if list.is_empty() {
                        touched.push(port);
                    }
                    list.push(index);
                    true
                }
                None => false,
            };
            let (made, reason) = match self.router.decide(frame, self.now_ms) {
                Decision::To(port) => (u64::from(push(port)), DropReason::PortGone),
                Decision::Copies(ports) => {
                    (ports.iter().map(|&port| u64::from(push(port))).sum(), DropReason::PortGone)
                }
                Decision::Drop(reason) => (0, reason),
            };
            if made != 1
                && let Some(port) = setup.port(frame.from)
            {
                match made {
                    0 => port.stats().drop_frames(reason, 1),
                    _ => port.stats().copies.add(made - 1),
                }
            }
        }
    }

    fn deliver(&mut self, id: PortId, batch: &Batch) {
        let list = &mut self.lists[id.index()];
        match self.setup.port(id) {
            Some(Port::Interface(port)) => match port.interface.active_queues() {
                1 => port.interface.deliver(0, batch, list),
                queues => {
                    for &index in list.iter() {
                        let hash = flow::hash(batch.head(batch.frame(index.into())));
                        self.by_queue[hash as usize % queues].push(index);
                    }
                    for (queue, list) in self.by_queue[..queues].iter_mut().enumerate() {
                        if !list.is_empty() {
                            port.interface.deliver(queue, batch, list);
                            list.clear();
                        }
                    }
                }
            },
            Some(Port::Link(port)) => self.sender.send(&port.link, batch, list),
            None => {
                for &index in list.iter() {
                    if let Some(port) = self.setup.port(batch.frame(index.into()).from) {
                        port.stats().drop_frames(DropReason::PortGone, 1);
                    }
                }
            }
        }
        list.clear();
    }
}
