use std::path::Path;

use vnet::link::sealed::pki::{Flaw, Pki};

use super::*;
use crate::config::parse;
use crate::engine::Engine;

const LINK: &str = "[[link]]\nname = \"h2\"\nremote = \"127.0.0.2:9000\"\ntrusted = true\n";

/// A host with two virtual machines with direct ports, in networks 1 and 2.
fn desired(dir: &Path, links: &str) -> Desired {
    let vm = |n: u8| {
        let socket = dir.join(format!("vm{n}"));
        format!(
            "[[interface]]\nname = \"vm{n}\"\nkind = \"vhost-user\"\nsocket = \"{}\"\nnetwork = {n}\n\
             mac = \"52:54:00:00:00:0{n}\"\ndirect = true\n",
            socket.display()
        )
    };
    let text = format!(
        "[host]\nname = \"h1\"\n[bridge]\nlisten = \"127.0.0.1:0\"\n[[network]]\nid = 2\n{}{}{links}",
        vm(1),
        vm(2)
    );
    parse("f", &text).unwrap().desired
}

/// Links and states of an interface's ports, and why one is not used.
fn shown(engine: &Engine, name: &str) -> (Vec<(String, String)>, Option<String>) {
    let interface = engine.interfaces().into_iter().find(|interface| interface.name == name).unwrap();
    let port = |port: api::DirectPort| {
        assert_ne!(port.port, 0);
        (port.link, port.state)
    };
    (interface.direct_ports.into_iter().map(port).collect(), interface.direct_reason)
}

fn numbers(engine: &Engine) -> Vec<u16> {
    let interfaces = engine.interfaces().into_iter();
    interfaces.flat_map(|interface| interface.direct_ports).map(|port| port.port).collect()
}

#[test]
fn each_link_has_a_port_for_each_of_its_networks_guests() {
    let dir = tempfile::tempdir().unwrap();
    let second = LINK.replace("h2", "h3").replace("0.2:", "0.3:") + "networks = [2]\n";
    let mut engine = Engine::start(desired(dir.path(), &(LINK.to_string() + &second))).unwrap();
    let down = |link: &str| (link.to_string(), "down".to_string());
    assert_eq!(shown(&engine, "vm1"), (vec![down("h2")], None), "no guest is there");
    assert_eq!(shown(&engine, "vm2"), (vec![down("h2"), down("h3")], None));
    let before = numbers(&engine);
    // Ports of links that stay are not touched.
    engine.apply(desired(dir.path(), LINK)).unwrap();
    assert_eq!(numbers(&engine), before[..2]);
    let mut without = desired(dir.path(), LINK);
    without.interfaces[0].spec.direct = false;
    engine.apply(without).unwrap();
    assert_eq!(shown(&engine, "vm1"), (vec![], None));
    assert_eq!(numbers(&engine), before[1..2]);
    engine.stop();
}

#[test]
fn links_without_direct_ports_have_a_reason() {
    let dir = tempfile::tempdir().unwrap();
    let classic = |n: u8| {
        let other = LINK.replace("h2", &format!("v{n}")).replace("0.2:", &format!("0.{n}:"));
        other + "encapsulation = \"vnet\"\nnetworks = [1]\n"
    };
    let links = LINK.to_string() + &classic(3) + &classic(4) + &classic(5);
    let engine = Engine::start(desired(dir.path(), &links)).unwrap();
    let (ports, reason) = shown(&engine, "vm1");
    assert_eq!(ports.len(), 1);
    let why = "link v3: only links of encapsulation native have direct ports; 2 more links have none either";
    assert_eq!(reason.as_deref(), Some(why));
    assert_eq!(shown(&engine, "vm2").1, None, "these links do not carry its network");
    engine.stop();
}

#[test]
fn sealed_links_have_ports_unless_they_have_a_rendezvous() {
    let dir = tempfile::tempdir().unwrap();
    let files = Pki::new(dir.path()).issue("h1", 1, Flaw::None, &[]);
    let (ca, certificate, key) = (files.ca.display(), files.certificate.display(), files.key.display());
    let identity = format!("[identity]\nca = \"{ca}\"\ncertificate = \"{certificate}\"\nkey = \"{key}\"\n");
    let sealed = LINK.replace("trusted", "sealed");
    let relayed = "[[link]]\nname = \"h3\"\nvia = \"h2\"\nsealed = true\n";
    let engine = Engine::start(desired(dir.path(), &(identity + &sealed + relayed))).unwrap();
    let why = "link h3: links with a rendezvous have no direct ports".to_string();
    assert_eq!(shown(&engine, "vm1"), (vec![("h2".into(), "down".into())], Some(why)));
    engine.stop();
}

#[test]
fn a_link_has_a_bounded_number_of_ports() {
    let dir = tempfile::tempdir().unwrap();
    let mut many = desired(dir.path(), LINK);
    let vm = many.interfaces[0].clone();
    many.interfaces = (0..DIRECT_MAX as u8 + 2)
        .map(|n| {
            let mut vm = vm.clone();
            vm.spec.name = format!("vm{n}");
            vm.spec.mac = Some(vnet::wire::ethernet::Mac([2, 0, 0, 0, 1, n]));
            if let Attachment::VhostUser { socket, .. } = &mut vm.spec.attachment {
                *socket = dir.path().join(&vm.spec.name);
            }
            vm
        })
        .collect();
    let engine = Engine::start(many).unwrap();
    assert_eq!(numbers(&engine).len(), DIRECT_MAX);
    let (ports, reason) = shown(&engine, &format!("vm{}", DIRECT_MAX + 1));
    assert_eq!((ports.len(), reason.as_deref()), (0, Some("link h2: it has 32 direct ports already")));
    engine.stop();
}
