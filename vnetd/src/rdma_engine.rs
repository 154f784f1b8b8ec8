//! The interconnect's engine for applications of this host's containers: who is allowed to use it, by which share, and its counters.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;

use parking_lot::Mutex;
use vnet::helper::{self, Kind};
use vnet::interface::tap::Netns;
use vnet_control::desired::{Attachment, Desired, InterfaceSpec};
use vnet_rdma::daemon::{ContainerCounters, ContainerId, Service, ShareSettings};
use vnet_rdma::meeting::{self, Decline, Ends, Host, Offer, Place, Presence, Request};
use vnet_rdma::vm::{GuestHost, Nic};

/// Part of the host's memory that the applications of one container may register, and of all together.
const MEMORY_OF_CONTAINER: u64 = 4;
const MEMORY_OF_ALL: u64 = 2;
/// Below, ports are for privileged programs, and vnetd would open them for anybody.
const PORT_MIN: u16 = 1024;

/// A container whose applications may have vnetd run their engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Allowed {
    netns: Netns,
    share: ShareSettings,
    /// Applications are to take it without asking for it.
    is_preferred: bool,
}

/// The running engine. Clones refer to the same one; the default one serves nobody.
#[derive(Clone, Default)]
pub struct RdmaEngine {
    service: Option<Service>,
    allowed: Arc<Mutex<HashMap<ContainerId, Allowed>>>,
    /// Names of containers that have been allowed once, for their counters.
    names: Arc<Mutex<HashMap<ContainerId, String>>>,
    /// Interfaces of virtual machines that have been served.
    guests: Arc<Mutex<HashMap<ContainerId, String>>>,
    /// Offers in the namespaces of containers that are to take the engine by themselves. `None`: the name was taken there.
    offers: Arc<Mutex<HashMap<ContainerId, Option<Presence>>>>,
}

impl RdmaEngine {
    /// Starts the engine's thread, which sleeps until an application asks for it.
    pub fn start() -> io::Result<RdmaEngine> {
        let memory = memory_bytes();
        let service = Service::start(memory / MEMORY_OF_CONTAINER, memory / MEMORY_OF_ALL)?;
        Ok(RdmaEngine { service: Some(service), ..RdmaEngine::default() })
    }

    /// Ends the engine and everything under way.
    pub fn stop(&self) {
        self.offers.lock().clear();
        if let Some(service) = &self.service {
            service.stop();
        }
    }

    /// Answers applications that ask at the meeting point.
    pub fn serve(&self, host: &mut Host) {
        let own = self.clone();
        host.serve(Box::new(move |place, request| own.attach(place, request)));
    }

    /// Makes the containers that may use the engine those of the configuration. Others lose it. `guests`: shares of virtual machines.
    pub fn follow(&self, host: &mut Host, wanted: &[Allowed], guests: Vec<(ContainerId, ShareSettings)>) {
        let allowed: HashMap<ContainerId, Allowed> =
            wanted.iter().filter_map(|item| Some((item.netns.identity()?, item.clone()))).collect();
        host.serve_only(|id| allowed.contains_key(&id));
        let mut names = self.names.lock();
        names.extend(allowed.iter().map(|(id, item)| (*id, item.netns.to_string())));
        if let Some(service) = &self.service {
            service.set_shares(allowed.iter().map(|(id, item)| (*id, item.share)).chain(guests).collect());
            let known: Vec<ContainerId> = service.counters().iter().map(|counters| counters.id).collect();
            for (id, line) in service.take_notes() {
                let of_guest = || self.guests.lock().get(&id).map(|name| format!("interface {name}"));
                let of = names.get(&id).map(|name| format!("netns {name}")).or_else(of_guest);
                let of = of.unwrap_or_else(|| "a container".into());
                tracing::warn!("{of}: an application whose engine runs here: {line}");
            }
            names.retain(|id, _| allowed.contains_key(id) || known.contains(id));
        }
        *self.allowed.lock() = allowed.clone();
        self.offer(&allowed);
    }

