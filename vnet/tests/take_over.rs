//! A core takes over from another one: what arrives in between is forwarded by the new one.

mod common;

use std::net::SocketAddr;
use std::sync::Arc;

use common::{Host, WAIT, frame, link_to, mac, wait_for, yielding};
use vnet::dispatch::core::{Core, CoreOptions};
use vnet::dispatch::yielding::Strategy;
use vnet::frame::NetworkId;
use vnet::inherit::Inheritance;
use vnet::link::Encapsulation;
use vnet::route::PortKind;

/// Dispatchers and ports.
const COUNT: usize = 2;

fn options() -> CoreOptions {
    CoreOptions { threads: COUNT, ports: COUNT as u16, ..yielding(Strategy::Adaptive) }
}

/// A host with one guest, and a link to `peer`.
fn host(core: Core, peer: SocketAddr) -> Host {
    let mut host = Host::of(core);
    host.add_fake(NetworkId::DEFAULT);
    let mut link = link_to(peer, Encapsulation::Native, Some(1500));
    link.ports = COUNT as u16;
    host.add_link(link);
    host
}

#[test]
fn datagrams_between_two_cores_are_forwarded_by_the_second() {
    let (running, peer) = (Core::start(&options()).unwrap(), Core::start(&options()).unwrap());
    let (here, there) = (running.bridge_address(), peer.bridge_address());
    let (running, peer) = (host(running, there), host(peer, here));
    running.publish();
    peer.publish();
    let send = |number: u8| peer.fakes[0].send([frame(mac(1), mac(2), 800, number)]);
    running.fakes[0].send([frame(mac(2), mac(1), 80, 0)]);
    assert_eq!(peer.fakes[0].wait_for(1, WAIT).len(), 1);
    send(1);
    assert_eq!(running.fakes[0].wait_for(1, WAIT).len(), 1);

    let handed = Arc::new(Inheritance::new(running.core.descriptors().unwrap()));
    assert_eq!(handed.left(), ["bridge/0/0", "bridge/1/0", "bridge/1/1"]);
    let heir = Core::start(&CoreOptions { inheritance: Some(handed.clone()), ..options() }).unwrap();
    assert_eq!(heir.bridge_address(), here);
    assert!(handed.left().is_empty() && !handed.is_settled());
    let heir = host(heir, there);
    send(2);
    assert_eq!(
        running.fakes[0].wait_for(1, WAIT).len(),
        1,
        "the heir does not listen before its first setup"
    );

    let still = running.core.stand_still().unwrap();
    let sent = |number: u8| peer.links[0].link.stats().out_frames.get() >= u64::from(number);
    (3..=50).for_each(send);
    wait_for("the peer to send", || sent(50), String::new);
    let kind = |port| (port == running.links[0].link.port()).then_some(PortKind::Link);
    let (before, after) = (running.core.learned(), heir.core.learned());
    after.resume(&before.sightings(running.core.now_ms()), before.stats(), kind, heir.core.now_ms());
    assert_eq!(after.stats().entries, 1, "the peer's guest; ours is at a port of another kind");
    for (ours, theirs) in running.interfaces.iter().zip(&heir.interfaces) {
        theirs.stats.resume(&ours.stats.read()).unwrap();
    }
    heir.publish();
    assert_eq!(heir.fakes[0].wait_for(48, WAIT).len(), 48, "what has waited in the sockets");
    assert_eq!(heir.interfaces[0].stats.out_frames.get(), 50, "the counters go on");
    drop(still);
    heir.core.own();
    assert!(handed.is_settled());
    drop(running);
    send(51);
    assert_eq!(heir.fakes[0].wait_for(1, WAIT).len(), 1);
    heir.fakes[0].send([frame(mac(2), mac(1), 80, 0)]);
    assert_eq!(peer.fakes[0].wait_for(1, WAIT).len(), 1);
}

#[test]
fn a_core_with_other_ports_finds_no_sockets() {
    let running = Core::start(&options()).unwrap();
    let handed = Some(Arc::new(Inheritance::new(running.descriptors().unwrap())));
    let more = CoreOptions { ports: 3, inheritance: handed, ..options() };
    let error = Core::start(&more).err().unwrap().to_string();
    assert!(error.contains("the running vnetd has no socket bridge/0/1"), "{error}");
}
