//! Direct ports of interfaces with `direct`: one UDP port for each of them and each link that may bring its frames.
//!
//! The ports follow the desired state with every setup; links announce them to the other hosts and negotiate their use
//! (`vnet/src/link/native/direct_ports.rs`). Before a port is closed, its link tells the other host.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Weak};

use vnet::dispatch::core::Core;
use vnet::dispatch::in_place::UnderlayPort;
use vnet::dispatch::setup::Feeder;
use vnet::frame::PortId;
use vnet::inherit::PortState;
use vnet::interface::{Interface, State};
use vnet::link::{DIRECT_MAX, DirectOffer, DirectPort, DirectState, Link};

use super::api;
use super::desired::*;
use super::open_close::{LiveInterface, LiveLink};

/// Maximum number of direct ports of this host: each has a socket and receive buffers of 2 MiB.
const PORTS_MAX: usize = 256;

/// The parts of the engine that ports depend on.
#[derive(Clone, Copy)]
pub(super) struct Around<'a> {
    pub core: &'a Core,
    pub interfaces: &'a BTreeMap<String, LiveInterface>,
    pub links: &'a BTreeMap<String, LiveLink>,
}

/// A direct port: its interface, its link and its socket.
struct Port {
    guest: Weak<dyn Interface>,
    link: Arc<Link>,
    at: DirectPort,
    socket: Arc<UnderlayPort>,
}

impl Port {
    /// What the link announces, while it is known where the other host is. The socket follows the peer of a sealed link when it
    /// roams.
    fn offer(&self) -> DirectOffer {
        let (guest, socket, link) = (self.guest.clone(), self.socket.clone(), Arc::downgrade(&self.link));
        let is_up = move || {
            let guest = guest.upgrade();
            guest.is_some_and(|guest| guest.state() == State::Up && !guest.has_departed())
                && link
                    .upgrade()
                    .and_then(|link| link.remote())
                    .is_some_and(|remote| socket.aim(remote).is_ok())
        };
        DirectOffer { port: self.at, is_up: Arc::new(is_up) }
    }
}

/// Links that have no port for an interface: the reason of the first one, and how many others there are.
struct Without {
    reason: String,
    others: usize,
}

/// The direct ports of this host.
#[derive(Default)]
pub(super) struct DirectPorts {
    /// By interface and link.
    ports: BTreeMap<(String, String), Port>,
    /// By interface.
    without: HashMap<String, Without>,
}

impl DirectPorts {
    /// The ports of an interface with their sockets, for the next vnetd.
    pub fn hand_over(&self, interface: &str) -> io::Result<Vec<(PortState, OwnedFd)>> {
        let own = self.ports.iter().filter(|((name, _), _)| name == interface);
        own.map(|((_, link), port)| {
            let (socket, peer) = port.socket.hand_over()?;
            Ok((PortState { link: link.clone(), negotiated: true, peer }, socket))
        })
        .collect()
    }

    /// Opens and closes ports as `desired` wants, and has links announce them. Returns the sources of their frames.
    pub fn follow(&mut self, around: Around<'_>, desired: &Desired) -> Vec<(PortId, Arc<dyn Feeder>)> {
        let mut before = std::mem::take(self);
        let mut feeders: Vec<(PortId, Arc<dyn Feeder>)> = vec![];
        let mut per_link: HashMap<&str, Vec<DirectOffer>> = HashMap::new();
        for Item { spec, .. } in desired.interfaces.iter().filter(|item| item.spec.direct) {
            let Some(live) = around.interfaces.get(&spec.name).filter(|live| live.absent.is_none()) else {
                continue;
            };
            for link in desired.links.iter().map(|item| &*item.spec.name) {
                let Some(to) = around.links.get(link).filter(|to| to.link.carries(spec.network)) else {
                    continue;
                };
                let known = before.ports.remove(&(spec.name.clone(), link.into()));
                let offers = per_link.entry(link).or_default();
                match self.room(offers.len()).and_then(|()| port(around, (spec, live), to, known)) {
                    Ok(port) => {
                        offers.push(port.offer());
                        feeders.push((live.port, port.socket.clone()));
                        self.ports.insert((spec.name.clone(), link.into()), port);
                    }
                    Err(why) => self.note(&spec.name, format!("link {link}: {why}")),
                }
            }
        }
        for (name, live) in around.links {
            announce(around, live, per_link.remove(&**name).unwrap_or_default());
        }
        feeders
    }

