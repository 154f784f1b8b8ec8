//! Descriptors that a running vnetd hands to the next one (`vnetd --take-over`), by name.
//!
//! ```text
//!   bridge/D/I            UDP socket I of dispatcher D         kernel/lock, kernel/mount   the lock of the pinned objects' folder
//!   vxlan/D               the VXLAN socket of dispatcher D     kernel/wire                 the wire's TAP
//!   streams               the TCP listener of stream links     interface/NAME/KIND         queues and sockets of an interface, in order
//!   sealed                the TCP listener for handshakes of sealed links
//!   relay                 UDP sockets of the pairs of hosts that meet here
//! ```
//!
//! Both processes hold the same open files, so frames wait in the kernel's queues while neither reads. Until the last step is done,
//! the heir owns nothing: it removes no device, pin or socket file, and closing its descriptors changes nothing for the running
//! vnetd. [`Inheritance::settle`] ends that.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

/// Name of the lock of the folder of pinned objects.
pub const KERNEL_LOCK: &str = "kernel/lock";
/// Its name if the running vnetd has mounted the file system, too: the heir unmounts it at its end.
pub const KERNEL_MOUNT: &str = "kernel/mount";
/// Name of the wire's TAP.
pub const WIRE: &str = "kernel/wire";
/// Name of the listener of stream links.
pub const STREAMS: &str = "streams";

/// Name of the TCP listener for handshakes of sealed links.
pub const SEALED: &str = "sealed";
/// Name of the UDP sockets of the pairs of hosts that meet here.
pub const RELAY: &str = "relay";

/// Name of socket `index` of dispatcher `dispatcher`.
pub fn bridge(dispatcher: usize, index: usize) -> String {
    format!("bridge/{dispatcher}/{index}")
}

/// Name of the VXLAN socket of dispatcher `dispatcher`.
pub fn vxlan(dispatcher: usize) -> String {
    format!("vxlan/{dispatcher}")
}

/// Name of the descriptors of one kind of an interface.
pub fn interface(name: &str, kind: &str) -> String {
    format!("interface/{name}/{kind}")
}

/// Kind of an interface's descriptors: the sockets of its direct ports.
pub const DIRECT: &str = "direct";

/// A direct port of an interface: a socket that receives from the other host of one link. Its descriptor is passed beside it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PortState {
    /// Name of the link.
    pub link: String,
    /// The link has negotiated it; otherwise it is configured.
    pub negotiated: bool,
    /// The only address from which its socket takes datagrams, once it is known.
    pub peer: Option<SocketAddr>,
}

/// What the front end of a guest has said so far (vhost-user); descriptors are passed beside it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GuestState {
    /// Acknowledged features.
    pub features: u64,
    /// Acknowledged protocol features.
    pub protocol: u64,
    /// Regions of memory, in the order of their descriptors.
    pub regions: Vec<RegionState>,
    /// All vrings.
    pub vrings: Vec<VringState>,
    /// The guest has departed by a live migration.
    pub departed: bool,
}

/// A region of a guest's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RegionState {
    /// Guest physical address.
    pub guest_addr: u64,
    /// Address in the front end's address space.
    pub user_addr: u64,
    /// Length in bytes.
    pub len: u64,
    /// Offset in the file.
    pub offset: u64,
}

/// A vring. Its position is in the guest's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VringState {
    /// Entries.
    pub size: Option<u32>,
    /// Descriptor table, available ring and used ring, in the front end's address space.
    pub addresses: Option<[u64; 3]>,
    /// Guest physical address of the used ring in the log.
    pub used_log: Option<u64>,
    /// Where a ring that is stopped would go on.
    pub base: u16,
    /// Enabled by the front end.
    pub enabled: bool,
    /// `Some` if it is started; true if the guest notifies by an eventfd.
    pub kick: Option<bool>,
    /// The guest is notified by an eventfd.
    pub call: bool,
    /// The front end is told of a broken ring by an eventfd.
    pub error: bool,
}

/// Descriptors received from the running vnetd.
#[derive(Debug, Default)]
pub struct Inheritance {
    descriptors: Mutex<BTreeMap<String, Vec<OwnedFd>>>,
    guests: Mutex<BTreeMap<String, GuestState>>,
    /// Direct ports by interface.
    ports: Mutex<BTreeMap<String, Vec<(PortState, OwnedFd)>>>,
    settled: AtomicBool,
}

impl Inheritance {
    /// Descriptors with their names. Those of one name keep their order.
    pub fn new(descriptors: impl IntoIterator<Item = (String, OwnedFd)>) -> Inheritance {
        let mut by_name: BTreeMap<String, Vec<OwnedFd>> = BTreeMap::new();
        for (name, descriptor) in descriptors {
            by_name.entry(name).or_default().push(descriptor);
        }
        Inheritance { descriptors: Mutex::new(by_name), ..Inheritance::default() }
    }

