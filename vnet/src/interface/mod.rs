//! Interfaces: where guests' frames enter and leave the core.
//!
//! An interface has one or more queues. What a guest sends on a queue is a [`Source`], served by one dispatcher; what a guest gets
//! is delivered by any dispatcher, a [`Selection`] of a batch at a time. Each implementation serialises deliveries to one queue
//! with one lock a batch, never a frame. Names follow the core's point of view, as in VNET/P: *receive* is from the guest.
//!
//! What only some interfaces can do is behind traits of its own: [`Coalesce`] (optimistic interrupts), [`Land`] (frames received
//! straight into a guest's buffers).

pub mod fake;
pub mod interrupts;
pub mod local;
mod packet;
pub mod tap;
pub mod vhost_user;
pub mod virtqueue;

use std::sync::Arc;

use self::interrupts::InterruptSettings;
use crate::frame::{DropSink, Frame, Room, Selection};
use crate::source::Source;
use crate::wire::ethernet::{HEADER_LEN, Mac, VLAN_TAG_LEN};
use crate::wire::offload::{GSO_NONE, Offload};

/// What an interface has behind it at the moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// Frames flow.
    Up,
    /// Nobody there yet or any more; the text says what is missing.
    Down(String),
    /// Disabled after the guest or front end broke the rules; the text says which. Ends with a reset by the guest.
    Broken(String),
}

/// A virtual NIC of a guest on this host.
pub trait Interface: Send + Sync {
    /// Queue pairs the interface is served on: 1 or more, constant.
    fn queues(&self) -> usize;

    /// Queue pairs, from the first one on, the guest receives on now: 1 to `queues()`. Frames are best spread over these;
    /// `deliver` takes them on any queue and finds another one when it must.
    fn active_queues(&self) -> usize {
        self.queues()
    }

    /// The frames that the guest sends on `queue`, for the one dispatcher that serves it.
    fn source(self: Arc<Self>, queue: usize) -> Box<dyn Source>;

    /// Delivers frames to the guest on `queue` and notifies it once.
    ///
    /// Counts each frame as delivered or dropped; reports drops to `drops`. Finishes in software what the guest did not negotiate.
    fn deliver(&self, queue: usize, frames: Selection<'_>, drops: &mut DropSink);

    /// The interface as one whose guest is notified at the end of coalescing; `None` for a kind that cannot choose.
    fn coalesce(&self) -> Option<&dyn Coalesce> {
        None
    }

    /// The interface as one that lends its guest's buffers; `None` for a kind that has none.
    fn land(&self) -> Option<&dyn Land> {
        None
    }

    /// What is behind the interface.
    fn state(&self) -> State;

    /// Stops the interface for good: no frame enters or leaves afterwards, the guest sees its link go down.
    fn stop(&self);

    /// True when this host may answer ARP and ND requests that come from here. The replies' targets are then reached through this
    /// interface without having been heard on it.
    fn may_be_answered(&self) -> bool {
        true
    }

    /// Tells the addresses configured on this host in the interface's network, whenever they change. The local network
    /// subscribes to them.
    fn expect(&self, macs: &[Mac]) {
        _ = macs;
    }
}

/// When a guest is notified of delivered frames (VNET/P+ section IV.A, optimistic interrupts).
pub trait Coalesce {
    /// How the guest is notified from now on.
    fn set_interrupts(&self, settings: InterruptSettings);

    /// True when `deliver` leaves notifying to [`end_of_coalescing`](Coalesce::end_of_coalescing), which the dispatcher then owes
    /// for every queue it has delivered to. Ask after delivering.
    fn coalesces(&self) -> bool;

    /// Nothing more is delivered on `queue` for now. True when [`check`](Coalesce::check) has to follow within
    /// [`CHECK_AFTER`](interrupts::CHECK_AFTER).
    fn end_of_coalescing(&self, queue: usize) -> bool;

    /// Notifies the guest of frames delivered on `queue` if it still waits.
    fn check(&self, queue: usize);
}

/// Lends buffers of a guest to be received into (VNET/P+ section IV.B, cut-through forwarding).
pub trait Land {
    /// Lends `fill` room in buffers that the guest of `queue` has posted, exactly for a frame of `len` bytes with the metadata
    /// `offload`: memory that is writable until `fill` returns, and that the guest reads and writes when it likes. `fill` says
    /// whether the frame stands there; then the guest gets it as by [`deliver`](Interface::deliver), and it is counted.
    ///
    /// True when it did. Otherwise nothing was delivered: there is no such room (`fill` was not called), or `fill` returned false.
    fn land(
        &self,
        queue: usize,
        offload: &Offload,
        len: usize,
        fill: &mut dyn FnMut(&[Room]) -> bool,
    ) -> bool;
}

/// True when a whole frame is larger than an interface of `mtu` bytes takes. Super-frames are not judged by their own size:
/// their segments are what the sender's MTU allowed.
#[inline]
pub(crate) fn exceeds_mtu(frame: &Frame, mtu: usize) -> bool {
    piece_exceeds_mtu(&frame.offload, frame.len(), mtu)
}

/// The same for a piece of `len` bytes that a frame was cut into.
#[inline]
pub(crate) fn piece_exceeds_mtu(offload: &Offload, len: usize, mtu: usize) -> bool {
    offload.gso_type == GSO_NONE && len > mtu + HEADER_LEN + VLAN_TAG_LEN
}
