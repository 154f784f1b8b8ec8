//! Hostile front ends and guests.

use std::os::fd::RawFd;

use rustix::fs::{MemfdFlags, memfd_create};
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

use super::*;
use crate::interface::virtqueue::memory::unmapping;

/// A message's bytes on the wire.
fn message(code: u32, flags: u32, size: u32, payload: &[u8]) -> Vec<u8> {
    let header: Vec<u8> = [code, flags, size].iter().flat_map(|w| w.to_ne_bytes()).collect();
    [header, payload.to_vec()].concat()
}

fn words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|w| w.to_ne_bytes()).collect()
}

/// A message whose size field matches its payload.
fn well_formed(code: u32, payload: &[u8]) -> Vec<u8> {
    message(code, 1, payload.len() as u32, payload)
}

/// Number of file descriptors of this process that are open on the file `name`.
fn open_descriptors(name: &str) -> usize {
    let all = std::fs::read_dir("/proc/self/fd").unwrap();
    all.filter(|e| {
        let link = e.as_ref().ok().and_then(|e| std::fs::read_link(e.path()).ok());
        link.is_some_and(|l| l.to_string_lossy().contains(name))
    })
    .count()
}

#[test]
fn malformed_messages_end_only_the_connection() {
    let mut host = Host::new(1);
    let file = memfd_create("vnet-hostile-fd", MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, 0x10000).unwrap();
    let fd = file.as_raw_fd();
    let region = |gpa: u64, len, user, offset| words(&[gpa, len, user, offset]);
    let table = |regions: &[Vec<u8>]| [words(&[regions.len() as u64]), regions.concat()].concat();
    let good = region(0x1000, 0x1000, 0x1000, 0);
    let max = u64::MAX;
    let attacks: Vec<(&str, Vec<u8>, Vec<RawFd>)> = vec![
        ("unknown request", well_formed(99, &[]), vec![]),
        ("request 0", well_formed(0, &[]), vec![]),
        ("wrong version", message(1, 2, 0, &[]), vec![]),
        ("a reply", message(2, 5, 8, &words(&[0])), vec![]),
        ("size beyond the message", message(2, 1, 1 << 20, &[]), vec![]),
        ("size smaller than the payload", message(2, 1, 4, &[0; 4]), vec![]),
        ("features not offered", well_formed(2, &words(&[1 << 63])), vec![]),
        ("protocol features not offered", well_formed(16, &words(&[1 << 5])), vec![]),
        ("descriptors with a message that takes none", well_formed(3, &[]), vec![fd; 8]),
        ("more descriptors than regions", well_formed(5, &table(std::slice::from_ref(&good))), vec![fd; 3]),
        ("fewer descriptors than regions", well_formed(5, &table(&[good.clone(), good.clone()])), vec![fd]),
        ("regions beyond the message", well_formed(5, &[words(&[9]), good.clone()].concat()), vec![fd]),
        ("no region", well_formed(5, &words(&[0])), vec![fd]),
        ("region beyond its file", well_formed(5, &table(&[region(0, 0x10001, 0, 0)])), vec![fd]),
        ("offset beyond its file", well_formed(5, &table(&[region(0, 0x1000, 0, 0x10000)])), vec![fd]),
        ("offset overflow", well_formed(5, &table(&[region(0, 0x1000, 0, max - 0xfff)])), vec![fd]),
        ("address overflow", well_formed(5, &table(&[region(max - 0xffe, 0x1000, 0, 0)])), vec![fd]),
        ("overlapping regions", well_formed(5, &table(&[good.clone(), good.clone()])), vec![fd; 2]),
        ("adding a region twice", well_formed(37, &[words(&[0]), good.clone()].concat()), vec![fd; 2]),
        ("removing an unknown region", well_formed(38, &[words(&[0]), good].concat()), vec![]),
        ("queue size 0", well_formed(8, &words(&[0])), vec![]),
        ("queue size 3", well_formed(8, &words(&[3 << 32])), vec![]),
        ("queue size that 16 bits truncate", well_formed(8, &words(&[0x1_0100 << 32])), vec![]),
        ("vring that 8 bits truncate", well_formed(8, &words(&[256 << 32 | 0x101])), vec![]),
        ("vring that 16 bits truncate", well_formed(10, &words(&[0x1_0001])), vec![]),
        ("vring out of range", well_formed(11, &words(&[2])), vec![]),
        ("base that 16 bits truncate", well_formed(10, &words(&[0x1_0000 << 32])), vec![]),
        ("misaligned descriptors", well_formed(9, &words(&[0, 8, 0, 0, 0])), vec![]),
        ("unknown address flags", well_formed(9, &words(&[8 << 32, 0, 0, 0, 0])), vec![]),
        ("enable neither 0 nor 1", well_formed(18, &words(&[2 << 32])), vec![]),
        ("enable out of range", well_formed(18, &words(&[2])), vec![]),
        ("kick without its descriptor", well_formed(12, &words(&[1])), vec![]),
        ("kick with two", well_formed(12, &words(&[1])), vec![fd; 2]),
        ("kick that is not an eventfd", well_formed(12, &words(&[1])), vec![fd]),
        ("call that is not an eventfd", well_formed(13, &words(&[1])), vec![fd]),
        ("kick out of range", well_formed(12, &words(&[0x177])), vec![]),
        ("log of no bytes", well_formed(6, &words(&[0, 0])), vec![fd]),
        ("log beyond its file", well_formed(6, &words(&[0x10001, 0])), vec![fd]),
        ("log that overflows", well_formed(6, &words(&[0x1000, max - 0xfff])), vec![fd]),
        ("log larger than this host's memory", well_formed(6, &words(&[1 << 50, 0])), vec![fd]),
        ("log without its descriptor", well_formed(6, &words(&[0x1000, 0])), vec![]),
        ("log with two", well_formed(6, &words(&[0x1000, 0])), vec![fd; 2]),
        ("log eventfd that is none", well_formed(7, &[]), vec![fd]),
        ("log eventfd that is missing", well_formed(7, &[]), vec![]),
        ("two log eventfds", well_formed(7, &[]), vec![fd; 2]),
        ("log eventfd with a payload", well_formed(7, &words(&[0])), vec![fd]),
        ("RARP for the broadcast address", well_formed(19, &words(&[max])), vec![]),
        ("in-flight area", well_formed(31, &[0; 24]), vec![]),
        ("GPU socket", well_formed(33, &[]), vec![fd]),
    ];
    for (name, bytes, fds) in attacks {
        let mut guest = Guest::connect(&host.path, 1);
        guest.raw.send_with_fds(&[&bytes[..]], &fds).unwrap();
        assert!(guest.is_closed(), "{name}");
    }
    let mut guest = Guest::connect(&host.path, 1);
    // Crate vhost answers this message with an error: bit 8 means "no descriptor", the low byte means failure.
    guest.raw.send_with_fds(&[&well_formed(42, &words(&[0]))[..]], &[fd]).unwrap();
    let mut answer = [0; 20];
    io::Read::read_exact(&mut guest.raw, &mut answer).unwrap();
    assert_eq!(answer[12..14], [1, 1]);
    guest.start();
    guest.transmit(&frame(60, 1));
    assert_eq!(host.receive(), [frame(60, 1)]);
    // A connection closes before the descriptors that came with its last message.
    wait_for("descriptors to be closed", || open_descriptors("vnet-hostile-fd") == 1);
}

