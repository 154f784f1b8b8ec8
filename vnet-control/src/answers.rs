//! Read-only views of the engine for the API's answers.

use std::collections::HashMap;
use std::sync::Arc;

use super::api;
use super::desired::*;
use super::engine::Engine;
use super::notes::Mistakes;
use super::open_close::LiveInterface;
use super::settings::values::{InterfaceSettings, LinkSettings};
use super::{plan, settings};
use vnet::dispatch::core::Pulse;
use vnet::dispatch::dispatcher_stats::DispatcherStats;
use vnet::interface::State;
use vnet::kernel::{Carried, Known};
use vnet::link::sealed::identity::unix_now;
use vnet::link::{DirectPort, Link, LinkState};
use vnet::route::{self, Held, LearnedEntry, LearnedStats};
use vnet::stats::DiscardReason;

/// Maximum number of flows in one answer: 250 KB.
const FLOWS_SHOWN: usize = 1000;

impl Engine {
    /// The host at a glance.
    pub fn status(&self) -> api::Status {
        let (interfaces, links) = (self.interfaces(), self.links());
        api::Status {
            version: env!("CARGO_PKG_VERSION").into(),
            host: self.current.host.spec.name.clone(),
            pid: std::process::id(),
            uptime_s: self.started.elapsed().as_secs(),
            bridge: self.core.bridge_address().to_string(),
            ports: self.current.bridge.spec.ports,
            dispatchers: self.current.dispatch.spec.threads,
            threads: self.threads(),
            yield_strategy: self.current.dispatch.spec.yield_strategy.to_string(),
            interfaces_up: interfaces.iter().filter(|interface| interface.state == "up").count(),
            interfaces: interfaces.len(),
            links: self.current.links.len(),
            routes: self.current.routes.len(),
            networks: plan::networks(&self.current).len(),
            learned: self.known().iter().filter(|entry| entry.held != Held::Pinned).count(),
            overlay: self.shown.as_ref().map(|overlay| api::OverlaySummary {
                state: overlay.state.clone(),
                since_s: overlay.since_s,
                hosts: overlay.hosts.len(),
                stations: overlay.stations,
                alarms: overlay.alarms_total,
            }),
            kernel: self.kernel_summary(&interfaces, &links),
            certificate_s: self.identity().map(|store| seconds_until(store.current().info().valid.1)),
            duplicate_addresses: self.duplicate_addresses(),
            unknown_sender: self.unknown_sender(),
            balance: self.stats().balance,
        }
    }

    fn duplicate_addresses(&self) -> Vec<api::DuplicateAddress> {
        let (targets, now_ms) = (self.targets(), self.core.now_ms());
        let shown = |conflict: route::Conflict| {
            let name = |port| targets.get(&port).map(ToString::to_string);
            let route::Conflict { network, mac, at, also, seen_ms } = conflict;
            let age_s = now_ms.saturating_sub(seen_ms) / 1000;
            Some(api::DuplicateAddress { network, mac, at: name(at)?, also: name(also)?, age_s })
        };
        self.core.learned().conflicts(now_ms).into_iter().filter_map(shown).collect()
    }

    fn unknown_sender(&self) -> Option<api::UnknownSender> {
        let bridge = self.core.bridge_stats();
        let (address, age_s) =
            bridge.last_stranger.lately().filter(|(address, _)| !self.core.knows(*address))?;
        let datagrams = bridge.discards(DiscardReason::UnknownSource);
        Some(api::UnknownSender { address: address.to_string(), datagrams, age_s })
    }

    /// A configuration file that describes the configured state.
    pub fn saved(&self) -> String {
        settings::save(&self.own)
    }

    /// The overlay agent's latest report.
    pub fn overlay(&self) -> Option<api::Overlay> {
        self.shown.clone()
    }

    /// All interfaces.
    pub fn interfaces(&self) -> Vec<api::Interface> {
        let (mistakes, link_reason) = (Mistakes::of(self), link_reason(&self.links()));
        let interface =
            |item: &Item<InterfaceSpec>| self.interface(&item.spec, &mistakes, link_reason.as_ref());
        self.current.interfaces.iter().filter_map(interface).collect()
    }

