//! The kernel's own path: programs at devices (TC-BPF) forward frames of known flows without vnetd.
//!
//! ```text
//!   container A            host                                                    container B
//!   vnet0 ----------- host's end of A's veth                                  +--> vnet0
//!                       | from_guest                                          |
//!                       +-- known flow ------------------------ redirect_peer +
//!                       +-- else: redirect -> TAP of A -> vnetd -> TAP of B   |
//!                       |                                      | from_core    |
//!                       |                                      +-- redirect_peer
//!                       |
//!                       +-- known flow to another host
//!                             +-- in a datagram of its own: redirect_neigh ===================== underlay
//!                             +-- else, to a vnet host: redirect -> the wire, a VXLAN device === underlay
//!                             +-- else, to a VTEP: redirect -> TAP of A -> vnetd
//!
//!   underlay ==== its device
//!                       | from_underlay
//!                       +-- known flow that ends in container B: redirect_peer -> container B
//!                       +-- else: the host's network stack -> the wire, or vnetd's socket for VXLAN
//!                       | from_wire
//!                       +-- known flow: redirect_peer -> container B
//!                       +-- else: redirect -> TAP of the wire -> vnetd
//!
//!   LAN or a VM's TAP == its device
//!                       | from_lan
//!                       +-- known flow: as from a container
//!                       +-- to the device's own address: the host's network stack
//!                       +-- else: the host's network stack, and a copy -> TAP of the device -> vnetd
//! ```
//!
//! Between the ends of a netkit pair, `from_container` runs instead of `from_guest`, while the container sends.
//!
//! - *Programs* (`programs/`, in C, one file per hook) look up flows. Frames without a flow come up to vnetd, as if there were no
//!   programs. The object is checked in, so a build needs no clang. `loader/` loads and attaches them, in vnetd's helper if there is one:
//!   here are only descriptors of maps and of links.
//! - *Flows* (`flows.rs`): verdicts with one destination, installed by the dispatchers' routers. A verdict holds while the
//!   table's generation and two versions of learned addresses are current, and until its lease ends. Programs compare all
//!   three for each frame, in memory shared with vnetd (`mapping.rs`): one store ends any number of flows.
//! - *Attached devices*: a guest's pair and vnetd's TAP behind it ([`Kernel::attach`]), a device of a local network and the TAP for
//!   copies of its frames ([`Kernel::attach_lan`]), the wire and its TAP ([`Kernel::attach_wire`]), devices of the underlay
//!   ([`Kernel::attach_underlay`]). A datagram belongs to the link whose remote has sent it, to the port of the wire or of VXLAN
//!   ([`Kernel::set_peers`]).
//! - *Translations* (`translations.rs`): conversations whose packets need no tunnel, because both hosts know what they stand for.
//! - *Pins* (`pins.rs`): maps and the programs at the host's end and at the underlay outlive a vnetd that dies. Leases run by a clock that vnetd advances
//!   ([`Kernel::tick`]). Without vnetd it stands still, so established flows stay valid until the end time that vnetd wrote last. The
//!   next vnetd adopts maps and devices. It starts the clock with its first setup, whose generation ends the old flows: from then on
//!   their frames reach vnetd.
//!
//! Counters: each flow has a tally, which is added to the counters of both ports whenever they are read, so the balance of all
//! frames stays exact. Frames that a device drops after a redirect are in the device's statistics only.

mod flows;
mod hooks;
#[cfg(test)]
mod load_tests;
mod mapping;
#[cfg(test)]
mod neighbour_tests;
mod pins;
#[cfg(test)]
mod pins_tests;
#[cfg(test)]
mod sealed_tests;
#[cfg(test)]
mod segment_tests;
mod shared;
mod succession;
#[cfg(test)]
pub(crate) mod tests;
#[cfg(test)]
mod translation_tests;
mod translations;
#[cfg(test)]
mod vtep_tests;

