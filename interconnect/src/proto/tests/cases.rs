//! Tests of one behaviour each, on a network without loss unless the test configures it.

use super::world::{CLEAN, World};
use crate::proto::{
    Atomic, Change, Config, Datatype, Kind, Match, Outgoing, Peer, PostError, Receive, Shape, Span, Status,
};

const MESSAGE: Shape = Shape::Message { tag: None };

fn world(nodes: usize) -> World {
    World::new(nodes, &Config::default(), CLEAN, 1)
}

fn fill(world: &mut World, node: usize, offset: usize, len: usize, seed: usize) {
    for (place, byte) in world.nodes[node].memory[offset..offset + len].iter_mut().enumerate() {
        *byte = (place * 31 + place / 251 + seed) as u8;
    }
}

fn same(world: &World, a: (usize, usize), b: (usize, usize), len: usize) -> bool {
    world.nodes[a.0].memory[a.1..a.1 + len] == world.nodes[b.0].memory[b.1..b.1 + len]
}

#[test]
fn every_shape_of_every_size_moves_its_bytes() {
    let mut world = world(2);
    let key = world.register(1, 1 << 20, 1 << 20, None);
    for (round, len) in
        [0, 1, 8, 1420, 1421, 1472, 5000, 16384, 16385, 300_000, 1 << 20].into_iter().enumerate()
    {
        let context = round as u64;
        fill(&mut world, 0, 0, len, round);
        let (source, target) = (world.span(0, 0, len), world.span(1, 4 << 20, len));
        world.receive(1, None, target, context);
        world.post_data(0, 1, MESSAGE, source, context, Some(77)).unwrap();
        let received = world.wait(1);
        assert_eq!(
            (received.kind, received.status, received.len),
            (Kind::Receive, Status::Success, len as u64)
        );
        assert_eq!((received.context, received.data, received.tag), (context, Some(77), None));
        assert!(same(&world, (0, 0), (1, 4 << 20), len), "message of {len}");
        assert_eq!(world.wait(0).kind, Kind::Send);

        world.post_data(0, 1, Shape::Write { key, at: 0 }, source, context, Some(5)).unwrap();
        let arrival = world.wait(1);
        assert_eq!((arrival.kind, arrival.data), (Kind::Arrival, Some(5)));
        assert!(same(&world, (0, 0), (1, 1 << 20), len), "write of {len}");
        let written = world.wait(0);
        assert_eq!((written.kind, written.status, written.len), (Kind::Write, Status::Success, len as u64));

        let back = world.span(0, 4 << 20, len);
        world.post(0, 1, Shape::Read { key, at: 0 }, back, context).unwrap();
        assert_eq!((world.wait(0).kind, world.poll(0).is_none()), (Kind::Read, true));
        assert!(same(&world, (0, 4 << 20), (1, 1 << 20), len), "read of {len}");
    }
    assert_eq!(world.nodes[0].engine.counters().resent, 0);
}

#[test]
fn peers_reach_only_what_is_registered() {
    let mut world = world(2);
    let key = world.register(1, 1 << 20, 4096, None);
    let before = world.nodes[1].memory.clone();
    fill(&mut world, 0, 0, 40_000, 3);
    let out = [
        (key, 4000, 97),
        (key, u64::MAX, 8),
        (key + 1, 0, 8),
        (key, 0, 4097),
        (key, 0, 40_000),
        (key, 4097, 1),
    ];
    for (key, at, len) in out {
        let span = world.span(0, 0, len);
        for shape in [Shape::Write { key, at }, Shape::Read { key, at }] {
            world.post(0, 1, shape, span, 9).unwrap();
            let completion = world.wait(0);
            assert_eq!((completion.status, completion.context), (Status::BadKey, 9), "{shape:?} of {len}");
        }
    }
    assert!(world.nodes[1].memory == before, "nothing was written");
    let span = world.span(0, 0, 4096);
    world.post(0, 1, Shape::Write { key, at: 0 }, span, 10).unwrap();
    assert_eq!(world.wait(0).status, Status::Success);
    assert_eq!(world.nodes[0].engine.counters().failed_channels, 0);
    assert!(world.nodes[1].engine.deregister(key));
    world.post(0, 1, Shape::Write { key, at: 0 }, span, 11).unwrap();
    assert_eq!(world.wait(0).status, Status::BadKey);
}

