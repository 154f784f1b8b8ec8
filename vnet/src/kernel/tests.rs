//! Runs the programs in the kernel on frames of our own (BPF_PROG_TEST_RUN), at the loopback device.
//!
//! They need CAP_BPF. Without it, as in an unprivileged build, they print that and pass; `make test` sets `VNET_TEST_PROGRAMS`, with
//! which they fail instead.

use std::fmt::Display;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::sync::Arc;

use aya::programs::{TestRun, TestRunOptions};

use super::*;
use crate::frame::NetworkId;
use crate::wire::ethernet::HEADER_LEN;
use crate::wire::vxlan::{WIRE_PORT, WireTail};

/// Verdicts of linux/pkt_cls.h.
/// -1: the device's other filters and the network stack decide.
pub(super) const TC_ACT_UNSPEC: u32 = u32::MAX;
pub(super) const TC_ACT_SHOT: u32 = 2;
pub(super) const TC_ACT_REDIRECT: u32 = 7;
/// `ifindex` of the loopback device, where test runs happen.
pub(super) const LOOPBACK: u32 = 1;

pub(super) const A: Mac = Mac([2, 0, 0, 0, 0, 0xa]);
pub(super) const B: Mac = Mac([2, 0, 0, 0, 0, 0xb]);
/// The leases' clock.
const NOW: u64 = 1000;
pub(super) const FROM: PortId = PortId(3);
const TO: PortId = PortId(9);

impl Kernel {
    /// Runs `from_guest` on a frame of a guest at `origin`.
    pub(crate) fn try_out(&self, origin: Origin, dst: Mac, src: Mac) {
        let (network, from) = (origin.network.get(), origin.port.0);
        let port = PortValue { network, from, mac: src.0, other: LOOPBACK };
        self.ports.lock().insert(LOOPBACK, port, 0).unwrap();
        let mut frame = [&dst.0[..], &src.0, &[0x08, 0]].concat();
        frame.resize(60, 0);
        let mut programs = self.programs.own();
        let options = TestRunOptions { data_in: Some(&frame), ..TestRunOptions::new() };
        assert_eq!(
            programs.program("from_guest").unwrap().test_run(options).unwrap().return_value,
            TC_ACT_REDIRECT
        );
    }
}

/// Notes that a test cannot run here, which is a failure if `VNET_TEST_PROGRAMS` is set.
pub(crate) fn skip(why: impl Display) {
    assert!(std::env::var_os("VNET_TEST_PROGRAMS").is_none(), "VNET_TEST_PROGRAMS is set, but: {why}");
    eprintln!("not tested: {why}");
}

pub(crate) fn kernel() -> Option<Arc<Kernel>> {
    match Kernel::load(None) {
        Ok(kernel) => Some(kernel),
        Err(error) => {
            assert!(!rustix::process::geteuid().is_root(), "{error}");
            skip(error);
            None
        }
    }
}

/// Gives the calling thread its own network namespace, without IPv6, so that the kernel sends no frames by itself. Returns false
/// without CAP_SYS_ADMIN.
pub(crate) fn own_network() -> bool {
    // SAFETY: the call passes no pointers. The thread belongs to one test, so no other test's namespace changes.
    if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
        skip("a network namespace needs CAP_SYS_ADMIN");
        return false;
    }
    for which in ["all", "default"] {
        // Absent if the kernel has no IPv6.
        let _ = std::fs::write(format!("/proc/sys/net/ipv6/conf/{which}/disable_ipv6"), "1");
    }
    true
}

#[test]
fn only_netkit_pairs_have_their_hook() {
    let Some(kernel) = kernel() else { return };
    let refused = kernel.attach_by("from_container", &("lo".into(), LOOPBACK), By::Pair, None);
    let text = refused.err().unwrap().to_string();
    assert!(text.starts_with("device 'lo' takes no programs: ") && text.contains("os error"), "{text}");
}

/// A kernel whose loopback device is a guest's, with what `program` says to a frame.
pub(super) struct Bench {
    pub(super) kernel: Arc<Kernel>,
    pub(super) from: Sender,
    pub(super) to: Destination,
}