use std::collections;
use std::io;
use std::ops::Deref;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use aya::maps::{HashMap, Map, MapData, Queue};
use aya::util::KernelVersion;
use parking_lot::Mutex;
use rustix::time::{ClockId, clock_gettime};

pub use flows::{
    Carried, Counted, Destination, FLOWS_PORT_MAX, Flows, Sender, Sources, Target, Terms, Translates,
    Underlay,
};
pub use pins::{Outlive, PinOptions};
pub use shared::{End, FLOWS_MAX, Index, Known, VERSIONS, Wanted, WireHead};
pub(crate) use succession::forget;
pub use translations::{Seen, TranslationMaps};

use crate::frame::{Origin, PortId};
use crate::helper::programs::Programs;
use crate::loader::{Attach, By, OBJECT, Pin, filter, in_one_line, is_at_least};
use crate::wire::ethernet::Mac;
use hooks::Hook;
use mapping::Mapping;
use pins::Pins;
use shared::{PeerKey, PeerValue, PortValue, State};

/// First kernel with tcx links, which end with the process that made them.
const TCX: KernelVersion = KernelVersion::new(6, 6, 0);
/// membarrier(2): `MEMBARRIER_CMD_GLOBAL`.
const MEMBARRIER_CMD_GLOBAL: libc::c_int = 1;

/// Why there is no kernel path on this host.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    /// The kernel refused the programs or their maps.
    #[error("the kernel takes no programs: {0}; it needs Linux 5.10, CAP_BPF, CAP_PERFMON and CAP_NET_ADMIN")]
    Load(String),
    /// A map's memory cannot be shared.
    #[error("cannot share a map's memory: {0}")]
    Memory(#[from] io::Error),
    /// A device takes no programs.
    #[error("device '{0}' takes no programs: {1}")]
    Device(String, String),
}

impl From<aya::maps::MapError> for KernelError {
    fn from(error: aya::maps::MapError) -> KernelError {
        KernelError::Load(in_one_line(&error))
    }
}

/// A guest's device with programs at the host's end, or a local network's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuestDevice {
    /// The host's end, or the local network's device: name and index.
    pub host: (String, u32),
    /// vnetd's TAP for what the programs do not forward: name and index.
    pub tap: (String, u32),
    /// The guest's address; a local network's device has its own, whose frames are the host's.
    pub mac: Mac,
    /// True if the host's end is that of a netkit pair.
    pub netkit: bool,
}

impl GuestDevice {
    /// The port of the host's end.
    fn value(&self, origin: Origin) -> PortValue {
        let (network, PortId(from)) = (origin.network.get(), origin.port);
        PortValue { network, from, mac: self.mac.0, other: self.tap.1 }
    }
}

/// A host whose datagrams programs take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Its link's port.
    pub port: PortId,
    /// The route to it, if programs may take its datagrams at the underlay's device.
    pub underlay: Option<Underlay>,
}

/// A program at a device of the underlay. Dropping detaches it.
pub struct AtUnderlay {
    _hooks: Vec<Hook>,
}

/// The programs of a host, loaded.
pub struct Kernel {
    programs: Programs,
    ports: Mutex<HashMap<MapData, u32, PortValue>>,
    peers: Mutex<HashMap<MapData, PeerKey, PeerValue>>,
    state: Mapping<State>,
    flows: Flows,
    translations: TranslationMaps,
    /// Where programs and maps are pinned, or the reason why they are not.
    pins: Result<Pins, String>,
    /// Devices of a vnetd that has died and that are not attached again yet.
    unclaimed: Mutex<collections::HashSet<u32>>,
    /// The same for devices of the underlay.
    unclaimed_underlay: Mutex<collections::HashSet<u32>>,
    /// True if pinned objects are left for the next vnetd.
    left: AtomicBool,
}

impl Kernel {
    /// Loads the programs. They outlive vnetd if they can be pinned. Adopts the maps of a vnetd that has died.
    ///
    /// # Errors
    /// As the variants of [`KernelError`].
    pub fn load(pins: Option<&PinOptions>) -> Result<Arc<Kernel>, KernelError> {
        let pins = pins.ok_or_else(|| "nothing is to be pinned".to_string());
        Kernel::load_at(
            pins.and_then(|options| Pins::open(options, OBJECT).map_err(|error| error.to_string())),
        )
    }

