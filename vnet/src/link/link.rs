//! A link: the parts that all links share, and one of the kinds.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4};
use std::ops::Deref;
use std::sync::Arc;
#[cfg(test)]
use std::time::Duration;

use super::common::Common;
use super::inquiry::{Inbox, MAGIC, TEXT_MAX};
use super::native::direct_ports::{DirectOffer, DirectPort, DirectState};
use super::native::link_part::Native;
use super::native::send_probes::{Courier, unfit};
use super::native::translations::Translations;
#[cfg(test)]
use super::native::wire_state::WireState;
use super::native::wire_state::WireTerms;
use super::options::{LinkKind, LinkOptions, Security, SourceMatch};
use super::path::probe_health::{NameTag, Probed};
use super::path::state::{Path, udp_payload};
use super::path::watch::Monitored;
use super::rendezvous::hole_punching::PathChoice;
use super::sealed::roaming::RemoteAddress;
use super::sealed::session::{ApplicationKeys, Seal, SealView};
use super::socket::name::{ANYWHERE, addresses, normalised};
use super::socket::udp::Socket;
use super::state::LinkState;
use super::stream::Stream;
use super::vxlan::classic::Classic;
use super::vxlan::link_part::Vxlan;
use super::vxlan::vteps::Vteps;
use crate::frame::{NetworkId, PortId};
use crate::stats::PortStats;
use crate::wire::ethernet::Mac;
use crate::wire::translation::Conversation;

/// One edge of the overlay, shared by all dispatchers. Dereferences to the common part.
#[derive(Debug)]
pub struct Link {
    common: Common,
    options: LinkOptions,
    pub(in crate::link) kind: Kind,
}

/// How the kernel's own path reaches the other host of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tunnel {
    /// By the wire ([`native::wire_state`](super::native::wire_state)), to a vnet host.
    Wire(Ipv4Addr),
    /// The same, but only for datagrams that applications have sealed end to end: the link is sealed.
    Sealed(Ipv4Addr),
    /// By VXLAN datagrams of the link's own, to a VTEP.
    Vtep(SocketAddrV4),
}

/// Link kinds.
#[derive(Debug)]
pub(in crate::link) enum Kind {
    Native(Box<Native>),
    Classic(Classic),
    Vxlan(Box<Vxlan>),
    Stream(Box<Stream>),
}

impl Deref for Link {
    type Target = Common;

    #[inline]
    fn deref(&self) -> &Common {
        &self.common
    }
}

impl Link {
    /// Creates a link in clear text.
    pub fn new(options: LinkOptions, port: PortId, stats: Arc<PortStats>) -> Arc<Link> {
        Link::with_security(options, Security::default(), port, stats)
    }

    /// Creates a link with access limits.
    pub fn with_security(
        mut options: LinkOptions,
        security: Security,
        port: PortId,
        stats: Arc<PortStats>,
    ) -> Arc<Link> {
        options.remote = normalised(options.remote);
        let Security { peer, macs, via } = security;
        let common = Common::new(options.name.clone(), port, stats, Path::new(options.mtu))
            .limited_to(options.networks.clone(), macs);
        let remote = options.remote;
        let kind = match &options.kind {
            LinkKind::Native { guests } => {
                let place = RemoteAddress::new(remote, options.ports, peer.is_some());
                let mut native = Native::new(place, guests, &common);
                native.seal = peer.map(|peer| Box::new(Seal::new(peer)));
                native.via = via.map(PathChoice::new);
                Kind::Native(Box::new(native))
            }
            LinkKind::Classic(_) => Kind::Classic(Classic::new(remote)),
            LinkKind::Vxlan(vxlan) => Kind::Vxlan(Box::new(Vxlan::new(remote, vxlan))),
            // A sealed stream uses TLS and needs no datagram keys.
            LinkKind::Stream(stream) => Kind::Stream(Box::new(Stream::new(stream.clone(), peer))),
        };
        Arc::new(Link { common, options, kind })
    }

    /// Configuration of the link; the remote address is normalised.
    pub fn options(&self) -> &LinkOptions {
        &self.options
    }

