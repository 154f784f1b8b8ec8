//! Keys for the interconnect's engine: who asks, which sealed link leads to the peer, and what the keys are derived from.
//!
//! A container is known by the socket that it asks at. Its route and its neighbour's MAC address come from its network namespace. For a virtual
//! machine only the engine that vnetd runs for it asks (`guests.rs`); it knows the interface and the neighbour. The way of frames comes from
//! the routing tables, as for `vnet trace`. Keys are derived from the link's exporter, the network, both addresses and ports, and
//! both nonces, so the two daemons get the same keys only for the same pair of applications.
//!
//! With its keys a session gets the kernel's own path across the link (`vnet::dispatch::sealed_sessions`), until the application is gone.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use vnet::dispatch::sealed_sessions::{Application, SealedSessions};
use vnet::frame::NetworkId;
use vnet::interface::hop::{Hop, Next};
use vnet::interface::tap::Netns;
use vnet::wire::ethernet::Mac;
use vnet_control::desired::{Attachment, InterfaceSpec};
use vnet_control::engine::Engine;
use vnet_control::sealing::{Way, Wayfarer};
use vnet_rdma::meeting::{KeyRequest, Keys, Place, Question, Reach, Role, Sealer, Token};
use vnet_rdma::vm::Stations;

use crate::shared::Shared;

/// How long the question of a container waits while the engine is changed. The application asks again.
const PATIENCE: Duration = Duration::from_millis(100);

/// Answers the questions of applications.
pub struct KeyKeeper {
    shared: Shared,
    /// `None`: it never waits.
    patience: Option<Duration>,
    /// The sessions of the core; `None` before there is one.
    sessions: Option<Arc<SealedSessions>>,
}

/// A sealed link to a peer.
struct Found {
    link: String,
    network: NetworkId,
    /// The application's interface, its MAC address, and the source address of its packets.
    interface: String,
    mac: Mac,
    source: IpAddr,
    /// MAC address of the peer.
    to: Mac,
}

impl KeyKeeper {
    /// For containers.
    pub fn new(shared: &Shared) -> KeyKeeper {
        KeyKeeper { shared: shared.clone(), patience: Some(PATIENCE), sessions: None }
    }

    /// For virtual machines: never waits, because the thread that asks passes their bells, too.
    pub fn of_guests(shared: &Shared) -> KeyKeeper {
        KeyKeeper { patience: None, ..KeyKeeper::new(shared) }
    }

    fn with<T>(&self, task: impl FnOnce(&Engine) -> T) -> Option<T> {
        let engine = match self.patience {
            Some(patience) => self.shared.try_lock_for(patience),
            None => self.shared.try_lock(),
        };
        engine?.as_ref().map(task)
    }

    /// The sealed link by which packets from an interface reach a station.
    fn find_from(&self, interface: &str, stations: &Stations) -> Result<Found, Reach> {
        let (source, mac) = stations.own;
        let next = stations.peer.map_or(Next::Unknown, |mac| Next::Destination(Mac(mac)));
        self.with(|engine| {
            if !engine.has_sealed_links(None) {
                return Err(Reach::AllClear);
            }
            let mut specs = engine.current().interfaces.iter().map(|item| &item.spec);
            let spec = specs.find(|spec| spec.name == interface).ok_or(Reach::NotYet)?;
            // The guest says which MAC address it has, unless the configuration does.
            sealed_link(engine, spec, (source, spec.mac.unwrap_or(Mac(mac))), next)
        })
        .unwrap_or(Err(Reach::NotYet))
    }

    /// How packets from an interface reach a station.
    pub fn reach_from(&self, interface: &str, stations: &Stations) -> Reach {
        self.find_from(interface, stations).map_or_else(|reach| reach, |_| Reach::Sealed)
    }

