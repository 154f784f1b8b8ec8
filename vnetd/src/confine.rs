//! Confinement: before vnetd starts a thread or reads a foreign byte, it gives up what it never needs.
//!
//! *No new privileges* (prctl(2)) and *system calls by an allow list* (seccomp(2)), inherited by all threads. vnetd starts no
//! program but its helper, which runs by then, traces no process, enters no namespace, mounts nothing, loads no kernel module or kernel
//! program, changes no user and sets no clock. Code that an attacker smuggles in cannot, either, even where vnetd runs as root without a service manager.
//! A call that is not in the list fails with EPERM. The helper's list also has what it does for vnetd.
//!
//! The kernel decides most calls by a bitmap (Linux 5.11); only those whose arguments are checked run the filter.
//!
//! *No files* (landlock(7)) for threads that read what guests and other hosts send: dispatchers, and threads of links. Other
//! threads cannot be confined in this way, because Landlock also forbids `pid:N` namespaces and mounts.

use std::collections::BTreeMap;
use std::sync::Once;

use landlock::{
    ABI, Access, AccessFs, Ruleset, RulesetAttr, RulesetCreatedAttr, RulesetError, RulesetStatus,
};
use libc::c_long;
use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch, apply_filter,
};

/// Bits of clone(2) that make namespaces.
const NEW_NAMESPACES: u64 = (libc::CLONE_NEWNS
    | libc::CLONE_NEWCGROUP
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET) as u32 as u64;
/// Address families of sockets: local, IP, netlink. The helper opens packet sockets, too.
const FAMILIES: [libc::c_int; 4] = [libc::AF_UNIX, libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK];
/// Commands of bpf(2) (linux/bpf.h) on maps by their descriptors: look up, update, delete, next key, information about the map, and take
/// from a queue. The helper makes maps, and loads and attaches programs.
const ON_MAPS: [u64; 6] = [1, 2, 3, 4, 15, 21];

/// System calls that are allowed with any arguments.
#[rustfmt::skip]
const ALLOWED: &[c_long] = &[
    // Memory.
    libc::SYS_brk, libc::SYS_madvise, libc::SYS_membarrier, libc::SYS_memfd_create, libc::SYS_mlock, libc::SYS_mlock2,
    libc::SYS_mlockall, libc::SYS_mremap, libc::SYS_munlock, libc::SYS_munlockall, libc::SYS_munmap,
    // Threads and this process.
    libc::SYS_capget, libc::SYS_exit, libc::SYS_exit_group, libc::SYS_futex, libc::SYS_get_robust_list, libc::SYS_getcpu,
    libc::SYS_getegid, libc::SYS_geteuid, libc::SYS_getgid, libc::SYS_getgroups, libc::SYS_getpid, libc::SYS_getppid,
    libc::SYS_getpriority, libc::SYS_getresgid, libc::SYS_getresuid, libc::SYS_getrusage, libc::SYS_gettid,
    libc::SYS_getuid, libc::SYS_prctl, libc::SYS_prlimit64, libc::SYS_restart_syscall, libc::SYS_rseq,
    libc::SYS_sched_get_priority_max, libc::SYS_sched_get_priority_min, libc::SYS_sched_getaffinity,
    libc::SYS_sched_getattr, libc::SYS_sched_getparam, libc::SYS_sched_getscheduler, libc::SYS_sched_setaffinity,
    libc::SYS_sched_setattr, libc::SYS_sched_setparam, libc::SYS_sched_setscheduler, libc::SYS_sched_yield,
    libc::SYS_set_robust_list, libc::SYS_set_tid_address, libc::SYS_setpriority, libc::SYS_sysinfo, libc::SYS_times,
    libc::SYS_umask, libc::SYS_uname,
    // Signals.
    libc::SYS_rt_sigaction, libc::SYS_rt_sigpending, libc::SYS_rt_sigprocmask, libc::SYS_rt_sigreturn,
    libc::SYS_rt_sigsuspend, libc::SYS_rt_sigtimedwait, libc::SYS_sigaltstack, libc::SYS_tgkill,
    // Files.
    libc::SYS_close, libc::SYS_close_range, libc::SYS_copy_file_range, libc::SYS_dup, libc::SYS_dup3,
    libc::SYS_faccessat, libc::SYS_faccessat2, libc::SYS_fallocate, libc::SYS_fchmod, libc::SYS_fchmodat,
    libc::SYS_fchown, libc::SYS_fchownat, libc::SYS_fcntl, libc::SYS_fdatasync, libc::SYS_flock, libc::SYS_fstat,
    libc::SYS_fstatfs, libc::SYS_fsync, libc::SYS_ftruncate, libc::SYS_getcwd, libc::SYS_getdents64, libc::SYS_ioctl,
    libc::SYS_linkat, libc::SYS_lseek, libc::SYS_mkdirat, libc::SYS_newfstatat, libc::SYS_openat, libc::SYS_openat2,
    libc::SYS_pread64, libc::SYS_preadv, libc::SYS_preadv2, libc::SYS_pwrite64, libc::SYS_pwritev, libc::SYS_pwritev2,
    libc::SYS_read, libc::SYS_readlinkat, libc::SYS_readv, libc::SYS_renameat, libc::SYS_renameat2, libc::SYS_sendfile,
    libc::SYS_splice, libc::SYS_statfs, libc::SYS_statx, libc::SYS_symlinkat, libc::SYS_unlinkat, libc::SYS_utimensat,
    libc::SYS_write, libc::SYS_writev,
    // Events and time.
    libc::SYS_clock_getres, libc::SYS_clock_gettime, libc::SYS_clock_nanosleep, libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl, libc::SYS_epoll_pwait, libc::SYS_epoll_pwait2, libc::SYS_eventfd2, libc::SYS_getrandom,
    libc::SYS_gettimeofday, libc::SYS_inotify_add_watch, libc::SYS_inotify_init1, libc::SYS_inotify_rm_watch,
    libc::SYS_nanosleep, libc::SYS_pidfd_open, libc::SYS_pipe2, libc::SYS_ppoll, libc::SYS_pselect6,
    libc::SYS_timerfd_create, libc::SYS_timerfd_gettime, libc::SYS_timerfd_settime,
    // Asynchronous I/O, by which guests are notified.
    libc::SYS_io_destroy, libc::SYS_io_getevents, libc::SYS_io_setup, libc::SYS_io_submit,
    // Confinement itself.
    libc::SYS_landlock_create_ruleset, libc::SYS_landlock_restrict_self,
    // Sockets.
    libc::SYS_accept, libc::SYS_accept4, libc::SYS_bind, libc::SYS_connect, libc::SYS_getpeername,
    libc::SYS_getsockname, libc::SYS_getsockopt, libc::SYS_listen, libc::SYS_recvfrom, libc::SYS_recvmmsg,
    libc::SYS_recvmsg, libc::SYS_sendmmsg, libc::SYS_sendmsg, libc::SYS_sendto, libc::SYS_setsockopt,
    libc::SYS_shutdown, libc::SYS_socketpair,
    // Answered by ENOSYS, see `allow_only`.
    libc::SYS_clone3,
];