    fn interface(
        &self,
        spec: &InterfaceSpec,
        mistakes: &Mistakes,
        link_reason: Option<&String>,
    ) -> Option<api::Interface> {
        let live = self.interfaces.get(&spec.name)?;
        let (state, reason) = match live.state() {
            State::Up => ("up", None),
            State::Down(reason) => ("down", Some(reason)),
            State::Broken(reason) => ("broken", Some(reason)),
        };
        let path = match (&live.kernel, inspected(spec)) {
            (Err(why), _) => Err(why.clone()),
            (Ok(_), Some(why)) => Err(why.into()),
            (Ok(_), None) => Ok(()),
        };
        let (direct_ports, direct_reason) = self.direct.lock().shown(&spec.name, self.core.now_ms());
        let mut settings = InterfaceSettings::from(spec);
        // The owner of a device may change its MTU: show the current value.
        settings.set("mtu", Some(live.mtu()));
        if let Some(pair) = live.interface.kernel_device().and_then(|device| device.pair) {
            settings.set("pair", Some(<&str>::from(pair)));
        }
        Some(api::Interface {
            name: spec.name.clone(),
            state: state.into(),
            reason,
            notes: mistakes.notes(spec, live),
            path: if path.is_ok() { "kernel" } else { "vnetd" }.into(),
            path_reason: path.map_or_else(Some, |()| link_reason.cloned()),
            direct_ports,
            direct_reason,
            driving: driving(live, spec.queues as usize),
            settings,
        })
    }

    /// All links.
    pub fn links(&self) -> Vec<api::Link> {
        let now_ms = self.core.now_ms();
        let link = |Item { spec, .. }: &Item<LinkSpec>| {
            let link = &self.links.get(&spec.name)?.link;
            let (state, reason) = match link.state() {
                LinkState::Up => ("up", None),
                LinkState::Degraded(reason) => ("degraded", Some(reason)),
                LinkState::Down(reason) | LinkState::Unreachable(reason) => ("down", Some(reason)),
            };
            let heard_s = link.heard_ms().map(|heard_ms| now_ms.saturating_sub(heard_ms) / 1000);
            let (seal, probed) = (link.seal_view(), link.probed());
            let peer = seal.as_ref().map(|seal| seal.peer.clone()).or(link.stream_peer().map(Into::into));
            let mut settings = LinkSettings::from(spec);
            if let Some(remote) = link.remote().filter(|_| seal.is_some()) {
                settings.set("remote", Some(remote.to_string()));
            }
            settings.set("mtu", Some(link.path_mtu()));
            settings.set("ports", Some(spec.ports));
            settings.set("sealed", Some(peer.is_some()));
            settings.set("peer", peer);
            settings.set("offload", link.has_drivers());
            let by_kernel = self.core.kernel_reaches(link);
            Some(api::Link {
                name: spec.name.clone(),
                state: state.into(),
                reason,
                keys_s: seal.as_ref().and_then(|seal| seal.keys_s),
                certificate_s: seal.as_ref().and_then(|seal| seal.certificate_end).map(seconds_until),
                rtt_us: seal.as_ref().and_then(|seal| seal.rtt_us).or(probed.rtt_us),
                loss_permille: probed.loss_permille,
                path: if by_kernel == Some(Ok(())) { "kernel" } else { "vnetd" }.into(),
                path_reason: by_kernel.and_then(Result::err),
                tunnel_reason: self.tunnel_reason(link),
                direct_guests: direct_guests(link),
                traffic: (&**link).into(),
                heard_s: heard_s.or_else(|| link.stream_heard_s()),
                settings,
            })
        };
        self.current.links.iter().filter_map(link).collect()
    }

    /// All rules, by index.
    pub fn routes(&self) -> Vec<api::Route> {
        let route = |(spec, index): (&RouteSpec, &u32)| api::Route { index: *index, settings: spec.into() };
        let mut routes: Vec<_> = self.route_indices.iter().map(route).collect();
        routes.sort_by_key(|route| route.index);
        routes
    }

    /// All networks.
    pub fn networks(&self) -> Vec<api::Network> {
        let mut inside: HashMap<_, usize> = HashMap::new();
        for item in &self.current.interfaces {
            *inside.entry(item.spec.network).or_default() += 1;
        }
        let network = |Item { spec, .. }: Item<NetworkSpec>| api::Network {
            settings: (&spec).into(),
            interfaces: inside.get(&spec.id).copied().unwrap_or(0),
        };
        plan::networks(&self.current).into_iter().map(network).collect()
    }

    /// All known addresses, configured ones included.
    pub fn learned(&self) -> Vec<api::Learned> {
        let targets = self.targets();
        let learned = |entry: LearnedEntry| {
            let held = match entry.held {
                Held::Learned => "learned",
                Held::Frozen => "frozen",
                Held::Pinned => "configured",
            };
            let LearnedEntry { network, mac, age_s, .. } = entry;
            let at = targets.get(&entry.port)?.to_string();
            Some(api::Learned { network, mac, at, held: held.into(), age_s })
        };
        self.known().into_iter().filter_map(learned).collect()
    }

