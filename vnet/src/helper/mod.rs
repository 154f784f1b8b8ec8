//! The privileged helper: a process that does for vnetd what takes more privileges than forwarding frames.
//!
//! Entering a namespace takes CAP_SYS_ADMIN, finding that of a process CAP_SYS_PTRACE, loading a kernel program CAP_BPF and CAP_PERFMON,
//! and opening a packet socket CAP_NET_RAW. With these capabilities a process may do nearly everything. So vnetd, which reads what guests
//! and other hosts send, drops them before it starts a thread (privilege separation), and asks the helper, which reads nothing but vnetd's
//! requests ([`Request`]): it opens network namespaces, sockets and TAP queues in them, finds the namespace that a device was moved to,
//! mounts the BPF file system (bpffs) where programs are pinned, and loads the programs of `loader/` and attaches them to devices
//! (`programs.rs`).
//!
//! Code that works in another namespace runs inside [`within`], which sets the thread's *target namespace*. [`socket`], [`tun`] and
//! [`disable_ipv6`] act there; without a target, in vnetd's own namespace. A process without a helper (tests, other programs) enters the
//! target itself, on a thread of its own.
//!
//! `message.rs` has the messages, `serve.rs` the helper's loop, `work.rs` what it does. The helper ends when vnetd's end is closed, for
//! whatever reason.

mod mappings;
mod message;
pub(crate) mod programs;
#[cfg(test)]
mod programs_tests;
mod serve;
mod work;

use std::cell::RefCell;
use std::fs::File;
use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;

use parking_lot::Mutex;
use rustix::net::netdevice::name_to_index;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

pub use message::Kind;
pub use serve::serve;

use message::{ANSWER_MAX, REQUEST_MAX, Request, decode_answer, receive, send};
use work::{
    disable_ipv6_here, entered, find_namespace, make_namespace, mount_bpffs, open_namespace, open_tun,
    unmount_bpffs,
};

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
    // vnetd may not open packet sockets (CAP_NET_RAW) in its own namespace either.
    if kind == Kind::PACKETS && TARGET.with_borrow(Option::is_none) {
        return with_descriptor(HELPER.get(), &Request::OwnPackets, None, || kind.open());
    }
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

/// `Some(true)` if process `pid` maps `file` only privately, `Some(false)` if it shares the file; `None` if that is unknown.
pub fn maps_privately(pid: i32, file: &File) -> Option<bool> {
    let Some(helper) = HELPER.get() else { return mappings::maps_privately(pid, file) };
    match helper.ask(&Request::MapsPrivately(pid), Some(file.as_fd())) {
        Ok(_) => Some(true),
        Err(error) => (error.raw_os_error() == Some(libc::EEXIST)).then_some(false),
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
        Some(helper) => {
            helper.ask(request, namespace)?.pop().ok_or_else(|| io::ErrorKind::InvalidData.into())
        }
        None => open(),
    }
}

impl Helper {
    /// Has the helper carry out a request. Returns the descriptors of its answer.
    fn ask(&self, request: &Request, passed: Option<BorrowedFd<'_>>) -> io::Result<Vec<OwnedFd>> {
        let failed = |error: io::Error| match error.raw_os_error() {
            Some(libc::EMFILE) => error,
            _ => io::Error::other("vnetd's privileged helper has ended; restart vnetd"),
        };
        let request = request.encode();
        if request.len() > REQUEST_MAX {
            return Err(io::Error::from_raw_os_error(libc::ENAMETOOLONG));
        }
        let socket = self.socket.lock();
        send(&socket, &request, passed.as_slice()).map_err(failed)?;
        let mut room = [0; ANSWER_MAX];
        let (len, descriptors) = receive(&socket, &mut room).map_err(failed)?;
        let ended = || failed(io::ErrorKind::UnexpectedEof.into());
        decode_answer(&room[..len]).ok_or_else(ended)?.map(|()| descriptors)
    }
}

#[cfg(test)]
mod tests;
