//! The configuration file: accepted settings, and exact error lines of rejected ones.

use proptest::prelude::*;
use vnet::dispatch::isolation::Isolation;
use vnet::dispatch::mode::Mode;
use vnet::dispatch::yielding;
use vnet::frame::NetworkId;
use vnet::interface::interrupts::Interrupts;
use vnet::interface::tap::Netns;
use vnet::link::{LinkKind, Proxy, StreamOptions, VxlanOptions, ZeroCopy};
use vnet::route::Qualifier;
use vnet::wire::socks::{Credentials, Destination};
use vnet_control::config::{Configuration, parse};
use vnet_control::desired::{Attachment, Driving, FrontEndSpec, RouteSource, Target};

/// The error lines of a rejected file.
fn errors(text: &str) -> Vec<String> {
    match parse("f.toml", text) {
        Ok(_) => vec![],
        Err(error) => error.to_string().lines().map(String::from).collect(),
    }
}

fn good(text: &str) -> Configuration {
    parse("f.toml", text).unwrap_or_else(|error| panic!("{error}"))
}

const EVERYTHING: &str = r#"
[host]
name = "h1"

[control]
socket  = "/run/vnet/h1.sock"

[dispatch]
threads = 1
cpus    = [1]
yield   = "timed"
sleep_us = 60
nowork_us = 250
priority = 5
lock_memory = true
busy_poll_us = 20
busy_poll_budget = 32

[bridge]
listen = "[::]:9001"

[[network]]
id = 1
learning = true

[[network]]
id = 7
learning = false
ageing_s = 20

[[interface]]
name = "vm1"
kind = "vhost-user"
socket = "/run/vnet/vm1.sock"
server = true
mac  = "52:54:00:00:00:01"
mtu  = 1500
mode = "vmm-driven"
rate_low = 1001
rate_high = 10001
window_us = 4000
interrupts = "optimistic"
receive_density_low = 10
receive_density_high = 20
early_bytes = 30

[[interface]]
name = "c1"
kind = "tap"
device = "vnet0"
interrupts = "direct"
netns = "pid:12"
network = 7
mtu = 65535
queues = 2
storm_limit = 1000

[[link]]
name = "h2"
remote = "10.10.0.2:9000"
encapsulation = "native"
trusted = true
mtu = 1400

[[link]]
name = "old"
remote = "[fd00::3]:9000"
encapsulation = "vnet"
trusted = true

[[route]]
src = "not-52:54:00:00:00:09"
dst = "52:54:00:00:00:02"
from = "interface vm1"
to  = "link h2"

[[route]]
dst = "any"
to = "link old"
"#;

#[test]
fn host_settings_are_read() {
    let Configuration { desired, warnings } = good(EVERYTHING);
    assert_eq!(desired.host.spec.name, "h1");
    assert_eq!(desired.control.spec.socket.to_str(), Some("/run/vnet/h1.sock"));
    let dispatch = &desired.dispatch.spec;
    assert_eq!(
        (dispatch.threads, &dispatch.cpus[..], dispatch.yield_strategy),
        (1, &[1][..], yielding::Strategy::Timed)
    );
    assert_eq!((dispatch.sleep_us, dispatch.nowork_us), (60, 250));
    let isolation =
        Isolation { priority: Some(5), lock_memory: true, busy_poll_us: 20, busy_poll_budget: Some(32) };
    assert_eq!(dispatch.isolation, isolation);
    assert_eq!(desired.bridge.spec.listen, "[::]:9001".parse().unwrap());
    assert_eq!((desired.networks[0].spec.learning, desired.networks[0].spec.ageing_s), (true, 300));
    assert_eq!((desired.networks[1].spec.learning, desired.networks[1].spec.ageing_s), (false, 20));
    let warnings: Vec<_> = warnings.iter().map(ToString::to_string).collect();
    assert_eq!(
        warnings,
        [
            "f.toml:51: interrupts has no effect on kind tap: the kernel hands frames over at once",
            "f.toml:54: mtu 65535 is more than a TAP takes; it will be 65521",
        ]
    );
}

