//! TAP interfaces: containers, hosts, and machine monitors without vhost-user.
//!
//! The device is opened with `IFF_VNET_HDR`, so the kernel hands out TCP and UDP super-frames of up to 64 KB with their
//! checksums still partial, and takes the same back (Documentation/networking/tuntap.rst). One frame costs one system call each
//! way, since a TAP has no batched interface; super-frames are what makes it fast. A frame is read into the batch's arena
//! behind its 12-byte virtio-net header, and written with one `writev` from wherever its segments lie.
//!
//! A write is the receiving kernel's whole work, up to the application's socket; the application only runs once it has a
//! processor. A datagram socket's buffer of the usual size (`net.core.rmem_default`, 208 KiB) holds a dozen jumbo frames, so that
//! one burst is more than it takes where dispatchers and applications share processors. So a dispatcher lets others run
//! whenever it has written [`UNHEARD_MAX`]. Super-frames of TCP do not count, whose windows keep to the buffer.
//!
//! A TAP may live in another network namespace: a short-lived thread enters it to make the device; the descriptor works from
//! everywhere. A device that was made here vanishes with its last descriptor.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{LinkAttribute, LinkFlags, LinkMessage};
use parking_lot::Mutex;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use super::{Interface, State};
use crate::frame::{Batch, DropSink, FRAME_MAX, Frame, Origin, SEGMENTS_MAX, Selection};
use crate::netlink::Netlink;
use crate::poll::Waker;
use crate::source::{Source, Taken};
use crate::stats::{DropReason, PortStats};
use crate::wire::ethernet::{HEADER_LEN, Mac};
use crate::wire::offload::{Accepts, GSO_TCPV4, GSO_TCPV6, Offload, VIRTIO_NET_HDR_LEN};
use crate::wire::segment;

/// Largest MTU that the kernel gives a TAP: 65535 less the Ethernet header.
pub const TAP_MTU_MAX: usize = 65_535 - HEADER_LEN;
/// Largest super-frame asked of the kernel on devices made here, in bytes. Cut for a path MTU of 1500 and given its headers, one
/// of this size fits into a single message to the socket (65 400 bytes, see the link room); a larger one takes two.
const GSO_MAX_SIZE: u32 = 64_000;
/// What is written to a queue before others may run, in bytes of the kernel's memory: a third of a usual socket's buffer.
const UNHEARD_MAX: usize = 64 << 10;
/// What a frame takes of that besides its bytes: the kernel's `struct sk_buff` and `struct skb_shared_info`, some 600 bytes.
const UNHEARD_FRAME: usize = 600;
/// Longest device name the kernel takes (IFNAMSIZ less the closing zero).
pub const DEVICE_NAME_MAX: usize = 15;

/// Which network namespace a device lives in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Netns {
    /// A name of `ip netns`.
    Name(String),
    /// A file such as `/proc/1234/ns/net`.
    Path(PathBuf),
    /// The namespace of a process, `pid:N`.
    Pid(u32),
}

impl FromStr for Netns {
    type Err = String;

    fn from_str(text: &str) -> Result<Netns, String> {
        if let Some(pid) = text.strip_prefix("pid:") {
            let pid =
                pid.parse().map_err(|_| format!("'{text}' does not name a process; write pid:NUMBER"))?;
            return Ok(Netns::Pid(pid));
        }
        if text.starts_with('/') {
            return Ok(Netns::Path(text.into()));
        }
        if text.is_empty() || text.contains('/') || text == ".." {
            return Err(format!(
                "'{text}' is not a network namespace; write its name, a path, or pid:NUMBER"
            ));
        }
        Ok(Netns::Name(text.into()))
    }
}

impl std::fmt::Display for Netns {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Netns::Name(name) => f.write_str(name),
            Netns::Path(path) => path.display().fmt(f),
            Netns::Pid(pid) => write!(f, "pid:{pid}"),
        }
    }
}

impl Netns {
    /// The file by which it is entered.
    pub(super) fn file(&self) -> PathBuf {
        match self {
            Netns::Name(name) => Path::new("/run/netns").join(name),
            Netns::Path(path) => path.clone(),
            Netns::Pid(pid) => format!("/proc/{pid}/ns/net").into(),
        }
    }
}

