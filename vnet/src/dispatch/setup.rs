//! The setup: ports, peers and routes that a core forwards between. Control builds it. It is immutable once published, so each
//! frame sees one consistent setup.

use std::net::Ipv4Addr;
use std::sync::Arc;

use arc_swap::ArcSwap;

use super::mode::{Drive, Mode, ModeSettings};
use super::observers::Observers;
use crate::frame::{DropSink, PortId, Selection};
use crate::interface::Interface;
use crate::link::{Link, Peers, ReceiverParts, stream};
use crate::route::{AddressGuard, Member, NetworkSpec, PortKind, Published, Router, Rule, Table};
use crate::source::Source;
use crate::stats::PortStats;

/// An interface in the setup.
#[derive(Clone)]
pub struct InterfacePort {
    /// Port, network and routing attributes of the interface.
    pub member: Member,
    /// Name in the configuration.
    pub name: String,
    /// Counters of the interface's port.
    pub stats: Arc<PortStats>,
    /// The interface itself.
    pub interface: Arc<dyn Interface>,
    /// Drive mode and its statistics.
    pub drive: Drive,
    /// Address security: IP addresses that the guest may send from; `None`: all.
    pub guard: Option<Arc<AddressGuard>>,
}

impl InterfacePort {
    /// True when vnetd must see every frame from the guest, so that the kernel must not forward them by itself.
    pub(super) fn needs_every_frame(&self) -> bool {
        self.guard.is_some() || self.drive.share.is_limited()
    }
}

/// A link in the setup.
#[derive(Clone)]
pub struct LinkPort {
    /// Port, networks and routing attributes of the link.
    pub member: Member,
    /// The link itself.
    pub link: Arc<Link>,
}

/// The parts of a setup, supplied by control.
#[derive(Default)]
pub struct Parts {
    /// Networks.
    pub networks: Vec<NetworkSpec>,
    /// Interfaces.
    pub interfaces: Vec<InterfacePort>,
    /// Links.
    pub links: Vec<LinkPort>,
    /// Routing rules, ordered by index.
    pub rules: Vec<Rule>,
    /// Captures and cache queries.
    pub observers: Observers,
    /// Stations on other hosts that control has published.
    pub published: Arc<Published>,
    /// Further sources of frames, each with the port of the interface that receives them.
    pub feeders: Vec<(PortId, Arc<dyn Feeder>)>,
}

/// One dispatcher's setup, replaced between two batches. Sources that route by themselves load it.
pub(super) type SetupView = Arc<ArcSwap<Setup>>;

/// Parts that a source needs in order to route by itself.
pub struct SourceParts {
    /// The setup of the dispatcher that serves the source.
    pub(super) setup: SetupView,
    /// Creates receivers for links' datagrams.
    pub(super) receivers: ReceiverParts,
    /// A router with the same tables as the dispatcher's.
    pub(super) router: Router,
}

/// A source of frames for one interface, in addition to the interface's queues.
pub trait Feeder: Send + Sync {
    /// Creates the source, for the dispatcher that serves the interface in slot `port`.
    fn source(self: Arc<Self>, port: PortId, parts: SourceParts) -> Box<dyn Source>;
}

/// Sends ARP and ND frames to hosts whose vnetd is silent, by the wire.
pub(super) trait SendNeighbours: Send + Sync {
    /// The other host's address on the wire, if its vnetd is silent; `None`: all frames leave by `link` itself.
    fn silent_host(&self, link: &Link, now_ms: u64) -> Option<Ipv4Addr>;

    /// Sends the unicast ARP and ND frames of `frames` by the wire, counts drops in the sink of `others`, and writes the indices of all
    /// other frames to its list.
    fn send_neighbours(
        &self,
        to: (&Link, Ipv4Addr),
        frames: Selection<'_>,
        others: (&mut DropSink, &mut Vec<u16>),
    );
}

/// A source of frames in a setup: a queue of an interface, a connection of a stream link, or another feeder.
#[derive(Clone)]
pub(super) struct Feed {
    pub(super) port: PortId,
    pub(super) queue: usize,
    pub(super) drive: Drive,
    pub(super) kind: FeedKind,
}

#[derive(Clone)]
pub(super) enum FeedKind {
    Interface(Arc<dyn Interface>),
    Stream(Arc<Link>),
    Other(Arc<dyn Feeder>),
}

impl Feed {
    /// True when both feeds are the same queue of the same object.
    pub(super) fn is(&self, other: &Feed) -> bool {
        let same = match (&self.kind, &other.kind) {
            (FeedKind::Interface(a), FeedKind::Interface(b)) => Arc::ptr_eq(a, b),
            (FeedKind::Stream(a), FeedKind::Stream(b)) => Arc::ptr_eq(a, b),
            (FeedKind::Other(a), FeedKind::Other(b)) => Arc::ptr_eq(a, b),
            _ => false,
        };
        same && (self.port, self.queue) == (other.port, other.queue)
    }
}

/// One slot of the port table.
#[derive(Clone)]
pub(super) enum Port {
    Interface(InterfacePort),
    Link(LinkPort),
}

impl Port {
    pub(super) fn stats(&self) -> &PortStats {
        match self {
            Port::Interface(port) => &port.stats,
            Port::Link(port) => port.link.stats(),
        }
    }
}

