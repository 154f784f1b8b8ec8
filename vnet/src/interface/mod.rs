//! Interfaces: where guests' frames enter and leave the core.
//!
//! An interface has one or more queues. Each queue's two directions are served independently: `receive` takes frames *from*
//! the guest, `deliver` gives frames *to* it. Both work on batches. Names follow the core's point of view, as in VNET/P.
//!
//! Several dispatchers may deliver to one queue; each implementation serialises that inside `deliver` with one lock a
//! batch (never a frame). A queue's `receive` is called by one dispatcher only.

pub mod fake;
pub mod interrupts;
pub mod local;
mod packet;
pub mod tap;
pub mod vhost_user;
pub mod virtqueue;

use self::interrupts::InterruptSettings;
use crate::frame::{Batch, Frame, Room};
use crate::poll::Waker;
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
    /// How many queue pairs the interface is served on: 1 or more, constant.
    fn queues(&self) -> usize;

    /// How many of them, from the first one on, the guest receives on at the moment: 1 to `queues()`. Frames are best spread
    /// over these; `deliver` takes them on any queue and finds another one when it must.
    fn active_queues(&self) -> usize {
        self.queues()
    }

    /// Takes up to a batch of frames from the guest's queue `queue` and has `run` take them to completion.
    ///
    /// The batch is empty on entry and cleared on return; `run` is called at most once, and not at all when there is
    /// nothing to do. Counts the frames as in. The frames' memory is the guest's again when `run` has returned and nobody has
    /// a [`Hold`](crate::frame::Hold) of it. Returns the number of frames taken
    /// (refused ones included), 0 when the queue was empty.
    fn receive(&self, queue: usize, batch: &mut Batch, run: &mut dyn FnMut(&Batch)) -> usize;

    /// Gives the frames `which` (indices into `batch`, in order) to the guest on queue `queue`, and notifies it once.
    ///
    /// Counts each frame as delivered or dropped. Finishes in software what the guest did not negotiate.
    fn deliver(&self, queue: usize, batch: &Batch, which: &[u16]);

    /// Gives frames of `queue` back to the guest whose memory was held, and is no longer. Called after holds were let go.
    fn reclaim(&self, _queue: usize) {}

    /// Lends `fill` room in buffers that the guest of `queue` has posted, exactly for a frame of `len` bytes with the metadata
    /// `offload`: memory that is writable until `fill` returns, and that the guest reads and writes when it likes. `fill` says
    /// whether the frame stands there; then the guest gets it as by [`deliver`](Interface::deliver), and it is counted.
    ///
    /// Returns true when it did. Else nothing was delivered: there is no such room (`fill` was not called), or `fill` did not
    /// want it, and the frame goes the ordinary way.
    fn land(
        &self,
        _queue: usize,
        _offload: &Offload,
        _len: usize,
        _fill: &mut dyn FnMut(&[Room]) -> bool,
    ) -> bool {
        false
    }

    /// Has the dispatcher that serves `queue` told of new frames from the guest by `waker`, from now on.
    fn attach(&self, queue: usize, waker: Waker);

    /// Takes the waker of `queue` back.
    fn detach(&self, queue: usize);

    /// Asks to be woken for the next frame from the guest on `queue`, before the dispatcher sleeps.
    ///
    /// Returns false when frames are waiting already (they came before the request took effect): do not sleep then.
    fn arm(&self, queue: usize) -> bool;

    /// The dispatcher is awake and will call `receive` by itself: notifications from the guest are not needed.
    fn disarm(&self, queue: usize);

    /// True when `receive` is cheap enough to be called every turn (a look at memory); false when it costs a system call
    /// and should follow a wake-up.
    fn polls(&self) -> bool;

    /// How the guest is notified of what is delivered, from now on. Interfaces whose guests cannot choose ignore it.
    fn set_interrupts(&self, _settings: InterruptSettings) {}

    /// True when `deliver` leaves notifying the guest to [`end_of_coalescing`](Interface::end_of_coalescing), which the
    /// dispatcher then owes for every queue that it has delivered to. Ask after delivering.
    fn coalesces(&self) -> bool {
        false
    }

    /// What was delivered on `queue` is all there is for now. True when [`check`](Interface::check) has to follow within
    /// [`CHECK_AFTER`](interrupts::CHECK_AFTER).
    fn end_of_coalescing(&self, _queue: usize) -> bool {
        false
    }

    /// Notifies the guest of what was delivered on `queue` if it still waits for that.
    fn check(&self, _queue: usize) {}

    /// What is behind the interface.
    fn state(&self) -> State;

    /// Stops the interface for good: no frame enters or leaves afterwards, the guest sees its link go down.
    fn stop(&self);

    /// True when this host may answer questions for a neighbour that come from here: what is then sent to that neighbour has
    /// to come in.
    fn may_be_answered(&self) -> bool {
        true
    }

    /// Tells the addresses that are configured on this host in the interface's network, whenever they change. Of use where
    /// many stations are behind an interface that has to be asked for frames.
    fn expect(&self, macs: &[Mac]) {
        _ = macs;
    }
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
