//! Reading a frame piece by piece.

use super::Segment;

/// A cursor that copies a frame piece by piece.
pub struct Reader<'a> {
    segments: &'a [Segment],
    /// Number of bytes of the first remaining segment that are already read.
    offset: usize,
}

impl<'a> Reader<'a> {
    /// Begins with the first of a frame's segments.
    #[inline]
    pub(super) fn new(segments: &'a [Segment]) -> Reader<'a> {
        Reader { segments, offset: 0 }
    }

    /// Copies the frame's next bytes to `to`.
    ///
    /// # Panics
    /// When the frame has fewer bytes left.
    #[inline]
    pub fn read(&mut self, mut to: &mut [u8]) {
        while !to.is_empty() {
            let part = self.segments[0].slice(self.offset, to.len());
            let (now, later) = std::mem::take(&mut to).split_at_mut(part.len);
            // SAFETY: the segment is readable for its length until the batch, which `self` borrows, is cleared (contract of
            // `Builder::push`), and `now` is an exclusive slice of the same length, so the two cannot overlap.
            unsafe { std::ptr::copy_nonoverlapping(part.base, now.as_mut_ptr(), part.len) };
            self.skip(part.len);
            to = later;
        }
    }

    /// Skips the next `len` bytes.
    ///
    /// # Panics
    /// When the frame has fewer bytes left.
    #[inline]
    pub fn skip(&mut self, len: usize) {
        self.offset += len;
        while let [segment, rest @ ..] = self.segments
            && self.offset >= segment.len
        {
            self.offset -= segment.len;
            self.segments = rest;
        }
        assert!(!self.segments.is_empty() || self.offset == 0, "read past the end of the frame");
    }
}