/// The same for calls that only x86-64 has.
#[cfg(target_arch = "x86_64")]
#[rustfmt::skip]
const ALLOWED_HERE: &[c_long] = &[
    libc::SYS_access, libc::SYS_arch_prctl, libc::SYS_chmod, libc::SYS_chown, libc::SYS_dup2, libc::SYS_epoll_create,
    libc::SYS_epoll_wait, libc::SYS_eventfd, libc::SYS_getdents, libc::SYS_getrlimit, libc::SYS_inotify_init,
    libc::SYS_lchown, libc::SYS_link, libc::SYS_lstat, libc::SYS_mkdir, libc::SYS_open, libc::SYS_pipe, libc::SYS_poll,
    libc::SYS_readlink, libc::SYS_rename, libc::SYS_rmdir, libc::SYS_select, libc::SYS_setrlimit, libc::SYS_stat,
    libc::SYS_symlink, libc::SYS_time, libc::SYS_unlink,
];
#[cfg(not(target_arch = "x86_64"))]
const ALLOWED_HERE: &[c_long] = &[];

/// A process with a list of its own.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Who {
    /// vnetd itself.
    Vnetd,
    /// Its privileged helper.
    Helper,
}

/// Confines this process. Threads that exist already are not confined.
pub fn begin(who: Who) {
    // A build for tests ends at a call that is missing in the list (SIGSYS): code may tolerate an error.
    let refusal = SeccompAction::Errno(libc::EPERM as u32);
    if let Err(error) = allow_only(who, if cfg!(debug_assertions) { SeccompAction::Trap } else { refusal }) {
        tracing::warn!("vnetd is not confined to the system calls that it needs: {error}");
    }
    vnet::threads::confine_by(open_no_files);
}

/// Allows this thread, and those that it will start, the calls in the list, with `otherwise` for all others.
///
/// # Errors
/// The kernel has no seccomp filters.
fn allow_only(who: Who, otherwise: SeccompAction) -> Result<(), seccompiler::Error> {
    // The flags of clone3 are in memory, out of a filter's reach. The C library then uses clone.
    let clone3 = BTreeMap::from([(libc::SYS_clone3, vec![])]);
    apply_filter(&program(clone3, SeccompAction::Allow, SeccompAction::Errno(libc::ENOSYS as u32))?)?;
    // Last, because it allows no further filter.
    apply_filter(&allow_list(who, otherwise)?)
}

