//! Acknowledgements that piggyback on an application's answer.

use super::world::{CLEAN, World};
use crate::proto::{Config, Kind, Outgoing, Shape};

#[test]
fn an_answer_carries_the_acknowledgement_of_a_buffered_message() {
    let mut world = World::new(2, &Config::default(), CLEAN, 1);
    let say = |world: &mut World, from: usize, to: usize, len: usize| {
        let (span, room) = (world.span(from, 0, len), world.span(to, 1 << 20, len));
        world.receive(to, None, room, 1);
        let peer = world.peer(to);
        let out = Outgoing {
            shape: Shape::Message { tag: None },
            span,
            data: None,
            context: 2,
            is_buffered: true,
            is_quiet: false,
        };
        world.nodes[from].engine.post(world.now, 0, peer, &out).unwrap();
        assert_eq!((world.wait(from).kind, world.wait(to).kind), (Kind::Send, Kind::Receive));
    };
    // The first exchange opens the channel, and measures its round trip.
    let mut sent = vec![];
    for _ in 0..4 {
        say(&mut world, 0, 1, 8000);
        // The application takes longer to answer than acknowledgements of operations that somebody waits for.
        world.now += 10_000;
        world.step();
        say(&mut world, 1, 0, 8);
        sent.push(world.nodes[1].engine.counters().packets_out);
    }
    assert_eq!([sent[2] - sent[1], sent[3] - sent[2]], [1, 1]);
    // Once in a millisecond it leaves earlier, to measure the round trip.
    world.run(1_000_000);
    say(&mut world, 0, 1, 8000);
    world.now += 10_000;
    world.step();
    say(&mut world, 1, 0, 8);
    let before = world.nodes[1].engine.counters().packets_out;
    assert_eq!(before - sent[3], 2, "it and the answer");
    // Without an answer the acknowledgement leaves alone.
    say(&mut world, 0, 1, 8000);
    world.run(300_000);
    assert_eq!(world.nodes[1].engine.counters().packets_out, before + 1);
    assert!(world.nodes[0].engine.is_idle());
}
