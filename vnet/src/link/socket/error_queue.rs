//! Reads zero-copy completions (`MSG_ZEROCOPY`) from a socket's error queue.
//!
//! Linux Documentation/networking/msg_zerocopy.rst; recvmsg(2), MSG_ERRQUEUE; `struct sock_extended_err` in ip(7).

use super::message::{CONTROL_HEADER_LEN, ERROR_LEN, receive_error};
use super::udp::Socket;

// Missing in libc.
const SO_EE_ORIGIN_ZEROCOPY: u8 = 5;
const SO_EE_CODE_ZEROCOPY_COPIED: u8 = 1;

/// The next completion in the socket's error queue: numbers of the first and last message, and whether the kernel copied them.
pub(in crate::link) fn notification(socket: &Socket) -> Option<(u32, u32, bool)> {
    let mut control = [0; ERROR_LEN];
    loop {
        let len = receive_error(socket, &mut control)?;
        // Other errors are not zero-copy completions and are skipped.
        if let Some(found) = read_notification(&control[..len]) {
            return Some(found);
        }
    }
}

/// Parses a control message with a zero-copy `struct sock_extended_err`.
pub(in crate::link) fn read_notification(control: &[u8]) -> Option<(u32, u32, bool)> {
    let word = |at: usize| Some(u32::from_ne_bytes(control.get(at..)?.first_chunk().copied()?));
    let header = CONTROL_HEADER_LEN;
    let (level, kind) = (word(header - 8)?.cast_signed(), word(header - 4)?.cast_signed());
    if !matches!((level, kind), (libc::SOL_IP, libc::IP_RECVERR) | (libc::SOL_IPV6, libc::IPV6_RECVERR)) {
        return None;
    }
    // ee_errno, ee_origin, ee_type, ee_code, ee_pad, ee_info, ee_data
    let (errno, [origin, _, code, _]) = (word(header)?, word(header + 4)?.to_ne_bytes());
    let ours = errno == 0 && origin == SO_EE_ORIGIN_ZEROCOPY;
    ours.then_some((word(header + 8)?, word(header + 12)?, code & SO_EE_CODE_ZEROCOPY_COPIED != 0))
}
