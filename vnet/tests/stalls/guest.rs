//! A guest in this process: a vhost-user front end and a driver that sleeps until it is notified.

use std::fs::File;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU16, Ordering, fence};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use vhost::vhost_user::message::VhostUserHeaderFlag;
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vmm_sys_util::eventfd::EventFd;
use vnet::interface::virtqueue::split::needs_event;
use vnet::interface::virtqueue::{DESC_WRITE, Descriptor};
use vnet::wire::ethernet::Mac;

/// MRG_RXBUF, EVENT_IDX, PROTOCOL_FEATURES, VERSION_1.
const FEATURES: u64 = 1 << 15 | 1 << 29 | 1 << 30 | 1 << 32;
const RECEIVE: usize = 0;
const TRANSMIT: usize = 1;
/// Number of chains in a ring.
const SIZE: u16 = 16;
const RING_SPACE: usize = 0x1000;
/// Size in bytes of the buffer of each chain, in both rings.
const BUFFER: usize = 256;
const BUFFERS: usize = 2 * RING_SPACE;
const MEMORY: usize = BUFFERS + 2 * SIZE as usize * BUFFER;
const HEADER: usize = 12;
const FRAME: usize = 60;
const ETHERTYPE: [u8; 2] = [0x88, 0xb5];

/// Memory that both sides map.
struct Memory {
    file: File,
    base: NonNull<u8>,
}

// SAFETY: the mapping belongs to this value and is accessed only through raw pointers and atomics.
unsafe impl Send for Memory {}

impl Memory {
    fn new() -> Memory {
        let file = File::from(memfd_create("guest", MemfdFlags::CLOEXEC).unwrap());
        file.set_len(MEMORY as u64).unwrap();
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses; unmapped in `drop`.
        let base = unsafe { mmap(std::ptr::null_mut(), MEMORY, access, MapFlags::SHARED, &file, 0) }.unwrap();
        Memory { file, base: NonNull::new(base.cast()).unwrap() }
    }

    fn at<T>(&self, offset: usize) -> *mut T {
        assert!(offset + size_of::<T>() <= MEMORY && offset.is_multiple_of(align_of::<T>()));
        // SAFETY: the offset is within the mapping.
        unsafe { self.base.as_ptr().add(offset).cast() }
    }

    fn write<T>(&self, offset: usize, value: T) {
        // SAFETY: `at` checks bounds and alignment. The device reads it only after the index is published.
        unsafe { self.at::<T>(offset).write_volatile(value) };
    }

    fn read<T: Copy>(&self, offset: usize) -> T {
        // SAFETY: `at` checks bounds and alignment; every `T` used is an integer or a byte array, valid for all bytes.
        unsafe { self.at::<T>(offset).read_volatile() }
    }

    fn index(&self, offset: usize) -> &AtomicU16 {
        // SAFETY: `at` checks bounds and alignment; both sides access ring indices atomically only.
        unsafe { AtomicU16::from_ptr(self.at(offset)) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: this value owns the mapping, and no pointer into it remains.
        unsafe { munmap(self.base.as_ptr().cast(), MEMORY) }.unwrap();
    }
}

/// The driver's side of a split virtqueue (virtio 1.2 section 2.7); chain n is descriptor n with buffer n.
struct Ring {
    base: usize,
    avail: u16,
    used: u16,
    kick: EventFd,
    call: EventFd,
}

impl Ring {
    fn new(index: usize) -> Ring {
        let event = || EventFd::new(libc::EFD_NONBLOCK).unwrap();
        Ring { base: index * RING_SPACE, avail: 0, used: 0, kick: event(), call: event() }
    }

    fn avail_at(&self) -> usize {
        self.base + 16 * usize::from(SIZE)
    }

    fn used_at(&self) -> usize {
        (self.avail_at() + 6 + 2 * usize::from(SIZE)).next_multiple_of(4)
    }

    fn buffer(&self, chain: u16) -> usize {
        BUFFERS + (self.base / RING_SPACE * usize::from(SIZE) + usize::from(chain)) * BUFFER
    }

    /// Makes chain `head` available, and notifies the device if it requests that.
    fn offer(&mut self, memory: &Memory, head: u16) {
        memory.write(self.avail_at() + 4 + 2 * usize::from(self.avail % SIZE), head);
        let before = self.avail;
        self.avail = self.avail.wrapping_add(1);
        memory.index(self.avail_at() + 2).store(self.avail, Ordering::Release);
        fence(Ordering::SeqCst);
        let event = memory.index(self.used_at() + 4 + 8 * usize::from(SIZE)).load(Ordering::Relaxed);
        if needs_event(event, self.avail, before) {
            self.kick.write(1).unwrap();
        }
    }

    /// Takes the next used chain.
    fn collect(&mut self, memory: &Memory) -> Option<u16> {
        if memory.index(self.used_at() + 2).load(Ordering::Acquire) == self.used {
            return None;
        }
        let id: u32 = memory.read(self.used_at() + 4 + 8 * usize::from(self.used % SIZE));
        self.used = self.used.wrapping_add(1);
        Some(id as u16)
    }

