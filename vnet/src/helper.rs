//! The privileged helper: a process that enters network namespaces for vnetd.
//!
//! Entering a namespace takes CAP_SYS_ADMIN, and finding that of a process CAP_SYS_PTRACE. With these capabilities a process may do
//! nearly everything. So vnetd, which reads what guests and other hosts send, drops them before it starts a thread (privilege
//! separation), and asks the helper, which reads nothing but vnetd's requests ([`Request`]): it opens network namespaces, sockets and
//! TAP queues in them, finds the namespace that a device was moved to, and mounts the BPF file system (bpffs) where programs are pinned.
//!
//! Code that works in another namespace runs inside [`within`], which sets the thread's *target namespace*. [`socket`], [`tun`] and
//! [`disable_ipv6`] act there; without a target, in vnetd's own namespace. A process without a helper (tests, other programs) enters the
//! target itself, on a thread of its own.
//!
//! A request is one message of a `SOCK_SEQPACKET` pair: a byte that says what, then its argument; with it comes the descriptor of the
//! namespace, if it needs one. The answer is an error number, 0 for success, with at most one descriptor. The helper ends when vnetd's end
//! is closed, for whatever reason.

use std::cell::RefCell;
use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;

use parking_lot::Mutex;
use rustix::fs::{fstatfs, statfs};
use rustix::io::retry_on_intr;
use rustix::net::netdevice::name_to_index;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// Longest request in bytes: a path.
const REQUEST_MAX: usize = 1 + libc::PATH_MAX as usize;
/// File system of namespaces (linux/magic.h).
const NSFS_MAGIC: u64 = 0x6e73_6673;
/// bpffs (linux/magic.h).
const BPF_FS_MAGIC: u64 = 0xcafe_4a11;
/// `NS_GET_NSTYPE` (linux/nsfs.h).
const NS_GET_NSTYPE: libc::c_ulong = 0xb703;
/// Longest name of a device in bytes.
const DEVICE_NAME_MAX: usize = 15;

/// What the helper does.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Request {
    /// Opens the network namespace at a path.
    Namespace(PathBuf),
    /// Makes a network namespace with IPv6 disabled.
    NewNamespace,
    /// Opens a socket in the passed namespace.
    Socket(Kind),
    /// Opens `/dev/net/tun` in the passed namespace.
    Tun,
    /// Disables IPv6 on a device in the passed namespace.
    DisableIpv6(String),
    /// Mounts a bpffs at an empty folder.
    Mount(PathBuf),
    /// Unmounts a bpffs.
    Unmount(PathBuf),
    /// Finds the network namespace whose file has this device and inode.
    NamespaceWith(u64, u64),
}

/// The arguments of socket(2), without flags.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kind {
    family: libc::c_int,
    kind: libc::c_int,
    protocol: libc::c_int,
}

impl Kind {
    /// Requests to and notifications of rtnetlink(7).
    pub const ROUTES: Kind = Kind::new(libc::AF_NETLINK, libc::SOCK_RAW, libc::NETLINK_ROUTE);
    /// Frames of a device (packet(7)). Protocol 0: it receives nothing before it is bound.
    pub const PACKETS: Kind = Kind::new(libc::AF_PACKET, libc::SOCK_RAW, 0);
    /// Datagrams over IPv4.
    pub const UDP: Kind = Kind::new(libc::AF_INET, libc::SOCK_DGRAM, 0);
    /// Datagrams over IPv6.
    pub const UDP6: Kind = Kind::new(libc::AF_INET6, libc::SOCK_DGRAM, 0);
    /// Messages between processes; also any socket for ioctls of netdevice(7).
    pub const LOCAL: Kind = Kind::new(libc::AF_UNIX, libc::SOCK_SEQPACKET, 0);

    const ALL: [Kind; 5] = [Kind::ROUTES, Kind::PACKETS, Kind::UDP, Kind::UDP6, Kind::LOCAL];

    const fn new(family: libc::c_int, kind: libc::c_int, protocol: libc::c_int) -> Kind {
        Kind { family, kind, protocol }
    }

    /// Opens a socket in the calling thread's namespace.
    fn open(self) -> io::Result<OwnedFd> {
        let Kind { family, kind, protocol } = self;
        // SAFETY: the call passes no pointers.
        let fd = unsafe { libc::socket(family, kind | libc::SOCK_CLOEXEC, protocol) };
        // SAFETY: the descriptor is new, and nothing else owns it.
        if fd < 0 { Err(io::Error::last_os_error()) } else { Ok(unsafe { OwnedFd::from_raw_fd(fd) }) }
    }
}