#[test]
fn receive_in_place_settings_are_read() {
    let text = "[host]\nname = \"h1\"\n[bridge]\nzero_copy = \"on\"\n[[interface]]\nname = \"vm1\"\nkind = \"vhost-user\"\n\
                socket = \"/run/vm1\"\nmac = \"52:54:00:00:00:01\"\ndirect_port = 9101\ndirect_link = \"h2\"\n[[link]]\n\
                name = \"h2\"\nremote = \"10.0.0.2:9000\"\ntrusted = true\nnetworks = [1]\n\
                direct = [\"52:54:00:00:00:02@9102\"]\n";
    let desired = good(text).desired;
    assert_eq!(desired.bridge.spec.zero_copy, ZeroCopy::On);
    let Attachment::VhostUser { direct: Some(direct), .. } = &desired.interfaces[0].spec.attachment else {
        panic!("a port of its own")
    };
    assert_eq!((direct.port, &direct.link[..]), (9101, "h2"));
    let guests = vec![("52:54:00:00:00:02".parse().unwrap(), 9102)];
    assert_eq!(desired.links[0].spec.kind, LinkKind::Native { guests });
    assert_eq!(good(EVERYTHING).desired.bridge.spec.zero_copy, ZeroCopy::Auto);
}

#[test]
fn direct_ports_need_an_address_and_exclude_a_configured_one() {
    let text = |more: &str| {
        format!(
            "[host]\nname = \"h1\"\n[[interface]]\nname = \"vm1\"\nkind = \"vhost-user\"\nsocket = \"/run/vm1\"\n{more}"
        )
    };
    let mac = "mac = \"52:54:00:00:00:01\"\n";
    assert!(good(&text(&format!("direct = true\n{mac}"))).desired.interfaces[0].spec.direct);
    assert!(!good(&text(mac)).desired.interfaces[0].spec.direct);
    let configured = format!("{mac}direct = true\ndirect_port = 9101\ndirect_link = \"h2\"\n");
    for (bad, says) in [
        ("direct = true\n", "give it a 'mac'"),
        (&*configured, "remove direct_port and direct_link, or direct"),
    ] {
        let problems = errors(&text(bad));
        assert!(problems.iter().any(|line| line.contains(says)), "{bad}: {problems:?}");
    }
}

#[test]
fn who_may_be_the_front_end_is_read() {
    let text = |more: &str| {
        format!(
            "[host]\nname = \"h1\"\n[[interface]]\nname = \"vm1\"\nkind = \"vhost-user\"\nsocket = \"/run/vm1\"\n{more}"
        )
    };
    let all = "socket_owner = \"tenant1\"\nsocket_group = \"107\"\nsocket_mode = \"0660\"\npeer_user = \"64055\"\n\
               peer_group = \"kvm\"\nmemory_limit = 4096\n";
    let desired = good(&text(all)).desired;
    let Attachment::VhostUser { front_end, .. } = &desired.interfaces[0].spec.attachment else {
        panic!("a VM")
    };
    let wanted = FrontEndSpec {
        socket_owner: Some("tenant1".parse().unwrap()),
        socket_group: Some("107".parse().unwrap()),
        socket_mode: Some("660".parse().unwrap()),
        peer_user: Some("64055".parse().unwrap()),
        peer_group: Some("kvm".parse().unwrap()),
        memory_limit: Some(4096),
    };
    assert_eq!(*front_end, wanted);
    for (bad, says) in [
        ("socket_mode = \"rw\"\n", "as in \"0660\""),
        ("peer_user = \"a b\"\n", "a name or a number"),
        ("memory_limit = 0\n", "memory_limit"),
        ("server = false\nsocket_owner = \"root\"\n", "with server = false it makes none"),
    ] {
        let problems = errors(&text(bad));
        assert!(problems.iter().any(|line| line.contains(says)), "{bad}: {problems:?}");
    }
}

