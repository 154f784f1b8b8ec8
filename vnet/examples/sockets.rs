//! Datagrams over plain UDP sockets: large messages one way, or 8 bytes to and fro. Between hosts, without an overlay, the messages show
//! the kernel's share of the cost of a link's datagrams (`lab/lab bench small`). Between containers both show what an overlay leaves
//! to an application that brings its own protocol (`lab/lab bench sockets`).
//!
//! Like a link, the sender leaves segmentation to the kernel (`UDP_SEGMENT`): a datagram is a header of vnet's length and a slice
//! of the frame; the frames cover as much memory as a guest's ring. The receiver takes coalesced datagrams (`UDP_GRO`) and
//! discards them.
//!
//! Usage: `sockets take ADDRESS:PORT --mtu BYTES --seconds S`, and then `sockets send` with the same arguments. S seconds after
//! the first datagram, the receiver prints one JSON object with the number of bytes of the frames. `sockets answer ADDRESS:PORT` answers
//! until it is killed; `sockets ask ADDRESS:PORT --seconds S` prints the median time of one way. Both poll, as MPI ranks do.

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
/// Time after which a question without an answer is sent again.
const ANSWER: Duration = Duration::from_millis(100);

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let usage = "usage: sockets take|send|ask|answer ADDRESS:PORT [--mtu BYTES] [--seconds S]";
    let option = |name: &str| words.iter().position(|word| word == name).and_then(|at| words.get(at + 1));
    let [mode, address, ..] = &words[..] else { panic!("{usage}") };
    let address: SocketAddr = address.parse().expect("an address and a port");
    let time = || Duration::from_secs_f64(option("--seconds").and_then(|s| s.parse().ok()).expect(usage));
    let datagram = || option("--mtu").and_then(|mtu| mtu.parse::<usize>().ok()).expect(usage) - UNDERLAY;
    match mode.as_str() {
        "take" => println!("{}", take(address, datagram(), time())),
        "send" => send(address, datagram(), time()),
        "ask" => println!("{}", ask(address, time())),
        "answer" => answer(address),
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

/// Sends 8 bytes and waits for their return, again and again for `time`.
fn ask(to: SocketAddr, time: Duration) -> serde_json::Value {
    let socket = UdpSocket::bind("0.0.0.0:0").expect("a socket");
    socket.connect(to).expect("a route");
    socket.set_nonblocking(true).expect("a socket");
    let (mut room, mut ways_us) = ([0; 8], vec![]);
    let begin = Instant::now();
    for number in 0_u64.. {
        if begin.elapsed() > time {
            break;
        }
        let asked = Instant::now();
        // Refused while the other side does not listen yet.
        let _ = socket.send(&number.to_ne_bytes());
        while asked.elapsed() < ANSWER {
            if socket.recv(&mut room).is_ok_and(|len| len == 8) && room == number.to_ne_bytes() {
                ways_us.push(asked.elapsed().as_secs_f64() * 1e6 / 2.0);
                break;
            }
            std::thread::yield_now();
        }
    }
    ways_us.sort_by(f64::total_cmp);
    serde_json::json!({ "count": ways_us.len(), "median_us": ways_us.get(ways_us.len() / 2) })
}

/// Returns every datagram to its sender.
fn answer(at: SocketAddr) {
    let socket = UdpSocket::bind(at).expect("an address of this host");
    socket.set_nonblocking(true).expect("a socket");
    let mut room = [0; 8];
    loop {
        match socket.recv_from(&mut room) {
            Ok((len, from)) => drop(socket.send_to(&room[..len], from)),
            Err(_) => std::thread::yield_now(),
        }
    }
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
