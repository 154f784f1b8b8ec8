//! Tests of encoding and decoding packets.

use crate::proto::Status;
use crate::proto::wire::*;
use crate::proto::{Change, Datatype};

fn bodies() -> Vec<Body> {
    let hello = Hello { epoch: u64::MAX - 1, channel: 2, session: 3, window: 4, datagram: 5 };
    let end = End { subject: Subject::NotReady, status: Status::NotReady, to: 1, number: 2, seq: 3 };
    let (change, datatype) = (Change::MaskedSwap, Datatype::F64);
    let atomic = Atomic { to: 1, from: 2, op: 3, change, datatype, count: 4, key: 5, at: 6 };
    vec![
        Body::Hello(hello),
        Body::Welcome(hello),
        Body::Reset,
        Body::Ack,
        Body::Noop,
        Body::Message(Message { to: 1, from: 2, op: 3, seq: 4, total: 5, offset: 6, tag: 7, data: 8 }),
        Body::Write(Write { to: 1, from: 2, op: 3, seq: 4, behind: 5, key: 6, at: 7, data: 8 }),
        Body::Offer(Offer { to: 1, from: 2, op: 3, seq: 4, total: 5, tag: 6, at: 7, data: 8 }),
        Body::Pull(Pull { to: 1, pull: 2, len: 3, source: 4, at: 5, offset: 6 }),
        Body::Data(Data { pull: 1, offset: 2 }),
        Body::End(end),
        Body::Credit(Credit { to: 1, limit: 2 }),
        Body::Atomic(atomic),
        Body::Found(Found { op: 1 }),
        Body::Placed(Write { to: 1, from: 2, op: 3, seq: 4, behind: 5, key: 6, at: 7, data: 8 }),
        Body::Invite(Invite { name: [1; 16], secret: [2; 16] }),
    ]
}

#[test]
fn what_is_written_is_read() {
    for body in bodies() {
        for map in [None, Some([1, 2, 3, u64::MAX])] {
            let header =
                Header { flags: flags::DATA, failures: 7, session: 9, number: 10, ack: 11, map, body };
            let encoded = header.encode();
            assert_eq!(encoded.as_bytes().len(), Header::len(&body, map.is_some()), "{body:?}");
            assert_eq!(Header::decode(encoded.as_bytes()), Some((header, &[][..])));
            for short in 0..encoded.as_bytes().len() {
                assert_eq!(Header::decode(&encoded.as_bytes()[..short]), None, "{body:?} of {short} bytes");
            }
            let mut longer = encoded.as_bytes().to_vec();
            longer.push(77);
            assert_eq!(Header::decode(&longer).is_some(), body.carries());
        }
    }
}

#[test]
fn others_versions_and_kinds_are_refused() {
    let header = Header { flags: 0, failures: 0, session: 1, number: 2, ack: 3, map: None, body: Body::Noop };
    for (place, value) in [(0, 0x24), (0, 0x04), (0, 0x1e), (0, 0x1f)] {
        let mut bytes = header.encode().as_bytes().to_vec();
        bytes[place] = value;
        assert_eq!(Header::decode(&bytes), None);
    }
}

#[test]
fn numbers_are_expanded_to_the_nearest() {
    for reference in [0x1_0000_0005u64, 0xffff_fff0, 0x1_7fff_ffff] {
        for step in [-1000i64, -1, 0, 1, 1000] {
            let number = reference.wrapping_add_signed(step);
            assert_eq!(expand(reference, number as u32), number);
        }
    }
}
