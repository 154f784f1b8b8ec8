use std::collections::BTreeMap;
use std::net::UdpSocket;

use proptest::prelude::*;

use super::*;
use crate::frame::{Batch, DropSink, FRAME_MAX, Holds, NetworkId, PortId, Selection};
use crate::link::native::zero_copy_backoff::RETRY_AFTER;
use crate::link::socket::error_queue::read_notification;
use crate::link::{Bridge, Link, LinkKind, LinkOptions, ReassemblyBudget};
use crate::wire::native::Header;
use crate::wire::offload::Offload;

/// A sender with a link to a plain UDP socket.
struct Pair {
    bridge: Bridge,
    link: Arc<Link>,
    peer: UdpSocket,
}

fn pair(setting: ZeroCopy, path_mtu: u32) -> Pair {
    let peer = UdpSocket::bind("127.0.0.1:0").unwrap();
    peer.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    let budget = Arc::new(ReassemblyBudget::new(0));
    let mut bridge = Bridge::bind("127.0.0.1:0".parse().unwrap(), false, Arc::default(), budget).unwrap();
    bridge.tx.set_zero_copy(setting);
    let options = LinkOptions {
        name: "peer".into(),
        remote: peer.local_addr().unwrap(),
        ports: 1,
        networks: None,
        mtu: None,
        kind: LinkKind::default(),
    };
    let link = Link::new(options, PortId(0), Arc::default());
    link.path.set_route_mtu(path_mtu);
    Pair { bridge, link, peer }
}

impl Pair {
    /// Sends `frame` from memory of a guest that supports holds. Returns the reassembled bytes that arrived.
    fn send(&mut self, holds: &Arc<Holds>, frame: &[u8]) -> Vec<u8> {
        let mut batch = Batch::new();
        batch.set_holds(holds.clone());
        let mut builder = batch.begin();
        // SAFETY: `frame` outlives the batch.
        unsafe { builder.push(Segment::new(frame.as_ptr(), frame.len())) };
        builder.finish(PortId(1), NetworkId::DEFAULT, Offload::default(), 0).unwrap();
        batch.set_slot(3);
        self.bridge.tx.send(&self.link, Selection { batch: &batch, which: &[0] }, &mut DropSink::new());
        let (mut parts, mut buffer) = (BTreeMap::new(), vec![0; 65_536]);
        let mut bytes = 0;
        while bytes < frame.len() {
            let len = self.peer.recv(&mut buffer).expect("the frame arrives");
            let (header, payload) = Header::parse(&buffer[..len]).unwrap();
            bytes += payload.len();
            parts.insert(header.number, payload.to_vec());
        }
        parts.into_values().flatten().collect()
    }

    fn reap_until(&mut self, holds: &Arc<Holds>) {
        let end = Instant::now() + Duration::from_secs(5);
        while holds.any() {
            assert!(Instant::now() < end, "the kernel never said that it is done");
            self.bridge.tx.reap();
        }
    }
}

fn bytes(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 7 + i / 251) as u8).collect()
}

/// For all frame and path sizes, the frame arrives whole, and its memory is held until the kernel's completion. The loopback
/// device copies, and the kernel reports that.
#[test]
fn frames_arrive_whole_and_are_held_until_completion() {
    for path_mtu in [1500, 9000, 65_536] {
        let mut pair = pair(ZeroCopy::On, path_mtu);
        let holds = Holds::new(8);
        for len in [ON_FRAME_MIN - 1, ON_FRAME_MIN, 20_000, 40_001, FRAME_MAX] {
            let (frame, sent) = (bytes(len), pair.link.stats.zero_copy.sent.get());
            assert_eq!(pair.send(&holds, &frame), frame, "{len} bytes by {path_mtu}");
            let messages = pair.link.stats.zero_copy.sent.get() - sent;
            assert_eq!(messages > 0, len >= ON_FRAME_MIN, "{len} bytes by {path_mtu}");
            assert_eq!(holds.is_held(3), len >= ON_FRAME_MIN, "nobody has asked the kernel yet");
            pair.reap_until(&holds);
        }
        let stats = &pair.link.stats;
        assert_eq!(
            (stats.out_frames.get(), stats.drops_total(), stats.zero_copy.fallen_back.get()),
            (5, 0, 0)
        );
        assert_eq!(stats.zero_copy.copied.get(), stats.zero_copy.sent.get());
        assert!(!pair.bridge.tx.reap(), "nothing is under way");
    }
}

