//! A mock driver against the device: frames pass unchanged, and attacks are refused.

mod hostile;
mod logging;
mod traffic;

use std::collections::HashMap;

use super::mock::{GUEST_BASE, MockMemory, MockRing, USER_BASE, bytes_of};
use super::net::{BUFFERS_MAX, Format, Giver, LEGACY_HDR_LEN, Owner, TakenChains, take};
use super::split::needs_event;
use super::*;
use crate::frame::{Batch, DropSink, FRAME_MAX, NetworkId, PortId, Segment, Selection};
use crate::stats::{DropReason, PortStats};
use crate::wire::offload::{Accepts, F_DATA_VALID, F_NEEDS_CSUM, GSO_TCPV4, Offload};

const SIZE: u16 = 16;
/// Guest address of the first buffer, behind all rings of the tests.
const ARENA: u64 = GUEST_BASE + 0x4000;
/// Bytes of the arena per chain.
const SLOT: u64 = 0x1_4000;
const MODERN: Format = Format { header_len: 12, mergeable: true, accepts: Accepts::ALL };

/// The driver's and the device's side of one ring.
struct Pair {
    mock: MockMemory,
    driver: MockRing,
    ring: Ring,
    stats: PortStats,
    batch: Batch,
    taken: TakenChains,
    giver: Giver,
    slots: u64,
}

impl Pair {
    fn new(start: u16, event_idx: bool) -> Pair {
        let mock = MockMemory::new(0x4000 + SLOT * 64);
        let driver = MockRing::new(&mock, GUEST_BASE, SIZE, start);
        let ring = Ring::new(mock.map(), &driver.config(event_idx, true), None).unwrap();
        let (batch, taken, giver) = (Batch::new(), TakenChains::default(), Giver::default());
        Pair { mock, driver, ring, stats: PortStats::default(), batch, taken, giver, slots: 0 }
    }

    /// Guest address for the next chain's buffers; reused after 64 chains.
    fn slot(&mut self) -> u64 {
        self.slots += 1;
        ARENA + self.slots % 64 * SLOT
    }

    /// Adds `bytes`, split at `cuts`, as one chain.
    fn send(&mut self, bytes: &[u8], cuts: &[usize], indirect: bool) -> Option<u16> {
        let slot = self.slot();
        let mut at = slot + if indirect { 0x1000 } else { 0 };
        let mut chain = vec![];
        let cuts: Vec<usize> = [0].iter().chain(cuts).copied().chain([bytes.len()]).collect();
        for pair in cuts.windows(2) {
            let part = &bytes[pair[0]..pair[1]];
            self.mock.write(at, part);
            // The address of an empty buffer is ignored.
            let addr = if part.is_empty() { u64::MAX } else { at };
            chain.push((addr, part.len() as u32, 0));
            at += part.len() as u64;
        }
        if indirect {
            let len = 16 * chain.len() as u32;
            table(&self.mock, slot, &chain);
            chain = vec![(slot, len, DESC_INDIRECT | DESC_WRITE)];
        }
        self.driver.add(&self.mock, &chain)
    }

    fn take(&mut self, format: &Format) -> Result<usize, RingError> {
        self.driver.publish(&self.mock);
        self.batch.clear();
        let owner = Owner {
            port: PortId(3),
            network: NetworkId::DEFAULT,
            mtu: 9000,
            stats: &self.stats,
            format: *format,
        };
        take(&mut self.ring, &mut self.taken, &owner, &mut self.batch, &mut DropSink::new())
    }

    fn frames(&self) -> Vec<Vec<u8>> {
        let copy = |frame| {
            let mut bytes = vec![0; FRAME_MAX];
            let len = self.batch.copy_to(frame, &mut bytes);
            bytes.truncate(len);
            bytes
        };
        self.batch.frames().iter().map(copy).collect()
    }

    /// Takes and returns one transmit chain of arbitrary descriptors. Returns the drop reason that was counted.
    fn refused_as(&mut self, chain: &[(u64, u32, u16)]) -> Option<DropReason> {
        let count = |s: &PortStats| DropReason::ALL.iter().map(|r| s.drops(*r)).collect::<Vec<_>>();
        let before = count(&self.stats);
        let head = self.driver.add(&self.mock, chain).unwrap();
        assert_eq!(self.take(&MODERN), Ok(1));
        let empty = self.batch.is_empty();
        self.taken.give_back(&mut self.ring);
        assert_eq!(self.driver.collect(&self.mock), Some((head, 0)));
        let after = count(&self.stats);
        let reason =
            DropReason::ALL.iter().enumerate().find(|(i, _)| before[*i] != after[*i]).map(|(_, r)| *r);
        assert_eq!(empty, reason.is_some());
        reason
    }

    fn give(&mut self, format: &Format, frames: &[(Vec<u8>, Offload)]) -> Result<(), RingError> {
        self.driver.publish(&self.mock);
        self.batch.clear();
        for (bytes, offload) in frames {
            let mut builder = self.batch.begin();
            // SAFETY: `frames` outlives the batch's use below, and no code writes to it.
            unsafe { builder.push_stable(Segment::new(bytes.as_ptr(), bytes.len())) };
            builder.finish(PortId(0), NetworkId::DEFAULT, *offload, 0).unwrap();
        }
        let which: Vec<u16> = (0..frames.len() as u16).collect();
        let owner = Owner {
            port: PortId(3),
            network: NetworkId::DEFAULT,
            mtu: 9000,
            stats: &self.stats,
            format: *format,
        };
        let result = self.giver.give(
            &mut self.ring,
            &owner,
            Selection { batch: &self.batch, which: &which },
            &mut DropSink::new(),
        );
        self.ring.publish();
        self.batch.clear();
        result
    }
}

fn table(mock: &MockMemory, at: u64, chain: &[(u64, u32, u16)]) {
    for (i, (addr, len, flags)) in chain.iter().enumerate() {
        let last = i + 1 == chain.len();
        let flags = flags | if last { 0 } else { DESC_NEXT };
        let descriptor = Descriptor { addr: *addr, len: *len, flags, next: i as u16 + 1 };
        mock.write(at + 16 * i as u64, &bytes_of(descriptor));
    }
}

/// Contents of a receive chain of two buffers. `buffers` holds, per head, the slot and the size of the first buffer.
fn contents(mock: &MockMemory, buffers: &HashMap<u16, (u64, usize)>, (head, len): (u16, u32)) -> Vec<u8> {
    let (slot, room) = buffers[&head];
    let (len, part) = (len as usize, (len as usize).min(room));
    [mock.read(slot + 0x1000, part), mock.read(slot + 0x8000, len - part)].concat()
}

fn bytes(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 7 + i / 256 + seed * 31) as u8).collect()
}

/// A frame after an all-zero header of `header_len` bytes.
fn with_header(frame: &[u8], header_len: usize) -> Vec<u8> {
    [&vec![0; header_len], frame].concat()
}
