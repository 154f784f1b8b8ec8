//! An engine with memory between guards, operations under way, and an open channel to a hostile peer.

use std::net::SocketAddr;

use vnet_rdma::proto::wire::{Body, Header, Hello};
use vnet_rdma::proto::{
    Access, Atomic, Change, Config, Datatype, Engine, Match, Outgoing, Peer, Receive, Shape, Span,
};

/// Each kind of memory lies between guards of this length.
const GUARD: usize = 4096;
const LEN: usize = 4096;
const KEY: u64 = 7;

pub struct Victim {
    pub engine: Engine,
    memory: Vec<u8>,
    /// Address of the peer.
    pub from: SocketAddr,
    /// Number that the engine gave the channel.
    pub session: u32,
}

impl Victim {
    pub fn new() -> Self {
        let mut memory = vec![0xa5u8; 4 * GUARD + 3 * LEN];
        let start = memory.as_mut_ptr();
        // SAFETY: inside the vector, which lives longer than the engine and is not touched while it does.
        let span = |place: usize| unsafe { Span::new(start.add(GUARD + place * (GUARD + LEN)), LEN) };
        let mut engine = Engine::new(Config::default(), 1, [1; 32]);
        engine.open(Some(0)).unwrap();
        engine.register(0, span(0), 0, Access { read: true, write: true }, Some(KEY)).unwrap();
        let from: SocketAddr = "10.0.0.2:7000".parse().unwrap();
        let hello = Hello { epoch: 5, channel: 1, session: 9, window: 1 << 20, datagram: 1472 };
        let body = Body::Hello(hello);
        let header = Header { flags: 0, failures: 0, session: 0, number: 0, ack: 0, map: None, body };
        engine.receive(1, from, header.encode().as_bytes(), false);
        let welcome = engine.depart(1).unwrap();
        let Some((Header { body: Body::Welcome(welcome), .. }, _)) =
            Header::decode(welcome.header.as_bytes())
        else {
            panic!("no welcome");
        };
        for (context, tag) in [(1, None), (2, Some((0, u64::MAX)))] {
            let matching = Match { tag, from: None };
            let receive = Receive { matching, span: span(1), context, several: Some(64) };
            engine.post_receive(0, &receive).unwrap();
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
        for (shape, span, context) in [
            (Shape::Message { tag: None }, span(2), 3),
            (Shape::Read { key: 3, at: 0 }, span(2), 3),
            (Shape::Write { key: 3, at: 0 }, span(2), 3),
            (Shape::Atomic(atomic), span(2).first(8), 4),
        ] {
            let out = Outgoing { shape, span, data: None, context, is_buffered: false, is_quiet: false };
            engine.post(1, 0, Peer { address: from, endpoint: 1 }, &out).unwrap();
        }
        Self { engine, memory, from, session: welcome.session }
    }

    /// Ends the engine, and checks that no byte outside its memory has changed.
    pub fn finish(mut self) {
        self.engine.close(0);
        drop(self.engine);
        for place in 0..4 {
            let guard = &self.memory[place * (GUARD + LEN)..][..GUARD];
            assert!(guard.iter().all(|byte| *byte == 0xa5), "guard {place}");
        }
    }
}
