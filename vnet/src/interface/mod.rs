//! Interfaces: guests' frames enter and leave the core here.
//!
//! An interface has one or more queues. Each queue is a [`Source`] of the guest's frames, served by one dispatcher. Any
//! dispatcher may deliver to any queue, a [`Selection`] of a batch at a time; implementations serialise that with one lock per
//! batch, never per frame. Names follow the core's point of view, as in VNET/P: *receive* is from the guest.
//!
//! Optional abilities are separate traits: [`Coalesce`] (optimistic interrupts), [`Land`] (receive in place, into the guest's
//! buffers) and [`OnDevice`] (a network device of the kernel, which other programs can change or delete).
//! [`Absent`](stand_in::Absent) takes the place of an interface that cannot be opened, and [`change_events`] reports when to try
//! again.

pub mod change_events;
pub mod device;
pub mod fake;
mod frame_writer;
pub(crate) mod headroom;
pub mod hop;
pub mod interrupts;
pub mod kept;
mod link_request;
pub mod local;
mod netns;
pub mod pair;
mod queue_len;
pub mod sideband;
pub mod stand_in;
pub mod tap;
mod tun;
mod tun_request;
pub mod underlay;
pub mod veth;
pub mod vhost_user;
pub mod virtqueue;
mod whole_datagrams;
pub mod wire;

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::time::Duration;

use parking_lot::MutexGuard;

use self::device::OnDevice;
use self::interrupts::InterruptSettings;
use self::pair::PairKind;
use self::virtqueue::window::Loans;
use crate::frame::{Batch, DropSink, Frame, Room, Selection};
use crate::inherit::GuestState;
use crate::source::Source;
use crate::wire::ethernet::{HEADER_LEN, Mac, VLAN_TAG_LEN};
use crate::wire::offload::{GSO_NONE, Offload};

/// State of the guest or device behind an interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// Frames flow.
    Up,
    /// There is no guest or device, or it is not ready; holds the reason.
    Down(String),
    /// Disabled because the guest or front end broke the protocol; holds the reason. A reset by the guest ends this state.
    Broken(String),
}

/// A virtual NIC of a guest on this host.
pub trait Interface: Send + Sync {
    /// Number of queue pairs: 1 or more, constant.
    fn queues(&self) -> usize;

    /// Number of queue pairs, counted from the first, on which the guest currently receives: 1 to `queues()`. Callers spread
    /// frames over these; `deliver` accepts any queue and falls back to one in use.
    fn active_queues(&self) -> usize {
        self.queues()
    }

    /// The source of the guest's frames on `queue`, for the one dispatcher that serves the queue.
    fn source(self: Arc<Self>, queue: usize) -> Box<dyn Source>;

    /// Delivers frames to the guest on `queue` and notifies it once.
    ///
    /// Counts each frame as delivered or dropped; reports drops to `drops`. Finishes offloads that the guest does not accept in
    /// software.
    fn deliver(&self, queue: usize, frames: Selection<'_>, drops: &mut DropSink);

    /// Control of optimistic interrupts; `None` if the interface does not support them.
    fn coalesce(&self) -> Option<&dyn Coalesce> {
        None
    }

    /// Access to the guest's posted buffers; `None` if the interface does not support it.
    fn land(&self) -> Option<&dyn Land> {
        None
    }

    /// The guest's memory, for engines that it lends pages to; `None` if this process does not see it.
    fn loans(&self) -> Option<&Loans> {
        None
    }

    /// The guest's device, if the kernel may forward known flows at it by itself.
    fn kernel_device(&self) -> Option<&KernelDevice> {
        None
    }

    /// The kernel may forward frames from `src` to the guest for the lifetime of a verdict. Called when a verdict is installed or
    /// renewed.
    fn forwarded_from(&self, src: Mac) {
        _ = src;
    }

    /// The network device behind the interface; `None` if there is none.
    fn device(&self) -> Option<&dyn OnDevice> {
        None
    }

    /// State of the guest or device.
    fn state(&self) -> State;

    /// True if the guest was stopped here at the end of a live migration, until a guest starts here again.
    fn has_departed(&self) -> bool {
        false
    }

    /// Mistakes that lose frames although the interface may be up, for the administrator. One short sentence each.
    fn notes(&self) -> Vec<String> {
        vec![]
    }

    /// Stops the interface for good: no frame enters or leaves afterwards, and the guest sees its link go down. Does not wait for
    /// anybody else, because callers hold locks.
    fn stop(&self);

    /// Undoes the opening, in place of `stop`: removes what this process made.
    fn undo(&self) {
        self.stop();
    }

    /// Has a device of this vnetd that would outlive the process go with the interface, because the configuration no longer has it.
    fn let_go(&self) {}

    /// Has the device outlive the process, after a take-over from a vnetd that did not keep it.
    fn keep(&self) {}

    /// What another vnetd needs to take the interface over.
    ///
    /// # Errors
    /// Why it cannot, in one line.
    fn hand_over(&self) -> Result<Handed<'_>, String> {
        Err("it cannot be handed over".into())
    }

    /// Starts an interface that was handed over and has waited until the running vnetd stands still.
    fn start(&self) {}

