//! Tests that `fit()` (programs/to_wire.h) lowers `gso_size` of TCP super-frames to the path MTU.
//!
//! BPF_PROG_TEST_RUN sets `gso_size` but no `gso_type`, without which bpf_skb_adjust_room leaves `gso_size` unchanged. These tests
//! write super-frames to TAPs instead, in a network namespace of their own.

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::net::Ipv4Addr;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::time::{Duration, Instant};

use super::tests::{
    A, B, Bench, FROM, TC_ACT_REDIRECT, by_wire, guest, kernel, known, own_network, sender, terms,
};
use super::*;
use crate::frame::NetworkId;
use crate::wire::ethernet::HEADER_LEN;

/// Bytes of `struct virtio_net_hdr` at a TAP.
const VIRTIO: usize = 10;
/// VIRTIO_NET_HDR_F_NEEDS_CSUM, VIRTIO_NET_HDR_GSO_TCPV4 and VIRTIO_NET_HDR_GSO_TCPV6.
const NEEDS_CSUM: u8 = 1;
const TCP4: u8 = 1;
const TCP6: u8 = 4;
/// Bytes of a TCP header with a timestamp.
const TCP_LEN: usize = 32;
const TAG_LEN: usize = 4;
/// Longest IP packet of a guest that fits the path (`by_wire`).
const ROOM: u16 = 1450;
const REMOTE: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 2);

/// A device that exists until the file is closed.
pub(super) struct Tap {
    file: File,
    pub(super) name: (String, u32),
}

impl Tap {
    pub(super) fn open(name: &str) -> Tap {
        let mut tun = File::options();
        let file = tun.read(true).write(true).custom_flags(libc::O_NONBLOCK).open("/dev/net/tun").unwrap();
        let request = |value| {
            let mut request = libc::ifreq { ifr_name: [0; libc::IFNAMSIZ], ifr_ifru: value };
            for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
                *to = from as libc::c_char;
            }
            request
        };
        let flags = (libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR) as i16;
        let mut attach = request(libc::__c_anonymous_ifr_ifru { ifru_flags: flags });
        // SAFETY: TUNSETIFF reads and writes one `ifreq`: `attach`, which lives across the call.
        assert_eq!(unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF as _, &raw mut attach) }, 0);
        let offloads = libc::TUN_F_CSUM | libc::TUN_F_TSO4 | libc::TUN_F_TSO6;
        // SAFETY: TUNSETOFFLOAD takes its argument by value.
        let set = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETOFFLOAD as _, u64::from(offloads)) };
        assert_eq!(set, 0);
        let socket = std::net::UdpSocket::bind("0.0.0.0:0").unwrap();
        let up = request(libc::__c_anonymous_ifr_ifru { ifru_flags: libc::IFF_UP as i16 });
        // SAFETY: SIOCSIFFLAGS reads one `ifreq`: `up`, which lives across the call.
        assert_eq!(unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS as _, &raw const up) }, 0);
        let mut query = request(libc::__c_anonymous_ifr_ifru { ifru_ifindex: 0 });
        // SAFETY: SIOCGIFINDEX reads and writes one `ifreq`: `query`, which lives across the call.
        assert_eq!(unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFINDEX as _, &raw mut query) }, 0);
        // SAFETY: the kernel has filled in this member.
        let index = unsafe { query.ifr_ifru.ifru_ifindex };
        Tap { file, name: (name.into(), index as u32) }
    }

    /// Lets the device receive a frame, behind a virtio-net header. False: the kernel refuses the header.
    pub(super) fn write(&self, frame: &[u8]) -> bool {
        (&self.file).write(frame).is_ok()
    }

    /// The next frame that leaves by the device: size of its segments, and its bytes.
    pub(super) fn next(&self) -> (u16, Vec<u8>) {
        let mut room = vec![0; 1 << 17];
        let end = Instant::now() + Duration::from_secs(10);
        loop {
            match (&self.file).read(&mut room) {
                Ok(len) => return (u16::from_ne_bytes([room[4], room[5]]), room[VIRTIO..len].to_vec()),
                Err(error) if error.kind() == ErrorKind::WouldBlock && Instant::now() < end => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                Err(error) => panic!("no frame left: {error}"),
            }
        }
    }
}

