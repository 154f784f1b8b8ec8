//! Writes a desired state as a configuration file: the inverse of [`super::read_file`].

use std::fmt::Write;

use serde_json::Value as Json;

use super::host::{BRIDGE, CONTROL, DISPATCH, HOST, IDENTITY, NETWORK};
use super::interface::INTERFACE;
use super::key::Declaration;
use super::link::{LINK, LinkForm};
use super::overlay::OVERLAY;
use super::route::ROUTE;
use crate::desired::Desired;

/// A configuration file that describes `desired`, with the keys that differ from their defaults. It includes the passwords of
/// proxies.
pub fn save(desired: &Desired) -> String {
    let mut text = String::new();
    table(&mut text, &HOST, &desired.host.spec);
    unless_empty(&mut text, &CONTROL, &desired.control.spec);
    unless_empty(&mut text, &DISPATCH, &desired.dispatch.spec);
    unless_empty(&mut text, &BRIDGE, &desired.bridge.spec);
    desired.identity.iter().for_each(|item| table(&mut text, &IDENTITY, &item.spec));
    desired.overlay.iter().for_each(|item| table(&mut text, &OVERLAY, &item.spec));
    desired.networks.iter().for_each(|item| table(&mut text, &NETWORK, &item.spec));
    desired.interfaces.iter().for_each(|item| table(&mut text, &INTERFACE, &item.spec));
    desired.links.iter().for_each(|item| table(&mut text, &LINK, &LinkForm::from(&item.spec)));
    desired.routes.iter().for_each(|item| table(&mut text, &ROUTE, &item.spec));
    text
}

fn unless_empty<S>(text: &mut String, declaration: &Declaration<S>, spec: &S) {
    if !declaration.written(spec).is_empty() {
        table(text, declaration, spec);
    }
}

/// Appends a table.
fn table<S>(text: &mut String, declaration: &Declaration<S>, spec: &S) {
    let gap = if text.is_empty() { "" } else { "\n" };
    writeln!(text, "{gap}{}", declaration.title).expect("a String takes all");
    for (key, value) in declaration.written(spec) {
        writeln!(text, "{key} = {}", toml(&value)).expect("a String takes all");
    }
}

/// The value in TOML, which has the same syntax as JSON for texts, numbers, flags and lists. Only DEL needs an additional escape.
fn toml(value: &Json) -> String {
    value.to_string().replace('\u{7f}', "\\u007f")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::parse;

    /// Asserts that the saved file is read as the same state and saved as the same text.
    fn check(text: &str) -> String {
        let desired = parse("f", text).unwrap().desired;
        let saved = save(&desired);
        let again = parse("saved", &saved).unwrap_or_else(|error| panic!("{error}\n{saved}"));
        assert_eq!(again.desired, desired, "{saved}");
        assert_eq!(save(&again.desired), saved);
        saved
    }

    #[test]
    fn a_saved_state_is_read_as_the_same() {
        let saved = check(
            r#"
            [host]
            name = "h1"
            [control]
            http = "127.0.0.1:9080"
            token_file = "/etc/vnet/to\u007fken"
            tls_cert = "/a"
            tls_key = "/b"
            [dispatch]
            threads = 2
            cpus = [0, 1]
            yield = "timed"
            busy_poll_budget = 9
            [bridge]
            listen = "[::]:9100"
            ports = 2
            vxlan_listen = "[::]:4789"
            stream_listen = "[::]:9002"
            trusted = ["10.0.0.0/8", "fd00::/8"]
            meetings = 3
            [identity]
            ca = "/ca"
            certificate = "/h1.pem"
            key = "/h1.key"
            crl = "/crl"
            [[network]]
            id = 7
            learning = false
            relay = true
            [[interface]]
            name = "vm1"
            kind = "vhost-user"
            socket = "/run/v\"m.sock"
            server = false
            mac = "52:54:00:00:00:01"
            addresses = ["10.0.0.1", "fd00::1"]
            queues = 4
            mode = "vmm-driven"
            interrupts = "optimistic"
            port_security = true
            address_security = true
            weight = 50
            rate_limit = 1000
            frame_limit = 100000
            [[interface]]
            name = "c1"
            kind = "tap"
            device = "eth0"
            netns = "pid:7"
            mtu = 9000
            network = 7
            [[interface]]
            name = "lan"
            kind = "local"
            device = "eth1"
            promiscuous = true
            [[link]]
            name = "a"
            remote = "10.0.0.2:9000"
            ports = 3
            networks = [1, 7]
            macs = ["52:54:00:00:00:07"]
            [[link]]
            name = "b"
            sealed = true
            [[link]]
            name = "c"
            peer = "h9"
            sealed = true
            via = "b2"
            [[link]]
            name = "b2"
            remote = "203.0.113.1:9000"
            sealed = true
            [[link]]
            name = "d"
            encapsulation = "vxlan"
            remote = "10.0.0.3"
            flood = ["10.0.0.4"]
            offload = false
            [[link]]
            name = "e"
            encapsulation = "vnet"
            remote = "10.0.0.5:9000"
            networks = [7]
            mtu = 1400
            [[link]]
            name = "f"
            encapsulation = "stream"
            remote = "abc.onion:9002"
            proxy = "socks5://us@er:pa:ss@127.0.0.1:9050"
            sealed = true
            [[link]]
            name = "g"
            encapsulation = "stream"
            remote = "203.0.113.7:9002"
            connect = false
            trusted = true
            [[route]]
            dst = "not-52:54:00:00:00:02"
            src = "none"
            from = "link a"
            to = "interface vm1"
            [[route]]
            network = 7
            dst = "any"
            from = "interface"
            to = "link a"
            "#,
        );
        assert!(saved.contains("proxy = \"socks5://us@er:pa:ss@127.0.0.1:9050\"\n"), "{saved}");
        assert!(!saved.contains("anywhere") && !saved.contains("burst"), "{saved}");
    }

    #[test]
    fn packaged_and_small_files_are_saved_as_the_same() {
        check(include_str!("../../../packaging/vnet.toml"));
        assert_eq!(check("[host]\nname = \"h1\"\n"), "[host]\nname = \"h1\"\n");
        check(
            "[host]\nname = \"h1\"\n[overlay]\netcd = [\"https://10.0.0.1:2379\"]\nca = \"/ca\"\ncert = \"/c\"\nkey = \"/k\"\n\
             topology = \"hub h2\"\naddress = \"10.0.0.1:9000\"\nnetworks = [1]\ntrusted = true\n",
        );
    }
}
