//! Pulled bytes through streams.

use super::world::{CLEAN, World};
use crate::proto::wire::{Body, Data, Header, Hello, Invite};
use crate::proto::{Config, Shape, Status};

const LEN: usize = 3 << 20;
const LONG_NS: u64 = 20_000_000_000;

/// Two nodes with an open channel that use streams for pulls of 64 KiB, and the key of node 1's memory.
fn world() -> (World, u64) {
    let config = Config { stream_min: 64 << 10, ..Config::default() };
    let mut world = World::new(2, &config, CLEAN, 1);
    world.connects = true;
    let key = world.register(1, 1 << 20, LEN, None);
    world.write(key, 8);
    (world, key)
}

/// Writes that node 1 pulls, and reads that node 0 pulls.
fn exchange(world: &mut World, key: u64, round: u8) {
    world.nodes[0].memory[..LEN].iter_mut().enumerate().for_each(|(place, byte)| *byte = place as u8 ^ round);
    world.write(key, LEN);
    assert!(world.nodes[0].memory[..LEN] == world.nodes[1].memory[1 << 20..][..LEN]);
    let back = world.span(0, 4 << 20, LEN);
    world.post(0, 1, Shape::Read { key, at: 0 }, back, 2).unwrap();
    assert_eq!(world.wait(0).status, Status::Success);
    assert!(world.nodes[0].memory[..LEN] == world.nodes[0].memory[4 << 20..][..LEN]);
}

fn resent(world: &World) -> u64 {
    world.nodes.iter().map(|node| node.engine.counters().resent).sum()
}

#[test]
fn large_transfers_go_through_streams_in_large_packets() {
    let (mut world, key) = world();
    world.write(key, 60_000);
    assert!(!world.has_stream(0) && !world.has_stream(1), "not worth one");
    exchange(&mut world, key, 1);
    assert!(world.has_stream(0) && world.has_stream(1));
    let before = [world.stream_packets, world.nodes[0].engine.counters().packets_out];
    for round in 2..5 {
        exchange(&mut world, key, round);
    }
    assert_eq!(world.stream_packets - before[0], 6 * 49, "3 MiB in packets of 64 KiB");
    let others = world.nodes[0].engine.counters().packets_out - before[1] - 3 * 49;
    assert!(others < 300, "{others} other packets");
    assert_eq!(resent(&world), 0);
}

#[test]
fn what_a_stream_has_not_delivered_is_sent_again() {
    let (mut world, key) = world();
    exchange(&mut world, key, 1);
    let source = world.span(0, 0, LEN);
    for round in 0..20 {
        world.nodes[0].memory[..LEN].fill(round);
        world.post(0, 1, Shape::Write { key, at: 0 }, source, 1).unwrap();
        let steps = 10 + 3 * usize::from(round);
        (0..steps).for_each(|_| world.step());
        world.end_stream(0);
        assert_eq!(world.wait(0).status, Status::Success);
        assert!(world.nodes[1].memory[1 << 20..][..LEN].iter().all(|byte| *byte == round));
    }
    assert!(resent(&world) > 0);
    world.run(LONG_NS);
    exchange(&mut world, key, 1);
    exchange(&mut world, key, 2);
    assert!(world.has_stream(0), "it was invited again");
}

#[test]
fn without_a_connection_large_transfers_take_the_network() {
    let (mut world, key) = world();
    world.connects = false;
    for round in 0..3 {
        exchange(&mut world, key, round);
        world.run(LONG_NS);
    }
    assert_eq!(
        (world.stream_packets, world.nodes[0].engine.streams(world.peer(1).address)),
        (0, (false, false))
    );
}

#[test]
fn shared_memory_comes_before_a_stream() {
    let (mut world, key) = world();
    exchange(&mut world, key, 1);
    world.share();
    let before = (world.ring_packets, world.stream_packets);
    exchange(&mut world, key, 2);
    assert!(world.ring_packets > before.0 + 90 && world.stream_packets == before.1);
    world.unshare();
    exchange(&mut world, key, 3);
    assert!(world.stream_packets > before.1);
    assert_eq!(resent(&world), 0);
}