/// The lookup tables of a dispatcher.
pub struct Setup {
    /// Generation of the setup. It distinguishes verdicts for the kernel's own path from those of other setups.
    pub(super) generation: u32,
    /// Ports by index; `None`: empty slot.
    ports: Vec<Option<Port>>,
    /// Links by remote address.
    pub(super) peers: Arc<Peers>,
    /// The routing table.
    pub(super) table: Arc<Table>,
    /// Active observers.
    pub(super) observers: Observers,
    feeders: Vec<(PortId, Arc<dyn Feeder>)>,
    /// The wire, for ARP and ND; `None`: no link may use the wire.
    pub(super) wire: Option<Arc<dyn SendNeighbours>>,
}

impl Setup {
    /// Indexes the parts.
    ///
    /// # Panics
    /// When two ports share a [`PortId`], or a port's kind contradicts its member: a bug in control.
    pub fn new(parts: Parts) -> Setup {
        let members: Vec<Member> = parts
            .interfaces
            .iter()
            .map(|i| i.member.clone())
            .chain(parts.links.iter().map(|l| l.member.clone()))
            .collect();
        let table = Table::build_published(parts.rules, &parts.networks, &members, parts.published);
        let table = Arc::new(table);
        let links: Vec<Arc<Link>> = parts.links.iter().map(|l| l.link.clone()).collect();
        let size = members.iter().map(|m| m.port.index() + 1).max().unwrap_or(0);
        let mut ports: Vec<Option<Port>> = (0..size).map(|_| None).collect();
        let interfaces =
            parts.interfaces.into_iter().map(|i| (i.member.port, PortKind::Interface, Port::Interface(i)));
        let link_ports = parts.links.into_iter().map(|l| (l.member.port, PortKind::Link, Port::Link(l)));
        for (id, kind, port) in interfaces.chain(link_ports) {
            let member_kind = match &port {
                Port::Interface(port) => port.member.kind,
                Port::Link(port) => port.member.kind,
            };
            assert_eq!(member_kind, kind, "port {id:?}");
            assert!(ports[id.index()].replace(port).is_none(), "two ports are number {id:?}");
        }
        let (observers, feeders) = (parts.observers, parts.feeders);
        let peers = Arc::new(Peers::build(&links));
        Setup { generation: 0, ports, peers, table, observers, feeders, wire: None }
    }

    /// A copy of the setup with other observers; shares table, ports, peers and generation.
    pub(super) fn with(&self, observers: Observers) -> Setup {
        let (ports, peers, table) = (self.ports.clone(), self.peers.clone(), self.table.clone());
        let (generation, feeders, wire) = (self.generation, self.feeders.clone(), self.wire.clone());
        Setup { generation, ports, peers, table, observers, feeders, wire }
    }

    /// True when a capture is active.
    #[inline]
    pub(super) fn is_observed(&self) -> bool {
        !self.observers.taps.is_empty()
    }

    /// True when a capture watches port `id`.
    pub(super) fn watches(&self, id: PortId) -> bool {
        self.observers.taps.iter().any(|tap| tap.sees(id))
    }

    #[inline]
    pub(super) fn port(&self, id: PortId) -> Option<&Port> {
        self.ports.get(id.index())?.as_ref()
    }

    /// The interface in slot `id`, if any.
    pub(super) fn interface(&self, id: PortId) -> Option<&InterfacePort> {
        match self.port(id)? {
            Port::Interface(port) => Some(port),
            Port::Link(_) => None,
        }
    }

    /// Number of slots.
    pub(super) fn slots(&self) -> usize {
        self.ports.len()
    }

    /// Ports of this setup that are empty or replaced in `other`.
    pub(super) fn ports_missing_in(&self, other: &Setup) -> Vec<PortId> {
        let same = |a: &Port, b: &Port| match (a, b) {
            (Port::Interface(a), Port::Interface(b)) => Arc::ptr_eq(&a.interface, &b.interface),
            (Port::Link(a), Port::Link(b)) => Arc::ptr_eq(&a.link, &b.link),
            _ => false,
        };
        let missing = |(index, port): (usize, &Option<Port>)| {
            let id = PortId(index as u16);
            let port = port.as_ref()?;
            (!other.port(id).is_some_and(|now| same(port, now))).then_some(id)
        };
        self.ports.iter().enumerate().filter_map(missing).collect()
    }

    /// All sources except the bridge's own sockets.
    pub(super) fn feeds(&self) -> Vec<Feed> {
        let mut feeds = vec![];
        let guest_driven =
            || Drive::new(ModeSettings { mode: Mode::GuestDriven, ..ModeSettings::default() }, 1);
        for (port, slot) in (0..).map(PortId).zip(&self.ports) {
            let (queues, drive, kind) = match slot {
                Some(Port::Interface(p)) => {
                    (p.interface.queues(), p.drive.clone(), FeedKind::Interface(p.interface.clone()))
                }
                // A stream connection wakes its dispatcher.
                Some(Port::Link(p)) if p.link.is_stream() => {
                    (stream::CONNECTIONS, guest_driven(), FeedKind::Stream(p.link.clone()))
                }
                _ => continue,
            };
            let feed = |queue| Feed { port, queue, drive: drive.clone(), kind: kind.clone() };
            feeds.extend((0..queues).map(feed));
        }
        feeds.extend(self.feeders.iter().map(|(port, feeder)| {
            let kind = FeedKind::Other(feeder.clone());
            Feed { port: *port, queue: 0, drive: guest_driven(), kind }
        }));
        feeds
    }

    pub(super) fn interfaces(&self) -> impl Iterator<Item = &InterfacePort> {
        self.ports.iter().flatten().filter_map(|port| match port {
            Port::Interface(port) => Some(port),
            Port::Link(_) => None,
        })
    }
}
