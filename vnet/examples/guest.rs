//! A guest that only sends or receives frames, as load for a vhost-user interface. `lab/lab bench` runs it.
//!
//! The driver's side of virtio-net (virtio 1.2 section 5.1) over shared memory, with a vhost-user front end, as a machine monitor
//! with a Linux guest would have: notifications by event index, mergeable receive buffers of a page, 64 KB frames with
//! segmentation and checksum offload. Frames and descriptors are written once, and sending makes a chain available again, so the
//! load generator costs far less than the interface under load.
//!
//! Usage: `guest SOCKET sink|send --mac MAC [--to MAC] [--bytes N] [--seconds S] [--cpu N]` Frames beyond 1 514 bytes are TCP
//! super-frames (TSO). Prints one JSON object. A sink ends S seconds after its first frame; it counts received frames, and
//! truncated or foreign ones as `wrong`.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU16, Ordering, fence};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap};
use vhost::vhost_user::message::VhostUserHeaderFlag;
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vmm_sys_util::eventfd::EventFd;
use vnet::interface::virtqueue::{DESC_NEXT, DESC_WRITE, Descriptor};
use vnet::wire::ethernet::Mac;
use vnet::wire::offload::{F_NEEDS_CSUM, GSO_TCPV4, Offload, VIRTIO_NET_HDR_LEN};

/// CSUM, GUEST_CSUM, GUEST_TSO4, HOST_TSO4, MRG_RXBUF, EVENT_IDX, PROTOCOL_FEATURES, VERSION_1.
const FEATURES: u64 = 1 | 1 << 1 | 1 << 7 | 1 << 11 | 1 << 15 | 1 << 29 | 1 << 30 | 1 << 32;
const RECEIVE: usize = 0;
const TRANSMIT: usize = 1;
const RING: u16 = 1024;
const RING_SPACE: usize = 0x8000;
const PAGE: usize = 0x1000;
/// Frames are split into pieces of this size, like a Linux guest's page fragments.
const PIECE: usize = 0x8000;
/// Maximum number of frames in flight.
const SLOTS: u16 = 256;
const SLOT_SPACE: usize = 0x1_2000;
const BUFFERS: usize = 2 * RING_SPACE;
const FRAMES: usize = BUFFERS + RING as usize * PAGE;
const MEMORY: usize = FRAMES + SLOTS as usize * SLOT_SPACE;
/// How long a sink waits for its first frame.
const FIRST_FRAME: Duration = Duration::from_secs(30);
/// Length in bytes of the Ethernet, IPv4 and TCP headers.
const HEADERS: usize = 54;
const MSS: u16 = 1448;

fn main() {
    let options = Options::read();
    if let Some(cpu) = options.cpu {
        let mut set = rustix::thread::CpuSet::new();
        set.set(cpu);
        rustix::thread::sched_setaffinity(None, &set).expect("a processor to run on");
    }
    let mut guest = Guest::connect(&options.socket);
    println!("{}", if options.send { guest.send(&options) } else { guest.sink(&options) });
}

/// Options of the command line.
struct Options {
    socket: String,
    send: bool,
    mac: Mac,
    to: Mac,
    bytes: usize,
    time: Duration,
    cpu: Option<usize>,
}

impl Options {
    fn read() -> Options {
        let mut words = std::env::args().skip(1);
        let mut next = || words.next().expect("usage: guest SOCKET sink|send --mac MAC [--to MAC] ...");
        let (socket, mode) = (next(), next());
        let mut options = Options {
            socket,
            send: mode == "send",
            mac: Mac::default(),
            to: Mac::BROADCAST,
            bytes: 64,
            time: Duration::from_secs(1),
            cpu: None,
        };
        while let Some(word) = words.next() {
            let value = words.next().unwrap_or_else(|| panic!("{word} needs a value"));
            match word.as_str() {
                "--mac" => options.mac = value.parse().expect("a MAC address"),
                "--to" => options.to = value.parse().expect("a MAC address"),
                "--bytes" => options.bytes = value.parse().expect("bytes"),
                "--seconds" => options.time = Duration::from_secs_f64(value.parse().expect("seconds")),
                "--cpu" => options.cpu = Some(value.parse().expect("a processor")),
                _ => panic!("unknown option {word}"),
            }
        }
        assert!((60..=65_549).contains(&options.bytes), "--bytes: 60 to 65549");
        options
    }

