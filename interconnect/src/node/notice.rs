//! A descriptor for applications that wait for several event sources: it is readable when there may be completions to take.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

/// An epoll descriptor over the socket and an eventfd. The socket is readable when packets have arrived; the library thread
/// signals the eventfd when it has received packets before the application could.
pub(super) struct Notice {
    epoll: OwnedFd,
    event: OwnedFd,
    is_raised: bool,
}

fn owned(fd: RawFd) -> io::Result<OwnedFd> {
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just created this descriptor, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

impl Notice {
    pub(super) fn new(socket: RawFd) -> io::Result<Self> {
        // SAFETY: the call creates a descriptor, and accesses no memory of this process.
        let epoll = owned(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) })?;
        // SAFETY: the call creates a descriptor, and accesses no memory of this process.
        let event = owned(unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) })?;
        for fd in [socket, event.as_raw_fd()] {
            let mut wanted = libc::epoll_event { events: libc::EPOLLIN as u32, u64: 0 };
            // SAFETY: the kernel reads `wanted`, which outlives the call.
            let result = unsafe { libc::epoll_ctl(epoll.as_raw_fd(), libc::EPOLL_CTL_ADD, fd, &mut wanted) };
            if result != 0 {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(Self { epoll, event, is_raised: false })
    }

    pub(super) fn descriptor(&self) -> RawFd {
        self.epoll.as_raw_fd()
    }

    pub(super) fn event(&self) -> RawFd {
        self.event.as_raw_fd()
    }

    pub(super) fn raise(&mut self) {
        if !std::mem::replace(&mut self.is_raised, true) {
            // SAFETY: the kernel reads eight bytes from an integer that outlives the call.
            unsafe { libc::write(self.event(), std::ptr::from_ref(&1u64).cast(), 8) };
        }
    }

    pub(super) fn lower(&mut self) {
        if std::mem::take(&mut self.is_raised) {
            let mut count = 0u64;
            // SAFETY: the kernel writes eight bytes into an integer that outlives the call.
            unsafe { libc::read(self.event(), std::ptr::from_mut(&mut count).cast(), 8) };
        }
    }
}