/// vnetd's end of the conversation.
struct Helper {
    socket: Mutex<OwnedFd>,
    /// Ends by itself, and init or vnetd's end reaps it.
    _process: Option<Child>,
}

static HELPER: OnceLock<Helper> = OnceLock::new();

thread_local! {
    /// The thread's target namespace, which the helper enters for it.
    static TARGET: RefCell<Option<File>> = const { RefCell::new(None) };
}

/// Starts `program` as this process's helper; it has to call [`serve`] with its standard input. Call it before any thread starts.
///
/// # Errors
/// The program cannot be started.
pub fn start(program: &mut Command) -> io::Result<()> {
    let (own, other) = pair()?;
    // A group of its own: signals from a terminal are for vnetd.
    let process =
        program.stdin(Stdio::from(other)).stdout(Stdio::null()).env_clear().process_group(0).spawn()?;
    let _ = HELPER.set(Helper { socket: Mutex::new(own), _process: Some(process) });
    Ok(())
}

fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?)
}

/// Opens the network namespace at `path`.
///
/// # Errors
/// EINVAL: the file is no network namespace.
pub fn namespace(path: &Path) -> io::Result<File> {
    let open = || open_namespace(path);
    with_descriptor(HELPER.get(), &Request::Namespace(path.into()), None, || open().map(OwnedFd::from))
        .map(File::from)
}

/// Makes a network namespace with IPv6 disabled, so that its devices send no router or neighbour solicitations.
///
/// # Errors
/// The process lacks CAP_SYS_ADMIN.
pub fn new_namespace() -> io::Result<File> {
    with_descriptor(HELPER.get(), &Request::NewNamespace, None, || make_namespace().map(OwnedFd::from))
        .map(File::from)
}

/// Finds the network namespace whose file has this device and inode: this process's own, one with a name, or that of a process.
///
/// # Errors
/// ENOENT: there is none.
pub fn namespace_with((device, inode): (u64, u64)) -> io::Result<File> {
    let find = || find_namespace((device, inode)).map(OwnedFd::from);
    with_descriptor(HELPER.get(), &Request::NamespaceWith(device, inode), None, find).map(File::from)
}

/// Runs `open` with `namespace` as the thread's target namespace.
///
/// # Errors
/// The process has no helper, and may not enter the namespace.
pub fn within<T: Send>(namespace: File, open: impl FnOnce() -> T + Send) -> io::Result<T> {
    if HELPER.get().is_none() {
        return entered(&namespace, open);
    }
    /// Restores the former target, also when `open` panics.
    struct Back(Option<File>);
    impl Drop for Back {
        fn drop(&mut self) {
            TARGET.set(self.0.take());
        }
    }
    let _back = Back(TARGET.replace(Some(namespace)));
    Ok(open())
}

/// Opens a socket in the thread's target namespace.
///
/// # Errors
/// See socket(2).
pub fn socket(kind: Kind) -> io::Result<OwnedFd> {
    in_target(&Request::Socket(kind), || kind.open())
}

/// Opens a UDP socket with this address in the thread's target namespace.
///
/// # Errors
/// See socket(2) and bind(2).
pub fn udp(address: SocketAddr) -> io::Result<UdpSocket> {
    let socket = socket(if address.is_ipv4() { Kind::UDP } else { Kind::UDP6 })?;
    rustix::net::bind(&socket, &address)?;
    Ok(socket.into())
}

/// Index of a device in the thread's target namespace.
///
/// # Errors
/// ENODEV: there is no device of that name.
pub fn device_index(device: &str) -> io::Result<u32> {
    Ok(name_to_index(socket(Kind::LOCAL)?, device)?)
}

/// Opens `/dev/net/tun` in the thread's target namespace.
///
/// # Errors
/// See open(2).
pub fn tun() -> io::Result<File> {
    in_target(&Request::Tun, || open_tun().map(OwnedFd::from)).map(File::from)
}

/// Disables IPv6 on a device that is down, in the thread's target namespace.
///
/// # Errors
/// There is no such device.
pub fn disable_ipv6(device: &str) -> io::Result<()> {
    TARGET.with_borrow(|namespace| match (namespace, HELPER.get()) {
        (Some(namespace), Some(helper)) => {
            helper.ask(&Request::DisableIpv6(device.into()), Some(namespace.as_fd())).map(drop)
        }
        _ => disable_ipv6_here(device),
    })
}

