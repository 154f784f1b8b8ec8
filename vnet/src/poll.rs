//! Waiting for file descriptors (epoll), and the handle by which a port registers descriptors with its dispatcher.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};

/// One epoll set with an eventfd (the bell) to wake its waiter: a dispatcher sleeps on it.
#[derive(Clone, Debug)]
pub(crate) struct Poller {
    epoll: Arc<OwnedFd>,
    bell: Arc<OwnedFd>,
}

/// Maximum number of events per wait.
pub(crate) const EVENTS_MAX: usize = 64;

/// Token of the bell's event.
const BELL: u64 = u64::MAX;

impl Poller {
    /// An empty set.
    pub fn new() -> io::Result<Poller> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        // Edge-triggered: each write reports once, and the bell never has to be read.
        epoll::add(&epoll, &bell, EventData::new_u64(BELL), EventFlags::IN | EventFlags::ET)?;
        Ok(Poller { epoll: Arc::new(epoll), bell: Arc::new(bell) })
    }

    /// Sets NAPI busy polling: each wait polls the queues of network devices for `us` microseconds before it sleeps, with their
    /// interrupts off (Linux 6.9, `EPIOCSPARAMS`).
    ///
    /// # Errors
    /// The kernel does not support busy polling, or requires CAP_NET_ADMIN.
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
        // More packets per poll need CAP_NET_ADMIN (NAPI_POLL_WEIGHT).
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
        // An eventfd write fails only when the counter is full, and in that case the waiter wakes anyway.
        let _ = rustix::io::write(&*self.bell, &1u64.to_ne_bytes());
    }

    /// Watches another set: this one wakes while any event of the other waits to be taken. Level-triggered, because the other may
    /// keep events beyond [`EVENTS_MAX`].
    pub(crate) fn nest(&self, other: &Poller) -> io::Result<()> {
        Ok(epoll::add(&self.epoll, &other.epoll, EventData::new_u64(0), EventFlags::IN)?)
    }

    /// Ends [`Poller::nest`], if `other` is watched.
    pub(crate) fn forget(&self, other: &Poller) {
        let _ = epoll::delete(&self.epoll, &other.epoll);
    }

    /// A handle for registering file descriptors under `token`.
    pub fn waker(&self, token: u64) -> Waker {
        assert_ne!(token, BELL, "token reserved for the bell");
        Waker { epoll: self.epoll.clone(), token }
    }

    /// Waits at most `timeout` (`None`: without limit) and calls `ready` with the token of each event.
    pub fn wait(&self, timeout: Option<std::time::Duration>, mut ready: impl FnMut(u64)) -> io::Result<()> {
        self.wait_for_input(timeout, |token, _| ready(token))
    }

    /// Like [`Poller::wait`]; `ready` also gets whether the descriptor is readable at this moment. The kernel reports an event
    /// only while its condition holds, so input that was read since the event is not reported. Other events are errors, such as
    /// an entry in a socket's error queue.
    pub fn wait_for_input(
        &self,
        timeout: Option<std::time::Duration>,
        mut ready: impl FnMut(u64, bool),
    ) -> io::Result<()> {
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
                ready(token, { event.flags }.contains(EventFlags::IN));
            }
        }
        Ok(())
    }
}

/// Registers a port's file descriptors with the dispatcher that serves it.
#[derive(Clone, Debug)]
pub struct Waker {
    epoll: Arc<OwnedFd>,
    token: u64,
}

impl Waker {
    /// Watches `fd` for input, edge-triggered: each event wakes the dispatcher once, even if `fd` is not read.
    pub fn watch(&self, fd: impl AsFd) -> io::Result<()> {
        Ok(epoll::add(&self.epoll, fd, EventData::new_u64(self.token), EventFlags::IN | EventFlags::ET)?)
    }

    /// Watches `fd` for input and output, edge-triggered.
    pub(crate) fn watch_both(&self, fd: impl AsFd) -> io::Result<()> {
        let flags = EventFlags::IN | EventFlags::OUT | EventFlags::ET;
        Ok(epoll::add(&self.epoll, fd, EventData::new_u64(self.token), flags)?)
    }

    /// Stops watching `fd`, if it is watched.
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

    #[test]
    fn a_nested_set_wakes_until_its_events_are_taken() {
        let (outer, inner) = (Poller::new().unwrap(), Poller::new().unwrap());
        outer.nest(&inner).unwrap();
        let woken = || {
            let mut woken = false;
            outer.wait(Some(Duration::ZERO), |_| woken = true).unwrap();
            woken
        };
        // The bell of a new set is quiet.
        assert!(!woken());
        inner.ring();
        assert!(woken() && woken(), "the event was not taken");
        inner.wait(Some(Duration::ZERO), |_| panic!("only the bell")).unwrap();
        assert!(!woken());
        inner.ring();
        outer.forget(&inner);
        assert!(!woken());
        outer.ring();
        outer.wait(None, |_| panic!("forgotten")).unwrap();
    }
}
