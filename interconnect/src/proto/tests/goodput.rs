//! Cost of losses, reordering and many senders, on a link of 10 Gbit/s.

use super::world::{CLEAN, Network, World};
use crate::proto::{Config, Shape, Status};

const WIRE: Network = Network { byte_ps: 800, delay_ns: 10_000, ..CLEAN };

/// Returns how many nanoseconds 32 writes of 1 MiB from each of the senders to node 0 take.
fn transfer(senders: usize, network: Network) -> (u64, World) {
    let mut world = World::new(senders + 1, &Config::default(), network, 7);
    let key = world.register(0, 0, 4 << 20, None);
    for sender in 1..=senders {
        let span = world.span(sender, 0, 1 << 20);
        for context in 0..32 {
            world.post(sender, 0, Shape::Write { key, at: 0 }, span, context).unwrap();
        }
    }
    let start = world.now;
    for sender in 1..=senders {
        (0..32).for_each(|_| assert_eq!(world.wait(sender).status, Status::Success));
    }
    (world.now - start, world)
}

#[test]
fn losses_and_reordering_cost_little() {
    let (clean, _) = transfer(1, WIRE);
    let rate = 32.0 * f64::from(1 << 20) * 8.0 / clean as f64;
    assert!(rate > 9.0, "{rate} Gbit/s without losses");
    for network in [
        Network { lost: 10_000, ..WIRE },
        Network { late: 10_000, late_ns: 50_000, ..WIRE },
        Network { lost: 10_000, late: 10_000, late_ns: 50_000, ..WIRE },
    ] {
        let (time, world) = transfer(1, network);
        let share = clean as f64 / time as f64;
        assert!(share > 0.8, "{share} of the goodput, {:?}", world.nodes[1].engine.counters());
    }
}

#[test]
fn many_senders_are_never_asked_for_more_than_the_receiver_holds() {
    let (_, one) = transfer(1, WIRE);
    let (time, world) = transfer(8, WIRE);
    let rate = 8.0 * 32.0 * f64::from(1 << 20) * 8.0 / time as f64;
    assert!(rate > 9.0, "{rate} Gbit/s from eight senders");
    assert!(world.nodes.iter().all(|node| node.engine.counters().resent == 0), "no packet was too late");
    drop(one);
}
