//! Queues of TAP devices: opens them and configures the device, or takes those of a running vnetd.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{LinkAttribute, LinkFlags, LinkMessage};

use super::device::{self, Sight};
use super::netns::{Netns, NetnsError};
use super::queue_len::queue_len;
use crate::helper;
use crate::netlink::Netlink;
use crate::wire::ethernet::{HEADER_LEN, Mac};
use crate::wire::offload::{Accepts, VIRTIO_NET_HDR_LEN};

/// Maximum MTU of a TAP in bytes: 65535 less the Ethernet header.
pub const TAP_MTU_MAX: usize = 65_535 - HEADER_LEN;
/// Maximum super-frame that the kernel may build on devices created here, in bytes. Segmented for a path MTU of 1500, with
/// headers, it fits into one message to a link's socket (65 400 bytes); a larger one needs two.
const GSO_MAX_SIZE: u32 = 64_000;
/// Maximum length of a device name in bytes (IFNAMSIZ less the terminating zero).
pub const DEVICE_NAME_MAX: usize = 15;

/// Configuration of a TAP.
#[derive(Clone, Debug)]
pub struct TapOptions {
    /// Device name, at most [`DEVICE_NAME_MAX`] bytes.
    pub device: String,
    /// The device's network namespace; vnetd's own if absent.
    pub netns: Option<Netns>,
    /// MAC address of the guest's side; chosen by the kernel if absent.
    pub mac: Option<Mac>,
    /// MAC address for a device created here if `mac` is absent: that of the previous device, so that the guest keeps its
    /// address.
    pub mac_before: Option<Mac>,
    /// MTU in bytes, capped at [`TAP_MTU_MAX`].
    pub mtu: usize,
    /// Number of queues, 1 to 256.
    pub queues: usize,
    /// True if programs rather than a network stack use the device: IPv6 is disabled on it, because IPv6 sends packets by itself.
    pub silent: bool,
}

