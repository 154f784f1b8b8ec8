//! Frames through a whole interface, and every way in which a guest and its front end may restart.

use super::super::config_space;
use super::*;

#[test]
fn frames_flow_both_ways() {
    let mut host = Host::new(1);
    wait_for("the control thread", || host.reason().contains("to connect to"));
    let mut guest = Guest::connect(&host.path, 1);
    assert!(host.receive().is_empty());
    host.deliver(0, &frame(60, 0));
    assert_eq!(host.stats.drops(DropReason::NotReady), 1);
    guest.start();
    assert!(host.is_up(), "{}", host.reason());

    guest.transmit(&frame(64, 1));
    guest.transmit(&frame(1500, 2));
    assert_eq!(host.receive(), [frame(64, 1), frame(1500, 2)]);
    assert_eq!(guest.rings[1].collect(&guest.memory), Some((0, 0)));
    assert_eq!(guest.calls[1].read().unwrap(), 1, "one notification a batch");

    guest.offer(2);
    host.deliver(0, &frame(64, 3));
    host.deliver(0, &frame(1518, 4));
    host.deliver(0, &frame(1519, 5));
    host.deliver(0, &frame(64, 6));
    assert_eq!(guest.read(), Some(frame(64, 3)));
    assert_eq!(guest.read(), Some(frame(1518, 4)));
    assert_eq!(guest.read(), None);
    assert!(guest.calls[0].read().is_ok());
    assert_eq!(host.stats.drops(DropReason::MtuExceeded), 1);
    assert_eq!(host.stats.drops(DropReason::NoBuffer), 1);
    assert_eq!(host.stats.out_frames.get(), 2);
    assert_eq!((host.stats.in_frames.get(), host.stats.in_bytes.get()), (2, 1564));
    assert_eq!(host.stats.notifications.get(), 2);
}

#[test]
fn a_kick_wakes_the_dispatcher_once() {
    let mut host = Host::new(1);
    let poller = Poller::new().unwrap();
    let woken = || {
        let mut tokens = vec![];
        poller.wait(Some(Duration::from_millis(50)), |token| tokens.push(token)).unwrap();
        !tokens.is_empty()
    };
    host.source(0).watch(poller.waker(5));
    let mut guest = Guest::connect(&host.path, 1);
    assert!(host.source(0).rest(), "nothing to do without a ring");
    guest.transmit(&frame(60, 1));
    guest.start();
    // Frames made available before the ring was started also wake the dispatcher.
    assert!(woken());
    assert!(!host.source(0).rest(), "a frame waits");
    assert_eq!(host.receive().len(), 1);
    while woken() {}
    assert!(host.source(0).rest());
    assert!(!woken());

    guest.transmit(&frame(60, 2));
    assert_eq!(guest.rings[1].avail_event(&guest.memory), 1, "the driver is asked to kick");
    guest.kicks[1].write(1).unwrap();
    assert!(woken());
    host.source(0).resume();
    assert_eq!(host.stats.kicks.get(), 1);
    assert_eq!(host.receive().len(), 1);
    assert!(!woken());

    // While detached, kicks do not wake the dispatcher, although the front end's descriptor stays open. After attaching again,
    // they do.
    host.source(0).unwatch();
    guest.kicks[1].write(1).unwrap();
    assert!(!woken());
    host.source(0).watch(poller.waker(6));
    while woken() {}
    guest.kicks[1].write(1).unwrap();
    assert!(woken());
    // After a stop, the old descriptor is no longer watched.
    guest.frontend.get_vring_base(1).unwrap();
    while woken() {}
    guest.kicks[1].write(1).unwrap();
    assert!(!woken());
}

#[test]
fn a_guest_that_does_not_kick_is_polled() {
    let mut host = Host::new(1);
    let mut guest = Guest::connect(&host.path, 1);
    guest.start();
    assert!(host.source(0).rest());
    // SET_VRING_KICK and SET_VRING_CALL without a descriptor: bit 8 of the index.
    guest.send(12, &[0x101, 0]);
    guest.send(13, &[0x101, 0]);
    // The answer comes after both messages were handled.
    guest.frontend.get_features().unwrap();
    wait_for("polling", || !host.source(0).rest());
    guest.transmit(&frame(60, 1));
    assert_eq!(host.receive(), [frame(60, 1)]);
    assert!(guest.calls[1].read().is_err());
}