#[test]
fn networks_interfaces_links_and_routes_are_read() {
    let desired = good(EVERYTHING).desired;
    let [vm, container] = &desired.interfaces[..] else { panic!("two interfaces") };
    let socket = "/run/vnet/vm1.sock".into();
    assert_eq!(
        vm.spec.attachment,
        Attachment::VhostUser { socket, server: true, front_end: FrontEndSpec::default(), direct: None }
    );
    let (mode, interrupts) = (vm.spec.driving.mode, vm.spec.driving.interrupts);
    assert_eq!(
        (mode.mode, mode.rate_low, mode.rate_high, mode.window_us),
        (Mode::VmmDriven, 1001, 10001, 4000)
    );
    assert_eq!(interrupts.interrupts, Interrupts::Optimistic);
    assert_eq!((interrupts.density_low, interrupts.density_high, interrupts.early_bytes), (10, 20, 30));
    assert_eq!(container.spec.driving, Driving::default());
    assert_eq!((vm.spec.mac, vm.spec.mtu), ("52:54:00:00:00:01".parse().ok(), 1500));
    let netns = Some(Netns::Pid(12));
    assert_eq!(container.spec.attachment, Attachment::Tap { device: "vnet0".into(), netns });
    assert_eq!((container.spec.queues, container.spec.storm_limit), (2, 1000));
    assert_eq!((container.spec.network.get(), container.spec.mtu), (7, 65535));
    let [link, old] = &desired.links[..] else { panic!("two links") };
    assert_eq!((&link.spec.kind, &link.spec.networks), (&LinkKind::default(), &None));
    assert_eq!(link.spec.mtu, Some(1400));
    assert_eq!(old.spec.networks, Some(vec![NetworkId::DEFAULT]));
    let [route, any] = &desired.routes[..] else { panic!("two routes") };
    assert_eq!(route.spec.src, Qualifier::Not("52:54:00:00:00:09".parse().unwrap()));
    assert_eq!(route.spec.from, RouteSource::One(Target::Interface("vm1".into())));
    assert_eq!(route.spec.to, Target::Link("h2".into()));
    assert_eq!(
        (any.spec.src, any.spec.dst, &any.spec.from),
        (Qualifier::Any, Qualifier::Any, &RouteSource::Any)
    );
}

#[test]
fn encapsulations_and_the_local_network_are_read() {
    let text = r#"
        host.name = "h"
        bridge.vxlan_listen = "[::]:4789"
        bridge.stream_listen = "0.0.0.0:9001"
        [[interface]]
        name = "lan"
        kind = "local"
        device = "eth1"
        promiscuous = true
        [[link]]
        name = "fabric"
        remote = "10.0.0.2"
        encapsulation = "vxlan"
        flood = ["10.0.0.3", "::ffff:10.0.0.4"]
        group = "239.1.1.1"
        trusted = true
        [[link]]
        name = "near"
        remote = "10.0.0.5:9001"
        encapsulation = "stream"
        connect = false
        trusted = true
        [[link]]
        name = "far"
        remote = "h.onion:9001"
        encapsulation = "stream"
        proxy = "socks5://me:se:cret@127.0.0.1:9050"
        sealed = true
        peer = "h2"
        [identity]
        ca = "/ca.pem"
        certificate = "/h.pem"
        key = "/h.key"
    "#;
    let desired = good(text).desired;
    assert_eq!(desired.bridge.spec.vxlan_listen, "[::]:4789".parse().ok());
    assert_eq!(desired.bridge.spec.stream_listen, "0.0.0.0:9001".parse().ok());
    let local = Attachment::Local { device: "eth1".into(), netns: None, promiscuous: true };
    assert_eq!(desired.interfaces[0].spec.attachment, local);
    let [fabric, near, far] = &desired.links[..] else { panic!("three links") };
    assert_eq!(
        (fabric.spec.remote, &fabric.spec.networks),
        ("10.0.0.2:4789".parse().unwrap(), &Some(vec![NetworkId::DEFAULT]))
    );
    let flood = vec!["10.0.0.3".parse().unwrap(), "10.0.0.4".parse().unwrap()];
    let group = "239.1.1.1".parse().ok();
    assert_eq!(fabric.spec.kind, LinkKind::Vxlan(VxlanOptions { flood, group, offload: true }));
    let destination = Destination::Address("10.0.0.5:9001".parse().unwrap());
    assert_eq!(near.spec.kind, LinkKind::Stream(StreamOptions { destination, proxy: None, connect: false }));
    let credentials = Some(Credentials { user: "me".into(), password: "se:cret".into() });
    let proxy = Some(Proxy { address: "127.0.0.1:9050".parse().unwrap(), credentials });
    let destination = Destination::Name("h.onion".into(), 9001);
    assert_eq!(far.spec.kind, LinkKind::Stream(StreamOptions { destination, proxy, connect: true }));
    let shown: Vec<_> = desired.links.iter().map(|link| link.spec.to_string()).collect();
    assert_eq!(
        shown[0],
        "vxlan to 10.0.0.2:4789, networks 1, flood 10.0.0.3 10.0.0.4, group 239.1.1.1, trusted"
    );
    assert_eq!(shown[1], "stream to 10.0.0.5:9001, waiting, trusted");
    assert_eq!(
        shown[2], "stream to h.onion:9001, proxy 127.0.0.1:9050, sealed with h2",
        "without the password"
    );
}

