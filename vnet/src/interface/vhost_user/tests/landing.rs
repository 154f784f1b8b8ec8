//! Frames written directly into a guest's posted buffers (receive in place).

use super::*;
use crate::frame::Room;
use crate::wire::offload::{F_NEEDS_CSUM, GSO_TCPV4};

fn pair() -> (Host, Guest) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("vm1.sock");
    let options = VhostUserOptions { mtu: 9000, ..options(&path, 1) };
    let host = Host { _folder: Some(folder), ..Host::at(options) };
    let mut guest = Guest::connect(&host.path, 1);
    guest.start();
    (host, guest)
}

impl Host {
    /// Writes `bytes` into the guest's posted buffers and returns `landed` from the callback.
    fn land(&self, bytes: &[u8], offload: &Offload, landed: bool) -> (bool, usize) {
        let mut asked = 0;
        let given = self.interface.land().unwrap().land(0, offload, bytes.len(), &mut |room: &[Room]| {
            asked += 1;
            let mut rest = bytes;
            for part in room {
                let (now, later) = rest.split_at(part.len());
                // SAFETY: the room is writable for its length until this callback returns.
                unsafe { std::ptr::copy_nonoverlapping(now.as_ptr(), part.as_ptr(), now.len()) };
                rest = later;
            }
            assert!(rest.is_empty(), "room exactly for the frame");
            landed
        });
        (given, asked)
    }
}

#[test]
fn a_landed_frame_is_delivered() {
    let (mut host, mut guest) = pair();
    guest.offer(8);
    let large = frame(9014, 7);
    assert_eq!(host.land(&large, &Offload::default(), true), (true, 1));
    host.deliver(0, &frame(64, 1));
    assert!(guest.calls[0].read().is_ok(), "the guest is notified");
    // Three buffers of one page each; num_buffers in the header says 3.
    let at = ARENA + 0x20_0000;
    assert_eq!(guest.memory.read(at + 10, 2), [3, 0]);
    let whole: Vec<u8> = (0..3)
        .flat_map(|n| {
            let (_, len) = guest.rings[0].collect(&guest.memory).unwrap();
            guest.memory.read(at + 0x1000 * n, len as usize)
        })
        .collect();
    assert!(whole[12..] == large);
    assert_eq!(guest.read(), Some(frame(64, 1)), "later frames follow it");
    assert_eq!(
        (host.stats.out_frames.get(), host.stats.out_bytes.get(), host.stats.drops_total()),
        (2, 9078, 0)
    );
}

#[test]
fn a_frame_that_did_not_land_leaves_no_trace() {
    let (mut host, mut guest) = pair();
    guest.offer(3);
    for _ in 0..3 {
        assert_eq!(host.land(&frame(9000, 9), &Offload::default(), false), (false, 1));
    }
    assert_eq!(guest.read(), None);
    assert!(guest.calls[0].read().is_err(), "no notification either");
    // The same buffers hold the next frame.
    host.deliver(0, &frame(1000, 2));
    assert_eq!(guest.read(), Some(frame(1000, 2)));
    assert_eq!(host.stats.out_frames.get(), 1);
}

#[test]
fn lends_room_only_for_frames_the_guest_accepts() {
    let (mut host, mut guest) = pair();
    assert_eq!(host.land(&frame(5000, 1), &Offload::default(), true), (false, 0), "no buffers");
    guest.offer(1);
    assert_eq!(host.land(&frame(5000, 1), &Offload::default(), true), (false, 0), "too few");
    guest.offer(15);
    assert_eq!(host.land(&frame(9100, 1), &Offload::default(), true), (false, 0), "beyond its MTU");
    let super_frame = Offload {
        flags: F_NEEDS_CSUM,
        gso_type: GSO_TCPV4,
        hdr_len: 54,
        gso_size: 1448,
        csum_start: 34,
        csum_offset: 16,
    };
    assert_eq!(
        host.land(&frame(20_000, 1), &super_frame, true),
        (false, 0),
        "it did not negotiate super-frames"
    );
    assert_eq!(host.stats.drops_total(), 0, "not dropped: the caller delivers it the ordinary way");
    guest.frontend.get_vring_base(0).unwrap();
    assert_eq!(host.land(&frame(5000, 1), &Offload::default(), true), (false, 0), "no ring");
    assert!(!host.receive().iter().any(|_| true));
}

/// A malformed chain is returned, and the ring stays usable.
#[test]
fn a_bad_chain_is_returned() {
    let (host, mut guest) = pair();
    guest.rings[0].add(&guest.memory, &[(u64::MAX, 0x1000, DESC_WRITE)]).unwrap();
    guest.offer(4);
    assert_eq!(host.land(&frame(5000, 1), &Offload::default(), true), (false, 0));
    assert_eq!(guest.rings[0].collect(&guest.memory).map(|(_, len)| len), Some(0));
    assert_eq!(host.land(&frame(5000, 1), &Offload::default(), true), (true, 1));
    assert_eq!(host.reason(), "up");
}
