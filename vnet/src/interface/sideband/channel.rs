//! The sideband itself: what it takes out of an interface's frames, and what it adds.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use parking_lot::{Mutex, RwLock};

use super::mailbox::{Mailbox, Message};
use crate::frame::{BATCH_MAX, Batch, DropSink, FrameError, Origin, Segment, Selection};
use crate::interface::virtqueue::window::Loans;
use crate::interface::{Interface, piece_exceeds_mtu};
use crate::stats::{DropReason, PortStats};
use crate::wire::ethernet::Mac;
use crate::wire::ip::{self, UDP};
use crate::wire::offload::Offload;

/// Ethertype of control frames: "local experimental 1" (IEEE 802).
pub const ETHERTYPE: u16 = 0x88b5;
/// Destination of control frames: a locally administered group address.
pub const GROUP: Mac = Mac([0x03, 0x76, 0x6e, 0x65, 0x74, 0x01]);
/// Source of the answers.
pub const OWN: Mac = Mac([0x02, 0x76, 0x6e, 0x65, 0x74, 0x01]);
/// Longest control frame in bytes: it fits the smallest usual MTU.
pub const CONTROL_MAX: usize = 1514;
/// Control frames that wait for the program, and how many a guest may send in a second.
const CONTROL_WAITING: usize = 256;
const CONTROL_PER_S: u32 = 20_000;
/// Frames in the guest's name that wait for the dispatcher, and their bytes: two batches of super-frames.
const OUTBOX_FRAMES: usize = 1024;
const OUTBOX_BYTES: usize = 8 << 20;
/// Datagrams that wait at one port, and their bytes.
const PORT_FRAMES: usize = 4096;
/// Room of a port in bytes: what its user may let peers send at once.
pub const PORT_BYTES: usize = 8 << 20;
/// Maximum number of open ports: each frame to the guest is compared with all.
pub const PORTS_MAX: usize = 32;

/// An open port: the UDP datagrams to one address.
pub struct Port {
    address: SocketAddr,
    mail: Mailbox,
    sideband: std::sync::Weak<Sideband>,
}

impl Port {
    /// Takes the next datagram, a whole frame with its headers. Super-frames are not segmented.
    pub fn take(&self) -> Option<Message> {
        self.mail.take()
    }

    /// Readable while datagrams wait.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.mail.as_fd()
    }

    /// Closes the port: later datagrams go to the guest.
    pub fn close(&self) {
        if let Some(sideband) = self.sideband.upgrade() {
            let mut ports = sideband.ports.write();
            ports.retain(|port| !std::ptr::eq(&**port, self));
            sideband.steers.store(!ports.is_empty(), Ordering::Relaxed);
        }
    }
}

/// Rate limit of control frames: how many were taken in which second.
#[derive(Default)]
struct Rate {
    since: Option<Instant>,
    taken: u32,
}

/// An interface's sideband: the program's end.
pub struct Sideband {
    pub(super) inner: Arc<dyn Interface>,
    pub(super) origin: Origin,
    mtu: usize,
    pub(super) stats: Arc<PortStats>,
    control: Mailbox,
    pub(super) outbox: Mailbox,
    ports: RwLock<Vec<Arc<Port>>>,
    /// True if a port is open.
    steers: AtomicBool,
    rate: Mutex<Rate>,
    /// For frames to the guest.
    pub(super) batch: Mutex<Batch>,
    is_stopped: AtomicBool,
}

impl Sideband {
    /// A sideband of `inner`, whose frames enter at `origin` and count in `stats`.
    ///
    /// # Errors
    /// The process is out of file descriptors.
    pub fn new(
        inner: Arc<dyn Interface>,
        origin: Origin,
        mtu: usize,
        stats: Arc<PortStats>,
    ) -> std::io::Result<Arc<Sideband>> {
        let sideband = Arc::new(Sideband {
            inner,
            origin,
            mtu,
            stats,
            control: Mailbox::new(CONTROL_WAITING, CONTROL_WAITING * CONTROL_MAX)?,
            outbox: Mailbox::new(OUTBOX_FRAMES, OUTBOX_BYTES)?,
            ports: RwLock::default(),
            steers: AtomicBool::new(false),
            rate: Mutex::default(),
            batch: Mutex::new(Batch::of(1)),
            is_stopped: AtomicBool::new(false),
        });
        if let Some(loans) = sideband.inner.loans() {
            let told = Arc::downgrade(&sideband);
            loans.tell(Arc::new(move || told.upgrade().iter().for_each(|sideband| sideband.control.ring())));
        }
        Ok(sideband)
    }

