//! Tests of changes with a real core and real sockets: a change happens completely or not at all, and touches nothing else.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use super::*;
use crate::api;
use crate::config;
use crate::config::{interface_from_json, link_from_json, parse, route_from_json};
use crate::engine::Listed;
use crate::overlay::PeerLink;
use vnet::link::sealed::pki::{Flaw, Pki};
use vnet::stats::DiscardReason;
use vnet::wire::ethernet::Mac;

/// A host with its sockets in `dir`.
fn desired(dir: &Path, more: &str) -> Desired {
    let text = format!("[host]\nname = \"h1\"\n[bridge]\nlisten = \"127.0.0.1:0\"\n{more}");
    parse("f", &text.replace("DIR", dir.to_str().unwrap())).unwrap().desired
}

fn vm(name: &str) -> String {
    format!("[[interface]]\nname = \"{name}\"\nkind = \"vhost-user\"\nsocket = \"DIR/{name}\"\n")
}

fn link(name: &str, host: u8) -> String {
    format!("[[link]]\nname = \"{name}\"\nremote = \"10.1.2.{host}:9000\"\ntrusted = true\n")
}

fn route(dst: &str, to: &str) -> String {
    format!("[[route]]\ndst = \"{dst}\"\nto = \"{to}\"\n")
}

fn names(engine: &Engine) -> (Vec<String>, Vec<String>, Vec<(u32, String)>) {
    (
        engine.interfaces().into_iter().map(|i| i.name).collect(),
        engine.links().into_iter().map(|l| l.name).collect(),
        engine.routes().into_iter().map(|r| (r.index, r.settings.text("to"))).collect(),
    )
}

#[test]
fn a_host_comes_and_goes() {
    let dir = tempfile::tempdir().unwrap();
    let text = vm("vm1") + &link("h2", 2) + &route("any", "link h2");
    let engine = Engine::start(desired(dir.path(), &text)).unwrap();
    let want = (vec!["vm1".into()], vec!["h2".into()], vec![(1, "link h2".into())]);
    assert_eq!(names(&engine), want);
    assert!(dir.path().join("vm1").exists());
    let status = engine.status();
    assert_eq!((status.interfaces, status.links, status.routes, status.networks), (1, 1, 1, 1));
    assert_eq!(status.interfaces_up, 0, "no guest is there");
    engine.stop();
    assert!(!dir.path().join("vm1").exists());
}

#[test]
fn unchanged_ports_are_not_touched() {
    let dir = tempfile::tempdir().unwrap();
    let text = vm("vm1") + &link("h2", 2) + &route("none", "link h2") + &route("any", "link h2");
    let mut engine = Engine::start(desired(dir.path(), &text)).unwrap();
    let (port, stats) = (engine.interfaces["vm1"].port, engine.interfaces["vm1"].stats.clone());
    let link_stats = engine.links["h2"].stats.clone();
    let text = vm("vm2")
        + &link("h3", 3)
        + &link("h2", 2)
        + &vm("vm1")
        + &route("any", "link h2")
        + &route("any", "link h3");
    let plan = engine.apply(desired(dir.path(), &text)).unwrap();
    assert_eq!(plan.changes().len(), 4, "{plan}");
    assert_eq!(engine.interfaces["vm1"].port, port);
    assert!(Arc::ptr_eq(&engine.interfaces["vm1"].stats, &stats));
    assert!(Arc::ptr_eq(&engine.links["h2"].stats, &link_stats));
    // Indices outlive other routes and are never reused.
    assert_eq!(names(&engine).2, [(2, "link h2".into()), (3, "link h3".into())]);
    let ports: HashSet<_> = engine.interfaces.values().map(|live| live.port).collect();
    let ports: HashSet<_> = ports.into_iter().chain(engine.links.values().map(|live| live.port)).collect();
    assert_eq!(ports.len(), 4);
    engine.stop();
}

#[test]
fn a_failure_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let text = vm("vm1") + &link("h2", 2);
    let mut engine = Engine::start(desired(dir.path(), &text)).unwrap();
    let before = (names(&engine), engine.current.clone());
    // vm2 can be opened, vm3 cannot (its path is a file); the same change would remove vm1 and h2.
    std::fs::write(dir.path().join("vm3"), "not a socket").unwrap();
    let bad = vm("vm2") + &vm("vm3") + &link("h3", 3);
    let error = engine.apply(desired(dir.path(), &bad)).unwrap_err().to_string();
    assert!(error.starts_with("f:9: interface vm3 cannot be opened: "), "{error}");
    assert_eq!(error.lines().count(), 1, "{error}");
    assert_eq!((names(&engine), engine.current.clone()), before);
    assert!(dir.path().join("vm1").exists());
    assert!(!dir.path().join("vm2").exists(), "what was opened is closed again");
    engine.stop();
}

