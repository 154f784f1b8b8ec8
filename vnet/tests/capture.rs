//! Captures of a running core: which frames they record, in which order and with which outcome. Captures do not change traffic.

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{Host, WAIT, mac, wait_for, yielding};
use vnet::capture::{Direction, Options, Record, Session, Tap};
use vnet::dispatch::core::CoreOptions;
use vnet::dispatch::observers::{CacheQuestion, Observers};
use vnet::dispatch::yielding::Strategy;
use vnet::frame::{MTU_MAX, NetworkId, PortId};
use vnet::interface::fake::OwnedFrame;
use vnet::route::Flow;
use vnet::stats::DropReason;
use vnet::wire::ethernet::Mac;
use vnet::wire::offload::Offload;

const NAMES: [&str; 3] = ["interface a", "interface b", "interface c"];

/// A host with three fakes under port security; the last one has an MTU of 1000 bytes.
fn host(threads: usize) -> Host {
    let mut host = Host::start(CoreOptions { threads, ..yielding(Strategy::Block) });
    for (n, mtu) in [MTU_MAX, MTU_MAX, 1000].into_iter().enumerate() {
        host.add_fake_with_mtu(NetworkId::DEFAULT, mtu);
        let port = &mut host.interfaces[n];
        port.name = NAMES[n].into();
        (port.member.mac, port.member.port_security) = (Some(mac(n as u8)), true);
    }
    host.publish();
    host
}

/// Starts a capture at these ports.
fn capture(host: &Host, ports: &[u16], options: Options) -> Arc<Session> {
    let session = Arc::new(Session::new(options, host.core.dispatchers()));
    let ports = ports.iter().map(|port| (PortId(*port), NAMES[usize::from(*port)]));
    let taps = vec![Tap::new(session.clone(), ports)];
    host.core.observe(Observers { taps, ..Observers::default() });
    session
}

/// Waits until `entered` frames have entered, and each of them is delivered or dropped.
fn settle(host: &Host, entered: u64) {
    let frames = || host.interfaces.iter().map(|port| port.stats.in_frames.get()).sum::<u64>();
    wait_for("frames to enter", || frames() == entered, || frames().to_string());
    host.assert_balanced();
}

fn frame(dst: Mac, src: Mac, len: usize, seed: u8) -> OwnedFrame {
    let mut bytes: Vec<u8> = dst.0.into_iter().chain(src.0).chain([0x88, 0xb5]).collect();
    bytes.resize(len, seed);
    (bytes, Offload::default())
}

/// Waits for `count` records, and returns all records captured so far.
fn captured(session: &Session, count: usize) -> Vec<(Record, Vec<u8>)> {
    let mut found = vec![];
    let deadline = Instant::now() + WAIT;
    while found.len() < count && Instant::now() < deadline {
        session.drain(|batched| found.extend(batched.frames().map(|(r, bytes)| (*r, bytes.to_vec()))));
        std::thread::sleep(Duration::from_millis(1));
    }
    found
}

#[test]
fn both_directions_are_captured_whole_and_in_order() {
    for threads in [1, 2] {
        let host = host(threads);
        let session = capture(&host, &[0, 1], Options::default());
        let sent: Vec<OwnedFrame> =
            (0..500).map(|i| frame(mac(1), mac(0), 60 + 37 * (i % 40), i as u8)).collect();
        host.fakes[0].send(sent.clone());
        assert_eq!(host.fakes[1].wait_for(500, WAIT), sent, "captures change no frame");
        settle(&host, 500);
        let found = captured(&session, 1000);
        assert_eq!((found.len(), session.missed()), (1000, 0));
        for (direction, place) in [(Direction::In, 0), (Direction::Out, 1)] {
            let seen: Vec<_> = found.iter().filter(|(r, _)| r.direction == direction).collect();
            assert!(seen.iter().all(|(r, _)| r.place == place && r.dropped.is_none()));
            assert!(seen.iter().map(|(_, bytes)| bytes).eq(sent.iter().map(|(bytes, _)| bytes)));
            assert!(seen.windows(2).all(|pair| pair[0].0.at <= pair[1].0.at));
        }
        // Without observers nothing is recorded.
        host.core.observe(Observers::default());
        host.fakes[0].send([frame(mac(1), mac(0), 60, 0)]);
        host.fakes[1].wait_for(1, WAIT);
        assert!(captured(&session, 0).is_empty() && !session.drain(|_| ()));
    }
}

