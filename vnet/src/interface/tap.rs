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
//! any more. So the ring's length follows from the MTU ([`queue_len`]), and of what overflows it only whole datagrams are forwarded
//! ([`whole_datagrams`](super::whole_datagrams)).
//!
//! A TAP may live in another network namespace: a short-lived thread enters it to create the device; the file descriptor works in
//! any namespace. A device that vnetd created disappears with its last descriptor.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{LinkAttribute, LinkFlags, LinkMessage};
use parking_lot::Mutex;

use super::device::{self, Home, OnDevice, Sight};
use super::frame_writer::FrameWriter;
use super::netns::NetnsError;
pub use super::netns::{Netns, Process};
use super::queue_len::queue_len;
use super::whole_datagrams::Datagrams;
use super::{Interface, State};
use crate::frame::{Batch, DropSink, FRAME_MAX, Frame, Origin, Segment, Selection};
use crate::netlink::Netlink;
use crate::poll::Waker;
use crate::source::{Source, Taken};
use crate::stats::{DropReason, PortStats};
use crate::wire::ethernet::{HEADER_LEN, Mac};
use crate::wire::offload::{Accepts, GSO_TCPV4, GSO_TCPV6, Offload, VIRTIO_NET_HDR_LEN};
use crate::wire::segment;

/// Maximum MTU of a TAP in bytes: 65535 less the Ethernet header.
pub const TAP_MTU_MAX: usize = 65_535 - HEADER_LEN;
/// Maximum super-frame that the kernel may build on devices created here, in bytes. Segmented for a path MTU of 1500, with
/// headers, it fits into one message to a link's socket (65 400 bytes); a larger one needs two.
const GSO_MAX_SIZE: u32 = 64_000;
/// Kernel memory in bytes written to a queue before the dispatcher yields: a third of a default socket buffer.
const YIELD_AFTER: usize = 64 << 10;
/// Kernel memory per frame besides its data, in bytes: about the size of `struct sk_buff` and `struct skb_shared_info`.
const FRAME_OVERHEAD: usize = 600;
/// Maximum length of a device name in bytes (IFNAMSIZ less the terminating zero).
pub const DEVICE_NAME_MAX: usize = 15;

/// Configuration of a TAP.
#[derive(Clone, Debug)]
pub struct TapOptions {
    /// Device name, at most [`DEVICE_NAME_MAX`] bytes.
    pub device: String,
    /// The device's network namespace; vnetd's own if absent.
    pub netns: Option<Netns>,
    /// MAC address of the guest's side; chosen by the kernel if absent.
    pub mac: Option<Mac>,
    /// MAC address for a device created here if `mac` is absent: that of the previous device, so that the guest keeps its
    /// address.
    pub mac_before: Option<Mac>,
    /// MTU in bytes, capped at [`TAP_MTU_MAX`].
    pub mtu: usize,
    /// Number of queues, 1 to 256.
    pub queues: usize,
    /// True if programs rather than a network stack use the device: IPv6 is disabled on it, because IPv6 sends packets by itself.
    pub silent: bool,
}

/// Error when opening a TAP.
#[derive(Debug, thiserror::Error)]
pub enum TapError {
    /// The namespace does not exist, or vnetd may not enter it.
    #[error(transparent)]
    Netns(#[from] NetnsError),
    /// Cannot open `/dev/net/tun`.
    #[error("cannot open /dev/net/tun: {0}; run vnetd as root or give it CAP_NET_ADMIN and the device")]
    Device(io::Error),
    /// The kernel refused a step of opening the device.
    #[error("cannot {step} device '{device}': {error}{hint}")]
    Step {
        /// The step, as a verb for the message.
        step: &'static str,
        /// Name of the device.
        device: String,
        /// The kernel's error.
        error: io::Error,
        /// A hint for the user, or empty.
        hint: &'static str,
    },
}

impl TapError {
    /// The reason for the state "down" if the missing part may still appear; `None` if only another configuration helps.
    pub fn waits_for(&self) -> Option<String> {
        match self {
            TapError::Netns(error) => error.waits_for(),
            TapError::Device(_) | TapError::Step { .. } => None,
        }
    }
}

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
    /// Scratch memory for frames whose offloads are finished in software (kernels without USO).
    scratch: Mutex<Box<[u8]>>,
}

