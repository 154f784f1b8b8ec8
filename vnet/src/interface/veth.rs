//! Containers' interfaces: a pair of devices between container and host (`pair.rs`), with a TAP behind its host's end.
//!
//! ```text
//!   container          vnetd's network namespace
//!   DEVICE ----------- host's end  <- programs of the kernel's own path ->  TAP ------ vnetd
//! ```
//!
//! The programs (the room `kernel`) move frames between the host's end and the TAP, and known flows past vnetd. To vnetd the
//! interface is the TAP: same frames, same queues, same offloads. The container contains nothing of vnet except its device.
//!
//! The pair is created if it does not exist, and removed at the end. After a crash the next vnetd finds the pair, with the addresses and
//! routes that the container has assigned to it. vnetd does not set a MAC address that the device has already: the kernel would flush
//! the container's neighbour table.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use netlink_packet_route::link::LinkAttribute;
use parking_lot::Mutex;
use rustix::net::netdevice::index_to_name;

use super::device::{self, Home, OnDevice};
use super::link_request::{raise, remove};
use super::netns::{Netns, NetnsError};
use super::pair::{self, VethOptions};
use super::tap::{self, TAP_MTU_MAX, Tap, TapError, TapOptions};
use super::{Handed, Interface, KernelDevice, LeadsTo, State, headroom};
use crate::frame::{DropSink, Origin, Selection};
use crate::helper;
use crate::inherit::Inheritance;
use crate::netlink::{self, Netlink};
use crate::source::Source;
use crate::stats::PortStats;
use crate::wire::ethernet::Mac;

/// Beginning of the names of hosts' ends.
const HOST_END: &str = "vnet-";

/// Why a container's interface could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum VethError {
    /// The kernel rejected a step that a TAP needs, too.
    #[error(transparent)]
    Tap(#[from] TapError),
    /// The container's frames would reach the host's network stack while no program is attached. The pair has been removed.
    #[error(
        "cannot keep the host's network stack away from device '{device}': {error}; is /proc/sys writable?"
    )]
    Exposed {
        /// The host's end.
        device: String,
        /// The kernel's error.
        error: io::Error,
    },
}

impl From<NetnsError> for VethError {
    fn from(error: NetnsError) -> VethError {
        VethError::Tap(error.into())
    }
}

/// A container's interface.
pub struct Veth {
    tap: Arc<Tap>,
    device: KernelDevice,
    /// The container's device.
    name: String,
    home: Home,
    /// The container's device when control last looked.
    seen: Mutex<Seen>,
    /// False while the host's end is down, and where the kernel refuses.
    has_headroom: AtomicBool,
    /// Where the TAP comes from, if a running vnetd has handed it over.
    inheritance: Option<Arc<Inheritance>>,
}

/// What control saw of the container's device. The MTU stays the last known one while no device has the name.
#[derive(Clone, Copy)]
struct Seen {
    mtu: usize,
    /// True if a device has the name.
    named: bool,
}

