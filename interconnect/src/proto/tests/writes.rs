//! Large writes with immediate data, several at a time.

use super::stranger::{Stranger, Victim, address, hello};
use super::world::{CLEAN, Network, World};
use crate::proto::wire::{Body, Data, Message, Offer, Subject, flags};
use crate::proto::{Access, Config, Kind, Outgoing, Peer, Shape, Status};

const LEN: usize = 256 << 10;

/// Node 0 posts writes of these lengths, one behind the other in node 1's memory; those that are given data have their number.
fn post(world: &mut World, key: u64, lens: &[usize], has_data: impl Fn(usize) -> bool) {
    let mut at = 0;
    for (number, len) in lens.iter().copied().enumerate() {
        let source = world.span(0, at, len);
        let data = has_data(number).then_some(number as u64);
        let shape = Shape::Write { key, at: at as u64 };
        world.post_data(0, 1, shape, source, number as u64, data).unwrap();
        at += len;
    }
}

#[test]
fn arrivals_come_in_order_behind_all_earlier_writes() {
    let wild = Network { lost: 30_000, twice: 30_000, late: 100_000, late_ns: 300_000, ..CLEAN };
    for seed in 1..20 {
        let mut world = World::new(2, &Config::default(), wild, seed);
        let key = world.register(1, 0, 8 << 20, None);
        let lens: Vec<usize> =
            (0..60).map(|_| 1 + world.random([2_000, 60_000, 200_000][seed as usize % 3]) as usize).collect();
        let total: usize = lens.iter().sum();
        assert!(total <= 8 << 20, "{total} bytes");
        world.nodes[0].memory.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at % 251) as u8 + 1);
        post(&mut world, key, &lens, |number| !number.is_multiple_of(3));
        for number in (0..lens.len()).filter(|number| !number.is_multiple_of(3)) {
            let arrival = world.wait(1);
            let found = (arrival.kind, arrival.status, arrival.data, arrival.len);
            assert_eq!(found, (Kind::Arrival, Status::Success, Some(number as u64), lens[number] as u64));
            let written: usize = lens[..=number].iter().sum();
            assert!(
                world.nodes[0].memory[..written] == world.nodes[1].memory[..written],
                "seed {seed}: write {number} has arrived before an earlier one"
            );
        }
        for _ in &lens {
            assert_eq!(world.wait(0).status, Status::Success);
        }
    }
}

#[test]
fn a_write_need_not_wait_until_the_one_before_has_ended() {
    let far = Network { delay_ns: 5_000_000, byte_ps: 1000, ..CLEAN };
    let mut world = World::new(2, &Config::default(), far, 1);
    let key = world.register(1, 0, 8 << 20, None);
    // The window grows.
    post(&mut world, key, &[LEN; 16], |_| false);
    (0..16).for_each(|_| assert_eq!(world.wait(0).status, Status::Success));
    let mut took = [0; 2];
    for (of, count) in [(0, 1), (1, 16)] {
        let begin = world.now;
        post(&mut world, key, &vec![LEN; count], |_| true);
        (0..count).for_each(|_| assert_eq!(world.wait(1).kind, Kind::Arrival));
        took[of] = world.now - begin;
        (0..count).for_each(|_| assert_eq!(world.wait(0).status, Status::Success));
    }
    assert!(took[1] < 4 * took[0], "{} us one write, {} us sixteen", took[0] / 1000, took[1] / 1000);
}

#[test]
fn a_peer_that_does_not_order_arrivals_gets_one_such_write_at_a_time() {
    for (abilities, offered) in [(0, 1), (flags::IN_ORDER, 3)] {
        let mut victim = Victim::new(Config::default());
        victim.greet_with(address(1), hello(5), abilities);
        let span = victim.span(LEN);
        for number in 0..3 {
            let shape = Shape::Write { key: 7, at: 0 };
            let out =
                Outgoing { shape, span, data: Some(1), context: number, is_buffered: false, is_quiet: false };
            let peer = Peer { address: address(1), endpoint: 0 };
            victim.engine.post(victim.now, 0, peer, &out).unwrap();
        }
        let sent = victim.sent();
        let offers = sent.iter().filter(|(_, header)| matches!(header.body, Body::Offer(_)));
        assert_eq!(offers.count(), offered, "{sent:?}");
    }
}

#[test]
fn a_write_whose_deadline_passes_holds_no_arrival_up() {
    let config = Config { operation_timeout_ns: 400_000_000, ..Config::default() };
    let mut world = World::new(2, &config, CLEAN, 1);
    let key = world.register(1, 0, 8 << 20, None);
    world.write(key, 8);
    // The write takes 262 ms on this link. After 50 ms the network drops all packets of node 1.
    world.network = Network { byte_ps: 1_000_000, ..CLEAN };
    post(&mut world, key, &[LEN], |_| true);
    world.run(50_000_000);
    world.cut[1] = true;
    assert_eq!(world.wait(0).status, Status::TimedOut);
    world.cut[1] = false;
    world.network = CLEAN;
    let source = world.span(0, 0, LEN);
    world.post_data(0, 1, Shape::Write { key, at: 0 }, source, 1, Some(9)).unwrap();
    let arrival = world.wait(1);
    assert_eq!((arrival.kind, arrival.data), (Kind::Arrival, Some(9)));
    assert_eq!(world.wait(0).status, Status::Success);
    world.run(1_000_000_000);
    assert!(world.poll(1).is_none(), "the first one has not arrived");
}

