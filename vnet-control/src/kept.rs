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
    /// It could not be removed, and that was logged.
    #[serde(skip)]
    stuck: bool,
}

impl KeptTap {
    fn new((device, netns): (&str, Option<&Netns>), place: Option<Place>, moved: bool) -> KeptTap {
        KeptTap { device: device.into(), netns: netns.map(ToString::to_string), place, moved, stuck: false }
    }

    /// The configured namespace. As configured, its name was valid.
    fn netns(&self) -> Option<Netns> {
        self.netns.as_ref().and_then(|netns| netns.parse().ok())
    }

    /// Where it is, or will be made.
    fn at(&self) -> Option<Place> {
        let made = || {
            let namespace = kept::home(self.netns().as_ref())?;
            (self.netns.is_none() || self.netns().is_some())
                .then(|| Place { namespace, name: self.device.clone() })
        };
        self.place.clone().or_else(made)
    }

    /// True if it was in a namespace that is not there any more, or not to be found.
    fn has_lost_namespace(&self) -> bool {
        let elsewhere = |place: &&Place| Some(place.namespace) != kept::home(self.netns().as_ref());
        self.place.as_ref().filter(elsewhere).is_some_and(|place| kept::is_gone(place.namespace))
    }

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

/// What became of a device that no interface has.
#[derive(PartialEq, Eq)]
enum Removal {
    /// This was its name.
    Done(String),
    /// There is none, or it is another interface's.
    None,
    /// The kernel refused.
    Failed,
}

/// The devices, and their file.
pub(super) struct KeptTaps {
    file: PathBuf,
    mark: Mark,
    taps: Vec<KeptTap>,
    /// What the file lists; `None`: unknown, as a write has failed.
    written: Option<Vec<KeptTap>>,
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
        KeptTaps { file, mark: Mark::of(control), written: Some(taps.clone()), taps, inheritance }
    }

    /// How the device of an interface outlives this process.
    pub(super) fn keep(&self, spec: &InterfaceSpec) -> Keep {
        let known = self.taps.iter().find(|tap| tap.is_of(spec));
        let is_free =
            |place: &Place| !self.taps.iter().any(|tap| !tap.is_of(spec) && tap.at().as_ref() == Some(place));
        let moved = known.filter(|tap| tap.moved).and_then(|tap| tap.place.clone()).filter(is_free);
        Keep { mark: self.mark.clone(), moved }
    }