#[test]
fn repeated_messages_leak_no_descriptor_or_mapping() {
    let host = Host::new(1);
    let name = "vnet-repeated-fd";
    let file = memfd_create(name, MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, 0x10000).unwrap();
    let guest = Guest::connect(&host.path, 1);
    guest.frontend.set_features(guest.features).unwrap();
    let region = VhostUserMemoryRegionInfo {
        memory_size: 0x10000,
        mmap_handle: file.as_raw_fd(),
        ..VhostUserMemoryRegionInfo::default()
    };
    let mappings = || std::fs::read_to_string("/proc/self/maps").unwrap().matches(name).count();
    for _ in 0..100 {
        guest.frontend.set_mem_table(&[region]).unwrap();
        guest.frontend.set_vring_kick(0, &guest.kicks[0]).unwrap();
    }
    assert_eq!(mappings(), 1);
    assert_eq!(open_descriptors(name), 2, "ours, and that of the region");
    drop(guest);
    wait_for("unmapping", || mappings() == 0);
    wait_for("closing", || open_descriptors(name) == 1);
}

#[test]
fn a_broken_ring_disables_its_queue_until_reset() {
    let mut host = Host::new(1);
    let mut guest = Guest::connect(&host.path, 1);
    guest.start();
    guest.rings[1].avail_idx = SIZE + 1;
    guest.rings[1].publish(&guest.memory);
    assert!(host.receive().is_empty());
    assert!(
        host.reason().contains("broken: the guest's transmit queue: available index jumped from 0 to 65")
    );
    assert_eq!(guest.errors[1].read().unwrap(), 1);
    // The other direction keeps working; a new memory table does not repair the broken ring.
    guest.offer(1);
    host.deliver(0, &frame(60, 1));
    assert_eq!(guest.read(), Some(frame(60, 1)));
    guest.frontend.set_mem_table(&[guest.region()]).unwrap();
    assert!(host.receive().is_empty());
    assert!(!host.is_up());
    // The guest resets.
    assert_eq!(guest.frontend.get_vring_base(1).unwrap(), 0);
    guest.rings[1] = MockRing::new(&guest.memory, GUEST_BASE + RING_SPACE, SIZE, 0);
    guest.memory.write(guest.rings[1].avail(), &[0; 4]);
    guest.start_ring(1);
    assert!(host.is_up(), "{}", host.reason());
    guest.transmit(&frame(60, 2));
    assert_eq!(host.receive(), [frame(60, 2)]);

    // The receive queue breaks in the same way: undeliverable frames are counted.
    guest.rings[0].avail_idx = guest.rings[0].avail_idx.wrapping_add(SIZE + 1);
    guest.rings[0].publish(&guest.memory);
    host.deliver(0, &frame(60, 1));
    host.deliver(0, &frame(60, 1));
    assert_eq!(host.stats.drops(DropReason::NotReady), 2);
    assert!(host.reason().contains("receive queue"));
}

