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
//!
//! Both signalling and reading wake every waiter of the eventfd inside the call, and the front end may have added 10^5 of them.
//! So each call is timed. If one takes long, all eventfds of its interface are left to the interface's own thread for [`AVOIDED`]: it
//! signals in place of the dispatchers, and it polls the queues, because kicks are neither read nor watched (`looks.rs`).

use std::fs::File;
use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::atomic::{
    AtomicBool, AtomicU64, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed, Ordering::Release,
};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use rustix::io::ReadWriteFlags;

use super::slow_work::{Slow, SlowWork};
use super::usage::{now_ms, processor_time};

/// Longest time for a call on an eventfd; an ordinary one takes a microsecond. A waiter costs 20 to 50 ns.
const SLOW: Duration = Duration::from_micros(100);
/// How long dispatchers do not touch an interface's eventfds after one was slow; at least. It costs them two slow calls in this time.
const AVOIDED: Duration = Duration::from_secs(10);
/// Slow calls take at most this part of a dispatcher.
const SHARE: u32 = 200;
/// How long an interface is suspected after a call that took long.
const SUSPECTED: Duration = Duration::from_secs(1);

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
    /// The interface's own thread, which signals slow eventfds.
    pub(super) slow: SlowWork,
    /// Shared by all eventfds of the interface.
    patience: Patience,
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
        Ok(Arc::new(Signals { context, null, slow: SlowWork::default(), patience: Patience::default() }))
    }

    /// True while the interface's own thread signals instead of dispatchers.
    pub(super) fn are_slow(&self) -> bool {
        self.patience.is_spent()
    }

    /// Makes all eventfds of the interface slow, or ordinary.
    #[cfg(test)]
    pub(super) fn set_slow(&self, slow: bool) {
        self.patience.avoided_until_ms.store(if slow { u64::MAX } else { 0 }, Relaxed);
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

/// How long calls on an interface's eventfds take. Dispatchers touch none of them while one is slow: the front end could replace an
/// eventfd as often as it is found slow.
#[derive(Debug, Default)]
struct Patience {
    /// Time on [`now_ms`] until which calls are timed exactly: one took long, but the thread may have been interrupted.
    suspected_until_ms: AtomicU64,
    /// Time until which dispatchers do not touch eventfds; 0: they do.
    avoided_until_ms: AtomicU64,
}

impl Patience {
    /// True while dispatchers must not touch the eventfds.
    #[inline]
    fn is_spent(&self) -> bool {
        is_before(&self.avoided_until_ms)
    }

    /// Makes a call on an eventfd, and times it.
    #[inline]
    fn time<R>(&self, call: impl FnOnce() -> R) -> R {
        if is_before(&self.suspected_until_ms) {
            return self.time_exactly(call).0;
        }
        let start = Instant::now();
        let result = call();
        if start.elapsed() > SLOW {
            self.suspected_until_ms.store(now_ms() + SUSPECTED.as_millis() as u64, Relaxed);
        }
        result
    }

    /// Times the call by the thread's CPU clock. Also returns whether the eventfd is slow.
    #[cold]
    fn time_exactly<R>(&self, call: impl FnOnce() -> R) -> (R, bool) {
        let start = processor_time();
        let result = call();
        let taken = processor_time().saturating_sub(start);
        let is_slow = taken > SLOW;
        if is_slow {
            // Still suspected afterwards, so that one more slow call suffices.
            let until_ms = now_ms() + AVOIDED.max(taken * SHARE).as_millis() as u64;
            self.avoided_until_ms.fetch_max(until_ms, Relaxed);
            self.suspected_until_ms.fetch_max(until_ms + SUSPECTED.as_millis() as u64, Relaxed);
        }
        (result, is_slow)
    }
}

/// Whether a time on [`now_ms`] is yet to come. A time of 0 is in the past, and costs no look at the clock.
#[inline]
fn is_before(until_ms: &AtomicU64) -> bool {
    let until_ms = until_ms.load(Relaxed);
    until_ms != 0 && now_ms() < until_ms
}

/// An eventfd that notifies the front end or its guest.
#[derive(Clone, Debug)]
pub(super) struct Event(Arc<Notifying>);

#[derive(Debug)]
struct Notifying {
    file: File,
    signals: Arc<Signals>,
    /// True while it waits for the interface's own thread.
    waits: AtomicBool,
}

impl Event {
    /// Wraps `file`, which must be an eventfd; see [`is_eventfd`].
    pub(super) fn new(file: File, signals: Arc<Signals>) -> Event {
        Event(Arc::new(Notifying { file, signals, waits: AtomicBool::new(false) }))
    }

    /// Adds one to the counter, now or soon, without blocking, whatever the front end has done to the eventfd. Returns true on
    /// success.
    #[inline]
    pub(super) fn signal(&self) -> bool {
        let Notifying { file, signals, .. } = &*self.0;
        if signals.patience.is_spent() {
            return self.signal_later();
        }
        signals.patience.time(|| signals.signal(file))
    }

    /// Has the interface's own thread signal.
    #[cold]
    fn signal_later(&self) -> bool {
        let Notifying { file, signals, waits, .. } = &*self.0;
        if waits.swap(true, AcqRel) {
            // The signal to come also tells the guest about this one.
            return true;
        }
        let own: Arc<dyn Slow> = self.0.clone();
        let later: Weak<dyn Slow> = Arc::downgrade(&own);
        if signals.slow.later(later) {
            return true;
        }
        waits.store(false, Release);
        signals.signal(file)
    }

    /// True while a signal waits for the interface's own thread. It is lost if the eventfd is dropped before.
    pub(super) fn waits(&self) -> bool {
        self.0.waits.load(Acquire)
    }
}

impl Slow for Notifying {
    fn carry_out(&self) {
        self.waits.swap(false, AcqRel);
        let (_, is_slow) = self.signals.patience.time_exactly(|| self.signals.signal(&self.file));
        if is_slow {
            // The kernel walks through the waiters with interrupts off, 11 ms for 10^5: no burst of such signals.
            self.signals.slow.allowance.forfeit_credit();
        }
    }
}

impl AsFd for Event {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.file.as_fd()
    }
}