impl Veth {
    /// Opens the pair and the TAP. Creates the pair if it does not exist.
    ///
    /// # Errors
    /// The namespace cannot be entered, or the kernel refuses a device.
    pub fn open(
        options: &VethOptions,
        origin: Origin,
        stats: Arc<PortStats>,
    ) -> Result<Arc<Veth>, VethError> {
        let fail = |step, error| TapError::Step { step, device: options.device.clone(), error, hint: "" };
        let (host, tap_name) = names(&options.device, &options.netns);
        let mtu = options.mtu.min(TAP_MTU_MAX);
        let namespace = options.netns.open()?;
        let there = |device: &str| options.netns.run(|| mac_of(device)).map(|(_, mac)| mac);
        // A host's end whose other end is gone went with it. One whose container has renamed or moved its device is of no use.
        // One of another kind than configured is replaced.
        let fits = |index| Ok(options.pair.takes(pair::kind_of(index)?));
        let fits = tap::device_index(&host).map(fits).transpose().map_err(|error| fail("find", error))?;
        if let Some(fits) = fits
            && (!fits || there(&options.device)?.is_none())
        {
            remove(&host).map_err(|error| fail("remove the old", error))?;
        }
        let made = tap::device_index(&host).is_none();
        if made {
            pair::make(&host, options, mtu, &namespace)?;
        }
        // Removes the pair when a later step fails, unless it has the container's addresses already.
        let unfinished = made.then(|| Unfinished(host.clone()));
        if let Err(error) = helper::disable_ipv6(&host).and_then(|()| device::isolate(&host)) {
            // A TAP of the same name replaces the pair.
            let _ = remove(&host);
            std::mem::forget(unfinished);
            return Err(VethError::Exposed { device: host, error });
        }
        let wanted_mac = options.mac.filter(|mac| !there(&options.device).is_ok_and(|is| is == Some(*mac)));
        let inside = || raise(&options.device, mtu, wanted_mac);
        let (home, raised) = Home::enter(Some(&options.netns), inside)?;
        raised.map_err(|error| fail("configure", error))?;
        let mac = there(&options.device)?;
        let mac = mac.ok_or_else(|| fail("find", io::ErrorKind::NotFound.into()))?;
        let device = tap_name.clone();
        let wanted = silent(device, mtu);
        let tap = Tap::open(&wanted, origin, stats)?;
        let veth = Veth::of(options, home, (mac, tap), None)?;
        std::mem::forget(unfinished);
        Ok(veth)
    }

    /// The pair and the TAP of a running vnetd, which hands over the TAP's queue by a name. Changes nothing at the devices, and does not
    /// remove them before the inheritance is settled.
    ///
    /// # Errors
    /// A device is gone.
    pub fn inherit(
        options: &VethOptions,
        (inheritance, name): (&Arc<Inheritance>, &str),
        origin: Origin,
        stats: Arc<PortStats>,
    ) -> Result<Arc<Veth>, TapError> {
        let (home, mac) = Home::enter(Some(&options.netns), || mac_of(&options.device))?;
        let mac = mac.ok_or_else(|| missing(&options.device))?;
        let (device, mtu) = (names(&options.device, &options.netns).1, options.mtu.min(TAP_MTU_MAX));
        let of = silent(device, mtu);
        let tap = Tap::inherit(&of, inheritance.take(name), origin, stats)?;
        let veth = Veth::of(options, home, (mac, tap), Some(inheritance.clone()))?;
        // The running vnetd has done so: this one has to undo it at its end.
        veth.ask_for_headroom();
        Ok(veth)
    }

    /// The interface of a pair and a TAP that exist.
    fn of(
        options: &VethOptions,
        home: Home,
        (mac, tap): (Mac, Arc<Tap>),
        inheritance: Option<Arc<Inheritance>>,
    ) -> Result<Arc<Veth>, TapError> {
        let (host, tap_name) = names(&options.device, &options.netns);
        let mtu = options.mtu.min(TAP_MTU_MAX);
        let index = |name: &str| tap::device_index(name).ok_or_else(|| missing(&options.device));
        let (host_index, tap_index) = (index(&host)?, index(&tap_name)?);
        let kind = pair::kind_of(host_index).map_err(|_| missing(&options.device))?;
        let leads_to = LeadsTo::Namespace(namespace_of(host_index));
        let (host, tap_device, mtu_now) = ((host, host_index), (tap_name, tap_index), mtu.into());
        let (up, pair) = (true.into(), Some(kind));
        let device = KernelDevice { host, tap: tap_device, mac, mtu: mtu_now, up, leads_to, pair };
        let (name, seen) = (options.device.clone(), Mutex::new(Seen { mtu, named: true }));
        let has_headroom = AtomicBool::new(false);
        Ok(Arc::new(Veth { tap, device, name, home, seen, has_headroom, inheritance }))
    }

