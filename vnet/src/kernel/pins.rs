//! Pinned objects, which outlive vnetd: maps, and links of programs to devices, in a BPF file system (bpffs).
//!
//! ```text
//!   BPFFS/vnet/HOST-NAMESPACE/         locked by the vnetd that uses it
//!     link-INDEX                       the program at vnetd's device of that index: attached as long as this file is there
//!     underlay-INDEX                   the same at a device of the underlay
//!     OBJECT/MAP                       maps of one version of the programs, named by its hash
//! ```
//!
//! A device index is valid in one network namespace only. So the folder's name contains the namespace's cookie, which the kernel
//! never reuses.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};
use rustix::net::{AddressFamily, SocketType, socket};

use crate::helper;
use crate::listen::until;
use crate::loader::{FOLDER, LINK, MAPS, Pin, UNDERLAY, is_bpffs, maps_folder};

/// Files that the kernel may make in a new BPF file system (CONFIG_BPF_PRELOAD).
const PRELOADED: [&str; 2] = ["maps.debug", "progs.debug"];
/// asm-generic/socket.h, since Linux 5.14.
const SO_NETNS_COOKIE: libc::c_int = 71;

/// How established flows outlive vnetd.
#[derive(Clone, Debug, Default)]
pub struct Outlive {
    /// How long the kernel forwards established flows after vnetd has died; at least the lifetime of a verdict.
    pub time: Duration,
    /// Where programs and maps are pinned; `None`: the next vnetd cannot adopt them.
    pub pins: Option<PinOptions>,
}

/// Folder for pinned objects.
#[derive(Clone, Debug)]
pub struct PinOptions {
    /// A bpffs, or a folder where one is to be mounted.
    pub bpffs: PathBuf,
    /// The host's name.
    pub host: String,
}

impl PinOptions {
    /// The folder of this host in the calling thread's network namespace.
    fn folder(&self) -> io::Result<PathBuf> {
        // A bpffs rejects names with dots.
        Ok(self.bpffs.join(FOLDER).join(format!("{}-{:x}", self.host.replace('.', ":"), namespace()?)))
    }

    /// True if a vnetd that has died has left pinned objects.
    pub(crate) fn exist(&self) -> bool {
        self.folder().is_ok_and(|folder| folder.exists())
    }
}

/// This host's folder, locked.
pub(super) struct Pins {
    folder: PathBuf,
    /// True if the maps existed, with the flows of a vnetd that has died.
    pub(super) adopted: bool,
    lock: File,
    /// The BPF file system if this vnetd has mounted it.
    mounted: Option<PathBuf>,
}