    fn load_at(pins: Result<Pins, String>) -> Result<Arc<Kernel>, KernelError> {
        let loaded = Programs::load(pins.as_ref().ok().map(Pins::folder));
        let (programs, maps) = loaded.map_err(|error| KernelError::Load(error.to_string()))?;
        let [conversations, flows, peers, ports, state, tallies, translations, wanted] = maps;
        let translations = TranslationMaps::new(
            HashMap::try_from(map(conversations)?)?,
            HashMap::try_from(map(translations)?)?,
            Queue::try_from(map(wanted)?)?,
        );
        let state = Mapping::new(state, 1)?;
        let flows = Flows::new(HashMap::try_from(map(flows)?)?, Mapping::new(tallies, FLOWS_MAX as usize)?);
        let ports: HashMap<_, u32, PortValue> = HashMap::try_from(map(ports)?)?;
        let links = pins.iter().flat_map(Pins::devices);
        let unclaimed = Mutex::new(ports.keys().flatten().chain(links).collect());
        let unclaimed_underlay = Mutex::new(pins.iter().flat_map(Pins::underlay_devices).collect());
        let (peers, ports) = (Mutex::new(HashMap::try_from(map(peers)?)?), Mutex::new(ports));
        Ok(Arc::new(Kernel {
            programs,
            ports,
            peers,
            state,
            flows,
            translations,
            pins,
            unclaimed,
            unclaimed_underlay,
            left: AtomicBool::new(false),
        }))
    }

    /// The installed flows.
    pub fn flows(&self) -> &Flows {
        &self.flows
    }

    /// The maps of translations.
    pub fn translations(&self) -> &TranslationMaps {
        &self.translations
    }

    fn state(&self) -> &State {
        &self.state.get()[0]
    }

    /// Ends all flows installed under another generation. Frames on their way at this moment may still follow them: see
    /// [`Kernel::settle`].
    pub fn set_generation(&self, generation: u32) {
        self.state().generation.store(generation, Ordering::Release);
    }

    /// A generation that no flow has.
    pub fn next_generation(&self) -> u32 {
        // 0 is the generation of setups without the kernel path.
        self.state().generation.load(Ordering::Acquire).wrapping_add(1).max(1)
    }

    /// Advances the leases' clock, which stands still while vnetd is dead; flows then stay valid until `end_ns`. Both times are of
    /// CLOCK_MONOTONIC.
    pub fn tick(&self, now_ns: u64, end_ns: u64) {
        self.state().clock_ns.store(now_ns, Ordering::Release);
        self.postpone(end_ns);
    }

    /// Postpones the end of all flows, but does not advance the clock: see [`Kernel::tick`].
    pub fn postpone(&self, end_ns: u64) {
        self.state().end_ns.store(end_ns, Ordering::Release);
    }

    /// Whether the generation and the versions of `terms` are current.
    pub fn is_current(&self, terms: &Terms) -> bool {
        let state = self.state();
        let is =
            |bucket: u16| state.versions.get(usize::from(bucket)).map(|word| word.load(Ordering::Acquire));
        state.generation.load(Ordering::Acquire) == terms.generation
            && terms.buckets.map(is) == terms.versions.map(Some)
    }

    /// How long the kernel forwards `flow` by itself, in milliseconds, if nothing changes; `None`: it comes up.
    pub fn lease_ms(&self, flow: &Known) -> Option<u64> {
        let value = self.flows.get(flow)?;
        let state = self.state();
        let is = |bucket: u32| state.versions.get(bucket as usize).map(|word| word.load(Ordering::Acquire));
        let holds = state.generation.load(Ordering::Acquire) == value.generation
            && value.buckets.map(is) == value.versions.map(Some)
            && now_ns() < state.end_ns.load(Ordering::Acquire);
        let left_ns = value
            .until_ns
            .checked_sub(state.clock_ns.load(Ordering::Acquire))
            .filter(|left_ns| *left_ns > 0)?;
        holds.then_some(left_ns / 1_000_000)
    }

