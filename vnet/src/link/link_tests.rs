use super::*;
use crate::link::{Encapsulation, PATH_MTU_MIN, Peers, SourceMatch, UDP_PAYLOAD_MAX};

fn link(remote: &str, encapsulation: Encapsulation, mtu: Option<u16>) -> Arc<Link> {
    let remote = remote.parse().unwrap();
    let kind = match encapsulation {
        Encapsulation::Vnet => LinkKind::Classic(SourceMatch::AddressPort),
        _ => LinkKind::default(),
    };
    let options = LinkOptions { name: "h2".into(), remote, ports: 1, networks: None, mtu, kind };
    Link::new(options, PortId(3), Arc::default())
}

#[test]
fn a_peer_has_its_own_ports_only() {
    let several = |remote: &str, ports| {
        let options = LinkOptions { ports, ..link(remote, Encapsulation::Native, None).options.clone() };
        Link::new(options, PortId(3), Arc::default())
    };
    let links = [several("10.0.0.2:9000", 3), several("10.0.0.2:9003", 1), several("[fd00::5]:65534", 9)];
    let peers = Peers::build(&links);
    let find = |text: &str| peers.link(text.parse().unwrap()).map(|found| found.options.remote.port());
    for port in 9000..9003 {
        assert_eq!(find(&format!("[::ffff:10.0.0.2]:{port}")), Some(9000));
    }
    assert_eq!(
        (find("10.0.0.2:9003"), find("10.0.0.2:9004"), find("10.0.0.2:8999")),
        (Some(9003), None, None)
    );
    assert_eq!(
        (find("[fd00::5]:65535"), find("[fd00::5]:1"), links[2].native().unwrap().place.ports()),
        (Some(65_534), None, 2)
    );
}

#[test]
fn peers_are_found_by_address_and_port() {
    use Encapsulation::{Native, Vnet};
    let links = [
        link("10.0.0.2:9000", Native, None),
        link("[::ffff:10.0.0.3]:9000", Native, None),
        link("10.0.0.3:9001", Native, None),
        link("10.0.0.4:9000", Vnet, None),
        link("[fd00::5]:9000", Native, None),
    ];
    let peers = Peers::build(&links);
    let find = |text: &str| {
        peers
            .link(text.parse().unwrap())
            .map(|found| links.iter().position(|l| Arc::ptr_eq(l, found)).unwrap())
    };
    assert_eq!(find("10.0.0.2:9000"), Some(0));
    assert_eq!(find("10.0.0.2:4711"), None, "anybody on the peer's host");
    assert_eq!(find("10.0.0.3:9000"), Some(1));
    assert_eq!(find("[::ffff:10.0.0.3]:9001"), Some(2));
    assert_eq!(find("10.0.0.4:9000"), Some(3));
    assert_eq!(find("10.0.0.4:4711"), None);
    assert_eq!(find("[fd00::5]:9000"), Some(4));
    assert_eq!(find("[fd00::5]:1"), None);
    assert_eq!(find("10.0.0.9:9000"), None);
}

#[test]
fn fragments_fit_the_path() {
    let payload = |link: &Link| link.native().unwrap().payload_of(link.path_mtu());
    let v4 = link("10.0.0.2:9000", Encapsulation::Native, Some(1500));
    v4.path.set_route_mtu(9000);
    assert_eq!((v4.path_mtu(), payload(&v4)), (1500, 1500 - 20 - 8 - 16));
    let v6 = link("[fd00::2]:9000", Encapsulation::Native, None);
    v6.path.set_route_mtu(1500);
    assert_eq!(payload(&v6), 1500 - 40 - 8 - 16);
    let loopback = link("127.0.0.1:9000", Encapsulation::Native, None);
    loopback.path.set_route_mtu(65536);
    assert_eq!(payload(&loopback), UDP_PAYLOAD_MAX - 16);
    loopback.path.set_route_mtu(68);
    assert_eq!(loopback.path_mtu(), PATH_MTU_MIN);
}

#[test]
fn encapsulations_have_names() {
    use Encapsulation::{Native, Stream, Vnet, Vxlan};
    use strum::VariantNames;
    for encapsulation in [Native, Vnet, Vxlan, Stream] {
        assert_eq!(encapsulation.to_string().parse(), Ok(encapsulation));
    }
    assert_eq!(Encapsulation::VARIANTS, ["native", "vnet", "vxlan", "stream"]);
    assert!("gre".parse::<Encapsulation>().is_err());
}