#[test]
fn drivers_can_reload_with_other_features() {
    let mut host = Host::new(1);
    let mut guest = Guest::connect(&host.path, 1);
    guest.start();
    for round in 0..3 {
        guest.transmit(&frame(60, round));
        assert_eq!(host.receive(), [frame(60, round)]);
        guest.offer(1);
        host.deliver(0, &frame(100, round));
        assert_eq!(guest.read(), Some(frame(100, round)));
        assert_eq!(guest.frontend.get_vring_base(0).unwrap(), 1);
        assert_eq!(guest.frontend.get_vring_base(1).unwrap(), 1);
        assert!(!host.is_up());
        assert!(host.receive().is_empty());
        // A new driver with fresh rings; in the second round a legacy driver with its shorter header.
        for index in 0..2 {
            guest.rings[index] =
                MockRing::new(&guest.memory, GUEST_BASE + index as u64 * RING_SPACE, SIZE, 0);
            guest.memory.write(GUEST_BASE + index as u64 * RING_SPACE, &[0; RING_SPACE as usize]);
        }
        guest.features = if round == 1 { LINUX } else { EVENT_IDX } | PROTOCOL_FEATURES;
        guest.start();
        assert!(host.is_up(), "{}", host.reason());
    }
}

#[test]
fn rings_stop_and_continue_at_their_position() {
    let mut host = Host::new(1);
    let mut guest = Guest::connect(&host.path, 1);
    guest.start();
    for i in 0..5 {
        guest.transmit(&frame(60, i));
    }
    assert_eq!(host.receive().len(), 5);
    guest.transmit(&frame(60, 5));
    assert_eq!(guest.frontend.get_vring_base(1).unwrap(), 5);
    while guest.rings[1].collect(&guest.memory).is_some() {}
    guest.start_ring(1);
    assert_eq!(host.receive(), [frame(60, 5)]);
    // The frame waits while the ring is disabled.
    guest.frontend.set_vring_enable(1, false).unwrap();
    guest.transmit(&frame(60, 6));
    assert!(host.receive().is_empty());
    guest.frontend.set_vring_enable(1, true).unwrap();
    assert_eq!(host.receive(), [frame(60, 6)]);
    // RESET_DEVICE stops all rings; memory stays.
    guest.frontend.reset_device().unwrap();
    assert!(!host.is_up());
    while guest.rings[1].collect(&guest.memory).is_some() {}
    guest.start_ring(1);
    assert!(!host.is_up(), "disabled after a reset");
    guest.frontend.set_vring_enable(1, true).unwrap();
    guest.transmit(&frame(60, 7));
    assert_eq!(host.receive(), [frame(60, 7)]);
}

#[test]
fn front_ends_can_reconnect() {
    let mut host = Host::new(1);
    for round in 0..3 {
        let mut guest = Guest::connect(&host.path, 1);
        guest.start();
        guest.transmit(&frame(60, round));
        assert_eq!(host.receive(), [frame(60, round)]);
        drop(guest);
        wait_for("the end of the connection", || !host.is_up());
        host.deliver(0, &frame(60, 0));
    }
    assert_eq!(host.stats.drops(DropReason::NotReady), 3);
    wait_for("waiting for the next one", || host.reason().contains("to connect to"));
}

#[test]
fn a_restarted_daemon_neither_loses_nor_repeats_a_frame() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("vm1.sock");
    let mut host = Host::at(options(&path, 1));
    let mut guest = Guest::connect(&path, 1);
    guest.start();
    for i in 0..3 {
        guest.transmit(&frame(60, i));
    }
    assert_eq!(host.receive().len(), 3);
    guest.transmit(&frame(60, 3));
    guest.offer(4);
    host.deliver(0, &frame(60, 9));
    host.interface.stop();
    assert!(guest.is_closed());
    assert!(!path.exists());
    assert!(host.receive().is_empty(), "no frame after stop");
    guest.transmit(&frame(60, 4));

    // The daemon restarts. The front end reconnects with the used index, and the guest does not notice.
    let mut host = Host::at(options(&path, 1));
    let again = Guest::connect(&path, 1);
    (guest.frontend, guest.raw) = (again.frontend, again.raw);
    let mut used = 0;
    while guest.rings[1].collect(&guest.memory).is_some() {
        used += 1;
    }
    assert_eq!(used, 3);
    assert_eq!(guest.read(), Some(frame(60, 9)));
    guest.start();
    assert_eq!(host.receive(), [frame(60, 3), frame(60, 4)]);
    host.deliver(0, &frame(60, 10));
    assert_eq!(guest.read(), Some(frame(60, 10)));
}