/// What a TAP is opened with.
#[derive(Clone, Debug)]
pub struct TapOptions {
    /// Device name, at most [`DEVICE_NAME_MAX`] bytes.
    pub device: String,
    /// Where the device lives; here when absent.
    pub netns: Option<Netns>,
    /// The guest side's address; the kernel's choice when absent.
    pub mac: Option<Mac>,
    /// MTU in bytes; more than [`TAP_MTU_MAX`] becomes that.
    pub mtu: usize,
    /// Queues, 1 to 256.
    pub queues: usize,
}

/// Why a TAP could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum TapError {
    /// No such namespace, or no right to enter it.
    #[error(
        "cannot enter network namespace '{netns}': {error}; is it there ('ip netns list'), and is vnetd root?"
    )]
    Netns {
        /// The namespace as it was written.
        netns: String,
        /// What the kernel said.
        error: io::Error,
    },
    /// `/dev/net/tun` could not be opened.
    #[error("cannot open /dev/net/tun: {0}; run vnetd as root or give it CAP_NET_ADMIN and the device")]
    Device(io::Error),
    /// The kernel refused a step on the device.
    #[error("cannot {step} TAP device '{device}': {error}{hint}")]
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

struct Queue {
    file: File,
    /// Written since others were last let run. Two dispatchers that write at once may lose a frame of it.
    unheard: AtomicUsize,
}

impl Queue {
    /// A frame was written; lets whoever receives it run when that makes many.
    #[inline]
    fn written(&self, frame: &Frame) {
        if matches!(frame.offload.gso_kind(), GSO_TCPV4 | GSO_TCPV6) {
            return;
        }
        let unheard = unheard_with(self.unheard.load(Relaxed), frame.len());
        self.unheard.store(unheard.unwrap_or(0), Relaxed);
        if unheard.is_none() {
            std::thread::yield_now();
        }
    }
}

/// What is unheard with one more frame; `None` when that is too much.
fn unheard_with(before: usize, len: usize) -> Option<usize> {
    let after = before + len + UNHEARD_FRAME;
    (after < UNHEARD_MAX).then_some(after)
}

/// A TAP device.
pub struct Tap {
    device: String,
    origin: Origin,
    mtu: usize,
    accepts: Accepts,
    stats: Arc<PortStats>,
    queues: Vec<Queue>,
    stopped: AtomicBool,
    gone: AtomicBool,
    /// Memory for frames that have to be finished in software (a kernel without USO), used by one dispatcher at a time.
    scratch: Mutex<Box<[u8]>>,
}

