//! Direct ports: an interface's own underlay port, whose frames are received into its guest's buffers (VNET/P+ section IV.B).
//!
//! The link's side knows how a message is laid out (link/direct.rs), the interface's side where there is room. What stands
//! here is the decision between them, made on a private copy of the frame's beginning *before* anything is received:
//! the routing table sends it to this interface and nowhere else, it has the interface's own address, and nobody captures.
//! Everything else is received and forwarded the ordinary way.

use std::sync::Arc;

use super::forward::Forwarder;
use super::setup::InterfacePort;
use crate::frame::{Batch, PortId};
use crate::link::{Candidate, Direct, Landed, Received, Receiver};
use crate::route::Flow;
use crate::wire::flow;

/// Messages taken in one turn: the other sources wait meanwhile.
const MESSAGES_MAX: usize = 32;

/// A direct port that a dispatcher serves.
pub(super) struct DirectPort {
    /// The interface's.
    pub(super) id: PortId,
    pub(super) direct: Arc<Direct>,
    /// It may have datagrams.
    pub(super) ready: bool,
}

/// What became of the next message.
enum Step {
    Landed(usize),
    /// So many messages are in the receiver's burst.
    Burst(usize),
    /// It stands where it stood.
    Ordinary,
    Nothing,
}

impl Forwarder {
    /// Takes what waits at the direct port of the interface `id`.
    pub(super) fn receive_direct(
        &mut self,
        id: PortId,
        direct: &Direct,
        receiver: &mut Receiver,
        batch: &mut Batch,
    ) -> Received {
        let setup = self.setup.clone();
        let mut datagrams = 0;
        for _ in 0..MESSAGES_MAX {
            let step = match setup.interface(id) {
                Some(port) if !setup.is_observed() => self.land(port, direct, receiver),
                _ => Step::Ordinary,
            };
            let (peers, now_ms) = (&setup.peers, self.now_ms);
            match step {
                Step::Nothing => return Received { datagrams, emptied: true },
                Step::Landed(count) => datagrams += count,
                Step::Burst(messages) => {
                    let mut run = |batch: &Batch| self.run(batch);
                    datagrams += receiver.work_off(direct, messages, peers, batch, now_ms, &mut run);
                }
                Step::Ordinary => {
                    let mut run = |batch: &Batch| self.run(batch);
                    let received = receiver.receive_direct(direct, peers, batch, now_ms, &mut run);
                    datagrams += received.datagrams;
                    return Received { datagrams, emptied: received.emptied };
                }
            }
        }
        Received { datagrams, emptied: false }
    }

    /// Receives the next message in place, if it is the beginning of a frame for that.
    fn land(&mut self, port: &InterfacePort, direct: &Direct, receiver: &mut Receiver) -> Step {
        let Some(peeked) = direct.peek() else { return Step::Nothing };
        let setup = self.setup.clone();
        let Some((link, candidate)) = peeked.candidate(&setup.peers) else { return Step::Ordinary };
        if !self.is_sole(port, link.port(), &candidate) {
            return Step::Ordinary;
        }
        let queue = match port.interface.active_queues() {
            1 => 0,
            queues => flow::hash(candidate.head()) as usize % queues,
        };
        let (mut landed, now_ms) = (Landed::CopiedOut(0), self.now_ms);
        let given = port.interface.land(queue, &candidate.offload, candidate.len, &mut |room| {
            // SAFETY: an interface lends memory that is writable until this returns (`Interface::land`).
            landed = unsafe { receiver.land(direct, link, &candidate, room, now_ms) };
            landed == Landed::InPlace
        });
        match landed {
            Landed::InPlace if given => {
                _ = self.stats.begin(1);
                self.delivered_in_place(port, queue, candidate.len);
                Step::Landed(candidate.datagrams())
            }
            Landed::CopiedOut(messages) if messages > 0 => Step::Burst(messages),
            _ => Step::Ordinary,
        }
    }

    /// True when the frame is for that interface, by its address and by the routing table, and for nobody else.
    fn is_sole(&mut self, port: &InterfacePort, from: PortId, candidate: &Candidate) -> bool {
        let Candidate { network, dst, src, .. } = *candidate;
        port.member.mac == Some(dst) && self.sole(&Flow { network, src, dst, from }) == Some(port.member.port)
    }
}
