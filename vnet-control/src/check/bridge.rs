//! Checks the bridge's settings: enough ports for all dispatchers, a single port with an `[overlay]`, and no port taken twice.

use std::net::SocketAddr;
use std::ops::Range;

use vnet::wire::translation::TRANSLATED_PORT;
use vnet::wire::vxlan::WIRE_PORT;

use crate::desired::{Attachment, Desired, KernelPath};
use crate::table::{Place, Problem};

/// Checks the bridge's ports.
pub(super) fn check(desired: &Desired, problems: &mut Vec<Problem>) {
    let (ports, threads) = (desired.bridge.spec.ports, desired.dispatch.spec.threads);
    if ports > 1 && usize::from(ports) < threads {
        let text = format!(
            "ports = {ports} for {threads} dispatchers leaves some without a port; write ports = {threads}, or 1 for all of them"
        );
        problems.push(Problem::new(&desired.bridge.place, text));
    }
    if ports > 1 && desired.overlay.is_some() {
        let text =
            "hosts of an [overlay] reach each other at one port; remove ports, or list the links instead";
        problems.push(Problem::new(&desired.bridge.place, text));
    }
    let listeners = listeners(desired);
    for (index, listener) in listeners.iter().enumerate() {
        let Some((other, port)) =
            listeners[..index].iter().find_map(|other| Some((other, listener.shares_with(other)?)))
        else {
            continue;
        };
        let Listener { key, protocol, place, .. } = listener;
        let text = format!("{key} takes port {port} ({protocol}), as {} does; choose another", other.key);
        problems.push(Problem::new(place, text));
    }
}

/// Warns of a listener at the port by which the kernel's own path reaches other hosts.
pub(super) fn warn(desired: &Desired, warnings: &mut Vec<Problem>) {
    let has_path = desired.dispatch.spec.kernel_path == KernelPath::Auto
        && desired.interfaces.iter().any(|item| matches!(item.spec.attachment, Attachment::Veth { .. }));
    if !has_path {
        return;
    }
    let wire = u32::from(WIRE_PORT);
    let translated = u32::from(TRANSLATED_PORT);
    let listeners = listeners(desired);
    if desired.dispatch.spec.translate == KernelPath::Auto {
        for Listener { key, protocol, place, .. } in
            listeners.iter().filter(|listener| listener.ports.contains(&translated))
        {
            let text = format!(
                "{key} takes {protocol} port {translated}, at which the kernel takes packets of other hosts without a tunnel: choose \
                 another port, or write translate = \"off\" in [dispatch]"
            );
            warnings.push(Problem::new(place, text));
        }
    }
    for Listener { key, place, .. } in
        listeners.iter().filter(|listener| listener.protocol == "UDP" && listener.ports.contains(&wire))
    {
        let text = format!(
            "{key} takes UDP port {wire}, by which the kernel forwards frames between hosts: vnetd will forward them all; choose \
             another port"
        );
        warnings.push(Problem::new(place, text));
    }
}

/// Ports at which vnetd listens.
struct Listener<'a> {
    key: &'static str,
    protocol: &'static str,
    address: SocketAddr,
    ports: Range<u32>,
    place: &'a Place,
}

impl Listener<'_> {
    /// The first port that both take.
    fn shares_with(&self, other: &Listener<'_>) -> Option<u32> {
        let [a, b] = [self, other].map(|listener| listener.address.ip().to_canonical());
        // A wildcard address of IPv6 includes those of IPv4.
        let meet = a == b || a.is_unspecified() || b.is_unspecified();
        let first = self.ports.start.max(other.ports.start);
        let shared = first < self.ports.end.min(other.ports.end);
        (meet && shared && self.protocol == other.protocol).then_some(first)
    }
}

/// Everything that vnetd listens on, except for ports that the kernel chooses.
fn listeners(desired: &Desired) -> Vec<Listener<'_>> {
    let (bridge, control) = (&desired.bridge.spec, &desired.control.spec.access);
    let [at_bridge, at_control] = [&desired.bridge.place, &desired.control.place];
    let of = |key, protocol, address: Option<SocketAddr>, count: u16, place| {
        let address = address.filter(|address| address.port() != 0 && count > 0)?;
        let first = u32::from(address.port());
        Some(Listener { key, protocol, address, ports: first..first + u32::from(count), place })
    };
    let handshakes = desired.identity.is_some().then_some(bridge.listen);
    let listeners = [
        of("[bridge] listen", "UDP", Some(bridge.listen), bridge.ports, at_bridge),
        of("[bridge] meetings", "UDP", Some(bridge.meet_at(bridge.listen)), bridge.meetings, at_bridge),
        of("[bridge] vxlan_listen", "UDP", bridge.vxlan_listen, 1, at_bridge),
        of("[bridge] listen", "TCP", handshakes, 1, at_bridge),
        of("[bridge] stream_listen", "TCP", bridge.stream_listen, 1, at_bridge),
        of("[control] http", "TCP", control.http, 1, at_control),
        of("[control] console", "TCP", control.console, 1, at_control),
    ];
    listeners.into_iter().flatten().collect()
}