    /// The other host's address, configured or learned by roaming; `None` while unknown.
    pub fn remote(&self) -> Option<SocketAddr> {
        match &self.kind {
            Kind::Native(native) => native.place.remote(),
            _ => Some(self.options.remote).filter(|remote| *remote != ANYWHERE),
        }
    }

    /// Sets another configured remote and keeps the keys. Returns false if the link must be recreated instead: in clear text, the
    /// remote identifies the sender of a datagram.
    pub fn aim(&self, remote: SocketAddr) -> bool {
        let (Some(native), Some(seal)) = (self.native(), self.seal()) else { return false };
        let has_guests = matches!(&self.options.kind, LinkKind::Native { guests } if !guests.is_empty());
        let before = self.remote();
        if native.via.is_some() || has_guests || !native.place.declare(normalised(remote)) {
            return false;
        }
        if self.remote() != before {
            self.path.restart();
            seal.sources().iter().for_each(|sources| sources.refresh());
        }
        true
    }

    /// The configured source addresses of the link's datagrams. Empty for VXLAN links, whose VTEPs send from any port, and for
    /// streams.
    pub(in crate::link) fn sources(&self) -> impl Iterator<Item = SocketAddr> {
        let has_ports =
            matches!(self.kind, Kind::Native(_) | Kind::Classic(_)) && self.options.remote != ANYWHERE;
        addresses(self.options.remote, if has_ports { self.options.ports.max(1) } else { 0 })
    }

    /// True when the link accepts datagrams from any port of its remote's address.
    pub(in crate::link) fn takes_any_port(&self) -> bool {
        self.options.kind == LinkKind::Classic(SourceMatch::Address)
    }

    /// The current state.
    pub fn state(&self) -> LinkState {
        match &self.kind {
            Kind::Stream(stream) => stream.state(),
            _ => self.seal().map_or_else(|| self.path.state(self.common.heard_ms().is_some()), Seal::state),
        }
    }

    /// Round trip and loss from probes, and traffic rates.
    pub fn probed(&self) -> Probed {
        self.path.probed()
    }

    /// The native part, on native links.
    #[inline]
    pub(in crate::link) fn native(&self) -> Option<&Native> {
        if let Kind::Native(native) = &self.kind { Some(native) } else { None }
    }

    #[inline]
    pub(in crate::link) fn vteps(&self) -> Option<&Vteps> {
        if let Kind::Vxlan(vxlan) = &self.kind { Some(&vxlan.vteps) } else { None }
    }

    #[inline]
    pub(in crate::link) fn stream(&self) -> Option<&Stream> {
        if let Kind::Stream(stream) = &self.kind { Some(stream) } else { None }
    }

    /// True when nothing may be sent in clear text on the link.
    #[inline]
    pub fn needs_seal(&self) -> bool {
        self.seal().is_some()
    }

    /// Sets the path MTU without probing.
    #[cfg(test)]
    pub(crate) fn assume_path_mtu(&self, mtu: u32) {
        self.path.set_route_mtu(mtu);
    }

    /// The keys of a sealed link; `None` for other links.
    #[inline]
    pub(in crate::link) fn seal(&self) -> Option<&Seal> {
        self.native()?.seal.as_deref()
    }

    /// The choice between the relayed and the direct path; `None` for links without a rendezvous.
    #[inline]
    pub(in crate::link) fn via(&self) -> Option<&PathChoice> {
        self.native()?.via.as_ref()
    }

    /// State of the keys and the peer's host name; `None` for a link in clear text.
    pub fn seal_view(&self) -> Option<SealView> {
        Some(self.seal()?.view(self.next_number()))
    }

    /// Whether the peer's certificate lets it send frames of `network` from `mac`; true for a link in clear text.
    pub fn peer_may_send(&self, network: NetworkId, mac: Mac) -> bool {
        let Some(seal) = self.seal() else { return true };
        let keyring = seal.keyring();
        keyring.claims().is_none_or(|claims| claims.allows_network(network) && claims.allows_source(mac))
    }

