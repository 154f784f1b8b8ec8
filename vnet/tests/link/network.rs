//! The bridge in a network namespace in which devices, addresses and the path MTU change.

use std::fs::File;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, UdpSocket};
use std::os::fd::{AsRawFd, FromRawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use vnet::frame::{BATCH_MAX, DropSink, PortId};
use vnet::link::{Bridge, Encapsulation, HOPS_UNKNOWN, Link, LinkState, Peers, ReassemblyBudget};
use vnet::source::{BatchSlot, Source, receive};
use vnet::stats::DropReason;

use super::host::*;

/// A network namespace for this thread only, with a loopback device. `None` without the privilege.
struct Network(UdpSocket);

impl Network {
    fn new() -> Option<Network> {
        // SAFETY: the call passes no pointers. The thread belongs to this test, so no other test's namespace changes.
        if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
            eprintln!("not run: a network namespace needs CAP_SYS_ADMIN");
            return None;
        }
        let network = Network(UdpSocket::bind("0.0.0.0:0").unwrap());
        network.set_up("lo");
        Some(network)
    }

    /// A TAP device with an address in a /24 network without other hosts. It exists until the file is closed.
    fn tap(&self, device: &str, address: Ipv4Addr, mtu: i32) -> File {
        let tun = File::options().read(true).write(true).open("/dev/net/tun").unwrap();
        let flags = (libc::IFF_TAP | libc::IFF_NO_PI) as i16;
        control(&tun, libc::TUNSETIFF, device, libc::__c_anonymous_ifr_ifru { ifru_flags: flags });
        self.set_address(device, libc::SIOCSIFADDR, address);
        self.set_address(device, libc::SIOCSIFNETMASK, Ipv4Addr::new(255, 255, 255, 0));
        self.set_mtu(device, mtu);
        self.set_up(device);
        tun
    }

    fn set_up(&self, device: &str) {
        let value = libc::__c_anonymous_ifr_ifru { ifru_flags: libc::IFF_UP as i16 };
        control(&self.0, libc::SIOCSIFFLAGS, device, value);
    }

    fn set_mtu(&self, device: &str, mtu: i32) {
        control(&self.0, libc::SIOCSIFMTU, device, libc::__c_anonymous_ifr_ifru { ifru_mtu: mtu });
    }

    /// Sets a device's reported speed in Mbit/s (`struct ethtool_cmd`, linux/ethtool.h).
    fn set_speed(&self, device: &str, mbps: u16) {
        const ETHTOOL_GSET: u32 = 1;
        const ETHTOOL_SSET: u32 = 2;
        let mut command = [0u32; 11];
        for request in [ETHTOOL_GSET, ETHTOOL_SSET] {
            command[0] = request;
            if request == ETHTOOL_SSET {
                command[3] = command[3] & 0xffff_0000 | u32::from(mbps);
                command[7] = 0;
            }
            let ifru_data = (&raw mut command).cast();
            control(&self.0, libc::SIOCETHTOOL as _, device, libc::__c_anonymous_ifr_ifru { ifru_data });
        }
    }

    fn set_address(&self, device: &str, request: libc::Ioctl, address: Ipv4Addr) {
        let mut sa_data = [0; 14];
        for (to, from) in sa_data[2..].iter_mut().zip(address.octets()) {
            *to = from as libc::c_char;
        }
        let ifru_addr = libc::sockaddr { sa_family: libc::AF_INET as libc::sa_family_t, sa_data };
        control(&self.0, request, device, libc::__c_anonymous_ifr_ifru { ifru_addr });
    }

    /// A socket that receives every IPv4 packet on all devices from now on.
    fn capture(&self) -> UdpSocket {
        let protocol = (libc::ETH_P_IP as u16).to_be();
        // SAFETY: the call passes no pointers.
        let fd = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_DGRAM, i32::from(protocol)) };
        assert!(fd >= 0, "{}", std::io::Error::last_os_error());
        // SAFETY: the descriptor is new and owned here. Only `recv` is called, which every kind of socket supports.
        let socket = unsafe { UdpSocket::from_raw_fd(fd) };
        socket.set_nonblocking(true).unwrap();
        socket
    }
}

