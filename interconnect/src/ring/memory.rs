//! The shared memory: its creation, its checks, and its layout.
//!
//! ```text
//! file:    control 0 | control 1 | data 0      | data 1
//! mapped:  control 0 | control 1 | data 0 | data 0 | data 1 | data 1
//! ```
//!
//! The data of a lane is mapped twice, one copy behind the other, so that a packet across its end is contiguous.

use std::ffi::c_void;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};

use super::lane::{Control, LANE_BYTES, Lane};
use super::view;

/// Size of a control block in the file: a multiple of every page size.
const CONTROL_BYTES: usize = 64 << 10;
const FILE_BYTES: usize = 2 * CONTROL_BYTES + 2 * LANE_BYTES;
const MAPPED_BYTES: usize = 2 * CONTROL_BYTES + 4 * LANE_BYTES;

/// Creates the memory of a ring.
pub(super) fn create() -> io::Result<OwnedFd> {
    view::create(FILE_BYTES)
}

/// The mapped memory of a ring.
pub(super) struct Mapping(*mut u8);

// SAFETY: the mapping belongs to this value, and any thread may access and unmap it.
unsafe impl Send for Mapping {}

impl Mapping {
    /// Checks and maps the memory.
    pub(super) fn new(memory: OwnedFd) -> io::Result<Self> {
        if view::sealed_len(&memory) != Some(FILE_BYTES) {
            return Err(io::Error::other("the memory of a ring has another size or is not sealed"));
        }
        // SAFETY: the kernel chooses an unused range of addresses.
        let start =
            unsafe { mmap_anonymous(ptr::null_mut(), MAPPED_BYTES, ProtFlags::empty(), MapFlags::PRIVATE)? };
        // Unmaps the range if a later step fails.
        let mapping = Self(start.cast());
        let (data, lane) = (2 * CONTROL_BYTES, LANE_BYTES);
        // Where in the range, how many bytes, and from where in the file.
        let parts = [
            (0, data, 0),
            (data, lane, data),
            (data + lane, lane, data),
            (data + 2 * lane, lane, data + lane),
            (data + 3 * lane, lane, data + lane),
        ];
        for (at, len, offset) in parts {
            let protection = ProtFlags::READ | ProtFlags::WRITE;
            let flags = MapFlags::SHARED | MapFlags::FIXED;
            // SAFETY: the parts lie inside the range that was just reserved, and replace only that.
            unsafe { mmap(start.byte_add(at), len, protection, flags, memory.as_fd(), offset as u64)? };
        }
        // SAFETY: the range is this mapping's. A child process of the application must not take part in the ring.
        unsafe { madvise(start, MAPPED_BYTES, Advice::LinuxDontFork)? };
        Ok(mapping)
    }

    /// One of the two lanes. It is valid as long as the mapping.
    pub(super) fn lane(&self, number: usize) -> Lane {
        assert!(number < 2);
        // SAFETY: control block and data of both lanes lie within the mapping.
        let (control, data) = unsafe {
            let data = self.0.add(2 * CONTROL_BYTES + number * 2 * LANE_BYTES);
            (self.0.add(number * CONTROL_BYTES), data)
        };
        Lane { control: control.cast::<Control>(), data }
    }

    /// Writes anywhere into the file, as a hostile peer could; for tests.
    pub(super) fn scribble(&mut self, offset: usize, bytes: &[u8]) {
        let offset = offset % FILE_BYTES;
        let bytes = &bytes[..bytes.len().min(FILE_BYTES - offset)];
        // The second lane begins behind the second mapping of the first.
        for (place, byte) in bytes.iter().enumerate() {
            let at = offset + place;
            let at = if at >= FILE_BYTES - LANE_BYTES { at + LANE_BYTES } else { at };
            // SAFETY: `at` is inside the mapping, whose memory changes at any time for all its users.
            unsafe { self.0.add(at).write_volatile(*byte) };
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range is this mapping's, and nothing uses the lanes any more.
        let _ = unsafe { munmap(self.0.cast::<c_void>(), MAPPED_BYTES) };
    }
}
