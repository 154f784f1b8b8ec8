//! An engine takes over from another one of this process, with real sockets.

use std::path::Path;
use std::sync::Arc;

use super::*;
use crate::config::{parse, route_from_json};
use crate::desired::Desired;
use crate::engine::{Engine, EngineError};
use crate::overlay::Computed;
use vnet::inherit::Inheritance;
use vnet::link::rendezvous::relay_succession::PairState;
use vnet::link::sealed::pki::{Flaw, Pki};
use vnet::link::succession::SealedState;

const TEXT: &str = r#"
[host]
name = "h1"
[bridge]
listen = "127.0.0.1:0"
[[interface]]
name = "vm1"
kind = "vhost-user"
socket = "DIR/vm1"
[[interface]]
name = "vm2"
kind = "vhost-user"
socket = "DIR/vm2"
[[link]]
name = "h2"
remote = "10.1.2.2:9000"
trusted = true
[[link]]
name = "h3"
remote = "10.1.2.3:9000"
trusted = true
[[route]]
dst = "none"
to = "link h2"
[[route]]
dst = "any"
to = "link h3"
"#;

fn desired(folder: &Path) -> Desired {
    parse("f", &TEXT.replace("DIR", folder.to_str().unwrap())).unwrap().desired
}

/// Numbers and states that stay the same.
fn state(engine: &Engine) -> impl PartialEq + std::fmt::Debug + use<> {
    let indices = engine.indices();
    let names = ["vm1", "vm2", "h2", "h3"].map(|name| (indices.interface(name), indices.link(name)));
    let routes: Vec<_> =
        engine.routes().into_iter().map(|route| (route.index, route.settings.text("to"))).collect();
    let ports: Vec<_> = engine.interfaces.iter().map(|(name, live)| (name.clone(), live.port)).collect();
    let links: Vec<_> = engine.links.iter().map(|(name, live)| (name.clone(), live.port)).collect();
    (names, routes, ports, links, indices.next_link(), engine.bridge_address())
}