#[test]
fn a_new_flow_cuts_no_message_in_half() {
    const LEN: usize = 16_000;
    let mut world = world(2);
    world.nodes[1].engine.open(Some(1)).unwrap();
    for context in 0..20 {
        let span = world.span(1, context * LEN, LEN);
        world.receive(1, None, span, context as u64);
    }
    let source = world.span(0, 0, LEN);
    world.post(0, 1, MESSAGE, source, 0).unwrap();
    assert_eq!(world.wait(1).status, Status::Success);
    for context in 1..20 {
        fill(&mut world, 0, context * LEN, LEN, context);
        let span = world.span(0, context * LEN, LEN);
        world.post(0, 1, MESSAGE, span, context as u64).unwrap();
    }
    // The window is full in the middle of a message when the first operation to another endpoint is posted.
    world.step();
    let other = Peer { endpoint: 1, ..world.peer(1) };
    let out = Outgoing {
        shape: MESSAGE,
        span: source,
        data: None,
        context: 99,
        is_buffered: false,
        is_quiet: false,
    };
    world.nodes[0].engine.post(world.now, 0, other, &out).unwrap();
    for context in 1..20 {
        let received = world.wait(1);
        assert_eq!((received.status, received.context), (Status::Success, context as u64));
        assert!(same(&world, (0, context * LEN), (1, context * LEN), LEN));
    }
}

#[test]
fn a_message_whose_endpoint_closes_halfway_is_no_success() {
    let mut world = world(2);
    let span = world.span(0, 0, 16_000);
    world.post(0, 1, MESSAGE, span, 1).unwrap();
    world.network.byte_ps = 8_000_000;
    world.run(50_000_000);
    world.nodes[1].engine.close(0);
    assert_eq!(world.wait(0).status, Status::NotReady);
}

#[test]
fn memory_taken_back_during_a_transfer_ends_it() {
    let mut world = world(2);
    let key = world.register(1, 0, 4 << 20, None);
    let span = world.span(0, 0, 4 << 20);
    for shape in [Shape::Read { key, at: 0 }, Shape::Write { key, at: 0 }] {
        world.post(0, 1, shape, span, 1).unwrap();
        world.run(30_000);
        assert!(world.nodes[1].engine.deregister(key));
        let before = world.nodes[1].memory.clone();
        assert_eq!(world.wait(0).status, Status::BadKey, "{shape:?}");
        world.run(10_000_000);
        assert!(before == world.nodes[1].memory);
        world.register(1, 0, 4 << 20, Some(key));
    }
    world.post(0, 1, Shape::Write { key, at: 0 }, span, 2).unwrap();
    assert_eq!(world.wait(0).status, Status::Success, "the budget came back");
}