/// Has the calling thread, and those that it starts, open no file from now on. Kernels without Landlock ignore this.
fn open_no_files() {
    static TOLD: Once = Once::new();
    let status = open_none();
    if !matches!(status, Ok(RulesetStatus::FullyEnforced | RulesetStatus::PartiallyEnforced)) {
        TOLD.call_once(|| tracing::debug!("the kernel does not keep dispatchers from files: {status:?}"));
    }
}

fn open_none() -> Result<RulesetStatus, RulesetError> {
    let nothing = Ruleset::default().handle_access(AccessFs::from_all(ABI::V5))?.create()?;
    Ok(nothing.no_new_privs(true).restrict_self()?.ruleset)
}

/// The allow list, with `otherwise` for all other calls.
fn allow_list(who: Who, otherwise: SeccompAction) -> Result<BpfProgram, BackendError> {
    let any = ALLOWED.iter().chain(ALLOWED_HERE).map(|call| (*call, vec![]));
    let mut rules: BTreeMap<_, _> = any.collect();
    let equal = |argument, value| bits(argument, u64::from(u32::MAX), value);
    let families = FAMILIES.iter().chain((who == Who::Helper).then_some(&libc::AF_PACKET));
    let families = families.map(|family| equal(0, *family as u64)).collect::<Result<_, _>>()?;
    rules.insert(libc::SYS_socket, families);
    rules.insert(libc::SYS_bpf, ON_MAPS.iter().map(|command| equal(0, *command)).collect::<Result<_, _>>()?);
    // A new vnetd that has failed to take over is killed.
    rules.insert(libc::SYS_pidfd_send_signal, vec![equal(1, libc::SIGKILL as u64)?]);
    rules.insert(libc::SYS_clone, vec![bits(0, NEW_NAMESPACES, 0)?]);
    if who == Who::Helper {
        // Network namespaces of containers, and one for each of the kernel's VXLAN devices.
        rules.insert(libc::SYS_unshare, vec![equal(0, libc::CLONE_NEWNET as u64)?]);
        rules.insert(libc::SYS_setns, vec![equal(1, libc::CLONE_NEWNET as u64)?]);
        // Only new mounts: no bind mount, move or change of propagation.
        rules.insert(libc::SYS_mount, vec![equal(3, 0)?]);
        rules.insert(libc::SYS_umount2, vec![]);
        // Loads and attaches the programs of the kernel's own path.
        rules.insert(libc::SYS_bpf, vec![]);
    }
    // Memory is writable or executable. The C library maps modules of its name service.
    let (write, execute) = (libc::PROT_WRITE as u64, libc::PROT_EXEC as u64);
    rules.insert(libc::SYS_mmap, vec![bits(2, write, 0)?, bits(2, execute, 0)?]);
    rules.insert(libc::SYS_mprotect, vec![bits(2, execute, 0)?]);
    program(rules, otherwise, SeccompAction::Allow)
}

/// A rule for one argument: these bits have this value.
fn bits(argument: u8, mask: u64, value: u64) -> Result<SeccompRule, BackendError> {
    let op = SeccompCmpOp::MaskedEq(mask);
    SeccompRule::new(vec![SeccompCondition::new(argument, SeccompCmpArgLen::Dword, op, value)?])
}