#[test]
fn a_host_needs_only_a_name() {
    let desired = good("host.name = \"h\"").desired;
    assert_eq!(desired.control.spec.socket.to_str(), Some("/run/vnet/vnet.sock"));
    assert_eq!(desired.bridge.spec.listen, "[::]:9000".parse().unwrap());
    assert!(desired.interfaces.is_empty() && desired.links.is_empty() && desired.routes.is_empty());
}

/// One paragraph per case: a file, in which `{H}`, `{T}`, `{V}` and `{L}` stand for a valid host, TAP, vhost-user interface and
/// link, then all its error lines, each after `>`.
const MISTAKES: &str = include_str!("config_mistakes.txt");

#[test]
fn mistakes_are_explained_in_one_line_each() {
    let mut cases = 0;
    for case in MISTAKES.split("\n\n") {
        let (told, text): (Vec<_>, Vec<_>) = case.lines().partition(|line| line.starts_with('>'));
        // Most links here need a trusted network; it fits in the two lines of {H}, so line numbers do not change.
        let text = text.join("\n");
        let links = text.contains("{L}") && !text.contains("[bridge]") && !text.contains("sealed");
        let host = "host.name = \"h1\"\nbridge.trusted = [\"0.0.0.0/0\"]";
        let text = text
            .replace("{H}", if links { host } else { "{H}" })
            .replace("{H}", "[host]\nname = \"h1\"")
            .replace("{T}", "[[interface]]\nname = \"a\"\nkind = \"tap\"\ndevice = \"t0\"")
            .replace("{V}", "[[interface]]\nname = \"a\"\nkind = \"vhost-user\"\nsocket = \"/run/a\"")
            .replace("{L}", "[[link]]\nname = \"x\"\nremote = \"10.0.0.2:9000\"");
        let want: Vec<_> = told.iter().map(|line| format!("f.toml:{}", &line[1..])).collect();
        assert!(!want.is_empty(), "a case without a message:\n{case}");
        // The TOML parser's own messages may change with its version and are not compared.
        let ours = |line: &String| line.split_inclusive("not valid TOML").next().unwrap_or(line).to_string();
        let said: Vec<_> = errors(&text).iter().map(ours).collect();
        assert_eq!(said, want, "\n{text}");
        cases += 1;
    }
    assert!(cases > 60, "cases are separated by empty lines");
}