    /// Tells all other hosts that the ports are gone.
    pub fn withdraw(&mut self, around: Around<'_>) {
        *self = DirectPorts::default();
        around.links.values().for_each(|live| announce(around, live, vec![]));
    }

    /// Checks that there is room for another port, beside `here` ports of the same link.
    fn room(&self, here: usize) -> Result<(), String> {
        if here >= DIRECT_MAX {
            return Err(format!("it has {DIRECT_MAX} direct ports already"));
        }
        if self.ports.len() >= PORTS_MAX {
            return Err(format!("this host has {PORTS_MAX} direct ports already"));
        }
        Ok(())
    }

    fn note(&mut self, interface: &str, reason: String) {
        match self.without.get_mut(interface) {
            Some(without) => without.others += 1,
            None => _ = self.without.insert(interface.into(), Without { reason, others: 0 }),
        }
    }

    /// The ports of an interface, and the first reason why frames do not take one.
    pub fn shown(&self, interface: &str, now_ms: u64) -> (Vec<api::DirectPort>, Option<String>) {
        let mut reason = self.without.get(interface).map(|Without { reason, others }| match others {
            0 => reason.clone(),
            1 => format!("{reason}; another link has none either"),
            others => format!("{reason}; {others} more links have none either"),
        });
        let own = self.ports.iter().filter(|((name, _), _)| name == interface);
        let show = |((_, link), port): (&(String, String), &Port)| {
            let offers = port.link.direct_offers(now_ms);
            let state = offers.iter().find(|(at, _)| *at == port.at).map(|(_, state)| *state);
            let number = port.at.port;
            let state = match state {
                Some(DirectState::Tried) => "used",
                Some(DirectState::Untried) => {
                    let why = format!(
                        "link {link}: nothing comes from the other host to UDP port {number}: its vnetd is older, or a firewall \
                         drops it"
                    );
                    reason.get_or_insert(why);
                    "waiting"
                }
                Some(DirectState::Withdrawn) | None => "down",
            };
            api::DirectPort { link: link.clone(), port: number, state: state.into() }
        };
        let ports = own.map(show).collect();
        (ports, reason)
    }
}

/// The port of an interface for a link: the `known` one, if both are the same as before, else that of a vnetd that is taken over, or a
/// new one.
fn port(
    around: Around<'_>,
    (spec, live): (&InterfaceSpec, &LiveInterface),
    to: &LiveLink,
    known: Option<Port>,
) -> Result<Port, String> {
    to.link.has_direct_ports()?;
    let (network, mac) = (spec.network, spec.mac.ok_or("the interface has no mac")?);
    let is_same = |known: &Port| {
        let guest = known.guest.upgrade();
        guest.is_some_and(|guest| Arc::ptr_eq(&guest, &live.interface))
            && Arc::ptr_eq(&known.link, &to.link)
            && (known.at.network, known.at.mac) == (network, mac)
    };
    if let Some(known) = known.filter(is_same) {
        return Ok(known);
    }
    let in_place = !to.link.needs_seal();
    let handed = around.core.inheritance().and_then(|from| from.port(&spec.name, to.link.name(), true));
    let socket = match handed {
        Some((socket, peer)) => {
            UnderlayPort::inherit(socket, peer, in_place).map_err(|error| error.to_string())
        }
        None => {
            let listen = SocketAddr::new(around.core.bridge_address().ip(), 0);
            UnderlayPort::bind(listen, in_place).map_err(|error| error.to_string())
        }
    }?;
    let at = DirectPort { network, mac, port: socket.local_addr().port() };
    Ok(Port { guest: Arc::downgrade(&live.interface), link: to.link.clone(), at, socket })
}

/// Has a link announce `offers`; at once, if they differ from those before.
fn announce(around: Around<'_>, live: &LiveLink, offers: Vec<DirectOffer>) {
    if live.link.offer_direct(offers) {
        around.core.courier().negotiate_direct(&live.link, around.core.now_ms());
    }
}

#[cfg(test)]
#[path = "direct_tests.rs"]
mod tests;
