//! Fuzz entry point: any sequence of messages and descriptors from a front end, whose guest and dispatcher run between them.

use std::fs::File;
use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

use super::control::Connection;
use super::options::{AllowedPeer, VhostUserOptions};
use super::queue_pairs::Device;
use super::source::GuestSource;
use crate::frame::{BATCH_MAX, Batch, DropSink, NetworkId, PortId, Segment, Selection};
use crate::interface::State;
use crate::source::{BatchSlot, Source, receive};
use crate::unix::{Peer, SocketAccess};
use crate::wire::offload::Offload;

/// Size of the guest's memory in bytes.
pub const MEMORY_LEN: u64 = 0x1_0000;
/// Size of the dirty log's file in bytes.
const LOG_LEN: u64 = 0x1000;
/// Maximum number of descriptors sent with a message; crate `vhost` takes up to 32.
const FILES_MAX: usize = 9;
/// Name of all memory that the front end shares.
const NAME: &str = "vnet-fuzz-front-end";

/// One record of the input: four bytes, and up to 255 of payload.
struct Step<'a> {
    /// A request of vhost-user below [`Step::GUEST_WRITES`].
    kind: u8,
    flags: u8,
    files: u8,
    payload: &'a [u8],
}

impl<'a> Step<'a> {
    /// The guest writes its memory: a 16-bit offset in network byte order, then bytes.
    const GUEST_WRITES: u8 = 0xf0;
    /// The dispatcher takes frames of queue `flags`.
    const TAKE: u8 = 0xf1;
    /// The dispatcher delivers a frame to queue `flags`.
    const DELIVER: u8 = 0xf2;
    /// The dispatcher of queue `flags` goes to sleep, and wakes.
    const REST: u8 = 0xf3;
    /// The front end truncates the guest's memory to `flags` pages.
    const TRUNCATE: u8 = 0xf4;

    /// The message's length is a lie: it announces one byte more than it has, and the connection ends.
    const CUT: u8 = 0x10;

    fn next(data: &mut &'a [u8]) -> Option<Step<'a>> {
        let ([kind, flags, files, len], rest) = data.split_first_chunk()?;
        let (payload, rest) = rest.split_at(usize::from(*len).min(rest.len()));
        *data = rest;
        Some(Step { kind: *kind, flags: *flags, files: *files, payload })
    }
}

/// A front end, its guest's memory, and the dispatcher's side of the device.
struct World {
    device: Arc<Device>,
    sources: Vec<GuestSource>,
    slot: BatchSlot,
    front: UnixStream,
    connection: Connection,
    memory: File,
    log: File,
    others: [OwnedFd; 4],
}

fn memfd(len: u64) -> File {
    let file = File::from(memfd_create(NAME, MemfdFlags::CLOEXEC).expect("memfd"));
    file.set_len(len).expect("memory");
    file
}

fn device(queues: usize) -> Arc<Device> {
    // Starts its thread, whose descriptors last.
    super::closer::close(File::open("/dev/null").expect("a device"));
    let options = VhostUserOptions {
        name: "vm1".into(),
        socket: "/nowhere".into(),
        server: true,
        mac: None,
        mtu: 1500,
        queues,
        access: SocketAccess::default(),
        peer: AllowedPeer::default(),
        memory_max: Some(1 << 20),
    };
    Arc::new(Device::new(options, PortId(1), NetworkId::DEFAULT, Arc::default()).expect("a device"))
}

impl World {
    fn new(device: &Arc<Device>) -> World {
        let (front, back) = UnixStream::pair().expect("a connection");
        front.set_nonblocking(true).expect("it is a socket");
        let peer = Peer { pid: None, uid: 0, gid: 0 };
        let event = |flags| eventfd(0, EventfdFlags::CLOEXEC | flags).expect("eventfd");
        let pipe = rustix::pipe::pipe().expect("a pipe").0;
        let null = File::open("/dev/null").expect("a device").into();
        World {
            sources: (0..device.options.queues)
                .map(|queue| GuestSource::new(device.clone(), queue))
                .collect(),
            slot: BatchSlot::new(BATCH_MAX),
            connection: Connection::new(device.clone(), back, peer).expect("a session"),
            device: device.clone(),
            front,
            memory: memfd(MEMORY_LEN),
            log: memfd(LOG_LEN),
            others: [event(EventfdFlags::NONBLOCK), event(EventfdFlags::empty()), pipe, null],
        }
    }

    /// Takes a step; returns false once the connection has ended.
    fn step(&mut self, step: &Step<'_>) -> bool {
        let queue = usize::from(step.flags) % self.sources.len();
        match step.kind {
            Step::GUEST_WRITES => self.write(step.payload),
            Step::TAKE => self.take(queue),
            Step::DELIVER => self.deliver(queue),
            Step::REST => {
                self.sources[queue].rest();
                self.sources[queue].resume();
            }
            Step::TRUNCATE => self.memory.set_len(u64::from(step.flags) << 12).expect("a memfd shrinks"),
            0xf5.. => {}
            _ => return self.message(step),
        }
        true
    }

