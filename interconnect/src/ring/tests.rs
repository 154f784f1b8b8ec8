//! Both ends of a ring in one test, and a hostile peer.

use super::*;
use crate::proto::wire::{Body, Data, Encoded, Header};

fn pair() -> [Ring; 2] {
    let Provided { memory, bells: [a, b] } = provide().unwrap();
    [Ring::open(memory.try_clone().unwrap(), a, 0).unwrap(), Ring::open(memory, b, 1).unwrap()]
}

fn header(body: Body) -> Encoded {
    Header { flags: 0, failures: 0, session: 1, number: 2, ack: 3, map: None, body }.encode()
}

fn span(bytes: &mut [u8]) -> Span {
    // SAFETY: the tests keep the bytes, and do not access them while a ring copies.
    unsafe { Span::new(bytes.as_mut_ptr(), bytes.len()) }
}

#[test]
fn packets_of_all_lengths_arrive_in_order_across_the_end() {
    let [mut a, mut b] = pair();
    let data = header(Body::Data(Data { pull: 1, offset: 0 }));
    let mut bytes: Vec<u8> = (0..65_000usize).map(|place| (place * 7 + place / 256) as u8).collect();
    let (mut sent, mut received) = (0usize, 0usize);
    let len = |number: usize| number * 7919 % 65_001;
    while received < 400 {
        while a.send(data.as_bytes(), span(&mut bytes).first(len(sent) as u64)).unwrap() {
            sent += 1;
        }
        assert!(sent > received, "a lane takes the largest packet");
        for _ in 0..3.min(sent - received) {
            let arrived = b.receive().unwrap().unwrap();
            assert_eq!(arrived.packet, data.as_bytes());
            let mut copy = vec![];
            arrived.placed.unwrap_or(Span::EMPTY).read_to(&mut copy);
            assert!(copy == bytes[..len(received)], "packet {received}");
            b.release();
            received += 1;
        }
    }
}

#[test]
fn what_has_to_be_parsed_is_copied_first() {
    let [mut a, mut b] = pair();
    let message = header(Body::Found(crate::proto::wire::Found { op: 5 }));
    let mut bytes = *b"numbers!";
    assert!(a.send(message.as_bytes(), span(&mut bytes)).unwrap());
    let arrived = b.receive().unwrap().unwrap();
    assert_eq!((&arrived.packet[message.as_bytes().len()..], arrived.placed), (&b"numbers!"[..], None));
}

#[test]
fn the_bell_is_rung_once_for_a_sleeper_and_ends_with_the_peer() {
    let [mut a, mut b] = pair();
    let noop = header(Body::Noop);
    assert!(!b.arm() && !b.is_rung());
    for _ in 0..3 {
        assert!(a.send(noop.as_bytes(), Span::EMPTY).unwrap());
    }
    assert!(b.is_rung());
    assert!(matches!(b.hear(), Ok(Some(Word::Ring))) && !b.is_rung());
    assert!(matches!(b.hear(), Ok(None)));
    assert!(b.arm(), "packets are there: nobody may sleep");
    drop(a);
    assert!(!b.listen());
    assert!(b.receive().unwrap().is_some(), "what was sent before stays");
}

#[test]
fn impossible_positions_and_lengths_break_the_ring() {
    const DATA: usize = 2 * (64 << 10);
    // (offset in the file, word) as a peer on side 0 could write them: head 0, then the lengths of the record at 0.
    let cases: [&[(usize, u64)]; 8] = [
        &[(0, 1)],
        &[(0, 1 << 21)],
        &[(0, u64::MAX - 63)],
        &[(0, 64), (DATA, 0)],
        &[(0, 64), (DATA, 93)],
        &[(0, 64), (DATA, 16 | 1 << 32)],
        &[(0, 1 << 20), (DATA, 28 | 65_500 << 32)],
        &[(0, 1 << 20), (DATA, u64::MAX)],
    ];
    for words in cases {
        let [mut a, mut b] = pair();
        words.iter().for_each(|(at, word)| a.scribble(*at, &word.to_ne_bytes()));
        assert_eq!(b.receive().unwrap_err(), Broken, "{words:?}");
    }
    // The reader's position, for the writer: ahead of it, which it notices when its lane seems full.
    let [mut a, mut b] = pair();
    b.scribble(128, &u64::MAX.to_ne_bytes());
    let (data, mut bytes) = (header(Body::Data(Data { pull: 1, offset: 0 })), vec![0; 60_000]);
    let sent: Vec<_> = (0..20).map(|_| a.send(data.as_bytes(), span(&mut bytes))).collect();
    assert!(sent.contains(&Err(Broken)) && !sent.contains(&Ok(false)), "{sent:?}");
}

#[test]
fn only_sealed_memory_of_the_right_size_is_taken() {
    let flags = rustix::fs::MemfdFlags::CLOEXEC | rustix::fs::MemfdFlags::ALLOW_SEALING;
    let size = rustix::fs::fstat(&provide().unwrap().memory).unwrap().st_size as u64;
    let sealed = |size, seals| {
        let memory = rustix::fs::memfd_create("test", flags).unwrap();
        rustix::fs::ftruncate(&memory, size).unwrap();
        rustix::fs::fcntl_add_seals(&memory, seals).unwrap();
        Ring::open(memory, provide().unwrap().bells.into_iter().next().unwrap(), 0).is_ok()
    };
    use rustix::fs::SealFlags as Seals;
    assert!(sealed(size, Seals::SHRINK | Seals::GROW | Seals::SEAL));
    assert!(!sealed(size - 4096, Seals::SHRINK | Seals::GROW | Seals::SEAL));
    assert!(!sealed(size, Seals::GROW | Seals::SEAL), "it could shrink: SIGBUS");
    let file = std::fs::File::open("/proc/self/exe").unwrap();
    assert!(Ring::open(file.into(), provide().unwrap().bells.into_iter().next().unwrap(), 0).is_err());
}

#[test]
fn words_and_memory_pass_by_the_bell() {
    let [a, mut b] = pair();
    a.say(&Word::Ask(7, 9));
    a.say(&Word::Refuse(10));
    a.say(&Word::Grant(11, create(5000).unwrap()));
    assert!(matches!(b.hear(), Ok(Some(Word::Ask(7, 9)))));
    assert!(matches!(b.hear(), Ok(Some(Word::Refuse(10)))));
    let Ok(Some(Word::Grant(11, memory))) = b.hear() else { panic!("no memory") };
    let (view, mut bytes) = (View::new(memory).ok().unwrap(), [7; 100]);
    assert!(view.write(4900, span(&mut bytes)) && !view.write(4901, span(&mut bytes)));
    // A file whose size may change is not mapped: SIGBUS.
    a.say(&Word::Grant(11, std::fs::File::open("/proc/self/exe").unwrap().into()));
    let Ok(Some(Word::Grant(11, memory))) = b.hear() else { panic!("no file") };
    assert!(View::new(memory).is_err());
}

#[test]
fn nonsense_by_the_bell_ends_the_ring() {
    use rustix::net::{SendFlags, send};
    let words: [&[u8]; 5] = [&[9], &[1, 1], &[2, 0, 0, 1], &[3, 1, 2, 3, 4, 5, 6, 7, 8], &[4]];
    for word in words {
        let [a, mut b] = pair();
        send(a.bell(), word, SendFlags::empty()).unwrap();
        assert!(b.hear().is_err(), "{word:?}");
    }
}
