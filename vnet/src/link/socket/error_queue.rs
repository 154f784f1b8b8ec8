//! Messages that the kernel reads from after the call that sent them, and what its error queue says of them.
//!
//! Linux Documentation/networking/msg_zerocopy.rst; recvmsg(2), MSG_ERRQUEUE; `struct sock_extended_err` in ip(7).

use std::io;
use std::os::fd::{AsFd, AsRawFd};

use crate::link::socket::udp::{Name, Socket, check};

// Not in libc.
const SO_EE_ORIGIN_ZEROCOPY: u8 = 5;
const SO_EE_CODE_ZEROCOPY_COPIED: u8 = 1;

/// Sends one message.
///
/// `segment` is the size of each of its datagrams but the last, when there are several.
///
/// # Safety
/// What `slices` tell of is readable; with `MSG_ZEROCOPY`, what of it is not a guest's stays as it is until the message is done.
pub(in crate::link) unsafe fn send_message(
    socket: &Socket,
    to: &Name,
    slices: &mut [libc::iovec],
    segment: Option<u16>,
    flags: libc::c_int,
) -> io::Result<()> {
    /// A control message with the 16-bit value of `UDP_SEGMENT`.
    #[repr(C)]
    struct Control {
        header: libc::cmsghdr,
        segment: u16,
        padding: [u8; 6],
    }
    let mut control = Control {
        header: libc::cmsghdr {
            cmsg_len: size_of::<libc::cmsghdr>() + size_of::<u16>(),
            cmsg_level: libc::SOL_UDP,
            cmsg_type: libc::UDP_SEGMENT,
        },
        segment: segment.unwrap_or(0),
        padding: [0; 6],
    };
    // SAFETY: `msghdr` is plain data for which all zeros is a value.
    let mut message = unsafe { std::mem::zeroed::<libc::msghdr>() };
    message.msg_name = to.as_ptr().cast_mut().cast();
    message.msg_namelen = to.len();
    message.msg_iov = slices.as_mut_ptr();
    message.msg_iovlen = slices.len();
    if segment.is_some() {
        message.msg_control = (&raw mut control).cast();
        message.msg_controllen = size_of::<Control>();
    }
    let fd = socket.as_fd().as_raw_fd();
    // SAFETY: the header points to a name, slices and a control message that outlive the call and whose lengths it tells; what
    // the slices tell of is readable by the caller's promise.
    while let Err(error) = check(unsafe { libc::sendmsg(fd, &raw const message, flags | libc::MSG_DONTWAIT) })
    {
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
    Ok(())
}

/// The next notification in the socket's error queue: the first and last message done, and whether they were copied.
pub(in crate::link) fn notification(socket: &Socket) -> Option<(u32, u32, bool)> {
    /// Room for the extended error and the address behind it.
    #[repr(C, align(8))]
    struct Control([u8; 128]);
    let fd = socket.as_fd().as_raw_fd();
    loop {
        let mut control = Control([0; 128]);
        // SAFETY: `msghdr` is plain data for which all zeros is a value.
        let mut message = unsafe { std::mem::zeroed::<libc::msghdr>() };
        message.msg_control = (&raw mut control).cast();
        message.msg_controllen = size_of::<Control>();
        // SAFETY: the header tells of the control buffer only, which outlives the call and is writable for its length.
        let got = unsafe { libc::recvmsg(fd, &raw mut message, libc::MSG_ERRQUEUE | libc::MSG_DONTWAIT) };
        if got < 0 {
            match io::Error::last_os_error().kind() {
                io::ErrorKind::Interrupted => continue,
                _ => return None,
            }
        }
        if let Some(found) = read_notification(&control.0[..message.msg_controllen.min(128)]) {
            return Some(found);
        }
        // Another kind of error: nothing of ours.
    }
}

/// Reads a control message that holds a `struct sock_extended_err` of a sent message.
pub(in crate::link) fn read_notification(control: &[u8]) -> Option<(u32, u32, bool)> {
    let word = |at: usize| Some(u32::from_ne_bytes(control.get(at..)?.first_chunk().copied()?));
    let header = size_of::<libc::cmsghdr>();
    let (level, kind) = (word(header - 8)?.cast_signed(), word(header - 4)?.cast_signed());
    if !matches!((level, kind), (libc::SOL_IP, libc::IP_RECVERR) | (libc::SOL_IPV6, libc::IPV6_RECVERR)) {
        return None;
    }
    // ee_errno, ee_origin, ee_type, ee_code, ee_pad, ee_info, ee_data
    let (errno, [origin, _, code, _]) = (word(header)?, word(header + 4)?.to_ne_bytes());
    let ours = errno == 0 && origin == SO_EE_ORIGIN_ZEROCOPY;
    ours.then_some((word(header + 8)?, word(header + 12)?, code & SO_EE_CODE_ZEROCOPY_COPIED != 0))
}