    /// True if the host's end still exists.
    fn is_there(&self) -> bool {
        let (host, index) = &self.device.host;
        match tap::device_index(host) {
            Some(now) => now == *index,
            // Other errors, such as too many open files, do not show that the device is gone.
            None => io::Error::last_os_error().raw_os_error() != Some(libc::ENODEV),
        }
    }

    /// Sets the host's end up. Attach its programs first: the host's network stack would answer ARP.
    ///
    /// # Errors
    /// The device is gone.
    pub fn raise(&self) -> Result<(), TapError> {
        let host = &self.device.host.0;
        let fail = |error| TapError::Step { step: "set up", device: host.clone(), error, hint: "" };
        raise(host, self.device.mtu.load(Relaxed), None).map_err(fail)?;
        self.ask_for_headroom();
        Ok(())
    }

    fn ask_for_headroom(&self) {
        match headroom::join(self.device.host.1) {
            Ok(()) => self.has_headroom.store(true, Relaxed),
            Err(error) => tracing::info!(
                "device '{}': the kernel copies packets to other hosts to make room for headers: {error}",
                self.name
            ),
        }
    }
}

impl Interface for Veth {
    fn queues(&self) -> usize {
        self.tap.queues()
    }

    fn source(self: Arc<Self>, queue: usize) -> Box<dyn Source> {
        self.tap.clone().source(queue)
    }

    fn deliver(&self, queue: usize, frames: Selection<'_>, drops: &mut DropSink) {
        if self.device.up.load(Relaxed) {
            self.tap.deliver(queue, frames, drops);
        } else {
            self.tap.refuse(frames, drops);
        }
    }

    fn kernel_device(&self) -> Option<&KernelDevice> {
        Some(&self.device)
    }

    fn state(&self) -> State {
        match self.tap.state() {
            State::Up => {}
            state => return state,
        }
        if let Some(reason) = self.lost() {
            State::Down(reason)
        } else if !self.device.up.load(Relaxed) {
            State::Down(self.home.device_down(&self.name))
        } else {
            State::Up
        }
    }

    fn notes(&self) -> Vec<String> {
        let (wanted, Seen { mtu, named, .. }) = (self.device.mtu.load(Relaxed), *self.seen.lock());
        let name = &self.name;
        if !named {
            let place = self.home.netns().map_or(String::new(), |netns| format!(" in netns {netns}"));
            return vec![format!("device '{name}' is not{place} any more: it was renamed or moved")];
        }
        let changed = || format!("device '{name}' has MTU {mtu} instead of mtu = {wanted}");
        (mtu != wanted).then(changed).into_iter().collect()
    }

    fn device(&self) -> Option<&dyn OnDevice> {
        Some(self)
    }

    fn hand_over(&self) -> Result<Handed<'_>, String> {
        let tap = self.tap.hand_over()?;
        Ok(Handed { files: tap.files.into_iter().map(|(_, queue)| ("veth", queue)).collect(), ..tap })
    }

    fn stop(&self) {
        self.tap.stop();
        if self.inheritance.as_ref().is_some_and(|inheritance| !inheritance.is_settled()) {
            return;
        }
        // The pair is absent if the container's end was removed. Its name may belong to another pair by now.
        if self.is_there() {
            let _ = remove(&self.device.host.0);
        }
        if self.has_headroom.swap(false, Relaxed) {
            headroom::leave();
        }
    }
}

impl OnDevice for Veth {
    fn netns(&self) -> Option<&Netns> {
        self.home.netns()
    }

    fn look(&self, socket: BorrowedFd<'_>) {
        let mut seen = self.seen.lock();
        match device::see(socket, &self.name) {
            Ok(sight) => {
                *seen = Seen { mtu: sight.mtu, named: true };
                self.device.up.store(sight.up, Relaxed);
            }
            // Keeps the rest as it was last seen.
            Err(error) => seen.named = error.raw_os_error() != Some(libc::ENODEV),
        }
    }

