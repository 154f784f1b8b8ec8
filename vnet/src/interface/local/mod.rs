//! The local network: the user's own LAN, reached through a physical or veth device (direct send and receive of VNET/P, section
//! 4.5).
//!
//! A packet socket bound to the device receives and sends whole Ethernet frames without encapsulation, so that the overlay's
//! machines appear on the LAN beside its stations. With `PACKET_VNET_HDR` each frame has the same virtio-net header as on a TAP:
//! super-frames and partial checksums pass in both directions (packet(7), Documentation/networking/packet_mmap.rst).
//!
//! **Reception filter.** A device receives frames to its own address, broadcast, and subscribed addresses. [`subscriptions`]
//! holds the addresses of the overlay's machines: those configured on this host, and the source of every frame sent to the LAN,
//! because stations only answer addresses they have heard. All multicast is subscribed, because IPv6 neighbour discovery needs
//! it. A device may deliver more (a veth delivers all frames; so does a NIC whose filter is full or on which another program has
//! subscribed). Frames to other addresses are discarded, counted, and never flooded into the overlay. With `promiscuous = true`
//! all frames are received except those to the device's own address, which belong to this host.
//!
//! **Loop prevention.** Frames sent by the host or vnet itself are not received (`PACKET_IGNORE_OUTGOING`). A frame from the LAN
//! whose source was just sent to the LAN has looped back (hairpin, second path into the overlay) and is dropped as `hairpin`. An
//! address that really moves to the LAN is accepted after 2 s.
//!
//! **The kernel's own path.** Programs at the device forward known flows; [`copies`] of all other frames reach vnetd. What the host
//! itself receives at the device does not change. Frames to the device's own address are not copied. Frames to the LAN leave
//! by the packet socket, or by the kernel if their flow is known: then verdicts keep their source subscribed.
//!
//! **VLAN tags** are stripped by the kernel and passed beside the frame (`PACKET_AUXDATA`); vnet restores them.

mod copies;
mod packet;
mod subscriptions;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

use parking_lot::Mutex;

use self::copies::Copies;
pub use self::packet::LocalError;
use self::packet::{Packet, PacketBurst, PacketSocket};
use self::subscriptions::Subscriptions;
use crate::frame::{Batch, DropSink, FRAME_MAX, Origin, Segment, Selection};
use crate::interface::device::{self, Home, OnDevice};
use crate::interface::frame_writer::FrameWriter;
use crate::interface::netns::Netns;
use crate::interface::{Handed, Interface, KernelDevice, LeadsTo, State, exceeds_mtu};
use crate::poll::Waker;
use crate::source::{Source, Taken};
use crate::stats::{DiscardReason, DropReason, PortStats};
use crate::wire::ethernet::{self, Mac};
use crate::wire::offload::Accepts;
use crate::wire::segment;

/// Configuration of a local network.
#[derive(Clone, Debug)]
pub struct LocalOptions {
    /// The device, which must exist.
    pub device: String,
    /// The device's network namespace; vnetd's own if absent.
    pub netns: Option<Netns>,
    /// Receive frames to all addresses.
    pub promiscuous: bool,
    /// Maximum payload of a frame in bytes, capped at the device's MTU.
    pub mtu: usize,
    /// Receive copies of the frames that the kernel does not forward by itself, from programs that are attached afterwards
    /// ([`KernelDevice`]). The device must be in the caller's network namespace.
    pub kernel_path: bool,
}

/// The user's LAN as an interface.
pub struct Local {
    device: String,
    home: Home,
    /// Interface index of the device. A later device of the same name has another index.
    index: libc::c_int,
    origin: Origin,
    /// Configured MTU.
    mtu_max: usize,
    /// MTU in use: the device's, or the configured one if that is lower.
    mtu: AtomicUsize,
    promiscuous: bool,
    /// The device's own MAC address, which belongs to this host.
    own: Mac,
    stats: Arc<PortStats>,
    /// Sends, and subscribes the device. Also receives if there are no copies.
    socket: OwnedFd,
    kernel: Option<(KernelDevice, Copies)>,
    subscriptions: Mutex<Subscriptions>,
    stopped: AtomicBool,
    /// Scratch memory for frames whose offloads the kernel refuses.
    scratch: Mutex<Box<[u8]>>,
}