#[test]
fn numbers_change_in_order_and_what_was_there_comes_back() {
    let mut world = world(2);
    let key = world.register(1, 1 << 20, 4096, None);
    let number = |world: &World, node: usize, at: usize| {
        u64::from_ne_bytes(world.nodes[node].memory[at..at + 8].try_into().unwrap())
    };
    world.nodes[0].memory[..8].copy_from_slice(&3u64.to_ne_bytes());
    let base = Atomic {
        key,
        at: 16,
        change: Change::Sum,
        datatype: Datatype::U64,
        count: 1,
        compare: Span::EMPTY,
        found: None,
    };
    // More atomic operations than may wait for fetched values at once, posted behind a large write.
    let large = world.span(0, 4 << 20, 4000);
    world.post(0, 1, Shape::Write { key, at: 64 }, large, 1000).unwrap();
    let operand = world.span(0, 0, 8);
    for context in 0..600usize {
        let found = (context % 2 == 0).then(|| world.span(0, 1024 + 8 * context, 8));
        world.post(0, 1, Shape::Atomic(Atomic { found, ..base }), operand, context as u64).unwrap();
    }
    for _ in 0..601 {
        let done = world.wait(0);
        assert!(done.status == Status::Success && (done.kind == Kind::Atomic || done.context == 1000));
    }
    assert_eq!(number(&world, 1, (1 << 20) + 16), 1800);
    assert!((0..600).step_by(2).all(|context| number(&world, 0, 1024 + 8 * context) == 3 * context as u64));
    // Compare-and-swap: the second operation finds the value that the first one wrote.
    for (operand, compare, found, after) in [(7u64, 1800u64, 1800, 7), (9, 1800, 7, 7)] {
        world.nodes[0].memory[..8].copy_from_slice(&operand.to_ne_bytes());
        world.nodes[0].memory[8..16].copy_from_slice(&compare.to_ne_bytes());
        let (operand, compare, place) = (world.span(0, 0, 8), world.span(0, 8, 8), world.span(0, 16, 8));
        let swap = Atomic { change: Change::SwapEqual, compare, found: Some(place), ..base };
        world.post(0, 1, Shape::Atomic(swap), operand, 1).unwrap();
        assert_eq!(world.wait(0).status, Status::Success);
        assert_eq!((number(&world, 0, 16), number(&world, 1, (1 << 20) + 16)), (found, after));
    }
    let refused = [Atomic { key: key + 1, ..base }, Atomic { at: 4096, ..base }, Atomic { at: 17, ..base }];
    for (place, atomic) in refused.into_iter().enumerate() {
        for found in [None, Some(world.span(0, 16, 8))] {
            world.post(0, 1, Shape::Atomic(Atomic { found, ..atomic }), operand, 5).unwrap();
            assert_eq!(world.wait(0).status, Status::BadKey, "{place}");
        }
    }
    let wrong = [
        Atomic { count: 0, ..base },
        Atomic { count: 2, ..base },
        Atomic { change: Change::SwapLess, ..base },
        Atomic { change: Change::BitOr, datatype: Datatype::F64, ..base },
    ];
    for atomic in wrong {
        assert_eq!(world.post(0, 1, Shape::Atomic(atomic), operand, 5), Err(PostError::BadAtomic));
    }
}

#[test]
fn messages_match_by_tag_in_order_also_when_they_come_first() {
    let mut world = world(2);
    let big = 50_000;
    for (context, len) in [(0u64, 8), (1, big), (2, 8), (3, big), (4, 8)] {
        let span = world.span(0, context as usize * big, len);
        fill(&mut world, 0, context as usize * big, len, context as usize);
        world.post(0, 1, Shape::Message { tag: Some(context % 2) }, span, context).unwrap();
    }
    world.run(1_000_000);
    let seen = world.nodes[1].engine.peek(0, &Match { tag: Some((1, 0)), from: None }, None).unwrap();
    assert_eq!((seen.len, seen.tag), (big as u64, Some(1)));
    // Two receives for tag 1, then three receives for any tag.
    for (context, tag) in [(10, (1, 0)), (11, (1, 0)), (12, (0, u64::MAX)), (13, (0, 0)), (14, (9, 9))] {
        let span = world.span(1, context as usize * big, big);
        world.receive(1, Some(tag), span, context);
    }
    let mut got: Vec<(u64, u64)> = (0..5).map(|_| world.wait(1)).map(|got| (got.context, got.len)).collect();
    got.sort();
    // The last receive also accepts tag 0, because (9 ^ 0) & !9 is 0.
    assert_eq!(got, [(10, big as u64), (11, big as u64), (12, 8), (13, 8), (14, 8)]);
    assert!(same(&world, (0, big), (1, 10 * big), big) && same(&world, (0, 3 * big), (1, 11 * big), big));
}