/// Mounts a bpffs at an empty folder.
///
/// # Errors
/// ENOTEMPTY: the folder has files, which the mount would hide. See mount(2).
pub fn mount(folder: &Path) -> io::Result<()> {
    match HELPER.get() {
        Some(helper) => helper.ask(&Request::Mount(folder.into()), None).map(drop),
        None => mount_bpffs(folder),
    }
}

/// Unmounts a bpffs.
///
/// # Errors
/// EINVAL: it is no bpffs. See umount(2).
pub fn unmount(folder: &Path) -> io::Result<()> {
    match HELPER.get() {
        Some(helper) => helper.ask(&Request::Unmount(folder.into()), None).map(drop),
        None => unmount_bpffs(folder),
    }
}

fn in_target(request: &Request, open: impl FnOnce() -> io::Result<OwnedFd>) -> io::Result<OwnedFd> {
    TARGET.with_borrow(|namespace| match namespace {
        Some(namespace) => with_descriptor(HELPER.get(), request, Some(namespace.as_fd()), open),
        None => open(),
    })
}

fn with_descriptor(
    helper: Option<&Helper>,
    request: &Request,
    namespace: Option<BorrowedFd<'_>>,
    open: impl FnOnce() -> io::Result<OwnedFd>,
) -> io::Result<OwnedFd> {
    match helper {
        Some(helper) => helper.ask(request, namespace)?.ok_or_else(|| io::ErrorKind::InvalidData.into()),
        None => open(),
    }
}

impl Helper {
    fn ask(&self, request: &Request, namespace: Option<BorrowedFd<'_>>) -> io::Result<Option<OwnedFd>> {
        let failed = |error: io::Error| match error.raw_os_error() {
            Some(libc::EMFILE) => error,
            _ => io::Error::other("vnetd's privileged helper has ended; restart vnetd"),
        };
        let request = request.encode();
        if request.len() > REQUEST_MAX {
            return Err(io::Error::from_raw_os_error(libc::ENAMETOOLONG));
        }
        let socket = self.socket.lock();
        send(&socket, &request, namespace).map_err(failed)?;
        let mut room = [0; 4];
        let (len, descriptor) = receive(&socket, &mut room).map_err(failed)?;
        if len != room.len() {
            return Err(failed(io::ErrorKind::UnexpectedEof.into()));
        }
        match i32::from_ne_bytes(room) {
            0 => Ok(descriptor),
            error => Err(io::Error::from_raw_os_error(error)),
        }
    }
}

fn send(socket: &OwnedFd, bytes: &[u8], descriptor: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors: Vec<_> = descriptor.into_iter().collect();
    if !descriptors.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(&descriptors));
    }
    retry_on_intr(|| sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL))?;
    Ok(())
}

/// Receives a message with at most one descriptor; 0 bytes: the other end is closed.
///
/// # Errors
/// EMSGSIZE: the message is longer than `room`. EMFILE: this process has no room for the descriptor. Both messages are consumed.
fn receive(socket: &OwnedFd, room: &mut [u8]) -> io::Result<(usize, Option<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = retry_on_intr(|| {
        recvmsg(socket, &mut [IoSliceMut::new(room)], &mut control, RecvFlags::CMSG_CLOEXEC)
    })?;
    let mut descriptor = None;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(mut descriptors) = message {
            descriptor = descriptors.next();
        }
    }
    if received.flags.contains(ReturnFlags::TRUNC) {
        return Err(io::Error::from_raw_os_error(libc::EMSGSIZE));
    }
    if received.flags.contains(ReturnFlags::CTRUNC) {
        return Err(io::Error::from_raw_os_error(libc::EMFILE));
    }
    Ok((received.bytes, descriptor))
}

/// The helper: carries out requests that arrive at `socket`, until its other end is closed.
pub fn serve(socket: &OwnedFd) {
    let mut room = vec![0; REQUEST_MAX];
    loop {
        let done = match receive(socket, &mut room) {
            Ok((0, _)) => return,
            Ok((len, namespace)) => {
                let request = Request::decode(&room[..len]).ok_or(io::ErrorKind::InvalidInput.into());
                request.and_then(|request: Request| request.carry_out(namespace))
            }
            Err(error) if matches!(error.raw_os_error(), Some(libc::EMSGSIZE | libc::EMFILE)) => Err(error),
            Err(_) => return,
        };
        let code = done.as_ref().err().map_or(0, |error| error.raw_os_error().unwrap_or(libc::EINVAL));
        let descriptor = done.ok().flatten();
        if send(socket, &code.to_ne_bytes(), descriptor.as_ref().map(AsFd::as_fd)).is_err() {
            return;
        }
    }
}