    /// Requests a notification of the next used chain. Returns true if no chain was used in between.
    fn arm(&self, memory: &Memory) -> bool {
        memory.index(self.avail_at() + 4 + 2 * usize::from(SIZE)).store(self.used, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        memory.index(self.used_at() + 2).load(Ordering::Acquire) == self.used
    }

    /// Sleeps until it is notified, or for `time`.
    fn sleep(&self, time: Duration) {
        wait_readable(&self.call, time);
        // Not readable if the time has expired; the caller checks the clock.
        let _ = self.call.read();
    }
}

/// Waits until `event` is readable, at most for `time`. Returns true if it is.
fn wait_readable(event: &EventFd, time: Duration) -> bool {
    // SAFETY: the event stays open as long as the reference.
    let fd = unsafe { BorrowedFd::borrow_raw(event.as_raw_fd()) };
    let time = Timespec { tv_sec: time.as_secs() as i64, tv_nsec: i64::from(time.subsec_nanos()) };
    poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&time)).unwrap() == 1
}

/// True if `event` is readable.
pub fn is_readable(event: &EventFd) -> bool {
    wait_readable(event, Duration::ZERO)
}

/// A guest with one pair of queues.
pub struct Guest {
    rings: [Ring; 2],
    free: Vec<u16>,
    /// Keeps the connection open.
    _frontend: Frontend,
    memory: Memory,
}

impl Guest {
    /// Connects to an interface, starts both rings like QEMU, and offers every receive buffer.
    pub fn connect(socket: &Path) -> Guest {
        let memory = Memory::new();
        let mut frontend = Frontend::from_stream(UnixStream::connect(socket).unwrap(), 2);
        frontend.set_owner().unwrap();
        assert_eq!(frontend.get_features().unwrap() & FEATURES, FEATURES);
        let protocol = frontend.get_protocol_features().unwrap();
        frontend.set_protocol_features(protocol).unwrap();
        frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        frontend.set_features(FEATURES).unwrap();
        let base = memory.base.as_ptr() as u64;
        let region = VhostUserMemoryRegionInfo {
            guest_phys_addr: 0,
            memory_size: MEMORY as u64,
            userspace_addr: base,
            mmap_offset: 0,
            mmap_handle: memory.file.as_raw_fd(),
        };
        frontend.set_mem_table(&[region]).unwrap();
        let rings = [Ring::new(RECEIVE), Ring::new(TRANSMIT)];
        for (index, ring) in rings.iter().enumerate() {
            for chain in 0..SIZE {
                let flags = if index == RECEIVE { DESC_WRITE } else { 0 };
                let len = if index == RECEIVE { BUFFER } else { HEADER + FRAME };
                let addr = ring.buffer(chain) as u64;
                let descriptor = Descriptor { addr, len: len as u32, flags, next: 0 };
                memory.write(ring.base + 16 * usize::from(chain), descriptor);
            }
            let data = VringConfigData {
                queue_max_size: SIZE,
                queue_size: SIZE,
                flags: 0,
                desc_table_addr: base + ring.base as u64,
                used_ring_addr: base + ring.used_at() as u64,
                avail_ring_addr: base + ring.avail_at() as u64,
                log_addr: None,
            };
            frontend.set_vring_num(index, SIZE).unwrap();
            frontend.set_vring_base(index, 0).unwrap();
            frontend.set_vring_addr(index, &data).unwrap();
            frontend.set_vring_kick(index, &ring.kick).unwrap();
            frontend.set_vring_call(index, &ring.call).unwrap();
            frontend.set_vring_enable(index, true).unwrap();
        }
        let mut guest = Guest { rings, free: (0..SIZE).collect(), _frontend: frontend, memory };
        (0..SIZE).for_each(|chain| guest.rings[RECEIVE].offer(&guest.memory, chain));
        guest
    }

    /// The descriptor by which the device notifies the guest of received frames.
    pub fn call(&self) -> EventFd {
        self.rings[RECEIVE].call.try_clone().unwrap()
    }

    /// Goes to sleep with no notification left over. Returns false if a frame has arrived already.
    pub fn sleeps(&self) -> bool {
        let _ = self.rings[RECEIVE].call.read();
        self.rings[RECEIVE].arm(&self.memory)
    }

    /// Sends one frame that carries `number`.
    pub fn send(&mut self, to: Mac, from: Mac, number: u64) {
        let ring = &mut self.rings[TRANSMIT];
        while let Some(chain) = ring.collect(&self.memory) {
            self.free.push(chain);
        }
        let chain = self.free.pop().expect("the device gives chains back before as many frames are sent");
        let mut bytes = [0; HEADER + FRAME];
        let frame = [&to.0[..], &from.0, &ETHERTYPE, &number.to_be_bytes()].concat();
        bytes[HEADER..HEADER + frame.len()].copy_from_slice(&frame);
        self.memory.write(ring.buffer(chain), bytes);
        ring.offer(&self.memory, chain);
    }

    /// The number in the next frame; `None` if none arrives within `time`.
    pub fn take(&mut self, time: Duration) -> Option<u64> {
        let end = Instant::now() + time;
        loop {
            let ring = &mut self.rings[RECEIVE];
            while let Some(chain) = ring.collect(&self.memory) {
                let bytes: [u8; HEADER + FRAME] = self.memory.read(ring.buffer(chain));
                ring.offer(&self.memory, chain);
                let frame = &bytes[HEADER..];
                if frame[12..14] == ETHERTYPE {
                    return Some(u64::from_be_bytes(frame[14..22].try_into().unwrap()));
                }
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            if ring.arm(&self.memory) {
                ring.sleep(left);
                if end <= Instant::now() {
                    return None;
                }
            }
        }
    }
}