#[test]
fn claimed_messages_go_to_their_claimant() {
    let mut world = world(2);
    for context in 0..3u64 {
        let span = world.span(0, 0, if context == 1 { 30_000 } else { 10 });
        world.post(0, 1, Shape::Message { tag: Some(context) }, span, context).unwrap();
    }
    world.run(1_000_000);
    let any = Match { tag: Some((0, u64::MAX)), from: None };
    let engine = &mut world.nodes[1].engine;
    assert_eq!(engine.peek(0, &any, Some(100)).unwrap().tag, Some(0));
    assert_eq!(engine.peek(0, &any, Some(101)).unwrap().len, 30_000);
    let (small, large, other) =
        (world.span(1, 0, 10), world.span(1, 100, 30_000), world.span(1, 40_000, 100));
    world.receive(1, Some((0, u64::MAX)), other, 3);
    assert_eq!((world.wait(1).tag, world.poll(1).is_none()), (Some(2), true), "the others are claimed");
    let engine = &mut world.nodes[1].engine;
    assert!(
        engine.receive_claimed(0, 101, Some(large), 4) && !engine.receive_claimed(0, 101, Some(large), 4)
    );
    assert!(engine.receive_claimed(0, 100, Some(small), 5));
    assert_eq!([world.wait(1).context, world.wait(1).context], [5, 4]);
}

#[test]
fn one_buffer_takes_several_messages() {
    let mut world = world(2);
    let span = world.span(1, 0, 1000);
    let receive = Receive { matching: Match::default(), span, context: 1, several: Some(300) };
    world.nodes[1].engine.post_receive(0, &receive).unwrap();
    fill(&mut world, 0, 0, 900, 0);
    for part in 0..3 {
        let span = world.span(0, part * 300, 300);
        world.post(0, 1, MESSAGE, span, 0).unwrap();
    }
    for part in 0..3u64 {
        let received = world.wait(1);
        assert_eq!((received.offset, received.is_released), (part * 300, part == 2));
    }
    assert!(same(&world, (0, 0), (1, 0), 900));
}

#[test]
fn a_buffer_for_several_messages_is_released_with_the_last_that_is_complete() {
    let mut world = world(2);
    fill(&mut world, 0, 0, 100_050, 0);
    let (large, small) = (world.span(0, 0, 100_000), world.span(0, 100_000, 50));
    let span = world.span(1, 0, 100_300);
    let post = |world: &mut World, context| {
        let receive = Receive { matching: Match::default(), span, context, several: Some(300) };
        world.nodes[1].engine.post_receive(0, &receive).unwrap();
    };
    post(&mut world, 1);
    for span in [large, small] {
        world.post(0, 1, MESSAGE, span, 0).unwrap();
    }
    // The small message leaves fewer than 300 bytes in the buffer while the large message is still being pulled.
    let got = world.wait(1);
    assert_eq!((got.len, got.offset, got.is_released), (50, 100_000, false));
    let got = world.wait(1);
    assert_eq!((got.len, got.offset, got.is_released), (100_000, 0, true));
    assert!(same(&world, (0, 0), (1, 0), 100_050));
    // The receive is cancelled while a message is being received into its buffer.
    post(&mut world, 2);
    world.post(0, 1, MESSAGE, large, 0).unwrap();
    world.run(8_000);
    assert!(!world.nodes[1].engine.cancel(0, 2) && !world.nodes[1].engine.cancel(0, 2));
    world.post(0, 1, MESSAGE, small, 0).unwrap();
    let got = world.wait(1);
    assert_eq!((got.context, got.len, got.is_released), (2, 100_000, true));
    world.run(1_000_000);
    assert!(world.poll(1).is_none(), "the small one found no buffer");
    post(&mut world, 3);
    assert_eq!((world.wait(1).context, world.nodes[1].engine.cancel(0, 3)), (3, true));
}

#[test]
fn too_long_messages_are_cut_and_named() {
    let mut world = world(2);
    for len in [100, 3000, 100_000] {
        let (source, target) = (world.span(0, 0, len), world.span(1, 0, 50));
        fill(&mut world, 0, 0, len, len);
        world.receive(1, None, target, 1);
        world.post(0, 1, MESSAGE, source, 2).unwrap();
        let received = world.wait(1);
        assert_eq!((received.status, received.len), (Status::Truncated, len as u64));
        assert!(
            same(&world, (0, 0), (1, 0), 50) && world.nodes[1].memory[50..200].iter().all(|byte| *byte == 0)
        );
        assert_eq!(world.wait(0).status, Status::Success);
    }
}