#[test]
fn a_start_that_fails_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let mut bad = desired(dir.path(), &(vm("vm2") + &link("h2", 2)));
    // A link whose remote is this host itself.
    let listen = UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    bad.bridge.spec.listen = SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), listen.port());
    bad.links[0].spec.remote = listen;
    assert!(Engine::start(bad).is_err());
    assert!(!dir.path().join("vm2").exists());
}

/// State and reason of an interface.
fn state_of(engine: &Engine, name: &str) -> (String, String) {
    let interface = engine.interfaces().into_iter().find(|interface| interface.name == name).unwrap();
    (interface.state, interface.reason.unwrap_or_default())
}

#[test]
fn a_host_starts_and_changes_without_what_is_not_there_yet() {
    let dir = tempfile::tempdir().unwrap();
    let nowhere = |name: &str| vm(name).replace("DIR/", "DIR/nowhere/");
    std::fs::write(dir.path().join("vm3"), "not a socket").unwrap();
    let text = vm("vm1") + &nowhere("vm2") + &vm("vm3") + &route("any", "interface vm2");
    let mut engine = Engine::start(desired(dir.path(), &text)).unwrap();
    assert!(dir.path().join("vm1").exists());
    let waits = format!("waiting for directory '{}'", dir.path().join("nowhere").display());
    assert!(state_of(&engine, "vm2").1.starts_with(&waits), "{:?}", state_of(&engine, "vm2"));
    assert!(state_of(&engine, "vm3").1.contains("is not a socket"), "{:?}", state_of(&engine, "vm3"));
    // The rest of the change is applied; the plan reports the absent interfaces.
    let plan = engine.apply(desired(dir.path(), &(text.clone() + &nowhere("vm4") + &vm("vm5")))).unwrap();
    assert!(dir.path().join("vm5").exists());
    let [told] = &engine.absent_in(&plan)[..] else { panic!("one is absent") };
    assert!(told.starts_with(&format!("interface vm4 is down: {waits}")), "{told}");
    // A change of only this interface is refused.
    let json = format!(r#"{{"name":"vm6","kind":"vhost-user","socket":"{}/no/s"}}"#, dir.path().display());
    let error = engine.add_interface(interface_from_json(json.as_bytes()).unwrap()).unwrap_err().to_string();
    assert!(error.contains("mkdir -p") && !names(&engine).0.contains(&"vm6".into()), "{error}");

    // A reopened interface keeps its port and counters. Attempts end when no interface is absent any more.
    let (port, stats) = (engine.interfaces["vm2"].port, engine.interfaces["vm2"].stats.clone());
    assert!(engine.tend(false) < Duration::from_secs(20));
    std::fs::create_dir(dir.path().join("nowhere")).unwrap();
    std::fs::remove_file(dir.path().join("vm3")).unwrap();
    engine.tend(true);
    for name in ["nowhere/vm2", "vm3", "nowhere/vm4"] {
        assert!(dir.path().join(name).exists(), "{name}");
    }
    assert_eq!(engine.interfaces["vm2"].port, port);
    assert!(Arc::ptr_eq(&engine.interfaces["vm2"].stats, &stats));
    assert!(engine.tend(true) > Duration::from_secs(60));
    engine.stop();
}

#[test]
fn applying_again_opens_what_has_come() {
    let dir = tempfile::tempdir().unwrap();
    let text = vm("vm1").replace("DIR/", "DIR/nowhere/");
    let mut engine = Engine::start(desired(dir.path(), &text)).unwrap();
    std::fs::create_dir(dir.path().join("nowhere")).unwrap();
    assert!(engine.apply(desired(dir.path(), &text)).unwrap().is_empty());
    assert!(dir.path().join("nowhere/vm1").exists());
    engine.remove_interface("vm1").unwrap();
    assert!(!dir.path().join("nowhere/vm1").exists());
    engine.stop();
}

#[test]
fn a_socket_passes_from_one_interface_to_another() {
    let dir = tempfile::tempdir().unwrap();
    let mut engine = Engine::start(desired(dir.path(), &vm("vm1"))).unwrap();
    // Another interface at the same socket.
    let renamed = vm("vm1").replace("name = \"vm1\"", "name = \"vm9\"");
    engine.apply(desired(dir.path(), &renamed)).unwrap();
    assert_eq!(names(&engine).0, ["vm9"]);
    assert!(dir.path().join("vm1").exists());
    // The same interface with another MTU.
    engine.apply(desired(dir.path(), &(renamed.clone() + "mtu = 9000\n"))).unwrap();
    assert_eq!(engine.interfaces()[0].settings.number("mtu"), Some(9000));
    assert!(dir.path().join("vm1").exists());
    // The successor opens, but another new interface fails: the state must be the one before.
    std::fs::write(dir.path().join("file"), "not a socket").unwrap();
    let bad = vm("vm1") + &renamed.replace("DIR/vm1", "DIR/file");
    let error = engine.apply(desired(dir.path(), &bad)).unwrap_err().to_string();
    assert!(error.starts_with("f:9: interface vm9 cannot be opened: "), "{error}");
    assert_eq!(
        (names(&engine).0, engine.interfaces()[0].settings.number("mtu")),
        (vec!["vm9".into()], Some(9000))
    );
    assert!(dir.path().join("vm1").exists());
    engine.stop();
}

#[test]
fn an_interface_stopped_for_a_failed_successor_is_reopened_or_down() {
    let dir = tempfile::tempdir().unwrap();
    let below = dir.path().join("below");
    std::fs::create_dir(&below).unwrap();
    let text = vm("vm1")
        + &vm("vm2").replace("DIR/", "DIR/below/")
        + &route("any", "interface vm1")
        + &route("any", "interface vm2");
    let mut engine = Engine::start(desired(dir.path(), &text)).unwrap();
    // New interfaces take over both sockets, but a regular file has replaced the second one.
    std::fs::remove_file(below.join("vm2")).unwrap();
    std::fs::write(below.join("vm2"), "not a socket").unwrap();
    let swapped =
        vm("a").replace("DIR/a", "DIR/vm1") + &vm("b").replace("DIR/b", "DIR/below/vm2") + &link("h2", 2);
    let error = engine.apply(desired(dir.path(), &swapped)).unwrap_err().to_string();
    assert!(error.starts_with("f:9: interface b cannot be opened: "), "{error}");
    assert!(error.contains("; interface vm2 was stopped for it and is down: "), "{error}");
    assert_eq!(error.lines().count(), 1, "{error}");
    let routes = vec![(1, "interface vm1".into()), (2, "interface vm2".into())];
    assert_eq!(names(&engine), (vec!["vm1".into(), "vm2".into()], vec![], routes));
    assert!(dir.path().join("vm1").exists());
    // The interface is opened once the path is free.
    std::fs::remove_file(below.join("vm2")).unwrap();
    engine.tend(true);
    assert!(UnixStream::connect(below.join("vm2")).is_ok());
    engine.stop();
}

#[test]
fn core_settings_change_without_reopening() {
    let dir = tempfile::tempdir().unwrap();
    let mut engine = Engine::start(desired(dir.path(), &vm("vm1"))).unwrap();
    let port = engine.interfaces["vm1"].port;
    engine.apply(desired(dir.path(), &(vm("vm1") + "storm_limit = 5\n"))).unwrap();
    assert_eq!(engine.interfaces["vm1"].port, port);
    assert_eq!(engine.interfaces()[0].settings.number("storm_limit"), Some(5));
    engine.stop();
}

#[test]
fn single_changes_use_the_same_path() {
    let dir = tempfile::tempdir().unwrap();
    let mut engine = Engine::start(desired(dir.path(), "")).unwrap();
    let json =
        format!(r#"{{"name":"vm1","kind":"vhost-user","socket":"{}"}}"#, dir.path().join("s").display());
    engine.add_interface(interface_from_json(json.as_bytes()).unwrap()).unwrap();
    let again = engine.add_interface(interface_from_json(json.as_bytes()).unwrap()).unwrap_err().to_string();
    assert!(again.contains("the name 'vm1' is already used by an interface; choose another"), "{again}");
    engine
        .add_link(link_from_json(br#"{"name":"h2","remote":"10.1.2.2:9000","trusted":true}"#).unwrap())
        .unwrap();
    let to_vm = br#"{"dst":"any","to":"interface vm1","from":"link h2"}"#;
    assert_eq!(engine.add_route(route_from_json(to_vm).unwrap()).unwrap(), 1);

    let error = engine.remove_interface("vm1").unwrap_err().to_string();
    let want = "interface vm1 is named by route 1 (src any, dst any, from link h2, to interface vm1); delete that first";
    assert_eq!(error, want);
    assert!(engine.remove_link("h2").unwrap_err().to_string().starts_with("link h2 is named by route 1 ("));
    assert_eq!(
        engine.remove_link("h9").unwrap_err().to_string(),
        "there is no link h9; see 'vnet link list'"
    );
    assert!(matches!(engine.remove_route(2), Err(EngineError::NotFound(_, Listed::Routes))));
    engine.remove_route(1).unwrap();
    assert_eq!(engine.add_route(route_from_json(to_vm).unwrap()).unwrap(), 2, "no index is used again");
    engine.remove_route(2).unwrap();
    engine.remove_interface("vm1").unwrap();
    engine.remove_link("h2").unwrap();
    assert_eq!(names(&engine), (vec![], vec![], vec![]));
    engine.stop();
}

#[test]
fn routes_of_a_moved_address_move_together() {
    let dir = tempfile::tempdir().unwrap();
    let mut engine = Engine::start(desired(
        dir.path(),
        &(link("h2", 2) + &link("h3", 3) + "[[network]]\nid = 1\n[[network]]\nid = 2\n"),
    ))
    .unwrap();
    let mac: Mac = "52:54:00:00:00:01".parse().unwrap();
    let from_either = [
        r#"{"dst":"52:54:00:00:00:01","to":"link h2"}"#,
        r#"{"dst":"52:54:00:00:00:01","src":"52:54:00:00:00:09","to":"link h3"}"#,
        r#"{"dst":"52:54:00:00:00:01","src":"52:54:00:00:00:09","to":"link h2"}"#,
        r#"{"dst":"52:54:00:00:00:01","to":"link h2","network":2}"#,
        r#"{"dst":"not-52:54:00:00:00:01","to":"link h2"}"#,
    ];
    for route in from_either {
        engine.add_route(route_from_json(route.as_bytes()).unwrap()).unwrap();
    }
    let [h3, h4] = ["h3", "h4"].map(|name| Target::Link(name.into()));
    let error = engine.move_routes(NetworkId::DEFAULT, mac, &h4).unwrap_err().to_string();
    assert!(error.contains("h4"), "{error}");
    assert_eq!(engine.routes().len(), 5, "nothing has changed");
    // Two rules that differed in their target are one now; other networks and other destinations stay.
    assert_eq!(engine.move_routes(NetworkId::DEFAULT, mac, &h3).unwrap(), [2, 6]);
    let mut to: Vec<_> =
        engine.routes().iter().map(|route| (route.index, route.settings.text("to"))).collect();
    to.sort();
    let to: Vec<_> = to.iter().map(|(index, to)| (*index, to.as_str())).collect();
    assert_eq!(to, [(2, "link h3"), (4, "link h2"), (5, "link h2"), (6, "link h3")]);
    assert_eq!(engine.move_routes(NetworkId::DEFAULT, mac, &h3).unwrap(), [2, 6], "again");
    engine.stop();
}

#[test]
fn counters_of_removed_ports_stay_in_the_balance() {
    let dir = tempfile::tempdir().unwrap();
    let mut engine = Engine::start(desired(dir.path(), &(vm("vm1") + &link("h2", 2)))).unwrap();
    let vm1 = engine.interfaces["vm1"].stats.clone();
    vm1.in_frames.add(3);
    engine.links["h2"].stats.delivered(2, 200);
    vm1.drop_frames(vnet::stats::DropReason::NoRoute, 1);
    engine.apply(desired(dir.path(), "")).unwrap();
    let stats = engine.stats();
    assert_eq!(stats.balance, api::Balance { entered: 3, copies: 0, out: 2, drops: 1 });
    let removed = stats.ports.iter().find(|port| port.kind == "removed").unwrap();
    assert_eq!((removed.counters.in_frames, removed.counters.drops["no_route"]), (3, 1));
    engine.stop();
}

#[test]
fn a_link_to_an_address_of_this_host_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let text = "[host]\nname = \"h1\"\n[bridge]\nlisten = \"[::]:0\"\n";
    let mut engine = Engine::start(parse("f", text).unwrap().desired).unwrap();
    let remote = format!("127.0.0.1:{}", engine.core.bridge_address().port());
    let json = format!(r#"{{"name":"me","remote":"{remote}"}}"#);
    let error = engine.add_link(link_from_json(json.as_bytes()).unwrap()).unwrap_err().to_string();
    assert_eq!(error, format!("link me leads to this host itself ({remote}); name the other host's address"));
    assert!(engine.links().is_empty());
    engine.stop();
    drop(dir);
}

#[test]
fn a_sealed_link_keeps_its_keys_when_its_remote_changes() {
    let dir = tempfile::tempdir().unwrap();
    let files = Pki::new(dir.path()).issue("h1", 1, Flaw::None, &[]);
    let (ca, certificate, key) = (files.ca.display(), files.certificate.display(), files.key.display());
    let identity = format!("[identity]\nca = \"{ca}\"\ncertificate = \"{certificate}\"\nkey = \"{key}\"\n");
    let sealed = |name: &str, host: u8| {
        format!("[[link]]\nname = \"{name}\"\nremote = \"10.1.2.{host}:9000\"\nsealed = true\n")
    };
    let with = |links: String| desired(dir.path(), &(identity.clone() + &links));
    let mut engine = Engine::start(with(sealed("h2", 2))).unwrap();
    let live = |engine: &Engine, name: &str| engine.links[name].link.clone();
    let first = live(&engine, "h2");
    engine.apply(with(sealed("h2", 3))).unwrap();
    assert!(Arc::ptr_eq(&first, &live(&engine, "h2")), "it moves");
    assert_eq!(engine.links()[0].settings.text("remote"), "10.1.2.3:9000");
    // The first remote identifies a link's datagrams on receive: when another link takes it, this link is recreated.
    engine.apply(with(sealed("h2", 3) + &sealed("h3", 2))).unwrap();
    let (second, third) = (live(&engine, "h2"), live(&engine, "h3"));
    assert!(!Arc::ptr_eq(&first, &second));
    engine.apply(with(sealed("h2", 2) + &sealed("h3", 3))).unwrap();
    assert!(!Arc::ptr_eq(&second, &live(&engine, "h2")) && !Arc::ptr_eq(&third, &live(&engine, "h3")));
    assert_eq!(engine.links()[1].settings.text("remote"), "10.1.2.3:9000");
    // Without sealing, only the remote address identifies the sender, so the link is recreated.
    engine.apply(with(link("h2", 2))).unwrap();
    let clear = live(&engine, "h2");
    engine.apply(with(link("h2", 4))).unwrap();
    assert!(!Arc::ptr_eq(&clear, &live(&engine, "h2")));
    engine.stop();
}

#[test]
fn what_the_overlay_knew_is_there_before_interfaces_are() {
    let dir = tempfile::tempdir().unwrap();
    let overlay = "[overlay]\netcd = [\"http://127.0.0.1:1\"]\ntrusted = true\n";
    let peer = |name: &str, remote: &str| PeerLink {
        name: name.into(),
        remote: remote.parse().unwrap(),
        networks: vec![NetworkId::DEFAULT],
        spoke: false,
    };
    let mut asked = 0;
    let engine =
        Engine::start_in(desired(dir.path(), &(overlay.to_string() + &vm("vm1"))), |engine, desired| {
            asked += engine.interfaces().len() + 1;
            assert_eq!(Engine::planned_locals(desired).len(), 1);
            // The bridge listens on IPv4 and cannot reach an IPv6 remote: that link is left out.
            Computed {
                links: vec![peer("h2", "10.1.2.2:9000"), peer("h6", "[fd00::6]:9000")],
                ..Computed::default()
            }
        });
    let engine = engine.unwrap();
    assert_eq!(asked, 1, "asked once, before an interface is open");
    assert_eq!(names(&engine), (vec!["vm1".into()], vec!["h2".into()], vec![]));
    engine.stop();
}

#[test]
fn an_ip_address_of_two_interfaces_is_told_at_both() {
    let dir = tempfile::tempdir().unwrap();
    let vm = |n: u8, address: &str| {
        vm(&format!("vm{n}")) + &format!("mac = \"52:54:00:00:00:0{n}\"\naddresses = [\"{address}\"]\n")
    };
    let text = vm(1, "10.0.0.1") + &vm(2, "10.0.0.1") + &vm(3, "10.0.0.3");
    let text = format!("[host]\nname = \"h1\"\n[bridge]\nlisten = \"127.0.0.1:0\"\n{text}");
    let parsed = parse("f", &text.replace("DIR", dir.path().to_str().unwrap())).unwrap();
    let told: Vec<_> = parsed.warnings.iter().map(ToString::to_string).collect();
    let want =
        "f:11: interface vm2: addresses lists 10.0.0.1, as interface vm1 does; give each guest its own";
    assert_eq!(told, [want]);
    let engine = Engine::start(parsed.desired).unwrap();
    let notes: Vec<_> = engine.interfaces().into_iter().map(|interface| interface.notes.join(";")).collect();
    let note = |other| format!("interface {other} lists its address 10.0.0.1, too; give each guest its own");
    assert_eq!(notes, [note("vm2"), note("vm1"), String::new()]);
    engine.stop();
}

#[test]
fn a_datagram_that_comes_before_its_link_is_no_strangers() {
    let dir = tempfile::tempdir().unwrap();
    let peer = UdpSocket::bind("127.0.0.1:0").unwrap();
    let remote = peer.local_addr().unwrap();
    let mut engine = Engine::start(desired(dir.path(), "")).unwrap();
    let arrives = |engine: &Engine| {
        peer.send_to(&[0; 20], engine.bridge_address()).unwrap();
        while engine.core.bridge_stats().discards(DiscardReason::UnknownSource) == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    // A host without interfaces and links listens, too.
    arrives(&engine);
    assert_eq!(engine.status().unknown_sender.unwrap().address, remote.to_string());
    let more = format!("[[link]]\nname = \"h2\"\nremote = \"{remote}\"\ntrusted = true\n");
    engine.apply(desired(dir.path(), &more)).unwrap();
    assert!(engine.status().unknown_sender.is_none(), "it is a link's remote now");
    engine.stop();
    let engine = Engine::start(desired(dir.path(), "")).unwrap();
    engine.core.bridge_stats().last_stranger.silence();
    arrives(&engine);
    assert!(engine.status().unknown_sender.is_none(), "stopping");
    engine.stop();
}

#[test]
fn a_port_in_use_is_one_line() {
    let taken = UdpSocket::bind("127.0.0.1:0").unwrap();
    let listen = taken.local_addr().unwrap();
    let text = format!("[host]\nname = \"h1\"\n[bridge]\nlisten = \"{listen}\"\n");
    let error = Engine::start(parse("f", &text).unwrap().desired).err().unwrap().to_string();
    assert!(error.starts_with("f:3: ") && error.contains(&listen.to_string()), "{error}");
    assert!(error.contains("in use") && error.ends_with("[bridge] listen"), "{error}");
    assert_eq!(error.lines().count(), 1, "{error}");
}

#[test]
fn driving_changes_without_reopening() {
    let dir = tempfile::tempdir().unwrap();
    let mut engine = Engine::start(desired(dir.path(), &vm("vm1"))).unwrap();
    let live = |engine: &Engine| engine.interfaces["vm1"].interface.clone();
    let (before, port) = (live(&engine), engine.interfaces["vm1"].port);
    assert!(!before.coalesce().unwrap().coalesces());
    let text = vm("vm1") + "mode = \"vmm-driven\"\ninterrupts = \"optimistic\"\nstorm_limit = 5\n";
    let plan = engine.apply(desired(dir.path(), &text)).unwrap();
    assert!(plan.to_string().ends_with("storm limit 5/s, vmm-driven, optimistic interrupts"), "{plan}");
    assert!(Arc::ptr_eq(&before, &live(&engine)) && engine.interfaces["vm1"].port == port);
    assert!(before.coalesce().unwrap().coalesces());
    let interface = engine.interfaces().remove(0);
    let (mode, shown) = (interface.settings.text("mode"), interface.driving);
    assert_eq!((&*mode, &*shown.driven_by, shown.switches), ("vmm-driven", "vmm", 1));
    // A single change uses the same path.
    let json = br#"{"mode": "guest-driven", "interrupts": "direct"}"#;
    engine.change_interface("vm1", |spec| config::change_from_json(json, spec)).unwrap();
    assert!(Arc::ptr_eq(&before, &live(&engine)) && !before.coalesce().unwrap().coalesces());
    let shown = engine.interfaces().remove(0);
    assert_eq!((&*shown.settings.text("mode"), &*shown.driving.driven_by), ("guest-driven", "guest"));
    assert_eq!((shown.driving.switches, shown.settings.number("storm_limit")), (2, Some(5)));
    let wrong = |engine: &mut Engine, json: &[u8]| {
        engine.change_interface("vm1", |spec| config::change_from_json(json, spec)).unwrap_err().to_string()
    };
    assert!(wrong(&mut engine, br#"{"mode": "fast"}"#).contains("mode 'fast' is not known"));
    assert!(wrong(&mut engine, br#"{"name": "vm2"}"#).contains("unknown key 'name'"));
    engine.stop();
}
