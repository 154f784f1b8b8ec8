//! The local network: the user's own LAN, by a physical or veth device (direct send and receive of VNET/P, section 4.5).
//!
//! A packet socket bound to the device takes and gives whole Ethernet frames, unencapsulated, so that the overlay's machines
//! stand on the LAN beside its stations. `PACKET_VNET_HDR` gives each frame the same virtio-net header as on a TAP: super-frames
//! and partial checksums cross both ways (packet(7), Documentation/networking/packet_mmap.rst).
//!
//! **What is received.** A device shows what is for its own address, broadcast, and what it is asked for. Asked for are the
//! addresses of the overlay's machines (`PACKET_MR_UNICAST`): those that are configured on this host, and the source of every
//! frame that goes out here, for nobody answers an address that has not been heard. All multicast is asked for, since IPv6
//! neighbour discovery lives on it. A device may show more (a veth shows all, a NIC does when its filter is full or another
//! program asked): frames for addresses that nobody asked for are discarded, counted, and never flooded into the overlay. With
//! `promiscuous = true` everything is taken but what is for the device's own address: that is this host's.
//!
//! **No loops.** What the host or vnet itself sends is not seen (`PACKET_IGNORE_OUTGOING`). A frame that comes in from an
//! address which the overlay has just sent here is one of ours that came back (a hairpin, a second way into the same overlay);
//! it is dropped under `hairpin`. An address that really moves to the LAN is believed after [`OURS_MS`].
//!
//! **VLAN tags** are taken out by the kernel and come beside the frame (`PACKET_AUXDATA`); they are put back in their place.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Instant;

use parking_lot::Mutex;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use super::packet::{self, Burst, Packet};
use super::tap::Netns;
use super::{Interface, State};
use crate::frame::{Batch, DropSink, FRAME_MAX, Origin, SEGMENTS_MAX, Segment, Selection};
use crate::poll::Waker;
use crate::source::{Source, Taken};
use crate::stats::{DiscardReason, DropReason, PortStats};
use crate::wire::ethernet::{self, Mac};
use crate::wire::offload::{Accepts, Offload};
use crate::wire::segment;

/// Most addresses that are asked for at the same time.
const ASKED_MAX: usize = 4096;
/// An address that was not heard from the overlay for so long is asked for no more, in ms. Longer than stations remember
/// addresses without asking (RFC 4861, Linux's ARP).
const ASKED_MS: u64 = 600_000;
/// For so long after a frame of an address left here, a frame of that address from the LAN is that frame, come back; in ms.
const OURS_MS: u64 = 2_000;

/// What a local network is opened with.
#[derive(Clone, Debug)]
pub struct LocalOptions {
    /// The device, which is there already.
    pub device: String,
    /// Where the device lives; here when absent.
    pub netns: Option<Netns>,
    /// Take frames for all addresses.
    pub promiscuous: bool,
    /// Largest payload of a frame in bytes; the device's own MTU when that is less.
    pub mtu: usize,
}

/// Why a local network could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum LocalError {
    /// No such namespace, or no right to enter it.
    #[error("cannot enter network namespace '{0}': {1}; is it there ('ip netns list'), and is vnetd root?")]
    Netns(String, #[source] io::Error),
    /// No such device.
    #[error("there is no device '{0}'; see 'ip link', the local network needs one that is there")]
    NoDevice(String),
    /// The kernel refused a step.
    #[error("cannot {step} device '{device}': {error}{hint}")]
    Step {
        /// What was being done.
        step: &'static str,
        /// The device.
        device: String,
        /// What the kernel said.
        error: io::Error,
        /// What to do about it.
        hint: &'static str,
    },
}

/// A device on the user's LAN.
pub struct Local {
    device: String,
    origin: Origin,
    mtu: usize,
    promiscuous: bool,
    /// The device's own address, which is this host's.
    own: Mac,
    stats: Arc<PortStats>,
    socket: OwnedFd,
    asked: Mutex<Asked>,
    stopped: AtomicBool,
    /// Memory for frames that the kernel does not take unfinished.
    scratch: Mutex<Box<[u8]>>,
}

