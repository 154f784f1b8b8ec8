//! Peers that break the protocol's rules.

use super::stranger::{Stranger, Victim};
use crate::proto::wire::{Body, Data, End, Subject};
use crate::proto::{Config, Kind, Outgoing, Shape, Status};

fn end(number: u32, status: Status) -> Body {
    Body::End(End { subject: Subject::Operation, status, to: 0, number, seq: 0 })
}

#[test]
fn a_read_that_ended_reaches_its_memory_no_more() {
    for status in [Status::Success, Status::BadKey] {
        let mut victim = Victim::new(Config::default());
        let mut stranger = Stranger::meet(&mut victim, 1);
        let (shape, span) = (Shape::Read { key: 3, at: 0 }, victim.span(64));
        let out = Outgoing { shape, span, data: None, context: 7, is_buffered: false, is_quiet: false };
        victim.engine.post(victim.now, 0, stranger.peer(), &out).unwrap();
        let pull = victim.sent().into_iter().find_map(|(_, header)| match header.body {
            Body::Pull(pull) => Some(pull.pull),
            _ => None,
        });
        // The operation's number is the first one.
        stranger.send(&mut victim, 0, end(0, status), &[]);
        let done = victim.poll().unwrap();
        let expected = if status == Status::Success { Status::Protocol } else { status };
        assert_eq!((done.kind, done.status, done.context), (Kind::Read, expected, 7));
        let late = Body::Data(Data { pull: pull.unwrap(), offset: 0 });
        stranger.send(&mut victim, 0, late, b"written by the peer");
        assert!(victim.memory.iter().all(|byte| *byte == b'.'), "{status:?}");
    }
}