impl Bench {
    pub(super) fn new() -> Option<Bench> {
        let kernel = kernel()?;
        let port = PortValue { network: 1, from: FROM.0, mac: B.0, other: LOOPBACK };
        kernel.ports.lock().insert(LOOPBACK, port, 0).unwrap();
        kernel.set_generation(7);
        kernel.tick(NOW, u64::MAX);
        let to = guest();
        Some(Bench { kernel, from: sender(), to })
    }

    fn run(&self, program: &str, frame: &[u8]) -> u32 {
        self.change(program, frame).0
    }

    /// The verdict of `program` on a frame, and the frame afterwards.
    pub(super) fn change(&self, program: &str, frame: &[u8]) -> (u32, Vec<u8>) {
        self.change_segmented(program, frame, 0)
    }

    /// The same for a frame to be segmented into pieces of `gso_size` bytes.
    pub(super) fn change_segmented(&self, program: &str, frame: &[u8], gso_size: u32) -> (u32, Vec<u8>) {
        // struct __sk_buff of linux/bpf.h.
        const GSO_SIZE_AT: usize = 176;
        let mut context = [0; 192];
        context[GSO_SIZE_AT..GSO_SIZE_AT + 4].copy_from_slice(&gso_size.to_ne_bytes());
        let mut programs = self.kernel.programs.own();
        let mut room = vec![0; frame.len() + 256];
        let options = TestRunOptions {
            data_in: Some(frame),
            data_out: Some(&mut room),
            ctx_in: Some(&context),
            ..TestRunOptions::new()
        };
        let result = programs.program(program).unwrap().test_run(options).unwrap();
        let len = result.data_size_out as usize;
        room.truncate(len);
        (result.return_value, room)
    }

    /// Sends a frame of `len` bytes; true when a flow took it.
    pub(super) fn takes(&self, dst: Mac, len: usize) -> bool {
        self.takes_by("from_guest", dst, len)
    }

    /// The same with another program.
    fn takes_by(&self, program: &str, dst: Mac, len: usize) -> bool {
        self.takes_frame(program, &frame(dst, len))
    }

    /// Runs a program that redirects `frame`; true when a flow took it.
    pub(super) fn takes_frame(&self, program: &str, frame: &[u8]) -> bool {
        self.kernel.flows().count();
        let before = self.from.stats.in_frames.get();
        assert_eq!(self.run(program, frame), TC_ACT_REDIRECT);
        self.kernel.flows().count();
        self.from.stats.in_frames.get() == before + 1
    }

    pub(super) fn install(&self, terms: &Terms) -> bool {
        self.kernel.flows().install(&known(B), &self.from, &self.to, terms)
    }
}

pub(super) fn sender() -> Sender {
    Sender { stats: Arc::default(), payer: FROM }
}

pub(super) fn guest() -> Destination {
    Destination {
        port: TO,
        device: LOOPBACK,
        mtu: 1500,
        stats: Arc::default(),
        target: Target::Guest { mac: Some(B), namespace: Some(0) },
    }
}

fn frame(dst: Mac, len: usize) -> Vec<u8> {
    let mut frame = [&dst.0[..], &A.0, &[0x08, 0]].concat();
    frame.resize(len, 0);
    frame
}

pub(super) fn known(dst: Mac) -> Known {
    Known { network: NetworkId::DEFAULT, from: FROM, dst, src: A, datagram: None }
}

pub(super) fn terms() -> Terms {
    Terms { until_ns: u64::MAX, generation: 7, buckets: [1, 2], versions: [0, 0] }
}

#[test]
fn a_device_without_a_port_forwards_nothing() {
    let Some(kernel) = kernel() else { return };
    let bench = Bench { kernel, from: sender(), to: guest() };
    for program in ["from_guest", "from_container", "from_core", "from_wire", "core_to_wire"] {
        assert_eq!(bench.run(program, &frame(B, 60)), TC_ACT_SHOT);
    }
}