    /// The [`FLOWS_SHOWN`] installed flows that have carried most bytes, the largest first.
    pub fn flows(&self) -> Vec<api::KernelFlow> {
        let Some(kernel) = self.core.kernel_if_open() else { return vec![] };
        let targets = self.targets();
        let at = |port| targets.get(&port).map_or("removed".into(), ToString::to_string);
        let show = |Carried { flow, to, frames, bytes }: Carried| {
            let kernel_ms = kernel.lease_ms(&flow).unwrap_or(0);
            let Known { network, from, dst, src, datagram } = flow;
            let sealed = datagram.map(|datagram| format!("{} > {}", datagram.src, datagram.dst));
            api::KernelFlow {
                network,
                src,
                dst,
                from: at(from),
                to: at(to),
                frames,
                bytes,
                kernel_ms,
                sealed,
            }
        };
        kernel.flows().largest(FLOWS_SHOWN).into_iter().map(show).collect()
    }

    fn kernel_summary(
        &self,
        interfaces: &[api::Interface],
        links: &[api::Link],
    ) -> Option<api::KernelSummary> {
        // Without interfaces there is nothing to say.
        let kernel = self.core.kernel_if_open();
        let interface_reason = interface_reason(interfaces);
        if kernel.is_none() && interface_reason.is_none() {
            return None;
        }
        let (flows, refused) = kernel.map_or((0, 0), |kernel| kernel.flows().len());
        Some(api::KernelSummary {
            interfaces: interfaces.iter().filter(|interface| interface.path == "kernel").count(),
            flows,
            refused,
            translated: self.translated(),
            pin_error: kernel.and_then(|kernel| kernel.adoptable().err()).map(Into::into),
            interface_reason,
            link_reason: kernel.and_then(|_| link_reason(links)),
        })
    }

    /// Why packets that the kernel sends by a link take a tunnel; `None` if they need none, or if vnetd forwards the link's frames.
    fn tunnel_reason(&self, link: &Arc<Link>) -> Option<String> {
        self.core.kernel_reaches(link)?.ok()?;
        self.core.tunnel_reason(link).map(Into::into)
    }

    /// Connections and UDP flows of guests whose packets leave for other hosts without a tunnel.
    fn translated(&self) -> usize {
        let now_ms = self.core.now_ms();
        self.links.values().map(|running| running.link.translated(now_ms)).sum()
    }

    pub(super) fn known(&self) -> Vec<LearnedEntry> {
        self.core.learned().entries(&self.core.table(), self.core.now_ms())
    }

    /// Counters of the learning table.
    pub fn learned_stats(&self) -> LearnedStats {
        self.core.learned().stats()
    }

    /// Signs of life of the dispatchers.
    pub fn pulse(&self) -> Pulse {
        self.core.pulse()
    }

    /// The threads that run the dispatchers.
    pub fn threads(&self) -> api::Threads {
        self.core.threads().into()
    }

    /// Counters of each dispatcher.
    pub fn dispatcher_stats(&self) -> &[Arc<DispatcherStats>] {
        self.core.dispatcher_stats()
    }

    /// All counters.
    pub fn stats(&self) -> api::Stats {
        self.core.count();
        let port =
            |kind: &str, name: &str, counters| api::Port { kind: kind.into(), name: name.into(), counters };
        let mut ports = vec![];
        for Item { spec, .. } in &self.current.interfaces {
            if let Some(live) = self.interfaces.get(&spec.name) {
                ports.push(port("interface", &spec.name, (&*live.stats).into()));
            }
        }
        for Item { spec, .. } in &self.current.links {
            if let Some(live) = self.links.get(&spec.name) {
                ports.push(port("link", &spec.name, (&*live.stats).into()));
            }
        }
        ports.push(port("bridge", "bridge", (&**self.core.bridge_stats()).into()));
        ports.push(port("removed", "removed", self.retired.clone()));
        let balance = api::Balance::of(ports.iter().map(|port| &port.counters));
        let threads = self.core.threads().of_dispatchers;
        let dispatchers = self.core.dispatcher_stats().iter().zip(threads).enumerate();
        let dispatcher = |(id, (stats, thread)): (usize, (&Arc<DispatcherStats>, usize))| {
            api::Dispatcher::new(id, stats, thread)
        };
        let dispatchers = dispatchers.map(dispatcher).collect();
        api::Stats { ports, dispatchers, balance }
    }
}

/// Why vnetd must see every frame from an interface that has the kernel's own path; `None` if it need not.
fn inspected(spec: &InterfaceSpec) -> Option<&'static str> {
    if spec.driving.share.is_limited() {
        Some(api::LIMITED)
    } else {
        spec.address_security.then_some(api::GUARDED)
    }
}