#[test]
fn a_listener_at_the_wires_port_is_warned_of() {
    let told = |more: &str| -> Vec<String> {
        let text = format!(
            "[host]\nname = \"h1\"\n[bridge]\nlisten = \"[::]:9788\"\nports = 2\n[[interface]]\nname = \"c1\"\n\
             kind = \"veth\"\ndevice = \"eth0\"\nnetns = \"box\"\n{more}"
        );
        good(&text).warnings.iter().map(ToString::to_string).collect()
    };
    let want = "f.toml:3: [bridge] listen takes UDP port 9789, by which the kernel forwards frames between hosts: vnetd will \
                forward them all; choose another port";
    assert_eq!(told(""), [want]);
    assert_eq!(told("[dispatch]\nkernel_path = \"off\"\n"), [""; 0]);
}

#[test]
fn a_pair_that_the_kernel_path_would_make_is_warned_of_without_it() {
    let told = |more: &str| -> Vec<String> {
        let text = format!(
            "[host]\nname = \"h1\"\n[[interface]]\nname = \"c1\"\nkind = \"veth\"\ndevice = \"eth0\"\nnetns = \"box\"\n{more}"
        );
        good(&text).warnings.iter().map(ToString::to_string).collect()
    };
    assert_eq!(told("pair = \"netkit\"\n"), [""; 0]);
    let want = "f.toml:8: pair has no effect with kernel_path = \"off\", where a TAP connects the container";
    assert_eq!(told("pair = \"netkit\"\nkernel_path = \"off\"\n"), [want]);
}

#[test]
fn a_file_that_cannot_be_read_is_named() {
    let error = vnet_control::config::load("/nonexistent/vnet.toml".as_ref()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "/nonexistent/vnet.toml: cannot read the configuration: No such file or directory (os error 2); give its path \
         with --config"
    );
}

#[test]
fn the_packaged_example_is_valid() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../packaging/vnet.toml");
    let text = std::fs::read_to_string(path).unwrap();
    good(&text);
    // The commented-out settings are valid as well.
    let text: Vec<_> = text.lines().skip(2).map(|line| line.strip_prefix("# ").unwrap_or(line)).collect();
    let text = text.join("\n").replace("[[network]] ", "[[network]]\nid = 2\n[[network]] ");
    let desired = good(&text).desired;
    assert_eq!((desired.interfaces.len(), desired.links.len(), desired.routes.len()), (4, 7, 1));
}

proptest! {
    /// Any text is accepted, or rejected with lines that begin with the file's name.
    #[test]
    fn any_text_is_accepted_or_rejected_with_file_and_line(lines in proptest::collection::vec(any_line(), 0..12)) {
        let text = lines.join("\n");
        if let Err(error) = parse("f.toml", &text) {
            let error = error.to_string();
            prop_assert!(!error.is_empty());
            for line in error.lines() {
                prop_assert!(line.starts_with("f.toml:"), "{}", line);
            }
        }
    }
}

fn any_line() -> impl Strategy<Value = String> {
    let key = proptest::sample::select(vec![
        "name",
        "kind",
        "socket",
        "mac",
        "mtu",
        "remote",
        "networks",
        "id",
        "dst",
        "to",
        "from",
        "\"x\\u001by\"",
    ]);
    let value = prop_oneof![
        "\"\\PC{0,20}\"",
        Just("\"tap\"".to_string()),
        Just("\"link h2\"".to_string()),
        "-?[0-9]{1,20}",
        Just("[1, 2]".to_string()),
        Just("true".to_string()),
        Just("{ a = 1 }".to_string()),
        "\\PC{0,10}",
    ];
    let header = proptest::sample::select(vec![
        "[host]",
        "[bridge]",
        "[[interface]]",
        "[[link]]",
        "[[route]]",
        "[[network]]",
        "[control]",
        "[dispatch]",
    ]);
    prop_oneof![
        header.prop_map(String::from),
        (key, value).prop_map(|(key, value)| format!("{key} = {value}"))
    ]
}