    /// Waits until no program runs that has started before the call.
    pub fn settle(&self) {
        // SAFETY: no memory is passed. The command waits for an RCU grace period, which no running program outlasts.
        let done = unsafe { libc::syscall(libc::SYS_membarrier, MEMBARRIER_CMD_GLOBAL, 0, 0) };
        if done < 0 {
            // Without membarrier(2): a program runs for microseconds.
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    }

    /// Attaches the programs to `device`, whose frames come from `origin`, until the result is dropped.
    ///
    /// # Errors
    /// A device is gone, or takes no programs.
    pub fn attach(self: &Arc<Self>, device: &GuestDevice, origin: Origin) -> Result<Attached, KernelError> {
        let GuestDevice { host, tap, .. } = device;
        let mut attached = self.claim([host.1, tap.1]);
        // The way into the guest first: vnetd answers what comes out of it.
        let back = PortValue { other: host.1, ..device.value(origin) };
        self.ports.lock().insert(tap.1, back, 0)?;
        attached.hooks.extend(self.attach_program("from_core", tap, Stays::Never)?);
        self.set_port(device, origin)?;
        let by_pair = if device.netkit { self.attach_pair(host)? } else { None };
        let hooks = by_pair.map_or_else(|| self.attach_program("from_guest", host, Stays::Always), Ok)?;
        attached.hooks.extend(hooks);
        Ok(attached)
    }

    /// Attaches the programs to a netkit pair by its host's end. `None` if the kernel refuses the pair's own hook: then they run at
    /// the host's end, as those of a veth, one queue later.
    fn attach_pair(&self, host: &(String, u32)) -> Result<Option<Vec<Hook>>, KernelError> {
        let pin = self.pins.as_ref().ok().map(|_| Pin::Link);
        let hook = match self.attach_by("from_container", host, By::Pair, pin) {
            Ok(hook) => hook,
            Err(error) => {
                tracing::info!("no program of netkit: {error}");
                return Ok(None);
            }
        };
        // Takes the frames when the link ends with its pin's file system, or with vnetd if there is no pin.
        let filter = self.attach_by("from_guest", host, By::Filter, None);
        let filter = if pin.is_some() { filter.ok() } else { Some(filter?) };
        Ok(Some([hook].into_iter().chain(filter).collect()))
    }

    /// Attaches the programs to the device of a local network, which the host may use, too, until the result is dropped. Without vnetd's
    /// programs all frames reach the host's network stack, so the device needs no filter that stays.
    ///
    /// # Errors
    /// A device is gone, or takes no programs; a kernel without tcx, where a filter would outlive vnetd on a device that is not
    /// vnetd's own.
    pub fn attach_lan(
        self: &Arc<Self>,
        device: &GuestDevice,
        origin: Origin,
    ) -> Result<Attached, KernelError> {
        let GuestDevice { host, tap, .. } = device;
        check_lan(&host.0, KernelVersion::current().unwrap_or(TCX))?;
        let mut attached = self.claim([host.1, tap.1]);
        attached.hooks.extend(self.attach_program("ends", tap, Stays::Never)?);
        self.set_port(device, origin)?;
        let pin = self.pins.as_ref().ok().map(|_| Pin::Link);
        // Other programs of the device get what this one leaves to the host.
        attached.hooks.push(self.attach_by("from_lan", host, By::FirstLink, pin)?);
        Ok(attached)
    }

    /// Tells the programs which port the frames of `device` come from.
    fn set_port(&self, device: &GuestDevice, origin: Origin) -> Result<(), KernelError> {
        let (host, value) = (device.host.1, device.value(origin));
        let mut ports = self.ports.lock();
        let before = ports.get(&host, 0);
        if before.is_ok_and(|before| (before.network, before.from) != (value.network, value.from)) {
            // The guest had another port in the vnetd that has died, and the old flows contain that port.
            self.set_generation(self.next_generation());
        }
        Ok(ports.insert(host, value, 0)?)
    }

    /// Attaches the programs to the wire's VXLAN device and its TAP, names and indices, until the result is dropped.
    ///
    /// # Errors
    /// As [`Kernel::attach`].
    pub fn attach_wire(
        self: &Arc<Self>,
        device: &(String, u32),
        tap: &(String, u32),
    ) -> Result<Attached, KernelError> {
        let value = |other| PortValue { from: PortId::NONE.0, other, ..PortValue::default() };
        let mut attached = self.claim([device.1, tap.1]);
        {
            let mut ports = self.ports.lock();
            ports.insert(tap.1, value(device.1), 0)?;
            ports.insert(device.1, value(tap.1), 0)?;
        }
        self.state().core.store(tap.1, Ordering::Release);
        attached.hooks.extend(self.attach_program("core_to_wire", tap, Stays::Never)?);
        attached.hooks.extend(self.attach_program("from_wire", device, Stays::Always)?);
        Ok(attached)
    }

    /// A pair of devices, without programs yet, that [`Kernel::forget_unclaimed`] no longer forgets.
    fn claim(self: &Arc<Self>, devices: [u32; 2]) -> Attached {
        self.unclaimed.lock().retain(|device| !devices.contains(device));
        Attached { kernel: self.clone(), devices, hooks: vec![] }
    }

    /// Accepts datagrams of `wanted` hosts and of no others; a host's frames come from its link. `keeps`: as long as the route to a host is
    /// not known, that of an earlier vnetd counts.
    ///
    /// # Errors
    /// The kernel has no memory.
    pub fn set_peers(
        &self,
        wanted: &collections::HashMap<End, Peer>,
        keeps: bool,
    ) -> Result<(), KernelError> {
        let mut peers = self.peers.lock();
        let known: Vec<PeerKey> = peers.keys().collect::<Result<_, _>>()?;
        for key in known.iter().filter(|key| !wanted.contains_key(&key.end())) {
            peers.remove(key)?;
        }
        for (end, Peer { port: PortId(from), underlay }) in wanted {
            let key = PeerKey::new(end);
            let before = || peers.get(&key, 0).ok().filter(|_| keeps).map(|peer| (peer.device, peer.local));
            let way = underlay.map(|way| (way.device, way.local.to_bits()));
            let (device, local) = way.or_else(before).unwrap_or_default();
            let value = PeerValue { from: *from, device, local, ..PeerValue::default() };
            // Programs may be reading an entry that is replaced. They write the time to it.
            let is_value = |now: PeerValue| PeerValue { coalesced_ns: 0, ..now } == value;
            if !peers.get(&key, 0).is_ok_and(is_value) {
                peers.insert(key, value, 0)?;
            }
        }
        Ok(())
    }

    /// Has a program take datagrams of known flows at a device of the underlay, until the result is dropped. `None` on a kernel
    /// without tcx: a filter would outlive vnetd on a device that is not vnetd's own.
    ///
    /// # Errors
    /// As [`Kernel::attach`].
    pub fn attach_underlay(&self, device: &(String, u32)) -> Result<Option<AtUnderlay>, KernelError> {
        if !is_at_least(TCX) {
            return Ok(None);
        }
        self.unclaimed_underlay.lock().remove(&device.1);
        Ok(Some(AtUnderlay { _hooks: self.attach_program("from_underlay", device, Stays::Pinned)? }))
    }

    /// Attaches a program to a device.
    fn attach_program(
        &self,
        name: &str,
        device: &(String, u32),
        stays: Stays,
    ) -> Result<Vec<Hook>, KernelError> {
        let pin = self.pins.as_ref().ok().and(stays.pin());
        if !is_at_least(TCX) || stays == Stays::Always && pin.is_none() {
            return Ok(vec![self.attach_by(name, device, By::Filter, None)?]);
        }
        let mut hooks = vec![self.attach_by(name, device, By::Link, pin)?];
        if stays == Stays::Always {
            // The pin ends with its file system, for example with vnetd's mount namespace. Then this filter takes the frames.
            hooks.extend(self.attach_by(name, device, By::Filter, None));
        }
        Ok(hooks)
    }

    fn attach_by(
        &self,
        program: &str,
        device: &(String, u32),
        by: By,
        pin: Option<Pin>,
    ) -> Result<Hook, KernelError> {
        let refused = |error: io::Error| KernelError::Device(device.0.clone(), error.to_string());
        let attach = Attach { program: program.into(), device: device.clone(), by, pin };
        let link = self.programs.attach(&attach).map_err(refused)?;
        Ok(match (link, pin, &self.pins) {
            (Some(link), ..) => Hook::Held { _link: link },
            (None, Some(pin), Ok(pins)) => Hook::Pinned(pins.link(pin, device.1)),
            _ => Hook::Filter { _filter: filter(&device.0).map_err(refused)? },
        })
    }
}

impl Drop for Kernel {
    /// A vnetd that is stopped on purpose leaves nothing behind.
    fn drop(&mut self) {
        if *self.left.get_mut() {
            return;
        }
        if let Ok(pins) = std::mem::replace(&mut self.pins, Err(String::new())) {
            pins.remove();
        }
    }
}

/// Whether a program stays at its device when vnetd dies.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stays {
    /// The program does nothing without vnetd.
    Never,
    /// If its link can be pinned: a program at a device that is not vnetd's own.
    Pinned,
    /// Without it, frames would reach the host's network stack.
    Always,
}