    fn write(&self, payload: &[u8]) {
        let Some((offset, bytes)) = payload.split_first_chunk() else { return };
        let offset = u64::from(u16::from_be_bytes(*offset));
        let room = (MEMORY_LEN - offset).min(bytes.len() as u64) as usize;
        self.memory.write_all_at(&bytes[..room], offset).expect("memory");
    }

    fn take(&mut self, queue: usize) {
        let mut drops = DropSink::new();
        let before = self.device.stats.in_frames.get();
        let burst = receive(&mut self.sources[queue], &mut self.slot, &mut drops, 0);
        assert!(burst.frames().len() <= BATCH_MAX);
        assert!(self.device.stats.in_frames.get() >= before + burst.frames().len() as u64);
        let mut bytes = vec![0; crate::frame::FRAME_MAX];
        burst.frames().iter().for_each(|frame| assert_eq!(burst.copy_to(frame, &mut bytes), frame.len()));
    }

    fn deliver(&mut self, queue: usize) {
        let (mut batch, frame) = (Batch::new(), [0x5a; 1500]);
        let mut builder = batch.begin();
        // SAFETY: `frame` outlives the batch and is not written to.
        unsafe { builder.push_stable(Segment::new(frame.as_ptr(), frame.len())) };
        builder.finish(PortId(2), NetworkId::DEFAULT, Offload::default(), 0).expect("a frame");
        self.device.deliver(queue, Selection { batch: &batch, which: &[0] }, &mut DropSink::new());
    }

    fn message(&mut self, step: &Step<'_>) -> bool {
        let cut = step.flags & Step::CUT != 0;
        let len = step.payload.len() as u32 + u32::from(cut);
        let header = [u32::from(step.kind), 1 ^ u32::from(step.flags & 0xf), len];
        let header: Vec<u8> = header.into_iter().flat_map(u32::to_ne_bytes).collect();
        let file = match step.files & 0xf {
            0 => self.memory.as_fd(),
            1 => self.log.as_fd(),
            other => self.others[usize::from(other) % self.others.len()].as_fd(),
        };
        let files: Vec<BorrowedFd<'_>> = vec![file; usize::from(step.files >> 4).min(FILES_MAX)];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES_MAX))];
        let mut rights = SendAncillaryBuffer::new(&mut space);
        if !files.is_empty() {
            assert!(rights.push(SendAncillaryMessage::ScmRights(&files)));
        }
        let parts = [IoSlice::new(&header), IoSlice::new(step.payload)];
        let sent = rustix::net::sendmsg(&self.front, &parts, &mut rights, SendFlags::NOSIGNAL);
        assert_eq!(sent, Ok(header.len() + step.payload.len()));
        if cut {
            self.front.shutdown(Shutdown::Write).expect("it is connected");
        }
        let goes_on = loop {
            match self.connection.message() {
                Ok(true) if cut => {}
                Ok(goes_on) => break goes_on,
                Err(error) => {
                    assert_eq!(error.to_string().lines().count(), 1, "{error}");
                    break false;
                }
            }
        };
        let mut replies = [0; 4096];
        while self.front.read(&mut replies).is_ok_and(|len| len > 0) {}
        goes_on
    }
}

thread_local! {
    /// One queue pair offers memory slots, several do not.
    static DEVICES: [Arc<Device>; 2] = [device(1), device(2)];
}

/// Runs `data` on one connection with the front end: a byte that chooses the interface, then records of [`Step`].
///
/// Invariants: no panic; an error is one line; after the connection no queue runs, no shared memory is mapped and no descriptor is
/// left open.
pub fn messages(data: &[u8]) {
    let Some((first, mut data)) = data.split_first() else { return };
    DEVICES.with(|devices| {
        let device = &devices[usize::from(*first) % devices.len()];
        let before = open_files();
        let mut world = World::new(device);
        // Announcements that an earlier input has asked for.
        (0..world.sources.len()).for_each(|queue| world.take(queue));
        while let Some(step) = Step::next(&mut data) {
            if !world.step(&step) {
                break;
            }
        }
        drop(world);
        device.reset_all();
        assert_ne!(device.state(), State::Up);
        let mapped = std::fs::read_to_string("/proc/self/maps").expect("it is readable");
        assert!(!mapped.contains(NAME), "memory of the front end is still mapped");
        // Refused descriptors are closed on another thread.
        let end = Instant::now() + Duration::from_secs(60);
        while open_files() > before {
            assert!(Instant::now() < end, "descriptors of the front end are still open");
            std::thread::sleep(Duration::from_micros(100));
        }
    });
}

/// Number of descriptors that lead to what front ends share: memory, eventfds, pipes, sockets and devices.
fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("it is readable").count()
}
