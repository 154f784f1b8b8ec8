//! The thread that gives shared memory to the applications of this host's containers, for the interconnect.
//!
//! It listens in the network namespace of each container, and makes its places follow the configuration. An interface with a rate limit
//! gives no shared memory: its traffic has to pass vnetd.

use std::collections::HashSet;
use std::io;
use std::os::fd::OwnedFd;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use vnet::helper::{self, Kind};
use vnet::interface::tap::Netns;
use vnet_control::desired::{Attachment, Desired};
use vnet_rdma::meeting::{self, Host, Place, Stopper};

use crate::guests;
use crate::rdma_engine::{self, RdmaEngine};
use crate::sealing::KeyKeeper;
use crate::shared::Shared;

/// Interval at which the configuration and the namespaces are looked at.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// A running thread.
pub struct Running {
    stopper: Stopper,
    thread: JoinHandle<()>,
    guests: guests::Running,
}

impl Running {
    /// Ends the thread. Applications go on over the network.
    pub fn stop(self) {
        self.stopper.stop();
        if self.thread.join().is_err() {
            tracing::error!("the meeting point of applications ended in a panic");
        }
        self.guests.stop();
    }
}

/// Starts the thread, and that of applications in virtual machines.
pub fn start(shared: &Shared, engine: &RdmaEngine) -> io::Result<Running> {
    let mut host = Host::new()?;
    engine.serve(&mut host);
    host.seal(Box::new(KeyKeeper::new(shared)));
    let (stopper, guests) = (host.stopper(), guests::start(shared, engine)?);
    let (shared, engine) = (shared.clone(), engine.clone());
    let thread =
        std::thread::Builder::new().name("meetings".into()).spawn(move || run(&shared, &engine, host))?;
    Ok(Running { stopper, thread, guests })
}

fn run(shared: &Shared, rdma: &RdmaEngine, mut host: Host) {
    let mut taken = HashSet::new();
    while !host.is_stopped() {
        let wanted = shared.lock().as_ref().map(|engine| {
            let desired = engine.current();
            let ports = engine.sidebands().into_iter().map(|(name, side)| (name, side.origin().port.0));
            (containers(desired), guests::in_room(desired, ports), rdma_engine::allowed(desired))
        });
        let Some((wanted, guests, allowed)) = wanted else { return };
        let (guest_places, guest_shares) = guests.into_iter().unzip();
        let (places, namespaces) = places(wanted);
        let mut open = |place: &Place| {
            let at = places.iter().position(|known| known.id == place.id)?;
            listen(&namespaces[at], place, &mut taken)
        };
        // First: opening sockets in namespaces may take long.
        rdma.set_places(&[places.clone(), guest_places].concat());
        host.set_places(&places, &mut open);
        rdma.follow(&mut host, &allowed, guest_shares);
        let end = Instant::now() + LOOK_EVERY;
        while !host.is_stopped() && Instant::now() < end {
            if let Err(error) = host.turn(end.saturating_duration_since(Instant::now())) {
                tracing::error!(%error, "cannot wait for applications");
                std::thread::sleep(LOOK_EVERY);
            }
        }
    }
}

/// Namespaces of containers, and the network of each of their interfaces. With a rate limit the interface lends its network to nobody.
fn containers(desired: &Desired) -> Vec<(Netns, Option<u32>)> {
    let interfaces = desired.interfaces.iter().map(|item| &item.spec);
    interfaces
        .filter_map(|interface| match &interface.attachment {
            Attachment::Tap { netns: Some(netns), .. } | Attachment::Veth { netns: Some(netns), .. } => {
                let may_share = !interface.driving.share.is_limited();
                Some((netns.clone(), may_share.then_some(interface.network.get())))
            }
            _ => None,
        })
        .collect()
}

/// One place for each namespace that exists, and a name of it.
fn places(containers: Vec<(Netns, Option<u32>)>) -> (Vec<Place>, Vec<Netns>) {
    let (mut places, mut namespaces): (Vec<Place>, Vec<Netns>) = (vec![], vec![]);
    for (netns, network) in containers {
        let Some(id) = netns.identity().filter(|_| !netns.is_own()) else { continue };
        match places.iter_mut().find(|place| place.id == id) {
            Some(place) => place.networks.extend(network),
            None => {
                places.push(Place { id, networks: network.into_iter().collect() });
                namespaces.push(netns);
            }
        }
    }
    (places, namespaces)
}

fn listen(netns: &Netns, place: &Place, taken: &mut HashSet<(u64, u64)>) -> Option<OwnedFd> {
    let open = || helper::socket(Kind::LOCAL).and_then(|socket| meeting::listen_on(socket, meeting::SOCKET));
    match netns.run(open) {
        // The name may stand for another namespace by now.
        Ok((id, Ok(listener))) if id == place.id => {
            taken.remove(&id);
            Some(listener)
        }
        Ok((id, Err(error))) => {
            if taken.insert(id) {
                tracing::warn!(
                    "netns {netns}: cannot listen at the abstract socket '{}': {error}; applications there use the network only",
                    meeting::SOCKET
                );
            }
            None
        }
        Ok(_) | Err(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use vnet_control::config;
    use vnet_control::desired::{InterfaceSpec, Item};

    use super::*;

    #[test]
    fn containers_without_rate_limits_meet() {
        let netns = |name: &str| Some(name.parse::<Netns>().unwrap());
        let attachment = Attachment::Veth { device: "eth0".into(), netns: netns("limited") };
        let mut limited = InterfaceSpec { attachment, ..InterfaceSpec::default() };
        limited.driving.share.rate_limit = 5;
        let mut open = limited.clone();
        open.driving.share.rate_limit = 0;
        let of = |interfaces: Vec<InterfaceSpec>| {
            let mut desired = config::parse("test", "[host]\nname = 'h'\n").unwrap().desired;
            let item = |spec| Item { place: Default::default(), spec };
            desired.interfaces = interfaces.into_iter().map(item).collect();
            let found = containers(&desired).into_iter();
            found.map(|(netns, network)| (netns.to_string(), network)).collect::<Vec<_>>()
        };
        let mut host_device = open.clone();
        host_device.attachment = Attachment::Tap { device: "tap0".into(), netns: None };
        assert_eq!(of(vec![limited, host_device]), [("limited".to_owned(), None)]);
        assert_eq!(of(vec![open]), [("limited".to_owned(), Some(1))]);
    }
}