fn program(
    rules: BTreeMap<i64, Vec<SeccompRule>>,
    otherwise: SeccompAction,
    matched: SeccompAction,
) -> Result<BpfProgram, BackendError> {
    let here = TargetArch::try_from(std::env::consts::ARCH)?;
    SeccompFilter::new(rules, otherwise, matched, here)?.try_into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;

    fn failed(result: c_long) -> Option<i32> {
        (result < 0).then(|| io::Error::last_os_error().raw_os_error().unwrap())
    }

    /// Runs on a thread of its own: a filter cannot be removed.
    #[test]
    fn what_vnetd_never_does_is_refused() {
        std::thread::spawn(|| {
            allow_only(Who::Vnetd, SeccompAction::Errno(libc::EPERM as u32)).unwrap();
            let path = c"/bin/true".as_ptr();
            let none = std::ptr::null::<libc::c_char>();
            // SAFETY: all pointers are to strings that live across the calls, or null; no call changes this process's memory.
            let refused = unsafe {
                [
                    ("execve", libc::syscall(libc::SYS_execve, path, &raw const none, &raw const none)),
                    ("ptrace", libc::syscall(libc::SYS_ptrace, libc::PTRACE_TRACEME, 0, 0, 0)),
                    ("kill", libc::syscall(libc::SYS_kill, libc::getpid(), 0)),
                    ("setuid", libc::syscall(libc::SYS_setuid, 0)),
                    ("chroot", libc::syscall(libc::SYS_chroot, c"/".as_ptr())),
                    ("keyctl", libc::syscall(libc::SYS_keyctl, 0, 0)),
                    ("io_uring_setup", libc::syscall(libc::SYS_io_uring_setup, 1, none)),
                    ("user namespace", libc::syscall(libc::SYS_unshare, libc::CLONE_NEWUSER)),
                    ("network namespace", libc::syscall(libc::SYS_unshare, libc::CLONE_NEWNET)),
                    ("setns", libc::syscall(libc::SYS_setns, 0, libc::CLONE_NEWNET)),
                    ("umount", libc::syscall(libc::SYS_umount2, path, 0)),
                    ("AF_VSOCK", libc::syscall(libc::SYS_socket, libc::AF_VSOCK, libc::SOCK_STREAM, 0)),
                    ("AF_PACKET", libc::syscall(libc::SYS_socket, libc::AF_PACKET, libc::SOCK_RAW, 0)),
                    ("bind mount", libc::syscall(libc::SYS_mount, path, path, none, libc::MS_BIND, none)),
                ]
            };
            for (what, result) in refused {
                assert_eq!((what, result), (what, -1));
            }
            let anonymous = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let both = libc::PROT_WRITE | libc::PROT_EXEC;
            // SAFETY: the call is refused; otherwise it would make a mapping that nothing uses.
            let mapped = unsafe { libc::mmap(std::ptr::null_mut(), 4096, both, anonymous, -1, 0) };
            assert_eq!((mapped, failed(-1)), (libc::MAP_FAILED, Some(libc::EPERM)));
            // What vnetd does.
            assert!(std::net::UdpSocket::bind("127.0.0.1:0").is_ok());
            assert_eq!(std::thread::spawn(|| 7).join().unwrap(), 7, "clone3 is replaced");
            assert!(std::fs::read_to_string("/proc/thread-self/status").unwrap().contains("NoNewPrivs:\t1"));
        })
        .join()
        .unwrap();
    }

    /// The error of a command of bpf(2) without arguments, on a thread of its own that is confined as `who`.
    fn bpf_error(who: Who, command: u64) -> Option<i32> {
        let call = move || {
            allow_only(who, SeccompAction::Errno(libc::EACCES as u32)).unwrap();
            // SAFETY: the kernel reads no byte of the arguments.
            failed(unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::null::<u8>(), 0) })
        };
        std::thread::spawn(call).join().unwrap()
    }

    /// EACCES is the list's refusal; the kernel refuses a call without arguments by another error.
    #[test]
    fn only_the_helper_loads_programs() {
        const MAP_CREATE: u64 = 0;
        const PROG_LOAD: u64 = 5;
        const OBJ_GET: u64 = 7;
        const MAP_GET_FD_BY_ID: u64 = 14;
        const LINK_CREATE: u64 = 28;
        for command in [MAP_CREATE, PROG_LOAD, OBJ_GET, MAP_GET_FD_BY_ID, LINK_CREATE] {
            assert_eq!(bpf_error(Who::Vnetd, command), Some(libc::EACCES), "{command}");
            assert_ne!(bpf_error(Who::Helper, command), Some(libc::EACCES), "{command}");
        }
        for command in ON_MAPS {
            assert_ne!(bpf_error(Who::Vnetd, command), Some(libc::EACCES), "{command}");
        }
    }

    /// With `VNET_TEST_PROGRAMS` (`make test`), the machine must have Landlock.
    #[test]
    fn a_thread_that_opens_no_files_keeps_what_it_has() {
        let mut open = std::fs::File::open("/proc/self/status").unwrap();
        std::thread::spawn(move || {
            let status = open_none();
            if !matches!(status, Ok(RulesetStatus::FullyEnforced | RulesetStatus::PartiallyEnforced)) {
                let needed = std::env::var_os("VNET_TEST_PROGRAMS").is_some();
                assert!(!needed, "Landlock does not work here: {status:?}");
                eprintln!("not tested: Landlock does not work here: {status:?}");
                return;
            }
            assert!(std::fs::File::open("/proc/self/status").is_err());
            let inherited = std::thread::spawn(|| std::fs::read_dir("/").is_err());
            assert!(inherited.join().unwrap());
            let mut text = String::new();
            io::Read::read_to_string(&mut open, &mut text).unwrap();
            assert!(text.contains("Threads:"));
            assert!(std::net::UdpSocket::bind("127.0.0.1:0").is_ok());
        })
        .join()
        .unwrap();
        assert!(std::fs::read_dir("/").is_ok(), "other threads are free");
    }

    #[test]
    fn the_list_names_each_call_once() {
        let mut calls: Vec<_> = ALLOWED.iter().chain(ALLOWED_HERE).collect();
        let all = calls.len();
        calls.sort();
        calls.dedup();
        assert_eq!(calls.len(), all);
        assert!(
            [Who::Vnetd, Who::Helper].iter().all(|who| allow_list(*who, SeccompAction::KillProcess).is_ok())
        );
    }
}