/// Runs an ioctl on a device.
fn control(to: &impl AsRawFd, request: libc::Ioctl, device: &str, value: libc::__c_anonymous_ifr_ifru) {
    let mut ifr_name = [0; libc::IFNAMSIZ];
    for (to, from) in ifr_name[..libc::IFNAMSIZ - 1].iter_mut().zip(device.bytes()) {
        *to = from as libc::c_char;
    }
    let mut argument = libc::ifreq { ifr_name, ifr_ifru: value };
    // SAFETY: all requests used here read or write one `ifreq`, to which the pointer refers.
    let result = unsafe { libc::ioctl(to.as_raw_fd(), request, &raw mut argument) };
    assert_eq!(result, 0, "{device}: {}", std::io::Error::last_os_error());
}

/// Sets an integer option of the bridge's socket.
fn set_option(host: &Host, level: libc::c_int, option: libc::c_int, value: libc::c_int) {
    let len = size_of_val(&value) as libc::socklen_t;
    let fd = host.bridge.rx[0].fd().as_raw_fd();
    // SAFETY: `value` is readable for the stated `len` bytes.
    let result = unsafe { libc::setsockopt(fd, level, option, (&raw const value).cast(), len) };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
}

/// Size of the bridge's receive buffer in bytes (the kernel reports twice the size, socket(7)).
fn receive_buffer(host: &Host) -> usize {
    let (mut value, mut len): (libc::c_int, _) = (0, size_of::<libc::c_int>() as libc::socklen_t);
    let fd = host.bridge.rx[0].fd().as_raw_fd();
    // SAFETY: `value` is writable for the stated `len` bytes.
    let result = unsafe {
        libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_RCVBUF, (&raw mut value).cast(), &raw mut len)
    };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
    value as usize / 2
}

/// The UDP packets captured so far: length, and whether the packet carries DF.
fn captured(capture: &UdpSocket) -> Vec<(usize, bool)> {
    let mut packet = vec![0; 70_000];
    let mut packets = vec![];
    while let Ok(len) = capture.recv(&mut packet) {
        if packet[9] == libc::IPPROTO_UDP as u8 {
            packets.push((len, packet[6] & 0x40 != 0));
        }
    }
    packets
}

#[test]
fn the_kernels_choice_of_a_port_is_free_for_sealed_links_too() {
    let Some(_network) = Network::new() else { return };
    std::fs::write("/proc/sys/net/ipv4/ip_local_port_range", "40000 40001").unwrap();
    let _taken = TcpListener::bind("127.0.0.1:40000").unwrap();
    // Both UDP ports are free: without a check of TCP the kernel chooses either.
    for _ in 0..16 {
        let budget = Arc::new(ReassemblyBudget::new(ReassemblyBudget::HOST));
        let any = "127.0.0.1:0".parse().unwrap();
        let bridges = Bridge::bind_group(any, 1, 2, &Arc::default(), &budget).unwrap();
        assert_eq!(bridges[0].local_addr(), SocketAddr::from(([127, 0, 0, 1], 40_001)));
    }
}

#[test]
fn native_packets_carry_dont_fragment() {
    let Some(network) = Network::new() else { return };
    network.set_mtu("lo", 1500);
    for listen in ["127.0.0.1:0", "[::]:0"] {
        let remote = "127.0.0.1:9".parse().unwrap();
        let mut host = Host::new(bridge(listen), options(remote, Encapsulation::Native, None));
        let bare = Host::new(bridge(listen), options(remote, Encapsulation::Vnet, None));
        let capture = network.capture();
        host.send(&[frame(64, 1), frame(20_000, 2)]);
        let packets = captured(&capture);
        assert!(packets.iter().map(|(len, _)| len).sum::<usize>() > 20_000, "{packets:?}");
        assert!(packets.iter().all(|(_, dont_fragment)| *dont_fragment), "{packets:?}");
        // IP fragments larger frames of the classic encapsulation, which leave from the same socket.
        host.link = bare.link;
        host.send(&[frame(9000, 3)]);
        let packets = captured(&capture);
        assert!(packets.len() >= 7 && packets.iter().all(|(len, df)| *len <= 1500 && !df), "{packets:?}");
    }
}

