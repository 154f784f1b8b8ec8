//! Runs the programs in the kernel on frames of our own (BPF_PROG_TEST_RUN), at the loopback device.
//!
//! They take CAP_BPF; without it, as in an unprivileged build, they say so and pass.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use aya::programs::{TestRun, TestRunOptions};

use super::*;
use crate::frame::NetworkId;
use crate::stats::PortStats;
use crate::wire::ethernet::HEADER_LEN;

/// Verdicts of linux/pkt_cls.h.
const TC_ACT_SHOT: u32 = 2;
const TC_ACT_REDIRECT: u32 = 7;
/// `ifindex` of the loopback device, where test runs happen.
const LOOPBACK: u32 = 1;

const A: Mac = Mac([2, 0, 0, 0, 0, 0xa]);
const B: Mac = Mac([2, 0, 0, 0, 0, 0xb]);
/// The leases' clock.
const NOW: u64 = 1000;
const FROM: PortId = PortId(3);
const TO: PortId = PortId(9);

impl Kernel {
    /// Runs `from_guest` on a frame of a guest at `origin`.
    pub(crate) fn try_out(&self, origin: Origin, dst: Mac, src: Mac) {
        let (network, from) = (origin.network.get(), origin.port.0);
        let port = PortValue { network, from, mac: src.0, other: LOOPBACK };
        self.ports.lock().insert(LOOPBACK, port, 0).unwrap();
        let mut frame = [&dst.0[..], &src.0, &[0x08, 0]].concat();
        frame.resize(60, 0);
        let mut programs = self.programs.lock();
        let program: &mut SchedClassifier = programs.program_mut("from_guest").unwrap().try_into().unwrap();
        let options = TestRunOptions { data_in: Some(&frame), ..TestRunOptions::new() };
        assert_eq!(program.test_run(options).unwrap().return_value, TC_ACT_REDIRECT);
    }
}

fn kernel() -> Option<Arc<Kernel>> {
    match Kernel::load(None) {
        Ok(kernel) => Some(kernel),
        Err(error) => {
            assert!(!rustix::process::geteuid().is_root(), "{error}");
            eprintln!("not tested: {error}");
            None
        }
    }
}

/// A kernel whose loopback device is a guest's, with what `program` says to a frame.
struct Bench {
    kernel: Arc<Kernel>,
    from: Arc<PortStats>,
    to: Destination,
}

impl Bench {
    fn new() -> Option<Bench> {
        let kernel = kernel()?;
        let port = PortValue { network: 1, from: FROM.0, mac: B.0, other: LOOPBACK };
        kernel.ports.lock().insert(LOOPBACK, port, 0).unwrap();
        kernel.set_generation(7);
        kernel.tick(NOW, u64::MAX);
        let to = Destination { port: TO, device: LOOPBACK, mac: B, mtu: 1500, stats: Arc::default() };
        Some(Bench { kernel, from: Arc::default(), to })
    }

    fn run(&self, program: &str, frame: &[u8]) -> u32 {
        let mut programs = self.kernel.programs.lock();
        let program: &mut SchedClassifier = programs.program_mut(program).unwrap().try_into().unwrap();
        let options = TestRunOptions { data_in: Some(frame), ..TestRunOptions::new() };
        program.test_run(options).unwrap().return_value
    }

    /// Sends a frame of `len` bytes; true when a flow took it.
    fn takes(&self, dst: Mac, len: usize) -> bool {
        self.kernel.flows().count();
        let before = self.from.in_frames.get();
        assert_eq!(self.run("from_guest", &frame(dst, len)), TC_ACT_REDIRECT);
        self.kernel.flows().count();
        self.from.in_frames.get() == before + 1
    }

    fn install(&self, terms: &Terms) -> bool {
        self.kernel.flows().install(&known(B), &self.from, &self.to, terms)
    }
}

fn frame(dst: Mac, len: usize) -> Vec<u8> {
    let mut frame = [&dst.0[..], &A.0, &[0x08, 0]].concat();
    frame.resize(len, 0);
    frame
}

