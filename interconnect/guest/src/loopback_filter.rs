//! The classic BPF program of a socket that receives only by the loopback device.

use std::io;
use std::os::fd::AsFd;

use nix::net::if_::if_nametoindex;
use vnet_rdma::ether::attach_filter;

/// Length that a filter returns to take the whole datagram.
const WHOLE: u32 = u32::MAX;

/// Drops what does not arrive by the loopback device. The kernel delivers packets between two addresses of this machine by that device; a packet
/// from the network may have a spoofed source address of this machine, which Linux does not refuse for IPv6.
///
/// # Errors
/// There is no loopback device, or no memory.
pub fn attach(socket: impl AsFd) -> io::Result<()> {
    attach_for(socket, if_nametoindex("lo")?)
}

fn attach_for(socket: impl AsFd, ifindex: u32) -> io::Result<()> {
    let device = (libc::SKF_AD_OFF + libc::SKF_AD_IFINDEX) as u32;
    let instruction = |code: u32, jf, k| libc::sock_filter { code: code as u16, jt: 0, jf, k };
    let program = [
        instruction(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, device),
        instruction(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 1, ifindex),
        instruction(libc::BPF_RET | libc::BPF_K, 0, WHOLE),
        instruction(libc::BPF_RET | libc::BPF_K, 0, 0),
    ];
    attach_filter(socket, &program)
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;
    use std::time::Duration;

    use super::*;

    #[test]
    fn only_datagrams_of_the_device_arrive() {
        let (one, other) = (UdpSocket::bind("127.0.0.1:0").unwrap(), UdpSocket::bind("127.0.0.1:0").unwrap());
        attach(&one).unwrap();
        one.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        other.send_to(b"x", one.local_addr().unwrap()).unwrap();
        assert_eq!(one.recv_from(&mut [0; 8]).unwrap(), (1, other.local_addr().unwrap()));
        // The loopback device delivers while the sender's call runs.
        attach_for(&one, if_nametoindex("lo").unwrap() + 1).unwrap();
        other.send_to(b"x", one.local_addr().unwrap()).unwrap();
        one.set_nonblocking(true).unwrap();
        assert_eq!(one.recv_from(&mut [0; 8]).unwrap_err().kind(), io::ErrorKind::WouldBlock);
    }
}