/// Error when opening a TAP.
#[derive(Debug, thiserror::Error)]
pub enum TapError {
    /// The namespace does not exist, or vnetd may not enter it.
    #[error(transparent)]
    Netns(#[from] NetnsError),
    /// Cannot open `/dev/net/tun`.
    #[error("cannot open /dev/net/tun: {0}; run vnetd as root or give it CAP_NET_ADMIN and the device")]
    Device(io::Error),
    /// The kernel refused a step of opening the device.
    #[error("cannot {step} device '{device}': {error}{hint}")]
    Step {
        /// The step, as a verb for the message.
        step: &'static str,
        /// Name of the device.
        device: String,
        /// The kernel's error.
        error: io::Error,
        /// A hint for the user, or empty.
        hint: &'static str,
    },
}

impl TapError {
    /// The reason for the state "down" if the missing part may still appear; `None` if only another configuration helps.
    pub fn waits_for(&self) -> Option<String> {
        match self {
            TapError::Netns(error) => error.waits_for(),
            TapError::Device(_) | TapError::Step { .. } => None,
        }
    }
}

/// `struct ifreq` for TUNSETIFF, in the kernel's size.
#[repr(C)]
struct IfReq {
    name: [u8; 16],
    flags: libc::c_short,
    rest: [u8; 22],
}

/// Opens all queues and configures the device in the thread's target namespace.
pub(super) fn open_queues(options: &TapOptions) -> Result<(Vec<File>, Accepts, Sight), TapError> {
    let fail = |step, error: io::Error, hint| TapError::Step {
        step,
        device: options.device.chars().take(64).collect(),
        error,
        hint,
    };
    if options.device.is_empty() || options.device.len() > DEVICE_NAME_MAX {
        let error = io::Error::from(io::ErrorKind::InvalidInput);
        return Err(fail("name", error, "; a device name has 1 to 15 characters"));
    }
    let existed = device_index(&options.device).is_some();
    let mut files = Vec::with_capacity(options.queues);
    let mut accepts = Accepts::ALL;
    for _ in 0..options.queues {
        let file = helper::tun().map_err(TapError::Device)?;
        attach_queue(&file, &options.device, options.queues > 1).map_err(|error| {
            let hint = match error.raw_os_error() {
                Some(libc::EBUSY) => {
                    "; another program has it open: kind = \"local\" takes a TAP that QEMU or another program has opened"
                }
                Some(libc::EPERM) => "; run vnetd as root or give it CAP_NET_ADMIN",
                Some(libc::EINVAL) => {
                    "; is there another device of that name, or one made with other options?"
                }
                _ => "",
            };
            fail("open", error, hint)
        })?;
        set_int(&file, libc::TUNSETVNETHDRSZ as libc::c_ulong, VIRTIO_NET_HDR_LEN as libc::c_int)
            .map_err(|e| fail("set the header size of", e, ""))?;
        set_int(&file, libc::TUNSETVNETLE as libc::c_ulong, 1)
            .map_err(|e| fail("set the byte order of", e, ""))?;
        accepts = set_offloads(&file).map_err(|e| fail("set offloads of", e, ""))?;
        files.push(file);
    }
    if options.silent {
        helper::disable_ipv6(&options.device).map_err(|error| fail("disable IPv6 on", error, ""))?;
    }
    let sight = configure(options, existed).map_err(|error| fail("configure", error, ""))?;
    Ok((files, accepts, sight))
}

/// Takes queues that a running vnetd has opened with the same options. A device that was renamed or moved to another namespace is taken for
/// up until control looks at it.
pub(super) fn inherit_queues(
    options: &TapOptions,
    files: Vec<File>,
) -> Result<(Vec<File>, Accepts, Sight), TapError> {
    let fail = |step, error, hint| TapError::Step { step, device: options.device.clone(), error, hint };
    let mut accepts = Accepts::ALL;
    for file in &files {
        name_of(file).map_err(|error| fail("find", error, "; it was removed"))?;
        accepts = set_offloads(file).map_err(|error| fail("set offloads of", error, ""))?;
    }
    if files.len() != options.queues {
        let error = io::Error::from(io::ErrorKind::InvalidInput);
        return Err(fail("take over", error, "; its number of queues differs from `queues`"));
    }
    let index = device_index(&options.device).unwrap_or(0) as libc::c_int;
    let unseen = Sight { up: true, running: true, mtu: options.mtu.min(TAP_MTU_MAX), index };
    let sight = Netlink::new().and_then(|socket| device::see(&socket, &name_of(&files[0])?));
    Ok((files, accepts, sight.unwrap_or(unseen)))
}

/// Name of the device to which the queue `file` belongs.
///
/// # Errors
/// EBADFD: the device was removed.
pub(super) fn name_of(file: &File) -> io::Result<String> {
    let mut request = IfReq { name: [0; 16], flags: 0, rest: [0; 22] };
    // SAFETY: TUNGETIFF writes one `struct ifreq`: `request`, which this function owns.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNGETIFF as _, &raw mut request) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    let name = request.name.split(|byte| *byte == 0).next().unwrap_or_default();
    Ok(String::from_utf8_lossy(name).into_owned())
}

/// Attaches `file` as a queue of the device. Creates the device if it does not exist.
fn attach_queue(file: &File, device: &str, many: bool) -> io::Result<()> {
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
    let flags = if many { flags | libc::IFF_MULTI_QUEUE } else { flags };
    let mut request = IfReq { name: [0; 16], flags: flags as libc::c_short, rest: [0; 22] };
    request.name[..device.len()].copy_from_slice(device.as_bytes());
    // SAFETY: TUNSETIFF reads and writes one `struct ifreq`: `request`, which this function owns.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF as _, &raw mut request) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn set_int(file: &File, request: libc::c_ulong, value: libc::c_int) -> io::Result<()> {
    // SAFETY: both ioctls used here read one int through the pointer, which is valid across the call.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), request as _, &raw const value) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Enables super-frames and partial checksums from the kernel. UDP super-frames (USO) need Linux 6.2.
fn set_offloads(file: &File) -> io::Result<Accepts> {
    const TUN_F_USO: libc::c_uint = 0x20 | 0x40;
    let base = libc::TUN_F_CSUM | libc::TUN_F_TSO4 | libc::TUN_F_TSO6 | libc::TUN_F_TSO_ECN;
    let set = |bits: libc::c_uint| {
        // SAFETY: TUNSETOFFLOAD takes its argument by value.
        let result =
            unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETOFFLOAD as _, libc::c_ulong::from(bits)) };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    };
    if set(base | TUN_F_USO).is_ok() {
        return Ok(Accepts::ALL);
    }
    set(base)?;
    Ok(Accepts { uso: false, ..Accepts::ALL })
}

/// Index of a device in the thread's target namespace.
pub(super) fn device_index(device: &str) -> Option<u32> {
    helper::device_index(device).ok()
}

/// Sets MAC address and MTU. For a device created here, also sets its queue length and GSO limit and sets it up. Runs in the
/// thread's target namespace. Returns the resulting properties of the device.
fn configure(options: &TapOptions, existed: bool) -> io::Result<Sight> {
    let mut link = LinkMessage::default();
    link.header.index = device_index(&options.device).ok_or_else(io::Error::last_os_error)?;
    link.attributes.push(LinkAttribute::Mtu(options.mtu.min(TAP_MTU_MAX) as u32));
    if let Some(mac) = options.mac.or(options.mac_before.filter(|_| !existed)) {
        link.attributes.push(LinkAttribute::Address(mac.0.to_vec()));
    }
    if !existed {
        link.attributes.push(LinkAttribute::GsoMaxSize(GSO_MAX_SIZE));
        link.attributes.push(LinkAttribute::TxQueueLen(queue_len(options.mtu) as u32));
        link.header.flags = LinkFlags::Up;
        link.header.change_mask = LinkFlags::Up;
    }
    let netlink = Netlink::new()?;
    netlink.change(RouteNetlinkMessage::SetLink(link), 0)?;
    device::see(&netlink, &options.device)
}