    fn lost(&self) -> Option<String> {
        // The host's end is removed with the container's.
        let removed = !self.is_there();
        self.home.lost().or_else(|| removed.then(|| format!("device '{}' was removed", self.name)))
    }

    fn mtu(&self) -> usize {
        self.seen.lock().mtu
    }

    fn mac(&self) -> Option<Mac> {
        Some(self.device.mac)
    }
}

/// Removes a pair when opening it fails.
struct Unfinished(String);

impl Drop for Unfinished {
    fn drop(&mut self) {
        let _ = remove(&self.0);
    }
}

/// The options of the TAP behind the host's end.
fn silent(device: String, mtu: usize) -> TapOptions {
    TapOptions { device, netns: None, mac: None, mac_before: None, mtu, queues: 1, silent: true, keep: None }
}

fn missing(device: &str) -> TapError {
    TapError::Step { step: "find", device: device.into(), error: io::ErrorKind::NotFound.into(), hint: "" }
}

/// Names of the host's end and of the TAP: the same for the same device of the same namespace in every run of vnetd.
fn names(device: &str, netns: &Netns) -> (String, String) {
    // FNV-1a.
    let text = format!("{netns}/{device}");
    let hash = text.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    let hash = (hash ^ hash >> 32) as u32;
    (format!("{HOST_END}{hash:08x}"), format!("vnett{hash:08x}"))
}

/// Removes the pair of a vnetd that has died, so that a TAP can replace it.
pub fn remove_old(device: &str, netns: &Netns) {
    // The pair is usually absent.
    let _ = remove(&names(device, netns).0);
}

/// Removes a pair of a vnetd that has died, by the index of its host's end. Ignores other devices.
pub(crate) fn remove_unclaimed(index: u32) {
    let name = Netlink::new().and_then(|socket| Ok(index_to_name(socket, index)?));
    if let Ok(name) = name
        && name.starts_with(HOST_END)
    {
        tracing::info!("removes device '{name}' of a vnetd that has died: no interface has it any more");
        let _ = remove(&name);
    }
}

/// MAC address of a device of the calling thread's namespace, if it exists.
fn mac_of(device: &str) -> Option<Mac> {
    let link = netlink::link(tap::device_index(device)?).ok()?;
    link.attributes.iter().find_map(|attribute| match attribute {
        LinkAttribute::Address(mac) => Some(Mac(mac.as_slice().try_into().ok()?)),
        _ => None,
    })
}

/// Network namespace of a device's other end: its id in the calling thread's namespace (nsid).
fn namespace_of(index: u32) -> Option<u32> {
    let link = netlink::link(index).ok()?;
    link.attributes.iter().find_map(|attribute| match attribute {
        LinkAttribute::LinkNetNsId(id) => u32::try_from(*id).ok(),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_namespace_that_is_being_made_is_waited_for() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let netns = Netns::Path(file.path().into());
        let options =
            VethOptions { device: "eth0".into(), netns, mac: None, mtu: 1500, pair: pair::Pair::Auto };
        let origin = Origin { port: crate::frame::PortId(1), network: crate::frame::NetworkId::DEFAULT };
        let Err(VethError::Tap(error)) = Veth::open(&options, origin, Arc::default()) else {
            panic!("opened in a file");
        };
        assert!(error.waits_for().unwrap().starts_with("waiting for netns /"), "{error}");
    }

    #[test]
    fn names_fit_and_differ() {
        let of = |netns: &str| names("vnet0", &netns.parse().unwrap());
        let (a, b) = (of("a"), of("b"));
        assert_ne!(a, b);
        assert_eq!(a, of("a"));
        for name in [&a.0, &a.1, &b.0, &b.1] {
            assert!(name.len() <= tap::DEVICE_NAME_MAX, "{name}");
        }
    }
}
