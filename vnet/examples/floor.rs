//! The minimal forwarder between a TAP device and a UDP socket. `lab/lab bench ablation` runs it on two hosts: its round-trip
//! time is the cost of the kernel's system calls and wake-ups, and vnetd's own cost is the difference.
//!
//! One frame is one datagram: no header, no table, no batch, no offloads, no counters.
//!
//! Usage: `floor DEVICE LOCAL:PORT REMOTE:PORT spin|block` creates the device, then moves frames until it is killed. `spin` polls
//! both sides in turn and yields the processor in between; `block` sleeps until a side is readable.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;

use rustix::event::{PollFd, PollFlags, poll};

/// Larger than any frame and datagram.
const ROOM: usize = 1 << 16;

fn main() -> io::Result<()> {
    let words: Vec<String> = std::env::args().collect();
    let [_, device, local, remote, idle] = &words[..] else {
        panic!("usage: floor DEVICE LOCAL:PORT REMOTE:PORT spin|block");
    };
    let address = |text: &str| text.parse::<SocketAddr>().expect("an address and a port");
    let blocks = match idle.as_str() {
        "block" => true,
        "spin" => false,
        _ => panic!("'{idle}' is neither spin nor block"),
    };
    let socket = UdpSocket::bind(address(local))?;
    socket.set_nonblocking(true)?;
    forward(&tap(device)?, &socket, address(remote), blocks)
}

/// Moves frames until the program is killed.
fn forward(mut tap: &File, socket: &UdpSocket, remote: SocketAddr, blocks: bool) -> io::Result<()> {
    let mut room = vec![0; ROOM];
    loop {
        let mut moved = false;
        if let Some(len) = some(tap.read(&mut room))? {
            // A frame that cannot be sent is lost, as on a network.
            let _ = socket.send_to(&room[..len], remote);
            moved = true;
        }
        if let Some((len, _)) = some(socket.recv_from(&mut room))? {
            let _ = tap.write(&room[..len]);
            moved = true;
        }
        if !moved && blocks {
            let mut both = [PollFd::new(&tap, PollFlags::IN), PollFd::new(socket, PollFlags::IN)];
            poll(&mut both, None)?;
        } else if !moved {
            std::thread::yield_now();
        }
    }
}

/// `None` if nothing is readable, the device is still down, or the other end is not running yet.
fn some<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Ok(found) => Ok(Some(found)),
        Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(None),
        Err(error) if matches!(error.raw_os_error(), Some(libc::EIO | libc::ECONNREFUSED)) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Creates a TAP device in this namespace; it may be moved to another namespace.
fn tap(device: &str) -> io::Result<File> {
    /// `struct ifreq` for TUNSETIFF, with the kernel's size.
    #[repr(C)]
    struct Request {
        name: [u8; 16],
        flags: libc::c_short,
        rest: [u8; 22],
    }
    assert!(device.len() < 16, "a device's name has at most 15 characters");
    let flags = (libc::IFF_TAP | libc::IFF_NO_PI) as libc::c_short;
    let mut request = Request { name: [0; 16], flags, rest: [0; 22] };
    request.name[..device.len()].copy_from_slice(device.as_bytes());
    let file =
        OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open("/dev/net/tun")?;
    // SAFETY: TUNSETIFF reads and writes one `struct ifreq`: `request`, which this function owns.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF as _, &raw mut request) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(file) }
}
