//! Loads the kernel programs and attaches them to devices: all that takes CAP_BPF and CAP_PERFMON.
//!
//! vnetd has its privileged helper do this (`helper/programs.rs`); a process without a helper (tests, other programs) does it itself.
//! Either way, what comes out are descriptors: of the maps, and of links that are not pinned. `kernel/` decides what is loaded and
//! attached, and works with the maps.
//!
//! A caller may be vnetd in an intruder's hands. So it names programs of the one object, and a folder of vnet in a BPF file system (bpffs);
//! the files in it have the names that are given here, and only maps with the programs' own names are handed out.

mod links;

use std::ffi::OsStr;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use aya::maps::{Map, MapData};
use aya::programs::tc::{NlOptions, SchedClassifierLink, TcAttachOptions, TcHandle, qdisc_add_clsact};
use aya::programs::{SchedClassifier, TcAttachType};
use aya::util::KernelVersion;
use aya::{Ebpf, EbpfLoader, include_bytes_aligned};
use rustix::fs::statfs;
use rustix::process::{Resource, Rlimit, setrlimit};

/// The compiled programs.
pub(crate) static OBJECT: &[u8] = include_bytes_aligned!("../kernel/programs/forward.o");
/// The programs' maps.
pub(crate) const MAPS: [&str; 8] =
    ["conversations", "flows", "peers", "ports", "state", "tallies", "translations", "wanted"];
/// Folder of all hosts in a bpffs.
pub(crate) const FOLDER: &str = "vnet";
/// Prefixes of pinned links' files; the device's index follows.
pub(crate) const LINK: &str = "link-";
pub(crate) const UNDERLAY: &str = "underlay-";
/// linux/magic.h
const BPF_FS_MAGIC: u64 = 0xcafe_4a11;
/// Priority and handle of filters. They are constant, so that a filter replaces that of a vnetd that has died.
const FILTER: (u16, TcHandle) = (1, TcHandle::new(0, 1));

/// Attaches a program to a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Attach {
    pub(crate) program: String,
    /// Name and index, in vnetd's network namespace.
    pub(crate) device: (String, u32),
    pub(crate) by: By,
    /// How the link outlives vnetd; a filter needs no pin.
    pub(crate) pin: Option<Pin>,
}

/// What attaches a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum By {
    /// A tcx link, after the device's others. All come before filters.
    Link,
    /// The same before the device's others.
    FirstLink,
    /// The hook of a netkit pair.
    Pair,
    /// A filter of the device's clsact qdisc. It stays until [`filter`] is dropped.
    Filter,
}

impl By {
    pub(crate) const ALL: [By; 4] = [By::Link, By::FirstLink, By::Pair, By::Filter];
}

/// The file of a pinned link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pin {
    /// At a device of vnetd, or of a local network.
    Link,
    /// At a device of the underlay.
    Underlay,
}

impl Pin {
    pub(crate) const ALL: [Pin; 2] = [Pin::Link, Pin::Underlay];

    /// Its place in a host's folder.
    pub(crate) fn file(self, folder: &Path, device: u32) -> PathBuf {
        let prefix = match self {
            Pin::Link => LINK,
            Pin::Underlay => UNDERLAY,
        };
        folder.join(format!("{prefix}{device}"))
    }
}

/// Folder of the maps for programs of this `object` in a host's folder.
pub(crate) fn maps_folder(folder: &Path, object: &[u8]) -> PathBuf {
    let mut hasher = DefaultHasher::new();
    object.hash(&mut hasher);
    folder.join(format!("{:016x}", hasher.finish()))
}

/// Whether there is a bpffs.
pub(crate) fn is_bpffs(folder: &Path) -> bool {
    statfs(folder).is_ok_and(|stat| stat.f_type as u64 & 0xffff_ffff == BPF_FS_MAGIC)
}

/// Whether the kernel is of this version or a later one.
pub(crate) fn is_at_least(version: KernelVersion) -> bool {
    KernelVersion::current().map_or(true, |kernel| kernel >= version)
}

/// The programs, loaded. Dropping detaches none: links and filters belong to whom they are handed to.
pub(crate) struct Loaded {
    programs: Ebpf,
    /// This host's folder.
    folder: Option<PathBuf>,
}