#[test]
fn drops_come_with_their_reasons() {
    let host = host(1);
    let session = capture(&host, &[0, 1, 2], Options { drops_only: true, ..Options::default() });
    host.fakes[0].send([
        frame(mac(1), mac(0), 60, 1),
        // Larger than the destination's MTU.
        frame(mac(2), mac(0), 1500, 2),
        // Another source address: refused by port security.
        frame(mac(1), mac(9), 60, 3),
        // The destination is behind the ingress port.
        frame(mac(0), mac(0), 60, 4),
        // Shorter than an Ethernet header.
        (vec![7; 9], Offload::default()),
        // Broadcast: one copy is delivered, another exceeds the MTU.
        frame(Mac::BROADCAST, mac(0), 1200, 5),
    ]);
    settle(&host, 6);
    let found = captured(&session, 5);
    let mut seen: Vec<_> = found
        .iter()
        .map(|(r, bytes)| (r.dropped.unwrap().reason, r.place, r.direction, bytes.last().copied(), r.len))
        .collect();
    seen.sort_by_key(|(reason, _, _, last, _)| (*reason, *last));
    let (into, out) = (Direction::In, Direction::Out);
    let mut want = vec![
        (DropReason::TooShort, 0, into, None, 9),
        (DropReason::BadSource, 0, into, Some(3), 60),
        (DropReason::Hairpin, 0, into, Some(4), 60),
        (DropReason::MtuExceeded, 2, out, Some(2), 1500),
        (DropReason::MtuExceeded, 2, out, Some(5), 1200),
    ];
    want.sort_by_key(|(reason, _, _, last, _)| (*reason, *last));
    assert_eq!(seen, want);
    assert!(found.iter().all(|(r, _)| r.dropped.unwrap().pieces == 1));
    assert!(!session.drain(|_| panic!("a delivered frame was captured")));
}

#[test]
fn filter_and_snap_length_apply() {
    let host = host(1);
    let filter = "outbound and ether dst 52:54:00:00:00:01 and greater 100".parse().unwrap();
    let session = capture(&host, &[1], Options { filter, snap: 20, drops_only: false });
    host.fakes[0].send((0..200).map(|i| frame(mac(1), mac(0), 60 + i, i as u8)));
    host.fakes[1].send([frame(mac(0), mac(1), 500, 0)]);
    let got = host.fakes[1].wait_for(200, WAIT);
    assert!(got.iter().enumerate().all(|(i, (bytes, _))| bytes.len() == 60 + i), "in order, captured or not");
    settle(&host, 201);
    let found = captured(&session, 160);
    let lens: Vec<_> = found.iter().map(|(r, bytes)| (r.len as usize, bytes.len())).collect();
    assert_eq!(lens, (100..260).map(|len| (len, 20)).collect::<Vec<_>>());
}

#[test]
fn a_stalled_reader_loses_records_but_no_frames() {
    let host = host(1);
    let session = capture(&host, &[0, 1], Options::default());
    let count = 400;
    host.fakes[0].send((0..count).map(|_| frame(mac(1), mac(0), 60_000, 1)));
    assert_eq!(host.fakes[1].wait_for(count, WAIT).len(), count);
    settle(&host, count as u64);
    // The last frame is recorded just after it is counted.
    let (mut found, deadline) = (vec![], Instant::now() + WAIT);
    while found.len() as u64 + session.missed() < 2 * count as u64 && Instant::now() < deadline {
        session.drain(|batched| found.extend(batched.frames().map(|(r, bytes)| (*r, bytes.to_vec()))));
    }
    assert!(session.missed() > 0, "48 MB fit in the lanes");
    assert_eq!(found.len() as u64 + session.missed(), 2 * count as u64, "captured or counted as missed");
    assert!(found.iter().all(|(r, bytes)| bytes.len() == r.len as usize));
}

/// Route caches answer the queries of `vnet trace`; neither a query nor a capture empties them.
#[test]
fn route_caches_answer_questions() {
    let host = host(1);
    let flow = |dst| Flow { network: NetworkId::DEFAULT, src: mac(0), dst, from: PortId(0) };
    let ask = |flow: Flow| {
        let question = Arc::new(CacheQuestion::new(flow));
        host.core.observe(Observers { question: Some(question.clone()), ..Observers::default() });
        host.core.observe(Observers::default());
        question.answers()
    };
    assert!(ask(flow(mac(1))).is_empty(), "nothing was sent yet");
    host.fakes[0].send([frame(mac(1), mac(0), 60, 1), frame(mac(0), mac(0), 60, 1)]);
    settle(&host, 2);
    capture(&host, &[0], Options::default());
    host.core.observe(Observers::default());
    for (dst, want) in [(mac(1), Ok(vec![PortId(1)])), (mac(0), Err(DropReason::Hairpin))] {
        let answers = ask(flow(dst));
        assert_eq!(answers.len(), 1);
        assert_eq!((answers[0].dispatcher, &answers[0].outcome), (0, &want));
    }
    assert!(ask(flow(mac(2))).is_empty());
}