    /// Keys of a session between the engine `name`, whose packets leave by an interface, and its peer.
    ///
    /// # Errors
    /// How the peer is reached, if not by a sealed link with keys.
    pub fn keys_from(
        &mut self,
        name: Token,
        (interface, stations): (&str, &Stations),
        request: &KeyRequest,
    ) -> Result<Keys, Reach> {
        let found = self.find_from(interface, stations)?;
        self.derive(name, found, request)
    }

    fn derive(&mut self, name: Token, found: Found, request: &KeyRequest) -> Result<Keys, Reach> {
        let Found { link, network, interface, mac, source, to } = found;
        let context = context(network, source, request);
        let opens = request.role == Role::Opener;
        let derived = self.with(|engine| {
            let derived = engine.application_keys(&link, request.epoch, opens, &context)?;
            let who = Wayfarer { interface: &interface, mac, source, to };
            let ends = (request.between.own.port(), request.between.peer);
            let application = Application::from_ne_bytes(name);
            if !engine.admit_sealed(application, &who, ends, (network, &link)) {
                return None;
            }
            Some((derived, engine.sealed_sessions().clone()))
        });
        let ((epoch, keys), sessions) = derived.flatten().ok_or(Reach::NotYet)?;
        self.sessions = Some(sessions);
        Ok(Keys { epoch, keys })
    }

    /// Ends the sessions of an application that is gone.
    pub fn end(&self, name: Token) {
        self.sessions.iter().for_each(|sessions| sessions.end(Application::from_ne_bytes(name)));
    }

    /// The sealed link by which packets of a place reach a peer.
    fn find(&self, place: &Place, question: &Question) -> Result<Found, Reach> {
        let netns = self.with(|engine| {
            let is_sealed = engine.has_sealed_links(None);
            is_sealed.then(|| {
                let mut specs = engine.current().interfaces.iter().map(|item| &item.spec);
                specs.find_map(|spec| {
                    netns_of(spec).filter(|netns| netns.identity() == Some(place.id)).cloned()
                })
            })
        });
        let netns = match netns {
            // The engine is being changed, or the container is being removed.
            None | Some(Some(None)) => return Err(Reach::NotYet),
            Some(None) => return Err(Reach::AllClear),
            Some(Some(Some(netns))) => netns,
        };
        let Hop::Device { device, mac, source, next } = hop(&netns, place, question)? else {
            return Err(Reach::Clear);
        };
        self.with(|engine| {
            let mut specs = engine.current().interfaces.iter().map(|item| &item.spec);
            let is_place = |own: &Netns| *own == netns || own.identity() == Some(place.id);
            let is_it = |spec: &&InterfaceSpec| match &spec.attachment {
                Attachment::Tap { device: own, netns } | Attachment::Veth { device: own, netns } => {
                    (*own == device || spec.mac == Some(mac)) && netns.as_ref().is_some_and(is_place)
                }
                _ => false,
            };
            // Others are no devices of vnet.
            sealed_link(engine, specs.find(is_it).ok_or(Reach::Clear)?, (source, mac), next)
        })
        .unwrap_or(Err(Reach::NotYet))
    }
}

/// The sealed link by which frames of an interface reach the next station.
fn sealed_link(
    engine: &Engine,
    spec: &InterfaceSpec,
    (source, mac): (IpAddr, Mac),
    next: Next,
) -> Result<Found, Reach> {
    let network = spec.network;
    if !engine.has_sealed_links(Some(&[network])) {
        return Err(Reach::Clear);
    }
    let to = match next {
        Next::Destination(to) => to,
        Next::Unknown => return Err(Reach::NotYet),
        Next::Router => return Err(Reach::Router),
    };
    match engine.way_of(&Wayfarer { interface: &spec.name, mac, source, to }) {
        Way::Sealed(link) => Ok(Found { link, network, interface: spec.name.clone(), mac, source, to }),
        Way::Clear => Err(Reach::Clear),
        Way::Stream => Err(Reach::Stream),
        Way::Several => Err(Reach::Several),
        Way::Foreign => Err(Reach::Foreign),
        Way::Unknown => Err(Reach::NotYet),
    }
}