    /// Keys of a session between two applications at the ends of a sealed link: from the link's keys of `epoch`, or the current ones, and the
    /// epoch. Both hosts get the same keys for the same `context`. `opens`: the session's opener is on this host. `None`: the link has no
    /// keys of this epoch.
    pub fn application_keys(
        &self,
        epoch: Option<u8>,
        opens: bool,
        context: &[u8],
    ) -> Option<(u8, ApplicationKeys)> {
        self.seal()?.application_keys(epoch, opens, context)
    }

    /// Maximum UDP payload in bytes of an unfragmented packet.
    pub(in crate::link) fn udp_payload(&self) -> usize {
        udp_payload(self.path_mtu(), self.remote().is_some_and(|remote| remote.is_ipv4()))
    }

    /// How the kernel sends this link's known flows by itself, if it may. Relayed links and those limited to source addresses stay on
    /// vnetd's own datagrams, and so do links with several VTEPs, of which vnetd chooses one for each frame. The kernel does not
    /// encrypt, so a sealed link leaves it only what is encrypted already.
    ///
    /// # Errors
    /// The reason why it may not.
    pub fn tunnel(&self) -> Result<Tunnel, &'static str> {
        match &self.kind {
            Kind::Native(native) if native.via.is_some() => return Err("it is relayed"),
            Kind::Vxlan(vxlan) if vxlan.vteps.group().is_some() => return Err("it has a multicast group"),
            Kind::Vxlan(vxlan) if vxlan.vteps.addresses().len() > 1 => return Err("it has several VTEPs"),
            Kind::Vxlan(vxlan) if vxlan.drivers.is_none() => return Err("its offload is off"),
            Kind::Native(_) | Kind::Vxlan(_) => {}
            Kind::Classic(_) | Kind::Stream(_) => return Err("it is neither native nor vxlan"),
        }
        if self.macs.is_some() {
            return Err("it is limited to macs");
        }
        let remote = self.remote().ok_or("its remote is not known")?;
        match remote.ip().to_canonical() {
            IpAddr::V6(_) => Err("its remote is an IPv6 address"),
            IpAddr::V4(ip) if ip.is_loopback() => Err("its remote is this host"),
            IpAddr::V4(ip) if ip.is_unspecified() => Err("its remote is not known"),
            IpAddr::V4(ip) if self.needs_seal() => Ok(Tunnel::Sealed(ip)),
            IpAddr::V4(ip) if self.native().is_some() => Ok(Tunnel::Wire(ip)),
            IpAddr::V4(ip) => Ok(Tunnel::Vtep(SocketAddrV4::new(ip, remote.port()))),
        }
    }

    /// The other host's address on the wire, if this link's known flows, or sealed datagrams, may take it.
    pub fn wire_remote(&self) -> Option<Ipv4Addr> {
        match self.tunnel() {
            Ok(Tunnel::Wire(remote) | Tunnel::Sealed(remote)) => Some(remote),
            Ok(Tunnel::Vtep(_)) | Err(_) => None,
        }
    }

    /// Source ports for VXLAN datagrams that the kernel's own path makes, owned by sockets of this link: the first, and their number.
    /// `None` before [`Link::open_drivers`].
    pub fn vtep_sources(&self) -> Option<(u16, u16)> {
        let Kind::Vxlan(vxlan) = &self.kind else { return None };
        vxlan.drivers.as_ref()?.source_ports()
    }

    /// Notes that the kernel's own path has received frames of a VTEP, which answers no probes.
    pub fn vtep_heard(&self, now_ms: u64) {
        if matches!(self.kind, Kind::Vxlan(_)) {
            self.heard(now_ms);
        }
    }

    /// True if frames may take the wire.
    pub fn is_wire_ready(&self, now_ms: u64) -> bool {
        self.native().is_some_and(|native| native.wire.is_ready(self.heard_ms(), now_ms))
    }

    /// Notes that a trial of the other host has arrived by the wire.
    pub fn wire_tried(&self, now_ms: u64) {
        if let Some(native) = self.native() {
            native.wire.tried(now_ms);
        }
    }

    /// [`Link::is_wire_ready`], if that has changed since the last call.
    pub fn wire_change(&self, now_ms: u64) -> Option<bool> {
        self.native()?.wire.change(self.heard_ms(), now_ms)
    }

    /// Whether the other host takes translated packets of this link.
    pub fn peer_translates(&self) -> bool {
        !self.needs_seal() && self.native().is_some_and(|native| native.wire.translates())
    }

    /// Number of conversations whose packets leave by this link without a tunnel.
    pub fn translated(&self, now_ms: u64) -> usize {
        self.native().map_or(0, |native| native.translations.leased(now_ms).len())
    }

    /// The link's agreements about conversations to translate, if it is native.
    pub(crate) fn translations(&self) -> Option<&Translations> {
        Some(&self.native()?.translations)
    }

    /// Takes the wire as if the other host had just announced that it receives this host's trials.
    #[cfg(test)]
    pub(crate) fn assume_wire(&self, now_ms: u64) {
        let other = WireState::default();
        other.tried(now_ms);
        let said =
            other.announcement(WireTerms { outlive: Duration::ZERO, translates: false }, now_ms).unwrap();
        self.native().unwrap().wire.announced(&said, now_ms);
    }

    /// Whether the link negotiates direct ports.
    ///
    /// # Errors
    /// The reason why it does not.
    pub fn has_direct_ports(&self) -> Result<(), &'static str> {
        match &self.kind {
            // The relay forwards, and NATs map, the link's port only.
            Kind::Native(native) if native.via.is_some() => {
                Err("links with a rendezvous have no direct ports")
            }
            Kind::Native(_) => Ok(()),
            _ => Err("only links of encapsulation native have direct ports"),
        }
    }

    /// Announces these ports of guests to the other host from now on, at most [`DIRECT_MAX`](super::DIRECT_MAX), instead of those
    /// before. Returns true if they differ.
    pub fn offer_direct(&self, offers: Vec<DirectOffer>) -> bool {
        self.native().is_some_and(|native| native.direct.offer(offers))
    }

    /// The ports that this host announces, and whether the other host uses them.
    pub fn direct_offers(&self, now_ms: u64) -> Vec<(DirectPort, DirectState)> {
        self.native().map_or(vec![], |native| native.direct.offered(now_ms))
    }

    /// The ports that the other host announces, and whether frames take them.
    pub fn direct_guests(&self) -> Vec<(DirectPort, bool)> {
        self.native().map_or(vec![], |native| native.direct.followed())
    }

    /// Queues inquiries that arrive on this link in `inbox`. Only the first call has an effect.
    pub fn answer_by(&self, inbox: Arc<Inbox>) {
        if let Some(native) = self.native() {
            native.inquiries.answer_by(inbox);
        }
    }

    /// Sets the name of this host that probes carry as a tag, so that two hosts of the same name notice. Only the first call counts.
    pub fn name_host(&self, host: &str) {
        if let Some(native) = self.native() {
            let _ = native.host_tag.set(NameTag::of(host));
        }
    }

    /// Maximum length in bytes of an inquiry's text on this link.
    ///
    /// # Errors
    /// The link is not native and carries no inquiries.
    pub fn inquiry_text(&self) -> io::Result<usize> {
        let payload = self.for_inquiries()?.payload_of(self.path_mtu());
        Ok(payload.saturating_sub(MAGIC.len()).min(TEXT_MAX))
    }

    fn for_inquiries(&self) -> io::Result<&Native> {
        self.native().ok_or_else(|| unfit("only links of encapsulation native carry questions"))
    }

    /// Creates kernel VXLAN devices for TCP streams in those of `networks` that the link carries. `local` is the source address
    /// of the datagrams, unspecified for any. Has no effect on links of other kinds or when repeated. Takes about 10 ms per
    /// network and VTEP; the link works during that time.
    pub fn open_drivers(&self, local: IpAddr, networks: &[NetworkId]) {
        let Kind::Vxlan(vxlan) = &self.kind else { return };
        let Vxlan { remote, vteps, drivers: Some(drivers) } = &**vxlan else { return };
        let networks = networks.iter().filter(|network| self.carries(**network));
        let wanted = networks.flat_map(|network| {
            let vtep = |(vtep, ip): (u16, &IpAddr)| (*network, vtep, SocketAddr::new(*ip, remote.port()));
            (0..).zip(vteps.addresses()).map(vtep)
        });
        drivers.open(self.name(), local, wanted);
    }

    /// True if TCP streams leave through kernel VXLAN devices; `None` for other kinds of links.
    pub fn has_drivers(&self) -> Option<bool> {
        let Kind::Vxlan(vxlan) = &self.kind else { return None };
        Some(vxlan.drivers.as_ref().is_some_and(|drivers| drivers.get(0).is_some()))
    }
}

