//! The kernel's own path: programs at devices (TC-BPF) forward frames of known flows without vnetd.
//!
//! ```text
//!   container A            host                                                    container B
//!   vnet0 ----------- host's end of A's veth                                  +--> vnet0
//!                       | from_guest                                          |
//!                       +-- known flow ------------------------ redirect_peer +
//!                       +-- else: redirect -> TAP of A -> vnetd -> TAP of B   |
//!                                                              | from_core    |
//!                                                              +-- redirect_peer
//! ```
//!
//! - *Programs* (`programs/`, in C, one file a hook) look up flows and ask nobody: what is not in the map comes up to vnetd, as
//!   if there were no programs. The object is checked in, so a build needs no clang.
//! - *Flows* (`flows.rs`): verdicts with one destination, installed by the dispatchers' routers. A verdict holds while the
//!   table's generation and two versions of learned addresses are current, and until its lease ends. Programs compare all
//!   three for each frame, in memory shared with vnetd (`mapping.rs`): one store ends any number of flows.
//! - *Attached devices* ([`Kernel::attach`]): a guest's veth and vnetd's TAP behind it.
//!
//! Counters: each flow has a tally, which is added to both ports when anybody looks. So what came in went out, exactly.
//! What a device drops behind a redirect, its own statistics show.

mod flows;
mod mapping;
mod shared;
#[cfg(test)]
mod tests;

use std::io;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use aya::maps::{HashMap, Map, MapData};
use aya::programs::links::LinkOrder;
use aya::programs::tc::{NlOptions, SchedClassifierLink, TcAttachOptions, qdisc_add_clsact};
use aya::programs::{SchedClassifier, TcAttachType};
use aya::util::KernelVersion;
use aya::{Ebpf, EbpfLoader, include_bytes_aligned};
use parking_lot::Mutex;
use rustix::process::{Resource, Rlimit, setrlimit};
use rustix::time::{ClockId, clock_gettime};

pub use flows::{Destination, FLOWS_PORT_MAX, Flows, Terms};
pub use shared::{FLOWS_MAX, Known, VERSIONS};

use crate::frame::{Origin, PortId};
use crate::wire::ethernet::Mac;
use mapping::Mapping;
use shared::PortValue;

/// The compiled programs.
static OBJECT: &[u8] = include_bytes_aligned!("programs/forward.o");
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

impl From<aya::EbpfError> for KernelError {
    fn from(error: aya::EbpfError) -> KernelError {
        KernelError::Load(in_one_line(&error))
    }
}

impl From<aya::programs::ProgramError> for KernelError {
    fn from(error: aya::programs::ProgramError) -> KernelError {
        KernelError::Load(in_one_line(&error))
    }
}

impl From<aya::maps::MapError> for KernelError {
    fn from(error: aya::maps::MapError) -> KernelError {
        KernelError::Load(in_one_line(&error))
    }
}

/// An error and its causes. The verifier's log, which has lines, is left out.
fn in_one_line(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    let texts: Vec<String> =
        causes.map(|error| error.to_string().lines().next().unwrap_or("").into()).collect();
    texts.join(": ")
}

/// A guest's device with programs at the host's end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuestDevice {
    /// The host's end: name and index.
    pub host: (String, u32),
    /// vnetd's TAP for what the programs do not forward: name and index.
    pub tap: (String, u32),
    /// The guest's address.
    pub mac: Mac,
}

/// The programs of a host, loaded.
pub struct Kernel {
    programs: Mutex<Ebpf>,
    ports: Mutex<HashMap<MapData, u32, PortValue>>,
    state: Mapping<AtomicU32>,
    flows: Flows,
}

impl Kernel {
    /// Loads the programs.
    ///
    /// # Errors
    /// As the variants of [`KernelError`].
    pub fn load() -> Result<Arc<Kernel>, KernelError> {
        // Kernels before 5.11 charge maps to the limit of locked memory. Newer ones ignore it.
        let _ = setrlimit(Resource::Memlock, Rlimit { current: None, maximum: None });
        let mut programs = EbpfLoader::new().load(OBJECT)?;
        for (_, program) in programs.programs_mut() {
            <&mut SchedClassifier>::try_from(program)?.load()?;
        }
        let mut take = |name: &str| programs.take_map(name).ok_or_else(|| lacks(name));
        let (flows, tallies, ports, state) =
            (take("flows")?, take("tallies")?, take("ports")?, take("state")?);
        let state = memory(&state, VERSIONS + 1)?;
        let flows = Flows::new(HashMap::try_from(flows)?, memory(&tallies, FLOWS_MAX as usize)?);
        let ports = Mutex::new(HashMap::try_from(ports)?);
        Ok(Arc::new(Kernel { programs: Mutex::new(programs), ports, state, flows }))
    }

