//! Captures of a running core: what is seen, in which order, with which fate, and that nothing else changes.

use std::sync::Arc;
use std::time::{Duration, Instant};

use vnet::capture::{Direction, Options, Record, Session, Tap};
use vnet::dispatch::core::{Core, CoreOptions};
use vnet::dispatch::isolation::Isolation;
use vnet::dispatch::mode::Drive;
use vnet::dispatch::observe::{CacheQuestion, Observers};
use vnet::dispatch::setup::{InterfacePort, Parts};
use vnet::dispatch::yielding::Strategy;
use vnet::frame::{MTU_MAX, NetworkId, Origin, PortId};
use vnet::interface::fake::{Fake, OwnedFrame};
use vnet::route::{Flow, Member, NetworkSpec, Networks, PortKind};
use vnet::stats::{DropReason, PortStats};
use vnet::wire::ethernet::Mac;
use vnet::wire::offload::Offload;

const WAIT: Duration = Duration::from_secs(10);
const NAMES: [&str; 3] = ["interface a", "interface b", "interface c"];

/// A core with three fakes, of which the last takes frames of 1000 bytes at most.
struct Host {
    core: Core,
    fakes: Vec<Arc<Fake>>,
    stats: Vec<Arc<PortStats>>,
}

impl Host {
    fn start(threads: usize) -> Host {
        let core = Core::start(&CoreOptions {
            threads,
            cpus: vec![],
            yield_strategy: Strategy::Block,
            sleep_us: 50,
            nowork_us: 200,
            burst: 64,
            listen: "127.0.0.1:0".parse().unwrap(),
            ports: 1,
            vxlan_listen: None,
            stream_listen: None,
            zero_copy: Default::default(),
            isolation: Isolation::default(),
        })
        .unwrap();
        let (mut fakes, mut stats, mut interfaces) = (vec![], vec![], vec![]);
        for (index, mtu) in [MTU_MAX, MTU_MAX, 1000].into_iter().enumerate() {
            let port = PortId(index as u16);
            let counters = Arc::new(PortStats::default());
            let origin = Origin { port, network: NetworkId::DEFAULT };
            let fake = Fake::new(origin, mtu, 100_000, counters.clone()).unwrap();
            let member = Member {
                port,
                kind: PortKind::Interface,
                networks: Networks::only([NetworkId::DEFAULT]),
                mac: Some(mac(index as u8)),
                storm_frames_per_s: None,
                port_security: true,
            };
            let (name, stats_of, interface) = (NAMES[index].to_string(), counters.clone(), fake.clone());
            interfaces.push(InterfacePort {
                member,
                name,
                stats: stats_of,
                interface,
                drive: Drive::default(),
            });
            fakes.push(fake);
            stats.push(counters);
        }
        let networks = vec![NetworkSpec { id: NetworkId::DEFAULT, learning: true, ageing_s: 300 }];
        core.publish(Parts { networks, interfaces, ..Parts::default() });
        Host { core, fakes, stats }
    }

    /// Captures at these ports.
    fn capture(&self, ports: &[u16], options: Options) -> Arc<Session> {
        let session = Arc::new(Session::new(options, self.core.dispatchers()));
        let ports = ports.iter().map(|port| (PortId(*port), NAMES[usize::from(*port)]));
        let taps = vec![Tap::new(session.clone(), ports)];
        self.core.observe(Observers { taps, question: None });
        session
    }

