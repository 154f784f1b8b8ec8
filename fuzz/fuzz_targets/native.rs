//! Native datagrams, and their reassembly, from arbitrary bytes.
//!
//! Input: records of a 16-bit length in network byte order and a datagram of that many bytes, or of the remaining bytes if there
//! are fewer. A length of 0xff00 or more ends the burst; its low byte is the time that passes, in milliseconds.
//!
//! Invariants: no panic; every piece of a complete frame is the payload of a fragment sent for this index of this frame; all
//! pieces but the last have the same size; memory stays within the budget, and none remains in use after the reassembly timeout;
//! refused frames leave the batch unchanged.
#![no_main]

use std::collections::HashMap;
use std::sync::Arc;

use libfuzzer_sys::fuzz_target;
use vnet::frame::{Batch, FRAME_MAX, NetworkId, PortId, SEGMENTS_MAX, Segment};
use vnet::link::ReassemblyBudget;
use vnet::link::native::reassembly::{FRAGMENTS_MAX, Reassembly, TIMEOUT_MS, Whole};
use vnet::stats::{DropReason, PortStats};
use vnet::wire::ethernet::HEADER_LEN;
use vnet::wire::native::{Bundle, ENTRY_LEN, Header, Kind, metadata};
use vnet::wire::offload::{Offload, WIRE_LEN};

/// Small enough for inputs to reach it.
const BUDGET: usize = 16 << 10;

/// Payloads of the fragments sent so far, by frame id and index.
type Sent = HashMap<(u64, u16), Vec<Vec<u8>>>;

fuzz_target!(|data: &[u8]| {
    let stats: Arc<PortStats> = Arc::default();
    let (link, host) = (Arc::new(ReassemblyBudget::new(BUDGET)), Arc::new(ReassemblyBudget::new(BUDGET)));
    let mut reassembly = Reassembly::new(stats.clone(), link.clone(), host.clone(), 0);
    let mut batch = Batch::new();
    let mut burst = Vec::new();
    let mut sent = Sent::new();
    let (mut now_ms, mut complete) = (0, 0);
    let mut rest = data;
    while let Some((word, tail)) = rest.split_first_chunk::<2>() {
        let word = u16::from_be_bytes(*word);
        rest = tail;
        if word >= 0xff00 {
            reassembly.settle(&burst);
            burst.fill(0xee);
            burst.clear();
            now_ms += u64::from(word & 0xff);
            reassembly.tick(now_ms);
            assert!(link.used() <= BUDGET && host.used() == link.used());
            continue;
        }
        let (datagram, tail) = rest.split_at(usize::from(word).min(rest.len()));
        rest = tail;
        let Ok((header, payload)) = Header::parse(datagram) else { continue };
        assert_eq!(Header::parse(&header.to_bytes()).map(|(again, _)| again), Ok(header));
        match header.kind {
            Kind::Frame if header.is_whole() => {
                if let Some((offload, frame)) = metadata(payload, header.offload) {
                    add(&mut batch, &[frame], offload);
                }
            }
            Kind::Frame => {
                let key = (header.frame_id(), header.index);
                sent.entry(key).or_default().push(payload.to_vec());
                let at = burst.len();
                burst.extend_from_slice(payload);
                if let Some(whole) = reassembly.accept(&header, at..burst.len(), now_ms) {
                    check(&whole, &header, &burst, &sent, &mut batch);
                    reassembly.recycle(whole);
                    complete += 1;
                }
            }
            Kind::Bundle => {
                if let Some(bundle) = Bundle::checked(payload, header.offload) {
                    let overhead = ENTRY_LEN + if header.offload { WIRE_LEN } else { 0 };
                    let mut total = 0;
                    for (offload, frame) in bundle {
                        assert!(frame.len() >= HEADER_LEN);
                        total += overhead + frame.len();
                        add(&mut batch, &[frame], offload);
                    }
                    assert_eq!(total, payload.len());
                }
            }
            Kind::Probe | Kind::ProbeReply | Kind::Keepalive => {}
        }
    }
    reassembly.settle(&burst);
    reassembly.tick(now_ms + TIMEOUT_MS);
    assert_eq!((reassembly.incomplete(), link.used(), host.used()), (0, 0, 0));
    assert_eq!(stats.in_frames.get(), stats.drops(DropReason::Reassembly));
    assert!(complete + stats.in_frames.get() <= sent.values().map(|all| all.len() as u64).sum());
});

/// Checks a complete frame against the fragments sent.
fn check(whole: &Whole, header: &Header, burst: &[u8], sent: &Sent, batch: &mut Batch) {
    let mut pieces: Vec<&[u8]> = whole.pieces(burst).collect();
    assert!((2..=FRAGMENTS_MAX).contains(&pieces.len()));
    assert_eq!(pieces.iter().map(|piece| piece.len()).sum::<usize>(), whole.bytes());
    assert!(whole.bytes() <= FRAME_MAX + WIRE_LEN);
    let (last, full) = pieces.split_last().expect("two pieces at least");
    assert!(full.iter().all(|piece| piece.len() == full[0].len()) && last.len() <= full[0].len());
    for (index, piece) in pieces.iter().enumerate() {
        let payloads = &sent[&(header.frame_id(), index as u16)];
        assert!(payloads.iter().any(|payload| payload == piece), "a piece that was never sent");
    }
    let mut offload = Offload::default();
    if whole.offload() {
        let (found, first) = metadata(pieces[0], true).expect("metadata fits the first fragment");
        offload = found;
        pieces[0] = first;
    }
    add(batch, &pieces, offload);
}

/// Builds a frame of `pieces` like the receiver, and checks it.
fn add(batch: &mut Batch, pieces: &[&[u8]], offload: Offload) {
    batch.clear();
    let mut builder = batch.begin();
    for piece in pieces {
        // SAFETY: the batch is cleared before the memory of the pieces is reused.
        unsafe { builder.push_stable(Segment::new(piece.as_ptr(), piece.len())) };
    }
    if builder.finish(PortId(0), NetworkId::DEFAULT, offload, 0).is_ok() {
        let frame = *batch.frame(0);
        assert!(batch.segments(&frame).len() <= SEGMENTS_MAX);
        let mut bytes = vec![0; frame.len()];
        batch.copy_to(&frame, &mut bytes);
        assert_eq!(bytes, pieces.concat());
        assert_eq!(frame.offload.checked(frame.len()), Ok(frame.offload));
    } else {
        assert!(batch.is_empty());
    }
    batch.clear();
}
