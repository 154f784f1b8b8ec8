//! Network devices of the kernel behind interfaces: their network namespace, and the properties that the kernel reports.
//!
//! The owner of a device's namespace controls the device: they can set it down, change its MTU, or delete it. They can also
//! delete the namespace and create a new one of the same name: vnetd then still holds a device, but in a namespace that no other
//! process can reach. So an interface remembers the namespace's identity, and control compares it ([`OnDevice::lost`]).

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use super::kept::Place;
use super::netns::{NamespaceId, Netns, NetnsError};
use crate::wire::ethernet::Mac;

/// An interface that is a network device of the kernel.
pub trait OnDevice: Send + Sync {
    /// The device's network namespace, as configured; vnetd's own if absent.
    fn netns(&self) -> Option<&Netns>;

    /// Reads the device's state, MTU and MAC address again, through a socket in its namespace.
    fn look(&self, socket: BorrowedFd<'_>);

    /// The reason why the interface has lost its device for good and must be reopened; `None` while it has the device.
    fn lost(&self) -> Option<String>;

    /// The MTU in use, in bytes.
    fn mtu(&self) -> usize;

    /// MAC address of the device; `None` for interfaces that never create their device.
    fn mac(&self) -> Option<Mac> {
        None
    }

    /// Where the device is, if it outlives this process and is still there.
    ///
    /// # Errors
    /// The kernel does not say.
    fn place(&self) -> io::Result<Option<Place>> {
        Ok(None)
    }
}

/// The network namespace in which a device was opened.
pub(super) struct Home {
    netns: Option<Netns>,
    id: Option<NamespaceId>,
}

impl Home {
    /// Runs `open` in a network namespace; in the caller's if `netns` is absent.
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

    /// The reason why the namespace's name no longer refers to this namespace; `None` while it does.
    pub(super) fn lost(&self) -> Option<String> {
        let netns = self.netns.as_ref()?;
        let now = netns.identity();
        (now != self.id).then(|| match (netns.pid(), now) {
            (Some(pid), Some(_)) => format!("process {pid} has entered another network namespace"),
            _ => netns.absence(),
        })
    }

    /// The reason to report for an interface whose device is down.
    pub(super) fn device_down(&self, device: &str) -> String {
        let command = Netns::ip_command(self.netns(), &format!("link set {device} up"));
        format!("device '{device}' is down; '{command}'")
    }
}

/// Properties of a device at the time of reading.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sight {
    pub(super) up: bool,
    /// True if the device has a carrier.
    pub(super) running: bool,
    pub(super) mtu: usize,
    pub(super) index: libc::c_int,
}

/// Reads a device's properties through any socket in its namespace.
///
/// # Errors
/// ENODEV: the namespace has no device of that name.
pub(super) fn see(socket: impl AsFd, device: &str) -> io::Result<Sight> {
    let flags = query(&socket, device, libc::SIOCGIFFLAGS)?;
    let mtu = query(&socket, device, libc::SIOCGIFMTU)?;
    let index = query(&socket, device, libc::SIOCGIFINDEX)?;
    // SAFETY: each ioctl fills its union member, for which every bit pattern is valid.
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
    // SAFETY: SIOCGIFHWADDR fills this union member, for which every bit pattern is valid.
    let address = unsafe { answer.ifr_ifru.ifru_hwaddr };
    if address.sa_family != libc::ARPHRD_ETHER {
        return Err(io::Error::other("it is not an Ethernet device"));
    }
    Ok(Mac(std::array::from_fn(|i| address.sa_data[i] as u8)))
}

/// True if a device merges arriving TCP frames so that they cannot be forwarded (LRO), through any socket in its namespace.
pub(super) fn merges_frames(socket: impl AsFd, device: &str) -> io::Result<bool> {
    /// `struct ethtool_value`.
    #[repr(C)]
    struct Value {
        command: u32,
        data: u32,
    }
    // linux/sockios.h, linux/ethtool.h
    const SIOCETHTOOL: libc::c_ulong = 0x8946;
    const ETHTOOL_GFLAGS: u32 = 0x25;
    const ETH_FLAG_LRO: u32 = 1 << 15;
    let mut value = Value { command: ETHTOOL_GFLAGS, data: 0 };
    let mut request = named(device);
    request.ifr_ifru.ifru_data = (&raw mut value).cast();
    // SAFETY: SIOCETHTOOL reads and writes one `struct ifreq`, and for this command one `struct ethtool_value`; both are this
    // function's own.
    let result = unsafe { libc::ioctl(socket.as_fd().as_raw_fd(), SIOCETHTOOL as _, &raw mut request) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(value.data & ETH_FLAG_LRO != 0) }
}

/// Queries a device with an ioctl of netdevice(7).
fn query(file: &impl AsFd, device: &str, request_code: libc::c_ulong) -> io::Result<libc::ifreq> {
    let mut request = named(device);
    // SAFETY: the ioctls used here read and write one `struct ifreq`: `request`, which this function owns.
    let result = unsafe { libc::ioctl(file.as_fd().as_raw_fd(), request_code as _, &raw mut request) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(request) }
}

/// A request about a device.
fn named(device: &str) -> libc::ifreq {
    // SAFETY: `ifreq` is plain data, for which all zeros is a valid value.
    let mut request = unsafe { std::mem::zeroed::<libc::ifreq>() };
    // The last byte stays zero, as the terminator.
    let len_max = request.ifr_name.len() - 1;
    for (to, from) in request.ifr_name[..len_max].iter_mut().zip(device.bytes()) {
        *to = from as libc::c_char;
    }
    request
}

/// Lets the host's network stack forward packets from a device of the calling thread's namespace. The kernel tells programs the next
/// hop of such packets only (`bpf_fib_lookup`).
pub(super) fn forward(device: &str) -> io::Result<()> {
    std::fs::write(format!("/proc/sys/net/ipv4/conf/{device}/forwarding"), "1")
}

/// Keeps the host's network stack away from a device of the calling thread's namespace for as long as no program takes its
/// frames: the stack does not answer ARP on the device, forwards nothing, and takes no packets from foreign sources.
pub(super) fn isolate(device: &str) -> io::Result<()> {
    for (key, value) in [("arp_ignore", "8"), ("forwarding", "0"), ("rp_filter", "1")] {
        std::fs::write(format!("/proc/sys/net/ipv4/conf/{device}/{key}"), value)?;
    }
    Ok(())
}