    /// The installed flows.
    pub fn flows(&self) -> &Flows {
        &self.flows
    }

    /// Ends all flows installed under another generation. Frames on their way at this moment may still follow them: see
    /// [`Kernel::settle`].
    pub fn set_generation(&self, generation: u32) {
        self.state.get()[VERSIONS].store(generation, Ordering::Release);
    }

    /// How long the kernel forwards `flow` by itself, in milliseconds, if nothing changes; `None`: it comes up.
    pub fn lease_ms(&self, flow: &Known) -> Option<u64> {
        let value = self.flows.get(flow)?;
        let is = |word: usize| self.state.get().get(word).map(|word| word.load(Ordering::Acquire));
        let versions = value.buckets.map(|bucket| is(bucket as usize));
        let holds = is(VERSIONS) == Some(value.generation) && versions == value.versions.map(Some);
        let left_ns = value.until_ns.checked_sub(now_ns())?;
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
        let (network, PortId(from)) = (origin.network.get(), origin.port);
        let GuestDevice { host, tap, mac } = device;
        let value = |other| PortValue { network, from, mac: mac.0, other };
        let mut attached = Attached { kernel: self.clone(), devices: [host.1, tap.1], links: vec![] };
        {
            let mut ports = self.ports.lock();
            ports.insert(host.1, value(tap.1), 0)?;
            ports.insert(tap.1, value(host.1), 0)?;
        }
        // The way into the guest first: vnetd answers what comes out of it.
        for (program, device) in [("from_core", &tap.0), ("from_guest", &host.0)] {
            attached.links.push(self.attach_program(program, device)?);
        }
        Ok(attached)
    }

    fn attach_program(&self, name: &str, device: &str) -> Result<SchedClassifierLink, KernelError> {
        let refused = |error: String| KernelError::Device(device.into(), error);
        let mut programs = self.programs.lock();
        let program = programs.program_mut(name).ok_or_else(|| lacks(name))?;
        let program: &mut SchedClassifier = program.try_into()?;
        let options = if KernelVersion::current().is_ok_and(|kernel| kernel >= TCX) {
            TcAttachOptions::TcxOrder(LinkOrder::default())
        } else {
            // It may be there from a vnetd that crashed. Without it attaching fails with the reason.
            let _ = qdisc_add_clsact(device);
            TcAttachOptions::Netlink(NlOptions::default())
        };
        let id = program.attach_with_options(device, TcAttachType::Ingress, options);
        let id = id.map_err(|error| refused(in_one_line(&error)))?;
        Ok(program.take_link(id)?)
    }
}

/// The state's versions, for the router to keep its versions in.
impl Deref for Kernel {
    type Target = [AtomicU32];

    fn deref(&self) -> &[AtomicU32] {
        &self.state.get()[..VERSIONS]
    }
}

/// CLOCK_MONOTONIC in nanoseconds, which programs read, too.
pub(crate) fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

fn lacks(name: &str) -> KernelError {
    KernelError::Memory(io::Error::other(format!("the object has no '{name}'")))
}

/// The memory of an array.
fn memory<T: mapping::Shared>(map: &Map, count: usize) -> Result<Mapping<T>, KernelError> {
    let Map::Array(data) = map else { return Err(lacks("array")) };
    Ok(Mapping::new(data.fd(), count)?)
}

/// Programs at a guest's devices. Dropping detaches them.
pub struct Attached {
    kernel: Arc<Kernel>,
    devices: [u32; 2],
    /// Detach when dropped.
    links: Vec<SchedClassifierLink>,
}

impl Drop for Attached {
    fn drop(&mut self) {
        self.links.clear();
        let mut ports = self.kernel.ports.lock();
        for device in &self.devices {
            // Absent if attaching failed half-way.
            let _ = ports.remove(device);
        }
    }
}
