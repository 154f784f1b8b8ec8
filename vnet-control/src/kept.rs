//! TAP devices that outlive vnetd: which of them this vnetd has made, and where they are.
//!
//! The next vnetd adopts a device that its configuration names, and removes the others: also in other network namespaces, and those that
//! their owner has renamed or moved. So a file beside the control socket lists the devices. It is written before a device is made, and whenever
//! one has another place. Only devices with vnetd's mark are adopted or removed ([`vnet::interface::kept`]), whatever the file says.

use std::fs::OpenOptions;
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::desired::{Attachment, InterfaceSpec, Item};
use vnet::inherit::Inheritance;
use vnet::interface::kept::{self, Keep, Mark, Place};
use vnet::interface::tap::Netns;

/// Maximum length of the file in bytes: 1 024 interfaces with the longest paths.
const FILE_MAX: u64 = 8 << 20;

/// A device that outlives this process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct KeptTap {
    /// As configured.
    device: String,
    /// As configured.
    netns: Option<String>,
    /// Where it is; `None`: it was about to be made there.
    place: Option<Place>,
    /// It was moved to another namespace, or renamed.
    moved: bool,
}

impl KeptTap {
    fn is_of(&self, spec: &InterfaceSpec) -> bool {
        of(spec).is_some_and(|(device, netns)| {
            self.device == device && self.netns == netns.map(ToString::to_string)
        })
    }
}

/// The device of an interface that has a TAP, and its configured namespace. A container has one if there is no kernel path.
fn of(spec: &InterfaceSpec) -> Option<(&str, Option<&Netns>)> {
    match &spec.attachment {
        Attachment::Tap { device, netns } | Attachment::Veth { device, netns } => {
            Some((device, netns.as_ref()))
        }
        Attachment::VhostUser { .. } | Attachment::Local { .. } => None,
    }
}

/// What became of an interface's device.
pub(super) enum Now {
    /// It is there.
    At(Place),
    /// The interface has no device that outlives this process.
    None,
    /// The interface is down: its device may be where it was.
    Unknown,
}

/// The devices, and their file.
pub(super) struct KeptTaps {
    file: PathBuf,
    mark: Mark,
    taps: Vec<KeptTap>,
    /// Until it is settled, the file is the running vnetd's.
    inheritance: Option<Arc<Inheritance>>,
}

impl KeptTaps {
    /// The devices of the vnetd before with this control socket.
    pub(super) fn load(control: &Path, inheritance: Option<Arc<Inheritance>>) -> KeptTaps {
        let mut file = control.as_os_str().to_owned();
        file.push(".taps");
        let file = PathBuf::from(file);
        let taps = match read(&file) {
            Ok(taps) => taps,
            Err(error) if error.kind() == io::ErrorKind::NotFound => vec![],
            Err(error) => {
                tracing::warn!("the list of TAP devices in {} is ignored: {error}", file.display());
                vec![]
            }
        };
        KeptTaps { file, mark: Mark::of(control), taps, inheritance }
    }

    /// How the device of an interface outlives this process.
    pub(super) fn keep(&self, spec: &InterfaceSpec) -> Keep {
        let known = self.taps.iter().find(|tap| tap.is_of(spec));
        let moved = known.filter(|tap| tap.moved).and_then(|tap| tap.place.clone());
        Keep { mark: self.mark.clone(), moved }
    }