impl Loaded {
    /// Loads the programs. The maps, in the order of [`MAPS`], are those pinned in this host's `folder`, or new ones that are pinned there;
    /// without a folder, they end with their descriptors.
    ///
    /// # Errors
    /// The reason in one line.
    pub(crate) fn load(folder: Option<&Path>) -> io::Result<(Loaded, [OwnedFd; MAPS.len()])> {
        // Kernels before 5.11 charge maps to the limit of locked memory. Newer ones ignore it.
        let _ = setrlimit(Resource::Memlock, Rlimit { current: None, maximum: None });
        let mut loader = EbpfLoader::new();
        let has_coarse_clock = u32::from(is_at_least(KernelVersion::new(5, 11, 0)));
        loader.override_global("has_coarse_clock", &has_coarse_clock, true);
        if let Some(folder) = folder {
            if folder.parent().and_then(Path::file_name) != Some(OsStr::new(FOLDER)) || !is_bpffs(folder) {
                let place = folder.display();
                return Err(io::Error::other(format!("'{place}' is no folder of vnet in a bpffs")));
            }
            let maps = maps_folder(folder, OBJECT);
            for map in MAPS {
                loader.map_pin_path(map, maps.join(map));
            }
        }
        let mut programs = loader.load(OBJECT).map_err(one_line)?;
        for (_, program) in programs.programs_mut() {
            let program: &mut SchedClassifier = program.try_into().map_err(one_line)?;
            program.load().map_err(one_line)?;
        }
        let [a, b, c, d, e, f, g, h] = MAPS.map(|name| map(&mut programs, name));
        let maps = [a?, b?, c?, d?, e?, f?, g?, h?];
        Ok((Loaded { programs, folder: folder.map(Path::to_owned) }, maps))
    }

    /// A program of the object.
    pub(crate) fn program(&mut self, name: &str) -> io::Result<&mut SchedClassifier> {
        self.programs.program_mut(name).ok_or_else(|| lacks(name))?.try_into().map_err(one_line)
    }

    /// Attaches a program, in place of what a vnetd that has died has attached there. The answer is the link, which ends with its last
    /// descriptor, unless it is pinned or a filter.
    ///
    /// # Errors
    /// The reason in one line.
    pub(crate) fn attach(&mut self, attach: &Attach) -> io::Result<Option<OwnedFd>> {
        let Attach { program, device, by, pin } = attach;
        let folder = self.folder.as_deref().ok_or_else(|| io::Error::other("nothing is pinned"));
        let file = pin.map(|pin| Ok::<_, io::Error>(pin.file(folder?, device.1))).transpose()?;
        let program = self.program(program)?;
        match (by, file) {
            (By::Filter, None) => attach_filter(program, &device.0).map(|()| None),
            (By::Filter, Some(_)) => Err(io::ErrorKind::InvalidInput.into()),
            (By::Link, file) => links::attach(program, links::TCX_LAST, device.1, file),
            (By::FirstLink, file) => links::attach(program, links::TCX_FIRST, device.1, file),
            (By::Pair, file) => links::attach(program, links::NETKIT, device.1, file),
        }
    }
}

/// Takes a map of the programs. A file of its name may lead to another program's map, if an intruder in vnetd has put it there.
fn map(programs: &mut Ebpf, name: &str) -> io::Result<OwnedFd> {
    let map = programs.take_map(name);
    let Some(Map::Array(data) | Map::HashMap(data) | Map::LruHashMap(data) | Map::Queue(data)) = map else {
        return Err(lacks(name));
    };
    if data.info().map_err(one_line)?.name_as_str() != Some(name) {
        return Err(io::Error::other(format!("the pinned map '{name}' is another program's")));
    }
    MapData::fd(&data).as_fd().try_clone_to_owned()
}

/// Attaches a program as a filter, which outlives vnetd without a pin.
fn attach_filter(program: &mut SchedClassifier, device: &str) -> io::Result<()> {
    let (priority, handle) = FILTER;
    // The qdisc may exist from a vnetd that has died. Without it, attaching fails with the reason.
    let _ = qdisc_add_clsact(device);
    let options = TcAttachOptions::Netlink(NlOptions { priority, handle, classid: None });
    let attached = program.attach_with_options(device, TcAttachType::Ingress, options);
    let replaced =
        attached.or_else(|error| filter(device).map_or(Err(error), |there| program.attach_to_link(there)));
    let link = program.take_link(replaced.map_err(one_line)?).map_err(one_line)?;
    // Dropping it would detach the program.
    std::mem::forget(link);
    Ok(())
}

/// The filter at a device. Dropping detaches it, which takes CAP_NET_ADMIN only.
///
/// # Errors
/// There is no such device.
pub(crate) fn filter(device: &str) -> io::Result<SchedClassifierLink> {
    let (priority, handle) = FILTER;
    SchedClassifierLink::attached(device, TcAttachType::Ingress, priority, handle, None)
}

fn lacks(name: &str) -> io::Error {
    io::Error::other(format!("the object has no '{name}'"))
}

fn one_line(error: impl std::error::Error) -> io::Error {
    io::Error::other(in_one_line(&error))
}

/// An error and its causes. The verifier's log, which has lines, is left out.
pub(crate) fn in_one_line(error: &dyn std::error::Error) -> String {
    let mut line = String::new();
    for error in std::iter::successors(Some(error), |error| error.source()) {
        let text = error.to_string();
        let text = text.lines().next().unwrap_or_default();
        // Some errors of aya contain the text of their cause.
        if !line.ends_with(text) {
            line += if line.is_empty() { "" } else { ": " };
            line += text;
        }
    }
    line
}