    /// Offers the engine to containers that are to take it by themselves. It is allowed to them already.
    fn offer(&self, allowed: &HashMap<ContainerId, Allowed>) {
        if self.service.is_none() {
            return;
        }
        let preferred = |item: &Allowed| item.is_preferred;
        let mut offers = self.offers.lock();
        offers.retain(|id, _| allowed.get(id).is_some_and(preferred));
        for (&id, Allowed { netns, .. }) in allowed.iter().filter(|(_, item)| preferred(item)) {
            if matches!(offers.get(&id), Some(Some(_))) {
                continue;
            }
            let open = || {
                let socket = helper::socket(Kind::LOCAL_DATAGRAMS)?;
                Presence::on(socket, meeting::SOCKET, Offer::Daemon)
            };
            match netns.run(open) {
                // The name may stand for another namespace by now.
                Ok((now, Ok(presence))) if now == id => drop(offers.insert(id, Some(presence))),
                Ok((now, Err(error))) if now == id && offers.insert(id, None).is_none() => tracing::warn!(
                    "netns {netns}: cannot offer the interconnect's engine: {error}; applications there have to ask for it"
                ),
                Ok(_) | Err(_) => {}
            }
        }
    }

    /// Sets the networks of containers and guests: packets between applications with a common one bypass the network.
    pub fn set_places(&self, places: &[Place]) {
        if let Some(service) = &self.service {
            service.set_places(places);
        }
    }

    fn attach(&self, place: &Place, request: &Request) -> Result<Ends, Decline> {
        let allowed = self.allowed.lock().get(&place.id).cloned();
        let (Some(Allowed { netns, share, .. }), Some(service)) = (allowed, &self.service) else {
            return Err(Decline::NotAllowed);
        };
        if (1..PORT_MIN).contains(&request.bind.port()) {
            return Err(Decline::Port);
        }
        let socket = match netns.run(|| helper::udp(request.bind)) {
            // The name may stand for another namespace by now.
            Ok((id, Ok(socket))) if id == place.id => socket,
            Ok((_, Err(error))) => return Err(Decline::Address(error.raw_os_error().unwrap_or(0))),
            Ok(_) | Err(_) => return Err(Decline::NotAllowed),
        };
        service.attach(place.id, share, socket, request.config()).map_err(|error| {
            if error.kind() != io::ErrorKind::QuotaExceeded {
                tracing::warn!("netns {netns}: cannot run the engine of an application: {error}");
            }
            Decline::TooMany
        })
    }

    /// The daemon's side of the guest at this port, whose applications count under the interface's name. `None`: the engine serves nobody.
    pub fn guest_host(&self, nic: Arc<dyn Nic>, name: &str, port: u16) -> Option<io::Result<GuestHost>> {
        let id = guest_id(port);
        self.guests.lock().insert(id, name.to_owned());
        Some(GuestHost::new(nic, self.service.clone()?, id))
    }

    /// Counters by container.
    pub fn counters(&self) -> Vec<(String, ContainerCounters)> {
        let (names, guests) = (self.names.lock(), self.guests.lock());
        let counters = self.service.iter().flat_map(Service::counters);
        let named = |counters: ContainerCounters| {
            let of_guest = || guests.get(&counters.id).map(|name| format!("interface {name}"));
            Some((names.get(&counters.id).cloned().or_else(of_guest)?, counters))
        };
        counters.filter_map(named).collect()
    }
}

/// Identity of the guest at this port, beside containers. No file system has this number: ids of guests and namespaces differ.
pub fn guest_id(port: u16) -> ContainerId {
    (u64::MAX, u64::from(port))
}

/// Containers with an interface in a network that allows it. Several interfaces have the highest of their weights and the sum of
/// their rates.
pub fn allowed(desired: &Desired) -> Vec<Allowed> {
    let networks = desired.networks.iter().filter(|item| item.spec.daemon_engine);
    let networks: HashMap<_, _> =
        networks.map(|item| (item.spec.id, item.spec.prefer_daemon_engine)).collect();
    let mut all: Vec<Allowed> = vec![];
    for interface in desired.interfaces.iter().map(|item| &item.spec) {
        let (Some(netns), Some(&is_preferred)) = (netns_of(interface), networks.get(&interface.network))
        else {
            continue;
        };
        let share = share_of(interface);
        match all.iter_mut().find(|known| known.netns == *netns) {
            None => all.push(Allowed { netns: netns.clone(), share, is_preferred }),
            Some(Allowed { share: known, is_preferred: is_known_preferred, .. }) => {
                *is_known_preferred |= is_preferred;
                let is_limited = known.rate != 0 && share.rate != 0;
                known.rate = if is_limited { known.rate + share.rate } else { 0 };
                known.weight = known.weight.max(share.weight);
            }
        }
    }
    all
}

