//! The native part of a link.

use std::sync::{Arc, OnceLock};

use super::direct_ports::{DirectPort, DirectPorts};
use super::reassembly::ReassemblyBudget;
use super::translations::Translations;
use super::wire_state::WireState;
use super::zero_copy_backoff::Trial;
use crate::frame::NetworkId;
use crate::link::common::Common;
use crate::link::inquiry::Inquiries;
use crate::link::path::probe_health::NameTag;
use crate::link::path::state::udp_payload;
use crate::link::rendezvous::hole_punching::PathChoice;
use crate::link::sealed::roaming::RemoteAddress;
use crate::link::sealed::session::Seal;
use crate::link::socket::name::Name;
use crate::link::socket::udp::{Oversize, Socket};
use crate::wire::ethernet::Mac;
use crate::wire::native::{HEADER_LEN, TAG_LEN};
use crate::wire::translation::Conversation;

/// Maximum reassembly memory of one link in bytes.
const BUDGET: usize = 4 << 20;

/// The native part of a link.
#[derive(Debug)]
pub(in crate::link) struct Native {
    /// Address of the other host.
    pub(in crate::link) place: RemoteAddress,
    /// Ports of single guests, of both hosts.
    pub(in crate::link) direct: DirectPorts,
    /// Keys of a sealed link; `None` in clear text.
    pub(in crate::link) seal: Option<Box<Seal>>,
    /// The choice between the relayed and the direct path, for a link with a rendezvous relay.
    pub(in crate::link) via: Option<PathChoice>,
    pub(in crate::link) budget: Arc<ReassemblyBudget>,
    pub(in crate::link) inquiries: Inquiries,
    /// Tag of this host's name in probes.
    pub(in crate::link) host_tag: OnceLock<NameTag>,
    /// Whether the two hosts hear each other's wire.
    pub(in crate::link) wire: WireState,
    /// Conversations that the two hosts translate.
    pub(in crate::link) translations: Translations,
    /// Tracks whether zero copy pays off on the path's device.
    pub(super) zero_copy: Arc<Trial>,
}

impl Native {
    /// A native part for the address in `place`, in clear text. `guests`: those of the other host with configured ports of their own.
    pub(in crate::link) fn new(place: RemoteAddress, guests: &[(Mac, u16)], link: &Common) -> Native {
        Native {
            direct: DirectPorts::new(place.remote(), guests),
            place,
            seal: None,
            via: None,
            budget: Arc::new(ReassemblyBudget::new(BUDGET)),
            inquiries: Inquiries::default(),
            host_tag: OnceLock::new(),
            wire: WireState::default(),
            translations: Translations::new(),
            zero_copy: Trial::new(link.stats.clone()),
        }
    }

    /// Takes a message about translations or direct ports, or a trial that arrived at `port` of this host; false if `probe` is none.
    #[cold]
    pub(super) fn takes_agreement(&self, link: &Common, (probe, port): (&[u8], u16), now_ms: u64) -> bool {
        self.takes_translations(link, probe, now_ms) || self.takes_direct(link, (probe, port), now_ms)
    }

    /// Takes an announcement of direct ports, or a trial that arrived at `port` of this host; false if `probe` is neither.
    fn takes_direct(&self, link: &Common, (probe, port): (&[u8], u16), now_ms: u64) -> bool {
        let may = |guest: &DirectPort| {
            self.via.is_none() && link.carries(guest.network) && link.allows_source(guest.mac)
        };
        let Some(refused) = self.direct.announced(probe, may, now_ms) else {
            return self.direct.tried(probe, port, now_ms);
        };
        link.stats.direct_refused.add(refused);
        true
    }

    /// Takes an offer or an acceptance of translations; false if `probe` is neither.
    fn takes_translations(&self, link: &Common, probe: &[u8], now_ms: u64) -> bool {
        let may = |conversation: &Conversation| {
            self.seal.is_none()
                && self.via.is_none()
                && NetworkId::new(conversation.network).is_some_and(|network| link.carries(network))
                && link.allows_source(conversation.src)
        };
        let Some(refused) = self.translations.offered(probe, may, now_ms) else {
            return self.translations.accepted(probe, now_ms);
        };
        link.stats.translations_refused.add(refused);
        true
    }

    /// Address of the other host's port number `port`, in the form for `socket`; `None` if the socket cannot reach it or the
    /// address is unknown.
    #[inline]
    pub(in crate::link) fn name(&self, port: usize, socket: &Socket) -> Option<Name> {
        self.place.name(port, socket)
    }

    /// True if a probe comes from a host with the same name as this one.
    #[cold]
    pub(super) fn is_from_namesake(&self, probe: &[u8]) -> bool {
        self.host_tag.get().is_some_and(|tag| NameTag::found_in(probe) == Some(*tag))
    }

    /// What becomes of packets larger than the path MTU. On a sealed link only the other host's answers tell what arrives: ICMP is
    /// not authenticated.
    #[inline]
    pub(super) fn oversize(&self) -> Oversize {
        if self.seal.is_some() { Oversize::Probe } else { Oversize::Refuse }
    }

    /// UDP payload in bytes of an IP packet of `size` bytes.
    #[inline]
    pub(in crate::link) fn payload_of(&self, size: u16) -> usize {
        let is_v4 = self.place.remote().is_some_and(|remote| remote.is_ipv4());
        udp_payload(size, is_v4) - HEADER_LEN - if self.seal.is_some() { TAG_LEN } else { 0 }
    }
}