impl Pins {
    /// Opens the folder of this host in the calling thread's network namespace, for programs of this `object`.
    ///
    /// # Errors
    /// The reason why nothing can be pinned.
    pub(super) fn open(options: &PinOptions, object: &[u8]) -> io::Result<Pins> {
        let mounted = mount(&options.bpffs)?.then(|| options.bpffs.clone());
        let folder = options.folder()?;
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&folder)?;
        let lock = File::open(&folder)?;
        // A vnetd that is just dying holds the lock for a moment.
        let locked = until(|| flock(&lock, FlockOperation::NonBlockingLockExclusive), |_| true);
        locked.map_err(|_| {
            io::Error::other(format!("another vnetd of this host's name uses '{}'", folder.display()))
        })?;
        let maps = maps_folder(&folder, object);
        let adopted = MAPS.iter().all(|name| maps.join(name).exists());
        // Attached programs keep maps of other versions alive until the programs are replaced.
        for other in entries(&folder)?.filter(|path| path.is_dir() && (*path != maps || !adopted)) {
            std::fs::remove_dir_all(other)?;
        }
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&maps)?;
        let pins = Pins { folder, adopted, lock, mounted };
        if !adopted {
            // Nobody ends the flows that these programs follow.
            pins.underlay_devices()
                .into_iter()
                .for_each(|device| _ = std::fs::remove_file(pins.link(Pin::Underlay, device)));
        }
        Ok(pins)
    }

    /// Opens the folder while the running vnetd still uses it, which hands over its `lock`, and whether it has `mounted` the file system.
    /// Changes nothing.
    ///
    /// # Errors
    /// The running vnetd's programs are of another version: they would follow flows that this vnetd does not know.
    pub(super) fn inherit(
        options: &PinOptions,
        object: &[u8],
        lock: OwnedFd,
        mounted: bool,
    ) -> io::Result<Pins> {
        let folder = options.folder()?;
        if !folder.exists() {
            let place = folder.display();
            return Err(io::Error::other(format!(
                "'{place}' of the running vnetd is not there; start this vnetd in the same mount namespace"
            )));
        }
        let maps = maps_folder(&folder, object);
        if !MAPS.iter().all(|name| maps.join(name).exists()) {
            return Err(io::Error::other(
                "the running vnetd has other kernel programs than this version; restart it instead of a take-over",
            ));
        }
        let mounted = mounted.then(|| options.bpffs.clone());
        Ok(Pins { folder, adopted: true, lock: lock.into(), mounted })
    }

    /// The folder's lock, and whether this vnetd has mounted the file system.
    pub(super) fn lock(&self) -> (BorrowedFd<'_>, bool) {
        (self.lock.as_fd(), self.mounted.is_some())
    }

    /// This host's folder.
    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    /// File of the program's link at a device.
    pub(super) fn link(&self, pin: Pin, device: u32) -> PathBuf {
        pin.file(&self.folder, device)
    }

    /// vnetd's devices that have links here.
    pub(super) fn devices(&self) -> Vec<u32> {
        self.links(LINK)
    }

    /// Devices of the underlay that have links here.
    pub(super) fn underlay_devices(&self) -> Vec<u32> {
        self.links(UNDERLAY)
    }

    fn links(&self, prefix: &str) -> Vec<u32> {
        let device = |path: PathBuf| path.file_name()?.to_str()?.strip_prefix(prefix)?.parse().ok();
        entries(&self.folder).into_iter().flatten().filter_map(device).collect()
    }

    /// Removes all pins, and the file system if this vnetd has mounted it and nobody else has pinned anything there.
    pub(super) fn remove(self) {
        let Pins { folder, lock, mounted, .. } = self;
        // Remaining objects are harmless: the next vnetd adopts or removes them.
        if let Err(error) = std::fs::remove_dir_all(&folder) {
            tracing::warn!("cannot remove '{}': {error}", folder.display());
        }
        // It is not empty if another vnetd runs on this host.
        let _ = folder.parent().map(std::fs::remove_dir);
        // An open file would keep the file system mounted.
        drop(lock);
        if let Some(bpffs) = mounted
            && entries(&bpffs).is_ok_and(|mut entries| {
                entries.all(|entry| PRELOADED.iter().any(|name| entry.ends_with(name)))
            })
        {
            // Empty, it is harmless.
            let _ = helper::unmount(&bpffs);
        }
    }
}

fn entries(folder: &Path) -> io::Result<impl Iterator<Item = PathBuf> + use<>> {
    Ok(std::fs::read_dir(folder)?.flatten().map(|entry| entry.path()))
}

/// Mounts a bpffs at `folder` unless it is one; true if it was not.
fn mount(folder: &Path) -> io::Result<bool> {
    let fail = |error: io::Error| {
        let place = folder.display();
        io::Error::other(format!(
            "cannot mount a bpffs at '{place}': {error}; mount one, and name it by bpffs"
        ))
    };
    if is_bpffs(folder) {
        return Ok(false);
    }
    if !folder.is_dir() {
        let place = folder.display();
        return Err(io::Error::other(format!("directory '{place}' is not there; make it, or change bpffs")));
    }
    // A second mount would hide the objects that another vnetd has pinned in the first. Any process that can read the folder can
    // lock it, so the wait is bounded.
    let lock = File::open(folder).map_err(fail)?;
    let locked = until(|| flock(&lock, FlockOperation::NonBlockingLockExclusive), |_| true).is_ok();
    if is_bpffs(folder) {
        return Ok(false);
    }
    if !locked {
        return Err(fail(io::Error::other("another process has locked it")));
    }
    helper::mount(folder).map_err(fail)?;
    Ok(true)
}

/// Cookie of the calling thread's network namespace.
fn namespace() -> io::Result<u64> {
    let socket = socket(AddressFamily::UNIX, SocketType::DGRAM, None)?;
    let (mut cookie, mut len) = (0_u64, size_of::<u64>() as libc::socklen_t);
    // SAFETY: the option writes at most `len` bytes to `cookie`, which is exclusively ours.
    let done = unsafe {
        let socket = socket.as_fd().as_raw_fd();
        libc::getsockopt(socket, libc::SOL_SOCKET, SO_NETNS_COOKIE, (&raw mut cookie).cast(), &raw mut len)
    };
    // Linux 5.10 has no cookies. Inode numbers may be reused.
    if done < 0 { Ok(std::fs::metadata("/proc/thread-self/ns/net")?.ino()) } else { Ok(cookie) }
}