#[test]
fn a_smaller_path_mtu_is_detected_and_obeyed() {
    let Some(network) = Network::new() else { return };
    network.set_mtu("lo", 9000);
    for ip in ["127.0.0.1:0", "[::1]:0"] {
        let [mut a, mut b] = Host::pair(ip, Encapsulation::Native, None);
        let frames: Vec<Got> = (0..20).map(|n| frame(if n % 4 == 0 { 100 } else { 20_000 }, n)).collect();
        a.send(&frames);
        assert_eq!(b.receive(20), arrived(&frames));
        a.ask_routes(1);
        assert_eq!(a.link.path_mtu(), 9000);
        // The path MTU shrinks: datagrams encoded for the old one are encoded again, and no frame is lost.
        network.set_mtu("lo", 1500);
        a.send(&frames);
        assert_eq!(b.receive(20), arrived(&frames));
        // The sender's request triggers a query at once, before the second is over.
        a.ask_routes(2);
        assert_eq!(a.link.path_mtu(), 1500);
        network.set_mtu("lo", 9000);
        a.ask_routes(10_000);
        assert_eq!(a.link.path_mtu(), 9000);
        assert_eq!((a.link.stats().drops_total(), b.link.stats().drops_total()), (0, 0));
        assert_eq!(a.link.stats().out_frames.get(), 40);
        assert_eq!(a.link.stats().out_datagrams.get(), b.link.stats().in_datagrams.get());

        // IP fragments frames of the classic encapsulation instead.
        let [mut a, mut b] = Host::pair(ip, Encapsulation::Vnet, None);
        let frames: Vec<Got> = (0..20).map(|n| frame([1400, 1400, 9014, 65_000][n % 4], n as u64)).collect();
        a.ask_routes(1);
        for chunk in frames.chunks(4) {
            a.send(chunk);
            let bare: Vec<Got> =
                chunk.iter().map(|frame| Got { hops: HOPS_UNKNOWN, ..frame.clone() }).collect();
            assert_eq!(b.receive(4), bare);
        }
        assert_eq!(a.link.stats().out_frames.get(), 20);
        // IP also fragments the datagrams of a message that was segmented for the old path MTU.
        network.set_mtu("lo", 1500);
        let frames: Vec<Got> = (0..20).map(|n| frame(5000, n)).collect();
        for _ in 0..2 {
            a.send(&frames);
            let got: Vec<Vec<u8>> = b.receive(20).into_iter().map(|got| got.bytes).collect();
            assert_eq!(got, frames.iter().map(|frame| frame.bytes.clone()).collect::<Vec<_>>());
        }
        assert_eq!((a.link.stats().out_frames.get(), a.link.stats().drops_total()), (60, 0));
        // The sender's request triggers a query at once here, too.
        assert_eq!(a.link.path_mtu(), 9000);
        a.ask_routes(2);
        assert_eq!(a.link.path_mtu(), 1500);
        network.set_mtu("lo", 9000);
    }
    // No route leads out of this namespace.
    let nowhere = options("192.0.2.1:9000".parse().unwrap(), Encapsulation::Native, None);
    let mut host = Host::new(bridge("0.0.0.0:0"), nowhere);
    host.send(&[frame(64, 1), frame(20_000, 2)]);
    assert_eq!(host.link.stats().drops(DropReason::SendFailed), 2);
    assert_eq!(host.link.stats().out_frames.get(), 0);
    assert!(matches!(host.link.state(), LinkState::Unreachable(_)));
}

