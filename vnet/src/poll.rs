//! Waiting for file descriptors (epoll), and the handle by which a port asks its dispatcher to watch one.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};

/// One epoll set with a bell: what a dispatcher sleeps on.
#[derive(Clone, Debug)]
pub struct Poller {
    epoll: Arc<OwnedFd>,
    bell: Arc<OwnedFd>,
}

/// Most tokens that one wait reports.
pub(crate) const EVENTS_MAX: usize = 64;

/// Token under which the bell reports.
const BELL: u64 = u64::MAX;

impl Poller {
    /// A new, empty set.
    pub fn new() -> io::Result<Poller> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        // Edge-triggered, so that the bell never has to be read: every write reports once.
        epoll::add(&epoll, &bell, EventData::new_u64(BELL), EventFlags::IN | EventFlags::ET)?;
        Ok(Poller { epoll: Arc::new(epoll), bell: Arc::new(bell) })
    }

    /// Has waiting look into the queues of network devices itself for so many microseconds before it sleeps, where the kernel
    /// can (Linux 6.9, `EPIOCSPARAMS`; drivers with NAPI). Their interrupts stay off meanwhile.
    ///
    /// # Errors
    /// The kernel cannot, or wants CAP_NET_ADMIN for it.
    pub fn busy_poll(&self, us: u32) -> io::Result<()> {
        /// `struct epoll_params` of linux/eventpoll.h.
        #[repr(C)]
        struct Params {
            busy_poll_usecs: u32,
            busy_poll_budget: u16,
            prefer_busy_poll: u8,
            pad: u8,
        }
        // _IOW(0x8A, 0x01, struct epoll_params)
        const EPIOCSPARAMS: libc::c_ulong = 0x4008_8a01;
        // Above this number of packets a look needs CAP_NET_ADMIN (NAPI_POLL_WEIGHT).
        const BUDGET: u16 = 64;
        let params = Params {
            busy_poll_usecs: us,
            busy_poll_budget: BUDGET,
            prefer_busy_poll: u8::from(us != 0),
            pad: 0,
        };
        // SAFETY: the kernel reads one `epoll_params` from `params`, which has its layout.
        let result = unsafe { libc::ioctl(self.epoll.as_raw_fd(), EPIOCSPARAMS, &raw const params) };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Wakes the thread in [`Poller::wait`], or makes its next call return at once.
    pub fn ring(&self) {
        // An eventfd write fails only when the counter is full, and then the bell is ringing already.
        let _ = rustix::io::write(&*self.bell, &1u64.to_ne_bytes());
    }

    /// A handle that lets a port have file descriptors watched under `token`.
    pub fn waker(&self, token: u64) -> Waker {
        assert_ne!(token, BELL, "the bell's token is taken");
        Waker { epoll: self.epoll.clone(), token }
    }

    /// Waits for at most `timeout` (`None`: for ever) and calls `ready` with each token that has something to do.
    pub fn wait(&self, timeout: Option<std::time::Duration>, mut ready: impl FnMut(u64)) -> io::Result<()> {
        let timeout =
            timeout.map(|t| Timespec { tv_sec: t.as_secs() as i64, tv_nsec: i64::from(t.subsec_nanos()) });
        let mut room = [const { MaybeUninit::<epoll::Event>::uninit() }; EVENTS_MAX];
        let events = match epoll::wait(&self.epoll, &mut room, timeout.as_ref()) {
            Ok((events, _)) => events,
            Err(rustix::io::Errno::INTR) => &mut [],
            Err(error) => return Err(error.into()),
        };
        for event in events {
            let token = { event.data }.u64();
            if token != BELL {
                ready(token);
            }
        }
        Ok(())
    }
}

/// Lets a port have file descriptors watched by the dispatcher that serves it.
#[derive(Clone, Debug)]
pub struct Waker {
    epoll: Arc<OwnedFd>,
    token: u64,
}

impl Waker {
    /// Watches `fd` edge-triggered: each new event wakes the dispatcher once, and the descriptor need not be read.
    pub fn watch(&self, fd: impl AsFd) -> io::Result<()> {
        Ok(epoll::add(&self.epoll, fd, EventData::new_u64(self.token), EventFlags::IN | EventFlags::ET)?)
    }

    /// Watches `fd` as [`Waker::watch`] does, and for room to write, too.
    pub fn watch_both(&self, fd: impl AsFd) -> io::Result<()> {
        let flags = EventFlags::IN | EventFlags::OUT | EventFlags::ET;
        Ok(epoll::add(&self.epoll, fd, EventData::new_u64(self.token), flags)?)
    }

    /// Stops watching `fd`. One that is not watched is no error.
    pub fn forget(&self, fd: impl AsFd) {
        let _ = epoll::delete(&self.epoll, fd);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn each_write_wakes_once() {
        let poller = Poller::new().unwrap();
        let fd = eventfd(0, EventfdFlags::empty()).unwrap();
        let waker = poller.waker(7);
        waker.watch(&fd).unwrap();
        for _ in 0..3 {
            rustix::io::write(&fd, &1u64.to_ne_bytes()).unwrap();
            let mut got = vec![];
            poller.wait(Some(Duration::ZERO), |t| got.push(t)).unwrap();
            assert_eq!(got, [7]);
            poller.wait(Some(Duration::ZERO), |t| got.push(t)).unwrap();
            assert_eq!(got, [7]);
        }
        waker.forget(fd.as_fd());
        rustix::io::write(&fd, &1u64.to_ne_bytes()).unwrap();
        poller.ring();
        poller.wait(None, |_| panic!("forgotten")).unwrap();
    }
}