#[test]
fn port_ranges_are_checked() {
    let top = "[host]\nname = \"h1\"\n";
    let link = |name: &str, remote: &str, more: &str| {
        format!("[[link]]\nname = \"{name}\"\nremote = \"{remote}\"\ntrusted = true\n{more}")
    };
    let bridge = |dispatch: &str, bridge: &str| format!("{top}[dispatch]\n{dispatch}\n[bridge]\n{bridge}\n");

    let read =
        good(&(bridge("threads = 2", "ports = 4") + &link("h2", "10.0.0.2:9000", "ports = 3"))).desired;
    assert_eq!((read.bridge.spec.ports, read.links[0].spec.ports), (4, 3));
    assert_eq!(read.links[0].spec.to_string(), "native to 10.0.0.2:9000, 3 ports, trusted");
    let read = good(&(top.to_string() + &link("h2", "10.0.0.2:9000", ""))).desired;
    assert_eq!((read.bridge.spec.ports, read.links[0].spec.ports), (1, 1));

    let neighbours = link("h2", "10.0.0.2:9000", "ports = 2\n");
    let cases = [
        (
            bridge("threads = 4", "ports = 2"),
            "f.toml:5: ports = 2 for 4 dispatchers leaves some without a port; write ports = 4, or 1 for all of them",
        ),
        (bridge("", "ports = 65"), "f.toml:6: ports 65 is beyond the limits; use 1 to 64"),
        (
            bridge("", "listen = \"[::]:65535\"\nports = 2"),
            "f.toml:7: 2 ports from 65535 on end beyond 65535; begin with a lower one",
        ),
        (
            bridge("", "listen = \"10.0.0.1:9000\"\nports = 3") + &link("h2", "10.0.0.1:9002", ""),
            "f.toml:8: link h2 leads to this host itself (10.0.0.1:9002); name the other host's address",
        ),
        (
            bridge("", "listen = \"10.0.0.1:9003\"") + &link("h2", "10.0.0.1:9002", "ports = 2"),
            "f.toml:7: link h2 leads to this host itself (10.0.0.1:9002); name the other host's address",
        ),
        (
            top.to_string() + &link("h2", "10.0.0.2:9000", "ports = 2\nencapsulation = \"vnet\""),
            "f.toml:7: 'ports' applies to encapsulation native only; remove it",
        ),
        (
            top.to_string() + &neighbours + &link("h3", "10.0.0.2:9001", ""),
            "f.toml:8: remote 10.0.0.2:9001 is already used by link h2 (f.toml:3); choose another",
        ),
        (
            top.to_string() + &neighbours + &link("h3", "10.0.0.2:8999", "ports = 9"),
            "f.toml:8: remote 10.0.0.2:9000 is already used by link h2 (f.toml:3); choose another",
        ),
    ];
    for (text, want) in cases {
        assert_eq!(errors(&text), [want], "{text}");
    }
    good(&(top.to_string() + &neighbours + &link("h3", "10.0.0.2:9002", "ports = 64")));
}

/// Only sealed native links may omit the remote: their peer proves its address.
#[test]
fn only_sealed_native_links_may_omit_the_remote() {
    let top = "[host]\nname = \"h1\"\n[identity]\nca = \"/a\"\ncertificate = \"/b\"\nkey = \"/c\"\n";
    let link = |more: &str| format!("{top}[[link]]\nname = \"h2\"\n{more}\n");
    let read = good(&(link("sealed = true\n[[link]]\nname = \"h3\"\nsealed = true\nports = 4"))).desired;
    assert_eq!(read.links[0].spec.remote, vnet::link::ANYWHERE);
    assert_eq!(read.links[1].spec.to_string(), "native to anywhere, 4 ports, sealed with h3");
    for more in ["trusted = true", "", "sealed = true\nencapsulation = \"stream\""] {
        let found = errors(&link(more));
        assert!(found[0].contains("has no 'remote'"), "{found:?}");
    }
    let found = errors(&link("sealed = true\nremote = \"[::]:0\""));
    assert_eq!(found.len(), 1, "{found:?}");
    // Relaying applies to any network, not only the default one.
    let read = good("[host]\nname = \"h1\"\n[[network]]\nid = 7\nrelay = true\n").desired;
    assert_eq!(read.networks[0].spec.to_string(), "learning, ageing 300 s, relayed");
}

