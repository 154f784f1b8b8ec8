//! Shares of endpoints, on the simulated clock.

use super::world::{CLEAN, Network, World};
use crate::proto::{
    Access, Config, EndpointCounters, Kind, Outgoing, Peer, PostError, Shape, ShareSettings, Status,
};

/// A link of 1 Gbit/s.
const LINK: Network = Network { byte_ps: 8_000, ..CLEAN };
const LINK_RATE: u64 = 125_000_000;
const KEY: u64 = 7;
const LEN: usize = 6 << 20;

/// An endpoint of node 0 that always has as many operations under way.
struct Sender {
    endpoint: u16,
    to: Peer,
    len: usize,
    depth: usize,
    done: u64,
}

/// Three nodes. Node 0 has endpoints 1 and up with these shares; the others' memory is registered.
fn world(shares: &[(u32, u64)]) -> World {
    let config = Config { operation_timeout_ns: 0, ..Config::default() };
    let mut world = World::new(3, &config, LINK, 5);
    for node in 1..3 {
        world.register(node, 0, LEN, Some(KEY));
    }
    for (place, (weight, rate)) in shares.iter().enumerate() {
        let (endpoint, share) = (place as u16 + 1, ShareSettings { weight: *weight, rate: *rate });
        let engine = &mut world.nodes[0].engine;
        engine.open(Some(endpoint)).unwrap();
        engine.set_share(endpoint, share).unwrap();
    }
    world
}

fn sender(world: &World, endpoint: u16, node: usize, len: usize) -> Sender {
    Sender { endpoint, to: world.peer(node), len, depth: 4, done: 0 }
}

fn post(world: &mut World, sender: &Sender) {
    let span = world.span(0, 0, sender.len);
    let shape = Shape::Write { key: KEY, at: 0 };
    let out = Outgoing { shape, span, data: None, context: 1, is_buffered: false, is_quiet: false };
    world.nodes[0].engine.post(world.now, sender.endpoint, sender.to, &out).unwrap();
}

/// Runs the senders for this time, after a while in which the network finds its pace. Returns what each has sent.
fn run(world: &mut World, senders: &mut [Sender], ns: u64) -> Vec<EndpointCounters> {
    let (start, mut before) = (world.now, None);
    for sender in senders.iter() {
        (0..sender.depth).for_each(|_| post(world, sender));
    }
    let counters = |world: &World, senders: &[Sender]| -> Vec<EndpointCounters> {
        senders.iter().map(|sender| world.nodes[0].engine.endpoint_counters(sender.endpoint)).collect()
    };
    while world.now < start + ns + ns / 4 {
        world.step();
        for sender in senders.iter_mut() {
            while let Some(completion) = world.nodes[0].engine.poll(sender.endpoint) {
                assert_eq!((completion.kind, completion.status), (Kind::Write, Status::Success));
                sender.done += 1;
                post(world, sender);
            }
        }
        if before.is_none() && world.now >= start + ns / 4 {
            before = Some(counters(world, senders));
        }
    }
    let before = before.unwrap();
    let since = |(now, before): (EndpointCounters, &EndpointCounters)| EndpointCounters {
        packets: now.packets - before.packets,
        bytes: now.bytes - before.bytes,
        held_back: now.held_back - before.held_back,
    };
    counters(world, senders).into_iter().zip(&before).map(since).collect()
}

fn is_within_5_percent(got: u64, expected: u64) -> bool {
    got.abs_diff(expected) * 20 <= expected
}

/// Small operations are pushed, large ones are pulled by the target.
#[test]
fn endpoints_share_by_weight_what_goes_to_one_peer() {
    for (len, depth) in [(1_000, 2_000), (16_000, 100), (100_000, 20), (3 << 20, 4)] {
        let mut world = world(&[(1, 0), (3, 0)]);
        let mut senders = [1, 2].map(|endpoint| Sender { depth, ..sender(&world, endpoint, 1, len) });
        let sent = run(&mut world, &mut senders, 800_000_000);
        assert!(is_within_5_percent(sent[1].bytes, 3 * sent[0].bytes), "{len}: {sent:?}");
        assert!(is_within_5_percent(sent[0].bytes + sent[1].bytes, LINK_RATE * 8 / 10), "{len}: {sent:?}");
        assert!(sent.iter().all(|sent| sent.packets > 0 && sent.held_back == 0));
    }
}

