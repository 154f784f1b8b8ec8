//! The program of a netkit pair: it runs while the container sends. By bpf(2), because aya has no such links.
//!
//! The host's end (the pair's primary) takes the program, and the container's end (the peer) runs it. The buffer is at the host's end
//! by then: `ifindex` is the host's end, and a redirect finds devices of the host. The hook is no ingress, so the kernel drops
//! frames of `bpf_redirect_peer` there.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use aya::programs::SchedClassifier;

use super::KernelError;
use super::hooks::Hook;

/// Commands and an attach type of linux/bpf.h.
const BPF_OBJ_PIN: libc::c_int = 6;
const BPF_OBJ_GET: libc::c_int = 7;
const BPF_LINK_CREATE: libc::c_int = 28;
const BPF_LINK_UPDATE: libc::c_int = 29;
const BPF_NETKIT_PEER: u32 = 55;

/// Attaches a program to the pair of the host's end `device`. With a pin, it outlives vnetd; the program of a pinned link is replaced,
/// between two frames.
pub(super) fn attach(
    program: &SchedClassifier,
    device: u32,
    pin: Option<PathBuf>,
) -> Result<Hook, KernelError> {
    let program = program.fd()?.as_fd();
    if let Some(pin) = &pin
        && open(pin).and_then(|link| update(link.as_fd(), program)).is_ok()
    {
        return Ok(Hook::Pinned(pin.clone()));
    }
    let fail = |error: io::Error| KernelError::Load(error.to_string());
    let link = create(program, device).map_err(fail)?;
    let Some(file) = pin else { return Ok(Hook::HeldByPair { _link: link }) };
    // The file may exist for a device that is gone.
    let _ = std::fs::remove_file(&file);
    pin_at(link.as_fd(), &file).map_err(fail)?;
    Ok(Hook::Pinned(file))
}

fn create(program: BorrowedFd<'_>, device: u32) -> io::Result<OwnedFd> {
    let link = bpf(BPF_LINK_CREATE, [number(program), device, BPF_NETKIT_PEER, 0])?;
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