#[test]
fn routes_are_looked_up_from_any_local_address() {
    let Some(network) = Network::new() else { return };
    let _taps = [
        network.tap("t1", Ipv4Addr::new(10, 1, 0, 1), 1401),
        network.tap("t2", Ipv4Addr::new(10, 2, 0, 1), 1402),
    ];
    for listen in ["0.0.0.0:0", "[::]:0"] {
        let remotes = ["127.0.0.1:9", "10.1.0.2:9", "10.2.0.2:9", "[::1]:9"];
        let links = remotes.map(|remote| {
            Link::new(
                options(remote.parse().unwrap(), Encapsulation::Native, None),
                PortId(7),
                Arc::default(),
            )
        });
        let peers = Peers::build(&links);
        let mut host = Host::new(bridge(listen), links[0].options().clone());
        let routed = |index: usize| !matches!(links[index].state(), LinkState::Unreachable(_));
        host.paths.look_at_all(peers.links(), 1000);
        assert_eq!([links[1].path_mtu(), links[2].path_mtu()], [1401, 1402]);
        assert_eq!([routed(0), routed(1), routed(2), routed(3)], [true, true, true, listen == "[::]:0"]);
        // The source address of the last lookup is removed.
        network.set_address("t2", libc::SIOCSIFADDR, Ipv4Addr::UNSPECIFIED);
        host.paths.look_at_all(peers.links(), 2000);
        assert_eq!([routed(0), routed(1), routed(2), routed(3)], [true, true, false, listen == "[::]:0"]);
        network.set_address("t2", libc::SIOCSIFADDR, Ipv4Addr::new(10, 2, 0, 1));
        network.set_address("t2", libc::SIOCSIFNETMASK, Ipv4Addr::new(255, 255, 255, 0));
        host.paths.look_at_all(peers.links(), 3000);
        assert!(routed(1) && routed(2));
    }
    // A bound socket looks up routes from its own address.
    let remote = "10.2.0.2:9".parse().unwrap();
    let mut host = Host::new(bridge("10.1.0.1:0"), options(remote, Encapsulation::Native, None));
    network.set_address("t1", libc::SIOCSIFADDR, Ipv4Addr::UNSPECIFIED);
    for now_ms in [1000, 2000] {
        host.ask_routes(now_ms);
        assert!(matches!(host.link.state(), LinkState::Unreachable(_)));
    }
}

#[test]
fn a_full_send_buffer_drops_without_waiting() {
    const ROUNDS: u32 = 200;
    let Some(network) = Network::new() else { return };
    // No host answers ARP in that network, so packets stay in the socket's send buffer.
    let _tap = network.tap("t1", Ipv4Addr::new(10, 1, 0, 1), 1500);
    let remote = "10.1.0.2:9".parse().unwrap();
    let mut host = Host::new(bridge("0.0.0.0:0"), options(remote, Encapsulation::Native, None));
    set_option(&host, libc::SOL_SOCKET, libc::SO_SNDBUF, 4096);
    let frames: Vec<Got> = (0..20).map(|n| frame(2000, n)).collect();
    let start = Instant::now();
    for _ in 0..ROUNDS {
        host.send(&frames);
    }
    let (stats, taken) = (host.link.stats(), start.elapsed());
    assert!(stats.drops(DropReason::NoBuffer) > 0);
    assert_eq!(stats.out_frames.get() + stats.drops(DropReason::NoBuffer), 20 * u64::from(ROUNDS));
    assert!(taken < ROUNDS * Duration::from_millis(1) / 2, "{ROUNDS} full buffers took {taken:?}");
}

