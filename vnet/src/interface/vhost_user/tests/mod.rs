//! A real front end (crate `vhost`) over a real socket, with a mock driver behind it.

mod faults;
mod flow;
mod held;
mod hostile;
mod landing;
mod looks;
mod migration;
mod optimistic;
mod sideband;
mod sockets;
mod succession;

use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use vhost::vhost_user::message::{VhostUserHeaderFlag, VhostUserProtocolFeatures};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vmm_sys_util::eventfd::EventFd;

use super::features::*;
use super::*;
use crate::frame::{BATCH_MAX, Batch, FRAME_MAX, Segment};
use crate::interface::virtqueue::mock::{GUEST_BASE, MockMemory, MockRing};
use crate::interface::virtqueue::{DESC_WRITE, RingConfig};
use crate::poll::Poller;
use crate::source::{BatchSlot, receive};
use crate::stats::DropReason;
use crate::unix::SocketAccess;
use crate::wire::offload::Offload;

const SIZE: u16 = 64;
/// Bytes of guest memory per vring.
const RING_SPACE: u64 = 0x2000;
/// Guest address of the first buffer, one buffer per page.
const ARENA: u64 = GUEST_BASE + 8 * RING_SPACE;
/// Features that a Linux guest under QEMU accepts.
const LINUX: u64 = VERSION_1 | MRG_RXBUF | EVENT_IDX | INDIRECT_DESC | CSUM | GUEST_CSUM;

