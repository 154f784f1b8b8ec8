//! A guest whose kicks are slow.

use super::*;

/// True if the dispatcher wakes in this time.
fn wakes(poller: &Poller, within: Duration) -> bool {
    let mut woken = false;
    poller.wait(Some(within), |_| woken = true).unwrap();
    woken
}

#[test]
fn slow_kicks_are_not_watched_and_frames_arrive_all_the_same() {
    const SOON: Duration = Duration::ZERO;
    const AT_LAST: Duration = Duration::from_secs(60);
    let mut host = Host::new(1);
    let poller = Poller::new().unwrap();
    host.source(0).watch(poller.waker(1));
    let mut guest = Guest::connect(&host.path, 1);
    guest.start();
    wait_for("the rings", || host.is_up());
    let signals = host.interface.device.signals.clone();

    signals.set_slow(true);
    assert!(host.source(0).rest());
    while wakes(&poller, Duration::from_millis(100)) {}
    guest.kicks[1].write(1).unwrap();
    assert!(!wakes(&poller, SOON), "kicks are not watched");
    host.source(0).resume();
    guest.transmit(&frame(60, 1));
    assert!(!host.source(0).rest(), "a frame waits");
    assert_eq!(host.receive().len(), 1);

    assert!(host.source(0).rest());
    guest.transmit(&frame(60, 2));
    assert!(wakes(&poller, AT_LAST), "without a kick");
    host.source(0).resume();
    assert_eq!(host.receive().len(), 1);

    // An eventfd that comes meanwhile is not watched, either.
    guest.kicks[1] = event();
    guest.frontend.set_vring_kick(1, &guest.kicks[1]).unwrap();
    while wakes(&poller, Duration::from_millis(100)) {}
    guest.kicks[1].write(1).unwrap();
    assert!(!wakes(&poller, SOON));

    signals.set_slow(false);
    assert!(host.source(0).rest());
    assert!(wakes(&poller, AT_LAST), "the kick that waits");
    host.source(0).resume();
    assert!(host.source(0).rest());
    guest.kicks[1].write(1).unwrap();
    assert!(wakes(&poller, SOON), "kicks are watched again");
}

#[test]
fn a_dispatcher_rests_while_the_front_end_changes_the_queue() {
    let mut host = Host::new(1);
    let mut guest = Guest::connect(&host.path, 1);
    guest.start();
    wait_for("the rings", || host.is_up());
    guest.transmit(&frame(60, 1));
    let device = host.interface.device.clone();
    let locked = device.pairs[0].transmit.lock();
    device.pairs[0].changing.store(true, Relaxed);
    // Neither waits for the lock.
    assert!(host.receive().is_empty());
    assert!(host.source(0).rest());
    host.source(0).resume();
    device.pairs[0].changing.store(false, Relaxed);
    drop(locked);
    assert!(!host.source(0).rest(), "a frame waits");
}