impl Courier {
    /// Sends a question or an answer of an [`inquiry`](crate::link::inquiry).
    ///
    /// # Errors
    /// The link's kind carries no inquiries, `text` exceeds [`Link::inquiry_text`], the link has no key, or the kernel refuses.
    pub fn send(&self, link: &Link, is_answer: bool, text: &[u8]) -> io::Result<()> {
        if text.len() > link.inquiry_text()? {
            return Err(unfit("too long for the link's path"));
        }
        let native = link.for_inquiries()?;
        self.inquiry((&link.common, native), is_answer, &[&MAGIC, text].concat())
    }

    /// Announces the wire to the other host of `link`: this host's terms, and whether that host's trials arrive.
    pub fn announce_wire(&self, link: &Link, terms: WireTerms, now_ms: u64) {
        if let Some(native) = link.native() {
            self.wire_announcement((&link.common, native), terms, now_ms);
        }
    }

    /// Offers the other host of `link` conversations to translate, as far as it is time.
    pub fn offer_translations(&self, link: &Link, now_ms: u64) {
        if let Some(native) = link.native() {
            self.translation_offers((&link.common, native), now_ms);
        }
    }

    /// Accepts those offered conversations of the other host of `link` that programs know. `seen`: whether packets with an index have arrived
    /// lately, `None` if programs do not know it; `proved`: translated packets of TCP, and of UDP, arrive.
    pub fn accept_translations(
        &self,
        link: &Link,
        seen: impl Fn(u16, &Conversation) -> Option<bool>,
        proved: [bool; 2],
        now_ms: u64,
    ) {
        if let Some(native) = link.native() {
            self.translation_acceptance((&link.common, native), seen, proved, now_ms);
        }
    }

