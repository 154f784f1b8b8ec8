//! The helper loads programs and attaches them, in a network namespace of the test, where the loopback device carries nothing.

use std::os::fd::AsRawFd;
use std::path::PathBuf;

use aya::maps::MapData;
use aya::programs::links::{FdLink, Link, PinnedLink};

use super::programs::{attach_by, load_by};
use super::tests::helper;
use super::*;
use crate::loader::{Attach, By, FOLDER, MAPS, OBJECT, Pin, filter, maps_folder};

/// Index of the loopback device.
const LOOPBACK: u32 = 1;

/// A helper in a network namespace that the calling thread enters.
fn helper_elsewhere() -> Helper {
    // SAFETY: the call passes no pointers. The thread belongs to one test, so no other test's namespace changes.
    assert_eq!(unsafe { libc::unshare(libc::CLONE_NEWNET) }, 0, "that needs CAP_SYS_ADMIN");
    helper()
}

fn attach(by: By, pin: Option<Pin>) -> Attach {
    Attach { program: "from_guest".into(), device: ("lo".into(), LOOPBACK), by, pin }
}

/// Whether the link is a tcx link at the loopback device; one without a device has index 0.
fn is_attached(link: &OwnedFd) -> bool {
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", link.as_raw_fd())).unwrap();
    info.contains("link_type:\ttcx") && info.contains("ifindex:\t1\n")
}

/// A host's folder in a bpffs of its own, which is unmounted when this is dropped.
struct Host {
    bpffs: tempfile::TempDir,
    folder: PathBuf,
}

impl Host {
    fn new(helper: &Helper) -> Host {
        let bpffs = tempfile::tempdir().unwrap();
        helper.ask(&Request::Mount(bpffs.path().into()), None).unwrap();
        let folder = bpffs.path().join(FOLDER).join("h1-1");
        std::fs::create_dir_all(maps_folder(&folder, OBJECT)).unwrap();
        Host { bpffs, folder }
    }

    fn map(&self, name: &str) -> PathBuf {
        maps_folder(&self.folder, OBJECT).join(name)
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = unmount_bpffs(self.bpffs.path());
    }
}

#[test]
fn maps_come_in_order_and_links_outlive_what_was_loaded() {
    let helper = helper_elsewhere();
    let none = attach_by(&helper, &attach(By::Link, None)).unwrap_err();
    assert_eq!(none.to_string(), "no programs are loaded");
    let maps = load_by(&helper, None).unwrap();
    for (name, map) in MAPS.into_iter().zip(maps) {
        assert_eq!(MapData::from_fd(map).unwrap().info().unwrap().name_as_str(), Some(name));
    }
    let link = attach_by(&helper, &attach(By::Link, None)).unwrap().unwrap();
    // A device takes a program by one link only.
    let first = Attach { program: "from_lan".into(), ..attach(By::FirstLink, None) };
    let first = attach_by(&helper, &first).unwrap().unwrap();
    assert!(attach_by(&helper, &attach(By::Filter, None)).unwrap().is_none());
    assert!(is_attached(&link) && is_attached(&first));
    // The programs of the next load take the place of the first ones in the helper only.
    load_by(&helper, None).unwrap();
    assert!(is_attached(&link) && is_attached(&first));
    filter("lo").unwrap().detach().expect("the filter is there");
    assert!(filter("lo").unwrap().detach().is_err(), "and is removed");
}

#[test]
fn what_cannot_be_attached_is_told_in_one_line() {
    let helper = helper_elsewhere();
    load_by(&helper, None).unwrap();
    let refused = |attach: Attach| {
        let text = attach_by(&helper, &attach).unwrap_err().to_string();
        assert_eq!(text.lines().count(), 1);
        text
    };
    let unknown = Attach { program: "to_shell".into(), ..attach(By::Link, None) };
    assert_eq!(refused(unknown), "the object has no 'to_shell'");
    assert!(refused(attach(By::Pair, None)).contains("os error"), "no netkit pair");
    let gone = |by| refused(Attach { device: ("none".into(), 1 << 30), ..attach(by, None) });
    assert_eq!(gone(By::Link), "`bpf_mprog_attach` failed: No such device (os error 19)");
    assert!(gone(By::Filter).contains("No such device"));
    assert_eq!(refused(attach(By::Link, Some(Pin::Link))), "nothing is pinned");
}

#[test]
fn links_are_pinned_in_the_hosts_folder() {
    let helper = helper_elsewhere();
    let host = Host::new(&helper);
    load_by(&helper, Some(&host.folder)).unwrap();
    assert!(MAPS.iter().all(|name| host.map(name).exists()));
    for (pin, file, program) in
        [(Pin::Link, "link-1", "from_guest"), (Pin::Underlay, "underlay-1", "from_underlay")]
    {
        let attach = Attach { program: program.into(), ..attach(By::Link, Some(pin)) };
        assert!(attach_by(&helper, &attach).unwrap().is_none());
        let id = || FdLink::from(PinnedLink::from_pin(host.folder.join(file)).unwrap()).info().unwrap().id();
        let before = id();
        assert!(attach_by(&helper, &attach).unwrap().is_none());
        assert_eq!(id(), before, "the link stays, its program is replaced");
    }
    let both = attach_by(&helper, &attach(By::Filter, Some(Pin::Link))).unwrap_err();
    assert_eq!(both.raw_os_error(), Some(libc::EINVAL), "a filter has no pin");
    // The next load adopts the maps.
    let [_, flows, ..] = load_by(&helper, Some(&host.folder)).unwrap();
    let id = |map: MapData| map.info().unwrap().id();
    let pinned = MapData::from_pin(host.map("flows")).unwrap();
    assert_eq!(id(MapData::from_fd(flows).unwrap()), id(pinned));
}

#[test]
fn only_maps_of_vnet_in_a_bpffs_are_opened() {
    let helper = helper_elsewhere();
    let host = Host::new(&helper);
    let elsewhere = tempfile::tempdir().unwrap();
    let no_bpffs = elsewhere.path().join(FOLDER).join("h1-1");
    std::fs::create_dir_all(maps_folder(&no_bpffs, OBJECT)).unwrap();
    let others = host.bpffs.path().join("other").join("h1-1");
    std::fs::create_dir_all(maps_folder(&others, OBJECT)).unwrap();
    for folder in [no_bpffs, others, host.bpffs.path().into(), host.folder.join("none"), "/".into()] {
        let text = load_by(&helper, Some(&folder)).unwrap_err().to_string();
        assert_eq!(text, format!("'{}' is no folder of vnet in a bpffs", folder.display()));
    }
    // Another program's map, which has a place for each key that these programs look up.
    let [.., tallies, _, _] = load_by(&helper, None).unwrap();
    MapData::from_fd(tallies).unwrap().pin(host.map("ports")).unwrap();
    let text = load_by(&helper, Some(&host.folder)).unwrap_err().to_string();
    assert_eq!(text, "the pinned map 'ports' is another program's");
}
