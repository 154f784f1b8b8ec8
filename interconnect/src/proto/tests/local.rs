//! Channels whose packets travel through shared memory.

use super::world::{CLEAN, World};
use crate::proto::wire::{Body, Data, Header, Hello, Invite};
use crate::proto::{Config, Kind, Shape, Span, Status};

/// Two nodes with an open channel, and the key of node 1's memory.
fn world() -> (World, u64) {
    world_of(&Config::default())
}

fn world_of(config: &Config) -> (World, u64) {
    let mut world = World::new(2, config, CLEAN, 1);
    let key = world.register(1, 1 << 20, 3 << 20, None);
    world.write(key, 8);
    (world, key)
}

/// Requests do not wait for the budget, which is that of the socket's receive buffer.
#[test]
fn large_operations_go_through_a_ring_in_large_packets() {
    const LEN: usize = 3 << 20;
    let (mut world, key) = world();
    world.share();
    for round in 0..3u8 {
        world.nodes[0].memory[..LEN]
            .iter_mut()
            .enumerate()
            .for_each(|(place, byte)| *byte = place as u8 ^ round);
        world.write(key, LEN);
        assert!(world.nodes[0].memory[..LEN] == world.nodes[1].memory[1 << 20..][..LEN]);
        let back = world.span(0, 4 << 20, LEN);
        world.post(0, 1, Shape::Read { key, at: 0 }, back, 2).unwrap();
        assert_eq!(world.wait(0).status, Status::Success);
        assert!(world.nodes[0].memory[..LEN] == world.nodes[0].memory[4 << 20..][..LEN]);
    }
    // Six times 48 packets of data, and acknowledgements.
    assert!(world.has_rings() && world.ring_packets < 1000, "{}", world.ring_packets);
    assert_eq!(world.nodes.iter().map(|node| node.engine.counters().resent).sum::<u64>(), 0);
}

/// One that finds the ring full or gone takes the network.
#[test]
fn where_nothing_fragments_packets_for_a_ring_fit_the_network() {
    const LEN: usize = 1 << 20;
    let config = Config { has_fragments: false, ..Config::default() };
    let (mut world, key) = world_of(&config);
    world.share();
    world.write(key, LEN);
    let least = LEN / config.datagram_max;
    assert!(world.has_rings() && world.ring_packets as usize > least, "{}", world.ring_packets);
    assert!(world.nodes[0].memory[..LEN] == world.nodes[1].memory[1 << 20..][..LEN]);
}

#[test]
fn the_elder_invites_again_and_again_until_there_is_a_ring() {
    let (mut world, key) = world();
    world.nodes.iter_mut().for_each(|node| node.engine.set_name(Some([7; 16])));
    let mut invites = vec![];
    // As many as the pauses allow: at once, and after 20, 220 and 2220 ms.
    for _ in 0..30 {
        world.write(key, 8);
        world.run(100_000_000);
        let node = (0..2).find_map(|node| Some((node, world.nodes[node].engine.next_invite()?)));
        invites.extend(node);
    }
    assert_eq!(invites.len(), 4);
    let (younger, (from, Invite { name, secret })) = invites[0];
    assert!(invites.iter().all(|(node, (_, invite))| (*node, invite.secret) == (younger, secret)));
    let (elder, other) = (1 - younger, world.peer(younger).address);
    assert_eq!((name, from), ([7; 16], world.peer(elder).address));
    assert_eq!(world.nodes[elder].engine.invited(&secret), Some(other));
    assert_eq!(world.nodes[elder].engine.invited(&[0; 16]), None);
    assert_eq!(world.nodes[younger].engine.invited(&secret), None);
    world.share();
    assert_eq!(world.nodes[elder].engine.invited(&secret), None);
    world.run(20_000_000_000);
    world.write(key, 8);
    assert!(world.nodes.iter_mut().all(|node| node.engine.next_invite().is_none()));
}