#[test]
fn truncated_memory_breaks_only_its_interface() {
    let (mut host, mut other) = (Host::new(1), Host::new(1));
    let (mut guest, mut neighbour) = (Guest::connect(&host.path, 1), Guest::connect(&other.path, 1));
    guest.start();
    neighbour.start();
    guest.transmit(&frame(60, 1));
    // The rings' pages remain, the frame's page is truncated.
    guest.memory.file().set_len(0x8000).unwrap();
    let mut drops = DropSink::new();
    drops.watch(true);
    assert!(
        receive(&mut *host.sources[0], &mut host.slot, &mut drops, 0).is_empty(),
        "a poisoned burst is dropped"
    );
    let mut seen = vec![];
    drops.take_refusals(|refusal| seen.push((refusal.port, refusal.reason, refusal.bytes)));
    assert_eq!(seen, [(PortId(1), DropReason::BadChain, 60)], "captures show it");
    assert!(host.reason().contains("truncated"), "{}", host.reason());
    assert_eq!(host.stats.in_frames.get(), host.stats.drops_total());
    neighbour.transmit(&frame(60, 2));
    assert_eq!(other.receive(), [frame(60, 2)]);
    // Delivery also detects truncation.
    neighbour.offer(1);
    neighbour.memory.file().set_len(0).unwrap();
    other.deliver(0, &frame(60, 3));
    assert!(other.reason().contains("broken"), "{}", other.reason());
    // A new guest can use the same socket.
    drop(guest);
    let mut guest = Guest::connect(&host.path, 1);
    guest.start();
    guest.transmit(&frame(60, 4));
    assert_eq!(host.receive(), [frame(60, 4)]);
}

/// Unmapping a large guest takes seconds: no dispatcher may have to wait for it.
#[test]
fn memory_is_unmapped_while_no_vring_is_locked() {
    // Tells this guest's memory from that of other tests.
    const LEN: u64 = 8 * RING_SPACE + 0x7b_d000;
    let host = Host::new(1);
    let mut guest = Guest::connect(&host.path, 1);
    guest.memory = MockMemory::new(LEN);
    let (sender, unlocked) = channel();
    let device = host.interface.device.clone();
    unmapping::watch(move |spec| {
        if spec.len == LEN {
            let _ = sender.send(device.is_unlocked());
        }
    });
    guest.start();
    guest.frontend.set_mem_table(&[guest.region()]).unwrap();
    assert!(unlocked.recv_timeout(Duration::from_secs(60)).unwrap(), "another memory table");
    drop(guest);
    assert!(unlocked.recv_timeout(Duration::from_secs(60)).unwrap(), "the front end disconnects");
}