#[test]
fn memory_can_change_while_rings_run() {
    let mut host = Host::new(1);
    let mut guest = Guest::connect(&host.path, 1);
    guest.start();
    guest.transmit(&frame(60, 1));
    assert_eq!(host.receive(), [frame(60, 1)]);
    // The front end sends the same table again; then it adds and removes a second region.
    guest.frontend.set_mem_table(&[guest.region()]).unwrap();
    guest.transmit(&frame(60, 2));
    assert_eq!(host.receive(), [frame(60, 2)]);
    assert_eq!(guest.frontend.get_max_mem_slots().unwrap(), 64);
    let extra = MockMemory::new(0x1000);
    let mut region = guest.region();
    region.guest_phys_addr = 0x4000_0000;
    region.userspace_addr = 0x1000;
    region.memory_size = 0x1000;
    region.mmap_handle = extra.file().as_raw_fd();
    extra.write(GUEST_BASE, &[&[0; 12][..], &frame(60, 3)].concat());
    guest.frontend.add_mem_region(&region).unwrap();
    guest.rings[1].add(&guest.memory, &[(0x4000_0000, 72, 0)]).unwrap();
    guest.rings[1].publish(&guest.memory);
    assert_eq!(host.receive(), [frame(60, 3)]);
    guest.frontend.remove_mem_region(&region).unwrap();
    guest.rings[1].add(&guest.memory, &[(0x4000_0000, 72, 0)]).unwrap();
    guest.rings[1].publish(&guest.memory);
    assert!(host.receive().is_empty());
    assert_eq!(host.stats.drops(DropReason::BadChain), 1);
    // Removing the region that holds the rings stops the queues; adding it again restarts them.
    let own = guest.region();
    guest.frontend.remove_mem_region(&own).unwrap();
    assert!(host.reason().contains("lies outside the shared memory"), "{}", host.reason());
    guest.frontend.add_mem_region(&own).unwrap();
    guest.transmit(&frame(60, 4));
    assert_eq!(host.receive(), [frame(60, 4)]);
}

#[test]
fn queues_come_in_pairs() {
    let mut host = Host::new(2);
    let mut guest = Guest::connect(&host.path, 2);
    assert_ne!(guest.frontend.get_features().unwrap() & MQ, 0);
    assert_eq!(guest.frontend.get_queue_num().unwrap(), 4);
    guest.features |= MQ;
    guest.start();
    guest.transmit_on(3, &frame(60, 1));
    assert!(host.receive_on(0).is_empty());
    assert_eq!(host.receive_on(1), [frame(60, 1)]);
    assert_eq!(host.sources.len(), 2);
    assert_eq!((host.interface.queues(), host.interface.active_queues()), (2, 2));
    // A guest that uses one pair receives all frames there.
    guest.frontend.set_vring_enable(2, false).unwrap();
    assert_eq!(host.interface.active_queues(), 1);
    guest.offer(1);
    host.deliver(1, &frame(60, 2));
    assert_eq!(guest.read(), Some(frame(60, 2)));
}

#[test]
fn the_configuration_space_holds_mac_status_queues_and_mtu() {
    let host = Host::new(1);
    let mut guest = Guest::connect(&host.path, 1);
    let flags = vhost::vhost_user::message::VhostUserConfigFlags::empty();
    let (_, space) = guest.frontend.get_config(0, 12, flags, &[0; 12]).unwrap();
    assert_eq!(space, [0x52, 0x54, 0, 0, 0, 1, 1, 0, 1, 0, 0xdc, 5]);
    // A range beyond the end of the configuration space: answered with size 0 (the crate's front end would wait for more data).
    guest.send(24, &[60, 8, 0, 0, 0]);
    let mut reply = [0; 24];
    io::Read::read_exact(&mut guest.raw, &mut reply).unwrap();
    assert_eq!(reply, [24u32, 5, 12, 60, 0, 0].map(u32::to_ne_bytes).concat()[..]);
    assert_eq!(config_space::read(&host.interface.device.options, u32::MAX, u32::MAX), None);
    let offered = guest.frontend.get_protocol_features().unwrap();
    assert!(offered.contains(VhostUserProtocolFeatures::MTU | VhostUserProtocolFeatures::RARP));
    assert!(!offered.contains(VhostUserProtocolFeatures::MQ));
}

