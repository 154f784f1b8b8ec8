//! An underlay port as a [`Source`]: decides from a peek whether the next frame may be received in place.
//!
//! The decision uses a private copy of the frame's first bytes: its destination is the interface's own address, the routing table
//! sends it to this interface only, and no capture is active. All other frames take the ordinary path through the contained
//! [`Receiver`].

use std::sync::Arc;

use super::candidate::Candidate;
use super::landing::{Landed, Landing};
use super::port::UnderlayPort;
use crate::dispatch::setup::{Feeder, InterfacePort, Setup, SetupView, SourceParts};
use crate::frame::{Batch, DropSink, PortId};
use crate::link::Receiver;
use crate::poll::Waker;
use crate::route::{Flow, Router};
use crate::source::{InPlace, Source, Taken};
use crate::wire::flow;

/// Maximum number of messages per fill, for fairness to other sources.
const MESSAGES_MAX: usize = 32;

/// The underlay port of one interface.
struct InPlaceSource {
    id: PortId,
    port: Arc<UnderlayPort>,
    /// Receives all other messages, by copying.
    receiver: Receiver,
    landing: Landing,
    setup: SetupView,
    /// Router of this source, with the dispatcher's tables.
    router: Router,
    drained: bool,
    waker: Option<Waker>,
}

/// Outcome of handling the next message.
enum Step {
    /// The frame is in guest memory: `bytes` bytes, received in `datagrams` datagrams.
    Landed {
        bytes: usize,
        datagrams: usize,
        queue: usize,
    },
    /// Messages are in the receiver's burst.
    Burst,
    /// The message is still in the socket: receive it by copying.
    Ordinary,
    Nothing,
}

impl Feeder for UnderlayPort {
    fn source(self: Arc<Self>, port: PortId, parts: SourceParts) -> Box<dyn Source> {
        let receiver = parts.receivers.receiver(self.socket().clone());
        Box::new(InPlaceSource {
            id: port,
            port: self,
            receiver,
            landing: Landing::new(),
            setup: parts.setup,
            router: parts.router,
            drained: false,
            waker: None,
        })
    }
}

impl InPlaceSource {
    /// Receives the next message in place, if it starts a suitable frame.
    fn land(&mut self, setup: &Setup, now_ms: u64) -> Step {
        if !self.port.in_place() {
            return Step::Ordinary;
        }
        let Some(peeked) = self.port.peek() else { return Step::Nothing };
        let Some(interface) = setup.interface(self.id).filter(|_| !setup.is_observed()) else {
            return Step::Ordinary;
        };
        let Some(lender) = interface.interface.land() else { return Step::Ordinary };
        let Some((link, candidate)) = peeked.candidate(&setup.peers) else { return Step::Ordinary };
        if !self.is_sole(interface, link.port(), &candidate, now_ms) {
            return Step::Ordinary;
        }
        let queue = match interface.interface.active_queues() {
            1 => 0,
            queues => flow::hash(candidate.head()) as usize % queues,
        };
        let mut landed = Landed::CopiedOut(0);
        let (landing, at) = (&mut self.landing, (&*self.port, &mut self.receiver));
        let at = std::cell::Cell::new(Some(at));
        let given = lender.land(queue, &candidate.offload, candidate.len, &mut |room| {
            let Some(at) = at.take() else { return false };
            // SAFETY: an interface lends memory that is writable until this returns (`Land::land`).
            landed = unsafe { landing.land(at, link, &candidate, room, now_ms) };
            landed == Landed::InPlace
        });
        match landed {
            Landed::InPlace if given => {
                Step::Landed { bytes: candidate.len, datagrams: candidate.datagrams(), queue }
            }
            Landed::CopiedOut(messages) if messages > 0 => {
                self.receiver.resume_with(messages);
                Step::Burst
            }
            _ => Step::Ordinary,
        }
    }

    /// True when the frame's destination address and the routing table both send it to this interface only.
    fn is_sole(
        &mut self,
        interface: &InterfacePort,
        from: PortId,
        candidate: &Candidate,
        now_ms: u64,
    ) -> bool {
        let Candidate { network, dst, src, .. } = *candidate;
        let member = &interface.member;
        member.mac == Some(dst)
            && self.router.sole(&Flow { network, src, dst, from }, now_ms) == Some(member.port)
    }
}

impl Source for InPlaceSource {
    // SAFETY: every frame in the batch is the receiver's, whose `fill` has the same contract.
    unsafe fn fill(&mut self, batch: &mut Batch, drops: &mut DropSink, now_ms: u64) -> Taken {
        let setup = self.setup.load_full();
        if !Arc::ptr_eq(&setup.table, self.router.table()) {
            self.router.adopt(setup.table.clone());
        }
        let mut taken = Taken::default();
        for _ in 0..MESSAGES_MAX {
            let step = if self.receiver.is_done() { self.land(&setup, now_ms) } else { Step::Burst };
            match step {
                Step::Nothing => {
                    taken.drained = true;
                    break;
                }
                Step::Landed { bytes, datagrams, queue } => {
                    taken.units += datagrams;
                    let InPlace { frames, bytes: before, .. } = taken.in_place;
                    taken.in_place = InPlace { frames: frames + 1, bytes: before + bytes as u64, queue };
                }
                Step::Burst | Step::Ordinary => {
                    // SAFETY: the caller's contract is this function's own.
                    let ordinary = unsafe { self.receiver.fill(batch, drops, now_ms) };
                    taken.units += ordinary.units;
                    taken.drained = matches!(step, Step::Ordinary) && ordinary.drained;
                    break;
                }
            }
        }
        self.drained = taken.drained;
        taken
    }

    fn give_back(&mut self) {
        self.receiver.give_back();
    }

    fn watch(&mut self, waker: Waker) {
        self.drained = false;
        if let Err(error) = waker.watch(self.port.fd()) {
            tracing::error!(%error, "cannot watch an interface's underlay port");
        }
        self.waker = Some(waker);
    }

    fn unwatch(&mut self) {
        if let Some(waker) = self.waker.take() {
            waker.forget(self.port.fd());
        }
    }

    fn rest(&mut self) -> bool {
        self.drained
    }

    fn is_unfinished(&self) -> bool {
        self.receiver.is_unfinished()
    }

    fn tick(&mut self, now_ms: u64) {
        self.receiver.tick(now_ms);
    }
}