    /// A frame and its offload metadata: a TCP segment, which the device segments if it is long.
    fn frame(&self) -> (Vec<u8>, Offload) {
        let mut frame = vec![0x5a; self.bytes];
        let ip_len = u16::try_from(self.bytes - 14).unwrap_or(u16::MAX);
        let mut headers = [[self.to.0, self.mac.0].concat(), vec![8, 0, 0x45, 0]].concat();
        headers.extend(ip_len.to_be_bytes());
        headers.extend([0, 0, 0x40, 0, 64, 6, 0, 0, 10, 77, 0, 1, 10, 77, 0, 2]);
        headers.extend([0x20, 0, 0x20, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0x50, 0x10, 0xff, 0xff, 0, 0, 0, 0]);
        frame[..HEADERS].copy_from_slice(&headers);
        let mut offload =
            Offload { flags: F_NEEDS_CSUM, csum_start: 34, csum_offset: 16, ..Offload::default() };
        if self.bytes > 1514 {
            offload = Offload { gso_type: GSO_TCPV4, hdr_len: HEADERS as u16, gso_size: MSS, ..offload };
        }
        (frame, offload)
    }
}

/// Memory that both sides map.
struct Memory {
    file: File,
    base: NonNull<u8>,
}

impl Memory {
    fn new() -> Memory {
        let file = File::from(memfd_create("guest", MemfdFlags::CLOEXEC).expect("memory"));
        file.set_len(MEMORY as u64).expect("memory");
        // SAFETY: a new mapping at an address that the kernel chooses; it lasts until the process ends.
        let base = unsafe {
            let access = ProtFlags::READ | ProtFlags::WRITE;
            mmap(std::ptr::null_mut(), MEMORY, access, MapFlags::SHARED | MapFlags::POPULATE, &file, 0)
        };
        Memory { file, base: NonNull::new(base.expect("memory").cast()).expect("memory") }
    }

    /// A pointer to a `T` at `offset`.
    fn at<T>(&self, offset: usize) -> *mut T {
        assert!(offset + size_of::<T>() <= MEMORY && offset.is_multiple_of(align_of::<T>()));
        // SAFETY: the offset is within the mapping.
        unsafe { self.base.as_ptr().add(offset).cast() }
    }

    fn write<T>(&self, offset: usize, value: T) {
        // SAFETY: `at` checks bounds and alignment. The device reads it only after `Ring::publish`.
        unsafe { self.at::<T>(offset).write_volatile(value) };
    }

    fn read<T: Copy>(&self, offset: usize) -> T {
        // SAFETY: `at` checks bounds and alignment; every `T` used here is an integer, valid for all bytes.
        unsafe { self.at::<T>(offset).read_volatile() }
    }

    fn index(&self, offset: usize) -> &AtomicU16 {
        // SAFETY: `at` checks bounds and alignment; both sides access ring indices atomically only.
        unsafe { AtomicU16::from_ptr(self.at(offset)) }
    }
}

/// The driver's side of a split virtqueue (virtio 1.2 section 2.7).
struct Ring {
    base: usize,
    avail: u16,
    used: u16,
    kick: EventFd,
    call: EventFd,
}

impl Ring {
    fn new(index: usize) -> Ring {
        let event = || EventFd::new(libc::EFD_NONBLOCK).expect("an event");
        Ring { base: index * RING_SPACE, avail: 0, used: 0, kick: event(), call: event() }
    }

    fn avail_at(&self) -> usize {
        self.base + 16 * usize::from(RING)
    }

    fn used_at(&self) -> usize {
        (self.avail_at() + 6 + 2 * usize::from(RING)).next_multiple_of(4)
    }

    fn describe(&self, memory: &Memory, index: u16, descriptor: Descriptor) {
        memory.write(self.base + 16 * usize::from(index), descriptor);
    }

    /// Makes a chain available; `publish` shows it to the device.
    fn offer(&mut self, memory: &Memory, head: u16) {
        memory.write(self.avail_at() + 4 + 2 * usize::from(self.avail % RING), head);
        self.avail = self.avail.wrapping_add(1);
    }