#[test]
fn an_invitation_with_another_session_is_ignored() {
    let (mut world, _) = world();
    let (now, from) = (world.now, world.peer(0).address);
    let invite = Body::Invite(Invite { name: [1; 16], secret: [2; 16] });
    let header = Header { flags: 0, failures: 0, session: 77, number: 0, ack: 0, map: None, body: invite };
    let unknown = world.nodes[1].engine.counters().unknown;
    world.nodes[1].engine.receive(now, from, header.encode().as_bytes(), false);
    assert!(world.nodes[1].engine.next_invite().is_none());
    assert_eq!(world.nodes[1].engine.counters().unknown, unknown + 1);
    assert!(world.nodes[1].engine.depart(now).is_none(), "not even a RESET");
}

/// Each of these ends the ring, and none of them the channel.
#[test]
fn what_does_not_belong_in_a_ring_is_refused() {
    let (mut world, key) = world();
    let (now, from, stranger) = (world.now, world.peer(0).address, "10.9.9.9:1".parse().unwrap());
    let placed = world.span(1, 7 << 20, 100);
    let hello = Hello { epoch: 9, channel: 9, session: 9, window: 9, datagram: 999 };
    let data = Body::Data(Data { pull: 1, offset: 0 });
    let cases: [(_, Body, Option<Span>); 7] = [
        (from, Body::Hello(hello), None),
        (from, Body::Welcome(hello), None),
        (from, Body::Reset, None),
        (from, Body::Invite(Invite { name: [1; 16], secret: [2; 16] }), None),
        (from, Body::Noop, Some(placed)),
        (from, data, Some(placed)),
        (stranger, Body::Noop, None),
    ];
    for (from, body, placed) in cases {
        let header = Header { flags: 0, failures: 0, session: 77, number: 0, ack: 0, map: None, body };
        let packet = header.encode();
        let engine = &mut world.nodes[1].engine;
        assert!(!engine.receive_local(now, from, packet.as_bytes(), placed), "{body:?}");
        let longer = [packet.as_bytes(), b"bytes"].concat();
        assert!(!engine.receive_local(now, from, &longer, placed), "{body:?} with more bytes");
    }
    assert!(!world.nodes[1].engine.receive_local(now, from, b"", None));
    world.write(key, 100_000);
    assert_eq!(world.nodes[1].engine.counters().failed_channels, 0);
}

/// The origin says that the bytes are in place; the target checks that the place exists.
#[test]
fn a_placed_write_is_checked_by_the_target() {
    let (mut world, key) = world();
    world.share();
    let cases = [
        (Shape::Placed { key, at: 0, len: 3 << 20 }, Status::Success),
        (Shape::Placed { key, at: 1, len: 3 << 20 }, Status::BadKey),
        (Shape::Placed { key, at: u64::MAX, len: 8 }, Status::BadKey),
        (Shape::Placed { key: key ^ 1, at: 0, len: 8 }, Status::BadKey),
    ];
    for (shape, status) in cases {
        world.post_data(0, 1, shape, Span::EMPTY, 4, Some(5)).unwrap();
        let written = world.wait(0);
        assert_eq!((written.kind, written.status, written.context), (Kind::Write, status, 4), "{shape:?}");
        let arrival = world.poll(1).map(|arrival| (arrival.kind, arrival.len, arrival.data));
        let expected = (status == Status::Success).then_some((Kind::Arrival, 3 << 20, Some(5)));
        assert_eq!(arrival, expected, "{shape:?}");
    }
    assert!(world.nodes[1].engine.may_share(0, key) && !world.nodes[1].engine.may_share(1, key));
    assert!(world.nodes[1].engine.deregister(key) && !world.nodes[1].engine.may_share(0, key));
    world.post(0, 1, Shape::Placed { key, at: 0, len: 8 }, Span::EMPTY, 4).unwrap();
    assert_eq!(world.wait(0).status, Status::BadKey);
}