/// Why one of `interfaces` does not have the path `kernel`, in one line; `None` if all have it. One that could have it comes first.
fn interface_reason(interfaces: &[api::Interface]) -> Option<String> {
    let mut without = interfaces.iter().filter(|interface| interface.path != "kernel");
    let first = without.clone().find(|interface| interface.may_have_kernel_path()).or(without.next())?;
    Some(format!("interface {}: {}", first.name, first.path_reason.as_ref()?))
}

/// Why none of `links` has the path `kernel`, in one line; `None` if one has it or there are none.
fn link_reason(links: &[api::Link]) -> Option<String> {
    if links.iter().any(|link| link.path == "kernel") {
        return None;
    }
    if links.iter().all(|link| link.settings.flag("sealed")) && !links.is_empty() {
        return Some(api::SEALED_LINKS_ONLY.into());
    }
    let reason = |link: &api::Link| Some(format!("link {}: {}", link.name, link.path_reason.as_ref()?));
    links.iter().find_map(reason)
}

fn direct_guests(link: &Link) -> Vec<api::DirectGuest> {
    let guest = |(at, used): (DirectPort, bool)| {
        let DirectPort { network, mac, port } = at;
        api::DirectGuest { network, mac, port, used }
    };
    link.direct_guests().into_iter().map(guest).collect()
}

/// Seconds from now to the Unix time `end`; 0 if `end` has passed.
fn seconds_until(end: i64) -> u64 {
    u64::try_from(end.saturating_sub(unix_now())).unwrap_or(0)
}

