//! Properties of plans: applying the plan between any two states turns the first into the second.

use proptest::prelude::*;
use proptest::sample::subsequence;

use super::*;
use crate::Place;
use crate::config::{parse, validate};
use crate::desired::LinkSecurity;
use crate::settings::restart_needed;
use std::net::SocketAddr;
use vnet::link::LinkKind;
use vnet::route::Qualifier;
use vnet::wire::ethernet::Mac;

fn item<T>(spec: T) -> Item<T> {
    Item { place: Place::default(), spec }
}

fn network() -> impl Strategy<Value = NetworkId> {
    (0u32..4).prop_map(|id| NetworkId::new(id).unwrap())
}

fn interface(n: usize) -> impl Strategy<Value = Item<InterfaceSpec>> {
    (network(), 1u32..3, 1u32..3, any::<bool>()).prop_map(move |(network, queues, storm_limit, tap)| {
        let attachment = if tap {
            Attachment::Tap { device: format!("t{n}"), netns: None }
        } else {
            Attachment::VhostUser {
                socket: format!("/run/{n}").into(),
                server: true,
                front_end: FrontEndSpec::default(),
                direct: None,
            }
        };
        let (name, mac, addresses, mtu) = (format!("i{n}"), None, vec![], 1500);
        let (port_security, direct) = (false, false);
        item(InterfaceSpec {
            name,
            attachment,
            network,
            mac,
            addresses,
            mtu,
            queues,
            storm_limit,
            port_security,
            direct,
            address_security: false,
            kernel_path: Default::default(),
            pair: Default::default(),
            driving: Default::default(),
        })
    })
}

fn link(n: usize) -> impl Strategy<Value = Item<LinkSpec>> {
    (1u8..4, proptest::option::of(576u16..578)).prop_map(move |(host, mtu)| {
        let remote = SocketAddr::from(([10, 0, n as u8, host], 9000));
        let (name, ports, networks, kind) = (format!("l{n}"), 1, None, LinkKind::default());
        let security = LinkSecurity { trusted: true, ..LinkSecurity::default() };
        item(LinkSpec { name, remote, ports, networks, mtu, kind, security })
    })
}

fn route(n: usize) -> impl Strategy<Value = Item<RouteSpec>> {
    (network(), 0u8..2).prop_map(move |(network, last)| {
        let (src, dst) = (Qualifier::Any, Qualifier::Is(Mac([2, 0, 0, 0, n as u8, last])));
        let to = Target::Link(format!("l{n}"));
        item(RouteSpec { network, src, dst, from: RouteSource::Any, to })
    })
}

fn desired() -> impl Strategy<Value = Desired> {
    let numbers = || subsequence((0..5usize).collect::<Vec<_>>(), 0..=5);
    let networks = (numbers(), any::<bool>()).prop_map(|(ids, learning)| {
        let spec = |id| NetworkSpec { learning, ..NetworkSpec::new(NetworkId::new(id as u32).unwrap()) };
        ids.into_iter().map(|id| item(spec(id))).collect::<Vec<_>>()
    });
    let interfaces =
        numbers().prop_flat_map(|n| n.into_iter().map(interface).collect::<Vec<_>>()).prop_shuffle();
    let links = numbers().prop_flat_map(|n| n.into_iter().map(link).collect::<Vec<_>>()).prop_shuffle();
    let routes = numbers().prop_flat_map(|n| n.into_iter().map(route).collect::<Vec<_>>()).prop_shuffle();
    ("h[12]", networks, interfaces, links, routes).prop_map(|(name, networks, interfaces, links, routes)| {
        Desired {
            host: item(HostSpec { name }),
            control: item(ControlSpec::default()),
            dispatch: item(DispatchSpec::default()),
            bridge: item(BridgeSpec::default()),
            overlay: None,
            identity: None,
            networks,
            interfaces,
            links,
            routes,
        }
    })
}

/// Reference model: applies a plan to plain lists.
fn applied(plan: &Plan, mut to: Desired) -> Desired {
    fn each<T: Clone + PartialEq>(diff: &Diff<T>, items: &mut Vec<Item<T>>) {
        for item in diff.removed.iter().chain(diff.changed.iter().map(|(is, _)| is)) {
            let at = items
                .iter()
                .position(|there| there == item)
                .expect("only existing items are removed or changed");
            items.remove(at);
        }
        items.extend(diff.added.iter().chain(diff.changed.iter().map(|(_, wanted)| wanted)).cloned());
    }
    if let Some((is, wanted)) = &plan.host {
        assert_eq!(*is, to.host.spec);
        to.host.spec = wanted.clone();
    }
    to.networks = networks(&to);
    each(&plan.networks, &mut to.networks);
    each(&plan.interfaces, &mut to.interfaces);
    each(&plan.links, &mut to.links);
    each(&plan.routes, &mut to.routes);
    to
}

/// The state in canonical order.
fn sorted(mut desired: Desired) -> Desired {
    desired.networks = networks(&desired);
    desired.networks.sort_by_key(|item| item.spec.id);
    desired.interfaces.sort_by_key(|item| item.spec.name.clone());
    desired.links.sort_by_key(|item| item.spec.name.clone());
    desired.routes.sort_by_key(|item| item.spec.to_string());
    desired
}

