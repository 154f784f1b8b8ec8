//! Guest memory, and the driver's side of a split virtqueue (virtio 1.2 section 2.7), for tests that are the guest.

// Each test program uses only a part of this module.
#![allow(dead_code)]

use std::fs::File;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU16, Ordering, fence};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vmm_sys_util::eventfd::EventFd;
use vnet::interface::virtqueue::Descriptor;
use vnet::interface::virtqueue::split::needs_event;

/// Number of chains in a ring.
pub const SIZE: u16 = 16;
/// Room for a ring in guest memory.
pub const RING_SPACE: usize = 0x1000;

/// Memory that both sides map.
pub struct Memory {
    file: File,
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping belongs to this value and is accessed only through raw pointers and atomics.
unsafe impl Send for Memory {}

impl Memory {
    /// `len` zero bytes in a memfd called `name`.
    pub fn new(name: &str, len: usize) -> Memory {
        let file = File::from(memfd_create(name, MemfdFlags::CLOEXEC).unwrap());
        file.set_len(len as u64).unwrap();
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses; unmapped in `drop`.
        let base = unsafe { mmap(std::ptr::null_mut(), len, access, MapFlags::SHARED, &file, 0) }.unwrap();
        Memory { file, base: NonNull::new(base.cast()).unwrap(), len }
    }

    /// The region that the guest sees at `guest_phys_addr`.
    pub fn region(&self, guest_phys_addr: u64) -> VhostUserMemoryRegionInfo {
        VhostUserMemoryRegionInfo {
            guest_phys_addr,
            memory_size: self.len as u64,
            userspace_addr: self.base.as_ptr() as u64,
            mmap_offset: 0,
            mmap_handle: self.file.as_raw_fd(),
        }
    }

    fn at<T>(&self, offset: usize) -> *mut T {
        assert!(offset + size_of::<T>() <= self.len && offset.is_multiple_of(align_of::<T>()));
        // SAFETY: the offset is within the mapping.
        unsafe { self.base.as_ptr().add(offset).cast() }
    }

    pub fn write<T>(&self, offset: usize, value: T) {
        // SAFETY: `at` checks bounds and alignment. The device reads it only after the index is published.
        unsafe { self.at::<T>(offset).write_volatile(value) };
    }

    pub fn read<T: Copy>(&self, offset: usize) -> T {
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
        unsafe { munmap(self.base.as_ptr().cast(), self.len) }.unwrap();
    }
}

/// The driver's side of a ring that starts at an offset of its memory.
pub struct Ring {
    base: usize,
    avail: u16,
    used: u16,
    pub kick: EventFd,
    pub call: EventFd,
}

impl Ring {
    pub fn new(base: usize) -> Ring {
        let event = || EventFd::new(libc::EFD_NONBLOCK).unwrap();
        Ring { base, avail: 0, used: 0, kick: event(), call: event() }
    }

    fn avail_at(&self) -> usize {
        self.base + 16 * usize::from(SIZE)
    }

    fn used_at(&self) -> usize {
        (self.avail_at() + 6 + 2 * usize::from(SIZE)).next_multiple_of(4)
    }

    /// Tells the device where queue `index` is, and starts it at the beginning, like QEMU.
    pub fn start(&self, frontend: &mut Frontend, index: usize, memory: &Memory) {
        let base = memory.base.as_ptr() as u64;
        let data = VringConfigData {
            queue_max_size: SIZE,
            queue_size: SIZE,
            flags: 0,
            desc_table_addr: base + self.base as u64,
            used_ring_addr: base + self.used_at() as u64,
            avail_ring_addr: base + self.avail_at() as u64,
            log_addr: None,
        };
        frontend.set_vring_num(index, SIZE).unwrap();
        frontend.set_vring_base(index, 0).unwrap();
        frontend.set_vring_addr(index, &data).unwrap();
        frontend.set_vring_kick(index, &self.kick).unwrap();
        frontend.set_vring_call(index, &self.call).unwrap();
        frontend.set_vring_enable(index, true).unwrap();
    }

    /// Writes descriptor `n`.
    pub fn describe(&self, memory: &Memory, n: u16, descriptor: Descriptor) {
        memory.write(self.base + 16 * usize::from(n), descriptor);
    }

    /// Makes chain `head` available, and notifies the device if it requests that.
    pub fn offer(&mut self, memory: &Memory, head: u16) {
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
    pub fn collect(&mut self, memory: &Memory) -> Option<u16> {
        if memory.index(self.used_at() + 2).load(Ordering::Acquire) == self.used {
            return None;
        }
        let id: u32 = memory.read(self.used_at() + 4 + 8 * usize::from(self.used % SIZE));
        self.used = self.used.wrapping_add(1);
        Some(id as u16)
    }

    /// Requests a notification of the next used chain. Returns true if no chain was used in between.
    pub fn arm(&self, memory: &Memory) -> bool {
        memory.index(self.avail_at() + 4 + 2 * usize::from(SIZE)).store(self.used, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        memory.index(self.used_at() + 2).load(Ordering::Acquire) == self.used
    }

    /// Sleeps until it is notified, or for `time`.
    pub fn sleep(&self, time: Duration) {
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