    /// Adds the states of guests, by the names of their interfaces.
    pub fn add_guests(&self, guests: BTreeMap<String, GuestState>) {
        self.guests.lock().extend(guests);
    }

    /// Adds the direct ports of interfaces, whose descriptors have come in the same order.
    ///
    /// # Errors
    /// An interface has more or fewer descriptors than ports; holds its name.
    pub fn add_ports(&self, ports: BTreeMap<String, Vec<PortState>>) -> Result<(), String> {
        for (name, states) in ports {
            let sockets = self.take(&interface(&name, DIRECT));
            if sockets.len() != states.len() {
                return Err(name);
            }
            self.ports.lock().insert(name, states.into_iter().zip(sockets).collect());
        }
        Ok(())
    }

    /// Takes an interface's direct port for a link: its socket, and the only address from which it takes datagrams.
    pub fn port(
        &self,
        interface: &str,
        link: &str,
        negotiated: bool,
    ) -> Option<(OwnedFd, Option<SocketAddr>)> {
        let mut all = self.ports.lock();
        let ports = all.get_mut(interface)?;
        let at = ports.iter().position(|(port, _)| port.link == link && port.negotiated == negotiated)?;
        let (port, socket) = ports.swap_remove(at);
        Some((socket, port.peer))
    }

    /// Takes the state of an interface's guest.
    pub fn guest(&self, interface: &str) -> Option<GuestState> {
        self.guests.lock().remove(interface)
    }

    /// True if the running vnetd has handed over an interface of kind vhost-user.
    pub fn has_guest(&self, interface: &str) -> bool {
        self.guests.lock().contains_key(interface)
    }

    /// True if descriptors of that name have not been taken.
    pub fn has(&self, name: &str) -> bool {
        self.descriptors.lock().contains_key(name)
    }

    /// Takes all descriptors of a name.
    pub fn take(&self, name: &str) -> Vec<OwnedFd> {
        self.descriptors.lock().remove(name).unwrap_or_default()
    }

    /// Takes the only descriptor of a name.
    pub fn take_one(&self, name: &str) -> Option<OwnedFd> {
        self.take(name).pop()
    }

    /// Names of descriptors that nobody has taken.
    pub fn left(&self) -> Vec<String> {
        self.descriptors.lock().keys().cloned().collect()
    }

    /// The running vnetd has ended: devices, pins and socket files belong to this process.
    pub fn settle(&self) {
        // Ports that are not wanted any more.
        self.ports.lock().clear();
        self.settled.store(true, Ordering::Release);
    }

    /// True after [`Inheritance::settle`].
    pub fn is_settled(&self) -> bool {
        self.settled.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;

    #[test]
    fn descriptors_of_a_name_keep_their_order() {
        let open = || OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        let (a, b, c) = (open(), open(), open());
        let order = [a.as_raw_fd(), c.as_raw_fd()];
        let tap = || interface("c1", "tap");
        let all = Inheritance::new([(tap(), a), (bridge(0, 1), b), (tap(), c)]);
        assert_eq!(all.left(), ["bridge/0/1", "interface/c1/tap"]);
        let taken: Vec<_> = all.take(&tap()).iter().map(AsRawFd::as_raw_fd).collect();
        assert_eq!(taken, order);
        assert!(all.take(&tap()).is_empty() && !all.has(&tap()) && all.has("bridge/0/1"));
        assert!(all.take_one("bridge/0/1").is_some() && all.left().is_empty());
        assert!(!all.is_settled());
    }

    #[test]
    fn ports_are_found_by_their_links() {
        let open = || OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        let port = |link: &str, negotiated, peer: &str| PortState {
            link: link.into(),
            negotiated,
            peer: peer.parse().ok(),
        };
        let ports = || vec![port("h2", false, ""), port("h2", true, "192.0.2.2:9000"), port("h3", true, "")];
        let name = || interface("vm1", DIRECT);
        let files = [open(), open(), open()];
        let second = files[1].as_raw_fd();
        let all = Inheritance::new(files.map(|file| (name(), file)));
        all.add_ports(BTreeMap::from([("vm1".into(), ports())])).unwrap();
        assert!(all.left().is_empty());
        let (socket, peer) = all.port("vm1", "h2", true).unwrap();
        assert_eq!((socket.as_raw_fd(), peer), (second, "192.0.2.2:9000".parse().ok()));
        assert!(all.port("vm1", "h2", true).is_none() && all.port("vm2", "h2", false).is_none());
        assert_eq!(all.port("vm1", "h3", true).unwrap().1, None);
        all.settle();
        assert!(all.port("vm1", "h2", false).is_none());
        let fewer = Inheritance::new([(name(), open())]);
        assert_eq!(fewer.add_ports(BTreeMap::from([("vm1".into(), ports())])), Err("vm1".into()));
    }
}