fn wait_for(what: &str, mut condition: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(10);
    while !condition() {
        assert!(Instant::now() < end, "waited 10 s for {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// An interface with the dispatcher's state.
struct Host {
    _folder: Option<tempfile::TempDir>,
    path: PathBuf,
    interface: Arc<VhostUser>,
    stats: Arc<PortStats>,
    sources: Vec<Box<dyn Source>>,
    slot: BatchSlot,
}

fn options(path: &Path, queues: usize) -> VhostUserOptions {
    let mac = Some("52:54:00:00:00:01".parse().unwrap());
    VhostUserOptions {
        name: "vm1".into(),
        socket: path.into(),
        server: true,
        mac,
        mtu: 1500,
        queues,
        access: SocketAccess::default(),
        peer: AllowedPeer::default(),
        memory_max: None,
    }
}

impl Host {
    fn new(queues: usize) -> Host {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("vm1.sock");
        Host { _folder: Some(folder), ..Host::at(options(&path, queues)) }
    }

    fn at(options: VhostUserOptions) -> Host {
        let stats = Arc::new(PortStats::default());
        let path = options.socket.clone();
        let interface = VhostUser::start(options, PortId(1), NetworkId::DEFAULT, stats.clone()).unwrap();
        let sources = (0..interface.queues()).map(|queue| interface.clone().source(queue)).collect();
        Host { _folder: None, path, interface, sources, stats, slot: BatchSlot::new(BATCH_MAX) }
    }

    /// The source of transmit queue `queue`, as the dispatcher that serves it sees it.
    fn source(&mut self, queue: usize) -> &mut dyn Source {
        &mut *self.sources[queue]
    }

    /// Receives the waiting frames of a queue as bytes.
    fn receive_on(&mut self, queue: usize) -> Vec<Vec<u8>> {
        let (source, mut drops) = (&mut *self.sources[queue], DropSink::new());
        let burst = receive(source, &mut self.slot, &mut drops, 0);
        let copy = |frame| {
            let mut bytes = vec![0; FRAME_MAX];
            let len = burst.copy_to(frame, &mut bytes);
            bytes[..len].to_vec()
        };
        burst.frames().iter().map(copy).collect()
    }

    fn receive(&mut self) -> Vec<Vec<u8>> {
        self.receive_on(0)
    }

    fn deliver(&mut self, queue: usize, frame: &[u8]) {
        let mut batch = Batch::new();
        let mut builder = batch.begin();
        // SAFETY: `frame` outlives the batch and is not written to.
        unsafe { builder.push_stable(Segment::new(frame.as_ptr(), frame.len())) };
        builder.finish(PortId(2), NetworkId::DEFAULT, Offload::default(), 0).unwrap();
        self.interface.deliver(queue, Selection { batch: &batch, which: &[0] }, &mut DropSink::new());
    }

    fn is_up(&self) -> bool {
        self.interface.state() == State::Up
    }

    fn reason(&self) -> String {
        match self.interface.state() {
            State::Up => "up".into(),
            State::Down(reason) => format!("down: {reason}"),
            State::Broken(reason) => format!("broken: {reason}"),
        }
    }
}

/// A guest: memory, the driver's side of each vring, and the front end.
struct Guest {
    memory: MockMemory,
    rings: Vec<MockRing>,
    kicks: Vec<EventFd>,
    calls: Vec<EventFd>,
    errors: Vec<EventFd>,
    frontend: Frontend,
    raw: UnixStream,
    features: u64,
}

fn event() -> EventFd {
    EventFd::new(libc::EFD_NONBLOCK).unwrap()
}

impl Guest {
    /// A guest whose front end has connected and negotiated like QEMU, but has started no ring.
    fn connect(path: &Path, queues: usize) -> Guest {
        Guest::from_stream(UnixStream::connect(path).unwrap(), queues)
    }

    fn from_stream(raw: UnixStream, queues: usize) -> Guest {
        let vrings = 2 * queues;
        let memory = MockMemory::new(8 * RING_SPACE + 0x40_0000);
        let place = |i| GUEST_BASE + i as u64 * RING_SPACE;
        let rings = (0..vrings).map(|i| MockRing::new(&memory, place(i), SIZE, 0)).collect();
        let events = || (0..vrings).map(|_| event()).collect();
        let mut frontend = Frontend::from_stream(raw.try_clone().unwrap(), vrings as u64);
        let offered = frontend.get_features().unwrap();
        assert_eq!(offered & LINUX, LINUX);
        let protocol = frontend.get_protocol_features().unwrap();
        frontend.set_protocol_features(protocol).unwrap();
        frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        frontend.set_owner().unwrap();
        let (kicks, calls, errors) = (events(), events(), events());
        Guest { memory, rings, kicks, calls, errors, frontend, raw, features: LINUX | PROTOCOL_FEATURES }
    }

    fn region(&self) -> VhostUserMemoryRegionInfo {
        let spec = self.memory.spec();
        VhostUserMemoryRegionInfo {
            guest_phys_addr: spec.guest_addr,
            memory_size: spec.len,
            userspace_addr: spec.user_addr,
            mmap_offset: spec.offset,
            mmap_handle: self.memory.file().as_raw_fd(),
        }
    }

    /// Sends SET_FEATURES and SET_MEM_TABLE, then starts each ring at its driver's used index, like vhost_dev_start in QEMU.
    fn start(&mut self) {
        for index in 0..self.rings.len() {
            // QEMU enables rings before it sets features, which crate vhost's front end refuses to send.
            self.send(18, &[index as u32, 1]);
        }
        self.frontend.set_features(self.features).unwrap();
        self.frontend.set_mem_table(&[self.region()]).unwrap();
        for index in 0..self.rings.len() {
            self.start_ring(index);
        }
    }

    fn start_ring(&mut self, index: usize) {
        let config = self.rings[index].config(true, true);
        self.frontend.set_vring_num(index, SIZE).unwrap();
        self.frontend.set_vring_base(index, config.base).unwrap();
        self.set_addresses(index, &config);
        self.frontend.set_vring_err(index, &self.errors[index]).unwrap();
        self.frontend.set_vring_kick(index, &self.kicks[index]).unwrap();
        self.frontend.set_vring_call(index, &self.calls[index]).unwrap();
    }

    fn set_addresses(&mut self, index: usize, config: &RingConfig) {
        let data = VringConfigData {
            queue_max_size: SIZE,
            queue_size: SIZE,
            // VHOST_VRING_F_LOG
            flags: config.used_log.is_some().into(),
            desc_table_addr: config.descriptors,
            used_ring_addr: config.used,
            avail_ring_addr: config.available,
            log_addr: config.used_log,
        };
        self.frontend.set_vring_addr(index, &data).unwrap();
    }

    /// Sends a message of 32-bit words without requesting an acknowledgement.
    fn send(&mut self, code: u32, words: &[u32]) {
        let header = [code, 1, 4 * words.len() as u32];
        let bytes: Vec<u8> = header.iter().chain(words).flat_map(|w| w.to_ne_bytes()).collect();
        io::Write::write_all(&mut self.raw, &bytes).unwrap();
    }

    /// Makes a frame available on transmit vring `index`.
    fn transmit_on(&mut self, index: usize, frame: &[u8]) {
        let header = if self.features & (VERSION_1 | MRG_RXBUF) == 0 { 10 } else { 12 };
        let ring = &mut self.rings[index];
        let at = ARENA + 0x1000 * u64::from(ring.avail_idx % 512);
        self.memory.write(at, &[&vec![0; header], frame].concat());
        ring.add(&self.memory, &[(at, (header + frame.len()) as u32, 0)]).unwrap();
        ring.publish(&self.memory);
    }

    fn transmit(&mut self, frame: &[u8]) {
        self.transmit_on(1, frame);
    }

    /// Posts `count` receive buffers of one page each.
    fn offer(&mut self, count: u16) {
        for _ in 0..count {
            let at = ARENA + 0x20_0000 + 0x1000 * u64::from(self.rings[0].avail_idx % 512);
            self.rings[0].add(&self.memory, &[(at, 0x1000, DESC_WRITE)]).unwrap();
        }
        self.rings[0].publish(&self.memory);
    }

    /// The next delivered frame without its header.
    fn read(&mut self) -> Option<Vec<u8>> {
        let slot = self.rings[0].used_idx;
        let (_, len) = self.rings[0].collect(&self.memory)?;
        let at = ARENA + 0x20_0000 + 0x1000 * u64::from(slot % 512);
        let header = if self.features & (VERSION_1 | MRG_RXBUF) == 0 { 10 } else { 12 };
        Some(self.memory.read(at, len as usize).split_off(header))
    }

    /// True if vnetd has closed the connection.
    fn is_closed(&mut self) -> bool {
        self.raw.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        let mut byte = [0; 64];
        loop {
            match io::Read::read(&mut self.raw, &mut byte) {
                Ok(0) => return true,
                // Skips acknowledgements of earlier messages.
                Ok(_) => continue,
                Err(error) => return error.kind() == io::ErrorKind::ConnectionReset,
            }
        }
    }
}

fn frame(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|i| (i as u8).wrapping_mul(3).wrapping_add(seed)).collect()
}