    /// Lists interfaces whose devices are about to be made.
    pub(super) fn expect<'a>(&mut self, specs: impl Iterator<Item = &'a InterfaceSpec>) {
        let mut taps = self.taps.clone();
        for spec in specs {
            if let Some((device, netns)) = of(spec).filter(|_| !taps.iter().any(|tap| tap.is_of(spec))) {
                let (device, netns) = (device.to_owned(), netns.map(ToString::to_string));
                taps.push(KeptTap { device, netns, place: None, moved: false });
            }
        }
        self.replace(taps);
    }

    /// Lists the devices of all interfaces. Removes those of other interfaces.
    pub(super) fn update<'a>(&mut self, all: impl Iterator<Item = (&'a InterfaceSpec, Now)>) {
        let (mut taps, mut specs) = (vec![], vec![]);
        for (spec, now) in all {
            let Some((device, netns)) = of(spec) else { continue };
            specs.push(spec);
            let known = self.taps.iter().find(|tap| tap.is_of(spec));
            match now {
                Now::At(place) => match known.filter(|tap| tap.place.as_ref() == Some(&place)) {
                    Some(known) => taps.push(known.clone()),
                    None => {
                        let elsewhere = |home| home != place.namespace;
                        let moved = place.name != device || kept::home(netns).is_some_and(elsewhere);
                        let (device, netns) = (device.to_owned(), netns.map(ToString::to_string));
                        taps.push(KeptTap { device, netns, place: Some(place), moved });
                    }
                },
                Now::Unknown => taps.extend(known.cloned()),
                Now::None => {}
            }
        }
        if self.is_settled() {
            self.taps
                .iter()
                .filter(|tap| !specs.iter().any(|spec| tap.is_of(spec)))
                .for_each(|tap| _ = self.remove(tap));
        }
        self.replace(taps);
    }

    /// Removes devices that no interface has, and those in a namespace that another one of the same name has replaced.
    pub(super) fn sweep(&mut self, interfaces: &[Item<InterfaceSpec>]) {
        let mut taps = self.taps.clone();
        taps.retain_mut(|tap| {
            let spec = interfaces.iter().map(|item| &item.spec).find(|spec| tap.is_of(spec));
            let replaced = |spec| {
                let home = of(spec).and_then(|(_, netns)| kept::home(netns));
                !tap.moved
                    && tap
                        .place
                        .as_ref()
                        .is_some_and(|place| home.is_some_and(|home| home != place.namespace))
            };
            if spec.is_none_or(replaced) {
                self.remove(tap);
                tap.place = None;
            }
            spec.is_some()
        });
        self.replace(taps);
    }

    /// Removes all devices, and lists those that were there.
    pub(super) fn remove_all(&mut self) -> Vec<String> {
        let removed = self.taps.iter().filter_map(|tap| self.remove(tap)).collect();
        self.replace(vec![]);
        removed
    }

    /// Removes a device. Returns its name if it was there.
    fn remove(&self, tap: &KeptTap) -> Option<String> {
        let KeptTap { device, netns, place, .. } = tap;
        // As configured, it was valid.
        let netns: Option<Netns> = netns.as_ref().and_then(|netns| netns.parse().ok());
        let place = place.as_ref();
        let name = place.map_or(device, |place| &place.name);
        match kept::remove_left(&self.mark, place, (device, netns.as_ref())) {
            Ok(true) => {
                tracing::info!("has removed device '{name}', which no interface has any more");
                return Some(name.clone());
            }
            Ok(false) => {}
            Err(error) => {
                tracing::warn!("cannot remove device '{name}', which no interface has any more: {error}")
            }
        }
        None
    }

    fn is_settled(&self) -> bool {
        self.inheritance.as_ref().is_none_or(|inheritance| inheritance.is_settled())
    }

    fn replace(&mut self, taps: Vec<KeptTap>) {
        if !self.is_settled() || taps == self.taps {
            return;
        }
        self.taps = taps;
        if let Err(error) = self.write() {
            tracing::warn!(
                "cannot list TAP devices in {}: {error}; the next vnetd may not find those that its configuration no longer names",
                self.file.display()
            );
        }
    }

    /// The devices do not outlive the host's next start, so nothing is synced to a disk.
    fn write(&self) -> io::Result<()> {
        let unless_absent =
            |error: io::Error| if error.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(error) };
        if self.taps.is_empty() {
            return std::fs::remove_file(&self.file).or_else(unless_absent);
        }
        let mut new = self.file.clone().into_os_string();
        new.push(".new");
        std::fs::remove_file(&new).or_else(unless_absent)?;
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&new)?;
        file.write_all(&serde_json::to_vec(&self.taps)?)?;
        std::fs::rename(&new, &self.file)
    }
}

