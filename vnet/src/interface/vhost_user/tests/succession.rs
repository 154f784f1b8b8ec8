//! A guest is handed over to another vnetd: its rings go on, its front end's messages reach the new one, and nothing is lost if it fails.

use super::*;

/// Hands over the guest of `host` to an interface that does not serve it yet. The running vnetd's protocol thread waits for ever, as
/// if its process stood still.
fn hand_over(host: &Host, queues: usize) -> (Host, Arc<Inheritance>) {
    let Handed { files, guest, turn, .. } = host.interface.hand_over().unwrap();
    std::mem::forget(turn);
    let named = files.into_iter().map(|(kind, file)| (inherit::interface("vm1", kind), file));
    let inheritance = Arc::new(Inheritance::new(named));
    inheritance.add_guests([("vm1".to_owned(), guest.unwrap())].into());
    assert!(inheritance.has_guest("vm1"));
    let stats = Arc::new(PortStats::default());
    let place = (PortId(1), NetworkId::DEFAULT);
    let interface =
        VhostUser::inherit(options(&host.path, queues), &inheritance, place, stats.clone()).unwrap();
    assert!(inheritance.left().is_empty(), "{:?}", inheritance.left());
    let sources = (0..queues).map(|queue| interface.clone().source(queue)).collect();
    let path = host.path.clone();
    (Host { _folder: None, path, interface, sources, stats, slot: BatchSlot::new(BATCH_MAX) }, inheritance)
}

#[test]
fn rings_go_on_where_they_are() {
    let mut host = Host::new(2);
    let mut guest = Guest::connect(&host.path, 2);
    guest.start();
    wait_for("the rings", || host.is_up());
    guest.transmit(&frame(64, 1));
    assert_eq!(host.receive(), [frame(64, 1)]);
    guest.offer(3);
    host.deliver(0, &frame(70, 2));
    assert_eq!(guest.read(), Some(frame(70, 2)));
    guest.transmit_on(3, &frame(64, 7));
    assert_eq!(host.receive_on(1), [frame(64, 7)]);

    let (mut heir, inheritance) = hand_over(&host, 2);
    assert!(!heir.is_up(), "the running vnetd has the rings");
    guest.transmit(&frame(64, 3));
    assert_eq!(host.receive(), [frame(64, 3)]);
    guest.transmit(&frame(64, 4));
    assert_eq!(heir.receive(), [[0; 0]; 0]);
    heir.interface.start();
    assert!(heir.is_up(), "{}", heir.reason());
    assert_eq!(heir.receive(), [frame(64, 4)], "the chain that has waited");
    heir.deliver(0, &frame(70, 5));
    assert_eq!(guest.read(), Some(frame(70, 5)));
    inheritance.settle();
    std::mem::forget(host);
    // Its front end does not notice: its next messages are answered.
    assert_eq!(guest.frontend.get_features().unwrap() & LINUX, LINUX);
    assert_eq!(guest.frontend.get_vring_base(1).unwrap(), 3);
    assert_eq!(guest.frontend.get_vring_base(3).unwrap(), 1);
    guest.start_ring(1);
    guest.transmit(&frame(64, 6));
    wait_for("the ring", || heir.receive() == [frame(64, 6)]);
    drop(guest);
    wait_for("the end", || !heir.is_up());
    // The socket is the new one's.
    let mut other = Guest::connect(&heir.path, 2);
    other.start();
    wait_for("another front end", || heir.is_up());
    let path = heir.path.clone();
    drop(heir);
    assert!(!path.exists());
}

#[test]
fn a_failed_heir_leaves_everything_and_may_have_used_the_rings() {
    let mut host = Host::new(1);
    let mut guest = Guest::connect(&host.path, 1);
    guest.start();
    wait_for("the rings", || host.is_up());
    (1..4).for_each(|seed| guest.transmit(&frame(64, seed)));
    let (mut heir, _inheritance) = hand_over(&host, 1);
    heir.interface.start();
    assert_eq!(heir.receive(), [frame(64, 1), frame(64, 2), frame(64, 3)]);
    drop(heir);
    assert!(host.path.exists(), "the socket is the running vnetd's");
    host.interface.go_on();
    assert!(host.is_up(), "{}", host.reason());
    assert_eq!(host.receive(), [[0; 0]; 0], "the heir has taken these");
    for index in 0..3 {
        assert_eq!(guest.rings[1].collect(&guest.memory), Some((index, 0)));
    }
    guest.transmit(&frame(64, 9));
    assert_eq!(host.receive(), [frame(64, 9)]);
    assert!(guest.rings[1].collect(&guest.memory).is_some());
    assert_eq!(guest.rings[1].collect(&guest.memory), None);
    std::mem::forget(host);
}

#[test]
fn an_interface_without_a_front_end_is_handed_over() {
    let host = Host::new(1);
    let (heir, inheritance) = hand_over(&host, 1);
    heir.interface.start();
    inheritance.settle();
    // The running vnetd would accept front ends, too, if its process lived.
    host.interface.stop.request();
    let mut guest = Guest::connect(&heir.path, 1);
    guest.start();
    wait_for("the front end", || heir.is_up());
    std::mem::forget(host);
}

#[test]
fn a_guest_under_way_to_another_host_is_not_handed_over() {
    let host = Host::new(1);
    let mut guest = Guest::connect(&host.path, 1);
    guest.features |= LOG_ALL;
    guest.start();
    let log = rustix::fs::memfd_create("log", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&log, 1 << 20).unwrap();
    let (mmap_size, mmap_offset, mmap_handle) = (1 << 20, 0, log.as_raw_fd());
    let region = vhost::VhostUserDirtyLogRegion { mmap_size, mmap_offset, mmap_handle };
    guest.frontend.set_log_base(0, Some(region)).unwrap();
    let error = host.interface.hand_over().err().unwrap();
    assert!(error.contains("is being migrated"), "{error}");
}

#[test]
fn a_part_of_a_message_is_not_waited_for() {
    let host = Host::new(1);
    let mut guest = Guest::connect(&host.path, 1);
    guest.start();
    wait_for("the rings", || host.is_up());
    // SET_VRING_ENABLE with a header of eight bytes, and none of them.
    io::Write::write_all(&mut guest.raw, &[18_u32, 1, 8].map(u32::to_ne_bytes).concat()).unwrap();
    wait_for("the thread to read it", || host.interface.device.turn.is_locked());
    let error = host.interface.hand_over().err().unwrap();
    assert!(error.contains("a part of a message"), "{error}");
}

#[test]
fn what_is_missing_is_found() {
    let host = Host::new(1);
    let mut guest = Guest::connect(&host.path, 1);
    guest.start();
    wait_for("the rings", || host.is_up());
    for missing in ["listener", "region", "kick", "call"] {
        let Handed { files, guest, turn, .. } = host.interface.hand_over().unwrap();
        drop(turn);
        let named = files.into_iter().filter(|(kind, _)| *kind != missing);
        let named = named.map(|(kind, file)| (inherit::interface("vm1", kind), file));
        let inheritance = Arc::new(Inheritance::new(named));
        inheritance.add_guests([("vm1".to_owned(), guest.unwrap())].into());
        let (place, stats) = ((PortId(1), NetworkId::DEFAULT), Arc::default());
        let error = VhostUser::inherit(options(&host.path, 1), &inheritance, place, stats).err().unwrap();
        assert!(error.to_string().contains("vm1"), "{missing}: {error}");
    }
    assert!(host.path.exists() && host.is_up());
}