fn known(dst: Mac) -> Known {
    Known { network: NetworkId::DEFAULT, from: FROM, dst, src: A }
}

fn terms() -> Terms {
    Terms { until_ns: u64::MAX, generation: 7, buckets: [1, 2], versions: [0, 0] }
}

#[test]
fn a_device_without_a_port_forwards_nothing() {
    let Some(kernel) = kernel() else { return };
    let bench = Bench {
        kernel,
        from: Arc::default(),
        to: Destination { port: TO, device: 1, mac: B, mtu: 1500, stats: Arc::default() },
    };
    for program in ["from_guest", "from_core"] {
        assert_eq!(bench.run(program, &frame(B, 60)), TC_ACT_SHOT);
    }
}

#[test]
fn what_comes_from_vnetd_goes_to_the_guest() {
    let Some(bench) = Bench::new() else { return };
    for dst in [B, A, Mac::BROADCAST] {
        assert_eq!(bench.run("from_core", &frame(dst, 60)), TC_ACT_REDIRECT);
    }
}

#[test]
fn only_a_valid_flow_is_taken() {
    let Some(bench) = Bench::new() else { return };
    assert!(!bench.takes(B, 60), "unknown");
    assert!(bench.install(&terms()));
    assert!(bench.takes(B, 60));
    assert!(!bench.takes(A, 60), "another destination");
    assert!(!bench.takes(Mac::BROADCAST, 60), "a group address");
    // Each of what it depends on ends it, and only that.
    for word in [1, 2] {
        bench.kernel[word].fetch_add(1, Ordering::Relaxed);
        assert!(!bench.takes(B, 60), "version {word}");
        bench.kernel[word].fetch_sub(1, Ordering::Relaxed);
        assert!(bench.takes(B, 60));
    }
    bench.kernel[3].fetch_add(1, Ordering::Relaxed);
    assert!(bench.takes(B, 60), "a version it does not depend on");
    bench.kernel.set_generation(8);
    assert!(!bench.takes(B, 60), "generation");
    bench.kernel.set_generation(7);
    assert!(bench.install(&Terms { until_ns: NOW, ..terms() }));
    assert!(!bench.takes(B, 60), "lease");
    assert!(bench.install(&terms()));
    assert!(bench.takes(B, 60), "renewed");
}

#[test]
fn leases_run_by_vnetds_clock() {
    let Some(bench) = Bench::new() else { return };
    assert!(bench.install(&Terms { until_ns: NOW + 10, ..terms() }));
    // CLOCK_MONOTONIC is far beyond the lease, but only vnetd advances the leases' clock.
    assert!(bench.takes(B, 60));
    let known = known(B);
    assert_eq!(bench.kernel.lease_ms(&known), Some(0));
    bench.kernel.tick(NOW + 10, u64::MAX);
    assert!(!bench.takes(B, 60), "the lease has ended");
    assert_eq!(bench.kernel.lease_ms(&known), None);
    bench.kernel.tick(NOW, now_ns());
    assert!(!bench.takes(B, 60), "nobody has taken over in time");
    assert_eq!(bench.kernel.lease_ms(&known), None);
    bench.kernel.postpone(u64::MAX);
    assert!(bench.takes(B, 60));
}

#[test]
fn frames_beyond_the_mtu_come_up() {
    let Some(bench) = Bench::new() else { return };
    assert!(bench.install(&terms()));
    assert!(bench.takes(B, 1500 + HEADER_LEN + 4));
    assert!(!bench.takes(B, 1500 + HEADER_LEN + 5));
}

#[test]
fn both_ports_count_what_a_flow_has_carried() {
    let Some(bench) = Bench::new() else { return };
    assert!(bench.install(&terms()));
    assert!(bench.takes(B, 60) && bench.takes(B, 1000));
    assert_eq!((bench.from.in_frames.get(), bench.from.in_bytes.get()), (2, 1060));
    assert_eq!((bench.to.stats.out_frames.get(), bench.to.stats.out_bytes.get()), (2, 1060));
    let carried = Carried { flow: known(B), to: TO, frames: 2, bytes: 1060 };
    assert_eq!(bench.kernel.flows().largest(1), [carried]);
    assert_eq!(bench.kernel.flows().largest(0), []);
}