/// A TCP frame from A to B with `payload` bytes, and the length of its IP header.
fn segment(is_v6: bool, payload: usize) -> (Vec<u8>, usize) {
    let len = TCP_LEN + payload;
    let ip = if is_v6 {
        let mut ip = vec![0x60, 0, 0, 0, 0, 0, 6, 64];
        ip[4..6].copy_from_slice(&(len as u16).to_be_bytes());
        for host in [1, 2] {
            ip.extend([0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, host]);
        }
        ip
    } else {
        let mut ip = vec![0x45, 0, 0, 0, 0, 1, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2];
        ip[2..4].copy_from_slice(&((20 + len) as u16).to_be_bytes());
        ip
    };
    let mut tcp = vec![0x80, 0, 0x14, 0x51, 0, 0, 0, 1, 0, 0, 0, 1, (TCP_LEN as u8 / 4) << 4, 0x10, 1, 0];
    tcp.extend([0, 0, 0, 0, 1, 1, 8, 10, 0, 0, 0, 1, 0, 0, 0, 1]);
    let kind: [u8; 2] = if is_v6 { [0x86, 0xdd] } else { [0x08, 0] };
    let payload: Vec<u8> = (0..payload).map(|at| (at % 251) as u8).collect();
    (([&B.0[..], &A.0, &kind, &ip, &tcp, &payload]).concat(), ip.len())
}

#[test]
fn segments_of_the_wires_device_fit_the_path() {
    let Some(kernel) = kernel() else { return };
    if !own_network() {
        return;
    }
    let [host, core, wire] = ["guest", "core", "wire"].map(Tap::open);
    kernel.set_generation(7);
    kernel.tick(1, u64::MAX);
    let device = GuestDevice { host: host.name.clone(), tap: core.name.clone(), mac: A, netkit: false };
    let origin = Origin { port: FROM, network: NetworkId::DEFAULT };
    let _attached = kernel.attach(&device, origin).unwrap();
    let to = Destination { device: wire.name.1, mtu: 15_000, target: by_wire(REMOTE, None), ..guest() };
    assert!(kernel.flows().install(&known(B), &sender(), &to, &terms()));
    let sizes = [
        (false, 0, 1300),
        (false, 0, 1398),
        (false, 0, 1399),
        (false, 0, 8948),
        (true, 0, 1300),
        (true, 0, 8928),
        (false, TAG_LEN, 1394),
        (false, TAG_LEN, 1398),
        (true, TAG_LEN, 8928),
    ];
    for (is_v6, tag_len, size) in sizes {
        let (mut frame, ip_len) = segment(is_v6, 30_000);
        if tag_len > 0 {
            frame.splice(12..12, [0x81, 0, 0, 5]);
        }
        let headers = (tag_len + ip_len + TCP_LEN) as u16;
        let mut packet = vec![NEEDS_CSUM, if is_v6 { TCP6 } else { TCP4 }];
        for field in [headers + HEADER_LEN as u16, size, (HEADER_LEN + tag_len + ip_len) as u16, 16] {
            packet.extend(field.to_ne_bytes());
        }
        packet.extend(&frame);
        assert_eq!((&host.file).write(&packet).unwrap(), packet.len());
        let (now, left) = wire.next();
        assert_eq!(now, size.min(ROOM - headers), "IPv6: {is_v6}, tag: {tag_len}, segments of {size} bytes");
        assert!(left == frame, "the frame's bytes are the same");
    }
    kernel.flows().count();
    assert_eq!(to.stats.out_frames.get(), sizes.len() as u64);
    let more = (&core.file).read(&mut [0; 2000]).unwrap_err();
    assert_eq!(more.kind(), ErrorKind::WouldBlock, "nothing came up");
}

/// Super-frames that are not TCP, or have no `gso_type`, are forwarded unchanged.
#[test]
fn segments_that_the_kernel_does_not_lower_leave_unchanged() {
    let Some(mut bench) = Bench::new() else { return };
    bench.to.target = by_wire(REMOTE, None);
    assert!(bench.install(&terms()));
    let (frame, _) = segment(false, 2000);
    let udp = {
        let mut frame = frame.clone();
        frame[23] = 17;
        frame
    };
    for frame in [frame, udp] {
        assert_eq!(bench.change_segmented("from_guest", &frame, 8948), (TC_ACT_REDIRECT, frame));
    }
    bench.kernel.flows().count();
    assert_eq!(bench.to.stats.out_frames.get(), 2);
}