/// The kernel reads slots and guest pages at the time of transmission. The head shows it: the guest changes its own copy, and the
/// routed copy is sent.
#[test]
fn the_head_that_was_routed_is_sent() {
    let mut pair = pair(ZeroCopy::On, 9000);
    let (holds, mut frame) = (Holds::new(8), bytes(10_000));
    let mut batch = Batch::new();
    batch.set_holds(holds.clone());
    let (base, len) = (frame.as_mut_ptr(), frame.len());
    let mut builder = batch.begin();
    // SAFETY: `frame` outlives the batch.
    unsafe { builder.push(Segment::new(base, len)) };
    builder.finish(PortId(1), NetworkId::DEFAULT, Offload::default(), 0).unwrap();
    batch.set_slot(0);
    // SAFETY: inside `frame`, to which no other reference exists.
    unsafe { base.write_bytes(0xee, HEAD_MAX) };
    pair.bridge.tx.send(&pair.link, Selection { batch: &batch, which: &[0] }, &mut DropSink::new());
    let mut buffer = vec![0; 65_536];
    let got = pair.peer.recv(&mut buffer).unwrap();
    assert_eq!(buffer[HEADER_LEN..HEADER_LEN + HEAD_MAX], bytes(10_000)[..HEAD_MAX]);
    assert!(got > 8000);
    pair.reap_until(&holds);
}

/// On a device that copies, the automatic setting sends one message without copying and then stops for a long time.
#[test]
fn zero_copy_is_retried_rarely_on_devices_that_copy() {
    let mut pair = pair(ZeroCopy::Auto, 9000);
    let (holds, frame) = (Holds::new(8), bytes(40_000));
    let mut tries = 0;
    for _ in 0..RETRY_AFTER + 3 {
        let before = pair.link.stats.zero_copy.sent.get();
        assert_eq!(pair.send(&holds, &frame), frame);
        tries += u32::from(pair.link.stats.zero_copy.sent.get() != before);
        pair.reap_until(&holds);
    }
    assert_eq!(tries, 2);
    let mut small = self::pair(ZeroCopy::Auto, 1500);
    assert_eq!(small.send(&holds, &frame), frame);
    assert_eq!(small.link.stats.zero_copy.sent.get(), 0, "small datagrams are copied in larger messages");
}

/// A frame with too many pieces for a datagram is copied, and so is every frame while no slot is free.
#[test]
fn frames_that_cannot_go_without_a_copy_are_copied() {
    let mut pair = pair(ZeroCopy::On, 9000);
    let (holds, frame) = (Holds::new(8), bytes(20_000));
    let mut batch = Batch::new();
    batch.set_holds(holds.clone());
    let mut builder = batch.begin();
    for part in frame.chunks(200) {
        // SAFETY: `frame` outlives the batch.
        unsafe { builder.push(Segment::new(part.as_ptr(), part.len())) };
    }
    builder.finish(PortId(1), NetworkId::DEFAULT, Offload::default(), 0).unwrap();
    batch.set_slot(0);
    pair.bridge.tx.send(&pair.link, Selection { batch: &batch, which: &[0] }, &mut DropSink::new());
    assert!(!holds.any());
    let stats = &pair.link.stats.zero_copy;
    assert_eq!((stats.sent.get(), stats.fallen_back.get(), pair.link.stats.out_frames.get()), (0, 1, 1));
}