    /// Takes the next control frame of the guest.
    pub fn take(&self) -> Option<Message> {
        self.control.take()
    }

    /// Readable while control frames wait, and once after the guest's loans were revoked or the interface was stopped.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.control.as_fd()
    }

    /// True once the interface is stopped for good.
    pub fn is_stopped(&self) -> bool {
        self.is_stopped.load(Ordering::Relaxed)
    }

    /// Port and network of the interface.
    pub fn origin(&self) -> Origin {
        self.origin
    }

    /// MTU of the interface in bytes.
    pub fn mtu(&self) -> usize {
        self.mtu
    }

    /// Sends a frame as if the guest had sent it; one for an open port goes straight there. Returns false if too many wait, or if no guest may send such a frame.
    pub fn send(&self, message: Message) -> bool {
        if !self.takes(&message) {
            return false;
        }
        // No bridge returns a frame to where it came from, and the guest's own kernel would not send this one.
        match self.port_of(&message) {
            Some(port) => port.mail.put(Message { is_local: true, ..message }),
            None => self.outbox.put(message),
        }
    }

    /// Delivers a frame to the open port of its destination address, as from the guest itself. Returns false if no port is open, if its queue is full, or if
    /// no guest may send such a frame.
    pub fn inject(&self, message: Message) -> bool {
        let message = Message { is_local: true, ..message };
        self.takes(&message) && self.port_of(&message).is_some_and(|port| port.mail.put(message))
    }

    /// Whether a port is open at this address.
    pub fn has_port(&self, address: SocketAddr) -> bool {
        self.ports.read().iter().any(|port| port.address == address)
    }

    fn takes(&self, message: &Message) -> bool {
        let len = message.bytes.len();
        let is_short = |offload| !piece_exceeds_mtu(&offload, len, self.mtu);
        message.offload.checked(len).is_ok_and(is_short) && !self.is_stopped()
    }

    fn port_of(&self, message: &Message) -> Option<Arc<Port>> {
        let to = destination(&message.bytes)?;
        self.ports.read().iter().find(|port| port.address == to).cloned()
    }

    /// Delivers a control frame to the guest, or counts it as dropped.
    ///
    /// # Errors
    /// It is no frame.
    pub fn tell(&self, bytes: &[u8]) -> Result<(), FrameError> {
        let mut batch = self.batch.lock();
        batch.clear();
        let mut builder = batch.begin();
        // SAFETY: `bytes` outlives this call, which clears the batch before it returns.
        unsafe { builder.push_stable(Segment::new(bytes.as_ptr(), bytes.len())) };
        builder.finish(self.origin.port, self.origin.network, Offload::default(), 0)?;
        self.stats.in_frames.add(1);
        self.stats.in_bytes.add(bytes.len() as u64);
        self.inner.deliver(0, Selection { batch: &batch, which: &[0] }, &mut DropSink::new());
        batch.clear();
        if let Some(guest) = self.inner.coalesce().filter(|guest| guest.coalesces()) {
            // No dispatcher knows of the frame: what it would do at the end of coalescing, and after the guest's reaction time, is done now.
            if guest.end_of_coalescing(0).is_some() {
                guest.check(0);
            }
        }
        Ok(())
    }

    /// Opens a port. `None` if the address has one, or if there are too many.
    ///
    /// # Errors
    /// The process is out of file descriptors.
    pub fn open(self: &Arc<Self>, address: SocketAddr) -> std::io::Result<Option<Arc<Port>>> {
        let mail = Mailbox::new(PORT_FRAMES, PORT_BYTES)?;
        let mut ports = self.ports.write();
        if ports.len() >= PORTS_MAX || ports.iter().any(|port| port.address == address) {
            return Ok(None);
        }
        let port = Arc::new(Port { address, mail, sideband: Arc::downgrade(self) });
        ports.push(Arc::clone(&port));
        self.steers.store(true, Ordering::Relaxed);
        Ok(Some(port))
    }

    /// The guest's memory; `None` if this process does not see it.
    pub fn loans(&self) -> Option<&Loans> {
        self.inner.loans()
    }

    /// True if a port is open.
    #[inline]
    pub(super) fn steers(&self) -> bool {
        self.steers.load(Ordering::Relaxed)
    }

    /// The interface is stopped for good.
    pub(super) fn stop(&self) {
        self.is_stopped.store(true, Ordering::Relaxed);
        self.inner.stop();
        self.control.ring();
    }

    /// Takes one token of the rate limit of control frames.
    fn admits(&self) -> bool {
        let (mut rate, now) = (self.rate.lock(), Instant::now());
        if rate.since.is_none_or(|since| now.saturating_duration_since(since).as_secs() > 0) {
            *rate = Rate { since: Some(now), taken: 0 };
        }
        rate.taken += 1;
        rate.taken <= CONTROL_PER_S
    }

    /// Takes the control frames out of a batch of the guest.
    #[cold]
    pub(super) fn take_up(&self, batch: &mut Batch, drops: &mut DropSink) {
        let mut taken = [false; BATCH_MAX];
        for (taken, frame) in taken.iter_mut().zip(batch.frames()) {
            if !is_control(batch.head(frame)) {
                continue;
            }
            *taken = true;
            let mut bytes = vec![];
            // One byte more shows that it is too long.
            batch.append_to(frame, CONTROL_MAX + 1, &mut bytes);
            let (len, offload) = (frame.len() as u64, Offload::default());
            if bytes.len() <= CONTROL_MAX
                && self.admits()
                && self.control.put(Message { bytes, offload, is_local: true })
            {
                self.stats.delivered(1, len);
            } else {
                drops.withdrawn(&self.stats, self.origin.port, DropReason::Sideband, len);
            }
        }
        batch.retain(|index| !taken[index]);
    }

    /// Delivers a selection of which some frames may be for ports.
    pub(super) fn steer(&self, queue: usize, frames: Selection<'_>, drops: &mut DropSink) {
        let ports = self.ports.read();
        let (mut rest, mut count) = ([0; BATCH_MAX], 0);
        for (index, frame) in frames.frames() {
            let wanted = destination(frames.batch.head(frame));
            let port = ports.iter().find(|port| Some(port.address) == wanted);
            let Some(port) = port else {
                rest[count] = index;
                count += 1;
                continue;
            };
            let (len, offload) = (frame.len(), frame.offload);
            let mut bytes = Vec::with_capacity(len);
            frames.batch.append_to(frame, len, &mut bytes);
            if port.mail.put(Message { bytes, offload, is_local: false }) {
                self.stats.delivered(1, len as u64);
            } else {
                drops.dropped(&self.stats, DropReason::NoBuffer, index, 1);
            }
        }
        drop(ports);
        if count > 0 {
            self.inner.deliver(queue, frames.only(&rest[..count]), drops);
        }
    }
}

/// True for a control frame.
fn is_control(head: &[u8]) -> bool {
    head.starts_with(&GROUP.0) && head.get(12..14) == Some(&ETHERTYPE.to_be_bytes())
}

/// Destination of an unfragmented UDP datagram.
fn destination(head: &[u8]) -> Option<SocketAddr> {
    let (offset, header) = ip::in_frame(head)?;
    if header.protocol != UDP || header.is_fragment() {
        return None;
    }
    let port: &[u8; 2] = head.get(offset + header.len + 2..)?.first_chunk()?;
    let ip: IpAddr = header.destination();
    Some(SocketAddr::new(ip, u16::from_be_bytes(*port)))
}