impl Local {
    /// Opens the device in its network namespace.
    ///
    /// # Errors
    /// See the variants of [`LocalError`].
    pub fn open(
        options: &LocalOptions,
        origin: Origin,
        stats: Arc<PortStats>,
    ) -> Result<Arc<Local>, LocalError> {
        let open = || packet::open(&options.device, options.promiscuous, !options.kernel_path);
        let (home, opened) = Home::enter(options.netns.as_ref(), open)?;
        let opened = opened?;
        let copies =
            if options.kernel_path { Some(Copies::open(&options.device, opened.index)?) } else { None };
        Ok(Local::of(options, home, opened, copies, (origin, stats)))
    }

    /// The local network of a running vnetd, which hands over its packet socket, and with `options.kernel_path` the TAP for copies and its
    /// packet socket.
    ///
    /// # Errors
    /// The device is gone.
    pub fn inherit(
        options: &LocalOptions,
        socket: OwnedFd,
        copies: Option<[OwnedFd; 2]>,
        (origin, stats): (Origin, Arc<PortStats>),
    ) -> Result<Arc<Local>, LocalError> {
        let open = || packet::inherit(&options.device, socket);
        let (home, opened) = Home::enter(options.netns.as_ref(), open)?;
        let opened = opened?;
        let copies = copies.map(|files| Copies::inherit(opened.index, files)).transpose()?;
        Ok(Local::of(options, home, opened, copies, (origin, stats)))
    }

    fn of(
        options: &LocalOptions,
        home: Home,
        opened: PacketSocket,
        copies: Option<Copies>,
        (origin, stats): (Origin, Arc<PortStats>),
    ) -> Arc<Local> {
        let mtu = options.mtu.min(opened.mtu);
        let kernel = copies.map(|copies| {
            let (host, tap) = ((options.device.clone(), opened.index as u32), copies.tap.clone());
            let (mac, leads_to) = (opened.mac, LeadsTo::Outside);
            (KernelDevice { host, tap, mac, mtu: mtu.into(), up: true.into(), leads_to, pair: None }, copies)
        });
        Arc::new(Local {
            device: options.device.clone(),
            home,
            index: opened.index,
            origin,
            mtu_max: options.mtu,
            mtu: mtu.into(),
            promiscuous: options.promiscuous,
            own: opened.mac,
            stats,
            subscriptions: Mutex::new(Subscriptions::new(opened.index)),
            socket: opened.socket,
            kernel,
            stopped: AtomicBool::new(false),
            scratch: Mutex::new(vec![0; FRAME_MAX].into_boxed_slice()),
        })
    }

    /// The socket that receives the LAN's frames.
    fn receives(&self) -> &OwnedFd {
        self.kernel.as_ref().map_or(&self.socket, |(_, copies)| &copies.socket)
    }

    /// Decides whether a frame from the LAN is accepted.
    fn admit(&self, subscriptions: &Subscriptions, dst: Mac, src: Mac) -> Admission {
        if subscriptions.sent_recently(src) {
            return Admission::Hairpin;
        }
        let subscribed = dst.is_multicast() || subscriptions.contains(dst);
        if subscribed || (self.promiscuous && dst != self.own) {
            Admission::Accepted
        } else {
            Admission::NotSubscribed
        }
    }

    /// Adds the accepted frames of a burst to the batch.
    ///
    /// # Safety
    /// The burst must stay unchanged until the batch is cleared.
    unsafe fn enter(&self, burst: &PacketBurst, count: usize, batch: &mut Batch, drops: &mut DropSink) {
        let (subscriptions, port) = (self.subscriptions.lock(), self.origin.port);
        let (mut frames, mut bytes, mut unsubscribed) = (0, 0, 0);
        for packet in (0..count).filter_map(|index| burst.packet(index)) {
            let Packet { bytes: frame, offload, truncated } = packet;
            let len = frame.len() as u64;
            let Some((dst, src)) = ethernet::addresses(frame) else {
                drops.refused(&self.stats, port, DropReason::TooShort, len);
                continue;
            };
            match self.admit(&subscriptions, dst, src) {
                Admission::Accepted => {}
                Admission::NotSubscribed => {
                    unsubscribed += 1;
                    continue;
                }
                Admission::Hairpin => {
                    drops.refused(&self.stats, port, DropReason::Hairpin, len);
                    continue;
                }
            }
            if truncated {
                drops.refused(&self.stats, port, DropReason::TooLong, len);
                continue;
            }
            let mut builder = batch.begin();
            // SAFETY: the frame lies in the burst's memory, which stays unchanged until the batch is cleared (contract of
            // `enter`).
            unsafe { builder.push_stable(Segment::new(frame.as_ptr(), frame.len())) };
            match builder.finish(self.origin.port, self.origin.network, offload, 0) {
                Ok(()) => {
                    frames += 1;
                    bytes += len;
                }
                Err(error) => drops.refused(&self.stats, port, error.into(), len),
            }
        }
        self.stats.in_frames.add(frames);
        self.stats.in_bytes.add(bytes);
        if unsubscribed > 0 {
            self.stats.discard(DiscardReason::NotAsked, unsubscribed);
        }
    }

