//! Sends frames from invented MAC addresses, each a new flow: what a container does that scans, or attacks, its network.
//! `lab/lab bench one-host` measures what is left for others meanwhile.
//!
//! Usage: `scan DEVICE TO_MAC FLOWS_PER_S` sends until it is killed.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, FromRawFd};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::net::netdevice::name_to_index;
use vnet::wire::ethernet::Mac;

/// EtherType for local experiments (IEEE 802).
const EXPERIMENTAL: [u8; 2] = 0x88b5_u16.to_be_bytes();
/// Smallest frame, without its checksum.
const FRAME: usize = 60;
const PAUSE: Duration = Duration::from_millis(1);

fn main() -> io::Result<()> {
    let words: Vec<String> = std::env::args().collect();
    let usage = "usage: scan DEVICE TO_MAC FLOWS_PER_S";
    let [_, device, to, rate] = &words[..] else { panic!("{usage}") };
    let (to, rate): (Mac, f64) = (to.parse().expect(usage), rate.parse().expect(usage));
    let mut port = open(device)?;
    let mut frame = [0; FRAME];
    frame[..6].copy_from_slice(&to.0);
    frame[12..14].copy_from_slice(&EXPERIMENTAL);
    let begin = Instant::now();
    for number in 0_u32.. {
        while f64::from(number) > begin.elapsed().as_secs_f64() * rate {
            sleep(PAUSE);
        }
        // Locally administered addresses.
        frame[6..8].copy_from_slice(&[2, 0]);
        frame[8..12].copy_from_slice(&number.to_be_bytes());
        // A frame for which the device has no room is lost, as on a network.
        let _ = port.write(&frame);
    }
    Ok(())
}

/// A packet socket bound to `device`: what is written to it is sent as a frame.
fn open(device: &str) -> io::Result<File> {
    // SAFETY: no memory is passed.
    let raw = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) };
    if raw < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just opened the descriptor, and nothing else owns it.
    let port = unsafe { File::from_raw_fd(raw) };
    // SAFETY: `sockaddr_ll` is plain data, for which all zeros is a valid value.
    let mut name = unsafe { std::mem::zeroed::<libc::sockaddr_ll>() };
    name.sll_family = libc::AF_PACKET as libc::c_ushort;
    name.sll_ifindex = name_to_index(&port, device)? as libc::c_int;
    let len = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
    // SAFETY: `name` is a whole `sockaddr_ll`, lives for the call, and `len` is its size.
    match unsafe { libc::bind(port.as_raw_fd(), (&raw const name).cast(), len) } {
        0 => Ok(port),
        _ => Err(io::Error::last_os_error()),
    }
}
