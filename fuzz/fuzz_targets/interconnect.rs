//! Packets of the interconnect from a peer with an open channel. Input: for each packet a length byte, then the packet; session and number are
//! filled in, so that the engine gets to the body. An odd length leaves the number as it is.
//!
//! Holds: no panic; no byte changes outside the region and the posted buffers; what is sent stays bounded; the engine forgets everything
//! when its endpoint closes.
#![no_main]

#[path = "common/victim.rs"]
mod victim;

use libfuzzer_sys::fuzz_target;
use victim::Victim;

/// Packets that one packet may cause: pulls of the budget in small datagrams.
const ANSWERS_MAX: usize = 20_000;

fuzz_target!(|data: &[u8]| {
    let mut victim = Victim::new();
    let (mut rest, mut number, mut now) = (data, 0xffff_f000u32, 1);
    while let Some((len, after)) = rest.split_first() {
        let (packet, after) = after.split_at(usize::from(*len).min(after.len()));
        rest = after;
        let mut packet = packet.to_vec();
        if let Some(session) = packet.get_mut(4..8) {
            session.copy_from_slice(&victim.session.to_be_bytes());
        }
        if let Some(place) = packet.get_mut(8..12).filter(|_| len % 2 == 0) {
            place.copy_from_slice(&number.to_be_bytes());
            number = number.wrapping_add(1);
        }
        now += 400_000;
        let engine = &mut victim.engine;
        engine.receive(now, victim.from, &packet, len % 3 == 0);
        engine.tick(now);
        let answers = std::iter::from_fn(|| engine.depart(now)).take(ANSWERS_MAX).count();
        assert!(answers < ANSWERS_MAX);
        while engine.poll(0).is_some() {}
    }
    victim.finish();
});
