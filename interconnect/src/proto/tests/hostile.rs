//! Peers that break the protocol's rules.

use super::stranger::{Stranger, Victim, address, hello};
use super::world::{CLEAN, World};
use crate::proto::engine::CHANNELS_MAX;
use crate::proto::wire::{Body, Credit, Data, End, Header, Hello, Message, Subject, Write, flags};
use crate::proto::{Access, Config, Kind, Outgoing, Shape, Status};

const MESSAGE: Shape = Shape::Message { tag: None };

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

fn message(seq: u32, total: u32, offset: u32) -> Body {
    Body::Message(Message { to: 0, from: 0, op: seq, seq, total, offset, tag: 0, data: 0 })
}

fn post(victim: &mut Victim, stranger: &Stranger, context: u64) {
    let span = victim.span(8);
    let out = Outgoing { shape: MESSAGE, span, data: None, context, is_buffered: false, is_quiet: false };
    victim.engine.post(victim.now, 0, stranger.peer(), &out).unwrap();
}

/// A peer that is not restarted acknowledges the challenge that a handshake in its name causes.
#[test]
fn forged_handshakes_end_no_channel() {
    let mut world = World::new(2, &Config::default(), CLEAN, 1);
    let (span, target) = (world.span(0, 0, 8), world.span(1, 0, 8));
    for context in 0..4 {
        for epoch in [0, u64::MAX] {
            let forged = Hello { epoch, channel: 1, session: 5, window: 1 << 20, datagram: 1472 };
            let header = Header {
                flags: 0,
                failures: 0,
                session: 0,
                number: 0,
                ack: 0,
                map: None,
                body: Body::Hello(forged),
            };
            let (now, from) = (world.now, world.peer(0).address);
            if context > 0 {
                world.nodes[1].engine.receive(now, from, header.encode().as_bytes(), false);
            }
        }
        world.receive(1, None, target, context);
        world.post(0, 1, MESSAGE, span, context).unwrap();
        assert_eq!((world.wait(1).context, world.wait(0).status), (context, Status::Success));
        world.run(20_000_000);
    }
    assert_eq!(world.nodes[1].engine.counters().failed_channels, 0);
}

#[test]
fn a_peer_whose_clock_went_back_is_recognised() {
    let mut world = World::new(2, &Config::default(), CLEAN, 1);
    world.restart_at(0, 1 << 40);
    let (span, target) = (world.span(0, 0, 8), world.span(1, 0, 8));
    for (context, epoch) in [(1, 1 << 40), (2, 5), (3, 7)] {
        world.restart_at(0, epoch);
        world.receive(1, None, target, context);
        let start = world.now;
        world.post(0, 1, MESSAGE, span, context).unwrap();
        assert_eq!((world.wait(1).context, world.wait(0).status), (context, Status::Success));
        assert!(world.now - start < 100_000_000);
    }
}

#[test]
fn a_full_table_makes_room_for_a_new_peer() {
    let mut victim = Victim::new(Config::default());
    let mut friend = Stranger::meet(&mut victim, 1);
    friend.send(&mut victim, 0, message(0, 1, 0), b"x");
    victim.sent();
    for n in 2..2 * CHANNELS_MAX as u32 {
        victim.greet(address(n), hello(5));
        if n % 64 == 0 {
            victim.sent();
        }
    }
    // Who has proved that it receives at its address stays, and who comes is answered.
    friend.send(&mut victim, 0, message(1, 1, 0), b"y");
    victim.receive(1);
    victim.receive(2);
    assert!(victim.poll().is_some() && victim.poll().is_some());
    let mut late = Stranger::meet(&mut victim, 3 * CHANNELS_MAX as u32);
    late.send(&mut victim, 0, message(0, 1, 0), b"z");
    victim.receive(3);
    assert_eq!(victim.poll().unwrap().peer.address, late.address);
    post(&mut victim, &late, 4);
    assert_eq!(victim.engine.counters().failed_channels, 0);
    // Handshakes without a packet behind them leave no channel for long.
    let before = victim.engine.channels();
    victim.now += Config::default().dead_after_ns;
    victim.sent();
    assert!(before > 2000 && victim.engine.channels() == 2, "{before}");
}

/// Peers that only open channels, and a table that is full of channels in use.
#[test]
fn channels_in_use_are_not_closed() {
    let mut victim = Victim::new(Config::default());
    for n in 0..CHANNELS_MAX as u32 {
        let peer = crate::proto::Peer { address: address(n), endpoint: 0 };
        let span = victim.span(8);
        let out =
            Outgoing { shape: MESSAGE, span, data: None, context: 0, is_buffered: false, is_quiet: false };
        victim.engine.post(victim.now, 0, peer, &out).unwrap();
    }
    victim.greet(address(CHANNELS_MAX as u32), hello(5));
    assert_eq!((victim.engine.counters().unknown, victim.engine.channels()), (1, CHANNELS_MAX));
}

