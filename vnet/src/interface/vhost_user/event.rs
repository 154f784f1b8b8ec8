//! Eventfds that the front end shares with us: telling the guest, and hearing from it, without ever waiting.
//!
//! A write to an eventfd whose counter is full waits until somebody reads it, unless `O_NONBLOCK` is set. That flag belongs
//! to the open file, which the front end holds as well: it could clear the flag, fill the counter, and have a dispatcher wait
//! for ever. Looking first does not help, for it could do so between the look and the write. (Reads are safe: eventfds take
//! `RWF_NOWAIT` for reads, though not for writes.)
//!
//! The kernel's own parts signal eventfds by another way, which never waits, and asynchronous I/O lends it to us: a request
//! with `IOCB_FLAG_RESFD` has an eventfd signalled when it completes (io_submit(2)). So [`Signals`] submits reads of no bytes
//! from `/dev/null`, which complete before the call returns.

use std::fs::File;
use std::io::{self, IoSliceMut};
use std::os::fd::AsRawFd;
use std::sync::Arc;

use rustix::io::ReadWriteFlags;

/// Completions that one system call takes out of the kernel's list. They say nothing; the list must only not be full.
const REAP: usize = 64;
/// Attempts at one signal while several threads fill that list.
const ATTEMPTS_MAX: usize = 64;
// linux/aio_abi.h
const IOCB_CMD_PREAD: u16 = 0;
const IOCB_FLAG_RESFD: u32 = 1;

/// `struct iocb` of a little-endian host.
#[repr(C)]
#[derive(Default)]
struct Request {
    data: u64,
    key: u32,
    rw_flags: i32,
    opcode: u16,
    priority: i16,
    file: u32,
    buffer: u64,
    bytes: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    result_eventfd: u32,
}

/// `struct io_event`.
type Completion = [u64; 4];

/// Signals eventfds without ever waiting. May be used by several threads at once.
#[derive(Debug)]
pub(super) struct Signals {
    /// `aio_context_t`.
    context: libc::c_ulong,
    null: File,
}

impl Signals {
    /// # Errors
    /// The system has no room for another AIO context (`fs.aio-max-nr`) or file descriptor.
    pub(super) fn new() -> io::Result<Arc<Signals>> {
        let null = File::open("/dev/null")?;
        let mut context: libc::c_ulong = 0;
        // The kernel makes room for more than the one request at a time that is asked, and counted, here: a page of them.
        // SAFETY: the kernel writes one aio_context_t to `context`, which is zero as it must be.
        let result = unsafe { libc::syscall(libc::SYS_io_setup, 1 as libc::c_uint, &raw mut context) };
        if result < 0 {
            let error = io::Error::last_os_error();
            let text = format!("no AIO context to notify guests with: {error}; raise sysctl fs.aio-max-nr");
            return Err(io::Error::new(error.kind(), text));
        }
        Ok(Arc::new(Signals { context, null }))
    }

    /// Adds one to an eventfd; one whose counter is full is signalled as it is. True when it was done.
    fn signal(&self, event: &File) -> bool {
        let request = Request {
            opcode: IOCB_CMD_PREAD,
            file: self.null.as_raw_fd() as u32,
            flags: IOCB_FLAG_RESFD,
            result_eventfd: event.as_raw_fd() as u32,
            ..Request::default()
        };
        let list = [&raw const request];
        // Full again after it was emptied: by other threads, whose signals got through meanwhile.
        for _ in 0..ATTEMPTS_MAX {
            // SAFETY: the context is ours until `drop`; the kernel reads one pointer from `list` and the request behind it,
            // both alive across the call, and neither reads nor writes a buffer of no bytes.
            let submitted =
                unsafe { libc::syscall(libc::SYS_io_submit, self.context, 1 as libc::c_long, list.as_ptr()) };
            if submitted == 1 {
                return true;
            }
            if io::Error::last_os_error().raw_os_error() != Some(libc::EAGAIN) {
                return false;
            }
            self.reap();
        }
        false
    }

    /// Empties the list of completions, which is full once in a hundred signals.
    #[cold]
    fn reap(&self) {
        let mut completions: [Completion; REAP] = [[0; 4]; REAP];
        loop {
            let none: *const libc::timespec = std::ptr::null();
            // SAFETY: the context is ours; the kernel writes at most REAP completions, for which there is room. It is asked
            // for at least none, and so does not wait.
            let count = unsafe {
                let (least, most) = (0 as libc::c_long, REAP as libc::c_long);
                let room = completions.as_mut_ptr();
                libc::syscall(libc::SYS_io_getevents, self.context, least, most, room, none)
            };
            if count < REAP as libc::c_long {
                return;
            }
        }
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        // Every request has completed, so this does not wait either.
        // SAFETY: the context is ours and used no more.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.context) };
    }
}

/// An eventfd by which the front end is told something.
#[derive(Debug)]
pub(super) struct Event {
    file: File,
    signals: Arc<Signals>,
}

impl Event {
    /// `file` was found to be an eventfd: see [`accept`].
    pub(super) fn new(file: File, signals: Arc<Signals>) -> Event {
        Event { file, signals }
    }

    /// Adds one to its counter, whatever the front end has done to it, without waiting. True when it was done.
    #[inline]
    pub(super) fn signal(&self) -> bool {
        self.signals.signal(&self.file)
    }
}

/// Reads an eventfd's counter without waiting, whatever its flags are: the front end may change them at any time.
pub(super) fn drain(event: &File) -> u64 {
    let mut count = [0; 8];
    let mut buffers = [IoSliceMut::new(&mut count)];
    match rustix::io::preadv2(event, &mut buffers, u64::MAX, ReadWriteFlags::NOWAIT) {
        Ok(8) => u64::from_ne_bytes(count),
        _ => 0,
    }
}

/// True when `file` is certainly an eventfd: polling or reading anything else could wait for whoever made it.
pub(super) fn is_eventfd(file: &File) -> bool {
    let kind = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()));
    kind.is_ok_and(|kind| kind.as_os_str() == "anon_inode:[eventfd]")
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};

    #[test]
    fn signals_are_counted_and_never_wait() {
        let file = File::from(eventfd(0, EventfdFlags::empty()).unwrap());
        assert!(is_eventfd(&file));
        let event = Event::new(file.try_clone().unwrap(), Signals::new().unwrap());
        // More than the kernel's list holds.
        for _ in 0..10_000 {
            assert!(event.signal());
        }
        assert_eq!(drain(&file), 10_000);
        assert_eq!(drain(&file), 0);
        // A blocking eventfd that is full: a write would wait here.
        rustix::io::write(&file, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        for _ in 0..1000 {
            assert!(event.signal());
        }
    }

    #[test]
    fn anything_else_is_not_signalled() {
        let null = File::open("/dev/null").unwrap();
        assert!(!is_eventfd(&null));
        assert!(!Event::new(null, Signals::new().unwrap()).signal());
    }

    #[test]
    fn several_threads_may_signal() {
        let file = File::from(eventfd(0, EventfdFlags::empty()).unwrap());
        let event = Event::new(file.try_clone().unwrap(), Signals::new().unwrap());
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..5000).for_each(|_| assert!(event.signal())));
            }
        });
        assert_eq!(drain(&file), 20_000);
    }
}