#[test]
fn numbers_rise_over_restarts() {
    let first = link("10.0.0.2:9000", Encapsulation::Native, None);
    let used = first.take_numbers(100) + 100;
    std::thread::sleep(Duration::from_millis(1));
    assert!(link("10.0.0.2:9000", Encapsulation::Native, None).take_numbers(1) > used);
}

/// VNET/P sends from a port that its kernel chose, and receives at 9000.
#[test]
fn a_vnet_link_takes_any_port_of_its_remote_and_others_keep_theirs() {
    let classic = |remote: &str, source| {
        let kind = LinkKind::Classic(source);
        Link::new(
            LinkOptions { kind, ..link(remote, Encapsulation::Vnet, None).options.clone() },
            PortId(3),
            Arc::default(),
        )
    };
    let links = [
        classic("10.0.0.2:9000", SourceMatch::Address),
        classic("10.0.0.3:9000", SourceMatch::AddressPort),
        link("10.0.0.2:9007", Encapsulation::Native, None),
    ];
    let peers = Peers::build(&links);
    let find = |text: &str| {
        let source = text.parse().unwrap();
        peers.link(source).or_else(|| peers.host(source)).map(|found| found.options.remote.to_string())
    };
    for port in [9000, 40_000, 1] {
        assert_eq!(find(&format!("[::ffff:10.0.0.2]:{port}")), Some("10.0.0.2:9000".into()));
    }
    assert_eq!(find("10.0.0.2:9007"), Some("10.0.0.2:9007".into()), "a port that is another link's");
    assert_eq!((find("10.0.0.3:9000"), find("10.0.0.3:40000")), (Some("10.0.0.3:9000".into()), None));
    assert_eq!(find("10.0.0.4:9000"), None);
}

#[test]
fn the_kernel_reaches_links_in_clear_text_to_one_ipv4_host() {
    use crate::link::VxlanOptions;
    let vxlan = |remote: &str, options: VxlanOptions| {
        let kind = LinkKind::Vxlan(options);
        Link::new(
            LinkOptions { kind, ..link(remote, Encapsulation::Native, None).options.clone() },
            PortId(3),
            Arc::default(),
        )
    };
    let one = || VxlanOptions::default();
    let native = |remote| link(remote, Encapsulation::Native, None).tunnel();
    assert_eq!(native("[::ffff:10.0.0.2]:9000"), Ok(Tunnel::Wire(Ipv4Addr::new(10, 0, 0, 2))));
    assert_eq!(native("[fd00::2]:9000"), Err("its remote is an IPv6 address"));
    assert_eq!(native("127.0.0.1:9000"), Err("its remote is this host"));
    let classic = link("10.0.0.2:9000", Encapsulation::Vnet, None);
    assert_eq!(classic.tunnel(), Err("it is neither native nor vxlan"));
    assert_eq!((classic.wire_remote(), classic.vtep_sources()), (None, None));

    let vtep = vxlan("10.0.0.2:4790", one());
    assert_eq!(vtep.tunnel(), Ok(Tunnel::Vtep("10.0.0.2:4790".parse().unwrap())));
    assert_eq!((vtep.wire_remote(), vtep.vtep_sources()), (None, None), "no source ports yet");
    vtep.open_drivers(Ipv4Addr::LOCALHOST.into(), &[]);
    let (first, count) = vtep.vtep_sources().unwrap();
    assert!(first > 0 && count.is_power_of_two());
    let why = |remote: &str, options: VxlanOptions| vxlan(remote, options).tunnel().unwrap_err();
    assert_eq!(why("[fd00::2]:4789", one()), "its remote is an IPv6 address");
    let flood = vec!["10.0.0.3".parse().unwrap()];
    assert_eq!(why("10.0.0.2:4789", VxlanOptions { flood, ..one() }), "it has several VTEPs");
    let group = Some(Ipv4Addr::new(239, 1, 1, 1));
    assert_eq!(why("10.0.0.2:4789", VxlanOptions { group, ..one() }), "it has a multicast group");
    assert_eq!(why("10.0.0.2:4789", VxlanOptions { offload: false, ..one() }), "its offload is off");
}