impl Request {
    fn encode(&self) -> Vec<u8> {
        let path = |path: &Path| path.as_os_str().as_encoded_bytes().to_vec();
        let (what, argument) = match self {
            Request::Namespace(file) => (0, path(file)),
            Request::NewNamespace => (1, vec![]),
            Request::Socket(kind) => {
                (2, Kind::ALL.iter().position(|own| own == kind).map_or(vec![], |at| vec![at as u8]))
            }
            Request::Tun => (3, vec![]),
            Request::DisableIpv6(device) => (4, device.as_bytes().to_vec()),
            Request::Mount(folder) => (5, path(folder)),
            Request::Unmount(folder) => (6, path(folder)),
            Request::NamespaceWith(device, inode) => {
                (7, [device.to_ne_bytes(), inode.to_ne_bytes()].concat())
            }
        };
        [vec![what], argument].concat()
    }

    fn decode(bytes: &[u8]) -> Option<Request> {
        let (what, argument) = bytes.split_first()?;
        let path = || PathBuf::from(OsStr::from_bytes(argument));
        Some(match (what, argument) {
            (0, _) => Request::Namespace(path()),
            (1, []) => Request::NewNamespace,
            (2, [kind]) => Request::Socket(*Kind::ALL.get(usize::from(*kind))?),
            (3, []) => Request::Tun,
            (4, device) => Request::DisableIpv6(String::from_utf8(device.to_vec()).ok()?),
            (5, _) => Request::Mount(path()),
            (6, _) => Request::Unmount(path()),
            (7, id) => {
                let (device, inode) = id.split_first_chunk()?;
                Request::NamespaceWith(
                    u64::from_ne_bytes(*device),
                    u64::from_ne_bytes(inode.try_into().ok()?),
                )
            }
            _ => return None,
        })
    }

    fn carry_out(self, namespace: Option<OwnedFd>) -> io::Result<Option<OwnedFd>> {
        let namespace = || namespace.map(File::from).ok_or(io::Error::from(io::ErrorKind::InvalidInput));
        match self {
            Request::Namespace(path) => Ok(Some(open_namespace(&path)?.into())),
            Request::NewNamespace => Ok(Some(make_namespace()?.into())),
            Request::Socket(kind) => entered(&namespace()?, || kind.open())?.map(Some),
            Request::Tun => Ok(Some(entered(&namespace()?, open_tun)??.into())),
            Request::DisableIpv6(device) => {
                entered(&namespace()?, || disable_ipv6_here(&device))?.map(|()| None)
            }
            Request::Mount(folder) => mount_bpffs(&folder).map(|()| None),
            Request::Unmount(folder) => unmount_bpffs(&folder).map(|()| None),
            Request::NamespaceWith(device, inode) => Ok(Some(find_namespace((device, inode))?.into())),
        }
    }
}

/// Runs `open` on a thread that enters `namespace`.
fn entered<T: Send>(namespace: &File, open: impl FnOnce() -> T + Send) -> io::Result<T> {
    let inside = || -> io::Result<T> {
        move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?;
        Ok(open())
    };
    std::thread::scope(|scope| {
        scope.spawn(inside).join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

fn open_namespace(path: &Path) -> io::Result<File> {
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

fn find_namespace(id: (u64, u64)) -> io::Result<File> {
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

fn make_namespace() -> io::Result<File> {
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

fn open_tun() -> io::Result<File> {
    let flags = libc::O_NONBLOCK | libc::O_CLOEXEC;
    OpenOptions::new().read(true).write(true).custom_flags(flags).open("/dev/net/tun")
}

/// Disables IPv6 on a device in the calling thread's namespace.
fn disable_ipv6_here(device: &str) -> io::Result<()> {
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
fn mount_bpffs(folder: &Path) -> io::Result<()> {
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
fn unmount_bpffs(folder: &Path) -> io::Result<()> {
    if statfs(folder)?.f_type as u64 & 0xffff_ffff != BPF_FS_MAGIC {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let path = std::ffi::CString::new(folder.as_os_str().as_encoded_bytes())?;
    // SAFETY: the path is a zero-terminated string that lives across the call.
    let done = unsafe { libc::umount2(path.as_ptr(), libc::MNT_DETACH) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests;