fn read(file: &Path) -> io::Result<Vec<KeptTap>> {
    let file = OpenOptions::new().read(true).custom_flags(nix::libc::O_NOFOLLOW).open(file)?;
    let about = file.metadata()?;
    let ours = [0, nix::unistd::geteuid().as_raw()].contains(&about.uid());
    if !about.is_file() || !ours || about.mode() & 0o022 != 0 {
        return Err(io::Error::other("others may write it; its owner must be vnetd's user, its mode 600"));
    }
    let mut text = vec![];
    if file.take(FILE_MAX + 1).read_to_end(&mut text)? as u64 > FILE_MAX {
        return Err(io::Error::other(format!("it has more than {FILE_MAX} bytes")));
    }
    Ok(serde_json::from_slice(&text)?)
}

/// Removes the devices that a vnetd with this control socket has left, which must not run, and lists those that were there.
pub fn remove_left(control: &Path) -> Vec<String> {
    KeptTaps::load(control, None).remove_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(device: &str, netns: Option<&str>) -> InterfaceSpec {
        let netns = netns.map(|netns| netns.parse().unwrap());
        InterfaceSpec {
            attachment: Attachment::Tap { device: device.into(), netns },
            ..InterfaceSpec::default()
        }
    }

    fn place(inode: u64, name: &str) -> Place {
        Place { namespace: (4, inode), name: name.into() }
    }

    #[test]
    fn the_file_is_read_as_written_and_goes_with_the_last_device() {
        let folder = tempfile::tempdir().unwrap();
        let control = folder.path().join("s");
        let load = || KeptTaps::load(&control, None);
        let (here, there, vm) =
            (spec("t0", None), spec("t0", Some("no-such-netns")), InterfaceSpec::default());
        let mut taps = load();
        taps.expect([&here, &there, &vm].into_iter());
        assert_eq!(load().taps.len(), 2);
        taps.expect([&there].into_iter());
        assert_eq!(load().taps.len(), 2);
        // Moved: its namespace is not the configured one. A namespace that is gone is no place to compare.
        let home = kept::home(None).unwrap();
        let at = |place: &Place| Now::At(place.clone());
        let (own, other, renamed) =
            (Place { namespace: home, name: "t0".into() }, place(1, "t0"), place(1, "eth0"));
        for (is, moved) in [(&own, None), (&other, Some(&other)), (&renamed, Some(&renamed))] {
            taps.update([(&here, at(is))].into_iter());
            assert_eq!(load().keep(&here).moved.as_ref(), moved);
        }
        taps.update([(&here, Now::Unknown), (&there, at(&other))].into_iter());
        assert_eq!(load().keep(&here).moved, Some(renamed));
        assert_eq!(load().keep(&there).moved, None);
        assert!(folder.path().join("s.taps").exists());
        taps.update([(&here, Now::None), (&there, Now::None)].into_iter());
        assert!(!folder.path().join("s.taps").exists());
        assert!(load().taps.is_empty());
    }

    #[test]
    fn a_list_that_others_may_write_is_ignored() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let control = folder.path().join("s");
        KeptTaps::load(&control, None).expect([&spec("t0", None)].into_iter());
        let file = folder.path().join("s.taps");
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o622)).unwrap();
        assert!(KeptTaps::load(&control, None).taps.is_empty());
        std::fs::write(&file, "[{}]").unwrap();
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).unwrap();
        assert!(KeptTaps::load(&control, None).taps.is_empty());
    }

    #[test]
    fn before_a_take_over_is_settled_the_list_is_the_running_vnetds() {
        let folder = tempfile::tempdir().unwrap();
        let control = folder.path().join("s");
        let inheritance = Arc::new(Inheritance::default());
        let mut heir = KeptTaps::load(&control, Some(inheritance.clone()));
        heir.expect([&spec("t0", None)].into_iter());
        assert!(!folder.path().join("s.taps").exists());
        inheritance.settle();
        heir.expect([&spec("t0", None)].into_iter());
        assert!(folder.path().join("s.taps").exists());
    }
}