impl Tap {
    /// Opens the device. Creates it and sets it up if it does not exist.
    ///
    /// # Errors
    /// See the variants of [`TapError`].
    pub fn open(options: &TapOptions, origin: Origin, stats: Arc<PortStats>) -> Result<Arc<Tap>, TapError> {
        let (home, opened) = Home::enter(options.netns.as_ref(), || open_queues(options))?;
        let (files, accepts, sight) = opened?;
        let queues = files.into_iter().map(|file| Queue { file, written: AtomicUsize::new(0) }).collect();
        Ok(Arc::new(Tap {
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
            scratch: Mutex::new(vec![0; FRAME_MAX].into_boxed_slice()),
        }))
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
            return drops.dropped_all(&self.stats, DropReason::NotReady, frames.which);
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
}

/// `struct ifreq` for TUNSETIFF, in the kernel's size.
#[repr(C)]
struct IfReq {
    name: [u8; 16],
    flags: libc::c_short,
    rest: [u8; 22],
}

/// Opens all queues and configures the device in the network namespace of the calling thread.
pub(super) fn open_queues(options: &TapOptions) -> Result<(Vec<File>, Accepts, Sight), TapError> {
    let fail = |step, error: io::Error, hint| TapError::Step {
        step,
        device: options.device.chars().take(64).collect(),
        error,
        hint,
    };
    if options.device.is_empty() || options.device.len() > DEVICE_NAME_MAX {
        let error = io::Error::from(io::ErrorKind::InvalidInput);
        return Err(fail("name", error, "; a device name has 1 to 15 characters"));
    }
    let existed = device_index(&options.device).is_some();
    let mut files = Vec::with_capacity(options.queues);
    let mut accepts = Accepts::ALL;
    for _ in 0..options.queues {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC)
            .open("/dev/net/tun")
            .map_err(TapError::Device)?;
        attach_queue(&file, &options.device, options.queues > 1).map_err(|error| {
            let hint = match error.raw_os_error() {
                Some(libc::EBUSY) => {
                    "; another program has it open: kind = \"local\" takes a TAP that QEMU or another program has opened"
                }
                Some(libc::EPERM) => "; run vnetd as root or give it CAP_NET_ADMIN",
                Some(libc::EINVAL) => {
                    "; is there another device of that name, or one made with other options?"
                }
                _ => "",
            };
            fail("open", error, hint)
        })?;
        set_int(&file, libc::TUNSETVNETHDRSZ as libc::c_ulong, VIRTIO_NET_HDR_LEN as libc::c_int)
            .map_err(|e| fail("set the header size of", e, ""))?;
        set_int(&file, libc::TUNSETVNETLE as libc::c_ulong, 1)
            .map_err(|e| fail("set the byte order of", e, ""))?;
        accepts = set_offloads(&file).map_err(|e| fail("set offloads of", e, ""))?;
        files.push(file);
    }
    if options.silent {
        device::silence(&options.device).map_err(|error| fail("disable IPv6 on", error, ""))?;
    }
    let sight = configure(options, existed).map_err(|error| fail("configure", error, ""))?;
    Ok((files, accepts, sight))
}

/// Name of the device to which the queue `file` belongs.
///
/// # Errors
/// EBADFD: the device was removed.
fn name_of(file: &File) -> io::Result<String> {
    let mut request = IfReq { name: [0; 16], flags: 0, rest: [0; 22] };
    // SAFETY: TUNGETIFF writes one `struct ifreq`: `request`, which this function owns.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNGETIFF as _, &raw mut request) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    let name = request.name.split(|byte| *byte == 0).next().unwrap_or_default();
    Ok(String::from_utf8_lossy(name).into_owned())
}

/// Attaches `file` as a queue of the device. Creates the device if it does not exist.
fn attach_queue(file: &File, device: &str, many: bool) -> io::Result<()> {
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
    let flags = if many { flags | libc::IFF_MULTI_QUEUE } else { flags };
    let mut request = IfReq { name: [0; 16], flags: flags as libc::c_short, rest: [0; 22] };
    request.name[..device.len()].copy_from_slice(device.as_bytes());
    // SAFETY: TUNSETIFF reads and writes one `struct ifreq`: `request`, which this function owns.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF as _, &raw mut request) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn set_int(file: &File, request: libc::c_ulong, value: libc::c_int) -> io::Result<()> {
    // SAFETY: both ioctls used here read one int through the pointer, which is valid across the call.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), request as _, &raw const value) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Enables super-frames and partial checksums from the kernel. UDP super-frames (USO) need Linux 6.2.
fn set_offloads(file: &File) -> io::Result<Accepts> {
    const TUN_F_USO: libc::c_uint = 0x20 | 0x40;
    let base = libc::TUN_F_CSUM | libc::TUN_F_TSO4 | libc::TUN_F_TSO6 | libc::TUN_F_TSO_ECN;
    let set = |bits: libc::c_uint| {
        // SAFETY: TUNSETOFFLOAD takes its argument by value.
        let result =
            unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETOFFLOAD as _, libc::c_ulong::from(bits)) };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    };
    if set(base | TUN_F_USO).is_ok() {
        return Ok(Accepts::ALL);
    }
    set(base)?;
    Ok(Accepts { uso: false, ..Accepts::ALL })
}

pub(super) fn device_index(device: &str) -> Option<u32> {
    let name = std::ffi::CString::new(device).ok()?;
    // SAFETY: `name` is a zero-terminated string that lives across the call.
    let index = unsafe { libc::if_nametoindex(name.as_ptr()) };
    (index != 0).then_some(index)
}

/// Sets MAC address and MTU. For a device created here, also sets its queue length and GSO limit and sets it up. Runs in the
/// namespace of the calling thread. Returns the resulting properties of the device.
fn configure(options: &TapOptions, existed: bool) -> io::Result<Sight> {
    let mut link = LinkMessage::default();
    link.header.index = device_index(&options.device).ok_or_else(io::Error::last_os_error)?;
    link.attributes.push(LinkAttribute::Mtu(options.mtu.min(TAP_MTU_MAX) as u32));
    if let Some(mac) = options.mac.or(options.mac_before.filter(|_| !existed)) {
        link.attributes.push(LinkAttribute::Address(mac.0.to_vec()));
    }
    if !existed {
        link.attributes.push(LinkAttribute::GsoMaxSize(GSO_MAX_SIZE));
        link.attributes.push(LinkAttribute::TxQueueLen(queue_len(options.mtu) as u32));
        link.header.flags = LinkFlags::Up;
        link.header.change_mask = LinkFlags::Up;
    }
    let netlink = Netlink::new()?;
    netlink.change(RouteNetlinkMessage::SetLink(link), 0)?;
    device::see(&netlink, &options.device)
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