#[test]
fn the_host_gets_all_frames_of_a_lan_but_known_flows() {
    let Some(bench) = Bench::new() else { return };
    let own = Mac([2, 0, 0, 0, 0, 0xc]);
    let port = PortValue { network: 1, from: FROM.0, mac: own.0, other: LOOPBACK };
    assert!(bench.install(&terms()));
    bench.kernel.ports.lock().remove(&LOOPBACK).unwrap();
    assert_eq!(bench.run("from_lan", &frame(B, 60)), TC_ACT_UNSPEC, "a device without a port");
    bench.kernel.ports.lock().insert(LOOPBACK, port, 0).unwrap();
    for dst in [own, A, Mac::BROADCAST] {
        assert_eq!(bench.run("from_lan", &frame(dst, 60)), TC_ACT_UNSPEC, "{dst}");
    }
    assert_eq!(bench.run("from_lan", &frame(B, 60)), TC_ACT_REDIRECT);
    bench.kernel.set_generation(8);
    assert_eq!(bench.run("from_lan", &frame(B, 60)), TC_ACT_UNSPEC, "the flow has ended");
    bench.kernel.flows().count();
    assert_eq!((bench.from.stats.in_frames.get(), bench.to.stats.out_frames.get()), (1, 1));
    assert_eq!(bench.run("ends", &frame(B, 60)), TC_ACT_SHOT, "no copy reaches the host's network stack");
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
fn a_container_of_a_netkit_pair_sends_as_one_of_a_veth() {
    let Some(mut bench) = Bench::new() else { return };
    let takes = |bench: &Bench, dst, len| bench.takes_by("from_container", dst, len);
    assert!(!takes(&bench, B, 60), "unknown");
    assert!(bench.install(&terms()));
    assert!(takes(&bench, B, 60) && takes(&bench, B, 1500 + HEADER_LEN + 4));
    assert_eq!((bench.to.stats.out_frames.get(), bench.to.stats.out_bytes.get()), (2, 1578));
    assert!(!takes(&bench, B, 1500 + HEADER_LEN + 5), "too long");
    assert!(!takes(&bench, A, 60), "another destination");
    assert!(!takes(&bench, Mac::BROADCAST, 60), "a group address");
    bench.kernel.set_generation(8);
    assert!(!takes(&bench, B, 60), "generation");
    // What comes up is unchanged.
    assert_eq!(bench.change("from_container", &echo(200)), (TC_ACT_REDIRECT, echo(200)));
    bench.kernel.set_generation(7);
    let local = Ipv4Addr::new(192, 0, 2, 1);
    let underlay = Underlay { device: LOOPBACK, local, next_hop: None };
    bench.to.target = by_wire(Ipv4Addr::new(192, 0, 2, 2), Some(underlay));
    assert!(bench.install(&terms()));
    let (verdict, datagram) = bench.change("from_container", &echo(200));
    assert_eq!((verdict, &datagram[50..]), (TC_ACT_REDIRECT, &echo(200)[..]), "to another host");
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
    // Programs read a clock that is late by up to a tick of the kernel, 10 ms at most.
    bench.kernel.tick(NOW, now_ns() - 20_000_000);
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
    assert_eq!((bench.from.stats.in_frames.get(), bench.from.stats.in_bytes.get()), (2, 1060));
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
    let used = flows.sweep(END - 10, 20);
    let [(flow, held)] = used[..] else { panic!("{used:?}") };
    assert_eq!(flow, known(B));
    // A source that has moved is not learned again where it was.
    assert!(bench.kernel.is_current(&held));
    bench.kernel[1].fetch_add(1, Ordering::Relaxed);
    assert!(!bench.kernel.is_current(&held));
    bench.kernel[1].fetch_sub(1, Ordering::Relaxed);
    bench.kernel.set_generation(8);
    assert!(!bench.kernel.is_current(&held));
    bench.kernel.set_generation(7);
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
    let pays = |payer: u16, flow: Known| {
        let from = Sender { payer: PortId(payer), ..bench.from.clone() };
        flows.install(&flow, &from, &bench.to, &terms())
    };
    let install = |flow| pays(FROM.0, flow);
    // The port scans the network.
    const SCANNED: u32 = 1_000_000;
    let taken = (0..SCANNED).filter(|n| install(known(to(*n)))).count();
    assert_eq!(taken, FLOWS_PORT_MAX as usize);
    assert_eq!(flows.len(), (FLOWS_PORT_MAX as usize, u64::from(SCANNED - FLOWS_PORT_MAX)));
    assert!(pays(4, Known { from: PortId(4), ..known(B) }), "another port's share");
    assert!(install(known(to(1))), "renewed at the limit");
    // A flow that leads to another guest now is charged to that one.
    assert!(pays(4, known(to(1))));
    assert!(install(known(to(SCANNED))), "there is room for one more");
    assert!(!install(known(to(SCANNED + 1))));
    // Many scan it together: as much as each of them has is left for others.
    let mut taken = [0_u32; 40];
    for n in 0..5000 {
        for (port, taken) in (100..).zip(&mut taken) {
            *taken += u32::from(pays(port, Known { from: PortId(port), ..known(to(n)) }));
        }
    }
    let others = (0..5000).filter(|n| pays(200, Known { from: PortId(200), ..known(to(*n)) })).count();
    assert!(taken.iter().all(|taken| (1000..2000).contains(taken)), "{taken:?}");
    assert!(others > 500, "{others}");
}

/// Another host that the wire reaches.
pub(super) fn by_wire(remote: Ipv4Addr, underlay: Option<Underlay>) -> Target {
    let remote = SocketAddrV4::new(remote, WIRE_PORT);
    Target::Host {
        remote,
        packet_max: 1450,
        underlay,
        sources: Sources::Wire,
        translates: Translates::Nothing,
    }
}

#[test]
fn a_flow_to_another_host_takes_the_wire() {
    let Some(mut bench) = Bench::new() else { return };
    let remote = Ipv4Addr::new(192, 0, 2, 2);
    bench.to.target = by_wire(remote, None);
    assert!(bench.install(&terms()));
    // Also frames larger than one datagram, which leave in fragments.
    assert!(bench.takes(B, 60) && bench.takes(B, 1514));
    assert!(!bench.takes(B, 1500 + HEADER_LEN + 5));
    assert_eq!((bench.to.stats.out_frames.get(), bench.to.stats.out_bytes.get()), (2, 1574));
    assert_eq!(bench.kernel.flows().end(&[&Arc::default()]), []);
    assert!(bench.takes(B, 60), "another link's flows have ended");
    assert_eq!(bench.kernel.flows().end(&[&bench.to.stats]).len(), 1, "it was in use");
    assert!(!bench.takes(B, 60));
    assert_eq!(bench.kernel.flows().len().0, 0);
}

/// A test run has no tunnel key, so frames with one are tested end to end (lab/tests/test_kernel_wire.py).
#[test]
fn the_wire_drops_a_frame_that_no_tunnel_has_brought() {
    let Some(bench) = Bench::new() else { return };
    let flow = Known { from: PortId(0), ..known(B) };
    assert!(bench.install(&terms()) && bench.kernel.flows().install(&flow, &bench.from, &bench.to, &terms()));
    assert_eq!(bench.run("from_wire", &frame(B, 60)), TC_ACT_SHOT);
    bench.kernel.flows().count();
    assert_eq!(bench.to.stats.out_frames.get(), 0);
}

#[test]
fn programs_know_the_peers_of_the_current_links_only() {
    let Some(bench) = Bench::new() else { return };
    let [one, two] = [1, 2].map(|n| End { remote: Ipv4Addr::new(192, 0, 2, n), port: WIRE_PORT });
    let known = || {
        let peers = bench.kernel.peers.lock();
        let mut known: Vec<_> =
            peers.iter().map(|peer| peer.map(|(key, peer)| (key.end(), peer.from)).unwrap()).collect();
        known.sort_unstable();
        known
    };
    bench.kernel.set_peers(&[(one, peer(7)), (two, peer(8))].into(), false).unwrap();
    assert_eq!(known(), [(one, 7), (two, 8)]);
    bench.kernel.set_peers(&[(two, peer(9))].into(), false).unwrap();
    assert_eq!(known(), [(two, 9)]);
}

pub(super) fn peer(port: u16) -> Peer {
    let underlay = Underlay { device: LOOPBACK, local: Ipv4Addr::new(192, 0, 2, 1), next_hop: None };
    Peer { port: PortId(port), underlay: Some(underlay) }
}

/// An ICMP echo from A to B. Its first bytes are those of an Ethernet frame that carries IPv4.
pub(super) fn echo(len: usize) -> Vec<u8> {
    let mut frame = frame(B, len);
    frame[14..16].copy_from_slice(&[0x45, 2]);
    frame[23] = 1;
    frame
}

#[test]
fn a_datagram_made_by_programs_is_taken_by_programs() {
    let Some(mut bench) = Bench::new() else { return };
    let (local, remote) = (Ipv4Addr::new(192, 0, 2, 1), Ipv4Addr::new(192, 0, 2, 2));
    bench.to.target = by_wire(remote, Some(Underlay { device: LOOPBACK, local: remote, next_hop: None }));
    assert!(bench.install(&terms()));
    let frame = echo(200);
    let (verdict, datagram) = bench.change("from_guest", &frame);
    assert_eq!((verdict, datagram.len()), (TC_ACT_REDIRECT, 250));
    assert_eq!(datagram[50..], frame);
    assert_eq!(datagram[14..16], [0x45, 2], "the transport is ECN-capable");
    assert_eq!(datagram[16..18], 236_u16.to_be_bytes(), "length");
    assert_eq!(ones_complement(&datagram[14..34]), 0xffff, "checksum");
    assert_eq!(datagram[26..34], [remote.octets(), remote.octets()].concat());
    assert_eq!(datagram[36..42], [9789_u16, 216, 0].map(u16::to_be_bytes).concat());
    assert_eq!(datagram[42..50], [8, 0, 0, 0, 0, 0, 1, 0], "VXLAN, network 1");
    // Too large for one datagram: the device fragments it.
    assert_eq!(bench.change("from_guest", &echo(1500)).1.len(), 1500);

    // The same datagram, now received from `remote`, whose link has port 7.
    let mut datagram = datagram;
    datagram[..6].fill(0);
    datagram[30..34].copy_from_slice(&local.octets());
    datagram[24..26].fill(0);
    let sum = !ones_complement(&datagram[14..34]);
    datagram[24..26].copy_from_slice(&sum.to_be_bytes());
    bench.to.target = Target::Guest { mac: Some(B), namespace: Some(0) };
    let flow = Known { from: PortId(7), ..known(B) };
    assert!(bench.kernel.flows().install(&flow, &bench.from, &bench.to, &terms()));
    let host = (TC_ACT_UNSPEC, datagram.clone());
    assert_eq!(bench.change("from_underlay", &datagram), host, "of no link");
    let elsewhere = Underlay { device: LOOPBACK + 1, local, next_hop: None };
    let end = End { remote, port: WIRE_PORT };
    bench.kernel.set_peers(&[(end, Peer { underlay: Some(elsewhere), ..peer(7) })].into(), false).unwrap();
    assert_eq!(bench.change("from_underlay", &datagram), host, "of another device");
    bench.kernel.set_peers(&[(end, peer(7))].into(), false).unwrap();
    assert_eq!(bench.change("from_underlay", &datagram), (TC_ACT_REDIRECT, frame));
    // Every deviation sends the datagram to the host's network stack, unchanged.
    for (at, what) in [
        (14, "IP version"),
        (15, "congestion"),
        (20, "fragment"),
        (23, "protocol"),
        (25, "checksum"),
        (33, "another's"),
        (36, "port"),
        (42, "VXLAN flags"),
        (48, "network"),
        (49, "reserved"),
        (50, "destination"),
        (56, "source"),
        (62, "not IPv4"),
    ] {
        let mut datagram = datagram.clone();
        datagram[at] ^= 1;
        if (14..34).contains(&at) && at != 25 {
            datagram[24..26].fill(0);
            let sum = !ones_complement(&datagram[14..34]);
            datagram[24..26].copy_from_slice(&sum.to_be_bytes());
        }
        assert_eq!(bench.change("from_underlay", &datagram), (TC_ACT_UNSPEC, datagram.clone()), "{what}");
    }
    // Frames that were sent in one piece can be forwarded: IP options, fragments and any protocol.
    for (at, value) in [(64, 0x46), (70, 0x20), (73, 6), (73, 17)] {
        let mut datagram = datagram.clone();
        datagram[at] = value;
        let frame = datagram[50..].to_vec();
        assert_eq!(bench.change("from_underlay", &datagram), (TC_ACT_REDIRECT, frame), "byte {at}");
    }
    // A super-frame must be for a TCP socket of the guest.
    for protocol in [1, 6, 17] {
        datagram[73] = protocol;
        datagram[66..68].copy_from_slice(&186_u16.to_be_bytes());
        let after = bench.change_segmented("from_underlay", &datagram, 100);
        assert_eq!(after, (TC_ACT_UNSPEC, datagram.clone()));
    }
    for len in 34..84 {
        let cut = &datagram[..len];
        assert_eq!(bench.change("from_underlay", cut), (TC_ACT_UNSPEC, cut.to_vec()), "{len} bytes");
    }
}

#[test]
fn a_fragment_beyond_one_datagram_leaves_in_two() {
    let Some(mut bench) = Bench::new() else { return };
    let remote = Ipv4Addr::new(192, 0, 2, 2);
    bench.to.target = by_wire(remote, None);
    assert!(bench.install(&terms()));
    let fragment = |len: usize, flags_and_offset: u16| {
        let mut frame = frame(B, len);
        frame[14] = 0x45;
        frame[16..18].copy_from_slice(&((len - 14) as u16).to_be_bytes());
        frame[20..22].copy_from_slice(&flags_and_offset.to_be_bytes());
        frame[23] = 17;
        frame[34..].iter_mut().enumerate().for_each(|(at, byte)| *byte = at as u8);
        frame
    };
    // The second part is the result of the run: 96 bytes of payload.
    for (flags_and_offset, of_second) in [(0x2000, 0x2000 + 173), (185, 185 + 173)] {
        let frame = fragment(1514, flags_and_offset);
        let (verdict, second) = bench.change("from_guest", &frame);
        assert_eq!((verdict, second.len()), (TC_ACT_REDIRECT, 34 + 96));
        assert_eq!(second[16..18], 116_u16.to_be_bytes(), "length");
        assert_eq!(second[20..22], u16::to_be_bytes(of_second), "flags and offset");
        assert_eq!(ones_complement(&second[14..34]), 0xffff, "checksum");
        assert_eq!(second[34..], frame[1514 - 96..]);
        assert_eq!((&second[..14], second[23]), (&frame[..14], 17));
    }
    let odd_length = {
        let mut frame = fragment(1514, 0x2000);
        frame[17] ^= 1;
        frame
    };
    for (frame, what) in [
        (fragment(1514, 0), "not a fragment"),
        (fragment(1514, 0x6000), "must not be fragmented"),
        (fragment(1514, 0x2000 + 8100), "beyond the longest datagram"),
        (fragment(1513, 185), "no multiple of 8"),
        (fragment(1464, 0x2000), "fits"),
        (odd_length, "another length in the header"),
    ] {
        assert_eq!(bench.change("from_guest", &frame), (TC_ACT_REDIRECT, frame.clone()), "{what}");
    }
}

/// The sum of IP checksums (RFC 1071).
pub(super) fn ones_complement(bytes: &[u8]) -> u16 {
    let mut sum: u32 = bytes.chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

#[test]
fn what_vnetd_sends_by_the_wire_loses_its_tail() {
    let Some(bench) = Bench::new() else { return };
    let tail = WireTail { remote: 0xc000_0202, network: 7, underlay: 0, next_hop: 0 }.bytes();
    // Test runs refuse IP packets without a whole header.
    let frame = |len: usize| [&frame(B, 12)[..12], &[8, 6], &vec![1; len - HEADER_LEN]].concat();
    for len in [HEADER_LEN, 42, 86, 1514] {
        let sent = [&frame(len)[..], &tail].concat();
        assert_eq!(bench.change("core_to_wire", &sent), (TC_ACT_REDIRECT, frame(len)));
    }
    let short = frame(HEADER_LEN + tail.len() - 1);
    assert_eq!(bench.run("core_to_wire", &short), TC_ACT_SHOT, "it names no host");
}