#[test]
fn messages_are_counted_by_pages() {
    let page = Segment::new(std::ptr::without_provenance(8 * PAGE), PAGE);
    assert_eq!((pages(page), pages(page.slice(0, 1)), pages(page.slice(4095, 1))), (1, 1, 1));
    assert_eq!(pages(Segment::new(std::ptr::without_provenance(8 * PAGE + 4095), 2)), 2);
    assert!(
        message_bytes(65_000, 8956) >= AUTO_MESSAGE_MIN && message_bytes(65_000, 1456) < AUTO_MESSAGE_MIN
    );
    assert!(message_bytes(9000, 8956) < AUTO_MESSAGE_MIN);
}

#[test]
fn only_notifications_of_sent_messages_are_read() {
    let message = |level: i32, kind: i32, errno: u32, origin: u8, code: u8| {
        let mut control = 32u64.to_ne_bytes().to_vec();
        for word in [level.cast_unsigned(), kind.cast_unsigned(), errno] {
            control.extend(word.to_ne_bytes());
        }
        control.extend([origin, 0, code, 0]);
        [7u32, 9].iter().for_each(|word| control.extend(word.to_ne_bytes()));
        control
    };
    let (v4, v6) = ((libc::SOL_IP, libc::IP_RECVERR), (libc::SOL_IPV6, libc::IPV6_RECVERR));
    assert_eq!(read_notification(&message(v4.0, v4.1, 0, 5, 0)), Some((7, 9, false)));
    assert_eq!(read_notification(&message(v6.0, v6.1, 0, 5, 1)), Some((7, 9, true)));
    assert_eq!(read_notification(&message(v6.0, v6.1, 111, 2, 0)), None);
    assert_eq!(read_notification(&message(v4.0, 1, 0, 5, 0)), None);
    let whole = message(v4.0, v4.1, 0, 5, 0);
    (0..whole.len()).for_each(|len| assert_eq!(read_notification(&whole[..len]), None));
}

proptest! {
    /// Whatever order and ranges the kernel reports, including wrapped numbers and those of failed calls, each message completes
    /// exactly once, when its own number is reported.
    #[test]
    fn each_message_is_done_when_its_number_is(
        first: u32,
        failed in prop::collection::vec(any::<bool>(), 1..60),
        cuts in prop::collection::vec((any::<prop::sample::Index>(), 1usize..8), 1..60),
    ) {
        let holds = Holds::new(64);
        let trial = Trial::new(Arc::default());
        let socket = Arc::new(Socket::bind("127.0.0.1:0".parse().unwrap(), false).unwrap());
        socket.set_zero_copies(first);
        let mut flight = Flight { socket, first: 0, messages: VecDeque::new(), able: true };
        let mut open = vec![];
        for (n, failed) in failed.iter().enumerate() {
            let number = first.wrapping_add(n as u32);
            if *failed {
                // The call failed late: the kernel reports its number before the next call.
                flight.complete(number, number, |_| panic!("not a message"));
            } else {
                let hold = Hold::new(&holds, n as u16).unwrap();
                flight.push(InFlight { _hold: hold, slot: n as u16, trial: trial.clone() });
                open.push(n);
            }
        }
        for (at, len) in cuts {
            let from = at.index(failed.len());
            let to = (from + len).min(failed.len()) - 1;
            let mut done = vec![];
            let number = |n: usize| first.wrapping_add(n as u32);
            flight.complete(number(from), number(to), |message| done.push(usize::from(message.slot)));
            let expected: Vec<usize> = open.iter().copied().filter(|n| (from..=to).contains(n)).collect();
            prop_assert_eq!(done, expected);
            open.retain(|n| !(from..=to).contains(n));
            for n in 0..failed.len() {
                prop_assert_eq!(holds.is_held(n as u16), open.contains(&n));
            }
        }
        flight.complete(first, first.wrapping_add(failed.len() as u32 - 1), |_| ());
        prop_assert!(flight.messages.is_empty() && !holds.any());
        prop_assert_eq!(flight.first, first.wrapping_add(failed.len() as u32));
    }
}