    /// Finishes the offloads of a frame that the kernel refused in software, and writes the resulting pieces.
    #[cold]
    fn write_finished(&self, frames: Selection<'_>, index: u16, drops: &mut DropSink) {
        let frame = frames.batch.frame(index.into());
        let mut scratch = self.scratch.lock();
        let len = frames.batch.copy_to(frame, &mut scratch);
        let mut writer = FrameWriter::new(packet::HEADER_LEN);
        let (mut pieces, mut sent, mut bytes) = (0, 0, 0);
        let result =
            segment::finish(&mut scratch[..len], &frame.offload, &Accepts::NOTHING, &mut |piece, offload| {
                pieces += 1;
                let segment = Segment::new(piece.as_ptr(), piece.len());
                match writer.write(&self.socket, &offload, &[segment]) {
                    Ok(()) => {
                        sent += 1;
                        bytes += piece.len() as u64;
                    }
                    Err(error) => drops.dropped(&self.stats, drop_reason(&error), index, 1),
                }
            });
        match result {
            Ok(()) => {
                self.stats.copies.add(pieces - 1);
                self.stats.delivered(sent, bytes);
            }
            Err(_) => drops.dropped(&self.stats, DropReason::Unsegmentable, index, 1),
        }
    }
}

/// Result of checking a frame from the LAN.
enum Admission {
    Accepted,
    /// Destination MAC not subscribed on this local network.
    NotSubscribed,
    /// The overlay's own frame has looped back.
    Hairpin,
}

/// The drop reason for a frame that the kernel refused.
fn drop_reason(error: &io::Error) -> DropReason {
    match error.raw_os_error() {
        // The device is down or has been removed.
        Some(libc::ENETDOWN | libc::ENXIO | libc::ENODEV) => DropReason::NotReady,
        error => DropReason::of_refusal(error.unwrap_or(libc::EIO)),
    }
}

impl Interface for Local {
    /// False, because the LAN's frames to an address that has not sent to the LAN are not accepted; see [`subscriptions`].
    fn may_be_answered(&self) -> bool {
        false
    }

    fn queues(&self) -> usize {
        1
    }

    fn source(self: Arc<Self>, _queue: usize) -> Box<dyn Source> {
        Box::new(LocalSource { local: self, burst: PacketBurst::new(), drained: false, waker: None })
    }