    /// Publishes the available chains, and notifies the device if it requests that.
    fn publish(&mut self, memory: &Memory) {
        let index = memory.index(self.avail_at() + 2);
        let before = index.load(Ordering::Relaxed);
        index.store(self.avail, Ordering::Release);
        fence(Ordering::SeqCst);
        let event = memory.index(self.used_at() + 4 + 8 * usize::from(RING)).load(Ordering::Relaxed);
        // vring_need_event, virtio 1.2 section 2.7.10.
        if self.avail.wrapping_sub(event).wrapping_sub(1) < self.avail.wrapping_sub(before) {
            self.kick.write(1).expect("a notification");
        }
    }

    /// Number of used chains that are not collected yet.
    fn ready(&self, memory: &Memory) -> u16 {
        memory.index(self.used_at() + 2).load(Ordering::Acquire).wrapping_sub(self.used)
    }

    /// Takes the next used chain (head, bytes written); the caller must check [`Ring::ready`] first.
    fn take(&mut self, memory: &Memory) -> (u16, usize) {
        let at = self.used_at() + 4 + 8 * usize::from(self.used % RING);
        self.used = self.used.wrapping_add(1);
        (memory.read::<u32>(at) as u16, memory.read::<u32>(at + 4) as usize)
    }

    /// Waits briefly for `count` used chains.
    fn wait(&self, memory: &Memory, count: u16) {
        let event = memory.index(self.avail_at() + 4 + 2 * usize::from(RING));
        event.store(self.used.wrapping_add(count - 1), Ordering::Relaxed);
        fence(Ordering::SeqCst);
        if self.ready(memory) < count {
            // SAFETY: the event stays open as long as `self`.
            let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(self.call.as_raw_fd()) };
            let moment = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
            poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&moment)).expect("poll");
            // No interrupt within the time is not an error.
            let _ = self.call.read();
        }
    }
}

/// A guest with one pair of queues.
struct Guest {
    memory: Memory,
    rings: [Ring; 2],
    /// Keeps the connection open.
    _frontend: Frontend,
}

impl Guest {
    /// Connects to an interface and starts both rings, like QEMU.
    fn connect(socket: &str) -> Guest {
        let memory = Memory::new();
        let stream = UnixStream::connect(socket).unwrap_or_else(|error| panic!("{socket}: {error}"));
        let mut frontend = Frontend::from_stream(stream, 2);
        frontend.set_owner().expect("SET_OWNER");
        let offered = frontend.get_features().expect("GET_FEATURES");
        assert_eq!(offered & FEATURES, FEATURES, "the interface lacks features");
        let protocol = frontend.get_protocol_features().expect("GET_PROTOCOL_FEATURES");
        frontend.set_protocol_features(protocol).expect("SET_PROTOCOL_FEATURES");
        frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        frontend.set_features(FEATURES).expect("SET_FEATURES");
        let base = memory.base.as_ptr() as u64;
        let region = VhostUserMemoryRegionInfo {
            guest_phys_addr: 0,
            memory_size: MEMORY as u64,
            userspace_addr: base,
            mmap_offset: 0,
            mmap_handle: memory.file.as_raw_fd(),
        };
        frontend.set_mem_table(&[region]).expect("SET_MEM_TABLE");
        let rings = [Ring::new(RECEIVE), Ring::new(TRANSMIT)];
        for (index, ring) in rings.iter().enumerate() {
            let data = VringConfigData {
                queue_max_size: RING,
                queue_size: RING,
                flags: 0,
                desc_table_addr: base + ring.base as u64,
                used_ring_addr: base + ring.used_at() as u64,
                avail_ring_addr: base + ring.avail_at() as u64,
                log_addr: None,
            };
            frontend.set_vring_num(index, RING).expect("SET_VRING_NUM");
            frontend.set_vring_base(index, 0).expect("SET_VRING_BASE");
            frontend.set_vring_addr(index, &data).expect("SET_VRING_ADDR");
            frontend.set_vring_kick(index, &ring.kick).expect("SET_VRING_KICK");
            frontend.set_vring_call(index, &ring.call).expect("SET_VRING_CALL");
            frontend.set_vring_enable(index, true).expect("SET_VRING_ENABLE");
        }
        Guest { memory, rings, _frontend: frontend }
    }

