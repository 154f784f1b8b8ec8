//! `msghdr` and `cmsghdr`: messages for sendmmsg(2), sendmsg(2), recvmmsg(2) and recvmsg(2). No other file builds such a header.
//!
//! A message is one datagram, or several of equal size that the kernel segments on send (`UDP_SEGMENT`) and coalesces on receive
//! (`UDP_GRO`); a control message carries that size. Implemented without a wrapper library because it is on the data path:
//! headers are written in place into memory that is allocated once, whereas a wrapper would copy them.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

use super::name::Name;
use super::udp::{Socket, check};

/// Number of bytes in front of a control message's value.
pub(super) const CONTROL_HEADER_LEN: usize = size_of::<libc::cmsghdr>();
/// Size in bytes of a control message of the error queue: the extended error, followed by an address.
pub(super) const ERROR_LEN: usize = 128;

/// A control message with the 16-bit value of `UDP_SEGMENT` or the `int` of `UDP_GRO`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Control {
    header: libc::cmsghdr,
    value: [u8; 8],
}

impl Control {
    /// Makes the kernel segment the message into datagrams of `size` bytes.
    fn segment(size: u16) -> Control {
        let mut value = [0; 8];
        value[..2].copy_from_slice(&size.to_ne_bytes());
        let cmsg_len = size_of::<libc::cmsghdr>() + size_of::<u16>();
        let header = libc::cmsghdr { cmsg_len, cmsg_level: libc::SOL_UDP, cmsg_type: libc::UDP_SEGMENT };
        Control { header, value }
    }

    /// A control message as the kernel writes it for a message coalesced from datagrams of `size` bytes.
    fn coalesced(size: usize) -> Control {
        let mut value = [0; 8];
        value[..4].copy_from_slice(&(size as libc::c_int).to_ne_bytes());
        let header = libc::cmsghdr {
            cmsg_len: CONTROL_HEADER_LEN + size_of::<libc::c_int>(),
            cmsg_level: libc::SOL_UDP,
            cmsg_type: libc::UDP_GRO,
        };
        Control { header, value }
    }

    /// Datagram size of a message of `len` bytes; `filled` is the length that the kernel wrote of the control message.
    fn datagram_size(&self, filled: usize, len: usize) -> usize {
        let offered = filled >= CONTROL_HEADER_LEN + size_of::<libc::c_int>()
            && self.header.cmsg_level == libc::SOL_UDP
            && self.header.cmsg_type == libc::UDP_GRO;
        let [a, b, c, d, ..] = self.value;
        let size = if offered { libc::c_int::from_ne_bytes([a, b, c, d]) } else { 0 };
        usize::try_from(size).ok().filter(|size| *size != 0).unwrap_or(len.max(1))
    }
}

/// A header that sends `slices` to `to`.
///
/// The header holds pointers to both and must not outlive them.
fn sending(to: &Name, slices: &mut [libc::iovec]) -> libc::msghdr {
    // SAFETY: `msghdr` is plain data for which all zeros is a valid value; libc hides its padding, so it cannot be written as a
    // literal.
    let mut header = unsafe { std::mem::zeroed::<libc::msghdr>() };
    header.msg_name = to.as_ptr().cast_mut().cast();
    header.msg_namelen = to.len();
    header.msg_iov = slices.as_mut_ptr();
    header.msg_iovlen = slices.len();
    header
}

fn attach(header: &mut libc::msghdr, control: &mut Control) {
    header.msg_control = (&raw mut *control).cast();
    header.msg_controllen = size_of::<Control>();
}

/// Messages for one `sendmmsg`.
pub(super) struct Outgoing {
    headers: Vec<libc::mmsghdr>,
    /// One control message per message, preallocated so that none moves.
    controls: Box<[Control]>,
}

// SAFETY: the pointers in `headers` are used only between the calls that push and those that send, through `&mut self`.
unsafe impl Send for Outgoing {}

impl Outgoing {
    /// Allocates space for `messages` messages.
    pub(super) fn new(messages: usize) -> Outgoing {
        let controls = vec![Control::segment(0); messages].into_boxed_slice();
        Outgoing { headers: Vec::with_capacity(messages), controls }
    }

    /// Removes all messages.
    pub(super) fn clear(&mut self) {
        self.headers.clear();
    }

    /// Adds a message, segmented into datagrams of `segment` bytes if `segment` is given.
    ///
    /// # Panics
    /// When no space is left.
    #[inline]
    pub(super) fn push(&mut self, to: &Name, slices: &mut [libc::iovec], segment: Option<u16>) {
        let mut header = sending(to, slices);
        if let Some(size) = segment {
            let control = &mut self.controls[self.headers.len()];
            *control = Control::segment(size);
            attach(&mut header, control);
        }
        self.headers.push(libc::mmsghdr { msg_hdr: header, msg_len: 0 });
    }