/// A host with the given links, each with additional lines.
fn with_links(links: &[(&str, &str, &str)]) -> String {
    let link = |(name, remote, more): &(&str, &str, &str)| {
        format!("[[link]]\nname = \"{name}\"\nremote = \"{remote}\"\ntrusted = true\n{more}\n")
    };
    format!("[host]\nname = \"h1\"\n{}", links.iter().map(link).collect::<String>())
}

#[test]
fn two_links_to_one_address_are_told_apart() {
    const VNET: &str = "encapsulation = \"vnet\"";
    const BY_PORT: &str = "encapsulation = \"vnet\"\nsource = \"address-port\"";
    for (first, second) in [(VNET, VNET), (VNET, ""), ("", VNET), (BY_PORT, VNET), (VNET, BY_PORT)] {
        let text = with_links(&[("a", "10.0.0.2:9000", first), ("b", "10.0.0.2:9001", second)]);
        let errors = errors(&text);
        assert_eq!(errors.len(), 1, "{first}, {second}: {errors:?}");
        let start = format!(
            "f.toml:{}: links b and a (f.toml:3) both lead to 10.0.0.2, and link ",
            7 + first.lines().count().max(1)
        );
        assert!(
            errors[0].starts_with(&start) && errors[0].contains("source = \"address-port\""),
            "{start}: {errors:?}"
        );
    }
    good(&with_links(&[
        ("a", "10.0.0.2:9000", BY_PORT),
        ("b", "10.0.0.2:9001", BY_PORT),
        ("c", "10.0.0.2:9002", ""),
    ]));
    good(&with_links(&[("a", "10.0.0.2:9000", VNET), ("b", "10.0.0.3:9000", VNET)]));
    // The same remote is one mistake, not two.
    assert_eq!(errors(&with_links(&[("a", "10.0.0.2:9000", VNET), ("b", "10.0.0.2:9000", VNET)])).len(), 1);
    // Only vnet links have this key.
    let text = with_links(&[("a", "10.0.0.2:9000", "source = \"address\"")]);
    assert!(errors(&text)[0].contains("source"), "{:?}", errors(&text));
}

#[test]
fn a_route_to_a_link_of_the_overlay_is_answered() {
    let route = "[host]\nname = \"h1\"\n[[route]]\ndst = \"any\"\nto = \"link h2\"\n";
    let overlay = "[overlay]\netcd = [\"http://[::1]:2379\"]\ntrusted = true\n";
    let told = |text: &str| errors(text).join("\n");
    assert!(
        told(route).contains("the route names link 'h2', which does not exist; there is none"),
        "{}",
        told(route)
    );
    let answer = told(&(route.to_owned() + overlay));
    assert!(
        answer.contains("links of the overlay come and go with their hosts, so no route may name one"),
        "{answer}"
    );
}

#[test]
fn mistakes_of_a_link_are_named() {
    for (link, words) in [
        (("h1", "10.0.0.2:9000", ""), "link h1 has the name of this host itself"),
        (("H1", "10.0.0.2:9000", ""), "link H1 has the name of this host itself"),
        (("h2", "node2.example:9000", ""), "names are not supported; write an address such as 10.0.0.2:9000"),
        (("h2", "node2.example:9000", "encapsulation = \"vnet\""), "names are not supported"),
    ] {
        let errors = errors(&with_links(&[link]));
        assert!(errors.len() == 1 && errors[0].contains(words), "{link:?}: {errors:?}");
    }
    // A mistyped address is not taken for a name.
    assert!(
        errors(&with_links(&[("h2", "10.0.0.2.3:9000", "")]))[0].contains("is not an address with a port")
    );
}
