//! Nodes at the two ends of a cable (a veth pair), in a network namespace of the test's thread.

use std::process::Command;

use rustix::thread::{CapabilitySet, capabilities, set_capabilities};

use super::sealed_tests::Daemon as Sealing;
use super::tests::{BOTH, Daemon, LEN, Two, unique};
use super::*;
use crate::ether::address::{mac_of, station};
use crate::meeting::Reach;
use crate::proto::{Peer, Status};
use crate::{Node, Region};

const ENDS: [&str; 2] = ["ether://near:7000", "ether://far:7000"];

fn ip(words: &str) {
    assert!(Command::new("ip").args(words.split(' ')).status().unwrap().success(), "ip {words}");
}

/// Gives the calling thread its own network namespace with a cable. Returns false without CAP_SYS_ADMIN.
fn cable() -> bool {
    // SAFETY: the call passes no pointers. The thread belongs to one test, so no other test's namespace changes.
    if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
        assert!(!rustix::process::geteuid().is_root(), "root may have a network namespace");
        eprintln!("not run: a network namespace needs CAP_SYS_ADMIN");
        return false;
    }
    ip("link add near type veth peer name far");
    ip("link set near up");
    ip("link set far up");
    true
}

fn open(bind: &str, meeting: Option<String>, seal: Option<&str>) -> Result<Node, Error> {
    let (bind, seal) = (bind.parse().unwrap(), seal.map(Into::into));
    Node::open(&Options { bind, meeting, seal, ..Options::default() })
}

/// The one line that says why a node cannot be opened.
fn refusal(bind: &str) -> String {
    let line = open(bind, None, None).err().unwrap().to_string();
    assert!(!line.contains('\n'), "{line}");
    line
}

/// Number of packets that the device has refused.
fn refused(node: &Node) -> u64 {
    match &node.process().shared.inner.lock().wire {
        Wire::Ethernet(socket) => socket.refused,
        Wire::Udp(_) => panic!("the node is at a UDP address"),
    }
}

#[test]
fn packets_cross_the_cable_in_frames() {
    if !cable() {
        return;
    }
    for mtu in ["1500", "586", "9000"] {
        ENDS.iter().for_each(|end| ip(&format!("link set {} mtu {mtu}", &end[8..end.len() - 5])));
        let two = Two::at(ENDS, None);
        for (seed, len) in [0, 1, 31, 1500, 16_384, 16_385, 65_507, LEN].into_iter().enumerate() {
            assert_eq!(two.message(len, seed as u8), Status::Success);
        }
        [8, 16_385, LEN].into_iter().for_each(|len| two.to_and_fro(len));
        for from in [0, 1] {
            let (node, counters) = (&two.nodes[from], two.nodes[from].process().counters());
            assert_eq!(two.ends[from].attachment(two.peers[1 - from]), Attachment::Ethernet);
            assert_eq!((counters.malformed, counters.unknown, refused(node)), (0, 0, 0), "MTU {mtu}");
            assert_eq!(mac_of(node.address()).map(|mac| station(mac, 7000)), Some(node.address()));
        }
        assert!(two.nodes[0].process().counters().packets_out > LEN as u64 * 2 / 9000);
        assert_eq!(Attachment::Ethernet.to_string(), "ethernet");
    }
}

#[test]
fn nodes_of_one_host_take_a_ring_and_return_to_frames() {
    if !cable() {
        return;
    }
    let name = unique();
    let daemon = Daemon::start(&name);
    let two = Two::at(ENDS, Some(&name));
    assert!(two.nodes.iter().all(|node| !node.process().shared.inner.lock().engine.config().has_fragments));
    two.until(Attachment::SameHost);
    assert_eq!(two.message(LEN, 3), Status::Success);
    // Packets that were made for the ring take the cable.
    two.outlives(daemon);
    two.until(Attachment::Ethernet);
    assert_eq!(two.message(LEN, 9), Status::Success);
    assert_eq!([refused(&two.nodes[0]), refused(&two.nodes[1])], [0, 0], "each packet fits a frame");
}

#[test]
fn what_is_no_ethernet_device_is_refused_with_one_line() {
    if !cable() {
        return;
    }
    assert!(refusal("ether://absent:0").contains("device absent: there is no such device"));
    assert!(refusal("ether://lo:0").contains("device lo: it is no Ethernet device"));
    ip("link set near mtu 585");
    assert!(refusal("ether://near:0").contains("its MTU is 585, and must be at least 586"));
    let first = open("ether://far:7000", None, None).unwrap();
    assert!(refusal("ether://far:7000").contains("another process has port 7000 there"));
    let ports = ["ether://far:0"; 3].map(|any| open(any, None, None).unwrap().address().port());
    assert!(ports.iter().all(|port| *port >= 49_152), "{ports:?}");
    drop(first);
    open("ether://far:7000", None, None).unwrap();
    let set = capabilities(None).unwrap();
    let mut without = set;
    without.effective -= CapabilitySet::NET_RAW;
    set_capabilities(None, without).unwrap();
    assert!(refusal("ether://far:7000").contains("packet sockets need CAP_NET_RAW"));
    set_capabilities(None, set).unwrap();
}