/// An eventfd by which the guest notifies vnetd.
#[derive(Clone, Debug)]
pub(super) struct KickEvent(Arc<Kicking>);

#[derive(Debug)]
struct Kicking {
    file: File,
    signals: Arc<Signals>,
}

impl KickEvent {
    /// Wraps `file`, which should be an eventfd; see [`is_eventfd`].
    pub(super) fn new(file: File, signals: Arc<Signals>) -> KickEvent {
        KickEvent(Arc::new(Kicking { file, signals }))
    }

    /// True while the interface's eventfds are slow, so that dispatchers do not touch them.
    pub(super) fn is_slow(&self) -> bool {
        self.0.signals.are_slow()
    }

    /// Reads and resets the counter without blocking, whatever the front end has done to the eventfd. A slow eventfd is not
    /// read.
    pub(super) fn drain(&self) -> u64 {
        let Kicking { file, signals } = &*self.0;
        let patience = &signals.patience;
        if patience.is_spent() { 0 } else { patience.time(|| drain(file)) }
    }
}

impl AsFd for KickEvent {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.file.as_fd()
    }
}

/// Reads and resets an eventfd's counter without blocking, whatever flags the front end has set.
fn drain(event: &File) -> u64 {
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
        let signals = Signals::new().unwrap();
        // More signals than the kernel's completion list holds. Not by `Event`: where the machine is so busy that calls take long,
        // it leaves signals to the interface's own thread, which joins them.
        for _ in 0..10_000 {
            assert!(signals.signal(&file));
        }
        assert_eq!(drain(&file), 10_000);
        assert_eq!(drain(&file), 0);
        let event = Event::new(file.try_clone().unwrap(), signals);
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
        let signals = Signals::new().unwrap();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..5000).for_each(|_| assert!(signals.signal(&file))));
            }
        });
        assert_eq!(drain(&file), 20_000);
    }

    /// Who replaces an eventfd before it is found slow gains nothing.
    #[test]
    fn a_crowd_at_each_new_eventfd_costs_a_dispatcher_two_signals() {
        let signals = Signals::new().unwrap();
        let (file, _waiting, cost) = crowded(|file| assert!(signals.signal(file)));
        let taken = hundred(|| {
            let event = Event::new(file.try_clone().unwrap(), signals.clone());
            assert!(event.signal());
        });
        assert!(taken < 10 * cost, "{taken:?} for 100 eventfds with signals of {cost:?}");
        assert!(signals.patience.is_spent(), "kicks are not read either");
    }

    /// Epoll sets in which one eventfd has `count` waiters: one for each set and descriptor of the eventfd.
    fn waiters(file: &File, count: usize) -> (Vec<File>, Vec<std::os::fd::OwnedFd>) {
        use rustix::event::epoll;
        use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
        const DESCRIPTORS: usize = 250;
        let limit = getrlimit(Resource::Nofile);
        setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).unwrap();
        let files: Vec<_> = (0..DESCRIPTORS).map(|_| file.try_clone().unwrap()).collect();
        let sets = (0..count / DESCRIPTORS).map(|_| {
            let set = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
            for file in &files {
                epoll::add(&set, file, epoll::EventData::new_u64(0), epoll::EventFlags::IN).unwrap();
            }
            set
        });
        let sets = sets.collect();
        (files, sets)
    }

    /// An eventfd with 10^5 waiters, and the processor time of one call on it.
    fn crowded(call: impl Fn(&File)) -> (File, impl Sized, Duration) {
        let file = File::from(eventfd(0, EventfdFlags::NONBLOCK).unwrap());
        let waiting = waiters(&file, 100_000);
        let costs = (0..5).map(|_| {
            let start = processor_time();
            call(&file);
            processor_time() - start
        });
        let cost = costs.min().unwrap();
        assert!(cost > 2 * SLOW, "{cost:?} for one call: the test shows nothing");
        (file, waiting, cost)
    }

    /// Processor time that 100 calls take.
    fn hundred(mut call: impl FnMut()) -> Duration {
        let start = processor_time();
        (0..100).for_each(|_| call());
        processor_time() - start
    }

    #[test]
    fn a_crowd_of_waiters_costs_a_dispatcher_two_signals() {
        let signals = Signals::new().unwrap();
        let (file, _waiting, cost) = crowded(|file| assert!(signals.signal(file)));
        drain(&file);
        let event = Event::new(file.try_clone().unwrap(), signals.clone());
        let taken = hundred(|| assert!(event.signal()));
        assert!(taken < 10 * cost, "{taken:?} for 100 signals of {cost:?}");
        // The interface's own thread signals, after the last call as well.
        drain(&file);
        assert!(event.signal());
        let end = Instant::now() + Duration::from_secs(60);
        while drain(&file) == 0 {
            assert!(Instant::now() < end, "no signal");
        }
    }

    #[test]
    fn a_crowd_of_waiters_costs_a_dispatcher_two_reads() {
        let kick = |file: &File| rustix::io::write(file, &1u64.to_ne_bytes()).map(drop).unwrap();
        let (file, _waiting, cost) = crowded(|file| {
            kick(file);
            assert_eq!(drain(file), 1);
        });
        let kicks = KickEvent::new(file.try_clone().unwrap(), Signals::new().unwrap());
        let mut taken = Duration::ZERO;
        for _ in 0..100 {
            kick(&file);
            let start = processor_time();
            kicks.drain();
            taken += processor_time() - start;
        }
        assert!(taken < 10 * cost, "{taken:?} for 100 reads; a kick and a read take {cost:?}");
    }

    #[test]
    fn an_ordinary_eventfd_stays_with_the_dispatcher() {
        let file = File::from(eventfd(0, EventfdFlags::NONBLOCK).unwrap());
        let event = Event::new(file.try_clone().unwrap(), Signals::new().unwrap());
        let patience = &event.0.signals.patience;
        patience.suspected_until_ms.store(now_ms() + 1_000, Relaxed);
        assert!((0..100).all(|_| event.signal()));
        assert!(!patience.is_spent(), "100 us of processor time for a signal");
    }
}