#[test]
fn used_flows_are_listed_and_ended_ones_removed() {
    let Some(bench) = Bench::new() else { return };
    let flows = bench.kernel.flows();
    const END: u64 = u64::MAX - 1;
    assert!(bench.install(&Terms { until_ns: END, ..terms() }));
    assert_eq!(flows.sweep(END - 10, 20), [], "not used");
    assert!(bench.takes(B, 60));
    assert_eq!(flows.sweep(END - 30, 20), [], "not yet");
    assert_eq!(flows.sweep(END - 10, 20), [known(B)]);
    assert!(bench.install(&Terms { until_ns: END, ..terms() }));
    assert_eq!(flows.sweep(END - 10, 20), [], "not used since it was renewed");
    assert_eq!(flows.len().0, 1);
    assert_eq!(flows.sweep(END, 20), []);
    assert_eq!(flows.len().0, 0);
    assert!(!bench.takes(B, 60));
    // The slot is used again, with counts of its own.
    flows.sweep(END, 20);
    assert!(bench.install(&terms()));
    assert!(bench.takes(B, 60));
    assert_eq!(bench.to.stats.out_frames.get(), 2);
}

#[test]
fn a_port_fills_its_own_share_only() {
    let Some(bench) = Bench::new() else { return };
    let to = |n: u32| {
        let [_, b, c, d] = n.to_be_bytes();
        Mac([2, 0, 1, b, c, d])
    };
    let flows = bench.kernel.flows();
    let install = |flow: Known| flows.install(&flow, &bench.from, &bench.to, &terms());
    // The port scans the network.
    const SCANNED: u32 = 1_000_000;
    let taken = (0..SCANNED).filter(|n| install(known(to(*n)))).count();
    assert_eq!(taken, FLOWS_PORT_MAX as usize);
    assert_eq!(flows.len(), (FLOWS_PORT_MAX as usize, u64::from(SCANNED - FLOWS_PORT_MAX)));
    assert!(install(Known { from: PortId(4), ..known(B) }), "another port's share");
    assert!(install(known(to(1))), "renewed at the limit");
}

/// A bpffs of one test, unmounted when dropped.
struct Bpffs(tempfile::TempDir);

impl Bpffs {
    fn options(&self) -> PinOptions {
        PinOptions { bpffs: self.0.path().into(), host: "h.1".into() }
    }

    /// Entries of this host's folder, sorted.
    fn entries(&self) -> Vec<String> {
        let host = std::fs::read_dir(self.0.path().join("vnet")).unwrap().next();
        let Some(host) = host else { return vec![] };
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
    drop((first, second));
    assert_eq!(bpffs.entries(), [""; 0], "nothing is left");
    assert!(!options.exist());
}

#[test]
fn every_map_is_pinned() {
    if kernel().is_none() {
        return;
    }
    let programs = EbpfLoader::new().load(OBJECT).unwrap();
    let mut maps: Vec<_> = programs.maps().map(|(name, _)| name).collect();
    maps.sort_unstable();
    assert_eq!(maps, pins::MAPS);
}

/// Compiles the programs again and compares with the object that is checked in. Other compilers make other code, so only the
/// one of Debian 12 counts (`make packages` installs it).
#[test]
fn the_object_is_what_the_sources_make() {
    const CLANG: &str = "clang-14";
    let Ok(version) = Command::new(CLANG).arg("--version").output() else {
        eprintln!("not compared: no {CLANG}");
        return;
    };
    assert!(version.status.success());
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/kernel/programs");
    let made = tempfile::tempdir().unwrap();
    let object = made.path().join("forward.o");
    let done = Command::new(folder.join("compile")).arg(&object).status().unwrap();
    assert!(done.success());
    assert!(
        std::fs::read(object).unwrap() == OBJECT,
        "run vnet/src/kernel/programs/compile, and commit forward.o"
    );
}