    /// Announces and tries direct ports of `link` as far as it is time; control calls it after [`Link::offer_direct`], so that the
    /// other host learns at once which ports are gone.
    pub fn negotiate_direct(&self, link: &Link, now_ms: u64) {
        if let Some(native) = link.native() {
            self.direct((&link.common, native), now_ms);
        }
    }
}

impl Monitored for Link {
    fn id(&self) -> u64 {
        self.id
    }

    fn name(&self) -> &str {
        self.common.name()
    }

    fn path(&self) -> &Path {
        &self.path
    }

    fn stats(&self) -> &PortStats {
        self.common.stats()
    }

    fn remote(&self) -> Option<SocketAddr> {
        Link::remote(self)
    }

    fn leaves_by_bridge(&self) -> bool {
        matches!(self.kind, Kind::Native(_) | Kind::Classic(_))
    }

    fn has_group(&self) -> bool {
        self.vteps().is_some_and(|vteps| vteps.group().is_some())
    }

    fn age(&self, now_ms: u64) {
        if let Some(vteps) = self.vteps() {
            vteps.age(now_ms);
        }
    }

    fn is_probed(&self) -> bool {
        self.native().is_some_and(|native| native.place.remote().is_some())
    }

    fn is_sealed(&self) -> bool {
        self.seal().is_some()
    }

    fn clear_state(&self) -> Option<LinkState> {
        let clear = self.seal().is_none() && self.stream().is_none();
        clear.then(|| self.state())
    }

    fn heard_ms(&self) -> Option<u64> {
        self.common.heard_ms()
    }

    fn negotiate(&self, by: &Arc<Socket>, now_ms: u64) {
        Courier::new(by.clone()).negotiate_direct(self, now_ms);
    }

    fn send_probe(&self, by: &Arc<Socket>, id: &[u8; 8], size: Option<u16>) {
        let Some(native) = self.native() else { return };
        let len = size.map_or(0, |size| native.payload_of(size));
        Courier::new(by.clone()).probe((&self.common, native), id, len);
    }
}

#[cfg(test)]
#[path = "link_tests.rs"]
mod tests;
