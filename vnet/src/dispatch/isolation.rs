//! Noise isolation: shields dispatchers from the rest of the host (VNET/P+ section IV.C).
//!
//! The papers' lightweight kernel has no timer ticks, no other threads and no paging. Linux offers equivalents one by one: CPU
//! pinning, real-time priority, locked memory, exact timers, and busy-polled sockets. Settings of the whole host (isolated CPUs,
//! interrupt affinity, frequency scaling) are left to the administrator; see docs/tuning.md.

use std::io;
use std::num::NonZeroU64;
use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::mm::MlockAllFlags;

use crate::poll::Poller;

/// Highest real-time priority in Linux.
pub const PRIORITY_MAX: u32 = 99;

/// Isolation settings besides pinning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Isolation {
    /// Real-time priority (SCHED_FIFO), 1 to [`PRIORITY_MAX`]; `None`: an ordinary thread.
    pub priority: Option<u32>,
    /// Locks vnetd's memory so that it is never paged out.
    pub lock_memory: bool,
    /// Microseconds for which the kernel busy-polls the network device when a socket is empty; 0: off.
    pub busy_poll_us: u32,
    /// Maximum number of packets per busy poll; `None`: the kernel's default, 8.
    pub busy_poll_budget: Option<u32>,
}

/// Error of an isolation setting that the kernel refused.
#[derive(Debug, thiserror::Error)]
pub enum IsolationError {
    /// The CPU does not exist, or the process may not use it.
    #[error("cannot pin a dispatcher to CPU {cpu}: {error}; see 'nproc' and [dispatch] cpus")]
    Cpu {
        /// The CPU's number.
        cpu: usize,
        /// The kernel's error.
        error: io::Error,
    },
    /// The kernel refused the priority.
    #[error(
        "cannot give a dispatcher real-time priority {priority}: {error}; give vnetd CAP_SYS_NICE or LimitRTPRIO, or \
         remove [dispatch] priority"
    )]
    Priority {
        /// The configured priority.
        priority: u32,
        /// The kernel's error.
        error: io::Error,
    },
    /// The kernel refused to lock memory.
    #[error(
        "cannot lock memory: {0}; give vnetd CAP_IPC_LOCK or LimitMEMLOCK=infinity, or remove [dispatch] lock_memory"
    )]
    Memory(io::Error),
}

impl Isolation {
    /// Locks the process's memory. Untouched pages, mostly of guests, are not faulted in for it: each is locked on first use.
    pub(super) fn apply_to_process(&self) -> Result<(), IsolationError> {
        if !self.lock_memory {
            return Ok(());
        }
        rustix::mm::mlockall(MlockAllFlags::CURRENT | MlockAllFlags::FUTURE | MlockAllFlags::ONFAULT)
            .map_err(|error| IsolationError::Memory(error.into()))
    }

    /// Sets the calling thread's priority and the smallest timer slack.
    pub(super) fn apply_to_thread(&self) -> Result<(), IsolationError> {
        // The default slack of 50 us would double a T_sleep of 50 us. If the kernel refuses, the default slack stays.
        if let Err(error) = rustix::thread::set_current_timer_slack(NonZeroU64::new(1)) {
            tracing::debug!(%error, "cannot reduce the timer slack; sleeps may last 50 us longer");
        }
        let Some(priority) = self.priority else { return Ok(()) };
        let parameters = libc::sched_param { sched_priority: priority as libc::c_int };
        // SAFETY: 0 is the calling thread; the kernel reads the one `sched_param` passed.
        let result = unsafe {
            libc::sched_setscheduler(0, libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK, &raw const parameters)
        };
        if result < 0 {
            let error = io::Error::last_os_error();
            return Err(IsolationError::Priority { priority, error });
        }
        Ok(())
    }

    /// Enables busy polling of a dispatcher's sockets where possible. A failure only costs latency, so it is not an error.
    pub(super) fn apply_to_sockets<'fd>(
        &self,
        sockets: impl Iterator<Item = BorrowedFd<'fd>>,
        poller: &Poller,
    ) {
        if self.busy_poll_us == 0 {
            return;
        }
        let us = libc::c_int::try_from(self.busy_poll_us).unwrap_or(libc::c_int::MAX);
        for socket in sockets {
            if let Err(error) = busy_poll(socket, us, self.busy_poll_budget) {
                tracing::warn!(%error, "cannot busy-poll a link socket; give vnetd CAP_NET_ADMIN");
            }
        }
        if let Err(error) = poller.busy_poll(self.busy_poll_us) {
            tracing::info!(%error, "epoll does not busy-poll devices; that needs Linux 6.9");
        }
    }
}

