//! Frames from a guest's transmitq (virtio 1.2 section 5.1.6.2): chains become frames in place and are returned in order.

use std::collections::VecDeque;
use std::sync::Arc;

use super::format::Owner;
use crate::frame::{BATCH_MAX, Batch, DropSink, FRAME_MAX, Holds, Segment};
use crate::interface::virtqueue::chain::{Buffer, CHAIN_MAX};
use crate::interface::virtqueue::split::{Ring, RingError};
use crate::stats::DropReason;
use crate::wire::offload::{F_NEEDS_CSUM, Offload, VIRTIO_NET_HDR_LEN};

/// The chains of a transmitq between [`take`] and [`TakenChains::give_back`], or longer while their memory is held (see
/// [`Holds`]). Belongs to one ring.
#[derive(Debug)]
pub struct TakenChains {
    /// Heads of the last burst.
    heads: [u16; BATCH_MAX],
    count: usize,
    /// Heads of earlier bursts, oldest first: held, or queued behind a held one.
    kept: VecDeque<u16>,
    /// One slot per entry of the ring.
    holds: Arc<Holds>,
    /// Scratch memory for the buffers of one chain.
    buffers: Vec<Buffer>,
}

impl Default for TakenChains {
    fn default() -> TakenChains {
        TakenChains {
            heads: [0; BATCH_MAX],
            count: 0,
            kept: VecDeque::new(),
            holds: Holds::new(0),
            buffers: Vec::with_capacity(CHAIN_MAX),
        }
    }
}

impl TakenChains {
    /// Returns the burst's chains to the driver in order, up to the first one whose memory is held. Returns true if the driver wants
    /// to be notified.
    pub fn give_back(&mut self, ring: &mut Ring) -> bool {
        let heads = &self.heads[..std::mem::take(&mut self.count)];
        if self.kept.is_empty() && !self.holds.any() {
            heads.iter().for_each(|index| ring.complete(*index, 0));
            return ring.publish();
        }
        self.kept.extend(heads);
        self.reclaim(ring)
    }

    /// Returns kept chains whose memory is no longer held, in order. Returns true if the driver wants to be notified.
    pub fn reclaim(&mut self, ring: &mut Ring) -> bool {
        while let Some(index) = self.kept.front()
            && !self.holds.is_held(slot(ring, ring.completed()))
        {
            ring.complete(*index, 0);
            self.kept.pop_front();
        }
        ring.publish()
    }

    /// True while chains are not returned because of a hold.
    pub fn is_held(&self) -> bool {
        !self.kept.is_empty()
    }

    /// Allocates memory for the size of `ring`, which bounds the number of chains kept.
    fn fit(&mut self, ring: &Ring) {
        if self.holds.len() != usize::from(ring.size()) {
            self.holds = Holds::new(ring.size());
            self.kept = VecDeque::with_capacity(usize::from(ring.size()));
        }
    }
}

/// The hold slot of the chain at `position` of the available ring.
#[inline]
fn slot(ring: &Ring, position: u16) -> u16 {
    position & (ring.size() - 1)
}

/// Fills `batch` with frames waiting in a transmitq, at most one batch and its budget. Returns the number of chains taken, including refused
/// ones; [`TakenChains::give_back`] must return them after the frames are processed.
///
/// The frames point into guest memory, which `ring` keeps mapped and which can be held. Chains taken and kept never exceed the
/// queue size, whatever the guest writes.
///
/// # Errors
/// The ring is broken; frames taken before the error remain in the batch.
pub fn take(
    ring: &mut Ring,
    taken: &mut TakenChains,
    owner: &Owner<'_>,
    batch: &mut Batch,
    drops: &mut DropSink,
) -> Result<usize, RingError> {
    taken.fit(ring);
    let count = ring.ensure(batch.limit().min(usize::from(ring.size()) - taken.kept.len()))?;
    if count != 0 {
        batch.set_holds(taken.holds.clone());
    }
    // Chains return in order. If half the ring already waits for a slow device, later frames are copied instead of held.
    let holdable = taken.kept.len() < usize::from(ring.size()) / 2;
    let (mut bytes, mut broken) = (0, None);
    for _ in 0..count {
        if batch.is_spent() {
            break;
        }
        let slot = slot(ring, ring.position());
        let head = match ring.next() {
            Ok(Some(head)) => head,
            Ok(None) => break,
            // Frames taken before the error are counted, because they are still forwarded.
            Err(error) => {
                broken = Some(error);
                break;
            }
        };
        taken.heads[taken.count] = head.index;
        taken.count += 1;
        let single = head.single_readable();
        let result = match single {
            Some(buffer) => push_frame(std::slice::from_ref(&buffer), owner, batch),
            None => {
                taken.buffers.clear();
                match ring.walk(&head, &mut taken.buffers) {
                    Ok(readable) => push_frame(&taken.buffers[..readable], owner, batch),
                    Err(error) => {
                        batch.charge_refused(CHAIN_MAX);
                        tracing::debug!(%error, port = owner.port.0, "chain refused");
                        Err((DropReason::BadChain, 0))
                    }
                }
            }
        };
        match result {
            Ok(len) => {
                if holdable {
                    batch.set_slot(slot);
                }
                bytes += len as u64;
            }
            Err((reason, len)) => drops.refused(owner.stats, owner.port, reason, len),
        }
    }
    ring.read_ahead(count);
    owner.stats.in_frames.add(batch.len() as u64);
    owner.stats.in_bytes.add(bytes);
    broken.map_or(Ok(taken.count), Err)
}