    /// Goes on after a take-over that failed.
    fn go_on(&self) {}

    /// Waits until the kernel has released what a stopped interface lent it, at most a second.
    fn settle(&self) {}

    /// True if this host may answer ARP and ND requests that arrive from this interface. The replies' targets are then reached
    /// through this interface without having been heard on it.
    fn may_be_answered(&self) -> bool {
        true
    }

    /// Sets the addresses configured on this host in the interface's network, whenever they change. The local network subscribes
    /// to them.
    fn expect(&self, macs: &[Mac]) {
        _ = macs;
    }
}

/// What another vnetd needs to take an interface over.
#[derive(Default)]
pub struct Handed<'a> {
    /// The open files by kind; those of a kind are in order.
    pub files: Vec<(&'static str, OwnedFd)>,
    /// The state of a guest's front end.
    pub guest: Option<GuestState>,
    /// While it is held, the state does not change.
    pub turn: Option<MutexGuard<'a, ()>>,
    /// While it is held, no thread but dispatchers delivers frames.
    pub quiet: Option<MutexGuard<'a, Batch>>,
}

impl Handed<'_> {
    /// Files that need no state.
    fn files<'a>(files: impl IntoIterator<Item = (&'static str, BorrowedFd<'a>)>) -> Result<Self, String> {
        let duplicate = |(kind, file): (&'static str, BorrowedFd<'_>)| Ok((kind, file.try_clone_to_owned()?));
        let files: std::io::Result<Vec<_>> = files.into_iter().map(duplicate).collect();
        let files = files.map_err(|error| format!("cannot duplicate a descriptor: {error}"))?;
        Ok(Handed { files, ..Handed::default() })
    }
}

/// A guest's device at which the kernel can forward frames.
#[derive(Debug)]
pub struct KernelDevice {
    /// Name and index of the host's end, or of a local network's device.
    pub host: (String, u32),
    /// Name and index of the TAP that gets the frames which the kernel does not forward.
    pub tap: (String, u32),
    /// MAC address of the guest, or of a local network's device.
    pub mac: Mac,
    /// MTU in bytes, which an administrator may change for a local network's device.
    pub mtu: AtomicUsize,
    /// False while control has seen the guest's device down: the kernel discards frames to it, and no device counts them.
    pub up: AtomicBool,
    /// Where frames sent to the device go.
    pub leads_to: LeadsTo,
    /// Kind of the pair that the host's end belongs to; `None` for a local network's device.
    pub pair: Option<PairKind>,
}

/// Where frames go that are sent to a guest's device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeadsTo {
    /// Into another network namespace of this host, by its number in vnetd's (nsid); `None`: the number is unknown.
    Namespace(Option<u32>),
    /// Out of the host, or to the program that has opened a TAP.
    Outside,
}

/// Optimistic interrupts: notifies a guest of its frames early (VNET/P+ section IV.A).
pub trait Coalesce {
    /// Sets the interrupt mode and thresholds from now on.
    fn set_interrupts(&self, settings: InterruptSettings);

    /// True if `deliver` defers notifications to [`end_of_coalescing`](Coalesce::end_of_coalescing), which the dispatcher must then
    /// call for every queue it has delivered to. Check this after delivering.
    fn coalesces(&self) -> bool;

    /// Notifies the guest, if it is idle, of about `bytes` bytes that have arrived for `queue` and are not received yet. Returns
    /// true if it was notified. The dispatcher must then call [`end_of_coalescing`](Coalesce::end_of_coalescing), even if no frame
    /// follows.
    fn announce(&self, queue: usize, bytes: u64) -> bool;

    /// Ends coalescing on `queue`, because the source is drained. Returns the time after which the dispatcher must call
    /// [`check`](Coalesce::check), unless the guest [has reacted](Coalesce::has_reacted) before.
    fn end_of_coalescing(&self, queue: usize) -> Option<Duration>;

    /// True if the guest has made progress since frames were delivered on `queue`, and needs no notification of them.
    fn has_reacted(&self, queue: usize) -> bool;

    /// Notifies the guest of frames delivered on `queue` if it still waits for a notification.
    fn check(&self, queue: usize);
}

/// Receives frames in place, into a guest's posted buffers (VNET/P+ section IV.B, cut-through forwarding).
pub trait Land {
    /// Lends `fill` memory in posted buffers of `queue`, exactly enough for a frame of `len` bytes with the metadata `offload`.
    /// The memory is writable until `fill` returns; the guest may read and write it at any time. `fill` returns whether it wrote
    /// the frame, which is then delivered and counted as in [`deliver`](Interface::deliver).
    ///
    /// Returns true if the frame was delivered. Otherwise the buffers had too little space (`fill` was not called), or `fill`
    /// returned false.
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

/// Like [`exceeds_mtu`], for a piece of `len` bytes of a segmented frame.
#[inline]
pub(crate) fn piece_exceeds_mtu(offload: &Offload, len: usize, mtu: usize) -> bool {
    offload.gso_type == GSO_NONE && len > mtu + HEADER_LEN + VLAN_TAG_LEN
}