    /// Sends the messages from `first` on. Returns how many the kernel accepted, at least one.
    ///
    /// # Safety
    /// The names and slices pushed, and the memory that the slices describe, must still be valid and readable.
    pub(super) unsafe fn send(&mut self, socket: &Socket, first: usize) -> io::Result<usize> {
        let rest = &mut self.headers[first..];
        // SAFETY: every header points to a control message of `self` and, as the caller guarantees, to a name and slices of the
        // stated lengths whose memory is readable.
        let sent = unsafe {
            libc::sendmmsg(socket.as_fd().as_raw_fd(), rest.as_mut_ptr(), rest.len() as libc::c_uint, 0)
        };
        check(sent).map(|sent| sent as usize)
    }

    /// Sends `slices` as one datagram to the destination of message `index`.
    ///
    /// # Safety
    /// The requirements of [`Outgoing::send`].
    #[cold]
    pub(super) unsafe fn send_apart(
        &self,
        socket: &Socket,
        index: usize,
        slices: &mut [libc::iovec],
    ) -> io::Result<()> {
        let mut header = self.headers[index].msg_hdr;
        header.msg_iov = slices.as_mut_ptr();
        header.msg_iovlen = slices.len();
        header.msg_control = std::ptr::null_mut();
        header.msg_controllen = 0;
        // SAFETY: a header as in `send`, with other slices and without a control message.
        unsafe { send_one(socket, &header, 0) }
    }
}

/// Sends one message, segmented into datagrams of `segment` bytes if `segment` is given.
///
/// # Safety
/// The memory that `slices` describe must be readable. With `MSG_ZEROCOPY`, the part of it that is not guest memory must stay
/// unchanged until the message completes.
pub(in crate::link) unsafe fn send_message(
    socket: &Socket,
    to: &Name,
    slices: &mut [libc::iovec],
    segment: Option<u16>,
    flags: libc::c_int,
) -> io::Result<()> {
    let mut header = sending(to, slices);
    let mut control = Control::segment(segment.unwrap_or(0));
    if segment.is_some() {
        attach(&mut header, &mut control);
    }
    // SAFETY: the header points to a name, slices and a control message that outlive the call; the slices' memory is readable as
    // the caller guarantees.
    unsafe { send_one(socket, &header, flags | libc::MSG_DONTWAIT) }
}

/// # Safety
/// The memory that `header` points to must be readable for the stated lengths.
unsafe fn send_one(socket: &Socket, header: &libc::msghdr, flags: libc::c_int) -> io::Result<()> {
    let fd = socket.as_fd().as_raw_fd();
    // SAFETY: guaranteed by the caller.
    while let Err(error) = check(unsafe { libc::sendmsg(fd, header, flags) }) {
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
    Ok(())
}

/// The kernel's report on a received message.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Report {
    pub(crate) source: Name,
    /// Length of the message in bytes.
    pub(crate) len: usize,
    /// Length in bytes of each of its datagrams but the last; at least 1.
    pub(crate) segment: usize,
    /// True if the message was truncated.
    pub(crate) truncated: bool,
}

/// Messages for one `recvmmsg`.
pub(super) struct Incoming {
    sources: Box<[Name]>,
    controls: Box<[Control]>,
    slices: Box<[libc::iovec]>,
    headers: Box<[libc::mmsghdr]>,
}

// SAFETY: the pointers in `slices` and `headers` are rewritten before each use, through `&mut self`.
unsafe impl Send for Incoming {}

impl Incoming {
    /// Allocates space for `messages` messages.
    pub(super) fn new(messages: usize) -> Incoming {
        // SAFETY: both are plain data of integers and pointers, for which all zeros is a valid value.
        let (slice, header) =
            unsafe { (std::mem::zeroed::<libc::iovec>(), std::mem::zeroed::<libc::mmsghdr>()) };
        Incoming {
            sources: vec![Name::unknown(); messages].into_boxed_slice(),
            controls: vec![Control::coalesced(0); messages].into_boxed_slice(),
            slices: vec![slice; messages].into_boxed_slice(),
            headers: vec![header; messages].into_boxed_slice(),
        }
    }