/// Appends the readable buffers of chains that wait in a transmitq, of each chain as much as a frame may have. The chains stay in the ring.
/// Returns their number, at most `max`.
pub fn look_ahead(ring: &mut Ring, max: usize, buffers: &mut Vec<Buffer>) -> usize {
    let mut looked = 0;
    // Whoever takes from a broken ring finds it broken.
    for _ in 0..ring.ensure(max).unwrap_or(0) {
        let Ok(Some(head)) = ring.next() else { break };
        looked += 1;
        let before = buffers.len();
        match head.single_readable() {
            Some(buffer) => buffers.push(buffer),
            // A chain without readable buffers, or a malformed one, has no frame.
            None => {
                let readable = ring.walk(&head, buffers).unwrap_or(0);
                buffers.truncate(before + readable);
            }
        }
        let mut left = VIRTIO_NET_HDR_LEN + FRAME_MAX;
        for buffer in &mut buffers[before..] {
            buffer.len = buffer.len.min(left);
            left -= buffer.len;
        }
    }
    ring.put_back(looked as u16);
    looked
}

/// Parses the virtio-net header and adds the frame behind it to the batch. Returns the frame's length in bytes, or the reason for
/// refusing the frame, with its length.
#[inline]
fn push_frame(buffers: &[Buffer], owner: &Owner<'_>, batch: &mut Batch) -> Result<usize, (DropReason, u64)> {
    let mut header = [0; VIRTIO_NET_HDR_LEN];
    let (mut next, mut offset) =
        read_header(buffers, &mut header, owner.format.header_len).ok_or((DropReason::BadChain, 0))?;
    let mut offload = Offload::from_virtio(&header);
    // Drivers must not set DATA_VALID (virtio 1.2 section 5.1.6.2).
    offload.flags &= F_NEEDS_CSUM;
    let mut builder = batch.begin();
    while let Some(buffer) = buffers.get(next) {
        let segment = Segment::new(buffer.ptr.wrapping_add(offset), buffer.len - offset);
        // SAFETY: the buffer lies in guest memory that the ring keeps mapped; the queue stays locked until the batch is cleared,
        // and a change of the memory takes that lock.
        unsafe { builder.push(segment) };
        offset = 0;
        next += 1;
    }
    let len = builder.len();
    match builder.finish(owner.port, owner.network, offload, 0) {
        Ok(()) => Ok(len),
        Err(error) => {
            batch.charge_refused(buffers.len());
            Err((error.into(), len as u64))
        }
    }
}

/// Copies the virtio-net header once, even if it is spread over buffers. Returns the index of the buffer and the offset where the
/// frame begins; `None` if the chain is shorter than the header.
#[inline]
fn read_header(
    buffers: &[Buffer],
    header: &mut [u8; VIRTIO_NET_HDR_LEN],
    header_len: usize,
) -> Option<(usize, usize)> {
    if header_len == VIRTIO_NET_HDR_LEN
        && let Some(first) = buffers.first()
        && first.len >= VIRTIO_NET_HDR_LEN
    {
        // SAFETY: the buffer has at least VIRTIO_NET_HDR_LEN bytes; the read needs no alignment.
        *header = unsafe { first.ptr.cast::<[u8; VIRTIO_NET_HDR_LEN]>().read_unaligned() };
        return Some((0, VIRTIO_NET_HDR_LEN));
    }
    gather_header(buffers, &mut header[..header_len])
}

/// Copies the header in the general case: legacy headers, and headers spread over several buffers.
fn gather_header(buffers: &[Buffer], header: &mut [u8]) -> Option<(usize, usize)> {
    let mut at = 0;
    for (i, buffer) in buffers.iter().enumerate() {
        let part = buffer.len.min(header.len() - at);
        // SAFETY: `part` bytes lie inside the buffer and inside `header`, which this process owns.
        unsafe { std::ptr::copy_nonoverlapping(buffer.ptr, header[at..].as_mut_ptr(), part) };
        at += part;
        if at == header.len() {
            return Some((i, part));
        }
    }
    None
}