/// The sixteen endpoints that a process of the daemon's engine can have.
#[test]
fn many_endpoints_share_by_weight() {
    let weights: Vec<(u32, u64)> = (1..=16).map(|weight| (weight, 0)).collect();
    let mut world = world(&weights);
    let mut senders: Vec<Sender> = (1..=16).map(|endpoint| sender(&world, endpoint, 1, 1 << 20)).collect();
    let sent = run(&mut world, &mut senders, 4_000_000_000);
    for (place, sent) in sent.iter().enumerate() {
        let expected = LINK_RATE * 4 * (place as u64 + 1) / 136;
        assert!(sent.bytes.abs_diff(expected) * 10 <= expected, "{place}: {} of {expected}", sent.bytes);
    }
}

/// Who has nothing to send, or cannot, leaves its share to the others.
#[test]
fn an_endpoint_alone_gets_everything() {
    for (weight, len) in [(1, 16_000), (1, 3 << 20), (100, 16_000)] {
        let mut world = world(&[(weight, 0), (100, 0), (100, 1_000_000)]);
        let mut senders = [1].map(|endpoint| Sender { depth: 64, ..sender(&world, endpoint, 1, len) });
        let sent = run(&mut world, &mut senders, 400_000_000);
        assert!(is_within_5_percent(sent[0].bytes, LINK_RATE * 4 / 10), "{weight} {len}: {sent:?}");
    }
    let mut world = world(&[(1, 0), (100, 1_000_000)]);
    let mut senders = [1, 2].map(|endpoint| Sender { depth: 64, ..sender(&world, endpoint, 1, 16_000) });
    let sent = run(&mut world, &mut senders, 400_000_000);
    assert!(is_within_5_percent(sent[0].bytes, LINK_RATE * 4 / 10 - sent[1].bytes), "{sent:?}");
}

/// Peers on links of their own do not compete: the weight takes nothing from anybody.
#[test]
fn endpoints_to_different_peers_get_what_the_network_gives() {
    let mut world = world(&[(1, 0), (3, 0)]);
    let mut senders = [(1, 1), (2, 2)]
        .map(|(endpoint, node)| Sender { depth: 64, ..sender(&world, endpoint, node, 16_000) });
    let sent = run(&mut world, &mut senders, 400_000_000);
    assert!(sent.iter().all(|sent| is_within_5_percent(sent.bytes, LINK_RATE * 4 / 10)), "{sent:?}");
}

#[test]
fn a_limited_endpoint_gets_its_rate() {
    for (rate, len) in
        [(10_000_000, 1_000), (10_000_000, 16_000), (20_000_000, 3 << 20), (1_000_000, 100_000)]
    {
        let mut world = world(&[(100, rate), (1, 0)]);
        let mut senders = [1, 2].map(|endpoint| Sender { depth: 64, ..sender(&world, endpoint, 1, len) });
        let sent = run(&mut world, &mut senders, 2_000_000_000);
        assert!(is_within_5_percent(sent[0].bytes, rate * 2), "{rate} {len}: {sent:?}");
        assert!(is_within_5_percent(sent[1].bytes, 2 * (LINK_RATE - rate)), "{rate} {len}: {sent:?}");
        assert!(sent[0].held_back > 0 && sent[1].held_back == 0, "{sent:?}");
        assert!(world.nodes[0].engine.counters().held_back >= sent[0].held_back);
        assert_eq!(world.nodes[0].engine.counters().resent, 0, "what is held back is not lost");
    }
}

/// What a peer reads is sent by the endpoint with which the memory is registered.
#[test]
fn reads_of_peers_are_held_to_the_rate() {
    let (mut world, rate) = (world(&[(1, 10_000_000)]), 10_000_000);
    let (span, access) = (world.span(0, 0, LEN), Access { read: true, write: false });
    world.nodes[0].engine.register(1, span, 0, access, Some(KEY)).unwrap();
    let (peer, start) = (Peer { endpoint: 1, ..world.peer(0) }, world.now);
    let back = world.span(1, 0, LEN);
    let shape = Shape::Read { key: KEY, at: 0 };
    let out = Outgoing { shape, span: back, data: None, context: 1, is_buffered: false, is_quiet: false };
    world.nodes[1].engine.post(start, 0, peer, &out).unwrap();
    assert_eq!(world.wait(1).status, Status::Success);
    let expected = LEN as u64 * 1_000_000_000 / rate;
    assert!(is_within_5_percent(world.now - start, expected), "{} of {expected} ns", world.now - start);
}

