//! Links of programs to devices: tcx, and netkit pairs. By bpf(2), because aya has no links of netkit, and hands out no descriptor of its own.
//!
//! At a netkit pair, the host's end (the pair's primary) takes the program, and the container's end (the peer) runs it while the container
//! sends. The buffer is at the host's end by then: `ifindex` is the host's end, and a redirect finds devices of the host. The hook is no
//! ingress, so the kernel drops frames of `bpf_redirect_peer` there.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use aya::programs::SchedClassifier;
use aya::programs::links::{FdLink, LinkType, PinnedLink};
use aya::sys::SyscallError;

/// Commands, attach types and flags of linux/bpf.h.
const BPF_OBJ_PIN: libc::c_int = 6;
const BPF_OBJ_GET: libc::c_int = 7;
const BPF_LINK_CREATE: libc::c_int = 28;
const BPF_LINK_UPDATE: libc::c_int = 29;
const BPF_TCX_INGRESS: u32 = 46;
const BPF_NETKIT_PEER: u32 = 55;
const BPF_F_BEFORE: u32 = 1 << 3;
const BPF_F_AFTER: u32 = 1 << 4;

/// A kind of link.
#[derive(Clone, Copy)]
pub(super) struct Kind {
    attach_type: u32,
    flags: u32,
    link_type: LinkType,
    /// What errors name.
    call: &'static str,
}

/// At a device's ingress, after other links.
pub(super) const TCX_LAST: Kind = Kind {
    attach_type: BPF_TCX_INGRESS,
    flags: BPF_F_AFTER,
    link_type: LinkType::Tcx,
    call: "bpf_mprog_attach",
};
/// At a device's ingress, before other links.
pub(super) const TCX_FIRST: Kind = Kind { flags: BPF_F_BEFORE, ..TCX_LAST };
/// At a netkit pair.
pub(super) const NETKIT: Kind =
    Kind { attach_type: BPF_NETKIT_PEER, flags: 0, link_type: LinkType::Netkit, call: "bpf_link_create" };

/// Attaches a program to a device, for a netkit pair the host's end. With a pin, it outlives vnetd, and the program of a pinned link is
/// replaced, between two frames; without one, the answer is the link.
pub(super) fn attach(
    program: &SchedClassifier,
    kind: Kind,
    device: u32,
    pin: Option<PathBuf>,
) -> io::Result<Option<OwnedFd>> {
    let program = program.fd().map_err(super::one_line)?.as_fd();
    if let Some(pin) = &pin
        && is_pinned(pin, kind.link_type)
        && open(pin).and_then(|link| update(link.as_fd(), program)).is_ok()
    {
        return Ok(None);
    }
    let link = create(program, device, kind)?;
    let Some(file) = pin else { return Ok(Some(link)) };
    // The file may exist for a device that is gone.
    let _ = std::fs::remove_file(&file);
    // The pin keeps the link alive without this descriptor.
    pin_at(link.as_fd(), &file).map(|()| None)
}

/// Whether a link of this type is pinned there. A link that is attached elsewhere would forward nothing here.
fn is_pinned(pin: &Path, link_type: LinkType) -> bool {
    let link = PinnedLink::from_pin(pin).map(FdLink::from);
    let seen = link.and_then(|link| link.info()).and_then(|info| info.link_type());
    seen.is_ok_and(|seen| seen == link_type)
}

fn create(program: BorrowedFd<'_>, device: u32, kind: Kind) -> io::Result<OwnedFd> {
    let link = bpf(BPF_LINK_CREATE, [number(program), device, kind.attach_type, kind.flags])
        .map_err(|io_error| super::one_line(SyscallError { call: kind.call, io_error }))?;
    // SAFETY: the kernel has just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(link) })
}

fn update(link: BorrowedFd<'_>, program: BorrowedFd<'_>) -> io::Result<()> {
    bpf(BPF_LINK_UPDATE, [number(link), number(program), 0, 0]).map(drop)
}

fn pin_at(link: BorrowedFd<'_>, file: &Path) -> io::Result<()> {
    let path = CString::new(file.as_os_str().as_encoded_bytes())?;
    let [low, high] = address(&path);
    bpf(BPF_OBJ_PIN, [low, high, number(link), 0]).map(drop)
}

fn open(file: &Path) -> io::Result<OwnedFd> {
    let path = CString::new(file.as_os_str().as_encoded_bytes())?;
    let [low, high] = address(&path);
    let link = bpf(BPF_OBJ_GET, [low, high, 0, 0])?;
    // SAFETY: the kernel has just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(link) })
}

fn number(file: BorrowedFd<'_>) -> u32 {
    file.as_raw_fd().cast_unsigned()
}

/// A 64-bit address as two members of `union bpf_attr`, in the order of memory.
fn address(path: &CString) -> [u32; 2] {
    let bytes = (path.as_ptr() as u64).to_ne_bytes();
    let [a, b, c, d, e, f, g, h] = bytes;
    [u32::from_ne_bytes([a, b, c, d]), u32::from_ne_bytes([e, f, g, h])]
}

/// bpf(2) with the first members of `union bpf_attr`; the kernel takes the others as zero.
fn bpf(command: libc::c_int, attributes: [u32; 4]) -> io::Result<libc::c_int> {
    // SAFETY: the kernel reads `attributes` by its size. Of the commands above, those on files read a path at the address in it, which
    // `pin_at` and `open` borrow across the call. None writes to our memory.
    let done =
        unsafe { libc::syscall(libc::SYS_bpf, command, attributes.as_ptr(), size_of_val(&attributes)) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(done as libc::c_int) }
}
