//! The classic BPF program of a node's packet socket.
//!
//! The kernel runs it on each frame of the device with the socket's ethertype, before it copies the frame to the process. Offsets begin behind the
//! Ethernet header, because the socket is of the type SOCK_DGRAM.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

use super::frame::{HEADER, MAGIC, PACKET_VERSION};

/// `PACKET_HOST`: frames to the device's own MAC address. Others are for a group, for another station, or of an unknown VLAN.
const TO_THIS_HOST: u32 = 0;
/// Length that a program returns to take the whole frame.
const WHOLE: u32 = u32::MAX;
const INSTRUCTIONS: usize = 11;

fn load(size: u32, offset: u32) -> libc::sock_filter {
    instruction(libc::BPF_LD | size | libc::BPF_ABS, offset)
}

fn instruction(code: u32, k: u32) -> libc::sock_filter {
    libc::sock_filter { code: code as u16, jt: 0, jf: 0, k }
}

/// Goes on if the loaded value is `k`, otherwise to the last instruction. `place`: number of this instruction.
fn equal(k: u32, place: usize) -> libc::sock_filter {
    let jf = (INSTRUCTIONS - 2 - place) as u8;
    libc::sock_filter { jf, ..instruction(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, k) }
}

/// The program of the node at `port`.
fn program(port: u16) -> [libc::sock_filter; INSTRUCTIONS] {
    let kind = (libc::SKF_AD_OFF + libc::SKF_AD_PKTTYPE) as u32;
    [
        load(libc::BPF_B, kind),
        equal(TO_THIS_HOST, 1),
        load(libc::BPF_W, 0),
        equal(u32::from_be_bytes(MAGIC), 3),
        load(libc::BPF_H, 4),
        equal(u32::from(port), 5),
        // A load beyond the end of the frame rejects it.
        load(libc::BPF_B, HEADER as u32),
        instruction(libc::BPF_ALU | libc::BPF_RSH | libc::BPF_K, 4),
        equal(u32::from(PACKET_VERSION), 8),
        instruction(libc::BPF_RET | libc::BPF_K, WHOLE),
        instruction(libc::BPF_RET | libc::BPF_K, 0),
    ]
}

/// Attaches the filter of the node at `port` to its socket.
pub(super) fn attach(socket: impl AsFd, port: u16) -> io::Result<()> {
    attach_filter(socket, &program(port))
}

/// Attaches a classic BPF program to a socket (SO_ATTACH_FILTER).
///
/// # Errors
/// The kernel refuses the program, or has no memory.
pub fn attach_filter(socket: impl AsFd, program: &[libc::sock_filter]) -> io::Result<()> {
    // The kernel only reads the instructions.
    let filter = program.as_ptr().cast_mut();
    let program = libc::sock_fprog { len: program.len() as u16, filter };
    let len = size_of::<libc::sock_fprog>() as libc::socklen_t;
    // SAFETY: the kernel reads `len` bytes of the structure, which has this length, and the instructions that it names; both outlive the call.
    let result = unsafe {
        let value = std::ptr::from_ref(&program).cast();
        libc::setsockopt(socket.as_fd().as_raw_fd(), libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, value, len)
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