#[test]
fn a_new_share_holds_at_once() {
    let mut world = world(&[(100, 1_000)]);
    let slow = sender(&world, 1, 1, 1_000_000);
    post(&mut world, &slow);
    world.run(1_000_000_000);
    assert!(world.nodes[0].engine.poll(1).is_none());
    let fast = ShareSettings { weight: 100, rate: 0 };
    world.nodes[0].engine.set_share(1, fast).unwrap();
    world.run(100_000_000);
    assert_eq!(world.nodes[0].engine.poll(1).unwrap().status, Status::Success);
    // The number is free again, and starts anew.
    world.nodes[0].engine.close(1);
    assert_eq!(world.nodes[0].engine.set_share(1, fast), Err(PostError::NoEndpoint));
    world.nodes[0].engine.open(Some(1)).unwrap();
    assert_eq!(world.nodes[0].engine.endpoint_counters(1), EndpointCounters::default());
    for weight in [0, 101, u32::MAX] {
        let share = ShareSettings { weight, rate: 0 };
        assert_eq!(world.nodes[0].engine.set_share(1, share), Err(PostError::BadShare));
    }
}

/// Messages of two endpoints to one of a peer that is not ready at first: each arrives once, those of an endpoint in order.
#[test]
fn messages_of_each_endpoint_stay_in_order() {
    const MESSAGES: usize = 600;
    let network = Network { lost: 20_000, twice: 10_000, late: 20_000, late_ns: 200_000, ..LINK };
    let config = Config {
        operation_timeout_ns: 0,
        not_ready_ns: 0,
        unexpected_bytes_max: 20_000,
        ..Config::default()
    };
    for seed in 0..20 {
        let mut world = World::new(2, &config, network, seed);
        for (endpoint, weight, rate) in [(1, 1, 0), (2, 30, 0), (3, 100, 3_000_000)] {
            world.nodes[0].engine.open(Some(endpoint)).unwrap();
            world.nodes[0].engine.set_share(endpoint, ShareSettings { weight, rate }).unwrap();
        }
        let to = world.peer(1);
        for number in 0..MESSAGES as u64 {
            for endpoint in 1..4 {
                let len = [10, 3_000, 16_000][world.random(3) as usize];
                let (shape, span) = (Shape::Message { tag: None }, world.span(0, 0, len));
                let (data, context) = (Some(number), number);
                let out = Outgoing { shape, span, data, context, is_buffered: false, is_quiet: true };
                world.nodes[0].engine.post(world.now, endpoint, to, &out).unwrap();
            }
        }
        let (mut next, mut posted) = ([0; 4], 0);
        while next[1..] != [MESSAGES as u64; 3] {
            // Slower than the messages come.
            if world.now >= posted as u64 * 1_000_000 {
                let span = world.span(1, (posted % 8) * 16_000, 16_000);
                world.receive(1, None, span, 1);
                posted += 1;
            }
            world.step();
            assert!(world.now < 200_000_000_000, "{next:?}");
            while let Some(received) = world.poll(1) {
                let from = usize::from(received.peer.endpoint);
                assert_eq!((received.status, received.data), (Status::Success, Some(next[from])), "{from}");
                next[from] += 1;
            }
        }
        assert!(world.nodes[1].engine.counters().not_ready > 0, "the endpoint was not ready at times");
        assert!((1..4).all(|endpoint| world.nodes[0].engine.poll(endpoint).is_none()), "no failure");
    }
}

/// Rounds with many channels cost little for each packet: a hostile process cannot keep the daemon busy with looking.
#[test]
fn many_channels_of_a_light_endpoint_all_send() {
    const PEERS: usize = 200;
    let config = Config { operation_timeout_ns: 0, ..Config::default() };
    let mut world = World::new(PEERS + 1, &config, CLEAN, 5);
    world.nodes[0].engine.open(Some(1)).unwrap();
    world.nodes[0].engine.set_share(1, ShareSettings { weight: 1, rate: 50_000_000 }).unwrap();
    for node in 1..=PEERS {
        world.register(node, 0, 1 << 20, Some(KEY));
        let sender = sender(&world, 1, node, 50_000);
        post(&mut world, &sender);
    }
    let (start, mut done) = (world.now, 0);
    while done < PEERS {
        world.step();
        while let Some(completion) = world.nodes[0].engine.poll(1) {
            assert_eq!(completion.status, Status::Success);
            done += 1;
        }
        assert!(world.now - start < 1_000_000_000, "{done}");
    }
    assert!(is_within_5_percent(world.now - start, PEERS as u64 * 50_000 * 20), "{}", world.now - start);
}