/// Sends a message with NEED_REPLY and returns the acknowledgement.
fn acknowledged(guest: &mut Guest, code: u32, payload: u64) -> u64 {
    let header: Vec<u8> = [code, 9, 8].iter().flat_map(|w: &u32| w.to_ne_bytes()).collect();
    io::Write::write_all(&mut guest.raw, &[header, payload.to_ne_bytes().to_vec()].concat()).unwrap();
    let mut reply = [0; 20];
    io::Read::read_exact(&mut guest.raw, &mut reply).unwrap();
    assert_eq!(reply[..12], [code, 5, 8].map(u32::to_ne_bytes).concat()[..]);
    u64::from_ne_bytes(reply[12..].try_into().unwrap())
}

#[test]
fn handles_net_set_mtu_and_send_rarp() {
    let mut host = Host::new(1);
    let mut guest = Guest::connect(&host.path, 1);
    assert_eq!(acknowledged(&mut guest, 20, 1500), 0);
    assert_eq!(acknowledged(&mut guest, 20, 9000), 1);
    guest.start();
    let mac = u64::from_ne_bytes([0x52, 0x54, 0, 0, 0, 9, 0, 0]);
    assert_eq!(acknowledged(&mut guest, 19, mac), 0);
    guest.transmit(&frame(60, 1));
    let announcement = host.receive().remove(0);
    assert_eq!(announcement[..14], [255, 255, 255, 255, 255, 255, 0x52, 0x54, 0, 0, 0, 9, 0x80, 0x35]);
    assert_eq!(announcement.len(), 60);
    assert_eq!(host.receive(), [frame(60, 1)]);
    assert_eq!(host.stats.in_frames.get(), 2);
}

/// The front end stops, restarts and remaps rings while a dispatcher moves frames: no frame is lost, repeated or miscounted.
#[test]
fn changes_wait_for_frames_in_flight() {
    let mut host = Host::new(1);
    let mut guest = Guest::connect(&host.path, 1);
    guest.start();
    let (interface, end) = (host.interface.clone(), Arc::new(AtomicBool::new(false)));
    let ended = end.clone();
    let dispatcher = std::thread::spawn(move || {
        let (mut slot, mut drops, mut seen) = (BatchSlot::new(BATCH_MAX), DropSink::new(), vec![]);
        let mut source = interface.clone().source(0);
        while !ended.load(std::sync::atomic::Ordering::SeqCst) {
            let burst = receive(&mut *source, &mut slot, &mut drops, 0);
            for frame in burst.frames() {
                seen.push(burst.head(frame)[20]);
                // Sends each frame back to its guest: the transmit vring is locked while the receive vring is being locked.
                let which = [seen.len() as u16 % burst.len() as u16];
                interface.deliver(0, Selection { batch: &burst, which: &which }, &mut DropSink::new());
            }
        }
        seen
    });
    let mut sent = vec![];
    for round in 0..200u32 {
        for _ in 0..round % 5 {
            let mut bytes = frame(60, 0);
            bytes[20] = sent.len() as u8;
            sent.push(sent.len() as u8);
            guest.transmit(&bytes);
        }
        match round % 3 {
            0 => {
                let base = guest.frontend.get_vring_base(1).unwrap();
                while guest.rings[1].collect(&guest.memory).is_some() {}
                assert_eq!(base, u32::from(guest.rings[1].used_idx), "nothing in flight");
                guest.start_ring(1);
            }
            1 => drop(guest.frontend.set_mem_table(&[guest.region()]).unwrap()),
            _ => guest.frontend.set_features(guest.features).unwrap(),
        }
        assert!(host.is_up(), "{}", host.reason());
        wait_for("room", || {
            while guest.rings[1].collect(&guest.memory).is_some() {}
            guest.rings[1].free.len() > 8
        });
    }
    wait_for("the last frame", || {
        while guest.rings[1].collect(&guest.memory).is_some() {}
        guest.rings[1].free.len() == usize::from(SIZE)
    });
    end.store(true, std::sync::atomic::Ordering::SeqCst);
    assert_eq!(dispatcher.join().unwrap(), sent);
    let stats = &host.stats;
    assert_eq!(stats.in_frames.get(), sent.len() as u64);
    assert_eq!(stats.drops(DropReason::NoBuffer), sent.len() as u64, "the guest offered no buffers");
    assert!(host.receive().is_empty());
}
