//! What the helper does for vnetd. A process without a helper does it itself.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::fstatfs;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::loader::is_bpffs;

/// File system of namespaces (linux/magic.h).
const NSFS_MAGIC: u64 = 0x6e73_6673;
/// `NS_GET_NSTYPE` (linux/nsfs.h).
const NS_GET_NSTYPE: libc::c_ulong = 0xb703;
/// Longest name of a device in bytes.
const DEVICE_NAME_MAX: usize = 15;

/// Runs `open` on a thread that enters `namespace`.
pub(super) fn entered<T: Send>(namespace: &File, open: impl FnOnce() -> T + Send) -> io::Result<T> {
    let inside = || -> io::Result<T> {
        move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?;
        Ok(open())
    };
    std::thread::scope(|scope| {
        scope.spawn(inside).join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

pub(super) fn open_namespace(path: &Path) -> io::Result<File> {
    // The configuration may name any file, and opening one may block or do something: look at it first.
    let seen = OpenOptions::new().read(true).custom_flags(libc::O_PATH).open(path)?;
    if !fstatfs(&seen).is_ok_and(|stat| stat.f_type as u64 & 0xffff_ffff == NSFS_MAGIC) {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    let file = File::open(format!("/proc/self/fd/{}", seen.as_raw_fd()))?;
    // SAFETY: this ioctl takes no argument.
    let is_network = || unsafe { libc::ioctl(file.as_raw_fd(), NS_GET_NSTYPE as _) } == libc::CLONE_NEWNET;
    if is_network() { Ok(file) } else { Err(io::Error::from_raw_os_error(libc::EINVAL)) }
}

pub(super) fn find_namespace(id: (u64, u64)) -> io::Result<File> {
    let paths = |folder: &str, inside: &'static str| {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        entries.map(move |entry| if inside.is_empty() { entry.path() } else { entry.path().join(inside) })
    };
    let named = paths("/run/netns", "");
    let of_processes = paths("/proc", "ns/net");
    for path in [PathBuf::from("/proc/self/ns/net")].into_iter().chain(named).chain(of_processes) {
        let has_id = |about: std::fs::Metadata| (about.dev(), about.ino()) == id;
        if path.metadata().is_ok_and(has_id)
            && let Ok(file) = open_namespace(&path)
            && file.metadata().is_ok_and(has_id)
        {
            return Ok(file);
        }
    }
    Err(io::Error::from_raw_os_error(libc::ENOENT))
}

pub(super) fn make_namespace() -> io::Result<File> {
    let make = || -> io::Result<File> {
        // SAFETY: the call passes no pointers; only this thread's namespace changes, and no other code runs on it.
        if unsafe { libc::unshare(libc::CLONE_NEWNET) } < 0 {
            return Err(io::Error::last_os_error());
        }
        disable_ipv6_here("all")?;
        disable_ipv6_here("default")?;
        File::open("/proc/thread-self/ns/net")
    };
    // On a thread of its own, because a thread cannot return to its old namespace.
    std::thread::scope(|scope| {
        scope.spawn(make).join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

pub(super) fn open_tun() -> io::Result<File> {
    let flags = libc::O_NONBLOCK | libc::O_CLOEXEC;
    OpenOptions::new().read(true).write(true).custom_flags(flags).open("/dev/net/tun")
}

/// Disables IPv6 on a device in the calling thread's namespace.
pub(super) fn disable_ipv6_here(device: &str) -> io::Result<()> {
    if device.is_empty() || device.len() > DEVICE_NAME_MAX || device.contains('/') || device.starts_with('.')
    {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    match std::fs::write(format!("/proc/sys/net/ipv6/conf/{device}/disable_ipv6"), "1") {
        // The kernel has no IPv6.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

/// Only at an empty folder: a mount hides what is there.
pub(super) fn mount_bpffs(folder: &Path) -> io::Result<()> {
    if std::fs::read_dir(folder)?.next().is_some() {
        return Err(io::Error::from_raw_os_error(libc::ENOTEMPTY));
    }
    let path = std::ffi::CString::new(folder.as_os_str().as_encoded_bytes())?;
    // SAFETY: all pointers are to zero-terminated strings that live across the call.
    let done = unsafe {
        libc::mount(c"bpf".as_ptr(), path.as_ptr(), c"bpf".as_ptr(), 0, c"mode=0700".as_ptr().cast())
    };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// A child of this process may have inherited a file of it until it executes its program, so the file system goes with its last file.
pub(super) fn unmount_bpffs(folder: &Path) -> io::Result<()> {
    if !is_bpffs(folder) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let path = std::ffi::CString::new(folder.as_os_str().as_encoded_bytes())?;
    // SAFETY: the path is a zero-terminated string that lives across the call.
    let done = unsafe { libc::umount2(path.as_ptr(), libc::MNT_DETACH) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
