//! Two TAP devices with io_uring: multishot reads (`IORING_OP_READ_MULTISHOT`, Linux 6.7) into provided buffers, and all writes
//! of a turn in one system call.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU16, Ordering};

use io_uring::types::{BufRingEntry, Fd};
use io_uring::{IoUring, cqueue, opcode, squeue};

use crate::ROOM;

/// Number of buffers per device, a power of two; each holds a super-frame.
const BUFFERS: usize = 64;
/// `IORING_ENTER_GETEVENTS`: runs deferred work within the call, even without waiting.
const GETEVENTS: u32 = 1;
/// Marks the user data of a write's completion, which also holds device and buffer; that of a read is the device.
const WRITTEN: u64 = 1 << 32;

/// Moves frames until the program is killed.
pub fn forward(devices: [&File; 2], blocks: bool) -> io::Result<()> {
    // One read and one write per buffer.
    let mut ring: IoUring =
        IoUring::builder().setup_single_issuer().setup_defer_taskrun().build(4 * BUFFERS as u32)?;
    let mut pools = [Pool::new(&ring, 0)?, Pool::new(&ring, 1)?];
    let fds = devices.map(|device| Fd(device.as_raw_fd()));
    for (from, fd) in fds.into_iter().enumerate() {
        push(&mut ring, &read(fd, from))?;
    }
    loop {
        let pushed = ring.submission().len() as u32;
        // SAFETY: the call passes no pointers; the queue's entries refer to live descriptors and buffers.
        let entered = unsafe { ring.submitter().enter::<()>(pushed, u32::from(blocks), GETEVENTS, None) };
        match entered {
            Err(error) if !matches!(error.raw_os_error(), Some(libc::EINTR | libc::EBUSY)) => {
                return Err(error);
            }
            _ => {}
        }
        let done: Vec<cqueue::Entry> = ring.completion().collect();
        if done.is_empty() && !blocks {
            std::thread::yield_now();
        }
        for entry in done {
            let (from, buffer) = ((entry.user_data() & 1) as usize, (entry.user_data() >> 1) as u16);
            if entry.user_data() & WRITTEN != 0 {
                pools[from].give(buffer);
                continue;
            }
            if let (Some(buffer), Ok(len)) =
                (cqueue::buffer_select(entry.flags()), u32::try_from(entry.result()))
            {
                let bytes = pools[from].place(buffer);
                let data = WRITTEN | u64::from(buffer) << 1 | from as u64;
                push(&mut ring, &opcode::Write::new(fds[1 - from], bytes, len).build().user_data(data))?;
            }
            if !cqueue::more(entry.flags()) {
                // Out of buffers, or the device is still down.
                push(&mut ring, &read(fds[from], from))?;
            }
        }
    }
}

fn read(fd: Fd, from: usize) -> squeue::Entry {
    opcode::ReadMulti::new(fd, 0, from as u16).build().user_data(from as u64)
}

fn push(ring: &mut IoUring, entry: &squeue::Entry) -> io::Result<()> {
    // SAFETY: descriptors and buffers live until the program ends; a buffer is not reused before its write completes.
    while unsafe { ring.submission().push(entry) }.is_err() {
        ring.submit()?;
    }
    Ok(())
}

/// Provided buffers of a device, and the ring of the free buffers.
struct Pool {
    memory: NonNull<u8>,
    free: NonNull<BufRingEntry>,
    tail: u16,
}

impl Pool {
    fn new(ring: &IoUring, group: u16) -> io::Result<Pool> {
        let memory = map(BUFFERS * ROOM)?;
        let free = map(BUFFERS * size_of::<BufRingEntry>())?.cast::<BufRingEntry>();
        let mut pool = Pool { memory, free, tail: 0 };
        let at = free.as_ptr() as u64;
        // SAFETY: a separate mapping with that many entries, which is never unmapped.
        unsafe { ring.submitter().register_buf_ring_with_flags(at, BUFFERS as u16, group, 0)? };
        (0..BUFFERS as u16).for_each(|buffer| pool.give(buffer));
        Ok(pool)
    }

    fn place(&self, buffer: u16) -> *mut u8 {
        // SAFETY: buffers are numbered below BUFFERS, and the mapping holds BUFFERS buffers.
        unsafe { self.memory.as_ptr().add(usize::from(buffer) * ROOM) }
    }

    /// Returns a buffer to the free ring.
    fn give(&mut self, buffer: u16) {
        let bytes = self.place(buffer) as u64;
        // SAFETY: the index is below BUFFERS, so within the ring's mapping; the kernel reads an entry only after the tail has
        // passed it.
        let entry = unsafe { &mut *self.free.as_ptr().add(usize::from(self.tail) % BUFFERS) };
        entry.set_addr(bytes);
        entry.set_len(ROOM as u32);
        entry.set_bid(buffer);
        self.tail = self.tail.wrapping_add(1);
        // SAFETY: the ring begins at `free`; only this function writes its tail, and the kernel reads it as one word.
        let tail = unsafe { AtomicU16::from_ptr(BufRingEntry::tail(self.free.as_ptr()).cast_mut()) };
        tail.store(self.tail, Ordering::Release);
    }
}

/// Page-aligned memory that is never freed.
fn map(len: usize) -> io::Result<NonNull<u8>> {
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: creates a new mapping.
    let memory = unsafe { libc::mmap(std::ptr::null_mut(), len, access, flags, -1, 0) };
    if memory == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    Ok(NonNull::new(memory.cast()).expect("a mapping"))
}
