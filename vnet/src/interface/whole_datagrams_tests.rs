//! Tests of [`Datagrams`]: a queue that loses frames, and one that does not.

use super::*;
use crate::frame::{NetworkId, PortId};

const ORIGIN: Origin = Origin { port: PortId(1), network: NetworkId::DEFAULT };
/// Payload of a fragment at MTU 1500, and fragments of a datagram of 64 000 bytes.
const PAYLOAD: usize = 1480;
const FRAGMENTS: usize = 44;

/// Fragment `number` of the datagram `id`, in an Ethernet frame.
fn fragment(id: u16, number: usize) -> Vec<u8> {
    let mut frame = vec![2; 12];
    frame.extend([8, 0, 0x45, 0]);
    frame.extend(((20 + PAYLOAD) as u16).to_be_bytes());
    frame.extend(id.to_be_bytes());
    let more = if number + 1 < FRAGMENTS { 0x2000 } else { 0 };
    frame.extend((more | (number * PAYLOAD / 8) as u16).to_be_bytes());
    frame.extend([64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
    frame.resize(14 + 20 + PAYLOAD, id as u8);
    frame
}

/// A queue, read as a TAP's is.
#[derive(Default)]
struct Queue {
    datagrams: Datagrams,
    passed: Vec<Vec<u8>>,
    dropped: usize,
}

impl Queue {
    /// Takes turns until all of `frames` are read; finds the queue empty after the last.
    fn take(&mut self, frames: &[Vec<u8>]) {
        let mut frames = frames.iter();
        let mut empty = false;
        while !empty {
            let mut batch = Batch::new();
            self.datagrams.begin(&mut batch, ORIGIN);
            while !batch.is_full() {
                let Some(frame) = frames.next() else {
                    empty = true;
                    break;
                };
                let whole = VIRTIO_NET_HDR_LEN + frame.len();
                let Some(room) = batch.spare(whole) else { panic!("no room") };
                room[VIRTIO_NET_HDR_LEN..whole].copy_from_slice(frame);
                batch.push_spare(VIRTIO_NET_HDR_LEN, whole, ORIGIN, Offload::default()).unwrap();
                self.datagrams.read(&batch);
            }
            self.datagrams.end(&mut batch, empty, |_| self.dropped += 1);
            for frame in batch.frames() {
                let mut bytes = vec![];
                batch.append_to(frame, usize::MAX, &mut bytes);
                self.passed.push(bytes);
            }
        }
        assert!(self.datagrams.held.is_empty(), "nothing waits behind an empty queue");
    }
}

/// Frames that are no fragments.
fn others(count: usize) -> Vec<Vec<u8>> {
    vec![vec![2; 60]; count]
}

fn datagrams(ids: std::ops::Range<u16>) -> Vec<Vec<u8>> {
    ids.flat_map(|id| (0..FRAGMENTS).map(move |number| fragment(id, number))).collect()
}

#[test]
fn a_burst_that_fits_passes_unchanged() {
    let mut queue = Queue::default();
    let burst = datagrams(0..64);
    queue.take(&burst);
    assert_eq!(queue.passed.len(), burst.len());
    assert!(queue.passed == burst, "in order");
    assert_eq!(queue.dropped, 0);
}

#[test]
fn only_whole_datagrams_pass_a_queue_that_loses() {
    for gap in [1, 3, 7, 45, 64, 100] {
        let mut queue = Queue::default();
        // Behind a backlog, one frame is lost after each `gap`.
        let mut frames = others(BACKLOG as usize + 1);
        let sent = datagrams(0..100);
        frames.extend(
            sent.iter().enumerate().filter(|(at, _)| at % (gap + 1) != gap).map(|(_, frame)| frame.clone()),
        );
        queue.take(&frames);
        assert_eq!(queue.passed.len() + queue.dropped, frames.len(), "gap {gap}");
        let passed = &queue.passed[BACKLOG as usize + 1..];
        let whole = passed.iter().filter(|frame| {
            let id = frame[18..20].to_vec();
            passed.iter().filter(|other| other[18..20] == id[..]).count() == FRAGMENTS
        });
        let partial = passed.len() - whole.clone().count();
        // The first ones: until a loss shows, the ends of datagrams whose beginning is lost pass.
        assert!(partial <= 2 * FRAGMENTS, "gap {gap}: {partial} fragments of incomplete datagrams");
        let expected =
            (0..100).filter(|id| (id * FRAGMENTS..(id + 1) * FRAGMENTS).all(|at| at % (gap + 1) != gap));
        assert!(whole.count() >= FRAGMENTS * expected.count().saturating_sub(1), "gap {gap}");
    }
}

#[test]
fn an_empty_queue_keeps_nothing_back() {
    let mut queue = Queue::default();
    let mut frames = others(BACKLOG as usize + 1);
    frames.extend((0..10).map(|number| fragment(1, number)));
    queue.take(&frames);
    assert_eq!(queue.passed.len(), frames.len(), "the rest of the datagram is not sent yet");
    queue.take(&(10..FRAGMENTS).map(|number| fragment(1, number)).collect::<Vec<_>>());
    assert_eq!(queue.dropped, 0);
    // In any order, because no backlog has been found.
    queue.take(&(0..FRAGMENTS).rev().map(|number| fragment(2, number)).collect::<Vec<_>>());
    assert_eq!(queue.dropped, 0);
}

#[test]
fn datagrams_of_several_senders_mix() {
    let mut queue = Queue::default();
    let mut frames = others(BACKLOG as usize + 1);
    let backlog = frames.len();
    for number in 0..FRAGMENTS {
        frames.extend((0..CHAINS_MAX as u16).map(|id| fragment(id, number)));
    }
    queue.take(&frames);
    assert_eq!(queue.passed.len(), backlog + CHAINS_MAX * FRAGMENTS);
    assert_eq!(queue.dropped, 0);
}
