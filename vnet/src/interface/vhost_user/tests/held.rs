//! Chains whose memory is read beyond their batch: given back when that is over, whatever ends the ring meanwhile.

use super::*;
use crate::frame::Hold;

impl Host {
    /// Takes what waits and holds every frame.
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
fn a_guest_gets_held_chains_back_in_order_and_hears_of_it() {
    let (mut host, mut guest) = pair();
    (1..4).for_each(|seed| guest.transmit(&frame(64, seed)));
    let mut holds = host.receive_held();
    guest.transmit(&frame(64, 4));
    assert_eq!(host.receive(), [frame(64, 4)], "others go on meanwhile");
    assert_eq!(guest.rings[1].collect(&guest.memory), None);
    let _ = guest.calls[1].read();
    // The second one is done with first.
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
    assert!(guest.calls[1].read().is_ok(), "the guest is told");
    assert_eq!(guest.rings[1].collect(&guest.memory), Some((2, 0)));
    assert_eq!(guest.rings[1].collect(&guest.memory), Some((3, 0)));
}

#[test]
fn a_ring_that_stops_waits_for_what_is_held() {
    let (mut host, mut guest) = pair();
    guest.transmit(&frame(64, 1));
    let holds = host.receive_held();
    let kernel = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(30));
        drop(holds);
    });
    assert_eq!(guest.frontend.get_vring_base(1).unwrap(), 1);
    assert!(kernel.is_finished(), "it was waited for");
    kernel.join().unwrap();
    assert_eq!(guest.rings[1].collect(&guest.memory), Some((0, 0)));
}

/// What the kernel never tells of stays unused: the ring goes on before it, and its frame is sent once more.
#[test]
fn a_ring_stops_without_what_is_held_for_ever() {
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
    // Its memory was unmapped or not: what is let go now belongs to a ring that is no more.
    assert_eq!(guest.rings[1].collect(&guest.memory), Some((1, 0)));
    drop(holds);
    host.source(0).reclaim();
    assert_eq!(guest.rings[1].collect(&guest.memory), None);
}

/// The front end goes, and with it the guest's memory, while the kernel still reads. Its rings are written to no more: a machine
/// monitor gives what stands in them back itself (QEMU does), and so may whoever serves them next.
#[test]
fn a_guest_may_go_while_its_memory_is_held() {
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

/// When the interface stops, the chains come back before the front end hears of it.
#[test]
fn an_interface_that_stops_waits_for_what_is_held() {
    let (mut host, mut guest) = pair();
    guest.transmit(&frame(64, 1));
    let holds = host.receive_held();
    let kernel = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(30));
        drop(holds);
    });
    host.interface.stop();
    assert!(kernel.is_finished(), "it was waited for");
    assert_eq!(guest.rings[1].collect(&guest.memory), Some((0, 0)));
    assert!(guest.is_closed());
}