#[test]
fn an_endpoint_that_opens_later_gets_everything_in_order() {
    let mut world = world(2);
    world.nodes[1].engine.close(0);
    for context in 0..20u64 {
        let len = if context % 5 == 4 { 20_000 } else { 2000 };
        let span = world.span(0, 0, len);
        world.post(0, 1, Shape::Message { tag: Some(context) }, span, context).unwrap();
    }
    world.run(300_000_000);
    assert!(world.poll(0).is_none() && world.nodes[1].engine.counters().not_ready > 0);
    world.nodes[1].engine.open(Some(0)).unwrap();
    for context in 0..20 {
        let span = world.span(1, 0, 20_000);
        world.receive(1, Some((0, u64::MAX)), span, context);
    }
    let mut tags: Vec<(u64, u64)> =
        (0..20).map(|_| world.wait(1)).map(|got| (got.context, got.tag.unwrap())).collect();
    tags.sort();
    assert!(tags.iter().all(|(context, tag)| context == tag), "{tags:?}");
    assert!((0..20).all(|_| world.wait(0).status == Status::Success));
}

#[test]
fn an_endpoint_that_never_opens_is_named() {
    let mut world = world(2);
    world.nodes[1].engine.close(0);
    for context in 0..3 {
        let span = world.span(0, 0, 100);
        world.post(0, 1, MESSAGE, span, context).unwrap();
    }
    for _ in 0..3 {
        assert_eq!(world.wait(0).status, Status::NotReady);
    }
    assert!(world.now > 9_000_000_000 && world.now < 15_000_000_000);
    world.nodes[1].engine.open(Some(0)).unwrap();
    let (source, target) = (world.span(0, 0, 9), world.span(1, 0, 9));
    world.receive(1, None, target, 7);
    world.post(0, 1, MESSAGE, source, 8).unwrap();
    assert_eq!((world.wait(1).context, world.wait(0).status), (7, Status::Success));
}

#[test]
fn credits_hold_messages_back_and_let_them_go() {
    let mut world = world(2);
    for context in 0..2000 {
        let span = world.span(0, 0, 10_000);
        world.post(0, 1, MESSAGE, span, context).unwrap();
    }
    world.run(50_000_000);
    let held = (0..2000).take_while(|_| world.poll(0).is_some()).count();
    assert_eq!(held, 256, "so many are kept by the target");
    for context in 0..2000 {
        let span = world.span(1, 0, 10_000);
        world.receive(1, None, span, context);
        assert_eq!(world.wait(1).context, context);
    }
    assert_eq!((held..2000).filter(|_| world.wait(0).status == Status::Success).count(), 2000 - held);
    assert_eq!(world.nodes[1].engine.counters().not_ready, 0);
}

#[test]
fn a_dead_peer_is_named_within_the_bound() {
    let mut world = world(2);
    let key = world.register(1, 0, 4 << 20, None);
    let (small, large) = (world.span(0, 0, 10), world.span(0, 0, 2 << 20));
    world.cut[1] = true;
    world.post(0, 1, MESSAGE, small, 0).unwrap();
    assert_eq!(world.wait(0).status, Status::Unreachable, "it never answered");
    world.cut[1] = false;
    // Operations in flight, answered late, or only waiting for the peer: keep-alives detect the dead peer for the last kind.
    for (context, shape) in [(1, Shape::Write { key, at: 0 }), (2, Shape::Read { key, at: 0 }), (3, MESSAGE)]
    {
        world.post(0, 1, shape, large, context).unwrap();
        world.run(if context == 3 { 5_000_000 } else { 30_000 });
        world.cut[1] = true;
        let start = world.now;
        assert_eq!(world.wait(0).status, Status::Unreachable, "{shape:?}");
        assert!(world.now - start < 13_000_000_000, "{shape:?} after {} ms", (world.now - start) / 1_000_000);
        world.cut[1] = false;
        world.run(11_000_000_000);
    }
}