#[test]
fn arrivals_that_wait_come_before_the_peers_end() {
    let lossy = Network { lost: 50_000, ..CLEAN };
    let config = Config { eager_max: 1_000, ..Config::default() };
    let mut found = 0;
    for seed in 1..40 {
        let mut world = World::new(2, &config, lossy, seed);
        let key = world.register(1, 0, 8 << 20, None);
        world.write(key, 8);
        post(&mut world, key, &[100_000, 2_000], |_| true);
        let ended = world.wait(0);
        assert_eq!(ended.status, Status::Success);
        // Only if the second write has ended first, because bytes of the first one were lost.
        if ended.context == 1 && world.poll(1).is_none() {
            world.network = CLEAN;
            world.nodes[0].engine.say_goodbye();
            let arrival = world.wait(1);
            assert_eq!((arrival.kind, arrival.data), (Kind::Arrival, Some(1)), "seed {seed}");
            found += 1;
        }
    }
    assert!(found > 0, "no second write has ended first");
}

#[test]
fn several_endpoints_that_write_to_one_all_get_their_turn() {
    let mut world = World::new(2, &Config::default(), CLEAN, 1);
    let key = world.register(1, 0, 8 << 20, None);
    assert_eq!(world.nodes[0].engine.open(Some(1)), Ok(1));
    let target = world.span(1, 7 << 20, 8);
    world.receive(1, None, target, 0);
    let (source, peer) = (world.span(0, 0, LEN), world.peer(1));
    let write = |world: &mut World, number: u64| {
        world.post_data(0, 1, Shape::Write { key, at: 0 }, source, number, Some(number)).unwrap();
    };
    (0..4).for_each(|number| write(&mut world, number));
    world.run(20_000);
    let shape = Shape::Message { tag: None };
    let span = world.span(0, 0, 8);
    let message = Outgoing { shape, span, data: None, context: 99, is_buffered: false, is_quiet: false };
    world.nodes[0].engine.post(world.now, 1, peer, &message).unwrap();
    // The first endpoint always has two writes under way or waiting.
    for number in 4..200 {
        let completion = world.wait(1);
        if completion.kind == Kind::Receive {
            return;
        }
        write(&mut world, number);
        while world.poll(0).is_some() {}
    }
    panic!("the message of the other endpoint has waited for 196 writes");
}

/// Offers a write of 1 000 bytes, number `seq` of those with immediate data. Returns the victim's pull, if it asks for the bytes.
fn offer(victim: &mut Victim, stranger: &mut Stranger, key: u64, seq: u32, has_data: bool) -> Option<u32> {
    let offer = Offer { to: 0, from: 0, op: seq, seq, total: 1_000, tag: key, at: 0, data: u64::from(seq) };
    let flags = flags::MEMORY | if has_data { flags::DATA } else { 0 };
    stranger.send(victim, flags, Body::Offer(offer), &[]);
    victim.sent().into_iter().find_map(|(_, header)| match header.body {
        Body::Pull(pull) => Some(pull.pull),
        _ => None,
    })
}

fn register(victim: &mut Victim) -> u64 {
    let span = victim.span(1_000);
    victim.engine.register(0, span, 0, Access { read: false, write: true }, None).unwrap()
}

/// A peer sends messages once its large writes have ended, or once it has given them up.
#[test]
fn a_message_comes_behind_arrivals_that_wait_for_a_write_given_up() {
    for abilities in [0, flags::IN_ORDER] {
        let mut victim = Victim::new(Config::default());
        let key = register(&mut victim);
        victim.receive(7);
        let mut stranger = Stranger::meet_with(&mut victim, 1, abilities);
        assert!(offer(&mut victim, &mut stranger, key, 0, true).is_some());
        let pull = offer(&mut victim, &mut stranger, key, 1, true).unwrap();
        stranger.send(&mut victim, 0, Body::Data(Data { pull, offset: 0 }), &[b'x'; 1_000]);
        if abilities == flags::IN_ORDER {
            assert!(victim.poll().is_none(), "the first write has not ended");
            let message = Message { to: 0, from: 0, op: 2, seq: 2, total: 1, offset: 0, tag: 0, data: 0 };
            stranger.send(&mut victim, 0, Body::Message(message), b"m");
        }
        // Without the flag nothing waits: the peer would not say that it has given the first write up.
        let arrival = victim.poll().unwrap();
        assert_eq!((arrival.kind, arrival.data), (Kind::Arrival, Some(1)));
        let next = victim.poll().map(|completion| (completion.kind, completion.context));
        assert_eq!(next, (abilities == flags::IN_ORDER).then_some((Kind::Receive, 7)));
    }
}

#[test]
fn a_write_without_room_at_the_target_is_sent_again_later() {
    let mut victim = Victim::new(Config::default());
    let key = register(&mut victim);
    let mut stranger = Stranger::meet_with(&mut victim, 1, flags::IN_ORDER);
    for _ in 0..1024 {
        offer(&mut victim, &mut stranger, key, 0, false);
    }
    let offer = Offer { to: 0, from: 0, op: 9, seq: 0, total: 1_000, tag: key, at: 0, data: 0 };
    stranger.send(&mut victim, flags::MEMORY | flags::DATA, Body::Offer(offer), &[]);
    let ends = victim.sent().into_iter().filter_map(|(_, header)| match header.body {
        Body::End(end) => Some((end.subject, end.status, end.number)),
        _ => None,
    });
    assert_eq!(ends.collect::<Vec<_>>(), [(Subject::NotReady, Status::NotReady, 9)]);
}
