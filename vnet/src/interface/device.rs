//! Network devices of the kernel behind interfaces: which namespace they live in, and what the kernel tells of them.
//!
//! A device belongs to whoever owns its namespace. It can be set down, get another MTU or be deleted, and its namespace can be
//! deleted and made again under the same name: then vnetd still has a device, in a namespace that nobody else reaches. So an
//! interface remembers the namespace's identity, and control compares it ([`OnDevice::lost`]).

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use super::netns::{NamespaceId, Netns, NetnsError};
use crate::wire::ethernet::Mac;

/// An interface that is a network device of the kernel.
pub trait OnDevice: Send + Sync {
    /// The device's network namespace, as configured; vnetd's own if absent.
    fn netns(&self) -> Option<&Netns>;

    /// Reads the device's state, MTU and MAC address anew, through a socket in its namespace.
    fn look(&self, socket: BorrowedFd<'_>);

    /// Why the interface has lost its device for good, if it has. It must be opened anew then.
    fn lost(&self) -> Option<String>;

    /// The MTU in use, in bytes.
    fn mtu(&self) -> usize;

    /// MAC address of a device that the interface made.
    fn mac(&self) -> Option<Mac> {
        None
    }
}

/// The network namespace that a device was opened in.
pub(super) struct Home {
    netns: Option<Netns>,
    id: Option<NamespaceId>,
}

impl Home {
    /// Runs `open` in a network namespace, or in the caller's.
    pub(super) fn enter<T: Send>(
        netns: Option<&Netns>,
        open: impl FnOnce() -> T + Send,
    ) -> Result<(Home, T), NetnsError> {
        let Some(netns) = netns else { return Ok((Home { netns: None, id: None }, open())) };
        let (id, opened) = netns.run(open)?;
        Ok((Home { netns: Some(netns.clone()), id: Some(id) }, opened))
    }

    pub(super) fn netns(&self) -> Option<&Netns> {
        self.netns.as_ref()
    }

    /// Why the namespace is no longer the one of that name, if so.
    pub(super) fn lost(&self) -> Option<String> {
        let netns = self.netns.as_ref()?;
        (netns.identity() != self.id).then(|| netns.absence())
    }

    /// Why an interface is down whose device is.
    pub(super) fn device_down(&self, device: &str) -> String {
        let command = Netns::ip_command(self.netns(), &format!("link set {device} up"));
        format!("device '{device}' is down; '{command}'")
    }
}

/// A device at one moment.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sight {
    pub(super) up: bool,
    /// It has a carrier.
    pub(super) running: bool,
    pub(super) mtu: usize,
    pub(super) index: libc::c_int,
}

/// Reads a device's properties through any socket in its namespace.
///
/// # Errors
/// ENODEV: there is none of that name.
pub(super) fn see(socket: impl AsFd, device: &str) -> io::Result<Sight> {
    let flags = query(&socket, device, libc::SIOCGIFFLAGS)?;
    let mtu = query(&socket, device, libc::SIOCGIFMTU)?;
    let index = query(&socket, device, libc::SIOCGIFINDEX)?;
    // SAFETY: each ioctl fills its member, of which every bit pattern is valid.
    let (flags, mtu, index) = unsafe {
        (libc::c_int::from(flags.ifr_ifru.ifru_flags), mtu.ifr_ifru.ifru_mtu, index.ifr_ifru.ifru_ifindex)
    };
    Ok(Sight {
        up: flags & libc::IFF_UP != 0,
        running: flags & libc::IFF_RUNNING != 0,
        mtu: usize::try_from(mtu).unwrap_or(0),
        index,
    })
}

/// The MAC address of an Ethernet device, through any socket in its namespace or a TAP's descriptor.
pub(super) fn mac(file: impl AsFd, device: &str) -> io::Result<Mac> {
    let answer = query(&file, device, libc::SIOCGIFHWADDR)?;
    // SAFETY: SIOCGIFHWADDR fills this member, of which every bit pattern is valid.
    let address = unsafe { answer.ifr_ifru.ifru_hwaddr };
    if address.sa_family != libc::ARPHRD_ETHER {
        return Err(io::Error::other("it is not an Ethernet device"));
    }
    Ok(Mac(std::array::from_fn(|i| address.sa_data[i] as u8)))
}

/// Queries a device by an ioctl of netdevice(7).
fn query(file: &impl AsFd, device: &str, request_code: libc::c_ulong) -> io::Result<libc::ifreq> {
    // SAFETY: `ifreq` is plain data, for which all zeros is a valid value.
    let mut request = unsafe { std::mem::zeroed::<libc::ifreq>() };
    // The last byte stays zero.
    let len_max = request.ifr_name.len() - 1;
    for (to, from) in request.ifr_name[..len_max].iter_mut().zip(device.bytes()) {
        *to = from as libc::c_char;
    }
    // SAFETY: the ioctls used here read and write one `struct ifreq`: `request`, exclusively ours.
    let result = unsafe { libc::ioctl(file.as_fd().as_raw_fd(), request_code as _, &raw mut request) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(request) }
}

/// Disables IPv6 at a device that is down, in the namespace of the calling thread.
pub(super) fn silence(device: &str) -> io::Result<()> {
    match std::fs::write(format!("/proc/sys/net/ipv6/conf/{device}/disable_ipv6"), "1") {
        // A kernel without IPv6.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

/// Keeps the host's network stack away from a device of the calling thread's namespace, for the time when no program takes
/// its frames: it does not answer ARP there, forwards nothing, and takes no packets from foreign sources.
pub(super) fn isolate(device: &str) -> io::Result<()> {
    for (key, value) in [("arp_ignore", "8"), ("forwarding", "0"), ("rp_filter", "1")] {
        std::fs::write(format!("/proc/sys/net/ipv4/conf/{device}/{key}"), value)?;
    }
    Ok(())
}