    fn deliver(&self, _queue: usize, frames: Selection<'_>, drops: &mut DropSink) {
        if self.stopped.load(Relaxed) {
            return drops.dropped_all(&self.stats, DropReason::NotReady, frames.which);
        }
        // Subscribe before sending: the answer can arrive at once.
        self.subscriptions
            .lock()
            .subscribe_sources(&self.socket, frames.frames().map(|(_, frame)| frame.src));
        let mut writer = FrameWriter::new(packet::HEADER_LEN);
        let mtu = self.mtu.load(Relaxed);
        for (index, frame) in frames.frames() {
            if exceeds_mtu(frame, mtu) {
                self.stats.last_oversize.note(frame.sent());
                drops.dropped(&self.stats, DropReason::MtuExceeded, index, 1);
                continue;
            }
            match writer.write(&self.socket, &frame.offload, frames.batch.segments(frame)) {
                Ok(()) => self.stats.delivered(1, frame.len() as u64),
                // The kernel refuses the offload metadata.
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) && !frame.offload.is_none() => {
                    self.write_finished(frames, index, drops);
                }
                Err(error) => drops.dropped(&self.stats, drop_reason(&error), index, 1),
            }
        }
    }

    fn state(&self) -> State {
        if self.stopped.load(Relaxed) {
            return State::Down("stopped".into());
        }
        if let Some(reason) = self.lost() {
            return State::Down(reason);
        }
        match device::see(&self.socket, &self.device) {
            Ok(sight) if !sight.up => State::Down(self.home.device_down(&self.device)),
            Ok(sight) if !sight.running => State::Down(format!("device '{}' has no carrier", self.device)),
            _ => State::Up,
        }
    }

    fn notes(&self) -> Vec<String> {
        let (mtu, mtu_max) = (self.mtu.load(Relaxed), self.mtu_max);
        let smaller = mtu < mtu_max;
        smaller
            .then(|| format!("device '{}' has MTU {mtu}, less than mtu = {mtu_max}", self.device))
            .into_iter()
            .collect()
    }

    fn device(&self) -> Option<&dyn OnDevice> {
        Some(self)
    }

    fn kernel_device(&self) -> Option<&KernelDevice> {
        self.kernel.as_ref().map(|(device, _)| device)
    }

    fn forwarded_from(&self, src: Mac) {
        self.subscriptions.lock().subscribe_forwarded(&self.socket, src);
    }

    fn stop(&self) {
        self.stopped.store(true, Relaxed);
    }

    fn hand_over(&self) -> Result<Handed<'_>, String> {
        let own = ("packet", self.socket.as_fd());
        let copies = self.kernel.iter().flat_map(|(_, copies)| copies.descriptors());
        Handed::files(std::iter::once(own).chain(copies.map(|file| ("copies", file))))
    }

    fn expect(&self, macs: &[Mac]) {
        self.subscriptions.lock().configure(&self.socket, macs);
    }
}

impl OnDevice for Local {
    fn netns(&self) -> Option<&Netns> {
        self.home.netns()
    }

    fn look(&self, _socket: BorrowedFd<'_>) {
        if let Ok(sight) = device::see(&self.socket, &self.device) {
            let mtu = self.mtu_max.min(sight.mtu);
            self.mtu.store(mtu, Relaxed);
            if let Some(device) = self.kernel_device() {
                device.mtu.store(mtu, Relaxed);
                device.up.store(sight.up, Relaxed);
            }
        }
    }

    fn lost(&self) -> Option<String> {
        let same = |sight: device::Sight| sight.index == self.index;
        let there = device::see(&self.socket, &self.device).is_ok_and(same);
        self.home.lost().or_else(|| (!there).then(|| format!("waiting for device '{}'", self.device)))
    }

    fn mtu(&self) -> usize {
        self.mtu.load(Relaxed)
    }
}

/// Source of the frames from the LAN.
struct LocalSource {
    local: Arc<Local>,
    burst: PacketBurst,
    /// True if the last receive found the socket empty, so the next frame wakes the dispatcher.
    drained: bool,
    waker: Option<Waker>,
}

impl Source for LocalSource {
    // SAFETY: frames lie in `burst`, which only the next fill writes to; the caller clears the batch before it.
    unsafe fn fill(&mut self, batch: &mut Batch, drops: &mut DropSink, _now_ms: u64) -> Taken {
        let local = &*self.local;
        if local.stopped.load(Relaxed) {
            return Taken { drained: true, ..Taken::default() };
        }
        let received = self.burst.receive(local.receives(), batch.limit());
        self.drained = received.emptied;
        // Virtio-net metadata cannot describe these frames: the kernel has dropped them.
        for _ in 0..received.unreadable {
            drops.refused(&local.stats, local.origin.port, DropReason::BadOffload, 0);
        }
        // SAFETY: only the next fill writes to the burst, and the batch is cleared before it (contract of `fill`).
        unsafe { local.enter(&self.burst, received.packets, batch, drops) };
        let units = received.packets + received.unreadable;
        Taken { units, drained: units < batch.limit(), ..Taken::default() }
    }

    fn watch(&mut self, waker: Waker) {
        self.drained = false;
        if let Err(error) = waker.watch(self.local.receives()) {
            tracing::error!(device = self.local.device, %error, "cannot watch the local network");
        }
        self.waker = Some(waker);
    }

    fn unwatch(&mut self) {
        if let Some(waker) = self.waker.take() {
            waker.forget(self.local.receives().as_fd());
        }
    }

    /// The descriptor is always watched edge-triggered; only an empty receive guarantees an edge for the next frame.
    fn rest(&mut self) -> bool {
        self.drained || self.local.stopped.load(Relaxed)
    }
}