#[test]
fn small_operations_go_on_beside_a_stream_without_room() {
    let (mut world, key) = world();
    exchange(&mut world, key, 1);
    let to = world.peer(1).address;
    let source = world.span(0, 0, LEN);
    world.post(0, 1, Shape::Write { key, at: 0 }, source, 1).unwrap();
    (0..20).for_each(|_| world.step());
    world.nodes[0].engine.set_outgoing_stream(to, Some(false));
    world.write(key, 8);
    world.write(key, 100_000);
}

/// Small writes need no credit, and there are always more of them.
#[test]
fn small_writes_do_not_starve_a_stream() {
    let (mut world, key) = world();
    exchange(&mut world, key, 1);
    let (source, small) = (world.span(0, 0, LEN), world.span(0, LEN, 8));
    world.post(0, 1, Shape::Write { key, at: 0 }, source, 77).unwrap();
    for _ in 0..200_000 {
        for _ in 0..4 {
            let _ = world.post(0, 1, Shape::Write { key, at: 0 }, small, 1);
        }
        world.step();
        while let Some(completion) = world.poll(0) {
            assert_eq!(completion.status, Status::Success);
            if completion.context == 77 {
                return;
            }
        }
    }
    panic!("the large write never ends");
}

/// Acknowledgements do not wait in streams.
#[test]
fn transfers_in_both_directions_repeat_nothing() {
    let (mut world, key) = world();
    let other = world.register(0, 4 << 20, LEN, None);
    exchange(&mut world, key, 1);
    for _ in 0..5 {
        let sources = [world.span(0, 0, LEN), world.span(1, 1 << 20, LEN)];
        world.post(0, 1, Shape::Write { key, at: 0 }, sources[0], 1).unwrap();
        world.post(1, 0, Shape::Write { key: other, at: 0 }, sources[1], 1).unwrap();
        assert_eq!([world.wait(0).status, world.wait(1).status], [Status::Success; 2]);
    }
    assert!(world.has_stream(0) && world.has_stream(1));
    assert_eq!(resent(&world), 0);
}

#[test]
fn what_does_not_belong_in_a_stream_is_refused() {
    let (mut world, key) = world();
    let (now, from) = (world.now, world.peer(0).address);
    let hello = Hello { epoch: 9, channel: 9, session: 9, window: 9, datagram: 999 };
    let packet =
        |body| Header { flags: 0, failures: 0, session: 77, number: 0, ack: 0, map: None, body }.encode();
    let data = Body::Data(Data { pull: 1, offset: 0 });
    let invite = Body::Invite(Invite { name: [1; 16], secret: [2; 16] });
    exchange(&mut world, key, 1);
    for body in [Body::Hello(hello), Body::Reset, invite, Body::Noop, data] {
        assert!(!world.nodes[1].engine.receive_stream(now, from, packet(body).as_bytes()), "{body:?}");
    }
    assert!(!world.nodes[1].engine.receive_stream(now, from, b""));
    exchange(&mut world, key, 2);
    assert_eq!(world.nodes[1].engine.counters().failed_channels, 0);
}

#[test]
fn only_who_was_invited_may_connect() {
    let (mut world, key) = world();
    world.connects = false;
    let stranger = "10.9.9.9:1".parse().unwrap();
    assert_eq!(world.nodes[1].engine.invited_to_stream(&[0; 8]), None, "nobody has been invited");
    exchange(&mut world, key, 1);
    assert_eq!(world.nodes[1].engine.invited_to_stream(&[0; 8]), None);
    assert!(!world.nodes[1].engine.set_incoming_stream(stranger, true));
    assert!(!world.nodes[0].engine.set_outgoing_stream(stranger, Some(true)));
}
