//! TAP interfaces: for containers, hosts, and virtual machine monitors without vhost-user.
//!
//! The device is opened with `IFF_VNET_HDR`: the kernel delivers and accepts TCP and UDP super-frames of up to 64 KB with partial
//! checksums (Documentation/networking/tuntap.rst). Each frame costs one system call, because a TAP has no batched interface;
//! super-frames make up for that. A frame is read into the batch's arena behind its 12-byte virtio-net header, and written with
//! one `writev` directly from its segments.
//!
//! One write runs the whole receive path of the kernel, up to the application's socket buffer, but the application runs only when
//! it is scheduled. A datagram socket's default buffer (`net.core.rmem_default`, 208 KiB) holds a dozen jumbo frames, less than
//! one burst, and overflows if dispatchers and applications share processors. So a dispatcher yields the processor after writing
//! [`YIELD_AFTER`]. TCP super-frames do not count, because TCP's window respects the buffer.
//!
//! Towards vnetd the kernel keeps frames in a ring per queue and drops frames that do not fit: there is no backpressure to the
//! sender. A large datagram leaves as a burst of IP fragments, and losing one fragment loses the datagram. The receiving kernel
//! keeps the other fragments for 30 s; a few such incomplete datagrams fill its reassembly memory, and no large datagram arrives
//! any more. So the ring's length follows from the MTU ([`queue_len`](super::queue_len)), and of what overflows it only whole datagrams are forwarded
//! ([`whole_datagrams`](super::whole_datagrams)).
//!
//! A TAP may live in another network namespace: a short-lived thread enters it to create the device; the file descriptor works in
//! any namespace. A device that vnetd made outlives it where the configuration wants that ([`kept`]), and otherwise goes with its
//! last descriptor.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

use parking_lot::Mutex;

use super::device::{self, Home, OnDevice};
use super::frame_writer::FrameWriter;
use super::kept::{self, Mark, Place, Standing};
pub use super::netns::{Netns, Process};
pub use super::tun::{DEVICE_NAME_MAX, TAP_MTU_MAX, TapError, TapOptions};
use super::tun::{Queues, inherit_queues, name_of, open_moved};
pub(super) use super::tun::{device_index, open_queues};
use super::tun_request::persist;
use super::whole_datagrams::Datagrams;
use super::{Handed, Interface, State};
use crate::frame::{Batch, DropSink, FRAME_MAX, Frame, Origin, Segment, Selection};
use crate::poll::Waker;
use crate::source::{Source, Taken};
use crate::stats::{DropReason, PortStats};
use crate::wire::ethernet::Mac;
use crate::wire::offload::{Accepts, GSO_TCPV4, GSO_TCPV6, Offload, VIRTIO_NET_HDR_LEN};
use crate::wire::segment;

/// Kernel memory in bytes written to a queue before the dispatcher yields: a third of a default socket buffer.
const YIELD_AFTER: usize = 64 << 10;
/// Kernel memory per frame besides its data, in bytes: about the size of `struct sk_buff` and `struct skb_shared_info`.
const FRAME_OVERHEAD: usize = 600;
struct Queue {
    file: File,
    /// Bytes written since the last yield. Approximate: concurrent writers may lose an update.
    written: AtomicUsize,
}

impl Queue {
    /// Counts a written frame, and yields the processor to receivers after [`YIELD_AFTER`] bytes.
    #[inline]
    fn count_written(&self, frame: &Frame) {
        if matches!(frame.offload.gso_kind(), GSO_TCPV4 | GSO_TCPV6) {
            return;
        }
        let written = written_with(self.written.load(Relaxed), frame.len());
        self.written.store(written.unwrap_or(0), Relaxed);
        if written.is_none() {
            std::thread::yield_now();
        }
    }
}

/// The byte count after another frame of `len` bytes; `None` if it is time to yield.
fn written_with(before: usize, len: usize) -> Option<usize> {
    let after = before + len + FRAME_OVERHEAD;
    (after < YIELD_AFTER).then_some(after)
}

/// A TAP device.
pub struct Tap {
    device: String,
    home: Home,
    origin: Origin,
    /// Configured MTU.
    mtu: usize,
    /// The device's MTU and state as control last read them. Frames up to the configured MTU are delivered regardless: a device's
    /// MTU limits only what the device sends.
    device_mtu: AtomicUsize,
    device_up: AtomicBool,
    mtu_capped: bool,
    accepts: Accepts,
    stats: Arc<PortStats>,
    queues: Vec<Queue>,
    stopped: AtomicBool,
    gone: AtomicBool,
    /// The mark of a device that outlives this process.
    mark: Option<Mark>,
    standing: Standing,
    /// Scratch memory for frames whose offloads are finished in software (kernels without USO).
    scratch: Mutex<Box<[u8]>>,
}