#[test]
fn peers_of_another_wire_are_refused_at_once() {
    if !cable() {
        return;
    }
    let node = open("ether://near:7000", None, None).unwrap();
    let (udp, end) = (open("127.0.0.1:0", None, None).unwrap(), node.endpoint(None).unwrap());
    let post = |end: &crate::Endpoint, name: &str| {
        let region = Region::new(end, 8, BOTH).unwrap();
        let done = end.send(resolve(name).unwrap(), region.span(0, 8).unwrap(), None, 0);
        done.err().map_or(String::new(), |error| error.to_string())
    };
    let own = name_of(Peer { address: station(mac_of(node.address()).unwrap(), 9), endpoint: 0 });
    assert!(post(&end, "127.0.0.1:9/0").contains("reaches only names of the kind ether://MAC:PORT"));
    assert!(post(&end, &own).contains("at the same Ethernet device"));
    assert!(post(&udp.endpoint(None).unwrap(), &own).contains("one at a UDP address none of them"));
    assert_eq!(post(&end, "ether://02-00-00-00-00-01:9/0"), "");
}

/// Sends frames with any bytes from an end of the cable.
struct Forger(std::os::fd::OwnedFd, i32);

impl Forger {
    fn new(device: &str) -> Self {
        use std::os::fd::FromRawFd;
        // SAFETY: the call takes no pointers.
        let fd = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW, 0) };
        // SAFETY: the descriptor was just opened, and belongs to nobody else.
        let socket = unsafe { std::os::fd::OwnedFd::from_raw_fd(fd) };
        let index = rustix::net::netdevice::name_to_index(&socket, device).unwrap();
        Self(socket, index as i32)
    }

    fn send(&self, frame: &[u8]) {
        use std::os::fd::AsRawFd;
        // SAFETY: a plain C structure, for which zero bytes are valid.
        let mut name = unsafe { std::mem::zeroed::<libc::sockaddr_ll>() };
        (name.sll_family, name.sll_ifindex) = (libc::AF_PACKET as u16, self.1);
        let (address, len) = (std::ptr::from_ref(&name).cast(), size_of_val(&name) as u32);
        // SAFETY: the kernel reads the frame and `len` bytes of the name, both of which outlive the call.
        let sent =
            unsafe { libc::sendto(self.0.as_raw_fd(), frame.as_ptr().cast(), frame.len(), 0, address, len) };
        assert_eq!(sent, frame.len() as isize);
    }
}

#[test]
fn forged_frames_are_counted_and_change_nothing() {
    if !cable() {
        return;
    }
    let two = Two::at(ENDS, None);
    assert_eq!(two.message(8, 1), Status::Success);
    let forger = Forger::new("far");
    let [near, far] = [0, 1].map(|node| mac_of(two.nodes[node].address()).unwrap());
    let frame = |to: &[u8; 6], from: &[u8; 6], bytes: &[u8]| {
        let mut frame = [&to[..], from, &[0x88, 0xb5], bytes].concat();
        frame.resize(frame.len().max(60), 0);
        frame
    };
    let before = two.nodes[0].process().counters();
    // What the filter rejects: a group, another port, a control frame, a sealed packet.
    let hello = [&b"vrde"[..], &7000_u16.to_be_bytes(), &9_u16.to_be_bytes(), &[0, 34], &[0x10; 34]].concat();
    let (mut other, mut control, mut sealed) = (hello.clone(), hello.clone(), hello.clone());
    (other[5], control[3], sealed[10]) = (0, b'm', 0x20);
    forger.send(&frame(&[0xff; 6], &far, &hello));
    forger.send(&frame(&[2, 9, 9, 9, 9, 9], &far, &hello));
    [other, control, sealed].iter().for_each(|bytes| forger.send(&frame(&near, &far, bytes)));
    // What the node rejects: a length beyond the frame, no packet, port 0, a source that no station can have, noise in place of a packet.
    let mut malformed = [hello.clone(), hello.clone(), hello.clone()];
    malformed[0][8..10].fill(0xff);
    malformed[1][8..10].fill(0);
    malformed[2][6..8].fill(0);
    malformed.iter().for_each(|bytes| forger.send(&frame(&near, &far, bytes)));
    forger.send(&frame(&near, &[3, 0, 0, 0, 0, 1], &hello));
    let noise = [&hello[..8], &[0, 9], &[0x1f; 9]].concat();
    forger.send(&frame(&near, &far, &noise));
    let begin = Instant::now();
    while two.nodes[0].process().counters().malformed < before.malformed + 5 {
        assert!(begin.elapsed() < Duration::from_secs(60), "{:?}", two.nodes[0].process().counters());
        two.ends[0].poll();
    }
    assert_eq!(two.message(LEN, 2), Status::Success);
    let after = two.nodes[0].process().counters();
    assert_eq!((after.malformed - before.malformed, after.failed_channels), (5, 0));
}

#[test]
fn no_frame_leaves_while_a_link_of_the_host_is_sealed() {
    if !cable() {
        return;
    }
    let start = |reach| {
        let name = unique();
        (Sealing::start(&name, reach), name)
    };
    let (_sealed, sealed) = start(Reach::SomeSealed);
    let error = open(ENDS[0], Some(sealed.clone()), None).err().unwrap();
    assert!(matches!(error, Error::NotSealed(_)));
    assert!(error.to_string().contains("Ethernet device near: a link of this host is sealed"), "{error}");
    open(ENDS[0], Some(sealed), Some("off")).unwrap();
    let (_older, older) = start(Reach::NotYet);
    let error = open(ENDS[0], Some(older), None).err().unwrap();
    assert!(error.to_string().contains("does not say that no link is sealed"), "{error}");
    let (_clear, clear) = start(Reach::AllClear);
    let two = Two::at(ENDS, Some(&clear));
    assert_eq!(two.message(LEN, 1), Status::Success);
    let engine = Options {
        bind: ENDS[0].parse().unwrap(),
        meeting: Some(clear),
        attachment: Some("daemon".into()),
        ..Options::default()
    };
    assert!(Node::open(&engine).err().unwrap().to_string().contains("it has no raw Ethernet"));
}