impl Local {
    /// Opens the device in its namespace.
    pub fn open(
        options: &LocalOptions,
        origin: Origin,
        stats: Arc<PortStats>,
    ) -> Result<Arc<Local>, LocalError> {
        let opened = match &options.netns {
            None => packet::open(options)?,
            Some(netns) => std::thread::scope(|scope| {
                let inside = scope.spawn(|| {
                    let error = |error| LocalError::Netns(netns.to_string(), error);
                    let file = File::open(netns.file()).map_err(error)?;
                    move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))
                        .map_err(|e| error(e.into()))?;
                    packet::open(options)
                });
                inside.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            })?,
        };
        Ok(Arc::new(Local {
            device: options.device.clone(),
            origin,
            mtu: options.mtu.min(opened.mtu),
            promiscuous: options.promiscuous,
            own: opened.mac,
            stats,
            asked: Mutex::new(Asked::new(opened.index)),
            socket: opened.socket,
            stopped: AtomicBool::new(false),
            scratch: Mutex::new(vec![0; FRAME_MAX].into_boxed_slice()),
        }))
    }

    /// Its MTU in bytes: the device's, or less if so configured.
    pub fn mtu(&self) -> usize {
        self.mtu
    }

    /// Whether a frame from the LAN may enter.
    fn judge(&self, asked: &Asked, dst: Mac, src: Mac) -> Verdict {
        if asked.is_ours(src) {
            return Verdict::CameBack;
        }
        let wanted = dst.is_multicast() || asked.has(dst) || (self.promiscuous && dst != self.own);
        if wanted { Verdict::Enters } else { Verdict::NotAsked }
    }

    /// Adds the frames of a burst to the batch.
    ///
    /// # Safety
    /// The burst stays unchanged until the batch is cleared.
    unsafe fn enter(&self, burst: &Burst, count: usize, batch: &mut Batch, drops: &mut DropSink) {
        let (asked, port) = (self.asked.lock(), self.origin.port);
        let (mut frames, mut bytes, mut strangers) = (0, 0, 0);
        for packet in (0..count).filter_map(|index| burst.packet(index)) {
            let Packet { bytes: frame, offload, truncated } = packet;
            let len = frame.len() as u64;
            let Some((dst, src)) = ethernet::addresses(frame) else {
                drops.refused(&self.stats, port, DropReason::TooShort, len);
                continue;
            };
            match self.judge(&asked, dst, src) {
                Verdict::Enters => {}
                Verdict::NotAsked => {
                    strangers += 1;
                    continue;
                }
                Verdict::CameBack => {
                    drops.refused(&self.stats, port, DropReason::Hairpin, len);
                    continue;
                }
            }
            if truncated {
                drops.refused(&self.stats, port, DropReason::TooLong, len);
                continue;
            }
            let mut builder = batch.begin();
            // SAFETY: the frame lies in the burst's memory, which stays as it is until the batch is cleared (contract of
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
        if strangers > 0 {
            self.stats.discard(DiscardReason::NotAsked, strangers);
        }
    }

    /// Writes one frame: `vectors` are its segments behind an empty first place, which becomes the virtio-net header.
    fn write(&self, offload: &Offload, vectors: &mut [libc::iovec]) -> Result<(), io::Error> {
        let header = offload.to_virtio(0);
        vectors[0] = libc::iovec { iov_base: header.as_ptr().cast_mut().cast(), iov_len: packet::HEADER_LEN };
        loop {
            // SAFETY: the header lives on this stack frame, the other vectors are readable while the batch (or the caller's
            // slice) they come from is; the kernel only reads them.
            let written = unsafe {
                libc::writev(self.socket.as_raw_fd(), vectors.as_ptr(), vectors.len() as libc::c_int)
            };
            if written >= 0 {
                return Ok(());
            }
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
        }
    }

    /// Finishes a frame in software that this kernel does not take as it is, and writes the pieces.
    #[cold]
    fn write_finished(&self, frames: Selection<'_>, index: u16, drops: &mut DropSink) {
        let frame = frames.batch.frame(index.into());
        let mut scratch = self.scratch.lock();
        let len = frames.batch.copy_to(frame, &mut scratch);
        let (mut pieces, mut sent, mut bytes) = (0, 0, 0);
        let result =
            segment::finish(&mut scratch[..len], &frame.offload, &Accepts::NOTHING, &mut |piece, offload| {
                pieces += 1;
                let vector = libc::iovec { iov_base: piece.as_ptr().cast_mut().cast(), iov_len: piece.len() };
                match self.write(&offload, &mut [vector, vector]) {
                    Ok(()) => {
                        sent += 1;
                        bytes += piece.len() as u64;
                    }
                    Err(error) => drops.dropped(&self.stats, reason(&error), index, 1),
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

    /// Writes the frame as it is. False when the kernel refused it because of what is unfinished in it.
    fn write_whole(
        &self,
        frames: Selection<'_>,
        index: u16,
        vectors: &mut [libc::iovec],
        drops: &mut DropSink,
    ) -> bool {
        let frame = frames.batch.frame(index.into());
        let segments = frames.batch.segments(frame);
        for (vector, segment) in vectors[1..].iter_mut().zip(segments) {
            *vector = libc::iovec { iov_base: segment.as_ptr().cast_mut().cast(), iov_len: segment.len() };
        }
        match self.write(&frame.offload, &mut vectors[..=segments.len()]) {
            Ok(()) => self.stats.delivered(1, frame.len() as u64),
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) && !frame.offload.is_none() => {
                return false;
            }
            Err(error) => drops.dropped(&self.stats, reason(&error), index, 1),
        }
        true
    }
}

enum Verdict {
    Enters,
    NotAsked,
    CameBack,
}

/// The reason under which a frame that the kernel refused is counted.
fn reason(error: &io::Error) -> DropReason {
    match error.raw_os_error() {
        // The device is down, or gone.
        Some(libc::ENETDOWN | libc::ENXIO | libc::ENODEV) => DropReason::NotReady,
        Some(libc::EAGAIN | libc::ENOBUFS | libc::ENOMEM) => DropReason::NoBuffer,
        Some(libc::EMSGSIZE) => DropReason::MtuExceeded,
        _ => DropReason::SendFailed,
    }
}

impl Interface for Local {
    /// Frames for addresses that were not heard here are not taken from the LAN.
    fn may_be_answered(&self) -> bool {
        false
    }

    fn queues(&self) -> usize {
        1
    }

    fn source(self: Arc<Self>, _queue: usize) -> Box<dyn Source> {
        Box::new(LocalSource { local: self, burst: Burst::new(), drained: false, waker: None })
    }

    fn deliver(&self, _queue: usize, frames: Selection<'_>, drops: &mut DropSink) {
        if self.stopped.load(Relaxed) {
            return drops.dropped_all(&self.stats, DropReason::NotReady, frames.which);
        }
        // Before the first frame is out: an answer must not come too early.
        self.asked.lock().hear(&self.socket, frames.frames().map(|(_, frame)| frame.src));
        let empty = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        let mut vectors = [empty; 1 + SEGMENTS_MAX];
        for (index, frame) in frames.frames() {
            if super::exceeds_mtu(frame, self.mtu) {
                drops.dropped(&self.stats, DropReason::MtuExceeded, index, 1);
            } else if !self.write_whole(frames, index, &mut vectors, drops) {
                self.write_finished(frames, index, drops);
            }
        }
    }

    fn state(&self) -> State {
        if self.stopped.load(Relaxed) {
            return State::Down("stopped".into());
        }
        match packet::flags(&self.socket, &self.device) {
            Err(_) => State::Down(format!("device '{}' was removed", self.device)),
            Ok(flags) if flags & libc::IFF_UP == 0 => {
                State::Down(format!("device '{0}' is down; 'ip link set {0} up'", self.device))
            }
            Ok(flags) if flags & libc::IFF_RUNNING == 0 => {
                State::Down(format!("device '{}' has no carrier", self.device))
            }
            Ok(_) => State::Up,
        }
    }

    fn stop(&self) {
        self.stopped.store(true, Relaxed);
    }

    fn expect(&self, macs: &[Mac]) {
        self.asked.lock().configure(&self.socket, macs);
    }
}

/// Frames from the LAN.
struct LocalSource {
    local: Arc<Local>,
    burst: Burst,
    /// The last look found the socket empty: the next frame wakes the dispatcher.
    drained: bool,
    waker: Option<Waker>,
}

impl Source for LocalSource {
    unsafe fn fill(&mut self, batch: &mut Batch, drops: &mut DropSink, _now_ms: u64) -> Taken {
        let local = &*self.local;
        if local.stopped.load(Relaxed) {
            return Taken { drained: true, ..Taken::default() };
        }
        let received = self.burst.receive(&local.socket, batch.limit());
        self.drained = received.emptied;
        // The kernel cannot describe these by virtio-net metadata, and has dropped them.
        for _ in 0..received.unreadable {
            drops.refused(&local.stats, local.origin.port, DropReason::BadOffload, 0);
        }
        // SAFETY: the burst is written to by the next fill only, before which the batch is cleared (contract of `fill`).
        unsafe { local.enter(&self.burst, received.packets, batch, drops) };
        let units = received.packets + received.unreadable;
        Taken { units, drained: units < batch.limit(), ..Taken::default() }
    }

    fn watch(&mut self, waker: Waker) {
        self.drained = false;
        if let Err(error) = waker.watch(&self.local.socket) {
            tracing::error!(device = self.local.device, %error, "cannot watch the local network");
        }
        self.waker = Some(waker);
    }

    fn unwatch(&mut self) {
        if let Some(waker) = self.waker.take() {
            waker.forget(self.local.socket.as_fd());
        }
    }

    /// The descriptor is watched edge-triggered all the time; only after an empty look is the next edge certain.
    fn rest(&mut self) -> bool {
        self.drained || self.local.stopped.load(Relaxed)
    }
}

/// The addresses that the device is asked for.
struct Asked {
    index: libc::c_int,
    /// By address: when it was last the source of a frame from the overlay, in ms; and whether it is configured.
    known: HashMap<Mac, Known>,
    started: Instant,
    /// The address heard last, and when in ms: frames come in rows.
    latest: (Mac, u64),
    swept_ms: u64,
}

#[derive(Clone, Copy, Default)]
struct Known {
    heard_ms: Option<u64>,
    configured: bool,
}

impl Asked {
    fn new(index: libc::c_int) -> Asked {
        Asked {
            index,
            known: HashMap::new(),
            started: Instant::now(),
            latest: (Mac::default(), 0),
            swept_ms: 0,
        }
    }

    fn now_ms(&self) -> u64 {
        self.started.elapsed().as_millis() as u64
    }

    fn has(&self, mac: Mac) -> bool {
        self.known.contains_key(&mac)
    }

    /// True when a frame of that source left here a moment ago.
    fn is_ours(&self, mac: Mac) -> bool {
        let heard_ms = self.known.get(&mac).and_then(|known| known.heard_ms);
        heard_ms.is_some_and(|at| self.now_ms().saturating_sub(at) < OURS_MS)
    }

    /// Notes the sources of frames that are about to leave.
    fn hear(&mut self, socket: &OwnedFd, sources: impl Iterator<Item = Mac>) {
        let now_ms = self.now_ms();
        for mac in sources {
            if (mac, now_ms) == self.latest || !mac.is_unicast() {
                continue;
            }
            self.latest = (mac, now_ms);
            if let Some(known) = self.known.get_mut(&mac) {
                known.heard_ms = Some(now_ms);
                continue;
            }
            if self.known.len() >= ASKED_MAX && !self.sweep(socket, now_ms) {
                // What comes for it is discarded and counted, as for any address that was not asked for.
                continue;
            }
            self.known.insert(mac, Known { heard_ms: Some(now_ms), configured: false });
            self.ask(socket, mac, true);
        }
    }

    /// Makes `macs` the configured addresses.
    fn configure(&mut self, socket: &OwnedFd, macs: &[Mac]) {
        for known in self.known.values_mut() {
            known.configured = false;
        }
        for &mac in macs.iter().take(ASKED_MAX) {
            if !self.has(mac) {
                self.ask(socket, mac, true);
            }
            self.known.entry(mac).or_default().configured = true;
        }
        self.forget(socket, |known| known.heard_ms.is_none() && !known.configured);
    }

    /// Makes room by asking no more for what was silent for long; at most once a second. True when there is room.
    fn sweep(&mut self, socket: &OwnedFd, now_ms: u64) -> bool {
        if now_ms.saturating_sub(self.swept_ms) >= 1000 {
            self.swept_ms = now_ms;
            let silent = |at: u64| now_ms.saturating_sub(at) >= ASKED_MS;
            self.forget(socket, |known| !known.configured && known.heard_ms.is_none_or(silent));
        }
        self.known.len() < ASKED_MAX
    }

    fn forget(&mut self, socket: &OwnedFd, which: impl Fn(&Known) -> bool) {
        let gone: Vec<Mac> =
            self.known.iter().filter(|(_, known)| which(known)).map(|(mac, _)| *mac).collect();
        for mac in gone {
            self.known.remove(&mac);
            self.ask(socket, mac, false);
        }
    }

    fn ask(&self, socket: &OwnedFd, mac: Mac, on: bool) {
        // A device that cannot filter shows everything anyway; one that is gone shows nothing.
        let _ = packet::set_membership(socket, self.index, libc::PACKET_MR_UNICAST, mac, on);
    }
}

/// A packet socket that is ready, and what its device is.
pub(super) struct Opened {
    pub(super) socket: OwnedFd,
    pub(super) index: libc::c_int,
    pub(super) mac: Mac,
    pub(super) mtu: usize,
}

/// The descriptor that the kernel just made.
pub(super) fn own(fd: libc::c_int) -> io::Result<OwnedFd> {
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel just made this descriptor for us, nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

#[cfg(test)]
#[path = "local_tests.rs"]
mod tests;