impl Tap {
    /// Opens the device. Makes it and sets it up if it does not exist, and adopts that of a vnetd with the same mark.
    ///
    /// # Errors
    /// See the variants of [`TapError`].
    pub fn open(options: &TapOptions, origin: Origin, stats: Arc<PortStats>) -> Result<Arc<Tap>, TapError> {
        let (home, opened) = Home::enter(options.netns.as_ref(), || open_moved(options))?;
        Ok(Tap::of(options, home, opened?, (origin, stats)))
    }

    /// The device of a running vnetd, which hands over its queues. Changes nothing at the device.
    ///
    /// # Errors
    /// The namespace or the device is gone, or not all queues were handed over.
    pub fn inherit(
        options: &TapOptions,
        queues: Vec<OwnedFd>,
        origin: Origin,
        stats: Arc<PortStats>,
    ) -> Result<Arc<Tap>, TapError> {
        let files = queues.into_iter().map(File::from).collect();
        let (home, opened) = Home::enter(options.netns.as_ref(), || inherit_queues(options, files))?;
        Ok(Tap::of(options, home, opened?, (origin, stats)))
    }

    fn of(
        options: &TapOptions,
        home: Home,
        Queues { files, accepts, sight, standing }: Queues,
        (origin, stats): (Origin, Arc<PortStats>),
    ) -> Arc<Tap> {
        let queues = files.into_iter().map(|file| Queue { file, written: AtomicUsize::new(0) }).collect();
        Arc::new(Tap {
            device: options.device.clone(),
            home,
            origin,
            mtu: options.mtu.min(TAP_MTU_MAX),
            device_mtu: sight.mtu.into(),
            device_up: sight.up.into(),
            mtu_capped: options.mtu > TAP_MTU_MAX,
            accepts,
            stats,
            queues,
            stopped: AtomicBool::new(false),
            gone: AtomicBool::new(false),
            mark: options
                .keep
                .as_ref()
                .map(|keep| keep.mark.clone())
                .filter(|_| standing != Standing::Foreign),
            standing,
            scratch: Mutex::new(vec![0; FRAME_MAX].into_boxed_slice()),
        })
    }

    /// Drops frames that nobody can get now.
    pub(super) fn refuse(&self, frames: Selection<'_>, drops: &mut DropSink) {
        drops.dropped_all(&self.stats, DropReason::NotReady, frames.which);
    }

    fn is_down(&self) -> bool {
        self.stopped.load(Relaxed) || self.gone.load(Relaxed)
    }

    /// The drop reason for a frame that the kernel refused. Records that the device was removed.
    fn drop_reason(&self, error: &io::Error) -> DropReason {
        match error.raw_os_error() {
            // The device is down (`ip link set … down`) or has been removed.
            Some(libc::EIO) => DropReason::NotReady,
            Some(libc::EBADFD) => {
                self.gone.store(true, Relaxed);
                DropReason::NotReady
            }
            error => DropReason::of_refusal(error.unwrap_or(libc::EIO)),
        }
    }

