//! Events that wake threads: the library thread, and threads that wait for completions of an endpoint.
//!
//! Any thread that makes progress receives packets for all endpoints of the node. If it queues completions for an endpoint on which
//! another thread sleeps, it raises the event of that endpoint.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

/// An eventfd, which is readable while it is raised.
pub(crate) struct Event(OwnedFd);

/// What threads sleep on until an endpoint has completions: its event and the socket. The socket is readable when packets have
/// arrived that no thread has received yet.
pub(crate) struct Notice {
    event: Event,
    is_raised: bool,
    /// Epoll descriptor over the socket and the event, for applications that wait for several event sources.
    epoll: Option<OwnedFd>,
    /// Number of threads that sleep on the event.
    pub(crate) sleepers: u32,
    /// Time at which the last of these threads wakes by itself.
    pub(crate) until: u64,
}

fn owned(fd: RawFd) -> io::Result<OwnedFd> {
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just created this descriptor, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

impl Event {
    pub(crate) fn new() -> io::Result<Self> {
        // SAFETY: the call creates a descriptor, and accesses no memory of this process.
        Ok(Self(owned(unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) })?))
    }

    pub(crate) fn descriptor(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    pub(crate) fn raise(&self) {
        // SAFETY: the kernel reads eight bytes from an integer that outlives the call.
        unsafe { libc::write(self.descriptor(), std::ptr::from_ref(&1u64).cast(), 8) };
    }

    pub(crate) fn lower(&self) {
        let mut count = 0u64;
        // SAFETY: the kernel writes eight bytes into an integer that outlives the call.
        unsafe { libc::read(self.descriptor(), std::ptr::from_mut(&mut count).cast(), 8) };
    }
}

/// The notices of a node's endpoints.
#[derive(Default)]
pub(crate) struct Notices(Vec<(u16, Notice)>);

impl Notices {
    /// That of an endpoint, if threads have waited for it.
    pub(crate) fn get(&mut self, endpoint: u16) -> Option<&mut Notice> {
        self.0.iter_mut().find(|(number, _)| *number == endpoint).map(|(_, notice)| notice)
    }

    /// That of an endpoint, which is created if needed.
    pub(crate) fn get_or_new(&mut self, endpoint: u16) -> io::Result<&mut Notice> {
        let place = match self.0.iter().position(|(number, _)| *number == endpoint) {
            Some(place) => place,
            None => {
                self.0.push((endpoint, Notice::new()?));
                self.0.len() - 1
            }
        };
        Ok(&mut self.0[place].1)
    }

    /// Whether threads sleep that fulfil a condition.
    pub(crate) fn any_sleep(&self, is_meant: impl Fn(&Notice) -> bool) -> bool {
        self.0.iter().any(|(_, notice)| notice.sleepers > 0 && is_meant(notice))
    }

    /// Wakes the threads that sleep and fulfil a condition.
    pub(crate) fn wake(&mut self, is_meant: impl Fn(&Notice) -> bool) {
        let sleeping = self.0.iter_mut().map(|(_, notice)| notice);
        sleeping.filter(|notice| notice.sleepers > 0 && is_meant(notice)).for_each(Notice::raise);
    }

    /// Wakes threads that wait for completions, of endpoints that have some. `own`: the endpoint whose completions the caller takes.
    pub(crate) fn signal(&mut self, own: Option<u16>, has_completions: impl Fn(u16) -> bool) {
        for (number, notice) in &mut self.0 {
            if notice.is_awaited(own == Some(*number)) && has_completions(*number) {
                notice.raise();
            }
        }
    }
}

impl Notice {
    fn new() -> io::Result<Self> {
        Ok(Self { event: Event::new()?, is_raised: false, epoll: None, sleepers: 0, until: 0 })
    }

    /// Returns the epoll descriptor, and creates it if needed.
    pub(crate) fn watch(&mut self, socket: RawFd) -> io::Result<RawFd> {
        if let Some(epoll) = &self.epoll {
            return Ok(epoll.as_raw_fd());
        }
        // SAFETY: the call creates a descriptor, and accesses no memory of this process.
        let epoll = owned(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) })?;
        for fd in [socket, self.event()] {
            let mut wanted = libc::epoll_event { events: libc::EPOLLIN as u32, u64: 0 };
            // SAFETY: the kernel reads `wanted`, which outlives the call.
            let result = unsafe { libc::epoll_ctl(epoll.as_raw_fd(), libc::EPOLL_CTL_ADD, fd, &mut wanted) };
            if result != 0 {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(self.epoll.insert(epoll).as_raw_fd())
    }

    pub(crate) fn event(&self) -> RawFd {
        self.event.descriptor()
    }

    /// Whether a thread may wait for completions. `is_own`: the caller takes the completions of this endpoint itself, so only
    /// other threads that sleep in a call count.
    pub(crate) fn is_awaited(&self, is_own: bool) -> bool {
        self.sleepers > 0 || self.epoll.is_some() && !is_own
    }

    pub(crate) fn raise(&mut self) {
        if !std::mem::replace(&mut self.is_raised, true) {
            self.event.raise();
        }
    }

    pub(crate) fn lower(&mut self) {
        if std::mem::take(&mut self.is_raised) {
            self.event.lower();
        }
    }
}
