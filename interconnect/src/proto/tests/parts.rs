//! Packets in parts.

use super::world::{CLEAN, Network, World};
use crate::proto::{Config, Shape, Status};

const LEN: usize = 3 << 20;
const MINUTE_NS: u64 = 60_000_000_000;

/// Two nodes that can send packets in parts, of which node `takes` and the ones after it take them; the key of node 1's memory.
fn world(network: Network, takes: usize) -> (World, u64) {
    let config = Config { takes_parts: true, ..Config::default() };
    let mut world = World::new(2, &config, network, 1);
    for node in 0..takes {
        world.reopen(node, &Config { takes_parts: false, ..config.clone() });
    }
    world.allow_parts();
    let key = world.register(1, 1 << 20, LEN, None);
    world.write(key, 8);
    (world, key)
}

/// A write that node 1 pulls, and a read that node 0 pulls. Returns the packets in parts of both nodes.
fn exchange(world: &mut World, key: u64) -> [u64; 2] {
    let before = world.parted.clone();
    world.nodes[0].memory[..LEN].iter_mut().enumerate().for_each(|(place, byte)| *byte = place as u8);
    world.write(key, LEN);
    assert!(world.nodes[0].memory[..LEN] == world.nodes[1].memory[1 << 20..][..LEN]);
    let back = world.span(0, 4 << 20, LEN);
    world.post(0, 1, Shape::Read { key, at: 0 }, back, 2).unwrap();
    assert_eq!(world.wait(0).status, Status::Success);
    assert!(world.nodes[0].memory[..LEN] == world.nodes[0].memory[4 << 20..][..LEN]);
    [0, 1].map(|node| world.parted[node] - before[node])
}

#[test]
fn large_transfers_go_in_parts_to_peers_that_take_them() {
    // 11 datagrams of 1 472 bytes, with room for 16 more in all but the first: 12 pieces of 256 KiB, each in 16 packets, and a whole one.
    for (takes, parted) in [(0, [12 * 16, 12 * 16]), (1, [12 * 16, 0]), (2, [0, 0])] {
        let (mut world, key) = world(CLEAN, takes);
        for (sent, most) in exchange(&mut world, key).into_iter().zip(parted) {
            // Pulled bytes take a datagram when something else waits, too.
            assert!((most - most / 20..=most).contains(&sent), "{sent} of {most} packets in parts");
        }
    }
}

#[test]
fn small_messages_are_whole() {
    let (mut world, key) = world(CLEAN, 0);
    for len in [1, 1400, 1500, 16_384] {
        world.write(key, len);
    }
    assert_eq!(world.parted, [0, 0]);
}

#[test]
fn a_lossy_path_gets_whole_packets_for_a_minute() {
    let lossy = Network { lost: 20_000, ..CLEAN };
    let (mut world, key) = world(lossy, 0);
    let first: u64 = exchange(&mut world, key).iter().sum();
    assert!((16..400).contains(&first), "{first} packets in parts");
    assert_eq!(exchange(&mut world, key), [0, 0]);
    world.network = CLEAN;
    world.run(MINUTE_NS);
    assert_ne!(exchange(&mut world, key), [0, 0]);
}

#[test]
fn rare_losses_do_not_matter() {
    let (mut world, key) = world(Network { lost: 1000, ..CLEAN }, 0);
    for _ in 0..5 {
        assert!(exchange(&mut world, key).iter().all(|parted| *parted > 12 * 16 * 7 / 10));
    }
}

/// A peer that takes no parts gets what was under way before the link was sealed, and before datagrams became smaller.
#[test]
fn bytes_under_way_are_cut_smaller_when_datagrams_shrink() {
    for takes in 0..2 {
        let (mut world, key) = world(CLEAN, 2 * takes);
        let source = world.span(0, 0, LEN);
        world.nodes[0].memory[..LEN].fill(7);
        world.post(0, 1, Shape::Write { key, at: 0 }, source, 1).unwrap();
        (0..10).for_each(|_| world.step());
        // What is on its way is lost.
        world.cut[0] = true;
        (0..10).for_each(|_| world.step());
        world.cut[0] = false;
        assert_eq!(world.parted[0] > 0, takes == 0);
        world.shrink_datagrams(1000);
        assert_eq!(world.wait(0).status, Status::Success);
        assert!(world.nodes[1].memory[1 << 20..][..LEN].iter().all(|byte| *byte == 7));
        assert!(world.nodes[0].engine.counters().resent > 0);
    }
}

/// A message that waits for a write does not make the write slow.
#[test]
fn what_cannot_be_sent_yet_does_not_prevent_parts() {
    let (mut world, key) = world(CLEAN, 0);
    let before = world.parted[0];
    let (source, message, buffer) = (world.span(0, 0, LEN), world.span(0, 0, 100), world.span(1, 0, 100));
    world.receive(1, None, buffer, 3);
    world.post(0, 1, Shape::Write { key, at: 0 }, source, 1).unwrap();
    world.post(0, 1, Shape::Message { tag: None }, message, 2).unwrap();
    assert_eq!(world.wait(1).status, Status::Success);
    let parted = world.parted[0] - before;
    assert!(parted > 12 * 16 * 9 / 10, "{parted} packets in parts");
}
