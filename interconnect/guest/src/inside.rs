//! Datagrams from inside the machine.

use std::io;
use std::mem::size_of;
use std::os::fd::{AsFd, AsRawFd};

use nix::net::if_::if_nametoindex;

/// Length that a filter returns to take the whole datagram.
const WHOLE: u32 = u32::MAX;

/// Has a socket receive only what comes by the loopback device, as all does that a program of this machine sends to one of its addresses. A packet
/// from elsewhere may claim such an address: for IPv6 the kernel does not refuse that.
///
/// # Errors
/// There is no loopback device, or no memory.
pub fn only_from_inside(socket: impl AsFd) -> io::Result<()> {
    let loopback = if_nametoindex("lo")?;
    let device = (libc::SKF_AD_OFF + libc::SKF_AD_IFINDEX) as u32;
    let instruction = |code: u32, jf, k| libc::sock_filter { code: code as u16, jt: 0, jf, k };
    let mut program = [
        instruction(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, device),
        instruction(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 1, loopback),
        instruction(libc::BPF_RET | libc::BPF_K, 0, WHOLE),
        instruction(libc::BPF_RET | libc::BPF_K, 0, 0),
    ];
    let program = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    let len = size_of::<libc::sock_fprog>() as libc::socklen_t;
    // SAFETY: the kernel reads `len` bytes of the structure, which has this length, and the instructions that it names; both outlive the call.
    let result = unsafe {
        let value = std::ptr::from_ref(&program).cast();
        libc::setsockopt(socket.as_fd().as_raw_fd(), libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, value, len)
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;
    use std::time::Duration;

    use super::*;

    #[test]
    fn datagrams_by_the_loopback_device_arrive() {
        let (one, other) = (UdpSocket::bind("127.0.0.1:0").unwrap(), UdpSocket::bind("127.0.0.1:0").unwrap());
        only_from_inside(&one).unwrap();
        one.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        other.send_to(b"x", one.local_addr().unwrap()).unwrap();
        assert_eq!(one.recv_from(&mut [0; 8]).unwrap(), (1, other.local_addr().unwrap()));
    }
}
