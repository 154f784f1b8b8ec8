//! One burst of datagrams: buffers for a `recvmmsg`, and what it reported about them.
//!
//! A message is one datagram, or several of one size that the kernel kept together (`UDP_GRO`). The buffers are raw memory
//! ([`Scratch`]): frames of a batch point into them while other messages of the burst are still decrypted in place.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd};

use super::name::Name;
use super::udp::Socket;
use crate::scratch::Scratch;

/// Messages in a burst.
pub(crate) const MESSAGES: usize = 32;
/// Bytes of the buffer behind each: any UDP payload.
pub(crate) const BUFFER_LEN: usize = 65_536;

/// One message of a burst.
#[derive(Clone, Copy)]
pub(crate) struct Message {
    pub(crate) source: Name,
    /// Where its bytes start in the burst's memory.
    start: usize,
    len: usize,
    /// Bytes of each of its datagrams but the last; at least 1.
    segment: usize,
    pub(crate) truncated: bool,
}

impl Message {
    /// Datagrams in the message. An empty message is one datagram.
    pub(crate) fn datagrams(&self) -> usize {
        self.len.div_ceil(self.segment).max(1)
    }

    /// Where its bytes are in the burst's memory.
    pub(crate) fn range(&self) -> Range<usize> {
        self.start..self.start + self.len
    }

    /// Where datagram `n` is in the burst's memory.
    #[inline]
    pub(crate) fn datagram(&self, n: usize) -> Range<usize> {
        let (start, end) = (self.start + n * self.segment, self.start + self.len);
        start..end.min(start + self.segment)
    }
}

/// Room for a control message of any kind that this socket gets: `UDP_GRO`'s `int`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Control {
    header: libc::cmsghdr,
    segment: libc::c_int,
    padding: libc::c_int,
}

/// See the module's comment.
pub(crate) struct Burst {
    memory: Scratch,
    sources: Box<[Name]>,
    controls: Box<[Control]>,
    slices: Box<[libc::iovec]>,
    headers: Box<[libc::mmsghdr]>,
}

// SAFETY: the pointers in `slices` and `headers` point into the memory beside them and are written anew before each use,
// through `&mut self`.
unsafe impl Send for Burst {}

impl Burst {
    pub(crate) fn new() -> Burst {
        // SAFETY: all three are plain data of integers and pointers, for which all zeros is a value.
        let (control, slice, header) = unsafe {
            (
                std::mem::zeroed::<Control>(),
                std::mem::zeroed::<libc::iovec>(),
                std::mem::zeroed::<libc::mmsghdr>(),
            )
        };
        Burst {
            memory: Scratch::new(MESSAGES * BUFFER_LEN),
            sources: vec![Name::unknown(); MESSAGES].into_boxed_slice(),
            controls: vec![control; MESSAGES].into_boxed_slice(),
            slices: vec![slice; MESSAGES].into_boxed_slice(),
            headers: vec![header; MESSAGES].into_boxed_slice(),
        }
    }

    /// Receives what is waiting, at most `limit` messages; returns their number.
    pub(crate) fn receive(&mut self, socket: &Socket, limit: usize) -> usize {
        for index in 0..limit.min(MESSAGES) {
            let base = self.memory.ptr(index * BUFFER_LEN).cast_mut();
            self.slices[index] = libc::iovec { iov_base: base.cast(), iov_len: BUFFER_LEN };
            let header = &mut self.headers[index].msg_hdr;
            header.msg_name = self.sources[index].as_mut_ptr().cast();
            header.msg_namelen = Name::unknown().len();
            header.msg_iov = &raw mut self.slices[index];
            header.msg_iovlen = 1;
            header.msg_control = (&raw mut self.controls[index]).cast();
            header.msg_controllen = size_of::<Control>();
            header.msg_flags = 0;
        }
        let mut errors = 0;
        loop {
            let fd = socket.as_fd().as_raw_fd();
            let headers = self.headers.as_mut_ptr();
            // SAFETY: each of the at most MESSAGES headers points to a name, a slice of a buffer, and a control message of `self`,
            // all writable for the lengths told.
            let got = unsafe {
                libc::recvmmsg(
                    fd,
                    headers,
                    limit.min(MESSAGES) as libc::c_uint,
                    libc::MSG_DONTWAIT,
                    std::ptr::null_mut(),
                )
            };
            if got >= 0 {
                return got as usize;
            }
            match io::Error::last_os_error().kind() {
                io::ErrorKind::Interrupted => {}
                // An error of an earlier datagram is told once, before what is waiting, and means nothing here.
                kind if kind != io::ErrorKind::WouldBlock && errors == 0 => errors += 1,
                _ => return 0,
            }
        }
    }

    /// Describes a message whose bytes were put into its buffer.
    pub(crate) fn set(&mut self, index: usize, source: Name, len: usize, segment: usize) {
        self.sources[index] = source;
        let header = &mut self.headers[index];
        header.msg_len = len as u32;
        header.msg_hdr.msg_flags = 0;
        header.msg_hdr.msg_controllen = size_of::<Control>();
        let (cmsg_level, cmsg_type) = (libc::SOL_UDP, libc::UDP_GRO);
        let header = libc::cmsghdr { cmsg_len: size_of::<Control>(), cmsg_level, cmsg_type };
        self.controls[index] = Control { header, segment: segment as libc::c_int, padding: 0 };
    }

    /// The memory of all messages.
    pub(crate) fn memory(&self) -> &Scratch {
        &self.memory
    }

    /// The bytes of a message, to be decrypted in place.
    pub(crate) fn bytes_mut(&mut self, range: Range<usize>) -> &mut [u8] {
        self.memory.bytes_mut(range)
    }

    /// The whole buffer of a message.
    pub(crate) fn buffer(&mut self, message: usize) -> &mut [u8] {
        self.memory.bytes_mut(message * BUFFER_LEN..(message + 1) * BUFFER_LEN)
    }

    /// Message `index` as it was received.
    pub(crate) fn message(&self, index: usize) -> Message {
        let header = &self.headers[index];
        let len = (header.msg_len as usize).min(BUFFER_LEN);
        let control = &self.controls[index];
        let offered = header.msg_hdr.msg_controllen >= size_of::<libc::cmsghdr>() + size_of::<libc::c_int>()
            && control.header.cmsg_level == libc::SOL_UDP
            && control.header.cmsg_type == libc::UDP_GRO;
        let segment = if offered { usize::try_from(control.segment).unwrap_or(0) } else { 0 };
        Message {
            source: self.sources[index],
            start: index * BUFFER_LEN,
            len,
            segment: if segment == 0 { len.max(1) } else { segment },
            truncated: header.msg_hdr.msg_flags & libc::MSG_TRUNC != 0,
        }
    }
}
