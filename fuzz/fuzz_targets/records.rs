//! The stream of a peer with an open channel. Input: how many bytes arrive at a time, then steps: a length byte and so many bytes. Below 250 they
//! are a packet, in which session and number are filled in; from 250 on they are bytes of the stream as they are.
//!
//! Holds: no panic; no byte changes outside the region and the posted buffers; packets are what was sent, as long as lengths are right.
#![no_main]

#[path = "common/victim.rs"]
mod victim;

use libfuzzer_sys::fuzz_target;
use victim::Victim;
use vnet_rdma::Records;

const ANSWERS_MAX: usize = 20_000;

fuzz_target!(|data: &[u8]| {
    let mut victim = Victim::new();
    assert!(victim.engine.set_incoming_stream(victim.from, true));
    let Some((step, mut rest)) = data.split_first() else { return victim.finish() };
    let (mut stream, mut sent, mut number) = (vec![], vec![], 0xffff_f000u32);
    let mut is_right = true;
    while let Some((len, after)) = rest.split_first() {
        let (bytes, after) = after.split_at(usize::from(*len).min(after.len()));
        rest = after;
        let mut packet = bytes.to_vec();
        if *len >= 250 {
            stream.extend(packet);
            is_right = false;
            continue;
        }
        if let Some(session) = packet.get_mut(4..8) {
            session.copy_from_slice(&victim.session.to_be_bytes());
        }
        if let Some(place) = packet.get_mut(8..12) {
            place.copy_from_slice(&number.to_be_bytes());
            number = number.wrapping_add(1);
        }
        stream.extend((packet.len() as u32).to_be_bytes());
        stream.extend(&packet);
        sent.push(packet);
    }
    let (mut records, mut stream, mut now) = (Records::default(), &stream[..], 1);
    let mut sent = sent.iter();
    'connection: while !stream.is_empty() {
        let room = records.room();
        let count = room.len().min(usize::from(*step) + 1).min(stream.len());
        let (first, after) = stream.split_at(count);
        room[..count].copy_from_slice(first);
        stream = after;
        records.add(count);
        now += 400_000;
        loop {
            match records.next_packet() {
                Err(_) => break 'connection,
                Ok(None) => break,
                Ok(Some(packet)) => {
                    assert!(!is_right || sent.next().is_some_and(|sent| sent[..] == *packet));
                    if !victim.engine.receive_stream(now, victim.from, packet) {
                        break 'connection;
                    }
                }
            }
        }
        let engine = &mut victim.engine;
        engine.tick(now);
        assert!(std::iter::from_fn(|| engine.depart(now)).take(ANSWERS_MAX).count() < ANSWERS_MAX);
        while engine.poll(0).is_some() {}
    }
    victim.finish();
});