    /// Lists interfaces whose devices are about to be made.
    pub(super) fn expect<'a>(&mut self, specs: impl Iterator<Item = &'a InterfaceSpec>) {
        let mut taps = self.taps.clone();
        for spec in specs {
            if let Some(of) = of(spec).filter(|_| !taps.iter().any(|tap| tap.is_of(spec))) {
                taps.push(KeptTap::new(of, None, false));
            }
        }
        self.replace(taps);
    }

    /// The device of this interface is not where it was any more. The next update lists that.
    pub(super) fn forget(&mut self, spec: &InterfaceSpec) {
        for tap in self.taps.iter_mut().filter(|tap| tap.is_of(spec)) {
            (tap.place, tap.moved) = (None, false);
        }
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
                        taps.push(KeptTap::new((device, netns), Some(place), moved));
                    }
                },
                Now::Unknown => taps.extend(known.cloned()),
                Now::None => {}
            }
        }
        if self.is_settled() {
            let mut left = self.taps.clone();
            left.retain_mut(|tap| {
                !specs.iter().any(|spec| tap.is_of(spec)) && self.remove(tap, &taps) == Removal::Failed
            });
            taps.append(&mut left);
        }
        self.replace(taps);
    }

    /// Removes devices that no interface has, and those in a namespace that another one of the same name has replaced.
    pub(super) fn sweep(&mut self, interfaces: &[Item<InterfaceSpec>]) {
        let mut taps = self.taps.clone();
        for tap in taps.iter_mut().filter(|tap| tap.has_lost_namespace()) {
            if tap.moved {
                tracing::info!(
                    "the network namespace that device '{}' was moved to is gone, or only a mount outside /run/netns holds it",
                    tap.device
                );
            }
            (tap.place, tap.moved) = (None, false);
        }
        let of_tap = |tap: &KeptTap| interfaces.iter().map(|item| &item.spec).find(|spec| tap.is_of(spec));
        let stay: Vec<_> = taps.iter().filter(|tap| of_tap(tap).is_some()).cloned().collect();
        taps.retain_mut(|tap| {
            let spec = of_tap(tap);
            let replaced = |spec| {
                let home = of(spec).and_then(|(_, netns)| kept::home(netns));
                !tap.moved
                    && tap
                        .place
                        .as_ref()
                        .is_some_and(|place| home.is_some_and(|home| home != place.namespace))
            };
            if spec.is_none_or(replaced) {
                if self.remove(tap, &stay) == Removal::Failed {
                    return true;
                }
                tap.place = None;
            }
            spec.is_some()
        });
        self.replace(taps);
    }

    /// Removes all devices. Returns the names of those that were there, and the number of those that stay.
    pub(super) fn remove_all(&mut self) -> (Vec<String>, usize) {
        let (mut removed, mut taps) = (vec![], self.taps.clone());
        taps.retain_mut(|tap| match self.remove(tap, &[]) {
            Removal::Done(name) => {
                removed.push(name);
                false
            }
            Removal::None => false,
            Removal::Failed => true,
        });
        self.replace(taps);
        (removed, self.taps.len())
    }

    /// Removes a device, unless one of those that `stay` is in its place.
    fn remove(&self, tap: &mut KeptTap, stay: &[KeptTap]) -> Removal {
        let at = tap.at();
        let is_other = |other: &KeptTap| (&other.device, &other.netns) != (&tap.device, &tap.netns);
        if at.is_some() && stay.iter().any(|other| is_other(other) && other.at() == at) {
            return Removal::None;
        }
        let (place, netns) = (tap.place.as_ref(), tap.netns());
        let name = place.map_or(&tap.device, |place| &place.name);
        match kept::remove_left(&self.mark, place, (&tap.device, netns.as_ref())) {
            Ok(true) => {
                tracing::info!("has removed device '{name}', which no interface has any more");
                Removal::Done(name.clone())
            }
            Ok(false) => Removal::None,
            Err(error) => {
                // It is tried again with each update.
                if !tap.stuck {
                    tracing::warn!("cannot remove device '{name}', which no interface has any more: {error}");
                }
                tap.stuck = true;
                Removal::Failed
            }
        }
    }

    fn is_settled(&self) -> bool {
        self.inheritance.as_ref().is_none_or(|inheritance| inheritance.is_settled())
    }

    fn replace(&mut self, taps: Vec<KeptTap>) {
        if !self.is_settled() {
            return;
        }
        let changed = taps != self.taps;
        self.taps = taps;
        if self.written.as_ref() == Some(&self.taps) {
            return;
        }
        match self.write() {
            Ok(()) => self.written = Some(self.taps.clone()),
            Err(error) => {
                // It is tried again with each update, and logged with each change.
                if changed || self.written.is_some() {
                    tracing::warn!(
                        "cannot list TAP devices in {}: {error}; the next vnetd may not find those that its configuration no longer names",
                        self.file.display()
                    );
                }
                self.written = None;
            }
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
    // Does not wait for a writer where somebody has made a FIFO.
    let flags = nix::libc::O_NOFOLLOW | nix::libc::O_NONBLOCK;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(file)?;
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

/// Removes the devices that a vnetd with this control socket has left, which must not run. Returns the names of those that were there, and
/// the number of those that stay, because the kernel refused to remove them.
pub fn remove_left(control: &Path) -> (Vec<String>, usize) {
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
    fn a_fifo_in_the_lists_place_does_not_stop_the_start() {
        let folder = tempfile::tempdir().unwrap();
        let control = folder.path().join("s");
        let made = std::process::Command::new("mkfifo").arg(folder.path().join("s.taps")).status();
        assert!(made.unwrap().success());
        let (done, end) = std::sync::mpsc::channel();
        std::thread::spawn(move || done.send(KeptTaps::load(&control, None).taps.len()));
        assert_eq!(end.recv_timeout(std::time::Duration::from_secs(10)), Ok(0));
    }

    #[test]
    fn a_write_that_failed_is_tried_again() {
        let folder = tempfile::tempdir().unwrap();
        let control = folder.path().join("s");
        let obstacle = folder.path().join("s.taps.new");
        std::fs::create_dir(&obstacle).unwrap();
        let mut taps = KeptTaps::load(&control, None);
        taps.expect([&spec("t0", None)].into_iter());
        assert!(!folder.path().join("s.taps").exists());
        std::fs::remove_dir(&obstacle).unwrap();
        taps.expect([&spec("t0", None)].into_iter());
        assert_eq!(KeptTaps::load(&control, None).taps.len(), 1);
    }

    /// The kernel uses the number of a namespace that has ended again.
    #[test]
    fn the_place_of_another_interface_is_not_taken() {
        let folder = tempfile::tempdir().unwrap();
        let control = folder.path().join("s");
        let mut taps = KeptTaps::load(&control, None);
        let (ended, next) = (spec("t0", Some("no-such-netns")), spec("t1", Some("no-such-netns-either")));
        taps.update([(&ended, Now::At(place(7, "eth0")))].into_iter());
        taps.taps[0].moved = true;
        assert_eq!(taps.keep(&ended).moved, Some(place(7, "eth0")));
        let now = || [(&ended, Now::Unknown), (&next, Now::At(place(7, "eth0")))].into_iter();
        taps.update(now());
        assert_eq!(taps.keep(&ended).moved, None);
        taps.forget(&ended);
        taps.update(now());
        let listed = KeptTaps::load(&control, None).taps;
        assert_eq!(listed.iter().filter(|tap| tap.place.is_some()).count(), 1);
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
