//! What is pinned in a BPF file system, and what goes with vnetd.

use std::path::Path;

use super::tests::kernel;
use super::*;
use crate::loader::MAPS;

/// A bpffs of one test, unmounted when dropped.
struct Bpffs(tempfile::TempDir);

impl Bpffs {
    fn options(&self) -> PinOptions {
        PinOptions { bpffs: self.0.path().into(), host: "h.1".into() }
    }

    /// Entries of this host's folder, sorted.
    fn entries(&self) -> Vec<String> {
        let Ok(mut hosts) = std::fs::read_dir(self.0.path().join("vnet")) else { return vec![] };
        let Some(host) = hosts.next() else { return vec![] };
        let names = std::fs::read_dir(host.unwrap().path()).unwrap();
        let mut names: Vec<_> =
            names.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

impl Drop for Bpffs {
    fn drop(&mut self) {
        let path = std::ffi::CString::new(self.0.path().as_os_str().as_encoded_bytes()).unwrap();
        // SAFETY: the path is a zero-terminated string that lives across the call.
        unsafe { libc::umount2(path.as_ptr(), libc::MNT_DETACH) };
    }
}

#[test]
fn pinned_maps_have_one_owner_and_one_version() {
    if kernel().is_none() {
        return;
    }
    let bpffs = Bpffs(tempfile::tempdir().unwrap());
    let options = bpffs.options();
    // Mounts the bpffs. A vnetd with other programs has died.
    drop(Pins::open(&options, b"older programs").unwrap());
    let older = bpffs.entries();
    assert_eq!(older.len(), 1);
    assert!(options.exist());
    let first = Kernel::load(Some(&options)).unwrap();
    assert!(first.adoptable().is_ok() && !first.is_adopted(), "maps of older programs are not adopted");
    let entries = bpffs.entries();
    assert_eq!(entries.len(), 1);
    assert_ne!(entries, older, "the older maps are gone");
    let second = Kernel::load(Some(&options)).unwrap();
    assert!(second.adoptable().unwrap_err().contains("another vnetd"), "locked");
    first.leave();
    drop((first, second));
    assert_eq!(bpffs.entries(), entries, "left for the next vnetd");
    drop(Kernel::load(Some(&options)).unwrap());
    assert!(!options.exist() && !options.bpffs.join("vnet").exists(), "nothing is left");
}

#[test]
fn a_mounted_bpffs_goes_with_vnetd_and_a_missing_folder_is_not_made() {
    if kernel().is_none() {
        return;
    }
    let bpffs = Bpffs(tempfile::tempdir().unwrap());
    let options = bpffs.options();
    let device = |path: &Path| rustix::fs::stat(path).unwrap().st_dev;
    let before = device(&options.bpffs);
    let kernel = Kernel::load(Some(&options)).unwrap();
    assert!(kernel.adoptable().is_ok() && device(&options.bpffs) != before);
    drop(kernel);
    assert_eq!(device(&options.bpffs), before, "unmounted");
    let missing = PinOptions { bpffs: options.bpffs.join("none/bpf"), ..options };
    let kernel = Kernel::load(Some(&missing)).unwrap();
    assert!(kernel.adoptable().unwrap_err().contains("/none/bpf' is not there"));
    drop(kernel);
    assert!(!missing.bpffs.parent().unwrap().exists());
}

#[test]
fn every_map_is_pinned() {
    if kernel().is_none() {
        return;
    }
    let programs = aya::EbpfLoader::new().load(OBJECT).unwrap();
    // Constants belong to the loaded programs: those of the next vnetd have their own.
    let mut maps: Vec<_> = programs.maps().map(|(name, _)| name).filter(|name| *name != ".rodata").collect();
    maps.sort_unstable();
    assert_eq!(maps, MAPS);
}