fn busy_poll(socket: BorrowedFd<'_>, us: libc::c_int, budget: Option<u32>) -> io::Result<()> {
    let budget = budget.map(|budget| (libc::SO_BUSY_POLL_BUDGET, budget as libc::c_int));
    let options = [(libc::SO_BUSY_POLL, us), (libc::SO_PREFER_BUSY_POLL, 1)];
    for (option, value) in options.into_iter().chain(budget) {
        let len = size_of_val(&value) as libc::socklen_t;
        // SAFETY: `value` is readable for the stated `len` bytes.
        let result = unsafe {
            libc::setsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, option, (&raw const value).cast(), len)
        };
        if result < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// Checks that this process may pin a thread to a CPU.
///
/// # Errors
/// [`IsolationError::Cpu`].
pub fn check_cpu(cpu: usize) -> Result<(), IsolationError> {
    let thread = std::thread::spawn(move || pin(cpu));
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Pins the calling thread to one CPU.
pub(super) fn pin(cpu: usize) -> Result<(), IsolationError> {
    let mut set = rustix::thread::CpuSet::new();
    if cpu >= rustix::thread::CpuSet::MAX_CPU {
        return Err(IsolationError::Cpu { cpu, error: io::ErrorKind::InvalidInput.into() });
    }
    set.set(cpu);
    rustix::thread::sched_setaffinity(None, &set)
        .map_err(|error| IsolationError::Cpu { cpu, error: error.into() })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The scheduling policy and priority of the calling thread.
    fn scheduling() -> (libc::c_int, libc::c_int) {
        let mut parameters = libc::sched_param { sched_priority: 0 };
        // SAFETY: 0 is the calling thread; the kernel writes one `sched_param`.
        let policy = unsafe {
            assert_eq!(libc::sched_getparam(0, &raw mut parameters), 0);
            libc::sched_getscheduler(0)
        };
        (policy, parameters.sched_priority)
    }

    #[test]
    fn a_thread_gets_its_priority_and_timer_slack() {
        let thread = std::thread::spawn(|| {
            Isolation::default().apply_to_thread().unwrap();
            assert_eq!(rustix::thread::current_timer_slack().unwrap(), 1);
            assert_eq!(scheduling(), (libc::SCHED_OTHER, 0));
            let isolation = Isolation { priority: Some(7), ..Isolation::default() };
            match isolation.apply_to_thread() {
                Ok(()) => assert_eq!(scheduling(), (libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK, 7)),
                // The process lacks the privilege, or its control group has no real-time share.
                Err(error) => assert!(error.to_string().contains("real-time priority 7"), "{error}"),
            }
            let isolation = Isolation { priority: Some(PRIORITY_MAX + 1), ..Isolation::default() };
            assert!(isolation.apply_to_thread().is_err());
        });
        thread.join().unwrap();
    }

    #[test]
    fn pinning_to_a_missing_cpu_is_an_error() {
        assert!(pin(1023).unwrap_err().to_string().contains("cannot pin a dispatcher to CPU 1023"));
        assert!(pin(usize::MAX).is_err());
    }

    #[test]
    fn sockets_are_busy_polled_where_the_kernel_allows() {
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let poller = Poller::new().unwrap();
        let isolation = Isolation { busy_poll_us: 20, ..Isolation::default() };
        isolation.apply_to_sockets(std::iter::once(std::os::fd::AsFd::as_fd(&socket)), &poller);
        let isolation = Isolation { busy_poll_budget: Some(32), ..isolation };
        isolation.apply_to_sockets(std::iter::once(std::os::fd::AsFd::as_fd(&socket)), &poller);
        let (mut budget, mut len) = (0, size_of::<libc::c_int>() as libc::socklen_t);
        // SAFETY: the kernel writes at most `len` bytes, the size of `budget`.
        let result = unsafe {
            let (level, option) = (libc::SOL_SOCKET, libc::SO_BUSY_POLL_BUDGET);
            libc::getsockopt(socket.as_raw_fd(), level, option, (&raw mut budget).cast(), &raw mut len)
        };
        // Unchanged without CAP_NET_ADMIN or before Linux 5.11.
        assert!(result < 0 || [0, 8, 32].contains(&budget), "{budget}");
        // Waiting works whichever settings the kernel granted.
        poller.waker(1).watch(&socket).unwrap();
        poller.ring();
        poller.wait(None, |_| panic!("nothing was sent")).unwrap();
    }
}
