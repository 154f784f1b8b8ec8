//! Writes frames with virtio-net headers to a TAP queue or a packet socket, one `writev` per frame.

use std::io;
use std::os::fd::AsRawFd;

use crate::frame::{SEGMENTS_MAX, Segment};
use crate::wire::offload::Offload;

/// The iovec of one frame: its virtio-net header and its segments.
pub(super) struct FrameWriter {
    /// Size of the virtio-net header in bytes: 12, or 10 without `num_buffers`.
    header_len: usize,
    vectors: [libc::iovec; 1 + SEGMENTS_MAX],
}

impl FrameWriter {
    pub(super) fn new(header_len: usize) -> FrameWriter {
        let empty = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        FrameWriter { header_len, vectors: [empty; 1 + SEGMENTS_MAX] }
    }

    /// Writes one frame of at most `SEGMENTS_MAX` segments to `file`.
    ///
    /// # Errors
    /// The kernel's error; never `EINTR`.
    pub(super) fn write(
        &mut self,
        file: &impl AsRawFd,
        offload: &Offload,
        segments: &[Segment],
    ) -> io::Result<()> {
        let header = offload.to_virtio(0);
        let header = &header[..self.header_len];
        let vectors = &mut self.vectors[..=segments.len()];
        vectors[0] = libc::iovec { iov_base: header.as_ptr().cast_mut().cast(), iov_len: header.len() };
        for (vector, segment) in vectors[1..].iter_mut().zip(segments) {
            *vector = libc::iovec { iov_base: segment.as_ptr().cast_mut().cast(), iov_len: segment.len() };
        }
        loop {
            // SAFETY: all vectors are set above; the header is a local variable, and segments are readable by the contract of
            // their creator. The kernel only reads them.
            let written =
                unsafe { libc::writev(file.as_raw_fd(), vectors.as_ptr(), vectors.len() as libc::c_int) };
            if written >= 0 {
                return Ok(());
            }
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
        }
    }
}
