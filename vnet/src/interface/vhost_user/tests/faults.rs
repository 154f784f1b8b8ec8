//! A guest whose pages vnetd loses again and again.

use rustix::fs::{FallocateFlags, fallocate};

use super::*;
use crate::interface::virtqueue::{DESC_INDIRECT, DESC_NEXT};

/// Guest address of the pieces, one in a page.
const PIECES_AT: u64 = ARENA + 0x40_0000;
/// Pieces of a frame.
const PIECES: u64 = 100;
/// Frames in memory.
const FRAMES: u64 = 8;
const PAGE: u64 = 0x1000;

/// A host, and a guest with room for frames in pieces.
fn connected() -> (Host, Guest) {
    let host = Host::new(1);
    let mut guest = Guest::connect(&host.path, 1);
    guest.memory = MockMemory::new(PIECES_AT - GUEST_BASE + FRAMES * PIECES * PAGE);
    let place = |i| GUEST_BASE + i * RING_SPACE;
    guest.rings = (0..2).map(|i| MockRing::new(&guest.memory, place(i), SIZE, 0)).collect();
    guest.start();
    (host, guest)
}

/// Takes the pages of all pieces away from vnetd; the guest reads zeros there.
fn lose_pages(guest: &Guest) {
    let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    fallocate(guest.memory.file(), how, PIECES_AT - GUEST_BASE, FRAMES * PIECES * PAGE).unwrap();
}

/// Makes `count` frames available, each with 12 bytes of header and [`PIECES`] of one byte.
fn transmit(guest: &mut Guest, count: u64) {
    for frame in 0..count {
        let table = ARENA + frame * PAGE;
        let mut at = table + 16 * (PIECES + 1);
        let mut len = 12;
        for entry in 0..=PIECES {
            let last = entry == PIECES;
            let words = u128::from(at) | len << 64 | u128::from(if last { 0 } else { DESC_NEXT }) << 96;
            let descriptor = words | u128::from(if last { 0 } else { entry as u16 + 1 }) << 112;
            guest.memory.write(table + 16 * entry, &descriptor.to_le_bytes());
            (at, len) = (PIECES_AT + (frame * PIECES + entry) * PAGE, 1);
        }
        guest.rings[1].add(&guest.memory, &[(table, 16 * (PIECES as u32 + 1), DESC_INDIRECT)]).unwrap();
    }
    guest.rings[1].publish(&guest.memory);
}

fn collect(guest: &mut Guest) {
    while guest.rings[1].collect(&guest.memory).is_some() {}
}

/// Receives a burst, and takes long.
fn receive_slowly(host: &mut Host) -> usize {
    let mut drops = DropSink::new();
    let burst = receive(&mut *host.sources[0], &mut host.slot, &mut drops, 0);
    std::thread::sleep(Duration::from_millis(5));
    burst.len()
}

fn faults_now() -> u64 {
    usage::page_faults()[0]
}

fn is_faulty(host: &Host) -> bool {
    host.interface.device.pairs[0].faulty_until_ms.load(Relaxed) != 0
}

#[test]
fn a_queue_that_loses_its_pages_leaves_them_to_a_thread() {
    let (mut host, mut guest) = connected();
    transmit(&mut guest, FRAMES);
    assert_eq!(receive_slowly(&mut host), FRAMES as usize);
    collect(&mut guest);
    lose_pages(&guest);
    transmit(&mut guest, FRAMES);
    let before = faults_now();
    assert_eq!(host.receive().len(), FRAMES as usize, "suspected; the page faults are counted");
    assert!(faults_now() - before >= FRAMES * PIECES && is_faulty(&host));
    assert!(host.interface.notes().concat().contains("page faults"));
    for _ in 0..3 {
        collect(&mut guest);
        lose_pages(&guest);
        transmit(&mut guest, FRAMES);
        let (mut frames, mut most) = (0, 0);
        wait_for("frames whose pages were read", || {
            let before = faults_now();
            let received = host.receive();
            if !received.is_empty() {
                most = most.max(faults_now() - before);
            }
            assert!(received.len() <= 1, "one in a turn");
            assert!(received.iter().all(|frame| *frame == [0; PIECES as usize]));
            // A dispatcher may rest meanwhile.
            if received.is_empty() && host.source(0).rest() {
                host.source(0).resume();
            }
            frames += received.len() as u64;
            frames == FRAMES
        });
        // Others than those of the frames are of this test.
        assert!(most < PIECES / 2, "{most} page faults in a turn");
    }
    collect(&mut guest);
    let ring = &guest.rings[1];
    assert_eq!(
        (ring.used_idx, ring.avail_idx),
        (5 * FRAMES as u16, 5 * FRAMES as u16),
        "each came back once"
    );
}

#[test]
fn a_change_of_memory_makes_pages_unread_again() {
    let (mut host, mut guest) = connected();
    transmit(&mut guest, 2);
    receive_slowly(&mut host);
    collect(&mut guest);
    lose_pages(&guest);
    transmit(&mut guest, 2);
    assert_eq!(host.receive().len(), 2);
    collect(&mut guest);
    transmit(&mut guest, 2);
    wait_for("a frame", || host.receive().len() == 1);
    let pages_read = |host: &Host| {
        host.interface.device.pairs[0].transmit.lock().vring.running().map(|running| running.pages_read)
    };
    assert_eq!(pages_read(&host), Some(1));
    guest.frontend.set_mem_table(&[guest.region()]).unwrap();
    assert_eq!(pages_read(&host), Some(0));
    wait_for("the other", || host.receive().len() == 1);
}

#[test]
fn a_dispatcher_that_was_interrupted_suspects_nobody_for_long() {
    let (mut host, mut guest) = connected();
    for _ in 0..3 {
        transmit(&mut guest, FRAMES);
        assert_eq!(receive_slowly(&mut host), FRAMES as usize);
        collect(&mut guest);
    }
    assert!(!is_faulty(&host) && host.interface.notes().is_empty());
}

#[test]
fn a_queue_that_gets_another_dispatcher_meanwhile_goes_on() {
    let (mut host, mut guest) = connected();
    host.interface.device.pairs[0].read_ahead.store(true, Relaxed);
    transmit(&mut guest, 1);
    assert!(host.receive().is_empty());
    host.sources[0] = host.interface.clone().source(0);
    assert_eq!(host.receive().len(), 1);
}