    /// Sends as fast as the device takes frames.
    fn send(&mut self, options: &Options) -> serde_json::Value {
        let (memory, ring) = (&self.memory, &mut self.rings[TRANSMIT]);
        let chain = 1 + options.bytes.div_ceil(PIECE) as u16;
        let slots = SLOTS.min(RING / chain);
        prepare(memory, ring, options, slots, chain);
        let begin = Instant::now();
        let mut offered = 0u64;
        let mut done = 0u64;
        while begin.elapsed() < options.time {
            for _ in 0..ring.ready(memory) {
                let (head, _) = ring.take(memory);
                assert_eq!(head, (done % u64::from(slots)) as u16 * chain, "chains come back in order");
                done += 1;
            }
            let free = u64::from(slots) - (offered - done);
            if free == 0 {
                ring.wait(memory, slots / 2);
                continue;
            }
            for _ in 0..free {
                ring.offer(memory, (offered % u64::from(slots)) as u16 * chain);
                offered += 1;
            }
            ring.publish(memory);
        }
        report(done, done * options.bytes as u64, 0, 0, begin.elapsed())
    }

    /// Receives all frames.
    fn sink(&mut self, options: &Options) -> serde_json::Value {
        let (memory, ring) = (&self.memory, &mut self.rings[RECEIVE]);
        for index in 0..RING {
            let addr = (BUFFERS + usize::from(index) * PAGE) as u64;
            ring.describe(memory, index, Descriptor { addr, len: PAGE as u32, flags: DESC_WRITE, next: 0 });
            ring.offer(memory, index);
        }
        ring.publish(memory);
        let mut begin = Instant::now();
        let (mut frames, mut bytes, mut whole, mut wrong) = (0u64, 0u64, 0u64, 0u64);
        let mut buffers_left = 0;
        while begin.elapsed() < if frames == 0 { FIRST_FRAME } else { options.time } {
            let ready = ring.ready(memory);
            if ready == 0 {
                ring.wait(memory, 1);
                continue;
            }
            if frames == 0 {
                begin = Instant::now();
            }
            for _ in 0..ready {
                let (index, len) = ring.take(memory);
                let at = BUFFERS + usize::from(index) * PAGE;
                bytes += len as u64;
                if buffers_left == 0 {
                    frames += 1;
                    bytes -= VIRTIO_NET_HDR_LEN as u64;
                    buffers_left = memory.read::<u16>(at + 10).max(1);
                    whole += u64::from(memory.read::<u8>(at + 1) == GSO_TCPV4);
                    let dst = Mac(memory.read::<[u8; 6]>(at + VIRTIO_NET_HDR_LEN));
                    wrong += u64::from(dst != options.mac);
                }
                buffers_left -= 1;
                ring.offer(memory, index);
            }
            ring.publish(memory);
        }
        report(frames, bytes, whole, wrong, begin.elapsed())
    }
}

/// Writes the frame and the chain of every slot: the virtio-net header, then the frame in pieces.
fn prepare(memory: &Memory, ring: &Ring, options: &Options, slots: u16, chain: u16) {
    let (frame, offload) = options.frame();
    for slot in 0..slots {
        let at = FRAMES + usize::from(slot) * SLOT_SPACE;
        memory.write(at, offload.to_virtio(0));
        let first = at + PAGE;
        for (i, byte) in frame.iter().enumerate() {
            memory.write(first + i, *byte);
        }
        let head = slot * chain;
        let header =
            Descriptor { addr: at as u64, len: VIRTIO_NET_HDR_LEN as u32, flags: DESC_NEXT, next: head + 1 };
        ring.describe(memory, head, header);
        for (i, piece) in (1..).zip(frame.chunks(PIECE)) {
            let flags = if i + 1 < chain { DESC_NEXT } else { 0 };
            let addr = (first + usize::from(i - 1) * PIECE) as u64;
            ring.describe(
                memory,
                head + i,
                Descriptor { addr, len: piece.len() as u32, flags, next: head + i + 1 },
            );
        }
    }
}

fn report(frames: u64, bytes: u64, whole: u64, wrong: u64, time: Duration) -> serde_json::Value {
    let seconds = time.as_secs_f64();
    serde_json::json!({
        "frames": frames, "bytes": bytes, "tso_frames": whole, "wrong": wrong, "seconds": seconds,
        "frames_per_s": frames as f64 / seconds, "bps": bytes as f64 * 8.0 / seconds,
    })
}
