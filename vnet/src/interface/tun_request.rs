//! Requests about a TAP through one of its queues (ioctls of `/dev/net/tun`).

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd};

use crate::wire::offload::Accepts;

/// `struct ifreq` for TUNSETIFF, in the kernel's size.
#[repr(C)]
struct IfReq {
    name: [u8; 16],
    flags: libc::c_short,
    rest: [u8; 22],
}

/// Attaches `file` as a queue of the device. Creates the device if it does not exist.
pub(super) fn attach_queue(file: &File, device: &str, many: bool) -> io::Result<()> {
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
    let flags = if many { flags | libc::IFF_MULTI_QUEUE } else { flags };
    let mut request = IfReq { name: [0; 16], flags: flags as libc::c_short, rest: [0; 22] };
    request.name[..device.len()].copy_from_slice(device.as_bytes());
    // SAFETY: TUNSETIFF reads and writes one `struct ifreq`: `request`, which this function owns.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF as _, &raw mut request) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn get(file: &File) -> io::Result<IfReq> {
    let mut request = IfReq { name: [0; 16], flags: 0, rest: [0; 22] };
    // SAFETY: TUNGETIFF writes one `struct ifreq`: `request`, which this function owns.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNGETIFF as _, &raw mut request) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(request) }
}

/// Name of the device to which the queue `file` belongs.
///
/// # Errors
/// EBADFD: the device was removed.
pub(super) fn name_of(file: &File) -> io::Result<String> {
    let request = get(file)?;
    let name = request.name.split(|byte| *byte == 0).next().unwrap_or_default();
    Ok(String::from_utf8_lossy(name).into_owned())
}

/// True if the device outlives its last queue.
///
/// # Errors
/// EBADFD: the device was removed.
pub(super) fn is_persistent(file: &File) -> io::Result<bool> {
    Ok(get(file)?.flags & libc::IFF_PERSIST as libc::c_short != 0)
}

/// The network namespace in which the device is.
///
/// # Errors
/// EBADFD: the device was removed. EPERM: the process lacks CAP_NET_ADMIN there.
pub(super) fn namespace_of(file: &File) -> io::Result<File> {
    // SAFETY: this ioctl takes no argument.
    let descriptor = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNGETDEVNETNS as _) };
    if descriptor < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new, and nothing else owns it.
    Ok(unsafe { File::from_raw_fd(descriptor) })
}

/// From now on the device admits queues of vnetd's user only, or of processes with CAP_NET_ADMIN there.
///
/// # Errors
/// EBADFD: the device was removed.
pub(super) fn set_owner(file: &File) -> io::Result<()> {
    set_value(file, libc::TUNSETOWNER as _, rustix::process::geteuid().as_raw().into())
}

/// Whether the device outlives its last queue from now on.
///
/// # Errors
/// EBADFD: the device was removed.
pub(super) fn persist(file: &File, outlives: bool) -> io::Result<()> {
    set_value(file, libc::TUNSETPERSIST as _, outlives.into())
}

/// Sets one of the properties that are passed by a pointer to an `int`.
pub(super) fn set_int(file: &File, request: libc::c_ulong, value: libc::c_int) -> io::Result<()> {
    // SAFETY: both ioctls used here read one int through the pointer, which is valid across the call.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), request as _, &raw const value) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn set_value(file: &File, request: libc::c_ulong, value: libc::c_ulong) -> io::Result<()> {
    // SAFETY: the ioctls used here (TUNSETOFFLOAD, TUNSETOWNER, TUNSETPERSIST) take their argument by value.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), request as _, value) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Enables super-frames and partial checksums from the kernel. UDP super-frames (USO) need Linux 6.2.
pub(super) fn set_offloads(file: &File) -> io::Result<Accepts> {
    const TUN_F_USO: libc::c_uint = 0x20 | 0x40;
    let base = libc::TUN_F_CSUM | libc::TUN_F_TSO4 | libc::TUN_F_TSO6 | libc::TUN_F_TSO_ECN;
    let set = |bits: libc::c_uint| set_value(file, libc::TUNSETOFFLOAD as _, bits.into());
    if set(base | TUN_F_USO).is_ok() {
        return Ok(Accepts::ALL);
    }
    set(base)?;
    Ok(Accepts { uso: false, ..Accepts::ALL })
}