/// The first step of packets from a place to a peer.
fn hop(netns: &Netns, place: &Place, question: &Question) -> Result<Hop, Reach> {
    let found = match netns.hop(question.own.ip(), question.peer) {
        // The name may stand for another namespace by now.
        Ok((id, found)) if id == place.id => found,
        Ok(_) | Err(_) => return Err(Reach::NotYet),
    };
    match found {
        Ok(hop) => Ok(hop),
        Err(error) if error.kind() == io::ErrorKind::AddrNotAvailable => Err(Reach::Foreign),
        // Without a route nothing is sent.
        Err(_) => Err(Reach::NotYet),
    }
}

fn netns_of(spec: &InterfaceSpec) -> Option<&Netns> {
    match &spec.attachment {
        Attachment::Tap { netns, .. } | Attachment::Veth { netns, .. } => netns.as_ref(),
        _ => None,
    }
}

/// What keys are derived from besides the link's secret: network, addresses and nonces, those of the opener first.
fn context(network: NetworkId, source: IpAddr, request: &KeyRequest) -> Vec<u8> {
    let own = SocketAddr::new(source, request.between.own.port());
    let mut ends = [(own, request.nonce), (request.between.peer, request.peer_nonce)];
    if request.role == Role::Answerer {
        ends.reverse();
    }
    let mut bytes = network.get().to_be_bytes().to_vec();
    for (address, nonce) in ends {
        let ip = match address.ip() {
            IpAddr::V4(v4) => v4.to_ipv6_mapped(),
            IpAddr::V6(v6) => v6,
        };
        bytes.extend_from_slice(&ip.octets());
        bytes.extend_from_slice(&address.port().to_be_bytes());
        bytes.extend_from_slice(&nonce);
    }
    bytes
}

impl Sealer for KeyKeeper {
    fn reach(&mut self, place: &Place, question: &Question) -> Reach {
        if *question == Question::ANY {
            return match self.with(|engine| engine.has_sealed_links(None)) {
                Some(true) => Reach::SomeSealed,
                Some(false) => Reach::AllClear,
                None => Reach::NotYet,
            };
        }
        self.find(place, question).map_or_else(|reach| reach, |_| Reach::Sealed)
    }

    fn keys(&mut self, name: Token, place: &Place, request: &KeyRequest) -> Result<Keys, Reach> {
        let found = self.find(place, &request.between)?;
        self.derive(name, found, request)
    }

    fn gone(&mut self, name: Token) {
        self.end(name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_sides_name_a_session_alike() {
        let [a, b] =
            ["10.77.1.1:7000", "10.77.2.1:7001"].map(|address| address.parse::<SocketAddr>().unwrap());
        let any = "0.0.0.0:7000".parse().unwrap();
        let request = |role, own, peer, nonce, peer_nonce| KeyRequest {
            ticket: 1,
            role,
            epoch: None,
            between: Question { own, peer },
            nonce: [nonce; 16],
            peer_nonce: [peer_nonce; 16],
        };
        let one = NetworkId::DEFAULT;
        let opener = context(one, a.ip(), &request(Role::Opener, any, b, 1, 2));
        assert_eq!(opener, context(one, b.ip(), &request(Role::Answerer, b, a, 2, 1)));
        assert_eq!(opener.len(), 4 + 2 * (16 + 2 + 16));
        for other in [
            context(one, b.ip(), &request(Role::Opener, b, a, 2, 1)),
            context(one, a.ip(), &request(Role::Opener, b, b, 1, 2)),
            context(one, b.ip(), &request(Role::Answerer, b, a, 1, 2)),
            context(NetworkId::new(2).unwrap(), a.ip(), &request(Role::Opener, any, b, 1, 2)),
        ] {
            assert_ne!(opener, other);
        }
    }
}
