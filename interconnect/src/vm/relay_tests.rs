//! The relay between an application with the process engine and one with the daemon's engine, in one guest.

use crate::daemon::tests::all_operations;
use crate::daemon::udp_frame::{Ends, Headers};
use crate::daemon::{GuestFrame, RelayCounters, Service};
use crate::node::Attachment;
use crate::{Endpoint, Node, Options, Peer};

use super::fake::FakeGuest;
use super::nic::Nic;
use super::tests::Machine;

fn open(options: &Options) -> (Node, Endpoint, Peer) {
    let node = Node::open(options).unwrap();
    let endpoint = node.endpoint(Some(0)).unwrap();
    let peer = Peer { address: node.address(), endpoint: 0 };
    (node, endpoint, peer)
}

fn relayed(service: &Service) -> RelayCounters {
    service.counters().iter().fold(RelayCounters::default(), |mut sum, counters| {
        sum += counters.relay;
        sum
    })
}

/// Either side opens the channel, at the smallest and the largest MTU.
#[test]
fn they_meet() {
    let service = Service::start(1 << 30, 1 << 40).unwrap();
    for (number, mtu) in [(13, 1280), (14, 1500), (15, 65_535)] {
        let mut guest = FakeGuest::new(number, &Default::default());
        guest.mtu = mtu;
        let machine = Machine::of(guest, &service);
        let own = Options { attachment: Some("process".into()), ..machine.options() };
        for daemon_begins in [false, true] {
            let before = relayed(&service);
            let (process, a, a_peer) = open(&own);
            let (served, b, b_peer) = open(&machine.options());
            if daemon_begins {
                all_operations(&b, &a, b_peer, a_peer);
            }
            all_operations(&a, &b, a_peer, b_peer);
            all_operations(&b, &a, b_peer, a_peer);
            assert_eq!((a.attachment(b_peer), b.attachment(a_peer)), (Attachment::Udp, Attachment::Vm));
            drop((a, b, process, served));
            machine.until(0);
            assert!(relayed(&service).relayed > before.relayed + 100, "MTU {mtu}: {:?}", relayed(&service));
        }
    }
    assert_eq!(relayed(&service).spoofed, 0);
    service.stop();
}

#[test]
fn a_network_has_no_packet_from_inside() {
    let (service, network) = (Service::start(1 << 30, 1 << 40).unwrap(), Default::default());
    let machine = Machine::start(16, &service, &network);
    let (node, endpoint, peer) = open(&machine.options());
    let forged = |is_local| {
        let from = (machine.guest.own_ip(), 9).into();
        let ends = Ends { from, from_mac: super::OWN, to: peer.address, to_mac: machine.guest.mac };
        let headers = Headers::new(&ends, 16).unwrap();
        let bytes = [headers.as_bytes(), &[0x12; 16]].concat();
        let frame = GuestFrame { bytes, partial_from: 34, is_local, ..GuestFrame::default() };
        match is_local {
            true => assert!(machine.guest.inject(frame)),
            false => network.lock()[&peer.address].put(frame),
        }
    };
    let received = || service.counters().iter().map(|counters| counters.packets_in).sum::<u64>();
    let until = |what: &dyn Fn() -> bool| {
        let begin = std::time::Instant::now();
        while !what() {
            assert!(begin.elapsed() < super::tests::PATIENCE, "{:?}", relayed(&service));
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
    };
    forged(true);
    until(&|| received() == 1);
    forged(false);
    until(&|| relayed(&service).spoofed == 1);
    assert_eq!(received(), 1);
    drop((endpoint, node, machine));
    service.stop();
}