#[test]
fn a_full_eventfd_does_not_stop_the_dispatcher() {
    let mut host = Host::new(1);
    let mut guest = Guest::connect(&host.path, 1);
    // The counter is full, and the front end later makes the eventfd blocking: a write would block.
    guest.calls[0].write(u64::MAX - 1).unwrap();
    guest.start();
    guest.offer(1);
    // SAFETY: fcntl with F_SETFL only changes flags of the open file.
    assert_eq!(unsafe { libc::fcntl(guest.calls[0].as_raw_fd(), libc::F_SETFL, 0) }, 0);
    let dispatcher = std::thread::spawn(move || {
        host.deliver(0, &frame(60, 1));
        host
    });
    wait_for("the dispatcher", || dispatcher.is_finished());
    let host = dispatcher.join().unwrap();
    assert_eq!(guest.read(), Some(frame(60, 1)));
    assert_eq!(host.stats.notifications.get(), 1);
}

#[test]
fn reports_vms_without_shared_memory() {
    // The front end shares no memory.
    let host = Host::new(1);
    let mut guest = Guest::connect(&host.path, 1);
    guest.send(18, &[0, 1]);
    guest.frontend.set_features(guest.features).unwrap();
    guest.start_ring(0);
    assert!(host.reason().contains("down: the VM shares no memory"), "{}", host.reason());
    assert!(host.reason().contains("share=on"));
    guest.frontend.set_mem_table(&[guest.region()]).unwrap();
    wait_for("the ring", || host.is_up());

    // The front end shares memory other than the guest's.
    let mut host = Host::new(1);
    let mut guest = Guest::connect(&host.path, 1);
    let own = std::mem::replace(&mut guest.memory, MockMemory::new(8 * RING_SPACE + 0x40_0000));
    guest.start();
    guest.memory = own;
    guest.kicks[1].write(1).unwrap();
    assert!(host.is_up(), "QEMU itself kicks once: {}", host.reason());
    guest.transmit(&frame(60, 1));
    guest.kicks[1].write(1).unwrap();
    assert!(host.receive().is_empty());
    assert!(host.reason().contains("down: the guest kicks"), "{}", host.reason());
    assert!(host.reason().contains("share=on"));
}

#[test]
fn an_idle_guest_is_not_reported_as_without_shared_memory() {
    let mut host = Host::new(1);
    let mut guest = Guest::connect(&host.path, 1);
    guest.start();
    guest.offer(1);
    for _ in 0..5 {
        guest.kicks[1].write(1).unwrap();
        assert!(host.is_up(), "{}", host.reason());
        host.source(0).rest();
        host.source(0).resume();
    }
    guest.transmit(&frame(60, 1));
    assert_eq!(host.receive(), [frame(60, 1)]);
}

#[test]
fn backs_off_from_a_front_end_that_disconnects_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let host = Host::at(VhostUserOptions { server: false, ..options(&path, 1) });
    listener.set_nonblocking(true).unwrap();
    let (end, mut connections) = (Instant::now() + Duration::from_millis(700), 0);
    while Instant::now() < end {
        connections += usize::from(listener.accept().is_ok());
        std::thread::sleep(Duration::from_millis(1));
    }
    // Connections after 0, 10, 30, 70, 150, 310 and 630 ms.
    assert!((3..=7).contains(&connections), "{connections}");
    drop(listener);
    wait_for("the reason", || host.reason().contains("cannot reach"));
}

/// Runs the corpus of the fuzzer as a unit test, in a process whose descriptors are its own.
#[test]
fn the_corpus_of_front_ends_does_no_harm() {
    crate::alone("interface::vhost_user::tests::hostile::the_corpus_of_front_ends_does_no_harm", || {
        let corpus =
            std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../fuzz/corpus/vhost_user")).unwrap();
        let inputs: Vec<_> = corpus.map(|entry| std::fs::read(entry.unwrap().path()).unwrap()).collect();
        assert!(inputs.len() > 10);
        inputs.iter().for_each(|input| fuzz::messages(input));
    });
}