impl Tap {
    /// Opens the device, making it when it is not there, and brings it up.
    pub fn open(options: &TapOptions, origin: Origin, stats: Arc<PortStats>) -> Result<Arc<Tap>, TapError> {
        let (files, accepts) = match &options.netns {
            None => open_queues(options)?,
            Some(netns) => std::thread::scope(|scope| {
                let inside = scope.spawn(|| {
                    let error = |error| TapError::Netns { netns: netns.to_string(), error };
                    let file = File::open(netns.file()).map_err(error)?;
                    move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))
                        .map_err(|e| error(e.into()))?;
                    open_queues(options)
                });
                inside.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            })?,
        };
        let queues = files.into_iter().map(|file| Queue { file, unheard: AtomicUsize::new(0) }).collect();
        Ok(Arc::new(Tap {
            device: options.device.clone(),
            origin,
            mtu: options.mtu.min(TAP_MTU_MAX),
            accepts,
            stats,
            queues,
            stopped: AtomicBool::new(false),
            gone: AtomicBool::new(false),
            scratch: Mutex::new(vec![0; FRAME_MAX].into_boxed_slice()),
        }))
    }

    /// The device's MTU in bytes, which may be less than was asked for.
    pub fn mtu(&self) -> usize {
        self.mtu
    }

    fn is_down(&self) -> bool {
        self.stopped.load(Relaxed) || self.gone.load(Relaxed)
    }

    /// Writes one frame: `vectors` are its segments behind an empty first place, which becomes the virtio-net header. The
    /// caller counts it.
    fn write(&self, queue: &Queue, offload: &Offload, vectors: &mut [libc::iovec]) -> Result<(), DropReason> {
        let header = offload.to_virtio(0);
        vectors[0] = libc::iovec { iov_base: header.as_ptr().cast_mut().cast(), iov_len: header.len() };
        loop {
            // SAFETY: the header lives on this stack frame, the other vectors are readable while the batch (or the caller's
            // slice) they come from is; the kernel only reads them.
            let written = unsafe {
                libc::writev(queue.file.as_raw_fd(), vectors.as_ptr(), vectors.len() as libc::c_int)
            };
            if written >= 0 {
                return Ok(());
            }
            match io::Error::last_os_error().raw_os_error() {
                Some(libc::EINTR) => {}
                // The interface is down (`ip link set … down`), or gone.
                Some(libc::EIO) => return Err(DropReason::NotReady),
                Some(libc::EBADFD) => {
                    self.gone.store(true, Relaxed);
                    return Err(DropReason::NotReady);
                }
                Some(libc::EAGAIN | libc::ENOBUFS | libc::ENOMEM) => return Err(DropReason::NoBuffer),
                _ => return Err(DropReason::SendFailed),
            }
        }
    }

    /// Finishes a frame in software and writes the pieces.
    #[cold]
    fn write_finished(&self, queue: &Queue, frames: Selection<'_>, index: u16, drops: &mut DropSink) {
        let frame = frames.batch.frame(index.into());
        let mut scratch = self.scratch.lock();
        let len = frames.batch.copy_to(frame, &mut scratch);
        let (mut pieces, mut sent, mut bytes) = (0, 0, 0);
        let result =
            segment::finish(&mut scratch[..len], &frame.offload, &self.accepts, &mut |piece, offload| {
                pieces += 1;
                if super::piece_exceeds_mtu(&offload, piece.len(), self.mtu) {
                    drops.dropped(&self.stats, DropReason::MtuExceeded, index, 1);
                    return;
                }
                let vector = libc::iovec { iov_base: piece.as_ptr().cast_mut().cast(), iov_len: piece.len() };
                match self.write(queue, &offload, &mut [vector, vector]) {
                    Ok(()) => {
                        sent += 1;
                        bytes += piece.len() as u64;
                    }
                    Err(reason) => drops.dropped(&self.stats, reason, index, 1),
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
        Box::new(TapSource { tap: self, queue, drained: false, waker: None })
    }

    fn deliver(&self, queue: usize, frames: Selection<'_>, drops: &mut DropSink) {
        if self.is_down() {
            return drops.dropped_all(&self.stats, DropReason::NotReady, frames.which);
        }
        let queue = &self.queues[queue];
        let empty = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        let mut vectors = [empty; 1 + SEGMENTS_MAX];
        let (mut sent, mut bytes) = (0, 0);
        for (index, frame) in frames.frames() {
            if super::exceeds_mtu(frame, self.mtu) {
                drops.dropped(&self.stats, DropReason::MtuExceeded, index, 1);
                continue;
            }
            if !frame.offload.fits(&self.accepts) {
                self.write_finished(queue, frames, index, drops);
                continue;
            }
            let segments = frames.batch.segments(frame);
            for (vector, segment) in vectors[1..].iter_mut().zip(segments) {
                *vector =
                    libc::iovec { iov_base: segment.as_ptr().cast_mut().cast(), iov_len: segment.len() };
            }
            match self.write(queue, &frame.offload, &mut vectors[..=segments.len()]) {
                Ok(()) => {
                    sent += 1;
                    bytes += frame.len() as u64;
                    queue.written(frame);
                }
                Err(reason) => drops.dropped(&self.stats, reason, index, 1),
            }
        }
        self.stats.delivered(sent, bytes);
    }

    fn state(&self) -> State {
        if self.stopped.load(Relaxed) {
            State::Down("stopped".into())
        } else if self.gone.load(Relaxed) {
            State::Down(format!("device '{}' was removed", self.device))
        } else {
            State::Up
        }
    }

    fn stop(&self) {
        self.stopped.store(true, Relaxed);
    }
}

/// Frames that the kernel hands out on one queue of a TAP.
struct TapSource {
    tap: Arc<Tap>,
    queue: usize,
    /// The last read found the device empty: the next frame wakes the dispatcher.
    drained: bool,
    waker: Option<Waker>,
}

impl Source for TapSource {
    /// Reads frames into the batch's own memory until it is full or the device is empty.
    unsafe fn fill(&mut self, batch: &mut Batch, drops: &mut DropSink, _now_ms: u64) -> Taken {
        const ROOM: usize = VIRTIO_NET_HDR_LEN + FRAME_MAX;
        let tap = &*self.tap;
        if tap.is_down() {
            return Taken { drained: true, ..Taken::default() };
        }
        let (stats, origin) = (&*tap.stats, tap.origin);
        self.drained = false;
        let (mut units, mut bytes_taken) = (0, 0);
        // Refused frames and failed reads use no place in the batch, so tries are bounded apart.
        for _ in 0..batch.limit() {
            let Some(room) = batch.spare(ROOM) else { break };
            let len = match (&tap.queues[self.queue].file).read(&mut room[..ROOM]) {
                Ok(len) => len,
                Err(error) => match error.raw_os_error() {
                    Some(libc::EAGAIN) => {
                        self.drained = true;
                        break;
                    }
                    // The device was removed, or its namespace was.
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
                Ok(()) => bytes_taken += bytes,
                Err(error) => drops.refused(stats, origin.port, error.into(), bytes),
            }
        }
        stats.in_frames.add(batch.len() as u64);
        stats.in_bytes.add(bytes_taken);
        Taken { units, drained: units < batch.limit(), ..Taken::default() }
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

    /// The descriptor is watched edge-triggered all the time; only after an empty read is the next edge certain.
    fn rest(&mut self) -> bool {
        self.drained || self.tap.is_down()
    }
}

/// `struct ifreq` as TUNSETIFF takes it; as long as the kernel's.
#[repr(C)]
struct IfReq {
    name: [u8; 16],
    flags: libc::c_short,
    rest: [u8; 22],
}

/// Opens all queues in the namespace of the calling thread and sets the device up.
fn open_queues(options: &TapOptions) -> Result<(Vec<File>, Accepts), TapError> {
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
                Some(libc::EBUSY) => "; another program has it open",
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
    configure(options, existed).map_err(|error| fail("configure", error, ""))?;
    Ok((files, accepts))
}

/// Makes `file` a queue of the device, which is made when it is not there.
fn attach_queue(file: &File, device: &str, many: bool) -> io::Result<()> {
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
    let flags = if many { flags | libc::IFF_MULTI_QUEUE } else { flags };
    let mut request = IfReq { name: [0; 16], flags: flags as libc::c_short, rest: [0; 22] };
    request.name[..device.len()].copy_from_slice(device.as_bytes());
    // SAFETY: TUNSETIFF reads and writes one `struct ifreq`, which `request` is, exclusively ours.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF as _, &raw mut request) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn set_int(file: &File, request: libc::c_ulong, value: libc::c_int) -> io::Result<()> {
    // SAFETY: both requests used with this function read one int through the pointer, which lives across the call.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), request as _, &raw const value) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Has the kernel hand out super-frames and partial checksums. UDP super-frames need Linux 6.2.
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

fn device_index(device: &str) -> Option<u32> {
    let name = std::ffi::CString::new(device).ok()?;
    // SAFETY: `name` is a zero-terminated string that lives across the call.
    let index = unsafe { libc::if_nametoindex(name.as_ptr()) };
    (index != 0).then_some(index)
}

/// Address, MTU, and for a device that was made here its segmentation limit and up, in the namespace of the calling thread.
fn configure(options: &TapOptions, existed: bool) -> io::Result<()> {
    let mut link = LinkMessage::default();
    link.header.index = device_index(&options.device).ok_or_else(io::Error::last_os_error)?;
    link.attributes.push(LinkAttribute::Mtu(options.mtu.min(TAP_MTU_MAX) as u32));
    if let Some(mac) = options.mac {
        link.attributes.push(LinkAttribute::Address(mac.0.to_vec()));
    }
    if !existed {
        link.attributes.push(LinkAttribute::GsoMaxSize(GSO_MAX_SIZE));
        link.header.flags = LinkFlags::Up;
        link.header.change_mask = LinkFlags::Up;
    }
    Netlink::new()?.change(RouteNetlinkMessage::SetLink(link), 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn receivers_run_before_a_usual_socket_is_full() {
        // Bytes of a frame, how many of them are written at a stretch, and how many such a socket holds: 208 KiB of buffers,
        // which the kernel makes of powers of two.
        for (len, expected, held) in
            [(60, 100, 212_992 / 1280), (1514, 32, 212_992 / 2816), (8842, 7, 212_992 / 17_152)]
        {
            let mut unheard = Some(0);
            let mut frames = 0;
            while let Some(before) = unheard {
                unheard = unheard_with(before, len);
                frames += 1;
            }
            assert_eq!(frames, expected, "{len} bytes");
            assert!(frames < held, "{len} bytes");
        }
    }
}