#[test]
fn a_restarted_peer_is_recognised() {
    let mut world = world(2);
    let span = world.span(0, 0, 100_000);
    world.post(0, 1, MESSAGE, span, 1).unwrap();
    world.run(1_000_000);
    world.restart(1);
    assert_eq!(world.wait(0).status, Status::PeerRestarted, "found by a keep-alive");
    let target = world.span(1, 0, 100_000);
    world.receive(1, None, target, 2);
    world.post(0, 1, MESSAGE, span, 3).unwrap();
    assert_eq!((world.wait(1).context, world.wait(0).status), (2, Status::Success));
    // The restarted engine opens the channel, which ends the other engine's old channel at once.
    world.post(0, 1, MESSAGE, span, 4).unwrap();
    world.run(1_000_000);
    world.restart(1);
    let back = world.span(1, 0, 8);
    world.post(1, 0, MESSAGE, back, 5).unwrap();
    let start = world.now;
    assert_eq!(world.wait(0).status, Status::PeerRestarted);
    assert!(world.now - start < 10_000_000);
}

#[test]
fn a_deadline_ends_what_nobody_receives() {
    let config = Config { operation_timeout_ns: 2_000_000_000, ..Config::default() };
    let mut world = World::new(2, &config, CLEAN, 1);
    let span = world.span(0, 0, 100_000);
    world.post(0, 1, MESSAGE, span, 1).unwrap();
    assert_eq!(world.wait(0).status, Status::TimedOut);
    assert!(world.now > 2_000_000_000 && world.now < 2_200_000_000);
    // The offer has arrived but its bytes have not: the receive gets the failure.
    let target = world.span(1, 0, 100_000);
    world.receive(1, None, target, 2);
    assert_eq!(world.wait(1).status, Status::Cancelled);
}

#[test]
fn a_buffered_operation_is_complete_at_once_and_still_arrives() {
    let mut world = world(2);
    fill(&mut world, 0, 0, 5000, 7);
    let expected = world.nodes[0].memory[..5000].to_vec();
    let (span, peer) = (world.span(0, 0, 5000), world.peer(1));
    let out = Outgoing { shape: MESSAGE, span, data: None, context: 6, is_buffered: true, is_quiet: false };
    world.nodes[0].engine.post(world.now, 0, peer, &out).unwrap();
    assert_eq!(world.poll(0).unwrap().context, 6);
    world.nodes[0].memory[..5000].fill(0);
    let target = world.span(1, 0, 5000);
    world.receive(1, None, target, 1);
    assert_eq!(world.wait(1).status, Status::Success);
    assert!(world.nodes[1].memory[..5000] == expected);
    world.run(1_000_000);
    assert!(world.nodes[0].engine.is_idle() && world.poll(0).is_none());
}

#[test]
fn a_buffered_operation_that_fails_after_all_says_so() {
    let mut world = world(2);
    let (span, peer) = (world.span(0, 0, 8), world.peer(1));
    world.cut[1] = true;
    for (context, is_quiet) in [(6, false), (7, true)] {
        let out = Outgoing { shape: MESSAGE, span, data: None, context, is_buffered: true, is_quiet };
        world.nodes[0].engine.post(world.now, 0, peer, &out).unwrap();
    }
    let early = world.poll(0).unwrap();
    assert_eq!((early.context, early.status, early.is_late), (6, Status::Success, false));
    assert!(world.poll(0).is_none());
    for (context, is_late) in [(6, true), (7, false)] {
        let failed = world.wait(0);
        assert_eq!((failed.context, failed.status, failed.is_late), (context, Status::Unreachable, is_late));
    }
    // The endpoint that posted the operation has closed: the next endpoint of that number gets no completion of it.
    let out = Outgoing { shape: MESSAGE, span, data: None, context: 8, is_buffered: true, is_quiet: false };
    world.nodes[0].engine.post(world.now, 0, peer, &out).unwrap();
    world.nodes[0].engine.close(0);
    world.nodes[0].engine.open(Some(0)).unwrap();
    world.run(20_000_000_000);
    assert!(world.poll(0).is_none() && world.nodes[0].engine.is_idle());
}