    /// Waits until every frame that entered is delivered or dropped.
    fn settle(&self, entered: u64) {
        let sum = |of: fn(&PortStats) -> u64| self.stats.iter().map(|stats| of(stats)).sum::<u64>();
        let settled = || {
            let (frames, copies) = (sum(|s| s.in_frames.get()), sum(|s| s.copies.get()));
            let gone = sum(|s| s.out_frames.get()) + sum(PortStats::drops_total);
            frames == entered && frames + copies == gone
        };
        let deadline = Instant::now() + WAIT;
        while !settled() {
            assert!(Instant::now() < deadline, "in + copies = out + drops");
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

fn mac(n: u8) -> Mac {
    Mac([0x52, 0x54, 0, 0, 0, n])
}

fn frame(dst: Mac, src: Mac, len: usize, seed: u8) -> OwnedFrame {
    let mut bytes: Vec<u8> = dst.0.into_iter().chain(src.0).chain([0x88, 0xb5]).collect();
    bytes.resize(len, seed);
    (bytes, Offload::default())
}

/// What was captured, until there is as much of it as expected.
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
fn both_directions_are_seen_whole_and_in_order() {
    for threads in [1, 2] {
        let host = Host::start(threads);
        let session = host.capture(&[0, 1], Options::default());
        let sent: Vec<OwnedFrame> =
            (0..500).map(|i| frame(mac(1), mac(0), 60 + 37 * (i % 40), i as u8)).collect();
        host.fakes[0].send(sent.clone());
        assert_eq!(host.fakes[1].wait_for(500, WAIT), sent, "the capture changes nothing");
        host.settle(500);
        let found = captured(&session, 1000);
        assert_eq!((found.len(), session.missed()), (1000, 0));
        for (direction, place) in [(Direction::In, 0), (Direction::Out, 1)] {
            let seen: Vec<_> = found.iter().filter(|(r, _)| r.direction == direction).collect();
            assert!(seen.iter().all(|(r, _)| r.place == place && r.dropped.is_none()));
            assert!(seen.iter().map(|(_, bytes)| bytes).eq(sent.iter().map(|(bytes, _)| bytes)));
            assert!(seen.windows(2).all(|pair| pair[0].0.at <= pair[1].0.at));
        }
        // When nobody looks any more, nothing is kept.
        host.core.observe(Observers::default());
        host.fakes[0].send([frame(mac(1), mac(0), 60, 0)]);
        host.fakes[1].wait_for(1, WAIT);
        assert!(captured(&session, 0).is_empty() && !session.drain(|_| ()));
    }
}

#[test]
fn drops_come_with_their_reasons() {
    let host = Host::start(1);
    let session = host.capture(&[0, 1, 2], Options { drops_only: true, ..Options::default() });
    host.fakes[0].send([
        frame(mac(1), mac(0), 60, 1),
        // Beyond the destination's MTU.
        frame(mac(2), mac(0), 1500, 2),
        // Not its own address: against port security.
        frame(mac(1), mac(9), 60, 3),
        // To itself.
        frame(mac(0), mac(0), 60, 4),
        // Never a frame at all.
        (vec![7; 9], Offload::default()),
        // To everybody: one copy arrives, one is too large.
        frame(Mac::BROADCAST, mac(0), 1200, 5),
    ]);
    host.settle(6);
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
    assert!(!session.drain(|_| panic!("what was delivered is none of it")));
}

#[test]
fn a_filter_and_a_snap_length_choose() {
    let host = Host::start(1);
    let filter = "outbound and ether dst 52:54:00:00:00:01 and greater 100".parse().unwrap();
    let session = host.capture(&[1], Options { filter, snap: 20, drops_only: false });
    host.fakes[0].send((0..200).map(|i| frame(mac(1), mac(0), 60 + i, i as u8)));
    host.fakes[1].send([frame(mac(0), mac(1), 500, 0)]);
    let got = host.fakes[1].wait_for(200, WAIT);
    assert!(got.iter().enumerate().all(|(i, (bytes, _))| bytes.len() == 60 + i), "in order, seen or not");
    host.settle(201);
    let found = captured(&session, 160);
    let lens: Vec<_> = found.iter().map(|(r, bytes)| (r.len as usize, bytes.len())).collect();
    assert_eq!(lens, (100..260).map(|len| (len, 20)).collect::<Vec<_>>());
}

#[test]
fn a_reader_who_stalls_costs_the_capture_only() {
    let host = Host::start(1);
    let session = host.capture(&[0, 1], Options::default());
    let count = 400;
    host.fakes[0].send((0..count).map(|_| frame(mac(1), mac(0), 60_000, 1)));
    assert_eq!(host.fakes[1].wait_for(count, WAIT).len(), count);
    host.settle(count as u64);
    // The last frame is recorded just after it is counted.
    let (mut found, deadline) = (vec![], Instant::now() + WAIT);
    while found.len() as u64 + session.missed() < 2 * count as u64 && Instant::now() < deadline {
        session.drain(|batched| found.extend(batched.frames().map(|(r, bytes)| (*r, bytes.to_vec()))));
    }
    assert!(session.missed() > 0, "48 MB do not fit");
    assert_eq!(found.len() as u64 + session.missed(), 2 * count as u64, "seen or counted as missed");
    assert!(found.iter().all(|(r, bytes)| bytes.len() == r.len as usize));
}

/// A question is answered by the caches, and neither it nor a capture empties them.
#[test]
fn caches_tell_what_they_know() {
    let host = Host::start(1);
    let flow = |dst| Flow { network: NetworkId::DEFAULT, src: mac(0), dst, from: PortId(0) };
    let ask = |flow: Flow| {
        let question = Arc::new(CacheQuestion::new(flow));
        host.core.observe(Observers { taps: vec![], question: Some(question.clone()) });
        host.core.observe(Observers::default());
        question.answers()
    };
    assert!(ask(flow(mac(1))).is_empty(), "nothing was sent yet");
    host.fakes[0].send([frame(mac(1), mac(0), 60, 1), frame(mac(0), mac(0), 60, 1)]);
    host.settle(2);
    host.capture(&[0], Options::default());
    host.core.observe(Observers::default());
    for (dst, want) in [(mac(1), Ok(vec![PortId(1)])), (mac(0), Err(DropReason::Hairpin))] {
        let answers = ask(flow(dst));
        assert_eq!(answers.len(), 1);
        assert_eq!((answers[0].dispatcher, &answers[0].outcome), (0, &want));
    }
    assert!(ask(flow(mac(2))).is_empty());
}