/// Current polling mode of an interface, and its guest's notification rate.
fn driving(live: &LiveInterface, queues: usize) -> api::Driving {
    let LiveInterface { drive, stats, .. } = live;
    let driven_by = match drive.gauge.vmm_driven() {
        0 => "guest",
        n if n == queues => "vmm",
        _ => "both",
    };
    let (notifications, frames) = (stats.notifications.get(), stats.out_frames.get());
    api::Driving {
        driven_by: driven_by.into(),
        rate: drive.gauge.rate(),
        switches: drive.gauge.switches.get(),
        notifications_per_1000_frames: notifications.saturating_mul(1000) / frames.max(1),
        interrupt_counters: (&stats.interrupts).into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vnet::frame::NetworkId;
    use vnet::kernel::{Destination, FLOWS_PORT_MAX, Sender, Target, Terms, VERSIONS};
    use vnet::wire::ethernet::Mac;

    /// A link that the kernel forwards to if it has no `reason`.
    fn link(name: &str, is_sealed: bool, reason: Option<&str>) -> api::Link {
        let path = if reason.is_some() { "vnetd" } else { "kernel" };
        let text = format!(r#"{{"name":"{name}","state":"up","path":"{path}","sealed":{is_sealed}}}"#);
        let link: api::Link = serde_json::from_str(&text).unwrap();
        api::Link { path_reason: reason.map(Into::into), ..link }
    }

    fn interface(name: &str, kind: &str, reason: Option<&str>) -> api::Interface {
        let path = if reason.is_some() { "vnetd" } else { "kernel" };
        let text = format!(r#"{{"name":"{name}","state":"up","path":"{path}","kind":"{kind}"}}"#);
        let interface: api::Interface = serde_json::from_str(&text).unwrap();
        api::Interface { path_reason: reason.map(Into::into), ..interface }
    }

    #[test]
    fn one_reason_says_why_an_interface_lacks_the_kernels_path() {
        let vm = || interface("vm", "vhost-user", Some("only kinds veth and local have it"));
        let limited = || interface("c1", "veth", Some("it has a rate limit"));
        let with = || interface("c2", "local", None);
        assert_eq!(interface_reason(&[]), None);
        assert_eq!(interface_reason(&[with()]), None);
        assert_eq!(
            interface_reason(&[with(), vm()]).as_deref(),
            Some("interface vm: only kinds veth and local have it")
        );
        let reason = interface_reason(&[vm(), with(), limited()]);
        assert_eq!(reason.as_deref(), Some("interface c1: it has a rate limit"));
    }

    /// An engine with two vhost-user interfaces; no BPF program is loaded.
    fn engine(folder: &std::path::Path) -> Engine {
        let vm = |n: u8| {
            let socket = folder.join(format!("vm{n}"));
            let kind = format!("kind = \"vhost-user\"\nsocket = \"{}\"", socket.display());
            format!("[[interface]]\nname = \"vm{n}\"\n{kind}\nmac = \"52:54:00:00:00:0{n}\"\n")
        };
        let bpffs = folder.join("none/bpf");
        let text = format!(
            "[host]\nname = \"h1\"\n[bridge]\nlisten = \"127.0.0.1:0\"\n[dispatch]\nbpffs = \"{}\"\n{}{}",
            bpffs.display(),
            vm(1),
            vm(2)
        );
        Engine::start(crate::config::parse("f", &text).unwrap().desired).unwrap()
    }

    #[test]
    fn a_host_without_programs_says_why() {
        let folder = tempfile::tempdir().unwrap();
        let engine = engine(folder.path());
        let reason = "interface vm1: only kinds veth and local have it, this is kind vhost-user";
        let kernel = engine.status().kernel.unwrap();
        let want = api::KernelSummary {
            interfaces: 0,
            flows: 0,
            refused: 0,
            translated: 0,
            pin_error: None,
            interface_reason: Some(reason.into()),
            link_reason: None,
        };
        assert_eq!((kernel, engine.flows()), (want, vec![]));
    }

    /// Needs CAP_BPF; `make test` sets VNET_TEST_PROGRAMS, so that it fails without.
    #[test]
    fn installed_and_refused_flows_are_shown() {
        const TERMS: Terms =
            Terms { until_ns: u64::MAX, generation: 7, buckets: [VERSIONS as u16 - 1; 2], versions: [0; 2] };
        let folder = tempfile::tempdir().unwrap();
        let engine = engine(folder.path());
        let kernel = match engine.core.kernel() {
            Ok(kernel) => kernel,
            Err(why) => {
                assert!(std::env::var_os("VNET_TEST_PROGRAMS").is_none(), "{why}");
                return eprintln!("not tested: {why}");
            }
        };
        kernel.set_generation(7);
        kernel.tick(1, u64::MAX);
        let [one, two] = ["vm1", "vm2"].map(|name| &engine.interfaces[name]);
        let sender = Sender { stats: one.stats.clone(), payer: one.port };
        let target = Target::Guest { mac: None, namespace: None };
        let to = Destination { port: two.port, device: 1, mtu: 1500, stats: two.stats.clone(), target };
        let address = |n: u32| {
            let [_, b, c, d] = n.to_be_bytes();
            Mac([2, 0, 0, b, c, d])
        };
        let install = |n| {
            let (dst, src) = (address(n), address(0));
            let flow = Known { network: NetworkId::DEFAULT, from: one.port, dst, src, datagram: None };
            kernel.flows().install(&flow, &sender, &to, &TERMS)
        };
        assert!(install(1) && install(2));
        let [first, _] = &engine.flows()[..] else { panic!("{:?}", engine.flows()) };
        let kernel_ms = first.kernel_ms;
        assert!(kernel_ms > 0);
        let (from, to) = ("interface vm1".to_string(), "interface vm2".to_string());
        let (network, frames, bytes) = (NetworkId::DEFAULT, 0, 0);
        let (src, dst, sealed) = (address(0), address(1), None);
        let want = api::KernelFlow { network, src, dst, from, to, frames, bytes, kernel_ms, sealed };
        assert_eq!(*first, want);
        let refused = (3..FLOWS_PORT_MAX + 6).filter(|n| !install(*n)).count();
        assert_eq!(refused, 5);
        let shown = engine.status().kernel.unwrap();
        assert_eq!((shown.flows, shown.refused), (FLOWS_PORT_MAX as usize, 5));
        assert_eq!(engine.flows().len(), FLOWS_SHOWN);
        kernel.set_generation(8);
        assert!(engine.flows().iter().all(|flow| flow.kernel_ms == 0), "ended");
    }

    #[test]
    fn a_limit_keeps_frames_from_the_kernels_path() {
        let mut spec = InterfaceSpec::default();
        assert_eq!(inspected(&spec), None);
        spec.address_security = true;
        assert_eq!(inspected(&spec), Some("it has address security"));
        spec.driving.share.frame_limit = 5;
        assert_eq!(inspected(&spec), Some("it has a rate limit"));
    }

    #[test]
    fn one_reason_says_why_no_link_takes_the_wire() {
        let sealed = || link("a", true, Some("it is sealed"));
        let blocked = || link("b", false, Some("blocked"));
        assert_eq!(link_reason(&[]), None);
        assert_eq!(link_reason(&[sealed(), link("c", false, None)]), None);
        assert_eq!(link_reason(&[sealed(), sealed()]).as_deref(), Some("sealed links only"));
        assert_eq!(link_reason(&[blocked(), sealed()]).as_deref(), Some("link b: blocked"));
    }
}
