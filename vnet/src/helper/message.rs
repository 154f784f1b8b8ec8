//! The messages between vnetd and its helper.
//!
//! A request is one message of a `SOCK_SEQPACKET` pair: a byte that says what, then its argument; with it comes the descriptor of a
//! namespace or a file, if it needs one. The answer is an error number, 0 for success, with at most [`DESCRIPTORS_MAX`] descriptors. A text of at most
//! [`TEXT_MAX`] bytes may follow an error number: what the kernel says about a program.

use std::ffi::OsStr;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::io::retry_on_intr;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use crate::loader::{Attach, By, MAPS, Pin};

/// Longest request in bytes: a path.
pub(super) const REQUEST_MAX: usize = 1 + libc::PATH_MAX as usize;
/// Longest text of an error in bytes.
pub(super) const TEXT_MAX: usize = 1024;
/// Longest answer in bytes.
pub(super) const ANSWER_MAX: usize = size_of::<i32>() + TEXT_MAX;
/// Most descriptors of a message: the programs' maps.
pub(super) const DESCRIPTORS_MAX: usize = MAPS.len();

/// What the helper does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Request {
    /// Opens the network namespace at a path.
    Namespace(PathBuf),
    /// Makes a network namespace with IPv6 disabled.
    NewNamespace,
    /// Opens a socket in the passed namespace.
    Socket(Kind),
    /// Opens a socket of [`Kind::PACKETS`] in vnetd's own namespace. A request of its own: one that has lost its namespace on the way must not
    /// open a socket here.
    OwnPackets,
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
    /// Loads the kernel programs, on the maps in a host's folder of a bpffs if there is one. The answer has the maps.
    LoadPrograms(Option<PathBuf>),
    /// Looks whether a process maps the passed file only privately. The answer is an error if it does not (EEXIST), or if that is unknown.
    MapsPrivately(i32),
    /// Attaches one of them to a device of vnetd's own namespace. The answer has the link, unless it is pinned or a filter.
    Attach(Attach),
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
    /// Datagrams between processes.
    pub const LOCAL_DATAGRAMS: Kind = Kind::new(libc::AF_UNIX, libc::SOCK_DGRAM, 0);

    pub(super) const ALL: [Kind; 6] =
        [Kind::ROUTES, Kind::PACKETS, Kind::UDP, Kind::UDP6, Kind::LOCAL, Kind::LOCAL_DATAGRAMS];

    const fn new(family: libc::c_int, kind: libc::c_int, protocol: libc::c_int) -> Kind {
        Kind { family, kind, protocol }
    }

    /// Opens a socket in the calling thread's namespace.
    pub(super) fn open(self) -> io::Result<OwnedFd> {
        let Kind { family, kind, protocol } = self;
        // SAFETY: the call passes no pointers.
        let fd = unsafe { libc::socket(family, kind | libc::SOCK_CLOEXEC, protocol) };
        // SAFETY: the descriptor is new, and nothing else owns it.
        if fd < 0 { Err(io::Error::last_os_error()) } else { Ok(unsafe { OwnedFd::from_raw_fd(fd) }) }
    }
}

impl Request {
    pub(super) fn encode(&self) -> Vec<u8> {
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
            Request::OwnPackets => (8, vec![]),
            Request::LoadPrograms(folder) => (9, folder.as_deref().map_or(vec![], path)),
            Request::Attach(attach) => (10, encode_attach(attach)),
            Request::MapsPrivately(pid) => (11, pid.to_ne_bytes().to_vec()),
        };
        [vec![what], argument].concat()
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Request> {
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
            (8, []) => Request::OwnPackets,
            (9, folder) => Request::LoadPrograms((!folder.is_empty()).then(path)),
            (10, attach) => Request::Attach(decode_attach(attach)?),
            (11, pid) => Request::MapsPrivately(i32::from_ne_bytes(pid.try_into().ok()?)),
            _ => return None,
        })
    }
}

fn encode_attach(attach: &Attach) -> Vec<u8> {
    let Attach { program, device: (device, index), by, pin } = attach;
    let by = By::ALL.iter().position(|own| own == by).map_or(u8::MAX, |at| at as u8);
    let pin = pin.and_then(|pin| Pin::ALL.iter().position(|own| *own == pin)).map_or(0, |at| at as u8 + 1);
    // No device and no program has a slash in its name.
    [&[by, pin], &index.to_ne_bytes()[..], device.as_bytes(), b"/", program.as_bytes()].concat()
}

fn decode_attach(bytes: &[u8]) -> Option<Attach> {
    let ([by, pin, index @ ..], names) = bytes.split_first_chunk::<6>()?;
    let (device, program) = std::str::from_utf8(names).ok()?.split_once('/')?;
    let pin = match pin.checked_sub(1) {
        Some(at) => Some(*Pin::ALL.get(usize::from(at))?),
        None => None,
    };
    Some(Attach {
        program: program.into(),
        device: (device.into(), u32::from_ne_bytes(*index)),
        by: *By::ALL.get(usize::from(*by))?,
        pin,
    })
}

/// The answer to a request that has failed or not: its bytes.
pub(super) fn encode_answer(done: Result<(), &io::Error>) -> Vec<u8> {
    let Err(error) = done else { return 0_i32.to_ne_bytes().to_vec() };
    // An error of ours has a text, one of the kernel its number.
    let mut text = error.get_ref().map(ToString::to_string).unwrap_or_default();
    let end = (0..=TEXT_MAX.min(text.len())).rev().find(|at| text.is_char_boundary(*at));
    text.truncate(end.unwrap_or_default());
    let code = error.raw_os_error().unwrap_or(libc::EINVAL);
    [&code.to_ne_bytes(), text.as_bytes()].concat()
}

/// Whether the request has failed; `None`: this is no answer.
pub(super) fn decode_answer(bytes: &[u8]) -> Option<io::Result<()>> {
    let (code, text) = bytes.split_first_chunk()?;
    Some(match (i32::from_ne_bytes(*code), text) {
        (0, []) => Ok(()),
        (0, _) => return None,
        (code, []) => Err(io::Error::from_raw_os_error(code)),
        (_, text) => Err(io::Error::other(String::from_utf8_lossy(text).into_owned())),
    })
}

/// Sends a message with at most [`DESCRIPTORS_MAX`] descriptors.
pub(super) fn send(socket: &OwnedFd, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    retry_on_intr(|| sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL))?;
    Ok(())
}

/// Receives a message with at most [`DESCRIPTORS_MAX`] descriptors; 0 bytes: the other end is closed.
///
/// # Errors
/// EMSGSIZE: the message is longer than `room`. EMFILE: this process has no room for all descriptors. Both messages are consumed.
pub(super) fn receive(socket: &OwnedFd, room: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = retry_on_intr(|| {
        recvmsg(socket, &mut [IoSliceMut::new(room)], &mut control, RecvFlags::CMSG_CLOEXEC)
    })?;
    let mut passed = vec![];
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(descriptors) = message {
            passed.extend(descriptors);
        }
    }
    if received.flags.contains(ReturnFlags::TRUNC) {
        return Err(io::Error::from_raw_os_error(libc::EMSGSIZE));
    }
    if received.flags.contains(ReturnFlags::CTRUNC) {
        return Err(io::Error::from_raw_os_error(libc::EMFILE));
    }
    Ok((received.bytes, passed))
}