#[test]
fn socket_errors_lose_no_datagram() {
    let [mut a, mut b] = Host::pair("127.0.0.1:0", Encapsulation::Native, None);
    set_option(&b, libc::SOL_IP, libc::IP_RECVERR, 1);
    let closed = UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let peer = b.link.clone();
    b.link = Link::new(options(closed, Encapsulation::Native, None), PortId(7), Arc::default());
    b.send(&[frame(64, 1)]);
    b.link = peer;
    a.send(&[frame(64, 2)]);
    assert_eq!(b.receive_once().0, arrived(&[frame(64, 2)]));
}

/// A burst with more frames than a batch: datagrams that arrive before the burst is processed keep the receiver awake.
#[test]
fn an_unfinished_burst_does_not_know_that_the_socket_is_empty() {
    let (mut host, peer) = raw_peer(Encapsulation::Vnet, 1500);
    // All of one size, so UDP_GRO may coalesce them into few messages. A batch of two frames leaves most of them for later fills.
    for _ in 0..20 {
        peer.send(&[0; 100]).unwrap();
    }
    let (mut slot, mut drops) = (BatchSlot::new(2), DropSink::new());
    host.bridge.peers.store(host.peers.clone());
    let receiver = &mut host.bridge.rx[0];
    let mut frames = receive(receiver, &mut slot, &mut drops, 1).len();
    assert_eq!(frames, 2);
    peer.send(&[0; 100]).unwrap();
    while frames < 20 {
        assert!(!receiver.rest(), "more frames wait after {frames}");
        frames += receive(receiver, &mut slot, &mut drops, 1).len();
    }
    assert!(!receiver.rest(), "the last datagram waits in the socket");
    assert_eq!(receive(receiver, &mut slot, &mut drops, 1).len(), 1);
    while !receiver.rest() {
        assert!(receive(receiver, &mut slot, &mut drops, 1).is_empty());
    }
}

/// A short burst shows that the socket is empty; a full burst does not.
#[test]
fn a_short_burst_means_an_empty_socket() {
    let (mut host, peer) = raw_peer(Encapsulation::Vnet, 1500);
    // Of growing sizes, so UDP_GRO does not coalesce them.
    for len in 100..140 {
        peer.send(&vec![0; len]).unwrap();
    }
    let (mut slot, mut drops) = (BatchSlot::new(BATCH_MAX), DropSink::new());
    host.bridge.peers.store(host.peers.clone());
    let mut receive = || receive(&mut host.bridge.rx[0], &mut slot, &mut drops, 1).taken;
    let first = receive();
    assert_eq!((first.units, first.drained), (32, false));
    let second = receive();
    assert_eq!((second.units, second.drained), (8, true));
    let third = receive();
    assert_eq!((third.units, third.drained), (0, true));
}

/// Socket buffers are sized for the speed of the path's device, or of the fastest one of several paths.
#[test]
fn buffers_are_sized_for_the_fastest_device() {
    let Some(network) = Network::new() else { return };
    let _taps = [("slow", 1, 1000), ("fast", 2, 25_000)].map(|(device, net, mbps)| {
        let tap = network.tap(device, Ipv4Addr::new(10, 9, net, 1), 1500);
        network.set_speed(device, mbps);
        tap
    });
    let native = |remote: &str| options(remote.parse().unwrap(), Encapsulation::Native, None);
    let mut host = Host::new(bridge("[::]:0"), native("10.9.1.2:9000"));
    assert_eq!(receive_buffer(&host), 12_500_000, "10 ms of 10 Gbit/s while the speed is unknown");
    host.ask_routes(20);
    assert_eq!(receive_buffer(&host), 4 << 20, "the lower bound");
    let fast = Link::new(native("10.9.2.2:9000"), PortId(7), Arc::default());
    host.peers = Arc::new(Peers::build(&[host.link.clone(), fast]));
    host.ask_routes(40);
    assert_eq!(receive_buffer(&host), 31_250_000);
    for now_ms in (1100..3000).step_by(20) {
        host.ask_routes(now_ms);
    }
    assert_eq!(receive_buffer(&host), 31_250_000, "the slower device does not shrink it again");
}
