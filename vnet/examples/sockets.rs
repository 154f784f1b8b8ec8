//! Super-frames over plain UDP sockets, without an overlay: the kernel's share of the cost of a link's datagrams. `lab/lab bench
//! small` compares it with vnetd.
//!
//! Like a link, the sender leaves segmentation to the kernel (`UDP_SEGMENT`): a datagram is a header of vnet's length and a slice
//! of the frame; the frames cover as much memory as a guest's ring. The receiver takes coalesced datagrams (`UDP_GRO`) and
//! discards them.
//!
//! Usage: `sockets take ADDRESS:PORT --mtu BYTES --seconds S`, and then `sockets send` with the same arguments. S seconds after
//! the first datagram, the receiver prints one JSON object with the number of bytes of the frames.

use std::io::IoSlice;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, recv, sendmsg, sockopt};
use vnet::wire::native::HEADER_LEN;

/// Length of a super-frame in bytes at an MSS of 1448: 45 segments and one header, as Linux sends a long stream.
const FRAME: usize = 65_226;
/// Number of super-frames in the sender's memory, and their distance in bytes.
const SLOTS: usize = 256;
const SLOT_SPACE: usize = 0x1_2000;
/// Length in bytes of the IPv4 and UDP headers.
const UNDERLAY: usize = 28;
/// Maximum number of datagrams (`UDP_MAX_SEGMENTS`) and bytes of one message.
const DATAGRAMS_MAX: usize = 64;
const MESSAGE_MAX: usize = 65_400;
/// Size of the receiver's socket buffer in bytes, as large as a link's.
const SOCKET_BUFFER: usize = 8 << 20;
/// Size of the receiver's memory in bytes, as large as a guest's receive ring.
const ROOM: usize = 4 << 20;
const READ_MAX: usize = 1 << 16;
const FIRST_DATAGRAM: Duration = Duration::from_secs(30);

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let usage = "usage: sockets take|send ADDRESS:PORT --mtu BYTES --seconds S";
    let option = |name: &str| words.iter().position(|word| word == name).and_then(|at| words.get(at + 1));
    let [mode, address, ..] = &words[..] else { panic!("{usage}") };
    let address: SocketAddr = address.parse().expect("an address and a port");
    let seconds = option("--seconds").and_then(|s| s.parse().ok()).expect(usage);
    let time = Duration::from_secs_f64(seconds);
    let datagram = option("--mtu").and_then(|mtu| mtu.parse::<usize>().ok()).expect(usage) - UNDERLAY;
    match mode.as_str() {
        "take" => println!("{}", take(address, datagram, time)),
        "send" => send(address, datagram, time),
        _ => panic!("{usage}"),
    }
}

/// Sends datagrams of `datagram` bytes as fast as the kernel takes them.
fn send(to: SocketAddr, datagram: usize, time: Duration) {
    let socket = UdpSocket::bind("0.0.0.0:0").expect("a socket");
    socket.connect(to).expect("a route");
    set_udp_option(&socket, libc::UDP_SEGMENT, datagram as libc::c_int);
    let memory = vec![0x5a_u8; SLOTS * SLOT_SPACE];
    let header = [0x76; HEADER_LEN];
    let begin = Instant::now();
    for slot in (0..SLOTS).cycle() {
        if begin.elapsed() > time {
            return;
        }
        let frame = &memory[slot * SLOT_SPACE..][..FRAME];
        let slices: Vec<&[u8]> = frame.chunks(datagram - HEADER_LEN).collect();
        for message in slices.chunks(DATAGRAMS_MAX.min(MESSAGE_MAX / datagram)) {
            let vectors: Vec<IoSlice> =
                message.iter().flat_map(|slice| [IoSlice::new(&header), IoSlice::new(slice)]).collect();
            sendmsg(&socket, &vectors, &mut SendAncillaryBuffer::default(), SendFlags::empty())
                .expect("a receiver");
        }
    }
}

/// Receives for `time` after the first datagram.
fn take(at: SocketAddr, datagram: usize, time: Duration) -> serde_json::Value {
    let socket = UdpSocket::bind(at).expect("an address of this host");
    sockopt::set_socket_recv_buffer_size_force(&socket, SOCKET_BUFFER).expect("CAP_NET_ADMIN");
    set_udp_option(&socket, libc::UDP_GRO, 1);
    socket.set_read_timeout(Some(FIRST_DATAGRAM)).expect("a time");
    let mut memory = vec![0; ROOM];
    let (mut bytes, mut begin) = (0, None);
    for place in (0..ROOM / READ_MAX).cycle() {
        let room = &mut memory[place * READ_MAX..][..READ_MAX];
        let (_, len) = recv(&socket, room, RecvFlags::empty()).expect("a stream");
        let begun = *begin.get_or_insert_with(Instant::now);
        bytes += len - len.div_ceil(datagram) * HEADER_LEN;
        if begun.elapsed() > time {
            let bps = bytes as f64 * 8.0 / begun.elapsed().as_secs_f64();
            return serde_json::json!({ "bytes": bytes, "bps": bps });
        }
    }
    unreachable!("a cycle has no end")
}

/// Sets a UDP option; rustix has no call for these.
fn set_udp_option(socket: &UdpSocket, name: libc::c_int, value: libc::c_int) {
    // SAFETY: the pointer refers to a live integer of the stated length.
    let set = unsafe {
        let value: *const libc::c_int = &value;
        let len = size_of::<libc::c_int>() as libc::socklen_t;
        libc::setsockopt(socket.as_raw_fd(), libc::SOL_UDP, name, value.cast(), len)
    };
    assert_eq!(set, 0, "{}", std::io::Error::last_os_error());
}
