//! A hostile guest, for tests and for the fuzz target.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::fake::FakeGuest;
use super::host::GuestHost;
use super::wire::{Body, GROUP, Message, PAGE, QUEUES, QUEUES_BYTES, Run, Token};
use crate::daemon::{Service, ShareSettings};
use crate::meeting::Request;
use crate::ring::create;

/// Runs a guest that sends the frames in `data`: each a length of two bytes and so many bytes. Frames of unknown form are taken as they are; others
/// get the number and secret of an open attachment, so that they reach its memory.
///
/// # Panics
/// If the daemon's side misbehaves: that is what the fuzzer looks for.
pub fn run(data: &[u8]) {
    let service = Service::start(1 << 24, 1 << 26).unwrap();
    let guest = FakeGuest::new(1, &Arc::default());
    let (queues, memory) = (create(QUEUES_BYTES).unwrap(), create(16 * PAGE as usize).unwrap());
    let queues = guest.place(&queues, QUEUES_BYTES);
    let mapped = guest.place(&memory, 16 * PAGE as usize);
    let mut host = GuestHost::new(Arc::new(guest.clone()), service.clone(), (1, 1)).unwrap();
    let (mut now, token): (Instant, Token) = (Instant::now(), [5; 16]);
    let bind = "10.0.0.1:7000".parse().unwrap();
    let open = Body::Open(Request { bind, timeout_ms: 0, not_ready_ms: 0 });
    let hear = |host: &mut GuestHost, now, frame: &[u8]| {
        host.hear(now, frame, Ok(ShareSettings::default()));
        while guest_frame(&guest).is_some() {}
    };
    hear(&mut host, now, &Message { attachment: 0, token, body: open }.encode(guest.mac, GROUP));
    let attachment = host.numbers().next().unwrap();
    let share = |memory, bytes, runs: Vec<Run>| Body::Share {
        memory,
        bytes,
        total: runs.len() as u16,
        first: 0,
        runs,
    };
    for body in [share(QUEUES, QUEUES_BYTES as u64, queues), share(1, 16 * PAGE, mapped)] {
        hear(&mut host, now, &Message { attachment, token, body }.encode(guest.mac, GROUP));
    }
    let mut rest = data;
    while let [a, b, more @ ..] = rest {
        let (frame, more) = more.split_at(usize::from(u16::from_be_bytes([*a, *b])).min(more.len()));
        rest = more;
        now += Duration::from_millis(3);
        if let Some((from, message)) = Message::decode(frame) {
            let again = message.encode(from, GROUP);
            assert_eq!(Message::decode(&again).as_ref(), Some(&(from, message.clone())));
            let own = Message { attachment, token, ..message };
            hear(&mut host, now, &own.encode(from, GROUP));
        }
        hear(&mut host, now, frame);
        host.turn(now);
        assert!(host.attachments() <= 16);
    }
    drop(host);
    service.stop();
}

fn guest_frame(guest: &FakeGuest) -> Option<usize> {
    use super::helper::Machine;
    guest.receive(&mut [0; super::wire::FRAME_MAX])
}
