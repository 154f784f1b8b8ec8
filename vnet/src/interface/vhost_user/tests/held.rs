//! Chains held beyond their batch (zero copy) are returned after their release, whatever ends the ring in between.

use super::*;
use crate::frame::Hold;

impl Host {
    /// Receives the waiting frames and holds each one.
    fn receive_held(&mut self) -> Vec<Hold> {
        let mut drops = DropSink::new();
        let burst = receive(&mut *self.sources[0], &mut self.slot, &mut drops, 0);
        burst.frames().iter().map(|frame| burst.hold(frame).expect("a guest's memory")).collect()
    }
}

fn pair() -> (Host, Guest) {
    let host = Host::new(1);
    let mut guest = Guest::connect(&host.path, 1);
    guest.start();
    (host, guest)
}

#[test]
fn released_chains_return_in_order_and_the_guest_is_notified() {
    let (mut host, mut guest) = pair();
    (1..4).for_each(|seed| guest.transmit(&frame(64, seed)));
    let mut holds = host.receive_held();
    guest.transmit(&frame(64, 4));
    assert_eq!(host.receive(), [frame(64, 4)], "later frames pass meanwhile");
    assert_eq!(guest.rings[1].collect(&guest.memory), None);
    let _ = guest.calls[1].read();
    // The second chain is released first.
    drop(holds.remove(1));
    host.source(0).reclaim();
    assert_eq!(guest.rings[1].collect(&guest.memory), None);
    drop(holds.remove(0));
    host.source(0).reclaim();
    assert_eq!(guest.rings[1].collect(&guest.memory), Some((0, 0)));
    assert_eq!(guest.rings[1].collect(&guest.memory), Some((1, 0)));
    assert_eq!(guest.rings[1].collect(&guest.memory), None);
    guest.rings[1].set_used_event(&guest.memory, guest.rings[1].used_idx);
    drop(holds);
    host.source(0).reclaim();
    assert!(guest.calls[1].read().is_ok(), "the guest is notified");
    assert_eq!(guest.rings[1].collect(&guest.memory), Some((2, 0)));
    assert_eq!(guest.rings[1].collect(&guest.memory), Some((3, 0)));
}

#[test]
fn stopping_a_ring_waits_for_held_chains() {
    let (mut host, mut guest) = pair();
    guest.transmit(&frame(64, 1));
    let holds = host.receive_held();
    let kernel = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(30));
        drop(holds);
    });
    assert_eq!(guest.frontend.get_vring_base(1).unwrap(), 1);
    assert!(kernel.is_finished(), "the stop waited for it");
    kernel.join().unwrap();
    assert_eq!(guest.rings[1].collect(&guest.memory), Some((0, 0)));
}

/// A chain that is never released is not returned: the ring continues before it, and its frame is sent again.
#[test]
fn a_ring_stops_without_chains_that_are_never_released() {
    let (mut host, mut guest) = pair();
    (1..3).for_each(|seed| guest.transmit(&frame(64, seed)));
    let mut holds = host.receive_held();
    drop(holds.remove(0));
    let begun = Instant::now();
    assert_eq!(guest.frontend.get_vring_base(1).unwrap(), 1, "the second chain is the next one");
    assert!(begun.elapsed() < Duration::from_secs(10));
    assert_eq!(guest.rings[1].collect(&guest.memory), Some((0, 0)));
    assert_eq!(guest.rings[1].collect(&guest.memory), None);
    guest.start_ring(1);
    let again = host.receive();
    assert_eq!(again, [frame(64, 2)]);
    // A release now has no effect: the ring no longer exists.
    assert_eq!(guest.rings[1].collect(&guest.memory), Some((1, 0)));
    drop(holds);
    host.source(0).reclaim();
    assert_eq!(guest.rings[1].collect(&guest.memory), None);
}

/// The front end disconnects, and takes the guest's memory with it, while the kernel still reads. vnetd does not write to the
/// rings any more: the machine monitor returns their chains itself (QEMU does), or the next back end does.
#[test]
fn a_guest_can_disconnect_while_its_memory_is_held() {
    let (mut host, mut guest) = pair();
    guest.transmit(&frame(64, 1));
    let holds = host.receive_held();
    let path = host.path.clone();
    guest.raw.shutdown(std::net::Shutdown::Both).unwrap();
    wait_for("the front end to be gone", || !host.is_up());
    drop(holds);
    host.source(0).reclaim();
    assert_eq!(guest.rings[1].collect(&guest.memory), None);
    guest.transmit(&frame(64, 3));
    let holds = host.receive_held();
    assert!(holds.is_empty());
    drop(guest);
    let mut guest = Guest::connect(&path, 1);
    guest.start();
    drop(holds);
    host.source(0).reclaim();
    guest.transmit(&frame(64, 2));
    assert_eq!(host.receive(), [frame(64, 2)]);
    assert_eq!(guest.rings[1].collect(&guest.memory), Some((0, 0)));
}

/// When the interface stops, held chains are returned before the connection ends. `stop` does not wait, because its callers hold
/// locks.
#[test]
fn an_interface_that_was_stopped_waits_for_held_chains_by_itself() {
    let (mut host, mut guest) = pair();
    guest.transmit(&frame(64, 1));
    let holds = host.receive_held();
    host.interface.stop();
    assert!(host.interface.draining.lock().is_some(), "a thread of its own waits");
    assert!(!host.path.exists(), "a successor can have the socket");
    drop(holds);
    host.interface.settle();
    assert_eq!(guest.rings[1].collect(&guest.memory), Some((0, 0)));
    assert!(guest.is_closed());
}
