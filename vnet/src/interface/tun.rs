//! Queues of TAP devices: opens them and configures the device, adopts that of a vnetd that has ended, or takes those of a running vnetd.

use std::fs::File;
use std::io;

use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{LinkAttribute, LinkFlags, LinkMessage};

use super::device::{self, Sight};
use super::kept::{self, Found, Keep, Standing};
use super::netns::{Netns, NetnsError};
use super::queue_len::queue_len;
pub(super) use super::tun_request::name_of;
use super::tun_request::{attach_queue, is_persistent, set_int, set_offloads};
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
    /// MAC address for a device made here if `mac` is absent: that of the previous device, so that the guest keeps its
    /// address.
    pub mac_before: Option<Mac>,
    /// MTU in bytes, capped at [`TAP_MTU_MAX`].
    pub mtu: usize,
    /// Number of queues, 1 to 256.
    pub queues: usize,
    /// True if programs rather than a network stack use the device: IPv6 is disabled on it, because IPv6 sends packets by itself.
    pub silent: bool,
    /// How the device outlives this process; `None`: it goes with its last descriptor.
    pub keep: Option<Keep>,
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
    /// The device has the mark of another vnetd.
    #[error(
        "cannot open device '{device}': it is of the {vnetd}; if that one has gone for good, 'ip link del {device}'"
    )]
    Owned {
        /// Name of the device.
        device: String,
        /// The other vnetd.
        vnetd: String,
    },
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
            TapError::Device(_) | TapError::Owned { .. } | TapError::Step { .. } => None,
        }
    }
}

/// Queues of a device.
pub(super) struct Queues {
    pub(super) files: Vec<File>,
    pub(super) accepts: Accepts,
    pub(super) sight: Sight,
    pub(super) standing: Standing,
}

fn failed(device: &str, step: &'static str, error: io::Error, hint: &'static str) -> TapError {
    TapError::Step { step, device: device.chars().take(64).collect(), error, hint }
}

/// Opens the queues of a device: where the vnetd before saw that it was moved to, if it is still there; else in the thread's target
/// namespace.
pub(super) fn open_moved(options: &TapOptions) -> Result<Queues, TapError> {
    if let Some(Keep { mark, moved: Some(place) }) = &options.keep
        && let Ok(namespace) = helper::namespace_with(place.namespace)
    {
        let there = TapOptions { device: place.name.clone(), ..options.clone() };
        let open = || match Found::is_own(&there.device, mark) {
            Ok(true) => Some(open_queues(&there)),
            _ => None,
        };
        if let Ok(Some(opened)) = helper::within(namespace, open) {
            return opened;
        }
    }
    open_queues(options)
}

/// Opens all queues and configures the device in the thread's target namespace.
pub(super) fn open_queues(options: &TapOptions) -> Result<Queues, TapError> {
    let fail = |step, error: io::Error, hint| failed(&options.device, step, error, hint);
    if options.device.is_empty() || options.device.len() > DEVICE_NAME_MAX {
        let error = io::Error::from(io::ErrorKind::InvalidInput);
        return Err(fail("name", error, "; a device name has 1 to 15 characters"));
    }
    let mark = options.keep.as_ref().map(|keep| &keep.mark);
    let found = Found::of(&options.device).map_err(|error| fail("find", error, ""))?;
    let standing = match &found {
        None => Standing::Made,
        Some(found) if mark.is_some_and(|mark| found.has(mark)) => Standing::Adopted,
        Some(found) => match found.vnetd(mark) {
            Some(vnetd) => return Err(TapError::Owned { device: options.device.clone(), vnetd }),
            None => Standing::Foreign,
        },
    };
    let had = found.and_then(|found| found.mac);
    let (files, accepts) = match (attach_all(options), mark) {
        // It has one queue and is to have several, or the other way round.
        (Err(TapError::Step { error, .. }), Some(mark))
            if standing == Standing::Adopted && error.raw_os_error() == Some(libc::EINVAL) =>
        {
            tracing::info!("makes device '{}' again, for another number of queues", options.device);
            kept::remove_own(&options.device, mark).map_err(|error| fail("remove the old", error, ""))?;
            return open_queues(&TapOptions { mac_before: options.mac_before.or(had), ..options.clone() });
        }
        (attached, _) => attached?,
    };
    if options.silent {
        helper::disable_ipv6(&options.device).map_err(|error| fail("disable IPv6 on", error, ""))?;
    }
    let sight = configure(options, standing, had).map_err(|error| fail("configure", error, ""))?;
    // Last: until then the device goes with its queues if a step fails.
    if let (Some(mark), Standing::Made | Standing::Adopted) = (mark, standing) {
        kept::claim(&files[0], mark).map_err(|error| fail("keep", error, ""))?;
    }
    Ok(Queues { files, accepts, sight, standing })
}

/// Opens all queues of the device in the thread's target namespace. Creates the device if it does not exist.
fn attach_all(options: &TapOptions) -> Result<(Vec<File>, Accepts), TapError> {
    let fail = |step, error: io::Error, hint| failed(&options.device, step, error, hint);
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
    Ok((files, accepts))
}

/// Takes queues that a running vnetd has opened with the same options. A device that was renamed or moved to another namespace is taken for
/// up until control looks at it.
pub(super) fn inherit_queues(options: &TapOptions, files: Vec<File>) -> Result<Queues, TapError> {
    let fail = |step, error, hint| failed(&options.device, step, error, hint);
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
    let sight = sight.unwrap_or(unseen);
    // One that would go with its queues was made by a vnetd that did not keep its devices.
    let is_own =
        |mark| -> io::Result<bool> { Ok(!is_persistent(&files[0])? || kept::is_own(&files[0], mark)?) };
    let is_own = options.keep.as_ref().is_some_and(|keep| is_own(&keep.mark).unwrap_or(false));
    let standing = if is_own { Standing::Adopted } else { Standing::Foreign };
    Ok(Queues { files, accepts, sight, standing })
}

/// Index of a device in the thread's target namespace.
pub(super) fn device_index(device: &str) -> Option<u32> {
    helper::device_index(device).ok()
}

/// Sets MTU and MAC address, which the device `had` before. For a device of this vnetd, also sets its queue length; for one that was
/// made here, also its GSO limit, and sets it up. Runs in the thread's target namespace. Returns the resulting properties of the device.
fn configure(options: &TapOptions, standing: Standing, had: Option<Mac>) -> io::Result<Sight> {
    let mut link = LinkMessage::default();
    link.header.index = device_index(&options.device).ok_or_else(io::Error::last_os_error)?;
    link.attributes.push(LinkAttribute::Mtu(options.mtu.min(TAP_MTU_MAX) as u32));
    let mac = options.mac.or(options.mac_before.filter(|_| standing == Standing::Made));
    // The kernel would flush the neighbour table for the same address, too.
    if let Some(mac) = mac.filter(|mac| had != Some(*mac)) {
        link.attributes.push(LinkAttribute::Address(mac.0.to_vec()));
    }
    if standing != Standing::Foreign {
        link.attributes.push(LinkAttribute::TxQueueLen(queue_len(options.mtu) as u32));
    }
    if standing == Standing::Made {
        link.attributes.push(LinkAttribute::GsoMaxSize(GSO_MAX_SIZE));
        link.header.flags = LinkFlags::Up;
        link.header.change_mask = LinkFlags::Up;
    }
    let netlink = Netlink::new()?;
    netlink.change(RouteNetlinkMessage::SetLink(link), 0)?;
    device::see(&netlink, &options.device)
}
