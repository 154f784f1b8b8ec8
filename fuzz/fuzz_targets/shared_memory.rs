//! Memory of a ring that a hostile peer of the same host writes, and messages between process and daemon. Input: steps of a byte each.
//! 0 to 127: the peer sends a packet with a payload of so many bytes; the length of its header and the header follow, and
//! session and number are filled in. From 128 on: the peer writes so many bytes less 128 anywhere; the place (4 bytes) and the bytes follow.
//!
//! Holds: no panic and no access outside the ring (the sanitizer, and the guards around the engine's memory); work stays bounded.
#![no_main]

#[path = "common/victim.rs"]
mod victim;

use libfuzzer_sys::fuzz_target;
use victim::Victim;
use vnet_rdma::meeting::Message;
use vnet_rdma::proto::Span;
use vnet_rdma::ring::{Provided, Ring, provide};

/// Packets that the victim takes or sends in one step.
const PACKETS_MAX: usize = 20_000;

fn take<'a>(rest: &mut &'a [u8], len: usize) -> &'a [u8] {
    let (first, after) = rest.split_at(len.min(rest.len()));
    *rest = after;
    first
}

fuzz_target!(|data: &[u8]| {
    if let Some(message) = Message::decode(data) {
        let (bytes, len) = message.encode();
        assert_eq!(&bytes[..len], data);
    }
    let mut victim = Victim::new();
    let Provided { memory, bells: [a, b] } = provide().unwrap();
    let mut peer = Ring::open(memory.try_clone().unwrap(), a, 0).unwrap();
    let mut ring = Ring::open(memory, b, 1).unwrap();
    assert!(victim.engine.set_local(victim.from, Some(700_000)));
    let (mut rest, mut number, mut now) = (data, 0xffff_f000u32, 1);
    let mut payload = [0x77u8; 128];
    // SAFETY: the array outlives the ring's use of it.
    let payload = unsafe { Span::new(payload.as_mut_ptr(), payload.len()) };
    let mut is_open = true;
    while let Some((step, after)) = rest.split_first().filter(|_| is_open) {
        rest = after;
        if *step < 128 {
            let len = take(&mut rest, 1).first().map_or(0, |len| usize::from(*len));
            let mut header = take(&mut rest, len).to_vec();
            if let Some(session) = header.get_mut(4..8) {
                session.copy_from_slice(&victim.session.to_be_bytes());
            }
            if let Some(place) = header.get_mut(8..12) {
                place.copy_from_slice(&number.to_be_bytes());
                number = number.wrapping_add(1);
            }
            // The victim may have "damaged" the peer's lane, too, because both write into one memory.
            let _ = peer.send(&header, payload.first(u64::from(*step)));
        } else {
            let place = take(&mut rest, 4).iter().fold(0usize, |place, byte| place << 8 | usize::from(*byte));
            peer.scribble(place, take(&mut rest, usize::from(*step) - 128));
        }
        now += 400_000;
        let mut packets = 0;
        is_open = loop {
            let taken = match ring.receive() {
                Ok(None) => break true,
                Ok(Some(arrived)) => {
                    victim.engine.receive_local(now, victim.from, arrived.packet, arrived.placed)
                }
                Err(_) => break false,
            };
            ring.release();
            packets += 1;
            assert!(packets < PACKETS_MAX);
            if !taken {
                break false;
            }
        };
        ring.arm();
        ring.listen();
        victim.engine.tick(now);
        let mut answers = 0;
        while let Some(packet) = victim.engine.depart(now) {
            is_open &= ring.send(packet.header.as_bytes(), packet.payload).is_ok();
            answers += 1;
            assert!(answers < PACKETS_MAX);
        }
        while victim.engine.poll(0).is_some() {}
    }
    victim.finish();
});