/// Takes over from `engine`; `change` falsifies what it hands over.
fn take_over(engine: &Engine, change: impl FnOnce(&mut Given<'_>)) -> Result<Engine, EngineError> {
    let mut given = engine.estate().unwrap();
    change(&mut given);
    let Given { estate, descriptors, .. } = given;
    let taking = Taking::new(estate, Arc::new(Inheritance::new(descriptors)))?;
    let still = engine.stand_still().unwrap();
    let last = engine.last();
    let sealed = engine.sealed_states().iter().map(|bytes| SealedState::parse(bytes).unwrap()).collect();
    let pairs = engine.pair_states().iter().map(|bytes| PairState::parse(bytes).unwrap()).collect();
    let last = LastState { last, sealed, pairs };
    drop(still);
    Engine::take_over(taking, |_, _| Computed::default(), move || Ok(last), || Ok(()))
}

#[test]
fn an_engine_goes_on_where_another_one_stands_still() {
    let folder = tempfile::tempdir().unwrap();
    let mut engine = Engine::start(desired(folder.path())).unwrap();
    // Ports and numbers with gaps, and changes that the file does not have.
    engine.remove_route(1).unwrap();
    engine.remove_interface("vm1").unwrap();
    engine.remove_link("h2").unwrap();
    engine.add_route(route_from_json(br#"{"dst": "52:54:00:00:00:09", "to": "link h3"}"#).unwrap()).unwrap();
    engine.interfaces["vm2"].stats.delivered(7, 700);
    engine.core.bridge_stats().discard(vnet::stats::DiscardReason::UnknownSource, 3);
    let before = state(&engine);
    let mut heir = take_over(&engine, |_| {}).unwrap();
    assert_eq!(state(&heir), before);
    assert_eq!(heir.own, engine.own);
    assert_eq!(heir.interfaces["vm2"].stats.out_frames.get(), 7);
    let strangers = heir.core.bridge_stats().discards(vnet::stats::DiscardReason::UnknownSource);
    assert_eq!(strangers, 3);
    assert_eq!(heir.retired, engine.retired);
    let next = route_from_json(br#"{"dst": "52:54:00:00:00:08", "to": "link h3"}"#).unwrap();
    assert_eq!(heir.add_route(next).unwrap(), 4);
    // The other one's process has ended.
    std::mem::forget(engine);
    heir.settle();
    assert!(folder.path().join("vm2").exists());
    heir.stop();
    assert!(!folder.path().join("vm2").exists());
}

#[test]
fn a_take_over_that_fails_leaves_everything() {
    let folder = tempfile::tempdir().unwrap();
    let engine = Engine::start(desired(folder.path())).unwrap();
    let failed = |change: &dyn Fn(&mut Given<'_>)| {
        let error = take_over(&engine, change).err().expect("it fails").to_string();
        assert!(folder.path().join("vm1").exists() && folder.path().join("vm2").exists(), "{error}");
        error
    };
    let lost = |given: &mut Given<'_>| given.descriptors.retain(|(name, _)| name != "interface/vm2/listener");
    assert!(failed(&lost).contains("its socket was not handed over"));
    let lost = |given: &mut Given<'_>| given.descriptors.retain(|(name, _)| name != "bridge/0/0");
    assert!(failed(&lost).contains("the running vnetd has no socket bridge/0/0"));
    let more = |given: &mut Given<'_>| {
        let file = std::fs::File::open("/dev/null").unwrap();
        given.descriptors.push(("of/the/future".into(), file.into()));
    };
    assert!(failed(&more).contains("the running vnetd hands over of/the/future"));
    let other = |given: &mut Given<'_>| given.estate.settings += "colour = \"red\"\n";
    assert!(failed(&other).contains("the running vnetd:"));
    let twice = |given: &mut Given<'_>| {
        let port = given.estate.positions.interfaces["vm1"];
        given.estate.positions.links.insert("h2".into(), port);
    };
    assert!(failed(&twice).contains("contradict"));
    engine.go_on();
    engine.stop();
}

/// A host with a sealed link to h2, whose listener has a port that is free for UDP and TCP.
fn sealed(folder: &Path, pki: &Pki, more: &str) -> Engine {
    let files = pki.issue("h1", 1, Flaw::None, &[]);
    let identity = format!(
        "[identity]\nca = {:?}\ncertificate = {:?}\nkey = {:?}\n",
        files.ca, files.certificate, files.key
    );
    let link = "[[link]]\nname = \"h2\"\nremote = \"10.1.2.2:9000\"\nsealed = true\n";
    let text = format!(
        "[host]\nname = \"h1\"\n{identity}[control]\nsocket = \"{}/sock\"\n\
         [bridge]\nlisten = \"127.0.0.1:0\"\n{more}\n{link}",
        folder.display()
    );
    let start = || Engine::start(parse("f", &text).unwrap().desired).ok();
    (0..10).find_map(|_| start()).expect("a port that is free for UDP and TCP")
}

#[test]
fn sealed_links_and_their_listener_go_on() {
    let folder = tempfile::tempdir().unwrap();
    let engine = sealed(folder.path(), &Pki::new(folder.path()), "");
    let at = engine.bridge_address();
    let mut heir = take_over(&engine, |_| {}).unwrap();
    std::mem::forget(engine);
    heir.settle();
    assert_eq!(heir.bridge_address(), at);
    // Nobody but the heir accepts: the running one rests. A connection without TLS is closed.
    let mut stream = std::net::TcpStream::connect(at).unwrap();
    stream.set_read_timeout(Some(std::time::Duration::from_secs(20))).unwrap();
    std::io::Write::write_all(&mut stream, b"GET / HTTP/1.0\r\n\r\n").unwrap();
    let mut answer = vec![];
    let _ = std::io::Read::read_to_end(&mut stream, &mut answer);
    assert!(answer.len() < 100, "a TLS alert at most");
    heir.stop();
}

#[test]
fn a_take_over_without_the_sealed_listener_fails_and_the_links_go_on() {
    let folder = tempfile::tempdir().unwrap();
    let engine = sealed(folder.path(), &Pki::new(folder.path()), "");
    let lost = |given: &mut Given<'_>| given.descriptors.retain(|(name, _)| name != "sealed");
    let why = take_over(&engine, lost).err().expect("it fails").to_string();
    assert!(why.contains("does not hand over the listener"), "{why}");
    engine.reclaim(false);
    engine.go_on();
    assert!(take_over(&engine, |_| {}).is_ok(), "the next one takes over");
    std::mem::forget(engine);
}

#[test]
fn a_host_where_others_meet_and_one_that_meets_are_handed_over() {
    let folder = tempfile::tempdir().unwrap();
    let pki = Pki::new(folder.path());
    let relayed = "\n[[link]]\nname = \"h3\"\nsealed = true\nvia = \"h2\"";
    let engine = sealed(folder.path(), &pki, &format!("meetings = 4{relayed}"));
    assert_eq!(engine.sealed_states().len(), 2);
    let mut heir = take_over(&engine, |_| {}).unwrap();
    std::mem::forget(engine);
    heir.settle();
    assert!(heir.relay.is_some() && heir.links.contains_key("h3"));
    heir.stop();
}

/// A host whose interface vm2 has a configured direct port of this number, and vm1 one that each link negotiates.
fn with_direct_ports(folder: &Path, port: u16) -> Desired {
    let own = format!("DIR/vm2\"\nmac = \"52:54:00:00:00:02\"\ndirect_port = {port}\ndirect_link = \"h2\"");
    let text = TEXT.replace("DIR/vm2\"", &own).replace("name = \"h2\"", "name = \"h2\"\nnetworks = [1]");
    let text = text.replace("DIR/vm1\"", "DIR/vm1\"\nmac = \"52:54:00:00:00:01\"\ndirect = true");
    parse("f", &text.replace("DIR", folder.to_str().unwrap())).unwrap().desired
}

/// Numbers of an interface's direct ports, negotiated and configured.
fn direct_ports(engine: &Engine) -> (Vec<u16>, Option<u16>) {
    let negotiated = engine.interfaces().into_iter().flat_map(|interface| interface.direct_ports);
    let configured = &engine.interfaces["vm2"].direct;
    (negotiated.map(|port| port.port).collect(), configured.as_ref().map(|port| port.local_addr().port()))
}

#[test]
fn direct_ports_go_on_with_their_sockets() {
    let folder = tempfile::tempdir().unwrap();
    let free = std::net::UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let engine = Engine::start(with_direct_ports(folder.path(), free)).unwrap();
    let before = direct_ports(&engine);
    assert_eq!((before.0.len(), before.1), (2, Some(free)));
    let lost = |given: &mut Given<'_>| given.descriptors.retain(|(name, _)| name != "interface/vm1/direct");
    let why = take_over(&engine, lost).err().expect("it fails").to_string();
    assert!(why.contains("does not hand over all direct ports of interface vm1"), "{why}");
    let lost = |given: &mut Given<'_>| {
        given.descriptors.retain(|(name, _)| name != "interface/vm2/direct");
        given.estate.positions.ports.remove("vm2");
    };
    let why = take_over(&engine, lost).err().expect("it fails").to_string();
    assert!(why.contains("its own underlay port was not handed over"), "{why}");
    let mut heir = take_over(&engine, |_| {}).unwrap();
    assert_eq!(direct_ports(&heir), before);
    std::mem::forget(engine);
    heir.settle();
    // They go on with the next one, too.
    let mut next = take_over(&heir, |_| {}).unwrap();
    assert_eq!(direct_ports(&next), before);
    std::mem::forget(heir);
    next.settle();
    next.stop();
}
