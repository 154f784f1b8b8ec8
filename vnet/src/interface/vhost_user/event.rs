//! Eventfds shared with the front end: notifies the guest and reads its kicks without ever blocking.
//!
//! A write to an eventfd whose counter is full blocks until it is read, unless `O_NONBLOCK` is set. That flag belongs to the open
//! file, which the front end shares: it could clear the flag, fill the counter, and block a dispatcher forever. Checking first
//! does not help, because the front end could act between check and write. (Reads are safe: eventfds support `RWF_NOWAIT` for
//! reads, though not for writes.)
//!
//! Inside the kernel, signalling an eventfd never blocks, and asynchronous I/O gives access to that: a request with
//! `IOCB_FLAG_RESFD` signals an eventfd when it completes (io_submit(2)). So [`Signals`] submits reads of zero bytes from
//! `/dev/null`, which complete before the call returns.

use std::fs::File;
use std::io::{self, IoSliceMut};
use std::os::fd::AsRawFd;
use std::sync::Arc;

use rustix::io::ReadWriteFlags;

/// Number of completions that one system call reaps from the kernel's list. They carry no information; the list only must not
/// fill up.
const REAP: usize = 64;
/// Maximum number of attempts to signal while other threads keep filling that list.
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

/// Signals eventfds without ever blocking. Several threads may use it concurrently.
#[derive(Debug)]
pub(super) struct Signals {
    /// `aio_context_t`.
    context: libc::c_ulong,
    null: File,
}

impl Signals {
    /// # Errors
    /// The system is out of AIO contexts (`fs.aio-max-nr`) or file descriptors.
    pub(super) fn new() -> io::Result<Arc<Signals>> {
        let null = File::open("/dev/null")?;
        let mut context: libc::c_ulong = 0;
        // The limit counts the one request asked for; the kernel allocates a page of them. SAFETY: the kernel writes one
        // aio_context_t to `context`, which must be zero and is.
        let result = unsafe { libc::syscall(libc::SYS_io_setup, 1 as libc::c_uint, &raw mut context) };
        if result < 0 {
            let error = io::Error::last_os_error();
            let text = format!("no AIO context to notify guests with: {error}; raise sysctl fs.aio-max-nr");
            return Err(io::Error::new(error.kind(), text));
        }
        Ok(Arc::new(Signals { context, null }))
    }

    /// Adds one to an eventfd. A full counter stays unchanged and is readable anyway. Returns true on success.
    fn signal(&self, event: &File) -> bool {
        let request = Request {
            opcode: IOCB_CMD_PREAD,
            file: self.null.as_raw_fd() as u32,
            flags: IOCB_FLAG_RESFD,
            result_eventfd: event.as_raw_fd() as u32,
            ..Request::default()
        };
        let list = [&raw const request];
        // The list can be full again after reaping if other threads signal in between.
        for _ in 0..ATTEMPTS_MAX {
            // SAFETY: `self` owns the context until `drop`; the kernel reads one pointer from `list` and the request it points
            // to, both alive across the call, and accesses no buffer for zero bytes.
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

    /// Empties the completion list, which fills up about once in a hundred signals.
    #[cold]
    fn reap(&self) {
        let mut completions: [Completion; REAP] = [[0; 4]; REAP];
        loop {
            let none: *const libc::timespec = std::ptr::null();
            // SAFETY: `self` owns the context; the kernel writes at most REAP completions, for which there is space. With a
            // minimum of zero completions it does not wait.
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
        // All requests have completed, so this does not block. SAFETY: `self` owns the context, which is not used afterwards.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.context) };
    }
}

/// An eventfd that notifies the front end or its guest.
#[derive(Debug)]
pub(super) struct Event {
    file: File,
    signals: Arc<Signals>,
}

impl Event {
    /// Wraps `file`, which must be an eventfd; see [`is_eventfd`].
    pub(super) fn new(file: File, signals: Arc<Signals>) -> Event {
        Event { file, signals }
    }

    /// Adds one to the counter without blocking, whatever flags the front end has set. Returns true on success.
    #[inline]
    pub(super) fn signal(&self) -> bool {
        self.signals.signal(&self.file)
    }
}

/// Reads and resets an eventfd's counter without blocking, whatever flags the front end has set.
pub(super) fn drain(event: &File) -> u64 {
    let mut count = [0; 8];
    let mut buffers = [IoSliceMut::new(&mut count)];
    match rustix::io::preadv2(event, &mut buffers, u64::MAX, ReadWriteFlags::NOWAIT) {
        Ok(8) => u64::from_ne_bytes(count),
        _ => 0,
    }
}

/// True if `file` is certainly an eventfd. Polling or reading another kind of file could block on the process that created it.
pub(super) fn is_eventfd(file: &File) -> bool {
    let kind = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()));
    kind.is_ok_and(|kind| kind.as_os_str() == "anon_inode:[eventfd]")
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};

    #[test]
    fn signals_are_counted_and_never_block() {
        let file = File::from(eventfd(0, EventfdFlags::empty()).unwrap());
        assert!(is_eventfd(&file));
        let event = Event::new(file.try_clone().unwrap(), Signals::new().unwrap());
        // More signals than the kernel's completion list holds.
        for _ in 0..10_000 {
            assert!(event.signal());
        }
        assert_eq!(drain(&file), 10_000);
        assert_eq!(drain(&file), 0);
        // A full, blocking eventfd: a write would block here.
        rustix::io::write(&file, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        for _ in 0..1000 {
            assert!(event.signal());
        }
    }

    #[test]
    fn signals_only_eventfds() {
        let null = File::open("/dev/null").unwrap();
        assert!(!is_eventfd(&null));
        assert!(!Event::new(null, Signals::new().unwrap()).signal());
    }

    #[test]
    fn several_threads_can_signal() {
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