#[test]
fn messages_beyond_the_credits_end_the_channel() {
    // The 257th message that the application has not received, and a message number that was used before.
    for numbers in [(0..257).collect::<Vec<u32>>(), vec![0, 0]] {
        let mut victim = Victim::new(Config::default());
        let mut stranger = Stranger::meet(&mut victim, 1);
        let last = numbers.len() - 1;
        for (place, seq) in numbers.into_iter().enumerate() {
            assert_eq!(victim.engine.counters().failed_channels, 0, "{place} of {last}");
            stranger.send(&mut victim, 0, message(seq, 1, 0), b"x");
        }
        assert_eq!(victim.engine.counters().failed_channels, 1);
    }
}

#[test]
fn unexpected_messages_are_counted_with_their_memory() {
    let mut victim = Victim::new(Config::default());
    let mut stranger = Stranger::meet(&mut victim, 1);
    for seq in 0..256 {
        stranger.send(&mut victim, 0, message(seq, 1, 0), b"x");
    }
    let (counted, memory) = victim.engine.unexpected_bytes(0);
    assert!(counted >= memory && memory < 100 * 256, "{counted} counted, {memory} in buffers");
}

#[test]
fn credits_for_nothing_make_no_flow() {
    let mut victim = Victim::new(Config::default());
    let mut stranger = Stranger::meet(&mut victim, 1);
    for to in 0..1000 {
        stranger.send(&mut victim, 0, Body::Credit(Credit { to, limit: 512 }), &[]);
    }
    assert_eq!(victim.engine.flows(), 0);
    post(&mut victim, &stranger, 1);
    assert_eq!(victim.engine.flows(), 1);
}

/// Fragments of many peers that wait for missing packets, and halves of messages.
#[test]
fn waiting_packets_of_all_peers_share_one_budget() {
    let mut victim = Victim::new(Config::default());
    let payload = vec![0; 60_000];
    for n in 0..60 {
        let mut stranger = Stranger::meet(&mut victim, n);
        if n % 2 == 0 {
            stranger.send(&mut victim, 0, message(0, 1 << 20, 0), &payload);
        }
        for ahead in 1..40 {
            stranger.send_ahead(&mut victim, ahead, 0, message(ahead, 60_000, 0), &payload);
        }
    }
    assert!(victim.engine.kept_bytes() <= 64 << 20, "{}", victim.engine.kept_bytes());
    assert!(victim.engine.counters().no_memory > 0);
    victim.now += 20_000_000_000;
    victim.engine.say_goodbye();
    assert_eq!(victim.engine.kept_bytes(), 0);
}

#[test]
fn an_arrival_has_the_length_of_the_whole_write() {
    let mut victim = Victim::new(Config::default());
    let span = victim.span(4096);
    let access = Access { read: false, write: true };
    let key = victim.engine.register(0, span, 0, access, None).unwrap();
    let mut stranger = Stranger::meet(&mut victim, 1);
    let write = |seq, at, behind| Body::Write(Write { to: 0, from: 0, op: 5, seq, behind, key, at, data: 1 });
    // In order; the beginning of an attempt that is broken off, then the whole; then the last packet first.
    stranger.send(&mut victim, flags::DATA, write(0, 0, 200), &[1; 100]);
    stranger.send(&mut victim, flags::DATA, write(0, 100, 100), &[1; 100]);
    stranger.send(&mut victim, flags::DATA, write(0, 200, 0), &[1; 100]);
    stranger.send(&mut victim, flags::DATA, write(1, 0, 200), &[1; 100]);
    stranger.send(&mut victim, flags::DATA, write(1, 0, 200), &[1; 100]);
    stranger.send(&mut victim, flags::DATA, write(1, 100, 0), &[1; 200]);
    stranger.send_ahead(&mut victim, 1, flags::DATA, write(2, 100, 0), &[1; 50]);
    stranger.send(&mut victim, flags::DATA, write(2, 0, 50), &[1; 100]);
    let lengths: Vec<u64> = std::iter::from_fn(|| victim.poll()).map(|arrival| arrival.len).collect();
    assert_eq!(lengths, [300, 300, 150]);
}

#[test]
fn own_completions_are_taken_without_arrivals() {
    let mut world = World::new(2, &Config::default(), CLEAN, 1);
    let key = world.register(1, 0, 64, None);
    let (span, target) = (world.span(0, 0, 8), world.span(1, 100, 8));
    for context in 0..1000 {
        world.post_data(0, 1, Shape::Write { key, at: 0 }, span, context, Some(context)).unwrap();
    }
    world.receive(1, None, target, 5);
    world.run(100_000_000);
    let done = |world: &mut World| std::iter::from_fn(|| world.poll(0)).count();
    assert_eq!((world.nodes[1].engine.poll_own(0).is_none(), done(&mut world)), (true, 256));
    assert_eq!(std::iter::from_fn(|| world.poll(1)).count(), 256);
    world.run(100_000_000);
    assert_eq!(done(&mut world), 256, "credits come back with the arrivals that are taken");
}