    /// Receives at most `limit` waiting messages, the `n`th into the `len` bytes at `buffer(n)`. Returns their number.
    ///
    /// # Safety
    /// These buffers must be writable, and no other code may use them during the call.
    pub(super) unsafe fn receive(
        &mut self,
        socket: &Socket,
        limit: usize,
        (buffer, len): (impl Fn(usize) -> *mut u8, usize),
    ) -> usize {
        let limit = limit.min(self.headers.len());
        for index in 0..limit {
            self.slices[index] = libc::iovec { iov_base: buffer(index).cast(), iov_len: len };
            let header = &mut self.headers[index].msg_hdr;
            header.msg_name = self.sources[index].as_mut_ptr().cast();
            header.msg_namelen = Name::unknown().len();
            header.msg_iov = &raw mut self.slices[index];
            header.msg_iovlen = 1;
            attach(header, &mut self.controls[index]);
            header.msg_flags = 0;
        }
        let mut errors = 0;
        loop {
            let (fd, flags) = (socket.as_fd().as_raw_fd(), libc::MSG_DONTWAIT);
            let (headers, count) = (self.headers.as_mut_ptr(), limit as libc::c_uint);
            // SAFETY: each of the `limit` headers points to a name, a slice and a control message of `self`, and the slice to a
            // buffer that is writable as the caller guarantees.
            let got = unsafe { libc::recvmmsg(fd, headers, count, flags, std::ptr::null_mut()) };
            if got >= 0 {
                return got as usize;
            }
            match io::Error::last_os_error().kind() {
                io::ErrorKind::Interrupted => {}
                // The error of an earlier datagram: the kernel reports it once, before waiting messages. It is irrelevant here.
                kind if kind != io::ErrorKind::WouldBlock && errors == 0 => errors += 1,
                _ => return 0,
            }
        }
    }

    /// Sets message `index`, which was received in another way: `len` bytes in datagrams of `segment` bytes.
    pub(super) fn set(&mut self, index: usize, source: Name, len: usize, segment: usize) {
        self.sources[index] = source;
        self.controls[index] = Control::coalesced(segment);
        let header = &mut self.headers[index];
        header.msg_len = len as u32;
        header.msg_hdr.msg_flags = 0;
        header.msg_hdr.msg_controllen = size_of::<Control>();
    }

    /// The report on message `index`.
    pub(super) fn report(&self, index: usize) -> Report {
        let mmsghdr = &self.headers[index];
        let (header, len) = (&mmsghdr.msg_hdr, mmsghdr.msg_len as usize);
        Report {
            source: self.sources[index],
            len,
            segment: self.controls[index].datagram_size(header.msg_controllen, len),
            truncated: header.msg_flags & libc::MSG_TRUNC != 0,
        }
    }
}

/// Receives one message into `slices`, without blocking.
///
/// # Errors
/// The kernel's error: `EAGAIN` when no message is waiting, `EFAULT` when the memory is unmapped.
pub(crate) fn receive_message(
    socket: &Socket,
    slices: &mut [libc::iovec],
    flags: libc::c_int,
) -> io::Result<Report> {
    let (mut source, mut control) = (Name::unknown(), Control::coalesced(0));
    let mut errors = 0;
    loop {
        let mut header = sending(&source, slices);
        header.msg_name = source.as_mut_ptr().cast();
        header.msg_namelen = Name::unknown().len();
        attach(&mut header, &mut control);
        let fd = socket.as_fd().as_raw_fd();
        // SAFETY: the header points to a name, slices and a control message that outlive the call, writable for the stated
        // lengths. The kernel checks the memory of the slices (`EFAULT`); callers pass only memory that may be written to.
        match check(unsafe { libc::recvmsg(fd, &raw mut header, flags | libc::MSG_DONTWAIT) }) {
            Ok(len) => {
                let len = len as usize;
                let segment = control.datagram_size(header.msg_controllen, len);
                return Ok(Report {
                    source,
                    len,
                    segment,
                    truncated: header.msg_flags & libc::MSG_TRUNC != 0,
                });
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            // The error of an earlier datagram (a peer not up yet, a closed path): the kernel reports it once, before waiting
            // messages.
            Err(error) => match error.raw_os_error() {
                Some(libc::EAGAIN | libc::EFAULT) => return Err(error),
                _ if errors == 2 => return Err(error),
                _ => errors += 1,
            },
        }
    }
}

/// Reads the control message of the next error queue entry. Returns its length; `None` when the queue is empty.
pub(super) fn receive_error(socket: &Socket, control: &mut [u8; ERROR_LEN]) -> Option<usize> {
    /// Meets the alignment that control messages require.
    #[repr(C, align(8))]
    struct Aligned([u8; ERROR_LEN]);
    let fd = socket.as_fd().as_raw_fd();
    let mut aligned = Aligned([0; ERROR_LEN]);
    loop {
        // SAFETY: as in `sending`.
        let mut header = unsafe { std::mem::zeroed::<libc::msghdr>() };
        header.msg_control = (&raw mut aligned).cast();
        header.msg_controllen = ERROR_LEN;
        // SAFETY: the header refers only to the control buffer, which outlives the call and is writable for its length.
        let got =
            check(unsafe { libc::recvmsg(fd, &raw mut header, libc::MSG_ERRQUEUE | libc::MSG_DONTWAIT) });
        match got {
            Ok(_) => {
                *control = aligned.0;
                return Some(header.msg_controllen.min(ERROR_LEN));
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return None,
        }
    }
}