impl Stays {
    fn pin(self) -> Option<Pin> {
        match self {
            Stays::Never => None,
            Stays::Pinned => Some(Pin::Underlay),
            Stays::Always => Some(Pin::Link),
        }
    }
}

/// The state's versions, for the router to keep its versions in.
impl Deref for Kernel {
    type Target = [AtomicU32];

    fn deref(&self) -> &[AtomicU32] {
        &self.state().versions
    }
}

/// Checks that a kernel of this version takes programs at the device of a local network.
fn check_lan(device: &str, version: KernelVersion) -> Result<(), KernelError> {
    let refused = || KernelError::Device(device.into(), "that needs Linux 6.6".into());
    if version >= TCX { Ok(()) } else { Err(refused()) }
}

/// Whether the kernel refuses maps to a process without CAP_BPF even by their descriptors, if the administrator has set
/// kernel.unprivileged_bpf_disabled: before Linux 5.19 (commit c8644cd0efe7).
pub fn maps_need_cap_bpf() -> bool {
    !is_at_least(KernelVersion::new(5, 19, 0))
}

/// CLOCK_MONOTONIC in nanoseconds, which programs read, too.
pub(crate) fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// A map of the programs by its descriptor.
fn map(descriptor: OwnedFd) -> Result<Map, KernelError> {
    Ok(Map::from_map_data(MapData::from_fd(descriptor)?)?)
}

/// Programs at a pair of devices. Dropping detaches them.
pub struct Attached {
    kernel: Arc<Kernel>,
    devices: [u32; 2],
    hooks: Vec<Hook>,
}

impl Drop for Attached {
    fn drop(&mut self) {
        if self.kernel.left.load(Ordering::Relaxed) {
            // The running vnetd uses the same pins and ports.
            return std::mem::take(&mut self.hooks).into_iter().for_each(std::mem::forget);
        }
        self.hooks.clear();
        let core = &self.kernel.state().core;
        for device in self.devices {
            // Another one in a vnetd that goes on.
            let _ = core.compare_exchange(device, 0, Ordering::AcqRel, Ordering::Relaxed);
        }
        let mut ports = self.kernel.ports.lock();
        for device in &self.devices {
            // Absent if attaching failed half-way.
            let _ = ports.remove(device);
        }
    }
}