fn netns_of(interface: &InterfaceSpec) -> Option<&Netns> {
    match &interface.attachment {
        Attachment::Tap { netns, .. } | Attachment::Veth { netns, .. } => {
            netns.as_ref().filter(|netns| !netns.is_own())
        }
        _ => None,
    }
}

/// What an interface's applications get of the engine.
pub fn share_of(interface: &InterfaceSpec) -> ShareSettings {
    let share = interface.driving.share;
    // From Mbit/s.
    ShareSettings { weight: share.weight, rate: u64::from(share.rate_limit) * 125_000 }
}

/// Memory of the host in bytes.
fn memory_bytes() -> u64 {
    const UNKNOWN: u64 = 1 << 30;
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let total = text.lines().find_map(|line| line.strip_prefix("MemTotal:"));
    let kib = total.and_then(|total| total.split_whitespace().next()?.parse::<u64>().ok());
    kib.map_or(UNKNOWN, |kib| kib << 10)
}

#[cfg(test)]
mod tests {
    use vnet_control::config;
    use vnet_control::desired::Item;

    use super::*;

    #[test]
    fn containers_of_networks_that_allow_it_are_served_by_their_weight_and_rate() {
        let text = "[host]\nname = 'h'\n[[network]]\nid = 1\ndaemon_engine = true\n\
                    [[network]]\nid = 7\n\
                    [[network]]\nid = 8\ndaemon_engine = true\nprefer_daemon_engine = true\n";
        let mut desired = config::parse("test", text).unwrap().desired;
        let interface = |netns: &str, network: usize, weight, rate_limit| {
            let netns = Some(netns.parse::<Netns>().unwrap());
            let attachment = Attachment::Veth { device: "eth0".into(), netns };
            let network = desired.networks[network].spec.id;
            let mut spec = InterfaceSpec { attachment, network, ..InterfaceSpec::default() };
            (spec.driving.share.weight, spec.driving.share.rate_limit) = (weight, rate_limit);
            Item { place: Default::default(), spec }
        };
        let interfaces = vec![
            interface("a", 0, 10, 8),
            interface("a", 0, 20, 16),
            interface("b", 1, 30, 0),
            interface("c", 0, 40, 8),
            interface("c", 0, 40, 0),
            interface("c", 2, 40, 0),
        ];
        desired.interfaces = interfaces;
        let item = |netns: &str, weight, rate, is_preferred| Allowed {
            netns: netns.parse().unwrap(),
            share: ShareSettings { weight, rate },
            is_preferred,
        };
        assert_eq!(allowed(&desired), [item("a", 20, 3_000_000, false), item("c", 40, 0, true)]);
        assert!(memory_bytes() > 1 << 28);
        let (engine, mut host) = (RdmaEngine::start().unwrap(), Host::new().unwrap());
        engine.follow(&mut host, &allowed(&desired), vec![]);
        let place = Place { id: (0, 0), networks: vec![1] };
        let request = Request { bind: "127.0.0.1:0".parse().unwrap(), timeout_ms: 0, not_ready_ms: 0 };
        assert_eq!(engine.attach(&place, &request).err(), Some(Decline::NotAllowed));
        engine.allowed.lock().insert((0, 0), item("a", 1, 0, false));
        let privileged = Request { bind: "127.0.0.1:53".parse().unwrap(), ..request };
        assert_eq!(engine.attach(&place, &privileged).err(), Some(Decline::Port));
        assert_eq!(engine.attach(&place, &request).err(), Some(Decline::NotAllowed), "no such namespace");
        assert_eq!(engine.counters(), []);
        engine.stop();
    }
}
