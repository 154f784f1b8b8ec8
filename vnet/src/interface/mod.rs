//! Interfaces: where guests' frames enter and leave the core.
//!
//! An interface has one or more queues. Each queue is a [`Source`] of the guest's frames, served by one dispatcher. Any dispatcher
//! may deliver to any queue, a [`Selection`] of a batch at a time; implementations serialise that with one lock per batch, never per
//! frame. Names follow the core's point of view, as in VNET/P: *receive* is from the guest.
//!
//! Optional abilities have traits of their own: [`Coalesce`] (optimistic interrupts), [`Land`] (receive in place, into the
//! guest's buffers) and [`OnDevice`] (a network device of the kernel, which others can change or delete). What cannot be opened
//! has [`Absent`](stand_in::Absent) in its place, and [`change_events`] tells when to try again.

pub mod change_events;
pub mod device;
pub mod fake;
mod frame_writer;
pub mod interrupts;
pub mod local;
mod netns;
pub mod stand_in;
pub mod tap;
pub mod veth;
pub mod vhost_user;
pub mod virtqueue;

use std::sync::Arc;

use self::device::OnDevice;
use self::interrupts::InterruptSettings;
use crate::frame::{DropSink, Frame, Room, Selection};
use crate::source::Source;
use crate::wire::ethernet::{HEADER_LEN, Mac, VLAN_TAG_LEN};
use crate::wire::offload::{GSO_NONE, Offload};

/// State of the guest or device behind an interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// Frames flow.
    Up,
    /// No guest or device, or not ready; holds the reason.
    Down(String),
    /// Disabled because guest or front end broke the protocol; holds the reason. Ends when the guest resets.
    Broken(String),
}

/// A virtual NIC of a guest on this host.
pub trait Interface: Send + Sync {
    /// Number of queue pairs: 1 or more, constant.
    fn queues(&self) -> usize;

    /// Number of queue pairs, counted from the first, on which the guest receives now: 1 to `queues()`. Spread frames over these;
    /// `deliver` accepts any queue and falls back to one in use.
    fn active_queues(&self) -> usize {
        self.queues()
    }

    /// The source of the guest's frames on `queue`, for the one dispatcher that serves it.
    fn source(self: Arc<Self>, queue: usize) -> Box<dyn Source>;

    /// Delivers frames to the guest on `queue` and notifies it once.
    ///
    /// Counts each frame as delivered or dropped; reports drops to `drops`. Finishes offloads in software that the guest does not
    /// accept.
    fn deliver(&self, queue: usize, frames: Selection<'_>, drops: &mut DropSink);

    /// Control of optimistic interrupts; `None` for interfaces without.
    fn coalesce(&self) -> Option<&dyn Coalesce> {
        None
    }

    /// Access to the guest's posted buffers; `None` for interfaces without.
    fn land(&self) -> Option<&dyn Land> {
        None
    }

    /// The guest's device, where the kernel may forward known flows by itself.
    fn kernel_device(&self) -> Option<&KernelDevice> {
        None
    }

    /// The network device behind it; `None` for interfaces without.
    fn device(&self) -> Option<&dyn OnDevice> {
        None
    }

    /// State of the guest or device.
    fn state(&self) -> State;

    /// What an administrator should know beside the state: mistakes that lose frames although the interface may be up. One short
    /// sentence each.
    fn notes(&self) -> Vec<String> {
        vec![]
    }

    /// Stops the interface for good: no frame enters or leaves afterwards, and the guest sees its link go down.
    fn stop(&self);

    /// True if this host may answer ARP and ND requests that come from here. The replies' targets are then reached through this
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

/// A guest's device at which the kernel can forward frames.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelDevice {
    /// The host's end: name and index.
    pub host: (String, u32),
    /// The TAP for what the kernel does not forward: name and index.
    pub tap: (String, u32),
    /// The guest's address.
    pub mac: Mac,
    /// MTU in bytes.
    pub mtu: usize,
}

/// When a guest is notified of delivered frames (VNET/P+ section IV.A, optimistic interrupts).
pub trait Coalesce {
    /// Sets how the guest is notified from now on.
    fn set_interrupts(&self, settings: InterruptSettings);

    /// True if `deliver` defers notifications to [`end_of_coalescing`](Coalesce::end_of_coalescing), which the dispatcher must then
    /// call for every queue it has delivered to. Check this after delivering.
    fn coalesces(&self) -> bool;

    /// The source is drained: no more frames for `queue` for now. Returns true if the dispatcher must call
    /// [`check`](Coalesce::check) within [`CHECK_AFTER`](interrupts::CHECK_AFTER).
    fn end_of_coalescing(&self, queue: usize) -> bool;

    /// Notifies the guest of frames delivered on `queue` if it still waits for a notification.
    fn check(&self, queue: usize);
}

/// Receives frames in place, into a guest's posted buffers (VNET/P+ section IV.B, cut-through forwarding).
pub trait Land {
    /// Lends `fill` room in posted buffers of `queue`, exactly for a frame of `len` bytes with the metadata `offload`. The room is
    /// writable until `fill` returns; the guest may read and write it at any time. `fill` returns whether it wrote the frame, which
    /// is then delivered and counted as by [`deliver`](Interface::deliver).
    ///
    /// Returns true if the frame was delivered. Otherwise there was no room (`fill` was not called), or `fill` returned false.
    fn land(
        &self,
        queue: usize,
        offload: &Offload,
        len: usize,
        fill: &mut dyn FnMut(&[Room]) -> bool,
    ) -> bool;
}

/// True if a whole frame exceeds an MTU of `mtu` bytes. Super-frames never do: the sender's MTU limits their segments.
#[inline]
pub(crate) fn exceeds_mtu(frame: &Frame, mtu: usize) -> bool {
    piece_exceeds_mtu(&frame.offload, frame.len(), mtu)
}

/// As [`exceeds_mtu`], for a piece of `len` bytes of a segmented frame.
#[inline]
pub(crate) fn piece_exceeds_mtu(offload: &Offload, len: usize, mtu: usize) -> bool {
    offload.gso_type == GSO_NONE && len > mtu + HEADER_LEN + VLAN_TAG_LEN
}
