//! Packets of the interconnect from a peer with an open channel. Input: for each packet a length byte, then the packet; session and number are
//! filled in, so that the engine gets to the body. An odd length leaves the number as it is.
//!
//! Holds: no panic; no byte changes outside the region and the posted buffers; what is sent stays bounded; the engine forgets everything
//! when its endpoint closes.
#![no_main]

use std::net::SocketAddr;

use libfuzzer_sys::fuzz_target;
use vnet_rdma::proto::wire::{Body, Header, Hello};
use vnet_rdma::proto::{
    Access, Atomic, Change, Config, Datatype, Engine, Match, Outgoing, Peer, Receive, Shape, Span,
};

/// Each kind of memory lies between guards of this length.
const GUARD: usize = 4096;
const LEN: usize = 4096;
const KEY: u64 = 7;
/// Packets that one packet may cause: pulls of the budget in small datagrams.
const ANSWERS_MAX: usize = 20_000;

fuzz_target!(|data: &[u8]| {
    let mut memory = vec![0xa5u8; 4 * GUARD + 3 * LEN];
    let start = memory.as_mut_ptr();
    // SAFETY: inside the vector, which lives longer than the engine and is not touched while it does.
    let span = |place: usize| unsafe { Span::new(start.add(GUARD + place * (GUARD + LEN)), LEN) };
    let mut engine = Engine::new(Config::default(), 1, [1; 32]);
    engine.open(Some(0)).unwrap();
    engine.register(0, span(0), 0, Access { read: true, write: true }, Some(KEY)).unwrap();
    let from: SocketAddr = "10.0.0.2:7000".parse().unwrap();
    let hello = Hello { epoch: 5, channel: 1, session: 9, window: 1 << 20, datagram: 1472 };
    let header =
        Header { flags: 0, failures: 0, session: 0, number: 0, ack: 0, map: None, body: Body::Hello(hello) };
    engine.receive(1, from, header.encode().as_bytes(), false);
    let welcome = engine.depart(1).unwrap();
    let Some((Header { body: Body::Welcome(welcome), .. }, _)) = Header::decode(welcome.header.as_bytes())
    else {
        panic!("no welcome");
    };
    for (context, tag) in [(1, None), (2, Some((0, u64::MAX)))] {
        let matching = Match { tag, from: None };
        engine.post_receive(0, &Receive { matching, span: span(1), context, several: Some(64) }).unwrap();
    }
    for shape in [Shape::Message { tag: None }, Shape::Read { key: 3, at: 0 }, Shape::Write { key: 3, at: 0 }]
    {
        let out =
            Outgoing { shape, span: span(2), data: None, context: 3, is_buffered: false, is_quiet: false };
        engine.post(1, 0, Peer { address: from, endpoint: 1 }, &out).unwrap();
    }
    let atomic = Atomic {
        key: 3,
        at: 0,
        change: Change::Sum,
        datatype: Datatype::U64,
        count: 1,
        compare: Span::EMPTY,
        found: span(2).part(16, 8),
    };
    let (shape, operand) = (Shape::Atomic(atomic), span(2).first(8));
    let out = Outgoing { shape, span: operand, data: None, context: 4, is_buffered: false, is_quiet: false };
    engine.post(1, 0, Peer { address: from, endpoint: 1 }, &out).unwrap();
    let (mut rest, mut number, mut now) = (data, 0xffff_f000u32, 1);
    while let Some((len, after)) = rest.split_first() {
        let (packet, after) = after.split_at(usize::from(*len).min(after.len()));
        rest = after;
        let mut packet = packet.to_vec();
        if let Some(session) = packet.get_mut(4..8) {
            session.copy_from_slice(&welcome.session.to_be_bytes());
        }
        if let Some(place) = packet.get_mut(8..12).filter(|_| len % 2 == 0) {
            place.copy_from_slice(&number.to_be_bytes());
            number = number.wrapping_add(1);
        }
        now += 400_000;
        engine.receive(now, from, &packet, len % 3 == 0);
        engine.tick(now);
        let answers = std::iter::from_fn(|| engine.depart(now)).take(ANSWERS_MAX).count();
        assert!(answers < ANSWERS_MAX);
        while engine.poll(0).is_some() {}
    }
    engine.close(0);
    drop(engine);
    for place in 0..4 {
        let guard = &memory[place * (GUARD + LEN)..][..GUARD];
        assert!(guard.iter().all(|byte| *byte == 0xa5), "guard {place}");
    }
});