    /// Finishes a frame's offloads in software and writes the resulting pieces.
    #[cold]
    fn write_finished(&self, queue: &Queue, frames: Selection<'_>, index: u16, drops: &mut DropSink) {
        let frame = frames.batch.frame(index.into());
        let mut scratch = self.scratch.lock();
        let len = frames.batch.copy_to(frame, &mut scratch);
        let mut writer = FrameWriter::new(VIRTIO_NET_HDR_LEN);
        let (mut pieces, mut sent, mut bytes) = (0, 0, 0);
        let result =
            segment::finish(&mut scratch[..len], &frame.offload, &self.accepts, &mut |piece, offload| {
                pieces += 1;
                if super::piece_exceeds_mtu(&offload, piece.len(), self.mtu) {
                    self.stats.last_oversize.note(frame.sent());
                    drops.dropped(&self.stats, DropReason::MtuExceeded, index, 1);
                    return;
                }
                let segment = Segment::new(piece.as_ptr(), piece.len());
                match writer.write(&queue.file, &offload, &[segment]) {
                    Ok(()) => {
                        sent += 1;
                        bytes += piece.len() as u64;
                    }
                    Err(error) => drops.dropped(&self.stats, self.drop_reason(&error), index, 1),
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

impl Interface for Tap {
    fn queues(&self) -> usize {
        self.queues.len()
    }

    fn source(self: Arc<Self>, queue: usize) -> Box<dyn Source> {
        Box::new(TapSource { tap: self, queue, datagrams: Datagrams::default(), drained: false, waker: None })
    }

    fn deliver(&self, queue: usize, frames: Selection<'_>, drops: &mut DropSink) {
        if self.is_down() {
            return self.refuse(frames, drops);
        }
        let queue = &self.queues[queue];
        let mut writer = FrameWriter::new(VIRTIO_NET_HDR_LEN);
        let (mut sent, mut bytes) = (0, 0);
        for (index, frame) in frames.frames() {
            if super::exceeds_mtu(frame, self.mtu) {
                self.stats.last_oversize.note(frame.sent());
                drops.dropped(&self.stats, DropReason::MtuExceeded, index, 1);
                continue;
            }
            if !frame.offload.fits(&self.accepts) {
                self.write_finished(queue, frames, index, drops);
                continue;
            }
            match writer.write(&queue.file, &frame.offload, frames.batch.segments(frame)) {
                Ok(()) => {
                    sent += 1;
                    bytes += frame.len() as u64;
                    queue.count_written(frame);
                }
                Err(error) => drops.dropped(&self.stats, self.drop_reason(&error), index, 1),
            }
        }
        self.stats.delivered(sent, bytes);
    }

    fn state(&self) -> State {
        if self.stopped.load(Relaxed) {
            State::Down("stopped".into())
        } else if let Some(reason) = self.lost() {
            State::Down(reason)
        } else if !self.device_up.load(Relaxed) {
            State::Down(self.home.device_down(&self.device))
        } else {
            State::Up
        }
    }

    fn notes(&self) -> Vec<String> {
        let (device, mtu, now) = (&self.device, self.mtu, self.device_mtu.load(Relaxed));
        let capped = || format!("mtu is {mtu}, the most that a TAP takes");
        let changed = || format!("device '{device}' has MTU {now} instead of mtu = {mtu}");
        self.mtu_capped.then(capped).into_iter().chain((now != mtu).then(changed)).collect()
    }

    fn device(&self) -> Option<&dyn OnDevice> {
        Some(self)
    }

    fn stop(&self) {
        self.stopped.store(true, Relaxed);
    }

    fn undo(&self) {
        self.stop();
        if self.standing == Standing::Made {
            self.let_go();
        }
    }

    fn let_go(&self) {
        if self.mark.is_some() {
            // Fails if it was removed.
            let _ = persist(&self.queues[0].file, false);
        }
    }

    fn keep(&self) {
        let Some(mark) = &self.mark else { return };
        if let Err(error) = kept::claim(&self.queues[0].file, mark) {
            tracing::warn!("device '{}' will go with vnetd: {error}", self.device);
        }
    }

    fn hand_over(&self) -> Result<Handed<'_>, String> {
        Handed::files(self.queues.iter().map(|queue| ("tap", queue.file.as_fd())))
    }
}

impl OnDevice for Tap {
    fn netns(&self) -> Option<&Netns> {
        self.home.netns()
    }

    /// The descriptor stays attached when the device is renamed or moved to another namespace, so no frame is lost. A device that
    /// `socket` cannot see keeps its last known state.
    fn look(&self, socket: BorrowedFd<'_>) {
        match name_of(&self.queues[0].file) {
            Ok(name) => {
                if let Ok(sight) = device::see(socket, &name) {
                    self.device_up.store(sight.up, Relaxed);
                    self.device_mtu.store(sight.mtu, Relaxed);
                }
            }
            Err(_) => self.gone.store(true, Relaxed),
        }
    }

    fn lost(&self) -> Option<String> {
        let removed = || format!("device '{}' was removed", self.device);
        self.home.lost().or_else(|| self.gone.load(Relaxed).then(removed))
    }

    fn mtu(&self) -> usize {
        self.device_mtu.load(Relaxed)
    }

    fn mac(&self) -> Option<Mac> {
        device::mac(&self.queues[0].file, &self.device).ok()
    }

    fn place(&self) -> io::Result<Option<Place>> {
        if self.mark.is_none() {
            return Ok(None);
        }
        match kept::place_of(&self.queues[0].file) {
            // It was removed.
            Err(error) if error.raw_os_error() == Some(libc::EBADFD) => Ok(None),
            place => place.map(Some),
        }
    }
}

/// Source of the frames that the kernel sends to one queue of a TAP.
struct TapSource {
    tap: Arc<Tap>,
    queue: usize,
    datagrams: Datagrams,
    /// True if the last read found the queue empty, so the next frame wakes the dispatcher.
    drained: bool,
    waker: Option<Waker>,
}

impl Source for TapSource {
    // SAFETY: frames lie in the batch's own memory, so they live as long as it does.
    unsafe fn fill(&mut self, batch: &mut Batch, drops: &mut DropSink, _now_ms: u64) -> Taken {
        const ROOM: usize = VIRTIO_NET_HDR_LEN + FRAME_MAX;
        let tap = &*self.tap;
        if tap.is_down() {
            return Taken { drained: true, ..Taken::default() };
        }
        let (stats, origin) = (&*tap.stats, tap.origin);
        self.drained = false;
        let mut units = 0;
        self.datagrams.begin(batch, origin);
        batch.restart_cost();
        let waited = batch.len();
        // Refused frames and failed reads do not fill the batch, so the attempts are bounded.
        for _ in 0..batch.limit() {
            if batch.is_spent() {
                break;
            }
            let Some(room) = batch.spare(ROOM) else { break };
            let len = match (&tap.queues[self.queue].file).read(&mut room[..ROOM]) {
                Ok(len) => len,
                Err(error) => match error.raw_os_error() {
                    Some(libc::EAGAIN) => {
                        self.drained = true;
                        break;
                    }
                    // The device or its namespace was removed.
                    Some(libc::EBADFD) => {
                        tap.gone.store(true, Relaxed);
                        break;
                    }
                    Some(libc::EINTR) => continue,
                    // Virtio-net metadata cannot describe the frame (EINVAL): the kernel has dropped it.
                    _ => {
                        units += 1;
                        drops.refused(stats, origin.port, DropReason::BadOffload, 0);
                        continue;
                    }
                },
            };
            units += 1;
            let bytes = len.saturating_sub(VIRTIO_NET_HDR_LEN) as u64;
            let Some(header) = room[..len].first_chunk() else {
                drops.refused(stats, origin.port, DropReason::TooShort, bytes);
                continue;
            };
            let offload = Offload::from_virtio(header);
            match batch.push_spare(VIRTIO_NET_HDR_LEN, len, origin, offload) {
                Ok(()) => self.datagrams.read(batch),
                Err(error) => drops.refused(stats, origin.port, error.into(), bytes),
            }
        }
        let mut refuse = |len| drops.refused(stats, origin.port, DropReason::Incomplete, len as u64);
        self.datagrams.end(batch, self.drained, &mut refuse);
        stats.in_frames.add(batch.len() as u64);
        stats.in_bytes.add(batch.frames().iter().map(|frame| frame.len() as u64).sum());
        Taken { units, drained: waited + units < batch.limit() && !batch.is_spent(), ..Taken::default() }
    }

    fn watch(&mut self, waker: Waker) {
        self.drained = false;
        if let Err(error) = waker.watch(&self.tap.queues[self.queue].file) {
            tracing::error!(device = self.tap.device, %error, "cannot watch the TAP device");
        }
        self.waker = Some(waker);
    }

    fn unwatch(&mut self) {
        if let Some(waker) = self.waker.take() {
            waker.forget(self.tap.queues[self.queue].file.as_fd());
        }
    }

    /// The descriptor is always watched edge-triggered; only an empty read guarantees an edge for the next frame.
    fn rest(&mut self) -> bool {
        self.drained || self.tap.is_down()
    }

    fn is_unfinished(&self) -> bool {
        self.datagrams.holds()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn yields_before_a_default_socket_buffer_is_full() {
        // Frame length, frames written before yielding, and frames that fit into a socket with 208 KiB of buffers, whose sizes
        // the kernel rounds up.
        for (len, expected, held) in
            [(60, 100, 212_992 / 1280), (1514, 32, 212_992 / 2816), (8842, 7, 212_992 / 17_152)]
        {
            let mut written = Some(0);
            let mut frames = 0;
            while let Some(before) = written {
                written = written_with(before, len);
                frames += 1;
            }
            assert_eq!(frames, expected, "{len} bytes");
            assert!(frames < held, "{len} bytes");
        }
    }
}