#[test]
fn messages_wait_without_limit_for_an_endpoint_if_so_configured() {
    let config = Config { not_ready_ns: 0, operation_timeout_ns: 0, ..Config::default() };
    let mut world = World::new(2, &config, CLEAN, 1);
    world.nodes[1].engine.close(0);
    let (span, target) = (world.span(0, 0, 8), world.span(1, 0, 8));
    world.post(0, 1, MESSAGE, span, 1).unwrap();
    world.run(60_000_000_000);
    assert!(world.poll(0).is_none() && world.nodes[1].engine.counters().not_ready > 100);
    world.nodes[1].engine.open(Some(0)).unwrap();
    world.receive(1, None, target, 2);
    assert_eq!((world.wait(1).context, world.wait(0).status), (2, Status::Success));
}

#[test]
fn the_target_sees_a_signal_after_the_writes_before_it() {
    let mut world = world(2);
    let key = world.register(1, 0, 4 << 20, None);
    for (round, len) in [100, 1 << 20].into_iter().enumerate() {
        fill(&mut world, 0, 0, len, round);
        let (span, flag, target) = (world.span(0, 0, len), world.span(0, 0, 1), world.span(1, 5 << 20, 1));
        world.receive(1, None, target, 0);
        world.post(0, 1, Shape::Write { key, at: 0 }, span, 1).unwrap();
        world.post_data(0, 1, Shape::Write { key, at: 3 << 20 }, flag, 2, Some(1)).unwrap();
        world.post(0, 1, MESSAGE, flag, 3).unwrap();
        for kind in [Kind::Arrival, Kind::Receive] {
            assert_eq!(world.wait(1).kind, kind);
            assert!(same(&world, (0, 0), (1, 0), len));
        }
        (0..3).for_each(|_| assert_eq!(world.wait(0).status, Status::Success));
    }
}

#[test]
fn closed_and_cancelled_receives_get_nothing() {
    let mut world = world(2);
    let span = world.span(1, 0, 100);
    world.receive(1, None, span, 1);
    world.receive(1, None, span, 2);
    let engine = &mut world.nodes[1].engine;
    assert!(engine.cancel(0, 1) && !engine.cancel(0, 1));
    let source = world.span(0, 0, 100);
    world.post(0, 1, MESSAGE, source, 3).unwrap();
    assert_eq!(world.wait(1).context, 2);
    let engine = &mut world.nodes[1].engine;
    engine.close(0);
    assert_eq!(engine.open(Some(5000)), Err(PostError::Taken));
    assert_eq!(engine.open(Some(7)), Ok(7));
    assert_eq!(engine.open(Some(7)), Err(PostError::Taken));
    assert_eq!(engine.open(None), Ok(0));
}

#[test]
fn a_farewell_ends_the_peers_operations_at_once() {
    let mut world = world(2);
    let span = world.span(0, 0, 100_000);
    world.post(0, 1, MESSAGE, span, 1).unwrap();
    world.run(1_000_000);
    world.nodes[1].engine.say_goodbye();
    let start = world.now;
    assert_eq!(world.wait(0).status, Status::PeerRestarted);
    assert!(world.now - start < 1_000_000);
}

#[test]
fn random_bytes_change_nothing() {
    let mut world = world(2);
    let key = world.register(1, 0, 1000, None);
    let span = world.span(0, 0, 8);
    world.post(0, 1, Shape::Write { key, at: 0 }, span, 1).unwrap();
    world.wait(0);
    let from = world.peer(0).address;
    for round in 0..20_000u64 {
        let len = world.random(120) as usize;
        let mut bytes: Vec<u8> = (0..len).map(|_| world.random(256) as u8).collect();
        if let Some(first) = bytes.first_mut().filter(|_| !round.is_multiple_of(4)) {
            *first = 0x10 | *first & 15;
        }
        let now = world.now;
        world.nodes[1].engine.receive(now, from, &bytes, false);
    }
    world.post(0, 1, Shape::Write { key, at: 8 }, span, 2).unwrap();
    assert_eq!(world.wait(0).status, Status::Success);
}