proptest! {
    #[test]
    fn applying_a_plan_gives_the_desired_state(is in desired(), wanted in desired()) {
        let plan = Plan::between(&is, &wanted);
        prop_assert_eq!(sorted(applied(&plan, is)), sorted(wanted));
    }

    #[test]
    fn the_plan_between_equal_states_is_empty(is in desired()) {
        let plan = Plan::between(&is, &is);
        prop_assert!(plan.is_empty());
        prop_assert!(plan.changes().is_empty());
        prop_assert_eq!(Plan::between(&is, &sorted(is.clone())).changes(), vec![]);
    }

    #[test]
    fn changes_list_every_step_once(is in desired(), wanted in desired()) {
        let plan = Plan::between(&is, &wanted);
        prop_assert_eq!(plan.is_empty(), plan.changes().is_empty());
        let sizes = |d: [usize; 3]| d.iter().sum::<usize>();
        let steps = sizes([plan.interfaces.removed.len(), plan.interfaces.added.len(), plan.interfaces.changed.len()])
            + sizes([plan.links.removed.len(), plan.links.added.len(), plan.links.changed.len()])
            + sizes([plan.networks.removed.len(), plan.networks.added.len(), plan.networks.changed.len()])
            + plan.routes.removed.len() + plan.routes.added.len() + usize::from(plan.host.is_some());
        prop_assert_eq!(plan.changes().len(), steps);
        prop_assert!(plan.routes.changed.is_empty());
    }
}

#[test]
fn a_plan_is_shown_one_step_per_line() {
    let text = |more: &str| format!("[host]\nname = \"h1\"\n[[link]]\nname = \"h2\"\ntrusted = true\n{more}");
    let is =
        parse("f", &text("remote = \"10.0.0.2:9000\"\n[[route]]\ndst = \"any\"\nto = \"link h2\"")).unwrap();
    let more = "remote = \"10.0.0.3:9000\"\n[[interface]]\nname = \"c1\"\nkind = \"tap\"\ndevice = \"t0\"";
    let wanted = parse("f", &text(more)).unwrap();
    let plan = Plan::between(&is.desired, &wanted.desired);
    assert_eq!(
        plan.to_string(),
        "- route: src any, dst any, from any, to link h2\n\
         ~ link h2: native to 10.0.0.2:9000, trusted -> native to 10.0.0.3:9000, trusted\n\
         + interface c1: tap t0, mtu 1500"
    );
    let json = serde_json::to_string(&plan.changes()[2]).unwrap();
    assert_eq!(json, r#"{"action":"add","object":"interface","name":"c1","detail":"tap t0, mtu 1500"}"#);
}

#[test]
fn the_default_network_exists_without_being_declared() {
    let without = parse("f", "[host]\nname = \"h1\"").unwrap().desired;
    let with = parse("f", "[host]\nname = \"h1\"\n[[network]]\nid = 1").unwrap().desired;
    assert!(Plan::between(&without, &with).is_empty());
    let silent = parse("f", "[host]\nname = \"h1\"\n[[network]]\nid = 1\nlearning = false").unwrap().desired;
    let change = "~ network 1: learning, ageing 300 s -> no learning, ageing 300 s";
    assert_eq!(Plan::between(&without, &silent).to_string(), change);
}

#[test]
fn fixed_settings_need_a_restart() {
    let parse = |text: &str| parse("f", &format!("[host]\nname = \"h1\"\n{text}")).unwrap().desired;
    let is = parse("");
    assert!(restart_needed(&is, &parse("[bridge]\nlisten = \"[::]:9000\"")).is_empty());
    for (text, want) in [
        (
            "[bridge]\nlisten = \"[::]:9001\"",
            "f:3: [bridge] listen changes from [::]:9000 to [::]:9001, which",
        ),
        ("[control]\nsocket = \"/x\"", "f:3: [control] socket changes from /run/vnet/vnet.sock to /x, which"),
        ("[bridge]\nrekey_s = 60", "f:3: [bridge] rekey_s changes from 3600 to 60, which"),
        ("[bridge]\nmeetings = 2", "f:3: [bridge] meetings changes from 0 to 2, which"),
        (
            "[identity]\nca = \"/a\"\ncertificate = \"/b\"\nkey = \"/c\"",
            "f:3: [identity] names other files (to renew a certificate, replace those that are there), which",
        ),
        ("[dispatch]\nthreads = 2", "f:3: [dispatch] threads changes from 1 to 2, which"),
        ("[dispatch]\nthreads = 2\nthreads_min = 1", "f:3: [dispatch] threads changes from 1 to 2, which"),
    ] {
        let wanted = parse(text);
        validate(&wanted).unwrap();
        let told = restart_needed(&is, &wanted);
        assert_eq!(told.len(), 1);
        let want = format!("{want} takes a restart of vnetd; nothing was changed");
        assert_eq!(told[0].to_string(), want);
    }
}

#[test]
fn the_fewest_threads_change_without_a_restart() {
    let state = |more: &str| {
        let text = format!("[host]\nname = \"h1\"\n[dispatch]\nthreads = 4\n{more}");
        parse("f", &text).unwrap().desired
    };
    let (is, wanted) = (state("threads_min = 1"), state("load_high = 90"));
    assert_eq!(restart_needed(&is, &wanted), vec![]);
    let plan = Plan::between(&is, &wanted);
    assert_eq!(plan.to_string(), "~ dispatch threads_min: 1 -> as threads\n~ dispatch load_high: 75 -> 90");
    assert!(!plan.is_empty());
}
